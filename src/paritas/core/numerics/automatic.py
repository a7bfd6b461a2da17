"""The automatic criterion: bits, then the lifted run, then the native run."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import msgspec
import torch

from paritas.core.numerics import criterion
from paritas.core.numerics.bits import are_surely_finite, dtype_name, is_inexact
from paritas.core.numerics.criterion import (
    OWN_SHARE,
    OWN_SHARE_SETTLED,
    UNIT_F32,
    UNIT_F64,
    Jumps,
    Noise,
    Scored,
    real_view,
)
from paritas.core.numerics.gates import ALL_GATES, OWN_RMS, Gate, own_error_score
from paritas.core.numerics.metrics import bitwise_equal, pair_metrics, promotable
from paritas.core.numerics.pooling import NO_NOISE, Pooled, pool, populations
from paritas.core.numerics.whole_error import WholeNoise, whole_error, whole_jumps
from paritas.core.results.findings import Score, Status
from paritas.core.results.items import Metrics
from paritas.core.results.wording import list_first

if TYPE_CHECKING:
    from collections.abc import Collection

    from torch import Tensor

    from paritas.core.numerics.judge_evidence import JudgeEvidence


# The lifted run checks meaning (both sides in float64, where rounding is far below any fault); the
# native run checks accuracy (the candidate's error to the arbiter over the reference's own). A run
# is made only if the cheaper ones before it do not decide.

# In the lifted run both sides round in float64, nine orders of magnitude below any real fault. So a
# measured spread gets a generous factor, and one scaled from the native error a larger one.
LIFTED_SLACK = 8.0
LIFTED_SLACK_SCALED = 64.0
# If only a dtype is known: noise of this many unit roundoffs of the value and of the typical value.
BLIND_NOISE = 4.0
# If rounding decides how many elements a value has, perturbed runs cannot be compared with it. What
# only a dtype tells is not enough to call it wrong: up to this many times that noise it is not.
RESHAPED_SLACK = 16.0
# A value has vanished if it is this much smaller than the reference's own error: only rounding is
# left, as after a sum that cancels. The size of that rounding depends on the terms and their order;
# a candidate that rounds elsewhere may have several times as much.
VANISHED = 1e-3
VANISHED_SLACK = 4.0
# `BLIND_NOISE` is at most this share of the value, or anything would pass in float8.
BLIND_SHARE = 2.0**-6
# Perturbed runs are expensive, so they are made one by one until it is certain, up to the error
# rate of the criterion, that a value passes or fails. One run measures the overall noise, a few
# measure it per element; a value that passes by the spread of either, or of the most, passes. A
# tie, which falls either way in every run, is missed by the most with a probability of 2^-12.
FEW_RUNS, MOST_RUNS = 3, 12
# A candidate may be this many times as far from the truth as the worst run of a reference that
# gives other bits in every run: twice its error is not a loss that anyone should look into.
REPEATED = 2.0
# One in 350 right candidates is further off than that from the worst of twelve runs, by a figure
# whose sign is chance. So one that is at most this many times over the limit is judged by more
# runs; of the most of them, one in 20,000 is.
NEAR_REPEATED, MOST_NEAR_RUNS = 2.0, 48
# A tie moves at most this share of the elements over the limit.
SPARSE = 0.05
# Pairs of runs that measure what decisions move: two to see whether anything moves, then one by one
# up to the most before a candidate fails. A decision that the candidate's rounding can flip flips
# in nearly every second pair. In a program without decisions, no further pair shows more than the
# first: a candidate that fails by far fails after it.
FEW_PAIRS, MOST_PAIRS = 2, 6
# Between the two, a value passes if it is this many times below its limit. What flips in the last
# of three pairs and in none of three more counts for 0.7 of that in the end.
SURE_BY_PAIRS = 2.0
# An error this many times the reference's own that passes by the spread alone is looked into: one
# decision that flips in perturbed runs makes the spread as large as its effect.
FAR_FROM_OWN = 8.0
_MOST_NAMED = 3
# An overflow is excused within this many eps of the dtype's largest value: the reach of MAX_Z.
MAX_EDGE_UNITS = 6.0


class Judgement(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The result for one pair of values, with its numbers."""

    status: Status
    reason: str = ""
    advice: str = ""
    metrics: Metrics | None = None
    native: Score | None = None
    lifted: Score | None = None


@dataclasses.dataclass(frozen=True)
class _FloatCase:
    """A pair and its evidence; `own` is the native error of the reference."""

    reference: Tensor
    candidate: Tensor
    arbiter: Tensor | None
    own: Pooled
    evidence: JudgeEvidence
    gates: Collection[Gate]


