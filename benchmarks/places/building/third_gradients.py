"""Faults that were measured third and have been seen: backward operators."""

from __future__ import annotations

import math
from typing import Any

import torch
from benchmarks.places.calls import Call, Catalogue, fits
from torch import Tensor

FAULTS = Catalogue()


def _at(call: Call, place: int, value: Tensor) -> Any:
    """All results, with another one at a place."""
    results = [*call.run()]
    fits(isinstance(results[place], Tensor) and value.shape == results[place].shape)
    results[place] = value.to(results[place].dtype)
    return tuple(results)


def _right(call: Call, place: int) -> Tensor:
    value = call.run()[place]
    fits(isinstance(value, Tensor))
    return value


# --- Activations ----------------------------------------------------------------------------------


@FAULTS.fault(
    "gelu_backward silu_backward", kinds=["stale", "wrong argument", "other function"],
    loose=["copy", "approximation", "wrong index"], backward=True,
)  # fmt: skip
def saved_input_overwritten_by_the_output(call: Call) -> Any:
    """An activation in place: the derivative is taken at f(x) and not at x."""
    value = call.tensor(1)
    if call.name == "silu_backward":
        return call.put(1, torch.nn.functional.silu(value)).run()
    approximate = call.kwargs.get("approximate", "none")
    return call.put(1, torch.nn.functional.gelu(value, approximate=approximate)).run()


@FAULTS.fault(
    "tanh_backward sigmoid_backward", kinds=["other function", "wrong argument"],
    loose=["approximation", "wrong index"], backward=True,
)  # fmt: skip
def output_taken_for_the_input(call: Call) -> Any:
    """The saved output goes through the function once more."""
    function = torch.tanh if call.name == "tanh_backward" else torch.sigmoid
    return call.put(1, function(call.tensor(1))).run()


@FAULTS.fault(
    "tanh_backward sigmoid_backward", kinds=["sign", "other function", "wrong factor"],
    loose=["scale", "approximation"], backward=True,
)  # fmt: skip
def derivative_with_a_plus(call: Call) -> Any:
    """1 + y * y, and y * (1 + y)."""
    gradient, output = call.tensor(0), call.tensor(1)
    slope = 1 + output * output if call.name == "tanh_backward" else output * (1 + output)
    return call.instead(gradient * slope)


@FAULTS.fault(
    "threshold_backward", kinds=["other function", "wrong argument"],
    loose=["mask", "residual", "wrong factor", "missing operand"], backward=True,
)  # fmt: skip
def leak_in_the_gradient(call: Call) -> Any:
    """A tenth of the gradient passes where the input was negative."""
    gradient = call.tensor(0)
    return call.instead(torch.where(call.tensor(1) > 0, gradient, 0.1 * gradient))


@FAULTS.fault(
    "gelu_backward silu_backward threshold_backward", kinds=["sign"],
    loose=["mask", "other function", "wrong factor"], backward=True,
)  # fmt: skip
def gradient_negated_below_zero(call: Call) -> Any:
    """The gradient has the wrong sign where the input is negative."""
    value = call.result()
    return call.instead(torch.where(call.tensor(1) < 0, -value, value))


@FAULTS.fault(
    "hardswish_backward softplus_backward leaky_relu_backward elu_backward glu_backward",
    kinds=["scale", "wrong factor"], backward=True,
)  # fmt: skip
def slope_twice(call: Call) -> Any:
    """The chain rule is applied two times."""
    return call.instead(2 * call.result())


@FAULTS.fault(
    "hardswish_backward softplus_backward leaky_relu_backward hardtanh_backward",
    kinds=["copy", "missing operand", "other function"], loose=["wrong factor", "mask"],
    backward=True,
)  # fmt: skip
def slope_taken_as_one(call: Call) -> Any:
    """The gradient passes through a limit."""
    return call.instead(call.tensor(0).clone())


# --- Softmax --------------------------------------------------------------------------------------


