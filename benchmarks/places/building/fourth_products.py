"""Faults that were measured fourth and have been seen: products, convolutions, quantisers."""

from __future__ import annotations

from typing import Any

import torch
from benchmarks.places.calls import Call, Catalogue, fits, with_gradient_of
from benchmarks.places.changes import longer, on, operand, result
from benchmarks.places.parts import change_weight, layer_parts, layer_product
from torch import Tensor
from torch.nn import functional

FAULTS = Catalogue()
_WEIGHTED = "linear addmm mm"
_CONVOLUTIONS = "conv1d conv2d convolution"


# --- Products -------------------------------------------------------------------------------------


def _grouped(weight: Tensor, size: int) -> Tensor:
    fits(weight.size(0) % size == 0 and weight.size(0) > size)
    return weight.unflatten(0, (-1, size))


_NF4 = torch.tensor([-1.0, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0.0, 0.0796,
                     0.1609, 0.2461, 0.3379, 0.4407, 0.5626, 0.7230, 1.0])  # fmt: skip


def _nearest(value: Tensor, levels: Tensor) -> Tensor:
    return levels.to(value.dtype)[(value[..., None] - levels.to(value.dtype)).abs().argmin(-1)]


@FAULTS.forward(_WEIGHTED, "precision; approximation")
def weight_in_sixteen_normal_levels(call: Call) -> Any:
    """Four bits whose levels are the quantiles of a normal distribution, in blocks."""

    def change(weight: Tensor) -> Tensor:
        blocks = _grouped(weight, 4 if weight.size(0) % 8 else 8)
        step = blocks.abs().amax(1, keepdim=True).clamp(min=1e-9)
        return (_nearest(blocks / step, _NF4) * step).flatten(0, 1)

    return change_weight(call, change)


@FAULTS.forward(_WEIGHTED, "precision; approximation")
def weight_in_four_bit_floats(call: Call) -> Any:
    """Floats of four bits, with a scale for each block that is a power of two."""
    levels = torch.tensor([-6.0, -4, -3, -2, -1.5, -1, -0.5, 0, 0.5, 1, 1.5, 2, 3, 4, 6])

    def change(weight: Tensor) -> Tensor:
        blocks = _grouped(weight, 2 if weight.size(0) % 4 else 4)
        step = (blocks.abs().amax(1, keepdim=True).clamp(min=1e-9) / 6).log2().ceil().exp2()
        return (_nearest(blocks / step, levels) * step).flatten(0, 1)

    return change_weight(call, change)


@FAULTS.forward(_WEIGHTED, "precision; approximation")
def both_factors_in_float8(call: Call) -> Any:
    """Input and weight through e4m3, each with a scale of its own."""

    def narrow(value: Tensor) -> Tensor:
        step = value.detach().abs().max() / 448
        coded = (value.detach() / step).to(torch.float8_e4m3fn).to(value.dtype) * step
        return with_gradient_of(value, coded)

    left, weight, bias = layer_parts(call)
    return layer_product(call, narrow(left), narrow(weight), bias)


@FAULTS.forward(_WEIGHTED, "precision; approximation")
def tokens_in_four_bits(call: Call) -> Any:
    """Each row of the input is rounded to 15 levels of its own."""
    left, weight, bias = layer_parts(call)
    step = left.detach().abs().amax(-1, keepdim=True).clamp(min=1e-9) / 7
    coded = (left.detach() / step).round() * step
    return layer_product(call, with_gradient_of(left, coded), weight, bias)


@FAULTS.forward(_WEIGHTED, "precision; approximation, scale")
def weight_cut_to_seven_bits(call: Call) -> Any:
    """The lower half of each float is cut off, not rounded."""
    return change_weight(
        call, lambda weight: (weight.float().view(torch.int32) & -65536).view(torch.float32)
    )


@FAULTS.forward(
    _WEIGHTED, "partial sum, missing operand, zeros; mask, residual, off by one reduction"
)
def outlier_feature_not_added_back(call: Call) -> Any:
    """The feature with the largest values goes another way, and its product is lost."""
    left, weight, bias = layer_parts(call)
    fits(left.size(-1) > 2)
    kept = torch.ones(left.size(-1))
    kept[int(left.detach().abs().flatten(0, -2).amax(0).argmax())] = 0
    return layer_product(call, left * kept, weight, bias)


