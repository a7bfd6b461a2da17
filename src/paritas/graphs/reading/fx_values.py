"""What the nodes of an FX graph stand for: tensors by name, numbers as numbers."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from paritas._torch.exported_programs import size_number
from paritas.graphs.calls import Kind, TensorValue
from paritas.graphs.reading.exported_arguments import makes_gradients

if TYPE_CHECKING:
    from torch.fx import Node

    from paritas.graphs.reading.exported_symbols import Symbols

__all__ = ["UNKNOWN", "Describing", "said_of"]

# None is a value too: that of a node which computes nothing.
UNKNOWN = object()


def said_of(node: Node) -> Any:
    """What the graph itself says of a node's value, or `UNKNOWN`."""
    for key in ("val", "example_value", "tensor_meta"):
        if key in node.meta:
            return node.meta[key]
    return UNKNOWN


class Describing:
    """Turns values into descriptions."""

    def __init__(self, symbols: Symbols) -> None:
        self._symbols = symbols

    def result(self, value: Any, node: Node, prefix: str) -> Any:
        """The result of a node; its parts bear the names of those that take it apart."""
        if not isinstance(value, list | tuple) or _is_metadata(value):
            return self.value(value, f"{prefix}{node.name}", "intermediate")
        named = {user.args[1]: user.name for user in node.users if user.target is operator.getitem}
        parts = [
            self.value(one, f"{prefix}{named.get(at, f'{node.name}_unused_{at}')}", "intermediate")
            for at, one in enumerate(value)
        ]
        return parts if isinstance(value, list) else tuple(parts)

    def value(self, value: Any, name: str, kind: Kind) -> Any:
        """A tensor as its description, a symbol as its number, all else as it is."""
        if isinstance(value, torch.Tensor) or _is_metadata(value):
            shape = tuple(self._number(size) for size in value.shape)
            grad = makes_gradients(value.dtype, kind, stored=bool(value.requires_grad))
            return TensorValue(name, shape, value.dtype, kind, grad)
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            return self._number(value)
        if isinstance(value, list | tuple):
            parts = [self.value(one, f"{name}_{at}", kind) for at, one in enumerate(value)]
            return parts if isinstance(value, list) else tuple(parts)
        if isinstance(value, Mapping):
            return {key: self.value(one, f"{name}_{key}", kind) for key, one in value.items()}
        return value

    def _number(self, value: Any) -> Any:
        if not isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            return value
        return size_number(value, self._symbols.guess)


def _is_metadata(value: Any) -> bool:
    """Whether a value is what torch.fx's ShapeProp leaves: a tuple that describes a tensor."""
    return hasattr(value, "_fields") and hasattr(value, "shape") and hasattr(value, "dtype")
