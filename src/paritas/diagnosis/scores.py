"""The evidence for a prediction of the candidate, in bits."""

from __future__ import annotations

import dataclasses
import enum
import itertools
import math
from typing import TYPE_CHECKING

import torch

from paritas.diagnosis.case import Case, Context, near, roundoff, same
from paritas.numerics.criterion import MAX_Z, RMS_Z
from paritas.results.findings import Pattern

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch import Tensor

    from paritas.results.findings import PatternKind


# --- The evidence for a prediction ----------------------------------------------------------------

# A prediction that reduces an error e to d is worth log2(e / d) bits, since chance would come that
# close so rarely. A fitted prediction explains some elements by construction: each parameter costs
# about one element. A prediction chosen among many costs the bits of that choice. The rest is the
# evidence.

# The share of wrong elements that must be explained, and of right ones that may be spoiled.
_EXPLAINED = 0.98
_SPOILED = 0.02
# The largest share of the error that may be left.
_MOST_LEFT = 0.25
# Less evidence than this may be chance.
_FEWEST_BITS = 4.0
# The most bits that one element is worth.
_MOST_BITS = 20.0
_CERTAIN = 0.99
# The share of elements whose own error must become smaller.
_MOSTLY_BETTER = 0.8
# Elements with errors beyond this are doubtful, and count if there are some.
_DOUBTFUL_Z = 4.0
_FEW_DOUBTFUL = 3
_SHARE_DOUBTFUL = 0.1
# The share of the elements looked at first that must fit.
_HOPEFUL = 0.9


class Extent(enum.Enum):
    """Which elements a hypothesis is about."""

    WRONG = enum.auto()
    """Only the wrong elements: the fault may be in a part of the tensor."""
    ALL = enum.auto()
    """All elements: right ones must be predicted as well, and count as evidence."""


@dataclasses.dataclass(frozen=True)
class Weight:
    """The evidence for a prediction.

    Attributes:
        explained: share of the wrong elements that it explains.
        spoiled: share of the right elements that it predicts wrongly.
        residual: the remaining error over the error, in units of the noise.
        bits: evidence, less the cost of fitted parameters.
        elements: number of wrong elements that it explains.
        whole: whether it holds for the whole tensor, not only for the wrong elements.
        extent: which elements the hypothesis is about.
    """

    explained: float
    spoiled: float
    residual: float
    bits: float
    elements: int
    whole: bool
    extent: Extent

    @property
    def confidence(self) -> float:
        """Raw confidence, by how exact the fit is and how many elements support it."""
        return _CERTAIN * self.explained * (1 - self.residual / 2) * (1 - 2 ** (-self.bits / 4))

    def charged(self, *, parameters: float = 0.0, cost: float = 0.0) -> Weight | None:
        """The weight less the cost of making the prediction; None if too little is left."""
        each = self.bits / self.elements if self.elements else 0.0
        left = self.bits - each * parameters - cost
        return dataclasses.replace(self, bits=left) if left >= _FEWEST_BITS else None

    def pattern(
        self,
        kind: PatternKind,
        sentence: str,
        known: Mapping[str, float | str] | None = None,
        trust: float = 1.0,
    ) -> Pattern:
        """The pattern of a prediction that holds.

        Args:
            known: further evidence by name.
            trust: factor on the confidence.
        """
        evidence: dict[str, float | str] = {
            "explained": round(self.explained, 4),
            "residual": float(f"{self.residual:.3g}"),
        }
        if self.extent is Extent.ALL:
            evidence |= {"spoiled": round(self.spoiled, 4), "bits": min(self.bits, 1000.0)}
        else:
            evidence["elements"] = float(self.elements)
            evidence["extent"] = "whole tensor" if self.whole else "where it is wrong"
        return Pattern(
            kind=kind,
            confidence=trust * self.confidence,
            sentence=sentence,
            evidence={**(known or {}), **evidence},
        )


