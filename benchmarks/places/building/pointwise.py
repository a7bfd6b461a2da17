"""Faults for building: functions of single elements."""

from __future__ import annotations

import math
from typing import Any

import torch
from benchmarks.places.calls import Call, Catalogue, fits, with_gradient_of
from torch import Tensor
from torch.nn import functional

FAULTS = Catalogue()


@FAULTS.fault("sub div", kinds=["swapped operands", "sign"], loose=["other function"])
def operands_swapped(call: Call) -> Any:
    """B - a, b / a."""
    left, right = call.args[:2]
    fits(isinstance(left, Tensor) and left.is_floating_point())
    fits(not (isinstance(right, Tensor) and bool((right == 0).any())))
    swapped = right - left if call.name == "sub" else right / left
    fits(bool(swapped.isfinite().all()))
    return call.instead(swapped)


@FAULTS.fault("gelu", kinds=["approximation", "other function", "wrong argument"])
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


@FAULTS.fault("mul div", kinds=["scale", "wrong factor", "missing operand", "copy"])
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
    "add",
    kinds=["residual", "copy", "missing operand"],
    loose=["offset", "missing bias", "wrong factor"],
)
def residual_dropped(call: Call) -> Any:
    """One of two summands is not added."""
    left, right = call.args[:2]
    fits(isinstance(left, Tensor) and isinstance(right, Tensor))
    fits(left.shape == right.shape and left.is_floating_point())
    return call.instead(right.clone())


@FAULTS.fault(
    "add sub", kinds=["sign", "other function", "wrong factor"], loose=["residual", "offset"]
)
def sign_of_the_second_summand(call: Call) -> Any:
    """A - b instead of a + b."""
    left, right = call.args[:2]
    fits(isinstance(left, Tensor) and left.is_floating_point() and not call.kwargs)
    return call.instead(left - right if call.name == "add" else left + right)


@FAULTS.fault("tanh sigmoid gelu silu", kinds=["clipped"], loose=["other function"])
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


@FAULTS.fault("pow square", kinds=["other function"], loose=["wrong argument", "missing operand"])
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


@FAULTS.fault("neg", kinds=["sign", "copy", "wrong factor", "missing operand"], loose=["scale"])
def not_negated(call: Call) -> Any:
    """The sign of a rotated half is forgotten."""
    return call.instead(call.tensor(0).clone())


@FAULTS.fault("relu gelu silu tanh", kinds=["clipped"], loose=["other function"])
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


@FAULTS.fault(
    "mul", kinds=["residual"], loose=["offset", "missing bias", "axis offset", "wrong factor"]
)
def multiplied_and_added(call: Call) -> Any:
    """A fused multiply-add with an addend that is not zero."""
    left, right = call.args[:2]
    fits(isinstance(left, Tensor) and isinstance(right, Tensor))
    fits(left.shape == right.shape and left.is_floating_point())
    return call.instead(left * right + right)


# --- Activations ----------------------------------------------------------------------------------


@FAULTS.fault("gelu", kinds=["approximation", "other function"], loose=["precision"])
def erf_by_a_short_series(call: Call) -> Any:
    """Three coefficients of Abramowitz and Stegun instead of five."""
    value = call.tensor(0, "input")
    x = value.abs() / math.sqrt(2)
    t = 1 / (1 + 0.47047 * x)
    erf = 1 - t * (0.3480242 + t * (-0.0958798 + t * 0.7478556)) * (-x * x).exp()
    return call.instead(0.5 * value * (1 + erf * value.sign()))


@FAULTS.fault("gelu", kinds=["approximation", "other function", "wrong factor"])
def tanh_gelu_with_a_rounded_constant(call: Call) -> Any:
    """0.8 for sqrt(2 / pi), and 0.05 for 0.044715."""
    value = call.tensor(0, "input")
    return call.instead(0.5 * value * (1 + torch.tanh(0.8 * (value + 0.05 * value**3))))


@FAULTS.fault("gelu silu", kinds=["missing operand", "other function"])
def gate_without_its_value(call: Call) -> Any:
    """The factor x is forgotten."""
    value = call.tensor(0, "input")
    gate = value.sigmoid() if call.name == "silu" else torch.special.ndtr(value)
    return call.instead(gate)


