"""Sums over blocks of numbers: of one side of a pair, and for the softmax of both."""

from __future__ import annotations

import math
import sys
import threading
from typing import Any, NamedTuple

import numpy as np

from paritas.core.results.items import Extremes

# --- Fast sums over a block: float32 within about a thousand elements, float64 beyond -------------

Array = np.ndarray[Any, Any]

# Elements per block: intermediate results (almost) stay in a core's own cache.
BLOCK = 1 << 16
# Elements summed in their own dtype: so few float32 lose less than 1e-6 of their sum, and a BLAS
# starts no threads for them. With 4096, a processor with fewer lanes (ARM's Neoverse N1) lost
# 1.5e-6.
_STRETCH = 1 << 10


class _Room(threading.local):
    """Buffers kept per thread: fresh memory for every block would be slower."""

    def __init__(self) -> None:
        self._arrays: dict[tuple[str, type], Array] = {}

    def get(self, name: str, like: Array) -> Array:
        """A buffer with the size and dtype of `like`; its old contents are lost."""
        return self.of(name, like.dtype.type, like.size)

    def of(self, name: str, dtype: type, size: int) -> Array:
        """A buffer of this size and dtype."""
        buffer = self._arrays.get((name, dtype))
        if buffer is None or buffer.size < size:
            # At least a block: after a small tensor the buffer would have to grow again.
            buffer = self._arrays[name, dtype] = np.empty(max(size, BLOCK), dtype)
        return buffer[:size]


ROOM = _Room()
_ONES: dict[type, Array] = {t: np.ones(_STRETCH, t) for t in (np.float32, np.float64)}


def dot(x: Array, y: Array) -> float:
    """The sum of products of two flat arrays of one float dtype, at most `BLOCK` long."""
    size = x.size
    if size <= _STRETCH:
        return float(x.dot(y))
    stretched_size = size - size % _STRETCH
    stretch_sum = _sum_by_stretch(x[:stretched_size], y[:stretched_size].reshape(-1, _STRETCH, 1))
    return (
        stretch_sum
        if stretched_size == size
        else stretch_sum + float(x[stretched_size:].dot(y[stretched_size:]))
    )


def total(x: Array) -> float:
    """The sum of a flat array of at most `BLOCK` numbers."""
    size, ones = x.size, _ONES[x.dtype.type]
    if size <= _STRETCH:
        return float(x.dot(ones[:size]))
    stretched_size = size - size % _STRETCH
    stretch_sum = _sum_by_stretch(x[:stretched_size], ones.reshape(_STRETCH, 1))
    return (
        stretch_sum
        if stretched_size == size
        else stretch_sum + float(x[stretched_size:].dot(ones[: size - stretched_size]))
    )


def _sum_by_stretch(x: Array, columns: Array) -> float:
    rows = np.matmul(x.reshape(-1, 1, _STRETCH), columns)
    return float(np.add.reduce(rows, axis=None, dtype=np.float64))


def widen_array(x: Array, name: str) -> Array:
    """The same numbers in float64, in the buffer of this name."""
    if x.dtype == np.float64:
        return x
    wide = ROOM.of(name, np.float64, x.size)
    np.copyto(wide, x)
    return wide


# --- One side of a pair of tensors, block by block ------------------------------------------------

# If the largest number is in this range, float32 sums squares without loss: none overflows, and
# those lost to underflow are negligible.
FLOAT32_RANGE = (1e-15, 1e15)
# Sums of squares in this range, and their products, lost nothing in float64 either.
_SAFE_SQUARES = (1e-100, 1e100)


class OutOfRangeError(Exception):
    """The squares of these numbers are out of the range of float64: they need scaling."""


class SideBlock(NamedTuple):
    """Figures of one side in a block; the extremes are NaN or infinite if a number is."""

    least: float
    most: float
    zeros: int
    total: float
    squares: float

    @classmethod
    def of(cls, x: Array) -> SideBlock:
        """Measure a block of numbers."""
        least, most = float(np.minimum.reduce(x)), float(np.maximum.reduce(x))
        zeros = 0
        if not (least > 0.0 or most < 0.0):
            zeros = int(np.count_nonzero(np.equal(x, 0.0, out=ROOM.of("mask", np.bool_, x.size))))
        return cls(least, most, zeros, total(x), dot(x, x))

    @property
    def fits(self) -> bool:
        """Whether float32 is sufficient."""
        largest = max(-self.least, self.most)
        return largest == 0.0 or FLOAT32_RANGE[0] <= largest <= FLOAT32_RANGE[1]

    @property
    def is_finite(self) -> bool:
        """Whether all numbers are finite."""
        return math.isfinite(self.least) and math.isfinite(self.most)


