"""From what was recorded, and from what the user says, to how parts are put together."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
from collections import defaultdict
from typing import TYPE_CHECKING, Literal, NamedTuple, NoReturn

from paritas.errors import UsageError
from paritas.placement.assembly import (
    REDUCTIONS,
    Assembly,
    Cell,
    Segment,
    Where,
    chunk,
    fills,
    lay_out,
    length,
    named_ranks,
    whole,
)
from paritas.results.wording import enumerated

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from paritas.files.records import Placement


# --- Dimensions and their axes of ranks, in one line of text --------------------------------------

# The language is that of SGLang's dumper::
#
#     b s[cp:zigzag] h[tp] d # dp:=moe_dp ep:replicated
#
# One word per dimension. Brackets name the axes of ranks that it is split over, the outermost
# first: `s[cp,sp]`. `zigzag`: rank r of n holds the chunks r and 2n-1-r of 2n. `h[tp:partial]`: the
# ranks hold terms of a sum. `h*d` or `(h*d)`: two dimensions in one. `1`: a dimension of that
# length, to be left out. After `#`, axes over which the tensor is the same on all ranks, and by
# which name data parallelism goes here.

Order = Literal["natural", "zigzag"]

# A name (or names in parentheses), then axes in brackets; earlier releases wrote parentheses there.
_DIMENSION = re.compile(r"(\([^()\[\]#]*\)|[^\s()\[\]#]+)(?:\[([^\[\]#]*)\]|\(([^()#]*)\))?(?!\S)")
_NAME = re.compile(r"[A-Za-z_]\w*")
_SPACE = re.compile(r"\s*")
_LONGEST = 1000
_SQUEEZED = "1"


@dataclasses.dataclass(frozen=True)
class AxisSplit:
    """An axis of ranks that a dimension is split over.

    Attributes:
        axis: `tp`, `cp` and so on.
        order: which chunks a rank holds.
        partial: the ranks hold terms of a sum, each of the full extent.
    """

    axis: str
    order: Order = "natural"
    partial: bool = False


@dataclasses.dataclass(frozen=True)
class Dimension:
    """One dimension.

    Attributes:
        names: several where several dimensions are laid into one; none for one to be left out.
        splits: the outermost first.
    """

    names: tuple[str, ...]
    splits: tuple[AxisSplit, ...] = ()

    @property
    def is_squeezed(self) -> bool:
        """Whether it is to be left out."""
        return not self.names


@dataclasses.dataclass(frozen=True)
class Dims:
    """A line of text, understood.

    Attributes:
        text: as it was given.
        data_axis: the axis of ranks that see different samples, of which one holds the tensor.
        replicated: axes over which all ranks hold the same.
    """

    text: str
    dimensions: tuple[Dimension, ...]
    data_axis: str = "dp"
    replicated: tuple[str, ...] = ()

    @property
    def splits(self) -> tuple[AxisSplit, ...]:
        """All of them, in the order of the text."""
        return tuple(split for dimension in self.dimensions for split in dimension.splits)

    @property
    def names(self) -> tuple[tuple[str, ...], ...]:
        """The names of the dimensions that are kept."""
        return tuple(one.names for one in self.dimensions if not one.is_squeezed)


@functools.lru_cache(maxsize=4096)
def parse_dims(text: str) -> Dims:
    """Read a line.

    Raises:
        UsageError: it makes no sense; the message points at the place.
    """
    if len(text) > _LONGEST:
        raise UsageError(f"dims of {len(text)} characters: {_LONGEST} are allowed")
    shape, _, rest = text.partition("#")
    dimensions = tuple(_parse_dimensions(text, len(shape)))
    if not dimensions:
        _refuse(text, 0, "no dimension is named: give one word for each, as b s h[tp] d")
    data_axis, replicated = _parse_declared(text, len(text) - len(rest))
    dims = Dims(text, dimensions, data_axis, replicated)
    _check_unique(dims)
    return dims


def _parse_dimensions(text: str, end: int) -> Iterator[Dimension]:
    at = _after_space(text, 0)
    while at < end:
        found = _DIMENSION.match(text, at, end)
        if found is None:
            _refuse(text, at, "this is no dimension: write name, name[axis] or (name*name)[axis]")
        axes = 2 if found[2] is not None else 3
        splits = (
            ()
            if found[axes] is None
            else tuple(_parse_splits(text, found.start(axes), found[axes]))
        )
        names = _parse_names(text, at, found[1])
        if splits and not names:
            _refuse(text, at, "a dimension of length 1 is split over nothing: write 1")
        yield Dimension(names, splits)
        at = _after_space(text, found.end())


def _parse_names(text: str, at: int, word: str) -> tuple[str, ...]:
    if word == _SQUEEZED:
        return ()
    inner = word[1:-1] if word.startswith("(") else word
    names = tuple(name.strip() for name in inner.split("*"))
    for name in names:
        if not _NAME.fullmatch(name):
            _refuse(text, at, f"{name!r} is no name: take letters, digits and _")
    return names


def _parse_splits(text: str, at: int, inner: str) -> Iterator[AxisSplit]:
    for part in inner.split(","):
        begin = at + len(part) - len(part.lstrip())
        axis, _, qualifiers = part.strip().partition(":")
        if not _NAME.fullmatch(axis):
            _refuse(text, begin, f"{axis!r} is no axis: write for example tp")
        yield _parse_qualifiers(text, begin, axis, [one.strip() for one in qualifiers.split("+")])
        at += len(part) + 1


def _parse_qualifiers(text: str, at: int, axis: str, qualifiers: list[str]) -> AxisSplit:
    split = AxisSplit(axis)
    for qualifier in filter(None, qualifiers):
        if qualifier == "partial":
            split = dataclasses.replace(split, partial=True)
        elif qualifier == "zigzag":
            split = dataclasses.replace(split, order="zigzag")
        elif qualifier not in ("natural", "sharded"):
            _refuse(
                text, at, f"{qualifier!r} is none of partial, zigzag, natural and sharded: take one"
            )
    if split.partial and split.order == "zigzag":
        _refuse(text, at, "zigzag is of parts and partial of terms: give one of them")
    return split


def _parse_declared(text: str, at: int) -> tuple[str, tuple[str, ...]]:
    """What follows the #: the name of the data axis, and the replicated ones."""
    data_axis, replicated = "", []
    for found in re.finditer(r"\S+", text[at:]):
        place = at + found.start()
        axis, _, what = found[0].partition(":")
        if what == "replicated" and _NAME.fullmatch(axis):
            replicated.append(axis)
        elif axis == "dp" and what.startswith("=") and _NAME.fullmatch(what[1:]):
            if data_axis:
                _refuse(text, place, f"dp is {data_axis} already: name it once")
            data_axis = what[1:]
        else:
            _refuse(text, place, f"{found[0]!r}: write axis:replicated or dp:=axis")
    return data_axis or "dp", tuple(replicated)


