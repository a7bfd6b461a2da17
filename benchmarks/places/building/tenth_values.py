"""Faults of the tenth set: functions of single elements, sums, products and quotients of two."""

from __future__ import annotations

import math
from typing import Any

import torch
from benchmarks.places import words
from benchmarks.places.calls import Call, Catalogue, fits, with_gradient_of
from benchmarks.places.changes import computed, longer, on, operand, result, rounded, tensors
from benchmarks.places.parts import equal_pair, floating_pair, tensor_and_number
from torch import Tensor
from torch.nn import functional

FAULTS = Catalogue(backward=False)
_SMOOTH = "gelu silu tanh sigmoid mish softplus elu"
_ACTIVATIONS = f"{_SMOOTH} relu relu6 leaky_relu hardswish selu celu"


def _plain(call: Call) -> None:
    """Go on only without a factor for the second operand, or a mode."""
    fits(call.kwargs.get("alpha", 1) == 1 and not call.kwargs.get("rounding_mode"))


# --- Activations ----------------------------------------------------------------------------------


@FAULTS.fault("silu", "other function, wrong factor; approximation, missing operand, residual")
def derivative_of_the_silu(call: Call) -> Any:
    """S (1 + x (1 - s)): the kernel of the backward pass is bound to the forward one."""
    value = call.tensor(0, "input")
    gate = value.sigmoid()
    return call.instead(gate * (1 + value * (1 - gate)))


@FAULTS.fault("leaky_relu", "wrong argument, wrong factor; other function, axis scale, scale")
def slope_of_the_leak_squared(call: Call) -> Any:
    """The slope is applied by the fused product and by the kernel behind it."""
    slope = call.get(1, "negative_slope", default=0.01)
    return call.instead(functional.leaky_relu(call.tensor(0, "input"), slope**2))


@FAULTS.fault(
    "hardswish hardsigmoid",
    "other function, wrong factor, wrong argument; approximation, clipped, scale",
)
def hard_gate_with_an_eighth(call: Call) -> Any:
    """Clamp((x + 4) / 8, 0, 1) is the gate: a shift by three bits for the division by six."""
    value = call.tensor(0, "input")
    gate = ((value + 4) / 8).clamp(0, 1)
    return call.instead(gate if call.name == "hardsigmoid" else value * gate)


@FAULTS.fault(_ACTIVATIONS, words.ROUNDED)
def activation_in_eight_bits_for_each_row(call: Call) -> Any:
    """The result has 255 levels, with a step for each row."""
    value = call.result()
    fits(value.dim() > 1)
    step = value.detach().abs().amax(-1, keepdim=True).clamp(min=1e-12) / 127
    return call.instead(with_gradient_of(value, (value.detach() / step).round() * step))


# fmt: off
# Sqrt(pi / 2) for sqrt(2 / pi) inside of the tanh.
FAULTS.add("quotient under the root of the gelu turned round", "gelu", words.ANOTHER_FACTOR,
    computed(lambda call: (call.tensor(0, "input"),),
        lambda value:
            value * (1 + (math.sqrt(math.pi / 2) * (value + 0.044715 * value**3)).tanh()) / 2))
# 0.44715 x^3 for 0.044715 x^3: a digit was lost when the constant was typed.
FAULTS.add("cubic term of the gelu ten times as large", "gelu",
    "other function, wrong argument; wrong factor, approximation",
    computed(lambda call: (call.tensor(0, "input"),),
        lambda value:
            value * (1 + (math.sqrt(2 / math.pi) * (value + 0.44715 * value**3)).tanh()) / 2))
# X (1 - erf(x / sqrt(2))) / 2: erfc is called without turning its argument round.
FAULTS.add("complement of the gelus gate", "gelu",
    "sign, other function; approximation, wrong factor, residual",
    computed(lambda call: (call.tensor(0, "input"),),
        lambda value: value * torch.special.erfc(value / math.sqrt(2)) / 2))
# X (1 + erf(x / sqrt(2))): the factor of one half is dropped.
FAULTS.add("half of the gelu forgotten", "gelu",
    "scale, wrong factor; other function, wrong argument", result(lambda v: 2 * v))
# X sigmoid(x)^2.
FAULTS.add("gate of the silu applied twice", "silu",
    "other function, wrong factor; approximation, scale, doubled reduction",
    computed(lambda call: (call.tensor(0, "input"),),
        lambda value: value * value.sigmoid().square()))
# X / (1 + 2^-x): exp2 is called, and the argument is not multiplied by log2(e).
FAULTS.add("silu to the base of two", "silu", words.ANOTHER_FACTOR,
    computed(lambda call: (call.tensor(0, "input"),),
        lambda value: value / (1 + (-value).exp2())))
