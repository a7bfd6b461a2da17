"""Marks of a tensor too large for a mask: counted box by box, and counted again where asked.

What is told of axes, of two axes together and of ranges is exact. Only where zeros of the
reference hide a fault, the size of a region is taken from the shares of its axes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from paritas.diagnosis import parts
from paritas.diagnosis.regions.marks import SAMPLE
from paritas.diagnosis.regions.spans import (
    Bools,
    Counts,
    LongCoordinate,
    Span,
    group_size,
    long_spans,
    spans_of,
)

if TYPE_CHECKING:
    from paritas.diagnosis.parts import Box
    from paritas.diagnosis.regions.marks import Feature, Pairs
    from paritas.diagnosis.regions.searching import Found

__all__ = ["AxisCounts", "Tally", "Walk", "counted", "counted_axes"]

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

    def spans(self, shards: tuple[int, ...]) -> list[Span]:
        """What holds all indices with a count."""
        if self.long is None:
            return spans_of(self.counts, shards)
        return long_spans(self.long, shards)


@dataclasses.dataclass(frozen=True, eq=False)
class Tally:
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

    def spans(self, axis: int, shards: tuple[int, ...]) -> list[Span]:
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
        across = min(len(columns), parts.BLOCK)
        down = max(1, parts.BLOCK // across)
        for top in range(0, len(rows), down):
            for left in range(0, len(columns), across):
                row, column = rows[top : top + down], columns[left : left + across]
                sizes += np.bincount(feature(row[:, None], column[None]).ravel(), minlength=limit)
        return wrong, sizes

    def within(self, axis: int, chosen: Bools) -> Tally:
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

        return counted(self.shape, walk, self.zeros, self.nonzeros)

    def held(self, found: Found) -> tuple[int, int]:
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
        inside = (_inside(found, index, self.shape) for index in self._indices())
        return sum(int(np.count_nonzero(one)) for one in inside), size

    def _indices(self) -> Iterator[tuple[Counts, ...]]:
        """The wrong elements, box by box."""
        for box, mask in self.walk():
            flat = np.flatnonzero(mask)
            if len(flat):
                yield np.unravel_index(flat + box.offset, self.shape)


def counted(
    shape: tuple[int, ...],
    walk: Walk,
    zeros: int,
    nonzeros: Callable[[], tuple[AxisCounts, ...]],
) -> Tally:
    """Count the wrong elements of a tensor."""
    axes = tuple(map(AxisCounts, shape))
    number, at_zeros, low, high = 0, 0, math.prod(shape), 0
    each = max(16, SAMPLE * parts.BLOCK // math.prod(shape))
    some: list[Counts] = []
    for box, mask in walk():
        flat = np.flatnonzero(mask)
        if not len(flat):
            continue
        counted_axes(axes, box, mask)
        number += len(flat)
        low = min(low, box.offset + int(flat[0]))
        high = max(high, box.offset + int(flat[-1]) + 1)
        if zeros:
            at_zeros += int(np.count_nonzero(mask & (box.case.right == 0).numpy()))
        some.append(flat[:: -(-len(flat) // each)] + box.offset)
    flat = np.concatenate(some) if some else np.zeros(0, dtype=np.int64)
    sample = np.unravel_index(flat, shape)
    return Tally(shape, walk, axes, number, at_zeros, zeros, sample, (low, high), nonzeros)


def counted_axes(axes: tuple[AxisCounts, ...], box: Box, mask: Bools) -> None:
    """Add what is marked in a box to the counts along all axes."""
    for counts, at in zip(axes, box.outer, strict=False):
        counts.add(at, np.array([np.count_nonzero(mask)]))
    for inner, counts in enumerate(axes[len(box.outer) :]):
        others = tuple(other for other in range(mask.ndim) if other != inner)
        found = np.count_nonzero(mask, axis=others) if others else mask.astype(np.int64)
        counts.add(box.start if inner == 0 else 0, np.asarray(found))


def _inside(found: Found, index: tuple[Counts, ...], shape: tuple[int, ...]) -> Bools:
    if found.kind == "flat":
        flat = np.ravel_multi_index(index, shape)
        return np.asarray((flat >= found.low) & (flat < found.high))
    out = np.ones(len(index[0]), dtype=np.bool_)
    for coordinate, span in zip(found.coordinates, found.spans, strict=True):
        if span.kind != "all":
            some = [index[axis] for axis in coordinate.axes]
            out &= span.holds(some[0] if coordinate.feature is None else coordinate.feature(*some))
    return out
