"""What the figures of a pair are put together from, on the way over both tensors block by block."""

from __future__ import annotations

import math
from collections import Counter
from typing import NamedTuple

import numpy as np

from paritas.numerics.figures import PairFigures
from paritas.numerics.metrics import Metrics
from paritas.numerics.pair_sides import FLOAT32_RANGE, Side, Span
from paritas.numerics.pair_softmax import SoftmaxDivergence
from paritas.numerics.pair_sums import ROOM, Array, Comoments, alike, comoments, dot, total, widened

__all__ = ["PairTotals"]


class Worst(NamedTuple):
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
        self.spans = (Span(), Span())
        self._comoments = Comoments()
        self._counts: Counter[str] = Counter()
        self._squares = 0.0  # of the differences
        self._absolute = 0.0
        self._relative = 0.0
        self._farthest = Worst()
        self._steepest = Worst()
        self._max_ulp = 0.0 if has_ulps else None
        self._first_unlike: Worst | None = None
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
        side = Side.of(r)
        sides = (side, side if same else Side.of(c))
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
            self._take_finite(offset, places, r, c, (Side.of(r), Side.of(c)))
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
            self._first_unlike = Worst(math.inf, offset + place, float(r[place]), float(c[place]))

    def _take_finite(
        self, offset: int, places: Array | None, r: Array, c: Array, sides: tuple[Side, Side]
    ) -> None:
        if r.dtype == np.float32 and not all(side.fits for side in sides):
            r, c = widened(r, "wide r"), widened(c, "wide c")
            sides = (Side.of(r), Side.of(c))
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
            self._take_finite(offset, places, *wide, (Side.of(wide[0]), Side.of(wide[1])))
            return
        equal = np.equal(moduli, 0.0, out=ROOM.of("mask", np.bool_, r.size))
        self._counts["mismatched"] += r.size - int(np.count_nonzero(equal))
        if largest > self._farthest.size:
            self._farthest = _worst(largest, moduli, offset, places, (r, c))
        self._absolute += total(moduli)
        squares = dot(d, d)
        self._squares += squares
        sums = (side_r.total, side_c.total, side_r.squares, side_c.squares, squares)
        self._comoments = self._comoments.merge(comoments(r, c, sums))
        self._softmax.take(r, c, d, (side_r.least, side_r.most), largest)
        self._take_ratios(offset, places, (r, c), moduli, equal if side_r.zeros else None)

    def _take_equal(self, r: Array, side: Side) -> None:
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
            self._steepest = _worst(largest, ratios, offset, places, pair)

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


def _worst(
    size: float, sizes: Array, offset: int, places: Array | None, pair: tuple[Array, Array]
) -> Worst:
    at = int(sizes.argmax())
    place = at if places is None else int(places[at])
    return Worst(size, offset + place, float(pair[0][at]), float(pair[1][at]))


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
