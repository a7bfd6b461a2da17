"""Run a captured graph node by node in eager and record it; graphs as text."""

from __future__ import annotations

import datetime as dt
import functools
import operator
import os
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch.fx import Interpreter, Node

from paritas.core.execution.saved_state import Copier, RandomState
from paritas.core.numerics.bits import dtype_name
from paritas.core.numerics.metrics import bitwise_equal
from paritas.core.torch_private.buffers import SeenBuffer
from paritas.core.torch_private.eager_graphs import use_twins
from paritas.core.torch_private.graphs import (
    as_traced,
    copy_graph,
    is_view,
    lowered_input_names,
    placeholders,
    provenance,
)
from paritas.formats.files.records import Observed, Site
from paritas.formats.foreign.ge_calls import Operator
from paritas.formats.foreign.ge_graph_text import (
    FusedFacts,
    NodeFacts,
    ValueFacts,
    optimized_graph_text,
    original_graph_text,
)
from paritas.formats.foreign.npy_tree import call_name, time_stamp

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from torch.fx import GraphModule

    from paritas.core.torch_private.buffers import Buffer, Kernel
    from paritas.core.torch_private.inductor import LoweredGraph
    from paritas.formats.files.records import Phase, Source
    from paritas.formats.foreign.ge_calls import SiteKey
    from paritas.recording.session import RecordingSession


# --- Does recording change what is computed? ------------------------------------------------------


def observe_once(
    label: str,
    plain: Callable[..., Sequence[Any]],
    watched: Callable[[list[Any]], Sequence[Any]],
    args: list[Any],
    changes: Iterable[int],
) -> tuple[Sequence[Any], Observed]:
    """Run a graph with and without recording on equal arguments, and compare bit for bit.

    The results, written arguments and random state that remain are those of the plain run.

    Args:
        label: the name of the graph.
        plain: runs the graph without recording; takes the arguments one by one.
        watched: runs it with recording; takes the arguments in a list.
        args: the arguments, which the plain run may write to.
        changes: positions of the arguments that may be written to.
    """
    copier = Copier()
    copies = [copier.copy_tensor(v) if isinstance(v, torch.Tensor) else v for v in args]
    before = RandomState.of_torch()
    recorded_results = watched(list(copies))
    after_watched = RandomState.of_torch()
    before.restore()
    results = plain(*args)
    pairs = [
        (f"output {i}", a, b)
        for i, (a, b) in enumerate(zip(results, recorded_results, strict=True))
    ]
    pairs += [(f"input {i} after it", args[i], copies[i]) for i in changes]
    observed = compare_results(label, pairs)
    if observed.status == "unchanged" and not after_watched.same_torch(RandomState.of_torch()):
        observed = Observed(graph=label, status="changed", detail="the final random state differs")
    return results, observed


def compare_results(label: str, pairs: list[tuple[str, Any, Any]]) -> Observed:
    """Whether recording changed results: (name, plain value, recorded value) of each."""
    worst, changed = 0.0, []
    for name, plain, watched in pairs:
        if not isinstance(plain, torch.Tensor):
            if plain != watched:
                changed.append(name)
            continue
        plain_tensor, watched_tensor = plain.detach(), watched.detach()
        same_shape = plain_tensor.shape == watched_tensor.shape
        if (
            same_shape
            and plain_tensor.dtype == watched_tensor.dtype
            and bitwise_equal(plain_tensor, watched_tensor)
        ):
            continue
        changed.append(name)
        if same_shape and plain_tensor.numel() and plain_tensor.is_floating_point():
            worst = max(worst, float((plain_tensor.double() - watched_tensor.double()).abs().max()))
    if not changed:
        return Observed(
            graph=label, status="unchanged", detail=f"{len(pairs)} values are equal bit for bit"
        )
    names = ", ".join(changed[:3]) + (", ..." if len(changed) > 3 else "")  # noqa: PLR2004
    detail = f"{len(changed)} of {len(pairs)} values differ ({names}), by at most {worst:.3g}"
    return Observed(graph=label, status="changed", detail=detail)


