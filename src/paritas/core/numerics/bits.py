"""The stored numbers of a tensor: their bits, distances in ulps, and floats that hold them."""

from __future__ import annotations

import ctypes
import math
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor

from paritas.core.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable


# --- Bits: are they equal, and how many ulps apart? -----------------------------------------------

# Integer dtype by number of bytes.
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_WORD = 8
# Bytes compared at once: few at first, because tensors that differ often do so early.
_FEW_BYTES, _BYTES = 1 << 12, 1 << 21
_PACKED = torch.float4_e2m1fn_x2  # two numbers per element
UNSIGNED = torch.float8_e8m0fnu  # powers of two and NaN: no sign bit, no zero


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two chunks of one dtype and shape have the same bits, NaNs included."""
    x, y = as_words(a, b)
    if _is_plain_on_cpu(x) and _is_plain_on_cpu(y):
        return first_unequal(x.numpy().reshape(-1), y.numpy().reshape(-1)) is None
    return torch.equal(x, y)


def same_memory(a: Tensor, b: Tensor) -> bool:
    """Whether two contiguous tensors on the CPU, of as many bytes, have the same bits in memory.

    False also where this cannot be seen in one call.
    """
    return _memcmp is not None and _memcmp(a.data_ptr(), b.data_ptr(), a.nbytes) == 0


def first_unlike(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor] | None:
    """The first numbers, or parts of complex ones, with different bits; None if all are equal.

    Both are flat, contiguous, of one dtype and length, and on the CPU.
    """
    if a.is_complex():
        a, b = torch.view_as_real(a).view(-1), torch.view_as_real(b).view(-1)
    at = first_unequal(_as_integers(a).numpy(), _as_integers(b).numpy())
    return None if at is None else (a[at], b[at])


def is_nan(number: Tensor) -> bool:
    """Whether a single real number is NaN."""
    can_be_nan = number.is_floating_point() and number.dtype is not _PACKED
    return can_be_nan and math.isnan(float(number))


def first_unequal(x: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> int | None:
    """The first index at which two flat arrays of one length and integer dtype differ."""
    contiguous = x.nbytes > _FEW_BYTES and x.flags.c_contiguous and y.flags.c_contiguous
    if contiguous and x.itemsize < _WORD and not x.nbytes % _WORD:  # whole words are fastest
        word = first_unequal(x.view(np.int64), y.view(np.int64))
        if word is None:
            return None
        per_word = _WORD // x.itemsize
        few = slice(word * per_word, (word + 1) * per_word)
        return few.start + int((x[few] != y[few]).argmax())
    start, stop = 0, _FEW_BYTES // x.itemsize
    while start < x.size:
        piece, other = x[start:stop], y[start:stop]
        if not _arrays_equal(piece, other):
            return start + int((piece != other).argmax())
        start, stop = stop, stop + _BYTES // x.itemsize
    return None


def _arrays_equal(x: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> bool:
    contiguous = x.flags.c_contiguous and y.flags.c_contiguous
    if _memcmp is None or x.nbytes <= _FEW_BYTES or not contiguous:
        return not (x != y).any()
    return _memcmp(x.ctypes.data, y.ctypes.data, x.nbytes) == 0


def _find_memcmp() -> Callable[[int, int, int], int] | None:
    """The C library's memcmp, which is much faster than numpy: it writes nothing."""
    try:
        memcmp = ctypes.CDLL(None).memcmp
    except (AttributeError, OSError, TypeError):
        return None  # Windows has no such handle: use numpy
    memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    memcmp.restype = ctypes.c_int
    return cast("Callable[[int, int, int], int]", memcmp)


_memcmp = _find_memcmp()


def same_except_nans(a: Tensor, b: Tensor) -> bool:
    """Whether two chunks have the same bits where either is not NaN."""
    if not (a.is_floating_point() or a.is_complex()) or a.dtype is _PACKED:
        return False
    nans = _as_components(a).isnan()
    if not nans.any():
        return torch.equal(_as_integers(a), _as_integers(b))
    nans &= _as_components(b).isnan()
    return bool((nans | (_as_integers(a) == _as_integers(b))).all())