@dataclasses.dataclass(frozen=True)
class _RunOutcome:
    """The result of comparing one run."""

    scored: Scored
    passed: bool
    shaky: bool = False
    reason: str = ""
    spread: Tensor | None = None  # the spread that settled it
    by_decisions: bool = False  # passes only because decisions can move it


def judge_floats(
    reference: Tensor,
    candidate: Tensor,
    evidence: JudgeEvidence,
    gates: Collection[Gate] = ALL_GATES,
) -> Judgement:
    """Judge two floating or complex tensors of one shape.

    Args:
        reference: the reference's native result.
        candidate: the candidate's.
        evidence: further runs of both.
        gates: the gates it may pass by, before noise is measured.
    """
    same = bitwise_equal(reference, candidate)
    if same and not _hides_faults(reference, evidence):
        return Judgement(status=Status.IDENTICAL)
    metrics = None if same else pair_metrics(reference, candidate)
    arbiter, lifted = evidence.arbiter(), evidence.lift_candidate()
    own_error = NO_NOISE if arbiter is None else criterion.own_noise(reference, arbiter)
    case = _FloatCase(reference, candidate, arbiter, own_error, evidence, gates)
    above: _RunOutcome | None = None
    if arbiter is not None and lifted is not None:
        above = _judge_lifted(case, arbiter, lifted)
        if not above.passed:
            return Judgement(
                status=Status.DIFFERENT,
                reason=_lifted_reason(above, evidence.lift_unit, same_bits=same),
                metrics=metrics,
                lifted=above.scored.score,
            )
    lifted_score = above.scored.score if above else None
    if same or metrics is None:
        return Judgement(status=Status.IDENTICAL, lifted=lifted_score)
    settled = above is not None and not above.shaky
    if arbiter is not None and settled and Gate.OWN_ERROR in gates:
        like = own_error_score(candidate, reference, arbiter)
        if like.passed and metrics.nonfinite_mismatches == 0:
            # The meaning is settled and no accuracy is lost: there is no need to measure noise.
            return Judgement(
                status=Status.EQUIVALENT, metrics=metrics, native=like, lifted=lifted_score
            )
    native = _judge_native(case, metrics, above)
    if native.passed:
        native = _judge_whole(case, native, above)
    if not native.passed and metrics.nonfinite_mismatches == 0:
        native = _judge_by_repeats(case, native)
    status, reason = _conclude(native, above, evidence)
    return Judgement(
        status=status,
        reason=reason,
        metrics=metrics,
        native=native.scored.score,
        lifted=lifted_score,
    )


def _hides_faults(reference: Tensor, evidence: JudgeEvidence) -> bool:
    """Whether equal bits can hide a fault.

    Equal float32 bits cannot. Equal bfloat16 bits can hide a fault of 0.1 %, and so can a float32
    result computed from bfloat16 values, as under autocast.
    """
    if criterion.unit_roundoff(reference.dtype) > UNIT_F32:
        return True
    inside = evidence.coarsest()
    return inside is not None and inside > UNIT_F32


def judge_exact(reference: Tensor, candidate: Tensor, evidence: JudgeEvidence) -> Judgement:
    """Judge integers, bools and indices: equal, or undecided by the reference's own margin."""
    if bitwise_equal(reference, candidate):
        return Judgement(status=Status.IDENTICAL)
    reference, candidate = promotable(reference, candidate)
    metrics = pair_metrics(reference, candidate)
    if metrics.mismatched == 0:  # only the dtype differs, which is checked elsewhere
        return Judgement(status=Status.IDENTICAL, metrics=metrics)
    how_many = f"{metrics.mismatched} of {metrics.numel} values"
    arbiter, lifted = evidence.arbiter(), evidence.lift_candidate()
    meant_same = arbiter is not None and lifted is not None and bitwise_equal(arbiter, lifted)
    if evidence.unit is not None:
        undecided = evidence.find_undecided(candidate, evidence.unit)
        contested = reference != candidate
        if undecided is not None and bool(undecided[contested].all()):
            reason = f"{how_many} differ, each decided by the reference's own rounding"
            return Judgement(status=Status.UNSTABLE, reason=reason, metrics=metrics)
    if meant_same:
        reason = f"{how_many} differ beyond the reference's own margin, though not when lifted"
        return Judgement(status=Status.DEGRADED, reason=reason, metrics=metrics)
    reason = f"{how_many} differ; these values are exact"
    return Judgement(status=Status.DIFFERENT, reason=reason, metrics=metrics)


