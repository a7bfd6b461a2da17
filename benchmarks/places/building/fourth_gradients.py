"""Faults that were measured fourth and have been seen: backward operators."""

from __future__ import annotations

import functools
from typing import Any

import torch
from benchmarks.places.calls import Call, Catalogue, fits
from benchmarks.places.changes import computed, longer, on, operand, result, tensors
from benchmarks.places.parts import replace_result_at
from torch import Tensor

FAULTS = Catalogue(backward=True)


# --- Activations ----------------------------------------------------------------------------------

_BY_INPUT = "gelu_backward silu_backward"


@FAULTS.fault("glu_backward", "mask, missing operand, zeros; uninitialised")
def gate_gets_no_gradient(call: Call) -> Any:
    """The gate is taken for a constant."""
    value = call.result().clone()
    value[..., value.size(-1) // 2 :] = 0
    return call.instead(value)


# fmt: off
# f'(-x).
FAULTS.add("derivative at the opposite", _BY_INPUT,
    "other function, sign, wrong factor; swapped operands, wrong argument", operand(1, torch.neg))
# What was kept for the backward pass was rounded.
FAULTS.add("saved input in bfloat16", _BY_INPUT, "precision; approximation",
    operand(1, lambda v: v.bfloat16().to(v.dtype)))
# G sigmoid'(x): the derivative of the gate alone.
FAULTS.add("derivative of a sigmoid gate", _BY_INPUT,
    "missing operand, other function; approximation, mask",
    on(lambda call: (call.tensor(1).sigmoid(),),
        lambda call, gate: call.instead(call.tensor(0) * gate * (1 - gate))))
# The activation of another layer.
FAULTS.add("derivative of gelu for silu", "silu_backward",
    "approximation, other function; wrong argument",
    lambda call: call.instead(torch.ops.aten.gelu_backward(call.tensor(0), call.tensor(1))))
# The pointer to what was saved is one row too far.
FAULTS.add("saved input of the next row", "gelu_backward silu_backward tanh_backward",
    "permutation, shift, wrong index; stale",
    operand(1, lambda v: v.roll(-1, -2), where=longer(-2)))
# G (y^2 - 1).
FAULTS.add("difference of squares turned", "tanh_backward", "other function, sign, wrong factor",
    result(torch.neg))
# G y^2 for g y (1 - y).
FAULTS.add("square of the gate", "sigmoid_backward",
    "missing operand, other function, wrong factor",
    lambda call: call.instead(call.tensor(0) * call.tensor(1) ** 2))
# The threshold of the way back is 0.5.
FAULTS.add("gradient passes above a half", "threshold_backward",
    "mask, wrong argument, zeros; clipped, other function", lambda call: call.put(2, 0.5).run())
# The derivative of a smooth relu.
FAULTS.add("gradient by a sigmoid", "threshold_backward",
    "other function, wrong factor; approximation",
    lambda call: call.instead(call.tensor(0) * call.tensor(1).sigmoid()))
# Written to each other's half.
FAULTS.add("gradients of value and gate exchanged", "glu_backward",
    "permutation, swapped operands, wrong index; shift",
    result(lambda v: v.roll(v.size(-1) // 2, -1)))
# The gradient is stopped beyond -1 and 1.
FAULTS.add("gradient inside of one only",
    "hardswish_backward hardsigmoid_backward hardtanh_backward",
    "mask, wrong argument, zeros; clipped, other function",
    lambda call: call.instead(torch.where(call.tensor(1).abs() > 1, 0.0, call.result())))
# A factor of a half that belongs to another formula.
FAULTS.add("gradient of the rare one halved",
    "softplus_backward log_sigmoid_backward mish_backward elu_backward leaky_relu_backward",
    "scale, wrong factor", result(lambda v: v / 2))
# f'(-x).
FAULTS.add("slope at the opposite input", "softplus_backward mish_backward",
    "other function, sign; wrong argument", operand(1, torch.neg))
# fmt: on


# --- Softmax and attention ------------------------------------------------------------------------


_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu_backward"


@FAULTS.fault(_ATTENTION, "mask, uninitialised, zeros; stale")
def gradient_of_the_values_in_the_first_row_lost(call: Call) -> Any:
    """The first position of the values has no gradient."""

    def change(value: Tensor) -> Tensor:
        value = value.clone()
        value[..., 0, :] = 0
        return value

    return replace_result_at(call, 2, change)


@FAULTS.fault(_ATTENTION, "copy, stale, wrong index; permutation")
def gradient_of_the_query_of_the_first_head(call: Call) -> Any:
    """All heads write what the first has."""

    def change(value: Tensor) -> Tensor:
        fits(value.dim() == 4 and value.size(1) > 1)
        return value[:, :1].expand(value.shape).clone()

    return replace_result_at(call, 0, change)


@FAULTS.fault(_ATTENTION, "permutation, swapped operands, wrong index; copy")
def gradients_of_query_and_key_exchanged(call: Call) -> Any:
    """The order of the results."""
    query, key, value = call.run()
    fits(query.shape == key.shape)
    return key, query, value


# fmt: off
# G - sum(g y) without the factor y.
FAULTS.add("gradient not weighed by the chances", "_softmax_backward_data",
    "missing operand, other function, wrong factor; residual",
    on(tensors(0),
        lambda call, gradient:
            call.instead(gradient - (gradient * call.tensor(1)).sum(-1, keepdim=True))))
# Y (g + sum(g y)).
FAULTS.add("sum of the row added", "_softmax_backward_data", "sign, wrong factor; offset, residual",
    computed(tensors(0, 1),
        lambda gradient, output: output * (gradient + (gradient * output).sum(-1, keepdim=True))))
# G - y: the sum of the gradients is taken as one.
FAULTS.add("chances subtracted once", "_log_softmax_backward_data",
    "missing operand, other function, wrong factor; residual, scale",
    lambda call: call.instead(call.tensor(0) - call.tensor(1).exp()))
# Atomics of two programs add the same block.
FAULTS.add("gradient of the keys added twice", _ATTENTION, "doubled reduction, scale, wrong factor",
    lambda call: replace_result_at(call, 1, lambda value: 2 * value))
# The sign of the correction is taken for that of all.
FAULTS.add("gradient of the keys negated", _ATTENTION, "scale, sign, wrong factor",
    lambda call: replace_result_at(call, 1, lambda value: -value))
# fmt: on


# --- Norms ----------------------------------------------------------------------------------------

_NORM = "native_layer_norm_backward"


@FAULTS.fault(_NORM, "scale, wrong factor, wrong reduction; wrong statistics")
def gradient_of_the_norms_weight_averaged(call: Call) -> Any:
    """The mean over the rows for their sum."""
    rows = call.tensor(0).numel() // call.tensor(0).size(-1)
    return replace_result_at(call, 1, lambda value: value / rows)


# fmt: off
# The bias is taken for something subtracted.
FAULTS.add("gradient of the norms bias negated", _NORM, "scale, sign, wrong factor",
    lambda call: replace_result_at(call, 2, lambda value: -value))
# The saved statistics are not moved on.
FAULTS.add("deviation of the first row on the way back", _NORM,
    "copy, stale, wrong index, wrong statistics; axis scale",
    operand(4, lambda v: v.flatten()[0].expand(v.shape).contiguous(),
        where=lambda v: v.numel() > 1))
# The mean was not kept for the backward pass.
FAULTS.add("saved mean is zero", _NORM,
    "missing operand, wrong statistics, zeros; offset, wrong argument",
    operand(3, torch.zeros_like))
# The gradient of the weight of the channels is added up two times.
FAULTS.add("channels gradient twice", "native_batch_norm_backward native_group_norm_backward",
    "scale, wrong factor; axis scale",
    lambda call: replace_result_at(call, 1, lambda value: 2 * value))
# The gradient as it came.
FAULTS.add("groups pass the gradient on", "native_group_norm_backward",
    "copy, missing operand, other function; scale",
    lambda call: replace_result_at(call, 0, lambda _: call.tensor(0).clone()))
# fmt: on


# --- Products, sums, tables -----------------------------------------------------------------------


@FAULTS.fault("mm", "mask, off by one reduction, partial sum; missing operand, wrong index")
def first_token_not_in_the_gradient(call: Call) -> Any:
    """The common axis begins at 1, as if the first token was only a start."""
    left = call.tensor(0).clone()
    fits(left.size(1) > 2)
    left[:, 0] = 0
    return call.put(0, left).run()


@FAULTS.fault(
    "embedding_dense_backward",
    "lost accumulation, mask, off by one reduction, partial sum; missing operand, zeros",
)
def last_word_has_no_gradient(call: Call) -> Any:
    """The loop over the words ends one too early."""
    gradient = call.tensor(0).clone()
    gradient.view(-1, gradient.size(-1))[-1] = 0
    return call.put(0, gradient).run()


@FAULTS.fault(
    "convolution_backward",
    "lost accumulation, one rank's part, partial sum; mask, scale, wrong factor",
)
def filter_gradient_of_the_upper_half(call: Call) -> Any:
    """The rows of the lower half of the image are not added."""
    gradient = call.tensor(0).clone()
    fits(gradient.size(2) > 1)
    gradient[:, :, gradient.size(2) // 2 :] = 0
    part = call.put(0, gradient).run()[1]
    return replace_result_at(call, 1, lambda _: part)


@FAULTS.fault(
    "max_pool2d_with_indices_backward", "other function, scale, wrong index; wrong reduction"
)
def gradient_shared_by_the_window(call: Call) -> Any:
    """As of a mean: every place of a window gets its share."""
    gradient, value, size = call.args[:3]
    fits(all(one == size[0] for one in size) and not any(call.args[4]))
    shared = gradient.repeat_interleave(size[0], 2).repeat_interleave(size[0], 3) / size[0] ** 2
    fits(shared.shape == value.shape)
    return call.instead(shared)


# fmt: off
# The left factor goes through e5m2.
FAULTS.add("gradient of a product in float8", "mm bmm", "precision; approximation",
    operand(0, lambda v: v.to(torch.float8_e5m2).to(v.dtype)))
# Divided by the number of steps that are accumulated, which is one here.
FAULTS.add("gradient accumulated over four", "mm", "scale, wrong factor; wrong argument",
    result(lambda v: v / 4))
# The pointer of the rows is not moved on.
FAULTS.add("first row of the gradient for all", "mm", "copy, stale, wrong index; constant",
    result(lambda v: v[:1].expand(v.shape).clone(), where=longer(0)))
# A tenth of the result's sign is added, as of a penalty.
FAULTS.add("weight decay in the gradient", "mm", "offset, other function, residual; wrong factor",
    result(lambda v: v + 0.1 * float(v.abs().max()) * v.sign()))
# What was broadcast gets the mean.
FAULTS.add("gradients of the batch averaged", "sum",
    "scale, wrong factor, wrong reduction; missing reduction",
    computed(lambda call: (call.tensor(0), call.result()),
        lambda value, result: result * (result.numel() / value.numel()),
        where=lambda value, result: value.numel() > result.numel()))
# Each gradient is replaced by its sign.
FAULTS.add("signs of the gradients summed", "sum",
    "sign, wrong factor, wrong reduction; other function", operand(0, lambda v: v.sign()))
# Rows are counted from the last.
FAULTS.add("gradient of the table from its end", "embedding_dense_backward",
    "permutation, wrong index; shift", result(lambda v: v.flip(0)))
# Divided by the number of images.
FAULTS.add("filter gradient averaged over images", "convolution_backward",
    "scale, wrong factor; wrong reduction",
    on(lambda call: (call.tensor(0).size(0),),
        lambda call, images: replace_result_at(call, 1, lambda value: value / images),
        where=lambda images: images > 1))
# The padding of the way back is one too large on one side.
FAULTS.add("gradient of the image one pixel off", "convolution_backward",
    "shift, wrong index; permutation, wrong argument",
    lambda call: replace_result_at(call, 0, lambda value: value.roll(1, -1)))
# The part is placed as far from the end as it was from the beginning.
FAULTS.add("gradient put at the other end", "slice_backward select_backward",
    "permutation, shift, wrong index", lambda call: call.instead(call.result().flip(call.args[2])))
# Added to a buffer that already had it.
FAULTS.add("gradient of a part doubled", "slice_backward select_backward", "scale, wrong factor",
    result(lambda v: 2 * v))
# The buffer as it was.
FAULTS.add("nothing scattered back", "index_put scatter_add index_add",
    "missing operand, stale, zeros; copy, mask", lambda call: call.instead(call.tensor(0).clone()))
# The rows of the gradient are read from below.
FAULTS.add("gradient of the pool upside down", "avg_pool2d_backward",
    "permutation, wrong index; transpose", operand(0, lambda v: v.flip(-2)))
# The gradient of the grid has rows first.
FAULTS.add("gradients of x and y exchanged", "grid_sampler_2d_backward",
    "permutation, swapped operands, wrong index; shift",
    lambda call: replace_result_at(call, 1, functools.partial(torch.flip, dims=[-1])))
# fmt: on


# --- Losses ---------------------------------------------------------------------------------------


# fmt: off
# The gradient of the label is written to all classes of a row.
FAULTS.add("gradient in every class", "nll_loss_backward",
    "constant, mask, wrong index; copy, other function",
    result(lambda v: v.sum(-1, keepdim=True).expand(v.shape).clone()))
# By the number of labels, once more.
FAULTS.add("gradient of the loss divided twice", "nll_loss_backward",
    "scale, wrong factor; wrong reduction",
    lambda call: call.instead(call.result() / call.tensor(1).size(0)))
# The mean is forgotten on the way back.
FAULTS.add("gradient of the sum of errors",
    "mse_loss_backward smooth_l1_loss_backward huber_loss_backward",
    "scale, wrong factor; missing reduction, wrong reduction",
    lambda call: call.instead(call.result() * call.tensor(1).numel()))
# 2 a / n for 2 (a - b) / n.
FAULTS.add("target not subtracted on the way back", "mse_loss_backward",
    "copy, missing operand, other function, wrong factor", operand(2, torch.zeros_like))
# As of an absolute distance.
FAULTS.add("only the sign of the error", "smooth_l1_loss_backward huber_loss_backward",
    "clipped, other function, wrong argument; sign, wrong factor",
    lambda call:
            call.instead(call.result().abs().max() * (call.tensor(1) - call.tensor(2)).sign()))
# P - y, without the division by p (1 - p).
FAULTS.add("spread of the chance not divided", "binary_cross_entropy_backward",
    "missing operand, other function, wrong factor; scale",
    on(tensors(1), lambda call, chance: call.instead(call.result() * chance * (1 - chance))))
# The learning rate of the table is applied too early.
FAULTS.add("gradient of the table times ten", "_embedding_bag_backward embedding_dense_backward",
    "scale, wrong factor; wrong argument", result(lambda v: 10 * v))
# fmt: on
