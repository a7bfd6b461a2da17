"""Match the traces of two programs value by value, and cut out where they part.

A value of the candidate is known if the reference has the same, or if the same operator gave it for
known values. What is left is what the candidate computes and the reference does not, and the other
way round; the difference starts where such values are computed from known ones.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from typing import TYPE_CHECKING, Any

from paritas.core.torch_private.operators import traits
from paritas.core.tracing.traces import ValueRef

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from paritas.core.tracing.figures import Figures
    from paritas.core.tracing.traces import Operation, Trace, TracedValue

# --- Classes of equal values ----------------------------------------------------------------------


class KnownValues:
    """The values of the reference, in classes of equal ones.

    Attributes:
        trace: the reference's trace.
        classes: the class of each of its values.
    """

    def __init__(self, trace: Trace, tolerance: float, *, ordered: bool = True) -> None:
        """Sort the values of a trace into classes.

        Args:
            trace: of the reference.
            tolerance: how far equal values are apart at most, as a share of their norm.
            ordered: whether equal values have the same shape and order; otherwise, a transposed
                or reshaped one is equal.
        """
        self.trace = trace
        self.tolerance = tolerance
        self.ordered = ordered
        self.classes: list[int] = []
        self._members: list[TracedValue] = []
        # By shape, sorted by the first sum: equal values have nearly the same.
        self._by_shape: dict[Any, list[tuple[float, int]]] = {}
        self._by_call: dict[Any, tuple[int, ...]] = {}
        for value in trace.values:
            number = self.find(value.figures)
            self.classes.append(self._add(value) if number is None else number)
        for operation in trace.operations:
            key = _call_key(operation, [self.classes[index] for index in operation.inputs])
            outputs = tuple(self.classes[index] for index in operation.outputs)
            if key is not None:
                self._by_call.setdefault(key, outputs)

    def find(self, figures: Figures | None) -> int | None:
        """The class of a value with these figures."""
        if figures is None:
            return None
        tolerance = 0.0 if figures.is_exact else self.tolerance
        members = self._by_shape.get(self._shape_key(figures), [])
        first, width = self._first_sum(figures), 2.0 * tolerance * figures.norm
        best, nearest = None, math.inf
        for member_index in range(bisect.bisect_left(members, (first - width, -1)), len(members)):
            other, number = members[member_index]
            if other > first + width:
                break
            member_figures = self._members[number].figures
            distance = math.inf
            if member_figures is not None:
                distance = member_figures.distance(figures, ordered=self.ordered)
            if distance <= tolerance and distance < nearest:
                best, nearest = number, distance
        return best

    def match(self, trace: Trace) -> list[int | None]:
        """The class of each value of the candidate; None for a value that the reference lacks."""
        classes: list[int | None] = [None] * len(trace.values)
        visited_values: set[int] = set()
        for operation in trace.operations:
            for index in operation.inputs:
                if index not in visited_values:
                    visited_values.add(index)
                    classes[index] = self.find(trace.values[index].figures)
            input_classes = [classes[index] for index in operation.inputs]
            outputs: tuple[int, ...] | None = None
            if None not in input_classes and self.ordered:
                key = _call_key(operation, input_classes)
                outputs = None if key is None else self._by_call.get(key)
            for slot, index in enumerate(operation.outputs):
                visited_values.add(index)
                class_by_call = None if outputs is None else outputs[slot]
                class_by_figures = self.find(trace.values[index].figures)
                classes[index] = class_by_figures if class_by_figures is not None else class_by_call
        return classes

    def _add(self, value: TracedValue) -> int:
        number = len(self._members)
        self._members.append(value)
        if value.figures is not None:
            members = self._by_shape.setdefault(self._shape_key(value.figures), [])
            bisect.insort(members, (self._first_sum(value.figures), number))
        return number

    def _first_sum(self, figures: Figures) -> float:
        return figures.signed[0] if self.ordered else figures.plain[0]

    def _shape_key(self, figures: Figures) -> Any:
        return figures.shape if self.ordered else math.prod(figures.shape)


def _call_key(operation: Operation, classes: list[Any]) -> Any:
    """What a call computes: the operator, its arguments, the classes of what it reads.

    None if that does not decide the result: random numbers, and operators outside of torch, which
    may be another function under the same name.
    """
    kind = traits(operation.func)
    if kind.random or kind.namespace not in {"aten", "prim", "prims"}:
        return None
    by_index = dict(zip(operation.inputs, classes, strict=True))
    base, _, overload = operation.name.removeprefix("aten.").rpartition(".")
    args = _freeze(operation.args, by_index)
    kwargs = tuple(
        (name, _freeze(value, by_index)) for name, value in sorted(operation.kwargs.items())
    )
    return base.rstrip("_"), overload, args, kwargs


def _freeze(value: Any, classes: dict[int, Any]) -> Any:
    if isinstance(value, ValueRef):
        return ("value", classes[value.index])
    if isinstance(value, list | tuple):
        return tuple(_freeze(item, classes) for item in value)
    if isinstance(value, float):
        return float(f"{value:.11e}")
    return value if value.__hash__ is not None else repr(value)


def same_settings(left: Operation, right: Operation) -> bool:
    """Whether two calls of an operator have the same arguments, apart from tensors."""

    def plain(operation: Operation) -> Any:
        nothing = dict.fromkeys(operation.inputs)
        kwargs = {name: _freeze(value, nothing) for name, value in operation.kwargs.items()}
        return _freeze(operation.args, nothing), kwargs

    return bool(plain(left) == plain(right))


# --- What only one side computes ------------------------------------------------------------------

_MOST_BEFORE = 48
_WEIGHT_OF_VIEW = 0.1


@dataclasses.dataclass(frozen=True)
class OwnPart:
    """What one side computes on the way to some of its results, and the other does not.

    Attributes:
        role: which side.
        trace: of this side.
        operations: the operators, in order.
        own: the values that the other side lacks.
        before: operator -> those of them that it depends on, itself included; only up to a number.
        leaves: values from outside, such as parameters, that the other side lacks.
    """

    role: str
    trace: Trace
    operations: list[Operation]
    own: frozenset[int]
    before: dict[int, frozenset[int]]
    leaves: tuple[int, ...]

    @classmethod
    def behind(
        cls, role: str, trace: Trace, ends: Iterable[int], own_values: Collection[int]
    ) -> OwnPart:
        """Go back from some results through values that the other side lacks."""
        own_values = frozenset(own_values)
        maker_indices: set[int] = set()
        leaves: set[int] = set()
        todo = [index for index in ends if index in own_values]
        met = set(todo)
        while todo:
            value = trace.values[todo.pop()]
            makers = [index for index in value.makers if _gives_any(trace, index, own_values)]
            if not makers:
                leaves.add(value.index)
            for index in makers:
                maker_indices.add(index)
                for read in trace.operations[index].inputs:
                    if read in own_values and read not in met:
                        met.add(read)
                        todo.append(read)
        operations = [trace.operations[index] for index in sorted(maker_indices)]
        part = cls(role, trace, operations, own_values, {}, tuple(sorted(leaves)))
        part._note_what_is_before(maker_indices)
        return part

    def _note_what_is_before(self, inside: set[int]) -> None:
        for operation in self.operations:
            before = {operation.index}
            for index in operation.inputs:
                for maker in self.trace.values[index].makers if index in self.own else ():
                    # What could not be counted is too much.
                    if maker in inside and maker < operation.index:
                        before |= self.before.get(maker, frozenset(range(-_MOST_BEFORE - 1, 0)))
            if len(before) <= _MOST_BEFORE:
                self.before[operation.index] = frozenset(before)

    @property
    def first(self) -> list[Operation]:
        """The operators that read only what the other side has, too."""
        return [
            operation
            for operation in self.operations
            if len(self.before.get(operation.index, "two")) == 1
        ]

    def region(self, operation: Operation) -> list[Operation]:
        """The operators between what both sides have and the result of an operator."""
        return [self.trace.operations[index] for index in sorted(self.before[operation.index])]

    def border(self, operation: Operation) -> Iterator[int]:
        """The values that such a region reads from outside."""
        region = self.region(operation)
        inner = {index for one in region for index in one.outputs}
        for region_operation in region:
            yield from (index for index in region_operation.inputs if index not in inner)


def _gives_any(trace: Trace, operation: int, values: frozenset[int]) -> bool:
    return any(index in values for index in trace.operations[operation].outputs)


# --- Where the two sides may join again -----------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Joint:
    """A value of the candidate that should be a value of the reference.

    Attributes:
        candidate: the operator that gives the wrong value.
        reference: the operator that gives the right one.
        slots: which of their results.
        size: how much lies between the last known values and these.
        cost: the size, and how unlike the two are; the least is most likely.
    """

    candidate: Operation
    reference: Operation
    slots: tuple[int, int]
    size: float = 0.0
    cost: float = 0.0

    @classmethod
    def of(
        cls, candidate: Operation, wrong: int, reference: Operation, right: int, size: float = 0.0
    ) -> Joint:
        """The joint of two values that these operators give."""
        slots = candidate.outputs.index(wrong), reference.outputs.index(right)
        return cls(candidate, reference, slots, size)


def find_joints(
    ours: OwnPart, own_part: OwnPart, classes: list[int | None], known_values: KnownValues
) -> list[Joint]:
    """The pairs of a wrong value and the right one, the likeliest first.

    Args:
        ours: what only the candidate computes.
        own_part: what only the reference computes.
        classes: of the candidate's values.
        known_values: the reference's values.
    """
    left = _list_ends(ours, classes)
    right = _list_ends(own_part, known_values.classes)
    joints = [
        Joint(
            candidate_end.operation,
            other.operation,
            slots,
            candidate_end.size + other.size,
            candidate_end.cost(other, slots),
        )
        for candidate_end in left
        for other in right
        if candidate_end.may_join(other)
        for slots in candidate_end.pair_slots(other)
    ]
    return sorted(joints, key=lambda joint: (joint.cost, joint.candidate.index))


# How much the cost grows with what two operators read, are and are followed by: as much as with
# some more operators in between. A wrong view is found in the region of what computes with it.
_READ_OTHERS, _CALL_OTHERS, _LEAD_TO_OTHERS, _ONLY_MOVE = 6.0, 0.5, 8.0, 6.0
# A value inside of the backward pass of an autograd function is written in another way: the
# function is the place.
_INSIDE_OF_FUNCTION = 24.0
# What has another shape is a step on another way to the value: later ones may have the same shape.
_HAVE_OTHER_SHAPE = 12.0


@dataclasses.dataclass(frozen=True)
class _End:
    """The end of a region: an operator whose results the other side lacks.

    Attributes:
        region: the operators of the region.
        size: how much these compute.
        reads: the classes of the values that the region reads.
        leads_to: the names of the operators that compute with the results.
        results: the figures of the results that the other side lacks, by place.
        is_inside: whether only the same call of an autograd function's backward pass reads them.
    """

    operation: Operation
    region: list[Operation]
    size: float
    reads: frozenset[Any]
    leads_to: frozenset[str]
    results: dict[int, Figures]
    is_inside: bool

    def may_join(self, other: _End) -> bool:
        """Whether both could end with the same value.

        Views of different values are not at fault: what reads the wrong one is.
        """
        if self.operation.is_backward is not other.operation.is_backward:
            return False
        return not self._both_move(other) or self.reads == other.reads

    def _both_move(self, other: _End) -> bool:
        return all(operation.only_moves for operation in (*self.region, *other.region))

    def cost(self, other: _End, slots: tuple[int, int]) -> float:
        """How unlikely it is that these results of both are the same one."""
        cost = self.size + other.size
        cost += _READ_OTHERS * _unlike(self.reads, other.reads)
        cost += _LEAD_TO_OTHERS * _unlike(self.leads_to, other.leads_to)
        cost += _ONLY_MOVE * self._both_move(other)
        cost += _INSIDE_OF_FUNCTION * self.is_inside
        candidate_figures, its = self.results[slots[0]], other.results[slots[1]]
        if candidate_figures.shape != its.shape and not (
            self._is_alike(other) and self._is_alone(other)
        ):
            cost += _HAVE_OTHER_SHAPE
        return cost + _CALL_OTHERS * (not self._is_alike(other))

    def pair_slots(self, other: _End) -> Iterator[tuple[int, int]]:
        """The results of both that may be the same one."""
        may_differ = self._is_alike(other) or self._is_alone(other)
        for slot, candidate_figures in self.results.items():
            for other_slot, its in other.results.items():
                if candidate_figures.is_exact is not its.is_exact:
                    continue
                if candidate_figures.shape == its.shape or (slot == other_slot and may_differ):
                    yield slot, other_slot

    def _is_alike(self, other: _End) -> bool:
        """Whether both end with the same operator."""
        return plain_name(self.operation) == plain_name(other.operation)

    def _is_alone(self, other: _End) -> bool:
        """Whether both are one operator on the same values."""
        return len(self.region) == len(other.region) == 1 and self.reads == other.reads


def _list_ends(part: OwnPart, classes: Sequence[int | None]) -> list[_End]:
    readers = readers_of(part.operations)
    ends = []
    for operation in part.operations:
        if operation.index not in part.before:
            continue
        results = {
            slot: figures
            for slot, index in enumerate(operation.outputs)
            if index in part.own and (figures := part.trace.values[index].figures) is not None
        }
        region = part.region(operation)
        size = sum(
            _WEIGHT_OF_VIEW if region_operation.only_moves else 1.0 for region_operation in region
        )
        # A parameter that the other side lacks equals nothing.
        border = part.border(operation)
        reads = frozenset(
            (part.role, index) if index in part.own else classes[index] for index in border
        )
        leads_to = frozenset(_names_behind(operation, readers))
        is_inside = _is_read_inside(operation, readers)
        ends.append(_End(operation, region, size, reads, leads_to, results, is_inside))
    return ends


def _is_read_inside(operation: Operation, readers: dict[int, list[Operation]]) -> bool:
    behind = [reader for index in operation.outputs for reader in readers.get(index, ())]
    its = operation.function, operation.forward
    return bool(its[0] and behind) and all(
        (reader.function, reader.forward) == its for reader in behind
    )


def _names_behind(operation: Operation, readers: dict[int, list[Operation]]) -> Iterator[str]:
    """The operators that compute with the results of one, perhaps through views and copies."""
    todo = [operation]
    while todo:
        for index in todo.pop().outputs:
            for reader in readers.get(index, ()):
                if reader.only_moves:
                    todo.append(reader)
                else:
                    yield plain_name(reader)


def _unlike(left: frozenset[Any], right: frozenset[Any]) -> float:
    both = left | right
    return 1 - len(left & right) / len(both) if both else 0.0


def in_order(operations: Iterable[Operation]) -> list[Operation]:
    """Some operators, each once, in the order in which they ran."""
    by_index = {operation.index: operation for operation in operations}
    return [by_index[index] for index in sorted(by_index)]


def readers_of(operations: Iterable[Operation]) -> dict[int, list[Operation]]:
    """For each value, the operators that read it, in their order."""
    readers: dict[int, list[Operation]] = {}
    for operation in operations:
        for index in operation.inputs:
            readers.setdefault(index, []).append(operation)
    return readers


def leave_out_moves(operations: Iterable[Operation]) -> list[Operation]:
    """The operators that compute something, not only move it."""
    return [operation for operation in operations if not operation.only_moves]


def plain_name(operation: Operation) -> str:
    """The name of an operator, the same for all its overloads, in place or not."""
    kind = traits(operation.func)
    return f"{kind.namespace}.{kind.name}"
