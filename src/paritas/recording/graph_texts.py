"""The graphs in words that belong to a dump in torchair's layout."""

from __future__ import annotations

import datetime as dt
import operator
import os
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from paritas._torch.buffers import Seen
from paritas._torch.graphs import provenance
from paritas.dumps.ge_layout import Operator, fused_name
from paritas.dumps.msit_layout import call_name, time_stamp
from paritas.dumps.text_graphs import (
    FusedFacts,
    NodeFacts,
    ValueFacts,
    optimized_graph_text,
    original_graph_text,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from torch.fx import GraphModule

    from paritas._torch.buffers import Kernel
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
    name_of: Callable[[Site], tuple[str, str]] | None = None,
) -> None:
    """Write the graph as it was captured, and as it was fused, into the folder of the dump.

    Only for fused code: readers of torchair's dumps take a dump with a graph for one of fused code.

    Args:
        name: of the graph, as its folder has it.
        kernels: what the compiled code calls, in order.
        site_of: where what is seen of a buffer is recorded.
        name_of: type and name of the operator in whose file a buffer is; None where it goes by
            the name that it is recorded under.
    """
    nodes = node_facts(module)
    texts = {
        "original": original_graph_text(name, nodes),
        "optimized": optimized_graph_text(name, buffer_facts(nodes, kernels, site_of, name_of)),
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
    name_of: Callable[[Site], tuple[str, str]] | None = None,
) -> tuple[FusedFacts, ...]:
    """Every buffer that fused code writes, under the name by which it is recorded."""
    known = {node.name: node for node in nodes}
    names: dict[str, str] = {}  # of the last that was written into each buffer
    found = []
    for kernel in kernels:
        inputs = tuple(f"{names.get(buffer.name, buffer.name)}:0" for buffer in kernel.reads)
        for position, buffer in enumerate(kernel.writes):
            site = site_of(Seen(kernel, buffer, "output", position, torch.empty(0)))
            # A buffer that is not known to hold a node's very value may be of another shape.
            outputs = known[buffer.exact].outputs[:1] if buffer.exact in known else (ValueFacts(),)
            own = (site.op or site.level, site.name)
            op, name = own if name_of is None else name_of(site)
            node = NodeFacts(
                name=name,
                op=op,
                inputs=inputs,
                outputs=outputs,
                module=site.module,
                line=site.line,
                call=call_name(*own[::-1]),
            )
            found.append(FusedFacts(node, buffer.name, kernel.name, buffer.nodes))
            names[buffer.name] = name
    return tuple(found)


def operators_of(
    module: GraphModule, kernels: Iterable[Kernel], site_of: Callable[[Seen], Site]
) -> dict[Place, Operator]:
    """What Ascend's graph engine would call each buffer that fused code writes."""
    taken = {
        node.name: [one.rpartition(":")[0] for one in node.inputs] for node in node_facts(module)
    }
    found: dict[Place, Operator] = {}
    for kernel in kernels:
        for position, buffer in enumerate(kernel.writes):
            site = site_of(Seen(kernel, buffer, "output", position, torch.empty(0)))
            inside = set(site.nodes)
            outside = (
                one for node in site.nodes for one in taken.get(node, ()) if one not in inside
            )
            operator = Operator(*fused_name(site), tuple(dict.fromkeys(outside)))
            found[site.phase, site.graph, site.name] = operator
    return found


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
