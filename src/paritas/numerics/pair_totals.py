"""What the figures of a pair are put together from, on the way over both tensors block by block."""

from __future__ import annotations

import math
import sys
import threading
from collections import Counter
from typing import Any, NamedTuple

import numpy as np

from paritas.results.figures import Extremes, Metrics, PairFigures

# --- Sums over a block of numbers, fast: float32 within a few thousand elements, float64 beyond ---

Array = np.ndarray[Any, Any]

# Elements in a block: what is made of one stays in a core's own cache, or nearly so.
BLOCK = 1 << 16
# Elements added up in their own dtype: so few float32 lose less than 1e-6 of their sum, and a BLAS
# does not call up its threads for so few. Of 4096, one that adds in fewer lanes (ARM's Neoverse N1)
# lost 1.5e-6.
_STRETCH = 1 << 10
# A sum of squares about zero is this many times that about the mean, and cancels when centred.
_CANCELS = 4.0
# Where one side's squares are so much larger, products are no longer to be had from squares alone.
_ALIKE = 4.0


class _PairRoom(threading.local):
    """Memory to work in, kept per thread: fresh pages for every block would cost more."""

    def __init__(self) -> None:
        self._arrays: dict[tuple[str, type], Array] = {}

    def get(self, name: str, like: Array) -> Array:
        """Room for as many numbers of that dtype; what it held before is gone."""
        return self.of(name, like.dtype.type, like.size)

    def of(self, name: str, dtype: type, size: int) -> Array:
        found = self._arrays.get((name, dtype))
        if found is None:
            # Sized by the first block, a small tensor's threads would have to make room again.
            found = self._arrays[name, dtype] = np.empty(BLOCK, dtype)
        return found[:size]


ROOM = _PairRoom()
_ONES: dict[type, Array] = {t: np.ones(_STRETCH, t) for t in (np.float32, np.float64)}


def dot(x: Array, y: Array) -> float:
    """The sum of products of two flat arrays of one float dtype, at most `BLOCK` long."""
    size = x.size
    if size <= _STRETCH:
        return float(x.dot(y))
    whole = size - size % _STRETCH
    found = _sum_by_stretch(x[:whole], y[:whole].reshape(-1, _STRETCH, 1))
    return found if whole == size else found + float(x[whole:].dot(y[whole:]))


def total(x: Array) -> float:
    """The sum of a flat array of at most `BLOCK` numbers."""
    size, ones = x.size, _ONES[x.dtype.type]
    if size <= _STRETCH:
        return float(x.dot(ones[:size]))
    whole = size - size % _STRETCH
    found = _sum_by_stretch(x[:whole], ones.reshape(_STRETCH, 1))
    return found if whole == size else found + float(x[whole:].dot(ones[: size - whole]))


def _sum_by_stretch(x: Array, columns: Array) -> float:
    rows = np.matmul(x.reshape(-1, 1, _STRETCH), columns)
    return float(np.add.reduce(rows, axis=None, dtype=np.float64))


def widened(x: Array, name: str) -> Array:
    """The same numbers in float64, in the room of that name."""
    if x.dtype == np.float64:
        return x
    wide = ROOM.of(name, np.float64, x.size)
    np.copyto(wide, x)
    return wide


class Comoments(NamedTuple):
    """Means of both sides and of their difference, and the squares and products about them."""

    n: int = 0
    mean_r: float = 0.0
    mean_c: float = 0.0
    mean_d: float = 0.0
    rr: float = 0.0
    cc: float = 0.0
    dd: float = 0.0
    rc: float = 0.0

    def merge(self, other: Comoments) -> Comoments:
        """Those of two blocks together; nothing cancels in it, however far apart their means."""
        if not self.n:
            return other
        n = self.n + other.n
        share = other.n / n
        r, c, d = (
            other.mean_r - self.mean_r,
            other.mean_c - self.mean_c,
            other.mean_d - self.mean_d,
        )
        weight = self.n * share
        return Comoments(
            n,
            self.mean_r + r * share,
            self.mean_c + c * share,
            self.mean_d + d * share,
            self.rr + other.rr + r * r * weight,
            self.cc + other.cc + c * c * weight,
            self.dd + other.dd + d * d * weight,
            self.rc + other.rc + r * c * weight,
        )

    @property
    def about_zero(self) -> tuple[float, float, float]:
        """Squares of the reference and of the candidate, and their products, as they are."""
        r, c = self.mean_r, self.mean_c
        return self.rr + self.n * r * r, self.cc + self.n * c * c, self.rc + self.n * r * c


