"""Values of captured graphs: found by the node that made them, whatever code computed them.

A buffer of fused code says which nodes it stands for, and which one's value it holds. What a
kernel reads is the value of a node too. So both are held against that node's value on the other
side, also if that has been matched before: a value may be read many times.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paritas.comparison.matching.folding import fold_fused, skip_inexact
from paritas.comparison.matching.values import GRAPH_LEVELS, GraphSide, held, node_key
from paritas.dumps.foreign.finding import natural_key

if TYPE_CHECKING:
    from paritas.comparison.matching.book import Book, GraphKey, Item
    from paritas.comparison.matching.values import NodeKey

__all__ = ["align_graphs", "match_nodes"]


# --- graphs ---------------------------------------------------------------------------------------


def align_graphs(book: Book) -> None:
    """Give my graphs the names of the golden ones they are.

    The same name is the same graph. Of the others, those belong together whose nodes have the most
    names in common.
    """
    mine, theirs = _node_names(book.my), _node_names(book.golden)
    moved: dict[GraphKey, GraphKey] = {}
    rest = [key for key in mine if key not in theirs]
    free = [key for key in theirs if key not in mine]
    scores = sorted(
        (
            (len(mine[key] & theirs[other]), key[0] == other[0], key, other)
            for key in rest
            for other in free
        ),
        key=lambda found: found[:2],
        reverse=True,
    )
    for shared, _, key, other in scores:
        if shared and key not in moved and other not in moved.values():
            moved[key] = other
    for item in book.my:
        item.graph = moved.get(item.graph, item.graph)
    book.notes += [
        f"my graph {' '.join(key[::-1])} was taken for the golden {' '.join(other[::-1])}"
        for key, other in moved.items()
    ]


def _node_names(items: list[Item]) -> dict[GraphKey, set[str]]:
    names: dict[GraphKey, set[str]] = {}
    for item in items:
        site = item.site
        if site.level in GRAPH_LEVELS:
            found = names.setdefault(item.graph, set())
            found.add(site.name)
            found.update(site.nodes)
    return names


# --- nodes ----------------------------------------------------------------------------------------


def match_nodes(book: Book) -> None:
    """Link values of the same node, and leave out what is compared elsewhere."""
    my, golden = GraphSide(book.my), GraphSide(book.golden)
    if not my.items or not golden.items:
        return
    _match_places(book, my, golden)
    # Each has the other's values to be found in.
    for side, other in ((my, golden), (golden, my)):
        for item in side.items:
            node = held(item) if item.is_left else ""
            found = other.value(item, node) if node else None
            if found is not None and (not found.found or _reads_again(item)):
                book.link_either(item, found, "node")
    for side, other in ((my, golden), (golden, my)):
        _match_arguments(book, side, other)
    skip_inexact(book, my.items, golden.plain)
    skip_inexact(book, golden.items, my.plain)
    for side, other in ((my, golden), (golden, my)):
        fold_fused(book, side, other)


def _reads_again(item: Item) -> bool:
    """Whether an item may be held against a value that has its counterpart already."""
    return item.site.source == "fused"


def _match_places(book: Book, my: GraphSide, golden: GraphSide) -> None:
    """The same place of the same node, in graphs of different names."""
    known = {
        _place(item): item for item in golden.items if item.is_left and item.site.level == "node"
    }
    for item in my.items:
        if item.is_left and item.site.level == "node":
            other = known.get(_place(item))
            if other is not None and other.is_left:
                book.link(item, other, "node")


def _place(item: Item) -> tuple[object, ...]:
    site = item.site
    tapped = site.source == "fused"
    return item.scope, item.graph, tapped, site.name, site.call, site.side, site.position


def _match_arguments(book: Book, side: GraphSide, other: GraphSide) -> None:
    """What an engine's operator is given, where the graph in words does not tell who made it.

    It is either what the program was given, by name; or it has its place among the tensors that
    the node is given, numbers apart. Of a fused operator that is its first node, if the shapes are
    right.
    """
    calls: dict[NodeKey, tuple[list[Item], list[Item]]] = {}
    for item in side.items:
        site = item.site
        if site.level != "buffer" or site.kernel:
            continue
        calls.setdefault(node_key(item, site.name), ([], []))[site.side == "output"].append(item)
        if item.is_left and site.side == "input" and len(site.nodes) == 1:
            value = other.value(item, site.nodes[0])
            if value is not None and value.site.op in ("", "placeholder"):
                book.link_either(item, value, "node")
    for inputs, outputs in calls.values():
        nodes = {one.site.nodes for one in outputs if one.site.exact}
        if len(nodes) != 1 or not any(one.is_left for one in inputs):
            continue
        (names,) = nodes
        taken = other.given.get(node_key(outputs[0], names[0]), ())
        given = _in_place([one for one in taken if not one.is_number])
        ours = _in_place(inputs)
        if len(given) != len(ours):
            continue
        if len(names) > 1 and [one.shape for one in given] != [one.shape for one in ours]:
            continue
        for one, theirs in zip(ours, given, strict=True):
            if one.is_left and not theirs.found:
                book.link_either(one, theirs, "node")


def _in_place(items: list[Item]) -> list[Item]:
    return sorted(items, key=lambda one: natural_key(one.site.position))
