"""Differences of many pairs of tensors at once, with one synchronisation per device.

A guarded program compares all its results on every checked call. Reading the figures of one pair
from a CUDA device waits for the device, and leaves it idle until the next request. On the CPU, the
cost of a small pair is mostly the overhead of calls.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from paritas.core.numerics.bits import INTEGERS
from paritas.core.numerics.gates import Sizes, difference_figures, relative_sizes
from paritas.core.numerics.metrics import bitwise_equal, quickly_equal
from paritas.core.torch_private.tensors import figures_of_pairs

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

# The size of a small pair, and of a group of them, in elements.
SMALL, MOST_TOGETHER = 1 << 14, 1 << 15
_TOGETHER = {torch.float32, torch.float64, torch.float16, torch.bfloat16}
_PLAIN = {torch.Tensor, torch.nn.Parameter}


class PairDifference(NamedTuple):
    """Whether the bits of a pair are the same, and its relative difference."""

    identical: bool
    sizes: Sizes | None


def waits_for_device(reference: Tensor, candidate: Tensor) -> bool:
    """Whether reading figures of such a pair waits for a device, and can be deferred."""
    return (
        reference.is_cuda
        and reference.device == candidate.device
        and reference.dtype is candidate.dtype
        and reference.shape == candidate.shape
        and reference.layout is candidate.layout is torch.strided
        and reference.numel() > 0
        and reference.dtype.itemsize in INTEGERS | {16: None}
    )


def differences(pairs: Sequence[tuple[Tensor, Tensor]]) -> list[PairDifference | None]:
    """Measure pairs of candidate and reference, each of one floating dtype, shape and device.

    The result is None for a pair that is better measured alone.
    """
    by_position: dict[int, PairDifference] = {}
    later = [position for position, pair in enumerate(pairs) if waits_for_device(*pair)]
    by_position |= zip(
        later, _measure_on_devices([pairs[position] for position in later]), strict=True
    )
    for places in _group_small_pairs(pairs):
        by_position |= zip(
            places, _measure_on_cpu([pairs[position] for position in places]), strict=True
        )
    return [by_position.get(position) for position in range(len(pairs))]


def _measure_on_devices(pairs: list[tuple[Tensor, Tensor]]) -> list[PairDifference]:
    figures = []
    for candidate, reference in pairs:
        same = _same_bits(candidate, reference)
        figures.append([same, *difference_figures(candidate, reference)])
    rows = _fetch_figures(figures)
    return [
        PairDifference(
            bool(same), relative_sizes(reference.numel() * (1 + reference.is_complex()), *sizes)
        )
        for (same, *sizes), (_, reference) in zip(rows, pairs, strict=True)
    ]


def _group_small_pairs(pairs: Sequence[tuple[Tensor, Tensor]]) -> Iterator[list[int]]:
    """Group the positions of small pairs on the CPU by dtype, in groups of limited size."""
    waiting: dict[torch.dtype, list[int]] = {}
    element_counts: dict[torch.dtype, int] = {}
    for position, (candidate, reference) in enumerate(pairs):
        dtype, count = reference.dtype, reference.numel()
        is_small = 0 < count <= SMALL and dtype in _TOGETHER and reference.is_cpu
        if not is_small or type(candidate) not in _PLAIN or type(reference) not in _PLAIN:
            continue
        if element_counts.get(dtype, 0) + count > MOST_TOGETHER:
            yield waiting.pop(dtype)
            element_counts[dtype] = 0
        waiting.setdefault(dtype, []).append(position)
        element_counts[dtype] = element_counts.get(dtype, 0) + count
    yield from waiting.values()


def _measure_on_cpu(pairs: list[tuple[Tensor, Tensor]]) -> list[PairDifference]:
    """Measure pairs of one dtype; bits are compared only if there is no difference."""
    candidates, references = zip(*pairs, strict=True)
    dtype = torch.float32 if references[0].dtype.itemsize == 2 else None  # noqa: PLR2004
    return [
        PairDifference(
            not total > 0 and quickly_equal(candidate, reference),
            relative_sizes(reference.numel(), size, total, share, most, most),
        )
        for (size, total, most, share), candidate, reference in zip(
            figures_of_pairs(candidates, references, dtype), candidates, references, strict=True
        )
    ]


def all_equal(pairs: Sequence[tuple[Tensor, Tensor]]) -> list[bool]:
    """`bitwise_equal` of each pair."""
    later = [position for position, pair in enumerate(pairs) if waits_for_device(*pair)]
    rows = _fetch_figures([[_same_bits(*pairs[position])] for position in later])
    is_equal_by_position = {
        position: bool(same) for position, (same,) in zip(later, rows, strict=True)
    }
    # NaNs with different bits count as the same; only `bitwise_equal` knows that.
    return [
        is_equal_by_position.get(position) or _same_in_one_call(*pair) or bitwise_equal(*pair)
        for position, pair in enumerate(pairs)
    ]


def _same_in_one_call(a: Tensor, b: Tensor) -> bool:
    """Whether one call shows that the bits of a small pair on the CPU are the same."""
    integers = INTEGERS.get(a.dtype.itemsize)
    return (
        integers is not None
        and a.dtype is b.dtype
        and type(a) is type(b) is torch.Tensor
        and a.is_cpu
        and b.is_cpu
        and a.layout is b.layout is torch.strided
        and not (a.is_complex() or a.is_quantized or a.is_neg() or b.is_neg())
        and a.numel() <= SMALL
        and torch.equal(a.view(integers), b.view(integers))
    )


def _same_bits(a: Tensor, b: Tensor) -> Tensor:
    a, b = a.detach().resolve_conj().resolve_neg(), b.detach().resolve_conj().resolve_neg()
    if a.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    integers = INTEGERS[a.dtype.itemsize]
    return (a.view(integers) == b.view(integers)).all()


def _fetch_figures(figures: list[list[Tensor]]) -> list[list[float]]:
    """Copy all figures to the host, with one transfer from each device."""
    rows: list[list[float]] = [[] for _ in figures]
    for device in {row[0].device for row in figures}:
        places = [row_index for row_index, row in enumerate(figures) if row[0].device == device]
        flat = torch.stack(
            [figure.double() for row_index in places for figure in figures[row_index]]
        ).tolist()
        width = len(flat) // len(places)
        for number, position in enumerate(places):
            rows[position] = flat[number * width : (number + 1) * width]
    return rows
