"""Faults that were measured fifth and have been seen: functions of single elements."""

from __future__ import annotations

import math
from typing import Any

import torch
from benchmarks.places.calls import Call, Catalogue, fits, with_gradient_of
from benchmarks.places.changes import computed, on, operand, result, tensors
from benchmarks.places.parts import floating_pair, operand_and_number
from torch.nn import functional

FAULTS = Catalogue()


# --- Activations ----------------------------------------------------------------------------------


@FAULTS.fault("celu", "other function, wrong factor; wrong argument")
def celu_becomes_elu(call: Call) -> Any:
    """Alpha (exp(x) - 1): x is not divided by alpha."""
    return call.instead(functional.elu(call.tensor(0, "input"), call.get(1, "alpha", default=1.0)))


@FAULTS.forward("elu", "other function, clipped, wrong argument, zeros; mask, missing operand")
def elu_becomes_relu(call: Call) -> Any:
    """Nothing is left below zero."""
    fits(len(call.args) < 3)
    return call.instead(call.tensor(0, "input").relu())


@FAULTS.fault("glu", "other function; approximation")
def gate_by_a_gelu(call: Call) -> Any:
    """A gelu(b)."""
    left, right = call.tensor(0, "input").chunk(2, call.get(1, "dim", default=-1))
    return call.instead(left * functional.gelu(right))


@FAULTS.fault("glu", "other function, offset, residual; wrong factor")
def value_of_the_gate_plus_one(call: Call) -> Any:
    """(a + 1) sigmoid(b), as some models clip and shift it."""
    left, right = call.tensor(0, "input").chunk(2, call.get(1, "dim", default=-1))
    return call.instead((left + 1) * right.sigmoid())


@FAULTS.fault("hardshrink", "mask, other function, sign; zeros, clipped")
def negative_values_shrunk_to_nothing(call: Call) -> Any:
    """X > lambda is kept, and x < -lambda is forgotten."""
    value = call.tensor(0, "input")
    return call.instead(torch.where(value > call.get(1, "lambd", default=0.5), value, 0 * value))


@FAULTS.forward("relu6 hardtanh", "other function, approximation; clipped, wrong argument")
def limits_approached_softly(call: Call) -> Any:
    """A tanh between the limits."""
    value = call.tensor(0, "input")
    low, high = call.get(1, "min_val", default=0.0), call.get(2, "max_val", default=6.0)
    middle, half = (low + high) / 2, (high - low) / 2
    return call.instead(middle + half * ((value - middle) / half).tanh())


# fmt: off
# X tanh(softplus(x)).
FAULTS.add("gelu becomes mish", "gelu", "other function, approximation; wrong argument",
    lambda call: call.instead(functional.mish(call.tensor(0, "input"))))
# X (1 + erf(x)) / 2: the root of two is forgotten.
FAULTS.add("erf of the argument itself", "gelu",
    "other function, wrong factor, approximation; wrong argument",
    computed(lambda call: (call.tensor(0, "input"),),
        lambda value: value * 0.5 * (1 + value.erf())))
# exp(x) - 1 below zero.
FAULTS.add("silu becomes elu", "silu", "other function, approximation; wrong argument",
    lambda call: call.instead(functional.elu(call.tensor(0, "input"))))
# X (1 - sigmoid(x)).
FAULTS.add("silu with the complement", "silu",
    "other function, wrong factor, sign; missing operand",
    computed(lambda call: (call.tensor(0, "input"),),
        lambda value: value * (1 - value.sigmoid())))
# max(x, 0.1): the zero point of the integers is taken for zero.
FAULTS.add("relu cut at a tenth", "relu",
    "clipped, other function; wrong argument, offset, constant, mask",
    lambda call: call.instead(call.tensor(0, "input").clamp(min=0.1)))
# The grid is one row too short, in place.
FAULTS.add("last row not activated", "relu gelu silu tanh",
    "copy, missing operand, mask, stale; other function, uninitialised",
    on(lambda call: (call.tensor(0, "input"),),
        lambda call, value: call.instead(torch.cat([call.result()[:-1], value[-1:]])),
        where=lambda value: value.dim() > 1 and value.size(0) > 1), backward=False)
