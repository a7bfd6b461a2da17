"""How much a prediction of the candidate is worth as an explanation, in bits."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import torch

from paritas.diagnosis.case import Case, Context, Fit
from paritas.numerics.criterion import MAX_Z, RMS_Z, slice_limit, unit_roundoff
from paritas.results.findings import Pattern

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


# --- Predictions with fitted parameters -----------------------------------------------------------

# A prediction that has been fitted to the numbers explains some of them for nothing: each fitted
# parameter is worth about one element. What is left over, in bits, is the evidence. And a tensor
# whose errors are within its noise has nothing that needs an explanation.

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
_SAMPLED = 1 << 14
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


def both_finite(case: Case) -> Tensor:
    """Where both sides are numbers."""
    return torch.isfinite(case.given) & torch.isfinite(case.right)


def own_unit(case: Case) -> float:
    """The unit roundoff of the candidate's values; 0 for whole numbers."""
    return 0.0 if case.is_exact else unit_roundoff(case.candidate.dtype)


def beyond_noise(case: Case) -> bool:
    """Whether the judge's rule finds the values wrong: one element, the whole, or one slice."""
    if case.is_exact or not case.reference.numel():
        return bool(case.wrong.any())
    places = sample_wrong(case)
    if not places.numel():
        return False
    # Either all wrong elements are beyond the noise by themselves or none is: some tell it.
    error, allowed = (one.reshape(-1)[places] for one in (case.error.abs(), case.allowed))
    if bool((~torch.isfinite(error) | (error > MAX_Z * allowed)).any()):
        return True
    z = torch.where(both_finite(case), case.error.abs() / noise_of(case), 0.0).square()
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
    near = (left <= MAX_Z * slack * case.allowed) | _equal_or_both_nan(case.given, prediction)
    bad, good = int(wrong.sum()), int((~wrong).sum())
    explained = float((near & wrong).sum()) / bad
    figures = _residual_and_bits(case, prediction, slack)
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


def _residual_and_bits(case: Case, prediction: Tensor, slack: float) -> tuple[float, float] | None:
    """What is left of the error, and what one element tells in bits; None if too much is left."""
    places = sample_wrong(case)
    given, predicted = case.given.reshape(-1)[places], prediction.reshape(-1)[places]
    noise, error = noise_of(case).reshape(-1)[places], case.error.reshape(-1)[places].abs()
    left = torch.where(_equal_or_both_nan(given, predicted), 0.0, (given - predicted).abs())
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
    return _least_squares(x[mask] / noise, y[mask] / noise)


def refined_proportion(case: Case, x: Tensor, y: Tensor, start: float) -> tuple[float, float]:
    """The factor on all elements that follow a first estimate, wrong by themselves or not."""
    near = (y - start * x).abs() <= MAX_Z * max(1.0, abs(start)) * noise_of(case)
    return proportion(case, x, y, near & both_finite(case))


