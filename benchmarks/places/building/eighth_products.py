"""Faults of the eighth set: products, convolutions, pooling, distances."""

from __future__ import annotations

from typing import Any

import torch
from benchmarks.places.calls import Call, Catalogue, fits, with_gradient_of
from torch import Tensor

FAULTS = Catalogue()
_WEIGHTED = "linear addmm mm"
_BATCHED = "bmm matmul"
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


def _biased(call: Call) -> tuple[int, Tensor]:
    """Where the bias is, and it."""
    place = 0 if call.name == "addmm" else 2
    bias = call.tensor(place, "bias")
    fits(bias.dim() == 1 and bias.numel() > 2 and bool(bias.detach().any()))
    return place, bias


@FAULTS.fault(
    _WEIGHTED,
    kinds=["sign", "wrong factor", "other function", "residual"],
    loose=["mask", "wrong reduction", "partial sum", "wrong index", "doubled reduction", "scale"],
    backward=False,
)
def seventh_product_of_strassen_subtracted(call: Call) -> Any:
    """The last of seven products of blocks is subtracted from the first block, and not added."""
    left, weight, _ = _parts(call)
    rows = left.flatten(0, -2)
    fits(not rows.size(0) % 2 and not rows.size(1) % 2 and not weight.size(1) % 2)
    row, common, column = rows.size(0) // 2, rows.size(1) // 2, weight.size(1) // 2
    seventh = (rows[:row, common:] - rows[row:, common:]) @ (
        weight[common:, :column] + weight[common:, column:]
    )
    value = torch.nn.functional.pad(2 * seventh, (0, column, 0, row))
    return call.instead(call.result() - value.view(*left.shape[:-1], -1))


@FAULTS.fault(
    _WEIGHTED,
    kinds=["shift", "wrong rank's shard", "wrong index"],
    loose=["copy", "permutation", "stale", "mask"],
    backward=False,
)
def shard_of_the_second_rank_one_column_early(call: Call) -> Any:
    """The columns of the second rank begin with the last one of the first."""
    value = call.result()
    half = value.size(-1) // 2
    fits(half > 1)
    return call.instead(torch.cat([value[..., :half], value[..., half - 1 : -1]], -1))


@FAULTS.fault(
    "linear addmm",
    kinds=["other function", "axis scale"],
    loose=["missing bias", "wrong factor", "scale", "missing operand", "wrong argument"],
    backward=False,
)
def bias_multiplies_the_product(call: Call) -> Any:
    """The epilogue for a scale of each column is chosen in the place of that for a bias."""
    left, weight, _ = _parts(call)
    _, bias = _biased(call)
    return call.instead(left @ weight * bias)


@FAULTS.fault(
    "linear addmm conv1d conv2d convolution",
    kinds=["precision"],
    loose=["approximation", "axis offset", "offset", "other function", "wrong argument"],
    backward=False,
)
def bias_through_e4m3(call: Call) -> Any:
    """The bias is stored in eight bits, as the weight is elsewhere."""
    place, bias = _biased(call) if call.name in {"linear", "addmm"} else (2, call.tensor(2, "bias"))
    coarse = bias.detach().to(torch.float8_e4m3fn).to(bias.dtype)
    return call.put(place, with_gradient_of(bias, coarse), "bias").run()


@FAULTS.fault(
    "linear addmm",
    kinds=["repeated bias", "mask", "doubled reduction", "wrong factor"],
    loose=["axis offset", "offset", "residual", "scale", "wrong argument"],
    backward=False,
)
def bias_twice_where_two_tiles_meet(call: Call) -> Any:
    """Two tiles overlap by two columns, and both add their bias to what is there."""
    place, bias = _biased(call)
    middle = bias.numel() // 2
    times = torch.ones_like(bias)
    times[middle - 1 : middle + 1] = 2
    return call.put(place, bias * times, "bias").run()


