"""A dump of another tool: it answers the same questions as one of ours.

A reader is a module beside this one that has `looks_like(path)` and `open_dump(path)`;
`paritas.dumps.opening` lists them.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING

import msgspec

from paritas.errors import ParitasError, UsageError
from paritas.files.records import Header, Payload, RankDump, Record
from paritas.files.tensor_bytes import FilePlace, OpenFiles, values_at, verify_at, view_at
from paritas.files.trees import Folder, Problems

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from torch import Tensor

    from paritas.files.records import Site, TensorFacts
    from paritas.files.trees import FoundFile
    from paritas.numerics.statistics import Statistics


class ForeignDump:
    """A dump that another tool made.

    What a file says is turned into records when the dump is opened; values are read when they are
    asked for. What cannot be read is a problem that is listed, and the rest goes on.

    Attributes:
        path: its folder or file.
        kind: which tool's it is, for example `ge`.
        ranks: by number.
        problems: what could not be understood.
    """

    def __init__(
        self,
        path: Path,
        kind: str,
        ranks: dict[int, RankDump],
        problems: list[str],
        read: Callable[[Record], Tensor],
        view: Callable[[Record, bool], Tensor],
        verify: Callable[[Record], bool] | None = None,
    ) -> None:
        """Use the `open_dump` of a reader.

        Args:
            read: gives the values of a record, in its dtype and logical shape.
            view: gives the same, mapped from its file where that can be; held against their
                checksum if the second argument says so.
            verify: as the method of that name does; None where the tool keeps no checksums.
        """
        self.path = path
        self.kind = kind
        self.ranks = ranks
        self.problems = problems
        self._read = read
        self._view = view
        self._verify = verify

    def header(self, rank: int) -> Header:
        """What is known of a rank's part."""
        if rank not in self.ranks:
            there = ", ".join(map(str, sorted(self.ranks)))
            raise UsageError(f"{self.path} has no rank {rank}; it has {there}")
        return self.ranks[rank].header

    def records(self) -> Iterator[Record]:
        """All of them, rank by rank, in the order of the program as far as that is known."""
        for found in self.ranks.values():
            yield from found.records

    def read(self, record: Record) -> Tensor:
        """The values of a record.

        Raises:
            UsageError: they are missing, damaged, or were not recorded.
        """
        with _name_record_in_errors(record):
            return self._read(record)

    def view(self, record: Record, *, check: bool = False) -> Tensor:
        """The values of a record as `read` gives them, in memory of their own only where they must.

        They are mapped from the file, for as long as the tensor lives; what is small, compressed,
        widened, in another layout or not aligned is read. Who writes into them writes into a copy.

        Args:
            check: hold them against their checksum, where there is one.

        Raises:
            UsageError: they are missing, damaged, or were not recorded.
        """
        with _name_record_in_errors(record):
            return self._view(record, check)

    def verify(self, record: Record) -> bool:
        """Hold the stored bytes of a record against their checksum.

        Returns:
            Whether there is one. Zip archives have one for each member: files of `torch.save`, and
            `.npz` files. No other file of another tool has any.

        Raises:
            UsageError: they are missing, or not those that were written.
        """
        self.header(record.rank)  # refuses a rank that is not there
        if record.payload is None or self._verify is None:
            return False
        with _name_record_in_errors(record):
            return self._verify(record)

    def check_files(self) -> list[str]:
        """All that files say beside their values was read when the dump was opened."""
        return []

    def read_sketch(self, record: Record) -> Tensor:
        """No other tool makes sketches."""
        raise UsageError(f"{record.id} of step {record.step} has no sketch: {self.kind} makes none")


@contextlib.contextmanager
def _name_record_in_errors(record: Record) -> Iterator[None]:
    """What is wrong with a record's values is told with its name."""
    try:
        yield
    except (ParitasError, OSError) as error:
        raise UsageError(f"{record.id} of step {record.step}: {error}") from error


def rank_of(
    path: Path,
    kind: str,
    rank: int,
    records: list[Record],
    *,
    world_size: int = 1,
    data: str = "tensor",
    problems: list[str] | None = None,
) -> RankDump:
    """A rank's part of a foreign dump."""
    header = Header(
        run=f"{kind} {path}",
        rank=rank,
        world_size=world_size,
        program=kind,
        data="stats" if data == "stats" else "tensor",
        closed=True,
        records=len(records),
    )
    return RankDump(rank, path, header, "closed", records, problems or [])


# --- Records, collected as the files are read -----------------------------------------------------

if TYPE_CHECKING:
    _Reader = Callable[[Record], Tensor]
    _Viewer = Callable[[Record, bool], Tensor]
    _Verifier = Callable[[Record], bool]
    _Made = tuple[Path, str, dict[int, RankDump], list[str], _Reader, _Viewer, _Verifier]


# More than any run has; a name of a file may claim any number.
_MOST_RANKS = 100_000


