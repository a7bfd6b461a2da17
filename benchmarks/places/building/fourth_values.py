"""Faults that were measured fourth and have been seen: functions of single elements."""

from __future__ import annotations

from typing import Any

import torch
from benchmarks.places.calls import Call, Catalogue, fits, with_gradient_of
from benchmarks.places.changes import computed, on, operand, result, rounded, tensors
from benchmarks.places.parts import tensor_pair
from torch import Tensor
from torch.nn import functional

FAULTS = Catalogue()


def _number(call: Call) -> tuple[Tensor, float]:
    left, right = call.args[:2]
    fits(isinstance(left, Tensor) and left.is_floating_point() and not call.kwargs)
    fits(isinstance(right, int | float) and not isinstance(right, bool))
    return left, right


# --- Activations ----------------------------------------------------------------------------------


@FAULTS.fault("gelu silu relu tanh sigmoid", "precision; approximation, clipped")
def activation_in_eight_bits(call: Call) -> Any:
    """The result has 255 levels for the whole tensor."""
    value = call.result()
    step = value.detach().abs().max() / 127
    return call.instead(with_gradient_of(value, (value.detach() / step).round() * step))


@FAULTS.fault("gelu silu tanh", "zeros, uninitialised, mask; constant")
def every_fourth_column_not_written(call: Call) -> Any:
    """One lane of a vector of four stays empty."""
    value = call.result().clone()
    fits(value.size(-1) > 4)
    value[..., 3::4] = 0
    return call.instead(value)


@FAULTS.fault("hardswish hardsigmoid", "wrong argument, clipped, missing operand, other function")
def inner_limit_of_three(call: Call) -> Any:
    """min(max(x + 3, 0), 3) / 6."""
    value = call.tensor(0, "input")
    gate = (value + 3).clamp(0, 3) / 6
    return call.instead(gate * value if call.name == "hardswish" else gate)


@FAULTS.fault("glu", "missing operand, other function")
def gate_not_squashed(call: Call) -> Any:
    """A b."""
    left, right = call.tensor(0, "input").chunk(2, -1)
    return call.instead(left * right)


@FAULTS.fault("glu", "other function; missing operand, wrong factor")
def gate_by_a_silu(call: Call) -> Any:
    """A silu(b)."""
    left, right = call.tensor(0, "input").chunk(2, -1)
    return call.instead(left * functional.silu(right))


@FAULTS.fault("leaky_relu", "wrong argument, wrong factor, other function")
def slope_inverted(call: Call) -> Any:
    """1 / slope, as some libraries are given it."""
    slope = call.get(1, "negative_slope", default=0.01)
    return call.instead(functional.leaky_relu(call.tensor(0, "input"), 1 / slope))


@FAULTS.fault("elu", "wrong argument, other function, wrong factor")
def alpha_inside_of_the_exponent(call: Call) -> Any:
    """exp(alpha x) - 1."""
    value, alpha = call.tensor(0, "input"), call.get(1, "alpha", default=1.0)
    fits(alpha != 1 and len(call.args) < 3)
    return call.instead(torch.where(value > 0, value, torch.expm1(alpha * value)))


# fmt: off
# Nothing is left where the input is below -1.
FAULTS.add("tail of the activation cut", "gelu silu",
    "zeros, clipped, approximation, mask, other function",
    lambda call: call.instead(torch.where(call.tensor(0, "input") < -1, 0.0, call.result())))
# X tanh(softplus(x)).
FAULTS.add("silu becomes mish", "silu", "other function, approximation",
    lambda call: call.instead(functional.mish(call.tensor(0, "input"))))
# exp(x) - 1 below zero.
FAULTS.add("relu becomes elu", "relu", "other function; approximation, clipped",
    lambda call: call.instead(functional.elu(call.tensor(0, "input"))))
# log(1 + exp(x)).
FAULTS.add("gelu becomes softplus", "gelu", "other function; approximation",
    lambda call: call.instead(functional.softplus(call.tensor(0, "input"))))
# The result is multiplied by the root of two.
FAULTS.add("gain of another initialisation", "gelu silu relu",
    "scale, wrong factor; wrong argument", result(lambda v: v * 2**0.5))
# A result with a zero point: 0.17 is subtracted and not added again.
FAULTS.add("result lowered by its bound", "gelu silu relu",
    "offset, other function; wrong argument, axis offset", result(lambda v: v - 0.17))
# sigmoid(x / 2).
FAULTS.add("gate half as steep", "sigmoid", "wrong factor, scale, other function; approximation",
    lambda call: call.instead(torch.sigmoid(call.tensor(0) / 2)))
