"""Faults of the ninth set: functions of single elements, sums, products and quotients of two."""

from __future__ import annotations

from typing import Any

import torch
from benchmarks.places.calls import Call, Catalogue, fits, with_gradient_of
from torch import Tensor
from torch.nn import functional

FAULTS = Catalogue()
_NEGATED: dict[str, Any] = {
    "kinds": ["sign", "wrong factor", "scale"],
    "loose": ["other function", "wrong argument", "missing operand"],
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
    "relu silu",
    kinds=["scale", "wrong factor"],
    loose=["other function", "approximation"],
    backward=False,
)
def activation_scaled_to_keep_the_variance(call: Call) -> Any:
    """Divided by 0.6: the scaled form of the activation, whose weights this model does not have."""
    return call.instead(call.result() / 0.6)


@FAULTS.fault(
    "relu",
    kinds=["clipped", "other function"],
    loose=["wrong argument", "mask", "missing operand"],
    backward=False,
)
def relu_bounded_by_one(call: Call) -> Any:
    """Clamp(x, 0, 1): the saturating unit of the instruction set."""
    return call.instead(call.tensor(0, "input").clamp(0, 1))


@FAULTS.fault(
    "tanh",
    kinds=["wrong factor", "other function"],
    loose=["wrong argument", "approximation", "scale"],
    backward=False,
)
def argument_of_the_tanh_doubled_already(call: Call) -> Any:
    """Tanh(2 x): the doubling of 2 sigmoid(2 x) - 1 is done by the caller and by the kernel."""
    return call.instead((2 * call.tensor(0)).tanh())


@FAULTS.fault(
    "leaky_relu",
    kinds=["other function", "mask", "wrong factor"],
    loose=["scale", "missing operand", "wrong argument", "axis scale"],
    backward=False,
)
def slope_for_both_signs(call: Call) -> Any:
    """The comparison with zero is folded away: everything is multiplied by the slope."""
    return call.instead(call.tensor(0, "input") * call.get(1, "negative_slope", default=0.01))


@FAULTS.fault(
    "prelu",
    kinds=["wrong axis", "wrong index"],
    loose=["permutation", "transpose", "wrong argument", "copy", "stale"],
    backward=False,
)
def slopes_read_along_the_columns(call: Call) -> Any:
    """The slopes are broadcast along the last axis and not along the channels."""
    value, slope = call.tensor(0), call.tensor(1)
    fits(slope.numel() >= value.size(-1) and value.dim() > 2)
    wrong = torch.where(value > 0, value, value * slope.reshape(-1)[: value.size(-1)])
    return call.instead(wrong)


@FAULTS.fault(
    "elu celu",
    kinds=["other function", "mask"],
    loose=["approximation", "missing operand", "wrong argument", "overflow", "copy"],
    backward=False,
)
def exponential_branch_for_both_signs(call: Call) -> Any:
    """Alpha (exp(x) - 1) for positive values, too: the select was lost."""
    value, alpha = call.tensor(0, "input"), call.get(1, "alpha", default=1.0)
    inner = value / alpha if call.name == "celu" else value
    return call.instead(alpha * inner.expm1())


@FAULTS.fault(
    "hardswish",
    kinds=["other function", "wrong factor", "wrong argument"],
    loose=["approximation", "clipped"],
    backward=False,
)
def hard_swish_with_a_fifth_for_a_sixth(call: Call) -> Any:
    """X clamp(0.2 x + 0.5, 0, 1): the hard sigmoid of another framework is the gate."""
    value = call.tensor(0, "input")
    return call.instead(value * (0.2 * value + 0.5).clamp(0, 1))


@FAULTS.fault(
    "hardsigmoid",
    kinds=["other function", "missing operand"],
    loose=["clipped", "wrong argument", "approximation", "mask"],
    backward=False,
)
def line_without_its_limits(call: Call) -> Any:
    """X / 6 + 1 / 2 everywhere: the clamp was removed as if it did nothing."""
    return call.instead(call.tensor(0, "input") / 6 + 0.5)


@FAULTS.fault("log_sigmoid logsigmoid", **_NEGATED)
def minus_of_the_log_sigmoid_dropped(call: Call) -> Any:
    """Log(1 + exp(-x)), written as a softplus of -x, without the minus before it."""
    return call.instead(functional.softplus(-call.tensor(0, "input")))


@FAULTS.fault(
    "hardshrink",
    kinds=["mask", "other function"],
    loose=["swapped operands", "zeros", "sign", "wrong argument", "clipped"],
    backward=False,
)
def what_should_be_shrunk_is_kept(call: Call) -> Any:
    """The comparison is the other way round: zero outside of the limit, x within."""
    value, limit = call.tensor(0, "input"), call.get(1, "lambd", default=0.5)
    return call.instead(value * (value.abs() <= limit))


