"""Whether an operator's float64 kernel is one: some carry float32 constants inside.

`hardswish` on CUDA multiplies by `1.0f / 6.0f` in every dtype, for one. An arbiter computed so
would be off by 3e-8, and every program that does better would differ from it. Each elementwise
operator is therefore compared, once per kind of device, with torch's own decomposition of it into
simpler ones, which takes its place where the two disagree.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch._decomp import decomposition_table

from paritas._torch.attention import wide_attention

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from torch._ops import OpOverload

# Far above float64's rounding, far below that of a float32 constant.
AGREEMENT = 1e-12
_CHECKED: dict[tuple[OpOverload, str], bool] = {}


def float64_kernel(func: OpOverload, args: tuple[Any, ...]) -> Callable[..., Any]:
    """What computes `func` in float64 on these arguments: itself, or its decomposition."""
    attention = wide_attention(func)
    if attention is not None:
        return attention
    if func._schema.name.startswith("aten::quantize_per_"):
        # They take float32 alone, and round to far coarser steps than its own.
        return lambda value, *rest, **options: func(value.float(), *rest, **options)
    tensors = [value for value in args if isinstance(value, torch.Tensor)]
    decomposition = decomposition_table.get(func)
    if decomposition is None or not tensors or not _is_elementwise(func, tensors):
        return func
    key = (func, tensors[0].device.type)
    if key not in _CHECKED:
        _CHECKED[key] = _agrees(func, decomposition, args, tensors[0].device)
    return func if _CHECKED[key] else decomposition


def _is_elementwise(func: OpOverload, tensors: list[Tensor]) -> bool:
    returns = func._schema.returns
    single = len(returns) == 1 and returns[0].alias_info is None
    same = all(t.shape == tensors[0].shape and t.dtype is torch.float64 for t in tensors)
    return single and same and torch.Tag.nondeterministic_seeded not in func.tags


def _agrees(
    func: OpOverload,
    decomposition: Callable[..., Any],
    args: tuple[Any, ...],
    device: torch.device,
) -> bool:
    """Compare the two on a range of numbers; where that says nothing, torch is believed."""
    # No round numbers: at a kink the two may take different sides of it.
    probe = torch.linspace(-4.0137, 4.0291, 257, dtype=torch.float64, device=device)
    probes = tuple(probe if isinstance(value, torch.Tensor) else value for value in args)
    try:
        ours, simpler = func(*probes), decomposition(*probes)
    except (RuntimeError, TypeError, ValueError, IndexError):
        return True  # it takes no such numbers
    comparable = isinstance(ours, torch.Tensor) and isinstance(simpler, torch.Tensor)
    if not comparable or ours.shape != probe.shape or ours.shape != simpler.shape:
        return True
    close = torch.isclose(ours, simpler, rtol=AGREEMENT, atol=AGREEMENT, equal_nan=True)
    return bool(close.all())
