"""What was added to the scores of an attention: solved for from its result.

With p the exponentials of the right scores, v the values and c the result, whatever was added to
the scores is a factor u on each p with sum_j u_j p_j (v_j - c) = 0. That is linear in u. The factor
may depend on the key, or on the distance between query and key, for all heads or for each. A key
whose score and value are 0, as of a padding that nothing hides, is one more term.
"""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from paritas.core.diagnosis.case import widen
from paritas.core.diagnosis.patterns.attention import (
    attends,
    bias_of,
    factor_of,
    is_attention,
    seen_rightly,
    with_zeros,
)
from paritas.core.diagnosis.patterns.fits import shorten_number
from paritas.core.diagnosis.patterns.operands import result_of
from paritas.core.diagnosis.patterns.steps import first_of
from paritas.core.diagnosis.patterns.variations import Variation
from paritas.core.results.findings import PatternKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from paritas.core.diagnosis.calls import Step

# The most numbers that are looked at, and unknowns that are solved for.
_MOST_NUMBERS = 1 << 22
_MOST_UNKNOWNS = 160
# How much smaller the least eigenvalue must be than the next: otherwise nothing is determined.
_DETERMINED = 1e-6
# What a line may leave.
_NEAR = 2e-3
_NEARLY_NOTHING = 1e-4
_RANK = 4


def solved_scores(
    step: Step, predict: Callable[[Variation], Tensor | None], candidate: Tensor
) -> Iterator[Variation]:
    """The attention with something added to its scores, which gives the candidate.

    Args:
        predict: the value in question if the operator is computed so.
        candidate: the candidate, in float64.
    """
    if not is_attention(step) or "grad_out" in step.values:
        return
    query, key = step.values["query"], step.values["key"]
    if query.dim() != _RANK or query.numel() * key.shape[-2] > _MOST_NUMBERS:
        return
    result = result_of(predict, candidate)
    if result is None:
        return
    equations = _Equations.of(result.step, result.given)
    for describe in (_padding, _distances, _keys):
        variations = list(describe(equations))
        yield from variations
        if variations:
            return
    yield from _factors(result.step, result.given)


@dataclasses.dataclass(frozen=True, eq=False)
class _Equations:
    """The terms of each query.

    Attributes:
        terms: u_j p_j (v_j - c) for u_j = 1, by batch, head, query, key and feature.
        nothing: the term of a key whose score and value are 0.
    """

    terms: Tensor
    nothing: Tensor

    @classmethod
    def of(cls, step: Step, candidate: Tensor) -> _Equations:
        query, key, value = (widen(step.values[name]) for name in ("query", "key", "value"))
        groups = query.shape[-3] // key.shape[-3]
        key, value = (tensor.repeat_interleave(groups, -3) for tensor in (key, value))
        candidate = candidate.reshape(*query.shape[:-1], value.shape[-1])
        bias = bias_of(step)
        bias = widen(bias) if isinstance(bias, torch.Tensor) else bias
        visited = seen_rightly(step).detach().cpu().double()
        scores = (query @ key.mT * factor_of(step) + bias).masked_fill(visited == 0, -math.inf)
        top = scores.amax(-1, keepdim=True).clamp(min=0.0)
        powers = (scores - top).exp()
        terms = powers.unsqueeze(-1) * (value.unsqueeze(-3) - candidate.unsqueeze(-2))
        return cls(terms, -(-top).exp() * candidate)

    @property
    def heads(self) -> int:
        """The number of heads."""
        return self.terms.shape[1]

    def solve(self, index: Tensor, count: int, *, by_head: bool, padded: bool) -> Tensor | None:
        """The factor of each class of terms, by head; None if they are not determined.

        Args:
            index: the class of each query and key.
            padded: the last factor is that of a key whose score and value are 0.
        """
        shape = (*self.terms.shape[:3], count, self.terms.shape[-1])
        columns = torch.zeros(shape, dtype=torch.float64)
        places = index.expand(*self.terms.shape[:4]).unsqueeze(-1).expand_as(self.terms)
        columns.scatter_add_(3, places, self.terms)
        if padded:
            columns = torch.cat([columns, self.nothing.unsqueeze(3)], 3)
        gram = (columns @ columns.mT).sum((0, 2))
        gram = gram if by_head else gram.sum(0, keepdim=True)
        size = gram.diagonal(dim1=-2, dim2=-1).sqrt()
        if not bool((size > 0).all()) or not bool(torch.isfinite(size).all()):
            return None
        values, vectors = torch.linalg.eigh(gram / size.unsqueeze(-1) / size.unsqueeze(-2))
        if not bool((values[..., 0] <= _DETERMINED * values[..., 1]).all()):
            return None
        factors = vectors[..., 0] / size
        of_keys = factors[..., :count]
        usual = of_keys.gather(-1, of_keys.abs().argmax(-1, keepdim=True))
        relative: Tensor = factors / usual
        return relative


def _padding(equations: _Equations) -> Iterator[Variation]:
    index = torch.zeros(equations.terms.shape[2:4], dtype=torch.int64)
    factors = equations.solve(index, 1, by_head=False, padded=True)
    if factors is None:
        return
    number = shorten_number(float(factors[0, -1]))
    if not number > _NEARLY_NOTHING:
        return
    change = attends(normalise=partial(with_zeros, number=number))
    if number == round(number) and number > 1:
        sentence = f"{number:g} further keys take part whose scores are 0, as of a padding"
        yield Variation(PatternKind.MASK, f"{sentence} that nothing hides", change, fitted=1)
    else:
        sentence = f"the sum that softmax divides by has {number:.4g} added"
        yield Variation(PatternKind.STATISTICS, sentence, change, fitted=1)


