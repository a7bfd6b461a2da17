"""Inputs for a graph of which nothing is known but shapes and dtypes."""

from __future__ import annotations

import dataclasses
import enum
import math
from typing import TYPE_CHECKING, Any

import torch

from paritas._torch.frozen import FrozenGraph, TensorSpec, UnplayableError, traced_value
from paritas._torch.graphs import as_traced, operator_name
from paritas._torch.lifting import WIDE
from paritas._torch.replaying import Stream

if TYPE_CHECKING:
    from torch import Tensor
    from torch.fx import Node

# What a value passes through on its way to a square root and stays the variance that it is.
_CARRIERS = ("convert_element_type", "_to_copy", "to", "unsqueeze", "view", "reshape", "expand")
_CARRIERS += ("add", "detach", "alias", "float", "double", "clone")
_ROOTS = ("sqrt", "rsqrt")
_SEED_USERS = ("inductor_lookup_seed", "inductor_random", "inductor_randint")
_STATE_USERS = ("run_with_rng_state",)
# Weights of this many dimensions or more are scaled so that sums of their products stay near one.
_MATRIX = 2


class Numbers(enum.Enum):
    """Which numbers a set of inputs is made of; the first that a graph takes is used."""

    ANY = "numbers of both signs"
    POSITIVE_VECTORS = "numbers of both signs, vectors positive"
    POSITIVE = "positive numbers"
    ANY_AND_ZEROS = "numbers of both signs, integers zero"
    POSITIVE_AND_ZEROS = "positive numbers, integers zero"


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

    def copies(self, graph: FrozenGraph, *, wide: bool) -> list[Any]:
        """The inputs of a graph in order, to be written to."""
        return [self.copy(node.name, wide=wide) for node in graph.placeholders]

    def copy(self, name: str, *, wide: bool) -> Any:
        """One input, to be written to."""
        if name not in self.values:
            message = f"the input {name} was not there before"
            raise UnplayableError(message)
        value = self.values[name]
        if isinstance(value, torch.Tensor):
            return _as_dtype(value, self.dtypes[name], wide=wide)
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
    values: dict[str, Any] = {}
    dtypes: dict[str, torch.dtype] = {}
    for position, node in enumerate(graph.placeholders):
        spec = traced_value(node)
        if isinstance(spec, TensorSpec):
            generator = torch.Generator("cpu").manual_seed(position + 1)
            flat = _flat_numbers(node, spec, numbers, generator)
            values[node.name] = flat.as_strided(spec.shape, spec.stride)
            dtypes[node.name] = spec.dtype
        elif isinstance(spec, torch.Generator):
            values[node.name] = Stream(node.name)
        elif spec is None or isinstance(spec, bool | int | float | complex | str):
            values[node.name] = spec
        else:
            message = f"the input {node.name} is a {type(spec).__name__}"
            raise UnplayableError(message)
    return Inputs(numbers, values, dtypes)


def _flat_numbers(
    node: Node, spec: TensorSpec, numbers: Numbers, generator: torch.Generator
) -> Tensor:
    steps = zip(spec.shape, spec.stride, strict=True)
    count = 0 if 0 in spec.shape else 1 + sum((size - 1) * step for size, step in steps)
    if spec.dtype.is_floating_point or spec.dtype.is_complex:
        return _flat_floats(node, spec, numbers, generator, count)
    if spec.dtype is torch.bool:
        return torch.randint(2, (count,), generator=generator, device="cpu").bool()
    users = {operator_name(user).partition(".")[2] or operator_name(user) for user in node.users}
    users = {user.partition(".")[0] for user in users}
    if users and users <= {*_SEED_USERS}:
        large = torch.randint(2**62, (count,), generator=generator, device="cpu")
        return large.to(spec.dtype)
    if spec.dtype is torch.uint8 and users and users <= {*_STATE_USERS}:
        return torch.randint(256, (count,), generator=generator, device="cpu").to(torch.uint8)
    zeros = numbers in {Numbers.ANY_AND_ZEROS, Numbers.POSITIVE_AND_ZEROS}
    small = torch.randint(1 if zeros else 2, (count,), generator=generator, device="cpu")
    return small.to(spec.dtype)


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
            name = operator_name(user).replace("aten.", "").replace("prims.", "").partition(".")[0]
            if name.strip("_") in _ROOTS or _takes_for_variance(user, here):
                return True
            if name in _CARRIERS and len(user.all_input_nodes) == 1:
                pending.append(user)
    return False


def _takes_for_variance(user: Node, given: Node) -> bool:
    """Whether a node of batch normalisation takes its argument for the running variance."""
    arguments = getattr(getattr(user.target, "_schema", None), "arguments", ())
    for argument, value in zip(arguments, user.args, strict=False):
        if value is given and argument.name == "running_var":
            return True
    third = user.args[2] if len(user.args) > _MATRIX else user.kwargs.get("running_var")
    return operator_name(user) == "batch_norm" and third is given


def _as_dtype(value: Tensor, dtype: torch.dtype, *, wide: bool) -> Tensor:
    """A copy with the same strides, in the program's dtype or in its wide one."""
    wanted = WIDE.get(dtype, dtype) if wide else dtype
    with as_traced():  # out of the way of a mode that this is called in
        storage = value.untyped_storage()
        flat = torch.empty(0, dtype=value.dtype, device=value.device).set_(storage)
        copied = flat.to(wanted, copy=True)
        return copied.as_strided(value.shape, value.stride(), value.storage_offset())
