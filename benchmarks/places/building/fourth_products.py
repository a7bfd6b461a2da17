"""Faults that were measured fourth and have been seen: products, convolutions, quantisers."""

from __future__ import annotations

from typing import Any

import torch
from benchmarks.places.calls import Call, Catalogue, fits, with_gradient_of
from torch import Tensor
from torch.nn import functional

FAULTS = Catalogue()
_WEIGHTED = "linear addmm mm"
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


def _grouped(weight: Tensor, size: int) -> Tensor:
    fits(weight.size(0) % size == 0 and weight.size(0) > size)
    return weight.unflatten(0, (-1, size))


_NF4 = torch.tensor([-1.0, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0.0, 0.0796,
                     0.1609, 0.2461, 0.3379, 0.4407, 0.5626, 0.7230, 1.0])  # fmt: skip


def _nearest(value: Tensor, levels: Tensor) -> Tensor:
    return levels.to(value.dtype)[(value[..., None] - levels.to(value.dtype)).abs().argmin(-1)]


@FAULTS.fault(_WEIGHTED, kinds=["precision"], loose=["approximation"], backward=False)
def weight_in_sixteen_normal_levels(call: Call) -> Any:
    """Four bits whose levels are the quantiles of a normal distribution, in blocks."""

    def change(weight: Tensor) -> Tensor:
        blocks = _grouped(weight, 4 if weight.size(0) % 8 else 8)
        step = blocks.abs().amax(1, keepdim=True).clamp(min=1e-9)
        return (_nearest(blocks / step, _NF4) * step).flatten(0, 1)

    return _reweighted(call, change)


@FAULTS.fault(_WEIGHTED, kinds=["precision"], loose=["approximation"], backward=False)
def weight_in_four_bit_floats(call: Call) -> Any:
    """Floats of four bits, with a scale for each block that is a power of two."""
    levels = torch.tensor([-6.0, -4, -3, -2, -1.5, -1, -0.5, 0, 0.5, 1, 1.5, 2, 3, 4, 6])

    def change(weight: Tensor) -> Tensor:
        blocks = _grouped(weight, 2 if weight.size(0) % 4 else 4)
        step = (blocks.abs().amax(1, keepdim=True).clamp(min=1e-9) / 6).log2().ceil().exp2()
        return (_nearest(blocks / step, levels) * step).flatten(0, 1)

    return _reweighted(call, change)


@FAULTS.fault(_WEIGHTED, kinds=["precision"], loose=["approximation"], backward=False)
def both_factors_in_float8(call: Call) -> Any:
    """Input and weight through e4m3, each with a scale of its own."""

    def narrow(value: Tensor) -> Tensor:
        step = value.detach().abs().max() / 448
        coded = (value.detach() / step).to(torch.float8_e4m3fn).to(value.dtype) * step
        return with_gradient_of(value, coded)

    left, weight, bias = _parts(call)
    return _product(call, narrow(left), narrow(weight), bias)


@FAULTS.fault(_WEIGHTED, kinds=["precision"], loose=["approximation"], backward=False)
def tokens_in_four_bits(call: Call) -> Any:
    """Each row of the input is rounded to 15 levels of its own."""
    left, weight, bias = _parts(call)
    step = left.detach().abs().amax(-1, keepdim=True).clamp(min=1e-9) / 7
    coded = (left.detach() / step).round() * step
    return _product(call, with_gradient_of(left, coded), weight, bias)


@FAULTS.fault(_WEIGHTED, kinds=["precision"], loose=["approximation", "scale"], backward=False)
def weight_cut_to_seven_bits(call: Call) -> Any:
    """The lower half of each float is cut off, not rounded."""
    return _reweighted(
        call, lambda weight: (weight.float().view(torch.int32) & -65536).view(torch.float32)
    )


@FAULTS.fault(_WEIGHTED, kinds=["partial sum", "missing operand", "zeros"],
              loose=["mask", "residual", "off by one reduction"], backward=False)  # fmt: skip
