"""Faults that were measured sixth and have been seen: products, convolutions, pooling."""

from __future__ import annotations

from typing import Any

import torch
from benchmarks.places.calls import Call, Catalogue, fits, with_gradient_of
from torch import Tensor

FAULTS = Catalogue()
_WEIGHTED = "linear addmm mm"
_PRODUCTS = "linear addmm mm bmm matmul"
_CONVOLUTIONS = "conv1d conv2d convolution"


# --- Products -------------------------------------------------------------------------------------


def _parts(call: Call) -> tuple[Tensor, Tensor, Tensor | None]:
    """Input, weight as (in, out), bias."""
    if call.name == "linear":
        weight, bias = call.tensor(1, "weight"), call.get(2, "bias")
        fits(weight.dim() == 2)
        return call.tensor(0, "input"), weight.t(), bias
    if call.name == "addmm":
        return call.tensor(1), call.tensor(2), call.tensor(0)
    return call.tensor(0), call.tensor(1), None


def _product(call: Call, left: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
    value = left @ weight
    return call.instead(value if bias is None else value + bias)


def _reweighted(call: Call, change: Any) -> Any:
    left, weight, bias = _parts(call)
    return _product(call, left, with_gradient_of(weight, change(weight.detach())), bias)


def _rebiased(call: Call, change: Any) -> Any:
    """The call with a changed bias."""
    place = 0 if call.name == "addmm" else 2
    bias = call.tensor(place, "bias")
    fits(bias.dim() == 1 and bias.numel() > 2)
    return call.put(place, change(bias), "bias").run()


@FAULTS.fault(
    _PRODUCTS,
    kinds=["zeros", "mask", "uninitialised"],
    loose=["constant", "wrong index", "axis scale", "wrong factor"],
    backward=False,
)
def tail_of_a_row_written_onto_the_next(call: Call) -> Any:
    """A store without a mask: the empty lanes behind a row land on the next one's first columns."""
    value = call.result().clone()
    fits(value.dim() > 1 and value.size(-2) > 1 and value.size(-1) > 3)
    value[..., 1:, :2] = 0
    return call.instead(value)


@FAULTS.fault(
    _WEIGHTED,
    kinds=["wrong factor", "scale"],
    loose=["wrong argument", "axis scale"],
    backward=False,
)
def product_divided_by_the_root_of_the_width(call: Call) -> Any:
    """X w / sqrt(k), as for weights that are stored without the factor of their initialisation."""
    left, weight, bias = _parts(call)
    return _product(call, left / left.size(-1) ** 0.5, weight, bias)


@FAULTS.fault(
    "linear addmm",
    kinds=["wrong factor", "scale", "wrong reduction"],
    loose=["missing operand", "one rank's part", "wrong argument"],
    backward=False,
)
def product_averaged_over_two_ranks(call: Call) -> Any:
    """The parts of two ranks are averaged and not summed; the bias is added afterwards."""
    left, weight, bias = _parts(call)
    fits(bias is not None)
    return _product(call, left / 2, weight, bias)


@FAULTS.fault(
    _WEIGHTED,
    kinds=["wrong rank's shard", "permutation", "wrong index"],
    loose=["shift", "swapped operands"],
    backward=False,
)
def four_shards_gathered_in_the_order_of_a_tree(call: Call) -> Any:
    """Columns of four ranks in the order 0, 2, 1, 3."""
    value = call.result()
    fits(value.size(-1) % 4 == 0)
    return call.instead(value.unflatten(-1, (4, -1))[..., [0, 2, 1, 3], :].flatten(-2))


@FAULTS.fault(_WEIGHTED, kinds=["precision"], loose=["approximation"], backward=False)
def weight_in_sixteen_even_levels(call: Call) -> Any:
    """Four bits with a step for each group of eight along k."""

    def change(weight: Tensor) -> Tensor:
        fits(weight.size(0) % 8 == 0)
        groups = weight.unflatten(0, (-1, 8))
        step = groups.abs().amax(1, keepdim=True).clamp(min=1e-9) / 7
        return ((groups / step).round() * step).flatten(0, 1)

    return _reweighted(call, change)


@FAULTS.fault(
    _WEIGHTED,
    kinds=["axis scale", "missing operand", "wrong factor"],
    loose=["scale", "wrong argument"],
    backward=False,
)
def codes_not_multiplied_by_their_scales(call: Call) -> Any:
    """Weights in eight bits with a scale for each column: the product is that of the codes."""
    left, weight, bias = _parts(call)
    scale = weight.detach().abs().amax(0, keepdim=True).clamp(min=1e-9) / 127
    return _product(call, left, weight / scale, bias)


@FAULTS.fault(_WEIGHTED, kinds=["permutation", "wrong index"], loose=["shift"], backward=False)
def eight_packed_columns_in_the_order_of_the_packing(call: Call) -> Any:
    """Eight weights of four bits in a word: 0, 2, 4, 6, 1, 3, 5, 7, bias and all."""
    left, weight, bias = _parts(call)
    fits(weight.size(-1) % 8 == 0)
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    packed = weight.unflatten(-1, (-1, 8))[..., order].flatten(-2)
    return _product(call, left, packed, bias)


@FAULTS.fault(
    _WEIGHTED,
    kinds=["clipped"],
    loose=["precision", "wrong argument", "other function"],
    backward=False,
)
def input_saturates_by_the_scale_of_the_step_before(call: Call) -> Any:
    """The range is that of smaller inputs: seven tenths of the largest."""
    left, weight, bias = _parts(call)
    limit = 0.7 * float(left.detach().abs().max())
    return _product(call, left.clamp(-limit, limit), weight, bias)


@FAULTS.fault(_WEIGHTED, kinds=["sign", "other function"], loose=["wrong factor"], backward=False)
def signs_of_the_weight_lost(call: Call) -> Any:
    """The weights are read as numbers without a sign."""
    left, weight, bias = _parts(call)
    return _product(call, left, weight.abs(), bias)


@FAULTS.fault(
    _WEIGHTED, kinds=["permutation", "wrong index"], loose=["shift", "copy"], backward=False
)
def tokens_not_put_back_in_their_order(call: Call) -> Any:
    """Rows are sorted for the kernel, even ones before odd ones, and stay so."""
    value = call.result()
    fits(value.dim() > 1 and value.size(-2) > 2)
    rows = [*range(0, value.size(-2), 2), *range(1, value.size(-2), 2)]
    return call.instead(value[..., rows, :])


@FAULTS.fault(
    _WEIGHTED,
    kinds=["stale", "copy", "wrong index"],
    loose=["permutation", "constant"],
    backward=False,
)
def weight_of_the_first_half_of_k_again(call: Call) -> Any:
    """The tile of the weight is not loaded again for the second half of the common axis."""
    left, weight, bias = _parts(call)
    half = weight.size(0) // 2
    fits(weight.size(0) % 2 == 0 and half > 0)
    return _product(call, left, torch.cat([weight[:half], weight[:half]]), bias)


@FAULTS.fault(
    "linear addmm conv1d conv2d convolution",
    kinds=["wrong factor", "scale", "repeated bias"],
    loose=["axis offset", "offset", "residual", "wrong argument"],
    backward=False,
)
def bias_ten_times_too_large(call: Call) -> Any:
    """A bias with a learning rate of its own is stored times ten."""
    return _rebiased(call, lambda bias: 10 * bias)


@FAULTS.fault(
    "linear addmm conv1d conv2d convolution",
    kinds=["permutation", "wrong index"],
    loose=["axis offset", "shift", "wrong rank's shard"],
    backward=False,
)
def halves_of_the_bias_exchanged(call: Call) -> Any:
    """The weight is packed in one order, the bias in the other."""
    return _rebiased(call, lambda bias: bias.roll(bias.numel() // 2, 0))


@FAULTS.fault(
    "linear addmm",
    kinds=["constant", "wrong reduction", "wrong statistics", "copy"],
    loose=["axis offset", "offset", "wrong index"],
    backward=False,
)
def mean_of_the_bias_for_all(call: Call) -> Any:
    """One zero point for all columns in the place of a bias for each."""
    return _rebiased(call, lambda bias: bias.mean().expand(bias.shape).clone())


@FAULTS.fault(
    "linear addmm",
    kinds=["clipped", "other function"],
    loose=["wrong argument", "mask"],
    backward=False,
)
def negative_biases_lost(call: Call) -> Any:
    """The bias is kept without a sign: what is negative is zero."""
    return _rebiased(call, lambda bias: bias.relu())


@FAULTS.fault(
    "linear addmm",
    kinds=["mask", "missing bias", "missing operand"],
    loose=["axis offset", "offset", "one rank's part"],
    backward=False,
)
def bias_for_the_first_row_only(call: Call) -> Any:
    """The epilogue runs in the first program along the rows."""
    left, weight, bias = _parts(call)
    fits(bias is not None and left.dim() > 1 and left.size(-2) > 1)
    assert bias is not None
    value = left @ weight
    return call.instead(torch.cat([value[..., :1, :] + bias, value[..., 1:, :]], -2))


@FAULTS.fault(
    _WEIGHTED,
    kinds=["wrong index", "shift", "permutation"],
    loose=["stale", "copy"],
    backward=False,
)
def input_of_the_next_example(call: Call) -> Any:
    """The pointer to the input is one example of the batch too far."""
    left, weight, bias = _parts(call)
    fits(left.dim() > 2 and left.size(0) > 1)
    return _product(call, left.roll(-1, 0), weight, bias)


@FAULTS.fault(
    _WEIGHTED,
    kinds=["partial sum", "mask", "wrong index"],
    loose=["off by one reduction", "missing operand"],
    backward=False,
)
def middle_of_the_common_axis_skipped(call: Call) -> Any:
    """A tile of two in the middle of k is added to a register that is thrown away."""
    left, weight, bias = _parts(call)
    size = left.size(-1)
    fits(size > 5)
    kept = torch.ones(size, dtype=left.dtype)
    kept[size // 2 - 1 : size // 2 + 1] = 0
    return _product(call, left * kept, weight, bias)


@FAULTS.fault(
    _WEIGHTED,
    kinds=["wrong factor", "doubled reduction", "wrong reduction", "mask"],
    loose=["partial sum", "scale", "off by one reduction", "residual"],
    backward=False,
)
def first_tile_of_the_common_axis_added_twice(call: Call) -> Any:
    """A prologue loads and adds the first quarter of k, and the loop does so again."""
    left, weight, bias = _parts(call)
    size = left.size(-1)
    fits(size > 3)
    times = torch.ones(size, dtype=left.dtype)
    times[: size // 4] = 2
    return _product(call, left * times, weight, bias)


@FAULTS.fault(
    _WEIGHTED, kinds=["nonfinite"], loose=["uninitialised", "mask", "overflow"], backward=False
)
def last_rows_hold_no_numbers(call: Call) -> Any:
    """The last row of the result is what the allocator gave: not a number."""
    value = call.result()
    fits(value.dim() > 1 and value.size(-2) > 1)
    missing = torch.full_like(value[..., -1:, :], torch.nan)
    return call.instead(torch.cat([value[..., :-1, :], missing], -2))


@FAULTS.fault(
    "linear addmm",
    kinds=["wrong factor", "other function", "axis scale"],
    loose=["scale", "wrong statistics"],
    backward=False,
)
def columns_of_the_result_with_their_neighbours_scale(call: Call) -> Any:
    """Weights are divided by the scale of their column, and multiplied by that of the next."""
    left, weight, bias = _parts(call)
    scale = weight.detach().abs().amax(0, keepdim=True).clamp(min=1e-9)
    return _product(call, left, weight / scale * scale.roll(-1, -1), bias)


@FAULTS.fault(
    "bmm matmul",
    kinds=["mask", "zeros", "uninitialised"],
    loose=["constant", "partial sum", "missing operand", "axis scale", "wrong factor"],
    backward=False,
)
def tiles_above_the_diagonal_not_computed(call: Call) -> Any:
    """A kernel for causal scores skips what is above the diagonal."""
    value = call.result()
    fits(value.dim() > 2 and value.size(-1) == value.size(-2) > 2)
    return call.instead(value.tril())


@FAULTS.fault(
    "bmm matmul",
    kinds=["transpose", "copy", "wrong index"],
    loose=["stale", "permutation", "mask"],
    backward=False,
)
def lower_triangle_mirrored(call: Call) -> Any:
    """The result is taken for symmetric: what is above the diagonal is a copy of what is below."""
    value = call.result()
    fits(value.dim() > 2 and value.size(-1) == value.size(-2) > 2)
    return call.instead(value.tril() + value.tril(-1).mT)


@FAULTS.fault(
    "bmm matmul",
    kinds=["wrong index", "permutation", "shift"],
    loose=["copy", "wrong rank's shard"],
    backward=False,
)
def halves_of_the_batch_exchanged(call: Call) -> Any:
    """The matrices of the second half of the batch are stored first."""
    value = call.result()
    fits(value.dim() > 2 and value.size(-3) % 2 == 0)
    return call.instead(value.roll(value.size(-3) // 2, -3))


@FAULTS.fault(
    "bmm matmul", kinds=["scale", "wrong factor"], loose=["wrong argument"], backward=False
)
def product_with_the_scale_of_a_head(call: Call) -> Any:
    """Divided by the root of the common axis, as scores are."""
    left = call.tensor(0)
    fits(left.dim() > 2 and left.size(-1) > 1)
    return call.instead(call.result() / left.size(-1) ** 0.5)


@FAULTS.fault(
    "bmm matmul",
    kinds=["zeros", "mask", "uninitialised"],
    loose=["constant", "missing operand", "axis scale", "wrong factor"],
    backward=False,
)
def first_column_of_each_matrix_empty(call: Call) -> Any:
    """The store begins with the second column."""
    value = call.result().clone()
    fits(value.dim() > 2 and value.size(-1) > 2)
    value[..., 0] = 0
    return call.instead(value)


@FAULTS.fault(
    "bmm matmul",
    kinds=["copy", "stale", "wrong index"],
    loose=["permutation", "constant"],
    backward=False,
)
def first_row_of_the_left_factor_for_all(call: Call) -> Any:
    """The pointer to the rows of the left factor is not moved on."""
    left = call.tensor(0)
    fits(left.dim() > 2 and left.size(-2) > 1)
    return call.put(0, left[..., :1, :].expand(left.shape).clone()).run()


@FAULTS.fault(
    "einsum",
    kinds=["copy", "stale", "wrong index"],
    loose=["permutation", "constant"],
    backward=False,
)
def first_row_of_the_first_operand_for_all(call: Call) -> Any:
    """The pointer to the tokens is not moved on."""
    value = call.tensor(1)
    fits(value.dim() > 1 and value.size(0) > 1)
    return call.put(1, value[:1].expand(value.shape).clone()).run()


@FAULTS.fault(
    "einsum", kinds=["sign", "wrong factor", "scale"], loose=["other function"], backward=False
)
def sum_of_products_negated(call: Call) -> Any:
    """The result has the wrong sign."""
    return call.instead(-call.result())


@FAULTS.fault(
    "grouped_mm_fallback",
    kinds=["wrong index", "shift", "permutation"],
    loose=["wrong rank's shard", "copy"],
    backward=False,
)
def weights_of_the_next_expert(call: Call) -> Any:
    """Each group of tokens is multiplied with the weights of the next expert."""
    weight = call.tensor(1)
    fits(weight.dim() == 3 and weight.size(0) > 1)
    return call.put(1, weight.roll(-1, 0)).run()


# --- Convolutions ---------------------------------------------------------------------------------


@FAULTS.fault(
    _CONVOLUTIONS,
    kinds=["wrong factor", "scale", "wrong argument"],
    loose=["axis scale"],
    backward=False,
)
def image_divided_by_255(call: Call) -> Any:
    """Pixels that are between 0 and 1 already are divided once more."""
    value = call.tensor(0, "input")
    fits(value.dim() > 2)
    return call.put(0, value / 255, "input").run()


@FAULTS.fault(
    _CONVOLUTIONS,
    kinds=["offset", "wrong argument"],
    loose=["axis offset", "residual", "other function"],
    backward=False,
)
def image_centred_once_more(call: Call) -> Any:
    """One half is subtracted from pixels that are centred already."""
    value = call.tensor(0, "input")
    fits(value.dim() > 2)
    return call.put(0, value - 0.5, "input").run()


@FAULTS.fault(
    _CONVOLUTIONS,
    kinds=["partial sum", "mask", "missing operand"],
    loose=["off by one reduction", "wrong index"],
    backward=False,
)
def centre_of_the_filter_lost(call: Call) -> Any:
    """The tap in the middle is not added."""
    weight = call.tensor(1, "weight").clone()
    fits(weight.dim() > 2 and weight.size(-1) > 2)
    weight[(..., *[size // 2 for size in weight.shape[2:]])] = 0
    return call.put(1, weight, "weight").run()


@FAULTS.fault(
    _CONVOLUTIONS, kinds=["copy", "stale", "wrong index"], loose=["permutation"], backward=False
)
def every_second_pixel_is_the_one_before(call: Call) -> Any:
    """Two pixels of a vector share a register."""
    value = call.result()
    fits(value.dim() > 2 and value.size(-1) > 1)
    return call.instead(value[..., torch.arange(value.size(-1)) // 2 * 2])


@FAULTS.fault(
    _CONVOLUTIONS, kinds=["copy", "stale", "wrong index"], loose=["permutation"], backward=False
)
def first_input_channel_for_all(call: Call) -> Any:
    """The stride of the channels of the image is zero."""
    value = call.tensor(0, "input")
    fits(value.dim() > 2 and value.size(1) > 1)
    return call.put(0, value[:, :1].expand(value.shape).clone(), "input").run()


@FAULTS.fault(
    _CONVOLUTIONS,
    kinds=["wrong index", "shift", "permutation"],
    loose=["copy", "stale"],
    backward=False,
)
def image_of_the_next_example(call: Call) -> Any:
    """The pointer to the images is one too far."""
    value = call.result()
    fits(value.dim() > 2 and value.size(0) > 1)
    return call.instead(value.roll(-1, 0))


@FAULTS.fault(
    _CONVOLUTIONS,
    kinds=["zeros", "uninitialised", "mask"],
    loose=["constant", "missing operand", "one rank's part", "axis scale", "wrong factor"],
    backward=False,
)
def second_half_of_the_channels_not_written(call: Call) -> Any:
    """One of two blocks of filters is never launched."""
    value = call.result().clone()
    fits(value.dim() > 2 and value.size(1) > 1)
    value[:, value.size(1) // 2 :] = 0
    return call.instead(value)


@FAULTS.fault(
    _CONVOLUTIONS,
    kinds=["permutation", "wrong index"],
    loose=["shift", "transpose"],
    backward=False,
)
def rows_of_the_filter_upside_down(call: Call) -> Any:
    """The first axis of the filter is read from its end, the second is not."""
    weight = call.tensor(1, "weight")
    fits(weight.dim() == 4 and weight.size(-2) > 1)
    return call.put(1, weight.flip(-2), "weight").run()


@FAULTS.fault(
    "conv_transpose1d conv_transpose2d",
    kinds=["zeros", "mask", "uninitialised"],
    loose=["constant", "partial sum", "missing operand", "axis scale", "wrong factor"],
)
def new_columns_left_empty(call: Call) -> Any:
    """What lies between the old columns is not computed."""
    value = call.result().clone()
    value[..., 1::2] = 0
    return call.instead(value)


@FAULTS.fault(
    "conv3d", kinds=["copy", "stale", "wrong index"], loose=["permutation"], backward=False
)
def first_frame_for_all(call: Call) -> Any:
    """The stride of the frames is zero."""
    value = call.tensor(0, "input")
    fits(value.dim() == 5 and value.size(2) > 1)
    return call.put(0, value[:, :, :1].expand(value.shape).clone(), "input").run()


# --- Pooling, resizing ----------------------------------------------------------------------------


@FAULTS.fault(
    "avg_pool2d",
    kinds=["wrong factor", "scale", "wrong argument"],
    loose=["wrong statistics", "wrong reduction"],
    backward=False,
)
def window_divided_by_one_side(call: Call) -> Any:
    """By k and not by k * k."""
    size = call.get(1, "kernel_size")
    side = size if isinstance(size, int) else size[0]
    fits(side > 1)
    return call.instead(call.result() * side)


@FAULTS.fault(
    "max_pool1d max_pool2d avg_pool2d avg_pool1d",
    kinds=["zeros", "uninitialised", "mask"],
    loose=["constant", "axis scale", "wrong factor"],
    backward=False,
)
def last_column_of_the_pool_not_written(call: Call) -> Any:
    """The size of the output is rounded down once more."""
    value = call.result().clone()
    fits(value.size(-1) > 1)
    value[..., -1] = 0
    return call.instead(value)


@FAULTS.fault(
    "adaptive_avg_pool2d adaptive_avg_pool1d",
    kinds=["wrong index", "other function", "partial sum", "copy"],
    loose=["wrong reduction", "mask", "missing reduction"],
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


@FAULTS.fault(
    "interpolate upsample_bilinear2d upsample_nearest2d",
    kinds=["zeros", "mask", "uninitialised"],
    loose=["constant", "missing operand", "axis scale", "wrong factor"],
    backward=False,
)
def enlarged_with_gaps(call: Call) -> Any:
    """Only even columns are written."""
    value = call.result().clone()
    value[..., 1::2] = 0
    return call.instead(value)


@FAULTS.fault(
    "pad",
    kinds=["shift", "wrong index", "permutation"],
    loose=["zeros", "wrong argument"],
    backward=False,
)
def padded_part_one_further(call: Call) -> Any:
    """What is inside of the frame is written one column too late, around the end."""
    value = call.result()
    fits(value.dim() > 1 and value.size(-1) > 2)
    return call.instead(value.roll(1, -1))
