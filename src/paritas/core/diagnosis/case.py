"""One wrong tensor: what it should be, how far it is off, where, and the evidence for a pattern.

All arithmetic is in float64 (complex128 for complex numbers) on the host. A pattern makes a
*prediction* of the candidate, and is measured against the noise that the judge measured, not
against a tolerance.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import itertools
import math
from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np
import torch

from paritas.core.numerics.bits import is_inexact
from paritas.core.numerics.criterion import MAX_Z, RMS_Z, slice_limit, unit_roundoff
from paritas.core.numerics.random_tensors import HUGE
from paritas.core.placement.meshes import coordinate_of, lines_along
from paritas.core.results.findings import Pattern

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch import Tensor

    from paritas.core.diagnosis.calls import LiveCall
    from paritas.core.diagnosis.place_runs import PlaceRuns
    from paritas.core.results.findings import PatternKind

    Array = TypeVar("Array", Tensor, np.ndarray)

# The noise if none was measured, in roundings of a value and of the tensor's scale.
_ROUNDINGS = 4.0
_OVERLOADED = ("aten", "prims")
# How many wrong elements are looked at first.
_SAMPLED = 1 << 14
_STRIDE = 1_000_003


class InnerValues(Protocol):
    """The tensors that a program computes on the way to its result."""

    def __call__(self, *, wide: bool) -> Sequence[Tensor]:
        """In float64, or as the program runs."""


@dataclasses.dataclass(frozen=True)
class Context:
    """What is known besides the values; all of it is optional.

    Attributes:
        operator: what computed the tensor, `aten.mm.default`.
        inputs: its input tensors, in order.
        arguments: its other arguments by name or position, such as `dim` or `p`.
        world: name of each axis of the mesh -> number of ranks along it.
        held: rank -> what it holds of the tensor.
        named: tensors it may have been confused with, by name: biases, residuals, parameters.
        earlier: earlier values of the same tensor, by name (`step 1`, `initial`): it may be stale.
        axes: names of its dimensions, if they are known: `batch`, `head`, `token`.
        item: what it is in a training step: `loss`, `output`, `gradient`, `parameter`, `buffer`,
            `initial` or `module`.
        unit: unit roundoff of the ranks' computation.
        splits_samples: whether ranks have different samples.
        everywhere: rank -> its value, for all ranks, also those with other samples.
        wholes: rank -> what it should hold, for the same ranks.
        summands: rank -> term of the sum that should have been reduced.
        biases: name -> vector that may have been added too often.
        added: name -> tensor that may have been added after the fault: a bias of the module, or a
            residual; the most likely one last.
        lifted_agrees: whether the fault vanishes if the candidate runs in float64; None if there is
            no such run.
        draws: whether the value depends on random numbers that the program draws. An operator that
            is known decides by itself.
        call: the call that computed the tensor, if it can be repeated.
        runs: both programs at this place, if they can be called again with other values.
        only_where: what kind of wrong it is, is not asked: it is known, or stated at the wrong
            value that this one is computed from.
        patience: share of the usual time for mistakes that are tried.
        stacked: whether the first axis has several runs, and the tensor begins with the second.
        inner: gives the values that the candidate computes on the way to the tensor, in float64 or
            as it runs, if they can be seen.
    """

    operator: str = ""
    inputs: tuple[Tensor, ...] = ()
    arguments: Mapping[str, object] = dataclasses.field(default_factory=dict)
    world: Mapping[str, int] = dataclasses.field(default_factory=dict)
    held: Mapping[int, Tensor] = dataclasses.field(default_factory=dict)
    named: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)
    earlier: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)
    axes: tuple[str, ...] = ()
    item: str = ""
    unit: float = 0.0
    splits_samples: bool = False
    everywhere: Mapping[int, Tensor] = dataclasses.field(default_factory=dict)
    wholes: Mapping[int, Tensor] = dataclasses.field(default_factory=dict)
    summands: Mapping[int, Tensor] = dataclasses.field(default_factory=dict)
    biases: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)
    added: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)
    lifted_agrees: bool | None = None
    draws: bool = False
    call: LiveCall | None = None
    runs: PlaceRuns | None = None
    only_where: bool = False
    patience: float = 1.0
    stacked: bool = False
    inner: InnerValues | None = None

    @property
    def can_be_run_again(self) -> bool:
        """Whether both programs give the same at this place again, and may get other operands."""
        runs, call = self.runs, self.call
        if runs is None or call is None or self.draws or not runs.reads_all:
            return False
        return call.is_safe_here and runs.is_faithful

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return math.prod(self.world.values())

    def ranks_along(self, rank: int, axis: str) -> list[int]:
        """The ranks with the same coordinate as a rank, except along one axis."""
        sizes = tuple(self.world.values())
        coordinates = {other: coordinate_of(other, sizes) for other in range(self.ranks)}
        lines = lines_along(coordinates, list(self.world).index(axis))
        return next(line for line in lines if rank in line)

    @property
    def operator_name(self) -> str:
        """The operator's bare name: `softmax` of `aten._softmax.default`."""
        parts = self.operator.replace("::", ".").split(".")
        name = parts[1] if len(parts) > 1 and parts[0] in _OVERLOADED else parts[-1]
        return name.lower().strip("_")


