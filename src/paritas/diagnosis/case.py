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
from typing import TYPE_CHECKING, TypeVar

import torch

from paritas.numerics.bits import is_inexact
from paritas.numerics.criterion import MAX_Z, RMS_Z, slice_limit, unit_roundoff

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np
    from torch import Tensor

    Array = TypeVar("Array", Tensor, np.ndarray)

# Without a measured noise: so many roundings of a value, and of the tensor's scale.
_ROUNDINGS = 4.0
_OVERLOADED = ("aten", "prims")
# So many wrong elements are looked at first.
_SAMPLED = 1 << 14
_STRIDE = 1_000_003


@dataclasses.dataclass(frozen=True)
class Context:
    """What is known beside the values; all of it may be missing.

    Attributes:
        operator: what made the tensor, `aten.mm.default`.
        inputs: the tensors it was given, in order.
        arguments: its other arguments by name or position, such as `dim` or `p`.
        world: how many ranks there are, along each axis of the mesh by name.
        held: of a tensor that ranks hold, rank -> what it has.
        named: tensors it may have been mixed up with, by name: biases, residuals, other parameters.
        earlier: values of the same tensor from before, by name (`step 1`, `initial`): it may be
            stale.
        axes: names of its dimensions, where they are known: `batch`, `head`, `token`.
        item: what it is in a step of training: `loss`, `output`, `gradient`, `parameter`, `buffer`,
            `initial` or `module`.
        unit: unit roundoff of what ranks computed.
        splits_samples: whether ranks have different samples.
        everywhere: rank -> its own, of all ranks, and `wholes` rank -> what it should hold, where
            ranks have different samples.
        summands: rank -> term of the sum that should have been taken.
        biases: name -> parameter of one dim that may have been added too often.
        added: in words -> what may have been added after the fault: a bias of the module, or what
            goes past it; the likeliest last.
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

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return math.prod(self.world.values())

    def ranks_along(self, rank: int, axis: str) -> list[int]:
        """The ranks that are where a rank is, but for their place along one axis."""
        places = itertools.product(*map(range, self.world.values()))  # the last axis runs fastest
        at = list(self.world).index(axis)
        rest = [place[:at] + place[at + 1 :] for place in places]
        return [one for one, other in enumerate(rest) if other == rest[rank]]

    @property
    def operator_name(self) -> str:
        """The operator's bare name: `softmax` of `aten._softmax.default`."""
        parts = self.operator.replace("::", ".").split(".")
        name = parts[1] if len(parts) > 1 and parts[0] in _OVERLOADED else parts[-1]
        return name.lower().strip("_")


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
        return widen(self.reference if self.arbiter is None else self.arbiter)

    @functools.cached_property
    def given(self) -> Tensor:
        """What it is, in float64."""
        return widen(self.candidate)

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
        unit = max(roundoff(self.candidate), roundoff(self.reference))
        return _ROUNDINGS * unit * (finite + scale)

    @property
    def magnitude(self) -> Tensor:
        """How large the right values are; 0 where they are not finite."""
        return torch.where(torch.isfinite(self.right), self.right, 0.0).abs()

    @property
    def distance(self) -> Tensor:
        """How far off each element is; 0 where that is not finite."""
        return torch.where(torch.isfinite(self.error), self.error.abs(), 0.0)

    @functools.cached_property
    def beyond(self) -> Tensor:
        """Which elements are beyond the noise by themselves, or not finite in another way."""
        with_nan = torch.isnan(self.given) != torch.isnan(self.right)
        infinite = torch.isinf(self.given) | torch.isinf(self.right)
        differing = infinite & (self.given != self.right) & ~torch.isnan(self.right)
        return with_nan | differing | (self.distance > MAX_Z * self.allowed)

    @functools.cached_property
    def z(self) -> Tensor:
        """Errors in multiples of their noise; infinite where something is not finite and wrong."""
        size = self.error.abs()
        z = torch.where(size == 0, 0.0, size / self.allowed)
        # Equal infinities, and NaN on both sides, have no difference and are right.
        return torch.where(torch.isfinite(size), z, torch.where(self.beyond, torch.inf, 0.0))

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
    def some_wrong(self) -> Tensor:
        """Where to look first: up to some thousand wrong elements, spread over all of them.

        Positions in the flattened tensor. They follow a stride that has nothing in common with the
        shape, so that a pattern of rows or tiles is met in all of its parts.
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
    def unit(self) -> Tensor:
        """The noise of each element, as a divisor: never zero."""
        if self.is_exact:
            return torch.ones(self.shape, dtype=torch.float64)
        allowed = self.allowed
        if allowed.numel() and float(allowed.amin()) > 0:
            return allowed
        positive = allowed[(allowed > 0) & torch.isfinite(allowed)]
        least = float(positive.min()) if positive.numel() else torch.finfo(torch.float64).tiny
        # The noise of an element that can be anything is no yardstick; it is left out of every fit.
        return allowed.clamp(min=least)

    @functools.cached_property
    def is_beyond_noise(self) -> bool:
        """Whether the judge's rule finds the values wrong: one element, the whole, or one slice.

        A tensor whose errors are within its noise has nothing that needs an explanation.
        """
        if self.is_exact or not self.reference.numel():
            return bool(self.wrong.any())
        places = self.some_wrong
        if not places.numel():
            return False
        # Either all wrong elements are beyond the noise by themselves or none is: some tell it.
        error, allowed = (one.reshape(-1)[places] for one in (self.error.abs(), self.allowed))
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
        """Where both sides are numbers."""
        return torch.isfinite(self.given) & torch.isfinite(self.right)

    @property
    def own_unit(self) -> float:
        """The unit roundoff of the candidate's values; 0 for whole numbers."""
        return 0.0 if self.is_exact else roundoff(self.candidate)

    @functools.cached_property
    def is_finite(self) -> bool:
        """Whether all values of both are numbers."""
        return bool(torch.isfinite(self.given).all() and torch.isfinite(self.right).all())


def same(left: Array, right: Array) -> Array:
    """Where two tensors are equal, or both not a number."""
    found: Array = (left == right) | ((left != left) & (right != right))  # noqa: PLR0124
    return found


def near(left: Tensor, right: Tensor, noise: Tensor, *, slack: float = 1.0) -> Tensor:
    """Where two tensors are the same within their noise, as the judge takes it.

    Args:
        slack: factor on the noise, where one of them is made of noisy values.
    """
    return same(left, right) | ((left - right).abs() <= MAX_Z * slack * noise)


def outstanding_limit(largest: float) -> float:
    """Beyond which errors count, where none is beyond the noise and this is the largest."""
    return max(largest / 4, 0.0)


def roundoff(value: Tensor) -> float:
    """The unit roundoff of a tensor's values; 0 for whole numbers."""
    return unit_roundoff(value.dtype) if is_inexact(value) else 0.0


def widen(value: Tensor) -> Tensor:
    """A tensor in float64 (complex numbers as they are), on the host."""
    value = value.detach().cpu()
    return value.to(torch.complex128 if value.is_complex() else torch.float64)


# --- A case cut into boxes ------------------------------------------------------------------------

# A tensor of more elements is cut into boxes.
MOST_ELEMENTS = 1 << 20
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
            yield Box(outer, start, offset, cut_case(case, outer, 0, start, length, scale))
            offset += length * inner


def cut_case(
    case: Case, outer: tuple[int, ...], axis: int, start: int, length: int, scale: float | None
) -> Case:
    """Some slices of a case, views of its tensors.

    Args:
        outer: indices along the first axes, which the part has no more.
        axis: of what is left, along which it is cut.
        scale: of the whole case.
    """

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
