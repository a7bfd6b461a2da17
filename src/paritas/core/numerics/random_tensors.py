"""Random tensors of a kind: numbers in a range, indices, masks, probabilities, matrices.

Each kind takes a shape and a generator. Numbers are drawn in float64, so a dtype changes only their
rounding; huge tensors are drawn in float32. `redraw_values` draws values like given ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

Shape = tuple[int, ...]
Domain = Callable[[Shape, torch.Generator], torch.Tensor]

# Above this number of elements, float64 costs too much.
_HUGE = 1 << 22


def _dtype(shape: Shape) -> torch.dtype:
    return torch.float64 if math.prod(shape) <= _HUGE else torch.float32


def normal(shape: Shape, generator: torch.Generator) -> torch.Tensor:
    """Normally distributed numbers, which most operators accept."""
    return torch.randn(shape, generator=generator, dtype=_dtype(shape))


def between(low: float, high: float) -> Domain:
    """Numbers in an open interval, such as probabilities or arguments of an arc sine."""

    def draw(shape: Shape, generator: torch.Generator) -> torch.Tensor:
        unit = torch.rand(shape, generator=generator, dtype=_dtype(shape))
        # Leave out 1 % at each end, where operators have their poles.
        return low + (high - low) * (0.01 + 0.98 * unit)

    return draw


def away_from_zero(shape: Shape, generator: torch.Generator) -> torch.Tensor:
    """Numbers of both signs for denominators."""
    return between(0.5, 2.0)(shape, generator) * signs(shape, generator)


def signs(shape: Shape, generator: torch.Generator) -> torch.Tensor:
    """+1 and -1, the targets of margin losses."""
    return mask(shape, generator).to(_dtype(shape)) * 2 - 1


def mask(shape: Shape, generator: torch.Generator) -> torch.Tensor:
    """True and False with equal probability."""
    return torch.rand(shape, generator=generator) < 0.5  # noqa: PLR2004


def distribution(shape: Shape, generator: torch.Generator, dim: int = -1) -> torch.Tensor:
    """Probabilities that sum to 1 along a dimension."""
    return torch.softmax(normal(shape, generator), dim if shape else 0)


def log_distribution(shape: Shape, generator: torch.Generator) -> torch.Tensor:
    """Logarithms of probabilities that sum to 1."""
    return torch.log_softmax(normal(shape, generator), -1 if shape else 0)


def whole_numbers(low: int, high: int) -> Domain:
    """Integers from `low` to `high - 1`."""

    def draw(shape: Shape, generator: torch.Generator) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator)

    return draw


def constant(value: int) -> Domain:
    """The same number everywhere, for a counter."""
    return lambda shape, _: torch.full(shape, value)


def indices(low: int, high: int) -> Domain:
    """Indices from `low` to `high - 1` that always include the ends and the middle.

    An off-by-one error in the start or end of a rank's part shows only there, and random indices
    into many rows may miss all of these.
    """

    def draw(shape: Shape, generator: torch.Generator) -> torch.Tensor:
        drawn = torch.randint(low, max(high, low + 1), shape, generator=generator)
        middle = (low + high) // 2
        edge_integers = [high - 1, low, middle, middle - 1]
        required = list(dict.fromkeys(n for n in edge_integers if low <= n < high))
        flat = drawn.reshape(-1)
        count = min(len(required), flat.numel())
        places = torch.randperm(flat.numel(), generator=generator)[:count]
        flat[places] = torch.tensor(required[:count], dtype=flat.dtype)
        return flat.reshape(shape)

    return draw


def permutations(size: int, dim: int) -> Domain:
    """Indices below `size`, all different along a dimension.

    Operators do not define the result if an element is written twice.
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
    """Ascending numbers, for the boundaries of bins."""
    values = normal(shape, generator)
    return values.sort(-1).values if shape else values


def well_conditioned(shape: Shape, generator: torch.Generator) -> torch.Tensor:
    """Well-conditioned square matrices."""
    values = normal(shape, generator)
    size = shape[-1]
    return values / math.sqrt(size) + 3 * torch.eye(shape[-2], size, dtype=values.dtype)


def positive_definite(shape: Shape, generator: torch.Generator) -> torch.Tensor:
    """Symmetric matrices with eigenvalues well above zero."""
    values = normal(shape, generator)
    product = values @ values.mT / shape[-1]
    return product + torch.eye(shape[-1], dtype=values.dtype)


# --- Values like given ones -----------------------------------------------------------------------

# A tensor of at most this many different values is a choice, such as a mask, not a measurement.
FEW_VALUES = 2
# A value beyond this is what a mask writes, such as the lowest float32, and as good as infinite.
HUGE = 1e30


def redraw_values(
    tensor: torch.Tensor, generator: torch.Generator, *, keeps_choices: bool, shrinks: bool = False
) -> torch.Tensor:
    """Other floats of the same kind: the same shape, dtype, signs and limits.

    Integers, masks and what is not finite stay: they say which elements are read.

    Args:
        keeps_choices: a tensor of two values stays, too.
        shrinks: the tensor is also smaller as a whole, where a limit has no effect.
    """
    if not tensor.is_floating_point() or not tensor.numel():
        return tensor
    every = tensor.detach().to("cpu", torch.float64).flatten()
    is_usual = every.abs() < HUGE
    values = every[is_usual]
    spread = torch.rand(len(values), generator=generator, dtype=torch.float64)
    count = len(values.unique())
    if count == 0 or (count == 1 and len(values) < len(every)):
        return tensor  # a mask that is added
    if count == 1:  # a weight of ones, a bias of zeros
        centred = spread - 0.5 if float(values[0]) == 0 else spread / 2 + 0.25
        varied = values + centred
    elif count <= FEW_VALUES < len(values) and keeps_choices:
        return tensor
    else:
        first, second = (values[torch.randperm(len(values), generator=generator)] for _ in range(2))
        is_share = float(values.min()) >= 0 and float(values.max()) <= 1
        blend = first + spread * (second - first)
        varied = blend if is_share else torch.where(spread < 0.5, blend, first * 4**spread / 2)  # noqa: PLR2004
        if shrinks:
            varied = varied * 8 ** -torch.rand((), generator=generator, dtype=torch.float64)
    return every.masked_scatter(is_usual, varied).reshape(tensor.shape).to(tensor)
