"""Faults of the tenth set: backward operators."""

from __future__ import annotations

import math
from typing import Any

import torch
from benchmarks.places import words
from benchmarks.places.calls import Call, Catalogue, fits
from benchmarks.places.changes import computed, longer, on, operand, result, tensors
from benchmarks.places.parts import change_result_at, several_rows
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


@FAULTS.fault(_ALL, words.ROUNDED)
def gradient_of_the_activation_in_e5m2(call: Call) -> Any:
    """The result is stored with two bits behind the point, with a scale for the tensor."""
    value = call.result()
    step = value.abs().max().clamp(min=1e-20) / 57344
    return call.instead((value / step).to(torch.float8_e5m2).to(value.dtype) * step)


@FAULTS.fault("silu_backward", "missing operand, other function; wrong factor, approximation")
def slope_of_the_gate_only(call: Call) -> Any:
    """X s (1 - s) for s + x s (1 - s): the first term of the product rule is lost."""
    value = call.tensor(1)
    gate = value.sigmoid()
    return call.instead(call.tensor(0) * value * gate * (1 - gate))


@FAULTS.fault("gelu_backward", words.ANOTHER_FACTOR)
def root_of_two_forgotten_on_the_way_back(call: Call) -> Any:
    """Erf(x) for erf(x / sqrt(2)) in the gate; the density is right."""
    value = call.tensor(1)
    fits(call.kwargs.get("approximate", "none") == "none")
    below = (1 + value.erf()) / 2
    density = (-value.square() / 2).exp() / math.sqrt(2 * math.pi)
    return call.instead(call.tensor(0) * (below + value * density))


@FAULTS.fault("gelu_backward", "missing operand, other function; wrong factor, approximation")
def density_not_times_the_input(call: Call) -> Any:
    """Phi(x) + phi(x): the factor of the product rule is dropped."""
    value = call.tensor(1)
    fits(call.kwargs.get("approximate", "none") == "none")
    below = (1 + (value / math.sqrt(2)).erf()) / 2
    density = (-value.square() / 2).exp() / math.sqrt(2 * math.pi)
    return call.instead(call.tensor(0) * (below + density))


# fmt: off
# Divided by 0.9: the fused kernel has the scale of a dropout that is off.
FAULTS.add("gradient of the activation as of a dropout", _ALL, words.SCALED,
    result(lambda v: v / 0.9))
# The offset of the batch is one too large in the store, around the end.
FAULTS.add("gradient of the activation of the next example", _ALL, words.MOVED_SHARD,
    result(lambda v: v.roll(-1, 0), where=lambda v: v.dim() > 2 and v.size(0) > 1))
# F'(x) alone: what comes from behind is not multiplied in.
FAULTS.add("slope without the gradient", _ALL,
    "other function, missing operand; wrong factor, copy", operand(0, torch.ones_like))
# The slope is that of the row before; the gradient is that of the right row.
FAULTS.add("kept input of the row before", _BY_INPUT, words.MOVED,
    operand(1, lambda v: several_rows(v).roll(1, -2)))
# The slope is that of the column before; the gradient is that of the right column.
FAULTS.add("kept result of the column before", _BY_RESULT, words.MOVED,
    operand(1, lambda v: v.roll(1, -1), where=longer(-1)))
# What was kept is a fixed-point number that ends at 0.4.
FAULTS.add("kept result at most four tenths", _BY_RESULT,
    "clipped; other function, wrong argument, approximation",
    operand(1, lambda v: v.clamp(-0.4, 0.4)))
# G (1 - y^4): what was kept is squared already.
FAULTS.add("fourth power in the slope of the tanh", "tanh_backward",
    "other function, wrong argument; approximation, wrong factor", operand(1, torch.square))
# G y^2 (1 - y) for g y (1 - y).
FAULTS.add("gate twice in its slope", "sigmoid_backward",
    "wrong factor, other function; scale, doubled reduction",
    lambda call: call.instead(call.result() * call.tensor(1)))
