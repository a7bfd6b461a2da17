"""Rounding to narrow formats, done in float64."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["FORMATS", "Format"]


@dataclasses.dataclass(frozen=True)
class Format:
    """A floating-point format.

    Attributes:
        name: as people call it.
        digits: bits after the point of a normal number.
        least: exponent of the smallest normal number.
        largest: the largest finite number.
    """

    name: str
    digits: int
    least: int
    largest: float

    @property
    def unit(self) -> float:
        """Unit roundoff."""
        return 2.0 ** -(self.digits + 1)

    def spacing(self, value: Tensor) -> Tensor:
        """The distance of neighbours around each value."""
        _, exponent = torch.frexp(value)
        exponent = (exponent - 1).clamp(min=self.least)
        return torch.ldexp(torch.ones_like(value), exponent - self.digits)

    def rounded(self, value: Tensor) -> Tensor:
        """To the nearest, ties to even; what is too large stays, for it is no rounding."""
        step = self.spacing(value)
        return (value / step).round() * step

    def truncated(self, value: Tensor) -> Tensor:
        """Towards zero."""
        step = self.spacing(value)
        return (value / step).trunc() * step

    def holds(self, value: Tensor) -> Tensor:
        """Which values are numbers of this format."""
        return (self.rounded(value) == value) & (value.abs() <= self.largest)


# The coarsest first: what one of them holds, the later ones mostly hold as well.
FORMATS = (
    Format("float8_e5m2", 2, -14, 57344.0),
    Format("float8_e4m3", 3, -6, 448.0),
    Format("bfloat16", 7, -126, 3.3895313892515355e38),
    Format("float16", 10, -14, 65504.0),
    Format("tf32", 10, -126, 3.4011621342146535e38),
)