def sample_wrong(case: Case) -> Tensor:
    """Where to look first: up to some thousand wrong elements, spread over all of them.

    Positions follow a stride that has nothing in common with the shape, so that a pattern of
    rows or tiles is met in all of its parts.
    """
    wrong = case.wrong.reshape(-1)
    count = wrong.numel()
    if count > _SAMPLED:
        places = torch.arange(_SAMPLED) * _STRIDE % count
        places = places[wrong[places]]
        if places.numel() >= _SAMPLED // 16:
            return places
    places = wrong.nonzero().reshape(-1)
    return places[:: max(1, places.numel() // _SAMPLED)]


def _is_hopeless(case: Case, prediction: Tensor, slack: float) -> bool:
    """Whether a look at some of the elements is enough to drop it; most are dropped here."""
    places = sample_wrong(case)
    given, predicted = case.given.reshape(-1)[places], prediction.reshape(-1)[places]
    left = (given - predicted).abs()
    near = left <= MAX_Z * slack * noise_of(case).reshape(-1)[places]
    return float((near | _equal_or_both_nan(given, predicted)).double().mean()) < _HOPEFUL


def robust_proportion(case: Case, x: Tensor, y: Tensor) -> tuple[float, float]:
    """The factor of `y` over `x` on the wrong elements, unmoved by a few that do not follow.

    Begins with the median of the quotients where they tell most, then fits what is near it.
    """
    places = sample_wrong(case)
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
    return _least_squares(x / noise, y / noise)


def _least_squares(over: Tensor, under: Tensor) -> tuple[float, float]:
    """Least squares of `under` over `over`, both in units of the noise."""
    below = float(over.abs().square().sum())
    if not (below > 0 and math.isfinite(below)):
        return math.nan, math.inf
    product = (over.conj() * under).real.sum() if over.is_complex() else over @ under
    factor = float(product) / below
    scatter = float((under - factor * over).abs().square().mean().sqrt())
    return factor, scatter / math.sqrt(below)


def _equal_or_both_nan(left: Tensor, right: Tensor) -> Tensor:
    return (left == right) | (torch.isnan(left) & torch.isnan(right))


# --- Hypotheses chosen among many -----------------------------------------------------------------

# A prediction that leaves of an error e no more than d is worth log2(e / d) bits: so unlikely was
# it to come as near by chance. A hypothesis that was one of many has to bring the bits that the
# search for it spent.

# Above this share of the error nothing is explained, only lessened.
_MOST_RESIDUAL = 0.5
_PROBED = 1024
_FEW = 2
# So many of the indices of a run have to hold wrong elements, and so few may lack at its ends.
_DENSE = 0.5
_MISSED = 0.02
# So many of the probed elements have to be met for a hypothesis to be worth a whole test.
_PLAUSIBLE = 0.9


def supported_pattern(
    case: Case,
    prediction: Tensor,
    kind: str,
    sentence: str,
    *,
    cost: float = 1.0,
    noise: Tensor | None = None,
    evidence: dict[str, float | str] | None = None,
) -> Pattern | None:
    """The pattern that a prediction supports; None if it does not fit.

    Args:
        cost: bits that were spent on finding the hypothesis: log2 of how many were tried.
        noise: of the prediction, where it is made of values from other places.
    """
    own = _prediction_noise(case, prediction)
    noise = own if noise is None else torch.maximum(noise, own)
    fit = case.fit(prediction, noise=noise)
    if not fit.holds or (math.isfinite(fit.residual) and fit.residual > _MOST_RESIDUAL):
        return None
    gained = evidence_bits(case, prediction, noise) - cost
    if gained < 1:
        return None
    known: dict[str, float | str] = {"explained": fit.explained, "spoiled": fit.spoiled}
    if math.isfinite(fit.residual):
        known["residual"] = fit.residual
    known["bits"] = min(gained, 1000.0)
    confidence = min(0.99, 1 - 2.0**-gained) * fit.explained
    return Pattern(
        kind=kind, confidence=confidence, sentence=sentence, evidence=known | (evidence or {})
    )


def _prediction_noise(case: Case, prediction: Tensor) -> Tensor:
    """The rounding of a predicted value, which may be larger than that of the right one."""
    unit = unit_roundoff(case.candidate.dtype) if case.candidate.is_floating_point() else 0.0
    return unit * prediction.abs().nan_to_num(0.0, 0.0, 0.0)


def evidence_bits(case: Case, prediction: Tensor, noise: Tensor) -> float:
    """How much less is left of the errors, in bits, over all elements: chance gives none.

    Elements that are not wrong by themselves count as well: many small errors are evidence too.
    """
    if case.is_exact:
        values = case.right[case.wrong]
        different = len(torch.unique(values[:_PROBED]))
        return values.numel() * min(_MOST_BITS, math.log2(1 + different))
    least = torch.maximum(case.allowed, noise)
    before = torch.maximum(case.error.abs(), least)
    after = torch.maximum((case.given - prediction).abs(), least)
    each = torch.log2(before / after).nan_to_num(0.0).clamp(-_MOST_BITS, _MOST_BITS)
    strange = ~torch.isfinite(case.error) & case.wrong
    return float(each[~strange].sum()) + float(strange.sum())


@dataclasses.dataclass(frozen=True)
class WrongBlock:
    """The smallest block (indices along each axis) that holds all wrong elements, by itself.

    Attributes:
        case: the block as a case.
        indices: which indices of each axis it is made of.
        is_whole: whether it is the whole tensor.
    """

    case: Case
    indices: tuple[Tensor, ...]
    is_whole: bool

    def is_run(self, axis: int) -> bool:
        """Whether it is, along an axis, the whole or a few neighbours."""
        kept = self.indices[axis]
        together = len(kept) > _FEW and int(kept[-1] - kept[0]) == len(kept) - 1
        return self.is_whole or together


def wrong_block(case: Case) -> WrongBlock:
    """The block of a case in which something is wrong."""
    indices = []
    for axis in range(len(case.shape)):
        others = [one for one in range(len(case.shape)) if one != axis]
        hit = case.wrong.any(dim=others) if others else case.wrong
        indices.append(_fill_gaps(hit.nonzero().flatten(), case.shape[axis]))
    whole = all(len(one) == size for one, size in zip(indices, case.shape, strict=True))
    if whole:
        return WrongBlock(case, tuple(indices), is_whole=True)

    def cut(value: Tensor) -> Tensor:
        for axis, kept in enumerate(indices):
            if len(kept) < value.shape[axis]:
                value = value.index_select(axis, kept)
        return value

    inner = Case(
        cut(case.candidate.detach().cpu()),
        cut(case.reference.detach().cpu()),
        cut(case.right),
        cut(case.allowed),
        dataclasses.replace(case.context, parts=(), named={}, earlier={}, inputs=()),
    )
    return WrongBlock(inner, tuple(indices), is_whole=False)


def _fill_gaps(hit: Tensor, size: int) -> Tensor:
    """Indices with those between them that are right by chance, if that may be."""
    if not len(hit):
        return hit
    low, high = int(hit[0]), int(hit[-1]) + 1
    if len(hit) < _DENSE * (high - low):
        return hit
    at_ends = low + size - high
    return torch.arange(size) if at_ends <= _MISSED * size else torch.arange(low, high)


class Probe:
    """Some wrong elements, against which many hypotheses are tried before one is tested whole."""

    def __init__(self, case: Case) -> None:
        places = case.wrong.flatten().nonzero().flatten()
        step = max(1, len(places) // _PROBED)
        self.flat = places[::step]
        self.at = unravel(self.flat, case.shape)
        self.given = case.given.flatten()[self.flat]
        self.allowed = MAX_Z * case.allowed.flatten()[self.flat]
        self.case = case

    def meets(self, values: Tensor, noise: Tensor | None = None) -> bool:
        """Whether predicted values of the probed elements are near enough to go on."""
        allowed = self.allowed if noise is None else torch.maximum(self.allowed, MAX_Z * noise)
        same = (self.given == values) | (self.given.isnan() & values.isnan())
        near = same | ((self.given - values).abs() <= allowed)
        return len(near) > 0 and float(near.double().mean()) >= _PLAUSIBLE

    def meets_view(self, view: Tensor, noise: Tensor | None = None) -> bool:
        """The same for a tensor of the case's shape, of which no copy is made."""
        return self.meets(view[self.at], None if noise is None else noise[self.at])

    def meets_map(self, axis: int, source: Tensor, *, partly: bool = False) -> bool:
        """The same if each index i of an axis had the values of index `source[i]`.

        Args:
            partly: whether indices that take no value (-1) are left out, and not taken for zeros.
        """
        taken = source[self.at[axis]]
        at = (*self.at[:axis], taken.clamp(min=0), *self.at[axis + 1 :])
        values = torch.where(taken >= 0, self.case.right[at], 0.0)
        if partly:
            values = torch.where(taken >= 0, values, self.given)
            if int((taken >= 0).sum()) * 2 < len(taken):
                return False
        return self.meets(values, self.case.allowed[at])


def unravel(flat: Tensor, shape: Sequence[int]) -> tuple[Tensor, ...]:
    """Indices along each axis; torch's own function loads a whole algebra system first."""
    found: list[Tensor] = []
    for size in reversed(shape):
        found.append(flat % size)
        flat = flat // size
    return tuple(reversed(found))


def axis_name(context: Context, axis: int, rank: int) -> str:
    """An axis as people call it."""
    if len(context.axes) == rank and context.axes[axis]:
        return f"axis {axis} ({context.axes[axis]})"
    return f"axis {axis}"
