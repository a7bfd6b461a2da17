"""Faults of the eleventh set: backward operators."""

from __future__ import annotations

from typing import Any

import torch
from benchmarks.places import words
from benchmarks.places.calls import Call, Catalogue, fits
from benchmarks.places.changes import computed, longer, on, operand, result, tensors
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


@FAULTS.fault("silu_backward", words.ANOTHER_FACTOR)
def slope_of_the_quick_gelu_for_the_silu(call: Call) -> Any:
    """The slope of x sigmoid(1.702 x)."""
    value = call.tensor(1)
    gate = (1.702 * value).sigmoid()
    return call.instead(call.tensor(0) * gate * (1 + 1.702 * value * (1 - gate)))


# fmt: off
# The rows are stored one too late, around the end.
FAULTS.add("gradient of the activation one row late", _ALL, words.MOVED_SHARD,
    result(lambda v: several_rows(v).roll(1, -2)))
# Divided by 0.8, for a dropout that is off.
FAULTS.add("gradient of the activation a quarter larger", _ALL, words.SCALED,
    result(lambda v: v * 1.25))
# The mask of the store is `column > 0`.
FAULTS.add("first column of the activation without gradient", _ALL, words.EMPTY_ON_A_RANK,
    result(lambda v: v * (torch.arange(v.size(-1)) > 0), where=longer(-1)))
# What comes from behind has two bits behind the point, with a scale for the tensor.
FAULTS.add("incoming gradient in e5m2", _ALL, words.ROUNDED,
    operand(0, lambda v: in_float8_steps(v, torch.float8_e5m2)))
# The kept input is a fixed-point number that ends at a half.
FAULTS.add("kept input between one half and its opposite", _BY_INPUT,
    "clipped; other function, wrong argument, approximation",
    operand(1, lambda v: v.clamp(-0.5, 0.5)))
# The input was scaled in place after it was kept.
FAULTS.add("slope at three times the input", _BY_INPUT,
    "wrong factor, wrong argument; scale, other function", operand(1, lambda v: 3 * v))
# G (1 - y² / 2): the square comes with the half of a quadratic loss.
FAULTS.add("half of the square in the slope of the tanh", "tanh_backward",
    "wrong factor, other function; approximation, wrong argument",
    lambda call: call.instead(call.tensor(0) * (1 - call.tensor(1).square() / 2)))
# G (1 - y)² for g y (1 - y).
FAULTS.add("complement of the gate twice", "sigmoid_backward",
    "other function, wrong factor; wrong argument, missing operand, copy",
    lambda call: call.instead(call.tensor(0) * (1 - call.tensor(1)).square()))
# The backward pass of a leaky rectifier: a fifth passes where it is closed.
FAULTS.add("leak of a fifth on the way back", "threshold_backward",
    "other function; wrong factor, mask, wrong argument, residual, clipped",
    lambda call:
            call.instead(torch.where(call.tensor(1) > 0, call.tensor(0), 0.2 * call.tensor(0))))
# fmt: on


# --- Softmax and attention ------------------------------------------------------------------------


@FAULTS.fault(_FUSED, words.EMPTY_ON_A_RANK)
def gradient_of_the_second_half_of_the_keys_empty(call: Call) -> Any:
    """The grid over the blocks of keys has one block, for dk only."""

    def change(one: Tensor) -> Tensor:
        half = several_rows(one, 4).size(-2) // 2
        return torch.cat([one[..., :half, :], torch.zeros_like(one[..., half:, :])], -2)

    return change_result_at(call, 1, change)


@FAULTS.fault(
    _FUSED, "copy, stale, wrong index; permutation, shift, wrong rank's shard, one rank's part"
)
def gradient_of_the_keys_of_the_first_example(call: Call) -> Any:
    """The stride of the batch is zero in the store of dk."""
    fits(call.tensor(1).size(0) > 1)
    return change_result_at(call, 1, lambda one: one[:1].expand_as(one).contiguous())


# fmt: off
# P (g - sum(g p) / 2): the sum is averaged over two ranks that both have all of it.
FAULTS.add("half of the sum subtracted", _SOFTMAX,
    "wrong factor; missing operand, offset, axis offset, wrong reduction, scale",
    computed(softmax_terms,
        lambda terms, chances, dim: terms - chances * terms.sum(dim, keepdim=True) / 2))
# The loop that adds g p begins at one; the first key has its gradient.
FAULTS.add("first key not in the sum of the row", _SOFTMAX,
    "partial sum, off by one reduction, mask, wrong reduction; missing operand, wrong index, "
    "lost accumulation, axis offset, offset",
    computed(softmax_terms,
        lambda terms, chances, dim:
            terms - chances * terms.narrow(dim, 1, terms.size(dim) - 1).sum(dim, keepdim=True)))
