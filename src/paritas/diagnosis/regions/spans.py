"""Simple subsets of one coordinate, and how many bits it takes to name each of them.

A region is stated if naming it and then the wrong elements in it takes fewer bits than naming the
wrong elements among all: the shortest description that the evidence pays for. Small numbers, the
ends of an axis and multiples of a tile are cheap to name, as they are for people.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "TILES",
    "Bools",
    "Counts",
    "LongCoordinate",
    "Span",
    "bits_of_choice",
    "bits_of_number",
    "group_size",
    "long_spans",
    "spans_of",
]

Bools = NDArray[np.bool_]
Counts = NDArray[np.int64]

TILES = (16, 32, 64, 128, 256)
_PERIODS = (4, 8, *TILES)
_LONGEST_LIST = 6
# Counts and choices of each value are kept of a coordinate that has no more of them than this.
LONGEST = 1 << 20
# Of a long axis, a range that leaves out next to nothing says nothing.
_LONG = 1 << 16
_NEARLY_ALL = 0.999
_BITS_ALL = 0.5
_BITS_KIND = 4.0
_BITS_TILE = 3.0


@dataclasses.dataclass(frozen=True, eq=False)
class Span:
    """Some values of a coordinate.

    Attributes:
        kind: `all`, `index`, `range`, `stride`, `list`, `border`, `tiles`.
        chosen: which values; empty for a long coordinate, where the other fields tell.
        bits: to name it.
        start: first value; of `tiles`: 0 for the first few of each, 1 for the last, 2 for both.
        stop: one behind the last.
        step: of a stride; of `tiles`, the tile.
        width: of a border.
        values: of a list.
    """

    kind: str
    chosen: Bools
    bits: float
    start: int = 0
    stop: int = 0
    step: int = 1
    width: int = 0
    values: tuple[int, ...] = ()

    @functools.cached_property
    def number(self) -> int:
        """How many values."""
        if len(self.chosen):
            return int(np.count_nonzero(self.chosen))
        return len(self.values) or len(range(self.start, self.stop, self.step))

    def holds(self, values: Counts) -> Bools:
        """Whether these are among them."""
        if len(self.chosen):
            return np.asarray(self.chosen[values])
        if self.values:
            return np.isin(values, self.values)
        inside = (values >= self.start) & (values < self.stop)
        return np.asarray(inside & ((values - self.start) % self.step == 0))


def bits_of_number(number: int) -> float:
    """To write down a number from 1 on, of which nothing is known."""
    return 2.0 * math.floor(math.log2(number)) + 1.0


def bits_of_choice(total: float, some: float) -> float:
    """To say which `some` of `total`."""
    if some <= 0 or total <= some:
        return 0.0
    ways = math.lgamma(total + 1) - math.lgamma(some + 1) - math.lgamma(total - some + 1)
    return max(0.0, ways / math.log(2))


def spans_of(counts: Counts, shards: tuple[int, ...] = ()) -> list[Span]:
    """The spans that hold all values with a count, the whole coordinate first.

    Args:
        counts: wrong elements at each value.
        shards: sizes of a rank's part along it, as likely bounds.
    """
    size = len(counts)
    active = np.flatnonzero(counts)
    out = [Span("all", np.ones(size, dtype=np.bool_), _BITS_ALL, stop=size)]
    if size > 1 and len(active):
        out += _ranges(active, size, shards)
        out += _strides(active, size)
        out += _lists(active, size)
        out += _borders(active, size)
        out += _tiles(active, size, shards)
    return out


def _ranges(active: Counts, size: int, shards: tuple[int, ...]) -> Iterator[Span]:
    first, stop = int(active[0]), int(active[-1]) + 1
    if stop == first + 1:
        near = min(bits_of_number(first + 1), bits_of_number(size - first)) + 1
        bits = _BITS_KIND + min(near, math.log2(size))
        yield Span("index", _between(first, stop, size), bits, first, stop)
    bounds = {(first, stop)}
    for tile in (2, 4, *_PERIODS, *shards):
        bounds.add((first // tile * tile, min(size, -(-stop // tile) * tile)))
    bounds |= {(0, stop), (first, size)}
    for low, high in sorted(bounds - {(0, size)}):
        if high - low == 1 or (size > _LONG and high - low > _NEARLY_ALL * size):
            continue
        bits = _bits_of_range(low, high, size, shards)
        yield Span("range", _between(low, high, size), bits, low, high)


def _bits_of_range(low: int, high: int, size: int, shards: tuple[int, ...]) -> float:
    one_end = low == 0 or high == size
    inner = high if low == 0 else low
    ways = [math.log2(size) if one_end else math.log2(size * (size + 1) / 2)]
    if one_end:
        ways.append(bits_of_number(high - low))
    for tile in (*_PERIODS, *shards):
        cells = -(-size // tile)
        if inner % tile == 0 and (one_end or high % tile == 0):
            ways.append(_BITS_TILE + math.log2(cells if one_end else cells * (cells + 1) / 2))
    return _BITS_KIND + (0.0 if one_end else 1.0) + min(ways)


def _strides(active: Counts, size: int) -> Iterator[Span]:
    if len(active) < 3:  # noqa: PLR2004  (two values have one distance, which says nothing)
        return
    step = int(np.gcd.reduce(np.diff(active)))
    yield from _stepping(int(active[0]), int(active[-1]) + 1, step, size)


def _stepping(first: int, stop: int, step: int, size: int) -> Iterator[Span]:
    if step < 2:  # noqa: PLR2004
        return
    bits = _BITS_KIND + 1 + bits_of_number(step) + math.log2(step)
    chosen = _none(size)
    chosen[first % step :: step] = True
    yield Span("stride", chosen, bits, first % step, size, step)
    if first >= step or stop + step <= size:
        inner = _none(size)
        inner[first:stop:step] = True
        bits += math.log2(size * (size + 1) / 2) - math.log2(step)
        yield Span("stride", inner, bits, first, stop, step)


def _lists(active: Counts, size: int) -> Iterator[Span]:
    number = len(active)
    if not 2 <= number <= _LONGEST_LIST or int(active[-1] - active[0]) + 1 == number:  # noqa: PLR2004
        return
    chosen = _none(size)
    if len(chosen):
        chosen[active] = True
    bits = _BITS_KIND + 1 + bits_of_number(number) + bits_of_choice(size, number)
    yield Span("list", chosen, bits, values=tuple(map(int, active)))


def _borders(active: Counts, size: int) -> Iterator[Span]:
    depth = np.minimum(active, size - 1 - active)
    width = int(depth.max()) + 1
    both = int(active[0]) < width and int(active[-1]) >= size - width
    if both and 3 * width <= size:
        where = np.arange(size)
        chosen = np.minimum(where, size - 1 - where) < width
        yield Span("border", chosen, _BITS_KIND + 1 + bits_of_number(width), width=width)


def _tiles(active: Counts, size: int, shards: tuple[int, ...]) -> Iterator[Span]:
    """The first or last few, or both, of each tile."""
    for tile in dict.fromkeys((*_PERIODS, *shards)):
        if tile < 4 or size < 2 * tile:  # noqa: PLR2004
            continue
        inside = np.flatnonzero(np.bincount(active % tile, minlength=tile))
        widths = (
            int(inside[-1]) + 1,
            tile - int(inside[0]),
            int(np.minimum(inside, tile - 1 - inside).max()) + 1,
        )
        for side, width in enumerate(widths):
            both = side == 2  # noqa: PLR2004
            if (3 if both else 2) * width > tile or (width == 1 and not both):
                continue  # too wide to be an end, or no more than a stride
            where = np.arange(size) % tile
            back = tile - 1 - where
            depth = (where, back, np.minimum(where, back))[side]
            bits = _BITS_KIND + _BITS_TILE + 2 + bits_of_number(width)
            yield Span("tiles", depth < width, bits, start=side, step=tile, width=width)


def long_spans(long: LongCoordinate, shards: tuple[int, ...] = ()) -> list[Span]:
    """The same of a coordinate that is too long for a count of each value.

    Ends of tiles and of the coordinate itself are not looked for.
    """
    size = long.size
    out = [Span("all", _none(size), _BITS_ALL, stop=size)]
    if not long.some:
        return out
    out += _ranges(np.array([long.first, long.last]), size, shards)
    if len(long.some) > 2:  # noqa: PLR2004  (as above)
        out += _stepping(long.first, long.last + 1, long.step, size)
    if len(long.some) <= _LONGEST_LIST:
        out += _lists(np.array(sorted(long.some)), size)
    return out


class LongCoordinate:
    """What is kept of the values with a count, instead of the counts.

    Attributes:
        first: the least of them.
        last: the largest.
        step: greatest common divisor of their distances.
        some: a few of them; all, if there are no more than can be listed.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.first, self.last, self.step = size, -1, 0
        self.some: set[int] = set()

    def add(self, active: Counts) -> None:
        """Take note of some values, ascending."""
        if not len(active):
            return
        if not self.some:
            self._origin = int(active[0])
        away = int(np.gcd.reduce(active - self._origin))
        self.step = math.gcd(self.step, away)
        self.first = min(self.first, int(active[0]))
        self.last = max(self.last, int(active[-1]))
        if len(self.some) <= _LONGEST_LIST:
            self.some.update(map(int, active[: _LONGEST_LIST + 1]))


def group_size(size: int) -> int:
    """How many neighbouring values of a coordinate are counted together."""
    return max(1, -(-size // LONGEST))


def _none(size: int) -> Bools:
    return np.zeros(0 if size > LONGEST else size, dtype=np.bool_)


def _between(low: int, high: int, size: int) -> Bools:
    chosen = _none(size)
    chosen[low:high] = True
    return chosen
