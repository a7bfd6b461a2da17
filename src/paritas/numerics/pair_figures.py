"""The figures of a pair of tensors for a table, fast.

Bits first, which settles most pairs near the speed of memory. What differs is walked once, in
blocks that stay in a core's cache: numbers that float32 holds are worked on in float32 and added up
in float64; all others, and those of small tensors, in float64 altogether. It is numpy's work: its
calls cost least, and it starts no threads of its own beside those of the caller.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from paritas.numerics.figures import Extremes, PairFigures, QuickFigures
from paritas.numerics.floats import check_dtype, holds_numbers, in_order_of_memory
from paritas.numerics.metrics import bitwise_equal
from paritas.numerics.pair_careful import careful_figures, careful_span
from paritas.numerics.pair_chunks import Walk, largest_step, same_bits, small_numbers
from paritas.numerics.pair_sides import FLOAT32_RANGE, OutOfRangeError, Span, is_safe
from paritas.numerics.pair_sums import BLOCK, ROOM, Array, dot, widened
from paritas.numerics.pair_totals import PairTotals
from paritas.numerics.ulps import has_ulps

__all__ = ["PairMeasure", "measure_pair", "pair_figures", "quick_figures"]

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
        return _identical(reference)
    if _is_ordinary(reference) and _is_ordinary(candidate):
        walk = Walk(reference, candidate)
        if walk.is_identical():
            return _identical(reference)
        try:
            return _measure(reference, candidate, walk)
        except OutOfRangeError:
            pass
    elif bitwise_equal(reference, candidate):
        return _identical(reference)
    return _measure_carefully(reference, candidate)


def quick_figures(reference: Tensor, candidate: Tensor) -> QuickFigures:
    """Tell how far the candidate is from the reference, in a few figures.

    To the accuracy of `pair_figures`, and at a fraction of its cost.

    Raises:
        UsageError: as `pair_figures`.
    """
    reference, candidate = reference.detach(), candidate.detach()
    if _is_ordinary(reference) and _is_ordinary(candidate):
        walk = Walk(reference, candidate)
        if walk.is_identical():
            rms = _identical(reference).rms_reference
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


def _identical(reference: Tensor) -> PairMeasure:
    """Figures of a pair of the same bits, from one of them."""
    try:
        extremes, rms, finite = _one_side(reference)
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


def _one_side(tensor: Tensor) -> tuple[Extremes, float, bool]:
    if not holds_numbers(tensor.dtype):
        return Extremes(), math.nan, True
    if not _is_ordinary(tensor):
        return careful_span(tensor)
    span = Span()
    few = small_numbers(tensor)
    with np.errstate(all="ignore"):
        if few is not None:
            span.take(few)
            return span.extremes, span.rms, span.is_finite
        for _, (chunk,) in Walk(in_order_of_memory(tensor)):
            span.take(chunk.numbers)
    return span.extremes, span.rms, span.is_finite


def _measure(reference: Tensor, candidate: Tensor, walk: Walk) -> PairMeasure:
    dtype = reference.dtype
    ulps = has_ulps(dtype, candidate.dtype)
    # Bits of one block are known to differ: else they would not be here.
    like = dtype == candidate.dtype and reference.numel() > BLOCK
    totals = PairTotals(has_ulps=ulps)
    with np.errstate(all="ignore"):
        for offset, (r, c) in walk:
            same = like and same_bits(r.bits, c.bits)
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


def _measure_quickly(walk: Walk) -> QuickFigures | None:
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
