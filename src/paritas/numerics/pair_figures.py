"""The figures of a pair of tensors for a table, fast."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from paritas.numerics.bits import (
    check_dtype,
    first_unequal,
    fits_float32,
    has_ulps,
    holds_numbers,
    in_order_of_memory,
)
from paritas.numerics.metrics import bitwise_equal, blocks, pair_metrics
from paritas.numerics.pair_totals import (
    BLOCK,
    FLOAT32_RANGE,
    ROOM,
    Array,
    OutOfRangeError,
    PairTotals,
    SideTotals,
    SoftmaxDivergence,
    dot,
    is_safe,
    widened,
)
from paritas.numerics.statistics import summarize_on_cpu
from paritas.results.figures import Extremes, PairFigures, QuickFigures

# --- Two tensors as flat arrays, block by block: their numbers, and the bits of these -------------

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


class NumberChunk(NamedTuple):
    """A stretch of a tensor.

    Attributes:
        numbers: as float32 or float64; a view of the tensor, or room that the next chunk takes.
        bits: as signed integers of their own width; a view.
    """

    numbers: Array
    bits: Array


class PairWalk:
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
        self._sources: list[_ChunkSource] | None = None
        if all(_is_contiguous(t) and t.shape == first.shape for t in tensors):
            self._sources = [_ChunkSource(t.view(-1), self._work, i) for i, t in enumerate(tensors)]
        else:
            blocks(*tensors)  # which refuses what must not be walked

    def __iter__(self) -> Iterator[tuple[int, list[NumberChunk]]]:
        """For every block the flat index of its first element, and a chunk of each tensor."""
        if self._sources is not None:
            for start in range(0, self._numel, BLOCK):
                yield start, [source.chunk(start, start + BLOCK) for source in self._sources]
            return
        for offset, pieces in blocks(*self._tensors, block_size=BLOCK):
            sources = [_ChunkSource(x.contiguous(), self._work, i) for i, x in enumerate(pieces)]
            yield offset, [source.chunk(0, len(pieces[0])) for source in sources]

    def is_identical(self) -> bool:
        """`bitwise_equal` of the two."""
        first, second = self._tensors
        if self._sources is None or first.dtype != second.dtype:
            return bitwise_equal(first, second)
        x, y = (source.bits for source in self._sources)
        at = _first_unequal_element(x, y)
        if at is None:
            return True
        r, c = (float(source.flat[at]) for source in self._sources)
        return math.isnan(r) and math.isnan(c) and bitwise_equal(first, second)


def small_numbers(tensor: Tensor) -> Array | None:
    """What a walk over one small tensor gives, without the walk; None where it takes one."""
    if not 0 < tensor.numel() <= _SMALL or tensor.dtype not in _NUMPY or not _is_contiguous(tensor):
        return None
    flat: Array = tensor.numpy().reshape(-1)
    return flat.astype(np.float64, copy=False)


class _ChunkSource:
    """A flat, contiguous tensor, to be had by the chunk."""

    def __init__(self, flat: Tensor, work: torch.dtype, slot: int) -> None:
        self.flat = flat
        self.bits: Array = flat.view(_BITS[flat.dtype.itemsize]).numpy()
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


def same_array_bits(x: Array, y: Array) -> bool:
    """Whether two flat arrays of bits are equal."""
    return _first_unequal_element(x, y) is None


def _first_unequal_element(x: Array, y: Array) -> int | None:
    """Where two flat arrays first differ: compared by the word, which is fastest."""
    if x.itemsize == _WORD or x.nbytes % _WORD:
        return first_unequal(x, y)
    at = first_unequal(x.view(np.int64), y.view(np.int64))
    if at is None:
        return None
    start = at * (_WORD // x.itemsize)
    few = slice(start, start + _WORD // x.itemsize)
    return start + int((x[few] != y[few]).argmax())


def _is_contiguous(tensor: Tensor) -> bool:
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


# --- The figures of pairs that take care: complex ones, and those whose squares leave float64 -----


def careful_figures(reference: Tensor, candidate: Tensor) -> PairFigures:
    """`pair_figures` of two tensors that differ, in several passes."""
    metrics = pair_metrics(reference, candidate)
    (side_r, _, finite_r), (side_c, _, finite_c) = careful_span(reference), careful_span(candidate)
    mean_rel = math.inf
    if not metrics.nonfinite_mismatches and metrics.max_rel < math.inf:
        mean_rel = _mean_ratio(reference, candidate)
    divergence = math.nan
    if finite_r and finite_c and not (reference.is_complex() or candidate.is_complex()):
        divergence = _softmax_divergence(reference, candidate)
    return PairFigures(
        reference=side_r,
        candidate=side_c,
        metrics=metrics,
        mean_rel=mean_rel,
        kl_divergence=divergence,
    )


def careful_span(tensor: Tensor) -> tuple[Extremes, float, bool]:
    """A tensor's extremes, root mean square, and whether all of its values are finite."""
    found = summarize_on_cpu(tensor)
    extremes = Extremes(minimum=found.minimum, maximum=found.maximum, mean=found.mean)
    finite = found.count - found.nans - found.positive_infinities - found.negative_infinities
    rms = math.nan if found.l2 is None else found.l2 / math.sqrt(finite)
    return extremes, rms, found.is_finite


