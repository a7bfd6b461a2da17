"""Faults for measuring: functions of single elements, sums, products and quotients of two."""

from __future__ import annotations

import math
from typing import Any

import torch
from benchmarks.places.calls import Call, Catalogue, fits, with_gradient_of
from torch import Tensor

FAULTS = Catalogue()
_ACTIVATIONS = "gelu relu silu tanh sigmoid"
_EMPTY: dict[str, Any] = {
    "kinds": ["zeros", "mask", "uninitialised"],
    "loose": ["constant", "missing operand", "axis scale", "wrong factor", "one rank's part"],
    "backward": False,
}
_MOVED: dict[str, Any] = {
    "kinds": ["shift", "wrong index", "permutation"],
    "loose": ["copy", "stale", "wrong argument", "axis offset", "axis scale"],
    "backward": False,
}
_ORDER: dict[str, Any] = {
    "kinds": ["permutation", "wrong index"],
    "loose": ["shift", "swapped operands", "transpose", "wrong argument", "axis offset"],
    "backward": False,
}
_AGAIN: dict[str, Any] = {
    "kinds": ["copy", "stale", "wrong index"],
    "loose": ["permutation", "constant", "shift", "wrong argument", "wrong rank's shard"],
    "backward": False,
}
_ROUNDED: dict[str, Any] = {
    "kinds": ["precision"],
    "loose": ["approximation", "other function", "wrong argument"],
    "backward": False,
}
_CUT: dict[str, Any] = {
    "kinds": ["clipped"],
    "loose": ["other function", "precision", "wrong argument", "overflow", "mask"],
    "backward": False,
}
_KEPT: dict[str, Any] = {
    "kinds": ["mask", "copy", "missing operand"],
    "loose": ["stale", "other function", "one rank's part", "wrong factor", "partial sum"],
    "backward": False,
}
_TIMES: dict[str, Any] = {
    "kinds": ["scale", "wrong factor"],
    "loose": ["wrong argument", "other function", "missing operand", "doubled reduction"],
    "backward": False,
}
_CLOSE: dict[str, Any] = {
    "kinds": ["approximation", "other function"],
    "loose": ["precision", "clipped", "wrong factor", "wrong argument"],
    "backward": False,
}


def _columns(value: Tensor, least: int = 2) -> Tensor:
    fits(value.dim() > 0 and value.size(-1) >= least)
    return value


def _rows(value: Tensor, least: int = 2) -> Tensor:
    fits(value.dim() > 1 and value.size(-2) >= least)
    return value


def _pair(call: Call) -> tuple[Tensor, Tensor]:
    """Two floating-point operands."""
    left, right = call.tensor(0), call.tensor(1)
    fits(right.numel() > 1 or left.numel() > 1)
    return left, right


def _alike(call: Call) -> tuple[Tensor, Tensor]:
    """Two floating-point operands of one shape, with several rows."""
    left, right = _pair(call)
    fits(left.shape == right.shape)
    return _rows(left), right


def _number(call: Call) -> tuple[Tensor, float]:
    """A floating-point operand and a number."""
    value, number = call.tensor(0), call.args[1]
    fits(isinstance(number, int | float) and not isinstance(number, bool) and number != 0)
    return value, float(number)


# --- Activations ----------------------------------------------------------------------------------


@FAULTS.fault(_ACTIVATIONS, **_ORDER)
def activated_columns_exchanged_in_pairs(call: Call) -> Any:
    """Words of two values are stored in the other order."""
    value = _columns(call.result())
    fits(value.size(-1) % 2 == 0)
    return call.instead(value.unflatten(-1, (-1, 2)).flip(-1).flatten(-2))


@FAULTS.fault(_ACTIVATIONS, **_MOVED)
def activation_of_the_row_before(call: Call) -> Any:
    """The input is read one row too early, around the end."""
    return call.instead(_rows(call.result()).roll(1, -2))


@FAULTS.fault(_ACTIVATIONS, **_EMPTY)
def every_second_row_of_the_activation_empty(call: Call) -> Any:
    """Half as many programs as rows."""
    value = _rows(call.result()).clone()
    value[..., 1::2, :] = 0
    return call.instead(value)


