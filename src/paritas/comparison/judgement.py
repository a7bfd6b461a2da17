"""One pair: read both sides, measure the difference, and judge it by these two values alone."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import torch

from paritas.comparison.operands import (
    as_read,
    comparable_digests,
    describe_side,
    merge_sketches,
    merge_statistics,
    read_value,
    same_digest,
    with_extremes,
)
from paritas.comparison.rows import Basis, ComparisonRow, SideFacts
from paritas.core.errors import ParitasError, UsageError
from paritas.core.judging.pairs import Ruling, apply_ruling, judge_case
from paritas.core.numerics import criterion
from paritas.core.numerics.automatic import blind_share, nonfinite_mismatch
from paritas.core.numerics.bits import dtype_name, is_inexact
from paritas.core.numerics.criterion import MAX_Z, RMS_Z, Noise, real_view
from paritas.core.numerics.gates import bound_score
from paritas.core.numerics.pair_figures import pair_figures, quick_figures
from paritas.core.numerics.pooling import populations
from paritas.core.numerics.sketch import sketch, sketch_distance
from paritas.core.numerics.statistics import summarize
from paritas.core.placement.assembly import Assembly
from paritas.core.results.findings import Aspect, Score, Status
from paritas.core.results.items import Extremes, PairFigures
from paritas.formats.files.records import Record
from paritas.formats.files.tensor_bytes import check_repeats

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from paritas.comparison.operands import Operand, Pair
    from paritas.core.numerics.requirements import Requirement
    from paritas.core.numerics.statistics import Statistics
    from paritas.formats.dumps.opening import ReadableDump

    _Gate = Callable[["_PairCase"], Ruling | None]
    _Check = Callable[["_PairCase"], Ruling]

_RulingT = TypeVar("_RulingT", Ruling, Ruling | None)


# --- The pair -------------------------------------------------------------------------------------

# The inputs of the values are considered later, in `table`: a difference above the limit here may
# have come in with them.

# The most elements of an argument that one tool records as a number and the other as a tensor.
_LONGEST_VALUE = 64
BY_DIGEST = "digests only: data damaged after recording is not detected"


def measure(
    pair: Pair,
    my: ReadableDump,
    golden: ReadableDump,
    requirement: Requirement | None = None,
    *,
    quick: bool = False,
    trust_digests: bool = False,
) -> Measured:
    """Measure a pair and judge it by itself.

    An error becomes the status of this pair; other pairs are not affected. With `quick`, only a few
    figures are computed for a pair that clearly passes. With `trust_digests`, values with equal
    digests are not read, and checksums are not verified.
    """
    row = unjudged_row(pair, my.kind, golden.kind)
    quick = quick and requirement is None
    case = _PairCase(pair, my, golden, row, requirement, is_quick=quick, trusts=trust_digests)
    gates, check = _gates_and_check(case)
    (row,) = judge_case(
        case,
        (_rule_on_unmatched, *map(_rule_on_errors, gates)),
        _settle_case,
        lambda case: [_settle_case(case, _rule_on_errors(check)(case))],
    )
    return row


class Measured(ComparisonRow, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A row with what two values alone show; `table` then considers their inputs.

    Attributes:
        status: `unverified` until it is judged.
        settled: nothing else in the program can change the status: identical bits, a different
            structure, a user's rule, a side that cannot be read.
        nbytes: the bytes of the compared values.
        distance: |my - golden| / |golden|, if known.
    """

    index: int = 0
    status: Status = Status.UNVERIFIED
    settled: bool = True
    nbytes: int = 0
    distance: float | None = None

    @property
    def fails(self) -> bool:
        """Whether it differs by more than rounding."""
        return self.status.is_wrong

    def in_table(self, index: int, limits: str, sources: tuple[int, ...]) -> ComparisonRow:
        """The row of the table."""
        fields = {name: getattr(self, name) for name in ComparisonRow.__struct_fields__}
        return ComparisonRow(**fields | {"index": index, "limits": limits, "sources": sources})