def alike(rr: float, cc: float) -> bool:
    """Whether sums of squares are near enough to tell the sum of products by."""
    return rr <= _ALIKE * cc and cc <= _ALIKE * rr


def comoments(r: Array, c: Array, sums: tuple[float, ...]) -> Comoments:
    """The comoments of a block.

    Args:
        r: the reference's numbers.
        c: the candidate's.
        sums: of r and c, and of r*r, c*c and (c - r)*(c - r).
    """
    n = r.size
    total_r, total_c, rr, cc, dd = sums
    mean_r, mean_c = total_r / n, total_c / n
    total_d = total_c - total_r
    squares = (total_r * mean_r, total_c * mean_c, total_d * total_d / n)
    about = (rr - squares[0], cc - squares[1], dd - squares[2])
    if any(square > _CANCELS * rest for square, rest in zip(squares, about, strict=True)):
        return _centred_comoments(r, c, (mean_r, mean_c))
    rc = (rr + cc - dd) / 2.0 if alike(rr, cc) else dot(r, c)
    return Comoments(n, mean_r, mean_c, mean_c - mean_r, *about, rc - total_r * mean_c)


def _centred_comoments(r: Array, c: Array, means: tuple[float, float]) -> Comoments:
    """The same where a mean outweighs what varies about it: it is taken off before squaring."""
    n = r.size
    anchors = [_find_anchor(side, mean) for side, mean in zip((r, c), means, strict=True)]
    x = np.subtract(widened(r, "wide r"), anchors[0], out=ROOM.of("x", np.float64, n))
    y = np.subtract(widened(c, "wide c"), anchors[1], out=ROOM.of("y", np.float64, n))
    total_x, total_y = total(x), total(y)
    xx, yy, xy = dot(x, x), dot(y, y), dot(x, y)
    e = np.subtract(y, x, out=y)
    total_e = total(e)
    return Comoments(
        n,
        anchors[0] + total_x / n,
        anchors[1] + total_y / n,
        anchors[1] - anchors[0] + total_e / n,
        max(xx - total_x * total_x / n, 0.0),
        max(yy - total_y * total_y / n, 0.0),
        max(dot(e, e) - total_e * total_e / n, 0.0),
        xy - total_x * total_y / n,
    )


def _find_anchor(side: Array, mean: float) -> float:
    """A number to be taken off a side: its mean, and exactly its value where it is constant."""
    first = float(side[0])
    return first if bool((side == side[0]).all()) else mean


# --- One side of a pair of tensors, block by block: how its numbers are ---------------------------

# Largest numbers whose squares float32 adds up without loss: none overflows, and those that it
# loses to underflow are nothing beside the largest.
FLOAT32_RANGE = (1e-15, 1e15)
# Sums of squares within these bounds lost nothing of float64 either, nor do their products.
_SAFE_SQUARES = (1e-100, 1e100)


class OutOfRangeError(Exception):
    """The squares of these numbers leave float64: they have to be scaled first."""


class SideBlock(NamedTuple):
    """The numbers of one side in a block; the extremes are NaN or infinite if a number is."""

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
        """Whether float32 will do."""
        largest = max(-self.least, self.most)
        return largest == 0.0 or FLOAT32_RANGE[0] <= largest <= FLOAT32_RANGE[1]

    @property
    def is_finite(self) -> bool:
        """Whether all of its numbers are."""
        return math.isfinite(self.least) and math.isfinite(self.most)


class SideTotals:
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

    def take(self, x: Array, side: SideBlock | None = None) -> None:
        """Add a block; `side` is what it measures, if that is known and finite."""
        if side is None:
            side = SideBlock.of(x)
            if not side.is_finite:
                self._count_kinds(x)
                x = x[np.isfinite(x)]
                if not x.size:
                    return
                side = SideBlock.of(x)
        if x.dtype == np.float32 and not side.fits:
            side = SideBlock.of(widened(x, "wide span"))
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
    return _SAFE_SQUARES[0] <= squares <= _SAFE_SQUARES[1]


# --- The Kullback-Leibler divergence of two softmaxes, block by block -----------------------------

# Taylor coefficients of (e^d - 1 - d) / d^2, and the largest |d| for which that many suffice.
_TAYLOR = tuple(1.0 / math.factorial(k + 2) for k in range(4))
_REACH = tuple((1e-8 / (2.0 * c)) ** (1.0 / k) for k, c in enumerate((*_TAYLOR[1:], 1 / 720), 1))
# Weights of float32 below this share of the largest are left out: they are nothing, but their
# products are subnormal, which costs processors dear.
_NOTHING = 1e-20
_DEEP = math.log(_NOTHING)
# Differences that are further apart than this have no common shift: a weight that is nothing may
# then come to something.
_FAR_APART = 10.0
# Up to this, three terms of a logarithm are all that float64 can tell.
_TINY = 1e-4