# Softmax, as the router of another model.
FAULTS.add("chances of the row sum to one", "sigmoid",
    "other function, wrong reduction; axis scale, wrong factor",
    computed(lambda call: (call.tensor(0, "input"),), lambda value: value.softmax(-1),
        where=lambda value: value.dim() > 1 and value.size(-1) > 1), backward=False)
# sigmoid(x) - 1 / 2.
FAULTS.add("sigmoid about zero", "sigmoid", "offset, other function; wrong factor",
    result(lambda v: v - 0.5), backward=False)
# (1 + tanh(x)) / 2.
FAULTS.add("tanh between zero and one", "tanh", "other function, wrong factor, offset; scale",
    result(lambda v: (1 + v) / 2), backward=False)
# clamp(0.2 x + 0.5, 0, 1).
FAULTS.add("hard sigmoid of another framework", "hardsigmoid",
    "other function, wrong factor, approximation; scale, wrong argument",
    lambda call: call.instead((0.2 * call.tensor(0, "input") + 0.5).clamp(0, 1)))
# max(x, 0).
FAULTS.add("hard swish becomes relu", "hardswish", "other function, clipped; approximation",
    lambda call: call.instead(call.tensor(0, "input").relu()))
# A slope of zero.
FAULTS.add("nothing leaks", "leaky_relu",
    "wrong argument, clipped, zeros, other function, missing operand; wrong factor, mask",
    lambda call: call.instead(call.tensor(0, "input").relu()), backward=False)
# The slopes are not loaded: the default of a new layer.
FAULTS.add("slope of a quarter for all", "prelu _prelu_kernel",
    "wrong factor, wrong argument, constant, missing operand; mask, other function, copy",
    operand(1, lambda v: torch.full_like(v, 0.25)), backward=False)
# X softplus(x).
FAULTS.add("mish without the tanh", "mish", "other function, missing operand; approximation",
    computed(lambda call: (call.tensor(0, "input"),),
        lambda value: value * functional.softplus(value)))
# The factor is right, and alpha that of elu.
FAULTS.add("selu with an alpha of one", "selu", "wrong argument, wrong factor, other function",
    lambda call: call.instead(1.0507009873554805 * functional.elu(call.tensor(0, "input"))))
# X / sqrt(1 + x^2).
FAULTS.add("softsign by a root", "softsign", "other function, approximation",
    computed(lambda call: (call.tensor(0, "input"),),
        lambda value: value * (1 + value.square()).rsqrt()))
# log(1 - sigmoid(x)).
FAULTS.add("logarithm of the complement", "log_sigmoid log_sigmoid_forward",
    "sign, other function; wrong factor",
    lambda call: call.instead(functional.logsigmoid(-call.tensor(0))))
# log(1 + exp(x)) - log(2).
FAULTS.add("softplus through the origin", "softplus", "offset, other function; wrong argument",
    result(lambda v: v - math.log(2)), backward=False)
# Lambda is doubled.
FAULTS.add("shrunk by twice as much", "softshrink hardshrink",
    "wrong argument, other function; offset, mask, zeros",
    lambda call: call.put(1, 2 * call.get(1, "lambd", default=0.5), "lambd").run())
# Zero where another value was given.
FAULTS.add("nothing below the threshold", "threshold",
    "wrong argument, constant, zeros, missing operand; offset, other function",
    lambda call: call.put(2, 0.0, "value").run(), backward=False)
# max(x, threshold).
FAULTS.add("threshold becomes a limit", "threshold",
    "clipped, other function, wrong argument; constant, mask",
    lambda call: call.instead(call.tensor(0).clamp(min=call.get(1, "threshold"))), backward=False)
# fmt: on


# --- Elementary functions -------------------------------------------------------------------------


@FAULTS.forward("pow square", "sign, other function; wrong factor")
def sign_kept_by_the_square(call: Call) -> Any:
    """X |x|."""
    fits(call.name == "square" or call.args[1] == 2)
    value = call.tensor(0)
    return call.instead(value * value.abs())