def unjudged_row(pair: Pair, my_kind: str, golden_kind: str) -> Measured:
    """The row of a pair, with what is known without reading values."""
    record = pair.leading.record
    site = record.site
    # The side with fused code knows the kernel and its nodes.
    my_site = site if pair.my is None else pair.my.record.site
    return Measured(
        step=pair.golden.step if pair.golden is not None else record.step,
        rank=pair.rank,
        name=record.id,
        call=record.id.rpartition("/")[0],
        level=site.level,
        phase=site.phase,
        side=site.side,
        position=site.position,
        op=site.op,
        module=site.module or my_site.module,
        line=site.line or my_site.line,
        code=site.code or my_site.code,
        graph=site.graph,
        kernel=my_site.kernel,
        nodes=my_site.nodes or site.nodes,
        matched_by=pair.matched_by,
        my=None if pair.my is None else describe_side(pair.my, my_kind),
        golden=None if pair.golden is None else describe_side(pair.golden, golden_kind),
    )


@dataclasses.dataclass(frozen=True)
class _PairCase:
    """Two operands with their dumps; values are read when they are first asked for.

    Attributes:
        requirement: the user's rule, which replaces the noise.
        trusts: whether to trust digests and checksums.
    """

    pair: Pair
    my_dump: ReadableDump
    golden_dump: ReadableDump
    unjudged: Measured
    requirement: Requirement | None
    is_quick: bool
    trusts: bool

    # Without a counterpart, one side stands for both: the first gate settles that pair.

    @functools.cached_property
    def my(self) -> Operand:
        return self.pair.my or self.pair.leading

    @functools.cached_property
    def golden(self) -> Operand:
        return self.pair.golden or self.pair.leading

    @property
    def my_facts(self) -> SideFacts:
        return self.unjudged.my or SideFacts()

    @property
    def golden_facts(self) -> SideFacts:
        return self.unjudged.golden or SideFacts()

    @property
    def are_summaries(self) -> bool:
        """Whether one side was recorded as a summary."""
        return self.my.record.is_summary or self.golden.record.is_summary

    @property
    def are_single(self) -> bool:
        """Whether both are recorded values, not results of a recipe."""
        return self.my.recipe is None and self.golden.recipe is None

    @functools.cached_property
    def have_same_digest(self) -> bool:
        return self.are_single and same_digest(self.my.record, self.golden.record)

    def my_values(self) -> Tensor:
        return self.my.read(self._reader(self.my_dump))

    def golden_values(self) -> Tensor:
        return self.golden.read(self._reader(self.golden_dump))

    def _reader(self, dump: ReadableDump) -> Callable[[Record], Tensor]:
        return functools.partial(dump.view, check=not self.trusts)

    @functools.cached_property
    def recorded_tensors(self) -> tuple[Tensor, Tensor]:
        """The golden tensor and mine."""
        reference = self.golden_values()
        check_repeats(reference)
        if self.have_same_digest:
            # Both sides match the same digest, so it is enough to read one of them.
            self.my_dump.verify(self.my.record)
            return reference, reference
        candidate = self.my_values()
        check_repeats(candidate)
        return reference, candidate

    @functools.cached_property
    def tensors(self) -> tuple[Tensor, Tensor]:
        """The golden tensor and mine, in the shape of the golden one."""
        reference, candidate = self.recorded_tensors
        has_other_shape = candidate.shape != reference.shape
        return reference, candidate.reshape(reference.shape) if has_other_shape else candidate

    @functools.cached_property
    def figures(self) -> PairFigures:
        return pair_figures(*self.tensors)

    @property
    def is_inexact(self) -> bool:
        """Whether a side is a tensor of floats, for which noise is allowed."""
        return any(map(is_inexact, self.tensors))

    def rule_on_tensors(
        self, status: Status, reason: str = "", *, figures: PairFigures | None = None, **about: Any
    ) -> Ruling:
        """A ruling with what is known of two tensors; by default with all their figures."""
        figures = figures or self.figures
        reference, candidate = self.tensors
        shapes = [tensor.shape for tensor in self.recorded_tensors]
        limits = "" if shapes[0] == shapes[1] else "the shapes differ in dimensions of length 1"
        extremes: tuple[Extremes | None, ...] = (figures.reference, figures.candidate)
        distance = 0.0 if figures.metrics is None else figures.metrics.rel_l2
        if figures.quick is not None:
            extremes, distance = (None, None), figures.quick.rel_l2
        facts: dict[str, Any] = {
            "my": as_read(self.my_facts, candidate, extremes[1]),
            "golden": as_read(self.golden_facts, reference, extremes[0]),
            "figures": figures,
            "nbytes": candidate.nbytes + reference.nbytes,
            "limits": limits,
            "distance": distance,
        }
        return Ruling(status, reason, facts | about)


