"""The sources of a conversion: dumps of paritas or of other tools, complete or growing."""

from __future__ import annotations

import contextlib
import os
import re
from typing import TYPE_CHECKING

import msgspec

from paritas.core.errors import ParitasError, UsageError
from paritas.core.file_trees import Folder, Problems, open_plain
from paritas.formats.dumps.completeness import find_losses, list_problems
from paritas.formats.dumps.opening import is_known, is_ours, open_dump
from paritas.formats.dumps.reading import LONGEST_LINE, Dump, check_record
from paritas.formats.files.records import (
    INDEX,
    LOCK,
    NPY_LAYOUTS,
    OLD_FX_TOP,
    RankDump,
    Record,
    index_home,
    is_locked,
    rank_folders,
    read_header,
    volumes_of,
    write_header,
)
from paritas.formats.foreign.foreign_dump import ForeignDump, rank_of
from paritas.formats.foreign.ge_calls import call_key
from paritas.formats.foreign.ge_files import read_ge_header

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from paritas.formats.dumps.opening import ReadableDump
    from paritas.formats.files.records import Header


# --- Sources --------------------------------------------------------------------------------------

# Each record is yielded once, when it is complete. A paritas dump shows this: a line of the index
# is written after its data, and the header is closed at the end. For other tools, a file is taken
# as complete if its size and time are the same in two scans and its header fits its length. Nothing
# shows when such a dump is finished.

SOURCES = "sources.jsonl"


def source_of(
    path: Path, *, grows: bool, kind: str | None = None, earlier: Sequence[Header] = ()
) -> DumpSource:
    """The dump at a path.

    Args:
        grows: whether it is followed while it is written.
        kind: the tool that made it; None detects it.
        earlier: the headers of an earlier conversion into the same folder.

    Raises:
        UsageError: there is no dump.
    """
    if path.exists() and kind != "paritas" and (kind or not is_ours(path)):
        return _ForeignSource(path, kind, earlier, grows=grows)
    return _OwnSource(path)


def is_there(path: Path) -> bool:
    """Whether there is a dump that a reader can open."""
    return path.exists() and (is_ours(path) or is_known(path))


# --- dumps of paritas -----------------------------------------------------------------------------


class _OwnSource:
    """A dump of paritas.

    Attributes:
        is_endless: whether it never shows that it is finished.
    """

    kind = "paritas"
    is_endless = False

    def __init__(self, path: Path) -> None:
        self._path = path
        if not path.is_dir() or not rank_folders(index_home(path)):
            Dump.open(path)  # raises with the reason

    def runs(self) -> set[str]:
        """The runs that it belongs to; several if they were mixed."""
        return {read_header(folder).run for folder in rank_folders(index_home(self._path)).values()}

    def ranks(self) -> list[int]:
        """Scan for ranks."""
        return sorted(rank_folders(index_home(self._path)))

    def part(self, rank: int) -> _OwnRank:
        return _OwnRank(self._path, rank)


class _OwnRank:
    """One rank of a dump of paritas.

    Attributes:
        header: as of the last `refresh`.
        problems: what could not be read as a record.
        losses: the problems that no record stands for; here each is a line of the index.
    """

    def __init__(self, root: Path, rank: int) -> None:
        self._root = root
        self._folder = rank_folders(index_home(root))[rank]
        self.header = read_header(self._folder)
        reader = reader_without_index(root, self._folder, self.header)
        self.read, self.read_sketch = reader.read, reader.read_sketch
        self._follower = Follower(self._folder, rank)
        self.problems = self.losses = self._follower.problems

    @property
    def is_busy(self) -> bool:
        """Whether a program is writing it."""
        return is_locked(self._folder / LOCK)

    def refresh(self) -> None:
        """Read the header, before the records: if it is closed, all records are there."""
        self.header = read_header(self._folder)

    def new_records(self) -> Iterator[Record]:
        """The records since the last call."""
        return self._follower.new_records()

    def attach(self, folder: Path) -> None:
        """Set the folder of the new dump; not needed here, since records keep their numbers."""

    def note(self, record: Record) -> None:
        """Note that a record is in the new dump; not needed here."""

    def resume(self, earlier: RankDump) -> list[Record]:
        """The records of an earlier conversion that need not be converted again."""
        return earlier.records

    def deletable(self, used: Mapping[str, int], latest: LatestFiles) -> list[Path]:
        """The files whose content is converted."""
        if self.problems:  # a damaged line may name a value in any of them
            return []
        return freeable_files(self._root, self.header, used, latest)

    def delete(self, path: Path) -> None:
        """Delete one of these files."""
        if self.header.closed or self.header.layout != "packed":
            path.unlink()
        else:
            # The program still uses the name when it closes the dump.
            os.truncate(path, 0)

    def mark(self, note: str) -> None:
        """Note in the dump that files were deleted."""
        if self.header.closed and note not in self.header.notes:
            self.header = msgspec.structs.replace(self.header, notes=(*self.header.notes, note))
            write_header(self._folder, self.header)


