"""Find where an uncompiled candidate starts to compute something else than the reference.

Both sides run once more, and every operator is recorded, in float64 where that shows the failure.
The candidate's values are matched with the reference's. Where a value that the reference lacks is
computed from values that both have, the candidate runs again and continues with the reference's
value instead: the place is where that removes the difference.
"""

from __future__ import annotations

import dataclasses
import difflib
import time
import traceback
from typing import TYPE_CHECKING, Any

import msgspec

from paritas.checks.failures import FailedPair
from paritas.checks.places import Place
from paritas.checks.region_programs import Region, judge_regions
from paritas.checks.trace_matching import (
    Joint,
    KnownValues,
    OwnPart,
    find_joints,
    plain_name,
    same_settings,
)
from paritas.checks.traced_runs import (
    SAME_IN_FLOAT64,
    Instead,
    TracedRun,
    TracedSides,
    WrongItem,
    kept_tensors,
)
from paritas.errors import in_one_line
from paritas.execution.saved_state import RandomState
from paritas.execution.subjects import Inputs
from paritas.numerics.bits import dtype_name
from paritas.recording.module_calls import NOWHERE, UserLine, format_line, is_user_file
from paritas.recording.traces import OutOfTimeError, ValueRef
from paritas.results.findings import Aspect, Finding, Origin, OriginKind, Status
from paritas.results.items import Item, ItemKind
from paritas.results.wording import counted

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from torch import Tensor

    from paritas.checks.places import FailedCall
    from paritas.recording.traces import Operation, Trace

# More independent faults than this are not looked for.
_MOST_PLACES = 4
_MOST_ROUNDS = 8
# How many pairs of a wrong and a right value are tried for one place.
_MOST_TRIES = 12
# Values that agree to this share of the difference of the results are equal.
_SHARE_OF_DIFFERENCE = 1e-3
# In float64, values that are nearer than the first are equal, and rounding moves them by less than
# the second; natively, in multiples of the unit roundoff.
_NEAR_WIDE, _ROUNDING_WIDE = 1e-9, 1e-14
_NEAR_NATIVE, _ROUNDING_NATIVE = 16.0, 2.0

_LONGER = "paritas verify ... --locate-seconds 600"
_BY_HAND = (
    "record both with paritas.capture(FOLDER, level='both'), then "
    "paritas compare --my-path CANDIDATE --golden-path REFERENCE"
)


def locate_programs(call: FailedCall) -> Place:
    """Find where the difference starts in a candidate that is not compiled."""
    now = RandomState.now()
    try:
        return _Search(call).locate()
    except OutOfTimeError:
        return Place(reason="the time was over before the place was found", command=_LONGER)
    except Exception as error:  # noqa: BLE001  (a place is an extra: the verdict stands)
        return Place(reason=f"the search failed: {in_one_line(error, 160)}", command=_BY_HAND)
    finally:
        now.restore()


# --- The search -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Parting:
    """Two runs, matched, and what only one side computes on the way to the wrong results.

    Attributes:
        known: the reference's values.
        classes: of the candidate's values.
        wrong: the results that differ.
        ends: the values of these, of the reference and of the candidate.
    """

    theirs: TracedRun
    mine: TracedRun
    known: KnownValues
    classes: list[int | None]
    wrong: list[WrongItem]
    ends: tuple[list[int], list[int]]

    @property
    def candidate(self) -> OwnPart:
        """What only the candidate computes."""
        own = {
            value.index
            for value, number in zip(self.mine.trace.values, self.classes, strict=True)
            if number is None and value.figures is not None
        }
        return OwnPart.behind("candidate", self.mine.trace, self.ends[1], own)

    @property
    def reference(self) -> OwnPart:
        """What only the reference computes."""
        present = set(self.classes)
        own = {
            value.index
            for value, number in zip(self.theirs.trace.values, self.known.classes, strict=True)
            if number not in present and value.figures is not None
        }
        return OwnPart.behind("reference", self.theirs.trace, self.ends[0], own)


