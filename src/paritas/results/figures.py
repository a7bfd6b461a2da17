"""How two tensors differ, in numbers: metrics of a pair, and what a table shows of each side."""

from __future__ import annotations

from typing import NamedTuple

import msgspec


class Metrics(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a candidate tensor differs from its reference.

    Differences are taken over the positions where both are finite. A position where both are NaN,
    or both the same infinity, is left out. Where only one is, no number would be right, and the
    metrics fail closed: every difference is infinite, `cosine` and `pcc` are NaN.

    A complex element is one element, as large as its modulus; it is NaN or infinite if a component
    is, and the sums behind `cosine` and `pcc` take it for two reals.

    Attributes:
        numel: elements in each tensor.
        mismatched: elements with different values; NaN equals NaN and -0.0 equals +0.0.
        max_abs: largest absolute difference.
        max_abs_index: where that is: the first place of it; None if nothing differs.
        max_abs_reference: the reference there (a complex one's modulus).
        max_abs_candidate: the candidate there, likewise.
        max_rel: largest difference relative to the reference's element; infinite where that is 0.
        mean_abs: mean absolute difference.
        rmse: root mean square difference.
        rel_l2: norm of the difference over the norm of the reference.
        cosine: cosine of the angle between the two; NaN if just one of them is all zero.
        pcc: Pearson's correlation coefficient; NaN if one of them is constant.
        max_ulp: largest difference in steps of the dtype's grid; None unless both have the same
            real floating-point dtype.
        nan_reference: NaNs in the reference; the next seven count likewise.
        nonfinite_mismatches: positions where one is NaN or infinite and the other not the same.
    """

    numel: int
    mismatched: int
    max_abs: float
    max_abs_index: tuple[int, ...] | None
    max_abs_reference: float | None
    max_abs_candidate: float | None
    max_rel: float
    mean_abs: float
    rmse: float
    rel_l2: float
    cosine: float
    pcc: float
    max_ulp: float | None
    nan_reference: int
    nan_candidate: int
    posinf_reference: int
    posinf_candidate: int
    neginf_reference: int
    neginf_candidate: int
    zero_reference: int
    zero_candidate: int
    nonfinite_mismatches: int


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
