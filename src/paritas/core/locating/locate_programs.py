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
import traceback
from typing import TYPE_CHECKING

import msgspec

from paritas.core.diagnosis.calls import call_of
from paritas.core.errors import in_one_line
from paritas.core.execution.saved_state import RandomState
from paritas.core.execution.subjects import Inputs
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
from paritas.core.locating.trace_matching import (
    Joint,
    KnownValues,
    find_joints,
    in_order,
    plain_name,
)
from paritas.core.locating.traced_runs import (
    SAME_IN_FLOAT64,
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
from paritas.core.time_limit import OutOfTime
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
        left: what still differs in that run.
    """

    joint: Joint
    left: Parting | None


class _Search:
    def __init__(self, call: FailedCall) -> None:
        self.call = call
        self.sides = TracedSides(call)
        self._natives: list[TracedRun] = []

    def locate(self) -> Place:
        """The first places, or why there are none."""
        self.call.tell("recording the operators of both sides")
        candidate_run = self.sides.run(self.call.candidate)
        error = candidate_run.seen.error or candidate_run.seen.gradient_error
        if error is not None:
            return _raising_place(candidate_run, error)
        reference_run = self.sides.run(self.call.reference)
        error = reference_run.seen.error or reference_run.seen.gradient_error
        if error is not None:
            reason = f"the reference raises {in_one_line(error, 120)}, so there is nothing to match"
            return Place(reason=reason, command=_BY_HAND)
        self._natives = [reference_run, candidate_run]
        aspects = {finding.aspect for finding in self.call.failures} - {Aspect.VALUE}
        draw = self._find_property(aspects & {Aspect.RNG})
        drawn = [] if draw is None else [draw]
        for reference_run, candidate_run, near, rounding in self._pairs():
            wrong = self.sides.wrong_items(reference_run, candidate_run)
            wrong = _first_to_explain(wrong, rounding)
            if not wrong:
                continue
            largest = max((wrong_item.distance for wrong_item in wrong), default=0.0)
            tolerance = max(rounding, min(near, _SHARE_OF_DIFFERENCE * largest))
            for ordered in (True, False):
                known_values = KnownValues(reference_run.trace, tolerance, ordered=ordered)
                spots = self._find_spots(
                    self._part(reference_run, candidate_run, known_values, rounding)
                )
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
        unit, (reference_run, candidate_run) = sides.unit, self._natives
        native = max(_NEAR_WIDE, _NEAR_NATIVE * unit), _ROUNDING_NATIVE * unit
        strict = None
        if sides.has_wide():
            call.tell("recording the operators of both sides in float64")
            runs = [sides.run(side, wide=True) for side in (call.reference, call.candidate)]
            if not any(run.seen.error or run.seen.gradient_error for run in runs):
                strict = runs[0], runs[1], _NEAR_WIDE, SAME_IN_FLOAT64
                # A kernel that torch does not see may round to the native dtype there as well.
                is_rounding = _has_unseen_kernels(candidate_run.trace)
                yield (runs[0], runs[1], *native) if is_rounding else strict
        yield reference_run, candidate_run, *native
        if strict is not None and _has_unseen_kernels(candidate_run.trace):
            yield strict

    def _find_property(self, aspects: set[Aspect]) -> Spot | None:
        """The place of a difference that is not in values."""
        if not aspects:
            return None
        reference_run, candidate_run = self._natives
        known_values = KnownValues(
            reference_run.trace, max(_NEAR_WIDE, _NEAR_NATIVE * self.sides.unit)
        )
        wrong = self.sides.wrong_items(reference_run, candidate_run)
        parting = _make_parting(reference_run, candidate_run, known_values, wrong)
        return find_property(parting, aspects)

    def _part(
        self,
        reference_run: TracedRun,
        candidate_run: TracedRun,
        known_values: KnownValues,
        rounding: float,
    ) -> Parting | None:
        """Match two runs; None if no result differs any more."""
        wrong = _first_to_explain(self.sides.wrong_items(reference_run, candidate_run), rounding)
        if not wrong:
            return None
        return _make_parting(reference_run, candidate_run, known_values, wrong, rounding)

    def _part_again(self, parting: Parting, candidate_run: TracedRun) -> Parting | None:
        """Match another run of the candidate with the same run of the reference."""
        return self._part(parting.theirs, candidate_run, parting.known, parting.rounding)

    def _find_spots(self, first_parting: Parting | None) -> list[Spot]:
        """The places of independent faults, each found with the ones before it removed."""
        spots: list[Spot] = []
        parting = first_parting
        for _ in range(_MOST_ROUNDS):
            if parting is None or len(spots) == _MOST_PLACES:
                break
            spot, parting = self._find_spot(parting)
            if spot is None:
                break
            # A value that several operators read may have to be replaced for each of them.
            if not any(spot.is_same_as(other) for other in spots):
                spots.append(spot)
        if first_parting is None or len(spots) == 1:
            return spots
        exchanged = self._find_exchanged(first_parting, alike=True)
        return [exchanged[0]] if exchanged is not None and exchanged[1] is None else spots

    def _find_spot(self, parting: Parting) -> tuple[Spot | None, Parting | None]:
        """One place, and what is left without it."""
        ours, reference_part = parting.candidate, parting.reference
        cut = spot_of_cut(parting, reference_part)
        if cut is not None:
            return cut, None
        exchanged = self._find_exchanged(parting)
        if exchanged is not None:
            return exchanged
        joints = [
            joint
            for joint in find_joints(ours, reference_part, parting.classes, parting.known)
            if not _hides_write(parting.mine.trace, joint)
        ]
        calls, joined = self._find_called(parting, joints)
        if joined is None:
            return spot_without_joint(parting, ours, reference_part), None
        spot = name_spot(parting, ours, reference_part, joined.joint, calls)
        # What is written through a view does not reach the value that stands for it.
        is_lost = _is_written_later(parting.mine.trace, joined.joint)
        return spot, None if is_lost else joined.left

    def _find_exchanged(
        self, parting: Parting, *, alike: bool = False
    ) -> tuple[Spot, Parting | None] | None:
        """The operator whose parts the candidate reads in another order, and what is left."""
        if _are_of_backward(parting):
            return None
        for parts in itertools.islice(exchanged_parts(parting, alike=alike), _MOST_TRIES):
            outputs = parts.reference.outputs
            reference_tensors = kept_tensors(
                self.sides, self.call.reference, parting.theirs, set(outputs)
            )
            if len(reference_tensors) < len(outputs):
                continue
            values = {
                slot: reference_tensors[outputs[part]] for slot, part in enumerate(parts.order)
            }
            run = self._continue_with(parting, parts.candidate, values)
            if run is None:
                continue
            left = self._part_again(parting, run)
            if left is None or len(left.wrong) < len(parting.wrong):
                # Gradients still flow back to the parts that were read.
                is_done = left is None or _are_of_backward(left)
                return parts.spot(parting), None if is_done else left
        return None

    def _find_called(
        self, parting: Parting, joints: Sequence[Joint]
    ) -> tuple[tuple[TracedCall, TracedCall] | None, _Joined | None]:
        """The calls that should give the same, if these are known, and the values that should."""
        called = wrong_lines(parting)
        joined_module = self._first_call(wrong_modules(parting), parting)
        if joined_module is not None:
            (its, candidate_call), joined_in_module = joined_module
            trace = parting.theirs.trace
            operations = operations_of(trace, its, joined_in_module.joint.reference)
            if len(functions_of(trace, operations)) == 1:
                return joined_module

            def is_inside(joint: Joint) -> bool:
                return joint.candidate in candidate_call and joint.reference in its

            joints = list(filter(is_inside, joints))
            called = (wrong_line for wrong_line in called if is_inside(wrong_line[2]))
        lines = self._first_call(called, parting)
        if lines is not None:
            read = list(_joints_before(parting, *lines[0]))
            joined = self._first_that_joins(parting, read)
            return lines if joined is None else (None, joined)
        joined = self._find_joined(parting, joints)
        if joined is None:
            return joined_module or (None, None)
        return None, joined

    def _first_call(
        self, calls: Iterator[tuple[TracedCall, TracedCall, Joint]], parting: Parting
    ) -> tuple[tuple[TracedCall, TracedCall], _Joined] | None:
        """The first of some calls whose right result removes a difference."""
        for its, candidate_call, joint in itertools.islice(calls, _MOST_CALLS):
            joined = self._first_that_joins(parting, [joint])
            if joined is not None:
                return (its, candidate_call), joined
        return None

    def _find_joined(self, parting: Parting, joints: Sequence[Joint]) -> _Joined | None:
        """The likeliest of some pairs of values, or one inside of what it computes."""
        ours, reference_part = parting.candidate, parting.reference
        joined = self._first_that_joins(parting, joints[:_MOST_TRIES])
        if joined is None or joined.joint.size <= _SMALL:
            return joined
        joint = joined.joint
        # Its last value equals no earlier one of the reference as well: it may stand for several
        # operators, as that of a fused kernel does.
        inside = [
            smaller_joint
            for smaller_joint in joints
            if smaller_joint.size < joint.size
            and _have_one_shape(parting, smaller_joint)
            and smaller_joint.candidate is not joint.candidate
            and smaller_joint.candidate.index in ours.before[joint.candidate.index]
            and smaller_joint.reference.index in reference_part.before[joint.reference.index]
        ]
        inside.sort(key=lambda smaller_joint: smaller_joint.size)
        for inner_joint in inside[:_MOST_INSIDE]:
            nearer = self._first_that_joins(parting, [inner_joint])
            # Of the values that could be one of the reference, none removes less than the last.
            is_alike = inner_joint.reference is joint.reference or inner_joint.candidate.function
            is_less = joined.left is None and is_alike
            if nearer is not None and not (is_less and nearer.left is not None):
                return nearer
        return joined

    def _first_that_joins(self, parting: Parting, joints: Sequence[Joint]) -> _Joined | None:
        """The first pair of values for which the difference vanishes, or moves on."""
        for joint in joints:
            self.call.tell(f"continuing after {joint.candidate.name} with the reference's value")
            values = self._values_at(parting, joint)
            run = self._continue_with(parting, joint.candidate, values) if values else None
            if run is None:
                continue
            left = self._part_again(parting, run)
            if left is not None and not _results_change(parting, left):
                continue  # it is different, but it does not matter
            is_less = left is None or len(left.wrong) < len(parting.wrong)
            if left is None or is_less or _has_moved_on(parting, left, joint):
                return _Joined(joint, left)
        return None

    def _continue_with(
        self, parting: Parting, operation: Operation, values: Mapping[int, Tensor]
    ) -> TracedRun | None:
        """A run of the candidate with other results of an operator; None if it raises."""
        earlier = parting.mine.instead
        changed = {**earlier.get(operation.index, {}), **values}
        run = self.sides.run(
            self.call.candidate,
            wide=parting.mine.wide,
            instead={**earlier, operation.index: changed},
            like=(parting.mine.trace, operation.index),
        )
        return None if run.seen.error or run.seen.gradient_error else run

    def _values_at(self, parting: Parting, joint: Joint) -> dict[int, Tensor]:
        """The reference's values for the results of an operator."""
        candidate_operation, other = joint.candidate, joint.reference
        index_by_slot = {joint.slots[0]: other.outputs[joint.slots[1]]}
        if plain_name(candidate_operation) == plain_name(other) and len(
            candidate_operation.outputs
        ) == len(other.outputs):
            index_by_slot |= {
                slot: other.outputs[slot]
                for slot, index in enumerate(candidate_operation.outputs)
                if parting.classes[index] is None
            }
        reference_tensors = kept_tensors(
            self.sides, self.call.reference, parting.theirs, set(index_by_slot.values())
        )
        return {
            slot: reference_tensors[index]
            for slot, index in index_by_slot.items()
            if index in reference_tensors
        }

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
            (failure for failure in self.call.failures if failure.aspect is Aspect.VALUE),
            self.call.failures[0],
        )
        origin = origin_of(spot, self._natives)
        item = Item(ItemKind.NODE, origin.name)
        judged: Finding | None = None
        pair, obstacle = None, ""
        if spot.joint is not None and not self.call.limit.is_over:
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
            tensor_figures = (
                figures_of(tensor) if figures and tensor.shape == figures.shape else None
            )
            if (
                tensor_figures is not None
                and figures is not None
                and tensor_figures.distance(figures) <= 0
            ):
                return f"{name} is not the reference's"
        return "the reference has no such constant"

    def _judge(self, spot: Spot, item: Item) -> tuple[Finding | None, FailedPair | None]:
        """Judge the operators alone on the reference's inputs, natively if they are known there."""
        tried = ((native, self._regions(spot, native=native)) for native in (True, False))
        native, regions = next(
            (attempt for attempt in tried if attempt[1] is not None), (False, None)
        )
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
        cuts: list[_RegionCut] = []
        arguments: dict[int, Tensor] = {}
        for side, run in enumerate((parting.theirs, parting.mine)):
            operations = _with_memory(run.trace, spot.regions[side])
            cut = self._cut_region(parting, side, operations, native=native)
            if cut is None:
                return None
            cuts.append(cut)
            for index, number in cut.border.items():
                if number is not None:
                    arguments.setdefault(number, cut.tensors[index])
        places = {number: place for place, number in enumerate(arguments)}
        right, wrong = cuts
        candidate = wrong.region(joint.candidate, joint.slots[0], places)
        reference = right.region(joint.reference, joint.slots[1], places)
        taken = reference.given.values()
        shared = {
            index: place
            for index, place in right.shared_values(places).items()
            if place not in taken
        }
        before = self._region_before(parting, places, native=native)
        reference = dataclasses.replace(reference, shared=shared, before=before)
        return reference, candidate, list(arguments.values())

    def _region_before(
        self, parting: Parting, places: Mapping[int, int], *, native: bool
    ) -> Region | None:
        """What the reference computes of these values from others of them; None if nothing.

        Args:
            places: of the arguments, by the values' numbers.
        """
        classes = enumerate(parting.known.classes)
        operations = _operations_between(
            parting.theirs.trace, {index for index, number in classes if number in places}
        )
        cut = self._cut_region(parting, 0, operations, native=native) if operations else None
        if cut is None:
            return None
        free = {number: place for number, place in places.items() if number not in cut.computed}
        region = cut.region(None, 0, free)
        return dataclasses.replace(region, shared=cut.shared_values(places))

    def _cut_region(
        self, parting: Parting, side: int, operations: Sequence[Operation], *, native: bool
    ) -> _RegionCut | None:
        """Some operators of a side with what they read; None if not all of it is known."""
        run = (parting.theirs, parting.mine)[side]
        classes = (parting.known.classes, parting.classes)[side]
        source = self._natives[side] if native else run
        twins = {
            operation.index: twin
            for operation in operations
            if (twin := _twin_in(source, operation, run)) is not None
        }
        if len(twins) < len(operations):
            return None
        border = _border(operations, twins, classes)
        subject = (self.call.reference, self.call.candidate)[side]
        tensors = kept_tensors(self.sides, subject, source, border)
        if len(tensors) < len(border):
            return None
        return _RegionCut(twins, border, tensors, _computed_values(operations, twins, classes))

    def _live_call(self, spot: Spot, *, native: bool) -> LiveCall | None:
        """The reference's call of a function at a place, with its arguments."""
        call, trace = spot.call, spot.parting.theirs.trace
        if call is None:
            return None
        run = self._natives[0] if native else spot.parting.theirs
        twin = twin_call(call, trace, run.trace)
        if twin is None:
            return None
        input_tensors = kept_tensors(self.sides, self.call.reference, run, set(twin.inputs))
        if len(input_tensors) < len(set(twin.inputs)):
            return None
        return call_of(twin.target, *fill_arguments(twin, input_tensors))