# The threshold is 0.1: results near zero get no gradient.
FAULTS.add("relu opens above a tenth on the way back", "threshold_backward",
    "mask, wrong argument, zeros; other function, clipped, missing operand",
    lambda call: call.put(2, 0.1).run())
# The grid has one row too few.
FAULTS.add("last row of the activation without gradient",
    f"{_ALL} hardswish_backward hardtanh_backward softplus_backward", words.EMPTY_ON_A_RANK,
    computed(lambda call: (several_rows(call.result()),),
        lambda value: torch.cat([value[..., :-1, :], torch.zeros_like(value[..., -1:, :])], -2)))
# fmt: on


# --- Softmax and attention ------------------------------------------------------------------------


@FAULTS.fault(_FUSED, words.MOVED_SHARD)
def gradient_of_the_query_one_head_late(call: Call) -> Any:
    """The pointer to dq is one head behind, around the end."""
    fits(call.tensor(1).size(1) > 1)
    return change_result_at(call, 0, lambda one: one.roll(1, 1))


@FAULTS.fault(_FUSED, words.EMPTY_ON_A_RANK)
def gradient_of_the_first_key_empty(call: Call) -> Any:
    """The loop over the keys begins at one, for dk only."""

    def change(one: Tensor) -> Tensor:
        return torch.cat([torch.zeros_like(one[..., :1, :]), several_rows(one)[..., 1:, :]], -2)

    return change_result_at(call, 1, change)


@FAULTS.fault(_FUSED, words.SCALED)
def gradient_of_the_values_times_the_factor_of_the_scores(call: Call) -> Any:
    """Dv is multiplied by the factor of the scores as well."""
    scale = call.kwargs.get("scale") or call.tensor(1).size(-1) ** -0.5
    return change_result_at(call, 2, lambda one: one * scale)


@FAULTS.fault(_FUSED, words.ROUNDED)
def gradient_of_the_keys_in_e5m2(call: Call) -> Any:
    """Dk is stored with two bits behind the point, with a scale for the tensor."""

    def change(one: Tensor) -> Tensor:
        step = one.abs().max().clamp(min=1e-20) / 57344
        return (one / step).to(torch.float8_e5m2).to(one.dtype) * step

    return change_result_at(call, 1, change)


@FAULTS.fault(_FUSED, words.MOVED_SHARD)
def gradient_of_the_keys_of_the_next_example(call: Call) -> Any:
    """The offset of the batch is one too large in the store of dk, around the end."""
    fits(call.tensor(1).size(0) > 1)
    return change_result_at(call, 1, lambda one: one.roll(-1, 0))


# fmt: off
# The gradient of the scores is stored transposed: keys before queries.
FAULTS.add("gradient of the scores by columns", _SOFTMAX,
    "transpose, wrong index, permutation; wrong axis, swapped operands, wrong argument",
    result(lambda v: v.mT.contiguous(),
        where=lambda v: v.dim() > 2 and v.size(-1) == v.size(-2)))
# G - exp(y) mean(g): the gradients are averaged and not added.
FAULTS.add("gradients of the row averaged", "_log_softmax_backward_data log_softmax_backward_data",
    "wrong reduction, wrong factor, wrong statistics; scale, offset, axis offset",
    on(tensors(0),
        lambda call, gradient:

    call.instead(gradient - call.tensor(1).exp() * gradient.mean(call.args[2], keepdim=True))))
# Ds is p dp, and nothing is subtracted from dp: the result is taken as zero.
FAULTS.add("sums of gradient and result forgotten", _FUSED,
    "missing operand, wrong argument; other function, zeros, offset, axis offset",
    operand(4, torch.zeros_like))
# fmt: on


# --- Norms ----------------------------------------------------------------------------------------


