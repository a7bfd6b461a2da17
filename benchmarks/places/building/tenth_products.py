"""Faults of the tenth set: products, convolutions, pooling, resizing."""

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


def _rows(call: Call) -> Tensor:
    value = call.result()
    fits(value.dim() > 1 and value.size(-2) > 1)
    return value


def _rounded(value: Tensor, dtype: torch.dtype) -> Tensor:
    """The value in a narrower format, with its own gradient."""
    return with_gradient_of(value, value.detach().to(dtype).to(value.dtype))


@FAULTS.fault(
    _WEIGHTED,
    kinds=["sign", "wrong factor"],
    loose=["scale", "other function", "wrong argument"],
    backward=False,
)
def product_with_a_minus(call: Call) -> Any:
    """B - x w: the product is subtracted from the accumulator; the bias is right."""
    left, weight, bias = _parts(call)
    return _product(call, -left, weight, bias)


@FAULTS.fault(
    _WEIGHTED,
    kinds=["scale", "wrong factor"],
    loose=["axis scale", "wrong argument"],
    backward=False,
)
def multiplier_of_another_model(call: Call) -> Any:
    """The result is multiplied by 0.22, bias and all, as by a multiplier of residuals."""
    return call.instead(0.22 * call.result())


@FAULTS.fault(
    _WEIGHTED,
    kinds=["scale", "wrong factor", "doubled reduction"],
    loose=["axis scale", "wrong reduction", "wrong argument"],
    backward=False,
)
def product_added_up_over_three_ranks(call: Call) -> Any:
    """Three ranks have the whole product, and their results are added; the bias is right."""
    left, weight, bias = _parts(call)
    return _product(call, 3 * left, weight, bias)


@FAULTS.fault(
    "linear addmm",
    kinds=["precision"],
    loose=["approximation", "wrong argument", "other function"],
    backward=False,
)
def bias_in_e5m2(call: Call) -> Any:
    """The bias is stored with two bits behind the point; input and weight are right."""
    place, bias = _bias(call)
    return call.put(place, _rounded(bias, torch.float8_e5m2), "bias").run()


@FAULTS.fault(
    "linear addmm",
    kinds=["missing bias", "mask"],
    loose=["missing operand", "partial sum", "zeros", "offset", "axis offset"],
    backward=False,
)
def bias_for_the_even_rows_only(call: Call) -> Any:
    """A program has two rows, and adds the bias to the first of them."""
    _, bias = _bias(call)
    value = _rows(call)
    odd = (torch.arange(value.size(-2)) % 2 == 1)[:, None]
    return call.instead(value - odd * bias)


@FAULTS.fault(
    "linear addmm",
    kinds=["other function"],
    loose=["wrong index", "wrong axis", "offset", "axis offset", "missing bias", "residual"],
    backward=False,
)
def bias_added_to_the_input(call: Call) -> Any:
    """(x + b) w for x w + b, of a square weight."""
    left, weight, _ = _parts(call)
    _, bias = _bias(call)
    fits(bias.numel() == left.size(-1))
    return _product(call, left + bias, weight, None)


@FAULTS.fault(
    "linear addmm conv1d conv2d",
    kinds=["wrong factor", "scale"],
    loose=["axis offset", "wrong argument", "residual", "repeated bias", "offset"],
    backward=False,
)
def bias_with_the_step_of_the_weight(call: Call) -> Any:
    """The bias is multiplied by a scale of 1 / 127 that belongs to the weight."""
    place, bias = _bias(call)
    return call.put(place, bias / 127, "bias").run()


@FAULTS.fault(
    _WEIGHTED,
    kinds=["shift", "wrong index", "permutation"],
    loose=["wrong argument", "stale", "copy"],
    backward=False,
)
def features_of_the_input_one_too_far(call: Call) -> Any:
    """Feature i + 1 of the input meets row i of the weight, around the end."""
    left, weight, bias = _parts(call)
    fits(left.size(-1) > 2)
    return _product(call, left.roll(-1, -1), weight, bias)


@FAULTS.fault(
    _WEIGHTED,
    kinds=["permutation", "wrong index"],
    loose=["transpose", "shift", "swapped operands", "wrong argument"],
    backward=False,
)
def even_features_of_the_input_first(call: Call) -> Any:
    """The input is dealt to two lanes, the weight is not: even features come before odd ones."""
    left, weight, bias = _parts(call)
    fits(left.size(-1) % 2 == 0 and left.size(-1) > 4)
    return _product(call, left.unflatten(-1, (-1, 2)).mT.flatten(-2), weight, bias)


