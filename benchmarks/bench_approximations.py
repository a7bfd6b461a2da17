"""Whether an approximation passes `verify` and a wrong parameter does not.

Each program is a reference and a candidate that computes it in another way: as accurately as
float32, or with a parameter that is wrong by anything from half of it to a few roundings. What a
program is was written down before it was run. `invisible` are numbers that round to the same
float32, or whose effect is far below a rounding of bfloat16: whether these pass is only reported.
The time limits of the search are lifted, so that a slow machine changes nothing.

`--resume` goes on where a run was broken off, `--seconds` begins no program after them, `--only`
runs the programs whose name contains it, without a file.
"""

from __future__ import annotations

import argparse
import collections
import math
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch
from benchmarks.approximating import honest, wrong
from benchmarks.lab.figures import Figure, Report, Table, line, write

import paritas
from paritas.verification import approximations

if TYPE_CHECKING:
    from benchmarks.approximating.programs import Program

JOURNAL = Path(__file__).parents[1] / ".cache" / "approximations.jsonl"
CONFIG = paritas.VerifyConfig(
    raise_on_mismatch=False, verify_second_call=False, locate_seconds=600.0
)
APPROXIMATION, WRONG, INVISIBLE = "approximation", "wrong parameter", "invisible"


class Outcome(msgspec.Struct, frozen=True):
    """What `verify` said about one program."""

    program: str
    label: str
    status: str
    passed: bool
    why: str
    seconds: float


def judge(program: Program) -> Outcome:
    """The verdict on one program."""
    began = time.process_time()
    torch.compiler.reset()
    verdict = paritas.verify(program.arguments(), *program.sides(), CONFIG)
    said = [finding.reason for finding in verdict.failures] or [
        finding.reason for finding in verdict.findings
    ]
    said += [note for note in verdict.notes if "approximation" in note or "not beyond" in note]
    return Outcome(
        str(program),
        program.label,
        str(verdict.status.value),
        verdict.passed,
        "; ".join(dict.fromkeys(said)),
        time.process_time() - began,
    )


def main() -> None:
    """Measure, journal, sum up."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_approximations")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--seconds", type=float, default=math.inf)
    parser.add_argument("--only", default="")
    asked = parser.parse_args()
    warnings.filterwarnings("ignore")
    approximations.MOST_SECONDS = 600.0
    JOURNAL.parent.mkdir(parents=True, exist_ok=True)
    if not asked.resume and not asked.only:
        JOURNAL.unlink(missing_ok=True)
    every = [*wrong.programs(), *honest.programs()]
    if asked.only:
        for program in every:
            if asked.only in str(program):
                print(judge(program), flush=True)
        return
    known = _journal()
    until = time.monotonic() + asked.seconds
    with JOURNAL.open("ab") as lines:
        for program in every:
            if str(program) in known or time.monotonic() > until:
                continue
            known[str(program)] = outcome = judge(program)
            lines.write(msgspec.json.encode(outcome) + b"\n")
            lines.flush()
            print(f"{outcome.label}, {outcome.status}: {outcome.program}", flush=True)
    report = _report([known[str(program)] for program in every if str(program) in known])
    if len(known) < len(every):
        print("\n".join(map(line, report.figures)))
    else:
        write(report)


def _journal() -> dict[str, Outcome]:
    if not JOURNAL.exists():
        return {}
    read = [msgspec.json.decode(text, type=Outcome) for text in JOURNAL.read_bytes().splitlines()]
    return {outcome.program: outcome for outcome in read}


def _report(outcomes: list[Outcome]) -> Report:
    counts = collections.Counter((one.label, one.passed) for one in outcomes)
    total = collections.Counter(one.label for one in outcomes)
    figures = [
        Figure(
            "wrong parameters that pass", counts[WRONG, True], "", 0.0, note=f"of {total[WRONG]}"
        ),
        Figure(
            "approximations that are called different",
            counts[APPROXIMATION, False],
            "",
            0.0,
            note=f"of {total[APPROXIMATION]}",
        ),
        Figure(
            "invisible ones that pass", counts[INVISIBLE, True], "", note=f"of {total[INVISIBLE]}"
        ),
    ]
    missed = [
        one for one in outcomes if one.label != INVISIBLE and one.passed == (one.label == WRONG)
    ]
    rows: list[list[str | int | float | None]] = [
        [one.label, one.program, one.status, one.why[:160]] for one in missed
    ]
    columns = ["what it is", "program", "status", "why"]
    tables = [Table("Called something else", columns, rows)] if rows else []
    return Report("approximations", figures, tables, what=(__doc__ or "").strip())


if __name__ == "__main__":
    main()