def reader_without_index(path: Path, folder: Path, header: Header) -> Dump:
    """A reader for records of one rank that does not read its index."""
    rank = RankDump(
        rank=header.rank,
        folder=folder,
        header=header,
        state="being written",
        records=[],
        problems=[],
        losses=[],
    )
    return Dump(path, {header.rank: rank}, [])


# --- dumps of other tools -------------------------------------------------------------------------


class _ForeignSource:
    """A tree of files, read again when a file is new or changed; see `_OwnSource`."""

    def __init__(
        self, path: Path, kind: str | None, earlier: Sequence[Header], *, grows: bool
    ) -> None:
        self.path = path
        self.grows = self.is_endless = grows
        try:
            self.dump = open_dump(path, kind)
        except UsageError:
            self.dump = _deleted_dump(path, earlier)
            if not self.dump.ranks:
                raise
        self.kind = self.dump.kind
        self._looked: dict[str, tuple[int, int]] = {}
        # None: all files are complete.
        self.settled: set[str] | None = set() if grows else None
        self._parts: dict[int, _ForeignRank] = {}

    def runs(self) -> set[str]:
        return {self.run}

    @property
    def run(self) -> str:
        """The same for every conversion of the dump at this path."""
        return f"{self.kind} {self.path.absolute()}"

    def ranks(self) -> list[int]:
        if self.grows:
            self._scan()
        return sorted({*self.dump.ranks, *self._parts})

    def part(self, rank: int) -> _ForeignRank:
        if rank not in self._parts:
            self._parts[rank] = _ForeignRank(self, rank)
        return self._parts[rank]

    def _scan(self) -> None:
        before, now = self._looked, _signatures(self.path)
        self._looked = now
        self.settled = {name for name, facts in now.items() if before.get(name) == facts}
        if now == before:
            return
        # After everything is converted and deleted, there may be nothing to read for a while.
        with contextlib.suppress(UsageError):
            self.dump = open_dump(self.path, self.kind)


