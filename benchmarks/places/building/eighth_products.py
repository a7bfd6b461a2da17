"""Faults of the eighth set: products, convolutions, pooling, distances."""

from __future__ import annotations

from typing import Any

import torch
from benchmarks.places import words
from benchmarks.places.calls import Call, Catalogue, fits, with_gradient_of
from benchmarks.places.changes import computed, on, operand, result, rounded
from benchmarks.places.parts import filters_of, layer_parts, layer_product, several_matrices
from torch import Tensor

FAULTS = Catalogue()
_WEIGHTED = "linear addmm mm"
_BATCHED = "bmm matmul"
_CONVOLUTIONS = "conv1d conv2d convolution"


# --- Products -------------------------------------------------------------------------------------


def _biased(call: Call) -> tuple[int, Tensor]:
    """Where the bias is, and it."""
    place = 0 if call.name == "addmm" else 2
    bias = call.tensor(place, "bias")
    fits(bias.dim() == 1 and bias.numel() > 2 and bool(bias.detach().any()))
    return place, bias


@FAULTS.forward(
    _WEIGHTED,
    "sign, wrong factor, other function, residual; mask, wrong reduction, partial sum, "
    "wrong index, doubled reduction, scale",
)
def seventh_product_of_strassen_subtracted(call: Call) -> Any:
    """The last of seven products of blocks is subtracted from the first block, and not added."""
    left, weight, _ = layer_parts(call)
    rows = left.flatten(0, -2)
    fits(not rows.size(0) % 2 and not rows.size(1) % 2 and not weight.size(1) % 2)
    row, common, column = rows.size(0) // 2, rows.size(1) // 2, weight.size(1) // 2
    seventh = (rows[:row, common:] - rows[row:, common:]) @ (
        weight[common:, :column] + weight[common:, column:]
    )
    value = torch.nn.functional.pad(2 * seventh, (0, column, 0, row))
    return call.instead(call.result() - value.view(*left.shape[:-1], -1))


@FAULTS.forward(_WEIGHTED, "shift, wrong rank's shard, wrong index; copy, permutation, stale, mask")
def shard_of_the_second_rank_one_column_early(call: Call) -> Any:
    """The columns of the second rank begin with the last one of the first."""
    value = call.result()
    half = value.size(-1) // 2
    fits(half > 1)
    return call.instead(torch.cat([value[..., :half], value[..., half - 1 : -1]], -1))


@FAULTS.forward(
    "linear addmm",
    "other function, axis scale; missing bias, wrong factor, scale, missing operand, "
    "wrong argument",
)
def bias_multiplies_the_product(call: Call) -> Any:
    """The epilogue for a scale of each column is chosen in the place of that for a bias."""
    left, weight, _ = layer_parts(call)
    _, bias = _biased(call)
    return call.instead(left @ weight * bias)


@FAULTS.forward(
    "linear addmm conv1d conv2d convolution",
    "precision; approximation, axis offset, offset, other function, wrong argument",
)
def bias_through_e4m3(call: Call) -> Any:
    """The bias is stored in eight bits, as the weight is elsewhere."""
    place, bias = _biased(call) if call.name in {"linear", "addmm"} else (2, call.tensor(2, "bias"))
    coarse = bias.detach().to(torch.float8_e4m3fn).to(bias.dtype)
    return call.put(place, with_gradient_of(bias, coarse), "bias").run()


@FAULTS.forward(
    "linear addmm",
    "repeated bias, mask, doubled reduction, wrong factor; axis offset, offset, residual, "
    "scale, wrong argument",
)
def bias_twice_where_two_tiles_meet(call: Call) -> Any:
    """Two tiles overlap by two columns, and both add their bias to what is there."""
    place, bias = _biased(call)
    middle = bias.numel() // 2
    times = torch.ones_like(bias)
    times[middle - 1 : middle + 1] = 2
    return call.put(place, bias * times, "bias").run()


@FAULTS.forward(_WEIGHTED, words.ROUNDED)
def accumulator_cut_to_thirteen_bits(call: Call) -> Any:
    """After every four terms the sum keeps 13 bits behind its first; the rest is cut off."""
    left, weight, bias = layer_parts(call)
    right = left @ weight
    total = torch.zeros_like(right).detach()
    for place in range(0, left.size(-1), 4):
        total = total + left.detach()[..., place : place + 4] @ weight.detach()[place : place + 4]
        mantissa, exponent = torch.frexp(total)
        total = torch.ldexp((mantissa * 2**14).trunc() / 2**14, exponent)
    value = with_gradient_of(right, total)
    return call.instead(value if bias is None else value + bias)


