"""Graphs in which floating numbers count as equal if rounding alone keeps them apart.

A backward graph computes some values of the forward one again and asks which of them equals a saved
one: the place of a maximum. Compiled code rounds both alike. Run op by op, the one is rounded as
compiled code does it and the other as eager does, and there is no maximum any more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from paritas._torch.graphs import copy_graph

if TYPE_CHECKING:
    from torch import Tensor
    from torch.fx import GraphModule

# In unit roundoffs of the dtype that the graph compares in.
ROUNDINGS = 16.0


def with_tolerant_equality(module: GraphModule) -> GraphModule | None:
    """A copy with equality up to rounding; None if the graph asks for no equality of floats."""
    result = copy_graph(module)
    changed = False
    for node in result.graph.nodes:
        if node.op != "call_function" or node.target is not torch.ops.aten.eq.Tensor:
            continue
        units = [_unit(argument) for argument in node.args]
        if None in units:
            continue
        changed = True
        node.target = nearly_equal
        node.kwargs = {"unit": max(unit for unit in units if unit is not None)}
    result.recompile()
    return result if changed else None


def nearly_equal(left: Tensor, right: Tensor, *, unit: float) -> Tensor:
    """Equality up to a few roundings."""
    size = torch.maximum(left.abs(), right.abs())
    return ((left - right).abs() <= ROUNDINGS * unit * size) | (left == right)


def _unit(argument: Any) -> float | None:
    value = getattr(argument, "meta", {}).get("val")
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return None
    return torch.finfo(value.dtype).eps / 2
