"""One wrong tensor, made ready for questions: what it should be, how far it is off, where.

Everything is in float64 (complex numbers as they are), flat arithmetic on the host. A pattern makes
a *prediction* of the candidate, and the case says how well that fits: within the noise that the
judge allowed, not within a tolerance. A large case is cut into boxes, so that no more than one box
of it is in float64 at a time.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from paritas.numerics.bits import is_inexact
from paritas.numerics.criterion import MAX_Z, unit_roundoff

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

# Without a measured noise: so many roundings of a value, and of the tensor's scale.
_ROUNDINGS = 4.0
# A prediction explains an element if it is within so many times its noise.
_EXPLAINED_Z = MAX_Z


@dataclasses.dataclass(frozen=True)
class Context:
    """What is known beside the values; all of it may be missing.

    Attributes:
        operator: what made the tensor, `aten.mm.default`.
        inputs: the tensors it was given, in order.
        arguments: its other arguments by name or position, such as `dim` or `p`.
        world: how many ranks there are, along each axis of the mesh by name.
        parts: of a tensor that ranks hold, what each of them has.
        named: tensors it may have been mixed up with, by name: biases, residuals, other parameters.
        earlier: values of the same tensor from before, by name (`step 1`, `initial`): it may be
            stale.
        axes: names of its dimensions, where they are known: `batch`, `head`, `token`.
    """

    operator: str = ""
    inputs: tuple[Tensor, ...] = ()
    arguments: Mapping[str, object] = dataclasses.field(default_factory=dict)
    world: Mapping[str, int] = dataclasses.field(default_factory=dict)
    parts: tuple[Tensor, ...] = ()
    named: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)
    earlier: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)
    axes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Fit:
    """How well a prediction explains a candidate.

    Attributes:
        explained: share of the wrong elements that it explains.
        spoiled: share of the right elements that would be wrong by it.
        residual: rms of what is left, over the rms of the error, on the wrong elements.
    """

    explained: float
    spoiled: float
    residual: float

    @property
    def holds(self) -> bool:
        """Whether it may be stated."""
        return self.explained >= 0.98 and self.spoiled <= 0.02  # noqa: PLR2004


@dataclasses.dataclass(frozen=True)
class Case:
    """A candidate that differs from what it should be.

    Attributes:
        candidate: c, as the program gave it.
        reference: e, what the reference gave natively.
        arbiter: r, the reference in float64, where it is known.
        noise: d, per element, as the judge measured it; otherwise by dtype.
        context: what else is known.
        whole_scale: of a part of a tensor, the `scale` of the whole.
    """

    candidate: Tensor
    reference: Tensor
    arbiter: Tensor | None = None
    noise: Tensor | None = None
    context: Context = Context()
    whole_scale: float | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Of all the tensors."""
        return tuple(self.reference.shape)

    @property
    def is_exact(self) -> bool:
        """Whether the values are whole numbers or truths, where any difference is one."""
        return not is_inexact(self.reference)

    @functools.cached_property
    def right(self) -> Tensor:
        """What it should be, in float64."""
        return _widen(self.reference if self.arbiter is None else self.arbiter)

    @functools.cached_property
    def given(self) -> Tensor:
        """What it is, in float64."""
        return _widen(self.candidate)

    @functools.cached_property
    def error(self) -> Tensor:
        """What it is less what it should be; not finite where either is not."""
        return self.given - self.right

    @functools.cached_property
    def allowed(self) -> Tensor:
        """The noise of each element."""
        if self.is_exact:
            return torch.zeros(self.shape, dtype=torch.float64)
        if self.noise is not None:
            # What has no figure is allowed nothing.
            return self.noise.detach().to("cpu", torch.float64).nan_to_num(nan=0.0, posinf=math.inf)
        finite = self.magnitude
        scale = self.whole_scale
        if scale is None:
            scale = float(finite.square().mean().sqrt()) if finite.numel() else 0.0
        pair = (self.candidate, self.reference)
        unit = max(unit_roundoff(one.dtype) for one in pair if is_inexact(one))
        return _ROUNDINGS * unit * (finite + scale)

    @property
    def magnitude(self) -> Tensor:
        """How large the right values are; 0 where they are not finite."""
        return torch.where(torch.isfinite(self.right), self.right, 0.0).abs()

    @property
    def distance(self) -> Tensor:
        """How far off each element is; 0 where that is not finite."""
        return torch.where(torch.isfinite(self.error), self.error.abs(), 0.0)

    @property
    def beyond(self) -> Tensor:
        """Which elements are beyond the noise by themselves, or not finite in another way."""
        with_nan = torch.isnan(self.given) != torch.isnan(self.right)
        infinite = torch.isinf(self.given) | torch.isinf(self.right)
        differing = infinite & (self.given != self.right) & ~torch.isnan(self.right)
        return with_nan | differing | (self.distance > MAX_Z * self.allowed)

    @functools.cached_property
    def wrong(self) -> Tensor:
        """Which elements are wrong: beyond the noise, or not finite in another way.

        Where no element is beyond it by itself (a tensor that is less accurate all over), those
        count that are the largest errors of the tensor.
        """
        mask = self.beyond
        if bool(mask.any()) or not self.reference.numel():
            return mask
        distance = self.distance
        return distance > outstanding_limit(float(distance.max()))

    @functools.cached_property
    def is_finite(self) -> bool:
        """Whether all values of both are numbers."""
        return bool(torch.isfinite(self.given).all() and torch.isfinite(self.right).all())

    def fit(self, prediction: Tensor, *, slack: float = 1.0, noise: Tensor | None = None) -> Fit:
        """How well a predicted candidate (of the same shape, in float64) fits the real one.

        Args:
            slack: factor on the noise, where the prediction itself is made of noisy values.
            noise: of the prediction, where it is made of values from other places of the tensor.
        """
        allowed = self.allowed if noise is None else torch.maximum(self.allowed, noise)
        left = self.given - prediction
        same = (self.given == prediction) | (torch.isnan(self.given) & torch.isnan(prediction))
        near = same | (left.abs() <= _EXPLAINED_Z * slack * allowed)
        wrong = self.wrong
        bad, good = int(wrong.sum()), int((~wrong).sum())
        explained = float((near & wrong).sum()) / bad if bad else 0.0
        spoiled = float((~near & ~wrong).sum()) / good if good else 0.0
        return Fit(explained, spoiled, _rms_ratio(left[wrong], self.error[wrong]))


