"""Harmless rewrites of single calls: the same function, rounded otherwise.

They are what a check must stay silent about. Each sums in another order, or takes a step that
every compiler takes; in exact arithmetic none of them changes anything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from paritas._torch.graphs import copy_graph

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from torch.fx import GraphModule

    from paritas.mutants.programs import Program

__all__ = ["rewritable", "rewrite_call"]

aten: Any = torch.ops.aten


def _mm_backwards(left: Tensor, right: Tensor) -> Any:
    return aten.mm.default(left.flip(1), right.flip(0))


def _addmm_backwards(bias: Tensor, left: Tensor, right: Tensor, **scales: Any) -> Any:
    return aten.addmm.default(bias, left.flip(1), right.flip(0), **scales)


def _bmm_backwards(left: Tensor, right: Tensor) -> Any:
    return aten.bmm.default(left.flip(2), right.flip(1))


def _convolution_backwards(x: Tensor, weight: Tensor, *others: Any) -> Any:
    groups = others[-1]
    if groups == 1:  # otherwise channels belong to their group
        x, weight = x.flip(1), weight.flip(1)
    return aten.convolution.default(x, weight, *others)


def _sum_backwards(x: Tensor, dims: list[int], *others: Any, **options: Any) -> Any:
    return aten.sum.dim_IntList(x.flip(dims or list(range(x.dim()))), dims, *others, **options)


def _mean_backwards(x: Tensor, dims: list[int], *others: Any, **options: Any) -> Any:
    return aten.mean.dim(x.flip(dims or list(range(x.dim()))), dims, *others, **options)


def _softmax_backwards(x: Tensor, dim: int, half_to_float: bool) -> Any:  # noqa: FBT001
    return aten._softmax.default(x.flip(dim), dim, half_to_float).flip(dim)  # noqa: SLF001  (its name)


def _division_by_reciprocal(left: Tensor, right: Any) -> Any:
    if not isinstance(right, torch.Tensor):
        return left * (1.0 / right)
    return left * right.reciprocal()


def _rsqrt_by_division(x: Tensor) -> Any:
    return 1.0 / x.sqrt()


_BACKWARDS = "summed from the other end"
_REWRITES: dict[Any, tuple[str, Callable[..., Any]]] = {
    aten.mm.default: (_BACKWARDS, _mm_backwards),
    aten.addmm.default: (_BACKWARDS, _addmm_backwards),
    aten.bmm.default: (_BACKWARDS, _bmm_backwards),
    aten.convolution.default: (_BACKWARDS, _convolution_backwards),
    aten.sum.dim_IntList: (_BACKWARDS, _sum_backwards),
    aten.mean.dim: (_BACKWARDS, _mean_backwards),
    aten._softmax.default: (_BACKWARDS, _softmax_backwards),  # noqa: SLF001
    aten.div.Tensor: ("divided by multiplying with the reciprocal", _division_by_reciprocal),
    aten.rsqrt.default: ("1 / sqrt for rsqrt", _rsqrt_by_division),
}


def rewritable(program: Program) -> list[str]:
    """The nodes of which there is a harmless rewrite, in graph order."""
    return [node.name for node in program.calls if node.target in _REWRITES and _is_float(node)]


def rewrite_call(program: Program, name: str) -> tuple[str, GraphModule]:
    """What was done, and the program with one call computed in another way."""
    module = copy_graph(program.module)
    (node,) = [one for one in module.graph.nodes if one.name == name]
    words, function = _REWRITES[node.target]
    node.target = function
    module.recompile()
    return words, module


def _is_float(node: Any) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_floating_point()
