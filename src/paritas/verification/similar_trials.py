"""Two programs on other inputs than the given ones: how visible their difference is natively."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import torch

from paritas.core.execution.evidence import Evidence
from paritas.core.execution.item_evidence import ItemEvidence
from paritas.core.execution.observation import input_tensors
from paritas.core.execution.subject_runs import SubjectLift
from paritas.core.numerics import criterion
from paritas.core.numerics.automatic import FEW_RUNS, judge_floats, nonfinite_mismatch
from paritas.core.numerics.bits import dtype_name, is_inexact
from paritas.core.numerics.criterion import Noise, smallest_step, unit_roundoff
from paritas.core.results.findings import Aspect, Finding, Score, Verdict
from paritas.core.results.items import Item

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from paritas.core.execution.observation import Observation
    from paritas.core.execution.similar_inputs import SimilarCase
    from paritas.core.execution.subject_runs import SubjectProgram
    from paritas.core.execution.subjects import Inputs, Subject

# How far two programs may differ in float64, in multiples of the native noise: an element, and the
# root mean square of a tensor or a slice. A last bit is two roundings, and noise one to two.
MOST_Z, MOST_RMS = 4.0, 1.5
# Above this share of a limit, noise is measured, not only taken from the reference's own error.
NEAR = 0.5
# ... and results this many times larger than others, or they are all one value.
WIDE = 4.0
# Roundings of a native value that may hide a difference.
HIDDEN = 4.0
# A candidate may overflow where the true value is above this share of the dtype's largest.
NEAR_OVERFLOW = 0.25
# The candidate's own rounding excuses a difference that is well below it in float64.
EXCUSED = 0.6
# Perturbed runs can show more rounding than there is. A difference that is this many times what
# there is on both sides is not rounding.
SYSTEMATIC = 2.0
# Where the reference itself is natively off by more than this share, it says little.
LOST = 0.1
# Many devices and libraries make zeros of denormal float32 and bfloat16 numbers. Those of float16
# are as large as values that matter.
MOST_DENORMAL = 1e-30
_MOST_SHOWN = 3
# How much the factors of the elements may differ: an approximation of a function has one error
# here and another there, even where its arguments are close together.
SAME_FACTOR = 1e-3
ENOUGH_ELEMENTS = 8


@dataclasses.dataclass(frozen=True)
class Trial:
    """Both programs on other inputs.

    Attributes:
        case: the inputs.
        weights: how the weights were changed; empty if they were not.
        ratio: the largest figure as a multiple of its limit; above 1, it is visible.
        item: the item of that figure.
        index: where in the item.
        how: the figure in words.
        factor: the factor, less one, by which all elements are off in float64; 0 if there is none,
            None if it cannot be measured.
        is_native: the figure is that of the native run.
        is_weaker: visible, but only by the candidate's own rounding.
    """

    case: SimilarCase
    weights: str
    ratio: float
    item: Item
    index: tuple[int, ...] | None = None
    how: str = ""
    factor: float | None = None
    is_native: bool = False
    is_weaker: bool = False

    @property
    def is_visible(self) -> bool:
        """Whether the native run shows it."""
        return self.is_native and self.ratio > 1 and not self.is_weaker

    @property
    def kind(self) -> str:
        """What was changed."""
        return self.weights or f"inputs {self.case.name}"

    @property
    def words(self) -> str:
        """What shows it."""
        what = "visible natively" if self.is_native else "not as accurate as the reference"
        return f"{what} for {self.kind}: {self.how}, with {_ranges(self.case.inputs)}"


@dataclasses.dataclass(frozen=True)
class ProgramRuns:
    """Both programs natively; `mine` is what the candidate gave."""

    candidate: Subject
    evidence: Evidence[SubjectProgram]
    verdict: Verdict
    mine: Observation


class TrialJudge:
    """Judges one trial."""

    def __init__(self, run: ProgramRuns, case: SimilarCase, weights: str, seed: int) -> None:
        self.case, self.weights, self.seed = case, weights, seed
        self.candidate, self.evidence = run.candidate, run.evidence
        self.verdict, self.mine = run.verdict, run.mine
        self.lift = SubjectLift(self.evidence, run.candidate)
        self._mine: Evidence[SubjectProgram] | None = None

    def trial_to_show(self) -> Trial:
        """As `trial`, but what is not visible only guides the search: its noise is not measured."""
        native = self._native()
        if native.ratio > 1:
            return self.trial()
        return max(native, self._worst_lifted((), measures=False), key=lambda trial: trial.ratio)

    def trial(self) -> Trial:
        """The largest figure of the native values and of the difference in float64."""
        native = self._native()
        lifted = self._worst_lifted(())
        worst = max(native, lifted, key=lambda trial: trial.ratio)
        worst = dataclasses.replace(worst, factor=lifted.factor)
        if worst.ratio <= 1 or not self._may_be_weaker():
            return worst
        is_excused = (
            self._passes_with_own_noise() and self._worst_lifted((self._own(),)).ratio <= EXCUSED
        )
        return dataclasses.replace(worst, is_weaker=is_excused)

    def _make(self, ratio: float, item: Item, index: Any, how: str) -> Trial:
        return Trial(self.case, self.weights, ratio, item, index, how)

    def _native(self) -> Trial:
        failures = self.verdict.failures
        if failures:
            trial = self._make(math.inf, failures[0].item, None, _how_visible(failures[0]))
            return dataclasses.replace(trial, is_native=True)
        scores = [(f.native, f.item) for f in self.verdict.findings if f.native is not None]
        if not scores:
            return self._make(0.0, Item(), None, "")
        score, item = max(scores, key=lambda pair: pair[0].excess)
        return self._make(min(score.excess, 1.0), item, score.index, "")

    def _worst_lifted(
        self, also: Sequence[Evidence[SubjectProgram]], *, measures: bool = True
    ) -> Trial:
        """The largest difference in float64, as a multiple of what the native noise allows."""
        trials = [self._make(0.0, Item(), None, "")]
        for item, value in self.evidence.native[0].items():
            if is_inexact(value):
                trials.append(self._lifted_item(item, value, tuple(also), measures=measures))
        return max(trials, key=lambda trial: trial.ratio)

    def _lifted_item(
        self,
        item: Item,
        value: Tensor,
        also: tuple[Evidence[SubjectProgram], ...],
        *,
        measures: bool,
    ) -> Trial:
        about = ItemEvidence(self.evidence, item, lifted=self.lift, also=also)
        arbiter, lifted = about.arbiter(), about.lift_candidate()
        if arbiter is None or lifted is None:
            return self._make(math.inf, item, None, "it has no value in float64")
        candidate_value = self.mine.value(item)
        if candidate_value is None:  # gradients that a compiled program has in float64 only
            candidate_value = lifted.to(value.dtype)
        if candidate_value.shape != value.shape:
            return self._make(math.inf, item, None, "the candidate has no such value")
        factor = shared_factor(lifted, arbiter, value.dtype)
        arbiter, lifted = _as_native(arbiter, lifted, value, candidate_value)
        if nonfinite_mismatch(arbiter, lifted) is not None:
            return self._make(math.inf, item, None, "one side is not finite")
        accuracy = accuracy_of(value.dtype)
        unit = unit_roundoff(accuracy)
        noise = Noise(unit=unit, step=smallest_step(accuracy), inner=unit)
        if accuracy is value.dtype:
            own_noise = criterion.own_noise(value, arbiter)
            noise = dataclasses.replace(noise, own=own_noise, reference=value)
        score = criterion.score(lifted, arbiter, noise).score
        # Perturbed runs show noise that the reference's own error does not.
        if measures and _ratio(score) > NEAR:
            noise = dataclasses.replace(noise, spread=about.spread(unit, FEW_RUNS))
            score = criterion.score(lifted, arbiter, noise).score
        ratio, rms = _ratio(score), max(score.rms_z, score.slice_z or 0.0)
        how = (
            f"in float64 off by {score.max_z:.3g} times the noise of {dtype_name(accuracy)}, "
            f"{rms:.3g} times on average"
        )
        ratio = max(ratio, _systematic_units(arbiter, lifted, value, candidate_value) / MOST_Z)
        trial = self._make(ratio, item, score.index, how)
        return dataclasses.replace(trial, factor=factor)

    def _may_be_weaker(self) -> bool:
        """Whether the rounding of the candidate itself can be measured."""
        candidate, failures = self.candidate, self.verdict.failures
        return (
            not candidate.is_compiled
            and not candidate.is_foreign
            and all(finding.aspect is Aspect.VALUE for finding in failures)
        )

    def _own(self) -> Evidence[SubjectProgram]:
        if self._mine is None:
            program = dataclasses.replace(self.evidence.program, subject=self.candidate)
            self._mine = Evidence(program, seed=self.seed)
        return self._mine

    def _passes_with_own_noise(self) -> bool:
        """Whether the candidate's native values pass with the noise of its own rounding."""
        candidate_evidence = self._own()
        for finding in self.verdict.failures:
            item = finding.item
            left, right = (
                side.native[0].value(item) for side in (self.evidence, candidate_evidence)
            )
            if not is_inexact(left) or not is_inexact(right):
                return False
            about = ItemEvidence(self.evidence, item, also=(candidate_evidence,))
            right = _without_edges(left, right, about.arbiter())
            if nonfinite_mismatch(left, right) is not None:
                return False
            if not judge_floats(left, right, about).status.passes():
                return False
        return True


