"""Faults for building: matrix products and convolutions."""

from __future__ import annotations

from typing import Any

import torch
from benchmarks.places.calls import Call, Catalogue, fits, with_gradient_of
from benchmarks.places.changes import computed, longer, on, operand, result, tensors
from torch import Tensor
from torch.nn import functional

FAULTS = Catalogue()
_PRODUCTS = "linear matmul mm bmm addmm baddbmm"


def _factors(call: Call) -> tuple[Tensor, Tensor, Tensor | None]:
    """The two factors of a product, the second with k as its last but one axis, and the bias."""
    if call.name in {"addmm", "baddbmm"}:
        return call.tensor(1), call.tensor(2), call.tensor(0)
    if call.name == "linear":
        return call.tensor(0, "input"), call.tensor(1, "weight").mT, call.get(2, "bias")
    return call.tensor(0), call.tensor(1), None


def _product(left: Tensor, right: Tensor, bias: Tensor | None) -> Tensor:
    value = left @ right
    return value if bias is None else value + bias


@FAULTS.fault(_PRODUCTS, "partial sum; off by one reduction, missing operand")
def tail_along_k_dropped(call: Call) -> Any:
    """The last block of the common axis is left out, as by a loop over whole tiles only."""
    left, right, bias = _factors(call)
    k = left.shape[-1]
    fits(k >= 4 and right.dim() >= 2)
    kept = (k - 1) // 4 * 4 if k % 4 else k - max(k // 4, 1)
    return call.instead(_product(left[..., :kept], right[..., :kept, :], bias))


@FAULTS.fault(
    "linear addmm conv1d conv2d convolution", "missing bias, missing operand; offset, axis offset"
)
def bias_dropped(call: Call) -> Any:
    """The product alone."""
    if call.name == "addmm":
        return call.instead(call.tensor(1) @ call.tensor(2))
    bias = call.get(2, "bias")
    fits(isinstance(bias, Tensor))
    return call.put(2, None, "bias").run()


