"""Eager code against a captured graph: which of their values belong together."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from typing import TYPE_CHECKING

from paritas.comparison.matching import (
    GRAPH_LEVELS,
    align,
    held_node,
    module_prefix,
    skip_inexact,
    strip_wrappers,
)
from paritas.core.file_trees import natural_key

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator

    from paritas.comparison.operands import MatchItem, OperandLinks, Scope

    Key = tuple[Scope | None, str, str]
    Pass = tuple[Scope | None, str]


# --- Eager code against a captured graph: calls inside a module -----------------------------------

# Both sides record the module that an operator belongs to. One operator on one side can be several
# on the other, decomposed or fused. Only operators that both sides call equally often in a module
# are matched; between them, only the last value of each module.

_NO_CALLS = ("placeholder", "getitem")
# In the names of operators that no other operator decomposes to.
_NEVER_PARTS = ("mm", "conv", "embedding", "attention", "norm", "softmax")


def match_modules(operand_links: OperandLinks) -> None:
    """Link operators of eager code with nodes of graphs, and modules with their outputs."""
    for eager, graph in (
        (operand_links.my, operand_links.golden),
        (operand_links.golden, operand_links.my),
    ):
        if _has_levels(eager, ("op", "module")) and _has_levels(graph, GRAPH_LEVELS):
            _match_sides(operand_links, eager, graph)
            return


class _OperatorCall:
    """One call of an operator, with its inputs, outputs and repeated records of the outputs."""

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
        """Whether it runs several operators, so its inputs are not those of the last one."""
        return "_fused_" in self.result.site.kernel

    def items(self) -> Iterator[MatchItem]:
        yield from self.inputs.values()
        yield from self.outputs.values()

    def kind(self, *, with_inputs: bool, with_line: bool) -> Hashable:
        """A key that is equal for the same call on the other side."""
        shapes: tuple[object, ...] = ()
        if with_inputs:
            ordered_inputs = sorted(
                self.inputs.items(), key=lambda input_entry: natural_key(input_entry[0])
            )
            shapes = tuple(item.shape for _, item in ordered_inputs if item.shape is not None)
        line = self.line if with_line else ""
        return self.module, self.op, line, self.result.shape, shapes


def _has_levels(items: Iterable[MatchItem], levels: tuple[str, ...]) -> bool:
    return any(item.is_left and item.site.level in levels for item in items)


def _match_sides(
    operand_links: OperandLinks, eager: list[MatchItem], graph: list[MatchItem]
) -> None:
    named = _name_paths(operand_links, eager, graph)
    skip_inexact(operand_links, graph)
    eager_calls = _collect_calls(
        (eager_item for eager_item in eager if eager_item.site.level == "op"), named
    )
    nodes = [graph_item for graph_item in graph if graph_item.site.level in GRAPH_LEVELS]
    graph_calls = _collect_calls(
        (node for node in nodes if node.site.level == "buffer" or node.site.op not in _NO_CALLS),
        named,
    )
    _match_results(operand_links, eager, graph, named)
    for key in eager_calls.keys() & graph_calls.keys():
        _match_calls(operand_links, eager_calls[key], graph_calls[key])
    _match_again(operand_links, (call for calls in graph_calls.values() for call in calls))
    _match_shared(operand_links, eager)
    _match_shared(operand_links, graph)
    _match_program_inputs(operand_links, eager, graph)
    operand_links.skip_left(
        (graph_item for graph_item in graph if graph_item.site.op == "placeholder"),
        "graph input",
        "that eager code does not have",
    )
    operand_links.skip_left(
        (
            graph_item
            for graph_item in graph
            if graph_item.site.op == "getitem" and graph_item.site.level == "node"
        ),
        "part",
        "of results; compared with the whole result",
    )
    operand_links.skip_left(
        (
            match_item
            for match_item in (*eager, *graph)
            if match_item.site.level in ("op", "module", *GRAPH_LEVELS)
            and match_item.site.side == "input"
            and match_item.site.phase == "forward"
        ),
        "input",
        "of operators and modules; compared where computed",
    )
    if not eager_calls:
        _fold_into_modules(operand_links, eager, graph, named)


def _name_paths(
    operand_links: OperandLinks, eager: list[MatchItem], graph: list[MatchItem]
) -> Callable[[MatchItem], str]:
    """A function that returns the module path of an item, the same on both sides."""
    left = {
        strip_wrappers(eager_item.site.module) for eager_item in eager if eager_item.site.module
    }
    right = {
        strip_wrappers(graph_item.site.module)
        for graph_item in graph
        if graph_item.site.module and graph_item.site.op != "placeholder"
    }
    # The outermost module is named after its class in eager code, and has no name in a graph.
    roots = {
        eager_item.site.name
        for eager_item in eager
        if eager_item.site.level == "module" and eager_item.site.name == eager_item.site.op
    }
    prefixes = module_prefix(left - roots, right)
    if not roots:
        graph_paths = {path.removeprefix(prefixes[1]) for path in right}
        rest = {path for path in left if path.removeprefix(prefixes[0]) not in graph_paths}
        rest = {
            path
            for path in rest
            if not any(eager_path.startswith(f"{path}.") for eager_path in left)
        }
        roots = rest if len(rest) == 1 else roots
    if any(prefixes):
        whose = "eager code" if prefixes[0] else "the graph"
        operand_links.notes.append(
            f"module paths of {whose} start with {prefixes[0] or prefixes[1]!r}; this prefix was "
            f"ignored to match them"
        )
    is_mine = bool(eager) and eager[0].mine

    def strip_prefix(item: MatchItem) -> str:
        path = strip_wrappers(item.site.module)
        prefix = prefixes[item.mine != is_mine]
        if path in roots or (prefix and path == prefix.rstrip("./")):
            return ""
        return path.removeprefix(prefix)

    return strip_prefix


def _collect_calls(
    items: Iterable[MatchItem], named: Callable[[MatchItem], str]
) -> dict[Pass, list[_OperatorCall]]:
    """The calls of each pass, in order."""
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
        elif site.level != "buffer" or held_node(item):
            call.outputs[site.position] = item
    # A kernel is recorded when it reads, and can write several values: sort by the first write.
    return {
        key: sorted(
            (call for call in of_pass.values() if call.outputs), key=lambda call: call.result.at
        )
        for key, of_pass in calls.items()
    }


def _match_calls(
    operand_links: OperandLinks, eager: list[_OperatorCall], graph: list[_OperatorCall]
) -> None:
    is_fused = any(call.result.site.level == "buffer" for call in graph)
    before = (-1, -1)
    anchors = _same_calls(eager, graph, is_fused=is_fused)
    if not anchors and not any(call.module for call in eager):
        return  # nothing suggests that the two sides are related
    for at, there in [*anchors, (len(eager), len(graph))]:
        stretch = eager[before[0] + 1 : at], graph[before[1] + 1 : there]
        before = (at, there)
        is_anchored = at < len(eager)
        if is_anchored:
            _link_calls(operand_links, eager[at], graph[there], with_inputs=not is_fused)
        if not is_fused:
            _match_stretch(operand_links, *stretch, is_anchored=is_anchored)
        elif is_anchored or any(graph_call.result.found for graph_call in stretch[1]):
            _skip_fused(operand_links, *stretch)


def _same_calls(
    eager: list[_OperatorCall], graph: list[_OperatorCall], *, is_fused: bool
) -> list[tuple[int, int]]:
    """Calls that both sides have equally often, in order.

    The backward pass has no fixed order, and decompositions repeat the same few operators; there,
    only calls that occur once are certain.
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
    # An ambiguous call matches nothing on the other side.
    return align(
        [kind if kind in sure else (at, "eager") for at, kind in enumerate(kinds[0])],
        [kind if kind in sure else (at, "graph") for at, kind in enumerate(kinds[1])],
    )