@dataclasses.dataclass(frozen=True)
class ValueReader:
    """Reads the values of a dump's records.

    Attributes:
        folder: of the dump.
        places: by rank and sequence number: where they are, or why they cannot be read.
    """

    folder: Folder
    places: dict[tuple[int, int], FilePlace | str]
    files: OpenFiles = dataclasses.field(default_factory=OpenFiles)

    def read(self, record: Record) -> Tensor:
        """The values of a record."""
        place = self._place(record)
        return values_at(self.folder.locate(place.file), place, self.files)

    def view(self, record: Record, check: bool) -> Tensor:  # noqa: FBT001  (see `ForeignDump`)
        """The same, mapped from the file where that can be."""
        place = self._place(record)
        return view_at(self.folder.locate(place.file), place, self.files, check=check)

    def verify(self, record: Record) -> bool:
        """Hold them against their checksum; False where there is none."""
        place = self._place(record)
        return verify_at(self.folder.locate(place.file), place, self.files)

    def _place(self, record: Record) -> FilePlace:
        place = self.places.get((record.rank, record.sequence))
        if isinstance(place, FilePlace):
            return place
        if place is not None:
            raise UsageError(place)
        if record.value is not None:
            raise UsageError(f"it is no tensor: its value is {record.value}")
        raise UsageError("it has no values: statistics are all that was recorded")


@dataclasses.dataclass(frozen=True)
class _RecordDraft:
    """What a record is made of, but for its number."""

    step: int
    rank: int
    site: Site
    place: FilePlace | str | None
    payload: Payload | None
    tensor: TensorFacts | None = None
    value: str | None = None
    statistics: Statistics | None = None
    dtype: str | msgspec.UnsetType = msgspec.UNSET


class Gathered:
    """Records in the order in which they are added.

    A file that cannot be read has a record all the same: whoever compares learns that there was
    something at that place, and why it cannot be looked at.
    """

    def __init__(self, path: Path, kind: str) -> None:
        """`kind` is the name of the reader."""
        self.path = path
        self.folder = Folder(path)
        self.kind = kind
        self.problems = Problems()
        self.world_size = 1
        self._records: dict[int, list[Record]] = {}
        self._places: dict[tuple[int, int], FilePlace | str] = {}
        self._calls: dict[tuple[int, int, str], int] = {}

    def add_tensor(self, step: int, rank: int, site: Site, place: FilePlace) -> Record:
        """A tensor whose values can be read."""
        return self._add(_RecordDraft(step, rank, site, place, place.payload, place.facts))

    def add_value(
        self, step: int, rank: int, site: Site, text: str, place: FilePlace | None = None
    ) -> Record:
        """What is no tensor; `place` where it might as well have been one."""
        payload = None if place is None else place.payload
        return self._add(_RecordDraft(step, rank, site, place, payload, value=text))

    def add_text(self, step: int, rank: int, site: Site, text: str, file: FoundFile) -> Record:
        """What is no tensor and could be none, in a file of its own."""
        payload = Payload(file=file.name, nbytes=file.size, shape=())
        return self._add(_RecordDraft(step, rank, site, None, payload, value=text))

    def add_statistics(
        self, step: int, rank: int, site: Site, found: Statistics, dtype: str
    ) -> Record:
        """A tensor of which only a summary was kept."""
        return self._add(_RecordDraft(step, rank, site, None, None, statistics=found, dtype=dtype))

    def add_unreadable(self, step: int, rank: int, site: Site, file: FoundFile, why: str) -> Record:
        """Something that cannot be read; it is a problem, too."""
        self.problems.add(f"{file.name}: {why}")
        payload = Payload(file=file.name, nbytes=file.size, shape=())
        return self._add(_RecordDraft(step, rank, site, f"{file.name}: {why}", payload))

    def ranks_and_readers(self) -> _Made:
        """What a `ForeignDump` is made of.

        Raises:
            UsageError: nothing was found.
        """
        problems = self.problems.all()
        if not self._records:
            told = "; ".join(problems[:3]) or "no file in it has a name that this kind gives"
            raise UsageError(f"{self.path} has nothing to read as {self.kind}: {told}")
        size = min(max(self.world_size, max(self._records) + 1), _MOST_RANKS)
        ranks = {
            rank: rank_of(
                self.path,
                self.kind,
                rank,
                records,
                world_size=size,
                data="stats" if all(_is_summary(one) for one in records) else "tensor",
            )
            for rank, records in sorted(self._records.items())
        }
        reader = ValueReader(self.folder, self._places)
        readers = (reader.read, reader.view, reader.verify)
        return self.path, self.kind, ranks, problems, *readers

    def dump(self) -> ForeignDump:
        """The dump of all that was added.

        Raises:
            UsageError: nothing was.
        """
        return ForeignDump(*self.ranks_and_readers())

    def _add(self, draft: _RecordDraft) -> Record:
        known = self._records.setdefault(draft.rank, [])
        site = self._unique(draft.step, draft.rank, draft.site)
        record = Record(
            sequence=len(known),
            step=draft.step,
            rank=draft.rank,
            id=site.id,
            site=site,
            tensor=draft.tensor,
            value=draft.value,
            payload=draft.payload,
            statistics=draft.statistics,
            dtype=draft.dtype,
        )
        known.append(record)
        if draft.place is not None:
            self._places[draft.rank, record.sequence] = draft.place
        return record

    def _unique(self, step: int, rank: int, site: Site) -> Site:
        """The site, with the next free call number if its own is taken."""
        key = (rank, step, site.id)
        if key not in self._calls:
            self._calls[key] = site.call + 1
            return site
        call = self._calls[key]
        moved = msgspec.structs.replace(site, call=call)
        while (rank, step, moved.id) in self._calls:
            call += 1
            moved = msgspec.structs.replace(site, call=call)
        self._calls[key] = call + 1
        self._calls[rank, step, moved.id] = call + 1
        return moved


def _is_summary(record: Record) -> bool:
    return record.statistics is not None and record.payload is None
