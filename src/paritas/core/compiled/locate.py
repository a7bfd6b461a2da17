"""Find where Inductor's code first goes wrong: the first bad node, a pass, or a fused set."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from paritas.core.compiled.guard_settings import SearchOverError, require_time
from paritas.core.compiled.passes import check_graph_passes
from paritas.core.errors import in_one_line
from paritas.core.execution.graph_runs import copy_arguments
from paritas.core.execution.node_runs import NodeCall, NodeRun
from paritas.core.execution.observation import Observation
from paritas.core.execution.program import ValueProgram
from paritas.core.execution.saved_state import RandomState, Surroundings
from paritas.core.judging.failures import Explainer, make_origin, node_origin
from paritas.core.judging.pairs import Pair, judge_pair
from paritas.core.locating.values_alone import describe_call, pair_alone
from paritas.core.numerics.contents import leaves
from paritas.core.numerics.metrics import bitwise_equal
from paritas.core.results.findings import Finding, Origin, OriginKind, Status
from paritas.core.results.items import Item, ItemKind
from paritas.core.results.wording import list_first
from paritas.core.torch_private.eager_graphs import draws_by_inductor
from paritas.core.torch_private.global_state import quietly
from paritas.core.torch_private.graphs import (
    ancestors,
    as_traced,
    is_undefined,
    node_draws,
    node_traits,
    placeholders,
    provenance,
    returned_values,
    tap_values,
)
from paritas.core.torch_private.inductor import (
    ONLY_MARKED,
    compilable,
    compile_again,
    with_compiled,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from paritas.core.compiled.guarded_graphs import LoweredSuspect
    from paritas.core.time_limit import TimeLimit


# --- A graph from below AOTAutograd ---------------------------------------------------------------

# The time limit for finding a smallest set; the smallest so far is used when it runs out.
SECONDS_FOR_SETS = 40.0
SEARCH_OVER = "the time for the search was over before a node was found"
MOST_NAMED = 3
# Nodes that exceed their limit this many times less than the worst node are ignored: they may be
# just above the noise.
CLEARLY = 50.0


@quietly()
def locate(suspect: LoweredSuspect) -> list[Finding]:
    """Find where the difference starts; returns at least one finding with an origin."""
    findings: list[Finding] = []
    try:
        return _locate_in_lowered(suspect, findings)
    except SearchOverError:
        return findings or [_whole_graph_finding(suspect, SEARCH_OVER, ())]


def _locate_in_lowered(suspect: LoweredSuspect, findings: list[Finding]) -> list[Finding]:
    """Find it; `findings` gets what is known if the time runs out."""
    tapping = Tapping.of(suspect, suspect.lowered.module)
    checked = check_graph_passes(suspect.lowered)
    passes = [finding for finding in checked if finding.status is Status.DIFFERENT]
    first = first_clear_node(tapping.judged, changed=tapping.changes_results)
    node = None if first is None else first.explain()
    findings += passes if node is None else [node, *passes]
    if node is not None and node.origin is not None:
        if is_wrong_alone(suspect, node.origin.name) or passes:
            return [node, *passes]
        reason = f"{node.origin.name} is wrong, but not if it is compiled alone"
        fused = _smallest_set_finding(suspect, reason, ())
        return [node if fused is None else fused]
    return passes or [_isolate_difference(suspect, tapping)]


@dataclasses.dataclass(frozen=True)
class JudgedNode:
    """A wrong node, and its value to diagnose: that takes longer than to judge it."""

    finding: Finding
    pair: Pair | None = None

    def explain(self) -> Finding:
        """The finding about it, with its diagnosis and its picture."""
        if self.pair is None:
            return self.finding
        explained, _ = judge_pair(self.pair, explainer=Explainer())
        twin = next(other for other in explained if other.aspect is self.finding.aspect)
        return msgspec.structs.replace(self.finding, diagnosis=twin.diagnosis, picture=twin.picture)


def blame_worst(judged: list[JudgedNode], origin: Origin) -> JudgedNode:
    """The worst of some findings about values, said of the operator that computes them wrongly."""
    worst = max(judged, key=lambda judged_node: judged_node.finding.status.gravity)
    what = f"{origin.operator} gives a wrong result for correct inputs"
    reason = f"starts here: {what}; {worst.finding.reason}"
    finding = msgspec.structs.replace(
        worst.finding, reason=reason, source=origin.source or None, origin=origin
    )
    return dataclasses.replace(worst, finding=finding)


def first_clear_node(judged: list[JudgedNode], *, changed: bool) -> JudgedNode | None:
    """The first node that is clearly wrong; others are named in its reason.

    Args:
        judged: nodes with a wrong result, in the order of the graph.
        changed: whether looking at them changed the results of the program.
    """
    if not judged:
        return None
    findings = [judged_node.finding for judged_node in judged]
    clear = clear_findings(findings)[0]
    first = next(judged_node for judged_node in judged if judged_node.finding is clear)
    others = [finding for finding in findings if finding.item != clear.item]
    extra = []
    if others:
        names = dict.fromkeys(f.origin.name for f in others if f.origin is not None)
        named = list_first(names, MOST_NAMED)
        extra.append(f"other wrong nodes: {named}")
    if changed:
        extra.append("observing it changed the program: with every value as an output, other bits")
    reason = "; ".join([clear.reason, *extra])
    return dataclasses.replace(first, finding=msgspec.structs.replace(clear, reason=reason))


def clear_findings(findings: list[Finding]) -> list[Finding]:
    """Those that are not just above the noise, compared with the worst."""
    worst = max(map(_excess_of_limit, findings), default=0.0)
    return [finding for finding in findings if _excess_of_limit(finding) * CLEARLY >= worst]


def _excess_of_limit(finding: Finding) -> float:
    """How far a node exceeds its limit; infinite for a wrong integer or shape."""
    return math.inf if finding.native is None else finding.native.excess


def _isolate_difference(suspect: LoweredSuspect, tapping: Tapping) -> Finding:
    """Locate a difference that no single node shows: a fusion, a layout, the order of outputs."""
    again = run_variant(suspect)
    if not shows_difference(suspect, again):
        return _whole_graph_finding(
            suspect, "the difference does not occur when the graph is compiled once more", ()
        )
    if tapping.error:
        what_was_seen = f"the graph could not be tapped ({tapping.error})"
    elif tapping.shows:
        what_was_seen = "no single node is wrong"
    else:
        what_was_seen = (
            "observing it changed the program: with every value as an output, it is correct"
        )
    away = tuple(find_remedies(suspect))
    smallest_set_finding = _smallest_set_finding(suspect, what_was_seen, away)
    if smallest_set_finding is not None:
        return smallest_set_finding
    return _whole_graph_finding(
        suspect, f"{what_was_seen}, and no set of compiled nodes shows it", away
    )


def _smallest_set_finding(
    suspect: LoweredSuspect, what_was_seen: str, away: tuple[str, ...]
) -> Finding | None:
    """A finding about the nodes that show it when compiled together; None if none do."""
    nodes = find_smallest_set(suspect, SECONDS_FOR_SETS)
    if not nodes:
        return None
    by_name = {node.name: node for node in suspect.lowered.module.graph.nodes}
    where = provenance(by_name[nodes[0]])
    kind = OriginKind.NODE if len(nodes) == 1 else OriginKind.FUSION
    if len(nodes) > 1:
        shown = f"compiling {', '.join(nodes[:-1])} and {nodes[-1]} together shows it"
    else:
        shown = f"compiling {nodes[0]} alone shows it"
    origin = make_origin(kind, ", ".join(nodes), where, tuple(nodes), away)
    return suspect.place(origin, f"{what_was_seen}; {shown}", suspect.failures[0])


def _whole_graph_finding(suspect: LoweredSuspect, why: str, away: tuple[str, ...]) -> Finding:
    """A finding about the whole graph, at the node behind the first failing output."""
    outputs = dict(
        zip(
            suspect.runs.program.reference.outputs,
            returned_values(suspect.lowered.module),
            strict=False,
        )
    )
    node: Node | None = None
    for finding in suspect.failures:
        node = node or outputs.get(finding.item.in_graph(""))
    where = provenance(node) if node is not None else None
    named = (node.name,) if node is not None else ()
    origin = make_origin(OriginKind.GRAPH, suspect.label, where, named, away)
    return suspect.place(origin, why, suspect.failures[0])


# --- The first node that is wrong although its inputs are right -----------------------------------

# The graph is compiled once more with every value as an output. Each node is then judged alone: its
# operator runs, natively and in float64, on the compiled code's own values for its inputs, and the
# result is compared with the compiled code's own value for the node.


@dataclasses.dataclass(frozen=True)
class Tapping:
    """The results of tapping a graph.

    Attributes:
        variant: the compilation that returns every value.
        judged: the nodes with a wrong result, in the order of the graph.
        error: why it could not be tapped, or "".
    """

    suspect: LoweredSuspect
    variant: CompiledVariant
    judged: list[JudgedNode]
    error: str = ""

    @classmethod
    def of(
        cls, suspect: LoweredSuspect, module: GraphModule, options: dict[str, Any] | None = None
    ) -> Tapping:
        """Compile with every value as an output and look for wrong nodes."""
        tapped, names = tap_values(module)
        variant = run_variant(suspect, tapped, options)
        if variant.error is not None:
            return cls(suspect, variant, [], in_one_line(variant.error, 100))
        values = dict(zip(names, variant.extra, strict=True))
        return cls(suspect, variant, _wrong_nodes(suspect, values, variant))

    @functools.cached_property
    def shows(self) -> bool:
        """Whether the tapped program still differs."""
        return shows_difference(self.suspect, self.variant)

    @functools.cached_property
    def changes_results(self) -> bool:
        """Whether tapping changed the bits of any output."""
        for name, value in self.suspect.candidate.outputs.items():
            other = self.variant.observation.outputs.get(name)
            if not isinstance(value, torch.Tensor) or not isinstance(other, torch.Tensor):
                continue
            if value.shape != other.shape or not bitwise_equal(value.detach(), other.detach()):
                return True
        return False


def is_wrong_alone(suspect: LoweredSuspect, name: str) -> bool:
    """Whether a node is wrong if only that node is compiled; True if that compilation fails."""
    module = with_compiled(suspect.lowered.module, {name})
    tapping = Tapping.of(suspect, module, ONLY_MARKED)
    origins = [judged_node.finding.origin for judged_node in tapping.judged]
    return bool(tapping.error) or name in {origin.name for origin in origins if origin is not None}


def _wrong_nodes(
    suspect: LoweredSuspect, values: dict[str, Any], variant: CompiledVariant
) -> list[JudgedNode]:
    module = suspect.runs.program.reference.module
    traced = {node.name: node for node in suspect.lowered.module.graph.nodes}
    table: dict[Node, Any] = dict(zip(placeholders(module), suspect.runs.program.kept, strict=True))
    wrong_nodes = []
    for node in module.graph.nodes:
        judged: list[JudgedNode] = []
        if node.op == "get_attr":
            table[node] = operator.attrgetter(str(node.target))(module)
        elif node.op == "call_function" and _is_write(node):
            judged = _check_write(suspect, node, table, variant)
        elif node.op == "call_function":
            candidate_value = values.get(node.name)
            table[node] = candidate_value if node.name in values else _evaluate_node(node, table)
            is_known = not is_undefined(traced[node.name]) and not _cannot_be_drawn_alone(node)
            if is_known and isinstance(candidate_value, torch.Tensor):
                judged = _judge_node(suspect, node, table, candidate_value)
        if judged:
            wrong_nodes.append(blame_worst(judged, node_origin(traced[_computing(node).name])))
    return wrong_nodes


def _computing(node: Node) -> Node:
    """The node that computes a value: not the one that takes it from several results."""
    source = node.args[0] if node.target is operator.getitem else node
    return source if isinstance(source, Node) else node


def _judge_node(
    suspect: LoweredSuspect, node: Node, table: dict[Node, Any], candidate_value: torch.Tensor
) -> list[JudgedNode]:
    """Judge the compiled code's value for a node; only what does not pass is returned."""
    pair = pair_node(
        suspect.runs.program.reference.module,
        node,
        table,
        candidate_value,
        item=_node_item(suspect, _computing(node)),
        seed=suspect.runs.seed,
        lifted_agrees=suspect.settings.lifted_agrees,
    )
    findings = [] if pair is None else judge_pair(pair)[0]
    return [JudgedNode(finding, pair) for finding in findings if not finding.status.passes()]


