"""Values of dtypes with which torch computes little or nothing: float8, float4, unsigned integers.

Kernels take them, so cases are made of them. They are changed in a dtype that has all operators,
and stored in their own again. Two numbers of 4 bits in a byte are bytes here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from paritas.core.numerics.flattening import STORED_ONLY

if TYPE_CHECKING:
    from torch import Tensor

_UNSIGNED = {torch.uint16, torch.uint32, torch.uint64}


def is_number(dtype: torch.dtype) -> bool:
    """Whether an element is one floating number; of float4, it is two in a byte."""
    return dtype.is_floating_point and dtype not in STORED_ONLY


def as_computable(tensor: Tensor) -> Tensor:
    """The same values, or the same bytes, in a dtype that can be computed with."""
    dtype = tensor.dtype
    if dtype in STORED_ONLY:
        return tensor.view(torch.uint8)
    if dtype.is_floating_point and dtype.itemsize == 1:
        return tensor.float()
    return tensor.long() if dtype in _UNSIGNED else tensor


def stored_as(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Values that were changed, in the dtype of a task; those out of its range become its ends.

    A conversion to float8 makes NaN of a number that is too large. NaN and infinity stay.
    """
    if tensor.dtype is dtype:
        return tensor
    if dtype in STORED_ONLY:
        return tensor.view(dtype)
    if dtype in _UNSIGNED:
        # The largest integers of 64 bits have no int64.
        return tensor.clamp(0, min(torch.iinfo(dtype).max, torch.iinfo(torch.int64).max)).to(dtype)
    if dtype.is_floating_point and dtype.itemsize == 1:
        info = torch.finfo(dtype)
        clamped_tensor = tensor.clamp(info.min, info.max)
        tensor = torch.where(tensor.isfinite(), clamped_tensor, tensor)
    return tensor.to(dtype)
