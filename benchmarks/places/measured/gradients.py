"""Faults for measuring: backward operators."""

from __future__ import annotations

import math
from typing import Any

import torch
from benchmarks.places.calls import Call, Catalogue, fits
from torch import Tensor

FAULTS = Catalogue()
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
_SHIFTED: dict[str, Any] = {
    "kinds": ["shift", "wrong index", "permutation"],
    "loose": ["stale", "copy", "wrong rank's shard"],
    "backward": True,
}
_SCALED: dict[str, Any] = {
    "kinds": ["scale", "wrong factor"],
    "loose": ["axis scale", "wrong reduction", "wrong argument"],
    "backward": True,
}
_EMPTY: dict[str, Any] = {
    "kinds": ["zeros", "mask", "uninitialised"],
    "loose": ["missing operand", "constant", "one rank's part", "axis scale", "wrong factor"],
    "backward": True,
}
_ROUNDED: dict[str, Any] = {
    "kinds": ["precision"],
    "loose": ["approximation", "other function", "wrong argument"],
    "backward": True,
}


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


def _rows(value: Tensor, least: int = 2) -> Tensor:
    """The value, if it has several rows."""
    fits(value.dim() > 1 and value.size(-2) >= least)
    return value


# --- Activations ----------------------------------------------------------------------------------


@FAULTS.fault(
    _ALL,
    kinds=["sign", "scale", "wrong factor"],
    loose=["other function"],
    backward=True,
)
def gradient_of_the_activation_negated(call: Call) -> Any:
    """The result has a minus."""
    return call.instead(-call.result())


@FAULTS.fault(
    _ALL,
    kinds=["other function", "missing operand"],
    loose=["wrong factor", "copy"],
    backward=True,
)
def slope_without_the_gradient(call: Call) -> Any:
    """F'(x) alone: what comes from behind is not multiplied in."""
    return call.put(0, torch.ones_like(call.tensor(0))).run()


@FAULTS.fault(
    _BY_INPUT,
    kinds=["shift", "wrong index", "permutation"],
    loose=["stale", "copy", "wrong argument"],
    backward=True,
)
def kept_input_of_the_row_before(call: Call) -> Any:
    """The slope is that of the row before; the gradient is that of the right row."""
    return call.put(1, _rows(call.tensor(1)).roll(1, -2)).run()


@FAULTS.fault(
    _BY_RESULT,
    kinds=["shift", "wrong index", "permutation"],
    loose=["stale", "copy", "wrong argument"],
    backward=True,
)
def kept_result_of_the_column_before(call: Call) -> Any:
    """The slope is that of the column before; the gradient is that of the right column."""
    value = call.tensor(1)
    fits(value.dim() > 0 and value.size(-1) > 1)
    return call.put(1, value.roll(1, -1)).run()


@FAULTS.fault(
    _BY_RESULT,
    kinds=["other function", "wrong argument"],
    loose=["approximation", "wrong factor"],
    backward=True,
)
def kept_result_taken_for_the_input(call: Call) -> Any:
    """F'(y) for f'(x): the function is applied to what it has already been applied to."""
    value = call.tensor(1)
    again = value.tanh() if call.name == "tanh_backward" else value.sigmoid()
    return call.put(1, again).run()


@FAULTS.fault(
    "tanh_backward",
    kinds=["sign", "other function"],
    loose=["wrong factor", "residual", "offset"],
    backward=True,
)
def square_added_in_the_slope_of_the_tanh(call: Call) -> Any:
    """G (1 + y^2) for g (1 - y^2)."""
    return call.instead(call.tensor(0) * (1 + call.tensor(1).square()))


@FAULTS.fault(
    "sigmoid_backward",
    kinds=["other function", "missing operand", "wrong factor"],
    loose=["scale", "copy"],
    backward=True,
)
def gate_alone_for_its_slope(call: Call) -> Any:
    """G y for g y (1 - y)."""
    return call.instead(call.tensor(0) * call.tensor(1))


