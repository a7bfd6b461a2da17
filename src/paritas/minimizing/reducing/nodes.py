"""Down to the fewest operators: many small parts compiled side by side tell which one is wrong.

Compiling is what costs, and a graph of twenty unconnected operators compiles about as fast as one
operator does. So first every kind of operator call in the program is tried by itself, all of them
in one query; then neighbours together, as a fault of fusion needs; and only where that shows
nothing is the program taken apart piece by piece.
"""

from __future__ import annotations

import dataclasses
import re
import time
from typing import TYPE_CHECKING, Any

import torch

from paritas.checking.locating.isolating import minimise
from paritas.minimizing.programs import EXCEPTION, GRADIENT, Program, Signature
from paritas.minimizing.reducing.parts import Part, islands, part_of
from paritas.minimizing.reducing.recorded import Recorded, record

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch.fx import Node

    from paritas.minimizing.oracle import Oracle
    from paritas.numerics.findings import Finding

__all__ = ["reduce_nodes", "wrong_part"]

# Neighbours that are tried together.
_SIZES = (1, 2, 3, 5)
# So many of the suspicious parts are asked one by one.
_CONFIRMED = 3
# Neighbourhoods overlap: all of them may hold so many times the calls of the program.
_REPEATED = 2
# Parts in one query; more would compile as slowly as the program itself.
_TOGETHER = 48


def reduce_nodes(oracle: Oracle, program: Program, wanted: Signature) -> Program:
    """The same failure in fewer operator calls, or the program as it is."""
    if len(program.calls) <= 1:
        return program
    reduction = _Reduction(oracle, program, wanted)
    return reduction.small_part() or reduction.whole()


def wrong_part(oracle: Oracle, program: Program, wanted: Signature) -> Program | None:
    """A few neighbouring calls that show the failure by themselves, if there are such."""
    return _Reduction(oracle, program, wanted).small_part()


class _Reduction:
    def __init__(self, oracle: Oracle, program: Program, wanted: Signature) -> None:
        self.oracle = oracle
        self.program = program
        self.wanted = wanted
        self.recorded = record(program)
        self.calls = program.calls
        # Without the backward pass where the failure is not in it: half the compiling.
        needed = wanted.role == GRADIENT
        self.frugal = program if needed else dataclasses.replace(program, gradients=False)
        self.base = self.frugal

    def small_part(self) -> Program | None:
        for size in _SIZES:
            if size > 1 and size >= len(self.calls):
                break
            found = self._together(size)
            if found is not None:
                # Of two, neither showed it alone; of more, some may not be needed.
                return self._part(found) if size <= 2 else self._one_by_one(found)  # noqa: PLR2004
        return None

    def whole(self) -> Program:
        if self._part_of_either(self.calls) is None:
            return self.program
        return self._one_by_one(self.calls)

    def _together(self, size: int) -> list[Node] | None:
        """The first part of so many neighbours that shows the failure by itself."""
        unique: dict[str, list[Node]] = {}
        for near in _neighbourhoods(self.calls, size):
            unique.setdefault(_key(near, self.recorded), near)
        if len(unique) * size > _REPEATED * len(self.calls):
            return None  # taking the program apart compiles less
        # Small values make small scripts, and compile as fast as any.
        sets = sorted(unique.values(), key=self._elements)
        for start in range(0, len(sets), _TOGETHER):
            suspects = self._suspects(sets[start : start + _TOGETHER])
            for part in suspects[:_CONFIRMED]:
                if self._part_of_either(part) is not None:
                    return part
        return None

    def _elements(self, part: list[Node]) -> int:
        return sum(_elements(self.recorded.made.get(node)) for node in part)

    def _suspects(self, sets: list[list[Node]]) -> list[list[Node]]:
        """Which of these parts fail in the wanted way, compiled side by side."""
        sets = [part for part in sets if part_of(self.frugal, self.recorded, part) is not None]
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
        wrong = {_island(part, f) for f in answer.verdict.failures if self._is_wanted(f)}
        return [sets[index] for index in sorted(wrong - {-1})]

    def _halves(self, sets: list[list[Node]]) -> list[list[Node]]:
        middle = len(sets) // 2
        return self._suspects(sets[:middle]) + self._suspects(sets[middle:])

    def _is_wanted(self, finding: Finding) -> bool:
        is_gradient = finding.path.startswith(("gradient", "second gradient"))
        return finding.aspect == self.wanted.aspect and is_gradient == (
            self.wanted.role == GRADIENT
        )

    def _part(self, kept: Sequence[Node]) -> Program | None:
        """The part as a program, if it shows the failure; with what it hands on, if it must."""
        for all_outputs in (False, True):
            part = part_of(self.base, self.recorded, kept, all_outputs=all_outputs)
            if self.oracle.shows(part, self.wanted):
                return part
        return None

    def _part_of_either(self, kept: Sequence[Node]) -> Program | None:
        """Without the backward pass if that will do, with it otherwise; so it stays then."""
        for base in self._bases():
            self.base = base
            part = self._part(kept)
            if part is not None:
                return part
        return None

    def _bases(self) -> list[Program]:
        return [self.frugal, *([self.program] if self.program.gradients else [])]

    def _one_by_one(self, kept: list[Node]) -> Program:
        """Delta debugging over operator calls, in the order of the program."""
        by_name = {node.name: node for node in self.calls}

        def shows(names: list[str]) -> bool:
            return self._part([by_name[name] for name in names]) is not None

        deadline = time.monotonic() + self.oracle.left
        names = [node.name for node in self.calls if node in set(kept)]
        smallest = minimise(names, shows, deadline)
        return self._part([by_name[name] for name in smallest]) or self.program


