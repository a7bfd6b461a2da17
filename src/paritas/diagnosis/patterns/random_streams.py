"""Right in distribution and nothing else: other random numbers were drawn."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

import torch

from paritas.diagnosis.patterns.weighing import beyond_noise
from paritas.numerics.criterion import MAX_Z
from paritas.numerics.diagnoses import Pattern

if TYPE_CHECKING:
    from torch import Tensor

    from paritas.diagnosis.cases import Case

__all__ = ["propose"]

_FEWEST = 64
_DRAWING = re.compile(r"drop|rand|bernoulli|normal|uniform|multinomial|exponential|poisson|gumbel")
# Standard deviations that a figure may be away from what independent draws give.
_SIGMAS = 4.0
# Of two samples of one distribution, how often they differ by more than is allowed here.
_UNLIKELY = 0.01
_MOST_SAMPLED = 1 << 16
_SAME = 0.98


def propose(case: Case) -> list[Pattern]:
    """Another mask of the same rate, or other numbers of the same distribution."""
    if not beyond_noise(case) or case.given.is_complex() or not case.is_finite:
        return []
    if case.right.numel() < _FEWEST:
        return []
    found = [_other_mask(case), _other_numbers(case)]
    return [pattern for pattern in found if pattern is not None][:1]


def _other_mask(case: Case) -> Pattern | None:
    """Dropout-like: equal where both kept, zero at independent places of the same rate."""
    mine, theirs = case.given == 0, case.right == 0
    total = case.right.numel()
    rates = float(mine.double().mean()), float(theirs.double().mean())
    if min(rates) * total < 8 or max(rates) > 0.99:  # noqa: PLR2004
        return None
    both = ~mine & ~theirs
    apart = case.error[both].abs() <= MAX_Z * case.allowed[both]
    if not len(apart) or float(apart.double().mean()) < _SAME:
        return None
    rate = (rates[0] + rates[1]) / 2
    spread = math.sqrt(rate * (1 - rate) / total)
    together = float((mine & theirs).double().mean())
    expected = rates[0] * rates[1]
    strange = abs(rates[0] - rates[1]) / (spread * math.sqrt(2))
    linked = abs(together - expected) / (rate * (1 - rate) / math.sqrt(total))
    if strange > _SIGMAS or linked > _SIGMAS:
        return None
    named = _DRAWING.search(case.context.operator.lower()) is not None
    return Pattern(
        kind="different random stream",
        confidence=0.95 if named else 0.85,
        sentence=(
            f"another random mask of the same rate ({rates[0]:.1%} against {rates[1]:.1%} zeros): "
            "where both have kept a value, it is the same"
        ),
        evidence={"zeros": rates[0], "zeros of the reference": rates[1], "both": together},
    )


def _other_numbers(case: Case) -> Pattern | None:
    """No correlation at all, and yet the same distribution."""
    wrong = case.wrong
    named = _DRAWING.search(case.context.operator.lower()) is not None
    if float(wrong.double().mean()) < 0.5 and not (named and case.is_exact):  # noqa: PLR2004
        return None
    step = max(1, case.right.numel() // _MOST_SAMPLED)
    mine, theirs = case.given.flatten()[::step], case.right.flatten()[::step]
    count = len(mine)
    correlation = _correlation(mine, theirs)
    if not abs(correlation) * math.sqrt(count) <= _SIGMAS:
        return None
    distance = _greatest_distance(mine, theirs)
    # Two samples of n: twice exp(-n d^2) is how often chance alone gives as much.
    likely = min(1.0, 2 * math.exp(-count * distance**2))
    # A structure along an axis is no draw: means of rows would have to differ as chance has them.
    if likely < _UNLIKELY or not (named or _is_shapeless(case.right)):
        return None
    return Pattern(
        kind="different random stream",
        confidence=0.9 if named else 0.5,
        sentence=(
            f"{'' if named else 'as if '}other random numbers were drawn: no value is related to "
            f"its own (correlation {correlation:.2g}), and the distribution is the same"
        ),
        evidence={"correlation": correlation, "distance": distance, "likelihood": likely},
    )


def _correlation(mine: Tensor, theirs: Tensor) -> float:
    a, b = mine - mine.mean(), theirs - theirs.mean()
    below = float(a.norm() * b.norm())
    return float(a @ b) / below if below else math.nan


def _greatest_distance(mine: Tensor, theirs: Tensor) -> float:
    """Between the two empirical distributions."""
    a, b = mine.sort().values, theirs.sort().values
    points = torch.cat([a, b])
    left = torch.searchsorted(a, points, right=True)
    right = torch.searchsorted(b, points, right=True)
    return float((left - right).abs().max()) / len(a)


def _is_shapeless(values: Tensor) -> bool:
    """Whether slices along each axis have the means that independent draws have."""
    spread = float(values.std())
    for axis in range(values.dim()):
        size = values.shape[axis]
        others = [one for one in range(values.dim()) if one != axis]
        if size < 2 or not others:  # noqa: PLR2004
            continue
        length = values.numel() // size
        means = values.mean(dim=others)
        found = float((means - means.mean()).square().sum()) / (spread**2 / length)
        if found > size + _SIGMAS * math.sqrt(2 * size) + _SIGMAS:
            return False
    return spread > 0
