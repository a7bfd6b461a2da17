"""A traced graph rewritten to hold less: results go where operands lay that nothing needs again.

Run op by op, a graph holds operand and result of every operator at once, which code that was
compiled in one piece does not. Only elementwise operators are rewritten, and only where both sides
are known to be of one shape, dtype and layout; whoever uses it compares it with the original once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from paritas._torch.graphs import copy_graph
from paritas._torch.random_twins import reshaped

if TYPE_CHECKING:
    from torch.fx import GraphModule

_ATEN = torch.ops.aten
# Each with the one that is told where to write; it goes over its operands once, in step.
_ELEMENTWISE = {
    _ATEN.add.Tensor: _ATEN.add.out,
    _ATEN.cos.default: _ATEN.cos.out,
    _ATEN.div.Tensor: _ATEN.div.out,
    _ATEN.erf.default: _ATEN.erf.out,
    _ATEN.exp.default: _ATEN.exp.out,
    _ATEN.log.default: _ATEN.log.out,
    _ATEN.mul.Tensor: _ATEN.mul.out,
    _ATEN.neg.default: _ATEN.neg.out,
    _ATEN.reciprocal.default: _ATEN.reciprocal.out,
    _ATEN.rsqrt.default: _ATEN.rsqrt.out,
    _ATEN.sigmoid.default: _ATEN.sigmoid.out,
    _ATEN.sin.default: _ATEN.sin.out,
    _ATEN.sqrt.default: _ATEN.sqrt.out,
    _ATEN.sub.Tensor: _ATEN.sub.out,
    _ATEN.tanh.default: _ATEN.tanh.out,
    _ATEN.where.self: _ATEN.where.self_out,
}
# What else gives memory of its own; anything not named here may give a view of what it was given.
_FRESH = {
    *_ELEMENTWISE,
    _ATEN.addmm.default,
    _ATEN.amax.default,
    _ATEN.bmm.default,
    _ATEN.mean.dim,
    _ATEN.mm.default,
    _ATEN.sum.dim_IntList,
    _ATEN.var_mean.correction,
}
# The same memory, all of it, under another shape; or a copy, which is as good.
_RESHAPED = {_ATEN.view.default, _ATEN._unsafe_view.default, reshaped}


def overwriting(module: GraphModule) -> GraphModule | None:
    """The graph with results written over operands; None if there is nothing to write over."""
    result = copy_graph(module)
    lifetimes = _Lifetimes(result)
    changed = False
    for node in result.graph.nodes:
        target = _ELEMENTWISE.get(node.target)
        over = None if target is None else lifetimes.overwritable(node)
        if over is not None:
            node.target = target
            node.kwargs = {**node.kwargs, "out": over}
            changed = True
    if not changed:
        return None
    result.graph.lint()
    result.recompile()
    return result


class _Lifetimes:
    """How long each value of a graph is needed, and which have memory of their own.

    Of the graph as it was: a result that is written over an operand is needed as long as before,
    and the operand is not.
    """

    def __init__(self, module: GraphModule) -> None:
        self.order = {node: index for index, node in enumerate(module.graph.nodes)}
        self.fresh = {node for node in self.order if node.target in _FRESH}
        self.last: dict[Node, int] = {}
        for node in reversed(self.order):
            # Whoever uses what may be a view of it, uses it.
            ends = [self.order[u] if u in self.fresh else self.last[u] for u in node.users]
            self.last[node] = max([self.order[node], *ends])

    def overwritable(self, node: Node) -> Node | None:
        """An operand that lies as the result will, and that nothing but this operator needs."""
        operands = [value for value in node.args if isinstance(value, Node)]
        for value in operands:
            owner = value
            while owner.target in _RESHAPED and isinstance(owner.args[0], Node):
                owner = owner.args[0]
            if owner not in self.fresh or self.last[owner] != self.order[node]:
                continue
            # Another operand could be a view of it, and be read after it was written to.
            others = list(operands)
            others.remove(value)
            if not any(self._reaches(o, owner) for o in others) and _lie_alike(value, node):
                return value
        return None

    def _reaches(self, node: Node, source: Node) -> bool:
        """Whether a value may be a view of another."""
        waiting, seen = [node], set[Node]()
        while waiting:
            one = waiting.pop()
            if one is source:
                return True
            if one not in seen and one not in self.fresh:
                seen.add(one)
                waiting += one.all_input_nodes
        return False


def _lie_alike(left: Node, right: Node) -> bool:
    one, other = (_traced(node) for node in (left, right))
    return one is not None and one == other


def _traced(node: Node) -> tuple[Any, ...] | None:
    """Shape, strides, dtype and device; sizes that may change by the formula that gives them."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    numbers = (*value.shape, *value.stride())
    formulas = [n.node.expr if isinstance(n, torch.SymInt) else n for n in numbers]
    return (value.dim(), formulas, value.dtype, value.device)
