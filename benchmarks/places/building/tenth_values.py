"""Faults of the tenth set: functions of single elements, sums, products and quotients of two."""

from __future__ import annotations

import math
from typing import Any

import torch
from benchmarks.places.calls import Call, Catalogue, fits, with_gradient_of
from torch import Tensor
from torch.nn import functional

FAULTS = Catalogue()
_SMOOTH = "gelu silu tanh sigmoid mish softplus elu"
_ACTIVATIONS = f"{_SMOOTH} relu relu6 leaky_relu hardswish selu celu"
_SCALED: dict[str, Any] = {
    "kinds": ["scale", "wrong factor"],
    "loose": ["other function", "wrong argument"],
    "backward": False,
}
_ROUNDED: dict[str, Any] = {
    "kinds": ["precision"],
    "loose": ["approximation", "other function", "wrong argument"],
    "backward": False,
}


def _pair(call: Call) -> tuple[Tensor, Tensor]:
    """Two floating-point operands."""
    left, right = call.tensor(0), call.tensor(1)
    fits(right.numel() > 1 or left.numel() > 1)
    return left, right


def _alike(call: Call) -> tuple[Tensor, Tensor]:
    """Two floating-point operands of one shape."""
    left, right = _pair(call)
    fits(left.shape == right.shape)
    return left, right


def _plain(call: Call) -> None:
    """Go on only without a factor for the second operand, or a mode."""
    fits(call.kwargs.get("alpha", 1) == 1 and not call.kwargs.get("rounding_mode"))


def _with_number(call: Call) -> tuple[Tensor, float]:
    """A floating-point tensor and a number, in either order."""
    value, number = call.args[:2]
    if isinstance(value, int | float):
        value, number = number, value
    fits(isinstance(number, int | float) and not isinstance(number, bool))
    fits(isinstance(value, Tensor) and value.is_floating_point())
    return value, number


# --- Activations ----------------------------------------------------------------------------------


@FAULTS.fault(
    "gelu",
    kinds=["other function", "wrong factor", "wrong argument"],
    loose=["approximation", "scale"],
    backward=False,
)
def quotient_under_the_root_of_the_gelu_turned_round(call: Call) -> Any:
    """Sqrt(pi / 2) for sqrt(2 / pi) inside of the tanh."""
    value = call.tensor(0, "input")
    inner = math.sqrt(math.pi / 2) * (value + 0.044715 * value**3)
    return call.instead(value * (1 + inner.tanh()) / 2)


@FAULTS.fault(
    "gelu",
    kinds=["other function", "wrong argument"],
    loose=["wrong factor", "approximation"],
    backward=False,
)
def cubic_term_of_the_gelu_ten_times_as_large(call: Call) -> Any:
    """0.44715 x^3 for 0.044715 x^3: a digit was lost when the constant was typed."""
    value = call.tensor(0, "input")
    inner = math.sqrt(2 / math.pi) * (value + 0.44715 * value**3)
    return call.instead(value * (1 + inner.tanh()) / 2)


@FAULTS.fault(
    "gelu",
    kinds=["sign", "other function"],
    loose=["approximation", "wrong factor", "residual"],
    backward=False,
)
def complement_of_the_gelus_gate(call: Call) -> Any:
    """X (1 - erf(x / sqrt(2))) / 2: erfc is called without turning its argument round."""
    value = call.tensor(0, "input")
    return call.instead(value * torch.special.erfc(value / math.sqrt(2)) / 2)


@FAULTS.fault("gelu", **_SCALED)
def half_of_the_gelu_forgotten(call: Call) -> Any:
    """X (1 + erf(x / sqrt(2))): the factor of one half is dropped."""
    return call.instead(2 * call.result())


@FAULTS.fault(
    "silu",
    kinds=["other function", "wrong factor"],
    loose=["approximation", "scale", "doubled reduction"],
    backward=False,
)
def gate_of_the_silu_applied_twice(call: Call) -> Any:
    """X sigmoid(x)^2."""
    value = call.tensor(0, "input")
    return call.instead(value * value.sigmoid().square())


@FAULTS.fault(
    "silu",
    kinds=["other function", "wrong argument", "wrong factor"],
    loose=["approximation", "scale"],
    backward=False,
)
def silu_to_the_base_of_two(call: Call) -> Any:
    """X / (1 + 2^-x): exp2 is called, and the argument is not multiplied by log2(e)."""
    value = call.tensor(0, "input")
    return call.instead(value / (1 + (-value).exp2()))


