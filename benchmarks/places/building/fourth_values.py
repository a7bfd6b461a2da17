"""Faults that were measured fourth and have been seen: functions of single elements."""

from __future__ import annotations

from typing import Any

import torch
from benchmarks.places.calls import Call, Catalogue, fits, with_gradient_of
from torch import Tensor
from torch.nn import functional

FAULTS = Catalogue()


def _pair(call: Call) -> tuple[Tensor, Tensor]:
    left, right = call.args[:2]
    fits(isinstance(left, Tensor) and isinstance(right, Tensor) and not call.kwargs)
    fits(left.is_floating_point() and right.is_floating_point())
    return left, right


def _number(call: Call) -> tuple[Tensor, float]:
    left, right = call.args[:2]
    fits(isinstance(left, Tensor) and left.is_floating_point() and not call.kwargs)
    fits(isinstance(right, int | float) and not isinstance(right, bool))
    return left, right


# --- Activations ----------------------------------------------------------------------------------


@FAULTS.fault("gelu silu", kinds=["zeros", "clipped", "approximation", "mask", "other function"])
def tail_of_the_activation_cut(call: Call) -> Any:
    """Nothing is left where the input is below -1."""
    value = call.tensor(0, "input")
    return call.instead(torch.where(value < -1, 0.0, call.result()))


@FAULTS.fault("silu", kinds=["other function", "approximation"])
def silu_becomes_mish(call: Call) -> Any:
    """X tanh(softplus(x))."""
    return call.instead(functional.mish(call.tensor(0, "input")))


@FAULTS.fault("relu", kinds=["other function"], loose=["approximation", "clipped"])
def relu_becomes_elu(call: Call) -> Any:
    """exp(x) - 1 below zero."""
    return call.instead(functional.elu(call.tensor(0, "input")))


@FAULTS.fault("gelu", kinds=["other function"], loose=["approximation"])
def gelu_becomes_softplus(call: Call) -> Any:
    """log(1 + exp(x))."""
    return call.instead(functional.softplus(call.tensor(0, "input")))


@FAULTS.fault(
    "gelu silu relu tanh sigmoid", kinds=["precision"], loose=["approximation", "clipped"]
)
def activation_in_eight_bits(call: Call) -> Any:
    """The result has 255 levels for the whole tensor."""
    value = call.result()
    step = value.detach().abs().max() / 127
    return call.instead(with_gradient_of(value, (value.detach() / step).round() * step))


@FAULTS.fault("gelu silu relu", kinds=["scale", "wrong factor"], loose=["wrong argument"])
def gain_of_another_initialisation(call: Call) -> Any:
    """The result is multiplied by the root of two."""
    return call.instead(call.result() * 2**0.5)


@FAULTS.fault("gelu silu tanh", kinds=["zeros", "uninitialised", "mask"], loose=["constant"])
def every_fourth_column_not_written(call: Call) -> Any:
    """One lane of a vector of four stays empty."""
    value = call.result().clone()
    fits(value.size(-1) > 4)
    value[..., 3::4] = 0
    return call.instead(value)


@FAULTS.fault(
    "gelu silu relu", kinds=["offset", "other function"], loose=["wrong argument", "axis offset"]
)
def result_lowered_by_its_bound(call: Call) -> Any:
    """A result with a zero point: 0.17 is subtracted and not added again."""
    return call.instead(call.result() - 0.17)


@FAULTS.fault("sigmoid", kinds=["wrong factor", "scale", "other function"], loose=["approximation"])
def gate_half_as_steep(call: Call) -> Any:
    """sigmoid(x / 2)."""
    return call.instead(torch.sigmoid(call.tensor(0) / 2))


@FAULTS.fault("sigmoid", kinds=["scale", "wrong factor"])
def gate_twice_as_high(call: Call) -> Any:
    """2 sigmoid(x), whose mean is one."""
    return call.instead(2 * call.result())


