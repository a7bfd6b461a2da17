"""More faults for measuring: functions of single elements, sums, products and quotients of two."""

from __future__ import annotations

import math
from typing import Any

import torch
from benchmarks.places.calls import Call, Catalogue, fits, with_gradient_of
from torch import Tensor
from torch.nn import functional

FAULTS = Catalogue()


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
    """Two floating-point operands of one shape."""
    left, right = _pair(call)
    fits(left.shape == right.shape)
    return left, right


# --- Activations ----------------------------------------------------------------------------------


@FAULTS.fault(
    "gelu",
    kinds=["other function", "wrong argument", "wrong factor"],
    loose=["approximation", "scale"],
    backward=False,
)
def erf_of_half_of_the_argument(call: Call) -> Any:
    """X (1 + erf(x / 2)) / 2: the root of two is taken for two."""
    value = call.tensor(0, "input")
    return call.instead(value * 0.5 * (1 + (value / 2).erf()))


@FAULTS.fault(
    "gelu",
    kinds=["other function", "wrong factor"],
    loose=["approximation", "wrong argument", "missing operand", "scale"],
    backward=False,
)
def bracket_of_the_tanh_closed_too_early(call: Call) -> Any:
    """Sqrt(2 / pi) x + 0.044715 x^3 inside of the tanh: the cubic term is not multiplied."""
    value = call.tensor(0, "input")
    inner = (2 / math.pi) ** 0.5 * value + 0.044715 * value**3
    return call.instead(value * 0.5 * (1 + inner.tanh()))


@FAULTS.fault(
    "silu",
    kinds=["precision"],
    loose=["approximation", "other function"],
    backward=False,
)
def gate_of_the_silu_in_float8(call: Call) -> Any:
    """The sigmoid is kept in e4m3 before it is multiplied."""
    value = call.tensor(0, "input")
    gate = value.sigmoid()
    coarse = gate.detach().to(torch.float8_e4m3fn).to(gate.dtype)
    return call.instead(value * with_gradient_of(gate, coarse))


@FAULTS.fault(
    "silu gelu",
    kinds=["other function", "approximation", "mask", "copy"],
    loose=["missing operand", "wrong factor", "stale"],
    backward=False,
)
def activation_is_its_input_above_a_half(call: Call) -> Any:
    """The shortcut for large inputs begins at 0.5."""
    value, result = call.tensor(0, "input"), call.result()
    return call.instead(torch.where(value > 0.5, value, result))


@FAULTS.fault(
    "relu",
    kinds=["mask", "wrong index", "shift"],
    loose=["other function", "zeros", "missing operand", "permutation"],
    backward=False,
)
def sign_of_the_column_before_opens_the_relu(call: Call) -> Any:
    """The predicate of a lane comes from its neighbour; the value is its own."""
    value = _columns(call.tensor(0, "input"))
    return call.instead(value * (value.roll(1, -1) > 0))


@FAULTS.fault(
    "tanh",
    kinds=["other function", "approximation"],
    loose=["sign", "wrong factor", "offset"],
    backward=False,
)
def tanh_by_its_tail(call: Call) -> Any:
    """Sign(x) (1 - 2 exp(-2 |x|)): the branch for large arguments is taken everywhere."""
    value = call.tensor(0, "input")
    return call.instead(value.sign() * (1 - 2 * (-2 * value.abs()).exp()))


@FAULTS.fault(
    "sigmoid",
    kinds=["other function", "sign"],
    loose=["wrong argument", "mask", "clipped", "approximation"],
    backward=False,
)
def negative_branch_of_the_stable_sigmoid_forgotten(call: Call) -> Any:
    """1 / (1 + exp(-|x|)) for both signs."""
    return call.instead(call.tensor(0, "input").abs().sigmoid())


@FAULTS.fault(
    "softplus",
    kinds=["approximation", "other function"],
    loose=["missing operand", "offset"],
    backward=False,
)
def first_order_of_the_softplus(call: Call) -> Any:
    """Max(x, 0) + exp(-|x|): log(1 + e) is taken for e."""
    value = call.tensor(0, "input")
    return call.instead(value.relu() + (-value.abs()).exp())


@FAULTS.fault(
    "hardswish hardsigmoid",
    kinds=["other function", "wrong argument", "offset"],
    loose=["approximation", "wrong factor", "clipped", "mask"],
    backward=False,
)
def half_added_before_the_division(call: Call) -> Any:
    """Clamp((x + 1 / 2) / 6, 0, 1) for clamp(x / 6 + 1 / 2, 0, 1)."""
    value = call.tensor(0, "input")
    gate = ((value + 0.5) / 6).clamp(0, 1)
    return call.instead(value * gate if call.name == "hardswish" else gate)


