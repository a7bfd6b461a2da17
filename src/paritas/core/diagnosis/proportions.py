"""The factor between two tensors by least squares, in units of the noise."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from paritas.core.numerics.criterion import MAX_Z

if TYPE_CHECKING:
    from torch import Tensor

    from paritas.core.diagnosis.case import Case


def proportion(case: Case, x: Tensor, y: Tensor, mask: Tensor) -> tuple[float, float]:
    """The factor of `y` over `x` by weighted least squares, with its standard error."""
    noise = case.unit[mask]
    return _least_squares(x[mask] / noise, y[mask] / noise)


def refined_proportion(case: Case, x: Tensor, y: Tensor, start: float) -> tuple[float, float]:
    """The factor fitted to all elements that are near a first estimate."""
    near = (y - start * x).abs() <= MAX_Z * max(1.0, abs(start)) * case.unit
    return proportion(case, x, y, near & case.both_finite)


def robust_proportion(case: Case, x: Tensor, y: Tensor) -> tuple[float, float]:
    """The factor of `y` over `x` on the wrong elements, robust against a few outliers.

    Starts with the median of the quotients with the least noise, then fits what is near it.
    """
    places = case.some_wrong
    noise = case.unit.reshape(-1)[places]
    x, y = x.reshape(-1)[places], y.reshape(-1)[places]
    use = torch.isfinite(x) & torch.isfinite(y) & (x != 0) & torch.isfinite(noise)
    x, y, noise = x[use], y[use], noise[use]
    if x.numel() and not x.is_complex():
        telling = (x / noise).abs()
        clear = telling >= telling.median()
        start = float((y[clear] / x[clear]).median())
        near = (y - start * x).abs() <= MAX_Z * max(1.0, abs(start)) * noise
        if bool(near.any()):
            x, y, noise = x[near], y[near], noise[near]
    return _least_squares(x / noise, y / noise)


def _least_squares(over: Tensor, under: Tensor) -> tuple[float, float]:
    """Least squares of `under` over `over`, both in units of the noise."""
    below = float(over.abs().square().sum())
    if not (below > 0 and math.isfinite(below)):
        return math.nan, math.inf
    product = (over.conj() * under).real.sum() if over.is_complex() else over @ under
    factor = float(product) / below
    scatter = float((under - factor * over).abs().square().mean().sqrt())
    return factor, scatter / math.sqrt(below)
