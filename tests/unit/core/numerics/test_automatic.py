from __future__ import annotations

import math
import os

import pytest
import torch

from drawing import normal64
from paritas.core.numerics.automatic import MOST_RUNS, judge_exact, judge_floats
from paritas.core.numerics.criterion import UNIT_F32, UNIT_F64, Jumps
from paritas.core.numerics.judge_evidence import NoEvidence
from paritas.core.numerics.whole_error import whole_error
from paritas.core.results.findings import Status

WHOLE = bool(os.environ.get("PARITAS_WHOLE_CORPUS"))
NAN, INF = math.nan, math.inf
U_BF16 = 2.0**-8
NO_PROGRAM = NoEvidence()


class Program(NoEvidence):
    """Evidence as the test wants it, which counts what is asked of it.

    The spread is that of float32 runs; one for another unit is scaled from it.
    """

    def __init__(
        self,
        arbiter=None,
        lifted=None,
        *,
        spread=None,
        thorough=None,
        undecided=None,
        unit=UNIT_F32,
        lift_unit=UNIT_F64,
        jumps=None,
        pairs=None,
        is_gradient=False,
        decisions=(),
    ):
        self._arbiter, self._lifted = arbiter, lifted
        self._spread = spread
        self._thorough = spread if thorough is None else thorough
        self._undecided = undecided
        self.unit = unit
        self.lift_unit = lift_unit
        self.is_gradient = is_gradient
        self._jumps, self._pairs = jumps, pairs
        self._decisions = dict(decisions)
        self.asked = []
        self.pairs_asked = []

    def arbiter(self):
        self.asked.append("arbiter")
        return self._arbiter

    def lift_candidate(self):
        self.asked.append("lifted")
        return self._lifted

    def spread(self, unit, runs):
        self.asked.append("thorough spread" if runs == MOST_RUNS else "spread")
        given = self._thorough if runs == MOST_RUNS else self._spread
        return None if given is None else given * (unit / self.unit)

    def jumps(self, unit, pairs):
        self.asked.append("jumps")
        self.pairs_asked.append(pairs)
        return None if self._jumps is None else Jumps(self._jumps, self._jumps > 0, self._pairs)

    def open_decisions(self):
        return self._decisions

    def find_undecided(self, candidate, unit):
        self.asked.append("undecided")
        return self._undecided


def rounded(truth, units=2.0, dtype=torch.float32, seed=1):
    """`truth` as a program in `dtype` gives it: off by `units` roundings of the typical value."""
    unit = torch.finfo(dtype).eps / 2
    return (truth + units * unit * truth.square().mean().sqrt() * like(truth, seed)).to(dtype)


def like(tensor, seed):
    return normal64(*tensor.shape, seed=seed)


TRUTH = normal64(32, 32)
SPREAD = torch.full_like(TRUTH, 2 * UNIT_F32)


# --- bits -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64])
def test_equal_bits_are_identical_and_nothing_is_asked(dtype):
    x = TRUTH.to(dtype)
    program = Program(TRUTH, TRUTH + 1)
    assert judge_floats(x, x.clone(), program).status is Status.IDENTICAL
    assert program.asked == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_equal_narrow_bits_are_identical_if_the_lifted_run_agrees(dtype):
    x = TRUTH.to(dtype)
    program = Program(TRUTH, TRUTH + 1e-15, unit=U_BF16)
    assert judge_floats(x, x.clone(), program).status is Status.IDENTICAL
    assert judge_floats(x, x.clone(), NO_PROGRAM).status is Status.IDENTICAL


def test_equal_narrow_bits_hide_no_fault_from_the_lifted_run():
    x = TRUTH.to(torch.bfloat16)
    program = Program(TRUTH, TRUTH * (1 + 1e-5), unit=U_BF16, spread=torch.full_like(TRUTH, U_BF16))
    judgement = judge_floats(x, x.clone(), program)
    assert judgement.status is Status.DIFFERENT
    assert judgement.reason.startswith("in float64, where rounding is negligible, it is ")
    assert judgement.reason.endswith(
        " times over its limit (the bits of the native results agree on this input)"
    )


def test_zeros_of_either_sign_are_equivalent():
    plus = torch.zeros(4)
    assert judge_floats(plus, -plus, NO_PROGRAM).status.passes()


