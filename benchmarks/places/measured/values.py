"""Faults for measuring: functions of single elements, sums, products and quotients of two."""

from __future__ import annotations

import math
from typing import Any

import torch
from benchmarks.places.calls import Call, Catalogue, fits, with_gradient_of
from torch import Tensor

FAULTS = Catalogue()
_ACTIVATIONS = "gelu silu relu tanh sigmoid leaky_relu elu softplus hardswish"
_QUOTIENTS = "div truediv idiv itruediv"
_ROUNDED: dict[str, Any] = {
    "kinds": ["precision"],
    "loose": ["approximation", "other function", "wrong argument"],
    "backward": False,
}
_CURVE: dict[str, Any] = {
    "kinds": ["other function"],
    "loose": ["approximation", "wrong factor", "wrong argument"],
    "backward": False,
}
_LIMITED: dict[str, Any] = {
    "kinds": ["clipped"],
    "loose": ["other function", "approximation", "overflow", "wrong argument", "constant"],
    "backward": False,
}
_WEIGHED: dict[str, Any] = {
    "kinds": ["wrong factor", "scale", "wrong argument"],
    "loose": ["other function", "precision", "axis scale"],
    "backward": False,
}
_SHIFTED: dict[str, Any] = {
    "kinds": ["shift", "wrong index", "permutation"],
    "loose": ["stale", "copy", "wrong argument", "wrong rank's shard"],
    "backward": False,
}
_EMPTY: dict[str, Any] = {
    "kinds": ["zeros", "mask", "uninitialised"],
    "loose": ["constant", "missing operand", "axis scale", "wrong factor", "one rank's part"],
    "backward": False,
}


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _with_number(call: Call) -> tuple[Tensor, float]:
    """A floating-point tensor and a number, in either order."""
    value, number = call.args[:2]
    if _number(value):
        value, number = number, value
    fits(_number(number) and isinstance(value, Tensor) and value.is_floating_point())
    return value, number


def _pair(call: Call) -> tuple[Tensor, Tensor]:
    """Two floating-point operands, without a factor or a mode."""
    left, right = call.tensor(0), call.tensor(1)
    fits(call.kwargs.get("alpha", 1) == 1 and not call.kwargs.get("rounding_mode"))
    fits(left.numel() > 1)
    return left, right


def _alike(call: Call) -> tuple[Tensor, Tensor]:
    """Two floating-point operands of one shape."""
    left, right = _pair(call)
    fits(left.shape == right.shape)
    return left, right


def _to_row(call: Call) -> tuple[Tensor, Tensor]:
    """The larger operand, and the one that has a value for each column only."""
    left, right = _pair(call)
    if right.numel() > left.numel():
        left, right = right, left
    fits(left.numel() > right.numel() == right.size(-1) > 3)
    return left, right


def _rows(value: Tensor, least: int = 3) -> Tensor:
    fits(value.dim() > 1 and value.size(-2) >= least)
    return value


def _columns(value: Tensor, least: int = 4) -> Tensor:
    fits(value.dim() > 1 and value.size(-1) >= least)
    return value


def _place(value: Tensor) -> Tensor:
    """The number of each column."""
    return torch.arange(value.size(-1), device=value.device)


def _stored(value: Tensor, dtype: torch.dtype) -> Tensor:
    """The value in a narrower format, with its own gradient."""
    return with_gradient_of(value, value.detach().to(dtype).to(value.dtype))


# --- Activations ----------------------------------------------------------------------------------


@FAULTS.fault("gelu", **_CURVE)
def gate_of_the_gelu_squared(call: Call) -> Any:
    """X times the square of the distribution function: the epilogue multiplies by it once more."""
    value = call.tensor(0, "input")
    return call.instead(value * torch.special.ndtr(value).square())


@FAULTS.fault(
    "gelu silu tanh",
    kinds=["clipped"],
    loose=["other function", "approximation", "constant", "wrong argument"],
    backward=False,
)
def argument_never_below_minus_three_quarters(call: Call) -> Any:
    """F(max(x, -0.75)): the table of the function begins there."""
    return call.put(0, call.tensor(0, "input").clamp(min=-0.75), "input").run()


@FAULTS.fault(
    "gelu silu relu",
    kinds=["scale", "wrong factor"],
    loose=["other function", "wrong argument"],
    backward=False,
)
def activation_five_quarters_as_large(call: Call) -> Any:
    """The division by the chance to be kept, 0.8, is fused and stays in evaluation."""
    return call.instead(1.25 * call.result())


