"""Faults for measuring: functions of single elements, sums, products and quotients of two."""

from __future__ import annotations

import math
from typing import Any

import torch
from benchmarks.places import words
from benchmarks.places.calls import Call, Catalogue, fits, with_gradient_of
from benchmarks.places.changes import computed, operand, result, rounded, tensors
from benchmarks.places.parts import (
    column_numbers,
    equal_plain_pair,
    is_number,
    plain_pair,
    round_to,
    tensor_and_number,
    value_and_row,
)
from torch import Tensor

FAULTS = Catalogue(backward=False)
_ACTIVATIONS = "gelu silu relu tanh sigmoid leaky_relu elu softplus hardswish"
_QUOTIENTS = "div truediv idiv itruediv"


def _rows(value: Tensor, least: int = 3) -> Tensor:
    fits(value.dim() > 1 and value.size(-2) >= least)
    return value


def _columns(value: Tensor, least: int = 4) -> Tensor:
    fits(value.dim() > 1 and value.size(-1) >= least)
    return value


# --- Activations ----------------------------------------------------------------------------------


@FAULTS.fault("gelu silu sigmoid tanh", "approximation, other function; precision, wrong argument")
def straight_between_whole_and_half_numbers(call: Call) -> Any:
    """A table with two entries for each unit, and straight lines between them."""
    value = call.tensor(0, "input")
    low = (2 * value.detach()).floor() / 2
    below, above = (call.put(0, one, "input").run() for one in (low, low + 0.5))
    return call.instead(below + 2 * (value - low) * (above - below))


# fmt: off
# X times the square of the distribution function: the epilogue multiplies by it once more.
FAULTS.add("gate of the gelu squared", "gelu",
    "other function; approximation, wrong factor, wrong argument",
    computed(lambda call: (call.tensor(0, "input"),),
        lambda value: value * torch.special.ndtr(value).square()))
# F(max(x, -0.75)): the table of the function begins there.
FAULTS.add("argument never below minus three quarters", "gelu silu tanh",
    "clipped; other function, approximation, constant, wrong argument",
    operand(0, lambda v: v.clamp(min=-0.75), "input"))
# The division by the chance to be kept, 0.8, is fused and stays in evaluation.
FAULTS.add("activation five quarters as large", "gelu silu relu",
    "scale, wrong factor; other function, wrong argument", result(lambda v: 1.25 * v))
# |x|: the bit of the sign is cleared where the whole value should be.
FAULTS.add("magnitude for the positive part", "relu",
    "other function; sign, wrong argument, residual",
    lambda call: call.instead(call.tensor(0, "input").abs()))
# Max(x + 0.15, 0): a zero point is added before and never taken off.
FAULTS.add("relu of an argument raised by three twentieths", "relu",
    "offset, other function, wrong argument; residual, axis offset, clipped",
    lambda call: call.instead((call.tensor(0, "input") + 0.15).relu()))
# Min(sigmoid(x), 0.6).
FAULTS.add("gate never above three fifths", "sigmoid",
    "clipped; other function, approximation, overflow, wrong argument, constant",
    result(lambda v: v.clamp(max=0.6)))
# 1 / 2 + x / 4, without limits.
FAULTS.add("tangent for the sigmoid", "sigmoid", words.CURVE,
    lambda call: call.instead(0.5 + call.tensor(0, "input") / 4))
# Erf(x): the other gate of a gelu is taken.
FAULTS.add("error function for the tanh", "tanh",
    "other function; approximation, wrong factor, wrong argument",
    lambda call: call.instead(call.tensor(0, "input").erf()))
# The input has three bits behind the point.
FAULTS.add("argument of the activation in eighths", _ACTIVATIONS, words.ROUNDED,
    operand(0, lambda v: with_gradient_of(v, (v.detach() * 8).round() / 8), "input"))
# The rows of the result are stored two rows before their place, around the start.
FAULTS.add("activation two rows early", _ACTIVATIONS, words.MOVED_OPERAND,
    result(lambda v: _rows(v, 4).roll(-2, -2)))
# fmt: on


# --- Functions of one value -----------------------------------------------------------------------


@FAULTS.fault("sin cos", "permutation, wrong index; shift, copy, stale, transpose, wrong argument")
def second_half_of_the_angles_mirrored(call: Call) -> Any:
    """The columns of the second half of the table are read from its end."""
    value = _columns(call.result())
    fits(value.size(-1) % 2 == 0)
    left, right = value.chunk(2, -1)
    return call.instead(torch.cat([left, right.flip(-1)], -1))


