"""Where the ranks of a dump are on the axes of their mesh."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

from paritas.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paritas.dumps.opening import ReadableDump

__all__ = ["RankAxes", "axes_of", "row_major"]

# Of ranks beyond the mesh that was given: which of its copies they belong to.
COPY = "copy"


@dataclasses.dataclass(frozen=True)
class RankAxes:
    """Axes, and where ranks are on them.

    Attributes:
        sizes: how many ranks there are along each axis.
        places: by rank; None where nothing is known of any.
        problem: why what the user said does not hold.
        notes: what a reader should know.
    """

    sizes: dict[str, int]
    places: dict[int, dict[str, int]] | None = None
    problem: str = ""
    notes: tuple[str, ...] = ()

    def coordinates(self, rank: int) -> Mapping[str, int] | None:
        """Where a rank is.

        Raises:
            UsageError: what the user said of the mesh does not fit this dump.
        """
        if self.problem:
            raise UsageError(self.problem)
        return None if self.places is None else self.places.get(rank, {})

    def known(self, rank: int) -> object:
        """The same, to compare two dumps by."""
        found = {} if self.places is None else self.places.get(rank, {})
        return tuple(sorted(found.items()))


def axes_of(dump: ReadableDump, side: str, mesh: Mapping[str, int]) -> RankAxes:
    """What is known of the ranks of a dump: from the user, from the dump, or from placements.

    Args:
        side: what to call the dump in a message.
        mesh: as the user gave it; may be empty.
    """
    world = max([*(rank + 1 for rank in dump.ranks), *_world_sizes(dump)])
    if world == 1:
        # A run of a single rank holds everything, whatever the other one's mesh is.
        return RankAxes(dict.fromkeys(mesh, 1), {0: {}})
    if mesh:
        return _from_mesh(dict(mesh), world, dump, side)
    return _from_dump(dump) or _from_placements(dump) or RankAxes({})


def _world_sizes(dump: ReadableDump) -> list[int]:
    return [dump.header(rank).world_size for rank in dump.ranks]


def row_major(mesh: Mapping[str, int], rank: int) -> dict[str, int]:
    """Where a rank is on a mesh; along the last axis neighbours have consecutive numbers."""
    found = {}
    for axis in reversed(list(mesh)):
        rank, found[axis] = divmod(rank, mesh[axis])
    return {axis: found[axis] for axis in mesh}


def _from_mesh(mesh: dict[str, int], world: int, dump: ReadableDump, side: str) -> RankAxes:
    size = math.prod(mesh.values())
    told = ", ".join(f"{axis}={extent}" for axis, extent in mesh.items())
    if size < 1 or world % size:
        problem = f"the mesh {told} has {size} ranks, and there are {world} in {side} dump"
        return RankAxes(mesh, problem=f"{problem}: give a mesh that divides them")
    notes: tuple[str, ...] = ()
    if size < world:
        note = (
            f"the mesh {told} has {size} of the {world} ranks of {side} dump: the others are "
            "taken for copies, and must agree"
        )
        notes = (note,)
        mesh = {COPY: world // size, **mesh}
    return RankAxes(mesh, {rank: row_major(mesh, rank) for rank in dump.ranks}, notes=notes)


def _from_dump(dump: ReadableDump) -> RankAxes | None:
    """What SGLang notes of its ranks: `tp_rank`, `tp_size` and so on."""
    told: dict[int, dict[str, int]] = getattr(dump, "parallel", {})
    sizes: dict[str, int] = {}
    places: dict[int, dict[str, int]] = {}
    for rank, numbers in told.items():
        places[rank] = {}
        for key, at in numbers.items():
            axis = key.removesuffix("_rank")
            size = numbers.get(f"{axis}_size")
            if axis == key or size is None:
                continue
            if sizes.setdefault(axis, size) != size:
                problem = f"rank {rank} has {axis}_size {size}, and others {sizes[axis]}"
                return RankAxes({}, problem=problem)
            places[rank][axis] = at
    return RankAxes(sizes, places) if places else None


def _from_placements(dump: ReadableDump) -> RankAxes | None:
    """Named meshes of distributed tensors; of one name, the first counts."""
    sizes: dict[str, int] = {}
    places: dict[int, dict[str, int]] = {}
    for record in dump.records():
        place = record.placement
        if place is None or len(place.mesh_names) != len(place.coordinate):
            continue
        found = places.setdefault(record.rank, {})
        for axis, size, at in zip(place.mesh_names, place.mesh, place.coordinate, strict=False):
            if sizes.setdefault(axis, size) == size:
                found.setdefault(axis, at)
    return RankAxes(sizes, places) if places else None
