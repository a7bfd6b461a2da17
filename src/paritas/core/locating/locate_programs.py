"""Find where an uncompiled candidate starts to compute something else than the reference.

Both sides run once more, and every operator is recorded, in float64 where that shows the failure.
The candidate's values are matched with the reference's. Where a value that the reference lacks is
computed from values that both have, the candidate runs again and continues with the reference's
value instead: the place is where that removes the difference.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
import traceback
from typing import TYPE_CHECKING

import msgspec

from paritas.core.diagnosis.calls import call_of
from paritas.core.errors import in_one_line
from paritas.core.execution.saved_state import RandomState
from paritas.core.execution.subjects import Inputs
from paritas.core.execution.time_limit import OutOfTime
from paritas.core.judging.failures import FailedPair
from paritas.core.locating.call_words import describe_arguments
from paritas.core.locating.exchanged_parts import exchanged_parts
from paritas.core.locating.locate_properties import find_property
from paritas.core.locating.partings import (
    Parting,
    Spot,
    find_twin,
    name_spot,
    origin_of,
    spot_of_cut,
    spot_without_joint,
)
from paritas.core.locating.places import Place
from paritas.core.locating.region_programs import Region, fill_arguments, judge_regions
from paritas.core.locating.trace_calls import (
    functions_of,
    operations_of,
    twin_call,
    wrong_lines,
    wrong_modules,
)
from paritas.core.locating.trace_matching import Joint, KnownValues, find_joints, plain_name
from paritas.core.locating.traced_runs import (
    SAME_IN_FLOAT64,
    Instead,
    TracedRun,
    TracedSides,
    WrongItem,
    kept_tensors,
)
from paritas.core.results.findings import (
    Aspect,
    Diagnosis,
    Finding,
    Origin,
    OriginKind,
    mismatch,
    starting_place,
)
from paritas.core.results.items import Item, ItemKind
from paritas.core.torch_private import unseen_kernels
from paritas.core.torch_private.operators import traits
from paritas.core.tracing.figures import figures_of
from paritas.core.tracing.source_lines import (
    NOWHERE,
    format_line,
    is_user_file,
)
from paritas.core.tracing.traces import OutOfTimeError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from torch import Tensor

    from paritas.core.diagnosis.calls import LiveCall
    from paritas.core.locating.places import FailedCall
    from paritas.core.tracing.traces import Operation, Trace, TracedCall

# More independent faults than this are not looked for.
_MOST_PLACES = 4
_MOST_ROUNDS = 8
# How many pairs of a wrong and a right value are tried for one place.
_MOST_TRIES = 12
# How many calls with a wrong result are tried for one place.
_MOST_CALLS = 4
# A place that computes more than this may have a smaller one inside; so many are tried.
_SMALL = 3.0
_MOST_INSIDE = 8
# Values that agree to this share of the difference of the results are equal.
_SHARE_OF_DIFFERENCE = 1e-3
# Values that are nearer than this in float64 are equal. Natively, in multiples of unit roundoff:
# how near equal values are, and by how much rounding moves them.
_NEAR_WIDE = 1e-9
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
class _Joined:
    """A pair of values that should be equal, as a run with the right one has shown.

    Attributes:
        instead: the values that the run continued with.
        left: what still differs.
    """

    joint: Joint
    instead: Instead
    left: Parting | None


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
        aspects = {finding.aspect for finding in self.call.failures} - {Aspect.VALUE}
        draw = self._find_property(aspects & {Aspect.RNG})
        drawn = [] if draw is None else [draw]
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
                if drawn:
                    spots = [spot for spot in spots if not spot.is_random]
                if spots:
                    return self._place([*drawn, *spots])
        if drawn:
            return self._place(drawn)
        spot = self._find_property(aspects)
        if spot is not None:
            return self._place([spot])
        return Place(
            reason="no operator of the candidate could be shown to be where the difference starts",
            command=_BY_HAND,
        )

    def _pairs(self) -> Iterator[tuple[TracedRun, TracedRun, float, float]]:
        """The pairs of runs that may show it, each with what is near and what is rounding."""
        call, sides = self.call, self.sides
        unit, (theirs, mine) = sides.unit, self._natives
        native = max(_NEAR_WIDE, _NEAR_NATIVE * unit), _ROUNDING_NATIVE * unit
        strict = None
        if sides.has_wide():
            call.tell("recording the operators of both sides in float64")
            runs = [sides.run(side, wide=True) for side in (call.reference, call.candidate)]
            if not any(run.seen.error or run.seen.gradient_error for run in runs):
                strict = runs[0], runs[1], _NEAR_WIDE, SAME_IN_FLOAT64
                # A kernel that torch does not see may round to the native dtype there as well.
                is_rounding = _has_unseen_kernels(mine.trace)
                yield (runs[0], runs[1], *native) if is_rounding else strict
        yield theirs, mine, *native
        if strict is not None and _has_unseen_kernels(mine.trace):
            yield strict

    def _find_property(self, aspects: set[Aspect]) -> Spot | None:
        """The place of a difference that is not in values."""
        if not aspects:
            return None
        theirs, mine = self._natives
        known = KnownValues(theirs.trace, max(_NEAR_WIDE, _NEAR_NATIVE * self.sides.unit))
        wrong = self.sides.wrong_items(theirs, mine)
        return find_property(_make_parting(theirs, mine, known, wrong), aspects)

    def _part(
        self, theirs: TracedRun, mine: TracedRun, known: KnownValues, rounding: float
    ) -> Parting | None:
        """Match two runs; None if no result differs any more."""
        wrong = _first_to_explain(self.sides.wrong_items(theirs, mine), rounding)
        if not wrong:
            return None
        return _make_parting(theirs, mine, known, wrong)

    def _find_spots(
        self, theirs: TracedRun, mine: TracedRun, known: KnownValues, rounding: float
    ) -> list[Spot]:
        """The places of independent faults, each found with the ones before it removed."""
        spots: list[Spot] = []
        instead: Instead = {}
        parting = whole = self._part(theirs, mine, known, rounding)
        for _ in range(_MOST_ROUNDS):
            if parting is None or len(spots) == _MOST_PLACES:
                break
            spot, parting = self._find_spot(parting, instead, rounding)
            if spot is None:
                break
            # A value that several operators read may have to be replaced for each of them.
            if not any(spot.is_same_as(other) for other in spots):
                spots.append(spot)
        if whole is None or len(spots) == 1:
            return spots
        exchanged = self._find_exchanged(whole, {}, rounding, alike=True)
        return [exchanged[0]] if exchanged is not None and exchanged[1] is None else spots

    def _find_spot(
        self, parting: Parting, instead: Instead, rounding: float
    ) -> tuple[Spot | None, Parting | None]:
        """One place, and what is left without it; `instead` gets the value that removes it."""
        ours, theirs = parting.candidate, parting.reference
        cut = spot_of_cut(parting, theirs)
        if cut is not None:
            return cut, None
        exchanged = self._find_exchanged(parting, instead, rounding)
        if exchanged is not None:
            return exchanged
        joints = [
            one
            for one in find_joints(ours, theirs, parting.classes, parting.known)
            if not _hides_write(parting.mine.trace, one)
        ]
        calls, found = self._find_called(parting, joints, instead, rounding)
        if found is None:
            return spot_without_joint(parting, ours, theirs), None
        instead.update(found.instead)
        spot = name_spot(parting, ours, theirs, found.joint, calls)
        # What is written through a view does not reach the value that stands for it.
        is_lost = _is_written_later(parting.mine.trace, found.joint)
        return spot, None if is_lost else found.left

    def _find_exchanged(
        self, parting: Parting, instead: Instead, rounding: float, *, alike: bool = False
    ) -> tuple[Spot, Parting | None] | None:
        """The operator whose parts the candidate reads in another order, and what is left."""
        if all(_is_of_backward(one.item) for one in parting.wrong):
            return None
        for parts in itertools.islice(exchanged_parts(parting, alike=alike), _MOST_TRIES):
            outputs = parts.reference.outputs
            kept = kept_tensors(self.sides, self.call.reference, parting.theirs, set(outputs))
            if len(kept) < len(outputs):
                continue
            values = {slot: kept[outputs[part]] for slot, part in enumerate(parts.order)}
            changed = {**instead, parts.candidate.index: values}
            run = self._continue_with(parting, parts.candidate, changed)
            left = None if run is None else self._part(parting.theirs, run, parting.known, rounding)
            if run is None or (left is not None and len(left.wrong) >= len(parting.wrong)):
                continue
            if left is not None and all(_is_of_backward(one.item) for one in left.wrong):
                left = None  # gradients still flow back to the parts that were read
            else:
                instead.update(changed)
            return parts.spot(parting), left
        return None

    def _find_called(
        self, parting: Parting, joints: Sequence[Joint], instead: Instead, rounding: float
    ) -> tuple[tuple[TracedCall, TracedCall] | None, _Joined | None]:
        """The calls that should give the same, if these are known, and the values that should."""
        called = wrong_lines(parting)
        whole = self._first_call(wrong_modules(parting), parting, instead, rounding)
        if whole is not None:
            (its, mine), found = whole
            trace = parting.theirs.trace
            operations = operations_of(trace, its, found.joint.reference)
            if len(functions_of(trace, operations)) == 1:
                return whole
            joints = [one for one in joints if one.candidate in mine and one.reference in its]
            called = (one for one in called if one[2].candidate in mine and one[2].reference in its)
        lines = self._first_call(called, parting, instead, rounding)
        if lines is not None:
            read = list(_joints_before(parting, *lines[0]))
            joined = self._first_that_joins(parting, read, instead, rounding)
            return lines if joined is None else (None, joined)
        joined = self._find_joined(parting, joints, instead, rounding)
        if joined is None:
            return whole or (None, None)
        return None, joined

    def _first_call(
        self,
        calls: Iterator[tuple[TracedCall, TracedCall, Joint]],
        parting: Parting,
        instead: Instead,
        rounding: float,
    ) -> tuple[tuple[TracedCall, TracedCall], _Joined] | None:
        """The first of some calls whose right result removes a difference."""
        for its, mine, joint in itertools.islice(calls, _MOST_CALLS):
            found = self._first_that_joins(parting, [joint], instead, rounding)
            if found is not None:
                return (its, mine), found
        return None

    def _find_joined(
        self, parting: Parting, joints: Sequence[Joint], instead: Instead, rounding: float
    ) -> _Joined | None:
        """The likeliest of some pairs of values, or one inside of what it computes."""
        ours, theirs = parting.candidate, parting.reference
        found = self._first_that_joins(parting, joints[:_MOST_TRIES], instead, rounding)
        if found is None or found.joint.size <= _SMALL:
            return found
        joint = found.joint
        # Its last value equals no earlier one of the reference as well: it may stand for several
        # operators, as that of a fused kernel does.
        inside = [
            one
            for one in joints
            if one.size < joint.size
            and _have_one_shape(parting, one)
            and one.candidate is not joint.candidate
            and one.candidate.index in ours.before[joint.candidate.index]
            and one.reference.index in theirs.before[joint.reference.index]
        ]
        inside.sort(key=lambda one: one.size)
        for one in inside[:_MOST_INSIDE]:
            nearer = self._first_that_joins(parting, [one], instead, rounding)
            # Of the values that could be one of the reference, none removes less than the last.
            is_alike = one.reference is joint.reference or one.candidate.function
            is_less = found.left is None and is_alike
            if nearer is not None and not (is_less and nearer.left is not None):
                return nearer
        return found

    def _first_that_joins(
        self, parting: Parting, joints: Sequence[Joint], instead: Instead, rounding: float
    ) -> _Joined | None:
        """The first pair of values for which the difference vanishes, or moves on."""
        for joint in joints:
            self.call.tell(f"continuing after {joint.candidate.name} with the reference's value")
            values = self._values_at(parting, joint)
            if not values:
                continue
            slots = {**instead.get(joint.candidate.index, {}), **values}
            changed = {**instead, joint.candidate.index: slots}
            run = self._continue_with(parting, joint.candidate, changed)
            if run is None:
                continue
            left = self._part(parting.theirs, run, parting.known, rounding)
            if left is not None and not _results_change(parting, left, rounding):
                continue  # it is different, but it does not matter
            fewer = left is not None and len(left.wrong) < len(parting.wrong)
            if left is None or fewer or _has_moved_on(parting, left, joint):
                return _Joined(joint, changed, left)
        return None

    def _continue_with(
        self, parting: Parting, operation: Operation, instead: Instead
    ) -> TracedRun | None:
        """A run of the candidate with other values from an operator on; None if it raises."""
        run = self.sides.run(
            self.call.candidate,
            wide=parting.mine.wide,
            instead=instead,
            like=(parting.mine.trace, operation.index),
        )
        return None if run.seen.error or run.seen.gradient_error else run

    def _values_at(self, parting: Parting, joint: Joint) -> dict[int, Tensor]:
        """The reference's values for the results of an operator."""
        one, other = joint.candidate, joint.reference
        wanted = {joint.slots[0]: other.outputs[joint.slots[1]]}
        if plain_name(one) == plain_name(other) and len(one.outputs) == len(other.outputs):
            wanted |= {
                slot: other.outputs[slot]
                for slot, index in enumerate(one.outputs)
                if parting.classes[index] is None
            }
        kept = kept_tensors(self.sides, self.call.reference, parting.theirs, set(wanted.values()))
        return {slot: kept[index] for slot, index in wanted.items() if index in kept}

    # --- From places to findings ------------------------------------------------------------------

    def _place(self, spots: list[Spot]) -> Place:
        findings = []
        first_pair: FailedPair | None = None
        for spot in spots:
            finding, pair = self._describe(spot)
            findings.append(finding)
            first_pair = first_pair if findings[1:] else pair
        return Place(findings=tuple(findings), pair=first_pair)

    def _describe(self, spot: Spot) -> tuple[Finding, FailedPair | None]:
        about = next(
            (one for one in self.call.failures if one.aspect is Aspect.VALUE),
            self.call.failures[0],
        )
        origin = origin_of(spot, self._natives)
        item = Item(ItemKind.NODE, origin.name)
        judged: Finding | None = None
        pair, obstacle = None, ""
        if spot.joint is not None and time.monotonic() < self.call.deadline:
            self.call.tell(f"judging {origin.operator or origin.name} alone")
            try:
                judged, pair = self._judge(spot, item)
            except OutOfTime:
                obstacle = "; the time was over before it was judged alone"
            except Exception as error:  # noqa: BLE001  (the place stands; its reason reports it)
                obstacle = f"; it cannot be judged alone: {in_one_line(error, 160)}"
        reason = f"starts here: {spot.words}{obstacle}"
        if spot.leaf is not None:
            reason = f"{reason}: {self._name_of_leaf(spot)}"
        if judged is None:
            finding = starting_place(item, about, reason, about.aspect)
        else:
            reason = f"{reason}; {judged.reason}" if judged.reason else reason
            finding = msgspec.structs.replace(judged, reason=reason)
        finding = _with_kind_of_calls(spot, finding)
        return (
            msgspec.structs.replace(finding, source=origin.source or None, origin=origin),
            pair,
        )

    def _name_of_leaf(self, spot: Spot) -> str:
        """A value from outside that the reference lacks: a parameter, a buffer, a constant."""
        figures = spot.parting.mine.trace.values[spot.leaf or 0].figures
        for name, tensor in self.call.candidate.state.tensors.items():
            own = figures_of(tensor) if figures and tensor.shape == figures.shape else None
            if own is not None and figures is not None and own.distance(figures) <= 0:
                return f"{name} is not the reference's"
        return "the reference has no such constant"

    def _judge(self, spot: Spot, item: Item) -> tuple[Finding | None, FailedPair | None]:
        """Judge the operators alone on the reference's inputs, natively if they are known there."""
        tried = ((native, self._regions(spot, native=native)) for native in (True, False))
        native, regions = next((one for one in tried if one[1] is not None), (False, None))
        if regions is None:
            return None, None
        reference, candidate, tensors = regions
        # Functions, as a user's: an object that can be called may be of another runtime.
        functions = reference.__call__, candidate.__call__
        pair = FailedPair(*functions, [Inputs(tuple(tensors))])
        call = self._live_call(spot, native=native)
        seed = self.call.config.seed
        findings = judge_regions(
            item, reference, candidate, tensors, seed, call, is_known=spot.seen is not None
        )
        bad = [finding for finding in findings if not finding.status.passes()]
        if not bad:
            return None, pair
        return max(bad, key=lambda finding: finding.status.gravity), pair

    def _regions(self, spot: Spot, *, native: bool) -> tuple[Region, Region, list[Tensor]] | None:
        """The operators of both sides as functions of the same arguments.

        Also those of the reference that compute some of the arguments from others.
        """
        joint, parting = spot.joint, spot.parting
        if joint is None:
            return None
        tensors: list[Tensor] = []
        places: dict[int, int] = {}
        made: list[Region] = []
        computed: dict[int | None, int] = {}
        sides: list[tuple[TracedRun, Operation, int, Sequence[int | None]]] = [
            (parting.theirs, joint.reference, joint.slots[1], parting.known.classes),
            (parting.mine, joint.candidate, joint.slots[0], parting.classes),
        ]
        for side, (run, end, slot, classes) in enumerate(sides):
            operations = _with_memory(run.trace, spot.regions[side])
            twins = {one.index: one for one in operations}
            if native:
                twins = self._twins(operations, run, side)
            if len(twins) < len(operations):
                return None
            border = _border(operations, twins, classes)
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
            strides = {index: kept[index].stride() for index in given}
            made.append(Region(list(twins.values()), result, given, fixed, strides=strides))
            if side == 0:
                computed = _computed_values(operations, twins, classes)
        shared = {
            index: places[number]
            for number, index in computed.items()
            if number in places and places[number] not in made[0].given.values()
        }
        before = self._region_before(parting, places, native=native)
        return dataclasses.replace(made[0], shared=shared, before=before), made[1], tensors

    def _region_before(
        self, parting: Parting, places: Mapping[int, int], *, native: bool
    ) -> Region | None:
        """What the reference computes of these values from others of them; None if nothing.

        Args:
            places: of the arguments, by the values' numbers.
        """
        run, classes = parting.theirs, parting.known.classes
        operations = _operations_between(
            run.trace, {index for index, number in enumerate(classes) if number in places}
        )
        own = self._natives[0] if native else run
        twins = (
            self._twins(operations, run, 0) if native else {one.index: one for one in operations}
        )
        if not operations or len(twins) < len(operations):
            return None
        border = _border(operations, twins, classes)
        computed = _computed_values(operations, twins, classes)
        kept = kept_tensors(self.sides, self.call.reference, own, border)
        if len(kept) < len(border):
            return None
        given = {
            index: places[number]
            for index, number in border.items()
            if number is not None and number in places and number not in computed
        }
        return Region(
            list(twins.values()),
            result=-1,
            given=given,
            fixed={index: kept[index] for index in border if index not in given},
            strides={index: kept[index].stride() for index in given},
            shared={
                index: places[number]
                for number, index in computed.items()
                if number is not None and number in places
            },
        )

    def _live_call(self, spot: Spot, *, native: bool) -> LiveCall | None:
        """The reference's call of a function at a place, with its arguments."""
        call, trace = spot.call, spot.parting.theirs.trace
        if call is None:
            return None
        run = self._natives[0] if native else spot.parting.theirs
        twin = twin_call(call, trace, run.trace)
        if twin is None:
            return None
        kept = kept_tensors(self.sides, self.call.reference, run, set(twin.inputs))
        if len(kept) < len(set(twin.inputs)):
            return None
        return call_of(twin.target, *fill_arguments(twin, kept))

    def _twins(
        self, operations: Sequence[Operation], run: TracedRun, side: int
    ) -> dict[int, Operation]:
        """The same calls in the native run, as far as they are found there."""
        native = self._natives[side]
        if native is run:
            return {one.index: one for one in operations}
        twins = ((one.index, find_twin(one, run.trace, native.trace)) for one in operations)
        return {index: twin for index, twin in twins if twin is not None}


