"""What a tensor amounts to, in a few numbers."""

from __future__ import annotations

import msgspec

__all__ = ["Statistics"]


class Statistics(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A summary of the values of one tensor; of complex numbers, of their magnitudes.

    Attributes:
        count: how many values.
        minimum: the least finite value; None where there is none.
        maximum: the greatest finite value.
        mean: of the finite values.
        l2: square root of the sum of their squares.
        zeros: how many are zero, of either sign.
        nans: how many are not a number.
        positive_infinities: how many.
        negative_infinities: how many.
        exponents: (e, how many finite nonzero values v have 2^e <= |v| < 2^(e+1)), ascending.
    """

    count: int
    minimum: float | None = None
    maximum: float | None = None
    mean: float | None = None
    l2: float | None = None
    zeros: int = 0
    nans: int = 0
    positive_infinities: int = 0
    negative_infinities: int = 0
    exponents: tuple[tuple[int, int], ...] = ()

    @property
    def is_finite(self) -> bool:
        """Whether every value is a finite number."""
        return not (self.nans or self.positive_infinities or self.negative_infinities)
