"""What calls of a graph were given, and the inputs of a graph by the names it has for them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from paritas.checking.config import Inputs
from paritas.errors import UsageError
from paritas.graphs.operators.values import CallValues

if TYPE_CHECKING:
    from paritas.graphs.calls import Graph, TensorValue

__all__ = ["Samples", "bound_inputs", "copied", "listed", "shown", "tensors_in"]

_MOST_NAMES = 12


@dataclasses.dataclass(frozen=True)
class Samples:
    """What calls were given.

    Attributes:
        values: by the position of the call; those that are missing are to be drawn.
        notes: what a reader should know: what was not run, and why.
    """

    values: Mapping[int, CallValues] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()


def bound_inputs(graph: Graph, inputs: Any) -> dict[str, torch.Tensor]:
    """The inputs by the names that the graph has for them."""
    wanted = [value for value in graph.values.values() if value.kind == "input"]
    by_place, by_name = _given(inputs)
    found = {value.name: tensor for value, tensor in zip(wanted, by_place, strict=False)}
    names = ", ".join(f"{value.name} {shown([(value.shape, value.dtype)])}" for value in wanted)
    takes = f"the graph takes {len(wanted)} tensors: {names:.400}"
    if len(by_place) > len(wanted):
        raise UsageError(f"{len(by_place)} input tensors are given by position; {takes}")
    for key, tensor in by_name.items():
        place = int(key) if key.isdigit() and int(key) < len(wanted) else None
        name = wanted[place].name if place is not None else key
        if name not in {value.name for value in wanted} or name in found:
            raise UsageError(f"there is no input {key!r:.80}, or it is given twice; {takes}")
        found[name] = tensor
    missing = [value.name for value in wanted if value.name not in found]
    if missing:
        raise UsageError(f"the inputs lack {', '.join(missing):.200}; {takes}")
    for value in wanted:
        _check(value, found[value.name])
    return found


def _check(value: TensorValue, tensor: torch.Tensor) -> None:
    found = (tuple(tensor.shape), tensor.dtype)
    if found != (value.shape, value.dtype):
        raise UsageError(
            f"input {value.name} is {shown([found])}, where the graph has "
            f"{shown([(value.shape, value.dtype)])}: give inputs of the shapes and dtypes that it "
            "was made with"
        )


def _given(inputs: Any) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Tensors by position and by name; what else a model is given, the graph holds as constants."""
    if isinstance(inputs, Inputs):
        args, kwargs = inputs.args, inputs.kwargs
    elif isinstance(inputs, Mapping):
        args, kwargs = (), dict(inputs)
    else:
        args, kwargs = inputs, {}
    named = {str(key): tensor for key, tensor in kwargs.items() if isinstance(tensor, torch.Tensor)}
    inside = [one for one in kwargs.values() if not isinstance(one, torch.Tensor)]
    if any(True for _ in tensors_in(inside)):
        raise UsageError(
            "a named input holds several tensors: give each by the name that the graph has for it"
        )
    return list(tensors_in(args)), named


def tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    """The tensors of a value, in order."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        for item in tree.values():
            yield from tensors_in(item)
    elif isinstance(tree, list | tuple):
        for item in tree:
            yield from tensors_in(item)


def copied(given: CallValues) -> CallValues:
    """Copies that later calls do not write to; one tensor given twice stays one."""
    copies: dict[int, torch.Tensor] = {}

    def copy(tree: Any) -> Any:
        if isinstance(tree, torch.Tensor):
            return copies.setdefault(id(tree), tree.detach().clone())
        if isinstance(tree, Mapping):
            return {key: copy(item) for key, item in tree.items()}
        if isinstance(tree, list):
            return [copy(item) for item in tree]
        return tuple(copy(item) for item in tree) if isinstance(tree, tuple) else tree

    return CallValues(copy(given.args), copy(dict(given.kwargs)))


def shown(found: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> str:
    """Shapes and dtypes for people: `float32[2, 4]`."""
    words = [f"{str(dtype).removeprefix('torch.')}{list(shape)}" for shape, dtype in found]
    return ", ".join(words) or "nothing"


def listed(names: Sequence[str], between: str = ", ") -> str:
    """Names for people, not too many."""
    rest = len(names) - _MOST_NAMES
    return between.join(names[:_MOST_NAMES]) + (f"{between}{rest} more" if rest > 0 else "")
