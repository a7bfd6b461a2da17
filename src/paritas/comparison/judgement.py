"""One pair: read both sides, measure, and judge what two values alone can show."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from paritas.comparison.operands import (
    are_other_bits,
    as_read,
    describe_side,
    read_value,
    same_digest,
    with_extremes,
)
from paritas.comparison.summaries import judge_summaries, summary_of
from paritas.errors import ParitasError, UsageError
from paritas.numerics import criterion
from paritas.numerics.automatic import BLIND_NOISE, BLIND_SHARE, nonfinite_mismatch
from paritas.numerics.bits import dtype_name, is_inexact
from paritas.numerics.criterion import Noise
from paritas.numerics.gates import bound_score
from paritas.numerics.pair_figures import pair_figures, quick_figures
from paritas.results.figures import PairFigures
from paritas.results.findings import Aspect, Score, Status

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from paritas.comparison.operands import Operand, Pair
    from paritas.comparison.summaries import SideSummary, SummaryJudgement
    from paritas.dumps.opening import ReadableDump
    from paritas.files.records import Record
    from paritas.numerics.requirements import Requirement
    from paritas.results.comparisons import SideFacts


# --- The noise of a dtype -------------------------------------------------------------------------


def noise_of(reference: Tensor, candidate: Tensor) -> tuple[Noise, str]:
    """The noise to be allowed, and what it is the noise of, in words.

    Where the golden side is of higher precision it is the arbiter, and the noise is mine alone.
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
        relative=min(BLIND_NOISE * max(units), BLIND_SHARE),
        source=f"{words}, by the dtype alone: weak",
    )
    return noise, words


def score(reference: Tensor, candidate: Tensor, figures: PairFigures, noise: Noise) -> Score:
    """The candidate's error in multiples of that noise; from the figures alone where they do."""
    metrics, golden = figures.metrics, figures.reference
    found = None
    if metrics is not None and metrics.rel_l2 and math.isfinite(metrics.rel_l2):
        ends = [abs(end) for end in (golden.minimum, golden.maximum) if end is not None]
        found = bound_score(
            metrics.max_abs,
            metrics.rmse,
            metrics.rmse / metrics.rel_l2,
            noise,
            largest=max(ends, default=0.0),
            numel=metrics.numel,
            index=metrics.max_abs_index,
        )
    if found is None:
        mine, truth = (
            tensor if is_inexact(tensor) else tensor.double() for tensor in (candidate, reference)
        )
        found = criterion.score(mine, truth, noise).score
    return found


# --- The pair -------------------------------------------------------------------------------------

# What the values were computed from is asked afterwards, by `attributing`: a difference that is
# over the limit here may have come in with the inputs.

# An argument that one tool writes as a number and the other as a tensor is no longer than this.
_LONGEST_VALUE = 64
BY_DIGEST = "digests only: data that was damaged after it was recorded is not seen"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """What two values alone show.

    Attributes:
        settled: nothing that is known of the program could change the status: identical bits, a
            structure that does not fit, a rule of the user's, a side that cannot be read.
        my: facts of that side, with its extremes.
        golden: likewise.
        nbytes: bytes of values that were compared.
        distance: |my - golden| / |golden|, as far as it is known.
    """

    status: Status
    settled: bool
    my: SideFacts | None
    golden: SideFacts | None
    aspect: Aspect = Aspect.VALUE
    reason: str = ""
    advice: str = ""
    judged_by: str = ""
    limits: str = ""
    figures: PairFigures | None = None
    score: Score | None = None
    nbytes: int = 0
    distance: float | None = None


