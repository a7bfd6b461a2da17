"""How small a fault may be and still be caught."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from torch.fx import GraphModule

if TYPE_CHECKING:
    from collections.abc import Callable

    from paritas.mutants.programs import FlatProgram

# Half decades: 10**-1 is the largest delta tried, 10**-15 the smallest.
SCALES = tuple(10 ** (-step / 2) for step in range(2, 31))


def smallest_caught(
    is_caught: Callable[[float], bool], floor: float = SCALES[-1]
) -> tuple[float | None, int]:
    """The smallest delta of at least `floor` that is caught, and how many were tried.

    Bisects, assuming that a larger delta is also caught. None if not even the largest is caught.
    """
    sizes = [size for size in SCALES if size >= floor]
    if not is_caught(sizes[0]):
        return None, 1
    tried, caught_index, unseen = 1, 0, len(sizes)
    while unseen - caught_index > 1:
        middle = (caught_index + unseen) // 2
        tried += 1
        if is_caught(sizes[middle]):
            caught_index = middle
        else:
            unseen = middle
    return sizes[caught_index], tried


class ScaledProgram:
    """A program with the result of one node multiplied by 1 + delta, which can be set."""

    def __init__(self, program: FlatProgram, name: str) -> None:
        graph = copy.deepcopy(program.module.graph)
        node = next(graph_node for graph_node in graph.nodes if graph_node.name == name)
        self._call = _ScaledCall(node.target)
        node.target = self._call
        # Generating the code of a graph takes the most time: do it once for all deltas.
        self._module = GraphModule(program.module, graph)

    def scale_call(self, delta: float) -> GraphModule:
        """The module, valid until the next call."""
        self._call.factor = 1.0 + delta
        return self._module


class _ScaledCall:
    """A class, not a closure, because the generated code contains the name of what it calls."""

    def __init__(self, target: Callable[..., Any]) -> None:
        self.target = target
        self.factor = 1.0
        self.__name__ = self.__qualname__ = "scaled"
        self.__module__ = __name__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.target(*args, **kwargs) * self.factor