@FAULTS.fault(
    "elu celu",
    kinds=["other function", "wrong factor", "offset"],
    loose=["wrong argument", "mask", "missing operand"],
    backward=False,
)
def alpha_for_the_exponential_alone(call: Call) -> Any:
    """Alpha exp(x) - 1 below zero, for alpha (exp(x) - 1)."""
    value = call.tensor(0, "input")
    alpha = call.get(1, "alpha", default=1.0)
    fits(isinstance(alpha, int | float))
    inner = value / alpha if call.name == "celu" else value
    return call.instead(torch.where(value > 0, value, alpha * inner.exp() - 1))


@FAULTS.fault(
    "mish",
    kinds=["other function", "approximation", "wrong argument"],
    loose=["wrong factor", "missing operand"],
    backward=False,
)
def mish_with_one_for_two(call: Call) -> Any:
    """X n / (n + 1) with n = exp(x) (exp(x) + 2): the quick form has n + 2."""
    value = call.tensor(0, "input")
    grown = value.clamp(max=20).exp()
    number = grown * (grown + 2)
    return call.instead(value * number / (number + 1))


@FAULTS.fault(
    "glu",
    kinds=["other function"],
    loose=["wrong factor", "clipped", "approximation", "missing operand"],
)
def value_of_the_gate_squashed_too(call: Call) -> Any:
    """Sigmoid(a) sigmoid(b): one sigmoid is applied to the whole tile."""
    left, right = call.tensor(0, "input").chunk(2, call.get(1, "dim", default=-1))
    return call.instead(left.sigmoid() * right.sigmoid())


@FAULTS.fault(
    "softsign",
    kinds=["other function", "sign"],
    loose=["nonfinite", "overflow", "missing operand", "wrong argument"],
)
def magnitude_in_the_softsign_forgotten(call: Call) -> Any:
    """X / (1 + x)."""
    value = call.tensor(0, "input")
    return call.instead(value / (1 + value))


@FAULTS.fault(
    "softshrink",
    kinds=["offset", "sign", "other function"],
    loose=["wrong argument", "mask", "residual"],
)
def limit_subtracted_on_both_sides(call: Call) -> Any:
    """X - lambda below -lambda, where lambda should be added."""
    value, limit = call.tensor(0, "input"), call.get(1, "lambd", default=0.5)
    return call.instead(torch.where(value.abs() > limit, value - limit, torch.zeros_like(value)))


@FAULTS.fault(
    "log_sigmoid logsigmoid",
    kinds=["eps", "other function", "approximation"],
    loose=["clipped", "offset", "wrong argument"],
    backward=False,
)
def hundredth_under_the_logarithm_of_the_gate(call: Call) -> Any:
    """Log(sigmoid(x) + 0.01): a composition that is kept from infinity."""
    return call.instead((call.tensor(0, "input").sigmoid() + 0.01).log())


# --- Functions of one value -----------------------------------------------------------------------


@FAULTS.fault(
    "log1p expm1",
    kinds=["approximation", "other function"],
    loose=["precision", "missing operand"],
    backward=False,
)
def two_terms_of_the_series(call: Call) -> Any:
    """X - x^2 / 2 and x + x^2 / 2: the branch for small arguments is taken everywhere."""
    value = call.tensor(0)
    half = value.square() / 2
    return call.instead(value - half if call.name == "log1p" else value + half)


@FAULTS.fault(
    "sinc",
    kinds=["wrong factor", "scale", "missing operand"],
    loose=["other function", "wrong argument"],
)
def pi_forgotten_in_the_divisor(call: Call) -> Any:
    """Sin(pi x) / x."""
    return call.instead(math.pi * call.result())


@FAULTS.fault(
    "log2 log",
    kinds=["approximation", "other function"],
    loose=["precision", "wrong factor"],
    backward=False,
)
def logarithm_straight_between_powers_of_two(call: Call) -> Any:
    """The exponent plus the mantissa less one, in the base that is asked for."""
    value = call.tensor(0)
    fits(bool((value > 0).all()))
    base = (value.detach().log2().floor()).exp2()
    found = base.log2() + value / base - 1
    return call.instead(found if call.name == "log2" else found * math.log(2))


