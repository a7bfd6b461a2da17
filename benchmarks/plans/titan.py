"""All plans as torchtitan writes them, and all mistakes in them: one line for each, then counts.

PYTHONPATH=src:tests python benchmarks/plans/titan.py
"""

from __future__ import annotations

import time
import warnings

from quality import titan_plans
from quality.titan_further import NOT_ON_A_CPU, RIGHT_FURTHER
from quality.titan_mistakes import MISTAKES, is_named

RIGHT = [*titan_plans.RIGHT, *RIGHT_FURTHER]


def main() -> None:
    warnings.simplefilter("ignore")
    silent = found = named = 0
    for run in RIGHT:
        began = time.process_time()
        verdict = run.verdict()
        silent += verdict.passed
        print(f"right: {run}: {verdict.status.value}, {time.process_time() - began:.1f} s")
    for run, _ in NOT_ON_A_CPU:
        print(f"not on a CPU: {run}: {run.verdict().status.value}")
    for mistake in MISTAKES:
        began = time.process_time()
        verdict = mistake.run.verdict()
        seen = verdict.status.value in {"different", "degraded"}
        found += seen
        named += seen and is_named(mistake, verdict)
        words = "named" if seen and is_named(mistake, verdict) else verdict.status.value
        print(f"mistake: {mistake}: {words}, {time.process_time() - began:.1f} s")
    print(f"right plans silent: {silent} of {len(RIGHT)}")
    print(f"mistakes found: {found}, with place and cause: {named}, of {len(MISTAKES)}")


if __name__ == "__main__":
    main()
