"""Programs of which one operator is wrong, and programs that round otherwise: recorded as dumps.

The operator is spoiled below the recorder, so that its own record holds the wrong result and all
that follows is computed from it, as with a faulty kernel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import (  # noqa: TID251  (a fault below the recorder)
    TorchDispatchMode,
)

import paritas

if TYPE_CHECKING:
    from collections.abc import Callable

# What moves values, makes memory, or has no value of its own to be wrong.
IDLE = {
    "t", "transpose", "permute", "view", "_unsafe_view", "reshape", "expand", "detach", "unbind",
    "select", "slice", "squeeze", "unsqueeze", "alias", "clone", "ones_like", "empty", "split",
    "arange", "scalar_tensor", "zeros_like", "zeros", "select_backward", "slice_backward",
}  # fmt: skip


def scaled(value: Tensor) -> Tensor:
    return value * 1.02


def first_row_lost(value: Tensor) -> Tensor:
    kept = value.clone(memory_format=torch.contiguous_format)
    kept.view(-1)[: max(1, value.numel() // max(1, value.shape[0] if value.dim() else 1))] = 0
    return kept


def shifted(value: Tensor) -> Tensor:
    return value.roll(1, -1) if value.dim() else value * 1.02


def offset(value: Tensor) -> Tensor:
    return value + 0.05 * value.abs().mean()


def one_element(value: Tensor) -> Tensor:
    kept = value.clone(memory_format=torch.contiguous_format)
    flat = kept.view(-1)
    flat[flat.abs().argmax()] *= 1.1
    return kept


FAULTS: dict[str, Callable[[Tensor], Tensor]] = {
    fault.__name__: fault for fault in (scaled, first_row_lost, shifted, offset, one_element)
}


class Spoiling(TorchDispatchMode):
    """Changes the results of operators, by number; counts those that can be."""

    def __init__(self, change: Callable[[int, Tensor], Tensor]) -> None:
        super().__init__()
        self.change = change
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        first = result[0] if isinstance(result, tuple) else result
        name = func.overloadpacket.__name__
        if name in IDLE or not isinstance(first, Tensor) or not first.is_floating_point():
            return result
        if not first.numel() or func._schema.is_mutable:
            return result
        number, self.count = self.count, self.count + 1
        changed = self.change(number, first).contiguous()
        changed = changed if changed.stride() == first.stride() else first.clone().copy_(changed)
        return (changed, *result[1:]) if isinstance(result, tuple) else changed


def record(
    path: Any,
    model: torch.nn.Module,
    inputs: tuple[Any, ...],
    change: Callable[[int, Tensor], Tensor] = lambda _, value: value,
    *,
    backward: bool = False,
) -> int:
    """Record every operator of a run; gives how many can be spoiled."""
    model.zero_grad(set_to_none=True)
    with (
        Spoiling(change) as spoiling,
        paritas.capture(path, level="op"),
        torch.set_grad_enabled(backward),
    ):
        result = model(*inputs)
        if backward:
            result.float().square().mean().backward()
    return spoiling.count


def spoil_one(place: int, fault: str) -> Callable[[int, Tensor], Tensor]:
    return lambda number, value: FAULTS[fault](value) if number == place else value


def rounding(seed: int) -> Callable[[int, Tensor], Tensor]:
    """Every result moved by up to one unit in its last place: another compiler's rounding."""
    generator = torch.Generator().manual_seed(seed)

    def change(_: int, value: Tensor) -> Tensor:
        unit = torch.finfo(value.dtype).eps
        noise = torch.rand(value.shape, generator=generator, dtype=torch.float64) - 0.5
        return (value.double() * (1 + unit * noise)).to(value.dtype)

    return change
