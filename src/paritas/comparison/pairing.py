"""Which values of two dumps belong together: modules, selections, and the list of all pairs."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter, defaultdict
from typing import TYPE_CHECKING

import msgspec

from paritas.comparison.matching import (
    GRAPH_LEVELS,
    align,
    align_graphs,
    held_node,
    match_ids,
    match_nodes,
    match_prefixed,
    match_renamed,
    module_prefix,
    node_key,
    skip_inexact,
    skip_rewritten,
    strip_wrappers,
)
from paritas.comparison.operands import NearestNames, OperandLinks, Pair
from paritas.comparison.ordering import match_order
from paritas.comparison.rules import span_text
from paritas.core.errors import UsageError
from paritas.core.file_trees import natural_key
from paritas.formats.dumps.selection import Selection, SelectionFilter

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence

    from paritas.comparison.operands import MatchItem, Operand, Scope
    from paritas.comparison.rules import Rules
    from paritas.formats.dumps.opening import ReadableDump

    Key = tuple[Scope | None, str, str]
    Pass = tuple[Scope | None, str]
    # Step, rank and number on the golden side, then the number on mine.
    Place = tuple[int, int, int, int, int]


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


# --- Eager code against a captured graph: calls inside a module -----------------------------------

# Both sides record the module that an operator belongs to. One operator on one side can be several
# on the other, decomposed or fused. Only operators that both sides call equally often in a module
# are matched; between them, only the last value of each module.

_NO_CALLS = ("placeholder", "getitem")
# In the names of operators that no other operator decomposes to.
_NEVER_PARTS = ("mm", "conv", "embedding", "attention", "norm", "softmax")


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


def match_modules(operand_links: OperandLinks) -> None:
    """Link operators of eager code with nodes of graphs, and modules with their outputs."""
    for eager, graph in (
        (operand_links.my, operand_links.golden),
        (operand_links.golden, operand_links.my),
    ):
        if _has_levels(eager, ("op", "module")) and _has_levels(graph, GRAPH_LEVELS):
            _match_sides(operand_links, eager, graph)
            return


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


# --- Values that were not selected when the other dump was recorded -------------------------------

# The header of a dump has the recorded selection: steps, names, operators, sides, phases, ranks.
# Values of the other side that are outside it are listed as not selected. Values that are inside it
# and missing still fail.

_EVERYTHING = Selection()


@dataclasses.dataclass(frozen=True)
class RecordedSelection:
    """The selection that a dump was recorded with.

    Attributes:
        fusion: how its code was fused, if it is a dump of fused code.
    """

    selection: Selection = _EVERYTHING
    fusion: str = ""

    @classmethod
    def of(cls, dump: ReadableDump) -> RecordedSelection:
        """Read it from the header; without one, everything was selected."""
        header = dump.header(min(dump.ranks))
        fusion = header.fusion if "fused" in header.sources else ""
        try:
            return cls(Selection.from_header(header.selection), fusion)
        except UsageError:  # not the selection of a recording
            return cls(fusion=fusion)


def _leave_out_unselected(
    operand_links: OperandLinks,
    my: RecordedSelection,
    golden: RecordedSelection,
    *,
    of_graphs: bool = False,
) -> None:
    """Set aside values without a counterpart that the other side's selection excludes.

    Args:
        of_graphs: only values of graphs, if both sides have graphs: only nodes can match them.
    """
    for items, others, other_selection, own_selection in (
        (operand_links.my, operand_links.golden, golden, my),
        (operand_links.golden, operand_links.my, my, golden),
    ):
        if other_selection.selection != _EVERYTHING:
            same_code = own_selection.fusion == other_selection.fusion
            outside = _OutsideSelection(items, others, other_selection, same_code=same_code)
            outside.leave_out(operand_links, of_graphs=of_graphs)


def _note_unselected(operand_links: OperandLinks) -> list[str]:
    """How many values of either side were not selected, and why."""
    counts = Counter((item.mine, why) for item, why in operand_links.unselected)
    notes = []
    for (is_mine, why), count in counts.items():
        side, other = ("my", "the golden") if is_mine else ("golden", "my")
        values, they = ("value was", "it is") if count == 1 else ("values were", "they are")
        notes.append(
            f"{count} {side} {values} not selected when {other} dump was recorded ({why}); {they} "
            f"listed but cannot fail"
        )
    return notes


class _OutsideSelection:
    """Finds values of one side that are outside the selection of the other."""

    def __init__(
        self,
        items: list[MatchItem],
        others: list[MatchItem],
        recorded_selection: RecordedSelection,
        *,
        same_code: bool,
    ) -> None:
        self._items = items
        self._selection = recorded_selection.selection
        self._words = recorded_selection.selection.describe()
        self._sieve = SelectionFilter(recorded_selection.selection)
        self._same_code = same_code
        self._families = {_name_family(item) for item in others}
        self._fused = {item.graph for item in others if item.site.level == "buffer"}
        for item in items:
            self._wants_name(item)
        # Names that do not occur on this side cannot select anything on it.
        self._understood = not self._sieve.unmet()

    def leave_out(self, operand_links: OperandLinks, *, of_graphs: bool) -> None:
        """Outputs first: the input of a node is the output of another."""
        makers: dict[object, str] = {}
        items = self._items
        if of_graphs:
            has_graphs = "graph" in self._families
            items = [item for item in items if has_graphs and _name_family(item) == "graph"]
        for side in ("output", "input"):
            for item in items:
                if item.site.side != side or item.found or item.gone:
                    continue
                why = self._why(item)
                if not why and side == "input" and item.graph in self._fused and item.site.nodes:
                    # Fused code reads buffers, not the inputs of each node.
                    why = makers.get(_node_value_key(item, item.site.nodes[-1]), "")
                if why:
                    operand_links.leave_unselected(item, why)
                    makers[_node_value_key(item, item.site.name)] = why

    def _why(self, item: MatchItem) -> str:
        """The part of the selection that excludes an item; empty if it is selected."""
        selection, site = self._selection, item.site
        if item.scope is None and not selection.wants_step(item.operand.step):
            return self._list_options("steps", "every")
        if not any(selection.wants_rank(rank) for rank in item.operand.ranks):
            return self._list_options("ranks")
        if selection.phases is not None and site.phase not in selection.phases:
            return self._list_options("phases")
        if selection.mode not in ("all", site.side):
            return self._list_options("mode")
        is_comparable = self._understood or _name_family(item) in self._families
        if is_comparable and not self._wants_name(item):
            return self._list_options("layers", "ops")
        return ""

    def _list_options(self, *parts: str) -> str:
        return ", ".join(f"{part} {self._words[part]}" for part in parts if part in self._words)

    def _wants_name(self, item: MatchItem) -> bool:
        site = item.site
        if site.level == "buffer" and not self._same_code:
            # Code that is fused differently has the value, but not the nodes before it.
            site = msgspec.structs.replace(site, nodes=site.nodes[-1:])
        return self._sieve.wants_name(site)


def _node_value_key(item: MatchItem, node: str) -> tuple[object, ...]:
    """Also valid for a step that the other side does not have."""
    return item.operand.step, node_key(item, node)


def _name_family(item: MatchItem) -> str:
    """Nodes and buffers of graphs share names, and so do modules and their calls."""
    return "graph" if item.site.level in GRAPH_LEVELS else "eager"


# --- All pairs ------------------------------------------------------------------------------------

# Each of these is tried on what the previous ones have left:
#
# 1. the user's rename rules;
# 2. the canonical name;
# 3. the node of a captured graph that computed the value, for fused code and graph engines;
# 4. the module and the operator, for eager code against graphs, and names with a prefix;
# 5. the weights and values of a call;
# 6. order and shape, between what is matched by then.
#
# Before the last one, values that the other dump did not select are set aside: they have no
# counterpart to guess.
#
# Values that are not values of the program, or are compared elsewhere, are left out and counted.
# What remains has no counterpart, and gets the most similar names.


@dataclasses.dataclass(frozen=True)
class Matches:
    """The result of matching.

    Attributes:
        pairs: in the program order of the golden side. A value that only my side has follows its
            predecessor in mine. An operand may be in several pairs: a kernel that reads a value is
            compared with the node that computed it.
        skipped: why values were left out, with counts.
        not_selected: values that the other dump's selection excludes.
        notes: for the user.
    """

    pairs: list[Pair]
    skipped: list[str]
    not_selected: list[Pair]
    notes: list[str]


def match(
    my: Sequence[Operand],
    golden: Sequence[Operand],
    rules: Rules,
    steps: Mapping[int, int],
    selections: tuple[RecordedSelection, RecordedSelection] = (
        RecordedSelection(),
        RecordedSelection(),
    ),
) -> Matches:
    """Match the operands of two dumps.

    Args:
        my: in program order.
        golden: in program order.
        rules: the user's rules.
        steps: my steps, and the golden steps they match.
        selections: the recorded selections of my dump and the golden one.
    """
    operand_links = OperandLinks(my, golden, steps)
    _leave_out(operand_links, rules)
    match_renamed(operand_links, rules.renamings)
    match_ids(operand_links)
    align_graphs(operand_links)
    match_nodes(operand_links)
    _leave_out_unselected(operand_links, *selections, of_graphs=True)
    skip_rewritten(operand_links)
    match_modules(operand_links)
    match_prefixed(operand_links)
    _leave_out_unselected(operand_links, *selections)
    match_order(operand_links)
    alone = [
        Pair(item.operand, None, "") if item.mine else Pair(None, item.operand, "")
        for item, _ in operand_links.unselected
    ]
    notes = [*operand_links.notes, *_note_unselected(operand_links)]
    return Matches(
        _make_pairs(operand_links, steps), operand_links.describe_skipped(), alone, notes
    )


def _leave_out(operand_links: OperandLinks, rules: Rules) -> None:
    for whose, items in (("my", operand_links.my), ("the golden", operand_links.golden)):
        unselected = span_text({item.operand.step for item in items if item.scope is None})
        for item in items:
            if rules.ignores(item.record.id, item.site.module):
                operand_links.skip(item, "value", f"of {whose} dump, ignored as requested")
            elif item.scope is None and rules.steps:
                operand_links.skip(
                    item, "value", f"of {whose} dump in unselected steps {unselected}"
                )


def _make_pairs(operand_links: OperandLinks, steps: Mapping[int, int]) -> list[Pair]:
    """All pairs, in program order."""
    placed: list[tuple[Place, Pair]] = []
    homes: dict[int, Place] = {
        id(link.my): _order_key(link.golden) for link in operand_links.links if link.is_home
    }
    # For each of my items, the golden position of the last matched item before it.
    behind: dict[int, Place] = {}
    at: dict[tuple[int, int], Place] = {}
    for item in operand_links.my:
        operand = item.operand
        key = (operand.step, operand.record.rank)
        step = steps.get(operand.step, operand.step)
        at[key] = homes.get(id(item)) or at.get(key, (step, key[1], -1, 0, 0))
        behind[id(item)] = (*at[key][:3], 1, item.at)
    for link in operand_links.links:
        # A repeated read is listed where it reads, not where the value was computed.
        is_own = link.is_home or link.golden.site.side == "input"
        where = _order_key(link.golden) if is_own else behind[id(link.my)]
        placed.append((where, Pair(link.operand, link.golden.operand, link.by)))
    placed += _list_unmatched(operand_links, behind)
    placed.sort(key=lambda placed_pair: placed_pair[0])
    return [pair for _, pair in placed]


def _order_key(item: MatchItem) -> Place:
    record = item.record
    return (record.step, record.rank, item.at, 0, 0)


def _list_unmatched(
    operand_links: OperandLinks, behind: dict[int, Place]
) -> list[tuple[Place, Pair]]:
    """Items without a counterpart, with the most similar names."""
    alone = [
        [item for item in side if not item.found and not item.gone]
        for side in (operand_links.my, operand_links.golden)
    ]
    unmatched_pairs: list[tuple[Place, Pair]] = []
    for items, others, side in zip(
        alone, alone[::-1], (operand_links.golden, operand_links.my), strict=True
    ):
        if not items:
            continue
        near = NearestNames(other_item.record.id for other_item in others or side)
        for item in items:
            names = near.of(item.record.id)
            if item.mine:
                unmatched_pairs.append((behind[id(item)], Pair(item.operand, None, "", names)))
            else:
                unmatched_pairs.append((_order_key(item), Pair(None, item.operand, "", names)))
    return unmatched_pairs