# The sums of g p are read one row too early, around the end.
FAULTS.add("sum of the row before subtracted", _SOFTMAX,
    "shift, wrong index, stale, wrong statistics; permutation, axis offset, offset, copy",
    computed(softmax_terms,
        lambda terms, chances, dim:
            terms - chances * several_rows(terms.sum(dim, keepdim=True)).roll(1, -2),
        where=lambda terms, _, dim: dim in {-1, terms.dim() - 1}))
# The kept chances have two bits behind the point.
FAULTS.add("chances of the way back in e5m2", _SOFTMAX, words.ROUNDED,
    operand(1, lambda v: v.to(torch.float8_e5m2).to(v.dtype)))
# The classes are stored one too late, around the end.
FAULTS.add("gradient of the logits one class late",
    "_log_softmax_backward_data log_softmax_backward_data", words.MOVED_SHARD,
    lambda call: call.instead(call.result().roll(1, call.args[2])))
# The positions of dq are stored one too late, around the end.
FAULTS.add("gradient of the query one position late", _FUSED, words.MOVED_SHARD,
    lambda call: change_result_at(call, 0, lambda one: several_rows(one).roll(1, -2)))
# Two groups of queries read the values, and their gradients are averaged.
FAULTS.add("gradient of the values halved", _FUSED, words.SCALED,
    lambda call: change_result_at(call, 2, lambda one: one / 2))
# Dv is sent with two bits behind the point, with a scale for the tensor.
FAULTS.add("gradient of the values in e5m2", _FUSED, words.ROUNDED,
    lambda call:
            change_result_at(call, 2, lambda one: in_float8_steps(one, torch.float8_e5m2)))
# The sums of gradient and result are made with the result of the row before.
FAULTS.add("result of the row before on the way back", _FUSED,
    "shift, wrong index, stale; permutation, wrong argument, copy, offset, wrong statistics",
    operand(4, lambda v: several_rows(v).roll(1, -2)))
# The chances are computed again with the sum of the next query, around the end.
FAULTS.add("logarithm of the next query on the way back", _FUSED,
    "shift, wrong index, stale, wrong statistics; permutation, wrong argument, copy, "
    "axis scale, scale, wrong factor",
    operand(5, lambda v: lay_out_like(v, v.roll(-1, -1)), where=longer(-1)))
# fmt: on


# --- Norms ----------------------------------------------------------------------------------------