@FAULTS.fault(_ACTIVATIONS, **_AGAIN)
def second_half_of_the_columns_is_the_first(call: Call) -> Any:
    """The offset of the second tile of columns is not added."""
    value = _columns(call.result())
    half = (value.size(-1) + 1) // 2
    return call.instead(value[..., torch.arange(value.size(-1)) % half])


@FAULTS.fault(_ACTIVATIONS, **_ROUNDED)
def activation_in_steps_of_a_16th(call: Call) -> Any:
    """Fixed point with four bits behind the point."""
    value = call.result()
    return call.instead(with_gradient_of(value, (value.detach() * 16).round() / 16))


@FAULTS.fault(_ACTIVATIONS, **_KEPT)
def first_example_activated_only(call: Call) -> Any:
    """In place: the loop over the batch ends after its first pass."""
    value, result = _rows(call.tensor(0, "input")), call.result()
    fits(value.size(0) > 1)
    return call.instead(torch.cat([result[:1], value[1:]]))


@FAULTS.fault(
    _ACTIVATIONS,
    kinds=["offset"],
    loose=["axis offset", "other function", "eps", "residual"],
    backward=False,
)
def activation_raised_by_a_twentieth(call: Call) -> Any:
    """The zero point of the result is not subtracted."""
    return call.instead(call.result() + 0.05)


@FAULTS.fault(
    "gelu silu tanh",
    kinds=["sign", "wrong factor", "mask", "axis scale"],
    loose=["scale", "one rank's part", "other function"],
    backward=False,
)
def second_half_of_the_activation_negated(call: Call) -> Any:
    """The columns of the second tile have a minus."""
    value = _columns(call.result())
    half = value.size(-1) // 2
    return call.instead(torch.cat([value[..., :half], -value[..., half:]], -1))


@FAULTS.fault(
    "gelu silu tanh",
    kinds=["clipped", "other function", "mask"],
    loose=["zeros", "sign", "missing operand", "approximation"],
    backward=False,
)
def negative_results_lost(call: Call) -> Any:
    """Stored as numbers without a sign: what is below zero is zero."""
    return call.instead(call.result().relu())


@FAULTS.fault(
    _ACTIVATIONS,
    kinds=["overflow", "nonfinite"],
    loose=["mask", "clipped", "uninitialised"],
    backward=False,
)
def largest_activations_overflow(call: Call) -> Any:
    """What is above nine tenths of the largest does not fit and is infinite."""
    value = call.result()
    limit = 0.9 * float(value.detach().max())
    fits(limit > 0)
    return call.instead(value.masked_fill(value > limit, math.inf))


@FAULTS.fault("gelu", **_CLOSE)
def gelu_with_the_tanh_of_its_argument(call: Call) -> Any:
    """X (1 + tanh(x)) / 2."""
    value = call.tensor(0, "input")
    return call.instead(value * 0.5 * (1 + value.tanh()))


@FAULTS.fault("gelu", **_CLOSE)
def gelu_by_three_lines(call: Call) -> Any:
    """X min(max(x / 4 + 1 / 2, 0), 1)."""
    value = call.tensor(0, "input")
    return call.instead(value * (value / 4 + 0.5).clamp(0, 1))


@FAULTS.fault(
    "gelu silu relu",
    kinds=["other function", "residual"],
    loose=["wrong factor", "approximation", "mask", "wrong argument"],
    backward=False,
)
def activation_leaks(call: Call) -> Any:
    """A fifth of the input is added where it is negative."""
    value = call.tensor(0, "input")
    return call.instead(call.result() + 0.2 * value.clamp(max=0))


@FAULTS.fault(
    "relu",
    kinds=["mask", "zeros", "other function"],
    loose=["clipped", "partial sum", "missing operand", "wrong argument"],
    backward=False,
)
def nothing_below_a_threshold(call: Call) -> Any:
    """The threshold of the positive values is 0.2; what is above it stays."""
    value = call.tensor(0, "input")
    return call.instead(value * (value > 0.2))


@FAULTS.fault(
    "relu",
    kinds=["other function"],
    loose=["wrong factor", "approximation", "axis scale"],
    backward=False,
)
def root_of_the_positive_values(call: Call) -> Any:
    """The square root of the relu, made smooth at zero."""
    return call.instead((call.result() + 1e-4).sqrt() - 0.01)


