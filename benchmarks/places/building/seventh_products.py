"""Faults for measuring: products, convolutions, pooling, resizing."""

from __future__ import annotations

from typing import Any

import torch
from benchmarks.places import words
from benchmarks.places.calls import Call, Catalogue, fits, with_gradient_of
from benchmarks.places.changes import computed, longer, on, operand, result, rounded
from benchmarks.places.parts import (
    change_weight,
    filters_of,
    layer_parts,
    layer_product,
    result_rows,
    several_matrices,
)
from torch import Tensor

FAULTS = Catalogue()
_WEIGHTED = "linear addmm mm"
_PRODUCTS = "linear addmm mm bmm matmul"
_CONVOLUTIONS = "conv1d conv2d convolution"


# --- Products -------------------------------------------------------------------------------------


def _rebiased(call: Call, change: Any) -> Any:
    """The call with a changed bias."""
    place = 0 if call.name == "addmm" else 2
    bias = call.tensor(place, "bias")
    fits(bias.dim() == 1 and bias.numel() > 2 and bool(bias.detach().any()))
    return call.put(place, change(bias), "bias").run()


@FAULTS.forward(_WEIGHTED, words.EMPTY_IN_A_SUM)
def even_columns_only_written(call: Call) -> Any:
    """The store has a stride of two along the columns."""
    value = call.result().clone()
    fits(value.size(-1) > 2)
    value[..., 1::2] = 0
    return call.instead(value)


@FAULTS.forward(_PRODUCTS, words.EMPTY_IN_A_SUM)
def first_row_of_the_product_empty(call: Call) -> Any:
    """The grid begins with the second row."""
    value = result_rows(call, 3).clone()
    value[..., 0, :] = 0
    return call.instead(value)


@FAULTS.forward(
    "linear addmm", "mask, missing bias, missing operand; axis offset, offset, zeros, wrong index"
)
def bias_in_even_columns_only(call: Call) -> Any:
    """The second of two lanes does not load its bias."""

    def change(bias: Tensor) -> Tensor:
        return bias * (torch.arange(bias.numel()) % 2 == 0)

    return _rebiased(call, change)


@FAULTS.forward(
    "linear addmm conv1d conv2d convolution",
    "copy, stale, wrong index; axis offset, permutation, wrong rank's shard, shift, offset",
)
def bias_of_the_first_half_for_both(call: Call) -> Any:
    """The second tile of columns adds the bias of the first."""

    def change(bias: Tensor) -> Tensor:
        half = (bias.numel() + 1) // 2
        return bias[torch.arange(bias.numel()) % half]

    return _rebiased(call, change)


@FAULTS.forward(
    _WEIGHTED, "permutation, transpose, wrong index; shift, swapped operands, wrong argument"
)
def squares_of_the_weight_transposed(call: Call) -> Any:
    """The weight is stored in squares of four by four, and each is read the other way."""
    left, weight, bias = layer_parts(call)
    fits(weight.size(0) % 4 == 0 and weight.size(1) % 4 == 0)
    blocks = weight.unflatten(1, (-1, 4)).unflatten(0, (-1, 4))
    return layer_product(call, left, blocks.transpose(1, 3).flatten(2, 3).flatten(0, 1), bias)


@FAULTS.forward(_WEIGHTED, words.ROUNDED)
def weight_in_sixteen_levels_of_each_column(call: Call) -> Any:
    """Four bits between the smallest and the largest weight of a column."""

    def change(weight: Tensor) -> Tensor:
        low = weight.amin(0, keepdim=True)
        step = (weight.amax(0, keepdim=True) - low).clamp(min=1e-9) / 15
        return ((weight - low) / step).round() * step + low

    return change_weight(call, change)


@FAULTS.forward(_WEIGHTED, words.ROUNDED)
def input_in_steps_of_an_eighth(call: Call) -> Any:
    """Fixed point with three bits behind the point."""
    left, weight, bias = layer_parts(call)
    coarse = (left.detach() * 8).round() / 8
    return layer_product(call, with_gradient_of(left, coarse), weight, bias)


