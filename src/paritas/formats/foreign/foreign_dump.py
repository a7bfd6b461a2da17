"""A dump of another tool, with the interface of our own.

A reader is a module in this folder with `looks_like(path)` and `open_dump(path)`;
`paritas.formats.dumps.opening` lists them.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from paritas.core.errors import ParitasError, UsageError
from paritas.core.file_trees import Folder, Problems
from paritas.formats.files.records import Header, Payload, RankDump, Record
from paritas.formats.files.tensor_bytes import FilePlace, OpenFiles, values_at, verify_at, view_at
from paritas.formats.files.torch_files import Unreadable, plain_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from torch import Tensor

    from paritas.core.file_trees import FoundFile
    from paritas.core.numerics.statistics import Statistics
    from paritas.formats.files.records import Site
    from paritas.formats.files.torch_files import PlainValue


@dataclasses.dataclass(eq=False, repr=False)
class ForeignDump:
    """A dump made by another tool; use the `open_dump` of a reader.

    Records are made when the dump is opened; values are read on demand. What cannot be read is
    listed as a problem.

    Attributes:
        kind: the tool, for example `ge`.
        problems: what could not be read.
        losses: those of them that no record stands for.
        unreadable: the reason, for each rank that cannot be read at all.
        read_values: returns the values of a record, in its dtype and logical shape.
        view_values: the same, mapped if possible; the second argument says whether to verify the
            checksum.
        verify_values: verifies their checksum; None if the tool keeps no checksums.
    """

    path: Path
    kind: str
    ranks: dict[int, RankDump]
    problems: list[str]
    losses: list[str]
    read_values: Callable[[Record], Tensor]
    view_values: Callable[[Record, bool], Tensor]
    verify_values: Callable[[Record], bool] | None = None
    unreadable: dict[int, str] = dataclasses.field(default_factory=dict)

    def header(self, rank: int) -> Header:
        """What is known of a rank's part."""
        if rank not in self.ranks:
            there = ", ".join(map(str, sorted(self.ranks)))
            raise UsageError(f"{self.path} has no rank {rank}; it has {there}")
        return self.ranks[rank].header

    def records(self) -> Iterator[Record]:
        """All records, rank by rank, in program order where it is known."""
        for rank in self.ranks.values():
            yield from rank.records

    def read(self, record: Record) -> Tensor:
        """The values of a record."""
        self.header(record.rank)  # refuses an unknown rank
        with name_record_in_errors(record):
            return self.read_values(record)

    def view(self, record: Record, *, check: bool = False) -> Tensor:
        """The values of a record like `read`, but mapped from the file where possible.

        Small, compressed, widened, rearranged or unaligned tensors are read. Writing to the result
        changes a private copy. `check` verifies their checksum, if there is one.
        """
        self.header(record.rank)
        with name_record_in_errors(record):
            return self.view_values(record, check)

    def verify(self, record: Record) -> bool:
        """Verify the checksum of a record's stored bytes.

        Returns:
            Whether there is one. Zip archives (`torch.save`, `.npz`) have one for each member; no
            other file of another tool does.
        """
        self.header(record.rank)
        if record.payload is None or self.verify_values is None:
            return False
        with name_record_in_errors(record):
            return self.verify_values(record)

    def check_files(self) -> list[str]:
        """Everything but the values was checked when the dump was opened."""
        return []

    def read_sketch(self, record: Record) -> Tensor:
        """No other tool makes sketches."""
        raise UsageError(f"{record.id} of step {record.step}: {self.kind} dumps have no sketches")


@contextlib.contextmanager
def name_record_in_errors(record: Record) -> Iterator[None]:
    """Put the name of the record in front of errors."""
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
    return RankDump(rank, path, header, "closed", records, [], [])


# --- Collecting records ---------------------------------------------------------------------------

AnyDump = TypeVar("AnyDump", bound=ForeignDump)

# More than any run has; a file name may contain any number.
_MOST_RANKS = 100_000


