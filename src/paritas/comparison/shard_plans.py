"""From what was recorded, and from what the user says, to how parts are put together."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from paritas.errors import UsageError
from paritas.placement.assembly import lay_out
from paritas.placement.placement import HeldPart, MeshAxis, Placement
from paritas.results.placements import Partial, Replicate, Shard

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from paritas.placement.assembly import Assembly, Segment, Where
    from paritas.results.placements import LocalPlacement, Order, Role


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


class RankPart(NamedTuple):
    """What a rank recorded, as far as it is known without its values.

    Attributes:
        coordinates: per axis of ranks, where this rank is.
        placement: as recorded.
    """

    rank: int
    shape: tuple[int, ...]
    coordinates: Mapping[str, int]
    placement: LocalPlacement | None = None


# --- recorded placements --------------------------------------------------------------------------


def plan_by_placement(parts: Sequence[RankPart]) -> Assembly:
    """Put a distributed tensor together from what its ranks recorded of their placements.

    Raises:
        UsageError: a part is missing, or a placement is not known.
    """
    read: list[Placement] = []
    held: list[HeldPart] = []
    for rank, shape, _, place in parts:
        if place is None:
            raise UsageError(f"rank {rank} did not record how it is placed")
        read.append(Placement.read(rank, place, shape))
        where = read[-1].locate(rank, place, shape) if place.coordinate else ()
        held.append(HeldPart(rank, place.coordinate or None, where))
    return dataclasses.replace(read[0].assembly(held), placed=True)


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
    plan = _placed_by_dims(dims, known)
    held = _of_one_sample(parts, dims, plan)
    plan.refuse_missing(held)
    places, shape = _side_by_side(parts, held, plan)
    squeezed = tuple(at for at, one in enumerate(dims.dimensions) if one.is_squeezed)
    if any(shape[at] != 1 for at in squeezed):
        raise UsageError(f"dims {dims.text!r} has a 1 for a dimension of the shape {shape}")
    held = [one._replace(where=where) for one, where in zip(held, places, strict=True)]
    return dataclasses.replace(
        dataclasses.replace(plan, shape=shape).assembly(held), squeezed=squeezed
    )


def _placed_by_dims(dims: Dims, sizes: Mapping[str, int]) -> Placement:
    """The axes that split or reduce in the order of the text, then those of copies."""
    axes: list[MeshAxis] = []
    for at, dimension in enumerate(dims.dimensions):
        for split in dimension.splits:
            if split.axis in sizes:
                role: Role = Partial() if split.partial else Shard(at, order=split.order)
                axes.append(MeshAxis(split.axis, sizes[split.axis], role))
    copies = [axis for axis in sizes if axis not in {one.name for one in axes}]
    axes += [MeshAxis(axis, sizes[axis], Replicate()) for axis in copies]
    return Placement(tuple(axes), (), numbering=tuple(sizes))


def _of_one_sample(parts: Sequence[RankPart], dims: Dims, plan: Placement) -> list[HeldPart]:
    """The ranks on the axes, without those that had nothing to compute in this step."""
    axis = dims.data_axis
    held = [
        HeldPart(part.rank, tuple(part.coordinates[one.name] for one in plan.axes))
        for part in parts
    ]
    same = {one.name for one in plan.axes if isinstance(one.role, Replicate)}
    if axis not in same or axis in dims.replicated:
        return held
    busy = {part.coordinates[axis] for part in parts if math.prod(part.shape)}
    if len(busy) > 1:
        told = ", ".join(map(str, sorted(busy)))
        raise UsageError(
            f"the ranks {told} of {axis} all hold values, and dims {dims.text!r} does not say how "
            f"they belong together: split a dimension over it, as b[{axis}], or add "
            f"# {axis}:replicated"
        )
    return [
        one if not busy or part.coordinates[axis] in busy else one._replace(coordinate=None)
        for one, part in zip(held, parts, strict=True)
    ]


def _side_by_side(
    parts: Sequence[RankPart], held: Sequence[HeldPart], plan: Placement
) -> tuple[list[Where], tuple[int, ...]]:
    """Where each part lies, and the shape of the whole: as long as its parts are together."""
    found: list[list[tuple[Segment, ...]]] = [[] for _ in parts]
    shape: list[int] = []
    for at in range(len(parts[0].shape)):
        roles = {
            axis: one.role
            for axis, one in enumerate(plan.axes)
            if isinstance(one.role, Shard) and one.role.dim == at
        }
        keys = [
            None if one.coordinate is None else tuple(one.coordinate[axis] for axis in roles)
            for one in held
        ]
        extents: dict[tuple[int, ...], int] = {}
        for part, key in zip(parts, keys, strict=True):
            if key is not None and extents.setdefault(key, part.shape[at]) != part.shape[at]:
                raise UsageError(
                    f"rank {part.rank} holds {part.shape[at]} of dimension {at}, and another rank "
                    f"in its place {extents[key]}"
                )
        placed, extent = lay_out(extents, [role.order for role in roles.values()])
        shape.append(extent)
        for where, key in zip(found, keys, strict=True):
            if key is not None:
                where.append(placed[key])
    return [tuple(where) for where in found], tuple(shape)
