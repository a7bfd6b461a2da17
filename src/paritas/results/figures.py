"""How two tensors differ, in numbers: metrics of a pair, and figures of each side."""

from __future__ import annotations

from typing import NamedTuple

import msgspec


class Metrics(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a candidate tensor differs from its reference.

    Differences are taken over the positions where both are finite. Positions where both are NaN, or
    both the same infinity, are left out. If only one side is NaN or infinite anywhere, the metrics
    fail closed: every difference is infinite, and `cosine` and `pcc` are NaN.

    A complex value is one element, with its modulus as size. It is NaN or infinite if a component
    is. The sums of `cosine` and `pcc` treat it as two reals.

    Attributes:
        numel: elements in each tensor.
        mismatched: elements with different values; NaN equals NaN and -0.0 equals +0.0.
        max_abs: largest absolute difference.
        max_abs_index: the first position of `max_abs`; None if nothing differs.
        max_abs_reference: the reference there; the modulus if complex.
        max_abs_candidate: the candidate there; the modulus if complex.
        max_rel: largest difference relative to the reference's element; infinite if that is 0.
        mean_abs: mean absolute difference.
        rmse: root mean square difference.
        rel_l2: norm of the difference over the norm of the reference.
        cosine: cosine of the angle between the two; NaN if only one of them is all zero.
        pcc: Pearson correlation coefficient; NaN if one of them is constant.
        max_ulp: largest difference in ulp; None unless both have the same
            real floating-point dtype.
        nan_reference: NaNs in the reference; the next seven fields are counts too.
        nonfinite_mismatches: positions where one is NaN or infinite and the other is not the same.
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
    """Figures of one side, over its finite values; all None if it has none."""

    minimum: float | None = None
    maximum: float | None = None
    mean: float | None = None


class QuickFigures(NamedTuple):
    """The figures of a cheap pass; they are defined, and fail closed, as in `Metrics`.

    Attributes:
        identical: whether all bits are the same (all NaNs count as the same).
        rms_reference: root mean square of the reference's finite values; NaN if it has none.
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
        identical: whether all bits are the same (all NaNs count as the same).
        metrics: how they differ; None if they are identical.
        mean_rel: mean of |candidate - reference| / |reference| over all positions that are finite
            on both sides; 0 where both are zero. Infinite if anywhere only the reference is zero,
            or only one side is finite.
        kl_divergence: of softmax(reference) from softmax(candidate), each taken over the whole
            flattened tensor; NaN if a value is not finite.
        quick: figures of a cheap pass, if no others were requested.

    A figure that was not requested is None.
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
        """Largest absolute difference, from `metrics` or `quick`."""
        if self.identical:
            return 0.0
        found = self.metrics or self.quick
        return None if found is None else found.max_abs

    @property
    def rel_l2(self) -> float | None:
        """Norm of the difference over that of the reference, from `metrics` or `quick`."""
        if self.identical:
            return 0.0
        found = self.metrics or self.quick
        return None if found is None else found.rel_l2