# --- meaning and accuracy -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "unit"),
    [(torch.float32, UNIT_F32), (torch.bfloat16, U_BF16), (torch.float16, 2**-11)],
)
def test_rounding_is_equivalent(dtype, unit):
    reference, candidate = (rounded(TRUTH, dtype=dtype, seed=seed) for seed in (1, 2))
    spread = torch.full_like(TRUTH, 2 * unit)
    program = Program(TRUTH, TRUTH + 1e-16 * like(TRUTH, 3), spread=spread, unit=unit)
    judgement = judge_floats(reference, candidate, program)
    assert judgement.status is Status.EQUIVALENT
    assert judgement.reason == ""
    assert judgement.native.passed
    assert judgement.lifted.passed
    assert judgement.metrics.mismatched > 0


def test_a_candidate_more_accurate_than_the_reference_is_equivalent():
    program = Program(TRUTH, TRUTH, spread=SPREAD)
    judgement = judge_floats(rounded(TRUTH, units=100), TRUTH.float(), program)
    assert judgement.status is Status.EQUIVALENT


def test_the_same_function_with_fifty_times_the_noise_is_degraded():
    reference, candidate = rounded(TRUTH), rounded(TRUTH, units=100, seed=2)
    judgement = judge_floats(reference, candidate, Program(TRUTH, TRUTH, spread=SPREAD))
    assert judgement.status is Status.DEGRADED
    assert judgement.reason.startswith("the same function when lifted, but natively its error is ")
    assert not judgement.native.passed
    assert judgement.native.noise == "perturbed float64 runs"
    assert judgement.lifted.passed


def test_one_bad_row_of_the_same_function_is_degraded():
    candidate = rounded(TRUTH, seed=2)
    candidate[7] += 3e-5
    judgement = judge_floats(rounded(TRUTH), candidate, Program(TRUTH, TRUTH, spread=SPREAD))
    assert judgement.status is Status.DEGRADED


@pytest.mark.parametrize("fault", [1e-9, 1e-6, 1.0])
def test_another_function_is_different_however_close_its_native_bits_are(fault):
    program = Program(TRUTH, TRUTH * (1 + fault), spread=SPREAD)
    judgement = judge_floats(rounded(TRUTH), rounded(TRUTH, seed=2), program)
    assert judgement.status is Status.DIFFERENT
    assert not judgement.lifted.passed
    assert judgement.native is None


def test_a_fault_in_one_element_of_the_lifted_run_is_different():
    lifted = TRUTH.clone()
    lifted[3, 4] += 1e-6
    judgement = judge_floats(
        rounded(TRUTH), rounded(TRUTH, seed=2), Program(TRUTH, lifted, spread=SPREAD)
    )
    assert judgement.status is Status.DIFFERENT
    assert judgement.lifted.index == (3, 4)


def test_a_lifted_run_that_may_be_float32_inside_is_judged_at_float32():
    lifted = TRUTH + 2e-7 * like(TRUTH, 3)
    reference, candidate = rounded(TRUTH), rounded(TRUTH, seed=2)
    exact = Program(TRUTH, lifted, spread=SPREAD)
    inside = Program(TRUTH, lifted, spread=SPREAD, lift_unit=UNIT_F32)
    assert judge_floats(reference, candidate, exact).status is Status.DIFFERENT
    assert judge_floats(reference, candidate, inside).status is Status.EQUIVALENT
    wrong = Program(TRUTH, TRUTH * 1.001, spread=SPREAD, lift_unit=UNIT_F32)
    assert judge_floats(reference, candidate, wrong).status is Status.DIFFERENT


def test_without_a_lifted_run_too_large_an_error_is_different():
    reference, candidate = rounded(TRUTH), rounded(TRUTH, units=100, seed=2)
    judgement = judge_floats(reference, candidate, Program(TRUTH, None, spread=SPREAD))
    assert judgement.status is Status.DIFFERENT
    assert judgement.lifted is None


@pytest.mark.parametrize("scale", [2.0**-60, 1e-4, 1e3, 2.0**60])
@pytest.mark.parametrize(
    ("units", "fault", "expected"),
    [(2, 0.0, Status.EQUIVALENT), (100, 0.0, Status.DEGRADED), (2, 1e-6, Status.DIFFERENT)],
)
def test_rescaling_a_program_changes_no_verdict(scale, units, fault, expected):
    program = Program(TRUTH * scale, TRUTH * (1 + fault) * scale, spread=SPREAD * scale)
    reference = rounded(TRUTH * scale)
    candidate = rounded(TRUTH * scale, units=units, seed=2)
    assert judge_floats(reference, candidate, program).status is expected


