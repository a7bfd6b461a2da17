"""The noise of operators that add up many terms, against the errors float32 really makes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from paritas.core.operators.catalogue import SUMMATIONS
from paritas.core.precision.accumulation import _RULES, accumulation
from paritas.core.precision.perturbing import PerturbMode
from paritas.core.precision.summing import UnperturbedCall

UNIT = 2.0**-24
RUNS = 6


def values(*shape, seed=0):
    """Float32 numbers, in float64."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double()


INDEX = torch.arange(32) % 3
WEIGHT = values(32, seed=1)


def weight(x):
    return WEIGHT.to(x.dtype)


PROGRAMS = {
    "mm": lambda x: x @ x,
    "mv": lambda x: x @ x[0],
    "dot": lambda x: torch.dot(x[0], x[1]).reshape(1),
    "bmm": lambda x: torch.bmm(x.view(2, 16, 32), x.view(2, 32, 16)),
    "addmm": lambda x: torch.addmm(weight(x), x, x),
    "sum": lambda x: x.sum(0),
    "mean": lambda x: x.mean(1),
    "cumsum": lambda x: x.cumsum(0),
    "prod": lambda x: (1 + x / 50).prod(0),
    "norm": lambda x: torch.linalg.vector_norm(x, dim=1),
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "logsumexp": lambda x: x.logsumexp(-1),
    "attention": lambda x: F.scaled_dot_product_attention(*[x.view(1, 2, 16, 32)] * 3),
    "var": lambda x: x.var(0),
    "std": lambda x: x.std(1),
    "layer norm": lambda x: F.layer_norm(x, (32,), weight(x), weight(x)),
    "batch norm": lambda x: F.batch_norm(x, None, None, weight(x), training=True),
    "batch norm in evaluation": lambda x: F.batch_norm(x, weight(x), weight(x).abs() + 1),
    "group norm": lambda x: F.group_norm(x.view(2, 4, 128), 2),
    "conv": lambda x: F.conv1d(x.view(1, 32, 32), x.view(16, 32, 2)),
    "mse": lambda x: F.mse_loss(x, x.flip(0)).reshape(1),
    "cross entropy": lambda x: F.cross_entropy(x, INDEX).reshape(1),
    "index_add": lambda x: x[:3].index_add(0, INDEX, x),
    "scatter_add": lambda x: x[:3].scatter_add(0, INDEX[:, None].expand(32, 32), x),
    "embedding": lambda x: F.embedding(INDEX, x[:3]) * x,
}


def forward_and_backward(program):
    def run(x):
        leaf = x.detach().requires_grad_()
        result = program(leaf)
        cotangent = values(*result.shape, seed=2).to(result.dtype)
        return result.detach(), torch.autograd.grad(result, leaf, cotangent)[0]

    return run


def rms(tensor):
    return float(tensor.square().mean().sqrt())