@dataclasses.dataclass(frozen=True)
class _Spot:
    """Where the two sides part.

    Attributes:
        words: what the candidate does there, and the reference does not.
        reference: the reference's operator there, if it has one.
        candidate: the candidate's operator there, or the one that needs the missing value.
        regions: the operators between the last equal values and the first that should be equal, of
            the reference and of the candidate.
        joint: the values that should be equal; None if the values show it by themselves.
        parting: the runs.
        is_missing: whether the candidate does not call the reference's operator at all.
    """

    words: str
    reference: Operation | None
    candidate: Operation | None
    regions: tuple[Sequence[Operation], Sequence[Operation]]
    joint: Joint | None
    parting: _Parting
    is_missing: bool = False

    def is_same_as(self, other: _Spot) -> bool:
        """Whether both are about the same operator."""
        if self.is_missing or other.is_missing:
            return self.reference is not None and self.reference is other.reference
        mine, its = self.candidate, other.candidate
        return mine is not None and its is not None and mine.index == its.index


class _Search:
    def __init__(self, call: FailedCall) -> None:
        self.call = call
        self.sides = TracedSides(call)
        self._natives: list[TracedRun] = []

    def locate(self) -> Place:
        """The first places, or why there are none."""
        self.call.tell("recording the operators of both sides")
        mine = self.sides.run(self.call.candidate)
        error = mine.seen.error or mine.seen.gradient_error
        if error is not None:
            return _raising_place(mine, error)
        theirs = self.sides.run(self.call.reference)
        error = theirs.seen.error or theirs.seen.gradient_error
        if error is not None:
            reason = f"the reference raises {in_one_line(error, 120)}, so there is nothing to match"
            return Place(reason=reason, command=_BY_HAND)
        self._natives = [theirs, mine]
        for theirs, mine, near, rounding in self._pairs():
            wrong = self.sides.wrong_items(theirs, mine)
            wrong = _first_to_explain(wrong, rounding)
            if not wrong:
                continue
            largest = max((one.distance for one in wrong), default=0.0)
            tolerance = max(rounding, min(near, _SHARE_OF_DIFFERENCE * largest))
            for ordered in (True, False):
                known = KnownValues(theirs.trace, tolerance, ordered=ordered)
                spots = self._find_spots(theirs, mine, known, rounding)
                if spots:
                    return self._place(spots)
        return Place(
            reason="no operator of the candidate could be shown to be where the difference starts",
            command=_BY_HAND,
        )

    def _pairs(self) -> Iterator[tuple[TracedRun, TracedRun, float, float]]:
        """The pairs of runs that may show it, each with what is near and what is rounding."""
        call, sides = self.call, self.sides
        if sides.has_wide():
            call.tell("recording the operators of both sides in float64")
            runs = [sides.run(side, wide=True) for side in (call.reference, call.candidate)]
            if not any(run.seen.error or run.seen.gradient_error for run in runs):
                yield runs[0], runs[1], _NEAR_WIDE, SAME_IN_FLOAT64
        unit = sides.unit
        theirs, mine = self._natives
        yield theirs, mine, max(_NEAR_WIDE, _NEAR_NATIVE * unit), _ROUNDING_NATIVE * unit

    def _part(
        self, theirs: TracedRun, mine: TracedRun, known: KnownValues, rounding: float
    ) -> _Parting | None:
        """Match two runs; None if no result differs any more."""
        wrong = _first_to_explain(self.sides.wrong_items(theirs, mine), rounding)
        if not wrong:
            return None
        ends: tuple[list[int], list[int]] = ([], [])
        for one in wrong:
            pairs = (one.reference, theirs.trace), (one.candidate, mine.trace)
            for (figures, trace), indices in zip(pairs, ends, strict=True):
                value = None if figures is None else trace.last_like(figures, rounding)
                if value is not None:
                    indices.append(value.index)
        return _Parting(theirs, mine, known, known.match(mine.trace), wrong, ends)

    def _find_spots(
        self, theirs: TracedRun, mine: TracedRun, known: KnownValues, rounding: float
    ) -> list[_Spot]:
        """The places of independent faults, each found with the ones before it removed."""
        spots: list[_Spot] = []
        instead: Instead = {}
        parting = self._part(theirs, mine, known, rounding)
        for _ in range(_MOST_ROUNDS):
            if parting is None or len(spots) == _MOST_PLACES:
                break
            spot, parting = self._find_spot(parting, instead, rounding)
            if spot is None:
                break
            # A value that several operators read may have to be replaced for each of them.
            if not any(spot.is_same_as(other) for other in spots):
                spots.append(spot)
        return spots

    def _find_spot(
        self, parting: _Parting, instead: Instead, rounding: float
    ) -> tuple[_Spot | None, _Parting | None]:
        """One place, and what is left without it; `instead` gets the value that removes it."""
        ours, theirs = parting.candidate, parting.reference
        joints = find_joints(ours, theirs, parting.classes, parting.known)
        for joint in joints[:_MOST_TRIES]:
            self.call.tell(f"continuing after {joint.candidate.name} with the reference's value")
            value = self._value_at(parting, joint)
            if value is None:
                continue
            slots = {**instead.get(joint.candidate.index, {}), joint.slots[0]: value}
            changed = {**instead, joint.candidate.index: slots}
            run = self.sides.run(self.call.candidate, wide=parting.mine.wide, instead=changed)
            if run.seen.error is not None or run.seen.gradient_error is not None:
                continue
            left = self._part(parting.theirs, run, parting.known, rounding)
            if left is not None and not _results_change(parting, left, rounding):
                continue  # it is different, but it does not matter
            if left is None or _has_moved_on(parting, left, joint):
                instead.update(changed)
                return _name_spot(parting, ours, theirs, joint), left
        return _spot_without_joint(parting, ours, theirs), None

    def _value_at(self, parting: _Parting, joint: Joint) -> Tensor | None:
        index = joint.reference.outputs[joint.slots[1]]
        kept = kept_tensors(self.sides, self.call.reference, parting.theirs, {index})
        return kept.get(index)

    # --- From places to findings ------------------------------------------------------------------

    def _place(self, spots: list[_Spot]) -> Place:
        findings = []
        first_pair: FailedPair | None = None
        for spot in spots:
            finding, pair = self._describe(spot)
            findings.append(finding)
            first_pair = first_pair if findings[1:] else pair
        return Place(findings=tuple(findings), pair=first_pair)

    def _describe(self, spot: _Spot) -> tuple[Finding, FailedPair | None]:
        about = next(
            (one for one in self.call.failures if one.aspect is Aspect.VALUE),
            self.call.failures[0],
        )
        origin = _origin_of(spot, self._natives)
        item = Item(ItemKind.NODE, origin.name)
        judged: Finding | None = None
        pair = None
        if spot.joint is not None and time.monotonic() < self.call.deadline:
            self.call.tell(f"judging {origin.operator or origin.name} alone")
            judged, pair = self._judge(spot, item)
        reason = f"starts here: {spot.words}"
        if judged is None:
            finding = Finding(item=item, aspect=about.aspect, status=about.status, reason=reason)
        else:
            reason = f"{reason}; {judged.reason}" if judged.reason else reason
            finding = msgspec.structs.replace(judged, reason=reason)
        return (
            msgspec.structs.replace(finding, source=origin.source or None, origin=origin),
            pair,
        )

    def _judge(self, spot: _Spot, item: Item) -> tuple[Finding | None, FailedPair | None]:
        """Judge the operators alone on the reference's inputs, natively if they are known there."""
        regions = self._regions(spot, native=True) or self._regions(spot, native=False)
        if regions is None:
            return None, None
        reference, candidate, tensors = regions
        pair = FailedPair(reference, candidate, [Inputs(tuple(tensors))])
        try:
            found = judge_regions(item, reference, candidate, tensors, self.call.config.seed)
        except Exception:  # noqa: BLE001  (random numbers, custom functions: they cannot run alone)
            return None, None
        bad = [finding for finding in found if not finding.status.passes()]
        if not bad:
            return None, pair
        return max(bad, key=lambda finding: finding.status.gravity), pair

    def _regions(self, spot: _Spot, *, native: bool) -> tuple[Region, Region, list[Tensor]] | None:
        """The operators of both sides as functions of the same arguments."""
        joint, parting = spot.joint, spot.parting
        if joint is None:
            return None
        tensors: list[Tensor] = []
        places: dict[int, int] = {}
        made: list[Region] = []
        for side, (run, end, slot, classes) in enumerate(
            (
                (parting.theirs, joint.reference, joint.slots[1], parting.known.classes),
                (parting.mine, joint.candidate, joint.slots[0], parting.classes),
            )
        ):
            twins = {one.index: one for one in spot.regions[side]}
            if native:
                twins = self._twins(spot.regions[side], run, side)
            if len(twins) < len(spot.regions[side]):
                return None
            border = _border(spot.regions[side], twins, classes)
            subject = (self.call.reference, self.call.candidate)[side]
            kept = kept_tensors(self.sides, subject, self._natives[side] if native else run, border)
            if len(kept) < len(border):
                return None
            for index, number in border.items():
                if number is not None and number not in places:
                    places[number] = len(tensors)
                    tensors.append(kept[index])
            given = {index: places[one] for index, one in border.items() if one is not None}
            fixed = {index: kept[index] for index, one in border.items() if one is None}
            result = twins[end.index].outputs[slot]
            made.append(Region(list(twins.values()), result, given, fixed))
        return made[0], made[1], tensors

    def _twins(
        self, operations: Sequence[Operation], run: TracedRun, side: int
    ) -> dict[int, Operation]:
        """The same calls in the native run, as far as they are found there."""
        native = self._natives[side]
        if native is run:
            return {one.index: one for one in operations}
        twins = ((one.index, _find_twin(one, run.trace, native.trace)) for one in operations)
        return {index: twin for index, twin in twins if twin is not None}


