"""Faults that were measured sixth and have been seen: products, convolutions, pooling."""

from __future__ import annotations

from typing import Any

import torch
from benchmarks.places import words
from benchmarks.places.calls import Call, Catalogue, fits
from benchmarks.places.changes import even, longer, on, operand, result, tensors
from benchmarks.places.parts import change_bias, change_weight, layer_parts, layer_product
from torch import Tensor

FAULTS = Catalogue()
_WEIGHTED = "linear addmm mm"
_PRODUCTS = "linear addmm mm bmm matmul"
_CONVOLUTIONS = "conv1d conv2d convolution"


# --- Products -------------------------------------------------------------------------------------


@FAULTS.forward(
    _PRODUCTS, "zeros, mask, uninitialised; constant, wrong index, axis scale, wrong factor"
)
def tail_of_a_row_written_onto_the_next(call: Call) -> Any:
    """A store without a mask: the empty lanes behind a row land on the next one's first columns."""
    value = call.result().clone()
    fits(value.dim() > 1 and value.size(-2) > 1 and value.size(-1) > 3)
    value[..., 1:, :2] = 0
    return call.instead(value)


@FAULTS.forward(
    "linear addmm",
    "wrong factor, scale, wrong reduction; missing operand, one rank's part, wrong argument",
)
def product_averaged_over_two_ranks(call: Call) -> Any:
    """The parts of two ranks are averaged and not summed; the bias is added afterwards."""
    left, weight, bias = layer_parts(call)
    fits(bias is not None)
    return layer_product(call, left / 2, weight, bias)


@FAULTS.forward(_WEIGHTED, "precision; approximation")
def weight_in_sixteen_even_levels(call: Call) -> Any:
    """Four bits with a step for each group of eight along k."""

    def change(weight: Tensor) -> Tensor:
        fits(weight.size(0) % 8 == 0)
        groups = weight.unflatten(0, (-1, 8))
        step = groups.abs().amax(1, keepdim=True).clamp(min=1e-9) / 7
        return ((groups / step).round() * step).flatten(0, 1)

    return change_weight(call, change)


@FAULTS.forward(_WEIGHTED, "axis scale, missing operand, wrong factor; scale, wrong argument")
def codes_not_multiplied_by_their_scales(call: Call) -> Any:
    """Weights in eight bits with a scale for each column: the product is that of the codes."""
    left, weight, bias = layer_parts(call)
    scale = weight.detach().abs().amax(0, keepdim=True).clamp(min=1e-9) / 127
    return layer_product(call, left, weight / scale, bias)


@FAULTS.forward(_WEIGHTED, "permutation, wrong index; shift")
def eight_packed_columns_in_the_order_of_the_packing(call: Call) -> Any:
    """Eight weights of four bits in a word: 0, 2, 4, 6, 1, 3, 5, 7, bias and all."""
    left, weight, bias = layer_parts(call)
    fits(weight.size(-1) % 8 == 0)
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    packed = weight.unflatten(-1, (-1, 8))[..., order].flatten(-2)
    return layer_product(call, left, packed, bias)


@FAULTS.forward(_WEIGHTED, "clipped; precision, wrong argument, other function")
def input_saturates_by_the_scale_of_the_step_before(call: Call) -> Any:
    """The range is that of smaller inputs: seven tenths of the largest."""
    left, weight, bias = layer_parts(call)
    limit = 0.7 * float(left.detach().abs().max())
    return layer_product(call, left.clamp(-limit, limit), weight, bias)


@FAULTS.forward(_WEIGHTED, "stale, copy, wrong index; permutation, constant")
def weight_of_the_first_half_of_k_again(call: Call) -> Any:
    """The tile of the weight is not loaded again for the second half of the common axis."""
    left, weight, bias = layer_parts(call)
    half = weight.size(0) // 2
    fits(weight.size(0) % 2 == 0 and half > 0)
    return layer_product(call, left, torch.cat([weight[:half], weight[:half]]), bias)


@FAULTS.forward(
    "linear addmm", "mask, missing bias, missing operand; axis offset, offset, one rank's part"
)
def bias_for_the_first_row_only(call: Call) -> Any:
    """The epilogue runs in the first program along the rows."""
    left, weight, bias = layer_parts(call)
    fits(bias is not None and left.dim() > 1 and left.size(-2) > 1)
    assert bias is not None
    value = left @ weight
    return call.instead(torch.cat([value[..., :1, :] + bias, value[..., 1:, :]], -2))