class _ForeignRank:
    """One rank of a tree; see `_OwnRank`.

    Files are identified by name, since the numbers of records change as files come and go. The
    converted files are listed next to the new index, so that an interrupted conversion can continue
    after files were deleted.
    """

    is_busy = True

    def __init__(self, source: _ForeignSource, rank: int) -> None:
        self._source = source
        self._rank = rank
        self.problems: list[str] = []
        self.losses: list[str] = []
        self._seen: set[tuple[str, str]] = set()
        self._numbers: dict[tuple[str, str], int] = {}
        self._places: dict[int, tuple[str, str]] = {}
        self._next = 0
        # The records of this scan, by their new numbers.
        self._originals: dict[int, Record] = {}
        self._ids: set[tuple[int, str]] = set()
        self._sources: Path | None = None
        self._folder = Folder(source.path)
        self.header = self._header()

    def read(self, record: Record) -> Tensor:
        return self._source.dump.read(self._originals[record.sequence])

    def read_sketch(self, record: Record) -> Tensor:
        return self._source.dump.read_sketch(self._originals[record.sequence])

    def refresh(self) -> None:
        if self._rank in self._source.dump.ranks:
            self.header = self._header()
        dump = self._source.dump
        if self._source.grows or not dump.ranks:
            return
        # Report problems of the tree once, not for each rank.
        is_first = self._rank == min(dump.ranks)
        if is_first:
            self.problems = list_problems(dump)
        rank_range = (self._rank, self._rank)
        self.losses = [
            loss.text
            for loss in find_losses(dump)
            if loss.ranks == rank_range or (is_first and loss.ranks is None)
        ]

    def _header(self) -> Header:
        source_header = self._source.dump.header(self._rank)
        return msgspec.structs.replace(
            source_header, run=self._source.run, closed=not self._source.grows, records=0
        )

    def new_records(self) -> Iterator[Record]:
        part = self._source.dump.ranks.get(self._rank)
        records = part.records if part is not None else []
        self._originals.clear()
        for record in self._whole(records):
            payload_key = _payload_place(record)
            if payload_key not in self._seen:
                self._seen.add(payload_key)
                renamed = self._renumber_record(record, payload_key)
                self._originals[renamed.sequence] = record
                yield renamed

    def _whole(self, records: list[Record]) -> Iterable[Record]:
        settled = self._source.settled
        if settled is None:
            return records
        halves = {
            record.payload.file for record in records if record.payload and _is_unreadable(record)
        }
        # Records without a file are converted by the last run, without --watch.
        return [
            record
            for record in records
            if record.payload
            and record.payload.file in settled
            and record.payload.file not in halves
        ]

    def _renumber_record(self, record: Record, payload_key: tuple[str, str]) -> Record:
        """The record with the number of its file and a unique id."""
        number = self._numbers.get(payload_key)
        if number is not None:
            return msgspec.structs.replace(record, sequence=number)
        number = self._next
        self._next += 1
        self._numbers[payload_key], self._places[number] = number, payload_key
        site = record.site
        while (record.step, site.id) in self._ids:  # an earlier call, whose file may be deleted
            site = msgspec.structs.replace(site, call=site.call + 1)
        return msgspec.structs.replace(
            record, sequence=number, site=site, id=site.id, digest="", alias_of=None
        )

    def attach(self, folder: Path) -> None:
        self._sources = folder / SOURCES

    def note(self, record: Record) -> None:
        self._ids.add((record.step, record.id))
        if self._sources is None:
            raise ParitasError("the folder of the new dump is not set")
        with self._sources.open("ab") as file:
            file.write(
                msgspec.json.encode([record.sequence, *self._places[record.sequence]]) + b"\n"
            )

    def resume(self, earlier: RankDump) -> list[Record]:
        path = earlier.folder / SOURCES
        try:
            lines = path.read_bytes().splitlines(keepends=True)
            complete_lines = [line for line in lines if line.endswith(b"\n")]
            source_entries = [
                msgspec.json.decode(line, type=tuple[int, str, str]) for line in complete_lines
            ]
        except (OSError, msgspec.DecodeError) as error:
            raise UsageError(
                f"cannot read {path}, which lists the converted files of {self._source.path} "
                f"({error}): use another --output"
            ) from error
        places = {number: (file, key) for number, file, key in source_entries}
        # Written after the index: if killed in between, the last record is converted again.
        records = [record for record in earlier.records if record.sequence in places]
        self._places = {record.sequence: places[record.sequence] for record in records}
        self._numbers = {payload_key: number for number, payload_key in self._places.items()}
        self._next = max(places, default=-1) + 1
        return records

    def deletable(self, used: Mapping[str, int], latest: LatestFiles) -> list[Path]:
        del latest  # files are independent of each other
        paths: list[Path] = []
        for name in used:
            with contextlib.suppress(UsageError, OSError):  # deleted, or outside the dump
                path = self._folder.locate(name)
                is_whole = self._source.kind != "ge" or (
                    read_ge_header(path).end == path.stat().st_size
                )
                if is_whole:
                    paths.append(path)
        return paths

    def delete(self, path: Path) -> None:
        path.unlink()

    def mark(self, note: str) -> None:
        """Trees of other tools have no place for notes."""


DumpSource = _OwnSource | _ForeignSource
SourceRank = _OwnRank | _ForeignRank


def _deleted_dump(path: Path, earlier: Sequence[Header]) -> ReadableDump:
    """A dump without records, whose files were all converted and deleted before."""
    kind, ranks = "", {}
    for header in earlier:
        tool, _, where = header.run.partition(" ")
        if where == str(path.absolute()):
            kind = tool
            size, data = header.world_size, header.data
            ranks[header.rank] = rank_of(path, kind, header.rank, [], world_size=size, data=data)

    def nothing(record: Record, _: bool = False) -> Tensor:  # noqa: FBT001, FBT002
        raise UsageError(f"{record.id}: its file was deleted")

    return ForeignDump(path, kind, ranks, [], [], nothing, nothing)


def _payload_place(record: Record) -> tuple[str, str]:
    """A file, and the position in it; this does not change as other files come and go."""
    payload, site = record.payload, record.site
    if payload is None:
        return "", f"{record.step}/{record.id}"
    return payload.file, f"{payload.key} {site.name} {site.side}.{site.position}"


def _is_unreadable(record: Record) -> bool:
    return record.value is None and not record.is_tensor


def _signatures(path: Path) -> dict[str, tuple[int, int]]:
    """Size and time of every file, by its name in the dump."""
    folder, signatures = Folder(path), {}
    for dump_file in folder.find(lambda _: True, Problems()):
        with contextlib.suppress(UsageError, OSError):
            facts = folder.locate(dump_file.name).stat()
            signatures[dump_file.name] = (facts.st_size, facts.st_mtime_ns)
    return signatures


