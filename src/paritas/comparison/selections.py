"""Values that were not selected when the other dump was recorded."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import TYPE_CHECKING

import msgspec

from paritas.comparison.matching import GRAPH_LEVELS, node_key
from paritas.core.errors import UsageError
from paritas.formats.dumps.selection import Selection, SelectionFilter

if TYPE_CHECKING:
    from paritas.comparison.operands import MatchItem, OperandLinks
    from paritas.formats.dumps.opening import ReadableDump


# The header of a dump has the recorded selection: steps, names, operators, sides, phases, ranks.
# Values of the other side that are outside it are listed as not selected. Values that are inside it
# and missing still fail.

_EVERYTHING = Selection()


@dataclasses.dataclass(frozen=True)
class RecordedSelection:
    """The selection that a dump was recorded with.

    Attributes:
        fusion: how its code was fused, if it is a dump of fused code.
    """

    selection: Selection = _EVERYTHING
    fusion: str = ""

    @classmethod
    def of(cls, dump: ReadableDump) -> RecordedSelection:
        """Read it from the header; without one, everything was selected."""
        header = dump.header(min(dump.ranks))
        fusion = header.fusion if "fused" in header.sources else ""
        try:
            return cls(Selection.from_header(header.selection), fusion)
        except UsageError:  # not the selection of a recording
            return cls(fusion=fusion)


def leave_out_unselected(
    operand_links: OperandLinks,
    my: RecordedSelection,
    golden: RecordedSelection,
    *,
    of_graphs: bool = False,
) -> None:
    """Set aside values without a counterpart that the other side's selection excludes.

    Args:
        of_graphs: only values of graphs, if both sides have graphs: only nodes can match them.
    """
    for items, others, other_selection, own_selection in (
        (operand_links.my, operand_links.golden, golden, my),
        (operand_links.golden, operand_links.my, my, golden),
    ):
        if other_selection.selection != _EVERYTHING:
            same_code = own_selection.fusion == other_selection.fusion
            outside = _OutsideSelection(items, others, other_selection, same_code=same_code)
            outside.leave_out(operand_links, of_graphs=of_graphs)


def note_unselected(operand_links: OperandLinks) -> list[str]:
    """How many values of either side were not selected, and why."""
    counts = Counter((item.mine, why) for item, why in operand_links.unselected)
    notes = []
    for (is_mine, why), count in counts.items():
        side, other = ("my", "the golden") if is_mine else ("golden", "my")
        values, they = ("value was", "it is") if count == 1 else ("values were", "they are")
        notes.append(
            f"{count} {side} {values} not selected when {other} dump was recorded ({why}); {they} "
            f"listed but cannot fail"
        )
    return notes


class _OutsideSelection:
    """Finds values of one side that are outside the selection of the other."""

    def __init__(
        self,
        items: list[MatchItem],
        others: list[MatchItem],
        recorded_selection: RecordedSelection,
        *,
        same_code: bool,
    ) -> None:
        self._items = items
        self._selection = recorded_selection.selection
        self._words = recorded_selection.selection.describe()
        self._sieve = SelectionFilter(recorded_selection.selection)
        self._same_code = same_code
        self._families = {_name_family(item) for item in others}
        self._fused = {item.graph for item in others if item.site.level == "buffer"}
        for item in items:
            self._wants_name(item)
        # Names that do not occur on this side cannot select anything on it.
        self._understood = not self._sieve.unmet()

    def leave_out(self, operand_links: OperandLinks, *, of_graphs: bool) -> None:
        """Outputs first: the input of a node is the output of another."""
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
                    # Fused code reads buffers, not the inputs of each node.
                    why = makers.get(_node_value_key(item, item.site.nodes[-1]), "")
                if why:
                    operand_links.leave_unselected(item, why)
                    makers[_node_value_key(item, item.site.name)] = why

    def _why(self, item: MatchItem) -> str:
        """The part of the selection that excludes an item; empty if it is selected."""
        selection, site = self._selection, item.site
        if item.scope is None and not selection.wants_step(item.operand.step):
            return self._list_options("steps", "every")
        if not any(selection.wants_rank(rank) for rank in item.operand.ranks):
            return self._list_options("ranks")
        if selection.phases is not None and site.phase not in selection.phases:
            return self._list_options("phases")
        if selection.mode not in ("all", site.side):
            return self._list_options("mode")
        is_comparable = self._understood or _name_family(item) in self._families
        if is_comparable and not self._wants_name(item):
            return self._list_options("layers", "ops")
        return ""

    def _list_options(self, *parts: str) -> str:
        return ", ".join(f"{part} {self._words[part]}" for part in parts if part in self._words)

    def _wants_name(self, item: MatchItem) -> bool:
        site = item.site
        if site.level == "buffer" and not self._same_code:
            # Code that is fused differently has the value, but not the nodes before it.
            site = msgspec.structs.replace(site, nodes=site.nodes[-1:])
        return self._sieve.wants_name(site)


def _node_value_key(item: MatchItem, node: str) -> tuple[object, ...]:
    """Also valid for a step that the other side does not have."""
    return item.operand.step, node_key(item, node)


def _name_family(item: MatchItem) -> str:
    """Nodes and buffers of graphs share names, and so do modules and their calls."""
    return "graph" if item.site.level in GRAPH_LEVELS else "eager"