def _with_kind_of_calls(spot: Spot, finding: Finding) -> Finding:
    """The finding with the kind that the calls show, if no experiment found one.

    Experiments do not know which calls the candidate made to no effect.
    """
    kind, known = spot.seen or spot.guess, finding.diagnosis or Diagnosis()
    if spot.has_no_kind:
        return msgspec.structs.replace(
            finding, diagnosis=msgspec.structs.replace(known, patterns=())
        )
    if kind is None or known.patterns:
        return finding
    return msgspec.structs.replace(
        finding, diagnosis=msgspec.structs.replace(known, patterns=(kind,))
    )


def _have_one_shape(parting: Parting, joint: Joint) -> bool:
    """Whether both values have the same shape, as far as it is known."""
    ends = (parting.mine.trace, joint.candidate), (parting.theirs.trace, joint.reference)
    mine, its = (
        trace.values[one.outputs[slot]].figures
        for (trace, one), slot in zip(ends, joint.slots, strict=True)
    )
    return mine is None or its is None or mine.shape == its.shape


def _has_unseen_kernels(trace: Trace) -> bool:
    """Whether kernels ran that torch does not see."""
    return any(traits(one.func).namespace == unseen_kernels.NAMESPACE for one in trace.operations)


def _joints_before(parting: Parting, its: TracedCall, mine: TracedCall) -> Iterator[Joint]:
    """The integers that the operators of two calls read in the same place and that should be equal.

    A call counts as the first wrong one even if it reads other integers, such as an index or a
    mask: these may be made in another way. They are at fault if the right ones make it right.
    """
    theirs, ours = parting.theirs.trace, parting.mine.trace
    calls = theirs.operations[its.start : its.stop], ours.operations[mine.start : mine.stop]
    for right, wrong in zip(*calls, strict=False):
        if plain_name(right) != plain_name(wrong):
            return
        for value, other in zip(theirs.inputs_of(right), ours.inputs_of(wrong), strict=False):
            if parting.classes[other.index] is not None or not value.makers or not other.makers:
                continue
            left, figures = value.figures, other.figures
            if left is None or figures is None or left.shape != figures.shape:
                continue
            if left.is_exact and figures.is_exact:
                one, two = ours.operations[other.makers[-1]], theirs.operations[value.makers[-1]]
                slots = one.outputs.index(other.index), two.outputs.index(value.index)
                yield Joint(one, two, slots, 2.0, 0.0)


