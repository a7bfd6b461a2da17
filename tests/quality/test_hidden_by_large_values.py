"""One large value does not hide that others are wrong, and excuses no honest rewrite either."""

from __future__ import annotations

import pytest
import torch

import paritas
from paritas import VerifyConfig
from paritas.core.results.findings import Status

pytestmark = pytest.mark.usefixtures("undiagnosed")

WRONG = {Status.DIFFERENT, Status.DEGRADED}
RIGHT = {Status.IDENTICAL, Status.EQUIVALENT}


def drawn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def judged(inputs, reference, candidate):
    return paritas.verify(
        inputs, reference, candidate, VerifyConfig(raise_on_mismatch=False)
    ).status


def only_natively(function):
    """A candidate that cannot be lifted, as a kernel for one dtype."""

    def run(*args):
        if any(arg.dtype is torch.float64 for arg in args):
            raise TypeError("no kernel for float64")
        return function(*args)

    return run


X = drawn(16, 16)
MASKS = {
    "random": torch.rand(16, 16, generator=torch.Generator().manual_seed(1)) < 0.4,
    "causal": torch.ones(16, 16).triu(1).bool(),
    "nearly all": torch.rand(16, 16, generator=torch.Generator().manual_seed(1)) < 0.95,
}


def slowly(x):
    return (x.unsqueeze(1) * x.unsqueeze(0)).sum(-1)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("fill", [-1e9, -1e20, -1e30, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("natively", [False, True], ids=["lifted", "natively"])
def test_a_mask_hides_no_wrong_scores(fill, mask, natively):
    wrapped = only_natively if natively else lambda candidate: candidate
    factor = 1.01 if natively else 1 + 1e-6

    def masked(scores):
        return lambda x: scores(x).masked_fill(mask, fill)

    reference = masked(lambda x: x @ x.T)
    assert judged([X], reference, wrapped(masked(slowly))) in RIGHT
    assert judged([X], reference, wrapped(masked(lambda x: x @ x.T * factor))) in WRONG
    assert judged([X], reference, wrapped(masked(lambda x: x @ x.T * 0))) in WRONG


def test_an_added_mask_hides_no_wrong_scores():
    mask = 1e30 * MASKS["random"].float()
    assert judged([X], lambda x: x @ x.T - mask, lambda x: slowly(x) - mask) in RIGHT
    assert judged([X], lambda x: x @ x.T - mask, lambda x: 1.5 * (x @ x.T) - mask) in WRONG


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_large_columns_hide_no_wrong_ones_beside_them(dtype):
    def joined(function):
        return lambda x: torch.cat([x * 1e20, function(x)], 1)

    x = X.to(dtype)
    assert judged([x], joined(torch.sin), joined(lambda x: -(-x).sin())) in RIGHT
    assert judged([x], joined(torch.sin), joined(torch.cos)) in WRONG


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("large", [2_500.0, 25_000.0])
def test_massive_activations_hide_no_wrong_ones(dtype, large):
    x, w = 0.2 * drawn(64, 128, dtype=dtype), drawn(128, 128, seed=1, dtype=dtype) / 8
    gain = torch.ones(64, 128, dtype=dtype)
    x[0, 3], x[0, 77] = 1.0, -1.0
    gain[0, 3] = gain[0, 77] = large
    is_small = gain == 1

    def reference(x, w):
        return x * gain + 0.01 * (x @ w)

    def by_other_sums(x, w):
        return torch.addcmul(0.01 * (x[:, :64] @ w[:64] + x[:, 64:] @ w[64:]), x, gain)

    assert judged([x, w], reference, only_natively(by_other_sums)) in RIGHT
    for factor in (0.85, 0.0):

        def faulty(x, w, factor=factor):
            return torch.where(is_small, factor * reference(x, w), reference(x, w))

        assert judged([x, w], reference, only_natively(faulty)) in WRONG


class ScaledGradient(torch.autograd.Function):
    """A product with a factor in half of the rows of a gradient."""

    @staticmethod
    def forward(ctx, w, x):
        ctx.save_for_backward(w, x)
        return w @ x

    @staticmethod
    def backward(ctx, grad):
        w, x = ctx.saved_tensors
        factor = torch.ones(64, 1, dtype=grad.dtype)
        factor[32:] = 1.2
        return (grad @ x.T) * factor, w.T @ grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_gradients_hide_no_wrong_small_ones(dtype):
    rows = torch.logspace(0, -5, 64).unsqueeze(1).to(dtype)
    w, x = drawn(64, 64, dtype=dtype).requires_grad_(), drawn(64, 64, seed=1, dtype=dtype)

    def faulty(w, x):
        return ScaledGradient.apply(w, x) * rows

    assert judged([w, x], lambda w, x: (w @ x) * rows, only_natively(faulty)) in WRONG


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_tails_of_a_softmax_are_judged_by_themselves(dtype):
    def faulty(x):
        return torch.where(x.softmax(-1) < 1e-5, 0.0, x.softmax(-1))

    def by_logarithms(x):
        return (x if x.dtype is torch.float64 else x.float()).log_softmax(-1).exp().to(x.dtype)

    x = 12 * drawn(32, 128, dtype=dtype)
    assert judged([x], lambda x: x.softmax(-1), only_natively(faulty)) in WRONG
    assert judged([x], lambda x: x.softmax(-1), faulty) in WRONG
    assert judged([x], lambda x: x.softmax(-1), only_natively(by_logarithms)) in RIGHT
    assert judged([x], lambda x: x.softmax(-1), by_logarithms) in RIGHT


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_cancels_inside_a_function_is_rounding(dtype):
    def by_complement(x):
        wide = x if x.dtype is torch.float64 else x.float()
        return (wide / 2 * torch.erfc(-wide / 2**0.5)).to(x.dtype)

    x = 4 * drawn(32, 128, dtype=dtype)
    assert judged([x], torch.nn.functional.gelu, by_complement) in RIGHT
