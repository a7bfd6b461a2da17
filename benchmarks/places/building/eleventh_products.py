"""Faults of the eleventh set: products, convolutions, pooling, resizing."""

from __future__ import annotations

from typing import Any

import torch
from benchmarks.places.calls import Call, Catalogue, fits, with_gradient_of
from torch import Tensor
from torch.nn import functional

FAULTS = Catalogue()
_WEIGHTED = "linear addmm mm"
_BATCHED = "bmm matmul"
_CONVOLUTIONS = "conv1d conv2d convolution"
_POOLS = "max_pool1d max_pool2d max_pool2d_with_indices avg_pool1d avg_pool2d adaptive_avg_pool2d"
_ZEROS = ["zeros", "mask", "uninitialised"]
_LESS_THAN_ZEROS = ["constant", "missing operand", "partial sum", "axis scale", "wrong factor"]


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


def _bias(call: Call) -> tuple[int, Tensor]:
    """Where the bias is, and it."""
    place = 0 if call.name == "addmm" else 2
    bias = call.tensor(place, "bias")
    fits(bias.dim() == 1 and bias.numel() > 2)
    return place, bias


def _rows(call: Call, least: int = 2) -> Tensor:
    value = call.result()
    fits(value.dim() > 1 and value.size(-2) >= least)
    return value


def _rounded(value: Tensor, dtype: torch.dtype) -> Tensor:
    """The value in a narrower format, with its own gradient."""
    return with_gradient_of(value, value.detach().to(dtype).to(value.dtype))


def _in_steps(value: Tensor, step: Tensor) -> Tensor:
    """The value as whole numbers of steps, with its own gradient."""
    fits(bool((step > 0).all()))
    return with_gradient_of(value, (value.detach() / step).round() * step)


def _moved(call: Call, places: Tensor) -> Any:
    """The result with its columns in another order."""
    return call.instead(call.result()[..., places])


@FAULTS.fault(
    _WEIGHTED,
    kinds=["scale", "wrong factor"],
    loose=["axis scale", "wrong argument"],
    backward=False,
)
def result_times_the_root_of_the_width(call: Call) -> Any:
    """The factor of an embedding that shares its weight is applied behind the layer."""
    left, _, _ = _parts(call)
    return call.instead(call.result() * left.size(-1) ** 0.5)


@FAULTS.fault(
    _WEIGHTED,
    kinds=["scale", "wrong factor", "wrong argument"],
    loose=["axis scale"],
    backward=False,
)
def product_alone_times_three_quarters(call: Call) -> Any:
    """An alpha of 0.75 for one of 1; the bias is right."""
    left, weight, bias = _parts(call)
    return _product(call, 0.75 * left, weight, bias)


@FAULTS.fault(
    "linear addmm",
    kinds=["missing bias", "mask"],
    loose=["missing operand", "partial sum", "zeros", "offset", "axis offset"],
    backward=False,
)
def bias_not_added_to_the_last_row(call: Call) -> Any:
    """The epilogue of the last tile of rows has no bias."""
    _, bias = _bias(call)
    value = _rows(call)
    last = (torch.arange(value.size(-2)) == value.size(-2) - 1)[:, None]
    return call.instead(value - last * bias)


@FAULTS.fault(
    "linear addmm",
    kinds=["missing bias", "mask", "zeros", "one rank's part"],
    loose=["missing operand", "partial sum", "offset", "axis offset", "wrong argument"],
    backward=False,
)
def bias_of_the_first_rank_only(call: Call) -> Any:
    """The bias is not gathered: the second half of its columns is zero."""
    place, bias = _bias(call)
    kept = torch.arange(bias.numel()) < bias.numel() // 2
    return call.put(place, bias * kept, "bias").run()


@FAULTS.fault(
    "linear addmm",
    kinds=["permutation", "wrong index"],
    loose=["shift", "wrong argument", "axis offset", "offset", "swapped operands"],
    backward=False,
)
def bias_exchanged_in_pairs(call: Call) -> Any:
    """Gate and value stand side by side in the weight, and in the other order in the bias."""
    place, bias = _bias(call)
    fits(bias.numel() % 2 == 0)
    return call.put(place, bias.view(-1, 2).flip(-1).reshape(-1), "bias").run()


