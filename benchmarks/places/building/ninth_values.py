"""Faults of the ninth set: functions of single elements, sums, products and quotients of two."""

from __future__ import annotations

from typing import Any

import torch
from benchmarks.places.calls import Call, Catalogue, fits, with_gradient_of
from benchmarks.places.changes import computed, on, result, tensors
from benchmarks.places.parts import equal_pair, floating_pair, tensor_and_number
from torch import Tensor
from torch.nn import functional

FAULTS = Catalogue(backward=False)


# --- Activations ----------------------------------------------------------------------------------


@FAULTS.fault("hardtanh", "wrong argument, clipped; other function, wrong factor, mask")
def limits_of_the_hard_tanh_not_handed_on(call: Call) -> Any:
    """-1 and 1, the default."""
    fits((call.get(1, "min_val"), call.get(2, "max_val")) != (0.0, 6.0))
    return call.instead(call.tensor(0, "input").clamp(-1, 1))


@FAULTS.fault("glu", "other function; clipped, approximation, wrong factor, missing operand")
def tanh_of_the_value_that_is_gated(call: Call) -> Any:
    """Tanh(a) sigmoid(b), the gated unit of a model for sounds."""
    left, right = call.tensor(0, "input").chunk(2, call.get(1, "dim", default=-1))
    return call.instead(left.tanh() * right.sigmoid())


# fmt: off
# Divided by 0.6: the scaled form of the activation, whose weights this model does not have.
FAULTS.add("activation scaled to keep the variance", "relu silu",
    "scale, wrong factor; other function, approximation", result(lambda v: v / 0.6))
# Clamp(x, 0, 1): the saturating unit of the instruction set.
FAULTS.add("relu bounded by one", "relu",
    "clipped, other function; wrong argument, mask, missing operand",
    lambda call: call.instead(call.tensor(0, "input").clamp(0, 1)))
# Tanh(2 x): the doubling of 2 sigmoid(2 x) - 1 is done by the caller and by the kernel.
FAULTS.add("argument of the tanh doubled already", "tanh",
    "wrong factor, other function; wrong argument, approximation, scale",
    lambda call: call.instead((2 * call.tensor(0)).tanh()))
# The comparison with zero is folded away: everything is multiplied by the slope.
FAULTS.add("slope for both signs", "leaky_relu",
    "other function, mask, wrong factor; scale, missing operand, wrong argument, axis scale",
    lambda call:
            call.instead(call.tensor(0, "input") * call.get(1, "negative_slope", default=0.01)))
# The slopes are broadcast along the last axis and not along the channels.
FAULTS.add("slopes read along the columns", "prelu",
    "wrong axis, wrong index; permutation, transpose, wrong argument, copy, stale",
    computed(tensors(0, 1),
        lambda value, slope:
            torch.where(value > 0, value, value * slope.reshape(-1)[: value.size(-1)]),
        where=lambda value, slope: slope.numel() >= value.size(-1) and value.dim() > 2))
# Alpha (exp(x) - 1) for positive values, too: the select was lost.
FAULTS.add("exponential branch for both signs", "elu celu",
    "other function, mask; approximation, missing operand, wrong argument, overflow, copy",
    on(lambda call: (call.tensor(0, "input"), call.get(1, "alpha", default=1.0)),
        lambda call, value, alpha:
            call.instead(alpha * (value / alpha if call.name == "celu" else value).expm1())))
# X clamp(0.2 x + 0.5, 0, 1): the hard sigmoid of another framework is the gate.
FAULTS.add("hard swish with a fifth for a sixth", "hardswish",
    "other function, wrong factor, wrong argument; approximation, clipped",
    computed(lambda call: (call.tensor(0, "input"),),
        lambda value: value * (0.2 * value + 0.5).clamp(0, 1)))
# X / 6 + 1 / 2 everywhere: the clamp was removed as if it did nothing.
FAULTS.add("line without its limits", "hardsigmoid",
    "other function, missing operand; clipped, wrong argument, approximation, mask",
    lambda call: call.instead(call.tensor(0, "input") / 6 + 0.5))
# Log(1 + exp(-x)), written as a softplus of -x, without the minus before it.
FAULTS.add("minus of the log sigmoid dropped", "log_sigmoid logsigmoid",
    "sign, wrong factor, scale; other function, wrong argument, missing operand",
    lambda call: call.instead(functional.softplus(-call.tensor(0, "input"))))
# The comparison is the other way round: zero outside of the limit, x within.
FAULTS.add("what should be shrunk is kept", "hardshrink",
    "mask, other function; swapped operands, zeros, sign, wrong argument, clipped",
    on(lambda call: (call.tensor(0, "input"),),
        lambda call, value:
            call.instead(value * (value.abs() <= call.get(1, "lambd", default=0.5)))))
