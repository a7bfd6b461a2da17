"""How much a prediction of the candidate is worth as an explanation.

A prediction that has been fitted to the numbers explains some of them for nothing: each fitted
parameter is worth about one element. What is left over, in bits, is the evidence. And a tensor
whose errors are within its noise has nothing that needs an explanation.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import torch

from paritas.diagnosis.cases import Fit
from paritas.numerics.criterion import MAX_Z, RMS_Z, slice_limit, unit_roundoff

if TYPE_CHECKING:
    from torch import Tensor

    from paritas.diagnosis.cases import Case

__all__ = [
    "Weight",
    "beyond_noise",
    "noise_of",
    "numbers",
    "own_unit",
    "proportion",
    "refined_proportion",
    "robust_proportion",
    "sample",
    "weigh",
]

# What is left may be at most so much of the error.
_MOST_LEFT = 0.25
# Less evidence than this is chance.
_FEWEST_BITS = 4.0
# One element is worth at most so many bits, however exact.
_MOST_BITS = 20.0
_CERTAIN = 0.99
# Most elements must be better off by it, one by one.
_MOSTLY_BETTER = 0.8
# Elements with errors beyond this are doubtful, and count if there are some.
_DOUBTFUL_Z = 4.0
_FEW_DOUBTFUL = 3
_SHARE_DOUBTFUL = 0.1
# So many elements are looked at first, and so many of them must fit to go on.
_SAMPLE = 1 << 14
_STRIDE = 1_000_003
_HOPEFUL = 0.9


@dataclasses.dataclass(frozen=True)
class Weight:
    """What speaks for a prediction.

    Attributes:
        explained: share of the wrong elements that it explains.
        residual: what is left of the error, over the error, in units of the noise.
        bits: evidence, less what the fitted parameters explain for nothing.
        elements: how many wrong elements bear it.
        whole: whether it holds for the whole tensor, and not only where that is wrong.
    """

    explained: float
    residual: float
    bits: float
    elements: int
    whole: bool

    @property
    def confidence(self) -> float:
        """Raw, by how exact the fit is and how many elements support it."""
        return _CERTAIN * self.explained * (1 - self.residual / 2) * (1 - 2 ** (-self.bits / 4))

    def charged(self, *, parameters: float = 0.0, bits: float = 0.0) -> Weight | None:
        """Less what was spent on making the prediction; None if nothing is left to speak of."""
        each = self.bits / self.elements if self.elements else 0.0
        left = self.bits - each * parameters - bits
        return dataclasses.replace(self, bits=left) if left >= _FEWEST_BITS else None

    @property
    def evidence(self) -> dict[str, float | str]:
        """The figures as a pattern carries them."""
        return {
            "explained": round(self.explained, 4),
            "residual": float(f"{self.residual:.3g}"),
            "elements": float(self.elements),
            "extent": "whole tensor" if self.whole else "where it is wrong",
        }


def noise_of(case: Case) -> Tensor:
    """The noise of each element, as a divisor: never zero."""
    if case.is_exact:
        return torch.ones(case.shape, dtype=torch.float64)
    allowed = case.allowed
    if allowed.numel() and float(allowed.amin()) > 0:
        return allowed
    positive = allowed[(allowed > 0) & torch.isfinite(allowed)]
    least = float(positive.min()) if positive.numel() else torch.finfo(torch.float64).tiny
    # The noise of an element that can be anything is no yardstick; it is left out of every fit.
    return allowed.clamp(min=least)


def numbers(case: Case) -> Tensor:
    """Where both sides are numbers."""
    return torch.isfinite(case.given) & torch.isfinite(case.right)


def own_unit(case: Case) -> float:
    """The unit roundoff of the candidate's values; 0 for whole numbers."""
    return 0.0 if case.is_exact else unit_roundoff(case.candidate.dtype)


