"""Values that bear the same name, or would but for a rule or for what the names begin with."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from paritas.comparison.matching.book import Book, Item
    from paritas.comparison.matching.renaming import Renaming
    from paritas.dumps.records import Site

__all__ = ["match_ids", "match_prefixed", "match_renamed", "module_prefix"]

_NAMED_LEVELS = ("module", "op", "parameter", "tensor")
# Parts of a path that stand for the module they wrap.
_WRAPPERS = re.compile(
    r"(?:^|(?<=[./]))(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\."
)
_BOUNDARY = re.compile(r"[./]")
_MOST_CUTS = 4
_MOST_NAMES = 50_000


# --- canonical names ------------------------------------------------------------------------------


def match_ids(book: Book) -> None:
    """Link what has the same canonical name and stands for the same value."""
    known: dict[tuple[object, ...], Item] = {}
    for item in book.left(mine=False):
        known.setdefault((item.scope, item.record.id), item)
    my_code, golden_code = _code(book.my), _code(book.golden)
    same_code = {key for key, code in my_code.items() if golden_code.get(key) == code}
    for item in book.left(mine=True):
        other = known.get((item.scope, item.record.id))
        if other is None or other.found:
            continue
        if (item.scope, item.graph) in same_code or _same_value(item, other):
            book.link(item, other, "id")


def _code(items: list[Item]) -> dict[tuple[object, ...], set[tuple[object, ...]]]:
    """Of each graph, the fused code that was seen: two that are equal are the same program."""
    code: dict[tuple[object, ...], set[tuple[object, ...]]] = {}
    for item in items:
        site = item.site
        if site.level == "buffer":
            found = code.setdefault((item.scope, item.graph), set())
            found.add((item.record.id, site.kernel, site.nodes, item.shape))
    return code


def _same_value(one: Item, other: Item) -> bool:
    """Whether the same name means the same value: in fused code it may not."""
    first, second = one.site, other.site
    if first.level != "buffer" and second.level != "buffer":
        return True
    if first.level == second.level:
        if not first.kernel and not second.kernel:
            # Of engines that name operators by themselves.
            unknown = not first.nodes or not second.nodes
            return unknown or first.nodes[-1] == second.nodes[-1]
        return first.exact and second.exact and first.nodes[-1:] == second.nodes[-1:]
    buffer, node = (first, second) if first.level == "buffer" else (second, first)
    return (
        node.level == "node"
        and node.side == "output"
        and buffer.exact
        and buffer.nodes[-1:] == (node.name,)
    )


# --- rules ----------------------------------------------------------------------------------------


def match_renamed(book: Book, renamings: Iterable[Renaming]) -> None:
    """Link what the user's rules give the name of; a rule that gives none is noted."""
    renamings = list(renamings)
    if not renamings:
        return
    known: dict[tuple[object, ...], Item] = {}
    for item in book.left(mine=False):
        known.setdefault((item.scope, item.record.id), item)
        known.setdefault((item.scope, *_place(item.site), item.site.name), item)
    for renaming in renamings:
        if renaming.concat:
            found, linked = _join(book, renaming, known)
        else:
            found, linked = _rename(book, renaming, known)
        told = f"rename {renaming.my!r} to {renaming.golden!r}"
        if not found:
            book.notes.append(f"{told} found none of my names")
        elif not linked:
            book.notes.append(f"{told} found {found} of my names, and gave no golden name")


def _place(site: Site) -> tuple[object, ...]:
    return site.phase, site.call, site.side, site.position


def _golden(
    known: dict[tuple[object, ...], Item], item: Item, pattern: re.Pattern[str], new: str
) -> tuple[bool, Item | None]:
    """Whether a rule speaks of an item, and the golden one that it means."""
    name, whole = item.site.name, item.record.id
    if pattern.search(name):
        other = known.get((item.scope, *_place(item.site), pattern.sub(new, name, count=1)))
        return True, other
    if pattern.search(whole):
        return True, known.get((item.scope, pattern.sub(new, whole, count=1)))
    return False, None


def _rename(
    book: Book, renaming: Renaming, known: dict[tuple[object, ...], Item]
) -> tuple[int, int]:
    (pattern,) = renaming.patterns()
    found = linked = 0
    for item in list(book.left(mine=True)):
        if item.is_number and (renaming.split or renaming.permute):
            continue
        for part, new in enumerate(renaming.replacements()):
            speaks, other = _golden(known, item, pattern, new)
            if not speaks:
                break
            found += part == 0
            if other is not None and not other.found:
                book.link(item, other, "rename", renaming.operand([item.operand], part))
                linked += 1
    return found, linked


