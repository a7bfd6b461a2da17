"""Numbers of an operator that may be any other: which one is solved for, not taken from a table."""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from paritas.core.diagnosis.calls import step_names
from paritas.core.diagnosis.case import widen
from paritas.core.diagnosis.patterns.attention import (
    cap_scores,
    capped_scores,
    is_attention,
    limited_scores,
    smoothed_weights,
    softmax_with,
)
from paritas.core.diagnosis.patterns.derivatives import leak_of
from paritas.core.diagnosis.patterns.steps import with_altered, with_argument, with_factor
from paritas.core.diagnosis.patterns.variations import (
    AFFINE,
    EPSILONS,
    LARGEST_EPS,
    NUMBERS,
    Variation,
    kind_of_number,
)
from paritas.core.results.findings import PatternKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from paritas.core.diagnosis.calls import Step

# With these, another number is a factor or an offset, but for alpha.
_ONE_NUMBER = AFFINE - {"add", "sub", "rsub"}
# A constant that is added to an argument is an eps up to this size.
_MOST_ADDED = 0.1
# The most rounds of Newton's method from one start, and the change that ends them.
_ROUNDS = 25
_SETTLED = 1e-12
# Digits that a stated number may have.
_DIGITS = range(1, 8)
_EPS_STARTS = (1e-1, 1e-3, 1e-6)
_ROOTS = step_names("roots and reciprocals") | {"log", "log2", "log10"}
# Functions of which a factor on the argument is more than a factor on the result.
_BENT = frozenset(
    {
        *("exp", "exp2", "expm1", "log1p", "sin", "cos", "tan", "tanh", "sigmoid", "erf", "atan"),
        *("silu", "gelu", "elu", "softplus", "mish", "hardswish", "hardsigmoid", "hardtanh"),
        *("softmax", "log_softmax", "log_sigmoid_forward"),
        *step_names("limits"),
        *("round", "floor", "ceil"),
    }
)
# A factor that is smaller than this leaves nothing.
_NOTHING = 1e-9
# A factor on an argument that is smaller than this is not seen in float32.
_NEARLY_NOTHING = 1e-6
# Functions of which a number added to the argument is more than a number added to the result.
_MOVED = (_BENT | {"relu", "leaky_relu", "sqrt", "rsqrt", "reciprocal", "log"}) - {
    *("exp", "exp2", "softmax", "log_softmax")
}
# Numbers that no result depends on, or that say how to draw random ones.
_NO_NUMBERS = frozenset({"dropout_p", "momentum", "correction"})


@dataclasses.dataclass(frozen=True)
class Unknown:
    """A number of an operator that may be wrong.

    Attributes:
        variation: the mistake with this number.
        starts: where to begin to look for it.
        logarithmic: it is positive, and its order of magnitude is unknown.
        most: its largest size.
        whole: it is a count.
        is_scanned: there are many starts, of which only the best is followed, if it explains
            anything.
    """

    variation: Callable[[float], Variation]
    starts: tuple[float, ...]
    logarithmic: bool = False
    most: float = math.inf
    whole: bool = False
    is_scanned: bool = False

    def solve(
        self, predict: Callable[[Variation], Tensor | None], candidate: Tensor
    ) -> float | None:
        """The number whose prediction is nearest to what is given."""
        at = _exponential if self.logarithmic else float

        def value(position: float) -> Tensor | None:
            number = at(position)
            return predict(self.variation(number)) if abs(number) <= self.most else None

        best: tuple[float, float] | None = None
        for start in self._best_start(predict, candidate) if self.is_scanned else self.starts:
            solution = _descend(value, candidate, math.log(start) if self.logarithmic else start)
            if solution is not None and (best is None or solution[1] < best[1]):
                best = solution
        return None if best is None else at(best[0])

    def _best_start(
        self, predict: Callable[[Variation], Tensor | None], candidate: Tensor
    ) -> list[float]:
        """The start that is nearest, if it is nearer than the one that changes nothing: the first.

        Empty if none is.
        """
        errors = []
        for start in self.starts:
            value = predict(self.variation(start))
            errors.append(math.inf if value is None else _sum_squared_residual(candidate - value))
        best = min(range(len(errors)), key=errors.__getitem__)
        return [self.starts[best]] if errors[best] < _NEARER * errors[0] else []


def _exponential(position: float) -> float:
    return math.exp(min(position, 700.0))