@FAULTS.fault("gelu silu relu tanh sigmoid", kinds=["copy", "missing operand", "other function"])
def activation_forgotten(call: Call) -> Any:
    """The input as it came."""
    return call.instead(call.tensor(0, "input").clone())


@FAULTS.fault("gelu silu relu tanh sigmoid", kinds=["other function"], loose=["missing operand"])
def activation_applied_twice(call: Call) -> Any:
    """Once in the epilogue of the product, once by itself."""
    first = call.result()
    return call.instead(call.put(0, first, "input").result())


@FAULTS.fault("relu", kinds=["other function", "clipped"])
def relu_of_six(call: Call) -> Any:
    """At most a quarter of the largest value, as relu6 has a bound."""
    value = call.tensor(0, "input")
    return call.instead(value.clamp(0, 0.25 * float(value.max())))


@FAULTS.fault("relu", kinds=["other function"], loose=["approximation"])
def smooth_relu(call: Call) -> Any:
    """Softplus."""
    return call.instead(functional.softplus(call.tensor(0, "input")))


@FAULTS.fault(
    "hardtanh relu6 clamp",
    kinds=["wrong argument", "missing operand", "other function"],
    loose=["clipped"],
)
def upper_limit_forgotten(call: Call) -> Any:
    """Only the lower limit is kept."""
    value = call.tensor(0, "input")
    low = 0.0 if call.name == "relu6" else call.get(1, "min_val", "min", default=0.0)
    fits(isinstance(low, int | float))
    return call.instead(value.clamp(min=low))


@FAULTS.fault("silu", kinds=["wrong factor", "other function", "approximation"], loose=["scale"])
def silu_with_another_slope(call: Call) -> Any:
    """X sigmoid(1.1 x)."""
    value = call.tensor(0, "input")
    return call.instead(value * torch.sigmoid(1.1 * value))


@FAULTS.fault("sigmoid silu", kinds=["approximation", "other function"])
def piecewise_sigmoid(call: Call) -> Any:
    """clamp(x / 6 + 1 / 2, 0, 1)."""
    value = call.tensor(0, "input")
    gate = functional.hardsigmoid(value)
    return call.instead(gate if call.name == "sigmoid" else value * gate)


@FAULTS.fault("sigmoid", kinds=["sign", "other function"], loose=["swapped operands"])
def sigmoid_of_the_negative(call: Call) -> Any:
    """1 - sigmoid(x)."""
    return call.instead(torch.sigmoid(-call.tensor(0, "input")))


@FAULTS.fault("tanh", kinds=["other function"], loose=["approximation"])
def sigmoid_for_tanh(call: Call) -> Any:
    """The gates are exchanged."""
    return call.instead(call.tensor(0, "input").sigmoid())


@FAULTS.fault("tanh", kinds=["approximation", "clipped", "other function"])
def hard_tanh(call: Call) -> Any:
    """clamp(x, -1, 1)."""
    return call.instead(call.tensor(0, "input").clamp(-1, 1))


@FAULTS.fault("softplus", kinds=["wrong argument", "other function"], loose=["approximation"])
def threshold_of_softplus_too_low(call: Call) -> Any:
    """Linear where the upper half of the values is."""
    value = call.tensor(0, "input")
    return call.instead(torch.where(value > value.median(), value, functional.softplus(value)))


@FAULTS.fault("softplus", kinds=["other function"], loose=["approximation", "offset"])
def exponential_without_one(call: Call) -> Any:
    """log(exp(x)) + 0: the 1 is lost where x is negative: exp(x)."""
    return call.instead(call.tensor(0, "input").exp())


@FAULTS.fault("gelu silu tanh sigmoid exp softplus erf", kinds=["precision"])
def input_rounded_to_bfloat16(call: Call) -> Any:
    """Cast before the function."""
    value = call.tensor(0, "input")
    return call.put(0, value.bfloat16().to(value.dtype), "input").run()


@FAULTS.fault("exp", kinds=["other function", "wrong factor"], loose=["approximation"])
def power_of_two(call: Call) -> Any:
    """exp2, without the factor log2(e)."""
    return call.instead(call.tensor(0).exp2())


