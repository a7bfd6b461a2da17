"""The operands of both dumps: compared rank by rank, or assembled from several ranks."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import re
from collections import defaultdict
from typing import TYPE_CHECKING

from paritas.comparison.operands import Operand, same_digest
from paritas.comparison.rules import Rearranged, parse_dims
from paritas.core.errors import UsageError
from paritas.core.placement.assembly import Assembly, Cell, Refused, named_ranks, whole
from paritas.core.placement.meshes import coordinates_by_axis, number_meshes
from paritas.core.placement.placement import (
    HeldPart,
    MeshAxis,
    Placement,
    RankPart,
    plan_by_placement,
)
from paritas.core.results.items import Partial, Replicate, Shard
from paritas.core.results.wording import count_things

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from paritas.comparison.rules import Dims, Rules
    from paritas.core.results.items import Role
    from paritas.formats.dumps.opening import ReadableDump
    from paritas.formats.files.records import Record


# --- Both dumps -----------------------------------------------------------------------------------


def operands(
    my: ReadableDump, golden: ReadableDump, rules: Rules
) -> tuple[list[Operand], list[Operand], list[str]]:
    """The operands of both sides, and notes for the user.

    Values are compared rank by rank if both dumps are split the same way, which is most precise.
    Otherwise they are assembled where placements or annotations say how.

    Raises:
        UsageError: an annotation of the user is invalid.
    """
    for _, text in rules.dims:
        parse_dims(text)
    my_side, golden_side = _DumpSide(my, "my", rules), _DumpSide(golden, "the golden", rules)
    if my_side.is_plain and golden_side.is_plain and my_side.ranks == golden_side.ranks:
        singles = [
            [Operand((record,)) for record in side.records] for side in (my_side, golden_side)
        ]
        return singles[0], singles[1], []
    names = dict.fromkeys((*golden_side.groups, *my_side.groups))
    together = {name for name in names if my_side.signatures(name) != golden_side.signatures(name)}
    operands_by_side = (
        my_side.operands(together, alone=golden_side.ranks),
        golden_side.operands(together, alone=my_side.ranks),
    )
    orders = _find_orders(my_side, golden_side, together)
    return (
        [_apply_order(operand, orders, 0) for operand in operands_by_side[0]],
        [_apply_order(operand, orders, 1) for operand in operands_by_side[1]],
        [
            *my_side.axes.notes,
            *golden_side.axes.notes,
            *_note_unclear(my_side, golden_side, filter(together.__contains__, names)),
        ],
    )


class _DumpSide:
    """One dump, sorted by names."""

    def __init__(self, dump: ReadableDump, side: str, rules: Rules) -> None:
        self.records = list(dump.records())
        self.ranks = set(dump.ranks)
        self.axes: RankAxes = axes_of(dump, side, rules.mesh)
        self._rules = rules
        self._own_dims = getattr(dump, "dims_of", None)
        self._dims: dict[tuple[int, int], str | None] = {}

    @functools.cached_property
    def groups(self) -> dict[str, dict[int, list[Record]]]:
        """The records by name and step."""
        records_by_name: dict[str, dict[int, list[Record]]] = {}
        for record in self.records:
            records_by_name.setdefault(record.id, {}).setdefault(record.step, []).append(record)
        return records_by_name

    @property
    def is_plain(self) -> bool:
        """Whether nothing says how its tensors are split."""
        return (
            not self._rules.dims
            and self._own_dims is None
            and all(record.placement is None for record in self.records)
        )

    def dims_for(self, record: Record) -> str | None:
        """The user's annotation of a record, or the dump's own."""
        key = (record.rank, record.sequence)
        if key not in self._dims:
            text = self._rules.dims_for(record.id, record.site.module) if self._rules.dims else None
            if not text and record.placement is None and self._own_dims is not None:
                text = self._own_dims(record)
            self._dims[key] = text or None
        return self._dims[key]

    def first_records(self, name: str) -> list[Record]:
        """The records of a name in the first step."""
        return next(iter(self.groups.get(name, {}).values()), [])

    def signatures(self, name: str) -> set[frozenset[object]]:
        """Which ranks hold which parts of a value, for each distinct way in which it is split."""
        steps = self.groups.get(name, {})
        return {frozenset(map(self._signature, records)) for records in steps.values()}

    def _signature(self, record: Record) -> object:
        text = self.dims_for(record)
        return held_part(record), text, self.axes.coordinate_key(record.rank) if text else None

    def says_how(self, record: Record) -> bool:
        """Whether it is known which part of the whole a record is."""
        return record.placement is not None or self.dims_for(record) is not None

    def operands(self, together: set[str], alone: set[int]) -> list[Operand]:
        """All operands: the names in `together` assembled, the others rank by rank.

        Args:
            alone: the ranks of the other side.
        """
        joined: list[Record] = []
        side_operands: list[Operand] = []
        for name, steps in self.groups.items():
            for records in steps.values():
                if name in together and any(map(self.says_how, records)):
                    joined += records
                elif (
                    name in together
                    and len(records) > 1
                    and (shared_operand := self._same(records, alone))
                ):
                    side_operands.append(shared_operand)
                else:
                    side_operands += [Operand((record,)) for record in records]
        side_operands += gather(
            joined,
            dims_for=self.dims_for,
            coordinates=self.axes.coordinates,
            mesh=self.axes.sizes,
            ranks=sorted(self.ranks),
        )
        return sorted(
            side_operands, key=lambda operand: (operand.record.rank, operand.record.sequence)
        )

    def _same(self, records: Sequence[Record], others: set[int]) -> Operand | None:
        """The value that all ranks have in common, if the other side has different ranks."""
        ranks = {record.rank for record in records}
        if len(ranks) < len(records) or ranks == others:
            return None
        return agreeing(records)


def _note_unclear(dump_side: _DumpSide, golden_side: _DumpSide, names: Iterable[str]) -> list[str]:
    """Note values that are on different ranks on the two sides, if nothing says how."""
    unclear: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name in names:
        sides = [side.first_records(name) for side in (dump_side, golden_side)]
        ranks = [sorted({record.rank for record in records}) for records in sides]
        if not all(ranks) or ranks[0] == ranks[1]:
            continue
        if any(
            len(of_side) > 1 and not any(map(side.says_how, records)) and agreeing(records) is None
            for side, records, of_side in zip((dump_side, golden_side), sides, ranks, strict=True)
        ):
            key = (named_ranks(ranks[0]), named_ranks(ranks[1]))
            unclear[key].append(f"{name}{_describe_shapes(sides)}")
    return [
        f"{count_things(len(unclear_values), 'value')} on {my} in my dump and on {golden} in the "
        "golden dump: "
        f"nothing says how they are split, so they are compared by rank number. Use --dims and "
        f"--mesh to describe the split. The first is {unclear_values[0]}"
        for (my, golden), unclear_values in unclear.items()
    ]


def _describe_shapes(sides: Sequence[Sequence[Record]]) -> str:
    """The shapes of both sides, and the dimension that appears to be split."""
    my, golden = (next((record.tensor for record in side if record.tensor), None) for side in sides)
    if my is None or golden is None:
        return ""
    shapes = f", {list(my.shape)} and {list(golden.shape)}"
    if len(my.shape) != len(golden.shape):
        return shapes
    unlike = [at for at, length in enumerate(my.shape) if length != golden.shape[at]]
    same_size = math.prod(golden.shape) * len(sides[1]) == math.prod(my.shape) * len(sides[0])
    if len(unlike) != 1 or not same_size:
        return shapes
    return f"{shapes}: dimension {unlike[0]} appears to be split"


# --- names of dimensions --------------------------------------------------------------------------

Orders = dict[str, tuple[Rearranged | None, Rearranged | None]]


def _find_orders(dump_side: _DumpSide, golden_side: _DumpSide, names: Iterable[str]) -> Orders:
    """How to bring the dimensions of both sides into the same order, by name."""
    orders: Orders = {}
    for name in names:
        texts = [
            side.dims_for(records[0])
            for side in (dump_side, golden_side)
            if (records := side.first_records(name))
        ]
        try:
            match texts:
                case [str(my), str(golden)] if my != golden:
                    orders[name] = arrange(parse_dims(my).names, parse_dims(golden).names)
        except UsageError:  # in a dump: assembling its parts reports it
            continue
    return orders


def _apply_order(operand: Operand, orders: Orders, side: int) -> Operand:
    recipe = orders.get(operand.record.id, (None, None))[side]
    return operand if recipe is None else Operand((operand,), recipe)


# --- The records of all ranks ---------------------------------------------------------------------

# Names of axes that an annotation may use even if this run has only one rank along them.
_USUAL = re.compile(r"(?:attn_|moe_|e)?(?:dp|tp|pp|cp|ep|sp)|recompute_pseudo")


def gather(
    records: Sequence[Record],
    *,
    dims_for: Callable[[Record], str | None],
    coordinates: Callable[[int], Mapping[str, int] | None],
    mesh: Mapping[str, int],
    ranks: Sequence[int] = (),
) -> list[Operand]:
    """Assemble what the ranks recorded of each value in each step.

    An annotation overrides a recorded placement. Without either, each rank's value stays separate.
    Parts that do not fit become an operand that raises when it is read.

    Args:
        records: of all ranks of a dump.
        dims_for: returns the annotation of a record, or None.
        coordinates: returns the mesh coordinates of a rank, or None if unknown.
        mesh: the number of ranks along each axis.
        ranks: all ranks of the dump, if the records are not from all of them.

    Returns:
        In the order of each operand's first record.
    """
    groups: dict[tuple[int, str], list[Record]] = defaultdict(list)
    for record in records:
        groups[record.step, record.id].append(record)
    everyone = sorted({*ranks, *(record.rank for record in records)})
    gathering = _Gathering(coordinates, dict(mesh), everyone)
    assembled_operands: list[Operand] = []
    for group in groups.values():
        text = dims_for(group[0])
        placed = any(record.placement is not None for record in group)
        if group[0].tensor is None or not (text or placed):
            assembled_operands += [Operand((record,)) for record in group]
        elif text:
            assembled_operands.append(gathering.by_dims(group, text))
        else:
            assembled_operands += [
                gathering.by_placement(instance) for instance in _split_instances(group)
            ]
    return assembled_operands


def held_part(record: Record) -> tuple[object, ...]:
    """The rank and recorded placement, for comparing dumps."""
    placement = record.placement
    where = placement and (
        placement.mesh,
        placement.coordinate,
        placement.placements,
        placement.global_offset,
    )
    return record.rank, where


def agreeing(records: Sequence[Record]) -> Operand | None:
    """One operand for records that are known to be the same on all ranks, otherwise None."""
    first = records[0]
    if first.is_summary:  # equal statistics do not imply equal values
        return None
    if first.tensor is None:
        same = all(record.tensor is None and record.value == first.value for record in records)
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
    return first.payload is not None and same_digest(first, other)


def _split_instances(records: Sequence[Record]) -> list[list[Record]]:
    """Group the records of one name by mesh, if several groups of ranks have a mesh each."""
    ordered = sorted(records, key=lambda record: record.rank)
    kinds = [
        (record.rank,)
        if (placement := record.placement) is None
        else (placement.mesh, placement.mesh_names, placement.placements, placement.global_shape)
        for record in ordered
    ]
    coordinates = [record.placement and record.placement.coordinate for record in ordered]
    numbers = number_meshes(zip(kinds, coordinates, strict=True))
    groups: dict[object, list[Record]] = defaultdict(list)
    for record, kind, coordinate, number in zip(ordered, kinds, coordinates, numbers, strict=True):
        # A rank outside the mesh holds no part.
        groups[kind, number if coordinate else 0].append(record)
    return list(groups.values())


class _Gathering:
    """Plans each way of splitting only once."""

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
        parts = [
            RankPart(record.rank, _record_shape(record), {}, record.placement) for record in records
        ]
        key = tuple((part.rank, part.shape, part.placement) for part in parts)
        return self._operand(records, key, lambda: plan_by_placement(parts))

    def by_dims(self, records: Sequence[Record], text: str) -> Operand:
        ordered = sorted(records, key=lambda record: record.rank)
        key = (text, tuple((record.rank, _record_shape(record)) for record in ordered))
        return self._operand(ordered, key, lambda: self._by_dims(ordered, text))

    def _by_dims(self, records: Sequence[Record], text: str) -> Assembly:
        if any(record.tensor is None for record in records):
            raise UsageError("some ranks recorded a tensor and others did not")
        if len({record.rank for record in records}) < len(records):
            raise UsageError("a rank recorded it more than once in one step")
        dims = parse_dims(text)
        places = {rank: self._coordinates(rank) for rank in self._ranks}
        sizes = self._mesh
        axes = {split.axis for split in dims.splits}
        if all(position is None for position in places.values()):
            if len(axes) > 1 and len(self._ranks) > 1:
                raise UsageError(
                    f"dims {text!r} uses the axes {', '.join(sorted(axes))}, but the ranks' "
                    f"coordinates are unknown: give the mesh, such as "
                    f"--mesh {'=2,'.join(sorted(axes))}=2"
                )
            # A single axis must contain all ranks.
            axis = next(iter(axes), "rank")
            sizes = {axis: len(self._ranks)}
            places = {rank: {axis: at} for at, rank in enumerate(self._ranks)}
        if len(self._ranks) > 1:
            _check_axes(dims, sizes)
        parts = [
            RankPart(record.rank, _record_shape(record), places[record.rank] or {})
            for record in records
        ]
        return plan_by_dims(parts, dims, sizes)

    def _operand(
        self, records: Sequence[Record], key: object, plan: Callable[[], Assembly]
    ) -> Operand:
        assembly = self._plans.get(key)
        if assembly is None:
            try:
                assembly = plan()
            except UsageError as error:
                assembly = error
            self._plans[key] = assembly
        if isinstance(assembly, UsageError):
            return Operand(tuple(records), Refused(str(assembly)))
        if len(records) == 1 and not assembly.squeezed and assembly.cells and _is_whole(assembly):
            return Operand(tuple(records))
        settled = {
            other for first, other in assembly.copies if _same_bits(records[first], records[other])
        }
        return Operand(tuple(records), dataclasses.replace(assembly, settled=frozenset(settled)))


def _record_shape(record: Record) -> tuple[int, ...]:
    return record.tensor.shape if record.tensor is not None else ()


def _is_whole(plan: Assembly) -> bool:
    return len(plan.cells) == 1 and all(len(segments) == 1 for segments in plan.cells[0].where)


def _check_axes(dims: Dims, sizes: Mapping[str, int]) -> None:
    for axis in (*(split.axis for split in dims.splits), *dims.replicated):
        if axis in sizes or _USUAL.fullmatch(axis):
            continue
        near = difflib.get_close_matches(axis, sizes, 1)
        hint = f"did you mean {near[0]}?" if near else f"known axes: {', '.join(sizes) or 'none'}"
        raise UsageError(f"dims {dims.text!r}: unknown axis {axis!r}; {hint}")


# --- Where each rank is on the axes of its mesh ---------------------------------------------------

# The axis of copies, if there are more ranks than the given mesh has.
COPY = "copy"


@dataclasses.dataclass(frozen=True)
class RankAxes:
    """Mesh axes, and the ranks' coordinates on them.

    Attributes:
        sizes: the number of ranks along each axis.
        places: coordinates by rank; None if unknown.
        problem: why the user's mesh does not fit the dump.
        notes: for the user.
    """

    sizes: dict[str, int]
    places: dict[int, dict[str, int]] | None = None
    problem: str = ""
    notes: tuple[str, ...] = ()

    def coordinates(self, rank: int) -> Mapping[str, int] | None:
        """The coordinates of a rank."""
        if self.problem:
            raise UsageError(self.problem)
        return None if self.places is None else self.places.get(rank, {})

    def coordinate_key(self, rank: int) -> object:
        """A key for comparing the coordinates in two dumps."""
        rank_coordinates = {} if self.places is None else self.places.get(rank, {})
        return tuple(sorted(rank_coordinates.items()))


def axes_of(dump: ReadableDump, side: str, mesh: Mapping[str, int]) -> RankAxes:
    """The ranks' coordinates from the user's mesh, the dump's own notes, or placements.

    Args:
        side: the name of the dump in messages.
        mesh: may be empty.
    """
    world = max(max(rank + 1, dump.header(rank).world_size) for rank in dump.ranks)
    if world == 1:
        # A single rank holds everything, whatever the mesh of the other dump.
        return RankAxes(dict.fromkeys(mesh, 1), {0: {}})
    if mesh:
        return _from_mesh(dict(mesh), world, dump, side)
    return _from_dump(dump) or _from_placements(dump) or RankAxes({})


def _from_mesh(mesh: dict[str, int], world: int, dump: ReadableDump, side: str) -> RankAxes:
    size = math.prod(mesh.values())
    shown = ", ".join(f"{axis}={extent}" for axis, extent in mesh.items())
    if size < 1 or world % size:
        problem = f"the mesh {shown} has {size} ranks, but {side} dump has {world}"
        return RankAxes(mesh, problem=f"{problem}: use a mesh that divides them")
    notes: tuple[str, ...] = ()
    if size < world:
        note = (
            f"the mesh {shown} covers {size} of the {world} ranks of {side} dump: the other ranks "
            "are treated as copies and must agree"
        )
        notes = (note,)
        mesh = {COPY: world // size, **mesh}
    coordinates = {rank: coordinates_by_axis(rank, mesh) for rank in dump.ranks}
    return RankAxes(mesh, coordinates, notes=notes)


def _from_dump(dump: ReadableDump) -> RankAxes | None:
    """The coordinates that SGLang records: `tp_rank`, `tp_size` and so on."""
    recorded: dict[int, dict[str, int]] = getattr(dump, "parallel", {})
    sizes: dict[str, int] = {}
    places: dict[int, dict[str, int]] = {}
    for rank, numbers in recorded.items():
        places[rank] = {}
        for key, at in numbers.items():
            axis = key.removesuffix("_rank")
            size = numbers.get(f"{axis}_size")
            if axis == key or size is None:
                continue
            if sizes.setdefault(axis, size) != size:
                problem = f"rank {rank} has {axis}_size {size}, but other ranks have {sizes[axis]}"
                return RankAxes({}, problem=problem)
            places[rank][axis] = at
    return RankAxes(sizes, places) if places else None


def _from_placements(dump: ReadableDump) -> RankAxes | None:
    """The named meshes of distributed tensors; the first of each name applies."""
    sizes: dict[str, int] = {}
    places: dict[int, dict[str, int]] = {}
    for record in dump.records():
        placement = record.placement
        if placement is None or len(placement.mesh_names) != len(placement.coordinate):
            continue
        rank_coordinates = places.setdefault(record.rank, {})
        for axis, size, at in zip(
            placement.mesh_names, placement.mesh, placement.coordinate, strict=False
        ):
            if sizes.setdefault(axis, size) == size:
                rank_coordinates.setdefault(axis, at)
    return RankAxes(sizes, places) if places else None


# --- How to assemble the parts of a tensor --------------------------------------------------------

# Shapes, placements and coordinates are enough to plan this; no value is read.


def plan_by_dims(parts: Sequence[RankPart], dims: Dims, sizes: Mapping[str, int]) -> Assembly:
    """Plan by an annotation.

    Args:
        parts: all parts of one tensor.
        sizes: the number of ranks along each axis, by default 1.

    Raises:
        UsageError: a part is missing, or the parts do not fit the annotation.
    """
    split_sizes = {axis: size for axis, size in sizes.items() if size > 1}
    for part in parts:
        if len(part.shape) != len(dims.dimensions):
            raise UsageError(
                f"dims {dims.text!r} has {len(dims.dimensions)} dimensions, but rank {part.rank} "
                f"holds a tensor of shape {part.shape}"
            )
        for axis, size in split_sizes.items():
            if part.coordinates.get(axis, -1) not in range(size):
                at = part.coordinates.get(axis, "unknown")
                raise UsageError(
                    f"rank {part.rank} has coordinate {at} on axis {axis}, which has {size} ranks"
                )
    plan = _placement_by_dims(dims, split_sizes)
    hold_one_sample = _hold_one_sample(parts, dims, plan)
    plan.refuse_missing(hold_one_sample)
    places, shape = plan.lay_out(hold_one_sample, [part.shape for part in parts])
    squeezed = tuple(at for at, dimension in enumerate(dims.dimensions) if dimension.is_squeezed)
    if any(shape[at] != 1 for at in squeezed):
        raise UsageError(f"dims {dims.text!r} has a 1 where shape {shape} is longer")
    hold_one_sample = [
        sample_part._replace(where=where)
        for sample_part, where in zip(hold_one_sample, places, strict=True)
    ]
    return dataclasses.replace(
        dataclasses.replace(plan, shape=shape).assembly(hold_one_sample), squeezed=squeezed
    )


def _placement_by_dims(dims: Dims, sizes: Mapping[str, int]) -> Placement:
    """The axes that split or reduce, in the order of the text, then the replicated axes."""
    axes: list[MeshAxis] = []
    for at, dimension in enumerate(dims.dimensions):
        for split in dimension.splits:
            if split.axis in sizes:
                role: Role = Partial() if split.partial else Shard(at, order=split.order)
                axes.append(MeshAxis(split.axis, sizes[split.axis], role))
    copies = [axis for axis in sizes if axis not in {mesh_axis.name for mesh_axis in axes}]
    axes += [MeshAxis(axis, sizes[axis], Replicate()) for axis in copies]
    return Placement(tuple(axes), (), numbering=tuple(sizes))


def _hold_one_sample(parts: Sequence[RankPart], dims: Dims, plan: Placement) -> list[HeldPart]:
    """The parts, without coordinates for data-parallel ranks that were idle in this step."""
    axis = dims.data_axis
    held_parts = [
        HeldPart(part.rank, tuple(part.coordinates[mesh_axis.name] for mesh_axis in plan.axes))
        for part in parts
    ]
    same = {mesh_axis.name for mesh_axis in plan.axes if isinstance(mesh_axis.role, Replicate)}
    if axis not in same or axis in dims.replicated:
        return held_parts
    busy = {part.coordinates[axis] for part in parts if math.prod(part.shape)}
    if len(busy) > 1:
        shown = ", ".join(map(str, sorted(busy)))
        raise UsageError(
            f"ranks {shown} of axis {axis} all hold values, but dims {dims.text!r} does not say "
            f"how to combine them: split a dimension over the axis, such as b[{axis}], or add "
            f"# {axis}:replicated"
        )
    return [
        sample_part
        if not busy or part.coordinates[axis] in busy
        else sample_part._replace(coordinate=None)
        for sample_part, part in zip(held_parts, parts, strict=True)
    ]


# --- Bringing named dimensions into the same order ------------------------------------------------

Names = tuple[tuple[str, ...], ...]


def arrange(my: Names, golden: Names) -> tuple[Rearranged | None, Rearranged | None]:
    """How to bring both sides into the golden order; None for a side that needs no change.

    Each dimension has one name, or several if it is flattened. Without the same names on both
    sides, nothing can be done.
    """
    blocks = _find_blocks(my, golden)
    if blocks is None:
        return None, None
    return _make_arrangement(my, blocks), _make_arrangement(golden, blocks)


def _find_blocks(my: Names, golden: Names) -> Names | None:
    """The finest dimensions that both sides can be flattened to, in the golden order."""
    my_by_name = {name: names for names in my for name in names}
    golden_by_name = {name: names for names in golden for name in names}
    if my_by_name.keys() != golden_by_name.keys():
        return None
    blocks: list[tuple[str, ...]] = []
    for name, names in golden_by_name.items():
        if any(name in block for block in blocks):
            continue
        block = max(my_by_name[name], names, key=len)
        inner = {other: {my_by_name[other], golden_by_name[other]} for other in block}
        # Every dimension of either side must lie within one block, in the same order.
        if any(
            not _is_run(dimension, block)
            for dimensions in inner.values()
            for dimension in dimensions
        ):
            return None
        blocks.append(block)
    return tuple(blocks)


def _is_run(names: tuple[str, ...], block: tuple[str, ...]) -> bool:
    return any(block[at : at + len(names)] == names for at in range(len(block)))


def _make_arrangement(names: Names, blocks: Names) -> Rearranged | None:
    if names == blocks:
        return None
    positions = {
        dimension_name: at for at, dimension in enumerate(names) for dimension_name in dimension
    }
    order: list[int] = []
    joined: list[int] = []
    for block in blocks:
        block_positions = list(dict.fromkeys(positions[name] for name in block))
        order += block_positions
        joined.append(len(block_positions))
    names_after = " ".join("*".join(block) for block in blocks)
    return Rearranged(f"dimensions rearranged to {names_after}", tuple(order), tuple(joined))
