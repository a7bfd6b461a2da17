"""What is compared: a recorded value, or a value assembled from several."""

from __future__ import annotations

import ast
import dataclasses
import itertools
import math
import re
import statistics
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec
import torch

from paritas.comparison.rows import SideFacts
from paritas.core.errors import UsageError
from paritas.core.numerics.bits import dtype_name
from paritas.core.numerics.sketch import add_sketches
from paritas.core.numerics.statistics import Statistics
from paritas.core.placement.assembly import Assembly, ReplicaDisagreement, ReplicasDisagreeError
from paritas.core.results.wording import count_things

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from torch import Tensor

    from paritas.comparison.rows import MatchedBy
    from paritas.core.results.items import Extremes
    from paritas.formats.files.records import Record, Site


# --- Operands -------------------------------------------------------------------------------------


class OperandRecipe(Protocol):
    """How to make one tensor of several parts. Frozen, and can be sent to another process."""

    @property
    def words(self) -> str:
        """The text for the table: `put together from ranks 0-3 along dimension 1`."""

    def apply(self, parts: Sequence[Tensor]) -> Tensor:
        """Make the tensor.

        Raises:
            UsageError: the parts do not fit; the message says why.
        """


@dataclasses.dataclass(frozen=True)
class Operand:
    """One side of a pair.

    Attributes:
        parts: a single record, or the input of the recipe.
        recipe: None for a single record.
        record: the first record, which names the operand.
        is_single: whether it is a single record, as most are.
    """

    parts: tuple[Record | Operand, ...]
    recipe: OperandRecipe | None = None
    # Computed once, because they are used very often.
    record: Record = dataclasses.field(init=False, repr=False, compare=False)
    is_single: bool = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Compute `record` and `is_single`."""
        first = self.parts[0]
        record = first.record if isinstance(first, Operand) else first
        object.__setattr__(self, "record", record)
        single = self.recipe is None and len(self.parts) == 1 and record is first
        object.__setattr__(self, "is_single", single)

    @property
    def step(self) -> int:
        """The step, as numbered in its dump."""
        return self.record.step

    @property
    def ranks(self) -> tuple[int, ...]:
        """Its ranks, ascending."""
        if self.is_single:
            return (self.record.rank,)
        return tuple(sorted({record.rank for record in self.records()}))

    @property
    def words(self) -> str:
        """How it was assembled; empty for a single record."""
        if self.is_single:
            return ""
        inner = [part.words for part in self.parts if isinstance(part, Operand)]
        own_words = [] if self.recipe is None else [self.recipe.words]
        return ", then ".join(words for words in dict.fromkeys((*inner, *own_words)) if words)

    def records(self) -> Iterator[Record]:
        """All its records."""
        if self.is_single:
            return iter((self.record,))
        return itertools.chain.from_iterable(
            part.records() if isinstance(part, Operand) else (part,) for part in self.parts
        )

    def read(self, values: Callable[[Record], Tensor]) -> Tensor:
        """Its value; `values` reads a record."""
        parts = [
            part.read(values) if isinstance(part, Operand) else values(part) for part in self.parts
        ]
        return parts[0] if self.recipe is None else self.recipe.apply(parts)


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two operands that belong together, or one without a counterpart.

    Attributes:
        nearest: the most similar names on the other side, if there is no counterpart.
    """

    my: Operand | None
    golden: Operand | None
    matched_by: MatchedBy
    nearest: tuple[str, ...] = ()

    @property
    def leading(self) -> Operand:
        """The operand that names the pair: the golden one, unless it has its own row elsewhere.

        A kernel's input is compared with the output of the golden node that computed it.
        """
        if self.golden is None or self.my is None:
            only_operand = self.golden or self.my
            if only_operand is None:
                raise ValueError("a pair without operands")
            return only_operand
        same_side = self.my.record.site.side == self.golden.record.site.side
        return self.golden if same_side else self.my

    @property
    def rank(self) -> int | None:
        """The rank of its row; None if it was assembled from several."""
        ranks = self.leading.ranks
        return ranks[0] if len(ranks) == 1 else None


# --- Merging the summaries of parts ---------------------------------------------------------------


def merge_statistics(plan: Assembly, parts: Sequence[Statistics]) -> tuple[Statistics, str]:
    """The statistics of the assembled tensor, and what is not known; empty if all is known.

    Raises:
        ReplicasDisagreeError: copies have different statistics.
        UsageError: the whole's statistics cannot be derived from those of the parts.
    """
    _check_copies(plan, [parts[first] == parts[other] for first, other in plan.copies])
    terms = [[parts[copies[0]] for copies in cell.terms] for cell in plan.cells]
    if all(len(term) == 1 for term in terms):
        return _concat_statistics([term[0] for term in terms]), ""
    return _reduce_statistics(terms, plan.reduction)