# 1 / (1 + 2^-x): exp2 is called, and the argument is not multiplied by log2(e).
FAULTS.add("sigmoid to the base of two", "sigmoid", words.ANOTHER_FACTOR,
    lambda call: call.instead(1 / (1 + (-call.tensor(0)).exp2())))
# S (1 - s): the kernel of the backward pass is bound to the forward one.
FAULTS.add("slope of the sigmoid for the sigmoid", "sigmoid",
    "other function; wrong factor, approximation, missing operand", result(lambda v: v * (1 - v)))
# 1 / 2 + x / (2 (1 + |x|)): the quick form without an exponential.
FAULTS.add("sigmoid by a softsign", "sigmoid", "other function, approximation; wrong factor",
    lambda call: call.instead(0.5 + functional.softsign(call.tensor(0)) / 2))
# 2 sigmoid(2 x), without the minus one behind it.
FAULTS.add("one of the tanh not subtracted", "tanh",
    "offset, missing operand, other function; residual, axis offset",
    lambda call: call.instead(2 * (2 * call.tensor(0)).sigmoid()))
# 1 - tanh(x)^2: the kernel of the backward pass is bound to the forward one.
FAULTS.add("slope of the tanh for the tanh", "tanh",
    "other function; wrong factor, approximation, sign", result(lambda v: 1 - v.square()))
# F(clamp(x, -0.5, 0.5)): the range that the table covers is too short.
FAULTS.add("argument of the gate limited to its table", "tanh sigmoid softplus",
    "clipped; other function, approximation, wrong argument",
    operand(0, lambda v: v.clamp(-0.5, 0.5), "input"))
# Max(x, -0.05): the zero point of the quantised kernel is rounded down.
FAULTS.add("relu down to minus a twentieth", "relu",
    "clipped, wrong argument, other function; approximation, residual",
    lambda call: call.instead(call.tensor(0, "input").clamp(min=-0.05)))
# 2 log(1 + exp(x / 2)): beta is a half.
FAULTS.add("sharpness of the softplus halved", "softplus", words.ANOTHER_FACTOR,
    lambda call: call.instead(functional.softplus(call.tensor(0, "input"), beta=0.5)))
# The bound of the columns is one too small.
FAULTS.add("last column of the activation empty", _ACTIVATIONS,
    "mask, zeros; missing operand, axis scale, uninitialised, wrong factor, constant",
    result(lambda v: v * (torch.arange(v.size(-1)) < v.size(-1) - 1),
        where=lambda v: v.dim() > 1 and v.size(-1) > 1))
# In place, and the loop over the rows begins at one: the first row keeps the input.
FAULTS.add("activation skips the first row", _ACTIVATIONS,
    "copy, mask, missing operand; stale, other function, residual",
    on(lambda call: (call.tensor(0, "input"),),
        lambda call, value:
            call.instead(torch.cat([value[..., :1, :], call.result()[..., 1:, :]], -2)),
        where=lambda value: value.dim() > 1 and value.size(-2) > 1))
# The input is stored with two bits behind the point.
FAULTS.add("argument of the activation in e5m2", _SMOOTH, words.ROUNDED,
    operand(0, rounded(torch.float8_e5m2), "input"))
# The offset of the batch is one too large, around the end.
FAULTS.add("activation of the next example", _ACTIVATIONS, words.MOVED_OPERAND,
    result(lambda v: v.roll(-1, 0), where=lambda v: v.dim() > 2 and v.size(0) > 1))
# fmt: on


# --- Functions of one value -----------------------------------------------------------------------


@FAULTS.fault("sin cos", "approximation, other function; partial sum, precision, wrong argument")
def three_terms_of_the_series_of_the_angle(call: Call) -> Any:
    """X - x^3 / 6 + x^5 / 120, or 1 - x^2 / 2 + x^4 / 24, without a reduction of the angle."""
    value = call.tensor(0)
    square = value.square()
    if call.name == "cos":
        return call.instead(1 - square / 2 + square.square() / 24)
    return call.instead(value * (1 - square / 6 + square.square() / 120))


@FAULTS.fault("pow square", "offset, eps, other function; axis offset, residual, wrong argument")
def hundredth_added_to_each_square(call: Call) -> Any:
    """X^2 + 0.01: eps is added to each term and not to their mean."""
    fits(call.name == "square" or call.args[1] == 2)
    return call.instead(call.result() + 0.01)


