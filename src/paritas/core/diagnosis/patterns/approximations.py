"""Another function of the same input: an approximation, a polynomial, a table."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from paritas.core.diagnosis.case import widen
from paritas.core.results.findings import Pattern, PatternKind

if TYPE_CHECKING:
    from torch import Tensor

    from paritas.core.diagnosis.case import Case

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
    x, right, error = (tensor[use][order] for tensor in (x, case.right, case.error))
    relative = (error / right.abs()).nan_to_num(0.0, 0.0, 0.0)
    if bool((error.diff() != 0)[x.diff() == 0].any()):
        return []  # one input, two results
    candidate = case.given[use]
    if len(candidate.unique()) < _LEAST_DISTINCT * len(x.unique()):
        return []
    smooth = max(smoothness(error), smoothness(relative))
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
                f"{largest:.2g} for an input of {at:.4g}, and less for all others here"
            ),
            evidence={
                "operator": case.context.operator,
                "largest relative error": largest,
                "at": at,
                "smoothness": round(smooth, 4),
            },
        )
    ]


# --- Functions without a name ---------------------------------------------------------------------

# How well neighbouring inputs must agree in their error, for one input and for two.
_OF_ONE = 0.9
_OF_TWO = 0.75
_FEWEST_OF_TWO = 200
_MOST_PAIRS = 1 << 22
# Inputs that follow their place this closely cannot be told from it.
_FOLLOWS = 0.8
_EXAMPLES = (0.2, 0.5, 0.8)


def propose_curves(case: Case, argument: Tensor | None = None) -> list[Pattern]:
    """`other function`: some function of the operator's own inputs, element by element.

    Only for what has no other name: each element has its own error, which its inputs decide.

    Args:
        argument: what it is a function of; the inputs of the call if it is left out.
    """
    if case.is_exact or not case.is_beyond_noise or case.given.is_complex():
        return []
    inputs = _inputs(case) if argument is None else [argument]
    wrong = float(case.wrong.double().mean())
    if not inputs or wrong < _LEAST_WRONG or not bool(case.both_finite.all()):
        return []
    flat = [tensor.flatten() for tensor in inputs]
    count = flat[0].numel()
    step = max(1, math.isqrt(count**2 // _MOST_PAIRS))
    # Neighbours in the inputs, never in their place.
    some = [column[::step] for column in flat]
    error = case.error.flatten()[::step]
    if any(len(column.unique()) < len(column) // 2 for column in some) or _follows_place(inputs):
        return []
    least, fewest = (_OF_ONE, _FEWEST) if len(some) == 1 else (_OF_TWO, _FEWEST_OF_TWO)
    # What does not depend on the inputs at all has an error that does.
    candidate = case.given.flatten()[::step]
    smooth = min(_smoothness_beside(curve, some) for curve in (error, candidate))
    if len(error) < fewest or smooth < least:
        return []
    return [
        Pattern(
            kind=PatternKind.OTHER_FUNCTION,
            confidence=0.9,
            sentence=f"another function of the same {_examples(case, inputs)}",
            evidence={"operator": case.context.operator, "smoothness": round(smooth, 4)},
        )
    ]


def _examples(case: Case, inputs: list[Tensor]) -> str:
    order = inputs[0].flatten().argsort()
    sentence = []
    for share in _EXAMPLES:
        at = order[int(share * (len(order) - 1))]
        where = " and ".join(f"{float(tensor.flatten()[at]):.4g}" for tensor in inputs)
        candidate, right = (float(tensor.flatten()[at]) for tensor in (case.given, case.right))
        sentence.append(f"at {where} it gives {candidate:.4g} instead of {right:.4g}")
    words = "input" if len(inputs) == 1 else "inputs"
    return f"{words}: {', '.join(sentence)}"


def _follows_place(inputs: list[Tensor]) -> bool:
    """Whether neighbours along an axis have nearly the same inputs, as positions have."""
    for tensor in inputs:
        ranks = tensor.flatten().argsort().argsort().double().reshape(tensor.shape)
        for axis, size in enumerate(tensor.shape):
            if size > 1:
                apart = float(ranks.diff(dim=axis).abs().mean())
                if 1 - 3 * apart / tensor.numel() > _FOLLOWS:
                    return True
    return False


def _smoothness_beside(error: Tensor, inputs: list[Tensor]) -> float:
    """How well the errors of nearest neighbours agree, by rank: 1 for a function."""
    if len(inputs) == 1:
        return smoothness(error[inputs[0].argsort()])
    count = len(error)
    ranks = torch.stack([tensor.argsort().argsort().double() for tensor in inputs], -1)
    apart = torch.cdist(ranks, ranks)
    nearest = apart.fill_diagonal_(torch.inf).argmin(-1)
    order = error.argsort().argsort().double()
    return 1 - 3 * float((order - order[nearest]).abs().sum()) / (count**2 - 1)


def _inputs(case: Case) -> list[Tensor]:
    """The one or two inputs of an operator that computes each element by itself."""
    steps = case.context.call.steps if case.context.call is not None else ()
    if len(steps) != 1 or torch.Tag.pointwise not in steps[0][1].operator.tags:
        return []
    tensors = [value for value in steps[0][1].values.values() if isinstance(value, torch.Tensor)]
    alike = all(
        tensor.is_floating_point() and tuple(tensor.shape) == case.shape for tensor in tensors
    )
    return [widen(tensor) for tensor in tensors] if alike and len(tensors) <= 2 else []  # noqa: PLR2004


def _only_input(case: Case) -> Tensor | None:
    inputs = _inputs(case)
    return inputs[0] if len(inputs) == 1 else None


def smoothness(error: Tensor) -> float:
    """How well the ranks of neighbours agree (Chatterjee's coefficient): 1 for a function."""
    ranks = error.argsort().argsort().double()
    count = len(ranks)
    return 1 - 3 * float(ranks.diff().abs().sum()) / (count**2 - 1) if count > 1 else 0.0