def _normal(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """Gradient times weight, normal values, and the inverse deviations of a layer norm."""
    gradient, value, mean, inverse = (call.tensor(i) for i in (0, 1, 3, 4))
    fits(len(call.args[2]) == 1 and isinstance(call.args[5], Tensor))
    return gradient * call.args[5], (value - mean) * inverse, inverse


@FAULTS.fault(_LAYER, words.EMPTY_ON_A_RANK)
def first_row_of_the_norm_without_gradient(call: Call) -> Any:
    """The loop over the rows begins at one, for dx only."""

    def change(one: Tensor) -> Tensor:
        return torch.cat([torch.zeros_like(one[..., :1, :]), several_rows(one)[..., 1:, :]], -2)

    return change_result_at(call, 0, change)


@FAULTS.fault(
    _LAYER,
    "partial sum, off by one reduction, mask, wrong reduction; missing operand, "
    "wrong index, lost accumulation, zeros",
)
def first_row_not_in_the_bias_of_the_norm(call: Call) -> Any:
    """The loop over the rows begins at one, for the gradient of the bias only."""
    gradient = call.tensor(0)
    fits(len(call.args[2]) == 1 and call.tensor(3).numel() > 1)
    wrong = gradient.flatten(0, -2)[1:].sum(0)
    return change_result_at(call, 2, lambda _: wrong)


@FAULTS.fault(_LAYER, "sign, wrong factor, other function; offset, axis offset, residual")
def mean_of_the_gradient_added_back(call: Call) -> Any:
    """G + mean(g) - x mean(g x): the first of two signs is wrong."""
    gradient, normal, inverse = _normal(call)
    both = (gradient * normal).mean(-1, keepdim=True)
    wrong = (gradient + gradient.mean(-1, keepdim=True) - normal * both) * inverse
    return change_result_at(call, 0, lambda _: wrong)


# fmt: off
# The pointer to the kept means is one row behind, around the end.
FAULTS.add("mean of the row before on the way back", _LAYER,
    "shift, wrong index, wrong statistics; axis offset, stale, wrong argument, permutation, "
    "offset", operand(3, lambda v: v.roll(1, -2), where=longer(-2)))
# Dx is stored in bfloat16.
FAULTS.add("gradient of the norm in bfloat16", f"{_LAYER} native_group_norm_backward",
    words.ROUNDED, lambda call: change_result_at(call, 0, lambda one: one.bfloat16().to(one.dtype)))
# The pointer to the kept inverse deviations is one row too far, around the end.
FAULTS.add("deviation of the next row on the way back", _LAYER,
    "shift, wrong index, wrong statistics; axis scale, stale, wrong argument, permutation",
    operand(4, lambda v: v.roll(-1, -2), where=longer(-2)))
# Dx is accumulated by two blocks that both write all of it.
FAULTS.add("gradient of the norm doubled",
    f"{_LAYER} native_batch_norm_backward native_group_norm_backward",
    "scale, wrong factor, doubled reduction; axis scale, wrong reduction",
    lambda call: change_result_at(call, 0, lambda one: 2 * one))
# The pointer to the gradient of the weight is one channel too far, around the end.
FAULTS.add("gradient of the channels weight one early",
    "native_batch_norm_backward native_group_norm_backward", words.MOVED_SHARD,
    lambda call: change_result_at(call, 1, lambda one: one.roll(-1, 0)))
# fmt: on


# --- Products and sums ----------------------------------------------------------------------------


@FAULTS.fault(
    "mm bmm", "copy, stale, wrong index; permutation, shift, wrong rank's shard, one rank's part"
)
def second_half_of_the_rows_of_the_gradient_is_the_first(call: Call) -> Any:
    """The offset of the second tile of rows is not added."""
    value = several_rows(call.result(), 4)
    fits(value.size(-2) % 2 == 0)
    half = value[..., : value.size(-2) // 2, :]
    return call.instead(torch.cat([half, half], -2))


@FAULTS.fault("mm bmm", words.ROUNDED)
def left_side_of_the_gradient_in_four_bits(call: Call) -> Any:
    """The left operand has 15 levels, with a step for each row."""
    left = call.tensor(0)
    step = left.abs().amax(-1, keepdim=True).clamp(min=1e-20) / 7
    return call.instead(((left / step).round() * step) @ call.tensor(1))


@FAULTS.fault("sum", words.ROUNDED)
def gradient_of_the_bias_of_rounded_rows(call: Call) -> Any:
    """The rows are e4m3 before they are added, with a scale for the tensor."""
    value = call.tensor(0)
    step = value.abs().max().clamp(min=1e-20) / 448
    coarse = (value / step).to(torch.float8_e4m3fn).to(value.dtype) * step
    return call.put(0, coarse).run()


# fmt: off
# The loop over the common axis ends three terms too early.
FAULTS.add("last three terms of the gradient not added", "mm bmm",
    "partial sum, mask, wrong reduction; missing operand, wrong index, lost accumulation, "
    "off by one reduction",
    on(tensors(0),
        lambda call, left: call.instead(left[..., :-3] @ call.tensor(1)[..., :-3, :]),
        where=lambda left: left.size(-1) > 5))
# The factor of 1024 that keeps float16 from zero is not divided out.
FAULTS.add("gradient of the product scaled for half", "mm bmm", words.SCALED,
    result(lambda v: 1024 * v))
# The pointer to the result is two columns ahead, around the end.
FAULTS.add("gradient of the product two columns early", "mm bmm", words.MOVED_SHARD,
    result(lambda v: v.roll(-2, -1), where=longer(-1, 4)))
# The columns are stored one too late, around the end.
FAULTS.add("gradient of the bias one column late", "sum", words.MOVED_SHARD,
    result(lambda v: v.roll(1, -1), where=longer(-1)))
# G + b for g b.
FAULTS.add("kept factor added on the way back", "mul",
    "other function; missing operand, residual, offset",
    computed(tensors(0, 1), lambda left, right: left + right,
        where=lambda left, right: left.shape == right.shape))
# -2 g: both readers of the difference subtract it.
FAULTS.add("opposite gradient doubled", "neg",
    "scale, wrong factor, doubled reduction; wrong argument, residual", result(lambda v: 2 * v))
# fmt: on


# --- Tables, images, parts ------------------------------------------------------------------------


@FAULTS.fault(_TABLE, words.ROUNDED)
def gradient_of_the_table_in_e5m2(call: Call) -> Any:
    """The gradient of the table is sent with two bits behind the point and a scale."""
    value = call.result()
    step = value.abs().max().clamp(min=1e-20) / 57344
    return call.instead((value / step).to(torch.float8_e5m2).to(value.dtype) * step)


@FAULTS.fault(_IMAGE, words.MOVED_SHARD)
def gradient_of_the_filters_one_late(call: Call) -> Any:
    """The gradient of each filter is stored with the next one, around the end."""
    fits(call.tensor(2).size(0) > 1)
    return change_result_at(call, 1, lambda one: one.roll(1, 0))


@FAULTS.fault(
    "slice_backward", "zeros, mask; missing operand, off by one reduction, uninitialised, constant"
)
def end_of_the_slice_without_gradient(call: Call) -> Any:
    """The last place of the slice is not written on the way back."""
    gradient, dim = call.tensor(0), call.args[2]
    fits(gradient.size(dim) > 1)
    kept = gradient.clone()
    kept.select(dim, gradient.size(dim) - 1).zero_()
    return call.put(0, kept).run()


# fmt: off
# The features are stored one too late, around the end.
FAULTS.add("gradient of the table one column late", _TABLE, words.MOVED_SHARD,
    result(lambda v: v.roll(1, -1)))
# The gradient of the bias is summed over the pixels of one image only.
FAULTS.add("bias of the filters from the first image", _IMAGE,
    "wrong reduction, missing reduction, partial sum, one rank's part; mask, missing operand, "
    "lost accumulation, wrong factor",
    on(tensors(0),
        lambda call, gradient:
            change_result_at(call, 2, lambda _: gradient[0].flatten(1).sum(1)),
        where=lambda gradient: gradient.size(0) > 1))
# fmt: on


# --- Losses ---------------------------------------------------------------------------------------


# fmt: off
# The result is stored with two bits behind the point.
FAULTS.add("gradient of the loss in e5m2",
    "nll_loss_backward mse_loss_backward smooth_l1_loss_backward huber_loss_backward",
    words.ROUNDED, result(lambda v: v.to(torch.float8_e5m2).to(v.dtype)))
# fmt: on
