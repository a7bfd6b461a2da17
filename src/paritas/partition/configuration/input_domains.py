"""Random tensors of the kinds that operators take: indices, masks, probabilities and so on.

Each function is given a shape and a generator. Numbers are drawn in float64, so that a dtype
changes their rounding and not the numbers; what is huge is drawn in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

__all__ = [
    "Domain",
    "away_from_zero",
    "between",
    "conditioned",
    "constant",
    "distribution",
    "indices",
    "log_distribution",
    "mask",
    "normal",
    "permutations",
    "positive_definite",
    "signs",
    "sorted_values",
    "whole_numbers",
]

Shape = tuple[int, ...]
Domain = Callable[[Shape, torch.Generator], torch.Tensor]

# Above so many elements, float64 costs more than it tells.
_HUGE = 1 << 22


def _dtype(shape: Shape) -> torch.dtype:
    return torch.float64 if math.prod(shape) <= _HUGE else torch.float32


def normal(shape: Shape, generator: torch.Generator) -> torch.Tensor:
    """Any numbers: what most operators take."""
    return torch.randn(shape, generator=generator, dtype=_dtype(shape))


def between(low: float, high: float) -> Domain:
    """Numbers of an open interval: positive ones, probabilities, an arc sine's arguments."""

    def draw(shape: Shape, generator: torch.Generator) -> torch.Tensor:
        unit = torch.rand(shape, generator=generator, dtype=_dtype(shape))
        # A hundredth at each end is left out: the ends are where the operator has its poles.
        return low + (high - low) * (0.01 + 0.98 * unit)

    return draw


def away_from_zero(shape: Shape, generator: torch.Generator) -> torch.Tensor:
    """Denominators of both signs."""
    return between(0.5, 2.0)(shape, generator) * signs(shape, generator)


def signs(shape: Shape, generator: torch.Generator) -> torch.Tensor:
    """+1 and -1: the targets of margin losses."""
    return mask(shape, generator).to(_dtype(shape)) * 2 - 1


def mask(shape: Shape, generator: torch.Generator) -> torch.Tensor:
    """True and False, each half of the time."""
    return torch.rand(shape, generator=generator) < 0.5  # noqa: PLR2004


def distribution(shape: Shape, generator: torch.Generator, dim: int = -1) -> torch.Tensor:
    """Probabilities that sum up to 1 along a dimension."""
    return torch.softmax(normal(shape, generator), dim if shape else 0)


def log_distribution(shape: Shape, generator: torch.Generator) -> torch.Tensor:
    """Logarithms of such."""
    return torch.log_softmax(normal(shape, generator), -1 if shape else 0)


def whole_numbers(low: int, high: int) -> Domain:
    """Whole numbers from `low` up to, and without, `high`."""

    def draw(shape: Shape, generator: torch.Generator) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator)

    return draw


def constant(value: int) -> Domain:
    """One number: a counter."""
    return lambda shape, _: torch.full(shape, value)


def indices(low: int, high: int) -> Domain:
    """Indices from `low` up to, and without, `high`; the ends are hit before anything else.

    A rank that is off by one in where its part begins or ends is wrong at the ends of the range,
    and at its middle; among many rows, random indices may miss all of these.
    """

    def draw(shape: Shape, generator: torch.Generator) -> torch.Tensor:
        drawn = torch.randint(low, max(high, low + 1), shape, generator=generator)
        middle = (low + high) // 2
        wanted = [high - 1, low, middle, middle - 1]
        telling = list(dict.fromkeys(n for n in wanted if low <= n < high))
        flat = drawn.reshape(-1)
        count = min(len(telling), flat.numel())
        places = torch.randperm(flat.numel(), generator=generator)[:count]
        flat[places] = torch.tensor(telling[:count], dtype=flat.dtype)
        return flat.reshape(shape)

    return draw


def permutations(size: int, dim: int) -> Domain:
    """Indices below `size` of which none comes twice along a dimension.

    Written to twice, an element is whichever comes last: no operator promises which that is.
    """

    def draw(shape: Shape, generator: torch.Generator) -> torch.Tensor:
        if not shape:
            return torch.randint(0, max(size, 1), shape, generator=generator)
        lanes = list(shape)
        lanes[dim] = size
        keys = torch.rand(lanes, generator=generator)
        return keys.argsort(dim).narrow(dim, 0, min(shape[dim], size)).contiguous()

    return draw


def sorted_values(shape: Shape, generator: torch.Generator) -> torch.Tensor:
    """Rising numbers: the borders of bins."""
    values = normal(shape, generator)
    return values.sort(-1).values if shape else values


def conditioned(shape: Shape, generator: torch.Generator) -> torch.Tensor:
    """Square matrices that can be inverted without losing digits."""
    values = normal(shape, generator)
    size = shape[-1]
    return values / math.sqrt(size) + 3 * torch.eye(shape[-2], size, dtype=values.dtype)


def positive_definite(shape: Shape, generator: torch.Generator) -> torch.Tensor:
    """Symmetric matrices with eigenvalues well above zero."""
    values = normal(shape, generator)
    product = values @ values.mT / shape[-1]
    return product + torch.eye(shape[-1], dtype=values.dtype)
