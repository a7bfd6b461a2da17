"""Faults of the ninth set: products, convolutions, pooling, resizing."""

from __future__ import annotations

from typing import Any

import torch
from benchmarks.places import words
from benchmarks.places.calls import Call, Catalogue, fits, with_gradient_of
from benchmarks.places.changes import computed, longer, on, operand, result, rounded
from benchmarks.places.parts import filters_of, layer_parts, layer_product, result_rows
from torch import Tensor
from torch.nn import functional

FAULTS = Catalogue(backward=False)
_WEIGHTED = "linear addmm mm"
_BATCHED = "bmm matmul"
_PRODUCTS = f"{_WEIGHTED} {_BATCHED}"
_CONVOLUTIONS = "conv1d conv2d convolution"


# --- Products -------------------------------------------------------------------------------------


def _left(call: Call, change: Any) -> Any:
    """The call with another left operand."""
    place = 1 if call.name == "addmm" else 0
    return call.put(place, change(call.tensor(place, "input")), "input").run()


@FAULTS.fault(
    "linear addmm",
    "shift, wrong index, permutation; wrong argument, axis offset, offset, stale, copy",
)
def bias_of_the_column_before(call: Call) -> Any:
    """The pointer to the bias is one behind, around the end."""
    place = 0 if call.name == "addmm" else 2
    bias = call.tensor(place, "bias")
    fits(bias.dim() == 1 and bias.numel() > 2)
    return call.put(place, bias.roll(1), "bias").run()


@FAULTS.fault(_WEIGHTED, words.ROUNDED)
def weight_in_bfloat16(call: Call) -> Any:
    """The weight was saved with eight bits for each number; input and bias are right."""
    left, weight, bias = layer_parts(call)
    coarse = weight.detach().bfloat16().to(weight.dtype)
    return layer_product(call, left, with_gradient_of(weight, coarse), bias)


@FAULTS.fault(_WEIGHTED, words.MOVED)
def weight_one_row_of_the_common_axis_too_far(call: Call) -> Any:
    """Feature i of the input meets row i + 1 of the weight, around the end."""
    left, weight, bias = layer_parts(call)
    fits(weight.size(0) > 1)
    return layer_product(call, left, weight.roll(-1, 0), bias)


@FAULTS.fault(
    _PRODUCTS,
    "partial sum, mask, wrong index; missing reduction, one rank's part, zeros, "
    "wrong reduction, missing operand, lost accumulation",
)
def even_features_only(call: Call) -> Any:
    """The loop over the common axis has a stride of two."""

    def even(left: Tensor) -> Tensor:
        fits(left.size(-1) > 1)
        return left * (torch.arange(left.size(-1)) % 2 == 0)

    return _left(call, even)


