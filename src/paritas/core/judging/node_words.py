"""A node of a graph in words: its arguments, and what its result passes through."""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING, Any

import torch

from paritas.core.numerics.bits import dtype_name
from paritas.core.numerics.contents import leaves
from paritas.core.torch_private.graphs import nodes_in, parameter_names, provenance

if TYPE_CHECKING:
    from collections.abc import Collection

    from torch.fx import Node

# Longer values of arguments are cut.
MOST_LETTERS = 60
_LEFT_OUT = "..."


# --- What a fault passes through ------------------------------------------------------------------


def find_chain(node: Node, ends: Collection[Node] = ()) -> tuple[str, ...]:
    """The modules from a node to the results, and the names of nodes outside of modules.

    Args:
        node: where the chain starts.
        ends: the nodes of the results; by default, all that the graph returns.
    """
    came_from: dict[Node, Node | None] = {node: None}
    waiting = collections.deque([node])
    while waiting:
        current = waiting.popleft()
        is_end = current in ends if ends else any(user.op == "output" for user in current.users)
        if is_end:
            return tuple(_name_steps(came_from, current))
        for user in current.users:
            if user not in came_from and user.op != "output":
                came_from[user] = current
                waiting.append(user)
    return ()


def _name_steps(came_from: dict[Node, Node | None], end: Node) -> list[str]:
    names: list[str] = []
    current: Node | None = end
    while current is not None:
        name = provenance(current).module or current.name
        if not names or names[-1] != name:
            names.append(name)
        current = came_from[current]
    return names[::-1]


# --- Its arguments --------------------------------------------------------------------------------


def describe_arguments(node: Node) -> tuple[str, ...]:
    """The arguments of a node: `input: float32 [4, 8]`, `eps=1e-05`."""
    names = [*parameter_names(node), *[""] * len(node.args)]
    named_arguments = [*zip(names, node.args, strict=False), *node.kwargs.items()]
    return tuple(_describe_argument(name, value) for name, value in named_arguments)


def _describe_argument(name: str, value: Any) -> str:
    nodes = list(nodes_in(value))
    examples = [node.meta.get("example_value", node.meta.get("val")) for node in nodes]
    tensors = [leaf for _, leaf in leaves(examples) if isinstance(leaf, torch.Tensor)]
    if tensors:
        named = name or ", ".join(node.name for node in nodes)
        return f"{named}: {', '.join(map(_describe_tensor, tensors))}"
    text = repr(value).removeprefix("torch.")
    text = text if len(text) <= MOST_LETTERS else f"{text[:MOST_LETTERS]}{_LEFT_OUT}"
    return f"{name}={text}" if name else text


def _describe_tensor(tensor: torch.Tensor) -> str:
    sizes = ", ".join(map(str, tensor.shape))
    return f"{dtype_name(tensor.dtype)} [{sizes}]"
