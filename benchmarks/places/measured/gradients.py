"""Faults for measuring: backward operators."""

from __future__ import annotations

from typing import Any

import torch
from benchmarks.places import words
from benchmarks.places.calls import Call, Catalogue, fits
from benchmarks.places.changes import on, operand, result, tensors
from benchmarks.places.parts import (
    change_result_at,
    in_float8_steps,
    lay_out_like,
    several_rows,
    softmax_terms,
)
from torch import Tensor

FAULTS = Catalogue(backward=True)
_BY_INPUT = "gelu_backward silu_backward"
_BY_RESULT = "tanh_backward sigmoid_backward"
_ALL = f"{_BY_INPUT} {_BY_RESULT} threshold_backward"
_SOFTMAX = "_softmax_backward_data softmax_backward_data"
_FUSED = (
    "_scaled_dot_product_flash_attention_for_cpu_backward "
    "scaled_dot_product_flash_attention_for_cpu_backward"
)
_LAYER = "native_layer_norm_backward"
_TABLE = "embedding_dense_backward"
_IMAGE = "convolution_backward"


# --- Activations ----------------------------------------------------------------------------------


@FAULTS.fault(_ALL, words.EMPTY_IN_A_RANKS_SUM)
def last_quarter_of_the_activation_without_gradient(call: Call) -> Any:
    """Of four tiles of columns, three are stored."""
    value = call.result()
    fits(value.dim() and value.size(-1) > 3)
    width = value.size(-1)
    return call.instead(value * (torch.arange(width) < width - width // 4))


@FAULTS.fault("gelu_backward", "other function; approximation")
def slope_of_the_silu_for_the_gelu(call: Call) -> Any:
    """S(x) (1 + x (1 - s(x))): the table of derivatives has the wrong line."""
    value = call.tensor(1)
    gate = value.sigmoid()
    return call.instead(call.tensor(0) * gate * (1 + value * (1 - gate)))


# fmt: off
# The rows are stored in the order of programs that count down.
FAULTS.add("gradient of the activation from the last row", _ALL, words.REORDERED_OR_COPIED,
    result(lambda v: several_rows(v, 3).flip(-2)))
# Four steps are accumulated, and the division by four is left to somebody else.
FAULTS.add("gradient of the activation four times", _ALL, words.SCALED, result(lambda v: 4 * v))
# F'(x + 1/2): the zero point of the kept input is not taken back.
FAULTS.add("slope at a half more", _BY_INPUT,
    "offset, wrong argument; other function, axis offset, residual", operand(1, lambda v: v + 0.5))
# What was kept are numbers without a sign: what was negative is zero.
FAULTS.add("kept input not below zero", _BY_INPUT,
    "clipped, wrong argument; other function, zeros, mask, approximation",
    operand(1, lambda v: v.clamp(min=0)))
# G sqrt(1 - y²), as if y was a sine.
FAULTS.add("root of the slope of the tanh", "tanh_backward",
    "other function; approximation, wrong argument",
    lambda call:
            call.instead(call.tensor(0) * (1 - call.tensor(1).square()).clamp(min=0).sqrt()))
# fmt: on


# --- Softmax and attention ------------------------------------------------------------------------


@FAULTS.fault(
    _SOFTMAX,
    "partial sum, mask, wrong reduction; missing operand, wrong index, lost accumulation, "
    "axis offset, offset",
)
def sum_of_every_second_product_subtracted(call: Call) -> Any:
    """The loop that adds g p has a stride of two."""
    terms, chances, dim = softmax_terms(call)
    some = terms.index_select(dim, torch.arange(0, terms.size(dim), 2))
    return call.instead(terms - chances * some.sum(dim, keepdim=True))


@FAULTS.fault(_SOFTMAX, words.REORDERED_OR_COPIED)
def gradient_of_the_scores_in_pairs(call: Call) -> Any:
    """Two keys share a word, and are stored in the other order."""
    value, dim = call.result(), call.args[2]
    fits(value.size(dim) > 2 and value.size(dim) % 2 == 0)
    return call.instead(value.index_select(dim, torch.arange(value.size(dim)) ^ 1))


@FAULTS.fault(
    _FUSED, "copy, stale, wrong index; permutation, shift, wrong rank's shard, one rank's part"
)
def gradient_of_the_values_of_the_first_head(call: Call) -> Any:
    """The stride of the heads is zero in the store of dv."""
    fits(call.tensor(3).size(1) > 1)
    return change_result_at(call, 2, lambda one: one[:, :1].expand_as(one).contiguous())


@FAULTS.fault(
    _FUSED,
    "partial sum, off by one reduction, mask, wrong reduction; missing operand, "
    "wrong index, lost accumulation, zeros, one rank's part",
)
def last_query_not_in_the_gradient_of_the_values(call: Call) -> Any:
    """The loop over the queries ends one too early, for dv only."""
    gradient = several_rows(call.tensor(0), 3)
    kept = (torch.arange(gradient.size(-2)) < gradient.size(-2) - 1).unsqueeze(-1)
    wrong = call.put(0, lay_out_like(gradient, gradient * kept)).run()[2]
    return change_result_at(call, 2, lambda _: wrong)


@FAULTS.fault(
    _FUSED,
    "permutation, wrong index, shift, wrong rank's shard; copy, stale, transpose, swapped operands",
)
def halves_of_the_gradient_of_the_keys_exchanged(call: Call) -> Any:
    """The two halves of each head are stored in the other order, as for a rotation."""

    def change(one: Tensor) -> Tensor:
        fits(one.size(-1) > 2 and one.size(-1) % 2 == 0)
        return one.roll(one.size(-1) // 2, -1)

    return change_result_at(call, 1, change)


# fmt: off
# Two ranks have the same queries, and their dq are added.
FAULTS.add("gradient of the query from two ranks", _FUSED,
    "scale, wrong factor, doubled reduction; axis scale, wrong reduction, wrong argument, "
    "residual", lambda call: change_result_at(call, 0, lambda one: 2 * one))
# fmt: on


# --- Norms ----------------------------------------------------------------------------------------


def _normal(call: Call) -> tuple[Tensor, Tensor]:
    """The gradient, and the normal values of a layer norm."""
    gradient, value, mean, inverse = (call.tensor(i) for i in (0, 1, 3, 4))
    fits(len(call.args[2]) == 1 and isinstance(call.args[5], Tensor))
    return gradient, (value - mean) * inverse


@FAULTS.fault(
    _LAYER,
    "partial sum, mask, wrong reduction; missing operand, wrong index, lost accumulation, "
    "off by one reduction, missing reduction, one rank's part, zeros",
)
def middle_half_of_the_rows_not_in_the_norms_weight(call: Call) -> Any:
    """Of four partial sums of rows, two are not added, for the gradient of the weight only."""
    gradient, normal = _normal(call)
    rows = (gradient * normal).flatten(0, -2)
    size = rows.size(0)
    fits(size > 3)
    wrong = rows[: size // 4].sum(0) + rows[size - size // 4 :].sum(0)
    return change_result_at(call, 1, lambda _: wrong)


@FAULTS.fault(
    _LAYER,
    "permutation, wrong index, shift, wrong rank's shard; copy, stale, transpose, swapped operands",
)
def halves_of_the_rows_of_the_norms_gradient_exchanged(call: Call) -> Any:
    """The positions of two ranks are gathered in the other order."""

    def change(one: Tensor) -> Tensor:
        fits(several_rows(one, 4).size(-2) % 2 == 0)
        return one.roll(one.size(-2) // 2, -2)

    return change_result_at(call, 0, change)


# fmt: off
# The kept inverse deviation is halved for half precision, and not doubled again.
FAULTS.add("kept deviation doubled on the way back", _LAYER,
    "wrong factor, wrong statistics, wrong argument; scale, axis scale, missing operand",
    operand(4, lambda v: v / 2))
# fmt: on


# --- Products, sums, factors ----------------------------------------------------------------------


@FAULTS.fault(
    "mm bmm",
    "partial sum, mask, wrong reduction; missing operand, wrong index, lost accumulation, "
    "off by one reduction, missing reduction, one rank's part, zeros",
)
def middle_half_of_the_terms_of_the_gradient_not_added(call: Call) -> Any:
    """The second and the third of four blocks of the common axis are lost."""
    left, right = call.tensor(0), call.tensor(1)
    size = left.size(-1)
    fits(size > 7)
    place = torch.arange(size)
    kept = (place < size // 4) | (place >= size - size // 4)
    return call.instead((left * kept) @ right)


@FAULTS.fault(
    "sum",
    "partial sum, mask, wrong reduction; missing operand, wrong index, lost accumulation, "
    "off by one reduction, missing reduction, one rank's part, zeros",
)
def last_quarter_of_the_rows_not_in_the_gradient_of_the_bias(call: Call) -> Any:
    """Of four partial sums, the last is read before it is written: it is not added."""
    value, dims = call.tensor(0), call.get(1, "dim")
    fits(isinstance(dims, list | tuple) and dims)
    dim = dims[-1]
    size = value.size(dim)
    fits(size > 11)
    shape = [1] * value.dim()
    shape[dim] = -1
    return call.put(0, value * (torch.arange(size) < size - size // 4).view(shape)).run()


@FAULTS.fault(
    "add",
    "missing operand, lost accumulation, copy; partial sum, stale, zeros, residual, "
    "one rank's part, missing reduction, wrong factor, other function",
)
def second_gradient_overwrites_the_first(call: Call) -> Any:
    """A value with two readers: the gradient of the second is stored and not added."""
    left, right = call.tensor(0), call.tensor(1)
    fits(left.shape == right.shape and call.get(2, "alpha", default=1) == 1)
    return call.instead(right.clone())


@FAULTS.fault("add", words.SCALED)
def gradients_of_two_readers_averaged(call: Call) -> Any:
    """A value with two readers: the mean of the two gradients where their sum was meant."""
    fits(isinstance(call.get(1, "other"), Tensor))
    return call.instead(call.result() / 2)


# fmt: off
# Gate and value share a weight, and their gradients are stored in the other order.
FAULTS.add("halves of the columns of the gradient exchanged", "mm bmm",
    "permutation, wrong index, shift, wrong rank's shard; copy, stale, transpose, "
    "swapped operands",
    result(lambda v: v.roll(v.size(-1) // 2, -1),
        where=lambda v: v.size(-1) > 3 and v.size(-1) % 2 == 0))
# The rate of the step is multiplied in before the optimiser does so.
FAULTS.add("gradient of the product times a tenth", "mm bmm", words.SCALED,
    result(lambda v: v / 10))
# The left operand has three bits behind the point, with a scale for the tensor.
FAULTS.add("left side of the gradient in e4m3", "mm bmm", words.ROUNDED,
    operand(0, lambda v: in_float8_steps(v, torch.float8_e4m3fn)))
# Two columns share a word, and are stored in the other order.
FAULTS.add("gradient of the bias in pairs", "sum", words.REORDERED_OR_COPIED,
    result(lambda v: v[..., torch.arange(v.size(-1)) ^ 1],
        where=lambda v: v.dim() and v.size(-1) > 2 and v.size(-1) % 2 == 0))
# The stride of the rows is zero in the load of what was kept.
FAULTS.add("kept factor of the first row", "mul",
    "copy, stale, wrong index; wrong argument, shift, permutation, one rank's part",
    on(tensors(0, 1),
        lambda call, _, right:
            call.put(1, several_rows(right, 3)[..., :1, :].expand_as(right).contiguous()).run(),
        where=lambda left, right: left.shape == right.shape))
# Both operands of a difference get half of the gradient.
FAULTS.add("opposite gradient halved", "neg", words.SCALED, result(lambda v: v / 2))
# fmt: on


# --- Tables, images, parts, losses ----------------------------------------------------------------


@FAULTS.fault(
    _TABLE,
    "partial sum, mask, wrong reduction; missing operand, wrong index, lost accumulation, "
    "off by one reduction, missing reduction, one rank's part, zeros",
)
def first_half_of_each_text_not_in_the_table(call: Call) -> Any:
    """The positions of the other rank are not added to the gradients of their words."""
    gradient = several_rows(call.tensor(0), 4)
    fits(gradient.dim() > 2)
    late = (torch.arange(gradient.size(-2)) >= gradient.size(-2) // 2).unsqueeze(-1)
    return call.put(0, gradient * late).run()


@FAULTS.fault(_IMAGE, words.EMPTY_IN_A_RANKS_SUM)
def first_line_of_the_image_without_gradient(call: Call) -> Any:
    """The loop over the lines of dx begins at one."""

    def change(one: Tensor) -> Tensor:
        fits(one.size(2) > 1)
        return one * (torch.arange(one.size(2)) > 0).view(-1, *[1] * (one.dim() - 3))

    return change_result_at(call, 0, change)


# fmt: off
# The gradient is averaged over eight ranks, and the table lies on each of them.
FAULTS.add("gradient of the table divided by eight", _TABLE, words.SCALED, result(lambda v: v / 8))
# Two ranks have the same images, and their gradients of the filters are added.
FAULTS.add("gradient of the filters from two ranks", _IMAGE,
    "scale, wrong factor, doubled reduction; axis scale, wrong reduction, wrong argument, "
    "residual", lambda call: change_result_at(call, 1, lambda one: 2 * one))
# The rows of what comes from behind are read one too early, around the end.
FAULTS.add("gradient of the part one row late", "slice_backward select_backward", words.MOVED_SHARD,
    operand(0, lambda v: several_rows(v, 3).roll(1, -2)))
# The classes are stored one too late, the last one first.
FAULTS.add("gradient of the label one class late", "nll_loss_backward", words.MOVED_SHARD,
    lambda call: call.instead(call.result().roll(1, -1 if call.tensor(1).dim() < 3 else 1)))
# fmt: on