def _keeps_order(call: _OperatorCall) -> bool:
    is_forward = call.result.site.phase == "forward"
    return is_forward and any(word in call.op for word in _NEVER_PARTS)


def _link_calls(
    operand_links: OperandLinks, eager: _OperatorCall, graph: _OperatorCall, *, with_inputs: bool
) -> None:
    sides = [(eager.outputs, graph.outputs)]
    if with_inputs:
        sides.append((eager.inputs, graph.inputs))
    for ours, graph_items in sides:
        for position, item in ours.items():
            other = graph_items.get(position)
            if other is not None and item.is_left and (other.is_left or other.found):
                operand_links.link_either(item, other, "module")
    inputs = (*eager.inputs.values(), *graph.inputs.values())
    operand_links.skip_left(
        (item for item in inputs if item.is_number),
        "number argument",
        "that the other side records differently",
    )


def _match_stretch(
    operand_links: OperandLinks,
    eager: list[_OperatorCall],
    graph: list[_OperatorCall],
    *,
    is_anchored: bool,
) -> None:
    """Between operators that both sides have, match the last value of each module."""
    stretches: defaultdict[str, tuple[list[_OperatorCall], list[_OperatorCall]]] = defaultdict(
        lambda: ([], [])
    )
    for side, calls in enumerate((eager, graph)):
        for call in calls:
            stretches[call.module][side].append(call)
    for ours, graph_calls in stretches.values():
        if not ours or not graph_calls:
            continue
        eager_result, other = ours[-1].result, graph_calls[-1].result
        same_line = ours[-1].line == graph_calls[-1].line or not (
            ours[-1].line and graph_calls[-1].line
        )
        if not same_line or not _are_alike(eager_result, other):
            continue
        if eager_result.is_left and (other.is_left or other.found):
            operand_links.link_either(eager_result, other, "module")
        inside = [item for call in (*ours, *graph_calls) for item in call.items()]
        operand_links.skip_left(
            inside, "value", "inside operators that the other side splits differently"
        )
    added = [item for call in graph if is_anchored for item in call.items()]
    operand_links.skip_left(
        (item for item in added if not item.site.line and not item.site.module),
        "value",
        "from nodes that the compiler added; compared at the next value",
    )


