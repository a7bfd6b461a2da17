"""The Kullback-Leibler divergence of two softmaxes, block by block."""

from __future__ import annotations

import math

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
        # Blocks with huge differences: sums of the weights, and of these times d; and the sum of
        # e^(candidate - summit).
        self._far_weights, self._far_first = 0.0, 0.0
        self._exponentials, self._summit = 0.0, -math.inf

    def take_same(self, r: Array, least: float, most: float) -> None:
        """Add a block in which both sides are equal."""
        leads = self._raise_top(most, 0.0)
        weights = total(self._weigh(r, least))
        if abs(self._shift) > _FAR and not leads:
            self._add_far(weights, 0.0, r)
        else:
            self._add(weights, 0.0, 0.0, shift=0.0, leads=leads)

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
        leads = self._raise_top(span[1], shift)
        w = self._weigh(r, span[0])
        weights = total(w)
        if bound > _FAR or (abs(shift - self._shift) > _FAR and not leads):
            self._add_far(weights, dot(w, d), c)
            return
        first = dot(w, apart)
        if bound > _REACH[-1]:
            t = np.expm1(apart, out=ROOM.get("t", w))
            rest = dot(w, np.subtract(t, apart, out=t))
        else:
            rest = _taylor(w, apart, bound)
        self._add(weights, first, rest, shift=shift, leads=leads)

    def finish(self) -> float:
        """The divergence of all blocks; 0 if there was none."""
        weights = self._weights + self._far_weights
        if not weights:
            return 0.0
        if not self._exponentials:
            mean = self._first / self._weights
            found = _log1p(mean + self._rest / self._weights) - mean
        else:
            mean = (self._first + self._shift * self._weights + self._far_first) / weights
            near = self._weights + self._first + self._rest
            logs = [math.log(self._exponentials) + self._summit - self._top]
            if near > 0.0:
                logs.append(math.log(near) + self._shift)
            found = max(logs) + math.log1p(sum(math.exp(x - max(logs)) for x in logs) - 1.0)
            found -= math.log(weights) + mean
        return found if math.isnan(found) else max(found, 0.0)

    def _raise_top(self, most: float, shift: float) -> bool:
        """Whether a block of that largest number and that shift leads those before."""
        if most <= self._top:
            return False
        if abs(self._shift - shift) > _FAR and self._weights:
            # Its sums fit none about the new shift: as if all blocks so far had been far.
            self._far_weights += self._weights
            self._far_first += self._first + self._shift * self._weights
            near = self._weights + self._first + self._rest
            self._add_exponentials(near, self._top + self._shift)
            self._weights, self._first, self._rest = 0.0, 0.0, 0.0
        lowered = math.exp(self._top - most)
        self._weights *= lowered
        self._first *= lowered
        self._rest *= lowered
        self._far_weights *= lowered
        self._far_first *= lowered
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
        kept, moved = (weights, first, rest), (self._weights, self._first, self._rest)
        delta = self._shift - shift
        if leads:
            self._shift = shift
        else:
            kept, moved, delta = moved, kept, -delta
        if not moved[0]:
            self._weights, self._first, self._rest = kept
            return
        growth = math.expm1(delta)
        weights, first, rest = moved
        self._weights = kept[0] + weights
        self._first = kept[1] + first + delta * weights
        self._rest = kept[2] + weights * (growth - delta) + growth * first + (1 + growth) * rest

    def _add_far(self, weights: float, first: float, c: Array) -> None:
        self._far_weights += weights
        self._far_first += first
        c = widened(c, "wide c")
        summit = float(np.maximum.reduce(c))
        t = np.subtract(c, summit, out=ROOM.get("t", c))
        self._add_exponentials(total(np.exp(t, out=t)), summit)

    def _add_exponentials(self, found: float, summit: float) -> None:
        if summit > self._summit:
            self._exponentials *= math.exp(self._summit - summit)
            self._summit = summit
        self._exponentials += found * math.exp(summit - self._summit)


def _log1p(x: float) -> float:
    return math.log1p(x) if x > -1.0 else math.nan


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