def _border(
    operations: Sequence[Operation], twins: Mapping[int, Operation], classes: Sequence[int | None]
) -> dict[int, int | None]:
    """The values that some operators read from outside, in another run, with their classes."""
    inner = {index for one in twins.values() for index in one.outputs}
    border: dict[int, int | None] = {}
    for one in operations:
        for index, other in zip(one.inputs, twins[one.index].inputs, strict=False):
            if other not in inner:
                border.setdefault(other, classes[index])
    return border


def _first_to_explain(wrong: list[WrongItem], rounding: float) -> list[WrongItem]:
    """The results that differ; gradients only if nothing before them does."""
    wrong = [one for one in wrong if one.distance > rounding]
    forward = [one for one in wrong if not _is_of_backward(one.item)]
    return forward or wrong


def _is_of_backward(item: Item) -> bool:
    return item.kind.is_gradient or item.kind.is_after_backward


def _results_change(before: _Parting, after: _Parting, rounding: float) -> bool:
    """Whether the wrong results are now other ones."""
    earlier = {one.item: one.candidate for one in before.wrong}
    return any(
        WrongItem(one.item, earlier.get(one.item), one.candidate).distance > rounding
        for one in after.wrong
    ) or len(before.wrong) != len(after.wrong)


def _has_moved_on(before: _Parting, after: _Parting, joint: Joint) -> bool:
    """Whether what follows from the value is now what the reference computes.

    Operators that also read other wrong values show nothing. Where the two sides differ in layout,
    a few values that the reference lacks may lie in between.
    """
    trace = after.mine.trace
    if len(trace.operations) != len(before.mine.trace.operations):
        return False
    pending = {trace.operations[joint.candidate.index].outputs[joint.slots[0]]}
    is_shown = False
    for operation in trace.operations[joint.candidate.index + 1 :]:
        if pending.isdisjoint(operation.inputs):
            continue
        if any(index not in pending and after.classes[index] is None for index in operation.inputs):
            continue
        unknown = {index for index in operation.outputs if after.classes[index] is None}
        earlier = before.mine.trace.operations[operation.index].outputs
        if not unknown and any(before.classes[index] is None for index in earlier):
            is_shown = True
        pending |= unknown
    return is_shown and pending.isdisjoint(after.ends[1])


