"""Gates, choices and roundings at their edge: noise where rounding decides, faults elsewhere."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch import nn
from torch.nn import functional

from paritas import MismatchError, VerifyConfig, verify
from paritas.core.results.findings import Status

CONFIG = VerifyConfig(verify_double_backward=False, verify_second_call=False)


def relu(x):
    return functional.relu(x)


def max_pool(x):
    return functional.max_pool1d(x, 2).repeat_interleave(2, -1)


def routing(x):
    top, chosen = x.topk(8, -1)
    return torch.zeros_like(x).scatter(-1, chosen, top.softmax(-1) * 4)


class Chain(nn.Module):
    """Linear layers with some pointwise arithmetic before a gate.

    `wide` computes the pointwise part in float32, as a compiler that fuses it does: it rounds less
    than the reference, and so other gates fall the other way.
    """

    def __init__(self, gate, *, wide=False):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(32, 32) for _ in range(3)])
        self.gate, self.wide = gate, wide

    def forward(self, x):
        for layer in self.layers:
            y, skip = layer(x), x
            if self.wide:
                y, skip = y.float(), skip.float()
            x = self.gate((y * 1.3 - skip * 0.7 + 0.1).to(x.dtype))
        return x


def checked(reference, candidate, *inputs):
    candidate.load_state_dict(reference.state_dict())
    try:
        return verify(list(inputs), reference, candidate, CONFIG)
    except MismatchError as error:
        return error.verdict


@pytest.mark.one_in(3)
@pytest.mark.parametrize("gate", [relu, max_pool, routing])
@pytest.mark.parametrize("seed", range(3))
def test_a_rewrite_that_turns_gates_within_rounding_passes(gate, seed, undiagnosed):
    torch.manual_seed(seed)
    reference, candidate = Chain(gate).bfloat16(), Chain(gate, wide=True).bfloat16()
    verdict = checked(reference, candidate, torch.randn(64, 32).bfloat16())
    assert verdict.passed, [str(f) for f in verdict.findings if not f.status.passes()]
    assert all(
        finding.status is not Status.UNSTABLE
        for finding in verdict.findings
        if finding.item.kind.is_gradient
    )


class WrongGate(Chain):
    """One gate of 2,048 is taken the other way, far from its edge, and natively alone."""

    def forward(self, x):
        for number, layer in enumerate(self.layers):
            z = layer(x) * 1.3 - x * 0.7 + 0.1
            if number == 1 and x.dtype is torch.bfloat16:
                where = torch.zeros_like(z)
                where.view(-1)[z.detach().abs().argmax()] = 1
                z = z * (1 - 2 * where)
            x = self.gate(z)
        return x


def test_a_gate_that_is_wrong_far_from_its_edge_fails(undiagnosed):
    torch.manual_seed(0)
    reference, candidate = Chain(relu).bfloat16(), WrongGate(relu).bfloat16()
    verdict = checked(reference, candidate, torch.randn(64, 32).bfloat16())
    assert not verdict.passed


class CoarseProduct(torch.autograd.Function):
    """A product whose weight gradient is accumulated with few digits, in float32 alone."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx, upstream):
        x, weight = ctx.saved_tensors
        found = upstream.T @ x
        found = found.bfloat16().to(x.dtype) if x.dtype is torch.float32 else found
        return upstream @ weight, found


class BeforeAGate(nn.Module):
    """A gate after a second layer: if it flips, the whole gradient of the first weight moves."""

    def __init__(self, product):
        super().__init__()
        self.first, self.second = nn.Linear(32, 32, bias=False), nn.Linear(32, 32)
        self.product = product

    def forward(self, x):
        return self.second(torch.tanh(self.product(x, self.first.weight))).relu()


def reversed_product(x, weight):
    return x.flip(1) @ weight.flip(1).T


def put_at_its_threshold(model, x):
    """Move a bias so that one gate is within rounding of it; float32 and float64 agree about it."""
    exact = copy.deepcopy(model).double()
    with torch.no_grad():
        model.second.bias[0] -= float(exact.second(torch.tanh(exact.first(x.double())))[0, 0])
        while True:
            exact.load_state_dict(model.state_dict())
            signs = [float(one(x.to(one.first.weight.dtype))[0, 0]) > 0 for one in (model, exact)]
            if signs[0] is signs[1]:
                return
            model.second.bias[0] += 1e-8 if signs[0] else -1e-8


def test_an_open_gate_excuses_its_own_effect_and_no_other_error(undiagnosed):
    torch.manual_seed(0)
    reference, x = BeforeAGate(functional.linear), torch.randn(8, 32)
    put_at_its_threshold(reference, x)
    verdict = checked(reference, BeforeAGate(CoarseProduct.apply), x)
    assert verdict.status is Status.DEGRADED
    assert checked(reference, BeforeAGate(reversed_product), x).passed


