"""All plans as torchtitan writes them, and all mistakes in them: one line for each, then counts.

PYTHONPATH=src:tests python benchmarks/plans/titan.py [whole|blocks]
"""

from __future__ import annotations

import collections
import sys
import time
import warnings
from typing import TYPE_CHECKING

from quality import titan_plans
from quality.titan_further import NOT_ON_A_CPU, RIGHT_FURTHER
from quality.titan_mistakes import MISTAKES, is_named

if TYPE_CHECKING:
    from paritas.core.results.findings import Verdict

RIGHT = [*titan_plans.RIGHT, *RIGHT_FURTHER]


def main(by: str = "whole") -> None:
    warnings.simplefilter("ignore")
    silent = found = named = 0
    ways = collections.Counter[str]()
    for run in RIGHT:
        began = time.process_time()
        verdict = run.verdict(by=by)
        silent += verdict.passed
        way = _way(verdict)
        ways[way] += 1
        took = time.process_time() - began
        print(f"right: {run}: {verdict.status.value}, {took:.1f} s{way}", flush=True)
        if not verdict.passed:
            print(verdict)
    for run, _ in NOT_ON_A_CPU:
        print(f"not on a CPU: {run}: {run.verdict(by=by).status.value}", flush=True)
    for mistake in MISTAKES:
        began = time.process_time()
        verdict = mistake.run.verdict(by=by)
        seen = verdict.status.value in {"different", "degraded"}
        right = seen and is_named(mistake, verdict)
        found, named = found + seen, named + right
        took = time.process_time() - began
        words = "named" if right else verdict.status.value
        print(f"mistake: {mistake}: {words}, {took:.1f} s{_way(verdict)}", flush=True)
    print(f"right plans silent: {silent} of {len(RIGHT)}{dict(ways) if by == 'blocks' else ''}")
    print(f"mistakes found: {found}, with place and cause: {named}, of {len(MISTAKES)}")


def _way(verdict: Verdict) -> str:
    """How a plan was checked that was to be checked by blocks."""
    notes = [note for note in verdict.notes if note.startswith("checked ")]
    return f" ({notes[0].partition(':')[0]})" if notes else ""


if __name__ == "__main__":
    main(*sys.argv[1:])
