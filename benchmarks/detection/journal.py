"""What a run has done, one line for each program, so that the next can go on from there."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

import msgspec
from benchmarks.detection.measuring import Entry
from benchmarks.lab.figures import line, write

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from benchmarks.detection.cases import Unit
    from benchmarks.lab.figures import Report


def read_journal(path: Path) -> list[Entry]:
    """What a run left; a line that was cut off is not there."""
    if not path.exists():
        return []
    entries = []
    for text in path.read_bytes().splitlines():
        try:
            entries.append(msgspec.json.decode(text, type=Entry))
        except msgspec.DecodeError:
            print(f"  a line of {path.name} cannot be read and is left out", file=sys.stderr)
    return entries


def gone_through(
    wanted: list[Unit],
    work: Callable[[list[Unit]], Iterator[Entry]],
    path: Path,
    *,
    resume: bool,
    every: int = 20,
) -> list[Entry]:
    """Every unit that is done, in their order: those of the journal, and those of `work`.

    Args:
        wanted: the units.
        work: yields the entries of those that are left, as they are done; it may stop early.
        path: of the journal.
        resume: whether to go on where a run was broken off, or to begin anew.
        every: tell how far it is after so many.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if not resume:
        path.unlink(missing_ok=True)
    done = {entry.unit: entry for entry in read_journal(path) if entry.unit in set(wanted)}
    todo = [unit for unit in wanted if unit not in done]
    began = time.monotonic()
    with path.open("ab") as lines:
        for count, entry in enumerate(work(todo), 1):
            done[entry.unit] = entry
            lines.write(msgspec.json.encode(entry) + b"\n")
            lines.flush()
            if entry.error:
                print(f"  {entry.unit}: {entry.error}", file=sys.stderr)
            if count % every == 0 or count == len(todo):
                spent = time.monotonic() - began
                print(f"  {count} of {len(todo)} programs, {spent:.0f} s", file=sys.stderr)
    return [done[unit] for unit in wanted if unit in done]


def conclude(
    measured: Report, entries: list[Entry], folder: Path | None, progress: str = ""
) -> None:
    """Write the file of results, or print the figures if there is no folder for it.

    Exits with a message if a program could not be measured.
    """
    if folder is None:
        print("\n".join(map(line, measured.figures)))
    else:
        path = write(measured, folder)
        print(f"wrote {path.parent.name}/{path.name}{progress}")
    broken = sum(bool(entry.error) for entry in entries)
    if broken:
        sys.exit(f"{broken} of {len(entries)} programs could not be measured: see above")