def _judge_lifted(case: _FloatCase, arbiter: Tensor, lifted: Tensor) -> _RunOutcome:
    evidence = case.evidence
    unit = evidence.lift_unit
    exact_inside = unit == UNIT_F64
    own_error = NO_NOISE if evidence.unit is None else case.own.times(unit / evidence.unit)
    mismatch = nonfinite_mismatch(arbiter, lifted)
    scaled = Noise(
        unit=unit,
        inner=unit,
        own=own_error,
        factor=LIFTED_SLACK_SCALED if exact_inside else 1.0,
        source="the reference's own error, scaled to float64",
    )
    scored = criterion.score(lifted, arbiter, scaled)
    passed = scored.score.passed and mismatch is None
    if passed and (Gate.SCALED_OWN_ERROR in case.gates or evidence.spread(unit, 1) is None):
        return _RunOutcome(scored, passed=True)
    if not passed and mismatch is None and _has_vanished(case):
        rest = _score_vanished(lifted, arbiter, scaled, evidence)
        if rest is not None and rest.score.passed:
            return _RunOutcome(rest, passed=True)
    measured = dataclasses.replace(
        scaled, factor=LIFTED_SLACK if exact_inside else 1.0, source="perturbed float64 runs"
    )
    run = _ComparedRun(lifted, arbiter, measured, mismatch, unit, evidence)
    return _judge_with_spread(run, scored, is_lifted=True)


def _score_vanished(
    lifted: Tensor, arbiter: Tensor, scaled: Noise, evidence: JudgeEvidence
) -> Scored | None:
    """Score what float64 leaves of a value that has vanished, by the noise of a native run.

    Rounding leaves few different numbers there, and often exactly 0: the reference's own error and
    the runs in float64 may show no noise by chance. A perturbed native run rounds more finely.
    """
    spread = None if evidence.unit is None else evidence.spread(evidence.unit, 1)
    if spread is None or evidence.unit is None or spread.shape != arbiter.shape:
        return None
    truth = real_view(arbiter)
    if arbiter.is_complex():
        spread = spread.unsqueeze(-1).expand_as(truth)
    own_error = pool(spread, truth, criterion.rms(spread)).times(scaled.unit / evidence.unit)
    noise = dataclasses.replace(scaled, own=own_error, source="a perturbed run, scaled to float64")
    return criterion.score(lifted, arbiter, noise)


def _judge_native(case: _FloatCase, metrics: Metrics, above: _RunOutcome | None) -> _RunOutcome:
    """`above` is the outcome of the lifted run, which passed, if there was one."""
    reference, candidate, arbiter = case.reference, case.candidate, case.arbiter
    evidence = case.evidence
    summed_unit = evidence.summed_unit
    unit = max(summed_unit, *(criterion.unit_roundoff(t.dtype) for t in (reference, candidate)))
    step = max(criterion.smallest_step(t.dtype) for t in (reference, candidate))
    truth = reference if arbiter is None else arbiter
    # A lifted run that is judged at the noise of the native one settles no more than that.
    is_settled = above is not None and not above.shaky and evidence.lift_unit < unit
    noise = Noise(
        unit=unit,
        step=step,
        # The terms of a sketch cancel as those inside of operators do.
        inner=max(summed_unit, min(unit, UNIT_F32)),
        # What is settled is only to be as accurate as the reference: like values, like errors.
        own=case.own.over_populations() if is_settled else case.own,
        own_share=OWN_SHARE_SETTLED if is_settled else OWN_SHARE,
        reference=None if arbiter is None else reference,
        # Whatever rounding in float64 decides, rounding in a narrower dtype decides too.
        spread=None if above is None else above.spread,
        sets_aside=above is not None,
        factor=_native_slack(case, above),
        source="the reference's own error" if arbiter is not None else "the dtype's last bit",
    )
    mismatch = nonfinite_mismatch(reference, candidate) if metrics.nonfinite_mismatches else None
    forgiven = False
    if mismatch is not None:
        excused = _excused_by_arbiter(reference, candidate, arbiter, mismatch)
        forgiven = bool(excused.any())
        mismatch = mismatch & ~excused
        mismatch = mismatch if bool(mismatch.any()) else None
    scored = criterion.score(candidate, truth, noise)
    passed = scored.score.passed and mismatch is None
    if passed and (Gate.KNOWN_NOISE in case.gates or not _has_spread(evidence)):
        reason = _overflow_reason(reference, candidate, arbiter) if forgiven else ""
        return _RunOutcome(scored, passed=True, shaky=forgiven, reason=reason)
    least = evidence.least_spread() if arbiter is not None else None
    with_least_spread = _with_least_spread(noise, least)
    passable = least is not None and mismatch is None and Gate.LEAST_SPREAD in case.gates
    if arbiter is not None and passable:
        outcome = _pass_by_least_spread(candidate, arbiter, with_least_spread)
        if outcome is not None:
            return outcome
    if evidence.unit is None or not _has_spread(evidence):
        if mismatch is not None:
            return _RunOutcome(scored, passed=False, reason=_nonfinite_reason(mismatch))
        return _judge_blindly(case, truth, noise, unit)
    where = "float64" if arbiter is not None else dtype_name(reference.dtype)
    noise = dataclasses.replace(with_least_spread, source=f"perturbed {where} runs")
    run = _ComparedRun(candidate, truth, noise, mismatch, evidence.unit, evidence)
    outcome = _judge_with_spread(run, scored)
    if outcome.passed and forgiven:
        reason = _overflow_reason(reference, candidate, arbiter)
        return dataclasses.replace(outcome, shaky=True, reason=reason)
    return outcome


