"""Faults of the ninth set: products, convolutions, pooling, resizing."""

from __future__ import annotations

from typing import Any

import torch
from benchmarks.places.calls import Call, Catalogue, fits, with_gradient_of
from torch import Tensor
from torch.nn import functional

FAULTS = Catalogue()
_WEIGHTED = "linear addmm mm"
_BATCHED = "bmm matmul"
_PRODUCTS = f"{_WEIGHTED} {_BATCHED}"
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


def _left(call: Call, change: Any) -> Any:
    """The call with another left operand."""
    place = 1 if call.name == "addmm" else 0
    return call.put(place, change(call.tensor(place, "input")), "input").run()


def _rows(call: Call) -> Tensor:
    value = call.result()
    fits(value.dim() > 1 and value.size(-2) > 1)
    return value


@FAULTS.fault(
    _WEIGHTED,
    kinds=["zeros", "mask", "uninitialised"],
    loose=["constant", "missing operand", "partial sum", "axis scale", "wrong factor"],
    backward=False,
)
def last_row_of_each_four_not_stored(call: Call) -> Any:
    """A program has four rows, and its last one is masked out."""
    value = _rows(call)
    fits(value.size(-2) > 3)
    return call.instead(value.masked_fill((torch.arange(value.size(-2)) % 4 == 3)[:, None], 0))


@FAULTS.fault(
    "linear addmm",
    kinds=["shift", "wrong index", "permutation"],
    loose=["wrong argument", "axis offset", "offset", "stale", "copy"],
    backward=False,
)
def bias_of_the_column_before(call: Call) -> Any:
    """The pointer to the bias is one behind, around the end."""
    place = 0 if call.name == "addmm" else 2
    bias = call.tensor(place, "bias")
    fits(bias.dim() == 1 and bias.numel() > 2)
    return call.put(place, bias.roll(1), "bias").run()


@FAULTS.fault(
    _WEIGHTED,
    kinds=["precision"],
    loose=["approximation", "other function", "wrong argument"],
    backward=False,
)
def weight_in_bfloat16(call: Call) -> Any:
    """The weight was saved with eight bits for each number; input and bias are right."""
    left, weight, bias = _parts(call)
    coarse = weight.detach().bfloat16().to(weight.dtype)
    return _product(call, left, with_gradient_of(weight, coarse), bias)


@FAULTS.fault(
    _WEIGHTED,
    kinds=["wrong factor", "scale"],
    loose=["axis scale", "wrong argument"],
    backward=False,
)
def codes_by_127_and_steps_by_128(call: Call) -> Any:
    """Integers are made with 127 levels and read with 128; the bias is right."""
    left, weight, bias = _parts(call)
    return _product(call, left * (127 / 128), weight, bias)


@FAULTS.fault(
    _WEIGHTED,
    kinds=["shift", "wrong index", "permutation"],
    loose=["wrong argument", "stale", "copy"],
    backward=False,
)
def weight_one_row_of_the_common_axis_too_far(call: Call) -> Any:
    """Feature i of the input meets row i + 1 of the weight, around the end."""
    left, weight, bias = _parts(call)
    fits(weight.size(0) > 1)
    return _product(call, left, weight.roll(-1, 0), bias)


@FAULTS.fault(
    _WEIGHTED,
    kinds=["clipped", "other function", "mask"],
    loose=["zeros", "wrong argument", "sign", "partial sum"],
    backward=False,
)
def negative_weights_lost(call: Call) -> Any:
    """The weight is stored as numbers without a sign: what is negative is zero."""
    left, weight, bias = _parts(call)
    return _product(call, left, weight.relu(), bias)


@FAULTS.fault("linear addmm", kinds=["other function"], loose=["wrong argument"], backward=False)
def gelu_in_the_epilogue(call: Call) -> Any:
    """The fused kernel of another layer, with its activation, is taken."""
    return call.instead(functional.gelu(call.result()))


@FAULTS.fault(
    _PRODUCTS,
    kinds=["permutation", "wrong index"],
    loose=["shift", "swapped operands", "wrong argument", "transpose"],
    backward=False,
)
def rows_of_the_result_from_the_last(call: Call) -> Any:
    """The stride of the rows is negative when they are stored."""
    return call.instead(_rows(call).flip(-2))


