"""Match calls whose names are unrelated: by their weights and values, then by order between those.

A match by order is a guess. It is made only where it is unambiguous: between two calls that match
otherwise, both sides have as many calls of that kind and of those shapes.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter, defaultdict
from typing import TYPE_CHECKING

from paritas.comparison.matching import increasing
from paritas.core.results.wording import count_things, list_first

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence

    from paritas.comparison.operands import MatchItem, OperandLinks
    from paritas.comparison.rows import MatchedBy

_ATEN = re.compile(r"(?:aten|prims)\.")
_COMPOSITE = "composite"
_MODULES = ("module",)
_INSIDE = ("op", "node", "buffer", "parameter", "tensor")


def match_order(operand_links: OperandLinks) -> None:
    """Link calls with unrelated names; note how many, and propose rules for their names."""
    my_calls, golden = _collect_calls(operand_links)
    if not my_calls or not golden:
        return
    _match_values(operand_links, my_calls, golden)
    _match_makers(operand_links, my_calls, golden)
    before = len(operand_links.links)
    _match_between(operand_links, *(_select(calls, _MODULES) for calls in (my_calls, golden)))
    _confine_operators(operand_links, my_calls, golden)
    _match_between(operand_links, *(_select(calls, _INSIDE) for calls in (my_calls, golden)))
    guessed = len(operand_links.links) - before
    if guessed:
        operand_links.notes.append(
            f"{count_things(guessed, 'pair')} matched by order and shape only, because the names "
            f"are unrelated: check these rows with care"
        )
    renames = propose_renames(
        (link.my.site.name, link.golden.site.name)
        for link in operand_links.links
        if link.by in ("order", "value") and link.my.site.level == "module"
    )
    if renames:
        rules = list_first((f"--rename '{old}={new}'" for old, new in renames), 12, between=" ")
        operand_links.notes.append(f"rules for names that seem to belong together: {rules}")


# --- Calls ----------------------------------------------------------------------------------------


class _Call:
    """The values of one call that still need a counterpart.

    Attributes:
        stretch: only calls of the same stretch of the program can match.
        kind: only calls of the same kind can match.
        items: by side and position.
        at: where it begins, on its own side.
    """

    __slots__ = ("at", "items", "kind", "shapes", "stretch")

    def __init__(self, stretch: Hashable, kind: Hashable, at: int) -> None:
        self.stretch = stretch
        self.kind = kind
        self.at = at
        self.items: dict[tuple[str, str], MatchItem] = {}
        self.shapes: Hashable = ()

    @property
    def is_left(self) -> bool:
        return all(item.is_left for item in self.items.values())

    @property
    def level(self) -> str:
        return next(iter(self.items.values())).site.level


def _collect_calls(operand_links: OperandLinks) -> tuple[list[_Call], list[_Call]]:
    """The calls of both sides with values that are left, in program order."""
    strange = _naming_schemes(operand_links.my).isdisjoint(_naming_schemes(operand_links.golden))
    classes = _same_classes(_leaf_classes(operand_links.my), _leaf_classes(operand_links.golden))
    sides = [
        {side_item.site.side for side_item in items}
        for items in (operand_links.my, operand_links.golden)
    ]
    both = sides[0] & sides[1]
    callss: list[list[_Call]] = []
    for is_mine in (True, False):
        composite = _composite_modules(operand_links.my if is_mine else operand_links.golden)
        calls: dict[Hashable, _Call] = {}
        for item in operand_links.remaining_items(mine=is_mine):
            site = item.site
            kind = _order_class(item, strange=strange)
            if site.level == "module":
                is_composite = (item.scope, site.name) in composite
                operator_class = _COMPOSITE if is_composite else classes.get(site.op, site.op)
                key: Hashable = (item.scope, site.phase, "module", site.name, site.call)
            else:
                operator_class = "" if strange else plain_operator(item)
                # Tools with other names for operators also record other arguments.
                side_position = (site.side, site.position) if strange or site.level != "op" else ()
                key = (item.scope, item.graph, site.level, site.name, site.call, side_position)
                operator_class = (
                    f"{operator_class} {site.side}" if side_position else operator_class
                )
            call = calls.get(key)
            if call is None:
                call = calls[key] = _Call((item.scope, site.phase), (kind, operator_class), item.at)
            call.items[site.side, site.position] = item
        for call in calls.values():
            call.shapes = tuple(
                sorted(
                    (*item_position, item.shape)
                    for item_position, item in call.items.items()
                    if item.shape is not None and item_position[0] in both
                )
            )
        callss.append([call for call in calls.values() if call.shapes])
    return callss[0], callss[1]


def _order_class(item: MatchItem, *, strange: bool) -> str:
    """Only items of the same class are matched by order."""
    site = item.site
    if site.level == "buffer" and site.kernel:
        return "kernel"
    if site.level not in ("op", "node", "buffer"):
        return site.level
    # With the same operator names, eager code and graphs still differ in the number of operators.
    return "operator" if strange or site.level != "op" else "operator of eager code"


def plain_operator(item: MatchItem) -> str:
    """The same for `aten.add.Tensor`, `Add` and `add`."""
    parts = item.site.op.split(".")
    name = parts[1] if len(parts) > 2 else parts[-1]  # noqa: PLR2004  (namespace and overload)
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _naming_schemes(items: Iterable[MatchItem]) -> set[str]:
    """How the operators of one side are named."""
    named = (item.site for item in items if item.site.op)
    return {"aten" if _ATEN.match(site.op) else site.level for site in named}


def _composite_modules(items: Iterable[MatchItem]) -> set[Hashable]:
    """The modules that contain other modules. Two programs rarely give them the same class."""
    names = {(item.scope, item.site.name) for item in items if item.site.level == "module"}
    inside = {(scope, name.rpartition(".")[0]) for scope, name in names}
    roots = {
        (item.scope, item.site.name)
        for item in items
        if item.site.level == "module" and item.site.name == item.site.op
    }
    return inside | roots


def _leaf_classes(items: Sequence[MatchItem]) -> set[str]:
    composite = _composite_modules(items)
    return {
        item.site.op
        for item in items
        if item.site.level == "module" and (item.scope, item.site.name) not in composite
    }


def _same_classes(my_classes: set[str], golden: set[str]) -> dict[str, str]:
    """The golden class for each of my classes that means the same: `LlamaRMSNorm` for `RMSNorm`."""
    class_mapping = {}
    rest = golden - my_classes
    for name in my_classes - golden:
        alike = [
            golden_name
            for golden_name in rest
            if golden_name.endswith(name) or (golden_name and name.endswith(golden_name))
        ]
        if name and len(alike) == 1:
            class_mapping[name] = alike[0]
    return class_mapping


# --- Weights and values ---------------------------------------------------------------------------


def _match_values(operand_links: OperandLinks, calls: list[_Call], golden: list[_Call]) -> None:
    """Link calls of one kind that share a weight, or all results, with no other call."""
    index_values = _index_values(golden)
    for key, call in _index_values(calls).items():
        other = index_values.get(key)
        if call is not None and other is not None and call.is_left and other.is_left:
            _link_calls(operand_links, call, other, "value")


def _index_values(calls: list[_Call]) -> dict[Hashable, _Call | None]:
    """Calls by what identifies them; None if several have it in common."""
    calls_by_identity: dict[Hashable, _Call | None] = {}
    for call in calls:
        for key in _identify_call(call):
            calls_by_identity[key] = None if key in calls_by_identity else call
    return calls_by_identity


def _identify_call(call: _Call) -> Iterator[Hashable]:
    where = (call.stretch, call.kind, call.shapes)
    results = []
    for (side, position), item in sorted(call.items.items()):
        if item.shape is None:
            continue
        content = (position, item.record.digest, item.dtype)
        if side == "input":
            if item.record.digest:
                yield *where, content
        else:
            results.append(content)
    if results and all(digest for _, digest, _ in results):
        yield *where, tuple(results)


def _match_makers(operand_links: OperandLinks, calls: list[_Call], golden: list[_Call]) -> None:
    """Link the calls that made what linked calls of operators read, and so on upstream.

    Two calls that belong together read what the same calls made. A port may exchange the operands
    of a sum, so each of their inputs must have been made by a call of another kind.
    """
    made_mine, made_golden = _index_made(calls), _index_made(golden)
    callers = {id(item): call for call in (*calls, *golden) for item in call.items.values()}
    waiting = [
        (callers[id(link.my)], callers[id(link.golden)])
        for link in operand_links.links
        if link.by == "value" and link.my.site.level == link.golden.site.level == "op"
    ]
    while waiting:
        call, other = waiting.pop()
        ours, golden_makers = _find_makers(call, made_mine), _find_makers(other, made_golden)
        for kind in ours.keys() & golden_makers.keys():
            maker, partner = ours[kind], golden_makers[kind]
            if maker is None or partner is None or not (maker.is_left and partner.is_left):
                continue
            before = _find_makers(maker, made_mine)
            tensors = sum(
                side == "input"
                for (side, _), maker_item in maker.items.items()
                if maker_item.shape is not None
            )
            are_told_apart = len(before) == tensors and None not in before.values()
            are_ordered = are_told_apart and list(before) == list(
                _find_makers(partner, made_golden)
            )
            if tensors == 1 or are_ordered:
                _link_calls(operand_links, maker, partner, "value")
                waiting.append((maker, partner))


def _index_made(calls: list[_Call]) -> dict[Hashable, _Call]:
    """The call of an operator that made each value."""
    maker_by_value: dict[Hashable, _Call] = {}
    for call in calls:
        for (side, _), item in call.items.items():
            if call.level == "op" and side == "output" and item.record.digest:
                maker_by_value.setdefault(item.stored_value, call)
    return maker_by_value


def _find_makers(
    call: _Call, maker_by_value: Mapping[Hashable, _Call]
) -> dict[Hashable, _Call | None]:
    """The calls that made the inputs of a call, by kind and shapes; None for several of a kind."""
    makers: dict[Hashable, _Call | None] = {}
    for (side, _), item in call.items.items():
        maker = maker_by_value.get(item.stored_value) if side == "input" else None
        if maker is not None:
            key = (maker.stretch, maker.kind, maker.shapes)
            makers[key] = None if makers.get(key, maker) is not maker else maker
    return makers


def _link_calls(operand_links: OperandLinks, call: _Call, other: _Call, by: MatchedBy) -> None:
    for side_position, item in call.items.items():
        other_item = other.items.get(side_position)
        if other_item is not None and item.shape == other_item.shape:
            operand_links.link(item, other_item, by)


# --- Order between them ---------------------------------------------------------------------------


def _select(calls: list[_Call], levels: Sequence[str]) -> dict[Hashable, list[_Call]]:
    """The calls of these levels that are left, by stretch."""
    calls_by_stretch: defaultdict[Hashable, list[_Call]] = defaultdict(list)
    for call in calls:
        if call.level in levels and call.is_left:
            calls_by_stretch[call.stretch].append(call)
    return calls_by_stretch


def _confine_operators(
    operand_links: OperandLinks, my_calls: list[_Call], golden: list[_Call]
) -> None:
    """Let operators of eager code match only inside modules that match."""
    levels = [
        {item.site.level for item in items} for items in (operand_links.my, operand_links.golden)
    ]
    if not all("module" in level for level in levels):
        return
    modules = {
        (link.my.scope, link.my.site.name): link.golden.site.name
        for link in operand_links.links
        if link.my.site.level == "module"
    }
    for calls, module_names in ((my_calls, modules), (golden, {})):
        for call in calls:
            item = next(iter(call.items.values()))
            if call.level == "op":
                module = item.site.module
                call.kind = (call.kind, module_names.get((item.scope, module), module))


def _match_between(
    operand_links: OperandLinks,
    my_stretches: Mapping[Hashable, list[_Call]],
    golden: Mapping[Hashable, list[_Call]],
) -> None:
    """Link calls in order, between the links that there are."""
    anchors: defaultdict[Hashable, set[tuple[int, int]]] = defaultdict(set)
    for link in operand_links.links:
        anchors[link.my.scope, link.my.site.phase].add((link.my.at, link.golden.at))
    for stretch, ours in my_stretches.items():
        ends = increasing(sorted(anchors[stretch]))
        parts: defaultdict[int, tuple[list[_Call], list[_Call]]] = defaultdict(lambda: ([], []))
        for side, calls in enumerate((ours, golden.get(stretch, []))):
            places = [end[side] for end in ends]
            for call in calls:
                parts[bisect_left(places, call.at)][side].append(call)
        for part in parts.values():
            for call, other in _pair_unambiguous(*part):
                _link_calls(operand_links, call, other, "order")


def _pair_unambiguous(calls: list[_Call], golden: list[_Call]) -> Iterator[tuple[_Call, _Call]]:
    """Pairs of calls, where both sides have as many of a kind; then again between these."""
    waiting = [(calls, golden)]
    while waiting:
        ours, golden_calls = waiting.pop()
        pairs = increasing(sorted(_pair_counted(ours, golden_calls)))
        begin = other = 0
        for at, there in pairs:
            yield ours[at], golden_calls[there]
            waiting.append((ours[begin:at], golden_calls[other:there]))
            begin, other = at + 1, there + 1
        if pairs:
            waiting.append((ours[begin:], golden_calls[other:]))


def _pair_counted(ours: list[_Call], golden_calls: list[_Call]) -> list[tuple[int, int]]:
    """The positions of kinds that both sides have once; if there are none, equally often."""
    places: list[defaultdict[Hashable, list[int]]] = []
    for calls in (ours, golden_calls):
        kind_positions: defaultdict[Hashable, list[int]] = defaultdict(list)
        for at, call in enumerate(calls):
            kind_positions[call.kind, call.shapes].append(at)
        places.append(kind_positions)
    my_positions, golden = places
    equal = [
        key
        for key, call_positions in my_positions.items()
        if len(call_positions) == len(golden.get(key, ()))
    ]
    once = [key for key in equal if len(my_positions[key]) == 1]
    return [
        pair for key in once or equal for pair in zip(my_positions[key], golden[key], strict=True)
    ]


# --- Rules for names ------------------------------------------------------------------------------


def propose_renames(names: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Rename rules for pairs of my and golden module names; numbers in them must agree.

    A rule that follows from one for an enclosing module is left out.
    """
    votes: Counter[tuple[str, str]] = Counter()
    for my_name, golden in dict.fromkeys(names):
        ours, golden_parts = my_name.split("."), golden.split(".")
        while ours and golden_parts:  # enclosing modules, too, while the numbers agree
            numbers = [[part for part in path if part.isdecimal()] for path in (ours, golden_parts)]
            if numbers[0] == numbers[1]:
                votes[_generalize(ours), _generalize(golden_parts)] += 1
            ours, golden_parts = ours[:-1], golden_parts[:-1]
            if len(ours) != len(golden_parts):
                break
    rules: dict[str, str] = {}
    total = Counter[str]()
    for (my_name, _), count in votes.items():
        total[my_name] += count
    for (my_name, golden), count in sorted(votes.items(), key=lambda vote: vote[0][0].count(".")):
        above = [old for old in rules if my_name.startswith(f"{old}.")]
        implied = my_name
        if above:
            longest = max(above, key=len)
            implied = rules[longest] + my_name[len(longest) :]
        if 2 * count > total[my_name] and implied != golden:
            rules[my_name] = golden
    return [
        (_as_pattern(my_pattern), _as_replacement(golden)) for my_pattern, golden in rules.items()
    ]


def _generalize(path: Sequence[str]) -> str:
    return ".".join("*" if part.isdecimal() else part for part in path)


def _as_pattern(name: str) -> str:
    return "^" + re.escape(name).replace(r"\*", r"(\d+)") + r"\b"


def _as_replacement(name: str) -> str:
    count = 0
    parts = []
    for part in name.split("."):
        count += part == "*"
        parts.append(rf"\{count}" if part == "*" else part)
    return ".".join(parts)