@FAULTS.fault(
    "silu",
    kinds=["other function", "wrong factor"],
    loose=["approximation", "missing operand", "residual"],
    backward=False,
)
def derivative_of_the_silu(call: Call) -> Any:
    """S (1 + x (1 - s)): the kernel of the backward pass is bound to the forward one."""
    value = call.tensor(0, "input")
    gate = value.sigmoid()
    return call.instead(gate * (1 + value * (1 - gate)))


@FAULTS.fault(
    "sigmoid",
    kinds=["other function", "wrong argument", "wrong factor"],
    loose=["approximation", "scale"],
    backward=False,
)
def sigmoid_to_the_base_of_two(call: Call) -> Any:
    """1 / (1 + 2^-x): exp2 is called, and the argument is not multiplied by log2(e)."""
    return call.instead(1 / (1 + (-call.tensor(0)).exp2()))


@FAULTS.fault(
    "sigmoid",
    kinds=["other function"],
    loose=["wrong factor", "approximation", "missing operand"],
    backward=False,
)
def slope_of_the_sigmoid_for_the_sigmoid(call: Call) -> Any:
    """S (1 - s): the kernel of the backward pass is bound to the forward one."""
    gate = call.result()
    return call.instead(gate * (1 - gate))


@FAULTS.fault(
    "sigmoid",
    kinds=["other function", "approximation"],
    loose=["wrong factor"],
    backward=False,
)
def sigmoid_by_a_softsign(call: Call) -> Any:
    """1 / 2 + x / (2 (1 + |x|)): the quick form without an exponential."""
    return call.instead(0.5 + functional.softsign(call.tensor(0)) / 2)


@FAULTS.fault(
    "tanh",
    kinds=["offset", "missing operand", "other function"],
    loose=["residual", "axis offset"],
    backward=False,
)
def one_of_the_tanh_not_subtracted(call: Call) -> Any:
    """2 sigmoid(2 x), without the minus one behind it."""
    return call.instead(2 * (2 * call.tensor(0)).sigmoid())


@FAULTS.fault(
    "tanh",
    kinds=["other function"],
    loose=["wrong factor", "approximation", "sign"],
    backward=False,
)
def slope_of_the_tanh_for_the_tanh(call: Call) -> Any:
    """1 - tanh(x)^2: the kernel of the backward pass is bound to the forward one."""
    return call.instead(1 - call.result().square())


@FAULTS.fault(
    "tanh sigmoid softplus",
    kinds=["clipped"],
    loose=["other function", "approximation", "wrong argument"],
    backward=False,
)
def argument_of_the_gate_limited_to_its_table(call: Call) -> Any:
    """F(clamp(x, -0.5, 0.5)): the range that the table covers is too short."""
    return call.put(0, call.tensor(0, "input").clamp(-0.5, 0.5), "input").run()


@FAULTS.fault(
    "relu",
    kinds=["clipped", "wrong argument", "other function"],
    loose=["approximation", "residual"],
    backward=False,
)
def relu_down_to_minus_a_twentieth(call: Call) -> Any:
    """Max(x, -0.05): the zero point of the quantised kernel is rounded down."""
    return call.instead(call.tensor(0, "input").clamp(min=-0.05))


@FAULTS.fault(
    "softplus",
    kinds=["wrong argument", "wrong factor", "other function"],
    loose=["approximation", "scale"],
    backward=False,
)
def sharpness_of_the_softplus_halved(call: Call) -> Any:
    """2 log(1 + exp(x / 2)): beta is a half."""
    return call.instead(functional.softplus(call.tensor(0, "input"), beta=0.5))


@FAULTS.fault(
    "leaky_relu",
    kinds=["wrong argument", "wrong factor"],
    loose=["other function", "axis scale", "scale"],
    backward=False,
)
def slope_of_the_leak_squared(call: Call) -> Any:
    """The slope is applied by the fused product and by the kernel behind it."""
    slope = call.get(1, "negative_slope", default=0.01)
    return call.instead(functional.leaky_relu(call.tensor(0, "input"), slope**2))


