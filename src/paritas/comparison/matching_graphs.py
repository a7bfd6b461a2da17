"""Matching the values of captured graphs, by the node that made them."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from paritas.files.trees import natural_key

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paritas.comparison.operands import Book, GraphKey, MatchItem, Scope


# --- Values by node -------------------------------------------------------------------------------

if TYPE_CHECKING:
    NodeKey = tuple[Scope | None, GraphKey, str, int]


GRAPH_LEVELS = ("node", "buffer")


class GraphSide:
    """The values of one side's graphs, by the nodes that made them."""

    def __init__(self, items: list[MatchItem]) -> None:
        self.items = [
            one for one in items if one.site.level in GRAPH_LEVELS and one.scope is not None
        ]
        self.values: dict[NodeKey, dict[str, MatchItem]] = {}
        self.given: defaultdict[NodeKey, list[MatchItem]] = defaultdict(list)
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

    def _note(self, item: MatchItem) -> None:
        node = held(item)
        if node:
            self.values.setdefault(node_key(item, node), {}).setdefault(item.site.position, item)

    def value(self, item: MatchItem, node: str) -> MatchItem | None:
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


def node_key(item: MatchItem, node: str) -> NodeKey:
    """By which a value of a node is found, on either side."""
    return item.scope, item.graph, node, item.site.call


def held(item: MatchItem) -> str:
    """The node whose value an item holds; empty where none is known."""
    site = item.site
    if site.level == "node" and site.side == "output":
        return site.name
    if site.level == "buffer" and site.exact and site.nodes:
        return site.nodes[-1]
    return ""


# --- What is left out -----------------------------------------------------------------------------

# What an engine puts in by itself, to move values or to change how they lie in memory.
_MOVERS = {"Cast", "Data", "Identity", "MemcpyAsync", "NetOutput", "Reformat", "TensorMove"} | {
    "TransData",
    "TransDataRNN",
}


def skip_inexact(book: Book, items: list[MatchItem], plain: set[GraphKey] | None = None) -> None:
    """Leave out what holds no value of the graph.

    Args:
        plain: graphs whose nodes the other side has one by one; None where it does not matter.
    """
    traced = {one.graph for one in items if one.site.nodes}
    for item in items:
        site = item.site
        if not item.is_left or site.level != "buffer" or site.exact:
            continue
        if site.kernel:
            book.skip(item, "{n} buffers of fused code hold no value of the graph")
        elif plain is not None and item.graph in plain and item.graph in traced:
            if site.nodes and site.side == "output":
                book.skip(
                    item,
                    "{n} results of operators that are but a part of a node have no counterpart",
                )
            elif not site.nodes and site.op in _MOVERS:
                book.skip(
                    item, "{n} values belong to operators that the engine put in to move values"
                )


def fold_fused(book: Book, side: GraphSide, other: GraphSide) -> None:
    """Leave out what lies inside of the other side's fused code."""
    inside, unseen, done = _find_covered(other)
    known = inside | unseen | done
    for item in side.items:
        if not item.is_left or item.graph not in other.fused:
            continue
        site = item.site
        made = held(item) or site.name
        if site.side == "input":
            if item.is_number:
                book.skip(item, "{n} numbers are written into fused kernels")
                continue
            made = site.nodes[-1] if site.nodes and site.nodes[-1] != site.name else made
        key = node_key(item, made)
        reader = node_key(item, site.name)
        if site.side == "input":
            if key in known or reader in known:
                book.skip(item, "{n} inputs of nodes are compared where they were made or read")
        elif key in inside:
            book.skip(item, "{n} nodes are inside fused kernels; compared at their outputs")
        elif key in unseen:
            book.skip(
                item,
                "{n} nodes are inside fused kernels that write none of their values; compared "
                "further on",
            )


