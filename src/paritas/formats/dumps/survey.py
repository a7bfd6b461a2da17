"""The contents of a dump: figures, problems, the first non-finite values, and its data flow."""

from __future__ import annotations

import dataclasses
import fnmatch
import os
import re
from collections import Counter
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Literal

import msgspec

from paritas.core.errors import ParitasError
from paritas.core.numerics.statistics import Statistics, summarize
from paritas.core.results.wording import joined_ranges
from paritas.formats.dumps.completeness import list_problems, missing_ranks
from paritas.formats.files.records import Header, Observed, Phase, Record, Site, State
from paritas.formats.files.tensor_bytes import check_repeats

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Iterator

    from paritas.formats.dumps.opening import ReadableDump
    from paritas.formats.files.records import Payload


# --- The first non-finite value -------------------------------------------------------------------

NonFiniteKind = Literal["NaN", "Inf"]
NonFiniteOrigin = Literal["made", "entered", "unknown"]

_NON_FINITE_VALUE = re.compile(r"""(float\(['"])?[+-]?(nan|inf)(['"]\))?""")


class NonFinite(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The first non-finite value of a rank, in the order of recording.

    Attributes:
        kind: NaN, or Inf if there is an infinity and no NaN.
        sequence: the number of the record.
        earlier: how many tensors of the rank were recorded before it.
        count: how many values of the tensor are not finite.
        of: how many values it has.
        origin: "made" if every recorded input of the same call is finite, "entered" if one is not
            or if it is an input itself, "unknown" if no input is recorded.
        inputs: how many inputs of the same call are recorded.
        bad_inputs: how many of these are not finite.
    """

    kind: NonFiniteKind
    rank: int
    step: int
    sequence: int
    id: str
    site: Site
    count: int
    of: int
    earlier: int
    origin: NonFiniteOrigin
    inputs: int = 0
    bad_inputs: int = 0

    @property
    def is_given(self) -> bool:
        """Whether it is an input of a call rather than a result."""
        return not is_result(self.site)


@dataclasses.dataclass
class _CallInputs:
    """The recorded inputs of one call."""

    inputs: int = 0
    bad: int = 0


@dataclasses.dataclass(frozen=True)
class _FirstFound:
    record: Record
    statistics: Statistics
    call: _CallInputs
    earlier: int


class FirstNonFinite:
    """Watches the records of one rank in their order.

    An infinity is often intended (a mask), a NaN hardly ever: each has its own first occurrence.
    """

    def __init__(self) -> None:
        self._step: int | None = None
        # Only the calls of the current step, so that memory stays bounded.
        self._calls: dict[tuple[str, ...], _CallInputs] = {}
        self._found: dict[NonFiniteKind, _FirstFound] = {}
        self._tensors = 0

    def offer(self, record: Record, statistics: Statistics | None) -> None:
        """Add the next record; without statistics it counts as a value other than a tensor."""
        if record.step != self._step:
            self._step = record.step
            self._calls = {}
        call = self._calls.setdefault(_call_key(record.site), _CallInputs())
        if statistics is None:
            finite = _NON_FINITE_VALUE.fullmatch(record.value or "") is None
        else:
            finite = statistics.is_finite
        if not is_result(record.site) and (statistics is not None or not finite):
            call.inputs += 1
            call.bad += not finite
        if statistics is not None:
            if not finite:
                kind: NonFiniteKind = "NaN" if statistics.nans else "Inf"
                self._found.setdefault(kind, _FirstFound(record, statistics, call, self._tensors))
            self._tensors += 1

    def findings(self) -> list[NonFinite]:
        """What was found, in the order of recording; an infinity after a NaN is omitted."""
        entry = sorted(self._found.items(), key=lambda item: item[1].record.sequence)
        if entry and entry[0][0] == "NaN":
            entry = entry[:1]
        return [_non_finite(kind, item) for kind, item in entry]


def is_result(site: Site) -> bool:
    """Whether it is a result of a call rather than an input.

    Gradients of eager modules have the names of the forward pass: a backward call receives the
    gradients of its outputs and makes those of its inputs.
    """
    backwards = site.source == "eager" and site.phase == "backward" and site.level == "module"
    return (site.side == "output") is not backwards


def _call_key(site: Site) -> tuple[str, ...]:
    return (site.source, site.level, site.phase, site.graph, site.name, str(site.call))


def _non_finite(kind: NonFiniteKind, first_found: _FirstFound) -> NonFinite:
    record, statistics, call = first_found.record, first_found.statistics, first_found.call
    origin: NonFiniteOrigin = "unknown"
    if not is_result(record.site) or call.bad:
        origin = "entered"
    elif call.inputs:
        origin = "made"
    infinities = statistics.positive_infinities + statistics.negative_infinities
    return NonFinite(
        kind=kind,
        rank=record.rank,
        step=record.step,
        sequence=record.sequence,
        id=record.id,
        site=record.site,
        count=statistics.nans + infinities,
        of=statistics.count,
        earlier=first_found.earlier,
        origin=origin,
        inputs=call.inputs,
        bad_inputs=call.bad,
    )


# --- The summary ----------------------------------------------------------------------------------


class RecordFilter(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which records to include; an empty field includes all.

    Attributes:
        layers: case-insensitive globs for a name, its module or an enclosing module.
        steps: first and last of each range.
    """

    layers: tuple[str, ...] = ()
    steps: tuple[tuple[int, int], ...] = ()
    ranks: tuple[int, ...] = ()
    phase: Phase | None = None

    def accepts(self, record: Record) -> bool:
        """Whether the record is included."""
        if self.phase is not None and record.site.phase != self.phase:
            return False
        if self.ranks and record.rank not in self.ranks:
            return False
        if self.steps and not any(first <= record.step <= last for first, last in self.steps):
            return False
        return not self.layers or any(_matches_glob(record.site, glob) for glob in self.layers)


def _matches_glob(site: Site, glob: str) -> bool:
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
        kinds: `dtype[shape]` of its outputs, each once; of its inputs if no output is recorded.
        minimum: smallest finite value of these tensors.
        maximum: largest finite value of these tensors.
        non_finite: how many records, inputs or outputs, contain a NaN or an infinity.
    """

    name: str
    phase: Phase
    records: int
    kinds: tuple[str, ...]
    minimum: float | None
    maximum: float | None
    non_finite: int


class RankFacts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The part of one rank.

    Attributes:
        state: closed by the run; still being written; or cut off with the run.
        expected: how many records there should be; known once it is closed.
        last: the canonical id of the last record.
    """

    rank: int
    records: int
    state: State
    expected: int | None = None
    last_step: int | None = None
    last: str = ""


class ChecksumFacts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many stored values of the selected records match their checksums.

    Attributes:
        fit: how many match.
        without: how many have no checksum; these can at least be read.
        damaged: how many do not match, or cannot be read; the problems say which.
        endings: suffixes of the files without checksums; without a suffix, the tool's name.
    """

    fit: int = 0
    without: int = 0
    damaged: int = 0
    endings: tuple[str, ...] = ()

    @property
    def values(self) -> int:
        """The number of values."""
        return self.fit + self.without + self.damaged

    @property
    def is_sound(self) -> bool:
        """Whether there are values, and all of them match."""
        return self.fit == self.values > 0


class DumpSummary(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A dump as a whole, and its selected records.

    Attributes:
        kind: the tool that wrote it.
        header: of the first rank; run, program and versions are the same in all.
        missing: ranges of the ranks that should have recorded but left nothing.
        steps: ranges of the steps that have records.
        levels: how many records of each level.
        bytes_on_disk: of all files.
        payload_bytes: of all recorded tensors, counted each.
        stored_bytes: of those, the bytes actually stored.
        observed: of all ranks, per graph.
        notes: of all ranks, each once.
        problems: what could not be read, or is missing.
        selected: how many records are selected; the fields below describe these.
        names: in the order of first occurrence.
        non_finite: the first NaN and the first infinity of each rank, earliest step first.
        from_payloads: for how many records the statistics were computed from stored values.
        checksums: None if they were not verified.
    """

    path: str
    kind: str
    header: Header
    ranks: tuple[RankFacts, ...]
    missing: tuple[tuple[int, int], ...]
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
        """Whether no problem was found in what was checked."""
        return not self.problems and (self.checksums is None or self.checksums.is_sound)


class ExaminedRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A record with statistics of its values, from the index or from the values themselves."""

    record: Record
    statistics: Statistics | None = None


# --- One pass over a dump -------------------------------------------------------------------------


@dataclasses.dataclass
class _NameTotals:
    """Totals of one name, separate for outputs and inputs."""

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
            extremes = self.ranges.get(side, [])
            self.ranges[side] = [min([*extremes, *ends]), max([*extremes, *ends])]

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


class DumpSurvey:
    """Makes one pass over a dump: `walk` yields the selected records, `summary` sums them up.

    Statistics come from the index; if it has none, the values are read, each content once.
    """

    def __init__(
        self, dump: ReadableDump, record_filter: RecordFilter, *, check: bool = False
    ) -> None:
        """`check` verifies the checksums of all stored values."""
        self._check = check
        self._checks: Counter[str] = Counter()
        self._endings: dict[str, None] = {}
        self._dump = dump
        self._wanted = record_filter
        self._levels: Counter[str] = Counter()
        self._sources: dict[str, None] = {}
        self._steps: set[int] = set()
        self._last: dict[int, Record] = {}
        self._per_rank: Counter[int] = Counter()
        self._tensors = 0
        self._payload_bytes = 0
        self._stored: dict[tuple[object, ...], int] = {}
        self._selected = 0
        self._names: dict[tuple[str, Phase], _NameTotals] = {}
        self._firsts: dict[int, FirstNonFinite] = {}
        self._read: dict[tuple[object, ...], Statistics | None] = {}
        self._from_payloads = 0
        self._problems: list[str] = []
        self._seen_names: dict[str, None] = {}

    def walk(self) -> Iterator[ExaminedRecord]:
        """The selected records, in the order of recording; iterate to the end."""
        for record in self._dump.records():
            self._count(record)
            if not self._wanted.accepts(record):
                continue
            is_sound = not self._check or self._is_sound(record)
            statistics = self._statistics(record) if is_sound else record.statistics
            self._selected += 1
            key = (record.site.name, record.site.phase)
            self._names.setdefault(key, _NameTotals()).add(record, statistics)
            self._firsts.setdefault(record.rank, FirstNonFinite()).offer(record, statistics)
            yield ExaminedRecord(record=record, statistics=statistics)

    def names_seen(self) -> list[str]:
        """Every name and module of the dump, selected or not."""
        return list(self._seen_names)

    def summary(self) -> DumpSummary:
        """The totals, after `walk` has finished."""
        dump = self._dump
        beside = dump.check_files() if self._check else []
        headers = {rank: dump.header(rank) for rank in sorted(dump.ranks)}
        first = next(iter(headers.values()))
        files, size = _disk_use(dump.path)
        items = [item for firsts in self._firsts.values() for item in firsts.findings()]
        missing = missing_ranks(list(headers.values()), headers)
        return DumpSummary(
            path=str(dump.path),
            kind=dump.kind,
            header=first,
            ranks=tuple(self._rank_facts(rank, header) for rank, header in headers.items()),
            missing=missing,
            steps=joined_ranges(sorted(self._steps)),
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
            problems=(*list_problems(dump), *self._problems, *beside),
            selected=self._selected,
            names=tuple(item.facts(*key) for key, item in self._names.items()),
            non_finite=tuple(sorted(items, key=lambda item: (item.step, item.rank, item.sequence))),
            from_payloads=self._from_payloads,
            checksums=self._checksums(),
        )

    def _checksums(self) -> ChecksumFacts | None:
        if not self._check:
            return None
        return ChecksumFacts(**self._checks, endings=tuple(self._endings))

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
            self._stored[_identify_bytes(self._dump.path, payload)] = payload.nbytes

    def _is_sound(self, record: Record) -> bool:
        """Whether the values of a record can be read and match their checksum, if there is one."""
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
                values = self._dump.read(record)
                check_repeats(values)
                self._read[key] = summarize(values)
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


def _identify_bytes(path: Path, payload: Payload) -> tuple[object, ...]:
    """Where bytes are; the msit layout may link two names to one file, which count as one."""
    if payload.key:
        return payload.file, payload.begin
    try:
        facts = (path / payload.file).lstat()
    except OSError:  # the reader reports it
        return (payload.file,)
    return facts.st_dev, facts.st_ino


def _disk_use(path: Path) -> tuple[int, int]:
    """The number of files and their size, hard links counted once; vanished files are ignored."""
    if path.is_file():
        return 1, path.stat().st_size
    sizes: dict[tuple[int, int], int] = {}
    files = 0
    for folder, _, names in os.walk(path):
        for name in names:
            try:
                facts = Path(folder, name).lstat()
            except OSError:
                continue
            files += 1
            sizes[facts.st_dev, facts.st_ino] = facts.st_size
    return files, sum(sizes.values())


# --- The data flow: the recorded calls, and where their inputs come from --------------------------

# Graph, phase, and run of the graph: a node's name is unique within it.
Scope = tuple[str, str, int]

_PLACEHOLDER = "placeholder"


@dataclasses.dataclass
class RecordedCall:
    """One call of an operator, a module, a node or a kernel.

    Attributes:
        given: its inputs by position, in recording order.
        made: its outputs by position; for a kernel, by the name of the buffer.
    """

    site: Site
    given: dict[str, Record] = dataclasses.field(default_factory=dict)
    made: dict[str, Record] = dataclasses.field(default_factory=dict)

    @property
    def is_given(self) -> bool:
        """Whether it is an input of a graph rather than a call."""
        return self.site.op == _PLACEHOLDER


class RecordedCalls:
    """The calls of one rank in one step, in program order."""

    def __init__(self, records: Iterable[Record]) -> None:
        """Group the records of one rank and step into calls."""
        self.in_order: list[RecordedCall] = []
        self._of: dict[int, RecordedCall] = {}
        self._nodes: dict[tuple[Scope, str], RecordedCall] = {}
        self._values: dict[tuple[Scope, str], Record] = {}
        self._origins: dict[int, Record] = {}
        open_calls: dict[Hashable, RecordedCall] = {}
        kernel: RecordedCall | None = None
        seen_values = _SeenValues()
        for record in records:
            site = record.site
            if site.level == "buffer":
                if kernel is None or not _continues_kernel(kernel, record):
                    kernel = self._begin(site)
                call = kernel
            else:
                key = (site.source, site.level, scope_of(site), site.name)
                call = open_calls.get(key) or self._begin(site)
                open_calls[key] = call
            self._of[record.sequence] = call
            result = is_result(site)
            position = site.name if site.level == "buffer" and result else site.position
            (call.made if result else call.given)[position] = record
            self._note_node(call, record, result=result)
            self._find_origin(record, call, seen_values, result=result)

    def call_of(self, record: Record) -> RecordedCall | None:
        """The call that a record belongs to; None for a record of another dump."""
        return self._of.get(record.sequence)

    def node(self, scope: Scope, name: str) -> RecordedCall | None:
        """The call of a node, if the graph was run node by node."""
        return self._nodes.get((scope, name))

    def value_of(self, scope: Scope, name: str) -> Record | None:
        """The first record of a node's exact value."""
        return self._values.get((scope, name))

    def sources(self, record: Record) -> list[Record]:
        """The values that a value was computed from; empty if unknown.

        An output comes from the input tensors of its call. An input comes from the output of
        another call, or from the first record of the same value.
        """
        call = self.call_of(record)
        if call is not None and is_result(record.site):
            input_tensors = [
                argument for argument in call.given.values() if argument.tensor is not None
            ]
            if input_tensors:
                return input_tensors
        origin = self._origins.get(record.sequence)
        return [] if origin is None else [origin]

    def __iter__(self) -> Iterator[RecordedCall]:
        return iter(self.in_order)

    def _begin(self, site: Site) -> RecordedCall:
        call = RecordedCall(site)
        self.in_order.append(call)
        return call

    def _note_node(self, call: RecordedCall, record: Record, *, result: bool) -> None:
        site = record.site
        scope = scope_of(site)
        if site.level == "node" and site.source == "fx" and result:
            self._nodes.setdefault((scope, site.name), call)
        if not site.nodes or not site.exact:
            return
        # A node with several values is not their value: `getitem` nodes select them.
        several = site.source == "fx" and (not result or site.position != "0")
        if not several:
            self._values.setdefault((scope, site.nodes[-1]), record)

    def _find_origin(
        self, record: Record, call: RecordedCall, seen_values: _SeenValues, *, result: bool
    ) -> None:
        if record.tensor is None:
            return
        if not result or call.is_given or not call.given:
            origin = self._buffer_of(record) if result else self._named_origin(record)
            origin = origin or seen_values.nearest(record)
            if origin is not None and self._of.get(origin.sequence) is not call:
                self._origins[record.sequence] = origin
        seen_values.add(record, result=result and not call.is_given)

    def _buffer_of(self, record: Record) -> Record | None:
        """The buffer that an output of a fused graph is read from."""
        site = record.site
        if site.source != "fused" or site.level != "node" or not site.nodes:
            return None
        producer = self._values.get((scope_of(site), site.nodes[-1]))
        return None if producer is None or producer.site.level != "buffer" else producer

    def _named_origin(self, record: Record) -> Record | None:
        """The output that an input is, if its site names the node."""
        site = record.site
        if not site.nodes or (site.source == "fx" and site.nodes == (site.name,)):
            return None
        scope = scope_of(site)
        if site.source != "fx":
            node_record = self._values.get((scope, site.nodes[-1])) if site.exact else None
            return (
                None
                if node_record is None or node_record.sequence == record.sequence
                else node_record
            )
        producer = self._nodes.get((scope, site.nodes[-1]))
        if producer is None:
            return None
        several = len(producer.made) > 1
        return producer.made.get(site.position.rpartition(".")[2] if several else "0")


class _SeenValues:
    """The values recorded so far, by digest or memory."""

    def __init__(self) -> None:
        self._made: dict[Hashable, Record] = {}
        self._first: dict[Hashable, Record] = {}

    def add(self, record: Record, *, result: bool) -> None:
        """Remember the last output and the first record of a value."""
        value = _value_key(record)
        if value is None:
            return
        if result:
            self._made[value] = record
            self._made[value, record.site.level] = record
        self._first.setdefault(value, record)

    def nearest(self, record: Record) -> Record | None:
        """The output with these bytes, preferably at the same level; else their first record."""
        value = _value_key(record)
        if value is None:
            return None
        producer = self._made.get((value, record.site.level)) or self._made.get(value)
        return producer or self._first.get(value)


def scope_of(site: Site) -> Scope:
    """The scope in which names of nodes and calls are unique."""
    return site.graph, site.phase, site.call


def _value_key(record: Record) -> Hashable | None:
    """Equal for records of the same values or memory; None if it is not a tensor."""
    facts = record.tensor
    if facts is None:
        return None
    position = record.sequence if record.alias_of is None else record.alias_of
    return record.digest or position, facts.dtype, facts.shape


def _continues_kernel(kernel: RecordedCall, record: Record) -> bool:
    """Whether a buffer belongs to the current kernel, which reads first, then writes."""
    site, first = record.site, kernel.site
    if (site.kernel, scope_of(site)) != (first.kernel, scope_of(first)):
        return False
    if site.side == "input":
        return not kernel.made and site.position not in kernel.given
    return site.name not in kernel.made