@dataclasses.dataclass(frozen=True)
class _RegionCut:
    """Some operators of a run, with the values at their border.

    Attributes:
        twins: the operators, by their numbers in the run in which the two sides were matched.
        border: the values that they read from outside, with their classes.
        tensors: these values.
        computed: the values that they compute, by their classes.
    """

    twins: Mapping[int, Operation]
    border: Mapping[int, int | None]
    tensors: Mapping[int, Tensor]
    computed: Mapping[int | None, int]

    def region(self, end: Operation | None, slot: int, places: Mapping[int, int]) -> Region:
        """The operators as a function of the values that have a place among its arguments."""
        given = {
            index: places[number]
            for index, number in self.border.items()
            if number is not None and number in places
        }
        return Region(
            list(self.twins.values()),
            -1 if end is None else self.twins[end.index].outputs[slot],
            given,
            {index: self.tensors[index] for index in self.border if index not in given},
            {index: self.tensors[index].stride() for index in given},
        )

    def shared_values(self, places: Mapping[int, int]) -> dict[int, int]:
        """The values that they compute and that have a place among the arguments."""
        return {
            index: places[number]
            for number, index in self.computed.items()
            if number is not None and number in places
        }


def _twin_in(source: TracedRun, operation: Operation, run: TracedRun) -> Operation | None:
    """The same call in another run of the same side, if it is found there."""
    return operation if source is run else find_twin(operation, run.trace, source.trace)


