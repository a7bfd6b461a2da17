"""Where two matched runs part: what differs there in words, and where that is in the program."""

from __future__ import annotations

import dataclasses
import difflib
from typing import TYPE_CHECKING, Any

from paritas.core.locating.call_words import (
    call_name,
    call_names,
    describe_arguments,
    describe_settings,
)
from paritas.core.locating.seen_kinds import (
    left_out,
    other_arguments,
    other_call,
    other_settings,
    swapped_inputs,
)
from paritas.core.locating.trace_calls import (
    function_of,
    functions_of,
    operations_of,
    title_of,
    twin_call,
)
from paritas.core.locating.trace_matching import (
    Joint,
    KnownValues,
    OwnPart,
    in_order,
    leave_out_moves,
    plain_name,
    same_settings,
)
from paritas.core.operators.catalogue import operators_of
from paritas.core.results.findings import Origin, OriginKind
from paritas.core.torch_private.operators import traits
from paritas.core.tracing.source_lines import NOWHERE, UserLine
from paritas.core.tracing.traces import Operation, TracedCall

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from paritas.core.locating.traced_runs import TracedRun, WrongItem
    from paritas.core.results.findings import Pattern
    from paritas.core.tracing.traces import Trace

# --- Two runs that part ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Parting:
    """Two runs, matched, and what only one side computes on the way to the wrong results.

    Attributes:
        known: the reference's values.
        classes: of the candidate's values.
        wrong: the results that differ.
        ends: the values of these, of the reference and of the candidate.
        rounding: results that are nearer than this do not differ.
    """

    theirs: TracedRun
    mine: TracedRun
    known: KnownValues
    classes: list[int | None]
    wrong: list[WrongItem]
    ends: tuple[list[int], list[int]]
    rounding: float = 0.0

    @property
    def candidate(self) -> OwnPart:
        """What only the candidate computes."""
        indexes = {
            value.index
            for value, number in zip(self.mine.trace.values, self.classes, strict=True)
            if number is None and value.figures is not None
        }
        return OwnPart.behind("candidate", self.mine.trace, self.ends[1], indexes)

    @property
    def reference(self) -> OwnPart:
        """What only the reference computes; what leads to no wrong result counts for nothing."""
        present = {self.classes[index] for index in self._find_needed()}
        computed = {
            self.known.classes[index]
            for operation in self.theirs.trace.operations
            for index in (operation.outputs if operation.computes else ())
        }
        if present.isdisjoint(computed - {None}):  # as of zeros in the place of a result
            present = set(self.classes) - {self.known.classes[index] for index in self.ends[0]}
        indexes = {
            value.index
            for value, number in zip(self.theirs.trace.values, self.known.classes, strict=True)
            if number not in present and value.figures is not None
        }
        return OwnPart.behind("reference", self.theirs.trace, self.ends[0], indexes)

    def _find_needed(self) -> set[int]:
        """The values of the candidate that lead to the wrong results."""
        trace = self.mine.trace
        needed = set(self.ends[1])
        todo = list(needed)
        while todo:
            index = todo.pop()
            more: set[int] = set()
            for maker in trace.values[index].makers:
                operation = trace.operations[maker]
                more.update(operation.inputs, operation.outputs)
            if not more and self.classes[index] is not None:
                # Autograd may hand out a result as another tensor.
                class_number = self.classes[index]
                more = {
                    value_index
                    for value_index, number in enumerate(self.classes)
                    if number == class_number
                }
            todo += more - needed
            needed |= more
        return needed


