"""From what was recorded, and from what the user says, to how parts are put together.

Nothing here reads a value: shapes, placements and coordinates are enough.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

from paritas.comparison.sharding.recipes import REDUCTIONS, Assembly, Cell, named_ranks
from paritas.comparison.sharding.segments import (
    Segment,
    Where,
    chunk,
    fills,
    lay_out,
    length,
    whole,
)
from paritas.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from paritas.comparison.sharding.dims import Dims
    from paritas.dumps.records import Placement

__all__ = ["Part", "plan_by_dims", "plan_by_placement"]

_SHARD = re.compile(r"shard\((\d{1,2})\)")
_STRIDED = re.compile(r"_S\((\d{1,2}), (\d{1,6})\)|_StridedShard\(dim=(\d{1,2}), sf=(\d{1,6})\)")
_PARTIAL = re.compile(r"partial\((\w+)\)")
_MOST_TOLD = 4
_MOST_RANKS = 1 << 20


class Part(NamedTuple):
    """What a rank recorded, as far as it is known without its values.

    Attributes:
        coordinates: per axis of ranks, where this rank is.
        placement: as recorded.
    """

    rank: int
    shape: tuple[int, ...]
    coordinates: Mapping[str, int]
    placement: Placement | None = None


class _Mesh(NamedTuple):
    """Axes of ranks and what they do to a tensor."""

    sizes: dict[str, int]
    split: tuple[str, ...]
    partial: tuple[str, ...]
    same: tuple[str, ...]


# --- recorded placements --------------------------------------------------------------------------


def plan_by_placement(parts: Sequence[Part]) -> Assembly:
    """Put a distributed tensor together from what its ranks recorded of their placements.

    Raises:
        UsageError: a part is missing, or a placement is not known.
    """
    first = _placement(parts[0])
    axes = first.mesh_names or tuple(f"mesh {at}" for at in range(len(first.mesh)))
    reductions = [_PARTIAL.fullmatch(one) for one in first.placements]
    kinds = {found[1] for found in reductions if found is not None}
    if len(kinds) > 1 or kinds.difference(REDUCTIONS):
        told = ", ".join(first.placements)
        raise UsageError(f"terms that are placed as {told} cannot be reduced to one")
    roles = dict(zip(axes, first.placements, strict=True))
    mesh = _Mesh(
        dict(zip(axes, first.mesh, strict=True)),
        tuple(axis for axis, role in roles.items() if _cut(role)),
        tuple(axis for axis, role in roles.items() if _PARTIAL.fullmatch(role)),
        tuple(axis for axis, role in roles.items() if role == "replicate"),
    )
    inside = [
        part._replace(coordinates=dict(zip(axes, _placement(part).coordinate, strict=True)))
        if _placement(part).coordinate
        else None
        for part in parts
    ]
    places = [None if part is None else _placed(part) for part in inside]
    plan = _assembled(parts, inside, places, first.global_shape, mesh)
    told = _words(
        plan.ranks, mesh, {axis: cut[0] for axis in mesh.split if (cut := _cut(roles[axis]))}
    )
    reduction = next(iter(kinds), "sum")
    return dataclasses.replace(
        plan, words=told.replace("summed", _DONE[reduction]), reduction=reduction, placed=True
    )


_DONE = {
    "sum": "summed",
    "avg": "averaged",
    "product": "multiplied",
    "max": "maximum",
    "min": "minimum",
}


def _placement(part: Part) -> Placement:
    """The placement of a part, which has one.

    Raises:
        UsageError: it contradicts itself.
    """
    place = part.placement
    if place is None:
        raise UsageError(f"rank {part.rank} did not record how it is placed")
    extents = {len(place.mesh), len(place.placements), len(place.coordinate or place.mesh)}
    names = len(place.mesh_names) in (0, len(place.mesh))
    on_mesh = all(0 <= at < size for at, size in zip(place.coordinate, place.mesh, strict=False))
    dimensions = len(place.global_shape) == len(place.global_offset) == len(part.shape)
    if len(extents) != 1 or not names or not on_mesh or (place.coordinate and not dimensions):
        raise UsageError(f"rank {part.rank} recorded a placement that makes no sense: {place}")
    for one in place.placements:
        cut = _cut(one)
        if cut is not None and cut[0] >= len(part.shape):
            raise UsageError(
                f"rank {part.rank}: {one} is of a tensor of {len(part.shape)} dimensions"
            )
        if cut is None and one != "replicate" and not _PARTIAL.fullmatch(one):
            raise UsageError(f"the placement {one!r} is not known")
    return place


def _cut(role: str) -> tuple[int, int] | None:
    """The dimension that is split, and into how many pieces it was cut before."""
    if found := _SHARD.fullmatch(role):
        return int(found[1]), 1
    if found := _STRIDED.fullmatch(role):
        return int(found[1] or found[3]), int(found[2] or found[4])
    return None


def _placed(part: Part) -> Where:
    """Where a part lies: as its placements say, or else as its offset does."""
    place = _placement(part)
    where = [whole(extent) for extent in place.global_shape]
    for size, at, role in zip(place.mesh, place.coordinate, place.placements, strict=True):
        if cut := _cut(role):
            where[cut[0]] = chunk(where[cut[0]], size, at, max(cut[1], 1))
    begins = [segments[0].target if length(segments) else None for segments in where]
    if tuple(map(length, where)) == part.shape and all(
        begin in (None, offset) for begin, offset in zip(begins, place.global_offset, strict=True)
    ):
        return tuple(where)
    # A tensor may be split otherwise than torch does it by itself.
    box = zip(place.global_offset, part.shape, place.global_shape, strict=True)
    if any(begin < 0 or begin + extent > full for begin, extent, full in box):
        raise UsageError(
            f"rank {part.rank} holds {part.shape} at {place.global_offset}, which is not within "
            f"{place.global_shape}"
        )
    return tuple(
        (Segment(0, begin, extent),)
        for begin, extent in zip(place.global_offset, part.shape, strict=True)
    )


# --- an annotation --------------------------------------------------------------------------------


def plan_by_dims(parts: Sequence[Part], dims: Dims, sizes: Mapping[str, int]) -> Assembly:
    """Put a tensor together as an annotation says.

    Args:
        parts: all of one tensor.
        sizes: per axis, how many ranks there are along it; one that is not named is 1.

    Raises:
        UsageError: a part is missing, or the parts are not as the annotation says.
    """
    known = {axis: size for axis, size in sizes.items() if size > 1}
    for part in parts:
        if len(part.shape) != len(dims.dimensions):
            raise UsageError(
                f"dims {dims.text!r} names {len(dims.dimensions)} dimensions, and rank {part.rank} "
                f"holds a tensor of shape {part.shape}"
            )
        for axis, size in known.items():
            if part.coordinates.get(axis, -1) not in range(size):
                told = part.coordinates.get(axis, "nowhere")
                raise UsageError(f"rank {part.rank} is {told} on axis {axis} of {size}")
    splits = [split for split in dims.splits if split.axis in known]
    mesh = _Mesh(
        known,
        tuple(split.axis for split in splits if not split.partial),
        tuple(split.axis for split in splits if split.partial),
        tuple(axis for axis in known if axis not in {split.axis for split in splits}),
    )
    inside = _of_one_sample(parts, dims, mesh)
    _refuse_missing(inside, mesh)
    places, shape = _side_by_side(inside, dims, mesh)
    squeezed = tuple(at for at, one in enumerate(dims.dimensions) if one.is_squeezed)
    if any(shape[at] != 1 for at in squeezed):
        raise UsageError(f"dims {dims.text!r} has a 1 for a dimension of the shape {shape}")
    plan = _assembled(parts, inside, places, shape, mesh)
    along = {split.axis: at for at, one in enumerate(dims.dimensions) for split in one.splits}
    return dataclasses.replace(plan, words=_words(plan.ranks, mesh, along), squeezed=squeezed)


def _of_one_sample(parts: Sequence[Part], dims: Dims, mesh: _Mesh) -> list[Part | None]:
    """The parts, without those of ranks that had nothing to compute in this step."""
    axis = dims.data_axis
    if axis not in mesh.same or axis in dims.replicated:
        return list(parts)
    busy = {part.coordinates[axis] for part in parts if math.prod(part.shape)}
    if len(busy) > 1:
        told = ", ".join(map(str, sorted(busy)))
        raise UsageError(
            f"the ranks {told} of {axis} all hold values, and dims {dims.text!r} does not say how "
            f"they belong together: split a dimension over it, as b[{axis}], or add "
            f"# {axis}:replicated"
        )
    return [part if not busy or part.coordinates[axis] in busy else None for part in parts]


def _side_by_side(
    parts: Sequence[Part | None], dims: Dims, mesh: _Mesh
) -> tuple[list[Where | None], tuple[int, ...]]:
    """Where each part lies, and the shape of the whole."""
    found: list[list[tuple[Segment, ...]]] = [[] for _ in parts]
    shape: list[int] = []
    for at, dimension in enumerate(dims.dimensions):
        splits = [split for split in dimension.splits if split.axis in mesh.split]
        keys = [
            None if part is None else tuple(part.coordinates[split.axis] for split in splits)
            for part in parts
        ]
        extents: dict[tuple[int, ...], int] = {}
        for part, key in zip(parts, keys, strict=True):
            if part is None or key is None:
                continue
            if extents.setdefault(key, part.shape[at]) != part.shape[at]:
                raise UsageError(
                    f"rank {part.rank} holds {part.shape[at]} of dimension {at}, and another rank "
                    f"in its place {extents[key]}"
                )
        placed, extent = lay_out(extents, [split.order for split in splits])
        shape.append(extent)
        for part_places, key in zip(found, keys, strict=True):
            if key is not None:
                part_places.append(placed[key])
    places = [None if part is None else tuple(one) for part, one in zip(parts, found, strict=True)]
    return places, tuple(shape)


# --- both -----------------------------------------------------------------------------------------


def _assembled(
    parts: Sequence[Part],
    inside: Sequence[Part | None],
    places: Sequence[Where | None],
    shape: tuple[int, ...],
    mesh: _Mesh,
) -> Assembly:
    """Sort parts into cells, terms and copies, and see that nothing is missing."""
    found: dict[Where, defaultdict[tuple[int, ...], list[int]]] = {}
    for at, (part, where) in enumerate(zip(inside, places, strict=True)):
        if part is None or where is None or not all(map(length, where)):
            continue
        term = tuple(part.coordinates[axis] for axis in mesh.partial)
        found.setdefault(where, defaultdict(list))[term].append(at)
    expected = math.prod(mesh.sizes[axis] for axis in mesh.partial)
    if not fills(found, shape) or any(len(terms) != expected for terms in found.values()):
        _refuse_missing(inside, mesh)
        raise UsageError(
            f"the parts of {named_ranks([part.rank for part in parts])} overlap, or leave gaps in "
            f"a whole of shape {shape}"
        )
    cells = tuple(
        Cell(where, tuple(tuple(copies) for _, copies in sorted(terms.items())))
        for where, terms in found.items()
    )
    return Assembly("", shape, tuple(part.rank for part in parts), cells)


def _refuse_missing(parts: Iterable[Part | None], mesh: _Mesh) -> None:
    """Say which parts are missing, by the numbers of their ranks where those can be told."""
    axes = (*mesh.split, *mesh.partial)
    sizes = [mesh.sizes[axis] for axis in axes]
    if math.prod(sizes) > _MOST_RANKS:
        raise UsageError(f"{math.prod(sizes)} ranks are too many to put together")
    there = [part for part in parts if part is not None]
    present = {tuple(part.coordinates[axis] for axis in axes) for part in there}
    every = itertools.product(*map(range, sizes))
    missing = [dict(zip(axes, one, strict=True)) for one in every if one not in present]
    if not missing:
        return
    by_number = not any(mesh.sizes[axis] > 1 for axis in mesh.same) and all(
        part.rank == _row_major(part.coordinates, mesh.sizes) for part in there
    )
    told = []
    for one in missing[:_MOST_TOLD]:
        place = ", ".join(f"{axis} {at}" for axis, at in one.items())
        told.append(f"rank {_row_major(one, mesh.sizes)} ({place})" if by_number else place)
    more = f" and {len(missing) - _MOST_TOLD} more" if len(missing) > _MOST_TOLD else ""
    raise UsageError(
        f"{len(missing)} of {math.prod(sizes)} parts are missing: {'; '.join(told)}{more}. "
        f"It was recorded by {named_ranks([part.rank for part in there])}"
    )


def _row_major(coordinates: Mapping[str, int], sizes: Mapping[str, int]) -> int:
    rank = 0
    for axis, size in sizes.items():
        rank = rank * size + coordinates.get(axis, 0)
    return rank


def _words(ranks: Sequence[int], mesh: _Mesh, along: Mapping[str, int]) -> str:
    done = [f"dimension {along[axis]} over {axis}" for axis in mesh.split if mesh.sizes[axis] > 1]
    summed = [axis for axis in mesh.partial if mesh.sizes[axis] > 1]
    same = [axis for axis in mesh.same if mesh.sizes[axis] > 1]
    if summed:
        done.append(f"summed over {' and '.join(summed)}")
    if same:
        done.append(f"the same over {' and '.join(same)}")
    if len(ranks) == 1 and not done:
        return ""
    return f"put together from {named_ranks(ranks)}: {', '.join(done) or 'all the same'}"
