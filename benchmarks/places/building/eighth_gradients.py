"""Faults for measuring: backward operators; of the eighth set."""

from __future__ import annotations

import math
from typing import Any

import torch
from benchmarks.places.calls import Call, Catalogue, fits
from torch import Tensor

FAULTS = Catalogue()


def _like(kept: Tensor, value: Tensor) -> Tensor:
    """The value in the layout of another: later views depend on it."""
    fits(value.shape == kept.shape)
    if value.stride() == kept.stride() or 0 in kept.stride():
        return value
    return torch.empty_strided(kept.shape, kept.stride(), dtype=kept.dtype).copy_(value)


def _at(call: Call, place: int, change: Any) -> Any:
    """All results, one of them changed."""
    results = list(call.run())
    fits(isinstance(results[place], Tensor))
    results[place] = _like(results[place], change(results[place]))
    return tuple(results)


def _rows(value: Tensor) -> Tensor:
    """The value, if it has several rows."""
    fits(value.dim() > 1 and value.size(-2) > 1)
    return value


# --- Activations ----------------------------------------------------------------------------------


@FAULTS.fault(
    "gelu_backward silu_backward",
    kinds=["approximation", "precision"],
    loose=["wrong argument", "other function"],
    backward=True,
)
def slope_from_a_table_in_quarters(call: Call) -> Any:
    """The slope is that of the nearest quarter."""
    return call.put(1, (4 * call.tensor(1)).round() / 4).run()


@FAULTS.fault(
    "silu_backward",
    kinds=["approximation", "other function"],
    loose=["clipped", "wrong factor"],
    backward=True,
)
def gate_of_straight_lines_on_the_way_back(call: Call) -> Any:
    """S (1 + x (1 - s)) with a hard sigmoid for s."""
    gradient, value = call.tensor(0), call.tensor(1)
    gate = (value / 6 + 0.5).clamp(0, 1)
    return call.instead(gradient * gate * (1 + value * (1 - gate)))


@FAULTS.fault(
    "tanh_backward",
    kinds=["other function"],
    loose=["wrong factor", "sign", "wrong argument"],
    backward=True,
)
def square_of_the_difference_for_the_slope(call: Call) -> Any:
    """G (1 - y)^2: the brackets are in the wrong place."""
    return call.instead(call.tensor(0) * (1 - call.tensor(1)).square())


@FAULTS.fault(
    "sigmoid_backward",
    kinds=["shift", "wrong index"],
    loose=["permutation", "stale", "copy", "wrong argument"],
    backward=True,
)
def complement_of_the_next_row(call: Call) -> Any:
    """G y (1 - y'), where y' is read one row too far."""
    gradient, value = call.tensor(0), _rows(call.tensor(1))
    return call.instead(gradient * value * (1 - value.roll(-1, -2)))


@FAULTS.fault(
    "threshold_backward",
    kinds=["permutation", "wrong index", "mask"],
    loose=["shift", "swapped operands", "transpose"],
    backward=True,
)
def bits_of_the_mask_in_the_other_order(call: Call) -> Any:
    """The signs are kept as bits, four in a word, and read from the other end of it."""
    value = call.tensor(1)
    fits(value.dim() > 0 and value.size(-1) % 4 == 0)
    return call.put(1, value.unflatten(-1, (-1, 4)).flip(-1).flatten(-2)).run()


@FAULTS.fault(
    "glu_backward",
    kinds=["missing operand", "wrong factor", "other function"],
    loose=["axis scale", "scale"],
    backward=True,
)
def gradient_of_the_gate_without_the_value(call: Call) -> Any:
    """G s (1 - s): the gated value is not multiplied in; its own gradient is right."""
    gradient, dim = call.tensor(0), call.get(2, "dim")
    gate = call.tensor(1).chunk(2, dim)[1].sigmoid()
    own = call.result().chunk(2, dim)[0]
    return call.instead(torch.cat([own, gradient * gate * (1 - gate)], dim))


@FAULTS.fault(
    "hardsigmoid_backward",
    kinds=["other function", "wrong argument"],
    loose=["scale", "wrong factor", "mask"],
    backward=True,
)
def hard_sigmoid_of_another_framework_on_the_way_back(call: Call) -> Any:
    """A slope of a fifth up to two and a half."""
    gradient, value = call.tensor(0), call.tensor(1)
    return call.instead(0.2 * gradient * (value.abs() < 2.5))