# --- NaN and infinity -----------------------------------------------------------------------------


def test_a_candidate_that_is_finite_and_right_where_the_reference_is_nan_is_unstable():
    reference, candidate = rounded(TRUTH), rounded(TRUTH, seed=2)
    reference[0, 5] = NAN
    judgement = judge_floats(reference, candidate, Program(TRUTH, TRUTH, spread=SPREAD))
    assert judgement.status is Status.UNSTABLE
    assert judgement.reason == (
        "overflow of float32: 1 of 1024 values of the reference and 0 of the candidate "
        "are not finite; in float64 they are finite"
    )


def test_an_infinity_that_float64_has_as_well_is_not_called_finite_there():
    reference, candidate, truth = rounded(TRUTH), rounded(TRUTH, seed=2), TRUTH.clone()
    reference[0, 5], candidate[0, 5], truth[0, 5] = -math.inf, math.inf, math.inf  # 1 / relu(-0.0)
    judgement = judge_floats(reference, candidate, Program(truth, truth, spread=SPREAD))
    assert judgement.status is Status.UNSTABLE
    assert judgement.reason == (
        "1 of 1024 values of the reference and 1 of the candidate are not finite, and 1 in "
        "float64, where they are those of the candidate"
    )


def test_a_candidate_that_is_finite_and_wrong_where_the_reference_is_nan_fails():
    reference, candidate = rounded(TRUTH), rounded(TRUTH, seed=2)
    reference[0, 5], candidate[0, 5] = NAN, 7.0
    judgement = judge_floats(reference, candidate, Program(TRUTH, TRUTH, spread=SPREAD))
    assert judgement.status is Status.DEGRADED


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_candidate_that_is_not_finite_where_the_reference_is_fails(bad):
    reference, candidate = rounded(TRUTH), rounded(TRUTH, seed=2)
    candidate[0, 5] = bad
    same = judge_floats(reference, candidate, Program(TRUTH, TRUTH, spread=SPREAD))
    assert same.status is Status.DEGRADED
    assert "1 of 1024 NaN/Inf positions differ, the first at [0, 5]" in same.reason
    lifted = TRUTH.clone()
    lifted[0, 5] = bad
    other = judge_floats(reference, candidate, Program(TRUTH, lifted, spread=SPREAD))
    assert other.status is Status.DIFFERENT
    assert other.reason == (
        "1 of 1024 NaN/Inf positions differ, the first at [0, 5], also in float64"
    )
    assert judge_floats(reference, candidate, NO_PROGRAM).status is Status.DIFFERENT


def test_the_same_nans_on_both_sides_are_equivalent():
    truth, reference, candidate = TRUTH.clone(), rounded(TRUTH), rounded(TRUTH, seed=2)
    for tensor in (truth, reference, candidate):
        tensor[2], tensor[3, 0] = NAN, -INF
    judgement = judge_floats(reference, candidate, Program(truth, truth.clone(), spread=SPREAD))
    assert judgement.status is Status.EQUIVALENT


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("overflows", ["reference", "candidate"])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_an_overflow_at_the_edge_of_the_dtype_is_unstable(dtype, overflows, sign):
    info = torch.finfo(dtype)
    truth = torch.linspace(1.0, 2.0, 64, dtype=torch.float64) * info.max / 8
    truth[9] = sign * info.max * (1 + info.eps / 5)
    reference = truth.clamp(-info.max, info.max).to(dtype)
    candidate = reference.clone()
    (reference if overflows == "reference" else candidate)[9] = sign * INF
    spread = truth.abs() * info.eps
    program = Program(truth, truth, spread=spread, unit=info.eps / 2)
    assert judge_floats(reference, candidate, program).status is Status.UNSTABLE


def test_an_overflow_with_the_wrong_sign_or_far_from_the_edge_fails():
    most = torch.finfo(torch.float32).max
    truth = torch.linspace(1.0, 2.0, 64, dtype=torch.float64) * most / 8
    truth[9] = most
    for value in (-INF, NAN):
        candidate = truth.float()
        candidate[9] = value
        program = Program(truth, truth, spread=truth * UNIT_F32)
        assert judge_floats(truth.float(), candidate, program).status is Status.DEGRADED
    candidate = truth.float()
    candidate[3] = INF
    program = Program(truth, truth, spread=truth * UNIT_F32)
    assert judge_floats(truth.float(), candidate, program).status is Status.DEGRADED


