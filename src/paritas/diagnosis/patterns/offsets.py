"""Offset: something was added or left out, one number or a vector along an axis."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from paritas.diagnosis.patterns.addends import propose_addends
from paritas.diagnosis.patterns.weighing import (
    Weight,
    beyond_noise,
    noise_of,
    numbers,
    refined_proportion,
    robust_proportion,
    weigh,
)
from paritas.numerics.criterion import unit_roundoff
from paritas.numerics.diagnoses import Pattern

if TYPE_CHECKING:
    from torch import Tensor

    from paritas.diagnosis.cases import Case

__all__ = ["propose"]

_STANDARD_ERRORS = 8.0


def propose(case: Case) -> list[Pattern]:
    """Known tensors first; then one number; then a vector that is nowhere known."""
    if case.reference.dtype == torch.bool or not beyond_noise(case):
        return []
    known = propose_addends(case)
    return known + (_one_number(case) or ([] if known else _along_axes(case)))


def _one_number(case: Case) -> list[Pattern]:
    ones = torch.ones_like(case.right)
    offset, error = robust_proportion(case, ones, case.error)
    if not math.isfinite(offset) or abs(offset) <= _STANDARD_ERRORS * error:
        return []
    weight = _weigh_offset(case, offset)
    if weight is None:
        return []
    if weight.whole:
        offset, error = refined_proportion(case, ones, case.error, offset)
    evidence = {"offset": offset, "standard error": error, **weight.evidence}
    sentence = f"{_amount(case, offset, error)} is {'added' if offset > 0 else 'subtracted'}"
    return [
        Pattern(kind="offset", confidence=weight.confidence, sentence=sentence, evidence=evidence)
    ]


def _weigh_offset(case: Case, offset: float) -> Weight | None:
    if case.is_exact:
        offset = round(offset)
    return weigh(case, case.right + offset, parameters=1.0, slack=_coarser(case, offset))


def _coarser(case: Case, offset: float) -> float:
    """How much more noise there is: sums with a large number are rounded at its size."""
    if case.is_exact:
        return 1.0
    usual = float(noise_of(case).median())
    return max(1.0, unit_roundoff(case.candidate.dtype) * abs(offset) / usual)


def _amount(case: Case, offset: float, error: float) -> str:
    """The number, or what it is called."""
    for name, value in case.context.arguments.items():
        if isinstance(value, int | float) and not isinstance(value, bool) and value:
            tolerance = min(max(4 * error, 1e-6 * abs(value)), 0.02 * abs(value))
            if abs(abs(offset) - abs(value)) <= tolerance:
                return f"the argument {name} ({value:g})"
    finite = case.right[torch.isfinite(case.right)]
    mean = float(finite.mean().real) if finite.is_complex() else float(finite.mean())
    spread = float(finite.std(correction=0)) if finite.numel() else 0.0
    if spread and mean and abs(abs(offset) - abs(mean)) <= min(4 * error, 0.02 * abs(mean)):
        return f"the tensor's mean ({mean:.4g})"
    known = math.log10(abs(offset) / error) if error > 0 else math.inf
    return f"{abs(offset):.{int(min(max(known, 3), 7))}g}"


def _along_axes(case: Case) -> list[Pattern]:
    """A vector along one axis, or the same for all indices of one axis."""
    dims = [dim for dim, size in enumerate(case.shape) if size > 1]
    if len(dims) < 2:  # noqa: PLR2004
        return []
    kept: list[tuple[int, ...]] = [(dim,) for dim in dims]
    if len(dims) > 2:  # noqa: PLR2004
        kept += [tuple(other for other in dims if other != dim) for dim in dims]
    mask = case.wrong & numbers(case)
    weight = torch.where(mask, noise_of(case) ** -2, 0.0)
    error = (weight * torch.where(mask, case.error, torch.zeros_like(case.error)), weight)
    found = [pattern for keep in kept if (pattern := _axis_offset(case, keep, error)) is not None]
    # The one with the fewest numbers in it that explains as much.
    return sorted(found, key=lambda pattern: -round(pattern.confidence, 2))[:1]


def _axis_offset(
    case: Case, keep: tuple[int, ...], weighted: tuple[Tensor, Tensor]
) -> Pattern | None:
    """From the errors times their weights, and the weights."""
    dims = [dim for dim in range(case.right.dim()) if dim not in keep]
    above, below = (part.sum(dim=dims, keepdim=True) for part in weighted)
    vector = above / torch.where(below > 0, below, 1.0)
    touched = int((below > 0).sum())
    verdict = weigh(
        case,
        case.right + vector,
        parameters=touched,
        slack=_coarser(case, float(vector.abs().median())),
    )
    if verdict is None:
        return None
    name = f"dimension {keep[0]}" if len(keep) == 1 else "dimensions " + _listed(keep)
    size = float(vector.abs().square().mean().sqrt())
    return Pattern(
        kind="axis offset",
        confidence=(0.95 if len(keep) == 1 else 0.9) * verdict.confidence,
        sentence=f"off by a vector along {name}, as a bias that is missing or added twice",
        evidence={"axis": _listed(keep), "rms": size, **verdict.evidence},
    )


def _listed(keep: tuple[int, ...]) -> str:
    return " and ".join(map(str, keep))
