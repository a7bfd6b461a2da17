"""Right and wrong programs through torch's compiler: `python -m benchmarks.detection.compiled`.

A compile takes seconds, so a run is limited; `--resume` goes on where the last one stopped.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.detection.compiled_measuring import (
    MOST_CALLS_LOCATED,
    compiled_units,
    measured_compiled,
)
from benchmarks.detection.compiled_summing import compiled_report
from benchmarks.detection.journal import conclude, gone_through
from benchmarks.lab.figures import RESULTS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.detection.cases import Unit
    from benchmarks.detection.measuring import Entry

JOURNAL = Path(__file__).parents[2] / ".cache" / "detection" / "compiled.jsonl"
# What `make bench` has for it; the whole takes some hours.
SECONDS = 150.0


def arguments() -> argparse.Namespace:
    description = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.detection.compiled", description=description
    )
    parser.add_argument("--seconds", type=float, default=SECONDS, help="begin none after them")
    parser.add_argument("--resume", action="store_true", help="go on where a run was broken off")
    parser.add_argument("--journal", type=Path, default=JOURNAL, help="its path")
    parser.add_argument("--folder", type=Path, default=RESULTS, help="of the file of results")
    parser.add_argument("--no-file", action="store_true", help="leave the file as it is")
    return parser.parse_args()


def main() -> None:
    """Measure, journal, sum up."""
    asked = arguments()
    until = time.monotonic() + asked.seconds

    def work(todo: list[Unit]) -> Iterator[Entry]:
        for unit in todo:
            if time.monotonic() >= until:
                return
            yield measured_compiled(unit)

    units = compiled_units()
    entries = gone_through(units, work, asked.journal, resume=asked.resume, every=5)
    outcomes = [one for entry in entries for one in entry.outcomes]
    told = compiled_report(outcomes, MOST_CALLS_LOCATED)
    progress = f": {len(entries)} of {len(units)} programs"
    conclude(told, entries, None if asked.no_file else asked.folder, progress)


if __name__ == "__main__":
    main()