def _judge_blindly(case: _FloatCase, truth: Tensor, noise: Noise, unit: float) -> _RunOutcome:
    """Judge by what the dtype tells about noise, because none could be measured."""
    relative, source = _blind_noise(unit, case.reference.dtype, case.evidence)
    noise = dataclasses.replace(noise, relative=relative, factor=1.0, source=source)
    scored = criterion.score(case.candidate, truth, noise)
    if scored.score.passed or not case.evidence.may_have_shape(case.candidate.shape):
        return _RunOutcome(scored, passed=scored.score.passed)
    noise = dataclasses.replace(noise, relative=min(RESHAPED_SLACK * relative, BLIND_SHARE))
    wider = criterion.score(case.candidate, truth, noise)
    fault = fault_in_float64(case.evidence)
    if not wider.score.passed or fault is None or fault:
        return _RunOutcome(scored, passed=False, reason=fault or "")
    reason = "the reference's own rounding decides how large this value is: its noise is unknown"
    return _RunOutcome(scored, passed=True, shaky=True, reason=reason)


def fault_in_float64(evidence: JudgeEvidence) -> str | None:
    """How the two differ in float64, whatever their native shape; empty if not, None if unknown."""
    pair = evidence.wide_pair()
    if pair is None:
        return None
    arbiter, lifted = pair
    if not is_inexact(arbiter) or not is_inexact(lifted):
        return "" if bitwise_equal(arbiter, lifted) else "other values in float64"
    if evidence.spread(evidence.lift_unit, 1) is None:
        return None
    case = _FloatCase(arbiter, lifted, arbiter, NO_NOISE, evidence, ())
    outcome = _judge_lifted(case, arbiter, lifted)
    return "" if outcome.passed else _lifted_reason(outcome, evidence.lift_unit, same_bits=False)


def _native_slack(case: _FloatCase, above: _RunOutcome | None) -> float:
    """The factor of the native run's noise."""
    if case.arbiter is None:
        return 2.0  # the reference is itself off by as much as the candidate may be
    return VANISHED_SLACK if above is not None and _has_vanished(case) else 1.0


def _has_vanished(case: _FloatCase) -> bool:
    """Whether the arbiter is mere rounding: far smaller than the error of the native run.

    Chance may leave exactly 0 of such a value, which shows no error. Perturbed runs do.
    """
    if case.arbiter is None:
        return False
    noise, size = case.own.whole, criterion.rms(case.arbiter)
    if not bool(case.reference.any()) and case.evidence.unit is not None:
        spread = case.evidence.spread(case.evidence.unit, 1)
        noise = noise if spread is None else max(noise, criterion.rms(spread))
    return size < VANISHED * noise


def _has_spread(evidence: JudgeEvidence) -> bool:
    return evidence.unit is not None and evidence.spread(evidence.unit, 1) is not None


def _with_least_spread(noise: Noise, least: Tensor | None) -> Noise:
    """Add a lower bound of the spread, known without a run, to the noise."""
    if least is None:
        return noise
    spread = least if noise.spread is None else torch.maximum(least, noise.spread)
    return dataclasses.replace(noise, spread=spread)