@FAULTS.fault(
    "relu",
    kinds=["precision", "other function"],
    loose=["approximation", "clipped"],
    backward=False,
)
def relu_in_whole_numbers(call: Call) -> Any:
    """Rounded, as of a model whose units count."""
    value = call.result()
    return call.instead(with_gradient_of(value, value.detach().round()))


@FAULTS.fault(
    "silu",
    kinds=["other function", "wrong factor"],
    loose=["wrong argument", "approximation", "scale"],
    backward=False,
)
def gate_of_the_silu_twice_as_steep(call: Call) -> Any:
    """X sigmoid(2 x)."""
    value = call.tensor(0, "input")
    return call.instead(value * (2 * value).sigmoid())


@FAULTS.fault(
    "silu",
    kinds=["other function"],
    loose=["wrong factor", "approximation", "wrong argument"],
    backward=False,
)
def root_of_the_gate(call: Call) -> Any:
    """X times the square root of the sigmoid."""
    value = call.tensor(0, "input")
    return call.instead(value * (torch.nn.functional.logsigmoid(value) / 2).exp())


@FAULTS.fault(
    "silu gelu tanh",
    kinds=["sign", "other function"],
    loose=["wrong factor", "wrong argument", "clipped"],
    backward=False,
)
def magnitude_of_the_activation(call: Call) -> Any:
    """The sign of the result is lost."""
    return call.instead(call.result().abs())


@FAULTS.fault("tanh", **_CLOSE)
def tanh_by_a_root(call: Call) -> Any:
    """X / sqrt(1 + x^2)."""
    value = call.tensor(0, "input")
    return call.instead(value / (1 + value.square()).sqrt())


@FAULTS.fault(
    "tanh",
    kinds=["other function", "residual", "offset"],
    loose=["sign", "missing operand", "approximation"],
    backward=False,
)
def rest_of_the_tanh(call: Call) -> Any:
    """X - tanh(x)."""
    return call.instead(call.tensor(0, "input") - call.result())


@FAULTS.fault(
    "sigmoid tanh",
    kinds=["offset", "wrong argument", "other function"],
    loose=["axis offset", "residual", "wrong factor"],
    backward=False,
)
def argument_lowered_by_a_half(call: Call) -> Any:
    """f(x - 1 / 2): the bias of another gate."""
    return call.put(0, call.tensor(0, "input") - 0.5, "input").run()


@FAULTS.fault(
    "sigmoid",
    kinds=["other function"],
    loose=["wrong factor", "approximation", "wrong argument"],
    backward=False,
)
def root_of_the_sigmoid(call: Call) -> Any:
    """The square root of the gate."""
    return call.instead(call.result().sqrt())


@FAULTS.fault("sigmoid", **_CLOSE)
def gate_by_an_arctangent(call: Call) -> Any:
    """1 / 2 + atan(x) / pi."""
    return call.instead(0.5 + call.tensor(0, "input").atan() / math.pi)


@FAULTS.fault(
    "sigmoid",
    kinds=["wrong factor", "other function", "offset"],
    loose=["scale", "clipped", "approximation", "eps"],
    backward=False,
)
def gate_between_a_tenth_and_nine_tenths(call: Call) -> Any:
    """0.8 sigmoid(x) + 0.1, so that it is never shut."""
    return call.instead(0.8 * call.result() + 0.1)


@FAULTS.fault(
    "hardswish",
    kinds=["other function", "missing operand"],
    loose=["clipped", "wrong argument", "approximation", "mask"],
)
def limits_of_the_hard_swish_forgotten(call: Call) -> Any:
    """X (x + 3) / 6 everywhere."""
    value = call.tensor(0, "input")
    return call.instead(value * (value + 3) / 6)


@FAULTS.fault(
    "leaky_relu elu",
    kinds=["wrong argument", "wrong factor", "scale"],
    loose=["other function", "axis scale"],
    backward=False,
)
def negative_side_half_as_steep(call: Call) -> Any:
    """Half of the slope, or of alpha."""
    value, result = call.tensor(0, "input"), call.result()
    return call.instead(torch.where(value < 0, result / 2, result))