@FAULTS.fault("tanh", kinds=["other function", "approximation"])
def tanh_becomes_softsign(call: Call) -> Any:
    """X / (1 + |x|)."""
    return call.instead(functional.softsign(call.tensor(0)))


@FAULTS.fault("tanh", kinds=["other function", "wrong factor"], loose=["scale", "approximation"])
def tanh_with_the_constants_of_a_book(call: Call) -> Any:
    """1.7159 tanh(2 x / 3)."""
    return call.instead(1.7159 * torch.tanh(call.tensor(0) * 2 / 3))


@FAULTS.fault("softplus", kinds=["sign", "other function"], loose=["offset", "wrong argument"])
def softplus_of_the_opposite(call: Call) -> Any:
    """log(1 + exp(-x))."""
    return call.instead(functional.softplus(-call.tensor(0, "input")))


@FAULTS.fault("softplus", kinds=["other function", "approximation"], loose=["clipped"])
def softplus_becomes_relu(call: Call) -> Any:
    """Max(x, 0)."""
    return call.instead(call.tensor(0, "input").relu())


@FAULTS.fault("hardswish", kinds=["scale", "wrong factor"], loose=["wrong argument"])
def hardswish_divided_by_three(call: Call) -> Any:
    """X relu6(x + 3) / 3."""
    return call.instead(2 * call.result())


@FAULTS.fault("hardswish hardsigmoid", kinds=["wrong argument", "clipped", "missing operand",
                                              "other function"])  # fmt: skip
def inner_limit_of_three(call: Call) -> Any:
    """min(max(x + 3, 0), 3) / 6."""
    value = call.tensor(0, "input")
    gate = (value + 3).clamp(0, 3) / 6
    return call.instead(gate * value if call.name == "hardswish" else gate)


@FAULTS.fault("glu", kinds=["missing operand", "other function"])
def gate_not_squashed(call: Call) -> Any:
    """A b."""
    left, right = call.tensor(0, "input").chunk(2, -1)
    return call.instead(left * right)


@FAULTS.fault("glu", kinds=["wrong index", "permutation"], loose=["transpose", "swapped operands"])
def gates_taken_in_turn(call: Call) -> Any:
    """Even columns are values, odd ones gates."""
    value = call.tensor(0, "input")
    return call.instead(value[..., ::2] * value[..., 1::2].sigmoid())


@FAULTS.fault("glu", kinds=["other function"], loose=["missing operand", "wrong factor"])
def gate_by_a_silu(call: Call) -> Any:
    """A silu(b)."""
    left, right = call.tensor(0, "input").chunk(2, -1)
    return call.instead(left * functional.silu(right))


@FAULTS.fault("prelu", kinds=["other function", "swapped operands", "sign"], loose=["wrong factor"])
def slope_on_the_positive_side(call: Call) -> Any:
    """Negative values pass, positive ones are damped."""
    value = call.tensor(0, "input")
    return call.instead(-functional.prelu(-value, call.tensor(1, "weight")))


@FAULTS.fault("leaky_relu", kinds=["wrong argument", "wrong factor", "other function"])
def slope_inverted(call: Call) -> Any:
    """1 / slope, as some libraries are given it."""
    slope = call.get(1, "negative_slope", default=0.01)
    return call.instead(functional.leaky_relu(call.tensor(0, "input"), 1 / slope))


@FAULTS.fault("mish", kinds=["other function", "approximation"])
def mish_becomes_silu(call: Call) -> Any:
    """X sigmoid(x)."""
    return call.instead(functional.silu(call.tensor(0, "input")))


@FAULTS.fault("selu", kinds=["other function", "scale", "wrong factor", "missing operand"])
def selu_without_its_factor(call: Call) -> Any:
    """1.0507 is left out."""
    return call.instead(call.result() / 1.0507009873554805)


@FAULTS.fault("celu", kinds=["wrong argument", "other function", "wrong factor"])
def celu_with_an_alpha_of_one(call: Call) -> Any:
    """Alpha is not handed on."""
    return call.instead(functional.celu(call.tensor(0, "input")))


