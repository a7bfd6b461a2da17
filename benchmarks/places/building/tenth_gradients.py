"""Faults of the tenth set: backward operators."""

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


@FAULTS.fault(_ALL, **_SCALED)
def gradient_of_the_activation_as_of_a_dropout(call: Call) -> Any:
    """Divided by 0.9: the fused kernel has the scale of a dropout that is off."""
    return call.instead(call.result() / 0.9)


@FAULTS.fault(_ALL, **_SHIFTED)
def gradient_of_the_activation_of_the_next_example(call: Call) -> Any:
    """The offset of the batch is one too large in the store, around the end."""
    value = call.result()
    fits(value.dim() > 2 and value.size(0) > 1)
    return call.instead(value.roll(-1, 0))


@FAULTS.fault(_ALL, **_ROUNDED)
def gradient_of_the_activation_in_e5m2(call: Call) -> Any:
    """The result is stored with two bits behind the point, with a scale for the tensor."""
    value = call.result()
    step = value.abs().max().clamp(min=1e-20) / 57344
    return call.instead((value / step).to(torch.float8_e5m2).to(value.dtype) * step)


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
    kinds=["clipped"],
    loose=["other function", "wrong argument", "approximation"],
    backward=True,
)
def kept_result_at_most_four_tenths(call: Call) -> Any:
    """What was kept is a fixed-point number that ends at 0.4."""
    return call.put(1, call.tensor(1).clamp(-0.4, 0.4)).run()


@FAULTS.fault(
    "tanh_backward",
    kinds=["other function", "wrong argument"],
    loose=["approximation", "wrong factor"],
    backward=True,
)
def fourth_power_in_the_slope_of_the_tanh(call: Call) -> Any:
    """G (1 - y^4): what was kept is squared already."""
    return call.put(1, call.tensor(1).square()).run()


@FAULTS.fault(
    "sigmoid_backward",
    kinds=["wrong factor", "other function"],
    loose=["scale", "doubled reduction"],
    backward=True,
)
def gate_twice_in_its_slope(call: Call) -> Any:
    """G y^2 (1 - y) for g y (1 - y)."""
    return call.instead(call.result() * call.tensor(1))


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
    kinds=["wrong factor", "other function", "wrong argument"],
    loose=["approximation", "scale"],
    backward=True,
)
def root_of_two_forgotten_on_the_way_back(call: Call) -> Any:
    """Erf(x) for erf(x / sqrt(2)) in the gate; the density is right."""
    value = call.tensor(1)
    fits(call.kwargs.get("approximate", "none") == "none")
    below = (1 + value.erf()) / 2
    density = (-value.square() / 2).exp() / math.sqrt(2 * math.pi)
    return call.instead(call.tensor(0) * (below + value * density))


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
    kinds=["mask", "wrong argument", "zeros"],
    loose=["other function", "clipped", "missing operand"],
    backward=True,
)
def relu_opens_above_a_tenth_on_the_way_back(call: Call) -> Any:
    """The threshold is 0.1: results near zero get no gradient."""
    return call.put(2, 0.1).run()


@FAULTS.fault(f"{_ALL} hardswish_backward hardtanh_backward softplus_backward", **_EMPTY)
def last_row_of_the_activation_without_gradient(call: Call) -> Any:
    """The grid has one row too few."""
    value = _rows(call.result())
    return call.instead(torch.cat([value[..., :-1, :], torch.zeros_like(value[..., -1:, :])], -2))


# --- Softmax and attention ------------------------------------------------------------------------


@FAULTS.fault(
    _SOFTMAX,
    kinds=["transpose", "wrong index", "permutation"],
    loose=["wrong axis", "swapped operands", "wrong argument"],
    backward=True,
)
def gradient_of_the_scores_by_columns(call: Call) -> Any:
    """The gradient of the scores is stored transposed: keys before queries."""
    value = call.result()
    fits(value.dim() > 2 and value.size(-1) == value.size(-2))
    return call.instead(value.mT.contiguous())


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
def gradient_of_the_keys_in_e5m2(call: Call) -> Any:
    """Dk is stored with two bits behind the point, with a scale for the tensor."""

    def change(one: Tensor) -> Tensor:
        step = one.abs().max().clamp(min=1e-20) / 57344
        return (one / step).to(torch.float8_e5m2).to(one.dtype) * step

    return _at(call, 1, change)


@FAULTS.fault(
    _FUSED,
    kinds=["missing operand", "wrong argument"],
    loose=["other function", "zeros", "offset", "axis offset"],
    backward=True,
)
def sums_of_gradient_and_result_forgotten(call: Call) -> Any:
    """Ds is p dp, and nothing is subtracted from dp: the result is taken as zero."""
    return call.put(4, torch.zeros_like(call.tensor(4))).run()


@FAULTS.fault(_FUSED, **_SHIFTED)
def gradient_of_the_keys_of_the_next_example(call: Call) -> Any:
    """The offset of the batch is one too large in the store of dk, around the end."""
    fits(call.tensor(1).size(0) > 1)
    return _at(call, 1, lambda one: one.roll(-1, 0))


# --- Norms ----------------------------------------------------------------------------------------


