"""Scaled: the candidate is a factor times what it should be, one for all or one per index."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from paritas.diagnosis.patterns.factors import name_factor, named_factors
from paritas.diagnosis.patterns.weighing import (
    Weight,
    beyond_noise,
    noise_of,
    numbers,
    own_unit,
    refined_proportion,
    robust_proportion,
    weigh,
)
from paritas.numerics.diagnoses import Pattern

if TYPE_CHECKING:
    from torch import Tensor

    from paritas.diagnosis.cases import Case

__all__ = ["propose"]

# A factor so small, in standard errors, is none.
_NOT_ZERO = 8.0
# Those with a module of their own.
_SIGN = -1.0


def propose(case: Case) -> list[Pattern]:
    """A `scale`, or where there is none an `axis scale`."""
    if case.reference.dtype == torch.bool or not beyond_noise(case):
        return []
    return _one_factor(case) or _factor_per_index(case)


def _one_factor(case: Case) -> list[Pattern]:
    factor, error = robust_proportion(case, case.right, case.given)
    if not math.isfinite(factor) or abs(factor) <= _NOT_ZERO * error:
        return []
    weight = _weigh_factor(case, factor)
    if weight is None:
        return []
    if weight.whole:
        # Choosing the elements with the largest errors leans towards them; now all may speak.
        factor, error = refined_proportion(case, case.right, case.given, factor)
    if abs(factor - _SIGN) <= max(4 * error, 0.01) or factor == 0:
        return []
    names = name_factor(case, factor, error)
    if names:
        weight = weight.charged(bits=math.log2(len(named_factors(case)) + 1))
        text, known = f"scaled by {names[0].name}", names[0].name
    else:
        weight = weight.charged(parameters=1.0)
        text, known = f"scaled by {factor:.{_digits(factor, error)}g}", ""
    if weight is None:
        return []
    evidence = {"factor": factor, "standard error": error, **weight.evidence}
    if known:
        evidence["name"] = known
    if len(names) > 1:
        evidence["or"] = "; ".join(other.name for other in names[1:3])
    confidence = weight.confidence
    return [Pattern(kind="scale", confidence=confidence, sentence=text, evidence=evidence)]


def _weigh_factor(case: Case, factor: float) -> Weight | None:
    if case.is_exact:
        factor = round(factor, 9)
    return weigh(case, factor * case.right, slack=max(1.0, abs(factor)))


def _digits(factor: float, error: float) -> int:
    """As many digits as are known, of 3 to 7."""
    known = math.log10(abs(factor) / error) if error > 0 else math.inf
    return int(min(max(known, 3), 7))


def _factor_per_index(case: Case) -> list[Pattern]:
    best: list[Pattern] = []
    over, under = _in_units_of_noise(case)
    for axis, size in enumerate(case.shape):
        if size == 1 or case.right.dim() == 1 or case.given.is_complex():
            continue
        factors = _along(over, under, axis)
        view = [size if dim == axis else 1 for dim in range(case.right.dim())]
        others = [dim for dim in range(case.right.dim()) if dim != axis]
        touched = case.wrong.any(dim=others)
        used = factors[touched]
        if float(used.abs().max()) <= own_unit(case) or bool(((used + 1).abs() < 1e-3).all()):  # noqa: PLR2004
            continue  # zeros and signs have words of their own
        weight = weigh(
            case,
            factors.view(view) * case.right,
            parameters=int(touched.sum()),
            slack=max(1.0, float(used.abs().median())),
        )
        if weight is None:
            continue
        low, high = float(used.min()), float(used.max())
        text = (
            f"scaled by another factor at each index of dimension {axis}: {low:.4g} to {high:.4g}"
        )
        text = _by_a_tensor(case, factors) or text
        pattern = Pattern(
            kind="axis scale",
            confidence=0.95 * weight.confidence,
            sentence=text,
            evidence={"axis": float(axis), "least": low, "most": high, **weight.evidence},
        )
        best = max(best, [pattern], key=lambda one: one[0].confidence if one else 0.0)
    return best


def _in_units_of_noise(case: Case) -> tuple[Tensor, Tensor]:
    """What it should be and what it is, where it is wrong; 0 elsewhere."""
    if case.given.is_complex():
        return case.right, case.given
    weight = torch.where(case.wrong & numbers(case), 1 / noise_of(case), 0.0)
    return (case.right * weight).nan_to_num(0.0), (case.given * weight).nan_to_num(0.0)


def _along(over: Tensor, under: Tensor, axis: int) -> Tensor:
    """One factor per index of an axis, from its wrong elements; 1 where none is wrong."""
    others = [dim for dim in range(over.dim()) if dim != axis]
    below = over.square().sum(dim=others)
    return torch.where(below > 0, (over * under).sum(dim=others) / below, 1.0)


def _by_a_tensor(case: Case, factors: Tensor) -> str:
    """Whether the factors are a known vector: a weight that is applied twice, or not at all."""
    known = {f"input {i}": tensor for i, tensor in enumerate(case.context.inputs)}
    for name, tensor in {**known, **case.context.named}.items():
        vector = tensor.detach().cpu().double().flatten()
        if vector.numel() != factors.numel() or not bool((vector != 0).all()):
            continue
        for other, text in ((vector, "applied once too often"), (1 / vector, "missing")):
            apart = float((factors / other - 1).abs().max())
            if apart < 0.02:  # noqa: PLR2004
                return f"the factor {name} is {text}"
    return ""