@FAULTS.fault(
    "_softmax_backward_data", kinds=["missing operand", "other function"],
    loose=["approximation", "wrong statistics", "wrong reduction"], backward=True,
)  # fmt: skip
def diagonal_of_the_jacobian_only(call: Call) -> Any:
    """G y (1 - y), as for a sigmoid."""
    gradient, output = call.tensor(0), call.tensor(1)
    return call.instead(gradient * output * (1 - output))


@FAULTS.fault(
    "_log_softmax_backward_data", kinds=["wrong axis", "wrong argument", "wrong reduction"],
    loose=["axis offset", "wrong statistics"], backward=True,
)  # fmt: skip
def gradients_summed_over_the_rows(call: Call) -> Any:
    """The sum that is subtracted is over the axis before."""
    gradient, output = call.tensor(0), call.tensor(1)
    fits(gradient.dim() > 1 and gradient.size(-2) > 1)
    return call.instead(gradient - output.exp() * gradient.sum(-2, keepdim=True))


@FAULTS.fault(
    "_log_softmax_backward_data _softmax_backward_data", kinds=["precision"],
    loose=["approximation"], backward=True,
)  # fmt: skip
def saved_chances_in_eight_bits(call: Call) -> Any:
    """The saved output is kept with 255 levels."""
    value = call.tensor(1)
    step = float(value.abs().max()) / 127
    return call.put(1, (value / step).round() * step).run()


# --- Norms ----------------------------------------------------------------------------------------

_NORM = "native_layer_norm_backward"


def _normal(call: Call) -> tuple[Tensor, Tensor, Tensor, list[int]]:
    """Weighted gradient, normal values, reciprocal deviation, axes of a row."""
    gradient, value, shape, mean, rstd, weight = call.args[:6]
    weighted = gradient if weight is None else gradient * weight
    return weighted, (value - mean) * rstd, rstd, [*range(-len(shape), 0)]


def _through(call: Call, axes: list[int], factor: Any) -> Tensor:
    weighted, normal, _, _ = _normal(call)
    inner = weighted - weighted.mean(axes, keepdim=True)
    return factor * (inner - normal * (weighted * normal).mean(axes, keepdim=True))


@FAULTS.fault(
    _NORM, kinds=["wrong axis", "wrong reduction", "wrong statistics"],
    loose=["axis offset", "missing operand", "wrong argument"], backward=True,
)  # fmt: skip
def row_is_all_behind_the_batch(call: Call) -> Any:
    """A kernel for two axes is given three: its means are over positions as well."""
    _, normal, rstd, _ = _normal(call)
    fits(normal.dim() > 2 and normal.size(1) > 1)
    return _at(call, 0, _through(call, [*range(1, normal.dim())], rstd))


@FAULTS.fault(
    _NORM, kinds=["wrong factor", "axis scale", "wrong statistics"],
    loose=["scale", "other function"], backward=True,
)  # fmt: skip
def divided_by_the_variance_on_the_way_back(call: Call) -> Any:
    """The reciprocal deviation is applied twice."""
    _, _, rstd, axes = _normal(call)
    return _at(call, 0, _through(call, axes, rstd * rstd))


@FAULTS.fault(
    _NORM, kinds=["missing operand", "axis scale", "wrong factor"],
    loose=["scale", "wrong statistics"], backward=True,
)  # fmt: skip
def deviation_left_out_on_the_way_back(call: Call) -> Any:
    """The gradient is not divided by the deviation."""
    axes = _normal(call)[3]
    return _at(call, 0, _through(call, axes, 1.0))


@FAULTS.fault(
    _NORM, kinds=["scale", "wrong factor", "wrong reduction"],
    loose=["off by one reduction"], backward=True,
)  # fmt: skip
def gradient_of_the_norms_bias_averaged(call: Call) -> Any:
    """The mean over all rows."""
    value = _right(call, 2)
    return _at(call, 2, value * (value.numel() / call.tensor(0).numel()))


