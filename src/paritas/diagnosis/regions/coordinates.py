"""Coordinates of a tensor: its axes, and what two axes make together (diagonals, frames).

All questions are asked of counts along one coordinate, so that a large tensor is read a few times
and not once per hypothesis. What two axes make together is first asked of a sample.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from paritas.diagnosis.regions.marks import SAMPLE, Feature, Marked, Marks, spread
from paritas.diagnosis.regions.spans import (
    TILES,
    Bools,
    Counts,
    Span,
    bits_of_number,
    group_size,
)

__all__ = ["Coordinate", "systems"]

_BITS_PAIR = 4.0
_BITS_TILED = 7.0
_LEAST_LEFT_OUT = 0.01


@dataclasses.dataclass(frozen=True, eq=False)
class Coordinate:
    """One coordinate of the elements.

    Attributes:
        name: `axis`, `diagonal` or `frame`.
        axes: which axes of the tensor make it.
        shares: of all elements that could be seen to be wrong, at each value; None if all equal.
        spans: what holds the wrong ones.
        feature: its value from the indices of two axes; none for an axis itself.
        tile: of a frame, if it is one around each tile.
        bits: to name the coordinate.
    """

    name: str
    axes: tuple[int, ...]
    shares: np.ndarray | None
    spans: list[Span]
    feature: Feature | None = None
    tile: int = 0
    bits: float = 0.0

    def share(self, span: Span) -> float:
        """Of the elements that could be seen to be wrong, at a span."""
        if self.shares is None:
            return span.number / self.spans[0].number
        return float(self.shares[span.chosen].sum())

    def chosen(self, span: Span, shape: tuple[int, ...]) -> Bools:
        """The elements at a span, in a shape that broadcasts to the tensor's."""
        if self.feature is None:
            return span.chosen.reshape(spread(shape, self.axes))
        rows, columns = (np.arange(shape[axis]) for axis in self.axes)
        values = self.feature(rows[:, None], columns[None, :])
        return span.chosen[values].reshape(spread(shape, self.axes))


def systems(marks: Marked, shards: tuple[int, ...] = ()) -> Iterator[list[Coordinate]]:
    """Ways to give the elements coordinates, the tensor's own axes first."""
    shape = marks.shape
    own = []
    for axis in range(len(shape)):
        spans = marks.spans(axis, shards)
        # Where not even a choice of each value is kept, all of them have the same share.
        even = not marks.hides or not len(spans[0].chosen)
        own.append(Coordinate("axis", (axis,), None if even else marks.shares(axis), spans))
    yield own
    for last in range(1, len(shape)):
        pair = (last - 1, last)
        others = [c for c in own if c.axes[0] not in pair]
        for made in _pairs(marks, pair):
            yield [*others, made]


def _pairs(marks: Marked, axes: tuple[int, int]) -> Iterator[Coordinate]:
    rows, columns = (marks.shape[axis] for axis in axes)
    # Every shape is a box in the one, and the others are too many to count at each value.
    if min(rows, columns) < 3 or group_size(rows + columns) > 1:  # noqa: PLR2004
        return

    def diagonal(row: Counts, column: Counts) -> Counts:
        return np.asarray(column - row + (rows - 1))

    yield from _made(marks, axes, "diagonal", diagonal, 0)
    for tile in (0, 8, *TILES):
        if 2 * tile > max(rows, columns):
            break

        def frame(row: Counts, column: Counts, tile: int = tile) -> Counts:
            height, width = (tile, tile) if tile else (rows, columns)
            up, left = row % height, column % width
            down, right = height - 1 - up, width - 1 - left
            return np.asarray(np.minimum(np.minimum(up, down), np.minimum(left, right)))

        yield from _made(marks, axes, "frame", frame, tile)


def _made(
    marks: Marked, axes: tuple[int, int], name: str, feature: Feature, tile: int
) -> Iterator[Coordinate]:
    """The coordinate, if the wrong elements keep to a part of it."""
    rows, columns = (marks.shape[axis] for axis in axes)
    some = feature(marks.sample[axes[0]], marks.sample[axes[1]])
    low, high = int(some.min()), int(some.max())
    limit = (
        rows + columns - 1 if name == "diagonal" else (min(tile or rows, tile or columns) + 1) // 2
    )
    if (low == 0 or name == "frame") and high == limit - 1:
        return
    # Where there is no mask, to count means to go over the tensor once more.
    dear = rows * columns > SAMPLE or not isinstance(marks, Marks)
    if dear and _covers(feature, rows, columns, 0 if name == "frame" else low, high):
        return
    counts, sizes = marks.counts_of(axes, feature, limit)
    active = np.flatnonzero(counts)
    find = _diagonal_spans if name == "diagonal" else _frame_spans
    spans = list(find(int(active[0]), int(active[-1]), rows - 1, len(counts)))
    bits = _BITS_TILED if tile else _BITS_PAIR
    yield Coordinate(name, axes, sizes / max(1.0, sizes.sum()), spans, feature, tile, bits)


def _covers(feature: Feature, rows: int, columns: int, low: int, high: int) -> bool:
    """Whether nearly all elements lie between two values, so that these say nothing."""
    draw = np.random.default_rng(1)
    some = feature(draw.integers(rows, size=SAMPLE), draw.integers(columns, size=SAMPLE))
    outside = np.count_nonzero((some < low) | (some > high))
    return bool(outside < _LEAST_LEFT_OUT * SAMPLE)


def _diagonal_spans(low: int, high: int, middle: int, size: int) -> Iterator[Span]:
    """One diagonal, all from one on to a corner, or a band around the main one."""
    where = np.arange(size)
    first, last = low - middle, high - middle
    from_low, to_high = (2 + bits_of_number(2 * abs(end) + 1) for end in (first, last))
    if low == high:
        yield Span("index", where == low, from_low, first, first + 1)
    else:
        bits = from_low + to_high - (3 if first == -last else 1)
        yield Span("range", (where >= low) & (where <= high), bits, first, last + 1)
    if low > 0:
        yield Span("above", where >= low, from_low, first, size - middle)
    if high < size - 1:
        yield Span("below", where <= high, to_high, -middle, last + 1)


def _frame_spans(low: int, high: int, middle: int, size: int) -> Iterator[Span]:
    """The outermost few."""
    del low, middle
    bits = 2 + bits_of_number(high + 1)
    yield Span("border", np.arange(size) <= high, bits, width=high + 1)