@FAULTS.forward(
    _WEIGHTED,
    "wrong reduction, other function; partial sum, missing reduction, clipped, one rank's part",
)
def larger_of_two_splits(call: Call) -> Any:
    """The parts of two halves of the common axis are reduced by a maximum."""
    left, weight, bias = layer_parts(call)
    half = weight.size(0) // 2
    fits(half > 0)
    value = torch.maximum(left[..., :half] @ weight[:half], left[..., half:] @ weight[half:])
    return call.instead(value if bias is None else value + bias)


@FAULTS.forward(
    _WEIGHTED, "wrong factor, scale; missing operand, axis scale, wrong argument, wrong reduction"
)
def input_scaled_up_for_a_dropout(call: Call) -> Any:
    """Divided by the chance to be kept, 0.8, although nothing is dropped; the bias is right."""
    left, weight, bias = layer_parts(call)
    return layer_product(call, left / 0.8, weight, bias)


@FAULTS.forward(
    _WEIGHTED,
    "wrong factor, axis scale, mask; scale, one rank's part, missing operand, partial sum",
)
def columns_of_the_second_rank_halved(call: Call) -> Any:
    """The second half of the columns is averaged with a rank that has nothing."""
    value = call.result()
    half = value.size(-1) // 2
    fits(half > 0)
    return call.instead(torch.cat([value[..., :half], value[..., half:] / 2], -1))


@FAULTS.forward(
    _WEIGHTED, "wrong factor, axis scale, mask, doubled reduction; scale, one rank's part, residual"
)
def rows_of_the_second_half_added_twice(call: Call) -> Any:
    """Two ranks share the tokens, and the second half is summed over both."""
    value = result_rows(call)
    half = value.size(-2) // 2
    return call.instead(torch.cat([value[..., :half, :], 2 * value[..., half:, :]], -2))


@FAULTS.forward(
    _WEIGHTED,
    "zeros, mask, partial sum; approximation, precision, other function, missing operand, "
    "wrong argument",
)
def smaller_half_of_the_weights_pruned(call: Call) -> Any:
    """Weights whose magnitude is below the median are zero."""

    def change(weight: Tensor) -> Tensor:
        return weight * (weight.abs() >= weight.abs().median())

    return change_weight(call, change)


@FAULTS.forward(_WEIGHTED, words.SATURATED)
def weight_not_above_its_mean_magnitude(call: Call) -> Any:
    """The scale of the integers is made of the mean and not of the largest weight."""

    def change(weight: Tensor) -> Tensor:
        limit = float(weight.abs().mean())
        return weight.clamp(-limit, limit)

    return change_weight(call, change)


@FAULTS.forward(_WEIGHTED, "copy, wrong index, stale, wrapped; permutation, shift")
def columns_wrap_at_a_power_of_two(call: Call) -> Any:
    """The number of the column is masked: behind the last power of two, the first ones return."""
    value = call.result()
    size = value.size(-1)
    power = 1 << (size - 1).bit_length() - 1
    fits(size > 4)
    return call.instead(value[..., torch.arange(size) % power])


@FAULTS.forward(
    _WEIGHTED,
    "constant, missing operand, wrong index; mask, offset, axis offset, wrong argument, "
    "uninitialised",
)
def last_feature_of_the_input_is_one(call: Call) -> Any:
    """The last feature is overwritten by the one of a bias that is folded into the weight."""
    left, weight, bias = layer_parts(call)
    fits(left.size(-1) > 1)
    left = torch.cat([left[..., :-1], torch.ones_like(left[..., -1:])], -1)
    return layer_product(call, left, weight, bias)


@FAULTS.forward(_WEIGHTED, words.REPEATED)
def weight_of_the_first_columns_again(call: Call) -> Any:
    """The tile of the weight is not loaded again for the second half of the columns."""
    left, weight, bias = layer_parts(call)
    half = (weight.size(1) + 1) // 2
    fits(weight.size(1) > 1)
    return layer_product(call, left, weight[:, torch.arange(weight.size(1)) % half], bias)