@FAULTS.fault(
    "gelu silu sigmoid tanh",
    kinds=["approximation", "other function"],
    loose=["precision", "wrong argument"],
    backward=False,
)
def straight_between_whole_and_half_numbers(call: Call) -> Any:
    """A table with two entries for each unit, and straight lines between them."""
    value = call.tensor(0, "input")
    low = (2 * value.detach()).floor() / 2
    below, above = (call.put(0, one, "input").run() for one in (low, low + 0.5))
    return call.instead(below + 2 * (value - low) * (above - below))


@FAULTS.fault(
    "relu",
    kinds=["other function"],
    loose=["sign", "wrong argument", "residual"],
    backward=False,
)
def magnitude_for_the_positive_part(call: Call) -> Any:
    """|x|: the bit of the sign is cleared where the whole value should be."""
    return call.instead(call.tensor(0, "input").abs())


@FAULTS.fault(
    "relu",
    kinds=["offset", "other function", "wrong argument"],
    loose=["residual", "axis offset", "clipped"],
    backward=False,
)
def relu_of_an_argument_raised_by_three_twentieths(call: Call) -> Any:
    """Max(x + 0.15, 0): a zero point is added before and never taken off."""
    return call.instead((call.tensor(0, "input") + 0.15).relu())


@FAULTS.fault("sigmoid", **_LIMITED)
def gate_never_above_three_fifths(call: Call) -> Any:
    """Min(sigmoid(x), 0.6)."""
    return call.instead(call.result().clamp(max=0.6))


@FAULTS.fault(
    "sigmoid",
    kinds=["other function", "approximation"],
    loose=["wrong argument", "wrong factor", "precision"],
    backward=False,
)
def tangent_for_the_sigmoid(call: Call) -> Any:
    """1 / 2 + x / 4, without limits."""
    return call.instead(0.5 + call.tensor(0, "input") / 4)


@FAULTS.fault("tanh", **_CURVE)
def error_function_for_the_tanh(call: Call) -> Any:
    """Erf(x): the other gate of a gelu is taken."""
    return call.instead(call.tensor(0, "input").erf())


@FAULTS.fault(_ACTIVATIONS, **_ROUNDED)
def argument_of_the_activation_in_eighths(call: Call) -> Any:
    """The input has three bits behind the point."""
    value = call.tensor(0, "input")
    coarse = with_gradient_of(value, (value.detach() * 8).round() / 8)
    return call.put(0, coarse, "input").run()


@FAULTS.fault(_ACTIVATIONS, **_SHIFTED)
def activation_two_rows_early(call: Call) -> Any:
    """The rows of the result are stored two rows before their place, around the start."""
    return call.instead(_rows(call.result(), 4).roll(-2, -2))


# --- Functions of one value -----------------------------------------------------------------------


@FAULTS.fault(
    "exp",
    kinds=["clipped"],
    loose=["other function", "approximation", "eps", "constant", "wrong argument"],
    backward=False,
)
def exponential_never_below_three_tenths(call: Call) -> Any:
    """Max(exp(x), 0.3): a floor that should only be that of a divisor."""
    return call.instead(call.result().clamp(min=0.3))


@FAULTS.fault(
    "sin cos",
    kinds=["wrong factor", "wrong argument", "other function"],
    loose=["scale", "approximation"],
    backward=False,
)
def angles_of_a_context_three_times_as_long(call: Call) -> Any:
    """F(x / 3): positions are interpolated although the context is the old one."""
    return call.put(0, call.tensor(0) / 3).run()


@FAULTS.fault(
    "sin cos",
    kinds=["scale", "wrong factor"],
    loose=["other function", "wrong argument"],
    backward=False,
)
def rotation_with_the_length_of_a_scaled_context(call: Call) -> Any:
    """Times 0.1 log(16) + 1, as where the context was stretched by sixteen."""
    return call.instead((0.1 * math.log(16) + 1) * call.result())


@FAULTS.fault(
    "sin cos",
    kinds=["permutation", "wrong index"],
    loose=["shift", "copy", "stale", "transpose", "wrong argument"],
    backward=False,
)
def second_half_of_the_angles_mirrored(call: Call) -> Any:
    """The columns of the second half of the table are read from its end."""
    value = _columns(call.result())
    fits(value.size(-1) % 2 == 0)
    left, right = value.chunk(2, -1)
    return call.instead(torch.cat([left, right.flip(-1)], -1))


