"""Mistakes inside of norms, softmax, losses and running sums, which no argument can express."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from drawing import normal64
from paritas.core.diagnosis.calls import LiveCall
from paritas.core.diagnosis.diagnose import diagnose
from paritas.core.judging.failures import call_context

if TYPE_CHECKING:
    from collections.abc import Callable

    from paritas.core.results.findings import Diagnosis

aten = torch.ops.aten


def diagnosed(candidate: Tensor, target: Callable[..., Any], *args: Any) -> Diagnosis:
    right = target(*args)
    right = right if isinstance(right, Tensor) else right[0]
    noise = 1e-9 * (right.abs() + right.abs().mean())
    context = call_context(target, args, {})
    return diagnose(candidate, right, noise=noise, context=context)


X = 0.3 + 1.5 * normal64(4, 5, 12)
SMALL = 0.01 * X
WEIGHT, BIAS = 1 + 0.2 * normal64(12, seed=4), 0.5 * normal64(12, seed=5)
IMAGE = 0.4 + normal64(3, 6, 4, 4, seed=7)
SCALE, MOVE = 1 + 0.2 * normal64(6, seed=8), normal64(6, seed=9)
LOGITS, LABELS = normal64(9, 7, seed=10), torch.tensor([0, 3, 6, 2, 5, 1, 4, 6, 0])
IGNORING = LABELS.where(LABELS != 3, -100)


def mean(x: Tensor) -> Tensor:
    return x.mean(-1, keepdim=True)


def variance(x: Tensor) -> Tensor:
    return x.var(-1, keepdim=True, correction=0)


def layer_norm(x: Tensor, centre: Tensor, var: Tensor, eps: float = 1e-5) -> Tensor:
    return (x - centre) / (var + eps).sqrt() * WEIGHT + BIAS


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """Written out, as in most models."""
    squares = x.pow(2).mean(-1, keepdim=True)
    return weight * (x * torch.rsqrt(squares + eps))


def rms(x: Tensor, squares: Tensor, eps: float = 1e-6) -> Tensor:
    return x / (squares + eps).sqrt() * WEIGHT


def softmax(x: Tensor) -> Tensor:
    powers = (x - x.amax(-1, keepdim=True)).exp()
    return powers / powers.sum(-1, keepdim=True)


def group_norm(x: Tensor, groups: int) -> Tensor:
    return F.group_norm(x, groups) * SCALE.view(-1, 1, 1) + MOVE.view(-1, 1, 1)


PART = X[..., :9].sum(-1, keepdim=True) / 12
LAYER = (F.layer_norm, X, [12], WEIGHT, BIAS)
RMS = (rms_norm, X, WEIGHT)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("kind", "candidate", "call"),
    [
        ("wrong statistics", layer_norm(X, mean(X).roll(1, 1), variance(X)), LAYER),
        ("wrong statistics", layer_norm(X, mean(X), variance(X) * 12 / 16), LAYER),
        ("wrong statistics", layer_norm(X, PART, mean((X - PART) ** 2)), LAYER),
        (
            "eps",
            layer_norm(SMALL, mean(SMALL), variance(SMALL), 3e-4),
            (F.layer_norm, SMALL, [12], WEIGHT, BIAS),
        ),
        ("eps", SMALL / (mean(SMALL**2).sqrt() + 1e-6) * WEIGHT, (rms_norm, SMALL, WEIGHT)),
        ("wrong axis", rms(X, X.square().mean(1, keepdim=True)), RMS),
        ("wrong statistics", X / (X.abs().amax(-1, True) + 1e-6) * WEIGHT, RMS),
        ("swapped operands", rms(X * WEIGHT, mean((X * WEIGHT) ** 2)) / WEIGHT, RMS),
        ("wrong statistics", group_norm(IMAGE, 2), (group_norm, IMAGE, 3)),
        ("wrong factor", (X / 1.7).softmax(-1), (F.softmax, X, -1)),
        (
            "wrong statistics",
            F.batch_norm(IMAGE, IMAGE.mean((0, 2, 3)), SCALE.square()),
            (F.batch_norm, IMAGE, MOVE, SCALE.square()),
        ),
        ("wrong index", (X - X.logsumexp(-1, True).roll(1, 1)).exp(), (F.softmax, X, -1)),
        (
            "wrong reduction",
            X.exp() / (X.exp().sum(-1, True) + 8),
            (F.softmax, X, -1),
        ),
        ("partial sum", (X - X[..., :9].logsumexp(-1, True)).exp(), (softmax, X)),
        (
            "partial sum",
            torch.cat([part.cumsum(1) for part in X.split(3, 1)], 1),
            (torch.cumsum, X, 1),
        ),
        ("wrong statistics", X.square().sum(-1) / 11, (torch.var, X, -1)),
        (
            "mask",
            F.cross_entropy(LOGITS, IGNORING.clamp(min=0)),
            (F.cross_entropy, LOGITS, IGNORING),
        ),
        (
            "wrong argument",
            F.cross_entropy(LOGITS, LABELS, label_smoothing=0.1),
            (F.cross_entropy, LOGITS, LABELS),
        ),
    ],
)
def test_a_mistake_inside_of_a_norm_a_softmax_or_a_loss_is_named(
    kind: str, candidate: Tensor, call: tuple[Any, ...]
) -> None:
    found = diagnosed(candidate, *call)

    assert found.best is not None
    assert found.best.kind == kind


def test_terms_that_a_backward_kernel_leaves_out_are_named() -> None:
    grad = normal64(4, 5, 12, seed=11)
    centre, root = mean(X), (variance(X) + 1e-5).rsqrt()
    call = (X, [12], centre, root, WEIGHT, BIAS, [True, True, True])
    weighted, normalised = grad * WEIGHT, (X - centre) * root
    part = (weighted * normalised)[..., :8].sum(-1, True) / 12

    found = diagnosed(
        (weighted - mean(weighted) - normalised * part) * root,
        aten.native_layer_norm_backward.default,
        grad,
        *call,
    )

    assert found.best is not None
    assert found.best.kind == "partial sum"
    assert "the mean of the products" in found.best.sentence


def test_a_function_that_gives_one_number_for_all_is_not_named() -> None:
    squares = 1 + 0.05 * normal64(5, 1, seed=12)

    found = diagnosed(torch.ones_like(squares), torch.rsqrt, squares)

    assert found.best is None or found.best.kind != "other function"


def test_a_recorded_call_gives_what_the_call_itself_gives() -> None:
    def program(x: Tensor, running: Tensor) -> Tensor:
        y = F.batch_norm(x, running, running.square() + 1, training=True)
        return y.exp().sum(1)

    running = normal64(6, seed=13)
    call = LiveCall(program, (IMAGE, running), {})
    places = [place for place, step in call.steps if step.name == "exp"]

    (doubled,) = call.results(places[0], lambda step: 2 * step.run(), wide=True)

    torch.testing.assert_close(doubled, 2 * program(IMAGE, running.clone()))
    assert math.isfinite(float(doubled.sum()))
    torch.testing.assert_close(running, normal64(6, seed=13))


def test_a_call_that_writes_to_its_own_values_is_not_recorded() -> None:
    def program(x: Tensor) -> Tensor:
        y = x + 1
        y.mul_(3)
        return y.exp()

    call = LiveCall(program, (X[0],), {})
    place = next(place for place, step in call.steps if step.name == "add")

    (changed,) = call.results(place, lambda step: step.run(other=2), wide=True)

    torch.testing.assert_close(changed, (3 * (X[0] + 2)).exp())


def test_a_mask_that_is_not_applied_is_told_of_the_mask_not_of_what_it_becomes_inside() -> None:
    query, key, value = (normal64(2, 2, 6, 4, seed=seed) for seed in (20, 21, 22))
    mask = torch.ones(2, 1, 6, 6, dtype=torch.bool)
    mask[1, :, :, 4:] = False
    unmasked = F.scaled_dot_product_attention(query, key, value)

    best = diagnosed(unmasked, F.scaled_dot_product_attention, query, key, value, mask).best

    assert best is not None
    assert best.kind == "mask"
