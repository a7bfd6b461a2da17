"""Any tensor as floats: which dtype holds its values, and in which order to walk them."""

from __future__ import annotations

import torch
from torch import Tensor

from paritas.errors import UsageError

__all__ = [
    "as_floats",
    "check_dtype",
    "fits_float32",
    "holds_numbers",
    "in_order_of_memory",
    "is_plain",
]

_PLAIN = {torch.float32, torch.float64}
_FITS_FLOAT32 = {
    torch.bool,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.uint16,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.complex32,
    torch.complex64,
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
}
_FITS_FLOAT64 = {
    torch.int32,
    torch.uint32,
    torch.int64,
    torch.uint64,
    torch.float64,
    torch.complex128,
}


def holds_numbers(dtype: torch.dtype) -> bool:
    """Whether a tensor of that dtype can be summarized."""
    return dtype in _FITS_FLOAT32 or dtype in _FITS_FLOAT64


def check_dtype(dtype: torch.dtype) -> None:
    """Refuse a dtype that cannot be summarized.

    Raises:
        UsageError: torch converts it to no float.
    """
    if not holds_numbers(dtype):
        raise UsageError(
            f"a tensor of {dtype} cannot be summarized: torch converts it to no float; "
            "record its values instead, or convert it first"
        )


def in_order_of_memory(tensor: Tensor) -> Tensor:
    """The same values, permuted such that walking them in row-major order is fastest."""
    if tensor.layout is not torch.strided or tensor.is_contiguous():
        return tensor
    return tensor.permute(sorted(range(tensor.ndim), key=tensor.stride, reverse=True))


def fits_float32(dtype: torch.dtype) -> bool:
    """Whether a float32 (two, of a complex number) holds every value of a dtype."""
    return dtype in _FITS_FLOAT32


def as_floats(chunk: Tensor) -> Tensor:
    """Give a chunk's values as float32 or float64, whichever holds them; magnitudes of complex."""
    if chunk.is_complex():
        parts = torch.view_as_real(chunk).double()
        return torch.hypot(parts[..., 0], parts[..., 1])
    return chunk.float() if fits_float32(chunk.dtype) else chunk.double()


def is_plain(tensor: Tensor) -> bool:
    """Whether numpy may have a flat view of it as it is."""
    fits = tensor.dtype in _PLAIN and tensor.is_cpu
    return fits and tensor.is_contiguous() and not tensor.is_neg()