def _with_kind_of_calls(spot: Spot, finding: Finding) -> Finding:
    """The finding with the kind that the calls show, if no experiment found one.

    Experiments do not know which calls the candidate made to no effect.
    """
    kind, diagnosis = spot.seen or spot.guess, finding.diagnosis or Diagnosis()
    if spot.has_no_kind:
        return msgspec.structs.replace(
            finding, diagnosis=msgspec.structs.replace(diagnosis, patterns=())
        )
    if kind is None or diagnosis.patterns:
        return finding
    return msgspec.structs.replace(
        finding, diagnosis=msgspec.structs.replace(diagnosis, patterns=(kind,))
    )


def _have_one_shape(parting: Parting, joint: Joint) -> bool:
    """Whether both values have the same shape, as far as it is known."""
    ends = (parting.mine.trace, joint.candidate), (parting.theirs.trace, joint.reference)
    candidate_figures, its = (
        trace.values[operation.outputs[slot]].figures
        for (trace, operation), slot in zip(ends, joint.slots, strict=True)
    )
    return candidate_figures is None or its is None or candidate_figures.shape == its.shape


def _has_unseen_kernels(trace: Trace) -> bool:
    """Whether kernels ran that torch does not see."""
    return any(
        traits(operation.func).namespace == unseen_kernels.NAMESPACE
        for operation in trace.operations
    )


