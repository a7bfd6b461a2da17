"""Faults that were measured third and have been seen: functions of single elements."""

from __future__ import annotations

import math
from typing import Any

import torch
from benchmarks.places import words
from benchmarks.places.calls import Call, Catalogue, fits, with_gradient_of
from benchmarks.places.changes import computed, on, operand, result, tensors
from benchmarks.places.parts import tensor_pair
from torch import Tensor
from torch.nn import functional

FAULTS = Catalogue()


# --- Activations ----------------------------------------------------------------------------------


@FAULTS.fault("gelu silu tanh sigmoid erf exp", "approximation, precision; other function")
def read_from_a_table(call: Call) -> Any:
    """A table with sixteen entries for each unit of the input; nothing between them."""
    value = call.tensor(0, "input")
    near = (value.detach() * 16).round() / 16
    smooth = call.result()
    return call.instead(with_gradient_of(smooth, call.put(0, near, "input").result()))


@FAULTS.fault("tanh sigmoid sin", "approximation, other function; wrong factor")
def series_beyond_its_range(call: Call) -> Any:
    """Two terms of the series about zero."""
    value = call.tensor(0, "input")
    series = {
        "tanh": lambda x: x - x**3 / 3,
        "sin": lambda x: x - x**3 / 6,
        "sigmoid": lambda x: 0.5 + x / 4 - x**3 / 48,
    }[call.name]
    return call.instead(series(value))


@FAULTS.fault(
    "gelu silu relu tanh", "stale, copy, wrong index; missing operand, mask, other function"
)
def tail_of_the_rows_not_activated(call: Call) -> Any:
    """A vector loop without its tail, in place: the last columns keep the input."""
    value, result = call.tensor(0, "input"), call.result().clone()
    fits(value.dim() > 1 and value.size(-1) > 3)
    tail = value.size(-1) % 4 or 2
    result[..., -tail:] = value[..., -tail:]
    return call.instead(result)


@FAULTS.fault("glu", "other function; wrong argument, scale")
def gate_by_a_tanh(call: Call) -> Any:
    """A tanh(b)."""
    value, gate = call.tensor(0, "input").chunk(2, call.get(1, "dim", default=-1))
    return call.instead(value * gate.tanh())


@FAULTS.fault("leaky_relu", "sign, other function, wrong argument; wrong factor")
def slope_negated(call: Call) -> Any:
    """A slope of -0.2 below zero."""
    value, slope = call.tensor(0, "input"), call.get(1, "negative_slope", default=0.01)
    return call.instead(functional.leaky_relu(value, -slope))


# fmt: off
# What is small becomes zero.
FAULTS.add("dead zone", "gelu silu tanh sigmoid relu",
    "other function, zeros, mask; clipped, approximation",
    result(lambda v: torch.where(v.abs() < 0.2 * float(v.detach().abs().max()), 0.0, v)))
# 1 is added to the argument, as to the forget gate of another library.
FAULTS.add("gate opened by one", "sigmoid", "offset, other function; wrong argument, approximation",
    lambda call: call.instead(torch.sigmoid(call.tensor(0, "input") + 1)))
# The bias of another layer is still in the register: x + 0.5.
FAULTS.add("argument moved by a half", "gelu silu",
    "offset, other function; wrong argument, approximation, axis offset",
    operand(0, lambda v: v + 0.5, "input"))
# The output overwrites the input only half: f(x) + x.
FAULTS.add("input added to the activation", "relu gelu silu",
    "residual, other function; offset, missing operand, wrong factor",
    lambda call: call.instead(call.result() + call.tensor(0, "input")))
# X relu6(x) / 6.
FAULTS.add("three not added", "hardswish",
    "missing operand, offset, other function; wrong argument, clipped",
    computed(lambda call: (call.tensor(0, "input"),),
        lambda value: value * functional.relu6(value) / 6))
# Silu.
FAULTS.add("smooth for hard", "hardswish", "other function, approximation",
    lambda call: call.instead(functional.silu(call.tensor(0, "input"))))
# log(1 + exp(2 x)) / 2.
FAULTS.add("softplus with a beta of two", "softplus", words.ANOTHER_FACTOR,
    lambda call: call.instead(functional.softplus(call.tensor(0, "input"), beta=2.0)))
