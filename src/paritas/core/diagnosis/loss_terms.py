"""Losses and other means of terms, opened: what a term is, and how often each one counts.

If all terms of a mean are the same, the mean is that term. So both programs are asked with one term
in all places: this shows the function, point by point. Then one place gets another term: by how
much the result changes shows the weight of that place.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from typing import TYPE_CHECKING, Any

import torch

from paritas.core.diagnosis.calls import UNUSABLE
from paritas.core.diagnosis.case import Case, Context, widen
from paritas.core.diagnosis.dependence import are_close
from paritas.core.diagnosis.diagnose import rank_raw
from paritas.core.diagnosis.patterns.limits import propose_clipping
from paritas.core.diagnosis.patterns.predictions import propose_predictions
from paritas.core.diagnosis.place_runs import PlaceRuns
from paritas.core.diagnosis.stating import GUESS
from paritas.core.results.findings import PatternKind
from paritas.core.results.wording import list_first

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from paritas.core.diagnosis.calls import LiveCall
    from paritas.core.diagnosis.dependence import Laboratory
    from paritas.core.results.findings import Pattern

# So many different terms are asked for, and so few decide nothing.
_MOST_TERMS = 48
_FEWEST_TERMS = 6
# So many sets of mixed terms must have the mean of these as their result.
_MIXTURES = 3
# With more places, their weights are not asked for one by one.
_MOST_PLACES = 160
# Weights and factors of terms are known up to this.
_SAME = 2e-3
# Terms that are off by less than this share, on average, are those of an approximation.
_CLOSE = 0.02


def name_terms(lab: Laboratory, call: LiveCall | None) -> tuple[PatternKind | None, str] | None:
    """The kind and the sentence of a mean of other terms, or of other weights; None if neither.

    There is a sentence without a kind where it is not known what the terms are made of.

    Args:
        call: the reference's call at the place, if it can be repeated.
    """
    mean = _Mean.of(lab)
    if mean is None or lab.limit.is_over:
        return None
    factor = mean.factor
    if factor is not None:
        return _name_weights(mean, factor)
    if not mean.is_mean(1):
        return None
    parts = torch.tensor(mean.used)
    pools = [pool if pool is None else pool[parts] for pool in mean.pools]
    with lab.limit.pausing():
        pattern = _explain_terms(lab, call, pools)
    if pattern is not None:
        return PatternKind(pattern.kind), f"in each term: {pattern.sentence}"
    return _name_exchanged(mean) or _name_function(mean)


# --- One number as a mean of terms ----------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class _Mean:
    """A result of one number that is, in the reference, the mean or the sum of terms.

    Attributes:
        pools: for each operand with a part for each term, different parts; None for the others.
        places: how many terms there are.
        used: the parts that terms are made of.
        values: what both programs give if all terms are the same, for each of these.
    """

    lab: Laboratory
    pools: tuple[Tensor | None, ...]
    places: int
    used: tuple[int, ...]
    values: tuple[Tensor, Tensor]

    @classmethod
    def of(cls, lab: Laboratory) -> _Mean | None:
        """None if the reference's result is no such mean."""
        if lab.runs.expected.numel() != 1 or not lab.runs.expected.is_floating_point():
            return None
        for count in dict.fromkeys(filter(None, (_count_elements(lab), _count_rows(lab)))):
            mean = cls._of_terms(lab, count)
            if mean is not None and mean.is_mean(0):
                return mean
        return None

    @classmethod
    def _of_terms(cls, lab: Laboratory, places: int) -> _Mean | None:
        pools = _pools(lab, places)
        draft = cls(lab, pools, places, (), (torch.empty(0), torch.empty(0)))
        number = max(len(pool) for pool in pools if pool is not None)
        draw = torch.Generator().manual_seed(0)
        used: list[int] = []
        pairs: list[tuple[float, float]] = []
        for part in torch.randperm(number, generator=draw).tolist():
            if lab.limit.is_over or len(used) == _MOST_TERMS:
                break
            pair = draft.results(torch.full((places,), part))
            if pair is not None and all(map(math.isfinite, pair)):
                used.append(part)
                pairs.append(pair)
        if len(used) < _FEWEST_TERMS:
            return None
        right, candidate_values = torch.tensor(pairs, dtype=torch.float64).unbind(1)
        return dataclasses.replace(draft, used=tuple(used), values=(right, candidate_values))

    @property
    def is_of_numbers(self) -> bool:
        """Whether each term is made of single numbers, not of rows."""
        return all(pool is None or pool.dim() == 1 for pool in self.pools)

    def results(self, parts: Tensor) -> tuple[float, float] | None:
        """What both programs give for terms that are made of these parts."""
        operands = [
            operand if pool is None else pool[parts].reshape(operand.shape)
            for operand, pool in zip(self.lab.operands, self.pools, strict=True)
        ]
        pair = self.lab.both(operands)
        return None if pair is None else (float(pair[0]), float(pair[1]))

    def is_mean(self, side: int) -> bool:
        """Whether mixed terms give the mean of what they give alone, in one of the programs."""
        for mixture in self.mixtures:
            target = self.values[side][mixture.numbers].mean()
            if not self.is_same(mixture.results[side], float(target)):
                return False
        return bool(self.mixtures)

    @functools.cached_property
    def mixtures(self) -> list[_Mixture]:
        """Some sets of different terms, with what both programs give for them."""
        draw = torch.Generator().manual_seed(1)
        parts = torch.tensor(self.used)
        mixtures = []
        for _ in range(_MIXTURES):
            numbers = torch.randint(len(parts), (self.places,), generator=draw)
            pair = self.results(parts[numbers])
            if pair is None or not all(map(math.isfinite, pair)):
                return []
            mixtures.append(_Mixture(numbers, pair))
        return mixtures

    def is_same(self, number: float, other: float) -> bool:
        """Whether two results are the same up to rounding."""
        dtype = self.lab.runs.expected.dtype
        size = float(self.values[0].abs().mean())
        pair = (torch.tensor([value, size], dtype=dtype) for value in (number, other))
        return are_close(*pair)

    @functools.cached_property
    def factor(self) -> float | None:
        """The one factor of all terms in the candidate; None if they differ otherwise."""
        right, candidate_values = self.values
        size = float(right.square().sum())
        factor = float((right * candidate_values).sum()) / size if size else math.nan
        left = float((candidate_values - factor * right).abs().max())
        return factor if left <= _SAME * abs(factor) * float(right.abs().max()) else None

    def weights(self) -> Tensor | None:
        """How often the term of each place counts in the candidate; None if it is not found out."""
        if self.places > _MOST_PLACES:
            return None
        right, candidate_values = self.values
        low, high = int(right.argmin()), int(right.argmax())
        step = float(right[high] - right[low])
        if not step > _SAME * float(right.abs().max()):
            return None
        weights = []
        for position in range(self.places):
            parts = torch.full((self.places,), self.used[low])
            parts[position] = self.used[high]
            pair = None if self.lab.limit.is_over else self.results(parts)
            if pair is None:
                return None
            weights.append((pair[1] - float(candidate_values[low])) * self.places / step)
        return torch.tensor(weights, dtype=torch.float64)