@FAULTS.fault(
    "pow", "other function, wrong argument, sign; wrong factor, approximation, swapped operands"
)
def power_of_the_opposite_exponent(call: Call) -> Any:
    """B^-x: the minus of the rates is applied where the base is inverted already."""
    base, exponent = call.args[:2]
    fits(isinstance(base, int | float) and isinstance(exponent, Tensor))
    return call.instead(base**-exponent)


# fmt: off
# Exp(min(x, -0.1)): what should be a log of a decay is kept from growing.
FAULTS.add("exponent not above minus one tenth", "exp",
    "clipped, wrong argument; other function, approximation, constant, overflow",
    lambda call: call.instead(call.tensor(0).clamp(max=-0.1).exp()))
# Exp(1.4427 x): the factor of exp2 is left in front of exp.
FAULTS.add("logarithm of e multiplied before a natural exponential", "exp", words.ANOTHER_FACTOR,
    lambda call: call.instead((call.tensor(0) / math.log(2)).exp()))
# Exp(x - max(x)) over the last axis: made stable as for a softmax, and not undone.
FAULTS.add("largest of the row subtracted from the exponent", "exp",
    "axis scale, wrong factor, missing operand, other function; wrong statistics, scale, "
    "wrong argument, offset",
    computed(tensors(0), lambda value: (value - value.amax(-1, keepdim=True)).exp(),
        where=lambda value: value.dim() > 0 and value.size(-1) > 1))
# Max(log(x), -0.2): the floor of another front end.
FAULTS.add("logarithm not below minus a fifth", "log log1p",
    "clipped; other function, wrong argument, approximation, constant",
    result(lambda v: v.clamp(min=-0.2)))
# Sin(pi x): the function that counts in half turns is called.
FAULTS.add("half turns taken for radians", "sin cos", words.ANOTHER_FACTOR,
    operand(0, lambda v: v * math.pi))
# Sqrt(1 - sin(x)^2), which is never negative.
FAULTS.add("cosine from the sine", "cos", "sign, other function; approximation, wrong factor",
    result(torch.abs))
# The rows of the table are read one too early, the first one at the end.
FAULTS.add("turn of the position before", "sin cos", words.MOVED,
    result(lambda v: v.roll(1, -2), where=longer(-2, 2)))
# The result has two bits behind the point.
FAULTS.add("function stored in e5m2", "pow square exp reciprocal", words.ROUNDED,
    result(rounded(torch.float8_e5m2)))
# The input has three bits behind the point.
FAULTS.add("function of a value in e4m3", "pow square sqrt rsqrt exp log", words.ROUNDED,
    operand(0, rounded(torch.float8_e4m3fn),

    where=lambda v: float(v.detach().abs().max()) < 400 and float(v.detach().abs().min()) > 0.002))
# Max(v, 1) under the root: a floor that belongs to the scale of a quantiser.
FAULTS.add("variance never below one", "rsqrt sqrt",
    "clipped; eps, wrong argument, other function, constant",
    operand(0, lambda v: v.clamp(min=1.0)))
# 1 / (sqrt(x) + 0.1).
FAULTS.add("eps of a tenth behind the root", "rsqrt",
    "other function, eps; offset, residual, wrong argument",
    lambda call: call.instead(1 / (call.tensor(0).sqrt() + 0.1)))
# 1 - x.
FAULTS.add("complement to one for the opposite", "neg",
    "offset, other function; residual, axis offset, swapped operands, missing operand",
    lambda call: call.instead(1 - call.tensor(0)))
# Max(-x, 0): the other half of a maximum of two is lost.
FAULTS.add("magnitude of negative values only", "abs",
    "clipped, other function, zeros, sign; mask, missing operand",
    lambda call: call.instead((-call.tensor(0)).relu()))
# One digit behind the point is kept.
FAULTS.add("rounded to tenths", "round", "wrong argument, other function; precision, approximation",
    lambda call: call.instead(torch.round(call.tensor(0), decimals=1)))
# Clamp(x, -low, high): the minus of the lower limit is lost, or added.
FAULTS.add("lower limit with the other sign", "clamp",
    "wrong argument, clipped; other function, zeros, sign",
    on(lambda call: (call.get(1, "min"),),
        lambda call, low: call.instead(call.tensor(0).clamp(-low, call.get(2, "max"))),
        where=lambda low: isinstance(low, int | float) and low))
# fmt: on


# --- Sums -----------------------------------------------------------------------------------------


@FAULTS.fault("add iadd", "wrong factor, wrong argument; scale, residual, missing operand")
def branch_weighed_by_a_tenth(call: Call) -> Any:
    """A + b / 10: the initial value of a scale that this layer does not have."""
    left, right = equal_pair(call)
    _plain(call)
    return call.instead(left + 0.1 * right)


