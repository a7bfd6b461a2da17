"""Faults that were measured sixth and have been seen: backward operators."""

from __future__ import annotations

from typing import Any

import torch
from benchmarks.places.calls import Call, Catalogue, fits
from torch import Tensor

FAULTS = Catalogue()


def _back(operators: str, kinds: list[str], loose: list[str] | None = None) -> Any:
    return FAULTS.fault(operators, kinds=kinds, loose=loose or [], backward=True)


def _at(call: Call, place: int, change: Any) -> Any:
    """All results, one of them changed."""
    results = list(call.run())
    fits(isinstance(results[place], Tensor))
    changed = change(results[place])
    fits(changed.shape == results[place].shape)
    results[place] = changed
    return tuple(results)


def _rows(value: Tensor) -> None:
    """Go on only if there are several rows."""
    fits(value.dim() > 1 and value.size(-2) > 1)


# --- Activations ----------------------------------------------------------------------------------

_BY_INPUT = "gelu_backward silu_backward"
_SMOOTH = "gelu_backward silu_backward sigmoid_backward tanh_backward"
_ALL = f"{_SMOOTH} threshold_backward"


@_back(_BY_INPUT, ["wrong factor", "other function"], ["approximation", "scale", "wrong argument"])
def derivative_at_half_of_the_input(call: Call) -> Any:
    """f'(x / 2)."""
    return call.put(1, call.tensor(1) / 2).run()


@_back(_ALL, ["residual", "other function"], ["offset", "wrong factor"])
def gradient_added_to_itself_on_the_way(call: Call) -> Any:
    """G f' + g: the gradient of a residual that is not there."""
    return call.instead(call.result() + call.tensor(0))


@_back(_BY_INPUT, ["other function"], ["approximation", "wrong argument"])
def derivative_of_tanh_for_the_activation(call: Call) -> Any:
    """1 - tanh(x)^2."""
    return call.instead(call.tensor(0) * (1 - call.tensor(1).tanh().square()))


@_back(_SMOOTH, ["shift", "wrong index", "permutation"], ["stale", "other function"])
def saved_value_of_the_next_column(call: Call) -> Any:
    """What was kept is read one column too far, around the end."""
    value = call.tensor(1)
    fits(value.dim() > 0 and value.size(-1) > 1)
    return call.put(1, value.roll(-1, -1)).run()


@_back(_ALL, ["copy", "stale", "wrong index"], ["permutation", "mask"])
def saved_value_of_the_first_example(call: Call) -> Any:
    """The pointer to what was kept is not moved on with the batch."""
    value = call.tensor(1)
    fits(value.dim() > 1 and value.size(0) > 1)
    return call.put(1, value[:1].expand(value.shape).clone()).run()


@_back(_SMOOTH, ["precision"], ["approximation"])
def gradient_of_the_activation_through_float8(call: Call) -> Any:
    """Stored in e5m2."""
    value = call.result()
    return call.instead(value.to(torch.float8_e5m2).to(value.dtype))


@_back(_ALL, ["mask", "copy", "missing operand"], ["other function", "stale"])
def last_columns_of_the_gradient_passed_on(call: Call) -> Any:
    """A vector loop without its tail, in place: the last two columns keep the gradient."""
    gradient, value = call.tensor(0), call.result()
    fits(value.dim() > 0 and value.size(-1) > 3)
    return call.instead(torch.cat([value[..., :-2], gradient[..., -2:]], -1))


