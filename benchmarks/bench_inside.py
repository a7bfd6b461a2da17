"""What precision lost inside of a fused operator is caught: degraded kernels against honest ones.

Each operator of torch is the reference, in bfloat16 and float16, on inputs of several kinds.
Candidates compute it by its definition in float32 and round the result once. Honest ones differ in
how they sum (two passes, Welford, pieces, online) or round what kernels in use round, as flash
attention its weights. In degraded ones a single value inside is rounded, or its gradient: so
coarsely that the error of an output or a gradient is 3, 5, 10 or 30 times that of honest ones (the
larger one of the reference and the first form; at least one rounding). Where no rounding gives that
error there is no case. Honest forms must pass. An error of 3 times is near the limit: twice the
error of the reference passes by design.

By default bfloat16 alone, in the first kind of inputs; `BENCH_WHOLE=1` for all of it. `--resume`
goes on where a run was broken off, `--seconds` begins no case after them, `--compiled` judges
Inductor's code for the same operators, too.
"""

from __future__ import annotations

import argparse
import math
import os
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from benchmarks.inside.measuring import (
    RATIOS,
    Case,
    Outcome,
    cases,
    degraded_outcomes,
    honest_outcomes,
)
from benchmarks.lab.figures import Figure, Report, Table, line, write

if TYPE_CHECKING:
    from collections.abc import Callable

WHOLE = os.environ.get("BENCH_WHOLE") == "1"
JOURNAL = Path(__file__).parents[1] / ".cache" / "inside.jsonl"


def main() -> None:
    """Measure, journal, sum up."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_inside")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--seconds", type=float, default=math.inf)
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--no-file", action="store_true")
    asked = parser.parse_args()
    warnings.filterwarnings("ignore")
    JOURNAL.parent.mkdir(parents=True, exist_ok=True)
    if not asked.resume:
        JOURNAL.unlink(missing_ok=True)
    known = _journal()
    wanted = cases() if WHOLE else [one for one in cases(dtypes=("bfloat16",)) if _is_first(one)]
    until = time.monotonic() + asked.seconds
    with JOURNAL.open("ab") as lines:
        for case in wanted:
            if case in known or time.monotonic() > until:
                continue
            further = _compiled(case) if asked.compiled else {}
            known[case] = [*honest_outcomes(case, further), *degraded_outcomes(case)]
            lines.write(msgspec.json.encode(known[case]) + b"\n")
            lines.flush()
            print(case, _caught(known[case]), flush=True)
    report = _report([known[case] for case in wanted if case in known])
    if asked.no_file or not WHOLE:
        print("\n".join(map(line, report.figures)))
    else:
        write(report)


def _is_first(case: Case) -> bool:
    return case.regime == case.fused.regimes[0]


def _journal() -> dict[Case, list[Outcome]]:
    if not JOURNAL.exists():
        return {}
    read = [
        msgspec.json.decode(text, type=list[Outcome]) for text in JOURNAL.read_bytes().splitlines()
    ]
    return {outcomes[0].case: outcomes for outcomes in read}


def _compiled(case: Case) -> dict[str, Callable[..., Any]]:
    torch.compiler.reset()
    return {"Inductor": torch.compile(case.fused.reference)}


def _counts(outcomes: list[Outcome], ratio: float) -> tuple[int, int]:
    these = [one for one in outcomes if one.ratio == ratio]
    return sum(not one.passed for one in these), len(these)


def _caught(outcomes: list[Outcome]) -> list[str]:
    pairs = [_counts(outcomes, ratio) for ratio in RATIOS]
    return [f"{caught} of {count}" if count else "" for caught, count in pairs]


def _passing(outcomes: list[Outcome]) -> str:
    alarms, count = _counts(outcomes, 0.0)
    return f"{count - alarms} of {count}"


def _report(measured: list[list[Outcome]]) -> Report:
    every = [one for outcomes in measured for one in outcomes]
    alarms, honest = _counts(every, 0.0)
    figures = [
        Figure("honest forms refused", alarms, "", 0.0, note=f"of {honest}"),
        *(
            Figure(
                f"caught at {ratio} times the honest error",
                100 * caught / count if count else None,
                "%",
                None if ratio == RATIOS[0] else 100.0,
                "higher",
                note=f"{caught} of {count}",
            )
            for ratio in RATIOS
            for caught, count in [_counts(every, ratio)]
        ),
    ]
    rows = [
        [
            str(outcomes[0].case),
            _passing(outcomes),
            *_caught(outcomes),
            "; ".join(
                f"{one.form}, {one.ratio:.0f}"
                for one in outcomes
                if one.passed and one.ratio > RATIOS[0]
            ),
        ]
        for outcomes in measured
    ]
    columns = ["operator", "honest forms pass", *(f"caught at {ratio}" for ratio in RATIOS)]
    table = Table("By operator and inputs", [*columns, "missed from 5 on"], rows)
    return Report("inside", figures, [table], what=(__doc__ or "").strip())


if __name__ == "__main__":
    main()
