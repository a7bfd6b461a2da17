"""Faults for measuring: products, convolutions, pooling, resizing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from benchmarks.places import words
from benchmarks.places.calls import Call, Catalogue, fits, with_gradient_of
from benchmarks.places.changes import computed, on, operand, result, rounded, tensors
from benchmarks.places.parts import filters_of, image_of, layer_parts, layer_product, round_to
from torch import Tensor
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable

FAULTS = Catalogue(backward=False)
_WEIGHTED = "linear addmm mm"
_BATCHED = "bmm matmul"
_CONVOLUTIONS = "conv1d conv2d convolution"
_POOLS = (
    "max_pool1d max_pool2d max_pool2d_with_indices avg_pool1d avg_pool2d adaptive_avg_pool2d "
    "adaptive_max_pool2d interpolate upsample_bilinear2d upsample_nearest2d"
)


# --- Products -------------------------------------------------------------------------------------


def _with_input(call: Call, change: Callable[[Tensor], Tensor]) -> Any:
    """The layer with another input."""
    left, weight, bias = layer_parts(call)
    return layer_product(call, change(left), weight, bias)


def _kept(call: Call, kept: Callable[[Tensor], Tensor], least: int = 3) -> Any:
    """The layer with some of its features only, by their numbers."""
    width = layer_parts(call)[0].size(-1)
    fits(width >= least)
    return _with_input(call, lambda left: left * kept(torch.arange(width)))


def _rebiased(call: Call, change: Callable[[Tensor], Tensor]) -> Any:
    """The layer with another bias."""
    place = 0 if call.name == "addmm" else 2
    bias = call.tensor(place, "bias")
    fits(bias.dim() == 1 and bias.numel() > 2)
    return call.put(place, change(bias), "bias").run()


def _columns(call: Call, least: int = 3) -> Tensor:
    """The result, with several columns."""
    value = call.result()
    fits(value.dim() > 1 and value.size(-1) >= least)
    return value


def _rows(call: Call, least: int = 3) -> Tensor:
    """The result, with several rows."""
    value = call.result()
    fits(value.dim() > 1 and value.size(-2) >= least)
    return value


def _in_steps(value: Tensor, step: float) -> Tensor:
    """The value as whole numbers of steps, with its own gradient."""
    return with_gradient_of(value, (value.detach() / step).round() * step)


@FAULTS.fault(
    _WEIGHTED, "permutation, wrong index; shift, swapped operands, wrong argument, transpose"
)
def first_and_last_column_exchanged(call: Call) -> Any:
    """Two columns are stored in each other's place."""
    value = _columns(call)
    places = torch.arange(value.size(-1))
    places[0], places[-1] = value.size(-1) - 1, 0
    return call.instead(value[..., places])


@FAULTS.fault(
    _WEIGHTED,
    "partial sum, mask, lost accumulation; missing operand, missing reduction, "
    "wrong reduction, zeros, wrong index, one rank's part",
)
def every_fifth_feature_not_added(call: Call) -> Any:
    """The loop over the features is unrolled by five, and the last step is forgotten."""
    return _kept(call, lambda number: number % 5 != 4, least=10)


@FAULTS.fault(
    _WEIGHTED,
    "partial sum, mask, lost accumulation; missing operand, missing reduction, "
    "wrong reduction, zeros, wrong index, one rank's part",
)
def third_of_four_tiles_not_added(call: Call) -> Any:
    """The third quarter of the common axis is loaded and not added; the bias is right."""
    width = layer_parts(call)[0].size(-1)
    start, end = width // 2, 3 * width // 4
    return _kept(call, lambda number: (number < start) | (number >= end), least=8)


# fmt: off
# A multiplier of 0.1 that another model has for its logits, bias and all.
FAULTS.add("result times a tenth", _WEIGHTED, words.SCALED, result(lambda v: v / 10))
# Three ranks each keep a third of the bias, and the sum over them is forgotten.
FAULTS.add("third of the bias", "linear addmm conv1d conv2d convolution",
    "wrong factor, scale, missing bias; axis offset, offset, wrong argument, missing operand, "
    "one rank's part", lambda call: _rebiased(call, lambda bias: bias / 3))
