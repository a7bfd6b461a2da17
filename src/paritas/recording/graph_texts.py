"""The graphs in words that belong to a dump in torchair's layout."""

from __future__ import annotations

import datetime as dt
import operator
import os
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from paritas._torch.buffers import Seen
from paritas._torch.graphs import is_view, provenance
from paritas.dumps.ge_layout import Operator
from paritas.dumps.msit_layout import call_name, time_stamp
from paritas.dumps.text_graphs import (
    FusedFacts,
    NodeFacts,
    ValueFacts,
    optimized_graph_text,
    original_graph_text,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from torch.fx import GraphModule

    from paritas._torch.buffers import Buffer, Kernel
    from paritas.dumps.ge_layout import Place
    from paritas.dumps.records import Site

__all__ = ["buffer_facts", "node_facts", "operators_of", "write_graph_texts"]


def write_graph_texts(
    folder: Path,
    rank: int,
    name: str,
    module: GraphModule,
    kernels: Iterable[Kernel],
    site_of: Callable[[Seen], Site],
    operators: Mapping[Place, Operator] | None = None,
) -> None:
    """Write the graph as it was captured, and as it was fused, into the folder of the dump.

    Only for fused code: readers of torchair's dumps take a dump with a graph for one of fused code.

    Args:
        name: of the graph, as its folder has it.
        kernels: what the compiled code calls, in order.
        site_of: where what is seen of a buffer is recorded.
        operators: what has a file, where that is not a buffer by the name it is recorded under.
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
    """Write a file that a reader sees whole or not at all."""
    # By such a name it is known for a part of a dump, should the process be killed over it.
    unfinished = path.with_name(f".starting-{path.name}")
    try:
        unfinished.write_text(text, encoding="ascii")
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def node_facts(module: GraphModule) -> tuple[NodeFacts, ...]:
    """Every node of a traced graph but its output."""
    return tuple(_facts(node) for node in module.graph.nodes if node.op != "output")


def buffer_facts(
    nodes: Iterable[NodeFacts],
    kernels: Iterable[Kernel],
    site_of: Callable[[Seen], Site],
    operators: Mapping[Place, Operator] | None = None,
) -> tuple[FusedFacts, ...]:
    """Every buffer that fused code writes, under the name of the operator that has its file."""
    known = {node.name: node for node in nodes}
    names: dict[str, str] = {}  # of the last that was written into each buffer
    made: dict[str, str] = {}  # the operators that hold the values of nodes
    found = []
    for kernel, buffer, site in _written(kernels, site_of):
        inputs = [names.get(one.name, one.name) for one in kernel.reads]
        operator = Operator(site.op or site.level, site.name, buffer.nodes)
        if operators is not None:
            operator = operators[site.phase, site.graph, site.name]
            inputs = [made.get(node, node) for node in operator.takes]
        # A buffer that is not known to hold a node's very value may be of another shape.
        outputs = known[buffer.exact].outputs[:1] if buffer.exact in known else (ValueFacts(),)
        node = NodeFacts(
            name=operator.name,
            op=operator.type,
            inputs=tuple(f"{name}:0" for name in inputs),
            outputs=outputs,
            module=site.module,
            line=site.line,
            call=call_name(site.name, site.op or site.level),
        )
        found.append(FusedFacts(node, buffer.name, kernel.name, operator.nodes))
        names[buffer.name] = operator.name
        if buffer.exact:
            made[buffer.exact] = operator.name
    return tuple(found)


def operators_of(
    module: GraphModule, kernels: Sequence[Kernel], site_of: Callable[[Seen], Site]
) -> dict[Place, Operator]:
    """What Ascend's graph engine would make of each buffer that fused code writes.

    An operator computes what was fused, back to values that have a buffer of their own.
    """
    taken = {
        one.name: [name.rpartition(":")[0] for name in one.inputs] for one in node_facts(module)
    }
    own = {buffer.exact for kernel in kernels for buffer in kernel.writes if buffer.exact}
    views = {node.name for node in module.graph.nodes if is_view(node)}
    found: dict[Place, Operator] = {}
    for _, buffer, site in _written(kernels, site_of):
        inside = _computed(buffer.nodes, taken, own - {buffer.exact})
        given = (name for node in inside for name in taken.get(node, ()) if name not in inside)
        takes = tuple(dict.fromkeys(given))
        operator = Operator.of_buffer(site, tuple(inside), takes, views)
        found[site.phase, site.graph, site.name] = operator
    return found


def _computed(
    nodes: tuple[str, ...], taken: Mapping[str, list[str]], elsewhere: set[str]
) -> list[str]:
    """Of the nodes that lead to the last, those that are computed for it alone."""
    kept: set[str] = set()
    waiting = list(nodes[-1:])
    while waiting:
        node = waiting.pop()
        kept.add(node)
        waiting += [
            name
            for name in taken.get(node, ())
            if name in nodes and name not in elsewhere and name not in kept
        ]
    return [node for node in nodes if node in kept]


def _written(
    kernels: Iterable[Kernel], site_of: Callable[[Seen], Site]
) -> Iterator[tuple[Kernel, Buffer, Site]]:
    for kernel in kernels:
        for position, buffer in enumerate(kernel.writes):
            site = site_of(Seen(kernel, buffer, "output", position, torch.empty(0)))
            yield kernel, buffer, site


def _facts(node: Node) -> NodeFacts:
    found = provenance(node)
    value = node.meta.get("val")
    results = value if isinstance(value, list | tuple) else (value,)
    return NodeFacts(
        name=node.name,
        op=node.op if node.op in {"placeholder", "get_attr"} else found.operator,
        inputs=tuple(_inputs(node)),
        outputs=tuple(_value_facts(result) for result in results),
        module=found.module,
        line=found.source,
    )


def _inputs(node: Node) -> Iterable[str]:
    if node.target is operator.getitem and isinstance(node.args[0], Node):
        yield f"{node.args[0].name}:{node.args[1]}"
        return
    for given in node.all_input_nodes:
        yield f"{given.name}:0"


def _value_facts(value: Any) -> ValueFacts:
    if not isinstance(value, torch.Tensor):
        return ValueFacts()
    # A size that is a symbol varies from call to call.
    shape = tuple(size if isinstance(size, int) else -1 for size in value.shape)
    return ValueFacts(str(value.dtype).removeprefix("torch."), shape)
