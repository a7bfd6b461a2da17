"""Gradients of pointwise functions: another derivative, or a part of the right one."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from paritas.core.diagnosis.patterns.functions import UNARY
from paritas.core.diagnosis.patterns.variations import Variation
from paritas.core.results.findings import PatternKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor

    from paritas.core.diagnosis.calls import Step

Derivatives = dict[str, "Callable[[Tensor], Tensor]"]


def _density(x: Tensor) -> Tensor:
    return (-x.square() / 2).exp() / math.sqrt(2 * math.pi)


def _of_silu(x: Tensor, slope: float = 1.0) -> Tensor:
    gate = torch.sigmoid(slope * x)
    return gate * (1 + slope * x * (1 - gate))


def _of_tanh_gelu(x: Tensor) -> Tensor:
    factor = math.sqrt(2 / math.pi)
    inner = (factor * (x + 0.044715 * x**3)).tanh()
    slope = factor * (1 + 3 * 0.044715 * x.square())
    return (1 + inner + x * (1 - inner.square()) * slope) / 2


def _of_mish(x: Tensor) -> Tensor:
    inner = torch.nn.functional.softplus(x).tanh()
    return inner + x * (1 - inner.square()) * x.sigmoid()


# By the input of the function.
_OF_INPUT: Derivatives = {
    "relu": lambda x: (x > 0).to(x),
    "leaky_relu": lambda x: torch.where(x > 0, torch.ones_like(x), 0.01),
    "gelu": lambda x: torch.special.ndtr(x) + x * _density(x),
    "tanh gelu": _of_tanh_gelu,
    "x * sigmoid(1.702 x)": partial(_of_silu, slope=1.702),
    "silu": _of_silu,
    "mish": _of_mish,
    "elu": lambda x: torch.where(x > 0, torch.ones_like(x), x.exp()),
    "softplus": torch.sigmoid,
    "tanh": lambda x: 1 - x.tanh().square(),
    "sigmoid": lambda x: x.sigmoid() * (1 - x.sigmoid()),
    "hardswish": lambda x: torch.where(x.abs() < 3, x / 3 + 0.5, (x > 0).to(x)),  # noqa: PLR2004
    "relu6": lambda x: ((x > 0) & (x < 6)).to(x),  # noqa: PLR2004
    "hardtanh": lambda x: (x.abs() < 1).to(x),
}
# Parts of a derivative, with what is left out.
_PARTS: Mapping[str, Derivatives] = {
    "gelu_backward": {
        "the derivative of the gate is left out": torch.special.ndtr,
        "the gate is left out of the derivative": lambda x: x * _density(x),
        "the argument is left out of the derivative": lambda x: torch.special.ndtr(x) + _density(x),
    },
    "silu_backward": {
        "the derivative of the gate is left out": torch.sigmoid,
        "the argument is left out of the derivative": (lambda x: x.sigmoid() * (2 - x.sigmoid())),
        "the gate is left out of the derivative": (lambda x: x * x.sigmoid() * (1 - x.sigmoid())),
    },
}
# By the result y of the function, with the words for it.
_OF_RESULT: Derivatives = {
    "1 - y * y, the derivative of tanh,": lambda y: 1 - y.square(),
    "y * (1 - y), the derivative of sigmoid,": lambda y: y * (1 - y),
    "1 - y": lambda y: 1 - y,
    "y": lambda y: y,
    "1 + y * y": lambda y: 1 + y.square(),
    "y * (1 + y)": lambda y: y * (1 + y),
    "(1 - y) ** 2": lambda y: (1 - y).square(),
    "the derivative of tanh at y": lambda y: 1 - y.tanh().square(),
    "the derivative of sigmoid at y": lambda y: y.sigmoid() * (1 - y.sigmoid()),
}
_BY_RESULT = frozenset({"tanh_backward", "sigmoid_backward"})


def derivative_variations(step: Step) -> Iterator[Variation]:
    """The mistakes in the gradient of a pointwise function."""
    name = step.name
    at = "output" if name in _BY_RESULT else "self"
    gradient, at_value = step.values.get("grad_output"), step.values.get(at)
    if not name.endswith("_backward") or not isinstance(gradient, torch.Tensor):
        return
    if not isinstance(at_value, torch.Tensor) or gradient.shape != at_value.shape:
        return
    right = name.removesuffix("_backward")
    for other, derivative in (_OF_RESULT if at == "output" else _OF_INPUT).items():
        called = "the derivative" if at == "output" else f"the derivative of {right}"
        sentence = f"{other} instead of {called}"
        sentence = sentence if at == "output" else f"the derivative of {sentence}"
        yield _instead(PatternKind.OTHER_FUNCTION, sentence, at, derivative)
    for sentence, derivative in _PARTS.get(name, {}).items():
        yield _instead(PatternKind.MISSING_OPERAND, sentence, at, derivative)
    yield _instead(PatternKind.MISSING_OPERAND, "the derivative is left out", at, torch.ones_like)
    sentence = "the gradient that comes in is left out"
    alone = lambda step: step.run(grad_output=torch.ones_like(step.values["grad_output"]))  # noqa: E731
    yield Variation(PatternKind.MISSING_OPERAND, sentence, alone)
    sentence = f"the derivative is taken at the negative of {at}"
    negated = lambda step: step.run(**{at: -step.values[at]})  # noqa: E731
    yield Variation(PatternKind.SIGN, sentence, negated)
    if at == "self" and (right in UNARY or right in _FORWARD):
        sentence = f"the derivative is taken at the result of {right}, not at its input"
        yield Variation(PatternKind.OTHER_FUNCTION, sentence, partial(_at_result, name=right))


# Functions whose backward kernels have another name, or that take further arguments.
_FORWARD: Derivatives = {"threshold": torch.relu}


def _at_result(step: Step, name: str) -> Any:
    values = step.values
    if name == "gelu":
        result = torch.nn.functional.gelu(values["self"], approximate=values["approximate"])
    else:
        result = (_FORWARD.get(name) or UNARY[name])(values["self"])
    return step.run(self=result)


def leak_of(step: Step) -> Callable[[float], Variation] | None:
    """The gradient times a number where it should be 0; None if it is 0 nowhere."""
    gradient, value = step.values.get("grad_output"), step.values.get("self")
    if not step.name.endswith("_backward") or not isinstance(value, torch.Tensor):
        return None
    if not isinstance(gradient, torch.Tensor) or gradient.shape != value.shape:
        return None
    right = step.run()
    if not isinstance(right, torch.Tensor) or right.shape != gradient.shape:
        return None
    is_stopped = (right == 0) & (gradient != 0)
    return _leaking if bool(is_stopped.any()) and not bool(is_stopped.all()) else None


def _leaking(number: float) -> Variation:
    def run(step: Step) -> Any:
        right = step.run()
        return torch.where(right == 0, number * step.values["grad_output"], right)

    sentence = f"where the derivative should be 0 it is {number:.7g}"
    return Variation(PatternKind.OTHER_FUNCTION, sentence, run)


def _instead(
    kind: PatternKind, sentence: str, at: str, derivative: Callable[[Tensor], Tensor]
) -> Variation:
    def change(step: Step) -> Any:
        return step.values["grad_output"] * derivative(step.values[at])

    return Variation(kind, sentence, change)