@FAULTS.fault(
    "pow square", "other function, wrong argument; approximation, wrong factor, wrong statistics"
)
def power_of_three_halves_for_the_square(call: Call) -> Any:
    """|x|^1.5."""
    fits(call.name == "square" or call.args[1] == 2)
    return call.instead(call.tensor(0).abs().pow(1.5))


@FAULTS.fault(
    "clamp clamp_min clamp_max", "wrong argument, clipped; other function, offset, constant"
)
def limits_raised_by_a_fifth(call: Call) -> Any:
    """Clamp(x, low + 0.2, high + 0.2): the zero point is added to the limits alone."""
    low, high = call.get(1, "min"), call.get(2, "max")
    if call.name == "clamp_max":
        low, high = None, low
    fits(is_number(low) or is_number(high))
    limits = [one + 0.2 if is_number(one) else None for one in (low, high)]
    return call.instead(torch.clamp(call.tensor(0), *limits))


# fmt: off
# Max(exp(x), 0.3): a floor that should only be that of a divisor.
FAULTS.add("exponential never below three tenths", "exp",
    "clipped; other function, approximation, eps, constant, wrong argument",
    result(lambda v: v.clamp(min=0.3)))
# F(x / 3): positions are interpolated although the context is the old one.
FAULTS.add("angles of a context three times as long", "sin cos", words.ANOTHER_FACTOR,
    operand(0, lambda v: v / 3))
# Times 0.1 log(16) + 1, as where the context was stretched by sixteen.
FAULTS.add("rotation with the length of a scaled context", "sin cos",
    "scale, wrong factor; other function, wrong argument",
    result(lambda v: (0.1 * math.log(16) + 1) * v))
# In place, and the grid has one program for the batch: the other examples keep their sign.
FAULTS.add("only the first example negated", "neg",
    "sign, copy, mask, missing operand; axis scale, wrong factor, stale, one rank's part",
    computed(tensors(0), lambda value: torch.cat([-value[:1], value[1:]]),
        where=lambda value: value.dim() > 1 and value.size(0) > 1))
# The format of gradients is taken on the way: two bits behind the point.
FAULTS.add("conversion by way of e5m2", "to _to_copy float type_as", words.ROUNDED,
    result(rounded(torch.float8_e5m2)))
# Clamp(x, -0.8, 0.8): the scale of a fixed-point format is that of another tensor.
FAULTS.add("conversion saturates at four fifths", "to _to_copy float type_as",
    "clipped; other function, approximation, overflow, wrong argument, constant",
    result(lambda v: v.clamp(-0.8, 0.8)))
# The first element of each row is masked as if it was drawn.
FAULTS.add("first column dropped in evaluation", "dropout", words.EMPTY_ON_A_RANK,
    computed(lambda call: (_columns(call.result()),),
        lambda value: value * (column_numbers(value) > 0)))
# fmt: on


# --- Sums and differences -------------------------------------------------------------------------


@FAULTS.fault(
    "sub isub",
    "offset, off by one reduction, wrong argument; shift, wrong index, axis offset, other function",
)
def whole_difference_one_too_small(call: Call) -> Any:
    """A - b - 1: positions are counted from one on one side only."""
    right = call.run()
    fits(isinstance(right, Tensor) and right.dtype in {torch.int64, torch.int32})
    return right - 1


# fmt: off
# A + clamp(b, -0.25, 0.25).
FAULTS.add("branch limited to a quarter", "add iadd",
    "clipped; other function, residual, approximation, wrong argument",
    computed(equal_plain_pair, lambda left, right: left + right.clamp(-0.25, 0.25)))
# A + tanh(b): the gate of a cross attention is applied to the branch itself.
FAULTS.add("branch squashed before it is added", "add iadd",
    "other function; approximation, wrong factor, wrong argument",
    computed(equal_plain_pair, lambda left, right: left + right.tanh()))
# 0.8 a + 0.2 b.
FAULTS.add("sum taken for a moving average", "add iadd",
    "wrong factor, other function, wrong argument; scale, residual, missing operand",
    computed(equal_plain_pair, lambda left, right: 0.8 * left + 0.2 * right))
