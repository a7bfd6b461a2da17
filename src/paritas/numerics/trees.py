"""Nested containers: their leaves, each with a stable path, and rebuilding them with others."""

from __future__ import annotations

import copy
import dataclasses
import types
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def children(tree: Any) -> list[tuple[str, Any]] | None:
    """The (path suffix, child) pairs of a container, or None if `tree` is a leaf."""
    if isinstance(tree, torch.Tensor | str | bytes):
        return None
    if isinstance(tree, Mapping):  # Hugging Face's ModelOutput is one
        return [(f"[{key!r}]", value) for key, value in tree.items()]
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return [(f".{name}", getattr(tree, name)) for name in tree._fields]
    if isinstance(tree, list | tuple):
        return [(f"[{position}]", value) for position, value in enumerate(tree)]
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return [(f".{field.name}", getattr(tree, field.name)) for field in dataclasses.fields(tree)]
    if isinstance(tree, types.SimpleNamespace):
        return [(f".{name}", value) for name, value in vars(tree).items()]
    return None


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf with its path, depth first, in container order."""
    below = children(tree)
    if below is None:
        yield path, tree
        return
    for suffix, child in below:
        yield from leaves(child, path + suffix)


def map_leaves(tree: Any, function: Callable[[Any], Any]) -> Any:
    """Rebuild `tree` with `function` applied to each leaf; containers are always new objects."""
    below = children(tree)
    if below is None:
        return function(tree)
    mapped = [map_leaves(child, function) for _, child in below]
    if isinstance(tree, Mapping):
        return _rebuild_mapping(tree, mapped)
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*mapped)
    if isinstance(tree, list | tuple):
        # torch.Size and torch.return_types are tuples too; their constructors take a sequence
        return type(tree)(mapped)
    names = [suffix[1:] for suffix, _ in below]
    rebuilt = copy.copy(tree)
    for name, value in zip(names, mapped, strict=True):
        object.__setattr__(rebuilt, name, value)  # a frozen dataclass refuses plain assignment
    return rebuilt


def _rebuild_mapping(tree: Mapping[Any, Any], values: list[Any]) -> Any:
    pairs = dict(zip(tree.keys(), values, strict=True))
    if type(tree) is dict:
        return pairs
    if not hasattr(tree, "__setitem__"):
        return type(tree)(pairs)  # type: ignore[call-arg]  # e.g. MappingProxyType
    rebuilt = copy.copy(tree)
    for key, value in pairs.items():
        rebuilt[key] = value
    return rebuilt