def merge_sketches(plan: Assembly, parts: Sequence[Tensor]) -> Tensor:
    """The sketch of the assembled tensor.

    Raises:
        ReplicasDisagreeError: copies have different sketches.
        UsageError: the whole's sketch cannot be derived from those of the parts.
    """
    same = [torch.equal(parts[first], parts[other]) for first, other in plan.copies]
    _check_copies(plan, same)
    boxes = all(len(segments) == 1 for cell in plan.cells for segments in cell.where)
    if not boxes or not (plan.placed or len(plan.cells) == 1):
        raise UsageError(
            "the sketches of the parts cannot be added, because they do not contain each part's "
            "position in the whole: record values, or distributed tensors"
        )
    terms = [copies[0] for cell in plan.cells for copies in cell.terms]
    count = max((len(cell.terms) for cell in plan.cells), default=1)
    if count > 1 and plan.reduction not in ("sum", "avg"):
        raise UsageError(
            f"the {plan.reduction} over ranks cannot be derived from sketches: record values"
        )
    total = add_sketches(parts[at] for at in terms)
    return total / count if plan.reduction == "avg" else total


def _check_copies(plan: Assembly, same: Sequence[bool]) -> None:
    replica_disagreements = [
        ReplicaDisagreement(plan.ranks[other], plan.ranks[first])
        for (first, other), agrees in zip(plan.copies, same, strict=True)
        if not agrees
    ]
    if replica_disagreements:
        raise ReplicasDisagreeError(replica_disagreements)


def _concat_statistics(parts: Sequence[Statistics]) -> Statistics:
    """The statistics of parts that do not overlap."""
    exponents: Counter[int] = Counter()
    for part in parts:
        exponents.update(dict(part.exponents))
    finite_parts = [part for part in parts if _finite_count(part)]
    total = sum(map(_finite_count, finite_parts))
    minima, maxima, norms = (
        _known_by_all(finite_parts, name) for name in ("minimum", "maximum", "l2")
    )
    means = zip(_known_by_all(finite_parts, "mean"), map(_finite_count, finite_parts), strict=False)
    shares = [mean * (count / total) for mean, count in means]
    return Statistics(
        count=sum(part.count for part in parts),
        minimum=min(minima, default=None),
        maximum=max(maxima, default=None),
        mean=math.fsum(shares) if shares else None,
        l2=math.hypot(*norms) if norms else None,
        zeros=sum(part.zeros for part in parts),
        nans=sum(part.nans for part in parts),
        positive_infinities=sum(part.positive_infinities for part in parts),
        negative_infinities=sum(part.negative_infinities for part in parts),
        exponents=tuple(sorted(exponents.items())),
    )


def _finite_count(part: Statistics) -> int:
    return part.count - part.nans - part.positive_infinities - part.negative_infinities


def _known_by_all(parts: Sequence[Statistics], name: str) -> list[float]:
    """A figure of all parts; empty if one part does not have it."""
    values = [getattr(part, name) for part in parts]
    return [] if None in values else values


# For each reduction the statistic of the result that is known, and how to compute it.
_REDUCTIONS: dict[str, tuple[str, Callable[[list[float]], float]]] = {
    "sum": ("mean", math.fsum),
    "avg": ("mean", statistics.fmean),
    "max": ("maximum", max),
    "min": ("minimum", min),
}


def _reduce_statistics(cells: Sequence[Sequence[Statistics]], how: str) -> tuple[Statistics, str]:
    """The few statistics that survive a reduction of parts, and what is not known."""
    if not all(part.is_finite for terms in cells for part in terms):
        raise UsageError(
            "some ranks' terms are not finite, and statistics do not say where: record values"
        )
    if how == "product":
        raise UsageError("the product over ranks cannot be derived from statistics: record values")
    figure_name, reduce = _REDUCTIONS[how]
    wholes = []
    for terms in cells:
        values = _known_by_all(terms, figure_name)
        reduced_figures: dict[str, Any] = {figure_name: reduce(values)} if values else {}
        wholes.append(Statistics(count=terms[0].count, **reduced_figures))
    limits = f"only the {figure_name} of the {how} over ranks can be derived from statistics"
    return _concat_statistics(wholes), limits


# --- The most similar names -----------------------------------------------------------------------

_LENGTH = 3
_MOST_LETTERS = 300
_MOST_NAMES = 100_000
# How many of a name's rarest pieces are looked up, and how many names are considered for each.
# They bound the time per name, whatever the number of names.
_PIECES, _POINTED = 6, 48
_COMPARED = 12
# Nobody reads more suggestions than this.
_MOST_ASKED = 20_000
_MOST_SUGGESTED = 3
_LEAST_LIKENESS = 0.3


