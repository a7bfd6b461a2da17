"""What a dump holds, in numbers: how much of what, under which names, and what is amiss."""

from __future__ import annotations

import fnmatch

import msgspec

from paritas.dumps.finiteness import NonFinite
from paritas.dumps.index import State
from paritas.dumps.records import Header, Observed, Phase, Record, Site
from paritas.numerics.statistics import Statistics

__all__ = ["ChecksumFacts", "DumpSummary", "Examined", "NameFacts", "RankFacts", "Wanted"]


class Wanted(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which records are looked at; empty is all.

    Attributes:
        layers: globs, in any case, for a name, its module or a module around that.
        steps: first and last of each range.
    """

    layers: tuple[str, ...] = ()
    steps: tuple[tuple[int, int], ...] = ()
    ranks: tuple[int, ...] = ()
    phase: Phase | None = None

    def accepts(self, record: Record) -> bool:
        """Whether it is one of them."""
        if self.phase is not None and record.site.phase != self.phase:
            return False
        if self.ranks and record.rank not in self.ranks:
            return False
        if self.steps and not any(first <= record.step <= last for first, last in self.steps):
            return False
        return not self.layers or any(_names(record.site, glob) for glob in self.layers)


def _names(site: Site, glob: str) -> bool:
    paths = [site.module, *([site.name] if site.level in {"module", "parameter"} else [])]
    around = (
        ".".join(parts[:end])
        for parts in (path.split(".") for path in paths)
        for end in range(1, len(parts) + 1)
    )
    names = (name.casefold() for name in (site.name, *site.nodes, *around) if name)
    pattern = glob.casefold()
    return any(name == pattern or fnmatch.fnmatchcase(name, pattern) for name in names)


class NameFacts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All records of one name in one phase.

    Attributes:
        kinds: `dtype[shape]` of its outputs, each once; of its inputs where no output is recorded.
        minimum: least finite value of the same tensors.
        maximum: greatest.
        non_finite: how many records, of either side, hold a NaN or an infinity.
    """

    name: str
    phase: Phase
    records: int
    kinds: tuple[str, ...]
    minimum: float | None
    maximum: float | None
    non_finite: int


class RankFacts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one rank left.

    Attributes:
        state: closed by the run; still being written; or cut off when the run was.
        expected: how many records there should be, which is known once it is closed.
        last: the canonical id of the last record.
    """

    rank: int
    records: int
    state: State
    expected: int | None = None
    last_step: int | None = None
    last: str = ""


class ChecksumFacts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the stored values of the records asked for fit their checksums.

    Attributes:
        fit: how many do.
        without: how many have none; of these it is known that they can be read.
        damaged: how many do not fit, or cannot be read; the problems say which.
        endings: of the names of the files without any; of names without, which tool's they are.
    """

    fit: int = 0
    without: int = 0
    damaged: int = 0
    endings: tuple[str, ...] = ()

    @property
    def values(self) -> int:
        """How many there are."""
        return self.fit + self.without + self.damaged

    @property
    def is_sound(self) -> bool:
        """Whether there are values, and each of them fits its checksum."""
        return self.fit == self.values > 0


class DumpSummary(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A dump as a whole, and the records of it that were asked for.

    Attributes:
        kind: which tool made it.
        header: of the first rank; run, program, versions and the like are the same in all.
        missing: ranks that were to record, and of which there is nothing.
        steps: ranges of the steps that have records.
        levels: how many records of each level.
        bytes_on_disk: of all files.
        payload_bytes: of all recorded tensors, had each been stored by itself.
        stored_bytes: of those that were.
        observed: of all ranks, per graph.
        notes: of all ranks, each once.
        problems: what could not be read, or is not there.
        selected: how many records were asked for; what follows is of these.
        names: in the order in which they were first seen.
        non_finite: the first NaN and the first infinity of each rank, earliest step first.
        from_payloads: of how many records the statistics had to be taken from the stored values.
        checksums: None where they were not asked for.
    """

    path: str
    kind: str
    header: Header
    ranks: tuple[RankFacts, ...]
    missing: tuple[int, ...]
    steps: tuple[tuple[int, int], ...]
    levels: dict[str, int]
    sources: tuple[str, ...]
    records: int
    tensors: int
    bytes_on_disk: int
    files: int
    payload_bytes: int
    stored_bytes: int
    observed: tuple[Observed, ...]
    notes: tuple[str, ...]
    problems: tuple[str, ...]
    selected: int
    names: tuple[NameFacts, ...]
    non_finite: tuple[NonFinite, ...]
    from_payloads: int
    checksums: ChecksumFacts | None = None

    @property
    def is_sound(self) -> bool:
        """Whether nothing is missing or damaged, as far as was asked."""
        return not self.problems and (self.checksums is None or self.checksums.is_sound)


class Examined(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A record with statistics of its values, from the index or from the values themselves."""

    record: Record
    statistics: Statistics | None = None
