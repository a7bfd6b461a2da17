"""Which elements of a large tensor show a fault: what `Sight` tells, without whole masks."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch

from paritas.diagnosis.cases import outstanding
from paritas.diagnosis.parts import Box, boxes
from paritas.diagnosis.regions.searching import Found
from paritas.diagnosis.regions.tallies import AxisCounts, Tally, counted, counted_axes
from paritas.diagnosis.regions.values import BITS_ZEROS

if TYPE_CHECKING:
    from torch import Tensor

    from paritas.diagnosis.cases import Case
    from paritas.diagnosis.regions.marks import Marked
    from paritas.diagnosis.regions.spans import Bools

__all__ = ["Survey"]

_SAMPLE = 1 << 16


@dataclasses.dataclass
class _Extremes:
    """What is seen while the wrong elements are counted.

    Attributes:
        distance: the largest finite error.
        z: the same in multiples of the noise; infinite where something is not finite.
        any_given: whether a wrong element is finite in the candidate.
        any_pair: whether one is finite on both sides.
    """

    distance: float = 0.0
    z: float = 0.0
    any_given: bool = False
    any_pair: bool = False

    def take(self, case: Case, wrong: Tensor) -> None:
        self.distance = max(self.distance, float(case.distance.max()))
        self.z = max(self.z, float(_z(case, wrong).max()))
        finite = torch.isfinite(case.given) & wrong
        self.any_given |= bool(finite.any())
        self.any_pair |= bool((finite & torch.isfinite(case.right)).any())


@dataclasses.dataclass(frozen=True, eq=False)
class Survey:
    """A case as counts. It is gone over a few times, box by box."""

    case: Case

    @functools.cached_property
    def base(self) -> Tally:
        """The wrong elements, as `Case.wrong` has them."""
        return self._found[0]

    @functools.cached_property
    def scale(self) -> float:
        """Rms of the right values that are finite, as `Case.allowed` takes it."""
        return math.sqrt(self._sums[0] / max(1, self.case.reference.numel()))

    def reaches(self, level: float) -> bool:
        """Whether any element is beyond a level."""
        return self.base.number > 0 and self._extremes.z > level

    def share_beyond(self, level: float) -> float:
        """Of the elements that are not wrong and could be, how many are beyond a level."""
        base, more = self.base, self.beyond(level)
        number = more.number - (more.at_zeros if base.hides else 0)
        left = base.total - base.number
        return (number - base.number) / left if left else 0.0

    @property
    def any_finite(self) -> bool:
        """Whether any of the wrong elements is a number, in the candidate."""
        return self.base.number > 0 and self._extremes.any_given

    def are_lost(self) -> bool:
        """Whether the wrong elements are all not finite, on one of the sides."""
        return self.base.number > 0 and not self._extremes.any_pair

    def beyond(self, level: float) -> Tally:
        """The elements off by more than so many times their noise; all the wrong ones are."""
        if level not in self._levels:
            self._levels[level] = self._counted(functools.partial(self._is_beyond, level))
        return self._levels[level]

    def differing(self) -> Tally:
        """The elements that are not the reference's own, bit for bit."""

        def mask(case: Case) -> Tensor:
            candidate, reference = case.candidate.cpu(), case.reference.cpu()
            both_nan = torch.isnan(candidate) & torch.isnan(reference)
            return self._is_wrong(case) | ((candidate != reference) & ~both_nan)

        return self._counted(mask)

    def chance_of_equality(self) -> float:
        """How often a value, put in place of another of the tensor, happens to be equal to it."""
        size = self.case.reference.numel()
        some = np.unravel_index(np.arange(0, size, max(1, size // _SAMPLE)), self.case.shape)
        whole = self.case.reference if self.case.arbiter is None else self.case.arbiter
        values = whole.detach()[tuple(map(torch.from_numpy, some))].cpu()
        values = values.to(torch.complex128 if values.is_complex() else torch.float64)
        _, counts = np.unique(values.numpy(), return_counts=True)
        return float(np.square(counts / len(values)).sum())

    def marked_out(self, marks: Marked) -> tuple[Found, ...]:
        """The zeros of the reference, if all wrong elements are; paddings are not looked for."""
        zeros = self._sums[1]
        if isinstance(marks, Tally) and zeros < marks.size and marks.at_zeros == marks.number:
            return (Found("zeros", BITS_ZEROS, float(zeros)),)
        return ()

    @functools.cached_property
    def _levels(self) -> dict[float, Tally]:
        return {}

    @functools.cached_property
    def _sums(self) -> tuple[float, int]:
        """Squares of the right values, and how many of them are zero."""
        squares, zeros = 0.0, 0
        for box in boxes(self.case):
            squares += float(box.case.magnitude.square().sum())
            zeros += int((box.case.right == 0).sum())
        return squares, zeros

    @functools.cached_property
    def _nonzeros(self) -> tuple[AxisCounts, ...]:
        axes = tuple(map(AxisCounts, self.case.shape))
        for box in boxes(self.case):
            counted_axes(axes, box, np.asarray((box.case.right != 0).numpy()))
        return axes

    @functools.cached_property
    def _found(self) -> tuple[Tally, _Extremes, Callable[[Case], Tensor]]:
        """The wrong elements, what was seen on the way, and how to tell them in a box."""
        seen = _Extremes()

        def is_beyond(case: Case) -> Tensor:
            return case.beyond

        tally = self._counted(is_beyond, seen)
        if tally.number:
            return tally, seen, is_beyond
        # Only now it is known that no element is beyond its noise by itself.
        limit = outstanding(seen.distance)

        def is_outstanding(case: Case) -> Tensor:
            return case.distance > limit

        return self._counted(is_outstanding, seen), seen, is_outstanding

    @property
    def _extremes(self) -> _Extremes:
        return self._found[1]

    def _is_beyond(self, level: float, case: Case) -> Tensor:
        wrong = self._is_wrong(case)
        return wrong | (_z(case, wrong) > level)

    def _is_wrong(self, case: Case) -> Tensor:
        return self._found[2](case)

    def _counted(self, mask: Callable[[Case], Tensor], seen: _Extremes | None = None) -> Tally:
        again = functools.partial(self._walk, mask)
        walk = again if seen is None else functools.partial(self._walk, mask, seen)
        found = counted(self.case.shape, walk, self._sums[1], lambda: self._nonzeros)
        return dataclasses.replace(found, walk=again)

    def _walk(
        self, mask: Callable[[Case], Tensor], seen: _Extremes | None = None
    ) -> Iterator[tuple[Box, Bools]]:
        for box in boxes(self.case, self.scale):
            wrong = mask(box.case)
            if seen is not None:
                seen.take(box.case, wrong)
            yield box, np.asarray(wrong.numpy())


def _z(case: Case, wrong: Tensor) -> Tensor:
    size = case.error.abs()
    z = torch.where(size == 0, 0.0, size / case.allowed)
    # Equal infinities, and NaN on both sides, have no difference and are right.
    return torch.where(torch.isfinite(size), z, torch.where(wrong, torch.inf, 0.0))
