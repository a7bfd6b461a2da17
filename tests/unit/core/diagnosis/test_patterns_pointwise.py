"""Pointwise functions: what was done to the argument, the result, an operand or the derivative."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from drawing import normal
from paritas.core.diagnosis.diagnose import diagnose
from paritas.core.judging.failures import call_context

aten = torch.ops.aten


X, GRADIENT, OTHER = normal(12, 20), normal(12, 20, seed=1), normal(12, 20, seed=2)
POSITIVE = X.abs() + 0.3
LEVELS = (aten.fake_quantize_per_tensor_affine.default, 2 * X, 0.05, 33, -128, 127)
LEFT, WEIGHT, BIAS = normal(12, 64, seed=3), normal(20, 64, seed=4), normal(20, seed=5)
KEPT = (OTHER > -1).float() / 0.9


def quantised(weight: Tensor, most: float, group: int) -> Tensor:
    groups = weight.reshape(-1, group)
    scale = groups.abs().amax(1, keepdim=True) / most
    return ((groups / scale).round() * scale).reshape(weight.shape)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("kind", "sentence", "candidate", "call"),
    [
        ("wrong factor", "the argument is multiplied by 1.7", F.gelu(1.7 * X), (F.gelu, X)),
        ("offset", "0.5 is added to the argument", F.silu(X + 0.5), (F.silu, X)),
        ("sign", "the argument of sigmoid is negated", (-X).sigmoid(), (torch.sigmoid, X)),
        ("other function", "gelu is applied twice", F.gelu(F.gelu(X)), (F.gelu, X)),
        (
            "other function",
            "the normal distribution function instead of gelu",
            torch.special.ndtr(X),
            (F.gelu, X),
        ),
        ("other function", "relu instead of elu", X.relu(), (F.elu, X)),
        ("sign", "sub instead of add", X - OTHER, (torch.add, X, OTHER)),
        ("missing operand", "other is left out", X.clone(), (torch.add, X, OTHER)),
        ("missing operand", "other is left out", X.clone(), (torch.div, X, 8.0)),
        ("wrong factor", "other is applied twice", X * OTHER * OTHER, (torch.mul, X, OTHER)),
        ("wrong argument", "alpha is 0.7 instead of 1", F.elu(X, 0.7), (F.elu, X)),
        (
            "wrong argument",
            "max is 2 instead of 1",
            (3 * X).clamp(-1, 2),
            (torch.clamp, 3 * X, -1, 1),
        ),
        ("clipped", "other is limited to at most 1", X * (KEPT > 0), (torch.mul, X, KEPT)),
        (
            "other function",
            "rounded to the nearest, not cut off",
            (5 * X).round().long(),
            (Tensor.long, 5 * X),
        ),
        (
            "other function",
            "the derivative of silu instead of the derivative of gelu",
            aten.silu_backward(GRADIENT, X),
            (aten.gelu_backward.default, GRADIENT, X),
        ),
        (
            "missing operand",
            "the derivative of the gate is left out",
            GRADIENT * X.sigmoid(),
            (aten.silu_backward.default, GRADIENT, X),
        ),
        (
            "missing operand",
            "the gradient that comes in is left out",
            X.tanh() * 0 + 1 - X.tanh() ** 2,
            (aten.tanh_backward.default, GRADIENT, X.tanh()),
        ),
        (
            "other function",
            "y instead of the derivative",
            GRADIENT * X.sigmoid(),
            (aten.sigmoid_backward.default, GRADIENT, X.sigmoid()),
        ),
        (
            "other function",
            "the derivative of leaky_relu instead of the derivative of threshold",
            torch.where(X > 0, GRADIENT, 0.01 * GRADIENT),
            (aten.threshold_backward.default, GRADIENT, X, 0.0),
        ),
        (
            "wrong argument",
            "zero_point is 0 instead of 33",
            LEVELS[0](2 * X, 0.05, 0, -128, 127),
            LEVELS,
        ),
        (
            "precision",
            "computed on input 1 rounded to int8 with a scale per row",
            F.linear(LEFT, quantised(WEIGHT, 127, 64), BIAS),
            (F.linear, LEFT, WEIGHT, BIAS),
        ),
        (
            "precision",
            "computed on input 1 rounded to int4 with a scale per 16 elements",
            F.linear(LEFT, quantised(WEIGHT, 7, 16), BIAS),
            (F.linear, LEFT, WEIGHT, BIAS),
        ),
        (
            "precision",
            "rounded to float8_e5m2",
            X.tanh().to(torch.float8_e5m2).float(),
            (torch.tanh, X),
        ),
    ],
)
def test_a_mistake_in_a_pointwise_function_is_named(
    kind: str, sentence: str, candidate: Tensor, call: tuple[Any, ...]
) -> None:
    target, *args = call
    right = target(*args)
    found = diagnose(candidate, right, context=call_context(target, tuple(args), {}))
    assert found.best is not None
    assert (found.best.kind, found.best.sentence.rpartition(": ")[2]) == (kind, sentence)


@pytest.mark.parametrize(
    ("sentence", "candidate"),
    [
        ("copied from another place along axis 0: slice 0 at 11", torch.cat([X[:11], X[:1]])),
        (
            "copied from another place along axis 0: slice 3 at 5, 4 at 6",
            torch.cat([X[:5], X[3:5], X[7:]]),
        ),
    ],
)
def test_a_slice_that_is_there_twice_is_a_copy_and_no_permutation(
    sentence: str, candidate: Tensor
) -> None:
    found = diagnose(candidate, X)
    assert found.best is not None
    assert (found.best.kind, found.best.sentence) == ("copy", sentence)


def test_zeros_are_no_copy_of_a_buffer_that_was_zero() -> None:
    buffer, value = torch.zeros(12, 20), torch.full((12, 20), 1.5)
    candidate = torch.cat([value[:, :15], buffer[:, 15:]], 1)
    context = call_context(aten.copy.default, (buffer, value), {})
    found = diagnose(candidate, value, context=context)
    assert found.best is not None
    assert found.best.kind == "zeros"


def test_scattered_values_of_an_input_are_no_copy_of_it() -> None:
    """The zeros of a dropout that does not scale are right, and no copy."""
    found = diagnose(X * (KEPT > 0), X * KEPT, context=call_context(torch.mul, (X, KEPT), {}))
    assert "copy" not in [one.kind for one in found.patterns]
