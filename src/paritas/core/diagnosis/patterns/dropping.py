"""Values that are zero at drawn places, the others scaled up for it: dropout that is left on."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import torch

from paritas.core.diagnosis.case import supported_pattern
from paritas.core.results.findings import PatternKind

if TYPE_CHECKING:
    from torch import Tensor

    from paritas.core.diagnosis.case import Case
    from paritas.core.results.findings import Pattern

# The fewest elements of which some are dropped, and the fewest that are.
_FEWEST = 32
_FEWEST_DROPPED = 4
# Values below this share of the largest one are zero, as far as a solved value tells.
_NOTHING = 1e-6
_NEAR = 1e-4
# How far the share of zeros may be from what the factor says, in standard deviations.
_SIGMAS = 4.0


@dataclasses.dataclass(frozen=True)
class Dropped:
    """What was left of some values.

    Attributes:
        kept: which ones are not zero.
        factor: what those are multiplied by.
    """

    kept: Tensor
    factor: float

    @property
    def kind(self) -> PatternKind:
        """Dropout has a mask and a factor; without the factor, zeros are all that is seen."""
        return PatternKind.ZEROS if self.factor == 1 else PatternKind.MASK

    @property
    def sentence(self) -> str:
        """What happened to the values."""
        share = 1 - float(self.kept.double().mean())
        if self.factor == 1:
            return f"{share:.1%} of the elements are read as 0"
        return (
            f"{share:.1%} of the elements are dropped and the others multiplied by "
            f"{self.factor:.4g}, as if dropout were on"
        )


def dropped_elements(value: Tensor, right: Tensor) -> Dropped | None:
    """Which of the right values were dropped; None if that is not what happened.

    The factor must be 1, or the one that makes up for the share that is dropped. Small values that
    are dropped, or negative ones, are another matter.
    """
    telling = right.abs() > _NOTHING * float(right.abs().max())
    if int(telling.sum()) < _FEWEST:
        return None
    is_zero = value.abs() <= _NOTHING * float(right.abs().max())
    dropped, retained = is_zero & telling, ~is_zero & telling
    count = int(dropped.sum())
    if count < _FEWEST_DROPPED or not bool(retained.any()):
        return None
    factor = float((value[retained] / right[retained]).median())
    factor = 1.0 if abs(factor - 1) <= _NEAR else factor
    if factor != 1 and not _makes_up_for(factor, count, int(telling.sum())):
        return None
    if _depends_on_value(right[dropped], right[retained]) or _is_of_slices(dropped, telling):
        return None
    expected = torch.where(is_zero, 0.0, factor * right)
    is_near = (value - expected).abs() <= _NEAR * (expected.abs() + right.square().mean().sqrt())
    return Dropped(~is_zero, factor) if bool(is_near.all()) else None


def _makes_up_for(factor: float, dropped: int, total: int) -> bool:
    """Whether the sum stays the same on average."""
    share = 1 - 1 / factor if factor > 1 else 0.0
    spread = _SIGMAS * math.sqrt(share * (1 - share) / total)
    return 0 < share < 1 and abs(dropped / total - share) <= spread


def _depends_on_value(dropped: Tensor, retained: Tensor) -> bool:
    """Whether the values themselves say which of them are dropped."""
    orders = (dropped, retained), (dropped.abs(), retained.abs())
    return any(
        bool(values.max() < other.min()) or bool(values.min() > other.max())
        for values, other in orders
    )


def _is_of_slices(dropped: Tensor, telling: Tensor) -> bool:
    """Whether whole slices are dropped: terms of a sum that are left out, or a tile."""
    for axis in range(dropped.dim() if dropped.dim() > 1 else 0):
        others = [dim for dim in range(dropped.dim()) if dim != axis]
        whole_slices = (dropped | ~telling).all(dim=others)
        if bool((whole_slices == dropped.any(dim=others)).all()):
            return True
    return False


def propose_dropped(case: Case) -> list[Pattern]:
    """`mask`: values are dropped where nothing should be."""
    if case.is_exact or case.given.is_complex() or not case.is_finite:
        return []
    if bool((case.right == 0).all()):
        return []
    dropped = dropped_elements(case.given, case.right)
    if dropped is None or dropped.kind is PatternKind.ZEROS:
        return []  # zeros of a result have a proposer of their own
    prediction = torch.where(dropped.kept, dropped.factor * case.right, 0.0)
    # Each element may be dropped or not.
    cost = float(case.right.numel())
    pattern = supported_pattern(
        case,
        prediction,
        PatternKind.MASK,
        dropped.sentence,
        cost=cost,
        evidence={"factor": dropped.factor},
    )
    return [] if pattern is None else [pattern]