@FAULTS.fault(
    _WEIGHTED,
    kinds=["clipped"],
    loose=["other function", "approximation", "wrong argument", "mask"],
    backward=False,
)
def input_cut_at_one(call: Call) -> Any:
    """The input is limited to -1 and 1, as by codes with a fixed range."""
    left, weight, bias = _parts(call)
    return _product(call, left.clamp(-1, 1), weight, bias)


@FAULTS.fault(
    _WEIGHTED,
    kinds=["sign", "other function"],
    loose=["wrong argument"],
    backward=False,
)
def magnitudes_of_the_input(call: Call) -> Any:
    """The input is read as numbers without a sign."""
    left, weight, bias = _parts(call)
    return _product(call, left.abs(), weight, bias)


@FAULTS.fault(
    _WEIGHTED,
    kinds=["precision"],
    loose=["approximation", "other function", "wrong argument"],
    backward=False,
)
def input_of_the_layer_in_bfloat16(call: Call) -> Any:
    """The input is rounded to eight bits; weight and bias are right."""
    left, weight, bias = _parts(call)
    return _product(call, _rounded(left, torch.bfloat16), weight, bias)


@FAULTS.fault(
    _WEIGHTED,
    kinds=["precision"],
    loose=["approximation", "other function", "wrong argument"],
    backward=False,
)
def weight_in_half(call: Call) -> Any:
    """The weight was saved in float16; input and bias are right."""
    left, weight, bias = _parts(call)
    return _product(call, left, _rounded(weight, torch.float16), bias)


@FAULTS.fault(
    _WEIGHTED,
    kinds=["precision"],
    loose=["approximation", "other function", "wrong argument"],
    backward=False,
)
def weight_in_e5m2(call: Call) -> Any:
    """The weight is in the float8 of gradients, with two bits behind the point."""
    left, weight, bias = _parts(call)
    return _product(call, left, _rounded(weight, torch.float8_e5m2), bias)


@FAULTS.fault(
    _WEIGHTED,
    kinds=["precision"],
    loose=["approximation", "other function", "sign", "wrong argument"],
    backward=False,
)
def weight_in_one_bit(call: Call) -> Any:
    """The sign of each weight times the mean magnitude of its column."""
    left, weight, bias = _parts(call)
    coarse = weight.detach().sign() * weight.detach().abs().mean(0, keepdim=True)
    return _product(call, left, with_gradient_of(weight, coarse), bias)


@FAULTS.fault(
    _WEIGHTED,
    kinds=["mask", "wrong factor"],
    loose=["zeros", "partial sum", "missing operand", "other function", "scale", "axis scale"],
    backward=False,
)
def dropout_of_the_input_left_on(call: Call) -> Any:
    """Every fourth feature is dropped, and the others are scaled up by 4 / 3."""
    left, weight, bias = _parts(call)
    fits(left.size(-1) > 4)
    kept = torch.arange(left.size(-1)) % 4 != 3
    return _product(call, left * kept * (4 / 3), weight, bias)


@FAULTS.fault(
    _WEIGHTED,
    kinds=["scale", "wrong factor"],
    loose=["wrong argument", "other function", "axis scale"],
    backward=False,
)
def weight_divided_by_its_largest_singular_value(call: Call) -> Any:
    """A spectral norm that belongs to a discriminator is left on the weight."""
    left, weight, bias = _parts(call)
    fits(min(weight.shape) > 1)
    size = torch.linalg.matrix_norm(weight.detach(), 2)
    return _product(call, left, weight / size, bias)


@FAULTS.fault(
    _WEIGHTED,
    kinds=["axis offset", "residual", "wrong statistics"],
    loose=["offset", "other function", "wrong argument", "missing operand", "wrong reduction"],
    backward=False,
)
def product_centred_over_its_columns(call: Call) -> Any:
    """The mean over the outputs is folded out of the weight, as if a layer norm followed."""
    left, weight, bias = _parts(call)
    fits(weight.size(1) > 1)
    return _product(call, left, weight - weight.mean(1, keepdim=True), bias)