def _spot_without_joint(parting: _Parting, ours: OwnPart, theirs: OwnPart) -> _Spot | None:
    """A place that the values show by themselves: a step too many or too few before a result."""
    right = {parting.known.classes[index] for index in parting.ends[0]}
    if ours.operations and not theirs.operations:
        first = ours.first[0] if ours.first else ours.operations[0]
        reads = {parting.classes[index] for index in first.inputs}
        if reads & right:
            words = f"the candidate applies {_call_name(first)} to the right value"
            return _Spot(words, None, first, ((), [first]), None, parting)
    if theirs.operations and not ours.operations:
        first = theirs.first[0] if theirs.first else theirs.operations[0]
        words = f"the candidate leaves out {_call_name(first)}"
        makers = [
            parting.mine.trace.operations[parting.mine.trace.values[index].makers[-1]]
            for index in parting.ends[1]
        ]
        last = makers[-1] if makers else None
        if first.is_backward and first.forward is not None:
            cut = _find_cut(parting, parting.theirs.trace.operations[first.forward])
            if cut is not None:
                words = f"no gradient flows back through {_call_name(cut)}"
                return _Spot(words, None, cut, ((), [cut]), None, parting)
        return _Spot(words, first, last, ([first], ()), None, parting, is_missing=True)
    return None