@dataclasses.dataclass(frozen=True)
class Spot:
    """Where the two sides part.

    Attributes:
        parting: the runs.
        words: what the candidate does there, and the reference does not.
        reference: the reference's operator there, if it has one.
        candidate: the candidate's operator there, or the one that needs the missing value.
        joint: the values that should be equal; None if the values show it by themselves.
        regions: if there are such values, the operators between the last equal values and these, of
            the reference and of the candidate.
        is_missing: whether the candidate does not call the reference's operator at all.
        is_extra: whether only the candidate calls its operator.
        before: operators of the reference before its region that the candidate leaves out.
        twins: the operators of both sides, if the reference's changes nothing and is in no region.
        leaf: a value of the candidate from outside, such as a parameter, that causes it.
        call: the reference's call of a function of torch that is wrong as a whole, if it is one.
        seen: what kind of wrong it is, if that follows from the calls.
        guess: the kind that is stated if no experiment finds a better one.
        has_no_kind: the candidate calls what seems to be left out, with a value that changes
            nothing, such as a factor of 1: it is not known why.
    """

    parting: Parting
    words: str
    reference: Operation | None
    candidate: Operation | None
    joint: Joint | None = None
    regions: tuple[Sequence[Operation], Sequence[Operation]] = ((), ())
    is_missing: bool = False
    is_extra: bool = False
    before: tuple[Operation, ...] = ()
    twins: tuple[Operation, Operation] | None = None
    leaf: int | None = None
    call: TracedCall | None = None
    seen: Pattern | None = None
    guess: Pattern | None = None
    has_no_kind: bool = False

    @property
    def is_random(self) -> bool:
        """Whether the operator draws random numbers."""
        ends = (self.reference, self.candidate)
        return any(end is not None and traits(end.func).random for end in ends)

    def is_same_as(self, other: Spot) -> bool:
        """Whether both are about the same operator."""
        if self.is_missing or other.is_missing:
            return self.reference is not None and self.reference is other.reference
        this_candidate, its = self.candidate, other.candidate
        if this_candidate is not None and its is not None and this_candidate.function:
            return (this_candidate.function, this_candidate.module) == (its.function, its.module)
        return this_candidate is not None and its is not None and this_candidate.index == its.index


def spot_without_joint(parting: Parting, ours: OwnPart, own_part: OwnPart) -> Spot | None:
    """A place that the values show by themselves: a step too many or too few before a result."""
    right = {parting.known.classes[index] for index in parting.ends[0]}
    if ours.operations and not own_part.operations:
        first = ours.first[0] if ours.first else ours.operations[0]
        reads = {parting.classes[index] for index in first.inputs}
        if reads & right:
            words = f"the candidate applies {call_name(first)} to the right value"
            with_twin = _with_twin(parting, Spot(parting, words, None, first, is_extra=True))
            joint, regions = _join_results(parting, ours) or (None, ((), ()))
            return dataclasses.replace(with_twin, joint=joint, regions=regions)
    if own_part.operations and not ours.operations:
        first = own_part.first[0] if own_part.first else own_part.operations[0]
        words = f"the candidate leaves out {call_name(first)}"
        last = parting.mine.trace.maker_of(parting.ends[1][-1]) if parting.ends[1] else None
        return Spot(parting, words, first, last, is_missing=True)
    if not own_part.operations and not ours.operations:
        for wrong_item, index in zip(parting.wrong, parting.ends[1], strict=False):
            maker = parting.mine.trace.maker_of(index)
            is_write = maker is not None and traits(maker.func).mutates
            if maker is not None and is_write and wrong_item.item.kind.is_afterwards:
                words = f"the candidate writes to {wrong_item.item.name} by {call_name(maker)}"
                return Spot(parting, words, None, maker)
        its, maker = (
            run.trace.maker_of(ends[0]) if ends else None
            for run, ends in zip((parting.theirs, parting.mine), parting.ends, strict=True)
        )
        if its is not None and maker is not None:
            words = (
                f"the candidate returns the result of {call_name(maker)} where the reference "
                f"returns that of {call_name(its)}"
            )
            return Spot(parting, words, its, maker)
    return None


def _join_results(
    parting: Parting, ours: OwnPart
) -> tuple[Joint, tuple[Sequence[Operation], Sequence[Operation]]] | None:
    """A wrong result and the right one, with the operators that give them from known values."""
    reference_trace, candidate_trace = parting.theirs.trace, parting.mine.trace
    for right, wrong in zip(*parting.ends, strict=False):
        its, last = reference_trace.maker_of(right), candidate_trace.maker_of(wrong)
        if its is None or last is None or last.index not in ours.before:
            continue
        if right in its.outputs and wrong in last.outputs:
            joint = Joint.of(last, wrong, its, right, size=1.0)
            return joint, ([its], ours.region(last))
    return None


@dataclasses.dataclass(frozen=True)
class Cut:
    """Where autograd no longer follows a value.

    Attributes:
        candidate: the operator that gives the value.
        readers: the reference's operators that read it.
    """

    candidate: Operation
    readers: frozenset[int]


