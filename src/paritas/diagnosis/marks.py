"""The wrong elements of a tensor, as a mask or as counts, and subsets of one coordinate.

A tensor that is too large for a mask is counted box by box, and counted again where asked.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from paritas.diagnosis import case

if TYPE_CHECKING:
    from paritas.diagnosis.case import Box
    from paritas.diagnosis.search import Description


# --- Subsets of one coordinate, and the bits it takes to name each --------------------------------

# A region is stated if naming it and then the wrong elements in it takes fewer bits than naming the
# wrong elements among all: the shortest description that the evidence pays for. Small numbers, the
# ends of an axis and multiples of a tile are cheap to name, as they are for people.

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
class IndexSpan:
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


def spans_of(counts: Counts, shards: tuple[int, ...] = ()) -> list[IndexSpan]:
    """The spans that hold all values with a count, the whole coordinate first.

    Args:
        counts: wrong elements at each value.
        shards: sizes of a rank's part along it, as likely bounds.
    """
    size = len(counts)
    active = np.flatnonzero(counts)
    out = [IndexSpan("all", np.ones(size, dtype=np.bool_), _BITS_ALL, stop=size)]
    if size > 1 and len(active):
        out += _ranges(active, size, shards)
        out += _strides(active, size)
        out += _lists(active, size)
        out += _borders(active, size)
        out += _tiles(active, size, shards)
    return out


def _ranges(active: Counts, size: int, shards: tuple[int, ...]) -> Iterator[IndexSpan]:
    first, stop = int(active[0]), int(active[-1]) + 1
    if stop == first + 1:
        near = min(bits_of_number(first + 1), bits_of_number(size - first)) + 1
        bits = _BITS_KIND + min(near, math.log2(size))
        yield IndexSpan("index", _between(first, stop, size), bits, first, stop)
    bounds = {(first, stop)}
    for tile in (2, 4, *_PERIODS, *shards):
        bounds.add((first // tile * tile, min(size, -(-stop // tile) * tile)))
    bounds |= {(0, stop), (first, size)}
    for low, high in sorted(bounds - {(0, size)}):
        if high - low == 1 or (size > _LONG and high - low > _NEARLY_ALL * size):
            continue
        bits = _bits_of_range(low, high, size, shards)
        yield IndexSpan("range", _between(low, high, size), bits, low, high)


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


def _strides(active: Counts, size: int) -> Iterator[IndexSpan]:
    if len(active) < 3:  # noqa: PLR2004  (two values have one distance, which says nothing)
        return
    step = int(np.gcd.reduce(np.diff(active)))
    yield from _stepping(int(active[0]), int(active[-1]) + 1, step, size)


def _stepping(first: int, stop: int, step: int, size: int) -> Iterator[IndexSpan]:
    if step < 2:  # noqa: PLR2004
        return
    bits = _BITS_KIND + 1 + bits_of_number(step) + math.log2(step)
    chosen = _no_values(size)
    chosen[first % step :: step] = True
    yield IndexSpan("stride", chosen, bits, first % step, size, step)
    if first >= step or stop + step <= size:
        inner = _no_values(size)
        inner[first:stop:step] = True
        bits += math.log2(size * (size + 1) / 2) - math.log2(step)
        yield IndexSpan("stride", inner, bits, first, stop, step)


def _lists(active: Counts, size: int) -> Iterator[IndexSpan]:
    number = len(active)
    if not 2 <= number <= _LONGEST_LIST or int(active[-1] - active[0]) + 1 == number:  # noqa: PLR2004
        return
    chosen = _no_values(size)
    if len(chosen):
        chosen[active] = True
    bits = _BITS_KIND + 1 + bits_of_number(number) + bits_of_choice(size, number)
    yield IndexSpan("list", chosen, bits, values=tuple(map(int, active)))


def _borders(active: Counts, size: int) -> Iterator[IndexSpan]:
    depth = np.minimum(active, size - 1 - active)
    width = int(depth.max()) + 1
    both = int(active[0]) < width and int(active[-1]) >= size - width
    if both and 3 * width <= size:
        where = np.arange(size)
        chosen = np.minimum(where, size - 1 - where) < width
        yield IndexSpan("border", chosen, _BITS_KIND + 1 + bits_of_number(width), width=width)


def _tiles(active: Counts, size: int, shards: tuple[int, ...]) -> Iterator[IndexSpan]:
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
            yield IndexSpan("tiles", depth < width, bits, start=side, step=tile, width=width)


def long_spans(long: LongCoordinate, shards: tuple[int, ...] = ()) -> list[IndexSpan]:
    """The same of a coordinate that is too long for a count of each value.

    Ends of tiles and of the coordinate itself are not looked for.
    """
    size = long.size
    out = [IndexSpan("all", _no_values(size), _BITS_ALL, stop=size)]
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


def _no_values(size: int) -> Bools:
    return np.zeros(0 if size > LONGEST else size, dtype=np.bool_)


def _between(low: int, high: int, size: int) -> Bools:
    chosen = _no_values(size)
    chosen[low:high] = True
    return chosen


# --- Marks of a tensor, as a mask -----------------------------------------------------------------

# So many wrong elements tell whether two axes together make a pattern at all.
SAMPLE = 1 << 14
# What the indices of two axes make together.
Feature = Callable[[Counts, Counts], Counts]
Pairs = tuple[np.ndarray, np.ndarray]


@dataclasses.dataclass(frozen=True, eq=False)
class Marks:
    """Which elements are wrong, and which could have been seen to be.

    Attributes:
        wrong: the mask.
        visible: elements where a fault shows; None for all. A wrong factor does not show at zeros.
    """

    wrong: Bools
    visible: Bools | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the tensor."""
        return self.wrong.shape

    @property
    def size(self) -> int:
        """How many elements there are."""
        return self.wrong.size

    @property
    def hides(self) -> bool:
        """Whether a fault does not show everywhere."""
        return self.visible is not None

    @functools.cached_property
    def number(self) -> int:
        """How many are wrong."""
        return int(np.count_nonzero(self.wrong))

    @functools.cached_property
    def total(self) -> int:
        """How many could be."""
        return self.wrong.size if self.visible is None else int(np.count_nonzero(self.visible))

    def along(self, axis: int) -> Counts:
        """Wrong ones at each index of an axis."""
        return _count_along(self.wrong, axis)

    def shares(self, axis: int) -> np.ndarray:
        """Share of the visible ones at each index of an axis."""
        size = self.wrong.shape[axis]
        if self.visible is None:
            return np.full(size, 1 / size)
        return _count_along(self.visible, axis) / max(1, self.total)

    @functools.cached_property
    def sample(self) -> tuple[Counts, ...]:
        """Indices of some wrong elements, from all over the tensor, by axis."""
        wrong = self.wrong.reshape(-1)
        if self.number > 16 * SAMPLE:
            tries = SAMPLE * wrong.size // self.number
            flat = np.random.default_rng(0).integers(wrong.size, size=tries)
            flat = flat[wrong[flat]]
        else:
            flat = np.flatnonzero(wrong)
            flat = flat[:: max(1, len(flat) // SAMPLE)]
        return np.unravel_index(flat, self.wrong.shape)

    def spans(self, axis: int, shards: tuple[int, ...]) -> list[IndexSpan]:
        """What holds the wrong ones along an axis."""
        return spans_of(self.along(axis), shards)

    @property
    def flat_bounds(self) -> tuple[int, int]:
        """The first wrong one in memory order, and one behind the last."""
        flat = self.wrong.reshape(-1)
        return int(flat.argmax()), flat.size - int(flat[::-1].argmax())

    def visible_between(self, low: int, high: int) -> int:
        """How many could be wrong in a range in memory order."""
        if self.visible is None:
            return high - low
        return int(np.count_nonzero(self.visible.reshape(-1)[low:high]))

    def counts_of(self, axes: tuple[int, int], feature: Feature, limit: int) -> Pairs:
        """At each value of what two axes make: the wrong ones, and the visible ones."""
        rows, columns = (self.shape[axis] for axis in axes)
        values = feature(np.arange(rows)[:, None], np.arange(columns)[None, :]).ravel()
        wrong = np.bincount(values, weights=_count_table(self.wrong, axes).ravel(), minlength=limit)
        seen = None if self.visible is None else _count_table(self.visible, axes).ravel()
        return wrong, np.bincount(values, weights=seen, minlength=limit)

    def held(self, found: Description) -> tuple[int, int]:
        """How many wrong ones a region holds, and how many elements it has."""
        region = found.elements(self.shape)
        return int(np.count_nonzero(self.wrong & region)), int(np.count_nonzero(region))

    def within(self, axis: int, chosen: Bools) -> Marks:
        """The wrong ones at some indices of an axis."""
        return Marks(
            self.wrong & chosen.reshape(broadcast_shape(self.shape, (axis,))), self.visible
        )


class Marked(Protocol):
    """What is asked of `Marks`, and can be answered without a mask too."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the tensor."""

    @property
    def size(self) -> int:
        """How many elements there are."""

    @property
    def hides(self) -> bool:
        """Whether a fault does not show everywhere."""

    @property
    def number(self) -> int:
        """How many are wrong."""

    @property
    def total(self) -> int:
        """How many could be."""

    @property
    def sample(self) -> tuple[Counts, ...]:
        """Indices of some wrong elements, from all over the tensor, by axis."""

    @property
    def flat_bounds(self) -> tuple[int, int]:
        """The first wrong one in memory order, and one behind the last."""

    def along(self, axis: int) -> Counts:
        """Wrong ones at each index of an axis, or in neighbouring groups of them."""

    def shares(self, axis: int) -> np.ndarray:
        """Share of the visible ones there."""

    def spans(self, axis: int, shards: tuple[int, ...]) -> list[IndexSpan]:
        """What holds the wrong ones along an axis."""

    def visible_between(self, low: int, high: int) -> int:
        """How many could be wrong in a range in memory order."""

    def counts_of(self, axes: tuple[int, int], feature: Feature, limit: int) -> Pairs:
        """At each value of what two axes make: the wrong ones, and the visible ones."""

    def held(self, found: Description) -> tuple[int, int]:
        """How many wrong ones a region holds, and how many elements it has."""

    def within(self, axis: int, chosen: Bools) -> Marked:
        """The wrong ones at some indices of an axis."""


def broadcast_shape(shape: tuple[int, ...], axes: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a tensor along some axes, 1 along the others."""
    return tuple(size if axis in axes else 1 for axis, size in enumerate(shape))


def _count_along(mask: Bools, axis: int) -> Counts:
    others = tuple(other for other in range(mask.ndim) if other != axis)
    return np.asarray(np.count_nonzero(mask, axis=others) if others else mask.astype(np.int64))


def _count_table(mask: Bools, axes: tuple[int, int]) -> Counts:
    others = tuple(other for other in range(mask.ndim) if other not in axes)
    return np.asarray(np.count_nonzero(mask, axis=others) if others else mask)


# --- Marks of a large tensor, as counts -----------------------------------------------------------

# What is told of axes, of two axes together and of ranges is exact. Only where zeros of the
# reference hide a fault, the size of a region is taken from the shares of its axes.

Walk = Callable[[], Iterator[tuple["Box", Bools]]]


class AxisCounts:
    """Counts along one axis, of a long one for groups of neighbouring indices.

    Attributes:
        each: how many indices a group has.
        counts: of each group.
        long: what else is known of a long one.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.each = group_size(size)
        self.counts: Counts = np.zeros(-(-size // self.each), dtype=np.int64)
        self.long = LongCoordinate(size) if self.each > 1 else None

    def add(self, start: int, found: Counts) -> None:
        """Add counts of neighbouring indices."""
        if self.long is None:
            self.counts[start : start + len(found)] += found
            return
        active = np.flatnonzero(found)
        if len(active):
            at = (active + start) // self.each
            first = int(at[0])
            sums = np.bincount(at - first, weights=found[active]).astype(np.int64)
            self.counts[first : first + len(sums)] += sums
            self.long.add(active + start)

    @property
    def sizes(self) -> Counts:
        """How many indices each group has."""
        out = np.full(len(self.counts), self.each)
        out[-1] -= self.each * len(self.counts) - self.size
        return out

    def spans(self, shards: tuple[int, ...]) -> list[IndexSpan]:
        """What holds all indices with a count."""
        if self.long is None:
            return spans_of(self.counts, shards)
        return long_spans(self.long, shards)


@dataclasses.dataclass(frozen=True, eq=False)
class TalliedMarks:
    """Which elements are wrong, as counts.

    Attributes:
        shape: of the tensor.
        walk: goes over their masks again.
        axes: how many there are along each axis.
        number: how many are wrong.
        at_zeros: how many of them where the reference is zero.
        zeros: how many zeros that has.
        sample: indices of some wrong elements, from all over the tensor, by axis.
        flat_bounds: the first wrong one in memory order, and one behind the last.
        nonzeros: the elements that are not zero, along each axis; asked for if zeros hide the
            fault.
    """

    shape: tuple[int, ...]
    walk: Walk
    axes: tuple[AxisCounts, ...]
    number: int
    at_zeros: int
    zeros: int
    sample: tuple[Counts, ...]
    flat_bounds: tuple[int, int]
    nonzeros: Callable[[], tuple[AxisCounts, ...]]

    @property
    def size(self) -> int:
        """How many elements there are."""
        return math.prod(self.shape)

    @property
    def hides(self) -> bool:
        """Whether a fault does not show everywhere: no zero is wrong."""
        return bool(self.zeros) and not self.at_zeros

    @property
    def total(self) -> int:
        """How many could be wrong."""
        return self.size - self.zeros if self.hides else self.size

    def along(self, axis: int) -> Counts:
        """Wrong ones at each index of an axis, or in neighbouring groups of them."""
        return self.axes[axis].counts

    def shares(self, axis: int) -> np.ndarray:
        """Share of the visible ones there."""
        if self.hides:
            return self.nonzeros()[axis].counts / max(1, self.total)
        return self.axes[axis].sizes / self.shape[axis]

    def spans(self, axis: int, shards: tuple[int, ...]) -> list[IndexSpan]:
        """What holds the wrong ones along an axis."""
        return self.axes[axis].spans(shards)

    def visible_between(self, low: int, high: int) -> int:
        """How many could be wrong in a range in memory order, about."""
        return round((high - low) * self.total / self.size)

    def counts_of(self, axes: tuple[int, int], feature: Feature, limit: int) -> Pairs:
        """At each value of what two axes make: the wrong ones, and all."""
        wrong = np.zeros(limit, dtype=np.int64)
        for index in self._indices():
            values = feature(index[axes[0]], index[axes[1]])
            wrong += np.bincount(values, minlength=limit)
        rows, columns = (np.arange(self.shape[axis]) for axis in axes)
        sizes = np.zeros(limit, dtype=np.int64)
        across = min(len(columns), case.BLOCK)
        down = max(1, case.BLOCK // across)
        for top in range(0, len(rows), down):
            for left in range(0, len(columns), across):
                row, column = rows[top : top + down], columns[left : left + across]
                sizes += np.bincount(feature(row[:, None], column[None]).ravel(), minlength=limit)
        return wrong, sizes

    def within(self, axis: int, chosen: Bools) -> TalliedMarks:
        """The wrong ones at some indices, or groups of them, along an axis."""
        each = self.axes[axis].each

        def walk() -> Iterator[tuple[Box, Bools]]:
            for box, mask in self.walk():
                inner = axis - len(box.outer)
                if inner < 0:
                    yield box, mask & chosen[box.outer[axis] // each]
                    continue
                begin = box.start if inner == 0 else 0
                kept = chosen[np.arange(begin, begin + mask.shape[inner]) // each]
                yield box, mask & kept.reshape([-1 if d == inner else 1 for d in range(mask.ndim)])

        return tally_marks(self.shape, walk, self.zeros, self.nonzeros)

    def held(self, found: Description) -> tuple[int, int]:
        """How many wrong ones a region holds, and how many elements it has."""
        if found.kind == "zeros":
            return self.at_zeros, self.zeros
        size = found.high - found.low
        if found.kind == "product":
            shares = [
                span.number / self.shape[c.axes[0]] if c.name == "axis" else c.share(span)
                for c, span in zip(found.coordinates, found.spans, strict=True)
            ]
            size = round(self.size * math.prod(shares))
        inside = (_is_inside(found, index, self.shape) for index in self._indices())
        return sum(int(np.count_nonzero(one)) for one in inside), size

    def _indices(self) -> Iterator[tuple[Counts, ...]]:
        """The wrong elements, box by box."""
        for box, mask in self.walk():
            flat = np.flatnonzero(mask)
            if len(flat):
                yield np.unravel_index(flat + box.offset, self.shape)


def tally_marks(
    shape: tuple[int, ...],
    walk: Walk,
    zeros: int,
    nonzeros: Callable[[], tuple[AxisCounts, ...]],
) -> TalliedMarks:
    """Count the wrong elements of a tensor."""
    axes = tuple(map(AxisCounts, shape))
    number, at_zeros, low, high = 0, 0, math.prod(shape), 0
    each = max(16, SAMPLE * case.BLOCK // math.prod(shape))
    some: list[Counts] = []
    for box, mask in walk():
        flat = np.flatnonzero(mask)
        if not len(flat):
            continue
        count_axes(axes, box, mask)
        number += len(flat)
        low = min(low, box.offset + int(flat[0]))
        high = max(high, box.offset + int(flat[-1]) + 1)
        if zeros:
            at_zeros += int(np.count_nonzero(mask & (box.case.right == 0).numpy()))
        some.append(flat[:: -(-len(flat) // each)] + box.offset)
    flat = np.concatenate(some) if some else np.zeros(0, dtype=np.int64)
    sample = np.unravel_index(flat, shape)
    return TalliedMarks(shape, walk, axes, number, at_zeros, zeros, sample, (low, high), nonzeros)


def count_axes(axes: tuple[AxisCounts, ...], box: Box, mask: Bools) -> None:
    """Add what is marked in a box to the counts along all axes."""
    for counts, at in zip(axes, box.outer, strict=False):
        counts.add(at, np.array([np.count_nonzero(mask)]))
    for inner, counts in enumerate(axes[len(box.outer) :]):
        others = tuple(other for other in range(mask.ndim) if other != inner)
        found = np.count_nonzero(mask, axis=others) if others else mask.astype(np.int64)
        counts.add(box.start if inner == 0 else 0, np.asarray(found))


def _is_inside(found: Description, index: tuple[Counts, ...], shape: tuple[int, ...]) -> Bools:
    if found.kind == "flat":
        flat = np.ravel_multi_index(index, shape)
        return np.asarray((flat >= found.low) & (flat < found.high))
    out = np.ones(len(index[0]), dtype=np.bool_)
    for coordinate, span in zip(found.coordinates, found.spans, strict=True):
        if span.kind != "all":
            some = [index[axis] for axis in coordinate.axes]
            out &= span.holds(some[0] if coordinate.feature is None else coordinate.feature(*some))
    return out
