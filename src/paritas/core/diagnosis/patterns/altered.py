"""An operator of one operand that something was done to: rounded, limited, wrapped."""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from paritas.core.diagnosis.case import widen
from paritas.core.diagnosis.patterns.expressions import FUNCTIONS
from paritas.core.diagnosis.patterns.variations import Variation, with_altered
from paritas.core.results.findings import PatternKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from paritas.core.diagnosis.calls import Step
    from paritas.core.diagnosis.case import Case

_MOST_OPERANDS = 3


def altered_variations(step: Step, case: Case) -> tuple[int, list[tuple[float, int, Variation]]]:
    """How many there are, and the operator of an altered operand.

    With each its length and how many of its numbers were solved for.
    """
    operands = {
        name: operand
        for name, operand in step.values.items()
        if isinstance(operand, torch.Tensor) and operand.is_floating_point() and operand.numel() > 1
    }
    variations: list[tuple[float, int, Variation]] = []
    for name, value in itertools.islice(operands.items(), _MOST_OPERANDS):
        variations += ((2, 1, variation) for variation in _limit_operand(name, value, case))
        variations += ((3, 1, variation) for variation in _round_operand_to_steps(name, value))
        if name == "self" and torch.Tag.pointwise not in step.operator.tags:
            variations += ((2, 0, variation) for variation in _vary_functions_around(step.name))
        if step.name in _PERIODIC:
            variations += (
                (3, 1, variation) for variation in _subtract_whole_turns(name, _PERIODIC[step.name])
            )
    if torch.Tag.pointwise in step.operator.tags:
        variations += ((3, 1, variation) for variation in _rounded_result(step))
    variations.sort(key=operator.itemgetter(0))
    return len(variations), variations


# --- A function before and one after --------------------------------------------------------------

_BEFORE = (
    *("{}", "neg({})", "abs({})", "square({})", "exp({})", "sqrt({})", "log({})", "relu({})"),
    *("reciprocal({})", "sigmoid({})", "tanh({})"),
)
_AFTER = (*_BEFORE, "log1p({})", "{} ** (1 / 3)")


def _vary_functions_around(operator_name: str) -> Iterator[Variation]:
    """A function of the operand, of the result, or of both: the root of the mean of squares."""
    for before, after in itertools.product(_BEFORE, _AFTER):
        if before != after or before == "neg({})":
            sentence = after.format(f"{operator_name}({before.format('x')})")
            change = partial(_around, before=FUNCTIONS[before], after=FUNCTIONS[after])
            is_sign = {before, after} == {"{}", "neg({})"}
            kind = PatternKind.SIGN if is_sign else PatternKind.OTHER_FUNCTION
            yield Variation(kind, f"{sentence} instead of {operator_name}(x)", change)


def _around(
    step: Step, before: Callable[[Tensor], Tensor], after: Callable[[Tensor], Tensor]
) -> Any:
    result = step.run(self=before(step.values["self"]))
    first = result if isinstance(result, torch.Tensor) else result[0]
    value = after(first)
    if value.numel() > 1 and bool((value == value.flatten()[0]).all()):
        raise ValueError("one value everywhere has many reasons")
    return step.with_first(value)


# --- Limits ---------------------------------------------------------------------------------------


def _limit_operand(name: str, value: Tensor, case: Case) -> Iterator[Variation]:
    """Limits beyond which all is wrong, and below which nothing is."""
    if tuple(value.shape) != case.shape:
        return
    wide = widen(value)
    for sentence, size, limit in (
        ("above {0}", wide, lambda x, most: x.clamp(max=most)),
        ("below {0}", -wide, lambda x, most: x.clamp(min=-most)),
        ("at -{0} and {0}", wide.abs(), lambda x, most: x.clamp(-most, most)),
    ):
        least = float(size[case.wrong].min())
        inside = size[~case.wrong & (size < least)]
        if not inside.numel():
            continue
        for most in _between(float(inside.max()), least):
            shown = -most if sentence.startswith("below") else most
            words = f"{name} is clipped {sentence.format(f'{shown:.7g}')}"
            yield Variation(PatternKind.CLIPPED, words, with_altered(name, _Limit(limit, most)))


