"""Nodes of a captured graph inside `torch.vmap`: a dimension of their values is hidden."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch._functorch.predispatch import (
    _add_batch_dim,
    _remove_batch_dim,
    _vmap_decrement_nesting,
    _vmap_increment_nesting,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor
    from torch.fx import Graph, GraphModule, Node

_ENTER, _LEAVE = "_increment_nesting", "_decrement_nesting"


@contextlib.contextmanager
def leaving_transforms() -> Iterator[None]:
    """Leave the transforms that code enters and does not leave, because it raised."""
    depth = _count_transforms()
    try:
        yield
    finally:
        while _count_transforms() > depth:
            torch._C._functorch.pop_dynamic_layer_stack()


def is_wrapped(tensor: Tensor) -> bool:
    """Whether a tensor belongs to a transform of functorch that is open."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


@dataclasses.dataclass(frozen=True)
class VmapLevel:
    """A `torch.vmap` that is open around some nodes.

    Attributes:
        entry: the node that opens it; its value is the number of the level.
    """

    entry: Node

    @property
    def size(self) -> Any:
        """The size of the hidden dimension: a number, or the node that computes it."""
        return self.entry.args[0]

    @property
    def randomness(self) -> str:
        """What it does with random numbers: `error`, `same` or `different`."""
        return str(self.entry.args[1])

    def show(self, graph: Graph, node: Node) -> Node:
        """Insert a node that gives the value of another one with its hidden dimension in front."""
        return graph.call_function(_remove_batch_dim, (node, self.entry, self.size, 0))


@contextlib.contextmanager
def inside_vmap(size: int, randomness: str) -> Iterator[int]:
    """Open a `torch.vmap` over a dimension of this size; gives the number of its level."""
    with leaving_transforms():
        level = _vmap_increment_nesting(size, randomness)
        yield level
        _vmap_decrement_nesting()


def hide_dimension(value: Tensor, level: int) -> Tensor:
    """Hide the first dimension of a value inside an open `torch.vmap`."""
    return _add_batch_dim(value, 0, level)


def show_dimension(value: Tensor, level: int, size: int) -> Tensor:
    """The value with its hidden dimension in front."""
    return _remove_batch_dim(value, level, size, 0)


def transform_levels(module: GraphModule) -> dict[str, VmapLevel | None]:
    """The nodes inside transforms of functorch, with their `torch.vmap`.

    It is None inside several transforms, or inside another one than `torch.vmap`.
    """
    levels: dict[str, VmapLevel | None] = {}
    entered: list[Node] = []
    for node in module.graph.nodes:
        name = getattr(node.target, "__name__", "")
        if name.endswith(_LEAVE) and entered:
            entered.pop()
        if entered:
            is_one = len(entered) == 1 and _is_vmap(entered[0])
            levels[node.name] = VmapLevel(entered[0]) if is_one else None
        if name.endswith(_ENTER):
            entered.append(node)
    return levels


def _is_vmap(node: Node) -> bool:
    return getattr(node.target, "__name__", "") == f"_vmap{_ENTER}"


def _count_transforms() -> int:
    return len(torch._C._functorch.get_interpreter_stack() or ())