@FAULTS.forward("div", "wrong argument, other function, offset; sign")
def quotient_cut_toward_zero_by_its_mode(call: Call) -> Any:
    """rounding_mode='trunc' for 'floor'."""
    fits(call.kwargs.get("rounding_mode") == "floor")
    return Call(call.name, call.function, call.args, {"rounding_mode": "trunc"}).run()


@FAULTS.fault("expm1 log1p", "precision, approximation; other function")
def one_added_in_half(call: Call) -> Any:
    """exp(x) - 1 and log(1 + x), with the sum in float16."""
    value = call.tensor(0)
    inner = value.exp() if call.name == "expm1" else 1 + value
    inner = with_gradient_of(inner, inner.detach().half().to(inner.dtype))
    return call.instead(inner - 1 if call.name == "expm1" else inner.log())


@FAULTS.forward("clamp clip", "wrong argument, clipped; wrong factor, scale")
def limits_halved(call: Call) -> Any:
    """Half of both limits."""
    low, high = call.get(1, "min"), call.get(2, "max")
    numbers = [one for one in (low, high) if isinstance(one, int | float) and one]
    fits(numbers and call.tensor(0) is not None)
    changed = call if low is None else call.put(1, low / 2, "min")
    return (changed if high is None else changed.put(2, high / 2, "max")).run()


@FAULTS.fault("to _to_copy", "precision; different random stream, approximation, tie-breaking")
def cast_rounds_at_random(call: Call) -> Any:
    """A cast to bfloat16 that adds noise to the lost bits first."""
    value, result = call.tensor(0), call.result()
    fits(result.dtype == torch.bfloat16 and value.dtype in {torch.float32, torch.float64})
    noise = torch.rand(value.shape, generator=torch.Generator().manual_seed(5)).to(value.dtype)
    moved = value.detach() * (1 + (noise - 0.5) * 2**-7)
    return call.instead(with_gradient_of(result, moved.to(torch.bfloat16)))


@FAULTS.forward("zeros", "constant, offset, wrong argument; uninitialised, other function")
def state_begins_with_one(call: Call) -> Any:
    """Ones for zeros."""
    value = call.result()
    fits(value.numel() > 0)
    return torch.ones_like(value)


# fmt: off
# N ** x.
FAULTS.add("base and exponent exchanged", "pow", "swapped operands, other function; wrong argument",
    computed(operand_and_number, lambda value, power: power**value,
        where=lambda _, power: power > 0), backward=False)
# 1 / (1 + sqrt(x)).
FAULTS.add("reciprocal of one more than the root", "rsqrt",
    "other function, missing operand; axis scale, scale",
    lambda call: call.instead(1 / (1 + call.tensor(0).sqrt())), backward=False)
# A table with 64 entries for each unit of the result.
FAULTS.add("reciprocal root in steps of a 64th", "rsqrt",
    "precision, approximation; axis scale, scale",
    result(lambda v: with_gradient_of(v, (64 * v.detach()).ceil() / 64)), backward=False)
# The argument is at least its median.
FAULTS.add("logarithm has a floor", "log", "clipped, eps, wrong argument; other function, constant",
    operand(0, lambda v: v.clamp(min=float(v.detach().median()))), backward=False)
# floor(x + 1 / 2).
FAULTS.add("halves rounded up", "round", "tie-breaking, other function; offset",
    lambda call: call.instead((call.tensor(0) + 0.5).floor()))
# Rounded.
FAULTS.add("floor becomes the nearest", "floor",
    "other function, offset; precision, wrong argument",
    lambda call: call.instead(call.tensor(0).round()))
# The ceiling of the magnitude.
FAULTS.add("ceiling away from zero", "ceil", "other function, offset; sign, wrong argument",
    computed(tensors(0), lambda value: value.sign() * value.abs().ceil()))
# Floor.
FAULTS.add("cut downward", "trunc", "other function, offset; sign, wrong argument",
    lambda call: call.instead(call.tensor(0).floor()))
# exp(x).
FAULTS.add("natural base for two", "exp2", "other function, wrong factor, scale; wrong argument",
    lambda call: call.instead(call.tensor(0).exp()))
