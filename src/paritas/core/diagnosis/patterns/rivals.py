"""Which of several mistakes that reproduce the candidate is the explanation."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import TYPE_CHECKING

import torch

from paritas.core.diagnosis.calls import UNUSABLE
from paritas.core.diagnosis.case import widen
from paritas.core.results.findings import PatternKind

if TYPE_CHECKING:
    from torch import Tensor

    from paritas.core.diagnosis.case import Case, Weight
    from paritas.core.diagnosis.patterns.predictions import Predictor
    from paritas.core.diagnosis.patterns.variations import Variation

# An explanation that is this much less likely than the best (by the natural logarithm) is none.
_LESS_LIKELY = 8.0
# Smaller scatter than this share of the noise says nothing.
_LEAST_SCATTER = 1e-3
# Mistakes whose freedom differs by no more than this are equally simple.
_FEW_CHOICES = 4
# Predictions whose scatter differs by less than this share are the same.
_SAME = 1e-6
_ORDER = tuple(PatternKind)
# How close a prediction must be to be tried in the program's own dtype, as a share of the values.
_CLOSE = 1e-5


@dataclasses.dataclass(frozen=True)
class Reproduction:
    """A mistake that reproduces the candidate.

    Attributes:
        place: the place of the operator in the call.
        weight: the evidence.
        scatter: the mean square of what is left, in units of the noise.
        in_part: the mistake was made only in the block that is wrong.
        of_call: it is a mistake of the whole call, not of one of its operators.
        of_formula: it is a mistake between two steps of the operator's own formula.
    """

    variation: Variation
    place: int
    weight: Weight
    scatter: float
    in_part: bool = False
    of_call: bool = False
    of_formula: bool = False

    @property
    def freedom(self) -> int:
        """How many numbers and places were chosen by the candidate."""
        return self.variation.fitted + self.variation.chosen


def most_likely(case: Case, reproductions: list[Reproduction]) -> list[Reproduction]:
    """Those that reproduce the candidate best; none if one factor or offset does it better."""
    complete = [reproduction for reproduction in reproductions if not reproduction.in_part]
    reproductions = complete or reproductions
    if not reproductions:
        return []
    least = min(reproduction.scatter for reproduction in reproductions)
    count = case.reference.numel()
    unit = 2 * max(least, _LEAST_SCATTER**2)
    limit = least + _LESS_LIKELY * unit / count
    likely = [reproduction for reproduction in reproductions if reproduction.scatter <= limit]
    # What was chosen freely for many elements explains no more than what has a few numbers.
    fewest = min(reproduction.freedom for reproduction in likely)
    return [
        reproduction for reproduction in likely if reproduction.freedom <= fewest + _FEW_CHOICES
    ]


def is_decided(predictor: Predictor, best: list[Reproduction], chosen: Reproduction) -> bool:
    """Whether mistakes of other kinds with the same numbers are the same mistake.

    If a factor is zero everywhere, nobody can see whether it was left out, or added instead; if one
    operand is larger everywhere, whether it was left out of a maximum, or a minimum was taken. Then
    they are asked again with operands that vary.
    """
    rivals = [rival for rival in best if rival.variation.kind is not chosen.variation.kind]
    floating = predictor.call.floating
    varied = _mix_ordered(
        [_vary(tensor) if _is_constant(tensor) else tensor for tensor in floating]
    )
    if not rivals or all(tensor is other for tensor, other in zip(floating, varied, strict=True)):
        return True
    try:
        other = dataclasses.replace(predictor, call=predictor.call.with_floating(varied))
    except UNUSABLE:
        return True
    numbers = [
        other.value(rival.place, rival.variation.change, wide=True) for rival in (chosen, *rivals)
    ]
    predictions = [widen(number) for number in numbers if number is not None]
    return all(
        torch.allclose(predictions[0], number, rtol=_CLOSE, equal_nan=True)
        for number in predictions[1:]
    )


def _is_constant(tensor: Tensor) -> bool:
    return tensor.numel() > 1 and bool((tensor == tensor.reshape(-1)[0]).all())


def _vary(tensor: Tensor) -> Tensor:
    steps = torch.linspace(0.25, 0.75, tensor.numel(), dtype=torch.float64)
    return tensor + steps.reshape(tensor.shape).to(tensor)


def _mix_ordered(tensors: list[Tensor]) -> list[Tensor]:
    """Of two tensors of which one is larger everywhere, make neither the larger one."""
    for first, second in itertools.combinations(range(len(tensors)), 2):
        first_tensor, other = tensors[first], tensors[second]
        if not _is_ordered(first_tensor, other):
            continue
        if first_tensor.shape == other.shape:
            places = torch.arange(first_tensor.numel(), device=first_tensor.device).reshape(
                first_tensor.shape
            )
            is_even = places % 2 == 0
            tensors[first] = torch.where(is_even, first_tensor, other)
            tensors[second] = torch.where(is_even, other, first_tensor)
        else:
            wide, narrow = (
                (first, second) if first_tensor.numel() > other.numel() else (second, first)
            )
            tensors[narrow] = tensors[narrow] + (tensors[wide].median() - tensors[narrow].median())
    return tensors


def _is_ordered(first: Tensor, other: Tensor) -> bool:
    """Whether one of two tensors is larger everywhere, as a number or in size."""
    sizes = zip(reversed(first.shape), reversed(other.shape), strict=False)
    is_comparable = all(size == length or 1 in (size, length) for size, length in sizes)
    if not is_comparable or not first.numel() or not other.numel():
        return False
    return any(
        bool((left >= right).all()) or bool((left <= right).all())
        for left, right in ((first, other), (first.abs(), other.abs()))
    )


def preference(reproduction: Reproduction) -> tuple[bool, int]:
    """Among mistakes with the same result, another function is the least likely."""
    kind = reproduction.variation.kind
    return kind is PatternKind.OTHER_FUNCTION, _ORDER.index(kind)


def is_rival(reproduction: Reproduction, chosen: Reproduction) -> bool:
    """Whether it says something else: two names for the same numbers are the same mistake."""
    scatters = reproduction.scatter, chosen.scatter
    same_numbers = max(scatters) <= _LEAST_SCATTER**2 or math.isclose(*scatters, rel_tol=_SAME)
    return reproduction.variation.kind is not chosen.variation.kind and not same_numbers
