"""Match the traces of two programs value by value, and cut out where they part.

A value of the candidate is known if the reference has the same, or if the same operator gave it for
known values. What is left is what the candidate computes and the reference does not, and the other
way round; the difference starts where such values are computed from known ones.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

from paritas._torch.operators import traits
from paritas.recording.traces import ValueRef

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from paritas.recording.traces import Figures, Operation, Trace, TracedValue

# --- Classes of equal values ----------------------------------------------------------------------


class KnownValues:
    """The values of the reference, in classes of equal ones.

    Attributes:
        trace: the reference's trace.
        classes: the class of each of its values.
    """

    def __init__(
        self, trace: Trace, tolerance: float, *, ordered: bool = True, typed: bool = False
    ) -> None:
        """Sort the values of a trace into classes.

        Args:
            trace: of the reference.
            tolerance: how far equal values are apart at most, as a share of their norm.
            ordered: whether equal values have the same shape and order; otherwise, a transposed
                or reshaped one is equal.
            typed: whether equal values have the same dtype.
        """
        self.trace = trace
        self.tolerance = tolerance
        self.ordered = ordered
        self.typed = typed
        self.classes: list[int] = []
        self._members: list[TracedValue] = []
        self._by_shape: dict[Any, list[int]] = {}
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
        best, nearest = None, math.inf
        for number in self._by_shape.get(self._shape_key(figures), ()):
            known = self._members[number].figures
            if known is None or (self.typed and known.dtype is not figures.dtype):
                continue
            distance = known.distance(figures, ordered=self.ordered)
            if distance <= tolerance and distance < nearest:
                best, nearest = number, distance
        return best

    def match(self, trace: Trace) -> list[int | None]:
        """The class of each value of the candidate; None for a value that the reference lacks."""
        classes: list[int | None] = [None] * len(trace.values)
        made: set[int] = set()
        for operation in trace.operations:
            for index in operation.inputs:
                if index not in made:
                    made.add(index)
                    classes[index] = self.find(trace.values[index].figures)
            given = [classes[index] for index in operation.inputs]
            outputs: tuple[int, ...] | None = None
            if None not in given and self.ordered:
                key = _call_key(operation, given)
                outputs = None if key is None else self._by_call.get(key)
            for place, index in enumerate(operation.outputs):
                made.add(index)
                known = None if outputs is None else outputs[place]
                own = self.find(trace.values[index].figures)
                classes[index] = own if own is not None else known
        return classes

    def _add(self, value: TracedValue) -> int:
        number = len(self._members)
        self._members.append(value)
        if value.figures is not None:
            self._by_shape.setdefault(self._shape_key(value.figures), []).append(number)
        return number

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
        trace: of this side.
        operations: the operators, in order.
        own: the values that the other side lacks.
        before: operator -> those of them that it depends on, itself included; only up to a number.
        leaves: values from outside, such as parameters, that the other side lacks.
    """

    trace: Trace
    operations: list[Operation]
    own: frozenset[int]
    before: dict[int, frozenset[int]]
    leaves: tuple[int, ...]

    @classmethod
    def behind(cls, trace: Trace, ends: Iterable[int], own: Collection[int]) -> OwnPart:
        """Go back from some results through values that the other side lacks."""
        own = frozenset(own)
        found: set[int] = set()
        leaves: set[int] = set()
        todo = [index for index in ends if index in own]
        met = set(todo)
        while todo:
            value = trace.values[todo.pop()]
            makers = [index for index in value.makers if _gives_any(trace, index, own)]
            if not makers:
                leaves.add(value.index)
            for index in makers:
                found.add(index)
                for read in trace.operations[index].inputs:
                    if read in own and read not in met:
                        met.add(read)
                        todo.append(read)
        operations = [trace.operations[index] for index in sorted(found)]
        part = cls(trace, operations, own, {}, tuple(sorted(leaves)))
        part._note_what_is_before(found)
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
        return [one for one in self.operations if len(self.before.get(one.index, "two")) == 1]

    def region(self, operation: Operation) -> list[Operation]:
        """The operators between what both sides have and the result of an operator."""
        return [self.trace.operations[index] for index in sorted(self.before[operation.index])]

    def size(self, operation: Operation) -> float:
        """How much such a region computes; views and copies are next to nothing."""
        return sum(_WEIGHT_OF_VIEW if one.only_moves else 1.0 for one in self.region(operation))

    def border(self, operation: Operation) -> Iterator[int]:
        """The values that such a region reads and both sides have."""
        for one in self.region(operation):
            yield from (index for index in one.inputs if index not in self.own)


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
        cost: how much lies between the last known values and these; the least is most likely.
    """

    candidate: Operation
    reference: Operation
    slots: tuple[int, int]
    cost: float


def find_joints(
    ours: OwnPart, theirs: OwnPart, classes: list[int | None], known: KnownValues
) -> list[Joint]:
    """The pairs of a wrong value and the right one, the likeliest first.

    Args:
        ours: what only the candidate computes.
        theirs: what only the reference computes.
        classes: of the candidate's values.
        known: the reference's values.
    """
    joints: list[Joint] = []
    left = [
        (one, {classes[index] for index in ours.border(one)}, _wrong_slots(ours, one))
        for one in ours.operations
        if one.index in ours.before
    ]
    right = [
        (one, {known.classes[index] for index in theirs.border(one)}, _wrong_slots(theirs, one))
        for one in theirs.operations
        if one.index in theirs.before
    ]
    for one, reads, slots in left:
        size = ours.size(one)
        for other, others, wanted in right:
            if one.is_backward is not other.is_backward or _only_read_others(
                ours, theirs, one, other
            ):
                continue
            between = size + theirs.size(other)
            apart = 1 - len(reads & others) / max(1, len(reads | others))
            for slot, place in _pair_slots(ours, theirs, (one, slots), (other, wanted)):
                cost = between + 3.0 * apart + 0.5 * (one.func is not other.func)
                joints.append(Joint(one, other, (slot, place), cost))
    order = {one.index: place for place, (one, *_) in enumerate(left)}
    return sorted(joints, key=lambda joint: (joint.cost, order[joint.candidate.index]))


def _only_read_others(ours: OwnPart, theirs: OwnPart, one: Operation, other: Operation) -> bool:
    """Whether both regions are the same views of different values: no fault of theirs."""
    left, right = ours.region(one), theirs.region(other)
    return len(left) == len(right) and all(
        mine.only_moves and mine.func is its.func and same_settings(mine, its)
        for mine, its in zip(left, right, strict=True)
    )


def _wrong_slots(part: OwnPart, operation: Operation) -> list[int]:
    return [place for place, index in enumerate(operation.outputs) if index in part.own]


def _pair_slots(
    ours: OwnPart,
    theirs: OwnPart,
    wrong: tuple[Operation, list[int]],
    right: tuple[Operation, list[int]],
) -> Iterator[tuple[int, int]]:
    """The results of two operators that may be the same one."""
    (one, slots), (other, wanted) = wrong, right
    alone = len(ours.before[one.index]) == len(theirs.before[other.index]) == 1
    for slot in slots:
        mine = ours.trace.values[one.outputs[slot]].figures
        for place in wanted:
            its = theirs.trace.values[other.outputs[place]].figures
            if mine is None or its is None or mine.is_exact is not its.is_exact:
                continue
            if mine.shape == its.shape or (alone and set(one.inputs) and slot == place):
                yield slot, place
