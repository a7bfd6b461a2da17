"""Which values of two dumps belong together."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import TYPE_CHECKING

import msgspec

from paritas.comparison.matching_graphs import (
    GRAPH_LEVELS,
    align_graphs,
    match_nodes,
    node_key,
    skip_rewritten,
)
from paritas.comparison.matching_modules import match_modules
from paritas.comparison.matching_names import match_ids, match_order, match_prefixed, match_renamed
from paritas.comparison.operands import Book, Pair
from paritas.comparison.rules import span_text
from paritas.errors import UsageError
from paritas.recording.selection import Selection, Sieve

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from paritas.comparison.operands import MatchItem, Operand
    from paritas.comparison.rules import Rules
    from paritas.dumps.opening import ReadableDump


# --- The most similar names -----------------------------------------------------------------------

_LENGTH = 3
_MOST_LETTERS = 300
_MOST_NAMES = 100_000
# How many of a name's rarest pieces are looked up, and how many names each may point to. They
# bound the time that a name takes, whatever the number of names.
_PIECES, _POINTED = 6, 48
_COMPARED = 12
# Nobody reads more than that; the rest is told without.
_MOST_ASKED = 20_000
_GIVEN = 3
_LEAST = 0.3


class NearestNames:
    """Finds names by the pieces of three letters that they share."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = list(dict.fromkeys(names))[:_MOST_NAMES]
        self._pieces = [_cut_pieces(name) for name in self._names]
        self._pointers: dict[str, list[int]] = {}
        for at, pieces in enumerate(self._pieces):
            for piece in pieces:
                self._pointers.setdefault(piece, []).append(at)
        self._known: dict[str, tuple[str, ...]] = {}

    def of(self, name: str) -> tuple[str, ...]:
        """Up to three names, the likest first; none where nothing is like it."""
        if name not in self._known and len(self._known) < _MOST_ASKED:
            self._known[name] = self._find(name)
        return self._known.get(name, ())

    def _find(self, name: str) -> tuple[str, ...]:
        pieces = _cut_pieces(name)
        rare = sorted((len(self._pointers[one]), one) for one in pieces if one in self._pointers)
        shared: dict[int, int] = {}
        for _, piece in rare[:_PIECES]:
            for at in self._pointers[piece][:_POINTED]:
                shared[at] = shared.get(at, 0) + 1
        likely = sorted(shared, key=lambda at: -shared[at])[:_COMPARED]
        scores = [(self._likeness(pieces, at), at) for at in likely]
        scores.sort(key=lambda found: (-found[0], found[1]))
        return tuple(self._names[at] for score, at in scores[:_GIVEN] if score >= _LEAST)

    def _likeness(self, pieces: set[str], at: int) -> float:
        other = self._pieces[at]
        return 2 * len(pieces & other) / (len(pieces) + len(other))


def _cut_pieces(name: str) -> set[str]:
    text = f" {name[:_MOST_LETTERS].lower()} "
    return {text[at : at + _LENGTH] for at in range(len(text) - _LENGTH + 1)}


# --- Values that the other dump was not asked to record -------------------------------------------

# The header of a dump says what was asked for: steps, names, operators, sides, phases, ranks. What
# falls outside of that on the other side is listed as not selected. What falls inside of it and is
# missing all the same still fails.

_EVERYTHING = Selection()


@dataclasses.dataclass(frozen=True)
class RecordedSelection:
    """What a dump was asked to record.

    Attributes:
        fusion: how its code was fused, where it is of fused code.
    """

    selection: Selection = _EVERYTHING
    fusion: str = ""

    @classmethod
    def of(cls, dump: ReadableDump) -> RecordedSelection:
        """As its header says; where it does not, nothing is known to have been left out."""
        header = dump.header(min(dump.ranks))
        fusion = header.fusion if "fused" in header.sources else ""
        try:
            return cls(Selection.recorded(header.selection), fusion)
        except UsageError:  # the words of something else than a recording
            return cls(fusion=fusion)

    @property
    def is_everything(self) -> bool:
        """Whether it left nothing out."""
        return self.selection == _EVERYTHING


def leave_out_unselected(
    book: Book, my: RecordedSelection, golden: RecordedSelection, *, of_graphs: bool = False
) -> None:
    """Set apart what has no counterpart because the other side was not asked for it.

    Args:
        of_graphs: only what graphs compute, where both sides have some: nothing but their nodes
            can be its counterpart.
    """
    for items, others, theirs, mine in (
        (book.my, book.golden, golden, my),
        (book.golden, book.my, my, golden),
    ):
        if not theirs.is_everything:
            outside = _OutsideSelection(
                items, others, theirs, same_code=mine.fusion == theirs.fusion
            )
            outside.leave_out(book, of_graphs=of_graphs)