def find_cut(parting: Parting) -> Cut | None:
    """The candidate's operator behind which autograd follows a value in the reference only.

    It is found by the first operator that reads the same values on both sides.
    """
    followed: dict[Any, list[bool]] = {}
    readers: dict[Any, set[int]] = {}
    reference_trace, candidate_trace = parting.theirs.trace, parting.mine.trace
    key: Any
    for operation in reference_trace.operations:
        key = (
            operation.func,
            operation.is_backward,
            tuple(parting.known.classes[index] for index in operation.inputs),
        )
        flags = [value.requires_grad for value in reference_trace.inputs_of(operation)]
        followed[key] = [a and b for a, b in zip(flags, followed.get(key, flags), strict=True)]
        readers.setdefault(key, set()).add(operation.index)
    inside = _inside_of_functions(candidate_trace)
    for operation in candidate_trace.operations:
        key = (
            operation.func,
            operation.is_backward,
            tuple(parting.classes[index] for index in operation.inputs),
        )
        for value, is_followed in zip(
            candidate_trace.inputs_of(operation), followed.get(key, ()), strict=False
        ):
            maker = candidate_trace.maker_of(value.index)
            is_cut = is_followed and not value.requires_grad
            if is_cut and maker is not None and maker.index not in inside:
                return Cut(maker, frozenset(readers[key]))
    return None


def _inside_of_functions(trace: Trace) -> set[int]:
    """The operators of the forward passes of autograd functions, which have a backward pass.

    Autograd does not follow what these compute, up to their result.
    """
    inside: set[int] = set()
    starts = {
        forward_operation.forward
        for forward_operation in trace.operations
        if forward_operation.function and forward_operation.forward is not None
    }
    for start in starts:
        for operation in trace.operations[start:]:
            inside.add(operation.index)
            # A view of a followed value has the memory of one that is followed elsewhere.
            is_view_of_followed = traits(operation.func).view and any(
                value.requires_grad for value in trace.inputs_of(operation)
            )
            is_followed = any(value.requires_grad for value in trace.outputs_of(operation))
            if is_followed and not is_view_of_followed:
                break
    return inside


def spot_of_cut(parting: Parting, own_part: OwnPart) -> Spot | None:
    """The place where a gradient is cut off, if what the reference computes from it is missing."""
    cut = find_cut(parting)
    if cut is None:
        return None
    if not any(
        operation.is_backward and operation.forward in cut.readers
        for operation in own_part.operations
    ):
        return None
    words = f"no gradient flows back through {call_name(cut.candidate)}"
    return Spot(parting, words, None, cut.candidate)


# --- What is different in two regions -------------------------------------------------------------


def name_spot(
    parting: Parting,
    ours: OwnPart,
    own_part: OwnPart,
    joint: Joint,
    calls: tuple[TracedCall, TracedCall] | None = None,
) -> Spot:
    """The place between the last equal values and two that should be equal.

    Args:
        calls: of one module on both sides, if these two values are its results.
    """
    trace = parting.theirs.trace
    if calls is None:
        operations, its = ours.region(joint.candidate), [joint.reference]
        if joint.reference.index in own_part.before:  # or else the candidate has its result as well
            its = own_part.region(joint.reference)
    else:
        its = operations_of(trace, calls[0], joint.reference)
        reads = {parting.known.classes[index] for index in calls[0].inputs}
        known_indices = [
            value_index for value_index, number in enumerate(parting.classes) if number in reads
        ]
        operations = operations_of(parting.mine.trace, calls[1], joint.candidate, known_indices)
    functions = functions_of(trace, its)
    call = functions[0] if len(functions) == 1 else None
    if call is not None and calls is None:  # all of it: what it reads is known on both sides
        its = _with_whole_call(trace, call, its, joint.reference)
    spot = _compare_regions(parting, its, operations, call)
    if spot.before:  # all of these together are no single call
        its, call = [*spot.before, *its], None
    seen_pattern = (
        other_settings(parting, its, operations, spot.twins)
        or other_arguments(parting, its)
        or swapped_inputs(parting, its, operations)
    )
    guess = None
    if seen_pattern is None and spot.leaf is None:
        title = call_names(its) if call is None else title_of(call, joint.reference)
        guess = other_call(parting, its, operations, title) or left_out(parting, its, operations)
    to_no_effect = [
        skipped_operation
        for skipped_operation in its
        if spot.is_missing and _changes_nothing(parting, skipped_operation)
    ]
    words = spot.words
    if to_no_effect:
        words = f"the candidate's {call_name(to_no_effect[0])} changes nothing"
    return dataclasses.replace(
        spot,
        words=words,
        joint=joint,
        regions=(its, operations),
        call=call,
        seen=seen_pattern,
        guess=guess,
        has_no_kind=bool(to_no_effect),
    )


_WITH_UNITS = operators_of("arithmetic")


