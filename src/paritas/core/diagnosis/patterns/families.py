"""Operators by family, written out as a formula with a mistake that no argument can express."""

from __future__ import annotations

import itertools
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from paritas.core.diagnosis.patterns.attention import (
    attention_variations,
    is_attention,
    softmax_variations,
)
from paritas.core.diagnosis.patterns.convolutions import convolution_variations
from paritas.core.diagnosis.patterns.derivatives import derivative_variations
from paritas.core.diagnosis.patterns.functions import COMPARISONS, function_variations
from paritas.core.diagnosis.patterns.layouts import layout_variations
from paritas.core.diagnosis.patterns.letters import letter_variations
from paritas.core.diagnosis.patterns.losses import loss_variations
from paritas.core.diagnosis.patterns.norms import norm_variations
from paritas.core.diagnosis.patterns.roundings import reciprocal_variations
from paritas.core.diagnosis.patterns.selections import selection_variations
from paritas.core.diagnosis.patterns.substitutions import (
    limit_variations,
    substitution_variations,
)
from paritas.core.diagnosis.patterns.sums import sum_variations
from paritas.core.diagnosis.patterns.variations import Variation
from paritas.core.diagnosis.patterns.windows import window_variations
from paritas.core.results.findings import PatternKind
from paritas.core.torch_private.operators import count_results

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from paritas.core.diagnosis.calls import Step


def family_variations(step: Step) -> Iterator[Variation]:
    """The mistakes that are known of the operator's family."""
    name = step.name
    if is_attention(step):
        yield from attention_variations(step)
    if name in ("softmax", "log_softmax"):
        yield from softmax_variations(step)
    yield from sum_variations(step)
    yield from norm_variations(step)
    if name in ("weight_norm", "weight_norm_interface"):
        yield from _weight_norm_variations(step)
    if name in ("convolution", "convolution_backward"):
        yield from convolution_variations(step)
    if name in ("constant_pad_nd", "glu") or name.startswith("upsample"):
        yield from layout_variations(step)
    yield from selection_variations(step)
    if name == "einsum":
        yield from letter_variations(step)
    yield from loss_variations(step)
    if name == "native_layer_norm_backward":
        yield from _norm_gradient_variations()
    if name in ("softmax_backward_data", "threshold_backward"):
        yield from _gradient_variations(name)
    if name in ("slice_backward", "select_backward"):
        sentence = f"the gradient is given to every place along axis {step.values['dim']}"
        yield Variation(PatternKind.COPY, sentence, _given_to_all)
    if name in ("rsqrt", "sqrt", "reciprocal"):
        yield from _root_variations()
    yield from function_variations(step)
    yield from derivative_variations(step)
    yield from substitution_variations(step)
    yield from limit_variations(step)
    yield from window_variations(step)
    yield from _exchanged_results(step)
    yield from reciprocal_variations(step)


def _with_first(formula: Callable[[Step], Tensor]) -> Callable[[Step], Any]:
    return lambda step: step.with_first(formula(step))


# --- Several results ------------------------------------------------------------------------------


def _exchanged_results(step: Step) -> Iterator[Variation]:
    """One of several results in the place of another one: the bias's gradient for the weight's."""
    if count_results(step.operator) == 1:
        return
    results = {
        number: value
        for number, value in enumerate(step.run())
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel() > 1
    }
    for position, other in itertools.permutations(results, 2):
        if results[position].shape == results[other].shape:
            sentence = f"result {other} is returned in the place of result {position}"
            change = partial(_with_result, place=position, other=other)
            yield Variation(PatternKind.WRONG_INDEX, sentence, change)


def _with_result(step: Step, place: int, other: int) -> Any:
    results = list(step.run())
    results[place] = results[other]
    return tuple(results)


# --- Weight norm ------------------------------------------------------------------------


def _weight_norm_variations(step: Step) -> Iterator[Variation]:
    """Another length that the direction is divided by, or none."""
    v, dim = step.values["v"], step.values["dim"] % step.values["v"].dim()
    kept_axes = tuple(each_axis for each_axis in range(v.dim()) if each_axis != dim)
    axes = {tuple(range(v.dim())): "the whole of v"}
    for axis in kept_axes:
        others = tuple(other_axis for other_axis in range(v.dim()) if other_axis != axis)
        axes[others] = f"each slice along axis {axis}"
        axes[(axis,)] = f"each line along axis {axis}"
    for dims, words in axes.items():
        if dims != kept_axes:
            sentence = f"v is divided by the length of {words}, not of each slice along axis {dim}"
            yield Variation(
                PatternKind.WRONG_AXIS, sentence, _with_first(partial(_weight_norm, dims=dims))
            )
    for power, words in ((1.0, "the sum of magnitudes"), (torch.inf, "the largest magnitude")):
        sentence = f"v is divided by {words} of each slice, not by its length"
        change = partial(_weight_norm, dims=kept_axes, power=power)
        yield Variation(PatternKind.STATISTICS, sentence, _with_first(change))
    for length, words in (
        (lambda value: value.square(), "the square of its length"),
        (lambda value: value.sqrt(), "the root of its length"),
    ):
        sentence = f"each slice of v is divided by {words}"
        change = partial(_weight_norm, dims=kept_axes, bend=length)
        yield Variation(PatternKind.STATISTICS, sentence, _with_first(change))
    for sentence, compute in (
        ("v is not divided by its length", lambda step: step.values["v"] * step.values["g"]),
        ("v is not multiplied by g", lambda step: _weight_norm(step, kept_axes, scaled=False)),
    ):
        yield Variation(PatternKind.MISSING_OPERAND, sentence, _with_first(compute))