@FAULTS.fault("prelu _prelu_kernel", **_MOVED)
def slope_of_the_next_channel(call: Call) -> Any:
    """The pointer to the slopes is one channel too far."""
    slope = call.tensor(1, "weight")
    fits(slope.numel() > 1)
    axis = next(i for i in range(slope.dim()) if slope.size(i) > 1)
    return call.put(1, slope.roll(-1, axis), "weight").run()


@FAULTS.fault(
    "glu",
    kinds=["wrong index", "copy", "stale", "other function"],
    loose=["missing operand", "wrong factor", "wrong argument"],
)
def value_is_its_own_gate(call: Call) -> Any:
    """A sigmoid(a): the offset of the gate is not added."""
    value = call.tensor(0, "input").chunk(2, call.get(1, "dim", default=-1))[0]
    return call.instead(value * value.sigmoid())


@FAULTS.fault("glu", **{**_TIMES, "backward": None})
def gate_from_zero_to_two(call: Call) -> Any:
    """2 a sigmoid(b), so that a gate at rest is one."""
    return call.instead(2 * call.result())


@FAULTS.fault(
    "relu6 hardtanh",
    kinds=["wrong argument", "clipped"],
    loose=["other function", "wrong factor"],
    backward=False,
)
def upper_limit_a_third(call: Call) -> Any:
    """The values end at a third of the limit that was given."""
    high = call.get(2, "max_val", default=6.0)
    return call.instead(call.result().clamp(max=high / 3))


@FAULTS.fault("dropout", **_EMPTY)
def one_of_eight_features_dropped(call: Call) -> Any:
    """A mask with a period of eight is applied in evaluation."""
    value = _columns(call.result(), 8).clone()
    value[..., ::8] = 0
    return call.instead(value)


@FAULTS.fault("softplus", **_TIMES)
def softplus_in_bits(call: Call) -> Any:
    """Log2(1 + exp(x))."""
    return call.instead(call.result() / math.log(2))


@FAULTS.fault(
    "mish",
    kinds=["other function", "missing operand"],
    loose=["approximation", "wrong argument", "wrong factor"],
)
def mish_without_its_logarithm(call: Call) -> Any:
    """X tanh(exp(x)): the softplus is taken for its argument."""
    value = call.tensor(0, "input")
    return call.instead(value * value.exp().tanh())


@FAULTS.fault(
    "gelu",
    kinds=["missing operand", "approximation", "other function"],
    loose=["wrong factor", "wrong argument"],
    backward=False,
)
def cubic_term_of_the_gelu_forgotten(call: Call) -> Any:
    """X (1 + tanh(sqrt(2 / pi) x)) / 2."""
    value = call.tensor(0, "input")
    return call.instead(value * 0.5 * (1 + ((2 / math.pi) ** 0.5 * value).tanh()))


@FAULTS.fault(
    "gelu",
    kinds=["other function", "approximation"],
    loose=["wrong argument", "wrong factor", "sign"],
    backward=False,
)
def square_for_the_cube_in_the_gelu(call: Call) -> Any:
    """0.2 x^2 for 0.0447 x^3 inside of the tanh."""
    value = call.tensor(0, "input")
    inner = (2 / math.pi) ** 0.5 * (value + 0.2 * value.square())
    return call.instead(value * 0.5 * (1 + inner.tanh()))


@FAULTS.fault("sigmoid", **_CLOSE)
def gate_by_two_exponentials(call: Call) -> Any:
    """exp(x) / 2 below zero and 1 - exp(-x) / 2 above: the integral of another density."""
    value = call.tensor(0, "input")
    tail = (-value.abs()).exp() / 2
    return call.instead(torch.where(value < 0, tail, 1 - tail))


@FAULTS.fault(
    "silu",
    kinds=["other function", "approximation"],
    loose=["wrong factor", "precision", "wrong argument"],
    backward=False,
)
def silu_by_a_line_and_a_parabola(call: Call) -> Any:
    """Zero below -2, x above 2, and (x + 2)^2 / 8 between."""
    value = call.tensor(0, "input")
    middle = (value + 2).square() / 8
    return call.instead(torch.where(value.abs() < 2, middle, value.relu()))


@FAULTS.fault(
    _ACTIVATIONS,
    kinds=["axis offset", "residual", "wrong statistics", "other function"],
    loose=["offset", "wrong reduction", "missing operand"],
    backward=False,
)
def activation_centred(call: Call) -> Any:
    """The mean of each row of the result is subtracted."""
    value = _columns(call.result())
    return call.instead(value - value.mean(-1, keepdim=True))


