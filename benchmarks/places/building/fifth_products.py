"""Faults that were measured fifth and have been seen: products, pooling, quantised weights."""

from __future__ import annotations

from typing import Any

import torch
from benchmarks.places.calls import Call, Catalogue, fits, with_gradient_of
from torch import Tensor
from torch.nn import functional

FAULTS = Catalogue()
_WEIGHTED = "linear addmm mm"
_BIASED = "linear addmm conv1d conv2d convolution"
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


@FAULTS.fault(_BIASED, kinds=["permutation", "wrong index"], loose=["axis offset", "shift"],
              backward=False)  # fmt: skip
def bias_read_from_its_end(call: Call) -> Any:
    """A negative stride."""
    return _rebiased(call, lambda bias: bias.flip(0))


@FAULTS.fault(_BIASED, kinds=["copy", "wrong index", "constant"], loose=["axis offset", "stale"],
              backward=False)  # fmt: skip
def bias_of_the_first_column_for_all(call: Call) -> Any:
    """The stride of the bias is zero."""
    return _rebiased(call, lambda bias: bias[:1].expand(bias.shape).clone())


@FAULTS.fault(_BIASED, kinds=["clipped"], loose=["wrong argument", "axis offset", "precision"],
              backward=False)  # fmt: skip
def bias_saturates(call: Call) -> Any:
    """The bias is stored with too small a range: half of its largest value."""
    return _rebiased(call, lambda bias: bias.clamp(-bias.abs().max() / 2, bias.abs().max() / 2))


@FAULTS.fault("linear addmm", kinds=["residual"],
              loose=["offset", "axis offset", "other function", "missing operand"],
              backward=False)  # fmt: skip
def input_added_by_the_epilogue(call: Call) -> Any:
    """The kernel for a block with a residual is used where there is none."""
    left, _, _ = _parts(call)
    return call.instead(call.result() + left)


@FAULTS.fault(_WEIGHTED, kinds=["precision"], loose=["approximation", "scale", "tie-breaking"],
              backward=False)  # fmt: skip
def weight_codes_cut_toward_zero(call: Call) -> Any:
    """Eight bits for each column, by a cast that does not round."""

    def change(weight: Tensor) -> Tensor:
        step = weight.abs().amax(0, keepdim=True).clamp(min=1e-9) / 127
        return (weight / step).trunc() * step

    return _reweighted(call, change)


@FAULTS.fault(_WEIGHTED, kinds=["precision", "approximation"], loose=["other function"],
              backward=False)  # fmt: skip
def weight_rounded_to_powers_of_two(call: Call) -> Any:
    """A sign and an exponent for each weight."""
    return _reweighted(
        call, lambda weight: weight.sign() * weight.abs().clamp(min=1e-9).log2().round().exp2()
    )


@FAULTS.fault(_WEIGHTED, kinds=["precision", "approximation"], loose=["other function"],
              backward=False)  # fmt: skip
def weight_in_three_levels(call: Call) -> Any:
    """-1, 0, 1 times the mean magnitude."""

    def change(weight: Tensor) -> Tensor:
        step = weight.abs().mean()
        return (weight / step).round().clamp(-1, 1) * step

    return _reweighted(call, change)


@FAULTS.fault(_WEIGHTED, kinds=["axis scale", "wrong index", "wrong factor", "shift"],
              loose=["scale"], backward=False)  # fmt: skip
def scale_of_the_next_token(call: Call) -> Any:
    """Inputs are quantised by rows, and each product is multiplied by the scale of the next row."""
    left, weight, bias = _parts(call)
    fits(left.dim() > 1 and left.size(-2) > 1)
    scale = left.detach().abs().amax(-1, keepdim=True)
    fits(bool((scale > 0).all()))
    return _product(call, left * scale.roll(-1, -2) / scale, weight, bias)


@FAULTS.fault(_WEIGHTED, kinds=["overflow", "nonfinite"], loose=["clipped", "precision"],
              backward=False)  # fmt: skip
