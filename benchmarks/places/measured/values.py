"""Faults for measuring: functions of single elements, sums, products and quotients of two."""

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
    kinds=["other function", "wrong argument"],
    loose=["approximation", "wrong factor"],
    backward=False,
)
def square_for_the_cube_in_the_gelu(call: Call) -> Any:
    """X + 0.044715 x^2 inside of the tanh: one product is missing."""
    value = call.tensor(0, "input")
    inner = math.sqrt(2 / math.pi) * (value + 0.044715 * value**2)
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
    kinds=["clipped", "zeros", "other function"],
    loose=["approximation", "mask", "wrong argument"],
    backward=False,
)
def dip_of_the_activation_cut(call: Call) -> Any:
    """Max(f(x), 0): the result goes to an unsigned buffer."""
    return call.instead(call.result().clamp(min=0))


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
    kinds=["other function"],
    loose=["wrong factor", "sign", "approximation"],
    backward=False,
)
def tanh_for_the_gate_of_the_silu(call: Call) -> Any:
    """X tanh(x): the wrong member of the list of gates."""
    value = call.tensor(0, "input")
    return call.instead(value * value.tanh())


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
def gate_in_steps_of_a_sixteenth(call: Call) -> Any:
    """The result is read from a table with four bits behind the point."""
    value = call.result()
    return call.instead(with_gradient_of(value, (value.detach() * 16).round() / 16))


@FAULTS.fault("sigmoid", **_CURVE)
def sigmoid_by_two_terms_at_zero(call: Call) -> Any:
    """1 / 2 + x / 4 - x^3 / 48: the series, also where it does not hold."""
    value = call.tensor(0)
    return call.instead(0.5 + value / 4 - value**3 / 48)


@FAULTS.fault(
    "sigmoid",
    kinds=["other function", "approximation"],
    loose=["wrong factor", "wrong argument", "scale"],
    backward=False,
)
def sigmoid_by_the_arctangent(call: Call) -> Any:
    """1 / 2 + atan(x) / pi: another curve between zero and one."""
    return call.instead(0.5 + call.tensor(0).atan() / math.pi)


@FAULTS.fault("tanh", **_CURVE)
def tanh_by_a_short_fraction(call: Call) -> Any:
    """X (15 + x^2) / (15 + 6 x^2), without limits."""
    value = call.tensor(0)
    return call.instead(value * (15 + value.square()) / (15 + 6 * value.square()))


@FAULTS.fault("tanh", **_CURVE)
def tanh_as_a_root_quotient(call: Call) -> Any:
    """X / sqrt(1 + x^2): the algebraic curve of the same form."""
    value = call.tensor(0)
    return call.instead(value * (1 + value.square()).rsqrt())


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
    "relu leaky_relu relu6 gelu silu",
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
    kinds=["offset", "other function"],
    loose=["axis offset", "residual", "missing operand"],
    backward=False,
)
def softplus_that_is_zero_at_zero(call: Call) -> Any:
    """Log(1 + exp(x)) - log(2): the shifted form."""
    return call.instead(call.result() - math.log(2))


@FAULTS.fault(
    "leaky_relu",
    kinds=["wrong argument", "other function", "wrong factor"],
    loose=["scale", "axis scale", "sign"],
    backward=False,
)
def slope_of_the_leak_halved(call: Call) -> Any:
    """The slope is the mean of its range, from zero on."""
    slope = call.get(1, "negative_slope", default=0.01)
    return call.instead(functional.leaky_relu(call.tensor(0, "input"), slope / 2))