# --- Functions of one value -----------------------------------------------------------------------


@FAULTS.fault("exp", **_ROUNDED)
def exponential_of_quarters(call: Call) -> Any:
    """The exponent is rounded to steps of a quarter first."""
    value, result = call.tensor(0), call.result()
    return call.instead(with_gradient_of(result, ((value.detach() * 4).round() / 4).exp()))


@FAULTS.fault("exp", **_CLOSE)
def exponential_by_its_sixteenth_root(call: Call) -> Any:
    """(1 + x / 16)^16."""
    return call.instead((1 + call.tensor(0) / 16) ** 16)


@FAULTS.fault("log", **_TIMES)
def logarithm_of_the_root(call: Call) -> Any:
    """Half of the logarithm: of a magnitude and not of a power."""
    return call.instead(call.result() / 2)


@FAULTS.fault(
    "rsqrt sqrt",
    kinds=["wrong reduction", "wrong statistics", "constant"],
    loose=["copy", "axis scale", "wrong index", "scale", "wrong factor"],
    backward=False,
)
def root_of_the_mean_of_all(call: Call) -> Any:
    """One variance for all rows."""
    value = call.tensor(0)
    fits(value.numel() > 1)
    return call.put(0, value.mean().expand(value.shape).clone()).run()


@FAULTS.fault(
    "rsqrt",
    kinds=["other function", "wrong argument"],
    loose=["approximation", "axis scale", "wrong factor", "scale"],
    backward=False,
)
def reciprocal_cube_root(call: Call) -> Any:
    """X^(-1 / 3)."""
    return call.instead(call.tensor(0) ** (-1 / 3))


@FAULTS.fault("pow square", **_ROUNDED)
def squares_of_rounded_values(call: Call) -> Any:
    """The values are in steps of an eighth before they are squared."""
    value = call.tensor(0)
    coarse = (value.detach() * 8).round() / 8
    return call.put(0, with_gradient_of(value, coarse)).run()


@FAULTS.fault(
    "neg",
    kinds=["mask", "sign", "copy", "missing operand"],
    loose=["other function", "wrong factor", "axis scale", "wrong index"],
    backward=False,
)
def odd_columns_not_negated(call: Call) -> Any:
    """The second of two lanes keeps its sign."""
    value = _columns(call.tensor(0))
    sign = 1 - 2.0 * (torch.arange(value.size(-1)) % 2 == 0).to(value.dtype)
    return call.instead(value * sign)


@FAULTS.fault(
    "clamp clip",
    kinds=["missing operand", "wrong argument", "clipped"],
    loose=["copy", "mask", "other function"],
    backward=False,
)
def lower_limit_forgotten(call: Call) -> Any:
    """Only the upper limit is applied."""
    low, high = call.get(1, "min"), call.get(2, "max")
    fits(low is not None)
    value = call.tensor(0)
    return call.instead(value.clone() if high is None else value.clamp(max=high))


@FAULTS.fault(
    "round",
    kinds=["precision", "other function"],
    loose=["wrong factor", "approximation", "wrong argument"],
    backward=False,
)
def rounded_to_even_numbers(call: Call) -> Any:
    """Half as many levels: the last bit is lost."""
    return call.instead(2 * (call.tensor(0) / 2).round())


@FAULTS.fault(
    "maximum minimum",
    kinds=["other function"],
    loose=["wrong factor", "missing operand", "approximation", "wrong reduction"],
)
def mean_of_two_for_their_extreme(call: Call) -> Any:
    """(a + b) / 2."""
    left, right = _pair(call)
    return call.instead((left + right) / 2)


@FAULTS.fault(
    "exp",
    kinds=["precision", "approximation", "other function"],
    loose=["scale", "wrong factor", "missing operand", "clipped"],
    backward=False,
)
def exponential_without_its_remainder(call: Call) -> Any:
    """2^k with the next whole k: what is left behind the reduction by log(2) is lost."""
    value, result = call.tensor(0), call.result()
    coarse = (value.detach() / math.log(2)).round().exp2()
    return call.instead(with_gradient_of(result, coarse))


# --- Sums, products, quotients --------------------------------------------------------------------


