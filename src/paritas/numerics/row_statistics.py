"""Statistics and sketches of many small tensors of one size at once.

On a small tensor the calls cost more than the arithmetic. What a row comes to does not depend on the
rows beside it, to the last bit: how values are put together is a matter of timing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paritas.numerics.floats import is_plain
from paritas.numerics.signs import SIGN_BLOCK, first_sign, sign_table
from paritas.numerics.sketch import buckets
from paritas.numerics.tallies import Statistics

__all__ = ["fits_in_row", "sketch_rows", "summarize_rows"]

Array = np.ndarray[Any, Any]

_LONGEST = SIGN_BLOCK
# Values in one piece of work: more would leave the cache.
_TOGETHER = 1 << 17
_FRACTION_BITS, _BIAS, _FIELDS = 23, 127, 256


def fits_in_row(tensor: Tensor) -> bool:
    """Whether a tensor is one that rows are for: float32, on the CPU, in order, and not large."""
    return tensor.dtype is torch.float32 and 0 < tensor.numel() <= _LONGEST and is_plain(tensor)


def summarize_rows(tensors: Sequence[Tensor]) -> list[Statistics | None]:
    """Statistics of tensors of one size, each of which fits in a row.

    None for those that hold NaN, infinities or subnormals: `summarize` counts these.
    """
    found: list[Statistics | None] = []
    for rows in _stacks(tensors):
        found += _summarize(rows)
    return found


def sketch_rows(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Sketches of finite tensors of one size, each of which fits in a row."""
    found: list[Tensor] = []
    for rows in _stacks(tensors):
        size = rows.shape[1]
        width = buckets(size)
        first = first_sign(0)
        signed = rows * sign_table(rows.dtype)[first : first + size]
        whole = size // width * width
        blocks = signed[:, :whole].reshape(len(rows), -1, width)
        sums = np.add.reduce(blocks, axis=1, dtype=np.float64)
        sums[:, : size - whole] += signed[:, whole:]
        found += torch.from_numpy(sums.astype(np.float32)).unbind()
    return found


def _stacks(tensors: Sequence[Tensor]) -> list[Array]:
    """Matrices of so many rows as a cache holds."""
    flat = [tensor.view(-1).numpy() for tensor in tensors]
    many = max(_TOGETHER // max(flat[0].size, 1), 1) if flat else 1
    return [np.stack(flat[start : start + many]) for start in range(0, len(flat), many)]


def _summarize(rows: Array) -> list[Statistics | None]:
    least, most = np.minimum.reduce(rows, axis=1), np.maximum.reduce(rows, axis=1)
    usable = np.isfinite(least) & np.isfinite(most)
    wide = rows.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        totals = np.einsum("ij->i", wide)
        squares = np.einsum("ij,ij->i", wide, wide)
    counts = _exponents(rows)
    zeros = np.zeros(len(rows), dtype=np.int64)
    if counts[:, 0].any():
        zeros = rows.shape[1] - np.count_nonzero(rows, axis=1)
        usable &= zeros == counts[:, 0]  # otherwise there are subnormals
    return [
        _statistics(rows.shape[1], *figures) if use else None
        for use, *figures in zip(
            usable.tolist(),
            least.tolist(),
            most.tolist(),
            totals.tolist(),
            np.sqrt(squares).tolist(),
            zeros.tolist(),
            counts,
            strict=True,
        )
    ]


def _exponents(rows: Array) -> Array:
    """How many values of each row have each exponent field."""
    fields = np.right_shift(rows.view(np.int32), _FRACTION_BITS).astype(np.uint8)
    beginnings = np.arange(len(rows), dtype=np.intp)[:, None] * _FIELDS
    counts = np.bincount((fields + beginnings).reshape(-1), minlength=len(rows) * _FIELDS)
    return counts.reshape(len(rows), _FIELDS)


def _statistics(
    size: int, least: float, most: float, total: float, l2: float, zeros: int, counts: Array
) -> Statistics:
    fields = np.flatnonzero(counts[1:]) + 1
    exponents = zip((fields - _BIAS).tolist(), counts[fields].tolist(), strict=True)
    return Statistics(
        count=size,
        minimum=least,
        maximum=most,
        mean=total / size,
        l2=l2,
        zeros=zeros,
        exponents=tuple(exponents),
    )
