"""Which elements are wrong, and which could have been seen to be."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import numpy as np

from paritas.diagnosis.regions.spans import Bools, Counts, Span, spans_of

if TYPE_CHECKING:
    from paritas.diagnosis.regions.searching import Found

__all__ = ["SAMPLE", "Feature", "Marked", "Marks", "Pairs", "spread"]

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
        if self.number > 16 * SAMPLE:
            tries = SAMPLE * wrong.size // self.number
            flat = np.random.default_rng(0).integers(wrong.size, size=tries)
            flat = flat[wrong[flat]]
        else:
            flat = np.flatnonzero(wrong)
            flat = flat[:: max(1, len(flat) // SAMPLE)]
        return np.unravel_index(flat, self.wrong.shape)

    def spans(self, axis: int, shards: tuple[int, ...]) -> list[Span]:
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
        wrong = np.bincount(values, weights=_table(self.wrong, axes).ravel(), minlength=limit)
        seen = None if self.visible is None else _table(self.visible, axes).ravel()
        return wrong, np.bincount(values, weights=seen, minlength=limit)

    def held(self, found: Found) -> tuple[int, int]:
        """How many wrong ones a region holds, and how many elements it has."""
        region = found.elements(self.shape)
        return int(np.count_nonzero(self.wrong & region)), int(np.count_nonzero(region))

    def within(self, axis: int, chosen: Bools) -> Marks:
        """The wrong ones at some indices of an axis."""
        return Marks(self.wrong & chosen.reshape(spread(self.shape, (axis,))), self.visible)


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

    def spans(self, axis: int, shards: tuple[int, ...]) -> list[Span]:
        """What holds the wrong ones along an axis."""

    def visible_between(self, low: int, high: int) -> int:
        """How many could be wrong in a range in memory order."""

    def counts_of(self, axes: tuple[int, int], feature: Feature, limit: int) -> Pairs:
        """At each value of what two axes make: the wrong ones, and the visible ones."""

    def held(self, found: Found) -> tuple[int, int]:
        """How many wrong ones a region holds, and how many elements it has."""

    def within(self, axis: int, chosen: Bools) -> Marked:
        """The wrong ones at some indices of an axis."""


def spread(shape: tuple[int, ...], axes: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a tensor along some axes, 1 along the others."""
    return tuple(size if axis in axes else 1 for axis, size in enumerate(shape))


def _along(mask: Bools, axis: int) -> Counts:
    others = tuple(other for other in range(mask.ndim) if other != axis)
    return np.asarray(np.count_nonzero(mask, axis=others) if others else mask.astype(np.int64))


def _table(mask: Bools, axes: tuple[int, int]) -> Counts:
    others = tuple(other for other in range(mask.ndim) if other not in axes)
    return np.asarray(np.count_nonzero(mask, axis=others) if others else mask)