@FAULTS.fault(
    _WEIGHTED,
    kinds=["partial sum", "mask", "missing reduction", "one rank's part"],
    loose=["zeros", "lost accumulation", "missing operand", "wrong reduction", "wrong index"],
    backward=False,
)
def last_lane_of_four_not_added(call: Call) -> Any:
    """Four partial sums, each of every fourth term; the shuffle that adds them leaves one out."""
    left, weight, bias = _parts(call)
    fits(left.size(-1) > 3)
    return _product(call, left * (torch.arange(left.size(-1)) % 4 != 3), weight, bias)


@FAULTS.fault(
    _WEIGHTED,
    kinds=["precision"],
    loose=["approximation", "other function", "wrong argument"],
    backward=False,
)
def accumulator_cut_to_thirteen_bits(call: Call) -> Any:
    """After every four terms the sum keeps 13 bits behind its first; the rest is cut off."""
    left, weight, bias = _parts(call)
    right = left @ weight
    total = torch.zeros_like(right).detach()
    for place in range(0, left.size(-1), 4):
        total = total + left.detach()[..., place : place + 4] @ weight.detach()[place : place + 4]
        mantissa, exponent = torch.frexp(total)
        total = torch.ldexp((mantissa * 2**14).trunc() / 2**14, exponent)
    value = with_gradient_of(right, total)
    return call.instead(value if bias is None else value + bias)


@FAULTS.fault(
    _WEIGHTED,
    kinds=["lost accumulation", "partial sum", "mask", "one rank's part", "missing reduction"],
    loose=["zeros", "wrong reduction", "missing operand", "stale", "wrong index"],
    backward=False,
)
def atomic_addition_lost_in_the_odd_rows(call: Call) -> Any:
    """Two splits of the common axis: in odd rows, the second is stored and not added."""
    left, weight, bias = _parts(call)
    half = left.size(-1) // 2
    fits(half > 0 and left.dim() > 1 and left.size(-2) > 1)
    lost = torch.arange(left.size(-2))[:, None] % 2 == 1
    lost = lost & (torch.arange(left.size(-1)) < half)
    return _product(call, left.masked_fill(lost, 0), weight, bias)