def test_values_far_beyond_the_range_of_the_dtype_spoil_no_other():
    # exp(500) is infinite in float32 and 1e217 in float64, whose square is not a float64.
    truth, reference, candidate = TRUTH.clone(), rounded(TRUTH), rounded(TRUTH, seed=2)
    truth[0, 0], reference[0, 0], candidate[0, 0] = 1e217, INF, INF
    lifted = truth * (1 + 2.3e-16 * like(truth, 3).sign())
    judgement = judge_floats(reference, candidate, Program(truth, lifted, spread=SPREAD))
    assert judgement.status is Status.EQUIVALENT
    wrong = judge_floats(reference, candidate, Program(truth, lifted + 1e-3, spread=SPREAD))
    assert wrong.status is Status.DIFFERENT


# --- where rounding decides -----------------------------------------------------------------------


def test_a_value_that_wobbles_between_finite_and_not_is_unstable():
    spread = SPREAD.clone()
    spread[0, 5] = INF
    reference, candidate = rounded(TRUTH), rounded(TRUTH, seed=2)
    candidate[0, 5] = NAN
    program = Program(TRUTH, TRUTH, spread=spread)
    assert judge_floats(reference, candidate, program).status is Status.UNSTABLE
    candidate[0, 6] = NAN
    assert judge_floats(reference, candidate, program).status is Status.DEGRADED


def test_a_knife_edge_that_only_many_runs_show_is_unstable():
    candidate = rounded(TRUTH, seed=2)
    candidate[0, 5] += 1.0
    thorough = SPREAD.clone()
    thorough[0, 5] = 0.5
    program = Program(TRUTH, TRUTH, spread=SPREAD, thorough=thorough)
    assert judge_floats(rounded(TRUTH), candidate, program).status is Status.UNSTABLE
    assert program.asked.count("thorough spread") == 1


def test_many_runs_are_not_asked_for_where_much_is_over_the_limit():
    program = Program(TRUTH, TRUTH, spread=SPREAD)
    candidate = rounded(TRUTH, units=1000, seed=2)
    assert judge_floats(rounded(TRUTH), candidate, program).status is Status.DEGRADED
    assert "thorough spread" not in program.asked


@pytest.mark.parametrize("is_gradient", [False, True])
def test_large_noise_is_no_decision_about_a_gradient(is_gradient):
    # Only pairs of runs tell a decision from large noise, and there are none here.
    spread = SPREAD.clone()
    spread[0, :3] = 0.5
    candidate = rounded(TRUTH, seed=2)
    candidate[0, 1:3] += 0.4
    program = Program(TRUTH, TRUTH, spread=spread, is_gradient=is_gradient)
    judgement = judge_floats(rounded(TRUTH), candidate, program)
    if is_gradient:
        assert judgement.status is Status.EQUIVALENT
        return
    assert judgement.status is Status.UNSTABLE
    assert judgement.reason == (
        "the reference's own rounding decides this value: it moves 2 of its elements by more than "
        "10% of their size"
    )


class Sampled(NoEvidence):
    """Perturbed runs whose deviations are drawn, so that few of them show too small a spread."""

    unit = UNIT_F32

    def __init__(self, spread, seed, *, shared=False):
        self._draws = normal64(MOST_RUNS, *(() if shared else spread.shape), seed=seed)
        self._spread = spread
        self.made = 0

    def arbiter(self):
        return TRUTH

    def lift_candidate(self):
        return TRUTH

    def spread(self, unit, runs):
        self.made = max(self.made, runs)
        size = self._draws[: self.made].square().mean(dim=0).sqrt()
        return size * self._spread * (unit / self.unit)

    def runs_made(self, unit):
        return self.made

    def whole_errors(self, unit):
        runs = (TRUTH + draw * self._spread for draw in self._draws[: self.made])
        return tuple(whole_error(run, TRUTH) for run in runs)


def off_by(spreads, seed):
    """A candidate in float64 whose error is so many times the spread everywhere."""
    return TRUTH + spreads * SPREAD * like(TRUTH, seed).sign()


@pytest.mark.parametrize("shared", [False, True])
def test_what_is_far_off_fails_after_one_run(shared):
    program = Sampled(SPREAD, 3, shared=shared)
    candidate = off_by(1e7, 4)
    assert judge_floats(rounded(TRUTH, 0), candidate, program).status is Status.DEGRADED
    assert program.made == 1


