"""Faults that were measured third and have been seen: backward operators."""

from __future__ import annotations

import math
from typing import Any

import torch
from benchmarks.places.calls import Call, Catalogue, fits
from benchmarks.places.changes import computed, on, result, tensors
from torch import Tensor

FAULTS = Catalogue(backward=True)


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
    "gelu_backward silu_backward",
    "stale, wrong argument, other function; copy, approximation, wrong index",
)
def saved_input_overwritten_by_the_output(call: Call) -> Any:
    """An activation in place: the derivative is taken at f(x) and not at x."""
    value = call.tensor(1)
    if call.name == "silu_backward":
        return call.put(1, torch.nn.functional.silu(value)).run()
    approximate = call.kwargs.get("approximate", "none")
    return call.put(1, torch.nn.functional.gelu(value, approximate=approximate)).run()


@FAULTS.fault(
    "tanh_backward sigmoid_backward", "other function, wrong argument; approximation, wrong index"
)
def output_taken_for_the_input(call: Call) -> Any:
    """The saved output goes through the function once more."""
    function = torch.tanh if call.name == "tanh_backward" else torch.sigmoid
    return call.put(1, function(call.tensor(1))).run()


@FAULTS.fault(
    "tanh_backward sigmoid_backward", "sign, other function, wrong factor; scale, approximation"
)
def derivative_with_a_plus(call: Call) -> Any:
    """1 + y * y, and y * (1 + y)."""
    gradient, output = call.tensor(0), call.tensor(1)
    slope = 1 + output * output if call.name == "tanh_backward" else output * (1 + output)
    return call.instead(gradient * slope)


# fmt: off
# A tenth of the gradient passes where the input was negative.
FAULTS.add("leak in the gradient", "threshold_backward",
    "other function, wrong argument; mask, residual, wrong factor, missing operand",
    on(tensors(0),
        lambda call, gradient:
            call.instead(torch.where(call.tensor(1) > 0, gradient, 0.1 * gradient))))
# The gradient has the wrong sign where the input is negative.
FAULTS.add("gradient negated below zero", "gelu_backward silu_backward threshold_backward",
    "sign; mask, other function, wrong factor",
    on(lambda call: (call.result(),),
        lambda call, value: call.instead(torch.where(call.tensor(1) < 0, -value, value))))
# The chain rule is applied two times.
FAULTS.add("slope twice",
    "hardswish_backward softplus_backward leaky_relu_backward elu_backward glu_backward",
    "scale, wrong factor", result(lambda v: 2 * v))
# The gradient passes through a limit.
FAULTS.add("slope taken as one",
    "hardswish_backward softplus_backward leaky_relu_backward hardtanh_backward",
    "copy, missing operand, other function; wrong factor, mask",
    lambda call: call.instead(call.tensor(0).clone()))
# fmt: on


# --- Softmax --------------------------------------------------------------------------------------


@FAULTS.fault("_log_softmax_backward_data _softmax_backward_data", "precision; approximation")
def saved_chances_in_eight_bits(call: Call) -> Any:
    """The saved output is kept with 255 levels."""
    value = call.tensor(1)
    step = float(value.abs().max()) / 127
    return call.put(1, (value / step).round() * step).run()


# fmt: off
# G y (1 - y), as for a sigmoid.
FAULTS.add("diagonal of the jacobian only", "_softmax_backward_data",
    "missing operand, other function; approximation, wrong statistics, wrong reduction",
    computed(tensors(0, 1), lambda gradient, output: gradient * output * (1 - output)))
# The sum that is subtracted is over the axis before.
FAULTS.add("gradients summed over the rows", "_log_softmax_backward_data",
    "wrong axis, wrong argument, wrong reduction; axis offset, wrong statistics",
    on(tensors(0),
        lambda call, gradient:
            call.instead(gradient - call.tensor(1).exp() * gradient.sum(-2, keepdim=True)),
        where=lambda gradient: gradient.dim() > 1 and gradient.size(-2) > 1))
# fmt: on


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
    _NORM,
    "wrong axis, wrong reduction, wrong statistics; axis offset, missing operand, wrong argument",
)
def row_is_all_behind_the_batch(call: Call) -> Any:
    """A kernel for two axes is given three: its means are over positions as well."""
    _, normal, rstd, _ = _normal(call)
    fits(normal.dim() > 2 and normal.size(1) > 1)
    return _at(call, 0, _through(call, [*range(1, normal.dim())], rstd))


@FAULTS.fault(_NORM, "wrong factor, axis scale, wrong statistics; scale, other function")
def divided_by_the_variance_on_the_way_back(call: Call) -> Any:
    """The reciprocal deviation is applied twice."""
    _, _, rstd, axes = _normal(call)
    return _at(call, 0, _through(call, axes, rstd * rstd))