# The first half opens the second.
FAULTS.add("halves of the gate exchanged", "glu",
    "swapped operands, permutation, wrong index; shift, wrong argument",
    on(lambda call: (call.tensor(0, "input"), call.get(1, "dim", default=-1)),
        lambda call, value, dim:
            call.put(0, value.roll(value.size(dim) // 2, dim), "input").run()))
# The pointer to the slopes is not moved on.
FAULTS.add("slope of the first channel for all", "prelu",
    "copy, wrong index, wrong argument; axis scale, stale",
    operand(1, lambda v: v[:1].expand(v.shape).contiguous(), "weight",
        where=lambda v: v.numel() > 1))
# Values are dropped in evaluation as well; the same ones at each call.
FAULTS.add("dropout left on", "dropout",
    "mask, different random stream, wrong argument, zeros; scale, wrong factor, other function",
    computed(lambda call: (call.tensor(0, "input"),),
        lambda value:

    value * (torch.rand(value.shape, generator=torch.Generator().manual_seed(5)) > 0.1) / 0.9))
# The old rule: multiplied by the chance to be kept when nothing is dropped.
FAULTS.add("dropout scales in evaluation", "dropout", "scale, wrong factor; wrong argument",
    lambda call: call.instead(call.tensor(0, "input") * 0.9))
# fmt: on


# --- Elementary functions -------------------------------------------------------------------------


@FAULTS.fault("pow", "sign, other function; missing operand")
def odd_power_of_the_magnitude(call: Call) -> Any:
    """exp(n log|x|), whose sign is lost."""
    exponent = call.args[1]
    fits(isinstance(exponent, int | float) and exponent % 2 == 1)
    return call.instead(call.tensor(0).abs() ** exponent)


@FAULTS.fault("pow", "wrong factor, scale, other function; wrong argument")
def base_halved_before_the_power(call: Call) -> Any:
    """(x / 2) ** n."""
    exponent = call.args[1]
    fits(isinstance(exponent, int | float) and exponent > 1)
    return call.instead((call.tensor(0) / 2) ** exponent)


@FAULTS.fault("clamp clip hardtanh", "wrong argument, clipped; other function")
def limits_taken_as_symmetric(call: Call) -> Any:
    """From -max to max."""
    value, high = call.tensor(0, "input"), call.get(2, "max", "max_val")
    low = call.get(1, "min", "min_val")
    fits(isinstance(high, int | float) and isinstance(low, int | float) and high > 0)
    return call.instead(value.clamp(-high, high))


@FAULTS.fault(
    "floor_divide floordiv",
    "other function, off by one reduction; offset, wrong argument, tie-breaking, sign",
)
def quotient_cut_toward_zero(call: Call) -> Any:
    """-3 // 2 is -1, as in C."""
    left, right = call.args[:2]
    fits(isinstance(left, Tensor))
    return torch.div(left, right, rounding_mode="trunc")


@FAULTS.fault("remainder mod", "other function, sign, offset; wrong argument")
def remainder_with_the_sign_of_the_dividend(call: Call) -> Any:
    """As in C."""
    left, right = call.args[:2]
    fits(isinstance(left, Tensor))
    return torch.fmod(left, right)


# fmt: off
# exp(-x).
FAULTS.add("exponent negated", "exp", "sign, other function; wrong factor",
    lambda call: call.instead((-call.tensor(0)).exp()))
# Whole turns of 6.28 are subtracted.
FAULTS.add("angle reduced by a rounded pi", "sin cos",
    "approximation, precision; other function, offset, wrong factor",
    operand(0, lambda v: v - 6.28 * (v / 6.28).round(),
        where=lambda v: float(v.abs().max()) > 4))
# A table of angles ends: what is beyond has the last one.
FAULTS.add("angle limited", "sin cos",
    "clipped, wrong argument; other function, copy, wrong index, constant",
    operand(0, lambda v: v.clamp(max=0.5 * float(v.max()))))
# The slowest angle comes first.
FAULTS.add("frequencies in the reverse order", "sin cos",
    "permutation, wrong index; transpose, shift",
    operand(0, lambda v: v.flip(-1), where=lambda v: v.dim() > 1 and v.size(-1) > 2))
# The result is cut to the median of all.
FAULTS.add("root limited to its middle", "rsqrt sqrt reciprocal",
    "clipped; other function, eps, mask",
    result(lambda v: v.clamp(max=float(v.detach().median())), where=lambda v: v.numel() > 2))
# -log(x).
FAULTS.add("logarithm of the inverse", "log", "sign, other function, scale, wrong factor",
    result(torch.neg))
# As C does, and not to the even one.
FAULTS.add("halves rounded away from zero", "round",
    "tie-breaking, other function; offset, wrong argument, precision",
    computed(tensors(0), lambda value: value.sign() * (value.abs() + 0.5).floor()))
# To the next whole number above.
FAULTS.add("rounded up", "round floor", "offset, other function; wrong argument, shift",
    lambda call: call.instead(call.tensor(0).ceil()))
# X - floor(x), which is never negative.
FAULTS.add("fraction from the floor", "frac", "other function, offset, sign; wrong argument",
    computed(tensors(0), lambda value: value - value.floor()))
# The value as it came, cut to -1 and 1.
FAULTS.add("value for its sign", "sign", "copy, missing operand, other function; scale, clipped",
    lambda call: call.instead(call.tensor(0).clamp(-1, 1)))
# The absolute values are compared.
FAULTS.add("operand of the larger magnitude", "maximum minimum",
    "other function; sign, swapped operands",
    computed(tensor_pair,
        lambda left, right: torch.where(left.abs() > right.abs(), left, right)))
# The first operand as it is.
FAULTS.add("second operand not compared", "maximum minimum",
    "copy, missing operand; clipped, other function, stale",
    computed(tensor_pair, lambda left, right: left.expand_as(left + right).clone()))
# fmt: on


# --- Sums, products, quotients --------------------------------------------------------------------


@FAULTS.fault("add", "wrong index, permutation, wrong rank's shard; residual, shift, copy, offset")
def residual_of_the_other_example(call: Call) -> Any:
    """The second operand is that of the next example of the batch."""
    left, right = tensor_pair(call)
    fits(left.shape == right.shape and right.dim() > 2 and right.size(0) > 1)
    return call.instead(left + right.roll(1, 0))


@FAULTS.fault("add sub mul", "precision; approximation, clipped")
def second_operand_in_eight_bits(call: Call) -> Any:
    """The second operand comes from a buffer of float8."""
    _, right = tensor_pair(call)
    narrow = with_gradient_of(right, right.detach().to(torch.float8_e5m2).to(right.dtype))
    return call.put(1, narrow).run()


@FAULTS.fault("add", "clipped, overflow; other function, precision, wrapped")
def sum_saturates(call: Call) -> Any:
    """Fixed point: the sum stays below six tenths of the largest."""
    left, right = tensor_pair(call)
    value = left + right
    most = 0.6 * float(value.detach().abs().max())
    return call.instead(value.clamp(-most, most))


@FAULTS.fault("to _to_copy", "precision; approximation, offset, other function")
def cut_to_bfloat16(call: Call) -> Any:
    """A cast to bfloat16 cuts the last bits instead of rounding."""
    value, result = call.tensor(0), call.result()
    fits(result.dtype == torch.bfloat16 and value.dtype == torch.float32)
    bits = value.detach().contiguous().view(torch.int32) & ~0xFFFF
    return with_gradient_of(value, bits.view(torch.float32)).to(torch.bfloat16)


@FAULTS.fault("to _to_copy float type_as", "zeros, uninitialised; mask, missing operand, constant")
def cast_ends_early(call: Call) -> Any:
    """The last quarter of the memory is not converted."""
    value = call.result().flatten().clone()
    fits(value.numel() > 7)
    value[-(value.numel() // 4) :] = 0
    return value.view(call.result().shape)


@FAULTS.fault(
    "zeros", "constant, offset, uninitialised, stale, wrong argument; residual, other function"
)
def state_of_the_sequence_before(call: Call) -> Any:
    """The state is not cleared: it begins with what was left in it."""
    value = call.run()
    fits(isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 1)
    return value + math.pi / 8


# fmt: off
# The weights of the chosen experts are not divided by their sum.
FAULTS.add("not normalised by the divisor", "div",
    "copy, missing operand; axis scale, scale, other function, missing reduction, wrong factor",
    on(tensor_pair,
        lambda call, left, *_: call.instead(left.expand(call.result().shape).clone()),
        where=lambda _, right: right.numel() > 1))
# What is divided by is at least the median of all divisors.
FAULTS.add("divisor has a floor", "div",
    "clipped, eps, wrong argument; axis scale, scale, mask, wrong factor",
    computed(tensor_pair,
        lambda left, right: left / right.clamp(min=float(right.detach().median())),
        where=lambda _, right: right.numel() > 2))
# One divisor for all rows.
FAULTS.add("divided by the mean divisor", "div",
    "wrong axis, wrong statistics, wrong index, wrong reduction; axis scale, scale, copy, "
    "wrong factor",
    computed(tensor_pair, lambda left, right: left / right.mean(),
        where=lambda _, right: right.numel() > 1))
# The second operand is read backwards along the last axis.
FAULTS.add("second factor from its end", "mul",
    "permutation, wrong index; transpose, shift, axis scale",
    computed(tensor_pair, lambda left, right: left * right.flip(-1),
        where=lambda _, right: right.dim() > 0 and right.size(-1) > 2))
# A |b|.
FAULTS.add("magnitude of the second factor", "mul",
    "other function, sign; wrong factor, mask, clipped",
    computed(tensor_pair, lambda left, right: left * right.abs()))
# The second operand is read backwards along the last axis.
FAULTS.add("second summand from its end", "add",
    "permutation, wrong index; shift, residual, offset",
    computed(tensor_pair, lambda left, right: left + right.flip(-1),
        where=lambda _, right: right.dim() > 1 and right.size(-1) > 2))
# A - b / 2.
FAULTS.add("half subtracted", "sub",
    "wrong factor, wrong argument; offset, residual, axis offset, missing operand",
    computed(tensor_pair, lambda left, right: left - 0.5 * right))
# Numbers without a sign: what would be negative is zero.
FAULTS.add("opposite without a sign", "neg", "zeros, clipped, other function; sign, mask",
    lambda call: call.instead((-call.tensor(0)).clamp(min=0)))
# A relu.
FAULTS.add("negative part is zero", "abs", "other function, clipped; zeros, mask, missing operand",
    lambda call: call.instead(call.tensor(0).clamp(min=0)))
# fmt: on
