"""Which argument of a call each input of an annotation is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch

from paritas.partition.annotations.grammar import Signature, Tensor
from paritas.partition.recipes import OperatorCall, Place

__all__ = ["Given", "Shape", "given_tensors", "holds_tensor", "operator_name", "value_at"]

Shape = tuple[int, ...]
# An argument, what the annotation says of it, and the shapes of the tensors in it.
Given = tuple[Place, Tensor, tuple[Shape, ...]]


def operator_name(call: OperatorCall) -> str:
    """The last part of the operator's name."""
    name = call.name or getattr(call.function, "__name__", "the operator")
    return str(name).rpartition(".")[2]


def value_at(call: OperatorCall, place: Place, item: int | None = None) -> Any:
    """An argument of the call or an item of it; None where it is not given."""
    if isinstance(place, str):
        value = call.kwargs.get(place)
    else:
        value = call.args[place] if place < len(call.args) else None
    if item is None or value is None:
        return value
    try:
        return value[item]
    except (TypeError, IndexError, KeyError):
        return None


def holds_tensor(value: Any) -> bool:
    """Whether an argument is a tensor, or a list with one in it."""
    items = value if isinstance(value, (list, tuple)) else [value]
    return any(isinstance(item, torch.Tensor) for item in items)


def _shapes(value: Any) -> tuple[Shape, ...]:
    """Of a tensor, of the tensors in a list, of a number (which broadcasts)."""
    if isinstance(value, torch.Tensor):
        return (tuple(value.shape),)
    if isinstance(value, (list, tuple)):
        return tuple(tuple(item.shape) for item in value if isinstance(item, torch.Tensor))
    return ((),) if isinstance(value, (int, float, complex)) else ()


def given_tensors(
    signature: Signature, call: OperatorCall, refuse: Callable[[str], NoReturn]
) -> list[Given]:
    """All positional arguments, whether annotated or not; then the named ones.

    Args:
        refuse: called with the reason where an argument is missing, unannotated or no tensor.
    """
    found: list[Given] = []
    for place, tensor in _pairs(signature, call, refuse):
        value = value_at(call, place)
        shapes = _shapes(value)
        if tensor.dims is not None and not shapes and value is not None:
            what = f"{type(value).__name__} {value!r:.60}"
            refuse(f"argument {place} is {what}, not the tensor `{tensor}`: write `?` for it")
        known = tensor.dims is not None or holds_tensor(value)
        found.append((place, tensor, shapes if known else ()))
    return found


def _pairs(
    signature: Signature, call: OperatorCall, refuse: Callable[[str], NoReturn]
) -> list[tuple[Place, Tensor]]:
    positional = [tensor for tensor in signature.inputs if tensor.keyword is None]
    named: list[tuple[Place, Tensor]] = [
        (tensor.keyword, tensor) for tensor in signature.inputs if tensor.keyword is not None
    ]
    if len(positional) > len(call.args):
        hint = "write an input that is given by keyword as `bias=n`"
        refuse(f"{len(positional)} inputs for {len(call.args)} positional arguments; {hint}")
    for at in range(len(positional), len(call.args)):
        if holds_tensor(call.args[at]):
            many = f"{len(positional)} inputs for {len(call.args)} arguments"
            refuse(f"{many}: argument {at} is a tensor; write its dimensions, or `?`")
        positional.append(Tensor(None))
    for name, value in call.kwargs.items():
        if holds_tensor(value) and name not in dict(named):
            refuse(f"argument `{name}` is a tensor: add `{name}=` with its dimensions, or `?`")
    return [*enumerate(positional), *named]