@FAULTS.fault("add iadd", **_MOVED)
def first_summand_of_the_next_row(call: Call) -> Any:
    """The pointer to the first operand is one row too far."""
    left, right = _alike(call)
    return call.instead(left.roll(-1, -2) + right)


@FAULTS.fault("add iadd", **_ORDER)
def second_summand_with_rows_from_the_last(call: Call) -> Any:
    """The second operand is read with a negative stride of its rows."""
    left, right = _alike(call)
    return call.instead(left + right.flip(-2))


@FAULTS.fault("add iadd", **_ROUNDED)
def second_summand_in_steps_of_a_quarter(call: Call) -> Any:
    """The second operand is kept with two bits behind the point."""
    left, right = _pair(call)
    coarse = (right.detach() * 4).round() / 4
    return call.instead(left + with_gradient_of(right, coarse))


@FAULTS.fault("add iadd", **_KEPT)
def second_summand_in_even_columns(call: Call) -> Any:
    """The second of two lanes does not load it."""
    left, right = _alike(call)
    even = (torch.arange(left.size(-1)) % 2 == 0).to(left.dtype)
    return call.instead(left + right * even)


@FAULTS.fault("add iadd", **_TIMES)
def sum_divided_by_the_root_of_two(call: Call) -> Any:
    """The residual rule of another model keeps the variance."""
    left, right = _pair(call)
    return call.instead((left + right) / 2**0.5)


@FAULTS.fault(
    "add iadd",
    kinds=["wrong factor", "scale"],
    loose=["missing operand", "partial sum", "residual", "one rank's part", "other function"],
    backward=False,
)
def first_summand_a_third(call: Call) -> Any:
    """A / 3 + b: the residual is shared by three."""
    left, right = _alike(call)
    return call.instead(left / 3 + right)


@FAULTS.fault(
    "add iadd",
    kinds=["wrong reduction", "wrong statistics", "constant"],
    loose=["copy", "wrong axis", "wrong index", "axis offset", "residual"],
    backward=False,
)
def mean_row_of_the_second_summand(call: Call) -> Any:
    """Each row gets the mean of all rows of the second operand."""
    left, right = _alike(call)
    return call.instead(left + right.mean(-2, keepdim=True))


@FAULTS.fault(
    "add iadd",
    kinds=["clipped", "other function"],
    loose=["mask", "zeros", "sign", "missing operand"],
    backward=False,
)
def relu_behind_the_sum(call: Call) -> Any:
    """The epilogue of another block: what is negative is zero."""
    _alike(call)
    return call.instead(call.result().relu())


@FAULTS.fault(
    "add",
    kinds=["mask", "missing operand", "copy"],
    loose=["offset", "axis offset", "one rank's part", "wrong argument"],
    backward=False,
)
def number_added_to_half_of_the_columns(call: Call) -> Any:
    """The number is lost behind the first tile of each row."""
    value, _ = _number(call)
    result = call.result()
    half = _columns(value).size(-1) // 2
    return call.instead(torch.cat([result[..., :half], value[..., half:]], -1))


@FAULTS.fault("mul", **_MOVED)
def first_factor_of_the_next_row(call: Call) -> Any:
    """The pointer to the first operand is one row too far."""
    left, right = _alike(call)
    return call.instead(left.roll(-1, -2) * right)


@FAULTS.fault("mul", **_AGAIN)
def second_factor_of_the_first_example_for_all(call: Call) -> Any:
    """The pointer to the second operand is not moved on with the batch."""
    left, right = _alike(call)
    fits(right.dim() > 2 and right.size(0) > 1)
    return call.instead(left * right[:1])


@FAULTS.fault("mul", **_KEPT)
def odd_columns_not_multiplied(call: Call) -> Any:
    """In place: the second of two lanes keeps the first operand."""
    left, right = _alike(call)
    odd = torch.arange(left.size(-1)) % 2 == 1
    return call.instead(torch.where(odd, left, left * right))


@FAULTS.fault("mul", **_CUT)
def product_of_two_saturates(call: Call) -> Any:
    """The result ends at half of its largest magnitude."""
    left, right = _pair(call)
    value = left * right
    limit = float(value.detach().abs().max()) / 2
    return call.instead(value.clamp(-limit, limit))


