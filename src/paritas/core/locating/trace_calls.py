"""The calls of two matched programs: which one goes wrong, and what stands for it.

An operator that only the candidate calls means little to a reader. The place is a call of the
reference whose inputs the candidate has and whose result it lacks: of a module that both sides
call, or of a function of torch, such as `linear`, however many operators it consists of.
"""

from __future__ import annotations

import collections
import functools
from typing import TYPE_CHECKING, Any

import torch

from paritas.core.locating.trace_matching import Joint, leave_out_moves, plain_name, readers_of
from paritas.core.tracing.traces import TracedCall

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from paritas.core.locating.partings import Parting
    from paritas.core.tracing.traces import Operation, Trace


# --- Modules that both sides call -----------------------------------------------------------------


def wrong_modules(parting: Parting) -> Iterator[tuple[TracedCall, TracedCall, Joint]]:
    """The calls of modules with right inputs and a wrong result, the first to return first.

    Each with the candidate's call of the same module, and the results that should be equal.
    """
    candidate_calls = dict(_module_calls(parting.mine.trace))
    calls = [(key, call) for key, call in _module_calls(parting.theirs.trace) if key[0]]
    # A module returns before the one that calls it, perhaps after the same operator.
    calls.reverse()
    for key, call in sorted(calls, key=lambda keyed_call: keyed_call[1].stop):
        other = candidate_calls.get(key)
        if other is None or not call.inputs or len(call.outputs) != len(other.outputs):
            continue
        if not _reads_the_same(parting, call, other):
            continue
        joint = _wrong_result(parting, call, other)
        if joint is not None:
            yield call, other, joint


def _module_calls(trace: Trace) -> Iterator[tuple[tuple[str, int], TracedCall]]:
    """The calls of modules that have returned, by path and number."""
    numbers: collections.Counter[str] = collections.Counter()
    for call in trace.calls:
        if call.path is not None and call.stop > call.start:
            yield (call.path, numbers[call.path]), call
            numbers[call.path] += 1


def _reads_the_same(parting: Parting, call: TracedCall, other: TracedCall) -> bool:
    reads = [parting.known.classes[index] for index in call.inputs]
    return reads == [parting.classes[index] for index in other.inputs]


def _wrong_result(parting: Parting, call: TracedCall, other: TracedCall) -> Joint | None:
    """The first result that is another one, as the result of an operator of each side."""
    for right, wrong in zip(call.outputs, other.outputs, strict=True):
        if parting.known.classes[right] == parting.classes[wrong]:
            continue
        its = _maker_in(parting.theirs.trace, call, right)
        maker = _maker_in(parting.mine.trace, other, wrong)
        if its is None or maker is None or its.is_backward:
            return None
        size = float(call.stop - call.start + other.stop - other.start)
        return Joint.of(maker, wrong, its, right, size)
    return None


def _maker_in(trace: Trace, call: TracedCall, value: int) -> Operation | None:
    """The operator of a call that gave a value."""
    maker = trace.maker_of(value)
    return maker if maker is not None and maker in call and value in maker.outputs else None


def operations_of(
    trace: Trace, call: TracedCall, end: Operation, known_values: Collection[int] = ()
) -> list[Operation]:
    """The operators of a call up to one, without those that do not lead to it.

    Args:
        known_values: values that are known; what computes them is left out.
    """
    needed = {end.index}
    for operation in reversed(trace.operations[call.start : end.index + 1]):
        if operation.index in needed:
            for index in set(operation.inputs).difference(known_values):
                needed |= {maker for maker in trace.values[index].makers if maker < operation.index}
    return [
        inner_operation
        for inner_operation in trace.operations[call.start : end.index + 1]
        if inner_operation.index in needed
    ]


# --- Functions of torch ---------------------------------------------------------------------------


def function_of(trace: Trace, operation: Operation) -> TracedCall | None:
    """The call of a function of torch that an operator is part of."""
    for call in trace.calls if not operation.is_backward else ():
        if call.path is None and operation in call:
            return call
    return None


