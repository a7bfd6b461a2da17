"""An operator computed again in float64 on inputs that were rounded to a narrow format first."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import torch

from paritas.diagnosis.patterns.formats import FORMATS
from paritas.numerics.criterion import unit_roundoff

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from paritas.diagnosis.cases import Case

__all__ = ["Recomputed", "recomputations"]

_MOST_WORK = 1 << 30


@dataclasses.dataclass(frozen=True)
class Recomputed:
    """What comes out if some inputs are rounded."""

    value: Tensor
    format: str
    which: str
    how: str


def recomputations(case: Case) -> Iterator[Recomputed]:
    """The results on rounded inputs; none if the operator is not known or too large."""
    formula = _formula(case)
    if formula is None:
        return
    compute, operands = formula
    inputs = [tensor.detach().cpu().double() for tensor in case.context.inputs]
    plain = _tried(compute, inputs, case.shape)
    # The formula must be the one the reference used.
    if plain is None or not _agrees(case, plain):
        return
    units = [unit_roundoff(tensor.dtype) for tensor in case.context.inputs]
    choices = [operands, *((place,) for place in operands)] if len(operands) > 1 else [operands]
    for form in FORMATS:
        if form.name == "float16" or not all(form.unit > units[place] for place in operands):
            continue  # tf32 has as many digits and the wider range
        for how, change in (("rounded", form.rounded), ("cut off", form.truncated)):
            for chosen in choices:
                changed = [
                    change(tensor) if place in chosen else tensor
                    for place, tensor in enumerate(inputs)
                ]
                value = _tried(compute, changed, case.shape)
                if value is not None:
                    name = "tf32 or float16" if form.name == "tf32" else form.name
                    yield Recomputed(value, name, _which(chosen, operands), how)


def _which(chosen: Sequence[int], operands: Sequence[int]) -> str:
    return "inputs" if len(chosen) == len(operands) else f"input {chosen[0]}"


def _agrees(case: Case, value: Tensor) -> bool:
    finite = torch.isfinite(value) & torch.isfinite(case.right)
    apart = (value - case.right)[finite].square().sum()
    error = case.error[torch.isfinite(case.error)].square().sum()
    return bool(finite.any()) and float(apart) <= float(error) / 16


def _tried(
    compute: Callable[..., Tensor], inputs: list[Tensor], shape: tuple[int, ...]
) -> Tensor | None:
    """The result, unless the inputs do not go with the formula."""
    try:
        value = compute(*inputs)
    except (RuntimeError, TypeError, ValueError, IndexError):
        return None
    return value if tuple(value.shape) == shape else None


def _formula(case: Case) -> tuple[Callable[..., Tensor], tuple[int, ...]] | None:
    """How to compute it, and which of the inputs are multiplied."""
    inputs = case.context.inputs
    if len(inputs) < 2 or not all(tensor.is_floating_point() for tensor in inputs):  # noqa: PLR2004
        return None
    parts = case.context.operator.split(".")
    name = parts[1] if len(parts) > 1 else parts[0]
    elementwise: dict[str, Callable[..., Tensor]] = {
        "mul": torch.mul,
        "add": torch.add,
        "sub": torch.sub,
        "div": torch.div,
    }
    if name in elementwise:
        return elementwise[name], (0, 1)
    work = math.prod(case.shape) * max(max(tensor.shape, default=1) for tensor in inputs)
    if work > _MOST_WORK:
        return None
    if name in {"mm", "bmm", "matmul"}:
        return torch.matmul, (0, 1)
    if name == "linear":
        return torch.nn.functional.linear, (0, 1)
    if name in {"addmm", "baddbmm"} and len(inputs) == 3:  # noqa: PLR2004
        return _add_product, (1, 2)
    if name.startswith("conv") and inputs[1].dim() in {3, 4, 5}:
        return _convolution(case), (0, 1)
    return None


def _add_product(start: Tensor, left: Tensor, right: Tensor) -> Tensor:
    return start + left @ right


def _convolution(case: Case) -> Callable[..., Tensor]:
    convolve: Callable[..., Tensor] = {
        3: torch.nn.functional.conv1d,
        4: torch.nn.functional.conv2d,
        5: torch.nn.functional.conv3d,
    }[case.context.inputs[1].dim()]
    known = case.context.arguments
    options = {
        name: known[name] for name in ("stride", "padding", "dilation", "groups") if name in known
    }

    def compute(value: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return convolve(value, weight, bias, **options)

    return compute