def outlier_feature_not_added_back(call: Call) -> Any:
    """The feature with the largest values goes another way, and its product is lost."""
    left, weight, bias = _parts(call)
    fits(left.size(-1) > 2)
    kept = torch.ones(left.size(-1))
    kept[int(left.detach().abs().flatten(0, -2).amax(0).argmax())] = 0
    return _product(call, left * kept, weight, bias)


@FAULTS.fault(_WEIGHTED, kinds=["wrong axis", "axis scale", "wrong index", "wrong factor"],
              loose=["scale", "transpose"], backward=False)  # fmt: skip
def scales_of_the_columns_used_for_the_rows(call: Call) -> Any:
    """A square weight is divided by the scales of its columns and multiplied along its rows."""

    def change(weight: Tensor) -> Tensor:
        fits(weight.size(0) == weight.size(1) > 1)
        scales = weight.abs().amax(0)
        return weight / scales * scales[:, None]

    return _reweighted(call, change)


@FAULTS.fault(_WEIGHTED, kinds=["axis scale", "wrong factor", "missing operand"],
              loose=["scale"], backward=False)  # fmt: skip
def smoothing_of_the_input_not_undone(call: Call) -> Any:
    """Features are divided by the root of their size, and the weight is not multiplied by it."""
    left, weight, bias = _parts(call)
    fits(left.size(-1) > 1)
    size = left.detach().abs().flatten(0, -2).amax(0).clamp(min=1e-3).sqrt()
    return _product(call, left / size, weight, bias)


@FAULTS.fault(_WEIGHTED, kinds=["offset", "axis offset"],
              loose=["missing bias", "residual", "missing operand"], backward=False)  # fmt: skip
def zero_point_of_the_input_stays(call: Call) -> Any:
    """The input is too large by a constant: each result by that times the sum of its weights."""
    left, weight, bias = _parts(call)
    return _product(call, left + 0.25 * left.detach().abs().max(), weight, bias)


@FAULTS.fault("linear addmm", kinds=["wrong factor", "scale", "wrong argument"],
              loose=["axis offset", "offset", "missing bias"], backward=False)  # fmt: skip
def bias_shared_by_four_ranks_and_not_summed(call: Call) -> Any:
    """A quarter of the bias."""
    left, weight, bias = _parts(call)
    fits(bias is not None)
    return _product(call, left, weight, bias / 4)


@FAULTS.fault("linear addmm", kinds=["precision"],
              loose=["axis offset", "offset", "approximation"], backward=False)  # fmt: skip
def bias_in_steps_of_the_result(call: Call) -> Any:
    """The bias is rounded to the step of a result of five bits."""
    left, weight, bias = _parts(call)
    fits(bias is not None)
    step = call.result().detach().abs().max() / 15
    return _product(
        call, left, weight, with_gradient_of(bias, (bias.detach() / step).round() * step)
    )


@FAULTS.fault(_WEIGHTED, kinds=["wrong rank's shard", "permutation", "wrong index", "shift"],
              loose=["swapped operands"], backward=False)  # fmt: skip