# --- Reading the index of one rank as it grows ----------------------------------------------------

_DATA = re.compile(r"data-(\d{4,})\.safetensors")


class Follower:
    """Yields each record of a rank once, as soon as its line in the index is complete.

    A line is written after the data that it points to, so that data is complete, and the program
    need not stop.

    Attributes:
        problems: lines that are not records.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        """`folder` is the folder of the rank."""
        self.problems: list[str] = []
        self._folder = folder
        self._rank = rank
        self._read: dict[Path, int] = {}
        self._decoder = msgspec.json.Decoder(Record)

    def new_records(self) -> Iterator[Record]:
        """The records since the last call."""
        for volume in volumes_of(self._folder):
            yield from self._lines(volume / INDEX)

    def _lines(self, index: Path) -> Iterator[Record]:
        try:
            file = open_plain(index)
        except OSError:  # not written yet, or a step that the ring dropped
            return
        with file:
            file.seek(self._read.get(index, 0))
            while True:
                line = file.readline(LONGEST_LINE)
                if not line.endswith(b"\n"):
                    return
                byte_offset = self._read.get(index, 0)
                # Counted first, so that a failing line is not read again.
                self._read[index] = byte_offset + len(line)
                try:
                    record = self._decoder.decode(line)
                    check_record(record, self._rank)
                except (
                    msgspec.DecodeError,
                    UnicodeDecodeError,
                    RecursionError,
                    UsageError,
                ) as error:
                    self.problems.append(f"{index}, byte {byte_offset}: {error}")
                    continue
                yield record


class LatestFiles:
    """The files at the end of a growing index, which the program may not have finished.

    A file is started before the index line of its first record, so the index must have moved on.

    Attributes:
        numbers: for each folder, the number of the last data file in use.
        of_call: the files of the last call.
    """

    def __init__(self) -> None:
        """Before the first record."""
        self.numbers: dict[str, int] = {}
        self.of_call: set[str] = set()
        self._call: tuple[object, ...] = ()

    def note(self, record: Record, files: Iterable[str]) -> None:
        """Note the files of the next record."""
        call = call_key(record)
        if call != self._call:
            self._call = call
            self.of_call.clear()
        for file in files:
            self.of_call.add(file)
            folder, _, name = file.rpartition("/")
            number = _DATA.fullmatch(name)
            if number is not None:
                self.numbers[folder] = max(self.numbers.get(folder, 0), int(number[1]))


def freeable_files(
    root: Path, header: Header, used: Mapping[str, int], latest: LatestFiles
) -> list[Path]:
    """The files of a rank that can be deleted once their content is converted.

    They are found in the folder and not taken from the index, which may name any file.

    Args:
        used: files that the index points to, and how many records of each are converted.
        latest: where the index ends. While the program runs, only earlier files are finished.
    """
    if header.layout in NPY_LAYOUTS:
        # Files appear complete, and the program does not need them any more.
        top = f"worldsize{header.world_size}_global_rank{header.rank}"
        tree = root / (top if header.layout == "msit" else OLD_FX_TOP)
        return [path for path in tree.rglob("*.npy") if path.relative_to(root).as_posix() in used]
    if header.layout in ("ge", "ge-7.1.0"):
        # The file of a call is written before its index lines, which follow each other. An input
        # may have its record in the file of another operator, so not each tensor has one.
        named_paths = ((path, path.relative_to(root).as_posix()) for path in root.rglob("*"))
        return [
            path
            for path, name in named_paths
            if name in used
            and (header.closed or name not in latest.of_call or _has_all_records(path, used[name]))
        ]
    files = []
    for path in (root / f"rank{header.rank}").rglob("data-*.safetensors"):
        number, name = _DATA.fullmatch(path.name), path.relative_to(root).as_posix()
        if number is None or name not in used:
            continue
        older = int(number[1]) < latest.numbers.get(name.rpartition("/")[0], 0)
        if header.closed or (older and path.stat().st_size):
            files.append(path)
    return files


def _has_all_records(path: Path, records: int) -> bool:
    """Whether a file of Ascend's graph engine has no more tensors than these records."""
    try:
        return len(read_ge_header(path).tensors) == records
    except (UsageError, OSError):
        return False


def sync_to_disk(folder: Path) -> None:
    """Wait until everything in a folder would survive a power failure."""
    for path in (folder.parent, folder, *folder.rglob("*")):
        opened = os.open(path, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)