@FAULTS.fault("exp", kinds=["approximation", "precision"])
def fast_exponential(call: Call) -> Any:
    """Schraudolph's: written into the bits of a float."""
    value = call.tensor(0)
    fits(value.dtype == torch.float32)
    bits = (value.detach().clamp(-80, 80) * 12102203.0 + 1064866805.0).to(torch.int32)
    return call.instead(with_gradient_of(value.exp(), bits.view(torch.float32)))


@FAULTS.fault("exp", kinds=["clipped", "wrong argument"], loose=["other function", "mask"])
def exponent_limited(call: Call) -> Any:
    """Exponents below -1 are taken as -1."""
    return call.instead(call.tensor(0).clamp(min=-1).exp())


@FAULTS.fault("log log1p", kinds=["other function"], loose=["offset", "eps"])
def logarithm_with_one_more_or_less(call: Call) -> Any:
    """Log for log1p, and the other way round."""
    value = call.tensor(0)
    result = value.log1p() if call.name == "log" else value.log()
    fits(bool(result.isfinite().all()))
    return call.instead(result)


@FAULTS.fault("log", kinds=["scale", "wrong factor", "other function"])
def logarithm_of_base_two(call: Call) -> Any:
    """log2."""
    return call.instead(call.tensor(0).log2())


@FAULTS.fault("erf", kinds=["approximation", "other function"])
def erf_by_tanh(call: Call) -> Any:
    """tanh(2 x / sqrt(pi))."""
    return call.instead(torch.tanh(call.tensor(0) * 2 / math.sqrt(math.pi)))


@FAULTS.fault("pow", kinds=["wrong argument", "other function"], loose=["approximation"])
def exponent_one_larger(call: Call) -> Any:
    """X ** (n + 1)."""
    exponent = call.args[1]
    fits(isinstance(exponent, int | float))
    return call.instead(call.tensor(0) ** (exponent + 1))


@FAULTS.fault("pow", kinds=["scale", "wrong factor"])
def square_doubled(call: Call) -> Any:
    """2 x**2, as of a derivative."""
    exponent = call.args[1]
    fits(isinstance(exponent, int | float) and exponent == 2)
    return call.instead(2 * call.result())


# --- Sums and products ----------------------------------------------------------------------------


def _pair(call: Call) -> tuple[Tensor, Tensor]:
    left, right = call.args[:2]
    fits(isinstance(left, Tensor) and isinstance(right, Tensor))
    fits(left.is_floating_point() and right.is_floating_point())
    return left, right


@FAULTS.fault(
    "add",
    kinds=["doubled reduction", "wrong factor", "residual"],
    loose=["repeated bias", "offset"],
)
def residual_added_twice(call: Call) -> Any:
    """Once by the fused kernel and once behind it."""
    left, right = _pair(call)
    fits(left.shape == right.shape)
    return call.instead(left + 2 * right)


@FAULTS.fault("add", kinds=["copy", "missing operand", "residual"], loose=["offset"])
def only_the_first_summand(call: Call) -> Any:
    """What was to be added is lost: the buffer is reused too early."""
    left, right = _pair(call)
    fits(left.shape == right.shape)
    return call.instead(left.clone())


@FAULTS.fault("add", kinds=["wrong factor", "wrong argument"], loose=["residual", "offset"])
def alpha_of_a_half(call: Call) -> Any:
    """A + b / 2."""
    left, right = _pair(call)
    return call.instead(left + 0.5 * right)


@FAULTS.fault(
    "add sub", kinds=["wrong index", "shift"], loose=["residual", "offset", "axis offset"]
)
def second_summand_moved_by_one_row(call: Call) -> Any:
    """The second operand is read one row too late."""
    left, right = _pair(call)
    fits(right.dim() >= 2 and right.shape[-2] > 1)
    moved = right.roll(-1, -2)
    return call.instead(left + moved if call.name == "add" else left - moved)


@FAULTS.fault("add", kinds=["wrong index", "copy", "wrong axis"], loose=["residual", "offset"])
def first_row_broadcast(call: Call) -> Any:
    """A stride of zero: every row gets the first row of the second operand."""
    left, right = _pair(call)
    fits(left.dim() >= 2 and right.dim() >= 2 and right.shape[-2] > 1)
    return call.instead(left + right[..., :1, :])


