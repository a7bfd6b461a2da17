"""Another function of the same input: an approximation, a polynomial, a table."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from paritas.diagnosis.case import widen
from paritas.results.findings import Pattern, PatternKind

if TYPE_CHECKING:
    from torch import Tensor

    from paritas.diagnosis.case import Case

_FEWEST = 64
# The share of elements that must be wrong: a few wrong elements say nothing of the function.
_LEAST_WRONG = 0.2
# How rough the error may be as a function of the input; errors without a pattern have 1.
_ROUGHEST = 0.1
# The share of neighbours that may jump: a piecewise function has some seams.
_SEAMS = 0.03


def propose_approximations(case: Case) -> list[Pattern]:
    """`approximation`: the error is a smooth function of the operator's one input."""
    call = case.context.call
    if call is None or case.is_exact or not case.is_beyond_noise or case.given.is_complex():
        return []
    x = _only_input(case)
    if x is None or x.numel() < _FEWEST or float(case.wrong.double().mean()) < _LEAST_WRONG:
        return []
    use = torch.isfinite(x) & case.both_finite
    x, error = x[use], (case.error / case.unit)[use]
    order = x.argsort()
    x, error = x[order], error[order]
    roughness = _roughness(x, error)
    if not roughness <= _ROUGHEST:
        return []
    right, given = case.right[use][order], case.given[use][order]
    relative = ((given - right) / right).abs().nan_to_num(0.0, 0.0, 0.0)
    worst = int(relative.argmax())
    largest, at = float(relative[worst]), float(x[worst])
    return [
        Pattern(
            kind=PatternKind.APPROXIMATION,
            confidence=0.9,
            sentence=(
                "another function of the input, as an approximation is: the relative error is "
                f"at most {largest:.2g}, for an input of {at:.4g}"
            ),
            evidence={
                "operator": case.context.operator,
                "largest relative error": largest,
                "at": at,
                "roughness": roughness,
            },
        )
    ]


def _only_input(case: Case) -> Tensor | None:
    """The input of an operator that computes each element from one number."""
    steps = case.context.call.steps if case.context.call is not None else ()
    if len(steps) != 1 or torch.Tag.pointwise not in steps[0][1].operator.tags:
        return None
    tensors = [one for one in steps[0][1].values.values() if isinstance(one, torch.Tensor)]
    fits = len(tensors) == 1 and tuple(tensors[0].shape) == case.shape
    return widen(tensors[0]) if fits and tensors[0].is_floating_point() else None


def _roughness(x: Tensor, error: Tensor) -> float:
    """How much neighbouring inputs differ in their error, over how much any two do."""
    steps = error.diff().square()
    kept = steps.sort().values[: max(1, math.ceil(len(steps) * (1 - _SEAMS)))]
    # Equal inputs must have equal errors.
    twins = (x.diff() == 0) & (steps > 0)
    spread = float(error.var(correction=0)) + float(error.mean()) ** 2
    if bool(twins.any()) or not spread > 0:
        return math.inf
    return float(kept.mean()) / (2 * spread)