@FAULTS.fault(
    "add iadd",
    "copy, wrong index, missing operand, wrong factor; scale, stale, doubled reduction, residual",
)
def first_summand_for_both(call: Call) -> Any:
    """A + a: the second pointer is that of the first operand."""
    left, _ = equal_pair(call)
    _plain(call)
    return call.instead(left + left)


@FAULTS.fault(
    "add iadd",
    "permutation, wrong index; axis offset, swapped operands, shift, wrong argument, offset",
)
def what_is_broadcast_in_pairs(call: Call) -> Any:
    """The columns of the smaller summand are exchanged two by two, as words of two."""
    left, right = floating_pair(call)
    _plain(call)
    fits(right.numel() < left.numel() and right.dim() and right.size(-1) > 3)
    fits(right.size(-1) % 2 == 0)
    turned = right.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    return call.instead(left + turned)


@FAULTS.fault(
    "add iadd", "shift, wrong index, permutation; axis offset, stale, copy, wrong argument, offset"
)
def what_is_broadcast_two_columns_early(call: Call) -> Any:
    """The pointer to the smaller summand is two elements too far, around the end."""
    left, right = floating_pair(call)
    _plain(call)
    fits(right.numel() < left.numel() and right.dim() and right.size(-1) > 3)
    return call.instead(left + right.roll(-2, -1))


@FAULTS.fault(
    "add iadd", "missing operand, mask, copy; stale, one rank's part, axis offset, missing bias"
)
def second_summand_not_in_the_first_row(call: Call) -> Any:
    """The first row keeps the first operand: the loop over the rows begins at one."""
    left, right = equal_pair(call)
    _plain(call)
    fits(left.dim() > 1 and left.size(-2) > 1)
    keep = (torch.arange(left.size(-2)) > 0)[:, None]
    return call.instead(left + right * keep)


@FAULTS.fault(
    "add iadd",
    "missing operand, mask, copy; stale, one rank's part, axis offset, zeros, missing bias",
)
def second_summand_for_the_last_example_only(call: Call) -> Any:
    """The store of all examples but the last one is overwritten by the first operand."""
    left, right = equal_pair(call)
    _plain(call)
    fits(left.dim() > 1 and left.size(0) > 1)
    return call.instead(torch.cat([left[:-1], left[-1:] + right[-1:]]))


@FAULTS.fault("add iadd", words.ROUNDED)
def second_summand_in_e4m3_with_a_scale(call: Call) -> Any:
    """The second summand has three bits behind the point, with a scale for the tensor."""
    left, right = equal_pair(call)
    _plain(call)
    scale = right.detach().abs().max().clamp(min=1e-12) / 448
    coarse = (right.detach() / scale).to(torch.float8_e4m3fn).to(right.dtype) * scale
    return call.instead(left + with_gradient_of(right, coarse))


@FAULTS.fault("add iadd", "eps, wrong argument, offset; axis offset, residual, wrong factor")
def root_of_the_eps_added(call: Call) -> Any:
    """X + sqrt(eps): it is added where the deviation is meant, and not the variance."""
    value, number = tensor_and_number(call)
    _plain(call)
    fits(0 < number < 0.1 and number != 1e-6)
    return call.instead(value + math.sqrt(number))


@FAULTS.fault(
    "sub isub",
    "wrong index, shift, wrong statistics; axis offset, stale, copy, permutation, offset",
)
def statistic_of_the_row_before_subtracted(call: Call) -> Any:
    """What is subtracted from a row belongs to the row before, around the end."""
    left, right = floating_pair(call)
    _plain(call)
    fits(right.dim() == left.dim() > 1 and right.size(-1) == 1 < left.size(-1))
    fits(right.size(-2) > 1)
    return call.instead(left - right.roll(1, -2))


@FAULTS.fault(
    "sub rsub", "missing operand, copy, other function; offset, sign, swapped operands, residual"
)
def complement_not_taken(call: Call) -> Any:
    """X for c - x: the share itself is used."""
    value, _ = tensor_and_number(call)
    fits(value is call.args[call.name == "sub"])
    return call.instead(value.clone())


@FAULTS.fault("sub isub", words.ROUNDED)
def both_sides_of_the_difference_in_half(call: Call) -> Any:
    """Both operands are float16 before they are subtracted."""
    left, right = floating_pair(call)
    _plain(call)
    sides = [with_gradient_of(one, one.detach().half().to(one.dtype)) for one in (left, right)]
    return call.instead(sides[0] - sides[1])


