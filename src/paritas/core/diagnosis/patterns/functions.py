"""Another function instead of the right one: silu for gelu, < for <=, maximum for minimum."""

from __future__ import annotations

import math
import operator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from paritas.core.diagnosis.patterns.selections import OTHER_TIES
from paritas.core.diagnosis.patterns.steps import (
    check_varied,
    first_of,
    with_altered,
    with_factor,
    with_formula,
)
from paritas.core.diagnosis.patterns.sums import negate_alpha
from paritas.core.diagnosis.patterns.variations import LARGEST_EPS, Variation
from paritas.core.results.findings import PatternKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from paritas.core.diagnosis.calls import Step

_F = torch.nn.functional


def _get_functions(module: Any, names: str) -> dict[str, Callable[..., Tensor]]:
    """Functions of a module by their names."""
    return {name: getattr(module, name) for name in names.split()}


UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    **_get_functions(
        torch, "exp exp2 expm1 log log2 log10 log1p sqrt rsqrt reciprocal square abs neg"
    ),
    **_get_functions(torch, "sin cos tan tanh sigmoid erf erfc atan relu"),
    **_get_functions(_F, "relu6 silu gelu"),
    "tanh gelu": lambda x: _F.gelu(x, approximate="tanh"),
    "x * sigmoid(1.702 x)": lambda x: x * torch.sigmoid(1.702 * x),
    **_get_functions(
        _F, "elu selu leaky_relu softplus softsign hardswish hardsigmoid hardtanh mish"
    ),
    "log_sigmoid": _F.logsigmoid,
    **_get_functions(
        torch, "floor ceil round trunc sign frac asin acos sinh cosh asinh acosh atanh lgamma"
    ),
    **_get_functions(_F, "celu tanhshrink softshrink hardshrink"),
    "the normal distribution function": torch.special.ndtr,
}
_UNARY_NAMES = {"log_sigmoid_forward": "log_sigmoid"}
_BINARY = _get_functions(torch, "add sub mul div maximum minimum pow fmod remainder atan2")
COMPARISONS: dict[str, tuple[str, Callable[..., Tensor]]] = {
    "lt": ("<", torch.lt),
    "le": ("<=", torch.le),
    "gt": (">", torch.gt),
    "ge": (">=", torch.ge),
    "eq": ("==", torch.eq),
    "ne": ("!=", torch.ne),
}
_LOGICAL: dict[str, tuple[str, Callable[..., Tensor]]] = {
    "bitwise_and": ("and", torch.logical_and),
    "logical_and": ("and", torch.logical_and),
    "bitwise_or": ("or", torch.logical_or),
    "logical_or": ("or", torch.logical_or),
    "bitwise_xor": ("xor", torch.logical_xor),
    "logical_xor": ("xor", torch.logical_xor),
}
_BY_SIZE = {"maximum": "larger", "minimum": "smaller"}
# Operators of the same arguments.
_SIBLINGS = {
    **{f"upsample_nearest{rank}d": f"_upsample_nearest_exact{rank}d" for rank in (1, 2, 3)},
    **{f"upsample_nearest_exact{rank}d": f"upsample_nearest{rank}d" for rank in (1, 2, 3)},
    "upsample_bilinear2d": "upsample_bicubic2d",
    "upsample_bicubic2d": "upsample_bilinear2d",
    "avg_pool2d": "max_pool2d",
    "avg_pool1d": "max_pool1d",
    "max_pool2d_with_indices": "avg_pool2d",
}
_INNER = {
    math.log(2): "ln 2",
    math.log2(math.e): "log2 e",
    2.0: "2",
    0.5: "1 / 2",
    math.sqrt(2): "sqrt(2)",
    math.sqrt(0.5): "1 / sqrt(2)",
}
# What else may be done with f(x), or with x before.
_COMPOSED: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]] = {
    "{} is applied twice": lambda f, x: f(f(x)),
    "the result of {} is multiplied by its argument": lambda f, x: f(x) * x,
    "the result of {} is divided by its argument": lambda f, x: f(x) / x,
    "the argument of {} is added to its result": lambda f, x: f(x) + x,
    "1 minus {}": lambda f, x: 1 - f(x),
    "1 over {}": lambda f, x: 1 / f(x),
    "the square of {}": lambda f, x: f(x).square(),
    "the absolute value of {}": lambda f, x: f(x).abs(),
    "{} of the absolute value": lambda f, x: f(x.abs()),
}
# How a cast to whole numbers may round; torch cuts off.
_TO_WHOLE: dict[str, Callable[[Tensor], Tensor]] = {
    "rounded to the nearest": torch.round,
    "rounded down": torch.floor,
    "rounded up": torch.ceil,
}


def function_variations(step: Step) -> Iterator[Variation]:
    """Functions of the same arguments that are mistaken for the operator."""
    name = _UNARY_NAMES.get(step.name, step.name)
    kind = PatternKind.OTHER_FUNCTION
    exponent = step.values.get("exponent")
    if (name in UNARY or isinstance(exponent, int | float)) and "self" in step.values:
        yield from _unary_variations(name)
    if name in _BINARY:
        for other, compute in _BINARY.items():
            if other != name:
                is_sign = {name, other} == {"add", "sub"}
                yield Variation(
                    PatternKind.SIGN if is_sign else kind,
                    f"{other} instead of {name}",
                    negate_alpha if is_sign else partial(_binary, compute=compute),
                )
        yield from _operand_changes(step)
    if name in _BY_SIZE:
        sentence = f"the operand of the {_BY_SIZE[name]} size, whatever its sign"
        yield Variation(kind, sentence, _chosen_by_size)
    if name == "where":
        for word in ("maximum", "minimum"):
            sentence = f"the {word} of the two branches, whatever the condition"
            yield Variation(kind, sentence, partial(_of_branches, compute=_BINARY[word]))
    if name == "to_copy":
        yield from _cast_variations(step)
    if name in _SIBLINGS:
        sibling = getattr(torch.ops.aten, _SIBLINGS[name])
        sentence = f"{_SIBLINGS[name].strip('_')} instead of {name}"
        yield Variation(kind, sentence, partial(_sibling, function=sibling))
    if name in COMPARISONS:
        yield from _comparison_variations(name)
    if name in _LOGICAL:
        yield from _logical_variations(name)


