"""What a tensor amounts to, and what is added up on the way there."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

__all__ = ["LARGEST_SCALE", "Statistics", "Sums", "Tally"]

# Scaled by such an exponent at most, the largest float64 and the least have squares.
LARGEST_SCALE = 1000


class Statistics(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
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

    @property
    def counts_all(self) -> bool:
        """Whether each value is in one of the counts, as ours are; other tools count some kinds."""
        counted = self.zeros + self.nans + self.positive_infinities + self.negative_infinities
        return counted + sum(many for _, many in self.exponents) == self.count


class Sums(NamedTuple):
    """Sums of a block's finite values and of their squares, all scaled down by 2^exponent."""

    total: float
    squares: float
    exponent: int = 0


@dataclass
class Tally:
    """What all blocks so far come to, wherever they were counted.

    Attributes:
        exponents: finite nonzero values by exponent.
    """

    count: int
    zeros: int = 0
    nans: int = 0
    positive_infinities: int = 0
    negative_infinities: int = 0
    minimum: float = math.inf
    maximum: float = -math.inf
    sums: list[Sums] = field(default_factory=list)
    exponents: dict[int, int] = field(default_factory=dict)

    def add(self, exponents: Iterable[tuple[int, int]]) -> None:
        """Add counts by exponent."""
        found = self.exponents
        for exponent, count in exponents:
            if count:
                found[exponent] = found.get(exponent, 0) + count

    def statistics(self) -> Statistics:
        """The whole; mean and norm from scaled sums, lest a square overflow."""
        infinities = self.positive_infinities + self.negative_infinities
        finite = self.count - self.nans - infinities
        figures: dict[str, float] = {}
        if finite:
            top = max((sums.exponent for sums in self.sums if sums.squares), default=0)
            total = math.fsum(math.ldexp(s.total, s.exponent - top) for s in self.sums)
            squares = math.fsum(math.ldexp(s.squares, 2 * (s.exponent - top)) for s in self.sums)
            figures = {
                "minimum": self.minimum,
                "maximum": self.maximum,
                "mean": math.ldexp(total / finite, top),
                "l2": _scaled(math.sqrt(squares), top),
            }
        return Statistics(
            count=self.count,
            zeros=self.zeros,
            nans=self.nans,
            positive_infinities=self.positive_infinities,
            negative_infinities=self.negative_infinities,
            exponents=tuple(sorted(self.exponents.items())),
            **figures,
        )


def _scaled(number: float, exponent: int) -> float:
    try:
        return math.ldexp(number, exponent)
    except OverflowError:
        return math.inf
