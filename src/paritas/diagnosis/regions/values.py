"""Regions that the reference's own values mark out: its padding, its zeros."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from paritas.diagnosis.regions.searching import Found

if TYPE_CHECKING:
    from paritas.diagnosis.regions.marks import Marks
    from paritas.diagnosis.regions.spans import Bools

__all__ = ["BITS_ZEROS", "marked_out"]

_BITS_PADDING = 5.0
BITS_ZEROS = 4.0


def marked_out(marks: Marks, right: np.ndarray, zeros: Bools) -> tuple[Found, ...]:
    """Those regions of the reference's values that hold all wrong elements.

    Args:
        right: what the values should be.
        zeros: where that is zero.
    """
    return tuple(_marked(marks, right, zeros))


def _marked(marks: Marks, right: np.ndarray, zeros: Bools) -> Iterator[Found]:
    if _holds(zeros, marks):
        yield Found("zeros", BITS_ZEROS, float(np.count_nonzero(zeros)), mask=zeros)
    for axis in reversed(range(right.ndim)):
        if right.shape[axis] < 3 or not _ends_alike(marks.wrong, right, axis):  # noqa: PLR2004
            continue
        padded = _padding(right, axis)
        if _holds(padded, marks):
            size = float(np.count_nonzero(padded))
            yield Found("padding", _BITS_PADDING, size, mask=padded, axis=axis)


def _ends_alike(wrong: Bools, right: np.ndarray, axis: int) -> bool:
    """Whether each line with a wrong element ends with two equal values: cheap to ask first."""
    last, before = right.take(-1, axis), right.take(-2, axis)
    alike = _same(last, before)
    return bool(alike[wrong.any(axis=axis)].all()) and not bool(alike.all() and alike.size == 1)


def _padding(right: np.ndarray, axis: int) -> Bools:
    """Where a line is one and the same value from there to its end, for two elements at least."""
    last = np.take(right, [-1], axis=axis)
    backwards = np.flip(_same(right, last), axis=axis)
    padded = np.flip(np.logical_and.accumulate(backwards, axis=axis), axis=axis)
    alone = ~np.take(padded, [-2], axis=axis)
    return np.asarray(padded & ~alone)


def _same(left: np.ndarray, right: np.ndarray) -> Bools:
    return np.asarray((left == right) | ((left != left) & (right != right)))  # noqa: PLR0124


def _holds(region: Bools, marks: Marks) -> bool:
    if not region[marks.sample].all() or region.all():
        return False
    return not bool((marks.wrong & ~region).any())
