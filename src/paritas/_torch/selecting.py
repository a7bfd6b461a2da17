"""Let Inductor compile some nodes of a graph and call torch's own kernels for the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch._ops import OpOverload

from paritas._torch.graphs import copy_graph

if TYPE_CHECKING:
    from collections.abc import Collection

    from torch.fx import GraphModule

# With this option nothing is compiled but what `with_compiled` marks.
ONLY_MARKED = {"fallback_by_default": True}


def compilable(module: GraphModule) -> list[str]:
    """The nodes that Inductor may compile or leave to torch, in order."""
    return [
        node.name
        for node in module.graph.nodes
        if node.op == "call_function" and isinstance(node.target, OpOverload)
    ]


def with_compiled(module: GraphModule, names: Collection[str]) -> GraphModule:
    """A copy in which just the named nodes are marked for compilation."""
    result = copy_graph(module)
    for node in result.graph.nodes:
        if node.name in names:
            marks = dict(node.meta.get("custom") or {})
            node.meta["custom"] = {**marks, "compile_with_inductor": True}
    return result