def _unary_variations(name: str) -> Iterator[Variation]:
    for words, compute in OTHER_TIES.items() if name == "round" else ():
        sentence = f"halves are rounded {words}, not to the even number"
        yield Variation(PatternKind.TIE_BREAKING, sentence, _of_argument(compute))
    for other, compute in UNARY.items():
        if other != name:
            sentence = f"{other} instead of {name}"
            yield Variation(PatternKind.OTHER_FUNCTION, sentence, _of_argument(compute))
    if name == "neg":
        return
    for sentence, compose in _COMPOSED.items():
        change = partial(_compose_step, compose=compose)
        yield Variation(PatternKind.OTHER_FUNCTION, sentence.format(name), change)
    if name == "pow":
        return
    sentence = f"the argument of {name} is negated"
    yield Variation(PatternKind.SIGN, sentence, with_factor("self", -1.0))
    for factor, words in _INNER.items():
        sentence = f"the argument of {name} is multiplied by {words}"
        yield Variation(PatternKind.FACTOR, sentence, with_factor("self", factor))


def _operand_changes(step: Step) -> Iterator[Variation]:
    first, second = list(step.values)[:2]
    for left_out, operand_name in ((second, first), (first, second)):
        if isinstance(step.values[operand_name], torch.Tensor):
            change = partial(_one_operand, name=operand_name)
            sentence = f"{left_out} is left out"
            number = step.values[left_out]
            is_eps = isinstance(number, float) and step.name == "add" and number <= LARGEST_EPS
            kind = PatternKind.EPS if is_eps else PatternKind.MISSING_OPERAND
            yield Variation(kind, sentence, change)
    if step.name in ("mul", "div"):
        sentence = f"{second} is applied twice"
        yield Variation(PatternKind.FACTOR, sentence, lambda step: step.run(self=step.run()))


def _one_operand(step: Step, name: str) -> Tensor:
    value: Tensor = step.values[name].expand_as(step.run())
    return value


def _chosen_by_size(step: Step) -> Tensor:
    left, right = list(step.values.values())[:2]
    is_left = left.abs() > right.abs()
    return torch.where(is_left if step.name == "maximum" else ~is_left, left, right)


def _of_branches(step: Step, compute: Callable[..., Tensor]) -> Tensor:
    return compute(torch.as_tensor(step.values["self"]), torch.as_tensor(step.values["other"]))


def _cast_variations(step: Step) -> Iterator[Variation]:
    value, dtype = step.values["self"], step.values.get("dtype")
    if dtype is None or dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
        return
    if value.is_floating_point():
        for words, compute in _TO_WHOLE.items():
            sentence = f"{words}, not cut off"
            yield Variation(PatternKind.OTHER_FUNCTION, sentence, with_altered("self", compute))
    limits = torch.iinfo(dtype)
    saturate = partial(torch.clamp, min=limits.min, max=limits.max)
    sentence = f"values beyond the range of {str(dtype).removeprefix('torch.')} are clipped to it"
    yield Variation(PatternKind.CLIPPED, sentence, with_altered("self", saturate))


def _compose_step(
    step: Step, compose: Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]
) -> Any:
    return step.with_first(compose(lambda x: first_of(step.run(self=x)), step.values["self"]))


def _logical_variations(name: str) -> Iterator[Variation]:
    right = _LOGICAL[name][0]
    for word, compute in dict(_LOGICAL.values()).items():
        if word != right:
            sentence = f"the masks are joined with {word} instead of {right}"
            yield Variation(PatternKind.MASK, sentence, partial(_binary, compute=compute))


def _comparison_variations(name: str) -> Iterator[Variation]:
    sign = COMPARISONS[name][0]
    for other, (word, compute) in COMPARISONS.items():
        if other != name:
            sentence = f"the comparison is {word} instead of {sign}"
            yield Variation(PatternKind.MASK, sentence, partial(_binary, compute=compute))
    for by in (1, -1):
        size = "large" if by > 0 else "small"
        sentence = f"the mask is off by one: the right side of {sign} is one too {size}"
        change = with_altered("other", partial(operator.add, by))
        yield Variation(PatternKind.MASK, sentence, change)


def _sibling(step: Step, function: Callable[..., Tensor]) -> Any:
    # Pools have the first four arguments in common.
    count = 4 if "pool" in step.name else 5
    return step.with_first(function(*list(step.values.values())[:count]))


def _of_argument(compute: Callable[[Tensor], Tensor]) -> Callable[[Step], Any]:
    # Many functions round to one and the same number, which says nothing about the function.
    return with_formula(lambda step: check_varied(compute(step.values["self"])))


def _binary(step: Step, compute: Callable[..., Tensor]) -> Tensor:
    left, right = list(step.values.values())[:2]
    if isinstance(left, torch.Tensor) and isinstance(right, float | int):
        right = left.new_tensor(right)
    return compute(left, right)