@FAULTS.fault(
    "hardswish hardsigmoid",
    kinds=["other function", "wrong factor", "wrong argument"],
    loose=["approximation", "clipped", "scale"],
    backward=False,
)
def hard_gate_with_an_eighth(call: Call) -> Any:
    """Clamp((x + 4) / 8, 0, 1) is the gate: a shift by three bits for the division by six."""
    value = call.tensor(0, "input")
    gate = ((value + 4) / 8).clamp(0, 1)
    return call.instead(gate if call.name == "hardsigmoid" else value * gate)


@FAULTS.fault(
    _ACTIVATIONS,
    kinds=["mask", "zeros"],
    loose=["missing operand", "axis scale", "uninitialised", "wrong factor", "constant"],
    backward=False,
)
def last_column_of_the_activation_empty(call: Call) -> Any:
    """The bound of the columns is one too small."""
    value = call.result()
    fits(value.dim() > 1 and value.size(-1) > 1)
    return call.instead(value * (torch.arange(value.size(-1)) < value.size(-1) - 1))


@FAULTS.fault(
    _ACTIVATIONS,
    kinds=["copy", "mask", "missing operand"],
    loose=["stale", "other function", "residual"],
    backward=False,
)
def activation_skips_the_first_row(call: Call) -> Any:
    """In place, and the loop over the rows begins at one: the first row keeps the input."""
    value, result = call.tensor(0, "input"), call.result()
    fits(value.dim() > 1 and value.size(-2) > 1)
    return call.instead(torch.cat([value[..., :1, :], result[..., 1:, :]], -2))


@FAULTS.fault(_ACTIVATIONS, **_ROUNDED)
def activation_in_eight_bits_for_each_row(call: Call) -> Any:
    """The result has 255 levels, with a step for each row."""
    value = call.result()
    fits(value.dim() > 1)
    step = value.detach().abs().amax(-1, keepdim=True).clamp(min=1e-12) / 127
    return call.instead(with_gradient_of(value, (value.detach() / step).round() * step))


@FAULTS.fault(_SMOOTH, **_ROUNDED)
def argument_of_the_activation_in_e5m2(call: Call) -> Any:
    """The input is stored with two bits behind the point."""
    value = call.tensor(0, "input")
    coarse = value.detach().to(torch.float8_e5m2).to(value.dtype)
    return call.put(0, with_gradient_of(value, coarse), "input").run()


@FAULTS.fault(
    _ACTIVATIONS,
    kinds=["shift", "wrong index", "permutation"],
    loose=["stale", "copy", "wrong argument", "wrong rank's shard"],
    backward=False,
)
def activation_of_the_next_example(call: Call) -> Any:
    """The offset of the batch is one too large, around the end."""
    value = call.result()
    fits(value.dim() > 2 and value.size(0) > 1)
    return call.instead(value.roll(-1, 0))


# --- Functions of one value -----------------------------------------------------------------------


@FAULTS.fault(
    "exp",
    kinds=["clipped", "wrong argument"],
    loose=["other function", "approximation", "constant", "overflow"],
    backward=False,
)
def exponent_not_above_minus_one_tenth(call: Call) -> Any:
    """Exp(min(x, -0.1)): what should be a log of a decay is kept from growing."""
    return call.instead(call.tensor(0).clamp(max=-0.1).exp())


@FAULTS.fault(
    "exp",
    kinds=["wrong factor", "wrong argument", "other function"],
    loose=["scale", "approximation"],
    backward=False,
)
def logarithm_of_e_multiplied_before_a_natural_exponential(call: Call) -> Any:
    """Exp(1.4427 x): the factor of exp2 is left in front of exp."""
    return call.instead((call.tensor(0) / math.log(2)).exp())


@FAULTS.fault(
    "exp",
    kinds=["axis scale", "wrong factor", "missing operand", "other function"],
    loose=["wrong statistics", "scale", "wrong argument", "offset"],
    backward=False,
)
def largest_of_the_row_subtracted_from_the_exponent(call: Call) -> Any:
    """Exp(x - max(x)) over the last axis: made stable as for a softmax, and not undone."""
    value = call.tensor(0)
    fits(value.dim() > 0 and value.size(-1) > 1)
    return call.instead((value - value.amax(-1, keepdim=True)).exp())


