"""Indices made to fit: a graph run on made-up integers must not fail for being out of range.

Taken modulo the length they index: all that fit, negative ones included, stay what they are.
"""

from __future__ import annotations

from typing import Any

import torch

# Operators that take (tensor, dimension, index, ...).
_ALONG = {"gather", "index_add", "index_copy", "index_fill", "index_select", "scatter"}
_ALONG |= {"scatter_add", "scatter_reduce"}
# Operators that take (tensor, one index for each dimension or None, ...).
_EACH = {"index", "index_put", "_unsafe_index", "_unsafe_index_put"}


def in_bounds(name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of an operator, with indices that fit."""
    name = name.rstrip("_")
    first = args[0] if args else None
    if not isinstance(first, torch.Tensor):
        return args
    if name in _ALONG and len(args) > 2 and first.dim():  # noqa: PLR2004
        return (first, args[1], _wrapped(args[2], first.shape[args[1]]), *args[3:])
    if name == "embedding" and len(args) > 1:
        return (first, _wrapped(args[1], first.shape[0]), *args[2:])
    if name in _EACH and len(args) > 1 and not any(_is_mask(index) for index in args[1]):
        indices = [_wrapped(i, size) for i, size in zip(args[1], first.shape, strict=False)]
        return (first, indices, *args[2:])
    return args


def _wrapped(index: Any, length: int) -> Any:
    whole = isinstance(index, torch.Tensor) and not index.is_floating_point()
    return index.remainder(length) if whole and length > 0 else index


def _is_mask(index: Any) -> bool:
    """A mask takes the place of as many indices as it has dimensions."""
    return isinstance(index, torch.Tensor) and index.dtype in {torch.bool, torch.uint8}
