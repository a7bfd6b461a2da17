"""The tensors that a call is given: recorded ones, or ones drawn to fit the operator.

A graph knows shapes and dtypes. What an operator takes of them (indices of its table, a positive
variance, a mask) is known by the operator's name.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from paritas.errors import UsageError
from paritas.graphs.calls import TensorValue, tensor_values
from paritas.partition.configuration import input_domains as domains
from paritas.partition.configuration.config import TensorInfo
from paritas.partition.configuration.input_rules import Asked, domain_of, is_buffer
from paritas.partition.configuration.inputs import make_value

if TYPE_CHECKING:
    from paritas.partition.recipes import Place

__all__ = ["CallValues", "draw_values", "hollow", "map_values", "ungraded"]

# Positions of a subscript: `x[a, b]` is given as x, a, b.
_SUBSCRIPT = "nnscaler.runtime.function.fullslice"
_INDEXED_BY_LIST = {"aten.index", "aten.index_put", "torch.index_put", "torch.Tensor.index_put"}


@dataclasses.dataclass(frozen=True)
class CallValues:
    """What a call is given, a tensor wherever the graph has a `TensorValue`."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def map_values(tree: Any, change: Callable[[TensorValue], Any]) -> Any:
    """The same argument with something else in place of its tensors."""
    if isinstance(tree, TensorValue):
        return change(tree)
    if isinstance(tree, Mapping):
        return {key: map_values(item, change) for key, item in tree.items()}
    if isinstance(tree, tuple) and not hasattr(tree, "_fields"):
        return tuple(map_values(item, change) for item in tree)
    if isinstance(tree, list):
        return [map_values(item, change) for item in tree]
    return tree


def hollow(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> CallValues:
    """Tensors of these shapes without contents: for what follows from shapes alone."""

    def made(value: TensorValue) -> torch.Tensor:
        return torch.empty(value.shape, dtype=value.dtype, device="meta")

    return CallValues(map_values(args, made), map_values(dict(kwargs), made))


def ungraded(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> frozenset[Place]:
    """The arguments of which no gradient is asked: the graph says so, or the operator takes none.

    A list of tensors is asked for gradients as soon as one of its tensors is.
    """
    asked = _asked(name, args, kwargs)
    places: set[Place] = set()
    for place, value in _places(args, kwargs):
        tensors = list(tensor_values(value))
        if tensors and (is_buffer(asked, place) or not any(t.requires_grad for t in tensors)):
            places.add(place)
    return frozenset(places)


def draw_values(
    name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], seed: int
) -> CallValues:
    """Tensors that fit the operator, the same for the same seed.

    A value that is given twice is one tensor: `x * x` is no product of two random tensors.

    Raises:
        UsageError: no values of these shapes and dtypes can fit.
    """
    asked = _asked(name, args, kwargs)
    uses: dict[str, list[tuple[Place, str, TensorValue]]] = {}
    for place, path, value in _uses(args, kwargs):
        uses.setdefault(value.name, []).append((place, path, value))
    sizes = _subscripts(name, args)
    drawn = {key: _drawn(asked, found, sizes, seed) for key, found in uses.items()}

    def tensor_of(value: TensorValue) -> torch.Tensor:
        if value.name not in drawn:
            raise UsageError(f"tensor {value.name} stands inside a slice, where it cannot be drawn")
        return drawn[value.name]

    return CallValues(map_values(args, tensor_of), map_values(dict(kwargs), tensor_of))


def _drawn(
    asked: Asked, uses: list[tuple[Place, str, TensorValue]], sizes: dict[str, int], seed: int
) -> torch.Tensor:
    """One tensor: as its most demanding use wants it."""
    domain_at = [(use, domain_of(asked, use[0])) for use in uses]
    demanding = [use for use, domain in domain_at if domain is not domains.normal]
    indexing = [use for use in uses if use[1] in sizes and not use[2].dtype.is_floating_point]
    place, path, value = (indexing or demanding or uses)[0]
    digest = hashlib.sha256(f"{seed}:{path}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    if indexing and value.dtype != torch.bool:
        return domains.indices(0, sizes[path])(value.shape, generator).to(value.dtype)
    info = TensorInfo("shape", value.shape, value.dtype, generator=generator)
    return make_value(asked, place, info, seed)  # type: ignore[no-any-return]


def _asked(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Asked:
    def info(value: Any) -> TensorInfo:
        if isinstance(value, TensorValue):
            return TensorInfo("shape", value.shape, value.dtype)
        return TensorInfo("value", value)

    named = {
        key: info(value) if isinstance(value, TensorValue) else value
        for key, value in kwargs.items()
    }
    return Asked(name, [info(value) for value in args], named)


def _places(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[tuple[Place, Any]]:
    return [*enumerate(args), *kwargs.items()]


def _uses(
    args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[tuple[Place, str, TensorValue]]:
    """Every tensor of the call: in which argument, where in it, which."""

    def below(place: Place, path: str, value: Any) -> Iterator[tuple[Place, str, TensorValue]]:
        if isinstance(value, TensorValue):
            yield place, path, value
        elif isinstance(value, (list, tuple)):
            for at, item in enumerate(value):
                yield from below(place, f"{path}[{at}]", item)
        elif isinstance(value, Mapping):
            for key, item in value.items():
                yield from below(place, f"{path}[{key!r}]", item)

    for place, value in _places(args, kwargs):
        yield from below(place, str(place), value)


def _subscripts(name: str, args: tuple[Any, ...]) -> dict[str, int]:
    """How long the dimension is that a tensor of indices picks from, by the path of that tensor."""
    if not args or not isinstance(args[0], TensorValue):
        return {}
    if name == _SUBSCRIPT:
        items = [(str(at), item) for at, item in enumerate(args) if at]
    elif name in _INDEXED_BY_LIST and len(args) > 1 and isinstance(args[1], (list, tuple)):
        # In such a list, None is a dimension taken whole, not a new one.
        items = [
            (f"1[{at}]", slice(None) if item is None else item) for at, item in enumerate(args[1])
        ]
    else:
        return {}
    shape = args[0].shape
    taken = sum(_dims_of(item) for _, item in items)
    found: dict[str, int] = {}
    dim = 0
    for path, item in items:
        if item is Ellipsis:
            dim += len(shape) - taken
            continue
        if isinstance(item, TensorValue) and item.dtype != torch.bool and dim < len(shape):
            found[path] = shape[dim]
        dim += _dims_of(item)
    return found


def _dims_of(item: Any) -> int:
    """How many dimensions an item of a subscript speaks for."""
    if item is None or item is Ellipsis:
        return 0
    masks = isinstance(item, TensorValue) and item.dtype == torch.bool
    return len(item.shape) if masks else 1