def accuracy_of(dtype: torch.dtype) -> torch.dtype:
    """The dtype whose accuracy an approximation must have: float32 for halves.

    Operators on halves compute in float32 inside, and what is less accurate than that is hidden by
    the rounding of results only, whatever it is: a bias of a tenth of a percent, for example.
    """
    return torch.float32 if dtype in {torch.float16, torch.bfloat16} else dtype


def _as_native(
    arbiter: Tensor, lifted: Tensor, value: Tensor, candidate_value: Tensor
) -> tuple[Tensor, Tensor]:
    """The two in float64, with a difference that is no larger than the native one.

    In float64, numbers inside of a program do not overflow, underflow or saturate where they do
    natively. A difference that a few roundings cannot hide is seen in the native values as well.
    """
    info = torch.finfo(value.dtype)
    outside = (arbiter.abs() > info.max) | ~torch.isfinite(value)
    outside |= _differ_below_normal(arbiter, lifted, value.dtype)
    reference_error, native = (
        (side.to(arbiter.device).to(arbiter.dtype) - arbiter).abs()
        for side in (value, candidate_value)
    )
    outside |= (reference_error > LOST * arbiter.abs()) & (native <= 2 * reference_error)
    lifted = torch.where(outside, arbiter, lifted)
    most = native + HIDDEN * unit_roundoff(value.dtype) * arbiter.abs()
    difference = lifted - arbiter
    size = difference.abs()
    shrunk = arbiter + difference * (most / size)
    return arbiter, torch.where((size > most) & torch.isfinite(shrunk), shrunk, lifted)


