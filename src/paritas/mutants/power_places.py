"""Where in a program a node stands, for people; and which of many places are drawn."""

from __future__ import annotations

import operator
import random
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor, nn

from paritas._torch.graphs import node_traits, returned
from paritas.mutants.mutations.calls import IDLE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch.fx import Node

    from paritas.mutants.programs import Program

__all__ = ["Places", "even_order", "turns"]

T = TypeVar("T")


class Places:
    """The nodes of a program by name, each with the module that it is nearest to."""

    def __init__(self, program: Program, model: Callable[..., Any]) -> None:
        """`model` is what `program` was traced from: its parameters have names."""
        self.program = program
        self.nodes: dict[str, Node] = {node.name: node for node in program.module.graph.nodes}
        module = model if isinstance(model, nn.Module) else nn.Module()
        state = [*dict(module.named_parameters()), *dict(module.named_buffers())]
        given = [node for node in self.nodes.values() if node.op == "placeholder"]
        # Inputs and cotangents follow, which belong to no module.
        self.owners = {node: _owner(name) for node, name in zip(given, state, strict=False)}
        self.returned: dict[Node, list[str]] = {}
        for node, result in zip(returned(program.module), program.results, strict=True):
            self.returned.setdefault(node, []).append(result)

    def operator(self, name: str) -> str:
        """What a node calls, as aten spells it."""
        target = self.nodes[name].target
        shown = str(target)
        return str(getattr(target, "__name__", shown)) if shown.startswith("<") else shown

    def near(self, name: str) -> str:
        """The module whose parameter comes nearest before the node, or whose gradient after it."""
        node = self.nodes[name]
        if name in self.program.backward:
            behind = _first(node, lambda one: list(one.users), self._gradient_of)
            return behind or _first(node, _given_to, self.owners.get)
        return _first(node, _given_to, self.owners.get)

    def is_dead(self, name: str) -> bool:
        """Whether no result depends on the node."""
        reached = _walk(self.nodes[name], lambda one: list(one.users))
        return not any(one.op == "output" for one in reached)

    def scalable(self) -> list[str]:
        """The nodes that compute a floating tensor which something uses, in graph order."""
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
        names = [name for name in self.returned.get(node, []) if name.startswith("gradient of ")]
        return _owner(names[0].removeprefix("gradient of ")) if names else None


def _computes(node: Node) -> bool:
    """Not what passes a value on; a part of what an operator gave is what it computed."""
    kind = node_traits(node)
    if kind is None:
        return node.target is operator.getitem
    return not kind.view and kind.name not in IDLE


def _owner(name: str) -> str:
    return name.rpartition(".")[0] or name


def _given_to(node: Node) -> list[Node]:
    return node.all_input_nodes


def _walk(start: Node, step: Callable[[Node], Iterable[Node]]) -> list[Node]:
    """All that can be reached, the nearest first."""
    seen = {start: None}
    queue = [start]
    for node in queue:  # which grows
        for other in step(node):
            if other not in seen:
                seen[other] = None
                queue.append(other)
    return queue


def _first(
    start: Node, step: Callable[[Node], Iterable[Node]], name: Callable[[Node], str | None]
) -> str:
    return next((found for node in _walk(start, step) if (found := name(node))), "")


def even_order(count: int, shift: float) -> list[int]:
    """All of `range(count)`, so that the first few, however many, are spread over the whole.

    Args:
        count: how many there are.
        shift: from 0 to 1, where to begin.
    """
    order: dict[int, None] = {}
    step = 0
    while len(order) < count:
        # Multiples of the golden ratio fill a circle more evenly than draws do.
        order[int((shift + step * 0.6180339887498949) % 1.0 * count)] = None
        step += 1
    return list(order)


def turns(sites: Sequence[T], kind: Callable[[T], Any], seed: int) -> list[T]:
    """All `sites`, kind by kind in turn, those of one kind spread over the graph.

    So whatever is left undone at the end of the list, what was done is an even sample.

    Args:
        sites: in graph order.
        kind: of a site.
        seed: of the draw.
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