@FAULTS.fault(
    "xlogy",
    kinds=["wrong index", "copy", "missing operand", "other function"],
    loose=["stale", "swapped operands", "wrong argument"],
)
def logarithm_of_the_factor_itself(call: Call) -> Any:
    """X log(x): the second pointer is not bound."""
    value, _ = _alike(call)
    return call.instead(torch.xlogy(value, value))


@FAULTS.fault(
    "rsqrt sqrt",
    kinds=["approximation", "other function"],
    loose=["precision", "wrong factor", "offset", "sign"],
    backward=False,
)
def root_by_one_step_from_one(call: Call) -> Any:
    """(x + 1) / 2 and (3 - x) / 2: one step of Newton with a first guess of one."""
    value = call.tensor(0)
    return call.instead((value + 1) / 2 if call.name == "sqrt" else (3 - value) / 2)


@FAULTS.fault(
    "pow",
    kinds=["precision", "wrong argument", "other function"],
    loose=["constant", "copy", "wrong factor", "scale", "approximation", "missing operand"],
    backward=False,
)
def exponent_divided_as_integers(call: Call) -> Any:
    """C ** floor(x): the rates of the positions have an exponent without its fraction."""
    base, exponent = call.args[:2]
    fits(isinstance(base, int | float) and isinstance(exponent, Tensor))
    return call.put(1, exponent.floor()).run()


@FAULTS.fault(
    "cos",
    kinds=["offset", "approximation", "other function", "wrong argument"],
    loose=["precision", "axis offset"],
    backward=False,
)
def cosine_by_a_sine_with_a_short_quarter(call: Call) -> Any:
    """Sin(x + 1.5): a quarter of a turn has one digit behind the point."""
    return call.instead((call.tensor(0) + 1.5).sin())


@FAULTS.fault(
    "clamp clip",
    kinds=["wrong argument", "clipped"],
    loose=["other function", "mask"],
    backward=False,
)
def highest_code_left_out(call: Call) -> Any:
    """The upper limit of the codes is one less."""
    high = call.get(2, "max")
    fits(isinstance(high, int | float) and high >= 3)
    return call.instead(call.result().clamp(max=high - 1))


@FAULTS.fault(
    "round",
    kinds=["other function"],
    loose=["precision", "offset", "approximation", "wrong argument", "tie-breaking"],
    backward=False,
)
def half_added_and_cut_toward_zero(call: Call) -> Any:
    """Trunc(x + 1 / 2): a cast rounds negative values wrongly."""
    return call.instead((call.tensor(0) + 0.5).trunc())


@FAULTS.fault(
    "remainder fmod",
    kinds=["other function"],
    loose=["offset", "sign", "wrapped", "wrong argument"],
    backward=False,
)
def remainder_of_the_nearest_multiple(call: Call) -> Any:
    """X - y round(x / y), between -y / 2 and y / 2."""
    value, other = call.tensor(0), call.args[1]
    return call.instead(value - other * (value / other).round())


@FAULTS.fault(
    "logit",
    kinds=["missing operand", "other function"],
    loose=["approximation", "partial sum", "wrong argument"],
)
def odds_without_their_divisor(call: Call) -> Any:
    """Log(p) for log(p / (1 - p))."""
    value, eps = call.tensor(0), call.get(1, "eps", default=0.0) or 0.0
    return call.instead(value.clamp(eps, 1 - eps).log())


@FAULTS.fault(
    "to type_as _to_copy float",
    kinds=["sign", "scale", "wrong factor"],
    loose=["other function", "wrong argument"],
    backward=False,
)
def true_is_minus_one(call: Call) -> Any:
    """A comparison of vectors sets all bits, and these are converted as an integer."""
    value = call.args[0]
    fits(isinstance(value, Tensor) and value.dtype == torch.bool)
    return call.instead(-call.result())


# --- Sums, products, quotients --------------------------------------------------------------------


@FAULTS.fault(
    "add iadd",
    kinds=["doubled reduction", "wrong factor", "residual", "lost accumulation"],
    loose=["mask", "axis scale", "scale", "stale", "wrong index", "one rank's part"],
    backward=False,
)
def overlap_of_the_last_tile_added_again(call: Call) -> Any:
    """The last tile of columns ends with the row: what it shares with the one before is a + 2 b."""
    left, right = _alike(call)
    size = _columns(left, 5).size(-1)
    tile = 1 << (size.bit_length() - 1)
    fits(tile < size)
    places = torch.arange(size)
    twice = (places >= size - tile) & (places < tile)
    return call.instead(left + right * (1 + twice.to(right.dtype)))