def has_ulps(reference: torch.dtype, candidate: torch.dtype) -> bool:
    """Whether a distance in ulps is defined between tensors of these dtypes."""
    return reference == candidate and reference.is_floating_point and reference is not _PACKED


def ulp_distance(a: Tensor, b: Tensor) -> Tensor:
    """The elementwise distance of two float tensors in ulps: steps between neighbouring numbers.

    Both zeros count as one number: the smallest negative and the smallest positive number are two
    steps apart. The distance of NaN to NaN, and of an infinity to itself, is 0. Any other pair with
    a NaN or an infinity is infinitely far apart, because an overflow is not a single step.

    Args:
        a: a tensor of any real floating-point dtype, float8 included.
        b: a tensor of the same shape, dtype and device.

    Returns:
        A float64 tensor, exact up to 2**53 steps.

    Raises:
        UsageError: (a `ValueError`) shapes or dtypes differ, or the dtype is not a real float.
    """
    if a.shape != b.shape or not has_ulps(a.dtype, b.dtype):
        operand_words = f"{tuple(a.shape)} {a.dtype} and {tuple(b.shape)} {b.dtype}"
        raise UsageError(
            f"ulps need two real float tensors of one shape and dtype, got {operand_words}"
        )
    a, b = a.detach().resolve_neg(), b.detach().resolve_neg()
    distance = grid_distance(a, b)
    a, b = a.double(), b.double()  # float8 lacks the comparisons
    distance.masked_fill_(~(a.isfinite() & b.isfinite()), torch.inf)
    return distance.masked_fill_((a == b) | (a.isnan() & b.isnan()), 0.0)


def grid_distance(a: Tensor, b: Tensor) -> Tensor:
    """`ulp_distance` of finite chunks; undefined at NaN and infinities."""
    x, y = _as_integers(a), _as_integers(b)
    if a.dtype is UNSIGNED:
        return (x.view(torch.uint8).double() - y.view(torch.uint8).double()).abs_()
    if x.dtype is not torch.int64:
        # Distances of opposite signs may overflow the integer, but fit into float64.
        return _as_ordered(x).double().sub_(_as_ordered(y).double()).abs_()
    # Distances of int64 may be inexact in float64, but only if signs are opposite, where magnitudes
    # add up and nothing cancels.
    magnitude = torch.iinfo(torch.int64).max
    opposite, x, y = (x ^ y) < 0, x & magnitude, y & magnitude
    return torch.where(opposite, x.double() + y.double(), (x - y).double()).abs_()


def _as_ordered(bits: Tensor) -> Tensor:
    """Sign and magnitude as one integer in the order of the numbers; both zeros become 0."""
    # Without `where`, which is ten times slower: negation flips all bits and adds one.
    sign = bits >> (8 * bits.dtype.itemsize - 1)
    magnitude = bits & torch.iinfo(bits.dtype).max
    return magnitude.bitwise_xor_(sign).sub_(sign)