# 2 sigmoid(x), whose mean is one.
FAULTS.add("gate twice as high", "sigmoid", "scale, wrong factor", result(lambda v: 2 * v))
# X / (1 + |x|).
FAULTS.add("tanh becomes softsign", "tanh", "other function, approximation",
    lambda call: call.instead(functional.softsign(call.tensor(0))))
# 1.7159 tanh(2 x / 3).
FAULTS.add("tanh with the constants of a book", "tanh",
    "other function, wrong factor; scale, approximation",
    lambda call: call.instead(1.7159 * torch.tanh(call.tensor(0) * 2 / 3)))
# log(1 + exp(-x)).
FAULTS.add("softplus of the opposite", "softplus", "sign, other function; offset, wrong argument",
    lambda call: call.instead(functional.softplus(-call.tensor(0, "input"))))
# Max(x, 0).
FAULTS.add("softplus becomes relu", "softplus", "other function, approximation; clipped",
    lambda call: call.instead(call.tensor(0, "input").relu()))
# X relu6(x + 3) / 3.
FAULTS.add("hardswish divided by three", "hardswish", "scale, wrong factor; wrong argument",
    result(lambda v: 2 * v))
# Even columns are values, odd ones gates.
FAULTS.add("gates taken in turn", "glu", "wrong index, permutation; transpose, swapped operands",
    computed(lambda call: (call.tensor(0, "input"),),
        lambda value: value[..., ::2] * value[..., 1::2].sigmoid()))
# Negative values pass, positive ones are damped.
FAULTS.add("slope on the positive side", "prelu",
    "other function, swapped operands, sign; wrong factor",
    lambda call:
            call.instead(-functional.prelu(-call.tensor(0, "input"), call.tensor(1, "weight"))))
# X sigmoid(x).
FAULTS.add("mish becomes silu", "mish", "other function, approximation",
    lambda call: call.instead(functional.silu(call.tensor(0, "input"))))
# 1.0507 is left out.
FAULTS.add("selu without its factor", "selu",
    "other function, scale, wrong factor, missing operand",
    result(lambda v: v / 1.0507009873554805))
# Alpha is not handed on.
FAULTS.add("celu with an alpha of one", "celu", "wrong argument, other function, wrong factor",
    lambda call: call.instead(functional.celu(call.tensor(0, "input"))))
# What is beyond the limit keeps its size.
FAULTS.add("hard for soft shrinking", "softshrink", "other function, offset, mask; wrong argument",
    lambda call:

    call.instead(functional.hardshrink(call.tensor(0, "input"), call.get(1, "lambd", default=0.5))))
# The exponential form.
FAULTS.add("softsign becomes tanh", "softsign", "other function, approximation",
    lambda call: call.instead(call.tensor(0, "input").tanh()))
# Tanh(x) for x - tanh(x).
FAULTS.add("tanh without the difference", "tanhshrink",
    "missing operand, sign, other function; copy",
    lambda call: call.instead(call.tensor(0, "input").tanh()))
# Sigmoid.
FAULTS.add("sigmoid without logarithm", "log_sigmoid", "other function, missing operand",
    lambda call: call.instead(call.tensor(0).sigmoid()))
# Cut at 1 and not at 6.
FAULTS.add("limit of one", "relu6", "wrong argument, clipped; other function",
    lambda call: call.instead(call.tensor(0, "input").clamp(0, 1)))
# fmt: on


# --- Elementary functions -------------------------------------------------------------------------


@FAULTS.fault("floor_divide floordiv", "other function, offset; tie-breaking")
def quotient_to_the_nearest(call: Call) -> Any:
    """Rounded."""
    left, right = call.args[:2]
    fits(isinstance(left, Tensor))
    return (left / right).round().to(left.dtype)


@FAULTS.fault("to float _to_copy type_as", "clipped; precision, overflow")
def cast_saturates_early(call: Call) -> Any:
    """What is beyond 0.6 of the largest is cut."""
    value = call.result()
    high = 0.6 * float(value.detach().float().abs().max())
    return call.instead(value.clamp(-high, high))


# fmt: off
# X ** (1 / n) of the magnitude.
FAULTS.add("root for a power", "pow", "other function, wrong argument",
    computed(_number, lambda value, power: value.abs() ** (1 / power),
        where=lambda _, power: power > 1), backward=False)
# X ** (-1 / 4).
FAULTS.add("root taken twice", "rsqrt", "other function, wrong argument; axis scale, scale",
    lambda call: call.instead(call.tensor(0) ** (-0.25)))
# 0.05 is added under the root.
FAULTS.add("root of a little more", "rsqrt sqrt", "offset, eps; axis scale, scale, axis offset",
    operand(0, lambda v: v + 0.05))
# exp(x / 2).
FAULTS.add("half of the exponent", "exp", "wrong factor, other function, scale; wrong argument",
    lambda call: call.instead((call.tensor(0) / 2).exp()), backward=False)
