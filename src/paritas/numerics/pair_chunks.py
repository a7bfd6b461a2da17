"""Two tensors as flat arrays, block by block: their numbers, and the bits of these."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from paritas.numerics.floats import fits_float32
from paritas.numerics.metrics import bitwise_equal, blocks
from paritas.numerics.pair_sums import BLOCK, ROOM, Array
from paritas.numerics.ulps import first_unequal

__all__ = ["Chunk", "Walk", "largest_step", "same_bits", "small_numbers"]

# Up to so many elements calls cost more than numbers: they go in float64, and are exact.
_SMALL = 1 << 12
_WORD = 8
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# What numpy converts at least as fast as torch.
_NUMPY = {
    torch.float32,
    torch.float64,
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
}
# For so many elements torch does not call up its threads: the caller has threads enough.
_QUIET = 1 << 15
# Up to one in so many numbers are picked one by one.
_RARE = 64
_UNSIGNED = torch.float8_e8m0fnu


class Chunk(NamedTuple):
    """A stretch of a tensor.

    Attributes:
        numbers: as float32 or float64; a view of the tensor, or room that the next chunk takes.
        bits: as signed integers of their own width; a view.
    """

    numbers: Array
    bits: Array


class Walk:
    """Real tensors of one shape on the CPU, walked together in row-major order.

    If float32 holds the numbers of all of them, and they are not small, they are given as such.

    Raises:
        UsageError: (a `ValueError`) the shapes differ, or a tensor is sparse or quantized.
    """

    def __init__(self, *tensors: Tensor) -> None:
        first = tensors[0]
        self._tensors = tensors
        self._numel = first.numel()
        narrow = self._numel > _SMALL and all(fits_float32(t.dtype) for t in tensors)
        self._work = torch.float32 if narrow else torch.float64
        self._sources: list[_Source] | None = None
        if all(_is_plain(t) and t.shape == first.shape for t in tensors):
            self._sources = [_Source(t.view(-1), self._work, i) for i, t in enumerate(tensors)]
        else:
            blocks(*tensors)  # which refuses what must not be walked

    def __iter__(self) -> Iterator[tuple[int, list[Chunk]]]:
        """For every block the flat index of its first element, and a chunk of each tensor."""
        if self._sources is not None:
            for start in range(0, self._numel, BLOCK):
                yield start, [source.chunk(start, start + BLOCK) for source in self._sources]
            return
        for offset, pieces in blocks(*self._tensors, block_size=BLOCK):
            sources = [_Source(x.contiguous(), self._work, i) for i, x in enumerate(pieces)]
            yield offset, [source.chunk(0, len(pieces[0])) for source in sources]

    def is_identical(self) -> bool:
        """`bitwise_equal` of the two."""
        first, second = self._tensors
        if self._sources is None or first.dtype != second.dtype:
            return bitwise_equal(first, second)
        x, y = (source.bits for source in self._sources)
        at = _first_unequal(x, y)
        if at is None:
            return True
        r, c = (float(source.flat[at]) for source in self._sources)
        return math.isnan(r) and math.isnan(c) and bitwise_equal(first, second)


def small_numbers(tensor: Tensor) -> Array | None:
    """What a walk over one small tensor gives, without the walk; None where it takes one."""
    if not 0 < tensor.numel() <= _SMALL or tensor.dtype not in _NUMPY or not _is_plain(tensor):
        return None
    flat: Array = tensor.numpy().reshape(-1)
    return flat.astype(np.float64, copy=False)


class _Source:
    """A flat, contiguous tensor, to be had by the chunk."""

    def __init__(self, flat: Tensor, work: torch.dtype, slot: int) -> None:
        self.flat = flat
        self.bits: Array = flat.view(_BITS[flat.dtype.itemsize]).numpy()
        self._array: Array | None = flat.numpy() if flat.dtype in _NUMPY else None
        self._room = f"numbers {slot}", np.float32 if work is torch.float32 else np.float64

    def chunk(self, start: int, stop: int) -> Chunk:
        bits = self.bits[start:stop]
        name, dtype = self._room
        if self._array is None:
            numbers = ROOM.of(name, dtype, bits.size)
            _copy(self.flat[start:stop], torch.from_numpy(numbers))
        elif self._array.dtype == dtype:
            numbers = self._array[start:stop]
        else:
            numbers = ROOM.of(name, dtype, bits.size)
            np.copyto(numbers, self._array[start:stop])
        return Chunk(numbers, bits)


def _copy(source: Tensor, target: Tensor) -> None:
    for start in range(0, len(target), _QUIET):
        target[start : start + _QUIET].copy_(source[start : start + _QUIET])


def same_bits(x: Array, y: Array) -> bool:
    """Whether two flat arrays of bits are equal."""
    return _first_unequal(x, y) is None


def _first_unequal(x: Array, y: Array) -> int | None:
    """Where two flat arrays first differ: compared by the word, which is fastest."""
    if x.itemsize == _WORD or x.nbytes % _WORD:
        return first_unequal(x, y)
    at = first_unequal(x.view(np.int64), y.view(np.int64))
    if at is None:
        return None
    start = at * (_WORD // x.itemsize)
    few = slice(start, start + _WORD // x.itemsize)
    return start + int((x[few] != y[few]).argmax())


def _is_plain(tensor: Tensor) -> bool:
    strided = tensor.layout is torch.strided and not tensor.is_quantized
    return strided and tensor.is_contiguous() and not tensor.is_neg()


def largest_step(x: Array, y: Array, dtype: torch.dtype) -> float:
    """The largest `ulp_distance` between finite numbers, of which these are the bits."""
    if not x.size:
        return 0.0
    if dtype is _UNSIGNED:
        x, y = (side.view(np.uint8).astype(np.int16) for side in (x, y))
    apart = np.subtract(x, y, out=ROOM.get("apart", x))
    signs = np.bitwise_xor(x, y, out=ROOM.get("signs", x))
    across = 0.0
    if int(np.minimum.reduce(signs)) < 0:
        across = _largest_sum(x, y, apart, signs)
    return max(across, float(np.maximum.reduce(apart)), -float(np.minimum.reduce(apart)))


def _largest_sum(x: Array, y: Array, apart: Array, signs: Array) -> float:
    """The largest distance across zero, where magnitudes add up; `apart` has wrapped: 0 instead."""
    magnitude, unsigned = np.iinfo(x.dtype).max, f"u{x.itemsize}"
    opposite = np.less(signs, 0, out=ROOM.of("mask", np.bool_, x.size))
    if int(np.count_nonzero(opposite)) * _RARE < x.size:
        at = np.flatnonzero(opposite)
        sums = (x[at] & magnitude).view(unsigned) + (y[at] & magnitude).view(unsigned)
        apart[at] = 0
    else:
        np.right_shift(signs, 8 * x.itemsize - 1, out=signs)  # all bits of the opposite ones
        apart &= ~signs
        sums = (x & magnitude).view(unsigned)
        sums += (y & magnitude).view(unsigned)
        sums &= signs.view(unsigned)
    return float(np.maximum.reduce(sums))
