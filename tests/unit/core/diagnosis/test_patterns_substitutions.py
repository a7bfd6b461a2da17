"""Another value in the place of the right one: operands, results, roundings, limits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from drawing import normal
from paritas.core.diagnosis.diagnose import diagnose
from paritas.core.judging.failures import call_context
from paritas.core.results.findings import PatternKind

if TYPE_CHECKING:
    from collections.abc import Callable

aten = torch.ops.aten


X, Y = normal(6, 9), normal(6, 9, seed=1)
WEIGHT, INPUT = 0.2 * normal(10, 24, seed=2), normal(5, 24, seed=3)
IMAGES = normal(4, 5, 6)
LOGITS, TARGETS = normal(8, 5).log_softmax(1), normal(8, 5, seed=3).softmax(1)


def said_of(candidate: Tensor, target: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """The kind and the sentence; empty if there are none."""
    right = target(*args, **kwargs)
    context = call_context(target, args, kwargs)
    found = diagnose(candidate, right, context=context).patterns
    return f"{found[0].kind}: {found[0].sentence}" if found else ""


def gated(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def quantised(x: Tensor, dim: int | None) -> Tensor:
    largest = x.abs().amax() if dim is None else x.abs().amax(dim, keepdim=True)
    return (x / (largest / 127)).round() * (largest / 127)


def requantised(x: Tensor) -> Tensor:
    return (x / 0.05).round().clamp(-128, 127) * 0.05


def wrapped(x: Tensor) -> Tensor:
    return (x + 128) % 256 - 128


@pytest.mark.parametrize(
    ("expected", "candidate", "call"),
    [
        ("missing operand: self is used in the place of other", X * X, (torch.mul, X, Y)),
        ("missing operand: other is used in the place of self", Y + Y, (torch.add, X, Y)),
        ("other function: the result is rounded down", (X / Y).floor(), (torch.div, X, Y)),
        ("other function", (9 * X / Y).round(), (torch.div, 9 * X, Y)),
        ("swapped operands: gate and up are swapped", gated(Y, X), (gated, X, Y)),
        ("missing operand: gate is used in the place of up", gated(X, X), (gated, X, Y)),
        (
            "precision: the reciprocal of other is rounded to bfloat16",
            X * (1 / Y).bfloat16().float(),
            (torch.div, X, Y),
        ),
        (
            "swapped operands: the divergence",
            LOGITS.exp() * (LOGITS - TARGETS.log()),
            (F.kl_div, LOGITS, TARGETS, None, None, "none"),
        ),
        (
            "wrong axis: mean and variance are taken along axes [0, 2] instead of [2]",
            F.batch_norm(IMAGES, None, None, training=True),
            (F.instance_norm, IMAGES),
        ),
        (
            "swapped operands: weight and bias are applied before the norm",
            F.layer_norm(X * Y[0] + Y[1], [9]),
            (F.layer_norm, X, [9], Y[0].clone(), Y[1].clone()),
        ),
        ("wrapped: ", wrapped((9 * X / 0.05).round()) * 0.05, (requantised, 9 * X)),
        ("eps: ", X / (X.norm(dim=1, keepdim=True) + 0.1), (F.normalize, X, 2.0, 1, 0.1)),
    ],
)
def test_what_stands_in_the_place_of_the_right_value_is_named(
    expected: str, candidate: Tensor, call: tuple[Any, ...]
) -> None:
    kind, _, words = expected.partition(": ")
    found = said_of(candidate, *call)
    assert found.startswith(kind)
    assert words in found


@pytest.mark.parametrize("dim", [None, 0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_weight_in_eight_bits_is_precision_whatever_shares_a_scale(
    dim: int | None, dtype: torch.dtype
) -> None:
    given = F.linear(INPUT.to(dtype), quantised(WEIGHT.to(dtype), dim))
    right = F.linear(INPUT.to(dtype), WEIGHT.to(dtype))
    context = call_context(F.linear, (INPUT, WEIGHT), {})
    (pattern,) = diagnose(given, right, context=context).patterns
    assert pattern.kind == "precision"
    assert "int8 with a scale per" in pattern.sentence


def test_statistics_of_a_norm_in_bfloat16_are_precision() -> None:
    mean = X.mean(1, keepdim=True).bfloat16().float()
    root = (X.var(1, keepdim=True, correction=0) + 1e-5).rsqrt().bfloat16().float()
    assert said_of((X - mean) * root, F.layer_norm, X, [9]).startswith("precision: ")


def test_eight_bits_that_wrap_are_named_with_a_scale_that_is_solved_for() -> None:
    right = F.linear(INPUT, WEIGHT)
    scale = float(right.abs().max()) / 160
    found = said_of(wrapped((right / scale).round()) * scale, F.linear, INPUT, WEIGHT)
    assert found == f"wrapped: wrapped around: multiples of {scale:.4g}, as int8 without its limits"


def test_a_scaled_gradient_that_overflows_is_named_though_the_rest_is_rounded() -> None:
    right = INPUT @ WEIGHT.T
    given = (right * 40000.0).half().float() / 40000.0
    assert torch.isinf(given).any()
    assert said_of(given, torch.mm, INPUT, WEIGHT.T).startswith("overflow: overflow: values beyond")


def test_one_that_becomes_minus_one_is_another_sign_and_did_not_wrap() -> None:
    right = torch.randint(0, 2, (4, 9), generator=torch.Generator().manual_seed(2)).float()
    kinds = {pattern.kind for pattern in diagnose(-right, right).patterns}
    assert kinds == {PatternKind.SIGN}


def test_rounded_results_are_not_called_wrapped_or_narrow() -> None:
    found = said_of((6 * X).round(), torch.mul, X, 6.0)
    assert found.startswith("other function: the result is rounded to a whole number")


def test_garbage_of_ordinary_size_gets_no_word() -> None:
    given = F.linear(INPUT, WEIGHT).clone()
    given[:, -1] = 0.2 + normal(5, seed=77)
    assert said_of(given, F.linear, INPUT, WEIGHT) == ""


def test_a_batch_norm_without_running_statistics_survives_its_diagnosis() -> None:
    mean, variance = IMAGES.mean((0, 2)), IMAGES.var((0, 2))
    given = F.batch_norm(IMAGES, mean, variance)
    found = said_of(given, F.batch_norm, IMAGES, None, None, None, None, True)
    assert "the variance is divided by 23 instead of 24" in found