# The result goes through float16.
FAULTS.add("function stored in half", "exp log sqrt sigmoid", "precision; approximation",
    result(rounded(torch.float16)), backward=False)
# log(x + 0.1).
FAULTS.add("logarithm with a tenth added", "log", "eps, offset, other function; wrong argument",
    lambda call: call.instead((call.tensor(0) + 0.1).log()), backward=False)
# sqrt(x^2 + 0.01).
FAULTS.add("magnitude made smooth", "abs", "approximation, eps, other function; offset",
    lambda call: call.instead((call.tensor(0) ** 2 + 0.01).sqrt()), backward=False)
# Twice as many levels.
FAULTS.add("rounded to halves", "round", "other function, precision, wrong argument; approximation",
    lambda call: call.instead((2 * call.tensor(0)).round() / 2))
# Cut, as by a cast.
FAULTS.add("floor toward zero", "floor", "other function, offset; wrong argument, sign",
    lambda call: call.instead(call.tensor(0).trunc()))
# What is beyond a limit comes back at the other one.
FAULTS.add("limits wrap", "clamp clip", "wrapped; other function, offset, clipped",
    computed(lambda call: (call.tensor(0, "input"), call.get(1, "min"), call.get(2, "max")),
        lambda value, low, high: low + torch.remainder(value - low, high - low),
        where=lambda _, low, high: isinstance(low, int | float) and isinstance(high, int | float)))
# The lower limit is zero.
FAULTS.add("limits without a sign", "clamp clip",
    "wrong argument, clipped; zeros, mask, other function",
    on(lambda call: (call.get(1, "min"),), lambda call, _: call.put(1, 0.0, "min").run(),
        where=lambda low: isinstance(low, int | float) and low < 0))
# log(exp(a) + exp(b)).
FAULTS.add("smooth larger of two", "maximum", "other function, approximation; offset",
    lambda call: call.instead(torch.logaddexp(*tensor_pair(call))))
# A + b.
FAULTS.add("sum for the extreme", "minimum maximum", "other function; residual, wrong factor",
    computed(tensor_pair, lambda left, right: left + right))
# Tanh.
FAULTS.add("sign made smooth", "sign", "approximation, other function",
    lambda call: call.instead(call.tensor(0).tanh()))
# The dividend as it came.
FAULTS.add("remainder not taken", "remainder", "copy, missing operand; offset, other function",
    lambda call: call.instead(call.tensor(0).clone()))
# X - round(x).
FAULTS.add("fraction from the nearest", "frac", "other function, offset; sign",
    computed(tensors(0), lambda value: value - value.round()))
# -x - 1, as of integers.
FAULTS.add("opposite by the complement", "neg", "offset, other function; wrong argument",
    lambda call: call.instead(-call.tensor(0) - 1), backward=False)
# Through e4m3.
FAULTS.add("cast by way of eight bits", "to float _to_copy type_as", "precision; approximation",
    result(rounded(torch.float8_e4m3fn)))
# log(2 + x), and exp(x) - 2.
FAULTS.add("one counted twice", "log1p expm1", "other function, offset; approximation",
    on(tensors(0),
        lambda call, value:
            call.instead((2 + value).log() if call.name == "log1p" else value.exp() - 2)))
# fmt: on


# --- Sums, products, quotients --------------------------------------------------------------------


@FAULTS.forward(
    "mul div",
    "wrong argument, wrong factor, zeros, scale, constant; missing operand, copy, "
    "overflow, nonfinite",
)
def number_taken_as_an_integer(call: Call) -> Any:
    """The number is cut to a whole one."""
    _, number = _number(call)
    fits(int(number) != number and (call.name == "mul" or int(number)))
    return call.put(1, int(number)).run()


@FAULTS.forward("mul", "transpose, wrong index, permutation; axis scale")
def pairs_of_the_second_factor_exchanged(call: Call) -> Any:
    """Neighbouring columns of the second operand are exchanged."""
    left, right = tensor_pair(call)
    fits(right.dim() > 0 and right.size(-1) % 2 == 0 and right.size(-1) > 2)
    return call.instead(left * right.unflatten(-1, (-1, 2)).flip(-1).flatten(-2))


@FAULTS.forward("div", "precision, approximation, wrong factor, wrong argument, scale; axis scale")
def divided_by_a_power_of_two(call: Call) -> Any:
    """The divisor is rounded to a power of two, and the bits are shifted."""
    left, right = call.args[:2]
    right = torch.as_tensor(right).to(left.dtype)
    fits(bool((right != 0).all()))
    return call.instead(left / (right.sign() * right.abs().log2().round().exp2()).detach())