def _find_cut(parting: _Parting, forward: Operation) -> Operation | None:
    """The candidate's operator behind which autograd no longer follows an equal value."""
    theirs, mine = parting.theirs.trace, parting.mine.trace
    wanted = {parting.known.classes[index] for index in forward.outputs}
    for operation in mine.operations:
        if not wanted & {parting.classes[index] for index in operation.outputs}:
            continue
        for left, right in zip(theirs.inputs_of(forward), mine.inputs_of(operation), strict=False):
            if left.requires_grad and not right.requires_grad and right.makers:
                return mine.operations[right.makers[-1]]
    return None


# --- What is different in two regions -------------------------------------------------------------


def _name_spot(parting: _Parting, ours: OwnPart, theirs: OwnPart, joint: Joint) -> _Spot:
    mine, its = ours.region(joint.candidate), theirs.region(joint.reference)
    found = _compare_regions(parting, its, mine)
    return _Spot(
        found.words,
        found.reference,
        found.candidate,
        (its, mine),
        joint,
        parting,
        found.is_missing,
    )


def _compare_regions(
    parting: _Parting, theirs: Sequence[Operation], mine: Sequence[Operation]
) -> _Difference:
    """What differs in two regions: what computes, or else views and copies."""
    left, right = ([one for one in side if not one.only_moves] for side in (theirs, mine))
    pairs = [(theirs, mine)]
    if left or right:
        pairs.insert(0, (left, right))
    for its, own in pairs:
        difference = _compare_names(its, own, mine[-1]) or _compare_calls(parting, its, own)
        if difference is not None:
            return _with_twin(parting, difference)
    words = f"{_call_name(mine[-1])} gives another result for the same inputs"
    return _Difference(words, theirs[-1], mine[-1])


@dataclasses.dataclass(frozen=True)
class _Difference:
    """What differs, and the operators of both sides where it does."""

    words: str
    reference: Operation | None
    candidate: Operation | None
    is_missing: bool = False


def _with_twin(parting: _Parting, difference: _Difference) -> _Difference:
    """Find the reference's call of what seems to be an additional operator.

    A factor of 1 gives a value that both sides have, and so it is in no region.
    """
    extra = difference.candidate
    if difference.reference is not None or extra is None:
        return difference
    reads = [parting.classes[index] for index in extra.inputs]
    for operation in parting.theirs.trace.operations if None not in reads else ():
        others = [parting.known.classes[index] for index in operation.inputs]
        if reads == others and plain_name(operation) == plain_name(extra):
            words = f"the candidate calls {_describe_settings(operation, extra)}"
            return _Difference(words, operation, extra)
    return difference