def _skip_fused(
    operand_links: OperandLinks, eager: list[_OperatorCall], graph: list[_OperatorCall]
) -> None:
    """Leave out what is inside fused kernels before a compared value."""
    operand_links.skip_left(
        (item for call in eager for item in call.items()),
        "value",
        "inside fused kernels; compared at their outputs",
    )
    operand_links.skip_left(
        (item for call in graph for item in (*call.outputs.values(), *call.again)),
        "value",
        "of fused code that belongs to no operator of eager code",
    )


def _match_again(operand_links: OperandLinks, calls: Iterable[_OperatorCall]) -> None:
    """Link a repeated record of an output with the counterpart of that output."""
    partners = _find_partners(operand_links)
    for call in calls:
        for item in call.again:
            other = partners.get(id(call.outputs.get(item.site.position)))
            if item.is_left and other is not None:
                operand_links.link_either(item, other, "module")


def _fold_into_modules(
    operand_links: OperandLinks,
    eager: list[MatchItem],
    graph: list[MatchItem],
    named: Callable[[MatchItem], str],
) -> None:
    """Leave out what is inside modules with compared outputs."""
    compared = {
        (eager_item.scope, eager_item.site.phase, named(eager_item))
        for eager_item in eager
        if eager_item.found
        and eager_item.site.level == "module"
        and eager_item.site.side == "output"
    }
    for item in graph:
        path = named(item)
        while item.is_left:
            if (item.scope, item.site.phase, path) in compared:
                operand_links.skip(item, "node", "inside modules; compared at the modules' outputs")
            if not path:
                break
            path = path.rpartition(".")[0]


# --- Eager code against a captured graph: results of modules, and inputs of the program -----------


def _are_alike(match_item: MatchItem, other: MatchItem) -> bool:
    """Whether both are tensors with the same shape and dtype."""
    first, second = match_item.record.tensor, other.record.tensor
    return (
        first is not None
        and second is not None
        and (first.shape, first.dtype) == (second.shape, second.dtype)
    )


def _match_results(
    operand_links: OperandLinks,
    eager: list[MatchItem],
    graph: list[MatchItem],
    named: Callable[[MatchItem], str],
) -> None:
    """Link a module's output with the node that leaves the module.

    Its value is read outside the module, or by nothing if it is an output of the program. Modules
    that are called several times are skipped: a graph does not say which nodes belong to which
    call. Fused code only has the outputs of the program for certain.
    """
    leaving = _find_leaving(graph, named)
    often = {
        (module_item.scope, named(module_item))
        for module_item in eager
        if module_item.site.level == "module" and module_item.site.call
    }
    for item in eager:
        site = item.site
        is_result = site.level == "module" and site.side == "output" and site.phase == "forward"
        path = named(item)
        if not is_result or not item.is_left or (item.scope, path) in often:
            continue
        read, unread = leaving.get((item.scope, site.phase, path), ((), ()))
        alike_items = [graph_item for graph_item in read if _are_alike(item, graph_item)]
        alike_items = alike_items or [
            graph_item for graph_item in unread if _are_alike(item, graph_item)
        ]
        if len(alike_items) == 1:
            operand_links.link_either(item, alike_items[0], "module")


