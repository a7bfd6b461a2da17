"""Faults for building: matrix products and convolutions."""

from __future__ import annotations

from typing import Any

import torch
from benchmarks.places.calls import Call, Catalogue, fits
from torch import Tensor

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


@FAULTS.fault(
    _PRODUCTS, kinds=["partial sum", "tail"], loose=["off by one reduction", "missing operand"]
)
def tail_along_k_dropped(call: Call) -> Any:
    """The last block of the common axis is left out, as by a loop over whole tiles only."""
    left, right, bias = _factors(call)
    k = left.shape[-1]
    fits(k >= 4 and right.dim() >= 2)
    kept = (k - 1) // 4 * 4 if k % 4 else k - max(k // 4, 1)
    return call.instead(_product(left[..., :kept], right[..., :kept, :], bias))


@FAULTS.fault(
    "linear addmm conv1d conv2d convolution",
    kinds=["missing bias", "missing operand"],
    loose=["offset", "axis offset"],
)
def bias_dropped(call: Call) -> Any:
    """The product alone."""
    if call.name == "addmm":
        return call.instead(call.tensor(1) @ call.tensor(2))
    bias = call.get(2, "bias")
    fits(isinstance(bias, Tensor))
    return call.put(2, None, "bias").run()


@FAULTS.fault(_PRODUCTS, kinds=["precision"])
def product_in_bfloat16(call: Call) -> Any:
    """The result goes through a bfloat16 buffer."""
    return call.instead(call.result().to(torch.bfloat16))


@FAULTS.fault("matmul bmm mm", kinds=["transpose"], loose=["permutation"])
def result_transposed(call: Call) -> Any:
    """Written with rows and columns exchanged."""
    value = call.result()
    fits(value.dim() >= 2 and value.shape[-1] == value.shape[-2] > 2)
    return call.instead(value.mT.contiguous())


@FAULTS.fault(
    "linear addmm matmul bmm mm conv2d conv1d convolution",
    kinds=["zeros"],
    loose=["uninitialised", "constant"],
)
def last_columns_not_written(call: Call) -> Any:
    """The last tile of the result is left as it was allocated."""
    value = call.result().clone()
    fits(value.dim() >= 2 and value.shape[-1] >= 4)
    value[..., -(value.shape[-1] // 4) :] = 0
    return call.instead(value)


@FAULTS.fault("linear mm matmul bmm addmm", kinds=["copy", "stale"], loose=["shift", "wrong index"])
def first_row_written_twice(call: Call) -> Any:
    """The last row is a copy of the first."""
    value = call.result().clone()
    fits(value.dim() >= 2 and value.shape[-2] >= 3)
    value[..., -1, :] = value[..., 0, :]
    return call.instead(value)


@FAULTS.fault("linear mm addmm matmul", kinds=["transpose"], loose=["swapped operands"])
def weight_read_transposed(call: Call) -> Any:
    """A square weight in the other layout."""
    place = 2 if call.name == "addmm" else 1
    weight = call.tensor(place, "weight", "other", "mat2")
    fits(weight.dim() == 2 and weight.size(0) == weight.size(1) > 2)
    return call.put(place, weight.t(), "weight", "other", "mat2").run()


@FAULTS.fault("linear mm addmm bmm matmul", kinds=["precision"])
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


@FAULTS.fault("linear mm addmm bmm matmul conv2d conv1d convolution", kinds=["precision"])
def operand_rounded_to_half(call: Call) -> Any:
    """The left operand goes through float16."""
    place = 1 if call.name == "addmm" else 0
    value = call.tensor(place, "input")
    return call.put(place, value.half().to(value.dtype), "input").run()


@FAULTS.fault(
    "linear addmm", kinds=["repeated bias"], loose=["offset", "axis offset", "wrong factor"]
)
def bias_added_twice(call: Call) -> Any:
    """Once in the kernel and once behind it."""
    bias = call.get(2, "bias") if call.name == "linear" else call.tensor(0)
    fits(isinstance(bias, Tensor))
    return call.instead(call.result() + bias)


@FAULTS.fault(
    "linear mm addmm bmm matmul layer_norm", kinds=["stale", "copy"], loose=["shift", "wrong index"]
)
def last_tile_is_the_one_before(call: Call) -> Any:
    """The last columns still hold what the tile before them wrote."""
    value = call.result().clone()
    tile = value.size(-1) // 4
    fits(tile > 0)
    value[..., -tile:] = value[..., -2 * tile : -tile]
    return call.instead(value)


@FAULTS.fault("conv2d conv1d convolution", kinds=["permutation"], loose=["transpose"])
def kernel_flipped(call: Call) -> Any:
    """A true convolution where a correlation was asked for."""
    weight = call.tensor(1, "weight")
    fits(weight.size(-1) > 1)
    return call.put(1, weight.flip(-1), "weight").run()


@FAULTS.fault(
    "bmm matmul",
    kinds=["wrong index", "shift", "permutation"],
    loose=["wrong rank's shard", "copy"],
)
def product_of_the_next_head(call: Call) -> Any:
    """The second factor is taken from the next batch."""
    left, right = call.tensor(0), call.tensor(1)
    fits(right.dim() > 2 and right.size(-3) > 1)
    return call.instead(left @ right.roll(-1, -3))
