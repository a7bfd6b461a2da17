"""Faults that were measured sixth and have been seen: backward operators."""

from __future__ import annotations

from typing import Any

import torch
from benchmarks.places import words
from benchmarks.places.calls import Call, Catalogue, fits
from benchmarks.places.changes import computed, longer, on, operand, result, tensors
from benchmarks.places.parts import replace_result_at, several_rows, softmax_chances
from torch import Tensor

FAULTS = Catalogue(backward=True)


# --- Activations ----------------------------------------------------------------------------------

_BY_INPUT = "gelu_backward silu_backward"
_SMOOTH = "gelu_backward silu_backward sigmoid_backward tanh_backward"
_ALL = f"{_SMOOTH} threshold_backward"


@FAULTS.fault(_ALL, words.EMPTY_ON_A_RANK)
def gradient_of_the_second_half_of_the_columns_lost(call: Call) -> Any:
    """The width is that of one shard."""
    value = call.result().clone()
    fits(value.dim() > 0 and value.size(-1) > 1)
    value[..., value.size(-1) // 2 :] = 0
    return call.instead(value)


@FAULTS.fault(
    "hardswish_backward hardtanh_backward hardsigmoid_backward leaky_relu_backward "
    "elu_backward softplus_backward mish_backward glu_backward",
    "scale, sign, wrong factor; other function",
)
def slope_of_the_rare_one_negated(call: Call) -> Any:
    """The minus of a difference."""
    return call.instead(-call.result())


# fmt: off
# f'(x / 2).
FAULTS.add("derivative at half of the input", _BY_INPUT,
    "other function, wrong factor; approximation, scale, wrong argument",
    operand(1, lambda v: v / 2))
# G f' + g: the gradient of a residual that is not there.
FAULTS.add("gradient added to itself on the way", _ALL,
    "other function, residual; offset, wrong factor",
    lambda call: call.instead(call.result() + call.tensor(0)))
# 1 - tanh(x)^2.
FAULTS.add("derivative of tanh for the activation", _BY_INPUT,
    "other function; approximation, wrong argument",
    lambda call: call.instead(call.tensor(0) * (1 - call.tensor(1).tanh().square())))
# What was kept is read one column too far, around the end.
FAULTS.add("saved value of the next column", _SMOOTH,
    "permutation, shift, wrong index; other function, stale",
    operand(1, lambda v: v.roll(-1, -1), where=longer(-1)))
# The pointer to what was kept is not moved on with the batch.
FAULTS.add("saved value of the first example", _ALL, "copy, stale, wrong index; mask, permutation",
    operand(1, lambda v: v[:1].expand(v.shape).clone(),
        where=lambda v: v.dim() > 1 and v.size(0) > 1))
# Stored in e5m2.
FAULTS.add("gradient of the activation through float8", _SMOOTH, "precision; approximation",
    result(lambda v: v.to(torch.float8_e5m2).to(v.dtype)))
# A vector loop without its tail, in place: the last two columns keep the gradient.
FAULTS.add("last columns of the gradient passed on", _ALL,
    "copy, mask, missing operand; other function, stale",
    computed(lambda call: (call.tensor(0), call.result()),
        lambda gradient, value: torch.cat([value[..., :-2], gradient[..., -2:]], -1),
        where=lambda _, value: value.dim() > 0 and value.size(-1) > 3))
# The slope at zero for all.
FAULTS.add("slope of the gate is a quarter", "sigmoid_backward",
    "approximation, constant, missing operand, wrong factor; other function, scale",
    lambda call: call.instead(call.tensor(0) / 4))
# The gradient times the saved result.
FAULTS.add("result for the slope", "tanh_backward",
    "missing operand, other function; sign, wrong factor",
    lambda call: call.instead(call.tensor(0) * call.tensor(1)))
# The saved signs are one bit off.
FAULTS.add("mask of the next column on the way back", "threshold_backward",
    "mask, shift, wrong index; permutation, zeros",
    operand(1, lambda v: v.roll(-1, -1), where=longer(-1)))
# The gradient times the result of the relu and not times its mask.
FAULTS.add("saved result multiplied in", "threshold_backward",
    "other function, wrong factor; mask, missing operand",
    lambda call: call.instead(call.tensor(0) * call.tensor(1).relu()))
# The sign of the gradient is lost: |g f'|.
FAULTS.add("magnitude of the slope", _SMOOTH, "other function, sign; clipped, wrong factor",
    result(torch.abs))
# fmt: on


# --- Softmax, attention ---------------------------------------------------------------------------


@FAULTS.fault(
    "_softmax_backward_data",
    "axis offset, missing reduction, one rank's part, partial sum, wrong reduction; mask, "
    "off by one reduction, offset, residual, wrong statistics",
)
def sum_of_half_of_the_row_subtracted(call: Call) -> Any:
    """The other rank's half of the products is not added."""
    gradient, chances = softmax_chances(call)
    half = chances.size(-1) // 2
    total = (gradient * chances)[..., :half].sum(-1, keepdim=True)
    return call.instead(chances * (gradient - total))


@FAULTS.fault("_softmax_backward_data _log_softmax_backward_data", words.EMPTY)
def last_score_without_gradient(call: Call) -> Any:
    """The bound of the store is one too small."""
    value = call.result().clone()
    fits(value.size(-1) > 2)
    value[..., -1] = 0
    return call.instead(value)


_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu_backward"


@FAULTS.fault(_ATTENTION, "permutation, shift, wrong index; copy, wrong rank's shard")
def gradient_of_the_keys_of_the_next_head(call: Call) -> Any:
    """The heads of dk are one off."""
    fits(call.tensor(2).size(1) > 1)
    return replace_result_at(call, 1, lambda one: one.roll(-1, 1))


@FAULTS.fault(_ATTENTION, "copy, stale, wrong index; permutation")
def second_half_of_the_query_gradient_is_the_first(call: Call) -> Any:
    """The tile of dq is not cleared and not computed again."""
    rows = call.tensor(1).size(-2)
    fits(rows > 1)
    order = torch.arange(rows) % ((rows + 1) // 2)
    return replace_result_at(call, 0, lambda one: one[..., order, :])


@FAULTS.fault(
    _ATTENTION,
    "lost accumulation, missing reduction, one rank's part, partial sum; mask, "
    "wrong index, wrong reduction",
)
def keys_get_the_gradient_of_the_first_queries(call: Call) -> Any:
    """The second half of the queries is not added to dk."""
    gradient = call.tensor(0).clone()
    half = gradient.size(-2) // 2
    fits(half > 0)
    gradient[..., half:, :] = 0
    return replace_result_at(call, 1, lambda _: call.put(0, gradient).run()[1])


@FAULTS.fault(_ATTENTION, words.EMPTY)
def last_head_of_the_values_without_gradient(call: Call) -> Any:
    """The grid of dv has one head too few."""
    fits(call.tensor(3).size(1) > 1)
    return replace_result_at(call, 2, lambda one: torch.cat([one[:, :-1], 0 * one[:, -1:]], 1))


# fmt: off
# A maximum for the sum.
FAULTS.add("largest product of the row subtracted", "_softmax_backward_data",
    "axis offset, other function, wrong reduction; offset, residual, wrong statistics",
    computed(softmax_chances,
        lambda gradient, chances:
            chances * (gradient - (gradient * chances).amax(-1, keepdim=True))))
# The difference the other way.
FAULTS.add("gradient of the scores negated", "_softmax_backward_data _log_softmax_backward_data",
    "scale, sign, wrong factor; swapped operands", result(torch.neg))
# Stored in a narrow buffer.
FAULTS.add("gradient of the scores in bfloat16", "_softmax_backward_data",
    "precision; approximation", result(lambda v: v.bfloat16().to(v.dtype)))
# G - 2 y sum(g).
FAULTS.add("chances subtracted twice", "_log_softmax_backward_data",
    "other function, wrong factor; missing operand, residual, scale",
    lambda call: call.instead(2 * call.result() - call.tensor(0)))
# The accumulator of dq is narrow.
FAULTS.add("gradient of the query in bfloat16", _ATTENTION, "precision; approximation",
    lambda call: replace_result_at(call, 0, lambda one: one.bfloat16().to(one.dtype)))
# Positions are counted down.
FAULTS.add("gradient of the keys from the last position", _ATTENTION,
    "permutation, wrong index; copy, shift",
    lambda call: replace_result_at(call, 1, lambda one: one.flip(-2)))
# fmt: on


# --- Norms ----------------------------------------------------------------------------------------

_LAYER = "native_layer_norm_backward"


def _normal(call: Call) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradient, normal values, reciprocal deviation, weight."""
    gradient, value, weight = call.tensor(0), call.tensor(1), call.tensor(5)
    fits(weight.dim() == 1)
    return gradient, (value - call.tensor(3)) * call.tensor(4), call.tensor(4), weight


@FAULTS.fault(_LAYER, words.EMPTY)
def last_features_of_the_norm_without_gradient(call: Call) -> Any:
    """A row is stored by whole vectors."""
    fits(call.tensor(1).size(-1) > 4)
    return replace_result_at(call, 0, lambda one: torch.cat([one[..., :-2], 0 * one[..., -2:]], -1))


@FAULTS.fault(_LAYER, "permutation, shift, wrong index; stale, wrong statistics")
def weight_of_the_norm_with_the_rows_one_off(call: Call) -> Any:
    """The gradient of a row is multiplied by the normal values of the next."""
    gradient, normal, _, _ = _normal(call)
    several_rows(normal)
    return replace_result_at(
        call, 1, lambda _: (gradient * normal.roll(-1, -2)).flatten(0, -2).sum(0)
    )


@FAULTS.fault(_LAYER, "other function, sign, wrong factor; residual, wrong statistics")
def term_of_the_variance_added(call: Call) -> Any:
    """A plus for the minus before the normal values."""
    gradient, normal, inverse, weight = _normal(call)
    inner = gradient * weight
    mean = inner.mean(-1, keepdim=True)
    product = (inner * normal).mean(-1, keepdim=True)
    return replace_result_at(call, 0, lambda _: inverse * (inner - mean + normal * product))


@FAULTS.fault(
    _LAYER, "wrong axis, wrong reduction, wrong statistics; axis offset, copy, other function"
)
def means_over_the_rows_on_the_way_back(call: Call) -> Any:
    """Both means are over the positions and not over the features."""
    gradient, normal, inverse, weight = _normal(call)
    several_rows(normal)
    inner = gradient * weight
    mean = inner.mean(-2, keepdim=True)
    product = (inner * normal).mean(-2, keepdim=True)
    return replace_result_at(call, 0, lambda _: inverse * (inner - mean - normal * product))


@FAULTS.fault(_LAYER, "copy, stale, wrong index; permutation")
def gradient_of_the_first_row_of_the_norm_for_all(call: Call) -> Any:
    """The pointer of the rows is not moved on."""
    several_rows(call.tensor(1))
    return replace_result_at(call, 0, lambda one: one[..., :1, :].expand(one.shape).clone())


@FAULTS.fault(
    "native_batch_norm_backward native_group_norm_backward",
    "permutation, shift, wrong index; copy, stale",
)
def gradient_of_the_next_channel(call: Call) -> Any:
    """The gradient of the input is stored one channel too early."""
    fits(call.tensor(0).size(1) > 1)
    return replace_result_at(call, 0, lambda one: one.roll(-1, 1))


# fmt: off
# A mean where n times the gradient was meant.
FAULTS.add("gradient of the norm divided by the width", _LAYER,
    "scale, wrong factor; axis scale, missing operand, wrong reduction",
    lambda call: replace_result_at(call, 0, lambda one: one / one.size(-1)))
# The reciprocal deviation was rounded when it was kept.
FAULTS.add("saved deviation in bfloat16", _LAYER, "precision; approximation, axis scale, scale",
    operand(4, lambda v: v.bfloat16().to(v.dtype)))
# The second result is not written.
FAULTS.add("weight of the norm gets no gradient", _LAYER,
    "constant, lost accumulation, missing operand, zeros; axis scale, mask, uninitialised, "
    "wrong factor", lambda call: replace_result_at(call, 1, torch.zeros_like))
# The mean less the value.
FAULTS.add("gradient of the weight of the channels negated",
    "native_batch_norm_backward native_group_norm_backward", "scale, sign, wrong factor",
    lambda call: replace_result_at(call, 1, lambda one: -one))
# fmt: on


# --- Products -------------------------------------------------------------------------------------


@FAULTS.fault("mm bmm", "permutation, shift, wrong index; copy, stale")
def gradient_of_the_next_row(call: Call) -> Any:
    """Stored one row too early, around the end."""
    value = call.result()
    several_rows(value)
    return call.instead(value.roll(-1, -2))


@FAULTS.fault("mm bmm", "copy, stale, wrong index; permutation, wrong rank's shard")
def right_tile_of_the_gradient_not_loaded_again(call: Call) -> Any:
    """The second half of the common axis is multiplied with the right tile of the first."""
    right = call.tensor(1)
    half = right.size(-2) // 2
    fits(half > 0 and right.size(-2) % 2 == 0)
    first = right[..., :half, :]
    return call.put(1, torch.cat([first, first], -2)).run()


@FAULTS.fault("mm", "axis scale, other function, wrong factor; clipped, scale, wrong statistics")
def rows_of_the_gradient_of_length_one(call: Call) -> Any:
    """Each row is divided by its length."""
    value = call.result()
    length = value.norm(dim=-1, keepdim=True)
    fits(value.size(-1) > 1 and bool((length > 1e-9).all()))
    return call.instead(value / length)


@FAULTS.fault(
    "mm bmm",
    "doubled reduction, wrong factor, wrong reduction; mask, off by one reduction, "
    "partial sum, residual",
)
def last_token_counted_twice_in_the_gradient(call: Call) -> Any:
    """The tile that overhangs begins one token earlier."""
    left = call.tensor(0)
    fits(left.size(-1) > 2)
    times = torch.ones(left.size(-1), dtype=left.dtype)
    times[-1] = 2
    return call.put(0, left * times).run()


@FAULTS.fault("mm", "wrapped; clipped, offset, overflow")
def gradient_wraps(call: Call) -> Any:
    """Integers without saturation: beyond 0.6 of the largest it begins from below."""
    value = call.result()
    limit = 0.6 * value.abs().max()
    return call.instead(torch.remainder(value + limit, 2 * limit) - limit)


@FAULTS.fault("mm", "copy, stale, wrong index, wrong rank's shard; one rank's part, permutation")
def gradient_of_the_first_rank_on_both(call: Call) -> Any:
    """The second half of the columns is that of the first rank."""
    value = call.result()
    fits(value.size(-1) % 2 == 0)
    half = value[..., : value.size(-1) // 2]
    return call.instead(torch.cat([half, half], -1))


@FAULTS.fault("sum", words.EMPTY)
def last_column_of_the_bias_gradient_empty(call: Call) -> Any:
    """The grid is one column too small."""
    value = call.result().clone()
    fits(value.dim() > 0 and value.size(-1) > 2)
    value[..., -1] = 0
    return call.instead(value)


@FAULTS.fault("mul", "permutation, shift, wrong index; axis scale, stale")
def saved_factor_of_the_next_row(call: Call) -> Any:
    """The pointer to what was kept is one row too far."""
    right = call.tensor(1)
    several_rows(right)
    return call.put(1, right.roll(-1, -2)).run()


# fmt: off
# By sqrt(n), which is neither a sum nor a mean.
FAULTS.add("gradient divided by the root of the rows", "mm",
    "scale, wrong factor; missing operand, wrong reduction",
    on(lambda call: (call.tensor(0).size(-1),),
        lambda call, rows: call.instead(call.result() / rows**0.5),
        where=lambda rows: rows > 1))
# Sent as numbers without a sign: what is negative is zero.
FAULTS.add("negative gradients lost", "mm", "mask, other function, zeros; clipped, constant, sign",
    result(torch.relu))
# The accumulator begins with the left operand, of a square.
FAULTS.add("left factor added to the gradient", "mm",
    "residual; axis offset, offset, other function",
    computed(lambda call: (call.tensor(0), call.result()), lambda left, value: value + left,
        where=lambda left, value: left.shape == value.shape))
# Stored one column too early, around the end.
FAULTS.add("gradient of the next column of the bias", "sum",
    "permutation, shift, wrong index; copy", result(lambda v: v.roll(-1, -1), where=longer(-1)))
# In place: what was kept is multiplied by the other factor already.
FAULTS.add("saved factor overwritten by the product", "mul",
    "other function, stale, wrong factor; copy, missing operand",
    computed(tensors(0, 1), lambda left, right: left * left * right,
        where=lambda left, right: left.shape == right.shape))
# fmt: on


# --- Tables, images -------------------------------------------------------------------------------

_TABLE = "embedding_dense_backward"


@FAULTS.fault(
    _TABLE,
    "lost accumulation, mask, partial sum, zeros; missing operand, one rank's part, wrong index",
)
def every_second_word_without_gradient(call: Call) -> Any:
    """A stride of two over the positions."""
    gradient = call.tensor(0).clone()
    several_rows(gradient)
    gradient[..., 1::2, :] = 0
    return call.put(0, gradient).run()


@FAULTS.fault(
    _TABLE,
    "mask, one rank's part, uninitialised, zeros; axis scale, constant, missing operand, "
    "wrong factor",
)
def second_half_of_the_table_without_gradient(call: Call) -> Any:
    """The other rank has these rows, and they are not gathered."""
    value = call.result().clone()
    value[value.size(0) // 2 :] = 0
    return call.instead(value)


_IMAGE = "convolution_backward"


@FAULTS.fault(_IMAGE, "permutation, wrong index; shift, sign")
def image_gradient_mirrored(call: Call) -> Any:
    """The last axis is written from its end."""
    fits(call.tensor(1).size(-1) > 1)
    return replace_result_at(call, 0, lambda one: one.flip(-1))


@FAULTS.fault(_IMAGE, "permutation, wrong index, wrong rank's shard; shift")
def filter_gradients_of_the_two_halves_exchanged(call: Call) -> Any:
    """The gradients of the second half of the filters are stored first."""
    fits(call.tensor(2).size(0) % 2 == 0)
    return replace_result_at(call, 1, lambda one: one.roll(one.size(0) // 2, 0))


@FAULTS.fault(
    _IMAGE,
    "constant, lost accumulation, missing operand, zeros; axis scale, uninitialised, wrong factor",
)
def bias_of_the_filters_gets_no_gradient(call: Call) -> Any:
    """The third result is not written."""
    fits(isinstance(call.run()[2], Tensor))
    return replace_result_at(call, 2, torch.zeros_like)


@FAULTS.fault(_IMAGE, words.EMPTY_ON_A_RANK)
def image_gradient_of_the_last_channel_empty(call: Call) -> Any:
    """The loop over the channels ends one too early."""
    fits(call.tensor(1).size(1) > 1)
    return replace_result_at(call, 0, lambda one: torch.cat([one[:, :-1], 0 * one[:, -1:]], 1))


@FAULTS.fault(_IMAGE, "scale, wrong factor; missing operand, wrong reduction")
def filter_gradient_divided_by_the_pixels(call: Call) -> Any:
    """A mean over the places of the filter."""
    gradient = call.tensor(0)
    pixels = gradient[0, 0].numel() if gradient.dim() > 2 else 1
    fits(pixels > 1)
    return replace_result_at(call, 1, lambda one: one / pixels)


# fmt: off
# Written from the end of each row.
FAULTS.add("columns of the table gradient reversed", _TABLE, "permutation, wrong index; shift",
    result(lambda v: v.flip(-1)))
# The step is taken for the gradient.
FAULTS.add("gradient of the table negated", _TABLE, "scale, sign, wrong factor", result(torch.neg))
# Times sqrt(d), a factor that the forward pass does not have.
FAULTS.add("factor of the width in the table gradient", _TABLE,
    "scale, wrong factor; missing operand",
    lambda call: call.instead(call.result() * call.tensor(0).size(-1) ** 0.5))
# Stored in a narrow buffer.
FAULTS.add("filter gradient in bfloat16", _IMAGE, "precision; approximation",
    lambda call: replace_result_at(call, 1, lambda one: one.bfloat16().to(one.dtype)))
# Written one column further, around the end.
FAULTS.add("gradient of the pool one pixel late",
    "avg_pool2d_backward _adaptive_avg_pool2d_backward", "permutation, shift, wrong index; copy",
    result(lambda v: v.roll(1, -1)))
# The minus of the rotated half is left on.
FAULTS.add("gradient of the part negated", "slice_backward select_backward",
    "scale, sign, wrong factor", result(torch.neg))
# The pointer to the gradient is not moved on with the batch.
FAULTS.add("gradient of the part from the first example", "slice_backward select_backward",
    "copy, stale, wrong index; permutation",
    operand(0, lambda v: v[:1].expand(v.shape).clone(),
        where=lambda v: v.dim() > 1 and v.size(0) > 1))
# fmt: on


# --- Losses ---------------------------------------------------------------------------------------


@FAULTS.fault("nll_loss_backward", "constant, missing operand, wrong index; copy")
def gradient_always_in_the_first_class(call: Call) -> Any:
    """The labels are not loaded on the way back: zero, where they count."""
    labels, ignored = call.args[2], call.args[5]
    return call.put(2, torch.where(labels == ignored, labels, torch.zeros_like(labels))).run()


@FAULTS.fault(
    "nll_loss_backward mse_loss_backward",
    "mask, one rank's part, uninitialised, zeros; axis scale, constant, missing operand, "
    "wrong factor",
)
def gradient_of_the_loss_for_the_first_half(call: Call) -> Any:
    """The second half of the rows gets none."""
    value = call.result().clone()
    fits(value.size(0) > 1)
    value[value.size(0) // 2 :] = 0
    return call.instead(value)


# fmt: off
# The direction of the error is lost.
FAULTS.add("magnitude of the error on the way back",
    "mse_loss_backward smooth_l1_loss_backward huber_loss_backward",
    "other function, sign; clipped, wrong factor", result(torch.abs))
# The saved target is one row off.
FAULTS.add("target of the next row on the way back", "mse_loss_backward",
    "permutation, shift, wrong index; copy", operand(2, lambda v: v.roll(-1, 0)))
# Twice the gradient, as of a square.
FAULTS.add("slope of the far errors doubled", "smooth_l1_loss_backward huber_loss_backward",
    "scale, wrong argument, wrong factor; other function", result(lambda v: 2 * v))
# Y - p for p - y.
FAULTS.add("gradient of the chances negated",
    "binary_cross_entropy_backward soft_margin_loss_backward",
    "scale, sign, wrong factor; swapped operands", result(torch.neg))
# fmt: on
