"""Models whose numbers are fitted to the candidate: what they predict, and whether that holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from paritas.core.diagnosis.case import Extent, weigh
from paritas.core.diagnosis.leftovers import fits_honestly

if TYPE_CHECKING:
    from torch import Tensor

    from paritas.core.diagnosis.case import Case, Weight


def weigh_fit(
    case: Case,
    prediction: Tensor,
    *,
    parameters: float = 0.0,
    counted: int = 0,
    cost: float = 0.0,
    slack: float = 1.0,
    extent: Extent = Extent.ALL,
) -> Weight | None:
    """The evidence for a model; None if it does not hold, or leaves more than rounding does.

    Args:
        parameters: how many numbers were fitted.
        counted: how many of these the elements that are left must outnumber.
        cost: log2 of how many models were tried.
        slack: factor on the noise, if the prediction is noisier than the reference.
        extent: which elements it is about.
    """
    weight = weigh(case, prediction, parameters=parameters, cost=cost, slack=slack, extent=extent)
    is_honest = weight is not None and fits_honestly(
        case, prediction, parameters=counted, slack=slack
    )
    return weight if is_honest else None


def slope_along(right: Tensor, candidate: Tensor, dims: tuple[int, ...] | list[int]) -> Tensor:
    """The factor of each slice by least squares; what is equal along these axes has one."""
    over = (right * candidate).sum(dims, keepdim=True)
    return over / right.square().sum(dims, keepdim=True)


# A number that is this near to one of so few digits is one that a person wrote.
_DIGITS = 3
AS_WRITTEN = 2e-5


def shorten_number(number: float) -> float:
    """A fitted number, or the short one that it is near to."""
    short = float(f"{number:.{_DIGITS}g}")
    return short if abs(short - number) <= AS_WRITTEN * abs(number) else number


def is_determined(matrix: Tensor, most_condition: float) -> bool:
    """Whether a system of equations says what was multiplied by the matrix."""
    sizes = torch.linalg.svdvals(matrix)
    return not float(sizes[..., -1].min()) * most_condition < float(sizes[..., 0].max())