@FAULTS.fault(
    _PRODUCTS,
    "partial sum, missing reduction, one rank's part, mask; zeros, lost accumulation, "
    "wrong reduction, missing operand, wrong index",
)
def parts_of_two_ranks_not_summed(call: Call) -> Any:
    """The common axis is shared by two ranks; the first keeps its own part."""

    def own(left: Tensor) -> Tensor:
        fits(left.size(-1) > 1)
        return left * (torch.arange(left.size(-1)) < left.size(-1) // 2)

    return _left(call, own)


@FAULTS.fault(
    _WEIGHTED, "transpose, permutation, wrong index; wrong argument, shift, swapped operands"
)
def weight_of_a_flat_file_in_the_other_layout(call: Call) -> Any:
    """The memory of the weight, (out, in), is read as (in, out)."""
    left, weight, bias = layer_parts(call)
    fits(weight.size(0) != weight.size(1) and min(weight.shape) > 1)
    return layer_product(call, left, weight.t().reshape(weight.shape), bias)


@FAULTS.fault(
    _WEIGHTED, "axis scale, missing operand, wrong factor; scale, other function, wrong argument"
)
def scale_of_each_token_not_multiplied_back(call: Call) -> Any:
    """Rows are divided by their largest magnitude, and stay so; the bias is right."""
    left, weight, bias = layer_parts(call)
    size = left.detach().abs().amax(-1, keepdim=True)
    fits(bool((size > 0).all()))
    return layer_product(call, left / size, weight, bias)


# fmt: off
# A program has four rows, and its last one is masked out.
FAULTS.add("last row of each four not stored", _WEIGHTED, words.EMPTY_IN_A_SUM,
    computed(result_rows,
        lambda value: value.masked_fill((torch.arange(value.size(-2)) % 4 == 3)[:, None], 0),
        where=lambda value: value.size(-2) > 3))
# Integers are made with 127 levels and read with 128; the bias is right.
FAULTS.add("codes by 127 and steps by 128", _WEIGHTED,
    "wrong factor, scale; axis scale, wrong argument",
    on(layer_parts,
        lambda call, left, weight, bias: layer_product(call, left * (127 / 128), weight, bias)))
# The weight is stored as numbers without a sign: what is negative is zero.
FAULTS.add("negative weights lost", _WEIGHTED,
    "clipped, other function, mask; zeros, wrong argument, sign, partial sum",
    on(layer_parts,
        lambda call, left, weight, bias: layer_product(call, left, weight.relu(), bias)))
# The fused kernel of another layer, with its activation, is taken.
FAULTS.add("gelu in the epilogue", "linear addmm", "other function; wrong argument",
    result(functional.gelu))
# The stride of the rows is negative when they are stored.
FAULTS.add("rows of the result from the last", _PRODUCTS,
    "permutation, wrong index; shift, swapped operands, wrong argument, transpose",
    lambda call: call.instead(result_rows(call).flip(-2)))
# Two rows share a program, which stores them in the other order.
FAULTS.add("rows of the layer in pairs", _WEIGHTED,
    "permutation, wrong index; swapped operands, shift, wrong argument, transpose",
    computed(result_rows, lambda value:
            value.unflatten(-2, (-1, 2)).flip(-2).flatten(-3, -2),
        where=lambda value: value.size(-2) % 2 == 0 and value.size(-2) > 2))
# Query, key and value are packed as key, value, query.
FAULTS.add("three parts of a projection in turn", _WEIGHTED,
    "permutation, wrong index, shift; wrong rank's shard, swapped operands, wrong argument",
    result(lambda v: v.roll(-(v.size(-1) // 3), -1),
        where=lambda v: v.size(-1) % 3 == 0 and v.size(-1) > 5))
# fmt: on


# --- Products of a batch --------------------------------------------------------------------------


# fmt: off
# What is divided by the root of the width of a head is divided by 8 once more.
FAULTS.add("factor of a head of 64", _BATCHED, "scale, wrong factor; axis scale, wrong argument",
    result(lambda v: v / 8))
# The result is taken for probabilities: what is negative is zero.
FAULTS.add("negative products lost", _BATCHED, "clipped, other function; zeros, mask",
    result(torch.relu))
# The left matrices are rounded before they are multiplied.
FAULTS.add("left factor in bfloat16", _BATCHED, words.ROUNDED,
    operand(0, rounded(torch.bfloat16), "input"))
# Beta has the wrong sign.
FAULTS.add("summand subtracted", "baddbmm",
    "sign, wrong factor, wrong argument; other function, residual, offset, swapped operands",
    operand(0, torch.neg))
# P is infinite.
FAULTS.add("largest of the differences for the distance", "cdist",
    "wrong argument, other function, wrong reduction; approximation",
    lambda call: call.put(2, float("inf"), "p").run())
# An eps of 0.1.
FAULTS.add("tenth added to each difference", "pairwise_distance",
    "eps, wrong argument; offset, other function, axis offset",
    lambda call: call.put(3, 0.1, "eps").run())
# The second operand has three bits behind the point.
FAULTS.add("experts in e4m3", "einsum", words.ROUNDED, operand(2, rounded(torch.float8_e4m3fn)))
# The last axis of the first operand is read with a negative stride.
FAULTS.add("first operand of the letters from its end", "einsum",
    "permutation, wrong index; shift, wrong argument, swapped operands",
    operand(1, lambda v: v.flip(-1), where=longer(-1)))
# The grid covers half of the columns.
FAULTS.add("second tile of the experts not stored", "grouped_mm_fallback",
    "zeros, mask, uninitialised; constant, missing operand, one rank's part, partial sum, "
    "axis scale",
    result(lambda v: v * (torch.arange(v.size(-1)) < v.size(-1) // 2), where=longer(-1)))
# The pointer to the first input is one row behind, around the end.
FAULTS.add("form with the left input of the row before", "bilinear _trilinear", words.MOVED,
    operand(0, lambda v: v.roll(1, 0), where=lambda v: v.dim() > 1 and v.size(0) > 1))
# fmt: on


# --- Convolutions ---------------------------------------------------------------------------------


def _sizes(call: Call, place: int, name: str, default: int) -> list[int]:
    """Stride or padding for each axis of the image."""
    value, number = call.get(place, name, default=default), call.tensor(1, "weight").dim() - 2
    fits(not isinstance(value, str))
    many = [value] if isinstance(value, int) else list(value)
    return many * number if len(many) == 1 else many


def _image(call: Call, place: int = 0) -> Tensor:
    value = call.tensor(place, "input")
    fits(value.dim() == filters_of(call).dim())
    return value


@FAULTS.fault(
    _CONVOLUTIONS, "wrong argument, wrong index; shift, permutation, copy, other function"
)
def windows_one_apart(call: Call) -> Any:
    """The stride is not handed on: the first windows are stored."""
    filters_of(call)
    fits(max(_sizes(call, 3, "stride", 1)) > 1)
    right = call.result()
    wide = call.put(3, [1] * len(_sizes(call, 3, "stride", 1)), "stride").result()
    for axis in range(2, right.dim()):
        wide = wide.narrow(axis, 0, right.size(axis))
    return call.instead(wide)


@FAULTS.fault(
    _CONVOLUTIONS,
    "wrong factor; residual, doubled reduction, axis scale, partial sum, wrong reduction",
)
def centre_of_the_filter_twice(call: Call) -> Any:
    """The tap in the middle is added where the sum begins, and in the loop."""
    weight = filters_of(call).clone()
    fits(all(size % 2 for size in weight.shape[2:]) and max(weight.shape[2:]) > 1)
    weight[(slice(None), slice(None), *(size // 2 for size in weight.shape[2:]))] *= 2
    return call.put(1, weight, "weight").run()


@FAULTS.fault(
    _CONVOLUTIONS,
    "wrong factor, doubled reduction; residual, wrong reduction, axis scale, "
    "off by one reduction, partial sum",
)
def first_channel_of_each_group_twice(call: Call) -> Any:
    """A prologue adds the first channel, and the loop over the channels does so again."""
    weight = filters_of(call)
    fits(weight.size(1) > 1)
    times = torch.ones(weight.size(1)).to(weight.dtype)
    times[0] = 2
    return call.put(1, weight * times.view(1, -1, *[1] * (weight.dim() - 2)), "weight").run()


@FAULTS.fault(
    _CONVOLUTIONS,
    "sign, wrong factor; axis offset, offset, wrong argument, other function, residual",
)
def bias_subtracted_from_the_channels(call: Call) -> Any:
    """A mean that is subtracted elsewhere becomes a bias without changing its sign."""
    filters_of(call)
    return call.put(2, -call.tensor(2, "bias"), "bias").run()


@FAULTS.fault(_CONVOLUTIONS, "permutation, transpose, wrong index; shift, swapped operands")
def result_with_the_channels_last(call: Call) -> Any:
    """The kernel stores the channels last, and the next one reads them first."""
    _image(call)
    value = call.result()
    return call.instead(value.movedim(1, -1).reshape(value.shape))


@FAULTS.fault("conv2d convolution", words.MOVED)
def pixels_one_row_further_down(call: Call) -> Any:
    """Each row of pixels is stored one too late, the last one first."""
    _image(call)
    value = call.result()
    fits(value.dim() == 4 and value.size(2) > 1)
    return call.instead(value.roll(1, 2))


@FAULTS.fault("conv2d convolution", words.EMPTY_IN_A_SUM)
def odd_rows_of_pixels_not_stored(call: Call) -> Any:
    """The store has a stride of two rows."""
    _image(call)
    value = call.result()
    fits(value.dim() == 4 and value.size(2) > 1)
    return call.instead(value * (torch.arange(value.size(2)) % 2 == 0)[:, None])


@FAULTS.fault(_CONVOLUTIONS, "clipped, other function; zeros, mask")
def relu_fused_behind_the_filters(call: Call) -> Any:
    """The epilogue of another layer: what is negative is zero."""
    filters_of(call)
    return call.instead(call.result().relu())


@FAULTS.fault(
    "conv_transpose1d conv_transpose2d convolution",
    "partial sum, mask; zeros, missing operand, wrong index, off by one reduction, wrong argument",
)
def last_column_of_the_small_image_not_spread(call: Call) -> Any:
    """The loop over the columns that are spread ends one too early."""
    fits(call.name != "convolution" or call.get(6, "transposed"))
    value = call.tensor(0, "input").clone()
    fits(value.size(-1) > 1)
    value[..., -1] = 0
    return call.put(0, value, "input").run()


# fmt: off
# A pair of filters is loaded once; the biases are right.
FAULTS.add("two channels share a filter", _CONVOLUTIONS,
    "copy, stale, wrong index; permutation, shift, wrong argument",
    on(filters_of,
        lambda call, weight:
            call.put(1, weight[torch.arange(weight.size(0)) // 2 * 2], "weight").run(),
        where=lambda weight: weight.size(0) > 1))
# The sum is divided by the number of input channels; the bias is right.
FAULTS.add("channels averaged and not summed", _CONVOLUTIONS,
    "wrong factor, scale, wrong reduction; axis scale, wrong argument, wrong statistics",
    on(filters_of, lambda call, weight: call.put(1, weight / weight.size(1), "weight").run(),
        where=lambda weight: weight.size(1) > 1))
# The first of the three axes of a filter is read from its end.
FAULTS.add("frames of the filter in the other order", "conv3d convolution",
    "permutation, wrong index; swapped operands, shift, wrong argument",
    on(filters_of, lambda call, weight: call.put(1, weight.flip(2), "weight").run(),
        where=lambda weight: weight.dim() == 5 and weight.size(2) > 1))
# fmt: on


# --- Pooling, resizing ----------------------------------------------------------------------------


@FAULTS.fault(
    "avg_pool1d avg_pool2d",
    "partial sum, mask, off by one reduction; zeros, wrong index, missing operand, wrong reduction",
)
def last_place_of_the_window_not_added(call: Call) -> Any:
    """The loop over a window ends one too early; the sum is divided by all places."""
    value, size = call.tensor(0, "input"), call.get(1, "kernel_size")
    number = 1 if call.name == "avg_pool1d" else 2
    fits(value.dim() == number + 2)

    def many(one: Any) -> list[int]:
        found = [one] if isinstance(one, int) else list(one)
        return found * number if len(found) == 1 else found

    sizes = many(size)
    steps, padding = call.get(2, "stride") or sizes, call.get(3, "padding", default=0)
    places = torch.ones(sizes).to(value.dtype)
    places.view(-1)[-1] = 0
    weight = (places / places.numel()).expand(value.size(1), 1, *sizes)
    convolve = functional.conv1d if number == 1 else functional.conv2d
    given = {"stride": many(steps), "padding": many(padding), "groups": value.size(1)}
    return call.instead(convolve(value, weight, **given))


@FAULTS.fault(
    "max_pool2d max_pool2d_with_indices",
    "mask, wrong argument, off by one reduction; wrong index, partial sum, wrong reduction",
)
def last_column_of_the_window_not_compared(call: Call) -> Any:
    """The loop over the width of a window ends one too early."""
    size = call.get(1, "kernel_size")
    height, width = (size, size) if isinstance(size, int) else (size * 2)[:2]
    fits(width > 1)
    step = call.get(2, "stride") or (height, width)
    padding = call.get(3, "padding", default=0)
    padding = (padding,) * 2 if isinstance(padding, int) else (list(padding) * 2)[:2]
    below, right = padding
    value = functional.pad(
        call.tensor(0, "input"), (right, right, below, below), value=float("-inf")
    )
    pooled = functional.max_pool2d(value, (height, width - 1), step)
    right_size = call.result().shape
    return call.instead(pooled[..., : right_size[-2], : right_size[-1]])


# fmt: off
# A minimum where a maximum was asked for.
FAULTS.add("smallest of the region", "adaptive_max_pool2d",
    "other function, wrong reduction; sign, wrong argument",
    lambda call: call.instead(-call.put(0, -call.tensor(0, "input"), "input").result()))
# A square image is stored by columns.
FAULTS.add("enlarged image with x before y", "interpolate upsample_bilinear2d upsample_nearest2d",
    "transpose, permutation, wrong index; swapped operands, wrong argument, shift",
    result(lambda v: v.mT.contiguous(), where=lambda v: v.size(-1) == v.size(-2)))
# The last row keeps what its program has stored before.
FAULTS.add("last row of the enlarged image is the one before",
    "interpolate upsample_bilinear2d upsample_nearest2d",
    "copy, stale, wrong index; permutation, shift, mask",
    result(lambda v: v[..., torch.arange(v.size(-2)).clamp(max=v.size(-2) - 2), :],
        where=lambda v: v.dim() == 4 and v.size(-2) > 1))
# The x of the grid points to the left.
FAULTS.add("columns counted from the right", "grid_sample grid_sampler grid_sampler_2d",
    "sign, wrong index, wrong argument; permutation, swapped operands, other function",
    operand(1, lambda v: torch.stack([-v[..., 0], *v[..., 1:].unbind(-1)], -1), "grid"))
# fmt: on
