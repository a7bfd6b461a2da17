"""Values without a counterpart because the other dump was asked to record only a part of its run.

The header of a dump says what was asked for: steps, names, operators, sides, phases, ranks. What
falls outside of that on the other side is listed as not selected. What falls inside of it and is
missing all the same still fails.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import TYPE_CHECKING

import msgspec

from paritas.comparison.matching.values import GRAPH_LEVELS, node_key
from paritas.errors import UsageError
from paritas.recording.selection import Selection, Sieve

if TYPE_CHECKING:
    from paritas.comparison.matching.book import Book, Item
    from paritas.dumps.opening import ReadableDump

__all__ = ["Asked", "leave_out_unselected", "not_selected_notes"]

_EVERYTHING = Selection()


@dataclasses.dataclass(frozen=True)
class Asked:
    """What a dump was asked to record.

    Attributes:
        fusion: how its code was fused, where it is of fused code.
    """

    selection: Selection = _EVERYTHING
    fusion: str = ""

    @classmethod
    def of(cls, dump: ReadableDump) -> Asked:
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


def leave_out_unselected(book: Book, my: Asked, golden: Asked, *, of_graphs: bool = False) -> None:
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
            outside = _Outside(items, others, theirs, same_code=mine.fusion == theirs.fusion)
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


class _Outside:
    """Tells which values of one side are outside of what the other was asked to record."""

    def __init__(
        self, items: list[Item], others: list[Item], asked: Asked, *, same_code: bool
    ) -> None:
        self._items = items
        self._selection = asked.selection
        self._words = asked.selection.describe()
        self._sieve = Sieve(asked.selection)
        self._same_code = same_code
        self._families = {_family(item) for item in others}
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
            items = [item for item in items if has_graphs and _family(item) == "graph"]
        for side in ("output", "input"):
            for item in items:
                if item.site.side != side or item.found or item.gone:
                    continue
                why = self._why(item)
                if not why and side == "input" and item.graph in self._fused and item.site.nodes:
                    # Fused code reads what it holds in memory, not what each node is given.
                    why = makers.get(_value(item, item.site.nodes[-1]), "")
                if why:
                    book.leave_unselected(item, why)
                    makers[_value(item, item.site.name)] = why

    def _why(self, item: Item) -> str:
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
        is_comparable = self._understood or _family(item) in self._families
        if is_comparable and not self._wants_name(item):
            return self._named("layers", "ops")
        return ""

    def _named(self, *parts: str) -> str:
        return ", ".join(f"{part} {self._words[part]}" for part in parts if part in self._words)

    def _wants_name(self, item: Item) -> bool:
        site = item.site
        if site.level == "buffer" and not self._same_code:
            # Code that is fused otherwise would have the value alone, not what led to it.
            site = msgspec.structs.replace(site, nodes=site.nodes[-1:])
        return self._sieve.wants_name(site)


def _value(item: Item, node: str) -> tuple[object, ...]:
    """Of a step that the other side does not have, too."""
    return item.operand.step, node_key(item, node)


def _family(item: Item) -> str:
    """What shares its names: nodes and buffers of graphs, or modules and their calls."""
    return "graph" if item.site.level in GRAPH_LEVELS else "eager"
