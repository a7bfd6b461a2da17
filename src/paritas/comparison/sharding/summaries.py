"""Statistics and sketches of parts, put together where that is sound."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from typing import TYPE_CHECKING

import torch

from paritas.comparison.sharding.recipes import Disagreement, ReplicasDisagreeError
from paritas.errors import UsageError
from paritas.numerics.sketch import merge
from paritas.numerics.statistics import Statistics

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from paritas.comparison.sharding.recipes import Assembly

__all__ = ["MergedStatistics", "merge_sketches", "merge_statistics"]


@dataclasses.dataclass(frozen=True)
class MergedStatistics:
    """What the statistics of parts say of the whole.

    Attributes:
        statistics: what is not known of the whole is None, or 0 for a count.
        exact: whether every figure that the parts have is known of the whole.
        limits: in words, what is not.
    """

    statistics: Statistics
    exact: bool = True
    limits: str = ""


def merge_statistics(plan: Assembly, parts: Sequence[Statistics]) -> MergedStatistics:
    """The statistics of what the parts are together.

    Raises:
        ReplicasDisagreeError: copies have different statistics.
        UsageError: the parts' statistics say nothing of the whole.
    """
    _check_copies(plan, [parts[first] == parts[other] for first, other in plan.copies])
    terms = [[parts[copies[0]] for copies in cell.terms] for cell in plan.cells]
    if all(len(found) == 1 for found in terms):
        return MergedStatistics(_side_by_side([found[0] for found in terms]))
    return _reduced(terms, plan.reduction)


def merge_sketches(plan: Assembly, parts: Sequence[Tensor]) -> Tensor:
    """The sketch of what the parts are together.

    Raises:
        ReplicasDisagreeError: copies have different sketches.
        UsageError: the parts' sketches do not add up to that of the whole.
    """
    same = [torch.equal(parts[first], parts[other]) for first, other in plan.copies]
    _check_copies(plan, same)
    boxes = all(len(segments) == 1 for cell in plan.cells for segments in cell.where)
    if not boxes or not (plan.placed or len(plan.cells) == 1):
        raise UsageError(
            "the sketches of the parts were made without their place in the whole, and do not add "
            "up: record values, or distributed tensors"
        )
    terms = [copies[0] for cell in plan.cells for copies in cell.terms]
    count = max((len(cell.terms) for cell in plan.cells), default=1)
    if count > 1 and plan.reduction not in ("sum", "avg"):
        raise UsageError(f"a sketch says nothing of the {plan.reduction} of terms: record values")
    total = merge(parts[at] for at in terms)
    return total / count if plan.reduction == "avg" else total


def _check_copies(plan: Assembly, same: Sequence[bool]) -> None:
    found = [
        Disagreement(plan.ranks[other], plan.ranks[first])
        for (first, other), agrees in zip(plan.copies, same, strict=True)
        if not agrees
    ]
    if found:
        raise ReplicasDisagreeError(found)


def _side_by_side(parts: Sequence[Statistics]) -> Statistics:
    """Of parts that do not overlap."""
    finite = {at: _finite_count(part) for at, part in enumerate(parts)}
    known = [part for at, part in enumerate(parts) if finite[at]]
    exponents: Counter[int] = Counter()
    for part in parts:
        exponents.update(dict(part.exponents))
    means = [
        (part.mean, finite[at])
        for at, part in enumerate(parts)
        if finite[at] and part.mean is not None
    ]
    total = sum(finite.values())
    minima = [part.minimum for part in known if part.minimum is not None]
    maxima = [part.maximum for part in known if part.maximum is not None]
    norms = [part.l2 for part in known if part.l2 is not None]
    # A figure that one part lacks is lacking of the whole.
    return Statistics(
        count=sum(part.count for part in parts),
        minimum=min(minima) if minima and len(minima) == len(known) else None,
        maximum=max(maxima) if maxima and len(maxima) == len(known) else None,
        mean=math.fsum(mean * (count / total) for mean, count in means)
        if means and len(means) == len(known)
        else None,
        l2=math.hypot(*norms) if norms and len(norms) == len(known) else None,
        zeros=sum(part.zeros for part in parts),
        nans=sum(part.nans for part in parts),
        positive_infinities=sum(part.positive_infinities for part in parts),
        negative_infinities=sum(part.negative_infinities for part in parts),
        exponents=tuple(sorted(exponents.items())),
    )


def _finite_count(part: Statistics) -> int:
    return part.count - part.nans - part.positive_infinities - part.negative_infinities


def _reduced(cells: Sequence[Sequence[Statistics]], how: str) -> MergedStatistics:
    """Of parts that are terms: little is left."""
    if not all(part.is_finite for terms in cells for part in terms):
        raise UsageError(
            "terms are not finite, and their statistics do not say where: record values"
        )
    if how == "product":
        raise UsageError("statistics say nothing of the product of terms: record values")
    wholes = []
    for terms in cells:
        means = [part.mean for part in terms if part.mean is not None]
        mean = math.fsum(means) if len(means) == len(terms) else None
        highest = [part.maximum for part in terms if part.maximum is not None]
        lowest = [part.minimum for part in terms if part.minimum is not None]
        wholes.append(
            Statistics(
                count=terms[0].count,
                mean=mean / len(terms)
                if how == "avg" and mean is not None
                else mean
                if how == "sum"
                else None,
                maximum=max(highest) if how == "max" and len(highest) == len(terms) else None,
                minimum=min(lowest) if how == "min" and len(lowest) == len(terms) else None,
            )
        )
    kept = {"sum": "mean", "avg": "mean", "max": "maximum", "min": "minimum"}[how]
    limits = f"of the statistics of terms only the {kept} is that of their {how}"
    return MergedStatistics(_side_by_side(wholes), exact=False, limits=limits)
