"""Faults that were measured sixth and have been seen: functions of single elements."""

from __future__ import annotations

import math
from typing import Any

import torch
from benchmarks.places.calls import Call, Catalogue, fits, with_gradient_of
from torch import Tensor
from torch.nn import functional

FAULTS = Catalogue()
_ACTIVATIONS = "gelu relu silu tanh sigmoid"


def _pair(call: Call) -> tuple[Tensor, Tensor]:
    """Two floating-point operands."""
    left, right = call.tensor(0), call.tensor(1)
    fits(right.numel() > 1 or left.numel() > 1)
    return left, right


def _number(call: Call) -> tuple[Tensor, float]:
    """A floating-point operand and a number."""
    value, number = call.tensor(0), call.args[1]
    fits(isinstance(number, int | float) and not isinstance(number, bool) and number != 0)
    return value, float(number)


def _wrapped(value: Tensor, limit: float) -> Tensor:
    return torch.remainder(value + limit, 2 * limit) - limit


# --- Activations ----------------------------------------------------------------------------------


@FAULTS.fault("gelu", kinds=["approximation", "other function"], loose=["clipped"])
def gelu_by_a_parabola(call: Call) -> Any:
    """The error function of an integer model: a polynomial of second order, cut at 1.769."""
    value = call.tensor(0, "input")
    inner = (value / 2**0.5).abs().clamp(max=1.769)
    erf = value.sign() * (1 - 0.2888 * (inner - 1.769).square())
    return call.instead(value * 0.5 * (1 + erf))


@FAULTS.fault(
    "gelu",
    kinds=["other function", "missing operand", "offset"],
    loose=["wrong factor", "residual"],
)
def one_in_the_gelu_forgotten(call: Call) -> Any:
    """X erf(x / sqrt(2)) / 2."""
    value = call.tensor(0, "input")
    return call.instead(value * 0.5 * (value / 2**0.5).erf())


@FAULTS.fault("gelu", kinds=["other function"], loose=["wrong factor", "approximation"])
def derivative_for_the_gelu(call: Call) -> Any:
    """The kernel of the way back is launched."""
    value = call.tensor(0, "input")
    gate = 0.5 * (1 + (value / 2**0.5).erf())
    return call.instead(gate + value * (-value.square() / 2).exp() / (2 * math.pi) ** 0.5)


@FAULTS.fault("silu", kinds=["other function", "wrong factor"], loose=["approximation"])
def silu_with_a_tanh(call: Call) -> Any:
    """X tanh(x): the gate of another cell."""
    value = call.tensor(0, "input")
    return call.instead(value * value.tanh())


@FAULTS.fault(
    "silu gelu",
    kinds=["wrong factor", "other function", "approximation"],
    loose=["scale", "wrong argument"],
)
def argument_of_the_activation_halved(call: Call) -> Any:
    """f(x / 2)."""
    return call.put(0, call.tensor(0, "input") / 2, "input").run()


@FAULTS.fault(
    "relu", kinds=["sign", "other function", "clipped", "wrong argument"], loose=["mask", "zeros"]
)
def smaller_of_input_and_zero(call: Call) -> Any:
    """min(x, 0)."""
    return call.instead(call.tensor(0, "input").clamp(max=0))


@FAULTS.fault(
    "relu", kinds=["offset", "other function"], loose=["wrong argument", "residual", "axis offset"]
)
def relu_of_a_smaller_input(call: Call) -> Any:
    """max(x - 0.2, 0): a threshold is subtracted before."""
    return call.instead((call.tensor(0, "input") - 0.2).relu())


@FAULTS.fault(
    "relu",
    kinds=["constant", "other function", "missing operand"],
    loose=["mask", "clipped", "wrong factor"],
)
def one_where_the_input_is_positive(call: Call) -> Any:
    """The mask of the relu is written and not its value."""
    value = call.result()
    return call.instead(with_gradient_of(value, (value.detach() > 0).to(value.dtype)))


@FAULTS.fault(
    _ACTIVATIONS, kinds=["shift", "wrong index", "permutation"], loose=["copy"], backward=False
)
def activation_of_the_next_column(call: Call) -> Any:
    """The input is read one column too far, around the end."""
    value = call.result()
    fits(value.dim() > 0 and value.size(-1) > 1)
    return call.instead(value.roll(-1, -1))