class SoftmaxDivergence:
    """Divergence of softmax(reference) from softmax(candidate), both over all numbers taken.

    With d = candidate - reference and E the mean under the reference's softmax, it is
    log E[e^d] - E[d] = log(1 + E[d] + E[e^d - 1 - d]) - E[d]. The last of these is summed by
    itself, and d is taken relative to a shift that makes it small where the weight is: so a
    divergence of 1e-20 keeps its digits, which the difference of two logarithms would have lost.
    """

    def __init__(self) -> None:
        self._top = -math.inf  # the largest of the reference: all weights are relative to it
        self._shift = 0.0
        # Sums of the weights, of these times d - shift, and of these times e^(d - shift) - 1 - ...
        self._weights, self._first, self._rest = 0.0, 0.0, 0.0
        # As soon as differences have no common shift: the sum of e^(candidate - summit) instead.
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
            c: the candidate's, likewise.
            d: c - r.
            span: the least and the greatest of r.
            largest: of all |d|.
        """
        heaviest = int(r.argmax())
        shift = float(d[heaviest])
        bound = largest + abs(shift)
        if bound > _FAR_APART:
            r, c = widened(r, "wide r"), widened(c, "wide c")
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
        """The divergence of all blocks; 0 if there was none."""
        if not self._weights:
            return 0.0
        mean = self._first / self._weights
        if self._is_far:
            found = math.log(self._exponentials) + self._summit - self._top
            found -= math.log(self._weights) + mean
        else:
            rest = self._rest / self._weights
            found = rest - _log_remainder(mean + rest)
        return found if math.isnan(found) else max(found, 0.0)

    @property
    def _is_far(self) -> bool:
        return self._summit > -math.inf

    def _go_far(self) -> None:
        """Differences are too far apart to have a common shift: go on without one."""
        if self._is_far:
            return
        self._summit = self._top + self._shift if self._weights else -sys.float_info.max
        self._exponentials = self._weights + self._first + self._rest
        self._first += self._shift * self._weights
        self._shift = self._rest = 0.0

    def _lead(self, most: float, shift: float) -> bool:
        """Whether a block of that largest number and that shift is heavier than all before."""
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
        """Add what was summed about a shift; that of the heaviest block is the one to keep."""
        if self._is_far:
            self._weights += weights
            self._first += first + shift * weights
            return
        kept, moved = (weights, first, rest), (self._weights, self._first, self._rest)
        delta = self._shift - shift
        if leads:
            self._shift = shift
        else:
            kept, moved, delta = moved, kept, -delta
        if not moved[0]:
            self._weights, self._first, self._rest = kept
            return
        growth, weights = math.expm1(delta), moved[0]
        self._weights = kept[0] + weights
        self._first = kept[1] + moved[1] + delta * weights
        self._rest = (
            kept[2] + weights * _exp_remainder(delta) + growth * moved[1] + (1 + growth) * moved[2]
        )

    def _add_exponentials(self, c: Array) -> None:
        c = widened(c, "wide c")
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
    """Difference of x and log(1 + x)."""
    if abs(x) > _TINY:
        return x - math.log1p(x) if x > -1.0 else math.nan
    return x * x * (0.5 - x * (1 / 3 - x / 4))


def _sum_exp_remainders(w: Array, d: Array, largest: float) -> float:
    """Sum of w (e^d - 1 - d), from as many terms as float32 can tell; takes w for its own."""
    powers = np.multiply(d, d, out=ROOM.get("t", d))
    found = _TAYLOR[0] * dot(w, powers)
    weighted = w
    for coefficient, reach in zip(_TAYLOR[1:], _REACH, strict=False):
        if largest <= reach:
            break
        weighted = np.multiply(weighted, d, out=w)
        found += coefficient * dot(weighted, powers)
    return found


# --- Both sides together --------------------------------------------------------------------------


class WorstDifference(NamedTuple):
    """The element of a largest difference."""

    size: float = 0.0
    place: int = -1
    reference: float = 0.0
    candidate: float = 0.0

    @property
    def difference(self) -> float:
        """In float64: `size` may be of float32, and an element is not."""
        return abs(self.candidate - self.reference)


class PairTotals:
    """Running totals over the blocks of a pair of tensors."""

    def __init__(self, *, has_ulps: bool) -> None:
        self.spans = (SideTotals(), SideTotals())
        self._comoments = Comoments()
        self._counts: Counter[str] = Counter()
        self._squares = 0.0  # of the differences
        self._absolute = 0.0
        self._relative = 0.0
        self._farthest = WorstDifference()
        self._steepest = WorstDifference()
        self._max_ulp = 0.0 if has_ulps else None
        self._first_unlike: WorstDifference | None = None
        self._softmax = SoftmaxDivergence()

    def take(self, offset: int, r: Array, c: Array, *, same: bool) -> Array | None:
        """Add a block.

        Args:
            offset: flat index of its first element.
            r: the reference's numbers, float32 or float64.
            c: the candidate's, of the same dtype.
            same: whether their bits are known to be the same.

        Returns:
            Indices of the numbers that are finite on both sides; None if all are.
        """
        side = SideBlock.of(r)
        sides = (side, side if same else SideBlock.of(c))
        if all(each.is_finite for each in sides):
            for span, x, each in zip(self.spans, (r, c), sides, strict=True):
                span.take(x, each)
            self._take_finite(offset, None, r, c, sides)
            return None
        for span, x in zip(self.spans, (r, c), strict=True):
            span.take(x)
        unlike = ~((r == c) | (np.isnan(r) & np.isnan(c)))
        kept = np.isfinite(r) & np.isfinite(c)
        unlike &= ~kept
        self._count_unlike(offset, r, c, unlike)
        places = np.flatnonzero(kept)
        if places.size:
            r, c = r[places], c[places]
            self._take_finite(offset, places, r, c, (SideBlock.of(r), SideBlock.of(c)))
        return places

    def take_ulps(self, steps: float) -> None:
        """Add the largest distance in ulps of a block."""
        if self._max_ulp is not None:
            self._max_ulp = max(self._max_ulp, steps)

    def _count_unlike(self, offset: int, r: Array, c: Array, unlike: Array) -> None:
        found = int(np.count_nonzero(unlike))
        self._counts["unlike"] += found
        if found and self._first_unlike is None:
            place = int(unlike.argmax())
            self._first_unlike = WorstDifference(
                math.inf, offset + place, float(r[place]), float(c[place])
            )

    def _take_finite(
        self,
        offset: int,
        places: Array | None,
        r: Array,
        c: Array,
        sides: tuple[SideBlock, SideBlock],
    ) -> None:
        if r.dtype == np.float32 and not all(side.fits for side in sides):
            r, c = widened(r, "wide r"), widened(c, "wide c")
            sides = (SideBlock.of(r), SideBlock.of(c))
        side_r, side_c = sides
        d = np.subtract(c, r, out=ROOM.get("d", r))
        moduli = np.abs(d, out=ROOM.get("moduli", r))
        largest = float(np.maximum.reduce(moduli))
        if largest == 0.0:
            self._take_equal(r, side_r)
            return
        low, high = FLOAT32_RANGE
        if r.dtype == np.float32 and not low <= largest <= high:
            wide = widened(r, "wide r"), widened(c, "wide c")
            self._take_finite(offset, places, *wide, (SideBlock.of(wide[0]), SideBlock.of(wide[1])))
            return
        equal = np.equal(moduli, 0.0, out=ROOM.of("mask", np.bool_, r.size))
        self._counts["mismatched"] += r.size - int(np.count_nonzero(equal))
        if largest > self._farthest.size:
            self._farthest = _find_worst(largest, moduli, offset, places, (r, c))
        self._absolute += total(moduli)
        squares = dot(d, d)
        self._squares += squares
        sums = (side_r.total, side_c.total, side_r.squares, side_c.squares, squares)
        self._comoments = self._comoments.merge(comoments(r, c, sums))
        self._softmax.take(r, c, d, (side_r.least, side_r.most), largest)
        self._take_ratios(offset, places, (r, c), moduli, equal if side_r.zeros else None)

    def _take_equal(self, r: Array, side: SideBlock) -> None:
        """Add a block whose numbers are equal."""
        sums = (side.total, side.total, side.squares, side.squares, 0.0)
        self._comoments = self._comoments.merge(comoments(r, r, sums))
        self._softmax.take_same(r, side.least, side.most)

    def _take_ratios(
        self,
        offset: int,
        places: Array | None,
        pair: tuple[Array, Array],
        moduli: Array,
        equal: Array | None,
    ) -> None:
        """Add the differences relative to the reference; `equal` where some of that are zero."""
        if self._steepest.size == math.inf:
            return  # nor will the mean be any other
        ratios = np.abs(pair[0], out=ROOM.get("ratios", moduli))
        np.divide(moduli, ratios, out=ratios)
        if equal is not None:
            np.copyto(ratios, 0.0, where=equal)  # 0 / 0
        largest, found = float(np.maximum.reduce(ratios)), total(ratios)
        if (
            not found < math.inf and moduli.dtype == np.float32
        ):  # the quotient may just be too large
            wide = widened(pair[0], "wide r"), widened(pair[1], "wide c")
            apart = np.subtract(wide[1], wide[0], out=ROOM.get("wide d", wide[0]))
            self._take_ratios(offset, places, wide, np.abs(apart, out=apart), equal)
            return
        self._relative += found
        if largest > self._steepest.size:
            self._steepest = _find_worst(largest, ratios, offset, places, pair)

    def figures(self, shape: tuple[int, ...]) -> PairFigures:
        """All of them.

        Raises:
            OutOfRangeError: a sum of squares left float64.
        """
        finite = all(span.is_finite for span in self.spans)
        compared, unlike = self._comoments.n, self._counts["unlike"]
        mean_rel = self._relative / compared if compared else 0.0
        reference, candidate = (span.extremes for span in self.spans)
        return PairFigures(
            reference=reference,
            candidate=candidate,
            metrics=self._metrics(shape),
            mean_rel=math.inf if unlike else mean_rel,
            kl_divergence=self._softmax.finish() if finite else math.nan,
        )

    def _metrics(self, shape: tuple[int, ...]) -> Metrics:
        unlike, n = self._counts["unlike"], self._comoments.n
        worst = self._first_unlike or (self._farthest if self._farthest.size else None)
        about, dd = self._comoments, self._squares
        rr, cc, rc = about.about_zero
        steepest = self._steepest
        max_rel = (
            steepest.difference / abs(steepest.reference) if steepest.reference else steepest.size
        )
        reference, candidate = self.spans
        max_ulp = math.inf if unlike and self._max_ulp is not None else self._max_ulp
        return Metrics(
            numel=math.prod(shape),
            mismatched=self._counts["mismatched"] + unlike,
            max_abs=math.inf if unlike else self._farthest.difference,
            max_abs_index=_unravel(worst.place, shape) if worst else None,
            max_abs_reference=worst.reference if worst else None,
            max_abs_candidate=worst.candidate if worst else None,
            max_rel=math.inf if unlike else max_rel,
            mean_abs=math.inf if unlike else self._absolute / max(n, 1),
            rmse=math.inf if unlike else math.sqrt(dd / max(n, 1)),
            rel_l2=math.inf if unlike else _relative_norm(dd, rr),
            cosine=math.nan if unlike else 1.0 if rr == cc == 0.0 else _cosine(rr, cc, dd, rc),
            pcc=math.nan if unlike else _cosine(about.rr, about.cc, about.dd, about.rc),
            max_ulp=max_ulp,
            nan_reference=reference.nans,
            nan_candidate=candidate.nans,
            posinf_reference=reference.positive_infinities,
            posinf_candidate=candidate.positive_infinities,
            neginf_reference=reference.negative_infinities,
            neginf_candidate=candidate.negative_infinities,
            zero_reference=reference.zeros,
            zero_candidate=candidate.zeros,
            nonfinite_mismatches=unlike,
        )


def _find_worst(
    size: float, sizes: Array, offset: int, places: Array | None, pair: tuple[Array, Array]
) -> WorstDifference:
    at = int(sizes.argmax())
    place = at if places is None else int(places[at])
    return WorstDifference(size, offset + place, float(pair[0][at]), float(pair[1][at]))


def _relative_norm(dd: float, rr: float) -> float:
    if dd == 0.0:
        return 0.0
    return math.sqrt(dd) / math.sqrt(rr) if rr else math.inf


def _cosine(rr: float, cc: float, dd: float, rc: float) -> float:
    """The cosine of the angle between two vectors; NaN if one is zero.

    Of vectors of like length it is taken from their difference: 1 - cosine then keeps its digits,
    of which a product would leave those above 1e-7 if it was summed in float32.
    """
    if not (rr > 0.0 and cc > 0.0):
        return math.nan
    r, c = math.sqrt(rr), math.sqrt(cc)
    found = 1.0 - (dd - (r - c) ** 2) / (2.0 * r * c) if alike(rr, cc) else rc / (r * c)
    return found if math.isnan(found) else max(-1.0, min(1.0, found))


def _unravel(flat: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    index: list[int] = []
    for length in reversed(shape):
        flat, position = divmod(flat, length)
        index.append(position)
    return tuple(reversed(index))