@FAULTS.forward(
    _PRODUCTS,
    "sign, wrong factor, mask; scale, other function, wrong argument, wrong reduction, partial sum",
)
def second_half_of_the_products_subtracted(call: Call) -> Any:
    """The second split of the common axis is subtracted from the first."""
    if call.name in {"bmm", "matmul"}:
        left, weight, bias = call.tensor(0), call.tensor(1), None
    else:
        left, weight, bias = layer_parts(call)
    half = left.size(-1) // 2
    fits(half > 0 and left.dim() > 1 and weight.dim() > 1)
    sign = torch.ones(left.size(-1), dtype=left.dtype)
    sign[half:] = -1
    return layer_product(call, left * sign, weight, bias)


@FAULTS.forward(_WEIGHTED, "copy, stale, wrong index, wrong rank's shard; permutation, shift, mask")
def border_of_two_column_tiles_overwritten(call: Call) -> Any:
    """The second tile is stored one column early: its first column covers the last of the first."""
    value = call.result()
    half = value.size(-1) // 2
    fits(half > 1)
    places = [*range(half - 1), half, *range(half, value.size(-1))]
    return call.instead(value[..., places])


@FAULTS.forward(
    _WEIGHTED,
    "wrong factor, doubled reduction, wrong reduction; mask, axis scale, residual, "
    "partial sum, wrong argument, scale",
)
def overlap_of_two_shards_added_twice(call: Call) -> Any:
    """Two ranks both have the middle half of the common axis."""
    left, weight, bias = layer_parts(call)
    size = left.size(-1)
    fits(size > 3)
    times = torch.ones(size, dtype=left.dtype)
    times[size // 4 : size - size // 4] = 2
    return layer_product(call, left * times, weight, bias)


# fmt: off
# The pointer to the rows of the input is not moved on.
FAULTS.add("product of the first row for all", _WEIGHTED, words.REPEATED,
    computed(result_rows, lambda value: value[..., :1, :].expand(value.shape).clone()),
    backward=False)
# The offset of the second block of rows is not added when the input is read.
FAULTS.add("second half of the rows is the first", _WEIGHTED, words.REPEATED,
    computed(result_rows,
        lambda value: value[..., torch.arange(value.size(-2)) % ((value.size(-2) + 1) // 2), :]),
    backward=False)
# Two ranks share the bias, and their parts are averaged.
FAULTS.add("half of the bias", "linear addmm conv1d conv2d convolution",
    "wrong factor, scale, missing bias; axis offset, offset, wrong argument, missing operand, "
    "one rank's part", lambda call: _rebiased(call, lambda bias: bias / 2), backward=False)
# The sign of the bias is lost in a buffer of numbers without one.
FAULTS.add("magnitudes of the bias", "linear addmm conv1d conv2d convolution",
    "sign, other function; wrong factor, axis offset, offset, wrong argument",
    lambda call: _rebiased(call, lambda bias: bias.abs()), backward=False)
# The mean of the products for their sum, as for a readout that is 1 / width.
FAULTS.add("product divided by the number of features", _WEIGHTED,
    "wrong factor, scale; missing operand, axis scale, wrong argument, wrong reduction",
    on(layer_parts,
        lambda call, left, weight, bias: layer_product(call, left / left.size(-1), weight, bias),
        where=lambda left, *_: left.size(-1) > 1), backward=False)
# Heads of width eight are stored in the layout of the other rotary convention.
FAULTS.add("halves of each eight columns interleaved", _WEIGHTED, words.REORDERED,
    result(lambda v: v.unflatten(-1, (-1, 2, 4)).transpose(-1, -2).flatten(-3),
        where=lambda v: v.size(-1) % 8 == 0), backward=False)
# The vocabulary is padded: the last two columns are -100, which they should not be.
FAULTS.add("last columns taken for padding", _WEIGHTED,
    "constant, mask; wrong index, clipped, missing operand, uninitialised",
    result(lambda v: torch.cat([v[..., :-2], torch.full_like(v[..., -2:], -100.0)], -1),
        where=longer(-1, 4)), backward=False)
# A soft cap of one and a half that belongs to the logits of another model.
FAULTS.add("product capped by a tanh", _PRODUCTS,
    "other function, clipped; approximation, wrong factor",
    result(lambda v: 1.5 * (v / 1.5).tanh()), backward=False)
# The kernel with a fused norm is launched where no norm is.
FAULTS.add("input divided by its root mean square", _WEIGHTED,
    "wrong factor, axis scale, other function, wrong statistics; scale, wrong argument",
    on(layer_parts,
        lambda call, left, weight, bias:

    layer_product(call, left / (left.square().mean(-1, keepdim=True) + 1e-06).sqrt(), weight, bias),
        where=lambda left, *_: left.size(-1) > 1), backward=False)
# The mean of each row is subtracted, as by the norm that is folded in elsewhere.
FAULTS.add("input centred by the kernel", _WEIGHTED,
    "axis offset, residual, missing operand, wrong statistics; offset, other function, "
    "wrong argument",
    on(layer_parts,
        lambda call, left, weight, bias:
            layer_product(call, left - left.mean(-1, keepdim=True), weight, bias),
        where=lambda left, *_: left.size(-1) > 1), backward=False)
# Written as (position, batch) and read as (batch, position).
FAULTS.add("rows stored with the batch last", _WEIGHTED, words.REORDERED,
    result(lambda v: v.transpose(0, 1).reshape(v.shape),
        where=lambda v: v.dim() == 3 and v.size(0) > 1 and v.size(1) > 1), backward=False)
# Of each four features, the two in the middle are read in the other order.
FAULTS.add("features of the input swizzled", _WEIGHTED, words.REORDERED,
    on(layer_parts,
        lambda call, left, weight, bias:

    layer_product(call, left.unflatten(-1, (-1, 4))[..., [0, 2, 1, 3]].flatten(-2), weight, bias),
        where=lambda left, *_: left.size(-1) % 4 == 0), backward=False)
# The result is stored without its sign.
FAULTS.add("magnitudes of the product", _WEIGHTED, "sign, other function; wrong factor, mask",
    result(torch.abs), backward=False)
# Each row begins with the right result of the row before it.
FAULTS.add("accumulator kept between rows", _WEIGHTED,
    "residual, stale, doubled reduction; offset, lost accumulation, shift, wrong index, "
    "axis offset",
    computed(result_rows,
        lambda value:
            value + torch.cat([torch.zeros_like(value[..., :1, :]), value[..., :-1, :]], -2)),
    backward=False)
# A statistic of the batch is subtracted: the mean of each column over all rows.
FAULTS.add("columns centred over the rows", _WEIGHTED,
    "axis offset, residual, wrong statistics; other function, offset, missing operand, "
    "wrong reduction", computed(result_rows, lambda value: value - value.flatten(0, -2).mean(0)),
    backward=False)
# fmt: on


# --- Products of a batch --------------------------------------------------------------------------

_BATCHED = "bmm matmul"


@FAULTS.forward(_BATCHED, words.MOVED_OR_SWAPPED)
def left_factor_of_the_next_matrix(call: Call) -> Any:
    """The pointer to the left factor is one matrix too far."""
    left = call.tensor(0)
    several_matrices(call)
    fits(left.dim() > 2 and left.size(-3) > 1)
    return call.put(0, left.roll(-1, -3)).run()


@FAULTS.forward(_BATCHED, words.EMPTY_IN_A_SUM)
def upper_right_tile_empty(call: Call) -> Any:
    """One of four tiles of each matrix is not computed."""
    value = several_matrices(call).clone()
    value[..., : value.size(-2) // 2, value.size(-1) // 2 :] = 0
    return call.instead(value)


@FAULTS.forward(_BATCHED, words.REORDERED)
def columns_of_the_right_factor_in_pairs(call: Call) -> Any:
    """Two columns of the right factor are loaded in the other order."""
    right = call.tensor(1)
    several_matrices(call)
    fits(right.size(-1) % 2 == 0)
    return call.put(1, right.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)).run()


@FAULTS.forward(_BATCHED, words.REPEATED)
def first_column_of_the_right_factor_for_all(call: Call) -> Any:
    """The stride of the columns of the right factor is zero."""
    right = call.tensor(1)
    several_matrices(call)
    return call.put(1, right[..., :1].expand(right.shape).clone()).run()


# fmt: off
# The products of the batch are averaged, as those of heads of one key.
FAULTS.add("mean of the matrices for each", _BATCHED,
    "wrong reduction, wrong statistics, constant; copy, wrong axis, stale, wrong index",
    computed(several_matrices,
        lambda value: value.mean(-3, keepdim=True).expand(value.shape).clone(),
        where=lambda value: value.size(-3) > 1), backward=False)
# Nothing is related to itself: a loop that leaves out i = j.
FAULTS.add("diagonal of each matrix empty", _BATCHED,
    "zeros, mask, uninitialised; constant, missing operand, wrong index",
    computed(several_matrices,
        lambda value: value.masked_fill(torch.eye(value.size(-1), dtype=torch.bool), 0),
        where=lambda value: value.size(-1) == value.size(-2)), backward=False)
# Every second matrix of the batch has a minus.
FAULTS.add("odd matrices negated", _BATCHED,
    "sign, wrong factor, axis scale, mask; scale, one rank's part",
    computed(several_matrices,
        lambda value:
            value * (1 - 2 * (torch.arange(value.size(-3)) % 2).to(value.dtype)).view(-1, 1, 1),
        where=lambda value: value.size(-3) > 1), backward=False)
# The first axis of the second operand is read from its end.
FAULTS.add("experts from the last to the first", "einsum", words.REORDERED,
    operand(2, lambda v: v.flip(0), where=lambda v: v.dim() > 1 and v.size(0) > 1), backward=False)
# The tokens are rounded.
FAULTS.add("first operand of the sum in bfloat16", "einsum", words.ROUNDED,
    operand(1, rounded(torch.bfloat16)), backward=False)
# Averaged over two ranks that have a part each.
FAULTS.add("sum of products halved", "einsum",
    "wrong factor, scale; missing operand, axis scale, wrong argument, wrong reduction",
    result(lambda v: v / 2), backward=False)
# The pointer to the weights is not moved on with the groups.
FAULTS.add("all tokens by the first expert", "grouped_mm_fallback", words.REPEATED,
    operand(1, lambda v: v[:1].expand(v.shape).clone(),
        where=lambda v: v.dim() == 3 and v.size(0) > 1), backward=False)
# fmt: on


# --- Convolutions ---------------------------------------------------------------------------------


def _image(call: Call) -> Tensor:
    """The result of a convolution of more than one pixel."""
    filters_of(call)
    value = call.result()
    fits(value.size(-1) > 2)
    return value


@FAULTS.forward(_CONVOLUTIONS, "mask, missing bias, missing operand; offset, axis offset, zeros")
def no_bias_at_the_border(call: Call) -> Any:
    """The kernel for the border has no epilogue."""
    value, bias = _image(call), call.tensor(2, "bias")
    fits(bool(bias.detach().any()))
    at_border = torch.zeros(value.size(-1), dtype=value.dtype)
    at_border[[0, -1]] = 1
    return call.instead(value - at_border * bias.view(-1, *[1] * (value.dim() - 2)))


@FAULTS.forward(_CONVOLUTIONS, words.ROUNDED)
def filters_through_float8(call: Call) -> Any:
    """The filters are stored in e4m3, as they are."""
    weight = filters_of(call)
    coarse = weight.detach().to(torch.float8_e4m3fn).to(weight.dtype)
    return call.put(1, with_gradient_of(weight, coarse), "weight").run()


@FAULTS.forward(_CONVOLUTIONS, words.EMPTY_IN_A_SUM)
def last_image_of_the_batch_empty(call: Call) -> Any:
    """The grid has one image too few."""
    value = _image(call).clone()
    fits(value.size(0) > 1)
    value[-1] = 0
    return call.instead(value)


@FAULTS.forward(
    _CONVOLUTIONS,
    "partial sum, one rank's part, mask, missing reduction; zeros, wrong argument, "
    "missing operand, wrong reduction",
)
def second_half_of_the_input_channels_not_added(call: Call) -> Any:
    """The channels are shared by two ranks, and their parts are not summed."""
    weight = filters_of(call).clone()
    fits(weight.size(1) > 1)
    weight[:, weight.size(1) // 2 :] = 0
    return call.put(1, weight, "weight").run()


@FAULTS.forward(_CONVOLUTIONS, words.SATURATED)
def image_saturates(call: Call) -> Any:
    """The range of the input is half of its largest magnitude."""
    value = call.tensor(0, "input")
    filters_of(call)
    limit = float(value.detach().abs().max()) / 2
    return call.put(0, value.clamp(-limit, limit), "input").run()


@FAULTS.forward(
    _CONVOLUTIONS,
    "doubled reduction, wrong factor, wrong reduction, mask; off by one reduction, "
    "residual, scale, wrong argument, axis scale",
)
def last_tap_added_twice(call: Call) -> Any:
    """The loop over the width of the filter overlaps its tail."""
    weight = filters_of(call)
    fits(weight.size(-1) > 1)
    times = torch.ones(weight.size(-1), dtype=weight.dtype)
    times[-1] = 2
    return call.put(1, weight * times, "weight").run()


_TRANSPOSED = "conv_transpose1d conv_transpose2d"


@FAULTS.forward(
    "conv1d conv2d convolution",
    "wrong factor, wrong index, axis scale; scale, shift, stale, wrong argument",
)
def length_of_the_next_filter(call: Call) -> Any:
    """Weight norm: each filter gets the length of the next one."""
    weight = filters_of(call)
    fits(weight.size(0) > 1)
    length = weight.flatten(1).norm(dim=1).view(-1, *[1] * (weight.dim() - 1))
    return call.put(1, weight / length * length.roll(-1, 0), "weight").run()


@FAULTS.forward(
    _CONVOLUTIONS,
    "sign, wrong factor, wrong argument; mask, other function, wrong index, scale, residual",
)
def wrong_sign_in_the_output_transformation(call: Call) -> Any:
    """Winograd's F(2, 3) along the width: the fourth product has the wrong sign at odd pixels."""
    weight, value = filters_of(call), _image(call)
    fits(weight.size(-1) == 3)
    first, second, third = weight.unbind(-1)
    other = torch.stack([first + 2 * third, second, -third], -1)
    odd = torch.arange(value.size(-1)) % 2 == 1
    changed = call.put(1, other, "weight").result()
    return call.instead(torch.where(odd, changed, value))


@FAULTS.forward(
    "conv2d convolution",
    "wrong index, stale, wrong argument; shift, copy, mask, residual, uninitialised",
)
def padding_read_from_the_neighbouring_rows(call: Call) -> Any:
    """The column is not checked: left of a row is the end of the row above, right of it the next.

    The first and the last row go around.
    """
    value, weight = call.tensor(0, "input"), filters_of(call)
    padding = call.get(4, "padding", default=0)
    both = [padding] * 2 if isinstance(padding, int) else list(padding)
    fits(value.dim() == 4 and both == [1, 1])
    left, right = value[..., -1:].roll(1, -2), value[..., :1].roll(-1, -2)
    wide = torch.cat([left, value, right], -1)
    return call.put(0, wide, "input").put(4, [1, 0], "padding").put(1, weight, "weight").run()


# fmt: off
# The channels are stored one too early, bias and all.
FAULTS.add("result of the next channel", _CONVOLUTIONS, words.MOVED_OR_SWAPPED,
    computed(_image, lambda value: value.roll(-1, 1), where=lambda value: value.size(1) > 1),
    backward=False)
# The columns of the result are stored one too late, around the end.
FAULTS.add("pixels one to the right", _CONVOLUTIONS, words.MOVED_OR_SWAPPED,
    lambda call: call.instead(_image(call).roll(1, -1)), backward=False)
# The loop over the batch ends after its first pass when the bias is added.
FAULTS.add("bias of the first image only", _CONVOLUTIONS,
    "mask, missing bias, missing operand; offset, axis offset, one rank's part, zeros",
    computed(lambda call: (_image(call), call.tensor(2, "bias")),
        lambda value, bias:
            torch.cat([value[:1], (value - bias.view(-1, *[1] * (value.dim() - 2)))[1:]]),
        where=lambda value, bias: value.size(0) > 1 and bool(bias.detach().any())), backward=False)
# The last column still holds what was stored before.
FAULTS.add("last column of pixels is the one before", _CONVOLUTIONS, words.REPEATED,
    computed(_image, lambda value: torch.cat([value[..., :-1], value[..., -2:-1]], -1)),
    backward=False)
# A separable filter whose second part is even: all taps of a row are their mean.
FAULTS.add("filter averaged over its width", _CONVOLUTIONS,
    "wrong reduction, constant, wrong statistics; copy, other function, wrong argument, "
    "approximation",
    on(filters_of,
        lambda call, weight:
            call.put(1, weight.mean(-1, keepdim=True).expand(weight.shape).clone(), "weight").run(),
        where=lambda weight: weight.size(-1) > 1), backward=False)
# The filters are read as numbers without a sign.
FAULTS.add("magnitudes of the filters", _CONVOLUTIONS,
    "sign, other function; wrong factor, wrong argument",
    lambda call: call.put(1, filters_of(call).abs(), "weight").run(), backward=False)
# Square images are stored with x before y.
FAULTS.add("result with rows and columns exchanged", _CONVOLUTIONS,
    "transpose, permutation, wrong index; shift, swapped operands",
    computed(_image, lambda value: value.mT,
        where=lambda value: value.dim() == 4 and value.size(-1) == value.size(-2)), backward=False)
# Once where the buffer is filled, and once behind the kernel.
FAULTS.add("bias of the enlarged image twice", _TRANSPOSED,
    "repeated bias, wrong factor, residual; axis offset, offset, scale, doubled reduction, "
    "wrong argument", operand(2, lambda v: 2 * v, "bias"))
# The mean of each channel is subtracted, as by an instance norm that is half fused.
FAULTS.add("channels centred behind the convolution", _CONVOLUTIONS,
    "axis offset, residual, wrong statistics; offset, missing operand, other function",
    computed(_image,
        lambda value: value - value.mean(list(range(2, value.dim())), keepdim=True)),
    backward=False)
# fmt: on


# --- Pooling, resizing ----------------------------------------------------------------------------


@FAULTS.fault(
    "adaptive_avg_pool1d adaptive_avg_pool2d",
    "wrong factor, scale, wrong reduction; missing operand, wrong statistics",
)
def regions_summed(call: Call) -> Any:
    """Not divided by the number of pixels of a region."""
    value, result = call.tensor(0, "input"), call.result()
    dims = range(2, value.dim()) if call.name.endswith("2d") else [value.dim() - 1]
    fits(all(value.size(dim) % result.size(dim) == 0 for dim in dims))
    times = 1
    for dim in dims:
        times *= value.size(dim) // result.size(dim)
    return call.instead(result * times)


@FAULTS.forward(
    "pad constant_pad_nd",
    "wrong argument, constant, mask; offset, other function, uninitialised, sign",
)
def padded_with_minus_one(call: Call) -> Any:
    """-1 where nothing was meant, as for an image that is centred."""
    value, widths = call.tensor(0), call.get(1, "pad")
    fits(call.get(2, "mode", default="constant") in {"constant", 0})
    fits(all(one >= 0 for one in widths))
    return call.instead(torch.nn.functional.pad(value, list(widths), value=-1.0))


# fmt: off
# The absolute values are pooled.
FAULTS.add("magnitudes averaged in the window",
    "avg_pool1d avg_pool2d adaptive_avg_pool1d adaptive_avg_pool2d",
    "sign, other function; wrong argument, wrong reduction, wrong statistics",
    operand(0, torch.abs, "input", where=lambda v: bool((v.detach() < 0).any())), backward=False)
# The running maximum of a window begins with zero.
FAULTS.add("largest of the window and zero",
    "max_pool1d max_pool2d max_pool2d_with_indices adaptive_max_pool2d",
    "clipped, other function; mask, zeros, wrong argument, wrong reduction", result(torch.relu),
    backward=False)
# fmt: on
