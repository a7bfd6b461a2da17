"""The statistics of a tensor, computed on the CPU.

Block by block: memory stays flat, and a block stays in the cache. It is numpy's work, whose calls
cost least on small tensors. Sums are taken in float64, and exponents are read from the bits.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from paritas.numerics.floats import as_floats, check_dtype, in_order_of_memory, is_plain
from paritas.numerics.metrics import blocks
from paritas.numerics.rows import DOT
from paritas.numerics.tallies import LARGEST_SCALE, Statistics, Sums, Tally

__all__ = ["summarize_on_cpu"]

Array = np.ndarray[Any, Any]

_BLOCK = 1 << 16
# Up to so many distinct exponents, comparing with each is faster than one table of counts.
_FEW = 6
# Up to so many elements numpy's table of counts is faster than torch's.
_SHORT = 1 << 12
# A sum of squares above this lost nothing to underflow; no square of less than that overflows.
_SAFE_SQUARES = 1e-280
_SAFE_SIZE = 1e150


def summarize_on_cpu(tensor: Tensor) -> Statistics:
    """Summarize a tensor, which is brought here block by block if it is elsewhere."""
    tally = Tally(tensor.numel())
    room = _ROOM.get()
    for values in _chunks(tensor):
        _take(tally, values, room)
    return tally.statistics()


def _chunks(tensor: Tensor) -> Iterator[Array]:
    """Flat float32 or float64 arrays of bounded size, in the order of memory."""
    if is_plain(tensor):
        flat = tensor.view(-1).numpy()
        for start in range(0, flat.size, _BLOCK):
            yield flat[start : start + _BLOCK]
        return
    check_dtype(tensor.dtype)
    for _, (chunk,) in blocks(in_order_of_memory(tensor), block_size=_BLOCK):
        yield as_floats(chunk.cpu()).numpy()


class _Bits(NamedTuple):
    """How a float is laid out.

    Attributes:
        integer: the dtype of its bits.
        fields: a dtype for exponent fields; its low bits are cut out by the conversion.
        shift: bits of the fraction.
        mask: the field of NaN and infinities.
        bias: of the field.
    """

    integer: type
    fields: type
    shift: int
    mask: int
    bias: int

    @property
    def subnormal(self) -> int:
        """Exponent of the least subnormal."""
        return 1 - self.bias - self.shift


_LAYOUTS = {
    np.dtype(np.float32): _Bits(np.int32, np.uint8, 23, 0xFF, 127),
    np.dtype(np.float64): _Bits(np.int64, np.int16, 52, 0x7FF, 1023),
}


class _Room(threading.local):
    """Memory to work in, kept per thread: fresh pages for every tensor would cost more."""

    def __init__(self) -> None:
        self._arrays: tuple[Array, Array] | None = None

    def get(self) -> tuple[Array, Array]:
        if self._arrays is None:
            self._arrays = (np.empty(_BLOCK, np.float64), np.empty(_BLOCK, np.int16))
        return self._arrays


_ROOM = _Room()


def _take(tally: Tally, values: Array, room: tuple[Array, Array]) -> None:
    """Add one block to the tally."""
    least, most = float(np.minimum.reduce(values)), float(np.maximum.reduce(values))
    if not math.isfinite(least) or not math.isfinite(most):  # a NaN anywhere makes both NaN
        nans = int(np.count_nonzero(np.isnan(values)))
        infinite = values[np.isinf(values)]
        positive = int(np.count_nonzero(infinite > 0))
        tally.nans += nans
        tally.positive_infinities += positive
        tally.negative_infinities += infinite.size - positive
        values = values[np.isfinite(values)]
        if not values.size:
            return
        least, most = float(np.minimum.reduce(values)), float(np.maximum.reduce(values))
    tally.minimum = min(tally.minimum, least + 0.0)  # a zero of either sign is one
    tally.maximum = max(tally.maximum, most + 0.0)
    largest = max(-least, most)
    _count_exponents(tally, values, largest, room[1])
    tally.sums.append(_sums(values, largest, room[0]))


def _sums(values: Array, largest: float, room: Array) -> Sums:
    if values.dtype == np.float64:
        wide = values
    else:
        wide = room[: values.size]
        np.copyto(wide, values)
    squares = _squares(wide) if largest < _SAFE_SIZE else math.inf
    if _SAFE_SQUARES < squares < math.inf or largest == 0.0:
        return Sums(float(np.einsum("i->", wide)), squares)
    exponent = max(-LARGEST_SCALE, min(LARGEST_SCALE, math.frexp(largest)[1]))
    scaled = np.multiply(wide, math.ldexp(1.0, -exponent), out=room[: values.size])
    return Sums(float(np.einsum("i->", scaled)), _squares(scaled), exponent)


def _squares(wide: Array) -> float:
    """Added up in the order in which `rows` does it: nobody sees which of them was at work."""
    found = 0.0
    for start in range(0, wide.size, DOT):  # not `sum`, which rounds as Python's version has it
        piece = wide[start : start + DOT]
        found += float(piece.dot(piece))
    return found


def _count_exponents(tally: Tally, values: Array, largest: float, room: Array) -> None:
    """Count finite values by exponent: by the field in their bits, the subnormals on their own."""
    layout = _LAYOUTS[values.dtype]
    bits: Array = values.view(layout.integer)
    fields: Array = room.view(layout.fields)[: values.size]
    np.right_shift(bits, layout.shift, out=fields, casting="unsafe")
    if layout.fields is np.int16:
        fields &= layout.mask
    low = int(np.minimum.reduce(fields))
    high = max(math.frexp(largest)[1] - 1 + layout.bias, 0) if largest else 0
    if high - low < _FEW:
        counts = [int(np.count_nonzero(fields == value)) for value in range(low, high + 1)]
    else:
        counts = _table(fields)[low:].tolist()
    if low == 0:
        zeros = values.size - int(np.count_nonzero(bits << 1))
        tally.zeros += zeros
        if counts[0] > zeros:
            tally.add(_subnormal_exponents(bits[fields == 0], layout))
        counts[0] = 0
    tally.add(enumerate(counts, low - layout.bias))


def _table(fields: Array) -> Array:
    if fields.size <= _SHORT:
        return np.bincount(fields)
    return torch.bincount(torch.from_numpy(fields)).numpy()


def _subnormal_exponents(bits: Array, layout: _Bits) -> Iterable[tuple[int, int]]:
    """Exponents of subnormals: those of their fractions, taken for integers."""
    fractions = bits & ((1 << layout.shift) - 1)
    powers = np.frexp(fractions[fractions != 0].astype(np.float64))[1]
    return enumerate(np.bincount(powers).tolist(), layout.subnormal - 1)