# Tanh(x) - x.
FAULTS.add("tanh less the input", "tanhshrink",
    "swapped operands, sign, wrong factor, scale; other function, wrong argument, "
    "missing operand", result(torch.neg))
# |x| / (1 + |x|): the register of the magnitude is used twice.
FAULTS.add("softsign of the magnitude", "softsign",
    "sign, other function; wrong factor, wrong argument, mask",
    computed(lambda call:
            (call.tensor(0, "input").abs(),), lambda value: value / (1 + value)))
# X / (1 - p) without a mask.
FAULTS.add("nothing dropped and scaled as in training", "dropout",
    "scale, wrong factor; wrong argument, other function",
    on(lambda call: (call.get(1, "p", default=0.5),),
        lambda call, share: call.instead(call.tensor(0, "input") / (1 - share)),
        where=lambda share: isinstance(share, float) and 0 < share < 1))
# fmt: on


# --- Functions of one value -----------------------------------------------------------------------


@FAULTS.fault("pow", "wrong argument, other function; scale, axis scale, wrong factor")
def base_of_the_positions_of_another_model(call: Call) -> Any:
    """500000 for the base that the configuration has."""
    base, exponent = call.args[:2]
    fits(isinstance(base, int | float) and isinstance(exponent, Tensor))
    return call.instead(500000.0**exponent)


@FAULTS.fault("div", "wrong argument, other function; precision, approximation, missing operand")
def mode_of_the_division_ignored(call: Call) -> Any:
    """The quotient as it is, where its floor was asked for."""
    fits(call.kwargs.get("rounding_mode"))
    return call.instead(call.tensor(0) / call.args[1])


@FAULTS.fault(
    "to _to_copy float type_as type",
    "precision, other function; approximation, zeros, missing operand",
)
def cast_by_way_of_an_integer(call: Call) -> Any:
    """The fraction is cut off."""
    value = call.args[0]
    fits(isinstance(value, Tensor) and value.is_floating_point())
    result = call.result()
    return call.instead(with_gradient_of(result, result.detach().trunc()))


# fmt: off
# The function that keeps small arguments exact is called, and its one is not added back.
FAULTS.add("one less than the exponential", "exp exp2",
    "offset, other function; residual, axis offset, missing operand, approximation",
    result(lambda v: v - 1))
# 2^floor(x): the exponent is cast to an integer.
FAULTS.add("power of two by a shift", "exp2",
    "precision, approximation, other function; missing operand, wrong argument, wrong factor",
    lambda call: call.instead(call.tensor(0).floor().exp2()))
# The function of that name in another library.
FAULTS.add("logarithm to base ten", "log log2",
    "wrong factor, scale, other function; wrong argument",
    lambda call: call.instead(call.tensor(0).log10()))
# Exp(x): a backend without the function has only the plain one.
FAULTS.add("one not subtracted from the exponential", "expm1",
    "offset, missing operand, other function; residual, axis offset",
    lambda call: call.instead(call.tensor(0).exp()))
# 1 / sqrt(x): the fast instruction without the product behind it.
FAULTS.add("reciprocal root for the root", "sqrt",
    "other function; wrong argument, swapped operands, axis scale",
    lambda call: call.instead(call.tensor(0).rsqrt()))
# 1 / sqrt(2 v): the means of two ranks are added and not halved.
FAULTS.add("variance of two ranks not averaged", "rsqrt",
    "scale, wrong factor; doubled reduction, wrong argument, wrong statistics",
    lambda call: call.instead((2 * call.tensor(0)).rsqrt()))
# 1 / (x + 0.1): kept from a division by zero.
FAULTS.add("tenth under the reciprocal", "reciprocal",
    "eps, offset, other function; wrong argument, approximation, residual",
    lambda call: call.instead(1 / (call.tensor(0) + 0.1)))
# Sin(pi x).
FAULTS.add("sine not divided by its argument", "sinc",
    "missing operand, other function; wrong factor",
    lambda call: call.instead((torch.pi * call.tensor(0)).sin()))
# Log((1 - p) / p).
FAULTS.add("odds of the opposite", "logit",
    "swapped operands, sign, wrong factor, scale; other function, wrong argument, "
    "missing operand", result(torch.neg))
# 1 below zero and -1 above.
FAULTS.add("sign of the opposite", "sign",
    "sign, wrong factor, scale; other function, wrong argument, swapped operands",
    result(torch.neg))
# -|x|: of two values the smaller one is taken, and not the larger.
FAULTS.add("magnitude with a minus", "abs",
    "sign, wrong factor, scale; other function, wrong argument, missing operand", result(torch.neg))
# The mode of rounding that the processor is in by default.
FAULTS.add("nearest whole number for the cut", "ceil trunc",
    "other function; precision, approximation, offset, wrong argument",
    lambda call: call.instead(call.tensor(0).round()))