def pair_node(
    module: GraphModule,
    node: Node,
    table: dict[Node, Any],
    candidate_value: torch.Tensor,
    *,
    item: Item,
    seed: int,
    lifted_agrees: bool | None = None,
) -> Pair | None:
    """What a node of a reference's module gives alone, and other code's value for it, to be judged.

    Args:
        table: the other code's values for every node that this one reads.
        item: the item of the findings.
        seed: of the perturbations.
        lifted_agrees: whether the fault vanishes in float64, if that is known.

    Returns:
        None if the node cannot be run alone.
    """
    computing = _computing(node)
    path: Any = () if computing is node else (node.args[1],)
    values = {read.name: table[read] for read in computing.all_input_nodes}
    run = NodeRun(None, Surroundings.now(), wrote=(node.name,) if _is_write(computing) else ())
    call = NodeCall(module, computing, run, values)
    program = ValueProgram(
        lambda options: call.prepare(options, path, ""),
        [value for _, value in leaves([*call.operands(), node.meta.get("val")])],
    )
    context = functools.partial(describe_call, call, lifted_agrees=lifted_agrees)
    return pair_alone(item, program, candidate_value, seed, context)


def _check_write(
    suspect: LoweredSuspect, node: Node, table: dict[Node, Any], variant: CompiledVariant
) -> list[JudgedNode]:
    """Check that an input that is written at the end holds the value computed for it."""
    target, source = node.args[0], node.args[1] if len(node.args) > 1 else None
    inputs = placeholders(suspect.runs.program.reference.module)
    table[node] = table.get(source) if isinstance(source, Node) else None
    value = table[node]
    plain = str(node.target) == "aten.copy_.default" and isinstance(target, Node)
    if not plain or target not in inputs or not isinstance(value, torch.Tensor):
        return []
    after = variant.arguments[inputs.index(target)]  # type: ignore[arg-type]
    expected = value.to(after.dtype).expand(after.shape)
    if bitwise_equal(after.detach(), expected.detach().contiguous()):
        return []
    item = _node_item(suspect, node)
    findings, _ = judge_pair(Pair(item, expected.detach(), after.detach()))
    return [JudgedNode(finding) for finding in findings if not finding.status.passes()]


