"""Pairs of which one side has no values left: statistics and sketches."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from typing import TYPE_CHECKING

import torch

from paritas.comparison.operands import read_value
from paritas.errors import UsageError
from paritas.files.records import Record
from paritas.numerics.automatic import BLIND_NOISE, BLIND_SHARE
from paritas.numerics.criterion import MAX_Z, RMS_Z
from paritas.numerics.sketch import add_sketches, sketch, sketch_distance
from paritas.numerics.statistics import Statistics, summarize
from paritas.placement.assembly import Assembly, ReplicaDisagreement, ReplicasDisagreeError
from paritas.results.findings import Status

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from paritas.comparison.operands import Operand
    from paritas.dumps.opening import ReadableDump


# --- Summaries of parts, merged where that is sound -----------------------------------------------


@dataclasses.dataclass(frozen=True)
class MergedStatistics:
    """What the statistics of parts say of the whole.

    Attributes:
        statistics: what is not known of the whole is None, or 0 for a count.
        exact: whether every figure that the parts have is known of the whole.
        limits: in words, what is not.
    """

    statistics: Statistics
    exact: bool = True
    limits: str = ""


def merge_statistics(plan: Assembly, parts: Sequence[Statistics]) -> MergedStatistics:
    """The statistics of what the parts are together.

    Raises:
        ReplicasDisagreeError: copies have different statistics.
        UsageError: the parts' statistics say nothing of the whole.
    """
    _check_copies(plan, [parts[first] == parts[other] for first, other in plan.copies])
    terms = [[parts[copies[0]] for copies in cell.terms] for cell in plan.cells]
    if all(len(found) == 1 for found in terms):
        return MergedStatistics(_side_by_side([found[0] for found in terms]))
    return _reduce_statistics(terms, plan.reduction)


def merge_sketches(plan: Assembly, parts: Sequence[Tensor]) -> Tensor:
    """The sketch of what the parts are together.

    Raises:
        ReplicasDisagreeError: copies have different sketches.
        UsageError: the parts' sketches do not add up to that of the whole.
    """
    same = [torch.equal(parts[first], parts[other]) for first, other in plan.copies]
    _check_copies(plan, same)
    boxes = all(len(segments) == 1 for cell in plan.cells for segments in cell.where)
    if not boxes or not (plan.placed or len(plan.cells) == 1):
        raise UsageError(
            "the sketches of the parts were made without their place in the whole, and do not add "
            "up: record values, or distributed tensors"
        )
    terms = [copies[0] for cell in plan.cells for copies in cell.terms]
    count = max((len(cell.terms) for cell in plan.cells), default=1)
    if count > 1 and plan.reduction not in ("sum", "avg"):
        raise UsageError(f"a sketch says nothing of the {plan.reduction} of terms: record values")
    total = add_sketches(parts[at] for at in terms)
    return total / count if plan.reduction == "avg" else total


def _check_copies(plan: Assembly, same: Sequence[bool]) -> None:
    found = [
        ReplicaDisagreement(plan.ranks[other], plan.ranks[first])
        for (first, other), agrees in zip(plan.copies, same, strict=True)
        if not agrees
    ]
    if found:
        raise ReplicasDisagreeError(found)


def _side_by_side(parts: Sequence[Statistics]) -> Statistics:
    """Of parts that do not overlap."""
    finite = {at: _finite_count(part) for at, part in enumerate(parts)}
    known = [part for at, part in enumerate(parts) if finite[at]]
    exponents: Counter[int] = Counter()
    for part in parts:
        exponents.update(dict(part.exponents))
    means = [
        (part.mean, finite[at])
        for at, part in enumerate(parts)
        if finite[at] and part.mean is not None
    ]
    total = sum(finite.values())
    minima = [part.minimum for part in known if part.minimum is not None]
    maxima = [part.maximum for part in known if part.maximum is not None]
    norms = [part.l2 for part in known if part.l2 is not None]
    # A figure that one part lacks is lacking of the whole.
    return Statistics(
        count=sum(part.count for part in parts),
        minimum=min(minima) if minima and len(minima) == len(known) else None,
        maximum=max(maxima) if maxima and len(maxima) == len(known) else None,
        mean=math.fsum(mean * (count / total) for mean, count in means)
        if means and len(means) == len(known)
        else None,
        l2=math.hypot(*norms) if norms and len(norms) == len(known) else None,
        zeros=sum(part.zeros for part in parts),
        nans=sum(part.nans for part in parts),
        positive_infinities=sum(part.positive_infinities for part in parts),
        negative_infinities=sum(part.negative_infinities for part in parts),
        exponents=tuple(sorted(exponents.items())),
    )


def _finite_count(part: Statistics) -> int:
    return part.count - part.nans - part.positive_infinities - part.negative_infinities


def _reduce_statistics(cells: Sequence[Sequence[Statistics]], how: str) -> MergedStatistics:
    """Of parts that are terms: little is left."""
    if not all(part.is_finite for terms in cells for part in terms):
        raise UsageError(
            "terms are not finite, and their statistics do not say where: record values"
        )
    if how == "product":
        raise UsageError("statistics say nothing of the product of terms: record values")
    wholes = []
    for terms in cells:
        means = [part.mean for part in terms if part.mean is not None]
        mean = math.fsum(means) if len(means) == len(terms) else None
        highest = [part.maximum for part in terms if part.maximum is not None]
        lowest = [part.minimum for part in terms if part.minimum is not None]
        wholes.append(
            Statistics(
                count=terms[0].count,
                mean=mean / len(terms)
                if how == "avg" and mean is not None
                else mean
                if how == "sum"
                else None,
                maximum=max(highest) if how == "max" and len(highest) == len(terms) else None,
                minimum=min(lowest) if how == "min" and len(lowest) == len(terms) else None,
            )
        )
    kept = {"sum": "mean", "avg": "mean", "max": "maximum", "min": "minimum"}[how]
    limits = f"of the statistics of terms only the {kept} is that of their {how}"
    return MergedStatistics(_side_by_side(wholes), exact=False, limits=limits)


# --- Judging two summaries ------------------------------------------------------------------------

STATISTICS_ONLY = (
    "statistics only: values that changed places, and differences that cancel, are not seen"
)
EXTREMES_ONLY = "least and greatest value only: what lies between them is not seen"
HIDDEN_BY_NAN = "both sides hold a NaN, which took the place of the least and the greatest value"
SKETCH_ONLY = (
    "statistics and a sketch only: a difference in few values that is small beside the whole is "
    "not seen, nor where it is"
)


# How many noises a figure may be off.
_ALLOWANCES = {"minimum": MAX_Z, "maximum": MAX_Z, "mean": RMS_Z, "l2": RMS_Z}


@dataclasses.dataclass(frozen=True)
class SideSummary:
    """What is left of a tensor.

    Attributes:
        statistics: of its values.
        sketch: of its values, or None.
        numel: how many there are; None where that is not known.
        exact_counts: whether counts of NaN and infinities are known, not only that there are some.
        limits: what was lost when it was put together.
    """

    statistics: Statistics
    sketch: Tensor | None
    numel: int | None
    exact_counts: bool
    limits: str = ""

    @property
    def has_extremes_only(self) -> bool:
        """Whether the least and the greatest value are all there is, as some scripts leave it.

        A NaN takes the place of both, so that nothing is known of infinities then.
        """
        found = self.statistics
        return not found.count and found.mean is None and found.l2 is None and self.sketch is None


@dataclasses.dataclass(frozen=True)
class SummaryJudgement:
    """How two summaries compare.

    Attributes:
        distance: |my - golden| / |golden|, estimated by the sketches, or else the largest
            difference of a statistic relative to the size of the values.
        limits: what could not be seen.
        nonfinite: one side has NaN or infinities that the other has not.
    """

    status: Status
    reason: str
    distance: float | None
    limits: str
    nonfinite: bool = False


def judge_summaries(my: SideSummary, golden: SideSummary, unit: float) -> SummaryJudgement:
    """Judge by what both sides still know.

    No gate of the full rule, which has no values to look at here. The allowances are its own,
    twice, for noise of a dtype alone; but counts of zeros that differ by more than 1 % are refused,
    though noise may have made them.

    Args:
        my: the candidate.
        golden: the reference.
        unit: unit roundoff of the coarser dtype; 0 for integers.
    """
    has_sketches = my.sketch is not None and golden.sketch is not None
    extremes = my.has_extremes_only or golden.has_extremes_only
    limits = SKETCH_ONLY if has_sketches else EXTREMES_ONLY if extremes else STATISTICS_ONLY
    alone = _known_on_one_side(my, golden)
    lacking = f"known on one side only: {', '.join(alone)}" if alone else ""
    limits = "; ".join(filter(None, (limits, lacking, my.limits, golden.limits)))
    counted = dict(_count_differences(my, golden))
    if counted:
        told, nonfinite = "; ".join(counted), any(counted.values())
        return SummaryJudgement(Status.DIFFERENT, told, None, limits, nonfinite=nonfinite)
    scale = _find_scale(golden)
    relative = min(BLIND_NOISE * unit, BLIND_SHARE)
    found = list(_figure_differences(my, golden, scale))
    if not found and not has_sketches:
        reason = "nothing is known of both sides that could be compared"
        if extremes and golden.statistics.nans:
            reason = HIDDEN_BY_NAN
        return SummaryJudgement(Status.UNVERIFIED, reason, None, limits)
    worst = max((apart for _, apart, _, _ in found), default=0.0)
    failed = [text for text, apart, share, _ in found if not apart <= 2 * relative * share]
    distance = worst
    if my.sketch is not None and golden.sketch is not None:
        distance = sketch_distance(golden.sketch, my.sketch)
        # What a sketch says is right to about sqrt(2/m) of it.
        allowed = 2 * relative * RMS_Z * (1 + 2 * math.sqrt(2 / golden.sketch.numel()))
        if not distance <= allowed:
            failed.append(
                f"the sketches are {distance:.3g} of the golden norm apart, {allowed:.2g} allowed"
            )
    if failed:
        return SummaryJudgement(Status.DIFFERENT, "; ".join(failed), distance, limits)
    same = worst == 0 and distance == 0 and not alone
    return SummaryJudgement(Status.IDENTICAL if same else Status.EQUIVALENT, "", distance, limits)


def summary_of(operand: Operand, dump: ReadableDump, values: Callable[[], Tensor]) -> SideSummary:
    """What is known of an operand; computed where there are values.

    Args:
        values: reads them.

    Raises:
        UsageError: nothing is known of it.
    """
    if operand.record.value is not None:
        return _of_number(operand.record.value)
    if all(record.payload is not None for record in operand.records()):
        tensor = values()
        return SideSummary(summarize(tensor), sketch(tensor), tensor.numel(), exact_counts=True)
    if operand.recipe is not None:
        return _merge_ranks(operand, dump)
    record = operand.record
    if record.statistics is None:
        raise UsageError("neither values nor statistics of it are recorded")
    sums = dump.read_sketch(record) if record.sketch is not None else None
    numel = math.prod(record.tensor.shape) if record.tensor is not None else None
    # A dump of ours may hold what was converted from another tool's, which counts less.
    counted = record.statistics.counts_all and record.statistics.count == numel
    exact = dump.kind == "paritas" and counted
    return SideSummary(record.statistics, sums, numel, exact_counts=exact)


def _of_number(text: str) -> SideSummary:
    """What is no tensor here, and may have been written as one there."""
    try:
        tensor = torch.as_tensor(read_value(text))
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(f"its value is {text}, which has no statistics") from error
    return SideSummary(summarize(tensor), None, tensor.numel(), exact_counts=True)


def _merge_ranks(operand: Operand, dump: ReadableDump) -> SideSummary:
    """What the summaries of several ranks say of the whole."""
    plan = operand.recipe
    records = [part for part in operand.parts if isinstance(part, Record)]
    found = [record.statistics for record in records if record.statistics is not None]
    if not isinstance(plan, Assembly) or not len(found) == len(records) == len(operand.parts):
        raise UsageError(f"statistics cannot be {operand.words}: record values to compare them")
    merged = merge_statistics(plan, found)
    sums = None
    if all(record.sketch is not None for record in records):
        sums = merge_sketches(plan, [dump.read_sketch(record) for record in records])
    ours = dump.kind == "paritas" and all(one.counts_all for one in found)
    exact = merged.exact and ours
    numel = math.prod(plan.result_shape)
    return SideSummary(merged.statistics, sums, numel, exact_counts=exact, limits=merged.limits)


def _count_differences(my: SideSummary, golden: SideSummary) -> Iterator[tuple[str, bool]]:
    """What differs, in words, and whether it is a matter of NaN and infinities."""
    if None not in (my.numel, golden.numel) and my.numel != golden.numel:
        yield f"{my.numel} values instead of {golden.numel}", False
    extremes = my.has_extremes_only or golden.has_extremes_only
    for name in ("nans", "positive_infinities", "negative_infinities"):
        if name != "nans" and extremes and golden.statistics.nans:
            return
        left, right = getattr(my.statistics, name), getattr(golden.statistics, name)
        if not (my.exact_counts and golden.exact_counts):
            left, right = bool(left), bool(right)
        if left != right:
            counts = f"{_spell_count(left)} instead of {_spell_count(right)}"
            yield f"{_spell_count_name(name)}: {counts}", True
    if my.exact_counts and golden.exact_counts and my.statistics.count and golden.statistics.count:
        # Whether a value is zero is seldom decided by rounding in many places.
        left, right = my.statistics.zeros, golden.statistics.zeros
        if abs(left - right) > max(1.0, 0.01 * (golden.numel or 0)):
            yield f"zeros: {left} instead of {right}", False


def _known_on_one_side(my: SideSummary, golden: SideSummary) -> list[str]:
    """The figures that cannot be compared, as one of the two lacks them."""
    return [
        name
        for name in _ALLOWANCES
        if (getattr(my.statistics, name) is None) != (getattr(golden.statistics, name) is None)
    ]


def _figure_differences(
    my: SideSummary, golden: SideSummary, scale: float
) -> Iterator[tuple[str, float, float, str]]:
    """(words, distance over the scale, how many noises are allowed, name) of each figure."""
    for name, noises in _ALLOWANCES.items():
        left, right = getattr(my.statistics, name), getattr(golden.statistics, name)
        if left is None or right is None:
            if (left is None) != (right is None) and my.exact_counts and golden.exact_counts:
                yield f"{name}: {left} instead of {right}", math.inf, noises, name
            continue
        # A norm grows with the number of values; all else is of the size of a value.
        size = abs(right) if name == "l2" else scale
        apart = 0.0 if left == right else abs(left - right) / size if size else math.inf
        yield f"{name} is {left:.9g} instead of {right:.9g}", apart, noises, name


def _find_scale(summary: SideSummary) -> float:
    """How large the values are: the larger of the ends and of the root mean square."""
    found = summary.statistics
    ends = [abs(end) for end in (found.minimum, found.maximum) if end is not None]
    if found.l2 is not None and summary.numel:
        ends.append(found.l2 / math.sqrt(summary.numel))
    return max(ends, default=0.0)


def _spell_count_name(name: str) -> str:
    return {"nans": "NaN", "positive_infinities": "+Inf", "negative_infinities": "-Inf"}[name]


def _spell_count(value: int) -> str:
    return ("some" if value else "none") if isinstance(value, bool) else str(value)