class SlopeAtZero(torch.autograd.Function):
    """relu whose gradient at zero is one."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clamp(min=0)

    @staticmethod
    def backward(ctx, upstream):
        (x,) = ctx.saved_tensors
        return upstream * (x >= 0)


def test_a_gate_on_the_wrong_side_of_exact_zeros_is_different(undiagnosed):
    x = torch.randn(16, 32)
    x[x.abs() < 0.5] = 0
    x.requires_grad_()
    with pytest.raises(MismatchError) as caught:
        verify([x], functional.relu, SlopeAtZero.apply, CONFIG)
    assert caught.value.verdict.status is Status.DIFFERENT


class Attention(nn.Module):
    """The gradient of a key's bias is zero by its formula: softmax does not see it."""

    def __init__(self, *, scales_keys=False):
        super().__init__()
        self.project = nn.ModuleList([nn.Linear(32, 32) for _ in range(3)])
        self.scales_keys = scales_keys

    def forward(self, x):
        query, key, value = (layer(x) for layer in self.project)
        scale = 32**0.5
        scores = query @ (key / scale).mT if self.scales_keys else query @ key.mT / scale
        return scores.softmax(-1) @ value


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_cancels_to_rounding_noise_is_equivalent(dtype, undiagnosed):
    torch.manual_seed(0)
    reference, candidate = Attention().to(dtype), Attention(scales_keys=True).to(dtype)
    verdict = checked(reference, candidate, torch.randn(2, 16, 32).to(dtype))
    (bias,) = (f for f in verdict.findings if f.path == "gradient of project.1.bias")
    assert bias.status is Status.EQUIVALENT
    assert verdict.status is Status.EQUIVALENT


# --- Rounding that decides how many rows there are ------------------------------------------------


class Selected(nn.Module):
    """The rows whose score is not below a limit, times a factor; as detectors of keypoints do."""

    def __init__(self, factor=1.0, left_out=0, *, is_exact=False):
        super().__init__()
        self.factor, self.left_out, self.is_exact = factor, left_out, is_exact

    def forward(self, x, weight, limit):
        scores = x @ weight[:, 0]
        if self.is_exact:
            scores, limit = x.double() @ weight[:, 0].double(), limit.double()
        chosen = scores >= limit
        return ((x @ weight) * self.factor)[chosen][self.left_out :]


@functools.cache
def undecided_rows():
    """Inputs of which one row more is chosen in float32 than in float64."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(shape, generator=generator) for shape in ((40, 64), (64, 16)))
    scores, exact = x @ weight[:, 0], x.double() @ weight[:, 0].double()
    above = (scores.double() > exact).nonzero()[:, 0]
    nearest = above[(scores[above] - scores.median()).abs().argmin()]
    inputs = [x, weight, scores[nearest].clone()]
    assert len(Selected()(*inputs)) == len(Selected(is_exact=True)(*inputs)) + 1 > 10
    return inputs


def judged_rows(candidate, *, lift=True):
    config = VerifyConfig(raise_on_mismatch=False, verify_gradients=False, lift=lift)
    verdict = verify(undecided_rows(), Selected(), candidate, config)
    return next(one for one in verdict.findings if one.path == "output")


class OffByRoundings(Selected):
    """Natively, its rounding is above what a dtype alone tells; in float64 it is as good."""

    def forward(self, x, weight, limit):
        found = super().forward(x, weight, limit)
        return (
            found * (1 + 100 * torch.finfo(torch.float32).eps)
            if x.dtype == torch.float32
            else found
        )


def test_values_whose_number_rounding_decides_are_unstable():
    finding = judged_rows(OffByRoundings())
    assert finding.status is Status.UNSTABLE
    assert "rounding decides how large this value is" in finding.reason


def test_a_shape_that_rounding_decides_is_unstable():
    finding = judged_rows(Selected(is_exact=True))
    assert finding.status is Status.UNSTABLE
    assert "rounding decides how large it is" in finding.reason


@pytest.mark.parametrize(
    "candidate",
    [Selected(1.00001), Selected(1.001), Selected(left_out=1), Selected(1.001, is_exact=True)],
)
def test_a_fault_in_values_whose_number_rounding_decides_is_found(candidate):
    assert judged_rows(candidate).status is Status.DIFFERENT


def test_without_a_lifted_run_no_other_number_of_rows_passes():
    """The values of other rows cannot be compared natively."""
    assert judged_rows(Selected(is_exact=True), lift=False).status is Status.UNVERIFIED
    assert judged_rows(Selected(left_out=2), lift=False).status is Status.DIFFERENT
    assert judged_rows(OffByRoundings(), lift=False).status is Status.DIFFERENT
