"""Figures of many small tensors by torch's own loops over lists of them.

A call of torch costs more than the arithmetic on a small tensor does. Its optimizers go over all
parameters in one call, by functions that have no public name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = ["figures_of_pairs"]


def figures_of_pairs(
    candidates: Sequence[Tensor], references: Sequence[Tensor], dtype: torch.dtype | None = None
) -> list[tuple[float, float, float]]:
    """Of each pair, the reference's norm, and norm and largest magnitude of the difference.

    Real tensors on the CPU, none empty, each pair of one dtype and shape; `dtype` is what norms are
    summed up in, if not in their own.
    """
    apart = torch._foreach_sub(list(candidates), list(references))
    sizes = torch._foreach_norm(list(references), 2, dtype)
    totals = torch._foreach_norm(apart, 2, dtype)
    # The norm of order infinity is ten times slower on the CPU.
    torch._foreach_abs_(apart)
    most = torch._foreach_max(apart)
    return [(float(a), float(b), float(c)) for a, b, c in zip(sizes, totals, most, strict=True)]