@dataclasses.dataclass(frozen=True)
class _PairCase:
    """Two operands with their dumps.

    Attributes:
        trusts: whether what the dumps say of their bytes is believed.
    """

    my: Operand
    golden: Operand
    my_dump: ReadableDump
    golden_dump: ReadableDump
    my_facts: SideFacts
    golden_facts: SideFacts
    trusts: bool = False

    def my_values(self) -> Tensor:
        """The values of my side, which fit their checksums."""
        return self.my.read(self._reader(self.my_dump))

    def golden_values(self) -> Tensor:
        """Those of the golden side."""
        return self.golden.read(self._reader(self.golden_dump))

    def _reader(self, dump: ReadableDump) -> Callable[[Record], Tensor]:
        return functools.partial(dump.view, check=not self.trusts)

    def measured(self, status: Status, *, settled: bool = True, **rest: Any) -> Measured:
        sides = {"my": self.my_facts, "golden": self.golden_facts}
        return Measured(status=status, settled=settled, **(sides | rest))


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

    Whatever goes wrong with it is told as its status; the other pairs go on. With `quick`, a pair
    that surely passes is told by the few figures that show it. With `trust_digests`, values of
    equal digests are not read, and what is read is not held against its checksum.
    """
    if pair.my is None or pair.golden is None:
        return _without_counterpart(pair, my.kind, golden.kind)
    sides = describe_side(pair.my, my.kind), describe_side(pair.golden, golden.kind)
    case = _PairCase(pair.my, pair.golden, my, golden, *sides, trusts=trust_digests)
    try:
        if pair.my.record.is_summary or pair.golden.record.is_summary:
            return _judge_by_summaries(case)
        if not (sides[0].dtype and sides[1].dtype):
            return _plain_values(case)
        if _has_values(pair.my) and _has_values(pair.golden):
            return _judge_tensors(case, requirement, quick=quick and requirement is None)
        return _judge_by_summaries(case)
    except (ParitasError, OSError, RuntimeError, ValueError) as error:
        # Replicas that should be one and the same, and are not.
        if getattr(error, "is_difference", False):
            return case.measured(Status.DIFFERENT, aspect=Aspect.STRUCTURE, reason=str(error))
        return case.measured(Status.UNVERIFIED, aspect=Aspect.HARNESS, reason=str(error))


def _without_counterpart(pair: Pair, my_kind: str, golden_kind: str) -> Measured:
    missing, present = ("my", "golden") if pair.my is None else ("golden", "my")
    near = f"; nearest there: {', '.join(pair.nearest)}" if pair.nearest else ""
    return Measured(
        status=Status.UNVERIFIED,
        settled=True,
        my=None if pair.my is None else describe_side(pair.my, my_kind),
        golden=None if pair.golden is None else describe_side(pair.golden, golden_kind),
        aspect=Aspect.STRUCTURE,
        reason=f"only the {present} side has it: nothing of the {missing} side matches{near}",
        advice="say with a rename rule what it is called there, or leave it out with --ignore",
    )


def _plain_values(case: _PairCase) -> Measured:
    """Numbers, lists and words; one side may have written a number as a tensor."""
    mine = _as_text(case.my, case.my_values, case.my_facts)
    golden = _as_text(case.golden, case.golden_values, case.golden_facts)
    if mine is None or golden is None:
        return case.measured(
            Status.UNVERIFIED,
            aspect=Aspect.HARNESS,
            reason="a side has no values that could be read; the problems of its dump say why",
        )
    same = mine == golden or _same_value(mine, golden)
    return case.measured(
        Status.IDENTICAL if same else Status.DIFFERENT,
        reason="" if same else f"{mine} instead of {golden}",
        judged_by="equality",
    )


def _as_text(operand: Operand, values: Callable[[], Tensor], side: SideFacts) -> str | None:
    if side.value is not None or (not side.dtype and operand.record.payload is None):
        return side.value
    found = values()  # or else the reason why that cannot be
    return repr(found.tolist()) if found.numel() <= _LONGEST_VALUE else None


def _same_value(left: str, right: str) -> bool:
    """Whether two texts stand for one value: tools quote and bracket differently."""
    try:
        values = [_normalize_plain(read_value(text)) for text in (left, right)]
    except UsageError:
        return False
    if all(isinstance(value, float) and math.isnan(value) for value in values):
        return True
    return bool(values[0] == values[1])


def _normalize_plain(value: Any) -> Any:
    """A dtype that was written as a string is a dtype; a tuple is as good as a list."""
    if isinstance(value, str):
        with contextlib.suppress(UsageError):
            return read_value(value)
    if isinstance(value, list | tuple):
        return [_normalize_plain(item) for item in value]
    return value


def _has_values(operand: Operand) -> bool:
    return all(record.payload is not None for record in operand.records())


# --- values ---------------------------------------------------------------------------------------


def _judge_tensors(case: _PairCase, requirement: Requirement | None, *, quick: bool) -> Measured:
    same = same_digest(case.my, case.golden)
    if same and case.trusts:
        return _by_digest(case, "digest, data not read")
    reference = case.golden_values()
    if same:
        # Once both sides fit the digest that they share, one look at the values is enough.
        case.my_dump.verify(case.my.record)
    candidate = reference if same else case.my_values()
    misfit = _find_misfit(candidate, reference, ours=case.my_dump.kind == case.golden_dump.kind)
    if misfit is not None:
        aspect, reason = misfit
        return case.measured(
            Status.DIFFERENT,
            aspect=aspect,
            reason=reason,
            judged_by="shape and dtype",
            my=msgspec.structs.replace(case.my_facts, shape=tuple(candidate.shape)),
            golden=msgspec.structs.replace(case.golden_facts, shape=tuple(reference.shape)),
        )
    limits = ""
    if candidate.shape != reference.shape:
        limits = "the shapes differ by dimensions of length 1"
        candidate = candidate.reshape(reference.shape)
    if quick:
        found = _judge_quickly(case, reference, candidate, limits)
        if found is not None:
            return found
    figures = pair_figures(reference, candidate)
    facts: dict[str, Any] = {
        "my": as_read(case.my_facts, candidate, figures.candidate),
        "golden": as_read(case.golden_facts, reference, figures.reference),
        "figures": figures,
        "nbytes": candidate.nbytes + reference.nbytes,
        "limits": limits,
        "distance": 0.0 if figures.metrics is None else figures.metrics.rel_l2,
    }
    if figures.identical:
        return case.measured(Status.IDENTICAL, judged_by="bits", **facts)
    if requirement is not None:
        facts |= _by_rule(requirement, figures)
    elif not (is_inexact(reference) or is_inexact(candidate)):
        facts |= _judge_exact(figures)
    else:
        facts |= _judge_floats(reference, candidate, figures)
    return case.measured(**facts)


def _judge_quickly(
    case: _PairCase, reference: Tensor, candidate: Tensor, limits: str
) -> Measured | None:
    """What a cheap pass settles: the same bits, or a difference well within the noise."""
    found = quick_figures(reference, candidate)
    facts: dict[str, Any] = {
        "my": as_read(case.my_facts, candidate),
        "golden": as_read(case.golden_facts, reference),
        "figures": PairFigures(identical=found.identical, quick=found),
        "nbytes": candidate.nbytes + reference.nbytes,
        "limits": limits,
        "distance": found.rel_l2,
    }
    if found.identical:
        return case.measured(Status.IDENTICAL, judged_by="bits", **facts)
    if not (is_inexact(reference) or is_inexact(candidate)):
        return None
    noise, words = noise_of(reference, candidate)
    passes = None
    if not found.nonfinite_mismatches:
        passes = bound_score(found.max_abs, found.rmse, found.rms_reference, noise)
    if passes is None:
        return None
    facts |= {"score": passes, "judged_by": f"noise of {words}", "settled": False}
    return case.measured(Status.EQUIVALENT, **facts)


def _find_misfit(candidate: Tensor, reference: Tensor, *, ours: bool) -> tuple[Aspect, str] | None:
    """Why the two cannot be compared element by element."""
    if candidate.shape != reference.shape:
        squeezed = [[n for n in tensor.shape if n != 1] for tensor in (candidate, reference)]
        # Two tools drop and add dimensions of length 1 as their layouts want it.
        if ours or squeezed[0] != squeezed[1]:
            reason = f"shape {list(candidate.shape)} instead of {list(reference.shape)}"
            return Aspect.SHAPE, reason
    if ours and is_inexact(candidate) != is_inexact(reference):
        return Aspect.DTYPE, f"dtype {candidate.dtype} instead of {reference.dtype}"
    return None


def _by_rule(requirement: Requirement, figures: PairFigures) -> dict[str, Any]:
    holds = requirement.holds(figures)
    return {
        "status": Status.EQUIVALENT if holds else Status.DIFFERENT,
        "reason": "" if holds else f"the rule {requirement.text!r} does not hold",
        "judged_by": f"rule {requirement.text}",
        "settled": True,
    }


def _judge_exact(figures: PairFigures) -> dict[str, Any]:
    metrics = figures.metrics
    if metrics is None or metrics.mismatched == 0:  # of another dtype
        return {"status": Status.IDENTICAL, "judged_by": "equality", "settled": True}
    return {
        "status": Status.DIFFERENT,
        "reason": f"{metrics.mismatched} of {metrics.numel} values differ; these are exact",
        "judged_by": "equality",
        "settled": False,
    }


def _judge_floats(reference: Tensor, candidate: Tensor, figures: PairFigures) -> dict[str, Any]:
    metrics = figures.metrics
    if metrics is not None and metrics.nonfinite_mismatches:
        where = nonfinite_mismatch(reference, candidate)
        first = "" if where is None else f", the first at {where.nonzero()[0].tolist()}"
        count = f"{metrics.nonfinite_mismatches} of {metrics.numel} NaN/Inf positions differ"
        return {
            "status": Status.DIFFERENT,
            "reason": f"{count}{first}",
            "judged_by": "positions of NaN and Inf",
            "settled": False,
        }
    noise, words = noise_of(reference, candidate)
    found = score(reference, candidate, figures, noise)
    reason = f"its error is {found.excess:.3g} times what the noise of {words} allows"
    return {
        "status": Status.EQUIVALENT if found.passed else Status.DIFFERENT,
        "reason": "" if found.passed else reason,
        "judged_by": f"noise of {words}",
        "score": found,
        "settled": False,
    }


# --- what is left of values -----------------------------------------------------------------------


def _judge_by_summaries(case: _PairCase) -> Measured:
    shapes = [case.my_facts.shape, case.golden_facts.shape]
    if None not in shapes and shapes[0] != shapes[1]:
        reason = f"shape {list(shapes[0] or ())} instead of {list(shapes[1] or ())}"
        return case.measured(Status.DIFFERENT, aspect=Aspect.SHAPE, reason=reason)
    if same_digest(case.my, case.golden):
        return _same_digests(case)
    mine, golden, found = _summarize_and_judge(case)
    if found.status is Status.IDENTICAL and are_other_bits(case.my, case.golden):
        reason = "the digests differ, and nothing else that is recorded does"
        found = dataclasses.replace(found, status=Status.EQUIVALENT, reason=reason)
    has_sketches = mine.sketch is not None and golden.sketch is not None
    return case.measured(
        found.status,
        reason=found.reason,
        limits=found.limits,
        judged_by="sketch" if has_sketches else "statistics",
        distance=found.distance,
        settled=found.status in {Status.IDENTICAL, Status.UNVERIFIED},
        my=with_extremes(case.my_facts, mine.statistics),
        golden=with_extremes(case.golden_facts, golden.statistics),
    )


def _same_digests(case: _PairCase) -> Measured:
    """Digests of ours that are equal, of values that were not stored."""
    figures = (case.my.record.statistics, case.golden.record.statistics)
    if None not in figures and not case.trusts:
        _, _, found = _summarize_and_judge(case)
        if found.status is Status.DIFFERENT:
            reason = f"the digests are equal, and yet {found.reason}: a dump is damaged"
            return case.measured(Status.UNVERIFIED, aspect=Aspect.HARNESS, reason=reason)
    return _by_digest(case, "digest, data not stored")


def _summarize_and_judge(case: _PairCase) -> tuple[SideSummary, SideSummary, SummaryJudgement]:
    mine = summary_of(case.my, case.my_dump, case.my_values)
    golden = summary_of(case.golden, case.golden_dump, case.golden_values)
    unit = _coarser_unit((case.my_facts.dtype, mine), (case.golden_facts.dtype, golden))
    return mine, golden, judge_summaries(mine, golden, unit)


def _by_digest(case: _PairCase, judged_by: str) -> Measured:
    return case.measured(Status.IDENTICAL, judged_by=judged_by, limits=BY_DIGEST, distance=0.0)


def _coarser_unit(*sides: tuple[str, SideSummary]) -> float:
    """The unit roundoff of the coarser side; of a side whose dtype is not known, what it may be.

    Exact numbers on one side are exact numbers on the other.
    """
    known = [_unit_of_dtype(name) for name, _ in sides if name]
    if 0.0 in known and len(known) < len(sides):
        return 0.0
    return max([*known, *(_least_unit(summary) for name, summary in sides if not name)])


def _least_unit(summary: SideSummary) -> float:
    """That of float16 where its ends are such numbers, else that of float32."""
    ends = (summary.statistics.minimum, summary.statistics.maximum)
    found = torch.tensor([end for end in ends if end is not None], dtype=torch.float64)
    is_half = found.numel() > 0 and found.half().double().equal(found)
    return criterion.unit_roundoff(torch.float16) if is_half else criterion.UNIT_F32


def _unit_of_dtype(name: str) -> float:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        return criterion.UNIT_F32  # a name of another tool's; it keeps its figures in float32
    return criterion.unit_roundoff(dtype) if dtype.is_floating_point or dtype.is_complex else 0.0
