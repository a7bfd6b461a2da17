"""Faults and benign rewrites under every rule: `python -m benchmarks.detection`."""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import math
import multiprocessing
import time
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.detection.cases import HALVES, Unit, units
from benchmarks.detection.journal import conclude, gone_through
from benchmarks.detection.measuring import Entry, measured_before
from benchmarks.detection.programs import DTYPES, EVERY_DTYPE, TF32, names
from benchmarks.detection.summing import report
from benchmarks.lab.figures import RESULTS

if TYPE_CHECKING:
    from collections.abc import Iterator

JOURNAL = Path(__file__).parents[2] / ".cache" / "detection"


def results(todo: list[Unit], jobs: int, until: float) -> Iterator[Entry]:
    """Entries as they are done; after a time, none is begun."""
    work = functools.partial(measured_before, until)
    if jobs == 1:
        yield from filter(None, map(work, todo))
        return
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(jobs, mp_context=context) as pool:
        waiting = [pool.submit(work, unit) for unit in todo]
        for done in concurrent.futures.as_completed(waiting):
            if entry := done.result():
                yield entry


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.detection", description=__doc__)
    parser.add_argument("--share", type=float, default=1.0, help="of the programs, drawn")
    parser.add_argument("--dtype", action="append", choices=EVERY_DTYPE, help="may be repeated")
    parser.add_argument("--half", action="append", choices=list(HALVES), help="may be repeated")
    parser.add_argument("--program", action="append", choices=names(), metavar="NAME")
    parser.add_argument(
        "--seeds", type=int, nargs=2, metavar=("FROM", "TO"), help="TO not included"
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin none after them")
    parser.add_argument("--resume", action="store_true", help="go on where a run was broken off")
    parser.add_argument("--journal", default="journal", help="its name, below .cache/detection")
    parser.add_argument("--script", default="detection", help="name of the file of results")
    parser.add_argument("--folder", type=Path, default=RESULTS, help="of the file of results")
    parser.add_argument("--no-file", action="store_true", help="leave the file as it is")
    asked = parser.parse_args()
    if TF32 in (asked.dtype or ()) and asked.device == "cpu":
        parser.error(f"{TF32} is a way of CUDA devices: ask for it with --device cuda")
    return asked


def main() -> None:
    """Measure, journal, sum up."""
    asked = arguments()
    wanted = units(
        halves=asked.half or list(HALVES),
        dtypes=asked.dtype or DTYPES,
        device=asked.device,
        share=asked.share,
        only=asked.program or (),
        seeds=range(*asked.seeds or (0,)),
    )
    until = time.monotonic() + asked.seconds
    entries = gone_through(
        wanted,
        lambda todo: results(todo, asked.jobs, until),
        JOURNAL / f"{asked.journal}.jsonl",
        resume=asked.resume,
    )
    told = report([one for entry in entries for one in entry.outcomes], asked.script)
    conclude(told, entries, None if asked.no_file else asked.folder)


if __name__ == "__main__":
    main()