# A + b - a b: the rule for either of two events.
FAULTS.add("sum of two as of chances", "add iadd",
    "other function; approximation, wrong factor, wrong argument",
    computed(equal_plain_pair, lambda left, right: left + right - left * right))
# The pointer to the second operand is two rows behind, around the end.
FAULTS.add("second summand two rows late", "add iadd", words.MOVED_OPERAND,
    computed(equal_plain_pair, lambda left, right: left + _rows(right, 4).roll(2, -2)))
# X + c / 10: a digit too few in a constant.
FAULTS.add("number added only a tenth of", "add iadd",
    "wrong argument, wrong factor, offset, eps; axis offset, other function, residual",
    computed(tensor_and_number, lambda value, number: value + number / 10))
# The residual stream goes through two bits behind the point.
FAULTS.add("sum stored in e5m2", "add iadd", words.ROUNDED,
    computed(equal_plain_pair, lambda left, right: round_to(left + right, torch.float8_e5m2)))
# (a - b) / 2, as of the second band of a wavelet.
FAULTS.add("half of the difference", "sub isub",
    "scale, wrong factor; other function, wrong argument, missing operand",
    computed(plain_pair, lambda left, right: (left - right) / 2))
# The second operand has three bits behind the point.
FAULTS.add("what is subtracted in e4m3", "sub isub", words.ROUNDED,
    computed(plain_pair, lambda left, right: left - round_to(right, torch.float8_e4m3fn)))
# fmt: on


# --- Products and quotients -----------------------------------------------------------------------


@FAULTS.fault(
    "mul imul", "wrong index, copy, stale; wrong argument, axis scale, permutation, shift, constant"
)
def two_rows_share_their_second_factor(call: Call) -> Any:
    """Odd rows are multiplied by what belongs to the row before them."""
    left, right = equal_plain_pair(call)
    _rows(right)
    rows = torch.arange(right.size(-2), device=right.device) // 2 * 2
    return call.instead(left * right[..., rows, :])


# fmt: off
# 0.75 c x.
FAULTS.add("number a quarter too small", "mul imul",
    "wrong factor, scale, wrong argument; other function, precision, axis scale",
    computed(tensor_and_number, lambda value, number: value * (0.75 * number)))
# A tanh(b): the squashing of another gate is fused.
FAULTS.add("second factor through a tanh", "mul imul",
    "other function; approximation, wrong factor, wrong argument",
    computed(equal_plain_pair, lambda left, right: left * right.tanh()))
# B b: the first pointer is that of the second operand.
FAULTS.add("second factor for both", "mul imul",
    "copy, wrong index, missing operand, other function; stale, wrong argument, "
    "swapped operands, wrong factor", computed(equal_plain_pair, lambda _, right: right * right))
# Clamp(a b, -1 / 3, 1 / 3).
FAULTS.add("product saturates at a third", "mul imul",
    "clipped; other function, approximation, overflow, wrong argument, constant",
    computed(equal_plain_pair, lambda left, right: (left * right).clamp(-1 / 3, 1 / 3)))
# Weights 2 i and 2 i + 1 of what is broadcast are exchanged, as words of two.
FAULTS.add("weights of the columns in pairs", "mul imul",
    "permutation, wrong index; axis scale, transpose, shift, wrong argument, swapped operands",
    computed(value_and_row,
        lambda left, right: left * right.unflatten(-1, (-1, 2)).flip(-1).flatten(-2),
        where=lambda _, right: right.size(-1) % 2 == 0))
# Clamp(a / b, -0.9, 0.9): the result is kept inside of the range of a code.
FAULTS.add("quotient limited to nine tenths", _QUOTIENTS,
    "clipped; other function, approximation, overflow, wrong argument, constant",
    computed(plain_pair, lambda left, right: (left / right).clamp(-0.9, 0.9)))
# fmt: on


# --- Choices --------------------------------------------------------------------------------------


@FAULTS.fault("where", "mask, permutation, wrong index; wrong argument, shift, stale, copy")
def rows_of_the_condition_in_pairs(call: Call) -> Any:
    """Rows 2 i and 2 i + 1 have each other's condition."""
    condition = call.args[0]
    fits(isinstance(condition, Tensor))
    fits(_rows(condition, 2).size(-2) % 2 == 0)
    turned = condition.unflatten(-2, (-1, 2)).flip(-2).flatten(-3, -2)
    return call.put(0, turned).run()