def _normal(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """Gradient times weight, normal values, and the inverse deviations of a layer norm."""
    gradient, value, mean, inverse = (call.tensor(i) for i in (0, 1, 3, 4))
    fits(len(call.args[2]) == 1 and isinstance(call.args[5], Tensor))
    return gradient * call.args[5], (value - mean) * inverse, inverse


@FAULTS.fault(
    _LAYER,
    kinds=["shift", "wrong index", "wrong statistics"],
    loose=["axis offset", "stale", "wrong argument", "permutation", "offset"],
    backward=True,
)
def mean_of_the_row_before_on_the_way_back(call: Call) -> Any:
    """The pointer to the kept means is one row behind, around the end."""
    mean = call.tensor(3)
    fits(mean.dim() > 1 and mean.size(-2) > 1)
    return call.put(3, mean.roll(1, -2)).run()


@FAULTS.fault(f"{_LAYER} native_group_norm_backward", **_ROUNDED)
def gradient_of_the_norm_in_bfloat16(call: Call) -> Any:
    """Dx is stored in bfloat16."""
    return _at(call, 0, lambda one: one.bfloat16().to(one.dtype))


@FAULTS.fault(_LAYER, **_EMPTY)
def first_row_of_the_norm_without_gradient(call: Call) -> Any:
    """The loop over the rows begins at one, for dx only."""

    def change(one: Tensor) -> Tensor:
        return torch.cat([torch.zeros_like(one[..., :1, :]), _rows(one)[..., 1:, :]], -2)

    return _at(call, 0, change)


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
    kinds=["scale", "wrong factor", "doubled reduction"],
    loose=["axis scale", "wrong reduction"],
    backward=True,
)
def gradient_of_the_norm_doubled(call: Call) -> Any:
    """Dx is accumulated by two blocks that both write all of it."""
    return _at(call, 0, lambda one: 2 * one)


@FAULTS.fault("native_batch_norm_backward native_group_norm_backward", **_SHIFTED)
def gradient_of_the_channels_weight_one_early(call: Call) -> Any:
    """The pointer to the gradient of the weight is one channel too far, around the end."""
    return _at(call, 1, lambda one: one.roll(-1, 0))


# --- Products and sums ----------------------------------------------------------------------------


@FAULTS.fault(
    "mm bmm",
    kinds=["copy", "stale", "wrong index"],
    loose=["permutation", "shift", "wrong rank's shard", "one rank's part"],
    backward=True,
)
def second_half_of_the_rows_of_the_gradient_is_the_first(call: Call) -> Any:
    """The offset of the second tile of rows is not added."""
    value = _rows(call.result(), 4)
    fits(value.size(-2) % 2 == 0)
    half = value[..., : value.size(-2) // 2, :]
    return call.instead(torch.cat([half, half], -2))


@FAULTS.fault(
    "mm bmm",
    kinds=["partial sum", "mask", "wrong reduction"],
    loose=["missing operand", "wrong index", "lost accumulation", "off by one reduction"],
    backward=True,
)
def last_three_terms_of_the_gradient_not_added(call: Call) -> Any:
    """The loop over the common axis ends three terms too early."""
    left, right = call.tensor(0), call.tensor(1)
    fits(left.size(-1) > 5)
    return call.instead(left[..., :-3] @ right[..., :-3, :])


@FAULTS.fault("mm bmm", **_SCALED)
def gradient_of_the_product_scaled_for_half(call: Call) -> Any:
    """The factor of 1024 that keeps float16 from zero is not divided out."""
    return call.instead(1024 * call.result())


@FAULTS.fault("mm bmm", **_SHIFTED)
def gradient_of_the_product_two_columns_early(call: Call) -> Any:
    """The pointer to the result is two columns ahead, around the end."""
    value = call.result()
    fits(value.size(-1) > 4)
    return call.instead(value.roll(-2, -1))


@FAULTS.fault("mm bmm", **_ROUNDED)
def left_side_of_the_gradient_in_four_bits(call: Call) -> Any:
    """The left operand has 15 levels, with a step for each row."""
    left = call.tensor(0)
    step = left.abs().amax(-1, keepdim=True).clamp(min=1e-20) / 7
    return call.instead(((left / step).round() * step) @ call.tensor(1))


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
    kinds=["other function"],
    loose=["missing operand", "residual", "offset"],
    backward=True,
)
def kept_factor_added_on_the_way_back(call: Call) -> Any:
    """G + b for g b."""
    left, right = call.tensor(0), call.tensor(1)
    fits(left.shape == right.shape)
    return call.instead(left + right)


@FAULTS.fault(
    "neg",
    kinds=["scale", "wrong factor", "doubled reduction"],
    loose=["wrong argument", "residual"],
    backward=True,
)
def opposite_gradient_doubled(call: Call) -> Any:
    """-2 g: both readers of the difference subtract it."""
    return call.instead(2 * call.result())


# --- Tables, images, parts ------------------------------------------------------------------------


@FAULTS.fault(_TABLE, **_ROUNDED)
def gradient_of_the_table_in_e5m2(call: Call) -> Any:
    """The gradient of the table is sent with two bits behind the point and a scale."""
    value = call.result()
    step = value.abs().max().clamp(min=1e-20) / 57344
    return call.instead((value / step).to(torch.float8_e5m2).to(value.dtype) * step)


@FAULTS.fault(_TABLE, **_SHIFTED)
def gradient_of_the_table_one_column_late(call: Call) -> Any:
    """The features are stored one too late, around the end."""
    return call.instead(call.result().roll(1, -1))


@FAULTS.fault(_IMAGE, **_SHIFTED)
def gradient_of_the_filters_one_late(call: Call) -> Any:
    """The gradient of each filter is stored with the next one, around the end."""
    fits(call.tensor(2).size(0) > 1)
    return _at(call, 1, lambda one: one.roll(1, 0))


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


# --- Losses ---------------------------------------------------------------------------------------


@FAULTS.fault(
    "nll_loss_backward mse_loss_backward smooth_l1_loss_backward huber_loss_backward",
    **_ROUNDED,
)
def gradient_of_the_loss_in_e5m2(call: Call) -> Any:
    """The result is stored with two bits behind the point."""
    value = call.result()
    return call.instead(value.to(torch.float8_e5m2).to(value.dtype))