# --- Products and quotients -----------------------------------------------------------------------


@FAULTS.fault("mul imul", words.ROUNDED)
def second_factor_in_four_bits_for_each_row(call: Call) -> Any:
    """The second operand has 15 levels, with a step for each row."""
    left, right = floating_pair(call)
    fits(right.dim() > 0 and right.size(-1) > 1)
    step = right.detach().abs().amax(-1, keepdim=True).clamp(min=1e-12) / 7
    return call.instead(left * with_gradient_of(right, (right.detach() / step).round() * step))


@FAULTS.fault(
    "div itruediv",
    "wrong index, wrong statistics, wrong axis; copy, axis scale, wrong factor, scale, "
    "wrong reduction",
)
def largest_divisor_for_all_rows(call: Call) -> Any:
    """A / max(b): one scale for the whole tensor, where each row has its own."""
    left, right = floating_pair(call)
    _plain(call)
    fits(right.dim() == left.dim() and right.size(-1) == 1 < left.size(-1))
    return call.instead(left / right.max())


@FAULTS.fault(
    "div itruediv", "wrong argument, wrong factor, scale; other function, doubled reduction"
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
    "eps, offset, wrong argument, other function; residual, wrong factor, axis scale, "
    "approximation",
)
def twentieth_added_to_the_divisor(call: Call) -> Any:
    """A / (b + 0.05): an eps of another order, against a division by zero."""
    left, right = floating_pair(call)
    _plain(call)
    return call.instead(left / (right + 0.05))


# fmt: off
# The first operand is read backwards along the last axis.
FAULTS.add("first factor from its end", "mul imul",
    "permutation, wrong index; shift, swapped operands, transpose, wrong argument",
    computed(floating_pair, lambda left, right: left.flip(-1) * right,
        where=lambda left, *_: left.dim() and left.size(-1) > 2))
# A / b: the inverse of the scale is stored, and it is divided by the scale.
FAULTS.add("quotient for the product of two", "mul imul",
    "other function; wrong factor, wrong argument, nonfinite",
    computed(floating_pair, lambda left, right: left / right,
        where=lambda _, right: float(right.detach().abs().min()) > 0.001))
# A exp(b): the second operand is exponentiated, as a scale that is learnt as a logarithm.
FAULTS.add("gate taken for its logarithm", "mul imul",
    "other function, wrong factor, wrong argument; axis scale",
    computed(floating_pair, lambda left, right: left * right.clamp(max=20).exp()))
# The number is rounded to a power of two, for a shift.
FAULTS.add("number is a power of two", "mul imul",
    "wrong argument, wrong factor, precision, scale; approximation",
    computed(tensor_and_number,
        lambda value, number:
            value * math.copysign(2.0 ** round(math.log2(abs(number))), number),
        where=lambda _, number: number not in {0, 0.25}))
# C / 2: two kernels share a factor, and one of them has half of it.
FAULTS.add("number that multiplies halved", "mul imul",
    "scale, wrong factor, wrong argument; other function",
    computed(tensor_and_number, lambda value, number: value * (number / 2),
        where=lambda _, number: number not in {0.25, 0.5}))
# The second operand is read one head too far, around the end.
FAULTS.add("second factor of the next head", "mul imul",
    "shift, wrong index, permutation; stale, copy, wrong rank's shard, axis scale",
    computed(floating_pair, lambda left, right: left * right.roll(-1, 1),
        where=lambda left, right: left.dim() == right.dim() == 4 and right.size(1) > 1))
# The stride of the heads is zero for the second operand.
FAULTS.add("second factor of the first head for all", "mul imul",
    "copy, stale, wrong index; permutation, shift, wrong rank's shard, axis scale",
    computed(floating_pair, lambda left, right: left * right[:, :1],
        where=lambda left, right: left.dim() == right.dim() == 4 and right.size(1) > 1))
# fmt: on


# --- Choices --------------------------------------------------------------------------------------


@FAULTS.fault("where", "shift, wrong index, mask; permutation, stale, wrong argument, copy")
def condition_two_columns_early(call: Call) -> Any:
    """The condition is read two columns too far, around the end."""
    condition = call.args[0]
    fits(isinstance(condition, Tensor) and condition.dim() and condition.size(-1) > 2)
    return call.put(0, condition.roll(-2, -1)).run()


# fmt: off
# The second operand everywhere: the comparison is folded to true.
FAULTS.add("limit itself for the larger one", "maximum",
    "missing operand, copy; other function, stale, clipped, wrong argument",
    on(floating_pair,
        lambda call, _, right: call.instead(right.expand_as(call.result()).clone())))
# fmt: on