def _compare_names(
    left: Sequence[Operation], right: Sequence[Operation], last: Operation
) -> _Difference | None:
    """Which operators only one side calls; None if both call the same.

    `last` is the candidate's operator that needs the result, if it calls none of these.
    """
    blocks = _unequal_blocks(*([plain_name(one) for one in side] for side in (left, right)))
    if not blocks:
        return None
    kinds = {block[0] for block in blocks}
    _, start, end, first, stop = blocks[0]
    if kinds == {"delete"}:
        words = f"the candidate leaves out {_call_names(left[start:end])}"
        needs = right[min(first, len(right) - 1)] if right else last
        return _Difference(words, left[start], needs, is_missing=True)
    if kinds == {"insert"}:
        words = f"the candidate also calls {_call_names(right[first:stop])}"
        return _Difference(words, None, right[first])
    _, start, end, first, stop = next(
        (block for block in blocks if block[0] == "replace"), blocks[0]
    )
    reference, candidate = left[min(start, len(left) - 1)], right[min(first, len(right) - 1)]
    words = (
        f"the candidate calls {_call_names(right[first:stop] or [candidate])} where the reference "
        f"calls {_call_names(left[start:end] or [reference])}"
    )
    return _Difference(words, reference, candidate)


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
    parting: _Parting, theirs: Sequence[Operation], mine: Sequence[Operation]
) -> _Difference | None:
    """What differs in the same operators: their arguments, or what they read."""
    for one, other in zip(theirs, mine, strict=True):
        if not same_settings(one, other):
            words = f"the candidate calls {_describe_settings(one, other)}"
            return _Difference(words, one, other)
    for one, other in zip(theirs, mine, strict=True):
        reads = list(_sources(one, parting.theirs.trace, parting.known.classes))
        others = list(_sources(other, parting.mine.trace, parting.classes))
        known = {number for number in others if number is not None}
        if reads != others and sorted(map(str, reads)) == sorted(map(str, others)):
            words = f"the candidate calls {_call_name(other)} with swapped inputs"
            return _Difference(words, one, other)
        if reads != others and known and not known <= set(reads):
            words = f"the candidate calls {_call_name(other)} with another input"
            return _Difference(words, one, other)
    return None


def _sources(
    operation: Operation, trace: Trace, classes: Sequence[int | None]
) -> Iterator[int | None]:
    """The classes of what an operator reads, apart from views and copies on the way."""
    for index in operation.inputs:
        source = index
        while True:
            makers = trace.values[source].makers
            maker = trace.operations[makers[-1]] if makers else None
            if maker is None or not maker.only_moves or not maker.inputs:
                break
            source = maker.inputs[0]
        yield classes[source]


def _describe_settings(reference: Operation, candidate: Operation) -> str:
    ours, mine = (dict(_named_arguments(one)) for one in (reference, candidate))
    texts = [
        f"{name}={_shown(mine.get(name))} instead of {_shown(ours.get(name))}"
        for name in dict.fromkeys((*ours, *mine))
        if not _is_tensor(ours.get(name))
        and not _is_tensor(mine.get(name))
        and ours.get(name) != mine.get(name)
    ]
    return f"{_call_name(candidate)} with {', '.join(texts) or 'other arguments'}"


def _shown(value: Any) -> str:
    return "its default" if value is None else f"{value!r:.40}"


def _is_tensor(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_is_tensor, value))
    return isinstance(value, ValueRef)


def _call_name(operation: Operation) -> str:
    if operation.function:
        return f"{operation.function}.backward"
    name = operation.name.removesuffix(".default")
    return f"{name} of the backward pass" if operation.is_backward else name


_MOST_NAMED = 3


def _call_names(operations: Sequence[Operation]) -> str:
    names = [_call_name(one) for one in operations]
    if len(names) > _MOST_NAMED:
        more = counted(len(names) - _MOST_NAMED, "other operator")
        return f"{', '.join(names[:_MOST_NAMED])} and {more}"
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


# --- Origins --------------------------------------------------------------------------------------

_MOST_LINKS = 8


def _origin_of(spot: _Spot, natives: Sequence[TracedRun]) -> Origin:
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
    if spot.reference is None:
        sites.append(_reference_before(spot.parting, named))
    module = next((one.module for one in (named, *sites) if one is not None and one.module), "")
    line = next(filter(None, map(_line_of, sites)), NOWHERE)
    function = spot.candidate.function if spot.candidate is not None else ""
    operator = function or forward.name
    native = _find_twin(named, run.trace, natives[side].trace)
    shown = (named, run.trace) if native is None else (native, natives[side].trace)
    return Origin(
        kind=OriginKind.NODE,
        name=f"{module}/{operator}" if module else operator,
        operator=operator,
        module=module,
        source=line.line,
        code=line.code,
        nodes=tuple(one.name for one in spot.regions[1]) if len(spot.regions[1]) > 1 else (),
        arguments=tuple(_argument_words(*shown)),
        chain=tuple(_chain(spot)),
    )


