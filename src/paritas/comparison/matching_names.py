"""Matching by name, and, as the last resort, by order and shape."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter, defaultdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence

    from paritas.comparison.operands import Book, MatchItem
    from paritas.comparison.rules import Renaming
    from paritas.files.records import Site


# --- Names ----------------------------------------------------------------------------------------

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
    known: dict[tuple[object, ...], MatchItem] = {}
    for item in book.left(mine=False):
        known.setdefault((item.scope, item.record.id), item)
    my_code, golden_code = _collect_code(book.my), _collect_code(book.golden)
    same_code = {key for key, code in my_code.items() if golden_code.get(key) == code}
    for item in book.left(mine=True):
        other = known.get((item.scope, item.record.id))
        if other is None or other.found:
            continue
        if (item.scope, item.graph) in same_code or _same_value(item, other):
            book.link(item, other, "id")


def _collect_code(items: list[MatchItem]) -> dict[tuple[object, ...], set[tuple[object, ...]]]:
    """Of each graph, the fused code that was seen: two that are equal are the same program."""
    code: dict[tuple[object, ...], set[tuple[object, ...]]] = {}
    for item in items:
        site = item.site
        if site.level == "buffer":
            found = code.setdefault((item.scope, item.graph), set())
            found.add((item.record.id, site.kernel, site.nodes, item.shape))
    return code


def _same_value(one: MatchItem, other: MatchItem) -> bool:
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
    known: dict[tuple[object, ...], MatchItem] = {}
    for item in book.left(mine=False):
        known.setdefault((item.scope, item.record.id), item)
        known.setdefault((item.scope, *_call_place(item.site), item.site.name), item)
    for renaming in renamings:
        if renaming.concat:
            found, linked = _match_joining(book, renaming, known)
        else:
            found, linked = _match_renaming(book, renaming, known)
        told = f"rename {renaming.my!r} to {renaming.golden!r}"
        if not found:
            book.notes.append(f"{told} found none of my names")
        elif not linked:
            book.notes.append(f"{told} found {found} of my names, and gave no golden name")


def _call_place(site: Site) -> tuple[object, ...]:
    return site.phase, site.call, site.side, site.position


def _find_golden(
    known: dict[tuple[object, ...], MatchItem], item: MatchItem, pattern: re.Pattern[str], new: str
) -> tuple[bool, MatchItem | None]:
    """Whether a rule speaks of an item, and the golden one that it means."""
    name, whole = item.site.name, item.record.id
    if pattern.search(name):
        other = known.get((item.scope, *_call_place(item.site), pattern.sub(new, name, count=1)))
        return True, other
    if pattern.search(whole):
        return True, known.get((item.scope, pattern.sub(new, whole, count=1)))
    return False, None


def _match_renaming(
    book: Book, renaming: Renaming, known: dict[tuple[object, ...], MatchItem]
) -> tuple[int, int]:
    (pattern,) = renaming.patterns()
    found = linked = 0
    for item in list(book.left(mine=True)):
        if item.is_number and (renaming.split or renaming.permute):
            continue
        for part, new in enumerate(renaming.replacements()):
            speaks, other = _find_golden(known, item, pattern, new)
            if not speaks:
                break
            found += part == 0
            if other is not None and not other.found:
                book.link(item, other, "rename", renaming.operand([item.operand], part))
                linked += 1
    return found, linked


def _match_joining(
    book: Book, renaming: Renaming, known: dict[tuple[object, ...], MatchItem]
) -> tuple[int, int]:
    groups: dict[int, dict[int, MatchItem]] = {}
    targets: dict[int, MatchItem] = {}
    found = linked = 0
    for item in list(book.left(mine=True)):
        for part, pattern in enumerate(renaming.patterns()):
            speaks, other = _find_golden(known, item, pattern, renaming.golden)
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
        for cut in _find_cuts(name):
            votes[name[:cut], ""] += name[cut:] in second
    for name in second:
        for cut in _find_cuts(name):
            votes["", name[:cut]] += name[cut:] in first
    (prefix, count) = max(votes.items(), key=lambda found: (found[1], -len("".join(found[0]))))
    return prefix if count * 2 >= min(len(first), len(second)) else ("", "")


def _find_cuts(name: str) -> Iterator[int]:
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
    roots = [_find_root(book, mine=mine) for mine in (True, False)]
    if all(roots) and roots[0] != roots[1]:
        my = [(one, _move_name(name, roots[0], roots[1])) for one, name in my]
    else:
        roots = ["", ""]
    # Once for each: what is called often has no more to say than the rest.
    prefix, other_prefix = module_prefix(
        dict.fromkeys(name for _, name in my), dict.fromkeys(name for _, name in golden)
    )
    known: dict[tuple[object, ...], MatchItem] = {}
    for item, name in golden:
        known.setdefault(_name_key(item, name.removeprefix(other_prefix)), item)
    linked = 0
    for item, name in my:
        other = known.get(_name_key(item, name.removeprefix(prefix)))
        if other is not None and not other.found:
            book.link(item, other, "module")
            linked += 1
    if linked and (prefix or other_prefix):
        whose, text = ("my", prefix) if prefix else ("golden", other_prefix)
        book.notes.append(f"{whose} names begin with {text!r}, which was left out to match them")
    if linked and all(roots):
        book.notes.append(f"my {roots[0]} was taken for the golden {roots[1]}")


def _name_key(item: MatchItem, name: str) -> tuple[object, ...]:
    return item.scope, item.site.level, *_call_place(item.site), name


def _find_root(book: Book, *, mine: bool) -> str:
    """The outermost module, which goes by its class, where there is but one."""
    items = book.my if mine else book.golden
    found = {
        one.site.name
        for one in items
        if one.site.level == "module" and one.site.name == one.site.op
    }
    return found.pop() if len(found) == 1 else ""


def _move_name(name: str, old: str, new: str) -> str:
    return new + name[len(old) :] if name == old or name.startswith(f"{old}/") else name


# --- Two sequences, aligned -----------------------------------------------------------------------

# The table of the exact method has as many cells as the two lengths multiply to.
_MOST_CELLS = 250_000
_PIECE = 96


def align(first: Sequence[Hashable], second: Sequence[Hashable]) -> list[tuple[int, int]]:
    """Pairs of places with equal members, ascending on both sides.

    What both begin and end with is taken first, then what each has once; between those, as many as
    can be had. Only where long stretches have nothing that is there once, it is as many as can be
    had piece by piece, so that time does not grow with the square of the length.
    """
    found: list[tuple[int, int]] = []
    waiting = [(0, len(first), 0, len(second))]
    while waiting:
        begin, end, other, last = waiting.pop()
        while begin < end and other < last and first[begin] == second[other]:
            found.append((begin, other))
            begin, other = begin + 1, other + 1
        while begin < end and other < last and first[end - 1] == second[last - 1]:
            end, last = end - 1, last - 1
            found.append((end, last))
        if begin == end or other == last:
            continue
        if (end - begin) * (last - other) <= _MOST_CELLS:
            found += _align_exactly(first, second, (begin, end, other, last))
            continue
        anchors = _find_anchors(first, second, (begin, end, other, last))
        if not anchors:
            found += _align_piecewise(first, second, (begin, end, other, last))
        for at, there in anchors:
            found.append((at, there))
            waiting.append((begin, at, other, there))
            begin, other = at + 1, there + 1
        if anchors:
            waiting.append((begin, end, other, last))
    return sorted(found)


Stretch = tuple[int, int, int, int]


def _align_exactly(
    first: Sequence[Hashable], second: Sequence[Hashable], where: Stretch
) -> list[tuple[int, int]]:
    """The longest common subsequence."""
    begin, end, other, last = where
    width = last - other
    table = [[0] * (width + 1)]
    for at in range(end - 1, begin - 1, -1):
        below, row, member = table[-1], [0] * (width + 1), first[at]
        for there in range(width - 1, -1, -1):
            if member == second[other + there]:
                row[there] = below[there + 1] + 1
            else:
                row[there] = max(below[there], row[there + 1])
        table.append(row)
    table.reverse()
    found = []
    at, there = 0, 0
    while at < end - begin and there < width:
        if first[begin + at] == second[other + there]:
            found.append((begin + at, other + there))
            at, there = at + 1, there + 1
        elif table[at + 1][there] >= table[at][there + 1]:
            at += 1
        else:
            there += 1
    return found


def _find_anchors(
    first: Sequence[Hashable], second: Sequence[Hashable], where: Stretch
) -> list[tuple[int, int]]:
    """What both have once, as far as it is in the same order."""
    begin, end, other, last = where
    places = _find_unique(first, begin, end)
    there = _find_unique(second, other, last)
    pairs = [(at, there[member]) for member, at in places.items() if member in there]
    # The longest ascending run; `pairs` ascend on the first side already.
    tails: list[int] = []
    ends: list[int] = []
    before: list[int] = []
    for index, (_, place) in enumerate(pairs):
        at = bisect_left(tails, place)
        before.append(ends[at - 1] if at else -1)
        if at == len(tails):
            tails.append(place)
            ends.append(index)
        else:
            tails[at], ends[at] = place, index
    run: list[tuple[int, int]] = []
    index = ends[-1] if ends else -1
    while index >= 0:
        run.append(pairs[index])
        index = before[index]
    return run[::-1]


def _find_unique(members: Sequence[Hashable], begin: int, end: int) -> dict[Hashable, int]:
    places: dict[Hashable, int] = {}
    often: set[Hashable] = set()
    for at in range(begin, end):
        if members[at] in places:
            often.add(members[at])
        places[members[at]] = at
    return {member: at for member, at in places.items() if member not in often}


def _align_piecewise(
    first: Sequence[Hashable], second: Sequence[Hashable], where: Stretch
) -> list[tuple[int, int]]:
    """The longest common subsequence of one piece after the other.

    Of each piece only the first half counts: what its end is like depends on what follows.
    """
    begin, end, other, last = where
    found: list[tuple[int, int]] = []
    while begin < end and other < last:
        piece = (begin, min(end, begin + _PIECE), other, min(last, other + _PIECE))
        pairs = _align_exactly(first, second, piece)
        is_last = piece[1] == end and piece[3] == last
        kept = pairs if is_last else [one for one in pairs if one[0] < begin + _PIECE // 2]
        found += kept
        if is_last:
            break
        if kept:
            begin, other = kept[-1][0] + 1, kept[-1][1] + 1
        else:
            begin, other = begin + _PIECE // 2, other + _PIECE // 2
    return found


# --- Order and shape ------------------------------------------------------------------------------

_ATEN = re.compile(r"(?:aten|prims)\.")


def match_order(book: Book) -> None:
    """Link what is left by operator, shape and dtype, in order; then by less.

    Shapes must be equal, and so must operators, unless the two sides have other words for them.
    """
    strange = _speak_otherwise(book)
    groups: defaultdict[tuple[object, ...], tuple[list[MatchItem], list[MatchItem]]] = defaultdict(
        lambda: ([], [])
    )
    for mine in (True, False):
        for item in book.left(mine=mine):
            site = item.site
            if item.shape is not None:
                group = (item.scope, site.phase, site.side, _order_class(item, strange=strange))
                groups[group][not mine].append(item)
    if not any(my and golden for my, golden in groups.values()):
        return
    before = len(book.links)
    keys: list[Callable[[MatchItem], Hashable]] = [
        lambda item: (_plain_operator(item), item.shape, _item_dtype(item)),
        lambda item: (_plain_operator(item), item.shape),
    ]
    if strange:
        keys += [lambda item: (item.shape, _item_dtype(item)), lambda item: item.shape]
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


def _order_class(item: MatchItem, *, strange: bool) -> str:
    """What may belong together: what a kernel of fused code reads is in no order of operators."""
    site = item.site
    if site.level == "buffer" and site.kernel:
        return "kernel"
    if site.level not in ("op", "node", "buffer"):
        return site.level
    # Of the same words, eager code and a graph have as many as they need, each for itself.
    return "operator" if strange or site.level != "op" else "operator of eager code"


def _item_dtype(item: MatchItem) -> str:
    return "" if item.record.tensor is None else item.record.tensor.dtype


def _plain_operator(item: MatchItem) -> str:
    """`aten.add.Tensor`, `Add` and `add` are one."""
    parts = item.site.op.split(".")
    name = parts[1] if len(parts) > 2 else parts[-1]  # noqa: PLR2004  (namespace and overload)
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _speak_otherwise(book: Book) -> bool:
    """Whether the operators of the two sides have names of different kinds, or none."""
    mine, theirs = (_list_languages(side) for side in (book.my, book.golden))
    return not mine & theirs


def _list_languages(items: Iterable[MatchItem]) -> set[str]:
    found: set[str] = set()
    for item in items:
        if item.site.op:
            found.add("aten" if _ATEN.match(item.site.op) else item.site.level)
    return found
