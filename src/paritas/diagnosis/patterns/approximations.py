"""Another function of the same input: an approximation, a polynomial, a table."""

from __future__ import annotations

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
# How well neighbouring inputs must agree in their error; 0 if it has no pattern.
_LEAST_SMOOTH = 0.8
# The largest error, as a share of the values: what is further off is another function altogether.
_FURTHEST = 0.5
# The largest relative error of half of the inputs: an approximation is good for most of them.
_USUAL = 0.05
# How much the relative error must vary: one factor for all is a scale.
_LEAST_VARIED = 0.01


# The least share of distinct results: fewer are levels, as of a rounding.
_LEAST_DISTINCT = 0.25


def propose_approximations(case: Case) -> list[Pattern]:
    """`approximation`: the error is a smooth function of the operator's one input."""
    call = case.context.call
    if call is None or case.is_exact or not case.is_beyond_noise or case.given.is_complex():
        return []
    x = _only_input(case)
    if x is None or x.numel() < _FEWEST or float(case.wrong.double().mean()) < _LEAST_WRONG:
        return []
    use = torch.isfinite(x) & case.both_finite & case.wrong
    order = x[use].argsort(stable=True)
    x, right, error = (one[use][order] for one in (x, case.right, case.error))
    relative = (error / right.abs()).nan_to_num(0.0, 0.0, 0.0)
    if bool((error.diff() != 0)[x.diff() == 0].any()):
        return []  # one input, two results
    given = case.given[use]
    if len(given.unique()) < _LEAST_DISTINCT * len(x.unique()):
        return []
    smooth = max(_smoothness(error), _smoothness(relative))
    if len(x) < _FEWEST or smooth < _LEAST_SMOOTH:
        return []
    far = float(error.norm()) > _FURTHEST * float(right.norm())
    if far or float(relative.abs().median()) > _USUAL:
        return []
    if float(relative.std()) < _LEAST_VARIED * float(relative.abs().mean()):
        return []
    relative = relative.abs()
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
                "smoothness": round(smooth, 4),
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


def _smoothness(error: Tensor) -> float:
    """How well the ranks of neighbours agree (Chatterjee's coefficient): 1 for a function."""
    ranks = error.argsort().argsort().double()
    count = len(ranks)
    return 1 - 3 * float(ranks.diff().abs().sum()) / (count**2 - 1) if count > 1 else 0.0
