"""One term of a mean as an operator of its own: the loss without its reduction.

If all terms of a mean are the same, the mean is that term. So the results of both programs for
many terms, one after the other, are those of the loss before it is reduced, and are diagnosed like
those of any other operator: with its own mistakes, limits and expressions.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from paritas.core.diagnosis.calls import UNUSABLE
from paritas.core.diagnosis.case import Case, Context
from paritas.core.diagnosis.diagnose import rank_raw
from paritas.core.diagnosis.patterns.limits import propose_clipping
from paritas.core.diagnosis.patterns.predictions import propose_predictions
from paritas.core.diagnosis.place_runs import PlaceRuns
from paritas.core.diagnosis.stating import GUESS
from paritas.core.execution.scouting import is_scout
from paritas.core.results.findings import PatternKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from paritas.core.diagnosis.calls import LiveCall
    from paritas.core.diagnosis.dependence import Laboratory
    from paritas.core.results.findings import Pattern

# What a mean of equal terms is rounded by, in units of its dtype.
_ROUNDINGS = 4.0
# Terms are a multiple of the results, up to this share.
_SAME = 1e-5
_PROPOSERS = (
    (propose_predictions, PatternKind.NONFINITE),
    (propose_clipping, PatternKind.CLIPPED),
)


def explain_terms(
    lab: Laboratory, call: LiveCall | None, parts: Sequence[Tensor | None]
) -> Pattern | None:
    """What happens to each term; None if the loss cannot be called without its reduction.

    Args:
        parts: for each operand, those of the terms along a first axis; None for one that belongs
            to all terms.
    """
    opened = None if call is None or not (is_scout() or call.is_safe_here) else _open(call)
    if opened is None:
        return None
    stacked_operands = tuple(
        operand if part is None else part for operand, part in zip(lab.operands, parts, strict=True)
    )
    opened = opened.with_operands(lab.operands, stacked_operands)
    split = [part is not None for part in parts]

    def run(program: Any, operands: Sequence[Tensor]) -> Tensor:
        """The results for one term after the other."""
        number = next(
            len(operand) for operand, is_split in zip(operands, split, strict=True) if is_split
        )
        return torch.stack(
            [program(_fill(lab.operands, operands, split, at)) for at in range(number)]
        )

    right, wrong = (
        run(program, stacked_operands) for program in (lab.runs.reference, lab.runs.candidate)
    )
    factor = _factor(opened, right)
    if factor is None:
        return None
    right, wrong = right / factor, wrong / factor
    runs = PlaceRuns(
        stacked_operands,
        lambda operands: run(lab.runs.reference, operands) / factor,
        lambda: lambda operands: run(lab.runs.candidate, operands) / factor,
        right,
        wrong,
    )
    noise = _ROUNDINGS * torch.finfo(right.dtype).eps * right.abs()
    case = Case(wrong, right, noise=noise, context=Context(call=opened, runs=runs))
    ranked = rank_raw(case, _PROPOSERS)
    return ranked[0] if ranked and ranked[0].confidence >= GUESS else None


def _open(call: LiveCall) -> LiveCall | None:
    """The call without its reduction; None if it has none that can be left out."""
    for nothing in ("none", 0):
        try:
            opened = call.with_argument("reduction", nothing)
            _ = opened.results(wide=False)
        except UNUSABLE:
            continue
        return opened
    return None


def _fill(
    like: Sequence[Tensor], operands: Sequence[Tensor], split: Sequence[bool], at: int
) -> list[Tensor]:
    """The operands with the same term in all places."""
    return [
        operand[at]
        .expand(like_tensor.shape if like_tensor.dim() == operand.dim() else like_tensor.numel())
        .reshape(like_tensor.shape)
        if is_split
        else operand
        for like_tensor, operand, is_split in zip(like, operands, split, strict=True)
    ]


def _factor(opened: LiveCall, results: Tensor) -> float | None:
    """How many terms a result is, the same for all; None if they are not such multiples."""
    try:
        terms = next(
            result for result in opened.results(wide=False) if result.shape == results.shape
        )
    except (*UNUSABLE, StopIteration):
        return None
    largest = terms.abs().argmax()
    factor = float(results[largest] / terms[largest])
    apart = (results - factor * terms).abs().max()
    is_same = bool(apart <= _SAME * results.abs().max())
    return factor if is_same and math.isfinite(factor) and factor else None
