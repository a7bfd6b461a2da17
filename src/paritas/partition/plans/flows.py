"""On which way gradients flow back between the values that modules are given and give.

The order in which gradients arrive does not say it: of three projections that read one value, any
may come first, and what one of them does wrong is no concern of the others.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from paritas.partition.plans.traces import Place

if TYPE_CHECKING:
    from torch import Tensor
    from torch.autograd.graph import Node

__all__ = ["Flows"]


class Flows:
    """Marks values of a forward pass, and tells from which others their gradients come."""

    def __init__(self) -> None:
        self._marks: dict[tuple[Node, int], list[tuple[list[int], str, str]]] = {}

    def mark(self, tensor: Tensor, call: list[int], side: str, path: str) -> None:
        """Note a value of a call, whose number is in `call` once it has ended."""
        if tensor.grad_fn is not None:
            key = (tensor.grad_fn, tensor.output_nr)
            self._marks.setdefault(key, []).append((call, side, path))

    def clear(self) -> None:
        """Let the graph go."""
        self._marks.clear()

    def sources(self) -> dict[Place, tuple[Place, ...]]:
        """Place -> those that its gradient comes from; to be asked before the graph is gone.

        One tensor may be what several modules give, a child and the module around it: then the
        gradient comes to the inner one by way of the outer one.
        """
        found: dict[Place, list[Place]] = {}
        chains = {key: self._chain(key) for key in self._marks}
        for key, chain in chains.items():
            for inner, outer in itertools.pairwise(chain):
                found.setdefault(inner, []).append(outer)
            for target in self._next(key):
                if chain and chains[target]:
                    found.setdefault(chains[target][-1], []).append(chain[0])
        return {place: tuple(dict.fromkeys(places)) for place, places in found.items()}

    def _chain(self, key: tuple[Node, int]) -> list[Place]:
        """The places of one tensor, innermost first; a call that never ended has none."""
        return [Place(call[0], side, path) for call, side, path in self._marks[key] if call]

    def _next(self, key: tuple[Node, int]) -> list[tuple[Node, int]]:
        """The marked values that a gradient reaches next."""
        found: dict[tuple[Node, int], None] = {}
        met = {key[0]}
        stack = [*key[0].next_functions]
        while stack:
            node, number = stack.pop()
            if node is None:
                continue
            if (node, number) in self._marks:
                found[(node, number)] = None
            elif node not in met:
                met.add(node)
                stack += node.next_functions
        return list(found)