def _gates_and_check(case: _PairCase) -> tuple[tuple[_Gate, ...], _Check]:
    """What settles a pair early, in order, and what judges it otherwise."""
    if case.are_summaries:
        return _SUMMARY_GATES, _rule_on_summaries
    if not (case.my_facts.dtype and case.golden_facts.dtype):
        return (), _rule_on_plain_values
    if _has_values(case.my) and _has_values(case.golden):
        return _TENSOR_GATES, _rule_on_noise
    return _SUMMARY_GATES, _rule_on_summaries


def _settle_case(case: _PairCase, ruling: Ruling) -> Measured:
    """The row of a pair under a ruling."""
    about = {"basis": Basis.VALUES if "judged_by" in ruling.about else Basis.UNKNOWN} | ruling.about
    if ruling.status is Status.IDENTICAL:
        about["own"] = about["inherited"] = 0.0
    return apply_ruling(case.unjudged, dataclasses.replace(ruling, about=about))


def _rule_on_errors(rule: Callable[[_PairCase], _RulingT]) -> Callable[[_PairCase], _RulingT]:
    """A gate or check, for which an error in reading or measuring is a ruling too."""

    def rule_or_refuse(case: _PairCase) -> _RulingT:
        try:
            return rule(case)
        except (ParitasError, OSError, RuntimeError, ValueError) as error:
            if getattr(error, "is_difference", False):  # replicas that disagree
                return Ruling(Status.DIFFERENT, str(error), {"aspect": Aspect.STRUCTURE})
            return Ruling(Status.UNVERIFIED, str(error), {"aspect": Aspect.HARNESS})

    return rule_or_refuse


def _rule_on_unmatched(case: _PairCase) -> Ruling | None:
    pair = case.pair
    if pair.my is not None and pair.golden is not None:
        return None
    missing, present = ("my", "the golden") if pair.my is None else ("the golden", "my")
    near = f"; the most similar names are {', '.join(pair.nearest)}" if pair.nearest else ""
    reason = f"only {present} dump has it: no value in {missing} dump matches{near}"
    advice = "map its name with --rename, or exclude it with --ignore"
    return Ruling(Status.UNVERIFIED, reason, {"aspect": Aspect.STRUCTURE, "advice": advice})


# --- summaries ------------------------------------------------------------------------------------


def _rule_on_recorded_shapes(case: _PairCase) -> Ruling | None:
    shapes = [case.my_facts.shape, case.golden_facts.shape]
    if None in shapes or shapes[0] == shapes[1]:
        return None
    reason = f"shape {list(shapes[0] or ())} instead of {list(shapes[1] or ())}"
    return Ruling(Status.DIFFERENT, reason, {"aspect": Aspect.SHAPE})


def _rule_on_recorded_digests(case: _PairCase) -> Ruling | None:
    """Equal paritas digests of values that were not stored."""
    records = (case.my.record, case.golden.record)
    if not case.have_same_digest:
        return None
    if not case.trusts and all(record.statistics is not None for record in records):
        _, _, judgement = _summarize_and_judge(case)
        if judgement.status is Status.DIFFERENT:
            reason = f"a dump is damaged: the digests are equal, but {judgement.reason}"
            return Ruling(Status.UNVERIFIED, reason, {"aspect": Aspect.HARNESS})
    return _rule_on_digests("digest, data not stored")


