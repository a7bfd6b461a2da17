"""Every value of a graph as an output of it, so that what is inside can be seen from outside."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING

import torch

from paritas._torch.graphs import copy_graph, output_node, returned
from paritas._torch.operators import traits

if TYPE_CHECKING:
    from torch.fx import GraphModule, Node


def tapped(module: GraphModule) -> tuple[GraphModule, list[str]]:
    """A copy that returns its outputs and then the values of the named nodes."""
    result = copy_graph(module)
    inside = [node for node in result.graph.nodes if is_tappable(node)]
    out = output_node(result)
    out.args = ((*returned(result), *inside),)
    description = out.meta.get("desc")
    if description is not None:
        out.meta["desc"] = [*description, *([None] * len(inside))]
    result.recompile()
    return result, [node.name for node in inside]


def is_tappable(node: Node) -> bool:
    """Whether a node computes a single tensor."""
    if node.op != "call_function" or not isinstance(node.meta.get("val"), torch.Tensor):
        return False
    if isinstance(node.target, torch._ops.OpOverload):
        return not traits(node.target).mutates
    return node.target is operator.getitem or isinstance(
        node.target, torch._ops.HigherOrderOperator
    )
