"""The calls of two matched programs: which module goes wrong, and which call an operator is part of.

An operator that only the candidate calls means little to a reader. The place is a call of the
reference whose inputs the candidate has and whose result it lacks: of a module that both sides call,
or of a function of torch, such as `linear`, however many operators it consists of.
"""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING, Any

import torch

from paritas.checks.trace_matching import Joint

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paritas.checks.partings import Parting
    from paritas.recording.traces import Operation, Trace, TracedCall


# --- Modules that both sides call -----------------------------------------------------------------


def wrong_modules(parting: Parting) -> Iterator[tuple[TracedCall, TracedCall, Joint]]:
    """The calls of modules with right inputs and a wrong result, the first to return first.

    Each with the candidate's call of the same module, and the results that should be equal.
    """
    mine = dict(_module_calls(parting.mine.trace))
    calls = [(key, call) for key, call in _module_calls(parting.theirs.trace) if key[0]]
    for key, call in sorted(calls, key=lambda one: one[1].stop):
        other = mine.get(key)
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
        mine = _maker_in(parting.mine.trace, other, wrong)
        if its is None or mine is None or its.is_backward:
            return None
        slots = mine.outputs.index(wrong), its.outputs.index(right)
        size = float(call.stop - call.start + other.stop - other.start)
        return Joint(mine, its, slots, size, 0.0)
    return None


def _maker_in(trace: Trace, call: TracedCall, value: int) -> Operation | None:
    """The operator of a call that gave a value."""
    makers = trace.values[value].makers
    maker = trace.operations[makers[-1]] if makers else None
    return maker if maker is not None and maker in call and value in maker.outputs else None


def operations_of(trace: Trace, call: TracedCall, end: Operation) -> list[Operation]:
    """The operators of a call up to one, without those that do not lead to it."""
    needed = {end.index}
    for operation in reversed(trace.operations[call.start : end.index + 1]):
        if operation.index in needed:
            for index in operation.inputs:
                needed |= {one for one in trace.values[index].makers if one < operation.index}
    return [one for one in trace.operations[call.start : end.index + 1] if one.index in needed]


# --- Functions of torch ---------------------------------------------------------------------------


def function_of(trace: Trace, operation: Operation) -> TracedCall | None:
    """The call of a function of torch that an operator is part of."""
    for call in trace.calls:
        if call.path is None and operation in call:
            return call
    return None


def functions_of(trace: Trace, operations: Sequence[Operation]) -> list[TracedCall | None]:
    """The calls of functions that some operators are part of, those that only move data left out.

    None stands for operators that no function called.
    """
    computing = [one for one in operations if not one.only_moves] or operations
    calls = [function_of(trace, one) for one in computing]
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