def _rule_on_summaries(case: _PairCase) -> Ruling:
    my_summary, golden, judgement = _summarize_and_judge(case)
    status, reason = judgement.status, judgement.reason
    are_comparable = case.are_single and comparable_digests(case.my.record, case.golden.record)
    if status is Status.IDENTICAL and are_comparable:
        status = Status.EQUIVALENT
        reason = "the digests differ, but all recorded statistics are equal"
    has_sketches = my_summary.sketch is not None and golden.sketch is not None
    about = {
        "limits": judgement.limits,
        "judged_by": "sketch" if has_sketches else "statistics",
        "basis": Basis.SUMMARIES,
        "nonfinite": judgement.nonfinite,
        "distance": judgement.distance,
        "settled": status in {Status.IDENTICAL, Status.UNVERIFIED},
        "my": with_extremes(case.my_facts, my_summary.statistics),
        "golden": with_extremes(case.golden_facts, golden.statistics),
    }
    return Ruling(status, reason, about)


_SUMMARY_GATES = (_rule_on_recorded_shapes, _rule_on_recorded_digests)


def _summarize_and_judge(case: _PairCase) -> tuple[SideSummary, SideSummary, SummaryJudgement]:
    summary = summary_of(case.my, case.my_dump, case.my_values)
    golden = summary_of(case.golden, case.golden_dump, case.golden_values)
    unit = _coarser_unit((case.my_facts.dtype, summary), (case.golden_facts.dtype, golden))
    return summary, golden, judge_summaries(summary, golden, unit)


def _rule_on_digests(judged_by: str) -> Ruling:
    about = {
        "judged_by": judged_by,
        "basis": Basis.DIGESTS,
        "limits": BY_DIGEST,
        "distance": 0.0,
    }
    return Ruling(Status.IDENTICAL, "", about)


def _coarser_unit(*sides: tuple[str, SideSummary]) -> float:
    """The unit roundoff of the coarser side, guessed if its dtype is unknown.

    If one side is exact, a side of unknown dtype is taken to be exact too.
    """
    units = [_unit_of_dtype(name) for name, _ in sides if name]
    if 0.0 in units and len(units) < len(sides):
        return 0.0
    return max([*units, *(_least_unit(summary) for name, summary in sides if not name)])


def _least_unit(summary: SideSummary) -> float:
    """That of float16 if the minimum and maximum are float16 numbers, otherwise of float32."""
    ends = (summary.statistics.minimum, summary.statistics.maximum)
    known_ends = torch.tensor([end for end in ends if end is not None], dtype=torch.float64)
    is_half = known_ends.numel() > 0 and known_ends.half().double().equal(known_ends)
    return criterion.unit_roundoff(torch.float16) if is_half else criterion.UNIT_F32


def _unit_of_dtype(name: str) -> float:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        return criterion.UNIT_F32  # another tool's dtype name; its statistics are in float32
    return criterion.unit_roundoff(dtype) if dtype.is_floating_point or dtype.is_complex else 0.0


# --- Judging two summaries ------------------------------------------------------------------------

STATISTICS_ONLY = "statistics only: swapped values, and differences that cancel, are not detected"
EXTREMES_ONLY = "minimum and maximum only: differences between them are not detected"
HIDDEN_BY_NAN = "both sides contain a NaN, which replaces the minimum and the maximum"
SKETCH_ONLY = (
    "statistics and a sketch only: a small difference in a few values is not detected, nor is its "
    "position"
)


# The allowed difference of each figure, in multiples of the noise.
_ALLOWANCES = {"minimum": MAX_Z, "maximum": MAX_Z, "mean": RMS_Z, "l2": RMS_Z}


