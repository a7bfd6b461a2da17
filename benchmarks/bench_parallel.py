"""What verifying a parallel plan costs, against one training step of the model on one device.

The models and plans are those of the tests, right ones and one that is wrong, which is run again to
find out where. Wall-clock seconds, least of several rounds.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch

from paritas.checking.config import Inputs
from paritas.partition.plans.verifying import verify_parallel

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


def seconds_of(work, rounds):
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        found = work()
        times.append(time.perf_counter() - start)
    return min(times), found


def training_step(case, dtype):
    """Seconds of forward, loss, backward and optimizer, warm."""
    model, tokens = model_of(case, dtype), batches(case.sizes)[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step():
        case.loss(model(tokens), tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    return seconds_of(step, 5)[0]


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
    print(f"seconds, {asked.dtype}, {STEPS} steps, one thread for each rank")
    print(f"{'plan':<34} {'one step':>9} {'simulated':>10} {'in steps':>9} {'gloo':>7}  verdict")
    for case in cases:
        step = training_step(case, dtype)
        simulated, verdict = seconds_of(verification(case, dtype, "simulated"), asked.rounds)
        real, other = seconds_of(verification(case, dtype, "gloo"), asked.rounds)
        assert verdict.status is other.status, case.name
        figures = f"{step:9.4f} {simulated:10.2f} {simulated / step:9.0f} {real:7.2f}"
        print(f"{case.name:<34} {figures}  {verdict.status}", flush=True)


if __name__ == "__main__":
    main()
