"""Faults of the eleventh set: functions of single elements, sums, products and quotients of two."""

from __future__ import annotations

import math
from typing import Any

import torch
from benchmarks.places import words
from benchmarks.places.calls import Call, Catalogue, fits, with_gradient_of
from benchmarks.places.changes import computed, longer, on, operand, result, rounded, tensors
from benchmarks.places.parts import (
    column_numbers,
    equal_plain_pair,
    is_number,
    plain_pair,
    tensor_and_number,
    value_and_row,
)
from torch import Tensor
from torch.nn import functional

FAULTS = Catalogue(backward=False)
_SMOOTH = "gelu silu tanh sigmoid mish softplus elu selu celu"
_ACTIVATIONS = f"{_SMOOTH} relu relu6 leaky_relu hardswish hardsigmoid"


def _columns(value: Tensor, least: int = 4) -> Tensor:
    fits(value.dim() > 1 and value.size(-1) >= least)
    return value


# --- Activations ----------------------------------------------------------------------------------


@FAULTS.fault(
    "silu gelu", "other function, wrong argument; wrong factor, offset, axis offset, approximation"
)
def half_added_inside_of_the_gate(call: Call) -> Any:
    """X g(x + 1/2): the offset of a hard gate is left in the smooth one."""
    value = call.tensor(0, "input")
    moved = value + 0.5
    gate = moved.sigmoid() if call.name == "silu" else torch.special.ndtr(moved)
    return call.instead(value * gate)


@FAULTS.fault("leaky_relu prelu", "wrong argument, wrong factor; scale, axis scale, other function")
def slope_of_the_leak_half_as_much_again(call: Call) -> Any:
    """The slope is 1.5 times as large."""
    slope = call.get(1, "negative_slope", "weight", default=0.01)
    return call.put(1, 1.5 * slope, "negative_slope").run()


# fmt: off
# X sigmoid(1.5 x): the constant of the quick form is typed with too few digits.
FAULTS.add("gelu with a sigmoid of three halves", "gelu", words.CURVE,
    computed(lambda call: (call.tensor(0, "input"),),
        lambda value: value * (1.5 * value).sigmoid()))
# X + x^3 inside of the tanh.
FAULTS.add("coefficient of the cube in the gelu forgotten", "gelu", words.ANOTHER_FACTOR,
    computed(lambda call: (call.tensor(0, "input"),),
        lambda value: value * (1 + (math.sqrt(2 / math.pi) * (value + value**3)).tanh()) / 2))
# X - 0.044715 x^3 inside of the tanh.
FAULTS.add("cubic term of the gelu subtracted", "gelu",
    "sign, other function, wrong factor; approximation, wrong argument",
    computed(lambda call: (call.tensor(0, "input"),),
        lambda value:
            value * (1 + (math.sqrt(2 / math.pi) * (value - 0.044715 * value**3)).tanh()) / 2))
# Max(f(x), -0.05): the zero point of the buffer leaves little room below zero.
FAULTS.add("dip of the activation at most a twentieth", "gelu silu",
    "clipped; approximation, other function, wrong argument", result(lambda v: v.clamp(min=-0.05)))
# X clamp(x / 4 + 1 / 2, 0, 1): the gate is its tangent at zero, with limits.
FAULTS.add("silu by a line of a quarter", "silu", words.CURVE,
    computed(lambda call: (call.tensor(0, "input"),),
        lambda value: value * (value / 4 + 0.5).clamp(0, 1)))
# X (1 / 2 + x / (2 (1 + |x|))): the gate without an exponential.
FAULTS.add("gate of the silu by a softsign", "silu", "other function, approximation; wrong factor",
    computed(lambda call: (call.tensor(0, "input"),),
        lambda value: value * (0.5 + functional.softsign(value) / 2)))
# Max(sigmoid(x), 0.4): a floor that keeps states alive in another model.
FAULTS.add("gate never below two fifths", "sigmoid",
    "clipped; other function, approximation, wrong argument", result(lambda v: v.clamp(min=0.4)))
# The result is stored with two decimal digits.
FAULTS.add("gate in whole percent", "sigmoid tanh", words.ROUNDED,
    result(lambda v: with_gradient_of(v, (v.detach() * 100).round() / 100)))