def _reference_before(parting: _Parting, operation: Operation) -> Operation | None:
    """The reference's operator that gives what an operator of the candidate reads."""
    reads = {parting.classes[index] for index in operation.inputs} - {None}
    trace = parting.theirs.trace
    for value in reversed(trace.values):
        if value.makers and parting.known.classes[value.index] in reads:
            return trace.operations[value.makers[-1]]
    return None


def _line_of(operation: Operation | None) -> UserLine | None:
    """The line of an operator, if it is in a file."""
    if operation is None or not operation.line.line or operation.line.line.startswith("<"):
        return None
    return operation.line


def _named_arguments(operation: Operation) -> Iterator[tuple[str, Any]]:
    schema = operation.func._schema  # noqa: SLF001
    names = [argument.name for argument in schema.arguments]
    yield from zip(names, operation.args, strict=False)
    yield from operation.kwargs.items()


def _argument_words(operation: Operation, trace: Trace) -> Iterator[str]:
    def words(value: Any) -> str:
        if isinstance(value, ValueRef):
            figures = trace.values[value.index].figures
            if figures is None:
                return "a tensor"
            return f"{dtype_name(figures.dtype)} {list(figures.shape)}"
        if isinstance(value, list | tuple):
            return f"[{', '.join(map(words, value))}]"
        return repr(value)

    for name, value in _named_arguments(operation):
        if value is not None:
            yield f"{name}: {words(value)}" if _is_tensor(value) else f"{name}={value!r:.60}"


def _chain(spot: _Spot) -> Iterator[str]:
    """What the fault passes through: modules, or operators outside of them, and the results."""
    start = spot.candidate.index if spot.candidate is not None else -1
    names: dict[str, None] = {}
    for operation in spot.parting.candidate.operations:
        if operation.index > start:
            names.setdefault(operation.module or operation.name)
    links = list(names)
    if len(links) > _MOST_LINKS:
        half = _MOST_LINKS // 2
        left_out = counted(len(links) - _MOST_LINKS, "more place")
        links = [*links[:half], f"({left_out})", *links[-half:]]
    yield from links
    yield from (one.item.text for one in spot.parting.wrong[:_MOST_LINKS])


def _find_twin(operation: Operation, trace: Trace, other: Trace) -> Operation | None:
    """The same call in another run of the same side."""

    def like(operations: Iterable[Operation]) -> list[Operation]:
        return [
            one
            for one in operations
            if one.func is operation.func
            and one.module == operation.module
            and one.is_backward is operation.is_backward
        ]

    ours, theirs = like(trace.operations), like(other.operations)
    if len(ours) != len(theirs):
        return None
    return theirs[ours.index(operation)]


# --- Exceptions -----------------------------------------------------------------------------------


def _raising_place(run: TracedRun, error: Exception) -> Place:
    """The user's line that raised, and the operator that ran."""
    line = NOWHERE
    for frame, number in traceback.walk_tb(error.__traceback__):
        code = frame.f_code
        if is_user_file(code.co_filename) and not code.co_filename.startswith("<"):
            line = format_line(code.co_filename, number, code.co_name)
    operations = run.trace.operations
    last = operations[-1] if operations and not operations[-1].is_finished else None
    if not line.line and last is None:
        reason = f"the candidate raises {in_one_line(error, 120)} outside of any file and operator"
        return Place(reason=reason, command=_BY_HAND)
    module = last.module if last is not None else ""
    operator = last.name if last is not None else ""
    name = "/".join(filter(None, (module, operator))) or line.line.partition(",")[0]
    origin = Origin(
        kind=OriginKind.NODE,
        name=name,
        operator=operator,
        module=module,
        source=line.line,
        code=line.code,
        arguments=tuple(_argument_words(last, run.trace)) if last is not None else (),
    )
    finding = Finding(
        item=Item(ItemKind.NODE, name),
        aspect=Aspect.EXCEPTION,
        status=Status.DIFFERENT,
        reason=f"starts here: the candidate raises {in_one_line(error, 160)}",
        source=line.line or None,
        origin=origin,
        raised=type(error).__name__,
    )
    return Place(findings=(finding,))