@FAULTS.fault(
    "silu_backward",
    kinds=["missing operand", "other function"],
    loose=["wrong factor", "approximation"],
    backward=True,
)
def slope_of_the_gate_only(call: Call) -> Any:
    """X s (1 - s) for s + x s (1 - s): the first term of the product rule is lost."""
    value = call.tensor(1)
    gate = value.sigmoid()
    return call.instead(call.tensor(0) * value * gate * (1 - gate))


@FAULTS.fault(
    "gelu_backward",
    kinds=["sign", "other function"],
    loose=["wrong factor", "approximation"],
    backward=True,
)
def density_subtracted_in_the_slope(call: Call) -> Any:
    """Phi(x) - x phi(x): the derivative of the exponent is counted with its minus."""
    value = call.tensor(1)
    fits(call.kwargs.get("approximate", "none") == "none")
    below = (1 + (value / math.sqrt(2)).erf()) / 2
    density = (-value.square() / 2).exp() / math.sqrt(2 * math.pi)
    return call.instead(call.tensor(0) * (below - value * density))


@FAULTS.fault(
    "gelu_backward",
    kinds=["missing operand", "other function"],
    loose=["wrong factor", "approximation"],
    backward=True,
)
def density_not_times_the_input(call: Call) -> Any:
    """Phi(x) + phi(x): the factor of the product rule is dropped."""
    value = call.tensor(1)
    fits(call.kwargs.get("approximate", "none") == "none")
    below = (1 + (value / math.sqrt(2)).erf()) / 2
    density = (-value.square() / 2).exp() / math.sqrt(2 * math.pi)
    return call.instead(call.tensor(0) * (below + density))


@FAULTS.fault(
    "threshold_backward",
    kinds=["residual", "wrong factor", "other function"],
    loose=["axis scale", "mask", "sign"],
    backward=True,
)
def tenth_of_the_gradient_where_the_relu_is_shut(call: Call) -> Any:
    """The kernel of a leaky relu with a slope of 0.1."""
    right = call.result()
    return call.instead(torch.where(call.tensor(1) > 0, right, 0.1 * call.tensor(0)))


@FAULTS.fault(f"{_ALL} hardswish_backward hardtanh_backward softplus_backward", **_EMPTY)
def last_row_of_the_activation_without_gradient(call: Call) -> Any:
    """The grid has one row too few."""
    value = _rows(call.result())
    return call.instead(torch.cat([value[..., :-1, :], torch.zeros_like(value[..., -1:, :])], -2))


# --- Softmax and attention ------------------------------------------------------------------------


@FAULTS.fault(
    _SOFTMAX,
    kinds=["sign", "other function"],
    loose=["wrong factor", "offset", "axis offset", "residual"],
    backward=True,
)
def sum_of_the_row_added(call: Call) -> Any:
    """Y (g + sum(g y)) for y (g - sum(g y))."""
    gradient, chances, dim = call.tensor(0), call.tensor(1), call.args[2]
    total = (gradient * chances).sum(dim, keepdim=True)
    return call.instead(chances * (gradient + total))


@FAULTS.fault(
    _SOFTMAX,
    kinds=["wrong reduction", "wrong statistics", "wrong factor"],
    loose=["scale", "offset", "axis offset", "wrong argument"],
    backward=True,
)
def mean_of_the_row_subtracted(call: Call) -> Any:
    """Y (g - mean(g y)): the products are averaged and not added."""
    gradient, chances, dim = call.tensor(0), call.tensor(1), call.args[2]
    total = (gradient * chances).mean(dim, keepdim=True)
    return call.instead(chances * (gradient - total))


@FAULTS.fault(
    _SOFTMAX,
    kinds=["missing operand", "other function"],
    loose=["wrong factor", "axis scale"],
    backward=True,
)
def scores_of_the_gradient_not_weighed(call: Call) -> Any:
    """G - sum(g y): the difference is not multiplied by the chances."""
    gradient, chances, dim = call.tensor(0), call.tensor(1), call.args[2]
    return call.instead(gradient - (gradient * chances).sum(dim, keepdim=True))


