"""How small a fault may be and still be caught: one result scaled by 1 + delta, delta by delta."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from torch.fx import GraphModule

if TYPE_CHECKING:
    from collections.abc import Callable

    from paritas.mutants.programs import Program

__all__ = ["SCALES", "ScaledProgram", "smallest_caught"]

# Half decades: 10**-1 is the largest delta tried, 10**-15 the smallest.
SCALES = tuple(10 ** (-step / 2) for step in range(2, 31))


class ScaledProgram:
    """A program with the result of one node multiplied by 1 + delta, which can be set."""

    def __init__(self, program: Program, name: str) -> None:
        graph = copy.deepcopy(program.module.graph)
        node = next(one for one in graph.nodes if one.name == name)
        self._call = _ScaledCall(node.target)
        node.target = self._call
        # Writing the code of a graph is what takes time: it is done once for all sizes.
        self._module = GraphModule(program.module, graph)

    def scaled(self, delta: float) -> GraphModule:
        """The module, until it is asked for another delta."""
        self._call.factor = 1.0 + delta
        return self._module


class _ScaledCall:
    """A class and no closure, since a graph writes the name of what it calls into its code."""

    def __init__(self, target: Callable[..., Any]) -> None:
        self.target = target
        self.factor = 1.0
        self.__name__ = self.__qualname__ = "scaled"
        self.__module__ = __name__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.target(*args, **kwargs) * self.factor


def smallest_caught(
    is_caught: Callable[[float], bool], floor: float = SCALES[-1]
) -> tuple[float | None, int]:
    """The smallest delta that is caught, and how many were tried.

    Halves the range again and again, which takes it that what is caught at one size is caught at
    every larger one. None where not even the largest is caught.

    Args:
        is_caught: tries one.
        floor: below which nothing is tried.
    """
    sizes = [size for size in SCALES if size >= floor]
    if not is_caught(sizes[0]):
        return None, 1
    tried, seen, unseen = 1, 0, len(sizes)
    while unseen - seen > 1:
        middle = (seen + unseen) // 2
        tried += 1
        if is_caught(sizes[middle]):
            seen = middle
        else:
            unseen = middle
    return sizes[seen], tried
