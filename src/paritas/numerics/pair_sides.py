"""One side of a pair of tensors, block by block: how its numbers are."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from paritas.numerics.figures import Extremes
from paritas.numerics.pair_sums import ROOM, Array, dot, total, widened

__all__ = ["FLOAT32_RANGE", "OutOfRangeError", "Side", "Span", "is_safe"]

# Largest numbers whose squares float32 adds up without loss: none overflows, and those that it
# loses to underflow are nothing beside the largest.
FLOAT32_RANGE = (1e-15, 1e15)
# Sums of squares within these bounds lost nothing of float64 either, nor do their products.
_SAFE = (1e-100, 1e100)


class OutOfRangeError(Exception):
    """The squares of these numbers leave float64: they have to be scaled first."""


class Side(NamedTuple):
    """The numbers of one side in a block; the extremes are NaN or infinite if a number is."""

    least: float
    most: float
    zeros: int
    total: float
    squares: float

    @classmethod
    def of(cls, x: Array) -> Side:
        """Measure a block of numbers."""
        least, most = float(np.minimum.reduce(x)), float(np.maximum.reduce(x))
        zeros = 0
        if not (least > 0.0 or most < 0.0):
            zeros = int(np.count_nonzero(np.equal(x, 0.0, out=ROOM.of("mask", np.bool_, x.size))))
        return cls(least, most, zeros, total(x), dot(x, x))

    @property
    def fits(self) -> bool:
        """Whether float32 will do."""
        largest = max(-self.least, self.most)
        return largest == 0.0 or FLOAT32_RANGE[0] <= largest <= FLOAT32_RANGE[1]

    @property
    def is_finite(self) -> bool:
        """Whether all of its numbers are."""
        return math.isfinite(self.least) and math.isfinite(self.most)


class Span:
    """One side of a pair, all blocks so far: over its own finite numbers."""

    def __init__(self) -> None:
        self.count = 0
        self.zeros = 0
        self.nans = 0
        self.positive_infinities = 0
        self.negative_infinities = 0
        self._least = math.inf
        self._most = -math.inf
        self._total = 0.0
        self._squares = 0.0

    def take(self, x: Array, side: Side | None = None) -> None:
        """Add a block; `side` is what it measures, if that is known and finite."""
        if side is None:
            side = Side.of(x)
            if not side.is_finite:
                self._count_kinds(x)
                x = x[np.isfinite(x)]
                if not x.size:
                    return
                side = Side.of(x)
        if x.dtype == np.float32 and not side.fits:
            side = Side.of(widened(x, "wide span"))
        self.count += x.size
        self.zeros += side.zeros
        self._least = min(self._least, side.least + 0.0)  # a zero of either sign is one
        self._most = max(self._most, side.most + 0.0)
        self._total += side.total
        self._squares += side.squares

    def _count_kinds(self, x: Array) -> None:
        self.nans += int(np.count_nonzero(np.isnan(x)))
        self.positive_infinities += int(np.count_nonzero(x == math.inf))
        self.negative_infinities += int(np.count_nonzero(x == -math.inf))

    @property
    def is_finite(self) -> bool:
        """Whether every number was."""
        return not (self.nans or self.positive_infinities or self.negative_infinities)

    @property
    def rms(self) -> float:
        """Root mean square of the finite numbers; NaN if there is none."""
        self._check()
        return math.sqrt(self._squares / self.count) if self.count else math.nan

    @property
    def extremes(self) -> Extremes:
        """As the table tells them."""
        if not self.count:
            return Extremes()
        self._check()
        mean = self._total / self.count
        return Extremes(minimum=self._least, maximum=self._most, mean=mean)

    def _check(self) -> None:
        if self.zeros < self.count and not is_safe(self._squares):
            raise OutOfRangeError


def is_safe(squares: float) -> bool:
    """Whether a sum of squares that are not all zero lost nothing to overflow or underflow."""
    return _SAFE[0] <= squares <= _SAFE[1]
