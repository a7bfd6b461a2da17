"""What a check compared, in a few figures and words: losses, gradients, the gravest finding."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from paritas.numerics.findings import Finding, Status, Verdict
from paritas.partition.running.runner import GRADIENT, OUTPUT

if TYPE_CHECKING:
    from torch import Tensor

    from paritas.partition.checking import Examined
    from paritas.partition.running.runner import Seen

__all__ = ["gradient_words", "loss_of", "reason_of"]

# A gradient is a multiple of another if so little of it is left over.
_LEFT_OVER = 1e-6
# A factor is told as a number of the whole's if it is so near to it.
_NEAR = 1e-4
_LONGEST = 400


def loss_of(seen: Seen | None) -> float | None:
    """The sum of all floating results; None where there is none, or the run failed."""
    if seen is None or seen.error is not None:
        return None
    sums = [
        float(value.detach().sum(dtype=torch.float64))
        for path, value in seen.results.items()
        if path.startswith(OUTPUT) and isinstance(value, torch.Tensor) and value.is_floating_point()
    ]
    return sum(sums) if sums else None


def gradient_words(examined: Examined) -> str:
    """`2 equal; gradient of args[1]: different, 2x`; empty where no gradient was compared."""
    verdict = examined.verdict
    found = [one for one in verdict.findings if one.path.startswith(GRADIENT)]
    whole = [one for one in verdict.findings if one.path == "gradients"]
    bad = [one for one in found if not one.status.passes(strict=True)]
    told = [f"{len(found) - len(bad)} equal"] if len(found) > len(bad) else []
    for one in bad:
        factor = _factor(examined, one)
        told.append(f"{one.path}: {one.status}{', ' * bool(factor)}{factor}")
    told += [f"{one.status}: {one.reason}" for one in whole]
    if not told:
        told = [item for item in verdict.coverage.skipped if item.startswith(GRADIENT)]
        return "none: nothing depends on the arguments" if told else ""
    return "; ".join(told)


def _factor(examined: Examined, finding: Finding) -> str:
    """By what the ranks' gradient is the whole's, if it is a multiple of it: `2x`."""
    if examined.lifted is None or finding.status is not Status.DIFFERENT:
        return ""
    whole, split = examined.lifted
    factors: list[float] = []
    for one, other in zip(whole.gradients, split.gradients, strict=False):
        expected, got = one.get(finding.path), other.get(finding.path)
        if expected is None:
            return ""
        if got is None:
            return "no gradient arrives"
        factor = _multiple(expected, got)
        if factor is None:
            return ""
        factors.append(factor)
    if not factors or max(factors) - min(factors) > _NEAR * abs(factors[0]):
        return ""
    return "no gradient arrives" if factors[0] == 0 else f"{factors[0]:.4g}x"


def _multiple(expected: Tensor, got: Tensor) -> float | None:
    if expected.shape != got.shape or expected.is_complex() or got.is_complex():
        return None
    expected, got = expected.double(), got.double()
    size = float((expected * expected).sum())
    if not size:
        return None
    factor = float((expected * got).sum()) / size
    left = float(torch.linalg.vector_norm(got - factor * expected))
    return factor if left <= _LEFT_OVER * float(torch.linalg.vector_norm(got)) else None


def reason_of(verdict: Verdict) -> str:
    """Why a verdict does not pass: its gravest finding, and how many others there are."""
    if verdict.passed:
        return ""
    if not verdict.failures:
        return "nothing was compared"
    worst = verdict.failures[0]
    parts = [worst.reason or f"is {worst.status}"]
    if worst.diagnosis is not None and worst.diagnosis.sentence:
        parts.append(worst.diagnosis.sentence)
    more = len(verdict.failures) - 1
    if more:
        parts.append(f"and {more} more")
    return f"{worst.path}: {'; '.join(parts)}"[:_LONGEST]