def not_selected_notes(book: Book) -> list[str]:
    """In words, how many of either side were not selected, and by what."""
    counts = Counter((item.mine, why) for item, why in book.unselected)
    notes = []
    for (mine, why), count in counts.items():
        side, other = ("my", "the golden") if mine else ("golden", "my")
        values, they = ("value was", "it is") if count == 1 else ("values were", "they are")
        notes.append(
            f"{count} {side} {values} not selected when {other} dump was recorded ({why}); {they} "
            f"listed and cannot fail"
        )
    return notes


class _OutsideSelection:
    """Tells which values of one side are outside of what the other was asked to record."""

    def __init__(
        self,
        items: list[MatchItem],
        others: list[MatchItem],
        asked: RecordedSelection,
        *,
        same_code: bool,
    ) -> None:
        self._items = items
        self._selection = asked.selection
        self._words = asked.selection.describe()
        self._sieve = Sieve(asked.selection)
        self._same_code = same_code
        self._families = {_name_family(item) for item in others}
        self._fused = {item.graph for item in others if item.site.level == "buffer"}
        for item in items:
            self._wants_name(item)
        # Names that mean nothing on this side say nothing of what is on it.
        self._understood = not self._sieve.unmet()

    def leave_out(self, book: Book, *, of_graphs: bool) -> None:
        """Outputs first: what a node is given is the output of another, seen once more."""
        makers: dict[object, str] = {}
        items = self._items
        if of_graphs:
            has_graphs = "graph" in self._families
            items = [item for item in items if has_graphs and _name_family(item) == "graph"]
        for side in ("output", "input"):
            for item in items:
                if item.site.side != side or item.found or item.gone:
                    continue
                why = self._why(item)
                if not why and side == "input" and item.graph in self._fused and item.site.nodes:
                    # Fused code reads what it holds in memory, not what each node is given.
                    why = makers.get(_node_value_key(item, item.site.nodes[-1]), "")
                if why:
                    book.leave_unselected(item, why)
                    makers[_node_value_key(item, item.site.name)] = why

    def _why(self, item: MatchItem) -> str:
        """The part of the selection that an item is outside of; empty where it is within."""
        selection, site = self._selection, item.site
        if item.scope is None and not selection.wants_step(item.operand.step):
            return self._named("steps", "every")
        if not any(selection.wants_rank(rank) for rank in item.operand.ranks):
            return self._named("ranks")
        if selection.phases is not None and site.phase not in selection.phases:
            return self._named("phases")
        if selection.mode not in ("all", site.side):
            return self._named("mode")
        is_comparable = self._understood or _name_family(item) in self._families
        if is_comparable and not self._wants_name(item):
            return self._named("layers", "ops")
        return ""

    def _named(self, *parts: str) -> str:
        return ", ".join(f"{part} {self._words[part]}" for part in parts if part in self._words)

    def _wants_name(self, item: MatchItem) -> bool:
        site = item.site
        if site.level == "buffer" and not self._same_code:
            # Code that is fused otherwise would have the value alone, not what led to it.
            site = msgspec.structs.replace(site, nodes=site.nodes[-1:])
        return self._sieve.wants_name(site)


def _node_value_key(item: MatchItem, node: str) -> tuple[object, ...]:
    """Of a step that the other side does not have, too."""
    return item.operand.step, node_key(item, node)


def _name_family(item: MatchItem) -> str:
    """What shares its names: nodes and buffers of graphs, or modules and their calls."""
    return "graph" if item.site.level in GRAPH_LEVELS else "eager"


# --- Matching -------------------------------------------------------------------------------------

# Each way is tried on what those before it have left:
#
# 1. a rule of the user's that renames; 2. the canonical name; 3. the node of a captured graph that
# made the value, for fused code and for graph engines; 4. the module and the operator, for eager
# code against graphs, and for names of which one side has
#    a prefix;
# 5. order and shape.
#
# Before the last of them, what the other dump was not asked to record is set apart: it has no
# counterpart to be guessed.
#
# What holds no value of the program, and what is compared elsewhere, is left out and counted. What
# is left then has no counterpart, and is given the nearest names.