@dataclasses.dataclass(frozen=True)
class _Mixture:
    numbers: Tensor
    results: tuple[float, float]


def _count_elements(lab: Laboratory) -> int | None:
    """The number of elements, if all operands have as many."""
    counts = {operand.numel() for operand in lab.operands if operand.numel() > 1}
    shapes = {operand.shape for operand in lab.operands if operand.numel() > 1}
    return counts.pop() if len(shapes) == 1 else None


def _count_rows(lab: Laboratory) -> int | None:
    """The length of the first axis, if the largest operand and another one have it."""
    largest = max(lab.operands, key=lambda operand: operand.numel(), default=None)
    if largest is None or largest.dim() < 2:  # noqa: PLR2004
        return None
    rows = largest.shape[0]
    return rows if rows > 1 else None


def _pools(lab: Laboratory, places: int) -> tuple[Tensor | None, ...]:
    """The parts of the operands that belong to terms, of this run and of varied ones."""
    runs = [lab.operands, *(lab.runs.vary(seed) for seed in (1, 2))]
    pools: list[Tensor | None] = []
    for number, operand in enumerate(lab.operands):
        has_all = operand.numel() == places
        if not has_all and not (operand.dim() and operand.shape[0] == places):
            pools.append(None)
            continue
        parts = [run[number].detach() for run in runs]
        pools.append(torch.cat([part.flatten() if has_all else part for part in parts]))
    return tuple(pools)


# --- Other weights --------------------------------------------------------------------------------


def _name_weights(mean: _Mean, factor: float) -> tuple[PatternKind, str] | None:
    """Terms that are the reference's up to a factor: how often each counts, or what else it is."""
    weights = mean.weights()
    if weights is None:
        return None
    if not all(_is_weighted(mean, weights, mixture) for mixture in mean.mixtures):
        return _name_reduction(mean, factor)
    if float((weights - weights.mean()).abs().max()) <= _SAME * max(1.0, abs(factor)):
        return None  # one factor for all, which has other names
    lost = weights.abs() <= _SAME
    counted = weights[~lost]
    if bool(lost.any()) and float((counted - counted.mean()).abs().max()) <= _SAME * abs(factor):
        which = _places(lost.nonzero().flatten().tolist())
        words = f"{which} of the {mean.places} terms {'is' if int(lost.sum()) == 1 else 'are'}"
        return PatternKind.PARTIAL_SUM, f"{words} left out"
    low, high = int(weights.argmin()), int(weights.argmax())
    words = f"number {low} counts {weights[low]:.4g} times and number {high} {weights[high]:.4g}"
    return PatternKind.FACTOR, f"the terms have other weights: {words} times"