@FAULTS.forward(
    _WEIGHTED,
    "lost accumulation, partial sum, mask, one rank's part, missing reduction; zeros, "
    "wrong reduction, missing operand, stale, wrong index",
)
def atomic_addition_lost_in_the_odd_rows(call: Call) -> Any:
    """Two splits of the common axis: in odd rows, the second is stored and not added."""
    left, weight, bias = layer_parts(call)
    half = left.size(-1) // 2
    fits(half > 0 and left.dim() > 1 and left.size(-2) > 1)
    lost = torch.arange(left.size(-2))[:, None] % 2 == 1
    lost = lost & (torch.arange(left.size(-1)) < half)
    return layer_product(call, left.masked_fill(lost, 0), weight, bias)


@FAULTS.forward(_WEIGHTED, "copy, stale, wrong index; permutation, shift, wrong argument, mask")
def one_row_of_the_weight_is_the_one_before(call: Call) -> Any:
    """At the border of two tiles of k, the last row of the first is loaded again."""
    left, weight, bias = layer_parts(call)
    order = torch.arange(weight.size(0))
    fits(order.numel() > 2)
    order[order.numel() // 2] -= 1
    return layer_product(call, left, weight[order], bias)


@FAULTS.forward(
    _WEIGHTED,
    "other function, precision, sign; approximation, wrong argument, clipped, scale, "
    "wrong statistics",
)
def input_in_one_bit(call: Call) -> Any:
    """Signs times the mean magnitude of the row, as in a binary layer."""
    left, weight, bias = layer_parts(call)
    fits(left.size(-1) > 1)
    size = left.detach().abs().mean(-1, keepdim=True)
    return layer_product(call, with_gradient_of(left, left.detach().sign() * size), weight, bias)


@FAULTS.forward(
    _WEIGHTED,
    "other function, missing operand, residual; wrong argument, permutation, "
    "wrong reduction, sign, wrong factor",
)
def rotation_of_the_input_not_in_the_weight(call: Call) -> Any:
    """Two features each become their sum and difference, by sqrt(2); the weight stays as it is."""
    left, weight, bias = layer_parts(call)
    fits(left.size(-1) % 2 == 0)
    first, second = left.unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack([first + second, first - second], -1).flatten(-2) * 0.5**0.5
    return layer_product(call, turned, weight, bias)


# fmt: off
# Four partial sums, each of every fourth term; the shuffle that adds them leaves one out.
FAULTS.add("last lane of four not added", _WEIGHTED,
    "partial sum, mask, missing reduction, one rank's part; zeros, lost accumulation, "
    "missing operand, wrong reduction, wrong index",
    on(layer_parts,
        lambda call, left, weight, bias:
            layer_product(call, left * (torch.arange(left.size(-1)) % 4 != 3), weight, bias),
        where=lambda left, *_: left.size(-1) > 3), backward=False)
# Sqrt(out / in), the factor of a spectral parametrisation; the bias is right.
FAULTS.add("product times the root of its sides", _WEIGHTED,
    "wrong factor, scale; missing operand, axis scale, wrong argument, wrong reduction",
    on(layer_parts,
        lambda call, left, weight, bias:
            layer_product(call, left * (weight.size(1) / weight.size(0)) ** 0.5, weight, bias)),
    backward=False)
# The result is stored without a sign, relative to its smallest value, and read as it is.
FAULTS.add("zero point of the result left in", _WEIGHTED,
    "offset, missing operand; axis offset, residual, other function, constant, repeated bias",
    result(lambda v: v - v.amin()), backward=False)
# Once to the codes when they are loaded, and once in the epilogue; the bias is right.
FAULTS.add("scale of each column applied twice", _WEIGHTED,
    "axis scale, wrong factor; scale, other function, wrong argument, doubled reduction, "
    "precision",
    on(layer_parts,
        lambda call, left, weight, bias:
            layer_product(call, left, weight * weight.detach().abs().amax(0), bias)),
    backward=False)
# Codes of four bits: every weight of a column is too large by the step of that column.
FAULTS.add("seven for the zero point of eight", _WEIGHTED,
    "offset, wrong argument, axis offset, residual; precision, missing operand, "
    "other function, off by one reduction",
    on(layer_parts,
        lambda call, left, weight, bias:
            layer_product(call, left, weight + weight.detach().abs().amax(0) / 7, bias)),
    backward=False)
# fmt: on


# --- Products of a batch --------------------------------------------------------------------------


@FAULTS.forward(_BATCHED, words.REPEATED)
def two_matrices_share_the_right_factor(call: Call) -> Any:
    """Matrix i of the right factor is i // 2 * 2, as if two heads of queries had one of keys."""
    right = call.tensor(1)
    several_matrices(call)
    fits(right.dim() > 2 and right.size(-3) > 1)
    places = torch.arange(right.size(-3)) // 2 * 2
    return call.put(1, right.index_select(-3, places)).run()


@FAULTS.forward(
    _BATCHED, "transpose, wrong index, permutation, wrong argument; swapped operands, shift"
)
def first_factor_read_by_columns(call: Call) -> Any:
    """The layout flag of the left factor is set: its memory is read in the other order."""
    left = call.tensor(0)
    several_matrices(call)
    turned = left.reshape(*left.shape[:-2], left.size(-1), left.size(-2)).mT
    return call.put(0, turned.contiguous()).run()


@FAULTS.forward(
    "einsum",
    "zeros, mask, uninitialised, one rank's part, partial sum; constant, missing operand, "
    "axis scale, missing reduction",
)
def second_half_of_the_second_operand_not_loaded(call: Call) -> Any:
    """The second half along the first axis, that of another rank, is zero."""
    value = call.tensor(2).clone()
    fits(value.dim() > 1 and value.size(0) > 1)
    value[value.size(0) // 2 :] = 0
    return call.put(2, value).run()


# fmt: off
# One on the diagonal of every product, as for a solver that needs it regular.
FAULTS.add("identity added to each matrix", _BATCHED,
    "offset, residual, mask; constant, axis offset, other function, eps, off by one reduction",
    computed(several_matrices,
        lambda value: value + torch.eye(value.size(-1), dtype=value.dtype),
        where=lambda value: value.size(-1) == value.size(-2)), backward=False)
# The mean of each product and its transpose, as of a matrix of distances.
FAULTS.add("product made symmetric", _BATCHED,
    "wrong reduction, residual, other function; transpose, wrong statistics, swapped operands, "
    "permutation, wrong index",
    computed(several_matrices, lambda value: (value + value.mT) / 2,
        where=lambda value: value.size(-1) == value.size(-2)), backward=False)
# The pointer to the first operand is one row too far.
FAULTS.add("first operand of the next row", "einsum", words.MOVED_OPERAND,
    operand(1, lambda v: v.roll(-1, 0), where=lambda v: v.dim() > 1 and v.size(0) > 1),
    backward=False)
# The result goes through a narrow buffer.
FAULTS.add("sum of products stored in bfloat16", "einsum",
    "precision; approximation, other function", result(rounded(torch.bfloat16)), backward=False)
# The second operand is averaged along its first axis, as when experts are merged.
FAULTS.add("mean of the experts for each", "einsum",
    "wrong reduction, wrong statistics, constant, copy; wrong axis, wrong argument, stale, "
    "approximation",
    operand(2, lambda v: v.mean(0, keepdim=True).expand(v.shape).clone(),
        where=lambda v: v.dim() > 1 and v.size(0) > 1), backward=False)
# What is added belongs to the next example of the batch.
FAULTS.add("summand of the next matrix", "baddbmm",
    "shift, wrong index, permutation; copy, stale, wrong argument, offset, axis offset",
    operand(0, lambda v: v.roll(-1, 0), where=lambda v: v.dim() == 3 and v.size(0) > 1),
    backward=False)
# Sqrt(d^2 + 0.01), so that the derivative is finite at zero.
FAULTS.add("root of the square and a hundredth", "cdist _cdist_forward",
    "eps, other function; offset, wrong argument, approximation, clipped",
    result(lambda v: (v.square() + 0.01).sqrt()), backward=False)
# fmt: on


# --- Convolutions ---------------------------------------------------------------------------------


def _many(value: Any, number: int) -> list[int]:
    return [value] * number if isinstance(value, int) else list(value)


@FAULTS.forward(_CONVOLUTIONS, words.REORDERED)
def channels_dealt_to_the_groups_in_turn(call: Call) -> Any:
    """Group g reads the channels g, g + n, and so on, and not one after the other."""
    value, weight = call.tensor(0, "input"), filters_of(call)
    channels = value.size(1)
    groups = channels // weight.size(1)
    fits(value.dim() == weight.dim() and groups > 1 and weight.size(1) > 1)
    order = torch.arange(channels).view(-1, groups).t().flatten()
    return call.put(0, value[:, order], "input").run()


@FAULTS.forward(_CONVOLUTIONS, words.EMPTY_IN_A_SUM)
def first_pixels_of_each_row_not_written(call: Call) -> Any:
    """The store begins with the second column, of every channel and image."""
    filters_of(call)
    value = call.result().clone()
    fits(value.size(-1) > 2)
    value[..., 0] = 0
    return call.instead(value)


@FAULTS.forward(
    _CONVOLUTIONS,
    "wrong argument, constant, mask; offset, other function, wrong statistics, residual",
)
def padded_with_the_mean_of_each_channel(call: Call) -> Any:
    """The frame is grey and not black."""
    value, weight = call.tensor(0, "input"), filters_of(call)
    spatial = weight.dim() - 2
    fits(value.dim() == weight.dim() and not isinstance(call.get(4, "padding", default=0), str))
    padding = _many(call.get(4, "padding", default=0), spatial)
    padding = padding * spatial if len(padding) == 1 else padding
    fits(any(padding))
    widths = [one for size in reversed(padding) for one in (size, size)]
    mean = value.mean(list(range(2, value.dim())), keepdim=True)
    wide = torch.nn.functional.pad(value - mean, widths) + mean
    return call.put(0, wide, "input").put(4, [0] * spatial, "padding").run()


@FAULTS.forward(
    "conv2d convolution",
    "partial sum, mask, off by one reduction; zeros, missing operand, wrong argument, "
    "wrong reduction, wrong index",
)
def first_row_of_taps_not_added(call: Call) -> Any:
    """The loop over the height of the filter begins at 1."""
    weight = filters_of(call).clone()
    fits(weight.dim() == 4 and weight.size(2) > 1)
    weight[:, :, 0] = 0
    return call.put(1, weight, "weight").run()


@FAULTS.forward(_CONVOLUTIONS, words.SATURATED)
def filters_saturate_at_half_of_the_largest(call: Call) -> Any:
    """The step of the filters is that of a smaller range."""
    weight = filters_of(call)
    limit = float(weight.detach().abs().max()) / 2
    return call.put(1, weight.clamp(-limit, limit), "weight").run()


# fmt: off
# A branch without a filter is merged into one that has none: the input is added.
FAULTS.add("identity folded into the filters", _CONVOLUTIONS,
    "residual; doubled reduction, offset, other function, wrong argument",
    computed(lambda call: (call.tensor(0, "input"), call.result()),
        lambda value, result: result + value,
        where=lambda value, result: value.shape == result.shape), backward=False)
# The input of a transposed convolution is rounded.
FAULTS.add("image to be enlarged in bfloat16", "conv_transpose1d conv_transpose2d", words.ROUNDED,
    operand(0, rounded(torch.bfloat16), "input"))
# fmt: on


# --- Bags, pooling --------------------------------------------------------------------------------


@FAULTS.forward(
    "embedding_bag",
    "off by one reduction, wrong factor, axis scale, wrong reduction; scale, "
    "wrong statistics, wrong argument, eps",
)
def bag_divided_by_one_more_than_its_words(call: Call) -> Any:
    """The number of words is counted from the offsets with one too many."""
    words, starts = call.get(0, "input"), call.get(2, "offsets")
    if words.is_floating_point():
        words = call.get(1)
    fits(isinstance(starts, Tensor) and words.dim() == 1)
    ends = torch.cat([starts[1:], starts.new_tensor([words.numel()])])
    number = (ends - starts).unsqueeze(-1)
    value = call.result()
    fits(number.size(0) == value.size(0) and call.get(4, "mode", default="mean") in {"mean", 1})
    return call.instead(value * number / (number + 1))


# fmt: off
# The root of the mean of the squares.
FAULTS.add("quadratic mean of the window",
    "avg_pool1d avg_pool2d adaptive_avg_pool1d adaptive_avg_pool2d",
    "other function, wrong reduction, wrong statistics; wrong argument, sign, approximation",
    lambda call:

    call.instead((call.put(0, call.tensor(0, "input").square(), "input").result() + 1e-12).sqrt()),
    backward=False)
# fmt: on