def _without_edges(left: Tensor, right: Tensor, arbiter: Tensor | None) -> Tensor:
    """The candidate as the reference where only the edge of the dtype's range is elsewhere.

    It overflows a little before the reference does, or has zero for a denormal number.
    """
    if arbiter is None or right.is_complex():
        return right
    near = arbiter.abs() > torch.finfo(left.dtype).max * NEAR_OVERFLOW
    early = right.isinf() & near & (right.signbit() == arbiter.signbit())
    return torch.where(early | _differ_below_normal(arbiter, right, left.dtype), left, right)


def _differ_below_normal(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """Where two differ by a denormal number, in a dtype that has hardly any use for such."""
    tiny = torch.finfo(dtype).tiny
    if tiny > MOST_DENORMAL:
        return torch.zeros_like(left, dtype=torch.bool)
    return (left - right).abs() < 2 * tiny


def _systematic_units(
    arbiter: Tensor, lifted: Tensor, value: Tensor, candidate_value: Tensor
) -> float:
    """The difference in float64, in unit roundoffs; 0 if the sides are rounded as much natively."""
    if value.numel() < ENOUGH_ELEMENTS:
        return 0.0

    def root_mean_square(values: Tensor) -> float:
        return float(values.abs().double().square().mean().sqrt())

    ours, candidate_values = (
        side.to(arbiter.device).to(arbiter.dtype) for side in (value, candidate_value)
    )
    rounding = max(root_mean_square(ours - arbiter), root_mean_square(candidate_values - lifted))
    difference, size = root_mean_square(lifted - arbiter), root_mean_square(arbiter)
    if not difference > SYSTEMATIC * rounding or size == 0:
        return 0.0
    return difference / (unit_roundoff(accuracy_of(value.dtype)) * size)


def shared_factor(lifted: Tensor, arbiter: Tensor, dtype: torch.dtype) -> float | None:
    """The factor, less one, that all elements share; 0 if they share none, None if all are zero.

    Values that are all about one value share one, whatever is wrong.
    """
    if lifted.is_complex():
        return None
    # Where numbers are denormal, each rounds by another factor.
    info, size = torch.finfo(dtype), arbiter.abs()
    usable = torch.isfinite(lifted) & (size > info.tiny) & (size < info.max)
    true = arbiter[usable].double()
    if not true.numel():
        return None
    is_narrow = len(true.unique()) < ENOUGH_ELEMENTS or true.abs().max() < WIDE * true.abs().min()
    if is_narrow and arbiter.numel() >= ENOUGH_ELEMENTS:
        return None
    shares = lifted[usable].double() / true - 1
    middle = float(shares.median())
    return middle if float((shares - middle).abs().max()) < SAME_FACTOR * abs(middle) else 0.0


def _ranges(inputs: Inputs) -> str:
    """The values of the first floating inputs, in words."""
    tensors = [
        (path, t) for path, t in input_tensors(inputs) if t.is_floating_point() and t.numel()
    ]
    ends = [(path, *(float(end) for end in t.detach().aminmax())) for path, t in tensors]
    shown = [f"{path} from {low:.3g} to {high:.3g}" for path, low, high in ends[:_MOST_SHOWN]]
    return ", ".join(shown) or "no floating inputs"


def _ratio(score: Score) -> float:
    return max(score.max_z / MOST_Z, max(score.rms_z, score.slice_z or 0.0) / MOST_RMS)


def _how_visible(finding: Finding) -> str:
    metrics, score = finding.metrics, finding.native
    if metrics is None or score is None or not math.isfinite(metrics.max_abs):
        return finding.reason
    return f"off by {metrics.max_abs:.3g} ({score.max_z:.3g} times the noise)"