def _hides_write(trace: Trace, joint: Joint) -> bool:
    """Whether a write would go to the value that stands for a view, and so be undone.

    The same view of both sides may be the place: of other elements, say.
    """
    is_same = plain_name(joint.candidate) == plain_name(joint.reference)
    return not is_same and _is_written_later(trace, joint)


def _is_written_later(trace: Trace, joint: Joint) -> bool:
    """Whether the result of a view is written to after it was made."""
    if not traits(joint.candidate.func).view:
        return False
    views = {joint.candidate.outputs[joint.slots[0]]}
    for operation in trace.operations[joint.candidate.index + 1 :]:
        if views.isdisjoint(operation.inputs):
            continue
        kind = traits(operation.func)
        if kind.mutates:
            return True
        if kind.view:
            views.update(operation.outputs)
    return False


def _make_parting(
    theirs: TracedRun, mine: TracedRun, known: KnownValues, wrong: list[WrongItem]
) -> Parting:
    """Match two runs, and find some of their results in them."""
    ends: tuple[list[int], list[int]] = ([], [])
    for one in wrong:
        pairs = (one.reference, theirs.trace), (one.candidate, mine.trace)
        for (figures, trace), indices in zip(pairs, ends, strict=True):
            value = None if figures is None else trace.last_like(figures, known.tolerance)
            if value is not None:
                indices.append(value.index)
    return Parting(theirs, mine, known, known.match(mine.trace), wrong, ends)


