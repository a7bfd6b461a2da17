"""The memory of verifying a parallel plan: as a whole, and by blocks.

Tensor parallel on 4 simulated ranks, a transformer of 0.8M parameters a layer in float32, one step.
The peak of the process's own memory on top of what was there before, each in a process of its own;
the ratio is of two measurements of one run. The model itself is shown beside it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import torch
from benchmarks.lab.figures import Figure, Report, Table, write
from benchmarks.lab.memory import resident_peak

from paritas.core.execution.subjects import Inputs
from paritas.sharding.plans.verify import verify_parallel

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from quality.parallel_models import Llama, Sizes, batches
from quality.parallel_plans import RIGHT

LAYERS = (4, 8, 16)
RANKS = 4
MIB = 2**20
LARGEST = LAYERS[-1]


def peak(layers: int, by: str) -> dict[str, float]:
    """MiB of one check, and of the model; seconds of the processor."""
    case = next(case for case in RIGHT if case.name == "tensor parallel, 2 ranks")
    (axis,) = case.mesh
    sizes = Sizes(dim=256, heads=8, kv_heads=8, hidden=704, layers=layers)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model, inputs = Llama(sizes), [Inputs([tokens]) for tokens in batches(sizes)]

    def check(these: Llama, way: str) -> None:
        verdict = verify_parallel(
            these, case.plan, inputs, {axis: RANKS}, loss=case.loss, split=case.split, steps=1,
            timeout=900, by=way,
        )  # fmt: skip
        assert verdict.passed, str(verdict)
        by_blocks = any(note.startswith("checked by blocks") for note in verdict.notes)
        assert by_blocks == (way == "blocks"), verdict.notes

    # What a first check imports is not memory of the second.
    check(Llama(Sizes(heads=8, kv_heads=8)), by)
    began = time.process_time()
    used = resident_peak(lambda: check(model, by), warm=False)
    spent = time.process_time() - began
    own = sum(one.nbytes for one in model.parameters())
    return {"peak": used / MIB, "model": own / MIB, "time": spent}


def measured(layers: int, by: str) -> dict[str, float]:
    """The same in a process of its own."""
    call = [sys.executable, "-m", "benchmarks.bench_parallel_blocks", str(layers), by]
    found = subprocess.run(call, check=True, capture_output=True, text=True)
    values: dict[str, float] = json.loads(found.stdout.splitlines()[-1])
    return values


def main() -> None:
    """Measure every size both ways."""
    rows, ratios = [], {}
    for layers in LAYERS:
        whole, blocks = measured(layers, "whole"), measured(layers, "blocks")
        ratios[layers] = whole["peak"] / blocks["peak"]
        spent = [whole["time"], blocks["time"]]
        rows.append([layers, whole["model"], whole["peak"], blocks["peak"], ratios[layers], *spent])
        print(rows[-1], flush=True)
    growth = (rows[-1][3] - rows[0][3]) / (rows[-1][1] - rows[0][1])
    figures = [
        Figure(
            f"peak memory, {LARGEST} layers x {RANKS} ranks, whole over blocks",
            ratios[LARGEST],
            "x",
            note=f"{rows[-1][2]:.0f} and {rows[-1][3]:.0f} MiB",
        ),
        Figure("by blocks: further memory for each further byte of the model", growth, "x"),
    ]
    columns = [
        *("layers", "model, MiB", "whole, MiB", "by blocks, MiB", "whole over blocks"),
        *("whole, processor s", "by blocks, processor s"),
    ]
    write(Report("parallel_blocks", figures, [Table("Each size", columns, rows)], what=__doc__))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(peak(int(sys.argv[1]), sys.argv[2])))
    else:
        main()