def _mean_ratio(reference: Tensor, candidate: Tensor) -> float:
    """Mean of the differences relative to the reference, which are known to be finite."""
    found, count = 0.0, 0
    for _, (r, c) in blocks(reference, candidate, block_size=BLOCK):
        paired = r.is_complex() or c.is_complex()
        x, y = ((side.to(torch.complex128) if paired else side.double()).cpu() for side in (r, c))
        kept = x.isfinite() & y.isfinite()
        ratios = (y - x)[kept].abs() / x[kept].abs()
        found += float(ratios.nan_to_num(nan=0.0).sum())
        count += ratios.numel()
    return found / count if count else 0.0


def _softmax_divergence(reference: Tensor, candidate: Tensor) -> float:
    softmax = SoftmaxDivergence()
    with np.errstate(all="ignore"):
        for _, pair in blocks(reference, candidate, block_size=BLOCK):
            r, c = (_as_doubles(side) for side in pair)
            d = c - r
            span = float(r.min()), float(r.max())
            softmax.take(r, c, d, span, float(np.abs(d).max()))
    return softmax.finish()


def _as_doubles(chunk: Tensor) -> Array:
    found: Array = chunk.cpu().double().contiguous().numpy()
    return found


# --- Measuring a pair -----------------------------------------------------------------------------

# Bits first, which settles most pairs near the speed of memory. What differs is walked once, in
# blocks that stay in a core's cache: numbers that float32 holds are worked on in float32 and added
# up in float64; all others, and those of small tensors, in float64 altogether. It is numpy's work:
# its calls cost least, and it starts no threads of its own beside those of the caller.

_WIDE_INTEGERS = {torch.int64, torch.uint64}
_EXACT_INTEGER = 2.0**53


class PairMeasure(NamedTuple):
    """The figures of a pair, and what the same pass tells besides.

    Attributes:
        rms_reference: root mean square of the reference's finite values; NaN if there is none.
    """

    figures: PairFigures
    rms_reference: float


def pair_figures(reference: Tensor, candidate: Tensor) -> PairFigures:
    """Tell how both tensors are, and how far the candidate is from the reference.

    Metrics are those of `pair_metrics`. Of tensors of more than 4096 elements that float32 holds,
    sums are right to 1e-6 of the sum of their terms' sizes, and the worst elements are the worst up
    to the rounding of float32; everything else is as exact as there. Memory beyond the tensors' own
    is bounded, and any number of threads may call this at once.

    A difference of NaN or infinity against anything else makes `mean_rel` infinite like the rest.
    Of complex numbers extremes are those of the moduli, and a divergence is NaN: their softmax
    means nothing.

    Args:
        reference: any strided tensor of numbers.
        candidate: a tensor of the same shape; dtype and strides may differ.

    Raises:
        UsageError: (a `ValueError`) the shapes differ; or the tensors do, and have a dtype that
            holds no numbers.
    """
    return measure_pair(reference, candidate).figures


def measure_pair(reference: Tensor, candidate: Tensor) -> PairMeasure:
    """`pair_figures`, and what else the same pass tells."""
    is_one = candidate is reference  # as of two records with one digest
    reference, candidate = reference.detach(), candidate.detach()
    if is_one and _is_ordinary(reference) and reference.layout is torch.strided:
        return _measure_identical(reference)
    if _is_ordinary(reference) and _is_ordinary(candidate):
        walk = PairWalk(reference, candidate)
        if walk.is_identical():
            return _measure_identical(reference)
        try:
            return _measure_walk(reference, candidate, walk)
        except OutOfRangeError:
            pass
    elif bitwise_equal(reference, candidate):
        return _measure_identical(reference)
    return _measure_carefully(reference, candidate)


def quick_figures(reference: Tensor, candidate: Tensor) -> QuickFigures:
    """Tell how far the candidate is from the reference, in a few figures.

    To the accuracy of `pair_figures`, and at a fraction of its cost.

    Raises:
        UsageError: as `pair_figures`.
    """
    reference, candidate = reference.detach(), candidate.detach()
    if _is_ordinary(reference) and _is_ordinary(candidate):
        walk = PairWalk(reference, candidate)
        if walk.is_identical():
            rms = _measure_identical(reference).rms_reference
            return QuickFigures(True, 0.0, 0.0, 0.0, rms, 0)
        if not _WIDE_INTEGERS.intersection((reference.dtype, candidate.dtype)):
            found = _measure_quickly(walk)
            if found is not None:
                return found
    figures, rms = measure_pair(reference, candidate)
    metrics = figures.metrics
    if metrics is None:
        return QuickFigures(True, 0.0, 0.0, 0.0, rms, 0)
    unlike = metrics.nonfinite_mismatches
    return QuickFigures(False, metrics.max_abs, metrics.rel_l2, metrics.rmse, rms, unlike)