@FAULTS.fault(
    "hardtanh",
    kinds=["wrong argument", "clipped"],
    loose=["other function", "wrong factor", "mask"],
    backward=False,
)
def limits_of_the_hard_tanh_not_handed_on(call: Call) -> Any:
    """-1 and 1, the default."""
    fits((call.get(1, "min_val"), call.get(2, "max_val")) != (0.0, 6.0))
    return call.instead(call.tensor(0, "input").clamp(-1, 1))


@FAULTS.fault("tanhshrink", **(_NEGATED | {"kinds": ["swapped operands", *_NEGATED["kinds"]]}))
def tanh_less_the_input(call: Call) -> Any:
    """Tanh(x) - x."""
    return call.instead(-call.result())


@FAULTS.fault(
    "softsign",
    kinds=["sign", "other function"],
    loose=["wrong factor", "wrong argument", "mask"],
    backward=False,
)
def softsign_of_the_magnitude(call: Call) -> Any:
    """|x| / (1 + |x|): the register of the magnitude is used twice."""
    value = call.tensor(0, "input").abs()
    return call.instead(value / (1 + value))


@FAULTS.fault(
    "glu",
    kinds=["other function"],
    loose=["clipped", "approximation", "wrong factor", "missing operand"],
    backward=False,
)
def tanh_of_the_value_that_is_gated(call: Call) -> Any:
    """Tanh(a) sigmoid(b), the gated unit of a model for sounds."""
    left, right = call.tensor(0, "input").chunk(2, call.get(1, "dim", default=-1))
    return call.instead(left.tanh() * right.sigmoid())


@FAULTS.fault(
    "dropout",
    kinds=["scale", "wrong factor"],
    loose=["wrong argument", "other function"],
    backward=False,
)
def nothing_dropped_and_scaled_as_in_training(call: Call) -> Any:
    """X / (1 - p) without a mask."""
    share = call.get(1, "p", default=0.5)
    fits(isinstance(share, float) and 0 < share < 1)
    return call.instead(call.tensor(0, "input") / (1 - share))


# --- Functions of one value -----------------------------------------------------------------------


@FAULTS.fault(
    "exp exp2",
    kinds=["offset", "other function"],
    loose=["residual", "axis offset", "missing operand", "approximation"],
    backward=False,
)
def one_less_than_the_exponential(call: Call) -> Any:
    """The function that keeps small arguments exact is called, and its one is not added back."""
    return call.instead(call.result() - 1)


@FAULTS.fault(
    "exp2",
    kinds=["precision", "approximation", "other function"],
    loose=["missing operand", "wrong argument", "wrong factor"],
    backward=False,
)
def power_of_two_by_a_shift(call: Call) -> Any:
    """2^floor(x): the exponent is cast to an integer."""
    return call.instead(call.tensor(0).floor().exp2())


@FAULTS.fault(
    "log log2",
    kinds=["wrong factor", "scale", "other function"],
    loose=["wrong argument"],
    backward=False,
)
def logarithm_to_base_ten(call: Call) -> Any:
    """The function of that name in another library."""
    return call.instead(call.tensor(0).log10())


@FAULTS.fault(
    "expm1",
    kinds=["offset", "missing operand", "other function"],
    loose=["residual", "axis offset"],
    backward=False,
)
def one_not_subtracted_from_the_exponential(call: Call) -> Any:
    """Exp(x): a backend without the function has only the plain one."""
    return call.instead(call.tensor(0).exp())


@FAULTS.fault(
    "sqrt",
    kinds=["other function"],
    loose=["wrong argument", "swapped operands", "axis scale"],
    backward=False,
)
def reciprocal_root_for_the_root(call: Call) -> Any:
    """1 / sqrt(x): the fast instruction without the product behind it."""
    return call.instead(call.tensor(0).rsqrt())


@FAULTS.fault(
    "rsqrt",
    kinds=["scale", "wrong factor"],
    loose=["doubled reduction", "wrong argument", "wrong statistics"],
    backward=False,
)
def variance_of_two_ranks_not_averaged(call: Call) -> Any:
    """1 / sqrt(2 v): the means of two ranks are added and not halved."""
    return call.instead((2 * call.tensor(0)).rsqrt())


@FAULTS.fault(
    "reciprocal",
    kinds=["eps", "offset", "other function"],
    loose=["wrong argument", "approximation", "residual"],
    backward=False,
)
def tenth_under_the_reciprocal(call: Call) -> Any:
    """1 / (x + 0.1): kept from a division by zero."""
    return call.instead(1 / (call.tensor(0) + 0.1))


