"""The wrong elements of a tensor, as counts, and subsets of one coordinate."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from paritas.core.diagnosis import boxes

if TYPE_CHECKING:
    from paritas.core.diagnosis.boxes import Box
    from paritas.core.diagnosis.search import Description


# --- Subsets of one coordinate, and the bits it takes to name each --------------------------------

# A region is reported if naming it and then the wrong elements in it takes fewer bits than naming
# the wrong elements among all. Small numbers, the ends of an axis and multiples of a tile are cheap
# to name, as they are for people.

Bools = NDArray[np.bool_]
Counts = NDArray[np.int64]

TILES = (16, 32, 64, 128, 256)
_PERIODS = (4, 8, *TILES)
_LONGEST_LIST = 6
# Counts of each value are kept if a coordinate has no more values than this.
LONGEST = 1 << 20
# On a long axis, a range that leaves out almost nothing says nothing.
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
        chosen: which values; empty for a long coordinate, where the other fields define them.
        bits: the cost of naming it.
        start: first value; of `tiles`: 0 for the first few of each, 1 for the last, 2 for both.
        stop: one after the last.
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
        """Number of values."""
        if len(self.chosen):
            return int(np.count_nonzero(self.chosen))
        return len(self.values) or len(range(self.start, self.stop, self.step))

    def holds(self, values: Counts) -> Bools:
        """Which of these values are in it."""
        if len(self.chosen):
            return np.asarray(self.chosen[values])
        if self.values:
            return np.isin(values, self.values)
        inside = (values >= self.start) & (values < self.stop)
        return np.asarray(inside & ((values - self.start) % self.step == 0))


def bits_of_number(number: int) -> float:
    """The bits of a number of 1 or more, by Elias gamma coding."""
    return 2.0 * math.floor(math.log2(number)) + 1.0


def bits_of_choice(total: float, some: float) -> float:
    """The bits of a choice of `some` out of `total`."""
    if some <= 0 or total <= some:
        return 0.0
    ways = math.lgamma(total + 1) - math.lgamma(some + 1) - math.lgamma(total - some + 1)
    return max(0.0, ways / math.log(2))


def spans_of(counts: Counts, shards: tuple[int, ...] = ()) -> list[IndexSpan]:
    """The spans that hold all values with a count, the whole coordinate first.

    Args:
        counts: wrong elements at each value.
        shards: sizes of a rank's shard along it, as likely bounds.
    """
    size = len(counts)
    active = np.flatnonzero(counts)
    summary = ActiveValues(size)
    summary.add(active)
    out = plain_spans(summary, shards)
    if size > 1 and len(active):
        out += _borders(active, size)
        out += _tiles(active, size, shards)
    return out


def plain_spans(active: ActiveValues, shards: tuple[int, ...] = ()) -> list[IndexSpan]:
    """The spans of a coordinate that follow from a summary: no ends of tiles or of itself."""
    size = active.size
    out = [IndexSpan("all", ~_no_values(size), _BITS_ALL, stop=size)]
    if size == 1 or not active.some:
        return out
    out += _ranges(active.first, active.last + 1, size, shards)
    if len(active.some) > 2:  # noqa: PLR2004  (two values always have a common distance)
        out += _strides(active.first, active.last + 1, active.step, size)
    if len(active.some) <= _LONGEST_LIST:
        out += _lists(np.array(sorted(active.some)), size)
    return out


def _ranges(first: int, stop: int, size: int, shards: tuple[int, ...]) -> Iterator[IndexSpan]:
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


def _strides(first: int, stop: int, step: int, size: int) -> Iterator[IndexSpan]:
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
                continue  # too wide to be an end, or just a stride
            where = np.arange(size) % tile
            back = tile - 1 - where
            depth = (where, back, np.minimum(where, back))[side]
            bits = _BITS_KIND + _BITS_TILE + 2 + bits_of_number(width)
            yield IndexSpan("tiles", depth < width, bits, start=side, step=tile, width=width)


class ActiveValues:
    """A summary of the values of a coordinate with a count; a long one has no counts of each.

    Attributes:
        step: greatest common divisor of their distances.
        some: a few of them; all of them if they can be listed.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.first, self.last, self.step = size, -1, 0
        self.some: set[int] = set()

    def add(self, active: Counts) -> None:
        """Add some values, in ascending order."""
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
    """Number of neighbouring values that are counted together."""
    return max(1, -(-size // LONGEST))


def _no_values(size: int) -> Bools:
    return np.zeros(0 if size > LONGEST else size, dtype=np.bool_)


def _between(low: int, high: int, size: int) -> Bools:
    chosen = _no_values(size)
    chosen[low:high] = True
    return chosen


# --- Marks of a tensor, as counts -----------------------------------------------------------------

# A tensor is read box by box, repeatedly if needed. A small one is a single box, and its mask is
# kept. Counts along axes, pairs of axes and regions are exact.

# How many wrong elements show whether two axes together form a pattern.
SAMPLE = 1 << 14
# A function of the indices of two axes.
Feature = Callable[[Counts, Counts], Counts]
Pairs = tuple[np.ndarray, np.ndarray]
Walk = Callable[[], Iterator[tuple["Box", Bools]]]


def box_indices(box: Box, axis: int) -> Counts:
    """The indices of an axis in a box, which are neighbours."""
    inner = axis - len(box.outer)
    if inner < 0:
        return np.array([box.outer[axis]])
    start = box.start if inner == 0 else 0
    return np.arange(start, start + box.case.shape[inner])


def fit_to_box(values: np.ndarray, box: Box, axes: tuple[int, ...]) -> np.ndarray:
    """Values along some axes of a box, in a shape that broadcasts to it."""
    inner = [axis - len(box.outer) for axis in axes]
    return values.reshape([n if axis in inner else 1 for axis, n in enumerate(box.case.shape)])


def _count_table(box: Box, mask: Bools, axes: tuple[int, ...]) -> Counts:
    """Count what is marked in a box, at each of its indices along some axes."""
    inner = [axis - len(box.outer) for axis in axes]
    others = tuple(other for other in range(mask.ndim) if other not in inner)
    counts = np.count_nonzero(mask, axis=others) if others else mask.astype(np.int64)
    return np.asarray(counts).reshape([len(box_indices(box, axis)) for axis in axes])


class AxisCounts:
    """Counts along one axis; along a long one, counts of groups of neighbouring indices.

    Attributes:
        each: number of indices per group.
        counts: of each group.
        long: the indices with a count along a long axis.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.each = group_size(size)
        self.counts: Counts = np.zeros(-(-size // self.each), dtype=np.int64)
        self.long = ActiveValues(size) if self.each > 1 else None

    def add(self, start: int, counts: Counts) -> None:
        """Add counts of neighbouring indices."""
        if self.long is None:
            self.counts[start : start + len(counts)] += counts
            return
        active = np.flatnonzero(counts)
        if len(active):
            at = (active + start) // self.each
            first = int(at[0])
            sums = np.bincount(at - first, weights=counts[active]).astype(np.int64)
            self.counts[first : first + len(sums)] += sums
            self.long.add(active + start)

    @property
    def sizes(self) -> Counts:
        """Number of indices of each group."""
        out = np.full(len(self.counts), self.each)
        out[-1] -= self.each * len(self.counts) - self.size
        return out

    def spans(self, shards: tuple[int, ...]) -> list[IndexSpan]:
        """The spans that hold all indices with a count."""
        if self.long is None:
            return spans_of(self.counts, shards)
        return plain_spans(self.long, shards)


def _count_axes(axes: tuple[AxisCounts, ...], box: Box, mask: Bools) -> None:
    """Add what is marked in a box to the counts along all axes."""
    for axis, counts in enumerate(axes):
        counts.add(int(box_indices(box, axis)[0]), _count_table(box, mask, (axis,)))


@dataclasses.dataclass(frozen=True, eq=False)
class Nonzeros:
    """The nonzero elements of the reference: a wrong factor shows only there.

    Attributes:
        walk: iterates over their masks.
        zeros: number of other elements.
    """

    shape: tuple[int, ...]
    walk: Walk
    zeros: int

    @functools.cached_property
    def axes(self) -> tuple[AxisCounts, ...]:
        """Their counts along each axis."""
        axes = tuple(map(AxisCounts, self.shape))
        for box, mask in self.walk():
            _count_axes(axes, box, mask)
        return axes


@dataclasses.dataclass(frozen=True, eq=False)
class Marks:
    """Which elements are wrong, and which are visible: could be seen to be wrong.

    Attributes:
        walk: iterates over the masks of wrong elements.
        nonzeros: of the reference.
        axes: counts along each axis.
        number: how many are wrong.
        at_zeros: how many of them are where the reference is zero.
        hides: whether the fault shows only at nonzeros: no zero is wrong.
        some: some wrong elements, from all over the flattened tensor.
        flat_bounds: the first wrong one in memory order, and one after the last.
    """

    shape: tuple[int, ...]
    walk: Walk
    nonzeros: Nonzeros
    axes: tuple[AxisCounts, ...]
    number: int
    at_zeros: int
    hides: bool
    some: Counts
    flat_bounds: tuple[int, int]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def total(self) -> int:
        """Number of visible elements."""
        return self.size - self.nonzeros.zeros if self.hides else self.size

    @functools.cached_property
    def sample(self) -> tuple[Counts, ...]:
        """Indices of some wrong elements, by axis."""
        return np.unravel_index(self.some, self.shape)

    def along(self, axis: int) -> Counts:
        """Wrong elements at each index of an axis, or in each group of indices."""
        return self.axes[axis].counts

    def shares(self, axis: int) -> np.ndarray:
        """Share of the visible elements at each of these."""
        if self.hides:
            return self.nonzeros.axes[axis].counts / max(1, self.total)
        return self.axes[axis].sizes / self.shape[axis]

    def spans(self, axis: int, shards: tuple[int, ...]) -> list[IndexSpan]:
        """The spans that hold the wrong elements along an axis."""
        return self.axes[axis].spans(shards)

    def counts_of(self, axes: tuple[int, int], feature: Feature, limit: int) -> Pairs:
        """Wrong and visible elements at each value of a feature of two axes."""
        wrong = _count_feature(self.walk, axes, feature, limit)
        if self.hides:
            return wrong, _count_feature(self.nonzeros.walk, axes, feature, limit)
        rows, columns = (np.arange(self.shape[axis]) for axis in axes)
        sizes = np.zeros(limit, dtype=np.int64)
        across = min(len(columns), boxes.BLOCK)
        down = max(1, boxes.BLOCK // across)
        for top in range(0, len(rows), down):
            for residual in range(0, len(columns), across):
                row, column = rows[top : top + down], columns[residual : residual + across]
                sizes += np.bincount(feature(row[:, None], column[None]).ravel(), minlength=limit)
        return wrong, sizes

    def within(self, axis: int, chosen: Bools) -> Marks:
        """The wrong elements at some indices, or groups of them, along an axis."""
        each = self.axes[axis].each

        def walk() -> Iterator[tuple[Box, Bools]]:
            for box, mask in self.walk():
                is_chosen = chosen[box_indices(box, axis) // each]
                yield box, mask & fit_to_box(is_chosen, box, (axis,))

        return dataclasses.replace(count_marks(self.shape, walk, self.nonzeros), hides=self.hides)

    def visible_in(self, regions: Sequence[Description]) -> list[int]:
        """Number of visible elements in each region."""
        counts = [0] * len(regions)
        for box, visible in self.nonzeros.walk():
            for position, region in enumerate(regions):
                counts[position] += int(np.count_nonzero(visible & region.elements_in(box)))
        return counts

    def count_elements(self, description: Description) -> tuple[int, int]:
        """Number of wrong elements in a region, and of all its elements."""
        wrong, elements = 0, 0
        for box, mask in self.walk():
            region = np.broadcast_to(description.elements_in(box), mask.shape)
            wrong += int(np.count_nonzero(mask & region))
            elements += int(np.count_nonzero(region))
        return wrong, elements


def count_marks(shape: tuple[int, ...], walk: Walk, nonzeros: Nonzeros) -> Marks:
    """Count the wrong elements of a tensor."""
    axes = tuple(map(AxisCounts, shape))
    size = math.prod(shape)
    number, at_zeros, low, high = 0, 0, size, 0
    each = max(16, SAMPLE * boxes.BLOCK // max(1, size))
    some = [np.zeros(0, dtype=np.int64)]
    for box, mask in walk():
        flat = np.flatnonzero(mask)
        if not len(flat):
            continue
        _count_axes(axes, box, mask)
        number += len(flat)
        low = min(low, box.offset + int(flat[0]))
        high = max(high, box.offset + int(flat[-1]) + 1)
        if nonzeros.zeros:
            at_zeros += int(np.count_nonzero(mask & (box.case.right == 0).numpy()))
        some.append(flat[:: -(-len(flat) // each)] + box.offset)
    hides = nonzeros.zeros > 0 and not at_zeros
    sample = np.concatenate(some)
    return Marks(shape, walk, nonzeros, axes, number, at_zeros, hides, sample, (low, high))


def _count_feature(walk: Walk, axes: tuple[int, int], feature: Feature, limit: int) -> Counts:
    """Number of marked elements at each value of a feature of two axes."""
    counts = np.zeros(limit, dtype=np.int64)
    for box, mask in walk():
        row, column = (box_indices(box, axis) for axis in axes)
        table = _count_table(box, mask, axes).ravel()
        if table.any():
            values = feature(row[:, None], column[None]).ravel()
            counts += np.bincount(values, weights=table, minlength=limit).astype(np.int64)
    return counts
