"""Harmless rewrites: the same function, rounded differently."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paritas.core.torch_private.graphs import copy_graph
from paritas.mutants.reduction_faults import contraction

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.fx import GraphModule

    from paritas.mutants.programs import FlatProgram


# A check must not report these. Each sums in another order, or makes a change that every compiler
# makes; in exact arithmetic none of them changes anything.

aten: Any = torch.ops.aten


# The overloads that `_Backwards` can call with the operands reversed: written by hand.
_SUMS = {
    "mm": aten.mm.default,
    "addmm": aten.addmm.default,
    "bmm": aten.bmm.default,
    "convolution": aten.convolution.default,
    "sum": aten.sum.dim_IntList,
    "mean": aten.mean.dim,
    "_softmax": aten._softmax.default,  # noqa: SLF001  (its name)
}


class _Backwards:
    """Sums in reverse order.

    A class, not a closure, because the generated code contains the name of what it calls.
    """

    def __init__(self, target: Callable[..., Any], name: str) -> None:
        self.target = target
        self.name = name
        self.__name__ = self.__qualname__ = f"{name.strip('_')}_backwards"
        self.__module__ = __name__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        contracted = contraction(self.name, args, args.__getitem__)
        if contracted is not None:
            changed = list(args)
            for position, axis in contracted.axes:
                changed[position] = args[position].flip(axis)
            return self.target(*changed, **kwargs)
        if self.name == "convolution":  # channels must stay in their group
            return self.target(*args, **kwargs)
        x, dims, *others = args
        if self.name == "_softmax":  # here it is one axis, and the result has it, too
            return self.target(x.flip(dims), dims, *others).flip(dims)
        return self.target(x.flip(dims or list(range(x.dim()))), dims, *others, **kwargs)


def _division_by_reciprocal(left: Tensor, right: Any) -> Any:
    if not isinstance(right, torch.Tensor):
        return left * (1.0 / right)
    return left * right.reciprocal()


def _rsqrt_by_division(x: Tensor) -> Any:
    return 1.0 / x.sqrt()


_REWRITES: dict[Any, tuple[str, Callable[..., Any]]] = {
    **{
        target: ("summed in reverse order", _Backwards(target, name))
        for name, target in _SUMS.items()
    },
    aten.div.Tensor: ("multiplied by the reciprocal instead of divided", _division_by_reciprocal),
    aten.rsqrt.default: ("1 / sqrt instead of rsqrt", _rsqrt_by_division),
}


def rewritable(program: FlatProgram) -> list[str]:
    """The nodes that have a harmless rewrite, in graph order."""
    return [
        node.name
        for node in program.calls
        if node.target in _REWRITES
        and isinstance(value := node.meta.get("val"), Tensor)
        and value.is_floating_point()
    ]


def rewrite_call(program: FlatProgram, name: str) -> tuple[str, GraphModule]:
    """What was done, and the program with one call computed in another way."""
    module = copy_graph(program.module)
    (node,) = [graph_node for graph_node in module.graph.nodes if graph_node.name == name]
    words, function = _REWRITES[node.target]
    node.target = function
    module.recompile()
    return words, module
