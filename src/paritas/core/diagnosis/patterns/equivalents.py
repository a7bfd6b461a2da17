"""Norms and softmax that a program writes out itself, as the one operator that gives the same.

What is known of the mistakes of a norm then holds for a norm in Python, too. Whether the operator
gives the same is for the caller to check.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

import torch

from paritas.core.diagnosis.calls import LiveCall, step_names
from paritas.core.diagnosis.patterns.sums import reduced_dims

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from paritas.core.diagnosis.calls import Step

_ATEN = torch.ops.aten
_ROOTS = step_names("roots and reciprocals") | {"pow"}
_STATISTICS = step_names("mean", "variance")


def equivalent_calls(call: LiveCall) -> Iterator[LiveCall]:
    """Calls of single operators that may give what a call of several gives."""
    if call.target is torch.einsum:
        yield from _sums_over_letters(call)
    steps = [step for _, step in call.steps]
    names = {step.name for step in steps}
    if names & _ROOTS and names & _STATISTICS:
        yield from _norms(call, steps)
    if "exp" in names and "sum" in names:
        yield from _softmaxes(call, steps)
    if "native_batch_norm" in names:
        yield from _instance_norms(call, steps)


def _sums_over_letters(call: LiveCall) -> Iterator[LiveCall]:
    """The function takes its tensors one by one, or in a list."""
    equation, *rest = call.args
    tensors = rest[0] if len(rest) == 1 and isinstance(rest[0], list | tuple) else rest
    if isinstance(equation, str):
        yield LiveCall(_ATEN.einsum.default, (equation, list(tensors)), {})


def _norms(call: LiveCall, steps: list[Step]) -> Iterator[LiveCall]:
    tensors = _floating(call)
    epsilons = {float(small_number) for step in steps for small_number in _small_numbers(step)} or {
        0.0
    }
    shapes = {tuple(_reduced_shape(step)) for step in steps if step.name in _STATISTICS}
    for x, shape, eps in itertools.product(tensors, shapes, epsilons):
        if not shape or x.dim() <= len(shape) or tuple(x.shape[-len(shape) :]) != shape:
            continue
        vectors = [tensor for tensor in tensors if tuple(tensor.shape) == shape]
        weights = [None, *vectors, *(1 + vector for vector in vectors)]
        for weight in weights:
            yield LiveCall(_ATEN._fused_rms_norm.default, (x, list(shape), weight, eps), {})  # noqa: SLF001
        for weight, bias in itertools.product(weights, [None, *vectors]):
            if bias is None or bias is not weight:
                args = (x, list(shape), weight, bias, eps)
                yield LiveCall(_ATEN.native_layer_norm.default, args, {})


def _softmaxes(call: LiveCall, steps: list[Step]) -> Iterator[LiveCall]:
    axes = {dim for step in steps if step.name == "sum" for dim in reduced_dims(step)}
    operators = (_ATEN._softmax.default, _ATEN._log_softmax.default)  # noqa: SLF001
    for x, dim, operator in itertools.product(_floating(call), axes, operators):
        if dim < x.dim():
            yield LiveCall(operator, (x, dim, False), {})


def _instance_norms(call: LiveCall, steps: list[Step]) -> Iterator[LiveCall]:
    """A norm of each channel of each sample, which torch computes as one long batch norm."""
    norm = next(step for step in steps if step.name == "native_batch_norm")
    tensors = _floating(call)
    for x in (tensor for tensor in tensors if tensor.dim() > 2):  # noqa: PLR2004
        samples, channels = x.shape[:2]
        inner = norm.values["input"]
        if not norm.values["training"] or inner.shape[1] != samples * channels or samples == 1:
            continue
        vectors = [tensor for tensor in tensors if tuple(tensor.shape) == (channels,)]
        size = x.numel() // (samples * channels)
        for weight, bias in itertools.product([*vectors, None], repeat=2):
            if bias is None or bias is not weight:
                args = (x, weight, bias, samples, channels, size, channels, norm.values["eps"])
                yield LiveCall(_ATEN.native_group_norm.default, args, {})


def _floating(call: LiveCall) -> list[Tensor]:
    floating = call.floating
    if isinstance(call.target, torch.nn.Module):
        floating += [
            parameter.detach()
            for parameter in call.target.parameters()
            if parameter.is_floating_point()
        ]
    return floating


# A number that is added and not larger may be an eps.
_LARGEST = 0.1


def _small_numbers(step: Step) -> Iterator[float]:
    for value in step.values.values():
        if isinstance(value, float) and 0 < value <= _LARGEST and math.isfinite(value):
            yield value


def _reduced_shape(step: Step) -> list[int]:
    x, dims = step.values["self"], reduced_dims(step)
    last = tuple(range(x.dim() - len(dims), x.dim()))
    return [x.shape[dim] for dim in dims] if tuple(sorted(dims)) == last else []