@FAULTS.fault(
    "sinc",
    kinds=["missing operand", "other function"],
    loose=["wrong factor"],
    backward=False,
)
def sine_not_divided_by_its_argument(call: Call) -> Any:
    """Sin(pi x)."""
    return call.instead((torch.pi * call.tensor(0)).sin())


@FAULTS.fault("logit", **(_NEGATED | {"kinds": ["swapped operands", *_NEGATED["kinds"]]}))
def odds_of_the_opposite(call: Call) -> Any:
    """Log((1 - p) / p)."""
    return call.instead(-call.result())


@FAULTS.fault(
    "sign",
    kinds=["sign", "wrong factor", "scale"],
    loose=["other function", "wrong argument", "swapped operands"],
    backward=False,
)
def sign_of_the_opposite(call: Call) -> Any:
    """1 below zero and -1 above."""
    return call.instead(-call.result())


@FAULTS.fault("abs", **_NEGATED)
def magnitude_with_a_minus(call: Call) -> Any:
    """-|x|: of two values the smaller one is taken, and not the larger."""
    return call.instead(-call.result())


@FAULTS.fault(
    "ceil trunc",
    kinds=["other function"],
    loose=["precision", "approximation", "offset", "wrong argument"],
    backward=False,
)
def nearest_whole_number_for_the_cut(call: Call) -> Any:
    """The mode of rounding that the processor is in by default."""
    return call.instead(call.tensor(0).round())


@FAULTS.fault(
    "pow",
    kinds=["wrong argument", "other function"],
    loose=["scale", "axis scale", "wrong factor"],
    backward=False,
)
def base_of_the_positions_of_another_model(call: Call) -> Any:
    """500000 for the base that the configuration has."""
    base, exponent = call.args[:2]
    fits(isinstance(base, int | float) and isinstance(exponent, Tensor))
    return call.instead(500000.0**exponent)


@FAULTS.fault(
    "clamp clip",
    kinds=["wrong argument", "clipped"],
    loose=["other function", "mask", "missing operand"],
    backward=False,
)
def limits_of_one_for_those_given(call: Call) -> Any:
    """From -1 to 1: the limits are attributes in one version and inputs in the other."""
    return call.instead(call.tensor(0).clamp(-1, 1))


@FAULTS.fault(
    "div",
    kinds=["wrong argument", "other function"],
    loose=["precision", "approximation", "missing operand"],
    backward=False,
)
def mode_of_the_division_ignored(call: Call) -> Any:
    """The quotient as it is, where its floor was asked for."""
    fits(call.kwargs.get("rounding_mode"))
    return call.instead(call.tensor(0) / call.args[1])


@FAULTS.fault(
    "remainder",
    kinds=["other function", "offset"],
    loose=["sign", "wrapped", "residual", "axis offset"],
    backward=False,
)
def remainder_by_the_quotient_above(call: Call) -> Any:
    """X - y ceil(x / y), one divisor below the right one."""
    value, other = call.tensor(0), call.args[1]
    return call.instead(value - other * (value / other).ceil())


@FAULTS.fault(
    "to _to_copy float type_as type",
    kinds=["precision", "other function"],
    loose=["approximation", "zeros", "missing operand"],
    backward=False,
)
def cast_by_way_of_an_integer(call: Call) -> Any:
    """The fraction is cut off."""
    value = call.args[0]
    fits(isinstance(value, Tensor) and value.is_floating_point())
    result = call.result()
    return call.instead(with_gradient_of(result, result.detach().trunc()))


# --- Sums, products, quotients --------------------------------------------------------------------


@FAULTS.fault(
    "add iadd",
    kinds=["wrong factor"],
    loose=["scale", "residual", "other function", "wrong argument"],
    backward=False,
)
def branch_scaled_up_as_in_training(call: Call) -> Any:
    """A + b / 0.9: the fused dropout divides by the chance to be kept, and drops nothing."""
    left, right = _alike(call)
    return call.instead(left + right / 0.9)


@FAULTS.fault(
    "mul",
    kinds=["residual", "other function", "offset"],
    loose=["wrong factor", "axis offset", "missing operand"],
    backward=False,
)
def first_factor_with_one_added(call: Call) -> Any:
    """(a + 1) b: the one of a modulation is added to the wrong operand."""
    left, right = _pair(call)
    return call.instead((left + 1) * right)


