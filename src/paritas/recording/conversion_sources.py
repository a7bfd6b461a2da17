"""Where a conversion takes its records from: a dump of ours or of others, complete or growing."""

from __future__ import annotations

import contextlib
import os
import re
from typing import TYPE_CHECKING, Protocol

import msgspec

from paritas.compat import ge_files
from paritas.compat.foreign_dump import ForeignDump, rank_of
from paritas.compat.ge_files import read_ge_header
from paritas.dumps.index import LONGEST_LINE, check_record
from paritas.dumps.opening import is_known, is_ours, open_dump
from paritas.dumps.reading import Dump
from paritas.errors import ParitasError, UsageError
from paritas.files.folders import (
    INDEX,
    LOCK,
    index_home,
    is_locked,
    rank_folders,
    read_header,
    volumes_of,
    write_header,
)
from paritas.files.records import RankDump, Record
from paritas.files.trees import Folder, Problems

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from paritas.dumps.opening import ReadableDump
    from paritas.files.records import Header, Payload


# --- The index of one rank, read as it grows ------------------------------------------------------

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


def freeable_files(
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
        return [
            path
            for path in found
            if _count_tensors(path) == used[path.relative_to(root).as_posix()]
        ]
    files = []
    for path in (root / f"rank{header.rank}").rglob("data-*.safetensors"):
        number, name = _DATA.fullmatch(path.name), path.relative_to(root).as_posix()
        if number is None or name not in used:
            continue
        older = int(number[1]) < newest.get(name.rpartition("/")[0], 0)
        if header.closed or (older and path.stat().st_size):
            files.append(path)
    return files


def _count_tensors(path: Path) -> int:
    """How many tensors a file of Ascend's graph engine holds; -1 where it is none."""
    try:
        return len(read_ge_header(path).tensors)
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


# --- Sources --------------------------------------------------------------------------------------

# Each record is given once, when all of it is there. Ours says so: a line of the index is written
# after what it points to, and a header is closed at the end. Other tools say nothing, so a file of
# theirs is taken for whole once its size and time were the same at two looks and its own header
# fits its length; and there is no end but that of the one who looks.

SOURCES = "sources.jsonl"


class SourceRank(Protocol):
    """One rank of a dump that is converted.

    Attributes:
        header: what is known of it; as it was at the last look.
        problems: what no record could be made of.
        is_busy: whether somebody is writing it.
    """

    header: Header
    problems: list[str]

    @property
    def is_busy(self) -> bool:
        """See above."""

    def read(self, record: Record) -> Tensor:
        """The values of a record that was given last."""

    def read_sketch(self, record: Record) -> Tensor:
        """The sketch of its values."""

    def refresh(self) -> None:
        """Look at the header; before the records: if it is closed, all of them are there."""

    def new_records(self) -> Iterator[Record]:
        """What came since the last time."""

    def attach(self, folder: Path) -> None:
        """Say where the new dump of this rank is written."""

    def note(self, record: Record) -> None:
        """A record is in the new dump."""

    def resume(self, earlier: RankDump) -> list[Record]:
        """The records of an earlier conversion whose values are known again by them."""

    def deletable(self, used: Mapping[str, int], newest: dict[str, int]) -> list[Path]:
        """The files that nobody needs once what they hold is elsewhere."""

    def delete(self, path: Path) -> None:
        """Delete one of them."""

    def mark(self, note: str) -> None:
        """Leave a note of what was deleted, where there is a place for it."""


class DumpSource(Protocol):
    """A dump that is converted.

    Attributes:
        kind: which tool's it is.
        is_endless: whether it never says that nothing is to come.
    """

    kind: str
    is_endless: bool

    def runs(self) -> set[str]:
        """Which run it is of; more than one where they were mixed."""

    def ranks(self) -> list[int]:
        """Look again: the ranks that are there."""

    def part(self, rank: int) -> SourceRank:
        """One of them."""


def is_there(path: Path) -> bool:
    """Whether there is something that a reader knows."""
    return path.exists() and (is_ours(path) or is_known(path))


def source_of(
    path: Path, *, grows: bool, kind: str | None = None, earlier: Sequence[Header] = ()
) -> DumpSource:
    """The dump at a path, as one to convert.

    Args:
        grows: whether it is followed while it is written.
        kind: which tool made it; None finds out.
        earlier: what an earlier conversion into the same folder says of its ranks.

    Raises:
        UsageError: there is no dump.
    """
    if path.exists() and kind != "paritas" and (kind or not is_ours(path)):
        return _ForeignSource(path, kind, earlier, grows=grows)
    return _OwnSource(path)


# --- ours -----------------------------------------------------------------------------------------


class _OwnSource:
    kind = "paritas"
    is_endless = False

    def __init__(self, path: Path) -> None:
        self._path = path
        if not path.is_dir() or not rank_folders(index_home(path)):
            Dump.open(path)  # says what is wrong

    def runs(self) -> set[str]:
        return {read_header(folder).run for folder in rank_folders(index_home(self._path)).values()}

    def ranks(self) -> list[int]:
        return sorted(rank_folders(index_home(self._path)))

    def part(self, rank: int) -> _OwnRank:
        return _OwnRank(self._path, rank)


class _OwnRank:
    def __init__(self, root: Path, rank: int) -> None:
        self._root = root
        self._folder = rank_folders(index_home(root))[rank]
        self.header = read_header(self._folder)
        reader = reader_without_index(root, self._folder, self.header)
        self.read, self.read_sketch = reader.read, reader.read_sketch
        self._follower = Follower(self._folder, rank)
        self.problems = self._follower.problems

    @property
    def is_busy(self) -> bool:
        return is_locked(self._folder / LOCK)

    def refresh(self) -> None:
        self.header = read_header(self._folder)

    def new_records(self) -> Iterator[Record]:
        return self._follower.new_records()

    def attach(self, folder: Path) -> None:
        """Its records have numbers of their own, by which they are known again."""

    def note(self, record: Record) -> None:
        """See `attach`."""

    def resume(self, earlier: RankDump) -> list[Record]:
        return earlier.records

    def deletable(self, used: Mapping[str, int], newest: dict[str, int]) -> list[Path]:
        return freeable_files(self._root, self.header, used, newest)

    def delete(self, path: Path) -> None:
        if self.header.closed or self.header.layout != "packed":
            path.unlink()
        else:
            # The program still knows it by name, and looks for it when it closes.
            os.truncate(path, 0)

    def mark(self, note: str) -> None:
        if self.header.closed and note not in self.header.notes:
            self.header = msgspec.structs.replace(self.header, notes=(*self.header.notes, note))
            write_header(self._folder, self.header)


def reader_without_index(path: Path, folder: Path, header: Header) -> Dump:
    """A reader for one rank, without its index: the records that it is asked for are known."""
    rank = RankDump(
        rank=header.rank,
        folder=folder,
        header=header,
        state="being written",
        records=[],
        problems=[],
    )
    return Dump(path, {header.rank: rank}, [])


# --- other tools' ---------------------------------------------------------------------------------


class _ForeignSource:
    """A tree of files. It is read anew when one of them has come or changed."""

    def __init__(
        self, path: Path, kind: str | None, earlier: Sequence[Header], *, grows: bool
    ) -> None:
        self.path = path
        self.grows = self.is_endless = grows
        try:
            self.dump = open_dump(path, kind)
        except UsageError:
            self.dump = _emptied_dump(path, earlier)
            if not self.dump.ranks:
                raise
        self.kind = self.dump.kind
        self._looked: dict[str, tuple[int, int]] = {}
        # None: all that is there is taken as it is.
        self.settled: set[str] | None = set() if grows else None
        self._parts: dict[int, _ForeignRank] = {}

    def runs(self) -> set[str]:
        return {self.run}

    @property
    def run(self) -> str:
        """The same whenever the dump at this place is converted."""
        return f"{self.kind} {self.path.absolute()}"

    def ranks(self) -> list[int]:
        if self.grows:
            self._look()
        return sorted({*self.dump.ranks, *self._parts})

    def part(self, rank: int) -> _ForeignRank:
        if rank not in self._parts:
            self._parts[rank] = _ForeignRank(self, rank)
        return self._parts[rank]

    def _look(self) -> None:
        before, now = self._looked, _signatures(self.path)
        self._looked = now
        self.settled = {name for name, facts in now.items() if before.get(name) == facts}
        if now == before:
            return
        # Once all is converted and deleted, there may be nothing to be read for a while.
        with contextlib.suppress(UsageError):
            self.dump = open_dump(self.path, self.kind)


class _ForeignRank:
    """One rank of a tree.

    A file is known by its name, whichever number its record has: numbers change as files come and
    go. Which of them are converted is written down beside the new index, so that an interrupted
    conversion can go on although files were deleted.
    """

    is_busy = True

    def __init__(self, source: _ForeignSource, rank: int) -> None:
        self._source = source
        self._rank = rank
        self.problems: list[str] = []
        self._seen: set[tuple[str, str]] = set()
        self._numbers: dict[tuple[str, str], int] = {}
        self._places: dict[int, tuple[str, str]] = {}
        self._next = 0
        # The records of this look, by their new numbers.
        self._sourceals: dict[int, Record] = {}
        self._ids: set[tuple[int, str]] = set()
        self._sources: Path | None = None
        self._folder = Folder(source.path)
        self.header = self._header()

    def read(self, record: Record) -> Tensor:
        return self._source.dump.read(self._sourceals[record.sequence])

    def read_sketch(self, record: Record) -> Tensor:
        return self._source.dump.read_sketch(self._sourceals[record.sequence])

    def refresh(self) -> None:
        if self._rank in self._source.dump.ranks:
            self.header = self._header()
        if not self._source.grows and self._rank == min(self._source.dump.ranks):
            # What is wrong with the tree is wrong once, not once for each rank.
            self.problems = list(self._source.dump.problems)

    def _header(self) -> Header:
        found = self._source.dump.header(self._rank)
        return msgspec.structs.replace(
            found, run=self._source.run, closed=not self._source.grows, records=0
        )

    def new_records(self) -> Iterator[Record]:
        part = self._source.dump.ranks.get(self._rank)
        records = part.records if part is not None else []
        self._sourceals.clear()
        for record in self._whole(records):
            place = _payload_place(record)
            if place not in self._seen:
                self._seen.add(place)
                renamed = self._renamed(record, place)
                self._sourceals[renamed.sequence] = record
                yield renamed

    def _whole(self, records: list[Record]) -> Iterable[Record]:
        settled = self._source.settled
        if settled is None:
            return records
        halves = {one.payload.file for one in records if one.payload and _is_unreadable(one)}
        # What has no file of its own values is taken in the end, when nobody watches any more.
        return [
            one
            for one in records
            if one.payload and one.payload.file in settled and one.payload.file not in halves
        ]

    def _renamed(self, record: Record, place: tuple[str, str]) -> Record:
        """The record with the number of its file, and an id that no other has."""
        number = self._numbers.get(place)
        if number is not None:
            return msgspec.structs.replace(record, sequence=number)
        number = self._next
        self._next += 1
        self._numbers[place], self._places[number] = number, place
        site = record.site
        while (record.step, site.id) in self._ids:  # an earlier call, whose file may be gone
            site = msgspec.structs.replace(site, call=site.call + 1)
        return msgspec.structs.replace(
            record, sequence=number, site=site, id=site.id, digest="", alias_of=None
        )

    def attach(self, folder: Path) -> None:
        self._sources = folder / SOURCES

    def note(self, record: Record) -> None:
        self._ids.add((record.step, record.id))
        if self._sources is None:
            raise ParitasError("the new dump of this rank is not known")
        with self._sources.open("ab") as file:
            file.write(
                msgspec.json.encode([record.sequence, *self._places[record.sequence]]) + b"\n"
            )

    def resume(self, earlier: RankDump) -> list[Record]:
        path = earlier.folder / SOURCES
        try:
            lines = path.read_bytes().splitlines(keepends=True)
            whole = [line for line in lines if line.endswith(b"\n")]
            found = [msgspec.json.decode(line, type=tuple[int, str, str]) for line in whole]
        except (OSError, msgspec.DecodeError) as error:
            raise UsageError(
                f"{path} cannot be read ({error}): which files of {self._source.path} were "
                f"converted is not known; give another --output"
            ) from error
        places = {number: (file, key) for number, file, key in found}
        # Written down after the index: killed in between, the last record is made once more.
        records = [record for record in earlier.records if record.sequence in places]
        self._places = {record.sequence: places[record.sequence] for record in records}
        self._numbers = {place: number for number, place in self._places.items()}
        self._next = max(places, default=-1) + 1
        return records

    def deletable(self, used: Mapping[str, int], newest: dict[str, int]) -> list[Path]:
        del newest  # each file is by itself
        found: list[Path] = []
        for name in used:
            with contextlib.suppress(UsageError, OSError):  # it is gone, or none of the dump's
                path = self._folder.locate(name)
                if self._source.kind != "ge" or _fits_header(path):
                    found.append(path)
        return found

    def delete(self, path: Path) -> None:
        path.unlink()

    def mark(self, note: str) -> None:
        """There is no place for notes in other tools' trees."""


def _emptied_dump(path: Path, earlier: Sequence[Header]) -> ReadableDump:
    """What is left of a dump all of whose files were converted before, and deleted."""
    kind, ranks = "", {}
    for header in earlier:
        tool, _, where = header.run.partition(" ")
        if where == str(path.absolute()):
            kind = tool
            size, data = header.world_size, header.data
            ranks[header.rank] = rank_of(path, kind, header.rank, [], world_size=size, data=data)

    def nothing(record: Record, _: bool = False) -> Tensor:  # noqa: FBT001, FBT002
        raise UsageError(f"{record.id}: its file was deleted")

    return ForeignDump(path, kind, ranks, [], nothing, nothing)


def _payload_place(record: Record) -> tuple[str, str]:
    """A file, and what in it; nothing that changes as other files come and go."""
    payload, site = record.payload, record.site
    if payload is None:
        return "", f"{record.step}/{record.id}"
    return payload.file, f"{payload.key} {site.name} {site.side}.{site.position}"


def _is_unreadable(record: Record) -> bool:
    return record.value is None and not record.is_tensor


def _fits_header(path: Path) -> bool:
    return ge_files.read_ge_header(path).end == path.stat().st_size


def _signatures(path: Path) -> dict[str, tuple[int, int]]:
    """Size and time of every file, by its name inside the dump."""
    folder, found = Folder(path), {}
    for one in folder.find(lambda _: True, Problems()):
        with contextlib.suppress(UsageError, OSError):
            facts = folder.locate(one.name).stat()
            found[one.name] = (facts.st_size, facts.st_mtime_ns)
    return found