def _find_leaving(
    graph: list[MatchItem], named: Callable[[MatchItem], str]
) -> dict[Key, tuple[list[MatchItem], list[MatchItem]]]:
    """The values of each module that are read outside it, and those that nothing reads."""
    match_items: list[MatchItem] = []
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
            (given_back if site.source == "fused" else match_items).append(item)
    # Outputs of a fused program are recorded separately.
    for item in given_back:
        leaving[item.scope, item.site.phase, ""][1].append(item)
    for item in match_items if readers else ():
        reader_paths = readers.get((item.scope, item.graph, item.site.name), set())
        path = named(item)
        while path:
            if any(
                reader_path != path and not reader_path.startswith(f"{path}.")
                for reader_path in reader_paths
            ):
                leaving[item.scope, item.site.phase, path][0].append(item)
            elif not reader_paths:
                leaving[item.scope, item.site.phase, path][1].append(item)
            path = path.rpartition(".")[0]
        if not reader_paths:
            leaving[item.scope, item.site.phase, ""][1].append(item)
    return leaving


def _match_program_inputs(
    operand_links: OperandLinks, eager: list[MatchItem], graph: list[MatchItem]
) -> None:
    """Link the inputs of the outermost module with those of the graph, except parameters."""
    inputs_by_scope: defaultdict[Scope | None, tuple[list[MatchItem], list[MatchItem]]] = (
        defaultdict(lambda: ([], []))
    )
    for item in eager:
        site = item.site
        is_root = site.level == "module" and site.name == site.op and site.phase == "forward"
        if item.is_left and is_root and site.side == "input" and not item.is_number:
            inputs_by_scope[item.scope][0].append(item)
    for item in graph:
        site = item.site
        is_given = site.op == "placeholder" and site.phase == "forward"
        # A parameter's name is a path; an argument's name has no dots.
        if item.is_left and is_given and site.module and "." not in site.module:
            inputs_by_scope[item.scope][1].append(item)
    for ours, graph_inputs in inputs_by_scope.values():
        if [eager_item.shape for eager_item in ours] == [its.shape for its in graph_inputs]:
            for eager_input, other in zip(ours, graph_inputs, strict=True):
                operand_links.link_either(eager_input, other, "module")


# --- the same memory ------------------------------------------------------------------------------

_VIEWS = re.compile(
    r"(?:aten\.)?(?:_?unsafe_)?_?(?:view|reshape|permute|transpose|t|expand|unsqueeze|squeeze|slice"
    r"|select|split|split_with_sizes|chunk|detach|alias|as_strided|unbind|narrow|diagonal|unfold)"
    r"(?:_as|_copy)?(?:\.\w+)?"
)


def _match_shared(operand_links: OperandLinks, eager: list[MatchItem]) -> None:
    """Give a module's or parameter's value the counterpart of the operator's value that it is.

    They share memory and bytes, so it is the same tensor recorded again. Views of a compared value
    are left out.
    """
    partners = _find_partners(operand_links)
    same: dict[tuple[object, ...], MatchItem] = {}
    first: dict[tuple[object, ...], MatchItem] = {}
    for item in eager:
        if item.scope is None or item.record.tensor is None or not item.record.digest:
            continue
        if item.found or item.gone:
            first.setdefault(item.memory, item)
            if item.found or item.stored_value not in same:
                same[item.stored_value] = item
    for item in eager:
        other = (
            same.get(item.stored_value) if item.is_left and item.record.tensor is not None else None
        )
        if other is not None and other.found:
            operand_links.link_either(item, partners[id(other)], "module")
        elif other is not None:
            operand_links.skip(item, "value", "recorded again; compared elsewhere")
        elif item.is_left and _VIEWS.fullmatch(item.site.op) and item.memory in first:
            operand_links.skip(item, "view", "of values that are compared themselves")


def _find_partners(operand_links: OperandLinks) -> dict[int, MatchItem]:
    """The counterpart of each linked item, by the item's id."""
    partners = {id(link.golden): link.my for link in operand_links.links}
    return partners | {id(link.my): link.golden for link in operand_links.links}
