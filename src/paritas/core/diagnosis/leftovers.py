"""What a prediction leaves of a candidate, compared with what rounding leaves."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from paritas.core.diagnosis.case import near, noise_of_prediction, same

if TYPE_CHECKING:
    from torch import Tensor

    from paritas.core.diagnosis.case import Case

# The largest mean square, in units of the noise, that an honest computation leaves.
_HONEST = 1.6
# How many wrong elements each fitted number must explain.
_EACH_EXPLAINS = 3


def mean_square_left(case: Case, prediction: Tensor, mask: Tensor | None = None) -> float:
    """The mean square of what a prediction leaves, in units of the noise.

    Args:
        mask: the elements that count; all of them by default.
    """
    unit = torch.maximum(noise_of_prediction(case, prediction, None), case.unit)
    residual = torch.where(same(case.given, prediction), 0.0, (case.given - prediction) / unit)
    residual = residual if mask is None else residual[mask]
    if not residual.numel():
        return 0.0
    return float(residual.abs().nan_to_num(0.0, 0.0, 0.0).square().mean())


def fits_honestly(
    case: Case, prediction: Tensor, *, parameters: int = 0, slack: float = 1.0
) -> bool:
    """Whether no more is left of the wrong elements than rounding leaves.

    The limit for one element has room for the unluckiest of millions. A smooth error that many
    numbers are fitted to stays below it everywhere, and is still no explanation.
    """
    if case.is_exact:
        return True
    count = int(case.wrong.sum())
    if parameters * _EACH_EXPLAINS > count:
        return False
    limit = _HONEST * slack**2 * (1 + 4 / math.sqrt(count))
    # The few elements that it does not explain do not count here.
    explained = case.wrong & near(case.given, prediction, case.unit, slack=slack)
    return mean_square_left(case, prediction, explained) <= limit
