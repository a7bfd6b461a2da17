"""From a wrong tensor to what a person would say about it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from paritas.diagnosis.cases import Case, Context
from paritas.diagnosis.parts import narrowed
from paritas.numerics.diagnoses import Diagnosis

if TYPE_CHECKING:
    from torch import Tensor

    from paritas.diagnosis.regions.surveying import Survey

__all__ = ["diagnose"]

# Beyond so many elements patterns are looked for in a part that tells as much.
MOST_ELEMENTS = 1 << 20


def diagnose(
    candidate: Tensor,
    reference: Tensor,
    *,
    arbiter: Tensor | None = None,
    noise: Tensor | None = None,
    context: Context | None = None,
) -> Diagnosis:
    """Name where a tensor is wrong and what kind of wrong it is; nothing where none fits.

    Args:
        candidate: what was computed.
        reference: what should have been, as the reference computed it natively.
        arbiter: the same in float64, if it is known: it tells more.
        noise: per element, what the judge allowed for.
        context: the operator, its inputs, ranks and what else is known.
    """
    from paritas.diagnosis.ranking import ranked
    from paritas.diagnosis.regions.finding import find_region

    if candidate.shape != reference.shape:
        return Diagnosis()
    case = Case(candidate, reference, arbiter, noise, context or Context())
    if reference.numel() > MOST_ELEMENTS:
        return _diagnosed_large(case)
    if not bool(case.wrong.any()):
        return Diagnosis()
    return Diagnosis(where=find_region(case), patterns=ranked(case))


def _diagnosed_large(case: Case) -> Diagnosis:
    """In memory that does not grow with the tensor."""
    from paritas.diagnosis.ranking import ranked
    from paritas.diagnosis.regions.finding import find_region
    from paritas.diagnosis.regions.surveying import Survey

    survey = Survey(case)
    if not survey.base.number:
        return Diagnosis()
    return Diagnosis(where=find_region(case, survey), patterns=ranked(_telling_part(survey)))


def _telling_part(survey: Survey) -> Case:
    """Of a large tensor neighbouring slices along its longest axis, where it is wrong most.

    What was computed of other tensors cannot be cut with it, and is left out.
    """
    case = survey.case
    axis = max(range(len(case.shape)), key=lambda one: case.shape[one])
    size = case.shape[axis]
    counts = survey.base.axes[axis]
    groups = max(1, size * MOST_ELEMENTS // case.reference.numel() // counts.each)
    total = counts.counts.cumsum()
    within = total[groups - 1 :].copy()
    within[1:] -= total[:-groups]
    width = groups * counts.each
    start = min(int(within.argmax()) * counts.each, size - width)
    part = narrowed(case, axis, start, width, survey.scale)
    context = dataclasses.replace(
        case.context, operator="", inputs=(), parts=(), named={}, earlier={}
    )
    return Case(part.candidate, part.reference, part.right, part.allowed, context)
