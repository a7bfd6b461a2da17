"""Operators that end the process, not the call, when they are given parts that do not fit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["refuse_hazards"]

_ATTENTION = {
    torch.nn.functional.scaled_dot_product_attention,
    torch.ops.aten.scaled_dot_product_attention,
    torch.ops.aten.scaled_dot_product_attention.default,
}
_KEY, _VALUE = 1, 2


def refuse_hazards(
    function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> None:
    """Raise what torch should have raised.

    Fused attention on the CPU reads as many values as there are keys, whether they are there or
    not: a rule that splits only one of the two would take the whole process with it.

    Raises:
        ValueError: there are not as many values as keys.
    """
    if function not in _ATTENTION:
        return
    found = [
        args[place] if place < len(args) else kwargs.get(name)
        for place, name in ((_KEY, "key"), (_VALUE, "value"))
    ]
    if not all(isinstance(one, torch.Tensor) and one.dim() > 1 for one in found):
        return
    keys, values = (one.shape[-2] for one in found if one is not None)
    if keys != values:
        raise ValueError(f"attention is given {keys} keys and {values} values")
