"""Loss of precision: the result, its inputs or its sums rounded to a narrower format."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from paritas.diagnosis.patterns.accumulation import propose_noise
from paritas.diagnosis.patterns.formats import FORMATS, Format
from paritas.diagnosis.patterns.quantizing import propose_levels
from paritas.diagnosis.patterns.recomputing import recomputations
from paritas.diagnosis.patterns.weighing import beyond_noise, sample, weigh
from paritas.numerics.criterion import unit_roundoff
from paritas.numerics.diagnoses import Pattern

if TYPE_CHECKING:
    from torch import Tensor

    from paritas.diagnosis.cases import Case

__all__ = ["propose"]

_MOST = 0.98
_FEWEST = 3
# The spacing of a result in a sum's format says which; the sum may be off by this share of it.
_STILL_ROUNDING = 0.2
# Of the reference's own values, so many at the most may be such numbers: masks and counts are.
_HELD_ANYWAY = 0.5
_ENOUGH_BITS = 20.0


def propose(case: Case) -> list[Pattern]:
    """`precision`: of the output, of the inputs, of levels, and last what only looks like it."""
    if case.is_exact or case.given.is_complex() or not beyond_noise(case):
        return []
    if not bool(torch.isfinite(case.error.reshape(-1)[sample(case)]).all()):
        return []
    return _output(case) or _inputs(case) or propose_levels(case) or propose_noise(case)


def _output(case: Case) -> list[Pattern]:
    """Every wrong value is a number of a narrower format, the nearest to what it should be."""
    given, right = case.given[case.wrong], case.right[case.wrong]
    if given.numel() < _FEWEST or not bool((given != 0).any()):
        return _computed(case)
    some = case.given.reshape(-1)[sample(case)]
    for form in FORMATS:
        if form.unit <= unit_roundoff(case.candidate.dtype):
            break
        if float(form.holds(some).double().mean()) < _MOST:
            continue
        held = float(form.holds(given).double().mean())
        pattern = _of_format(case, form, given, right, held)
        if pattern is not None:
            return [pattern]
    return _computed(case)


def _computed(case: Case) -> list[Pattern]:
    """Every value is a number of a narrower format, though not the nearest: its inputs were, too.

    The elements that are not wrong by themselves bear witness as well: by chance each is such a
    number once in 2^b times, with b the bits that the format lacks.
    """
    told = (case.given != 0) & torch.isfinite(case.given) & torch.isfinite(case.right)
    given, right = case.given[told], case.right[told]
    digits = -math.log2(2 * unit_roundoff(case.candidate.dtype))
    for form in FORMATS:
        if form.unit <= unit_roundoff(case.candidate.dtype):
            break
        bits = given.numel() * (digits - form.digits)
        held = float(form.holds(given).double().mean()) if bits >= _ENOUGH_BITS else 0.0
        usual = case.reference.detach().cpu().double()[told]
        if held < _MOST or float(form.holds(usual).double().mean()) > _HELD_ANYWAY:
            continue
        share = float((given - right).square().mean() / right.square().mean()) ** 0.5
        if not share <= _STILL_ROUNDING:
            continue
        name = "float16 or tf32" if form.name == "float16" else form.name
        evidence: dict[str, float | str] = {
            "format": form.name,
            "representable": held,
            "elements": float(given.numel()),
        }
        evidence["error to value"] = float(f"{share:.3g}")
        sentence = f"computed in {name}: every value is one of its numbers"
        return [
            Pattern(kind="precision", confidence=0.85 * held, sentence=sentence, evidence=evidence)
        ]
    return []


def _of_format(
    case: Case, form: Format, given: Tensor, right: Tensor, held: float
) -> Pattern | None:
    noise = 2 * case.allowed[case.wrong]
    step = torch.maximum(form.spacing(given), form.spacing(right))
    apart = (given - right).abs()
    nearest = float((apart <= step * 0.5001 + noise).double().mean())
    inwards = given.abs() <= right.abs() + noise
    cut = float(((apart <= step * 1.0001 + noise) & inwards).double().mean())
    share = float(apart.square().mean() / right.square().mean().clamp(min=1e-300)) ** 0.5
    name = "float16 or tf32" if form.name == "float16" else form.name
    # A narrower format's number by chance, per element: one in so many.
    certain = 1 - 2.0 ** -min(given.numel(), 60)
    if nearest >= _MOST:
        sentence, confidence = f"rounded to {name}", 0.99
    elif cut >= _MOST:
        sentence, confidence = f"cut off to {name}, towards zero", 0.98
    elif share <= _STILL_ROUNDING and _is_unbiased(given, right, share):
        sentence, confidence = f"computed in {name}: every value is one of its numbers", 0.85
    else:
        return None
    return Pattern(
        kind="precision",
        confidence=confidence * certain * held,
        sentence=sentence,
        evidence={
            "format": form.name,
            "representable": held,
            "nearest": nearest,
            "error to value": float(f"{share:.3g}"),
            "elements": float(given.numel()),
        },
    )


def _is_unbiased(given: Tensor, right: Tensor, share: float) -> bool:
    """Whether the errors are not simply a scale or an offset."""
    error = given - right
    count = given.numel()
    if count < 16:  # noqa: PLR2004
        return False
    size = float(error.square().mean().sqrt())
    lean = abs(float((error * right).mean())) / float(right.square().mean())
    return abs(float(error.mean())) <= 0.5 * size and lean <= 0.5 * share


def _inputs(case: Case) -> list[Pattern]:
    """What the operator makes of inputs that were rounded first."""
    found: list[Pattern] = []
    for recomputed in recomputations(case):
        weight = weigh(case, recomputed.value, bits=4.0)
        if weight is None:
            continue
        evidence = {"format": recomputed.format, "inputs": recomputed.which, **weight.evidence}
        found.append(
            Pattern(
                kind="precision",
                confidence=weight.confidence,
                sentence=f"computed on {recomputed.which} {recomputed.how} to {recomputed.format}",
                evidence=evidence,
            )
        )
    return sorted(found, key=lambda pattern: -pattern.confidence)[:1]
