"""Faults of the tenth set: products, convolutions, pooling, resizing."""

from __future__ import annotations

from typing import Any

import torch
from benchmarks.places import words
from benchmarks.places.calls import Call, Catalogue, fits, with_gradient_of
from benchmarks.places.changes import computed, longer, on, operand, result, rounded
from benchmarks.places.parts import (
    filters_of,
    image_of,
    layer_bias,
    layer_parts,
    layer_product,
    result_rows,
    round_to,
)
from torch.nn import functional

FAULTS = Catalogue(backward=False)
_WEIGHTED = "linear addmm mm"
_BATCHED = "bmm matmul"
_CONVOLUTIONS = "conv1d conv2d convolution"


# --- Products -------------------------------------------------------------------------------------


@FAULTS.fault(
    "linear addmm", "missing bias, mask; missing operand, partial sum, zeros, offset, axis offset"
)
def bias_for_the_even_rows_only(call: Call) -> Any:
    """A program has two rows, and adds the bias to the first of them."""
    _, bias = layer_bias(call)
    value = result_rows(call)
    odd = (torch.arange(value.size(-2)) % 2 == 1)[:, None]
    return call.instead(value - odd * bias)


@FAULTS.fault(
    "linear addmm",
    "other function; wrong index, wrong axis, offset, axis offset, missing bias, residual",
)
def bias_added_to_the_input(call: Call) -> Any:
    """(x + b) w for x w + b, of a square weight."""
    left, weight, _ = layer_parts(call)
    _, bias = layer_bias(call)
    fits(bias.numel() == left.size(-1))
    return layer_product(call, left + bias, weight, None)


@FAULTS.fault(_WEIGHTED, "precision; approximation, other function, sign, wrong argument")
def weight_in_one_bit(call: Call) -> Any:
    """The sign of each weight times the mean magnitude of its column."""
    left, weight, bias = layer_parts(call)
    coarse = weight.detach().sign() * weight.detach().abs().mean(0, keepdim=True)
    return layer_product(call, left, with_gradient_of(weight, coarse), bias)


@FAULTS.fault(_WEIGHTED, "scale, wrong factor; wrong argument, other function, axis scale")
def weight_divided_by_its_largest_singular_value(call: Call) -> Any:
    """A spectral norm that belongs to a discriminator is left on the weight."""
    left, weight, bias = layer_parts(call)
    fits(min(weight.shape) > 1)
    size = torch.linalg.matrix_norm(weight.detach(), 2)
    return layer_product(call, left, weight / size, bias)


@FAULTS.fault(
    _WEIGHTED,
    "axis offset, residual, wrong statistics; offset, other function, wrong argument, "
    "missing operand, wrong reduction",
)
def product_centred_over_its_columns(call: Call) -> Any:
    """The mean over the outputs is folded out of the weight, as if a layer norm followed."""
    left, weight, bias = layer_parts(call)
    fits(weight.size(1) > 1)
    return layer_product(call, left, weight - weight.mean(1, keepdim=True), bias)


@FAULTS.fault(
    _WEIGHTED,
    "lost accumulation, partial sum, mask; zeros, wrong index, missing reduction, "
    "one rank's part, wrong reduction, missing operand",
)
def last_tile_of_the_features_only(call: Call) -> Any:
    """The accumulator is set and not added to: the last quarter of the features is left."""
    left, weight, bias = layer_parts(call)
    fits(left.size(-1) > 3)
    last = torch.arange(left.size(-1)) >= left.size(-1) - left.size(-1) // 4
    return layer_product(call, left * last, weight, bias)


