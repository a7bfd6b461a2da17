"""Faults of the eleventh set: products, convolutions, pooling, resizing."""

from __future__ import annotations

from typing import Any

import torch
from benchmarks.places import words
from benchmarks.places.calls import Call, Catalogue, fits, with_gradient_of
from benchmarks.places.changes import longer, on, operand, result, rounded, tensors
from benchmarks.places.parts import (
    filters_of,
    image_of,
    layer_bias,
    layer_parts,
    layer_product,
    result_rows,
    round_to,
)
from torch import Tensor
from torch.nn import functional

FAULTS = Catalogue()
_WEIGHTED = "linear addmm mm"
_BATCHED = "bmm matmul"
_CONVOLUTIONS = "conv1d conv2d convolution"
_POOLS = "max_pool1d max_pool2d max_pool2d_with_indices avg_pool1d avg_pool2d adaptive_avg_pool2d"


# --- Products -------------------------------------------------------------------------------------


def _in_steps(value: Tensor, step: Tensor) -> Tensor:
    """The value as whole numbers of steps, with its own gradient."""
    fits(bool((step > 0).all()))
    return with_gradient_of(value, (value.detach() / step).round() * step)


def _moved(call: Call, places: Tensor) -> Any:
    """The result with its columns in another order."""
    return call.instead(call.result()[..., places])


@FAULTS.forward(
    "linear addmm", "missing bias, mask; missing operand, partial sum, zeros, offset, axis offset"
)
def bias_not_added_to_the_last_row(call: Call) -> Any:
    """The epilogue of the last tile of rows has no bias."""
    _, bias = layer_bias(call)
    value = result_rows(call)
    last = (torch.arange(value.size(-2)) == value.size(-2) - 1)[:, None]
    return call.instead(value - last * bias)


