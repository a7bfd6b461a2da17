"""The last resort: values that come in the same order and have the same shape."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import TYPE_CHECKING

from paritas.comparison.matching.sequences import align

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable

    from paritas.comparison.matching.book import Book, Item

__all__ = ["match_order"]

_ATEN = re.compile(r"(?:aten|prims)\.")


def match_order(book: Book) -> None:
    """Link what is left by operator, shape and dtype, in order; then by less.

    Shapes must be equal, and so must operators, unless the two sides have other words for them.
    """
    strange = _speak_otherwise(book)
    groups: defaultdict[tuple[object, ...], tuple[list[Item], list[Item]]] = defaultdict(
        lambda: ([], [])
    )
    for mine in (True, False):
        for item in book.left(mine=mine):
            site = item.site
            if item.shape is not None:
                group = (item.scope, site.phase, site.side, _class(item, strange=strange))
                groups[group][not mine].append(item)
    if not any(my and golden for my, golden in groups.values()):
        return
    before = len(book.links)
    keys: list[Callable[[Item], Hashable]] = [
        lambda item: (_operator(item), item.shape, _dtype(item)),
        lambda item: (_operator(item), item.shape),
    ]
    if strange:
        keys += [lambda item: (item.shape, _dtype(item)), lambda item: item.shape]
    for my, golden in groups.values():
        for key in keys:
            ours = [one for one in my if one.is_left]
            theirs = [one for one in golden if one.is_left]
            if not ours or not theirs:
                break
            for at, there in align([key(one) for one in ours], [key(one) for one in theirs]):
                book.link(ours[at], theirs[there], "order")
    guessed = len(book.links) - before
    if guessed:
        book.notes.append(
            f"{guessed} pairs have nothing in common but order and shape: their names say nothing "
            f"of one another, so look at these rows with care"
        )


def _class(item: Item, *, strange: bool) -> str:
    """What may belong together: what a kernel of fused code reads is in no order of operators."""
    site = item.site
    if site.level == "buffer" and site.kernel:
        return "kernel"
    if site.level not in ("op", "node", "buffer"):
        return site.level
    # Of the same words, eager code and a graph have as many as they need, each for itself.
    return "operator" if strange or site.level != "op" else "operator of eager code"


def _dtype(item: Item) -> str:
    return "" if item.record.tensor is None else item.record.tensor.dtype


def _operator(item: Item) -> str:
    """`aten.add.Tensor`, `Add` and `add` are one."""
    parts = item.site.op.split(".")
    name = parts[1] if len(parts) > 2 else parts[-1]  # noqa: PLR2004  (namespace and overload)
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _speak_otherwise(book: Book) -> bool:
    """Whether the operators of the two sides have names of different kinds, or none."""
    mine, theirs = (_languages(side) for side in (book.my, book.golden))
    return not mine & theirs


def _languages(items: Iterable[Item]) -> set[str]:
    found: set[str] = set()
    for item in items:
        if item.site.op:
            found.add("aten" if _ATEN.match(item.site.op) else item.site.level)
    return found
