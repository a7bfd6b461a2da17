"""Noise that is larger than it should be, and nothing else: arithmetic in a narrower format.

Here no candidate can be predicted. What can be shown is that the errors have the size that a
format's rounding gives and nothing of what a fault leaves: no bias, no likeness of neighbours, no
tie to the values, no rank, no heavy tail.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from paritas.diagnosis.patterns.formats import FORMATS, Format
from paritas.diagnosis.patterns.weighing import own_unit
from paritas.numerics.diagnoses import Pattern

if TYPE_CHECKING:
    from torch import Tensor

    from paritas.diagnosis.cases import Case

__all__ = ["propose_noise"]

_FEWEST = 64
_SAMPLE = 1 << 16
_SIDE = 256
_LARGEST_SHARE = 0.15
_MOST_BIAS = 0.3
_MOST_LIKENESS = 0.3
_MOST_KURTOSIS = 6.0
# The rms of one rounding is about a third of the unit; many of them add up.
_LEAST_UNITS = 0.1
_USUAL_LENGTH = 256


def propose_noise(case: Case) -> list[Pattern]:
    """`precision`, where the errors are noise all over the tensor."""
    right, error = case.right.flatten(), case.error.flatten()
    telling = torch.isfinite(error) & (right != 0)
    right, error = right[telling], error[telling]
    if error.numel() < _FEWEST or float((error != 0).double().mean()) < 0.9:  # noqa: PLR2004
        return []
    size = _rms(error)
    share = size / _rms(right)
    if not own_unit(case) < share <= _LARGEST_SHARE:
        return []
    relative = error / right.abs().clamp(min=share * _rms(right))
    evener = min(_kurtosis(_evened(case)), _kurtosis(error), _kurtosis(relative))
    lean = abs(float((error * right).mean())) / float(right.square().mean()) / share
    bias = abs(float(error.mean())) / size
    likeness = max(_likeness_by_value(right, error), *_likeness_by_place(case))
    slack = 3 / math.sqrt(error.numel())
    if (
        max(lean, bias) > _MOST_BIAS + slack
        or likeness > _MOST_LIKENESS + slack
        or evener > _MOST_KURTOSIS
        or _has_rank(case)
        or not _is_everywhere(case)
    ):
        return []
    form = _format(case, share)
    if form is None:
        return []
    return [
        Pattern(
            kind="precision",
            confidence=0.6,
            sentence=(
                f"less precise all over, by {share:.2g} of the values without bias or structure, "
                f"as of sums in {form.name}"
            ),
            evidence={
                "format": form.name,
                "error to value": float(f"{share:.3g}"),
                "bias": float(f"{bias:.2g}"),
                "likeness of neighbours": float(f"{likeness:.2g}"),
            },
        )
    ]


def _rms(values: Tensor) -> float:
    return float(values.square().mean().sqrt())


def _kurtosis(values: Tensor) -> float:
    values = values - values.mean()
    squares = values.square()
    return float(squares.square().mean() / squares.mean().square().clamp(min=1e-300))


def _evened(case: Case) -> Tensor:
    """The errors with all slices brought to one size: rows of large numbers have large errors."""
    error = torch.where(torch.isfinite(case.error), case.error, 0.0)
    squares = error.square()
    for dim, size in enumerate(case.shape):
        others = [other for other in range(error.dim()) if other != dim]
        if size > 1 and others:
            error = error / squares.mean(dim=others, keepdim=True).sqrt().clamp(min=1e-300)
    return error.flatten()


def _likeness(values: Tensor) -> float:
    """How alike neighbours are: 1 of a smooth curve, 0 of noise."""
    below = float(values.square().sum())
    return abs(float((values[1:] * values[:-1]).sum())) / below if below else 1.0


def _likeness_by_value(right: Tensor, error: Tensor) -> float:
    """Another formula's error is a curve over the values; rounding's is not."""
    step = max(1, right.numel() // _SAMPLE)
    order = right[::step].argsort()
    return _likeness(error[::step][order])


def _likeness_by_place(case: Case) -> list[float]:
    error = torch.where(torch.isfinite(case.error), case.error, 0.0)
    found = [0.0]
    for dim, size in enumerate(case.shape):
        if size > 1:
            ahead = error.narrow(dim, 1, size - 1) * error.narrow(dim, 0, size - 1)
            below = float(error.square().sum()) * (size - 1) / size
            found.append(abs(float(ahead.sum())) / below if below else 1.0)
    return found


def _has_rank(case: Case) -> bool:
    """Whether few outer products make up the errors, as of terms that are missing in a sum."""
    if case.right.dim() < 2:  # noqa: PLR2004
        return False
    error = torch.where(torch.isfinite(case.error), case.error, 0.0)
    matrix = error.reshape(-1, case.shape[-1])[:_SIDE, :_SIDE]
    rows, columns = matrix.shape
    if min(rows, columns) < 4:  # noqa: PLR2004
        return False
    # Each row to one size: rows of other sizes are no rank.
    matrix = matrix / matrix.square().mean(dim=1, keepdim=True).sqrt().clamp(min=1e-300)
    values = torch.linalg.svdvals(matrix)
    # Of noise the largest singular value is sqrt(rows) + sqrt(columns), all squares rows * columns.
    return float(values[0]) > 1.5 * (math.sqrt(rows) + math.sqrt(columns))


def _is_everywhere(case: Case) -> bool:
    """Whether no slice has far less of it than the others: a region has another cause."""
    z = torch.where(torch.isfinite(case.error), case.error, 0.0).square()
    for dim, size in enumerate(case.shape):
        others = [other for other in range(z.dim()) if other != dim]
        if size > 1 and others and z.numel() // size >= 16:  # noqa: PLR2004
            means = z.mean(dim=others).sqrt()
            if float(means.min()) < 0.05 * float(means.median()):
                return False
    return True


def _format(case: Case, share: float) -> Format | None:
    """The coarsest format that one rounding and more explain."""
    length = max((max(tensor.shape, default=1) for tensor in case.context.inputs), default=0)
    most = math.sqrt(length or _USUAL_LENGTH)
    for form in FORMATS[2:4]:
        if own_unit(case) < form.unit and _LEAST_UNITS * form.unit <= share <= most * form.unit:
            return form
    return None