def _pass_by_least_spread(candidate: Tensor, arbiter: Tensor, noise: Noise) -> _RunOutcome | None:
    """A pass by the lower bound of the spread alone, or None if perturbed runs are needed.

    More noise makes every z smaller, so perturbed runs could not turn this pass into a failure.
    They add information only where rounding decides values, and are made there.
    """
    if noise.own.whole > criterion.KNIFE_EDGE_SHARE * criterion.rms(arbiter):
        return None
    noise = dataclasses.replace(noise, source="the rounding of its last sum alone")
    scored = criterion.score(candidate, arbiter, noise)
    settled = scored.score.passed and not scored.knife_edges
    return _RunOutcome(scored, passed=True) if settled else None


def blind_share(unit: float) -> float:
    """The share of a value assumed to be noise if only the unit roundoff is known."""
    return min(BLIND_NOISE * unit, BLIND_SHARE)


def _blind_noise(unit: float, dtype: torch.dtype, evidence: JudgeEvidence) -> tuple[float, str]:
    """The share of a value assumed to be noise if none could be measured, and its source.

    A float32 result of a program that rounds to bfloat16 inside is only as good as bfloat16.
    """
    inside = 0.0 if evidence.unit is None else evidence.unit
    named = dtype_name(dtype) if inside <= unit else f"a unit roundoff of {inside:.2g}"
    return blind_share(max(unit, inside)), f"{named} alone, without a program to measure: weak"


@dataclasses.dataclass(frozen=True)
class _ComparedRun:
    """Both sides of one run, with what is known of its noise.

    Attributes:
        noise: a spread in it is a lower bound.
        mismatch: where one side alone is not finite; None if nowhere.
        unit: the unit roundoff of the perturbed runs that measure its noise.
    """

    candidate: Tensor
    truth: Tensor
    noise: Noise
    mismatch: Tensor | None
    unit: float
    evidence: JudgeEvidence


def _judge_with_spread(
    run: _ComparedRun, before: Scored, *, is_lifted: bool = False
) -> _RunOutcome:
    """Score again with the measured spread, run by run, until the outcome is certain."""
    candidate, noise, mismatch = run.candidate, run.noise, run.mismatch
    truth, unit, evidence = run.truth, run.unit, run.evidence
    outcome = _RunOutcome(before, passed=False)
    runs = 0
    while runs < MOST_RUNS:
        spread = evidence.spread(unit, runs + 1)
        runs = max(runs + 1, evidence.runs_made(unit))  # other items may have caused more
        if spread is None:
            reason = "" if mismatch is None else _nonfinite_reason(mismatch)
            return dataclasses.replace(outcome, reason=reason)
        if noise.spread is not None:
            spread = torch.maximum(spread, noise.spread)
        scored = criterion.score(candidate, truth, dataclasses.replace(noise, spread=spread))
        # An infinite spread marks places where rounding decides whether a value is finite.
        mismatch_in_run = (
            None if mismatch is None else mismatch & torch.isfinite(spread).to(mismatch.device)
        )
        if mismatch_in_run is not None and bool(mismatch_in_run.any()):
            outcome = _RunOutcome(scored, passed=False, reason=_nonfinite_reason(mismatch_in_run))
        else:
            decided = mismatch is not None or scored.knife_edges > 0
            is_last_word = runs in {1, FEW_RUNS, MOST_RUNS} or outcome.scored is before
            sure = 1.0 if is_last_word else criterion.most_shown(runs, criterion.ERROR_RATE)
            passed = scored.score.passed and scored.score.excess * sure <= 1
            outcome = _RunOutcome(scored, passed, shaky=passed and decided, spread=spread)
        if outcome.passed:
            break
        if criterion.may_still_pass(scored.score, candidate.shape, runs):
            continue
        is_sparse = scored.over <= SPARSE * candidate.numel()
        is_finite = not outcome.reason
        if not is_sparse or (is_finite and evidence.is_smooth):
            break  # nothing here falls either way
        if not is_lifted and is_finite and _has_pairs(evidence, unit):
            break  # if it is a tie, pairs of runs show it
    # A lifted run ends here: jumps are measured for the native run only.
    settled = outcome.passed and not outcome.scored.knife_edges
    settled = settled and not _is_far_from_own(candidate, truth, noise)
    if settled or is_lifted or outcome.reason or outcome.spread is None:
        return outcome
    measured = dataclasses.replace(noise, spread=outcome.spread)
    return _judge_with_jumps(dataclasses.replace(run, noise=measured), outcome)


