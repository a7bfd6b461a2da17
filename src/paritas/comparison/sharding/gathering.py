"""The records of all ranks of a dump, as what they are together."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections import defaultdict
from typing import TYPE_CHECKING

from paritas.comparison.operands import Operand
from paritas.comparison.sharding.dims import parse_dims
from paritas.comparison.sharding.plans import Part, plan_by_dims, plan_by_placement
from paritas.comparison.sharding.recipes import (
    Assembly,
    Cell,
    Disagreement,
    Refused,
    ReplicasDisagreeError,
    named_ranks,
)
from paritas.comparison.sharding.segments import whole
from paritas.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from paritas.comparison.sharding.dims import Dims
    from paritas.dumps.records import Record

__all__ = [
    "Assembly",
    "Disagreement",
    "Refused",
    "ReplicasDisagreeError",
    "agreeing",
    "gather",
    "held_part",
    "split_alike",
]

# Names of axes that an annotation may bear though this run has a single rank along them.
_USUAL = re.compile(r"(?:attn_|moe_|e)?(?:dp|tp|pp|cp|ep|sp)|recompute_pseudo")
_OUR_DIGEST = re.compile(r"[0-9a-f]{32}")


def gather(
    records: Sequence[Record],
    *,
    dims_for: Callable[[Record], str | None],
    coordinates: Callable[[int], Mapping[str, int] | None],
    mesh: Mapping[str, int],
    ranks: Sequence[int] = (),
) -> list[Operand]:
    """Put together what ranks recorded of one value in one step.

    An annotation goes before a recorded placement. What neither says anything of stays what each
    rank has by itself. Parts that do not fit together become an operand that says so when it is
    read.

    Args:
        records: of all ranks of a dump.
        dims_for: the annotation of a record, or None.
        coordinates: where a rank is on the axes of the mesh, or None where that is not known.
        mesh: per axis, how many ranks there are along it.
        ranks: all of the dump's, if the records are not of all of them.

    Returns:
        In the order of the records that come first in each.
    """
    groups: dict[tuple[int, str], list[Record]] = defaultdict(list)
    for record in records:
        groups[record.step, record.id].append(record)
    everyone = sorted({*ranks, *(record.rank for record in records)})
    gathering = _Gathering(coordinates, dict(mesh), everyone)
    found: list[Operand] = []
    for group in groups.values():
        text = dims_for(group[0])
        placed = any(record.placement is not None for record in group)
        if group[0].tensor is None or not (text or placed):
            found += [Operand((record,)) for record in group]
        elif text:
            found.append(gathering.by_dims(group, text))
        else:
            found += [gathering.by_placement(instance) for instance in _instances(group)]
    return found


def split_alike(my: Iterable[Record], golden: Iterable[Record]) -> bool:
    """Whether the same ranks hold the same parts of a value in both dumps."""
    return set(map(held_part, my)) == set(map(held_part, golden))


def held_part(record: Record) -> tuple[object, ...]:
    """Whose a record is and where it lies, as far as it was recorded; to compare dumps by."""
    place = record.placement
    told = place and (place.mesh, place.coordinate, place.placements, place.global_offset)
    return record.rank, told


def agreeing(records: Sequence[Record]) -> Operand | None:
    """One operand of records that are known to be the same on all ranks; None if they are not."""
    first = records[0]
    if first.is_summary:  # equal figures do not make equal values
        return None
    if first.tensor is None:
        same = all(one.tensor is None and one.value == first.value for one in records)
        return Operand(tuple(records)) if same else None
    if not all(_same_bits(first, record) for record in records):
        return None
    cell = Cell(tuple(map(whole, first.tensor.shape)), (tuple(range(len(records))),))
    ranks = tuple(record.rank for record in records)
    recipe = Assembly(
        f"the same on {named_ranks(ranks)}",
        first.tensor.shape,
        ranks,
        (cell,),
        settled=frozenset(range(1, len(records))),
    )
    return Operand(tuple(records), recipe)


def _same_bits(first: Record, other: Record) -> bool:
    if first.tensor is None or other.tensor is None or first.payload is None:
        return False
    return (
        _OUR_DIGEST.fullmatch(first.digest) is not None
        and first.digest == other.digest
        and first.tensor.dtype == other.tensor.dtype
        and first.tensor.shape == other.tensor.shape
        and other.payload is not None
        and first.payload.shape == other.payload.shape
    )


def _instances(records: Sequence[Record]) -> list[list[Record]]:
    """Records of one name, told apart where several groups of ranks have a mesh each."""
    found: dict[tuple[object, ...], list[Record]] = defaultdict(list)
    seen: dict[tuple[object, ...], int] = defaultdict(int)
    for record in sorted(records, key=lambda one: one.rank):
        place = record.placement
        if place is None:
            found[(record.rank,)].append(record)
            continue
        kind = (place.mesh, place.mesh_names, place.placements, place.global_shape)
        # Regular meshes: the k-th rank at each coordinate belongs to the k-th of them.
        number = seen[kind, place.coordinate]
        seen[kind, place.coordinate] += 1
        # A rank outside of the mesh holds nothing of it.
        found[kind, number if place.coordinate else 0].append(record)
    return list(found.values())


class _Gathering:
    """Plans, made once for all records that are split in the same way."""

    def __init__(
        self,
        coordinates: Callable[[int], Mapping[str, int] | None],
        mesh: dict[str, int],
        ranks: Sequence[int],
    ) -> None:
        self._coordinates = coordinates
        self._mesh = mesh
        self._ranks = ranks
        self._plans: dict[object, Assembly | UsageError] = {}

    def by_placement(self, records: Sequence[Record]) -> Operand:
        if records[0].placement is None:
            return Operand(tuple(records))
        parts = [Part(one.rank, _shape(one), {}, one.placement) for one in records]
        key = tuple((part.rank, part.shape, part.placement) for part in parts)
        return self._operand(records, key, lambda: plan_by_placement(parts))

    def by_dims(self, records: Sequence[Record], text: str) -> Operand:
        ordered = sorted(records, key=lambda one: one.rank)
        key = (text, tuple((one.rank, _shape(one)) for one in ordered))
        return self._operand(ordered, key, lambda: self._by_dims(ordered, text))

    def _by_dims(self, records: Sequence[Record], text: str) -> Assembly:
        if any(record.tensor is None for record in records):
            raise UsageError("some ranks hold a tensor and others do not")
        if len({record.rank for record in records}) < len(records):
            raise UsageError("a rank recorded it several times in one step")
        dims = parse_dims(text)
        places = {rank: self._coordinates(rank) for rank in self._ranks}
        sizes = self._mesh
        axes = {split.axis for split in dims.splits}
        if all(place is None for place in places.values()):
            if len(axes) > 1 and len(self._ranks) > 1:
                raise UsageError(
                    f"dims {text!r} names the axes {', '.join(sorted(axes))}, and which rank is "
                    f"where on them is not known: give the mesh, as {'=2,'.join(sorted(axes))}=2"
                )
            # A single axis can only be that of all ranks.
            axis = next(iter(axes), "rank")
            sizes = {axis: len(self._ranks)}
            places = {rank: {axis: at} for at, rank in enumerate(self._ranks)}
        if len(self._ranks) > 1:
            _check_axes(dims, sizes)
        parts = [Part(one.rank, _shape(one), places[one.rank] or {}) for one in records]
        return plan_by_dims(parts, dims, sizes)

    def _operand(
        self, records: Sequence[Record], key: object, plan: Callable[[], Assembly]
    ) -> Operand:
        found = self._plans.get(key)
        if found is None:
            try:
                found = plan()
            except UsageError as error:
                found = error
            self._plans[key] = found
        if isinstance(found, UsageError):
            return Operand(tuple(records), Refused(str(found)))
        if len(records) == 1 and not found.squeezed and found.cells and _is_whole(found):
            return Operand(tuple(records))
        settled = {
            other for first, other in found.copies if _same_bits(records[first], records[other])
        }
        return Operand(tuple(records), dataclasses.replace(found, settled=frozenset(settled)))


def _shape(record: Record) -> tuple[int, ...]:
    return record.tensor.shape if record.tensor is not None else ()


def _is_whole(plan: Assembly) -> bool:
    return len(plan.cells) == 1 and all(len(one) == 1 for one in plan.cells[0].where)


def _check_axes(dims: Dims, sizes: Mapping[str, int]) -> None:
    for axis in (*(split.axis for split in dims.splits), *dims.replicated):
        if axis in sizes or _USUAL.fullmatch(axis):
            continue
        near = difflib.get_close_matches(axis, sizes, 1)
        hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(sizes) or 'none'}"
        raise UsageError(f"dims {dims.text!r}: nothing is known of the axis {axis!r}; {hint}")
