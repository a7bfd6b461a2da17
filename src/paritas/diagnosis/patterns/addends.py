"""A known tensor added too seldom or too often: a bias, a residual, an input."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from paritas.diagnosis.patterns.weighing import own_unit, proportion, robust_proportion, weigh
from paritas.numerics.diagnoses import Pattern

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from paritas.diagnosis.cases import Case

__all__ = ["propose_addends"]

_STANDARD_ERRORS = 4.0
# A tensor that follows what is right to so much of it is a scale in disguise.
_ALIKE = 0.25


def propose_addends(case: Case) -> list[Pattern]:
    """Where the error is a multiple of a tensor that is known: `residual`, `axis offset`."""
    found = []
    for name, tensor, kind in _broadcast(case):
        times, error = robust_proportion(case, tensor, case.error)
        if not math.isfinite(times) or abs(times) <= 2 * _STANDARD_ERRORS * error:
            continue
        text = _in_words(case, name, times, error)
        weight = weigh(
            case,
            case.right + times * tensor,
            parameters=0.0 if text else 1.0,
            slack=max(1.0, abs(times)),
            bits=3.0 if text else 0.0,
        )
        if weight is None or _is_like(case, tensor):
            continue
        sentence = text or f"{times:.4g} times {name} is added beside what should be"
        evidence = {"times": times, "standard error": error, "tensor": name, **weight.evidence}
        confidence = weight.confidence * (1.0 if text else 0.9)
        found.append(
            Pattern(kind=kind, confidence=confidence, sentence=sentence, evidence=evidence)
        )
    return sorted(found, key=lambda pattern: -pattern.confidence)[:2]


def _broadcast(case: Case) -> Iterator[tuple[str, Tensor, str]]:
    """The known tensors, each brought to the shape in every way that it may have been added."""
    known = dict(case.context.named)
    known |= {f"input {place}": tensor for place, tensor in enumerate(case.context.inputs)}
    for name, tensor in known.items():
        if tensor.dtype == torch.bool or not tensor.numel() or not bool((tensor != 0).any()):
            continue
        value = tensor.detach().cpu()
        value = value.to(torch.complex128 if case.given.is_complex() else torch.float64)
        for shape in _shapes(case.shape, tuple(value.shape)):
            kind = "residual" if value.numel() == case.right.numel() else "axis offset"
            if value.numel() == 1 and case.right.numel() != 1:
                kind = "offset"
            yield name, value.reshape(shape).expand(case.shape), kind


def _shapes(target: tuple[int, ...], shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """In which shapes a tensor can be broadcast; a vector also along each axis of its length."""
    found = []
    padded = (1,) * (len(target) - len(shape)) + shape
    if len(padded) == len(target) and all(
        mine in {1, whole} for mine, whole in zip(padded, target, strict=True)
    ):
        found.append(padded)
    if len(shape) == 1:
        for axis, size in enumerate(target):
            view = tuple(size if dim == axis else 1 for dim in range(len(target)))
            if size == shape[0] and view not in found:
                found.append(view)
    return found


def _is_like(case: Case, tensor: Tensor) -> bool:
    """Whether the tensor is what is right, but for a factor."""
    finite = torch.isfinite(tensor) & torch.isfinite(case.right)
    factor, _ = proportion(case, tensor, case.right, finite)
    if not math.isfinite(factor):
        return True
    left = (case.right - factor * tensor)[finite].abs().square().sum()
    return float(left) <= _ALIKE**2 * float(case.right[finite].abs().square().sum())


def _in_words(case: Case, name: str, times: float, error: float) -> str:
    """What a person says of so many times too much of it; nothing if the number has no meaning."""
    sizes = list(dict.fromkeys([math.prod(case.context.world.values()), *_axes(case)]))
    meanings = [
        (-1.0, f"{name} is missing"),
        (1.0, f"{name} is added once too often"),
        (-2.0, f"{name} is subtracted instead of added"),
        (2.0, f"{name} is added instead of subtracted, or twice too often"),
    ]
    for size in sizes:
        if size > 1:
            meanings += [
                (size - 1.0, f"{name} is added {size} times: once per rank"),
                (1 / size - 1.0, f"only 1 / {size} of {name} is added: divided by the world size"),
                (1 - 1.0 / size, f"{name} is added whole where 1 / {size} of it belongs"),
            ]
    for value, text in meanings:
        tolerance = max(_STANDARD_ERRORS * error, 2 * own_unit(case) * abs(value), 1e-9)
        if abs(times - value) <= min(tolerance, 0.05 * abs(value)):
            return text
    return ""


def _axes(case: Case) -> list[int]:
    return [size for size in case.context.world.values() if size > 1]