def shorter_numbers(number: float) -> Iterator[float]:
    """The number with more and more digits, or one over such a number, or as it is.

    0 comes first if it is nothing but rounding.
    """
    numbers = [0.0] if abs(number) < _NOTHING else []
    for digits in _DIGITS:
        numbers.append(float(f"{number:.{digits}g}"))
        inverse = float(f"{1 / number:.{digits}g}") if number else 0.0
        numbers += [1 / inverse] if inverse else []
    yield from dict.fromkeys([*numbers, number])


def _descend(
    value: Callable[[float], Tensor | None], candidate: Tensor, position: float
) -> tuple[float, float] | None:
    """The place of the least squared error near a start, and that error; Newton's method."""
    here = value(position)
    if here is None:
        return None
    error = _sum_squared_residual(candidate - here)
    for _ in range(_ROUNDS):
        width = 1e-5 * max(1e-2, abs(position))
        beside = value(position + width)
        if beside is None:
            break
        slope = ((beside - here) / width).nan_to_num(0.0, 0.0, 0.0)
        size = float(slope.square().sum())
        if not size > 0:
            break
        step = float((slope * (candidate - here).nan_to_num(0.0, 0.0, 0.0)).sum()) / size
        for shorter in (1.0, 0.25, 0.05, 0.01):
            there = value(position + shorter * step)
            if there is not None and _sum_squared_residual(candidate - there) < error:
                break
        else:
            break
        position, here, error = (
            position + shorter * step,
            there,
            _sum_squared_residual(candidate - there),
        )
        if abs(shorter * step) <= _SETTLED * max(1e-3, abs(position)):
            break
    return position, error


def _sum_squared_residual(residual: Tensor) -> float:
    return float(residual.nan_to_num(0.0, 0.0, 0.0).square().sum())


# --- Which numbers an operator has ----------------------------------------------------------------


def unknown_numbers(step: Step) -> Iterator[Unknown]:
    """The numbers of an operator that may be wrong."""
    for name, value in step.values.items():
        is_added = step.name == "add" and name == "other" and isinstance(value, float)
        if name in EPSILONS or (is_added and 0 < value <= LARGEST_EPS):
            right = torch.finfo(torch.float32).eps if value is None else value
            yield Unknown(partial(_other_eps, name, right), _EPS_STARTS, logarithmic=True, most=1e3)
        elif name == "scale" and value is None and "query" in step.values:
            right = 1 / math.sqrt(step.values["query"].shape[-1])
            yield Unknown(partial(_other_number, step.name, name, right), (right,))
        elif name in ("attn_mask", "attn_bias") and isinstance(value, torch.Tensor):
            if value.is_floating_point():
                yield Unknown(partial(_with_mask_factor, name), (0.5, 1.0))
        elif name == "alpha" and not isinstance(step.values.get("other"), torch.Tensor | None):
            continue  # the factor on a number is that number
        elif _is_number(name, value) and step.name not in _ONE_NUMBER:
            starts = tuple(dict.fromkeys((float(value), 0.1, 1.0)))
            yield Unknown(partial(_other_number, step.name, name, float(value)), starts)
    yield from _limited_scores(step)
    yield from _limited_operands(step)
    yield from (Unknown(leak, (0.1,)) for leak in (leak_of(step),) if leak is not None)
    exponent = step.values.get("exponent")
    if step.name in _ROOTS or isinstance(exponent, float):
        yield Unknown(partial(_with_constant, "self"), (1e-3, 1e-6, 0.0), most=_MOST_ADDED)
    if step.name == "div" and isinstance(step.values["other"], torch.Tensor):
        yield Unknown(partial(_with_constant, "other"), (1e-3, 1e-6, 0.0), most=_MOST_ADDED)
    if step.name in _BENT:
        yield Unknown(_with_factor, (0.5, 1.0, 2.0, 0.02))
    if step.name in _MOVED:
        yield Unknown(_with_offset, (0.1, -0.1))


def _limited_scores(step: Step) -> Iterator[Unknown]:
    if is_attention(step):
        yield Unknown(capped_scores, (3.0, 30.0), logarithmic=True)
        yield Unknown(limited_scores, (0.5, 2.0), logarithmic=True)
    if step.name == "softmax":
        yield Unknown(partial(_with_cap, "self"), (3.0, 30.0), logarithmic=True)
    if is_attention(step) or step.name == "softmax":
        yield Unknown(_smooth_weights, (0.1, 0.5), most=1.0)


def _with_cap(name: str, number: float) -> Variation:
    sentence = f"{name} is capped at {number:.4g} by tanh"
    change = with_altered(name, partial(cap_scores, cap=number))
    return Variation(PatternKind.OTHER_FUNCTION, sentence, change)