def _normal(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """Gradient times weight, normal values, and the inverse deviations of a layer norm."""
    gradient, value, mean, inverse = (call.tensor(i) for i in (0, 1, 3, 4))
    fits(len(call.args[2]) == 1 and isinstance(call.args[5], Tensor))
    return gradient * call.args[5], (value - mean) * inverse, inverse


@FAULTS.fault(_LAYER, "wrong factor; missing operand, wrong statistics, scale, other function")
def half_of_the_term_of_the_variance(call: Call) -> Any:
    """G - mean(g) - x mean(g x) / 2: the half of the derivative of a root is taken once more."""
    gradient, normal, inverse = _normal(call)
    both = (gradient * normal).mean(-1, keepdim=True)
    wrong = (gradient - gradient.mean(-1, keepdim=True) - normal * both / 2) * inverse
    return change_result_at(call, 0, lambda _: wrong)


@FAULTS.fault(
    _LAYER,
    "partial sum, off by one reduction, mask, wrong reduction; missing operand, "
    "wrong index, lost accumulation, zeros",
)
def first_row_not_in_the_weight_of_the_norm(call: Call) -> Any:
    """The loop over the rows begins at one, for the gradient of the weight only."""
    _, normal, _ = _normal(call)
    fits(normal.flatten(0, -2).size(0) > 1)
    wrong = (call.tensor(0) * normal).flatten(0, -2)[1:].sum(0)
    return change_result_at(call, 1, lambda _: wrong)


@FAULTS.fault(_LAYER, words.EMPTY_ON_A_RANK)
def second_half_of_the_norms_bias_without_gradient(call: Call) -> Any:
    """The second stage of the sum has one tile of features."""

    def change(one: Tensor) -> Tensor:
        return one * (torch.arange(one.size(-1)) < one.size(-1) // 2)

    fits(len(call.args[2]) == 1)
    return change_result_at(call, 2, change)


# fmt: off
# The rows of dx are stored one too late, around the end.
FAULTS.add("gradient of the norm one row late", _LAYER, words.MOVED_SHARD,
    lambda call: change_result_at(call, 0, lambda one: several_rows(one, 3).roll(1, -2)))
# The pointer to the kept means has a stride of zero.
FAULTS.add("mean of the first row on the way back", _LAYER,
    "stale, copy, wrong index, wrong statistics; axis offset, wrong argument, offset, shift",
    on(lambda call: (several_rows(call.tensor(3)),),
        lambda call, mean: call.put(3, mean[..., :1, :].expand_as(mean).contiguous()).run()))
# The channels of dx are stored one too late, around the end.
FAULTS.add("gradient of the normal image one channel late",
    "native_batch_norm_backward native_group_norm_backward", words.MOVED_SHARD,
    lambda call: change_result_at(call, 0, lambda one: one.roll(1, 1)))
# fmt: on


# --- Products and sums ----------------------------------------------------------------------------


@FAULTS.fault(
    "mm bmm",
    "partial sum, mask, wrong reduction; missing operand, wrong index, lost accumulation, "
    "off by one reduction, missing reduction, zeros",
)
def every_fourth_term_of_the_gradient_lost(call: Call) -> Any:
    """Of four accumulators, the last one is not added."""
    left, right = call.tensor(0), call.tensor(1)
    fits(left.size(-1) > 7)
    return call.instead((left * (torch.arange(left.size(-1)) % 4 != 3)) @ right)


@FAULTS.fault("mm bmm", words.ROUNDED)
def right_side_of_the_gradient_in_four_bits(call: Call) -> Any:
    """The right operand has 15 levels, with a step for each column."""
    right = call.tensor(1)
    step = right.abs().amax(-2, keepdim=True).clamp(min=1e-20) / 7
    return call.instead(call.tensor(0) @ ((right / step).round() * step))


# fmt: off
# Four ranks have the same gradient, and they are added.
FAULTS.add("gradient of the product from four ranks", "mm",
    "scale, wrong factor, doubled reduction; axis scale, wrong reduction, wrong argument, "
    "residual", result(lambda v: 4 * v))
# The mask of the store is `column > 0`.
FAULTS.add("first column of the sum without gradient", "sum", words.EMPTY_ON_A_RANK,
    result(lambda v: v * (torch.arange(v.size(-1)) > 0), where=longer(-1)))
# Three projections share the bias in the kernel; here there is one.
FAULTS.add("gradient of the bias three times", "sum",
    "scale, wrong factor, doubled reduction; axis scale, wrong reduction, wrong argument, "
    "residual", result(lambda v: 3 * v))
# What was kept for the way back has two bits behind the point, with a scale.
FAULTS.add("kept factor in e5m2", "mul", words.ROUNDED,
    operand(1, lambda v: in_float8_steps(v, torch.float8_e5m2)))
# fmt: on


# --- Tables, images, parts ------------------------------------------------------------------------


@FAULTS.fault(_IMAGE, words.MOVED_SHARD)
def gradient_of_the_filters_one_channel_early(call: Call) -> Any:
    """The input channels of each filter's gradient are stored one too early."""
    fits(call.tensor(2).size(1) > 1)
    return change_result_at(call, 1, lambda one: one.roll(-1, 1))


# fmt: off
# The features are stored one too early, around the end.
FAULTS.add("gradient of the table one column early", _TABLE, words.MOVED_SHARD,
    result(lambda v: v.roll(-1, 1)))
# The gradient of each position goes to the word before it, around the end.
FAULTS.add("words one position late on the way back", _TABLE, words.MOVED,
    on(lambda call: (call.get(1),), lambda call, words: call.put(1, words.roll(1, -1)).run(),
        where=lambda words: words.dim() > 1 and words.size(-1) > 1))
# Dx is multiplied by 1.5, the step of another loss.
FAULTS.add("gradient of the image three halves", _IMAGE, words.SCALED,
    lambda call: change_result_at(call, 0, lambda one: 1.5 * one))
# Two readers of the tensor average their gradients.
FAULTS.add("gradient of the part halved", "slice_backward select_backward", words.SCALED,
    operand(0, lambda v: v / 2))
# fmt: on


# --- More of the same -----------------------------------------------------------------------------


@FAULTS.fault(
    "mm bmm",
    "partial sum, mask, wrong reduction; missing operand, wrong index, lost accumulation, "
    "off by one reduction, missing reduction, zeros",
)
def first_two_terms_of_the_gradient_not_added(call: Call) -> Any:
    """The loop over the common axis begins two terms too late."""
    left, right = call.tensor(0), call.tensor(1)
    fits(left.size(-1) > 8)
    return call.instead(left[..., 2:] @ right[..., 2:, :])


@FAULTS.fault(
    _LAYER,
    "partial sum, wrong reduction, mask, wrong statistics; missing reduction, "
    "one rank's part, axis offset, missing operand, wrong index",
)
def both_means_of_every_second_feature(call: Call) -> Any:
    """The two means over a row are made with a stride of two, and with half of the number."""
    gradient, normal, inverse = _normal(call)
    fits(gradient.size(-1) > 3)
    mean = gradient[..., ::2].mean(-1, keepdim=True)
    both = (gradient * normal)[..., ::2].mean(-1, keepdim=True)
    wrong = (gradient - mean - normal * both) * inverse
    return change_result_at(call, 0, lambda _: wrong)


@FAULTS.fault(
    _IMAGE,
    "partial sum, mask, wrong reduction; missing operand, wrong index, lost accumulation, "
    "off by one reduction, missing reduction, zeros",
)
def every_second_line_not_in_the_filters(call: Call) -> Any:
    """The loop over the lines of the gradient has a stride of two, for the filters only."""
    gradient = call.tensor(0)
    fits(gradient.size(2) > 2)
    kept = torch.arange(gradient.size(2)) % 2 == 0
    part = gradient * kept.view(-1, *[1] * (gradient.dim() - 3))
    wrong = call.put(0, part).run()[1]
    return change_result_at(call, 1, lambda _: wrong)


@FAULTS.fault(
    "sum",
    "partial sum, mask, wrong reduction; missing operand, wrong index, lost accumulation, "
    "off by one reduction, missing reduction, zeros",
)
def every_third_row_not_in_the_gradient_of_the_bias(call: Call) -> Any:
    """Of three accumulators, the last one is not added."""
    value, dims = call.tensor(0), call.get(1, "dim")
    fits(isinstance(dims, list | tuple) and dims)
    dim = dims[-1]
    fits(value.size(dim) > 5)
    shape = [1] * value.dim()
    shape[dim] = -1
    kept = torch.arange(value.size(dim)) % 3 != 2
    return call.put(0, value * kept.view(shape)).run()


# fmt: off
# Two rows share a program, which stores them in the other order.
FAULTS.add("rows of the gradient exchanged in pairs", "mm bmm",
    "permutation, wrong index; shift, swapped operands, wrong rank's shard",
    computed(lambda call: (several_rows(call.result(), 4),),
        lambda value: value[..., torch.arange(value.size(-2)) ^ 1, :],
        where=lambda value: value.size(-2) % 2 == 0))
# The store is aligned to four numbers, and what is before is left out.
FAULTS.add("first two columns of the gradient not stored", "mm bmm", words.EMPTY_ON_A_RANK,
    result(lambda v: v * (torch.arange(v.size(-1)) > 1), where=longer(-1, 3)))
# The gradient is multiplied by what was kept of the column before, around the end.
FAULTS.add("kept factor of the column before", "mul", words.MOVED,
    on(tensors(0, 1), lambda call, _, right: call.put(1, right.roll(1, -1)).run(),

    where=lambda left, right: left.shape == right.shape and right.dim() and (right.size(-1) > 1)))
# The sign of the divisor's gradient is given to that of the dividend.
FAULTS.add("gradient of the quotient with a minus", "div",
    "sign, scale, wrong factor; swapped operands, other function", result(torch.neg))
# The words of the first example are not added to the gradients of their vectors.
FAULTS.add("first example not in the table", _TABLE,
    "partial sum, mask, wrong reduction; missing operand, wrong index, lost accumulation, "
    "off by one reduction, missing reduction, zeros",
    operand(0, lambda v: v * (torch.arange(v.size(0)) > 0).view(-1, *[1] * (v.dim() - 1)),
        where=lambda v: v.dim() > 2 and v.size(0) > 1))
# The backward pass has the momentum in the place of eps.
FAULTS.add("eps of a tenth for the channels on the way back", "native_batch_norm_backward",
    "eps, wrong argument; wrong statistics, axis scale, scale, wrong factor",
    lambda call: call.put(8, 0.1).run())
# The gradient of the weight is averaged over two ranks that were given the whole batch.
FAULTS.add("gradient of the channels weight halved",
    "native_group_norm_backward native_batch_norm_backward",
    "scale, wrong factor; axis scale, wrong reduction, doubled reduction",
    lambda call: change_result_at(call, 1, lambda one: one / 2))
# The columns are stored one too late, around the end.
FAULTS.add("opposite gradient one column late", "neg",
    "shift, wrong index, permutation; stale, copy",
    result(lambda v: v.roll(1, -1), where=longer(-1, 2)))
# fmt: on