@FAULTS.forward(_WEIGHTED, "wrong axis, axis scale, wrong index, wrong factor; scale, transpose")
def scales_of_the_columns_used_for_the_rows(call: Call) -> Any:
    """A square weight is divided by the scales of its columns and multiplied along its rows."""

    def change(weight: Tensor) -> Tensor:
        fits(weight.size(0) == weight.size(1) > 1)
        scales = weight.abs().amax(0)
        return weight / scales * scales[:, None]

    return change_weight(call, change)


@FAULTS.forward(_WEIGHTED, "axis scale, wrong factor, missing operand; scale")
def smoothing_of_the_input_not_undone(call: Call) -> Any:
    """Features are divided by the root of their size, and the weight is not multiplied by it."""
    left, weight, bias = layer_parts(call)
    fits(left.size(-1) > 1)
    size = left.detach().abs().flatten(0, -2).amax(0).clamp(min=1e-3).sqrt()
    return layer_product(call, left / size, weight, bias)


@FAULTS.forward(_WEIGHTED, "offset, axis offset; missing bias, residual, missing operand")
def zero_point_of_the_input_stays(call: Call) -> Any:
    """The input is too large by a constant: each result by that times the sum of its weights."""
    left, weight, bias = layer_parts(call)
    return layer_product(call, left + 0.25 * left.detach().abs().max(), weight, bias)


@FAULTS.forward(
    "linear addmm", "wrong factor, scale, wrong argument; axis offset, offset, missing bias"
)
def bias_shared_by_four_ranks_and_not_summed(call: Call) -> Any:
    """A quarter of the bias."""
    left, weight, bias = layer_parts(call)
    fits(bias is not None)
    return layer_product(call, left, weight, bias / 4)


@FAULTS.forward("linear addmm", "precision; axis offset, offset, approximation")
def bias_in_steps_of_the_result(call: Call) -> Any:
    """The bias is rounded to the step of a result of five bits."""
    left, weight, bias = layer_parts(call)
    fits(bias is not None)
    step = call.result().detach().abs().max() / 15
    return layer_product(
        call, left, weight, with_gradient_of(bias, (bias.detach() / step).round() * step)
    )


