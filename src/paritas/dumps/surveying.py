"""Going through a dump once, and adding up what is in it."""

from __future__ import annotations

import dataclasses
import os
import re
from collections import Counter
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from paritas.dumps.finiteness import FirstNonFinite
from paritas.dumps.summary import ChecksumFacts, DumpSummary, Examined, NameFacts, RankFacts
from paritas.errors import ParitasError
from paritas.numerics.statistics import summarize

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paritas.dumps.opening import ReadableDump
    from paritas.dumps.records import Header, Payload, Phase, Record
    from paritas.dumps.summary import Wanted
    from paritas.numerics.statistics import Statistics

__all__ = ["Survey"]


@dataclasses.dataclass
class _Name:
    """What is being added up under one name; outputs and inputs apart."""

    records: int = 0
    non_finite: int = 0
    kinds: dict[str, dict[str, None]] = dataclasses.field(default_factory=dict)
    ranges: dict[str, list[float]] = dataclasses.field(default_factory=dict)

    def add(self, record: Record, statistics: Statistics | None) -> None:
        self.records += 1
        side = record.site.side
        if record.is_tensor:
            self.kinds.setdefault(side, {})[record.kind] = None
        if statistics is None:
            return
        self.non_finite += not statistics.is_finite
        ends = [end for end in (statistics.minimum, statistics.maximum) if end is not None]
        if ends:
            known = self.ranges.get(side, [])
            self.ranges[side] = [min([*known, *ends]), max([*known, *ends])]

    def facts(self, name: str, phase: Phase) -> NameFacts:
        side = "output" if "output" in self.kinds else "input"
        ends = self.ranges.get(side)
        return NameFacts(
            name=name,
            phase=phase,
            records=self.records,
            kinds=tuple(self.kinds.get(side, ())),
            minimum=ends[0] if ends else None,
            maximum=ends[1] if ends else None,
            non_finite=self.non_finite,
        )


_MOST_ABSENT = 20


