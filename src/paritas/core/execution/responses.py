"""Whether a program really computes in float64 where it is given float64.

A kernel that torch does not see may round to float32 inside, whatever it is given. Then its run in
float64 shows its rounding, not a fault. So the inputs are changed by far less than float32 can
hold, in one direction and in the other: what computes in float64 responds to both alike, what
rounds responds to neither, or jumps.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import torch

from paritas.core.execution.observation import same_value
from paritas.core.numerics import criterion
from paritas.core.numerics.bits import is_inexact

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from paritas.core.execution.subjects import Inputs

# A change far below the last bit of float32 and far above that of float64.
_CHANGE = 2.0**-36
# How much of the response to one direction may be missing in the other.
_MOST_OFF = 0.1


def responds_smoothly(
    before: Any, middle: Any, after: Any, reference: tuple[Any, Any]
) -> bool | None:
    """Whether a value responds alike to both directions; None if it need not respond.

    Args:
        before: the value for inputs that were changed in one direction.
        middle: for the inputs as they are.
        after: for inputs that were changed in the other direction.
        reference: the reference's value for these and for the inputs as they are.
    """
    values = (before, middle, after)
    if not all(is_inexact(value) and value.shape == values[0].shape for value in values):
        return None
    first, second = (
        (right.double() - left.double()).nan_to_num() for left, right in itertools.pairwise(values)
    )
    size = max(criterion.rms(first), criterion.rms(second))
    if size > 0:
        return criterion.rms_difference(first, second) <= _MOST_OFF * size
    return None if same_value(*reference) else False


def computes_in_float64(answers: Iterable[bool | None]) -> bool | None:
    """Whether all values that respond do so smoothly; None if nothing responds."""
    told = set(answers)
    return False not in told if told - {None} else None


def nudge_inputs(inputs: Inputs, seed: int, direction: int) -> Inputs:
    """The same inputs in float64, the numbers among them changed by less than float32 can hold."""

    def nudge(value: Any) -> Any:
        is_tensor = isinstance(value, torch.Tensor)
        return nudge_tensor(value, seed, direction) if is_tensor else value

    return inputs.map_leaves(nudge)


def nudge_tensor(value: Tensor, seed: int, direction: int) -> Tensor:
    """A tensor in float64, changed by less than float32 can hold; others as they are."""
    if not value.is_floating_point():
        return value
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randn(value.shape, generator=generator, dtype=torch.float64).to(value.device)
    wide = value.detach().to(torch.float64) * (1 + direction * _CHANGE * signs)
    return wide.requires_grad_(value.requires_grad)
