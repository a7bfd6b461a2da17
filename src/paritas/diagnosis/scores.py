"""How much a prediction of the candidate is worth as an explanation, in bits."""

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


# --- What speaks for a prediction -----------------------------------------------------------------

# A prediction that leaves of an error e no more than d is worth log2(e / d) bits: so unlikely was
# it to come as near by chance. One that has been fitted to the numbers explains some of them for
# nothing: each fitted parameter is worth about one element. One that was chosen among many has to
# bring the bits that the search for it spent. What is left over is the evidence.

# So much of the wrong has to be explained, and so much of the right may be spoiled.
_EXPLAINED = 0.98
_SPOILED = 0.02
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
# Of the elements that are looked at first, so many must fit to go on.
_HOPEFUL = 0.9


class Extent(enum.Enum):
    """Of which elements a hypothesis speaks."""

    WRONG = enum.auto()
    """Of those that are wrong: what is right may be so because the fault is in a part only."""
    ALL = enum.auto()
    """Of all: what is right has to come out right by it, and counts as evidence."""


@dataclasses.dataclass(frozen=True)
class Weight:
    """What speaks for a prediction.

    Attributes:
        explained: share of the wrong elements that it explains.
        spoiled: share of the right elements that would be wrong by it.
        residual: what is left of the error, over the error, in units of the noise.
        bits: evidence, less what the fitted parameters explain for nothing.
        elements: how many wrong elements bear it.
        whole: whether it holds for the whole tensor, and not only where that is wrong.
        extent: of which elements the hypothesis speaks.
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
        """Raw, by how exact the fit is and how many elements support it."""
        return _CERTAIN * self.explained * (1 - self.residual / 2) * (1 - 2 ** (-self.bits / 4))

    def charged(self, *, parameters: float = 0.0, cost: float = 0.0) -> Weight | None:
        """Less what was spent on making the prediction; None if nothing is left to speak of."""
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
        """What is said of a prediction that holds.

        Args:
            known: what else it rests on, by name.
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
    """What speaks for a predicted candidate; None if it does not hold or could as well be chance.

    Args:
        parameters: how many numbers were fitted to make it.
        cost: bits that choosing it among others cost: log2 of how many were tried.
        noise: of the prediction, where it is made of values from other places.
        slack: factor on the noise, where the prediction carries more of it than the reference.
        extent: of which elements it speaks.
    """
    if case.is_exact:
        prediction = prediction.round()
    noise = _noise_of_prediction(case, prediction, noise)
    places = case.some_wrong
    if not _mostly(near(*_at(places, case.given, prediction, noise), slack=slack), _HOPEFUL):
        return None  # most are dropped here, by a look at some of the elements
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
    """The rounding of a predicted value, which may be larger than that of the right one."""
    own = roundoff(case.candidate) * prediction.abs().nan_to_num(0.0, 0.0, 0.0)
    own = torch.maximum(case.allowed, own)
    return own if noise is None else torch.maximum(own, noise)


def _residual_and_bits(
    given: Tensor, predicted: Tensor, error: Tensor, unit: Tensor, *, slack: float
) -> tuple[float, float] | None:
    """What is left of the error, and what one element tells in bits; None if too much is left."""
    left = torch.where(same(given, predicted), 0.0, (given - predicted).abs())
    error = error.abs()
    before = torch.where(torch.isfinite(error), error, left + 2**_MOST_BITS * unit)
    fits = left <= MAX_Z * slack * unit
    if not bool(fits.any()) or not _mostly(left <= before / 2, _MOSTLY_BETTER):
        return None  # a few large errors must not speak for the others
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
    """What the elements that are not wrong by themselves tell: many small errors are evidence."""
    before = (case.error.abs() / unit).clamp(min=1.0)
    gained = torch.log2(before / (left / unit).clamp(min=1.0)).nan_to_num(0.0)
    return float(gained[~case.wrong].clamp(-_MOST_BITS, _MOST_BITS).sum())


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
    """The pattern that a prediction of all elements supports; None if it does not hold."""
    weight = weigh(case, prediction, cost=cost, noise=noise, extent=Extent.ALL)
    return None if weight is None else weight.pattern(kind, sentence, evidence)


def first_supported(tried: Iterable[Pattern | None]) -> list[Pattern]:
    """The first pattern that holds; what comes after it is not tried."""
    return list(itertools.islice(filter(None, tried), 1))


# --- Wrongness and proportions in units of the noise ---------------------------------------------


def proportion(case: Case, x: Tensor, y: Tensor, mask: Tensor) -> tuple[float, float]:
    """The factor of `y` over `x` by weighted least squares, with its standard error."""
    noise = case.unit[mask]
    return _least_squares(x[mask] / noise, y[mask] / noise)


def refined_proportion(case: Case, x: Tensor, y: Tensor, start: float) -> tuple[float, float]:
    """The factor on all elements that follow a first estimate, wrong by themselves or not."""
    near = (y - start * x).abs() <= MAX_Z * max(1.0, abs(start)) * case.unit
    return proportion(case, x, y, near & case.both_finite)


def robust_proportion(case: Case, x: Tensor, y: Tensor) -> tuple[float, float]:
    """The factor of `y` over `x` on the wrong elements, unmoved by a few that do not follow.

    Begins with the median of the quotients where they tell most, then fits what is near it.
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
# So many of the indices of a run have to hold wrong elements, and so few may lack at its ends.
_DENSE = 0.5
_MISSED = 0.02


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
        dataclasses.replace(case.context, held={}, named={}, earlier={}, inputs=()),
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
        self.noise = case.allowed.flatten()[self.flat]
        self.case = case

    def meets(self, values: Tensor, noise: Tensor | None = None) -> bool:
        """Whether predicted values of the probed elements are near enough to go on."""
        noise = self.noise if noise is None else torch.maximum(self.noise, noise)
        return _mostly(near(self.given, values, noise), _HOPEFUL)

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