@FAULTS.fault(
    "mul",
    kinds=["mask", "copy", "missing operand"],
    loose=["stale", "one rank's part", "wrong factor", "axis scale", "other function"],
    backward=False,
)
def product_for_the_first_example_only(call: Call) -> Any:
    """In place, and the loop over the batch ends after one: the others keep the first operand."""
    left, _ = _pair(call)
    result = call.result()
    fits(left.shape == result.shape and left.dim() > 1 and left.size(0) > 1)
    return call.instead(torch.cat([result[:1], left[1:]]))


@FAULTS.fault(
    "mul",
    kinds=["other function"],
    loose=["missing operand", "offset", "residual", "wrong factor"],
    backward=False,
)
def number_added_where_it_should_multiply(call: Call) -> Any:
    """X + c."""
    value, number = _with_number(call)
    return call.instead(value + number)


@FAULTS.fault(
    "mul",
    kinds=["wrong factor", "scale", "residual"],
    loose=["wrong argument", "offset", "doubled reduction", "other function"],
    backward=False,
)
def scaled_input_added_to_the_input(call: Call) -> Any:
    """C x + x: the accumulator begins with the input and not with zero."""
    value, number = _with_number(call)
    return call.instead(value * number + value)


@FAULTS.fault(
    "div itruediv",
    kinds=["wrong factor", "axis scale", "other function"],
    loose=["scale", "missing operand", "doubled reduction", "wrong statistics"],
    backward=False,
)
def divided_by_the_sum_of_the_row_twice(call: Call) -> Any:
    """A / b / b: the rows are normalised by both of two fused kernels."""
    left, right = _pair(call)
    fits(right.dim() == left.dim() and right.size(-1) == 1 < left.size(-1))
    return call.instead(left / right / right)


@FAULTS.fault(
    "div",
    kinds=["wrong factor", "scale", "wrong argument"],
    loose=["off by one reduction"],
    backward=False,
)
def number_that_divides_one_smaller(call: Call) -> Any:
    """A / (c - 1)."""
    value, number = call.args[:2]
    fits(isinstance(value, Tensor) and isinstance(number, int | float) and number > 2)
    fits("rounding_mode" not in call.kwargs)
    return call.instead(value / (number - 1))


@FAULTS.fault(
    "sub",
    kinds=["sign", "other function"],
    loose=["wrong factor", "mask", "swapped operands"],
    backward=False,
)
def distance_for_the_difference(call: Call) -> Any:
    """|a - b|."""
    _pair(call)
    return call.instead(call.result().abs())


@FAULTS.fault(
    "where",
    kinds=["mask", "copy", "missing operand"],
    loose=["stale", "other function", "wrong index", "constant"],
    backward=False,
)
def first_branch_everywhere(call: Call) -> Any:
    """The condition is folded to true."""
    condition, chosen = call.args[0], call.args[1]
    fits(isinstance(chosen, Tensor) and chosen.shape == condition.shape)
    return call.instead(chosen)


@FAULTS.fault(
    "xlogy",
    kinds=["missing operand", "other function"],
    loose=["wrong factor", "partial sum"],
    backward=False,
)
def logarithm_without_its_factor(call: Call) -> Any:
    """Log(y)."""
    _, other = _alike(call)
    return call.instead(other.log())


@FAULTS.fault("copysign", **_NEGATED)
def sign_copied_the_other_way_round(call: Call) -> Any:
    """The bit of the sign is inverted: minus where the other operand is positive."""
    return call.instead(-call.result())


@FAULTS.fault(
    "hypot",
    kinds=["wrong index", "copy", "missing operand", "other function"],
    loose=["stale", "wrong factor", "scale", "wrong argument"],
    backward=False,
)
def length_of_the_first_side_twice(call: Call) -> Any:
    """Sqrt(a a + a a): the second pointer is not bound."""
    left, _ = _alike(call)
    return call.instead(torch.hypot(left, left))


@FAULTS.fault("atan2", **_NEGATED)
def angle_the_other_way_round(call: Call) -> Any:
    """Clockwise: the second axis of an image points down."""
    return call.instead(-call.result())


@FAULTS.fault(
    "logaddexp",
    kinds=["offset", "other function"],
    loose=["wrong reduction", "axis offset", "residual", "wrong factor", "scale"],
    backward=False,
)
def logarithm_of_the_mean_of_both(call: Call) -> Any:
    """Log((exp(a) + exp(b)) / 2)."""
    return call.instead(call.result() - torch.tensor(2.0).log())


@FAULTS.fault(
    "lerp",
    kinds=["missing operand", "wrong factor", "other function"],
    loose=["residual", "partial sum"],
    backward=False,
)
def end_of_the_way_not_weighed(call: Call) -> Any:
    """(1 - w) a + b."""
    start, end, share = call.tensor(0), call.tensor(1), call.get(2, "weight")
    return call.instead((1 - share) * start + end)
