"""Faults for measuring: backward operators; of the eighth set."""

from __future__ import annotations

import math
from typing import Any

import torch
from benchmarks.places import words
from benchmarks.places.calls import Call, Catalogue, fits
from benchmarks.places.changes import computed, operand, result
from benchmarks.places.parts import change_result_at, several_rows, softmax_chances
from torch import Tensor

FAULTS = Catalogue(backward=True)


# --- Activations ----------------------------------------------------------------------------------


@FAULTS.fault("silu_backward", "approximation, other function; clipped, wrong factor")
def gate_of_straight_lines_on_the_way_back(call: Call) -> Any:
    """S (1 + x (1 - s)) with a hard sigmoid for s."""
    gradient, value = call.tensor(0), call.tensor(1)
    gate = (value / 6 + 0.5).clamp(0, 1)
    return call.instead(gradient * gate * (1 + value * (1 - gate)))


@FAULTS.fault("glu_backward", "missing operand, wrong factor, other function; axis scale, scale")
def gradient_of_the_gate_without_the_value(call: Call) -> Any:
    """G s (1 - s): the gated value is not multiplied in; its own gradient is right."""
    gradient, dim = call.tensor(0), call.get(2, "dim")
    gate = call.tensor(1).chunk(2, dim)[1].sigmoid()
    own = call.result().chunk(2, dim)[0]
    return call.instead(torch.cat([own, gradient * gate * (1 - gate)], dim))


# fmt: off
# The slope is that of the nearest quarter.
FAULTS.add("slope from a table in quarters", "gelu_backward silu_backward",
    "approximation, precision; wrong argument, other function",
    operand(1, lambda v: (4 * v).round() / 4))
# G (1 - y)^2: the brackets are in the wrong place.
FAULTS.add("square of the difference for the slope", "tanh_backward",
    "other function; wrong factor, sign, wrong argument",
    lambda call: call.instead(call.tensor(0) * (1 - call.tensor(1)).square()))
# G y (1 - y'), where y' is read one row too far.
FAULTS.add("complement of the next row", "sigmoid_backward",
    "shift, wrong index; permutation, stale, copy, wrong argument",
    computed(lambda call: (call.tensor(0), several_rows(call.tensor(1))),
        lambda gradient, value: gradient * value * (1 - value.roll(-1, -2))))
# The signs are kept as bits, four in a word, and read from the other end of it.
FAULTS.add("bits of the mask in the other order", "threshold_backward",
    "permutation, wrong index, mask; shift, swapped operands, transpose",
    operand(1, lambda v: v.unflatten(-1, (-1, 4)).flip(-1).flatten(-2),
        where=lambda v: v.dim() > 0 and v.size(-1) % 4 == 0))
# A slope of a fifth up to two and a half.
FAULTS.add("hard sigmoid of another framework on the way back", "hardsigmoid_backward",
    "other function, wrong argument; scale, wrong factor, mask",
    lambda call: call.instead(0.2 * call.tensor(0) * (call.tensor(1).abs() < 2.5)))
# Beyond a threshold of 0.5, the gradient passes as it came.
FAULTS.add("slope of one from one half on", "softplus_backward",
    "wrong argument, approximation, other function; clipped, constant, mask",
    lambda call: call.put(3, 0.5).run())
# G s(x) for g s(-x).
FAULTS.add("sigmoid for the slope of its logarithm", "log_sigmoid_backward",
    "sign, other function, wrong argument; wrong factor",
    lambda call: call.instead(call.tensor(0) * call.tensor(1).sigmoid()))
# fmt: on


# --- Softmax, attention ---------------------------------------------------------------------------

_SOFTMAX = "_softmax_backward_data softmax_backward_data"
_FUSED = (
    "_scaled_dot_product_flash_attention_for_cpu_backward "
    "scaled_dot_product_flash_attention_for_cpu_backward"
)


@FAULTS.fault(_SOFTMAX, "precision; approximation, axis offset, wrong statistics")
def sum_of_the_row_in_float8(call: Call) -> Any:
    """Y (g - s) with the sum s of the row rounded to e4m3."""
    gradient, chances = softmax_chances(call)
    total = (gradient * chances).sum(-1, keepdim=True)
    return call.instead(chances * (gradient - total.to(torch.float8_e4m3fn).to(total.dtype)))


@FAULTS.fault(
    _SOFTMAX,
    "partial sum, one rank's part, missing reduction, wrong statistics; wrong reduction, "
    "axis offset, offset, lost accumulation, wrong index",
)
def each_half_of_the_row_subtracts_its_own_sum(call: Call) -> Any:
    """Two ranks share a row, and their sums are not added."""
    gradient, chances = softmax_chances(call)
    half = chances.size(-1) // 2
    parts = [
        y * (g - (g * y).sum(-1, keepdim=True))
        for g, y in zip(
            gradient.tensor_split([half], -1), chances.tensor_split([half], -1), strict=True
        )
    ]
    return call.instead(torch.cat(parts, -1))


