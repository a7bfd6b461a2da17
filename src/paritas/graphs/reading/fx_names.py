"""What a node of an FX graph calls, in full, as people write it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from paritas._torch.exported_programs import is_higher_order, is_operator
from paritas.partition.library.registry import name_of

__all__ = ["full_name"]

# Where people find what torch keeps elsewhere.
_HOMES = {
    "torch.nn.functional": torch.nn.functional,
    "torch": torch,
    "torch.special": torch.special,
    "torch.linalg": torch.linalg,
    "torch.fft": torch.fft,
}


def full_name(target: Callable[..., Any]) -> str:
    """The name of a function: `torch.nn.functional.linear`, `aten.mm.default`, `operator.add`."""
    if is_higher_order(target):
        return f"higher_order.{getattr(target, '__name__', target)}"
    if is_operator(target):
        return str(target)
    name = name_of(target)
    if name.startswith(("_operator.", "builtins.")):
        return name.removeprefix("_").removeprefix("builtins.")
    if not name.startswith("torch."):
        return name
    short = str(getattr(target, "__name__", ""))
    for home, module in _HOMES.items():
        for spelt in (short, short.partition("_")[2]):  # torch.fft.fft is named fft_fft
            if spelt and getattr(module, spelt, None) is target:
                return f"{home}.{spelt}"
    return name
