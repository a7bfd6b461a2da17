"""Ways to match the values of two dumps: by name, by order and shape, by the node of a graph."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter, defaultdict
from typing import TYPE_CHECKING

from paritas.core.file_trees import natural_key

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence

    from paritas.comparison.operands import GraphKey, MatchItem, OperandLinks, Scope
    from paritas.comparison.rules import Renaming
    from paritas.formats.files.records import Site

    NodeKey = tuple[Scope | None, GraphKey, str, int]


# --- Names ----------------------------------------------------------------------------------------

_NAMED_LEVELS = ("module", "op", "parameter", "tensor")
# Wrapper modules in a path, which mean the module that they wrap.
_WRAPPERS = re.compile(
    r"(?:^|(?<=[./]))(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\."
)
_BOUNDARY = re.compile(r"[./]")
_MOST_CUTS = 4
_MOST_NAMES = 50_000


# --- canonical names ------------------------------------------------------------------------------


def match_ids(operand_links: OperandLinks) -> None:
    """Link items with the same canonical name and the same meaning."""
    golden_items: dict[tuple[object, ...], MatchItem] = {}
    for item in operand_links.remaining_items(mine=False):
        golden_items.setdefault((item.scope, item.record.id), item)
    unequal = _find_unequal(
        [(item, item.site.name) for item in operand_links.remaining_items(mine=True)],
        [(item, item.site.name) for item in operand_links.remaining_items(mine=False)],
    )
    my_code, golden_code = _collect_code(operand_links.my), _collect_code(operand_links.golden)
    same_code = {key for key, code in my_code.items() if golden_code.get(key) == code}
    for item in operand_links.remaining_items(mine=True):
        other = golden_items.get((item.scope, item.record.id))
        if other is None or other.found or _call_name(item, item.site.name) in unequal:
            continue
        if (item.scope, item.graph) in same_code or _same_value(item, other):
            operand_links.link(item, other, "id")


def _find_unequal(
    my_names: Iterable[tuple[MatchItem, str]], golden: Iterable[tuple[MatchItem, str]]
) -> set[tuple[object, ...]]:
    """Operators that a module calls more often on one side: their calls cannot match by number.

    Another implementation of a module calls the same operators in another order.
    """
    counts: list[defaultdict[tuple[object, ...], set[int]]] = []
    for side in (my_names, golden):
        calls: defaultdict[tuple[object, ...], set[int]] = defaultdict(set)
        for item, name in side:
            if item.site.level == "op" and item.site.side == "output":
                calls[_call_name(item, name)].add(item.site.call)
        counts.append(calls)
    first, second = counts
    return {name for name in first.keys() & second.keys() if first[name] != second[name]}


def _call_name(item: MatchItem, name: str) -> tuple[object, ...]:
    return item.scope, item.site.phase, item.site.level, name


def _collect_code(items: list[MatchItem]) -> dict[tuple[object, ...], set[tuple[object, ...]]]:
    """The fused code of each graph; if it is equal, the programs are the same."""
    code: dict[tuple[object, ...], set[tuple[object, ...]]] = {}
    for item in items:
        site = item.site
        if site.level == "buffer":
            graph_code = code.setdefault((item.scope, item.graph), set())
            graph_code.add((item.record.id, site.kernel, site.nodes, item.shape))
    return code


def _same_value(match_item: MatchItem, other: MatchItem) -> bool:
    """Whether the same name means the same value; in fused code it may not."""
    first, second = match_item.site, other.site
    if first.level != "buffer" and second.level != "buffer":
        return True
    if first.level == second.level:
        if not first.kernel and not second.kernel:
            # From engines with their own operator names.
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


def match_renamed(operand_links: OperandLinks, renamings: Iterable[Renaming]) -> None:
    """Link by the user's rename rules; note rules that have no effect."""
    renamings = list(renamings)
    if not renamings:
        return
    golden_items: dict[tuple[object, ...], MatchItem] = {}
    for item in operand_links.remaining_items(mine=False):
        golden_items.setdefault((item.scope, item.record.id), item)
        golden_items.setdefault((item.scope, *_call_place(item.site), item.site.name), item)
    for renaming in renamings:
        if renaming.concat:
            match_count, linked = _match_joining(
                operand_links, renaming, renaming.concat.of, golden_items
            )
        else:
            match_count, linked = _match_renaming(operand_links, renaming, golden_items)
        rule = f"rename {renaming.my!r} to {renaming.golden!r}"
        if not match_count:
            operand_links.notes.append(f"{rule} matched none of my names")
        elif not linked:
            operand_links.notes.append(
                f"{rule} matched {match_count} of my names but produced no golden name"
            )


