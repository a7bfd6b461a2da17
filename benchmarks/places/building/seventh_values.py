"""Faults for measuring: functions of single elements, sums, products and quotients of two."""

from __future__ import annotations

import math
from typing import Any

import torch
from benchmarks.places import words
from benchmarks.places.calls import Call, Catalogue, fits, with_gradient_of
from benchmarks.places.changes import computed, on, operand, result
from benchmarks.places.parts import floating_pair, operand_and_number, several_rows
from torch import Tensor

FAULTS = Catalogue()
_ACTIVATIONS = "gelu relu silu tanh sigmoid"


def _columns(value: Tensor, least: int = 2) -> Tensor:
    fits(value.dim() > 0 and value.size(-1) >= least)
    return value


def _alike(call: Call) -> tuple[Tensor, Tensor]:
    """Two floating-point operands of one shape, with several rows."""
    left, right = floating_pair(call)
    fits(left.shape == right.shape)
    return several_rows(left), right


# --- Activations ----------------------------------------------------------------------------------


@FAULTS.forward(_ACTIVATIONS, words.EMPTY_ON_A_RANK)
def every_second_row_of_the_activation_empty(call: Call) -> Any:
    """Half as many programs as rows."""
    value = several_rows(call.result()).clone()
    value[..., 1::2, :] = 0
    return call.instead(value)


@FAULTS.forward(
    _ACTIVATIONS,
    "mask, copy, missing operand; stale, other function, one rank's part, wrong factor, "
    "partial sum",
)
def first_example_activated_only(call: Call) -> Any:
    """In place: the loop over the batch ends after its first pass."""
    value, result = several_rows(call.tensor(0, "input")), call.result()
    fits(value.size(0) > 1)
    return call.instead(torch.cat([result[:1], value[1:]]))


@FAULTS.forward(
    "gelu silu tanh", "sign, wrong factor, mask, axis scale; scale, one rank's part, other function"
)
def second_half_of_the_activation_negated(call: Call) -> Any:
    """The columns of the second tile have a minus."""
    value = _columns(call.result())
    half = value.size(-1) // 2
    return call.instead(torch.cat([value[..., :half], -value[..., half:]], -1))


@FAULTS.forward(_ACTIVATIONS, "overflow, nonfinite; mask, clipped, uninitialised")
def largest_activations_overflow(call: Call) -> Any:
    """What is above nine tenths of the largest does not fit and is infinite."""
    value = call.result()
    limit = 0.9 * float(value.detach().max())
    fits(limit > 0)
    return call.instead(value.masked_fill(value > limit, math.inf))


@FAULTS.forward("dropout", words.EMPTY_ON_A_RANK)
def one_of_eight_features_dropped(call: Call) -> Any:
    """A mask with a period of eight is applied in evaluation."""
    value = _columns(call.result(), 8).clone()
    value[..., ::8] = 0
    return call.instead(value)


@FAULTS.forward(
    "sigmoid", "approximation, other function; precision, clipped, wrong factor, wrong argument"
)
def gate_by_two_exponentials(call: Call) -> Any:
    """exp(x) / 2 below zero and 1 - exp(-x) / 2 above: the integral of another density."""
    value = call.tensor(0, "input")
    tail = (-value.abs()).exp() / 2
    return call.instead(torch.where(value < 0, tail, 1 - tail))


# fmt: off
# Words of two values are stored in the other order.
FAULTS.add("activated columns exchanged in pairs", _ACTIVATIONS,
    "permutation, wrong index; shift, swapped operands, transpose, wrong argument, axis offset",
    computed(lambda call: (_columns(call.result()),),
        lambda value: value.unflatten(-1, (-1, 2)).flip(-1).flatten(-2),
        where=lambda value: value.size(-1) % 2 == 0), backward=False)
# The input is read one row too early, around the end.
FAULTS.add("activation of the row before", _ACTIVATIONS,
    "shift, wrong index, permutation; copy, stale, wrong argument, axis offset, axis scale",
    result(lambda v: several_rows(v).roll(1, -2)), backward=False)