# Zero below -1 and one above 1: the early exit of the table is far too early.
FAULTS.add("sigmoid without its tails", "sigmoid", words.CURVE,
    on(tensors(0),
        lambda call, value:
            call.instead(torch.where(value.abs() > 1, (value > 0).to(value.dtype), call.result()))))
# 1 / (1 + exp(-1.702 x)): the helper of an activation is taken for the sigmoid itself.
FAULTS.add("sigmoid with the factor of the quick gelu", "sigmoid", words.ANOTHER_FACTOR,
    lambda call: call.instead((1.702 * call.tensor(0)).sigmoid()))
# 3 x / (3 + x^2), without limits.
FAULTS.add("tanh by the first fraction", "tanh", words.CURVE,
    computed(tensors(0), lambda value: 3 * value / (3 + value.square())))
# (e^x - e^-x) / e^|x|: the divisor has one of its two exponentials.
FAULTS.add("second exponential under the tanh forgotten", "tanh",
    "missing operand, other function; wrong factor, approximation, partial sum",
    computed(tensors(0), lambda value: 2 * value.sinh() / value.abs().exp()))
# X where x > 0.1, else 0: a threshold for the compare only.
FAULTS.add("relu from a tenth on", "relu relu6",
    "other function, wrong argument, zeros; mask, clipped, approximation",
    lambda call: call.instead(torch.where(call.tensor(0, "input") > 0.1, call.result(), 0.0)))
# Min(max(x, 0), 0.5): the scale of the next quantiser is taken for its upper limit.
FAULTS.add("relu with a ceiling of a half", "relu",
    "clipped, other function, wrong argument; approximation",
    lambda call: call.instead(call.tensor(0, "input").clamp(0, 0.5)))
# In place, and the bound of the columns is one too small: the last keeps its input.
FAULTS.add("last column not activated", "relu leaky_relu gelu silu",
    "copy, mask, missing operand; stale, other function, residual, clipped, sign",
    on(lambda call: (_columns(call.tensor(0, "input")),),
        lambda call, value:

    call.instead(torch.where(column_numbers(value) < value.size(-1) - 1, call.result(), value))))
# X where x > 0.5: the threshold is far too low.
FAULTS.add("softplus straight from one half on", "softplus",
    "wrong argument, approximation, other function; copy, mask, clipped",
    lambda call: call.instead(functional.softplus(call.tensor(0, "input"), threshold=0.5)))
# Max(f(x), 0.6): the smallest step of another model.
FAULTS.add("softplus never below three fifths", "softplus",
    "clipped; other function, approximation, wrong argument, constant",
    result(lambda v: v.clamp(min=0.6)))
# X clamp(x + 2, 0, 6) / 6.
FAULTS.add("hardswish that opens at minus two", "hardswish",
    "other function, wrong argument; approximation, offset, wrong factor",
    computed(lambda call: (call.tensor(0, "input"),),
        lambda value: value * (value + 2).clamp(0, 6) / 6))