def _changes_nothing(parting: Parting, skipped: Operation) -> bool:
    """Whether the candidate has a call of the operator that gives what it reads."""
    if plain_name(skipped).partition(".")[2] not in _WITH_UNITS:
        return False
    skipped_classes = {parting.known.classes[index] for index in skipped.inputs} - {None}
    for operation in parting.mine.trace.operations:
        if plain_name(operation) == plain_name(skipped):
            read = {parting.classes[index] for index in operation.inputs}
            result_classes = {parting.classes[index] for index in operation.outputs}
            if read & result_classes & skipped_classes:
                return True
    return False


def _with_whole_call(
    trace: Trace, call: TracedCall, region: list[Operation], end: Operation
) -> list[Operation]:
    """The operators of a region, and all of a call that gives its result."""
    if end not in call:
        return region
    return in_order((*operations_of(trace, call, end), *region))


def _compare_regions(
    parting: Parting,
    operations: Sequence[Operation],
    candidate_operations: Sequence[Operation],
    call: TracedCall | None,
) -> Spot:
    """What differs in two regions: what computes, or else views and copies.

    Args:
        call: the reference's only call of a function there.
    """
    if _only_continues(parting, operations, candidate_operations):
        words = f"the candidate also calls {call_names(candidate_operations)} after it"
        return Spot(parting, words, operations[-1], candidate_operations[0], is_extra=True)
    left, right = (
        [computing_operation for computing_operation in side if computing_operation.computes]
        for side in (operations, candidate_operations)
    )
    pairs = [(operations, candidate_operations)]
    if left or right:
        pairs.insert(0, (left, right))
    for its, candidate_group in pairs:
        difference = _compare_names(
            parting, its, candidate_group, candidate_operations[-1], call
        ) or _compare_calls(parting, its, candidate_group)
        if difference is not None:
            return _with_twin(parting, difference)
    for operation in candidate_operations:
        for value in parting.mine.trace.inputs_of(operation):
            if parting.classes[value.index] is None and not value.makers:
                later = candidate_operations[candidate_operations.index(operation) :]
                reader = (leave_out_moves(later) or [operation])[0]
                words = f"{call_name(reader)} reads another value"
                twins = [its for its in operations if its.func is reader.func]
                twin = twins[0] if twins else operations[-1]
                return Spot(parting, words, twin, reader, leaf=value.index)
    if traits(candidate_operations[-1].func).random:
        words = f"{call_name(candidate_operations[-1])} draws other random numbers"
    else:
        words = f"{call_name(candidate_operations[-1])} gives another result for the same inputs"
    return Spot(parting, words, operations[-1], candidate_operations[-1])


def _only_continues(
    parting: Parting, operations: Sequence[Operation], candidate_operations: Sequence[Operation]
) -> bool:
    """Whether the candidate's operators start with the result of the reference's."""
    results = {parting.known.classes[index] for index in operations[-1].outputs}
    reads = {
        parting.classes[index] for operation in candidate_operations for index in operation.inputs
    }
    names, others = (
        {plain_name(operation) for operation in side} for side in (operations, candidate_operations)
    )
    return names.isdisjoint(others) and not results.isdisjoint(reads)


def _with_twin(parting: Parting, difference: Spot) -> Spot:
    """Find the reference's call of what seems to be an additional operator.

    A factor of 1 gives a value that both sides have, and so it is in no region.
    """
    extra = difference.candidate
    if not difference.is_extra or extra is None:
        return difference
    reads = [parting.classes[index] for index in extra.inputs]
    for operation in parting.theirs.trace.operations if reads and None not in reads else ():
        others = [parting.known.classes[index] for index in operation.inputs]
        if reads == others and plain_name(operation) == plain_name(extra):
            words = f"the candidate calls {describe_settings(operation, extra)}"
            return Spot(parting, words, operation, extra, twins=(operation, extra))
    return difference