@FAULTS.fault(
    _NORM, kinds=["copy", "missing operand"], loose=["axis scale", "wrong statistics"],
    backward=True,
)  # fmt: skip
def norm_passes_the_gradient_on(call: Call) -> Any:
    """The gradient as it came: neither weight nor statistics."""
    return _at(call, 0, call.tensor(0).clone())


@FAULTS.fault(
    "native_group_norm_backward", kinds=["partial sum", "one rank's part", "lost accumulation"],
    loose=["missing operand", "missing reduction", "off by one reduction"], backward=True,
)  # fmt: skip
def weight_of_the_groups_from_one_image(call: Call) -> Any:
    """The gradients of the weight of the other images are overwritten."""
    gradient = call.tensor(0).clone()
    fits(len(gradient) > 1)
    gradient[:-1] = 0
    return _at(call, 1, call.put(0, gradient).run()[1])


@FAULTS.fault(
    "native_group_norm_backward native_batch_norm_backward", kinds=["zeros"],
    loose=["missing operand", "mask", "uninitialised"], backward=True,
)  # fmt: skip
def no_gradient_for_the_last_channel(call: Call) -> Any:
    """The gradient of the input of the last channel is not written."""
    value = _right(call, 0).clone()
    value[:, -1] = 0
    return _at(call, 0, value)


# --- Products and convolutions --------------------------------------------------------------------


@FAULTS.fault("mm bmm", kinds=["clipped"], loose=["overflow", "precision"], backward=True)
def gradient_clipped_by_value(call: Call) -> Any:
    """Cut to four tenths of the largest."""
    value = call.result()
    most = 0.4 * float(value.abs().max())
    return call.instead(value.clamp(-most, most))


@FAULTS.fault("mm", kinds=["scale", "wrong factor"], loose=["clipped"], backward=True)
def gradient_clipped_by_its_length(call: Call) -> Any:
    """Scaled to a length of one."""
    value = call.result()
    return call.instead(value / value.norm())


@FAULTS.fault("mm bmm", kinds=["doubled reduction", "scale", "wrong factor"],
              loose=["stale", "lost accumulation"], backward=True)  # fmt: skip
def gradient_counted_twice(call: Call) -> Any:
    """Not cleared after the step before: it is added to itself."""
    return call.instead(2 * call.result())


@FAULTS.fault("mm bmm", kinds=["zeros", "precision", "clipped"],
              loose=["mask", "approximation", "overflow"], backward=True)  # fmt: skip
def small_gradients_flushed(call: Call) -> Any:
    """Below a twentieth of the largest, nothing is left: no factor for the loss."""
    value = call.result()
    least = 0.05 * float(value.abs().max())
    return call.instead(torch.where(value.abs() < least, 0.0, value))


@FAULTS.fault("mm", kinds=["shift", "wrong index"], loose=["permutation", "stale"], backward=True)
def gradients_paired_with_the_next_token(call: Call) -> Any:
    """The common axis of the two operands is one off."""
    left, right = call.tensor(0), call.tensor(1)
    fits(left.size(1) > 2)
    return call.instead(left @ right.roll(1, 0))


@FAULTS.fault("mm bmm", kinds=["sign", "other function"], loose=["wrong factor"], backward=True)
def magnitudes_of_the_gradients(call: Call) -> Any:
    """The left operand loses its signs."""
    return call.instead(call.tensor(0).abs() @ call.tensor(1))


@FAULTS.fault(
    "sum", kinds=["wrong factor", "axis scale", "wrong reduction"],
    loose=["scale", "partial sum", "mask", "residual"], backward=True,
)  # fmt: skip
def first_half_of_the_rows_counts_twice(call: Call) -> Any:
    """Two ranks have a part in common."""
    value, dim = call.tensor(0), call.get(1, "dim")
    fits(isinstance(dim, list | tuple) and [*dim] == [0] and len(value) > 3)
    half = len(value) // 2
    return call.put(0, torch.cat([2 * value[:half], value[half:]])).run()