def test_what_is_just_over_its_limit_fails_after_all_runs():
    program = Sampled(SPREAD, 3)
    assert judge_floats(rounded(TRUTH, 0), off_by(6, 4), program).status is Status.DEGRADED
    assert program.made == MOST_RUNS


def test_no_error_within_the_noise_fails_because_few_runs_showed_little_of_it():
    # All elements deviate together, so a run shows as little of all of them as of one.
    candidate = off_by(0.9, 4)
    found, made = [], 0
    for seed in range(300 if WHOLE else 60):
        program = Sampled(SPREAD, seed, shared=True)
        found.append(judge_floats(rounded(TRUTH, 0), candidate, program).status)
        made += program.made
    assert set(found) == {Status.EQUIVALENT}
    assert made < 2 * len(found), "most of them need one run"


# --- the error as a whole -------------------------------------------------------------------------


# Errors of a program that is rounded ten times.
TEN = 10 * SPREAD


@pytest.mark.parametrize(("factor", "status"), [(24, Status.EQUIVALENT), (32, Status.DEGRADED)])
def test_a_factor_for_all_elements_is_found_far_below_the_limit_of_each(factor, status):
    # The limit is 1.25 times the usual error of 20 roundings, and two roundings of constants.
    program = Sampled(TEN, 3)
    program.is_smooth = True
    reference = TRUTH + TEN * like(TRUTH, 5)
    candidate = TRUTH * (1 + factor * UNIT_F32) + TEN * like(TRUTH, 6)
    judgement = judge_floats(reference, candidate, program)
    assert judgement.native.passed
    assert judgement.status is status
    if status is Status.DEGRADED:
        assert judgement.reason.startswith(
            "the same function when lifted, but natively all of it is off by one factor, +1.9e-06: "
        )
        assert judgement.reason.endswith("times what 12 perturbed runs of the reference allow")


def test_decisions_explain_a_factor():
    reference = TRUTH + TEN * like(TRUTH, 5)
    candidate = TRUTH * (1 + 32 * UNIT_F32) + TEN * like(TRUTH, 6)
    program = Sampled(TEN, 3)
    program.jumps = lambda unit, pairs: Jumps(TEN, TEN > 0)
    assert judge_floats(reference, candidate, program).status is Status.EQUIVALENT
    program.is_smooth = True
    assert judge_floats(reference, candidate, program).status is Status.DEGRADED


@pytest.mark.parametrize(
    ("times", "shared", "status"),
    [
        (1.7, False, Status.EQUIVALENT),
        (2.3, False, Status.DEGRADED),
        (2.3, True, Status.EQUIVALENT),
    ],
)
def test_an_error_may_be_twice_as_large_as_the_usual_unless_the_usual_varies(times, shared, status):
    # Below the limit of 2.5 for the elements. If all of them err together, the size varies.
    program = Sampled(TEN, 3, shared=shared)
    program.is_smooth = True
    judgement = judge_floats(TRUTH + TEN * like(TRUTH, 5), off_by(10 * times, 6), program)
    assert judgement.native.passed
    assert judgement.status is status
    if status is Status.DEGRADED:
        assert "but natively its error as a whole is 1.0" in judgement.reason


@pytest.mark.parametrize("shared", [False, True])
def test_no_right_program_fails_as_a_whole(shared):
    """Errors like those of the runs, of elements that err alone or all together."""
    for seed in range(100):
        program = Sampled(SPREAD, seed, shared=shared)
        program.is_smooth = True
        draws = normal64(2, *(() if shared else TRUTH.shape), seed=1000 + seed)
        reference, candidate = (TRUTH + draw * SPREAD for draw in draws.unbind())
        assert judge_floats(reference, candidate, program).status is Status.EQUIVALENT


def test_two_values_that_are_noise_around_zero_are_equivalent():
    truth = 1e-9 * normal64(64)
    reference, candidate = ((1e-7 * normal64(64, seed=seed)).float() for seed in (4, 5))
    spread = torch.full_like(truth, 1e-7)
    judgement = judge_floats(reference, candidate, Program(truth, truth, spread=spread))
    assert judgement.status is Status.EQUIVALENT


