"""Arguments that were limited before a function was taken of them: cos(min(x, 7.5))."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from paritas.core.diagnosis.case import widen
from paritas.core.diagnosis.patterns.functions import UNARY
from paritas.core.diagnosis.patterns.unknowns import shorter_numbers
from paritas.core.diagnosis.patterns.variations import Variation
from paritas.core.results.findings import PatternKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from paritas.core.diagnosis.calls import Step

# Fewer elements at a bound, which is solved for, show none.
_FEWEST = 3
# Differences below this share of the values' size are rounding.
_SAME = 1e-5
# Each round of the search for a bound tries so many numbers between the best two.
_TRIED = 33
_ROUNDS = 8


@dataclasses.dataclass(frozen=True)
class Limits:
    """The bounds that numbers were limited to; None where there is none."""

    least: float | None
    most: float | None

    @property
    def words(self) -> str:
        """The bounds in words."""
        low = "" if self.least is None else f"at least {self.least:.7g}"
        high = "" if self.most is None else f"at most {self.most:.7g}"
        return " and ".join(filter(None, (low, high)))

    def apply(self, value: Tensor) -> Tensor:
        """The numbers within the bounds."""
        return value.clamp(min=self.least, max=self.most)


def limits_of(value: Tensor, operand: Tensor, near: float) -> Limits | None:
    """The bounds that make an operand this value; None if there are none, or few elements at them.

    Args:
        near: differences up to this are rounding.
    """
    bounds: list[float | None] = []
    changed = (value - operand).abs() > near
    for side in (-1, 1):
        cut = changed & (side * (operand - value) > 0)
        if bool(cut.any()) and int(cut.sum()) < _FEWEST:
            return None
        bounds.append(float(value[cut].median()) if bool(cut.any()) else None)
    limits = Limits(*bounds)
    inside = ~changed & (limits.apply(operand) == operand)
    if bounds == [None, None] or int(inside.sum()) < _FEWEST:
        return None  # nothing that went through: a constant, rather
    # A bound that rounding made long is shortened.
    short = Limits(*(None if bound is None else float(f"{bound:.6g}") for bound in bounds))
    for tried_limits in (short, limits):
        if float((tried_limits.apply(operand) - value).abs().max()) <= near:
            return tried_limits
    return None


def limited_arguments(step: Step, candidate: Tensor) -> Iterator[Variation]:
    """A function of one tensor, whose argument was limited to bounds that the result shows.

    Where the function rises or falls everywhere, it is the result that looks limited.
    """
    x = step.values.get("self")
    if step.name not in UNARY or not isinstance(x, torch.Tensor) or not x.is_floating_point():
        return
    right = step.run()
    if right.shape != candidate.shape or not bool(torch.isfinite(right).all()):
        return
    x, right = (widen(tensor) for tensor in (x, right))
    wrong = (candidate - right).abs() > _SAME * right.square().mean().sqrt()
    if bool(wrong.all()) or not bool(wrong.any()):
        return
    middle = x[~wrong].median()
    bounds: list[float | None] = []
    for side in (-1, 1):
        cut = wrong & (side * (x - middle) > 0)
        bound = _find_bound(UNARY[step.name], side * x[cut], candidate[cut], side * x[~wrong], side)
        if bound is None and bool(cut.any()):
            return
        bounds.append(bound)
    limits = Limits(*bounds)
    at_bounds = torch.tensor([limit for limit in bounds if limit is not None], dtype=torch.float64)
    values = UNARY[step.name](at_bounds).reshape(-1, *[1] * right.dim())
    went_through = ~wrong & ((right - values).abs() > _SAME).all(0)
    if int(went_through.sum()) < _FEWEST:
        return  # a constant, rather
    sentence = f"the argument of {step.name} is limited to {limits.words}"
    yield Variation(PatternKind.CLIPPED, sentence, partial(_limit_operand, limits=limits))


def _limit_operand(step: Step, limits: Limits) -> Any:
    return step.run(self=limits.apply(step.values["self"]))


def _find_bound(
    function: Callable[[Tensor], Tensor], cut: Tensor, candidate: Tensor, clear: Tensor, side: int
) -> float | None:
    """The number between what is right and what is wrong whose function is what is given."""
    if len(cut) < _FEWEST or not bool(torch.isfinite(candidate).all()):
        return None
    target, near = candidate.median(), _SAME * float(candidate.abs().max())
    below = clear[clear < cut.min()]
    if float((candidate - target).abs().max()) > near or not below.numel():
        return None
    low, high = float(below.max()), float(cut.min())
    for _ in range(_ROUNDS):
        places = torch.linspace(low, high, _TRIED, dtype=torch.float64)
        best = int((function(side * places) - target).abs().argmin())
        low, high = float(places[max(best - 1, 0)]), float(places[min(best + 1, _TRIED - 1)])
    solved = side * float(places[best])
    for number in shorter_numbers(solved):
        value = function(torch.tensor(number, dtype=torch.float64))
        if abs(number - solved) <= _SAME * max(1.0, abs(solved)) and abs(value - target) <= near:
            return number
    return None
