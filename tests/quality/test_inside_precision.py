"""Precision that is lost inside of a fused operator is found, and honest kernels pass."""

import math
import os
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import paritas

# The laboratory is no part of the package: it is found from the root of the repository.
sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.inside.measuring import Case, cases, degraded_outcomes, honest_outcomes

WHOLE = os.environ.get("PARITAS_WHOLE_CORPUS") == "1"
QUIET = paritas.VerifyConfig(raise_on_mismatch=False, verify_second_call=False)

# What is degraded in a sample, by operator and inputs.
SAMPLE = {
    Case("layer_norm", "bfloat16", "mean 100"): ("centred",),
    Case("rms_norm", "bfloat16", "mean 0"): ("squares", "normal"),
    Case("attention", "bfloat16", "large"): ("scores",),
    Case("attention, 3-D", "float16", "large"): ("shifted",),
    Case("log_softmax", "float16", "mean 100"): ("shifted",),
}

# Known to pass, though it should not: see the table on the page of benchmarks.
MISSED = {(Case("batch_norm", "float16", "mean 0"), "deviation")}


def sample():
    return dict.fromkeys(cases(), ()) if WHOLE else SAMPLE


@pytest.mark.parametrize("case", sample(), ids=str)
def test_honest_forms_pass(case, undiagnosed):
    outcomes = list(honest_outcomes(case, {}))
    assert [one for one in outcomes if not one.passed] == []


@pytest.mark.one_in(2)
@pytest.mark.parametrize("case", sample(), ids=str)
def test_ten_times_the_error_of_honest_forms_is_found(case, undiagnosed):
    outcomes = list(degraded_outcomes(case, (10,), sample()[case]))
    missed = {(one.case, one.form) for one in outcomes if one.passed}
    assert missed <= MISSED
    assert outcomes or WHOLE


def in_steps(x):
    """A norm in the arithmetic of its dtype: each step is rounded."""
    centred = x - x.mean(-1, keepdim=True)
    return centred * (centred.square().mean(-1, keepdim=True) + 1e-5).rsqrt()


def norm(x):
    return F.layer_norm(x, x.shape[-1:])


@pytest.mark.parametrize("mean", [8.0, 100.0])
def test_a_layer_norm_in_bfloat16_arithmetic_is_degraded(mean, undiagnosed):
    x = (torch.randn(64, 256, generator=torch.Generator().manual_seed(0)) + mean).bfloat16()
    assert paritas.verify([x], norm, in_steps, QUIET).status == "degraded"
    # A program that is written in steps rounds at each of them, and so may another.
    assert paritas.verify([x], in_steps, norm, QUIET).passed
    assert paritas.verify([x], in_steps, lambda x: in_steps(x.flip(-1)).flip(-1), QUIET).passed


def with_scores_in_its_dtype(q, k, v):
    scores = q @ k.mT * (1 / math.sqrt(q.shape[-1]))
    weights = torch.softmax(scores.to(torch.promote_types(q.dtype, torch.float32)), -1)
    return weights.to(q.dtype) @ v


def with_softmax_in_its_dtype(q, k, v):
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = (q.to(wide) @ k.to(wide).mT * (1 / math.sqrt(q.shape[-1]))).to(q.dtype)
    powers = (scores - scores.amax(-1, keepdim=True)).exp()
    return powers / powers.sum(-1, keepdim=True) @ v


@pytest.mark.parametrize("candidate", [with_scores_in_its_dtype, with_softmax_in_its_dtype])
@pytest.mark.parametrize("shape", [(2, 2, 64, 32), (4, 64, 32)], ids=["one kernel", "several"])
def test_attention_with_its_scores_in_bfloat16_is_degraded(candidate, shape, undiagnosed):
    draws = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(shape, generator=draws).bfloat16() for _ in range(3))
    found = paritas.verify([q * 8, k, v], F.scaled_dot_product_attention, candidate, QUIET)
    assert found.status == "degraded"