@FAULTS.fault(
    "sum", kinds=["wrong reduction", "other function"], loose=["sign", "copy"], backward=True
)
def largest_gradient_for_their_sum(call: Call) -> Any:
    """The gradient of what was broadcast is the largest of all."""
    value, result = call.tensor(0), call.result()
    return call.instead(value.amax(call.get(1, "dim")).reshape(result.shape))


@FAULTS.fault("convolution_backward", kinds=["zeros"], loose=["mask", "partial sum"], backward=True)
def border_of_the_image_has_no_gradient(call: Call) -> Any:
    """The first and the last column are not written."""
    value = _right(call, 0).clone()
    fits(value.size(-1) > 3)
    value[..., 0] = 0
    value[..., -1] = 0
    return _at(call, 0, value)


@FAULTS.fault("convolution_backward", kinds=["permutation", "wrong index"],
              loose=["transpose", "shift"], backward=True)  # fmt: skip
def gradient_of_the_filter_turned_round(call: Call) -> Any:
    """The gradient of a convolution and not of a correlation."""
    value = _right(call, 1)
    fits(value.size(-1) > 1)
    return _at(call, 1, value.flip(-1))


@FAULTS.fault("convolution_backward", kinds=["doubled reduction", "scale", "wrong factor"],
              loose=["repeated bias"], backward=True)  # fmt: skip
def gradient_of_the_channels_bias_twice(call: Call) -> Any:
    """Once by the kernel and once behind it."""
    return _at(call, 2, 2 * _right(call, 2))


@FAULTS.fault("convolution_backward", kinds=["precision"], loose=["approximation"], backward=True)
def filter_in_bfloat16_on_the_way_back(call: Call) -> Any:
    """The gradient of the input is taken with rounded filters."""
    weight = call.tensor(2)
    return _at(call, 0, call.put(2, weight.bfloat16().to(weight.dtype)).run()[0])


# --- Attention ------------------------------------------------------------------------------------

_FLASH = "_scaled_dot_product_flash_attention_for_cpu_backward"