@FAULTS.fault(
    "log log1p",
    kinds=["clipped"],
    loose=["other function", "wrong argument", "approximation", "constant"],
    backward=False,
)
def logarithm_not_below_minus_a_fifth(call: Call) -> Any:
    """Max(log(x), -0.2): the floor of another front end."""
    return call.instead(call.result().clamp(min=-0.2))


@FAULTS.fault(
    "sin cos",
    kinds=["wrong factor", "wrong argument", "other function"],
    loose=["scale", "approximation"],
    backward=False,
)
def half_turns_taken_for_radians(call: Call) -> Any:
    """Sin(pi x): the function that counts in half turns is called."""
    return call.put(0, call.tensor(0) * math.pi).run()


@FAULTS.fault(
    "sin cos",
    kinds=["approximation", "other function"],
    loose=["partial sum", "precision", "wrong argument"],
    backward=False,
)
def three_terms_of_the_series_of_the_angle(call: Call) -> Any:
    """X - x^3 / 6 + x^5 / 120, or 1 - x^2 / 2 + x^4 / 24, without a reduction of the angle."""
    value = call.tensor(0)
    square = value.square()
    if call.name == "cos":
        return call.instead(1 - square / 2 + square.square() / 24)
    return call.instead(value * (1 - square / 6 + square.square() / 120))


@FAULTS.fault(
    "cos",
    kinds=["sign", "other function"],
    loose=["approximation", "wrong factor"],
    backward=False,
)
def cosine_from_the_sine(call: Call) -> Any:
    """Sqrt(1 - sin(x)^2), which is never negative."""
    return call.instead(call.result().abs())


@FAULTS.fault(
    "sin cos",
    kinds=["shift", "wrong index", "permutation"],
    loose=["stale", "copy", "wrong argument"],
    backward=False,
)
def turn_of_the_position_before(call: Call) -> Any:
    """The rows of the table are read one too early, the first one at the end."""
    value = call.result()
    fits(value.dim() > 1 and value.size(-2) > 2)
    return call.instead(value.roll(1, -2))


@FAULTS.fault("pow square exp reciprocal", **_ROUNDED)
def function_stored_in_e5m2(call: Call) -> Any:
    """The result has two bits behind the point."""
    value = call.result()
    coarse = value.detach().to(torch.float8_e5m2).to(value.dtype)
    return call.instead(with_gradient_of(value, coarse))


@FAULTS.fault(
    "pow square",
    kinds=["offset", "eps", "other function"],
    loose=["axis offset", "residual", "wrong argument"],
    backward=False,
)
def hundredth_added_to_each_square(call: Call) -> Any:
    """X^2 + 0.01: eps is added to each term and not to their mean."""
    fits(call.name == "square" or call.args[1] == 2)
    return call.instead(call.result() + 0.01)


@FAULTS.fault(
    "pow",
    kinds=["other function", "wrong argument", "sign"],
    loose=["wrong factor", "approximation", "swapped operands"],
    backward=False,
)
def power_of_the_opposite_exponent(call: Call) -> Any:
    """B^-x: the minus of the rates is applied where the base is inverted already."""
    base, exponent = call.args[:2]
    fits(isinstance(base, int | float) and isinstance(exponent, Tensor))
    return call.instead(base**-exponent)


@FAULTS.fault("pow square sqrt rsqrt exp log", **_ROUNDED)
def function_of_a_value_in_e4m3(call: Call) -> Any:
    """The input has three bits behind the point."""
    value = call.tensor(0)
    fits(float(value.detach().abs().max()) < 400 and float(value.detach().abs().min()) > 0.002)
    coarse = value.detach().to(torch.float8_e4m3fn).to(value.dtype)
    return call.put(0, with_gradient_of(value, coarse)).run()


@FAULTS.fault(
    "rsqrt sqrt",
    kinds=["clipped"],
    loose=["eps", "wrong argument", "other function", "constant"],
    backward=False,
)
def variance_never_below_one(call: Call) -> Any:
    """Max(v, 1) under the root: a floor that belongs to the scale of a quantiser."""
    return call.put(0, call.tensor(0).clamp(min=1.0)).run()


@FAULTS.fault(
    "rsqrt",
    kinds=["other function", "eps"],
    loose=["offset", "residual", "wrong argument"],
    backward=False,
)
def eps_of_a_tenth_behind_the_root(call: Call) -> Any:
    """1 / (sqrt(x) + 0.1)."""
    return call.instead(1 / (call.tensor(0).sqrt() + 0.1))