@FAULTS.fault(
    _WEIGHTED,
    kinds=["permutation", "wrong index"],
    loose=["swapped operands", "shift", "wrong argument", "transpose"],
    backward=False,
)
def rows_of_the_layer_in_pairs(call: Call) -> Any:
    """Two rows share a program, which stores them in the other order."""
    value = _rows(call)
    fits(value.size(-2) % 2 == 0 and value.size(-2) > 2)
    return call.instead(value.unflatten(-2, (-1, 2)).flip(-2).flatten(-3, -2))


@FAULTS.fault(
    _PRODUCTS,
    kinds=["partial sum", "mask", "wrong index"],
    loose=["missing reduction", "one rank's part", "zeros", "wrong reduction", "missing operand",
           "lost accumulation"],
    backward=False,
)  # fmt: skip
def even_features_only(call: Call) -> Any:
    """The loop over the common axis has a stride of two."""

    def even(left: Tensor) -> Tensor:
        fits(left.size(-1) > 1)
        return left * (torch.arange(left.size(-1)) % 2 == 0)

    return _left(call, even)


@FAULTS.fault(
    _PRODUCTS,
    kinds=["partial sum", "missing reduction", "one rank's part", "mask"],
    loose=["zeros", "lost accumulation", "wrong reduction", "missing operand", "wrong index"],
    backward=False,
)
def parts_of_two_ranks_not_summed(call: Call) -> Any:
    """The common axis is shared by two ranks; the first keeps its own part."""

    def own(left: Tensor) -> Tensor:
        fits(left.size(-1) > 1)
        return left * (torch.arange(left.size(-1)) < left.size(-1) // 2)

    return _left(call, own)


@FAULTS.fault(
    _WEIGHTED,
    kinds=["permutation", "wrong index", "shift"],
    loose=["wrong rank's shard", "swapped operands", "wrong argument"],
    backward=False,
)
def three_parts_of_a_projection_in_turn(call: Call) -> Any:
    """Query, key and value are packed as key, value, query."""
    value = call.result()
    fits(value.size(-1) % 3 == 0 and value.size(-1) > 5)
    return call.instead(value.roll(-(value.size(-1) // 3), -1))


@FAULTS.fault(
    _WEIGHTED,
    kinds=["transpose", "permutation", "wrong index"],
    loose=["wrong argument", "shift", "swapped operands"],
    backward=False,
)
def weight_of_a_flat_file_in_the_other_layout(call: Call) -> Any:
    """The memory of the weight, (out, in), is read as (in, out)."""
    left, weight, bias = _parts(call)
    fits(weight.size(0) != weight.size(1) and min(weight.shape) > 1)
    return _product(call, left, weight.t().reshape(weight.shape), bias)


@FAULTS.fault(
    _WEIGHTED,
    kinds=["axis scale", "missing operand", "wrong factor"],
    loose=["scale", "other function", "wrong argument"],
    backward=False,
)
def scale_of_each_token_not_multiplied_back(call: Call) -> Any:
    """Rows are divided by their largest magnitude, and stay so; the bias is right."""
    left, weight, bias = _parts(call)
    size = left.detach().abs().amax(-1, keepdim=True)
    fits(bool((size > 0).all()))
    return _product(call, left / size, weight, bias)


# --- Products of a batch --------------------------------------------------------------------------


@FAULTS.fault(
    _BATCHED,
    kinds=["scale", "wrong factor"],
    loose=["axis scale", "wrong argument"],
    backward=False,
)
def factor_of_a_head_of_64(call: Call) -> Any:
    """What is divided by the root of the width of a head is divided by 8 once more."""
    return call.instead(call.result() / 8)


@FAULTS.fault(
    _BATCHED,
    kinds=["clipped", "other function"],
    loose=["zeros", "mask"],
    backward=False,
)
def negative_products_lost(call: Call) -> Any:
    """The result is taken for probabilities: what is negative is zero."""
    return call.instead(call.result().relu())


@FAULTS.fault(
    _BATCHED,
    kinds=["precision"],
    loose=["approximation", "other function", "wrong argument"],
    backward=False,
)
def left_factor_in_bfloat16(call: Call) -> Any:
    """The left matrices are rounded before they are multiplied."""
    left = call.tensor(0, "input")
    coarse = left.detach().bfloat16().to(left.dtype)
    return call.put(0, with_gradient_of(left, coarse), "input").run()


@FAULTS.fault(
    "baddbmm",
    kinds=["sign", "wrong factor", "wrong argument"],
    loose=["other function", "residual", "offset", "swapped operands"],
    backward=False,
)
def summand_subtracted(call: Call) -> Any:
    """Beta has the wrong sign."""
    return call.put(0, -call.tensor(0)).run()


@FAULTS.fault(
    "cdist",
    kinds=["wrong argument", "other function", "wrong reduction"],
    loose=["approximation"],
    backward=False,
)
def largest_of_the_differences_for_the_distance(call: Call) -> Any:
    """P is infinite."""
    return call.put(2, float("inf"), "p").run()


@FAULTS.fault(
    "pairwise_distance",
    kinds=["eps", "wrong argument"],
    loose=["offset", "other function", "axis offset"],
    backward=False,
)
def tenth_added_to_each_difference(call: Call) -> Any:
    """An eps of 0.1."""
    return call.put(3, 0.1, "eps").run()


@FAULTS.fault(
    "einsum",
    kinds=["precision"],
    loose=["approximation", "other function", "wrong argument"],
    backward=False,
)
def experts_in_e4m3(call: Call) -> Any:
    """The second operand has three bits behind the point."""
    value = call.tensor(2)
    coarse = value.detach().to(torch.float8_e4m3fn).to(value.dtype)
    return call.put(2, with_gradient_of(value, coarse)).run()


@FAULTS.fault(
    "einsum",
    kinds=["permutation", "wrong index"],
    loose=["shift", "wrong argument", "swapped operands"],
    backward=False,
)
def first_operand_of_the_letters_from_its_end(call: Call) -> Any:
    """The last axis of the first operand is read with a negative stride."""
    value = call.tensor(1)
    fits(value.size(-1) > 1)
    return call.put(1, value.flip(-1)).run()


@FAULTS.fault(
    "grouped_mm_fallback",
    kinds=["zeros", "mask", "uninitialised"],
    loose=["constant", "missing operand", "one rank's part", "partial sum", "axis scale"],
    backward=False,
)
def second_tile_of_the_experts_not_stored(call: Call) -> Any:
    """The grid covers half of the columns."""
    value = call.result()
    fits(value.size(-1) > 1)
    return call.instead(value * (torch.arange(value.size(-1)) < value.size(-1) // 2))


@FAULTS.fault(
    "bilinear _trilinear",
    kinds=["shift", "wrong index", "permutation"],
    loose=["wrong argument", "stale", "copy"],
    backward=False,
)
def form_with_the_left_input_of_the_row_before(call: Call) -> Any:
    """The pointer to the first input is one row behind, around the end."""
    value = call.tensor(0)
    fits(value.dim() > 1 and value.size(0) > 1)
    return call.put(0, value.roll(1, 0)).run()


# --- Convolutions ---------------------------------------------------------------------------------


def _filters(call: Call) -> Tensor:
    weight = call.tensor(1, "weight")
    is_transposed = call.name == "convolution" and bool(call.get(6, "transposed"))
    fits(weight.dim() > 2 and not is_transposed)
    return weight


def _sizes(call: Call, place: int, name: str, default: int) -> list[int]:
    """Stride or padding for each axis of the image."""
    value, number = call.get(place, name, default=default), call.tensor(1, "weight").dim() - 2
    fits(not isinstance(value, str))
    many = [value] if isinstance(value, int) else list(value)
    return many * number if len(many) == 1 else many


def _image(call: Call, place: int = 0) -> Tensor:
    value = call.tensor(place, "input")
    fits(value.dim() == _filters(call).dim())
    return value


@FAULTS.fault(
    _CONVOLUTIONS,
    kinds=["wrong argument", "wrong index"],
    loose=["shift", "permutation", "copy", "other function"],
    backward=False,
)
def windows_one_apart(call: Call) -> Any:
    """The stride is not handed on: the first windows are stored."""
    _filters(call)
    fits(max(_sizes(call, 3, "stride", 1)) > 1)
    right = call.result()
    wide = call.put(3, [1] * len(_sizes(call, 3, "stride", 1)), "stride").result()
    for axis in range(2, right.dim()):
        wide = wide.narrow(axis, 0, right.size(axis))
    return call.instead(wide)


@FAULTS.fault(
    _CONVOLUTIONS,
    kinds=["wrong factor"],
    loose=["residual", "doubled reduction", "axis scale", "partial sum", "wrong reduction"],
    backward=False,
)
def centre_of_the_filter_twice(call: Call) -> Any:
    """The tap in the middle is added where the sum begins, and in the loop."""
    weight = _filters(call).clone()
    fits(all(size % 2 for size in weight.shape[2:]) and max(weight.shape[2:]) > 1)
    weight[(slice(None), slice(None), *(size // 2 for size in weight.shape[2:]))] *= 2
    return call.put(1, weight, "weight").run()


@FAULTS.fault(
    _CONVOLUTIONS,
    kinds=["wrong factor", "doubled reduction"],
    loose=["residual", "wrong reduction", "axis scale", "off by one reduction", "partial sum"],
    backward=False,
)
def first_channel_of_each_group_twice(call: Call) -> Any:
    """A prologue adds the first channel, and the loop over the channels does so again."""
    weight = _filters(call)
    fits(weight.size(1) > 1)
    times = torch.ones(weight.size(1)).to(weight.dtype)
    times[0] = 2
    return call.put(1, weight * times.view(1, -1, *[1] * (weight.dim() - 2)), "weight").run()


@FAULTS.fault(
    _CONVOLUTIONS,
    kinds=["sign", "wrong factor"],
    loose=["axis offset", "offset", "wrong argument", "other function", "residual"],
    backward=False,
)
def bias_subtracted_from_the_channels(call: Call) -> Any:
    """A mean that is subtracted elsewhere becomes a bias without changing its sign."""
    _filters(call)
    return call.put(2, -call.tensor(2, "bias"), "bias").run()


@FAULTS.fault(
    _CONVOLUTIONS,
    kinds=["copy", "stale", "wrong index"],
    loose=["permutation", "shift", "wrong argument"],
    backward=False,
)
def two_channels_share_a_filter(call: Call) -> Any:
    """A pair of filters is loaded once; the biases are right."""
    weight = _filters(call)
    fits(weight.size(0) > 1)
    return call.put(1, weight[torch.arange(weight.size(0)) // 2 * 2], "weight").run()


@FAULTS.fault(
    _CONVOLUTIONS,
    kinds=["permutation", "transpose", "wrong index"],
    loose=["shift", "swapped operands"],
    backward=False,
)
def result_with_the_channels_last(call: Call) -> Any:
    """The kernel stores the channels last, and the next one reads them first."""
    _image(call)
    value = call.result()
    return call.instead(value.movedim(1, -1).reshape(value.shape))


@FAULTS.fault(
    "conv2d convolution",
    kinds=["shift", "wrong index", "permutation"],
    loose=["stale", "copy", "wrong argument"],
    backward=False,
)
def pixels_one_row_further_down(call: Call) -> Any:
    """Each row of pixels is stored one too late, the last one first."""
    _image(call)
    value = call.result()
    fits(value.dim() == 4 and value.size(2) > 1)
    return call.instead(value.roll(1, 2))


@FAULTS.fault(
    "conv2d convolution",
    kinds=["zeros", "mask", "uninitialised"],
    loose=["constant", "missing operand", "axis scale", "wrong factor", "partial sum"],
    backward=False,
)
def odd_rows_of_pixels_not_stored(call: Call) -> Any:
    """The store has a stride of two rows."""
    _image(call)
    value = call.result()
    fits(value.dim() == 4 and value.size(2) > 1)
    return call.instead(value * (torch.arange(value.size(2)) % 2 == 0)[:, None])


@FAULTS.fault(
    _CONVOLUTIONS,
    kinds=["wrong factor", "scale", "wrong reduction"],
    loose=["axis scale", "wrong argument", "wrong statistics"],
    backward=False,
)
def channels_averaged_and_not_summed(call: Call) -> Any:
    """The sum is divided by the number of input channels; the bias is right."""
    weight = _filters(call)
    fits(weight.size(1) > 1)
    return call.put(1, weight / weight.size(1), "weight").run()


@FAULTS.fault(
    _CONVOLUTIONS,
    kinds=["clipped", "other function"],
    loose=["zeros", "mask"],
    backward=False,
)
def relu_fused_behind_the_filters(call: Call) -> Any:
    """The epilogue of another layer: what is negative is zero."""
    _filters(call)
    return call.instead(call.result().relu())


@FAULTS.fault(
    "conv3d convolution",
    kinds=["permutation", "wrong index"],
    loose=["swapped operands", "shift", "wrong argument"],
    backward=False,
)
def frames_of_the_filter_in_the_other_order(call: Call) -> Any:
    """The first of the three axes of a filter is read from its end."""
    weight = _filters(call)
    fits(weight.dim() == 5 and weight.size(2) > 1)
    return call.put(1, weight.flip(2), "weight").run()


@FAULTS.fault(
    "conv_transpose1d conv_transpose2d convolution",
    kinds=["partial sum", "mask"],
    loose=["zeros", "missing operand", "wrong index", "off by one reduction", "wrong argument"],
    backward=False,
)
def last_column_of_the_small_image_not_spread(call: Call) -> Any:
    """The loop over the columns that are spread ends one too early."""
    fits(call.name != "convolution" or call.get(6, "transposed"))
    value = call.tensor(0, "input").clone()
    fits(value.size(-1) > 1)
    value[..., -1] = 0
    return call.put(0, value, "input").run()


# --- Pooling, resizing ----------------------------------------------------------------------------


@FAULTS.fault(
    "avg_pool1d avg_pool2d",
    kinds=["partial sum", "mask", "off by one reduction"],
    loose=["zeros", "wrong index", "missing operand", "wrong reduction"],
    backward=False,
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
    kinds=["mask", "wrong argument", "off by one reduction"],
    loose=["wrong index", "partial sum", "wrong reduction"],
    backward=False,
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


@FAULTS.fault(
    "adaptive_max_pool2d",
    kinds=["other function", "wrong reduction"],
    loose=["sign", "wrong argument"],
    backward=False,
)
def smallest_of_the_region(call: Call) -> Any:
    """A minimum where a maximum was asked for."""
    return call.instead(-call.put(0, -call.tensor(0, "input"), "input").result())


@FAULTS.fault(
    "interpolate upsample_bilinear2d upsample_nearest2d",
    kinds=["transpose", "permutation", "wrong index"],
    loose=["swapped operands", "wrong argument", "shift"],
    backward=False,
)
def enlarged_image_with_x_before_y(call: Call) -> Any:
    """A square image is stored by columns."""
    value = call.result()
    fits(value.size(-1) == value.size(-2))
    return call.instead(value.mT.contiguous())


@FAULTS.fault(
    "interpolate upsample_bilinear2d upsample_nearest2d",
    kinds=["copy", "stale", "wrong index"],
    loose=["permutation", "shift", "mask"],
    backward=False,
)
def last_row_of_the_enlarged_image_is_the_one_before(call: Call) -> Any:
    """The last row keeps what its program has stored before."""
    value = call.result()
    fits(value.dim() == 4 and value.size(-2) > 1)
    places = torch.arange(value.size(-2)).clamp(max=value.size(-2) - 2)
    return call.instead(value[..., places, :])


@FAULTS.fault(
    "grid_sample grid_sampler grid_sampler_2d",
    kinds=["sign", "wrong index", "wrong argument"],
    loose=["permutation", "swapped operands", "other function"],
    backward=False,
)
def columns_counted_from_the_right(call: Call) -> Any:
    """The x of the grid points to the left."""
    grid = call.tensor(1, "grid")
    turned = torch.stack([-grid[..., 0], *grid[..., 1:].unbind(-1)], -1)
    return call.put(1, turned, "grid").run()