def _compare_names(
    parting: Parting,
    left: Sequence[Operation],
    right: Sequence[Operation],
    last: Operation,
    call: TracedCall | None,
) -> Spot | None:
    """Which operators only one side calls; None if both call the same.

    `last` is the candidate's operator that needs the result, if it calls none of these; `call` is
    the reference's only call of a function.
    """
    blocks = _unequal_blocks(
        *([plain_name(operation) for operation in side] for side in (left, right))
    )
    if not blocks:
        return None
    kinds = {block[0] for block in blocks}
    _, start, end, first, stop = blocks[0]
    if kinds == {"delete"}:
        words = f"the candidate leaves out {call_names(left[start:end])}"
        needs = right[min(first, len(right) - 1)] if right else last
        return Spot(parting, words, left[start], needs, is_missing=True)
    if kinds == {"insert"}:
        before = "before" if left and start < len(left) else "after"
        words = f"the candidate also calls {call_names(right[first:stop])}"
        if not left:
            return Spot(parting, words, None, right[first], is_extra=True)
        return Spot(
            parting,
            f"{words} {before} it",
            left[min(start, len(left) - 1)],
            right[first],
            is_extra=True,
        )
    _, start, end, first, stop = next(
        (block for block in blocks if block[0] == "replace"), blocks[0]
    )
    reference, candidate = left[min(start, len(left) - 1)], right[min(first, len(right) - 1)]
    right_names = call_names(left[start:end] or [reference])
    if call is not None:
        right_names = title_of(call, reference).removesuffix(".default")
    words = (
        f"the candidate calls {call_names(right[first:stop] or [candidate])} where the reference "
        f"calls {right_names}"
    )
    return Spot(parting, words, reference, candidate)


def _unequal_blocks(left: list[str], right: list[str]) -> list[tuple[str, int, int, int, int]]:
    """Where two lists differ that have the same end, as difflib describes it."""
    matcher = difflib.SequenceMatcher(None, left[::-1], right[::-1], autojunk=False)
    here, there = len(left), len(right)
    return [
        (kind, here - end, here - start, there - last, there - first)
        for kind, start, end, first, last in reversed(matcher.get_opcodes())
        if kind != "equal"
    ]


def _compare_calls(
    parting: Parting, operations: Sequence[Operation], candidate_operations: Sequence[Operation]
) -> Spot | None:
    """What differs in the same operators: their arguments, or what they read."""
    for its, other in zip(operations, candidate_operations, strict=True):
        if not same_settings(its, other):
            words = f"the candidate calls {describe_settings(its, other)}"
            return Spot(parting, words, its, other)
    for its, other in zip(operations, candidate_operations, strict=True):
        shared = set(parting.classes) - {None}
        reads = list(_sources(its, parting.theirs.trace, parting.known.classes, shared))
        others = list(_sources(other, parting.mine.trace, parting.classes, shared))
        candidate_classes = {number for number in others if number is not None}
        if reads != others and sorted(map(str, reads)) == sorted(map(str, others)):
            words = f"the candidate calls {call_name(other)} with swapped inputs"
            return Spot(parting, words, its, other)
        if reads != others and candidate_classes and not candidate_classes <= set(reads):
            skipped = _skipped_operator(parting, its, other)
            if skipped:
                words = f"the candidate leaves out {call_name(skipped[0])}"
                return Spot(parting, words, skipped[0], other, is_missing=True, before=skipped)
            words = f"the candidate calls {call_name(other)} with another input"
            return Spot(parting, words, its, other)
    return None


def _skipped_operator(
    parting: Parting, reader: Operation, other: Operation
) -> tuple[Operation, ...]:
    """The reference's operator whose input the candidate reads instead of its result.

    Followed by what hands the result on to the reader. Nothing if the candidate has the result as
    well, and no copy stands in its place: then it is the reader that reads another value.
    """
    trace, classes = parting.theirs.trace, parting.known.classes
    present = set(parting.classes) - {None}
    for index, candidate_index in zip(reader.inputs, other.inputs, strict=False):
        right, wrong = classes[index], parting.classes[candidate_index]
        if right == wrong or wrong is None:
            continue
        makers = (
            operation
            for operation in trace.operations
            if right in {classes[i] for i in operation.outputs}
        )
        maker = next(makers, reader)
        if maker.index >= reader.index or maker.only_moves:
            continue
        if wrong not in _sources(maker, trace, classes, present):
            continue
        between = _operators_between(trace, maker, index)
        handed_on = list(_ways_back(parting, candidate_index, wrong))
        if right not in present or len(handed_on) > len(between) - 1:
            return tuple(between)
    return ()


def _ways_back(parting: Parting, value: int, number: int) -> Iterator[Operation]:
    """The candidate's operators that hand a value on, back to the first one of a class."""
    trace = parting.mine.trace
    while value != parting.classes.index(number):
        maker = trace.maker_of(value)
        if maker is None or len(maker.inputs) != 1:
            return
        yield maker
        value = maker.inputs[0]


