"""The Kullback-Leibler divergence of two softmaxes, block by block."""

from __future__ import annotations

import math
import sys

import numpy as np

from paritas.numerics.pair_sums import ROOM, Array, dot, total, widened

__all__ = ["SoftmaxDivergence"]

# Taylor coefficients of (e^d - 1 - d) / d^2, and the largest |d| for which that many suffice.
_TAYLOR = tuple(1.0 / math.factorial(k + 2) for k in range(4))
_REACH = tuple((1e-8 / (2.0 * c)) ** (1.0 / k) for k, c in enumerate((*_TAYLOR[1:], 1 / 720), 1))
# Weights of float32 below this share of the largest are left out: they are nothing, but their
# products are subnormal, which costs processors dear.
_NOTHING = 1e-20
_DEEP = math.log(_NOTHING)
# Differences that are further apart than this have no common shift: a weight that is nothing may
# then come to something.
_FAR = 10.0
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
        if bound > _FAR:
            r, c = widened(r, "wide r"), widened(c, "wide c")
            d = np.subtract(c, r, out=ROOM.get("wide d", r))
            shift = float(d[heaviest])
        apart = np.subtract(d, shift, out=ROOM.get("apart", d))
        if bound > _FAR:
            bound = max(float(np.maximum.reduce(apart)), -float(np.minimum.reduce(apart)))
            if bound > _FAR:
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
            rest = _taylor(w, apart, bound)
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
            found = rest - _below(mean + rest)
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
        if self._weights and abs(self._shift - shift) > _FAR:
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
            kept[2] + weights * _beyond(delta) + growth * moved[1] + (1 + growth) * moved[2]
        )

    def _add_exponentials(self, c: Array) -> None:
        c = widened(c, "wide c")
        summit = float(np.maximum.reduce(c))
        if summit > self._summit:
            self._exponentials *= math.exp(self._summit - summit)
            self._summit = summit
        t = np.subtract(c, self._summit, out=ROOM.get("t", c))
        self._exponentials += total(np.exp(t, out=t))


def _beyond(d: float) -> float:
    """e^d - 1 - d."""
    if abs(d) > _REACH[-1]:
        return math.expm1(d) - d
    return sum(coefficient * d ** (k + 2) for k, coefficient in enumerate(_TAYLOR))


def _below(x: float) -> float:
    """Difference of x and log(1 + x)."""
    if abs(x) > _TINY:
        return x - math.log1p(x) if x > -1.0 else math.nan
    return x * x * (0.5 - x * (1 / 3 - x / 4))


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
