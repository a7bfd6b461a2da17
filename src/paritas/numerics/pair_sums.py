"""Sums over a block of numbers, fast: float32 within a few thousand elements, float64 beyond."""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import numpy as np

__all__ = ["BLOCK", "ROOM", "Array", "Comoments", "alike", "comoments", "dot", "total", "widened"]

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


class _Room(threading.local):
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


ROOM = _Room()
_ONES: dict[type, Array] = {t: np.ones(_STRETCH, t) for t in (np.float32, np.float64)}


def dot(x: Array, y: Array) -> float:
    """The sum of products of two flat arrays of one float dtype, at most `BLOCK` long."""
    size = x.size
    if size <= _STRETCH:
        return float(x.dot(y))
    whole = size - size % _STRETCH
    found = _by_stretch(x[:whole], y[:whole].reshape(-1, _STRETCH, 1))
    return found if whole == size else found + float(x[whole:].dot(y[whole:]))


def total(x: Array) -> float:
    """The sum of a flat array of at most `BLOCK` numbers."""
    size, ones = x.size, _ONES[x.dtype.type]
    if size <= _STRETCH:
        return float(x.dot(ones[:size]))
    whole = size - size % _STRETCH
    found = _by_stretch(x[:whole], ones.reshape(_STRETCH, 1))
    return found if whole == size else found + float(x[whole:].dot(ones[: size - whole]))


def _by_stretch(x: Array, columns: Array) -> float:
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
        return _centred(r, c, (mean_r, mean_c))
    rc = (rr + cc - dd) / 2.0 if alike(rr, cc) else dot(r, c)
    return Comoments(n, mean_r, mean_c, mean_c - mean_r, *about, rc - total_r * mean_c)


def _centred(r: Array, c: Array, means: tuple[float, float]) -> Comoments:
    """The same where a mean outweighs what varies about it: it is taken off before squaring."""
    n = r.size
    anchors = [_amid(side, mean) for side, mean in zip((r, c), means, strict=True)]
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


def _amid(side: Array, mean: float) -> float:
    """A number to be taken off a side: its mean, and exactly its value where it is constant."""
    first = float(side[0])
    return first if bool((side == side[0]).all()) else mean
