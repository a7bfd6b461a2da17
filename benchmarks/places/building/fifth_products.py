"""Faults that were measured fifth and have been seen: products, pooling, quantised weights."""

from __future__ import annotations

from typing import Any

import torch
from benchmarks.places.calls import Call, Catalogue, fits, with_gradient_of
from benchmarks.places.changes import longer, on, operand, result, rounded
from benchmarks.places.parts import change_bias, change_weight, layer_parts, layer_product
from torch import Tensor
from torch.nn import functional

FAULTS = Catalogue()
_WEIGHTED = "linear addmm mm"
_BIASED = "linear addmm conv1d conv2d convolution"
_CONVOLUTIONS = "conv1d conv2d convolution"


# --- Products -------------------------------------------------------------------------------------


@FAULTS.forward(_WEIGHTED, "precision; approximation, scale, tie-breaking")
def weight_codes_cut_toward_zero(call: Call) -> Any:
    """Eight bits for each column, by a cast that does not round."""

    def change(weight: Tensor) -> Tensor:
        step = weight.abs().amax(0, keepdim=True).clamp(min=1e-9) / 127
        return (weight / step).trunc() * step

    return change_weight(call, change)


@FAULTS.forward(_WEIGHTED, "precision, approximation; other function")
def weight_rounded_to_powers_of_two(call: Call) -> Any:
    """A sign and an exponent for each weight."""
    return change_weight(
        call, lambda weight: weight.sign() * weight.abs().clamp(min=1e-9).log2().round().exp2()
    )


@FAULTS.forward(_WEIGHTED, "precision, approximation; other function")
def weight_in_three_levels(call: Call) -> Any:
    """-1, 0, 1 times the mean magnitude."""

    def change(weight: Tensor) -> Tensor:
        step = weight.abs().mean()
        return (weight / step).round().clamp(-1, 1) * step

    return change_weight(call, change)


@FAULTS.forward(_WEIGHTED, "axis scale, wrong index, wrong factor, shift; scale")
def scale_of_the_next_token(call: Call) -> Any:
    """Inputs are quantised by rows, and each product is multiplied by the scale of the next row."""
    left, weight, bias = layer_parts(call)
    fits(left.dim() > 1 and left.size(-2) > 1)
    scale = left.detach().abs().amax(-1, keepdim=True)
    fits(bool((scale > 0).all()))
    return layer_product(call, left * scale.roll(-1, -2) / scale, weight, bias)


