"""What verifying a parallel plan costs, against one training step of the model on one device.

The models and plans are those of the tests: correct ones, and a wrong one, which runs again to find
out where. Wall-clock seconds, the minimum of several rounds.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from benchmarks.lab.figures import Figure, Report, Table, write
from benchmarks.lab.timing import best, in_turns

from paritas.core.execution.subjects import Inputs
from paritas.sharding.plans.verify import verify_parallel

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from quality.parallel_faults import FAULTS
from quality.parallel_models import Llama, batches
from quality.parallel_plans import RIGHT

STEPS = 2
PLANS = ("tensor parallel", "sequence parallel", "fsdp", "ddp", "by hand", "context parallel")
WRONG = "a dropped all-reduce, forward"


def model_of(case, dtype):
    torch.manual_seed(0)
    return Llama(case.sizes).to(dtype)


def training_step(case, dtype):
    """Seconds of forward, loss, backward and optimizer, warm."""
    model, tokens = model_of(case, dtype), batches(case.sizes)[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step():
        case.loss(model(tokens), tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    return best(step, 5).wall


def verification(case, dtype, ranks):
    """A function without arguments that verifies."""
    model, inputs = model_of(case, dtype), [Inputs([t]) for t in batches(case.sizes)]
    plan, mesh = case.plan, case.mesh
    asked = {"loss": case.loss, "split": case.split, "steps": STEPS, "ranks": ranks}
    return lambda: verify_parallel(model, plan, inputs, mesh, **asked)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--dtype", default="float32", choices=("float64", "float32", "bfloat16"))
    asked = parser.parse_args()
    torch.set_num_threads(1)
    dtype = getattr(torch, asked.dtype)
    names = [f"{plan}, {ranks} ranks" for ranks in asked.ranks for plan in PLANS]
    cases = [case for case in RIGHT if case.name in names]
    cases += [fault.case for fault in FAULTS if fault.case.name == WRONG]
    rows = [measure(case, dtype, asked.rounds) for case in cases]
    columns = ["plan", "one step, s", "simulated, s", "in steps", "gloo, s", "verdict"]
    table = Table(f"{asked.dtype}, {STEPS} steps, one thread for each rank", columns, rows)
    right = [row for row in rows if row[0] != WRONG]
    figures = [
        Figure("a right plan on simulated ranks, most", max(row[2] for row in right), "s"),
        Figure("a right plan on real ranks (gloo), most", max(row[4] for row in right), "s"),
    ]
    write(Report("parallel", figures, [table], what=__doc__))


def measure(case, dtype, rounds):
    """A row of the table."""
    step, statuses = training_step(case, dtype), []

    def work(kind):
        verify = verification(case, dtype, kind)
        return lambda: statuses.append(verify().status)

    works = {kind: work(kind) for kind in ("simulated", "gloo")}
    spent = in_turns(works, rounds, take="least", warm=False)
    assert len(set(statuses)) == 1, (case.name, statuses)
    simulated, real = spent["simulated"].wall, spent["gloo"].wall
    row = [case.name, step, simulated, simulated / step, real, str(statuses[0])]
    print(f"{case.name:<34} {simulated:7.2f} s {real:7.2f} s {statuses[0]}", flush=True)
    return row


if __name__ == "__main__":
    main()
