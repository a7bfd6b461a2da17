"""Faults for building: functions of single elements."""

from __future__ import annotations

from typing import Any

import torch
from benchmarks.places.calls import Call, Catalogue, fits
from torch import Tensor
from torch.nn import functional

FAULTS = Catalogue()


@FAULTS.fault("sub div", kinds=["swapped operands", "sign"])
def operands_swapped(call: Call) -> Any:
    """B - a, b / a."""
    left, right = call.args[:2]
    fits(isinstance(left, Tensor) and left.is_floating_point())
    fits(not (isinstance(right, Tensor) and bool((right == 0).any())))
    swapped = right - left if call.name == "sub" else right / left
    fits(bool(swapped.isfinite().all()))
    return call.instead(swapped)


@FAULTS.fault("gelu", kinds=["approximation", "other function"], loose=["wrong argument"])
def gelu_by_tanh(call: Call) -> Any:
    """The approximation that other libraries use."""
    now = call.kwargs.get("approximate", "none")
    other = "tanh" if now == "none" else "none"
    return functional.gelu(call.tensor(0, "input"), approximate=other)


@FAULTS.fault("relu", kinds=["other function"], loose=["wrong argument"])
def leaky_relu(call: Call) -> Any:
    """A slope of 0.01 below zero."""
    return functional.leaky_relu(call.tensor(0, "input"))


@FAULTS.fault("silu", kinds=["other function"], loose=["approximation"])
def silu_becomes_gelu(call: Call) -> Any:
    """The wrong activation."""
    return functional.gelu(call.tensor(0, "input"))


@FAULTS.fault("mul div", kinds=["scale", "wrong factor", "missing operand"], loose=["copy"])
def factor_left_out(call: Call) -> Any:
    """A multiplication by a number is not done."""
    other = call.args[1]
    fits(isinstance(other, int | float) and other != 1)
    return call.instead(call.tensor(0).clone())


@FAULTS.fault("linear layer_norm conv2d add", kinds=["scale", "wrong factor"])
def one_percent_too_large(call: Call) -> Any:
    """A factor that is slightly off."""
    return call.instead(call.result() * 1.01)


@FAULTS.fault(
    "add", kinds=["residual", "copy", "missing operand"], loose=["offset", "missing bias"]
)
def residual_dropped(call: Call) -> Any:
    """One of two summands is not added."""
    left, right = call.args[:2]
    fits(isinstance(left, Tensor) and isinstance(right, Tensor))
    fits(left.shape == right.shape and left.is_floating_point())
    return call.instead(right.clone())


@FAULTS.fault(
    "add sub", kinds=["sign"], loose=["residual", "offset", "other function", "wrong factor"]
)
def sign_of_the_second_summand(call: Call) -> Any:
    """A - b instead of a + b."""
    left, right = call.args[:2]
    fits(isinstance(left, Tensor) and left.is_floating_point() and not call.kwargs)
    return call.instead(left - right if call.name == "add" else left + right)


@FAULTS.fault("tanh sigmoid gelu silu", kinds=["clipped"])
def clipped_at_half(call: Call) -> Any:
    """Large results are cut off."""
    value = call.result()
    return call.instead(value.clamp(max=float(value.max()) / 2))


@FAULTS.fault("sin cos", kinds=["other function"])
def sine_and_cosine_exchanged(call: Call) -> Any:
    """The other one of the two."""
    value = call.tensor(0)
    return value.cos() if call.name == "sin" else value.sin()


@FAULTS.fault("exp", kinds=["approximation"], loose=["other function"])
def exp_by_a_power(call: Call) -> Any:
    """(1 + x / 1024) ** 1024."""
    value = call.tensor(0)
    return call.instead((1 + value / 1024).clamp(min=0) ** 1024)


@FAULTS.fault("pow square", kinds=["other function"], loose=["wrong argument"])
def absolute_value_for_a_square(call: Call) -> Any:
    """|x| instead of x**2."""
    fits(call.name == "square" or call.args[1] == 2)
    return call.instead(call.tensor(0).abs())


@FAULTS.fault("mul div", kinds=["scale", "wrong factor"])
def factor_applied_twice(call: Call) -> Any:
    """Multiplied by a number two times."""
    other = call.args[1]
    fits(isinstance(other, int | float) and other not in {1, -1, 0})
    return call.instead(call.result() * other if call.name == "mul" else call.result() / other)


@FAULTS.fault("neg", kinds=["sign"], loose=["copy", "wrong factor"])
def not_negated(call: Call) -> Any:
    """The sign of a rotated half is forgotten."""
    return call.instead(call.tensor(0).clone())


@FAULTS.fault("relu gelu silu tanh", kinds=["clipped"])
def saturates_early(call: Call) -> Any:
    """Everything above 70 % of the largest value is that."""
    value = call.result()
    return call.instead(value.clamp(max=0.7 * float(value.abs().max())))


@FAULTS.fault("mul add sub div", kinds=["precision"])
def computed_in_bfloat16(call: Call) -> Any:
    """Cast first, then computed."""
    left, right = call.args[:2]
    fits(isinstance(left, Tensor) and isinstance(right, Tensor) and left.is_floating_point())
    fits(right.is_floating_point())
    return call.instead(call.put(0, left.bfloat16()).put(1, right.bfloat16()).run())


@FAULTS.fault("silu", kinds=["other function", "approximation"])
def hard_swish(call: Call) -> Any:
    """The piecewise form."""
    return functional.hardswish(call.tensor(0, "input"))


@FAULTS.fault("gelu", kinds=["approximation", "other function"])
def gelu_by_a_sigmoid(call: Call) -> Any:
    """X * sigmoid(1.702 x)."""
    value = call.tensor(0, "input")
    return value * torch.sigmoid(1.702 * value)


@FAULTS.fault("tanh sigmoid", kinds=["approximation"], loose=["other function"])
def rational_approximation(call: Call) -> Any:
    """Pade's of tanh."""
    value = call.tensor(0) / (2 if call.name == "sigmoid" else 1)
    square = value * value
    result = (value * (27 + square) / (27 + 9 * square)).clamp(-1, 1)
    return call.instead(result if call.name == "tanh" else (1 + result) / 2)


@FAULTS.fault("mul", kinds=["residual"], loose=["offset", "missing bias", "axis offset"])
def multiplied_and_added(call: Call) -> Any:
    """A fused multiply-add with an addend that is not zero."""
    left, right = call.args[:2]
    fits(isinstance(left, Tensor) and isinstance(right, Tensor))
    fits(left.shape == right.shape and left.is_floating_point())
    return call.instead(left * right + right)
