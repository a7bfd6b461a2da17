"""How the cost of verifying a parallel plan grows with layers and ranks.

Tensor parallel on simulated ranks, a small transformer in float32, two steps, one thread. Processor
seconds of a second check in the same process, divided by the number of layers and of ranks. All
ranks are compared with the same runs on one device, natively and in float64. The bar is for 16
layers on 8 ranks against 4 layers on 2.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from benchmarks.lab.figures import Figure, Report, Table, write

from paritas.core.execution.subjects import Inputs
from paritas.sharding.plans.verify import verify_parallel

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from quality.parallel_models import Llama, Sizes, batches
from quality.parallel_plans import RIGHT

SIZES = ((4, 2), (16, 2), (4, 8), (16, 8))
SMALL, LARGE = SIZES[0], SIZES[-1]


def seconds(layers: int, ranks: int) -> float:
    """Processor seconds of the second check."""
    case = next(case for case in RIGHT if case.name == "tensor parallel, 2 ranks")
    (axis,) = case.mesh
    sizes = Sizes(dim=64, heads=8, kv_heads=8, hidden=96, layers=layers)
    torch.manual_seed(0)
    model, inputs = Llama(sizes), [Inputs([tokens]) for tokens in batches(sizes)]
    spent = 0.0
    for _ in range(2):
        began = time.process_time()
        verdict = verify_parallel(
            model, case.plan, inputs, {axis: ranks}, loss=case.loss, split=case.split, timeout=900
        )
        spent = time.process_time() - began
        assert verdict.passed, str(verdict)
    return spent


def main() -> None:
    """Measure every size."""
    torch.set_num_threads(1)
    spent = {size: seconds(*size) for size in SIZES}
    each = {size: took / size[0] / size[1] for size, took in spent.items()}
    rows = [[*size, spent[size], each[size]] for size in SIZES]
    note = f"{spent[LARGE]:.1f} s and {spent[SMALL]:.1f} s in all"
    figure = Figure(
        "for a layer and a rank, 16 x 8 over 4 x 2", each[LARGE] / each[SMALL], "x", 4.0, note=note
    )
    columns = ["layers", "ranks", "processor time, s", "for a layer and a rank, s"]
    tables = [Table("Each size", columns, rows)]
    write(Report("parallel_growth", [figure], tables, what=__doc__))


if __name__ == "__main__":
    main()