@FAULTS.forward(
    _WEIGHTED,
    "mask, partial sum, zeros; missing operand, wrong index, other function, "
    "wrong argument, wrong reduction",
)
def weight_taken_for_two_groups(call: Call) -> Any:
    """A grouped layer: each half of the input meets its own half of the columns only."""
    left, weight, bias = layer_parts(call)
    fits(min(weight.shape) > 3)
    rows, columns = (torch.arange(size) < size // 2 for size in weight.shape)
    return layer_product(call, left, weight * (rows[:, None] == columns), bias)


@FAULTS.forward(
    _WEIGHTED,
    "mask, zeros, partial sum; missing operand, other function, wrong argument, wrong reduction",
)
def weight_taken_for_a_triangle(call: Call) -> Any:
    """A routine for triangular matrices: what is below the diagonal of the weight is not read."""
    left, weight, bias = layer_parts(call)
    fits(min(weight.shape) > 2)
    return layer_product(call, left, weight.triu(), bias)


@FAULTS.forward(
    _WEIGHTED,
    "wrong index, copy; permutation, transpose, other function, wrong argument, stale, mask",
)
def weight_taken_for_a_symmetric_one(call: Call) -> Any:
    """Only the upper triangle of a square weight is read, and is mirrored."""
    left, weight, bias = layer_parts(call)
    fits(weight.size(0) == weight.size(1) and weight.size(0) > 2)
    return layer_product(call, left, weight.triu() + weight.triu(1).t(), bias)


@FAULTS.forward(_WEIGHTED, words.ROUNDED)
def weight_in_eight_levels_of_each_row(call: Call) -> Any:
    """Three bits for each number of the weight, with a step for each feature of the input."""
    left, weight, bias = layer_parts(call)
    step = weight.detach().abs().amax(1, keepdim=True) / 3.5
    return layer_product(call, left, _in_steps(weight, step), bias)


@FAULTS.forward(
    _WEIGHTED,
    "doubled reduction, wrong factor; wrong reduction, wrong index, stale, off by one reduction",
)
def last_feature_added_twice(call: Call) -> Any:
    """The tail of the common axis begins one too early."""
    left, weight, bias = layer_parts(call)
    fits(left.size(-1) > 2)
    times = 1 + (torch.arange(left.size(-1)) == left.size(-1) - 1).to(left.dtype)
    return layer_product(call, left * times, weight, bias)


@FAULTS.forward(_WEIGHTED, "residual; sign, other function, missing operand, wrong argument")
def input_subtracted_by_the_epilogue(call: Call) -> Any:
    """The residual is fused into a layer that has none, and with a minus."""
    left, weight, _ = layer_parts(call)
    fits(weight.size(0) == weight.size(1))
    return call.instead(call.result() - left)


@FAULTS.forward(_WEIGHTED, "axis scale, wrong factor; scale, wrong argument, other function")
def columns_of_the_weight_over_their_largest(call: Call) -> Any:
    """The weight was divided by the scales of its columns, and the result is not multiplied."""
    left, weight, bias = layer_parts(call)
    size = weight.detach().abs().amax(0, keepdim=True)
    fits(bool((size > 0).all()))
    return layer_product(call, left, weight / size, bias)


# fmt: off
# The factor of an embedding that shares its weight is applied behind the layer.
FAULTS.add("result times the root of the width", _WEIGHTED,
    "scale, wrong factor; axis scale, wrong argument",
    on(layer_parts, lambda call, left, *_:
            call.instead(call.result() * left.size(-1) ** 0.5)), backward=False)
# An alpha of 0.75 for one of 1; the bias is right.
FAULTS.add("product alone times three quarters", _WEIGHTED,
    "scale, wrong factor, wrong argument; axis scale",
    on(layer_parts,
        lambda call, left, weight, bias: layer_product(call, 0.75 * left, weight, bias)),
    backward=False)
# The bias is not gathered: the second half of its columns is zero.
FAULTS.add("bias of the first rank only", "linear addmm",
    "missing bias, mask, zeros, one rank's part; missing operand, partial sum, offset, "
    "axis offset, wrong argument",
    on(layer_bias,
        lambda call, place, bias:
            call.put(place, bias * (torch.arange(bias.numel()) < bias.numel() // 2), "bias").run()),
    backward=False)
# Gate and value stand side by side in the weight, and in the other order in the bias.
FAULTS.add("bias exchanged in pairs", "linear addmm",
    "permutation, wrong index; shift, wrong argument, axis offset, offset, swapped operands",
    on(layer_bias,
        lambda call, place, bias:
            call.put(place, bias.view(-1, 2).flip(-1).reshape(-1), "bias").run(),
        where=lambda _, bias: bias.numel() % 2 == 0), backward=False)
# The bias is stored with one digit behind the point.
FAULTS.add("bias in steps of a tenth", "linear addmm conv1d conv2d convolution", words.ROUNDED,
    on(layer_bias,
        lambda call, place, bias:
            call.put(place, _in_steps(bias, torch.tensor(0.1)), "bias").run()), backward=False)
# Eight ranks share the sum, and each of them adds the bias.
FAULTS.add("bias once on each of eight ranks", "linear addmm conv1d conv2d convolution",
    "wrong factor, scale, repeated bias, doubled reduction; axis offset, wrong argument, "
    "residual, offset",
    on(layer_bias, lambda call, place, bias: call.put(place, 8 * bias, "bias").run()),
    backward=False)
# Each row of the input has length one, as in a head for cosines.
FAULTS.add("input divided by its length", _WEIGHTED,
    "other function, axis scale, wrong factor; scale, wrong argument, wrong statistics",
    on(layer_parts,
        lambda call, left, weight, bias:
            layer_product(call, functional.normalize(left, dim=-1), weight, bias)), backward=False)
# The weight is limited to -0.02 and 0.02, its standard deviation when it was drawn.
FAULTS.add("weight cut at a fiftieth", _WEIGHTED,
    "clipped; other function, approximation, wrong argument, mask, zeros",
    on(layer_parts,
        lambda call, left, weight, bias:
            layer_product(call, left, weight.clamp(-0.02, 0.02), bias)), backward=False)
# The input goes through an integer type, and what is behind the point is lost.
FAULTS.add("input cast to whole numbers", _WEIGHTED,
    "precision, other function; approximation, wrong argument",
    on(layer_parts,
        lambda call, left, weight, bias:
            layer_product(call, with_gradient_of(left, left.detach().trunc()), weight, bias)),
    backward=False)
# The input is in the float8 of gradients.
FAULTS.add("input of the layer in e5m2", _WEIGHTED, words.ROUNDED,
    on(layer_parts,
        lambda call, left, weight, bias:
            layer_product(call, round_to(left, torch.float8_e5m2), weight, bias)), backward=False)
# The result is stored in float16 between two kernels.
FAULTS.add("result of the layer in half", _WEIGHTED, "precision; approximation, other function",
    result(rounded(torch.float16)), backward=False)
# The weight went through a text with two digits behind the point.
FAULTS.add("weight written with two digits", _WEIGHTED, words.ROUNDED,
    on(layer_parts,
        lambda call, left, weight, bias:
            layer_product(call, left, _in_steps(weight, torch.tensor(0.01)), bias)), backward=False)
# A gate's function is fused where there is none.
FAULTS.add("sigmoid in the epilogue", _WEIGHTED, "other function; clipped, approximation",
    result(torch.sigmoid), backward=False)
# Negative results are multiplied by 0.01.
FAULTS.add("leaky relu in the epilogue", _WEIGHTED,
    "other function; clipped, wrong factor, approximation",
    result(lambda v: functional.leaky_relu(v, 0.01)), backward=False)
# The activation of another model is fused behind the layer.
FAULTS.add("squared relu in the epilogue", _WEIGHTED, "other function; clipped, sign",
    result(lambda v: v.relu().square()), backward=False)
# Gates in the order of another library: input, forget, output, cell.
FAULTS.add("last two quarters of the columns exchanged", _WEIGHTED,
    "permutation, wrong index; swapped operands, shift, wrong rank's shard, transpose",
    on(lambda call: (call.result().size(-1),),
        lambda call, width:
            _moved(call, torch.arange(width).view(4, -1)[[0, 1, 3, 2]].reshape(-1)),
        where=lambda width: width % 4 == 0 and width > 4), backward=False)
# Each lane stores its columns side by side, and has computed every eighth of them.
FAULTS.add("columns dealt to eight lanes", _WEIGHTED,
    "permutation, wrong index, transpose; shift, wrong argument",
    on(lambda call: (call.result().size(-1),),
        lambda call, width: _moved(call, torch.arange(width).view(-1, 8).t().reshape(-1)),
        where=lambda width: width % 8 == 0 and width > 8), backward=False)
# The pointer to the rows of the input is one too far; the last row reads itself.
FAULTS.add("input of the next token", _WEIGHTED,
    "shift, wrong index; stale, copy, wrong argument, permutation",
    on(layer_parts,
        lambda call, left, weight, bias:
            layer_product(call, torch.cat([left[..., 1:, :], left[..., -1:, :]], -2), weight, bias),
        where=lambda left, *_: left.dim() > 1 and left.size(-2) > 2), backward=False)
# Of a vector of four columns, one is masked out.
FAULTS.add("third column of each four not stored", _WEIGHTED, words.EMPTY_IN_A_SUM,
    result(lambda v: v * (torch.arange(v.size(-1)) % 4 != 2), where=longer(-1, 3)), backward=False)
# The store begins with the second column.
FAULTS.add("first column of the layer not stored", _WEIGHTED, words.EMPTY_IN_A_SUM,
    result(lambda v: v * (torch.arange(v.size(-1)) > 0), where=longer(-1, 2)), backward=False)
# The accumulator is cleared after the first of four tiles; the bias is right.
FAULTS.add("first quarter of the features not added", _WEIGHTED,
    "partial sum, mask, lost accumulation; missing operand, wrong reduction, zeros, wrong index",
    on(layer_parts,
        lambda call, left, weight, bias:

    layer_product(call, left * (torch.arange(left.size(-1)) >= left.size(-1) // 4), weight, bias),
        where=lambda left, *_: left.size(-1) > 7), backward=False)
# Where two splits of the common axis meet, one feature belongs to neither.
FAULTS.add("middle feature not added", _WEIGHTED,
    "off by one reduction, partial sum, mask; missing operand, wrong index, zeros, "
    "wrong reduction",
    on(layer_parts,
        lambda call, left, weight, bias:

    layer_product(call, left * (torch.arange(left.size(-1)) != left.size(-1) // 2), weight, bias),
        where=lambda left, *_: left.size(-1) > 2), backward=False)
# The input is multiplied with itself first: the fusion has one square too many.
FAULTS.add("squares of the input", _WEIGHTED,
    "other function; sign, wrong factor, scale, wrong argument",
    on(layer_parts,
        lambda call, left, weight, bias: layer_product(call, left.square(), weight, bias)),
    backward=False)
# A hard tanh is fused behind a layer that has no activation.
FAULTS.add("result between minus one and one", _WEIGHTED, "clipped, other function; approximation",
    result(lambda v: v.clamp(-1, 1)), backward=False)
# The first step of a softmax is fused into the layer before it.
FAULTS.add("largest of each row subtracted", _WEIGHTED,
    "axis offset, other function; offset, residual, missing operand, wrong statistics",
    result(lambda v: v - v.amax(-1, keepdim=True), where=longer(-1)), backward=False)
# fmt: on


# --- Products of batches --------------------------------------------------------------------------


@FAULTS.fault("einsum", words.ROUNDED)
def both_operands_of_the_letters_in_bfloat16(call: Call) -> Any:
    """Both tensors have eight bits before they are multiplied."""
    text, *operands = call.args
    fits(isinstance(text, str) and len(operands) == 2)
    return call.instead(torch.einsum(text, *(round_to(one, torch.bfloat16) for one in operands)))


# fmt: off
# An alpha of one half.
FAULTS.add("products of the batch halved", _BATCHED,
    "scale, wrong factor; axis scale, wrong argument", result(lambda v: 0.5 * v), backward=False)
# The second operand is in float8; the first is right.
FAULTS.add("right factor in e4m3", _BATCHED, words.ROUNDED,
    lambda call:
            call.put(1, round_to(call.tensor(1), torch.float8_e4m3fn), "mat2", "other").run(),
    backward=False)
# Each matrix is stored in the place of the next one, the last one first.
FAULTS.add("products of the batch one late", _BATCHED, words.MOVED_SHARD,
    result(lambda v: v.roll(1, -3), where=longer(-3, 2)))
# The bound of the rows is one too small, in each matrix of the batch.
FAULTS.add("last row of each matrix not stored", _BATCHED, words.EMPTY_IN_A_SUM,
    result(lambda v: v * (torch.arange(v.size(-2)) < v.size(-2) - 1)[:, None],
        where=lambda v: v.dim() > 2 and v.size(-2) > 2))
# A pipelined loop over the common axis drops what it has loaded second.
FAULTS.add("second term of each product left out", _BATCHED,
    "off by one reduction, partial sum, mask; missing operand, wrong index, zeros, "
    "wrong reduction",
    on(tensors(0),
        lambda call, left: call.put(0, left * (torch.arange(left.size(-1)) != 1), "input").run(),
        where=lambda left: left.dim() > 2 and left.size(-1) > 3))
# Two rows of a register are stored in the other order.
FAULTS.add("rows of each matrix exchanged in pairs", _BATCHED,
    "permutation, wrong index; shift, swapped operands, wrong argument",
    result(lambda v: v.unflatten(-2, (-1, 2)).flip(-2).flatten(-3, -2),
        where=lambda v: v.dim() > 2 and v.size(-2) % 2 == 0 and v.size(-2) > 2))
# The mean over the common axis is taken from the second operand, and not added back.
FAULTS.add("right factor centred over its rows", _BATCHED,
    "wrong statistics, axis offset, residual; offset, wrong argument, other function, "
    "missing operand",
    on(tensors(1),
        lambda call, right:
            call.put(1, right - right.mean(-2, keepdim=True), "mat2", "other").run(),
        where=lambda right: right.dim() > 2 and right.size(-2) > 2))
# The first operand saturates at -0.5 and 0.5.
FAULTS.add("left factor cut at a half", _BATCHED, words.LIMITED,
    on(tensors(0), lambda call, left: call.put(0, left.clamp(-0.5, 0.5), "input").run(),
        where=lambda left: left.dim() > 2))
# The last axis of the result is stored one place too far, around the end.
FAULTS.add("sum of letters one column late", "einsum", words.MOVED,
    result(lambda v: v.roll(1, -1), where=lambda v: v.dim() > 1 and v.size(-1) > 2))
# The bound of the last axis of the result is one too small.
FAULTS.add("last letter not stored to its end", "einsum", words.EMPTY_IN_A_SUM,
    result(lambda v: v * (torch.arange(v.size(-1)) < v.size(-1) - 1),
        where=lambda v: v.dim() > 1 and v.size(-1) > 2))
# fmt: on


# --- Convolutions ---------------------------------------------------------------------------------


def _filtered(call: Call, weight: Tensor) -> Any:
    return call.put(1, weight, "weight").run()


@FAULTS.forward(
    "conv2d convolution", "permutation, wrong index; shift, transpose, wrong argument, wrong axis"
)
def filters_turned_by_a_quarter(call: Call) -> Any:
    """A port has axes in another order and another direction: filters are rotated."""
    weight = filters_of(call)
    fits(weight.dim() == 4 and weight.size(-1) == weight.size(-2) and weight.size(-1) > 1)
    return _filtered(call, torch.rot90(weight, 1, (-2, -1)).contiguous())


@FAULTS.forward(
    _CONVOLUTIONS,
    "partial sum, mask, zeros; missing operand, missing reduction, wrong reduction, approximation",
)
def centre_of_the_filter_only(call: Call) -> Any:
    """A convolution is taken for one with filters of a single tap."""
    weight = filters_of(call)
    fits(weight.size(-1) > 2 and weight[0, 0].numel() % 2 == 1)
    flat = weight.flatten(2)
    kept = torch.arange(flat.size(-1)) == flat.size(-1) // 2
    return _filtered(call, (flat * kept).view(weight.shape))


@FAULTS.forward(
    _CONVOLUTIONS,
    "off by one reduction, partial sum, mask; zeros, missing operand, wrong index, "
    "wrong reduction, approximation",
)
def very_first_tap_left_out(call: Call) -> Any:
    """The unrolled loop over the taps begins at one."""
    weight = filters_of(call)
    flat = weight.flatten(2)
    fits(flat.size(-1) > 2)
    return _filtered(call, (flat * (torch.arange(flat.size(-1)) > 0)).view(weight.shape))


@FAULTS.forward(
    _CONVOLUTIONS,
    "off by one reduction, partial sum, mask; zeros, missing operand, wrong index, wrong reduction",
)
def first_input_channel_not_added(call: Call) -> Any:
    """The loop over the channels of the input begins at one."""
    weight = filters_of(call)
    fits(weight.size(1) > 1)
    kept = (torch.arange(weight.size(1)) > 0).view(-1, *[1] * (weight.dim() - 2))
    return _filtered(call, weight * kept)


@FAULTS.forward(_CONVOLUTIONS, "precision; approximation, other function")
def channels_of_the_result_in_bfloat16(call: Call) -> Any:
    """The result of the convolution is stored with eight bits."""
    filters_of(call)
    return call.instead(round_to(call.result(), torch.bfloat16))


@FAULTS.forward(_CONVOLUTIONS, words.EMPTY_IN_A_SUM)
def last_channel_of_the_result_empty(call: Call) -> Any:
    """The grid over the channels is one too short."""
    filters_of(call)
    value = call.result()
    fits(value.size(1) > 2)
    kept = torch.arange(value.size(1)) < value.size(1) - 1
    return call.instead(value * kept.view(-1, *[1] * (value.dim() - 2)))


@FAULTS.forward(_CONVOLUTIONS, words.MOVED_SHARD)
def channels_of_the_result_two_late(call: Call) -> Any:
    """Each channel is stored two places too far, around the end."""
    filters_of(call)
    value = call.result()
    fits(value.size(1) > 4)
    return call.instead(value.roll(2, 1))


@FAULTS.forward(_CONVOLUTIONS, "other function; clipped, approximation")
def silu_fused_behind_the_filters(call: Call) -> Any:
    """An activation that the layer does not have."""
    filters_of(call)
    return call.instead(functional.silu(call.result()))


@FAULTS.forward(
    _CONVOLUTIONS,
    "other function; axis offset, wrong statistics, offset, axis scale, wrong factor, residual",
)
def each_channel_of_the_result_standardised(call: Call) -> Any:
    """A norm of each image and channel is fused behind the convolution."""
    filters_of(call)
    value = call.result()
    axes = tuple(range(2, value.dim()))
    fits(value[0, 0].numel() > 2)
    spread, mean = torch.var_mean(value, axes, correction=0, keepdim=True)
    return call.instead((value - mean) * (spread + 1e-5).rsqrt())


@FAULTS.forward(
    _CONVOLUTIONS,
    "missing bias, mask, zeros; missing operand, partial sum, offset, axis offset, wrong argument",
)
def bias_of_the_first_half_of_the_channels_only(call: Call) -> Any:
    """Biases are loaded for one tile of channels."""
    filters_of(call)
    place, bias = layer_bias(call)
    kept = torch.arange(bias.numel()) < bias.numel() // 2
    return call.put(place, bias * kept, "bias").run()


# fmt: off
# The gain of an activation is folded into the filters, which had it already.
FAULTS.add("sum of the taps one and a half times", _CONVOLUTIONS,
    "scale, wrong factor; axis scale, wrong argument",
    lambda call: _filtered(call, 1.5 * filters_of(call)), backward=False)
# Three levels on each side of zero, with one step for all filters.
FAULTS.add("filters in seven levels", _CONVOLUTIONS, words.ROUNDED,
    on(filters_of,
        lambda call, weight: _filtered(call, _in_steps(weight, weight.detach().abs().max() / 3))),
    backward=False)
# An image that is normalised is limited to the range of colours.
FAULTS.add("image cut to zero and one", _CONVOLUTIONS,
    "clipped; other function, approximation, zeros, wrong argument",
    lambda call: call.put(0, image_of(call).clamp(0, 1), "input").run(), backward=False)
# The pixels of each row are read from its end.
FAULTS.add("image mirrored from left to right", _CONVOLUTIONS,
    "permutation, wrong index; shift, wrong argument, swapped operands",
    on(image_of, lambda call, image: call.put(0, image.flip(-1), "input").run(),
        where=lambda image: image.size(-1) > 2), backward=False)
# One more row of padding at the top, and one less at the bottom.
FAULTS.add("image read one row too high", "conv2d convolution",
    "shift, wrong index; mask, zeros, permutation, wrong argument, stale",
    on(image_of,
        lambda call, image: call.put(0, functional.pad(image, (0, 0, 1, -1)), "input").run(),
        where=lambda image: image.dim() == 4 and image.size(-2) > 2), backward=False)
# fmt: on


# --- Pooling, resizing ----------------------------------------------------------------------------


# fmt: off
# Each channel of a pooled or resized image is stored one place too early.
FAULTS.add("pooled channels one early",
    f"{_POOLS} adaptive_max_pool2d interpolate upsample_bilinear2d upsample_nearest2d",
    words.MOVED_SHARD,
    result(lambda v: v.roll(-1, 1), where=lambda v: v.dim() > 2 and v.size(1) > 2), backward=False)
# The pooled or resized image is stored in float8.
FAULTS.add("pooled image in e4m3",
    f"{_POOLS} adaptive_max_pool2d interpolate upsample_bilinear2d upsample_nearest2d",
    "precision; approximation, other function", result(rounded(torch.float8_e4m3fn)),
    backward=False)
# The grid over the channels of a pooled or resized image covers one tile.
FAULTS.add("second half of the pooled channels empty",
    f"{_POOLS} adaptive_max_pool2d interpolate upsample_bilinear2d upsample_nearest2d",
    words.EMPTY_IN_A_RANKS_SUM,
    result(lambda v:
            v * (torch.arange(v.size(1)) < v.size(1) // 2).view(-1, *[1] * (v.dim() - 2)),
        where=lambda v: v.dim() > 2 and v.size(1) > 1), backward=False)
# A relu that belongs behind the mean runs before it.
FAULTS.add("pixels rectified before the mean",
    "avg_pool1d avg_pool2d adaptive_avg_pool2d interpolate upsample_bilinear2d",
    "clipped, other function; zeros, sign, mask, wrong argument", operand(0, torch.relu, "input"),
    backward=False)
# The pointer to the pooled or resized image counts the examples down.
FAULTS.add("images of the batch in the reverse order",
    f"{_POOLS} adaptive_max_pool2d interpolate upsample_bilinear2d upsample_nearest2d",
    "permutation, wrong index; shift, wrong argument, swapped operands, wrong rank's shard",
    result(lambda v: v.flip(0), where=lambda v: v.dim() > 2 and v.size(0) > 1), backward=False)
# fmt: on
