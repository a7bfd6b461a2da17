"""Faults that were measured sixth and have been seen: functions of single elements."""

from __future__ import annotations

import math
from typing import Any

import torch
from benchmarks.places import words
from benchmarks.places.calls import Call, Catalogue, fits, with_gradient_of
from benchmarks.places.changes import computed, longer, on, operand, result, rounded, tensors
from benchmarks.places.parts import floating_pair, operand_and_number
from torch import Tensor
from torch.nn import functional

FAULTS = Catalogue()
_ACTIVATIONS = "gelu relu silu tanh sigmoid"


def _wrapped(value: Tensor, limit: float) -> Tensor:
    return torch.remainder(value + limit, 2 * limit) - limit


# --- Activations ----------------------------------------------------------------------------------


@FAULTS.fault("gelu", "approximation, other function; clipped")
def gelu_by_a_parabola(call: Call) -> Any:
    """The error function of an integer model: a polynomial of second order, cut at 1.769."""
    value = call.tensor(0, "input")
    inner = (value / 2**0.5).abs().clamp(max=1.769)
    erf = value.sign() * (1 - 0.2888 * (inner - 1.769).square())
    return call.instead(value * 0.5 * (1 + erf))


@FAULTS.fault("gelu", "other function; wrong factor, approximation")
def derivative_for_the_gelu(call: Call) -> Any:
    """The kernel of the way back is launched."""
    value = call.tensor(0, "input")
    gate = 0.5 * (1 + (value / 2**0.5).erf())
    return call.instead(gate + value * (-value.square() / 2).exp() / (2 * math.pi) ** 0.5)


@FAULTS.forward("silu sigmoid", "nonfinite, overflow; mask, uninitialised")
def exponential_of_the_gate_overflows(call: Call) -> Any:
    """exp(-x) is infinite for the most negative inputs, and inf / inf is no number."""
    value, result = call.tensor(0, "input"), call.result()
    limit = 0.6 * value.detach().min()
    fits(float(limit) < 0)
    return call.instead(torch.where(value < limit, torch.nan, result))