def _joints_before(parting: Parting, its: TracedCall, traced_call: TracedCall) -> Iterator[Joint]:
    """The integers that the operators of two calls read in the same place and that should be equal.

    A call counts as the first wrong one even if it reads other integers, such as an index or a
    mask: these may be made in another way. They are at fault if the right ones make it right.
    """
    reference_trace, ours = parting.theirs.trace, parting.mine.trace
    calls = (
        reference_trace.operations[its.start : its.stop],
        ours.operations[traced_call.start : traced_call.stop],
    )
    for right, wrong in zip(*calls, strict=False):
        if plain_name(right) != plain_name(wrong):
            return
        for value, other in zip(
            reference_trace.inputs_of(right), ours.inputs_of(wrong), strict=False
        ):
            if parting.classes[other.index] is not None:
                continue
            left, figures = value.figures, other.figures
            if left is None or figures is None or left.shape != figures.shape:
                continue
            right_maker = reference_trace.maker_of(value.index)
            wrong_maker = ours.maker_of(other.index)
            if right_maker and wrong_maker and left.is_exact and figures.is_exact:
                yield Joint.of(wrong_maker, other.index, right_maker, value.index, size=2.0)


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
    reference_run: TracedRun,
    candidate_run: TracedRun,
    known_values: KnownValues,
    wrong: list[WrongItem],
    rounding: float = 0.0,
) -> Parting:
    """Match two runs, and find some of their results in them."""
    ends: tuple[list[int], list[int]] = ([], [])
    for wrong_item in wrong:
        pairs = (
            (wrong_item.reference, reference_run.trace),
            (wrong_item.candidate, candidate_run.trace),
        )
        for (figures, trace), indices in zip(pairs, ends, strict=True):
            value = None if figures is None else trace.last_like(figures, known_values.tolerance)
            if value is not None:
                indices.append(value.index)
    classes = known_values.match(candidate_run.trace)
    return Parting(reference_run, candidate_run, known_values, classes, wrong, ends, rounding)