class NearestNames:
    """Finds similar names by the three-letter pieces that they share."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = list(dict.fromkeys(names))[:_MOST_NAMES]
        self._pieces = [_cut_pieces(name) for name in self._names]
        self._pointers: dict[str, list[int]] = {}
        for at, pieces in enumerate(self._pieces):
            for piece in pieces:
                self._pointers.setdefault(piece, []).append(at)
        self._known: dict[str, tuple[str, ...]] = {}

    def of(self, name: str) -> tuple[str, ...]:
        """Up to three similar names, most similar first."""
        if name not in self._known and len(self._known) < _MOST_ASKED:
            self._known[name] = self._find(name)
        return self._known.get(name, ())

    def _find(self, name: str) -> tuple[str, ...]:
        pieces = _cut_pieces(name)
        rare = sorted(
            (len(self._pointers[known_piece]), known_piece)
            for known_piece in pieces
            if known_piece in self._pointers
        )
        shared: dict[int, int] = {}
        for _, piece in rare[:_PIECES]:
            for at in self._pointers[piece][:_POINTED]:
                shared[at] = shared.get(at, 0) + 1
        likely = sorted(shared, key=lambda at: -shared[at])[:_COMPARED]
        scores = [(self._likeness(pieces, at), at) for at in likely]
        scores.sort(key=lambda score: (-score[0], score[1]))
        best = scores[:_MOST_SUGGESTED]
        return tuple(self._names[at] for score, at in best if score >= _LEAST_LIKENESS)

    def _likeness(self, pieces: set[str], at: int) -> float:
        other = self._pieces[at]
        return 2 * len(pieces & other) / (len(pieces) + len(other))


def _cut_pieces(name: str) -> set[str]:
    text = f" {name[:_MOST_LETTERS].lower()} "
    return {text[at : at + _LENGTH] for at in range(len(text) - _LENGTH + 1)}


# --- The state of matching ------------------------------------------------------------------------

# My step, and the rank or `WHOLE` for all of them.
Scope = tuple[int, int]
GraphKey = tuple[str, str]
Ranks = tuple[int, ...]
WHOLE = -1


class MatchItem:
    """An operand, and whether it is matched.

    Attributes:
        scope: only items with the same scope can match; None if the other side does not have it.
        at: its index on its own side.
        graph: phase and golden name of the graph.
        found: whether it has a counterpart.
        gone: whether it is left out, with a reason.
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
        """Whether it still needs a counterpart."""
        return not self.found and not self.gone and self.scope is not None

    @property
    def shape(self) -> tuple[int, ...] | None:
        """The shape of its first record; None if that is not a tensor."""
        return None if self.record.tensor is None else self.record.tensor.shape

    @property
    def dtype(self) -> str:
        """The dtype of its first record; empty if that is not a tensor."""
        return "" if self.record.tensor is None else self.record.tensor.dtype

    @property
    def is_number(self) -> bool:
        """Whether it is a number, a list or the like instead of a tensor."""
        return self.record.value is not None

    @property
    def memory(self) -> tuple[object, ...]:
        """Equal for all records of the same memory on one side."""
        record = self.record
        root = record.sequence if record.alias_of is None else record.alias_of
        return self.scope, record.rank, root

    @property
    def stored_value(self) -> tuple[object, ...]:
        """Equal for all records of the same tensor on one side."""
        return *self.memory, self.record.digest, self.shape


class Link(NamedTuple):
    """Two items that belong together.

    Attributes:
        operand: mine, possibly transformed by a rule.
        is_home: whether this is the first match of the golden item, rather than a repeated read.
    """

    my: MatchItem
    golden: MatchItem
    by: MatchedBy
    operand: Operand
    is_home: bool