@FAULTS.forward(_ACTIVATIONS, words.EMPTY_ON_A_RANK)
def second_half_of_the_columns_empty(call: Call) -> Any:
    """The number of columns is that of one shard."""
    value = call.result().clone()
    fits(value.dim() > 0 and value.size(-1) > 1)
    value[..., value.size(-1) // 2 :] = 0
    return call.instead(value)


@FAULTS.forward("selu celu elu", "offset, other function; missing operand")
def exponential_unit_without_its_minus_one(call: Call) -> Any:
    """Alpha exp(x) below zero."""
    value, result = call.tensor(0), call.result()
    fits(len(call.args) < 3)
    given = call.get(1, "alpha", default=1.0)
    alpha = 1.7580993408473766 if call.name == "selu" else given
    return call.instead(torch.where(value < 0, result + alpha, result))


@FAULTS.fault("glu", "other function, missing operand; residual, wrong factor")
def value_added_to_the_gate(call: Call) -> Any:
    """A + sigmoid(b)."""
    left, right = call.tensor(0, "input").chunk(2, call.get(1, "dim", default=-1))
    return call.instead(left + right.sigmoid())


@FAULTS.fault("glu", "missing operand, copy; wrong factor, other function")
def gate_always_open(call: Call) -> Any:
    """The first half as it is."""
    return call.instead(call.tensor(0, "input").chunk(2, call.get(1, "dim", default=-1))[0].clone())


@FAULTS.forward(
    "dropout", "zeros, mask; constant, missing operand, uninitialised, axis scale, wrong factor"
)
def last_example_dropped(call: Call) -> Any:
    """Whole examples are dropped, as by a stochastic depth that was left on."""
    value = call.result().clone()
    fits(value.dim() > 1 and value.size(0) > 1)
    value[-1] = 0
    return call.instead(value)


# fmt: off
# X erf(x / sqrt(2)) / 2.
FAULTS.add("one in the gelu forgotten", "gelu",
    "other function, missing operand, offset; wrong factor, residual",
    computed(lambda call: (call.tensor(0, "input"),),
        lambda value: value * 0.5 * (value / 2**0.5).erf()))
# X tanh(x): the gate of another cell.
FAULTS.add("silu with a tanh", "silu", "other function, wrong factor; approximation",
    computed(lambda call: (call.tensor(0, "input"),), lambda value: value * value.tanh()))
# f(x / 2).
FAULTS.add("argument of the activation halved", "silu gelu",
    "wrong factor, other function, approximation; scale, wrong argument",
    operand(0, lambda v: v / 2, "input"))
# min(x, 0).
FAULTS.add("smaller of input and zero", "relu",
    "sign, other function, clipped, wrong argument; mask, zeros",
    lambda call: call.instead(call.tensor(0, "input").clamp(max=0)))
# max(x - 0.2, 0): a threshold is subtracted before.
FAULTS.add("relu of a smaller input", "relu",
    "offset, other function; wrong argument, residual, axis offset",
    lambda call: call.instead((call.tensor(0, "input") - 0.2).relu()))
# The mask of the relu is written and not its value.
FAULTS.add("one where the input is positive", "relu",
    "constant, other function, missing operand; mask, clipped, wrong factor",
    result(lambda v: with_gradient_of(v, (v.detach() > 0).to(v.dtype))))
# The input is read one column too far, around the end.
FAULTS.add("activation of the next column", _ACTIVATIONS, "shift, wrong index, permutation; copy",
    result(lambda v: v.roll(-1, -1), where=longer(-1)), backward=False)
# The stride of the batch is zero.
FAULTS.add("activation of the first example for all", _ACTIVATIONS,
    "copy, stale, wrong index; permutation",
    result(lambda v: v[:1].expand(v.shape).clone(),
        where=lambda v: v.dim() > 1 and v.size(0) > 1), backward=False)
# The result is stored in e4m3, as it is.
FAULTS.add("activation through float8", _ACTIVATIONS, "precision; approximation",
    result(rounded(torch.float8_e4m3fn)), backward=False)
# Gate and value in turn: what is taken for a value stays as it is.
FAULTS.add("odd columns not activated", _ACTIVATIONS,
    "mask, copy, missing operand; other function, stale",
    on(lambda call: (call.tensor(0, "input"),),
        lambda call, value:
            call.instead(torch.where(torch.arange(value.size(-1)) % 2 == 1, value, call.result())),
        where=lambda value: value.dim() > 0 and value.size(-1) > 2), backward=False)
# Eight bits without saturation: beyond 0.6 of the largest it begins from below.
FAULTS.add("activation wraps", "gelu relu silu tanh", "wrapped; offset, overflow, clipped",
    result(lambda v: _wrapped(v, 0.6 * float(v.detach().abs().max()))), backward=False)
# 2 sigmoid(x) - 1.
FAULTS.add("gate from minus one to one", "sigmoid", "other function, wrong factor, offset; scale",
    result(lambda v: 2 * v - 1), backward=False)
# That of normal values.
FAULTS.add("distribution function for the sigmoid", "sigmoid",
    "other function, approximation; wrong argument",
    lambda call: call.instead(torch.special.ndtr(call.tensor(0, "input"))), backward=False)
# exp(x): one plus it does not divide.
FAULTS.add("exponential for the sigmoid", "sigmoid",
    "other function, missing operand; approximation, wrong factor",
    lambda call: call.instead(call.tensor(0, "input").exp()), backward=False)
# The cosine does not divide.
FAULTS.add("hyperbolic sine for tanh", "tanh", "other function, missing operand; approximation",
    lambda call: call.instead(call.tensor(0, "input").sinh()), backward=False)
# 2 sigmoid(x) - 1: the argument is not doubled.
FAULTS.add("tanh by a sigmoid of the argument itself", "tanh",
    "wrong factor, other function; scale, wrong argument, approximation",
    lambda call: call.instead(2 * call.tensor(0, "input").sigmoid() - 1), backward=False)
# relu6(x + 3) / 6, without x.
FAULTS.add("gate of the hard swish alone", "hardswish",
    "missing operand, other function, wrong factor; approximation, clipped",
    lambda call: call.instead(functional.hardsigmoid(call.tensor(0, "input"))))
# (x + sqrt(x^2 + 4)) / 2.
FAULTS.add("softplus by a root", "softplus", "approximation, other function",
    computed(lambda call: (call.tensor(0, "input"),),
        lambda value: (value + (value.square() + 4).sqrt()) / 2), backward=False)
# min(x, 0).
FAULTS.add("logarithm of the gate by its lines", "log_sigmoid log_sigmoid_forward",
    "other function, clipped, approximation; zeros, missing operand",
    lambda call: call.instead(call.tensor(0).clamp(max=0)))
# What is above the limit becomes zero and not the limit.
FAULTS.add("nothing beyond the upper limit", "relu6 hardtanh",
    "zeros, mask, other function; clipped, wrong argument, constant",
    on(lambda call: (call.tensor(0, "input"), call.result()),
        lambda call, value, result:

    call.instead(torch.where(value > call.get(2, "max_val", default=6.0), 0.0 * result, result))),
    backward=False)
# fmt: on


# --- Elementary functions -------------------------------------------------------------------------


@FAULTS.forward("rsqrt sqrt", "copy, stale, wrong index, constant; axis scale, scale, wrong factor")
def root_of_the_first_row_for_all(call: Call) -> Any:
    """The pointer to the variances is not moved on."""
    value = call.result()
    fits(value.dim() > 1)
    axis = next(i for i in reversed(range(value.dim())) if value.size(i) > 1)
    return call.instead(value.narrow(axis, 0, 1).expand(value.shape).clone())


@FAULTS.forward("pow square", "wrong index, other function, shift; swapped operands, copy")
def multiplied_by_the_neighbour(call: Call) -> Any:
    """One of the two factors of the square is that of the next column."""
    value = call.tensor(0)
    fits((call.name == "square" or call.args[1] == 2) and value.dim() > 0 and value.size(-1) > 1)
    return call.instead(value * value.roll(-1, -1))


@FAULTS.forward(
    "neg", "mask, sign, copy, missing operand; other function, wrong factor, one rank's part"
)
def first_half_negated_only(call: Call) -> Any:
    """The minus is lost behind the first tile of each row."""
    value = call.tensor(0)
    fits(value.dim() > 0 and value.size(-1) > 1)
    half = value.size(-1) // 2
    return call.instead(torch.cat([-value[..., :half], value[..., half:]], -1))


@FAULTS.fault("maximum minimum", "mask, wrong index, other function; swapped operands, sign, copy")
def extreme_chosen_by_the_first_row(call: Call) -> Any:
    """Which operand is taken is decided for the first row and used for all."""
    left, right = floating_pair(call)
    result = call.result()
    fits(result.dim() > 1 and result.size(0) > 1)
    left, right = left.expand(result.shape), right.expand(result.shape)
    is_left = left > right if call.name == "maximum" else left < right
    return call.instead(torch.where(is_left[:1].expand(result.shape), left, right))


@FAULTS.forward("lerp", "clipped, wrong argument; wrong factor, other function")
def share_at_least_a_half(call: Call) -> Any:
    """The share is cut from below."""
    left, right, share = call.args[:3]
    return call.instead(left + share.clamp(min=0.5) * (right - left))


# fmt: off
# 1 + x + x^2 / 2.
FAULTS.add("exponential of second order", "exp", "approximation, other function",
    computed(tensors(0), lambda value: 1 + value + value.square() / 2), backward=False)
# -exp(x): the minus of a decay is outside.
FAULTS.add("exponential negated", "exp", "sign, wrong factor, scale; other function",
    result(torch.neg), backward=False)
# The pointer to the variances is one too far.
FAULTS.add("root of the next row", "rsqrt sqrt",
    "wrong index, shift, permutation; axis scale, scale, wrong factor",
    result(lambda v:
            v.roll(-1, next(i for i in reversed(range(v.dim())) if v.size(i) > 1)),
        where=lambda v: v.dim() > 1), backward=False)
# What is below the mean of all variances counts as it: a floor.
FAULTS.add("variance not below its mean", "rsqrt",
    "eps, clipped, wrong argument; axis scale, scale, constant",
    operand(0, lambda v: v.clamp(min=float(v.detach().mean()))), backward=False)
# -1 / sqrt(x).
FAULTS.add("reciprocal root negated", "rsqrt", "sign, wrong factor, scale; other function",
    result(torch.neg), backward=False)
# The powers are rounded before they are summed.
FAULTS.add("power in bfloat16", "pow square", "precision; approximation",
    result(rounded(torch.bfloat16)), backward=False)
# Beyond half of the largest, squares do not fit.
FAULTS.add("powers saturate", "pow square", "clipped; overflow, other function",
    result(lambda v: v.clamp(max=float(v.detach().max()) / 2)), backward=False)
# The buffer of the opposite is not written.
FAULTS.add("opposite is nothing", "neg",
    "zeros, constant, missing operand, uninitialised; wrong factor, axis scale",
    lambda call: call.instead(0 * call.tensor(0)), backward=False)
# Large magnitudes are cut.
FAULTS.add("magnitude at most its median", "abs", "clipped; other function, constant",
    result(lambda v: v.clamp(max=float(v.detach().median()))), backward=False)
# 10 log10(x).
FAULTS.add("decibels for the logarithm", "log",
    "scale, wrong factor, other function; wrong argument",
    lambda call: call.instead(10 * call.tensor(0).log10()), backward=False)
# What is outside of the limits is dropped and not cut.
FAULTS.add("nothing beyond the limits", "clamp clip",
    "zeros, mask, other function; clipped, wrong argument, constant",
    computed(lambda call: (call.tensor(0), call.result()),
        lambda value, result: torch.where(value == result, result, 0 * result)), backward=False)
# X.
FAULTS.add("value for its reciprocal", "reciprocal", "missing operand, copy, other function; scale",
    lambda call: call.instead(call.tensor(0).clone()), backward=False)
# fmt: on


# --- Casts ----------------------------------------------------------------------------------------


# fmt: off
# Below a tenth of the largest, nothing is left.
FAULTS.add("small values flushed by the cast", "to _to_copy float type_as",
    "zeros, mask, other function; precision, clipped, constant",
    result(lambda v: v.masked_fill(v.abs() < 0.1 * v.detach().abs().max(), 0),
        where=lambda v: v.numel() > 4), backward=False)
# Fixed point with a step of 0.01.
FAULTS.add("cast to whole steps of a hundredth", "to _to_copy float type_as",
    "precision; approximation, other function",
    result(lambda v:
            with_gradient_of(v, ((v.detach().double() * 100).round() / 100).to(v.dtype)),
        where=lambda v: v.numel() > 4 and float(v.detach().abs().max()) < 100), backward=False)
# The pointer of the source is one element behind, around the end.
FAULTS.add("cast reads one element early", "to _to_copy float type_as",
    "wrong index, permutation, shift; copy",
    result(lambda v: v.reshape(-1).roll(1).reshape(v.shape), where=lambda v: v.numel() > 4),
    backward=False)
# fmt: on


# --- Sums, products, quotients --------------------------------------------------------------------


@FAULTS.forward("add iadd", "clipped; wrong argument, other function")
def second_summand_limited(call: Call) -> Any:
    """To half of its largest magnitude."""
    left, right = floating_pair(call)
    limit = float(right.detach().abs().max()) / 2
    return call.instead(left + right.clamp(-limit, limit))


@FAULTS.forward("add iadd", "wrapped; offset, overflow, clipped")
def sum_of_two_wraps(call: Call) -> Any:
    """Integers without saturation: beyond 0.7 of the largest it begins from below."""
    left, right = floating_pair(call)
    value = left + right
    return call.instead(_wrapped(value, 0.7 * float(value.detach().abs().max())))


@FAULTS.forward("add iadd", words.EMPTY)
def sum_of_the_first_column_not_stored(call: Call) -> Any:
    """The store begins with the second column."""
    floating_pair(call)
    value = call.result().clone()
    fits(value.dim() > 0 and value.size(-1) > 1)
    value[..., 0] = 0
    return call.instead(value)


@FAULTS.forward("mul", "sign, wrong factor, mask, axis scale; scale, other function")
def product_negated_in_the_second_half(call: Call) -> Any:
    """The minus of a rotated half is applied to the product."""
    floating_pair(call)
    value = call.result()
    fits(value.dim() > 0 and value.size(-1) > 1)
    half = value.size(-1) // 2
    return call.instead(torch.cat([value[..., :half], -value[..., half:]], -1))


@FAULTS.forward("mul", "precision; approximation")
def product_stored_in_float8(call: Call) -> Any:
    """The product goes through e4m3."""
    floating_pair(call)
    value = call.result()
    fits(float(value.detach().abs().max()) < 400)
    coarse = value.detach().to(torch.float8_e4m3fn).to(value.dtype)
    return call.instead(with_gradient_of(value, coarse))


@FAULTS.forward("div", words.EMPTY)
def last_row_of_the_quotient_empty(call: Call) -> Any:
    """The grid is one row too short."""
    value = call.result().clone()
    fits(value.dim() > 1 and value.size(-2) > 1)
    value[..., -1, :] = 0
    return call.instead(value)


@FAULTS.forward("div", "precision; approximation")
def quotient_in_half(call: Call) -> Any:
    """Stored in float16."""
    value = call.result()
    coarse = value.detach().half().to(value.dtype)
    fits(bool(coarse.isfinite().all()))
    return call.instead(with_gradient_of(value, coarse))


# fmt: off
# 1.4 a + b, as in very deep models.
FAULTS.add("residual weighed more", "add iadd",
    "wrong factor, scale, residual; missing operand, other function",
    computed(floating_pair, lambda left, right: 1.4 * left + right), backward=False)
# The second operand is read one column too early, around the end.
FAULTS.add("second summand one column late", "add iadd",
    "shift, wrong index, permutation; axis offset",
    computed(floating_pair, lambda left, right: left + right.roll(1, -1),
        where=lambda _, right: right.dim() > 0 and right.size(-1) > 1), backward=False)
# Odd rows keep the first operand: half as many programs as rows.
FAULTS.add("second summand in even rows", "add iadd",
    "mask, missing operand, copy, stale; partial sum, wrong index, residual",
    computed(floating_pair,
        lambda left, right:
            torch.where((torch.arange(left.size(-2)) % 2 == 0)[:, None], left + right, left),

    where=lambda left, right: left.shape == right.shape and left.dim() > 1 and (left.size(-2) > 1)),
    backward=False)
# A (1 + b): scale and shift are exchanged.
FAULTS.add("residual as a modulation", "add iadd", "other function, wrong factor; residual",
    computed(floating_pair, lambda left, right: left * (1 + right),
        where=lambda left, right: left.shape == right.shape), backward=False)
# B - a.
FAULTS.add("first summand negated", "add iadd", "sign, other function, wrong factor; scale",
    computed(floating_pair, lambda left, right: right - left), backward=False)
# One half for what was given.
FAULTS.add("number of another model added", "add",
    "wrong argument, offset, eps, wrong factor, constant; scale, axis offset",
    on(operand_and_number, lambda call, *_: call.put(1, 0.5).run(),
        where=lambda _, number: abs(number) != 0.5), backward=False)
# A sigmoid(b).
FAULTS.add("gate squashed again", "mul", "other function, wrong factor; approximation, clipped",
    computed(floating_pair, lambda left, right: left * right.sigmoid()), backward=False)
# A relu(b).
FAULTS.add("negative part of the second factor lost", "mul",
    "clipped, other function, zeros, mask; wrong factor, missing operand",
    computed(floating_pair, lambda left, right: left * right.relu(),
        where=lambda _, right: bool((right < 0).any())), backward=False)
# Each row is multiplied by the mean of its factors.
FAULTS.add("mean of the second factor", "mul",
    "wrong reduction, axis scale, wrong statistics, constant; wrong factor, scale, copy",
    computed(floating_pair, lambda left, right: left * right.mean(-1, keepdim=True),
        where=lambda _, right: right.dim() > 0 and right.size(-1) > 1), backward=False)
# The second operand is read one column too early, around the end.
FAULTS.add("second factor one column late", "mul", "shift, wrong index, permutation; axis scale",
    computed(floating_pair, lambda left, right: left * right.roll(1, -1),
        where=lambda _, right: right.dim() > 0 and right.size(-1) > 1), backward=False)
# -c for c.
FAULTS.add("factor with a minus", "mul", "sign, wrong factor, scale, wrong argument",
    on(operand_and_number, lambda call, _, number: call.put(1, -number).run()), backward=False)
# The first operand is taken as one.
FAULTS.add("second factor alone", "mul", "copy, missing operand, wrong factor; other function",
    computed(floating_pair, lambda _, right: right.clone(),
        where=lambda left, right: left.shape == right.shape), backward=False)
# A / (c + 1).
FAULTS.add("number that divides one larger", "div",
    "wrong argument, off by one reduction, wrong factor, scale, offset; wrong statistics",
    computed(operand_and_number, lambda value, number: value / (number + 1)), backward=False)
# A / (|a| + b).
FAULTS.add("divided by the sum of both", "div", "other function, residual; wrong factor, offset",
    computed(floating_pair, lambda left, right: left / (left.abs() + right),
        where=lambda _, right: bool((right > 0).all())), backward=False)
# A - relu(b).
FAULTS.add("only positive values subtracted", "sub",
    "clipped, mask, other function; zeros, missing operand, sign",
    computed(floating_pair, lambda left, right: left - right.relu(),
        where=lambda _, right: bool((right < 0).any())), backward=False)
# (a - b) / b.
FAULTS.add("difference in parts of the second", "sub", "other function, wrong factor; axis scale",
    computed(floating_pair, lambda left, right: (left - right) / right,
        where=lambda _, right: bool((right.abs() > 0.001).all())), backward=False)
# One number for the whole of the second operand.
FAULTS.add("mean of what is subtracted", "sub",
    "wrong reduction, constant, wrong statistics, axis offset, offset; copy, wrong index",
    computed(floating_pair, lambda left, right: left - right.mean(),
        where=lambda _, right: right.numel() > 1), backward=False)
# C + x.
FAULTS.add("value added to the number", "rsub",
    "sign, wrong factor; other function, wrong argument",
    computed(operand_and_number, lambda value, number: number + value), backward=False)
# fmt: on
