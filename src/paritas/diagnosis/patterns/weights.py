"""Mistakes of weights: few bits, groups with other scales, a product that is added."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from paritas.diagnosis.case import Extent, first_supported, supported_pattern, weigh
from paritas.diagnosis.leftovers import fits_honestly
from paritas.diagnosis.patterns.functions import UNARY
from paritas.diagnosis.patterns.quantising import quantisations
from paritas.numerics.criterion import MAX_Z
from paritas.results.findings import PatternKind

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from paritas.diagnosis.case import Case
    from paritas.results.findings import Pattern

# The largest group that has one factor says most.
_GROUPS = (128, 64, 32, 16, 8, 4, 2)
# A product of more than this share of the rank that a matrix can have is no product of low rank.
_LOW_RANK = 0.25
_MOST_ROWS = 2048


def propose_weights(case: Case) -> list[Pattern]:
    """`precision`, `wrong factor`, `axis scale`, `residual`: what happens to weights."""
    if not case.is_beyond_noise or not case.shape or not case.is_finite:
        return []
    return (
        first_supported(_in_few_bits(case))
        or first_supported(_of_few_levels(case))
        or first_supported(_bent(case))
        or first_supported(_dropped(case))
        or first_supported(_grouped_numbers(case))
        or first_supported(_factors_and_offsets(case))
        or first_supported(_added_products(case))
    )


def _in_few_bits(case: Case) -> Iterator[Pattern | None]:
    forms = list(quantisations([case.right]))
    cost = math.log2(1 + len(forms))
    for words, rounded in forms:
        said = f"in {words}"
        kind = PatternKind.PRECISION
        yield supported_pattern(case, rounded(case.right), kind, said, cost=cost)


# Codes of more bits than four have more levels; each must be the value of several elements.
_MOST_LEVELS = 32
_EACH_LEVEL = 6


def _of_few_levels(case: Case) -> Iterator[Pattern | None]:
    """Few different values, in the order of the right ones: signs, three levels, a code book."""
    extents: dict[str, Tensor] = {"": torch.ones(())}
    for axis in range(len(case.shape)):
        others = [one for one in range(len(case.shape)) if one != axis]
        for words, most in (
            ("the largest", case.right.abs().amax(others, keepdim=True)),
            ("the mean magnitude", case.right.abs().mean(others, keepdim=True)),
        ):
            extents[f" times {words} of each slice along axis {axis}"] = most
    for group in _GROUPS:
        if case.shape[-1] % group == 0 and 2 < group < case.shape[-1]:  # noqa: PLR2004
            most = case.right.unflatten(-1, (-1, group)).abs().amax(-1, keepdim=True)
            most = most.expand(*most.shape[:-1], group).flatten(-2)
            extents[f" times the largest of each group of {group}"] = most
    for words, scale in extents.items():
        right, given, noise = (
            (one / scale).reshape(-1) for one in (case.right, case.given, MAX_Z * case.unit)
        )
        order = right.argsort()
        steps = given[order].diff()
        limit = 2 * torch.maximum(noise[order][1:], noise[order][:-1])
        level = torch.cat([torch.zeros(1, dtype=torch.long), (steps > limit).long().cumsum(0)])
        count = int(level[-1]) + 1
        is_coarse = 1 < count <= min(_MOST_LEVELS, len(right) // _EACH_LEVEL)
        if not is_coarse or bool((steps < -limit).any()):
            continue
        sums = torch.zeros(count, dtype=torch.float64).index_add(0, level, given[order])
        levels = sums / torch.bincount(level, minlength=count)
        prediction = torch.empty_like(right)
        prediction[order] = levels[level]
        prediction = prediction.reshape(case.shape) * scale
        # Each level is a number, and so is each end between two.
        weight = weigh(case, prediction, parameters=2 * count - 1, extent=Extent.ALL)
        said = f"only {count} different values{words}, in the order of the right ones"
        yield None if weight is None else weight.pattern(PatternKind.PRECISION, said)


def _factors_and_offsets(case: Case) -> Iterator[Pattern | None]:
    """A factor and an offset for each slice along an axis, as of a norm of the weight."""
    for axis, size in enumerate(case.shape):
        others = [one for one in range(len(case.shape)) if one != axis]
        if case.right.numel() // size < 3 * _EACH_LEVEL // 2:
            continue
        centred = [one - one.mean(others, keepdim=True) for one in (case.right, case.given)]
        over = (centred[0] * centred[1]).sum(others, keepdim=True)
        factors = over / centred[0].square().sum(others, keepdim=True)
        prediction = factors * centred[0] + case.given.mean(others, keepdim=True)
        weight = weigh(case, prediction, parameters=2 * size, extent=Extent.ALL)
        if weight is None or not fits_honestly(case, prediction, parameters=size):
            continue
        said = f"each slice along axis {axis} has another factor and another offset"
        least, most = float(factors.min()), float(factors.max())
        said = f"{said}; the factors are {least:.4g} to {most:.4g}"
        yield weight.pattern(PatternKind.AXIS_SCALE, said)


def _bent(case: Case) -> Iterator[Pattern | None]:
    """A function of each element."""
    cost = math.log2(1 + len(UNARY))
    for name, function in UNARY.items():
        value = function(case.right)
        if value.shape == case.right.shape and bool(torch.isfinite(value).all()):
            said, kind = f"{name} of each element", PatternKind.OTHER_FUNCTION
            yield supported_pattern(case, value.double(), kind, said, cost=cost)


def _dropped(case: Case) -> Iterator[Pattern | None]:
    """Zeros, and one factor for all others, as of a dropout."""
    lost = case.given == 0
    rest = ~lost & (case.right != 0)
    if not bool(lost.any()) or int(rest.sum()) < 3 * _EACH_LEVEL:
        return
    factor = float((case.given[rest] / case.right[rest]).median())
    prediction = torch.where(lost, 0.0, factor * case.right)
    # Which are lost is a choice of one bit each.
    cost = float(lost.numel())
    weight = weigh(case, prediction, parameters=1, cost=cost, extent=Extent.ALL)
    if weight is not None and fits_honestly(case, prediction):
        said = f"{100 * float(lost.double().mean()):.0f} % are zero, and the others"
        yield weight.pattern(PatternKind.MASK, f"{said} are multiplied by {factor:.4g}")


def _grouped_numbers(case: Case) -> Iterator[Pattern | None]:
    """A factor, or an offset, for each group of neighbours along an axis."""
    for axis, size in enumerate(case.shape):
        for group in _GROUPS:
            if size % group or group >= size:
                continue
            right, given, unit = (
                one.unflatten(axis, (-1, group)) for one in (case.right, case.given, case.unit)
            )
            weights = unit.square().reciprocal()
            over = (weights * right * given).sum(axis + 1, keepdim=True)
            factors = over / (weights * right.square()).sum(axis + 1, keepdim=True)
            offsets = (weights * (given - right)).sum(axis + 1, keepdim=True)
            offsets = offsets / weights.sum(axis + 1, keepdim=True)
            each = f"each group of {group} along axis {axis} has another"
            for kind, word, numbers, value in (
                (PatternKind.FACTOR, "factor", factors, factors * right),
                (PatternKind.AXIS_OFFSET, "offset", offsets, offsets + right),
            ):
                prediction, count = value.reshape(case.shape), numbers.numel()
                if not fits_honestly(case, prediction, parameters=count // 2):
                    continue
                weight = weigh(case, prediction, parameters=count, extent=Extent.ALL)
                if weight is not None:
                    least, most = float(numbers.min()), float(numbers.max())
                    yield weight.pattern(kind, f"{each} {word}: {least:.4g} to {most:.4g}")


def _added_products(case: Case) -> Iterator[Pattern | None]:
    """What is added is a product of few rows and columns, as of an adapter."""
    if len(case.shape) != 2 or max(case.shape) > _MOST_ROWS:  # noqa: PLR2004
        return
    rank = _rank_of(case.error, case)
    if rank is None:
        return
    left, sizes, right = torch.linalg.svd(case.error, full_matrices=False)
    prediction = case.right + (left[:, :rank] * sizes[:rank]) @ right[:rank]
    parameters = rank * (sum(case.shape) - rank)
    weight = weigh(case, prediction, parameters=parameters, extent=Extent.ALL)
    if weight is not None and fits_honestly(case, prediction):
        verb = "a matrix of rank"
        yield weight.pattern(PatternKind.RESIDUAL, f"{verb} {rank} is added", {"rank": rank})


def _rank_of(error: Tensor, case: Case) -> int | None:
    """The rank of what is added; None if it is not low."""
    sizes = torch.linalg.svdvals(error)
    noise = float(case.unit.square().mean().sqrt()) * (
        math.sqrt(case.shape[0]) + math.sqrt(case.shape[1])
    )
    rank = int((sizes > 2 * noise).sum())
    return rank if 0 < rank <= _LOW_RANK * min(case.shape) else None
