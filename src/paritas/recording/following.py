"""The index of one rank of a dump, read as it grows; and which of its files can be freed."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

import msgspec

from paritas.dumps.folders import INDEX, volumes_of
from paritas.dumps.foreign.ge_headers import read_header
from paritas.dumps.index import LONGEST_LINE
from paritas.dumps.records import Record
from paritas.dumps.validating import check_record
from paritas.errors import UsageError

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from paritas.dumps.records import Header, Payload

__all__ = ["Follower", "freeable", "note_use", "see_onto_disk"]

_DATA = re.compile(r"data-(\d{4,})\.safetensors")


class Follower:
    """Gives each record of a rank once, as soon as its line in the index is whole.

    A line is written after what it points to. So there is nothing to wait for, nothing half
    written to be met, and no need to stop the program.

    Attributes:
        problems: lines that are no records.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        """`folder` is that of the rank."""
        self.problems: list[str] = []
        self._folder = folder
        self._rank = rank
        self._read: dict[Path, int] = {}
        self._decoder = msgspec.json.Decoder(Record)

    def new_records(self) -> Iterator[Record]:
        """What came since the last time."""
        for volume in volumes_of(self._folder):
            yield from self._lines(volume / INDEX)

    def _lines(self, index: Path) -> Iterator[Record]:
        try:
            file = index.open("rb")
        except OSError:  # not there yet, or not any more: a step that the ring let go
            return
        with file:
            file.seek(self._read.get(index, 0))
            while True:
                line = file.readline(LONGEST_LINE)
                if not line.endswith(b"\n"):
                    return
                place = self._read.get(index, 0)
                # Counted before it is handed out: one that fails is not met again.
                self._read[index] = place + len(line)
                try:
                    record = self._decoder.decode(line)
                    check_record(record, self._rank)
                except (
                    msgspec.DecodeError,
                    UnicodeDecodeError,
                    RecursionError,
                    UsageError,
                ) as error:
                    self.problems.append(f"{index}, byte {place}: {error}")
                    continue
                yield record


def freeable(
    root: Path, header: Header, used: Mapping[str, int], newest: dict[str, int]
) -> list[Path]:
    """The files of a rank that nobody needs once what they hold is elsewhere.

    Found by looking, never by what an index says alone: that may name any file of the machine.

    Args:
        used: files that the index points to, and how many records of each are converted; all are
            that the index has of it.
        newest: for each folder, the number of the last data file in use. While the program runs,
            only those before it are finished: it is the index that must have gone on to the next,
            for a file is begun before the line of the record that it is begun for.
    """
    if header.layout == "msit":
        # A file is there once it is whole, and the program does without those that are gone.
        tree = root / f"worldsize{header.world_size}_global_rank{header.rank}"
        return [path for path in tree.rglob("*.npy") if path.relative_to(root).as_posix() in used]
    if header.layout in ("ge", "ge-7.1.0"):
        # The file of a call is there before its lines are: all its tensors have to be converted.
        found = (path for path in root.rglob("*") if path.relative_to(root).as_posix() in used)
        return [path for path in found if _count(path) == used[path.relative_to(root).as_posix()]]
    files = []
    for path in (root / f"rank{header.rank}").rglob("data-*.safetensors"):
        number, name = _DATA.fullmatch(path.name), path.relative_to(root).as_posix()
        if number is None or name not in used:
            continue
        older = int(number[1]) < newest.get(name.rpartition("/")[0], 0)
        if header.closed or (older and path.stat().st_size):
            files.append(path)
    return files


def _count(path: Path) -> int:
    """How many tensors a file of Ascend's graph engine holds; -1 where it is none."""
    try:
        return len(read_header(path).tensors)
    except (UsageError, OSError):
        return -1


def note_use(payload: Payload | None, used: Counter[str], newest: dict[str, int]) -> None:
    """Remember the file that a payload is in."""
    if payload is None:
        return
    used[payload.file] += 1
    folder, _, name = payload.file.rpartition("/")
    number = _DATA.fullmatch(name)
    if number is not None:
        newest[folder] = max(newest.get(folder, 0), int(number[1]))


def see_onto_disk(folder: Path) -> None:
    """Wait until everything in a folder would survive a loss of power."""
    for path in (folder.parent, folder, *folder.rglob("*")):
        # Of a folder, which names are in it.
        opened = os.open(path, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)