@dataclasses.dataclass(frozen=True)
class _Limit:
    limit: Callable[[Tensor, float], Tensor]
    most: float

    def __call__(self, value: Tensor) -> Tensor:
        return self.limit(value, self.most)


def _between(low: float, high: float) -> list[float]:
    """The shortest numbers between two, and the first of them."""
    numbers = [low]
    for digits in range(1, 5):
        middle = float(f"{(low + high) / 2:.{digits}g}")
        if low <= middle <= high:
            numbers.append(middle)
    if math.floor(high) >= low:
        numbers.append(float(math.floor(high)))
    return list(dict.fromkeys(numbers))


# --- Steps and turns ------------------------------------------------------------------------------

_STEPS = (*(2.0**-power for power in range(-1, 13)), 0.1, 0.05, 0.02, 0.01, 0.005, 0.001)
_WAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "the nearest": torch.round,
    "the next lower": torch.floor,
    "the next in the direction of zero": torch.trunc,
}
# A step must be seen in this many different values of the operand.
_FEWEST_STEPS = 4


def _round_operand_to_steps(name: str, value: Tensor) -> Iterator[Variation]:
    """A value for each step of the operand, as a table has."""
    size = float(widen(value).abs().max())
    for step, (words, way) in itertools.product(_STEPS, _WAYS.items()):
        if math.isfinite(size) and size / step >= _FEWEST_STEPS:
            sentence = (
                f"one value for each {step:.6g} of {name}: it is rounded to {words} of such steps"
            )
            change = with_altered(name, _Stepped(way, step))
            is_nearest = way is torch.round
            kind = PatternKind.PRECISION if is_nearest else PatternKind.APPROXIMATION
            yield Variation(kind, sentence, change)


def _rounded_result(step: Step) -> Iterator[Variation]:
    """The nearest of such steps for each result."""
    result = step.run()
    if not isinstance(result, torch.Tensor) or not result.is_floating_point():
        return
    size = float(widen(result).abs().max())
    for length in _STEPS:
        if math.isfinite(size) and size / length >= _FEWEST_STEPS:
            sentence = f"the result is rounded to the nearest of steps of {length:.6g}"
            change = partial(_around_result, alter=_Stepped(torch.round, length))
            yield Variation(PatternKind.PRECISION, sentence, change)


def _around_result(step: Step, alter: Callable[[Tensor], Tensor]) -> Any:
    return alter(step.run())


@dataclasses.dataclass(frozen=True)
class _Stepped:
    way: Callable[[Tensor], Tensor]
    step: float

    def __call__(self, value: Tensor) -> Tensor:
        if len(self.way(value / self.step).unique()) < _FEWEST_STEPS:
            raise ValueError("too few steps")
        return self.way(value / self.step) * self.step


_PERIODIC = {"sin": 2 * math.pi, "cos": 2 * math.pi, "tan": math.pi}


def _subtract_whole_turns(name: str, period: float) -> Iterator[Variation]:
    """Whole turns subtracted, of a number that is near to the right one."""
    turns = [float(f"{period:.{digits}g}") for digits in range(1, 7)]
    turns += [2 * float(f"{period / 2:.{digits}g}") for digits in range(1, 7)]
    turns += [period * (22 / 7) / math.pi]
    for dtype in (torch.bfloat16, torch.float16):
        turns.append(float(torch.tensor(period).to(dtype)))
    for turn, (words, way) in itertools.product(dict.fromkeys(turns), _WAYS.items()):
        del words
        sentence = f"turns of {turn:.7g} instead of {period:.7g} are subtracted from {name}"
        change: Any = with_altered(name, _Turned(way, turn))
        yield Variation(PatternKind.APPROXIMATION, sentence, change)


@dataclasses.dataclass(frozen=True)
class _Turned:
    way: Callable[[Tensor], Tensor]
    turn: float

    def __call__(self, value: Tensor) -> Tensor:
        return value - self.turn * self.way(value / self.turn)