def judge_summaries(my: SideSummary, golden: SideSummary, unit: float) -> SummaryJudgement:
    """Judge by the figures that both sides have.

    This is not a gate of the full rule, which needs values. It allows twice what the rule allows
    for the noise of a dtype. Counts of zeros that differ by more than 1 % fail, although noise can
    cause that too.

    Args:
        my: the candidate.
        golden: the reference.
        unit: unit roundoff of the coarser dtype; 0 for integers.
    """
    has_sketches = my.sketch is not None and golden.sketch is not None
    extremes = my.has_extremes_only or golden.has_extremes_only
    limits = SKETCH_ONLY if has_sketches else EXTREMES_ONLY if extremes else STATISTICS_ONLY
    alone = [
        name
        for name in _ALLOWANCES
        if (getattr(my.statistics, name) is None) != (getattr(golden.statistics, name) is None)
    ]
    one_sided = f"known on one side only: {', '.join(alone)}" if alone else ""
    limits = "; ".join(filter(None, (limits, one_sided, my.limits, golden.limits)))
    counted = dict(_count_differences(my, golden))
    if counted:
        reason, nonfinite = "; ".join(counted), any(counted.values())
        return SummaryJudgement(Status.DIFFERENT, reason, None, limits, nonfinite=nonfinite)
    relative = blind_share(unit)
    figure_differences = list(_figure_differences(my, golden))
    if not figure_differences and not has_sketches:
        reason = "the two sides have no statistic in common"
        if extremes and golden.statistics.nans:
            reason = HIDDEN_BY_NAN
        return SummaryJudgement(Status.UNVERIFIED, reason, None, limits)
    worst = max((distance for _, distance, _ in figure_differences), default=0.0)
    failed = [
        text for text, distance, share in figure_differences if not distance <= 2 * relative * share
    ]
    distance = worst
    if my.sketch is not None and golden.sketch is not None:
        distance = sketch_distance(golden.sketch, my.sketch)
        # A sketch of m numbers is accurate to about sqrt(2/m).
        allowed = 2 * relative * RMS_Z * (1 + 2 * math.sqrt(2 / golden.sketch.numel()))
        if not distance <= allowed:
            failed.append(
                f"the sketches differ by {distance:.3g} of the golden norm, {allowed:.2g} allowed"
            )
    if failed:
        return SummaryJudgement(Status.DIFFERENT, "; ".join(failed), distance, limits)
    same = worst == 0 and distance == 0 and not alone
    return SummaryJudgement(Status.IDENTICAL if same else Status.EQUIVALENT, "", distance, limits)


@dataclasses.dataclass(frozen=True)
class SideSummary:
    """What is known of a tensor without its values.

    Attributes:
        numel: the number of values, or None if unknown.
        exact_counts: whether NaN and infinities were counted, or only their presence is known.
        limits: what was lost in assembling it.
    """

    statistics: Statistics
    sketch: Tensor | None
    numel: int | None
    exact_counts: bool
    limits: str = ""

    @property
    def has_extremes_only(self) -> bool:
        """Whether only the minimum and maximum are known, as some scripts record.

        A NaN replaces both, and then nothing is known about infinities.
        """
        statistics = self.statistics
        return (
            not statistics.count
            and statistics.mean is None
            and statistics.l2 is None
            and self.sketch is None
        )


@dataclasses.dataclass(frozen=True)
class SummaryJudgement:
    """How two summaries compare.

    Attributes:
        distance: |my - golden| / |golden| as estimated by the sketches, otherwise the largest
            difference of a statistic relative to the size of the values.
        limits: what could not be detected.
        nonfinite: one side has NaN or infinities that the other does not have.
    """

    status: Status
    reason: str
    distance: float | None
    limits: str
    nonfinite: bool = False


def summary_of(operand: Operand, dump: ReadableDump, values: Callable[[], Tensor]) -> SideSummary:
    """The recorded summary of an operand; computed from its values if there are any."""
    if operand.record.value is not None:
        return _summarize_number(operand.record.value)
    if _has_values(operand):
        tensor = values()
        check_repeats(tensor)
        return SideSummary(summarize(tensor), sketch(tensor), tensor.numel(), exact_counts=True)
    if operand.recipe is not None:
        return _merge_ranks(operand, dump)
    record = operand.record
    if record.statistics is None:
        raise UsageError("neither its values nor its statistics are recorded")
    sums = dump.read_sketch(record) if record.sketch is not None else None
    numel = math.prod(record.tensor.shape) if record.tensor is not None else None
    # A paritas dump that was converted from another tool's dump may lack some counts.
    counted = record.statistics.counts_all and record.statistics.count == numel
    exact = dump.kind == "paritas" and counted
    return SideSummary(record.statistics, sums, numel, exact_counts=exact)


def _summarize_number(text: str) -> SideSummary:
    """The summary of a plain number, which the other side may have recorded as a tensor."""
    try:
        tensor = torch.as_tensor(read_value(text))
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(f"its value {text} has no statistics") from error
    return SideSummary(summarize(tensor), None, tensor.numel(), exact_counts=True)


