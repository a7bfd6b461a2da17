"""Values of eager code against those of a captured graph: by module, operator and order.

Both record the module that an operator belongs to. What is one operator here may be several there,
decomposed or fused. Only what both sides call equally often in a module is taken for the same; of
what lies between, the last value of each module, which is what the others were computed for.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING

from paritas.comparison.matching.folding import skip_inexact
from paritas.comparison.matching.names import module_prefix, unwrapped
from paritas.comparison.matching.results import (
    alike,
    match_program_inputs,
    match_results,
    match_shared,
)
from paritas.comparison.matching.sequences import align
from paritas.comparison.matching.values import held
from paritas.dumps.foreign.finding import natural_key

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator

    from paritas.comparison.matching.book import Book, Item, Scope

    Pass = tuple[Scope | None, str]

__all__ = ["match_modules"]

_NO_CALLS = ("placeholder", "getitem")
# In the names of operators that others are not decomposed to.
_NEVER_PARTS = ("mm", "conv", "embedding", "attention", "norm", "softmax")
_INSIDE = "{n} values are inside operators that the other side has as one or as others"
_GIVEN = "{n} inputs of operators and modules are compared where they were made"
_FUSED = "{n} values are inside fused kernels; compared at their outputs"


class _Call:
    """One call of an operator: what it was given, what it gave, and where that is seen again."""

    __slots__ = ("again", "inputs", "line", "module", "op", "outputs")

    def __init__(self, op: str, module: str, line: str) -> None:
        self.op, self.module = op, module
        self.line = line.rpartition("/")[2]
        self.inputs: dict[str, Item] = {}
        self.outputs: dict[str, Item] = {}
        self.again: list[Item] = []

    @property
    def result(self) -> Item:
        return next(iter(self.outputs.values()))

    @property
    def is_fused(self) -> bool:
        """Whether it is code of several operators, whose inputs are not those of its last one."""
        return "_fused_" in self.result.site.kernel

    def items(self) -> Iterator[Item]:
        yield from self.inputs.values()
        yield from self.outputs.values()

    def kind(self, *, with_inputs: bool, with_line: bool) -> Hashable:
        """What a call on the other side must be like, to be the same."""
        shapes: tuple[object, ...] = ()
        if with_inputs:
            given = sorted(self.inputs.items(), key=lambda found: natural_key(found[0]))
            shapes = tuple(item.shape for _, item in given if item.shape is not None)
        line = self.line if with_line else ""
        return self.module, self.op, line, self.result.shape, shapes


def match_modules(book: Book) -> None:
    """Link operators of eager code with nodes of graphs, and modules with what they give."""
    for mine in (True, False):
        eager = book.my if mine else book.golden
        graph = book.golden if mine else book.my
        if _has(eager, ("op", "module")) and _has(graph, ("node", "buffer")):
            _match(book, eager, graph)
            return


def _has(items: Iterable[Item], levels: tuple[str, ...]) -> bool:
    return any(item.is_left and item.site.level in levels for item in items)


def _match(book: Book, eager: list[Item], graph: list[Item]) -> None:
    named = _paths(book, eager, graph)
    skip_inexact(book, graph)
    eager_calls = _calls((one for one in eager if one.site.level == "op"), named)
    graph_calls = _calls((one for one in graph if _is_call(one)), named)
    match_results(book, eager, graph, named)
    for key in eager_calls.keys() & graph_calls.keys():
        _match_calls(book, eager_calls[key], graph_calls[key])
    _match_again(book, (call for calls in graph_calls.values() for call in calls))
    match_shared(book, eager)
    match_shared(book, graph)
    match_program_inputs(book, eager, graph)
    for item in graph:
        if item.is_left and item.site.op == "placeholder":
            book.skip(item, "{n} values that graphs are given have no such place in eager code")
        elif item.is_left and item.site.op == "getitem" and item.site.level == "node":
            book.skip(item, "{n} parts of results are compared with the whole")
    for item in (*eager, *graph):
        in_call = item.site.level in ("op", "module", "node", "buffer")
        if item.is_left and in_call and item.site.side == "input" and item.site.phase == "forward":
            book.skip(item, _GIVEN)
    if not eager_calls:
        _fold_into_modules(book, eager, graph, named)


def _is_call(item: Item) -> bool:
    """Whether an item of a graph belongs to an operator; a buffer may hold a part of a result."""
    level = item.site.level
    return level == "buffer" or (level == "node" and item.site.op not in _NO_CALLS)


def _paths(book: Book, eager: list[Item], graph: list[Item]) -> Callable[[Item], str]:
    """What the module of an item is called on both sides alike."""
    left = {unwrapped(one.site.module) for one in eager if one.site.module}
    right = {
        unwrapped(one.site.module)
        for one in graph
        if one.site.module and one.site.op != "placeholder"
    }
    # The outermost module goes by its class in eager code, and by nothing in a graph.
    roots = {
        one.site.name
        for one in eager
        if one.site.level == "module" and one.site.name == one.site.op
    }
    prefixes = module_prefix(left - roots, right)
    if not roots:
        known = {path.removeprefix(prefixes[1]) for path in right}
        rest = {path for path in left if path.removeprefix(prefixes[0]) not in known}
        rest = {path for path in rest if not any(one.startswith(f"{path}.") for one in left)}
        roots = rest if len(rest) == 1 else roots
    if any(prefixes):
        whose = "eager code" if prefixes[0] else "the graph"
        book.notes.append(
            f"module paths of {whose} begin with {prefixes[0] or prefixes[1]!r}, which was left "
            f"out to match them"
        )
    is_mine = bool(eager) and eager[0].mine

    def named(item: Item) -> str:
        path = unwrapped(item.site.module)
        own = prefixes[item.mine != is_mine]
        if path in roots or (own and path == own.rstrip("./")):
            return ""
        return path.removeprefix(own)

    return named


def _calls(items: Iterable[Item], named: Callable[[Item], str]) -> dict[Pass, list[_Call]]:
    """The calls of each pass, in their order."""
    calls: dict[Pass, dict[tuple[str, str, int], _Call]] = {}
    for item in items:
        if item.scope is None:
            continue
        site = item.site
        of_pass = calls.setdefault((item.scope, site.phase), {})
        key = (site.graph, site.name, site.call)
        call = of_pass.get(key)
        if call is None:
            call = of_pass[key] = _Call(site.op, named(item), site.line)
        if site.side == "input":
            call.inputs[site.position] = item
        elif site.position in call.outputs:
            call.again.append(item)
        elif site.level != "buffer" or held(item):
            call.outputs[site.position] = item
    # A kernel is named when it reads, and may write several values: they come as they are written.
    return {
        key: sorted(
            (call for call in of_pass.values() if call.outputs), key=lambda call: call.result.at
        )
        for key, of_pass in calls.items()
    }


def _match_calls(book: Book, eager: list[_Call], graph: list[_Call]) -> None:
    is_fused = any(call.result.site.level == "buffer" for call in graph)
    before = (-1, -1)
    anchors = _same_calls(eager, graph, is_fused=is_fused)
    if not anchors and not any(call.module for call in eager):
        return  # nothing says that the two have anything in common
    for at, there in [*anchors, (len(eager), len(graph))]:
        stretch = eager[before[0] + 1 : at], graph[before[1] + 1 : there]
        before = (at, there)
        is_anchored = at < len(eager)
        if is_anchored:
            _link_calls(book, eager[at], graph[there], with_inputs=not is_fused)
        if not is_fused:
            _match_stretch(book, *stretch, is_anchored=is_anchored)
        elif is_anchored or any(one.result.found for one in stretch[1]):
            _fold(book, *stretch)


def _same_calls(eager: list[_Call], graph: list[_Call], *, is_fused: bool) -> list[tuple[int, int]]:
    """Calls that both sides have equally often, in order.

    The backward pass has no order that both must keep, and what an operator is decomposed to has
    the same few operators over and over: there, only what is there once is sure.
    """
    lines = {call.line for call in eager} & {call.line for call in graph} - {""}
    kinds = []
    for calls in (eager, graph):
        of_side = [call.kind(with_inputs=not is_fused, with_line=bool(lines)) for call in calls]
        kinds.append(
            [None if call.is_fused else kind for call, kind in zip(calls, of_side, strict=True)]
        )
    counts, other_counts = Counter(kinds[0]), Counter(kinds[1])
    sure = {
        kind
        for call, kind in zip(eager, kinds[0], strict=True)
        if counts[kind] == other_counts[kind] and (counts[kind] == 1 or _keeps_order(call))
    }
    # What cannot be told from others of its kind is like nothing on the other side.
    return align(
        [kind if kind in sure else (at, "eager") for at, kind in enumerate(kinds[0])],
        [kind if kind in sure else (at, "graph") for at, kind in enumerate(kinds[1])],
    )


def _keeps_order(call: _Call) -> bool:
    is_forward = call.result.site.phase == "forward"
    return is_forward and any(word in call.op for word in _NEVER_PARTS)


def _link_calls(book: Book, eager: _Call, graph: _Call, *, with_inputs: bool) -> None:
    sides = [(eager.outputs, graph.outputs)]
    if with_inputs:
        sides.append((eager.inputs, graph.inputs))
    for ours, theirs in sides:
        for position, item in ours.items():
            other = theirs.get(position)
            if other is not None and item.is_left and (other.is_left or other.found):
                book.link_either(item, other, "module")
    for item in (*eager.inputs.values(), *graph.inputs.values()):
        if item.is_left and item.is_number:
            book.skip(item, "{n} numbers given to operators are listed otherwise by the other side")


def _match_stretch(
    book: Book, eager: list[_Call], graph: list[_Call], *, is_anchored: bool
) -> None:
    """Between operators that both have: of each module, the last value."""
    stretches: defaultdict[str, tuple[list[_Call], list[_Call]]] = defaultdict(lambda: ([], []))
    for side, calls in enumerate((eager, graph)):
        for call in calls:
            stretches[call.module][side].append(call)
    for ours, theirs in stretches.values():
        if not ours or not theirs:
            continue
        one, other = ours[-1].result, theirs[-1].result
        same_line = ours[-1].line == theirs[-1].line or not (ours[-1].line and theirs[-1].line)
        if not same_line or not alike(one, other):
            continue
        if one.is_left and (other.is_left or other.found):
            book.link_either(one, other, "module")
        for call in (*ours, *theirs):
            for item in call.items():
                if item.is_left:
                    book.skip(item, _INSIDE)
    for item in (item for call in graph if is_anchored for item in call.items()):
        if item.is_left and not item.site.line and not item.site.module:
            book.skip(
                item, "{n} values are of nodes that the compiler put in; compared at the next value"
            )


def _fold(book: Book, eager: list[_Call], graph: list[_Call]) -> None:
    """Leave out what lies inside of fused kernels, before a value that is compared."""
    for item in (item for call in eager for item in call.items()):
        if item.is_left:
            book.skip(item, _FUSED)
    for item in (item for call in graph for item in (*call.outputs.values(), *call.again)):
        if item.is_left:
            book.skip(item, "{n} values of fused code are of no operator of eager code")


def _match_again(book: Book, calls: Iterable[_Call]) -> None:
    """What holds a value that was matched before belongs to the same."""
    partners = {id(link.golden): link.my for link in book.links}
    partners |= {id(link.my): link.golden for link in book.links}
    for call in calls:
        for item in call.again:
            other = partners.get(id(call.outputs.get(item.site.position)))
            if item.is_left and other is not None:
                book.link_either(item, other, "module")


def _fold_into_modules(
    book: Book, eager: list[Item], graph: list[Item], named: Callable[[Item], str]
) -> None:
    """Leave out what lies inside of modules whose results are compared."""
    compared = {
        (one.scope, one.site.phase, named(one))
        for one in eager
        if one.found and one.site.level == "module" and one.site.side == "output"
    }
    for item in graph:
        path = named(item)
        while item.is_left:
            if (item.scope, item.site.phase, path) in compared:
                book.skip(item, "{n} nodes are inside modules; compared at what these give")
            if not path:
                break
            path = path.rpartition(".")[0]
