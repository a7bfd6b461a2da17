"""A few figures by which a tensor is recognized in another run."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING

import torch

from paritas.core.numerics.sketch import signs_from
from paritas.core.torch_private.watching import has_values

if TYPE_CHECKING:
    from torch import Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class Figures:
    """A few sums by which a tensor is recognized.

    The sums are taken of log(1 + |x|), with the sign of x: the huge numbers of masks would hide all
    others. They are as exact as float64, and an error of each element moves them by no more than
    its share of the norm.

    Attributes:
        shape: the shape.
        dtype: the dtype.
        signed: two sums with pseudo-random signs, which depend on the order of the elements.
        plain: the sum of the values and of their cubes, which do not depend on it.
        norm: the root of the sum of the squares.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    signed: tuple[float, float]
    plain: tuple[float, float]
    norm: float

    @property
    def is_exact(self) -> bool:
        """Whether it has integers or truth values."""
        return not (self.dtype.is_floating_point or self.dtype.is_complex)

    def distance(self, other: Figures, *, ordered: bool = True) -> float:
        """How far two values are apart, as a share of their norm; infinite for other kinds."""
        if self.is_exact is not other.is_exact:
            return float("inf")
        pairs = zip(
            self.signed if ordered else self.plain,
            other.signed if ordered else other.plain,
            strict=True,
        )
        size = max(self.norm, other.norm)
        apart = max(abs(self.norm - other.norm), *(abs(a - b) for a, b in pairs))
        return apart / size if size else apart


# NaN and infinities, as numbers that no logarithm of a finite number gives.
_NOT_FINITE = {"nan": 1537.25, "posinf": 1021.5, "neginf": -1021.5}
_SECOND_SIGNS = 1 << 40


@torch.no_grad()
def figures_of(tensor: Tensor) -> Figures | None:
    """The figures of a tensor; None if it holds no plain values."""
    if tensor.layout is not torch.strided or tensor.is_quantized or not has_values(tensor):
        return None
    if tensor.is_nested:
        return None
    plain = tensor.detach()
    if plain.is_complex():
        plain = torch.view_as_real(plain.resolve_conj())
    if plain.dtype.is_floating_point and plain.dtype.itemsize == 1:
        plain = plain.float()
    flat = plain.reshape(-1)
    sums, largest = [0.0] * 5, 0.0
    for start in range(0, flat.numel(), _BLOCK):
        values = flat[start : start + _BLOCK].to(torch.float64)
        if flat.dtype.is_floating_point:
            values = (values.sign() * values.abs().log1p()).nan_to_num(**_NOT_FINITE)
        count, device = values.numel(), values.device
        squares = values * values
        block = torch.stack(
            [
                torch.dot(values, _signs(start, count, device)),
                torch.dot(values, _signs(_SECOND_SIGNS + start, count, device)),
                values.sum(),
                torch.dot(squares, values),
                squares.sum(),
                squares.max(),
            ]
        ).tolist()
        sums = [total + other for total, other in zip(sums, block[:5], strict=True)]
        largest = max(largest, block[5])
    # Cubes are compared with the norm like the others.
    cubes = sums[3] / largest if largest else 0.0
    shape, norm = tuple(tensor.shape), sums[4] ** 0.5
    return Figures(shape, tensor.dtype, (sums[0], sums[1]), (sums[2], cubes), norm)


# How many elements are summed at a time, and how many signs are kept.
_BLOCK = 1 << 22
_MOST_CACHED = 1 << 20


def _signs(start: int, count: int, device: torch.device) -> Tensor:
    if count > _MOST_CACHED:
        return signs_from(start, count, device).to(torch.float64)
    return _cached_signs(start, count, device)


@functools.lru_cache(maxsize=128)
def _cached_signs(start: int, count: int, device: torch.device) -> Tensor:
    return signs_from(start, count, device).to(torch.float64)
