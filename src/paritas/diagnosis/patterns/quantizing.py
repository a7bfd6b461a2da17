"""Few levels: values quantised with a scale, of the whole tensor or of each row."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from paritas.diagnosis.patterns.formats import FORMATS
from paritas.diagnosis.patterns.weighing import own_unit, sample
from paritas.numerics.diagnoses import Pattern

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from paritas.diagnosis.cases import Case

__all__ = ["propose_levels"]

_MOST = 0.95
_FEWEST = 8


def propose_levels(case: Case) -> list[Pattern]:
    """`precision`: each value is the nearest of the levels that a scaled int8 or float8 has."""
    if int(case.wrong.sum()) < _FEWEST or own_unit(case) > 2.0**-11:
        return []  # a half-precision value is near a level of int8 by chance
    places = sample(case)
    given, error = (one.reshape(-1)[places] for one in (case.given, case.error.abs()))
    right, allowed = (one.reshape(-1)[places] for one in (case.right, case.allowed))
    for full, extent in _scales(case):
        scale = full.expand(case.shape).reshape(-1)[places] if full.dim() else full
        for name, levels in _levels(right / scale):
            predicted = levels * scale
            room = 8 * own_unit(case) * predicted.abs() + 2 * allowed
            share = float(((given - predicted).abs() <= room).double().mean())
            # Levels that lie as close as the noise would fit anything.
            if share >= _MOST and bool((error > 4 * room).any()):
                return [
                    Pattern(
                        kind="precision",
                        confidence=0.97 * share,
                        sentence=f"quantised to {name} with {extent}",
                        evidence={"format": name, "explained": share, "scale": extent},
                    )
                ]
    return []


def _scales(case: Case) -> Iterator[tuple[Tensor, str]]:
    right = torch.where(torch.isfinite(case.right), case.right, 0.0).abs()
    if not bool((right > 0).any()):
        return
    yield right.amax(), "one scale for the tensor"
    for dim in range(right.dim()):
        if right.dim() > 1 and right.shape[dim] > 1:
            largest = right.amax(dim=dim, keepdim=True)
            yield torch.where(largest > 0, largest, 1.0), f"a scale for all along dimension {dim}"


def _levels(share: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The nearest levels of values that are scaled to at most 1."""
    for count in (127.0, 128.0, 7.0):
        name = "int4" if count == 7.0 else "int8"  # noqa: PLR2004
        yield name, (share * count).round() / count
    for form in FORMATS[:2]:
        yield form.name, form.rounded(share * form.largest) / form.largest
