"""What a gate passes the full rule passes; and what a gate that is not sound gives up."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

from drawing import normal64
from paritas.core.numerics import criterion
from paritas.core.numerics.automatic import (
    BLIND_NOISE,
    LIFTED_SLACK,
    LIFTED_SLACK_SCALED,
    judge_floats,
)
from paritas.core.numerics.criterion import OWN_SHARE_SETTLED, RMS_Z, UNIT_F32, UNIT_F64, Noise
from paritas.core.numerics.gates import (
    GROSS_SHAKES,
    MARGIN,
    MOST_LEARNED,
    Gate,
    LearntNoise,
    bound_score,
    gross_difference,
    half_the_digits_agree,
    near_in_float64,
    near_natively,
    own_error_score,
)
from paritas.core.numerics.judge_evidence import NoEvidence
from paritas.core.numerics.pair_figures import pair_figures, quick_figures
from paritas.core.numerics.pooling import MOST_SAMPLE
from paritas.core.results.findings import Status

SHAPES = st.sampled_from([(1,), (7,), (40,), (4, 5), (3, 4, 6)])
SEEDS = st.integers(0, 2**32 - 1)
SIZES = st.floats(-3.0, 3.0).map(lambda exponent: 10.0**exponent)


class Runs(NoEvidence):
    """Runs whose results are known beforehand."""

    unit = UNIT_F32

    def __init__(
        self,
        arbiter: Tensor,
        spread: Tensor,
        least: Tensor | None = None,
        off: Tensor | None = None,
    ) -> None:
        self.asked = 0
        self._arbiter, self._spread, self._least = arbiter, spread, least
        self._lifted = arbiter if off is None else arbiter + off

    def arbiter(self) -> Tensor:
        return self._arbiter

    def lift_candidate(self) -> Tensor:
        return self._lifted

    def spread(self, unit: float, runs: int) -> Tensor:
        self.asked += 1
        return self._spread * (unit / self.unit)

    def least_spread(self) -> Tensor | None:
        return self._least


class LiftedRuns(NoEvidence):
    """The same about lifted runs, which have no arbiter of their own."""

    unit = UNIT_F64

    def __init__(self, spread: Tensor) -> None:
        self._spread = spread

    def spread(self, unit: float, runs: int) -> Tensor:
        return self._spread


def normal(generator: torch.Generator, shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


@st.composite
def programs(draw: st.DrawFn) -> tuple[Tensor, Tensor, Runs]:
    """A reference, a candidate off by some noise or much more, and what noise runs would show."""
    generator = torch.Generator().manual_seed(draw(SEEDS))
    shape = draw(SHAPES)
    truth = normal(generator, shape)
    # Noise that differs from element to element, and is heavy in the tails.
    spread = UNIT_F32 * draw(SIZES) * normal(generator, shape).abs().pow(draw(st.floats(0.0, 3.0)))
    reference = truth + UNIT_F32 * draw(SIZES) * normal(generator, shape)
    candidate = truth + draw(SIZES) * spread.add(UNIT_F32) * normal(generator, shape)
    least = spread * torch.rand(shape, generator=generator, dtype=torch.float64)
    off = UNIT_F64 * draw(SIZES) * normal(generator, shape)
    return reference.float(), candidate.float(), Runs(truth, spread, least, off)


# --- of the rule itself ---------------------------------------------------------------------------


@given(programs(), st.sampled_from([Gate.KNOWN_NOISE, Gate.LEAST_SPREAD]))
def test_what_a_gate_of_known_noise_passes_the_full_rule_passes(program, gate):
    if judge_floats(*program, gates={gate}).status.passes():
        assert judge_floats(*program, gates=()).status.passes()


@given(programs())
def test_what_the_full_rule_passes_no_gate_refuses(program):
    if judge_floats(*program, gates=()).status.passes():
        assert judge_floats(*program).status.passes()


@pytest.mark.parametrize(
    ("gate", "candidate_off", "own", "least"),
    [
        (Gate.OWN_ERROR, 1.0, 1.0, None),
        (Gate.KNOWN_NOISE, 1.0, 1.0, None),
        (Gate.LEAST_SPREAD, 30.0, 1.0, 20.0),
    ],
)
def test_a_gate_spares_the_perturbed_runs_of_the_native_run(gate, candidate_off, own, least):
    generator = torch.Generator().manual_seed(0)
    truth = normal(generator, (500,))
    near = UNIT_F32 * normal(generator, (500,))
    spread = torch.full_like(truth, 20 * UNIT_F32)
    pair = (truth + own * near).float(), (truth - candidate_off * near).float()
    known = None if least is None else torch.full_like(truth, least * UNIT_F32)
    runs = Runs(truth, spread, known)
    lifted = Gate.SCALED_OWN_ERROR
    assert judge_floats(*pair, runs, {lifted, gate}).status is Status.EQUIVALENT
    assert runs.asked == 0
    assert judge_floats(*pair, runs, {lifted}).status is Status.EQUIVALENT
    assert runs.asked > 0


@given(programs())
def test_by_its_own_errors_the_whole_passes_in_the_mean_square(program):
    reference, candidate, runs = program
    truth = runs.arbiter()
    if not own_error_score(candidate, reference, truth).passed:
        return
    own = criterion.own_noise(reference, truth).over_populations()
    noise = Noise(unit=UNIT_F32, own=own, own_share=OWN_SHARE_SETTLED, reference=reference)
    assert criterion.score(candidate, truth, noise).score.rms_z <= RMS_Z


def test_by_its_own_errors_a_worst_error_in_another_place_passes():
    truth = torch.ones(10_000, dtype=torch.float64)
    typical = 2 * UNIT_F32 * torch.randn(10_000, generator=torch.Generator().manual_seed(0))
    reference, candidate = (truth + typical).float(), (truth - typical).float()
    reference[0] = 1.0 + 2e-5
    candidate[1] = 1.0 + 2e-5
    runs = Runs(truth, typical.abs().double())
    assert judge_floats(reference, candidate, runs).status is Status.EQUIVALENT
    without = judge_floats(reference, candidate, runs, set(Gate) - {Gate.OWN_ERROR})
    assert without.status is Status.DEGRADED


@given(programs())
def test_by_the_scaled_error_a_lifted_run_passes_that_passes_by_as_much_spread(program):
    reference, _, runs = program
    truth, lifted = runs.arbiter(), runs.lift_candidate()
    own = criterion.own_noise(reference, truth).times(UNIT_F64 / UNIT_F32)
    scaled = Noise(unit=UNIT_F64, own=own, factor=LIFTED_SLACK_SCALED)
    if not criterion.score(lifted, truth, scaled).score.passed:
        return
    floors = criterion.NoiseFloors.of(truth, scaled).at(truth, truth.abs())
    as_much = LIFTED_SLACK_SCALED / LIFTED_SLACK * (UNIT_F64 * truth.abs() / 2 + floors)
    measured = Noise(unit=UNIT_F64, own=own, spread=as_much, factor=LIFTED_SLACK)
    assert criterion.score(lifted, truth, measured).score.passed


# --- few roundings, or far too many ---------------------------------------------------------------


@given(programs())
def test_a_few_roundings_of_float64_are_within_eight_times_the_noise_of_its_dtype(program):
    _, _, runs = program
    truth, lifted = runs.arbiter(), runs.lift_candidate()
    noise = Noise(unit=UNIT_F64, relative=BLIND_NOISE * UNIT_F64, factor=8.0)
    if near_in_float64(truth, lifted):
        assert criterion.score(lifted, truth, noise).score.passed


@given(programs())
def test_what_is_near_natively_passes_by_its_dtype_or_by_the_mean_square_of_its_errors(program):
    reference, candidate, runs = program
    truth = runs.arbiter()
    if near_natively(reference, candidate, truth) is not Status.EQUIVALENT:
        return
    by_dtype = Noise(unit=UNIT_F32, relative=BLIND_NOISE * UNIT_F32)
    own = Noise(
        unit=UNIT_F32,
        own=criterion.own_noise(reference, truth).over_populations(),
        own_share=OWN_SHARE_SETTLED,
    )
    assert (
        criterion.score(candidate, truth, by_dtype).score.passed
        or criterion.score(candidate, truth, own).score.rms_z <= RMS_Z
    )


@given(programs(), st.floats(-6.0, 2.0))
def test_what_is_gross_the_full_rule_refuses(program, exponent):
    _, _, runs = program
    truth = runs.arbiter()
    generator = torch.Generator().manual_seed(1)
    split = truth + 10.0**exponent * normal(generator, tuple(truth.shape)).pow(5)
    spread = runs.spread(UNIT_F64, 1)
    if gross_difference(truth, split, lambda: GROSS_SHAKES * criterion.rms(spread)) is not None:
        assert judge_floats(truth, split, LiftedRuns(spread), gates=()).status is Status.DIFFERENT


@given(SHAPES, SEEDS, st.integers(0, 20))
def test_what_is_near_in_float64_is_never_gross(shape, seed, digits):
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randn(shape, generator=generator, dtype=torch.float64)
    split = whole + 10.0**-digits * torch.randn(shape, generator=generator, dtype=torch.float64)
    gross = gross_difference(whole, split, lambda: 0.0)
    assert not (near_in_float64(whole, split) and gross)
    assert gross_difference(whole, split, lambda: None) is None


def test_a_fault_of_one_in_a_million_is_not_near_and_one_in_a_hundred_is_gross():
    whole = torch.linspace(1, 2, 50, dtype=torch.float64)
    assert near_in_float64(whole, whole * (1 + 8 * UNIT_F64))
    assert not near_in_float64(whole, whole * (1 + 1e-6))
    assert gross_difference(whole, whole * (1 + 1e-6), lambda: 0.0) is None
    assert gross_difference(whole, whole * 1.01, lambda: 1e-9) == (
        "in float64, where rounding is negligible, it is off by 0.01 times the typical value"
    )


# --- what earlier calls taught --------------------------------------------------------------------

SIZES_OF_NOISE = st.tuples(*[st.floats(0.0, 100.0)] * 3)


@given(st.lists(SIZES_OF_NOISE, max_size=5), SIZES_OF_NOISE)
def test_experience_explains_what_is_within_its_margin_and_nothing_else(learnt, later):
    known = LearntNoise()
    for sizes in learnt:
        known.learn("y", sizes, sizes)
    for explains, most in (
        (known.explains_difference, learnt),
        (known.explains_errors, [sizes for sizes in learnt if max(sizes) <= MOST_LEARNED]),
    ):
        limits = [MARGIN * max(sizes) for sizes in zip(*most, strict=True)]
        within = bool(limits) and all(a <= b for a, b in zip(later, limits, strict=True))
        assert explains("y", later) == within
        assert not explains("another", later)


# --- figures of the whole pair --------------------------------------------------------------------


@given(SHAPES, SEEDS, SIZES, st.floats(0.0, 4.0), st.sampled_from([0.0, 1e-6]))
def test_a_bound_of_the_score_says_what_the_score_says(shape, seed, size, tails, step):
    generator = torch.Generator().manual_seed(seed)
    reference = normal(generator, shape)
    noise = Noise(unit=UNIT_F32, step=step, relative=BLIND_NOISE * UNIT_F32)
    tail = normal(generator, shape).abs().pow(tails)
    candidate = reference + size * UNIT_F32 * tail * normal(generator, shape)
    figures, quick = pair_figures(reference, candidate), quick_figures(reference, candidate)
    metrics, golden = figures.metrics, figures.reference
    if metrics is None:
        return
    passes = criterion.score(candidate, reference, noise).score.passed
    scale = metrics.rmse / metrics.rel_l2
    largest = max(abs(golden.minimum), abs(golden.maximum))
    bound = bound_score(
        metrics.max_abs, metrics.rmse, scale, noise, largest=largest, numel=metrics.numel
    )
    assert bound is None or bound.passed == passes
    sure = bound_score(quick.max_abs, quick.rmse, quick.rms_reference, noise)
    assert sure is None or (sure.passed and passes)


def test_a_bound_of_the_score_is_had_of_most_pairs():
    reference = torch.ones(100, dtype=torch.float64)
    noise = Noise(unit=UNIT_F32, relative=BLIND_NOISE * UNIT_F32)
    for off, passes in ((UNIT_F32, True), (1e3 * UNIT_F32, False)):
        bound = bound_score(off, off, 1.0, noise, largest=1.0, numel=100)
        assert bound is not None
        assert bound.passed == passes
    assert bound_score(1e3, 1e3, 1.0, noise) is None, "without the largest nothing is refused"
    assert criterion.score(reference + UNIT_F32, reference, noise).score.passed


def test_half_of_the_digits_are_half_of_the_digits():
    assert half_the_digits_agree(UNIT_F32**0.5, UNIT_F32)
    assert not half_the_digits_agree(2 * UNIT_F32**0.5, UNIT_F32)


# --- tensors that are larger than a sample --------------------------------------------------------


def large_product(noise: float, seed: int) -> torch.Tensor:
    """A product in bfloat16, of whose elements some are smaller than all of a sample."""
    inputs, other = normal64(64, 1500), normal64(64, 1500, seed=1)
    inputs = inputs * (1 + noise * normal64(64, 1500, seed=seed))
    product = inputs.T @ other
    return product.bfloat16() if noise else product


def test_a_large_candidate_that_is_as_accurate_as_the_reference_passes():
    arbiter, reference = large_product(0, 0), large_product(2e-3, 2)
    assert arbiter.numel() > MOST_SAMPLE
    score = own_error_score(large_product(1.9e-3, 3), reference, arbiter)
    assert score.passed, score
    assert score.rms_z < 1.05  # before, single elements without noise made it hundreds


@pytest.mark.parametrize("times", [2.0, 10.0])
def test_a_large_candidate_that_is_less_accurate_does_not(times):
    arbiter, reference = large_product(0, 0), large_product(2e-3, 2)
    assert not own_error_score(large_product(times * 2e-3, 3), reference, arbiter).passed


def test_values_far_below_all_of_a_sample_do_not_have_its_noise():
    arbiter, reference = large_product(0, 0), large_product(2e-3, 2)
    candidate = large_product(1.9e-3, 3)
    for value, tensor in ((1e-30, arbiter), (1e-30, reference), (1e-3, candidate)):
        tensor.view(-1)[1:5] = value  # between the elements of the sample
    assert not own_error_score(candidate, reference, arbiter).passed