class OperandLinks:
    """All items of both sides, the links between them, and what was left out.

    Attributes:
        unselected: items that the other dump's selection excludes, with the part that does.
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
        self._reasons: Counter[tuple[str, str]] = Counter()
        my_ranks, golden_ranks = ([operand.ranks for operand in side] for side in (my, golden))
        label = self._labels(set(my_ranks), set(golden_ranks))
        self.my = [
            MatchItem(
                operand,
                (operand.step, label(ranks)) if operand.step in steps else None,
                at,
                mine=True,
            )
            for at, (operand, ranks) in enumerate(zip(my, my_ranks, strict=True))
        ]
        # A golden step that is compared with several of mine gets an item for each of them.
        askers: dict[int, list[int | None]] = {}
        for my_step, golden_step in steps.items():
            askers.setdefault(golden_step, []).append(my_step)
        self.golden = [
            MatchItem(operand, None if step is None else (step, label(ranks)), at, mine=False)
            for at, (operand, ranks) in enumerate(zip(golden, golden_ranks, strict=True))
            for step in askers.get(operand.step, [None])
        ]

    def remaining_items(self, *, mine: bool) -> Iterator[MatchItem]:
        """The items that still need a counterpart."""
        return (item for item in (self.my if mine else self.golden) if item.is_left)

    def link(
        self, my: MatchItem, golden: MatchItem, by: MatchedBy, operand: Operand | None = None
    ) -> None:
        """Match two items."""
        is_home = not golden.found and my.site.side == golden.site.side
        self.links.append(Link(my, golden, by, operand or my.operand, is_home=is_home))
        my.found = golden.found = True

    def link_either(self, match_item: MatchItem, other: MatchItem, by: MatchedBy) -> None:
        """Match two items, in either order."""
        my, golden = (match_item, other) if match_item.mine else (other, match_item)
        self.link(my, golden, by)

    def skip(self, item: MatchItem, noun: str, reason: str) -> None:
        """Leave out an item that is one `noun`, for a reason; see `describe_skipped`."""
        item.gone = True
        self._reasons[noun, reason] += 1

    def skip_left(self, items: Iterable[MatchItem], noun: str, reason: str) -> None:
        """Leave out those that still have no counterpart."""
        for item in items:
            if item.is_left:
                self.skip(item, noun, reason)

    def leave_unselected(self, item: MatchItem, why: str) -> None:
        """Leave out an item that the other dump's selection excludes."""
        item.gone = True
        self.unselected.append((item, why))

    def describe_skipped(self) -> list[str]:
        """Why items were left out, with counts."""
        return [f"{count_things(n, noun)} {reason}" for (noun, reason), n in self._reasons.items()]

    def _labels(self, rankss: set[Ranks], golden_rankss: set[Ranks]) -> Callable[[Ranks], int]:
        """A function from ranks to the rank of a scope; the rank of a single-rank run is WHOLE."""
        all_mine, all_theirs = (
            {rank for ranks in side for rank in ranks} for side in (rankss, golden_rankss)
        )
        single = {min(side) for side in (all_mine, all_theirs) if len(side) == 1}
        if len(all_mine) == len(all_theirs) == 1 and len(single) > 1:
            self.notes.append(
                f"my rank {min(all_mine)} is compared with golden rank {min(all_theirs)}, the only "
                f"ones"
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
    """Parse a number, string, dtype, device and the like, or a list of them."""
    try:
        if len(text) > _LONGEST:
            raise ValueError(f"{len(text)} characters")
        return _evaluate(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        raise UsageError(f"cannot parse {text[:80]!r} as a plain value") from error


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
            return torch.device("cpu")  # the recorded device may not exist here
        case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr="Size"), args=[inner]):
            return tuple(_evaluate(inner))
    raise ValueError(ast.dump(tree)[:80])


def _evaluate_number(tree: ast.expr) -> complex | float:
    value = _evaluate(tree)
    if isinstance(value, bool) or not isinstance(value, int | float | complex):
        raise TypeError(f"{value!r} is not a number")
    return value


# --- One side of a pair, for the table ------------------------------------------------------------

_OUR_DIGEST = re.compile(r"[0-9a-f]{32}")


def describe_side(operand: Operand, kind: str) -> SideFacts:
    """What is known without reading values; `kind` is the kind of the dump."""
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
    """Add what is known from the values."""
    return msgspec.structs.replace(
        side,
        dtype=dtype_name(tensor.dtype),
        shape=tuple(tensor.shape),
        **_extremes_of(extremes),
    )


def with_extremes(side: SideFacts, statistics: Statistics) -> SideFacts:
    """Add what is known from the statistics."""
    return msgspec.structs.replace(side, **_extremes_of(statistics))


def same_digest(left: Record, right: Record) -> bool:
    """Whether the digests show that the two are the same bits."""
    return left.digest == right.digest and comparable_digests(left, right)


def comparable_digests(left: Record, right: Record) -> bool:
    """Whether both have paritas digests of the same kind of tensor.

    Checksums of other tools are too short.
    """
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
    # The result of a rename rule is known only after reading.
    return None if facts is None or operand.recipe is not None else facts.shape


def _stored_shape(record: Record) -> Sequence[int] | None:
    return None if record.payload is None else record.payload.shape


def _describe_path(record: Record, kind: str) -> str:
    if record.payload is None:
        return ""
    # A GE file holds all inputs and outputs of an operator.
    several = f",{record.site.side}s,{record.site.position}" if kind == "ge" else ""
    return f"{record.payload.file}{several}"


def _extremes_of(statistics: Statistics | Extremes | None) -> dict[str, float | None]:
    if statistics is None:
        return {}
    return {name: getattr(statistics, name) for name in ("minimum", "maximum", "mean")}