def _neighbourhoods(calls: list[Node], size: int) -> Iterator[list[Node]]:
    """Calls that a compiler may fuse: chains, and pairs that read the same value."""
    known = set(calls)
    for node in calls:
        near = _neighbours(node, size, known)
        if len(near) == size:
            yield near
        if size == 2:  # noqa: PLR2004
            users = (user for read in node.all_input_nodes for user in read.users)
            later = next((user for user in users if user in known and node < user), None)
            if later is not None:
                yield [node, later]


def _neighbours(node: Node, size: int, calls: set[Node]) -> list[Node]:
    """A call and those before it that it depends on, nearest first, so many in all."""
    found, waiting = [node], list(node.all_input_nodes)
    while waiting and len(found) < size:
        nearest = waiting.pop(0)
        if nearest in calls and nearest not in found:
            found.append(nearest)
        if nearest.op != "placeholder":
            waiting += nearest.all_input_nodes
    return found


def _key(nodes: list[Node], recorded: Recorded) -> str:
    """Equal for parts that a compiler cannot tell apart."""
    return repr([_call_key(node, recorded) for node in nodes])


def _call_key(node: Node, recorded: Recorded) -> Any:
    given = recorded.given[node]

    def shape(read: Node) -> Any:
        return _Text(_value_key(given[read]))

    args = torch.fx.node.map_arg(node.args, shape)
    kwargs = torch.fx.node.map_arg(node.kwargs, shape)
    return (str(node.target), args, kwargs)


class _Text(str):
    """A description that takes a node's place among arguments."""

    __slots__ = ()


def _value_key(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        how = (value.dtype, tuple(value.shape), value.stride(), value.requires_grad)
        return repr(how)
    if isinstance(value, tuple):
        return repr([_value_key(item) for item in value])
    return repr(value)


def _elements(value: Any) -> int:
    if isinstance(value, tuple):
        return sum(map(_elements, value))
    return value.numel() if isinstance(value, torch.Tensor) else 0


def _island(part: Part, finding: Finding) -> int:
    """Which part a finding of a query is about; -1 if that cannot be told."""
    found = re.match(r"(output|input|gradient of input)\[(\d+)\]", finding.path)
    if found is None:
        return -1
    owners = part.output_of if found[1] == "output" else part.input_of
    return owners[int(found[2])] if int(found[2]) < len(owners) else -1
