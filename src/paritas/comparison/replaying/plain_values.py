"""Values that a dump holds as text, read back without running anything."""

from __future__ import annotations

import ast
import math
from typing import Any

import torch

from paritas.errors import UsageError

__all__ = ["read_value"]

_LONGEST = 1 << 14
_NAMES: dict[str, Any] = {"inf": math.inf, "nan": math.nan}
_OF_TORCH = {
    name: value
    for name, value in vars(torch).items()
    if isinstance(value, torch.dtype | torch.layout | torch.memory_format)
}


def read_value(text: str) -> Any:
    """A number, a string, a dtype, a device and the like, or a list of such, from its text.

    Raises:
        UsageError: it is something else.
    """
    try:
        if len(text) > _LONGEST:
            raise ValueError(f"{len(text)} characters")
        return _value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        raise UsageError(f"{text[:80]!r} is no plain value that can be read back") from error


def _value(tree: ast.expr) -> Any:
    match tree:
        case ast.Constant(value=bool() | int() | float() | complex() | str() | None as value):
            return value
        case ast.Name(id=name) if name in _NAMES:
            return _NAMES[name]
        case ast.Attribute(value=ast.Name(id="torch"), attr=name) if name in _OF_TORCH:
            return _OF_TORCH[name]
        case ast.List(elts=items):
            return [_value(item) for item in items]
        case ast.Tuple(elts=items):
            return tuple(_value(item) for item in items)
    return _called_or_computed(tree)


def _called_or_computed(tree: ast.expr) -> Any:
    match tree:
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return -_number(inner)
        case ast.BinOp(left=left, op=ast.Add(), right=right):  # a complex number
            return _number(left) + _number(right)
        case ast.BinOp(left=left, op=ast.Sub(), right=right):
            return _number(left) - _number(right)
        case ast.Call(func=ast.Name(id="float"), args=[ast.Constant(value=str() as name)]):
            return float(name)
        case ast.Call(func=ast.Name(id="device") | ast.Attribute(attr="device")):
            return torch.device("cpu")  # wherever it was, here it is the host
        case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr="Size"), args=[inner]):
            return tuple(_value(inner))
    raise ValueError(ast.dump(tree)[:80])


def _number(tree: ast.expr) -> complex | float:
    value = _value(tree)
    if isinstance(value, bool) or not isinstance(value, int | float | complex):
        raise TypeError(f"{value!r} is no number")
    return value