def weigh(
    case: Case,
    prediction: Tensor,
    *,
    parameters: float = 0.0,
    cost: float = 0.0,
    noise: Tensor | None = None,
    slack: float = 1.0,
    extent: Extent = Extent.WRONG,
) -> Weight | None:
    """The evidence for a predicted candidate; None if it does not hold or may be chance.

    Args:
        parameters: how many numbers were fitted to make it.
        cost: log2 of how many predictions were tried.
        noise: of the prediction, if it is made of values from other places.
        slack: factor on the noise, if the prediction is noisier than the reference.
        extent: which elements it is about.
    """
    if case.is_exact:
        prediction = prediction.round()
    noise = _noise_of_prediction(case, prediction, noise)
    places = case.some_wrong
    if not _mostly(near(*_at(places, case.given, prediction, noise), slack=slack), _HOPEFUL):
        return None  # most predictions fail here, after a look at some elements
    wrong = case.wrong
    fits = near(case.given, prediction, noise, slack=slack)
    bad, good = int(wrong.sum()), int((~wrong).sum())
    explained = float((fits & wrong).sum()) / bad
    spoiled = float((~fits & ~wrong).sum()) / good if good else 0.0
    if explained < _EXPLAINED or (extent is Extent.ALL and spoiled > _SPOILED):
        return None
    unit = torch.maximum(noise, case.unit)
    figures = _residual_and_bits(
        *_at(places, case.given, prediction, case.error, unit), slack=slack
    )
    left = (case.given - prediction).abs()
    if figures is None or not _holds_for_doubtful(case, left, bad):
        return None
    residual, each = figures
    count = round(bad * explained)
    bits = each * count
    if extent is Extent.ALL:
        bits += _bits_elsewhere(case, left, unit)
    whole = spoiled <= _SPOILED and _no_worse_elsewhere(case, left)
    found = Weight(explained, spoiled, residual, bits, count, whole, extent)
    return found.charged(parameters=parameters, cost=cost)


def _at(places: Tensor, *tensors: Tensor) -> list[Tensor]:
    return [one.reshape(-1)[places] for one in tensors]


def _mostly(held: Tensor, share: float) -> bool:
    return held.numel() > 0 and float(held.double().mean()) >= share


def _noise_of_prediction(case: Case, prediction: Tensor, noise: Tensor | None) -> Tensor:
    """The noise of a prediction, which may be larger than that of the right value."""
    own = roundoff(case.candidate) * prediction.abs().nan_to_num(0.0, 0.0, 0.0)
    own = torch.maximum(case.allowed, own)
    return own if noise is None else torch.maximum(own, noise)


def _residual_and_bits(
    given: Tensor, predicted: Tensor, error: Tensor, unit: Tensor, *, slack: float
) -> tuple[float, float] | None:
    """The remaining share of the error, and bits per element; None if too much is left."""
    left = torch.where(same(given, predicted), 0.0, (given - predicted).abs())
    error = error.abs()
    before = torch.where(torch.isfinite(error), error, left + 2**_MOST_BITS * unit)
    fits = left <= MAX_Z * slack * unit
    if not bool(fits.any()) or not _mostly(left <= before / 2, _MOSTLY_BETTER):
        return None  # a few large errors must not decide for the others
    after_z, before_z = (left / unit)[fits], (before / unit)[fits]
    size = math.sqrt(float(before_z.square().mean()))
    scatter = math.sqrt(float(after_z.square().mean()))
    residual = scatter / size if size else math.inf
    limit = slack * RMS_Z * (1 + 2 / math.sqrt(after_z.numel()))
    if not (residual <= _MOST_LEFT and scatter <= limit):
        return None
    gained = torch.log2(1 + before_z / after_z.clamp(min=1.0)).clamp(max=_MOST_BITS)
    return residual, float(gained.mean())


def _bits_elsewhere(case: Case, left: Tensor, unit: Tensor) -> float:
    """The evidence of elements that are not wrong by themselves: many small errors count."""
    before = (case.error.abs() / unit).clamp(min=1.0)
    gained = torch.log2(before / (left / unit).clamp(min=1.0)).nan_to_num(0.0)
    return float(gained[~case.wrong].clamp(-_MOST_BITS, _MOST_BITS).sum())


def _holds_for_doubtful(case: Case, left: Tensor, bad: int) -> bool:
    """Whether it also explains elements that are almost wrong.

    Errors that are all just beyond the noise look alike, because the smaller ones were left out.
    Those just below the limit show what they have in common.
    """
    error = case.error.abs()
    doubtful = (error > _DOUBTFUL_Z * case.allowed) & ~case.wrong & torch.isfinite(error)
    if int(doubtful.sum()) < max(_FEW_DOUBTFUL, _SHARE_DOUBTFUL * bad):
        return True
    better = (left <= error / 2) & doubtful
    return float(better.sum()) >= _MOSTLY_BETTER * float(doubtful.sum())


def _no_worse_elsewhere(case: Case, left: Tensor) -> bool:
    """Whether the elements that are not wrong by themselves are no farther from the prediction."""
    weight = torch.where(case.wrong, 0.0, 1 / case.unit)
    now, before = (left * weight).nan_to_num(0.0), (case.error.abs() * weight).nan_to_num(0.0)
    return float(now.square().sum()) <= float(before.square().sum())


