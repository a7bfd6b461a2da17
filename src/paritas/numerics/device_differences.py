"""How far pairs of tensors on CUDA devices are apart, many pairs at once, and one wait for all.

A guarded program compares all its results on every checked call. To ask for the figures of one
pair is to wait until the device has come so far, and to leave it idle until the next is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from paritas.numerics.criterion import difference_figures, relative_sizes
from paritas.numerics.metrics import bitwise_equal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = ["Apart", "all_equal", "differences", "waits"]

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Apart(NamedTuple):
    """What is known of a pair: whether its bits are the same, and its relative difference."""

    identical: bool
    sizes: tuple[float, float] | None


def waits(reference: Tensor, candidate: Tensor) -> bool:
    """Whether to ask for figures of such a pair is to wait for a device, and can be put off."""
    return (
        reference.is_cuda
        and reference.device == candidate.device
        and reference.dtype is candidate.dtype
        and reference.shape == candidate.shape
        and reference.layout is candidate.layout is torch.strided
        and reference.numel() > 0
        and reference.dtype.itemsize in _INTEGERS | {16: None}
    )


def differences(pairs: Sequence[tuple[Tensor, Tensor]]) -> list[Apart]:
    """Of candidates and references, each pair of floats of one dtype, shape and device."""
    figures = []
    for candidate, reference in pairs:
        same = _same_bits(candidate, reference)
        figures.append([same, *difference_figures(candidate, reference)])
    rows = _brought_over(figures)
    return [
        Apart(bool(same), relative_sizes(reference.numel() * (1 + reference.is_complex()), *sizes))
        for (same, *sizes), (_, reference) in zip(rows, pairs, strict=True)
    ]


def all_equal(pairs: Sequence[tuple[Tensor, Tensor]]) -> list[bool]:
    """`bitwise_equal` of each pair."""
    later = [place for place, pair in enumerate(pairs) if waits(*pair)]
    rows = _brought_over([[_same_bits(*pairs[place])] for place in later])
    found = {place: bool(same) for place, (same,) in zip(later, rows, strict=True)}
    # Two NaNs of different bits are the same, which one operator cannot tell.
    return [found.get(place) or bitwise_equal(*pair) for place, pair in enumerate(pairs)]


def _same_bits(a: Tensor, b: Tensor) -> Tensor:
    a, b = a.detach().resolve_conj().resolve_neg(), b.detach().resolve_conj().resolve_neg()
    if a.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    integers = _INTEGERS[a.dtype.itemsize]
    return (a.view(integers) == b.view(integers)).all()


def _brought_over(figures: list[list[Tensor]]) -> list[list[float]]:
    """All of them on the host, by one transfer from each device."""
    rows: list[list[float]] = [[] for _ in figures]
    for device in {row[0].device for row in figures}:
        places = [place for place, row in enumerate(figures) if row[0].device == device]
        flat = torch.stack([one.double() for place in places for one in figures[place]]).tolist()
        width = len(flat) // len(places)
        for number, place in enumerate(places):
            rows[place] = flat[number * width : (number + 1) * width]
    return rows
