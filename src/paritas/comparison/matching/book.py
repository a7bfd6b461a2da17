"""What is known while two dumps are matched: which values have found one another."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from paritas.comparison.operands import Operand
    from paritas.dumps.records import Record, Site
    from paritas.numerics.comparisons import MatchedBy

__all__ = ["Book", "GraphKey", "Item", "Link", "Scope"]

# My step, and the rank or what stands for all of them.
Scope = tuple[int, int]
GraphKey = tuple[str, str]
Ranks = tuple[int, ...]
WHOLE = -1


class Item:
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
        self, my: Item, golden: Item, by: MatchedBy, operand: Operand, *, is_home: bool
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
        self.unselected: list[tuple[Item, str]] = []
        self._reasons: Counter[str] = Counter()
        my_ranks, golden_ranks = ([one.ranks for one in side] for side in (my, golden))
        label = self._labels(set(my_ranks), set(golden_ranks))
        self.my = [
            Item(one, (one.step, label(ranks)) if one.step in steps else None, at, mine=True)
            for at, (one, ranks) in enumerate(zip(my, my_ranks, strict=True))
        ]
        # A golden step that several of mine are compared with is there for each of them.
        askers: dict[int, list[int | None]] = {}
        for mine, theirs in steps.items():
            askers.setdefault(theirs, []).append(mine)
        self.golden = [
            Item(one, None if step is None else (step, label(ranks)), at, mine=False)
            for at, (one, ranks) in enumerate(zip(golden, golden_ranks, strict=True))
            for step in askers.get(one.step, [None])
        ]

    def left(self, *, mine: bool) -> Iterator[Item]:
        """What still looks for a counterpart."""
        return (item for item in (self.my if mine else self.golden) if item.is_left)

    def link(self, my: Item, golden: Item, by: MatchedBy, operand: Operand | None = None) -> None:
        """Say that two belong together."""
        is_home = not golden.found and my.site.side == golden.site.side
        self.links.append(Link(my, golden, by, operand or my.operand, is_home=is_home))
        my.found = golden.found = True

    def link_either(self, one: Item, other: Item, by: MatchedBy) -> None:
        """Say so, whichever of them is mine."""
        my, golden = (one, other) if one.mine else (other, one)
        self.link(my, golden, by)

    def skip(self, item: Item, reason: str) -> None:
        """Leave one out; `{n}` in the reason becomes the number of all that are."""
        item.gone = True
        self._reasons[reason] += 1

    def leave_unselected(self, item: Item, why: str) -> None:
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
