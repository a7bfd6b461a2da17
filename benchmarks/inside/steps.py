"""The values inside of an operator, and what becomes of a precise one that rounds them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# Name of an inner value, and the value -> the value that the rest is computed from.
Steps = Callable[[str, Tensor], Tensor]


def wide(x: Tensor) -> Tensor:
    """In float32 at least, as kernels compute."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def exact(_name: str, value: Tensor) -> Tensor:
    """Every inner value as it is."""
    return value


@dataclasses.dataclass(frozen=True)
class Rounded:
    """One inner value, or its gradient, is rounded to a unit roundoff that need not be a dtype's.

    Attributes:
        site: the name of the value.
        unit: the largest relative error of a rounded value.
        backward: whether the gradient is rounded, not the value.
    """

    site: str
    unit: float
    backward: bool = False

    def __call__(self, name: str, value: Tensor) -> Tensor:
        """The value, rounded if it is the one."""
        if name != self.site or value.dtype is torch.float64:  # nothing is rounded in a lifted run
            return value
        return _Rounding.apply(value, self.unit, self.backward)


class _Rounding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, unit: float, backward: bool) -> Tensor:  # noqa: FBT001
        ctx.unit = unit if backward else None
        return value.clone() if backward else rounded(value, unit)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad if ctx.unit is None else rounded(grad, ctx.unit), None, None


def rounded(value: Tensor, unit: float) -> Tensor:
    """To the nearest multiple of the last digit, which is `unit` of the power of two above it."""
    digit = torch.ldexp(torch.full_like(value, unit), torch.frexp(value).exponent)
    near = (value / digit).round().mul(digit)
    return torch.where(torch.isfinite(value) & (value != 0), near, value)


class Names:
    """Collects the names of inner values, in order."""

    def __init__(self) -> None:
        self.seen: dict[str, None] = {}

    def __call__(self, name: str, value: Tensor) -> Tensor:
        """The value as it is."""
        self.seen.setdefault(name)
        return value
