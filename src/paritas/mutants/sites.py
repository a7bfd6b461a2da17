"""Where a node is, and in which order sites are tried."""

from __future__ import annotations

import operator
import random
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor, nn

from paritas.core.results.items import Item, ItemKind
from paritas.core.torch_private.graphs import node_traits, returned_values
from paritas.mutants.programs import IDLE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch.fx import Node

    from paritas.mutants.programs import FlatProgram

T = TypeVar("T")


class Places:
    """The nodes of a program by name, each with the nearest module."""

    def __init__(self, program: FlatProgram, model: Callable[..., Any], prefix: str = "") -> None:
        """`model` is what `program` was traced from; names of parameters begin with `prefix`."""
        self.program = program
        self.prefix = prefix
        self.nodes: dict[str, Node] = {node.name: node for node in program.module.graph.nodes}
        module = model if isinstance(model, nn.Module) else nn.Module()
        state = [*dict(module.named_parameters()), *dict(module.named_buffers())]
        nodes = [node for node in self.nodes.values() if node.op == "placeholder"]
        # Inputs and cotangents follow; they belong to no module.
        self.owners = {
            node: self._module_of(name) for node, name in zip(nodes, state, strict=False)
        }
        self.returned: dict[Node, list[Item]] = {}
        for node, result in zip(returned_values(program.module), program.results, strict=True):
            self.returned.setdefault(node, []).append(result)

    def operator(self, name: str) -> str:
        """What a node calls, in aten's spelling."""
        target = self.nodes[name].target
        shown = str(target)
        return str(getattr(target, "__name__", shown)) if shown.startswith("<") else shown

    def near(self, name: str) -> str:
        """The module of the nearest parameter before the node, or nearest gradient after it."""
        node = self.nodes[name]
        if name in self.program.backward:
            behind = _first_name(node, lambda graph_node: list(graph_node.users), self._gradient_of)
            if behind:
                return behind
        return _first_name(node, lambda graph_node: graph_node.all_input_nodes, self.owners.get)

    def is_dead(self, name: str) -> bool:
        """Whether no result depends on the node."""
        reached = _walk(self.nodes[name], lambda graph_node: list(graph_node.users))
        return not any(reached_node.op == "output" for reached_node in reached)

    def scalable(self) -> list[str]:
        """The nodes that compute a floating-point tensor that is used, in graph order."""
        return [
            node.name
            for node in self.program.calls
            if node.users
            and _computes(node)
            and isinstance(value := node.meta.get("val"), Tensor)
            and value.is_floating_point()
            and value.numel()
            and not self.is_dead(node.name)
        ]

    def _gradient_of(self, node: Node) -> str | None:
        items = self.returned.get(node, [])
        names = [item.name for item in items if item.kind is ItemKind.GRADIENT]
        return self._module_of(names[0]) if names else None

    def _module_of(self, name: str) -> str:
        full_name = f"{self.prefix}{name}"
        return full_name.rpartition(".")[0] or full_name


def _computes(node: Node) -> bool:
    """Whether a node computes a value; an item of an operator's result counts."""
    kind = node_traits(node)
    if kind is None:
        return node.target is operator.getitem
    return not kind.view and kind.name not in IDLE


def _walk(start: Node, step: Callable[[Node], Iterable[Node]]) -> list[Node]:
    """All reachable nodes, the nearest first."""
    visited_nodes = {start: None}
    queue = [start]
    for node in queue:  # it grows
        for other in step(node):
            if other not in visited_nodes:
                visited_nodes[other] = None
                queue.append(other)
    return queue


def _first_name(
    start: Node, step: Callable[[Node], Iterable[Node]], name: Callable[[Node], str | None]
) -> str:
    return next((node_name for node in _walk(start, step) if (node_name := name(node))), "")


def even_order(count: int, shift: float) -> list[int]:
    """All of `range(count)`, ordered so that every prefix is spread evenly; 0 <= `shift` < 1."""
    order: dict[int, None] = {}
    step = 0
    while len(order) < count:
        # Multiples of the golden ratio fill the interval evenly.
        order[int((shift + step * 0.6180339887498949) % 1.0 * count)] = None
        step += 1
    return list(order)


def turns(sites: Sequence[T], kind: Callable[[T], Any], seed: int) -> list[T]:
    """All `sites`, one of each kind in turn, those of one kind spread over the graph.

    Every prefix is an even sample, so the search may stop anywhere.
    """
    draw = random.Random(seed)
    groups: dict[Any, list[T]] = {}
    for site in sites:
        groups.setdefault(kind(site), []).append(site)
    names = list(groups)
    draw.shuffle(names)
    orders = {name: even_order(len(groups[name]), draw.random()) for name in names}
    rounds = max(map(len, groups.values()), default=0)
    return [
        groups[name][orders[name][turn]]
        for turn in range(rounds)
        for name in names
        if turn < len(orders[name])
    ]
