"""Which elements show a fault: at the judge's limit, and below it where that says more."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING

import numpy as np
import torch

from paritas.diagnosis.regions.marks import Marks
from paritas.diagnosis.regions.values import marked_out
from paritas.numerics.criterion import CHUNK

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from paritas.diagnosis.cases import Case
    from paritas.diagnosis.regions.marks import Marked
    from paritas.diagnosis.regions.searching import Found
    from paritas.diagnosis.regions.spans import Bools

__all__ = ["Sight"]

_SAMPLE = 1 << 16
_FEW = 1 << 10


@dataclasses.dataclass(frozen=True, eq=False)
class Sight:
    """A case as masks."""

    case: Case

    @functools.cached_property
    def right(self) -> NDArray[np.float64]:
        """What the values should be."""
        return np.asarray(self.case.right.numpy())

    @functools.cached_property
    def base(self) -> Marks:
        """The wrong elements."""
        return self._marks(np.asarray(self.case.wrong.numpy()))

    @functools.cached_property
    def z(self) -> NDArray[np.float32]:
        """Errors in multiples of their noise; infinite where something is not finite."""
        flat = [one.reshape(-1) for one in (self.case.error, self.case.allowed, self.case.wrong)]
        out = torch.empty(flat[0].numel(), dtype=torch.float32)
        for start in range(0, len(out), CHUNK):
            error, allowed, wrong = (one[start : start + CHUNK] for one in flat)
            size = error.abs()
            z = torch.where(size == 0, 0.0, size / allowed)
            # Equal infinities, and NaN on both sides, have no difference and are right.
            known = torch.where(wrong, torch.inf, 0.0)
            out[start : start + CHUNK] = torch.where(torch.isfinite(size), z, known)
        return np.asarray(out.reshape(self.case.shape).numpy())

    def reaches(self, level: float) -> bool:
        """Whether any element is beyond a level; of the wrong ones a few are asked first."""
        some = tuple(torch.from_numpy(index[:_FEW]) for index in self.base.sample)
        error, allowed = self.case.error[some].abs(), self.case.allowed[some]
        if bool((~torch.isfinite(error) | (error > level * allowed)).any()):
            return True
        return bool((self.z > level).any())

    def share_beyond(self, level: float) -> float:
        """Of the elements that are not wrong and could be, how many are beyond a level, about."""
        marks = self.base
        some = np.arange(marks.wrong.size)
        if marks.wrong.size > _SAMPLE:
            some = np.random.default_rng(0).integers(marks.wrong.size, size=_SAMPLE)
        kept = ~marks.wrong.reshape(-1)[some]
        if marks.visible is not None:
            kept &= marks.visible.reshape(-1)[some]
        where = torch.from_numpy(some[kept])
        if not len(where):
            return 0.0
        error = self.case.error.reshape(-1)[where].abs()
        off = error > level * self.case.allowed.reshape(-1)[where]
        return float(off.sum()) / len(where)

    @functools.cached_property
    def zeros(self) -> Bools:
        """Where it should be zero."""
        return ~self._nonzero

    def are_lost(self) -> bool:
        """Whether the wrong elements are all not finite, on one of the sides."""
        wrong = self.case.wrong
        given, right = self.case.given[wrong], self.case.right[wrong]
        return not bool((torch.isfinite(given) & torch.isfinite(right)).any())

    @property
    def any_finite(self) -> bool:
        """Whether any of the wrong elements is a number, in the candidate."""
        case = self.case
        return case.is_finite or bool(torch.isfinite(case.given[case.wrong]).any())

    def marked_out(self, marks: Marked) -> tuple[Found, ...]:
        """Regions of the reference's values that hold all wrong elements."""
        return marked_out(marks, self.right, self.zeros) if isinstance(marks, Marks) else ()

    def beyond(self, level: float) -> Marks:
        """The elements off by more than so many times their noise; all the wrong ones are."""
        return self._marks(self.base.wrong | (self.z > level))

    def differing(self) -> Marks:
        """The elements that are not the reference's own, bit for bit."""
        candidate, reference = self.case.candidate.cpu(), self.case.reference.cpu()
        both_nan = torch.isnan(candidate) & torch.isnan(reference)
        apart = (candidate != reference) & ~both_nan
        return self._marks(self.base.wrong | apart.numpy())

    def chance_of_equality(self) -> float:
        """How often a value, put in place of another of the tensor, happens to be equal to it."""
        flat = self.right.reshape(-1)
        flat = flat[:: max(1, flat.size // _SAMPLE)]
        _, counts = np.unique(flat, return_counts=True)
        return float(np.square(counts / flat.size).sum())

    def _marks(self, wrong: Bools) -> Marks:
        """With the zeros left out if none of them is wrong: they may hide the fault."""
        return Marks(wrong, self._nonzero if self._hides(wrong) else None)

    @functools.cached_property
    def _nonzero(self) -> Bools:
        return np.asarray(self.right != 0)

    def _hides(self, wrong: Bools) -> bool:
        return not self._nonzero.all() and not bool((wrong & ~self._nonzero).any())
