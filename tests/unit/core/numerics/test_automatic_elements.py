"""What one element's fate, or the inside of a program, does to the verdict on a whole tensor."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import paritas
from drawing import normal
from paritas import VerifyConfig
from paritas.core.numerics.automatic import judge_floats
from paritas.core.numerics.criterion import UNIT_F32
from paritas.core.numerics.judge_evidence import NoEvidence
from paritas.core.results.findings import Status
from spying import Spy

U_BF16 = 2.0**-8


def statuses(inputs, reference, candidate, **options):
    """The status of each value, by its path."""
    config = VerifyConfig(raise_on_mismatch=False, verify_second_call=False, **options)
    verdict = paritas.verify(inputs, reference, candidate, config)
    return {finding.path: finding.status for finding in verdict.findings}


class Inside(NoEvidence):
    """Two equal results of a program that computes in something else inside."""

    unit = UNIT_F32

    def __init__(self, coarsest, arbiter, lifted):
        self._coarsest, self._arbiter, self._lifted = coarsest, arbiter, lifted

    def coarsest(self):
        return self._coarsest

    def arbiter(self):
        return self._arbiter

    def lift_candidate(self):
        return self._lifted


# --- one element whose finiteness rounding decides ------------------------------------------------


def margins():
    """One margin of -100: exp(100) is beyond float32, so eager's loss is infinite there."""
    x, y = normal(4, 8), normal(4, 8, seed=1).sign()
    x[1, 2] = -100 * y[1, 2]
    return [x.requires_grad_(), y]


def loss(x, y):
    return F.soft_margin_loss(x, y, reduction="none")


@pytest.mark.parametrize("lift", [True, False])
def test_a_nan_of_the_reference_s_own_is_set_aside_and_the_rest_is_judged(lift):
    right = statuses(margins(), loss, lambda x, y: F.softplus(-y * x), lift=lift)
    assert right["output"] is right["gradient of input[0]"] is Status.UNSTABLE
    wrong = statuses(margins(), loss, lambda x, y: F.softplus(-y * x) * 1.01, lift=lift)
    assert wrong["output"] is wrong["gradient of input[0]"] is Status.DIFFERENT


@pytest.mark.parametrize("lift", [True, False])
def test_an_infinite_input_is_set_aside_and_the_rest_is_judged(lift):
    x = normal(4, 8)
    x[0, 0] = math.inf

    def gelu(x):
        return x * 0.5 * (1 + torch.erf(x / 2**0.5))

    assert statuses([x], F.gelu, gelu, lift=lift)["output"] is not Status.DIFFERENT
    wrong = statuses([x], F.gelu, lambda x: gelu(x) * 1.01, lift=lift)
    assert wrong["output"] is Status.DIFFERENT


def knife_edge(x):
    """3xx - x(3x) is zero but for rounding, so that rounding decides whether the root is one."""
    edge = torch.sqrt(x[:1] * x[:1] * 3 - (x[:1] * 3) * x[:1])
    return torch.cat([edge, x[1:] * 3.1])


@pytest.mark.parametrize("lift", [True, False])
def test_a_nan_that_only_perturbed_runs_show_is_set_aside_and_the_rest_is_judged(lift):
    x = normal(32, seed=1).abs() + 0.5
    assert torch.isfinite(knife_edge(x)).all()
    for scale, expected in ((1.0, Status.UNSTABLE), (1.01, Status.DIFFERENT)):

        def candidate(x, scale=scale):
            return torch.cat([knife_edge(x)[:1] * math.nan, x[1:] * 3.1 * scale])

        assert statuses([x], knife_edge, candidate, lift=lift)["output"] is expected


def test_a_number_on_the_knife_edge_to_none_is_set_aside_where_the_lifted_run_agrees():
    x = normal(32).abs() + 0.5
    assert knife_edge(x)[0].isnan()  # and 0 in float64, and 3e-4 in the candidate
    for scale, expected in ((1.0, Status.UNSTABLE), (1.01, Status.DIFFERENT)):

        def candidate(x, scale=scale):
            edge = torch.sqrt((x[:1] * x[:1] * 3 - (x[:1] * 3) * x[:1]).abs())
            return torch.cat([edge, x[1:] * 3.1 * scale])

        assert statuses([x], knife_edge, candidate)["output"] is expected


# --- equal bits -----------------------------------------------------------------------------------


class Mixed(nn.Module):
    """float32 outside, bfloat16 inside."""

    def __init__(self, scale=1.0):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter(torch.randn(8, 8, generator=generator))
        self.scale = scale

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return (F.linear(x, self.weight) * self.scale).float()


def test_a_fault_that_bfloat16_hides_inside_a_float32_program_is_found():
    same = statuses([normal(4, 8)], Mixed(), Mixed())
    assert {same["output"], same["gradient of weight"]} == {Status.IDENTICAL}
    hidden = Mixed(1 + 2.0**-14)
    x = normal(4, 8)
    assert torch.equal(Mixed()(x), hidden(x))  # else nothing would be hidden
    assert statuses([x], Mixed(), hidden)["output"] is Status.DIFFERENT


def test_equal_bits_of_a_float32_program_need_no_lifted_run():
    x = normal(4, 8)
    wrong = Inside(UNIT_F32, x.double(), x.double() * 1.1)
    assert judge_floats(x, x.clone(), wrong).status is Status.IDENTICAL
    hiding = Inside(U_BF16, x.double(), x.double() * 1.1)
    assert judge_floats(x, x.clone(), hiding).status is Status.DIFFERENT


def test_a_float32_program_with_equal_bits_is_not_run_in_float64():
    seen = Spy()

    def program(x):
        seen.note(x.dtype)
        return x * 2

    statuses([normal(4)], program, program)
    assert set(seen.notes()) == {torch.float32}


# --- noise that cannot be measured, and sums beyond float64 ---------------------------------------


def test_noise_that_cannot_be_measured_is_that_of_the_coarsest_dtype_inside():
    class Blind(Inside):
        unit = U_BF16

    truth = normal(16, 16).double()
    noisy = (truth * (1 + U_BF16 * normal(16, 16, seed=2).double())).float()
    program = Blind(U_BF16, truth, None)
    judgement = judge_floats(truth.float(), noisy, program)
    assert judgement.status is Status.EQUIVALENT
    assert judgement.native is not None
    assert judgement.native.noise == (
        "a unit roundoff of 0.0039 alone, without a program to measure: weak"
    )
    program.unit = UNIT_F32
    assert judge_floats(truth.float(), noisy, program).status is Status.DIFFERENT


@pytest.mark.parametrize("scale", [1.0, 1e-30])
def test_a_sum_beyond_float64_in_another_order_is_unstable(scale):
    x = torch.tensor([1e30, -1e30, 4.09375], dtype=torch.float64) * scale
    sums = statuses([x.float()], lambda x: (x[0] + x[1]) + x[2], lambda x: x[0] + (x[1] + x[2]))
    assert sums["output"] is Status.UNSTABLE


def test_a_term_left_out_of_an_ordinary_sum_is_different():
    x = torch.tensor([3.0, -3.0, 4.09375])
    sums = statuses([x], lambda x: (x[0] + x[1]) + x[2], lambda x: x[0] + x[1])
    assert sums["output"] is Status.DIFFERENT