def functions_of(trace: Trace, operations: Sequence[Operation]) -> list[TracedCall | None]:
    """The calls of functions that some operators are part of, those that only move data left out.

    None stands for operators that no function called.
    """
    computing = leave_out_moves(operations) or operations
    calls = [function_of(trace, operation) for operation in computing]
    return list({id(call): call for call in calls}.values())


def title_of(call: TracedCall | None, operation: Operation) -> str:
    """The operator of a call as a reader knows it: `aten.linear`, and not its `aten.addmm`."""
    name = function_name(call)
    if not name or name in operation.name or not hasattr(torch.ops.aten, name):
        return operation.name
    return f"aten.{name}"


def function_name(call: TracedCall | None) -> str:
    """The bare name of the function that is called: `linear`."""
    name: Any = getattr(call.target, "__name__", "") if call is not None else ""
    return str(name).partition(".")[0].strip("_")


def twin_call(call: TracedCall, trace: Trace, other: Trace) -> TracedCall | None:
    """The same call in another run of the same side."""
    alike, others = (
        [traced_call for traced_call in run.calls if traced_call.target is call.target]
        for run in (trace, other)
    )
    if len(alike) != len(others):
        return None
    return next(
        twin for traced_call, twin in zip(alike, others, strict=True) if traced_call is call
    )


# --- Lines of the candidate -----------------------------------------------------------------------

# How many operators are looked at; a model that differs everywhere has hundreds.
_MOST_FIRST = 8


def wrong_lines(parting: Parting) -> Iterator[tuple[TracedCall, TracedCall, Joint]]:
    """The reference's calls of functions that the first wrong lines of the candidate stand for.

    What the candidate inserts belongs to the call that it is on one line with: `linear(x) * 2` is a
    wrong `linear`, and so is the function of a user that a graph calls instead of it. The lines
    are those that were running at a first wrong operator, the innermost first. The call of the
    reference has a result of the same shape, and the same operators compute with it later.

    Yields:
        The reference's call, the candidate's operators of that line as a call, and the results
        that should be equal.
    """
    readers = (
        _Readers(parting.theirs.trace, parting.ends[0]),
        _Readers(parting.mine.trace, parting.ends[1]),
    )
    reference_only, met = parting.reference.own, set[tuple[int, int]]()
    for first in _first_wrong(parting):
        for depth in range(len(first.frames), 0, -1):
            lines = _operators_on(parting.mine.trace, first, depth)
            result = _only_result(parting, lines)
            if result is None:
                continue
            for call, joint in _calls_like(parting, lines, result, reference_only, readers):
                pair = joint.candidate.index, joint.reference.index
                if pair not in met:
                    met.add(pair)
                    yield call, lines, joint


def _first_wrong(parting: Parting) -> list[Operation]:
    """The candidate's operators that compute a number that the reference lacks from right ones.

    Integers and truth values do not count: how a mask is made is nobody's business.
    """
    part, values = parting.candidate, parting.mine.trace.values

    def is_own(index: int) -> bool:
        figures = values[index].figures
        return index in part.own and figures is not None and not figures.is_exact

    operations = [
        operation
        for operation in part.operations
        if not operation.is_backward
        and any(map(is_own, operation.outputs))
        and not any(map(is_own, operation.inputs))
    ]
    return operations[:_MOST_FIRST]


def _operators_on(trace: Trace, first: Operation, depth: int) -> TracedCall:
    """All that a line of the running ones calls, as a call."""
    frames = first.frames[:depth]
    start, stop = first.index, first.index + 1
    while start > 0 and trace.operations[start - 1].frames[:depth] == frames:
        start -= 1
    while stop < len(trace.operations) and trace.operations[stop].frames[:depth] == frames:
        stop += 1
    return TracedCall(None, None, (), {}, (), start, stop)


def _only_result(parting: Parting, lines: TracedCall) -> tuple[Operation, int] | None:
    """The only value that the reference lacks among those that lines of the candidate give."""
    trace = parting.mine.trace
    read = {index for operation in trace.operations[lines.stop :] for index in operation.inputs}
    read.update(parting.ends[1])
    indexes = {index for operation in parting.candidate.operations for index in operation.outputs
           if parting.classes[index] is None}  # fmt: skip
    results = [
        (operation, slot)
        for operation in trace.operations[lines.start : lines.stop]
        for slot, index in enumerate(operation.outputs)
        if index in read and index in indexes
    ]
    return results[0] if len(results) == 1 else None