# log(x).
FAULTS.add("natural logarithm for base two", "log2",
    "scale, wrong factor, other function; wrong argument",
    lambda call: call.instead(call.tensor(0).log()))
# X, as for small angles.
FAULTS.add("argument for its function", "atan asinh",
    "copy, missing operand, other function; approximation",
    lambda call: call.instead(call.tensor(0).clone()))
# log(|x| + sqrt(x^2 + 1)).
FAULTS.add("arsinh of the magnitude", "asinh", "sign, other function; approximation, nonfinite",
    lambda call: call.instead(call.tensor(0).abs().asinh()))
# sin(x) / x.
FAULTS.add("sinc without pi", "sinc", "wrong factor, other function, scale, wrong argument",
    operand(0, lambda v: v / math.pi))
# 0.4 for what was given.
FAULTS.add("logit with another eps", "logit", "eps, wrong argument, clipped; missing operand",
    lambda call: call.instead(torch.logit(call.tensor(0), 0.4)))
# Y log(x).
FAULTS.add("logarithm of the first", "xlogy", "swapped operands, other function",
    computed(floating_pair, lambda left, right: torch.xlogy(right, left),
        where=lambda left, *_: bool((left > 0).all())), backward=False)
# -1 / x.
FAULTS.add("reciprocal negated", "reciprocal", "sign, wrong factor, scale; other function",
    result(torch.neg), backward=False)
# The divisor times two.
FAULTS.add("period doubled", "remainder fmod",
    "wrong argument, wrapped, wrong factor; offset, other function",
    on(operand_and_number, lambda call, _, number: call.put(1, 2 * number).run()))
# |x| - floor(|x|).
FAULTS.add("fraction of the magnitude", "frac", "sign, other function; wrong factor",
    operand(0, torch.abs))
# 1 for positive values, else 0.
FAULTS.add("sign without a minus", "sign", "clipped, zeros, other function; mask, sign",
    result(lambda v: with_gradient_of(v, (v.detach() > 0).to(v.dtype))), backward=False)
# fmt: on


# --- Sums, products, quotients --------------------------------------------------------------------


@FAULTS.forward("add", "precision; approximation")
def residual_stream_in_half(call: Call) -> Any:
    """The sum is kept in float16 between two layers."""
    floating_pair(call)
    value = call.result()
    return call.instead(with_gradient_of(value, value.detach().half().to(value.dtype)))


