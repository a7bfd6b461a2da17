"""A sum of products taken apart into its terms, so that it can be computed with some left out."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Protocol

import torch

from paritas.diagnosis.patterns.hypotheses import unravelled

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from paritas.diagnosis.patterns.operations import Operation

__all__ = ["Contraction", "contraction_of"]

# A convolution is computed once for each of its channels.
_MOST_CHANNELS = 128
_MOST_WORK = 1 << 28


class Contraction(Protocol):
    """Sums of products, and perhaps something that is added to them."""

    @property
    def length(self) -> int:
        """How many terms each sum has; of a convolution, how many channels."""

    @property
    def adds(self) -> bool:
        """Whether something else is added: a bias, say."""

    def product(self, chosen: Tensor, times: float = 1.0) -> Tensor:
        """The result if only some of the terms are there, so many times."""

    def terms(self, places: Tensor) -> Tensor:
        """The terms of the elements at some places of the flattened result: one row each."""


def contraction_of(operation: Operation, shape: tuple[int, ...]) -> Contraction | None:
    """An operator as a contraction of that shape, if it is one."""
    inputs, name = operation.inputs, operation.name
    two, three = len(inputs) >= 2, len(inputs) >= 3  # noqa: PLR2004
    if name in ("mm", "bmm", "matmul") and two and min(x.dim() for x in inputs[:2]) >= 2:  # noqa: PLR2004
        return _Product(inputs[0], inputs[1], None, shape)
    if name in ("addmm", "baddbmm") and three:
        return _Product(inputs[1], inputs[2], inputs[0], shape)
    if name == "linear" and two and inputs[0].dim():
        return _Product(inputs[0], inputs[1].mT, inputs[2] if three else None, shape)
    if name == "sum" and len(operation.dims) == 1 and inputs[0].is_floating_point():
        x = inputs[0].movedim(operation.dims[0], -1)
        return _Product(x, torch.ones(x.shape[-1], 1, dtype=x.dtype), None, shape)
    return _convolution_of(operation, shape) if name.startswith("conv") and two else None


@dataclasses.dataclass(frozen=True)
class _Product:
    """left @ right + added."""

    left: Tensor
    right: Tensor
    added: Tensor | None
    shape: tuple[int, ...]

    @property
    def length(self) -> int:
        return self.left.shape[-1]

    @property
    def adds(self) -> bool:
        return self.added is not None

    def product(self, chosen: Tensor, times: float = 1.0) -> Tensor:
        value = (self.left[..., chosen] @ self.right[..., chosen, :]).reshape(self.shape) * times
        return value if self.added is None else value + self.added

    def terms(self, places: Tensor) -> Tensor:
        columns = self.right.shape[-1]
        lead = torch.broadcast_shapes(self.left.shape[:-2], self.right.shape[:-2])
        rows = self.left.shape[-2] if self.left.dim() > 1 else 1
        at = unravelled(places, (*lead, rows, columns))
        batch, row, column = at[:-2], at[-2], at[-1]
        a = self.left.expand(*lead, rows, self.length)[(*batch, row)]
        b = self.right.expand(*lead, *self.right.shape[-2:]).mT[(*batch, column)]
        return a * b


@dataclasses.dataclass(frozen=True)
class _Convolution:
    """A convolution as a sum over the channels that go in."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    convolve: Callable[[Tensor, Tensor], Tensor]

    @property
    def length(self) -> int:
        return self.weight.shape[1]

    @property
    def adds(self) -> bool:
        return self.bias is not None

    def product(self, chosen: Tensor, times: float = 1.0) -> Tensor:
        value = self.convolve(self.x[:, chosen], self.weight[:, chosen]) * times
        if self.bias is None:
            return value
        return value + self.bias.view(1, -1, *(1,) * (value.dim() - 2))

    def terms(self, places: Tensor) -> Tensor:
        channels = range(self.length)
        parts = [self.convolve(self.x[:, [one]], self.weight[:, [one]]) for one in channels]
        return torch.stack([part.flatten()[places] for part in parts], dim=1)


def _convolution_of(operation: Operation, shape: tuple[int, ...]) -> _Convolution | None:
    x, weight, *rest = operation.inputs
    ways: dict[int, Callable[..., Tensor]] = {
        3: torch.nn.functional.conv1d,
        4: torch.nn.functional.conv2d,
        5: torch.nn.functional.conv3d,
    }
    way = ways.get(weight.dim())
    known = operation.context.arguments
    plain = known.get("groups", 1) == 1 and not known.get("transposed", False)
    work = math.prod(shape) * weight.numel() // max(1, weight.shape[0])
    if way is None or not plain or weight.shape[1] > _MOST_CHANNELS or work > _MOST_WORK:
        return None
    options = {name: known[name] for name in ("stride", "padding", "dilation") if name in known}

    def convolve(value: Tensor, kernel: Tensor) -> Tensor:
        return way(value, kernel, None, **options)

    return _Convolution(x, weight, rest[0] if rest else None, convolve)
