"""Reduces a failing graph to the fewest operators: nested graphs, operator calls, outputs."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from typing import TYPE_CHECKING, Any

import torch

from paritas.core.compiled.locate import minimise
from paritas.core.execution.observation import INPUT
from paritas.core.results.items import ItemKind, nth_output
from paritas.core.torch_private.graphs import provenance
from paritas.shrinking.parts import (
    ProgramPart,
    RecordedValues,
    extract_part,
    islands,
    record_values,
)
from paritas.shrinking.programs import (
    EXCEPTION,
    GRADIENT,
    OUTPUT,
    FailingProgram,
    FailureSignature,
    describe_value,
    finding_signature,
    same_failure,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from torch.fx import Node

    from paritas.core.results.findings import Finding
    from paritas.shrinking.programs import Oracle


# --- The search for the wrong part ----------------------------------------------------------------

# Compilation dominates the cost, and twenty unconnected operators compile about as fast as one. So
# first every distinct operator call is tried on its own, many of them in one query; then all calls,
# for a compiler that gets the third of them wrong; then neighbours together, as for a fusion bug;
# and only if that finds nothing, the program is reduced piece by piece.

# The numbers of neighbours to try together.
SIZES = (1, 2, 3, 5)
# How many suspicious parts are confirmed one by one.
_CONFIRMED = 3
# Neighbourhoods overlap: they may hold this many times the calls of the program in total.
_REPEATED = 2
# Parts in the first query and in the later ones, which have more and more: the first ones compile
# fast and find most faults, and more than the last would compile as slowly as the program itself.
_TOGETHER = (8, 16, 32, 48)


def reduce_nodes(
    oracle: Oracle, program: FailingProgram, failure_signature: FailureSignature
) -> FailingProgram:
    """The same failure in fewer operator calls, or the program unchanged."""
    if len(program.calls) <= 1:
        return program
    reduction = _NodeReduction(oracle, program, failure_signature)
    return reduction.small_part() or reduction.whole()


def wrong_part(
    oracle: Oracle,
    program: FailingProgram,
    failure_signature: FailureSignature,
    places: Collection[str] = (),
    sizes: Sequence[int] = SIZES,
) -> FailingProgram | None:
    """A few neighbouring calls that show the failure on their own, if there are any.

    Args:
        places: source lines or names of calls that are tried first.
        sizes: how many neighbours to try together; if it is empty, only the calls at the places
            are tried.
    """
    return _NodeReduction(oracle, program, failure_signature, places).small_part(sizes)


class _NodeReduction:
    def __init__(
        self,
        oracle: Oracle,
        program: FailingProgram,
        failure_signature: FailureSignature,
        places: Collection[str] = (),
    ) -> None:
        self.places = places
        self.oracle = oracle
        self.program = program
        self.wanted = failure_signature
        self.recorded = record_values(program)
        self.calls = program.calls
        # Without the backward pass, unless the failure is there: this halves the compile time.
        needed = failure_signature.role == GRADIENT
        self.frugal = program if needed else dataclasses.replace(program, gradients=False)
        self.base = self.frugal

    def small_part(self, sizes: Sequence[int] = SIZES) -> FailingProgram | None:
        part = self._at_places()
        if part is not None:
            return part
        for size in sizes:
            if size > 1 and size >= len(self.calls):
                break
            suspect_calls = self._together(size)
            if suspect_calls is not None:
                # Neither of two showed it alone; of more, some may not be needed.
                return self._part(suspect_calls) if size <= 2 else self._one_by_one(suspect_calls)  # noqa: PLR2004
            if size == 1 and len(sizes) > 1:
                suspect_calls = self._by_position()
                if suspect_calls is not None:
                    return self._one_by_one(suspect_calls)
        return None

    def _at_places(self) -> FailingProgram | None:
        """The calls that were named as places, each alone, or with those like it before it."""
        for node in [node for node in self.calls if node.name in self.places][:_CONFIRMED]:
            part = self._part_of_either([node])
            if part is not None:
                return part
            alike = self._alike_until(node)
            if alike is not None:
                return self._one_by_one(alike)
        return None

    def _by_position(self) -> list[Node] | None:
        """Calls of one operator, if the compiler gets one of them wrong, such as every second.

        All calls are compiled side by side, in the program's order and also if they are alike.
        """
        suspects = self._suspects([[node] for node in self.calls])[:_CONFIRMED]
        alike_groups = (self._alike_until(suspect[0]) for suspect in suspects)
        return next((alike for alike in alike_groups if alike is not None), None)

    def _alike_until(self, node: Node) -> list[Node] | None:
        """A call and all calls of its operator before it, if together they show the failure."""
        before = self.calls[: self.calls.index(node) + 1]
        alike = [earlier_call for earlier_call in before if earlier_call.target == node.target]
        shows = len(alike) > 1 and self._part_of_either(alike) is not None
        return alike if shows else None

    def whole(self) -> FailingProgram:
        if self._part_of_either(self.calls) is None:
            return self.program
        return self._one_by_one(self.calls)

    def _together(self, size: int) -> list[Node] | None:
        """The first part of `size` neighbours that shows the failure on its own."""
        unique: dict[str, list[Node]] = {}
        for near in sorted(_neighbourhoods(self.calls, size), key=self._is_remote):
            key = repr([_call_key(node, self.recorded) for node in near])
            unique.setdefault(key, near)
        if len(unique) * size > _REPEATED * len(self.calls):
            return None  # reducing piece by piece compiles less
        # Small values make small scripts.
        sets = sorted(
            unique.values(), key=lambda part: (self._is_remote(part), self._elements(part))
        )
        for some in _batches(sets):
            suspects = self._suspects(some)
            for part in suspects[:_CONFIRMED]:
                if self._part_of_either(part) is not None:
                    return part
        return None

    def _is_remote(self, part: list[Node]) -> bool:
        """Whether none of the calls is at a place where the failure was seen to start."""
        places = set(self.places)
        return not places or not any({n.name, provenance(n).source} & places for n in part)

    def _elements(self, part: list[Node]) -> int:
        return sum(_count_elements(self.recorded.made.get(node)) for node in part)

    def _suspects(self, sets: list[list[Node]]) -> list[list[Node]]:
        """The parts that fail in the wanted way when compiled side by side."""
        sets = [part for part in sets if extract_part(self.frugal, self.recorded, part) is not None]
        if not sets:
            return []
        part = islands(self.frugal, self.recorded, sets)
        if part is None:
            return []
        answer = self.oracle.ask(part.program)
        if answer.signature is None or answer.verdict is None:
            return self._halves(sets) if answer.verdict is None and len(sets) > 1 else []
        if answer.signature.role == EXCEPTION != self.wanted.role:
            return self._halves(sets) if len(sets) > 1 else []
        if self.wanted.role == EXCEPTION:
            return self._halves(sets) if len(sets) > 1 else sets
        failures = [f for f in answer.verdict.failures if f.aspect == self.wanted.aspect]
        wrong = {_island(part, finding) for finding in failures}
        alike = {
            _island(part, finding)
            for finding in failures
            if same_failure(finding_signature(finding), self.wanted)
        }
        return [sets[at] for at in sorted(wrong - {-1}, key=lambda at: (at not in alike, at))]

    def _halves(self, sets: list[list[Node]]) -> list[list[Node]]:
        middle = len(sets) // 2
        return self._suspects(sets[:middle]) + self._suspects(sets[middle:])

    def _part(self, nodes: Sequence[Node], *, explains: bool = False) -> FailingProgram | None:
        """The part as a program, if it shows the failure; with all its outputs if needed."""
        for all_outputs in (False, True):
            part = extract_part(self.base, self.recorded, nodes, all_outputs=all_outputs)
            if self.oracle.shows_part(part, self.wanted, explains=explains):
                return part
        return None

    def _part_of_either(self, nodes: Sequence[Node]) -> FailingProgram | None:
        """Without the backward pass if possible, otherwise with it; sets `base`."""
        for base in [self.frugal, *([self.program] if self.program.gradients else [])]:
            self.base = base
            part = self._part(nodes, explains=len(nodes) == 1)
            if part is not None:
                return part
        return None

    def _one_by_one(self, nodes: list[Node]) -> FailingProgram:
        """Delta debugging over operator calls, in program order."""
        by_name = {node.name: node for node in self.calls}

        def shows(names: list[str]) -> bool:
            return self._part([by_name[name] for name in names]) is not None

        names = [node.name for node in self.calls if node in set(nodes)]
        smallest = minimise(names, shows, self.oracle.limit)
        return self._part([by_name[name] for name in smallest]) or self.program


def _batches(sets: list[list[Node]]) -> Iterator[list[list[Node]]]:
    """The sets in order, as many at a time as `_TOGETHER` says."""
    start = 0
    for number in itertools.chain(_TOGETHER, itertools.repeat(_TOGETHER[-1])):
        if start >= len(sets):
            return
        yield sets[start : start + number]
        start += number


def _neighbourhoods(calls: list[Node], size: int) -> Iterator[list[Node]]:
    """Calls that a compiler may fuse: chains, and pairs that read the same value."""
    known_calls = set(calls)
    for node in calls:
        near = _neighbours(node, size, known_calls)
        if len(near) == size:
            yield near
        if size == 2:  # noqa: PLR2004
            users = (user for read in node.all_input_nodes for user in read.users)
            later = next((user for user in users if user in known_calls and node < user), None)
            if later is not None:
                yield [node, later]


def _neighbours(node: Node, size: int, calls: set[Node]) -> list[Node]:
    """A call and the nearest calls it depends on, `size` in total."""
    nearest_calls, waiting = [node], list(node.all_input_nodes)
    while waiting and len(nearest_calls) < size:
        nearest = waiting.pop(0)
        if nearest in calls and nearest not in nearest_calls:
            nearest_calls.append(nearest)
        if nearest.op != "placeholder":
            waiting += nearest.all_input_nodes
    return nearest_calls


def _call_key(node: Node, recorded: RecordedValues) -> Any:
    """Equal for calls that a compiler cannot distinguish."""
    given_values = recorded.given[node]

    def describe_read(read: Node) -> str:
        return describe_value(given_values[read])

    args = torch.fx.node.map_arg(node.args, describe_read)
    return (str(node.target), args, torch.fx.node.map_arg(node.kwargs, describe_read))


def _count_elements(value: Any) -> int:
    if isinstance(value, tuple):
        return sum(map(_count_elements, value))
    return value.numel() if isinstance(value, torch.Tensor) else 0


def _island(part: ProgramPart, finding: Finding) -> int:
    """The part that a finding of a query is about; -1 if unknown."""
    item = finding.item
    owners = {nth_output(at).name: island for at, island in enumerate(part.output_of)}
    if item.kind is not ItemKind.OUTPUT:
        owners = {f"{INPUT}[{at}]": island for at, island in enumerate(part.input_of)}
    if item.kind.is_state or item.kind is ItemKind.SECOND_GRADIENT:
        return -1
    return next((island for name, island in owners.items() if item.is_within(name)), -1)


# --- Fewer outputs --------------------------------------------------------------------------------


def drop_outputs(
    oracle: Oracle, program: FailingProgram, failure_signature: FailureSignature
) -> FailingProgram:
    """Keep only the first wrong output, if the failure is in an output and remains."""
    answer = oracle.ask(program)
    if failure_signature.role != OUTPUT or answer.verdict is None or _count_outputs(program) <= 1:
        return program
    for finding in answer.verdict.failures:
        if finding.item.kind is not ItemKind.OUTPUT:
            continue
        for position in range(_count_outputs(program)):
            if finding.item.is_within(nth_output(position).name):
                smaller = with_output(program, position)
                return smaller if oracle.shows(smaller, failure_signature) else program
    return program


def with_output(program: FailingProgram, position: int) -> FailingProgram:
    """The program with one of its outputs, without what only the others need."""
    module = copy.deepcopy(program.graph)
    last = next(iter(module.graph.find_nodes(op="output")))
    last.args = ((last.args[0][position],),)
    module.graph.eliminate_dead_code(is_impure_node=lambda node: node.op == "placeholder")
    given_inputs = program.given
    kept_inputs = []
    for node in list(module.graph.find_nodes(op="placeholder")):
        if node.users:
            kept_inputs.append(given_inputs[node.name])
        else:
            module.graph.erase_node(node)
    module.recompile()
    names = {node.name for node in module.graph.find_nodes(op="placeholder")}
    dynamic = {name: dims for name, dims in program.dynamic.items() if name in names}
    return dataclasses.replace(program, graph=module, inputs=tuple(kept_inputs), dynamic=dynamic)


def _count_outputs(program: FailingProgram) -> int:
    last = next(iter(program.graph.graph.find_nodes(op="output")))
    returned = last.args[0]
    return len(returned) if isinstance(returned, tuple | list) else 1
