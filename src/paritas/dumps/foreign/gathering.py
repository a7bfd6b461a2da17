"""The records of a foreign dump, put together as its files are understood."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import msgspec

from paritas.dumps.foreign.dump import ForeignDump, rank_of
from paritas.dumps.foreign.finding import Folder, Problems
from paritas.dumps.foreign.raw_values import Place, values_at, verify_at, view_at
from paritas.dumps.mapped_files import OpenFiles
from paritas.dumps.records import Payload, Record
from paritas.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

    from paritas.dumps.foreign.finding import Found
    from paritas.dumps.index import RankDump
    from paritas.dumps.records import Site, TensorFacts
    from paritas.numerics.statistics import Statistics

    _Reader = Callable[[Record], Tensor]
    _Viewer = Callable[[Record, bool], Tensor]
    _Verifier = Callable[[Record], bool]
    _Made = tuple[Path, str, dict[int, RankDump], list[str], _Reader, _Viewer, _Verifier]

__all__ = ["Gathered", "ValueReader"]

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
    places: dict[tuple[int, int], Place | str]
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

    def _place(self, record: Record) -> Place:
        place = self.places.get((record.rank, record.sequence))
        if isinstance(place, Place):
            return place
        if place is not None:
            raise UsageError(place)
        if record.value is not None:
            raise UsageError(f"it is no tensor: its value is {record.value}")
        raise UsageError("it has no values: statistics are all that was recorded")


@dataclasses.dataclass(frozen=True)
class _Draft:
    """What a record is made of, but for its number."""

    step: int
    rank: int
    site: Site
    place: Place | str | None
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
        self._places: dict[tuple[int, int], Place | str] = {}
        self._calls: dict[tuple[int, int, str], int] = {}

    def add_tensor(self, step: int, rank: int, site: Site, place: Place) -> Record:
        """A tensor whose values can be read."""
        return self._add(_Draft(step, rank, site, place, place.payload, place.facts))

    def add_value(
        self, step: int, rank: int, site: Site, text: str, place: Place | None = None
    ) -> Record:
        """What is no tensor; `place` where it might as well have been one."""
        payload = None if place is None else place.payload
        return self._add(_Draft(step, rank, site, place, payload, value=text))

    def add_text(self, step: int, rank: int, site: Site, text: str, file: Found) -> Record:
        """What is no tensor and could be none, in a file of its own."""
        payload = Payload(file=file.name, nbytes=file.size, shape=())
        return self._add(_Draft(step, rank, site, None, payload, value=text))

    def add_statistics(
        self, step: int, rank: int, site: Site, found: Statistics, dtype: str
    ) -> Record:
        """A tensor of which only a summary was kept."""
        return self._add(_Draft(step, rank, site, None, None, statistics=found, dtype=dtype))

    def add_unreadable(self, step: int, rank: int, site: Site, file: Found, why: str) -> Record:
        """Something that cannot be read; it is a problem, too."""
        self.problems.add(f"{file.name}: {why}")
        payload = Payload(file=file.name, nbytes=file.size, shape=())
        return self._add(_Draft(step, rank, site, f"{file.name}: {why}", payload))

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

    def _add(self, draft: _Draft) -> Record:
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
