"""Distributed tensors in dumps of msprobe: which part of the whole each rank recorded.

msprobe notes the mesh, the placements and the local shape. What the whole is like follows from the
shapes that the other ranks recorded at the same place.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec.structs import replace

from paritas.dumps.records import Placement
from paritas.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paritas.dumps.foreign.finding import Problems
    from paritas.dumps.records import Record

__all__ = ["Sharding", "place_shards", "sharding_of"]

_MOST_DIMENSIONS = 8
_MOST_RANKS = 1 << 20
_LONGEST_NAME = 32
_MOST_ELEMENTS = 2**58


class Sharding(NamedTuple):
    """What msprobe says of a distributed tensor.

    Attributes:
        extents: of the mesh.
        ranks: of the mesh, in row-major order.
        placements: per dimension of the mesh, as `Placement` has them.
        dimensions: the dimension of the tensor that each of these shards, or None.
    """

    extents: tuple[int, ...]
    ranks: tuple[int, ...]
    placements: tuple[str, ...]
    dimensions: tuple[int | None, ...]


def sharding_of(leaf: dict[str, Any]) -> Sharding | None:
    """How a tensor was distributed; None where it was not.

    Raises:
        UsageError: what is said of it makes no sense.
    """
    if "device_mesh" not in leaf and "placements" not in leaf:
        return None
    extents, ranks = _mesh(leaf.get("device_mesh"))
    told = leaf.get("placements")
    if not isinstance(told, list) or len(told) != len(extents):
        raise UsageError(f"its placements on a mesh of {extents} are {str(told)[:80]}")
    placements = [_placement(one, len(leaf["shape"])) for one in told]
    names, dimensions = zip(*placements, strict=True)
    return Sharding(extents, ranks, names, dimensions)


def _mesh(told: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    extents: list[int] = []
    level: list[Any] = [told]
    while level and all(isinstance(one, list) for one in level):
        lengths = {len(one) for one in level}
        level = list(itertools.chain.from_iterable(level))
        if len(lengths) != 1 or len(extents) >= _MOST_DIMENSIONS or len(level) > _MOST_RANKS:
            break
        extents.append(lengths.pop())
    ranks = tuple(one for one in level if type(one) is int)
    if not ranks or len(ranks) != len(level) or math.prod(extents) != len(ranks):
        raise UsageError(f"its mesh is {str(told)[:80]}")
    return tuple(extents), ranks


def _placement(told: Any, rank: int) -> tuple[str, int | None]:
    match told:
        case {"Shard": {"dim": int(dimension)}} if -rank <= dimension < rank:
            return f"shard({dimension % rank})", dimension % rank
        case {"Replicate": _}:
            return "replicate", None
        case {"Partial": {"reduce_op": str(how)}} if how.isidentifier():
            return f"partial({how[:_LONGEST_NAME]})", None
    raise UsageError(f"its placement is {str(told)[:80]}")


def place_shards(
    records: Mapping[int, list[Record]],
    shardings: Mapping[int, Mapping[int, Sharding]],
    problems: Problems,
) -> None:
    """Say of each distributed tensor which part of the whole it is.

    Args:
        records: by rank; what is found out is put in their place.
        shardings: by rank and place in that rank's list.
    """
    shapes: defaultdict[tuple[int, str], dict[int, tuple[int, ...]]] = defaultdict(dict)
    for rank, known in shardings.items():
        for at in known:
            record = records[rank][at]
            if record.tensor is not None:
                shapes[record.step, record.id][rank] = record.tensor.shape
    for rank, known in shardings.items():
        for at, sharding in known.items():
            record = records[rank][at]
            try:
                placement = _placed(rank, sharding, shapes[record.step, record.id])
            except UsageError as error:
                problems.add(f"{record.id} of step {record.step}, rank {rank}: {error}")
                continue
            records[rank][at] = replace(record, placement=placement)


def _placed(rank: int, sharding: Sharding, shapes: Mapping[int, tuple[int, ...]]) -> Placement:
    extents = sharding.extents
    if rank not in sharding.ranks:
        raise UsageError(f"its mesh has the ranks {str(list(sharding.ranks))[:80]} alone")
    own = sharding.ranks.index(rank)
    steps = [math.prod(extents[place + 1 :]) for place in range(len(extents))]
    coordinate = tuple(own // step % extent for step, extent in zip(steps, extents, strict=True))
    whole, offset = list(shapes[rank]), [0] * len(shapes[rank])
    cut = [dimension for dimension in sharding.dimensions if dimension is not None]
    if len(set(cut)) != len(cut):
        raise UsageError("one dimension is cut along several of the mesh's, which is not followed")
    for mesh, dimension in enumerate(sharding.dimensions):
        if dimension is None:
            continue
        first = own - coordinate[mesh] * steps[mesh]
        along = [sharding.ranks[first + place * steps[mesh]] for place in range(extents[mesh])]
        missing = [other for other in along if len(shapes.get(other, ())) != len(whole)]
        if missing:
            raise UsageError(f"it is a part of what rank {missing[0]} has not recorded")
        parts = [shapes[other][dimension] for other in along]
        whole[dimension] = sum(parts)
        offset[dimension] = sum(parts[: coordinate[mesh]])
    if math.prod(max(extent, 1) for extent in whole) > _MOST_ELEMENTS:
        raise UsageError(f"it is a part of {tuple(whole)}, larger than any memory")
    return Placement(
        mesh=extents,
        coordinate=coordinate,
        placements=sharding.placements,
        global_shape=tuple(whole),
        global_offset=tuple(offset),
    )
