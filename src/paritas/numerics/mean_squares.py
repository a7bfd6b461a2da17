"""The root mean square of what may not fit into memory at once, nor its squares into float64."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

__all__ = ["root_mean_square"]


def root_mean_square(parts: Iterable[Tensor]) -> float:
    """Of the finite elements; each part scaled by its largest, so that no square leaves range."""
    largest, squares, count = 0.0, 0.0, 0
    for part in parts:
        values, finite = part, part.numel()
        top = max(map(abs, map(float, torch.aminmax(part))))
        if not math.isfinite(top):
            is_finite = torch.isfinite(part)
            values, finite = torch.where(is_finite, part, 0.0), int(is_finite.sum())
            top = float(values.abs().max())
        count += finite
        if top == 0:
            continue
        mine = float((values / top).square().sum())
        if top > largest:
            squares, largest = squares * (largest / top) ** 2 + mine, top
        else:
            squares += mine * (top / largest) ** 2
    return largest * math.sqrt(squares / count) if count else 0.0