@FAULTS.fault(
    "pow square",
    kinds=["other function", "wrong argument"],
    loose=["approximation", "wrong factor", "wrong statistics"],
    backward=False,
)
def power_of_three_halves_for_the_square(call: Call) -> Any:
    """|x|^1.5."""
    fits(call.name == "square" or call.args[1] == 2)
    return call.instead(call.tensor(0).abs().pow(1.5))


@FAULTS.fault(
    "neg",
    kinds=["sign", "copy", "mask", "missing operand"],
    loose=["axis scale", "wrong factor", "stale", "one rank's part"],
    backward=False,
)
def only_the_first_example_negated(call: Call) -> Any:
    """In place, and the grid has one program for the batch: the other examples keep their sign."""
    value = call.tensor(0)
    fits(value.dim() > 1 and value.size(0) > 1)
    return call.instead(torch.cat([-value[:1], value[1:]]))


@FAULTS.fault(
    "clamp clamp_min clamp_max",
    kinds=["wrong argument", "clipped"],
    loose=["other function", "offset", "constant"],
    backward=False,
)
def limits_raised_by_a_fifth(call: Call) -> Any:
    """Clamp(x, low + 0.2, high + 0.2): the zero point is added to the limits alone."""
    low, high = call.get(1, "min"), call.get(2, "max")
    if call.name == "clamp_max":
        low, high = None, low
    fits(_number(low) or _number(high))
    limits = [one + 0.2 if _number(one) else None for one in (low, high)]
    return call.instead(torch.clamp(call.tensor(0), *limits))


@FAULTS.fault("to _to_copy float type_as", **_ROUNDED)
def conversion_by_way_of_e5m2(call: Call) -> Any:
    """The format of gradients is taken on the way: two bits behind the point."""
    return call.instead(_stored(call.result(), torch.float8_e5m2))


@FAULTS.fault("to _to_copy float type_as", **_LIMITED)
def conversion_saturates_at_four_fifths(call: Call) -> Any:
    """Clamp(x, -0.8, 0.8): the scale of a fixed-point format is that of another tensor."""
    return call.instead(call.result().clamp(-0.8, 0.8))


@FAULTS.fault("dropout", **_EMPTY)
def first_column_dropped_in_evaluation(call: Call) -> Any:
    """The first element of each row is masked as if it was drawn."""
    value = _columns(call.result())
    return call.instead(value * (_place(value) > 0))


# --- Sums and differences -------------------------------------------------------------------------


@FAULTS.fault(
    "add iadd",
    kinds=["clipped"],
    loose=["other function", "residual", "approximation", "wrong argument"],
    backward=False,
)
def branch_limited_to_a_quarter(call: Call) -> Any:
    """A + clamp(b, -0.25, 0.25)."""
    left, right = _alike(call)
    return call.instead(left + right.clamp(-0.25, 0.25))


@FAULTS.fault("add iadd", **_CURVE)
def branch_squashed_before_it_is_added(call: Call) -> Any:
    """A + tanh(b): the gate of a cross attention is applied to the branch itself."""
    left, right = _alike(call)
    return call.instead(left + right.tanh())


@FAULTS.fault(
    "add iadd",
    kinds=["wrong factor", "other function", "wrong argument"],
    loose=["scale", "residual", "missing operand"],
    backward=False,
)
def sum_taken_for_a_moving_average(call: Call) -> Any:
    """0.8 a + 0.2 b."""
    left, right = _alike(call)
    return call.instead(0.8 * left + 0.2 * right)


@FAULTS.fault("add iadd", **_CURVE)
def sum_of_two_as_of_chances(call: Call) -> Any:
    """A + b - a b: the rule for either of two events."""
    left, right = _alike(call)
    return call.instead(left + right - left * right)


@FAULTS.fault("add iadd", **_SHIFTED)
def second_summand_two_rows_late(call: Call) -> Any:
    """The pointer to the second operand is two rows behind, around the end."""
    left, right = _alike(call)
    return call.instead(left + _rows(right, 4).roll(2, -2))


@FAULTS.fault(
    "add iadd",
    kinds=["wrong argument", "wrong factor", "offset", "eps"],
    loose=["axis offset", "other function", "residual"],
    backward=False,
)
def number_added_only_a_tenth_of(call: Call) -> Any:
    """X + c / 10: a digit too few in a constant."""
    value, number = _with_number(call)
    return call.instead(value + number / 10)


@FAULTS.fault("add iadd", **_ROUNDED)
def sum_stored_in_e5m2(call: Call) -> Any:
    """The residual stream goes through two bits behind the point."""
    left, right = _alike(call)
    return call.instead(_stored(left + right, torch.float8_e5m2))