@FAULTS.fault("elu", kinds=["wrong argument", "other function", "wrong factor"])
def alpha_inside_of_the_exponent(call: Call) -> Any:
    """exp(alpha x) - 1."""
    value, alpha = call.tensor(0, "input"), call.get(1, "alpha", default=1.0)
    fits(alpha != 1 and len(call.args) < 3)
    return call.instead(torch.where(value > 0, value, torch.expm1(alpha * value)))


@FAULTS.fault("softshrink", kinds=["other function", "offset", "mask"], loose=["wrong argument"])
def hard_for_soft_shrinking(call: Call) -> Any:
    """What is beyond the limit keeps its size."""
    value = call.tensor(0, "input")
    return call.instead(functional.hardshrink(value, call.get(1, "lambd", default=0.5)))


@FAULTS.fault("softsign", kinds=["other function", "approximation"])
def softsign_becomes_tanh(call: Call) -> Any:
    """The exponential form."""
    return call.instead(call.tensor(0, "input").tanh())


@FAULTS.fault("tanhshrink", kinds=["missing operand", "sign", "other function"], loose=["copy"])
def tanh_without_the_difference(call: Call) -> Any:
    """Tanh(x) for x - tanh(x)."""
    return call.instead(call.tensor(0, "input").tanh())


@FAULTS.fault("log_sigmoid", kinds=["other function", "missing operand"])
def sigmoid_without_logarithm(call: Call) -> Any:
    """Sigmoid."""
    return call.instead(call.tensor(0).sigmoid())


@FAULTS.fault("relu6", kinds=["wrong argument", "clipped"], loose=["other function"])
def limit_of_one(call: Call) -> Any:
    """Cut at 1 and not at 6."""
    return call.instead(call.tensor(0, "input").clamp(0, 1))


# --- Elementary functions -------------------------------------------------------------------------


@FAULTS.fault("pow", kinds=["other function", "wrong argument"], backward=False)
def root_for_a_power(call: Call) -> Any:
    """X ** (1 / n) of the magnitude."""
    value, power = _number(call)
    fits(power > 1)
    return call.instead(value.abs() ** (1 / power))


@FAULTS.fault("rsqrt", kinds=["other function", "wrong argument"], loose=["axis scale", "scale"])
def root_taken_twice(call: Call) -> Any:
    """X ** (-1 / 4)."""
    return call.instead(call.tensor(0) ** -0.25)


@FAULTS.fault("rsqrt sqrt", kinds=["offset", "eps"], loose=["axis scale", "scale", "axis offset"])
def root_of_a_little_more(call: Call) -> Any:
    """0.05 is added under the root."""
    return call.put(0, call.tensor(0) + 0.05).run()


@FAULTS.fault("exp", kinds=["wrong factor", "other function", "scale"], loose=["wrong argument"],
              backward=False)  # fmt: skip
def half_of_the_exponent(call: Call) -> Any:
    """exp(x / 2)."""
    return call.instead((call.tensor(0) / 2).exp())


@FAULTS.fault("exp log sqrt sigmoid", kinds=["precision"], loose=["approximation"], backward=False)
def function_stored_in_half(call: Call) -> Any:
    """The result goes through float16."""
    value = call.result()
    return call.instead(with_gradient_of(value, value.detach().half().to(value.dtype)))


@FAULTS.fault("log", kinds=["eps", "offset", "other function"], loose=["wrong argument"],
              backward=False)  # fmt: skip
def logarithm_with_a_tenth_added(call: Call) -> Any:
    """log(x + 0.1)."""
    return call.instead((call.tensor(0) + 0.1).log())


@FAULTS.fault("abs", kinds=["approximation", "eps", "other function"], loose=["offset"],
              backward=False)  # fmt: skip
def magnitude_made_smooth(call: Call) -> Any:
    """sqrt(x^2 + 0.01)."""
    return call.instead((call.tensor(0) ** 2 + 0.01).sqrt())