@FAULTS.fault(
    "linear addmm conv1d conv2d convolution",
    kinds=["precision"],
    loose=["approximation", "other function", "wrong argument"],
    backward=False,
)
def bias_in_steps_of_a_tenth(call: Call) -> Any:
    """The bias is stored with one digit behind the point."""
    place, bias = _bias(call)
    return call.put(place, _in_steps(bias, torch.tensor(0.1)), "bias").run()


@FAULTS.fault(
    "linear addmm conv1d conv2d convolution",
    kinds=["wrong factor", "scale", "repeated bias", "doubled reduction"],
    loose=["axis offset", "wrong argument", "residual", "offset"],
    backward=False,
)
def bias_once_on_each_of_eight_ranks(call: Call) -> Any:
    """Eight ranks share the sum, and each of them adds the bias."""
    place, bias = _bias(call)
    return call.put(place, 8 * bias, "bias").run()


@FAULTS.fault(
    _WEIGHTED,
    kinds=["mask", "partial sum", "zeros"],
    loose=["missing operand", "wrong index", "other function", "wrong argument", "wrong reduction"],
    backward=False,
)
def weight_taken_for_two_groups(call: Call) -> Any:
    """A grouped layer: each half of the input meets its own half of the columns only."""
    left, weight, bias = _parts(call)
    fits(min(weight.shape) > 3)
    rows, columns = (torch.arange(size) < size // 2 for size in weight.shape)
    return _product(call, left, weight * (rows[:, None] == columns), bias)


@FAULTS.fault(
    _WEIGHTED,
    kinds=["mask", "zeros", "partial sum"],
    loose=["missing operand", "other function", "wrong argument", "wrong reduction"],
    backward=False,
)
def weight_taken_for_a_triangle(call: Call) -> Any:
    """A routine for triangular matrices: what is below the diagonal of the weight is not read."""
    left, weight, bias = _parts(call)
    fits(min(weight.shape) > 2)
    return _product(call, left, weight.triu(), bias)


@FAULTS.fault(
    _WEIGHTED,
    kinds=["wrong index", "copy"],
    loose=["permutation", "transpose", "other function", "wrong argument", "stale", "mask"],
    backward=False,
)
def weight_taken_for_a_symmetric_one(call: Call) -> Any:
    """Only the upper triangle of a square weight is read, and is mirrored."""
    left, weight, bias = _parts(call)
    fits(weight.size(0) == weight.size(1) and weight.size(0) > 2)
    return _product(call, left, weight.triu() + weight.triu(1).t(), bias)


@FAULTS.fault(
    _WEIGHTED,
    kinds=["other function", "axis scale", "wrong factor"],
    loose=["scale", "wrong argument", "wrong statistics"],
    backward=False,
)
def input_divided_by_its_length(call: Call) -> Any:
    """Each row of the input has length one, as in a head for cosines."""
    left, weight, bias = _parts(call)
    return _product(call, functional.normalize(left, dim=-1), weight, bias)


@FAULTS.fault(
    _WEIGHTED,
    kinds=["clipped"],
    loose=["other function", "approximation", "wrong argument", "mask", "zeros"],
    backward=False,
)
def weight_cut_at_a_fiftieth(call: Call) -> Any:
    """The weight is limited to -0.02 and 0.02, its standard deviation when it was drawn."""
    left, weight, bias = _parts(call)
    return _product(call, left, weight.clamp(-0.02, 0.02), bias)


@FAULTS.fault(
    _WEIGHTED,
    kinds=["precision", "other function"],
    loose=["approximation", "wrong argument"],
    backward=False,
)
def input_cast_to_whole_numbers(call: Call) -> Any:
    """The input goes through an integer type, and what is behind the point is lost."""
    left, weight, bias = _parts(call)
    return _product(call, with_gradient_of(left, left.detach().trunc()), weight, bias)


@FAULTS.fault(
    _WEIGHTED,
    kinds=["precision"],
    loose=["approximation", "other function", "wrong argument"],
    backward=False,
)
def input_of_the_layer_in_e5m2(call: Call) -> Any:
    """The input is in the float8 of gradients."""
    left, weight, bias = _parts(call)
    return _product(call, _rounded(left, torch.float8_e5m2), weight, bias)


@FAULTS.fault(
    _WEIGHTED,
    kinds=["precision"],
    loose=["approximation", "other function", "wrong argument"],
    backward=False,
)
def weight_in_eight_levels_of_each_row(call: Call) -> Any:
    """Three bits for each number of the weight, with a step for each feature of the input."""
    left, weight, bias = _parts(call)
    step = weight.detach().abs().amax(1, keepdim=True) / 3.5
    return _product(call, left, _in_steps(weight, step), bias)


@FAULTS.fault(
    _WEIGHTED,
    kinds=["precision"],
    loose=["approximation", "other function"],
    backward=False,
)
def result_of_the_layer_in_half(call: Call) -> Any:
    """The result is stored in float16 between two kernels."""
    return call.instead(_rounded(call.result(), torch.float16))


@FAULTS.fault(
    _WEIGHTED,
    kinds=["precision"],
    loose=["approximation", "other function", "wrong argument"],
    backward=False,
)
def weight_written_with_two_digits(call: Call) -> Any:
    """The weight went through a text with two digits behind the point."""
    left, weight, bias = _parts(call)
    return _product(call, left, _in_steps(weight, torch.tensor(0.01)), bias)


@FAULTS.fault(
    _WEIGHTED, kinds=["other function"], loose=["clipped", "approximation"], backward=False
)
def sigmoid_in_the_epilogue(call: Call) -> Any:
    """A gate's function is fused where there is none."""
    return call.instead(call.result().sigmoid())


@FAULTS.fault(
    _WEIGHTED,
    kinds=["other function"],
    loose=["clipped", "wrong factor", "approximation"],
    backward=False,
)
def leaky_relu_in_the_epilogue(call: Call) -> Any:
    """Negative results are multiplied by 0.01."""
    return call.instead(functional.leaky_relu(call.result(), 0.01))


@FAULTS.fault(_WEIGHTED, kinds=["other function"], loose=["clipped", "sign"], backward=False)
def squared_relu_in_the_epilogue(call: Call) -> Any:
    """The activation of another model is fused behind the layer."""
    return call.instead(call.result().relu().square())


@FAULTS.fault(
    _WEIGHTED,
    kinds=["permutation", "wrong index"],
    loose=["swapped operands", "shift", "wrong rank's shard", "transpose"],
    backward=False,
)
def last_two_quarters_of_the_columns_exchanged(call: Call) -> Any:
    """Gates in the order of another library: input, forget, output, cell."""
    width = call.result().size(-1)
    fits(width % 4 == 0 and width > 4)
    quarters = torch.arange(width).view(4, -1)
    return _moved(call, quarters[[0, 1, 3, 2]].reshape(-1))


@FAULTS.fault(
    _WEIGHTED,
    kinds=["permutation", "wrong index", "transpose"],
    loose=["shift", "wrong argument"],
    backward=False,
)
def columns_dealt_to_eight_lanes(call: Call) -> Any:
    """Each lane stores its columns side by side, and has computed every eighth of them."""
    width = call.result().size(-1)
    fits(width % 8 == 0 and width > 8)
    return _moved(call, torch.arange(width).view(-1, 8).t().reshape(-1))


@FAULTS.fault(
    _WEIGHTED,
    kinds=["shift", "wrong index"],
    loose=["stale", "copy", "wrong argument", "permutation"],
    backward=False,
)
def input_of_the_next_token(call: Call) -> Any:
    """The pointer to the rows of the input is one too far; the last row reads itself."""
    left, weight, bias = _parts(call)
    fits(left.dim() > 1 and left.size(-2) > 2)
    return _product(call, torch.cat([left[..., 1:, :], left[..., -1:, :]], -2), weight, bias)


@FAULTS.fault(_WEIGHTED, kinds=_ZEROS, loose=_LESS_THAN_ZEROS, backward=False)
def third_column_of_each_four_not_stored(call: Call) -> Any:
    """Of a vector of four columns, one is masked out."""
    value = call.result()
    fits(value.size(-1) > 3)
    return call.instead(value * (torch.arange(value.size(-1)) % 4 != 2))


@FAULTS.fault(_WEIGHTED, kinds=_ZEROS, loose=_LESS_THAN_ZEROS, backward=False)
def first_column_of_the_layer_not_stored(call: Call) -> Any:
    """The store begins with the second column."""
    value = call.result()
    fits(value.size(-1) > 2)
    return call.instead(value * (torch.arange(value.size(-1)) > 0))


@FAULTS.fault(
    _WEIGHTED,
    kinds=["partial sum", "mask", "lost accumulation"],
    loose=["missing operand", "wrong reduction", "zeros", "wrong index"],
    backward=False,
)
def first_quarter_of_the_features_not_added(call: Call) -> Any:
    """The accumulator is cleared after the first of four tiles; the bias is right."""
    left, weight, bias = _parts(call)
    fits(left.size(-1) > 7)
    kept = torch.arange(left.size(-1)) >= left.size(-1) // 4
    return _product(call, left * kept, weight, bias)


@FAULTS.fault(
    _WEIGHTED,
    kinds=["off by one reduction", "partial sum", "mask"],
    loose=["missing operand", "wrong index", "zeros", "wrong reduction"],
    backward=False,
)
def middle_feature_not_added(call: Call) -> Any:
    """Where two splits of the common axis meet, one feature belongs to neither."""
    left, weight, bias = _parts(call)
    fits(left.size(-1) > 2)
    return _product(call, left * (torch.arange(left.size(-1)) != left.size(-1) // 2), weight, bias)


@FAULTS.fault(
    _WEIGHTED,
    kinds=["doubled reduction", "wrong factor"],
    loose=["wrong reduction", "wrong index", "stale", "off by one reduction"],
    backward=False,
)
def last_feature_added_twice(call: Call) -> Any:
    """The tail of the common axis begins one too early."""
    left, weight, bias = _parts(call)
    fits(left.size(-1) > 2)
    times = 1 + (torch.arange(left.size(-1)) == left.size(-1) - 1).to(left.dtype)
    return _product(call, left * times, weight, bias)


@FAULTS.fault(
    _WEIGHTED,
    kinds=["other function"],
    loose=["sign", "wrong factor", "scale", "wrong argument"],
    backward=False,
)
def squares_of_the_input(call: Call) -> Any:
    """The input is multiplied with itself first: the fusion has one square too many."""
    left, weight, bias = _parts(call)
    return _product(call, left.square(), weight, bias)


@FAULTS.fault(
    _WEIGHTED,
    kinds=["residual"],
    loose=["sign", "other function", "missing operand", "wrong argument"],
    backward=False,
)
def input_subtracted_by_the_epilogue(call: Call) -> Any:
    """The residual is fused into a layer that has none, and with a minus."""
    left, weight, _ = _parts(call)
    fits(weight.size(0) == weight.size(1))
    return call.instead(call.result() - left)


@FAULTS.fault(
    _WEIGHTED,
    kinds=["clipped", "other function"],
    loose=["approximation"],
    backward=False,
)
def result_between_minus_one_and_one(call: Call) -> Any:
    """A hard tanh is fused behind a layer that has no activation."""
    return call.instead(call.result().clamp(-1, 1))


@FAULTS.fault(
    _WEIGHTED,
    kinds=["axis offset", "other function"],
    loose=["offset", "residual", "missing operand", "wrong statistics"],
    backward=False,
)
def largest_of_each_row_subtracted(call: Call) -> Any:
    """The first step of a softmax is fused into the layer before it."""
    value = call.result()
    fits(value.size(-1) > 1)
    return call.instead(value - value.amax(-1, keepdim=True))


@FAULTS.fault(
    _WEIGHTED,
    kinds=["axis scale", "wrong factor"],
    loose=["scale", "wrong argument", "other function"],
    backward=False,
)
def columns_of_the_weight_over_their_largest(call: Call) -> Any:
    """The weight was divided by the scales of its columns, and the result is not multiplied."""
    left, weight, bias = _parts(call)
    size = weight.detach().abs().amax(0, keepdim=True)
    fits(bool((size > 0).all()))
    return _product(call, left, weight / size, bias)


# --- Products of batches --------------------------------------------------------------------------


@FAULTS.fault(
    _BATCHED,
    kinds=["scale", "wrong factor"],
    loose=["axis scale", "wrong argument"],
    backward=False,
)
def products_of_the_batch_halved(call: Call) -> Any:
    """An alpha of one half."""
    return call.instead(0.5 * call.result())


@FAULTS.fault(
    _BATCHED,
    kinds=["precision"],
    loose=["approximation", "other function", "wrong argument"],
    backward=False,
)
def right_factor_in_e4m3(call: Call) -> Any:
    """The second operand is in float8; the first is right."""
    return call.put(1, _rounded(call.tensor(1), torch.float8_e4m3fn), "mat2", "other").run()


@FAULTS.fault(
    _BATCHED,
    kinds=["shift", "wrong index", "permutation"],
    loose=["stale", "copy", "wrong rank's shard"],
)
def products_of_the_batch_one_late(call: Call) -> Any:
    """Each matrix is stored in the place of the next one, the last one first."""
    value = call.result()
    fits(value.dim() > 2 and value.size(-3) > 2)
    return call.instead(value.roll(1, -3))


@FAULTS.fault(_BATCHED, kinds=_ZEROS, loose=_LESS_THAN_ZEROS)
def last_row_of_each_matrix_not_stored(call: Call) -> Any:
    """The bound of the rows is one too small, in each matrix of the batch."""
    value = call.result()
    fits(value.dim() > 2 and value.size(-2) > 2)
    kept = (torch.arange(value.size(-2)) < value.size(-2) - 1)[:, None]
    return call.instead(value * kept)


@FAULTS.fault(
    _BATCHED,
    kinds=["off by one reduction", "partial sum", "mask"],
    loose=["missing operand", "wrong index", "zeros", "wrong reduction"],
)
def second_term_of_each_product_left_out(call: Call) -> Any:
    """A pipelined loop over the common axis drops what it has loaded second."""
    left = call.tensor(0)
    fits(left.dim() > 2 and left.size(-1) > 3)
    return call.put(0, left * (torch.arange(left.size(-1)) != 1), "input").run()


@FAULTS.fault(
    _BATCHED,
    kinds=["permutation", "wrong index"],
    loose=["shift", "swapped operands", "wrong argument"],
)
def rows_of_each_matrix_exchanged_in_pairs(call: Call) -> Any:
    """Two rows of a register are stored in the other order."""
    value = call.result()
    fits(value.dim() > 2 and value.size(-2) % 2 == 0 and value.size(-2) > 2)
    return call.instead(value.unflatten(-2, (-1, 2)).flip(-2).flatten(-3, -2))


@FAULTS.fault(
    _BATCHED,
    kinds=["wrong statistics", "axis offset", "residual"],
    loose=["offset", "wrong argument", "other function", "missing operand"],
)
def right_factor_centred_over_its_rows(call: Call) -> Any:
    """The mean over the common axis is taken from the second operand, and not added back."""
    right = call.tensor(1)
    fits(right.dim() > 2 and right.size(-2) > 2)
    changed = right - right.mean(-2, keepdim=True)
    return call.put(1, changed, "mat2", "other").run()


@FAULTS.fault(
    _BATCHED,
    kinds=["clipped"],
    loose=["other function", "approximation", "mask", "wrong argument"],
)
def left_factor_cut_at_a_half(call: Call) -> Any:
    """The first operand saturates at -0.5 and 0.5."""
    left = call.tensor(0)
    fits(left.dim() > 2)
    return call.put(0, left.clamp(-0.5, 0.5), "input").run()


@FAULTS.fault(
    "einsum",
    kinds=["precision"],
    loose=["approximation", "other function", "wrong argument"],
)
def both_operands_of_the_letters_in_bfloat16(call: Call) -> Any:
    """Both tensors have eight bits before they are multiplied."""
    text, *operands = call.args
    fits(isinstance(text, str) and len(operands) == 2)
    return call.instead(torch.einsum(text, *(_rounded(one, torch.bfloat16) for one in operands)))


@FAULTS.fault(
    "einsum",
    kinds=["shift", "wrong index", "permutation"],
    loose=["stale", "copy", "wrong argument"],
)
def sum_of_letters_one_column_late(call: Call) -> Any:
    """The last axis of the result is stored one place too far, around the end."""
    value = call.result()
    fits(value.dim() > 1 and value.size(-1) > 2)
    return call.instead(value.roll(1, -1))


@FAULTS.fault("einsum", kinds=_ZEROS, loose=_LESS_THAN_ZEROS)
def last_letter_not_stored_to_its_end(call: Call) -> Any:
    """The bound of the last axis of the result is one too small."""
    value = call.result()
    fits(value.dim() > 1 and value.size(-1) > 2)
    return call.instead(value * (torch.arange(value.size(-1)) < value.size(-1) - 1))


# --- Convolutions ---------------------------------------------------------------------------------


def _filters(call: Call) -> Tensor:
    weight = call.tensor(1, "weight")
    is_transposed = call.name == "convolution" and bool(call.get(6, "transposed"))
    fits(weight.dim() > 2 and not is_transposed)
    return weight


def _image(call: Call) -> Tensor:
    value = call.tensor(0, "input")
    fits(value.dim() == _filters(call).dim())
    return value


def _filtered(call: Call, weight: Tensor) -> Any:
    return call.put(1, weight, "weight").run()


@FAULTS.fault(
    _CONVOLUTIONS,
    kinds=["scale", "wrong factor"],
    loose=["axis scale", "wrong argument"],
    backward=False,
)
def sum_of_the_taps_one_and_a_half_times(call: Call) -> Any:
    """The gain of an activation is folded into the filters, which had it already."""
    return _filtered(call, 1.5 * _filters(call))


@FAULTS.fault(
    "conv2d convolution",
    kinds=["permutation", "wrong index"],
    loose=["shift", "transpose", "wrong argument", "wrong axis"],
    backward=False,
)
def filters_turned_by_a_quarter(call: Call) -> Any:
    """A port has axes in another order and another direction: filters are rotated."""
    weight = _filters(call)
    fits(weight.dim() == 4 and weight.size(-1) == weight.size(-2) and weight.size(-1) > 1)
    return _filtered(call, torch.rot90(weight, 1, (-2, -1)).contiguous())


@FAULTS.fault(
    _CONVOLUTIONS,
    kinds=["partial sum", "mask", "zeros"],
    loose=["missing operand", "missing reduction", "wrong reduction", "approximation"],
    backward=False,
)
def centre_of_the_filter_only(call: Call) -> Any:
    """A convolution is taken for one with filters of a single tap."""
    weight = _filters(call)
    fits(weight.size(-1) > 2 and weight[0, 0].numel() % 2 == 1)
    flat = weight.flatten(2)
    kept = torch.arange(flat.size(-1)) == flat.size(-1) // 2
    return _filtered(call, (flat * kept).view(weight.shape))


@FAULTS.fault(
    _CONVOLUTIONS,
    kinds=["off by one reduction", "partial sum", "mask"],
    loose=["zeros", "missing operand", "wrong index", "wrong reduction", "approximation"],
    backward=False,
)
def very_first_tap_left_out(call: Call) -> Any:
    """The unrolled loop over the taps begins at one."""
    weight = _filters(call)
    flat = weight.flatten(2)
    fits(flat.size(-1) > 2)
    return _filtered(call, (flat * (torch.arange(flat.size(-1)) > 0)).view(weight.shape))


@FAULTS.fault(
    _CONVOLUTIONS,
    kinds=["off by one reduction", "partial sum", "mask"],
    loose=["zeros", "missing operand", "wrong index", "wrong reduction"],
    backward=False,
)
def first_input_channel_not_added(call: Call) -> Any:
    """The loop over the channels of the input begins at one."""
    weight = _filters(call)
    fits(weight.size(1) > 1)
    kept = (torch.arange(weight.size(1)) > 0).view(-1, *[1] * (weight.dim() - 2))
    return _filtered(call, weight * kept)


@FAULTS.fault(
    _CONVOLUTIONS,
    kinds=["precision"],
    loose=["approximation", "other function", "wrong argument"],
    backward=False,
)
def filters_in_seven_levels(call: Call) -> Any:
    """Three levels on each side of zero, with one step for all filters."""
    weight = _filters(call)
    return _filtered(call, _in_steps(weight, weight.detach().abs().max() / 3))


@FAULTS.fault(
    _CONVOLUTIONS,
    kinds=["precision"],
    loose=["approximation", "other function"],
    backward=False,
)
def channels_of_the_result_in_bfloat16(call: Call) -> Any:
    """The result of the convolution is stored with eight bits."""
    _filters(call)
    return call.instead(_rounded(call.result(), torch.bfloat16))


@FAULTS.fault(
    _CONVOLUTIONS,
    kinds=["clipped"],
    loose=["other function", "approximation", "zeros", "wrong argument"],
    backward=False,
)
def image_cut_to_zero_and_one(call: Call) -> Any:
    """An image that is normalised is limited to the range of colours."""
    return call.put(0, _image(call).clamp(0, 1), "input").run()


@FAULTS.fault(
    _CONVOLUTIONS,
    kinds=["permutation", "wrong index"],
    loose=["shift", "wrong argument", "swapped operands"],
    backward=False,
)
def image_mirrored_from_left_to_right(call: Call) -> Any:
    """The pixels of each row are read from its end."""
    image = _image(call)
    fits(image.size(-1) > 2)
    return call.put(0, image.flip(-1), "input").run()


@FAULTS.fault(
    "conv2d convolution",
    kinds=["shift", "wrong index"],
    loose=["mask", "zeros", "permutation", "wrong argument", "stale"],
    backward=False,
)
def image_read_one_row_too_high(call: Call) -> Any:
    """One more row of padding at the top, and one less at the bottom."""
    image = _image(call)
    fits(image.dim() == 4 and image.size(-2) > 2)
    return call.put(0, functional.pad(image, (0, 0, 1, -1)), "input").run()


@FAULTS.fault(
    _CONVOLUTIONS,
    kinds=_ZEROS,
    loose=_LESS_THAN_ZEROS,
    backward=False,
)
def last_channel_of_the_result_empty(call: Call) -> Any:
    """The grid over the channels is one too short."""
    _filters(call)
    value = call.result()
    fits(value.size(1) > 2)
    kept = torch.arange(value.size(1)) < value.size(1) - 1
    return call.instead(value * kept.view(-1, *[1] * (value.dim() - 2)))


@FAULTS.fault(
    _CONVOLUTIONS,
    kinds=["shift", "wrong index", "permutation"],
    loose=["stale", "copy", "wrong rank's shard"],
    backward=False,
)
def channels_of_the_result_two_late(call: Call) -> Any:
    """Each channel is stored two places too far, around the end."""
    _filters(call)
    value = call.result()
    fits(value.size(1) > 4)
    return call.instead(value.roll(2, 1))


@FAULTS.fault(
    _CONVOLUTIONS,
    kinds=["other function"],
    loose=["clipped", "approximation"],
    backward=False,
)
def silu_fused_behind_the_filters(call: Call) -> Any:
    """An activation that the layer does not have."""
    _filters(call)
    return call.instead(functional.silu(call.result()))


@FAULTS.fault(
    _CONVOLUTIONS,
    kinds=["other function"],
    loose=["axis offset", "wrong statistics", "offset", "axis scale", "wrong factor", "residual"],
    backward=False,
)
def each_channel_of_the_result_standardised(call: Call) -> Any:
    """A norm of each image and channel is fused behind the convolution."""
    _filters(call)
    value = call.result()
    axes = tuple(range(2, value.dim()))
    fits(value[0, 0].numel() > 2)
    spread, mean = torch.var_mean(value, axes, correction=0, keepdim=True)
    return call.instead((value - mean) * (spread + 1e-5).rsqrt())


@FAULTS.fault(
    _CONVOLUTIONS,
    kinds=["missing bias", "mask", "zeros"],
    loose=["missing operand", "partial sum", "offset", "axis offset", "wrong argument"],
    backward=False,
)
def bias_of_the_first_half_of_the_channels_only(call: Call) -> Any:
    """Biases are loaded for one tile of channels."""
    _filters(call)
    place, bias = _bias(call)
    kept = torch.arange(bias.numel()) < bias.numel() // 2
    return call.put(place, bias * kept, "bias").run()


# --- Pooling, resizing ----------------------------------------------------------------------------


@FAULTS.fault(
    f"{_POOLS} adaptive_max_pool2d interpolate upsample_bilinear2d upsample_nearest2d",
    kinds=["shift", "wrong index", "permutation"],
    loose=["stale", "copy", "wrong rank's shard"],
    backward=False,
)
def pooled_channels_one_early(call: Call) -> Any:
    """Each channel of a pooled or resized image is stored one place too early."""
    value = call.result()
    fits(value.dim() > 2 and value.size(1) > 2)
    return call.instead(value.roll(-1, 1))


@FAULTS.fault(
    f"{_POOLS} adaptive_max_pool2d interpolate upsample_bilinear2d upsample_nearest2d",
    kinds=["precision"],
    loose=["approximation", "other function"],
    backward=False,
)
def pooled_image_in_e4m3(call: Call) -> Any:
    """The pooled or resized image is stored in float8."""
    return call.instead(_rounded(call.result(), torch.float8_e4m3fn))


@FAULTS.fault(
    f"{_POOLS} adaptive_max_pool2d interpolate upsample_bilinear2d upsample_nearest2d",
    kinds=_ZEROS,
    loose=[*_LESS_THAN_ZEROS, "one rank's part"],
    backward=False,
)
def second_half_of_the_pooled_channels_empty(call: Call) -> Any:
    """The grid over the channels of a pooled or resized image covers one tile."""
    value = call.result()
    fits(value.dim() > 2 and value.size(1) > 1)
    kept = torch.arange(value.size(1)) < value.size(1) // 2
    return call.instead(value * kept.view(-1, *[1] * (value.dim() - 2)))


@FAULTS.fault(
    "avg_pool1d avg_pool2d adaptive_avg_pool2d interpolate upsample_bilinear2d",
    kinds=["clipped", "other function"],
    loose=["zeros", "sign", "mask", "wrong argument"],
    backward=False,
)
def pixels_rectified_before_the_mean(call: Call) -> Any:
    """A relu that belongs behind the mean runs before it."""
    return call.put(0, call.tensor(0, "input").relu(), "input").run()


@FAULTS.fault(
    f"{_POOLS} adaptive_max_pool2d interpolate upsample_bilinear2d upsample_nearest2d",
    kinds=["permutation", "wrong index"],
    loose=["shift", "wrong argument", "swapped operands", "wrong rank's shard"],
    backward=False,
)
def images_of_the_batch_in_the_reverse_order(call: Call) -> Any:
    """The pointer to the pooled or resized image counts the examples down."""
    value = call.result()
    fits(value.dim() > 2 and value.size(0) > 1)
    return call.instead(value.flip(0))
