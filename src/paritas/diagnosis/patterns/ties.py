"""Index outputs that name another of several equally good elements."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from paritas.diagnosis.patterns.operations import Operation, operation_of
from paritas.diagnosis.patterns.weighing import beyond_noise
from paritas.numerics.criterion import unit_roundoff
from paritas.numerics.diagnoses import Pattern

if TYPE_CHECKING:
    from torch import Tensor

    from paritas.diagnosis.cases import Case

__all__ = ["propose"]

_ALONG = frozenset({"sort", "argsort", "topk", "kthvalue", "median", "mode"})
_ONE = frozenset({"argmax", "argmin", "max", "min", "cummax", "cummin"})
# Scores that differ by less than so many roundings are a tie that rounding decides.
_ROUNDINGS = 4.0


def propose(case: Case) -> list[Pattern]:
    """A different choice among ties, if every differing index is one."""
    operation = operation_of(case)
    if operation is None or not case.is_exact or not beyond_noise(case):
        return []
    if operation.name not in _ALONG | _ONE or case.reference.dtype == torch.bool:
        return []
    scores = operation.inputs[0]
    found = _scores_of(case, operation, scores)
    if found is None:
        return []
    mine, theirs, distinct = found
    wrong = case.wrong
    apart = (mine - theirs)[wrong].abs()
    unit = _unit(case.context.inputs[0])
    scale = torch.maximum(mine.abs(), theirs.abs())[wrong]
    if not distinct or not bool((apart <= _ROUNDINGS * unit * scale).all()):
        return []
    equal = float((apart == 0).double().mean())
    what = "equal" if equal == 1 else "equal but for a rounding"
    count = int(wrong.sum())
    return [
        Pattern(
            kind="tie-breaking",
            confidence=0.95,
            sentence=(
                f"another choice among ties: the scores at the {count} differing "
                f"ind{'ices' if count > 1 else 'ex'} are {what}"
            ),
            evidence={"differing": count, "exactly equal": equal},
        )
    ]


def _scores_of(
    case: Case, operation: Operation, scores: Tensor
) -> tuple[Tensor, Tensor, bool] | None:
    """The scores at the candidate's and at the right indices; whether the former are a choice."""
    mine, theirs = case.candidate.detach().cpu().long(), case.reference.detach().cpu().long()
    given = operation.argument("dim", 1, None)
    if operation.name in ("topk", "kthvalue"):
        given = operation.argument("dim", 2, -1)
    elif operation.name in _ALONG and not isinstance(given, int):
        given = -1
    if isinstance(given, bool) or not isinstance(given, int):
        scores, dim = scores.flatten(), 0
        mine, theirs = mine.flatten(), theirs.flatten()
    else:
        dim = given % scores.dim() if scores.dim() else 0
        if mine.dim() == scores.dim() - 1:
            mine, theirs = mine.unsqueeze(dim), theirs.unsqueeze(dim)
    size = scores.shape[dim] if scores.dim() else 0
    fits = mine.dim() == scores.dim() and all(
        mine.shape[one] <= scores.shape[one] for one in range(scores.dim())
    )
    valid = fits and all(bool(((one >= 0) & (one < size)).all()) for one in (mine, theirs))
    if not valid:
        return None
    distinct = True
    if operation.name in ("sort", "argsort", "topk"):
        ordered = mine.sort(dim=dim).values
        distinct = not bool((ordered.diff(dim=dim) == 0).any())
    picked = [scores.gather(dim, one).reshape(case.shape) for one in (mine, theirs)]
    return picked[0], picked[1], distinct


def _unit(scores: Tensor) -> float:
    return unit_roundoff(scores.dtype) if scores.is_floating_point() else 0.0
