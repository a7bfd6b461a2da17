"""Calls of operators, as they were made and with arguments that have names."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Self

import torch

from paritas.core.torch_private.operators import map_tensors, tensors_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch import Tensor

# An argument: its position or its name.
Place = int | str


@dataclasses.dataclass(frozen=True)
class OperatorCall:
    """An operator and its arguments.

    Attributes:
        name: the user's name for it, such as `torch.nn.functional.linear`.
        without_gradient: arguments that need no gradient, such as running statistics.
        seed: the seed of arguments that were drawn at random.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    name: str = ""
    without_gradient: frozenset[Place] = frozenset()
    seed: int = 0

    def map(self, change: Callable[[Any], Any]) -> Self:
        """The same call with other arguments."""
        args = tuple(map(change, self.args))
        kwargs = {name: change(value) for name, value in self.kwargs.items()}
        return dataclasses.replace(self, args=args, kwargs=kwargs)

    def map_tensors(self, change: Callable[[Tensor], Tensor]) -> Self:
        """The same call with other tensors, also those in lists."""
        return self.map(
            lambda argument: map_tensors(argument, change) if tensors_in(argument) else argument
        )


# --- Arguments by the names of parameters ---------------------------------------------------------

# The namespaces of torch have different names for the first parameter of an operator.
_FIRST = ("input", "self")
_ALPHABET = "abcdefgh"


def bind(parameters: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Bound | None:
    """Assign arguments to parameters.

    Args:
        parameters: names in order; a last one with a star takes all remaining arguments.

    Returns:
        None if the rule does not know an argument, and so cannot claim anything.
    """
    names = parameters.split()
    rest = names.pop()[1:] if names[-1].startswith("*") else None
    if len(args) > len(names) and rest is None:
        return None
    positions = names[: len(args)]
    values = dict(zip(positions, args, strict=False))
    starred: frozenset[str] = frozenset()
    if rest is not None and len(args) > len(names):
        starred_args = tuple(args[len(names) :])
        one_sequence = len(starred_args) == 1 and isinstance(
            starred_args[0], list | tuple | torch.Size
        )
        values[rest] = tuple(starred_args[0]) if one_sequence else starred_args
        starred = frozenset() if one_sequence else frozenset([rest])
        positions += [rest] * len(starred_args)
    keywords = {}
    for keyword, value in kwargs.items():
        name = names[0] if keyword in _FIRST and keyword not in names else keyword
        if name in values or name not in (*names, rest):
            return None
        values[name] = value
        keywords[keyword] = name
    return Bound(values, tuple(positions), keywords, starred)


@dataclasses.dataclass(frozen=True)
class Bound:
    """A call whose arguments have names.

    Attributes:
        values: the arguments that were passed, by parameter.
        positions: the parameter of each positional argument.
        keywords: the parameter of each keyword argument, by keyword.
        starred: parameters whose items were passed one by one.
    """

    values: Mapping[str, Any]
    positions: tuple[str, ...]
    keywords: Mapping[str, str]
    starred: frozenset[str] = frozenset()

    def get(self, name: str, default: Any = None) -> Any:
        """The argument of a parameter."""
        return self.values.get(name, default)

    def shape(self, name: str = "x") -> tuple[int, ...] | None:
        """The shape of a tensor argument; None if it is not a tensor."""
        value = self.values.get(name)
        return tuple(value.shape) if isinstance(value, torch.Tensor) else None

    def dims(self, name: str = "x") -> list[str] | None:
        """An identifier for each dimension of a tensor argument; None if it is not a tensor."""
        shape = self.shape(name)
        return None if shape is None else name_dims(shape, letters(len(shape)))

    def has(self, name: str) -> bool:
        """Whether the argument is a tensor."""
        return isinstance(self.values.get(name), torch.Tensor)

    def spread(self, name: str) -> bool:
        """Whether the items of a sequence were passed one by one, as in `x.view(2, 3)`."""
        return name in self.starred


# --- Names of dimensions --------------------------------------------------------------------------


def letters(count: int, start: int = 0) -> list[str]:
    """Identifiers for a number of dimensions."""
    return [_ALPHABET[i] if i < len(_ALPHABET) else f"a{i}" for i in range(start, start + count)]


def dim_of(size: int, name: str) -> str:
    """A dimension by name; a length of 1 is never split."""
    return "1" if size == 1 else name


def name_dims(shape: Sequence[int], names: Sequence[str]) -> list[str]:
    """The dimensions of a shape; the names are aligned to the right."""
    offset = len(names) - len(shape)
    return [dim_of(size, names[offset + i]) for i, size in enumerate(shape)]


def positive_dims(dim: Any, shape: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """Dimensions counted from the front; None and an empty list mean all of them."""
    if not shape:
        return None
    dims = (dim,) if isinstance(dim, int) else tuple(dim or range(len(shape)))
    if any(not isinstance(d, int) or not -len(shape) <= d < len(shape) for d in dims):
        return None
    return tuple(d % len(shape) for d in dims)


def setting_of_each(value: Any, count: int, default: Any = None) -> tuple[Any, ...]:
    """A setting for each spatial dimension, as windows have."""
    value = default if value is None or value in ((), []) else value
    each = tuple(value) if isinstance(value, list | tuple) else (value,)
    return each * count if len(each) == 1 else each


def broadcast(shapes: Iterable[tuple[int, ...]]) -> tuple[list[list[str]], list[str]] | None:
    """The dimensions of tensors that broadcast with each other, and those of the result."""
    shapes = list(shapes)
    try:
        broadcast_shape = torch.broadcast_shapes(*shapes)
    except RuntimeError:
        return None
    names = letters(len(broadcast_shape))
    return [name_dims(shape, names) for shape in shapes], name_dims(broadcast_shape, names)