def _call_place(site: Site) -> tuple[object, ...]:
    return site.phase, site.call, site.side, site.position


def _find_golden(
    golden_items: dict[tuple[object, ...], MatchItem],
    item: MatchItem,
    pattern: re.Pattern[str],
    new: str,
) -> tuple[bool, MatchItem | None]:
    """Whether a rule applies to an item, and the golden item that results."""
    name, record_id = item.site.name, item.record.id
    if pattern.search(name):
        other = golden_items.get(
            (item.scope, *_call_place(item.site), pattern.sub(new, name, count=1))
        )
        return True, other
    if pattern.search(record_id):
        return True, golden_items.get((item.scope, pattern.sub(new, record_id, count=1)))
    return False, None


def _match_renaming(
    operand_links: OperandLinks,
    renaming: Renaming,
    golden_items: dict[tuple[object, ...], MatchItem],
) -> tuple[int, int]:
    (pattern,) = renaming.patterns()
    match_count = linked = 0
    for item in list(operand_links.remaining_items(mine=True)):
        if item.is_number and (renaming.split or renaming.permute):
            continue
        for part, new in enumerate(renaming.replacements()):
            applies, other = _find_golden(golden_items, item, pattern, new)
            if not applies:
                break
            match_count += part == 0
            if other is not None and not other.found:
                operand_links.link(item, other, "rename", renaming.operand([item.operand], part))
                linked += 1
    return match_count, linked


def _match_joining(
    operand_links: OperandLinks,
    renaming: Renaming,
    names: tuple[str, ...],
    golden_items: dict[tuple[object, ...], MatchItem],
) -> tuple[int, int]:
    groups: dict[int, dict[int, MatchItem]] = {}
    targets: dict[int, MatchItem] = {}
    match_count = linked = 0
    for item in list(operand_links.remaining_items(mine=True)):
        for part, pattern in enumerate(renaming.patterns()):
            applies, other = _find_golden(golden_items, item, pattern, renaming.golden)
            match_count += applies
            if other is not None and not other.found and not item.is_number:
                groups.setdefault(id(other), {}).setdefault(part, item)
                targets[id(other)] = other
    for key, parts in groups.items():
        other = targets[key]
        if len(parts) < len(names):
            missing = [name for at, name in enumerate(names) if at not in parts]
            operand_links.notes.append(
                f"rename {renaming.my!r}: cannot concatenate {other.record.id}, because "
                f"{', '.join(missing)} is missing"
            )
            continue
        items = [parts[at] for at in range(len(names))]
        operand_links.link(
            items[0], other, "rename", renaming.operand([part_item.operand for part_item in items])
        )
        for joined_item in items:
            joined_item.found = True
        linked += 1
    return match_count, linked


# --- prefixes -------------------------------------------------------------------------------------


def module_prefix(my_names: Collection[str], golden: Collection[str]) -> tuple[str, str]:
    """The prefix that only my names have, and the one that only golden names have.

    Without it, at least half the names of the smaller side must be the same.
    """
    first, second = set(list(my_names)[:_MOST_NAMES]), set(list(golden)[:_MOST_NAMES])
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
    (prefix, count) = max(votes.items(), key=lambda vote: (vote[1], -len("".join(vote[0]))))
    return prefix if count * 2 >= min(len(first), len(second)) else ("", "")


def _find_cuts(name: str) -> Iterator[int]:
    for number, boundary in enumerate(_BOUNDARY.finditer(name)):
        if number == _MOST_CUTS:
            return
        if boundary.end() < len(name):
            yield boundary.end()


def strip_wrappers(name: str) -> str:
    """A path without wrapper modules."""
    return _WRAPPERS.sub("", name)