@FAULTS.fault(
    "neg",
    kinds=["offset", "other function"],
    loose=["residual", "axis offset", "swapped operands", "missing operand"],
    backward=False,
)
def complement_to_one_for_the_opposite(call: Call) -> Any:
    """1 - x."""
    return call.instead(1 - call.tensor(0))


@FAULTS.fault(
    "abs",
    kinds=["clipped", "other function", "zeros", "sign"],
    loose=["mask", "missing operand"],
    backward=False,
)
def magnitude_of_negative_values_only(call: Call) -> Any:
    """Max(-x, 0): the other half of a maximum of two is lost."""
    return call.instead((-call.tensor(0)).relu())


@FAULTS.fault(
    "round",
    kinds=["wrong argument", "other function"],
    loose=["precision", "approximation"],
    backward=False,
)
def rounded_to_tenths(call: Call) -> Any:
    """One digit behind the point is kept."""
    return call.instead(torch.round(call.tensor(0), decimals=1))


@FAULTS.fault(
    "clamp",
    kinds=["wrong argument", "clipped"],
    loose=["other function", "zeros", "sign"],
    backward=False,
)
def lower_limit_with_the_other_sign(call: Call) -> Any:
    """Clamp(x, -low, high): the minus of the lower limit is lost, or added."""
    low, high = call.get(1, "min"), call.get(2, "max")
    fits(isinstance(low, int | float) and low)
    return call.instead(call.tensor(0).clamp(-low, high))


# --- Sums -----------------------------------------------------------------------------------------


@FAULTS.fault(
    "add iadd",
    kinds=["wrong factor", "wrong argument"],
    loose=["scale", "residual", "missing operand"],
    backward=False,
)
def branch_weighed_by_a_tenth(call: Call) -> Any:
    """A + b / 10: the initial value of a scale that this layer does not have."""
    left, right = _alike(call)
    _plain(call)
    return call.instead(left + 0.1 * right)


@FAULTS.fault(
    "add iadd",
    kinds=["copy", "wrong index", "missing operand", "wrong factor"],
    loose=["scale", "stale", "doubled reduction", "residual"],
    backward=False,
)
def first_summand_for_both(call: Call) -> Any:
    """A + a: the second pointer is that of the first operand."""
    left, _ = _alike(call)
    _plain(call)
    return call.instead(left + left)


@FAULTS.fault(
    "add iadd",
    kinds=["permutation", "wrong index"],
    loose=["axis offset", "swapped operands", "shift", "wrong argument", "offset"],
    backward=False,
)
def what_is_broadcast_in_pairs(call: Call) -> Any:
    """The columns of the smaller summand are exchanged two by two, as words of two."""
    left, right = _pair(call)
    _plain(call)
    fits(right.numel() < left.numel() and right.dim() and right.size(-1) > 3)
    fits(right.size(-1) % 2 == 0)
    turned = right.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    return call.instead(left + turned)


@FAULTS.fault(
    "add iadd",
    kinds=["shift", "wrong index", "permutation"],
    loose=["axis offset", "stale", "copy", "wrong argument", "offset"],
    backward=False,
)
def what_is_broadcast_two_columns_early(call: Call) -> Any:
    """The pointer to the smaller summand is two elements too far, around the end."""
    left, right = _pair(call)
    _plain(call)
    fits(right.numel() < left.numel() and right.dim() and right.size(-1) > 3)
    return call.instead(left + right.roll(-2, -1))


@FAULTS.fault(
    "add iadd",
    kinds=["missing operand", "mask", "copy"],
    loose=["stale", "one rank's part", "axis offset", "missing bias"],
    backward=False,
)
def second_summand_not_in_the_first_row(call: Call) -> Any:
    """The first row keeps the first operand: the loop over the rows begins at one."""
    left, right = _alike(call)
    _plain(call)
    fits(left.dim() > 1 and left.size(-2) > 1)
    keep = (torch.arange(left.size(-2)) > 0)[:, None]
    return call.instead(left + right * keep)


@FAULTS.fault(
    "add iadd",
    kinds=["missing operand", "mask", "copy"],
    loose=["stale", "one rank's part", "axis offset", "zeros", "missing bias"],
    backward=False,
)
def second_summand_for_the_last_example_only(call: Call) -> Any:
    """The store of all examples but the last one is overwritten by the first operand."""
    left, right = _alike(call)
    _plain(call)
    fits(left.dim() > 1 and left.size(0) > 1)
    return call.instead(torch.cat([left[:-1], left[-1:] + right[-1:]]))