def _merge_ranks(operand: Operand, dump: ReadableDump) -> SideSummary:
    plan = operand.recipe
    records = [part for part in operand.parts if isinstance(part, Record)]
    rank_statistics = [record.statistics for record in records if record.statistics is not None]
    if not isinstance(plan, Assembly) or not len(rank_statistics) == len(records) == len(
        operand.parts
    ):
        raise UsageError(f"this needs values, not statistics: {operand.words}; record values")
    merged, limits = merge_statistics(plan, rank_statistics)
    sums = None
    if all(record.sketch is not None for record in records):
        sums = merge_sketches(plan, [dump.read_sketch(record) for record in records])
    exact = (
        not limits
        and dump.kind == "paritas"
        and all(part_statistics.counts_all for part_statistics in rank_statistics)
    )
    numel = math.prod(plan.result_shape)
    return SideSummary(merged, sums, numel, exact_counts=exact, limits=limits)


_COUNT_NAMES = {"nans": "NaN", "positive_infinities": "+Inf", "negative_infinities": "-Inf"}


def _count_differences(my: SideSummary, golden: SideSummary) -> Iterator[tuple[str, bool]]:
    """A description of each difference, and whether it is one of NaN and infinities."""
    if None not in (my.numel, golden.numel) and my.numel != golden.numel:
        yield f"{my.numel} values instead of {golden.numel}", False
    extremes = my.has_extremes_only or golden.has_extremes_only
    are_exact = my.exact_counts and golden.exact_counts
    for name, label in _COUNT_NAMES.items():
        if name != "nans" and extremes and golden.statistics.nans:
            return
        left, right = getattr(my.statistics, name), getattr(golden.statistics, name)
        if not are_exact:
            left, right = ("some" if count else "none" for count in (left, right))
        if left != right:
            yield f"{label}: {left} instead of {right}", True
    if are_exact and my.statistics.count and golden.statistics.count:
        # Rounding rarely turns many values into zeros.
        left, right = my.statistics.zeros, golden.statistics.zeros
        if abs(left - right) > max(1.0, 0.01 * (golden.numel or 0)):
            yield f"zeros: {left} instead of {right}", False


def _figure_differences(my: SideSummary, golden: SideSummary) -> Iterator[tuple[str, float, float]]:
    """(description, distance relative to the size of the values, allowed noises) of each figure."""
    scale = _find_scale(golden)
    for name, noises in _ALLOWANCES.items():
        left, right = getattr(my.statistics, name), getattr(golden.statistics, name)
        if left is None or right is None:
            if (left is None) != (right is None) and my.exact_counts and golden.exact_counts:
                yield f"{name}: {left} instead of {right}", math.inf, noises
            continue
        # The norm grows with the number of values; the other figures have the size of one value.
        size = abs(right) if name == "l2" else scale
        distance = 0.0 if left == right else abs(left - right) / size if size else math.inf
        yield f"{name} is {left:.9g} instead of {right:.9g}", distance, noises


def _find_scale(summary: SideSummary) -> float:
    """The size of the values: the largest absolute value, or at least the root mean square."""
    statistics = summary.statistics
    ends = [abs(end) for end in (statistics.minimum, statistics.maximum) if end is not None]
    if statistics.l2 is not None and summary.numel:
        ends.append(statistics.l2 / math.sqrt(summary.numel))
    return max(ends, default=0.0)


# --- The noise of a dtype -------------------------------------------------------------------------


def noise_of(reference: Tensor, candidate: Tensor) -> tuple[Noise, str]:
    """The noise to allow, and a description of it.

    If the golden side has higher precision, it is the arbiter and only my side has noise.
    """
    inexact = [tensor for tensor in (reference, candidate) if is_inexact(tensor)]
    units = [criterion.unit_roundoff(tensor.dtype) for tensor in inexact]
    coarser = inexact[units.index(max(units))]
    words = dtype_name(coarser.dtype)
    if len(inexact) > 1 and units[0] < units[1]:
        words = f"{words}, with the golden {dtype_name(reference.dtype)} as arbiter"
    noise = Noise(
        unit=max(units),
        step=max(criterion.smallest_step(tensor.dtype) for tensor in inexact),
        relative=blind_share(max(units)),
        source=f"{words}, by the dtype alone: weak",
    )
    return noise, words