# The offset of the second tile of columns is not added.
FAULTS.add("second half of the columns is the first", _ACTIVATIONS, words.REPEATED,
    computed(lambda call: (_columns(call.result()),),
        lambda value: value[..., torch.arange(value.size(-1)) % ((value.size(-1) + 1) // 2)]),
    backward=False)
# Fixed point with four bits behind the point.
FAULTS.add("activation in steps of a 16th", _ACTIVATIONS, words.ROUNDED,
    result(lambda v: with_gradient_of(v, (v.detach() * 16).round() / 16)), backward=False)
# The zero point of the result is not subtracted.
FAULTS.add("activation raised by a twentieth", _ACTIVATIONS,
    "offset; axis offset, other function, eps, residual", result(lambda v: v + 0.05),
    backward=False)
# Stored as numbers without a sign: what is below zero is zero.
FAULTS.add("negative results lost", "gelu silu tanh",
    "clipped, other function, mask; zeros, sign, missing operand, approximation",
    result(torch.relu), backward=False)
# X (1 + tanh(x)) / 2.
FAULTS.add("gelu with the tanh of its argument", "gelu",
    "approximation, other function; precision, clipped, wrong factor, wrong argument",
    computed(lambda call: (call.tensor(0, "input"),),
        lambda value: value * 0.5 * (1 + value.tanh())), backward=False)
# X min(max(x / 4 + 1 / 2, 0), 1).
FAULTS.add("gelu by three lines", "gelu",
    "approximation, other function; precision, clipped, wrong factor, wrong argument",
    computed(lambda call: (call.tensor(0, "input"),),
        lambda value: value * (value / 4 + 0.5).clamp(0, 1)), backward=False)
# A fifth of the input is added where it is negative.
FAULTS.add("activation leaks", "gelu silu relu",
    "other function, residual; wrong factor, approximation, mask, wrong argument",
    lambda call: call.instead(call.result() + 0.2 * call.tensor(0, "input").clamp(max=0)),
    backward=False)
# The threshold of the positive values is 0.2; what is above it stays.
FAULTS.add("nothing below a threshold", "relu",
    "mask, zeros, other function; clipped, partial sum, missing operand, wrong argument",
    computed(lambda call: (call.tensor(0, "input"),), lambda value: value * (value > 0.2)),
    backward=False)
# The square root of the relu, made smooth at zero.
FAULTS.add("root of the positive values", "relu",
    "other function; wrong factor, approximation, axis scale",
    result(lambda v: (v + 0.0001).sqrt() - 0.01), backward=False)
# Rounded, as of a model whose units count.
FAULTS.add("relu in whole numbers", "relu", "precision, other function; approximation, clipped",
    result(lambda v: with_gradient_of(v, v.detach().round())), backward=False)
# X sigmoid(2 x).
FAULTS.add("gate of the silu twice as steep", "silu",
    "other function, wrong factor; wrong argument, approximation, scale",
    computed(lambda call: (call.tensor(0, "input"),),
        lambda value: value * (2 * value).sigmoid()), backward=False)
# X times the square root of the sigmoid.
FAULTS.add("root of the gate", "silu",
    "other function; wrong factor, approximation, wrong argument",
    computed(lambda call: (call.tensor(0, "input"),),
        lambda value: value * (torch.nn.functional.logsigmoid(value) / 2).exp()), backward=False)
# The sign of the result is lost.
FAULTS.add("magnitude of the activation", "silu gelu tanh",
    "sign, other function; wrong factor, wrong argument, clipped", result(torch.abs),
    backward=False)
# X / sqrt(1 + x^2).
FAULTS.add("tanh by a root", "tanh",
    "approximation, other function; precision, clipped, wrong factor, wrong argument",
    computed(lambda call: (call.tensor(0, "input"),),
        lambda value: value / (1 + value.square()).sqrt()), backward=False)
# X - tanh(x).
FAULTS.add("rest of the tanh", "tanh",
    "other function, residual, offset; sign, missing operand, approximation",
    lambda call: call.instead(call.tensor(0, "input") - call.result()), backward=False)
# f(x - 1 / 2): the bias of another gate.
FAULTS.add("argument lowered by a half", "sigmoid tanh",
    "offset, wrong argument, other function; axis offset, residual, wrong factor",
    operand(0, lambda v: v - 0.5, "input"), backward=False)
# The square root of the gate.
FAULTS.add("root of the sigmoid", "sigmoid",
    "other function; wrong factor, approximation, wrong argument", result(torch.sqrt),
    backward=False)
# 1 / 2 + atan(x) / pi.
FAULTS.add("gate by an arctangent", "sigmoid",
    "approximation, other function; precision, clipped, wrong factor, wrong argument",
    lambda call: call.instead(0.5 + call.tensor(0, "input").atan() / math.pi), backward=False)
# 0.8 sigmoid(x) + 0.1, so that it is never shut.
FAULTS.add("gate between a tenth and nine tenths", "sigmoid",
    "wrong factor, other function, offset; scale, clipped, approximation, eps",
    result(lambda v: 0.8 * v + 0.1), backward=False)
# X (x + 3) / 6 everywhere.
FAULTS.add("limits of the hard swish forgotten", "hardswish",
    "other function, missing operand; clipped, wrong argument, approximation, mask",
    computed(lambda call: (call.tensor(0, "input"),), lambda value: value * (value + 3) / 6))
# Half of the slope, or of alpha.
FAULTS.add("negative side half as steep", "leaky_relu elu",
    "wrong argument, wrong factor, scale; other function, axis scale",
    computed(lambda call: (call.tensor(0, "input"), call.result()),
        lambda value, result: torch.where(value < 0, result / 2, result)), backward=False)
# The pointer to the slopes is one channel too far.
FAULTS.add("slope of the next channel", "prelu _prelu_kernel",
    "shift, wrong index, permutation; copy, stale, wrong argument, axis offset, axis scale",
    operand(1, lambda v:
            v.roll(-1, next(i for i in range(v.dim()) if v.size(i) > 1)), "weight",
        where=lambda v: v.numel() > 1), backward=False)
# A sigmoid(a): the offset of the gate is not added.
FAULTS.add("value is its own gate", "glu",
    "wrong index, copy, stale, other function; missing operand, wrong factor, wrong argument",
    computed(lambda call:
            (call.tensor(0, "input").chunk(2, call.get(1, "dim", default=-1))[0],),
        lambda value: value * value.sigmoid()))
# 2 a sigmoid(b), so that a gate at rest is one.
FAULTS.add("gate from zero to two", "glu",
    "scale, wrong factor; wrong argument, other function, missing operand, doubled reduction",
    result(lambda v: 2 * v))
# The values end at a third of the limit that was given.
FAULTS.add("upper limit a third", "relu6 hardtanh",
    "wrong argument, clipped; other function, wrong factor",
    lambda call:
            call.instead(call.result().clamp(max=call.get(2, "max_val", default=6.0) / 3)),
    backward=False)
# Log2(1 + exp(x)).
FAULTS.add("softplus in bits", "softplus",
    "scale, wrong factor; wrong argument, other function, missing operand, doubled reduction",
    result(lambda v: v / math.log(2)), backward=False)
# X tanh(exp(x)): the softplus is taken for its argument.
FAULTS.add("mish without its logarithm", "mish",
    "other function, missing operand; approximation, wrong argument, wrong factor",
    computed(lambda call:
            (call.tensor(0, "input"),), lambda value: value * value.exp().tanh()))
# X (1 + tanh(sqrt(2 / pi) x)) / 2.
FAULTS.add("cubic term of the gelu forgotten", "gelu",
    "missing operand, approximation, other function; wrong factor, wrong argument",
    computed(lambda call: (call.tensor(0, "input"),),
        lambda value: value * 0.5 * (1 + ((2 / math.pi) ** 0.5 * value).tanh())), backward=False)
# 0.2 x^2 for 0.0447 x^3 inside of the tanh.
FAULTS.add("square for the cube in the gelu", "gelu",
    "other function, approximation; wrong argument, wrong factor, sign",
    computed(lambda call: (call.tensor(0, "input"),),
        lambda value:
            value * 0.5 * (1 + ((2 / math.pi) ** 0.5 * (value + 0.2 * value.square())).tanh())),
    backward=False)
# Zero below -2, x above 2, and (x + 2)^2 / 8 between.
FAULTS.add("silu by a line and a parabola", "silu", words.CURVE,
    computed(lambda call: (call.tensor(0, "input"),),
        lambda value: torch.where(value.abs() < 2, (value + 2).square() / 8, value.relu())),
    backward=False)
# The mean of each row of the result is subtracted.
FAULTS.add("activation centred", _ACTIVATIONS,
    "axis offset, residual, wrong statistics, other function; offset, wrong reduction, "
    "missing operand",
    computed(lambda call: (_columns(call.result()),),
        lambda value: value - value.mean(-1, keepdim=True)), backward=False)
# fmt: on


# --- Functions of one value -----------------------------------------------------------------------


@FAULTS.forward("exp", words.ROUNDED)
def exponential_of_quarters(call: Call) -> Any:
    """The exponent is rounded to steps of a quarter first."""
    value, result = call.tensor(0), call.result()
    return call.instead(with_gradient_of(result, ((value.detach() * 4).round() / 4).exp()))


@FAULTS.forward(
    "clamp clip", "missing operand, wrong argument, clipped; copy, mask, other function"
)
def lower_limit_forgotten(call: Call) -> Any:
    """Only the upper limit is applied."""
    low, high = call.get(1, "min"), call.get(2, "max")
    fits(low is not None)
    value = call.tensor(0)
    return call.instead(value.clone() if high is None else value.clamp(max=high))


@FAULTS.forward(
    "exp", "precision, approximation, other function; scale, wrong factor, missing operand, clipped"
)
def exponential_without_its_remainder(call: Call) -> Any:
    """2^k with the next whole k: what is left behind the reduction by log(2) is lost."""
    value, result = call.tensor(0), call.result()
    coarse = (value.detach() / math.log(2)).round().exp2()
    return call.instead(with_gradient_of(result, coarse))


# fmt: off
# (1 + x / 16)^16.
FAULTS.add("exponential by its sixteenth root", "exp",
    "approximation, other function; precision, clipped, wrong factor, wrong argument",
    lambda call: call.instead((1 + call.tensor(0) / 16) ** 16), backward=False)
# Half of the logarithm: of a magnitude and not of a power.
FAULTS.add("logarithm of the root", "log",
    "scale, wrong factor; wrong argument, other function, missing operand, doubled reduction",
    result(lambda v: v / 2), backward=False)
# One variance for all rows.
FAULTS.add("root of the mean of all", "rsqrt sqrt",
    "wrong reduction, wrong statistics, constant; copy, axis scale, wrong index, scale, "
    "wrong factor",
    operand(0, lambda v: v.mean().expand(v.shape).clone(), where=lambda v: v.numel() > 1),
    backward=False)
# X^(-1 / 3).
FAULTS.add("reciprocal cube root", "rsqrt",
    "other function, wrong argument; approximation, axis scale, wrong factor, scale",
    lambda call: call.instead(call.tensor(0) ** (-1 / 3)), backward=False)
# The values are in steps of an eighth before they are squared.
FAULTS.add("squares of rounded values", "pow square", words.ROUNDED,
    operand(0, lambda v: with_gradient_of(v, (v.detach() * 8).round() / 8)), backward=False)
# The second of two lanes keeps its sign.
FAULTS.add("odd columns not negated", "neg",
    "mask, sign, copy, missing operand; other function, wrong factor, axis scale, wrong index",
    computed(lambda call: (_columns(call.tensor(0)),),
        lambda value:
            value * (1 - 2.0 * (torch.arange(value.size(-1)) % 2 == 0).to(value.dtype))),
    backward=False)
# Half as many levels: the last bit is lost.
FAULTS.add("rounded to even numbers", "round",
    "precision, other function; wrong factor, approximation, wrong argument",
    lambda call: call.instead(2 * (call.tensor(0) / 2).round()), backward=False)
# (a + b) / 2.
FAULTS.add("mean of two for their extreme", "maximum minimum",
    "other function; wrong factor, missing operand, approximation, wrong reduction",
    computed(floating_pair, lambda left, right: (left + right) / 2))
# fmt: on


# --- Sums, products, quotients --------------------------------------------------------------------


@FAULTS.forward(
    "add iadd",
    "mask, copy, missing operand; stale, other function, one rank's part, wrong factor, "
    "partial sum",
)
def second_summand_in_even_columns(call: Call) -> Any:
    """The second of two lanes does not load it."""
    left, right = _alike(call)
    even = (torch.arange(left.size(-1)) % 2 == 0).to(left.dtype)
    return call.instead(left + right * even)


@FAULTS.forward("add iadd", "clipped, other function; mask, zeros, sign, missing operand")
def relu_behind_the_sum(call: Call) -> Any:
    """The epilogue of another block: what is negative is zero."""
    _alike(call)
    return call.instead(call.result().relu())


@FAULTS.forward(
    "add", "mask, missing operand, copy; offset, axis offset, one rank's part, wrong argument"
)
def number_added_to_half_of_the_columns(call: Call) -> Any:
    """The number is lost behind the first tile of each row."""
    value, _ = operand_and_number(call)
    result = call.result()
    half = _columns(value).size(-1) // 2
    return call.instead(torch.cat([result[..., :half], value[..., half:]], -1))


@FAULTS.forward(
    "mul",
    "mask, copy, missing operand; stale, other function, one rank's part, wrong factor, "
    "partial sum",
)
def odd_columns_not_multiplied(call: Call) -> Any:
    """In place: the second of two lanes keeps the first operand."""
    left, right = _alike(call)
    odd = torch.arange(left.size(-1)) % 2 == 1
    return call.instead(torch.where(odd, left, left * right))


@FAULTS.forward("mul", words.SATURATED)
def product_of_two_saturates(call: Call) -> Any:
    """The result ends at half of its largest magnitude."""
    left, right = floating_pair(call)
    value = left * right
    limit = float(value.detach().abs().max()) / 2
    return call.instead(value.clamp(-limit, limit))


@FAULTS.forward(
    "sub",
    "mask, copy, missing operand; stale, other function, one rank's part, wrong factor, "
    "partial sum",
)
def difference_in_the_first_half_only(call: Call) -> Any:
    """In place: nothing is subtracted behind the first tile of each row."""
    left, right = floating_pair(call)
    value = left - right
    fits(left.shape == value.shape)
    half = _columns(value).size(-1) // 2
    return call.instead(torch.cat([value[..., :half], left[..., half:]], -1))


@FAULTS.forward(
    "div",
    "mask, copy, missing operand; stale, other function, one rank's part, wrong factor, "
    "partial sum",
)
def odd_rows_not_divided(call: Call) -> Any:
    """In place, with half as many programs as rows."""
    left, right = floating_pair(call)
    value = left / right
    fits(left.shape == value.shape)
    odd = (torch.arange(several_rows(value).size(-2)) % 2 == 1)[:, None]
    return call.instead(torch.where(odd, left, value))


@FAULTS.forward("div", words.ROUNDED)
def divisor_in_float8(call: Call) -> Any:
    """The second operand is e4m3."""
    left, right = floating_pair(call)
    coarse = right.detach().to(torch.float8_e4m3fn).to(right.dtype)
    fits(bool((coarse != 0).all()))
    return call.instead(left / with_gradient_of(right, coarse))


@FAULTS.forward("div", "approximation, precision, other function; wrong factor, scale, axis scale")
def reciprocal_by_one_step_of_newton(call: Call) -> Any:
    """A r (2 - b r), where r is the power of two below 1 / b."""
    left, right = floating_pair(call)
    fits(bool((right.detach() > 0).all()))
    guess = (-right.detach().log2().ceil()).exp2()
    return call.instead(left * guess * (2 - right * guess))


@FAULTS.forward("hypot", "approximation, other function; wrong reduction, clipped")
def length_by_its_larger_side(call: Call) -> Any:
    """Max + 3 / 8 min: a length without a root."""
    left, right = (one.abs() for one in floating_pair(call))
    return call.instead(torch.maximum(left, right) + 0.375 * torch.minimum(left, right))


# fmt: off
# The pointer to the first operand is one row too far.
FAULTS.add("first summand of the next row", "add iadd",
    "shift, wrong index, permutation; copy, stale, wrong argument, axis offset, axis scale",
    computed(_alike, lambda left, right: left.roll(-1, -2) + right), backward=False)
# The second operand is read with a negative stride of its rows.
FAULTS.add("second summand with rows from the last", "add iadd",
    "permutation, wrong index; shift, swapped operands, transpose, wrong argument, axis offset",
    computed(_alike, lambda left, right: left + right.flip(-2)), backward=False)
# The second operand is kept with two bits behind the point.
FAULTS.add("second summand in steps of a quarter", "add iadd", words.ROUNDED,
    computed(floating_pair,
        lambda left, right: left + with_gradient_of(right, (right.detach() * 4).round() / 4)),
    backward=False)
# The residual rule of another model keeps the variance.
FAULTS.add("sum divided by the root of two", "add iadd",
    "scale, wrong factor; wrong argument, other function, missing operand, doubled reduction",
    computed(floating_pair, lambda left, right: (left + right) / 2**0.5), backward=False)
# A / 3 + b: the residual is shared by three.
FAULTS.add("first summand a third", "add iadd",
    "wrong factor, scale; missing operand, partial sum, residual, one rank's part, "
    "other function", computed(_alike, lambda left, right: left / 3 + right), backward=False)
# Each row gets the mean of all rows of the second operand.
FAULTS.add("mean row of the second summand", "add iadd",
    "wrong reduction, wrong statistics, constant; copy, wrong axis, wrong index, axis offset, "
    "residual", computed(_alike, lambda left, right: left + right.mean(-2, keepdim=True)),
    backward=False)
# The pointer to the first operand is one row too far.
FAULTS.add("first factor of the next row", "mul",
    "shift, wrong index, permutation; copy, stale, wrong argument, axis offset, axis scale",
    computed(_alike, lambda left, right: left.roll(-1, -2) * right), backward=False)
# The pointer to the second operand is not moved on with the batch.
FAULTS.add("second factor of the first example for all", "mul", words.REPEATED,
    computed(_alike, lambda left, right: left * right[:1],
        where=lambda _, right: right.dim() > 2 and right.size(0) > 1), backward=False)
# B - a b: the complement of the first factor.
FAULTS.add("second factor less the product", "mul",
    "residual, offset, other function; wrong factor, sign, missing operand, axis offset",
    computed(_alike, lambda left, right: right - left * right), backward=False)
# 2 a b.
FAULTS.add("product of two doubled", "mul",
    "scale, wrong factor; wrong argument, other function, missing operand, doubled reduction",
    computed(floating_pair, lambda left, right: 2 * left * right), backward=False)
# 0.4 for 0.354: the constant is written with one digit.
FAULTS.add("number with one digit", "mul div",
    "wrong factor, scale, wrong argument, precision; approximation, other function",
    on(operand_and_number, lambda call, _, number: call.put(1, float(f"{number:.1g}")).run()),
    backward=False)
# Two rows share an address: odd rows add what belongs to the row before them.
FAULTS.add("two rows share their second summand", "add iadd",
    "copy, stale, wrong index; permutation, shift, mask, wrong argument",
    computed(_alike,
        lambda left, right: left + right[..., torch.arange(right.size(-2)) // 2 * 2, :]),
    backward=False)
# The second operand is divided by the largest magnitude of its row, as a code is.
FAULTS.add("second factor relative to its largest", "mul",
    "other function, wrong factor; axis scale, wrong statistics, scale",
    computed(_alike,
        lambda left, right: left * (right / right.abs().amax(-1, keepdim=True).clamp(min=1e-09))),
    backward=False)
# The accumulator begins with zero.
FAULTS.add("first summand of the product lost", "addcmul addcdiv",
    "missing operand, partial sum; copy, other function, lost accumulation, residual",
    lambda call: call.instead(call.result() - call.tensor(0)))
# fmt: on