def _node_item(suspect: LoweredSuspect, node: Node) -> Item:
    return Item(ItemKind.NODE, node.name, graph=suspect.label)


def _evaluate_node(node: Node, table: dict[Node, Any]) -> Any:
    """Compute a value that was not tapped: sizes, tuples.

    None if that raises, which an operator of anybody may do, and in any way. What reads it then
    raises as well when it is run alone, so it is not judged: a fault there is found by the sets of
    nodes that show it, not by its own value.
    """
    try:
        with as_traced():
            args = map_arg(node.args, table.__getitem__)
            kwargs = map_arg(node.kwargs, table.__getitem__)
            return node.target(*args, **kwargs)  # type: ignore[operator]
    except Exception:  # noqa: BLE001  (see above: nodes that need it are not judged)
        return None


def _is_write(node: Node) -> bool:
    kind = node_traits(node)
    return kind is not None and bool(kind.mutates)


def _cannot_be_drawn_alone(node: Node) -> bool:
    """Whether a node creates seeds or draws from torch's generators: it cannot run alone."""
    target: Any = node.target
    if draws_by_inductor(target):
        return "seeds" in getattr(target, "__name__", str(target))
    return node_draws(node)


# --- The smallest set of nodes that shows the difference ------------------------------------------

# Options that each switch off one optimisation of Inductor, and how to write them.
REMEDY_SWITCHES: tuple[tuple[dict[str, Any], str], ...] = (
    ({"layout_optimization": False}, "layout_optimization=False"),
    ({"max_fusion_size": 1}, "max_fusion_size=1"),
    ({"pattern_matcher": False}, "pattern_matcher=False"),
    ({"inplace_buffers": False}, "inplace_buffers=False"),
    ({"allow_buffer_reuse": False}, "allow_buffer_reuse=False"),
    ({"epilogue_fusion": False}, "epilogue_fusion=False"),
    ({"split_reductions": False}, "split_reductions=False"),
    ({"emulate_precision_casts": True}, "emulate_precision_casts=True"),
)


