"""Which operators have to be run again to get at one recorded value, and on which values.

Where both dumps hold what the very call was given, it is that call. Fused code holds what a kernel
read and wrote: there, it is the nodes of the graph that the kernel stands for, as the other dump,
which ran them one by one, has them.
"""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING, Any

import torch

from paritas._torch.named_operators import operator_named
from paritas.comparison.replaying.dataflow import Call, scope_of
from paritas.comparison.replaying.plain_values import read_value
from paritas.comparison.replaying.runs import Leaf, Program, Result, Step
from paritas.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paritas.comparison.replaying.dataflow import Calls, Scope
    from paritas.dumps.records import Record

__all__ = ["Binding", "Plan", "make_plan"]

# Of these, the seed decides all.
_SEEDED = re.compile(r"prims\.inductor_(random|randint)\.default")
_MOST_STEPS = 200
_MOST_NAMED = 6


@dataclasses.dataclass(frozen=True)
class Binding:
    """What a leaf is on either side; None where the other side's value is taken for it."""

    my: Record | None
    golden: Record | None


@dataclasses.dataclass(frozen=True)
class Plan:
    """A program, what it is given on either side, and what it is, in words.

    Attributes:
        unsure: nodes whose value one side has not recorded, so that it may have been another.
    """

    program: Program
    bindings: dict[str, Binding]
    words: str
    unsure: tuple[str, ...] = ()


def make_plan(my: Record, golden: Record, my_calls: Calls, golden_calls: Calls) -> Plan:
    """How to get at a pair of values again.

    Raises:
        UsageError: the dumps do not hold enough for that; the message says what is missing.
    """
    mine, theirs = my_calls.call_of(my), golden_calls.call_of(golden)
    if mine is None or theirs is None:
        raise UsageError("it is not among the recorded calls")
    if mine.is_given or theirs.is_given:
        raise UsageError("it is what the graph was given")
    if "parameter" in (my.site.level, golden.site.level):
        raise UsageError("it is a parameter's gradient: what computed it is a row of its own")
    if "module" in (my.site.level, golden.site.level):
        raise UsageError("it is a module's: the dump does not say which operators that runs")
    if not (my.site.exact and golden.site.exact):
        raise UsageError("the buffer is not known to hold the value of a node")
    buffered = "buffer" in (my.site.level, golden.site.level)
    if mine.given and theirs.given and not buffered:
        return _call_plan(my, golden, mine, theirs)
    if _is_node(golden_calls, golden):
        return _Grouping(golden, golden_calls, my, my_calls, planned="golden").plan()
    if _is_node(my_calls, my):
        return _Grouping(my, my_calls, golden, golden_calls, planned="my").plan()
    if buffered:
        raise UsageError("neither dump holds the operators' arguments: record one of source='fx'")
    raise UsageError("what the operator was given is not recorded")


def _is_node(calls: Calls, record: Record) -> bool:
    call = calls.node(scope_of(record.site), record.site.name)
    return call is not None and bool(call.given)


def _call_plan(my: Record, golden: Record, mine: Call, theirs: Call) -> Plan:
    """The same operator on either side, argument by argument."""
    if my.site.op != golden.site.op:
        raise UsageError(f"my side runs {my.site.op}, the golden one {golden.site.op}")
    if my.site.position != golden.site.position:
        raise UsageError("the two are different results of the operator")
    found: dict[str, Any] = {}
    bindings: dict[str, Binding] = {}
    differ: list[str] = []
    for place, record in theirs.given.items():
        other = mine.given.get(place)
        if record.tensor is not None:
            if other is None or other.tensor is None:
                raise UsageError(f"my side has no tensor for argument {place} of {my.site.op}")
            bindings[place] = Binding(other, record)
            found[place] = Leaf(place)
            continue
        value = _plain(record)
        own = value if other is None or other.tensor is not None else _plain(other)
        if isinstance(value, torch.dtype) and isinstance(own, torch.dtype):
            value = own  # each side computes in its own
        elif repr(own) != repr(value):
            differ.append(f"argument {place} is {own!r} on my side, {value!r} on the golden one")
        found[place] = value
    step = _step(golden.site.name, golden.site.op, found)
    words = f"{golden.site.op}, run again on its recorded inputs"
    return Plan(Program((step,), golden.site.position), bindings, "; ".join([words, *differ]))