if TYPE_CHECKING:
    # Step, rank and number on the golden side; what follows that on mine.
    Place = tuple[int, int, int, int, int]


@dataclasses.dataclass(frozen=True)
class Matches:
    """What was found.

    Attributes:
        pairs: in the order of the program, as the golden side has it. What only mine has stands
            behind what it follows in mine. An operand may be in several pairs: a kernel that reads
            a value is held against the node that made it.
        skipped: why values were left out, with how many.
        not_selected: what the other side was not asked to record.
        notes: what should be known of how it was done.
    """

    pairs: list[Pair]
    skipped: list[str]
    not_selected: list[Pair]
    notes: list[str]


def match(
    my: Sequence[Operand],
    golden: Sequence[Operand],
    rules: Rules,
    steps: Mapping[int, int],
    asked: tuple[RecordedSelection, RecordedSelection] = (RecordedSelection(), RecordedSelection()),
) -> Matches:
    """Find what belongs together.

    Args:
        my: in the order of the program.
        golden: likewise.
        rules: what the user said; see `Rules`.
        steps: steps of mine, and the golden steps they belong to.
        asked: what my dump and the golden one were asked to record.
    """
    book = Book(my, golden, steps)
    _leave_out(book, rules)
    match_renamed(book, rules.renamings)
    match_ids(book)
    align_graphs(book)
    match_nodes(book)
    leave_out_unselected(book, *asked, of_graphs=True)
    skip_rewritten(book)
    match_modules(book)
    match_prefixed(book)
    leave_out_unselected(book, *asked)
    match_order(book)
    alone = [
        Pair(item.operand, None, "") if item.mine else Pair(None, item.operand, "")
        for item, _ in book.unselected
    ]
    notes = [*book.notes, *not_selected_notes(book)]
    return Matches(_make_pairs(book, steps), book.skipped(), alone, notes)


def _leave_out(book: Book, rules: Rules) -> None:
    for whose, items in (("my", book.my), ("golden", book.golden)):
        unasked = {item.operand.step for item in items if item.scope is None}
        for item in items:
            if rules.ignores(item.record.id, item.site.module):
                book.skip(item, f"{{n}} {whose} values are ignored, as was asked for")
            elif item.scope is None and rules.steps:
                told = span_text(unasked)
                book.skip(item, f"{{n}} {whose} values are of steps not asked for: {told}")


def _make_pairs(book: Book, steps: Mapping[int, int]) -> list[Pair]:
    """All pairs, in the order of the program."""
    placed: list[tuple[Place, Pair]] = []
    # Of each step and rank of mine, where on the golden side it has got to, by its own number.
    homes: dict[int, Place] = {
        id(link.my): _order_key(link.golden) for link in book.links if link.is_home
    }
    behind: dict[int, Place] = {}
    at: dict[tuple[int, int], Place] = {}
    for item in book.my:
        operand = item.operand
        key = (operand.step, operand.record.rank)
        step = steps.get(operand.step, operand.step)
        at[key] = homes.get(id(item)) or at.get(key, (step, key[1], -1, 0, 0))
        behind[id(item)] = (*at[key][:3], 1, item.at)
    for link in book.links:
        # What reads a value again stands where it reads, not where the value was made.
        is_own = link.is_home or link.golden.site.side == "input"
        where = _order_key(link.golden) if is_own else behind[id(link.my)]
        placed.append((where, Pair(link.operand, link.golden.operand, link.by)))
    placed += _list_unmatched(book, behind)
    placed.sort(key=lambda found: found[0])
    return [pair for _, pair in placed]


def _order_key(item: MatchItem) -> Place:
    record = item.record
    return (record.step, record.rank, item.at, 0, 0)


def _list_unmatched(book: Book, behind: dict[int, Place]) -> list[tuple[Place, Pair]]:
    """What has no counterpart, with the names that are most like its own."""
    alone = [
        [item for item in side if not item.found and not item.gone]
        for side in (book.my, book.golden)
    ]
    found: list[tuple[Place, Pair]] = []
    for items, others, side in zip(alone, alone[::-1], (book.golden, book.my), strict=True):
        if not items:
            continue
        near = NearestNames(one.record.id for one in others or side)
        for item in items:
            names = near.of(item.record.id)
            if item.mine:
                found.append((behind[id(item)], Pair(item.operand, None, "", names)))
            else:
                found.append((_order_key(item), Pair(None, item.operand, "", names)))
    return found