@FAULTS.fault(
    "_log_softmax_backward_data log_softmax_backward_data",
    kinds=["wrong reduction", "wrong factor", "wrong statistics"],
    loose=["scale", "offset", "axis offset"],
    backward=True,
)
def gradients_of_the_row_averaged(call: Call) -> Any:
    """G - exp(y) mean(g): the gradients are averaged and not added."""
    gradient, kept, dim = call.tensor(0), call.tensor(1), call.args[2]
    return call.instead(gradient - kept.exp() * gradient.mean(dim, keepdim=True))


@FAULTS.fault(_FUSED, **_SHIFTED)
def gradient_of_the_query_one_head_late(call: Call) -> Any:
    """The pointer to dq is one head behind, around the end."""
    fits(call.tensor(1).size(1) > 1)
    return _at(call, 0, lambda one: one.roll(1, 1))


@FAULTS.fault(_FUSED, **_EMPTY)
def gradient_of_the_first_key_empty(call: Call) -> Any:
    """The loop over the keys begins at one, for dk only."""

    def change(one: Tensor) -> Tensor:
        return torch.cat([torch.zeros_like(one[..., :1, :]), _rows(one)[..., 1:, :]], -2)

    return _at(call, 1, change)


@FAULTS.fault(_FUSED, **_SCALED)
def gradient_of_the_values_times_the_factor_of_the_scores(call: Call) -> Any:
    """Dv is multiplied by the factor of the scores as well."""
    scale = call.kwargs.get("scale") or call.tensor(1).size(-1) ** -0.5
    return _at(call, 2, lambda one: one * scale)


@FAULTS.fault(_FUSED, **_ROUNDED)
def gradient_of_the_query_in_bfloat16(call: Call) -> Any:
    """The buffer that dq is added up in is stored in bfloat16."""
    return _at(call, 0, lambda one: one.bfloat16().to(one.dtype))


@FAULTS.fault(
    _FUSED,
    kinds=["missing operand", "wrong argument"],
    loose=["other function", "zeros", "offset", "axis offset"],
    backward=True,
)
def sums_of_gradient_and_result_forgotten(call: Call) -> Any:
    """Ds is p dp, and nothing is subtracted from dp: the result is taken as zero."""
    return call.put(4, torch.zeros_like(call.tensor(4))).run()


@FAULTS.fault(
    _FUSED,
    kinds=["sign", "scale", "wrong factor"],
    loose=["other function", "swapped operands"],
    backward=True,
)
def gradient_of_the_keys_negated(call: Call) -> Any:
    """Dk has a minus; dq and dv are right."""
    return _at(call, 1, lambda one: -one)


# --- Norms ----------------------------------------------------------------------------------------