@FAULTS.forward(_WEIGHTED, "partial sum, mask, wrong index; off by one reduction, missing operand")
def middle_of_the_common_axis_skipped(call: Call) -> Any:
    """A tile of two in the middle of k is added to a register that is thrown away."""
    left, weight, bias = layer_parts(call)
    size = left.size(-1)
    fits(size > 5)
    kept = torch.ones(size, dtype=left.dtype)
    kept[size // 2 - 1 : size // 2 + 1] = 0
    return layer_product(call, left * kept, weight, bias)


@FAULTS.forward(
    _WEIGHTED,
    "wrong factor, doubled reduction, wrong reduction, mask; partial sum, scale, "
    "off by one reduction, residual",
)
def first_tile_of_the_common_axis_added_twice(call: Call) -> Any:
    """A prologue loads and adds the first quarter of k, and the loop does so again."""
    left, weight, bias = layer_parts(call)
    size = left.size(-1)
    fits(size > 3)
    times = torch.ones(size, dtype=left.dtype)
    times[: size // 4] = 2
    return layer_product(call, left * times, weight, bias)


@FAULTS.forward("linear addmm", "wrong factor, other function, axis scale; scale, wrong statistics")
def columns_of_the_result_with_their_neighbours_scale(call: Call) -> Any:
    """Weights are divided by the scale of their column, and multiplied by that of the next."""
    left, weight, bias = layer_parts(call)
    scale = weight.detach().abs().amax(0, keepdim=True).clamp(min=1e-9)
    return layer_product(call, left, weight / scale * scale.roll(-1, -1), bias)


@FAULTS.forward("bmm matmul", words.EMPTY)
def first_column_of_each_matrix_empty(call: Call) -> Any:
    """The store begins with the second column."""
    value = call.result().clone()
    fits(value.dim() > 2 and value.size(-1) > 2)
    value[..., 0] = 0
    return call.instead(value)


# fmt: off
# X w / sqrt(k), as for weights that are stored without the factor of their initialisation.
FAULTS.add("product divided by the root of the width", _WEIGHTED,
    "wrong factor, scale; wrong argument, axis scale",
    on(layer_parts,
        lambda call, left, weight, bias:
            layer_product(call, left / left.size(-1) ** 0.5, weight, bias)), backward=False)
# Columns of four ranks in the order 0, 2, 1, 3.
FAULTS.add("four shards gathered in the order of a tree", _WEIGHTED,
    "wrong rank's shard, permutation, wrong index; shift, swapped operands",
    result(lambda v: v.unflatten(-1, (4, -1))[..., [0, 2, 1, 3], :].flatten(-2),
        where=lambda v: v.size(-1) % 4 == 0), backward=False)
# The weights are read as numbers without a sign.
FAULTS.add("signs of the weight lost", _WEIGHTED, "sign, other function; wrong factor",
    on(layer_parts,
        lambda call, left, weight, bias: layer_product(call, left, weight.abs(), bias)),
    backward=False)
# Rows are sorted for the kernel, even ones before odd ones, and stay so.
FAULTS.add("tokens not put back in their order", _WEIGHTED, "permutation, wrong index; shift, copy",
    result(lambda v: v[..., [*range(0, v.size(-2), 2), *range(1, v.size(-2), 2)], :],
        where=longer(-2, 2)), backward=False)
# A bias with a learning rate of its own is stored times ten.
FAULTS.add("bias ten times too large", "linear addmm conv1d conv2d convolution",
    "wrong factor, scale, repeated bias; axis offset, offset, residual, wrong argument",
    lambda call: change_bias(call, lambda bias: 10 * bias), backward=False)
# The weight is packed in one order, the bias in the other.
FAULTS.add("halves of the bias exchanged", "linear addmm conv1d conv2d convolution",
    "permutation, wrong index; axis offset, shift, wrong rank's shard",
    lambda call: change_bias(call, lambda bias: bias.roll(bias.numel() // 2, 0)), backward=False)
# One zero point for all columns in the place of a bias for each.
FAULTS.add("mean of the bias for all", "linear addmm",
    "constant, wrong reduction, wrong statistics, copy; axis offset, offset, wrong index",
    lambda call: change_bias(call, lambda bias: bias.mean().expand(bias.shape).clone()),
    backward=False)
# The bias is kept without a sign: what is negative is zero.
FAULTS.add("negative biases lost", "linear addmm", "clipped, other function; wrong argument, mask",
    lambda call: change_bias(call, lambda bias: bias.relu()), backward=False)
# The pointer to the input is one example of the batch too far.
FAULTS.add("input of the next example", _WEIGHTED, "wrong index, shift, permutation; stale, copy",
    on(layer_parts,
        lambda call, left, weight, bias: layer_product(call, left.roll(-1, 0), weight, bias),
        where=lambda left, *_: left.dim() > 2 and left.size(0) > 1), backward=False)
# The last row of the result is what the allocator gave: not a number.
FAULTS.add("last rows hold no numbers", _WEIGHTED, "nonfinite; uninitialised, mask, overflow",
    result(lambda v:
            torch.cat([v[..., :-1, :], torch.full_like(v[..., -1:, :], torch.nan)], -2),
        where=longer(-2)), backward=False)
# A kernel for causal scores skips what is above the diagonal.
FAULTS.add("tiles above the diagonal not computed", "bmm matmul", words.EMPTY_IN_A_SUM,
    result(lambda v: v.tril(), where=lambda v: v.dim() > 2 and v.size(-1) == v.size(-2) > 2),
    backward=False)
# The result is taken for symmetric: what is above the diagonal is a copy of what is below.
FAULTS.add("lower triangle mirrored", "bmm matmul",
    "transpose, copy, wrong index; stale, permutation, mask",
    result(lambda v: v.tril() + v.tril(-1).mT,
        where=lambda v: v.dim() > 2 and v.size(-1) == v.size(-2) > 2), backward=False)
# The matrices of the second half of the batch are stored first.
FAULTS.add("halves of the batch exchanged", "bmm matmul",
    "wrong index, permutation, shift; copy, wrong rank's shard",
    result(lambda v: v.roll(v.size(-3) // 2, -3), where=even(-3)), backward=False)
# Divided by the root of the common axis, as scores are.
FAULTS.add("product with the scale of a head", "bmm matmul", "scale, wrong factor; wrong argument",
    on(tensors(0), lambda call, left: call.instead(call.result() / left.size(-1) ** 0.5),
        where=lambda left: left.dim() > 2 and left.size(-1) > 1), backward=False)
# The pointer to the rows of the left factor is not moved on.
FAULTS.add("first row of the left factor for all", "bmm matmul",
    "copy, stale, wrong index; permutation, constant",
    operand(0, lambda v: v[..., :1, :].expand(v.shape).clone(),
        where=lambda v: v.dim() > 2 and v.size(-2) > 1), backward=False)
# The pointer to the tokens is not moved on.
FAULTS.add("first row of the first operand for all", "einsum",
    "copy, stale, wrong index; permutation, constant",
    operand(1, lambda v: v[:1].expand(v.shape).clone(),
        where=lambda v: v.dim() > 1 and v.size(0) > 1), backward=False)
# The result has the wrong sign.
FAULTS.add("sum of products negated", "einsum", "sign, wrong factor, scale; other function",
    result(torch.neg), backward=False)
# Each group of tokens is multiplied with the weights of the next expert.
FAULTS.add("weights of the next expert", "grouped_mm_fallback",
    "wrong index, shift, permutation; wrong rank's shard, copy",
    operand(1, lambda v: v.roll(-1, 0), where=lambda v: v.dim() == 3 and v.size(0) > 1),
    backward=False)
# fmt: on


# --- Convolutions ---------------------------------------------------------------------------------


@FAULTS.forward(
    _CONVOLUTIONS, "partial sum, mask, missing operand; off by one reduction, wrong index"
)
def centre_of_the_filter_lost(call: Call) -> Any:
    """The tap in the middle is not added."""
    weight = call.tensor(1, "weight").clone()
    fits(weight.dim() > 2 and weight.size(-1) > 2)
    weight[(..., *[size // 2 for size in weight.shape[2:]])] = 0
    return call.put(1, weight, "weight").run()


@FAULTS.forward(_CONVOLUTIONS, words.EMPTY_ON_A_RANK)
def second_half_of_the_channels_not_written(call: Call) -> Any:
    """One of two blocks of filters is never launched."""
    value = call.result().clone()
    fits(value.dim() > 2 and value.size(1) > 1)
    value[:, value.size(1) // 2 :] = 0
    return call.instead(value)


@FAULTS.fault("conv_transpose1d conv_transpose2d", words.EMPTY_IN_A_SUM)
def new_columns_left_empty(call: Call) -> Any:
    """What lies between the old columns is not computed."""
    value = call.result().clone()
    value[..., 1::2] = 0
    return call.instead(value)


# fmt: off
# Pixels that are between 0 and 1 already are divided once more.
FAULTS.add("image divided by 255", _CONVOLUTIONS, "wrong factor, scale, wrong argument; axis scale",
    operand(0, lambda v: v / 255, "input", where=lambda v: v.dim() > 2), backward=False)
# One half is subtracted from pixels that are centred already.
FAULTS.add("image centred once more", _CONVOLUTIONS,
    "offset, wrong argument; axis offset, residual, other function",
    operand(0, lambda v: v - 0.5, "input", where=lambda v: v.dim() > 2), backward=False)
# Two pixels of a vector share a register.
FAULTS.add("every second pixel is the one before", _CONVOLUTIONS,
    "copy, stale, wrong index; permutation",
    result(lambda v: v[..., torch.arange(v.size(-1)) // 2 * 2],
        where=lambda v: v.dim() > 2 and v.size(-1) > 1), backward=False)
# The stride of the channels of the image is zero.
FAULTS.add("first input channel for all", _CONVOLUTIONS, "copy, stale, wrong index; permutation",
    operand(0, lambda v: v[:, :1].expand(v.shape).clone(), "input",
        where=lambda v: v.dim() > 2 and v.size(1) > 1), backward=False)
# The pointer to the images is one too far.
FAULTS.add("image of the next example", _CONVOLUTIONS,
    "wrong index, shift, permutation; copy, stale",
    result(lambda v: v.roll(-1, 0), where=lambda v: v.dim() > 2 and v.size(0) > 1), backward=False)
# The first axis of the filter is read from its end, the second is not.
FAULTS.add("rows of the filter upside down", _CONVOLUTIONS,
    "permutation, wrong index; shift, transpose",
    operand(1, lambda v:
            v.flip(-2), "weight", where=lambda v: v.dim() == 4 and v.size(-2) > 1), backward=False)
# The stride of the frames is zero.
FAULTS.add("first frame for all", "conv3d", "copy, stale, wrong index; permutation",
    operand(0, lambda v: v[:, :, :1].expand(v.shape).clone(), "input",
        where=lambda v: v.dim() == 5 and v.size(2) > 1), backward=False)
# fmt: on


# --- Pooling, resizing ----------------------------------------------------------------------------


@FAULTS.forward(
    "avg_pool2d", "wrong factor, scale, wrong argument; wrong statistics, wrong reduction"
)
def window_divided_by_one_side(call: Call) -> Any:
    """By k and not by k * k."""
    size = call.get(1, "kernel_size")
    side = size if isinstance(size, int) else size[0]
    fits(side > 1)
    return call.instead(call.result() * side)


@FAULTS.forward(
    "max_pool1d max_pool2d avg_pool2d avg_pool1d",
    "zeros, uninitialised, mask; constant, axis scale, wrong factor",
)
def last_column_of_the_pool_not_written(call: Call) -> Any:
    """The size of the output is rounded down once more."""
    value = call.result().clone()
    fits(value.size(-1) > 1)
    value[..., -1] = 0
    return call.instead(value)


@FAULTS.fault(
    "adaptive_avg_pool2d adaptive_avg_pool1d",
    "wrong index, other function, partial sum, copy; wrong reduction, mask, missing reduction",
)
def first_pixel_of_the_region(call: Call) -> Any:
    """The region is not averaged: its first pixel is taken."""
    value, result = call.tensor(0), call.result()
    dims = range(value.dim() - (2 if call.name.endswith("2d") else 1), value.dim())
    for dim in dims:
        count = result.size(dim)
        places = torch.arange(count) * value.size(dim) // count
        value = value.index_select(dim, places)
    return call.instead(value)


@FAULTS.forward("interpolate upsample_bilinear2d upsample_nearest2d", words.EMPTY)
def enlarged_with_gaps(call: Call) -> Any:
    """Only even columns are written."""
    value = call.result().clone()
    value[..., 1::2] = 0
    return call.instead(value)


# fmt: off
# What is inside of the frame is written one column too late, around the end.
FAULTS.add("padded part one further", "pad",
    "shift, wrong index, permutation; zeros, wrong argument",
    result(lambda v: v.roll(1, -1), where=lambda v: v.dim() > 1 and v.size(-1) > 2), backward=False)
# fmt: on
