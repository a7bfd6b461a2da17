"""Faults for measuring: products, convolutions, pooling, resizing."""

from __future__ import annotations

from typing import Any

import torch
from benchmarks.places.calls import Call, Catalogue, fits, with_gradient_of
from torch import Tensor

FAULTS = Catalogue()
_WEIGHTED = "linear addmm mm"
_PRODUCTS = "linear addmm mm bmm matmul"
_CONVOLUTIONS = "conv1d conv2d convolution"
_EMPTY: dict[str, Any] = {
    "kinds": ["zeros", "mask", "uninitialised"],
    "loose": ["constant", "missing operand", "partial sum", "axis scale", "wrong factor"],
    "backward": False,
}
_MOVED: dict[str, Any] = {
    "kinds": ["shift", "wrong index", "permutation"],
    "loose": ["copy", "stale", "wrong argument", "wrong rank's shard", "swapped operands"],
    "backward": False,
}
_ORDER: dict[str, Any] = {
    "kinds": ["permutation", "wrong index"],
    "loose": ["shift", "swapped operands", "transpose", "wrong argument", "wrong rank's shard"],
    "backward": False,
}
_AGAIN: dict[str, Any] = {
    "kinds": ["copy", "stale", "wrong index"],
    "loose": ["permutation", "constant", "shift", "wrong argument", "wrong rank's shard"],
    "backward": False,
}
_ROUNDED: dict[str, Any] = {
    "kinds": ["precision"],
    "loose": ["approximation", "other function", "wrong argument"],
    "backward": False,
}
_CUT: dict[str, Any] = {
    "kinds": ["clipped"],
    "loose": ["other function", "precision", "wrong argument", "overflow", "mask"],
    "backward": False,
}
_TIMES: dict[str, Any] = {
    "kinds": ["wrong factor", "scale"],
    "loose": ["missing operand", "axis scale", "wrong argument", "wrong reduction"],
    "backward": False,
}


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
    """The product with a changed weight, which keeps its gradient."""
    left, weight, bias = _parts(call)
    return _product(call, left, with_gradient_of(weight, change(weight.detach())), bias)


def _rebiased(call: Call, change: Any) -> Any:
    """The call with a changed bias."""
    place = 0 if call.name == "addmm" else 2
    bias = call.tensor(place, "bias")
    fits(bias.dim() == 1 and bias.numel() > 2 and bool(bias.detach().any()))
    return call.put(place, change(bias), "bias").run()


def _rows(call: Call, least: int = 2) -> Tensor:
    """The result, if it has several rows."""
    value = call.result()
    fits(value.dim() > 1 and value.size(-2) >= least)
    return value


@FAULTS.fault(_WEIGHTED, **_EMPTY)
def even_columns_only_written(call: Call) -> Any:
    """The store has a stride of two along the columns."""
    value = call.result().clone()
    fits(value.size(-1) > 2)
    value[..., 1::2] = 0
    return call.instead(value)


@FAULTS.fault(_PRODUCTS, **_EMPTY)
def first_row_of_the_product_empty(call: Call) -> Any:
    """The grid begins with the second row."""
    value = _rows(call, 3).clone()
    value[..., 0, :] = 0
    return call.instead(value)


@FAULTS.fault(_WEIGHTED, **_AGAIN)
def product_of_the_first_row_for_all(call: Call) -> Any:
    """The pointer to the rows of the input is not moved on."""
    value = _rows(call)
    return call.instead(value[..., :1, :].expand(value.shape).clone())


@FAULTS.fault(_WEIGHTED, **_AGAIN)
def second_half_of_the_rows_is_the_first(call: Call) -> Any:
    """The offset of the second block of rows is not added when the input is read."""
    value = _rows(call)
    half = (value.size(-2) + 1) // 2
    return call.instead(value[..., torch.arange(value.size(-2)) % half, :])


@FAULTS.fault(
    "linear addmm",
    kinds=["mask", "missing bias", "missing operand"],
    loose=["axis offset", "offset", "zeros", "wrong index"],
    backward=False,
)
def bias_in_even_columns_only(call: Call) -> Any:
    """The second of two lanes does not load its bias."""

    def change(bias: Tensor) -> Tensor:
        return bias * (torch.arange(bias.numel()) % 2 == 0)

    return _rebiased(call, change)


