"""Faults for building: functions of single elements."""

from __future__ import annotations

import math
from typing import Any

import torch
from benchmarks.places.calls import Call, Catalogue, fits, with_gradient_of
from benchmarks.places.changes import computed, on, operand, result, tensors
from torch import Tensor
from torch.nn import functional

FAULTS = Catalogue()


@FAULTS.fault("sub div", "swapped operands, sign; other function")
def operands_swapped(call: Call) -> Any:
    """B - a, b / a."""
    left, right = call.args[:2]
    fits(isinstance(left, Tensor) and left.is_floating_point())
    fits(not (isinstance(right, Tensor) and bool((right == 0).any())))
    swapped = right - left if call.name == "sub" else right / left
    fits(bool(swapped.isfinite().all()))
    return call.instead(swapped)


@FAULTS.fault("gelu", "approximation, other function, wrong argument")
def gelu_by_tanh(call: Call) -> Any:
    """The approximation that other libraries use."""
    now = call.kwargs.get("approximate", "none")
    other = "tanh" if now == "none" else "none"
    return functional.gelu(call.tensor(0, "input"), approximate=other)


@FAULTS.fault("mul div", "scale, wrong factor, missing operand, copy")
def factor_left_out(call: Call) -> Any:
    """A multiplication by a number is not done."""
    other = call.args[1]
    fits(isinstance(other, int | float) and other != 1)
    return call.instead(call.tensor(0).clone())


@FAULTS.fault("add", "residual, copy, missing operand; offset, missing bias, wrong factor")
def residual_dropped(call: Call) -> Any:
    """One of two summands is not added."""
    left, right = call.args[:2]
    fits(isinstance(left, Tensor) and isinstance(right, Tensor))
    fits(left.shape == right.shape and left.is_floating_point())
    return call.instead(right.clone())


@FAULTS.fault("add sub", "sign, other function, wrong factor; residual, offset")
def sign_of_the_second_summand(call: Call) -> Any:
    """A - b instead of a + b."""
    left, right = call.args[:2]
    fits(isinstance(left, Tensor) and left.is_floating_point() and not call.kwargs)
    return call.instead(left - right if call.name == "add" else left + right)


@FAULTS.fault("pow square", "other function; wrong argument, missing operand")
def absolute_value_for_a_square(call: Call) -> Any:
    """|x| instead of x**2."""
    fits(call.name == "square" or call.args[1] == 2)
    return call.instead(call.tensor(0).abs())


@FAULTS.fault("mul div", "scale, wrong factor")
def factor_applied_twice(call: Call) -> Any:
    """Multiplied by a number two times."""
    other = call.args[1]
    fits(isinstance(other, int | float) and other not in {1, -1, 0})
    return call.instead(call.result() * other if call.name == "mul" else call.result() / other)


@FAULTS.fault("mul add sub div", "precision")
def computed_in_bfloat16(call: Call) -> Any:
    """Cast first, then computed."""
    left, right = call.args[:2]
    fits(isinstance(left, Tensor) and isinstance(right, Tensor) and left.is_floating_point())
    fits(right.is_floating_point())
    return call.instead(call.put(0, left.bfloat16()).put(1, right.bfloat16()).run())


@FAULTS.fault("gelu", "approximation, other function")
def gelu_by_a_sigmoid(call: Call) -> Any:
    """X * sigmoid(1.702 x)."""
    value = call.tensor(0, "input")
    return value * torch.sigmoid(1.702 * value)


@FAULTS.fault("tanh sigmoid", "approximation; other function")
def rational_approximation(call: Call) -> Any:
    """Pade's of tanh."""
    value = call.tensor(0) / (2 if call.name == "sigmoid" else 1)
    square = value * value
    result = (value * (27 + square) / (27 + 9 * square)).clamp(-1, 1)
    return call.instead(result if call.name == "tanh" else (1 + result) / 2)


@FAULTS.fault("mul", "residual; offset, missing bias, axis offset, wrong factor")
def multiplied_and_added(call: Call) -> Any:
    """A fused multiply-add with an addend that is not zero."""
    left, right = call.args[:2]
    fits(isinstance(left, Tensor) and isinstance(right, Tensor))
    fits(left.shape == right.shape and left.is_floating_point())
    return call.instead(left * right + right)


# fmt: off
# A slope of 0.01 below zero.
FAULTS.add("leaky relu", "relu", "other function; wrong argument",
    lambda call: functional.leaky_relu(call.tensor(0, "input")))