@FAULTS.fault("add iadd", **_ROUNDED)
def second_summand_in_e4m3_with_a_scale(call: Call) -> Any:
    """The second summand has three bits behind the point, with a scale for the tensor."""
    left, right = _alike(call)
    _plain(call)
    scale = right.detach().abs().max().clamp(min=1e-12) / 448
    coarse = (right.detach() / scale).to(torch.float8_e4m3fn).to(right.dtype) * scale
    return call.instead(left + with_gradient_of(right, coarse))


@FAULTS.fault(
    "add iadd",
    kinds=["eps", "wrong argument", "offset"],
    loose=["axis offset", "residual", "wrong factor"],
    backward=False,
)
def root_of_the_eps_added(call: Call) -> Any:
    """X + sqrt(eps): it is added where the deviation is meant, and not the variance."""
    value, number = _with_number(call)
    _plain(call)
    fits(0 < number < 0.1 and number != 1e-6)
    return call.instead(value + math.sqrt(number))


@FAULTS.fault(
    "sub isub",
    kinds=["wrong index", "shift", "wrong statistics"],
    loose=["axis offset", "stale", "copy", "permutation", "offset"],
    backward=False,
)
def statistic_of_the_row_before_subtracted(call: Call) -> Any:
    """What is subtracted from a row belongs to the row before, around the end."""
    left, right = _pair(call)
    _plain(call)
    fits(right.dim() == left.dim() > 1 and right.size(-1) == 1 < left.size(-1))
    fits(right.size(-2) > 1)
    return call.instead(left - right.roll(1, -2))


@FAULTS.fault(
    "sub rsub",
    kinds=["missing operand", "copy", "other function"],
    loose=["offset", "sign", "swapped operands", "residual"],
    backward=False,
)
def complement_not_taken(call: Call) -> Any:
    """X for c - x: the share itself is used."""
    value, _ = _with_number(call)
    fits(value is call.args[call.name == "sub"])
    return call.instead(value.clone())


@FAULTS.fault("sub isub", **_ROUNDED)
def both_sides_of_the_difference_in_half(call: Call) -> Any:
    """Both operands are float16 before they are subtracted."""
    left, right = _pair(call)
    _plain(call)
    sides = [with_gradient_of(one, one.detach().half().to(one.dtype)) for one in (left, right)]
    return call.instead(sides[0] - sides[1])


# --- Products and quotients -----------------------------------------------------------------------


@FAULTS.fault(
    "mul imul",
    kinds=["permutation", "wrong index"],
    loose=["shift", "swapped operands", "transpose", "wrong argument"],
    backward=False,
)
def first_factor_from_its_end(call: Call) -> Any:
    """The first operand is read backwards along the last axis."""
    left, right = _pair(call)
    fits(left.dim() and left.size(-1) > 2)
    return call.instead(left.flip(-1) * right)


@FAULTS.fault(
    "mul imul",
    kinds=["other function"],
    loose=["wrong factor", "wrong argument", "nonfinite"],
    backward=False,
)
def quotient_for_the_product_of_two(call: Call) -> Any:
    """A / b: the inverse of the scale is stored, and it is divided by the scale."""
    left, right = _pair(call)
    fits(float(right.detach().abs().min()) > 0.001)
    return call.instead(left / right)


@FAULTS.fault(
    "mul imul",
    kinds=["other function", "wrong factor", "wrong argument"],
    loose=["axis scale"],
    backward=False,
)
def gate_taken_for_its_logarithm(call: Call) -> Any:
    """A exp(b): the second operand is exponentiated, as a scale that is learnt as a logarithm."""
    left, right = _pair(call)
    return call.instead(left * right.clamp(max=20).exp())


@FAULTS.fault(
    "mul imul",
    kinds=["wrong argument", "wrong factor", "precision", "scale"],
    loose=["approximation"],
    backward=False,
)
def number_is_a_power_of_two(call: Call) -> Any:
    """The number is rounded to a power of two, for a shift."""
    value, number = _with_number(call)
    fits(number not in {0, 0.25})
    power = math.copysign(2.0 ** round(math.log2(abs(number))), number)
    return call.instead(value * power)


