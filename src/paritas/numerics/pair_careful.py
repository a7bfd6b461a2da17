"""The figures of pairs that take care: complex ones, and those whose squares leave float64."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from paritas.numerics.figures import Extremes, PairFigures
from paritas.numerics.host_statistics import summarize_on_cpu
from paritas.numerics.metrics import blocks, pair_metrics
from paritas.numerics.pair_softmax import SoftmaxDivergence
from paritas.numerics.pair_sums import BLOCK, Array

__all__ = ["careful_figures", "careful_span"]


def careful_figures(reference: Tensor, candidate: Tensor) -> PairFigures:
    """`pair_figures` of two tensors that differ, in several passes."""
    metrics = pair_metrics(reference, candidate)
    (side_r, _, finite_r), (side_c, _, finite_c) = careful_span(reference), careful_span(candidate)
    mean_rel = math.inf
    if not metrics.nonfinite_mismatches and metrics.max_rel < math.inf:
        mean_rel = _mean_ratio(reference, candidate)
    divergence = math.nan
    if finite_r and finite_c and not (reference.is_complex() or candidate.is_complex()):
        divergence = _divergence(reference, candidate)
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


def _divergence(reference: Tensor, candidate: Tensor) -> float:
    softmax = SoftmaxDivergence()
    with np.errstate(all="ignore"):
        for _, pair in blocks(reference, candidate, block_size=BLOCK):
            r, c = (_doubles(side) for side in pair)
            d = c - r
            span = float(r.min()), float(r.max())
            softmax.take(r, c, d, span, float(np.abs(d).max()))
    return softmax.finish()


def _doubles(chunk: Tensor) -> Array:
    found: Array = chunk.cpu().double().contiguous().numpy()
    return found
