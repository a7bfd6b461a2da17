"""What is told of a pair of tensors in a table: how each side is, and how far they are apart."""

from __future__ import annotations

import msgspec

from paritas.numerics.metrics import Metrics

__all__ = ["Extremes", "PairFigures"]


class Extremes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One side: over its finite values; all None where there is none.

    Attributes:
        minimum: the least.
        maximum: the greatest.
        mean: the mean.
    """

    minimum: float | None = None
    maximum: float | None = None
    mean: float | None = None


class PairFigures(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Both sides, and how far the candidate is from the reference.

    Attributes:
        reference: the reference's extremes.
        candidate: the candidate's.
        identical: whether all bits are the same (all NaNs count as the same).
        metrics: how they differ; None where they are identical.
        mean_rel: mean of |candidate - reference| / |reference| over all positions that are finite
            on both sides; 0 where both are zero, and infinite if only the reference is, anywhere.
        kl_divergence: of softmax(reference) from softmax(candidate), each taken over the whole
            flattened tensor; NaN where a value is not finite.

    A figure that was not asked for is None.
    """

    reference: Extremes = Extremes()
    candidate: Extremes = Extremes()
    identical: bool = False
    metrics: Metrics | None = None
    mean_rel: float | None = None
    kl_divergence: float | None = None