def _has_pairs(evidence: JudgeEvidence, unit: float) -> bool:
    return evidence.jumps(unit, 1 if evidence.is_smooth else FEW_PAIRS) is not None


def _judge_with_jumps(run: _ComparedRun, before: _RunOutcome) -> _RunOutcome:
    """Score again, with what decisions within rounding can move.

    A gate that flips moves a gradient by its own size, and no spread predicts that: few perturbed
    runs flip this gate. If the noise is as large as a value that passed, this distinguishes a
    decision from a sum that cancels to mere rounding.
    """
    candidate, noise, mismatch = run.candidate, run.noise, run.mismatch
    truth, unit, evidence = run.truth, run.unit, run.evidence
    outcome = before
    for pairs in range(1 if evidence.is_smooth else FEW_PAIRS, MOST_PAIRS + 1):
        jumps = evidence.jumps(unit, pairs)
        if jumps is None:
            # Without pairs of runs, large noise is not known to be a decision. A gradient may have
            # either of its values at one; any other value is reported.
            is_excused = evidence.is_gradient and mismatch is None
            return dataclasses.replace(before, shaky=before.shaky and not is_excused)
        scored = criterion.score(candidate, truth, dataclasses.replace(noise, jumps=jumps))
        sure = 1.0 if pairs in {FEW_PAIRS, MOST_PAIRS} else SURE_BY_PAIRS
        passed = scored.score.passed and scored.score.excess * sure <= 1 and pairs >= FEW_PAIRS
        reason = ""
        if passed:
            reason = _unexplained_reason(candidate, truth, noise, jumps, last=pairs == MOST_PAIRS)
            passed = not reason
        decided = mismatch is not None or (scored.knife_edges > 0 and not evidence.is_gradient)
        outcome = _RunOutcome(
            scored if passed else before.scored,
            passed,
            shaky=passed and decided,
            reason=reason,
            spread=noise.spread,
            by_decisions=passed and (decided or not before.passed),
        )
        if passed:
            break
        if evidence.is_smooth and not criterion.may_still_pass(
            scored.score, candidate.shape, pairs
        ):
            break
    return outcome


def _judge_whole(case: _FloatCase, outcome: _RunOutcome, above: _RunOutcome | None) -> _RunOutcome:
    """Judge the error as a whole, after every element has passed."""
    evidence, arbiter = case.evidence, case.arbiter
    is_shaky = outcome.shaky or (above is not None and above.shaky)
    if arbiter is None or evidence.unit is None or is_shaky:
        return outcome
    candidate_error, noise = (
        whole_error(case.candidate, arbiter),
        _whole_noise(case, arbiter, above),
    )
    # No factor is larger than the error itself.
    if candidate_error is None or noise is None or candidate_error.size <= OWN_RMS * noise.own.size:
        return outcome
    runs, excess = 0, noise.excess(candidate_error, last=False)
    least = evidence.least_spread() if excess.worst > 1 else None
    if least is not None:
        noise = dataclasses.replace(noise, least=criterion.relative_rms(least, arbiter))
        excess = noise.excess(candidate_error, last=False)
    while excess.worst > 1 and runs < MOST_RUNS:
        spread = evidence.spread(evidence.unit, runs + 1)
        runs = max(runs + 1, evidence.runs_made(evidence.unit))
        run_errors = evidence.whole_errors(evidence.unit)
        if spread is None or not run_errors:
            return outcome
        noise = dataclasses.replace(noise, runs=run_errors)
        excess = noise.excess(candidate_error, last=runs >= MOST_RUNS)
    if excess.worst > 1 and not evidence.is_smooth:
        jumps = evidence.jumps(evidence.unit, MOST_PAIRS)
        if jumps is None:
            return outcome
        noise = dataclasses.replace(noise, jumps=whole_jumps(jumps, arbiter))
        excess = noise.excess(candidate_error, last=True)
    if excess.worst <= 1:
        return outcome
    return dataclasses.replace(outcome, passed=False, reason=noise.reason(candidate_error, excess))


