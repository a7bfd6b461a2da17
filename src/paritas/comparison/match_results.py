"""What modules of eager code give, and what the program is given, found in a captured graph."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from paritas.comparison.match_values import held

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from paritas.comparison.match_book import Book, Item, Scope

    Key = tuple[Scope | None, str, str]

__all__ = ["alike", "match_program_inputs", "match_results"]


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
        found = [one for one in leaving.get((item.scope, site.phase, path), ()) if alike(item, one)]
        if len(found) == 1 and found[0].scope is not None:
            book.link_either(item, found[0], "module")


def _leaving(graph: list[Item], named: Callable[[Item], str]) -> dict[Key, list[Item]]:
    """The values that leave each module."""
    made: dict[tuple[Scope | None, tuple[str, str], str], list[Item]] = defaultdict(list)
    readers: dict[tuple[Scope | None, tuple[str, str], str], set[str]] = defaultdict(set)
    taps: dict[Key, list[Item]] = defaultdict(list)
    for item in graph:
        site = item.site
        if site.op == "placeholder":
            continue
        if site.side == "input":
            if site.level == "node" and site.nodes and site.nodes[-1] != site.name:
                readers[item.scope, item.graph, site.nodes[-1]].add(named(item))
        elif site.source == "fused" and site.level == "node":
            taps[item.scope, site.phase, ""].append(item)
        elif site.level == "node" and held(item):
            made[item.scope, item.graph, site.name].append(item)
    if not readers:
        # Who reads what is not known; of fused code, what the program gives is recorded apart.
        return taps
    leaving: dict[Key, list[Item]] = defaultdict(list)
    for key, items in made.items():
        for item in items:
            for path in _modules_left(named(item), readers.get(key, set())):
                leaving[item.scope, item.site.phase, path].append(item)
    return leaving


def _modules_left(path: str, readers: set[str]) -> Iterator[str]:
    """The modules, from a value's own outwards, that it is read outside of."""
    while path:
        inside = f"{path}."
        if not readers or any(one != path and not one.startswith(inside) for one in readers):
            yield path
        path = path.rpartition(".")[0]
    if not readers:
        yield ""


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
