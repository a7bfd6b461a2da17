"""Kinds of mistakes that the calls of both programs show, without an experiment.

If two programs call the same operators with the same values, and one of them has another number
among its arguments, then that is the mistake. A function that is called instead of another one, or
operators that are left out, say less: they have a kind if no experiment finds a better word.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from paritas.core.diagnosis.patterns.variations import kind_of_argument
from paritas.core.diagnosis.stating import with_confidence
from paritas.core.locating.call_words import (
    call_name,
    call_names,
    changed_settings,
    shown_setting,
)
from paritas.core.locating.trace_calls import function_name, functions_of
from paritas.core.locating.trace_matching import leave_out_moves, plain_name, same_settings
from paritas.core.results.findings import Pattern, PatternKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paritas.core.locating.partings import Parting
    from paritas.core.tracing.traces import Operation, TracedCall

# Arguments that say how values are stored, or what is done to them by other operators then.
_OF_STORAGE = frozenset({"dtype", "layout", "device", "pin_memory", "memory_format", "out_dtype"})


def other_settings(
    parting: Parting,
    operations: Sequence[Operation],
    candidate_operations: Sequence[Operation],
    twins: tuple[Operation, Operation] | None = None,
) -> Pattern | None:
    """The arguments that are other ones in the only call that differs; None if more differs.

    Args:
        twins: the reference's call of the first operator of the candidate, if it changes nothing
            and is not among `operations`.
    """
    if twins is not None and twins[0] not in operations:
        operations = [twins[0], *operations]
    if len(operations) != len(candidate_operations) or not _are_wired_alike(
        parting, operations, candidate_operations
    ):
        return None
    calls = [
        pair
        for pair in zip(operations, candidate_operations, strict=True)
        if not same_settings(*pair)
    ]
    if len(calls) != 1 or calls[0][0].only_moves:
        return None
    right, wrong = calls[0]
    return _of_settings(right, wrong, _bare(right), call_name(wrong) if len(operations) > 1 else "")


def other_arguments(parting: Parting, operations: Sequence[Operation]) -> Pattern | None:
    """The same for a function of torch that both call on the same values."""
    changed = []
    for call in filter(None, functions_of(parting.theirs.trace, operations)):
        reads = [parting.known.classes[index] for index in call.inputs]
        gives = [parting.known.classes[index] for index in call.outputs]
        for other in parting.mine.trace.calls if None not in reads else ():
            is_same = call.target is other.target
            if is_same and reads == [parting.classes[index] for index in other.inputs]:
                if gives == [parting.classes[index] for index in other.outputs]:
                    return None
                changed.append((call, other))
    if len(changed) != 1:
        return None
    return _of_settings(*changed[0], function_name(changed[0][0]), "")


def _of_settings(
    right: Operation | TracedCall, wrong: Operation | TracedCall, operator: str, inside: str
) -> Pattern | None:
    changed = changed_settings(right, wrong)
    if not changed or _OF_STORAGE.intersection(changed):
        return None
    words = ", ".join(
        f"{name} is {shown_setting(its)} instead of {shown_setting(reference_setting)}"
        for name, (reference_setting, its) in changed.items()
    )
    kind = PatternKind.ARGUMENT
    if len(changed) == 1:
        name, pair = next(iter(changed.items()))
        kind = kind_of_argument(operator, name, *pair)
        if all(isinstance(setting, torch.dtype) for setting in pair):
            kind = PatternKind.PRECISION
    return _make_seen_pattern(kind, f"in {inside}: {words}" if inside else words, bit_for_bit=True)


def swapped_inputs(
    parting: Parting, operations: Sequence[Operation], candidate_operations: Sequence[Operation]
) -> Pattern | None:
    """Two values that several operators read in the place of each other."""
    if len(operations) < 2 or len(operations) != len(candidate_operations):  # noqa: PLR2004  (one operator says which)
        return None
    read: dict[int, int] = {}
    readers: dict[str, None] = {}
    twins: dict[int, int] = {}
    for right, wrong in zip(operations, candidate_operations, strict=True):
        if not _are_twins(right, wrong) or not same_settings(right, wrong):
            return None
        for its, candidate_index in zip(right.inputs, wrong.inputs, strict=True):
            if candidate_index in twins or its in twins.values():
                if twins.get(candidate_index) != its:
                    return None
                continue
            expected, actual_class = parting.known.classes[its], parting.classes[candidate_index]
            if (
                expected is None
                or actual_class is None
                or read.setdefault(expected, actual_class) != actual_class
            ):
                return None
            if expected != actual_class:
                readers.setdefault(call_name(wrong))
        twins.update(zip(wrong.outputs, right.outputs, strict=True))
    moved = {expected: actual for expected, actual in read.items() if expected != actual}
    if len(moved) != 2 or set(moved) != set(moved.values()):  # noqa: PLR2004  (a pair)
        return None
    words = f"the values that {' and '.join(readers)} read are swapped"
    return _make_seen_pattern(PatternKind.SWAPPED_OPERANDS, words, bit_for_bit=True)


def other_call(
    parting: Parting,
    operations: Sequence[Operation],
    candidate_operations: Sequence[Operation],
    title: str,
) -> Pattern | None:
    """The operator that is called instead of one call of the reference on the same values.

    Args:
        title: the reference's call.
    """
    its, candidate_calls = leave_out_moves(operations), leave_out_moves(candidate_operations)
    if (
        len(candidate_calls) != 1
        or not its
        or candidate_calls[0].function
        or _bare(candidate_calls[0]) in map(_bare, its)
    ):
        return None
    border = _read(its, parting.known.classes)
    if None in border or border != _read(candidate_calls, parting.classes):
        return None
    words = f"{call_name(candidate_calls[0])} instead of {title}"
    return _make_seen_pattern(PatternKind.OTHER_FUNCTION, words, bit_for_bit=True)


def left_out(
    parting: Parting, operations: Sequence[Operation], candidate_operations: Sequence[Operation]
) -> Pattern | None:
    """The operators that are left out, where all others are called in the same order."""
    its, candidate_calls = leave_out_moves(operations), leave_out_moves(candidate_operations)
    rest = iter(its)
    names = [plain_name(candidate_operation) for candidate_operation in candidate_calls]
    if not candidate_operations or not all(
        any(name == plain_name(reference_operation) for reference_operation in rest)
        for name in names
    ):
        return None
    # What only hands a value on reads what is left out is given.
    if not _read(candidate_calls or candidate_operations, parting.classes) <= _read(
        its, parting.known.classes
    ):
        return None
    lost = [*its]
    for name in names:
        lost.remove(
            next(lost_operation for lost_operation in lost if plain_name(lost_operation) == name)
        )
    if not lost:
        return None
    words = f"{call_names(lost)} {'is' if len(lost) == 1 else 'are'} left out"
    return _make_seen_pattern(PatternKind.MISSING_OPERAND, words, bit_for_bit=False)


def _are_wired_alike(
    parting: Parting, operations: Sequence[Operation], candidate_operations: Sequence[Operation]
) -> bool:
    """Whether both call the same operators with the same values, and with what these give."""
    twins: dict[int, int] = {}
    for right, wrong in zip(operations, candidate_operations, strict=True):
        if not _are_twins(right, wrong):
            return False
        for its, candidate_index in zip(right.inputs, wrong.inputs, strict=True):
            number = parting.classes[candidate_index]
            is_known = number is not None and number == parting.known.classes[its]
            if not is_known and twins.get(candidate_index) != its:
                return False
        twins.update(zip(wrong.outputs, right.outputs, strict=True))
    return True


def _are_twins(right: Operation, wrong: Operation) -> bool:
    """Whether both are the same operator, with as many values."""
    is_same = plain_name(right) == plain_name(wrong) and not right.function and not wrong.function
    counts = (len(right.inputs), len(right.outputs)), (len(wrong.inputs), len(wrong.outputs))
    return is_same and counts[0] == counts[1]


def _read(operations: Sequence[Operation], classes: Sequence[int | None]) -> set[int | None]:
    """The classes of what some operators read and do not compute themselves."""
    indexes = {index for operation in operations for index in operation.outputs}
    return {
        classes[index]
        for operation in operations
        for index in operation.inputs
        if index not in indexes
    }


def _bare(operation: Operation) -> str:
    return plain_name(operation).partition(".")[2]


def _make_seen_pattern(kind: PatternKind, sentence: str, *, bit_for_bit: bool) -> Pattern:
    # A call that is the candidate's own reproduces it.
    evidence: dict[str, Any] = dict.fromkeys(("within the noise", "bit for bit"), 1.0)
    evidence = evidence if bit_for_bit else {}
    pattern = Pattern(kind=kind, confidence=1.0, sentence=sentence, evidence=evidence)
    (pattern,) = with_confidence([pattern], at_output=False)
    return pattern