class Survey:
    """Goes through a dump once: `walk` gives the records asked for, `summary` what they add up to.

    Statistics come from the index; where it has none, the values are read, each content once.
    """

    def __init__(self, dump: ReadableDump, wanted: Wanted, *, check: bool = False) -> None:
        """`check` holds all stored values against their checksums."""
        self._check = check
        self._checks: Counter[str] = Counter()
        self._endings: dict[str, None] = {}
        self._dump = dump
        self._wanted = wanted
        self._levels: Counter[str] = Counter()
        self._sources: dict[str, None] = {}
        self._steps: set[int] = set()
        self._last: dict[int, Record] = {}
        self._per_rank: Counter[int] = Counter()
        self._tensors = 0
        self._payload_bytes = 0
        self._stored: dict[tuple[object, ...], int] = {}
        self._selected = 0
        self._names: dict[tuple[str, Phase], _Name] = {}
        self._firsts: dict[int, FirstNonFinite] = {}
        self._read: dict[tuple[object, ...], Statistics | None] = {}
        self._from_payloads = 0
        self._problems: list[str] = []
        self._seen_names: dict[str, None] = {}

    def walk(self) -> Iterator[Examined]:
        """The records asked for, in the order of recording; go through it to the end."""
        for record in self._dump.records():
            self._count(record)
            if not self._wanted.accepts(record):
                continue
            is_sound = not self._check or self._is_sound(record)
            statistics = self._statistics(record) if is_sound else record.statistics
            self._selected += 1
            key = (record.site.name, record.site.phase)
            self._names.setdefault(key, _Name()).add(record, statistics)
            self._firsts.setdefault(record.rank, FirstNonFinite()).offer(record, statistics)
            yield Examined(record=record, statistics=statistics)

    def names_seen(self) -> list[str]:
        """Every name and module of the dump, asked for or not."""
        return list(self._seen_names)

    def summary(self) -> DumpSummary:
        """What there was, once all is gone through."""
        dump = self._dump
        beside = dump.check_files() if self._check else []
        headers = {rank: dump.header(rank) for rank in sorted(dump.ranks)}
        first = next(iter(headers.values()))
        files, size = _disk_use(dump.path)
        found = [item for firsts in self._firsts.values() for item in firsts.findings()]
        missing = tuple(rank for rank in _expected_ranks(first) if rank not in headers)
        absent = [f"nothing is there of rank {rank}" for rank in missing[:_MOST_ABSENT]]
        if len(missing) > _MOST_ABSENT:
            absent.append(f"nor of {len(missing) - _MOST_ABSENT} more of {first.world_size} ranks")
        return DumpSummary(
            path=str(dump.path),
            kind=dump.kind,
            header=first,
            ranks=tuple(self._rank_facts(rank, header) for rank, header in headers.items()),
            missing=missing,
            steps=_ranges(self._steps),
            levels=dict(self._levels),
            sources=tuple(self._sources),
            records=sum(self._per_rank.values()),
            tensors=self._tensors,
            bytes_on_disk=size,
            files=files,
            payload_bytes=self._payload_bytes,
            stored_bytes=sum(self._stored.values()),
            observed=tuple(item for header in headers.values() for item in header.observed),
            notes=tuple(dict.fromkeys(note for h in headers.values() for note in h.notes)),
            problems=(*dump.problems, *absent, *self._problems, *beside),
            selected=self._selected,
            names=tuple(item.facts(*key) for key, item in self._names.items()),
            non_finite=tuple(sorted(found, key=lambda item: (item.step, item.rank, item.sequence))),
            from_payloads=self._from_payloads,
            checksums=ChecksumFacts(**self._checks, endings=tuple(self._endings))
            if self._check
            else None,
        )

    def _count(self, record: Record) -> None:
        site = record.site
        self._levels[site.level] += 1
        self._sources[site.source] = None
        self._steps.add(record.step)
        self._last[record.rank] = record
        self._per_rank[record.rank] += 1
        self._tensors += record.is_tensor
        for name in (site.name, site.module):
            if name:
                self._seen_names[name] = None
        payload = record.payload
        if payload is not None:
            self._payload_bytes += payload.nbytes
            self._stored[_place(self._dump.path, payload)] = payload.nbytes

    def _is_sound(self, record: Record) -> bool:
        """Whether the values of a record can be read and fit their checksum, if they have one."""
        payload = record.payload
        if payload is None or record.value is not None:
            return True
        try:
            fits = self._dump.verify(record)
            if not fits:
                self._dump.view(record)
                ending = PurePosixPath(payload.file).suffix
                self._endings[ending if ending[1:].isalpha() else self._dump.kind] = None
        except ParitasError as error:
            self._checks["damaged"] += 1
            self._problems.append(f"rank {record.rank}, step {record.step}: {error}")
            return False
        self._checks["fit" if fits else "without"] += 1
        return True

    def _statistics(self, record: Record) -> Statistics | None:
        if record.statistics is not None or record.payload is None or record.tensor is None:
            return record.statistics
        self._from_payloads += 1
        key = (record.rank, record.payload, record.tensor.dtype, record.tensor.shape)
        if key not in self._read:
            try:
                self._read[key] = summarize(self._dump.read(record))
            except ParitasError as error:
                self._read[key] = None
                self._problems.append(f"rank {record.rank}, step {record.step}: {error}")
        return self._read[key]

    def _rank_facts(self, rank: int, header: Header) -> RankFacts:
        last = self._last.get(rank)
        return RankFacts(
            rank=rank,
            records=self._per_rank[rank],
            state=self._dump.ranks[rank].state,
            expected=header.records if header.closed else None,
            last_step=None if last is None else last.step,
            last="" if last is None else last.id,
        )


def _expected_ranks(header: Header) -> list[int]:
    """The ranks that were to record: all of the run, unless some were asked for."""
    asked = header.selection.get("ranks")
    if asked is None:
        return list(range(header.world_size))
    return [int(number) for number in re.findall(r"\d+", asked)]


def _ranges(numbers: set[int]) -> tuple[tuple[int, int], ...]:
    """Numbers as the fewest ranges."""
    found: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if found and found[-1][1] == number - 1:
            found[-1] = (found[-1][0], number)
        else:
            found.append((number, number))
    return tuple(found)


def _place(path: Path, payload: Payload) -> tuple[object, ...]:
    """Where bytes are: two names of one file, as the msit layout has them, are one place."""
    if payload.key:
        return payload.file, payload.begin
    try:
        found = (path / payload.file).lstat()
    except OSError:  # the reader tells of it
        return (payload.file,)
    return found.st_dev, found.st_ino


def _disk_use(path: Path) -> tuple[int, int]:
    """How many files there are, and the bytes of each once; what goes meanwhile is left out."""
    if path.is_file():
        return 1, path.stat().st_size
    sizes: dict[tuple[int, int], int] = {}
    files = 0
    for folder, _, names in os.walk(path):
        for name in names:
            try:
                found = Path(folder, name).lstat()
            except OSError:
                continue
            files += 1
            sizes[found.st_dev, found.st_ino] = found.st_size
    return files, sum(sizes.values())