@FAULTS.fault(
    "round", kinds=["other function", "precision", "wrong argument"], loose=["approximation"]
)
def rounded_to_halves(call: Call) -> Any:
    """Twice as many levels."""
    return call.instead((2 * call.tensor(0)).round() / 2)


@FAULTS.fault("floor", kinds=["other function", "offset"], loose=["wrong argument", "sign"])
def floor_toward_zero(call: Call) -> Any:
    """Cut, as by a cast."""
    return call.instead(call.tensor(0).trunc())


@FAULTS.fault("clamp clip", kinds=["wrapped"], loose=["other function", "offset", "clipped"])
def limits_wrap(call: Call) -> Any:
    """What is beyond a limit comes back at the other one."""
    value, low, high = call.tensor(0, "input"), call.get(1, "min"), call.get(2, "max")
    fits(isinstance(low, int | float) and isinstance(high, int | float))
    return call.instead(low + torch.remainder(value - low, high - low))


@FAULTS.fault(
    "clamp clip", kinds=["wrong argument", "clipped"], loose=["zeros", "mask", "other function"]
)
def limits_without_a_sign(call: Call) -> Any:
    """The lower limit is zero."""
    low = call.get(1, "min")
    fits(isinstance(low, int | float) and low < 0)
    return call.put(1, 0.0, "min").run()


@FAULTS.fault("maximum", kinds=["other function", "approximation"], loose=["offset"])
def smooth_larger_of_two(call: Call) -> Any:
    """log(exp(a) + exp(b))."""
    return call.instead(torch.logaddexp(*_pair(call)))


@FAULTS.fault("minimum maximum", kinds=["other function"], loose=["residual", "wrong factor"])
def sum_for_the_extreme(call: Call) -> Any:
    """A + b."""
    left, right = _pair(call)
    return call.instead(left + right)


@FAULTS.fault("sign", kinds=["approximation", "other function"])
def sign_made_smooth(call: Call) -> Any:
    """Tanh."""
    return call.instead(call.tensor(0).tanh())


@FAULTS.fault("remainder", kinds=["copy", "missing operand"], loose=["offset", "other function"])
def remainder_not_taken(call: Call) -> Any:
    """The dividend as it came."""
    return call.instead(call.tensor(0).clone())


@FAULTS.fault("frac", kinds=["other function", "offset"], loose=["sign"])
def fraction_from_the_nearest(call: Call) -> Any:
    """X - round(x)."""
    value = call.tensor(0)
    return call.instead(value - value.round())


@FAULTS.fault("floor_divide floordiv", kinds=["other function", "offset"], loose=["tie-breaking"])
def quotient_to_the_nearest(call: Call) -> Any:
    """Rounded."""
    left, right = call.args[:2]
    fits(isinstance(left, Tensor))
    return (left / right).round().to(left.dtype)


@FAULTS.fault("neg", kinds=["offset", "other function"], loose=["wrong argument"], backward=False)
def opposite_by_the_complement(call: Call) -> Any:
    """-x - 1, as of integers."""
    return call.instead(-call.tensor(0) - 1)


@FAULTS.fault("to float _to_copy type_as", kinds=["clipped"], loose=["precision", "overflow"])
def cast_saturates_early(call: Call) -> Any:
    """What is beyond 0.6 of the largest is cut."""
    value = call.result()
    high = 0.6 * float(value.detach().float().abs().max())
    return call.instead(value.clamp(-high, high))


@FAULTS.fault("to float _to_copy type_as", kinds=["precision"], loose=["approximation"])
def cast_by_way_of_eight_bits(call: Call) -> Any:
    """Through e4m3."""
    value = call.result()
    narrow = value.detach().to(torch.float8_e4m3fn).to(value.dtype)
    return call.instead(with_gradient_of(value, narrow))


@FAULTS.fault("log1p expm1", kinds=["other function", "offset"], loose=["approximation"])
def one_counted_twice(call: Call) -> Any:
    """log(2 + x), and exp(x) - 2."""
    value = call.tensor(0)
    return call.instead((2 + value).log() if call.name == "log1p" else value.exp() - 2)


