"""The figures of a pair of tensors for a table, fast."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from paritas.numerics.bits import check_dtype, holds_numbers, in_order_of_memory
from paritas.numerics.block_sums import (
    BLOCK,
    FLOAT32_RANGE,
    ROOM,
    Array,
    OutOfRangeError,
    SideTotals,
    SoftmaxDivergence,
    dot,
    is_safe,
    widened,
)
from paritas.numerics.metrics import (
    WIDE_INTEGERS,
    PairWalk,
    bitwise_equal,
    blocks,
    is_ordinary,
    pair_metrics,
    small_numbers,
    walk_pair,
)
from paritas.numerics.statistics import summarize_on_cpu
from paritas.results.figures import Extremes, PairFigures, QuickFigures

# --- Pairs that need care: complex ones, and those with squares out of float64's range ------------


def _measure_carefully(reference: Tensor, candidate: Tensor) -> PairMeasure:
    """`measure_pair` of two tensors that differ, in several passes."""
    check_dtype(reference.dtype)
    check_dtype(candidate.dtype)
    metrics = pair_metrics(reference, candidate)
    side_r, rms, finite_r = _careful_span(reference)
    side_c, _, finite_c = _careful_span(candidate)
    mean_rel = math.inf
    if not metrics.nonfinite_mismatches and metrics.max_rel < math.inf:
        mean_rel = _mean_ratio(reference, candidate)
    divergence = math.nan
    if finite_r and finite_c and not (reference.is_complex() or candidate.is_complex()):
        divergence = _softmax_divergence(reference, candidate)
    figures = PairFigures(
        reference=side_r,
        candidate=side_c,
        metrics=metrics,
        mean_rel=mean_rel,
        kl_divergence=divergence,
    )
    return PairMeasure(figures, rms)


def _careful_span(tensor: Tensor) -> tuple[Extremes, float, bool]:
    """A tensor's extremes, root mean square, and whether all of its values are finite."""
    found = summarize_on_cpu(tensor)
    extremes = Extremes(minimum=found.minimum, maximum=found.maximum, mean=found.mean)
    finite = found.count - found.nans - found.positive_infinities - found.negative_infinities
    rms = math.nan if found.l2 is None else found.l2 / math.sqrt(finite)
    return extremes, rms, found.is_finite


def _mean_ratio(reference: Tensor, candidate: Tensor) -> float:
    """Mean of the relative differences, which must all be finite."""
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

# Bits first, which settles most pairs near memory speed. Pairs that differ are read once, in blocks
# that stay in a core's cache: numbers that float32 holds are processed in float32 and summed in
# float64; all others, and small tensors, are processed in float64. Numpy does the work: its calls
# are cheapest, and it starts no threads of its own.


class PairMeasure(NamedTuple):
    """The figures of a pair, and the rms of the reference's finite values (NaN if it has none)."""

    figures: PairFigures
    rms_reference: float


def pair_figures(reference: Tensor, candidate: Tensor) -> PairFigures:
    """Measure both tensors, and how far the candidate is from the reference.

    Metrics are those of `pair_metrics`. For more than 4096 elements that float32 holds, sums are
    accurate to 1e-6 of the sum of their absolute terms, and the worst elements are the worst up to
    float32 rounding; everything else is as exact as in `pair_metrics`. Additional memory is
    bounded, and any number of threads may call this at once.

    NaN or infinity against anything else makes `mean_rel` infinite, like the other differences. For
    complex numbers, extremes are those of the moduli, and the divergence is NaN: a softmax has no
    meaning there.

    Args:
        reference: any strided tensor of numbers.
        candidate: a tensor of the same shape; dtype and strides may differ.

    Raises:
        UsageError: (a `ValueError`) the shapes differ; or the values differ, and a dtype holds no
            numbers.
    """
    return measure_pair(reference, candidate).figures


def measure_pair(reference: Tensor, candidate: Tensor) -> PairMeasure:
    """`pair_figures`, and the rms of the reference."""
    is_one = candidate is reference  # for example two records with one digest
    reference, candidate = reference.detach(), candidate.detach()
    if is_one and is_ordinary(reference) and reference.layout is torch.strided:
        return _measure_identical(reference)
    if is_ordinary(reference) and is_ordinary(candidate):
        walk = PairWalk(reference, candidate)
        if walk.is_identical():
            return _measure_identical(reference)
        try:
            totals = walk_pair(reference, candidate, walk, softmax=True)
            return PairMeasure(totals.figures(tuple(reference.shape)), totals.spans[0].rms)
        except OutOfRangeError:
            pass
    elif bitwise_equal(reference, candidate):
        return _measure_identical(reference)
    return _measure_carefully(reference, candidate)


def quick_figures(reference: Tensor, candidate: Tensor) -> QuickFigures:
    """Measure how far the candidate is from the reference, in a few figures.

    As accurate as `pair_figures`, at a fraction of its cost.

    Raises:
        UsageError: as `pair_figures`.
    """
    reference, candidate = reference.detach(), candidate.detach()
    if is_ordinary(reference) and is_ordinary(candidate):
        walk = PairWalk(reference, candidate)
        if walk.is_identical():
            rms = _measure_identical(reference).rms_reference
            return QuickFigures(True, 0.0, 0.0, 0.0, rms, 0)
        if not WIDE_INTEGERS.intersection((reference.dtype, candidate.dtype)):
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
    """Figures of a pair with equal bits, computed from one side."""
    try:
        extremes, rms, finite = _measure_side(reference)
    except OutOfRangeError:
        extremes, rms, finite = _careful_span(reference)
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
    if not is_ordinary(tensor):
        return _careful_span(tensor)
    span = SideTotals()
    few = small_numbers(tensor)
    with np.errstate(all="ignore"):
        if few is not None:
            span.take(few)
            return span.extremes, span.rms, span.is_finite
        for _, (chunk,) in PairWalk(in_order_of_memory(tensor)):
            span.take(chunk.numbers)
    return span.extremes, span.rms, span.is_finite


def _measure_quickly(walk: PairWalk) -> QuickFigures | None:
    """The figures of one pass; None if a sum of squares is out of the range of float64."""
    count, own_count, unlike, largest, dd, rr = 0, 0, 0, 0.0, 0.0, 0.0
    with np.errstate(all="ignore"):
        for _, pair in walk:
            r, c = (chunk.numbers for chunk in pair)
            own = r
            farthest, squares, own_squares = _quick_block(r, c)
            if not math.isfinite(squares + own_squares):
                finite, kept = np.isfinite(r), np.isfinite(r) & np.isfinite(c)
                alike = (r == c) | (np.isnan(r) & np.isnan(c))
                unlike += int(np.count_nonzero(~(alike | kept)))
                own, r, c = r[finite], r[kept], c[kept]
                own_squares = _quick_block(own, own)[2] if own.size else 0.0
                farthest, squares, _ = _quick_block(r, c) if r.size else (0.0, 0.0, 0.0)
            count, own_count = count + r.size, own_count + own.size
            largest, dd, rr = max(largest, farthest), dd + squares, rr + own_squares
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
