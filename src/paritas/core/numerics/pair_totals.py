"""Running totals over the blocks of a pair of tensors; all figures are computed from them."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from paritas.core.numerics.block_sums import (
    FLOAT32_RANGE,
    ROOM,
    Array,
    SideBlock,
    SideTotals,
    SoftmaxDivergence,
    dot,
    is_safe,
    total,
    widened,
)
from paritas.core.results.items import Metrics, PairFigures

if TYPE_CHECKING:
    from collections.abc import Sequence

# --- Means, squares and products ------------------------------------------------------------------

# Above this ratio of squares about zero to squares about the mean, centring cancels digits.
_CANCELS = 4.0
# Above this ratio of one side's squares to the other's, squares alone do not give products.
_ALIKE = 4.0


class AnchoredSums(NamedTuple):
    """Sums over the finite numbers of both sides, each side relative to its own anchor."""

    r: float
    c: float
    rr: float
    cc: float
    rc: float


class Comoments(NamedTuple):
    """Means of both sides and of their difference, and the squares and products about them.

    A mean is stored as a number near the data plus the rest, `beyond`: means of blocks may differ
    by less than the last digit of a large mean.
    """

    n: int = 0
    mean_r: float = 0.0
    mean_c: float = 0.0
    mean_d: float = 0.0
    rr: float = 0.0
    cc: float = 0.0
    dd: float = 0.0
    rc: float = 0.0
    beyond: tuple[float, float, float] = (0.0, 0.0, 0.0)

    def merge(self, other: Comoments) -> Comoments:
        """Merge two blocks without cancellation, however different their means are."""
        if not self.n:
            return other
        n = self.n + other.n
        share = other.n / n
        weight = self.n * share
        rest, theirs = self.beyond, other.beyond
        r = (other.mean_r - self.mean_r) + (theirs[0] - rest[0])
        c = (other.mean_c - self.mean_c) + (theirs[1] - rest[1])
        d = (other.mean_d - self.mean_d) + (theirs[2] - rest[2])
        return Comoments(
            n,
            self.mean_r,
            self.mean_c,
            self.mean_d,
            self.rr + other.rr + r * r * weight,
            self.cc + other.cc + c * c * weight,
            self.dd + other.dd + d * d * weight,
            self.rc + other.rc + r * c * weight,
            (rest[0] + r * share, rest[1] + c * share, rest[2] + d * share),
        )

    @classmethod
    def from_sums(cls, n: int, anchors: tuple[float, float], sums: AnchoredSums) -> Comoments:
        """Comoments from sums relative to anchors; anchors near the data avoid cancellation."""
        if not n:
            return cls()
        mean_r, mean_c = anchors[0] + sums.r / n, anchors[1] + sums.c / n
        rr = max(sums.rr - sums.r * sums.r / n, 0.0)
        cc = max(sums.cc - sums.c * sums.c / n, 0.0)
        rc = sums.rc - sums.r * sums.c / n
        return cls(n, mean_r, mean_c, mean_c - mean_r, rr, cc, rr + cc - 2.0 * rc, rc)

    @property
    def about_zero(self) -> tuple[float, float, float]:
        """Sums of squares of the reference and the candidate, and of their products."""
        r, c = self.mean_r + self.beyond[0], self.mean_c + self.beyond[1]
        return self.rr + self.n * r * r, self.cc + self.n * c * c, self.rc + self.n * r * c


def alike(rr: float, cc: float) -> bool:
    """Whether sums of squares are close enough to compute the sum of products from them."""
    return rr <= _ALIKE * cc and cc <= _ALIKE * rr


def comoments(r: Array, c: Array, sums: tuple[float, ...]) -> Comoments:
    """The comoments of a block; `sums` are those of r, c, r*r, c*c and (c - r)*(c - r)."""
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
    """The comoments of a block with a large mean, which is subtracted before squaring."""
    n = r.size
    anchors = [_find_anchor(side, mean) for side, mean in zip((r, c), means, strict=True)]
    x = np.subtract(widened(r, "wide r"), anchors[0], out=ROOM.of("x", np.float64, n))
    y = np.subtract(widened(c, "wide c"), anchors[1], out=ROOM.of("y", np.float64, n))
    total_x, total_y = total(x), total(y)
    xx, yy, xy = dot(x, x), dot(y, y), dot(x, y)
    e = np.subtract(y, x, out=y)
    total_e = total(e)
    difference = anchors[1] - anchors[0]
    rounded = difference - anchors[1]
    # The exact rounding error of `difference`.
    lost = (anchors[1] - (difference - rounded)) - (anchors[0] + rounded)
    return Comoments(
        n,
        anchors[0],
        anchors[1],
        difference,
        max(xx - total_x * total_x / n, 0.0),
        max(yy - total_y * total_y / n, 0.0),
        max(dot(e, e) - total_e * total_e / n, 0.0),
        xy - total_x * total_y / n,
        (total_x / n, total_y / n, total_e / n + lost),
    )


def _find_anchor(side: Array, mean: float) -> float:
    """The number to subtract from a side: its mean, or exactly its value if it is constant."""
    first = float(side[0])
    return first if bool((side == side[0]).all()) else mean


# --- Both sides together --------------------------------------------------------------------------


_COUNTED = tuple(
    f"{kind}_{side}"
    for kind in ("nan", "posinf", "neginf", "zero")
    for side in ("reference", "candidate")
)


class WorstDifference(NamedTuple):
    """The element of a largest difference."""

    size: float = 0.0
    place: int = -1
    reference: float = 0.0
    candidate: float = 0.0

    @property
    def difference(self) -> float:
        """The difference in float64, while `size` may be rounded to float32."""
        return abs(self.candidate - self.reference)


@dataclass(frozen=True)
class PairSums:
    """The sums of a whole pair, computed by any back end; the metrics follow from them.

    Attributes:
        compared: number of elements that are finite on both sides.
        counts: each side's NaNs, infinities and zeros; `mismatched` among the compared elements;
            `unlike`: positions where only one side is finite, or the infinities differ.
        comoments: of the compared elements; a complex element counts as two reals.
        squares: sum of squares of the differences, times `scale` squared.
        absolute: sum of the absolute differences, times `scale`.
        worst: the first unlike position, else the first largest difference.
        scale: the factor applied to all numbers before summing.
    """

    compared: int
    counts: Counter[str]
    comoments: Comoments
    squares: float
    absolute: float
    max_abs: float
    max_rel: float
    max_ulp: float | None
    worst: WorstDifference | None
    scale: float = 1.0

    @property
    def is_safe(self) -> bool:
        """Whether no sum of squares has overflowed or underflowed, as float64 inputs can."""
        norms = zip(("reference", "candidate"), self.comoments.about_zero[:2], strict=True)
        return self.counts["unlike"] > 0 or all(
            is_safe(norm) or self.counts[f"zero_{side}"] == self.compared for side, norm in norms
        )

    def metrics(self, shape: Sequence[int]) -> Metrics:
        """The metrics of a pair of this shape; infinite if there are unlike positions."""
        counts, about, n = self.counts, self.comoments, max(self.compared, 1)
        unlike, worst = counts["unlike"], self.worst
        rr, cc, rc = about.about_zero
        differences: dict[str, Any] = {
            "max_abs": self.max_abs,
            "max_rel": self.max_rel,
            "mean_abs": self.absolute / n / self.scale,
            "rmse": math.sqrt(self.squares / n) / self.scale,
            "rel_l2": _relative_norm(self.squares, rr),
            "cosine": 1.0 if rr == cc == 0.0 else _cosine(rr, cc, self.squares, rc),
            "pcc": _cosine(about.rr, about.cc, about.dd, about.rc),
        }
        if unlike:
            differences = dict.fromkeys(differences, math.inf) | {
                "cosine": math.nan,
                "pcc": math.nan,
            }
        return Metrics(
            numel=math.prod(shape),
            mismatched=counts["mismatched"] + unlike,
            max_abs_index=unravel(worst.place, shape) if worst else None,
            max_abs_reference=worst.reference if worst else None,
            max_abs_candidate=worst.candidate if worst else None,
            max_ulp=math.inf if unlike and self.max_ulp is not None else self.max_ulp,
            **differences,
            **{name: counts[name] for name in _COUNTED},
            nonfinite_mismatches=unlike,
        )


class PairTotals:
    """Running totals over the blocks of a pair of tensors.

    Args:
        has_ulps: whether the two dtypes have common ulps.
        softmax: whether to compute the divergence of their softmaxes, the most expensive figure.
    """

    def __init__(self, *, has_ulps: bool, softmax: bool = True) -> None:
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
        self._softmax = SoftmaxDivergence() if softmax else None

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
        if self._softmax is not None:
            self._softmax.take(r, c, d, (side_r.least, side_r.most), largest)
        self._take_ratios(offset, places, (r, c), moduli, equal if side_r.zeros else None)

    def _take_equal(self, r: Array, side: SideBlock) -> None:
        """Add a block of equal numbers."""
        sums = (side.total, side.total, side.squares, side.squares, 0.0)
        self._comoments = self._comoments.merge(comoments(r, r, sums))
        if self._softmax is not None:
            self._softmax.take_same(r, side.least, side.most)

    def _take_ratios(
        self,
        offset: int,
        places: Array | None,
        pair: tuple[Array, Array],
        moduli: Array,
        equal: Array | None,
    ) -> None:
        """Add relative differences; `equal` is given if the reference has zeros."""
        if self._steepest.size == math.inf:
            return  # the mean stays infinite too
        ratios = np.abs(pair[0], out=ROOM.get("ratios", moduli))
        np.divide(moduli, ratios, out=ratios)
        if equal is not None:
            np.copyto(ratios, 0.0, where=equal)  # 0 / 0
        largest, found = float(np.maximum.reduce(ratios)), total(ratios)
        if not found < math.inf and moduli.dtype == np.float32:  # float32 may just overflow
            wide = widened(pair[0], "wide r"), widened(pair[1], "wide c")
            difference = np.subtract(wide[1], wide[0], out=ROOM.get("wide d", wide[0]))
            self._take_ratios(offset, places, wide, np.abs(difference, out=difference), equal)
            return
        self._relative += found
        if largest > self._steepest.size:
            self._steepest = _find_worst(largest, ratios, offset, places, pair)

    def sums(self) -> PairSums:
        """The sums of all blocks.

        Raises:
            OutOfRangeError: a sum of squares is out of the range of float64.
        """
        for span in self.spans:
            span.check()
        steepest, worst = self._steepest, self._first_unlike or self._farthest
        counts = Counter(self._counts)
        for name, span in zip(("reference", "candidate"), self.spans, strict=True):
            counts[f"nan_{name}"] = span.nans
            counts[f"posinf_{name}"] = span.positive_infinities
            counts[f"neginf_{name}"] = span.negative_infinities
            counts[f"zero_{name}"] = span.zeros
        return PairSums(
            compared=self._comoments.n,
            counts=counts,
            comoments=self._comoments,
            squares=self._squares,
            absolute=self._absolute,
            max_abs=self._farthest.difference,
            max_rel=steepest.difference / abs(steepest.reference)
            if steepest.reference
            else steepest.size,
            max_ulp=self._max_ulp,
            worst=worst if worst.size else None,
        )

    def figures(self, shape: tuple[int, ...]) -> PairFigures:
        """All figures of the pair.

        Raises:
            OutOfRangeError: a sum of squares is out of the range of float64.
        """
        finite = all(span.is_finite for span in self.spans)
        compared, unlike = self._comoments.n, self._counts["unlike"]
        mean_rel = self._relative / compared if compared else 0.0
        reference, candidate = (span.extremes for span in self.spans)
        return PairFigures(
            reference=reference,
            candidate=candidate,
            metrics=self.sums().metrics(shape),
            mean_rel=math.inf if unlike else mean_rel,
            kl_divergence=self._softmax.finish() if finite and self._softmax else math.nan,
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

    For vectors of similar length it is computed from their difference: 1 - cosine then keeps its
    digits, while a product summed in float32 would lose those below 1e-7.
    """
    if not (rr > 0.0 and cc > 0.0):
        return math.nan
    r, c = math.sqrt(rr), math.sqrt(cc)
    found = 1.0 - (dd - (r - c) ** 2) / (2.0 * r * c) if alike(rr, cc) else rc / (r * c)
    return found if math.isnan(found) else max(-1.0, min(1.0, found))


def unravel(flat: int, shape: Sequence[int]) -> tuple[int, ...]:
    """The multi-dimensional index of a flat index in row-major order."""
    index: list[int] = []
    for length in reversed(shape):
        flat, position = divmod(flat, length)
        index.append(position)
    return tuple(reversed(index))