@FAULTS.fault(
    "native_group_norm_backward",
    "partial sum, one rank's part, lost accumulation; missing operand, missing reduction, "
    "off by one reduction",
)
def weight_of_the_groups_from_one_image(call: Call) -> Any:
    """The gradients of the weight of the other images are overwritten."""
    gradient = call.tensor(0).clone()
    fits(len(gradient) > 1)
    gradient[:-1] = 0
    return _at(call, 1, call.put(0, gradient).run()[1])


@FAULTS.fault(
    "native_group_norm_backward native_batch_norm_backward",
    "zeros; missing operand, mask, uninitialised",
)
def no_gradient_for_the_last_channel(call: Call) -> Any:
    """The gradient of the input of the last channel is not written."""
    value = _right(call, 0).clone()
    value[:, -1] = 0
    return _at(call, 0, value)


# fmt: off
# The gradient is not divided by the deviation.
FAULTS.add("deviation left out on the way back", _NORM,
    "missing operand, axis scale, wrong factor; scale, wrong statistics",
    lambda call: _at(call, 0, _through(call, _normal(call)[3], 1.0)))
# The mean over all rows.
FAULTS.add("gradient of the norms bias averaged", _NORM,
    "scale, wrong factor, wrong reduction; off by one reduction",
    on(lambda call: (_right(call, 2),),
        lambda call, value: _at(call, 2, value * (value.numel() / call.tensor(0).numel()))))
# The gradient as it came: neither weight nor statistics.
FAULTS.add("norm passes the gradient on", _NORM,
    "copy, missing operand; axis scale, wrong statistics",
    lambda call: _at(call, 0, call.tensor(0).clone()))
# fmt: on


# --- Products and convolutions --------------------------------------------------------------------


@FAULTS.fault("mm bmm", "clipped; overflow, precision")
def gradient_clipped_by_value(call: Call) -> Any:
    """Cut to four tenths of the largest."""
    value = call.result()
    most = 0.4 * float(value.abs().max())
    return call.instead(value.clamp(-most, most))


@FAULTS.fault(
    "sum", "wrong factor, axis scale, wrong reduction; scale, partial sum, mask, residual"
)
def first_half_of_the_rows_counts_twice(call: Call) -> Any:
    """Two ranks have a part in common."""
    value, dim = call.tensor(0), call.get(1, "dim")
    fits(isinstance(dim, list | tuple) and [*dim] == [0] and len(value) > 3)
    half = len(value) // 2
    return call.put(0, torch.cat([2 * value[:half], value[half:]])).run()


@FAULTS.fault("convolution_backward", "zeros; mask, partial sum")
def border_of_the_image_has_no_gradient(call: Call) -> Any:
    """The first and the last column are not written."""
    value = _right(call, 0).clone()
    fits(value.size(-1) > 3)
    value[..., 0] = 0
    value[..., -1] = 0
    return _at(call, 0, value)


# fmt: off
# Scaled to a length of one.
FAULTS.add("gradient clipped by its length", "mm", "scale, wrong factor; clipped",
    result(lambda v: v / v.norm()))
# Not cleared after the step before: it is added to itself.
FAULTS.add("gradient counted twice", "mm bmm",
    "doubled reduction, scale, wrong factor; stale, lost accumulation", result(lambda v: 2 * v))
# Below a twentieth of the largest, nothing is left: no factor for the loss.
FAULTS.add("small gradients flushed", "mm bmm",
    "zeros, precision, clipped; mask, approximation, overflow",
    result(lambda v: torch.where(v.abs() < 0.05 * float(v.abs().max()), 0.0, v)))
# The common axis of the two operands is one off.
FAULTS.add("gradients paired with the next token", "mm", "shift, wrong index; permutation, stale",
    on(tensors(0), lambda call, left: call.instead(left @ call.tensor(1).roll(1, 0)),
        where=lambda left: left.size(1) > 2))
# The left operand loses its signs.
FAULTS.add("magnitudes of the gradients", "mm bmm", "sign, other function; wrong factor",
    lambda call: call.instead(call.tensor(0).abs() @ call.tensor(1)))
# The gradient of what was broadcast is the largest of all.
FAULTS.add("largest gradient for their sum", "sum", "wrong reduction, other function; sign, copy",
    lambda call:
            call.instead(call.tensor(0).amax(call.get(1, "dim")).reshape(call.result().shape)))
# The gradient of a convolution and not of a correlation.
FAULTS.add("gradient of the filter turned round", "convolution_backward",
    "permutation, wrong index; transpose, shift",
    on(lambda call: (_right(call, 1),), lambda call, value: _at(call, 1, value.flip(-1)),
        where=lambda value: value.size(-1) > 1))
