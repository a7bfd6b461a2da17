"""How a hypothesis becomes a pattern: by a prediction that fits, weighed by what it explains.

A prediction that leaves of an error e no more than d is worth log2(e / d) bits: so unlikely was
it to come as near by chance. A hypothesis that was one of many has to bring the bits that the
search for it spent.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import torch

from paritas.diagnosis.cases import Case, Context
from paritas.numerics.criterion import MAX_Z, unit_roundoff
from paritas.numerics.diagnoses import Pattern

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = ["Part", "Probe", "axis_name", "bits", "part_of", "stated", "unravelled"]

# Above this share of the error nothing is explained, only lessened.
_MOST_RESIDUAL = 0.5
_MOST_BITS = 20.0
_PROBED = 1024
_FEW = 2
# So many of the indices of a run have to hold wrong elements, and so few may lack at its ends.
_DENSE = 0.5
_MISSED = 0.02
# So many of the probed elements have to be met for a hypothesis to be worth a whole test.
_PLAUSIBLE = 0.9


def stated(
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
    own = _own_noise(case, prediction)
    noise = own if noise is None else torch.maximum(noise, own)
    fit = case.fit(prediction, noise=noise)
    if not fit.holds or (math.isfinite(fit.residual) and fit.residual > _MOST_RESIDUAL):
        return None
    gained = bits(case, prediction, noise) - cost
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


def _own_noise(case: Case, prediction: Tensor) -> Tensor:
    """The rounding of a predicted value, which may be larger than that of the right one."""
    unit = unit_roundoff(case.candidate.dtype) if case.candidate.is_floating_point() else 0.0
    return unit * prediction.abs().nan_to_num(0.0, 0.0, 0.0)


def bits(case: Case, prediction: Tensor, noise: Tensor) -> float:
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
class Part:
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


def part_of(case: Case) -> Part:
    """The block of a case in which something is wrong."""
    indices = []
    for axis in range(len(case.shape)):
        others = [one for one in range(len(case.shape)) if one != axis]
        hit = case.wrong.any(dim=others) if others else case.wrong
        indices.append(_filled(hit.nonzero().flatten(), case.shape[axis]))
    whole = all(len(one) == size for one, size in zip(indices, case.shape, strict=True))
    if whole:
        return Part(case, tuple(indices), is_whole=True)

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
    return Part(inner, tuple(indices), is_whole=False)


def _filled(hit: Tensor, size: int) -> Tensor:
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
        self.at = unravelled(self.flat, case.shape)
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


def unravelled(flat: Tensor, shape: Sequence[int]) -> tuple[Tensor, ...]:
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