def _smooth_weights(number: float) -> Variation:
    sentence = f"{number:.4g} of each row is shared equally by all of its elements"
    change = partial(softmax_with, smoothed_weights(number))
    return Variation(PatternKind.OTHER_FUNCTION, sentence, change)


# How far the limits are apart that are tried first: shares of the elements beyond them.
_BEYOND = (0.0, 0.02, 0.1, 0.25, 0.5, 0.75, 0.95)
# A limit near to the right one explains a part of the error.
_NEARER = 0.8


def _limited_operands(step: Step) -> Iterator[Unknown]:
    """Limits of an operand; of a function of each element, the result shows them."""
    if torch.Tag.pointwise in step.operator.tags:
        return
    for name, value in step.values.items():
        is_number = isinstance(value, torch.Tensor) and value.is_floating_point()
        if not is_number or value.numel() < _FEWEST_LIMITED or "mask" in name:
            continue
        sizes = widen(value).flatten()
        for words, (of, limit) in _LIMITS.items():
            places = torch.tensor([1.0 - share for share in _BEYOND], dtype=torch.float64)
            every = of(sizes)
            some = every[:: -(-len(every) // _MOST_SORTED)]
            starts = tuple(torch.quantile(some, places).tolist())
            if math.isfinite(sum(starts)) and starts[0] > starts[1]:
                variation = partial(_with_limit, name, words, limit)
                yield Unknown(variation, starts, is_scanned=True)


# A limit of fewer elements is another number.
_FEWEST_LIMITED = 8
# So many elements are enough to see how large they are.
_MOST_SORTED = 1 << 14
_LIMITS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor, float], Tensor]]] = {
    "at -{0:.7g} and {0:.7g}": (torch.abs, lambda x, most: x.clamp(-abs(most), abs(most))),
    "above {0:.7g}": (torch.clone, lambda x, most: x.clamp(max=most)),
    "below -{0:.7g}": (torch.neg, lambda x, most: x.clamp(min=-most)),
}


def _is_number(name: str, value: Any) -> bool:
    if isinstance(value, bool) or name in _NO_NUMBERS or name == "other":
        return False
    return isinstance(value, float) or (isinstance(value, int) and name in NUMBERS)


def _other_eps(name: str, right: float, number: float) -> Variation:
    sentence = f"eps is {number:.7g} instead of {right:.3g}"
    return Variation(PatternKind.EPS, sentence, with_argument(name, number))


def _other_number(operator: str, name: str, right: float, number: float) -> Variation:
    kind = kind_of_number(operator, name)
    if kind is PatternKind.FACTOR and abs(number) < _NOTHING:
        sentence = f"what {name} multiplies is left out"
        return Variation(PatternKind.MISSING_OPERAND, sentence, with_argument(name, 0.0))
    kind = PatternKind.MASK if operator == "masked_fill" else kind
    sentence = f"{name} is {number:.7g} instead of {right:.7g}"
    return Variation(kind, sentence, with_argument(name, number))


def _with_constant(name: str, number: float) -> Variation:
    way = "added to" if number > 0 else "missing in"
    sentence = f"eps ({abs(number):.7g}) is {way} the argument"
    return Variation(PatternKind.EPS, sentence, with_altered(name, lambda value: value + number))


def _with_limit(
    name: str, words: str, limit: Callable[[Tensor, float], Tensor], number: float
) -> Variation:
    sentence = f"{name} is clipped {words.format(number)}".replace("--", "")
    change = with_altered(name, lambda value: limit(value, number))
    return Variation(PatternKind.CLIPPED, sentence, change)


def _with_mask_factor(name: str, number: float) -> Variation:
    sentence = f"what is added to the scores is multiplied by {number:.7g}"
    kind = PatternKind.MASK if number == 0 else PatternKind.FACTOR
    return Variation(kind, sentence, with_factor(name, number))


def _with_factor(number: float) -> Variation:
    if abs(number) < _NEARLY_NOTHING:
        sentence = "the same for every argument, as for an argument of 0"
        return Variation(PatternKind.CONSTANT, sentence, with_altered("self", torch.zeros_like))
    sentence = f"the argument is multiplied by {number:.7g}"
    return Variation(PatternKind.FACTOR, sentence, with_factor("self", number))


def _with_offset(number: float) -> Variation:
    way = "added to" if number > 0 else "subtracted from"
    sentence = f"{abs(number):.7g} is {way} the argument"
    return Variation(PatternKind.OFFSET, sentence, with_altered("self", lambda x: x + number))
