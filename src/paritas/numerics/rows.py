"""Statistics and sketches of small tensors, those of one size together.

What a small tensor costs is the number of calls. So tensors of one size become the rows of a
matrix, and each call is made once for all of them; it takes long enough for Python to let other
threads run beside it. What is found of a row does not depend on the others.
"""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from paritas.numerics.signs import SIGN_BLOCK, first_sign, sign_table
from paritas.numerics.sketch import buckets
from paritas.numerics.tallies import Statistics

__all__ = ["DOT", "Row", "fits_row", "summarize_rows"]

Array = np.ndarray[Any, Any]

_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
_LONGEST = SIGN_BLOCK
# Elements of a matrix: what is computed of it stays in a processor's cache.
_MATRIX = 1 << 17
# Dot products are taken in pieces so short that no BLAS wakes its threads for them.
DOT = 1 << 13
# Of a float32: bits of the fraction, values of sign and exponent, those of the exponent, its bias.
_SHIFT, _FIELDS, _EXPONENTS, _BIAS = 23, 512, 256, 127


class Row(NamedTuple):
    """What was found of one tensor; its sketch, if that was asked for."""

    statistics: Statistics
    sketch: Tensor | None


def fits_row(tensor: Tensor) -> bool:
    """Whether a tensor is small, and its values are floats that lie in order on the CPU."""
    return (
        tensor.dtype in _DTYPES
        and tensor.is_cpu
        and 0 < tensor.numel() <= _LONGEST
        and tensor.is_contiguous()
        and not tensor.is_neg()
    )


def summarize_rows(tensors: Sequence[Tensor], *, sketches: bool) -> list[Row | None]:
    """Summarize tensors that fit rows, in order.

    Returns:
        None for those that need a closer look: they hold NaN, infinities or subnormals.
    """
    found: list[Row | None] = [None] * len(tensors)
    groups: defaultdict[tuple[torch.dtype, int], list[int]] = defaultdict(list)
    for place, tensor in enumerate(tensors):
        groups[tensor.dtype, tensor.numel()].append(place)
    for (_, size), places in groups.items():
        many = _MATRIX // size
        for start in range(0, len(places), many):
            chunk = places[start : start + many]
            rows = _matrix([tensors[place] for place in chunk], size)
            for place, row in zip(chunk, _summaries(rows, sketches=sketches), strict=True):
                found[place] = row
    return found


class _Room(threading.local):
    """Memory to work in, kept per thread: fresh pages for every matrix would cost more."""

    def __init__(self) -> None:
        self.values = torch.empty(0)
        self.wide = np.empty(0)
        self.fields = np.empty(0, np.uint32)

    def reserve(self, size: int) -> None:
        """Have so many of each."""
        if self.wide.size < size:
            self.values = torch.empty(size)
            self.wide = np.empty(size)
            self.fields = np.empty(size, np.uint32)


_ROOM = _Room()


def _matrix(tensors: list[Tensor], size: int) -> Array:
    _ROOM.reserve(len(tensors) * size)
    flat = [tensor.view(-1) for tensor in tensors]
    if tensors[0].dtype != torch.float32:
        return torch.cat(flat).float().numpy().reshape(-1, size)
    if len(tensors) == 1:
        return flat[0].numpy().reshape(1, size)
    room = _ROOM.values[: len(tensors) * size]
    return torch.cat(flat, out=room).numpy().reshape(-1, size)


def _summaries(values: Array, *, sketches: bool) -> Iterator[Row | None]:
    with np.errstate(invalid="ignore", over="ignore"):
        least = np.minimum.reduce(values, axis=1) + 0.0  # a zero of either sign is one
        most = np.maximum.reduce(values, axis=1) + 0.0
        wide = _ROOM.wide[: values.size].reshape(values.shape)
        np.copyto(wide, values)
        totals, squares = np.einsum("ij->i", wide), _squares(wide)
        drawn = _sketches(wide) if sketches else [None] * len(values)
    counts, odd = _exponents(values)
    zeros = [0] * len(values)
    for row in np.flatnonzero(odd).tolist():
        # By their bits: a processor may be told to take subnormals for zeros.
        zeros[row] = values.shape[1] - int(np.count_nonzero(values[row].view(np.uint32) << 1))
    plain = np.isfinite(squares) & (odd == zeros)
    figures = zip(
        plain.tolist(),
        least.tolist(),
        most.tolist(),
        totals.tolist(),
        squares.tolist(),
        zeros,
        counts,
        drawn,
        strict=True,
    )
    size = values.shape[1]
    for fine, minimum, maximum, total, square, none, exponents, sums in figures:
        if not fine:
            yield None
            continue
        statistics = Statistics(
            count=size,
            minimum=minimum,
            maximum=maximum,
            mean=total / size,
            l2=math.sqrt(square),
            zeros=none,
            exponents=exponents,
        )
        yield Row(statistics, sums)


def _squares(wide: Array) -> Array:
    found = np.zeros(len(wide))
    for start in range(0, wide.shape[1], DOT):
        piece = wide[:, start : start + DOT]
        found += np.matmul(piece[:, None, :], piece[:, :, None]).reshape(-1)
    return found


def _exponents(values: Array) -> tuple[list[tuple[tuple[int, int], ...]], Array]:
    """Count the normal values of each row by exponent; and how many others there are."""
    rows, size = values.shape
    fields = _ROOM.fields[: values.size].reshape(rows, size)
    np.right_shift(values.view(np.uint32), _SHIFT, out=fields)
    if rows > 1:
        fields += np.arange(0, rows * _FIELDS, _FIELDS, dtype=np.uint32)[:, None]
    flat = torch.from_numpy(fields.reshape(-1).view(np.int32))
    table = torch.bincount(flat, minlength=rows * _FIELDS).numpy()
    counts = np.add.reduce(table.reshape(rows, 2, _EXPONENTS), axis=1)
    odd = counts[:, 0].copy()
    counts[:, 0] = 0
    where, exponents = np.nonzero(counts)
    many = counts[where, exponents].tolist()
    pairs = list(zip((exponents - _BIAS).tolist(), many, strict=True))
    bounds = np.searchsorted(where, np.arange(rows + 1)).tolist()
    return [tuple(pairs[bounds[row] : bounds[row + 1]]) for row in range(rows)], odd


def _sketches(wide: Array) -> Sequence[Tensor]:
    """The sketch of each row, as `sketch` makes them."""
    rows, size = wide.shape
    width = buckets(size)
    first = first_sign(0)
    signs = sign_table(wide.dtype)[first : first + size]
    turns = size // width
    whole = turns * width
    values = wide[:, :whole].reshape(rows, turns, width)
    sums = np.einsum("rtj,tj->rj", values, signs[:whole].reshape(turns, width))
    sums[:, : size - whole] += wide[:, whole:] * signs[whole:]
    narrow = sums.astype(np.float32)
    if np.isfinite(narrow).all():
        return torch.from_numpy(narrow).unbind()
    return [
        torch.from_numpy(short if np.isfinite(short).all() else long)
        for short, long in zip(narrow, sums, strict=True)
    ]