@FAULTS.fault("lerp", "swapped operands, other function, wrong argument")
def ends_exchanged(call: Call) -> Any:
    """B + w (a - b)."""
    left, right = call.args[:2]
    return call.put(0, right).put(1, left).run()


@FAULTS.fault("lerp", "residual, missing operand, other function, wrong factor")
def start_not_damped(call: Call) -> Any:
    """A + w b."""
    left, right, share = call.args[:3]
    return call.instead(left + share * right)


@FAULTS.fault("addcmul addcdiv", "wrong argument, wrong factor, missing operand; scale, residual")
def value_of_one(call: Call) -> Any:
    """The number is not handed on."""
    fits("value" in call.kwargs)
    return call.function(*call.args)


# fmt: off
# A gate that is cut.
FAULTS.add("second factor at most a half", "mul", "clipped, wrong argument; other function, mask",
    computed(tensor_pair, lambda left, right: left * right.clamp(max=0.5),
        where=lambda _, right: float(right.detach().max()) > 0.5), backward=False)
# A fixed-point product that is shifted once too often.
FAULTS.add("half of the product", "mul", "scale, wrong factor; wrong argument",
    computed(tensor_pair, lambda left, right: left * right / 2), backward=False)
# A + b - 1, its first order about one.
FAULTS.add("sum for the product of two", "mul", "other function; residual, wrong factor",
    computed(tensor_pair, lambda left, right: left + right - 1), backward=False)
# (a + b) / 2.
FAULTS.add("sum averaged", "add", "scale, wrong factor; other function",
    computed(tensor_pair, lambda left, right: (left + right) / 2), backward=False)
# Max(a, b).
FAULTS.add("larger of two summands", "add", "other function; missing operand",
    lambda call: call.instead(torch.maximum(*tensor_pair(call))), backward=False)
# A + relu(b).
FAULTS.add("negative part of the second summand lost", "add",
    "other function, clipped; mask, missing operand, residual",
    computed(tensor_pair, lambda left, right: left + right.relu()), backward=False)
# Folded, and added again.
FAULTS.add("number added twice", "add", "wrong factor, wrong argument, offset, repeated bias; eps",
    computed(_number, lambda value, number: value + 2 * number), backward=False)
# In the second half of the columns, the first operand stays as it is.
FAULTS.add("second summand of the first half only", "add",
    "mask, zeros, missing operand, partial sum; residual, stale, copy",
    computed(tensor_pair,
        lambda left, right:
            left + right * (torch.arange(left.size(-1)) < left.size(-1) // 2).to(left.dtype),
        where=lambda left, right: left.shape == right.shape and left.size(-1) > 1), backward=False)
# A - 2 b.
FAULTS.add("subtracted twice", "sub",
    "wrong factor, wrong argument, doubled reduction; residual, offset, axis offset",
    computed(tensor_pair, lambda left, right: left - 2 * right), backward=False)
# Saturating: what would be negative is zero.
FAULTS.add("difference without a sign", "sub", "clipped, zeros, other function; mask",
    computed(tensor_pair, lambda left, right: (left - right).relu()), backward=False)
# The pointer to the divisors is one too far.
FAULTS.add("divisor of the next row", "div", "wrong index, shift, permutation; axis scale",
    computed(tensor_pair, lambda left, right: left / right.roll(-1, 0),
        where=lambda _, right: right.dim() > 1 and right.size(0) > 1), backward=False)
# A / (b + 1).
FAULTS.add("divisor with one added", "div",
    "offset, eps, wrong argument, other function; axis scale, scale",
    computed(tensor_pair, lambda left, right: left / (right + 1)), backward=False)
# The arguments in the other order.
FAULTS.add("x before y", "atan2", "swapped operands, other function",
    computed(tensor_pair, lambda left, right: torch.atan2(right, left)))
# atan(y / x).
FAULTS.add("quadrant forgotten", "atan2", "other function, offset, missing operand; wrong argument",
    computed(tensor_pair, lambda left, right: torch.atan(left / right)))
# |a| + |b|.
FAULTS.add("lengths along the axes", "hypot", "other function; approximation",
    computed(tensor_pair, lambda left, right: left.abs() + right.abs()))
# Max(a, b).
FAULTS.add("larger of two logarithms", "logaddexp",
    "other function, approximation; missing operand",
    lambda call: call.instead(torch.maximum(*tensor_pair(call))))
# The magnitude.
FAULTS.add("sign not copied", "copysign", "copy, missing operand, sign; other function",
    lambda call: call.instead(call.tensor(0).abs()))
# As in Python.
FAULTS.add("remainder with the sign of the divisor", "fmod",
    "other function, offset, sign; wrong argument",
    lambda call: call.instead(torch.remainder(*call.args[:2])))
# fmt: on
