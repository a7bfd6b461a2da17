"""Both dumps as what is to be compared: rank by rank, or put together over the ranks."""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from typing import TYPE_CHECKING, Protocol

from paritas.comparison.operands import Operand
from paritas.comparison.sharding.arranging import Arrangement, arrange
from paritas.comparison.sharding.dims import parse_dims
from paritas.comparison.sharding.gathering import agreeing, gather, held_part
from paritas.comparison.sharding.rank_axes import RankAxes, axes_of
from paritas.comparison.sharding.recipes import named_ranks
from paritas.errors import UsageError

if TYPE_CHECKING:
    import re
    from collections.abc import Iterable, Mapping, Sequence

    from paritas.dumps.opening import ReadableDump
    from paritas.dumps.records import Record

__all__ = ["operands"]


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
    mine, theirs = _Side(my, "my", rules), _Side(golden, "the golden", rules)
    if mine.is_plain and theirs.is_plain and mine.ranks == theirs.ranks:
        return mine.by_themselves(), theirs.by_themselves(), []
    notes = _Notes()
    together: set[str] = set()
    for name in dict.fromkeys((*theirs.groups, *mine.groups)):
        if mine.signatures(name) != theirs.signatures(name):
            together.add(name)
            notes.look_at(name, mine, theirs)
    found = (
        mine.operands(together, alone=theirs.ranks),
        theirs.operands(together, alone=mine.ranks),
    )
    orders = _orders(mine, theirs, together)
    return (
        [_ordered(one, orders, 0) for one in found[0]],
        [_ordered(one, orders, 1) for one in found[1]],
        [*mine.axes.notes, *theirs.axes.notes, *notes.told()],
    )


class _Side:
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
        return sorted(found, key=_place)

    def _same(self, records: Sequence[Record], others: set[int]) -> Operand | None:
        """What all ranks hold alike, where the other side has other ranks."""
        ranks = {record.rank for record in records}
        if len(ranks) < len(records) or ranks == others:
            return None
        return agreeing(records)


def _place(operand: Operand) -> tuple[int, int]:
    record = operand.record
    return record.rank, record.sequence


class _Notes:
    """What could not be put together, for want of a word on how."""

    def __init__(self) -> None:
        self._unclear: dict[tuple[str, str], list[str]] = defaultdict(list)

    def look_at(self, name: str, mine: _Side, theirs: _Side) -> None:
        """Note a value that other ranks hold on the other side, and nothing says how."""
        sides = [_all(side.groups.get(name, {})) for side in (mine, theirs)]
        ranks = [sorted({record.rank for record in records}) for records in sides]
        if not all(ranks) or ranks[0] == ranks[1]:
            return
        for side, records in zip((mine, theirs), sides, strict=True):
            several = len({record.rank for record in records}) > 1
            if several and not any(map(side.says_how, records)) and agreeing(records) is None:
                who = (f"{named_ranks(ranks[0])} of mine", f"{named_ranks(ranks[1])} of golden")
                self._unclear[who].append(f"{name}{_shapes(sides)}")
                return

    def told(self) -> Iterable[str]:
        """All notes."""
        for (mine, theirs), names in self._unclear.items():
            yield (
                f"{len(names)} values are of {mine} and of {theirs}, and nothing says how they "
                f"are split: they are compared by the ranks' numbers alone. Say it with --dims "
                f"and --mesh; the first is {names[0]}"
            )


def _all(steps: Mapping[int, list[Record]]) -> list[Record]:
    """What the ranks recorded in the first step."""
    return next(iter(steps.values()), [])


def _shapes(sides: Sequence[Sequence[Record]]) -> str:
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


def _orders(mine: _Side, theirs: _Side, names: Iterable[str]) -> Orders:
    """By name, what has to be done to bring the dimensions of both sides into one order."""
    found: Orders = {}
    for name in names:
        texts = [
            side.dims_for(records[0])
            for side in (mine, theirs)
            if (records := _all(side.groups.get(name, {})))
        ]
        try:
            match texts:
                case [str(my), str(golden)] if my != golden:
                    found[name] = arrange(parse_dims(my).names, parse_dims(golden).names)
        except UsageError:  # of a dump: what becomes of its parts says so
            continue
    return found


def _ordered(operand: Operand, orders: Orders, side: int) -> Operand:
    recipe = orders.get(operand.record.id, (None, None))[side]
    return operand if recipe is None else Operand((operand,), recipe)