class Cancels(NoEvidence):
    """A copy of a program that adds in another order in every run, where the sum cancels.

    Sums of numbers of one size are multiples of their last bit, so that some are exactly 0.
    """

    unit = UNIT_F32
    is_smooth = True

    def __init__(self, numel, seed, fault=0.0):
        self._numel, self._draws = numel, torch.Generator().manual_seed(seed)
        self._arbiter = self.sum_in_any_order(UNIT_F64)
        self._lifted = self.sum_in_any_order(UNIT_F64) + fault
        self._runs = {}

    def sum_in_any_order(self, unit):
        return torch.randn(self._numel, generator=self._draws).mul(2).round().double() * unit

    def arbiter(self):
        return self._arbiter

    def lift_candidate(self):
        return self._lifted

    def spread(self, unit, runs):
        made = self._runs.setdefault(unit, [])
        while len(made) < runs:
            # A perturbed run computes in float64.
            fine = torch.randn(self._numel, generator=self._draws).double() * 2 * unit
            made.append(fine if unit > UNIT_F64 else self.sum_in_any_order(unit))
        return torch.stack([run - self._arbiter for run in made]).square().mean(dim=0).sqrt()

    def runs_made(self, unit):
        return len(self._runs.get(unit, ()))

    def jumps(self, unit, pairs):
        return Jumps(torch.zeros(self._numel), torch.zeros(self._numel, dtype=torch.bool))


@pytest.mark.parametrize("numel", [1, 2, 32])
def test_of_a_sum_that_cancels_other_noise_may_be_left_in_every_run(numel):
    for seed in range(60):
        program = Cancels(numel, seed)
        pair = (program.sum_in_any_order(UNIT_F32).float() for _ in range(2))
        status = judge_floats(*pair, program).status
        assert status in {Status.IDENTICAL, Status.EQUIVALENT}, seed
        program = Cancels(numel, seed, fault=3e-4 * UNIT_F32)
        pair = [program.sum_in_any_order(UNIT_F32).float() for _ in range(2)]
        if not torch.equal(*pair):
            assert judge_floats(*pair, program).status is Status.DIFFERENT, seed


# --- a reference that gives other bits in every run -----------------------------------------------


class Racing(Program):
    """A program in which a few elements, others in every run, err far more than by rounding."""

    def __init__(self):
        super().__init__(TRUTH, TRUTH, spread=SPREAD)
        self.seed = 0
        self.made = []

    def run(self, times=1.0):
        self.seed += 1
        chosen, error = normal64(2, *TRUTH.shape, seed=self.seed)
        return (TRUTH + times * 1e3 * SPREAD * error.clamp(-2, 2) * (chosen > 2)).float()

    def repeats(self, runs):
        while len(self.made) < runs:
            self.made.append(self.run())
        return self.made[:runs]


def test_a_copy_of_a_reference_that_races_is_equivalent_and_what_errs_more_is_not():
    for _ in range(20):
        program = Racing()
        assert judge_floats(program.run(), program.run(), program).status is Status.EQUIVALENT
        assert len(program.made) <= 3
    assert judge_floats(program.run(), program.run(times=4.0), program).status is Status.DEGRADED
    wrong = program.run() + 600 * SPREAD.float()  # less than the worst element, but everywhere
    assert judge_floats(program.run(), wrong, program).status is Status.DEGRADED


def test_what_is_just_beyond_the_worst_of_twelve_runs_is_judged_by_more_of_them():
    def judge(times, later):
        program = Racing()
        reference = program.run()

        def run(times=1.0):  # all by the same errors, larger or smaller
            program.seed = 1
            return Racing.run(program, times)

        program.made = [run() for _ in range(12)]
        program.run = lambda: run(later)
        verdict = judge_floats(reference, run(times), program)
        return verdict.status, len(program.made)

    assert judge(3.0, later=1.6) == (Status.EQUIVALENT, 13)
    assert judge(3.0, later=1.4) == (Status.DEGRADED, 48)
    assert judge(5.0, later=3.0) == (Status.DEGRADED, 12)  # too far off for chance


def test_a_reference_that_does_not_race_is_run_once_more_at_most():
    program = Racing()
    program.repeats = lambda runs: program.made.append(runs) or []
    assert judge_floats(program.run(), program.run(), program).status is Status.DEGRADED
    assert program.made == [1]


# --- decisions ------------------------------------------------------------------------------------


def turned_row(size=1.0):
    """A candidate whose fourth row a decision has moved, and what decisions can move."""
    candidate = rounded(TRUTH, seed=2)
    candidate[3] += size
    jumps = torch.zeros_like(TRUTH)
    jumps[3] = size
    return candidate, jumps


