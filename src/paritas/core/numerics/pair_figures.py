"""The figures of a pair of tensors for people: both sides, and how far they are apart."""

from __future__ import annotations

import contextlib
import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from paritas.core.numerics.bits import check_dtype, holds_numbers, in_order_of_memory
from paritas.core.numerics.block_sums import (
    BLOCK,
    FLOAT32_RANGE,
    ROOM,
    Array,
    OutOfRangeError,
    SideTotals,
    SoftmaxDivergence,
    dot,
    is_safe,
    widen_array,
)
from paritas.core.numerics.flat_blocks import blocks
from paritas.core.numerics.metrics import bitwise_equal, sum_pair
from paritas.core.numerics.pair_sums import WIDE_INTEGERS, PairSums
from paritas.core.numerics.pair_totals import PairWalk, is_ordinary, small_numbers, walk_pair
from paritas.core.numerics.statistics import summarize_on_cpu
from paritas.core.results.items import Extremes, PairFigures, QuickFigures

# Bits first, which settles most pairs near memory speed. Pairs that differ are read once, in blocks
# that stay in a core's cache: numbers that float32 holds are processed in float32 and summed in
# float64; all others, and small tensors, are processed in float64. Numpy does the work: its calls
# are cheapest, and it starts no threads of its own. Pairs that it cannot process (complex numbers,
# other devices, squares out of float64's range) are measured in several passes, with torch's sums.
#
# Quick figures have a loop of their own: `PairTotals` reads a block a dozen times, and first finds
# out which numbers are finite, while here three reads are enough, and a NaN shows in the squares.


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
    is_same_tensor = candidate is reference  # for example two records with one digest
    reference, candidate = reference.detach(), candidate.detach()
    if is_same_tensor and is_ordinary(reference) and reference.layout is torch.strided:
        return _measure_identical(reference)
    walk = _walk_if_ordinary(reference, candidate)
    if bitwise_equal(reference, candidate):
        return _measure_identical(reference)
    sides, sums, divergence = _sum_different(reference, candidate, walk)
    figures = PairFigures(
        reference=sides[0].extremes,
        candidate=sides[1].extremes,
        metrics=sums.metrics(reference.shape),
        mean_rel=sums.mean_rel,
        kl_divergence=divergence,
    )
    return PairMeasure(figures, sides[0].rms)


def quick_figures(reference: Tensor, candidate: Tensor) -> QuickFigures:
    """Measure how far the candidate is from the reference, in a few figures.

    As accurate as `pair_figures`, at an eighth of its cost for large tensors of finite numbers, and
    at its cost for all others.

    Raises:
        UsageError: as `pair_figures`.
    """
    reference, candidate = reference.detach(), candidate.detach()
    walk = _walk_if_ordinary(reference, candidate)
    if bitwise_equal(reference, candidate):
        rms = _measure_identical(reference).rms_reference
        return QuickFigures(True, 0.0, 0.0, 0.0, rms, 0)
    if walk is not None:
        quick = _measure_quickly(reference, candidate, walk)
        if quick is not None:
            return quick
    sides, sums, _ = _sum_different(reference, candidate, walk)
    metrics = sums.metrics(reference.shape)
    unlike = metrics.nonfinite_mismatches
    return QuickFigures(False, metrics.max_abs, metrics.rel_l2, metrics.rmse, sides[0].rms, unlike)


class PairMeasure(NamedTuple):
    """The figures of a pair, and the rms of the reference's finite values (NaN if it has none)."""

    figures: PairFigures
    rms_reference: float


class _Side(NamedTuple):
    """What is known of one tensor: its finite values' extremes and rms, and whether all are."""

    extremes: Extremes
    rms: float
    is_finite: bool

    @classmethod
    def of_totals(cls, totals: SideTotals) -> _Side:
        return cls(totals.extremes, totals.rms, totals.is_finite)


class _DifferentPair(NamedTuple):
    """The sums of a pair that differs, with both sides and the divergence of their softmaxes."""

    sides: list[_Side]
    sums: PairSums
    divergence: float


def _walk_if_ordinary(reference: Tensor, candidate: Tensor) -> PairWalk | None:
    if is_ordinary(reference) and is_ordinary(candidate):
        return PairWalk(reference, candidate)
    return None