# The wrong activation.
FAULTS.add("silu becomes gelu", "silu", "other function; approximation",
    lambda call: functional.gelu(call.tensor(0, "input")))
# A factor that is slightly off.
FAULTS.add("one percent too large", "linear layer_norm conv2d add", "scale, wrong factor",
    result(lambda v: v * 1.01))
# Large results are cut off.
FAULTS.add("clipped at half", "tanh sigmoid gelu silu", "clipped; other function",
    result(lambda v: v.clamp(max=float(v.max()) / 2)))
# The other one of the two.
FAULTS.add("sine and cosine exchanged", "sin cos", "other function",
    on(tensors(0), lambda call, value: value.cos() if call.name == "sin" else value.sin()))
# (1 + x / 1024) ** 1024.
FAULTS.add("exp by a power", "exp", "approximation; other function",
    lambda call: call.instead((1 + call.tensor(0) / 1024).clamp(min=0) ** 1024))
# The sign of a rotated half is forgotten.
FAULTS.add("not negated", "neg", "sign, copy, wrong factor, missing operand; scale",
    lambda call: call.instead(call.tensor(0).clone()))
# Everything above 70 % of the largest value is that.
FAULTS.add("saturates early", "relu gelu silu tanh", "clipped; other function",
    result(lambda v: v.clamp(max=0.7 * float(v.abs().max()))))
# The piecewise form.
FAULTS.add("hard swish", "silu", "other function, approximation",
    lambda call: functional.hardswish(call.tensor(0, "input")))
# fmt: on


# --- Activations ----------------------------------------------------------------------------------


@FAULTS.fault("gelu", "approximation, other function; precision")
def erf_by_a_short_series(call: Call) -> Any:
    """Three coefficients of Abramowitz and Stegun instead of five."""
    value = call.tensor(0, "input")
    x = value.abs() / math.sqrt(2)
    t = 1 / (1 + 0.47047 * x)
    erf = 1 - t * (0.3480242 + t * (-0.0958798 + t * 0.7478556)) * (-x * x).exp()
    return call.instead(0.5 * value * (1 + erf * value.sign()))


@FAULTS.fault("hardtanh relu6 clamp", "wrong argument, missing operand, other function; clipped")
def upper_limit_forgotten(call: Call) -> Any:
    """Only the lower limit is kept."""
    value = call.tensor(0, "input")
    low = 0.0 if call.name == "relu6" else call.get(1, "min_val", "min", default=0.0)
    fits(isinstance(low, int | float))
    return call.instead(value.clamp(min=low))


@FAULTS.fault("sigmoid silu", "approximation, other function")
def piecewise_sigmoid(call: Call) -> Any:
    """clamp(x / 6 + 1 / 2, 0, 1)."""
    value = call.tensor(0, "input")
    gate = functional.hardsigmoid(value)
    return call.instead(gate if call.name == "sigmoid" else value * gate)


@FAULTS.fault("exp", "approximation, precision")
def fast_exponential(call: Call) -> Any:
    """Schraudolph's: written into the bits of a float."""
    value = call.tensor(0)
    fits(value.dtype == torch.float32)
    bits = (value.detach().clamp(-80, 80) * 12102203.0 + 1064866805.0).to(torch.int32)
    return call.instead(with_gradient_of(value.exp(), bits.view(torch.float32)))


@FAULTS.fault("log log1p", "other function; offset, eps")
def logarithm_with_one_more_or_less(call: Call) -> Any:
    """Log for log1p, and the other way round."""
    value = call.tensor(0)
    result = value.log1p() if call.name == "log" else value.log()
    fits(bool(result.isfinite().all()))
    return call.instead(result)


@FAULTS.fault("pow", "wrong argument, other function; approximation")
def exponent_one_larger(call: Call) -> Any:
    """X ** (n + 1)."""
    exponent = call.args[1]
    fits(isinstance(exponent, int | float))
    return call.instead(call.tensor(0) ** (exponent + 1))


@FAULTS.fault("pow", "scale, wrong factor")
def square_doubled(call: Call) -> Any:
    """2 x**2, as of a derivative."""
    exponent = call.args[1]
    fits(isinstance(exponent, int | float) and exponent == 2)
    return call.instead(2 * call.result())