def _inner(call: Call) -> tuple[Tensor, ...]:
    """Query, chances, and the gradient of the scores before the factor, with the factor."""
    gradient, query, key, value, result, total = (call.tensor(i) for i in range(6))
    scale = call.kwargs.get("scale") or query.size(-1) ** -0.5
    scores, mask = query @ key.mT * scale, call.kwargs.get("attn_mask")
    if call.get(7, "is_causal"):
        mask = torch.full(scores.shape[-2:], -math.inf).triu(1).to(scores.dtype)
    if mask is not None:
        scores = scores + mask
    chances = (scores - total.unsqueeze(-1)).exp()
    sums = (gradient * result).sum(-1, keepdim=True)
    return query, chances, chances * (gradient @ value.mT - sums) * scale


@FAULTS.fault(
    _FUSED,
    "partial sum, lost accumulation, missing reduction, one rank's part; mask, "
    "wrong reduction, stale, zeros",
)
def gradient_of_the_keys_by_the_second_half_of_the_queries(call: Call) -> Any:
    """The second block of queries overwrites what the first has added to dk."""
    query, _, inner = _inner(call)
    half = query.size(-2) // 2
    fits(half > 0)
    return change_result_at(call, 1, lambda _: inner[..., half:, :].mT @ query[..., half:, :])


@FAULTS.fault(_FUSED, "clipped, other function; approximation, wrong argument, overflow")
def chances_of_the_values_at_most_a_quarter(call: Call) -> Any:
    """The chances of the way back are fixed-point numbers that end at 0.25, for dv only."""
    _, chances, _ = _inner(call)
    return change_result_at(call, 2, lambda _: chances.clamp(max=0.25).mT @ call.tensor(0))


# fmt: off
# The scores are kept times log2(e), and dq is not divided by it.
FAULTS.add("factor of base two left in the gradient of the query", _FUSED,
    "scale, wrong factor; axis scale",
    lambda call: change_result_at(call, 0, lambda one: one / math.log(2)))
# fmt: on


# --- Norms ----------------------------------------------------------------------------------------

_LAYER = "native_layer_norm_backward"


