"""Both dumps as what is compared: rank by rank, or put together over the ranks."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import itertools
import math
import re
from collections import defaultdict
from typing import TYPE_CHECKING, Protocol

from paritas.comparison.operands import Operand
from paritas.comparison.shard_plans import RankPart, parse_dims, plan_by_dims, plan_by_placement
from paritas.errors import UsageError
from paritas.placement.assembly import (
    Assembly,
    Cell,
    Refused,
    named_ranks,
    whole,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch import Tensor

    from paritas.comparison.shard_plans import Dims
    from paritas.dumps.opening import ReadableDump
    from paritas.files.records import Record


# --- Where each rank is on the axes of its mesh ---------------------------------------------------

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


# --- Two sides that name their dimensions, in one order -------------------------------------------

Names = tuple[tuple[str, ...], ...]


@dataclasses.dataclass(frozen=True)
class Arrangement:
    """Dimensions in another order, some of them laid into one.

    Attributes:
        words: the order.
        order: which dimension comes where.
        joined: so many of them, in that order, become one.
    """

    words: str
    order: tuple[int, ...]
    joined: tuple[int, ...]

    def apply(self, parts: Sequence[Tensor]) -> Tensor:
        """Rearrange the one part.

        Raises:
            UsageError: it has another number of dimensions.
        """
        (tensor,) = parts
        if tensor.ndim != len(self.order):
            raise UsageError(f"{self.words}: the tensor has the shape {tuple(tensor.shape)}")
        moved = tensor.permute(self.order)
        extents = iter(moved.shape)
        return moved.reshape([math.prod(itertools.islice(extents, n)) for n in self.joined])


def arrange(my: Names, golden: Names) -> tuple[Arrangement | None, Arrangement | None]:
    """How to bring two sides into the golden order; None for one that is in it.

    Args:
        my: per dimension its names, several where several dimensions were laid into one.
        golden: likewise. If the two do not have the same names, nothing can be done.
    """
    blocks = _find_blocks(my, golden)
    if blocks is None:
        return None, None
    return _make_arrangement(my, blocks), _make_arrangement(golden, blocks)


def _find_blocks(my: Names, golden: Names) -> Names | None:
    """The dimensions that both sides can be brought to, in the golden order."""
    mine = {name: names for names in my for name in names}
    theirs = {name: names for names in golden for name in names}
    if mine.keys() != theirs.keys():
        return None
    blocks: list[tuple[str, ...]] = []
    for name, names in theirs.items():
        if any(name in block for block in blocks):
            continue
        block = max(mine[name], names, key=len)
        inner = {other: {mine[other], theirs[other]} for other in block}
        # Every dimension of either side must lie within one block, and in its order.
        if any(not _is_run(one, block) for found in inner.values() for one in found):
            return None
        blocks.append(block)
    return tuple(blocks)


def _is_run(names: tuple[str, ...], block: tuple[str, ...]) -> bool:
    return any(block[at : at + len(names)] == names for at in range(len(block)))


def _make_arrangement(names: Names, blocks: Names) -> Arrangement | None:
    if names == blocks:
        return None
    place = {one: at for at, dimension in enumerate(names) for one in dimension}
    order: list[int] = []
    joined: list[int] = []
    for block in blocks:
        own = list(dict.fromkeys(place[name] for name in block))
        order += own
        joined.append(len(own))
    told = " ".join("*".join(block) for block in blocks)
    return Arrangement(f"dimensions brought to {told}", tuple(order), tuple(joined))


# --- The records of all ranks ---------------------------------------------------------------------

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
            found += [gathering.by_placement(instance) for instance in _split_instances(group)]
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


def _split_instances(records: Sequence[Record]) -> list[list[Record]]:
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
        parts = [RankPart(one.rank, _record_shape(one), {}, one.placement) for one in records]
        key = tuple((part.rank, part.shape, part.placement) for part in parts)
        return self._operand(records, key, lambda: plan_by_placement(parts))

    def by_dims(self, records: Sequence[Record], text: str) -> Operand:
        ordered = sorted(records, key=lambda one: one.rank)
        key = (text, tuple((one.rank, _record_shape(one)) for one in ordered))
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
        parts = [RankPart(one.rank, _record_shape(one), places[one.rank] or {}) for one in records]
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


def _record_shape(record: Record) -> tuple[int, ...]:
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


# --- Both dumps -----------------------------------------------------------------------------------


class ShardRules(Protocol):
    """What a user says of how tensors are split; `Rules` has it."""

    @property
    def dims(self) -> Sequence[tuple[re.Pattern[str], str]]:
        """Annotations."""

    @property
    def mesh(self) -> Mapping[str, int]:
        """How many ranks there are along each axis."""

    def dims_for(self, name: str, module: str = "") -> str | None:
        """The annotation of what has that name."""


def operands(
    my: ReadableDump, golden: ReadableDump, rules: ShardRules
) -> tuple[list[Operand], list[Operand], list[str]]:
    """What there is to compare on both sides, and what a reader should know of it.

    Values of one name are compared rank by rank where both dumps are split alike: that says most.
    Otherwise they are put together as far as placements or annotations say how.

    Raises:
        UsageError: an annotation of the user's makes no sense.
    """
    for _, text in rules.dims:
        parse_dims(text)
    mine, theirs = _DumpSide(my, "my", rules), _DumpSide(golden, "the golden", rules)
    if mine.is_plain and theirs.is_plain and mine.ranks == theirs.ranks:
        return mine.by_themselves(), theirs.by_themselves(), []
    notes = _AssemblyNotes()
    together: set[str] = set()
    for name in dict.fromkeys((*theirs.groups, *mine.groups)):
        if mine.signatures(name) != theirs.signatures(name):
            together.add(name)
            notes.look_at(name, mine, theirs)
    found = (
        mine.operands(together, alone=theirs.ranks),
        theirs.operands(together, alone=mine.ranks),
    )
    orders = _find_orders(mine, theirs, together)
    return (
        [_apply_order(one, orders, 0) for one in found[0]],
        [_apply_order(one, orders, 1) for one in found[1]],
        [*mine.axes.notes, *theirs.axes.notes, *notes.told()],
    )


class _DumpSide:
    """One dump, sorted by names.

    Attributes:
        axes: where its ranks are.
    """

    def __init__(self, dump: ReadableDump, side: str, rules: ShardRules) -> None:
        self.records = list(dump.records())
        self.ranks = set(dump.ranks)
        self.axes: RankAxes = axes_of(dump, side, rules.mesh)
        self._rules = rules
        self._own_dims = getattr(dump, "dims_of", None)
        self._dims: dict[tuple[int, int], str | None] = {}

    @functools.cached_property
    def groups(self) -> dict[str, dict[int, list[Record]]]:
        """By name and step, what the ranks recorded."""
        found: dict[str, dict[int, list[Record]]] = {}
        for record in self.records:
            found.setdefault(record.id, {}).setdefault(record.step, []).append(record)
        return found

    @property
    def is_plain(self) -> bool:
        """Whether nothing is said of how its tensors are split."""
        return (
            not self._rules.dims
            and self._own_dims is None
            and all(record.placement is None for record in self.records)
        )

    def by_themselves(self) -> list[Operand]:
        """Every record."""
        return [Operand((record,)) for record in self.records]

    def dims_for(self, record: Record) -> str | None:
        """How a record is split, as the user says or else as the dump does."""
        key = (record.rank, record.sequence)
        if key not in self._dims:
            text = self._rules.dims_for(record.id, record.site.module) if self._rules.dims else None
            if not text and record.placement is None and self._own_dims is not None:
                text = self._own_dims(record)
            self._dims[key] = text or None
        return self._dims[key]

    def signatures(self, name: str) -> set[frozenset[object]]:
        """Which ranks hold what of a value, in each of the ways that occur."""
        steps = self.groups.get(name, {})
        return {frozenset(map(self._signature, records)) for records in steps.values()}

    def _signature(self, record: Record) -> object:
        text = self.dims_for(record)
        return held_part(record), text, self.axes.known(record.rank) if text else None

    def says_how(self, record: Record) -> bool:
        """Whether it is known what part of a whole a record is."""
        return record.placement is not None or self.dims_for(record) is not None

    def operands(self, together: set[str], alone: set[int]) -> list[Operand]:
        """Everything: the values of these names put together, all others rank by rank.

        Args:
            alone: the ranks of the other side, with which others are compared.
        """
        joined: list[Record] = []
        found: list[Operand] = []
        for name, steps in self.groups.items():
            for records in steps.values():
                if name in together and any(map(self.says_how, records)):
                    joined += records
                elif name in together and len(records) > 1 and (one := self._same(records, alone)):
                    found.append(one)
                else:
                    found += [Operand((record,)) for record in records]
        found += gather(
            joined,
            dims_for=self.dims_for,
            coordinates=self.axes.coordinates,
            mesh=self.axes.sizes,
            ranks=sorted(self.ranks),
        )
        return sorted(found, key=_record_order)

    def _same(self, records: Sequence[Record], others: set[int]) -> Operand | None:
        """What all ranks hold alike, where the other side has other ranks."""
        ranks = {record.rank for record in records}
        if len(ranks) < len(records) or ranks == others:
            return None
        return agreeing(records)


def _record_order(operand: Operand) -> tuple[int, int]:
    record = operand.record
    return record.rank, record.sequence


class _AssemblyNotes:
    """What could not be put together, for want of a word on how."""

    def __init__(self) -> None:
        self._unclear: dict[tuple[str, str], list[str]] = defaultdict(list)

    def look_at(self, name: str, mine: _DumpSide, theirs: _DumpSide) -> None:
        """Note a value that other ranks hold on the other side, and nothing says how."""
        sides = [_first_step_records(side.groups.get(name, {})) for side in (mine, theirs)]
        ranks = [sorted({record.rank for record in records}) for records in sides]
        if not all(ranks) or ranks[0] == ranks[1]:
            return
        for side, records in zip((mine, theirs), sides, strict=True):
            several = len({record.rank for record in records}) > 1
            if several and not any(map(side.says_how, records)) and agreeing(records) is None:
                who = (f"{named_ranks(ranks[0])} of mine", f"{named_ranks(ranks[1])} of golden")
                self._unclear[who].append(f"{name}{_describe_shapes(sides)}")
                return

    def told(self) -> Iterable[str]:
        """All notes."""
        for (mine, theirs), names in self._unclear.items():
            yield (
                f"{len(names)} values are of {mine} and of {theirs}, and nothing says how they "
                f"are split: they are compared by the ranks' numbers alone. Say it with --dims "
                f"and --mesh; the first is {names[0]}"
            )


def _first_step_records(steps: Mapping[int, list[Record]]) -> list[Record]:
    """What the ranks recorded in the first step."""
    return next(iter(steps.values()), [])


def _describe_shapes(sides: Sequence[Sequence[Record]]) -> str:
    """Shapes of both sides, and the dimension that looks split, if one does."""
    my, golden = (next((one.tensor for one in side if one.tensor), None) for side in sides)
    if my is None or golden is None:
        return ""
    told = f", {list(my.shape)} and {list(golden.shape)}"
    if len(my.shape) != len(golden.shape):
        return told
    unlike = [
        at for at, pair in enumerate(zip(my.shape, golden.shape, strict=True)) if len({*pair}) > 1
    ]
    if len(unlike) != 1:
        return told
    ratio = math.prod(golden.shape) * len(sides[1]), math.prod(my.shape) * len(sides[0])
    fits = ratio[0] == ratio[1]
    return f"{told}, as if dimension {unlike[0]} were split" if fits else told


# --- names of dimensions --------------------------------------------------------------------------

Orders = dict[str, tuple[Arrangement | None, Arrangement | None]]


def _find_orders(mine: _DumpSide, theirs: _DumpSide, names: Iterable[str]) -> Orders:
    """By name, what has to be done to bring the dimensions of both sides into one order."""
    found: Orders = {}
    for name in names:
        texts = [
            side.dims_for(records[0])
            for side in (mine, theirs)
            if (records := _first_step_records(side.groups.get(name, {})))
        ]
        try:
            match texts:
                case [str(my), str(golden)] if my != golden:
                    found[name] = arrange(parse_dims(my).names, parse_dims(golden).names)
        except UsageError:  # of a dump: what becomes of its parts says so
            continue
    return found


def _apply_order(operand: Operand, orders: Orders, side: int) -> Operand:
    recipe = orders.get(operand.record.id, (None, None))[side]
    return operand if recipe is None else Operand((operand,), recipe)