@FAULTS.fault(_WEIGHTED, "clipped; approximation, precision, overflow, other function, partial sum")
def pairs_of_products_saturate_at_16_bits(call: Call) -> Any:
    """Codes of 8 bits: an instruction adds two products and limits their sum to 16 bits."""
    left, weight, bias = layer_parts(call)
    fits(left.size(-1) % 2 == 0 and left.size(-1) > 2)
    low = left.detach().min()
    step = (left.detach().max() - low) / 255
    size = weight.detach().abs().max() / 127
    fits(bool(step > 0) and bool(size > 0))
    codes, levels = (left - low) / step, weight / size
    total = 0
    for place in range(0, left.size(-1), 2):
        pair = codes[..., place : place + 2] @ levels[place : place + 2]
        total = total + pair.clamp(-32768, 32767)
    value = total * step * size + low * weight.sum(0)
    return call.instead(value if bias is None else value + bias)


@FAULTS.fault(
    _WEIGHTED, "wrapped, offset; sign, other function, wrong argument, wrong factor, axis offset"
)
def negative_codes_read_without_their_sign(call: Call) -> Any:
    """Codes of four bits for each column: -1 is read as 15, and so on."""
    left, weight, bias = layer_parts(call)
    step = weight.detach().abs().amax(0, keepdim=True) / 7
    return layer_product(call, left, weight + 16 * step * (weight < 0), bias)