def _with_memory(trace: Trace, operations: Sequence[Operation]) -> list[Operation]:
    """Some operators, with those that make the memory that they write to."""
    inner = {index for operation in operations for index in operation.outputs}
    makers = [
        trace.operations[value.makers[0]]
        for operation in operations
        for value in trace.inputs_of(operation)
        if value.index not in inner and value.figures is None and len(value.makers) == 1
    ]
    return in_order([*operations, *makers])


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
    indexes = {index for operation in behind for index in operation.outputs}
    besides = {index for operation in behind for index in operation.inputs} - indexes - others
    figures = trace.values[value].figures
    sizes = (trace.values[index].figures for index in besides)
    return figures is not None and any(
        size is not None and math.prod(size.shape) >= math.prod(figures.shape) for size in sizes
    )


def _border(
    operations: Sequence[Operation], twins: Mapping[int, Operation], classes: Sequence[int | None]
) -> dict[int, int | None]:
    """The values that some operators read from outside, in another run, with their classes."""
    inner = {index for twin in twins.values() for index in twin.outputs}
    border: dict[int, int | None] = {}
    for operation in operations:
        for index, other in zip(operation.inputs, twins[operation.index].inputs, strict=False):
            if other not in inner:
                border.setdefault(other, classes[index])
    return border