def product_overflows_in_half(call: Call) -> Any:
    """What is larger than 0.7 of the largest does not fit into the buffer."""
    value = call.result()
    limit = 0.7 * value.detach().abs().max()
    return call.instead(torch.where(value.abs() > limit, value.sign() * torch.inf, value))


@FAULTS.fault(_WEIGHTED, kinds=["mask", "wrong factor", "axis scale", "scale"],
              loose=["missing operand"], backward=False)  # fmt: skip
def adapter_scale_on_the_first_columns(call: Call) -> Any:
    """A factor of two that belongs to an adapter of a part of the columns."""
    value = call.result()
    fits(value.size(-1) > 3)
    factor = torch.ones(value.size(-1), dtype=value.dtype)
    factor[: value.size(-1) // 4] = 2
    return call.instead(value * factor)


@FAULTS.fault(
    "bmm matmul",
    kinds=["residual", "stale", "wrong reduction"],
    loose=["offset", "axis offset", "doubled reduction", "other function", "lost accumulation"],
    backward=False,
)
def accumulator_kept_between_matrices(call: Call) -> Any:
    """Each matrix of the batch begins with the result of the one before."""
    value = call.result()
    fits(value.dim() > 2 and value.size(-3) > 1)
    before = torch.cat([torch.zeros_like(value[..., :1, :, :]), value[..., :-1, :, :]], -3)
    return call.instead(value + before)


@FAULTS.fault("bmm matmul", kinds=["precision"], loose=["approximation"], backward=False)
def both_operands_in_steps_of_a_tensor(call: Call) -> Any:
    """Both factors are integers of eight bits with one step each."""

    def coded(value: Tensor) -> Tensor:
        step = value.detach().abs().max() / 127
        return with_gradient_of(value, (value.detach() / step).round() * step)

    return call.put(0, coded(call.tensor(0))).put(1, coded(call.tensor(1))).run()


@FAULTS.fault(
    "bmm matmul",
    kinds=["mask", "zeros", "clipped", "partial sum", "other function"],
    loose=["missing operand"],
    backward=False,
)
def negative_entries_of_the_left_lost(call: Call) -> Any:
    """The left factor is taken for probabilities: what is negative is zero."""
    left = call.tensor(0)
    fits(left.dim() > 2 and bool((left < 0).any()))
    return call.put(0, left.relu()).run()


@FAULTS.fault("einsum", kinds=["wrong index", "shift", "permutation"],
              loose=["wrong rank's shard", "copy"], backward=False)  # fmt: skip
def expert_of_the_next_index(call: Call) -> Any:
    """The first axis of the second operand is one further."""
    operands = [one for one in call.args[1:] if isinstance(one, Tensor)]
    fits(len(operands) == 2 and operands[1].size(0) > 1)
    return call.put(2, operands[1].roll(-1, 0)).run()


@FAULTS.fault("einsum", kinds=["precision"], loose=["approximation"], backward=False)
def second_operand_of_the_sum_in_half(call: Call) -> Any:
    """Through float16."""
    value = call.tensor(2)
    return call.put(2, with_gradient_of(value, value.detach().half().to(value.dtype))).run()


@FAULTS.fault("baddbmm", kinds=["wrong argument", "wrong factor", "missing operand"],
              loose=["scale", "residual"], backward=False)  # fmt: skip
def product_with_an_alpha_of_one(call: Call) -> Any:
    """Alpha is not handed on."""
    kwargs = {key: value for key, value in call.kwargs.items() if key != "alpha"}
    fits(len(kwargs) < len(call.kwargs))
    return Call(call.name, call.function, call.args, kwargs).run()


@FAULTS.fault("bilinear", kinds=["missing bias", "missing operand", "wrong argument"],
              loose=["offset", "axis offset"], backward=False)  # fmt: skip
def form_without_its_bias(call: Call) -> Any:
    """The bias is not handed on."""
    fits(call.get(3, "bias") is not None)
    return call.put(3, None, "bias").run()


@FAULTS.fault("outer", kinds=["other function"], loose=["wrong factor"], backward=False)
def sum_of_all_pairs(call: Call) -> Any:
    """a_i + b_j."""
    return call.instead(call.tensor(0)[:, None] + call.tensor(1)[None, :])


@FAULTS.fault("linalg_cross", kinds=["zeros", "uninitialised", "mask"],
              loose=["missing operand", "constant"], backward=False)  # fmt: skip
def third_component_not_written(call: Call) -> Any:
    """Vectors of two lanes."""
    value = call.result().clone()
    value[..., 2] = 0
    return call.instead(value)


@FAULTS.fault("cdist _cdist_forward", kinds=["precision"], loose=["approximation"], backward=False)
def distance_from_rounded_squares(call: Call) -> Any:
    """|x|^2 + |y|^2 - 2 x y, each term in bfloat16."""
    left, right = call.tensor(0), call.tensor(1)

    def rounded(value: Tensor) -> Tensor:
        return with_gradient_of(value, value.detach().bfloat16().to(value.dtype))

    squares = (
        rounded(left.square().sum(-1))[..., None] + rounded(right.square().sum(-1))[..., None, :]
    )
    return call.instead((squares - 2 * rounded(left @ right.mT)).clamp(min=1e-6).sqrt())


@FAULTS.fault("grouped_mm_fallback", kinds=["zeros", "uninitialised", "mask"],
              loose=["missing operand", "constant", "partial sum"], backward=False)  # fmt: skip
def tokens_of_the_last_expert_not_computed(call: Call) -> Any:
    """The loop over the groups ends one too early."""
    value = call.result().clone()
    ends = next(one for one in (*call.args, *call.kwargs.values())
                if isinstance(one, Tensor) and not one.is_floating_point())  # fmt: skip
    fits(ends.numel() > 1 and int(ends[-2]) < len(value))
    value[int(ends[-2]) :] = 0
    return call.instead(value)


# --- Convolutions ---------------------------------------------------------------------------------


@FAULTS.fault("conv1d conv2d", kinds=["wrong argument", "wrong index"], loose=["shift"])
def taps_spread_apart(call: Call) -> Any:
    """A dilation of two; the padding grows so that the size stays."""
    value, weight = call.tensor(0, "input"), call.tensor(1, "weight")
    bias, stride, groups = call.get(2, "bias"), call.get(3, "stride"), call.get(6, "groups")
    padding = call.get(4, "padding", default=0)
    first = padding if isinstance(padding, int) else padding[0]
    fits(weight.size(-1) == 3 and first == 1)
    convolve = functional.conv1d if call.name == "conv1d" else functional.conv2d
    return call.instead(convolve(value, weight, bias, stride or 1, 2, 2, groups or 1))


@FAULTS.fault("conv2d", kinds=["axis scale", "wrong factor", "mask", "scale"],
              loose=["wrong argument", "other function"])  # fmt: skip
def border_scaled_for_its_missing_taps(call: Call) -> Any:
    """A partial convolution: where taps fall on padding, the others count more."""
    value, weight, bias = call.tensor(0, "input"), call.tensor(1, "weight"), call.get(2, "bias")
    fits(call.get(6, "groups", default=1) == 1 and weight.size(-1) > 1)
    plain = call.put(2, None, "bias").result()
    ones = torch.ones_like(weight[:1])
    count = call.put(0, torch.ones_like(value)).put(1, ones).put(2, None, "bias").result()
    result = plain * ones.numel() / count.clamp(min=1)
    return call.instead(result if bias is None else result + bias.view(-1, 1, 1))


@FAULTS.fault(_CONVOLUTIONS, kinds=["wrong factor", "axis scale", "scale"],
              loose=["missing operand"], backward=False)  # fmt: skip
def filters_of_length_one(call: Call) -> Any:
    """A weight norm whose length was lost: each filter is divided by its own."""
    weight = call.tensor(1, "weight")
    fits(weight.dim() > 2)
    length = weight.flatten(1).norm(dim=1).view(-1, *[1] * (weight.dim() - 1))
    return call.put(1, weight / length, "weight").run()


@FAULTS.fault(_CONVOLUTIONS, kinds=["stale", "copy", "wrong index"], loose=["permutation"],
              backward=False)  # fmt: skip
def second_half_of_the_filters_not_loaded(call: Call) -> Any:
    """The filters of the second half of the channels are those of the first."""
    weight = call.tensor(1, "weight").clone()
    half = weight.size(0) // 2
    fits(half > 0 and weight.dim() > 2 and not call.get(6, default=False))
    weight[half : 2 * half] = weight[:half].clone()
    return call.put(1, weight, "weight").run()


@FAULTS.fault(_CONVOLUTIONS, kinds=["precision"], loose=["approximation"], backward=False)
def image_in_four_bits(call: Call) -> Any:
    """The input has 15 levels for each of its channels."""
    value = call.tensor(0, "input")
    fits(value.dim() > 2)
    dims = tuple(range(2, value.dim()))
    step = value.detach().abs().amax(dims, keepdim=True).clamp(min=1e-9) / 7
    coded = with_gradient_of(value, (value.detach() / step).round() * step)
    return call.put(0, coded, "input").run()


@FAULTS.fault(_CONVOLUTIONS, kinds=["permutation", "wrong index"], loose=["shift", "transpose"],
              backward=False)  # fmt: skip
def first_two_output_channels_exchanged(call: Call) -> Any:
    """Two filters are stored in each other's place, with their biases."""
    value = call.result()
    fits(value.dim() > 2 and value.size(1) > 2)
    return call.instead(value[:, [1, 0, *range(2, value.size(1))]])


@FAULTS.fault(
    _CONVOLUTIONS,
    kinds=["wrong factor", "scale"],
    loose=["axis scale", "missing operand", "wrong reduction"],
    backward=False,
)
def sum_of_the_taps_averaged(call: Call) -> Any:
    """Divided by the number of taps, as by a pool."""
    weight = call.tensor(1, "weight")
    taps = weight[0, 0].numel() if weight.dim() > 2 else 1
    fits(taps > 1)
    return call.put(1, weight / taps, "weight").run()


@FAULTS.fault(
    "conv_transpose1d",
    kinds=["shift", "wrong index"],
    loose=["permutation", "zeros", "wrong argument"],
)
def enlarged_signal_one_step_late(call: Call) -> Any:
    """The padding is cut from one end only."""
    value = call.result()
    return call.instead(functional.pad(value, (1, 0))[..., :-1])


@FAULTS.fault("conv_transpose1d conv_transpose2d", kinds=["wrong factor", "scale"],
              loose=["wrong argument"])  # fmt: skip
def enlarged_signal_divided_by_the_stride(call: Call) -> Any:
    """As if windows that overlap were averaged."""
    weight = call.tensor(1, "weight")
    stride = call.get(3, "stride", default=1)
    step = stride if isinstance(stride, int) else stride[0]
    fits(step > 1)
    return call.put(1, weight / step, "weight").run()


# --- Pooling, resizing ----------------------------------------------------------------------------


@FAULTS.fault("avg_pool1d avg_pool2d", backward=False,
              kinds=["scale", "wrong factor", "off by one reduction", "wrong argument"],
              loose=["wrong statistics", "wrong reduction"])  # fmt: skip
def window_divided_by_one_more(call: Call) -> Any:
    """K * k + 1."""
    size = call.get(1, "kernel_size")
    sides = [size, size] if isinstance(size, int) else list(size)
    number = sides[0] if call.name == "avg_pool1d" else sides[0] * sides[-1]
    return call.instead(call.result() * number / (number + 1))


@FAULTS.fault("max_pool1d max_pool2d", kinds=["other function", "wrong reduction"],
              loose=["sign", "wrong argument"])  # fmt: skip
def largest_magnitude_of_the_window(call: Call) -> Any:
    """The absolute values are pooled."""
    return call.put(0, call.tensor(0, "input").abs(), "input").run()


@FAULTS.fault("max_pool1d", kinds=["shift", "wrong index", "off by one reduction"],
              loose=["partial sum", "mask", "wrong argument"])  # fmt: skip
def window_of_the_signal_one_later(call: Call) -> Any:
    """The padding is behind the values."""
    value = call.tensor(0, "input")
    later = torch.cat([value[..., 1:], value[..., -1:]], -1)
    return call.put(0, later, "input").run()


@FAULTS.fault("lp_pool2d", kinds=["other function", "missing operand"], loose=["wrong argument"])
def powers_pooled_without_the_root(call: Call) -> Any:
    """The sum of squares."""
    return call.instead(call.result() ** call.get(1, "norm_type"))


@FAULTS.fault("lp_pool2d", kinds=["wrong factor", "scale", "wrong reduction"],
              loose=["wrong statistics"])  # fmt: skip
def powers_averaged_and_not_summed(call: Call) -> Any:
    """The root of the mean of squares."""
    size = call.get(2, "kernel_size")
    fits(isinstance(size, int))
    return call.instead(call.result() / size ** (2 / call.get(1, "norm_type")))


@FAULTS.fault("interpolate", kinds=["wrong argument", "other function"],
              loose=["approximation", "wrong index"], backward=False)  # fmt: skip
def enlarged_by_area(call: Call) -> Any:
    """mode='area'."""
    value, result = call.tensor(0, "input"), call.result()
    fits(call.kwargs.get("mode") == "bilinear")
    return call.instead(functional.interpolate(value, result.shape[2:], mode="area"))


@FAULTS.fault("interpolate", kinds=["precision"], loose=["approximation", "other function"],
              backward=False)  # fmt: skip
def enlarged_through_bfloat16(call: Call) -> Any:
    """The buffer of the enlarged image is narrow."""
    value = call.result()
    return call.instead(with_gradient_of(value, value.detach().bfloat16().to(value.dtype)))


@FAULTS.fault("grid_sample grid_sampler_2d", kinds=["offset", "wrong argument", "shift"],
              loose=["axis offset", "wrong index"], backward=False)  # fmt: skip
def grid_half_a_pixel_off(call: Call) -> Any:
    """Centres of pixels are taken for their corners."""
    value, grid = call.tensor(0), call.tensor(1)
    return call.put(1, grid + 1 / value.size(-1)).run()


@FAULTS.fault("unfold im2col", kinds=["copy", "stale", "wrong index"], loose=["permutation"],
              backward=False)  # fmt: skip
def last_window_is_the_one_before(call: Call) -> Any:
    """The last column still holds what was written before."""
    fits(call.tensor(0).dim() == 4)
    value = call.result()
    return call.instead(torch.cat([value[..., :-1], value[..., -2:-1]], -1))


@FAULTS.fault("pad", kinds=["wrong argument", "copy", "wrong index"], loose=["permutation"],
              backward=False)  # fmt: skip
def padding_wraps(call: Call) -> Any:
    """mode='circular'."""
    value = call.tensor(0)
    fits(value.dim() in {3, 4})
    sizes = list(call.get(1, "pad"))
    fits(min(sizes) >= 0 and len(sizes) == 2 * (value.dim() - 2))
    return call.instead(functional.pad(value, sizes, mode="circular"))


@FAULTS.fault("pad", kinds=["zeros", "wrong argument", "constant", "missing operand"],
              loose=["mask", "uninitialised"], backward=False)  # fmt: skip
def padding_is_zero_and_not_the_image(call: Call) -> Any:
    """mode='constant' for reflected or repeated values."""
    fits(call.get(2, "mode", default="constant") != "constant")
    return call.instead(functional.pad(call.tensor(0), list(call.get(1, "pad"))))
