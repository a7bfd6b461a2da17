"""Operators by family, written out as a formula with a mistake that no argument can express."""

from __future__ import annotations

import itertools
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from paritas.diagnosis.patterns.attention import attention_variations, is_attention
from paritas.diagnosis.patterns.functions import COMPARISONS, function_variations
from paritas.diagnosis.patterns.sums import left_out, sum_variations, words_of
from paritas.diagnosis.patterns.variations import Variation
from paritas.results.findings import PatternKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from paritas.diagnosis.calls import Step


def family_variations(step: Step) -> Iterator[Variation]:
    """The mistakes that are known of the operator's family."""
    name = step.name
    if is_attention(step):
        yield from attention_variations(step)
    yield from sum_variations(step)
    if name == "convolution":
        yield from _convolution_variations(step)
    if name.endswith("loss") or name.startswith("nll_loss"):
        yield from _loss_variations(step)
    if name == "native_layer_norm_backward":
        yield from _norm_gradient_variations()
    if name in ("softmax_backward_data", "threshold_backward"):
        yield from _gradient_variations(name)
    if name in ("rsqrt", "sqrt", "reciprocal"):
        yield from _root_variations()
    yield from function_variations(step)


def _with_first(formula: Callable[[Step], Tensor]) -> Callable[[Step], Any]:
    return lambda step: step.with_first(formula(step))


# --- Convolutions, losses, gradients --------------------------------------------------------------


def _convolution_variations(step: Step) -> Iterator[Variation]:
    weight = step.values["weight"]
    spatial = tuple(range(2, weight.dim()))

    def padded(step: Step, mode: str) -> Any:
        sides = [side for size in reversed(step.values["padding"]) for side in (size, size)]
        x = torch.nn.functional.pad(step.values["input"], sides, mode=mode)
        return step.run(input=x, padding=[0] * len(step.values["padding"]))

    def transposed(step: Step) -> Any:
        return step.run(weight=step.values["weight"].transpose(0, 1))

    said = "the kernel is flipped: a true convolution, not a correlation"
    flip = lambda step: step.run(weight=step.values["weight"].flip(spatial))  # noqa: E731
    yield Variation(PatternKind.PERMUTATION, said, flip)
    if any(step.values["padding"]):
        for mode in ("replicate", "reflect", "circular"):
            said = f"the padding is {mode!r}, not zeros"
            yield Variation(PatternKind.ARGUMENT, said, partial(padded, mode=mode))
    if not step.values["transposed"]:
        for axis, by in itertools.product(range(len(spatial)), (1, -1)):
            said = (
                f"the padding along axis {axis + 2} is off by one: more on one side than the other"
            )
            change = partial(_padded_unevenly, axis=axis, by=by)
            yield Variation(PatternKind.SHIFT, said, change)
    if weight.shape[0] == weight.shape[1]:
        said = "the kernel's input and output channels are swapped"
        yield Variation(PatternKind.SWAPPED_OPERANDS, said, transposed)
    for first, last in left_out(weight.shape[1]):
        some = f"{words_of(first, last)} {'channel is' if first + last == 1 else 'channels are'}"
        said = f"{some} left out of each sum over the {weight.shape[1]} input channels"
        change = partial(_without_weights, dim=1, first=first, last=last)
        yield Variation(PatternKind.PARTIAL_SUM, said, change)
    for dim in spatial:
        for first, last in left_out(weight.shape[dim]):
            some = f"{words_of(first, last)} of the kernel's {weight.shape[dim]} along axis {dim}"
            change = partial(_without_weights, dim=dim, first=first, last=last)
            yield Variation(PatternKind.PARTIAL_SUM, f"{some} left out", change)


def _padded_unevenly(step: Step, axis: int, by: int) -> Any:
    sides = [[size, size] for size in step.values["padding"]]
    sides[axis] = [sides[axis][0] + by, sides[axis][1] - by]
    flat = [side for pair in reversed(sides) for side in pair]
    x = torch.nn.functional.pad(step.values["input"], flat)
    return step.run(input=x, padding=[0] * len(sides))


def _without_weights(step: Step, dim: int, first: int, last: int) -> Any:
    weight = step.values["weight"].clone()
    weight.narrow(dim, 0, first).zero_()
    weight.narrow(dim, weight.shape[dim] - last, last).zero_()
    return step.run(weight=weight)


def _loss_variations(step: Step) -> Iterator[Variation]:
    if step.values.get("reduction") != 1:
        return
    first = next(one for one in step.values.values() if isinstance(one, torch.Tensor))
    target = step.values.get("target")
    counts = {"the batch": first.shape[0] if first.dim() else 1, "all elements": first.numel()}
    if isinstance(target, torch.Tensor):
        counts["all targets, also those to ignore"] = target.numel()
    for words, count in counts.items():
        said = f"the sum is divided by {count}, the size of {words}"
        change = partial(_divided_sum, count=count)
        yield Variation(PatternKind.WRONG_REDUCTION, said, change)


def _divided_sum(step: Step, count: int) -> Any:
    total = step.run(reduction=2)
    total = total if isinstance(total, torch.Tensor) else total[0]
    return step.with_first(total / count)


def _gradient_variations(name: str) -> Iterator[Variation]:
    if name == "threshold_backward":
        for word, compute in dict(COMPARISONS.values()).items():
            said = f"the gradient passes where the input is {word} the threshold, not >"
            yield Variation(PatternKind.MASK, said, partial(_passed, compute=compute))
        return
    said = "the sum over the row is left out of the gradient"
    yield Variation(PatternKind.MISSING_OPERAND, said, _gradient_without_sum)
    said = "the gradient is not multiplied by the softmax"
    yield Variation(PatternKind.MISSING_OPERAND, said, _gradient_without_factor)


def _norm_gradient_variations() -> Iterator[Variation]:
    for said, centred, scaled in (
        ("the gradient through the mean is left out", False, True),
        ("the gradient through the deviation is left out", True, False),
        ("the gradients through mean and deviation are left out", False, False),
    ):
        change = partial(_norm_gradient, centred=centred, scaled=scaled)
        yield Variation(PatternKind.MISSING_OPERAND, said, _with_first(change))


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


def _passed(step: Step, compute: Callable[..., Tensor]) -> Tensor:
    passes = compute(step.values["self"], step.values["threshold"])
    return torch.where(passes, step.values["grad_output"], 0.0)


def _root_variations() -> Iterator[Variation]:
    """The root of a variance that already has its eps."""
    for eps in (1e-12, 1e-8, 1e-6, 1e-5, 1e-3):

        def moved(step: Step, eps: float = eps) -> Any:
            outer = step.run(self=step.values["self"] - eps)
            return outer + eps if step.name == "sqrt" else 1 / (1 / outer + eps)

        said = f"eps ({eps:g}) is added to the root, not to what is under it"
        yield Variation(PatternKind.EPS, said, moved)
        for by, words in ((-eps, "left out"), (eps, "added twice")):

            def shifted(step: Step, by: float = by) -> Any:
                return step.run(self=step.values["self"] + by)

            yield Variation(PatternKind.EPS, f"eps ({eps:g}) is {words}", shifted)
