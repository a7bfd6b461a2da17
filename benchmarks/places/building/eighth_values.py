"""More faults for measuring: functions of single elements, sums, products and quotients of two."""

from __future__ import annotations

import math
from typing import Any

import torch
from benchmarks.places import words
from benchmarks.places.calls import Call, Catalogue, fits, with_gradient_of
from benchmarks.places.changes import computed, on, result, tensors
from benchmarks.places.parts import equal_pair, floating_pair
from torch import Tensor
from torch.nn import functional

FAULTS = Catalogue()


def _columns(value: Tensor, least: int = 2) -> Tensor:
    fits(value.dim() > 0 and value.size(-1) >= least)
    return value


# --- Activations ----------------------------------------------------------------------------------


@FAULTS.forward("silu", "precision; approximation, other function")
def gate_of_the_silu_in_float8(call: Call) -> Any:
    """The sigmoid is kept in e4m3 before it is multiplied."""
    value = call.tensor(0, "input")
    gate = value.sigmoid()
    coarse = gate.detach().to(torch.float8_e4m3fn).to(gate.dtype)
    return call.instead(value * with_gradient_of(gate, coarse))


@FAULTS.forward(
    "hardswish hardsigmoid",
    "other function, wrong argument, offset; approximation, wrong factor, clipped, mask",
)
def half_added_before_the_division(call: Call) -> Any:
    """Clamp((x + 1 / 2) / 6, 0, 1) for clamp(x / 6 + 1 / 2, 0, 1)."""
    value = call.tensor(0, "input")
    gate = ((value + 0.5) / 6).clamp(0, 1)
    return call.instead(value * gate if call.name == "hardswish" else gate)


@FAULTS.forward(
    "elu celu", "other function, wrong factor, offset; wrong argument, mask, missing operand"
)
def alpha_for_the_exponential_alone(call: Call) -> Any:
    """Alpha exp(x) - 1 below zero, for alpha (exp(x) - 1)."""
    value = call.tensor(0, "input")
    alpha = call.get(1, "alpha", default=1.0)
    fits(isinstance(alpha, int | float))
    inner = value / alpha if call.name == "celu" else value
    return call.instead(torch.where(value > 0, value, alpha * inner.exp() - 1))


@FAULTS.forward(
    "mish", "other function, approximation, wrong argument; wrong factor, missing operand"
)
def mish_with_one_for_two(call: Call) -> Any:
    """X n / (n + 1) with n = exp(x) (exp(x) + 2): the quick form has n + 2."""
    value = call.tensor(0, "input")
    grown = value.clamp(max=20).exp()
    number = grown * (grown + 2)
    return call.instead(value * number / (number + 1))


@FAULTS.fault("glu", "other function; wrong factor, clipped, approximation, missing operand")
def value_of_the_gate_squashed_too(call: Call) -> Any:
    """Sigmoid(a) sigmoid(b): one sigmoid is applied to the whole tile."""
    left, right = call.tensor(0, "input").chunk(2, call.get(1, "dim", default=-1))
    return call.instead(left.sigmoid() * right.sigmoid())


# fmt: off
# X (1 + erf(x / 2)) / 2: the root of two is taken for two.
FAULTS.add("erf of half of the argument", "gelu", words.ANOTHER_FACTOR,
    computed(lambda call: (call.tensor(0, "input"),),
        lambda value: value * 0.5 * (1 + (value / 2).erf())), backward=False)
# Sqrt(2 / pi) x + 0.044715 x^3 inside of the tanh: the cubic term is not multiplied.
FAULTS.add("bracket of the tanh closed too early", "gelu",
    "other function, wrong factor; approximation, wrong argument, missing operand, scale",
    computed(lambda call: (call.tensor(0, "input"),),
        lambda value:
            value * 0.5 * (1 + ((2 / math.pi) ** 0.5 * value + 0.044715 * value**3).tanh())),
    backward=False)
# The shortcut for large inputs begins at 0.5.
FAULTS.add("activation is its input above a half", "silu gelu",
    "other function, approximation, mask, copy; missing operand, wrong factor, stale",
    on(lambda call: (call.tensor(0, "input"),),
        lambda call, value: call.instead(torch.where(value > 0.5, value, call.result()))),
    backward=False)
# The predicate of a lane comes from its neighbour; the value is its own.
FAULTS.add("sign of the column before opens the relu", "relu",
    "mask, wrong index, shift; other function, zeros, missing operand, permutation",
    computed(lambda call: (_columns(call.tensor(0, "input")),),
        lambda value: value * (value.roll(1, -1) > 0)), backward=False)
# Sign(x) (1 - 2 exp(-2 |x|)): the branch for large arguments is taken everywhere.
FAULTS.add("tanh by its tail", "tanh", "other function, approximation; sign, wrong factor, offset",
    computed(lambda call: (call.tensor(0, "input"),),
        lambda value: value.sign() * (1 - 2 * (-2 * value.abs()).exp())), backward=False)