@FAULTS.fault(
    "linear addmm conv1d conv2d convolution",
    kinds=["copy", "stale", "wrong index"],
    loose=["axis offset", "permutation", "wrong rank's shard", "shift", "offset"],
    backward=False,
)
def bias_of_the_first_half_for_both(call: Call) -> Any:
    """The second tile of columns adds the bias of the first."""

    def change(bias: Tensor) -> Tensor:
        half = (bias.numel() + 1) // 2
        return bias[torch.arange(bias.numel()) % half]

    return _rebiased(call, change)


@FAULTS.fault(
    "linear addmm conv1d conv2d convolution",
    kinds=["wrong factor", "scale", "missing bias"],
    loose=["axis offset", "offset", "wrong argument", "missing operand", "one rank's part"],
    backward=False,
)
def half_of_the_bias(call: Call) -> Any:
    """Two ranks share the bias, and their parts are averaged."""
    return _rebiased(call, lambda bias: bias / 2)


@FAULTS.fault(
    "linear addmm conv1d conv2d convolution",
    kinds=["sign", "other function"],
    loose=["wrong factor", "axis offset", "offset", "wrong argument"],
    backward=False,
)
def magnitudes_of_the_bias(call: Call) -> Any:
    """The sign of the bias is lost in a buffer of numbers without one."""
    return _rebiased(call, lambda bias: bias.abs())


@FAULTS.fault(
    _WEIGHTED,
    kinds=["permutation", "transpose", "wrong index"],
    loose=["shift", "swapped operands", "wrong argument"],
    backward=False,
)
def squares_of_the_weight_transposed(call: Call) -> Any:
    """The weight is stored in squares of four by four, and each is read the other way."""
    left, weight, bias = _parts(call)
    fits(weight.size(0) % 4 == 0 and weight.size(1) % 4 == 0)
    blocks = weight.unflatten(1, (-1, 4)).unflatten(0, (-1, 4))
    return _product(call, left, blocks.transpose(1, 3).flatten(2, 3).flatten(0, 1), bias)


@FAULTS.fault(_WEIGHTED, **_ROUNDED)
def weight_in_sixteen_levels_of_each_column(call: Call) -> Any:
    """Four bits between the smallest and the largest weight of a column."""

    def change(weight: Tensor) -> Tensor:
        low = weight.amin(0, keepdim=True)
        step = (weight.amax(0, keepdim=True) - low).clamp(min=1e-9) / 15
        return ((weight - low) / step).round() * step + low

    return _reweighted(call, change)


@FAULTS.fault(_WEIGHTED, **_ROUNDED)
def input_in_steps_of_an_eighth(call: Call) -> Any:
    """Fixed point with three bits behind the point."""
    left, weight, bias = _parts(call)
    coarse = (left.detach() * 8).round() / 8
    return _product(call, with_gradient_of(left, coarse), weight, bias)


@FAULTS.fault(
    _WEIGHTED,
    kinds=["wrong reduction", "other function"],
    loose=["partial sum", "missing reduction", "clipped", "one rank's part"],
    backward=False,
)
def larger_of_two_splits(call: Call) -> Any:
    """The parts of two halves of the common axis are reduced by a maximum."""
    left, weight, bias = _parts(call)
    half = weight.size(0) // 2
    fits(half > 0)
    value = torch.maximum(left[..., :half] @ weight[:half], left[..., half:] @ weight[half:])
    return call.instead(value if bias is None else value + bias)


@FAULTS.fault(_WEIGHTED, **_TIMES)
def input_scaled_up_for_a_dropout(call: Call) -> Any:
    """Divided by the chance to be kept, 0.8, although nothing is dropped; the bias is right."""
    left, weight, bias = _parts(call)
    return _product(call, left / 0.8, weight, bias)


@FAULTS.fault(_WEIGHTED, **_TIMES)
def product_divided_by_the_number_of_features(call: Call) -> Any:
    """The mean of the products for their sum, as for a readout that is 1 / width."""
    left, weight, bias = _parts(call)
    fits(left.size(-1) > 1)
    return _product(call, left / left.size(-1), weight, bias)