def _measure_identical(reference: Tensor) -> PairMeasure:
    """Figures of a pair of the same bits, from one of them."""
    try:
        extremes, rms, finite = _measure_side(reference)
    except OutOfRangeError:
        extremes, rms, finite = careful_span(reference)
    divergence = 0.0 if finite else math.nan
    figures = PairFigures(
        reference=extremes,
        candidate=extremes,
        identical=True,
        mean_rel=0.0,
        kl_divergence=divergence,
    )
    return PairMeasure(figures, rms)


def _measure_side(tensor: Tensor) -> tuple[Extremes, float, bool]:
    if not holds_numbers(tensor.dtype):
        return Extremes(), math.nan, True
    if not _is_ordinary(tensor):
        return careful_span(tensor)
    span = SideTotals()
    few = small_numbers(tensor)
    with np.errstate(all="ignore"):
        if few is not None:
            span.take(few)
            return span.extremes, span.rms, span.is_finite
        for _, (chunk,) in PairWalk(in_order_of_memory(tensor)):
            span.take(chunk.numbers)
    return span.extremes, span.rms, span.is_finite


def _measure_walk(reference: Tensor, candidate: Tensor, walk: PairWalk) -> PairMeasure:
    dtype = reference.dtype
    ulps = has_ulps(dtype, candidate.dtype)
    # Bits of one block are known to differ: else they would not be here.
    like = dtype == candidate.dtype and reference.numel() > BLOCK
    totals = PairTotals(has_ulps=ulps)
    with np.errstate(all="ignore"):
        for offset, (r, c) in walk:
            same = like and same_array_bits(r.bits, c.bits)
            kept = totals.take(offset, r.numbers, c.numbers, same=same)
            if ulps and not same:
                x, y = (r.bits, c.bits) if kept is None else (r.bits[kept], c.bits[kept])
                totals.take_ulps(largest_step(x, y, dtype))
    figures = totals.figures(tuple(reference.shape))
    for tensor, side in ((reference, figures.reference), (candidate, figures.candidate)):
        _check_integers(tensor, side)
    return PairMeasure(figures, totals.spans[0].rms)


def _measure_carefully(reference: Tensor, candidate: Tensor) -> PairMeasure:
    check_dtype(reference.dtype)
    check_dtype(candidate.dtype)
    figures = careful_figures(reference, candidate)
    return PairMeasure(figures, careful_span(reference)[1])


def _measure_quickly(walk: PairWalk) -> QuickFigures | None:
    """None if a sum of squares leaves float64."""
    count, own_count, unlike, largest, dd, rr = 0, 0, 0, 0.0, 0.0, 0.0
    with np.errstate(all="ignore"):
        for _, pair in walk:
            r, c = (chunk.numbers for chunk in pair)
            own = r
            apart, squares, own_squares = _quick_block(r, c)
            if not math.isfinite(squares + own_squares):
                finite, kept = np.isfinite(r), np.isfinite(r) & np.isfinite(c)
                alike = (r == c) | (np.isnan(r) & np.isnan(c))
                unlike += int(np.count_nonzero(~(alike | kept)))
                own, r, c = r[finite], r[kept], c[kept]
                own_squares = _quick_block(own, own)[2] if own.size else 0.0
                apart, squares, _ = _quick_block(r, c) if r.size else (0.0, 0.0, 0.0)
            count, own_count = count + r.size, own_count + own.size
            largest, dd, rr = max(largest, apart), dd + squares, rr + own_squares
    if not (is_safe(dd) and is_safe(rr)):
        return None
    if unlike:
        rms = math.sqrt(rr / own_count)
        return QuickFigures(False, math.inf, math.inf, math.inf, rms, unlike)
    rms, rmse = math.sqrt(rr / count), math.sqrt(dd / count)
    return QuickFigures(False, largest, rmse / rms, rmse, rms, 0)


def _quick_block(r: Array, c: Array) -> tuple[float, float, float]:
    """Largest difference, and sums of squares of the difference and of the reference."""
    d = np.subtract(c, r, out=ROOM.get("d", r))
    largest = max(float(np.maximum.reduce(d)), -float(np.minimum.reduce(d)))
    squares, own = dot(d, d), dot(r, r)
    low, high = FLOAT32_RANGE
    fits = (largest == 0.0 or low <= largest <= high) and low * low <= own <= high * high
    if r.dtype == np.float64 or fits or math.isnan(largest):
        return largest, squares, own
    return _quick_block(widened(r, "wide r"), widened(c, "wide c"))


def _check_integers(tensor: Tensor, side: Extremes) -> None:
    if tensor.dtype in _WIDE_INTEGERS:
        ends = (side.minimum or 0.0, side.maximum or 0.0)
        if max(map(abs, ends)) >= _EXACT_INTEGER:
            raise OutOfRangeError


def _is_ordinary(tensor: Tensor) -> bool:
    plain = type(tensor) is Tensor and tensor.is_cpu
    return plain and not tensor.is_complex() and holds_numbers(tensor.dtype)