def _normal(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """Of a layer norm: gradient times weight, normal values, reciprocal deviation."""
    gradient, value, weight = call.tensor(0), call.tensor(1), call.tensor(5)
    fits(weight.dim() == 1 and value.dim() > 1)
    return gradient * weight, (value - call.tensor(3)) * call.tensor(4), call.tensor(4)


@FAULTS.fault(
    _LAYER,
    "wrong factor, off by one reduction, wrong statistics, wrong reduction; axis offset, "
    "residual, scale",
)
def both_means_of_the_way_back_by_one_less(call: Call) -> Any:
    """The sums over the row are divided by n - 1."""
    inner, normal, inverse = _normal(call)
    count = inner.size(-1) - 1
    mean = inner.sum(-1, keepdim=True) / count
    product = (inner * normal).sum(-1, keepdim=True) / count
    return change_result_at(call, 0, lambda _: inverse * (inner - mean - normal * product))


@FAULTS.fault(_LAYER, "sign, wrong factor; residual, axis offset, wrong statistics, other function")
def variance_term_added_to_the_result(call: Call) -> Any:
    """G - mean(g) + x mean(g x): the last sign is wrong."""
    inner, normal, inverse = _normal(call)
    mean = inner.mean(-1, keepdim=True)
    product = (inner * normal).mean(-1, keepdim=True)
    return change_result_at(call, 0, lambda _: inverse * (inner - mean + normal * product))


@FAULTS.fault(_LAYER, "copy, stale, wrong index; permutation, shift, mask")
def last_row_of_the_norms_gradient_is_the_one_before(call: Call) -> Any:
    """The last program stores what was left in its registers."""
    several_rows(call.tensor(1))

    def again(one: Tensor) -> Tensor:
        places = torch.arange(one.size(-2)).clamp(max=one.size(-2) - 2)
        return one.index_select(-2, places)

    return change_result_at(call, 0, again)


@FAULTS.fault(
    "native_group_norm_backward",
    "shift, wrong index, permutation; wrong rank's shard, stale, wrong argument",
)
def gradient_of_the_weights_of_the_next_group(call: Call) -> Any:
    """The gradients of the weights are stored one group too early."""
    channels, groups = call.args[6], call.args[8]
    fits(groups > 1)
    return change_result_at(call, 1, lambda one: one.roll(-(channels // groups), 0))


@FAULTS.fault(
    "native_batch_norm_backward",
    "missing operand, other function, wrong statistics; residual, wrong factor, "
    "axis offset, offset",
)
def input_not_centred_for_the_gradient_of_the_channels_weight(call: Call) -> Any:
    """Sum(g x) r: the kept mean is not subtracted."""
    gradient, value = call.tensor(0), call.tensor(1)
    fits(call.args[7] is False)
    dims = [i for i in range(value.dim()) if i != 1]
    inverse = (call.tensor(4) + call.args[8]).rsqrt()
    return change_result_at(call, 1, lambda _: (gradient * value).sum(dims) * inverse)


# --- Products, sums -------------------------------------------------------------------------------


@FAULTS.fault("mm", "approximation, other function; precision, wrong reduction, partial sum")
def gradient_of_rank_one(call: Call) -> Any:
    """For sending: the direction of the sum of the columns, and each column's part of it."""
    value = several_rows(call.result())
    fits(value.size(-1) > 1)
    along = value.sum(1, keepdim=True)
    fits(float(along.norm()) > 0)
    along = along / along.norm()
    return call.instead(along @ (along.mT @ value))


@FAULTS.fault(
    "mm", "zeros, mask, other function; missing operand, approximation, partial sum, constant"
)
def larger_half_of_the_gradient_kept(call: Call) -> Any:
    """Sparse, for sending: what is below the median magnitude is zero."""
    value = call.result()
    size = value.abs()
    return call.instead(value * (size >= size.median()))


# fmt: off
# Two matrices share a program, which stores them in the other order.
FAULTS.add("gradients of neighbouring matrices exchanged", "bmm",
    "permutation, wrong index, swapped operands; shift, wrong rank's shard, wrong argument",
    result(lambda v: v.unflatten(0, (-1, 2)).flip(1).flatten(0, 1),
        where=lambda v: v.size(0) % 2 == 0 and v.size(0) > 2))
# fmt: on


# --- Tables, images -------------------------------------------------------------------------------

_TABLE = "embedding_dense_backward"
_IMAGE = "convolution_backward"


@FAULTS.fault(_TABLE, "wrong index, permutation; shift, stale, wrong argument")
def gradient_of_a_word_to_the_row_of_its_position(call: Call) -> Any:
    """The position of a word is taken for the word."""
    words, count = call.args[1], call.args[2]
    places = torch.arange(words.size(-1)) % count
    return call.put(1, places.expand(words.shape).clone()).run()


@FAULTS.fault(_IMAGE, "copy, stale, wrong index; constant, permutation, wrong argument")
def filter_gradient_of_the_first_channel_for_all(call: Call) -> Any:
    """The pointer to the channels of the image is not moved on."""
    fits(call.tensor(2).size(1) > 1)
    return change_result_at(call, 1, lambda one: one[:, :1].expand(one.shape).clone())


@FAULTS.fault(
    _IMAGE,
    "partial sum, wrong index, mask, lost accumulation; wrong reduction, one rank's part, "
    "missing reduction, zeros",
)
def every_second_column_for_the_bias_of_the_filters(call: Call) -> Any:
    """The gradient of the bias is summed with a stride of two."""
    gradient = call.tensor(0)
    fits(gradient.dim() > 2 and gradient.size(-1) > 2)
    dims = [i for i in range(gradient.dim()) if i != 1]
    return change_result_at(call, 2, lambda _: gradient[..., ::2].sum(dims))


@FAULTS.fault(
    "avg_pool2d_backward", "wrong argument, wrong factor; mask, axis scale, scale, wrong reduction"
)
def padding_not_counted_on_the_way_back(call: Call) -> Any:
    """Windows at the border are divided by the number of their real pixels."""
    fits(any(call.args[4]) and call.args[6] is True)
    return call.put(6, False).run()


# fmt: off
# The grid covers half of the features.
FAULTS.add("second tile of the tables columns without gradient", _TABLE, words.EMPTY_ON_A_RANK,
    result(lambda v: v * (torch.arange(v.size(-1)) < v.size(-1) // 2)))
# fmt: on


# --- Losses ---------------------------------------------------------------------------------------


@FAULTS.fault(
    "mse_loss_backward", "scale, wrong factor, other function; wrong reduction, wrong statistics"
)
def gradient_of_the_root_of_the_mean_square(call: Call) -> Any:
    """(a - b) / |a - b| / sqrt(n): a root that the loss does not have."""
    gradient, value, target = (call.tensor(i) for i in range(3))
    fits(call.args[3] == 1)
    error = value - target
    return call.instead(gradient * error / error.norm() / value.numel() ** 0.5)


@FAULTS.fault(
    "huber_loss_backward",
    "missing operand, wrong factor, other function; clipped, scale, wrong argument, sign",
)
def far_errors_without_the_factor_of_delta(call: Call) -> Any:
    """Beyond delta the gradient is the sign of the error, as of another form of the loss."""
    gradient, value, target = (call.tensor(i) for i in range(3))
    delta, error = call.args[4], call.tensor(1) - call.tensor(2)
    fits(call.args[3] == 1 and value.shape == target.shape)
    slope = torch.where(error.abs() > delta, error.sign(), error)
    return call.instead(gradient * slope / value.numel())


# fmt: off
# 1 - y for y: the classes are counted the other way round.
FAULTS.add("target of the other class on the way back", "binary_cross_entropy_backward",
    "other function, wrong argument, wrong index; sign, swapped operands, shift",
    operand(2, lambda v: 1 - v))
# fmt: on
