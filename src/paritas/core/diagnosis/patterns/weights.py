"""Mistakes of weights: few bits, groups with other scales, a product that is added."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

import torch

from paritas.core.diagnosis.case import first_supported, supported_pattern
from paritas.core.diagnosis.patterns.changes import changes_of
from paritas.core.diagnosis.patterns.fits import slope_along, weigh_fit
from paritas.core.diagnosis.patterns.functions import UNARY
from paritas.core.diagnosis.patterns.levels import propose_levels
from paritas.core.diagnosis.patterns.quantising import quantisations
from paritas.core.results.findings import Pattern, PatternKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from paritas.core.diagnosis.case import Case

# The largest group that has one factor says most.
_GROUPS = (128, 64, 32, 16, 8, 4, 2)
# So many elements must each fitted number explain, and some more.
_EACH_EXPLAINS = 6
# A product of more than this share of the rank that a matrix can have is no product of low rank.
_LOW_RANK = 0.25
_MOST_ROWS = 2048


def propose_weights(case: Case) -> list[Pattern]:
    """`precision`, `wrong factor`, `axis scale`, `residual`: what happens to weights."""
    if not case.is_beyond_noise or not case.shape or not case.is_finite:
        return []
    if len(case.shape) == 1:
        return first_supported(propose_levels(case)) or first_supported(_bent(case))
    searches = (
        *(_in_few_bits, _try_whole_changes, propose_levels, _bent, _try_dropout, _of_lower_rank),
        *(_grouped_numbers, _factors_and_offsets, _factors_of_both, _added_products),
    )
    tried = itertools.chain.from_iterable(search(case) for search in searches)
    return first_supported(tried) or propose_bends(case)


# Fewer elements are some function by chance.
_FEWEST_BENT = 64
_MOST_BENT = 1 << 17
# Of fewer wrong ones, the others tell nothing.
_LEAST_BENT = 0.2
# What neighbours do not tell of an element, as a share of what it is bent by.
_UNTOLD = 0.02
_MOST_UNTOLD = 0.2
# Below this share of the size, what differs may be an approximation.
_CLOSE = 0.02


def propose_bends(case: Case) -> list[Pattern]:
    """`other function`: each element is some function of the right one, but no straight line.

    It is told by the elements with the next smaller and the next larger right value.
    """
    count = case.right.numel()
    if not _FEWEST_BENT <= count <= _MOST_BENT or not case.is_finite:
        return []
    if float(case.wrong.double().mean()) < _LEAST_BENT:
        return []
    right, order = case.right.flatten().sort()
    candidate = case.given.flatten()[order]
    if min(len(candidate.unique()), len(right.unique())) < count // 2:
        return []
    straight = torch.stack([torch.ones_like(right), right], 1)
    fit = straight @ torch.linalg.lstsq(straight, candidate.unsqueeze(1)).solution
    bent = (candidate - fit.squeeze(1)).abs()
    share = ((right[1:-1] - right[:-2]) / (right[2:] - right[:-2])).nan_to_num(0.5)
    left = (candidate[1:-1] - candidate[:-2] - share * (candidate[2:] - candidate[:-2])).abs()
    size = float(bent.median())
    if size <= _UNTOLD * float((candidate - right).abs().median()):
        return []
    if not (
        float(left.median()) <= _UNTOLD * size and float(left.quantile(0.9)) <= _MOST_UNTOLD * size
    ):
        return []
    off = float((candidate - right).norm() / right.norm())
    kind = PatternKind.APPROXIMATION if off < _CLOSE else PatternKind.OTHER_FUNCTION
    places = [round(share * (count - 1)) for share in (0.05, 0.5, 0.95)]
    text = ", ".join(_becomes(float(right[at]), float(candidate[at])) for at in places)
    sentence = f"another function of each element: {text}"
    untold = round(float(left.median()) / size, 4)
    return [Pattern(kind=kind, confidence=0.9, sentence=sentence, evidence={"untold": untold})]


def _becomes(right: float, candidate_value: float) -> str:
    """Both numbers, with so many digits that they differ."""
    both = ((f"{right:.{digits}g}", f"{candidate_value:.{digits}g}") for digits in range(4, 12))
    shown = next((pair for pair in both if pair[0] != pair[1]), (f"{right:.4g}",) * 2)
    return " becomes ".join(shown)


def _try_whole_changes(case: Case) -> Iterator[Pattern | None]:
    return _try_functions(
        case, [(each.kind, each.words.format("it"), each.apply) for each in changes_of(case.right)]
    )


def _in_few_bits(case: Case) -> Iterator[Pattern | None]:
    kind = PatternKind.PRECISION
    forms = [(kind, f"in {words}", rounded) for words, rounded in quantisations([case.right])]
    return _try_functions(case, forms)


def _bent(case: Case) -> Iterator[Pattern | None]:
    kind = PatternKind.OTHER_FUNCTION
    bends = [(kind, f"{name} of each element", function) for name, function in UNARY.items()]
    return _try_functions(case, bends)


def _try_functions(
    case: Case, functions: list[tuple[PatternKind, str, Callable[[Tensor], Tensor]]]
) -> Iterator[Pattern | None]:
    """Functions of the right values, of which nothing is fitted."""
    cost = math.log2(1 + len(functions))
    for kind, sentence, function in functions:
        value = function(case.right)
        if value.shape == case.right.shape and bool(torch.isfinite(value).all()):
            yield supported_pattern(case, value.double(), kind, sentence, cost=cost)


def _factors_and_offsets(case: Case) -> Iterator[Pattern | None]:
    """A factor and an offset for each slice along an axis, as of a norm of the weight."""
    for axis, size in enumerate(case.shape):
        others = [dim for dim in range(len(case.shape)) if dim != axis]
        if case.right.numel() // size < 3 * _EACH_EXPLAINS // 2:
            continue
        centred = [
            tensor - tensor.mean(others, keepdim=True) for tensor in (case.right, case.given)
        ]
        factors = slope_along(centred[0], centred[1], others)
        prediction = factors * centred[0] + case.given.mean(others, keepdim=True)
        weight = weigh_fit(case, prediction, parameters=2 * size, counted=size)
        if weight is not None:
            sentence = f"each slice along axis {axis} has another factor and another offset"
            sentence = f"{sentence}; the factors are {_span(factors)}"
            yield weight.pattern(PatternKind.AXIS_SCALE, sentence)


def _span(numbers: Tensor) -> str:
    return f"{float(numbers.min()):.4g} to {float(numbers.max()):.4g}"


def _try_dropout(case: Case) -> Iterator[Pattern | None]:
    """Zeros, and one factor for all others, as of a dropout."""
    lost = case.given == 0
    rest = ~lost & (case.right != 0)
    if not bool(lost.any()) or int(rest.sum()) < 3 * _EACH_EXPLAINS:
        return
    factor = float((case.given[rest] / case.right[rest]).median())
    prediction = torch.where(lost, 0.0, factor * case.right)
    # Which are lost is a choice of one bit each.
    cost = float(lost.numel())
    weight = weigh_fit(case, prediction, parameters=1, cost=cost)
    if weight is not None:
        sentence = f"{100 * float(lost.double().mean()):.0f} % are zero, and the others"
        yield weight.pattern(PatternKind.MASK, f"{sentence} are multiplied by {factor:.4g}")


def _grouped_numbers(case: Case) -> Iterator[Pattern | None]:
    """A factor, or an offset, for each line along an axis, or each group of neighbours in it."""
    for axis, size in enumerate(case.shape):
        for group in (size, *(width for width in _GROUPS if width < size)):
            if size % group or group < 2:  # noqa: PLR2004
                continue
            right, candidate, unit = (
                tensor.unflatten(axis, (-1, group))
                for tensor in (case.right, case.given, case.unit)
            )
            weights = unit.square().reciprocal()
            over = (weights * right * candidate).sum(axis + 1, keepdim=True)
            factors = over / (weights * right.square()).sum(axis + 1, keepdim=True)
            offsets = (weights * (candidate - right)).sum(axis + 1, keepdim=True)
            offsets = offsets / weights.sum(axis + 1, keepdim=True)
            is_line = group == size
            lines = "line" if is_line else f"group of {group}"
            each = f"each {lines} along axis {axis} has another"
            factor = PatternKind.AXIS_SCALE if is_line else PatternKind.FACTOR
            for kind, word, numbers, value in (
                (factor, "factor", factors, factors * right),
                (PatternKind.AXIS_OFFSET, "offset", offsets, offsets + right),
            ):
                prediction, count = value.reshape(case.shape), numbers.numel()
                weight = weigh_fit(case, prediction, parameters=count, counted=count // 2)
                if weight is not None:
                    yield weight.pattern(kind, f"{each} {word}: {_span(numbers)}")


# So often are the factors of rows and columns fitted in turns.
_ROUNDS = 20


def _factors_of_both(case: Case) -> Iterator[Pattern | None]:
    """A factor for each index along one axis, and another for each along a second one."""
    for first, second in itertools.combinations(range(len(case.shape)), 2):
        others = [dim for dim in range(len(case.shape)) if dim not in (first, second)]
        count = case.shape[first] + case.shape[second] - 1
        if 1 in (case.shape[first], case.shape[second]):
            continue
        weights = case.unit.square().reciprocal()
        over, below = weights * case.right * case.given, weights * case.right.square()
        over, below = (
            tensor.sum(others, keepdim=True) if others else tensor for tensor in (over, below)
        )
        factors = _fit_two_factors(over, below, first, second)
        weight = weigh_fit(case, factors * case.right, parameters=count, counted=count // 2)
        if weight is not None:
            both = f"each index along axis {first} has another factor, and each along axis {second}"
            sentence = f"{both}; their products are {_span(factors)}"
            yield weight.pattern(PatternKind.AXIS_SCALE, sentence)


def _fit_two_factors(over: Tensor, below: Tensor, first: int, second: int) -> Tensor:
    """The product of two factors that fits best: of `over` and `below` is a factor for each."""
    tiny = torch.finfo(torch.float64).tiny
    left = torch.ones_like(over.narrow(second, 0, 1))
    right = torch.ones_like(over.narrow(first, 0, 1))
    for _ in range(_ROUNDS):
        left = (over * right).sum(second, keepdim=True)
        left = left / (below * right.square()).sum(second, keepdim=True).clamp(min=tiny)
        right = (over * left).sum(first, keepdim=True)
        right = right / (below * left.square()).sum(first, keepdim=True).clamp(min=tiny)
    return left * right


# Singular vectors have more noise than the matrix.
_DECOMPOSED = 3.0


def _of_lower_rank(case: Case) -> Iterator[Pattern | None]:
    """A matrix of lower rank than the right one, and near it: some directions are left out."""
    if max(case.shape) > _MOST_ROWS:
        return
    right, candidate = (tensor.flatten(1) for tensor in (case.right, case.given))
    rank, full_rank = (_rank(tensor, case) for tensor in (candidate, right))
    if not 0 < rank < full_rank:
        return
    sentence = f"a matrix of rank {rank} instead of {full_rank}"
    left, sizes, turned = torch.linalg.svd(right, full_matrices=False)
    largest = (left[:, :rank] * sizes[:rank]) @ turned[:rank]
    rows, _, columns = torch.linalg.svd(candidate, full_matrices=False)
    rows, columns = rows[:, :rank], columns[:rank]
    free = rank * (max(right.shape) - rank)
    for words, parameters, value in (
        ("with its largest singular values", 1, largest),
        ("with only a part of the directions of its rows", free, right @ columns.T @ columns),
        ("with only a part of the directions of its columns", free, rows @ rows.T @ right),
    ):
        prediction = value.reshape(case.shape)
        weight = weigh_fit(case, prediction, parameters=parameters, slack=_DECOMPOSED)
        if weight is not None:
            yield weight.pattern(PatternKind.APPROXIMATION, f"{sentence}, {words}", {"rank": rank})


def _added_products(case: Case) -> Iterator[Pattern | None]:
    """What is added is a product of few rows and columns, as of an adapter."""
    if len(case.shape) != 2 or max(case.shape) > _MOST_ROWS:  # noqa: PLR2004
        return
    rank = _rank(case.error, case)
    if not 0 < rank <= _LOW_RANK * min(case.shape):
        return
    left, sizes, right = torch.linalg.svd(case.error, full_matrices=False)
    prediction = case.right + (left[:, :rank] * sizes[:rank]) @ right[:rank]
    parameters = rank * (sum(case.shape) - rank)
    weight = weigh_fit(case, prediction, parameters=parameters)
    if weight is not None:
        sentence = f"a matrix of rank {rank} is added"
        yield weight.pattern(PatternKind.RESIDUAL, sentence, {"rank": rank})


def _rank(matrix: Tensor, case: Case) -> int:
    noise = float(case.unit.square().mean().sqrt()) * sum(map(math.sqrt, matrix.shape))
    return int((torch.linalg.svdvals(matrix) > 2 * noise).sum())