def beyond_noise(case: Case) -> bool:
    """Whether the judge's rule finds the values wrong: one element, the whole, or one slice."""
    if case.is_exact or not case.reference.numel():
        return bool(case.wrong.any())
    places = sample(case)
    if not places.numel():
        return False
    # Either all wrong elements are beyond the noise by themselves or none is: some tell it.
    error, allowed = (one.reshape(-1)[places] for one in (case.error.abs(), case.allowed))
    if bool((~torch.isfinite(error) | (error > MAX_Z * allowed)).any()):
        return True
    z = torch.where(numbers(case), case.error.abs() / noise_of(case), 0.0).square()
    count = z.numel()
    if math.sqrt(float(z.mean())) > RMS_Z * (1 + 2 / math.sqrt(count)):
        return True
    for axis, size in enumerate(z.shape):
        others = [dim for dim in range(z.dim()) if dim != axis]
        if size > 1 and others:
            worst = math.sqrt(float(z.mean(dim=others).max()))
            if worst > slice_limit(size, count // size):
                return True
    return False


def weigh(
    case: Case, prediction: Tensor, *, parameters: float = 0.0, slack: float = 1.0, bits: float = 0
) -> Weight | None:
    """What speaks for a prediction; None if it does not hold or could as well be chance.

    Args:
        parameters: how many numbers were fitted to make it.
        slack: factor on the noise, where the prediction carries more of it than the reference.
        bits: what choosing it among others cost.
    """
    if case.is_exact:
        prediction = prediction.round()
    if _is_hopeless(case, prediction, slack):
        return None
    wrong = case.wrong
    left = (case.given - prediction).abs()
    near = (left <= MAX_Z * slack * case.allowed) | _same(case.given, prediction)
    bad, good = int(wrong.sum()), int((~wrong).sum())
    explained = float((near & wrong).sum()) / bad
    figures = _figures(case, prediction, slack)
    # What is not wrong is left as it is: the hypothesis may be about a part of the tensor.
    if figures is None or not Fit(explained, 0.0, figures[0]).holds:
        return None
    if not _holds_for_doubtful(case, left, bad):
        return None
    residual, each = figures
    spoiled = float((~near & ~wrong).sum()) / good if good else 0.0
    whole = Fit(explained, spoiled, residual).holds and _no_worse_elsewhere(case, left)
    count = round(bad * explained)
    return Weight(explained, residual, each * count, count, whole).charged(
        parameters=parameters, bits=bits
    )


def _figures(case: Case, prediction: Tensor, slack: float) -> tuple[float, float] | None:
    """What is left of the error, and what one element tells in bits; None if too much is left."""
    places = sample(case)
    given, predicted = case.given.reshape(-1)[places], prediction.reshape(-1)[places]
    noise, error = noise_of(case).reshape(-1)[places], case.error.reshape(-1)[places].abs()
    left = torch.where(_same(given, predicted), 0.0, (given - predicted).abs())
    before = torch.where(torch.isfinite(error), error, left + 2**_MOST_BITS * noise)
    near = left <= MAX_Z * slack * noise
    if not bool(near.any()) or float((left <= before / 2).double().mean()) < _MOSTLY_BETTER:
        return None  # a few large errors must not speak for the others
    after_z, before_z = (left / noise)[near], (before / noise)[near]
    size = math.sqrt(float(before_z.square().mean()))
    scatter = math.sqrt(float(after_z.square().mean()))
    residual = scatter / size if size else math.inf
    limit = slack * RMS_Z * (1 + 2 / math.sqrt(after_z.numel()))
    if not (residual <= _MOST_LEFT and scatter <= limit):
        return None
    gained = torch.log2(1 + before_z / after_z.clamp(min=1.0)).clamp(max=_MOST_BITS)
    return residual, float(gained.mean())


def _holds_for_doubtful(case: Case, left: Tensor, bad: int) -> bool:
    """Whether it also explains those that are almost wrong.

    Errors that all are just beyond the noise look alike, for the others were not chosen. What is
    the matter with them shows in those just below.
    """
    error = case.error.abs()
    doubtful = (error > _DOUBTFUL_Z * case.allowed) & ~case.wrong & torch.isfinite(error)
    if int(doubtful.sum()) < max(_FEW_DOUBTFUL, _SHARE_DOUBTFUL * bad):
        return True
    better = (left <= error / 2) & doubtful
    return float(better.sum()) >= _MOSTLY_BETTER * float(doubtful.sum())


def _no_worse_elsewhere(case: Case, left: Tensor) -> bool:
    """Whether the elements that are not wrong by themselves are as near to the prediction."""
    weight = torch.where(case.wrong, 0.0, 1 / noise_of(case))
    now, before = (left * weight).nan_to_num(0.0), (case.error.abs() * weight).nan_to_num(0.0)
    return float(now.square().sum()) <= float(before.square().sum())


def proportion(case: Case, x: Tensor, y: Tensor, mask: Tensor) -> tuple[float, float]:
    """The factor of `y` over `x` by weighted least squares, with its standard error."""
    noise = noise_of(case)[mask]
    return _fitted(x[mask] / noise, y[mask] / noise)


def refined_proportion(case: Case, x: Tensor, y: Tensor, start: float) -> tuple[float, float]:
    """The factor on all elements that follow a first estimate, wrong by themselves or not."""
    near = (y - start * x).abs() <= MAX_Z * max(1.0, abs(start)) * noise_of(case)
    return proportion(case, x, y, near & numbers(case))


def sample(case: Case) -> Tensor:
    """Where to look first: up to some thousand wrong elements, spread over all of them.

    Positions follow a stride that has nothing in common with the shape, so that a pattern of
    rows or tiles is met in all of its parts.
    """
    wrong = case.wrong.reshape(-1)
    count = wrong.numel()
    if count > _SAMPLE:
        places = torch.arange(_SAMPLE) * _STRIDE % count
        places = places[wrong[places]]
        if places.numel() >= _SAMPLE // 16:
            return places
    places = wrong.nonzero().reshape(-1)
    return places[:: max(1, places.numel() // _SAMPLE)]


def _is_hopeless(case: Case, prediction: Tensor, slack: float) -> bool:
    """Whether a look at some of the elements is enough to drop it; most are dropped here."""
    places = sample(case)
    given, predicted = case.given.reshape(-1)[places], prediction.reshape(-1)[places]
    left = (given - predicted).abs()
    near = left <= MAX_Z * slack * noise_of(case).reshape(-1)[places]
    return float((near | _same(given, predicted)).double().mean()) < _HOPEFUL


def robust_proportion(case: Case, x: Tensor, y: Tensor) -> tuple[float, float]:
    """The factor of `y` over `x` on the wrong elements, unmoved by a few that do not follow.

    Begins with the median of the quotients where they tell most, then fits what is near it.
    """
    places = sample(case)
    noise = noise_of(case).reshape(-1)[places]
    x, y = x.reshape(-1)[places], y.reshape(-1)[places]
    use = torch.isfinite(x) & torch.isfinite(y) & (x != 0) & torch.isfinite(noise)
    x, y, noise = x[use], y[use], noise[use]
    if x.numel() and not x.is_complex():
        telling = (x / noise).abs()
        clear = telling >= telling.median()
        start = float((y[clear] / x[clear]).median())
        near = (y - start * x).abs() <= MAX_Z * max(1.0, abs(start)) * noise
        if bool(near.any()):
            x, y, noise = x[near], y[near], noise[near]
    return _fitted(x / noise, y / noise)


def _fitted(over: Tensor, under: Tensor) -> tuple[float, float]:
    """Least squares of `under` over `over`, both in units of the noise."""
    below = float(over.abs().square().sum())
    if not (below > 0 and math.isfinite(below)):
        return math.nan, math.inf
    product = (over.conj() * under).real.sum() if over.is_complex() else over @ under
    factor = float(product) / below
    scatter = float((under - factor * over).abs().square().mean().sqrt())
    return factor, scatter / math.sqrt(below)


def _same(left: Tensor, right: Tensor) -> Tensor:
    return (left == right) | (torch.isnan(left) & torch.isnan(right))
