"""The sign flipped, on all elements, on a region, or lost on the negative ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from paritas.diagnosis.patterns.weighing import beyond_noise, weigh
from paritas.numerics.diagnoses import Pattern

if TYPE_CHECKING:
    from paritas.diagnosis.cases import Case

__all__ = ["propose"]


def propose(case: Case) -> list[Pattern]:
    """`sign`: the negative of it; of truths the inverse, of complex numbers the conjugate."""
    if not beyond_noise(case):
        return []
    if case.reference.dtype == torch.bool:
        # Where a truth is wrong it is the inverse: that says something only of the whole.
        if case.right.numel() < 2 or not bool(case.wrong.all()):  # noqa: PLR2004
            return []
        weight = weigh(case, 1.0 - case.right)
        sentence = "every truth value is inverted"
    else:
        weight = weigh(case, -case.right, bits=1.0)
        sentence = _words(case)
        if weight is None and case.right.is_complex():
            weight = weigh(case, case.right.conj().resolve_conj(), bits=1.0)
            sentence = "the sign of the imaginary part is flipped: the complex conjugate"
    if weight is None:
        return []
    return [
        Pattern(
            kind="sign",
            confidence=weight.confidence,
            sentence=sentence,
            evidence=weight.evidence,
        )
    ]


def _words(case: Case) -> str:
    if case.right.is_complex():
        return "the sign is flipped"
    wrong, clear = case.right[case.wrong], case.right[~case.wrong]
    one_sided = bool((wrong < 0).all()) or bool((wrong > 0).all())
    same = clear[(clear != 0) & (torch.sign(clear) == torch.sign(wrong[0]))]
    if one_sided and clear.numel() and same.numel() <= 0.02 * case.right.numel():
        lost = "negative" if bool((wrong < 0).all()) else "positive"
        return (
            f"the sign is lost: {lost} values come out with the other sign, as of an absolute value"
        )
    return "the sign is flipped"