@FAULTS.forward(_WEIGHTED, "mask, wrong factor, axis scale, scale; missing operand")
def adapter_scale_on_the_first_columns(call: Call) -> Any:
    """A factor of two that belongs to an adapter of a part of the columns."""
    value = call.result()
    fits(value.size(-1) > 3)
    factor = torch.ones(value.size(-1), dtype=value.dtype)
    factor[: value.size(-1) // 4] = 2
    return call.instead(value * factor)


@FAULTS.forward("bmm matmul", "precision; approximation")
def both_operands_in_steps_of_a_tensor(call: Call) -> Any:
    """Both factors are integers of eight bits with one step each."""

    def coded(value: Tensor) -> Tensor:
        step = value.detach().abs().max() / 127
        return with_gradient_of(value, (value.detach() / step).round() * step)

    return call.put(0, coded(call.tensor(0))).put(1, coded(call.tensor(1))).run()


@FAULTS.forward("baddbmm", "wrong argument, wrong factor, missing operand; scale, residual")
def product_with_an_alpha_of_one(call: Call) -> Any:
    """Alpha is not handed on."""
    kwargs = {key: value for key, value in call.kwargs.items() if key != "alpha"}
    fits(len(kwargs) < len(call.kwargs))
    return Call(call.name, call.function, call.args, kwargs).run()


@FAULTS.forward("bilinear", "missing bias, missing operand, wrong argument; offset, axis offset")
def form_without_its_bias(call: Call) -> Any:
    """The bias is not handed on."""
    fits(call.get(3, "bias") is not None)
    return call.put(3, None, "bias").run()


@FAULTS.forward("linalg_cross", "zeros, uninitialised, mask; missing operand, constant")
def third_component_not_written(call: Call) -> Any:
    """Vectors of two lanes."""
    value = call.result().clone()
    value[..., 2] = 0
    return call.instead(value)


@FAULTS.forward("cdist _cdist_forward", "precision; approximation")
def distance_from_rounded_squares(call: Call) -> Any:
    """|x|^2 + |y|^2 - 2 x y, each term in bfloat16."""
    left, right = call.tensor(0), call.tensor(1)

    def rounded(value: Tensor) -> Tensor:
        return with_gradient_of(value, value.detach().bfloat16().to(value.dtype))

    squares = (
        rounded(left.square().sum(-1))[..., None] + rounded(right.square().sum(-1))[..., None, :]
    )
    return call.instead((squares - 2 * rounded(left @ right.mT)).clamp(min=1e-6).sqrt())


@FAULTS.forward(
    "grouped_mm_fallback", "zeros, uninitialised, mask; missing operand, constant, partial sum"
)
def tokens_of_the_last_expert_not_computed(call: Call) -> Any:
    """The loop over the groups ends one too early."""
    value = call.result().clone()
    ends = next(one for one in (*call.args, *call.kwargs.values())
                if isinstance(one, Tensor) and not one.is_floating_point())  # fmt: skip
    fits(ends.numel() > 1 and int(ends[-2]) < len(value))
    value[int(ends[-2]) :] = 0
    return call.instead(value)


# fmt: off
# A negative stride.
FAULTS.add("bias read from its end", _BIASED, "permutation, wrong index; axis offset, shift",
    lambda call: change_bias(call, lambda bias: bias.flip(0)), backward=False)
# The stride of the bias is zero.
FAULTS.add("bias of the first column for all", _BIASED,
    "copy, wrong index, constant; axis offset, stale",
    lambda call: change_bias(call, lambda bias: bias[:1].expand(bias.shape).clone()),
    backward=False)
# The bias is stored with too small a range: half of its largest value.
FAULTS.add("bias saturates", _BIASED, "clipped; wrong argument, axis offset, precision",
    lambda call:
            change_bias(call, lambda bias: bias.clamp(-bias.abs().max() / 2, bias.abs().max() / 2)),
    backward=False)
# The kernel for a block with a residual is used where there is none.
FAULTS.add("input added by the epilogue", "linear addmm",
    "residual; offset, axis offset, other function, missing operand",
    on(layer_parts, lambda call, left, *_: call.instead(call.result() + left)), backward=False)
# What is larger than 0.7 of the largest does not fit into the buffer.
FAULTS.add("product overflows in half", _WEIGHTED, "overflow, nonfinite; clipped, precision",
    result(lambda v:
            torch.where(v.abs() > 0.7 * v.detach().abs().max(), v.sign() * torch.inf, v)),
    backward=False)
# Each matrix of the batch begins with the result of the one before.
FAULTS.add("accumulator kept between matrices", "bmm matmul",
    "residual, stale, wrong reduction; offset, axis offset, doubled reduction, other function, "
    "lost accumulation",
    result(lambda v:
            v + torch.cat([torch.zeros_like(v[..., :1, :, :]), v[..., :-1, :, :]], -3),
        where=longer(-3)), backward=False)
# The left factor is taken for probabilities: what is negative is zero.
FAULTS.add("negative entries of the left lost", "bmm matmul",
    "mask, zeros, clipped, partial sum, other function; missing operand",
    operand(0, torch.relu, where=lambda v: v.dim() > 2 and bool((v < 0).any())), backward=False)
# The first axis of the second operand is one further.
FAULTS.add("expert of the next index", "einsum",
    "wrong index, shift, permutation; wrong rank's shard, copy",
    on(lambda call: ([one for one in call.args[1:] if isinstance(one, Tensor)],),
        lambda call, operands: call.put(2, operands[1].roll(-1, 0)).run(),
        where=lambda operands: len(operands) == 2 and operands[1].size(0) > 1), backward=False)
# Through float16.
FAULTS.add("second operand of the sum in half", "einsum", "precision; approximation",
    operand(2, rounded(torch.float16)), backward=False)
# a_i + b_j.
FAULTS.add("sum of all pairs", "outer", "other function; wrong factor",
    lambda call: call.instead(call.tensor(0)[:, None] + call.tensor(1)[None, :]), backward=False)
# fmt: on


# --- Convolutions ---------------------------------------------------------------------------------


@FAULTS.fault("conv1d conv2d", "wrong argument, wrong index; shift")
def taps_spread_apart(call: Call) -> Any:
    """A dilation of two; the padding grows so that the size stays."""
    value, weight = call.tensor(0, "input"), call.tensor(1, "weight")
    bias, stride, groups = call.get(2, "bias"), call.get(3, "stride"), call.get(6, "groups")
    padding = call.get(4, "padding", default=0)
    first = padding if isinstance(padding, int) else padding[0]
    fits(weight.size(-1) == 3 and first == 1)
    convolve = functional.conv1d if call.name == "conv1d" else functional.conv2d
    return call.instead(convolve(value, weight, bias, stride or 1, 2, 2, groups or 1))


@FAULTS.fault("conv2d", "axis scale, wrong factor, mask, scale; wrong argument, other function")
def border_scaled_for_its_missing_taps(call: Call) -> Any:
    """A partial convolution: where taps fall on padding, the others count more."""
    value, weight, bias = call.tensor(0, "input"), call.tensor(1, "weight"), call.get(2, "bias")
    fits(call.get(6, "groups", default=1) == 1 and weight.size(-1) > 1)
    plain = call.put(2, None, "bias").result()
    ones = torch.ones_like(weight[:1])
    count = call.put(0, torch.ones_like(value)).put(1, ones).put(2, None, "bias").result()
    result = plain * ones.numel() / count.clamp(min=1)
    return call.instead(result if bias is None else result + bias.view(-1, 1, 1))


@FAULTS.forward(_CONVOLUTIONS, "stale, copy, wrong index; permutation")
def second_half_of_the_filters_not_loaded(call: Call) -> Any:
    """The filters of the second half of the channels are those of the first."""
    weight = call.tensor(1, "weight").clone()
    half = weight.size(0) // 2
    fits(half > 0 and weight.dim() > 2 and not call.get(6, default=False))
    weight[half : 2 * half] = weight[:half].clone()
    return call.put(1, weight, "weight").run()


@FAULTS.forward(_CONVOLUTIONS, "precision; approximation")
def image_in_four_bits(call: Call) -> Any:
    """The input has 15 levels for each of its channels."""
    value = call.tensor(0, "input")
    fits(value.dim() > 2)
    dims = tuple(range(2, value.dim()))
    step = value.detach().abs().amax(dims, keepdim=True).clamp(min=1e-9) / 7
    coded = with_gradient_of(value, (value.detach() / step).round() * step)
    return call.put(0, coded, "input").run()


@FAULTS.forward(_CONVOLUTIONS, "wrong factor, scale; axis scale, missing operand, wrong reduction")
def sum_of_the_taps_averaged(call: Call) -> Any:
    """Divided by the number of taps, as by a pool."""
    weight = call.tensor(1, "weight")
    taps = weight[0, 0].numel() if weight.dim() > 2 else 1
    fits(taps > 1)
    return call.put(1, weight / taps, "weight").run()


@FAULTS.fault("conv_transpose1d conv_transpose2d", "wrong factor, scale; wrong argument")
def enlarged_signal_divided_by_the_stride(call: Call) -> Any:
    """As if windows that overlap were averaged."""
    weight = call.tensor(1, "weight")
    stride = call.get(3, "stride", default=1)
    step = stride if isinstance(stride, int) else stride[0]
    fits(step > 1)
    return call.put(1, weight / step, "weight").run()


# fmt: off
# A weight norm whose length was lost: each filter is divided by its own.
FAULTS.add("filters of length one", _CONVOLUTIONS,
    "wrong factor, axis scale, scale; missing operand",
    operand(1, lambda v:
            v / v.flatten(1).norm(dim=1).view(-1, *[1] * (v.dim() - 1)), "weight",
        where=lambda v: v.dim() > 2), backward=False)
# Two filters are stored in each other's place, with their biases.
FAULTS.add("first two output channels exchanged", _CONVOLUTIONS,
    "permutation, wrong index; shift, transpose",
    result(lambda v: v[:, [1, 0, *range(2, v.size(1))]],
        where=lambda v: v.dim() > 2 and v.size(1) > 2), backward=False)
# The padding is cut from one end only.
FAULTS.add("enlarged signal one step late", "conv_transpose1d",
    "shift, wrong index; permutation, zeros, wrong argument",
    result(lambda v: functional.pad(v, (1, 0))[..., :-1]))
# fmt: on


# --- Pooling, resizing ----------------------------------------------------------------------------


@FAULTS.forward(
    "avg_pool1d avg_pool2d",
    "scale, wrong factor, off by one reduction, wrong argument; wrong statistics, wrong reduction",
)
def window_divided_by_one_more(call: Call) -> Any:
    """K * k + 1."""
    size = call.get(1, "kernel_size")
    sides = [size, size] if isinstance(size, int) else list(size)
    number = sides[0] if call.name == "avg_pool1d" else sides[0] * sides[-1]
    return call.instead(call.result() * number / (number + 1))


@FAULTS.forward("interpolate", "wrong argument, other function; approximation, wrong index")
def enlarged_by_area(call: Call) -> Any:
    """mode='area'."""
    value, result = call.tensor(0, "input"), call.result()
    fits(call.kwargs.get("mode") == "bilinear")
    return call.instead(functional.interpolate(value, result.shape[2:], mode="area"))


@FAULTS.forward("unfold im2col", "copy, stale, wrong index; permutation")
def last_window_is_the_one_before(call: Call) -> Any:
    """The last column still holds what was written before."""
    fits(call.tensor(0).dim() == 4)
    value = call.result()
    return call.instead(torch.cat([value[..., :-1], value[..., -2:-1]], -1))


@FAULTS.forward("pad", "wrong argument, copy, wrong index; permutation")
def padding_wraps(call: Call) -> Any:
    """mode='circular'."""
    value = call.tensor(0)
    fits(value.dim() in {3, 4})
    sizes = list(call.get(1, "pad"))
    fits(min(sizes) >= 0 and len(sizes) == 2 * (value.dim() - 2))
    return call.instead(functional.pad(value, sizes, mode="circular"))


@FAULTS.forward("pad", "zeros, wrong argument, constant, missing operand; mask, uninitialised")
def padding_is_zero_and_not_the_image(call: Call) -> Any:
    """mode='constant' for reflected or repeated values."""
    fits(call.get(2, "mode", default="constant") != "constant")
    return call.instead(functional.pad(call.tensor(0), list(call.get(1, "pad"))))


# fmt: off
# The absolute values are pooled.
FAULTS.add("largest magnitude of the window", "max_pool1d max_pool2d",
    "other function, wrong reduction; sign, wrong argument", operand(0, torch.abs, "input"))
# The padding is behind the values.
FAULTS.add("window of the signal one later", "max_pool1d",
    "shift, wrong index, off by one reduction; partial sum, mask, wrong argument",
    operand(0, lambda v: torch.cat([v[..., 1:], v[..., -1:]], -1), "input"))
# The sum of squares.
FAULTS.add("powers pooled without the root", "lp_pool2d",
    "other function, missing operand; wrong argument",
    lambda call: call.instead(call.result() ** call.get(1, "norm_type")))
# The root of the mean of squares.
FAULTS.add("powers averaged and not summed", "lp_pool2d",
    "wrong factor, scale, wrong reduction; wrong statistics",
    on(lambda call: (call.get(2, "kernel_size"),),
        lambda call, size: call.instead(call.result() / size ** (2 / call.get(1, "norm_type"))),
        where=lambda size: isinstance(size, int)))
# The buffer of the enlarged image is narrow.
FAULTS.add("enlarged through bfloat16", "interpolate", "precision; approximation, other function",
    result(rounded(torch.bfloat16)), backward=False)
# Centres of pixels are taken for their corners.
FAULTS.add("grid half a pixel off", "grid_sample grid_sampler_2d",
    "offset, wrong argument, shift; axis offset, wrong index",
    lambda call: call.put(1, call.tensor(1) + 1 / call.tensor(0).size(-1)).run(), backward=False)
# fmt: on