def match_prefixed(operand_links: OperandLinks) -> None:
    """Link items with the same name except for a common prefix of one side."""
    sides = []
    for is_mine in (True, False):
        items = [
            unlinked_item
            for unlinked_item in operand_links.remaining_items(mine=is_mine)
            if unlinked_item.site.level in _NAMED_LEVELS
        ]
        sides.append([(side_item, strip_wrappers(side_item.site.name)) for side_item in items])
    my, golden = sides
    if not my or not golden:
        return
    roots = [_find_root(operand_links, mine=is_my_side) for is_my_side in (True, False)]
    if all(roots) and roots[0] != roots[1]:
        my = [(my_item, _move_name(name, roots[0], roots[1])) for my_item, name in my]
    else:
        roots = ["", ""]
    # Each name votes once, however often it is called.
    prefix, other_prefix = module_prefix(
        dict.fromkeys(name for _, name in my), dict.fromkeys(name for _, name in golden)
    )
    golden_items: dict[tuple[object, ...], MatchItem] = {}
    for item, name in golden:
        golden_items.setdefault(_name_key(item, name.removeprefix(other_prefix)), item)
    unequal = _find_unequal(
        [(item, name.removeprefix(prefix)) for item, name in my],
        [(item, name.removeprefix(other_prefix)) for item, name in golden],
    )
    linked = 0
    for item, full in my:
        name = full.removeprefix(prefix)
        other = golden_items.get(_name_key(item, name))
        if other is not None and not other.found and _call_name(item, name) not in unequal:
            operand_links.link(item, other, "module")
            linked += 1
    if linked and (prefix or other_prefix):
        whose, text = ("my", prefix) if prefix else ("golden", other_prefix)
        operand_links.notes.append(
            f"{whose} names start with {text!r}; this prefix was ignored to match them"
        )
    if linked and all(roots):
        operand_links.notes.append(f"my {roots[0]} was matched with the golden {roots[1]}")


def _name_key(item: MatchItem, name: str) -> tuple[object, ...]:
    return item.scope, item.site.level, *_call_place(item.site), name


def _find_root(operand_links: OperandLinks, *, mine: bool) -> str:
    """The outermost module, which is named after its class, if there is only one."""
    items = operand_links.my if mine else operand_links.golden
    names = {
        item.site.name
        for item in items
        if item.site.level == "module" and item.site.name == item.site.op
    }
    return names.pop() if len(names) == 1 else ""


def _move_name(name: str, old: str, new: str) -> str:
    return new + name[len(old) :] if name == old or name.startswith(f"{old}/") else name


# --- Aligning two sequences -----------------------------------------------------------------------

# The largest table of the exact method, whose size is the product of the two lengths.
_MOST_CELLS = 250_000
_PIECE = 96


def align(first: Sequence[Hashable], second: Sequence[Hashable]) -> list[tuple[int, int]]:
    """Pairs of positions with equal members, ascending on both sides.

    First the common start and end, then members that are unique on both sides, then the longest
    common subsequence between those. Long stretches without unique members are aligned piece by
    piece, to avoid quadratic time.
    """
    aligned_pairs: list[tuple[int, int]] = []
    waiting = [(0, len(first), 0, len(second))]
    while waiting:
        begin, end, other, last = waiting.pop()
        while begin < end and other < last and first[begin] == second[other]:
            aligned_pairs.append((begin, other))
            begin, other = begin + 1, other + 1
        while begin < end and other < last and first[end - 1] == second[last - 1]:
            end, last = end - 1, last - 1
            aligned_pairs.append((end, last))
        if begin == end or other == last:
            continue
        if (end - begin) * (last - other) <= _MOST_CELLS:
            aligned_pairs += _align_exactly(first, second, (begin, end, other, last))
            continue
        anchors = _find_anchors(first, second, (begin, end, other, last))
        if not anchors:
            aligned_pairs += _align_piecewise(first, second, (begin, end, other, last))
        for at, there in anchors:
            aligned_pairs.append((at, there))
            waiting.append((begin, at, other, there))
            begin, other = at + 1, there + 1
        if anchors:
            waiting.append((begin, end, other, last))
    return sorted(aligned_pairs)


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
    aligned_pairs = []
    at, there = 0, 0
    while at < end - begin and there < width:
        if first[begin + at] == second[other + there]:
            aligned_pairs.append((begin + at, other + there))
            at, there = at + 1, there + 1
        elif table[at + 1][there] >= table[at][there + 1]:
            at += 1
        else:
            there += 1
    return aligned_pairs