def as_words(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The bits of two chunks as the widest possible integers, which compare fastest."""
    x, y = _as_integers(a), _as_integers(b)
    if _fills_words(x) and _fills_words(y):
        return x.view(-1).view(torch.int64), y.view(-1).view(torch.int64)
    return x, y


def _is_plain_on_cpu(bits: Tensor) -> bool:
    return type(bits) is Tensor and bits.is_cpu


def _as_integers(chunk: Tensor) -> Tensor:
    """The bit patterns, as integers of the same width; a view."""
    chunk = torch.view_as_real(chunk) if chunk.is_complex() else chunk
    return chunk.view(INTEGERS[chunk.dtype.itemsize])


def _as_components(chunk: Tensor) -> Tensor:
    """The floats of `_as_integers`, in a dtype that has all operators."""
    chunk = torch.view_as_real(chunk) if chunk.is_complex() else chunk
    return chunk.float() if chunk.dtype.itemsize == 1 else chunk


def _fills_words(bits: Tensor) -> bool:
    width = bits.dtype.itemsize
    is_word_aligned = bits.numel() * width % _WORD == bits.storage_offset() * width % _WORD == 0
    return is_word_aligned and bits.is_contiguous()


def halves(integers: Tensor) -> tuple[Tensor, Tensor]:
    """The upper and lower 32 bits of each integer; float64 holds each exactly, but not 64."""
    unsigned = integers.dtype is torch.uint64  # torch cannot shift it
    bits = integers.view(torch.int64) if unsigned else integers.to(torch.int64)
    high = bits >> 32
    return (high & 0xFFFFFFFF if unsigned else high).double(), (bits & 0xFFFFFFFF).double()


# --- Any tensor as floats: which dtype holds its values, and in which order to read them ----------

_NUMPY_FLOATS = {torch.float32, torch.float64}
_FITS_FLOAT32 = {
    torch.bool,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.uint16,
    torch.float16,
    torch.bfloat16,
    torch.float32,
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
}


def is_inexact(value: object) -> bool:
    """Whether a value is a floating or complex tensor."""
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def are_surely_finite(a: Tensor, b: Tensor) -> bool:
    """Whether two float tensors of one device are finite throughout, as nearly always.

    Then so is their sum, which takes one pass over each. False also where the sum overflows.
    """
    is_half = a.dtype.itemsize == b.dtype.itemsize == 2  # noqa: PLR2004
    dtype = torch.float32 if is_half else None  # the sums of float16 overflow soon
    return math.isfinite(float(a.sum(dtype=dtype) + b.sum(dtype=dtype)))


def has_inexact(value: object) -> bool:
    """Whether a value, or an item of a nested list, is a floating or complex tensor."""
    if isinstance(value, list | tuple):
        return any(map(has_inexact, value))
    return is_inexact(value)


def dtype_name(dtype: torch.dtype | torch.layout | torch.memory_format | torch.qscheme) -> str:
    """The name of a dtype without `torch.`; that of a layout or another constant of torch, too."""
    return str(dtype).removeprefix("torch.")


def holds_numbers(dtype: torch.dtype) -> bool:
    """Whether a tensor of this dtype can be summarized."""
    return fits_float32(dtype) or dtype.to_real() in _FITS_FLOAT64


def check_dtype(dtype: torch.dtype) -> None:
    """Raise `UsageError` for a dtype that cannot be summarized."""
    if not holds_numbers(dtype):
        raise UsageError(
            f"cannot summarize a tensor of {dtype}: torch cannot convert it to float; "
            "record its values instead, or convert it first"
        )


def in_order_of_memory(tensor: Tensor) -> Tensor:
    """The same values, permuted to memory order, which is fastest to read."""
    if tensor.layout is not torch.strided or tensor.is_contiguous():
        return tensor
    return tensor.permute(sorted(range(tensor.ndim), key=tensor.stride, reverse=True))


def fits_float32(dtype: torch.dtype) -> bool:
    """Whether float32 (two for a complex number) holds every value of a dtype."""
    return dtype.to_real() in _FITS_FLOAT32


def as_floats(chunk: Tensor) -> Tensor:
    """A chunk's values as float32 or float64, whichever holds them; complex as magnitudes."""
    if chunk.is_complex():
        parts = torch.view_as_real(chunk).double()
        return torch.hypot(parts[..., 0], parts[..., 1])
    return chunk.float() if fits_float32(chunk.dtype) else chunk.double()


def has_flat_numpy_view(tensor: Tensor) -> bool:
    """Whether numpy can view it as a flat array without a copy."""
    return tensor.dtype in _NUMPY_FLOATS and tensor.is_cpu and is_in_order(tensor)


def is_in_order(tensor: Tensor) -> bool:
    """Whether its numbers are stored contiguously, without lazy negation or conjugation."""
    strided = tensor.layout is torch.strided and not tensor.is_quantized
    return strided and tensor.is_contiguous() and not (tensor.is_neg() or tensor.is_conj())
