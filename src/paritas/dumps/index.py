"""Reading the index of a rank, whatever state it was left in."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec

from paritas.dumps.folders import INDEX, read_header, volumes_of
from paritas.dumps.locks import LOCK, is_locked
from paritas.dumps.records import FORMAT, Record
from paritas.dumps.validating import check_payload, check_record, check_sketch
from paritas.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import BinaryIO

    from paritas.dumps.records import Header, Layout
    from paritas.dumps.validating import Files

__all__ = ["LONGEST_LINE", "RankDump", "State", "read_rank"]

LONGEST_LINE = 4 << 20
_MOST_PROBLEMS = 20
_DECODER = msgspec.json.Decoder(Record)

State = Literal["closed", "being written", "ended early"]


@dataclasses.dataclass(frozen=True)
class RankDump:
    """What one rank recorded.

    Attributes:
        state: closed by the run; still being written; or cut off when the run was.
        records: in the order of recording.
        problems: what is damaged or missing.
    """

    rank: int
    folder: Path
    header: Header
    state: State
    records: list[Record]
    problems: list[str]


class _Line(NamedTuple):
    """One line of an index."""

    number: int
    text: bytes
    is_whole: bool
    is_last: bool


class _Problems:
    """What is wrong with a rank: the first few in words, of the rest the number.

    Attributes:
        replaced: how many tensors are not there, and their extremes are.
    """

    def __init__(self) -> None:
        self.replaced = 0
        self._told: list[str] = []
        self._more = 0

    def add(self, text: str) -> None:
        if len(self._told) < _MOST_PROBLEMS:
            self._told.append(text)
        else:
            self._more += 1

    def all(self) -> list[str]:
        return self._told + ([f"and {self._more} more of this kind"] if self._more else [])


def read_rank(rank: int, folder: Path, files: Files) -> RankDump:
    """Read what a rank recorded, and check that it is there.

    Raises:
        UsageError: its header is missing or damaged, or of another version.
    """
    # Before the index is read: a run that ends meanwhile is better called unfinished than whole.
    is_written = is_locked(folder / LOCK)
    header = read_header(folder)
    if header.format != FORMAT:
        raise UsageError(
            f"{folder} has format {header.format}, and this version of paritas reads {FORMAT}: "
            f"take the version that wrote it"
        )
    if header.rank != rank:
        raise UsageError(f"{folder} has the header of rank {header.rank}")
    state: State = "being written" if is_written else "closed" if header.closed else "ended early"
    damage = _Problems()
    records: list[Record] = []
    for volume in volumes_of(folder):
        records += _read_index(volume, header, files, damage, is_written=is_written)
    problems = damage.all()
    if damage.replaced:
        note = f"{damage.replaced} tensors were replaced by their least and greatest value"
        header = msgspec.structs.replace(header, notes=(*header.notes, note))
    if state == "being written":
        problems.append(f"it is still being written; {len(records)} records can be read so far")
    elif state == "ended early":
        problems.append(
            f"it was not closed, so the run ended early; {len(records)} records can be read"
        )
    elif header.records != len(records):
        problems.append(f"{header.records} records were written and {len(records)} can be read")
    return RankDump(rank, folder, header, state, records, problems)


def _read_index(
    volume: Path, header: Header, files: Files, damage: _Problems, *, is_written: bool
) -> list[Record]:
    """The records of one index; a line that is damaged is noted, and the rest goes on."""
    path = volume / INDEX
    records: list[Record] = []
    latest = -1
    try:
        with path.open("rb") as file:
            for line in _lines(file):
                where = f"{volume.name}/{INDEX}, line {line.number}"
                if not line.is_whole and line.is_last:
                    if not is_written:  # else it is the record in flight
                        damage.add(f"{where} is cut off: the record in flight was lost")
                    continue
                try:
                    record = _record(line, header.rank, latest)
                except UsageError as error:
                    damage.add(f"{where} is damaged: {error}")
                    continue
                latest = record.sequence
                records.append(_present(record, files, header.layout, where, damage))
    except OSError as error:
        if not (is_written and isinstance(error, FileNotFoundError)):  # else its step was dropped
            damage.add(f"{volume.name}/{INDEX} cannot be read: {error.strerror or error}")
    return records


def _lines(file: BinaryIO) -> Iterator[_Line]:
    """Lines of a bounded length; of a longer one the rest is skipped."""
    number = 0
    while text := file.readline(LONGEST_LINE):
        number += 1
        is_whole = text.endswith(b"\n")
        rest = text
        while rest and not rest.endswith(b"\n"):
            rest = file.readline(LONGEST_LINE)
        yield _Line(number, text, is_whole, is_last=not rest)


def _record(line: _Line, rank: int, latest: int) -> Record:
    if not line.is_whole:
        raise UsageError(f"it is longer than {LONGEST_LINE} bytes")
    try:
        record = _DECODER.decode(line.text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(str(error)) from error
    check_record(record, rank)
    if record.sequence <= latest:
        raise UsageError(f"record {record.sequence} comes after record {latest}")
    return record


def _present(record: Record, files: Files, layout: Layout, where: str, damage: _Problems) -> Record:
    """The record as far as it is there; what is missing is noted."""
    try:
        if record.payload is not None:
            check_payload(record, files, layout)
        if record.sketch is not None:
            check_sketch(record, files)
    except UsageError as error:
        summed_up = None if layout == "packed" else _summed_up(record, files)
        if summed_up is not None:
            damage.replaced += summed_up.tensor is not None
            return summed_up
        damage.add(f"{where}, {record.id}: {error}")
    return record


def _summed_up(record: Record, files: Files) -> Record | None:
    """The record without values, if a script of the tree's users put their extremes in the place.

    The index has statistics of its own, mostly, which say more.
    """
    if record.payload is None:
        return None
    from paritas.dumps.foreign.extremes import read_extremes  # seldom needed

    statistics = read_extremes(record.payload, files)
    if statistics is None:
        return None
    if record.tensor is None:  # a number, which the index has as text
        return msgspec.structs.replace(record, payload=None)
    return msgspec.structs.replace(record, payload=None, statistics=record.statistics or statistics)