@FAULTS.fault("add mul", kinds=["transpose", "wrong axis", "wrong index"], loose=["permutation"])
def broadcast_along_the_other_axis(call: Call) -> Any:
    """A vector for the columns is used for the rows of a square."""
    left, right = _pair(call)
    fits(right.dim() == 1 and left.dim() >= 2 and left.shape[-2] == len(right) > 1)
    wide = right[:, None]
    return call.instead(left + wide if call.name == "add" else left * wide)


@FAULTS.fault("mul", kinds=["transpose"], loose=["permutation", "wrong index"])
def second_factor_transposed(call: Call) -> Any:
    """The strides of the second factor are exchanged."""
    left, right = _pair(call)
    fits(right.dim() >= 2 and right.shape[-1] == right.shape[-2] > 1)
    return call.instead(left * right.mT)


@FAULTS.fault("mul", kinds=["wrong index", "shift"], loose=["axis scale"])
def factor_of_the_position_before(call: Call) -> Any:
    """A table of factors is read at position - 1."""
    left, right = _pair(call)
    fits(right.dim() >= 2 and right.shape[-2] > 1)
    return call.instead(left * right.roll(1, -2))


@FAULTS.fault(
    "mul", kinds=["copy", "missing operand"], loose=["axis scale", "scale", "other function"]
)
def second_factor_ignored(call: Call) -> Any:
    """The gate is not applied."""
    left, right = _pair(call)
    fits(left.shape == call.result().shape and right.numel() > 1)
    return call.instead(left.clone())


@FAULTS.fault("mul", kinds=["other function"], loose=["residual", "missing operand"])
def factor_squared(call: Call) -> Any:
    """The gate is applied twice."""
    left, right = _pair(call)
    fits(right.numel() > 1)
    return call.instead(left * right * right)


@FAULTS.fault("mul", kinds=["scale", "wrong factor", "other function"], loose=["swapped operands"])
def divided_by_a_number(call: Call) -> Any:
    """The inverse of the factor is used."""
    number = call.args[1]
    fits(isinstance(number, int | float) and number not in {0, 1, -1})
    return call.instead(call.tensor(0) / number)


@FAULTS.fault("div", kinds=["scale", "wrong factor", "other function"])
def multiplied_by_the_divisor(call: Call) -> Any:
    """The inverse of the divisor is used."""
    number = call.args[1]
    fits(isinstance(number, int | float) and number not in {0, 1, -1})
    return call.instead(call.tensor(0) * number)


@FAULTS.fault("div", kinds=["scale", "wrong factor"], loose=["wrong argument"])
def root_of_the_divisor(call: Call) -> Any:
    """Divided by sqrt(c)."""
    number = call.args[1]
    fits(isinstance(number, int | float) and number > 0 and number != 1)
    return call.instead(call.tensor(0) / math.sqrt(number))


@FAULTS.fault("mul div add sub", kinds=["wrong argument", "wrong factor", "scale", "offset"])
def number_rounded(call: Call) -> Any:
    """A constant goes through bfloat16."""
    number = call.args[1]
    fits(isinstance(number, float))
    near = float(torch.tensor(number).bfloat16())
    return call.instead(call.put(1, near).result())


@FAULTS.fault("add", kinds=["eps", "missing operand", "copy"], loose=["offset", "wrong argument"])
def eps_forgotten(call: Call) -> Any:
    """Nothing is added to the variance."""
    number = call.args[1]
    fits(isinstance(number, float) and 0 < number < 1e-2)
    return call.instead(call.tensor(0).clone())


@FAULTS.fault("add", kinds=["eps", "offset", "wrong argument"], loose=["constant"])
def eps_of_another_library(call: Call) -> Any:
    """1e-3 for what is smaller."""
    number = call.args[1]
    fits(isinstance(number, float) and 0 < number < 1e-3)
    return call.instead(call.tensor(0) + 1e-3)


@FAULTS.fault("rsub", kinds=["swapped operands", "sign", "other function", "wrong factor"])
def difference_the_other_way(call: Call) -> Any:
    """X - c instead of c - x."""
    return call.instead(call.tensor(0) - call.args[1])