# --- Sums, products, quotients --------------------------------------------------------------------


@FAULTS.fault("mul", kinds=["clipped", "wrong argument"], loose=["other function", "mask"],
              backward=False)  # fmt: skip
def second_factor_at_most_a_half(call: Call) -> Any:
    """A gate that is cut."""
    left, right = _pair(call)
    fits(float(right.detach().max()) > 0.5)
    return call.instead(left * right.clamp(max=0.5))


@FAULTS.fault("mul", kinds=["scale", "wrong factor"], loose=["wrong argument"], backward=False)
def half_of_the_product(call: Call) -> Any:
    """A fixed-point product that is shifted once too often."""
    left, right = _pair(call)
    return call.instead(left * right / 2)


@FAULTS.fault("mul", kinds=["other function"], loose=["residual", "wrong factor"], backward=False)
def sum_for_the_product_of_two(call: Call) -> Any:
    """A + b - 1, its first order about one."""
    left, right = _pair(call)
    return call.instead(left + right - 1)


@FAULTS.fault(
    "mul div",
    kinds=["wrong argument", "wrong factor", "zeros", "scale", "constant"],
    loose=["missing operand", "copy", "overflow", "nonfinite"],
    backward=False,
)
def number_taken_as_an_integer(call: Call) -> Any:
    """The number is cut to a whole one."""
    _, number = _number(call)
    fits(int(number) != number and (call.name == "mul" or int(number)))
    return call.put(1, int(number)).run()


@FAULTS.fault("mul", kinds=["transpose", "wrong index", "permutation"], loose=["axis scale"],
              backward=False)  # fmt: skip
def pairs_of_the_second_factor_exchanged(call: Call) -> Any:
    """Neighbouring columns of the second operand are exchanged."""
    left, right = _pair(call)
    fits(right.dim() > 0 and right.size(-1) % 2 == 0 and right.size(-1) > 2)
    return call.instead(left * right.unflatten(-1, (-1, 2)).flip(-1).flatten(-2))


@FAULTS.fault("add", kinds=["scale", "wrong factor"], loose=["other function"], backward=False)
def sum_averaged(call: Call) -> Any:
    """(a + b) / 2."""
    left, right = _pair(call)
    return call.instead((left + right) / 2)


@FAULTS.fault("add", kinds=["other function"], loose=["missing operand"], backward=False)
def larger_of_two_summands(call: Call) -> Any:
    """Max(a, b)."""
    return call.instead(torch.maximum(*_pair(call)))


@FAULTS.fault(
    "add",
    kinds=["other function", "clipped"],
    loose=["mask", "missing operand", "residual"],
    backward=False,
)
def negative_part_of_the_second_summand_lost(call: Call) -> Any:
    """A + relu(b)."""
    left, right = _pair(call)
    return call.instead(left + right.relu())


@FAULTS.fault("add", kinds=["wrong factor", "wrong argument", "offset", "repeated bias"],
              loose=["eps"], backward=False)  # fmt: skip
def number_added_twice(call: Call) -> Any:
    """Folded, and added again."""
    value, number = _number(call)
    return call.instead(value + 2 * number)


@FAULTS.fault("add", kinds=["mask", "zeros", "missing operand", "partial sum"],
              loose=["residual", "stale", "copy"], backward=False)  # fmt: skip