class SideTotals:
    """Totals of one side of a pair over all blocks so far, for its finite numbers."""

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

    def take(self, x: Array, side: SideBlock | None = None) -> None:
        """Add a block; `side` holds its figures, if they are known and finite."""
        if side is None:
            side = SideBlock.of(x)
            if not side.is_finite:
                self._count_kinds(x)
                x = x[np.isfinite(x)]
                if not x.size:
                    return
                side = SideBlock.of(x)
        if x.dtype == np.float32 and not side.fits:
            side = SideBlock.of(widen_array(x, "wide span"))
        self.count += x.size
        self.zeros += side.zeros
        self._least = min(self._least, side.least + 0.0)  # -0.0 becomes 0.0
        self._most = max(self._most, side.most + 0.0)
        self._total += side.total
        self._squares += side.squares

    def _count_kinds(self, x: Array) -> None:
        self.nans += int(np.count_nonzero(np.isnan(x)))
        self.positive_infinities += int(np.count_nonzero(x == math.inf))
        self.negative_infinities += int(np.count_nonzero(x == -math.inf))

    @property
    def is_finite(self) -> bool:
        """Whether every number was finite."""
        return not (self.nans or self.positive_infinities or self.negative_infinities)

    @property
    def largest(self) -> float:
        """The largest absolute finite number; 0 if there is none."""
        return max(-self._least, self._most, 0.0)

    @property
    def rms(self) -> float:
        """Root mean square of the finite numbers; NaN if there is none."""
        self.check()
        return math.sqrt(self._squares / self.count) if self.count else math.nan

    @property
    def extremes(self) -> Extremes:
        """Minimum, maximum and mean of the finite numbers."""
        if not self.count:
            return Extremes()
        self.check()
        mean = self._total / self.count
        return Extremes(minimum=self._least, maximum=self._most, mean=mean)

    def check(self) -> None:
        """Raise `OutOfRangeError` if the squares so far are out of the range of float64."""
        if self.zeros < self.count and not is_safe(self._squares):
            raise OutOfRangeError


def is_safe(squares: float) -> bool:
    """Whether a sum of squares, not all zero, lost nothing to overflow or underflow."""
    return _SAFE_SQUARES[0] <= squares <= _SAFE_SQUARES[1]


# --- The Kullback-Leibler divergence of two softmaxes, block by block -----------------------------

# Taylor coefficients of (e^d - 1 - d) / d^2, and the largest |d| for which that many suffice.
_TAYLOR = tuple(1.0 / math.factorial(k + 2) for k in range(4))
_REACH = tuple((1e-8 / (2.0 * c)) ** (1.0 / k) for k, c in enumerate((*_TAYLOR[1:], 1 / 720), 1))
# Float32 weights below this share of the largest are set to 0: they are negligible, but their
# products are subnormal and slow.
_NOTHING = 1e-20
_DEEP = math.log(_NOTHING)
# Differences with a larger spread than this have no common shift: a negligible weight may then
# matter.
_FAR_APART = 10.0
# Up to this, three terms of the logarithm are exact in float64.
_TINY = 1e-4


