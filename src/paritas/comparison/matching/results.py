"""What modules of eager code give, and what the program is given, found in a captured graph."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from paritas.comparison.matching.book import Book, Item, Scope

    Key = tuple[Scope | None, str, str]

__all__ = ["alike", "match_program_inputs", "match_results", "match_shared"]


def alike(one: Item, other: Item) -> bool:
    """Whether two are tensors of one shape and dtype."""
    first, second = one.record.tensor, other.record.tensor
    return (
        first is not None
        and second is not None
        and (first.shape, first.dtype) == (second.shape, second.dtype)
    )


def match_results(
    book: Book, eager: list[Item], graph: list[Item], named: Callable[[Item], str]
) -> None:
    """Link what a module gives with the node that leaves it.

    That is one whose value is read outside of the module or, for what the program gives, one that
    nothing reads. A module that is called several times is left alone: a graph does not say which
    of its nodes belong to which call. Of fused code, only what the program gives is known to be
    there.
    """
    leaving = _leaving(graph, named)
    often = {
        (one.scope, named(one)) for one in eager if one.site.level == "module" and one.site.call
    }
    for item in eager:
        site = item.site
        is_result = site.level == "module" and site.side == "output" and site.phase == "forward"
        path = named(item)
        if not is_result or not item.is_left or (item.scope, path) in often:
            continue
        read, unread = leaving.get((item.scope, site.phase, path), ((), ()))
        found = [one for one in read if alike(item, one)]
        found = found or [one for one in unread if alike(item, one)]
        if len(found) == 1:
            book.link_either(item, found[0], "module")


def _leaving(
    graph: list[Item], named: Callable[[Item], str]
) -> dict[Key, tuple[list[Item], list[Item]]]:
    """The values of each module that are read outside of it, and those that nothing reads."""
    made: list[Item] = []
    readers: dict[tuple[Scope | None, tuple[str, str], str], set[str]] = defaultdict(set)
    leaving: dict[Key, tuple[list[Item], list[Item]]] = defaultdict(lambda: ([], []))
    given_back: list[Item] = []
    for item in graph:
        site = item.site
        if site.op == "placeholder" or item.scope is None:
            continue
        if site.side == "input":
            if site.level == "node" and site.nodes and site.nodes[-1] != site.name:
                readers[item.scope, item.graph, site.nodes[-1]].add(named(item))
        elif site.level == "node":
            (given_back if site.source == "fused" else made).append(item)
    # Of fused code, what the program gives is recorded apart.
    for item in given_back:
        leaving[item.scope, item.site.phase, ""][1].append(item)
    for item in made if readers else ():
        known = readers.get((item.scope, item.graph, item.site.name), set())
        path = named(item)
        while path:
            if any(one != path and not one.startswith(f"{path}.") for one in known):
                leaving[item.scope, item.site.phase, path][0].append(item)
            elif not known:
                leaving[item.scope, item.site.phase, path][1].append(item)
            path = path.rpartition(".")[0]
        if not known:
            leaving[item.scope, item.site.phase, ""][1].append(item)
    return leaving


def match_program_inputs(book: Book, eager: list[Item], graph: list[Item]) -> None:
    """Link what the outermost module is given with what the graph is given, parameters apart."""
    given: defaultdict[Scope | None, tuple[list[Item], list[Item]]] = defaultdict(lambda: ([], []))
    for item in eager:
        site = item.site
        is_root = site.level == "module" and site.name == site.op and site.phase == "forward"
        if item.is_left and is_root and site.side == "input" and not item.is_number:
            given[item.scope][0].append(item)
    for item in graph:
        site = item.site
        is_given = site.op == "placeholder" and site.phase == "forward"
        # A parameter is called after its path; an argument has a name without dots.
        if item.is_left and is_given and site.module and "." not in site.module:
            given[item.scope][1].append(item)
    for ours, theirs in given.values():
        if [one.shape for one in ours] == [one.shape for one in theirs]:
            for one, other in zip(ours, theirs, strict=True):
                book.link_either(one, other, "module")


# --- the same memory ------------------------------------------------------------------------------

_VIEWS = re.compile(
    r"(?:aten\.)?(?:_?unsafe_)?_?(?:view|reshape|permute|transpose|t|expand|unsqueeze|squeeze|slice"
    r"|select|split|split_with_sizes|chunk|detach|alias|as_strided|unbind|narrow|diagonal|unfold)"
    r"(?:_as|_copy)?(?:\.\w+)?"
)


def match_shared(book: Book, eager: list[Item]) -> None:
    """Give a module's or a parameter's value the counterpart of the operator's that it is.

    They share memory and bytes: it is the same tensor, seen once more. What an operator only
    looks at otherwise is left out, where what it looks at is compared.
    """
    partners = {id(link.golden): link.my for link in book.links}
    partners |= {id(link.my): link.golden for link in book.links}
    same: dict[tuple[object, ...], Item] = {}
    first: dict[tuple[object, ...], Item] = {}
    for item in eager:
        if item.scope is None or item.record.tensor is None or not item.record.digest:
            continue
        if item.found or item.gone:
            first.setdefault(_memory(item), item)
            if item.found or _value(item) not in same:
                same[_value(item)] = item
    for item in eager:
        other = same.get(_value(item)) if item.is_left and item.record.tensor is not None else None
        if other is not None and other.found:
            book.link_either(item, partners[id(other)], "module")
        elif other is not None:
            book.skip(item, "{n} values are seen once more as others that are compared elsewhere")
        elif item.is_left and _VIEWS.fullmatch(item.site.op) and _memory(item) in first:
            book.skip(item, "{n} views are of values that are compared by themselves")


def _memory(item: Item) -> tuple[object, ...]:
    record = item.record
    root = record.sequence if record.alias_of is None else record.alias_of
    return item.scope, record.rank, root


def _value(item: Item) -> tuple[object, ...]:
    return *_memory(item), item.record.digest, item.shape