@FAULTS.fault(
    "softplus_backward",
    kinds=["wrong argument", "approximation", "other function"],
    loose=["clipped", "constant", "mask"],
    backward=True,
)
def slope_of_one_from_one_half_on(call: Call) -> Any:
    """Beyond a threshold of 0.5, the gradient passes as it came."""
    return call.put(3, 0.5).run()


@FAULTS.fault(
    "log_sigmoid_backward",
    kinds=["sign", "other function", "wrong argument"],
    loose=["wrong factor"],
    backward=True,
)
def sigmoid_for_the_slope_of_its_logarithm(call: Call) -> Any:
    """G s(x) for g s(-x)."""
    return call.instead(call.tensor(0) * call.tensor(1).sigmoid())


# --- Softmax, attention ---------------------------------------------------------------------------

_SOFTMAX = "_softmax_backward_data softmax_backward_data"
_FUSED = (
    "_scaled_dot_product_flash_attention_for_cpu_backward "
    "scaled_dot_product_flash_attention_for_cpu_backward"
)


def _chances(call: Call) -> tuple[Tensor, Tensor]:
    gradient, chances = call.tensor(0), call.tensor(1)
    fits(chances.dim() > 1 and call.args[2] in {-1, chances.dim() - 1} and chances.size(-1) > 2)
    return gradient, chances


@FAULTS.fault(
    _SOFTMAX,
    kinds=["precision"],
    loose=["approximation", "axis offset", "wrong statistics"],
    backward=True,
)
def sum_of_the_row_in_float8(call: Call) -> Any:
    """Y (g - s) with the sum s of the row rounded to e4m3."""
    gradient, chances = _chances(call)
    total = (gradient * chances).sum(-1, keepdim=True)
    return call.instead(chances * (gradient - total.to(torch.float8_e4m3fn).to(total.dtype)))


@FAULTS.fault(
    _SOFTMAX,
    kinds=["partial sum", "one rank's part", "missing reduction", "wrong statistics"],
    loose=["wrong reduction", "axis offset", "offset", "lost accumulation", "wrong index"],
    backward=True,
)
def each_half_of_the_row_subtracts_its_own_sum(call: Call) -> Any:
    """Two ranks share a row, and their sums are not added."""
    gradient, chances = _chances(call)
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
    kinds=["scale", "wrong factor"],
    loose=["axis scale"],
    backward=True,
)
def factor_of_base_two_left_in_the_gradient_of_the_query(call: Call) -> Any:
    """The scores are kept times log2(e), and dq is not divided by it."""
    return _at(call, 0, lambda one: one / math.log(2))


@FAULTS.fault(
    _FUSED,
    kinds=["partial sum", "lost accumulation", "missing reduction", "one rank's part"],
    loose=["mask", "wrong reduction", "stale", "zeros"],
    backward=True,
)
def gradient_of_the_keys_by_the_second_half_of_the_queries(call: Call) -> Any:
    """The second block of queries overwrites what the first has added to dk."""
    query, _, inner = _inner(call)
    half = query.size(-2) // 2
    fits(half > 0)
    return _at(call, 1, lambda _: inner[..., half:, :].mT @ query[..., half:, :])


@FAULTS.fault(
    _FUSED,
    kinds=["clipped", "other function"],
    loose=["approximation", "wrong argument", "overflow"],
    backward=True,
)
def chances_of_the_values_at_most_a_quarter(call: Call) -> Any:
    """The chances of the way back are fixed-point numbers that end at 0.25, for dv only."""
    _, chances, _ = _inner(call)
    return _at(call, 2, lambda _: chances.clamp(max=0.25).mT @ call.tensor(0))


# --- Norms ----------------------------------------------------------------------------------------

_LAYER = "native_layer_norm_backward"


