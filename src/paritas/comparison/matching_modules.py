"""Matching values of eager code with those of a captured graph, by module and operator."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from typing import TYPE_CHECKING

from paritas.comparison.matching_graphs import held, skip_inexact
from paritas.comparison.matching_names import align, module_prefix, unwrapped
from paritas.files.trees import natural_key

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator

    from paritas.comparison.operands import Book, MatchItem, Scope


# --- Results of modules, and inputs of the program ------------------------------------------------

if TYPE_CHECKING:
    Key = tuple[Scope | None, str, str]


def alike(one: MatchItem, other: MatchItem) -> bool:
    """Whether two are tensors of one shape and dtype."""
    first, second = one.record.tensor, other.record.tensor
    return (
        first is not None
        and second is not None
        and (first.shape, first.dtype) == (second.shape, second.dtype)
    )


def match_results(
    book: Book, eager: list[MatchItem], graph: list[MatchItem], named: Callable[[MatchItem], str]
) -> None:
    """Link what a module gives with the node that leaves it.

    That is one whose value is read outside of the module or, for what the program gives, one that
    nothing reads. A module that is called several times is left alone: a graph does not say which
    of its nodes belong to which call. Of fused code, only what the program gives is known to be
    there.
    """
    leaving = _find_leaving(graph, named)
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


def _find_leaving(
    graph: list[MatchItem], named: Callable[[MatchItem], str]
) -> dict[Key, tuple[list[MatchItem], list[MatchItem]]]:
    """The values of each module that are read outside of it, and those that nothing reads."""
    made: list[MatchItem] = []
    readers: dict[tuple[Scope | None, tuple[str, str], str], set[str]] = defaultdict(set)
    leaving: dict[Key, tuple[list[MatchItem], list[MatchItem]]] = defaultdict(lambda: ([], []))
    given_back: list[MatchItem] = []
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


def match_program_inputs(book: Book, eager: list[MatchItem], graph: list[MatchItem]) -> None:
    """Link what the outermost module is given with what the graph is given, parameters apart."""
    given: defaultdict[Scope | None, tuple[list[MatchItem], list[MatchItem]]] = defaultdict(
        lambda: ([], [])
    )
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


def match_shared(book: Book, eager: list[MatchItem]) -> None:
    """Give a module's or a parameter's value the counterpart of the operator's that it is.

    They share memory and bytes: it is the same tensor, seen once more. What an operator only
    looks at otherwise is left out, where what it looks at is compared.
    """
    partners = {id(link.golden): link.my for link in book.links}
    partners |= {id(link.my): link.golden for link in book.links}
    same: dict[tuple[object, ...], MatchItem] = {}
    first: dict[tuple[object, ...], MatchItem] = {}
    for item in eager:
        if item.scope is None or item.record.tensor is None or not item.record.digest:
            continue
        if item.found or item.gone:
            first.setdefault(_memory_key(item), item)
            if item.found or _value_key(item) not in same:
                same[_value_key(item)] = item
    for item in eager:
        other = (
            same.get(_value_key(item)) if item.is_left and item.record.tensor is not None else None
        )
        if other is not None and other.found:
            book.link_either(item, partners[id(other)], "module")
        elif other is not None:
            book.skip(item, "{n} values are seen once more as others that are compared elsewhere")
        elif item.is_left and _VIEWS.fullmatch(item.site.op) and _memory_key(item) in first:
            book.skip(item, "{n} views are of values that are compared by themselves")


def _memory_key(item: MatchItem) -> tuple[object, ...]:
    record = item.record
    root = record.sequence if record.alias_of is None else record.alias_of
    return item.scope, record.rank, root


def _value_key(item: MatchItem) -> tuple[object, ...]:
    return *_memory_key(item), item.record.digest, item.shape


# --- Calls inside a module ------------------------------------------------------------------------

# Both record the module that an operator belongs to. What is one operator here may be several
# there, decomposed or fused. Only what both sides call equally often in a module is taken for the
# same; of what lies between, the last value of each module, which is what the others were computed
# for.

if TYPE_CHECKING:
    Pass = tuple[Scope | None, str]


_NO_CALLS = ("placeholder", "getitem")
# In the names of operators that others are not decomposed to.
_NEVER_PARTS = ("mm", "conv", "embedding", "attention", "norm", "softmax")
_INSIDE = "{n} values are inside operators that the other side has as one or as others"
_GIVEN = "{n} inputs of operators and modules are compared where they were made"
_FUSED = "{n} values are inside fused kernels; compared at their outputs"


class _OperatorCall:
    """One call of an operator: what it was given, what it gave, and where that is seen again."""

    __slots__ = ("again", "inputs", "line", "module", "op", "outputs")

    def __init__(self, op: str, module: str, line: str) -> None:
        self.op, self.module = op, module
        self.line = line.rpartition("/")[2]
        self.inputs: dict[str, MatchItem] = {}
        self.outputs: dict[str, MatchItem] = {}
        self.again: list[MatchItem] = []

    @property
    def result(self) -> MatchItem:
        return next(iter(self.outputs.values()))

    @property
    def is_fused(self) -> bool:
        """Whether it is code of several operators, whose inputs are not those of its last one."""
        return "_fused_" in self.result.site.kernel

    def items(self) -> Iterator[MatchItem]:
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
        if _has_levels(eager, ("op", "module")) and _has_levels(graph, ("node", "buffer")):
            _match_sides(book, eager, graph)
            return


def _has_levels(items: Iterable[MatchItem], levels: tuple[str, ...]) -> bool:
    return any(item.is_left and item.site.level in levels for item in items)


def _match_sides(book: Book, eager: list[MatchItem], graph: list[MatchItem]) -> None:
    named = _name_paths(book, eager, graph)
    skip_inexact(book, graph)
    eager_calls = _collect_calls((one for one in eager if one.site.level == "op"), named)
    graph_calls = _collect_calls((one for one in graph if _is_call(one)), named)
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


def _is_call(item: MatchItem) -> bool:
    """Whether an item of a graph belongs to an operator; a buffer may hold a part of a result."""
    level = item.site.level
    return level == "buffer" or (level == "node" and item.site.op not in _NO_CALLS)


def _name_paths(
    book: Book, eager: list[MatchItem], graph: list[MatchItem]
) -> Callable[[MatchItem], str]:
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

    def named(item: MatchItem) -> str:
        path = unwrapped(item.site.module)
        own = prefixes[item.mine != is_mine]
        if path in roots or (own and path == own.rstrip("./")):
            return ""
        return path.removeprefix(own)

    return named


def _collect_calls(
    items: Iterable[MatchItem], named: Callable[[MatchItem], str]
) -> dict[Pass, list[_OperatorCall]]:
    """The calls of each pass, in their order."""
    calls: dict[Pass, dict[tuple[str, str, int], _OperatorCall]] = {}
    for item in items:
        if item.scope is None:
            continue
        site = item.site
        of_pass = calls.setdefault((item.scope, site.phase), {})
        key = (site.graph, site.name, site.call)
        call = of_pass.get(key)
        if call is None:
            call = of_pass[key] = _OperatorCall(site.op, named(item), site.line)
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


def _match_calls(book: Book, eager: list[_OperatorCall], graph: list[_OperatorCall]) -> None:
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
            _skip_fused(book, *stretch)


def _same_calls(
    eager: list[_OperatorCall], graph: list[_OperatorCall], *, is_fused: bool
) -> list[tuple[int, int]]:
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


def _keeps_order(call: _OperatorCall) -> bool:
    is_forward = call.result.site.phase == "forward"
    return is_forward and any(word in call.op for word in _NEVER_PARTS)


def _link_calls(
    book: Book, eager: _OperatorCall, graph: _OperatorCall, *, with_inputs: bool
) -> None:
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
    book: Book, eager: list[_OperatorCall], graph: list[_OperatorCall], *, is_anchored: bool
) -> None:
    """Between operators that both have: of each module, the last value."""
    stretches: defaultdict[str, tuple[list[_OperatorCall], list[_OperatorCall]]] = defaultdict(
        lambda: ([], [])
    )
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


def _skip_fused(book: Book, eager: list[_OperatorCall], graph: list[_OperatorCall]) -> None:
    """Leave out what lies inside of fused kernels, before a value that is compared."""
    for item in (item for call in eager for item in call.items()):
        if item.is_left:
            book.skip(item, _FUSED)
    for item in (item for call in graph for item in (*call.outputs.values(), *call.again)):
        if item.is_left:
            book.skip(item, "{n} values of fused code are of no operator of eager code")


def _match_again(book: Book, calls: Iterable[_OperatorCall]) -> None:
    """What holds a value that was matched before belongs to the same."""
    partners = {id(link.golden): link.my for link in book.links}
    partners |= {id(link.my): link.golden for link in book.links}
    for call in calls:
        for item in call.again:
            other = partners.get(id(call.outputs.get(item.site.position)))
            if item.is_left and other is not None:
                book.link_either(item, other, "module")


def _fold_into_modules(
    book: Book, eager: list[MatchItem], graph: list[MatchItem], named: Callable[[MatchItem], str]
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