class _Grouping:
    """Collects the nodes between a value and what the other side has recorded."""

    def __init__(
        self, target: Record, graph: Calls, other: Record, seen: Calls, *, planned: str
    ) -> None:
        """`graph` has the nodes, `seen` what the other side computed; `planned`: whose graph."""
        self.target = target
        self.graph = graph
        self.scope: Scope = scope_of(target.site)
        self.other = other
        self.seen = seen
        self.planned = planned
        kernel = seen.call_of(other)
        self.read = {
            record.site.nodes[-1]: record
            for record in (kernel.given.values() if kernel is not None else ())
            if record.site.nodes and record.site.exact and record.site.level == "buffer"
        }
        self.group = {*other.site.nodes, target.site.name}
        self.steps: dict[str, Step] = {}
        self.bindings: dict[str, Binding] = {}
        self.borrowed: list[str] = []
        self.unsure: list[str] = []

    def plan(self) -> Plan:
        """Walk back from the value."""
        waiting = [self.target.site.name]
        while waiting:
            name = waiting[-1]
            call = self.graph.node(self.scope, name)
            if call is None:
                raise UsageError(f"the dump that holds the graph has no record of node {name}")
            before = [node for node in self._needed(call) if node not in self.steps]
            if before:
                waiting += before
                if len(waiting) + len(self.steps) > _MOST_STEPS:
                    raise UsageError(
                        f"more than {_MOST_STEPS} nodes lie between it and what is recorded"
                    )
                continue
            waiting.pop()
            if name not in self.steps:
                found = {place: self._argument(one) for place, one in call.given.items()}
                if call.site.op == "getitem":
                    found = _taken_apart(found)
                self.steps[name] = _step(name, call.site.op, found)
        self.steps = dict(sorted(self.steps.items(), key=lambda item: self._place(item[0])))
        if not self.target.site.position.isdecimal():
            raise UsageError("it is an argument that a node wrote to")
        return Plan(
            Program(tuple(self.steps.values()), self.target.site.position),
            self.bindings,
            self._words(),
            tuple(self.unsure),
        )

    def _place(self, name: str) -> int:
        """Where a node stands in the program."""
        call = self.graph.node(self.scope, name)
        return -1 if call is None else min(record.sequence for record in call.made.values())

    def _needed(self, call: Call) -> list[str]:
        """The nodes among what a node was given that have to be run, too."""
        names = (self._producer(record) for record in call.given.values())
        return [name for name in dict.fromkeys(names) if name and self._is_run(name, call)]

    def _is_run(self, name: str, reader: Call) -> bool:
        call = self.graph.node(self.scope, name)
        if call is None or call.is_given or not call.given:
            return False
        if _SEEDED.fullmatch(call.site.op):
            if not self._same_seeds(call):
                raise UsageError(f"{name} draws random numbers, which need not be the same")
            return False
        if name in self.group or reader.site.op == "getitem":
            return True
        return self._recorded(name) is None

    def _same_seeds(self, call: Call) -> bool:
        """Whether what a node is drawn from is recorded on either side, and the same."""
        found = False
        for record in call.given.values():
            name = self._producer(record)
            made = self.graph.node(self.scope, name) if name else None
            if record.tensor is None or made is None:
                continue
            other = self._recorded(name)
            if other is None:
                same = self._same_seeds(made)
            else:
                same = bool(other.digest) and other.digest == record.digest
            if not same:
                return False
            found = True
        return found

    def _recorded(self, name: str) -> Record | None:
        """The other side's value of a node."""
        found = self.read.get(name) or self.seen.value_of(scope_of(self.other.site), name)
        if found is None or found.tensor is None or (found.payload is None and not found.digest):
            return None
        return found

    def _producer(self, record: Record) -> str:
        nodes = record.site.nodes
        if not nodes and record.tensor is not None:
            raise UsageError(f"the dump does not say which node {record.id} comes from")
        return nodes[-1] if nodes and nodes[-1] != record.site.name else ""

    def _argument(self, record: Record) -> Any:
        name = self._producer(record)
        if name in self.steps:
            return Result(name)
        if record.tensor is None:
            return _plain(record)
        # The several values of a node are taken apart by their positions.
        several = record.site.op == "getitem"
        key = f"{name or record.site.name}/{record.site.position}" if several or not name else name
        found = self._recorded(name) if name and not several else None
        if found is not None and found.tensor is not None:
            if found.tensor.shape != record.tensor.shape:
                raise UsageError(f"node {name} has another shape on either side")
        elif key not in self.bindings:
            self.borrowed.append(name or f"a constant of {record.site.name}")
            made = self.graph.node(self.scope, name) if name else None
            if made is not None and not _SEEDED.fullmatch(made.site.op):
                self.unsure.append(name)
        mine, theirs = (found, record) if self.planned == "golden" else (record, found)
        self.bindings[key] = Binding(mine, theirs)
        return Leaf(key)

    def _words(self) -> str:
        names = list(self.steps)
        kernel = self.other.site.kernel
        read = f" on what kernel {kernel} read" if kernel else ""
        words = f"{_some(names)} run again in order{read}"
        if self.borrowed:
            words += f"; {_some(self.borrowed)} taken from the {self.planned} dump for both sides"
        return words