# 1 / (1 + exp(-|x|)) for both signs.
FAULTS.add("negative branch of the stable sigmoid forgotten", "sigmoid",
    "other function, sign; wrong argument, mask, clipped, approximation",
    lambda call: call.instead(call.tensor(0, "input").abs().sigmoid()), backward=False)
# Max(x, 0) + exp(-|x|): log(1 + e) is taken for e.
FAULTS.add("first order of the softplus", "softplus",
    "approximation, other function; missing operand, offset",
    computed(lambda call: (call.tensor(0, "input"),),
        lambda value: value.relu() + (-value.abs()).exp()), backward=False)
# X / (1 + x).
FAULTS.add("magnitude in the softsign forgotten", "softsign",
    "other function, sign; nonfinite, overflow, missing operand, wrong argument",
    computed(lambda call: (call.tensor(0, "input"),), lambda value: value / (1 + value)))
# X - lambda below -lambda, where lambda should be added.
FAULTS.add("limit subtracted on both sides", "softshrink",
    "offset, sign, other function; wrong argument, mask, residual",
    computed(lambda call: (call.tensor(0, "input"), call.get(1, "lambd", default=0.5)),
        lambda value, limit:
            torch.where(value.abs() > limit, value - limit, torch.zeros_like(value))))
# Log(sigmoid(x) + 0.01): a composition that is kept from infinity.
FAULTS.add("hundredth under the logarithm of the gate", "log_sigmoid logsigmoid",
    "eps, other function, approximation; clipped, offset, wrong argument",
    lambda call: call.instead((call.tensor(0, "input").sigmoid() + 0.01).log()), backward=False)
# fmt: on


# --- Functions of one value -----------------------------------------------------------------------


@FAULTS.forward("log1p expm1", "approximation, other function; precision, missing operand")
def two_terms_of_the_series(call: Call) -> Any:
    """X - x^2 / 2 and x + x^2 / 2: the branch for small arguments is taken everywhere."""
    value = call.tensor(0)
    half = value.square() / 2
    return call.instead(value - half if call.name == "log1p" else value + half)


@FAULTS.forward("log2 log", "approximation, other function; precision, wrong factor")
def logarithm_straight_between_powers_of_two(call: Call) -> Any:
    """The exponent plus the mantissa less one, in the base that is asked for."""
    value = call.tensor(0)
    fits(bool((value > 0).all()))
    base = (value.detach().log2().floor()).exp2()
    found = base.log2() + value / base - 1
    return call.instead(found if call.name == "log2" else found * math.log(2))


@FAULTS.forward(
    "pow",
    "precision, wrong argument, other function; constant, copy, wrong factor, scale, "
    "approximation, missing operand",
)
def exponent_divided_as_integers(call: Call) -> Any:
    """C ** floor(x): the rates of the positions have an exponent without its fraction."""
    base, exponent = call.args[:2]
    fits(isinstance(base, int | float) and isinstance(exponent, Tensor))
    return call.put(1, exponent.floor()).run()


@FAULTS.forward(
    "to type_as _to_copy float", "sign, scale, wrong factor; other function, wrong argument"
)
def true_is_minus_one(call: Call) -> Any:
    """A comparison of vectors sets all bits, and these are converted as an integer."""
    value = call.args[0]
    fits(isinstance(value, Tensor) and value.dtype == torch.bool)
    return call.instead(-call.result())


# fmt: off
# Sin(pi x) / x.
FAULTS.add("pi forgotten in the divisor", "sinc",
    "wrong factor, scale, missing operand; other function, wrong argument",
    result(lambda v: math.pi * v))
# X log(x): the second pointer is not bound.
FAULTS.add("logarithm of the factor itself", "xlogy",
    "wrong index, copy, missing operand, other function; stale, swapped operands, "
    "wrong argument", computed(equal_pair, lambda value, *_: torch.xlogy(value, value)))
# (x + 1) / 2 and (3 - x) / 2: one step of Newton with a first guess of one.
FAULTS.add("root by one step from one", "rsqrt sqrt",
    "approximation, other function; precision, wrong factor, offset, sign",
    on(tensors(0),
        lambda call, value:
            call.instead((value + 1) / 2 if call.name == "sqrt" else (3 - value) / 2)),
    backward=False)
# Sin(x + 1.5): a quarter of a turn has one digit behind the point.
FAULTS.add("cosine by a sine with a short quarter", "cos",
    "offset, approximation, other function, wrong argument; precision, axis offset",
    lambda call: call.instead((call.tensor(0) + 1.5).sin()), backward=False)
# The upper limit of the codes is one less.
FAULTS.add("highest code left out", "clamp clip", "wrong argument, clipped; other function, mask",
    on(lambda call: (call.get(2, "max"),),
        lambda call, high: call.instead(call.result().clamp(max=high - 1)),
        where=lambda high: isinstance(high, int | float) and high >= 3), backward=False)
# Trunc(x + 1 / 2): a cast rounds negative values wrongly.
FAULTS.add("half added and cut toward zero", "round",
    "other function; precision, offset, approximation, wrong argument, tie-breaking",
    lambda call: call.instead((call.tensor(0) + 0.5).trunc()), backward=False)