# --- A graph run node by node ---------------------------------------------------------------------


class NodeSites:
    """The sites of a graph's nodes."""

    def __init__(
        self,
        module: GraphModule,
        graph: str,
        source: Source,
        captured: list[str],
        *,
        is_backward: bool,
    ) -> None:
        """`captured`: the input names of the captured graph that it comes from."""
        self.graph = graph
        self.phase: Phase = "backward" if is_backward else "forward"
        self._source: Source = source
        self._nodes = {node.name: node for node in module.graph.nodes}
        names = lowered_input_names(module, captured)
        self._inputs = {
            node.name: name for node, name in zip(placeholders(module), names, strict=True)
        }

    @functools.cache  # noqa: B019  (it exists as long as its graph)
    def of(self, name: str) -> Site:
        """The site of a node's value."""
        site = Site(
            source=self._source,
            level="node",
            phase=self.phase,
            graph=self.graph,
            name=name,
            nodes=(name,),
        )
        if name in self._inputs:
            captured_name = self._inputs[name]
            module = "" if captured_name == name else captured_name
            return msgspec.structs.replace(site, op="placeholder", module=module)
        node_provenance = provenance(self._nodes[name])
        return msgspec.structs.replace(
            site,
            op=node_provenance.operator,
            module=node_provenance.module,
            line=node_provenance.source,
            code=node_provenance.code,
        )


class RecordedGraph:
    """A callable that takes its arguments in a list and empties it, as compiled code does."""

    def __init__(
        self,
        lowered: LoweredGraph,
        session: RecordingSession,
        graph: str,
        captured: list[str],
        entry: Any,
    ) -> None:
        """`entry`: the compiled function of the user, which starts a step."""
        # torch's wrappers look for it on the instance.
        self._boxed_call = True
        self.module = copy_graph(lowered.module)
        self.session = session
        self.sites = NodeSites(
            lowered.module, graph, "fx", captured, is_backward=lowered.is_backward
        )
        self._entry = entry
        self._observed = False
        use_twins(self.module)

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        """Run the graph, and record it if wanted."""
        if self.sites.phase == "forward":
            self.session.enter(self._entry)
        arguments = list(args)
        args.clear()
        with as_traced():
            if not self.session.active:
                return self.module.forward(*arguments)  # type: ignore[no-any-return]
            if self._observed:
                return self._record(arguments)
            self._observed = True
            label = f"{self.sites.graph} {self.sites.phase}"
            results, observed = observe_once(
                label, self.module.forward, self._record, arguments, changes=range(len(arguments))
            )
            self.session.note_observed(observed)
            return results

    def _record(self, arguments: list[Any]) -> Sequence[Any]:
        call = self.session.next_call(f"{self.sites.graph} {self.sites.phase}")
        results: Sequence[Any] = _RecordingInterpreter(
            self.module, self.session, self.sites, call
        ).run(*arguments)
        return results


class _RecordingInterpreter(Interpreter):
    def __init__(
        self, module: GraphModule, session: RecordingSession, sites: NodeSites, call: int
    ) -> None:
        super().__init__(module)
        self._session = session
        self._sites = sites
        self._call = call

    def run_node(self, n: Node) -> Any:
        if n.op in {"output", "get_attr"}:
            return super().run_node(n)
        site = msgspec.structs.replace(self._sites.of(n.name), call=self._call)
        if n.op != "placeholder":
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            # Before it runs, since it may write to them.
            for argument_position, value in operator_arguments(args, kwargs):
                input_site = msgspec.structs.replace(site, side="input", position=argument_position)
                if self._session.wants(input_site):
                    made_by = producer_of(n, argument_position)
                    nodes = (made_by,) if made_by else ()
                    self._session.put(msgspec.structs.replace(input_site, nodes=nodes), value)
        result = super().run_node(n)
        if isinstance(result, list | tuple):
            for position, value in enumerate(result):
                self._put(msgspec.structs.replace(site, position=str(position)), value)
        else:
            self._put(site, result)
        return result

    def _put(self, site: Site, value: Any) -> None:
        if self._session.wants(site):
            self._session.put(site, value)


