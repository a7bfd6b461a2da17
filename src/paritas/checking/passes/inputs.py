"""Inputs for a graph of which nothing is known but shapes and dtypes."""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
from typing import TYPE_CHECKING, Any

import torch

from paritas._torch.frozen import (
    UNKNOWN_SIZE,
    FrozenGraph,
    TensorSpec,
    UnplayableError,
    has_known_size,
    traced_value,
)
from paritas._torch.graphs import as_traced, operator_name
from paritas._torch.lifting import WIDE
from paritas._torch.replaying import Stream, Unsized

if TYPE_CHECKING:
    from torch import Tensor
    from torch.fx import Node

# What a value passes through on its way to a square root and stays the variance that it is.
_CARRIERS = frozenset(
    """
    convert_element_type _to_copy to unsqueeze view reshape expand add detach alias float double
    clone
    """.split()  # noqa: SIM905
)
_ROOTS = ("sqrt", "rsqrt")
_SEED_USERS = frozenset({"inductor_lookup_seed", "inductor_random", "inductor_randint"})
_STATE_USERS = frozenset({"run_with_rng_state"})
# Weights of this many dimensions or more are scaled so that sums of their products stay near one.
_MATRIX = 2


class Numbers(enum.Enum):
    """Which numbers a set of inputs is made of; the first that a graph takes is used."""

    ANY = "numbers of both signs"
    POSITIVE_VECTORS = "numbers of both signs, vectors positive"
    POSITIVE = "positive numbers"
    ANY_AND_ZEROS = "numbers of both signs, integers zero"
    POSITIVE_AND_ZEROS = "positive numbers, integers zero"
    NEAR_IDENTITY = "square matrices near the identity"


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Values for the inputs of a graph, by name.

    Attributes:
        numbers: what they are made of.
        values: name -> float64 tensor, integer tensor or plain value.
        dtypes: name -> dtype that the program has the tensor in.
    """

    numbers: Numbers
    values: dict[str, Any]
    dtypes: dict[str, torch.dtype]

    def of(self, graph: FrozenGraph, *, wide: bool, copied: bool) -> list[Any]:
        """The inputs of a graph in order; `copied` if it may write to them."""
        return [self.copy(node.name, wide=wide, always=copied) for node in graph.placeholders]

    def copy(self, name: str, *, wide: bool, always: bool = True) -> Any:
        """One input; itself if no copy is asked for and it has the dtype."""
        if name not in self.values:
            message = f"the input {name} was not there before"
            raise UnplayableError(message)
        value = self.values[name]
        dtype = self.dtypes.get(name)
        wanted = WIDE.get(dtype, dtype) if wide and dtype is not None else dtype
        if isinstance(value, Unsized) and wanted is not None:
            make = value.make
            return Unsized(lambda sizes: _copied(make(sizes), wanted))
        if isinstance(value, torch.Tensor) and wanted is not None:
            return value if value.dtype is wanted and not always else _copied(value, wanted)
        return value

    def with_values(self, values: dict[str, Any]) -> Inputs:
        """With other values under some names."""
        given = {
            name: value.detach().to("cpu") if isinstance(value, torch.Tensor) else value
            for name, value in values.items()
        }
        dtypes = {name: v.dtype for name, v in given.items() if isinstance(v, torch.Tensor)}
        return dataclasses.replace(
            self, values={**self.values, **given}, dtypes={**self.dtypes, **dtypes}
        )


def make_up(graph: FrozenGraph, numbers: Numbers) -> Inputs:
    """Inputs for a graph, the same ones every time."""
    inputs = Inputs(numbers, {}, {})
    # The size of what a mask selects has to be the one that was made up for it.
    masks = not all(map(has_known_size, graph.placeholders))
    for position, node in enumerate(graph.placeholders):
        spec = traced_value(node)
        if isinstance(spec, TensorSpec):
            inputs.dtypes[node.name] = spec.dtype
            make = functools.partial(_numbers_for, node, numbers, position + 1, masks=masks)
            inputs.values[node.name] = make({}) if has_known_size(node) else Unsized(make)
        elif isinstance(spec, torch.Generator):
            inputs.values[node.name] = Stream(node.name)
        elif spec is None or isinstance(spec, bool | int | float | complex | str):
            inputs.values[node.name] = spec
        else:
            message = f"the input {node.name} is a {type(spec).__name__}"
            raise UnplayableError(message)
    return inputs


def _numbers_for(
    node: Node, numbers: Numbers, seed: int, sizes: dict[Any, int], *, masks: bool
) -> Tensor:
    spec = traced_value(node, sizes)
    generator = torch.Generator("cpu").manual_seed(seed)
    with as_traced():  # out of the way of a mode that this is called in
        flat = _flat_numbers(node, spec, numbers, generator, masks=masks)
        tensor = flat.as_strided(spec.shape, spec.stride)
        is_square = len(spec.shape) >= _MATRIX and spec.shape[-1] == spec.shape[-2]
        is_square = is_square and tensor.is_floating_point() and 0 not in spec.stride
        if numbers is Numbers.NEAR_IDENTITY and is_square:
            symmetric = (tensor + tensor.mT) / 8
            tensor.copy_(symmetric + torch.eye(spec.shape[-1], dtype=tensor.dtype, device="cpu"))
        return tensor


def _flat_numbers(
    node: Node, spec: TensorSpec, numbers: Numbers, generator: torch.Generator, *, masks: bool
) -> Tensor:
    steps = zip(spec.shape, spec.stride, strict=True)
    count = 0 if 0 in spec.shape else 1 + sum((size - 1) * step for size, step in steps)
    if spec.dtype.is_floating_point or spec.dtype.is_complex:
        return _flat_floats(node, spec, numbers, generator, count)
    if spec.dtype is torch.bool and masks:
        return torch.arange(count, device="cpu") < UNKNOWN_SIZE
    if spec.dtype is torch.bool:
        return torch.randint(2, (count,), generator=generator, device="cpu").bool()
    users = {_base_name(user) for user in node.users}
    end = 1 if numbers in {Numbers.ANY_AND_ZEROS, Numbers.POSITIVE_AND_ZEROS} else 2
    if users and users <= _SEED_USERS:
        end = 2**62
    elif users and users <= _STATE_USERS:
        end = 256
    drawn = torch.randint(end, (count,), generator=generator, device="cpu")
    return drawn.to(spec.dtype)


def _flat_floats(
    node: Node, spec: TensorSpec, numbers: Numbers, generator: torch.Generator, count: int
) -> Tensor:
    given: dict[str, Any] = {"generator": generator, "dtype": torch.float64, "device": "cpu"}
    vector = len(spec.shape) < _MATRIX
    positive = numbers in {Numbers.POSITIVE, Numbers.POSITIVE_AND_ZEROS}
    positive = positive or (vector and numbers is Numbers.POSITIVE_VECTORS)
    if positive or _is_variance(node):
        flat = torch.rand(count, **given) + 0.5
    else:
        flat = torch.randn(count, **given)
        if not vector:
            flat /= math.sqrt(max(1, spec.shape[-1]))
    if spec.dtype.is_complex:
        flat = torch.complex(flat, torch.randn(count, **given) if not positive else flat.flip(0))
    return flat


def _is_variance(node: Node) -> bool:
    """Whether the square root of an input is taken, or of it and a small number: it is positive."""
    pending, seen = [node], set()
    while pending:
        here = pending.pop()
        for user in here.users:
            if user in seen:
                continue
            seen.add(user)
            name = _base_name(user)
            if name.strip("_") in _ROOTS or _takes_for_variance(user, here):
                return True
            if name in _CARRIERS and len(user.all_input_nodes) == 1:
                pending.append(user)
    return False


def _takes_for_variance(user: Node, given: Node) -> bool:
    """Whether a node of batch normalisation takes its argument for the running variance."""
    arguments = getattr(getattr(user.target, "_schema", None), "arguments", ())
    names = [argument.name for argument in arguments]
    if not names and _base_name(user) == "batch_norm":
        names = ["input", "running_mean", "running_var"]
    taken = {**dict(zip(names, user.args, strict=False)), **user.kwargs}
    return taken.get("running_var") is given


def _base_name(node: Node) -> str:
    """`aten.sqrt.default` as `sqrt`."""
    parts = operator_name(node).split(".")
    return parts[1] if len(parts) > 1 else parts[0]


def _copied(value: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy in another dtype with the same strides."""
    with as_traced():  # out of the way of a mode that this is called in
        storage = value.untyped_storage()
        flat = torch.empty(0, dtype=value.dtype, device=value.device).set_(storage)
        copied = flat.to(dtype, copy=True)
        return copied.as_strided(value.shape, value.stride(), value.storage_offset())
