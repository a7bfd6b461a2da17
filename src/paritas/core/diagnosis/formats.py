"""Floating-point formats with fewer digits than float32."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclasses.dataclass(frozen=True)
class NarrowFormat:
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
        """The spacing of the format around each value."""
        _, exponent = torch.frexp(value)
        exponent = (exponent - 1).clamp(min=self.least)
        return torch.ldexp(torch.ones_like(value), exponent - self.digits)

    def round_to_nearest(self, value: Tensor) -> Tensor:
        """Round to nearest, ties to even; values out of range are kept."""
        step = self.spacing(value)
        return (value / step).round() * step

    def round_to_zero(self, value: Tensor) -> Tensor:
        """Round towards zero."""
        step = self.spacing(value)
        return (value / step).trunc() * step

    def holds(self, value: Tensor) -> Tensor:
        """Which values the format can represent."""
        return (self.round_to_nearest(value) == value) & (value.abs() <= self.largest)


def format_of(dtype: torch.dtype) -> NarrowFormat:
    """The format of a dtype."""
    info = torch.finfo(dtype)
    digits, least = (round(math.log2(number)) for number in (1 / info.eps, info.tiny))
    return NarrowFormat(str(dtype), digits, least, info.max)


def format_with_digits(digits: int) -> NarrowFormat:
    """A format with this many significant binary digits, of the range of float64."""
    least, most = torch.finfo(torch.float64).tiny, torch.finfo(torch.float64).max
    return NarrowFormat(f"{digits} digits", digits - 1, round(math.log2(least)), most)


# The coarsest first: later formats represent most of the values of earlier ones.
FORMATS = (
    NarrowFormat("float8_e5m2", 2, -14, 57344.0),
    NarrowFormat("float8_e4m3", 3, -6, 448.0),
    NarrowFormat("bfloat16", 7, -126, 3.3895313892515355e38),
    NarrowFormat("float16", 10, -14, 65504.0),
    NarrowFormat("tf32", 10, -126, 3.4011621342146535e38),
)