@FAULTS.fault(
    _ACTIVATIONS, kinds=["copy", "stale", "wrong index"], loose=["permutation"], backward=False
)
def activation_of_the_first_example_for_all(call: Call) -> Any:
    """The stride of the batch is zero."""
    value = call.result()
    fits(value.dim() > 1 and value.size(0) > 1)
    return call.instead(value[:1].expand(value.shape).clone())


@FAULTS.fault(_ACTIVATIONS, kinds=["precision"], loose=["approximation"], backward=False)
def activation_through_float8(call: Call) -> Any:
    """The result is stored in e4m3, as it is."""
    value = call.result()
    coarse = value.detach().to(torch.float8_e4m3fn).to(value.dtype)
    return call.instead(with_gradient_of(value, coarse))


@FAULTS.fault(
    _ACTIVATIONS,
    kinds=["mask", "copy", "missing operand"],
    loose=["other function", "stale"],
    backward=False,
)
def odd_columns_not_activated(call: Call) -> Any:
    """Gate and value in turn: what is taken for a value stays as it is."""
    value, result = call.tensor(0, "input"), call.result()
    fits(value.dim() > 0 and value.size(-1) > 2)
    odd = torch.arange(value.size(-1)) % 2 == 1
    return call.instead(torch.where(odd, value, result))


@FAULTS.fault(
    "gelu relu silu tanh",
    kinds=["wrapped"],
    loose=["offset", "overflow", "clipped"],
    backward=False,
)
def activation_wraps(call: Call) -> Any:
    """Eight bits without saturation: beyond 0.6 of the largest it begins from below."""
    value = call.result()
    return call.instead(_wrapped(value, 0.6 * float(value.detach().abs().max())))


@FAULTS.fault(
    "silu sigmoid", kinds=["nonfinite", "overflow"], loose=["mask", "uninitialised"], backward=False
)
def exponential_of_the_gate_overflows(call: Call) -> Any:
    """exp(-x) is infinite for the most negative inputs, and inf / inf is no number."""
    value, result = call.tensor(0, "input"), call.result()
    limit = 0.6 * value.detach().min()
    fits(float(limit) < 0)
    return call.instead(torch.where(value < limit, torch.nan, result))