def _computed_values(
    operations: Sequence[Operation], twins: Mapping[int, Operation], classes: Sequence[int | None]
) -> dict[int | None, int]:
    """The values that some operators compute in another run, by their classes."""
    return {
        classes[index]: other
        for operation in operations
        for index, other in zip(operation.outputs, twins[operation.index].outputs, strict=False)
    }


def _first_to_explain(wrong: list[WrongItem], rounding: float) -> list[WrongItem]:
    """The results that differ; gradients only if nothing before them does."""
    wrong = [wrong_item for wrong_item in wrong if wrong_item.distance > rounding]
    forward = [wrong_item for wrong_item in wrong if not wrong_item.item.kind.is_of_backward]
    return forward or wrong


def _are_of_backward(parting: Parting) -> bool:
    return all(wrong_item.item.kind.is_of_backward for wrong_item in parting.wrong)


def _results_change(before: Parting, after: Parting) -> bool:
    """Whether the wrong results are now other ones."""
    earlier = {wrong_item.item: wrong_item.candidate for wrong_item in before.wrong}
    moves = (
        WrongItem(wrong_item.item, earlier.get(wrong_item.item), wrong_item.candidate).distance
        for wrong_item in after.wrong
    )
    return len(before.wrong) != len(after.wrong) or any(move > after.rounding for move in moves)


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
