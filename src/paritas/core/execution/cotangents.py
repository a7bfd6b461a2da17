"""Random upstream gradients (cotangents): how every check draws what backward passes start from.

Standalone scripts do not import paritas, so they draw theirs in a line of their own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from paritas.core.results.items import Item


def draw_cotangent(
    item: Item, output: Tensor, seed: int, precision: torch.dtype | None = None
) -> Tensor:
    """A random upstream gradient: the same numbers for both sides and in every run.

    They are representable in the reference's own dtype, so they are exact in every run and their
    sums round as in any program.

    Args:
        item: the output; each item and each seed has other numbers.
        output: its value, whose shape, dtype and device the cotangent gets.
        seed: another one gives another draw.
        precision: the dtype of the output in the reference's own run; None if this is that run.
    """
    drawn = draw_on_host(item, output, seed, precision or output.dtype)
    return drawn.to(output.device).to(output.dtype)


def draw_on_host(item: Item, output: Tensor, seed: int, precision: torch.dtype) -> Tensor:
    """The same on the CPU and in the reference's own dtype, for a caller that keeps it."""
    generator = torch.Generator("cpu").manual_seed(seed + _stable_hash(item.text))
    shape = (*output.shape, 2) if output.is_complex() else tuple(output.shape)
    drawn = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
    drawn = drawn.to(precision.to_real() if precision.is_complex else precision)
    return torch.view_as_complex(drawn.double()) if output.is_complex() else drawn


def _stable_hash(text: str) -> int:
    return sum((position + 1) * ord(letter) for position, letter in enumerate(text)) % 1_000_003