def _check_unique(dims: Dims) -> None:
    names = [name for dimension in dims.dimensions for name in dimension.names]
    axes = [*(split.axis for split in dims.splits), *dims.replicated]
    for what, found in (("dimension", names), ("axis", axes)):
        for name in found:
            if found.count(name) > 1:
                again = list(re.finditer(rf"(?<!\w){re.escape(name)}(?!\w)", dims.text))[-1]
                _refuse(
                    dims.text, again.start(), f"the {what} {name!r} is named twice: once will do"
                )


def _after_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return at if found is None else found.end()


def _refuse(text: str, at: int, why: str) -> NoReturn:
    raise UsageError(f"dims: {why}\n    {text}\n    {' ' * at}^")


# --- Plans ----------------------------------------------------------------------------------------

# Nothing here reads a value: shapes, placements and coordinates are enough.

_SHARD = re.compile(r"shard\((\d{1,2})\)")
_STRIDED = re.compile(r"_S\((\d{1,2}), (\d{1,6})\)|_StridedShard\(dim=(\d{1,2}), sf=(\d{1,6})\)")
_PARTIAL = re.compile(r"partial\((\w+)\)")
_MOST_LISTED = 4
_MOST_RANKS = 1 << 20


class RankPart(NamedTuple):
    """What a rank recorded, as far as it is known without its values.

    Attributes:
        coordinates: per axis of ranks, where this rank is.
        placement: as recorded.
    """

    rank: int
    shape: tuple[int, ...]
    coordinates: Mapping[str, int]
    placement: Placement | None = None


class _RankMesh(NamedTuple):
    """Axes of ranks and what they do to a tensor."""

    sizes: dict[str, int]
    split: tuple[str, ...]
    partial: tuple[str, ...]
    same: tuple[str, ...]


# --- recorded placements --------------------------------------------------------------------------