def _join(book: Book, renaming: Renaming, known: dict[tuple[object, ...], Item]) -> tuple[int, int]:
    groups: dict[int, dict[int, Item]] = {}
    targets: dict[int, Item] = {}
    found = linked = 0
    for item in list(book.left(mine=True)):
        for part, pattern in enumerate(renaming.patterns()):
            speaks, other = _golden(known, item, pattern, renaming.golden)
            found += speaks
            if other is not None and not other.found and not item.is_number:
                groups.setdefault(id(other), {}).setdefault(part, item)
                targets[id(other)] = other
    for key, parts in groups.items():
        other = targets[key]
        if len(parts) < len(renaming.concat):
            missing = [name for at, name in enumerate(renaming.concat) if at not in parts]
            book.notes.append(
                f"rename {renaming.my!r}: of what is joined to {other.record.id}, "
                f"{', '.join(missing)} is missing"
            )
            continue
        items = [parts[at] for at in range(len(renaming.concat))]
        book.link(items[0], other, "rename", renaming.operand([one.operand for one in items]))
        for one in items:
            one.found = True
        linked += 1
    return found, linked


# --- what names begin with ------------------------------------------------------------------------


def module_prefix(mine: Collection[str], golden: Collection[str]) -> tuple[str, str]:
    """What the names of mine begin with that golden ones do not, and the other way round.

    Found by majority: as many names as on the shorter side's half must be the same without it.
    """
    first, second = set(list(mine)[:_MOST_NAMES]), set(list(golden)[:_MOST_NAMES])
    if not first or not second:
        return "", ""
    votes: Counter[tuple[str, str]] = Counter()
    votes["", ""] = len(first & second)
    for name in first:
        for cut in _cuts(name):
            votes[name[:cut], ""] += name[cut:] in second
    for name in second:
        for cut in _cuts(name):
            votes["", name[:cut]] += name[cut:] in first
    (prefix, count) = max(votes.items(), key=lambda found: (found[1], -len("".join(found[0]))))
    return prefix if count * 2 >= min(len(first), len(second)) else ("", "")


def _cuts(name: str) -> Iterator[int]:
    for number, boundary in enumerate(_BOUNDARY.finditer(name)):
        if number == _MOST_CUTS:
            return
        if boundary.end() < len(name):
            yield boundary.end()


def unwrapped(name: str) -> str:
    """A path without the parts that only wrap a module."""
    return _WRAPPERS.sub("", name)


def match_prefixed(book: Book) -> None:
    """Link what has the same name, but for what all names of one side begin with."""
    sides = []
    for mine in (True, False):
        items = [one for one in book.left(mine=mine) if one.site.level in _NAMED_LEVELS]
        sides.append([(one, unwrapped(one.site.name)) for one in items])
    my, golden = sides
    if not my or not golden:
        return
    roots = [_root(book, mine=mine) for mine in (True, False)]
    if all(roots) and roots[0] != roots[1]:
        my = [(one, _moved(name, roots[0], roots[1])) for one, name in my]
    else:
        roots = ["", ""]
    # Once for each: what is called often has no more to say than the rest.
    prefix, other_prefix = module_prefix(
        dict.fromkeys(name for _, name in my), dict.fromkeys(name for _, name in golden)
    )
    known: dict[tuple[object, ...], Item] = {}
    for item, name in golden:
        known.setdefault(_key(item, name.removeprefix(other_prefix)), item)
    linked = 0
    for item, name in my:
        other = known.get(_key(item, name.removeprefix(prefix)))
        if other is not None and not other.found:
            book.link(item, other, "module")
            linked += 1
    if linked and (prefix or other_prefix):
        whose, text = ("my", prefix) if prefix else ("golden", other_prefix)
        book.notes.append(f"{whose} names begin with {text!r}, which was left out to match them")
    if linked and all(roots):
        book.notes.append(f"my {roots[0]} was taken for the golden {roots[1]}")


def _key(item: Item, name: str) -> tuple[object, ...]:
    return item.scope, item.site.level, *_place(item.site), name


def _root(book: Book, *, mine: bool) -> str:
    """The outermost module, which goes by its class, where there is but one."""
    items = book.my if mine else book.golden
    found = {
        one.site.name
        for one in items
        if one.site.level == "module" and one.site.name == one.site.op
    }
    return found.pop() if len(found) == 1 else ""


def _moved(name: str, old: str, new: str) -> str:
    return new + name[len(old) :] if name == old or name.startswith(f"{old}/") else name