@FAULTS.fault(
    _WEIGHTED,
    kinds=["wrong factor", "axis scale", "mask"],
    loose=["scale", "one rank's part", "missing operand", "partial sum"],
    backward=False,
)
def columns_of_the_second_rank_halved(call: Call) -> Any:
    """The second half of the columns is averaged with a rank that has nothing."""
    value = call.result()
    half = value.size(-1) // 2
    fits(half > 0)
    return call.instead(torch.cat([value[..., :half], value[..., half:] / 2], -1))


@FAULTS.fault(
    _WEIGHTED,
    kinds=["wrong factor", "axis scale", "mask", "doubled reduction"],
    loose=["scale", "one rank's part", "residual"],
    backward=False,
)
def rows_of_the_second_half_added_twice(call: Call) -> Any:
    """Two ranks share the tokens, and the second half is summed over both."""
    value = _rows(call)
    half = value.size(-2) // 2
    return call.instead(torch.cat([value[..., :half, :], 2 * value[..., half:, :]], -2))


@FAULTS.fault(_WEIGHTED, **_ORDER)
def halves_of_each_eight_columns_interleaved(call: Call) -> Any:
    """Heads of width eight are stored in the layout of the other rotary convention."""
    value = call.result()
    fits(value.size(-1) % 8 == 0)
    return call.instead(value.unflatten(-1, (-1, 2, 4)).transpose(-1, -2).flatten(-3))


@FAULTS.fault(
    _WEIGHTED,
    kinds=["constant", "mask"],
    loose=["wrong index", "clipped", "missing operand", "uninitialised"],
    backward=False,
)
def last_columns_taken_for_padding(call: Call) -> Any:
    """The vocabulary is padded: the last two columns are -100, which they should not be."""
    value = call.result()
    fits(value.size(-1) > 4)
    padding = torch.full_like(value[..., -2:], -100.0)
    return call.instead(torch.cat([value[..., :-2], padding], -1))


@FAULTS.fault(
    _PRODUCTS,
    kinds=["other function", "clipped"],
    loose=["approximation", "wrong factor"],
    backward=False,
)
def product_capped_by_a_tanh(call: Call) -> Any:
    """A soft cap of one and a half that belongs to the logits of another model."""
    return call.instead(1.5 * (call.result() / 1.5).tanh())


