"""From a wrong tensor to what a person would say about it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from paritas.diagnosis.cases import Case, Context
from paritas.numerics.diagnoses import Diagnosis

if TYPE_CHECKING:
    from torch import Tensor

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

    case = Case(candidate, reference, arbiter, noise, context or Context())
    if candidate.shape != reference.shape or not bool(case.wrong.any()):
        return Diagnosis()
    return Diagnosis(where=find_region(case), patterns=ranked(_telling_part(case)))


def _telling_part(case: Case) -> Case:
    """Of a large tensor neighbouring slices along its longest axis, where it is wrong most.

    What was computed of other tensors cannot be cut with it, and is left out.
    """
    count = case.reference.numel()
    if count <= MOST_ELEMENTS:
        return case
    axis = max(range(len(case.shape)), key=lambda one: case.shape[one])
    size = case.shape[axis]
    width = max(1, size * MOST_ELEMENTS // count)
    others = [one for one in range(len(case.shape)) if one != axis]
    hits = case.wrong.sum(dim=others) if others else case.wrong.long()
    total = hits.cumsum(0)
    within = total[width - 1 :].clone()
    within[1:] -= total[: size - width]
    start = int(within.argmax())
    context = dataclasses.replace(
        case.context, operator="", inputs=(), parts=(), named={}, earlier={}
    )
    return Case(
        case.candidate.detach().narrow(axis, start, width),
        case.reference.detach().narrow(axis, start, width),
        case.right.narrow(axis, start, width),
        case.allowed.narrow(axis, start, width),
        context,
    )