@FAULTS.fault(
    _ACTIVATIONS,
    kinds=["zeros", "mask", "uninitialised"],
    loose=["constant", "missing operand", "one rank's part", "axis scale", "wrong factor"],
    backward=False,
)
def second_half_of_the_columns_empty(call: Call) -> Any:
    """The number of columns is that of one shard."""
    value = call.result().clone()
    fits(value.dim() > 0 and value.size(-1) > 1)
    value[..., value.size(-1) // 2 :] = 0
    return call.instead(value)


@FAULTS.fault(
    "sigmoid", kinds=["other function", "wrong factor", "offset"], loose=["scale"], backward=False
)
def gate_from_minus_one_to_one(call: Call) -> Any:
    """2 sigmoid(x) - 1."""
    return call.instead(2 * call.result() - 1)


@FAULTS.fault(
    "sigmoid", kinds=["other function", "approximation"], loose=["wrong argument"], backward=False
)
def distribution_function_for_the_sigmoid(call: Call) -> Any:
    """That of normal values."""
    return call.instead(torch.special.ndtr(call.tensor(0, "input")))


@FAULTS.fault(
    "sigmoid",
    kinds=["other function", "missing operand"],
    loose=["approximation", "wrong factor"],
    backward=False,
)
def exponential_for_the_sigmoid(call: Call) -> Any:
    """exp(x): one plus it does not divide."""
    return call.instead(call.tensor(0, "input").exp())


@FAULTS.fault(
    "tanh", kinds=["other function", "missing operand"], loose=["approximation"], backward=False
)
def hyperbolic_sine_for_tanh(call: Call) -> Any:
    """The cosine does not divide."""
    return call.instead(call.tensor(0, "input").sinh())


@FAULTS.fault(
    "tanh",
    kinds=["wrong factor", "other function"],
    loose=["scale", "wrong argument", "approximation"],
    backward=False,
)
def tanh_by_a_sigmoid_of_the_argument_itself(call: Call) -> Any:
    """2 sigmoid(x) - 1: the argument is not doubled."""
    return call.instead(2 * call.tensor(0, "input").sigmoid() - 1)


@FAULTS.fault(
    "hardswish",
    kinds=["missing operand", "other function", "wrong factor"],
    loose=["approximation", "clipped"],
)
def gate_of_the_hard_swish_alone(call: Call) -> Any:
    """relu6(x + 3) / 6, without x."""
    return call.instead(functional.hardsigmoid(call.tensor(0, "input")))


@FAULTS.fault(
    "selu celu elu", kinds=["offset", "other function"], loose=["missing operand"], backward=False
)
def exponential_unit_without_its_minus_one(call: Call) -> Any:
    """Alpha exp(x) below zero."""
    value, result = call.tensor(0), call.result()
    fits(len(call.args) < 3)
    given = call.get(1, "alpha", default=1.0)
    alpha = 1.7580993408473766 if call.name == "selu" else given
    return call.instead(torch.where(value < 0, result + alpha, result))


@FAULTS.fault(
    "glu", kinds=["other function", "missing operand"], loose=["residual", "wrong factor"]
)
def value_added_to_the_gate(call: Call) -> Any:
    """A + sigmoid(b)."""
    left, right = call.tensor(0, "input").chunk(2, call.get(1, "dim", default=-1))
    return call.instead(left + right.sigmoid())


@FAULTS.fault("glu", kinds=["missing operand", "copy"], loose=["wrong factor", "other function"])
def gate_always_open(call: Call) -> Any:
    """The first half as it is."""
    return call.instead(call.tensor(0, "input").chunk(2, call.get(1, "dim", default=-1))[0].clone())


@FAULTS.fault("softplus", kinds=["approximation", "other function"], backward=False)
def softplus_by_a_root(call: Call) -> Any:
    """(x + sqrt(x^2 + 4)) / 2."""
    value = call.tensor(0, "input")
    return call.instead((value + (value.square() + 4).sqrt()) / 2)


@FAULTS.fault(
    "log_sigmoid log_sigmoid_forward",
    kinds=["other function", "clipped", "approximation"],
    loose=["zeros", "missing operand"],
)
def logarithm_of_the_gate_by_its_lines(call: Call) -> Any:
    """min(x, 0)."""
    return call.instead(call.tensor(0).clamp(max=0))


@FAULTS.fault(
    "relu6 hardtanh",
    kinds=["zeros", "mask", "other function"],
    loose=["clipped", "wrong argument", "constant"],
    backward=False,
)
def nothing_beyond_the_upper_limit(call: Call) -> Any:
    """What is above the limit becomes zero and not the limit."""
    value, result = call.tensor(0, "input"), call.result()
    high = call.get(2, "max_val", default=6.0)
    return call.instead(torch.where(value > high, 0.0 * result, result))


@FAULTS.fault(
    "dropout",
    kinds=["zeros", "mask"],
    loose=["constant", "missing operand", "uninitialised", "axis scale", "wrong factor"],
    backward=False,
)
def last_example_dropped(call: Call) -> Any:
    """Whole examples are dropped, as by a stochastic depth that was left on."""
    value = call.result().clone()
    fits(value.dim() > 1 and value.size(0) > 1)
    value[-1] = 0
    return call.instead(value)


# --- Elementary functions -------------------------------------------------------------------------


@FAULTS.fault("exp", kinds=["approximation", "other function"], backward=False)
def exponential_of_second_order(call: Call) -> Any:
    """1 + x + x^2 / 2."""
    value = call.tensor(0)
    return call.instead(1 + value + value.square() / 2)


@FAULTS.fault(
    "exp", kinds=["sign", "wrong factor", "scale"], loose=["other function"], backward=False
)
def exponential_negated(call: Call) -> Any:
    """-exp(x): the minus of a decay is outside."""
    return call.instead(-call.result())


@FAULTS.fault(
    "rsqrt sqrt",
    kinds=["copy", "stale", "wrong index", "constant"],
    loose=["axis scale", "scale", "wrong factor"],
    backward=False,
)
def root_of_the_first_row_for_all(call: Call) -> Any:
    """The pointer to the variances is not moved on."""
    value = call.result()
    fits(value.dim() > 1)
    axis = next(i for i in reversed(range(value.dim())) if value.size(i) > 1)
    return call.instead(value.narrow(axis, 0, 1).expand(value.shape).clone())


@FAULTS.fault(
    "rsqrt sqrt",
    kinds=["wrong index", "shift", "permutation"],
    loose=["axis scale", "scale", "wrong factor"],
    backward=False,
)
def root_of_the_next_row(call: Call) -> Any:
    """The pointer to the variances is one too far."""
    value = call.result()
    fits(value.dim() > 1)
    axis = next(i for i in reversed(range(value.dim())) if value.size(i) > 1)
    return call.instead(value.roll(-1, axis))


@FAULTS.fault(
    "rsqrt",
    kinds=["eps", "clipped", "wrong argument"],
    loose=["axis scale", "scale", "constant"],
    backward=False,
)
def variance_not_below_its_mean(call: Call) -> Any:
    """What is below the mean of all variances counts as it: a floor."""
    value = call.tensor(0)
    return call.put(0, value.clamp(min=float(value.detach().mean()))).run()


@FAULTS.fault(
    "rsqrt", kinds=["sign", "wrong factor", "scale"], loose=["other function"], backward=False
)
def reciprocal_root_negated(call: Call) -> Any:
    """-1 / sqrt(x)."""
    return call.instead(-call.result())


@FAULTS.fault("pow square", kinds=["precision"], loose=["approximation"], backward=False)
def power_in_bfloat16(call: Call) -> Any:
    """The powers are rounded before they are summed."""
    value = call.result()
    return call.instead(with_gradient_of(value, value.detach().bfloat16().to(value.dtype)))


@FAULTS.fault("pow square", kinds=["clipped"], loose=["overflow", "other function"], backward=False)
def powers_saturate(call: Call) -> Any:
    """Beyond half of the largest, squares do not fit."""
    value = call.result()
    return call.instead(value.clamp(max=float(value.detach().max()) / 2))


@FAULTS.fault(
    "pow square",
    kinds=["wrong index", "other function", "shift"],
    loose=["swapped operands", "copy"],
    backward=False,
)
def multiplied_by_the_neighbour(call: Call) -> Any:
    """One of the two factors of the square is that of the next column."""
    value = call.tensor(0)
    fits((call.name == "square" or call.args[1] == 2) and value.dim() > 0 and value.size(-1) > 1)
    return call.instead(value * value.roll(-1, -1))


@FAULTS.fault(
    "neg",
    kinds=["mask", "sign", "copy", "missing operand"],
    loose=["other function", "wrong factor", "one rank's part"],
    backward=False,
)
def first_half_negated_only(call: Call) -> Any:
    """The minus is lost behind the first tile of each row."""
    value = call.tensor(0)
    fits(value.dim() > 0 and value.size(-1) > 1)
    half = value.size(-1) // 2
    return call.instead(torch.cat([-value[..., :half], value[..., half:]], -1))


@FAULTS.fault(
    "neg",
    kinds=["zeros", "constant", "missing operand", "uninitialised"],
    loose=["wrong factor", "axis scale"],
    backward=False,
)
def opposite_is_nothing(call: Call) -> Any:
    """The buffer of the opposite is not written."""
    return call.instead(0 * call.tensor(0))


@FAULTS.fault("abs", kinds=["clipped"], loose=["other function", "constant"], backward=False)
def magnitude_at_most_its_median(call: Call) -> Any:
    """Large magnitudes are cut."""
    value = call.result()
    return call.instead(value.clamp(max=float(value.detach().median())))


@FAULTS.fault(
    "log",
    kinds=["scale", "wrong factor", "other function"],
    loose=["wrong argument"],
    backward=False,
)
def decibels_for_the_logarithm(call: Call) -> Any:
    """10 log10(x)."""
    return call.instead(10 * call.tensor(0).log10())


@FAULTS.fault(
    "clamp clip",
    kinds=["zeros", "mask", "other function"],
    loose=["clipped", "wrong argument", "constant"],
    backward=False,
)
def nothing_beyond_the_limits(call: Call) -> Any:
    """What is outside of the limits is dropped and not cut."""
    value, result = call.tensor(0), call.result()
    return call.instead(torch.where(value == result, result, 0 * result))


@FAULTS.fault(
    "maximum minimum",
    kinds=["mask", "wrong index", "other function"],
    loose=["swapped operands", "sign", "copy"],
)
def extreme_chosen_by_the_first_row(call: Call) -> Any:
    """Which operand is taken is decided for the first row and used for all."""
    left, right = _pair(call)
    result = call.result()
    fits(result.dim() > 1 and result.size(0) > 1)
    left, right = left.expand(result.shape), right.expand(result.shape)
    is_left = left > right if call.name == "maximum" else left < right
    return call.instead(torch.where(is_left[:1].expand(result.shape), left, right))


@FAULTS.fault(
    "lerp",
    kinds=["clipped", "wrong argument"],
    loose=["wrong factor", "other function"],
    backward=False,
)
def share_at_least_a_half(call: Call) -> Any:
    """The share is cut from below."""
    left, right, share = call.args[:3]
    return call.instead(left + share.clamp(min=0.5) * (right - left))


@FAULTS.fault(
    "reciprocal",
    kinds=["missing operand", "copy", "other function"],
    loose=["scale"],
    backward=False,
)
def value_for_its_reciprocal(call: Call) -> Any:
    """X."""
    return call.instead(call.tensor(0).clone())


# --- Casts ----------------------------------------------------------------------------------------


@FAULTS.fault(
    "to _to_copy float type_as",
    kinds=["zeros", "mask", "other function"],
    loose=["precision", "clipped", "constant"],
    backward=False,
)
def small_values_flushed_by_the_cast(call: Call) -> Any:
    """Below a tenth of the largest, nothing is left."""
    value = call.result()
    fits(value.numel() > 4)
    small = value.abs() < 0.1 * value.detach().abs().max()
    return call.instead(value.masked_fill(small, 0))


@FAULTS.fault(
    "to _to_copy float type_as",
    kinds=["precision"],
    loose=["approximation", "other function"],
    backward=False,
)
def cast_to_whole_steps_of_a_hundredth(call: Call) -> Any:
    """Fixed point with a step of 0.01."""
    value = call.result()
    fits(value.numel() > 4 and float(value.detach().abs().max()) < 100)
    coarse = (value.detach().double() * 100).round() / 100
    return call.instead(with_gradient_of(value, coarse.to(value.dtype)))


@FAULTS.fault(
    "to _to_copy float type_as",
    kinds=["wrong index", "permutation", "shift"],
    loose=["copy"],
    backward=False,
)
def cast_reads_one_element_early(call: Call) -> Any:
    """The pointer of the source is one element behind, around the end."""
    value = call.result()
    fits(value.numel() > 4)
    return call.instead(value.reshape(-1).roll(1).reshape(value.shape))


# --- Sums, products, quotients --------------------------------------------------------------------


@FAULTS.fault(
    "add iadd",
    kinds=["wrong factor", "scale", "residual"],
    loose=["missing operand", "other function"],
    backward=False,
)
def residual_weighed_more(call: Call) -> Any:
    """1.4 a + b, as in very deep models."""
    left, right = _pair(call)
    return call.instead(1.4 * left + right)


@FAULTS.fault(
    "add iadd", kinds=["shift", "wrong index", "permutation"], loose=["axis offset"], backward=False
)
def second_summand_one_column_late(call: Call) -> Any:
    """The second operand is read one column too early, around the end."""
    left, right = _pair(call)
    fits(right.dim() > 0 and right.size(-1) > 1)
    return call.instead(left + right.roll(1, -1))


@FAULTS.fault(
    "add iadd",
    kinds=["mask", "missing operand", "copy", "stale"],
    loose=["partial sum", "wrong index", "residual"],
    backward=False,
)
def second_summand_in_even_rows(call: Call) -> Any:
    """Odd rows keep the first operand: half as many programs as rows."""
    left, right = _pair(call)
    fits(left.shape == right.shape and left.dim() > 1 and left.size(-2) > 1)
    even = (torch.arange(left.size(-2)) % 2 == 0)[:, None]
    return call.instead(torch.where(even, left + right, left))


@FAULTS.fault(
    "add iadd", kinds=["other function", "wrong factor"], loose=["residual"], backward=False
)
def residual_as_a_modulation(call: Call) -> Any:
    """A (1 + b): scale and shift are exchanged."""
    left, right = _pair(call)
    fits(left.shape == right.shape)
    return call.instead(left * (1 + right))


@FAULTS.fault(
    "add iadd", kinds=["clipped"], loose=["wrong argument", "other function"], backward=False
)
def second_summand_limited(call: Call) -> Any:
    """To half of its largest magnitude."""
    left, right = _pair(call)
    limit = float(right.detach().abs().max()) / 2
    return call.instead(left + right.clamp(-limit, limit))


@FAULTS.fault(
    "add iadd", kinds=["wrapped"], loose=["offset", "overflow", "clipped"], backward=False
)
def sum_of_two_wraps(call: Call) -> Any:
    """Integers without saturation: beyond 0.7 of the largest it begins from below."""
    left, right = _pair(call)
    value = left + right
    return call.instead(_wrapped(value, 0.7 * float(value.detach().abs().max())))


@FAULTS.fault(
    "add iadd",
    kinds=["zeros", "mask", "uninitialised"],
    loose=["constant", "missing operand", "axis scale", "wrong factor"],
    backward=False,
)
def sum_of_the_first_column_not_stored(call: Call) -> Any:
    """The store begins with the second column."""
    _pair(call)
    value = call.result().clone()
    fits(value.dim() > 0 and value.size(-1) > 1)
    value[..., 0] = 0
    return call.instead(value)


@FAULTS.fault(
    "add iadd", kinds=["sign", "other function", "wrong factor"], loose=["scale"], backward=False
)
def first_summand_negated(call: Call) -> Any:
    """B - a."""
    left, right = _pair(call)
    return call.instead(right - left)


@FAULTS.fault(
    "add",
    kinds=["wrong argument", "offset", "eps", "wrong factor", "constant"],
    loose=["scale", "axis offset"],
    backward=False,
)
def number_of_another_model_added(call: Call) -> Any:
    """One half for what was given."""
    _, number = _number(call)
    fits(abs(number) != 0.5)
    return call.put(1, 0.5).run()


@FAULTS.fault(
    "mul",
    kinds=["other function", "wrong factor"],
    loose=["approximation", "clipped"],
    backward=False,
)
def gate_squashed_again(call: Call) -> Any:
    """A sigmoid(b)."""
    left, right = _pair(call)
    return call.instead(left * right.sigmoid())


@FAULTS.fault(
    "mul",
    kinds=["clipped", "other function", "zeros", "mask"],
    loose=["wrong factor", "missing operand"],
    backward=False,
)
def negative_part_of_the_second_factor_lost(call: Call) -> Any:
    """A relu(b)."""
    left, right = _pair(call)
    fits(bool((right < 0).any()))
    return call.instead(left * right.relu())


@FAULTS.fault(
    "mul",
    kinds=["wrong reduction", "axis scale", "wrong statistics", "constant"],
    loose=["wrong factor", "scale", "copy"],
    backward=False,
)
def mean_of_the_second_factor(call: Call) -> Any:
    """Each row is multiplied by the mean of its factors."""
    left, right = _pair(call)
    fits(right.dim() > 0 and right.size(-1) > 1)
    return call.instead(left * right.mean(-1, keepdim=True))


@FAULTS.fault(
    "mul", kinds=["shift", "wrong index", "permutation"], loose=["axis scale"], backward=False
)
def second_factor_one_column_late(call: Call) -> Any:
    """The second operand is read one column too early, around the end."""
    left, right = _pair(call)
    fits(right.dim() > 0 and right.size(-1) > 1)
    return call.instead(left * right.roll(1, -1))


@FAULTS.fault("mul", kinds=["sign", "wrong factor", "scale", "wrong argument"], backward=False)
def factor_with_a_minus(call: Call) -> Any:
    """-c for c."""
    _, number = _number(call)
    return call.put(1, -number).run()


@FAULTS.fault(
    "mul",
    kinds=["sign", "wrong factor", "mask", "axis scale"],
    loose=["scale", "other function"],
    backward=False,
)
def product_negated_in_the_second_half(call: Call) -> Any:
    """The minus of a rotated half is applied to the product."""
    _pair(call)
    value = call.result()
    fits(value.dim() > 0 and value.size(-1) > 1)
    half = value.size(-1) // 2
    return call.instead(torch.cat([value[..., :half], -value[..., half:]], -1))


@FAULTS.fault("mul", kinds=["precision"], loose=["approximation"], backward=False)
def product_stored_in_float8(call: Call) -> Any:
    """The product goes through e4m3."""
    _pair(call)
    value = call.result()
    fits(float(value.detach().abs().max()) < 400)
    coarse = value.detach().to(torch.float8_e4m3fn).to(value.dtype)
    return call.instead(with_gradient_of(value, coarse))


@FAULTS.fault(
    "mul",
    kinds=["copy", "missing operand", "wrong factor"],
    loose=["other function"],
    backward=False,
)
def second_factor_alone(call: Call) -> Any:
    """The first operand is taken as one."""
    left, right = _pair(call)
    fits(left.shape == right.shape)
    return call.instead(right.clone())


@FAULTS.fault(
    "div",
    kinds=["wrong argument", "off by one reduction", "wrong factor", "scale", "offset"],
    loose=["wrong statistics"],
    backward=False,
)
def number_that_divides_one_larger(call: Call) -> Any:
    """A / (c + 1)."""
    value, number = _number(call)
    return call.instead(value / (number + 1))


@FAULTS.fault(
    "div", kinds=["other function", "residual"], loose=["wrong factor", "offset"], backward=False
)
def divided_by_the_sum_of_both(call: Call) -> Any:
    """A / (|a| + b)."""
    left, right = _pair(call)
    fits(bool((right > 0).all()))
    return call.instead(left / (left.abs() + right))


@FAULTS.fault(
    "div",
    kinds=["zeros", "mask", "uninitialised"],
    loose=["constant", "missing operand", "axis scale", "wrong factor"],
    backward=False,
)
def last_row_of_the_quotient_empty(call: Call) -> Any:
    """The grid is one row too short."""
    value = call.result().clone()
    fits(value.dim() > 1 and value.size(-2) > 1)
    value[..., -1, :] = 0
    return call.instead(value)


@FAULTS.fault("div", kinds=["precision"], loose=["approximation"], backward=False)
def quotient_in_half(call: Call) -> Any:
    """Stored in float16."""
    value = call.result()
    coarse = value.detach().half().to(value.dtype)
    fits(bool(coarse.isfinite().all()))
    return call.instead(with_gradient_of(value, coarse))


@FAULTS.fault(
    "sub",
    kinds=["clipped", "mask", "other function"],
    loose=["zeros", "missing operand", "sign"],
    backward=False,
)
def only_positive_values_subtracted(call: Call) -> Any:
    """A - relu(b)."""
    left, right = _pair(call)
    fits(bool((right < 0).any()))
    return call.instead(left - right.relu())


@FAULTS.fault("sub", kinds=["other function", "wrong factor"], loose=["axis scale"], backward=False)
def difference_in_parts_of_the_second(call: Call) -> Any:
    """(a - b) / b."""
    left, right = _pair(call)
    fits(bool((right.abs() > 1e-3).all()))
    return call.instead((left - right) / right)


@FAULTS.fault(
    "sub",
    kinds=["wrong reduction", "constant", "wrong statistics", "axis offset", "offset"],
    loose=["copy", "wrong index"],
    backward=False,
)
def mean_of_what_is_subtracted(call: Call) -> Any:
    """One number for the whole of the second operand."""
    left, right = _pair(call)
    fits(right.numel() > 1)
    return call.instead(left - right.mean())


@FAULTS.fault(
    "rsub",
    kinds=["sign", "wrong factor"],
    loose=["other function", "wrong argument"],
    backward=False,
)
def value_added_to_the_number(call: Call) -> Any:
    """C + x."""
    value, number = _number(call)
    return call.instead(number + value)
