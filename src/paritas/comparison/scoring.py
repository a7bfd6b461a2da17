"""Two floating values of which nothing but the dtypes is known: how far apart may they be?"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from paritas.numerics import criterion
from paritas.numerics.automatic import BLIND_NOISE, BLIND_SHARE
from paritas.numerics.criterion import MAX_Z, RMS_Z, Noise
from paritas.numerics.findings import Score

if TYPE_CHECKING:
    from torch import Tensor

    from paritas.numerics.figures import PairFigures, QuickFigures

__all__ = ["is_inexact", "noise_of", "score", "surely_passes"]


def noise_of(reference: Tensor, candidate: Tensor) -> tuple[Noise, str]:
    """The noise to be allowed, and what it is the noise of, in words.

    Where the golden side is of higher precision it is the arbiter, and the noise is mine alone.
    """
    inexact = [tensor for tensor in (reference, candidate) if is_inexact(tensor)]
    units = [criterion.unit_roundoff(tensor.dtype) for tensor in inexact]
    coarser = inexact[units.index(max(units))]
    words = _name(coarser)
    if len(inexact) > 1 and units[0] < units[1]:
        words = f"{words}, with the golden {_name(reference)} as arbiter"
    noise = Noise(
        unit=max(units),
        step=max(criterion.smallest_step(tensor.dtype) for tensor in inexact),
        relative=min(BLIND_NOISE * max(units), BLIND_SHARE),
        source=f"{words}, by the dtype alone: weak",
    )
    return noise, words


def score(reference: Tensor, candidate: Tensor, figures: PairFigures, noise: Noise) -> Score:
    """The candidate's error in multiples of that noise; from the figures alone where they do."""
    found = _bounds(figures, noise)
    if found is None:
        mine, truth = (
            tensor if is_inexact(tensor) else tensor.double() for tensor in (candidate, reference)
        )
        found = criterion.score(mine, truth, noise).score
    return found


def surely_passes(found: QuickFigures, noise: Noise) -> Score | None:
    """The score of a pair that passes whatever else would be found of it, or None."""
    least = noise.relative * found.rms_reference + noise.step
    if found.nonfinite_mismatches or not (least > 0 and found.max_abs <= RMS_Z * least):
        return None
    return Score(
        max_z=found.max_abs / least,
        max_limit=MAX_Z,
        rms_z=found.rmse / least,
        rms_limit=RMS_Z,
        noise=f"{noise.source}; at most these",
    )


def is_inexact(tensor: Tensor) -> bool:
    """Whether it holds floating or complex numbers."""
    return tensor.is_floating_point() or tensor.is_complex()


def _bounds(figures: PairFigures, noise: Noise) -> Score | None:
    """A score that is sure without another pass over the values, or None.

    Every element's noise lies between that of a zero and that of the largest value.
    """
    metrics, golden = figures.metrics, figures.reference
    if metrics is None or not metrics.rel_l2 or not math.isfinite(metrics.rel_l2):
        return None
    scale = metrics.rmse / metrics.rel_l2
    ends = [abs(end) for end in (golden.minimum, golden.maximum) if end is not None]
    least = noise.relative * scale + noise.step
    most = least + (noise.relative + noise.unit / 2) * max(ends, default=0.0)
    rms_limit = RMS_Z * (1 + 2 / math.sqrt(metrics.numel))
    if least > 0 and metrics.max_abs <= RMS_Z * least:
        divisor, word = least, "at most"
    elif most > 0 and metrics.rmse > rms_limit * most:
        divisor, word = most, "at least"
    else:
        return None
    return Score(
        max_z=metrics.max_abs / divisor,
        max_limit=MAX_Z,
        rms_z=metrics.rmse / divisor,
        rms_limit=rms_limit,
        index=metrics.max_abs_index,
        noise=f"{noise.source}; {word} these",
    )


def _name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