def halves_of_the_common_axis_exchanged(call: Call) -> Any:
    """Each of two ranks multiplies its part of the weight with the other's part of the input."""
    left, weight, bias = _parts(call)
    fits(left.size(-1) % 2 == 0)
    return _product(call, left.roll(left.size(-1) // 2, -1), weight, bias)


@FAULTS.fault(_WEIGHTED, kinds=["approximation"], loose=["precision", "residual"], backward=False)
def weight_of_half_its_rank(call: Call) -> Any:
    """The smaller half of the singular values is left out."""

    def change(weight: Tensor) -> Tensor:
        fits(min(weight.shape) > 3 and weight.numel() < 20000)
        u, s, v = torch.linalg.svd(weight, full_matrices=False)
        s[len(s) // 2 :] = 0
        return (u * s) @ v

    return _reweighted(call, change)


@FAULTS.fault(_WEIGHTED, kinds=["axis scale", "wrong factor", "wrong index"],
              loose=["scale", "wrong axis"], backward=False)  # fmt: skip
def scale_of_the_first_column_for_all(call: Call) -> Any:
    """Weights in eight bits with a scale for each column: the pointer to the scales stays."""

    def change(weight: Tensor) -> Tensor:
        fits(weight.size(1) > 1)
        scales = weight.abs().amax(0).clamp(min=1e-9)
        return weight / scales * scales[0]

    return _reweighted(call, change)


@FAULTS.fault("linear addmm", kinds=["copy", "wrong index", "stale", "wrong rank's shard",
                                     "one rank's part"],
              loose=["permutation"], backward=False)  # fmt: skip
def columns_gathered_from_one_rank(call: Call) -> Any:
    """The gathered result has the first rank's columns in all of four places."""
    value = call.result()
    width = value.size(-1) // 4
    fits(value.size(-1) == 4 * width and width > 0)
    return call.instead(value[..., :width].repeat(*([1] * (value.dim() - 1)), 4))


@FAULTS.fault("linear addmm mm matmul bmm", kinds=["precision"], loose=["approximation"],
              backward=False)  # fmt: skip
def result_in_eight_bits_for_each_row(call: Call) -> Any:
    """The result is stored as integers with a step for each row."""
    value = call.result()
    step = value.detach().abs().amax(-1, keepdim=True).clamp(min=1e-9) / 127
    return call.instead(with_gradient_of(value, (value.detach() / step).round() * step))


@FAULTS.fault("matmul bmm", kinds=["shift", "wrong index", "permutation"], loose=["transpose"],
              backward=False)  # fmt: skip
def rows_of_the_left_factor_one_late(call: Call) -> Any:
    """The pointer to the rows of the left factor is one behind."""
    left = call.tensor(0)
    fits(left.dim() > 1 and left.size(-2) > 2)
    return call.put(0, left.roll(1, -2)).run()


@FAULTS.fault("matmul bmm", kinds=["wrong factor", "scale"], loose=["wrong argument", "axis scale"],
              backward=False)  # fmt: skip
def divided_by_the_common_axis(call: Call) -> Any:
    """The mean of products for their sum."""
    fits(call.tensor(0).size(-1) > 1)
    return call.instead(call.result() / call.tensor(0).size(-1))


@FAULTS.fault("matmul bmm", kinds=["zeros", "uninitialised", "mask"], loose=["constant"],
              backward=False)  # fmt: skip
def last_matrix_of_the_batch_not_computed(call: Call) -> Any:
    """The grid has one batch too few."""
    value = call.result().clone()
    fits(value.dim() > 2 and value.size(0) > 1)
    value[-1] = 0
    return call.instead(value)


@FAULTS.fault("einsum", kinds=["copy", "wrong index", "stale"], loose=["permutation"])
def operand_of_the_first_expert_for_all(call: Call) -> Any:
    """The pointer to the second operand is not moved along its first axis."""
    right = call.tensor(2)
    fits(right.dim() > 1 and right.size(0) > 1)
    return call.put(2, right[:1].expand(right.shape).contiguous()).run()


@FAULTS.fault(
    "einsum", kinds=["scale", "wrong factor", "wrong reduction"], loose=["wrong argument"]
)
def mean_over_the_summed_letter(call: Call) -> Any:
    """What is summed is divided by its length."""
    inside, _, outside = call.args[0].replace(" ", "").partition("->")
    first = inside.split(",")[0]
    lost = [place for place, letter in enumerate(first) if letter not in outside]
    fits(lost)
    return call.instead(call.result() / call.tensor(1).size(lost[-1]))


@FAULTS.fault("grouped_mm_fallback", kinds=["wrong index", "mask", "wrong argument"],
              loose=["shift"], backward=False)  # fmt: skip
def groups_end_one_token_late(call: Call) -> Any:
    """The first token of each group goes to the expert before."""
    ends = call.get(2, "offs")
    fits(isinstance(ends, Tensor) and ends.numel() > 1)
    later = (ends + 1).clamp(max=int(ends[-1]))
    return call.put(2, later.to(ends.dtype), "offs").run()


@FAULTS.fault("baddbmm", kinds=["wrong argument", "wrong factor", "missing operand"],
              loose=["scale", "residual"])  # fmt: skip
def summand_with_a_factor_of_one(call: Call) -> Any:
    """Beta is not handed on."""
    fits("beta" in call.kwargs)
    return Call(call.name, call.function, call.args, {**call.kwargs, "beta": 1.0}).run()


@FAULTS.fault("baddbmm", kinds=["wrong argument", "wrong factor", "swapped operands"],
              loose=["scale"])  # fmt: skip
def alpha_and_beta_exchanged(call: Call) -> Any:
    """In the order of another library."""
    fits("beta" in call.kwargs)
    both = {"alpha": call.kwargs["beta"], "beta": call.kwargs["alpha"]}
    return Call(call.name, call.function, call.args, {**call.kwargs, **both}).run()


@FAULTS.fault("bilinear _trilinear", kinds=["swapped operands", "transpose"], loose=["wrong index"],
              backward=False)  # fmt: skip
def sides_of_the_form_exchanged(call: Call) -> Any:
    """The second input is multiplied from the left."""
    if call.name == "bilinear":
        left, right = call.args[:2]
        return call.put(0, right).put(1, left).run()
    return call.put(0, call.args[2]).put(2, call.args[0]).run()


@FAULTS.fault("outer", kinds=["transpose", "swapped operands"], loose=["permutation"])
def columns_by_rows(call: Call) -> Any:
    """The outer product the other way round."""
    return call.instead(torch.outer(call.tensor(1), call.tensor(0)))


@FAULTS.fault("linalg_cross", kinds=["sign", "swapped operands"], loose=["scale", "wrong factor"])
def left_handed_product(call: Call) -> Any:
    """B x a."""
    return call.put(0, call.tensor(1)).put(1, call.tensor(0)).run()


@FAULTS.fault("cdist _cdist_forward", kinds=["other function", "missing operand"],
              loose=["wrong argument"])  # fmt: skip
def distances_stay_squared(call: Call) -> Any:
    """The root is not taken."""
    return call.instead(call.result() ** 2)


@FAULTS.fault("cdist _cdist_forward", kinds=["wrong argument", "other function", "wrong reduction"])
def distance_along_the_axes(call: Call) -> Any:
    """P of 1."""
    return call.instead(torch.cdist(call.tensor(0), call.tensor(1), p=1.0))


# --- Convolutions ---------------------------------------------------------------------------------


@FAULTS.fault(_CONVOLUTIONS, kinds=["permutation", "wrong index"],
              loose=["transpose", "shift"], backward=False)  # fmt: skip
def channels_shuffled_between_groups(call: Call) -> Any:
    """The channels of the result are stored in turn: one of each half."""
    value = call.result()
    fits(value.size(1) % 2 == 0 and value.size(1) > 3)
    mixed = value.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
    return call.instead(mixed)


@FAULTS.fault(_CONVOLUTIONS, kinds=["wrong argument", "constant", "offset"],
              loose=["axis offset", "mask", "residual"], backward=False)  # fmt: skip
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


@FAULTS.fault(_CONVOLUTIONS, kinds=["wrong index", "shift", "permutation"],
              loose=["axis offset", "offset"], backward=False)  # fmt: skip
def bias_of_the_channel_before(call: Call) -> Any:
    """The pointer to the bias is one behind."""
    return _with_bias(call, lambda bias: bias.roll(1))


@FAULTS.fault(_CONVOLUTIONS + " conv3d", kinds=["repeated bias", "wrong factor"],
              loose=["axis offset", "offset", "residual"], backward=False)  # fmt: skip
def bias_of_the_channels_three_times(call: Call) -> Any:
    """Each of three slices of the channels adds the bias."""
    return _with_bias(call, lambda bias: 3 * bias)


@FAULTS.fault("conv_transpose2d convolution", kinds=["missing bias", "missing operand"],
              loose=["axis offset", "offset"], backward=False)  # fmt: skip
def transposed_convolution_without_its_bias(call: Call) -> Any:
    """The bias is not added."""
    fits(call.name == "conv_transpose2d" or call.get(6))
    return _with_bias(call, torch.zeros_like)


@FAULTS.fault(_CONVOLUTIONS, kinds=["wrong factor", "axis scale", "wrong axis"],
              loose=["scale", "wrong index"], backward=False)  # fmt: skip
def filters_scaled_by_their_input_channel(call: Call) -> Any:
    """Filters with a scale for each output are multiplied along the inputs."""
    weight = call.tensor(1, "weight")
    fits(weight.size(1) > 1 and weight.size(0) >= weight.size(1))
    scales = weight.detach().abs().flatten(1).amax(1)
    shape = [-1] + [1] * (weight.dim() - 1)
    wrong = weight / scales.view(shape) * scales[: weight.size(1)].view(1, *shape[:-1])
    return call.put(1, wrong, "weight").run()


@FAULTS.fault("conv1d conv2d convolution", kinds=["shift", "wrong index"],
              loose=["wrong argument", "permutation"], backward=False)  # fmt: skip
def signal_one_step_late(call: Call) -> Any:
    """The input is read one step too early along its last axis; it begins with zero."""
    value = call.tensor(0, "input")
    fits(value.size(-1) > 3)
    return call.put(0, functional.pad(value[..., :-1], (1, 0)), "input").run()


@FAULTS.fault("conv3d", kinds=["permutation", "wrong index"], loose=["shift"], backward=False)
def frames_in_the_reverse_order(call: Call) -> Any:
    """The first frame is read last."""
    return call.put(0, call.tensor(0, "input").flip(2), "input").run()


@FAULTS.fault("conv2d convolution", kinds=["precision"], loose=["approximation"], backward=False)
def filters_in_four_bits(call: Call) -> Any:
    """Filters with 15 levels, and a step for each of them."""
    weight = call.tensor(1, "weight")
    dims = [*range(1, weight.dim())]
    step = weight.detach().abs().amax(dims, keepdim=True) / 7
    coded = with_gradient_of(weight, (weight.detach() / step).round() * step)
    return call.put(1, coded, "weight").run()


@FAULTS.fault("conv2d convolution", kinds=["wrong factor", "axis scale", "wrong argument"],
              loose=["scale"], backward=False)  # fmt: skip
def one_half_for_the_second_group_of_filters(call: Call) -> Any:
    """The second half of the filters is halved, as by a scale that was folded in twice."""
    weight = call.tensor(1, "weight").clone()
    fits(weight.size(0) > 1)
    weight[weight.size(0) // 2 :] /= 2
    return call.put(1, weight, "weight").run()


# --- Pooling, windows, grids ----------------------------------------------------------------------


@FAULTS.fault("max_pool2d", kinds=["wrong reduction", "wrong index", "other function", "copy"],
              loose=["missing reduction", "stale"])  # fmt: skip
def first_of_the_window(call: Call) -> Any:
    """A window is reduced to its first element."""
    value, size = call.tensor(0, "input"), call.get(1, "kernel_size")
    size = size if isinstance(size, int) else size[0]
    result = call.result()
    part = value[..., ::size, ::size][..., : result.size(-2), : result.size(-1)]
    return call.instead(part)


@FAULTS.fault("avg_pool2d avg_pool1d", kinds=["scale", "wrong factor", "wrong reduction",
                                              "wrong argument"],
              loose=["missing reduction"])  # fmt: skip
def window_summed(call: Call) -> Any:
    """Not divided by the size of the window."""
    size = call.get(1, "kernel_size")
    size = [size] * (2 if call.name == "avg_pool2d" else 1) if isinstance(size, int) else size
    return call.instead(call.result() * torch.tensor(size).prod())


@FAULTS.fault(
    "adaptive_avg_pool2d adaptive_avg_pool1d", kinds=["wrong reduction", "other function"]
)
def largest_of_the_region(call: Call) -> Any:
    """A maximum for the mean."""
    run = getattr(functional, call.name.replace("avg", "max"))
    return call.instead(run(call.tensor(0, "input"), call.get(1, "output_size")))


@FAULTS.fault("adaptive_max_pool2d", kinds=["wrong reduction", "other function"])
def mean_of_the_region(call: Call) -> Any:
    """A mean for the maximum."""
    return call.instead(
        functional.adaptive_avg_pool2d(call.tensor(0, "input"), call.get(1, "output_size"))
    )


@FAULTS.fault("unfold im2col", kinds=["transpose", "permutation", "wrong index"])
def windows_read_by_columns(call: Call) -> Any:
    """Inside of a window, the column is the slow axis."""
    value, channels = call.result(), call.tensor(0, "input").size(1)
    side = round((value.size(1) / channels) ** 0.5)
    blocks = value.unflatten(1, (channels, side, side)).transpose(2, 3)
    return call.instead(blocks.flatten(1, 3))


@FAULTS.fault("grid_sample", kinds=["wrong argument", "other function"],
              loose=["approximation", "wrong index"])  # fmt: skip
def nearest_pixel_read(call: Call) -> Any:
    """mode='nearest'."""
    value, grid = call.tensor(0, "input"), call.tensor(1, "grid")
    return call.instead(functional.grid_sample(value, grid, mode="nearest", align_corners=False))


@FAULTS.fault("grid_sample", kinds=["wrong argument"], loose=["mask", "other function", "clipped"])
def border_for_what_is_outside(call: Call) -> Any:
    """padding_mode='border'."""
    value, grid = call.tensor(0, "input"), call.tensor(1, "grid")
    return call.instead(
        functional.grid_sample(value, grid, padding_mode="border", align_corners=False)
    )


@FAULTS.fault("grid_sample grid_sampler_2d", kinds=["sign", "permutation", "wrong index"],
              loose=["wrong argument"])  # fmt: skip
def rows_counted_from_below(call: Call) -> Any:
    """The y of the grid points upward."""
    grid = call.tensor(1, "grid")
    return call.put(1, grid * torch.tensor([1.0, -1.0]), "grid").run()


@FAULTS.fault("interpolate", kinds=["wrong argument", "other function"], loose=["approximation"])
def cubic_for_linear(call: Call) -> Any:
    """mode='bicubic'."""
    fits(call.kwargs.get("mode") == "bilinear")
    return Call(call.name, call.function, call.args, {**call.kwargs, "mode": "bicubic"}).run()


@FAULTS.fault("interpolate", kinds=["wrong argument", "wrong index"], loose=["shift"])
def nearest_by_the_centre(call: Call) -> Any:
    """mode='nearest-exact'."""
    fits(call.kwargs.get("mode") == "nearest")
    return Call(call.name, call.function, call.args, {**call.kwargs, "mode": "nearest-exact"}).run()


@FAULTS.fault("pixel_unshuffle", kinds=["transpose", "permutation", "wrong index"])
def places_of_a_block_by_columns(call: Call) -> Any:
    """Inside of a block, x and y are exchanged."""
    value = call.tensor(0, "input")
    swapped = call.put(0, value.mT, "input").run().mT
    return call.instead(swapped.contiguous())


@FAULTS.fault("local_response_norm", kinds=["wrong argument", "wrong factor"],
              loose=["wrong statistics", "scale"])  # fmt: skip
def alpha_not_divided_by_the_size(call: Call) -> Any:
    """The definition of another framework: alpha times the sum of squares."""
    kwargs = {**call.kwargs, "alpha": call.kwargs["alpha"] * call.args[1]}
    return Call(call.name, call.function, call.args, kwargs).run()