@pytest.mark.one_in(4)
@pytest.mark.parametrize("offset", [0.0, 30.0], ids=["centred", "far from zero"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_error_that_float32_makes_is_within_the_noise(name, offset):
    run, x = forward_and_backward(PROGRAMS[name]), (values(32, 32) + offset).float().double()
    still, native = run(x), run(x.float())
    moved = []
    for seed in range(RUNS):
        with PerturbMode(torch.float32, torch.float32, UNIT, seed):
            moved.append(run(x))
    for part in range(2):
        error = native[part].double() - still[part]
        wobble = torch.stack([run[part] - still[part] for run in moved])
        assert wobble.isfinite().all()
        # Far from zero the backward passes of normalisations cancel; the measured error covers it.
        assert rms(error) <= (10.0 if offset else 2.5) * rms(wobble)
        if offset == 0.0:  # a noise far above any error would excuse everything
            assert rms(wobble) <= 50 * max(rms(error), UNIT * rms(still[part]))


@pytest.mark.parametrize("statistics", [torch.var_mean, torch.std_mean])
def test_a_mean_that_comes_with_a_spread_is_as_noisy_as_one_by_itself(statistics):
    x = values(32, 512)
    means = [lambda: x.mean(1), lambda: statistics(x, 1)[1]]
    noise = []
    for mean in means:
        still = mean()
        with PerturbMode(torch.float32, torch.float32, UNIT, seed=0):
            noise.append(rms(mean() - still))
    assert 0.5 < noise[1] / noise[0] < 2


@pytest.mark.parametrize("scale", [1e-140, 1e-30, 1e-12, 1.0, 1e9, 1e40, 1e140])
@pytest.mark.parametrize("name", ["mm", "addmm", "convolution"])
def test_the_amplitude_of_a_product_is_that_of_its_formula_at_every_scale(name, scale):
    aten = torch.ops.aten
    a, b, bias = values(8, 32) * scale, values(32, 16, seed=1), values(16, seed=2)
    q, n = a.square() @ b.square(), 32
    if name == "mm":
        func, args = aten.mm.default, (a, b)
    elif name == "addmm":  # a bias may outweigh the products by any factor
        func, args = aten.addmm.default, (bias, a, b)
    else:
        func, args = aten.convolution.default, (a[:, :, None], b.t()[:, :, None], None)
        args = (*args, [1], [0], [1], False, [0], 1)
        q = q[:, :, None]
    result = func(*args)
    expected = (n * (result.square() / 3 + q / 2)).sqrt()
    (found,) = accumulation(UnperturbedCall(name, func, args, {}, result))
    assert torch.allclose(found, expected, rtol=1e-5, atol=0.0)


def test_an_infinity_in_one_row_leaves_the_amplitudes_of_the_others():
    a, b = values(4, 8), values(8, 3, seed=1)
    whole = accumulation(UnperturbedCall("mm", torch.ops.aten.mm.default, (a, b), {}, a @ b))[0]
    a[0, 0] = torch.inf
    found = accumulation(UnperturbedCall("mm", torch.ops.aten.mm.default, (a, b), {}, a @ b))[0]
    assert torch.allclose(found[1:], whole[1:], rtol=1e-5, atol=0.0)


CONVOLUTION = torch.ops.aten.convolution.default
ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


def _in_order(left, right):
    """A product of matrices, one term after the other, in float32."""
    total = torch.zeros(*left.shape[:-1], right.shape[-1])
    for n in range(left.shape[-1]):
        total = total + left.float()[..., n : n + 1] * right.float()[..., n : n + 1, :]
    return total.double()


@pytest.mark.parametrize("is_sorted", [True, False])
def test_a_convolution_may_sum_its_channels_in_order(is_sorted):
    x = torch.linspace(-3, 3, 64).double().view(1, 64, 1, 1).expand(1, 64, 4, 4).contiguous()
    x = x if is_sorted else values(1, 64, 4, 4)
    weights = values(3, 64, 3, 3, seed=1).abs()
    args = (x, weights, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    exact = CONVOLUTION(*args)
    (amplitude,) = accumulation(UnperturbedCall("convolution", CONVOLUTION, args, {}, exact))
    found = _in_order(weights.flatten(1), F.unfold(x, 3, padding=1)[0]).view_as(exact)
    score = (found - exact).abs() / (UNIT * amplitude)
    assert 0.05 < score.square().mean().sqrt() < 1


@pytest.mark.parametrize("is_transposed", [False, True])
def test_the_groups_of_a_convolution_sum_only_their_own_channels(is_transposed):
    x, weights = values(2, 12, 5, 5), values(12, 2, 3, 3, seed=1)
    weights = weights[:, :1] if is_transposed else weights[:, :1].repeat(2, 1, 1, 1)
    rest = ([1, 1], [1, 1], [1, 1], is_transposed, [0, 0])

    def amplitudes(x, weights, groups):
        exact = CONVOLUTION(x, weights, None, *rest, groups)
        args = (x, weights, None, *rest, groups)
        found = accumulation(UnperturbedCall("convolution", CONVOLUTION, args, {}, exact))
        backward = torch.ops.aten.convolution_backward.default
        args = (exact, x, weights, None, *rest, groups, [True, True, False])
        call = UnperturbedCall("convolution_backward", backward, args, {}, backward(*args))
        return [*found, *accumulation(call)[:2]]

    whole = amplitudes(x, weights, 12)
    alone = [amplitudes(*one, 1) for one in zip(x.chunk(12, 1), weights.chunk(12, 0), strict=True)]
    for found, parts, axis in zip(whole, zip(*alone, strict=True), (1, 1, 0), strict=True):
        assert torch.allclose(found, torch.cat(parts, axis), rtol=1e-4, atol=0.0)


@pytest.mark.parametrize("is_sorted", [True, False])
def test_attention_may_sum_its_values_in_order(is_sorted):
    query, key = values(1, 2, 4, 8) / 8, values(1, 2, 128, 8, seed=1)
    value = torch.linspace(-3, 3, 128).double().view(1, 1, 128, 1).expand(1, 2, 128, 8).contiguous()
    value = value if is_sorted else values(1, 2, 128, 8, seed=2)
    args = (query, key, value)
    exact = ATTENTION(*args)
    call = UnperturbedCall(
        "_scaled_dot_product_flash_attention_for_cpu", ATTENTION, args, {}, exact
    )
    amplitude = accumulation(call)[0][0].amplitude
    weights = (query @ key.mT / 8**0.5).softmax(-1).float().double()
    error = _in_order(weights, value) - weights @ value.float().double()
    score = error.abs() / (UNIT * amplitude)
    assert 0.05 < score.square().mean().sqrt() < 1


def test_every_way_to_sum_has_its_error() -> None:
    assert set(_RULES) == set(SUMMATIONS.values())