def _normal(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """Of a layer norm: gradient times weight, normal values, reciprocal deviation."""
    gradient, value, weight = call.tensor(0), call.tensor(1), call.tensor(5)
    fits(weight.dim() == 1 and value.dim() > 1)
    return gradient * weight, (value - call.tensor(3)) * call.tensor(4), call.tensor(4)


@FAULTS.fault(
    _LAYER,
    kinds=["wrong factor", "off by one reduction", "wrong statistics", "wrong reduction"],
    loose=["axis offset", "residual", "scale"],
    backward=True,
)
def both_means_of_the_way_back_by_one_less(call: Call) -> Any:
    """The sums over the row are divided by n - 1."""
    inner, normal, inverse = _normal(call)
    count = inner.size(-1) - 1
    mean = inner.sum(-1, keepdim=True) / count
    product = (inner * normal).sum(-1, keepdim=True) / count
    return _at(call, 0, lambda _: inverse * (inner - mean - normal * product))


@FAULTS.fault(
    _LAYER,
    kinds=["sign", "wrong factor"],
    loose=["residual", "axis offset", "wrong statistics", "other function"],
    backward=True,
)
def variance_term_added_to_the_result(call: Call) -> Any:
    """G - mean(g) + x mean(g x): the last sign is wrong."""
    inner, normal, inverse = _normal(call)
    mean = inner.mean(-1, keepdim=True)
    product = (inner * normal).mean(-1, keepdim=True)
    return _at(call, 0, lambda _: inverse * (inner - mean + normal * product))


@FAULTS.fault(
    _LAYER,
    kinds=["copy", "stale", "wrong index"],
    loose=["permutation", "shift", "mask"],
    backward=True,
)
def last_row_of_the_norms_gradient_is_the_one_before(call: Call) -> Any:
    """The last program stores what was left in its registers."""
    _rows(call.tensor(1))

    def again(one: Tensor) -> Tensor:
        places = torch.arange(one.size(-2)).clamp(max=one.size(-2) - 2)
        return one.index_select(-2, places)

    return _at(call, 0, again)


@FAULTS.fault(
    "native_group_norm_backward",
    kinds=["shift", "wrong index", "permutation"],
    loose=["wrong rank's shard", "stale", "wrong argument"],
    backward=True,
)
def gradient_of_the_weights_of_the_next_group(call: Call) -> Any:
    """The gradients of the weights are stored one group too early."""
    channels, groups = call.args[6], call.args[8]
    fits(groups > 1)
    return _at(call, 1, lambda one: one.roll(-(channels // groups), 0))


@FAULTS.fault(
    "native_batch_norm_backward",
    kinds=["missing operand", "other function", "wrong statistics"],
    loose=["residual", "wrong factor", "axis offset", "offset"],
    backward=True,
)
def input_not_centred_for_the_gradient_of_the_channels_weight(call: Call) -> Any:
    """Sum(g x) r: the kept mean is not subtracted."""
    gradient, value = call.tensor(0), call.tensor(1)
    fits(call.args[7] is False)
    dims = [i for i in range(value.dim()) if i != 1]
    inverse = (call.tensor(4) + call.args[8]).rsqrt()
    return _at(call, 1, lambda _: (gradient * value).sum(dims) * inverse)


# --- Products, sums -------------------------------------------------------------------------------


@FAULTS.fault(
    "mm",
    kinds=["approximation", "other function"],
    loose=["precision", "wrong reduction", "partial sum"],
    backward=True,
)
def gradient_of_rank_one(call: Call) -> Any:
    """For sending: the direction of the sum of the columns, and each column's part of it."""
    value = _rows(call.result())
    fits(value.size(-1) > 1)
    along = value.sum(1, keepdim=True)
    fits(float(along.norm()) > 0)
    along = along / along.norm()
    return call.instead(along @ (along.mT @ value))


@FAULTS.fault(
    "mm",
    kinds=["zeros", "mask", "other function"],
    loose=["missing operand", "approximation", "partial sum", "constant"],
    backward=True,
)
def larger_half_of_the_gradient_kept(call: Call) -> Any:
    """Sparse, for sending: what is below the median magnitude is zero."""
    value = call.result()
    size = value.abs()
    return call.instead(value * (size >= size.median()))


@FAULTS.fault(
    "bmm",
    kinds=["permutation", "wrong index", "swapped operands"],
    loose=["shift", "wrong rank's shard", "wrong argument"],
    backward=True,
)
def gradients_of_neighbouring_matrices_exchanged(call: Call) -> Any:
    """Two matrices share a program, which stores them in the other order."""
    value = call.result()
    fits(value.size(0) % 2 == 0 and value.size(0) > 2)
    return call.instead(value.unflatten(0, (-1, 2)).flip(1).flatten(0, 1))


# --- Tables, images -------------------------------------------------------------------------------

_TABLE = "embedding_dense_backward"
_IMAGE = "convolution_backward"


@FAULTS.fault(
    _TABLE,
    kinds=["wrong index", "permutation"],
    loose=["shift", "stale", "wrong argument"],
    backward=True,
)
def gradient_of_a_word_to_the_row_of_its_position(call: Call) -> Any:
    """The position of a word is taken for the word."""
    words, count = call.args[1], call.args[2]
    places = torch.arange(words.size(-1)) % count
    return call.put(1, places.expand(words.shape).clone()).run()


@FAULTS.fault(
    _TABLE,
    kinds=["zeros", "mask", "uninitialised"],
    loose=["constant", "missing operand", "wrong factor", "axis scale", "one rank's part"],
    backward=True,
)
def second_tile_of_the_tables_columns_without_gradient(call: Call) -> Any:
    """The grid covers half of the features."""
    value = call.result()
    kept = torch.arange(value.size(-1)) < value.size(-1) // 2
    return call.instead(value * kept)


@FAULTS.fault(
    _IMAGE,
    kinds=["copy", "stale", "wrong index"],
    loose=["constant", "permutation", "wrong argument"],
    backward=True,
)
def filter_gradient_of_the_first_channel_for_all(call: Call) -> Any:
    """The pointer to the channels of the image is not moved on."""
    fits(call.tensor(2).size(1) > 1)
    return _at(call, 1, lambda one: one[:, :1].expand(one.shape).clone())


@FAULTS.fault(
    _IMAGE,
    kinds=["partial sum", "wrong index", "mask", "lost accumulation"],
    loose=["wrong reduction", "one rank's part", "missing reduction", "zeros"],
    backward=True,
)
def every_second_column_for_the_bias_of_the_filters(call: Call) -> Any:
    """The gradient of the bias is summed with a stride of two."""
    gradient = call.tensor(0)
    fits(gradient.dim() > 2 and gradient.size(-1) > 2)
    dims = [i for i in range(gradient.dim()) if i != 1]
    return _at(call, 2, lambda _: gradient[..., ::2].sum(dims))


@FAULTS.fault(
    "avg_pool2d_backward",
    kinds=["wrong argument", "wrong factor"],
    loose=["mask", "axis scale", "scale", "wrong reduction"],
    backward=True,
)
def padding_not_counted_on_the_way_back(call: Call) -> Any:
    """Windows at the border are divided by the number of their real pixels."""
    fits(any(call.args[4]) and call.args[6] is True)
    return call.put(6, False).run()


# --- Losses ---------------------------------------------------------------------------------------


@FAULTS.fault(
    "mse_loss_backward",
    kinds=["scale", "wrong factor", "other function"],
    loose=["wrong reduction", "wrong statistics"],
    backward=True,
)
def gradient_of_the_root_of_the_mean_square(call: Call) -> Any:
    """(a - b) / |a - b| / sqrt(n): a root that the loss does not have."""
    gradient, value, target = (call.tensor(i) for i in range(3))
    fits(call.args[3] == 1)
    error = value - target
    return call.instead(gradient * error / error.norm() / value.numel() ** 0.5)


@FAULTS.fault(
    "huber_loss_backward",
    kinds=["missing operand", "wrong factor", "other function"],
    loose=["clipped", "scale", "wrong argument", "sign"],
    backward=True,
)
def far_errors_without_the_factor_of_delta(call: Call) -> Any:
    """Beyond delta the gradient is the sign of the error, as of another form of the loss."""
    gradient, value, target = (call.tensor(i) for i in range(3))
    delta, error = call.args[4], call.tensor(1) - call.tensor(2)
    fits(call.args[3] == 1 and value.shape == target.shape)
    slope = torch.where(error.abs() > delta, error.sign(), error)
    return call.instead(gradient * slope / value.numel())


@FAULTS.fault(
    "binary_cross_entropy_backward",
    kinds=["other function", "wrong argument", "wrong index"],
    loose=["sign", "swapped operands", "shift"],
    backward=True,
)
def target_of_the_other_class_on_the_way_back(call: Call) -> Any:
    """1 - y for y: the classes are counted the other way round."""
    return call.put(2, 1 - call.tensor(2)).run()