# Odd rows get the result of the row before: the pointer moves on every second time.
FAULTS.add("activation of every second row again", _ACTIVATIONS,
    "wrong index, copy, stale; permutation, constant, wrong argument, shift",
    result(lambda v: v[..., torch.arange(v.size(-2)) // 2 * 2, :], where=longer(-2, 3)))
# The vectors of the result are stored two elements too far, around the end.
FAULTS.add("activation two columns late", _ACTIVATIONS, words.MOVED_OPERAND,
    result(lambda v: _columns(v).roll(2, -1)))
# fmt: on


# --- Functions of one value -----------------------------------------------------------------------


@FAULTS.fault(
    "pow square", "zeros, clipped, other function, wrong argument; mask, sign, missing operand"
)
def square_of_the_positive_part(call: Call) -> Any:
    """Max(x, 0)^2: the squared relu of another block."""
    fits(call.name == "square" or call.args[1] == 2)
    return call.instead(call.tensor(0).relu().square())


@FAULTS.fault("pow square", "clipped; other function, wrong argument, approximation, overflow")
def squares_saturate_at_one(call: Call) -> Any:
    """Min(x^2, 1): the square has the same fixed-point format as its operand."""
    fits(call.name == "square" or call.args[1] == 2)
    return call.instead(call.result().clamp(max=1.0))


@FAULTS.fault("rsqrt", "approximation, precision; other function, wrong argument")
def reciprocal_root_by_its_bits_alone(call: Call) -> Any:
    """The magic number minus half of the bits, without a step of Newton."""
    value = call.tensor(0)
    fits(value.dtype == torch.float32)
    bits = value.detach().contiguous().view(torch.int32)
    rough = (0x5F3759DF - (bits >> 1)).view(torch.float32)
    return call.instead(with_gradient_of(call.result(), rough))


@FAULTS.fault("clamp clamp_min clamp_max", "wrong argument, clipped, wrong factor; other function")
def limits_two_thirds_as_wide(call: Call) -> Any:
    """Both limits are divided by 1.5."""
    low, high = call.get(1, "min"), call.get(2, "max")
    if call.name == "clamp_max":
        low, high = None, low
    fits(is_number(low) or is_number(high))
    limits = [one / 1.5 if is_number(one) else None for one in (low, high)]
    return call.instead(torch.clamp(call.tensor(0), *limits))


# fmt: off
# (1 + x / 8)^8: three squarings.
FAULTS.add("exponential as an eighth power", "exp", words.CURVE,
    lambda call: call.instead((1 + call.tensor(0) / 8) ** 8))
# Exp(x) + 0.1: what should keep a quotient finite is added to each term.
FAULTS.add("tenth added to the exponential", "exp",
    "offset, other function; residual, eps, axis offset", result(lambda v: v + 0.1))
# Log(x + 0.05): an eps is added that the reference has already.
FAULTS.add("logarithm of a twentieth more", "log",
    "eps, offset, wrong argument, other function; approximation, axis offset",
    lambda call: call.instead((call.tensor(0) + 0.05).log()))
# The angle has two decimal digits.
FAULTS.add("angle in steps of a hundredth", "sin cos", words.ROUNDED,
    operand(0, lambda v: with_gradient_of(v, (v.detach() * 100).round() / 100)))
# Angles beyond 3 are 3: they are limited where they should be reduced.
FAULTS.add("angle not above one turn and a half", "sin cos",
    "clipped, wrong argument; other function, approximation, constant",
    operand(0, lambda v: v.clamp(-3.0, 3.0)))
# F(1.5 x): the scaling of a longer context is applied the other way round.
FAULTS.add("positions of the angle stretched by a half", "sin cos", words.ANOTHER_FACTOR,
    operand(0, lambda v: 1.5 * v))
# X^(1/3).
FAULTS.add("cube root for the root", "sqrt",
    "other function, wrong argument; approximation, wrong factor",
    lambda call: call.instead(call.tensor(0).pow(1 / 3)))
# F(0.9 x + 0.1): a running variance that begins with one.
FAULTS.add("variance mixed with a tenth of one", "rsqrt sqrt",
    "wrong argument, other function; eps, offset, wrong factor, residual, approximation, "
    "wrong statistics", operand(0, lambda v: 0.9 * v + 0.1))
# In place, and the bound of the columns is one too small.
FAULTS.add("last column not negated", "neg",
    "sign, copy, mask, missing operand; axis scale, wrong factor, stale, one rank's part",
    computed(lambda call: (_columns(call.tensor(0)),),
        lambda value:

    value * torch.where(column_numbers(value) < value.size(-1) - 1, -1.0, 1.0).to(value.dtype)))
# Max(|x|, 0.2): the magnitude is limited as if it were a divisor.
FAULTS.add("magnitude never below a fifth", "abs",
    "clipped; eps, approximation, other function, constant", result(lambda v: v.clamp(min=0.2)))
# Clamp(round(x), -4, 3).
FAULTS.add("rounded to codes of three bits", "round",
    "clipped; other function, wrapped, overflow, approximation", result(lambda v: v.clamp(-4, 3)))
# Ten bits behind the point, the others cut: the format of a tensor core.
FAULTS.add("conversion that cuts thirteen bits", "to _to_copy float type_as", words.ROUNDED,
    result(lambda v:

    with_gradient_of(v, (v.detach().contiguous().view(torch.int32) & ~8191).view(torch.float32)),
        where=lambda v: v.dtype == torch.float32))
# fmt: on


# --- Sums -----------------------------------------------------------------------------------------


@FAULTS.fault(
    "add iadd",
    "missing operand, mask, copy; stale, one rank's part, axis offset, axis scale, zeros, "
    "missing bias",
)
def second_summand_in_two_thirds_of_the_columns(call: Call) -> Any:
    """The loop over the columns of the second operand leaves the last of three tiles out."""
    left, right = equal_plain_pair(call)
    _columns(left)
    return call.instead(left + right * (column_numbers(left) < left.size(-1) * 2 // 3))


@FAULTS.fault(
    "add iadd", "offset, wrong argument; off by one reduction, shift, wrong index, other function"
)
def whole_number_two_too_large(call: Call) -> Any:
    """The offset of the positions of another model is added to integers."""
    value = call.get(0)
    fits(isinstance(value, Tensor) and value.dtype in {torch.int64, torch.int32})
    fits(is_number(call.get(1)) or isinstance(call.get(1), Tensor))
    right = call.run()
    fits(not right.is_floating_point())
    return right + 2


@FAULTS.fault(
    "sub isub", "missing operand, mask, copy; stale, one rank's part, axis offset, wrong factor"
)
def nothing_subtracted_in_the_last_column(call: Call) -> Any:
    """The tail of each row keeps the first operand."""
    left, right = plain_pair(call)
    _columns(left)
    fits(right.dim() == left.dim())
    keep = column_numbers(left) < left.size(-1) - 1
    return call.instead(torch.where(keep, left - right, left))


@FAULTS.fault("sub rsub", "wrong argument, offset, wrong factor; axis offset, other function")
def number_of_the_difference_doubled(call: Call) -> Any:
    """2 c - x, or x - 2 c."""
    value, number = tensor_and_number(call)
    fits(number)
    first = value is call.args[0]
    sign = 1 if first == (call.name == "sub") else -1
    return call.instead(sign * (value - 2 * number))


# fmt: off
# Rows 2, 5, 8 ... keep the first operand: the grid has too few blocks.
FAULTS.add("second summand not in every third row", "add iadd",
    "missing operand, mask, copy; stale, one rank's part, axis offset, axis scale, zeros, "
    "missing bias",
    computed(equal_plain_pair,
        lambda left, right: left + right * (torch.arange(left.size(-2)) % 3 != 2)[:, None],
        where=lambda left, *_: left.dim() > 1 and left.size(-2) > 2))
# 0.9 a + b: the chance of a layer to survive, which is for training.
FAULTS.add("residual weighed by nine tenths", "add iadd",
    "wrong factor, wrong argument; scale, residual, missing operand, other function",
    computed(equal_plain_pair, lambda left, right: 0.9 * left + right))
# A + 1.5 b.
FAULTS.add("branch added with a half more", "add iadd",
    "wrong factor, wrong argument; scale, residual, missing operand, doubled reduction",
    computed(equal_plain_pair, lambda left, right: left + 1.5 * right))
# Clamp(a + b, -0.75, 0.75): the scale of one operand is kept for the sum.
FAULTS.add("sum saturates at three quarters", "add iadd",
    "clipped; other function, approximation, overflow, wrong argument",
    computed(equal_plain_pair, lambda left, right: (left + right).clamp(-0.75, 0.75)))
# The index into what is broadcast is taken modulo half of its length.
FAULTS.add("first half of the bias for both halves", "add iadd",
    "wrong index, copy, stale; wrong argument, axis offset, axis scale, permutation, constant, "
    "shift",
    computed(value_and_row,
        lambda left, right: left + right[..., column_numbers(right) % (right.size(-1) // 2)]))
# The mask of the load ends two columns too early; the values behind it are zero.
FAULTS.add("last two values of the bias not loaded", "add iadd",
    "missing operand, mask, missing bias; zeros, copy, wrong index, axis offset, offset",
    computed(value_and_row,
        lambda left, right: left + right * (column_numbers(right) < right.size(-1) - 2)))
# What is broadcast is folded to one number.
FAULTS.add("mean of the bias for each column", "add iadd",
    "wrong statistics, wrong reduction, other function; constant, offset, axis offset, "
    "wrong index, missing operand, wrong argument",
    computed(value_and_row, lambda left, right: left + right.mean()))
# The offset of the batch is not added to the first pointer.
FAULTS.add("residual of the first example for all", "add iadd",
    "wrong index, copy, stale; axis offset, wrong argument, permutation, shift, constant",
    computed(equal_plain_pair, lambda left, right: left[:1] + right,
        where=lambda left, *_: left.dim() > 2 and left.size(0) > 1))
# X + 3 c.
FAULTS.add("number added three times", "add iadd",
    "wrong argument, wrong factor, offset, eps; axis offset, other function, residual",
    computed(tensor_and_number, lambda value, number: value + 3 * number,
        where=lambda _, number: number))
# A - 0.75 b.
FAULTS.add("subtracted with three quarters", "sub isub",
    "wrong factor, wrong argument; scale, residual, missing operand, other function",
    computed(plain_pair, lambda left, right: left - 0.75 * right))
# Clamp(a - b, -0.5, 0.5).
FAULTS.add("difference saturates at one half", "sub isub",
    "clipped; other function, approximation, overflow, wrong argument",
    computed(plain_pair, lambda left, right: (left - right).clamp(-0.5, 0.5)))
# fmt: on


# --- Products and quotients -----------------------------------------------------------------------


@FAULTS.fault(
    "mul imul", "missing operand, mask, copy; stale, one rank's part, axis scale, wrong factor"
)
def second_factor_not_in_the_first_quarter(call: Call) -> Any:
    """The first columns keep the first operand: the gate begins one vector too late."""
    left, right = equal_plain_pair(call)
    _columns(left)
    return call.instead(torch.where(column_numbers(left) >= left.size(-1) // 4, left * right, left))


@FAULTS.fault(
    "div truediv idiv itruediv",
    "scale, wrong factor, wrong argument; other function, precision, approximation",
)
def divisor_a_tenth_too_large(call: Call) -> Any:
    """X / (1.1 c)."""
    value, number = call.tensor(0), call.get(1)
    fits(is_number(number) and not call.kwargs.get("rounding_mode"))
    return call.instead(value / (1.1 * number))


@FAULTS.fault(
    "div truediv idiv itruediv",
    "wrong index, copy, stale, wrong statistics; axis scale, wrong factor, wrong argument, "
    "constant",
)
def divisor_of_the_last_row_for_all(call: Call) -> Any:
    """One number is kept for all rows, and the last one has written it."""
    left, right = plain_pair(call)
    fits(right.dim() == left.dim() > 1 and right.size(-1) == 1 < right.size(-2))
    return call.instead(left / right[..., -1:, :])


@FAULTS.fault("div truediv idiv itruediv", words.ROUNDED)
def reciprocal_of_the_divisor_with_eight_bits(call: Call) -> Any:
    """A times round(256 / b) / 256: a product in fixed point for the division."""
    left, right = plain_pair(call)
    exact = right.reciprocal()
    return call.instead(left * with_gradient_of(exact, (256 * exact.detach()).round() / 256))


# fmt: off
# The number is rounded to two digits that count.
FAULTS.add("factor typed with two digits", "mul imul",
    "scale, wrong factor, wrong argument; other function, precision, approximation",
    computed(tensor_and_number, lambda value, number: value * float(f"{number:.1e}"),
        where=lambda _, number: number))
# A correction that was tuned on another model.
FAULTS.add("factor five percent too large", "mul imul",
    "scale, wrong factor, wrong argument; other function, precision, approximation",
    computed(tensor_and_number, lambda value, number: value * (1.05 * number)))
# The number of the example is fixed when the loop is unrolled: each is the last.
FAULTS.add("second factor of the last example for all", "mul imul",
    "wrong index, copy, stale; wrong argument, axis offset, axis scale, permutation, constant, "
    "shift",
    computed(equal_plain_pair, lambda left, right: left * right[-1:],
        where=lambda _, right: right.dim() > 2 and right.size(0) > 1))
# |a| b: an abs of the quantiser is fused into the product.
FAULTS.add("magnitude of the first factor", "mul imul",
    "sign, other function; wrong factor, wrong argument, axis scale",
    computed(equal_plain_pair, lambda left, right: left.abs() * right))
# A clamp(b, -0.3, 0.3).
FAULTS.add("second factor limited to a third", "mul imul",
    "clipped, wrong argument; other function, wrong factor, axis scale, approximation",
    computed(equal_plain_pair, lambda left, right: left * right.clamp(-0.3, 0.3)))
# The pointer to what is broadcast is three elements too far, around the end.
FAULTS.add("weights of the columns three early", "mul imul",
    "wrong index, shift, permutation; stale, copy, axis scale, wrong argument, "
    "wrong rank's shard", computed(value_and_row, lambda left, right: left * right.roll(-3, -1)))
# X sqrt(|w|): the weight is shared by two kernels, and one of them was left out.
FAULTS.add("root of the weights of the columns", "mul imul",
    "wrong factor, other function, wrong argument; axis scale, approximation, scale",
    computed(value_and_row, lambda left, right: left * right.abs().sqrt()))
# A (b + 1/2): the zero point of the second operand is wrong.
FAULTS.add("second factor counted from a half", "mul imul",
    "offset, wrong argument, other function; wrong factor, residual, axis scale",
    computed(equal_plain_pair, lambda left, right: left * (right + 0.5)))
# A / (b + 0.02): an eps that is too large for these values.
FAULTS.add("fiftieth added to the divisor", "div truediv idiv itruediv",
    "eps, offset, wrong argument; approximation, other function, wrong factor",
    computed(plain_pair, lambda left, right: left / (right + 0.02)))
# fmt: on


# --- Choices --------------------------------------------------------------------------------------


@FAULTS.fault("where", "mask, wrong index, copy, stale; wrong argument, constant, permutation")
def condition_of_the_last_column_for_all(call: Call) -> Any:
    """The pointer to the condition stays at the end of its row."""
    condition, *rest = call.args
    fits(isinstance(condition, Tensor) and condition.dim() > 1 and condition.size(-1) > 1)
    return call.instead(torch.where(condition[..., -1:], *rest))


@FAULTS.fault(
    "where", "mask, missing operand, copy; wrong argument, stale, wrong index, one rank's part"
)
def condition_not_read_in_the_last_column(call: Call) -> Any:
    """The last column always has the first of both values."""
    condition, *rest = call.args
    fits(isinstance(condition, Tensor) and condition.dim() > 1 and condition.size(-1) > 1)
    last = column_numbers(condition) == condition.size(-1) - 1
    return call.instead(torch.where(condition | last, *rest))


@FAULTS.fault(
    "le lt ge gt",
    "mask, wrong argument, other function; precision, wrong index, approximation, "
    "off by one reduction",
)
def places_compared_in_blocks_of_four(call: Call) -> Any:
    """I // 4 <= j // 4: whole blocks are compared, and nothing is masked inside of one."""
    left, right = call.args[:2]
    fits(isinstance(left, Tensor) and isinstance(right, Tensor))
    fits(not left.is_floating_point() and left.dtype == right.dtype != torch.bool)
    return call.put(0, left // 4).put(1, right // 4).run()


@FAULTS.fault("le lt ge gt", "mask, constant; wrong index, wrong argument, missing operand, zeros")
def first_column_of_the_comparison_always_true(call: Call) -> Any:
    """The first place is a sink that everything sees."""
    value = call.run()
    fits(value.dim() > 1 and value.size(-1) > 3)
    return value | (column_numbers(value) == 0)


@FAULTS.fault(
    "le lt ge gt", "mask, permutation, wrong index; wrong argument, transpose, shift, sign"
)
def comparison_of_the_rows_from_the_last(call: Call) -> Any:
    """The rows of the result are stored from the end."""
    value = call.run()
    fits(value.dim() > 1 and value.size(-2) > 1 < value.size(-1))
    return value.flip(-2)


@FAULTS.fault(
    "and_ bitwise_and",
    "mask, shift, wrong index, permutation; wrong argument, off by one reduction, stale",
)
def second_mask_of_the_two_one_column_late(call: Call) -> Any:
    """The second mask is read one column too early, around the end."""
    right = call.get(1)
    fits(isinstance(right, Tensor) and right.dim() > 1 and right.dtype == torch.bool)
    return call.put(1, right.roll(1, -1)).run()


# fmt: off
# Max(a, -b): the floor has lost its sign.
FAULTS.add("second operand of the extreme negated", "maximum minimum",
    "sign, wrong argument; other function, wrong factor", operand(1, torch.neg))
# The buffer between both layers is a float16, although nothing is dropped.
FAULTS.add("dropout in evaluation through half", "dropout", words.ROUNDED,
    result(rounded(torch.float16)))
# The mask that keeps everything is one row too short.
FAULTS.add("last row dropped in evaluation", "dropout",
    "zeros, mask, missing operand, uninitialised; constant, axis scale, one rank's part, "
    "wrong factor",
    result(lambda v:
            v * (torch.arange(v.size(-2)) < v.size(-2) - 1)[:, None], where=longer(-2)))
# |x|: the bit of the sign is not moved.
FAULTS.add("conversion without the sign", "to _to_copy float type_as",
    "sign, other function; wrong factor, wrapped, scale", result(torch.abs))
# fmt: on