@pytest.mark.parametrize(
    ("is_gradient", "status"), [(True, Status.EQUIVALENT), (False, Status.UNSTABLE)]
)
def test_what_an_open_decision_moves_passes_and_says_so(is_gradient, status):
    candidate, jumps = turned_row()
    program = Program(
        TRUTH,
        TRUTH,
        spread=SPREAD,
        jumps=jumps,
        is_gradient=is_gradient,
        decisions={"relu": (3, 65536), "gelu": (0, 9)},
    )
    judgement = judge_floats(rounded(TRUTH), candidate, program)
    assert judgement.status is status
    assert (
        "3 of 65,536 relu decisions are within a few roundings of their threshold"
        in judgement.reason
    )
    assert "gelu" not in judgement.reason


def test_a_small_jump_of_an_output_is_equivalent():
    candidate, jumps = turned_row(1e-3)
    program = Program(TRUTH, TRUTH, spread=SPREAD, jumps=jumps)
    assert judge_floats(rounded(TRUTH), candidate, program).status is Status.EQUIVALENT


def test_what_no_open_decision_moves_is_judged_as_strictly_as_ever():
    candidate, jumps = turned_row()
    candidate[4, 0] += 1e-4
    program = Program(TRUTH, TRUTH, spread=SPREAD, jumps=jumps, is_gradient=True)
    assert judge_floats(rounded(TRUTH), candidate, program).status is Status.DEGRADED


def pairs_of(patterns, noise=1e-7):
    """Six pairs of runs in which decisions move a value by `patterns`, each flipping in some."""
    turns = torch.Generator().manual_seed(3)
    pairs = []
    for number in range(6):
        smooth = noise * like(TRUTH, seed=50 + number)
        flips = torch.randint(0, 2, (2, len(patterns)), generator=turns)
        runs = [sum((f * p for f, p in zip(row, patterns, strict=True)), smooth) for row in flips]
        runs[1] = runs[1] - 2 * smooth
        pairs.append(torch.stack([run.reshape(-1) for run in runs]))
    return torch.stack(pairs)


@pytest.mark.parametrize("count", [1, 3])
def test_the_pattern_of_decisions_passes_and_another_error_of_their_size_fails(count):
    patterns = [1e-2 * like(TRUTH, seed=80 + number) for number in range(count)]
    program = Program(
        TRUTH, TRUTH, spread=SPREAD, jumps=torch.full_like(TRUTH, 2e-2), is_gradient=True,
        pairs=pairs_of(patterns),
    )  # fmt: skip
    flipped = rounded(TRUTH + sum(patterns))
    assert judge_floats(rounded(TRUTH), flipped, program).status is Status.EQUIVALENT
    other = rounded(TRUTH + 1e-3 * like(TRUTH, seed=99))
    judgement = judge_floats(rounded(TRUTH), other, program)
    assert judgement.status is Status.DEGRADED
    assert "decisions within rounding move it, but not like this" in judgement.reason


def test_more_decisions_than_runs_can_tell_apart_excuse_any_error_of_their_size():
    patterns = [1e-2 * like(TRUTH, seed=80 + number) for number in range(40)]
    program = Program(
        TRUTH, TRUTH, spread=SPREAD, jumps=torch.full_like(TRUTH, 2e-2), is_gradient=True,
        pairs=pairs_of(patterns),
    )  # fmt: skip
    other = rounded(TRUTH + 1e-2 * like(TRUTH, seed=99))
    assert judge_floats(rounded(TRUTH), other, program).status is Status.EQUIVALENT


def test_noise_as_large_as_the_value_is_unstable_only_if_decisions_make_it():
    candidate = (TRUTH + 0.5 * like(TRUTH, seed=5)).float()
    spread = torch.full_like(TRUTH, 0.5)
    for jumps, status in (
        (torch.zeros_like(TRUTH), Status.EQUIVALENT),
        (spread, Status.UNSTABLE),
    ):
        program = Program(TRUTH, TRUTH, spread=spread, jumps=jumps)
        assert judge_floats(rounded(TRUTH), candidate, program).status is status