def _find_covered(side: GraphSide) -> tuple[set[NodeKey], set[NodeKey], set[NodeKey]]:
    """Nodes inside of what was compared, of what cannot be, and those that were compared."""
    inside: set[NodeKey] = set()
    unseen: set[NodeKey] = set()
    done: set[NodeKey] = set()
    graphs = {
        (one.scope, one.graph) for one in side.items if one.found and one.site.side == "output"
    }
    for item in side.items:
        site = item.site
        if site.side != "output" and site.level != "buffer":
            continue
        if item.found:
            # What a kernel reads is the value of a node, too, and what was fused to make it.
            done.add(node_key(item, held(item) or site.name))
            inside.update(_list_keys(item))
        elif item.gone and not site.exact and (item.scope, item.graph) in graphs:
            unseen.update(_list_keys(item))
    return inside, unseen, done


def _list_keys(item: MatchItem) -> Iterator[NodeKey]:
    return (node_key(item, node) for node in item.site.nodes)


def skip_rewritten(book: Book) -> None:
    """Leave out what a compiler has put in the place of something else.

    That is so where each of the two graphs has nodes that the other has not. A value that both
    have must follow, in a program that goes on from there; and the other side must have something
    of the same module: else it may be that it was not recorded.
    """
    my, golden = GraphSide(book.my), GraphSide(book.golden)
    if not my.items or not golden.items:
        return
    mine, theirs = _all_nodes(my), _all_nodes(golden)
    rewritten = {key[:2] for key in mine - theirs} & {key[:2] for key in theirs - mine}
    for side, other in ((my, golden), (golden, my)):
        modules = {(one.scope, one.graph, one.site.module) for one in other.items}
        compared: set[object] = set()
        for item in reversed(side.items):
            call = (item.scope, item.graph, item.site.call)
            if item.found and item.site.side == "output":
                compared.add(call)
            elif (
                item.is_left
                and (item.scope, item.graph) in rewritten
                and call in compared
                and (item.scope, item.graph, item.site.module) in modules
            ):
                book.skip(
                    item,
                    "{n} values are of nodes that only one of the two graphs computes; compared at "
                    "the next value that both have",
                )


def _all_nodes(side: GraphSide) -> set[tuple[object, ...]]:
    return {
        (item.scope, item.graph, node)
        for item in side.items
        for node in (item.site.name, *item.site.nodes)
    }


# --- Matching by node -----------------------------------------------------------------------------

# A buffer of fused code says which nodes it stands for, and which one's value it holds. What a
# kernel reads is the value of a node too. So both are held against that node's value on the other
# side, also if that has been matched before: a value may be read many times.

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


def _node_names(items: list[MatchItem]) -> dict[GraphKey, set[str]]:
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


def _reads_again(item: MatchItem) -> bool:
    """Whether an item may be held against a value that has its counterpart already."""
    return item.site.source == "fused"


def _match_places(book: Book, my: GraphSide, golden: GraphSide) -> None:
    """The same place of the same node, in graphs of different names."""
    known = {
        _graph_place(item): item
        for item in golden.items
        if item.is_left and item.site.level == "node"
    }
    for item in my.items:
        if item.is_left and item.site.level == "node":
            other = known.get(_graph_place(item))
            if other is not None and other.is_left:
                book.link(item, other, "node")


def _graph_place(item: MatchItem) -> tuple[object, ...]:
    site = item.site
    tapped = site.source == "fused"
    return item.scope, item.graph, tapped, site.name, site.call, site.side, site.position


def _match_arguments(book: Book, side: GraphSide, other: GraphSide) -> None:
    """What an engine's operator is given, where the graph in words does not tell who made it.

    It is either what the program was given, by name; or it has its place among the tensors that
    the node is given, numbers apart. Of a fused operator that is its first node, if the shapes are
    right.
    """
    calls: dict[NodeKey, tuple[list[MatchItem], list[MatchItem]]] = {}
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


def _in_place(items: list[MatchItem]) -> list[MatchItem]:
    return sorted(items, key=lambda one: natural_key(one.site.position))