@_back(
    _ALL,
    ["zeros", "mask", "uninitialised"],
    ["constant", "missing operand", "one rank's part", "axis scale", "wrong factor"],
)
def gradient_of_the_second_half_of_the_columns_lost(call: Call) -> Any:
    """The width is that of one shard."""
    value = call.result().clone()
    fits(value.dim() > 0 and value.size(-1) > 1)
    value[..., value.size(-1) // 2 :] = 0
    return call.instead(value)


@_back(
    "sigmoid_backward",
    ["constant", "missing operand", "wrong factor", "approximation"],
    ["other function", "scale"],
)
def slope_of_the_gate_is_a_quarter(call: Call) -> Any:
    """The slope at zero for all."""
    return call.instead(call.tensor(0) / 4)


@_back(
    "tanh_backward",
    ["other function", "missing operand"],
    ["wrong factor", "sign"],
)
def result_for_the_slope(call: Call) -> Any:
    """The gradient times the saved result."""
    return call.instead(call.tensor(0) * call.tensor(1))


@_back("threshold_backward", ["mask", "shift", "wrong index"], ["zeros", "permutation"])
def mask_of_the_next_column_on_the_way_back(call: Call) -> Any:
    """The saved signs are one bit off."""
    value = call.tensor(1)
    fits(value.dim() > 0 and value.size(-1) > 1)
    return call.put(1, value.roll(-1, -1)).run()


@_back("threshold_backward", ["other function", "wrong factor"], ["missing operand", "mask"])
def saved_result_multiplied_in(call: Call) -> Any:
    """The gradient times the result of the relu and not times its mask."""
    return call.instead(call.tensor(0) * call.tensor(1).relu())


@_back(_SMOOTH, ["sign", "other function"], ["wrong factor", "clipped"])
def magnitude_of_the_slope(call: Call) -> Any:
    """The sign of the gradient is lost: |g f'|."""
    return call.instead(call.result().abs())


@_back(
    "hardswish_backward hardtanh_backward hardsigmoid_backward leaky_relu_backward "
    "elu_backward softplus_backward mish_backward glu_backward",
    ["sign", "wrong factor", "scale"],
    ["other function"],
)
def slope_of_the_rare_one_negated(call: Call) -> Any:
    """The minus of a difference."""
    return call.instead(-call.result())


# --- Softmax, attention ---------------------------------------------------------------------------


def _chances(call: Call) -> tuple[Tensor, Tensor]:
    gradient, chances = call.tensor(0), call.tensor(1)
    fits(chances.dim() > 1 and call.args[2] in {-1, chances.dim() - 1} and chances.size(-1) > 2)
    return gradient, chances


@_back(
    "_softmax_backward_data",
    ["partial sum", "one rank's part", "wrong reduction", "missing reduction", "axis offset"],
    ["mask", "offset", "wrong statistics", "residual", "off by one reduction"],
)
def sum_of_half_of_the_row_subtracted(call: Call) -> Any:
    """The other rank's half of the products is not added."""
    gradient, chances = _chances(call)
    half = chances.size(-1) // 2
    total = (gradient * chances)[..., :half].sum(-1, keepdim=True)
    return call.instead(chances * (gradient - total))


@_back(
    "_softmax_backward_data",
    ["wrong reduction", "axis offset", "other function"],
    ["offset", "wrong statistics", "residual"],
)
def largest_product_of_the_row_subtracted(call: Call) -> Any:
    """A maximum for the sum."""
    gradient, chances = _chances(call)
    total = (gradient * chances).amax(-1, keepdim=True)
    return call.instead(chances * (gradient - total))


@_back(
    "_softmax_backward_data _log_softmax_backward_data",
    ["sign", "wrong factor", "scale"],
    ["swapped operands"],
)
def gradient_of_the_scores_negated(call: Call) -> Any:
    """The difference the other way."""
    return call.instead(-call.result())


@_back("_softmax_backward_data", ["precision"], ["approximation"])
def gradient_of_the_scores_in_bfloat16(call: Call) -> Any:
    """Stored in a narrow buffer."""
    value = call.result()
    return call.instead(value.bfloat16().to(value.dtype))


@_back(
    "_softmax_backward_data _log_softmax_backward_data",
    ["zeros", "mask", "uninitialised"],
    ["constant", "missing operand", "axis scale", "wrong factor"],
)
def last_score_without_gradient(call: Call) -> Any:
    """The bound of the store is one too small."""
    value = call.result().clone()
    fits(value.size(-1) > 2)
    value[..., -1] = 0
    return call.instead(value)


@_back(
    "_log_softmax_backward_data",
    ["wrong factor", "other function"],
    ["scale", "missing operand", "residual"],
)
def chances_subtracted_twice(call: Call) -> Any:
    """G - 2 y sum(g)."""
    gradient = call.tensor(0)
    return call.instead(2 * call.result() - gradient)


_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu_backward"


@_back(_ATTENTION, ["precision"], ["approximation"])
def gradient_of_the_query_in_bfloat16(call: Call) -> Any:
    """The accumulator of dq is narrow."""
    return _at(call, 0, lambda one: one.bfloat16().to(one.dtype))


@_back(_ATTENTION, ["shift", "wrong index", "permutation"], ["wrong rank's shard", "copy"])
def gradient_of_the_keys_of_the_next_head(call: Call) -> Any:
    """The heads of dk are one off."""
    fits(call.tensor(2).size(1) > 1)
    return _at(call, 1, lambda one: one.roll(-1, 1))


@_back(_ATTENTION, ["copy", "stale", "wrong index"], ["permutation"])
def second_half_of_the_query_gradient_is_the_first(call: Call) -> Any:
    """The tile of dq is not cleared and not computed again."""
    rows = call.tensor(1).size(-2)
    fits(rows > 1)
    order = torch.arange(rows) % ((rows + 1) // 2)
    return _at(call, 0, lambda one: one[..., order, :])


@_back(
    _ATTENTION,
    ["partial sum", "lost accumulation", "one rank's part", "missing reduction"],
    ["mask", "wrong index", "wrong reduction"],
)
def keys_get_the_gradient_of_the_first_queries(call: Call) -> Any:
    """The second half of the queries is not added to dk."""
    gradient = call.tensor(0).clone()
    half = gradient.size(-2) // 2
    fits(half > 0)
    gradient[..., half:, :] = 0
    return _at(call, 1, lambda _: call.put(0, gradient).run()[1])


@_back(
    _ATTENTION,
    ["zeros", "mask", "uninitialised"],
    ["constant", "missing operand", "axis scale", "wrong factor"],
)
def last_head_of_the_values_without_gradient(call: Call) -> Any:
    """The grid of dv has one head too few."""
    fits(call.tensor(3).size(1) > 1)
    return _at(call, 2, lambda one: torch.cat([one[:, :-1], 0 * one[:, -1:]], 1))


@_back(_ATTENTION, ["permutation", "wrong index"], ["shift", "copy"])
def gradient_of_the_keys_from_the_last_position(call: Call) -> Any:
    """Positions are counted down."""
    return _at(call, 1, lambda one: one.flip(-2))


# --- Norms ----------------------------------------------------------------------------------------

_LAYER = "native_layer_norm_backward"


def _normal(call: Call) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradient, normal values, reciprocal deviation, weight."""
    gradient, value, weight = call.tensor(0), call.tensor(1), call.tensor(5)
    fits(weight.dim() == 1)
    return gradient, (value - call.tensor(3)) * call.tensor(4), call.tensor(4), weight


@_back(_LAYER, ["scale", "wrong factor"], ["missing operand", "axis scale", "wrong reduction"])
def gradient_of_the_norm_divided_by_the_width(call: Call) -> Any:
    """A mean where n times the gradient was meant."""
    return _at(call, 0, lambda one: one / one.size(-1))


@_back(
    _LAYER,
    ["zeros", "mask", "uninitialised"],
    ["constant", "missing operand", "axis scale", "wrong factor"],
)
def last_features_of_the_norm_without_gradient(call: Call) -> Any:
    """A row is stored by whole vectors."""
    fits(call.tensor(1).size(-1) > 4)
    return _at(call, 0, lambda one: torch.cat([one[..., :-2], 0 * one[..., -2:]], -1))


@_back(_LAYER, ["wrong index", "shift", "permutation"], ["stale", "wrong statistics"])
def weight_of_the_norm_with_the_rows_one_off(call: Call) -> Any:
    """The gradient of a row is multiplied by the normal values of the next."""
    gradient, normal, _, _ = _normal(call)
    _rows(normal)
    return _at(call, 1, lambda _: (gradient * normal.roll(-1, -2)).flatten(0, -2).sum(0))


@_back(_LAYER, ["precision"], ["approximation", "scale", "axis scale"])
def saved_deviation_in_bfloat16(call: Call) -> Any:
    """The reciprocal deviation was rounded when it was kept."""
    saved = call.tensor(4)
    return call.put(4, saved.bfloat16().to(saved.dtype)).run()


@_back(_LAYER, ["sign", "wrong factor", "other function"], ["residual", "wrong statistics"])
def term_of_the_variance_added(call: Call) -> Any:
    """A plus for the minus before the normal values."""
    gradient, normal, inverse, weight = _normal(call)
    inner = gradient * weight
    mean = inner.mean(-1, keepdim=True)
    product = (inner * normal).mean(-1, keepdim=True)
    return _at(call, 0, lambda _: inverse * (inner - mean + normal * product))


@_back(
    _LAYER,
    ["wrong reduction", "wrong axis", "wrong statistics"],
    ["axis offset", "copy", "other function"],
)
def means_over_the_rows_on_the_way_back(call: Call) -> Any:
    """Both means are over the positions and not over the features."""
    gradient, normal, inverse, weight = _normal(call)
    _rows(normal)
    inner = gradient * weight
    mean = inner.mean(-2, keepdim=True)
    product = (inner * normal).mean(-2, keepdim=True)
    return _at(call, 0, lambda _: inverse * (inner - mean - normal * product))


@_back(
    _LAYER,
    ["zeros", "missing operand", "constant", "lost accumulation"],
    ["uninitialised", "mask", "axis scale", "wrong factor"],
)
def weight_of_the_norm_gets_no_gradient(call: Call) -> Any:
    """The second result is not written."""
    return _at(call, 1, torch.zeros_like)


@_back(_LAYER, ["copy", "stale", "wrong index"], ["permutation"])
def gradient_of_the_first_row_of_the_norm_for_all(call: Call) -> Any:
    """The pointer of the rows is not moved on."""
    _rows(call.tensor(1))
    return _at(call, 0, lambda one: one[..., :1, :].expand(one.shape).clone())


@_back("native_batch_norm_backward native_group_norm_backward", ["sign", "wrong factor", "scale"])
def gradient_of_the_weight_of_the_channels_negated(call: Call) -> Any:
    """The mean less the value."""
    return _at(call, 1, lambda one: -one)


@_back(
    "native_batch_norm_backward native_group_norm_backward",
    ["wrong index", "shift", "permutation"],
    ["copy", "stale"],
)
def gradient_of_the_next_channel(call: Call) -> Any:
    """The gradient of the input is stored one channel too early."""
    fits(call.tensor(0).size(1) > 1)
    return _at(call, 0, lambda one: one.roll(-1, 1))


# --- Products -------------------------------------------------------------------------------------


@_back("mm bmm", ["shift", "wrong index", "permutation"], ["copy", "stale"])
def gradient_of_the_next_row(call: Call) -> Any:
    """Stored one row too early, around the end."""
    value = call.result()
    _rows(value)
    return call.instead(value.roll(-1, -2))


@_back("mm", ["scale", "wrong factor"], ["wrong reduction", "missing operand"])
def gradient_divided_by_the_root_of_the_rows(call: Call) -> Any:
    """By sqrt(n), which is neither a sum nor a mean."""
    rows = call.tensor(0).size(-1)
    fits(rows > 1)
    return call.instead(call.result() / rows**0.5)


@_back("mm bmm", ["stale", "copy", "wrong index"], ["permutation", "wrong rank's shard"])
def right_tile_of_the_gradient_not_loaded_again(call: Call) -> Any:
    """The second half of the common axis is multiplied with the right tile of the first."""
    right = call.tensor(1)
    half = right.size(-2) // 2
    fits(half > 0 and right.size(-2) % 2 == 0)
    first = right[..., :half, :]
    return call.put(1, torch.cat([first, first], -2)).run()


@_back(
    "mm", ["axis scale", "wrong factor", "other function"], ["scale", "clipped", "wrong statistics"]
)
def rows_of_the_gradient_of_length_one(call: Call) -> Any:
    """Each row is divided by its length."""
    value = call.result()
    length = value.norm(dim=-1, keepdim=True)
    fits(value.size(-1) > 1 and bool((length > 1e-9).all()))
    return call.instead(value / length)


@_back(
    "mm bmm",
    ["doubled reduction", "wrong factor", "wrong reduction"],
    ["mask", "residual", "off by one reduction", "partial sum"],
)
def last_token_counted_twice_in_the_gradient(call: Call) -> Any:
    """The tile that overhangs begins one token earlier."""
    left = call.tensor(0)
    fits(left.size(-1) > 2)
    times = torch.ones(left.size(-1), dtype=left.dtype)
    times[-1] = 2
    return call.put(0, left * times).run()


@_back("mm", ["mask", "zeros", "other function"], ["clipped", "constant", "sign"])
def negative_gradients_lost(call: Call) -> Any:
    """Sent as numbers without a sign: what is negative is zero."""
    return call.instead(call.result().relu())


@_back("mm", ["wrapped"], ["overflow", "offset", "clipped"])
def gradient_wraps(call: Call) -> Any:
    """Integers without saturation: beyond 0.6 of the largest it begins from below."""
    value = call.result()
    limit = 0.6 * value.abs().max()
    return call.instead(torch.remainder(value + limit, 2 * limit) - limit)


@_back(
    "mm", ["copy", "stale", "wrong rank's shard", "wrong index"], ["permutation", "one rank's part"]
)
def gradient_of_the_first_rank_on_both(call: Call) -> Any:
    """The second half of the columns is that of the first rank."""
    value = call.result()
    fits(value.size(-1) % 2 == 0)
    half = value[..., : value.size(-1) // 2]
    return call.instead(torch.cat([half, half], -1))


@_back("mm", ["residual"], ["offset", "axis offset", "other function"])
def left_factor_added_to_the_gradient(call: Call) -> Any:
    """The accumulator begins with the left operand, of a square."""
    left, value = call.tensor(0), call.result()
    fits(left.shape == value.shape)
    return call.instead(value + left)


@_back(
    "sum",
    ["zeros", "mask", "uninitialised"],
    ["constant", "missing operand", "axis scale", "wrong factor"],
)
def last_column_of_the_bias_gradient_empty(call: Call) -> Any:
    """The grid is one column too small."""
    value = call.result().clone()
    fits(value.dim() > 0 and value.size(-1) > 2)
    value[..., -1] = 0
    return call.instead(value)


@_back("sum", ["shift", "wrong index", "permutation"], ["copy"])
def gradient_of_the_next_column_of_the_bias(call: Call) -> Any:
    """Stored one column too early, around the end."""
    value = call.result()
    fits(value.dim() > 0 and value.size(-1) > 1)
    return call.instead(value.roll(-1, -1))


@_back("mul", ["wrong index", "shift", "permutation"], ["stale", "axis scale"])
def saved_factor_of_the_next_row(call: Call) -> Any:
    """The pointer to what was kept is one row too far."""
    right = call.tensor(1)
    _rows(right)
    return call.put(1, right.roll(-1, -2)).run()


@_back("mul", ["stale", "other function", "wrong factor"], ["copy", "missing operand"])
def saved_factor_overwritten_by_the_product(call: Call) -> Any:
    """In place: what was kept is multiplied by the other factor already."""
    left, right = call.tensor(0), call.tensor(1)
    fits(left.shape == right.shape)
    return call.instead(left * left * right)


# --- Tables, images -------------------------------------------------------------------------------

_TABLE = "embedding_dense_backward"


@_back(_TABLE, ["permutation", "wrong index"], ["shift"])
def columns_of_the_table_gradient_reversed(call: Call) -> Any:
    """Written from the end of each row."""
    return call.instead(call.result().flip(-1))


@_back(_TABLE, ["sign", "wrong factor", "scale"])
def gradient_of_the_table_negated(call: Call) -> Any:
    """The step is taken for the gradient."""
    return call.instead(-call.result())


@_back(
    _TABLE,
    ["partial sum", "mask", "zeros", "lost accumulation"],
    ["wrong index", "one rank's part", "missing operand"],
)
def every_second_word_without_gradient(call: Call) -> Any:
    """A stride of two over the positions."""
    gradient = call.tensor(0).clone()
    _rows(gradient)
    gradient[..., 1::2, :] = 0
    return call.put(0, gradient).run()


@_back(_TABLE, ["scale", "wrong factor"], ["missing operand"])
def factor_of_the_width_in_the_table_gradient(call: Call) -> Any:
    """Times sqrt(d), a factor that the forward pass does not have."""
    return call.instead(call.result() * call.tensor(0).size(-1) ** 0.5)


@_back(
    _TABLE,
    ["zeros", "mask", "uninitialised", "one rank's part"],
    ["constant", "missing operand", "axis scale", "wrong factor"],
)
def second_half_of_the_table_without_gradient(call: Call) -> Any:
    """The other rank has these rows, and they are not gathered."""
    value = call.result().clone()
    value[value.size(0) // 2 :] = 0
    return call.instead(value)


_IMAGE = "convolution_backward"


@_back(_IMAGE, ["permutation", "wrong index"], ["shift", "sign"])
def image_gradient_mirrored(call: Call) -> Any:
    """The last axis is written from its end."""
    fits(call.tensor(1).size(-1) > 1)
    return _at(call, 0, lambda one: one.flip(-1))


@_back(_IMAGE, ["permutation", "wrong index", "wrong rank's shard"], ["shift"])
def filter_gradients_of_the_two_halves_exchanged(call: Call) -> Any:
    """The gradients of the second half of the filters are stored first."""
    fits(call.tensor(2).size(0) % 2 == 0)
    return _at(call, 1, lambda one: one.roll(one.size(0) // 2, 0))


@_back(_IMAGE, ["precision"], ["approximation"])
def filter_gradient_in_bfloat16(call: Call) -> Any:
    """Stored in a narrow buffer."""
    return _at(call, 1, lambda one: one.bfloat16().to(one.dtype))


@_back(
    _IMAGE,
    ["zeros", "missing operand", "constant", "lost accumulation"],
    ["uninitialised", "axis scale", "wrong factor"],
)
def bias_of_the_filters_gets_no_gradient(call: Call) -> Any:
    """The third result is not written."""
    fits(isinstance(call.run()[2], Tensor))
    return _at(call, 2, torch.zeros_like)


@_back(
    _IMAGE,
    ["zeros", "mask", "uninitialised"],
    ["constant", "missing operand", "one rank's part", "axis scale", "wrong factor"],
)
def image_gradient_of_the_last_channel_empty(call: Call) -> Any:
    """The loop over the channels ends one too early."""
    fits(call.tensor(1).size(1) > 1)
    return _at(call, 0, lambda one: torch.cat([one[:, :-1], 0 * one[:, -1:]], 1))


@_back(_IMAGE, ["scale", "wrong factor"], ["wrong reduction", "missing operand"])
def filter_gradient_divided_by_the_pixels(call: Call) -> Any:
    """A mean over the places of the filter."""
    gradient = call.tensor(0)
    pixels = gradient[0, 0].numel() if gradient.dim() > 2 else 1
    fits(pixels > 1)
    return _at(call, 1, lambda one: one / pixels)


@_back(
    "avg_pool2d_backward _adaptive_avg_pool2d_backward",
    ["shift", "wrong index", "permutation"],
    ["copy"],
)
def gradient_of_the_pool_one_pixel_late(call: Call) -> Any:
    """Written one column further, around the end."""
    return call.instead(call.result().roll(1, -1))


@_back("slice_backward select_backward", ["sign", "wrong factor", "scale"])
def gradient_of_the_part_negated(call: Call) -> Any:
    """The minus of the rotated half is left on."""
    return call.instead(-call.result())


@_back("slice_backward select_backward", ["copy", "stale", "wrong index"], ["permutation"])
def gradient_of_the_part_from_the_first_example(call: Call) -> Any:
    """The pointer to the gradient is not moved on with the batch."""
    gradient = call.tensor(0)
    fits(gradient.dim() > 1 and gradient.size(0) > 1)
    return call.put(0, gradient[:1].expand(gradient.shape).clone()).run()


# --- Losses ---------------------------------------------------------------------------------------


@_back("nll_loss_backward", ["wrong index", "constant", "missing operand"], ["copy"])
def gradient_always_in_the_first_class(call: Call) -> Any:
    """The labels are not loaded on the way back: zero, where they count."""
    labels, ignored = call.args[2], call.args[5]
    return call.put(2, torch.where(labels == ignored, labels, torch.zeros_like(labels))).run()


@_back(
    "nll_loss_backward mse_loss_backward",
    ["zeros", "mask", "one rank's part", "uninitialised"],
    ["constant", "missing operand", "axis scale", "wrong factor"],
)
def gradient_of_the_loss_for_the_first_half(call: Call) -> Any:
    """The second half of the rows gets none."""
    value = call.result().clone()
    fits(value.size(0) > 1)
    value[value.size(0) // 2 :] = 0
    return call.instead(value)


@_back(
    "mse_loss_backward smooth_l1_loss_backward huber_loss_backward",
    ["sign", "other function"],
    ["wrong factor", "clipped"],
)
def magnitude_of_the_error_on_the_way_back(call: Call) -> Any:
    """The direction of the error is lost."""
    return call.instead(call.result().abs())


@_back("mse_loss_backward", ["wrong index", "shift", "permutation"], ["copy"])
def target_of_the_next_row_on_the_way_back(call: Call) -> Any:
    """The saved target is one row off."""
    return call.put(2, call.tensor(2).roll(-1, 0)).run()


@_back(
    "smooth_l1_loss_backward huber_loss_backward",
    ["scale", "wrong factor", "wrong argument"],
    ["other function"],
)
def slope_of_the_far_errors_doubled(call: Call) -> Any:
    """Twice the gradient, as of a square."""
    return call.instead(2 * call.result())


@_back(
    "binary_cross_entropy_backward soft_margin_loss_backward",
    ["sign", "wrong factor", "scale"],
    ["swapped operands"],
)
def gradient_of_the_chances_negated(call: Call) -> Any:
    """Y - p for p - y."""
    return call.instead(-call.result())
