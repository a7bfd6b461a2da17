"""What is told of a pair of tensors in a table: how each side is, and how far they are apart."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from paritas.numerics.metrics import Metrics

__all__ = ["Extremes", "PairFigures", "QuickFigures"]


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


class QuickFigures(NamedTuple):
    """What a cheap pass tells; differences are those of `Metrics`, and fail closed likewise.

    Attributes:
        identical: whether all bits are the same (all NaNs count as the same).
        max_abs: largest absolute difference.
        rel_l2: norm of the difference over the norm of the reference.
        rmse: root mean square difference.
        rms_reference: root mean square of the reference's finite values; NaN if there is none.
        nonfinite_mismatches: positions where one is NaN or infinite and the other not the same.
    """

    identical: bool
    max_abs: float
    rel_l2: float
    rmse: float
    rms_reference: float
    nonfinite_mismatches: int


class PairFigures(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Both sides, and how far the candidate is from the reference.

    Attributes:
        reference: the reference's extremes.
        candidate: the candidate's.
        identical: whether all bits are the same (all NaNs count as the same).
        metrics: how they differ; None where they are identical.
        mean_rel: mean of |candidate - reference| / |reference| over all positions that are finite
            on both sides; 0 where both are zero, and infinite if only the reference is, or if only
            one side is finite, anywhere.
        kl_divergence: of softmax(reference) from softmax(candidate), each taken over the whole
            flattened tensor; NaN where a value is not finite.

        quick: the few figures of a pair of which no more was asked for.

    A figure that was not asked for is None.
    """

    reference: Extremes = Extremes()
    candidate: Extremes = Extremes()
    identical: bool = False
    metrics: Metrics | None = None
    mean_rel: float | None = None
    kl_divergence: float | None = None
    quick: QuickFigures | None = None

    @property
    def max_abs(self) -> float | None:
        """Largest absolute difference, however it was told."""
        if self.identical:
            return 0.0
        found = self.metrics or self.quick
        return None if found is None else found.max_abs

    @property
    def rel_l2(self) -> float | None:
        """Norm of the difference over that of the reference, however it was told."""
        if self.identical:
            return 0.0
        found = self.metrics or self.quick
        return None if found is None else found.rel_l2