def outstanding_limit(largest: float) -> float:
    """Beyond which errors count, where none is beyond the noise and this is the largest."""
    return max(largest / 4, 0.0)


def _widen(value: Tensor) -> Tensor:
    value = value.detach().cpu()
    return value.to(torch.complex128 if value.is_complex() else torch.float64)


def _rms_ratio(left: Tensor, error: Tensor) -> float:
    finite = torch.isfinite(left) & torch.isfinite(error)
    below = float(error[finite].abs().square().sum())
    above = float(left[finite].abs().square().sum())
    return math.sqrt(above / below) if below else math.inf


# --- A case cut into boxes ------------------------------------------------------------------------

# An element of a box takes some 100 bytes on the way.
BLOCK = 1 << 18


@dataclasses.dataclass(frozen=True, eq=False)
class Box:
    """Neighbouring elements in the order of the flattened tensor, as a case of their own.

    Attributes:
        outer: the index along the axes before the one that is cut, which the case has no more.
        start: where it begins along that one.
        offset: its first element in the flattened tensor.
        case: the elements.
    """

    outer: tuple[int, ...]
    start: int
    offset: int
    case: Case

    @property
    def size(self) -> int:
        """How many elements it has."""
        return self.case.reference.numel()


def boxes(case: Case, scale: float | None = None) -> Iterator[Box]:
    """All of a case that has an axis, in the order of the flattened tensor.

    Args:
        scale: of the whole case, where the noise is asked for and was not measured.
    """
    shape = case.shape
    # Of that axis and those behind it whole slices go into a box.
    cut = next(axis for axis in range(len(shape)) if math.prod(shape[axis + 1 :]) <= BLOCK)
    inner = math.prod(shape[cut + 1 :])
    step = max(1, BLOCK // max(1, inner))
    offset = 0
    for outer in itertools.product(*map(range, shape[:cut])):
        for start in range(0, shape[cut], step):
            length = min(step, shape[cut] - start)
            yield Box(outer, start, offset, _cut_case(case, outer, 0, start, length, scale))
            offset += length * inner


def narrowed(case: Case, axis: int, start: int, length: int, scale: float | None) -> Case:
    """Some slices of a case, views of its tensors.

    Args:
        scale: of the whole case.
    """
    return _cut_case(case, (), axis, start, length, scale)


def _cut_case(
    case: Case, outer: tuple[int, ...], axis: int, start: int, length: int, scale: float | None
) -> Case:
    def part(value: Tensor) -> Tensor:
        return value.detach().expand(case.shape)[outer].narrow(axis, start, length)

    return dataclasses.replace(
        case,
        candidate=part(case.candidate),
        reference=part(case.reference),
        arbiter=None if case.arbiter is None else part(case.arbiter),
        noise=None if case.noise is None else part(case.noise),
        whole_scale=scale if case.whole_scale is None else case.whole_scale,
    )
