"""Which values of two dumps belong together.

Each way is tried on what those before it have left:

1. a rule of the user's that renames;
2. the canonical name;
3. the node of a captured graph that made the value, for fused code and for graph engines;
4. the module and the operator, for eager code against graphs, and for names of which one side has
   a prefix;
5. order and shape.

Before the last of them, what the other dump was not asked to record is set apart: it has no
counterpart to be guessed.

What holds no value of the program, and what is compared elsewhere, is left out and counted. What
is left then has no counterpart, and is given the nearest names.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from paritas.comparison.matching.aligning import span_text
from paritas.comparison.matching.book import Book
from paritas.comparison.matching.folding import skip_rewritten
from paritas.comparison.matching.graphs import align_graphs, match_nodes
from paritas.comparison.matching.modules import match_modules
from paritas.comparison.matching.names import match_ids, match_prefixed, match_renamed
from paritas.comparison.matching.nearest import NearestNames
from paritas.comparison.matching.order import match_order
from paritas.comparison.matching.selecting import (
    Asked,
    leave_out_unselected,
    not_selected_notes,
)
from paritas.comparison.operands import Pair

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paritas.comparison.matching.book import Item
    from paritas.comparison.matching.rules import Rules
    from paritas.comparison.operands import Operand

    # Step, rank and number on the golden side; what follows that on mine.
    Place = tuple[int, int, int, int, int]

__all__ = ["Matches", "match"]


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
    asked: tuple[Asked, Asked] = (Asked(), Asked()),
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
    return Matches(_pairs(book, steps), book.skipped(), alone, notes)


def _leave_out(book: Book, rules: Rules) -> None:
    for whose, items in (("my", book.my), ("golden", book.golden)):
        unasked = {item.operand.step for item in items if item.scope is None}
        for item in items:
            if rules.ignores(item.record.id, item.site.module):
                book.skip(item, f"{{n}} {whose} values are ignored, as was asked for")
            elif item.scope is None and rules.steps:
                told = span_text(unasked)
                book.skip(item, f"{{n}} {whose} values are of steps not asked for: {told}")


def _pairs(book: Book, steps: Mapping[int, int]) -> list[Pair]:
    """All pairs, in the order of the program."""
    placed: list[tuple[Place, Pair]] = []
    # Of each step and rank of mine, where on the golden side it has got to, by its own number.
    homes: dict[int, Place] = {
        id(link.my): _place(link.golden) for link in book.links if link.is_home
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
        where = _place(link.golden) if is_own else behind[id(link.my)]
        placed.append((where, Pair(link.operand, link.golden.operand, link.by)))
    placed += _unmatched(book, behind)
    placed.sort(key=lambda found: found[0])
    return [pair for _, pair in placed]


def _place(item: Item) -> Place:
    record = item.record
    return (record.step, record.rank, item.at, 0, 0)


def _unmatched(book: Book, behind: dict[int, Place]) -> list[tuple[Place, Pair]]:
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
                found.append((_place(item), Pair(None, item.operand, "", names)))
    return found
