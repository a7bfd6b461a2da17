"""Drawing a wrong value: the slice, the axes and the elements that show what is wrong."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

import torch

from paritas.core.diagnosis.case import widen
from paritas.core.results.pictures import MOST_COLUMNS, MOST_ROWS, Picture

if TYPE_CHECKING:
    from torch import Tensor

    from paritas.core.results.findings import Region
    from paritas.core.results.pictures import Grid

_SHOWN_AXES = 2
# Elements of which the difference is taken at a time.
_BLOCK = 1 << 22


def draw_picture(
    reference: Tensor, candidate: Tensor, where: Region | None, *, lifted: bool = False
) -> Picture:
    """Draw reference, candidate and difference of one value.

    The axes are those that limit the wrong region, else the last ones. The other axes are cut where
    the difference is largest.

    Args:
        reference: the right value.
        candidate: a value of the same shape.
        where: the wrong region, if it is known.
        lifted: whether both come from float64 runs.
    """
    shape = tuple(reference.shape)
    axes = _shown_axes(shape, () if where is None else where.axes)
    worst = _worst_index(reference.detach(), candidate.detach())
    index = tuple(None if axis in axes else at for axis, at in enumerate(worst))
    cut = tuple(slice(None) if at is None else at for at in index)
    r, c = (_as_plane(side.detach()[cut]) for side in (reference, candidate))
    apart = _distance(r, c)
    picked = _pick_elements(apart)
    difference = torch.where(apart == 0, 0.0, _real(c - r))
    reference_cells, candidate_cells, difference_cells = (
        _round_cells(plane.reshape(-1)[picked]) for plane in (_real(r), _real(c), difference)
    )
    return Picture(
        shape=shape,
        axes=axes,
        index=index,
        reference=reference_cells,
        candidate=candidate_cells,
        difference=difference_cells,
        lifted=lifted,
    )


def _shown_axes(shape: tuple[int, ...], limiting: tuple[int, ...]) -> tuple[int, ...]:
    """At most two axes, in order: those that limit the region, then the last ones."""
    order = [*reversed(limiting), *reversed(range(len(shape)))]
    long = [axis for axis in dict.fromkeys(order) if shape[axis] > 1]
    return tuple(sorted((long or list(range(len(shape)))[-1:])[:_SHOWN_AXES]))


def _worst_index(reference: Tensor, candidate: Tensor) -> tuple[int, ...]:
    """The index of the largest difference."""
    r, c = reference.reshape(-1), candidate.reshape(-1)
    best, at = -1.0, 0
    for start in range(0, r.numel(), _BLOCK):
        apart = _distance(*(_widen(side[start : start + _BLOCK]) for side in (r, c)))
        value, position = apart.max(0)
        if float(value) > best:
            best, at = float(value), start + int(position)
    index = []
    for extent in reversed(reference.shape):
        at, place_on_axis = divmod(at, extent)
        index.append(place_on_axis)
    return tuple(reversed(index))


def _as_plane(side: Tensor) -> Tensor:
    """Two axes: a line has one row, a scalar one cell."""
    wide = _widen(side)
    return wide.reshape(1, -1) if wide.dim() < _SHOWN_AXES else wide


def _widen(side: Tensor) -> Tensor:
    return widen(side.resolve_conj().resolve_neg())


def _real(plane: Tensor) -> Tensor:
    return plane.abs() if plane.is_complex() else plane


def _distance(reference: Tensor, candidate: Tensor) -> Tensor:
    """|candidate - reference|: 0 where they are the same, infinite where one of them is not finite.

    Two NaNs are the same.
    """
    both_nan = reference.isnan() & candidate.isnan()
    apart = (candidate - reference).abs().nan_to_num(nan=math.inf, posinf=math.inf)
    return torch.where((reference == candidate) | both_nan, 0.0, apart)


def _pick_elements(apart: Tensor) -> Tensor:
    """For each cell, the flat position of the element with the largest difference in it."""
    rows, columns = apart.shape
    down, across = _bounds(rows, MOST_ROWS), _bounds(columns, MOST_COLUMNS)
    tops = [(top, *apart[top:bottom].max(0)) for top, bottom in itertools.pairwise(down)]
    best = torch.stack([values for _, values, _ in tops])  # in each column
    row = torch.stack([top + places for top, _, places in tops])
    picked = []
    for left, right in itertools.pairwise(across):
        column = left + best[:, left:right].argmax(1, keepdim=True)
        picked.append(row.gather(1, column) * columns + column)
    return torch.cat(picked, 1)


def _bounds(extent: int, most: int) -> list[int]:
    """The first position of each cell, and the end."""
    cells = min(extent, most)
    return [cell * extent // cells for cell in range(cells + 1)]


def _round_cells(cells: Tensor) -> Grid:
    return tuple(tuple(float(f"{cell:.4g}") for cell in row) for row in cells.tolist())
