"""The data flow of a dump: the recorded calls, and where their inputs come from."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from paritas.dumps.survey import is_result

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Iterator

    from paritas.files.records import Record, Site

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
        seen = _SeenValues()
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
            place = site.name if site.level == "buffer" and result else site.position
            (call.made if result else call.given)[place] = record
            self._note_node(call, record, result=result)
            self._find_origin(record, call, seen, result=result)

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
            given = [one for one in call.given.values() if one.tensor is not None]
            if given:
                return given
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
        self, record: Record, call: RecordedCall, seen: _SeenValues, *, result: bool
    ) -> None:
        if record.tensor is None:
            return
        if not result or call.is_given or not call.given:
            origin = self._buffer_of(record) if result else self._named_origin(record)
            origin = origin or seen.nearest(record)
            if origin is not None and self._of.get(origin.sequence) is not call:
                self._origins[record.sequence] = origin
        seen.add(record, result=result and not call.is_given)

    def _buffer_of(self, record: Record) -> Record | None:
        """The buffer that an output of a fused graph is read from."""
        site = record.site
        if site.source != "fused" or site.level != "node" or not site.nodes:
            return None
        found = self._values.get((scope_of(site), site.nodes[-1]))
        return None if found is None or found.site.level != "buffer" else found

    def _named_origin(self, record: Record) -> Record | None:
        """The output that an input is, if its site names the node."""
        site = record.site
        if not site.nodes or (site.source == "fx" and site.nodes == (site.name,)):
            return None
        scope = scope_of(site)
        if site.source != "fx":
            found = self._values.get((scope, site.nodes[-1])) if site.exact else None
            return None if found is None or found.sequence == record.sequence else found
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
        found = self._made.get((value, record.site.level)) or self._made.get(value)
        return found or self._first.get(value)


def scope_of(site: Site) -> Scope:
    """The scope in which names of nodes and calls are unique."""
    return site.graph, site.phase, site.call


def _value_key(record: Record) -> Hashable | None:
    """Equal for records of the same values or memory; None if it is not a tensor."""
    facts = record.tensor
    if facts is None:
        return None
    place = record.sequence if record.alias_of is None else record.alias_of
    return record.digest or place, facts.dtype, facts.shape


def _continues_kernel(kernel: RecordedCall, record: Record) -> bool:
    """Whether a buffer belongs to the current kernel, which reads first, then writes."""
    site, first = record.site, kernel.site
    if (site.kernel, scope_of(site)) != (first.kernel, scope_of(first)):
        return False
    if site.side == "input":
        return not kernel.made and site.position not in kernel.given
    return site.name not in kernel.made