@dataclasses.dataclass(frozen=True)
class ValueReader:
    """Reads the values of a dump's records.

    Attributes:
        folder: of the dump.
        places: where values are, or why they cannot be read, by rank and sequence number.
    """

    folder: Folder
    places: dict[tuple[int, int], FilePlace | str]
    files: OpenFiles = dataclasses.field(default_factory=OpenFiles)

    def read(self, record: Record) -> Tensor:
        """The values of a record."""
        location = self._place(record)
        return values_at(self.folder.locate(location.file), location, self.files)

    def view(self, record: Record, check: bool) -> Tensor:  # noqa: FBT001  (see `ForeignDump`)
        """The same, mapped from the file where possible."""
        location = self._place(record)
        return view_at(self.folder.locate(location.file), location, self.files, check=check)

    def verify(self, record: Record) -> bool:
        """Verify their checksum; False if there is none."""
        location = self._place(record)
        return verify_at(self.folder.locate(location.file), location, self.files)

    def _place(self, record: Record) -> FilePlace:
        location = self.places.get((record.rank, record.sequence))
        if isinstance(location, FilePlace):
            return location
        if location is not None:
            raise UsageError(location)
        if record.value is not None:
            raise UsageError(f"it is not a tensor: its value is {record.value}")
        raise UsageError("it has no values: only statistics were recorded")


class Gathered:
    """Collects records in the order in which they are added.

    A file that cannot be read gets a record too, so that a comparison can report it.
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

    def add_tensor(self, step: int, rank: int, site: Site, file_place: FilePlace) -> Record:
        """Add a tensor whose values can be read."""
        return self._add(
            step, rank, site, file_place, payload=file_place.payload, tensor=file_place.facts
        )

    def add_value(
        self, step: int, rank: int, site: Site, text: str, file_place: FilePlace | None = None
    ) -> Record:
        """Add a value other than a tensor; `file_place` if it could also be read as one."""
        payload = None if file_place is None else file_place.payload
        return self._add(step, rank, site, file_place, payload=payload, value=text)

    def add_text(self, step: int, rank: int, site: Site, text: str, file: FoundFile) -> Record:
        """Add a value, from a file of its own, that cannot be read as a tensor."""
        payload = Payload(file=file.name, nbytes=file.size, shape=())
        return self._add(step, rank, site, None, payload=payload, value=text)

    def add_statistics(
        self, step: int, rank: int, site: Site, statistics: Statistics, dtype: str
    ) -> Record:
        """Add a tensor known only by its statistics."""
        return self._add(step, rank, site, None, statistics=statistics, dtype=dtype)

    def add_unreadable(self, step: int, rank: int, site: Site, file: FoundFile, why: str) -> Record:
        """Add something that cannot be read, also as a problem."""
        self.problems.add(f"{file.name}: {why}", is_loss=False)
        payload = Payload(file=file.name, nbytes=file.size, shape=())
        return self._add(step, rank, site, f"{file.name}: {why}", payload=payload)

    def add_saved(
        self,
        step: int,
        rank: int,
        site: Site,
        file: FoundFile,
        value: FilePlace | Unreadable | PlainValue,
        key: str = "",
    ) -> Record:
        """Add what is at a key of a file, which names it if it cannot be read."""
        if isinstance(value, FilePlace):
            return self.add_tensor(step, rank, site, value)
        why = "it is not a tensor or number"
        if isinstance(value, Unreadable):
            why = value.reason
        elif (text := plain_text(value.value)) is not None:
            return self.add_value(step, rank, site, text)
        return self.add_unreadable(step, rank, site, file, f"{key}: {why}" if key else why)

    def make(self, kind: type[AnyDump]) -> AnyDump:
        """The dump of all records."""
        problems = self.problems.all()
        if not self._records:
            reasons = "; ".join(problems[:3]) or "it contains no file with such a name"
            raise UsageError(f"{self.path} has nothing to read as {self.kind}: {reasons}")
        size = min(max(self.world_size, max(self._records) + 1), _MOST_RANKS)
        ranks: dict[int, RankDump] = {}
        for rank, records in sorted(self._records.items()):
            is_summary = all(
                record.statistics is not None and record.payload is None for record in records
            )
            data = "stats" if is_summary else "tensor"
            ranks[rank] = rank_of(self.path, self.kind, rank, records, world_size=size, data=data)
        reader = ValueReader(self.folder, self._places)
        readers = (reader.read, reader.view, reader.verify)
        losses = self.problems.losses()
        return kind(self.path, self.kind, ranks, problems, losses, *readers)

    def dump(self) -> ForeignDump:
        """The dump of all records; see `make`."""
        return self.make(ForeignDump)

    def _add(
        self, step: int, rank: int, site: Site, location: FilePlace | str | None, **facts: Any
    ) -> Record:
        records = self._records.setdefault(rank, [])
        site = self._unique(step, rank, site)
        record = Record(sequence=len(records), step=step, rank=rank, id=site.id, site=site, **facts)
        records.append(record)
        if location is not None:
            self._places[rank, record.sequence] = location
        return record

    def _unique(self, step: int, rank: int, site: Site) -> Site:
        """The site, with the next free call number if it is taken."""
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