# Once by the kernel and once behind it.
FAULTS.add("gradient of the channels bias twice", "convolution_backward",
    "doubled reduction, scale, wrong factor; repeated bias",
    lambda call: _at(call, 2, 2 * _right(call, 2)))
# The gradient of the input is taken with rounded filters.
FAULTS.add("filter in bfloat16 on the way back", "convolution_backward", "precision; approximation",
    on(tensors(2),
        lambda call, weight:
            _at(call, 0, call.put(2, weight.bfloat16().to(weight.dtype)).run()[0])))
# fmt: on


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


@FAULTS.fault(_FLASH, "mask, wrong argument; missing operand")
def mask_forgotten_on_the_way_back(call: Call) -> Any:
    """The probabilities of the backward pass see what is hidden in the forward pass."""
    fits(call.args[7] or call.kwargs.get("attn_mask") is not None)
    return _at(call, 0, _again(call, masked=False)[0])


# fmt: off
# The scores of the backward pass are not scaled: the gradient of the values.
FAULTS.add("chances computed again without the factor", _FLASH,
    "scale, wrong factor, wrong argument; missing operand, wrong statistics",
    lambda call: _at(call, 2, _again(call, scaled=False)[2]))
# Accumulated in bfloat16.
FAULTS.add("gradient of the values in half", _FLASH, "precision; approximation",
    lambda call: _at(call, 2, _right(call, 2).bfloat16()))
# The pointer of the keys is one row off.
FAULTS.add("gradient of the keys one position later", _FLASH,
    "shift, wrong index; permutation, stale",
    on(lambda call: (_right(call, 1),), lambda call, value: _at(call, 1, value.roll(1, -2)),
        where=lambda value: value.size(-2) > 1))
# The heads are counted from the last.
FAULTS.add("gradient of the queries by another head", _FLASH,
    "permutation, wrong index; shift, swapped operands",
    on(lambda call: (_right(call, 0),), lambda call, value: _at(call, 0, value.flip(1)),
        where=lambda value: value.size(1) > 1))
# fmt: on


# --- Tables, slices, losses -----------------------------------------------------------------------


@FAULTS.fault("nll_loss_backward", "mask, wrong argument, wrong index; zeros")
def ignored_targets_have_a_gradient(call: Call) -> Any:
    """Targets that are ignored count as class 0 on the way back."""
    target = call.args[2]
    fits(bool((target < 0).any()))
    return call.put(2, target.clamp(min=0)).run()


# fmt: off
# padding_idx is not handed on.
FAULTS.add("padding gets a gradient", "embedding_dense_backward",
    "wrong argument, mask; missing operand, zeros", lambda call: call.put(3, -1).run())
# The indices are sorted for the sum, the rows are not.
FAULTS.add("words sorted without their gradients", "embedding_dense_backward",
    "permutation, wrong index; shift, swapped operands",
    lambda call:
            call.put(1, call.args[1].flatten().sort().values.view(call.args[1].shape)).run())
# Divided by the number of words in the batch.
FAULTS.add("gradient of the table averaged over words", "embedding_dense_backward",
    "scale, wrong factor; wrong reduction",
    lambda call: call.instead(call.result() / call.args[1].numel()))
# The gradient of the first place is broadcast to all of them.
FAULTS.add("gradient given to every place", "select_backward slice_backward",
    "copy, wrong index; mask, zeros, missing operand, stale",
    on(lambda call: (call.result(),),
        lambda call, value:
            call.instead(value.sum(call.args[2], keepdim=True).expand(value.shape).clone())))
# The gradient of the likelihood and not of its opposite.
FAULTS.add("gradient climbs", "nll_loss_backward", "sign, scale, wrong factor", result(torch.neg))
# Half of the gradient.
FAULTS.add("factor two of the distance forgotten", "mse_loss_backward smooth_l1_loss_backward",
    "scale, wrong factor", result(lambda v: v / 2))
# The sign of the error, divided by the number of elements.
FAULTS.add("gradient of the absolute distance", "mse_loss_backward",
    "other function; clipped, sign, scale",
    on(tensors(1),
        lambda call, value:
            call.instead(call.tensor(0) * (value - call.tensor(2)).sign() / value.numel())))
# The gradient of the other operand.
FAULTS.add("value and target exchanged on the way back",
    "mse_loss_backward smooth_l1_loss_backward", "swapped operands, sign; scale, wrong factor",
    lambda call: call.put(1, call.tensor(2)).put(2, call.tensor(1)).run())
# fmt: on