def _find_anchors(
    first: Sequence[Hashable], second: Sequence[Hashable], where: Stretch
) -> list[tuple[int, int]]:
    """The members that are unique on both sides, where their order is the same."""
    begin, end, other, last = where
    places = _find_unique(first, begin, end)
    there = _find_unique(second, other, last)
    pairs = [(at, there[member]) for member, at in places.items() if member in there]
    return increasing(pairs)


def increasing(pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The longest part of the pairs that ascends on both sides.

    Args:
        pairs: ascending on the first side.
    """
    tails: list[int] = []
    ends: list[int] = []
    before: list[int] = []
    for index, (_, second_position) in enumerate(pairs):
        at = bisect_left(tails, second_position)
        before.append(ends[at - 1] if at else -1)
        if at == len(tails):
            tails.append(second_position)
            ends.append(index)
        else:
            tails[at], ends[at] = second_position, index
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

    Only the first half of each piece is kept, since its end depends on what follows.
    """
    begin, end, other, last = where
    aligned_pairs: list[tuple[int, int]] = []
    while begin < end and other < last:
        piece = (begin, min(end, begin + _PIECE), other, min(last, other + _PIECE))
        pairs = _align_exactly(first, second, piece)
        is_last = piece[1] == end and piece[3] == last
        kept_pairs = pairs if is_last else [pair for pair in pairs if pair[0] < begin + _PIECE // 2]
        aligned_pairs += kept_pairs
        if is_last:
            break
        if kept_pairs:
            begin, other = kept_pairs[-1][0] + 1, kept_pairs[-1][1] + 1
        else:
            begin, other = begin + _PIECE // 2, other + _PIECE // 2
    return aligned_pairs


# --- Values of captured graphs, by node -----------------------------------------------------------

GRAPH_LEVELS = ("node", "buffer")


class GraphSide:
    """The values of one side's graphs, by the nodes that computed them."""

    def __init__(self, items: list[MatchItem]) -> None:
        self.items = [
            graph_item
            for graph_item in items
            if graph_item.site.level in GRAPH_LEVELS and graph_item.scope is not None
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
        # Values that were materialised only to record them come after what the code itself wrote.
        for item in taps:
            self._note(item)

    def _note(self, item: MatchItem) -> None:
        node = held_node(item)
        if node:
            self.values.setdefault(node_key(item, node), {}).setdefault(item.site.position, item)

    def value(self, item: MatchItem, node: str) -> MatchItem | None:
        """The value of a node that an item of the other side refers to."""
        node_values = self.values.get(node_key(item, node))
        if not node_values:
            return None
        if len(node_values) == 1:
            return next(iter(node_values.values()))
        if item.site.side == "output" and item.site.position in node_values:
            return node_values[item.site.position]
        alike = [
            value_item for value_item in node_values.values() if value_item.shape == item.shape
        ]
        return alike[0] if len(alike) == 1 else None


def node_key(item: MatchItem, node: str) -> NodeKey:
    """The key of a node's value, the same on both sides."""
    return item.scope, item.graph, node, item.site.call


def held_node(item: MatchItem) -> str:
    """The node whose value an item holds, or an empty string."""
    site = item.site
    if site.level == "node" and site.side == "output":
        return site.name
    if site.level == "buffer" and site.exact and site.nodes:
        return site.nodes[-1]
    return ""


# --- Values of graphs that are left out -----------------------------------------------------------

# Operators that an engine adds, to move values or to change their memory layout.
_MOVERS = {
    "Cast", "Data", "Identity", "MemcpyAsync", "NetOutput", "Reformat", "TensorMove", "TransData",
    "TransDataRNN",
}  # fmt: skip


def skip_inexact(
    operand_links: OperandLinks, items: list[MatchItem], plain: set[GraphKey] | None = None
) -> None:
    """Leave out buffers that do not hold a value of the graph.

    Args:
        plain: graphs whose nodes the other side has one by one; None if that does not matter.
    """
    traced = {graph_item.graph for graph_item in items if graph_item.site.nodes}
    for item in items:
        site = item.site
        if not item.is_left or site.level != "buffer" or site.exact:
            continue
        if site.kernel:
            operand_links.skip(item, "buffer", "of fused code without a value of the graph")
        elif plain is not None and item.graph in plain and item.graph in traced:
            if site.nodes and site.side == "output":
                operand_links.skip(
                    item, "result", "of only a part of a node, without a counterpart"
                )
            elif not site.nodes and site.op in _MOVERS:
                operand_links.skip(item, "value", "of operators that the engine added to move data")


def _fold_fused(operand_links: OperandLinks, side: GraphSide, other: GraphSide) -> None:
    """Leave out what is inside the other side's fused code."""
    inside, unseen, done = _find_covered(other)
    covered_keys = inside | unseen | done
    for item in side.items:
        if not item.is_left or item.graph not in other.fused:
            continue
        site = item.site
        node_name = held_node(item) or site.name
        if site.side == "input":
            if item.is_number:
                operand_links.skip(item, "number", "inlined into fused kernels")
                continue
            node_name = site.nodes[-1] if site.nodes and site.nodes[-1] != site.name else node_name
        key = node_key(item, node_name)
        reader = node_key(item, site.name)
        if site.side == "input":
            if key in covered_keys or reader in covered_keys:
                operand_links.skip(item, "input", "of nodes; compared where computed or read")
        elif key in inside:
            operand_links.skip(item, "node", "inside fused kernels; compared at their outputs")
        elif key in unseen:
            operand_links.skip(
                item,
                "node",
                "inside fused kernels that write none of their values; compared at later values",
            )


def _find_covered(side: GraphSide) -> tuple[set[NodeKey], set[NodeKey], set[NodeKey]]:
    """Nodes inside compared code, nodes inside code that cannot be compared, compared nodes."""
    inside: set[NodeKey] = set()
    unseen: set[NodeKey] = set()
    done: set[NodeKey] = set()
    graphs = {
        (output_item.scope, output_item.graph)
        for output_item in side.items
        if output_item.found and output_item.site.side == "output"
    }
    for item in side.items:
        site = item.site
        if site.side != "output" and site.level != "buffer":
            continue
        if item.found:
            # A kernel's input is also the value of a node and of the nodes fused into it.
            done.add(node_key(item, held_node(item) or site.name))
            inside.update(node_key(item, node) for node in site.nodes)
        elif item.gone and not site.exact and (item.scope, item.graph) in graphs:
            unseen.update(node_key(item, node) for node in site.nodes)
    return inside, unseen, done


def skip_rewritten(operand_links: OperandLinks) -> None:
    """Leave out nodes that a compiler replaced by others.

    This requires that each graph has nodes that the other does not have, that a value of both
    follows, and that the other side has some value of the same module. Otherwise the value may
    just not have been recorded.
    """
    my, golden = GraphSide(operand_links.my), GraphSide(operand_links.golden)
    if not my.items or not golden.items:
        return
    my_nodes, golden_nodes = _all_nodes(my), _all_nodes(golden)
    rewritten = {key[:2] for key in my_nodes - golden_nodes} & {
        key[:2] for key in golden_nodes - my_nodes
    }
    for side, other in ((my, golden), (golden, my)):
        modules = {
            (other_item.scope, other_item.graph, other_item.site.module)
            for other_item in other.items
        }
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
                operand_links.skip(
                    item,
                    "value",
                    "from nodes that only one of the two graphs has; compared at "
                    "the next value of both",
                )


def _all_nodes(side: GraphSide) -> set[tuple[object, ...]]:
    return {
        (item.scope, item.graph, node)
        for item in side.items
        for node in (item.site.name, *item.site.nodes)
    }


# --- Matching by node -----------------------------------------------------------------------------

# A buffer of fused code has the nodes that it was computed by, and the node whose value it holds. A
# kernel's input is the value of a node too. Both are compared with that node's value on the other
# side, even if it was matched before: a value can be read many times.


def align_graphs(operand_links: OperandLinks) -> None:
    """Rename my graphs to the matching golden graphs.

    Graphs with the same name match. The others match by the number of node names in common.
    """
    my_names, golden_names = _node_names(operand_links.my), _node_names(operand_links.golden)
    moved: dict[GraphKey, GraphKey] = {}
    rest = [key for key in my_names if key not in golden_names]
    free = [key for key in golden_names if key not in my_names]
    scores = sorted(
        (
            (len(my_names[key] & golden_names[other]), key[0] == other[0], key, other)
            for key in rest
            for other in free
        ),
        key=lambda score: score[:2],
        reverse=True,
    )
    for shared, _, key, other in scores:
        if shared and key not in moved and other not in moved.values():
            moved[key] = other
    for item in operand_links.my:
        item.graph = moved.get(item.graph, item.graph)
    operand_links.notes += [
        f"my graph {' '.join(key[::-1])} was matched with the golden {' '.join(other[::-1])}"
        for key, other in moved.items()
    ]


def _node_names(items: list[MatchItem]) -> dict[GraphKey, set[str]]:
    names: dict[GraphKey, set[str]] = {}
    for item in items:
        site = item.site
        if site.level in GRAPH_LEVELS:
            graph_names = names.setdefault(item.graph, set())
            graph_names.add(site.name)
            graph_names.update(site.nodes)
    return names


def match_nodes(operand_links: OperandLinks) -> None:
    """Link values of the same node, and leave out what is compared elsewhere."""
    my, golden = GraphSide(operand_links.my), GraphSide(operand_links.golden)
    if not my.items or not golden.items:
        return
    _match_places(operand_links, my, golden)
    for side, other in ((my, golden), (golden, my)):
        for item in side.items:
            node = held_node(item) if item.is_left else ""
            counterpart = other.value(item, node) if node else None
            # Fused code may read a value that is already matched.
            if counterpart is not None and (not counterpart.found or item.site.source == "fused"):
                operand_links.link_either(item, counterpart, "node")
    for side, other in ((my, golden), (golden, my)):
        _match_arguments(operand_links, side, other)
    skip_inexact(operand_links, my.items, golden.plain)
    skip_inexact(operand_links, golden.items, my.plain)
    for side, other in ((my, golden), (golden, my)):
        _fold_fused(operand_links, side, other)


def _match_places(operand_links: OperandLinks, my: GraphSide, golden: GraphSide) -> None:
    """Link the same position of the same node, in graphs with different names."""
    golden_items = {
        _graph_place(item): item
        for item in golden.items
        if item.is_left and item.site.level == "node"
    }
    for item in my.items:
        if item.is_left and item.site.level == "node":
            other = golden_items.get(_graph_place(item))
            if other is not None and other.is_left:
                operand_links.link(item, other, "node")


def _graph_place(item: MatchItem) -> tuple[object, ...]:
    site = item.site
    tapped = site.source == "fused"
    return item.scope, item.graph, tapped, site.name, site.call, site.side, site.position


def _match_arguments(operand_links: OperandLinks, side: GraphSide, other: GraphSide) -> None:
    """Link the inputs of an engine's operators, if the graph's text does not say what made them.

    Each is either a program input, by name, or one of the tensors that the node takes, by position.
    For a fused operator that is its first node, if the shapes fit.
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
                operand_links.link_either(item, value, "node")
    for inputs, outputs in calls.values():
        nodes = {output.site.nodes for output in outputs if output.site.exact}
        if len(nodes) != 1 or not any(input_item.is_left for input_item in inputs):
            continue
        (names,) = nodes
        taken = other.given.get(node_key(outputs[0], names[0]), ())
        taken_inputs = _in_place([taken_item for taken_item in taken if not taken_item.is_number])
        ours = _in_place(inputs)
        if len(taken_inputs) != len(ours):
            continue
        if len(names) > 1 and [taken_item.shape for taken_item in taken_inputs] != [
            call_input.shape for call_input in ours
        ]:
            continue
        for own_input, taken_input in zip(ours, taken_inputs, strict=True):
            if own_input.is_left and not taken_input.found:
                operand_links.link_either(own_input, taken_input, "node")


def _in_place(items: list[MatchItem]) -> list[MatchItem]:
    return sorted(items, key=lambda item: natural_key(item.site.position))
