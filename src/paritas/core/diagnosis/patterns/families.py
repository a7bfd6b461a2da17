"""Operators by family, written out as a formula with a mistake that no argument can express."""

from __future__ import annotations

import itertools
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from paritas.core.diagnosis.calls import step_names
from paritas.core.diagnosis.patterns.attention import (
    attention_variations,
    is_attention,
    softmax_variations,
)
from paritas.core.diagnosis.patterns.convolutions import convolution_variations
from paritas.core.diagnosis.patterns.derivatives import derivative_variations
from paritas.core.diagnosis.patterns.functions import COMPARISONS, function_variations
from paritas.core.diagnosis.patterns.inner import moved_eps
from paritas.core.diagnosis.patterns.layouts import (
    layout_variations,
    letter_variations,
    window_variations,
)
from paritas.core.diagnosis.patterns.losses import loss_variations
from paritas.core.diagnosis.patterns.norms import cosine_variations, norm_variations
from paritas.core.diagnosis.patterns.quantising import reciprocal_variations
from paritas.core.diagnosis.patterns.selections import selection_variations
from paritas.core.diagnosis.patterns.steps import with_formula, with_swapped
from paritas.core.diagnosis.patterns.sums import sum_variations
from paritas.core.diagnosis.patterns.variations import Variation, argument_variations
from paritas.core.results.findings import PatternKind
from paritas.core.torch_private.operators import count_results

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from paritas.core.diagnosis.calls import FunctionStep, Step


def family_variations(step: Step) -> Iterator[Variation]:
    """The mistakes that are known of the operator's family."""
    name = step.name
    if is_attention(step):
        yield from attention_variations(step)
    if name in step_names("softmaxes"):
        yield from softmax_variations(step)
    yield from sum_variations(step)
    yield from norm_variations(step)
    if name in ("weight_norm", "weight_norm_interface"):
        yield from _weight_norm_variations(step)
    if name in step_names("convolution", "convolution backward"):
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
    if name in step_names("roots and reciprocals"):
        for eps in _USUAL_EPS:
            yield from moved_eps(eps, is_guess=True)
    yield from function_variations(step)
    yield from derivative_variations(step)
    yield from substitution_variations(step)
    yield from limit_variations(step)
    yield from window_variations(step)
    yield from _exchanged_results(step)
    yield from reciprocal_variations(step)


# A root of a variance may already have one of these.
_USUAL_EPS = (1e-12, 1e-8, 1e-6, 1e-5, 1e-3)


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
            change = with_formula(partial(_weight_norm, dims=dims))
            yield Variation(PatternKind.WRONG_AXIS, sentence, change)
    for power, words in ((1.0, "the sum of magnitudes"), (torch.inf, "the largest magnitude")):
        sentence = f"v is divided by {words} of each slice, not by its length"
        change = with_formula(partial(_weight_norm, dims=kept_axes, power=power))
        yield Variation(PatternKind.STATISTICS, sentence, change)
    for length, words in (
        (lambda value: value.square(), "the square of its length"),
        (lambda value: value.sqrt(), "the root of its length"),
    ):
        sentence = f"each slice of v is divided by {words}"
        change = with_formula(partial(_weight_norm, dims=kept_axes, bend=length))
        yield Variation(PatternKind.STATISTICS, sentence, change)
    for sentence, compute in (
        ("v is not divided by its length", lambda step: step.values["v"] * step.values["g"]),
        ("v is not multiplied by g", lambda step: _weight_norm(step, kept_axes, scaled=False)),
    ):
        yield Variation(PatternKind.MISSING_OPERAND, sentence, with_formula(compute))


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
    for kind, sentence, compute in _SOFTMAX_GRADIENTS:
        yield Variation(kind, sentence, partial(_softmax_gradient, compute=compute))


def _softmax_gradient(step: Step, compute: Callable[[Tensor, Tensor, int], Tensor]) -> Tensor:
    return compute(*(step.values[name] for name in ("grad_output", "output", "dim")))


_SOFTMAX_GRADIENTS: tuple[tuple[PatternKind, str, Callable[[Tensor, Tensor, int], Tensor]], ...] = (
    (
        PatternKind.MISSING_OPERAND,
        "the sum over the row is left out of the gradient",
        lambda grad, output, _: grad * output,
    ),
    (
        PatternKind.OTHER_FUNCTION,
        "the gradient is that of log_softmax",
        lambda grad, output, dim: grad - output * grad.sum(dim, keepdim=True),
    ),
    (
        PatternKind.MISSING_OPERAND,
        "only the diagonal of the derivative counts",
        lambda grad, output, _: grad * output * (1 - output),
    ),
    (
        PatternKind.MISSING_OPERAND,
        "the gradient is not multiplied by the softmax",
        lambda grad, output, dim: grad - (grad * output).sum(dim, keepdim=True),
    ),
)