@FAULTS.forward(_WEIGHTED, "approximation; precision, residual")
def weight_of_half_its_rank(call: Call) -> Any:
    """The smaller half of the singular values is left out."""

    def change(weight: Tensor) -> Tensor:
        fits(min(weight.shape) > 3 and weight.numel() < 20000)
        u, s, v = torch.linalg.svd(weight, full_matrices=False)
        s[len(s) // 2 :] = 0
        return (u * s) @ v

    return change_weight(call, change)


@FAULTS.forward(_WEIGHTED, "axis scale, wrong factor, wrong index; scale, wrong axis")
def scale_of_the_first_column_for_all(call: Call) -> Any:
    """Weights in eight bits with a scale for each column: the pointer to the scales stays."""

    def change(weight: Tensor) -> Tensor:
        fits(weight.size(1) > 1)
        scales = weight.abs().amax(0).clamp(min=1e-9)
        return weight / scales * scales[0]

    return change_weight(call, change)


@FAULTS.forward(
    "linear addmm", "copy, wrong index, stale, wrong rank's shard, one rank's part; permutation"
)
def columns_gathered_from_one_rank(call: Call) -> Any:
    """The gathered result has the first rank's columns in all of four places."""
    value = call.result()
    width = value.size(-1) // 4
    fits(value.size(-1) == 4 * width and width > 0)
    return call.instead(value[..., :width].repeat(*([1] * (value.dim() - 1)), 4))


@FAULTS.forward("linear addmm mm matmul bmm", "precision; approximation")
def result_in_eight_bits_for_each_row(call: Call) -> Any:
    """The result is stored as integers with a step for each row."""
    value = call.result()
    step = value.detach().abs().amax(-1, keepdim=True).clamp(min=1e-9) / 127
    return call.instead(with_gradient_of(value, (value.detach() / step).round() * step))


@FAULTS.forward("matmul bmm", "wrong factor, scale; wrong argument, axis scale")
def divided_by_the_common_axis(call: Call) -> Any:
    """The mean of products for their sum."""
    fits(call.tensor(0).size(-1) > 1)
    return call.instead(call.result() / call.tensor(0).size(-1))


@FAULTS.forward("matmul bmm", "zeros, uninitialised, mask; constant")
def last_matrix_of_the_batch_not_computed(call: Call) -> Any:
    """The grid has one batch too few."""
    value = call.result().clone()
    fits(value.dim() > 2 and value.size(0) > 1)
    value[-1] = 0
    return call.instead(value)


@FAULTS.fault("einsum", "scale, wrong factor, wrong reduction; wrong argument")
def mean_over_the_summed_letter(call: Call) -> Any:
    """What is summed is divided by its length."""
    inside, _, outside = call.args[0].replace(" ", "").partition("->")
    first = inside.split(",")[0]
    lost = [place for place, letter in enumerate(first) if letter not in outside]
    fits(lost)
    return call.instead(call.result() / call.tensor(1).size(lost[-1]))


@FAULTS.fault("baddbmm", "wrong argument, wrong factor, missing operand; scale, residual")
def summand_with_a_factor_of_one(call: Call) -> Any:
    """Beta is not handed on."""
    fits("beta" in call.kwargs)
    return Call(call.name, call.function, call.args, {**call.kwargs, "beta": 1.0}).run()


@FAULTS.fault("baddbmm", "wrong argument, wrong factor, swapped operands; scale")
def alpha_and_beta_exchanged(call: Call) -> Any:
    """In the order of another library."""
    fits("beta" in call.kwargs)
    both = {"alpha": call.kwargs["beta"], "beta": call.kwargs["alpha"]}
    return Call(call.name, call.function, call.args, {**call.kwargs, **both}).run()


@FAULTS.forward("bilinear _trilinear", "swapped operands, transpose; wrong index")
def sides_of_the_form_exchanged(call: Call) -> Any:
    """The second input is multiplied from the left."""
    if call.name == "bilinear":
        left, right = call.args[:2]
        return call.put(0, right).put(1, left).run()
    return call.put(0, call.args[2]).put(2, call.args[0]).run()


# fmt: off
# Each of two ranks multiplies its part of the weight with the other's part of the input.
FAULTS.add("halves of the common axis exchanged", _WEIGHTED,
    "wrong rank's shard, permutation, wrong index, shift; swapped operands",
    on(layer_parts,
        lambda call, left, weight, bias:
            layer_product(call, left.roll(left.size(-1) // 2, -1), weight, bias),
        where=lambda left, *_: left.size(-1) % 2 == 0), backward=False)
# The pointer to the rows of the left factor is one behind.
FAULTS.add("rows of the left factor one late", "matmul bmm",
    "shift, wrong index, permutation; transpose",
    operand(0, lambda v: v.roll(1, -2), where=longer(-2, 2)), backward=False)
# The pointer to the second operand is not moved along its first axis.
FAULTS.add("operand of the first expert for all", "einsum", "copy, wrong index, stale; permutation",
    operand(2, lambda v: v[:1].expand(v.shape).contiguous(),
        where=lambda v: v.dim() > 1 and v.size(0) > 1))
# The first token of each group goes to the expert before.
FAULTS.add("groups end one token late", "grouped_mm_fallback",
    "wrong index, mask, wrong argument; shift",
    on(lambda call: (call.get(2, "offs"),),
        lambda call, ends:
            call.put(2, (ends + 1).clamp(max=int(ends[-1])).to(ends.dtype), "offs").run(),
        where=lambda ends: isinstance(ends, Tensor) and ends.numel() > 1), backward=False)
# The outer product the other way round.
FAULTS.add("columns by rows", "outer", "transpose, swapped operands; permutation",
    lambda call: call.instead(torch.outer(call.tensor(1), call.tensor(0))))
# B x a.
FAULTS.add("left handed product", "linalg_cross", "sign, swapped operands; scale, wrong factor",
    lambda call: call.put(0, call.tensor(1)).put(1, call.tensor(0)).run())
# The root is not taken.
FAULTS.add("distances stay squared", "cdist _cdist_forward",
    "other function, missing operand; wrong argument", result(lambda v: v**2))
# P of 1.
FAULTS.add("distance along the axes", "cdist _cdist_forward",
    "wrong argument, other function, wrong reduction",
    lambda call: call.instead(torch.cdist(call.tensor(0), call.tensor(1), p=1.0)))
# fmt: on


# --- Convolutions ---------------------------------------------------------------------------------


@FAULTS.forward(_CONVOLUTIONS, "wrong argument, constant, offset; axis offset, mask, residual")
def padded_with_the_zero_point(call: Call) -> Any:
    """What is padded is one, the code of zero in the integers of the input."""
    value, weight = call.tensor(0, "input"), call.tensor(1, "weight")
    bias, padding = call.get(2, "bias"), call.get(4, "padding", default=0)
    size = value.dim() - 2
    padding = [padding] * size if isinstance(padding, int) else list(padding)
    stride, dilation = call.get(3, "stride", default=1), call.get(5, "dilation", default=1)
    fits(any(padding) and len(padding) == size and call.get(6, default=False) is not True)
    groups = call.get(8 if call.name == "convolution" else 6, "groups", default=1)
    ends = [one for pad in reversed(padding) for one in (pad, pad)]
    run = (functional.conv1d, functional.conv2d)[size - 1]
    return call.instead(
        run(functional.pad(value, ends, value=1.0), weight, bias, stride, 0, dilation, groups)
    )


def _with_bias(call: Call, change: Any) -> Any:
    bias = call.get(2, "bias")
    fits(isinstance(bias, Tensor) and bias.numel() > 1)
    return call.put(2, change(bias), "bias").run()


@FAULTS.forward(
    "conv_transpose2d convolution", "missing bias, missing operand; axis offset, offset"
)
def transposed_convolution_without_its_bias(call: Call) -> Any:
    """The bias is not added."""
    fits(call.name == "conv_transpose2d" or call.get(6))
    return _with_bias(call, torch.zeros_like)


@FAULTS.forward(_CONVOLUTIONS, "wrong factor, axis scale, wrong axis; scale, wrong index")
def filters_scaled_by_their_input_channel(call: Call) -> Any:
    """Filters with a scale for each output are multiplied along the inputs."""
    weight = call.tensor(1, "weight")
    fits(weight.size(1) > 1 and weight.size(0) >= weight.size(1))
    scales = weight.detach().abs().flatten(1).amax(1)
    shape = [-1] + [1] * (weight.dim() - 1)
    wrong = weight / scales.view(shape) * scales[: weight.size(1)].view(1, *shape[:-1])
    return call.put(1, wrong, "weight").run()


@FAULTS.forward("conv2d convolution", "precision; approximation")
def filters_in_four_bits(call: Call) -> Any:
    """Filters with 15 levels, and a step for each of them."""
    weight = call.tensor(1, "weight")
    dims = [*range(1, weight.dim())]
    step = weight.detach().abs().amax(dims, keepdim=True) / 7
    coded = with_gradient_of(weight, (weight.detach() / step).round() * step)
    return call.put(1, coded, "weight").run()


@FAULTS.forward("conv2d convolution", "wrong factor, axis scale, wrong argument; scale")
def one_half_for_the_second_group_of_filters(call: Call) -> Any:
    """The second half of the filters is halved, as by a scale that was folded in twice."""
    weight = call.tensor(1, "weight").clone()
    fits(weight.size(0) > 1)
    weight[weight.size(0) // 2 :] /= 2
    return call.put(1, weight, "weight").run()


# fmt: off
# The channels of the result are stored in turn: one of each half.
FAULTS.add("channels shuffled between groups", _CONVOLUTIONS,
    "permutation, wrong index; transpose, shift",
    result(lambda v: v.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2),
        where=lambda v: v.size(1) % 2 == 0 and v.size(1) > 3), backward=False)
# The pointer to the bias is one behind.
FAULTS.add("bias of the channel before", _CONVOLUTIONS,
    "wrong index, shift, permutation; axis offset, offset",
    lambda call: _with_bias(call, lambda bias: bias.roll(1)), backward=False)
# Each of three slices of the channels adds the bias.
FAULTS.add("bias of the channels three times", _CONVOLUTIONS + " conv3d",
    "repeated bias, wrong factor; axis offset, offset, residual",
    lambda call: _with_bias(call, lambda bias: 3 * bias), backward=False)
# The input is read one step too early along its last axis; it begins with zero.
FAULTS.add("signal one step late", "conv1d conv2d convolution",
    "shift, wrong index; wrong argument, permutation",
    operand(0, lambda v: functional.pad(v[..., :-1], (1, 0)), "input", where=longer(-1, 3)),
    backward=False)
# The first frame is read last.
FAULTS.add("frames in the reverse order", "conv3d", "permutation, wrong index; shift",
    operand(0, lambda v: v.flip(2), "input"), backward=False)
# fmt: on


# --- Pooling, windows, grids ----------------------------------------------------------------------


@FAULTS.fault(
    "max_pool2d", "wrong reduction, wrong index, other function, copy; missing reduction, stale"
)
def first_of_the_window(call: Call) -> Any:
    """A window is reduced to its first element."""
    value, size = call.tensor(0, "input"), call.get(1, "kernel_size")
    size = size if isinstance(size, int) else size[0]
    result = call.result()
    part = value[..., ::size, ::size][..., : result.size(-2), : result.size(-1)]
    return call.instead(part)


@FAULTS.fault(
    "avg_pool2d avg_pool1d",
    "scale, wrong factor, wrong reduction, wrong argument; missing reduction",
)
def window_summed(call: Call) -> Any:
    """Not divided by the size of the window."""
    size = call.get(1, "kernel_size")
    size = [size] * (2 if call.name == "avg_pool2d" else 1) if isinstance(size, int) else size
    return call.instead(call.result() * torch.tensor(size).prod())


@FAULTS.fault("adaptive_avg_pool2d adaptive_avg_pool1d", "wrong reduction, other function")
def largest_of_the_region(call: Call) -> Any:
    """A maximum for the mean."""
    run = getattr(functional, call.name.replace("avg", "max"))
    return call.instead(run(call.tensor(0, "input"), call.get(1, "output_size")))


@FAULTS.fault("adaptive_max_pool2d", "wrong reduction, other function")
def mean_of_the_region(call: Call) -> Any:
    """A mean for the maximum."""
    return call.instead(
        functional.adaptive_avg_pool2d(call.tensor(0, "input"), call.get(1, "output_size"))
    )


@FAULTS.fault("unfold im2col", "transpose, permutation, wrong index")
def windows_read_by_columns(call: Call) -> Any:
    """Inside of a window, the column is the slow axis."""
    value, channels = call.result(), call.tensor(0, "input").size(1)
    side = round((value.size(1) / channels) ** 0.5)
    blocks = value.unflatten(1, (channels, side, side)).transpose(2, 3)
    return call.instead(blocks.flatten(1, 3))


@FAULTS.fault("grid_sample", "wrong argument, other function; approximation, wrong index")
def nearest_pixel_read(call: Call) -> Any:
    """mode='nearest'."""
    value, grid = call.tensor(0, "input"), call.tensor(1, "grid")
    return call.instead(functional.grid_sample(value, grid, mode="nearest", align_corners=False))


@FAULTS.fault("grid_sample", "wrong argument; mask, other function, clipped")
def border_for_what_is_outside(call: Call) -> Any:
    """padding_mode='border'."""
    value, grid = call.tensor(0, "input"), call.tensor(1, "grid")
    return call.instead(
        functional.grid_sample(value, grid, padding_mode="border", align_corners=False)
    )


@FAULTS.fault("interpolate", "wrong argument, other function; approximation")
def cubic_for_linear(call: Call) -> Any:
    """mode='bicubic'."""
    fits(call.kwargs.get("mode") == "bilinear")
    return Call(call.name, call.function, call.args, {**call.kwargs, "mode": "bicubic"}).run()


@FAULTS.fault("interpolate", "wrong argument, wrong index; shift")
def nearest_by_the_centre(call: Call) -> Any:
    """mode='nearest-exact'."""
    fits(call.kwargs.get("mode") == "nearest")
    return Call(call.name, call.function, call.args, {**call.kwargs, "mode": "nearest-exact"}).run()


@FAULTS.fault("local_response_norm", "wrong argument, wrong factor; wrong statistics, scale")
def alpha_not_divided_by_the_size(call: Call) -> Any:
    """The definition of another framework: alpha times the sum of squares."""
    kwargs = {**call.kwargs, "alpha": call.kwargs["alpha"] * call.args[1]}
    return Call(call.name, call.function, call.args, kwargs).run()


# fmt: off
# The y of the grid points upward.
FAULTS.add("rows counted from below", "grid_sample grid_sampler_2d",
    "sign, permutation, wrong index; wrong argument",
    operand(1, lambda v: v * torch.tensor([1.0, -1.0]), "grid"))
# Inside of a block, x and y are exchanged.
FAULTS.add("places of a block by columns", "pixel_unshuffle", "transpose, permutation, wrong index",
    lambda call:
            call.instead(call.put(0, call.tensor(0, "input").mT, "input").run().mT.contiguous()))
# fmt: on
