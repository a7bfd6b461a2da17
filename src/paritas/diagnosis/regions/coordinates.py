"""Coordinates of a tensor: its axes, and what two axes make together (diagonals, frames).

All questions are asked of counts along one coordinate, so that a large tensor is read a few times
and not once per hypothesis. What two axes make together is first asked of a sample.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator

import numpy as np

from paritas.diagnosis.regions.spans import (
    TILES,
    Bools,
    Counts,
    Span,
    bits_of_number,
    spans_of,
)

__all__ = ["Coordinate", "Marks", "systems"]

_BITS_PAIR = 4.0
_BITS_TILED = 7.0
# So many wrong elements tell whether two axes together make a pattern at all.
_SAMPLE = 1 << 14
_LEAST_LEFT_OUT = 0.01
Feature = Callable[[Counts, Counts], Counts]


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
            return int(np.count_nonzero(span.chosen)) / len(span.chosen)
        return float(self.shares[span.chosen].sum())

    def chosen(self, span: Span, shape: tuple[int, ...]) -> Bools:
        """The elements at a span, in a shape that broadcasts to the tensor's."""
        if self.feature is None:
            return span.chosen.reshape(_spread(shape, self.axes))
        rows, columns = (np.arange(shape[axis]) for axis in self.axes)
        values = self.feature(rows[:, None], columns[None, :])
        return span.chosen[values].reshape(_spread(shape, self.axes))


@dataclasses.dataclass(frozen=True, eq=False)
class Marks:
    """Which elements are wrong, and which could have been seen to be.

    Attributes:
        wrong: the mask.
        visible: elements where a fault shows; None for all. A wrong factor does not show at zeros.
    """

    wrong: Bools
    visible: Bools | None = None

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
        return _along(self.wrong, axis)

    def shares(self, axis: int) -> np.ndarray:
        """Share of the visible ones at each index of an axis."""
        size = self.wrong.shape[axis]
        if self.visible is None:
            return np.full(size, 1 / size)
        return _along(self.visible, axis) / max(1, self.total)

    @functools.cached_property
    def sample(self) -> tuple[Counts, ...]:
        """Indices of some wrong elements, from all over the tensor, by axis."""
        wrong = self.wrong.reshape(-1)
        if self.number > 16 * _SAMPLE:
            tries = _SAMPLE * wrong.size // self.number
            flat = np.random.default_rng(0).integers(wrong.size, size=tries)
            flat = flat[wrong[flat]]
        else:
            flat = np.flatnonzero(wrong)
            flat = flat[:: max(1, len(flat) // _SAMPLE)]
        return np.unravel_index(flat, self.wrong.shape)


def systems(marks: Marks, shards: tuple[int, ...] = ()) -> Iterator[list[Coordinate]]:
    """Ways to give the elements coordinates, the tensor's own axes first."""
    shape = marks.wrong.shape
    own = [
        Coordinate(
            "axis",
            (axis,),
            None if marks.visible is None else marks.shares(axis),
            spans_of(marks.along(axis), shards),
        )
        for axis in range(len(shape))
    ]
    yield own
    for last in range(1, len(shape)):
        pair = (last - 1, last)
        others = [c for c in own if c.axes[0] not in pair]
        for made in _pairs(marks, pair):
            yield [*others, made]


def _pairs(marks: Marks, axes: tuple[int, int]) -> Iterator[Coordinate]:
    rows, columns = (marks.wrong.shape[axis] for axis in axes)
    if min(rows, columns) < 3:  # noqa: PLR2004  (every shape is a box there)
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
    marks: Marks, axes: tuple[int, int], name: str, feature: Feature, tile: int
) -> Iterator[Coordinate]:
    """The coordinate, if the wrong elements keep to a part of it."""
    shape = marks.wrong.shape
    rows, columns = (shape[axis] for axis in axes)
    some = feature(marks.sample[axes[0]], marks.sample[axes[1]])
    low, high = int(some.min()), int(some.max())
    limit = (
        rows + columns - 1 if name == "diagonal" else (min(tile or rows, tile or columns) + 1) // 2
    )
    if (low == 0 or name == "frame") and high == limit - 1:
        return
    if rows * columns > _SAMPLE and _covers(
        feature, rows, columns, 0 if name == "frame" else low, high
    ):
        return
    values = feature(np.arange(rows)[:, None], np.arange(columns)[None, :])
    counts = np.bincount(values.ravel(), weights=_table(marks.wrong, axes).ravel(), minlength=limit)
    seen = None if marks.visible is None else _table(marks.visible, axes).ravel()
    sizes = np.bincount(values.ravel(), weights=seen, minlength=limit)
    active = np.flatnonzero(counts)
    find = _diagonal_spans if name == "diagonal" else _frame_spans
    spans = list(find(int(active[0]), int(active[-1]), rows - 1, len(counts)))
    bits = _BITS_TILED if tile else _BITS_PAIR
    yield Coordinate(name, axes, sizes / max(1.0, sizes.sum()), spans, feature, tile, bits)


def _covers(feature: Feature, rows: int, columns: int, low: int, high: int) -> bool:
    """Whether nearly all elements lie between two values, so that these say nothing."""
    draw = np.random.default_rng(1)
    some = feature(draw.integers(rows, size=_SAMPLE), draw.integers(columns, size=_SAMPLE))
    outside = np.count_nonzero((some < low) | (some > high))
    return bool(outside < _LEAST_LEFT_OUT * _SAMPLE)


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


def _along(mask: Bools, axis: int) -> Counts:
    others = tuple(other for other in range(mask.ndim) if other != axis)
    return np.asarray(np.count_nonzero(mask, axis=others) if others else mask.astype(np.int64))


def _table(mask: Bools, axes: tuple[int, int]) -> Counts:
    others = tuple(other for other in range(mask.ndim) if other not in axes)
    return np.asarray(np.count_nonzero(mask, axis=others) if others else mask)


def _spread(shape: tuple[int, ...], axes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size if axis in axes else 1 for axis, size in enumerate(shape))
