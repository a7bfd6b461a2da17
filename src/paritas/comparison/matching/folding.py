"""What is left out of a comparison of graphs, because it is compared elsewhere or is no value."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paritas.comparison.matching.values import GraphSide, held, node_key

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paritas.comparison.matching.book import Book, GraphKey, Item
    from paritas.comparison.matching.values import NodeKey

__all__ = ["fold_fused", "skip_inexact", "skip_rewritten"]

# What an engine puts in by itself, to move values or to change how they lie in memory.
_MOVERS = {"Cast", "Data", "Identity", "MemcpyAsync", "NetOutput", "Reformat", "TensorMove"} | {
    "TransData",
    "TransDataRNN",
}


def skip_inexact(book: Book, items: list[Item], plain: set[GraphKey] | None = None) -> None:
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
    inside, unseen, done = _covered(other)
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


def _covered(side: GraphSide) -> tuple[set[NodeKey], set[NodeKey], set[NodeKey]]:
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
            inside.update(_keys(item))
        elif item.gone and not site.exact and (item.scope, item.graph) in graphs:
            unseen.update(_keys(item))
    return inside, unseen, done


def _keys(item: Item) -> Iterator[NodeKey]:
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