def _norm_gradient_variations() -> Iterator[Variation]:
    for sentence, centred, scaled in (
        ("the gradient through the mean is left out", False, True),
        ("the gradient through the deviation is left out", True, False),
        ("the gradients through mean and deviation are left out", False, False),
    ):
        change = with_formula(partial(_norm_gradient, centred=centred, scaled=scaled))
        yield Variation(PatternKind.MISSING_OPERAND, sentence, change)


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


def _pass_gradient(step: Step, compute: Callable[..., Tensor]) -> Tensor:
    passes = compute(step.values["self"], step.values["threshold"])
    return torch.where(passes, step.values["grad_output"], 0.0)


def _given_to_all(step: Step) -> Tensor:
    value = step.run()
    total: Tensor = value.sum(step.values["dim"], keepdim=True)
    return total.expand(value.shape)


# --- Another value in the place of the right one: an operand used twice, a limit exceeded ---------


# Of more operands, only these are tried in the place of each other.
_MOST_OPERANDS = 5


def _operands(step: Step) -> dict[str, Tensor]:
    operands_by_name = {
        name: value
        for name, value in step.values.items()
        if isinstance(value, torch.Tensor) and value.is_floating_point()
    }
    return dict(itertools.islice(operands_by_name.items(), _MOST_OPERANDS))


# --- Operands -------------------------------------------------------------------------------------


def substitution_variations(step: Step) -> Iterator[Variation]:
    """One operand in the place of another as well, which is then used nowhere."""
    for used, lost in itertools.permutations(_operands(step), 2):
        sentence = f"{used} is used in the place of {lost}, too"
        change = partial(_with_substitute, used=used, lost=lost)
        yield Variation(PatternKind.MISSING_OPERAND, sentence, change)


def _with_substitute(step: Step, used: str, lost: str) -> Any:
    result = step.run(**{lost: step.values[used]})
    if not isinstance(result, torch.Tensor):
        return result
    if result.numel() and bool((result == result.flatten()[0]).all()):
        raise ValueError("one value everywhere has many reasons")
    # The lost operand may be the one with the larger shape.
    return result.expand_as(step.run())


def function_call_variations(step: FunctionStep) -> Iterator[Variation]:
    """A function of several operators with other arguments, or with two of them exchanged."""
    for left, right in itertools.combinations(_operands(step), 2):
        sentence = f"{left} and {right} are swapped"
        yield Variation(PatternKind.SWAPPED_OPERANDS, sentence, with_swapped(left, right))
    yield from substitution_variations(step)
    yield from loss_variations(step)
    yield from cosine_variations(step)
    yield from argument_variations(step, tensors=False)


# --- Limits ---------------------------------------------------------------------------------------

# Limits with a least value.
_LIMITING = (step_names("limits") - {"clamp_max"}) | {"hardtanh"}
# A least value that is not larger keeps a divisor from being 0.
_LARGEST_EPS = 0.1


def limit_variations(step: Step) -> Iterator[Variation]:
    """A limit that is added, or beyond which values wrap around."""
    if step.name not in _LIMITING:
        return
    least, most = (step.values.get(name, step.values.get(f"{name}_val")) for name in ("min", "max"))
    if not isinstance(least, int | float) or isinstance(most, torch.Tensor):
        return
    if most is None and 0 < least <= _LARGEST_EPS:
        sentence = f"{least:.7g} is added instead of being the least value"
        yield Variation(PatternKind.EPS, sentence, partial(_add_number, number=least))
    if most is None or most <= least:
        return
    sentence = f"values beyond {least:.7g} and {most:.7g} wrap around instead of being limited"
    widths = [(most - least, False)]
    if least == round(least) and most == round(most):  # a format has both limits
        widths += [(most - least + 1, is_cut) for is_cut in (False, True)]
    for width, is_cut in widths:
        change = partial(_wrap_into_range, least=least, width=width, is_cut=is_cut)
        yield Variation(PatternKind.WRAPPED, sentence, change)


def _add_number(step: Step, number: float) -> Any:
    return step.values["self"] + number


def _wrap_into_range(step: Step, least: float, width: float, *, is_cut: bool) -> Any:
    value = step.values["self"]
    value = value.trunc() if is_cut else value
    return (value - least) % width + least