def plan_by_placement(parts: Sequence[RankPart]) -> Assembly:
    """Put a distributed tensor together from what its ranks recorded of their placements.

    Raises:
        UsageError: a part is missing, or a placement is not known.
    """
    first = _require_placement(parts[0])
    axes = first.mesh_names or tuple(f"mesh {at}" for at in range(len(first.mesh)))
    reductions = [_PARTIAL.fullmatch(one) for one in first.placements]
    kinds = {found[1] for found in reductions if found is not None}
    if len(kinds) > 1 or kinds.difference(REDUCTIONS):
        told = ", ".join(first.placements)
        raise UsageError(f"terms that are placed as {told} cannot be reduced to one")
    roles = dict(zip(axes, first.placements, strict=True))
    mesh = _RankMesh(
        dict(zip(axes, first.mesh, strict=True)),
        tuple(axis for axis, role in roles.items() if _parse_role(role)),
        tuple(axis for axis, role in roles.items() if _PARTIAL.fullmatch(role)),
        tuple(axis for axis, role in roles.items() if role == "replicate"),
    )
    inside = [
        part._replace(coordinates=dict(zip(axes, _require_placement(part).coordinate, strict=True)))
        if _require_placement(part).coordinate
        else None
        for part in parts
    ]
    places = [None if part is None else _locate_part(part) for part in inside]
    plan = _assemble(parts, inside, places, first.global_shape, mesh)
    told = _describe_plan(
        plan.ranks, mesh, {axis: cut[0] for axis in mesh.split if (cut := _parse_role(roles[axis]))}
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


def _require_placement(part: RankPart) -> Placement:
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
        cut = _parse_role(one)
        if cut is not None and cut[0] >= len(part.shape):
            raise UsageError(
                f"rank {part.rank}: {one} is of a tensor of {len(part.shape)} dimensions"
            )
        if cut is None and one != "replicate" and not _PARTIAL.fullmatch(one):
            raise UsageError(f"the placement {one!r} is not known")
    return place


def _parse_role(role: str) -> tuple[int, int] | None:
    """The dimension that is split, and into how many pieces it was cut before."""
    if found := _SHARD.fullmatch(role):
        return int(found[1]), 1
    if found := _STRIDED.fullmatch(role):
        return int(found[1] or found[3]), int(found[2] or found[4])
    return None


def _locate_part(part: RankPart) -> Where:
    """Where a part lies: as its placements say, or else as its offset does."""
    place = _require_placement(part)
    where = [whole(extent) for extent in place.global_shape]
    for size, at, role in zip(place.mesh, place.coordinate, place.placements, strict=True):
        if cut := _parse_role(role):
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


def plan_by_dims(parts: Sequence[RankPart], dims: Dims, sizes: Mapping[str, int]) -> Assembly:
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
    mesh = _RankMesh(
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
    plan = _assemble(parts, inside, places, shape, mesh)
    along = {split.axis: at for at, one in enumerate(dims.dimensions) for split in one.splits}
    return dataclasses.replace(
        plan, words=_describe_plan(plan.ranks, mesh, along), squeezed=squeezed
    )


def _of_one_sample(parts: Sequence[RankPart], dims: Dims, mesh: _RankMesh) -> list[RankPart | None]:
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
    parts: Sequence[RankPart | None], dims: Dims, mesh: _RankMesh
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


def _assemble(
    parts: Sequence[RankPart],
    inside: Sequence[RankPart | None],
    places: Sequence[Where | None],
    shape: tuple[int, ...],
    mesh: _RankMesh,
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


def _refuse_missing(parts: Iterable[RankPart | None], mesh: _RankMesh) -> None:
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
    for one in missing:
        place = ", ".join(f"{axis} {at}" for axis, at in one.items())
        told.append(f"rank {_row_major(one, mesh.sizes)} ({place})" if by_number else place)
    shown = enumerated(told, _MOST_LISTED, between="; ")
    raise UsageError(
        f"{len(missing)} of {math.prod(sizes)} parts are missing: {shown}. "
        f"It was recorded by {named_ranks([part.rank for part in there])}"
    )


def _row_major(coordinates: Mapping[str, int], sizes: Mapping[str, int]) -> int:
    rank = 0
    for axis, size in sizes.items():
        rank = rank * size + coordinates.get(axis, 0)
    return rank


def _describe_plan(ranks: Sequence[int], mesh: _RankMesh, along: Mapping[str, int]) -> str:
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