def _is_weighted(mean: _Mean, weights: Tensor, mixture: _Mixture) -> bool:
    terms = mean.values[0][mixture.numbers]
    target = float((weights * terms).mean())
    limit = _SAME * float((weights * terms).abs().mean())
    return abs(mixture.results[1] - target) <= limit


def _places(places: Sequence[int]) -> str:
    word = "number" if len(places) == 1 else "numbers"
    return f"{word} {list_first([str(position) for position in places], 4)}"


def _name_reduction(mean: _Mean, factor: float) -> tuple[PatternKind, str] | None:
    """Equal terms give the right result and others do not, in whichever order they are."""
    if abs(factor - 1) > _SAME:
        return None
    parts = torch.tensor(mean.used)
    draw = torch.Generator().manual_seed(0)
    for mixture in mean.mixtures:
        order = torch.randperm(mean.places, generator=draw)
        # Terms that are paired from the other end are the same in the reverse order.
        for numbers in (mixture.numbers.flip(0), mixture.numbers[order], mixture.numbers.roll(1)):
            again = mean.results(parts[numbers])
            if again is None or not mean.is_same(again[1], mixture.results[1]):
                return None
    right, candidate_number = mean.mixtures[0].results
    words = f"it gives {candidate_number:.4g} instead of {right:.4g}, whichever order they have"
    return PatternKind.WRONG_REDUCTION, f"another reduction of the same terms: {words}"


# --- One term as an operator of its own -----------------------------------------------------------

# The results of both programs for many terms, one after the other, are those of the loss before it
# is reduced, and are diagnosed like those of any other operator: with its own mistakes, limits and
# expressions.

# What a mean of equal terms is rounded by, in units of its dtype.
_ROUNDINGS = 4.0
# Terms are a multiple of the results, up to this share.
_SAME_MULTIPLE = 1e-5
_PROPOSERS = (
    (propose_predictions, PatternKind.NONFINITE),
    (propose_clipping, PatternKind.CLIPPED),
)


def _explain_terms(
    lab: Laboratory, call: LiveCall | None, parts: Sequence[Tensor | None]
) -> Pattern | None:
    """What happens to each term; None if the loss cannot be called without its reduction.

    Args:
        parts: for each operand, those of the terms along a first axis; None for one that belongs
            to all terms.
    """
    opened = None if call is None or not call.is_safe_here else _open(call)
    if opened is None:
        return None
    stacked_operands = tuple(
        operand if part is None else part for operand, part in zip(lab.operands, parts, strict=True)
    )
    opened = opened.with_operands(lab.operands, stacked_operands)
    split = [part is not None for part in parts]

    def run(program: Any, operands: Sequence[Tensor]) -> Tensor:
        """The results for one term after the other."""
        number = next(
            len(operand) for operand, is_split in zip(operands, split, strict=True) if is_split
        )
        return torch.stack(
            [program(_fill(lab.operands, operands, split, at)) for at in range(number)]
        )

    right, wrong = (
        run(program, stacked_operands) for program in (lab.runs.reference, lab.runs.candidate)
    )
    factor = _factor(opened, right)
    if factor is None:
        return None
    right, wrong = right / factor, wrong / factor
    runs = PlaceRuns(
        stacked_operands,
        lambda operands: run(lab.runs.reference, operands) / factor,
        lambda: lambda operands: run(lab.runs.candidate, operands) / factor,
        right,
        wrong,
    )
    noise = _ROUNDINGS * torch.finfo(right.dtype).eps * right.abs()
    case = Case(wrong, right, noise=noise, context=Context(call=opened, runs=runs))
    ranked = rank_raw(case, _PROPOSERS)
    return ranked[0] if ranked and ranked[0].confidence >= GUESS else None


def _open(call: LiveCall) -> LiveCall | None:
    """The call without its reduction; None if it has none that can be left out."""
    for nothing in ("none", 0):
        try:
            opened = call.with_argument("reduction", nothing)
            _ = opened.results(wide=False)
        except UNUSABLE:
            continue
        return opened
    return None


def _fill(
    like: Sequence[Tensor], operands: Sequence[Tensor], split: Sequence[bool], at: int
) -> list[Tensor]:
    """The operands with the same term in all places."""
    return [
        operand[at]
        .expand(like_tensor.shape if like_tensor.dim() == operand.dim() else like_tensor.numel())
        .reshape(like_tensor.shape)
        if is_split
        else operand
        for like_tensor, operand, is_split in zip(like, operands, split, strict=True)
    ]