@FAULTS.fault(
    "add",
    kinds=["mask", "precision", "missing operand"],
    loose=["clipped", "zeros", "other function", "copy", "approximation"],
    backward=False,
)
def small_second_summand_swallowed(call: Call) -> Any:
    """Four bits of mantissa: what is below a sixteenth of the first operand is lost."""
    left, right = _alike(call)
    return call.instead(left + right * (right.abs() > left.abs() / 16))


@FAULTS.fault(
    "add iadd",
    kinds=["wrong index", "permutation", "transpose"],
    loose=["swapped operands", "shift", "wrong axis", "wrong rank's shard"],
    backward=False,
)
def second_summand_with_its_halves_exchanged(call: Call) -> Any:
    """The two tiles of columns of the second operand are loaded in the other order."""
    left, right = _alike(call)
    size = _columns(right).size(-1)
    fits(size % 2 == 0)
    return call.instead(left + right.roll(size // 2, -1))


@FAULTS.fault(
    "mul",
    kinds=["offset", "residual", "other function"],
    loose=["wrong factor", "axis offset", "missing operand", "doubled reduction"],
    backward=False,
)
def zero_point_of_the_second_factor(call: Call) -> Any:
    """A (b - 0.1): a zero point is subtracted from values that have none."""
    left, right = _pair(call)
    return call.instead(left * (right - 0.1))


@FAULTS.fault(
    "mul",
    kinds=["precision", "approximation"],
    loose=["other function", "wrong factor", "scale"],
    backward=False,
)
def second_factor_is_a_power_of_two(call: Call) -> Any:
    """The magnitude of the second operand is rounded down to a power of two, for a shift."""
    left, right = _pair(call)
    whole = right.detach()
    down = whole.sign() * whole.abs().clamp(min=1e-30).log2().floor().exp2()
    return call.instead(left * with_gradient_of(right, down))


@FAULTS.fault(
    "mul",
    kinds=["wrong factor", "scale", "wrong argument"],
    loose=["other function"],
    backward=False,
)
def root_of_the_number_multiplied(call: Call) -> Any:
    """The factor is shared by both operands of a product, and only one of them gets its root."""
    value, number = call.args[:2]
    if isinstance(value, int | float):
        value, number = number, value
    fits(isinstance(number, int | float) and number > 0 and isinstance(value, Tensor))
    return call.instead(value * number**0.5)


@FAULTS.fault(
    "div",
    kinds=["precision", "other function"],
    loose=["approximation", "zeros", "wrong argument"],
    backward=False,
)
def quotient_of_integers(call: Call) -> Any:
    """The quotient is cut toward zero to a whole number."""
    left, right = _pair(call)
    value = left / right
    return call.instead(with_gradient_of(value, value.detach().trunc()))


@FAULTS.fault(
    "addcmul addcdiv",
    kinds=["wrong factor", "swapped operands", "wrong argument", "other function"],
    loose=["scale", "missing operand"],
)
def number_multiplies_the_summand(call: Call) -> Any:
    """V a + b c: the factor is given to the other term."""
    value, number = call.tensor(0), call.kwargs.get("value", 1)
    fits(number != 1)
    rest = call.result() - value
    return call.instead(number * value + rest / number)


@FAULTS.fault(
    "atan2",
    kinds=["offset", "wrapped", "other function"],
    loose=["shift", "sign", "mask", "residual"],
)
def angle_never_negative(call: Call) -> Any:
    """A whole turn is added to negative angles."""
    value = call.result()
    return call.instead(value + 2 * math.pi * (value < 0))


@FAULTS.fault(
    "logaddexp",
    kinds=["other function", "sign"],
    loose=["approximation", "swapped operands", "wrong argument", "missing operand"],
)
def difference_of_two_logarithms_with_its_sign(call: Call) -> Any:
    """Max(a, b) + log(1 + exp(b - a)), for exp(-|b - a|)."""
    left, right = _pair(call)
    return call.instead(torch.maximum(left, right) + functional.softplus(right - left))


@FAULTS.fault(
    "maximum minimum",
    kinds=["other function", "swapped operands", "sign"],
    loose=["clipped", "mask", "wrong reduction", "copy"],
    backward=False,
)
def extreme_of_the_other_kind(call: Call) -> Any:
    """The comparison is the other way round: a minimum for a maximum."""
    left, right = _pair(call)
    other = torch.minimum if call.name == "maximum" else torch.maximum
    return call.instead(other(left, right))