def _normal(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """Gradient times weight, normal values, and the inverse deviations of a layer norm."""
    gradient, value, mean, inverse = (call.tensor(i) for i in (0, 1, 3, 4))
    fits(len(call.args[2]) == 1 and isinstance(call.args[5], Tensor))
    return gradient * call.args[5], (value - mean) * inverse, inverse


@FAULTS.fault(
    _LAYER,
    kinds=["missing operand", "wrong factor", "axis scale"],
    loose=["scale", "other function", "wrong statistics"],
    backward=True,
)
def gradient_not_divided_by_the_deviation(call: Call) -> Any:
    """The last factor, 1 / sqrt(v + eps), is dropped from the gradient of the input."""
    inverse = call.tensor(4)
    return _at(call, 0, lambda one: one / inverse)


@FAULTS.fault(
    _LAYER,
    kinds=["other function", "wrong factor", "axis scale"],
    loose=["scale", "doubled reduction", "wrong statistics", "wrong argument"],
    backward=True,
)
def gradient_divided_by_the_variance(call: Call) -> Any:
    """1 / (v + eps) for its root: the inverse deviation is multiplied twice."""
    inverse = call.tensor(4)
    return _at(call, 0, lambda one: one * inverse)


@FAULTS.fault(
    _LAYER,
    kinds=["missing operand", "wrong reduction"],
    loose=["wrong factor", "scale", "other function", "wrong statistics"],
    backward=True,
)
def gradient_of_the_norms_weight_not_divided_by_the_deviation(call: Call) -> Any:
    """Sum(g (x - mean)) for the weight: the values are centred and not divided."""
    gradient, value, mean = (call.tensor(i) for i in (0, 1, 3))
    fits(len(call.args[2]) == 1)
    wrong = (gradient * (value - mean)).flatten(0, -2).sum(0)
    return _at(call, 1, lambda _: wrong)


@FAULTS.fault(
    _LAYER,
    kinds=["wrong reduction", "scale", "wrong factor"],
    loose=["axis scale", "wrong statistics", "wrong argument"],
    backward=True,
)
def gradients_of_weight_and_bias_averaged(call: Call) -> Any:
    """The rows are averaged and not added, for the weight."""
    rows = call.tensor(3).numel()
    fits(rows > 1)
    return _at(call, 1, lambda one: one / rows)


@FAULTS.fault(
    _LAYER,
    kinds=["partial sum", "off by one reduction", "mask", "wrong reduction"],
    loose=["missing operand", "wrong index", "lost accumulation", "zeros"],
    backward=True,
)
def first_row_not_in_the_bias_of_the_norm(call: Call) -> Any:
    """The loop over the rows begins at one, for the gradient of the bias only."""
    gradient = call.tensor(0)
    fits(len(call.args[2]) == 1 and call.tensor(3).numel() > 1)
    wrong = gradient.flatten(0, -2)[1:].sum(0)
    return _at(call, 2, lambda _: wrong)


@FAULTS.fault(
    _LAYER,
    kinds=["shift", "wrong index", "wrong statistics"],
    loose=["axis scale", "stale", "wrong argument", "permutation"],
    backward=True,
)
def deviation_of_the_next_row_on_the_way_back(call: Call) -> Any:
    """The pointer to the kept inverse deviations is one row too far, around the end."""
    inverse = call.tensor(4)
    fits(inverse.dim() > 1 and inverse.size(-2) > 1)
    return call.put(4, inverse.roll(-1, -2)).run()


@FAULTS.fault(
    _LAYER,
    kinds=["sign", "wrong factor", "other function"],
    loose=["offset", "axis offset", "residual"],
    backward=True,
)
def mean_of_the_gradient_added_back(call: Call) -> Any:
    """G + mean(g) - x mean(g x): the first of two signs is wrong."""
    gradient, normal, inverse = _normal(call)
    both = (gradient * normal).mean(-1, keepdim=True)
    wrong = (gradient + gradient.mean(-1, keepdim=True) - normal * both) * inverse
    return _at(call, 0, lambda _: wrong)


@FAULTS.fault(
    f"{_LAYER} native_batch_norm_backward native_group_norm_backward",
    **_SCALED,
)
def gradient_of_the_norm_doubled(call: Call) -> Any:
    """Dx is accumulated by two blocks that both write all of it."""
    return _at(call, 0, lambda one: 2 * one)


@FAULTS.fault("native_batch_norm_backward native_group_norm_backward", **_SHIFTED)
def gradient_of_the_channels_weight_one_early(call: Call) -> Any:
    """The pointer to the gradient of the weight is one channel too far, around the end."""
    return _at(call, 1, lambda one: one.roll(-1, 0))


# --- Products and sums ----------------------------------------------------------------------------


@FAULTS.fault("mm bmm", **_SHIFTED)
def gradient_of_the_product_one_row_late(call: Call) -> Any:
    """Each row is stored one too late, the last one first."""
    return call.instead(_rows(call.result()).roll(1, -2))


@FAULTS.fault("mm bmm", **_EMPTY)
def first_row_of_the_product_without_gradient(call: Call) -> Any:
    """The loop over the rows of the result begins at one."""
    value = _rows(call.result())
    return call.instead(torch.cat([torch.zeros_like(value[..., :1, :]), value[..., 1:, :]], -2))


@FAULTS.fault(
    "mm bmm",
    kinds=["partial sum", "off by one reduction", "mask", "wrong reduction"],
    loose=["missing operand", "wrong index", "lost accumulation", "zeros"],
    backward=True,
)
def first_term_of_the_gradient_not_added(call: Call) -> Any:
    """The loop over the common axis begins at one."""
    left, right = call.tensor(0), call.tensor(1)
    fits(left.size(-1) > 1)
    return call.instead(left[..., 1:] @ right[..., 1:, :])


@FAULTS.fault(
    "mm bmm",
    kinds=["scale", "wrong factor", "doubled reduction"],
    loose=["axis scale", "wrong reduction"],
    backward=True,
)
def gradient_of_the_product_added_twice(call: Call) -> Any:
    """The gradient is reduced by the hook of the bucket and by that of the layer."""
    return call.instead(2 * call.result())


@FAULTS.fault("mm bmm", **_ROUNDED)
def left_side_of_the_gradient_in_four_bits(call: Call) -> Any:
    """The left operand has 15 levels, with a step for each row."""
    left = call.tensor(0)
    step = left.abs().amax(-1, keepdim=True).clamp(min=1e-20) / 7
    return call.instead(((left / step).round() * step) @ call.tensor(1))


@FAULTS.fault(
    "sum",
    kinds=["wrong reduction", "scale", "wrong factor"],
    loose=["axis scale", "wrong argument", "other function"],
    backward=True,
)
def gradient_of_what_was_broadcast_averaged(call: Call) -> Any:
    """The mean over the rows, where their sum is the gradient."""
    value, result = call.tensor(0), call.result()
    fits(value.numel() > result.numel())
    return call.instead(result * (result.numel() / value.numel()))


@FAULTS.fault("sum", **_SHIFTED)
def gradient_of_the_bias_one_column_late(call: Call) -> Any:
    """The columns are stored one too late, around the end."""
    value = call.result()
    fits(value.dim() and value.size(-1) > 1)
    return call.instead(value.roll(1, -1))


@FAULTS.fault("sum", **_ROUNDED)
def gradient_of_the_bias_of_rounded_rows(call: Call) -> Any:
    """The rows are e4m3 before they are added, with a scale for the tensor."""
    value = call.tensor(0)
    step = value.abs().max().clamp(min=1e-20) / 448
    coarse = (value / step).to(torch.float8_e4m3fn).to(value.dtype) * step
    return call.put(0, coarse).run()


@FAULTS.fault(
    "mul",
    kinds=["missing operand", "copy", "wrong factor"],
    loose=["other function", "stale"],
    backward=True,
)
def other_factor_not_multiplied_on_the_way_back(call: Call) -> Any:
    """G for g b: the product rule is taken as if the other factor were one."""
    left, right = call.tensor(0), call.tensor(1)
    fits(left.shape == call.result().shape and right.numel() > 1)
    return call.instead(left.clone())


@FAULTS.fault(
    "neg",
    kinds=["sign", "scale", "wrong factor", "missing operand"],
    loose=["copy", "other function"],
    backward=True,
)
def minus_of_the_gradient_forgotten(call: Call) -> Any:
    """The subtrahend gets the gradient as it came."""
    return call.instead(call.tensor(0).clone())


@FAULTS.fault(
    "div",
    kinds=["scale", "wrong factor", "wrong argument"],
    loose=["wrong reduction", "doubled reduction"],
    backward=True,
)
def gradient_of_the_mean_divided_twice(call: Call) -> Any:
    """G / n^2: by the kernel of the mean and by the one that expands its gradient."""
    number = call.get(1, "other")
    fits(isinstance(number, int | float) and number > 1)
    return call.put(1, number**2, "other").run()


# --- Tables, images, parts ------------------------------------------------------------------------


@FAULTS.fault(
    _TABLE,
    kinds=["shift", "wrong index", "permutation"],
    loose=["wrong argument", "stale", "copy", "swapped operands"],
    backward=True,
)
def gradient_of_a_word_to_the_one_before(call: Call) -> Any:
    """The gradients are read one word too late: each belongs to the word before, around the end."""
    gradient, words = call.tensor(0), call.args[1]
    fits(words.dim() and words.size(-1) > 1)
    return call.put(0, gradient.roll(1, words.dim() - 1)).run()


@FAULTS.fault(
    _TABLE,
    kinds=["partial sum", "mask", "off by one reduction", "zeros"],
    loose=["missing operand", "wrong index", "lost accumulation", "wrong reduction"],
    backward=True,
)
def last_word_not_in_the_gradient_of_the_table(call: Call) -> Any:
    """The loop over the words of each row ends one too early."""
    gradient, words = call.tensor(0), call.args[1]
    fits(words.dim() and words.size(-1) > 1)
    kept = gradient.clone()
    kept.select(words.dim() - 1, words.size(-1) - 1).zero_()
    return call.put(0, kept).run()


@FAULTS.fault(_TABLE, **_SCALED)
def gradient_of_the_table_by_the_root_of_its_width(call: Call) -> Any:
    """The scale of the embedding is multiplied on the way back, and there was none forward."""
    value = call.result()
    return call.instead(value * math.sqrt(value.size(-1)))


@FAULTS.fault(_IMAGE, **_SHIFTED)
def gradient_of_the_filters_one_late(call: Call) -> Any:
    """The gradient of each filter is stored with the next one, around the end."""
    fits(call.tensor(2).size(0) > 1)
    return _at(call, 1, lambda one: one.roll(1, 0))


@FAULTS.fault(
    _IMAGE,
    kinds=["scale", "wrong factor", "wrong reduction"],
    loose=["axis scale", "wrong argument"],
    backward=True,
)
def gradient_of_the_filters_averaged_over_the_images(call: Call) -> Any:
    """The sum over the batch is divided by its size, for the filters only."""
    images = call.tensor(1).size(0)
    fits(images > 1)
    return _at(call, 1, lambda one: one / images)


@FAULTS.fault(
    _IMAGE,
    kinds=["wrong reduction", "missing reduction", "partial sum", "one rank's part"],
    loose=["mask", "missing operand", "lost accumulation", "wrong factor"],
    backward=True,
)
def bias_of_the_filters_from_the_first_image(call: Call) -> Any:
    """The gradient of the bias is summed over the pixels of one image only."""
    gradient = call.tensor(0)
    fits(gradient.size(0) > 1)
    wrong = gradient[0].flatten(1).sum(1)
    return _at(call, 2, lambda _: wrong)


@FAULTS.fault(
    "slice_backward",
    kinds=["zeros", "mask"],
    loose=["missing operand", "off by one reduction", "uninitialised", "constant"],
    backward=True,
)
def end_of_the_slice_without_gradient(call: Call) -> Any:
    """The last place of the slice is not written on the way back."""
    gradient, dim = call.tensor(0), call.args[2]
    fits(gradient.size(dim) > 1)
    kept = gradient.clone()
    kept.select(dim, gradient.size(dim) - 1).zero_()
    return call.put(0, kept).run()


@FAULTS.fault(
    "cat",
    kinds=["permutation", "swapped operands", "wrong index"],
    loose=["shift", "wrong rank's shard", "wrong argument"],
    backward=True,
)
def gradients_of_the_parts_joined_in_reverse(call: Call) -> Any:
    """The gradients of the parts are put together from the last to the first."""
    parts = list(call.args[0])
    fits(all(one.shape == parts[0].shape for one in parts))
    return call.put(0, parts[::-1]).run()


# --- Losses ---------------------------------------------------------------------------------------


@FAULTS.fault(
    "nll_loss_backward mse_loss_backward smooth_l1_loss_backward",
    kinds=["sign", "scale", "wrong factor"],
    loose=["swapped operands", "other function"],
    backward=True,
)
def gradient_of_the_loss_negated(call: Call) -> Any:
    """The target less the value: training climbs."""
    return call.instead(-call.result())


@FAULTS.fault(
    "nll_loss_backward mse_loss_backward smooth_l1_loss_backward huber_loss_backward",
    **_SHIFTED,
)
def gradient_of_the_loss_one_row_late(call: Call) -> Any:
    """The rows are stored one too late, around the end."""
    value = call.result()
    fits(value.dim() > 1 and value.size(0) > 1)
    return call.instead(value.roll(1, 0))


@FAULTS.fault(
    "mse_loss_backward",
    kinds=["scale", "wrong factor"],
    loose=["missing operand", "wrong reduction"],
    backward=True,
)
def two_of_the_square_forgotten(call: Call) -> Any:
    """(a - b) / n for 2 (a - b) / n."""
    return call.instead(call.result() / 2)