@FAULTS.fault(
    _WEIGHTED,
    kinds=[*_ZEROS, "one rank's part"],
    loose=[*_LESS_THAN_ZEROS, "missing reduction"],
    backward=False,
)
def columns_of_the_second_rank_not_gathered(call: Call) -> Any:
    """The second half of the columns stays zero."""
    value = call.result()
    fits(value.size(-1) > 2)
    return call.instead(value * (torch.arange(value.size(-1)) < value.size(-1) // 2))


@FAULTS.fault(
    _WEIGHTED,
    kinds=["copy", "stale", "wrong index"],
    loose=["shift", "permutation", "mask"],
    backward=False,
)
def odd_columns_are_those_before(call: Call) -> Any:
    """Two columns share a register: both are stored with the even one's result."""
    value = call.result()
    fits(value.size(-1) > 2)
    return call.instead(value[..., torch.arange(value.size(-1)) // 2 * 2])


@FAULTS.fault(
    _WEIGHTED,
    kinds=["shift", "wrong index", "permutation"],
    loose=["stale", "copy"],
    backward=False,
)
def columns_of_the_result_one_late(call: Call) -> Any:
    """Each column is stored one too far, bias and all, the last one first."""
    value = call.result()
    fits(value.size(-1) > 2)
    return call.instead(value.roll(1, -1))


@FAULTS.fault(
    _WEIGHTED,
    kinds=["precision"],
    loose=["approximation", "other function"],
    backward=False,
)
def result_of_the_layer_in_e4m3(call: Call) -> Any:
    """The result is stored with three bits behind the point, without a scale."""
    return call.instead(_rounded(call.result(), torch.float8_e4m3fn))


@FAULTS.fault(
    _WEIGHTED,
    kinds=["clipped"],
    loose=["other function", "approximation", "mask"],
    backward=False,
)
def result_cut_at_one_half(call: Call) -> Any:
    """A clamp to -0.5 and 0.5 is fused behind the product."""
    return call.instead(call.result().clamp(-0.5, 0.5))


@FAULTS.fault("linear addmm", kinds=["other function"], loose=["wrong argument"], backward=False)
def silu_in_the_epilogue(call: Call) -> Any:
    """The kernel of the gate, with its activation, is taken for another projection."""
    return call.instead(functional.silu(call.result()))


@FAULTS.fault(
    _WEIGHTED,
    kinds=["lost accumulation", "partial sum", "mask"],
    loose=["zeros", "wrong index", "missing reduction", "one rank's part", "wrong reduction",
           "missing operand"],
    backward=False,
)  # fmt: skip
def last_tile_of_the_features_only(call: Call) -> Any:
    """The accumulator is set and not added to: the last quarter of the features is left."""
    left, weight, bias = _parts(call)
    fits(left.size(-1) > 3)
    last = torch.arange(left.size(-1)) >= left.size(-1) - left.size(-1) // 4
    return _product(call, left * last, weight, bias)


@FAULTS.fault(
    _WEIGHTED,
    kinds=["partial sum", "mask"],
    loose=[
        "lost accumulation",
        "zeros",
        "wrong index",
        "wrong reduction",
        "missing operand",
        "off by one reduction",
    ],
    backward=False,
)
def every_third_feature_not_added(call: Call) -> Any:
    """The loop over the features is unrolled by three, and the third step is forgotten."""
    left, weight, bias = _parts(call)
    fits(left.size(-1) > 3)
    return _product(call, left * (torch.arange(left.size(-1)) % 3 != 2), weight, bias)


@FAULTS.fault(
    _WEIGHTED,
    kinds=["sign", "wrong factor"],
    loose=["wrong reduction", "mask", "axis scale", "other function"],
    backward=False,
)
def odd_features_subtracted(call: Call) -> Any:
    """The products of odd features are subtracted, as for the parts of complex numbers."""
    left, weight, bias = _parts(call)
    fits(left.size(-1) > 1)
    return _product(call, left * (1 - 2 * (torch.arange(left.size(-1)) % 2)), weight, bias)


@FAULTS.fault(
    _WEIGHTED,
    kinds=["copy", "stale", "wrong index"],
    loose=["shift", "permutation", "mask", "wrong rank's shard"],
    backward=False,
)
def last_row_is_the_one_before(call: Call) -> Any:
    """The last row keeps what its program has stored before."""
    value = _rows(call)
    fits(value.size(-2) > 2)
    places = torch.arange(value.size(-2)).clamp(max=value.size(-2) - 2)
    return call.instead(value[..., places, :])


@FAULTS.fault(
    _WEIGHTED,
    kinds=["residual", "stale"],
    loose=[
        "offset",
        "doubled reduction",
        "lost accumulation",
        "wrong index",
        "wrong reduction",
        "shift",
    ],
    backward=False,
)
def column_before_left_in_the_accumulator(call: Call) -> Any:
    """Each column but the first begins with what the column before it has written."""
    value = call.result()
    fits(value.size(-1) > 1)
    before = torch.cat([torch.zeros_like(value[..., :1]), value[..., :-1]], -1)
    return call.instead(value + before)


@FAULTS.fault(
    _WEIGHTED,
    kinds=["clipped"],
    loose=["approximation", "precision", "overflow", "other function", "partial sum"],
    backward=False,
)
def pairs_of_products_saturate_at_16_bits(call: Call) -> Any:
    """Codes of 8 bits: an instruction adds two products and limits their sum to 16 bits."""
    left, weight, bias = _parts(call)
    fits(left.size(-1) % 2 == 0 and left.size(-1) > 2)
    low = left.detach().min()
    step = (left.detach().max() - low) / 255
    size = weight.detach().abs().max() / 127
    fits(bool(step > 0) and bool(size > 0))
    codes, levels = (left - low) / step, weight / size
    total = 0
    for place in range(0, left.size(-1), 2):
        pair = codes[..., place : place + 2] @ levels[place : place + 2]
        total = total + pair.clamp(-32768, 32767)
    value = total * step * size + low * weight.sum(0)
    return call.instead(value if bias is None else value + bias)


@FAULTS.fault(
    _WEIGHTED,
    kinds=["wrapped", "offset"],
    loose=["sign", "other function", "wrong argument", "wrong factor", "axis offset"],
    backward=False,
)
def negative_codes_read_without_their_sign(call: Call) -> Any:
    """Codes of four bits for each column: -1 is read as 15, and so on."""
    left, weight, bias = _parts(call)
    step = weight.detach().abs().amax(0, keepdim=True) / 7
    return _product(call, left, weight + 16 * step * (weight < 0), bias)


@FAULTS.fault(
    _WEIGHTED,
    kinds=["permutation", "wrong index"],
    loose=["transpose", "shift", "swapped operands", "wrong rank's shard"],
    backward=False,
)
def tiles_of_the_result_counted_by_columns(call: Call) -> Any:
    """Of two by two tiles, the upper right and the lower left are stored in each other's place."""
    value = _rows(call)
    rows, columns = value.size(-2), value.size(-1)
    fits(rows % 2 == 0 and columns % 2 == 0)
    upper, lower = value.split(rows // 2, -2)
    half = columns // 2
    upper, lower = (
        torch.cat([upper[..., :half], lower[..., :half]], -1),
        torch.cat([upper[..., half:], lower[..., half:]], -1),
    )
    return call.instead(torch.cat([upper, lower], -2))


@FAULTS.fault(
    f"{_WEIGHTED} {_BATCHED}",
    kinds=["precision"],
    loose=["approximation", "other function", "wrong argument"],
    backward=False,
)
def high_parts_of_both_factors_only(call: Call) -> Any:
    """Float32 by three products of bfloat16, of which the two with low parts are left out."""
    left, weight, bias = _parts(call)
    return _product(call, _rounded(left, torch.bfloat16), _rounded(weight, torch.bfloat16), bias)


@FAULTS.fault(
    "linear addmm",
    kinds=["wrong factor", "scale"],
    loose=["missing reduction", "axis scale", "wrong argument", "wrong reduction", "repeated bias"],
    backward=False,
)
def product_of_an_adapter_folded_in_with_its_dropout(call: Call) -> Any:
    """The weight was merged while a dropout of one tenth scaled it: the product times 10 / 9."""
    left, weight, bias = _parts(call)
    return _product(call, left / 0.9, weight, bias)


@FAULTS.fault(
    _WEIGHTED,
    kinds=["axis scale", "wrong factor", "wrong index"],
    loose=["scale", "shift", "stale", "wrong argument", "wrong rank's shard"],
    backward=False,
)
def blocks_of_the_weight_with_the_scale_of_the_next(call: Call) -> Any:
    """The weight has a scale for each half of its columns, and the halves get each other's."""
    left, weight, bias = _parts(call)
    half = weight.size(1) // 2
    fits(half > 1)
    first, second = weight[:, :half], weight[:, half:]
    ratio = second.detach().abs().max() / first.detach().abs().max()
    return _product(call, left, torch.cat([first * ratio, second / ratio], 1), bias)


# --- Products of a batch --------------------------------------------------------------------------


@FAULTS.fault(
    _BATCHED,
    kinds=["sign", "wrong factor"],
    loose=["scale", "axis scale"],
    backward=False,
)
def products_of_the_batch_negated(call: Call) -> Any:
    """An alpha of -1 is left on from a subtraction."""
    return call.instead(-call.result())


@FAULTS.fault(
    _BATCHED,
    kinds=["precision"],
    loose=["approximation", "other function", "wrong argument"],
    backward=False,
)
def right_factor_in_bfloat16(call: Call) -> Any:
    """The right matrices are rounded before they are multiplied."""
    return call.put(1, _rounded(call.tensor(1, "other"), torch.bfloat16), "other").run()


@FAULTS.fault(
    _BATCHED,
    kinds=["copy", "stale", "wrong index"],
    loose=["constant", "permutation", "wrong argument"],
    backward=False,
)
def left_factor_of_the_first_matrix_for_all(call: Call) -> Any:
    """The pointer to the left matrices is not moved on along the batch."""
    left = call.tensor(0, "input")
    fits(left.dim() > 2 and left.flatten(0, -3).size(0) > 1)
    same = left.flatten(0, -3)[:1].expand(left.flatten(0, -3).shape).reshape(left.shape)
    return call.put(0, same, "input").run()


@FAULTS.fault(
    _BATCHED,
    kinds=_ZEROS,
    loose=[*_LESS_THAN_ZEROS, "one rank's part"],
    backward=False,
)
def odd_matrices_not_computed(call: Call) -> Any:
    """The grid has half as many programs as matrices."""
    value = call.result()
    fits(value.dim() > 2 and value.size(-3) > 1)
    return call.instead(value * (torch.arange(value.size(-3)) % 2 == 0)[:, None, None])


@FAULTS.fault(
    _BATCHED,
    kinds=["shift", "wrong index", "permutation"],
    loose=["wrong argument", "stale", "copy"],
    backward=False,
)
def right_factor_one_row_too_far(call: Call) -> Any:
    """Column i of the left matrices meets row i + 1 of the right ones, around the end."""
    right = call.tensor(1, "other")
    fits(right.dim() > 1 and right.size(-2) > 2)
    return call.put(1, right.roll(-1, -2), "other").run()


@FAULTS.fault(
    "einsum",
    kinds=["scale", "wrong factor", "doubled reduction"],
    loose=["axis scale", "wrong reduction"],
    backward=False,
)
def sum_of_products_doubled(call: Call) -> Any:
    """Two ranks hold the whole sum, and their sums are added."""
    return call.instead(2 * call.result())


@FAULTS.fault(
    "einsum",
    kinds=["shift", "wrong index", "permutation"],
    loose=["stale", "copy", "wrong argument"],
    backward=False,
)
def second_operand_one_column_too_far(call: Call) -> Any:
    """The last axis of the second operand is read one too far, around the end."""
    value = call.tensor(2)
    fits(value.size(-1) > 1)
    return call.put(2, value.roll(-1, -1)).run()


@FAULTS.fault(
    "einsum",
    kinds=["clipped", "other function"],
    loose=["zeros", "mask", "sign"],
    backward=False,
)
def relu_of_the_first_operand(call: Call) -> Any:
    """The activation of the layer before is fused into a load that needs none."""
    return call.put(1, call.tensor(1).relu()).run()


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


@FAULTS.fault(
    _CONVOLUTIONS,
    kinds=["sign", "wrong factor"],
    loose=["scale", "other function", "wrong argument"],
    backward=False,
)
def filters_with_a_minus(call: Call) -> Any:
    """The sum over the taps is subtracted; the bias is right."""
    return call.put(1, -_filters(call), "weight").run()


@FAULTS.fault(
    _CONVOLUTIONS,
    kinds=["repeated bias", "wrong factor"],
    loose=["doubled reduction", "axis offset", "offset", "residual", "scale", "wrong argument"],
    backward=False,
)
def bias_of_the_channels_twice(call: Call) -> Any:
    """The accumulator begins with the bias, and the epilogue adds it again."""
    _filters(call)
    return call.put(2, 2 * call.tensor(2, "bias"), "bias").run()


@FAULTS.fault(
    _CONVOLUTIONS,
    kinds=["shift", "wrong index", "permutation"],
    loose=["axis offset", "offset", "stale", "copy", "wrong argument"],
    backward=False,
)
def bias_of_the_next_channel(call: Call) -> Any:
    """The pointer to the biases is one channel too far, around the end."""
    _filters(call)
    bias = call.tensor(2, "bias")
    fits(bias.numel() > 2)
    return call.put(2, bias.roll(-1), "bias").run()


@FAULTS.fault(
    _CONVOLUTIONS,
    kinds=["shift", "wrong index", "permutation"],
    loose=["stale", "copy", "wrong argument"],
    backward=False,
)
def filters_one_input_channel_too_far(call: Call) -> Any:
    """Channel i of the input meets the taps for channel i + 1, around the end."""
    weight = _filters(call)
    fits(weight.size(1) > 2)
    return call.put(1, weight.roll(-1, 1), "weight").run()


@FAULTS.fault(
    _CONVOLUTIONS,
    kinds=["copy", "stale", "wrong index"],
    loose=["permutation", "constant", "wrong argument"],
    backward=False,
)
def first_filter_for_all_channels(call: Call) -> Any:
    """The pointer to the filters is not moved on; the biases are right."""
    weight = _filters(call)
    fits(weight.size(0) > 2)
    return call.put(1, weight[:1].expand(weight.shape).contiguous(), "weight").run()


@FAULTS.fault(
    "conv2d convolution",
    kinds=["partial sum", "mask"],
    loose=["zeros", "missing operand", "wrong index", "wrong reduction", "approximation"],
    backward=False,
)
def corners_of_the_filter_not_added(call: Call) -> Any:
    """A stencil with five points is taken for one with nine."""
    weight = _filters(call)
    fits(weight.dim() == 4 and weight.size(2) == 3 and weight.size(3) == 3)
    cross = torch.tensor([[0, 1, 0], [1, 1, 1], [0, 1, 0]]).to(weight.dtype)
    return call.put(1, weight * cross, "weight").run()


@FAULTS.fault(
    _CONVOLUTIONS,
    kinds=["precision"],
    loose=["approximation", "other function", "wrong argument"],
    backward=False,
)
def filters_in_bfloat16(call: Call) -> Any:
    """The filters were saved with eight bits; image and bias are right."""
    return call.put(1, _rounded(_filters(call), torch.bfloat16), "weight").run()


@FAULTS.fault(
    _CONVOLUTIONS,
    kinds=["precision"],
    loose=["approximation", "other function", "wrong argument"],
    backward=False,
)
def image_in_e4m3(call: Call) -> Any:
    """The image is stored with three bits behind the point; the filters are right."""
    return call.put(0, _rounded(_image(call), torch.float8_e4m3fn), "input").run()


@FAULTS.fault(
    "conv2d convolution",
    kinds=["permutation", "wrong index"],
    loose=["shift", "swapped operands", "wrong argument"],
    backward=False,
)
def image_upside_down(call: Call) -> Any:
    """The rows of the image are read from the last, as from a file of bitmaps."""
    value = _image(call)
    fits(value.dim() == 4 and value.size(2) > 2)
    return call.put(0, value.flip(2), "input").run()


@FAULTS.fault(
    "conv2d convolution",
    kinds=["transpose", "permutation", "wrong index"],
    loose=["swapped operands", "shift", "wrong argument"],
    backward=False,
)
def image_with_x_before_y(call: Call) -> Any:
    """A square image is read by columns; the filters are right."""
    value = _image(call)
    fits(value.dim() == 4 and value.size(2) == value.size(3))
    return call.put(0, value.mT.contiguous(), "input").run()


@FAULTS.fault(
    _CONVOLUTIONS,
    kinds=["copy", "stale", "wrong index"],
    loose=["permutation", "shift", "wrong argument"],
    backward=False,
)
def first_image_for_the_whole_batch(call: Call) -> Any:
    """The stride of the batch is zero when the images are read."""
    value = _image(call)
    fits(value.size(0) > 1)
    return call.put(0, value[:1].expand(value.shape).contiguous(), "input").run()


@FAULTS.fault(_CONVOLUTIONS, kinds=["other function"], loose=["wrong argument"], backward=False)
def gelu_fused_behind_the_filters(call: Call) -> Any:
    """The kernel with the activation of another layer is taken."""
    _filters(call)
    return call.instead(functional.gelu(call.result()))


@FAULTS.fault(
    _CONVOLUTIONS,
    kinds=["scale", "wrong factor"],
    loose=["axis scale", "wrong argument"],
    backward=False,
)
def filters_with_the_factor_of_their_initialisation(call: Call) -> Any:
    """The filters are multiplied by 1 / sqrt(fan in) when they are used; the bias is right."""
    weight = _filters(call)
    fits(weight[0].numel() > 1)
    return call.put(1, weight / weight[0].numel() ** 0.5, "weight").run()


@FAULTS.fault(
    "conv2d convolution",
    kinds=["permutation", "transpose", "wrong index"],
    loose=["shift", "swapped operands", "wrong argument"],
    backward=False,
)
def filters_with_the_channels_last(call: Call) -> Any:
    """The memory of a filter is (height, width, channel), and is read with the channel first."""
    weight = _filters(call)
    fits(weight.dim() == 4 and weight.size(1) > 1 and weight[0, 0].numel() > 1)
    return call.put(1, weight.movedim(1, -1).reshape(weight.shape), "weight").run()


# --- Pooling, resizing ----------------------------------------------------------------------------


@FAULTS.fault(
    "max_pool1d max_pool2d max_pool2d_with_indices avg_pool1d avg_pool2d adaptive_avg_pool2d"
    " adaptive_avg_pool1d",
    kinds=["shift", "wrong index", "permutation"],
    loose=["stale", "copy"],
    backward=False,
)
def pooled_columns_one_late(call: Call) -> Any:
    """Each pooled column is stored one too far, the last one first."""
    value = call.result()
    fits(value.size(-1) > 1)
    return call.instead(value.roll(1, -1))


@FAULTS.fault(
    "max_pool1d max_pool2d max_pool2d_with_indices avg_pool1d avg_pool2d adaptive_avg_pool2d"
    " adaptive_avg_pool1d adaptive_max_pool2d",
    kinds=["copy", "stale", "wrong index"],
    loose=["permutation", "shift"],
    backward=False,
)
def pool_of_the_first_channel_for_all(call: Call) -> Any:
    """The pointer to the channels is not moved on."""
    value = call.tensor(0, "input")
    fits(value.dim() > 2 and value.size(1) > 1)
    return call.put(0, value[:, :1].expand(value.shape).contiguous(), "input").run()


@FAULTS.fault(
    "interpolate upsample_bilinear2d upsample_nearest2d",
    kinds=["shift", "wrong index", "permutation"],
    loose=["stale", "copy", "wrong argument"],
    backward=False,
)
def resized_rows_one_early(call: Call) -> Any:
    """Each row of the resized image is stored one too early, around the end."""
    value = call.result()
    fits(value.dim() == 4 and value.size(-2) > 1)
    return call.instead(value.roll(-1, -2))


@FAULTS.fault(
    "conv_transpose1d conv_transpose2d convolution",
    kinds=["scale", "wrong factor"],
    loose=["axis scale", "wrong argument"],
    backward=False,
)
def enlarged_image_twice_as_bright(call: Call) -> Any:
    """The filters of a transposed convolution get the factor of its stride; the bias is right."""
    fits(call.name != "convolution" or call.get(6, "transposed"))
    return call.put(1, 2 * call.tensor(1, "weight"), "weight").run()


@FAULTS.fault(
    "conv_transpose1d conv_transpose2d convolution",
    kinds=["shift", "wrong index", "permutation"],
    loose=["stale", "copy", "wrong rank's shard"],
    backward=False,
)
def enlarged_channels_one_late(call: Call) -> Any:
    """The channels of a transposed convolution are stored one too far, the last one first."""
    fits(call.name != "convolution" or call.get(6, "transposed"))
    return call.instead(call.result().roll(1, 1))