@FAULTS.forward(
    "mul", "mask, missing operand, axis scale, wrong factor, scale; copy, stale, partial sum"
)
def number_applied_to_half_of_the_columns(call: Call) -> Any:
    """The factor is lost behind the first tile."""
    value, number = operand_and_number(call)
    fits(value.dim() > 0 and value.size(-1) > 1 and number != 1)
    factor = torch.ones(value.size(-1), dtype=value.dtype)
    factor[: value.size(-1) // 2] = number
    return call.instead(value * factor)


@FAULTS.forward("mul", "precision; approximation")
def first_factor_in_four_bits(call: Call) -> Any:
    """15 levels for the whole of the first operand."""
    left, right = floating_pair(call)
    step = left.detach().abs().max() / 7
    fits(float(step) > 0)
    return call.instead(with_gradient_of(left, (left.detach() / step).round() * step) * right)


@FAULTS.forward("lerp", "wrong factor, wrong argument, scale; other function")
def half_of_the_way(call: Call) -> Any:
    """A + w (b - a) / 2."""
    left, right, share = call.args[:3]
    return call.instead(left + share / 2 * (right - left))


@FAULTS.fault("addcmul", "sign, wrong argument, wrong factor; scale")
def product_subtracted(call: Call) -> Any:
    """A minus for the value."""
    first, left, right = call.args[:3]
    return call.instead(first - call.kwargs.get("value", 1) * left * right)


# fmt: off
# A digit too many in a constant.
FAULTS.add("number ten times too large", "add sub mul div",
    "wrong argument, wrong factor, scale, offset, eps; axis scale",
    on(operand_and_number, lambda call, _, number: call.put(1, 10 * number).run()), backward=False)
# -c for c.
FAULTS.add("number with the other sign", "add sub",
    "sign, wrong argument, offset, other function; eps",
    on(operand_and_number, lambda call, _, number: call.put(1, -number).run()), backward=False)
# The stride of its columns is zero.
FAULTS.add("first column of the second operand for all", "add mul",
    "copy, wrong index, stale; axis offset, axis scale",
    on(floating_pair,
        lambda call, _, right: call.put(1, right[..., :1].expand(right.shape).clone()).run(),
        where=lambda _, right: right.dim() > 0 and right.size(-1) > 1), backward=False)
# Its strides are exchanged.
FAULTS.add("second summand transposed", "add", "transpose, wrong index, permutation",
    on(floating_pair, lambda call, _, right: call.put(1, right.mT.contiguous()).run(),
        where=lambda _, right: right.dim() > 1 and right.size(-1) == right.size(-2) > 1),
    backward=False)
# The loop over the batch ends after its first pass.
FAULTS.add("second summand only for the first example", "add",
    "stale, copy, missing operand, mask; residual, wrong index",
    computed(floating_pair, lambda left, right: torch.cat([left[:1] + right[:1], left[1:]]),

    where=lambda left, right: left.shape == right.shape and left.dim() > 1 and (left.size(0) > 1)),
    backward=False)
# A (1 - b).
FAULTS.add("gate complemented", "mul", "other function, wrong factor; offset, residual, sign",
    computed(floating_pair, lambda left, right: left * (1 - right)), backward=False)
# The batch of the second operand is one row too far.
FAULTS.add("second factor of the next example", "mul",
    "wrong index, shift, permutation; axis scale",
    computed(floating_pair, lambda left, right: left * right.roll(-1, 0),
        where=lambda left, right: left.dim() == right.dim() > 1 and right.size(0) > 1),
    backward=False)
# The pointer to the divisors is not moved on.
FAULTS.add("divisor of the first row for all", "div",
    "copy, wrong index, stale; axis scale, wrong factor",
    computed(floating_pair, lambda left, right: left / right[:1],
        where=lambda _, right: right.dim() > 1 and right.size(0) > 1), backward=False)
# A - b: as of logarithms.
FAULTS.add("difference for the quotient", "div", "other function; wrong factor, residual",
    computed(floating_pair, lambda left, right: left - right), backward=False)
# The pointer to what is subtracted is not moved on.
FAULTS.add("what the first row loses for all", "sub",
    "copy, wrong index, stale; axis offset, offset",
    computed(floating_pair, lambda left, right: left - right[:1],
        where=lambda _, right: right.dim() > 1 and right.size(0) > 1), backward=False)
# -x: the number is lost.
FAULTS.add("only the opposite", "rsub",
    "missing operand, offset, wrong argument; sign, other function, wrong factor",
    lambda call: call.instead(-call.tensor(0)), backward=False)
# A limit that was scaled already is scaled again.
FAULTS.add("second operand of the extreme doubled", "maximum minimum",
    "wrong factor, other function; scale, offset",
    on(floating_pair, lambda call, left, right: call.put(0, left).put(1, 2 * right).run()))
# Divided by two pi.
FAULTS.add("angle in turns", "atan2", "scale, wrong factor; other function",
    result(lambda v: v / (2 * math.pi)))
# a^2 + b^2.
FAULTS.add("squares without their root", "hypot", "other function, missing operand",
    result(torch.square))
# logaddexp2.
FAULTS.add("powers of two added", "logaddexp", "other function, wrong factor; wrong argument",
    lambda call: call.instead(torch.logaddexp2(*floating_pair(call))))
# The sign of the first and the magnitude of the second.
FAULTS.add("magnitude of the other", "copysign", "swapped operands; wrong index, other function",
    computed(floating_pair, lambda left, right: torch.copysign(right, left)))
# A / b.
FAULTS.add("quotient for the remainder", "fmod", "other function, missing operand; copy, offset",
    computed(operand_and_number, lambda value, number: value / number))
# fmt: on