def _operators_between(trace: Trace, first: Operation, value: int) -> list[Operation]:
    """An operator, and those after it that lead from its result to a value."""
    needed = {first.index} | trace.operations_behind([value], since=first.index)
    return [trace.operations[index] for index in sorted(needed)]


def _sources(
    operation: Operation, trace: Trace, classes: Sequence[int | None], shared: set[int | None]
) -> Iterator[int | None]:
    """The classes of what an operator reads, before views and copies that only one side makes."""
    for index in operation.inputs:
        source = index
        while classes[source] not in shared:
            maker = trace.maker_of(source)
            if maker is None or not maker.only_moves or not maker.inputs:
                break
            source = maker.inputs[0]
        yield classes[source]


# --- Origins --------------------------------------------------------------------------------------


def origin_of(spot: Spot, natives: Sequence[TracedRun]) -> Origin:
    """The origin of a place: its operator, module, line, arguments, and what it touches."""
    side = 1 if spot.reference is None else 0
    run = (spot.parting.theirs, spot.parting.mine)[side]
    named = spot.candidate if spot.reference is None else spot.reference
    if named is None:
        raise ValueError("a place without an operator")
    forward = run.trace.operations[named.forward] if named.forward is not None else named
    # What is missing in the candidate has a line in the reference only; code that was generated is
    # described by the reference's operator whose result it reads.
    sites = [named, spot.candidate] if spot.is_missing else [spot.candidate, named]
    if spot.reference is None and _line_of(named) is None:
        sites.append(_reference_before(spot.parting, named))
    module = next((site.module for site in (named, *sites) if site is not None and site.module), "")
    line = next(filter(None, map(_line_of, sites)), NOWHERE)
    function = spot.candidate.function if spot.candidate is not None else ""
    # What is called with other arguments on both sides has the same name on both.
    is_same = spot.candidate is not None and spot.candidate.func is named.func
    called_function = function_of(run.trace, named) if side == 0 and not is_same else None
    operator = function or title_of(called_function, forward)
    called = forward if called_function is None or operator == forward.name else called_function
    native = _find_native(called, run.trace, natives[side].trace)
    shown = (called, run.trace) if native is None else (native, natives[side].trace)
    return Origin(
        kind=OriginKind.NODE,
        name=f"{module}/{operator}" if module else operator,
        operator=operator,
        module=module,
        source=line.line,
        code=line.code,
        nodes=tuple(region.name for region in spot.regions[1]) if len(spot.regions[1]) > 1 else (),
        arguments=tuple(describe_arguments(*shown)),
        chain=tuple(_chain(spot)),
    )


def _reference_before(parting: Parting, operation: Operation) -> Operation | None:
    """The reference's operator that gives what an operator of the candidate reads."""
    reads = {parting.classes[index] for index in operation.inputs} - {None}
    trace = parting.theirs.trace
    for value in reversed(trace.values):
        maker = trace.maker_of(value.index)
        if maker is not None and parting.known.classes[value.index] in reads:
            return maker
    return None


def _line_of(operation: Operation | None) -> UserLine | None:
    """The line of an operator, if it is in a file."""
    if operation is None or not operation.line.line or operation.line.line.startswith("<"):
        return None
    return operation.line


def _find_native(
    called: Operation | TracedCall, trace: Trace, natives: Trace
) -> Operation | TracedCall | None:
    if isinstance(called, TracedCall):
        return twin_call(called, trace, natives)
    return find_twin(called, trace, natives)


def _chain(spot: Spot) -> Iterator[str]:
    """What the fault passes through: modules, or operators outside of them, and the results."""
    start = spot.candidate.index if spot.candidate is not None else -1
    names: dict[str, None] = {}
    for operation in spot.parting.candidate.operations:
        if operation.index > start:
            names.setdefault(operation.module or operation.name)
    yield from names
    if wrong := [wrong_item.item.text for wrong_item in spot.parting.wrong]:
        yield wrong[0] if len(wrong) == 1 else f"{wrong[0]} and {len(wrong) - 1} more"


def find_twin(operation: Operation, trace: Trace, other: Trace) -> Operation | None:
    """The same call in another run of the same side."""

    def like(operations: Iterable[Operation]) -> list[Operation]:
        return [
            other_operation
            for other_operation in operations
            if other_operation.func is operation.func
            and other_operation.module == operation.module
            and other_operation.is_backward is operation.is_backward
        ]

    ours, other_operations = like(trace.operations), like(other.operations)
    if len(ours) != len(other_operations):
        return None
    return other_operations[ours.index(operation)]
