"""Rate KernelBench's tasks: what do they accept, and which faults do their inputs show?

    python -m benchmarks.kernels.tasks OUT.jsonl --kernelbench KernelBench/level1 KernelBench/level2
    python -m benchmarks.kernels.tasks OUT.jsonl --summary

The folders are those of ScalingIntelligence/KernelBench; they are read and not kept. Sizes are made
small. Rows that OUT has already are not run again. Beside the rating stands what KernelBench's own
rule (allclose with 1e-2, on the given inputs) accepts.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import json
import tempfile
import time
from pathlib import Path

import torch
from benchmarks.kernels.published import shrunk
from benchmarks.kernels.rows import add_row, forked, half
from benchmarks.lab.journals import read_rows

from paritas.core.errors import ParitasError, UsageError
from paritas.core.execution.observation import input_tensors
from paritas.kernels.cases import CaseMaker
from paritas.kernels.references import TRIVIAL, JudgedCase, KernelTask, RefusedCase, rate_task
from paritas.kernels.rows import CaseFamily
from paritas.kernels.sides import load_side, parse_side
from paritas.mutants.power import power

# Elements of inputs that take no more than seconds, whatever is done with them.
QUICK = 1 << 14
SIZES, LARGER_SIZES, MATRIX_SIZES = (16, 8, 24, 32), (64, 48), (1024,)
OTHERS = (CaseFamily.VALUES, CaseFamily.SIZES)


def rated(source, asked):
    """The row of a task; one that accepts something trivial is rated at larger sizes, too.

    Normalising groups of one element gives zeros, and a small size makes such groups.
    """
    row = rated_at(source, asked, SIZES)
    if row.get("accepts"):
        larger = rated_at(source, asked, MATRIX_SIZES if row["dims"] <= 2 else LARGER_SIZES)
        row = larger if len(larger.get("accepts", row["accepts"])) < len(row["accepts"]) else row
    return row


def rated_at(source, asked, sizes):
    torch.set_grad_enabled(False)
    task = smallest_task(source, sizes)
    maker = CaseMaker(task.given[0], task.again(0), has_weights=False, has_modes=False, seed=0)
    families = maker.all_families()
    cases = accepted(task, families[CaseFamily.GIVEN], 2)
    if not cases:
        return {"status": "refused"}
    given = rate_task(cases)
    more = [*cases, *(one for name in OTHERS for one in accepted(task, families[name], 4))]
    whole = rate_task(more)
    report = power(
        cases[0].case.inputs,
        cases[0].run.subject.call,
        faults=asked.faults,
        seconds=asked.seconds / 4,
        gradients=False,
        seed=0,
    )
    return {
        "status": "rated",
        "given_accepts": list(given.given_accepts),
        "accepts": list(whole.accepts),
        "allclose": by_allclose(cases),
        "planted": len(report.judged) + len(report.silent),
        "silent": len(report.silent),
        "caught": sum(one.is_caught() for one in report.judged),
        "inputs": cases[0].case.shapes,
        "dims": max(one.dim() for _, one in input_tensors(cases[0].case.inputs)),
    }


def smallest_task(source, sizes):
    """The task at the first size at which it runs, or at a smaller one if that is slow."""
    found = None
    for largest in sizes:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, f"the_task_{largest}.py")
            file.write_text(shrunk(source, largest))
            side = load_side(parse_side(file, "TASK"), is_candidate=False)
        if found is not None and largest > found[0]:
            break
        try:
            task = KernelTask(side, None, device="cpu", seed=0)
            side.construct(*task.init, 0)(*task.given[0].args)
        except (RuntimeError, ValueError, IndexError, ParitasError):
            continue
        found = largest, task
        if sum(one.numel() for _, one in input_tensors(task.given[0])) <= QUICK:
            break
    if found is None:
        raise UsageError("the task does not run at a small size")
    return found[1]


def accepted(task, cases, count):
    found = []
    for case in itertools.islice(cases, 2 * count):
        try:
            found.append(JudgedCase(case, task.run(case, gradients=False)))
        except RefusedCase:
            continue
        if len(found) == count:
            break
    return found


def by_allclose(cases):
    """The trivial candidates that pass on all given inputs with a tolerance of 1e-2."""
    return [
        name
        for name, make in TRIVIAL.items()
        if all(passes(make, one, cases[0]) for one in cases[-1:])
    ]


def passes(make, judged, first):
    for item, value in judged.run.native.outputs.items():
        made = make(value, item, judged, first) if isinstance(value, torch.Tensor) else None
        if made is None or made.shape != value.shape:
            return False
        if not torch.allclose(value.double(), made.double(), 1e-2, 1e-2):
            return False
    return True


def run(asked):
    done = {row["task"] for row in read_rows(asked.out)}
    until = time.monotonic() + asked.minutes * 60
    for file in sorted(one for folder in asked.kernelbench for one in folder.glob("*.py")):
        name = f"{file.parent.name}/{file.stem}"
        if name in done or time.monotonic() > until:
            continue
        row = forked(lambda file=file: rated(file.read_text(), asked), asked.seconds)
        add_row(asked.out, {"task": name, "half": half(name), **row})


def summarize(asked):
    rows = read_rows(asked.out)
    print(len(rows), dict(collections.Counter(row["status"] for row in rows)))
    some = [row for row in rows if row["status"] == "rated"]
    for key in ("allclose", "given_accepts", "accepts"):
        names = [row["task"] for row in some if row[key]]
        zeros = sum("zeros" in row[key] for row in some)
        print(f"{key}: {len(names)} of {len(some)} accept something, {zeros} zeros:", names)
    planted, silent = sum(row["planted"] for row in some), sum(row["silent"] for row in some)
    caught = sum(row["caught"] for row in some)
    print(f"faults: {planted} planted, {caught} shown, {silent} change nothing on these inputs")
    weak = sorted(some, key=lambda row: row["caught"] / max(row["planted"], 1))
    print("least power:", [(row["task"], row["caught"], row["planted"]) for row in weak[:15]])
    for row in rows:
        if row["status"] != "rated":
            print(json.dumps(row)[:400])


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--kernelbench", nargs="+", type=Path, default=[])
    parser.add_argument("--faults", type=int, default=16)
    parser.add_argument("--seconds", type=int, default=120, help="time limit of one task")
    parser.add_argument("--minutes", type=float, default=600.0, help="begin no task after this")
    parser.add_argument("--summary", action="store_true")
    asked = parser.parse_args()
    summarize(asked) if asked.summary else run(asked)


if __name__ == "__main__":
    main()