@FAULTS.fault(
    _WEIGHTED,
    kinds=["copy", "stale", "wrong index"],
    loose=["permutation", "shift", "wrong argument", "mask"],
    backward=False,
)
def one_row_of_the_weight_is_the_one_before(call: Call) -> Any:
    """At the border of two tiles of k, the last row of the first is loaded again."""
    left, weight, bias = _parts(call)
    order = torch.arange(weight.size(0))
    fits(order.numel() > 2)
    order[order.numel() // 2] -= 1
    return _product(call, left, weight[order], bias)


@FAULTS.fault(
    _WEIGHTED,
    kinds=["other function", "precision", "sign"],
    loose=["approximation", "wrong argument", "clipped", "scale", "wrong statistics"],
    backward=False,
)
def input_in_one_bit(call: Call) -> Any:
    """Signs times the mean magnitude of the row, as in a binary layer."""
    left, weight, bias = _parts(call)
    fits(left.size(-1) > 1)
    size = left.detach().abs().mean(-1, keepdim=True)
    return _product(call, with_gradient_of(left, left.detach().sign() * size), weight, bias)


@FAULTS.fault(
    _WEIGHTED,
    kinds=["wrong factor", "scale"],
    loose=["missing operand", "axis scale", "wrong argument", "wrong reduction"],
    backward=False,
)
def product_times_the_root_of_its_sides(call: Call) -> Any:
    """Sqrt(out / in), the factor of a spectral parametrisation; the bias is right."""
    left, weight, bias = _parts(call)
    return _product(call, left * (weight.size(1) / weight.size(0)) ** 0.5, weight, bias)


@FAULTS.fault(
    _WEIGHTED,
    kinds=["offset", "missing operand"],
    loose=["axis offset", "residual", "other function", "constant", "repeated bias"],
    backward=False,
)
def zero_point_of_the_result_left_in(call: Call) -> Any:
    """The result is stored without a sign, relative to its smallest value, and read as it is."""
    value = call.result()
    return call.instead(value - value.amin())


@FAULTS.fault(
    _WEIGHTED,
    kinds=["axis scale", "wrong factor"],
    loose=["scale", "other function", "wrong argument", "doubled reduction", "precision"],
    backward=False,
)
def scale_of_each_column_applied_twice(call: Call) -> Any:
    """Once to the codes when they are loaded, and once in the epilogue; the bias is right."""
    left, weight, bias = _parts(call)
    return _product(call, left, weight * weight.detach().abs().amax(0), bias)


@FAULTS.fault(
    _WEIGHTED,
    kinds=["offset", "wrong argument", "axis offset", "residual"],
    loose=["precision", "missing operand", "other function", "off by one reduction"],
    backward=False,
)
def seven_for_the_zero_point_of_eight(call: Call) -> Any:
    """Codes of four bits: every weight of a column is too large by the step of that column."""
    left, weight, bias = _parts(call)
    return _product(call, left, weight + weight.detach().abs().amax(0) / 7, bias)


@FAULTS.fault(
    _WEIGHTED,
    kinds=["other function", "missing operand", "residual"],
    loose=["wrong argument", "permutation", "wrong reduction", "sign", "wrong factor"],
    backward=False,
)
def rotation_of_the_input_not_in_the_weight(call: Call) -> Any:
    """Two features each become their sum and difference, by sqrt(2); the weight stays as it is."""
    left, weight, bias = _parts(call)
    fits(left.size(-1) % 2 == 0)
    first, second = left.unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack([first + second, first - second], -1).flatten(-2) * 0.5**0.5
    return _product(call, turned, weight, bias)


# --- Products of a batch --------------------------------------------------------------------------


def _matrices(call: Call) -> Tensor:
    value = call.result()
    fits(value.dim() > 2 and value.size(-1) > 1 and value.size(-2) > 1)
    return value


@FAULTS.fault(
    _BATCHED,
    kinds=["copy", "stale", "wrong index"],
    loose=["permutation", "shift", "constant", "wrong argument", "wrong rank's shard"],
    backward=False,
)
def two_matrices_share_the_right_factor(call: Call) -> Any:
    """Matrix i of the right factor is i // 2 * 2, as if two heads of queries had one of keys."""
    right = call.tensor(1)
    _matrices(call)
    fits(right.dim() > 2 and right.size(-3) > 1)
    places = torch.arange(right.size(-3)) // 2 * 2
    return call.put(1, right.index_select(-3, places)).run()


@FAULTS.fault(
    _BATCHED,
    kinds=["offset", "residual", "mask"],
    loose=["constant", "axis offset", "other function", "eps", "off by one reduction"],
    backward=False,
)
def identity_added_to_each_matrix(call: Call) -> Any:
    """One on the diagonal of every product, as for a solver that needs it regular."""
    value = _matrices(call)
    fits(value.size(-1) == value.size(-2))
    return call.instead(value + torch.eye(value.size(-1), dtype=value.dtype))


@FAULTS.fault(
    _BATCHED,
    kinds=["transpose", "wrong index", "permutation", "wrong argument"],
    loose=["swapped operands", "shift"],
    backward=False,
)
def first_factor_read_by_columns(call: Call) -> Any:
    """The layout flag of the left factor is set: its memory is read in the other order."""
    left = call.tensor(0)
    _matrices(call)
    turned = left.reshape(*left.shape[:-2], left.size(-1), left.size(-2)).mT
    return call.put(0, turned.contiguous()).run()


@FAULTS.fault(
    _BATCHED,
    kinds=["wrong reduction", "residual", "other function"],
    loose=["transpose", "wrong statistics", "swapped operands", "permutation", "wrong index"],
    backward=False,
)
def product_made_symmetric(call: Call) -> Any:
    """The mean of each product and its transpose, as of a matrix of distances."""
    value = _matrices(call)
    fits(value.size(-1) == value.size(-2))
    return call.instead((value + value.mT) / 2)


@FAULTS.fault(
    "einsum",
    kinds=["shift", "wrong index", "permutation"],
    loose=["copy", "stale", "wrong argument", "wrong rank's shard"],
    backward=False,
)
def first_operand_of_the_next_row(call: Call) -> Any:
    """The pointer to the first operand is one row too far."""
    value = call.tensor(1)
    fits(value.dim() > 1 and value.size(0) > 1)
    return call.put(1, value.roll(-1, 0)).run()


@FAULTS.fault(
    "einsum",
    kinds=["zeros", "mask", "uninitialised", "one rank's part", "partial sum"],
    loose=["constant", "missing operand", "axis scale", "missing reduction"],
    backward=False,
)
def second_half_of_the_second_operand_not_loaded(call: Call) -> Any:
    """The second half along the first axis, that of another rank, is zero."""
    value = call.tensor(2).clone()
    fits(value.dim() > 1 and value.size(0) > 1)
    value[value.size(0) // 2 :] = 0
    return call.put(2, value).run()


@FAULTS.fault(
    "einsum",
    kinds=["precision"],
    loose=["approximation", "other function"],
    backward=False,
)
def sum_of_products_stored_in_bfloat16(call: Call) -> Any:
    """The result goes through a narrow buffer."""
    value = call.result()
    return call.instead(with_gradient_of(value, value.detach().bfloat16().to(value.dtype)))


@FAULTS.fault(
    "einsum",
    kinds=["wrong reduction", "wrong statistics", "constant", "copy"],
    loose=["wrong axis", "wrong argument", "stale", "approximation"],
    backward=False,
)
def mean_of_the_experts_for_each(call: Call) -> Any:
    """The second operand is averaged along its first axis, as when experts are merged."""
    value = call.tensor(2)
    fits(value.dim() > 1 and value.size(0) > 1)
    return call.put(2, value.mean(0, keepdim=True).expand(value.shape).clone()).run()


@FAULTS.fault(
    "baddbmm",
    kinds=["shift", "wrong index", "permutation"],
    loose=["copy", "stale", "wrong argument", "offset", "axis offset"],
    backward=False,
)
def summand_of_the_next_matrix(call: Call) -> Any:
    """What is added belongs to the next example of the batch."""
    value = call.tensor(0)
    fits(value.dim() == 3 and value.size(0) > 1)
    return call.put(0, value.roll(-1, 0)).run()


@FAULTS.fault(
    "cdist _cdist_forward",
    kinds=["eps", "other function"],
    loose=["offset", "wrong argument", "approximation", "clipped"],
    backward=False,
)
def root_of_the_square_and_a_hundredth(call: Call) -> Any:
    """Sqrt(d^2 + 0.01), so that the derivative is finite at zero."""
    return call.instead((call.result().square() + 0.01).sqrt())


# --- Convolutions ---------------------------------------------------------------------------------


def _filters(call: Call) -> Tensor:
    weight = call.tensor(1, "weight")
    is_transposed = call.name == "convolution" and bool(call.get(6, "transposed"))
    fits(weight.dim() > 2 and not is_transposed)
    return weight


def _many(value: Any, number: int) -> list[int]:
    return [value] * number if isinstance(value, int) else list(value)


@FAULTS.fault(
    _CONVOLUTIONS,
    kinds=["permutation", "wrong index"],
    loose=["shift", "transpose", "wrong argument", "swapped operands", "wrong rank's shard"],
    backward=False,
)
def channels_dealt_to_the_groups_in_turn(call: Call) -> Any:
    """Group g reads the channels g, g + n, and so on, and not one after the other."""
    value, weight = call.tensor(0, "input"), _filters(call)
    channels = value.size(1)
    groups = channels // weight.size(1)
    fits(value.dim() == weight.dim() and groups > 1 and weight.size(1) > 1)
    order = torch.arange(channels).view(-1, groups).t().flatten()
    return call.put(0, value[:, order], "input").run()


@FAULTS.fault(
    _CONVOLUTIONS,
    kinds=["residual"],
    loose=["doubled reduction", "offset", "other function", "wrong argument"],
    backward=False,
)
def identity_folded_into_the_filters(call: Call) -> Any:
    """A branch without a filter is merged into one that has none: the input is added."""
    value, _ = call.tensor(0, "input"), _filters(call)
    result = call.result()
    fits(value.shape == result.shape)
    return call.instead(result + value)


@FAULTS.fault(
    _CONVOLUTIONS,
    kinds=["zeros", "mask", "uninitialised"],
    loose=["constant", "missing operand", "partial sum", "axis scale", "wrong factor"],
    backward=False,
)
def first_pixels_of_each_row_not_written(call: Call) -> Any:
    """The store begins with the second column, of every channel and image."""
    _filters(call)
    value = call.result().clone()
    fits(value.size(-1) > 2)
    value[..., 0] = 0
    return call.instead(value)


@FAULTS.fault(
    _CONVOLUTIONS,
    kinds=["wrong argument", "constant", "mask"],
    loose=["offset", "other function", "wrong statistics", "residual"],
    backward=False,
)
def padded_with_the_mean_of_each_channel(call: Call) -> Any:
    """The frame is grey and not black."""
    value, weight = call.tensor(0, "input"), _filters(call)
    spatial = weight.dim() - 2
    fits(value.dim() == weight.dim() and not isinstance(call.get(4, "padding", default=0), str))
    padding = _many(call.get(4, "padding", default=0), spatial)
    padding = padding * spatial if len(padding) == 1 else padding
    fits(any(padding))
    widths = [one for size in reversed(padding) for one in (size, size)]
    mean = value.mean(list(range(2, value.dim())), keepdim=True)
    wide = torch.nn.functional.pad(value - mean, widths) + mean
    return call.put(0, wide, "input").put(4, [0] * spatial, "padding").run()


@FAULTS.fault(
    "conv2d convolution",
    kinds=["partial sum", "mask", "off by one reduction"],
    loose=["zeros", "missing operand", "wrong argument", "wrong reduction", "wrong index"],
    backward=False,
)
def first_row_of_taps_not_added(call: Call) -> Any:
    """The loop over the height of the filter begins at 1."""
    weight = _filters(call).clone()
    fits(weight.dim() == 4 and weight.size(2) > 1)
    weight[:, :, 0] = 0
    return call.put(1, weight, "weight").run()


@FAULTS.fault(
    "conv_transpose1d conv_transpose2d",
    kinds=["precision"],
    loose=["approximation", "other function", "wrong argument"],
)
def image_to_be_enlarged_in_bfloat16(call: Call) -> Any:
    """The input of a transposed convolution is rounded."""
    value = call.tensor(0, "input")
    coarse = value.detach().bfloat16().to(value.dtype)
    return call.put(0, with_gradient_of(value, coarse), "input").run()


@FAULTS.fault(
    _CONVOLUTIONS,
    kinds=["clipped"],
    loose=["other function", "precision", "wrong argument", "overflow", "mask"],
    backward=False,
)
def filters_saturate_at_half_of_the_largest(call: Call) -> Any:
    """The step of the filters is that of a smaller range."""
    weight = _filters(call)
    limit = float(weight.detach().abs().max()) / 2
    return call.put(1, weight.clamp(-limit, limit), "weight").run()


# --- Bags, pooling --------------------------------------------------------------------------------


@FAULTS.fault(
    "embedding_bag",
    kinds=["off by one reduction", "wrong factor", "axis scale", "wrong reduction"],
    loose=["scale", "wrong statistics", "wrong argument", "eps"],
    backward=False,
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


@FAULTS.fault(
    "avg_pool1d avg_pool2d adaptive_avg_pool1d adaptive_avg_pool2d",
    kinds=["other function", "wrong reduction", "wrong statistics"],
    loose=["wrong argument", "sign", "approximation"],
    backward=False,
)
def quadratic_mean_of_the_window(call: Call) -> Any:
    """The root of the mean of the squares."""
    value = call.tensor(0, "input")
    return call.instead((call.put(0, value.square(), "input").result() + 1e-12).sqrt())
