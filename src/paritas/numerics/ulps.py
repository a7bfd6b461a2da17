"""Bit patterns: whether two chunks have the same ones, and how many numbers lie between them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from paritas.errors import UsageError

if TYPE_CHECKING:
    import numpy as np

__all__ = [
    "first_unequal",
    "first_unlike",
    "grid_distance",
    "has_ulps",
    "largest_grid_distance",
    "same_bits",
    "same_but_for_nans",
    "ulp_distance",
]

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_WORD = 8
# Bytes compared at once: few at first, for what differs often does so at once.
_FEW_BYTES, _BYTES = 1 << 12, 1 << 21
_PACKED = torch.float4_e2m1fn_x2  # two numbers to an element: no number of its own
_UNSIGNED = torch.float8_e8m0fnu  # powers of two and NaN: no sign bit, no zero


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two chunks of one dtype and shape have the same bits, NaNs included."""
    x, y = _words(a, b)
    if _is_plain(x) and _is_plain(y):
        return first_unequal(x.numpy().reshape(-1), y.numpy().reshape(-1)) is None
    return torch.equal(x, y)


def first_unlike(a: Tensor, b: Tensor) -> slice | None:
    """Few neighbours, among them the first whose bits differ; None if there is no such element.

    Both are flat, contiguous, of one dtype and length, and on the CPU.
    """
    x, y = _words(a, b)
    found = first_unequal(x.view(-1).numpy(), y.view(-1).numpy())
    if found is None:
        return None
    per_element = max(x.numel() // a.numel(), 1)  # a complex number is two
    per_word = max(a.numel() // x.numel(), 1)
    start = found // per_element * per_word
    return slice(start, start + per_word)


def first_unequal(x: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> int | None:
    """The first index at which two flat arrays of one length and integer dtype differ."""
    start, stop = 0, _FEW_BYTES // x.itemsize
    while start < x.size:
        piece, other = x[start:stop], y[start:stop]
        if not _equal(piece, other):
            return start + int((piece != other).argmax())
        start, stop = stop, stop + _BYTES // x.itemsize
    return None


def _equal(x: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> bool:
    contiguous = x.flags.c_contiguous and y.flags.c_contiguous
    if _memcmp is None or x.nbytes <= _FEW_BYTES or not contiguous:
        return not (x != y).any()
    return _memcmp(x.ctypes.data, y.ctypes.data, x.nbytes) == 0


def _find_memcmp() -> Callable[[int, int, int], int] | None:
    """The C library's own comparison, which leaves numpy behind: it writes nothing."""
    try:
        found = ctypes.CDLL(None).memcmp
    except (AttributeError, OSError, TypeError):
        return None  # Windows has no such handle: numpy will do
    found.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    found.restype = ctypes.c_int
    return cast("Callable[[int, int, int], int]", found)


_memcmp = _find_memcmp()


def same_but_for_nans(a: Tensor, b: Tensor) -> bool:
    """Whether two chunks have the same bits where either is not NaN."""
    if not (a.is_floating_point() or a.is_complex()) or a.dtype is _PACKED:
        return False
    nans = _components(a).isnan()
    if not nans.any():
        return torch.equal(_integers(a), _integers(b))
    nans &= _components(b).isnan()
    return bool((nans | (_integers(a) == _integers(b))).all())


def has_ulps(reference: torch.dtype, candidate: torch.dtype) -> bool:
    """Whether a distance in ulps is defined between tensors of these dtypes."""
    return reference == candidate and reference.is_floating_point and reference is not _PACKED


def ulp_distance(a: Tensor, b: Tensor) -> Tensor:
    """How many steps of their dtype's grid two float tensors are apart, element by element.

    Both zeros are one point of the grid: the smallest negative and the smallest positive number
    are two steps apart. NaN is at no distance from NaN, nor an infinity from itself; any other
    pair with a NaN or an infinity in it is infinitely far apart, for an overflow is no single step.

    Args:
        a: a tensor of any real floating-point dtype, float8 included.
        b: a tensor of the same shape, dtype and device.

    Returns:
        A float64 tensor, exact up to 2**53 steps.

    Raises:
        UsageError: (a `ValueError`) shapes or dtypes differ, or the dtype is not a real float.
    """
    if a.shape != b.shape or not has_ulps(a.dtype, b.dtype):
        given = f"{tuple(a.shape)} {a.dtype} and {tuple(b.shape)} {b.dtype}"
        raise UsageError(f"ulps need two real float tensors of one shape and dtype, got {given}")
    a, b = a.detach().resolve_neg(), b.detach().resolve_neg()
    distance = grid_distance(a, b)
    a, b = a.double(), b.double()  # float8 lacks the comparisons
    distance.masked_fill_(~(a.isfinite() & b.isfinite()), torch.inf)
    return distance.masked_fill_((a == b) | (a.isnan() & b.isnan()), 0.0)


def grid_distance(a: Tensor, b: Tensor) -> Tensor:
    """`ulp_distance` of chunks known to be finite; at a NaN or an infinity it means nothing."""
    x, y = _integers(a), _integers(b)
    if a.dtype is _UNSIGNED:
        return (x.double() - y.double()).abs_()
    if x.dtype is not torch.int64:
        # Opposite signs may be further apart than the integer reaches, but float64 holds it all.
        return _ordered(x).double().sub_(_ordered(y).double()).abs_()
    # Two steps of int64 may be too many for float64 to tell apart, but only if signs are opposite,
    # where magnitudes add up and nothing cancels.
    magnitude = torch.iinfo(torch.int64).max
    opposite, x, y = (x ^ y) < 0, x & magnitude, y & magnitude
    return torch.where(opposite, x.double() + y.double(), (x - y).double()).abs_()


def largest_grid_distance(a: Tensor, b: Tensor) -> Tensor:
    """The largest of `grid_distance`, of at least one pair; most blocks need no float64 for it."""
    if a.is_cpu and b.is_cpu and a.dtype is not _UNSIGNED:
        x, y = (
            bits.view(torch.int8) if bits.dtype is torch.uint8 else bits
            for bits in map(_integers, (a, b))
        )
        if int((x ^ y).amin()) >= 0:  # no pair lies across zero: bits are as far apart as numbers
            least, most = (int(end) for end in torch.aminmax(x - y))
            return torch.tensor(float(max(-least, most)), dtype=torch.float64)
    return grid_distance(a, b).amax()


def _ordered(bits: Tensor) -> Tensor:
    """Sign and magnitude as one integer in the order of the numbers; both zeros become 0."""
    bits = bits.view(torch.int8) if bits.dtype is torch.uint8 else bits
    # Without `where`, which is ten times slower: negation is to flip all bits and add one.
    sign = bits >> (8 * bits.dtype.itemsize - 1)
    magnitude = bits & torch.iinfo(bits.dtype).max
    return magnitude.bitwise_xor_(sign).sub_(sign)


def _words(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The bits of two chunks, as integers that are as wide as may be: so they compare fastest."""
    x, y = _integers(a), _integers(b)
    if _fills_words(x) and _fills_words(y):
        return x.view(-1).view(torch.int64), y.view(-1).view(torch.int64)
    return x, y


def _is_plain(bits: Tensor) -> bool:
    return type(bits) is Tensor and bits.is_cpu


def _integers(chunk: Tensor) -> Tensor:
    """The bit patterns, as integers of the same width; a view."""
    chunk = torch.view_as_real(chunk) if chunk.is_complex() else chunk
    return chunk.view(_INTEGERS[chunk.dtype.itemsize])


def _components(chunk: Tensor) -> Tensor:
    """The floats behind `_integers`, in a dtype that has all operators."""
    chunk = torch.view_as_real(chunk) if chunk.is_complex() else chunk
    return chunk.float() if chunk.dtype.itemsize == 1 else chunk


def _fills_words(bits: Tensor) -> bool:
    width = bits.dtype.itemsize
    whole = bits.numel() * width % _WORD == bits.storage_offset() * width % _WORD == 0
    return whole and bits.is_contiguous()
