"""A graph as it was read: its calls in order, each with what is known of it.

Readers fill this in; nothing here has been run. Sizes that a graph keeps as symbols are the numbers
they had when it was made.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch

    from paritas.partition.recipes import Recipe

__all__ = ["Graph", "GraphCall", "TensorValue", "tensor_values"]

Kind = Literal["input", "parameter", "buffer", "constant", "intermediate"]


@dataclasses.dataclass(frozen=True)
class TensorValue:
    """A tensor of the graph.

    Attributes:
        name: what the graph calls it; the same value has the same name wherever it is used.
        kind: where it comes from.
        requires_grad: whether a gradient is asked of it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    kind: Kind = "intermediate"
    requires_grad: bool = True


@dataclasses.dataclass(frozen=True)
class GraphCall:
    """One node of a graph.

    Attributes:
        position: in the order of the graph, counted from 0.
        name: what the graph calls the node.
        operator: what it calls, in full: `torch.nn.functional.linear`, `aten.mm.default`.
        args: positional arguments; a `TensorValue` wherever a tensor is given, also inside lists,
            tuples, dicts and slices, and plain values otherwise.
        kwargs: arguments by name.
        outputs: the tensors it gives, in their order.
        annotation: how the graph itself says that it can be split, in the language of
            `partition.annotations`, or the one split of it; None if it does not say.
        source: the user's file and line, `model.py:30`.
        code: the text of that line.
        module: path of the module it was called in.
        function: what it calls, where the graph is in memory and holds it.
        idle: why there is nothing to check of it: it takes a tuple apart, is a backward pass.
        obstacle: why it cannot be checked, as far as the reader can tell.
    """

    position: int
    name: str
    operator: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    outputs: tuple[TensorValue, ...] = ()
    annotation: str | Recipe | None = None
    source: str = ""
    code: str = ""
    module: str = ""
    function: Callable[..., Any] | None = None
    idle: str = ""
    obstacle: str = ""

    def tensors(self) -> Iterator[TensorValue]:
        """The tensors it is given, in order."""
        yield from tensor_values((self.args, dict(self.kwargs)))


@dataclasses.dataclass(frozen=True)
class Graph:
    """A graph that was read.

    Attributes:
        name: the file, or what else it came from, for people.
        kind: `torch.export`, `fx` or `nnscaler`.
        calls: every node that calls something, in order.
        values: value by name, of inputs, parameters and buffers.
        state: what parameters, buffers and constants are, as far as the graph holds it; fetched on
            demand, because it may be large.
        notes: what a reader should know: what was left out and why.
    """

    name: str
    kind: str
    calls: tuple[GraphCall, ...]
    values: Mapping[str, TensorValue] = dataclasses.field(default_factory=dict)
    state: Callable[[], Mapping[str, torch.Tensor]] | None = None
    notes: tuple[str, ...] = ()


def tensor_values(tree: Any) -> Iterator[TensorValue]:
    """The tensors of an argument, in order."""
    if isinstance(tree, TensorValue):
        yield tree
    elif isinstance(tree, Mapping):
        for item in tree.values():
            yield from tensor_values(item)
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            yield from tensor_values(item)
    elif isinstance(tree, slice):
        yield from tensor_values((tree.start, tree.stop, tree.step))