def _weight_norm(
    step: Step,
    dims: tuple[int, ...],
    *,
    power: float = 2.0,
    bend: Callable[[Tensor], Tensor] = lambda value: value,
    scaled: bool = True,
) -> Tensor:
    v, g = step.values["v"], step.values["g"]
    length = torch.linalg.vector_norm(v, power, dims, keepdim=True)
    value: Tensor = v / bend(length) * (g if scaled else 1.0)
    return value


# --- Losses, gradients --------------------------------------------------------------


def _gradient_variations(name: str) -> Iterator[Variation]:
    if name == "threshold_backward":
        for word, compute in dict(COMPARISONS.values()).items():
            sentence = f"the gradient passes where the input is {word} the threshold, not >"
            yield Variation(PatternKind.MASK, sentence, partial(_pass_gradient, compute=compute))
        return
    sentence = "the sum over the row is left out of the gradient"
    yield Variation(PatternKind.MISSING_OPERAND, sentence, _gradient_without_sum)
    sentence = "the gradient is that of log_softmax"
    yield Variation(PatternKind.OTHER_FUNCTION, sentence, _gradient_of_logarithm)
    sentence = "only the diagonal of the derivative counts"
    yield Variation(PatternKind.MISSING_OPERAND, sentence, _diagonal_gradient)
    sentence = "the gradient is not multiplied by the softmax"
    yield Variation(PatternKind.MISSING_OPERAND, sentence, _gradient_without_factor)


def _gradient_of_logarithm(step: Step) -> Tensor:
    grad, output, dim = (step.values[name] for name in ("grad_output", "output", "dim"))
    value: Tensor = grad - output * grad.sum(dim, keepdim=True)
    return value


def _diagonal_gradient(step: Step) -> Tensor:
    grad, output = step.values["grad_output"], step.values["output"]
    value: Tensor = grad * output * (1 - output)
    return value


def _norm_gradient_variations() -> Iterator[Variation]:
    for sentence, centred, scaled in (
        ("the gradient through the mean is left out", False, True),
        ("the gradient through the deviation is left out", True, False),
        ("the gradients through mean and deviation are left out", False, False),
    ):
        change = partial(_norm_gradient, centred=centred, scaled=scaled)
        yield Variation(PatternKind.MISSING_OPERAND, sentence, _with_first(change))


def _norm_gradient(step: Step, *, centred: bool, scaled: bool) -> Tensor:
    values = step.values
    grad, x, weight = values["grad_out"], values["input"], values["weight"]
    dims = tuple(range(x.dim() - len(values["normalized_shape"]), x.dim()))
    grad = grad if weight is None else grad * weight
    normal = (x - values["mean"]) * values["rstd"]
    result = grad - grad.mean(dims, keepdim=True) if centred else grad
    if scaled:
        result = result - normal * (grad * normal).mean(dims, keepdim=True)
    value: Tensor = result * values["rstd"]
    return value


def _gradient_without_sum(step: Step) -> Tensor:
    value: Tensor = step.values["grad_output"] * step.values["output"]
    return value


def _gradient_without_factor(step: Step) -> Tensor:
    grad, output, dim = (step.values[name] for name in ("grad_output", "output", "dim"))
    value: Tensor = grad - (grad * output).sum(dim, keepdim=True)
    return value


def _pass_gradient(step: Step, compute: Callable[..., Tensor]) -> Tensor:
    passes = compute(step.values["self"], step.values["threshold"])
    return torch.where(passes, step.values["grad_output"], 0.0)


def _given_to_all(step: Step) -> Tensor:
    value = step.run()
    total: Tensor = value.sum(step.values["dim"], keepdim=True)
    return total.expand(value.shape)


def _root_variations() -> Iterator[Variation]:
    """The root of a variance that already has its eps."""
    for eps in (1e-12, 1e-8, 1e-6, 1e-5, 1e-3):

        def moved(step: Step, eps: float = eps) -> Any:
            outer = step.run(self=step.values["self"] - eps)
            return outer + eps if step.name == "sqrt" else 1 / (1 / outer + eps)

        sentence = f"eps ({eps:g}) is added to the root, not to what is under it"
        yield Variation(PatternKind.EPS, sentence, moved)
        for by, words in ((-eps, "left out"), (eps, "added twice")):

            def shifted(step: Step, by: float = by) -> Any:
                return step.run(self=step.values["self"] + by)

            yield Variation(PatternKind.EPS, f"eps ({eps:g}) is {words}", shifted)