def score(reference: Tensor, candidate: Tensor, figures: PairFigures, noise: Noise) -> Score:
    """The candidate's error in multiples of the noise; from the figures alone if possible."""
    metrics, golden = figures.metrics, figures.reference
    pair_score = None
    if metrics is not None and metrics.rel_l2 and math.isfinite(metrics.rel_l2):
        ends = [abs(end) for end in (golden.minimum, golden.maximum) if end is not None]
        pair_score = bound_score(
            metrics.max_abs,
            metrics.rmse,
            populations(real_view(reference)).least,
            noise,
            largest=max(ends, default=0.0),
            numel=metrics.numel,
            index=metrics.max_abs_index,
        )
    if pair_score is None:
        candidate_tensor, truth = (
            tensor if is_inexact(tensor) else tensor.double() for tensor in (candidate, reference)
        )
        pair_score = criterion.score(candidate_tensor, truth, noise).score
    return pair_score


# --- plain values ---------------------------------------------------------------------------------


def _rule_on_plain_values(case: _PairCase) -> Ruling:
    """Numbers, lists and strings; one side may have recorded a number as a tensor."""
    as_text = _as_text(case.my, case.my_values, case.my_facts)
    golden = _as_text(case.golden, case.golden_values, case.golden_facts)
    by_equality = {"judged_by": "equality"}
    if as_text is None or golden is None:
        words = [
            text or _tensor_words(side)
            for text, side in ((as_text, case.my_facts), (golden, case.golden_facts))
        ]
        if all(words):
            return Ruling(Status.DIFFERENT, f"{words[0]} instead of {words[1]}", by_equality)
        reason = "one side has no readable value; see the problems of its dump"
        return Ruling(Status.UNVERIFIED, reason, {"aspect": Aspect.HARNESS})
    if as_text == golden or _same_value(as_text, golden):
        return Ruling(Status.IDENTICAL, "", by_equality)
    return Ruling(Status.DIFFERENT, f"{as_text} instead of {golden}", by_equality)


def _as_text(operand: Operand, values: Callable[[], Tensor], side: SideFacts) -> str | None:
    if side.value is not None or (not side.dtype and operand.record.payload is None):
        return side.value
    tensor = values()
    return repr(tensor.tolist()) if tensor.numel() <= _LONGEST_VALUE else None


def _tensor_words(side: SideFacts) -> str:
    """What a side is, if it is a tensor with values."""
    return f"a tensor {side.dtype}{list(side.shape or ())}" if side.dtype else ""


def _same_value(left: str, right: str) -> bool:
    """Whether two texts mean the same value: tools use different quotes and brackets."""
    try:
        values = [_normalize_plain(read_value(text)) for text in (left, right)]
    except UsageError:
        return False
    if all(isinstance(value, float) and math.isnan(value) for value in values):
        return True
    return bool(values[0] == values[1])


def _normalize_plain(value: Any) -> Any:
    """Treat a dtype recorded as a string as a dtype, and a tuple as a list."""
    if isinstance(value, str):
        with contextlib.suppress(UsageError):
            return read_value(value)
    if isinstance(value, list | tuple):
        return [_normalize_plain(item) for item in value]
    return value


def _has_values(operand: Operand) -> bool:
    return all(record.payload is not None for record in operand.records())


# --- tensors --------------------------------------------------------------------------------------


def _rule_on_trusted_digests(case: _PairCase) -> Ruling | None:
    if case.trusts and case.have_same_digest:
        return _rule_on_digests("digest, data not read")
    return None


def _rule_on_misfit(case: _PairCase) -> Ruling | None:
    """Shapes or dtypes that cannot be compared element by element."""
    reference, candidate = case.recorded_tensors
    misfit = _find_misfit(candidate, reference, ours=case.my_dump.kind == case.golden_dump.kind)
    if misfit is None:
        return None
    aspect, reason = misfit
    about = {
        "aspect": aspect,
        "judged_by": "shape and dtype",
        "my": msgspec.structs.replace(case.my_facts, shape=tuple(candidate.shape)),
        "golden": msgspec.structs.replace(case.golden_facts, shape=tuple(reference.shape)),
    }
    return Ruling(Status.DIFFERENT, reason, about)


