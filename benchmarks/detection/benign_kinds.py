"""What a benign rewrite is: the same function of real numbers, computed as well, rounded otherwise.

Every rewrite is written for any precision: where it computes in float32 for the sake of a narrow
dtype, it stays in float64 when it is run there, so that a lifted run rounds nowhere.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

# Node -> {what tells this variant from others: what the function is told on top of its arguments}.
Settings = Callable[[Node], dict[str, dict[str, Any]]]

NARROW = (torch.bfloat16, torch.float16)


def always(_: Node) -> dict[str, dict[str, Any]]:
    """The rewrite has one form."""
    return {"": {}}


def if_narrow(node: Node) -> dict[str, dict[str, Any]]:
    """The rewrite makes sense in bfloat16 and float16 alone."""
    return {"": {}} if value_of(node).dtype in NARROW else {}


@dataclasses.dataclass(frozen=True)
class Rewrite:
    """One way to compute some operators otherwise.

    Attributes:
        name: by which a site names it.
        text: what it does, for people.
        forms: operator -> the function called in its place, and in which variants.
    """

    name: str
    text: str
    forms: dict[Any, tuple[Callable[..., Any], Settings]] = dataclasses.field(default_factory=dict)

    def of(self, *targets: Any, settings: Settings = always):
        """Decorate the function that stands in for `targets`."""

        def register(function: Callable[..., Any]) -> Callable[..., Any]:
            self.forms.update(dict.fromkeys(targets, (function, settings)))
            return function

        return register


def value_of(node: Node) -> Tensor:
    """The (first) tensor that a node gave when the program was written down, without its data."""
    value = node.meta.get("val")
    if isinstance(value, (tuple, list)):
        value = value[0]
    return value if isinstance(value, Tensor) else torch.empty(0, dtype=torch.bool)


def is_float(node: Node) -> bool:
    """Whether a node gives floats."""
    return value_of(node).is_floating_point()


def shape_of(argument: Any) -> tuple[int, ...]:
    """The shape of a node's argument that is a node itself."""
    return tuple(value_of(argument).shape)


def wide(x: Tensor) -> Tensor:
    """In float32 at least: what a kernel accumulates in."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def narrow(x: Tensor, like: Tensor) -> Tensor:
    """Rounded to the dtype of `like`."""
    return x.to(like.dtype)