@FAULTS.fault(
    _WEIGHTED, "permutation, wrong index; transpose, shift, swapped operands, wrong rank's shard"
)
def tiles_of_the_result_counted_by_columns(call: Call) -> Any:
    """Of two by two tiles, the upper right and the lower left are stored in each other's place."""
    value = result_rows(call)
    rows, columns = value.size(-2), value.size(-1)
    fits(rows % 2 == 0 and columns % 2 == 0)
    upper, lower = value.split(rows // 2, -2)
    half = columns // 2
    upper, lower = (
        torch.cat([upper[..., :half], lower[..., :half]], -1),
        torch.cat([upper[..., half:], lower[..., half:]], -1),
    )
    return call.instead(torch.cat([upper, lower], -2))


@FAULTS.fault(
    _WEIGHTED,
    "axis scale, wrong factor, wrong index; scale, shift, stale, wrong argument, "
    "wrong rank's shard",
)
def blocks_of_the_weight_with_the_scale_of_the_next(call: Call) -> Any:
    """The weight has a scale for each half of its columns, and the halves get each other's."""
    left, weight, bias = layer_parts(call)
    half = weight.size(1) // 2
    fits(half > 1)
    first, second = weight[:, :half], weight[:, half:]
    ratio = second.detach().abs().max() / first.detach().abs().max()
    return layer_product(call, left, torch.cat([first * ratio, second / ratio], 1), bias)


# fmt: off
# B - x w: the product is subtracted from the accumulator; the bias is right.
FAULTS.add("product with a minus", _WEIGHTED,
    "sign, wrong factor; scale, other function, wrong argument",
    on(layer_parts, lambda call, left, weight, bias:
            layer_product(call, -left, weight, bias)))
# The result is multiplied by 0.22, bias and all, as by a multiplier of residuals.
FAULTS.add("multiplier of another model", _WEIGHTED,
    "scale, wrong factor; axis scale, wrong argument", result(lambda v: 0.22 * v))
# Three ranks have the whole product, and their results are added; the bias is right.
FAULTS.add("product added up over three ranks", _WEIGHTED,
    "scale, wrong factor, doubled reduction; axis scale, wrong reduction, wrong argument",
    on(layer_parts,
        lambda call, left, weight, bias: layer_product(call, 3 * left, weight, bias)))
# The bias is stored with two bits behind the point; input and weight are right.
FAULTS.add("bias in e5m2", "linear addmm", words.ROUNDED,
    on(layer_bias,
        lambda call, place, bias:
            call.put(place, round_to(bias, torch.float8_e5m2), "bias").run()))
# The bias is multiplied by a scale of 1 / 127 that belongs to the weight.
FAULTS.add("bias with the step of the weight", "linear addmm conv1d conv2d",
    "wrong factor, scale; axis offset, wrong argument, residual, repeated bias, offset",
    on(layer_bias, lambda call, place, bias: call.put(place, bias / 127, "bias").run()))
# Feature i + 1 of the input meets row i of the weight, around the end.
FAULTS.add("features of the input one too far", _WEIGHTED, words.MOVED,
    on(layer_parts,
        lambda call, left, weight, bias: layer_product(call, left.roll(-1, -1), weight, bias),
        where=lambda left, *_: left.size(-1) > 2))
# The input is dealt to two lanes, the weight is not: even features come before odd ones.
FAULTS.add("even features of the input first", _WEIGHTED,
    "permutation, wrong index; transpose, shift, swapped operands, wrong argument",
    on(layer_parts,
        lambda call, left, weight, bias:
            layer_product(call, left.unflatten(-1, (-1, 2)).mT.flatten(-2), weight, bias),
        where=lambda left, *_: left.size(-1) % 2 == 0 and left.size(-1) > 4))
# The input is limited to -1 and 1, as by codes with a fixed range.
FAULTS.add("input cut at one", _WEIGHTED, words.LIMITED,
    on(layer_parts,
        lambda call, left, weight, bias: layer_product(call, left.clamp(-1, 1), weight, bias)))
# The input is read as numbers without a sign.
FAULTS.add("magnitudes of the input", _WEIGHTED, "sign, other function; wrong argument",
    on(layer_parts,
        lambda call, left, weight, bias: layer_product(call, left.abs(), weight, bias)))
# The input is rounded to eight bits; weight and bias are right.
FAULTS.add("input of the layer in bfloat16", _WEIGHTED, words.ROUNDED,
    on(layer_parts,
        lambda call, left, weight, bias:
            layer_product(call, round_to(left, torch.bfloat16), weight, bias)))
# The weight was saved in float16; input and bias are right.
FAULTS.add("weight in half", _WEIGHTED, words.ROUNDED,
    on(layer_parts,
        lambda call, left, weight, bias:
            layer_product(call, left, round_to(weight, torch.float16), bias)))
# The weight is in the float8 of gradients, with two bits behind the point.
FAULTS.add("weight in e5m2", _WEIGHTED, words.ROUNDED,
    on(layer_parts,
        lambda call, left, weight, bias:
            layer_product(call, left, round_to(weight, torch.float8_e5m2), bias)))
# Every fourth feature is dropped, and the others are scaled up by 4 / 3.
FAULTS.add("dropout of the input left on", _WEIGHTED,
    "mask, wrong factor; zeros, partial sum, missing operand, other function, scale, axis scale",
    on(layer_parts,
        lambda call, left, weight, bias:

    layer_product(call, left * (torch.arange(left.size(-1)) % 4 != 3) * (4 / 3), weight, bias),
        where=lambda left, *_: left.size(-1) > 4))
# The second half of the columns stays zero.
FAULTS.add("columns of the second rank not gathered", _WEIGHTED,
    "zeros, mask, uninitialised, one rank's part; constant, missing operand, partial sum, "
    "axis scale, wrong factor, missing reduction",
    result(lambda v: v * (torch.arange(v.size(-1)) < v.size(-1) // 2), where=longer(-1, 2)))
# Two columns share a register: both are stored with the even one's result.
FAULTS.add("odd columns are those before", _WEIGHTED,
    "copy, stale, wrong index; shift, permutation, mask",
    result(lambda v: v[..., torch.arange(v.size(-1)) // 2 * 2], where=longer(-1, 2)))
# Each column is stored one too far, bias and all, the last one first.
FAULTS.add("columns of the result one late", _WEIGHTED,
    "shift, wrong index, permutation; stale, copy",
    result(lambda v: v.roll(1, -1), where=longer(-1, 2)))
# The result is stored with three bits behind the point, without a scale.
FAULTS.add("result of the layer in e4m3", _WEIGHTED, "precision; approximation, other function",
    result(rounded(torch.float8_e4m3fn)))
# A clamp to -0.5 and 0.5 is fused behind the product.
FAULTS.add("result cut at one half", _WEIGHTED, "clipped; other function, approximation, mask",
    result(lambda v: v.clamp(-0.5, 0.5)))
# The kernel of the gate, with its activation, is taken for another projection.
FAULTS.add("silu in the epilogue", "linear addmm", "other function; wrong argument",
    result(functional.silu))
# The loop over the features is unrolled by three, and the third step is forgotten.
FAULTS.add("every third feature not added", _WEIGHTED,
    "partial sum, mask; lost accumulation, zeros, wrong index, wrong reduction, "
    "missing operand, off by one reduction",
    on(layer_parts,
        lambda call, left, weight, bias:
            layer_product(call, left * (torch.arange(left.size(-1)) % 3 != 2), weight, bias),
        where=lambda left, *_: left.size(-1) > 3))
# The products of odd features are subtracted, as for the parts of complex numbers.
FAULTS.add("odd features subtracted", _WEIGHTED,
    "sign, wrong factor; wrong reduction, mask, axis scale, other function",
    on(layer_parts,
        lambda call, left, weight, bias:
            layer_product(call, left * (1 - 2 * (torch.arange(left.size(-1)) % 2)), weight, bias),
        where=lambda left, *_: left.size(-1) > 1))
# The last row keeps what its program has stored before.
FAULTS.add("last row is the one before", _WEIGHTED,
    "copy, stale, wrong index; shift, permutation, mask, wrong rank's shard",
    computed(result_rows,
        lambda value: value[..., torch.arange(value.size(-2)).clamp(max=value.size(-2) - 2), :],
        where=lambda value: value.size(-2) > 2))
# Each column but the first begins with what the column before it has written.
FAULTS.add("column before left in the accumulator", _WEIGHTED,
    "residual, stale; offset, doubled reduction, lost accumulation, wrong index, "
    "wrong reduction, shift",
    result(lambda v: v + torch.cat([torch.zeros_like(v[..., :1]), v[..., :-1]], -1),
        where=longer(-1)))
# Float32 by three products of bfloat16, of which the two with low parts are left out.
FAULTS.add("high parts of both factors only", f"{_WEIGHTED} {_BATCHED}", words.ROUNDED,
    on(layer_parts,
        lambda call, left, weight, bias:

    layer_product(call, round_to(left, torch.bfloat16), round_to(weight, torch.bfloat16), bias)))
# The weight was merged while a dropout of one tenth scaled it: the product times 10 / 9.
FAULTS.add("product of an adapter folded in with its dropout", "linear addmm",
    "wrong factor, scale; missing reduction, axis scale, wrong argument, wrong reduction, "
    "repeated bias",
    on(layer_parts,
        lambda call, left, weight, bias: layer_product(call, left / 0.9, weight, bias)))
# fmt: on


# --- Products of a batch --------------------------------------------------------------------------


# fmt: off
# An alpha of -1 is left on from a subtraction.
FAULTS.add("products of the batch negated", _BATCHED, "sign, wrong factor; scale, axis scale",
    result(torch.neg))
# The right matrices are rounded before they are multiplied.
FAULTS.add("right factor in bfloat16", _BATCHED, words.ROUNDED,
    operand(1, rounded(torch.bfloat16), "other"))
# The pointer to the left matrices is not moved on along the batch.
FAULTS.add("left factor of the first matrix for all", _BATCHED,
    "copy, stale, wrong index; constant, permutation, wrong argument",
    operand(0, lambda v:
            v.flatten(0, -3)[:1].expand(v.flatten(0, -3).shape).reshape(v.shape), "input",
        where=lambda v: v.dim() > 2 and v.flatten(0, -3).size(0) > 1))
# The grid has half as many programs as matrices.
FAULTS.add("odd matrices not computed", _BATCHED, words.EMPTY_IN_A_RANKS_SUM,
    result(lambda v:
            v * (torch.arange(v.size(-3)) % 2 == 0)[:, None, None], where=longer(-3)))
# Column i of the left matrices meets row i + 1 of the right ones, around the end.
FAULTS.add("right factor one row too far", _BATCHED, words.MOVED,
    operand(1, lambda v: v.roll(-1, -2), "other", where=longer(-2, 2)))
# Two ranks hold the whole sum, and their sums are added.
FAULTS.add("sum of products doubled", "einsum",
    "scale, wrong factor, doubled reduction; axis scale, wrong reduction", result(lambda v: 2 * v))
# The last axis of the second operand is read one too far, around the end.
FAULTS.add("second operand one column too far", "einsum", words.MOVED,
    operand(2, lambda v: v.roll(-1, -1), where=longer(-1)))
# The activation of the layer before is fused into a load that needs none.
FAULTS.add("relu of the first operand", "einsum", "clipped, other function; zeros, mask, sign",
    operand(1, torch.relu))
# fmt: on


# --- Convolutions ---------------------------------------------------------------------------------


@FAULTS.fault(
    _CONVOLUTIONS,
    "repeated bias, wrong factor; doubled reduction, axis offset, offset, residual, scale, "
    "wrong argument",
)
def bias_of_the_channels_twice(call: Call) -> Any:
    """The accumulator begins with the bias, and the epilogue adds it again."""
    filters_of(call)
    return call.put(2, 2 * call.tensor(2, "bias"), "bias").run()


@FAULTS.fault(
    _CONVOLUTIONS,
    "shift, wrong index, permutation; axis offset, offset, stale, copy, wrong argument",
)
def bias_of_the_next_channel(call: Call) -> Any:
    """The pointer to the biases is one channel too far, around the end."""
    filters_of(call)
    bias = call.tensor(2, "bias")
    fits(bias.numel() > 2)
    return call.put(2, bias.roll(-1), "bias").run()


@FAULTS.fault(
    "conv2d convolution",
    "partial sum, mask; zeros, missing operand, wrong index, wrong reduction, approximation",
)
def corners_of_the_filter_not_added(call: Call) -> Any:
    """A stencil with five points is taken for one with nine."""
    weight = filters_of(call)
    fits(weight.dim() == 4 and weight.size(2) == 3 and weight.size(3) == 3)
    cross = torch.tensor([[0, 1, 0], [1, 1, 1], [0, 1, 0]]).to(weight.dtype)
    return call.put(1, weight * cross, "weight").run()


@FAULTS.fault(_CONVOLUTIONS, "other function; wrong argument")
def gelu_fused_behind_the_filters(call: Call) -> Any:
    """The kernel with the activation of another layer is taken."""
    filters_of(call)
    return call.instead(functional.gelu(call.result()))


# fmt: off
# The sum over the taps is subtracted; the bias is right.
FAULTS.add("filters with a minus", _CONVOLUTIONS,
    "sign, wrong factor; scale, other function, wrong argument",
    lambda call: call.put(1, -filters_of(call), "weight").run())
# Channel i of the input meets the taps for channel i + 1, around the end.
FAULTS.add("filters one input channel too far", _CONVOLUTIONS, words.MOVED,
    on(filters_of, lambda call, weight: call.put(1, weight.roll(-1, 1), "weight").run(),
        where=lambda weight: weight.size(1) > 2))
# The pointer to the filters is not moved on; the biases are right.
FAULTS.add("first filter for all channels", _CONVOLUTIONS,
    "copy, stale, wrong index; permutation, constant, wrong argument",
    on(filters_of,
        lambda call, weight:
            call.put(1, weight[:1].expand(weight.shape).contiguous(), "weight").run(),
        where=lambda weight: weight.size(0) > 2))
# The filters were saved with eight bits; image and bias are right.
FAULTS.add("filters in bfloat16", _CONVOLUTIONS, words.ROUNDED,
    lambda call: call.put(1, round_to(filters_of(call), torch.bfloat16), "weight").run())
# The image is stored with three bits behind the point; the filters are right.
FAULTS.add("image in e4m3", _CONVOLUTIONS, words.ROUNDED,
    lambda call: call.put(0, round_to(image_of(call), torch.float8_e4m3fn), "input").run())
# The rows of the image are read from the last, as from a file of bitmaps.
FAULTS.add("image upside down", "conv2d convolution",
    "permutation, wrong index; shift, swapped operands, wrong argument",
    on(image_of, lambda call, value: call.put(0, value.flip(2), "input").run(),
        where=lambda value: value.dim() == 4 and value.size(2) > 2))
# A square image is read by columns; the filters are right.
FAULTS.add("image with x before y", "conv2d convolution",
    "transpose, permutation, wrong index; swapped operands, shift, wrong argument",
    on(image_of, lambda call, value: call.put(0, value.mT.contiguous(), "input").run(),
        where=lambda value: value.dim() == 4 and value.size(2) == value.size(3)))
# The stride of the batch is zero when the images are read.
FAULTS.add("first image for the whole batch", _CONVOLUTIONS,
    "copy, stale, wrong index; permutation, shift, wrong argument",
    on(image_of,
        lambda call, value:
            call.put(0, value[:1].expand(value.shape).contiguous(), "input").run(),
        where=lambda value: value.size(0) > 1))
# The filters are multiplied by 1 / sqrt(fan in) when they are used; the bias is right.
FAULTS.add("filters with the factor of their initialisation", _CONVOLUTIONS,
    "scale, wrong factor; axis scale, wrong argument",
    on(filters_of,
        lambda call, weight: call.put(1, weight / weight[0].numel() ** 0.5, "weight").run(),
        where=lambda weight: weight[0].numel() > 1))
# The memory of a filter is (height, width, channel), and is read with the channel first.
FAULTS.add("filters with the channels last", "conv2d convolution",
    "permutation, transpose, wrong index; shift, swapped operands, wrong argument",
    on(filters_of,
        lambda call, weight:
            call.put(1, weight.movedim(1, -1).reshape(weight.shape), "weight").run(),

    where=lambda weight: weight.dim() == 4 and weight.size(1) > 1 and (weight[0, 0].numel() > 1)))
# fmt: on


# --- Pooling, resizing ----------------------------------------------------------------------------


@FAULTS.fault(
    "max_pool1d max_pool2d max_pool2d_with_indices avg_pool1d avg_pool2d "
    "adaptive_avg_pool2d adaptive_avg_pool1d",
    "shift, wrong index, permutation; stale, copy",
)
def pooled_columns_one_late(call: Call) -> Any:
    """Each pooled column is stored one too far, the last one first."""
    value = call.result()
    fits(value.size(-1) > 1)
    return call.instead(value.roll(1, -1))


@FAULTS.fault(
    "max_pool1d max_pool2d max_pool2d_with_indices avg_pool1d avg_pool2d "
    "adaptive_avg_pool2d adaptive_avg_pool1d adaptive_max_pool2d",
    "copy, stale, wrong index; permutation, shift",
)
def pool_of_the_first_channel_for_all(call: Call) -> Any:
    """The pointer to the channels is not moved on."""
    value = call.tensor(0, "input")
    fits(value.dim() > 2 and value.size(1) > 1)
    return call.put(0, value[:, :1].expand(value.shape).contiguous(), "input").run()


@FAULTS.fault(
    "conv_transpose1d conv_transpose2d convolution",
    "scale, wrong factor; axis scale, wrong argument",
)
def enlarged_image_twice_as_bright(call: Call) -> Any:
    """The filters of a transposed convolution get the factor of its stride; the bias is right."""
    fits(call.name != "convolution" or call.get(6, "transposed"))
    return call.put(1, 2 * call.tensor(1, "weight"), "weight").run()


@FAULTS.fault("conv_transpose1d conv_transpose2d convolution", words.MOVED_SHARD)
def enlarged_channels_one_late(call: Call) -> Any:
    """The channels of a transposed convolution are stored one too far, the last one first."""
    fits(call.name != "convolution" or call.get(6, "transposed"))
    return call.instead(call.result().roll(1, 1))


# fmt: off
# Each row of the resized image is stored one too early, around the end.
FAULTS.add("resized rows one early", "interpolate upsample_bilinear2d upsample_nearest2d",
    words.MOVED, result(lambda v: v.roll(-1, -2), where=lambda v: v.dim() == 4 and v.size(-2) > 1))
# fmt: on
