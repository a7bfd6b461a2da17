"""Functions of torch that are one operator natively and several in float64.

`scaled_dot_product_attention` has kernels for half precisions; on a GPU it has none for float64,
and is computed by products and a softmax there. For other arguments, and in `rms_norm` on a CPU,
torch itself casts half precisions to float32 and back. A dispatch mode sees operators, and in a
lifted run no casts. Here it is told which operators are the inside of such a function, forward and
backward.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from paritas.core.torch_private.operators import DispatchMode
from paritas.core.torch_private.watching import is_symbolic

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch import Tensor

ATTENTION: Any = F.scaled_dot_product_attention
# Function -> the names of its first arguments.
_COMPOSITES: dict[Any, tuple[str, ...]] = {
    ATTENTION: ("query", "key", "value", "attn_mask", "dropout_p", "is_causal"),
    F.rms_norm: ("input", "normalized_shape", "weight", "eps"),
    torch.rms_norm: ("input", "normalized_shape", "weight", "eps"),
}
_PLAIN = {torch.Tensor, torch.nn.Parameter}


@dataclasses.dataclass(frozen=True)
class Inside:
    """Where an operator is called within a composite function.

    Attributes:
        unit: the unit roundoff of the operator's results.
        outer: that of the function's own.
    """

    unit: float
    outer: float


class ListeningMode(DispatchMode):
    """A dispatch mode that is told about calls of composite functions.

    Attributes:
        within: where operators are called now; None outside of such functions.
    """

    within: Inside | None = None

    def call_composite(self, func: Any, floats: dict[str, Tensor], options: dict[str, Any]) -> Any:
        """Call a function, given its floating tensors and its other arguments, by name."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        """Begin to listen, outside of every function."""
        self.within = None  # a backward pass that raised may have left it
        functions = _CompositeMode(self)
        self.__dict__.setdefault("_functions", []).append(functions)
        functions.__enter__()  # type: ignore[no-untyped-call]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        """Listen no longer."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self.__dict__["_functions"].pop().__exit__(*error)

    @contextlib.contextmanager
    def inside(self, inside: Inside) -> Iterator[None]:
        """Operators in this block are inside of a function."""
        before, self.within = self.within, inside
        try:
            yield
        finally:
            self.within = before

    def mark_backward(self, result: Any, ends: Iterable[Any], inside: Inside) -> None:
        """So are those of the backward pass from a result to the nodes `ends`, without these."""
        for node in _nodes_between(result, ends):
            self.mark_node(node, inside)

    def mark_node(self, node: Any, inside: Inside) -> None:
        """So are those of one node of the backward pass."""
        node.register_prehook(functools.partial(self._enter_node, inside))
        node.register_hook(self._leave_node)

    def _enter_node(self, inside: Inside, _gradients: Any) -> None:
        self.within = inside

    def _leave_node(self, _after: Any, _before: Any) -> None:
        self.within = None


class _CompositeMode(TorchFunctionMode):
    """Hands the calls of composite functions to a dispatch mode."""

    def __init__(self, listener: ListeningMode) -> None:
        super().__init__()
        self._listener = listener

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        names = _COMPOSITES.get(func)
        if names is None or is_symbolic():
            return func(*args, **(kwargs or {}))
        named_arguments = {**dict(zip(names, args, strict=False)), **(kwargs or {})}
        tensors = [value for value in named_arguments.values() if isinstance(value, torch.Tensor)]
        if len(args) > len(names) or not all(type(value) in _PLAIN for value in tensors):
            return func(*args, **(kwargs or {}))  # a class of tensors has its own way
        floats = {
            name: value
            for name, value in named_arguments.items()
            if isinstance(value, torch.Tensor) and value.is_floating_point()
        }
        options = {name: value for name, value in named_arguments.items() if name not in floats}
        return self._listener.call_composite(func, floats, options)


def _nodes_between(result: Any, ends: Iterable[Any]) -> list[Any]:
    last = set(ends)
    waiting = [result.grad_fn] if isinstance(result, torch.Tensor) else []
    inner_nodes: dict[Any, None] = {}
    while waiting:
        node = waiting.pop()
        if node is None or node in last or node in inner_nodes or not node.next_functions:
            continue  # a node without a next one accumulates the gradient of a leaf
        inner_nodes[node] = None
        waiting += [following for following, _ in node.next_functions]
    return list(inner_nodes)