def _judge_by_repeats(case: _FloatCase, outcome: _RunOutcome) -> _RunOutcome:
    """Judge by further native runs of a reference that gives other bits in each of them.

    Perturbed runs do not foresee what atomic additions and races do. A right candidate is one more
    run of such a reference: it may be as far from the truth as the worst of them, by every figure.
    """
    if not case.evidence.repeats(1):
        return outcome
    reference, candidate = case.reference, case.candidate
    truth = reference if case.arbiter is None else case.arbiter
    dtypes = reference.dtype, candidate.dtype
    noise = Noise(
        unit=max(map(criterion.unit_roundoff, dtypes)),
        step=max(map(criterion.smallest_step, dtypes)),
        spread=outcome.spread,
        source="further runs of the reference, which gives other bits in each",
    )
    scored, figures = _distances(candidate, truth, noise)
    worst, excess = [0.0] * len(figures), 0.0
    for runs in range(1, MOST_NEAR_RUNS + 1):
        if runs > MOST_RUNS and excess > NEAR_REPEATED:
            break
        repeats = case.evidence.repeats(runs)
        if len(repeats) < runs or repeats[-1].shape != reference.shape:
            break  # it always gives the same bits
        worst = list(map(max, worst, _distances(repeats[-1], truth, noise)[1]))
        excess = max(map(_excess, figures, worst))
        if excess <= 1:
            return _RunOutcome(scored, passed=True, spread=outcome.spread)
    return outcome


def _excess(figure: float, worst: float) -> float:
    """How many times a figure is over the limit that the worst of the repeated runs sets."""
    limit = REPEATED * worst
    return 0.0 if figure <= limit else figure / limit if limit else math.inf


def _distances(value: Tensor, truth: Tensor, noise: Noise) -> tuple[Scored, list[float]]:
    """How far a value is from the truth: at worst, typically, in one slice, and as a whole."""
    scored, error_as_whole = criterion.score(value, truth, noise), whole_error(value, truth)
    score = scored.score
    share = (score.slice_z or 0.0) / (score.slice_limit or 1.0)
    sizes = (
        [math.inf, math.inf]
        if error_as_whole is None
        else [error_as_whole.size, abs(error_as_whole.factor)]
    )
    return scored, [score.max_z, score.rms_z, share, *sizes]


def _whole_noise(case: _FloatCase, arbiter: Tensor, above: _RunOutcome | None) -> WholeNoise | None:
    """What is known about the error of a whole before any run is made."""
    reference_error = whole_error(case.reference, arbiter)
    if reference_error is None:
        return None
    dtypes = {case.reference.dtype, case.candidate.dtype}
    rounding = max(case.evidence.unit or 0.0, *map(criterion.unit_roundoff, dtypes))
    step, least = max(map(criterion.smallest_step, dtypes)), populations(real_view(arbiter)).least
    return WholeNoise(
        own=reference_error,
        rounding=rounding + (step / least if least else 0.0),
        numel=arbiter.numel(),
        cuts=not (case.reference.is_cpu and case.candidate.is_cpu),
        slack=_native_slack(case, above),
    )


def _is_far_from_own(candidate: Tensor, truth: Tensor, noise: Noise) -> bool:
    """Whether an error is far above the reference's own."""
    if noise.reference is None:
        return False
    wide = truth.to(torch.complex128 if truth.is_complex() else torch.float64)
    reference_error, error = (
        criterion.relative_rms(side.to(wide.device) - wide, truth)
        for side in (noise.reference, candidate)
    )
    return error > FAR_FROM_OWN * max(reference_error, noise.unit)


def _unexplained_reason(
    candidate: Tensor, truth: Tensor, noise: Noise, jumps: Jumps, *, last: bool
) -> str:
    """Why the error of a value that decisions can move is not an effect of them; empty if it is.

    Few pairs must explain it as well as they usually explain each other. After the last pairs, it
    may be as unusual as any of them.
    """
    if jumps.pairs is None or candidate.is_complex():
        return ""
    rest = criterion.measure_unexplained(candidate, truth, jumps.pairs)
    if rest is None:
        return ""
    reference_error = 0.0
    if noise.reference is not None:
        reference_error = criterion.relative_rms(noise.reference.double() - truth, truth)
    limit = criterion.RMS_Z * max(reference_error, noise.unit, rest.most if last else rest.usual)
    if rest.error <= limit:
        return ""
    return (
        "decisions within rounding move it, but not like this: what remains is "
        f"{rest.error / limit:.3g} times what they leave unexplained"
    )


def nonfinite_mismatch(left: Tensor, right: Tensor) -> Tensor | None:
    """Where the two differ in being NaN, +Inf, -Inf or finite; None if nowhere."""
    if left.is_complex() or right.is_complex():
        parts = (
            nonfinite_mismatch(left.real, right.real),
            nonfinite_mismatch(left.imag, right.imag),
        )
        part_mismatches = [part for part in parts if part is not None]
        return torch.stack(part_mismatches).any(dim=0) if part_mismatches else None
    right = right.to(left.device)
    if left.dtype.itemsize == 1 or right.dtype.itemsize == 1:  # float8 lacks the operators
        left, right = left.float(), right.float()
    if are_surely_finite(left, right):
        return None
    differ = (
        (left.isnan() != right.isnan())
        | (left.isposinf() != right.isposinf())
        | (left.isneginf() != right.isneginf())
    )
    return differ if bool(differ.any()) else None