def _again(
    call: Call, *, masked: bool = True, scaled: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of attention, from probabilities that are computed again."""
    gradient, query, key, value = (call.tensor(i) for i in range(4))
    scale = call.kwargs.get("scale") or query.size(-1) ** -0.5
    scores = query @ key.mT * (scale if scaled else 1.0)
    if masked and call.args[7]:
        scores = scores + torch.full(scores.shape[-2:], -math.inf).triu(1)
    mask = call.kwargs.get("attn_mask")
    if masked and mask is not None:
        scores = scores + mask
    weights = scores.softmax(-1)
    inner = gradient @ value.mT
    inner = weights * (inner - (inner * weights).sum(-1, keepdim=True)) * scale
    return inner @ key, inner.mT @ query, weights.mT @ gradient


@FAULTS.fault(_FLASH, kinds=["mask", "wrong argument"], loose=["missing operand"], backward=True)
def mask_forgotten_on_the_way_back(call: Call) -> Any:
    """The probabilities of the backward pass see what is hidden in the forward pass."""
    fits(call.args[7] or call.kwargs.get("attn_mask") is not None)
    return _at(call, 0, _again(call, masked=False)[0])


@FAULTS.fault(_FLASH, kinds=["scale", "wrong factor", "wrong argument"],
              loose=["missing operand", "wrong statistics"], backward=True)  # fmt: skip
def chances_computed_again_without_the_factor(call: Call) -> Any:
    """The scores of the backward pass are not scaled: the gradient of the values."""
    return _at(call, 2, _again(call, scaled=False)[2])


@FAULTS.fault(_FLASH, kinds=["precision"], loose=["approximation"], backward=True)
def gradient_of_the_values_in_half(call: Call) -> Any:
    """Accumulated in bfloat16."""
    value = _right(call, 2)
    return _at(call, 2, value.bfloat16())


@FAULTS.fault(_FLASH, kinds=["shift", "wrong index"], loose=["permutation", "stale"], backward=True)
def gradient_of_the_keys_one_position_later(call: Call) -> Any:
    """The pointer of the keys is one row off."""
    value = _right(call, 1)
    fits(value.size(-2) > 1)
    return _at(call, 1, value.roll(1, -2))


@FAULTS.fault(_FLASH, kinds=["permutation", "wrong index"], loose=["shift", "swapped operands"],
              backward=True)  # fmt: skip
def gradient_of_the_queries_by_another_head(call: Call) -> Any:
    """The heads are counted from the last."""
    value = _right(call, 0)
    fits(value.size(1) > 1)
    return _at(call, 0, value.flip(1))


# --- Tables, slices, losses -----------------------------------------------------------------------


@FAULTS.fault("embedding_dense_backward", kinds=["wrong argument", "mask"],
              loose=["missing operand", "zeros"], backward=True)  # fmt: skip
def padding_gets_a_gradient(call: Call) -> Any:
    """padding_idx is not handed on."""
    return call.put(3, -1).run()


@FAULTS.fault("embedding_dense_backward", kinds=["permutation", "wrong index"],
              loose=["shift", "swapped operands"], backward=True)  # fmt: skip
def words_sorted_without_their_gradients(call: Call) -> Any:
    """The indices are sorted for the sum, the rows are not."""
    indices = call.args[1]
    return call.put(1, indices.flatten().sort().values.view(indices.shape)).run()


@FAULTS.fault("embedding_dense_backward", kinds=["scale", "wrong factor"],
              loose=["wrong reduction"], backward=True)  # fmt: skip
def gradient_of_the_table_averaged_over_words(call: Call) -> Any:
    """Divided by the number of words in the batch."""
    return call.instead(call.result() / call.args[1].numel())


@FAULTS.fault("select_backward slice_backward", kinds=["copy", "wrong index"],
              loose=["mask", "zeros", "missing operand", "stale"], backward=True)  # fmt: skip
def gradient_given_to_every_place(call: Call) -> Any:
    """The gradient of the first place is broadcast to all of them."""
    value, dim = call.result(), call.args[2]
    source = value.sum(dim, keepdim=True)
    return call.instead(source.expand(value.shape).clone())


@FAULTS.fault("nll_loss_backward", kinds=["mask", "wrong argument", "wrong index"],
              loose=["zeros"], backward=True)  # fmt: skip
def ignored_targets_have_a_gradient(call: Call) -> Any:
    """Targets that are ignored count as class 0 on the way back."""
    target = call.args[2]
    fits(bool((target < 0).any()))
    return call.put(2, target.clamp(min=0)).run()


@FAULTS.fault("nll_loss_backward", kinds=["sign", "scale", "wrong factor"], backward=True)
def gradient_climbs(call: Call) -> Any:
    """The gradient of the likelihood and not of its opposite."""
    return call.instead(-call.result())


@FAULTS.fault("mse_loss_backward smooth_l1_loss_backward", kinds=["scale", "wrong factor"],
              backward=True)  # fmt: skip
def factor_two_of_the_distance_forgotten(call: Call) -> Any:
    """Half of the gradient."""
    return call.instead(call.result() / 2)


@FAULTS.fault("mse_loss_backward", kinds=["other function"], loose=["clipped", "sign", "scale"],
              backward=True)  # fmt: skip
def gradient_of_the_absolute_distance(call: Call) -> Any:
    """The sign of the error, divided by the number of elements."""
    value, target = call.tensor(1), call.tensor(2)
    return call.instead(call.tensor(0) * (value - target).sign() / value.numel())


@FAULTS.fault("mse_loss_backward smooth_l1_loss_backward", kinds=["swapped operands", "sign"],
              loose=["scale", "wrong factor"], backward=True)  # fmt: skip
def value_and_target_exchanged_on_the_way_back(call: Call) -> Any:
    """The gradient of the other operand."""
    value, target = call.tensor(1), call.tensor(2)
    return call.put(1, target).put(2, value).run()
