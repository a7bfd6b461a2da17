"""Faults of the eleventh set: functions of single elements, sums, products and quotients of two."""

from __future__ import annotations

import math
from typing import Any

import torch
from benchmarks.places.calls import Call, Catalogue, fits, with_gradient_of
from torch import Tensor
from torch.nn import functional

FAULTS = Catalogue()
_SMOOTH = "gelu silu tanh sigmoid mish softplus elu selu celu"
_ACTIVATIONS = f"{_SMOOTH} relu relu6 leaky_relu hardswish hardsigmoid"
_ROUNDED: dict[str, Any] = {
    "kinds": ["precision"],
    "loose": ["approximation", "other function", "wrong argument"],
    "backward": False,
}
_NUMBER: dict[str, Any] = {
    "kinds": ["scale", "wrong factor", "wrong argument"],
    "loose": ["other function", "precision", "approximation"],
    "backward": False,
}
_CURVE: dict[str, Any] = {
    "kinds": ["other function", "approximation"],
    "loose": ["wrong factor", "wrong argument", "precision"],
    "backward": False,
}
_PARTLY: dict[str, Any] = {
    "kinds": ["missing operand", "mask", "copy"],
    "loose": ["stale", "one rank's part", "axis offset", "axis scale", "zeros", "missing bias"],
    "backward": False,
}
_AGAIN: dict[str, Any] = {
    "kinds": ["wrong index", "copy", "stale"],
    "loose": ["wrong argument", "axis offset", "axis scale", "permutation", "constant", "shift"],
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


def _columns(value: Tensor, least: int = 4) -> Tensor:
    fits(value.dim() > 1 and value.size(-1) >= least)
    return value


def _place(value: Tensor) -> Tensor:
    """The number of each column."""
    return torch.arange(value.size(-1), device=value.device)


# --- Activations ----------------------------------------------------------------------------------


@FAULTS.fault("gelu", **_CURVE)
def gelu_with_a_sigmoid_of_three_halves(call: Call) -> Any:
    """X sigmoid(1.5 x): the constant of the quick form is typed with too few digits."""
    value = call.tensor(0, "input")
    return call.instead(value * (1.5 * value).sigmoid())


@FAULTS.fault(
    "gelu",
    kinds=["other function", "wrong argument", "wrong factor"],
    loose=["approximation", "scale"],
    backward=False,
)
def coefficient_of_the_cube_in_the_gelu_forgotten(call: Call) -> Any:
    """X + x^3 inside of the tanh."""
    value = call.tensor(0, "input")
    inner = math.sqrt(2 / math.pi) * (value + value**3)
    return call.instead(value * (1 + inner.tanh()) / 2)


@FAULTS.fault(
    "gelu",
    kinds=["sign", "other function", "wrong factor"],
    loose=["approximation", "wrong argument"],
    backward=False,
)
def cubic_term_of_the_gelu_subtracted(call: Call) -> Any:
    """X - 0.044715 x^3 inside of the tanh."""
    value = call.tensor(0, "input")
    inner = math.sqrt(2 / math.pi) * (value - 0.044715 * value**3)
    return call.instead(value * (1 + inner.tanh()) / 2)


@FAULTS.fault(
    "gelu silu",
    kinds=["clipped"],
    loose=["approximation", "other function", "wrong argument"],
    backward=False,
)
def dip_of_the_activation_at_most_a_twentieth(call: Call) -> Any:
    """Max(f(x), -0.05): the zero point of the buffer leaves little room below zero."""
    return call.instead(call.result().clamp(min=-0.05))


@FAULTS.fault(
    "silu gelu",
    kinds=["other function", "wrong argument"],
    loose=["wrong factor", "offset", "axis offset", "approximation"],
    backward=False,
)
def half_added_inside_of_the_gate(call: Call) -> Any:
    """X g(x + 1/2): the offset of a hard gate is left in the smooth one."""
    value = call.tensor(0, "input")
    moved = value + 0.5
    gate = moved.sigmoid() if call.name == "silu" else torch.special.ndtr(moved)
    return call.instead(value * gate)


@FAULTS.fault("silu", **_CURVE)
def silu_by_a_line_of_a_quarter(call: Call) -> Any:
    """X clamp(x / 4 + 1 / 2, 0, 1): the gate is its tangent at zero, with limits."""
    value = call.tensor(0, "input")
    return call.instead(value * (value / 4 + 0.5).clamp(0, 1))


@FAULTS.fault(
    "silu",
    kinds=["other function", "approximation"],
    loose=["wrong factor"],
    backward=False,
)
def gate_of_the_silu_by_a_softsign(call: Call) -> Any:
    """X (1 / 2 + x / (2 (1 + |x|))): the gate without an exponential."""
    value = call.tensor(0, "input")
    return call.instead(value * (0.5 + functional.softsign(value) / 2))


@FAULTS.fault(
    "sigmoid",
    kinds=["clipped"],
    loose=["other function", "approximation", "wrong argument"],
    backward=False,
)
def gate_never_below_two_fifths(call: Call) -> Any:
    """Max(sigmoid(x), 0.4): a floor that keeps states alive in another model."""
    return call.instead(call.result().clamp(min=0.4))


@FAULTS.fault("sigmoid tanh", **_ROUNDED)
def gate_in_whole_percent(call: Call) -> Any:
    """The result is stored with two decimal digits."""
    value = call.result()
    return call.instead(with_gradient_of(value, (value.detach() * 100).round() / 100))


@FAULTS.fault("sigmoid", **_CURVE)
def sigmoid_without_its_tails(call: Call) -> Any:
    """Zero below -1 and one above 1: the early exit of the table is far too early."""
    value = call.tensor(0)
    whole = (value > 0).to(value.dtype)
    return call.instead(torch.where(value.abs() > 1, whole, call.result()))


@FAULTS.fault(
    "sigmoid",
    kinds=["wrong factor", "wrong argument", "other function"],
    loose=["scale", "approximation"],
    backward=False,
)
def sigmoid_with_the_factor_of_the_quick_gelu(call: Call) -> Any:
    """1 / (1 + exp(-1.702 x)): the helper of an activation is taken for the sigmoid itself."""
    return call.instead((1.702 * call.tensor(0)).sigmoid())


@FAULTS.fault("tanh", **_CURVE)
def tanh_by_the_first_fraction(call: Call) -> Any:
    """3 x / (3 + x^2), without limits."""
    value = call.tensor(0)
    return call.instead(3 * value / (3 + value.square()))


@FAULTS.fault(
    "tanh",
    kinds=["missing operand", "other function"],
    loose=["wrong factor", "approximation", "partial sum"],
    backward=False,
)
def second_exponential_under_the_tanh_forgotten(call: Call) -> Any:
    """(e^x - e^-x) / e^|x|: the divisor has one of its two exponentials."""
    value = call.tensor(0)
    return call.instead(2 * value.sinh() / value.abs().exp())


@FAULTS.fault(
    "relu relu6",
    kinds=["other function", "wrong argument", "zeros"],
    loose=["mask", "clipped", "approximation"],
    backward=False,
)
def relu_from_a_tenth_on(call: Call) -> Any:
    """X where x > 0.1, else 0: a threshold for the compare only."""
    value = call.tensor(0, "input")
    return call.instead(torch.where(value > 0.1, call.result(), 0.0))


@FAULTS.fault(
    "relu",
    kinds=["clipped", "other function", "wrong argument"],
    loose=["approximation"],
    backward=False,
)
def relu_with_a_ceiling_of_a_half(call: Call) -> Any:
    """Min(max(x, 0), 0.5): the scale of the next quantiser is taken for its upper limit."""
    return call.instead(call.tensor(0, "input").clamp(0, 0.5))


@FAULTS.fault(
    "relu leaky_relu gelu silu",
    kinds=["copy", "mask", "missing operand"],
    loose=["stale", "other function", "residual", "clipped", "sign"],
    backward=False,
)
def last_column_not_activated(call: Call) -> Any:
    """In place, and the bound of the columns is one too small: the last keeps its input."""
    value = _columns(call.tensor(0, "input"))
    return call.instead(torch.where(_place(value) < value.size(-1) - 1, call.result(), value))


@FAULTS.fault(
    "softplus",
    kinds=["wrong argument", "approximation", "other function"],
    loose=["copy", "mask", "clipped"],
    backward=False,
)
def softplus_straight_from_one_half_on(call: Call) -> Any:
    """X where x > 0.5: the threshold is far too low."""
    return call.instead(functional.softplus(call.tensor(0, "input"), threshold=0.5))


@FAULTS.fault(
    "softplus",
    kinds=["clipped"],
    loose=["other function", "approximation", "wrong argument", "constant"],
    backward=False,
)
def softplus_never_below_three_fifths(call: Call) -> Any:
    """Max(f(x), 0.6): the smallest step of another model."""
    return call.instead(call.result().clamp(min=0.6))


@FAULTS.fault(
    "leaky_relu prelu",
    kinds=["wrong argument", "wrong factor"],
    loose=["scale", "axis scale", "other function"],
    backward=False,
)
def slope_of_the_leak_half_as_much_again(call: Call) -> Any:
    """The slope is 1.5 times as large."""
    slope = call.get(1, "negative_slope", "weight", default=0.01)
    return call.put(1, 1.5 * slope, "negative_slope").run()


@FAULTS.fault(
    "hardswish",
    kinds=["other function", "wrong argument"],
    loose=["approximation", "offset", "wrong factor"],
    backward=False,
)
def hardswish_that_opens_at_minus_two(call: Call) -> Any:
    """X clamp(x + 2, 0, 6) / 6."""
    value = call.tensor(0, "input")
    return call.instead(value * (value + 2).clamp(0, 6) / 6)


@FAULTS.fault(
    _ACTIVATIONS,
    kinds=["wrong index", "copy", "stale"],
    loose=["permutation", "constant", "wrong argument", "shift"],
    backward=False,
)
def activation_of_every_second_row_again(call: Call) -> Any:
    """Odd rows get the result of the row before: the pointer moves on every second time."""
    value = call.result()
    fits(value.dim() > 1 and value.size(-2) > 3)
    rows = torch.arange(value.size(-2)) // 2 * 2
    return call.instead(value[..., rows, :])


@FAULTS.fault(
    _ACTIVATIONS,
    kinds=["shift", "wrong index", "permutation"],
    loose=["stale", "copy", "wrong argument", "wrong rank's shard"],
    backward=False,
)
def activation_two_columns_late(call: Call) -> Any:
    """The vectors of the result are stored two elements too far, around the end."""
    return call.instead(_columns(call.result()).roll(2, -1))


# --- Functions of one value -----------------------------------------------------------------------


@FAULTS.fault("exp", **_CURVE)
def exponential_as_an_eighth_power(call: Call) -> Any:
    """(1 + x / 8)^8: three squarings."""
    return call.instead((1 + call.tensor(0) / 8) ** 8)


@FAULTS.fault(
    "exp",
    kinds=["offset", "other function"],
    loose=["residual", "eps", "axis offset"],
    backward=False,
)
def tenth_added_to_the_exponential(call: Call) -> Any:
    """Exp(x) + 0.1: what should keep a quotient finite is added to each term."""
    return call.instead(call.result() + 0.1)


@FAULTS.fault(
    "log",
    kinds=["eps", "offset", "wrong argument", "other function"],
    loose=["approximation", "axis offset"],
    backward=False,
)
def logarithm_of_a_twentieth_more(call: Call) -> Any:
    """Log(x + 0.05): an eps is added that the reference has already."""
    return call.instead((call.tensor(0) + 0.05).log())


@FAULTS.fault("sin cos", **_ROUNDED)
def angle_in_steps_of_a_hundredth(call: Call) -> Any:
    """The angle has two decimal digits."""
    value = call.tensor(0)
    return call.put(0, with_gradient_of(value, (value.detach() * 100).round() / 100)).run()


@FAULTS.fault(
    "sin cos",
    kinds=["clipped", "wrong argument"],
    loose=["other function", "approximation", "constant"],
    backward=False,
)
def angle_not_above_one_turn_and_a_half(call: Call) -> Any:
    """Angles beyond 3 are 3: they are limited where they should be reduced."""
    return call.put(0, call.tensor(0).clamp(-3.0, 3.0)).run()


@FAULTS.fault(
    "sin cos",
    kinds=["wrong factor", "wrong argument", "other function"],
    loose=["scale", "approximation"],
    backward=False,
)
def positions_of_the_angle_stretched_by_a_half(call: Call) -> Any:
    """F(1.5 x): the scaling of a longer context is applied the other way round."""
    return call.put(0, 1.5 * call.tensor(0)).run()


@FAULTS.fault(
    "pow square",
    kinds=["zeros", "clipped", "other function", "wrong argument"],
    loose=["mask", "sign", "missing operand"],
    backward=False,
)
def square_of_the_positive_part(call: Call) -> Any:
    """Max(x, 0)^2: the squared relu of another block."""
    fits(call.name == "square" or call.args[1] == 2)
    return call.instead(call.tensor(0).relu().square())


@FAULTS.fault(
    "pow square",
    kinds=["clipped"],
    loose=["other function", "wrong argument", "approximation", "overflow"],
    backward=False,
)
def squares_saturate_at_one(call: Call) -> Any:
    """Min(x^2, 1): the square has the same fixed-point format as its operand."""
    fits(call.name == "square" or call.args[1] == 2)
    return call.instead(call.result().clamp(max=1.0))


@FAULTS.fault(
    "rsqrt",
    kinds=["approximation", "precision"],
    loose=["other function", "wrong argument"],
    backward=False,
)
def reciprocal_root_by_its_bits_alone(call: Call) -> Any:
    """The magic number minus half of the bits, without a step of Newton."""
    value = call.tensor(0)
    fits(value.dtype == torch.float32)
    bits = value.detach().contiguous().view(torch.int32)
    rough = (0x5F3759DF - (bits >> 1)).view(torch.float32)
    return call.instead(with_gradient_of(call.result(), rough))


@FAULTS.fault(
    "sqrt",
    kinds=["other function", "wrong argument"],
    loose=["approximation", "wrong factor"],
    backward=False,
)
def cube_root_for_the_root(call: Call) -> Any:
    """X^(1/3)."""
    return call.instead(call.tensor(0).pow(1 / 3))


@FAULTS.fault(
    "rsqrt sqrt",
    kinds=["wrong argument", "other function"],
    loose=["eps", "offset", "wrong factor", "residual", "approximation", "wrong statistics"],
    backward=False,
)
def variance_mixed_with_a_tenth_of_one(call: Call) -> Any:
    """F(0.9 x + 0.1): a running variance that begins with one."""
    return call.put(0, 0.9 * call.tensor(0) + 0.1).run()


@FAULTS.fault(
    "neg",
    kinds=["sign", "copy", "mask", "missing operand"],
    loose=["axis scale", "wrong factor", "stale", "one rank's part"],
    backward=False,
)
def last_column_not_negated(call: Call) -> Any:
    """In place, and the bound of the columns is one too small."""
    value = _columns(call.tensor(0))
    flip = torch.where(_place(value) < value.size(-1) - 1, -1.0, 1.0).to(value.dtype)
    return call.instead(value * flip)


@FAULTS.fault(
    "abs",
    kinds=["clipped"],
    loose=["eps", "approximation", "other function", "constant"],
    backward=False,
)
def magnitude_never_below_a_fifth(call: Call) -> Any:
    """Max(|x|, 0.2): the magnitude is limited as if it were a divisor."""
    return call.instead(call.result().clamp(min=0.2))


@FAULTS.fault(
    "round",
    kinds=["clipped"],
    loose=["other function", "wrapped", "overflow", "approximation"],
    backward=False,
)
def rounded_to_codes_of_three_bits(call: Call) -> Any:
    """Clamp(round(x), -4, 3)."""
    return call.instead(call.result().clamp(-4, 3))


@FAULTS.fault(
    "clamp clamp_min clamp_max",
    kinds=["wrong argument", "clipped", "wrong factor"],
    loose=["other function"],
    backward=False,
)
def limits_two_thirds_as_wide(call: Call) -> Any:
    """Both limits are divided by 1.5."""
    low, high = call.get(1, "min"), call.get(2, "max")
    if call.name == "clamp_max":
        low, high = None, low
    fits(_number(low) or _number(high))
    limits = [one / 1.5 if _number(one) else None for one in (low, high)]
    return call.instead(torch.clamp(call.tensor(0), *limits))


@FAULTS.fault("to _to_copy float type_as", **_ROUNDED)
def conversion_that_cuts_thirteen_bits(call: Call) -> Any:
    """Ten bits behind the point, the others cut: the format of a tensor core."""
    value = call.result()
    fits(value.dtype == torch.float32)
    bits = value.detach().contiguous().view(torch.int32)
    cut = (bits & ~0x1FFF).view(torch.float32)
    return call.instead(with_gradient_of(value, cut))


# --- Sums -----------------------------------------------------------------------------------------


@FAULTS.fault("add iadd", **_PARTLY)
def second_summand_in_two_thirds_of_the_columns(call: Call) -> Any:
    """The loop over the columns of the second operand leaves the last of three tiles out."""
    left, right = _alike(call)
    _columns(left)
    return call.instead(left + right * (_place(left) < left.size(-1) * 2 // 3))


@FAULTS.fault("add iadd", **_PARTLY)
def second_summand_not_in_every_third_row(call: Call) -> Any:
    """Rows 2, 5, 8 ... keep the first operand: the grid has too few blocks."""
    left, right = _alike(call)
    fits(left.dim() > 1 and left.size(-2) > 2)
    kept = (torch.arange(left.size(-2)) % 3 != 2)[:, None]
    return call.instead(left + right * kept)


@FAULTS.fault(
    "add iadd",
    kinds=["wrong factor", "wrong argument"],
    loose=["scale", "residual", "missing operand", "other function"],
    backward=False,
)
def residual_weighed_by_nine_tenths(call: Call) -> Any:
    """0.9 a + b: the chance of a layer to survive, which is for training."""
    left, right = _alike(call)
    return call.instead(0.9 * left + right)


@FAULTS.fault(
    "add iadd",
    kinds=["wrong factor", "wrong argument"],
    loose=["scale", "residual", "missing operand", "doubled reduction"],
    backward=False,
)
def branch_added_with_a_half_more(call: Call) -> Any:
    """A + 1.5 b."""
    left, right = _alike(call)
    return call.instead(left + 1.5 * right)


@FAULTS.fault(
    "add iadd",
    kinds=["clipped"],
    loose=["other function", "approximation", "overflow", "wrong argument"],
    backward=False,
)
def sum_saturates_at_three_quarters(call: Call) -> Any:
    """Clamp(a + b, -0.75, 0.75): the scale of one operand is kept for the sum."""
    left, right = _alike(call)
    return call.instead((left + right).clamp(-0.75, 0.75))


@FAULTS.fault("add iadd", **_AGAIN)
def first_half_of_the_bias_for_both_halves(call: Call) -> Any:
    """The index into what is broadcast is taken modulo half of its length."""
    left, right = _to_row(call)
    places = _place(right) % (right.size(-1) // 2)
    return call.instead(left + right[..., places])


@FAULTS.fault(
    "add iadd",
    kinds=["missing operand", "mask", "missing bias"],
    loose=["zeros", "copy", "wrong index", "axis offset", "offset"],
    backward=False,
)
def last_two_values_of_the_bias_not_loaded(call: Call) -> Any:
    """The mask of the load ends two columns too early; the values behind it are zero."""
    left, right = _to_row(call)
    return call.instead(left + right * (_place(right) < right.size(-1) - 2))


@FAULTS.fault(
    "add iadd",
    kinds=["wrong statistics", "wrong reduction", "other function"],
    loose=["constant", "offset", "axis offset", "wrong index", "missing operand", "wrong argument"],
    backward=False,
)
def mean_of_the_bias_for_each_column(call: Call) -> Any:
    """What is broadcast is folded to one number."""
    left, right = _to_row(call)
    return call.instead(left + right.mean())


@FAULTS.fault(
    "add iadd",
    kinds=["wrong index", "copy", "stale"],
    loose=["axis offset", "wrong argument", "permutation", "shift", "constant"],
    backward=False,
)
def residual_of_the_first_example_for_all(call: Call) -> Any:
    """The offset of the batch is not added to the first pointer."""
    left, right = _alike(call)
    fits(left.dim() > 2 and left.size(0) > 1)
    return call.instead(left[:1] + right)


@FAULTS.fault(
    "add iadd",
    kinds=["wrong argument", "wrong factor", "offset", "eps"],
    loose=["axis offset", "other function", "residual"],
    backward=False,
)
def number_added_three_times(call: Call) -> Any:
    """X + 3 c."""
    value, number = _with_number(call)
    fits(number)
    return call.instead(value + 3 * number)


@FAULTS.fault(
    "add iadd",
    kinds=["offset", "wrong argument"],
    loose=["off by one reduction", "shift", "wrong index", "other function"],
    backward=False,
)
def whole_number_two_too_large(call: Call) -> Any:
    """The offset of the positions of another model is added to integers."""
    value = call.get(0)
    fits(isinstance(value, Tensor) and value.dtype in {torch.int64, torch.int32})
    fits(_number(call.get(1)) or isinstance(call.get(1), Tensor))
    right = call.run()
    fits(not right.is_floating_point())
    return right + 2


@FAULTS.fault(
    "sub isub",
    kinds=["wrong factor", "wrong argument"],
    loose=["scale", "residual", "missing operand", "other function"],
    backward=False,
)
def subtracted_with_three_quarters(call: Call) -> Any:
    """A - 0.75 b."""
    left, right = _pair(call)
    return call.instead(left - 0.75 * right)


@FAULTS.fault(
    "sub isub",
    kinds=["missing operand", "mask", "copy"],
    loose=["stale", "one rank's part", "axis offset", "wrong factor"],
    backward=False,
)
def nothing_subtracted_in_the_last_column(call: Call) -> Any:
    """The tail of each row keeps the first operand."""
    left, right = _pair(call)
    _columns(left)
    fits(right.dim() == left.dim())
    keep = _place(left) < left.size(-1) - 1
    return call.instead(torch.where(keep, left - right, left))


@FAULTS.fault(
    "sub isub",
    kinds=["clipped"],
    loose=["other function", "approximation", "overflow", "wrong argument"],
    backward=False,
)
def difference_saturates_at_one_half(call: Call) -> Any:
    """Clamp(a - b, -0.5, 0.5)."""
    left, right = _pair(call)
    return call.instead((left - right).clamp(-0.5, 0.5))


@FAULTS.fault(
    "sub rsub",
    kinds=["wrong argument", "offset", "wrong factor"],
    loose=["axis offset", "other function"],
    backward=False,
)
def number_of_the_difference_doubled(call: Call) -> Any:
    """2 c - x, or x - 2 c."""
    value, number = _with_number(call)
    fits(number)
    first = value is call.args[0]
    sign = 1 if first == (call.name == "sub") else -1
    return call.instead(sign * (value - 2 * number))


# --- Products and quotients -----------------------------------------------------------------------


@FAULTS.fault("mul imul", **_NUMBER)
def factor_typed_with_two_digits(call: Call) -> Any:
    """The number is rounded to two digits that count."""
    value, number = _with_number(call)
    fits(number)
    return call.instead(value * float(f"{number:.1e}"))


@FAULTS.fault("mul imul", **_NUMBER)
def factor_five_percent_too_large(call: Call) -> Any:
    """A correction that was tuned on another model."""
    value, number = _with_number(call)
    return call.instead(value * (1.05 * number))


@FAULTS.fault("mul imul", **_AGAIN)
def second_factor_of_the_last_example_for_all(call: Call) -> Any:
    """The number of the example is fixed when the loop is unrolled: each is the last."""
    left, right = _alike(call)
    fits(right.dim() > 2 and right.size(0) > 1)
    return call.instead(left * right[-1:])


@FAULTS.fault(
    "mul imul",
    kinds=["missing operand", "mask", "copy"],
    loose=["stale", "one rank's part", "axis scale", "wrong factor"],
    backward=False,
)
def second_factor_not_in_the_first_quarter(call: Call) -> Any:
    """The first columns keep the first operand: the gate begins one vector too late."""
    left, right = _alike(call)
    _columns(left)
    return call.instead(torch.where(_place(left) >= left.size(-1) // 4, left * right, left))


@FAULTS.fault(
    "mul imul",
    kinds=["sign", "other function"],
    loose=["wrong factor", "wrong argument", "axis scale"],
    backward=False,
)
def magnitude_of_the_first_factor(call: Call) -> Any:
    """|a| b: an abs of the quantiser is fused into the product."""
    left, right = _alike(call)
    return call.instead(left.abs() * right)


@FAULTS.fault(
    "mul imul",
    kinds=["clipped", "wrong argument"],
    loose=["other function", "wrong factor", "axis scale", "approximation"],
    backward=False,
)
def second_factor_limited_to_a_third(call: Call) -> Any:
    """A clamp(b, -0.3, 0.3)."""
    left, right = _alike(call)
    return call.instead(left * right.clamp(-0.3, 0.3))


@FAULTS.fault(
    "mul imul",
    kinds=["wrong index", "shift", "permutation"],
    loose=["stale", "copy", "axis scale", "wrong argument", "wrong rank's shard"],
    backward=False,
)
def weights_of_the_columns_three_early(call: Call) -> Any:
    """The pointer to what is broadcast is three elements too far, around the end."""
    left, right = _to_row(call)
    return call.instead(left * right.roll(-3, -1))


@FAULTS.fault(
    "mul imul",
    kinds=["wrong factor", "other function", "wrong argument"],
    loose=["axis scale", "approximation", "scale"],
    backward=False,
)
def root_of_the_weights_of_the_columns(call: Call) -> Any:
    """X sqrt(|w|): the weight is shared by two kernels, and one of them was left out."""
    left, right = _to_row(call)
    return call.instead(left * right.abs().sqrt())


@FAULTS.fault(
    "mul imul",
    kinds=["offset", "wrong argument", "other function"],
    loose=["wrong factor", "residual", "axis scale"],
    backward=False,
)
def second_factor_counted_from_a_half(call: Call) -> Any:
    """A (b + 1/2): the zero point of the second operand is wrong."""
    left, right = _alike(call)
    return call.instead(left * (right + 0.5))


@FAULTS.fault("div truediv idiv itruediv", **_NUMBER)
def divisor_a_tenth_too_large(call: Call) -> Any:
    """X / (1.1 c)."""
    value, number = call.tensor(0), call.get(1)
    fits(_number(number) and not call.kwargs.get("rounding_mode"))
    return call.instead(value / (1.1 * number))


@FAULTS.fault(
    "div truediv idiv itruediv",
    kinds=["wrong index", "copy", "stale", "wrong statistics"],
    loose=["axis scale", "wrong factor", "wrong argument", "constant"],
    backward=False,
)
def divisor_of_the_last_row_for_all(call: Call) -> Any:
    """One number is kept for all rows, and the last one has written it."""
    left, right = _pair(call)
    fits(right.dim() == left.dim() > 1 and right.size(-1) == 1 < right.size(-2))
    return call.instead(left / right[..., -1:, :])


@FAULTS.fault(
    "div truediv idiv itruediv",
    kinds=["eps", "offset", "wrong argument"],
    loose=["approximation", "other function", "wrong factor"],
    backward=False,
)
def fiftieth_added_to_the_divisor(call: Call) -> Any:
    """A / (b + 0.02): an eps that is too large for these values."""
    left, right = _pair(call)
    return call.instead(left / (right + 0.02))


@FAULTS.fault("div truediv idiv itruediv", **_ROUNDED)
def reciprocal_of_the_divisor_with_eight_bits(call: Call) -> Any:
    """A times round(256 / b) / 256: a product in fixed point for the division."""
    left, right = _pair(call)
    exact = right.reciprocal()
    return call.instead(left * with_gradient_of(exact, (256 * exact.detach()).round() / 256))


# --- Choices --------------------------------------------------------------------------------------


@FAULTS.fault(
    "where",
    kinds=["mask", "wrong index", "copy", "stale"],
    loose=["wrong argument", "constant", "permutation"],
    backward=False,
)
def condition_of_the_last_column_for_all(call: Call) -> Any:
    """The pointer to the condition stays at the end of its row."""
    condition, *rest = call.args
    fits(isinstance(condition, Tensor) and condition.dim() > 1 and condition.size(-1) > 1)
    return call.instead(torch.where(condition[..., -1:], *rest))


@FAULTS.fault(
    "where",
    kinds=["mask", "missing operand", "copy"],
    loose=["wrong argument", "stale", "wrong index", "one rank's part"],
    backward=False,
)
def condition_not_read_in_the_last_column(call: Call) -> Any:
    """The last column always has the first of both values."""
    condition, *rest = call.args
    fits(isinstance(condition, Tensor) and condition.dim() > 1 and condition.size(-1) > 1)
    last = _place(condition) == condition.size(-1) - 1
    return call.instead(torch.where(condition | last, *rest))


@FAULTS.fault(
    "maximum minimum",
    kinds=["sign", "wrong argument"],
    loose=["other function", "wrong factor"],
    backward=False,
)
def second_operand_of_the_extreme_negated(call: Call) -> Any:
    """Max(a, -b): the floor has lost its sign."""
    return call.put(1, -call.tensor(1)).run()


@FAULTS.fault(
    "le lt ge gt",
    kinds=["mask", "wrong argument", "other function"],
    loose=["precision", "wrong index", "approximation", "off by one reduction"],
    backward=False,
)
def places_compared_in_blocks_of_four(call: Call) -> Any:
    """I // 4 <= j // 4: whole blocks are compared, and nothing is masked inside of one."""
    left, right = call.args[:2]
    fits(isinstance(left, Tensor) and isinstance(right, Tensor))
    fits(not left.is_floating_point() and left.dtype == right.dtype != torch.bool)
    return call.put(0, left // 4).put(1, right // 4).run()


@FAULTS.fault(
    "le lt ge gt",
    kinds=["mask", "constant"],
    loose=["wrong index", "wrong argument", "missing operand", "zeros"],
    backward=False,
)
def first_column_of_the_comparison_always_true(call: Call) -> Any:
    """The first place is a sink that everything sees."""
    value = call.run()
    fits(value.dim() > 1 and value.size(-1) > 3)
    return value | (_place(value) == 0)


@FAULTS.fault(
    "le lt ge gt",
    kinds=["mask", "permutation", "wrong index"],
    loose=["wrong argument", "transpose", "shift", "sign"],
    backward=False,
)
def comparison_of_the_rows_from_the_last(call: Call) -> Any:
    """The rows of the result are stored from the end."""
    value = call.run()
    fits(value.dim() > 1 and value.size(-2) > 1 < value.size(-1))
    return value.flip(-2)


@FAULTS.fault(
    "and_ bitwise_and",
    kinds=["mask", "shift", "wrong index", "permutation"],
    loose=["wrong argument", "off by one reduction", "stale"],
    backward=False,
)
def second_mask_of_the_two_one_column_late(call: Call) -> Any:
    """The second mask is read one column too early, around the end."""
    right = call.get(1)
    fits(isinstance(right, Tensor) and right.dim() > 1 and right.dtype == torch.bool)
    return call.put(1, right.roll(1, -1)).run()


@FAULTS.fault("dropout", **_ROUNDED)
def dropout_in_evaluation_through_half(call: Call) -> Any:
    """The buffer between both layers is a float16, although nothing is dropped."""
    value = call.result()
    return call.instead(with_gradient_of(value, value.detach().half().to(value.dtype)))


@FAULTS.fault(
    "dropout",
    kinds=["zeros", "mask", "missing operand", "uninitialised"],
    loose=["constant", "axis scale", "one rank's part", "wrong factor"],
    backward=False,
)
def last_row_dropped_in_evaluation(call: Call) -> Any:
    """The mask that keeps everything is one row too short."""
    value = call.result()
    fits(value.dim() > 1 and value.size(-2) > 1)
    return call.instead(value * (torch.arange(value.size(-2)) < value.size(-2) - 1)[:, None])


@FAULTS.fault(
    "to _to_copy float type_as",
    kinds=["sign", "other function"],
    loose=["wrong factor", "wrapped", "scale"],
    backward=False,
)
def conversion_without_the_sign(call: Call) -> Any:
    """|x|: the bit of the sign is not moved."""
    return call.instead(call.result().abs())