class SoftmaxDivergence:
    """Divergence of softmax(reference) from softmax(candidate), both over all numbers taken.

    With d = candidate - reference and E the mean under the reference's softmax, it is
    log E[e^d] - E[d] = log(1 + E[d] + E[e^d - 1 - d]) - E[d]. The term E[e^d - 1 - d] is summed
    separately, and d is taken relative to a shift that makes it small where the weight is. So a
    divergence of 1e-20 keeps its digits, which a difference of two logarithms would lose.
    """

    def __init__(self) -> None:
        self._top = -math.inf  # the largest of the reference: all weights are relative to it
        self._shift = 0.0
        # Sums of the weights, of these times d - shift, and of these times e^(d - shift) - 1 - ...
        self._weights, self._first, self._rest = 0.0, 0.0, 0.0
        # Once differences have no common shift: the sum of e^(candidate - summit) instead.
        self._exponentials, self._summit = 0.0, -math.inf

    def take_same(self, r: Array, least: float, most: float) -> None:
        """Add a block in which both sides are equal."""
        leads = self._lead(most, 0.0)
        self._add(total(self._weigh(r, least)), 0.0, 0.0, shift=0.0, leads=leads)
        if self._is_far:
            self._add_exponentials(r)

    def take(self, r: Array, c: Array, d: Array, span: tuple[float, float], largest: float) -> None:
        """Add a block.

        Args:
            r: the reference's numbers, all finite.
            c: the candidate's numbers, all finite.
            d: c - r.
            span: minimum and maximum of r.
            largest: maximum of |d|.
        """
        heaviest = int(r.argmax())
        shift = float(d[heaviest])
        bound = largest + abs(shift)
        if bound > _FAR_APART:
            r, c = widen_array(r, "wide r"), widen_array(c, "wide c")
            d = np.subtract(c, r, out=ROOM.get("wide d", r))
            shift = float(d[heaviest])
        apart = np.subtract(d, shift, out=ROOM.get("apart", d))
        if bound > _FAR_APART:
            bound = max(float(np.maximum.reduce(apart)), -float(np.minimum.reduce(apart)))
            if bound > _FAR_APART:
                self._go_far()
        leads = self._lead(span[1], shift)
        w = self._weigh(r, span[0])
        weights, first, rest = total(w), dot(w, apart), 0.0
        if self._is_far:
            self._add_exponentials(c)
        elif bound > _REACH[-1]:
            t = np.expm1(apart, out=ROOM.get("t", w))
            rest = dot(w, np.subtract(t, apart, out=t))
        else:
            rest = _sum_exp_remainders(w, apart, bound)
        self._add(weights, first, rest, shift=shift, leads=leads)

    def finish(self) -> float:
        """The divergence of all blocks; 0 without blocks."""
        if not self._weights:
            return 0.0
        mean = self._first / self._weights
        if self._is_far:
            divergence = math.log(self._exponentials) + self._summit - self._top
            divergence -= math.log(self._weights) + mean
        else:
            rest = self._rest / self._weights
            divergence = rest - _log_remainder(mean + rest)
        return divergence if math.isnan(divergence) else max(divergence, 0.0)

    @property
    def _is_far(self) -> bool:
        return self._summit > -math.inf

    def _go_far(self) -> None:
        """Switch to sums without a common shift, because the differences spread too far."""
        if self._is_far:
            return
        self._summit = self._top + self._shift if self._weights else -sys.float_info.max
        self._exponentials = self._weights + self._first + self._rest
        self._first += self._shift * self._weights
        self._shift = self._rest = 0.0

    def _lead(self, most: float, shift: float) -> bool:
        """Rescale for a block with this maximum; whether it is heavier than all before."""
        if self._weights and abs(self._shift - shift) > _FAR_APART:
            self._go_far()
        if most <= self._top:
            return False
        lowered = math.exp(self._top - most)
        self._weights *= lowered
        self._first *= lowered
        self._rest *= lowered
        self._top = most
        return True

    def _weigh(self, r: Array, least: float) -> Array:
        """e^(r - top)."""
        w = np.subtract(r, self._top, out=ROOM.get("w", r))
        np.exp(w, out=w)
        if least - self._top < _DEEP and w.dtype == np.float32:
            np.copyto(w, 0.0, where=w < _NOTHING)
        return w

    def _add(self, weights: float, first: float, rest: float, *, shift: float, leads: bool) -> None:
        """Add sums relative to a shift; the shift of the heaviest block is kept."""
        if self._is_far:
            self._weights += weights
            self._first += first + shift * weights
            return
        kept_sums, moved = (weights, first, rest), (self._weights, self._first, self._rest)
        delta = self._shift - shift
        if leads:
            self._shift = shift
        else:
            kept_sums, moved, delta = moved, kept_sums, -delta
        if not moved[0]:
            self._weights, self._first, self._rest = kept_sums
            return
        growth, weights = math.expm1(delta), moved[0]
        self._weights = kept_sums[0] + weights
        self._first = kept_sums[1] + moved[1] + delta * weights
        self._rest = (
            kept_sums[2]
            + weights * _exp_remainder(delta)
            + growth * moved[1]
            + (1 + growth) * moved[2]
        )

    def _add_exponentials(self, c: Array) -> None:
        c = widen_array(c, "wide c")
        summit = float(np.maximum.reduce(c))
        if summit > self._summit:
            self._exponentials *= math.exp(self._summit - summit)
            self._summit = summit
        t = np.subtract(c, self._summit, out=ROOM.get("t", c))
        self._exponentials += total(np.exp(t, out=t))


def _exp_remainder(d: float) -> float:
    """e^d - 1 - d."""
    if abs(d) > _REACH[-1]:
        return math.expm1(d) - d
    return sum(coefficient * d ** (k + 2) for k, coefficient in enumerate(_TAYLOR))


def _log_remainder(x: float) -> float:
    """Compute x - log(1 + x)."""
    if abs(x) > _TINY:
        return x - math.log1p(x) if x > -1.0 else math.nan
    return x * x * (0.5 - x * (1 / 3 - x / 4))


def _sum_exp_remainders(w: Array, d: Array, largest: float) -> float:
    """Sum of w (e^d - 1 - d), with as many terms as float32 needs; overwrites w."""
    powers = np.multiply(d, d, out=ROOM.get("t", d))
    remainder_sum = _TAYLOR[0] * dot(w, powers)
    weighted = w
    for coefficient, reach in zip(_TAYLOR[1:], _REACH, strict=False):
        if largest <= reach:
            break
        weighted = np.multiply(weighted, d, out=w)
        remainder_sum += coefficient * dot(weighted, powers)
    return remainder_sum
