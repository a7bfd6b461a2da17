"""The Kullback-Leibler divergence of two softmaxes, block by block."""

from __future__ import annotations

import math

import numpy as np

from paritas.numerics.pair_sums import ROOM, Array, dot, total, widened

__all__ = ["SoftmaxDivergence"]

# Taylor coefficients of (e^d - 1 - d) / d^2, and the largest |d| for which that many suffice.
_TAYLOR = tuple(1.0 / math.factorial(k + 2) for k in range(4))
_REACH = tuple((1e-8 / (2.0 * c)) ** (1.0 / k) for k, c in enumerate((*_TAYLOR[1:], 1 / 720), 1))
# Weights below this share of the largest are left out: they are nothing, but their products are
# subnormal, which costs processors dear.
_NOTHING = 1e-18
_DEEP = math.log(_NOTHING)
# Beyond this difference, e^d is no longer taken relative to the reference's own exponential.
_FAR = 30.0


class SoftmaxDivergence:
    """Divergence of softmax(reference) from softmax(candidate), both over all numbers taken.

    With d = candidate - reference and E the mean under the reference's softmax, it is
    log E[e^d] - E[d] = log(1 + E[d] + E[e^d - 1 - d]) - E[d]. The last of these is summed by
    itself, so that a divergence of 1e-20 keeps its digits, which the difference of two logarithms
    would have lost.
    """

    def __init__(self) -> None:
        self._top = -math.inf  # the largest of the reference: all exponentials are relative to it
        self._weights = 0.0
        self._first = 0.0
        self._rest = 0.0
        self._rest_top = -math.inf  # `_rest` is relative to e to the power of this

    def take_same(self, r: Array, least: float, most: float) -> None:
        """Add a block in which both sides are equal."""
        self._weights += total(self._exponentials(r, least, most))

    def take(self, r: Array, c: Array, d: Array, span: tuple[float, float], largest: float) -> None:
        """Add a block.

        Args:
            r: the reference's numbers, all finite.
            c: the candidate's, likewise.
            d: c - r.
            span: the least and the greatest of r.
            largest: of all |d|.
        """
        if largest > _FAR:
            r, c = widened(r, "wide r"), widened(c, "wide c")
            d = np.subtract(c, r, out=ROOM.get("wide d", r))
        w = self._exponentials(r, *span)
        weights, first = total(w), dot(w, d)
        self._weights += weights
        self._first += first
        if largest > _FAR:
            t, top = ROOM.get("t", w), float(np.maximum.reduce(c))
            np.exp(np.subtract(c, top, out=t), out=t)
            top, rest = max(top, self._top), total(t) * math.exp(min(top - self._top, 0.0))
            self._add(rest - (weights + first) * math.exp(self._top - top), top)
        elif largest > _REACH[-1]:
            t = np.expm1(d, out=ROOM.get("t", w))
            self._add(dot(w, np.subtract(t, d, out=t)), self._top)
        else:
            self._add(_taylor(w, d, largest), self._top)

    def finish(self) -> float:
        """The divergence of all blocks; 0 if there was none."""
        if not self._weights:
            return 0.0
        mean = self._first / self._weights
        lift = self._rest_top - self._top
        if lift < _FAR:
            ratio = mean + self._rest * math.exp(lift) / self._weights
            found = math.log1p(ratio) if ratio > -1.0 else math.nan
        else:
            found = math.log(self._rest) + lift - math.log(self._weights)
        found -= mean
        return found if math.isnan(found) else max(found, 0.0)

    def _exponentials(self, r: Array, least: float, most: float) -> Array:
        """e^(r - top), after the top has been raised to this block's if that is higher."""
        if most > self._top:
            lowered = math.exp(self._top - most)
            self._weights *= lowered
            self._first *= lowered
            self._top = most
        w = np.subtract(r, self._top, out=ROOM.get("w", r))
        np.exp(w, out=w)
        if least - self._top < _DEEP:
            np.copyto(w, 0.0, where=w < _NOTHING)
        return w

    def _add(self, rest: float, top: float) -> None:
        if top > self._rest_top:
            self._rest *= math.exp(self._rest_top - top)
            self._rest_top = top
        self._rest += rest * math.exp(top - self._rest_top)


def _taylor(w: Array, d: Array, largest: float) -> float:
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
