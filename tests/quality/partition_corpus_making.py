"""How the calls and rules of the partition corpora are written."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

from paritas.core.operators.calls import OperatorCall
from paritas.core.placement.placement import Recipe
from paritas.core.results.items import Partial, Shard

if TYPE_CHECKING:
    from collections.abc import Callable

SEED = 7
CAT0, CAT1, CAT2, CAT3 = (Shard(dim) for dim in range(4))
S0, S1, S2, S3 = (Shard(dim) for dim in range(4))
SUM, AVG = Partial("sum"), Partial("avg")


@dataclasses.dataclass(frozen=True)
class Case:
    """A rule; `make` gives the call in a dtype."""

    name: str
    make: Callable[[torch.dtype], OperatorCall]
    recipe: Recipe


def rule(inputs, *outputs, numbers=None):
    """A recipe from plain dictionaries."""
    return Recipe(tuple(inputs.items()), outputs, tuple((numbers or {}).items()))


def drawn(dtype, *shape, low=None, seed=SEED):
    """Normal numbers, or uniform ones from `low` upwards."""
    generator = torch.Generator().manual_seed(seed)
    if low is None:
        return torch.randn(shape, generator=generator).to(dtype)
    return (torch.rand(shape, generator=generator) + low).to(dtype)


def distinct(dtype, *shape):
    """Numbers of which no two are equal, in any dtype of up to 256 of them."""
    count = torch.Size(shape).numel()
    generator = torch.Generator().manual_seed(SEED)
    order = torch.randperm(count, generator=generator).reshape(shape)
    return (order - count // 2 + 0.5).to(dtype) / 8


def integers(top, *shape):
    """Indices below `top`, its last among them."""
    generator = torch.Generator().manual_seed(SEED + top)
    result = torch.randint(top, shape, generator=generator)
    result.view(-1)[-1] = top - 1
    return result


def operator(function, *makers, without=(), **kwargs):
    """A call whose arguments are made in a dtype: shapes, functions of the dtype, or values."""

    def make(dtype):
        return OperatorCall(
            function,
            tuple(_made(maker, dtype, SEED + place) for place, maker in enumerate(makers)),
            {name: _made(maker, dtype, SEED + len(name)) for name, maker in kwargs.items()},
            without_gradient=frozenset(without),
        )

    return make


@dataclasses.dataclass(frozen=True)
class Shape:
    """Stands for a drawn tensor."""

    shape: tuple[int, ...]
    low: float | None = None
    distinct: bool = False


def t(*shape, low=None, distinct=False):
    """A tensor to be drawn, of this shape."""
    return Shape(shape, low, distinct)


def _made(maker, dtype, seed):
    if isinstance(maker, Shape) and maker.distinct:
        return distinct(dtype, *maker.shape)
    if isinstance(maker, Shape):
        return drawn(dtype, *maker.shape, low=maker.low, seed=seed)
    if isinstance(maker, list):
        return [_made(item, dtype, seed + 100 * place) for place, item in enumerate(maker)]
    return maker.clone() if isinstance(maker, torch.Tensor) else maker