def find_remedies(suspect: LoweredSuspect) -> list[str]:
    """The compiler options that each make the difference disappear."""
    remedies = []
    for options, text in REMEDY_SWITCHES:
        if set(options) - set(suspect.lowered.options):
            continue  # this torch has no such option
        if all(suspect.lowered.options[key] == value for key, value in options.items()):
            continue
        variant = run_variant(suspect, options=options)
        if variant.error is None and not shows_difference(suspect, variant):
            remedies.append(text)
    return remedies


def find_smallest_set(suspect: LoweredSuspect, seconds: float) -> list[str]:
    """The smallest set of compiled nodes that still shows the difference; [] if none does.

    Removing any one of them hides it, unless the search ran out of time.
    """
    failed = {finding.item for finding in suspect.failures}
    outputs = returned_values(suspect.lowered.module)
    named = zip(suspect.runs.program.reference.outputs, outputs, strict=False)
    wrong = [node for item, node in named if item.in_graph(suspect.label) in failed]
    before = ancestors(wrong) if wrong else None
    names = [
        name for name in compilable(suspect.lowered.module) if before is None or name in before
    ]

    def shows(compiled_nodes: list[str]) -> bool:
        module = with_compiled(suspect.lowered.module, set(compiled_nodes))
        return shows_difference(suspect, run_variant(suspect, module, ONLY_MARKED))

    if not names or not shows(names):
        return []
    return minimise(names, shows, suspect.settings.limit.shorten(seconds))