def _distances(equations: _Equations) -> Iterator[Variation]:
    rows, columns = equations.terms.shape[2:4]
    apart = torch.arange(rows)[:, None] - torch.arange(columns)[None, :]
    met = (equations.terms != 0).any(-1).any(0).any(0)
    for index in (apart.abs(), apart):
        classes = torch.unique(index[met])
        if not 2 < len(classes) <= _MOST_UNKNOWNS:  # noqa: PLR2004
            continue
        places = torch.searchsorted(classes, index).clamp(max=len(classes) - 1)
        for by_head in (False, True):
            factors = equations.solve(places, len(classes), by_head=by_head, padded=False)
            if factors is not None and bool((factors > 0).all()):
                yield from _distance_variations(index, classes, factors)
                return


def _distance_variations(index: Tensor, classes: Tensor, factors: Tensor) -> Iterator[Variation]:
    added = factors.log()
    added = added - added[:, classes.abs().argmin()].unsqueeze(-1)
    for words, measure in (("position", classes.abs()), ("position", classes)):
        length = measure.double()
        slopes = (added @ length) / length.square().sum()
        slopes = torch.tensor(
            [shorten_number(slope) for slope in slopes.tolist()], dtype=torch.float64
        )
        scale = float(added.abs().max())
        if scale and float((added - slopes[:, None] * length).abs().max()) <= _NEAR * scale:
            numbers = ", ".join(f"{slope:.3g}" for slope in slopes[:4].tolist())
            numbers += " and so on" if len(slopes) > 4 else ""  # noqa: PLR2004
            sentence = f"{numbers} for each {words} between query and key is added to the scores"
            lengths = index.abs() if measure is not classes else index
            bias = slopes[:, None, None] * lengths.double()
            change = attends(bend=partial(_with_bias, bias=bias))
            yield Variation(PatternKind.MASK, sentence, change, fitted=len(slopes))
            return
    bias = added[:, torch.searchsorted(classes, index).clamp(max=len(classes) - 1)]
    sentence = "a number that depends on the distance between query and key is added to the scores"
    change = attends(bend=partial(_with_bias, bias=bias))
    yield Variation(PatternKind.MASK, sentence, change, fitted=added.numel())


def _with_bias(scores: Tensor, bias: Tensor) -> Tensor:
    return scores + bias.to(scores)


def _keys(equations: _Equations) -> Iterator[Variation]:
    rows, columns = equations.terms.shape[2:4]
    if not 1 < columns <= _MOST_UNKNOWNS or rows * equations.terms.shape[-1] <= columns:
        return
    index = torch.arange(columns).expand(rows, columns)
    for by_head in (False, True):
        factors = equations.solve(index, columns, by_head=by_head, padded=False)
        if factors is None or not bool((factors > _NEARLY_NOTHING).all()):
            continue
        added = factors.log()
        added = added - added.median(-1, keepdim=True).values
        sentence = f"a number for each of the {columns} keys is added to the scores"
        bias = added[:, None, :]
        change: Any = attends(bend=partial(_with_bias, bias=bias))
        yield Variation(PatternKind.MASK, sentence, change, fitted=added.numel())
        return


# --- Another factor for each head, query or sample ------------------------------------------------

_ROUNDS = 12
_STEP = 1e-4
_LARGEST_STEP = 0.5
_SETTLED = 1e-7
# Factors that differ by less than this share are one.
_ONE_FACTOR = 1e-4
_AXES = {1: "head", 2: "query", 0: "sample"}


def _factors(step: Step, candidate: Tensor) -> Iterator[Variation]:
    """The scores multiplied by another number for each head, query or sample."""
    query = step.values["query"]
    for axis, word in _AXES.items():
        count = query.shape[axis]
        numbers = _solve_factors(step, candidate.reshape(*query.shape[:-1], -1), axis)
        if count < 2 or numbers is None:  # noqa: PLR2004
            continue
        least, most = float(numbers.min()), float(numbers.max())
        if most - least <= _ONE_FACTOR * abs(most):
            return  # the scale, which is an argument
        sentence = f"the scores are multiplied by another number for each {word}"
        change = attends(bend=partial(_multiply_scores, numbers=numbers))
        words = f"{sentence}: by {least:.3g} to {most:.3g}"
        yield Variation(PatternKind.FACTOR, words, change, fitted=count)
        return


def _solve_factors(step: Step, candidate: Tensor, axis: int) -> Tensor | None:
    """By Newton's method for all slices at once: no slice depends on another's factor."""
    others = [dim for dim in range(_RANK) if dim != axis]

    def value(numbers: Tensor) -> Tensor:
        result = first_of(attends(bend=partial(_multiply_scores, numbers=numbers))(step))
        return widen(result).reshape(candidate.shape)

    shape = [1] * _RANK
    shape[axis] = candidate.shape[axis]
    numbers = torch.ones(shape, dtype=torch.float64)
    for _ in range(_ROUNDS):
        here = value(numbers)
        slope = (value(numbers + _STEP) - here) / _STEP
        below = slope.square().sum(others, keepdim=True)
        # A query that sees one key does not depend on its factor.
        by = (slope * (candidate - here)).sum(others, keepdim=True) / below
        by = torch.where(below > 0, by, 0.0).clamp(-_LARGEST_STEP, _LARGEST_STEP)
        numbers = numbers + by
        if float(by.abs().max()) < _SETTLED:
            break
    residual = (candidate - value(numbers)).square().sum().sqrt()
    return numbers if float(residual) <= _NEAR * float(candidate.square().sum().sqrt()) else None


def _multiply_scores(scores: Tensor, numbers: Tensor) -> Tensor:
    return scores * numbers.to(scores)