@FAULTS.fault(
    "sub isub",
    kinds=["scale", "wrong factor"],
    loose=["other function", "wrong argument", "missing operand"],
    backward=False,
)
def half_of_the_difference(call: Call) -> Any:
    """(a - b) / 2, as of the second band of a wavelet."""
    left, right = _pair(call)
    return call.instead((left - right) / 2)


@FAULTS.fault("sub isub", **_ROUNDED)
def what_is_subtracted_in_e4m3(call: Call) -> Any:
    """The second operand has three bits behind the point."""
    left, right = _pair(call)
    return call.instead(left - _stored(right, torch.float8_e4m3fn))


@FAULTS.fault(
    "sub isub",
    kinds=["offset", "off by one reduction", "wrong argument"],
    loose=["shift", "wrong index", "axis offset", "other function"],
    backward=False,
)
def whole_difference_one_too_small(call: Call) -> Any:
    """A - b - 1: positions are counted from one on one side only."""
    right = call.run()
    fits(isinstance(right, Tensor) and right.dtype in {torch.int64, torch.int32})
    return right - 1


# --- Products and quotients -----------------------------------------------------------------------


@FAULTS.fault("mul imul", **_WEIGHED)
def number_a_quarter_too_small(call: Call) -> Any:
    """0.75 c x."""
    value, number = _with_number(call)
    return call.instead(value * (0.75 * number))


@FAULTS.fault("mul imul", **_CURVE)
def second_factor_through_a_tanh(call: Call) -> Any:
    """A tanh(b): the squashing of another gate is fused."""
    left, right = _alike(call)
    return call.instead(left * right.tanh())


@FAULTS.fault(
    "mul imul",
    kinds=["copy", "wrong index", "missing operand", "other function"],
    loose=["stale", "wrong argument", "swapped operands", "wrong factor"],
    backward=False,
)
def second_factor_for_both(call: Call) -> Any:
    """B b: the first pointer is that of the second operand."""
    _, right = _alike(call)
    return call.instead(right * right)


@FAULTS.fault("mul imul", **_LIMITED)
def product_saturates_at_a_third(call: Call) -> Any:
    """Clamp(a b, -1 / 3, 1 / 3)."""
    left, right = _alike(call)
    return call.instead((left * right).clamp(-1 / 3, 1 / 3))


@FAULTS.fault(
    "mul imul",
    kinds=["wrong index", "copy", "stale"],
    loose=["wrong argument", "axis scale", "permutation", "shift", "constant"],
    backward=False,
)
def two_rows_share_their_second_factor(call: Call) -> Any:
    """Odd rows are multiplied by what belongs to the row before them."""
    left, right = _alike(call)
    _rows(right)
    rows = torch.arange(right.size(-2), device=right.device) // 2 * 2
    return call.instead(left * right[..., rows, :])


@FAULTS.fault(
    "mul imul",
    kinds=["permutation", "wrong index"],
    loose=["axis scale", "transpose", "shift", "wrong argument", "swapped operands"],
    backward=False,
)
def weights_of_the_columns_in_pairs(call: Call) -> Any:
    """Weights 2 i and 2 i + 1 of what is broadcast are exchanged, as words of two."""
    left, right = _to_row(call)
    fits(right.size(-1) % 2 == 0)
    return call.instead(left * right.unflatten(-1, (-1, 2)).flip(-1).flatten(-2))


@FAULTS.fault(_QUOTIENTS, **_LIMITED)
def quotient_limited_to_nine_tenths(call: Call) -> Any:
    """Clamp(a / b, -0.9, 0.9): the result is kept inside of the range of a code."""
    left, right = _pair(call)
    return call.instead((left / right).clamp(-0.9, 0.9))


# --- Choices --------------------------------------------------------------------------------------


@FAULTS.fault(
    "where",
    kinds=["mask", "permutation", "wrong index"],
    loose=["wrong argument", "shift", "stale", "copy"],
    backward=False,
)
def rows_of_the_condition_in_pairs(call: Call) -> Any:
    """Rows 2 i and 2 i + 1 have each other's condition."""
    condition = call.args[0]
    fits(isinstance(condition, Tensor))
    fits(_rows(condition, 2).size(-2) % 2 == 0)
    turned = condition.unflatten(-2, (-1, 2)).flip(-2).flatten(-3, -2)
    return call.put(0, turned).run()
