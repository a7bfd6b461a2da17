"""What is inside of one operator or function of torch is computed in float32, and noise says so."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from paritas.core.precision.lifting import DtypeLog, LiftMode
from paritas.core.precision.perturbing import PerturbMode
from paritas.core.torch_private.kernels import attends_in_one_kernel

BFLOAT16 = torch.bfloat16
UNIT = 2.0**-8
RUNS = 6


def values(*shape, seed=0, mean=0.0):
    """Numbers of bfloat16, in float64, that require grad."""
    drawn = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) + mean
    return drawn.to(BFLOAT16).double().requires_grad_()


def results(program, inputs, mode):
    """What a program returns, and the gradients of its inputs, in a mode."""
    with mode:
        out = program(*inputs)
        upstream = values(*out.shape, seed=7).detach()
        return [out.detach(), *torch.autograd.grad(out, inputs, upstream)]


def spreads(program, *inputs):
    """In roundings of bfloat16: rms over perturbed runs, of the output and of each gradient."""
    still = results(program, inputs, LiftMode(BFLOAT16, torch.float32))
    runs = [
        results(program, inputs, PerturbMode(BFLOAT16, torch.float32, UNIT, seed))
        for seed in range(RUNS)
    ]
    return [
        float(torch.stack([run[place] - one for run in runs]).square().mean().sqrt())
        / float(one.square().mean().sqrt())
        / UNIT
        for place, one in enumerate(still)
    ]


def by_steps(x):
    centred = x - x.mean(-1, keepdim=True)
    return centred * (centred.square().mean(-1, keepdim=True) + 1e-5).rsqrt()


NORMS = {
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "group_norm": lambda x: F.group_norm(x, 4),
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "var": lambda x: x.var(-1),
    "rms_norm": lambda x: F.rms_norm(x, x.shape[-1:]),
}


@pytest.mark.parametrize("name", NORMS)
def test_what_an_operator_computes_inside_is_not_rounded_to_half_precision(name):
    (out, _) = spreads(NORMS[name], values(16, 64, mean=100))
    assert 0.1 < out < 1


def test_what_a_program_computes_step_by_step_is_rounded_at_each_step():
    (fused, _), (steps, _) = (
        spreads(program, values(16, 64, mean=100)) for program in (NORMS["layer_norm"], by_steps)
    )
    assert steps > 20 * fused


@pytest.mark.parametrize("shape", [(2, 2, 24, 16), (4, 24, 16)], ids=["one kernel", "several"])
def test_the_scores_of_attention_are_not_rounded_and_its_weights_are(shape):
    query, key, value = (values(*shape, seed=seed) for seed in range(3))
    sharp = (query.detach() * 8).requires_grad_()
    out, *gradients = spreads(F.scaled_dot_product_attention, sharp, key, value)
    assert out < 1
    assert max(gradients) < 5
    # Every output is one value, times a weight of about 1: rounding the weight is all but the last.
    one = values(*shape, seed=3).detach().fill_(1.0).requires_grad_()
    assert spreads(F.scaled_dot_product_attention, query, key, one)[0] < 1


def test_attention_by_other_operators_is_as_noisy_as_by_its_kernel():
    shape = (2, 2, 24, 16)
    inputs = [values(*shape, seed=seed) for seed in range(3)]
    kernel = spreads(F.scaled_dot_product_attention, *inputs)
    flat = [value.detach().flatten(0, 1).requires_grad_() for value in inputs]
    others = spreads(F.scaled_dot_product_attention, *flat)
    for one, other in zip(kernel, others, strict=True):
        assert one / 2 < other < one * 2


def test_the_gradient_of_an_rms_norm_s_weight_is_summed_from_exact_terms():
    x, weight = values(512, 16), values(16, seed=1)
    *_, moved = spreads(lambda x, weight: F.rms_norm(x, (16,), weight), x, weight)
    assert moved < 1


def test_operators_inside_of_a_function_are_not_counted_and_its_dtype_is_recorded():
    inputs = [torch.randn(4, 8, 16, dtype=BFLOAT16, requires_grad=True) for _ in range(3)]
    with DtypeLog() as log:
        (F.scaled_dot_product_attention(*inputs) @ inputs[0].mT).sum().backward()
    names = [str(func) for func, _ in log.calls]
    # One product and its two gradients are the program's own; attention has products in float32.
    assert names.count("aten.bmm.default") == 3
    assert log.calls[F.scaled_dot_product_attention, 0] is BFLOAT16
    assert torch.float32 not in log.calls.values()


def test_a_function_in_float32_is_as_fine_as_before_in_a_program_of_both_dtypes():
    x = values(16, 64)
    log = {(F.rms_norm, 0): torch.float32}
    with PerturbMode(BFLOAT16, torch.float32, UNIT, 0, log=log):
        moved = F.rms_norm(x, (64,))
    off = (moved - F.rms_norm(x, (64,))).abs().max()
    assert 0 < off < 1e-5


def test_functions_below_a_transform_are_left_to_it():
    x = values(4, 8, 16).detach()
    gradient = torch.func.grad(lambda z: F.scaled_dot_product_attention(z, z, z).sum())
    with PerturbMode(BFLOAT16, torch.float32, UNIT, 0):
        found = torch.vmap(gradient)(x)
    torch.testing.assert_close(found, torch.vmap(gradient)(x), rtol=0.5, atol=0.5)


@pytest.mark.parametrize(("shape", "expected"), [((1, 2, 8, 16), True), ((2, 8, 16), False)])
def test_torch_says_whether_attention_has_a_kernel_for_its_arguments(shape, expected):
    given = dict.fromkeys(("query", "key", "value"), torch.randn(shape))
    assert attends_in_one_kernel(given, {"is_causal": True}) is expected
