"""The values of one side's graphs, by the nodes that made them."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paritas.comparison.matching.book import GraphKey, Item, Scope

    NodeKey = tuple[Scope | None, GraphKey, str, int]

__all__ = ["GRAPH_LEVELS", "GraphSide", "held", "node_key"]

GRAPH_LEVELS = ("node", "buffer")


class GraphSide:
    """The values of one side's graphs, by the nodes that made them."""

    def __init__(self, items: list[Item]) -> None:
        self.items = [
            one for one in items if one.site.level in GRAPH_LEVELS and one.scope is not None
        ]
        self.values: dict[NodeKey, dict[str, Item]] = {}
        self.given: defaultdict[NodeKey, list[Item]] = defaultdict(list)
        self.fused: set[GraphKey] = set()
        self.plain: set[GraphKey] = set()
        taps = []
        for item in self.items:
            site = item.site
            (self.fused if site.level == "buffer" else self.plain).add(item.graph)
            if site.side == "input":
                if site.level == "node":
                    self.given[node_key(item, site.name)].append(item)
            elif site.level == "node" and site.source == "fused":
                taps.append(item)
            else:
                self._note(item)
        # What was materialised for the sake of looking comes after what the code itself wrote.
        for item in taps:
            self._note(item)

    def _note(self, item: Item) -> None:
        node = held(item)
        if node:
            self.values.setdefault(node_key(item, node), {}).setdefault(item.site.position, item)

    def value(self, item: Item, node: str) -> Item | None:
        """The value of a node that an item of the other side speaks of."""
        found = self.values.get(node_key(item, node))
        if not found:
            return None
        if len(found) == 1:
            return next(iter(found.values()))
        if item.site.side == "output" and item.site.position in found:
            return found[item.site.position]
        alike = [one for one in found.values() if one.shape == item.shape]
        return alike[0] if len(alike) == 1 else None


def node_key(item: Item, node: str) -> NodeKey:
    """By which a value of a node is found, on either side."""
    return item.scope, item.graph, node, item.site.call


def held(item: Item) -> str:
    """The node whose value an item holds; empty where none is known."""
    site = item.site
    if site.level == "node" and site.side == "output":
        return site.name
    if site.level == "buffer" and site.exact and site.nodes:
        return site.nodes[-1]
    return ""