# fmt: off
# 0.8 for sqrt(2 / pi), and 0.05 for 0.044715.
FAULTS.add("tanh gelu with a rounded constant", "gelu",
    "approximation, other function, wrong factor",
    computed(lambda call: (call.tensor(0, "input"),),
        lambda value: 0.5 * value * (1 + torch.tanh(0.8 * (value + 0.05 * value**3)))))
# The factor x is forgotten.
FAULTS.add("gate without its value", "gelu silu", "missing operand, other function",
    on(lambda call: (call.tensor(0, "input"),),
        lambda call, value:
            call.instead(value.sigmoid() if call.name == "silu" else torch.special.ndtr(value))))
# The input as it came.
FAULTS.add("activation forgotten", "gelu silu relu tanh sigmoid",
    "copy, missing operand, other function",
    lambda call: call.instead(call.tensor(0, "input").clone()))
# Once in the epilogue of the product, once by itself.
FAULTS.add("activation applied twice", "gelu silu relu tanh sigmoid",
    "other function; missing operand",
    lambda call: call.instead(call.put(0, call.result(), "input").result()))
# At most a quarter of the largest value, as relu6 has a bound.
FAULTS.add("relu of six", "relu", "other function, clipped",
    computed(lambda call: (call.tensor(0, "input"),),
        lambda value: value.clamp(0, 0.25 * float(value.max()))))
# Softplus.
FAULTS.add("smooth relu", "relu", "other function; approximation",
    lambda call: call.instead(functional.softplus(call.tensor(0, "input"))))
# X sigmoid(1.1 x).
FAULTS.add("silu with another slope", "silu", "wrong factor, other function, approximation; scale",
    computed(lambda call: (call.tensor(0, "input"),),
        lambda value: value * torch.sigmoid(1.1 * value)))
# 1 - sigmoid(x).
FAULTS.add("sigmoid of the negative", "sigmoid", "sign, other function; swapped operands",
    lambda call: call.instead(torch.sigmoid(-call.tensor(0, "input"))))
# The gates are exchanged.
FAULTS.add("sigmoid for tanh", "tanh", "other function; approximation",
    lambda call: call.instead(call.tensor(0, "input").sigmoid()))
# clamp(x, -1, 1).
FAULTS.add("hard tanh", "tanh", "approximation, clipped, other function",
    lambda call: call.instead(call.tensor(0, "input").clamp(-1, 1)))
# Linear where the upper half of the values is.
FAULTS.add("threshold of softplus too low", "softplus",
    "wrong argument, other function; approximation",
    computed(lambda call: (call.tensor(0, "input"),),
        lambda value: torch.where(value > value.median(), value, functional.softplus(value))))
# log(exp(x)) + 0: the 1 is lost where x is negative: exp(x).
FAULTS.add("exponential without one", "softplus", "other function; approximation, offset",
    lambda call: call.instead(call.tensor(0, "input").exp()))
# Cast before the function.
FAULTS.add("input rounded to bfloat16", "gelu silu tanh sigmoid exp softplus erf", "precision",
    operand(0, lambda v: v.bfloat16().to(v.dtype), "input"))
# exp2, without the factor log2(e).
FAULTS.add("power of two", "exp", "other function, wrong factor; approximation",
    lambda call: call.instead(call.tensor(0).exp2()))
# Exponents below -1 are taken as -1.
FAULTS.add("exponent limited", "exp", "clipped, wrong argument; other function, mask",
    lambda call: call.instead(call.tensor(0).clamp(min=-1).exp()))
# log2.
FAULTS.add("logarithm of base two", "log", "scale, wrong factor, other function",
    lambda call: call.instead(call.tensor(0).log2()))
# tanh(2 x / sqrt(pi)).
FAULTS.add("erf by tanh", "erf", "approximation, other function",
    lambda call: call.instead(torch.tanh(call.tensor(0) * 2 / math.sqrt(math.pi))))
# fmt: on


# --- Sums and products ----------------------------------------------------------------------------


def _pair(call: Call) -> tuple[Tensor, Tensor]:
    left, right = call.args[:2]
    fits(isinstance(left, Tensor) and isinstance(right, Tensor))
    fits(left.is_floating_point() and right.is_floating_point())
    return left, right


@FAULTS.fault("add sub", "wrong index, shift; residual, offset, axis offset")
def second_summand_moved_by_one_row(call: Call) -> Any:
    """The second operand is read one row too late."""
    left, right = _pair(call)
    fits(right.dim() >= 2 and right.shape[-2] > 1)
    moved = right.roll(-1, -2)
    return call.instead(left + moved if call.name == "add" else left - moved)


