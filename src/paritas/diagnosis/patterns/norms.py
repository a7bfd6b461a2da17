"""Normalisations whose eps is another one, or stands in another place; or whose count is off."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import torch

from paritas.diagnosis.patterns.hypotheses import stated
from paritas.diagnosis.patterns.operations import Operation, operation_of, trusted
from paritas.diagnosis.patterns.weighing import beyond_noise

if TYPE_CHECKING:
    from torch import Tensor

    from paritas.diagnosis.cases import Case
    from paritas.numerics.diagnoses import Pattern

__all__ = ["propose"]

_USUAL = (0.0, 1e-12, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2)
_DEFAULTS = {"layer_norm": 1e-5, "native_layer_norm": 1e-5, "batch_norm": 1e-5, "group_norm": 1e-5}
_RMS = ("rms_norm", "fused_rms_norm")


@dataclasses.dataclass(frozen=True)
class _Norm:
    """A normalisation taken apart: y = (x - mean) / sqrt(var + eps) * weight + bias."""

    x: Tensor
    dims: tuple[int, ...]
    eps: float
    weight: Tensor | float
    bias: Tensor | float
    centred: bool

    @property
    def length(self) -> int:
        return math.prod(self.x.shape[one] for one in self.dims)

    def value(
        self,
        *,
        eps: float | None = None,
        outside: bool = False,
        correction: int = 0,
        part: Tensor | None = None,
    ) -> Tensor:
        """What it gives; `part` are the elements its statistics are taken from."""
        eps = self.eps if eps is None else eps
        part = self.x if part is None else part
        mean = part.mean(self.dims, keepdim=True) if self.centred else torch.zeros(())
        squares = (part - mean).square().sum(self.dims, keepdim=True)
        count = math.prod(part.shape[one] for one in self.dims)
        var = squares / (count - correction)
        below = var.sqrt() + eps if outside else (var + eps).sqrt()
        return (self.x - mean) / below * self.weight + self.bias


def propose(case: Case) -> list[Pattern]:
    """Another eps, by name or as estimated, eps outside of the root, n - 1 in place of n."""
    operation = operation_of(case)
    if operation is None or not beyond_noise(case) or not case.shape:
        return []
    norm = _norm_of(operation)
    if norm is None or trusted(case, norm.value) is None:
        return []
    for kind, sentence, value, cost in _variants(case, norm):
        if value is None:
            continue
        pattern = stated(
            case,
            value,
            kind,
            sentence,
            cost=cost,
            evidence={"operator": operation.context.operator, "eps": norm.eps},
        )
        if pattern is not None:
            return [pattern]
    return []


def _norm_of(operation: Operation) -> _Norm | None:
    name, inputs = operation.name, operation.inputs
    x = inputs[0]
    if not x.is_floating_point():
        return None
    if name in ("batch_norm", "native_batch_norm"):
        return _batch_norm_of(operation)
    if name in ("layer_norm", "native_layer_norm", *_RMS):
        shape = operation.argument("normalized_shape", 1, None)
        count = len(shape) if isinstance(shape, list | tuple) else 0
        count = count or (inputs[1].dim() if len(inputs) > 1 else 1)
        dims = tuple(range(x.dim() - count, x.dim()))
        centred = name not in _RMS
        position = 4 if centred else 3
        default = _DEFAULTS.get(name, torch.finfo(operation.context.inputs[0].dtype).eps)
        eps = operation.argument("eps", position, default)
        weight = inputs[1] if len(inputs) > 1 else 1.0
        bias = inputs[2] if len(inputs) > 2 and centred else 0.0  # noqa: PLR2004
        if isinstance(eps, float | int) and not isinstance(eps, bool) and dims:
            return _Norm(x, dims, float(eps), weight, bias, centred)
    return None


def _batch_norm_of(operation: Operation) -> _Norm | None:
    """In training: in evaluation nothing is taken of the batch."""
    arguments, inputs = operation.context.arguments, operation.inputs
    x, *parameters = inputs
    eps = arguments.get("eps", _DEFAULTS["batch_norm"])
    if arguments.get("training") is not True or x.dim() < 2 or not isinstance(eps, float):  # noqa: PLR2004
        return None
    channels = (1, -1, *(1,) * (x.dim() - 2))
    weight, bias = (
        parameters[place].view(channels) if len(parameters) > place else default
        for place, default in enumerate((1.0, 0.0))
    )
    dims = (0, *range(2, x.dim()))
    return _Norm(x, dims, eps, weight, bias, centred=True)


def _variants(case: Case, norm: _Norm) -> list[tuple[str, str, Tensor | None, float]]:
    found: list[tuple[str, str, Tensor | None, float]] = []
    base = math.log2(len(_USUAL) + 6)
    for other in _USUAL:
        if not math.isclose(other, norm.eps):
            text = f"eps is {other:g} in place of {norm.eps:g}" if other else "eps is left out"
            found.append(("eps", text, norm.value(eps=other), base))
    outside = norm.value(outside=True)
    text = f"eps ({norm.eps:g}) is added to the deviation, not to the variance"
    found.append(("eps", text, outside, base))
    off = "off by one reduction"
    if norm.length > 1:
        text = f"the variance is divided by {norm.length - 1} in place of {norm.length}"
        found.append((off, text, norm.value(correction=1), base))
        dim = norm.dims[-1]
        size = norm.x.shape[dim]
        for start, which in ((0, "last"), (1, "first")):
            part = norm.value(part=norm.x.narrow(dim, start, size - 1)) if size > 1 else None
            text = f"the {which} of the {size} elements is left out of mean and variance"
            found.append((off, text, part, base))
    estimate = _estimated(case, norm)
    if estimate is not None:
        text = f"eps is about {estimate:.3g} in place of {norm.eps:g}"
        found.append(("eps", text, norm.value(eps=estimate), base + 10))
    return found


def _estimated(case: Case, norm: _Norm) -> float | None:
    """The eps that the candidate was made with, from the rows where it matters most."""
    plain = norm.value(eps=0.0) - norm.bias
    given = case.given - norm.bias
    usable = (plain.abs() > 0) & (given.abs() > 0) & case.wrong & torch.isfinite(given)
    if not bool(usable.any()):
        return None
    mean = norm.x.mean(norm.dims, keepdim=True) if norm.centred else torch.zeros(())
    var = (norm.x - mean).square().mean(norm.dims, keepdim=True).expand_as(norm.x)
    ratio = (plain[usable] / given[usable]).square() - 1
    estimates = ratio * var[usable]
    middle = float(estimates.median())
    return middle if math.isfinite(middle) and middle > 0 else None