def _some(names: list[str]) -> str:
    if len(names) == 1:
        return f"node {names[0]}"
    more = f" ... {names[-1]}" if len(names) > _MOST_NAMED else ""
    shown = names[: _MOST_NAMED - 1] if more else names
    return f"{len(names)} nodes ({', '.join(shown)}{more})"


def _taken_apart(found: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a `getitem`: one container, and the index."""
    items = [value for place, value in found.items() if place.startswith("0")]
    whole = items[0] if items and isinstance(items[0], Result) else list(items)
    return {"0": whole, "1": found.get("1")}


def _plain(record: Record) -> Any:
    if record.value is None:
        raise UsageError(f"argument {record.site.position} of {record.site.op} is not recorded")
    return read_value(record.value)


def _step(name: str, op: str, found: Mapping[str, Any]) -> Step:
    """A call of an operator from its arguments by position: `0`, `1.2` within a list, a name."""
    operator = operator_named(op)
    tree: dict[str, Any] = {}
    for place, value in found.items():
        first, *inner = place.split(".")
        if inner and (len(inner) > 1 or not inner[0].isdecimal()):
            raise UsageError(f"{op}: an argument at {place!r}")
        if inner:
            tree.setdefault(first, {})[int(inner[0])] = value
        else:
            tree[first] = value
    given = {place: _listed(value) for place, value in tree.items()}
    numbers = [int(place) for place in given if place.isdecimal()]
    count = max(numbers, default=-1) + 1
    if count > max(len(operator.takes), 2):
        raise UsageError(f"{op} takes {len(operator.takes)} arguments, not {count}")
    takes = [*operator.takes, *[("", False)] * count]
    # An empty list leaves no record.
    args = tuple(given.get(str(place), [] if takes[place][1] else None) for place in range(count))
    kwargs = {place: value for place, value in given.items() if not place.isdecimal()}
    names = [name for name, _ in operator.takes]
    drop = {**dict(zip(names, args, strict=False)), **kwargs}.get("dropout_p")
    if drop:
        raise UsageError(f"{op} draws random numbers")
    return Step(name, operator, args, kwargs)


def _listed(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    last = max(value)
    if last >= 1 << 12:
        raise UsageError(f"a list of {last + 1} arguments")
    return [value.get(place) for place in range(last + 1)]