@FAULTS.fault(
    "elu celu selu",
    kinds=["clipped", "other function"],
    loose=["wrong argument", "approximation"],
    backward=False,
)
def exponential_side_not_below_minus_a_fifth(call: Call) -> Any:
    """Max(f(x), -0.2): the floor of a quantised buffer."""
    return call.instead(call.result().clamp(min=-0.2))


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
    kinds=["permutation", "wrong index"],
    loose=["shift", "swapped operands", "wrong argument", "transpose"],
    backward=False,
)
def neighbouring_results_of_the_activation_exchanged(call: Call) -> Any:
    """Columns 2 i and 2 i + 1 are packed in the other order."""
    value = _columns(call.result())
    fits(value.size(-1) % 2 == 0)
    return call.instead(value.unflatten(-1, (-1, 2)).flip(-1).flatten(-2))


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
def angle_in_sixty_four_steps(call: Call) -> Any:
    """The turn has 64 steps, as the table that is read."""
    value = call.tensor(0)
    step = 2 * math.pi / 64
    return call.put(0, with_gradient_of(value, (value.detach() / step).round() * step)).run()


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
def positions_of_the_angle_compressed_by_four(call: Call) -> Any:
    """F(x / 4): linear scaling of the positions, for a model that was not trained so."""
    return call.put(0, call.tensor(0) / 4).run()


@FAULTS.fault(
    "pow square",
    kinds=["sign", "other function"],
    loose=["wrong factor", "wrong argument"],
    backward=False,
)
def square_keeps_the_sign(call: Call) -> Any:
    """X |x|."""
    value = call.tensor(0)
    fits(call.name == "square" or call.args[1] == 2)
    return call.instead(value * value.abs())


@FAULTS.fault(
    "pow square",
    kinds=["clipped", "overflow"],
    loose=["other function", "wrong argument", "approximation"],
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
    kinds=["approximation", "other function"],
    loose=["wrong argument", "precision"],
    backward=False,
)
def root_by_one_step_from_one(call: Call) -> Any:
    """(x + 1) / 2: a single step of Heron."""
    return call.instead((call.tensor(0) + 1) / 2)


@FAULTS.fault(
    "rsqrt sqrt",
    kinds=["offset", "eps", "wrong argument", "other function"],
    loose=["axis offset", "wrong factor"],
    backward=False,
)
def twentieth_more_under_the_root(call: Call) -> Any:
    """F(x + 0.05): the eps of a group norm is added to the one that is there."""
    return call.put(0, call.tensor(0) + 0.05).run()