@dataclasses.dataclass(frozen=True)
class Case:
    """A candidate that differs from the reference.

    Attributes:
        candidate: c, the program's result.
        reference: e, the reference's native result.
        arbiter: r, the reference in float64, if it is known.
        noise: d, per element, as the judge measured it; None means by dtype.
        context: what else is known.
        whole_scale: if this is a part of a tensor, the `scale` of the whole.
        first_run: if this is of several runs, the case of the first one.
    """

    candidate: Tensor
    reference: Tensor
    arbiter: Tensor | None = None
    noise: Tensor | None = None
    context: Context = Context()
    whole_scale: float | None = None
    first_run: Case | None = None

    @functools.cached_property
    def repeated(self) -> tuple[Case, ...]:
        """The same place with other operands; empty if it cannot be asked again."""
        from paritas.core.diagnosis.second_look import repeat_case

        return repeat_case(self)

    @functools.cached_property
    def lengthened(self) -> tuple[Case, ...]:
        """The same place with longer operands; empty if the programs take these lengths only."""
        from paritas.core.diagnosis.second_look import lengthen_case

        return lengthen_case(self)

    @property
    def shows_again(self) -> bool:
        """Whether a fault is seen with other operands as well."""
        return any(repeated_case.is_beyond_noise for repeated_case in self.repeated)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of all its tensors."""
        return tuple(self.reference.shape)

    @property
    def is_exact(self) -> bool:
        """Whether the values are integers or booleans, which must be equal."""
        return not is_inexact(self.reference)

    @property
    def is_boolean(self) -> bool:
        """Whether the values are booleans: half of any guess is right by chance."""
        return self.reference.dtype == torch.bool

    @functools.cached_property
    def right(self) -> Tensor:
        """The right values, in float64."""
        return widen(self.reference if self.arbiter is None else self.arbiter)

    @functools.cached_property
    def given(self) -> Tensor:
        """The candidate, in float64."""
        return widen(self.candidate)

    @functools.cached_property
    def error(self) -> Tensor:
        """The candidate minus the right values; not finite where either is not."""
        return self.given - self.right

    @functools.cached_property
    def allowed(self) -> Tensor:
        """The noise of each element."""
        if self.is_exact:
            return torch.zeros(self.shape, dtype=torch.float64)
        if self.noise is not None:
            # An element without a figure has no noise.
            noise = self.noise.detach().to("cpu", torch.float64)
            noise = noise.nan_to_num(nan=0.0, posinf=math.inf)
            return noise.masked_fill(self.filled, 0.0)
        finite = self.magnitude
        scale = self.whole_scale
        if scale is None:
            computed = torch.where(self.filled, 0.0, finite)
            scale = float(computed.square().mean().sqrt()) if finite.numel() else 0.0
        unit = max(roundoff(self.candidate), roundoff(self.reference))
        return (_ROUNDINGS * unit * (finite + scale)).masked_fill(self.filled, 0.0)

    @functools.cached_property
    def filled(self) -> Tensor:
        """Which elements are infinite or as good as that, and equal in all runs.

        They are those of a mask, and have no noise. That of so large a number would allow anything
        in its place.
        """
        right = self.right.real if self.right.is_complex() else self.right
        return (right.abs() >= HUGE) & (self.right == widen(self.reference))

    @property
    def magnitude(self) -> Tensor:
        """Absolute right values; 0 where they are not finite."""
        return torch.where(torch.isfinite(self.right), self.right, 0.0).abs()

    @property
    def distance(self) -> Tensor:
        """Absolute error of each element; 0 where it is not finite."""
        return torch.where(torch.isfinite(self.error), self.error.abs(), 0.0)

    @functools.cached_property
    def beyond(self) -> Tensor:
        """Which elements are beyond the noise by themselves, or differ in being finite."""
        with_nan = torch.isnan(self.given) != torch.isnan(self.right)
        infinite = torch.isinf(self.given) | torch.isinf(self.right)
        differing = infinite & (self.given != self.right) & ~torch.isnan(self.right)
        return with_nan | differing | (self.distance > MAX_Z * self.allowed)

    @functools.cached_property
    def z(self) -> Tensor:
        """Errors in multiples of the noise; infinite where a value is wrong and not finite."""
        size = self.error.abs()
        z = torch.where(size == 0, 0.0, size / self.allowed)
        # Equal infinities, and NaN on both sides, have no difference and are right.
        return torch.where(torch.isfinite(size), z, torch.where(self.beyond, torch.inf, 0.0))

    @functools.cached_property
    def wrong(self) -> Tensor:
        """Which elements are wrong: beyond the noise, or different in being finite.

        If no element is beyond the noise by itself (a tensor that is less accurate everywhere), the
        elements with the largest errors count as wrong.
        """
        mask = self.beyond
        if bool(mask.any()) or not self.reference.numel():
            return mask
        distance = self.distance
        return distance > outstanding_limit(float(distance.max()))

    @functools.cached_property
    def some_wrong(self) -> Tensor:
        """Some thousand wrong elements to look at first, as positions in the flattened tensor.

        Their stride has no common factor with usual shapes, so they cover all parts of a pattern of
        rows or tiles.
        """
        wrong = self.wrong.reshape(-1)
        count = wrong.numel()
        if count > _SAMPLED:
            places = torch.arange(_SAMPLED) * _STRIDE % count
            places = places[wrong[places]]
            if places.numel() >= _SAMPLED // 16:
                return places
        places = wrong.nonzero().reshape(-1)
        return places[:: max(1, places.numel() // _SAMPLED)]

    @functools.cached_property
    def first_look(self) -> FirstLook:
        """Those elements, as arrays."""
        return FirstLook(self)

    @functools.cached_property
    def unit(self) -> Tensor:
        """The noise of each element as a divisor, never zero."""
        if self.is_exact:
            return torch.ones(self.shape, dtype=torch.float64)
        allowed = self.allowed
        if allowed.numel() and float(allowed.amin()) > 0:
            return allowed
        positive = allowed[(allowed > 0) & torch.isfinite(allowed)]
        least = float(positive.min()) if positive.numel() else torch.finfo(torch.float64).tiny
        # Elements with infinite noise are left out of every fit.
        return allowed.clamp(min=least)

    @functools.cached_property
    def is_beyond_noise(self) -> bool:
        """Whether one element, one slice or the whole is wrong by the judge's rule.

        Errors within the noise need no explanation.
        """
        if self.is_exact or not self.reference.numel():
            return bool(self.wrong.any())
        places = self.some_wrong
        if not places.numel():
            return False
        # Either all wrong elements are beyond the noise by themselves or none is, so some suffice.
        error, allowed = (tensor.reshape(-1)[places] for tensor in (self.error.abs(), self.allowed))
        if bool((~torch.isfinite(error) | (error > MAX_Z * allowed)).any()):
            return True
        z = torch.where(self.both_finite, self.error.abs() / self.unit, 0.0).square()
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

    @property
    def both_finite(self) -> Tensor:
        """Where both sides are finite."""
        return torch.isfinite(self.given) & torch.isfinite(self.right)

    @property
    def own_unit(self) -> float:
        """Unit roundoff of the candidate; 0 for integers."""
        return 0.0 if self.is_exact else roundoff(self.candidate)

    @functools.cached_property
    def is_finite(self) -> bool:
        """Whether all values of both sides are finite."""
        return bool(torch.isfinite(self.given).all() and torch.isfinite(self.right).all())


def same(left: Array, right: Array) -> Array:
    """Where two tensors are equal, or both NaN."""
    is_same: Array = (left == right) | ((left != left) & (right != right))  # noqa: PLR0124
    return is_same


def near(left: Tensor, right: Tensor, noise: Tensor, *, slack: float = 1.0) -> Tensor:
    """Where two tensors are equal within the noise, by the judge's limit.

    Args:
        slack: factor on the noise, if one of them is computed from noisy values.
    """
    return same(left, right) | ((left - right).abs() <= MAX_Z * slack * noise)


def outstanding_limit(largest: float) -> float:
    """The error beyond which elements count as wrong if none is beyond the noise."""
    return max(largest / 4, 0.0)


def roundoff(value: Tensor) -> float:
    """Unit roundoff of a tensor; 0 for integers."""
    return unit_roundoff(value.dtype) if is_inexact(value) else 0.0


def widen(value: Tensor) -> Tensor:
    """A tensor in float64 (complex128 for complex numbers), on the host."""
    value = value.detach().cpu()
    return value.to(torch.complex128 if value.is_complex() else torch.float64)


# --- The evidence for a prediction ----------------------------------------------------------------

# A prediction that reduces an error e to d is worth log2(e / d) bits, since chance would come that
# close so rarely. A fitted prediction explains some elements by construction: each parameter costs
# about one element. A prediction chosen among many costs the bits of that choice. The rest is the
# evidence.

# The share of wrong elements that must be explained, and of right ones that may be spoiled.
_EXPLAINED = 0.98
_SPOILED = 0.02
# How many right ones may be spoiled, as a share of the wrong ones.
_SPOILED_OF_WRONG = 0.1
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
        exact: share of the elements it is about that it reproduces bit for bit.
        fitted: how many numbers were fitted to make it.
    """

    explained: float
    spoiled: float
    residual: float
    bits: float
    elements: int
    whole: bool
    extent: Extent
    exact: float
    fitted: float = 0.0

    @property
    def within(self) -> float:
        """Share of the elements it is about that it reproduces within the noise."""
        return (
            self.explained if self.extent is Extent.WRONG else min(self.explained, 1 - self.spoiled)
        )

    @property
    def confidence(self) -> float:
        """Raw confidence, by how exact the fit is and how many elements support it."""
        return _CERTAIN * self.explained * (1 - self.residual / 2) * (1 - 2 ** (-self.bits / 4))

    def subtract_costs(self, *, parameters: float = 0.0, cost: float = 0.0) -> Weight | None:
        """The weight less the cost of making the prediction; None if too little is left."""
        each = self.bits / self.elements if self.elements else 0.0
        residual = self.bits - each * parameters - cost
        if residual < _FEWEST_BITS:
            return None
        return dataclasses.replace(self, bits=residual, fitted=self.fitted + parameters)

    def pattern(
        self,
        kind: PatternKind,
        sentence: str,
        further_evidence: Mapping[str, float | str] | None = None,
        trust: float = 1.0,
    ) -> Pattern:
        """The pattern of a prediction that holds.

        Args:
            further_evidence: further evidence by name.
            trust: factor on the confidence.
        """
        evidence: dict[str, float | str] = {
            "explained": round(self.explained, 4),
            "residual": float(f"{self.residual:.3g}"),
            "bit for bit": round_down(self.exact),
            "within the noise": round_down(self.within),
            "fitted": self.fitted,
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
            evidence={**(further_evidence or {}), **evidence},
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
    if not case.first_look.may_hold(prediction, noise, slack=slack):
        return None  # most predictions fail here, after a look at some elements
    if case.is_exact:
        prediction = prediction.round()
    noise = noise_of_prediction(case, prediction, noise)
    places = case.some_wrong
    wrong = case.wrong
    fits = near(case.given, prediction, noise, slack=slack)
    bad, good = int(wrong.sum()), int((~wrong).sum())
    explained = float((fits & wrong).sum()) / bad
    spoiled = float((~fits & ~wrong).sum()) / good if good else 0.0
    least, most = (1.0, 0.0) if case.is_boolean else (_EXPLAINED, _SPOILED)
    too_many = spoiled > most or spoiled * good > _SPOILED_OF_WRONG * bad
    if explained < least or (extent is Extent.ALL and too_many):
        return None
    unit = torch.maximum(noise, case.unit)
    figures = _residual_and_bits(
        *_at(places, case.given, prediction, case.error, unit), slack=slack
    )
    error = (case.given - prediction).abs()
    if figures is None or not _holds_for_doubtful(case, error, bad):
        return None
    residual, each = figures
    count = round(bad * explained)
    bits = each * count
    if extent is Extent.ALL:
        bits += _bits_elsewhere(case, error, unit)
        if case.is_exact and bool(fits.all()):
            bits = max(bits, _bits_of_choice(case))
    holds_everywhere = spoiled <= _SPOILED and _no_worse_elsewhere(case, error)
    weight = Weight(
        explained,
        spoiled,
        residual,
        bits,
        count,
        holds_everywhere,
        extent,
        exact_share(case, prediction, extent),
    )
    return weight.subtract_costs(parameters=parameters, cost=cost)


class FirstLook:
    """Some wrong elements of a case, for a first look at a prediction.

    Thousands of predictions are looked at. They are few numbers, for which numpy takes a fraction
    of torch's time.
    """

    def __init__(self, case: Case) -> None:
        self._case = case
        places = case.some_wrong.numpy()
        self._places = None if len(places) == case.given.numel() else places
        self._candidate = self.values_of(case.given)
        self._allowed = self.values_of(case.allowed.expand(case.given.shape))
        self._unit = roundoff(case.candidate)
        # Of these, values that are the same are also near.
        self._is_finite = bool(
            np.isfinite(self._candidate).all() and not np.isnan(self._allowed).any()
        )

    def values_of(self, tensor: Tensor) -> np.ndarray:
        """The values of these elements of a tensor of the case's shape."""
        values = widen(tensor).numpy(force=True).reshape(-1)
        return values if self._places is None else values[self._places]

    def may_hold(
        self, prediction: Tensor, noise: Tensor | None = None, *, slack: float = 1.0
    ) -> bool:
        """Whether a prediction holds for most of them; the arguments are those of `weigh`."""
        predicted = self.values_of(prediction)
        if self._case.is_exact:
            predicted = predicted.round()
        with np.errstate(all="ignore"):
            size = np.abs(predicted)
            allowed = np.where(np.isfinite(size), self._unit * size, 0.0)
            allowed = np.maximum(allowed, self._allowed)
            if noise is not None:
                allowed = np.maximum(allowed, self.values_of(noise.expand_as(prediction)))
            fits = np.abs(self._candidate - predicted) <= MAX_Z * slack * allowed
            if not self._is_finite:
                fits |= same(self._candidate, predicted)
        return bool(len(fits)) and int(np.count_nonzero(fits)) / len(fits) >= _HOPEFUL


def exact_share(case: Case, prediction: Tensor, extent: Extent = Extent.WRONG) -> float:
    """The share that a prediction reproduces bit for bit, in the candidate's dtype."""
    if not case.is_exact:
        prediction = widen(prediction.to(case.candidate.dtype))
    equal = same(case.given, prediction)
    about = equal if extent is Extent.ALL else equal[case.wrong]
    return float(about.double().mean())


def round_down(share: float) -> float:
    """A share to four digits that is 1 only if nothing is missing."""
    return math.floor(share * 10_000) / 10_000


def _at(places: Tensor, *tensors: Tensor) -> list[Tensor]:
    return [tensor.reshape(-1)[places] for tensor in tensors]


def _mostly(mask: Tensor, share: float) -> bool:
    return mask.numel() > 0 and float(mask.double().mean()) >= share


def noise_of_prediction(case: Case, prediction: Tensor, noise: Tensor | None) -> Tensor:
    """The noise of a prediction, which may be larger than that of the right value."""
    return _noise_of(case, prediction, case.allowed, noise)


def _noise_of(case: Case, prediction: Tensor, allowed: Tensor, noise: Tensor | None) -> Tensor:
    rounding = roundoff(case.candidate) * prediction.abs().nan_to_num(0.0, 0.0, 0.0)
    rounding = torch.maximum(allowed, rounding)
    return rounding if noise is None else torch.maximum(rounding, noise)


def _residual_and_bits(
    candidate: Tensor, predicted: Tensor, error: Tensor, unit: Tensor, *, slack: float
) -> tuple[float, float] | None:
    """The remaining share of the error, and bits per element; None if too much is left."""
    remaining_error = torch.where(same(candidate, predicted), 0.0, (candidate - predicted).abs())
    error = error.abs()
    before = torch.where(torch.isfinite(error), error, remaining_error + 2**_MOST_BITS * unit)
    fits = remaining_error <= MAX_Z * slack * unit
    if not bool(fits.any()) or not _mostly(remaining_error <= before / 2, _MOSTLY_BETTER):
        return None  # a few large errors must not decide for the others
    after_z, before_z = (remaining_error / unit)[fits], (before / unit)[fits]
    size = math.sqrt(float(before_z.square().mean()))
    scatter = math.sqrt(float(after_z.square().mean()))
    residual = scatter / size if size else math.inf
    limit = slack * RMS_Z * (1 + 2 / math.sqrt(after_z.numel()))
    if not (residual <= _MOST_LEFT and scatter <= limit):
        return None
    gained = torch.log2(1 + before_z / after_z.clamp(min=1.0)).clamp(max=_MOST_BITS)
    return residual, float(gained.mean())


def _bits_of_choice(case: Case) -> float:
    """The evidence of integers or booleans that are all reproduced.

    Chance would have to choose which of them are wrong, and one of the other values for each.
    """
    count, bad = case.wrong.numel(), int(case.wrong.sum())
    values = len(torch.unique(torch.stack([case.given, case.right])))
    places = math.lgamma(count + 1) - math.lgamma(bad + 1) - math.lgamma(count - bad + 1)
    return places / math.log(2) + bad * math.log2(max(1, values - 1))


def _bits_elsewhere(case: Case, residual: Tensor, unit: Tensor) -> float:
    """The evidence of elements that are not wrong by themselves: many small errors count."""
    before = (case.error.abs() / unit).clamp(min=1.0)
    gained = torch.log2(before / (residual / unit).clamp(min=1.0)).nan_to_num(0.0)
    return float(gained[~case.wrong].clamp(-_MOST_BITS, _MOST_BITS).sum())


def _holds_for_doubtful(case: Case, residual: Tensor, bad: int) -> bool:
    """Whether it also explains elements that are almost wrong.

    Errors that are all just beyond the noise look alike, because the smaller ones were left out.
    Those just below the limit show what they have in common.
    """
    error = case.error.abs()
    doubtful = (error > _DOUBTFUL_Z * case.allowed) & ~case.wrong & torch.isfinite(error)
    if int(doubtful.sum()) < max(_FEW_DOUBTFUL, _SHARE_DOUBTFUL * bad):
        return True
    better = (residual <= error / 2) & doubtful
    return float(better.sum()) >= _MOSTLY_BETTER * float(doubtful.sum())


def _no_worse_elsewhere(case: Case, residual: Tensor) -> bool:
    """Whether the elements that are not wrong by themselves are no farther from the prediction."""
    weight = torch.where(case.wrong, 0.0, 1 / case.unit)
    now, before = (residual * weight).nan_to_num(0.0), (case.error.abs() * weight).nan_to_num(0.0)
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
        indices = self.indices[axis]
        together = len(indices) > _FEW and int(indices[-1] - indices[0]) == len(indices) - 1
        return self.is_whole or together


def wrong_block(case: Case) -> WrongBlock:
    """The smallest block with all wrong elements."""
    indices = []
    for axis in range(len(case.shape)):
        hit = any_along(case.wrong, axis)
        indices.append(_fill_gaps(hit.nonzero().flatten(), case.shape[axis]))
    is_whole = all(len(index) == size for index, size in zip(indices, case.shape, strict=True))
    if is_whole:
        return WrongBlock(case, tuple(indices), is_whole=True)

    def cut(value: Tensor) -> Tensor:
        for axis, index in enumerate(indices):
            if len(index) < value.shape[axis]:
                value = value.index_select(axis, index)
        return value

    inner = Case(
        cut(case.candidate.detach().cpu()),
        cut(case.reference.detach().cpu()),
        cut(case.right),
        cut(case.allowed),
        dataclasses.replace(case.context, held={}, named={}, earlier={}, inputs=()),
    )
    return WrongBlock(inner, tuple(indices), is_whole=False)


def count_partial_axes(case: Case) -> int:
    """Along how many axes only some indices are wrong."""
    extents = zip(wrong_block(case).indices, case.shape, strict=True)
    return sum(len(indices) < size for indices, size in extents)


def holds_in_block(case: Case, prediction: Tensor) -> bool:
    """Whether a prediction of the wrong elements also holds for the right ones between them.

    What replaces values replaces all of a region. Wrong elements that are scattered among right
    ones, which the prediction would change, have another reason.
    """
    block = wrong_block(case)
    value = prediction
    for axis, index in enumerate(block.indices):
        value = value.index_select(axis, index)
    fits = near(block.case.given, value, noise_of_prediction(block.case, value, None))
    return _mostly(fits, _EXPLAINED)


def _fill_gaps(hit: Tensor, size: int) -> Tensor:
    """The indices with the gaps between them that may be right by chance."""
    if not len(hit):
        return hit
    low, high = int(hit[0]), int(hit[-1]) + 1
    steps = hit.diff()
    is_regular = len(steps) > 0 and bool((steps == steps[0]).all()) and int(steps[0]) > 1
    if is_regular and len(steps) == 1:  # two may be all of a kind: every second one of five
        is_regular = low - int(steps[0]) < 0 and high - 1 + int(steps[0]) >= size
    if is_regular or len(hit) < _DENSE * (high - low):
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


def any_along(mask: Tensor, axis: int) -> Tensor:
    """The indices along an axis at which any element is marked."""
    others = [dim for dim in range(mask.dim()) if dim != axis]
    return mask.any(dim=others) if others else mask


def unravel(flat: Tensor, shape: Sequence[int]) -> tuple[Tensor, ...]:
    """Indices along each axis; torch's own function imports sympy."""
    coordinates: list[Tensor] = []
    for size in reversed(shape):
        coordinates.append(flat % size)
        flat = flat // size
    return tuple(reversed(coordinates))


def axis_number(context: Context, axis: int) -> int:
    """The axis of the tensor that an axis of the case is."""
    return axis - 1 if context.stacked else axis


def axis_name(context: Context, axis: int, rank: int) -> str:
    """The number of an axis, with its name if it is known."""
    if len(context.axes) == rank and context.axes[axis]:
        return f"axis {axis} ({context.axes[axis]})"
    return f"axis {axis_number(context, axis)}"