def supported_pattern(
    case: Case,
    prediction: Tensor,
    kind: PatternKind,
    sentence: str,
    *,
    cost: float = 1.0,
    noise: Tensor | None = None,
    evidence: Mapping[str, float | str] | None = None,
) -> Pattern | None:
    """The pattern of a prediction of all elements; None if it does not hold."""
    weight = weigh(case, prediction, cost=cost, noise=noise, extent=Extent.ALL)
    return None if weight is None else weight.pattern(kind, sentence, evidence)


def first_supported(tried: Iterable[Pattern | None]) -> list[Pattern]:
    """The first pattern that holds; those after it are not tried."""
    return list(itertools.islice(filter(None, tried), 1))


# --- Proportions in units of the noise ------------------------------------------------------------


def proportion(case: Case, x: Tensor, y: Tensor, mask: Tensor) -> tuple[float, float]:
    """The factor of `y` over `x` by weighted least squares, with its standard error."""
    noise = case.unit[mask]
    return _least_squares(x[mask] / noise, y[mask] / noise)


def refined_proportion(case: Case, x: Tensor, y: Tensor, start: float) -> tuple[float, float]:
    """The factor fitted to all elements that are near a first estimate."""
    near = (y - start * x).abs() <= MAX_Z * max(1.0, abs(start)) * case.unit
    return proportion(case, x, y, near & case.both_finite)


def robust_proportion(case: Case, x: Tensor, y: Tensor) -> tuple[float, float]:
    """The factor of `y` over `x` on the wrong elements, robust against a few outliers.

    Starts with the median of the quotients with the least noise, then fits what is near it.
    """
    places = case.some_wrong
    noise = case.unit.reshape(-1)[places]
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


# --- The block that is wrong, and a first look at many hypotheses ---------------------------------

_PROBED = 1024
_FEW = 2
# The share of a run's indices that must be wrong, and the share that may be missing at its ends.
_DENSE = 0.5
_MISSED = 0.02


@dataclasses.dataclass(frozen=True)
class WrongBlock:
    """The smallest block (indices along each axis) that holds all wrong elements.

    Attributes:
        case: the block as a case.
        indices: the indices along each axis.
        is_whole: whether it is the whole tensor.
    """

    case: Case
    indices: tuple[Tensor, ...]
    is_whole: bool

    def is_run(self, axis: int) -> bool:
        """Whether it is the whole axis or a run of neighbours along it."""
        kept = self.indices[axis]
        together = len(kept) > _FEW and int(kept[-1] - kept[0]) == len(kept) - 1
        return self.is_whole or together


def wrong_block(case: Case) -> WrongBlock:
    """The smallest block with all wrong elements."""
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
        dataclasses.replace(case.context, held={}, named={}, earlier={}, inputs=()),
    )
    return WrongBlock(inner, tuple(indices), is_whole=False)


def _fill_gaps(hit: Tensor, size: int) -> Tensor:
    """The indices with the gaps between them that may be right by chance."""
    if not len(hit):
        return hit
    low, high = int(hit[0]), int(hit[-1]) + 1
    if len(hit) < _DENSE * (high - low):
        return hit
    at_ends = low + size - high
    return torch.arange(size) if at_ends <= _MISSED * size else torch.arange(low, high)


class Probe:
    """Some wrong elements, to try many hypotheses on before one is tested on all."""

    def __init__(self, case: Case) -> None:
        places = case.wrong.flatten().nonzero().flatten()
        step = max(1, len(places) // _PROBED)
        self.flat = places[::step]
        self.at = unravel(self.flat, case.shape)
        self.given = case.given.flatten()[self.flat]
        self.noise = case.allowed.flatten()[self.flat]
        self.case = case

    def meets(self, values: Tensor, noise: Tensor | None = None) -> bool:
        """Whether the predictions of the probed elements are close enough to continue."""
        noise = self.noise if noise is None else torch.maximum(self.noise, noise)
        return _mostly(near(self.given, values, noise), _HOPEFUL)

    def meets_view(self, view: Tensor, noise: Tensor | None = None) -> bool:
        """The same for a tensor of the case's shape, without a copy."""
        return self.meets(view[self.at], None if noise is None else noise[self.at])

    def meets_map(self, axis: int, source: Tensor, *, partly: bool = False) -> bool:
        """The same if each index i of an axis took the values of index `source[i]`.

        Args:
            partly: leave out indices without a source (-1) instead of predicting zeros.
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
    """Indices along each axis; torch's own function imports sympy."""
    found: list[Tensor] = []
    for size in reversed(shape):
        found.append(flat % size)
        flat = flat // size
    return tuple(reversed(found))


def axis_name(context: Context, axis: int, rank: int) -> str:
    """The number of an axis, with its name if it is known."""
    if len(context.axes) == rank and context.axes[axis]:
        return f"axis {axis} ({context.axes[axis]})"
    return f"axis {axis}"