@FAULTS.fault("add mul", "transpose, wrong axis, wrong index; permutation")
def broadcast_along_the_other_axis(call: Call) -> Any:
    """A vector for the columns is used for the rows of a square."""
    left, right = _pair(call)
    fits(right.dim() == 1 and left.dim() >= 2 and left.shape[-2] == len(right) > 1)
    wide = right[:, None]
    return call.instead(left + wide if call.name == "add" else left * wide)


@FAULTS.fault("mul", "copy, missing operand; axis scale, scale, other function")
def second_factor_ignored(call: Call) -> Any:
    """The gate is not applied."""
    left, right = _pair(call)
    fits(left.shape == call.result().shape and right.numel() > 1)
    return call.instead(left.clone())


@FAULTS.fault("mul", "scale, wrong factor, other function; swapped operands")
def divided_by_a_number(call: Call) -> Any:
    """The inverse of the factor is used."""
    number = call.args[1]
    fits(isinstance(number, int | float) and number not in {0, 1, -1})
    return call.instead(call.tensor(0) / number)


@FAULTS.fault("div", "scale, wrong factor, other function")
def multiplied_by_the_divisor(call: Call) -> Any:
    """The inverse of the divisor is used."""
    number = call.args[1]
    fits(isinstance(number, int | float) and number not in {0, 1, -1})
    return call.instead(call.tensor(0) * number)


@FAULTS.fault("div", "scale, wrong factor; wrong argument")
def root_of_the_divisor(call: Call) -> Any:
    """Divided by sqrt(c)."""
    number = call.args[1]
    fits(isinstance(number, int | float) and number > 0 and number != 1)
    return call.instead(call.tensor(0) / math.sqrt(number))


@FAULTS.fault("mul div add sub", "wrong argument, wrong factor, scale, offset")
def number_rounded(call: Call) -> Any:
    """A constant goes through bfloat16."""
    number = call.args[1]
    fits(isinstance(number, float))
    near = float(torch.tensor(number).bfloat16())
    return call.instead(call.put(1, near).result())


@FAULTS.fault("add", "eps, missing operand, copy; offset, wrong argument")
def eps_forgotten(call: Call) -> Any:
    """Nothing is added to the variance."""
    number = call.args[1]
    fits(isinstance(number, float) and 0 < number < 1e-2)
    return call.instead(call.tensor(0).clone())


@FAULTS.fault("add", "eps, offset, wrong argument; constant")
def eps_of_another_library(call: Call) -> Any:
    """1e-3 for what is smaller."""
    number = call.args[1]
    fits(isinstance(number, float) and 0 < number < 1e-3)
    return call.instead(call.tensor(0) + 1e-3)


@FAULTS.fault("sub", "copy, missing operand; axis offset, offset")
def nothing_subtracted(call: Call) -> Any:
    """The mean or the maximum stays in."""
    left, _ = _pair(call)
    fits(left.shape == call.result().shape)
    return call.instead(left.clone())


@FAULTS.fault("add mul sub", "stale, copy, wrong index; shift, zeros")
def tail_not_updated(call: Call) -> Any:
    """In place: the last elements of each row keep the first operand."""
    left, _ = _pair(call)
    value = call.result().clone()
    fits(left.shape == value.shape and value.shape[-1] >= 4)
    tile = value.shape[-1] // 4
    value[..., -tile:] = left[..., -tile:]
    return call.instead(value)


@FAULTS.fault("add mul", "zeros; uninitialised, mask")
def last_row_not_stored(call: Call) -> Any:
    """The bound of the rows is one too small."""
    value = call.result().clone()
    fits(value.dim() >= 2 and value.shape[-2] > 1)
    value[..., -1, :] = 0
    return call.instead(value)


@FAULTS.fault("sin cos", "approximation; other function")
def short_series_of_the_angle(call: Call) -> Any:
    """Bhaskara's formula for a reduced angle."""
    angle = call.tensor(0) + (math.pi / 2 if call.name == "cos" else 0)
    reduced = angle.remainder(2 * math.pi)
    sign = torch.where(reduced > math.pi, -1.0, 1.0)
    x = reduced.remainder(math.pi)
    top = 16 * x * (math.pi - x)
    return call.instead(sign * top / (5 * math.pi**2 - top / 4))