def _rule_quickly(case: _PairCase) -> Ruling | None:
    """Settle clear cases cheaply: identical bits, or a difference well within the noise."""
    if not case.is_quick:
        return None
    reference, candidate = case.tensors
    quick = quick_figures(reference, candidate)
    figures = PairFigures(identical=quick.identical, quick=quick)
    if quick.identical:
        return case.rule_on_tensors(Status.IDENTICAL, figures=figures, judged_by="bits")
    if not case.is_inexact or quick.nonfinite_mismatches:
        return None
    noise, words = noise_of(reference, candidate)
    least = populations(real_view(reference)).least
    passes = bound_score(quick.max_abs, quick.rmse, least, noise)
    if passes is None:
        return None
    about: dict[str, Any] = {"score": passes, "judged_by": f"noise of {words}", "settled": False}
    return case.rule_on_tensors(Status.EQUIVALENT, figures=figures, **about)


def _rule_on_bits(case: _PairCase) -> Ruling | None:
    if not case.figures.identical:
        return None
    return case.rule_on_tensors(Status.IDENTICAL, judged_by="bits")


def _rule_by_requirement(case: _PairCase) -> Ruling | None:
    requirement = case.requirement
    if requirement is None:
        return None
    status, reason = Status.EQUIVALENT, ""
    if not requirement.holds(case.figures):
        status, reason = Status.DIFFERENT, f"the rule {requirement.text!r} does not hold"
    judged_by = f"rule {requirement.text}"
    return case.rule_on_tensors(status, reason, judged_by=judged_by)


def _rule_on_exact_values(case: _PairCase) -> Ruling | None:
    if case.is_inexact:
        return None
    metrics = case.figures.metrics
    if metrics is None or metrics.mismatched == 0:  # the dtypes differ
        return case.rule_on_tensors(Status.IDENTICAL, judged_by="equality")
    reason = f"{metrics.mismatched} of {metrics.numel} values differ; they must be equal"
    return case.rule_on_tensors(Status.DIFFERENT, reason, judged_by="equality", settled=False)


def _rule_on_nonfinite_values(case: _PairCase) -> Ruling | None:
    metrics = case.figures.metrics
    if metrics is None or not metrics.nonfinite_mismatches:
        return None
    where = nonfinite_mismatch(*case.tensors)
    first = "" if where is None else f", the first at {where.nonzero()[0].tolist()}"
    count = f"{metrics.nonfinite_mismatches} of {metrics.numel} NaN/Inf positions differ"
    about: dict[str, Any] = {"judged_by": "positions of NaN and Inf", "settled": False}
    return case.rule_on_tensors(Status.DIFFERENT, f"{count}{first}", **about)


def _rule_on_noise(case: _PairCase) -> Ruling:
    noise, words = noise_of(*case.tensors)
    error_score = score(*case.tensors, case.figures, noise)
    about: dict[str, Any] = {
        "judged_by": f"noise of {words}",
        "score": error_score,
        "settled": False,
    }
    if error_score.passed:
        return case.rule_on_tensors(Status.EQUIVALENT, **about)
    reason = f"its error is {error_score.excess:.3g} times what the noise of {words} allows"
    return case.rule_on_tensors(Status.DIFFERENT, reason, **about)


_TENSOR_GATES = (
    _rule_on_trusted_digests,
    _rule_on_misfit,
    _rule_quickly,
    _rule_on_bits,
    _rule_by_requirement,
    _rule_on_exact_values,
    _rule_on_nonfinite_values,
)


def _find_misfit(candidate: Tensor, reference: Tensor, *, ours: bool) -> tuple[Aspect, str] | None:
    """Why the two cannot be compared element by element, or None."""
    if candidate.shape != reference.shape:
        squeezed = [[n for n in tensor.shape if n != 1] for tensor in (candidate, reference)]
        # Different tools add and drop dimensions of length 1.
        if ours or squeezed[0] != squeezed[1]:
            reason = f"shape {list(candidate.shape)} instead of {list(reference.shape)}"
            return Aspect.SHAPE, reason
    if ours and is_inexact(candidate) != is_inexact(reference):
        return Aspect.DTYPE, f"dtype {candidate.dtype} instead of {reference.dtype}"
    return None
