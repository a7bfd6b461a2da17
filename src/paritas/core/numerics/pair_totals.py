"""The sums of a pair of real tensors on the CPU by numpy: as in `pair_sums`, at twice its speed."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from paritas.core.numerics.bits import (
    INTEGERS,
    UNSIGNED,
    first_unequal,
    fits_float32,
    has_ulps,
    holds_numbers,
    is_in_order,
)
from paritas.core.numerics.block_sums import (
    BLOCK,
    FLOAT32_RANGE,
    ROOM,
    Array,
    OutOfRangeError,
    SideBlock,
    SideTotals,
    SoftmaxDivergence,
    dot,
    total,
    widen_array,
)
from paritas.core.numerics.flat_blocks import blocks
from paritas.core.numerics.pair_sums import (
    WIDE_INTEGERS,
    Comoments,
    PairSums,
    WorstDifference,
    alike,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

_EXACT_INTEGER = 2.0**53


def walk_pair(reference: Tensor, candidate: Tensor, walk: PairWalk, *, softmax: bool) -> PairTotals:
    """The totals of an ordinary pair.

    Raises:
        OutOfRangeError: integers are too large for float64.
    """
    dtype = reference.dtype
    ulps = has_ulps(dtype, candidate.dtype)
    # The bits of a single block are usually known to differ.
    like = dtype == candidate.dtype and reference.numel() > BLOCK
    totals = PairTotals(has_ulps=ulps, softmax=softmax)
    with np.errstate(all="ignore"):
        for offset, (r, c) in walk:
            same = like and first_unequal(r.bits, c.bits) is None
            finite = totals.take(offset, r.numbers, c.numbers, same=same)
            if ulps and not same:
                x, y = (r.bits, c.bits) if finite is None else (r.bits[finite], c.bits[finite])
                totals.take_ulps(largest_step(x, y, dtype))
    for tensor, span in zip((reference, candidate), totals.spans, strict=True):
        if tensor.dtype in WIDE_INTEGERS and span.largest >= _EXACT_INTEGER:
            raise OutOfRangeError
    return totals


def is_ordinary(tensor: Tensor) -> bool:
    """Whether numpy can process it: real numbers on the CPU."""
    plain = type(tensor) is Tensor and tensor.is_cpu
    return plain and not tensor.is_complex() and holds_numbers(tensor.dtype)


class PairTotals:
    """Running totals over the blocks of a pair of tensors, for the same `PairSums` as by torch.

    Args:
        has_ulps: whether the two dtypes have common ulps.
        softmax: whether to compute the divergence of their softmaxes, the most expensive figure.
    """

    def __init__(self, *, has_ulps: bool, softmax: bool = True) -> None:
        self.spans = (SideTotals(), SideTotals())
        self._comoments = Comoments()
        self._counts: Counter[str] = Counter()
        self._squares = 0.0  # of the differences
        self._absolute = 0.0
        self._relative = 0.0
        self._farthest = WorstDifference()
        self._steepest = WorstDifference()
        self._max_ulp = 0.0 if has_ulps else None
        self._first_unlike: WorstDifference | None = None
        self._softmax = SoftmaxDivergence() if softmax else None

    def take(self, offset: int, r: Array, c: Array, *, same: bool) -> Array | None:
        """Add a block.

        Args:
            offset: flat index of its first element.
            r: the reference's numbers, float32 or float64.
            c: the candidate's, of the same dtype.
            same: whether their bits are known to be the same.

        Returns:
            Indices of the numbers that are finite on both sides; None if all are.
        """
        side = SideBlock.of(r)
        sides = (side, side if same else SideBlock.of(c))
        if all(each.is_finite for each in sides):
            for span, x, each in zip(self.spans, (r, c), sides, strict=True):
                span.take(x, each)
            self._take_finite(offset, None, r, c, sides)
            return None
        for span, x in zip(self.spans, (r, c), strict=True):
            span.take(x)
        unlike = ~((r == c) | (np.isnan(r) & np.isnan(c)))
        both_finite = np.isfinite(r) & np.isfinite(c)
        unlike &= ~both_finite
        self._count_unlike(offset, r, c, unlike)
        places = np.flatnonzero(both_finite)
        if places.size:
            r, c = r[places], c[places]
            self._take_finite(offset, places, r, c, (SideBlock.of(r), SideBlock.of(c)))
        return places

    def take_ulps(self, steps: float) -> None:
        """Add the largest distance in ulps of a block."""
        if self._max_ulp is not None:
            self._max_ulp = max(self._max_ulp, steps)

    def _count_unlike(self, offset: int, r: Array, c: Array, unlike: Array) -> None:
        unlike_count = int(np.count_nonzero(unlike))
        self._counts["unlike"] += unlike_count
        if unlike_count and self._first_unlike is None:
            first_index = int(unlike.argmax())
            self._first_unlike = WorstDifference(
                math.inf, offset + first_index, float(r[first_index]), float(c[first_index])
            )

    def _take_finite(
        self,
        offset: int,
        places: Array | None,
        r: Array,
        c: Array,
        sides: tuple[SideBlock, SideBlock],
    ) -> None:
        if r.dtype == np.float32 and not all(side.fits for side in sides):
            r, c = widen_array(r, "wide r"), widen_array(c, "wide c")
            sides = (SideBlock.of(r), SideBlock.of(c))
        side_r, side_c = sides
        d = np.subtract(c, r, out=ROOM.get("d", r))
        moduli = np.abs(d, out=ROOM.get("moduli", r))
        largest = float(np.maximum.reduce(moduli))
        if largest == 0.0:
            self._take_equal(r, side_r)
            return
        low, high = FLOAT32_RANGE
        if r.dtype == np.float32 and not low <= largest <= high:
            wide = widen_array(r, "wide r"), widen_array(c, "wide c")
            self._take_finite(offset, places, *wide, (SideBlock.of(wide[0]), SideBlock.of(wide[1])))
            return
        equal = np.equal(moduli, 0.0, out=ROOM.of("mask", np.bool_, r.size))
        self._counts["mismatched"] += r.size - int(np.count_nonzero(equal))
        if largest > self._farthest.size:
            self._farthest = _find_worst(largest, moduli, offset, places, (r, c))
        self._absolute += total(moduli)
        squares = dot(d, d)
        self._squares += squares
        sums = (side_r.total, side_c.total, side_r.squares, side_c.squares, squares)
        self._comoments = self._comoments.merge(comoments(r, c, sums))
        if self._softmax is not None:
            self._softmax.take(r, c, d, (side_r.least, side_r.most), largest)
        self._take_ratios(offset, places, (r, c), moduli, equal if side_r.zeros else None)

    def _take_equal(self, r: Array, side: SideBlock) -> None:
        sums = (side.total, side.total, side.squares, side.squares, 0.0)
        self._comoments = self._comoments.merge(comoments(r, r, sums))
        if self._softmax is not None:
            self._softmax.take_same(r, side.least, side.most)

    def _take_ratios(
        self,
        offset: int,
        places: Array | None,
        pair: tuple[Array, Array],
        moduli: Array,
        equal: Array | None,
    ) -> None:
        """Add relative differences; `equal` is given if the reference has zeros."""
        if self._steepest.size == math.inf:
            return  # the mean stays infinite too
        ratios = np.abs(pair[0], out=ROOM.get("ratios", moduli))
        np.divide(moduli, ratios, out=ratios)
        if equal is not None:
            np.copyto(ratios, 0.0, where=equal)  # 0 / 0
        largest, ratio_sum = float(np.maximum.reduce(ratios)), total(ratios)
        if not ratio_sum < math.inf and moduli.dtype == np.float32:  # float32 may just overflow
            wide = widen_array(pair[0], "wide r"), widen_array(pair[1], "wide c")
            difference = np.subtract(wide[1], wide[0], out=ROOM.get("wide d", wide[0]))
            self._take_ratios(offset, places, wide, np.abs(difference, out=difference), equal)
            return
        self._relative += ratio_sum
        if largest > self._steepest.size:
            self._steepest = _find_worst(largest, ratios, offset, places, pair)

    def sums(self) -> PairSums:
        """The sums of all blocks.

        Raises:
            OutOfRangeError: a sum of squares is out of the range of float64.
        """
        for span in self.spans:
            span.check()
        steepest, worst = self._steepest, self._first_unlike or self._farthest
        counts = Counter(self._counts)
        for name, span in zip(("reference", "candidate"), self.spans, strict=True):
            counts[f"nan_{name}"] = span.nans
            counts[f"posinf_{name}"] = span.positive_infinities
            counts[f"neginf_{name}"] = span.negative_infinities
            counts[f"zero_{name}"] = span.zeros
        return PairSums(
            compared=self._comoments.n,
            counts=counts,
            comoments=self._comoments,
            squares=self._squares,
            absolute=self._absolute,
            relative=self._relative,
            max_abs=self._farthest.difference,
            max_rel=steepest.difference / abs(steepest.reference)
            if steepest.reference
            else steepest.size,
            max_ulp=self._max_ulp,
            worst=worst if worst.size else None,
        )

    @property
    def divergence(self) -> float:
        """The divergence of the softmaxes; NaN if a value is not finite."""
        finite = all(span.is_finite for span in self.spans)
        return self._softmax.finish() if finite and self._softmax else math.nan


def _find_worst(
    size: float, sizes: Array, offset: int, places: Array | None, pair: tuple[Array, Array]
) -> WorstDifference:
    at = int(sizes.argmax())
    worst_index = at if places is None else int(places[at])
    return WorstDifference(size, offset + worst_index, float(pair[0][at]), float(pair[1][at]))


# --- Means, squares and products of a block -------------------------------------------------------

# Above this ratio of squares about zero to squares about the mean, centring cancels digits.
_CANCELS = 4.0


def comoments(r: Array, c: Array, sums: tuple[float, ...]) -> Comoments:
    """The comoments of a block; `sums` are those of r, c, r*r, c*c and (c - r)*(c - r)."""
    n = r.size
    total_r, total_c, rr, cc, dd = sums
    mean_r, mean_c = total_r / n, total_c / n
    total_d = total_c - total_r
    squares = (total_r * mean_r, total_c * mean_c, total_d * total_d / n)
    about = (rr - squares[0], cc - squares[1], dd - squares[2])
    if any(square > _CANCELS * rest for square, rest in zip(squares, about, strict=True)):
        return _centred_comoments(r, c, (mean_r, mean_c))
    rc = (rr + cc - dd) / 2.0 if alike(rr, cc) else dot(r, c)
    return Comoments(n, mean_r, mean_c, mean_c - mean_r, *about, rc - total_r * mean_c)


def _centred_comoments(r: Array, c: Array, means: tuple[float, float]) -> Comoments:
    """The comoments of a block with a large mean, which is subtracted before squaring."""
    n = r.size
    anchors = [_find_anchor(side, mean) for side, mean in zip((r, c), means, strict=True)]
    x = np.subtract(widen_array(r, "wide r"), anchors[0], out=ROOM.of("x", np.float64, n))
    y = np.subtract(widen_array(c, "wide c"), anchors[1], out=ROOM.of("y", np.float64, n))
    total_x, total_y = total(x), total(y)
    xx, yy, xy = dot(x, x), dot(y, y), dot(x, y)
    e = np.subtract(y, x, out=y)
    total_e = total(e)
    difference = anchors[1] - anchors[0]
    rounded = difference - anchors[1]
    # The exact rounding error of `difference`.
    lost = (anchors[1] - (difference - rounded)) - (anchors[0] + rounded)
    return Comoments(
        n,
        anchors[0],
        anchors[1],
        difference,
        max(xx - total_x * total_x / n, 0.0),
        max(yy - total_y * total_y / n, 0.0),
        max(dot(e, e) - total_e * total_e / n, 0.0),
        xy - total_x * total_y / n,
        (total_x / n, total_y / n, total_e / n + lost),
    )


def _find_anchor(side: Array, mean: float) -> float:
    """The number to subtract from a side: its mean, or exactly its value if it is constant."""
    first = float(side[0])
    return first if bool((side == side[0]).all()) else mean


# --- Two tensors as flat arrays, block by block: numbers and their bits ---------------------------

# Up to this many elements the calls dominate the cost, so float64 is used, which is exact.
_SMALL = 1 << 12
# Dtypes that numpy converts at least as fast as torch.
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
# For this many elements torch does not start its threads: the caller already has threads.
_QUIET = 1 << 15
# Numbers rarer than one in this many are picked one by one.
_RARE = 64


class NumberChunk(NamedTuple):
    """A stretch of a tensor.

    Attributes:
        numbers: as float32 or float64; a view of the tensor, or a buffer reused by the next chunk.
        bits: as signed integers of their own width; a view.
    """

    numbers: Array
    bits: Array


class PairWalk:
    """Iterates over real tensors of one shape on the CPU together, in row-major order.

    Numbers are float32 if that holds all values and the tensors are not small, else float64.

    Args:
        tensors: one or several.
        wide: always use float64.
        block_size: maximum number of elements per block, if fewer than usual.

    Raises:
        UsageError: (a `ValueError`) the shapes differ, or a tensor is sparse or quantized.
    """

    def __init__(self, *tensors: Tensor, wide: bool = False, block_size: int | None = None) -> None:
        first = tensors[0]
        self._block = BLOCK if block_size is None else min(block_size, BLOCK)
        self._tensors = tensors
        self._numel = first.numel()
        narrow = not wide and self._numel > _SMALL and all(fits_float32(t.dtype) for t in tensors)
        self._work = torch.float32 if narrow else torch.float64
        self._sources: list[_ChunkSource] | None = None
        if all(is_in_order(t) and t.shape == first.shape for t in tensors):
            self._sources = [_ChunkSource(t.view(-1), self._work, i) for i, t in enumerate(tensors)]
        else:
            blocks(*tensors)  # raises for tensors that cannot be compared

    def __iter__(self) -> Iterator[tuple[int, list[NumberChunk]]]:
        """For each block the flat index of its first element, and a chunk of each tensor."""
        if self._sources is not None:
            for start in range(0, self._numel, self._block):
                stop = start + self._block
                yield start, [source.chunk(start, stop) for source in self._sources]
            return
        for offset, pieces in blocks(*self._tensors, block_size=self._block):
            sources = [_ChunkSource(x.contiguous(), self._work, i) for i, x in enumerate(pieces)]
            yield offset, [source.chunk(0, len(pieces[0])) for source in sources]


def small_numbers(tensor: Tensor) -> Array | None:
    """The numbers of a small tensor without a `PairWalk`; None if it needs one."""
    if not 0 < tensor.numel() <= _SMALL or tensor.dtype not in _NUMPY or not is_in_order(tensor):
        return None
    flat: Array = tensor.numpy().reshape(-1)
    return flat.astype(np.float64, copy=False)


class _ChunkSource:
    """Gives chunks of a flat, contiguous tensor."""

    def __init__(self, flat: Tensor, work: torch.dtype, slot: int) -> None:
        self.flat = flat
        self.bits: Array = flat.view(INTEGERS[flat.dtype.itemsize]).numpy()
        self._array: Array | None = flat.numpy() if flat.dtype in _NUMPY else None
        self._room = f"numbers {slot}", np.float32 if work is torch.float32 else np.float64

    def chunk(self, start: int, stop: int) -> NumberChunk:
        bits = self.bits[start:stop]
        name, dtype = self._room
        if self._array is None:
            numbers = ROOM.of(name, dtype, bits.size)
            _copy_quietly(self.flat[start:stop], torch.from_numpy(numbers))
        elif self._array.dtype == dtype:
            numbers = self._array[start:stop]
        else:
            numbers = ROOM.of(name, dtype, bits.size)
            np.copyto(numbers, self._array[start:stop])
        return NumberChunk(numbers, bits)


def _copy_quietly(source: Tensor, target: Tensor) -> None:
    for start in range(0, len(target), _QUIET):
        target[start : start + _QUIET].copy_(source[start : start + _QUIET])


def largest_step(x: Array, y: Array, dtype: torch.dtype) -> float:
    """The largest `ulp_distance` between finite numbers, given their bits."""
    if not x.size:
        return 0.0
    if dtype is UNSIGNED:
        x, y = (side.view(np.uint8).astype(np.int16) for side in (x, y))
    steps = np.subtract(x, y, out=ROOM.get("steps", x))
    signs = np.bitwise_xor(x, y, out=ROOM.get("signs", x))
    across = 0.0
    if int(np.minimum.reduce(signs)) < 0:
        across = _largest_sum(x, y, steps, signs)
    return max(across, float(np.maximum.reduce(steps)), -float(np.minimum.reduce(steps)))


def _largest_sum(x: Array, y: Array, steps: Array, signs: Array) -> float:
    """The largest distance across zero, a sum of magnitudes; sets the wrapped `steps` to 0."""
    magnitude, unsigned = np.iinfo(x.dtype).max, f"u{x.itemsize}"
    opposite = np.less(signs, 0, out=ROOM.of("mask", np.bool_, x.size))
    if int(np.count_nonzero(opposite)) * _RARE < x.size:
        at = np.flatnonzero(opposite)
        sums = (x[at] & magnitude).view(unsigned) + (y[at] & magnitude).view(unsigned)
        steps[at] = 0
    else:
        np.right_shift(
            signs, 8 * x.itemsize - 1, out=signs
        )  # all bits set where signs are opposite
        steps &= ~signs
        sums = (x & magnitude).view(unsigned)
        sums += (y & magnitude).view(unsigned)
        sums &= signs.view(unsigned)
    return float(np.maximum.reduce(sums))