# The range of the stored bias is -0.05 to 0.05.
FAULTS.add("bias cut at a twentieth", "linear addmm conv1d conv2d convolution", words.LIMITED,
    lambda call: _rebiased(call, lambda bias: bias.clamp(-0.05, 0.05)))
# The bias has eight bits; input and weight are right.
FAULTS.add("bias in bfloat16", "linear addmm conv1d conv2d convolution", words.ROUNDED,
    lambda call: _rebiased(call, lambda bias: round_to(bias, torch.bfloat16)))
# Each column is stored two places too early, bias and all, the first two last.
FAULTS.add("columns of the layer two early", _WEIGHTED, words.MOVED_OPERAND,
    lambda call: call.instead(_columns(call, 5).roll(-2, -1)))
# The columns of four ranks are gathered in the order 3, 2, 1, 0.
FAULTS.add("shards gathered from the last rank", _WEIGHTED,
    "permutation, wrong index, wrong rank's shard; shift, swapped operands, wrong argument, "
    "transpose",
    computed(lambda call: (_columns(call, 8),),
        lambda value: value.unflatten(-1, (4, -1)).flip(-2).flatten(-2),
        where=lambda value: value.size(-1) % 4 == 0))
# The grid over the columns begins with its second block.
FAULTS.add("first half of the columns not stored", _WEIGHTED, words.EMPTY_IN_A_SUM,
    computed(lambda call: (_columns(call, 4),),
        lambda value: value * (torch.arange(value.size(-1)) >= value.size(-1) // 2)))
# Of three rows of a program, the last one is masked out when they are stored.
FAULTS.add("every third row of the layer not stored", _WEIGHTED, words.EMPTY_IN_A_SUM,
    computed(lambda call: (_rows(call, 4),),
        lambda value: value * (torch.arange(value.size(-2)) % 3 != 2)[:, None]))
# One of the accumulators of an unrolled loop is overwritten in its first pass.
FAULTS.add("fourth feature not added", _WEIGHTED,
    "off by one reduction, partial sum, mask; missing operand, wrong index, zeros, "
    "wrong reduction", lambda call: _kept(call, lambda number: number != 3, least=6))
# The epilogue of the loop adds the tile that is still in the registers.
FAULTS.add("last quarter of the features added twice", _WEIGHTED,
    "doubled reduction, wrong factor; wrong reduction, wrong index, partial sum, axis scale, "
    "stale, residual",
    on(lambda call: (layer_parts(call)[0].size(-1),),
        lambda call, width:
            _kept(call, lambda number: 1 + (number >= width - width // 4).int(), least=8)))
# The activation of a pooler is fused behind another layer.
FAULTS.add("tanh in the epilogue", _WEIGHTED,
    "other function; clipped, approximation, wrong factor", result(torch.tanh))
# Negative results become exp(x) - 1.
FAULTS.add("elu in the epilogue", _WEIGHTED, "other function; clipped, approximation, wrong factor",
    result(functional.elu))
# A prologue applies the activation of the layer before once more.
FAULTS.add("gelu on the input of the layer", _WEIGHTED,
    "other function; clipped, approximation, wrong factor",
    lambda call: _with_input(call, functional.gelu))
# The result is stored with two bits behind the point.
FAULTS.add("result of the layer in e5m2", _WEIGHTED, words.ROUNDED,
    result(rounded(torch.float8_e5m2)))
# The result is a fixed-point number with four bits behind the point.
FAULTS.add("result in steps of a sixteenth", _WEIGHTED, words.ROUNDED,
    result(lambda v: _in_steps(v, 1 / 16)))
# The weight is a fixed-point number with six bits behind the point; the bias is right.
FAULTS.add("weight in steps of a 64th", _WEIGHTED, words.ROUNDED,
    on(layer_parts,
        lambda call, left, weight, bias:
            layer_product(call, left, _in_steps(weight, 1 / 64), bias)))
# The input has three bits behind the point and no scale; weight and bias are right.
FAULTS.add("input of the layer in e4m3", _WEIGHTED, words.ROUNDED,
    lambda call: _with_input(call, lambda left: round_to(left, torch.float8_e4m3fn)))
# Inputs above 0.5 are cut to it, those below are right.
FAULTS.add("input not above one half", _WEIGHTED, words.LIMITED,
    lambda call: _with_input(call, lambda left: left.clamp(max=0.5)))
# Every second column has a minus, as the imaginary parts of a conjugate.
FAULTS.add("odd columns negated", _WEIGHTED,
    "sign, wrong factor, axis scale, mask; scale, other function",
    computed(lambda call: (_columns(call, 2),),
        lambda value: value * (1 - 2 * (torch.arange(value.size(-1)) % 2)).to(value)))
# The half that is added before a cast to integers is added, and nothing is cast.
FAULTS.add("rounding half left in the result", _WEIGHTED,
    "offset; axis offset, residual, other function, constant", result(lambda v: v + 0.5))
# Each program reads its row from the same register: all rows are the fourth one.
FAULTS.add("fourth row for all", _WEIGHTED, words.REPEATED,
    computed(lambda call: (_rows(call, 4),),
        lambda value: value[..., 3:4, :].expand(value.shape).contiguous()))
# The accumulator of each later row begins with the result of the first one.
FAULTS.add("first row left in the accumulator", _WEIGHTED,
    "residual, axis offset; offset, doubled reduction, wrong index, lost accumulation, "
    "other function",
    computed(_rows,
        lambda value: value + (torch.arange(value.size(-2)) > 0)[:, None] * value[..., :1, :]))
# fmt: on


# --- Products of batches --------------------------------------------------------------------------


def _matrices(call: Call, least: int = 1) -> Tensor:
    """The result, a batch of matrices."""
    value = call.result()
    fits(value.dim() > 2 and value.size(-3) >= least and min(value.shape[-2:]) > 2)
    return value


@FAULTS.fault(
    _BATCHED,
    "partial sum, mask, lost accumulation; missing operand, missing reduction, "
    "wrong reduction, zeros, wrong index, one rank's part",
)
def odd_terms_of_each_product_only(call: Call) -> Any:
    """Two lanes share the common axis of each matrix, and the first of them is not added."""
    left = call.tensor(0)
    fits(left.dim() > 2 and left.size(-1) > 3)
    return call.put(0, left * (torch.arange(left.size(-1)) % 2 == 1), "input").run()


# fmt: off
# An alpha of 1.5.
FAULTS.add("products of the batch one and a half times", _BATCHED, words.SCALED,
    result(lambda v: 1.5 * v))
# The first operand has three bits behind the point; the second is right.
FAULTS.add("left factor in e4m3", _BATCHED, words.ROUNDED,
    lambda call: call.put(0, round_to(call.tensor(0), torch.float8_e4m3fn), "input").run())
# The products are stored with two bits behind the point.
FAULTS.add("products of the batch in e5m2", _BATCHED, words.ROUNDED,
    result(rounded(torch.float8_e5m2)))
# Each matrix is stored in the place of the one before it, the first one last.
FAULTS.add("products of the batch one early", _BATCHED, words.MOVED_OPERAND,
    lambda call: call.instead(_matrices(call, 3).roll(-1, -3)))
# Each column is stored one too far, the last one of a matrix first.
FAULTS.add("columns of each matrix one late", _BATCHED, words.MOVED_OPERAND,
    lambda call: call.instead(_matrices(call).roll(1, -1)))
# One row of each matrix is masked out when it is stored.
FAULTS.add("second row of each matrix not stored", _BATCHED, words.EMPTY_IN_A_SUM,
    computed(_matrices, lambda value: value * (torch.arange(value.size(-2)) != 1)[:, None]))
# The grid over the batch begins with one.
FAULTS.add("first matrix of the batch not computed", _BATCHED, words.EMPTY_IN_A_SUM,
    computed(lambda call: (_matrices(call, 2),),
        lambda value: value * (torch.arange(value.size(-3)) > 0)[:, None, None]))
# The second operand is read as numbers without a sign.
FAULTS.add("magnitudes of the right factor", _BATCHED,
    "sign, other function; wrong argument, clipped",
    lambda call: call.put(1, call.tensor(1).abs(), "mat2", "other").run())
# The second operand saturates at -1/3 and 1/3.
FAULTS.add("right factor cut at a third", _BATCHED, words.LIMITED,
    on(tensors(1),
        lambda call, right: call.put(1, right.clamp(-1 / 3, 1 / 3), "mat2", "other").run(),
        where=lambda right: right.dim() > 2))
# fmt: on


# --- Convolutions ---------------------------------------------------------------------------------


def _filtered(call: Call, weight: Tensor) -> Any:
    return call.put(1, weight, "weight").run()


def _channels(call: Call, least: int = 2) -> tuple[Tensor, Tensor]:
    """The result, and the numbers of its channels as they are broadcast."""
    filters_of(call)
    return _numbered(call, least)


def _numbered(call: Call, least: int) -> tuple[Tensor, Tensor]:
    value = call.result()
    fits(value.dim() > 2 and value.size(1) >= least)
    return value, torch.arange(value.size(1)).view(-1, *[1] * (value.dim() - 2))


@FAULTS.fault(_CONVOLUTIONS, words.ROUNDED)
def channels_of_the_result_in_e5m2(call: Call) -> Any:
    """The result of the convolution is stored with two bits behind the point."""
    filters_of(call)
    return call.instead(round_to(call.result(), torch.float8_e5m2))


@FAULTS.fault(_CONVOLUTIONS, words.MOVED_OPERAND)
def image_one_channel_too_far(call: Call) -> Any:
    """The taps for channel i meet channel i + 1 of the image, around the end."""
    image = image_of(call)
    fits(image.size(1) > 2 and filters_of(call).size(1) == image.size(1))
    return call.put(0, image.roll(-1, 1), "input").run()


@FAULTS.fault(_CONVOLUTIONS, words.REPEATED)
def last_channel_is_the_one_before(call: Call) -> Any:
    """The last channel still holds what its program has stored before, bias and all."""
    value, number = _channels(call, 3)
    before = value[:, -2:-1].expand(value.shape)
    return call.instead(torch.where(number == value.size(1) - 1, before, value))


@FAULTS.fault(_CONVOLUTIONS, words.EMPTY_IN_A_SUM)
def even_channels_of_the_result_empty(call: Call) -> Any:
    """Two channels share a program, which stores the second of them."""
    value, number = _channels(call, 4)
    return call.instead(value * (number % 2 == 1))


@FAULTS.fault("conv2d convolution", words.EMPTY_IN_A_SUM)
def first_row_of_pixels_not_stored(call: Call) -> Any:
    """The store of each channel begins with the second row."""
    filters_of(call)
    value = call.result()
    fits(value.dim() == 4 and value.size(-2) > 2)
    return call.instead(value * (torch.arange(value.size(-2)) > 0)[:, None])


@FAULTS.fault(
    _CONVOLUTIONS,
    "partial sum, mask, lost accumulation; missing operand, missing reduction, "
    "wrong reduction, zeros, wrong index, one rank's part",
)
def odd_input_channels_not_added(call: Call) -> Any:
    """The loop over the channels of the image has a stride of two."""
    weight = filters_of(call)
    fits(weight.size(1) > 2)
    kept = torch.arange(weight.size(1)) % 2 == 0
    return _filtered(call, weight * kept.view(-1, *[1] * (weight.dim() - 2)))


@FAULTS.fault(_CONVOLUTIONS, "other function; clipped, approximation, wrong factor")
def sigmoid_fused_behind_the_filters(call: Call) -> Any:
    """The function of a gate is fused behind a layer that has none."""
    filters_of(call)
    return call.instead(call.result().sigmoid())


@FAULTS.fault(
    _CONVOLUTIONS,
    "mask, partial sum, zeros; missing operand, missing reduction, wrong reduction, "
    "wrong index, wrong argument, other function",
)
def filters_taken_for_depthwise_ones(call: Call) -> Any:
    """Each channel of the result sees the channel of its own number only."""
    weight = filters_of(call)
    fits(weight.size(0) == weight.size(1) > 2)
    kept = torch.eye(weight.size(0)).view(*weight.shape[:2], *[1] * (weight.dim() - 2))
    return _filtered(call, weight * kept)


# fmt: off
# The gain of a relu is in the filters already, and is applied again; the bias is right.
FAULTS.add("filters times the root of two", _CONVOLUTIONS, words.SCALED,
    lambda call: _filtered(call, 2**0.5 * filters_of(call)))
# The range of the stored filters is -0.05 to 0.05.
FAULTS.add("filters cut at a twentieth", _CONVOLUTIONS, words.LIMITED,
    lambda call: _filtered(call, filters_of(call).clamp(-0.05, 0.05)))
# Two less of padding on the left, two more on the right: the image is two to the left.
FAULTS.add("image read two columns too far", _CONVOLUTIONS,
    "shift, wrong index; mask, zeros, permutation, wrong argument, stale",
    on(image_of, lambda call, image:
            call.put(0, functional.pad(image, (-2, 2)), "input").run(),
        where=lambda image: image.size(-1) > 4))
# Every second channel of the result has a minus, bias and all.
FAULTS.add("odd channels negated", _CONVOLUTIONS,
    "sign, wrong factor, axis scale, mask; scale, other function",
    computed(_channels, lambda value, number: value * (1 - 2 * (number % 2)).to(value)))
# fmt: on


# --- Pooling, resizing ----------------------------------------------------------------------------


@FAULTS.fault(
    "avg_pool1d avg_pool2d",
    "scale, wrong factor, off by one reduction; wrong statistics, wrong reduction, "
    "axis scale, wrong argument",
)
def window_divided_by_one_less(call: Call) -> Any:
    """K * k - 1, as for a variance."""
    size = call.get(1, "kernel_size")
    sides = [size] if isinstance(size, int) else list(size)
    number = sides[0] if call.name == "avg_pool1d" else sides[0] * sides[-1]
    fits(number > 1)
    return call.instead(call.result() * number / (number - 1))


@FAULTS.fault(_POOLS, words.EMPTY_IN_A_SUM)
def first_pooled_channel_empty(call: Call) -> Any:
    """The grid over the channels of a pooled or resized image begins with one."""
    value, number = _numbered(call, 2)
    return call.instead(value * (number > 0))


@FAULTS.fault(
    "max_pool2d",
    "wrong reduction, other function; wrong index, off by one reduction, permutation, partial sum",
)
def second_largest_of_the_window(call: Call) -> Any:
    """The two best of a window are kept in order, and the wrong one of them is stored."""
    image, size = call.tensor(0, "input"), call.get(1, "kernel_size")
    step, frame = call.get(2, "stride") or size, call.get(3, "padding", default=0)
    sides = [one if isinstance(one, int) else one[0] for one in (size, step, frame)]
    edge, step, frame = sides
    fits(edge > 1 and image.dim() == 4)
    padded = functional.pad(image, (frame,) * 4, value=-1e9)
    windows = padded.unfold(2, edge, step).unfold(3, edge, step).flatten(-2)
    return call.instead(windows.topk(2, -1).values[..., 1])


# fmt: off
# Each row of a pooled or resized image is stored one too far, the last one first.
FAULTS.add("pooled rows one late", _POOLS, words.MOVED_OPERAND,
    result(lambda v: v.roll(1, -2), where=lambda v: v.dim() > 3 and v.size(-2) > 2))
# The pooled or resized image is stored with two bits behind the point.
FAULTS.add("pooled image in e5m2", _POOLS, words.ROUNDED, result(rounded(torch.float8_e5m2)))
# The second row of a pooled or resized image is stored in the first one as well.
FAULTS.add("first pooled row is the second", _POOLS, words.REPEATED,
    result(lambda v: torch.cat([v[..., 1:2, :], v[..., 1:, :]], -2),
        where=lambda v: v.dim() > 3 and v.size(-2) > 2))
# The input of a pool or a resize saturates at -0.5 and 0.5.
FAULTS.add("image cut at one half before the pool", _POOLS, words.LIMITED,
    operand(0, lambda v: v.clamp(-0.5, 0.5), "input"))
# fmt: on