def _with_memory(trace: Trace, operations: Sequence[Operation]) -> list[Operation]:
    """Some operators, with those that make the memory that they write to."""
    whole = {one.index: one for one in operations}
    inner = {index for one in operations for index in one.outputs}
    for one in operations:
        for index in one.inputs:
            value = trace.values[index]
            if index not in inner and value.figures is None and len(value.makers) == 1:
                whole[value.makers[0]] = trace.operations[value.makers[0]]
    return [whole[index] for index in sorted(whole)]


# More operators than these take too long to run again for each set of operands.
_MOST_BETWEEN = 16


def _operations_between(trace: Trace, values: set[int]) -> list[Operation]:
    """The operators that compute some of these values from others of them.

    Empty if there are none, if they are many, or if they would not give the same again.
    """
    chosen: dict[int, Operation] = {}
    for value in sorted(values):
        behind: dict[int, Operation] = {}
        todo = [value]
        while todo and len(behind) < _MOST_BETWEEN:
            for maker in trace.values[todo.pop(0)].makers:
                operation = trace.operations[maker]
                if maker not in behind:
                    behind[maker] = operation
                    todo += [index for index in operation.inputs if index not in values]
        follows = values - {value}
        if _is_free(trace, value, behind.values(), follows):
            continue
        for index, operation in sorted(behind.items()):
            if not follows.isdisjoint(operation.inputs):
                follows.update(operation.outputs)
                chosen[index] = operation
    kinds = [traits(operation.func) for operation in chosen.values()]
    if len(chosen) > _MOST_BETWEEN or any(kind.mutates or kind.random for kind in kinds):
        return []
    return [operation for _, operation in sorted(chosen.items())]