def producer_of(node: Node, argument_position: str) -> str:
    """The node that computed the argument at a position, or an empty string."""
    first, *inner = argument_position.split(".")
    argument: Any = node.kwargs.get(first)
    if first.isdecimal():
        argument = node.args[int(first)]
    for key in inner:
        # The values of a multi-output node are separated only at run time.
        if not isinstance(argument, list | tuple):
            break
        argument = argument[int(key)]
    return argument.name if isinstance(argument, Node) else ""


def operator_arguments(args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """All arguments of an operator with their positions: `0`, `1.2` within a list, or a name."""
    for argument_position, value in (*enumerate(args), *kwargs.items()):
        holds_tensors = isinstance(value, list | tuple) and any(
            isinstance(item, torch.Tensor) for item in value
        )
        if holds_tensors:
            yield from ((f"{argument_position}.{inner}", item) for inner, item in enumerate(value))
        else:
            yield str(argument_position), value


# --- Graphs as text, for a dump in torchair's layout ----------------------------------------------


def write_graph_texts(
    folder: Path,
    rank: int,
    name: str,
    module: GraphModule,
    kernels: Iterable[Kernel],
    site_of: Callable[[SeenBuffer], Site],
    operators: Mapping[SiteKey, Operator] | None = None,
) -> None:
    """Write the captured graph and the fused graph into the folder of the dump.

    Only for fused code: readers of torchair's dumps assume that a dump with a graph is of fused
    code.

    Args:
        name: the name of the graph's folder.
        kernels: the kernels that the compiled code calls, in order.
        site_of: returns the site of a buffer.
        operators: the operators that have files, if these are not named after buffers.
    """
    nodes = node_facts(module)
    texts = {
        "original": original_graph_text(name, nodes),
        "optimized": optimized_graph_text(name, buffer_facts(nodes, kernels, site_of, operators)),
    }
    suffix = f"rank_{rank}_pid_{os.getpid()}_ts_{time_stamp(dt.datetime.now(dt.UTC))}"
    for kind, text in texts.items():
        _write_whole(folder / f"dynamo_{kind}_{name}_{suffix}.txt", text)


def _write_whole(path: Path, text: str) -> None:
    """Write a file atomically."""
    # If the process is killed, this name shows that the file is an incomplete part of a dump.
    unfinished = path.with_name(f".starting-{path.name}")
    try:
        unfinished.write_text(text, encoding="ascii")
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def node_facts(module: GraphModule) -> tuple[NodeFacts, ...]:
    """All nodes of a traced graph except its output."""
    return tuple(_describe_node(node) for node in module.graph.nodes if node.op != "output")


def buffer_facts(
    nodes: Iterable[NodeFacts],
    kernels: Iterable[Kernel],
    site_of: Callable[[SeenBuffer], Site],
    operators: Mapping[SiteKey, Operator] | None = None,
) -> tuple[FusedFacts, ...]:
    """All buffers that fused code writes, named after the operator that has the file."""
    facts_by_name = {node.name: node for node in nodes}
    names: dict[str, str] = {}  # the last operator that wrote each buffer
    holder_by_node: dict[str, str] = {}  # the operator that holds the value of each node
    fused_facts = []
    for kernel, buffer, site in _written_buffers(kernels, site_of):
        inputs = [names.get(read.name, read.name) for read in kernel.reads]
        operator = Operator(site.op or site.level, site.name, buffer.nodes)
        if operators is not None:
            operator = operators[site.phase, site.graph, site.name]
            inputs = [holder_by_node.get(node, node) for node in operator.takes]
        # A buffer that may not hold exactly a node's value can have another shape.
        outputs = (
            facts_by_name[buffer.exact].outputs[:1]
            if buffer.exact in facts_by_name
            else (ValueFacts(),)
        )
        node = NodeFacts(
            name=operator.name,
            op=operator.type,
            inputs=tuple(f"{name}:0" for name in inputs),
            outputs=outputs,
            module=site.module,
            line=site.line,
            call=call_name(site.name, site.op or site.level),
        )
        fused_facts.append(FusedFacts(node, buffer.name, kernel.name, operator.nodes))
        names[buffer.name] = operator.name
        if buffer.exact:
            holder_by_node[buffer.exact] = operator.name
    return tuple(fused_facts)


def operators_of(
    module: GraphModule, kernels: Sequence[Kernel], site_of: Callable[[SeenBuffer], Site]
) -> dict[SiteKey, Operator]:
    """The operator of Ascend's graph engine for each buffer that fused code writes.

    It computes everything that was fused, starting from values with their own buffers.
    """
    taken = {
        node_fact.name: [name.rpartition(":")[0] for name in node_fact.inputs]
        for node_fact in node_facts(module)
    }
    exacts = {buffer.exact for kernel in kernels for buffer in kernel.writes if buffer.exact}
    views = {node.name for node in module.graph.nodes if is_view(node)}
    operators_by_site: dict[SiteKey, Operator] = {}
    for _, buffer, site in _written_buffers(kernels, site_of):
        inside = _computed_alone(buffer.nodes, taken, exacts - {buffer.exact})
        outside_names = (
            name for node in inside for name in taken.get(node, ()) if name not in inside
        )
        takes = tuple(dict.fromkeys(outside_names))
        operator = Operator.of_buffer(site, tuple(inside), takes, views)
        operators_by_site[site.phase, site.graph, site.name] = operator
    return operators_by_site


def _computed_alone(
    nodes: tuple[str, ...], taken: Mapping[str, list[str]], elsewhere: set[str]
) -> list[str]:
    """The nodes that are computed only for the last one."""
    needed_nodes: set[str] = set()
    waiting = list(nodes[-1:])
    while waiting:
        node = waiting.pop()
        needed_nodes.add(node)
        waiting += [
            name
            for name in taken.get(node, ())
            if name in nodes and name not in elsewhere and name not in needed_nodes
        ]
    return [node for node in nodes if node in needed_nodes]


def _written_buffers(
    kernels: Iterable[Kernel], site_of: Callable[[SeenBuffer], Site]
) -> Iterator[tuple[Kernel, Buffer, Site]]:
    for kernel in kernels:
        for position, buffer in enumerate(kernel.writes):
            site = site_of(SeenBuffer(kernel, buffer, "output", position, torch.empty(0)))
            yield kernel, buffer, site


def _describe_node(node: Node) -> NodeFacts:
    node_provenance = provenance(node)
    value = node.meta.get("val")
    results = value if isinstance(value, list | tuple) else (value,)
    return NodeFacts(
        name=node.name,
        op=node.op if node.op in {"placeholder", "get_attr"} else node_provenance.operator,
        inputs=tuple(_input_names(node)),
        outputs=tuple(_describe_value(result) for result in results),
        module=node_provenance.module,
        line=node_provenance.source,
    )


def _input_names(node: Node) -> Iterable[str]:
    if node.target is operator.getitem and isinstance(node.args[0], Node):
        yield f"{node.args[0].name}:{node.args[1]}"
        return
    for input_node in node.all_input_nodes:
        yield f"{input_node.name}:0"


def _describe_value(value: Any) -> ValueFacts:
    if not isinstance(value, torch.Tensor):
        return ValueFacts()
    # A symbolic size varies between calls.
    shape = tuple(size if isinstance(size, int) else -1 for size in value.shape)
    return ValueFacts(dtype_name(value.dtype), shape)
