"""A mesh of ranks: its named axes, the coordinate of each rank, and the ranks along an axis.

Ranks are numbered in row-major order: the last axis runs fastest.
"""

from __future__ import annotations

import collections
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Mapping, Sequence

_AXIS = re.compile(r"\s*([A-Za-z_]\w*)\s*=\s*([0-9]{1,6})\s*")


def coordinate_of(rank: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """The coordinate of a rank on a mesh with these numbers of ranks along its axes."""
    coordinate: list[int] = []
    for size in reversed(sizes):
        rank, position = divmod(rank, size)
        coordinate.append(position)
    return tuple(reversed(coordinate))


def coordinates_by_axis(rank: int, mesh: Mapping[str, int]) -> dict[str, int]:
    """The coordinates of a rank by the names of the axes; `mesh` is the number of ranks of each."""
    return dict(zip(mesh, coordinate_of(rank, tuple(mesh.values())), strict=True))


def rank_at(coordinate: Sequence[int], sizes: Sequence[int]) -> int:
    """The rank at a coordinate."""
    rank = 0
    for position, size in zip(coordinate, sizes, strict=True):
        rank = rank * size + position
    return rank


def lines_along(coordinates: Mapping[int, Sequence[int]], axis: int) -> list[list[int]]:
    """The ranks in groups: those of a group differ in their coordinate along one axis only."""
    lines: dict[tuple[int, ...], list[int]] = {}
    for rank, coordinate in coordinates.items():
        others = (*coordinate[:axis], *coordinate[axis + 1 :])
        lines.setdefault(others, []).append(rank)
    return list(lines.values())


def number_meshes(coordinates: Iterable[Hashable]) -> list[int]:
    """For each rank, by its coordinate, the number of its mesh among meshes of one kind.

    A submesh exists several times in a larger mesh: the n-th rank at a coordinate belongs to the
    n-th of them.
    """
    counts: collections.Counter[Hashable] = collections.Counter()
    numbers: list[int] = []
    for coordinate in coordinates:
        numbers.append(counts[coordinate])
        counts[coordinate] += 1
    return numbers


def read_axis(text: str) -> tuple[str, int] | None:
    """An axis as users write it, such as `tp=2`; None if it is something else."""
    form = _AXIS.fullmatch(text)
    return None if form is None else (form[1], int(form[2]))