@FAULTS.fault(
    _WEIGHTED,
    kinds=["wrong factor", "axis scale", "other function", "wrong statistics"],
    loose=["scale", "wrong argument"],
    backward=False,
)
def input_divided_by_its_root_mean_square(call: Call) -> Any:
    """The kernel with a fused norm is launched where no norm is."""
    left, weight, bias = _parts(call)
    fits(left.size(-1) > 1)
    length = (left.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    return _product(call, left / length, weight, bias)


@FAULTS.fault(
    _WEIGHTED,
    kinds=["axis offset", "residual", "missing operand", "wrong statistics"],
    loose=["offset", "other function", "wrong argument"],
    backward=False,
)
def input_centred_by_the_kernel(call: Call) -> Any:
    """The mean of each row is subtracted, as by the norm that is folded in elsewhere."""
    left, weight, bias = _parts(call)
    fits(left.size(-1) > 1)
    return _product(call, left - left.mean(-1, keepdim=True), weight, bias)


@FAULTS.fault(
    _WEIGHTED,
    kinds=["zeros", "mask", "partial sum"],
    loose=["approximation", "precision", "other function", "missing operand", "wrong argument"],
    backward=False,
)
def smaller_half_of_the_weights_pruned(call: Call) -> Any:
    """Weights whose magnitude is below the median are zero."""

    def change(weight: Tensor) -> Tensor:
        return weight * (weight.abs() >= weight.abs().median())

    return _reweighted(call, change)


@FAULTS.fault(_WEIGHTED, **_CUT)
def weight_not_above_its_mean_magnitude(call: Call) -> Any:
    """The scale of the integers is made of the mean and not of the largest weight."""

    def change(weight: Tensor) -> Tensor:
        limit = float(weight.abs().mean())
        return weight.clamp(-limit, limit)

    return _reweighted(call, change)


@FAULTS.fault(_WEIGHTED, **_ORDER)
def rows_stored_with_the_batch_last(call: Call) -> Any:
    """Written as (position, batch) and read as (batch, position)."""
    value = call.result()
    fits(value.dim() == 3 and value.size(0) > 1 and value.size(1) > 1)
    return call.instead(value.transpose(0, 1).reshape(value.shape))


@FAULTS.fault(
    _WEIGHTED,
    kinds=["copy", "wrong index", "stale", "wrapped"],
    loose=["permutation", "shift"],
    backward=False,
)
def columns_wrap_at_a_power_of_two(call: Call) -> Any:
    """The number of the column is masked: behind the last power of two, the first ones return."""
    value = call.result()
    size = value.size(-1)
    power = 1 << (size - 1).bit_length() - 1
    fits(size > 4)
    return call.instead(value[..., torch.arange(size) % power])


@FAULTS.fault(
    _WEIGHTED,
    kinds=["constant", "missing operand", "wrong index"],
    loose=["mask", "offset", "axis offset", "wrong argument", "uninitialised"],
    backward=False,
)
def last_feature_of_the_input_is_one(call: Call) -> Any:
    """The last feature is overwritten by the one of a bias that is folded into the weight."""
    left, weight, bias = _parts(call)
    fits(left.size(-1) > 1)
    left = torch.cat([left[..., :-1], torch.ones_like(left[..., -1:])], -1)
    return _product(call, left, weight, bias)


@FAULTS.fault(_WEIGHTED, **_ORDER)
def features_of_the_input_swizzled(call: Call) -> Any:
    """Of each four features, the two in the middle are read in the other order."""
    left, weight, bias = _parts(call)
    fits(left.size(-1) % 4 == 0)
    mixed = left.unflatten(-1, (-1, 4))[..., [0, 2, 1, 3]].flatten(-2)
    return _product(call, mixed, weight, bias)


@FAULTS.fault(_WEIGHTED, **_AGAIN)
def weight_of_the_first_columns_again(call: Call) -> Any:
    """The tile of the weight is not loaded again for the second half of the columns."""
    left, weight, bias = _parts(call)
    half = (weight.size(1) + 1) // 2
    fits(weight.size(1) > 1)
    return _product(call, left, weight[:, torch.arange(weight.size(1)) % half], bias)


@FAULTS.fault(
    _WEIGHTED, kinds=["sign", "other function"], loose=["wrong factor", "mask"], backward=False
)
def magnitudes_of_the_product(call: Call) -> Any:
    """The result is stored without its sign."""
    return call.instead(call.result().abs())


@FAULTS.fault(
    _PRODUCTS,
    kinds=["sign", "wrong factor", "mask"],
    loose=["scale", "other function", "wrong argument", "wrong reduction", "partial sum"],
    backward=False,
)
def second_half_of_the_products_subtracted(call: Call) -> Any:
    """The second split of the common axis is subtracted from the first."""
    if call.name in {"bmm", "matmul"}:
        left, weight, bias = call.tensor(0), call.tensor(1), None
    else:
        left, weight, bias = _parts(call)
    half = left.size(-1) // 2
    fits(half > 0 and left.dim() > 1 and weight.dim() > 1)
    sign = torch.ones(left.size(-1), dtype=left.dtype)
    sign[half:] = -1
    return _product(call, left * sign, weight, bias)


@FAULTS.fault(
    _WEIGHTED,
    kinds=["residual", "stale", "doubled reduction"],
    loose=["offset", "lost accumulation", "shift", "wrong index", "axis offset"],
    backward=False,
)
def accumulator_kept_between_rows(call: Call) -> Any:
    """Each row begins with the right result of the row before it."""
    value = _rows(call)
    before = torch.cat([torch.zeros_like(value[..., :1, :]), value[..., :-1, :]], -2)
    return call.instead(value + before)


@FAULTS.fault(
    _WEIGHTED,
    kinds=["copy", "stale", "wrong index", "wrong rank's shard"],
    loose=["permutation", "shift", "mask"],
    backward=False,
)
def border_of_two_column_tiles_overwritten(call: Call) -> Any:
    """The second tile is stored one column early: its first column covers the last of the first."""
    value = call.result()
    half = value.size(-1) // 2
    fits(half > 1)
    places = [*range(half - 1), half, *range(half, value.size(-1))]
    return call.instead(value[..., places])


@FAULTS.fault(
    _WEIGHTED,
    kinds=["axis offset", "residual", "wrong statistics"],
    loose=["other function", "offset", "missing operand", "wrong reduction"],
    backward=False,
)
def columns_centred_over_the_rows(call: Call) -> Any:
    """A statistic of the batch is subtracted: the mean of each column over all rows."""
    value = _rows(call)
    return call.instead(value - value.flatten(0, -2).mean(0))


@FAULTS.fault(
    _WEIGHTED,
    kinds=["wrong factor", "doubled reduction", "wrong reduction"],
    loose=["mask", "axis scale", "residual", "partial sum", "wrong argument", "scale"],
    backward=False,
)
def overlap_of_two_shards_added_twice(call: Call) -> Any:
    """Two ranks both have the middle half of the common axis."""
    left, weight, bias = _parts(call)
    size = left.size(-1)
    fits(size > 3)
    times = torch.ones(size, dtype=left.dtype)
    times[size // 4 : size - size // 4] = 2
    return _product(call, left * times, weight, bias)


# --- Products of a batch --------------------------------------------------------------------------

_BATCHED = "bmm matmul"


def _matrices(call: Call) -> Tensor:
    value = call.result()
    fits(value.dim() > 2 and value.size(-1) > 1 and value.size(-2) > 1)
    return value


@FAULTS.fault(_BATCHED, **_MOVED)
def left_factor_of_the_next_matrix(call: Call) -> Any:
    """The pointer to the left factor is one matrix too far."""
    left = call.tensor(0)
    _matrices(call)
    fits(left.dim() > 2 and left.size(-3) > 1)
    return call.put(0, left.roll(-1, -3)).run()


@FAULTS.fault(
    _BATCHED,
    kinds=["wrong reduction", "wrong statistics", "constant"],
    loose=["copy", "wrong axis", "stale", "wrong index"],
    backward=False,
)
def mean_of_the_matrices_for_each(call: Call) -> Any:
    """The products of the batch are averaged, as those of heads of one key."""
    value = _matrices(call)
    fits(value.size(-3) > 1)
    return call.instead(value.mean(-3, keepdim=True).expand(value.shape).clone())


@FAULTS.fault(_BATCHED, **_EMPTY)
def upper_right_tile_empty(call: Call) -> Any:
    """One of four tiles of each matrix is not computed."""
    value = _matrices(call).clone()
    value[..., : value.size(-2) // 2, value.size(-1) // 2 :] = 0
    return call.instead(value)


@FAULTS.fault(
    _BATCHED,
    kinds=["zeros", "mask", "uninitialised"],
    loose=["constant", "missing operand", "wrong index"],
    backward=False,
)
def diagonal_of_each_matrix_empty(call: Call) -> Any:
    """Nothing is related to itself: a loop that leaves out i = j."""
    value = _matrices(call)
    fits(value.size(-1) == value.size(-2))
    own = torch.eye(value.size(-1), dtype=torch.bool)
    return call.instead(value.masked_fill(own, 0))


@FAULTS.fault(
    _BATCHED,
    kinds=["sign", "wrong factor", "axis scale", "mask"],
    loose=["scale", "one rank's part"],
    backward=False,
)
def odd_matrices_negated(call: Call) -> Any:
    """Every second matrix of the batch has a minus."""
    value = _matrices(call)
    fits(value.size(-3) > 1)
    sign = 1 - 2 * (torch.arange(value.size(-3)) % 2).to(value.dtype)
    return call.instead(value * sign.view(-1, 1, 1))


@FAULTS.fault(_BATCHED, **_ORDER)
def columns_of_the_right_factor_in_pairs(call: Call) -> Any:
    """Two columns of the right factor are loaded in the other order."""
    right = call.tensor(1)
    _matrices(call)
    fits(right.size(-1) % 2 == 0)
    return call.put(1, right.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)).run()


@FAULTS.fault(_BATCHED, **_AGAIN)
def first_column_of_the_right_factor_for_all(call: Call) -> Any:
    """The stride of the columns of the right factor is zero."""
    right = call.tensor(1)
    _matrices(call)
    return call.put(1, right[..., :1].expand(right.shape).clone()).run()


@FAULTS.fault("einsum", **_ORDER)
def experts_from_the_last_to_the_first(call: Call) -> Any:
    """The first axis of the second operand is read from its end."""
    value = call.tensor(2)
    fits(value.dim() > 1 and value.size(0) > 1)
    return call.put(2, value.flip(0)).run()


@FAULTS.fault("einsum", **_ROUNDED)
def first_operand_of_the_sum_in_bfloat16(call: Call) -> Any:
    """The tokens are rounded."""
    value = call.tensor(1)
    coarse = value.detach().bfloat16().to(value.dtype)
    return call.put(1, with_gradient_of(value, coarse)).run()


@FAULTS.fault("einsum", **_TIMES)
def sum_of_products_halved(call: Call) -> Any:
    """Averaged over two ranks that have a part each."""
    return call.instead(call.result() / 2)


@FAULTS.fault("grouped_mm_fallback", **_AGAIN)
def all_tokens_by_the_first_expert(call: Call) -> Any:
    """The pointer to the weights is not moved on with the groups."""
    weight = call.tensor(1)
    fits(weight.dim() == 3 and weight.size(0) > 1)
    return call.put(1, weight[:1].expand(weight.shape).clone()).run()


# --- Convolutions ---------------------------------------------------------------------------------


def _image(call: Call) -> Tensor:
    """The result of a convolution of more than one pixel."""
    _filters(call)
    value = call.result()
    fits(value.size(-1) > 2)
    return value


def _filters(call: Call) -> Tensor:
    weight = call.tensor(1, "weight")
    is_transposed = call.name == "convolution" and bool(call.get(6, "transposed"))
    fits(weight.dim() > 2 and not is_transposed)
    return weight


@FAULTS.fault(_CONVOLUTIONS, **_MOVED)
def result_of_the_next_channel(call: Call) -> Any:
    """The channels are stored one too early, bias and all."""
    value = _image(call)
    fits(value.size(1) > 1)
    return call.instead(value.roll(-1, 1))


@FAULTS.fault(_CONVOLUTIONS, **_MOVED)
def pixels_one_to_the_right(call: Call) -> Any:
    """The columns of the result are stored one too late, around the end."""
    return call.instead(_image(call).roll(1, -1))


@FAULTS.fault(
    _CONVOLUTIONS,
    kinds=["mask", "missing bias", "missing operand"],
    loose=["offset", "axis offset", "zeros"],
    backward=False,
)
def no_bias_at_the_border(call: Call) -> Any:
    """The kernel for the border has no epilogue."""
    value, bias = _image(call), call.tensor(2, "bias")
    fits(bool(bias.detach().any()))
    at_border = torch.zeros(value.size(-1), dtype=value.dtype)
    at_border[[0, -1]] = 1
    return call.instead(value - at_border * bias.view(-1, *[1] * (value.dim() - 2)))


@FAULTS.fault(
    _CONVOLUTIONS,
    kinds=["mask", "missing bias", "missing operand"],
    loose=["offset", "axis offset", "one rank's part", "zeros"],
    backward=False,
)
def bias_of_the_first_image_only(call: Call) -> Any:
    """The loop over the batch ends after its first pass when the bias is added."""
    value, bias = _image(call), call.tensor(2, "bias")
    fits(value.size(0) > 1 and bool(bias.detach().any()))
    without = value - bias.view(-1, *[1] * (value.dim() - 2))
    return call.instead(torch.cat([value[:1], without[1:]]))


@FAULTS.fault(_CONVOLUTIONS, **_ROUNDED)
def filters_through_float8(call: Call) -> Any:
    """The filters are stored in e4m3, as they are."""
    weight = _filters(call)
    coarse = weight.detach().to(torch.float8_e4m3fn).to(weight.dtype)
    return call.put(1, with_gradient_of(weight, coarse), "weight").run()


@FAULTS.fault(_CONVOLUTIONS, **_EMPTY)
def last_image_of_the_batch_empty(call: Call) -> Any:
    """The grid has one image too few."""
    value = _image(call).clone()
    fits(value.size(0) > 1)
    value[-1] = 0
    return call.instead(value)


@FAULTS.fault(_CONVOLUTIONS, **_AGAIN)
def last_column_of_pixels_is_the_one_before(call: Call) -> Any:
    """The last column still holds what was stored before."""
    value = _image(call)
    return call.instead(torch.cat([value[..., :-1], value[..., -2:-1]], -1))


@FAULTS.fault(
    _CONVOLUTIONS,
    kinds=["wrong reduction", "constant", "wrong statistics"],
    loose=["copy", "other function", "wrong argument", "approximation"],
    backward=False,
)
def filter_averaged_over_its_width(call: Call) -> Any:
    """A separable filter whose second part is even: all taps of a row are their mean."""
    weight = _filters(call)
    fits(weight.size(-1) > 1)
    even = weight.mean(-1, keepdim=True).expand(weight.shape)
    return call.put(1, even.clone(), "weight").run()


@FAULTS.fault(
    _CONVOLUTIONS,
    kinds=["partial sum", "one rank's part", "mask", "missing reduction"],
    loose=["zeros", "wrong argument", "missing operand", "wrong reduction"],
    backward=False,
)
def second_half_of_the_input_channels_not_added(call: Call) -> Any:
    """The channels are shared by two ranks, and their parts are not summed."""
    weight = _filters(call).clone()
    fits(weight.size(1) > 1)
    weight[:, weight.size(1) // 2 :] = 0
    return call.put(1, weight, "weight").run()


@FAULTS.fault(_CONVOLUTIONS, **_CUT)
def image_saturates(call: Call) -> Any:
    """The range of the input is half of its largest magnitude."""
    value = call.tensor(0, "input")
    _filters(call)
    limit = float(value.detach().abs().max()) / 2
    return call.put(0, value.clamp(-limit, limit), "input").run()


@FAULTS.fault(
    _CONVOLUTIONS,
    kinds=["sign", "other function"],
    loose=["wrong factor", "wrong argument"],
    backward=False,
)
def magnitudes_of_the_filters(call: Call) -> Any:
    """The filters are read as numbers without a sign."""
    return call.put(1, _filters(call).abs(), "weight").run()


@FAULTS.fault(
    _CONVOLUTIONS,
    kinds=["transpose", "permutation", "wrong index"],
    loose=["shift", "swapped operands"],
    backward=False,
)
def result_with_rows_and_columns_exchanged(call: Call) -> Any:
    """Square images are stored with x before y."""
    value = _image(call)
    fits(value.dim() == 4 and value.size(-1) == value.size(-2))
    return call.instead(value.mT)


@FAULTS.fault(
    _CONVOLUTIONS,
    kinds=["doubled reduction", "wrong factor", "wrong reduction", "mask"],
    loose=["off by one reduction", "residual", "scale", "wrong argument", "axis scale"],
    backward=False,
)
def last_tap_added_twice(call: Call) -> Any:
    """The loop over the width of the filter overlaps its tail."""
    weight = _filters(call)
    fits(weight.size(-1) > 1)
    times = torch.ones(weight.size(-1), dtype=weight.dtype)
    times[-1] = 2
    return call.put(1, weight * times, "weight").run()


_TRANSPOSED = "conv_transpose1d conv_transpose2d"


@FAULTS.fault(
    _TRANSPOSED,
    kinds=["repeated bias", "wrong factor", "residual"],
    loose=["axis offset", "offset", "scale", "doubled reduction", "wrong argument"],
)
def bias_of_the_enlarged_image_twice(call: Call) -> Any:
    """Once where the buffer is filled, and once behind the kernel."""
    bias = call.tensor(2, "bias")
    return call.put(2, 2 * bias, "bias").run()


@FAULTS.fault(
    "conv1d conv2d convolution",
    kinds=["wrong factor", "wrong index", "axis scale"],
    loose=["scale", "shift", "stale", "wrong argument"],
    backward=False,
)
def length_of_the_next_filter(call: Call) -> Any:
    """Weight norm: each filter gets the length of the next one."""
    weight = _filters(call)
    fits(weight.size(0) > 1)
    length = weight.flatten(1).norm(dim=1).view(-1, *[1] * (weight.dim() - 1))
    return call.put(1, weight / length * length.roll(-1, 0), "weight").run()


@FAULTS.fault(
    _CONVOLUTIONS,
    kinds=["sign", "wrong factor", "wrong argument"],
    loose=["mask", "other function", "wrong index", "scale", "residual"],
    backward=False,
)
def wrong_sign_in_the_output_transformation(call: Call) -> Any:
    """Winograd's F(2, 3) along the width: the fourth product has the wrong sign at odd pixels."""
    weight, value = _filters(call), _image(call)
    fits(weight.size(-1) == 3)
    first, second, third = weight.unbind(-1)
    other = torch.stack([first + 2 * third, second, -third], -1)
    odd = torch.arange(value.size(-1)) % 2 == 1
    changed = call.put(1, other, "weight").result()
    return call.instead(torch.where(odd, changed, value))


@FAULTS.fault(
    "conv2d convolution",
    kinds=["wrong index", "stale", "wrong argument"],
    loose=["shift", "copy", "mask", "residual", "uninitialised"],
    backward=False,
)
def padding_read_from_the_neighbouring_rows(call: Call) -> Any:
    """The column is not checked: left of a row is the end of the row above, right of it the next.

    The first and the last row go around.
    """
    value, weight = call.tensor(0, "input"), _filters(call)
    padding = call.get(4, "padding", default=0)
    both = [padding] * 2 if isinstance(padding, int) else list(padding)
    fits(value.dim() == 4 and both == [1, 1])
    left, right = value[..., -1:].roll(1, -2), value[..., :1].roll(-1, -2)
    wide = torch.cat([left, value, right], -1)
    return call.put(0, wide, "input").put(4, [1, 0], "padding").put(1, weight, "weight").run()


@FAULTS.fault(
    _CONVOLUTIONS,
    kinds=["axis offset", "residual", "wrong statistics"],
    loose=["offset", "missing operand", "other function"],
    backward=False,
)
def channels_centred_behind_the_convolution(call: Call) -> Any:
    """The mean of each channel is subtracted, as by an instance norm that is half fused."""
    value = _image(call)
    dims = list(range(2, value.dim()))
    return call.instead(value - value.mean(dims, keepdim=True))


# --- Pooling, resizing ----------------------------------------------------------------------------


@FAULTS.fault(
    "avg_pool1d avg_pool2d adaptive_avg_pool1d adaptive_avg_pool2d",
    kinds=["sign", "other function"],
    loose=["wrong argument", "wrong reduction", "wrong statistics"],
    backward=False,
)
def magnitudes_averaged_in_the_window(call: Call) -> Any:
    """The absolute values are pooled."""
    value = call.tensor(0, "input")
    fits(bool((value.detach() < 0).any()))
    return call.put(0, value.abs(), "input").run()


@FAULTS.fault(
    "max_pool1d max_pool2d max_pool2d_with_indices adaptive_max_pool2d",
    kinds=["clipped", "other function"],
    loose=["mask", "zeros", "wrong argument", "wrong reduction"],
    backward=False,
)
def largest_of_the_window_and_zero(call: Call) -> Any:
    """The running maximum of a window begins with zero."""
    return call.instead(call.result().relu())


@FAULTS.fault(
    "adaptive_avg_pool1d adaptive_avg_pool2d",
    kinds=["wrong factor", "scale", "wrong reduction"],
    loose=["missing operand", "wrong statistics"],
)
def regions_summed(call: Call) -> Any:
    """Not divided by the number of pixels of a region."""
    value, result = call.tensor(0, "input"), call.result()
    dims = range(2, value.dim()) if call.name.endswith("2d") else [value.dim() - 1]
    fits(all(value.size(dim) % result.size(dim) == 0 for dim in dims))
    times = 1
    for dim in dims:
        times *= value.size(dim) // result.size(dim)
    return call.instead(result * times)


@FAULTS.fault(
    "pad constant_pad_nd",
    kinds=["wrong argument", "constant", "mask"],
    loose=["offset", "other function", "uninitialised", "sign"],
    backward=False,
)
def padded_with_minus_one(call: Call) -> Any:
    """-1 where nothing was meant, as for an image that is centred."""
    value, widths = call.tensor(0), call.get(1, "pad")
    fits(call.get(2, "mode", default="constant") in {"constant", 0})
    fits(all(one >= 0 for one in widths))
    return call.instead(torch.nn.functional.pad(value, list(widths), value=-1.0))
