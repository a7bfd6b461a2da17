"""One wrong tensor: what it should be, how far it is off, and where.

All arithmetic is in float64 (complex128 for complex numbers) on the host. A pattern makes a
*prediction* of the candidate, and is measured against the noise that the judge measured, not
against a tolerance. A large case is cut into boxes, and only one box is in float64 at a time.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from typing import TYPE_CHECKING, TypeVar

import torch

from paritas.numerics.bits import is_inexact
from paritas.numerics.criterion import MAX_Z, RMS_Z, slice_limit, unit_roundoff

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import numpy as np
    from torch import Tensor

    Array = TypeVar("Array", Tensor, np.ndarray)

# The noise if none was measured, in roundings of a value and of the tensor's scale.
_ROUNDINGS = 4.0
_OVERLOADED = ("aten", "prims")
# How many wrong elements are looked at first.
_SAMPLED = 1 << 14
_STRIDE = 1_000_003


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
        """Number of ranks."""
        return math.prod(self.world.values())

    def ranks_along(self, rank: int, axis: str) -> list[int]:
        """The ranks with the same coordinate as a rank, except along one axis."""
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
    """A candidate that differs from the reference.

    Attributes:
        candidate: c, the program's result.
        reference: e, the reference's native result.
        arbiter: r, the reference in float64, if it is known.
        noise: d, per element, as the judge measured it; None means by dtype.
        context: what else is known.
        whole_scale: if this is a part of a tensor, the `scale` of the whole.
    """

    candidate: Tensor
    reference: Tensor
    arbiter: Tensor | None = None
    noise: Tensor | None = None
    context: Context = Context()
    whole_scale: float | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of all its tensors."""
        return tuple(self.reference.shape)

    @property
    def is_exact(self) -> bool:
        """Whether the values are integers or booleans, which must be equal."""
        return not is_inexact(self.reference)

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
            return self.noise.detach().to("cpu", torch.float64).nan_to_num(nan=0.0, posinf=math.inf)
        finite = self.magnitude
        scale = self.whole_scale
        if scale is None:
            scale = float(finite.square().mean().sqrt()) if finite.numel() else 0.0
        unit = max(roundoff(self.candidate), roundoff(self.reference))
        return _ROUNDINGS * unit * (finite + scale)

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
    found: Array = (left == right) | ((left != left) & (right != right))  # noqa: PLR0124
    return found


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


# --- A case cut into boxes ------------------------------------------------------------------------

# A tensor with more elements is cut into boxes.
MOST_ELEMENTS = 1 << 20
# Each element of a box takes about 100 bytes of temporaries.
BLOCK = 1 << 18


@dataclasses.dataclass(frozen=True, eq=False)
class Box:
    """Neighbouring elements of the flattened tensor as a case.

    Attributes:
        outer: the index along the axes before the one that is cut, which the case does not have.
        start: where it starts along that axis.
        offset: its first element in the flattened tensor.
        case: the elements.
    """

    outer: tuple[int, ...]
    start: int
    offset: int
    case: Case

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.case.reference.numel()


def boxes(case: Case, scale: float | None = None) -> Iterator[Box]:
    """All boxes of a case with at least one axis, in the order of the flattened tensor.

    Args:
        scale: of the whole case, if noise is needed that was not measured.
    """
    shape = case.shape
    # A box holds whole slices of this axis and those after it.
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
    """Some slices of a case, as views of its tensors.

    Args:
        outer: indices along the first axes, which the part does not have.
        axis: the one of the remaining axes that is cut.
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