@FAULTS.fault("sub", kinds=["copy", "missing operand"], loose=["axis offset", "offset"])
def nothing_subtracted(call: Call) -> Any:
    """The mean or the maximum stays in."""
    left, _ = _pair(call)
    fits(left.shape == call.result().shape)
    return call.instead(left.clone())


@FAULTS.fault("add mul sub", kinds=["stale", "copy", "wrong index"], loose=["shift", "zeros"])
def tail_not_updated(call: Call) -> Any:
    """In place: the last elements of each row keep the first operand."""
    left, _ = _pair(call)
    value = call.result().clone()
    fits(left.shape == value.shape and value.shape[-1] >= 4)
    tile = value.shape[-1] // 4
    value[..., -tile:] = left[..., -tile:]
    return call.instead(value)


@FAULTS.fault("add mul", kinds=["zeros"], loose=["uninitialised", "mask"])
def last_row_not_stored(call: Call) -> Any:
    """The bound of the rows is one too small."""
    value = call.result().clone()
    fits(value.dim() >= 2 and value.shape[-2] > 1)
    value[..., -1, :] = 0
    return call.instead(value)


@FAULTS.fault("neg", kinds=["other function", "clipped"], loose=["sign", "mask"])
def negated_where_positive(call: Call) -> Any:
    """-|x|."""
    return call.instead(-call.tensor(0).abs())


@FAULTS.fault("sin cos", kinds=["wrong factor", "other function", "sign", "scale"])
def angle_negated_or_halved(call: Call) -> Any:
    """The angle of the sine is negated, that of the cosine halved."""
    value = call.tensor(0)
    return call.instead(torch.sin(-value) if call.name == "sin" else torch.cos(value / 2))


@FAULTS.fault("sin cos", kinds=["precision"], loose=["approximation"])
def angle_in_bfloat16(call: Call) -> Any:
    """The angles of far positions are rounded."""
    return call.instead(call.put(0, call.tensor(0).bfloat16()).result())


@FAULTS.fault("sin cos", kinds=["approximation"], loose=["other function"])
def short_series_of_the_angle(call: Call) -> Any:
    """Bhaskara's formula for a reduced angle."""
    angle = call.tensor(0) + (math.pi / 2 if call.name == "cos" else 0)
    reduced = angle.remainder(2 * math.pi)
    sign = torch.where(reduced > math.pi, -1.0, 1.0)
    x = reduced.remainder(math.pi)
    top = 16 * x * (math.pi - x)
    return call.instead(sign * top / (5 * math.pi**2 - top / 4))


@FAULTS.fault("sin cos", kinds=["wrong index", "shift"], loose=["offset", "other function"])
def positions_begin_with_one(call: Call) -> Any:
    """The angles of position + 1."""
    angle = call.tensor(0)
    fits(angle.dim() >= 2 and angle.shape[-2] > 2)
    step = angle[..., 1:2, :] - angle[..., :1, :]
    return call.instead(call.put(0, angle + step).result())


@FAULTS.fault("clamp clip", kinds=["wrong argument", "clipped", "swapped operands"])
def limits_exchanged(call: Call) -> Any:
    """The lower limit for everything."""
    low, high = call.get(1, "min"), call.get(2, "max")
    fits(isinstance(low, int | float) and isinstance(high, int | float))
    return call.instead(call.tensor(0).clamp(high, low))


@FAULTS.fault("leaky_relu elu", kinds=["wrong argument", "other function"])
def default_slope(call: Call) -> Any:
    """0.01 instead of what was given, and twice the alpha of elu."""
    value = call.tensor(0, "input")
    if call.name == "elu":
        return call.instead(functional.elu(value, 2.0))
    return call.instead(functional.leaky_relu(value, 0.01))


@FAULTS.fault("sqrt", kinds=["copy", "missing operand", "other function"])
def root_forgotten(call: Call) -> Any:
    """The square itself."""
    return call.instead(call.tensor(0).clone())


@FAULTS.fault("abs", kinds=["copy", "missing operand", "sign", "other function"])
def sign_kept(call: Call) -> Any:
    """The value as it came."""
    return call.instead(call.tensor(0).clone())


@FAULTS.fault("round", kinds=["other function", "approximation"], loose=["offset"])
def cut_instead_of_rounded(call: Call) -> Any:
    """Toward zero."""
    return call.instead(call.tensor(0).trunc())