def _is_free(trace: Trace, value: int, behind: Collection[Operation], others: set[int]) -> bool:
    """Whether a value may be anything, whatever some others are: as much goes into it besides."""
    made = {index for one in behind for index in one.outputs}
    besides = {index for one in behind for index in one.inputs} - made - others
    own = trace.values[value].figures
    sizes = (trace.values[index].figures for index in besides)
    return own is not None and any(
        one is not None and math.prod(one.shape) >= math.prod(own.shape) for one in sizes
    )


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


def _computed_values(
    operations: Sequence[Operation], twins: Mapping[int, Operation], classes: Sequence[int | None]
) -> dict[int | None, int]:
    """The values that some operators compute in another run, by their classes."""
    return {
        classes[index]: other
        for one in operations
        for index, other in zip(one.outputs, twins[one.index].outputs, strict=False)
    }


def _first_to_explain(wrong: list[WrongItem], rounding: float) -> list[WrongItem]:
    """The results that differ; gradients only if nothing before them does."""
    wrong = [one for one in wrong if one.distance > rounding]
    forward = [one for one in wrong if not _is_of_backward(one.item)]
    return forward or wrong


def _is_of_backward(item: Item) -> bool:
    return item.kind.is_gradient or item.kind.is_after_backward


def _results_change(before: Parting, after: Parting, rounding: float) -> bool:
    """Whether the wrong results are now other ones."""
    earlier = {one.item: one.candidate for one in before.wrong}
    return any(
        WrongItem(one.item, earlier.get(one.item), one.candidate).distance > rounding
        for one in after.wrong
    ) or len(before.wrong) != len(after.wrong)


def _has_moved_on(before: Parting, after: Parting, joint: Joint) -> bool:
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
        arguments=tuple(describe_arguments(last, run.trace)) if last is not None else (),
    )
    finding = mismatch(
        Item(ItemKind.NODE, name),
        Aspect.EXCEPTION,
        f"starts here: the candidate raises {in_one_line(error, 160)}",
        source=line.line or None,
        origin=origin,
        raised=type(error).__name__,
    )
    return Place(findings=(finding,))