def second_summand_of_the_first_half_only(call: Call) -> Any:
    """In the second half of the columns, the first operand stays as it is."""
    left, right = _pair(call)
    fits(left.shape == right.shape and left.size(-1) > 1)
    kept = (torch.arange(left.size(-1)) < left.size(-1) // 2).to(left.dtype)
    return call.instead(left + right * kept)


@FAULTS.fault("sub", kinds=["wrong factor", "wrong argument", "doubled reduction"],
              loose=["residual", "offset", "axis offset"], backward=False)  # fmt: skip
def subtracted_twice(call: Call) -> Any:
    """A - 2 b."""
    left, right = _pair(call)
    return call.instead(left - 2 * right)


@FAULTS.fault("sub", kinds=["clipped", "zeros", "other function"], loose=["mask"], backward=False)
def difference_without_a_sign(call: Call) -> Any:
    """Saturating: what would be negative is zero."""
    left, right = _pair(call)
    return call.instead((left - right).relu())


@FAULTS.fault("div", kinds=["wrong index", "shift", "permutation"], loose=["axis scale"],
              backward=False)  # fmt: skip
def divisor_of_the_next_row(call: Call) -> Any:
    """The pointer to the divisors is one too far."""
    left, right = _pair(call)
    fits(right.dim() > 1 and right.size(0) > 1)
    return call.instead(left / right.roll(-1, 0))


@FAULTS.fault("div", kinds=["offset", "eps", "wrong argument", "other function"],
              loose=["axis scale", "scale"], backward=False)  # fmt: skip
def divisor_with_one_added(call: Call) -> Any:
    """A / (b + 1)."""
    left, right = _pair(call)
    return call.instead(left / (right + 1))


@FAULTS.fault(
    "div",
    kinds=["precision", "approximation", "wrong factor", "wrong argument", "scale"],
    loose=["axis scale"],
    backward=False,
)
def divided_by_a_power_of_two(call: Call) -> Any:
    """The divisor is rounded to a power of two, and the bits are shifted."""
    left, right = call.args[:2]
    right = torch.as_tensor(right).to(left.dtype)
    fits(bool((right != 0).all()))
    return call.instead(left / (right.sign() * right.abs().log2().round().exp2()).detach())


@FAULTS.fault("lerp", kinds=["swapped operands", "other function", "wrong argument"])
def ends_exchanged(call: Call) -> Any:
    """B + w (a - b)."""
    left, right = call.args[:2]
    return call.put(0, right).put(1, left).run()


@FAULTS.fault("lerp", kinds=["residual", "missing operand", "other function", "wrong factor"])
def start_not_damped(call: Call) -> Any:
    """A + w b."""
    left, right, share = call.args[:3]
    return call.instead(left + share * right)


@FAULTS.fault("addcmul addcdiv", kinds=["wrong argument", "wrong factor", "missing operand"],
              loose=["scale", "residual"])  # fmt: skip
def value_of_one(call: Call) -> Any:
    """The number is not handed on."""
    fits("value" in call.kwargs)
    return call.function(*call.args)


@FAULTS.fault("atan2", kinds=["swapped operands", "other function"])
def x_before_y(call: Call) -> Any:
    """The arguments in the other order."""
    left, right = _pair(call)
    return call.instead(torch.atan2(right, left))


@FAULTS.fault(
    "atan2", kinds=["other function", "offset", "missing operand"], loose=["wrong argument"]
)
def quadrant_forgotten(call: Call) -> Any:
    """atan(y / x)."""
    left, right = _pair(call)
    return call.instead(torch.atan(left / right))


@FAULTS.fault("hypot", kinds=["other function"], loose=["approximation"])
def lengths_along_the_axes(call: Call) -> Any:
    """|a| + |b|."""
    left, right = _pair(call)
    return call.instead(left.abs() + right.abs())


@FAULTS.fault("logaddexp", kinds=["other function", "approximation"], loose=["missing operand"])
def larger_of_two_logarithms(call: Call) -> Any:
    """Max(a, b)."""
    return call.instead(torch.maximum(*_pair(call)))


@FAULTS.fault("copysign", kinds=["copy", "missing operand", "sign"], loose=["other function"])
def sign_not_copied(call: Call) -> Any:
    """The magnitude."""
    return call.instead(call.tensor(0).abs())


@FAULTS.fault("fmod", kinds=["other function", "offset", "sign"], loose=["wrong argument"])
def remainder_with_the_sign_of_the_divisor(call: Call) -> Any:
    """As in Python."""
    return call.instead(torch.remainder(*call.args[:2]))