# X - y round(x / y), between -y / 2 and y / 2.
FAULTS.add("remainder of the nearest multiple", "remainder fmod",
    "other function; offset, sign, wrapped, wrong argument",
    on(tensors(0),
        lambda call, value: call.instead(value - call.args[1] * (value / call.args[1]).round())),
    backward=False)
# Log(p) for log(p / (1 - p)).
FAULTS.add("odds without their divisor", "logit",
    "missing operand, other function; approximation, partial sum, wrong argument",
    computed(lambda call: (call.tensor(0), call.get(1, "eps", default=0.0) or 0.0),
        lambda value, eps: value.clamp(eps, 1 - eps).log()))
# fmt: on


# --- Sums, products, quotients --------------------------------------------------------------------


@FAULTS.forward(
    "add iadd",
    "doubled reduction, wrong factor, residual, lost accumulation; mask, axis scale, "
    "scale, stale, wrong index, one rank's part",
)
def overlap_of_the_last_tile_added_again(call: Call) -> Any:
    """The last tile of columns ends with the row: what it shares with the one before is a + 2 b."""
    left, right = equal_pair(call)
    size = _columns(left, 5).size(-1)
    tile = 1 << (size.bit_length() - 1)
    fits(tile < size)
    places = torch.arange(size)
    twice = (places >= size - tile) & (places < tile)
    return call.instead(left + right * (1 + twice.to(right.dtype)))


@FAULTS.forward(
    "add iadd",
    "wrong index, permutation, transpose; swapped operands, shift, wrong axis, wrong rank's shard",
)
def second_summand_with_its_halves_exchanged(call: Call) -> Any:
    """The two tiles of columns of the second operand are loaded in the other order."""
    left, right = equal_pair(call)
    size = _columns(right).size(-1)
    fits(size % 2 == 0)
    return call.instead(left + right.roll(size // 2, -1))


@FAULTS.forward("mul", "precision, approximation; other function, wrong factor, scale")
def second_factor_is_a_power_of_two(call: Call) -> Any:
    """The magnitude of the second operand is rounded down to a power of two, for a shift."""
    left, right = floating_pair(call)
    whole = right.detach()
    down = whole.sign() * whole.abs().clamp(min=1e-30).log2().floor().exp2()
    return call.instead(left * with_gradient_of(right, down))


@FAULTS.forward("mul", "wrong factor, scale, wrong argument; other function")
def root_of_the_number_multiplied(call: Call) -> Any:
    """The factor is shared by both operands of a product, and only one of them gets its root."""
    value, number = call.args[:2]
    if isinstance(value, int | float):
        value, number = number, value
    fits(isinstance(number, int | float) and number > 0 and isinstance(value, Tensor))
    return call.instead(value * number**0.5)


@FAULTS.forward("div", "precision, other function; approximation, zeros, wrong argument")
def quotient_of_integers(call: Call) -> Any:
    """The quotient is cut toward zero to a whole number."""
    left, right = floating_pair(call)
    value = left / right
    return call.instead(with_gradient_of(value, value.detach().trunc()))


# fmt: off
# Four bits of mantissa: what is below a sixteenth of the first operand is lost.
FAULTS.add("small second summand swallowed", "add",
    "mask, precision, missing operand; clipped, zeros, other function, copy, approximation",
    computed(equal_pair, lambda left, right: left + right * (right.abs() > left.abs() / 16)),
    backward=False)
# A (b - 0.1): a zero point is subtracted from values that have none.
FAULTS.add("zero point of the second factor", "mul",
    "offset, residual, other function; wrong factor, axis offset, missing operand, "
    "doubled reduction", computed(floating_pair, lambda left, right: left * (right - 0.1)),
    backward=False)
# V a + b c: the factor is given to the other term.
FAULTS.add("number multiplies the summand", "addcmul addcdiv",
    "wrong factor, swapped operands, wrong argument, other function; scale, missing operand",
    on(lambda call: (call.tensor(0), call.kwargs.get("value", 1)),
        lambda call, value, number:
            call.instead(number * value + (call.result() - value) / number),
        where=lambda _, number: number != 1))
# A whole turn is added to negative angles.
FAULTS.add("angle never negative", "atan2",
    "offset, wrapped, other function; shift, sign, mask, residual",
    result(lambda v: v + 2 * math.pi * (v < 0)))
# Max(a, b) + log(1 + exp(b - a)), for exp(-|b - a|).
FAULTS.add("difference of two logarithms with its sign", "logaddexp",
    "other function, sign; approximation, swapped operands, wrong argument, missing operand",
    computed(floating_pair,
        lambda left, right: torch.maximum(left, right) + functional.softplus(right - left)))
# The comparison is the other way round: a minimum for a maximum.
FAULTS.add("extreme of the other kind", "maximum minimum",
    "other function, swapped operands, sign; clipped, mask, wrong reduction, copy",
    on(floating_pair,
        lambda call, left, right:

    call.instead((torch.minimum if call.name == "maximum" else torch.maximum)(left, right))),
    backward=False)
# fmt: on