def _excused_by_arbiter(
    reference: Tensor, candidate: Tensor, arbiter: Tensor | None, mismatch: Tensor
) -> Tensor:
    """Where only one of reference and candidate overflows, and the arbiter is finite.

    A finite candidate is then scored like any other value. A candidate that is not finite is
    excused if the reference is not finite either, or if the true value is at the edge of the
    dtype's range.
    """
    if arbiter is None or candidate.is_complex():
        return torch.zeros_like(mismatch)
    candidate = candidate.to(reference.device)
    finite_arbiter = torch.isfinite(arbiter)
    finite_candidate = torch.isfinite(candidate) & finite_arbiter
    both_left = ~torch.isfinite(reference) & ~torch.isfinite(candidate) & finite_arbiter
    info = torch.finfo(candidate.dtype)
    at_the_edge = arbiter.abs() >= info.max * (1 - MAX_EDGE_UNITS * info.eps)
    right_sign = candidate.isinf() & (candidate.signbit() == arbiter.signbit())
    return mismatch & (finite_candidate | both_left | (at_the_edge & right_sign))


def _conclude(
    native: _RunOutcome, above: _RunOutcome | None, evidence: JudgeEvidence
) -> tuple[Status, str]:
    if native.passed:
        turned = _describe_open(evidence.open_decisions()) if native.by_decisions else ""
        if native.reason:
            return Status.UNSTABLE, native.reason
        if native.shaky or (above is not None and above.shaky):
            reason = "the reference's own rounding decides this value"
            why = turned or _describe_knife_edges(native.scored)
            return Status.UNSTABLE, f"{reason}: {why}" if why else reason
        return Status.EQUIVALENT, turned
    excess = native.scored.score.excess
    by = native.reason or f"its error is {excess:.3g} times what the reference's own noise allows"
    if above is not None:
        return Status.DEGRADED, f"the same function when lifted, but natively {by}"
    return Status.DIFFERENT, by


def _describe_knife_edges(scored: Scored) -> str:
    if not scored.knife_edges:
        return ""
    share = f"{criterion.KNIFE_EDGE_SHARE:.0%}"
    return f"it moves {scored.knife_edges:,} of its elements by more than {share} of their size"


def _describe_open(decisions: dict[str, tuple[int, int]]) -> str:
    """The number of decisions that rounding can flip, in words."""
    parts = [
        f"{turned:,} of {total:,} {name}"
        for name, (turned, total) in sorted(decisions.items())
        if turned
    ]
    if not parts:
        return "a decision within a few roundings of its threshold changes it"
    return (
        f"{list_first(parts, _MOST_NAMED)} decisions are within a few roundings of their threshold"
    )


def _lifted_reason(outcome: _RunOutcome, unit: float, *, same_bits: bool) -> str:
    if outcome.reason:
        return f"{outcome.reason}, also in float64"
    excess = outcome.scored.score.excess
    how = "where rounding is negligible" if unit <= UNIT_F64 else "judged at float32 noise"
    reason = f"in float64, {how}, it is {excess:.2g} times over its limit"
    return f"{reason} (the bits of the native results agree on this input)" if same_bits else reason


def _overflow_reason(reference: Tensor, candidate: Tensor, arbiter: Tensor | None) -> str:
    """One side overflows, and the true value is finite; or it is what the candidate's is."""
    left, right = (int((~torch.isfinite(side)).sum()) for side in (reference, candidate))
    sides = (
        f"{left} of {reference.numel()} values of the reference and {right} of the candidate are "
        "not finite"
    )
    lost = 0 if arbiter is None else int((~torch.isfinite(arbiter)).sum())
    if lost:
        return f"{sides}, and {lost} in float64, where they are those of the candidate"
    return f"overflow of {dtype_name(reference.dtype)}: {sides}; in float64 they are finite"


def _nonfinite_reason(mismatch: Tensor) -> str:
    where = [int(i) for i in mismatch.nonzero()[0]]
    total = mismatch.numel()
    return f"{int(mismatch.sum())} of {total} NaN/Inf positions differ, the first at {where}"
