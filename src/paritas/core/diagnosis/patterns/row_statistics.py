"""What a norm subtracted from each row and divided it by: solved for from its result.

A norm is linear in each row: (x - centre) / spread * weight + bias. The centre and the spread that
give the candidate are then compared with statistics of the rows: of the same rows, of others, of
all, limited, mixed. If they are none of these, it is still known that they are other ones.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from paritas.core.diagnosis.case import widen
from paritas.core.diagnosis.formats import FORMATS
from paritas.core.diagnosis.patterns.fits import AS_WRITTEN, shorten_number
from paritas.core.diagnosis.patterns.norms import NORMS, norm_of, with_norm
from paritas.core.diagnosis.patterns.operands import result_of
from paritas.core.diagnosis.patterns.steps import take_slices
from paritas.core.diagnosis.patterns.variations import Variation
from paritas.core.results.findings import PatternKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from paritas.core.diagnosis.calls import Step
    from paritas.core.diagnosis.formats import NarrowFormat
    from paritas.core.diagnosis.patterns.norms import Norm

_MOST_ELEMENTS = 1 << 20
# A row of fewer elements fits many centres and spreads.
_SHORTEST_ROW = 5
# So many places away, a row's statistics are looked for.
_MOST_PLACES = 64
# What the rows may leave, as a share of the values: the final decision is the evidence's.
_LINEAR = 0.01
# Two statistics that are this near, as a share, are the same.
_SAME = 2e-4
# Spreads that are all off by less than this share, up and down, were rounded.
_ROUNDED = 2.0**-7


def solved_statistics(
    step: Step, predict: Callable[[Variation], Tensor | None], candidate: Tensor
) -> Iterator[Variation]:
    """The norm with the statistics of its rows that give the candidate.

    Args:
        predict: the value in question if the operator is computed so.
        candidate: the candidate, in float64.
    """
    if step.name not in NORMS or candidate.numel() > _MOST_ELEMENTS:
        return
    result = result_of(predict, candidate)
    if result is None:
        return
    norm = norm_of(result.step)
    added = None if norm is None else _added_input(norm, result.given)
    if added is not None:
        yield added  # a row of it is as linear as one with other statistics
        return
    rows = None if norm is None else _solve_rows(norm, result.given)
    if rows is None or rows.is_scaled:
        return
    for relation in _relations(rows):
        yield relation.variation()
        return
    yield from _try_fitted_numbers(rows)


def _added_input(norm: Norm, candidate: Tensor) -> Variation | None:
    """The result with the input added to it, times a number."""
    x = _spread_out(norm.x, norm.x)
    added = candidate - norm.value().detach().cpu().double()
    number = float((added * x).sum() / x.square().sum())
    size = float(added.abs().max())
    if not size > 0 or float((added - number * x).abs().max()) > _SAME * size:
        return None
    number = shorten_number(number)
    times = "" if number == 1 else f"{number:.4g} times "
    sentence = f"{times}the input is added to the result"
    change = with_norm(lambda norm: norm.value() + number * norm.x)
    return Variation(PatternKind.RESIDUAL, sentence, change, fitted=1)


# --- Solving --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class _Rows:
    """What was done with each row, in float64.

    Attributes:
        norm: what should have been done.
        centre: what was subtracted from each row; 0 if nothing was.
        spread: what each row was divided by.
        right_centre: what should have been subtracted; also `right_spread`.
    """

    norm: Norm
    centre: Tensor
    spread: Tensor
    right_centre: Tensor
    right_spread: Tensor

    @property
    def is_centre_right(self) -> bool:
        """Whether the means are the right ones, as seen in units of the deviation."""
        apart = (self.centre - self.right_centre).abs() / self.right_spread
        return bool((apart <= _SAME).all())

    @property
    def have_own_affine(self) -> bool:
        """Whether each row has one weight and one bias, as the channels of a batch norm have."""
        bias = self.norm.bias
        if not isinstance(bias, torch.Tensor) or bias.dim() != len(self.norm.view):
            return False
        return all(bias.shape[dim] == 1 for dim in self.norm.dims)

    @property
    def is_scaled(self) -> bool:
        """Whether one factor on the result is all that is wrong, and none of a wrong count."""
        ratio = self.right_spread / self.spread
        factor = float(ratio.median())
        if not self.is_centre_right or not _are_same(ratio, torch.full_like(ratio, factor)):
            return False
        return _kind_of(factor**-2, self.norm.eps, self.norm.length) is PatternKind.FACTOR

    @property
    def is_spread_right(self) -> bool:
        """Whether the rows are divided by the right numbers."""
        return _are_same(self.spread, self.right_spread)


def _solve_rows(norm: Norm, candidate: Tensor) -> _Rows | None:
    """None if the result is not linear in each row, or the rows are too few or too short."""
    x, weight, bias = (
        _spread_out(value, norm.x).reshape(norm.view) for value in (norm.x, norm.weight, norm.bias)
    )
    if norm.length < _SHORTEST_ROW or x.numel() // norm.length < 2:  # noqa: PLR2004
        return None
    target = candidate.reshape(norm.view) - bias
    norm = dataclasses.replace(
        norm,
        x=widen(norm.x),
        mean=None if norm.mean is None else widen(norm.mean),
        var=None if norm.var is None else widen(norm.var),
    )
    right_centre, right_spread = norm.statistics()
    about = (x - right_centre) * weight

    def total(value: Tensor) -> Tensor:
        return value.sum(norm.dims, keepdim=True)

    slope = total(target * about) / total(about * about)
    centre = right_centre
    size = total(target * target)
    if not _is_small(total((target - slope * about) ** 2), size):
        # Another centre, too: least squares with two unknowns for each row.
        both, square = total(about * weight), total(weight * weight)
        first, second = total(target * about), total(target * weight)
        below = total(about * about) * square - both * both
        slope = (first * square - second * both) / below
        offset = (second * total(about * about) - first * both) / below
        residual = target - slope * about - offset * weight
        if not _is_small(total(residual * residual), size):
            return None
        centre = right_centre - offset / slope
    spread = 1 / slope
    is_usable = torch.isfinite(spread) & torch.isfinite(centre) & (spread > 0)
    if not bool(is_usable.all()):
        return None
    rows = _Rows(norm, centre.expand_as(spread), spread, right_centre, right_spread)
    return None if rows.is_centre_right and rows.is_spread_right else rows


def _spread_out(value: Tensor | float, x: Tensor) -> Tensor:
    wide = torch.as_tensor(value).detach().cpu().double()
    return wide.expand(x.shape)


def _is_small(residual: Tensor, size: Tensor) -> bool:
    return float(residual.sum()) <= _LINEAR**2 * float(size.sum())


def _are_same(value: Tensor, other: Tensor) -> bool:
    return bool(((value - other).abs() <= _SAME * other.abs()).all())


# --- Statistics of rows ---------------------------------------------------------------------------


def _median(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    order = [axis_number for axis_number in range(x.dim()) if axis_number not in dims]
    last = x.permute(*order, *dims).flatten(len(order)).median(-1).values
    for dim in dims:
        last = last.unsqueeze(dim)
    return last


def _middle(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    return (x.amax(dims, keepdim=True) + x.amin(dims, keepdim=True)) / 2


def _first(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    for dim in dims:
        x = x.narrow(dim, 0, 1)
    return x


_CENTRES: dict[str, Any] = {
    "the mean": lambda x, dims: x.mean(dims, keepdim=True),
    "the median": _median,
    "the middle between the least and the largest value": _middle,
    "the largest value": lambda x, dims: x.amax(dims, keepdim=True),
    "the least value": lambda x, dims: x.amin(dims, keepdim=True),
    "the first element": _first,
    "the mean of all rows": lambda x, _: x.mean(),
}
# In the dimension of a variance.
_SPREADS: dict[str, Any] = {
    "the variance": lambda x, dims: x.var(dims, correction=0, keepdim=True),
    "the mean square": lambda x, dims: x.square().mean(dims, keepdim=True),
    "the square of the mean distance from the mean": lambda x, dims: (
        (x - x.mean(dims, keepdim=True)).abs().mean(dims, keepdim=True).square()
    ),
    "the square of the mean magnitude": lambda x, dims: x.abs().mean(dims, keepdim=True).square(),
    "the square of the largest magnitude": lambda x, dims: x.abs().amax(dims, keepdim=True) ** 2,
    "the square of the range": lambda x, dims: (
        x.amax(dims, keepdim=True) - x.amin(dims, keepdim=True)
    ).square(),
    "the square of the median distance from the median": lambda x, dims: _median(
        (x - _median(x, dims)).abs(), dims
    ).square(),
    "the variance of all rows": lambda x, _: x.var(correction=0),
    "the mean square of all rows": lambda x, _: x.square().mean(),
}
_NUMBERS = frozenset({"the mean of all rows", "the variance of all rows"}) | {
    "the mean square of all rows"
}


@dataclasses.dataclass(frozen=True, eq=False)
class _Formula:
    """A statistic of each row by a formula.

    Attributes:
        words: what it is.
        compute: its values, by the norm.
        kind: what kind of mistake it is.
        fitted: how many numbers were fitted.
    """

    words: str
    compute: Any
    kind: PatternKind = PatternKind.STATISTICS
    fitted: int = 0


@dataclasses.dataclass(frozen=True, eq=False)
class _Relation:
    """Formulas of the centre and of the square of the spread; None where it is right."""

    centre: _Formula | None
    spread: _Formula | None

    def variation(self) -> Variation:
        """The norm with these statistics."""
        is_eps = self.spread is not None and self.spread.kind is PatternKind.EPS
        divided = "" if is_eps else "the square of what each row is divided by is "
        parts = [("what is subtracted from each row is ", self.centre), (divided, self.spread)]
        sentence = " and ".join(
            f"{what}{formula.words}" for what, formula in parts if formula is not None
        )
        formulas = [formula for formula in (self.centre, self.spread) if formula is not None]
        kinds = {formula.kind for formula in formulas}
        kind = kinds.pop() if len(kinds) == 1 else PatternKind.STATISTICS
        fitted = sum(formula.fitted for formula in formulas)
        change = with_norm(partial(_with_formulas, relation=self))
        return Variation(kind, sentence, change, fitted=max(1, fitted))


def _with_formulas(norm: Norm, relation: _Relation) -> Tensor:
    x, (centre, spread) = norm.rows, norm.statistics()
    if relation.centre is not None:
        centre = relation.centre.compute(norm)
    if relation.spread is not None:
        spread = relation.spread.compute(norm).sqrt()
    return norm.finish((x - centre) / spread).to(norm.x.dtype)


# --- Relations ------------------------------------------------------------------------------------


def _relations(rows: _Rows) -> Iterator[_Relation]:
    centre = None if rows.is_centre_right else next(_centre_formulas(rows), None)
    if centre is None and not rows.is_centre_right:
        return
    if rows.is_spread_right:
        yield _Relation(centre, None)
        return
    for spread in _spread_formulas(rows):
        yield _Relation(centre, spread)


def _centre_formulas(rows: _Rows) -> Iterator[_Formula]:
    norm = rows.norm
    right = "the mean" if norm.mean is None else "the running mean"
    unit = rows.right_spread

    def is_met(value: Tensor) -> bool:
        return bool(((value - rows.centre).abs() <= _SAME * unit).all())

    sources = _sources(norm, _CENTRES, right, rows.right_centre)
    yield from _linear_formulas(sources, rows.centre, is_met, right)
    yield from _moved_formulas(right, rows.right_centre, is_met, lambda pair: pair[0])


def _spread_formulas(rows: _Rows) -> Iterator[_Formula]:
    norm = rows.norm
    right = "the variance" if norm.centred else "the mean square"
    right = right if norm.var is None else "the running variance"
    square, variance = rows.spread.square(), rows.right_spread.square() - norm.eps

    def is_met(value: Tensor) -> bool:
        return bool((value > 0).all()) and _are_same(value.sqrt(), rows.spread)

    yield from _limited_formulas(rows, right)
    yield from _rounded_formulas(rows, right, is_met)
    sources = _sources(norm, _SPREADS, right, variance)
    yield from _linear_formulas(sources, square, is_met, right, norm.eps, norm.length)
    yield from _moved_formulas(right, variance + norm.eps, is_met, lambda pair: pair[1].square())


_Source = tuple[str, "Tensor", Any]


def _sources(norm: Norm, statistics: dict[str, Any], right: str, value: Tensor) -> list[_Source]:
    """The statistics by name, with their values and how to compute them; the right one first."""
    running = norm.mean if right == "the running mean" else norm.var

    def running_statistic(norm: Norm) -> Tensor:
        statistic: Any = norm.mean if right == "the running mean" else norm.var
        return statistic  # type: ignore[no-any-return]

    sources: list[_Source] = [(right, value, running_statistic)] if running is not None else []
    for words, compute in statistics.items():

        def put(norm: Norm, compute: Any = compute) -> Tensor:
            tensor: Tensor = compute(norm.rows, norm.dims)
            return tensor

        name = f"{words} of the batch" if running is not None else words
        sources.append((name, put(norm).expand_as(value), put))
    sources.sort(key=lambda source: source[0] != right)
    return sources


def _linear_formulas(
    sources: list[_Source],
    target: Tensor,
    is_met: Callable[[Tensor], bool],
    right: str,
    eps: float = 0.0,
    count: int = 0,
) -> Iterator[_Formula]:
    """One statistic times a factor plus a number, or a mixture of the right one and another."""
    ones = torch.ones_like(target)
    same = _same_for_all(sources, target, is_met)
    if same is not None:
        yield same
        return
    for words, value, compute in sources:
        for number in (1.0, None):
            numbers = _fit([value, ones], target, [number, None])
            if numbers is None or not is_met(numbers[0] * value + numbers[1]):
                continue
            factor, added = numbers
            if abs(added - eps) <= AS_WRITTEN * float(target.abs().max()):
                added = eps
            is_right = words == right
            if factor == 1 and is_right and added < 0:
                continue
            kind = _kind_of(factor, eps, count) if is_right else PatternKind.STATISTICS
            sentence = words if factor == 1 else f"{factor:.4g} times {words}"
            sentence = f"{sentence} + {added:.3g}" if added else sentence
            if kind is PatternKind.EPS:
                sentence = f"eps is {added:.3g} instead of {eps:.3g}"
            change = partial(_linear, compute=compute, factor=factor, added=added)
            yield _Formula(sentence, change, kind, fitted=1 + (number is None))
            break
    first = next((source for source in sources if source[0] == right), None)
    for words, value, compute in sources:
        if first is None or words == right:
            continue
        numbers = _fit([first[1] + eps, value + eps], target, [None, None])
        if numbers is None or abs(sum(numbers) - 1) > _SAME or not 0 < numbers[0] < 1:
            continue
        if is_met(numbers[0] * (first[1] + eps) + numbers[1] * (value + eps)):
            sentence = f"{numbers[0]:.3g} of {right} and {numbers[1]:.3g} of {words}"
            change = partial(
                _mix_statistics, first=first[2], other=compute, shares=numbers, eps=eps
            )
            yield _Formula(sentence, change, fitted=2)


def _same_for_all(
    sources: list[_Source], target: Tensor, is_met: Callable[[Tensor], bool]
) -> _Formula | None:
    """What is the same for all rows: a statistic of all of them, or a number."""
    if target.numel() == 1:
        return None
    for words, value, compute in sources:
        if words.removesuffix(" of the batch") in _NUMBERS and is_met(value.expand_as(target)):
            return _Formula(words, compute)
    for number in (0.0, 1.0, shorten_number(float(target.median()))):
        if is_met(torch.full_like(target, number)):
            change = partial(_constant, number=number)
            return _Formula(f"{number:.4g}", change, fitted=int(number not in (0, 1)))
    return None


def _constant(norm: Norm, number: float) -> Tensor:
    return torch.full_like(norm.rows.sum(norm.dims, keepdim=True), number)


def _kind_of(factor: float, eps: float, count: int) -> PatternKind:
    """The kind of the right statistic with a factor, or with another number added."""
    if factor == 1:
        return PatternKind.EPS if eps else PatternKind.OFFSET
    # Another number of elements that are counted.
    usual = (count, 1 / count, count / (count - 1), (count - 1) / count) if count > 1 else ()
    is_of_count = any(abs(factor - number) <= _SAME * number for number in usual)
    return PatternKind.FACTOR if usual and not is_of_count else PatternKind.STATISTICS


def _linear(norm: Norm, compute: Any, factor: float, added: float) -> Tensor:
    value: Tensor = factor * compute(norm) + added
    return value


def _mix_statistics(norm: Norm, first: Any, other: Any, shares: list[float], eps: float) -> Tensor:
    value: Tensor = shares[0] * (first(norm) + eps) + shares[1] * (other(norm) + eps)
    return value


def _fit(
    columns: list[Tensor], expected: Tensor, numbers: list[float | None]
) -> list[float] | None:
    """The numbers by least squares of relative errors, with few digits if that is as near."""
    size = expected.abs() + 1e-3 * float(expected.abs().max())
    target = expected
    for column, number in zip(columns, numbers, strict=True):
        target = target if number is None else target - number * column
    free = [
        column for column, coefficient in zip(columns, numbers, strict=True) if coefficient is None
    ]
    matrix = torch.stack([(free_column / size).reshape(-1) for free_column in free], dim=1)
    if len(matrix) <= len(free) or not bool(torch.isfinite(matrix).all()):
        return None
    solution = torch.linalg.lstsq(matrix, (target / size).reshape(-1, 1), driver="gelsd")
    if int(solution.rank) < len(free):
        return None
    solved = iter(solution.solution.reshape(-1).tolist())
    return [
        shorten_number(next(solved)) if coefficient is None else coefficient
        for coefficient in numbers
    ]


def _limited_formulas(rows: _Rows, right: str) -> Iterator[_Formula]:
    is_other = (rows.spread - rows.right_spread).abs() > _SAME * rows.right_spread
    changed = rows.spread[is_other]
    if len(changed) < 2 or not _are_same(changed, changed.median().expand_as(changed)):  # noqa: PLR2004
        return
    limit = shorten_number(float(changed.median().square()) - rows.norm.eps)
    below = bool((rows.right_spread[is_other] < changed).all())
    if not below and not bool((rows.right_spread[is_other] > changed).all()):
        return
    words = f"{right}, which is {'at least' if below else 'at most'} {limit:.4g}, and eps"
    change = partial(_limit_variance, limit=limit, below=below)
    yield _Formula(words, change, PatternKind.CLIPPED, fitted=1)


def _limit_variance(norm: Norm, limit: float, *, below: bool) -> Tensor:
    variance = norm.statistics()[1].square() - norm.eps
    limited = variance.clamp(min=limit) if below else variance.clamp(max=limit)
    return limited + norm.eps


# One row may be near a number with few digits by chance.
_FEWEST_ROUNDED = 2
_POWERS = {2.0: "", 1.0: ", of which the root", -1.0: ", of which the reciprocal root"}


def _rounded_formulas(
    rows: _Rows, right: str, is_met: Callable[[Tensor], bool]
) -> Iterator[_Formula]:
    """The right spread, its reciprocal or its square with fewer digits."""
    if rows.right_spread.unique().numel() < _FEWEST_ROUNDED:
        return
    for power, words in _POWERS.items():
        for form in FORMATS[:3]:
            compute = partial(_round_spread, power=power, form=form)
            if not is_met(compute(rows.right_spread)):
                continue
            # Few rows do not tell its digits.
            other = next(each_format for each_format in FORMATS[1:] if each_format != form)
            is_unclear = is_met(_round_spread(rows.right_spread, power, other))
            name = form.name.partition("_")[0] if is_unclear else form.name
            sentence = f"{right} and eps{words or ', which'} is rounded to {name}"
            yield _Formula(sentence, partial(_with_rounded, compute=compute), PatternKind.PRECISION)
            break


def _round_spread(spread: Tensor, power: float, form: NarrowFormat) -> Tensor:
    """The square of the spread, if a power of the spread is rounded."""
    return form.round_to_nearest(spread**power) ** (2 / power)


def _with_rounded(norm: Norm, compute: Any) -> Tensor:
    value: Tensor = compute(norm.statistics()[1])
    return value


def _moved_formulas(
    right: str,
    value: Tensor,
    is_met: Callable[[Tensor], bool],
    pick: Callable[[tuple[Tensor, Tensor]], Tensor],
) -> Iterator[_Formula]:
    """That of other rows: by a step along an axis, or of one row for all."""
    for axis, size in enumerate(value.shape):
        places = torch.arange(size)
        first, last = "the first for all", "the last for all"
        for by in range(1, min(size, _MOST_PLACES)) if size > 1 else ():
            for source, words in (
                ((places + by) % size, f"{by} after it"),
                ((places + by).clamp(max=size - 1), last if by == size - 1 else f"{by} after it"),
                ((places - by).clamp(min=0), first if by == size - 1 else f"{by} before it"),
                (places // (by + 1) * (by + 1), f"the first of each {by + 1}"),
            ):
                if is_met(value.index_select(axis, source)):
                    sentence = f"{right} of another row along axis {axis}: {words}"
                    change = partial(_of_rows, axis=axis, source=source, pick=pick)
                    yield _Formula(sentence, change)
                    return


def _of_rows(norm: Norm, axis: int, source: Tensor, pick: Any) -> Tensor:
    return take_slices(pick(norm.statistics()), axis, source)


# --- Statistics that are none of these ------------------------------------------------------------


def _try_fitted_numbers(rows: _Rows) -> Iterator[Variation]:
    """Other numbers than the right ones, whatever they are."""
    ratio = rows.spread / rows.right_spread
    least, most = float(ratio.min()), float(ratio.max())
    if rows.is_centre_right and most - least <= _SAME * most:
        return  # one factor for all
    change = with_norm(partial(_with_numbers, centre=rows.centre, spread=rows.spread))
    fitted = rows.spread.numel() * (1 if rows.is_centre_right else 2)
    if not rows.is_spread_right and 1 - _ROUNDED <= least < 1 < most <= 1 + _ROUNDED:
        far = max(1 - least, most - 1)
        sentence = f"the deviations of the rows are off by up to {far:.2g} of them, up and down"
        sentence = f"{sentence}, as if they were computed with fewer digits"
        yield Variation(PatternKind.PRECISION, sentence, change, fitted=fitted)
        return
    if rows.have_own_affine:
        if rows.is_spread_right or rows.is_centre_right:
            kind = PatternKind.AXIS_OFFSET if rows.is_spread_right else PatternKind.AXIS_SCALE
            words = "is added to" if rows.is_spread_right else "is a factor of"
            sentence = f"a number of its own {words} each channel"
            yield Variation(kind, sentence, change, fitted=fitted)
        return  # statistics, weight and bias leave the same traces
    what = []
    if not rows.is_centre_right:
        what.append("other numbers than the mean are subtracted from the rows")
    if not rows.is_spread_right:
        what.append(f"the rows are divided by {least:.3g} to {most:.3g} times their deviation")
    yield Variation(PatternKind.STATISTICS, " and ".join(what), change, fitted=fitted)


def _with_numbers(norm: Norm, centre: Tensor, spread: Tensor) -> Tensor:
    x = norm.rows
    return norm.finish((x - centre.to(x)) / spread.to(x))