@FAULTS.fault(
    "neg",
    kinds=["sign", "copy", "mask", "missing operand"],
    loose=["axis scale", "wrong factor", "stale", "one rank's part"],
    backward=False,
)
def second_half_of_the_columns_not_negated(call: Call) -> Any:
    """The loop over the vectors ends in the middle of the row, in place."""
    value = _columns(call.tensor(0))
    flip = torch.where(_place(value) < value.size(-1) // 2, -1.0, 1.0).to(value.dtype)
    return call.instead(value * flip)


@FAULTS.fault(
    "abs",
    kinds=["eps", "approximation", "other function"],
    loose=["offset", "wrong argument"],
    backward=False,
)
def magnitude_by_a_root_with_eps(call: Call) -> Any:
    """Sqrt(x^2 + 0.01): the magnitude of a complex number, with the eps of its gradient."""
    return call.instead((call.tensor(0).square() + 0.01).sqrt())


@FAULTS.fault(
    "round",
    kinds=["wrong factor", "wrong argument", "other function"],
    loose=["precision", "approximation"],
    backward=False,
)
def rounded_to_even_numbers(call: Call) -> Any:
    """2 round(x / 2): a bit too few is kept."""
    return call.instead(2 * (call.tensor(0) / 2).round())


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
def second_summand_in_the_first_half_of_the_columns(call: Call) -> Any:
    """The loop over the columns of the second operand ends in the middle of the row."""
    left, right = _alike(call)
    _columns(left)
    return call.instead(left + right * (_place(left) < left.size(-1) // 2))


@FAULTS.fault("add iadd", **_PARTLY)
def second_summand_in_even_rows_only(call: Call) -> Any:
    """The step of the row pointer is two for one of the operands."""
    left, right = _alike(call)
    fits(left.dim() > 1 and left.size(-2) > 2)
    even = (torch.arange(left.size(-2)) % 2 == 0)[:, None]
    return call.instead(left + right * even)


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
    kinds=["clipped", "overflow"],
    loose=["other function", "approximation"],
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
    kinds=["wrong argument", "wrong factor", "offset"],
    loose=["axis offset", "eps", "other function", "residual"],
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
    kinds=["clipped", "other function", "zeros"],
    loose=["mask", "sign", "nonfinite", "wrapped"],
    backward=False,
)
def difference_never_negative(call: Call) -> Any:
    """Max(a - b, 0): a subtraction of unsigned numbers that saturates."""
    left, right = _pair(call)
    return call.instead((left - right).clamp(min=0))


@FAULTS.fault(
    "sub rsub",
    kinds=["wrong argument", "offset"],
    loose=["axis offset", "other function", "wrong factor"],
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
def factor_typed_with_one_digit(call: Call) -> Any:
    """The number is rounded to one digit that counts."""
    value, number = _with_number(call)
    fits(number)
    return call.instead(value * float(f"{number:.0e}"))


@FAULTS.fault("mul imul", **_NUMBER)
def factor_five_percent_too_large(call: Call) -> Any:
    """A correction that was tuned on another model."""
    value, number = _with_number(call)
    return call.instead(value * (1.05 * number))


@FAULTS.fault("mul imul", **_AGAIN)
def second_factor_of_the_first_example_for_all(call: Call) -> Any:
    """The offset of the batch is not added to the second pointer."""
    left, right = _alike(call)
    fits(right.dim() > 2 and right.size(0) > 1)
    return call.instead(left * right[:1])


@FAULTS.fault(
    "mul imul",
    kinds=["missing operand", "mask", "copy"],
    loose=["stale", "one rank's part", "axis scale", "wrong factor"],
    backward=False,
)
def second_factor_not_in_odd_columns(call: Call) -> Any:
    """Every second lane keeps the first operand."""
    left, right = _alike(call)
    _columns(left)
    return call.instead(torch.where(_place(left) % 2 == 0, left * right, left))


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
def divisor_without_its_fraction(call: Call) -> Any:
    """X / floor(c): the divisor is stored as a whole number."""
    value, number = call.tensor(0), call.get(1)
    fits(_number(number) and number != int(number) and abs(number) >= 1)
    fits(not call.kwargs.get("rounding_mode"))
    return call.instead(value / int(number))


@FAULTS.fault("div truediv idiv itruediv", **_NUMBER)
def divisor_one_too_large(call: Call) -> Any:
    """X / (c + 1)."""
    value, number = call.tensor(0), call.get(1)
    fits(_number(number) and not call.kwargs.get("rounding_mode"))
    return call.instead(value / (number + 1))


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
    kinds=["mask", "wrong index", "shift", "wrong argument"],
    loose=["off by one reduction", "permutation", "stale"],
    backward=False,
)
def condition_of_the_row_before(call: Call) -> Any:
    """The rows of the condition are read one too early, around the end."""
    condition, *rest = call.args
    fits(isinstance(condition, Tensor) and condition.dim() > 1 and condition.size(-2) > 1)
    result = torch.where(condition.roll(1, -2), *rest)
    fits(result.is_floating_point())
    return call.instead(result)


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
    "maximum",
    kinds=["other function"],
    loose=["wrong factor", "offset", "approximation", "residual"],
    backward=False,
)
def smooth_maximum_for_the_larger(call: Call) -> Any:
    """Log(exp(a) + exp(b))."""
    left, right = call.tensor(0), call.tensor(1)
    return call.instead(torch.logaddexp(left, right))


@FAULTS.fault(
    "maximum minimum",
    kinds=["other function", "wrong reduction"],
    loose=["wrong factor", "approximation"],
    backward=False,
)
def mean_of_both_for_the_extreme(call: Call) -> Any:
    """(a + b) / 2."""
    left, right = call.tensor(0), call.tensor(1)
    return call.instead((left + right) / 2)