def _sum_different(reference: Tensor, candidate: Tensor, walk: PairWalk | None) -> _DifferentPair:
    """In one pass by numpy if possible, else in several."""
    if walk is not None:
        with contextlib.suppress(OutOfRangeError):
            totals = walk_pair(reference, candidate, walk, softmax=True)
            sides = [_Side.of_totals(span) for span in totals.spans]
            return _DifferentPair(sides, totals.sums(), totals.divergence)
    check_dtype(reference.dtype)
    check_dtype(candidate.dtype)
    sums = sum_pair(reference, candidate)
    sides = [_summarize_side(side) for side in (reference, candidate)]
    divergence = math.nan
    is_complex = reference.is_complex() or candidate.is_complex()
    if not is_complex and all(side.is_finite for side in sides):
        divergence = _softmax_divergence(reference, candidate)
    return _DifferentPair(sides, sums, divergence)


def _summarize_side(tensor: Tensor) -> _Side:
    stats = summarize_on_cpu(tensor)
    extremes = Extremes(minimum=stats.minimum, maximum=stats.maximum, mean=stats.mean)
    finite = stats.count - stats.nans - stats.positive_infinities - stats.negative_infinities
    rms = math.nan if stats.l2 is None else stats.l2 / math.sqrt(finite)
    return _Side(extremes, rms, stats.is_finite)


def _softmax_divergence(reference: Tensor, candidate: Tensor) -> float:
    softmax = SoftmaxDivergence()
    with np.errstate(all="ignore"):
        for _, pair in blocks(reference, candidate, block_size=BLOCK):
            r, c = (side.cpu().double().contiguous().numpy() for side in pair)
            d = c - r
            span = float(r.min()), float(r.max())
            softmax.take(r, c, d, span, float(np.abs(d).max()))
    return softmax.finish()


def _measure_identical(reference: Tensor) -> PairMeasure:
    """Figures of a pair with equal bits, computed from one side."""
    try:
        side = _measure_side(reference)
    except OutOfRangeError:
        side = _summarize_side(reference)
    figures = PairFigures(
        reference=side.extremes,
        candidate=side.extremes,
        identical=True,
        mean_rel=0.0,
        kl_divergence=0.0 if side.is_finite else math.nan,
    )
    return PairMeasure(figures, side.rms)


def _measure_side(tensor: Tensor) -> _Side:
    if not holds_numbers(tensor.dtype):
        return _Side(Extremes(), math.nan, True)
    if not is_ordinary(tensor):
        return _summarize_side(tensor)
    totals = SideTotals()
    few = small_numbers(tensor)
    with np.errstate(all="ignore"):
        if few is not None:
            totals.take(few)
        else:
            for _, (chunk,) in PairWalk(in_order_of_memory(tensor)):
                totals.take(chunk.numbers)
    return _Side.of_totals(totals)


def _measure_quickly(reference: Tensor, candidate: Tensor, walk: PairWalk) -> QuickFigures | None:
    """The figures of one pass; None if it needs all of `pair_figures`.

    That is: a number is not finite, squares leave the range of float64, or integers do.
    """
    if WIDE_INTEGERS.intersection((reference.dtype, candidate.dtype)):
        return None
    largest, dd, rr = 0.0, 0.0, 0.0
    with np.errstate(all="ignore"):
        for _, (r, c) in walk:
            farthest, squares, squares_of_reference = _quick_block(r.numbers, c.numbers)
            largest, dd, rr = max(largest, farthest), dd + squares, rr + squares_of_reference
            if not math.isfinite(dd + rr):
                return None
    if not (is_safe(dd) and is_safe(rr)):
        return None
    count = reference.numel()
    rms, rmse = math.sqrt(rr / count), math.sqrt(dd / count)
    return QuickFigures(False, largest, rmse / rms, rmse, rms, 0)


def _quick_block(r: Array, c: Array) -> tuple[float, float, float]:
    """Largest difference, and sums of squares of the difference and of the reference."""
    d = np.subtract(c, r, out=ROOM.get("d", r))
    largest = max(float(np.maximum.reduce(d)), -float(np.minimum.reduce(d)))
    squares, reference_squares = dot(d, d), dot(r, r)
    low, high = FLOAT32_RANGE
    fits = (
        largest == 0.0 or low <= largest <= high
    ) and low * low <= reference_squares <= high * high
    if r.dtype == np.float64 or fits or math.isnan(largest):
        return largest, squares, reference_squares
    return _quick_block(widen_array(r, "wide r"), widen_array(c, "wide c"))