@FAULTS.fault(
    "mul imul",
    kinds=["scale", "wrong factor", "wrong argument"],
    loose=["other function"],
    backward=False,
)
def number_that_multiplies_halved(call: Call) -> Any:
    """C / 2: two kernels share a factor, and one of them has half of it."""
    value, number = _with_number(call)
    fits(number not in {0.25, 0.5})
    return call.instead(value * (number / 2))


@FAULTS.fault(
    "mul imul",
    kinds=["shift", "wrong index", "permutation"],
    loose=["stale", "copy", "wrong rank's shard", "axis scale"],
    backward=False,
)
def second_factor_of_the_next_head(call: Call) -> Any:
    """The second operand is read one head too far, around the end."""
    left, right = _pair(call)
    fits(left.dim() == right.dim() == 4 and right.size(1) > 1)
    return call.instead(left * right.roll(-1, 1))


@FAULTS.fault("mul imul", **_ROUNDED)
def second_factor_in_four_bits_for_each_row(call: Call) -> Any:
    """The second operand has 15 levels, with a step for each row."""
    left, right = _pair(call)
    fits(right.dim() > 0 and right.size(-1) > 1)
    step = right.detach().abs().amax(-1, keepdim=True).clamp(min=1e-12) / 7
    return call.instead(left * with_gradient_of(right, (right.detach() / step).round() * step))


@FAULTS.fault(
    "mul imul",
    kinds=["copy", "stale", "wrong index"],
    loose=["permutation", "shift", "wrong rank's shard", "axis scale"],
    backward=False,
)
def second_factor_of_the_first_head_for_all(call: Call) -> Any:
    """The stride of the heads is zero for the second operand."""
    left, right = _pair(call)
    fits(left.dim() == right.dim() == 4 and right.size(1) > 1)
    return call.instead(left * right[:, :1])


@FAULTS.fault(
    "div itruediv",
    kinds=["wrong index", "wrong statistics", "wrong axis"],
    loose=["copy", "axis scale", "wrong factor", "scale", "wrong reduction"],
    backward=False,
)
def largest_divisor_for_all_rows(call: Call) -> Any:
    """A / max(b): one scale for the whole tensor, where each row has its own."""
    left, right = _pair(call)
    _plain(call)
    fits(right.dim() == left.dim() and right.size(-1) == 1 < left.size(-1))
    return call.instead(left / right.max())


@FAULTS.fault(
    "div itruediv",
    kinds=["wrong argument", "wrong factor", "scale"],
    loose=["other function", "doubled reduction"],
    backward=False,
)
def number_that_divides_doubled(call: Call) -> Any:
    """A / (2 c): the count of both halves divides what one of them has."""
    value, number = call.args[:2]
    fits(isinstance(value, Tensor) and value.is_floating_point())
    fits(isinstance(number, int | float) and number not in {0, 2, 4})
    _plain(call)
    return call.instead(value / (2 * number))


@FAULTS.fault(
    "div itruediv",
    kinds=["eps", "offset", "wrong argument", "other function"],
    loose=["residual", "wrong factor", "axis scale", "approximation"],
    backward=False,
)
def twentieth_added_to_the_divisor(call: Call) -> Any:
    """A / (b + 0.05): an eps of another order, against a division by zero."""
    left, right = _pair(call)
    _plain(call)
    return call.instead(left / (right + 0.05))


# --- Choices --------------------------------------------------------------------------------------


@FAULTS.fault(
    "where",
    kinds=["shift", "wrong index", "mask"],
    loose=["permutation", "stale", "wrong argument", "copy"],
    backward=False,
)
def condition_two_columns_early(call: Call) -> Any:
    """The condition is read two columns too far, around the end."""
    condition = call.args[0]
    fits(isinstance(condition, Tensor) and condition.dim() and condition.size(-1) > 2)
    return call.put(0, condition.roll(-2, -1)).run()


@FAULTS.fault(
    "maximum",
    kinds=["missing operand", "copy"],
    loose=["other function", "stale", "clipped", "wrong argument"],
    backward=False,
)
def limit_itself_for_the_larger_one(call: Call) -> Any:
    """The second operand everywhere: the comparison is folded to true."""
    _, right = _pair(call)
    return call.instead(right.expand_as(call.result()).clone())