def _factor(opened: LiveCall, results: Tensor) -> float | None:
    """How many terms a result is, the same for all; None if they are not such multiples."""
    try:
        terms = next(
            result for result in opened.results(wide=False) if result.shape == results.shape
        )
    except (*UNUSABLE, StopIteration):
        return None
    largest = terms.abs().argmax()
    factor = float(results[largest] / terms[largest])
    apart = (results - factor * terms).abs().max()
    is_same = bool(apart <= _SAME_MULTIPLE * results.abs().max())
    return factor if is_same and math.isfinite(factor) and factor else None


# --- Other operands -------------------------------------------------------------------------------


def _name_exchanged(mean: _Mean) -> tuple[PatternKind, str] | None:
    """The reference's terms with two operands exchanged, or with one of the other sign."""
    names, pools = mean.lab.names, mean.pools
    numbers = [
        number for number, pool in enumerate(pools) if pool is not None and pool.is_floating_point()
    ]
    for first, other in itertools.combinations(numbers, 2):
        if mean.lab.operands[first].shape == mean.lab.operands[other].shape:
            changed = list(pools)
            changed[first], changed[other] = changed[other], changed[first]
            if _gives_candidate(mean, changed):
                sentence = f"{names[first]} and {names[other]} are swapped"
                return PatternKind.SWAPPED_OPERANDS, sentence
    for number in numbers:
        changed = [-pool if position == number and pool is not None else pool
                   for position, pool in enumerate(pools)]  # fmt: skip
        if _gives_candidate(mean, changed):
            return PatternKind.SIGN, f"{names[number]} has the other sign"
    return None


def _gives_candidate(mean: _Mean, pools: Sequence[Tensor | None]) -> bool:
    """Whether the reference gives the candidate's terms, made of other parts."""
    changed = dataclasses.replace(mean, pools=tuple(pools))
    for number, part in enumerate(mean.used):
        pair = None if mean.lab.limit.is_over else changed.results(torch.full((mean.places,), part))
        if pair is None or not mean.is_same(pair[0], float(mean.values[1][number])):
            return False
    return True


# --- Another function -----------------------------------------------------------------------------


def _name_function(mean: _Mean) -> tuple[PatternKind | None, str]:
    right, candidate_values = mean.values
    share = float((candidate_values - right).square().mean().sqrt() / right.square().mean().sqrt())
    kind: PatternKind | None = PatternKind.OTHER_FUNCTION
    words = "another function of the same terms"
    if not mean.is_of_numbers:
        # A mistake with the elements of a row is another function of it as well.
        kind, words = None, "each term follows from the same rows"
    if share < _CLOSE and _is_stepped(mean):
        kind, words = PatternKind.PRECISION, "the same terms with fewer digits"
    elif share < _CLOSE:
        kind = PatternKind.APPROXIMATION
        words = f"{words}, off by {100 * share:.2g} % on average"
    order = (candidate_values - right).abs().argsort(descending=True).tolist()
    shown = [_example(mean, order[0]), _example(mean, order[len(order) // 2])]
    return kind, f"{words}: {'; '.join(shown)}"


def _example(mean: _Mean, number: int) -> str:
    """What the whole gives if all its terms are made of the same values."""
    right, candidate_number = (float(side[number]) for side in mean.values)
    values = [
        f"{name} = {float(pool[mean.used[number]]):.4g}"
        for name, pool in zip(mean.lab.names, mean.pools, strict=True)
        if pool is not None and pool.dim() == 1 and pool.is_floating_point()
    ]
    # A result of equal terms, since they may be added up or averaged.
    what = f"{', '.join(values)} everywhere" if values and mean.is_of_numbers else "one row for all"
    return f"with {what} it gives {candidate_number:.4g} instead of {right:.4g}"


# Terms that are so near to each other have different values, unless something is rounded.
_NEAR_STEPS = 12
_NEAR = 2.0**-14


def _is_stepped(mean: _Mean) -> bool:
    """Whether the candidate has few different results for terms that are near to each other."""
    number = int((mean.values[1] - mean.values[0]).abs().argmax())
    same = torch.full((mean.places,), mean.used[number])
    sides: tuple[set[float], set[float]] = (set(), set())
    for step in range(_NEAR_STEPS):
        scaled = [
            pool * (1 + step * _NEAR) if pool is not None and pool.is_floating_point() else pool
            for pool in mean.pools
        ]
        pair = dataclasses.replace(mean, pools=tuple(scaled)).results(same)
        if pair is None:
            return False
        for side, value in zip(sides, pair, strict=True):
            side.add(float(widen(torch.tensor(value))))
    right, candidate_count = map(len, sides)
    return candidate_count <= right / 2