# From -1 to 1: the limits are attributes in one version and inputs in the other.
FAULTS.add("limits of one for those given", "clamp clip",
    "wrong argument, clipped; other function, mask, missing operand",
    lambda call: call.instead(call.tensor(0).clamp(-1, 1)))
# X - y ceil(x / y), one divisor below the right one.
FAULTS.add("remainder by the quotient above", "remainder",
    "other function, offset; sign, wrapped, residual, axis offset",
    on(tensors(0),
        lambda call, value: call.instead(value - call.args[1] * (value / call.args[1]).ceil())))
# fmt: on


# --- Sums, products, quotients --------------------------------------------------------------------


@FAULTS.fault(
    "mul",
    "mask, copy, missing operand; stale, one rank's part, wrong factor, axis scale, other function",
)
def product_for_the_first_example_only(call: Call) -> Any:
    """In place, and the loop over the batch ends after one: the others keep the first operand."""
    left, _ = floating_pair(call)
    result = call.result()
    fits(left.shape == result.shape and left.dim() > 1 and left.size(0) > 1)
    return call.instead(torch.cat([result[:1], left[1:]]))


@FAULTS.fault("div", "wrong factor, scale, wrong argument; off by one reduction")
def number_that_divides_one_smaller(call: Call) -> Any:
    """A / (c - 1)."""
    value, number = call.args[:2]
    fits(isinstance(value, Tensor) and isinstance(number, int | float) and number > 2)
    fits("rounding_mode" not in call.kwargs)
    return call.instead(value / (number - 1))


@FAULTS.fault("sub", "sign, other function; wrong factor, mask, swapped operands")
def distance_for_the_difference(call: Call) -> Any:
    """|a - b|."""
    floating_pair(call)
    return call.instead(call.result().abs())


@FAULTS.fault("where", "mask, copy, missing operand; stale, other function, wrong index, constant")
def first_branch_everywhere(call: Call) -> Any:
    """The condition is folded to true."""
    condition, chosen = call.args[0], call.args[1]
    fits(isinstance(chosen, Tensor) and chosen.shape == condition.shape)
    return call.instead(chosen)


# fmt: off
# A + b / 0.9: the fused dropout divides by the chance to be kept, and drops nothing.
FAULTS.add("branch scaled up as in training", "add iadd",
    "wrong factor; scale, residual, other function, wrong argument",
    computed(equal_pair, lambda left, right: left + right / 0.9))
# (a + 1) b: the one of a modulation is added to the wrong operand.
FAULTS.add("first factor with one added", "mul",
    "residual, other function, offset; wrong factor, axis offset, missing operand",
    computed(floating_pair, lambda left, right: (left + 1) * right))
# X + c.
FAULTS.add("number added where it should multiply", "mul",
    "other function; missing operand, offset, residual, wrong factor",
    computed(tensor_and_number, lambda value, number: value + number))
# C x + x: the accumulator begins with the input and not with zero.
FAULTS.add("scaled input added to the input", "mul",
    "wrong factor, scale, residual; wrong argument, offset, doubled reduction, other function",
    computed(tensor_and_number, lambda value, number: value * number + value))
# A / b / b: the rows are normalised by both of two fused kernels.
FAULTS.add("divided by the sum of the row twice", "div itruediv",
    "wrong factor, axis scale, other function; scale, missing operand, doubled reduction, "
    "wrong statistics",
    computed(floating_pair, lambda left, right: left / right / right,

    where=lambda left, right: right.dim() == left.dim() and right.size(-1) == 1 < left.size(-1)))
# Log(y).
FAULTS.add("logarithm without its factor", "xlogy",
    "missing operand, other function; wrong factor, partial sum",
    computed(equal_pair, lambda _, other: other.log()))
# The bit of the sign is inverted: minus where the other operand is positive.
FAULTS.add("sign copied the other way round", "copysign",
    "sign, wrong factor, scale; other function, wrong argument, missing operand", result(torch.neg))
# Sqrt(a a + a a): the second pointer is not bound.
FAULTS.add("length of the first side twice", "hypot",
    "wrong index, copy, missing operand, other function; stale, wrong factor, scale, "
    "wrong argument", computed(equal_pair, lambda left, *_: torch.hypot(left, left)))
# Clockwise: the second axis of an image points down.
FAULTS.add("angle the other way round", "atan2",
    "sign, wrong factor, scale; other function, wrong argument, missing operand", result(torch.neg))
# Log((exp(a) + exp(b)) / 2).
FAULTS.add("logarithm of the mean of both", "logaddexp",
    "offset, other function; wrong reduction, axis offset, residual, wrong factor, scale",
    result(lambda v: v - torch.tensor(2.0).log()))
# (1 - w) a + b.
FAULTS.add("end of the way not weighed", "lerp",
    "missing operand, wrong factor, other function; residual, partial sum",
    lambda call: call.instead((1 - call.get(2, "weight")) * call.tensor(0) + call.tensor(1)))
# fmt: on