@FAULTS.fault("leaky_relu elu", "wrong argument, other function")
def default_slope(call: Call) -> Any:
    """0.01 instead of what was given, and twice the alpha of elu."""
    value = call.tensor(0, "input")
    if call.name == "elu":
        return call.instead(functional.elu(value, 2.0))
    return call.instead(functional.leaky_relu(value, 0.01))


# fmt: off
# Once by the fused kernel and once behind it.
FAULTS.add("residual added twice", "add",
    "doubled reduction, wrong factor, residual; repeated bias, offset",
    computed(_pair, lambda left, right: left + 2 * right,
        where=lambda left, right: left.shape == right.shape))
# What was to be added is lost: the buffer is reused too early.
FAULTS.add("only the first summand", "add", "copy, missing operand, residual; offset",
    computed(_pair, lambda left, *_: left.clone(),
        where=lambda left, right: left.shape == right.shape))
# A + b / 2.
FAULTS.add("alpha of a half", "add", "wrong factor, wrong argument; residual, offset",
    computed(_pair, lambda left, right: left + 0.5 * right))
# A stride of zero: every row gets the first row of the second operand.
FAULTS.add("first row broadcast", "add", "wrong index, copy, wrong axis; residual, offset",
    computed(_pair, lambda left, right: left + right[..., :1, :],
        where=lambda left, right: left.dim() >= 2 and right.dim() >= 2 and (right.shape[-2] > 1)))
# The strides of the second factor are exchanged.
FAULTS.add("second factor transposed", "mul", "transpose; permutation, wrong index",
    computed(_pair, lambda left, right: left * right.mT,
        where=lambda _, right: right.dim() >= 2 and right.shape[-1] == right.shape[-2] > 1))
# A table of factors is read at position - 1.
FAULTS.add("factor of the position before", "mul", "wrong index, shift; axis scale",
    computed(_pair, lambda left, right: left * right.roll(1, -2),
        where=lambda _, right: right.dim() >= 2 and right.shape[-2] > 1))
# The gate is applied twice.
FAULTS.add("factor squared", "mul", "other function, wrong factor; residual, missing operand",
    computed(_pair, lambda left, right: left * right * right,
        where=lambda _, right: right.numel() > 1))
# X - c instead of c - x.
FAULTS.add("difference the other way", "rsub",
    "swapped operands, sign, other function, wrong factor",
    lambda call: call.instead(call.tensor(0) - call.args[1]))
# -|x|.
FAULTS.add("negated where positive", "neg", "other function, clipped; sign, mask",
    lambda call: call.instead(-call.tensor(0).abs()))
# The angle of the sine is negated, that of the cosine halved.
FAULTS.add("angle negated or halved", "sin cos", "wrong factor, other function, sign, scale",
    on(tensors(0),
        lambda call, value:
            call.instead(torch.sin(-value) if call.name == "sin" else torch.cos(value / 2))))
# The angles of far positions are rounded.
FAULTS.add("angle in bfloat16", "sin cos", "precision; approximation",
    lambda call: call.instead(call.put(0, call.tensor(0).bfloat16()).result()))
# The angles of position + 1.
FAULTS.add("positions begin with one", "sin cos", "wrong index, shift; offset, other function",
    on(tensors(0),
        lambda call, angle:
            call.instead(call.put(0, angle + (angle[..., 1:2, :] - angle[..., :1, :])).result()),
        where=lambda angle: angle.dim() >= 2 and angle.shape[-2] > 2))
# The lower limit for everything.
FAULTS.add("limits exchanged", "clamp clip", "wrong argument, clipped, swapped operands",
    on(lambda call: (call.get(1, "min"), call.get(2, "max")),
        lambda call, low, high: call.instead(call.tensor(0).clamp(high, low)),
        where=lambda low, high: isinstance(low, int | float) and isinstance(high, int | float)))
# The square itself.
FAULTS.add("root forgotten", "sqrt", "copy, missing operand, other function",
    lambda call: call.instead(call.tensor(0).clone()))
# The value as it came.
FAULTS.add("sign kept", "abs", "copy, missing operand, sign, other function",
    lambda call: call.instead(call.tensor(0).clone()))
# Toward zero.
FAULTS.add("cut instead of rounded", "round", "other function, approximation; offset",
    lambda call: call.instead(call.tensor(0).trunc()))
# fmt: on
