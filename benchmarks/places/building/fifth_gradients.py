"""Faults that were measured fifth and have been seen: backward operators."""

from __future__ import annotations

from typing import Any

import torch
from benchmarks.places.calls import Call, Catalogue, fits
from benchmarks.places.changes import computed, even, longer, on, operand, result, tensors
from benchmarks.places.parts import replace_result_at
from torch import Tensor

FAULTS = Catalogue(backward=True)


# --- Activations ----------------------------------------------------------------------------------

_BY_INPUT = "gelu_backward silu_backward"


def _gate(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """Gradient, the gate f(x) / x, and x times the derivative of the gate."""
    gradient, value = call.tensor(0), call.tensor(1)
    if call.name == "silu_backward":
        gate = value.sigmoid()
        return gradient, gate, value * gate * (1 - gate)
    gate = 0.5 * (1 + (value / 2**0.5).erf())
    return gradient, gate, value * (-value.square() / 2).exp() / (2 * torch.pi) ** 0.5


@FAULTS.fault("gelu_backward", "approximation, other function; wrong argument")
def derivative_of_the_sigmoid_form(call: Call) -> Any:
    """Of x sigmoid(1.702 x)."""
    gradient, value = call.tensor(0), call.tensor(1)
    gate = (1.702 * value).sigmoid()
    return call.instead(gradient * (gate + 1.702 * value * gate * (1 - gate)))


@FAULTS.fault("sigmoid_backward tanh_backward", "other function, wrong argument; wrong factor")
def derivatives_of_sigmoid_and_tanh_exchanged(call: Call) -> Any:
    """1 - y^2 for y (1 - y), and the other way round."""
    gradient, result = call.tensor(0), call.tensor(1)
    if call.name == "sigmoid_backward":
        return call.instead(gradient * (1 - result.square()))
    return call.instead(gradient * result * (1 - result))


@FAULTS.fault("glu_backward", "missing operand, other function, wrong factor; mask")
def slope_of_the_gate_without_its_complement(call: Call) -> Any:
    """G a s for g a s (1 - s)."""
    gradient, value, dim = call.tensor(0), call.tensor(1), call.args[2]
    left, right = value.chunk(2, dim)
    gate = right.sigmoid()
    return call.instead(torch.cat([gradient * gate, gradient * left * gate], dim))


# fmt: off
# The gate less x times its derivative.
FAULTS.add("second term of the derivative subtracted", _BY_INPUT,
    "other function, sign, wrong factor; missing operand",
    computed(_gate, lambda gradient, gate, rest: gradient * (gate - rest)))
# A factor of two that belongs to a square.
FAULTS.add("second term of the derivative doubled", _BY_INPUT,
    "other function, wrong factor; missing operand, scale",
    computed(_gate, lambda gradient, gate, rest: gradient * (gate + 2 * rest)))
# The slope is limited.
FAULTS.add("derivative between zero and one", _BY_INPUT,
    "clipped, other function; approximation, mask",
    computed(_gate, lambda gradient, gate, rest: gradient * (gate + rest).clamp(0, 1)))
# The gradient times f(x).
FAULTS.add("value for the derivative", _BY_INPUT, "other function, wrong factor; missing operand",
    on(_gate, lambda call, gradient, gate, *_:
            call.instead(gradient * gate * call.tensor(1))))
# The sign of the gradient is lost.
FAULTS.add("gradient of the activation negated",
    "sigmoid_backward tanh_backward threshold_backward", "scale, sign, wrong factor",
    result(torch.neg))
# The upper limit of another activation.
FAULTS.add("gradient stopped above one", "threshold_backward",
    "mask, other function, zeros; clipped, wrong argument",
    lambda call: call.instead(call.result() * (call.tensor(1) < 1)))
# The gradient where the input is positive.
FAULTS.add("softplus passes like a relu", "softplus_backward",
    "approximation, other function; mask, wrong argument",
    lambda call: call.instead(call.tensor(0) * (call.tensor(1) > 0)))
# A similar activation.
FAULTS.add("derivative of silu for mish", "mish_backward",
    "approximation, other function; wrong argument",
    lambda call: call.instead(torch.ops.aten.silu_backward(call.tensor(0), call.tensor(1))))
# 0.01 for what was given.
FAULTS.add("default slope on the way back", "leaky_relu_backward",
    "wrong argument, wrong factor; mask, scale", lambda call: call.put(2, 0.01).run())
# No gradient below zero, as of a relu.
FAULTS.add("limits stop negative inputs",
    "hardswish_backward hardtanh_backward hardsigmoid_backward",
    "constant, mask, zeros; clipped, missing operand",
    lambda call: call.instead(call.result() * (call.tensor(1) > 0)))
# The second result is not written.
FAULTS.add("slopes get no gradient", "_prelu_kernel_backward",
    "constant, missing operand, zeros; lost accumulation, uninitialised",
    lambda call: replace_result_at(call, 1, torch.zeros_like))
# fmt: on


# --- Softmax, attention ---------------------------------------------------------------------------


_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu_backward"


@FAULTS.fault(_ATTENTION, "permutation, shift, wrong index; copy, wrong rank's shard")
def gradient_of_the_values_of_the_next_head(call: Call) -> Any:
    """The heads of the values are one off."""
    fits(call.tensor(3).size(1) > 1)
    return replace_result_at(call, 2, lambda one: one.roll(-1, 1))


# fmt: off
# The pointer to the sums of the rows is one too far.
FAULTS.add("product of the next row subtracted", "_softmax_backward_data",
    "axis offset, shift, wrong index; offset, permutation, stale",
    computed(tensors(0, 1),
        lambda gradient, chances:
            chances * (gradient - (gradient * chances).sum(-1, keepdim=True).roll(-1, -2)),
        where=lambda _, chances: chances.dim() > 1 and chances.size(-2) > 1))
# y^2 (g - sum(g y)).
FAULTS.add("chances squared on the way back", "_softmax_backward_data",
    "other function, wrong factor; missing operand",
    lambda call: call.instead(call.result() * call.tensor(1)))
# Half of the gradient.
FAULTS.add("temperature applied on the way back", "_softmax_backward_data",
    "scale, wrong factor; wrong argument", result(lambda v: v / 2))
# G - y sum(g) / 2.
FAULTS.add("half of the chances subtracted", "_log_softmax_backward_data",
    "other function, wrong factor; missing operand, offset, scale",
    lambda call: call.instead((call.result() + call.tensor(0)) / 2))
# The saved result is read one row too far.
FAULTS.add("chances of the next row on the way back", "_log_softmax_backward_data",
    "permutation, shift, wrong index; copy", operand(1, lambda v: v.roll(-1, 0), where=longer(0)))
# The factor of the scores once more.
FAULTS.add("gradient of the query scaled twice", _ATTENTION, "scale, wrong factor; wrong argument",
    lambda call:
            replace_result_at(call, 0, lambda one: one * call.tensor(1).size(-1) ** (-0.5)))
# Divided by the number of queries.
FAULTS.add("gradient of the values averaged", _ATTENTION,
    "scale, wrong factor, wrong reduction; missing operand",
    lambda call: replace_result_at(call, 2, lambda one: one / call.tensor(1).size(-2)))
# No gradient of the keys, as of a cache.
FAULTS.add("keys taken for constants", _ATTENTION,
    "constant, missing operand, zeros; mask, uninitialised",
    lambda call: replace_result_at(call, 1, torch.zeros_like))
# fmt: on


# --- Norms ----------------------------------------------------------------------------------------


def _normal(call: Call) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradient, normal values, reciprocal deviation, weight."""
    gradient, value, weight = call.tensor(0), call.tensor(1), call.tensor(5)
    fits(weight.dim() == 1)
    return gradient, (value - call.tensor(3)) * call.tensor(4), call.tensor(4), weight


@FAULTS.fault(
    "native_layer_norm_backward",
    "axis scale, other function, wrong factor; scale, wrong statistics",
)
def weight_applied_behind_the_means(call: Call) -> Any:
    """The means are those of the gradient without the weight."""
    gradient, normal, inverse, weight = _normal(call)
    mean = gradient.mean(-1, keepdim=True)
    product = (gradient * normal).mean(-1, keepdim=True)
    return replace_result_at(
        call, 0, lambda _: weight * inverse * (gradient - mean - normal * product)
    )


@FAULTS.fault(
    "native_layer_norm_backward",
    "axis scale, missing operand, other function, wrong factor; scale, wrong statistics",
)
def deviation_missing_in_the_gradient_of_the_weight(call: Call) -> Any:
    """The input is centred for it and not divided."""
    gradient, value = call.tensor(0), call.tensor(1)
    centred = (value - call.tensor(3)) * gradient
    return replace_result_at(
        call, 1, lambda one: centred.flatten(0, -2).sum(0) if one.dim() == 1 else one
    )


@FAULTS.fault("native_layer_norm_backward", "swapped operands, wrong index; permutation")
def gradients_of_weight_and_bias_exchanged(call: Call) -> Any:
    """The order of the results."""
    results = list(call.run())
    results[1], results[2] = results[2], results[1]
    return tuple(results)


@FAULTS.fault(
    "native_layer_norm_backward",
    "missing operand, other function, wrong factor; axis offset, scale, wrong statistics",
)
def means_of_the_row_halved(call: Call) -> Any:
    """Both means over the row are divided by twice its length."""
    gradient, normal, inverse, weight = _normal(call)
    inner = gradient * weight
    mean = inner.mean(-1, keepdim=True) / 2
    product = (inner * normal).mean(-1, keepdim=True) / 2
    return replace_result_at(call, 0, lambda _: inverse * (inner - mean - normal * product))


@FAULTS.fault(
    "native_batch_norm_backward",
    "axis scale, missing operand, wrong factor; scale, wrong statistics",
)
def channels_not_divided_by_their_deviation(call: Call) -> Any:
    """The weight times the gradient."""
    fits(not call.args[7])
    weight = call.tensor(2)
    return replace_result_at(
        call, 0, lambda one: call.tensor(0) * weight.view(1, -1, *[1] * (one.dim() - 2))
    )


@FAULTS.fault(
    "native_batch_norm_backward native_group_norm_backward",
    "scale, wrong factor, wrong reduction; axis scale, missing operand",
)
def bias_of_the_channels_averaged(call: Call) -> Any:
    """The gradient of the bias is divided by the number of images."""
    fits(call.tensor(0).size(0) > 1)
    return replace_result_at(call, 2, lambda one: one / call.tensor(0).size(0))


@FAULTS.fault(
    "native_batch_norm_backward native_group_norm_backward",
    "mask, uninitialised, zeros; constant, missing operand, one rank's part",
)
def weights_of_the_second_half_of_the_channels_empty(call: Call) -> Any:
    """The grid covers one half of the channels."""
    half = call.tensor(0).size(1) // 2
    return replace_result_at(call, 1, lambda one: torch.cat([one[:half], 0 * one[half:]]))


# fmt: off
# The kernel for residual and norm adds the gradient as it came.
FAULTS.add("gradient of the residual added here", "native_layer_norm_backward",
    "residual; axis offset, offset, other function",
    lambda call: replace_result_at(call, 0, lambda one: one + call.tensor(0)))
# Stored in float16.
FAULTS.add("gradient of the normed input in half", "native_layer_norm_backward",
    "precision; approximation",
    lambda call: replace_result_at(call, 0, lambda one: one.half().to(one.dtype)))
# fmt: on


# --- Products -------------------------------------------------------------------------------------


@FAULTS.fault("mm", "mask, one rank's part, uninitialised, zeros; constant, missing operand")
def columns_of_the_other_rank_not_gathered(call: Call) -> Any:
    """The second half of the columns stays empty."""
    value = call.result().clone()
    fits(value.size(-1) > 1)
    value[:, value.size(-1) // 2 :] = 0
    return call.instead(value)


@FAULTS.fault("mm bmm", "precision; approximation")
def gradient_in_steps_of_its_127th(call: Call) -> Any:
    """Integers of eight bits with one step, for sending."""
    value = call.result()
    step = value.abs().max() / 127
    return call.instead((value / step).round() * step)


@FAULTS.fault("mm", "nonfinite, overflow; mask, uninitialised")
def largest_row_of_the_gradient_infinite(call: Call) -> Any:
    """The row with the largest element has overflown."""
    value = call.result().clone()
    row = int(value.abs().amax(1).argmax())
    value[row] = value[row].sign() * torch.inf
    return call.instead(value)


@FAULTS.fault("sum", "mask, partial sum, wrong index; off by one reduction, one rank's part")
def even_rows_summed(call: Call) -> Any:
    """A stride of two along the rows."""
    value, dims = call.tensor(0), call.args[1]
    fits(list(dims) == [0] and value.size(0) > 2)
    even = (torch.arange(value.size(0)) % 2 == 0).to(value.dtype)
    return call.put(0, value * even.view(-1, *[1] * (value.dim() - 1))).run()


@FAULTS.fault("where", "copy, mask, missing operand; other function, zeros")
def gradient_of_both_branches(call: Call) -> Any:
    """The gradient is not stopped where the other branch was taken."""
    _, left, right = call.args[:3]
    result = call.result()
    moving = left if isinstance(left, Tensor) and left.numel() == result.numel() else right
    fits(isinstance(moving, Tensor) and moving.numel() == result.numel())
    return call.instead(moving.expand(result.shape))


@FAULTS.fault("pow", "other function, wrong argument; axis scale, scale")
def power_of_the_derivative_one_too_high(call: Call) -> Any:
    """x^n for x^(n - 1)."""
    number = call.args[1]
    fits(isinstance(number, int | float))
    return call.put(1, number + 1).run()


# fmt: off
# 1024 times the gradient.
FAULTS.add("loss scale not undone", "mm", "scale, wrong factor", result(lambda v: 1024 * v))
# A stride of two along the common axis.
FAULTS.add("odd tokens not in the gradient", "mm bmm",
    "mask, partial sum, wrong index; off by one reduction, one rank's part",
    operand(0, lambda v: v * (torch.arange(v.size(-1)) % 2 == 0).to(v.dtype),
        where=longer(-1, 3)))
# The halves of the rows in the other order.
FAULTS.add("shards of the gradient exchanged", "mm",
    "permutation, shift, wrong index, wrong rank's shard",
    result(lambda v: v.roll(v.size(0) // 2, 0), where=even(0)))
# One bit for each of its elements.
FAULTS.add("sign of the gradient", "mm", "other function, sign; approximation, constant, precision",
    result(lambda v: v.sign() * v.abs().mean()))
# The mean of each row is subtracted.
FAULTS.add("gradient centred", "mm", "axis offset, offset; residual, wrong statistics",
    result(lambda v: v - v.mean(-1, keepdim=True), where=longer(-1)))
# The result is stored one matrix too early.
FAULTS.add("gradient of the next matrix", "bmm",
    "permutation, shift, wrong index; copy, wrong rank's shard",
    result(lambda v: v.roll(-1, 0), where=longer(0)))
# As of a factor that is broadcast: each matrix gets the sum of all.
FAULTS.add("gradients of all matrices summed", "bmm",
    "doubled reduction, residual, wrong reduction; copy, other function, scale",
    result(lambda v: v.sum(0, keepdim=True).expand(v.shape).clone(), where=longer(0)))
# The minus of a difference.
FAULTS.add("gradient of the bias negated", "sum", "scale, sign, wrong factor", result(torch.neg))
# What was kept for the backward pass was rounded.
FAULTS.add("saved factor in bfloat16", "mul", "precision; approximation",
    operand(1, lambda v: v.bfloat16().to(v.dtype)))
# fmt: on


# --- Tables, images -------------------------------------------------------------------------------


@FAULTS.fault(
    "embedding_dense_backward",
    "mask, one rank's part, partial sum; lost accumulation, missing reduction, zeros",
)
def words_of_the_first_example_only(call: Call) -> Any:
    """The other examples of the batch get no gradient."""
    gradient = call.tensor(0).clone()
    fits(gradient.dim() > 2 and gradient.size(0) > 1)
    gradient[1:] = 0
    return call.put(0, gradient).run()


@FAULTS.fault("embedding_dense_backward", "axis scale, scale, wrong factor; wrong argument")
def rows_divided_by_the_root_of_their_count(call: Call) -> Any:
    """Between the sum and the mean."""
    places, number = call.args[1], call.args[2]
    count = torch.bincount(places.flatten(), minlength=number).clamp(min=1)
    return call.instead(call.result() / count.sqrt().to(call.result().dtype)[:, None])


@FAULTS.fault("convolution_backward", "permutation, wrong index; shift, transpose")
def channels_of_the_image_gradient_reversed(call: Call) -> Any:
    """From the last channel to the first."""
    fits(call.tensor(1).size(1) > 1)
    return replace_result_at(call, 0, lambda one: one.flip(1))


@FAULTS.fault("convolution_backward", "mask, uninitialised, zeros; constant, missing operand")
def last_tap_has_no_gradient(call: Call) -> Any:
    """The loop over the width of the filter ends one too early."""
    fits(call.tensor(2).size(-1) > 1)
    return replace_result_at(call, 1, lambda one: torch.cat([one[..., :-1], 0 * one[..., -1:]], -1))


@FAULTS.fault("convolution_backward", "mask, off by one reduction, partial sum; wrong reduction")
def bias_gradient_without_the_last_pixels(call: Call) -> Any:
    """The last column of the image is not added."""
    gradient = call.tensor(0)
    fits(gradient.dim() > 2 and gradient.size(-1) > 1 and isinstance(call.run()[2], Tensor))
    dims = (0, *range(2, gradient.dim()))
    return replace_result_at(call, 2, lambda _: gradient[..., :-1].sum(dims))


@FAULTS.fault("max_pool2d_with_indices_backward", "shift, wrong index; copy, permutation")
def gradient_at_the_corner_of_the_window(call: Call) -> Any:
    """The position inside of the window is lost."""
    size = call.args[2][0]
    places, width = call.args[7], call.tensor(1).size(-1)
    row, column = places // width, places % width
    return call.put(7, row // size * size * width + column // size * size).run()


# fmt: off
# Gradients are read one position too early.
FAULTS.add("gradient of the word before", "embedding_dense_backward",
    "permutation, shift, wrong index; copy",
    operand(0, lambda v: v.roll(1, -2), where=lambda v: v.dim() > 2 and v.size(-2) > 1))
# Rows and columns are exchanged.
FAULTS.add("image gradient transposed", "convolution_backward",
    "permutation, transpose, wrong index; wrong axis",
    on(tensors(1), lambda call, _:
            replace_result_at(call, 0, lambda one: one.mT.contiguous()),
        where=lambda value: value.dim() == 4 and value.size(-1) == value.size(-2) > 1))
# Odd columns get nothing, even ones twice as much.
FAULTS.add("gradient of the pool to every second pixel", "avg_pool2d_backward",
    "axis scale, mask, wrong index, zeros; missing reduction, scale, wrong factor",
    result(lambda v: 2 * v * (torch.arange(v.size(-1)) % 2 == 0).to(v.dtype)))
# Two programs add the same corners.
FAULTS.add("gradient of the sampled image doubled", "grid_sampler_2d_backward",
    "doubled reduction, scale, wrong factor",
    lambda call: replace_result_at(call, 0, lambda one: 2 * one))
# The gradient of half of the squared distance.
FAULTS.add("difference not divided by the distance", "_cdist_backward",
    "missing operand, other function, wrong factor; scale", operand(4, torch.ones_like))
# Written from its end along the last axis.
FAULTS.add("gradient of the part reversed", "slice_backward select_backward",
    "permutation, wrong index; shift, sign", operand(0, lambda v: v.flip(-1), where=longer(-1)))
# Added to a buffer that has them already.
FAULTS.add("windows counted twice on the way back", "unfold_backward",
    "doubled reduction, scale, wrong factor; lost accumulation", result(lambda v: 2 * v))
# fmt: on


# --- Losses ---------------------------------------------------------------------------------------


@FAULTS.fault("nll_loss_backward", "scale, wrong factor, wrong statistics; wrong reduction")
def ignored_labels_counted_on_the_way_back(call: Call) -> Any:
    """Divided by the number of all labels."""
    labels, ignored = call.args[2], call.args[5]
    seen = int((labels != ignored).sum())
    fits(0 < seen < labels.numel())
    return call.instead(call.result() * seen / labels.numel())


@FAULTS.fault(
    "mse_loss_backward smooth_l1_loss_backward huber_loss_backward",
    "mask, uninitialised, zeros; constant, missing operand",
)
def last_example_of_the_loss_without_gradient(call: Call) -> Any:
    """The grid is one row too small."""
    value = call.result().clone()
    fits(value.dim() > 1 and value.size(0) > 1)
    value[-1] = 0
    return call.instead(value)


# fmt: off
# The labels are one row off.
FAULTS.add("label of the next row on the way back", "nll_loss_backward",
    "permutation, shift, wrong index; copy",
    lambda call: call.put(2, call.args[2].roll(-1, 0)).run())
# Cut to half of the largest.
FAULTS.add("gradient of far errors limited", "mse_loss_backward",
    "clipped; approximation, other function",
    result(lambda v: v.clamp(-v.abs().max() / 2, v.abs().max() / 2)))
# Times the number of elements.
FAULTS.add("loss not averaged on the way back",
    "soft_margin_loss_backward binary_cross_entropy_backward",
    "scale, wrong factor, wrong reduction; missing operand",
    lambda call: call.instead(call.result() * call.tensor(1).numel()))
# fmt: on