def minimise(items: list[str], shows: Callable[[list[str]], bool], limit: TimeLimit) -> list[str]:
    """Delta debugging: drop ever smaller parts as long as `shows` is true for the rest."""
    answers: dict[tuple[str, ...], bool] = {}

    def still(part: list[str]) -> bool:
        key = tuple(part)
        if key not in answers:
            answers[key] = bool(part) and shows(part)
        return answers[key]

    parts = 2
    while len(items) > 1 and not limit.is_over:
        size = max(1, -(-len(items) // parts))
        pieces = [items[start : start + size] for start in range(0, len(items), size)]
        smaller = _first_that_shows(items, pieces, still, limit)
        if smaller is not None:
            parts = 2 if len(smaller) <= size else max(2, parts - 1)
            items = smaller
        elif size == 1:
            break
        else:
            parts = min(len(items), 2 * parts)
    return items


def _first_that_shows(
    items: list[str],
    pieces: list[list[str]],
    still: Callable[[list[str]], bool],
    limit: TimeLimit,
) -> list[str] | None:
    alone = pieces if len(pieces) == 2 else []  # noqa: PLR2004  (smaller pieces rarely show it)
    rests = [[item for item in items if item not in piece] for piece in pieces]
    for part in (*alone, *rests):
        if limit.is_over:
            return None
        if len(part) < len(items) and still(part):
            return part
    return None


# --- Other compilations of a suspect graph --------------------------------------------------------

# Our own compilations must neither read nor fill the user's cache.
_UNCACHED = {"fx_graph_cache": False}


@dataclasses.dataclass
class CompiledVariant:
    """The results of one compilation.

    Attributes:
        observation: its outputs and the inputs it wrote to, by name.
        arguments: its arguments after the call.
        extra: outputs beyond those of the graph.
        error: the exception from compiling or running it.
    """

    observation: Observation
    arguments: list[Any]
    extra: list[Any]
    error: Exception | None = None


def run_variant(
    suspect: LoweredSuspect,
    module: GraphModule | None = None,
    options: dict[str, Any] | None = None,
) -> CompiledVariant:
    """Compile the graph, or a changed copy of it, with additional options, and run it.

    Raises:
        SearchOverError: there is no time left for it.
    """
    require_time(suspect.settings.limit)
    lowered = suspect.lowered if module is None else suspect.lowered.with_module(module)
    arguments = copy_arguments(suspect.runs.program.kept)
    observation = Observation(rng_before=suspect.runs.program.rng)
    try:
        compiled = compile_again(lowered, {**(options or {}), **_UNCACHED})
        suspect.runs.program.rng.restore()
        results = list(compiled(list(arguments)))
    except Exception as error:  # noqa: BLE001  (a variant that fails shows nothing)
        return CompiledVariant(observation, arguments, [], error)
    observation.rng_after = RandomState.now()
    count = len(suspect.runs.program.reference.outputs)
    suspect.runs.program.reference.name_results(observation, results[:count], arguments)
    return CompiledVariant(observation, arguments, results[count:])


def shows_difference(suspect: LoweredSuspect, variant: CompiledVariant) -> bool:
    """Whether a variant has one of the suspect's failures."""
    if variant.error is not None:
        return False
    failure_keys = {(finding.path, finding.aspect) for finding in suspect.failures}
    return any(
        (finding.path, finding.aspect) in failure_keys and not finding.status.passes()
        for finding in suspect.compare(variant.observation, variant.arguments)
    )
