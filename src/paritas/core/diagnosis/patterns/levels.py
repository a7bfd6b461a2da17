"""Values that only a few levels are left of: steps, digits, the entries of a code book.

Which rule chose the steps does not matter: the candidate's own values lie on them. How many bits
that is worth is counted against chance, since the steps are read off the same values.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import torch

from paritas.core.diagnosis.case import Extent, axis_number, near, weigh
from paritas.core.diagnosis.formats import format_with_digits
from paritas.core.diagnosis.patterns.fits import slope_along
from paritas.core.numerics.criterion import MAX_Z
from paritas.core.results.findings import PatternKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from paritas.core.diagnosis.case import Case
    from paritas.core.results.findings import Pattern

# Larger tensors are not looked at.
_MOST_ELEMENTS = 1 << 17
# Fewer bits than this may be chance.
_FEWEST_BITS = 40.0
# The most steps on one side of zero: those of eight bits with a zero point.
_MOST_STEPS = 255
# The most significant binary digits that are few.
_MOST_DIGITS = 4
_MOST_LEVELS = 64
# The sizes of groups of neighbours that share a scale.
_GROUPS = (2, 4, 8, 16, 32, 64, 128)
# The share of the values that lies on the levels, and that is nearer than a step to the right one.
_NEARLY_ALL = 0.98
_MOSTLY = 0.9
# Of signs, or of three levels, all large values are far from the last one.
_FEWEST_CLIPPED = 4
# Fewer values have some offset, or some factor, by chance.
_FEWEST_MOVED = 6
# What was rounded still resembles what it was.
_RESEMBLES = 0.7
# So many groups, and elements of each, are looked at first.
_FIRST = 24
# So many numbers of steps are tried at once, and on so many elements of a group first.
_AT_ONCE = 64
_FEW = 6


def propose_levels(case: Case) -> Iterator[Pattern | None]:
    """`precision`: whole multiples of a step, few digits, a code book."""
    if case.right.numel() > _MOST_ELEMENTS:
        return
    large, small = list(_whole_slices(case)), list(_small_groups(case))
    is_alike = _resembles(case)
    for grouping in large:
        yield _in_steps(case, grouping)
    if is_alike:
        yield _in_few_digits(case)
    for grouping in small:
        yield _in_steps(case, grouping)
    for grouping in (*large, *small) if is_alike else ():
        yield _of_a_code_book(case, grouping)


def propose_steps(case: Case) -> Iterator[Pattern | None]:
    """`precision`: right results rounded to steps, one for all of them or for each slice.

    The steps are read off the candidate, but its values are predicted from the right ones.
    """
    if case.right.numel() <= _MOST_ELEMENTS:
        for grouping in (*_whole_slices(case), *_lines(case)):
            yield _in_steps(case, grouping, predicts=True)


def _resembles(case: Case) -> bool:
    right, candidate = case.right.flatten(), case.given.flatten()
    size = float(right.norm() * candidate.norm())
    return size > 0 and float(right @ candidate) >= _RESEMBLES * size


# --- Which values share a scale -------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class _Grouping:
    """How a tensor is divided into groups.

    Attributes:
        words: for people; empty if there is one group.
        split: a tensor as groups and their elements.
        join: back again.
    """

    words: str
    split: Callable[[Tensor], Tensor]
    join: Callable[[Tensor], Tensor]


def _whole_slices(case: Case) -> Iterator[_Grouping]:
    shape = case.shape
    yield _Grouping("", lambda value: value.reshape(1, -1), lambda value: value.reshape(shape))
    if len(shape) < 2:  # noqa: PLR2004
        return
    for axis, size in enumerate(shape):
        if 1 < size < case.right.numel():
            yield _along(case, axis, first=True)


def _small_groups(case: Case) -> Iterator[_Grouping]:
    """Lines of more than two axes, and neighbours along an axis, the largest groups first."""
    shape = case.shape
    yield from _lines(case)
    for group in reversed(_GROUPS):
        for axis, size in enumerate(shape):
            if len(shape) > 1 and group < size and size % group == 0:
                yield _in_groups(case, axis, group)


def _lines(case: Case) -> Iterator[_Grouping]:
    for axis, size in enumerate(case.shape):
        if len(case.shape) > 2 and size > 2:  # noqa: PLR2004
            yield _along(case, axis, first=False)


def _along(case: Case, axis: int, *, first: bool) -> _Grouping:
    shape = case.shape

    def split(value: Tensor) -> Tensor:
        return (
            value.movedim(axis, 0).flatten(1) if first else value.movedim(axis, -1).flatten(0, -2)
        )

    rest = [size for position, size in enumerate(shape) if position != axis]
    moved = [shape[axis], *rest] if first else [*rest, shape[axis]]

    def join(value: Tensor) -> Tensor:
        return value.reshape(moved).movedim(0 if first else -1, axis)

    sentence = f"along axis {axis_number(case.context, axis)}"
    words = f"each slice {sentence}" if first else f"each line {sentence}"
    if first and axis == 0 and case.context.stacked:
        words = "each run"
    return _Grouping(words, split, join)


def _in_groups(case: Case, axis: int, group: int) -> _Grouping:
    shape = case.shape
    rest = [size for position, size in enumerate(shape) if position != axis]

    def split(value: Tensor) -> Tensor:
        return value.movedim(axis, -1).reshape(-1, group)

    def join(value: Tensor) -> Tensor:
        return value.reshape(*rest, shape[axis]).movedim(-1, axis)

    words = f"each group of {group} along axis {axis_number(case.context, axis)}"
    return _Grouping(words, split, join)


# --- Whole multiples of a step --------------------------------------------------------------------


def _in_steps(case: Case, grouping: _Grouping, *, predicts: bool = False) -> Pattern | None:
    right, candidate, unit = (
        grouping.split(tensor) for tensor in (case.right, case.given, case.unit)
    )
    if candidate.shape[1] < 2:  # noqa: PLR2004
        return None
    first = slice(None, None, max(1, len(candidate) // _FIRST))
    for from_least in (False, True):
        if _steps(candidate[first, :_FIRST], unit[first, :_FIRST], from_least=from_least) is None:
            continue
        steps = _steps(candidate, unit, from_least=from_least)
        if steps is None or steps.bits < _FEWEST_BITS:
            continue
        if bool((candidate == candidate[:, :1]).all()):
            continue  # one value for each group is no step
        if steps.hold(right, unit):
            continue
        each = f", one for {grouping.words}" if grouping.words else ""
        step = f"{float(steps.step):.4g}" if len(candidate) == 1 else f"a step{each}"
        words = f"in whole multiples of {step}, here at most {steps.most} of them"
        words = f"{words} from the least" if from_least else words
        value = grouping.join(steps.round_to_nearest(right if predicts else candidate))
        if predicts or steps.are_near(right, candidate):
            return _state(case, value, words, len(candidate))
        return _state_moved(case, value, words, steps, (right, candidate))
    return None


def _state_moved(
    case: Case, value: Tensor, words: str, steps: _Steps, groups: tuple[Tensor, Tensor]
) -> Pattern | None:
    """Groups that are rounded, and have another offset or factor: a lost zero point or scale.

    Or too few levels, so that what is outside of them has the last one.
    """
    right, candidate_groups = groups
    limits = candidate_groups.aminmax(dim=1, keepdim=True)
    if steps.are_near(right.clamp(*limits), candidate_groups):
        least, most = float(candidate_groups.min()), float(candidate_groups.max())
        if steps.most < _FEWEST_CLIPPED:
            return _state(case, value, words, len(candidate_groups))
        sentence = f"{words}, and clipped at {least:.4g} and {most:.4g}"
        return _state(case, value, sentence, 2 * len(candidate_groups), PatternKind.CLIPPED)
    offset = (candidate_groups - right).median(1, keepdim=True).values
    factor = slope_along(right, candidate_groups, [1])
    is_whole = len(right) == 1
    for kinds, text, moved, numbers in (
        ((PatternKind.OFFSET, PatternKind.AXIS_OFFSET), "an offset", right + offset, offset),
        ((PatternKind.SCALE, PatternKind.AXIS_SCALE), "a factor", right * factor, factor),
    ):
        if steps.are_near(moved, candidate_groups) and candidate_groups.shape[1] > _FEWEST_MOVED:
            least, most = float(numbers.min()), float(numbers.max())
            span = f"{least:.4g}" if is_whole else f"{least:.4g} to {most:.4g}"
            sentence = f"{words}, and with {text} of {span}"
            return _state(
                case, value, sentence, 2 * len(candidate_groups), kinds[0 if is_whole else 1]
            )
    return None


@dataclasses.dataclass(frozen=True, eq=False)
class _Steps:
    """The steps of groups.

    Attributes:
        step: of each group; 0 if it has none.
        start: where they begin: zero, or the least value.
        most: the most steps of a group.
        bits: what it is worth that the values lie on them.
    """

    step: Tensor
    start: Tensor
    most: int
    bits: float

    def round_to_nearest(self, value: Tensor) -> Tensor:
        """The nearest levels."""
        step = torch.where(self.step > 0, self.step, 1.0)
        return torch.where(
            self.step > 0, ((value - self.start) / step).round() * step + self.start, value
        )

    def are_near(self, right: Tensor, candidate: Tensor) -> bool:
        """Whether most values are less than a step from where they were."""
        has_step = (self.step > 0).expand_as(right)
        apart = (candidate - right).abs() <= 1.01 * self.step
        return bool(has_step.any()) and float(apart[has_step].double().mean()) >= _MOSTLY

    def hold(self, right: Tensor, unit: Tensor) -> bool:
        """Whether the right values lie on them, too: then the steps are not the mistake."""
        return float(near(self.round_to_nearest(right), right, unit).double().mean()) >= _MOSTLY


def _steps(candidate: Tensor, unit: Tensor, *, from_least: bool) -> _Steps | None:
    """The largest steps that the values are multiples of; None if not for nearly all groups."""
    start = candidate.amin(1, keepdim=True) if from_least else torch.zeros_like(candidate[:, :1])
    apart = candidate - start
    most = apart.abs().amax(1, keepdim=True)
    largest = apart.abs().argmax(1, keepdim=True)
    at_most = unit.gather(1, largest)
    noise = MAX_Z * (unit + apart.abs() / most.clamp(min=1e-300) * at_most)
    # Zeros, and the largest value, are multiples of any step.
    tells = (apart.abs() > noise).scatter(1, largest, value=False)
    count = _fewest_steps(apart, noise, tells).unsqueeze(1)
    step = torch.where(count > 0, most / count, 0.0)
    has_step = (step > 0) | (most == 0)
    if float(has_step.double().mean()) < _NEARLY_ALL or not bool((step > 0).any()):
        return None
    chance = (2 * noise / step.clamp(min=1e-300)).clamp(max=1.0)
    bits = torch.where(tells & (step > 0), -chance.log2(), 0.0).sum(1, keepdim=True)
    # A step is one of so many; those that begin at the least value have that to choose as well.
    cost = 2 * (1.0 + count).log2()
    return _Steps(step, start, int(count.max()), float((bits - cost).sum()))


def _fewest_steps(apart: Tensor, noise: Tensor, tells: Tensor) -> Tensor:
    """For each group, the fewest steps to its largest value that all its values fit; 0 if none.

    Most numbers of steps are ruled out by a few values, so that all are tried on few values first.
    """
    most = apart.abs().amax(1)
    count = torch.zeros(len(apart), dtype=torch.long)
    for first in range(1, _MOST_STEPS + 1, _AT_ONCE):
        is_open = (count == 0) & (most > 0)
        if not bool(is_open.any()):
            break
        numbers = torch.arange(first, min(first + _AT_ONCE, _MOST_STEPS + 1))
        fits = is_open.unsqueeze(1).repeat(1, len(numbers))
        for columns in (slice(None, _FEW), slice(_FEW, None)):
            group, position = fits.nonzero(as_tuple=True)
            each = (most[group] / numbers[position]).unsqueeze(1)
            value = apart[group, columns]
            is_level = (value - (value / each).round() * each).abs() <= noise[group, columns]
            fits[group, position] = (is_level | ~tells[group, columns]).all(1)
        count = torch.where(fits.any(1), numbers[fits.long().argmax(1)], count)
    return count


def _state(
    case: Case,
    prediction: Tensor,
    words: str,
    parameters: int,
    kind: PatternKind = PatternKind.PRECISION,
) -> Pattern | None:
    weight = weigh(case, prediction, parameters=parameters, extent=Extent.ALL)
    return None if weight is None else weight.pattern(kind, words)


# --- Few digits -----------------------------------------------------------------------------------


def _in_few_digits(case: Case) -> Pattern | None:
    """Numbers of few significant binary digits, as of narrow floats whose scale is a power of 2."""
    candidate, right = case.given, case.right
    tells = candidate.abs() > MAX_Z * case.unit
    for digits in range(1, _MOST_DIGITS + 1):
        narrow = format_with_digits(digits)
        rounded = narrow.round_to_nearest(candidate)
        if not bool(near(candidate, rounded, case.unit)[tells].all()):
            continue
        chance = (2 * MAX_Z * case.unit / narrow.spacing(candidate)).clamp(max=1.0)
        bits = float(torch.where(tells, -chance.log2(), 0.0).sum())
        is_new = float(near(narrow.round_to_nearest(right), right, case.unit).double().mean())
        if bits < _FEWEST_BITS or is_new >= _MOSTLY:
            return None
        words = f"{digits} significant binary digits" if digits > 1 else "powers of two"
        return _state(case, torch.where(tells, rounded, 0.0), f"in {words}", 0)
    return None


# --- A code book ----------------------------------------------------------------------------------


def _of_a_code_book(case: Case, grouping: _Grouping) -> Pattern | None:
    """The same few levels in all groups, times a scale of each."""
    right, candidate, unit = (
        grouping.split(tensor) for tensor in (case.right, case.given, case.unit)
    )
    scale = candidate.abs().amax(1, keepdim=True)
    if candidate.shape[1] < 2 or bool((scale == 0).any()):  # noqa: PLR2004
        return None
    at_most = unit.gather(1, candidate.abs().argmax(1, keepdim=True))
    level, noise = candidate / scale, MAX_Z * (unit + candidate.abs() / scale * at_most) / scale
    level, order = level.flatten().sort()
    width = noise.flatten()[order]
    apart = level.diff() > torch.maximum(width[1:], width[:-1])
    number = torch.cat([torch.zeros(1, dtype=torch.long), apart.long().cumsum(0)])
    count = int(number[-1]) + 1
    # In each group, one value is the largest of it by definition.
    telling = candidate.numel() - len(candidate)
    if not 1 < count <= min(_MOST_LEVELS, telling // 2):
        return None
    middle = torch.zeros(count, dtype=level.dtype).index_add(0, number, level)
    middle = (middle / torch.bincount(number, minlength=count))[number]
    if bool(((level - middle).abs() > width).any()) or not _keeps_order(
        right, candidate, noise * scale
    ):
        return None
    typical = float(width.median())
    chance = min(1.0, count * typical)
    if -math.log2(chance) * telling + count * math.log2(typical) < _FEWEST_BITS:
        return None
    prediction = torch.empty_like(level)
    prediction[order] = middle
    prediction = grouping.join(prediction.reshape(candidate.shape) * scale)
    each = f" times a scale of {grouping.words}" if grouping.words else ""
    words = f"only {count} different values{each}, in the order of the right ones"
    return _state(case, prediction, words, count + len(candidate))


def _keeps_order(right: Tensor, candidate: Tensor, noise: Tensor) -> bool:
    """Whether a larger right value has no smaller level in its group."""
    order = right.argsort(1)
    candidate, noise = candidate.gather(1, order), noise.gather(1, order)
    limit = noise[:, 1:] + noise[:, :-1]
    return float((candidate.diff(dim=1) >= -limit).double().mean()) >= _NEARLY_ALL