@FAULTS.fault(
    "linear addmm matmul bmm mm conv2d conv1d convolution", "zeros; uninitialised, constant"
)
def last_columns_not_written(call: Call) -> Any:
    """The last tile of the result is left as it was allocated."""
    value = call.result().clone()
    fits(value.dim() >= 2 and value.shape[-1] >= 4)
    value[..., -(value.shape[-1] // 4) :] = 0
    return call.instead(value)


@FAULTS.fault("linear mm matmul bmm addmm", "copy, stale, wrong index; shift")
def first_row_written_twice(call: Call) -> Any:
    """The last row is a copy of the first."""
    value = call.result().clone()
    fits(value.dim() >= 2 and value.shape[-2] >= 3)
    value[..., -1, :] = value[..., 0, :]
    return call.instead(value)


@FAULTS.fault("linear mm addmm matmul", "transpose; swapped operands")
def weight_read_transposed(call: Call) -> Any:
    """A square weight in the other layout."""
    place = 2 if call.name == "addmm" else 1
    weight = call.tensor(place, "weight", "other", "mat2")
    fits(weight.dim() == 2 and weight.size(0) == weight.size(1) > 2)
    return call.put(place, weight.t(), "weight", "other", "mat2").run()


@FAULTS.fault("linear mm addmm bmm matmul", "precision")
def accumulated_in_bfloat16(call: Call) -> Any:
    """Partial sums of 8 are rounded and added in bfloat16."""
    if call.name == "linear":
        left, right, bias = call.tensor(0), call.tensor(1).t(), call.get(2, "bias")
    elif call.name == "addmm":
        left, right, bias = call.tensor(1), call.tensor(2), call.tensor(0)
    else:
        left, right, bias = call.tensor(0), call.tensor(1), None
    fits(left.size(-1) > 8 and right.dim() > 1)
    total = None
    for start in range(0, left.size(-1), 8):
        part = (left[..., start : start + 8] @ right[..., start : start + 8, :]).bfloat16()
        total = part if total is None else total + part
    value = total.to(left.dtype)
    return call.instead(value if bias is None else value + bias)


@FAULTS.fault("linear mm addmm bmm matmul conv2d conv1d convolution", "precision")
def operand_rounded_to_half(call: Call) -> Any:
    """The left operand goes through float16."""
    place = 1 if call.name == "addmm" else 0
    value = call.tensor(place, "input")
    return call.put(place, value.half().to(value.dtype), "input").run()


@FAULTS.fault("linear mm addmm bmm matmul layer_norm", "stale, copy, wrong index; shift")
def last_tile_is_the_one_before(call: Call) -> Any:
    """The last columns still hold what the tile before them wrote."""
    value = call.result().clone()
    tile = value.size(-1) // 4
    fits(tile > 0)
    value[..., -tile:] = value[..., -2 * tile : -tile]
    return call.instead(value)


# fmt: off
# The result goes through a bfloat16 buffer.
FAULTS.add("product in bfloat16", _PRODUCTS, "precision", result(lambda v: v.to(torch.bfloat16)))
# Written with rows and columns exchanged.
FAULTS.add("result transposed", "matmul bmm mm", "transpose; permutation",
    result(lambda v: v.mT.contiguous(),
        where=lambda v: v.dim() >= 2 and v.shape[-1] == v.shape[-2] > 2))
# Once in the kernel and once behind it.
FAULTS.add("bias added twice", "linear addmm",
    "repeated bias, wrong factor; offset, axis offset, doubled reduction",
    on(lambda call: (call.get(2, "bias") if call.name == "linear" else call.tensor(0),),
        lambda call, bias: call.instead(call.result() + bias),
        where=lambda bias: isinstance(bias, Tensor)))
# A true convolution where a correlation was asked for.
FAULTS.add("kernel flipped", "conv2d conv1d convolution", "permutation, wrong index; transpose",
    operand(1, lambda v: v.flip(-1), "weight", where=longer(-1)))
# The second factor is taken from the next batch.
FAULTS.add("product of the next head", "bmm matmul",
    "wrong index, shift, permutation; wrong rank's shard, copy",
    computed(tensors(0, 1), lambda left, right: left @ right.roll(-1, -3),
        where=lambda _, right: right.dim() > 2 and right.size(-3) > 1))
# fmt: on


# --- Tiles, layouts and precision of products -----------------------------------------------------


@FAULTS.fault(_PRODUCTS, "zeros; uninitialised, constant, mask")
def last_rows_outside_the_grid(call: Call) -> Any:
    """The grid was rounded down along m: the last rows are never computed."""
    value = call.result().clone()
    fits(value.dim() >= 2 and value.shape[-2] >= 3)
    value[..., -max(value.shape[-2] // 4, 1) :, :] = 0
    return call.instead(value)


@FAULTS.fault(_PRODUCTS, "uninitialised; nonfinite, different random stream")
def last_columns_uninitialised(call: Call) -> Any:
    """The last tile along n has what was in memory before."""
    value = call.result().clone()
    fits(value.dim() >= 2 and value.shape[-1] >= 8)
    tile = value.shape[-1] // 4
    draw = torch.Generator().manual_seed(3)
    garbage = torch.randn((*value.shape[:-1], tile), generator=draw).sinh() * 1e3
    value[..., -tile:] = garbage.to(value)
    return call.instead(value)


@FAULTS.fault(_PRODUCTS, "doubled reduction, off by one reduction; partial sum")
def border_of_two_tiles_counted_twice(call: Call) -> Any:
    """Two tiles along k overlap by one element."""
    left, right, bias = _factors(call)
    k = left.shape[-1]
    fits(k >= 4 and right.dim() >= 2)
    both = [*range(k // 2), *range(k // 2 - 1, k)]
    return call.instead(_product(left[..., both], right[..., both, :], bias))


@FAULTS.fault(_PRODUCTS, "doubled reduction, partial sum; wrong reduction")
def last_tile_of_k_is_read_again(call: Call) -> Any:
    """The clamped load of a tile that overhangs repeats the last elements."""
    left, right, bias = _factors(call)
    k = left.shape[-1]
    fits(k >= 6 and right.dim() >= 2)
    places = [*range(k), *[k - 1] * 3]
    return call.instead(_product(left[..., places], right[..., places, :], bias))


@FAULTS.fault(_PRODUCTS, "partial sum; one rank's part, missing reduction")
def one_of_two_splits_of_k(call: Call) -> Any:
    """Split-k whose second half overwrites the first."""
    left, right, bias = _factors(call)
    k = left.shape[-1]
    fits(k >= 4 and right.dim() >= 2)
    return call.instead(_product(left[..., k // 2 :], right[..., k // 2 :, :], bias))


@FAULTS.fault(
    "linear addmm", "sign, wrong factor; offset, axis offset, repeated bias, missing bias"
)
def bias_subtracted(call: Call) -> Any:
    """The bias has the wrong sign."""
    left, right, bias = _factors(call)
    fits(isinstance(bias, Tensor))
    return call.instead(left @ right - bias)


@FAULTS.fault("linear addmm", "wrong index, shift, permutation; axis offset, offset")
def bias_of_the_next_column(call: Call) -> Any:
    """The pointer to the bias is one too far."""
    left, right, bias = _factors(call)
    fits(isinstance(bias, Tensor) and bias.dim() == 1 and len(bias) > 1)
    return call.instead(left @ right + bias.roll(-1))


@FAULTS.fault("linear addmm", "wrong axis, transpose; axis offset, offset")
def bias_broadcast_along_the_rows(call: Call) -> Any:
    """One bias for each row, not for each column."""
    left, right, bias = _factors(call)
    value = left @ right
    fits(isinstance(bias, Tensor) and bias.dim() == 1)
    fits(value.shape[-2] <= len(bias) and value.shape[-2] > 1)
    return call.instead(value + bias[: value.shape[-2], None])


@FAULTS.fault("linear addmm", "wrong factor; offset, axis offset, residual")
def bias_scaled_with_the_weight(call: Call) -> Any:
    """A dequantising factor that belongs to the product is applied to the bias."""
    left, right, bias = _factors(call)
    fits(isinstance(bias, Tensor))
    return call.instead(left @ right + 0.25 * bias)


@FAULTS.fault("linear mm addmm", "wrong index, shift, permutation; copy")
def columns_of_the_weight_off_by_one(call: Call) -> Any:
    """Each column is the product with the next one of the weight."""
    left, right, bias = _factors(call)
    fits(right.shape[-1] > 2)
    return call.instead(_product(left, right.roll(-1, -1), bias))


@FAULTS.fault("linear mm addmm", "permutation, wrong index; swapped operands")
def halves_of_a_packed_weight_exchanged(call: Call) -> Any:
    """Gate and up projection, or key and value, packed in the other order."""
    left, right, bias = _factors(call)
    n = right.shape[-1]
    fits(n >= 4 and n % 2 == 0)
    return call.instead(_product(left, right.roll(n // 2, -1), bias))


@FAULTS.fault("linear mm addmm", "permutation, wrong index; transpose")
def packed_weight_read_interleaved(call: Call) -> Any:
    """Heads and parts of a packed projection in the other order."""
    left, right, bias = _factors(call)
    n = right.shape[-1]
    fits(n >= 8 and n % 4 == 0)
    order = torch.arange(n).view(4, n // 4).t().flatten()
    mixed = None if bias is None else bias[..., order]
    return call.instead(_product(left, right[..., order], mixed))


def _cut(value: Tensor) -> Tensor:
    return (value.contiguous().view(torch.int32) & -8192).view(torch.float32)


@FAULTS.fault(_PRODUCTS, "precision; approximation")
def factors_in_tensorfloat(call: Call) -> Any:
    """Both factors are cut to 10 bits, as TF32 does."""
    left, right, bias = _factors(call)
    fits(left.dtype == torch.float32)
    left, right = (with_gradient_of(one, _cut(one.detach())) for one in (left, right))
    return call.instead(_product(left, right, bias))


@FAULTS.fault("linear addmm mm", "precision; approximation")
def weight_quantised_to_eight_bits(call: Call) -> Any:
    """One scale for the whole weight, rounded to int8."""
    left, right, bias = _factors(call)
    step = right.abs().max() / 127
    fits(bool(step > 0))
    rounded = with_gradient_of(right, (right / step).round() * step)
    return call.instead(_product(left, rounded, bias))


@FAULTS.fault("linear addmm mm", "clipped, overflow; precision")
def quantised_range_too_small(call: Call) -> Any:
    """Weights above half of the largest saturate."""
    left, right, bias = _factors(call)
    limit = float(right.abs().max()) / 2
    return call.instead(_product(left, right.clamp(-limit, limit), bias))


@FAULTS.fault(_PRODUCTS, "clipped, overflow")
def result_saturates(call: Call) -> Any:
    """The cast to a narrow type saturates at three quarters of the largest value."""
    value = call.result()
    limit = 0.75 * float(value.abs().max())
    return call.instead(value.clamp(-limit, limit))


@FAULTS.fault(_PRODUCTS, "stale, copy, wrong index; shift, permutation")
def second_batch_is_the_first(call: Call) -> Any:
    """The pointer of the result is not advanced for the second entry of the batch."""
    value = call.result().clone()
    fits(value.dim() >= 3 and value.shape[0] > 1)
    value[1] = value[0]
    return call.instead(value)


# fmt: off
# The loop over k begins at 1.
FAULTS.add("first product of the row left out", _PRODUCTS,
    "off by one reduction, partial sum; missing operand",
    computed(_factors,
        lambda left, right, bias: _product(left[..., 1:], right[..., 1:, :], bias),
        where=lambda left, right, *_: left.shape[-1] >= 4 and right.dim() >= 2))
# Each of four splits of k adds the bias.
FAULTS.add("bias once per split", "linear addmm",
    "repeated bias, wrong factor; offset, axis offset",
    on(lambda call: (call.get(2, "bias") if call.name == "linear" else call.tensor(0),),
        lambda call, bias: call.instead(call.result() + 3 * bias),
        where=lambda bias: isinstance(bias, Tensor)))
# Half of the product and of the bias: alpha where beta was meant as well.
FAULTS.add("factor applied to the bias too", "linear addmm", "scale, wrong factor",
    result(lambda v: v * 0.5))
# Every batch reads the second factor of the first one.
FAULTS.add("stride of the batch is zero", "matmul bmm",
    "copy, wrong index, stale; permutation, shift",
    computed(tensors(0, 1), lambda left, right: left @ right[:1],
        where=lambda _, right: right.dim() > 2 and right.shape[0] > 1))
# The layout flag of the second factor is lost.
FAULTS.add("second factor not transposed", "matmul bmm", "transpose; swapped operands, permutation",
    computed(tensors(0, 1), lambda left, right: left @ right.mT,
        where=lambda _, right: right.dim() > 2 and right.shape[-1] == right.shape[-2] > 1))
# B a where a b was asked for, of square matrices.
FAULTS.add("factors exchanged", "matmul bmm", "swapped operands; transpose",
    computed(tensors(0, 1), lambda left, right: right @ left,
        where=lambda left, right: left.shape == right.shape and left.dim() >= 2))
# The epilogue of the kernel before: relu.
FAULTS.add("activation fused where none is", "linear", "other function; clipped, zeros, mask",
    result(torch.relu))
# fmt: on


# --- Convolutions ---------------------------------------------------------------------------------


def _sizes(value: Any, dims: int) -> list[int]:
    fits(not isinstance(value, str))
    return [value] * dims if isinstance(value, int) else [*value]


@FAULTS.fault("conv1d conv2d convolution", "wrong index, shift; mask")
def padding_on_one_side_only(call: Call) -> Any:
    """All padding is before the values, none behind."""
    value = call.tensor(0, "input")
    fits(call.name != "convolution" or not call.args[6])
    padding = _sizes(call.get(4, "padding", default=0), value.dim() - 2)
    fits(any(padding))
    sides = [side for size in reversed(padding) for side in (2 * size, 0)]
    wider = functional.pad(value, sides)
    return call.put(0, wider, "input").put(4, [0] * len(padding), "padding").run()


@FAULTS.fault("conv1d conv2d convolution", "wrong argument; wrong index")
def padding_reflects(call: Call) -> Any:
    """The padding mode is reflect."""
    value = call.tensor(0, "input")
    fits(call.name != "convolution" or not call.args[6])
    padding = _sizes(call.get(4, "padding", default=0), value.dim() - 2)
    fits(any(padding))
    sides = [side for size in reversed(padding) for side in (size, size)]
    wider = functional.pad(value, sides, mode="reflect")
    return call.put(0, wider, "input").put(4, [0] * len(padding), "padding").run()


@FAULTS.fault("conv2d conv1d convolution", "wrong index, permutation, shift")
def channels_of_the_next_group(call: Call) -> Any:
    """Each group of filters gets the channels of the next group."""
    value, groups = (
        call.tensor(0, "input"),
        call.get(8 if call.name == "convolution" else 6, "groups", default=1),
    )
    fits(groups > 1)
    return call.put(0, value.roll(-(value.shape[1] // groups), 1), "input").run()


@FAULTS.fault("conv2d conv1d convolution", "partial sum; missing operand, mask")
def last_channel_left_out(call: Call) -> Any:
    """The loop over the channels is unrolled by two and has no tail."""
    value, weight = call.tensor(0, "input"), call.tensor(1, "weight")
    fits(weight.shape[1] >= 3)
    kept = torch.ones(weight.shape[1])
    kept[-1] = 0
    shape = [1, -1] + [1] * (value.dim() - 2)
    return call.put(1, weight * kept.view(shape), "weight").run()


@FAULTS.fault(
    "conv2d conv1d convolution", "partial sum, off by one reduction; missing operand, mask, zeros"
)
def last_column_of_the_kernel_left_out(call: Call) -> Any:
    """The loop over the width of the kernel ends one too early."""
    weight = call.tensor(1, "weight").clone()
    fits(weight.shape[-1] >= 3)
    weight[..., -1] = 0
    return call.put(1, weight, "weight").run()


@FAULTS.fault("conv2d conv1d convolution", "shift, wrong index; wrong argument")
def window_begins_one_later(call: Call) -> Any:
    """With a stride, the first window begins at 1."""
    value = call.tensor(0, "input")
    fits(_sizes(call.get(3, "stride", default=1), value.dim() - 2)[-1] > 1)
    return call.put(0, value.roll(-1, -1), "input").run()


@FAULTS.fault("conv2d conv1d convolution", "zeros; mask, uninitialised")
def border_of_the_image_not_written(call: Call) -> Any:
    """Only the inner part, where no padding is needed, is computed."""
    value = call.result().clone()
    fits(value.shape[-1] >= 3)
    value[..., 0] = 0
    value[..., -1] = 0
    return call.instead(value)


@FAULTS.fault("conv2d convolution conv1d", "precision")
def convolution_accumulates_in_half(call: Call) -> Any:
    """The sum of each input channel is rounded to float16 before it is added."""
    value, weight = call.tensor(0, "input"), call.tensor(1, "weight")
    fits(
        weight.shape[1] > 1
        and call.get(8 if call.name == "convolution" else 6, "groups", default=1) == 1
    )
    bare = call.put(2, None, "bias")
    total = torch.zeros_like(call.result()).half()
    shape = [1, -1] + [1] * (value.dim() - 2)
    for one in range(weight.shape[1]):
        kept = torch.zeros(weight.shape[1])
        kept[one] = 1
        total = total + bare.put(1, weight * kept.view(shape), "weight").result().half()
    bias = call.get(2, "bias")
    total = total.to(value.dtype)
    return call.instead(total if bias is None else total + bias.view(shape))


# fmt: off
# The weight was stored with its spatial axes exchanged.
FAULTS.add("kernel height and width exchanged", "conv2d convolution",
    "transpose; permutation, wrong index",
    operand(1, lambda v: v.mT, "weight",
        where=lambda v: v.dim() == 4 and v.shape[-1] == v.shape[-2] > 1))
# BGR is read as RGB.
FAULTS.add("channels in the other order", "conv2d conv1d convolution",
    "permutation, wrong index, swapped operands",
    operand(0, lambda v: v.flip(1), "input", where=lambda v: v.shape[1] == 3))
# fmt: on


# --- Transposed convolutions ----------------------------------------------------------------------


@FAULTS.fault("conv_transpose2d conv_transpose1d", "zeros; mask, partial sum")
def last_column_of_the_output_is_zero(call: Call) -> Any:
    """What the output padding adds is not computed."""
    value = call.result().clone()
    value[..., -1] = 0
    return call.instead(value)


@FAULTS.fault("conv_transpose2d", "lost accumulation, partial sum; zeros")
def overlapping_windows_overwrite(call: Call) -> Any:
    """With a stride of 2 and a kernel of 3, one of two overlapping columns is lost."""
    weight = call.tensor(1, "weight").clone()
    fits(weight.shape[-1] == 3)
    weight[..., 0] = 0
    return call.put(1, weight, "weight").run()


# fmt: off
# The kernel is turned round once too often.
FAULTS.add("kernel of a transposed convolution flipped", "conv_transpose2d conv_transpose1d",
    "permutation, wrong index", operand(1, lambda v: v.flip(-1), "weight"))
# The output padding is before the values.
FAULTS.add("output cut at the other end", "conv_transpose2d conv_transpose1d",
    "shift, wrong index, wrong argument", result(lambda v: v.roll(1, -1)))
# fmt: on
