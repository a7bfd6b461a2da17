"""What is compared: a recorded value, or what several recorded values are assembled to."""

from __future__ import annotations

import ast
import dataclasses
import functools
import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import torch

from paritas.errors import UsageError
from paritas.placement.assembly import Assembly
from paritas.results.comparisons import SideFacts

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from paritas.files.records import Record, Site
    from paritas.numerics.statistics import Statistics
    from paritas.results.comparisons import MatchedBy
    from paritas.results.figures import Extremes


# --- Operands -------------------------------------------------------------------------------------


class OperandRecipe(Protocol):
    """How parts become one tensor. Frozen, and fit to be sent to another process."""

    @property
    def words(self) -> str:
        """What is done, for the table: `put together from ranks 0-3 along dimension 1`."""

    def apply(self, parts: Sequence[Tensor]) -> Tensor:
        """Do it.

        Raises:
            UsageError: the parts do not fit together; the message says how.
        """


@dataclasses.dataclass(frozen=True)
class Operand:
    """One side of a pair.

    Attributes:
        parts: a record, or what the recipe takes.
        recipe: None for a record by itself.
        record: the first record, which names the whole.
        is_single: whether it is a record by itself, as most are.
    """

    parts: tuple[Record | Operand, ...]
    recipe: OperandRecipe | None = None
    # Found once: whoever deals with operands asks for these, again and again.
    record: Record = dataclasses.field(init=False, repr=False, compare=False)
    is_single: bool = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Find what is asked for most."""
        first = self.parts[0]
        record = first.record if isinstance(first, Operand) else first
        object.__setattr__(self, "record", record)
        single = self.recipe is None and len(self.parts) == 1 and record is first
        object.__setattr__(self, "is_single", single)

    @property
    def step(self) -> int:
        """The step, as its dump counts."""
        return self.record.step

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that it is of, ascending."""
        if self.is_single:
            return (self.record.rank,)
        return tuple(sorted({record.rank for record in self.records()}))

    @property
    def words(self) -> str:
        """How it was put together; empty for a record by itself."""
        if self.is_single:
            return ""
        inner = [part.words for part in self.parts if isinstance(part, Operand)]
        own = [] if self.recipe is None else [self.recipe.words]
        return ", then ".join(words for words in dict.fromkeys((*inner, *own)) if words)

    def records(self) -> Iterator[Record]:
        """All records that it is made of."""
        if self.is_single:
            return iter((self.record,))
        return itertools.chain.from_iterable(
            part.records() if isinstance(part, Operand) else (part,) for part in self.parts
        )

    def read(self, values: Callable[[Record], Tensor]) -> Tensor:
        """Its value, given those of records.

        Raises:
            UsageError: a record cannot be read, or the parts do not fit together.
        """
        parts = [
            part.read(values) if isinstance(part, Operand) else values(part) for part in self.parts
        ]
        return parts[0] if self.recipe is None else self.recipe.apply(parts)


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two operands that belong together, or one that has no counterpart.

    Attributes:
        nearest: names on the other side that are most like that of an operand without one.
    """

    my: Operand | None
    golden: Operand | None
    matched_by: MatchedBy
    nearest: tuple[str, ...] = ()

    @property
    def leading(self) -> Operand:
        """The operand that names the pair: the golden one, unless it is seen elsewhere.

        What a kernel reads is compared with what the golden node made that it is the value of.
        """
        if self.golden is None or self.my is None:
            found = self.golden or self.my
            if found is None:
                raise ValueError("a pair of nothing")
            return found
        same_side = self.my.record.site.side == self.golden.record.site.side
        return self.golden if same_side else self.my


# --- Which values have found one another ----------------------------------------------------------

# My step, and the rank or what stands for all of them.
Scope = tuple[int, int]
GraphKey = tuple[str, str]
Ranks = tuple[int, ...]
WHOLE = -1


class MatchItem:
    """An operand, and how far it got.

    Attributes:
        scope: only what has the same can belong together; None where the other side has not.
        at: its place in its own list.
        graph: phase and graph, as the golden side calls it.
        found: whether it has a counterpart.
        gone: whether it is left out, for a reason that is counted.
    """

    __slots__ = ("at", "found", "gone", "graph", "mine", "operand", "record", "scope", "site")

    def __init__(self, operand: Operand, scope: Scope | None, at: int, *, mine: bool) -> None:
        self.operand = operand
        self.record: Record = operand.record
        self.site: Site = self.record.site
        self.scope = scope
        self.at = at
        self.mine = mine
        self.graph: GraphKey = (self.site.phase, self.site.graph)
        self.found = False
        self.gone = False

    @property
    def is_left(self) -> bool:
        """Whether it still looks for a counterpart."""
        return not self.found and not self.gone and self.scope is not None

    @property
    def shape(self) -> tuple[int, ...] | None:
        """Its shape, as far as one record of it tells; None for what is no tensor."""
        return None if self.record.tensor is None else self.record.tensor.shape

    @property
    def is_number(self) -> bool:
        """Whether it is no tensor, but a number, a list or the like."""
        return self.record.value is not None


class Link:
    """Two items that belong together.

    Attributes:
        operand: mine, where a rule has rearranged it.
        is_home: whether mine is what the golden one is the value of, and not a further reading.
    """

    __slots__ = ("by", "golden", "is_home", "my", "operand")

    def __init__(
        self, my: MatchItem, golden: MatchItem, by: MatchedBy, operand: Operand, *, is_home: bool
    ) -> None:
        self.my, self.golden, self.by = my, golden, by
        self.operand = operand
        self.is_home = is_home


class Book:
    """All items of both sides, the links between them, and what was left out.

    Attributes:
        unselected: what the other side was not asked to record, and by which part of what it was
            asked for.
    """

    def __init__(
        self,
        my: Sequence[Operand],
        golden: Sequence[Operand],
        steps: Mapping[int, int],
    ) -> None:
        self.notes: list[str] = []
        self.links: list[Link] = []
        self.unselected: list[tuple[MatchItem, str]] = []
        self._reasons: Counter[str] = Counter()
        my_ranks, golden_ranks = ([one.ranks for one in side] for side in (my, golden))
        label = self._labels(set(my_ranks), set(golden_ranks))
        self.my = [
            MatchItem(one, (one.step, label(ranks)) if one.step in steps else None, at, mine=True)
            for at, (one, ranks) in enumerate(zip(my, my_ranks, strict=True))
        ]
        # A golden step that several of mine are compared with is there for each of them.
        askers: dict[int, list[int | None]] = {}
        for mine, theirs in steps.items():
            askers.setdefault(theirs, []).append(mine)
        self.golden = [
            MatchItem(one, None if step is None else (step, label(ranks)), at, mine=False)
            for at, (one, ranks) in enumerate(zip(golden, golden_ranks, strict=True))
            for step in askers.get(one.step, [None])
        ]

    def left(self, *, mine: bool) -> Iterator[MatchItem]:
        """What still looks for a counterpart."""
        return (item for item in (self.my if mine else self.golden) if item.is_left)

    def link(
        self, my: MatchItem, golden: MatchItem, by: MatchedBy, operand: Operand | None = None
    ) -> None:
        """Say that two belong together."""
        is_home = not golden.found and my.site.side == golden.site.side
        self.links.append(Link(my, golden, by, operand or my.operand, is_home=is_home))
        my.found = golden.found = True

    def link_either(self, one: MatchItem, other: MatchItem, by: MatchedBy) -> None:
        """Say so, whichever of them is mine."""
        my, golden = (one, other) if one.mine else (other, one)
        self.link(my, golden, by)

    def skip(self, item: MatchItem, reason: str) -> None:
        """Leave one out; `{n}` in the reason becomes the number of all that are."""
        item.gone = True
        self._reasons[reason] += 1

    def leave_unselected(self, item: MatchItem, why: str) -> None:
        """Leave one out that the other side was not asked to record."""
        item.gone = True
        self.unselected.append((item, why))

    def skipped(self) -> list[str]:
        """Why some were left out, with how many."""
        return [reason.replace("{n}", str(count)) for reason, count in self._reasons.items()]

    def _labels(self, mine: set[Ranks], theirs: set[Ranks]) -> Callable[[Ranks], int]:
        """What ranks count as; a run of one rank is the whole of it."""
        all_mine, all_theirs = ({rank for one in side for rank in one} for side in (mine, theirs))
        single = {min(side) for side in (all_mine, all_theirs) if len(side) == 1}
        if len(all_mine) == len(all_theirs) == 1 and len(single) > 1:
            self.notes.append(
                f"my rank {min(all_mine)} is compared with golden rank {min(all_theirs)}: there is "
                f"no other"
            )
        return lambda ranks: WHOLE if len(ranks) > 1 or ranks[0] in single else ranks[0]


# --- Values that a dump holds as text -------------------------------------------------------------

_LONGEST = 1 << 14
_NAMES: dict[str, Any] = {"inf": math.inf, "nan": math.nan}
_OF_TORCH = {
    name: value
    for name, value in vars(torch).items()
    if isinstance(value, torch.dtype | torch.layout | torch.memory_format)
}


def read_value(text: str) -> Any:
    """A number, a string, a dtype, a device and the like, or a list of such, from its text.

    Raises:
        UsageError: it is something else.
    """
    try:
        if len(text) > _LONGEST:
            raise ValueError(f"{len(text)} characters")
        return _evaluate(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        raise UsageError(f"{text[:80]!r} is no plain value that can be read back") from error


def _evaluate(tree: ast.expr) -> Any:
    match tree:
        case ast.Constant(value=bool() | int() | float() | complex() | str() | None as value):
            return value
        case ast.Name(id=name) if name in _NAMES:
            return _NAMES[name]
        case ast.Attribute(value=ast.Name(id="torch"), attr=name) if name in _OF_TORCH:
            return _OF_TORCH[name]
        case ast.List(elts=items):
            return [_evaluate(item) for item in items]
        case ast.Tuple(elts=items):
            return tuple(_evaluate(item) for item in items)
    return _called_or_computed(tree)


def _called_or_computed(tree: ast.expr) -> Any:
    match tree:
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return -_evaluate_number(inner)
        case ast.BinOp(left=left, op=ast.Add(), right=right):  # a complex number
            return _evaluate_number(left) + _evaluate_number(right)
        case ast.BinOp(left=left, op=ast.Sub(), right=right):
            return _evaluate_number(left) - _evaluate_number(right)
        case ast.Call(func=ast.Name(id="float"), args=[ast.Constant(value=str() as name)]):
            return float(name)
        case ast.Call(func=ast.Name(id="device") | ast.Attribute(attr="device")):
            return torch.device("cpu")  # wherever it was, here it is the host
        case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr="Size"), args=[inner]):
            return tuple(_evaluate(inner))
    raise ValueError(ast.dump(tree)[:80])


def _evaluate_number(tree: ast.expr) -> complex | float:
    value = _evaluate(tree)
    if isinstance(value, bool) or not isinstance(value, int | float | complex):
        raise TypeError(f"{value!r} is no number")
    return value


# --- One side of a pair, for the table ------------------------------------------------------------

_OUR_DIGEST = re.compile(r"[0-9a-f]{32}")


def describe_side(operand: Operand, kind: str) -> SideFacts:
    """What is known without reading a value; `kind` is that of the dump."""
    record = operand.record
    facts = record.tensor
    return SideFacts(
        path=_describe_path(record, kind),
        id=record.id,
        op=record.site.op,
        dtype=facts.dtype if facts is not None else record.dtype or "",
        shape=_find_shape(operand),
        value=record.value,
        step=record.step,
        ranks=operand.ranks,
        made_of=operand.words,
        **_extremes_of(record.statistics if operand.recipe is None else None),
    )


def as_read(side: SideFacts, tensor: Tensor, extremes: Extremes | None = None) -> SideFacts:
    """The same, with what was found when the values were read."""
    read = {"dtype": _dtype_name(tensor.dtype), "shape": tuple(tensor.shape)}
    if extremes is None:
        return msgspec.structs.replace(side, **read)
    return msgspec.structs.replace(
        side, minimum=extremes.minimum, maximum=extremes.maximum, mean=extremes.mean, **read
    )


def with_extremes(side: SideFacts, statistics: Statistics) -> SideFacts:
    """The same, with what statistics say that were taken of the values."""
    return msgspec.structs.replace(side, **_extremes_of(statistics))


@functools.cache
def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def same_digest(my: Operand, golden: Operand) -> bool:
    """Whether the two are known to be the same bits without a look at them.

    Checksums of other tools are too short to go by.
    """
    return my.record.digest == golden.record.digest and _digests_tell(my, golden)


def are_other_bits(my: Operand, golden: Operand) -> bool:
    """Whether the two are known not to be the same bits without a look at them."""
    return my.record.digest != golden.record.digest and _digests_tell(my, golden)


def _digests_tell(my: Operand, golden: Operand) -> bool:
    """Whether both have digests of ours, of bytes that mean the same."""
    if my.recipe is not None or golden.recipe is not None:
        return False
    left, right = my.record, golden.record
    if left.tensor is None or right.tensor is None:
        return False
    return (
        _OUR_DIGEST.fullmatch(left.digest) is not None
        and _OUR_DIGEST.fullmatch(right.digest) is not None
        and left.tensor.dtype == right.tensor.dtype
        and left.tensor.shape == right.tensor.shape
        and _stored_shape(left) == _stored_shape(right)
    )


def _find_shape(operand: Operand) -> tuple[int, ...] | None:
    if isinstance(operand.recipe, Assembly):
        return operand.recipe.result_shape
    facts = operand.record.tensor
    # What a rule makes of a tensor is known when it is read.
    return None if facts is None or operand.recipe is not None else facts.shape


def _stored_shape(record: Record) -> Sequence[int] | None:
    return None if record.payload is None else record.payload.shape


def _describe_path(record: Record, kind: str) -> str:
    if record.payload is None:
        return ""
    # Such a file holds all that an operator takes and gives.
    several = f",{record.site.side}s,{record.site.position}" if kind == "ge" else ""
    return f"{record.payload.file}{several}"


def _extremes_of(statistics: Statistics | None) -> dict[str, float | None]:
    if statistics is None:
        return {}
    return {
        "minimum": statistics.minimum,
        "maximum": statistics.maximum,
        "mean": statistics.mean,
    }