def _calls_like(
    parting: Parting,
    lines: TracedCall,
    result: tuple[Operation, int],
    reference_only: Collection[int],
    readers: tuple[_Readers, _Readers],
) -> list[tuple[TracedCall, Joint]]:
    """The reference's calls that lines of the candidate may stand for, the likeliest first."""
    reference_trace, candidate_trace = parting.theirs.trace, parting.mine.trace
    maker, slot = result
    wrong = maker.outputs[slot]
    figures = candidate_trace.values[wrong].figures
    operations = candidate_trace.operations[lines.start : lines.stop]
    reads = {parting.classes[index] for operation in operations for index in operation.inputs}
    leading = operations_of(candidate_trace, lines, maker)
    computed_classes = {
        parting.classes[index]
        for leading_operation in leading
        for index in leading_operation.outputs
    }
    leads_to = readers[1].names(wrong, lines)
    still_read = {parting.classes[index] for index in readers[1].read_outside(lines)}
    present = set(parting.classes)
    if (
        sum(leading_operation.computes for leading_operation in leading) > 1
    ):  # or else one operator reads another value
        present = {parting.classes[index] for index in readers[1].leading}
    ranked_calls = []
    for call in reference_trace.calls:
        if call.path is not None or call.stop <= call.start or not call.inputs:
            continue
        if not {parting.known.classes[index] for index in call.inputs} <= present:
            continue
        overlap = len(reads & {parting.known.classes[index] for index in call.inputs})
        for right in call.outputs:
            reference_figures = reference_trace.values[right].figures
            its = _maker_in(reference_trace, call, right)
            if its is None or reference_figures is None or figures is None or not overlap:
                continue
            if (
                reference_figures.shape != figures.shape
                or reference_figures.is_exact is not figures.is_exact
            ):
                continue
            if right not in reference_only and parting.known.classes[right] not in computed_classes:
                continue
            if readers[0].names(right, call) == leads_to:
                joint = Joint.of(maker, wrong, its, right)
                # Of several results of a call, those that are read are not what is missing.
                is_missing = (
                    right in reference_only or parting.known.classes[right] not in still_read
                )
                ranked_calls.append((is_missing, overlap / len(set(call.inputs)), call, joint))
    ranked_calls.sort(key=lambda ranked_call: ranked_call[:2], reverse=True)
    return [(call, joint) for *_, call, joint in ranked_calls]


class _Readers:
    """Which operators compute with a value, perhaps through views and copies."""

    def __init__(self, trace: Trace, ends: Collection[int]) -> None:
        self._ends = frozenset(ends)
        self._by_value = readers_of(trace.operations)
        self._trace = trace

    @functools.cached_property
    def leading(self) -> frozenset[int]:
        """The values that lead to a result; what is computed and never used is none of them."""
        leading = {value.index for value in self._trace.values if not value.makers} | self._ends
        for operation in reversed(self._trace.operations):
            if leading.intersection(operation.outputs):
                leading.update(operation.inputs)
        return frozenset(leading)

    def read_outside(self, call: TracedCall) -> frozenset[int]:
        """The values that operators outside of a call read, and results of the program."""
        read = (
            index
            for index, by in self._by_value.items()
            if any(reader not in call for reader in by)
        )
        return self._ends.union(read)

    def names(self, value: int, call: TracedCall) -> frozenset[str]:
        """The names of those outside of a call; "" for a result of the program."""
        names: set[str] = set()
        todo = [value]
        while todo:
            index = todo.pop()
            if index in self._ends:
                names.add("")
            for reader in self._by_value.get(index, ()):
                if reader in call or reader.is_backward:
                    continue
                if reader.only_moves:
                    todo += reader.outputs
                else:
                    names.add(plain_name(reader))
        return frozenset(names)