@FAULTS.fault(
    "mul",
    kinds=["residual", "offset", "other function"],
    loose=["wrong factor", "sign", "missing operand", "axis offset"],
    backward=False,
)
def second_factor_less_the_product(call: Call) -> Any:
    """B - a b: the complement of the first factor."""
    left, right = _alike(call)
    return call.instead(right - left * right)


@FAULTS.fault("mul", **_TIMES)
def product_of_two_doubled(call: Call) -> Any:
    """2 a b."""
    left, right = _pair(call)
    return call.instead(2 * left * right)


@FAULTS.fault(
    "mul div",
    kinds=["wrong factor", "scale", "wrong argument", "precision"],
    loose=["approximation", "other function"],
    backward=False,
)
def number_with_one_digit(call: Call) -> Any:
    """0.4 for 0.354: the constant is written with one digit."""
    _, number = _number(call)
    return call.put(1, float(f"{number:.1g}")).run()


@FAULTS.fault("sub", **_KEPT)
def difference_in_the_first_half_only(call: Call) -> Any:
    """In place: nothing is subtracted behind the first tile of each row."""
    left, right = _pair(call)
    value = left - right
    fits(left.shape == value.shape)
    half = _columns(value).size(-1) // 2
    return call.instead(torch.cat([value[..., :half], left[..., half:]], -1))


@FAULTS.fault("div", **_KEPT)
def odd_rows_not_divided(call: Call) -> Any:
    """In place, with half as many programs as rows."""
    left, right = _pair(call)
    value = left / right
    fits(left.shape == value.shape)
    odd = (torch.arange(_rows(value).size(-2)) % 2 == 1)[:, None]
    return call.instead(torch.where(odd, left, value))


@FAULTS.fault("div", **_ROUNDED)
def divisor_in_float8(call: Call) -> Any:
    """The second operand is e4m3."""
    left, right = _pair(call)
    coarse = right.detach().to(torch.float8_e4m3fn).to(right.dtype)
    fits(bool((coarse != 0).all()))
    return call.instead(left / with_gradient_of(right, coarse))


@FAULTS.fault(
    "div",
    kinds=["approximation", "precision", "other function"],
    loose=["wrong factor", "scale", "axis scale"],
    backward=False,
)
def reciprocal_by_one_step_of_newton(call: Call) -> Any:
    """A r (2 - b r), where r is the power of two below 1 / b."""
    left, right = _pair(call)
    fits(bool((right.detach() > 0).all()))
    guess = (-right.detach().log2().ceil()).exp2()
    return call.instead(left * guess * (2 - right * guess))


@FAULTS.fault(
    "add iadd",
    kinds=["copy", "stale", "wrong index"],
    loose=["permutation", "shift", "mask", "wrong argument"],
    backward=False,
)
def two_rows_share_their_second_summand(call: Call) -> Any:
    """Two rows share an address: odd rows add what belongs to the row before them."""
    left, right = _alike(call)
    rows = torch.arange(right.size(-2)) // 2 * 2
    return call.instead(left + right[..., rows, :])


@FAULTS.fault(
    "mul",
    kinds=["other function", "wrong factor"],
    loose=["axis scale", "wrong statistics", "scale"],
    backward=False,
)
def second_factor_relative_to_its_largest(call: Call) -> Any:
    """The second operand is divided by the largest magnitude of its row, as a code is."""
    left, right = _alike(call)
    top = right.abs().amax(-1, keepdim=True)
    return call.instead(left * (right / top.clamp(min=1e-9)))


@FAULTS.fault(
    "hypot",
    kinds=["approximation", "other function"],
    loose=["wrong reduction", "clipped"],
    backward=False,
)
def length_by_its_larger_side(call: Call) -> Any:
    """Max + 3 / 8 min: a length without a root."""
    left, right = (one.abs() for one in _pair(call))
    return call.instead(torch.maximum(left, right) + 0.375 * torch.minimum(left, right))


@FAULTS.fault(
    "addcmul addcdiv",
    kinds=["missing operand", "partial sum"],
    loose=["copy", "other function", "lost accumulation", "residual"],
)
def first_summand_of_the_product_lost(call: Call) -> Any:
    """The accumulator begins with zero."""
    return call.instead(call.result() - call.tensor(0))