@pytest.mark.parametrize(
    ("error", "asked"), [(1e-2, [1]), (9 * SPREAD[0, 0].item(), [1, 2, 3, 4, 5, 6])]
)
def test_where_nothing_decides_one_pair_of_runs_is_enough_unless_it_is_close(error, asked):
    candidate = rounded(TRUTH + error * like(TRUTH, seed=9).sign())
    judgements = []
    for is_smooth in (True, False):
        program = Program(TRUTH, TRUTH, spread=SPREAD, jumps=torch.zeros_like(TRUTH))
        program.is_smooth = is_smooth
        judgements.append(judge_floats(rounded(TRUTH), candidate, program))
        assert program.pairs_asked == (asked if is_smooth else [2, 3, 4, 5, 6])
    assert judgements[0].status is Status.DEGRADED
    assert judgements[0] == judgements[1]


def test_a_pass_needs_two_pairs_though_nothing_decides():
    spread = torch.full_like(TRUTH, 0.5)
    program = Program(TRUTH, TRUTH, spread=spread, jumps=torch.zeros_like(TRUTH))
    program.is_smooth = True
    candidate = (TRUTH + 0.5 * like(TRUTH, seed=5)).float()
    assert judge_floats(rounded(TRUTH), candidate, program).status is Status.EQUIVALENT
    assert program.pairs_asked == [1, 2]


def test_decisions_are_not_looked_for_where_the_spread_settles_it():
    program = Program(TRUTH, None, spread=SPREAD, jumps=SPREAD)
    candidate = rounded(TRUTH, units=4, seed=2)
    assert judge_floats(rounded(TRUTH), candidate, program).status.passes()
    assert "jumps" not in program.asked


# --- cost -----------------------------------------------------------------------------------------


def test_no_spread_is_asked_for_where_the_reference_s_own_error_settles_it():
    program = Program(TRUTH, TRUTH + 1e-16 * like(TRUTH, 3), spread=SPREAD)
    judge_floats(rounded(TRUTH), rounded(TRUTH, seed=2), program)
    assert not [what for what in program.asked if "spread" in what]


def test_no_spread_is_asked_for_where_the_candidate_errs_where_the_reference_does():
    # One row is far noisier than the others: no single figure of noise fits both.
    reference, candidate = rounded(TRUTH), rounded(TRUTH, seed=2)
    reference[7], candidate[7] = TRUTH[7] + 1e-4, TRUTH[7] - 1e-4
    reference[7, 7], candidate[7, 7] = TRUTH[7, 7] - 1e-3, TRUTH[7, 7] + 1e-3
    program = Program(TRUTH, TRUTH)
    assert judge_floats(reference, candidate, program).status is Status.EQUIVALENT
    assert "spread" not in program.asked


def test_a_spread_is_asked_for_where_it_does_not():
    program = Program(TRUTH, TRUTH, spread=SPREAD)
    judge_floats(rounded(TRUTH), rounded(TRUTH, units=100, seed=2), program)
    assert "spread" in program.asked


# --- discrete values ------------------------------------------------------------------------------

IDS = torch.arange(10)
OTHER = IDS.clone()
OTHER[[2, 7]] += 1
CONTESTED = IDS != OTHER


def test_equal_integers_are_identical_and_nothing_is_asked():
    program = Program(undecided=CONTESTED)
    assert judge_exact(IDS, IDS.clone(), program).status is Status.IDENTICAL
    assert program.asked == []


def test_integers_that_rounding_decides_are_unstable():
    judgement = judge_exact(IDS, OTHER, Program(IDS, IDS, undecided=CONTESTED))
    assert judgement.status is Status.UNSTABLE
    assert judgement.reason == (
        "2 of 10 values differ, each decided by the reference's own rounding"
    )


@pytest.mark.parametrize(
    ("lifted", "expected", "reason"),
    [
        (
            IDS,
            Status.DEGRADED,
            "2 of 10 values differ beyond the reference's own margin, though not when lifted",
        ),
        (OTHER, Status.DIFFERENT, "2 of 10 values differ; these values are exact"),
        (None, Status.DIFFERENT, "2 of 10 values differ; these values are exact"),
    ],
)
def test_integers_of_which_rounding_decides_some_fail(lifted, expected, reason):
    some = CONTESTED.clone()
    some[7] = False
    for undecided in (some, torch.zeros_like(some), None):
        judgement = judge_exact(IDS, OTHER, Program(IDS, lifted, undecided=undecided))
        assert judgement.status is expected
        assert judgement.reason == reason


def test_integers_without_a_program_are_exact():
    assert judge_exact(IDS, OTHER, NO_PROGRAM).status is Status.DIFFERENT
    flags = IDS > 3
    assert judge_exact(flags, ~flags, NO_PROGRAM).status is Status.DIFFERENT
