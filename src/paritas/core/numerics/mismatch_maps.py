"""Where the mismatches of a pair are: a map, a histogram and the worst elements, for people."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from paritas.core.numerics.bits import (
    check_dtype,
    grid_distance,
    has_ulps,
    same_bits,
    ulp_distance,
)
from paritas.core.numerics.flat_blocks import blocks
from paritas.core.numerics.pair_sums import WIDE_INTEGERS, unravel
from paritas.core.results.details import Detail, HeatMap, WorstElement

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

# --- Maps, histograms and the worst elements ------------------------------------------------------

_ROWS, _COLUMNS = 48, 96
_MOST_WORST = 20
# An element of a block needs about 100 bytes of working memory.
_BLOCK = 1 << 18
_MOST_EXPONENTS = 66


def mismatch_detail(reference: Tensor, candidate: Tensor) -> Detail:
    """Details of a pair: a map, a histogram, the worst elements, and the box around all mismatches.

    Elements are compared as numbers: NaN equals NaN, and -0.0 equals +0.0. An element that is NaN
    or infinite on one side only is infinitely far off and listed first; the others follow by
    absolute difference. Memory stays below 64 MiB for any tensor size.

    Args:
        reference: any strided tensor of numbers.
        candidate: a tensor of the same shape; dtype and strides may differ.

    Raises:
        UsageError: (a `ValueError`) the shapes differ, or a dtype holds no numbers.
    """
    for tensor in (reference, candidate):
        check_dtype(tensor.dtype)
    walk = _MismatchWalk(reference, candidate)
    for block in _pair_blocks(reference, candidate):
        walk.take(block)
    return Detail(
        heat=_draw_heat_map(reference, candidate, walk.marginals) if walk.kept else None,
        ulps=walk.histogram(),
        worst=walk.worst(),
        region=walk.region(),
    )


class _PairBlock(NamedTuple):
    """A block of two tensors.

    Attributes:
        offset: the flat index of its first element.
        width: elements per row, along the last axis; 1 if a row is longer than a block, so that
            every element is a row.
    """

    offset: int
    width: int
    reference: Tensor
    candidate: Tensor


def _pair_blocks(reference: Tensor, candidate: Tensor) -> Iterator[_PairBlock]:
    last = reference.shape[-1] if reference.ndim else 1
    width = last if 0 < last <= _BLOCK else 1
    size = _BLOCK // width * width
    for offset, pair in blocks(reference, candidate, block_size=size):
        yield _PairBlock(offset, width, pair[0].cpu(), pair[1].cpu())


class _MismatchWalk:
    """Running results over the blocks of two tensors.

    Attributes:
        marginals: counts of mismatches along each axis.
        kept: the worst so far: distance, ulps, flat index, golden value, my value.
    """

    def __init__(self, reference: Tensor, candidate: Tensor) -> None:
        self.marginals = [Marginal(extent, _COLUMNS) for extent in reference.shape]
        self.kept: list[tuple[float, float, int, float, float]] = []
        self._shape = tuple(reference.shape)
        self._has_ulps = has_ulps(reference.dtype, candidate.dtype)
        self._ulps = [0] * _MOST_EXPONENTS

    def take(self, block: _PairBlock) -> None:
        """Add one block."""
        reference, candidate = block.reference, block.candidate
        if reference.dtype == candidate.dtype and same_bits(reference, candidate):
            self._ulps[0] += reference.numel()
            return
        r, c = _as_reals(reference, candidate)
        apart, is_finite = _distance(reference, candidate, r, c)
        ulps = None
        if self._has_ulps:
            ulps = (grid_distance if is_finite else ulp_distance)(reference, candidate)
            self._count_ulps(ulps)
        self._count_places(block, apart)
        self._keep_worst(block, apart, ulps, (r, c))

    def _count_ulps(self, ulps: Tensor) -> None:
        """Bin 0 counts equal elements, bin k + 1 those that are 2^k to 2^(k+1) ulp apart."""
        # Finite numbers never reach the last bin.
        _, exponent = torch.frexp(ulps.clamp(max=2.0 ** (_MOST_EXPONENTS - 2)))
        counts = torch.bincount(exponent, minlength=_MOST_EXPONENTS).tolist()
        self._ulps = [a + b for a, b in zip(self._ulps, counts, strict=True)]

    def _count_places(self, block: _PairBlock, apart: Tensor) -> None:
        rows = (apart != 0).view(-1, block.width)
        per_row = rows.sum(1)
        mismatched_rows = per_row.nonzero().squeeze(1)
        if not mismatched_rows.numel():
            return
        index = _outer_index(block, mismatched_rows, self._shape)
        weights = per_row[mismatched_rows]
        for marginal, positions in zip(self.marginals, index, strict=False):
            marginal.add(positions, weights)
        if len(index) < len(self.marginals):
            per_column = rows.sum(0)
            columns = per_column.nonzero().squeeze(1)
            self.marginals[-1].add(columns, per_column[columns])

    def _keep_worst(
        self, block: _PairBlock, apart: Tensor, ulps: Tensor | None, sides: tuple[Tensor, Tensor]
    ) -> None:
        full = len(self.kept) == _MOST_WORST
        least = self.kept[-1][0] if full else 0.0
        # The first of equal ones is kept, which `topk` does not guarantee: hence the stable sort.
        count = min(_MOST_WORST, apart.numel())
        least = max(least, float(apart.topk(count).values[-1]))
        chosen = ((apart >= least) & (apart > 0)).nonzero().squeeze(1)
        chosen = chosen[apart[chosen].argsort(descending=True, stable=True)[:count]]
        self.kept += zip(
            apart[chosen].tolist(),
            [0.0] * chosen.numel() if ulps is None else ulps[chosen].tolist(),
            (chosen + block.offset).tolist(),
            _moduli(sides[0][chosen]),
            _moduli(sides[1][chosen]),
            strict=True,
        )
        self.kept.sort(key=lambda entry: (-entry[0], entry[2]))
        del self.kept[_MOST_WORST:]

    def histogram(self) -> tuple[tuple[int, int], ...]:
        """Counts of distances in ulps."""
        if not self._has_ulps:
            return ()
        return tuple((at - 1, count) for at, count in enumerate(self._ulps) if count)

    def worst(self) -> tuple[WorstElement, ...]:
        """The elements with the largest errors."""
        return tuple(
            WorstElement(
                index=unravel(flat, self._shape),
                my=my,
                golden=golden,
                ulps=ulps if self._has_ulps else None,
            )
            for _, ulps, flat, golden, my in self.kept
        )

    def region(self) -> tuple[tuple[int, int], ...]:
        """The box around all mismatches; empty if there are none."""
        return tuple(marginal.bounds() for marginal in self.marginals) if self.kept else ()


# --- the map --------------------------------------------------------------------------------------


def _draw_heat_map(
    reference: Tensor, candidate: Tensor, marginals: Sequence[Marginal]
) -> HeatMap | None:
    """The map over the most informative axes, in another pass over the tensors."""
    axes = telling_axes(marginals)
    if not axes:
        return None
    extents = tuple(reference.shape[axis] for axis in axes)
    # A single axis is shown horizontally.
    bins = tuple(map(min, extents, (_ROWS, _COLUMNS)[-len(axes) :]))
    counts = torch.zeros(bins, dtype=torch.int64).view(-1, bins[-1])
    largest = torch.zeros(bins, dtype=torch.float64).view(-1, bins[-1])
    for block in _pair_blocks(reference, candidate):
        sides = block.reference, block.candidate
        apart = _distance(*sides, *_as_reals(*sides))[0].view(-1, block.width)
        mismatched = apart != 0
        index = _outer_index(block, torch.arange(len(apart)), tuple(reference.shape))
        if len(index) <= axes[-1]:  # the last axis is one of them
            across = torch.arange(block.width) * bins[-1] // block.width
        else:
            across = torch.zeros(1, dtype=torch.int64)
            apart, mismatched = apart.amax(1, keepdim=True), mismatched.sum(1, keepdim=True)
        cell = torch.zeros(len(apart), dtype=torch.int64)
        for axis, extent, count in zip(axes, extents, bins, strict=True):
            if axis < len(index):
                cell = cell * count + index[axis] * count // extent
        _add_to_map(counts, largest, cell, across, mismatched, apart)
    top = float(largest.max())
    # Compared with an infinite difference, all others are 0.
    share = largest.isinf().double() if math.isinf(top) else largest / top
    return HeatMap(
        axes=axes,
        extents=extents,
        cells=tuple(map(tuple, share.tolist())),
        counts=tuple(map(tuple, counts.tolist())),
    )


def _add_to_map(
    counts: Tensor,
    largest: Tensor,
    down: Tensor,
    across: Tensor,
    mismatched: Tensor,
    apart: Tensor,
) -> None:
    """Add rows to a map, each column to its cell."""
    # If rows were reduced to one number, `down` is the cell, and there is one column.
    cells = down[:, None] * (counts.shape[1] if len(across) > 1 else 1) + across
    counts.view(-1).index_add_(0, cells.view(-1), mismatched.long().view(-1))
    largest.view(-1).scatter_reduce_(0, cells.view(-1), apart.reshape(-1), "amax")


# --- a block --------------------------------------------------------------------------------------


def _as_reals(reference: Tensor, candidate: Tensor) -> tuple[Tensor, Tensor]:
    """Both chunks in float64; two columns for complex numbers."""
    if not (reference.is_complex() or candidate.is_complex()):
        return reference.double(), candidate.double()
    wide = [chunk.to(torch.complex128).resolve_conj() for chunk in (reference, candidate)]
    return torch.view_as_real(wide[0]), torch.view_as_real(wide[1])


def _distance(reference: Tensor, candidate: Tensor, r: Tensor, c: Tensor) -> tuple[Tensor, bool]:
    """|candidate - reference|, and whether all numbers are finite.

    It is 0 where they are equal, and infinite where only one is finite or they differ otherwise.
    """
    apart = (c - r).abs_()
    if reference.dtype == candidate.dtype and reference.dtype in WIDE_INTEGERS:
        # Different 64-bit integers may round to the same float64.
        unlike = reference.view(torch.int64) != candidate.view(torch.int64)
        return torch.where(unlike, apart.clamp_(min=1.0), 0.0), True
    is_finite = bool(apart.sum().isfinite())
    if not is_finite:
        apart.masked_fill_(~(r.isfinite() & c.isfinite()), torch.inf)
        apart.masked_fill_((r == c) | (r.isnan() & c.isnan()), 0.0)
    return apart if apart.ndim == 1 else torch.hypot(apart[:, 0], apart[:, 1]), is_finite


def _outer_index(block: _PairBlock, rows: Tensor, shape: tuple[int, ...]) -> list[Tensor]:
    """Positions of rows of a block along all axes except the last (all axes if width is 1)."""
    outer = shape if block.width == 1 else shape[:-1]
    return list(torch.unravel_index(rows + block.offset // block.width, outer)) if outer else []


def _moduli(values: Tensor) -> list[float]:
    moduli: list[float] = (
        values if values.ndim == 1 else torch.hypot(values[:, 0], values[:, 1])
    ).tolist()
    return moduli


# --- Axes along which mismatches are unevenly distributed -----------------------------------------

_MOST_PLACES = 1 << 16
# Above this many mismatches per place, their sampling noise has a simple form.
_MANY = 30.0


class Marginal:
    """Counts of mismatches along one axis, shown in `bins` bins."""

    def __init__(self, extent: int, bins: int) -> None:
        self.extent = extent
        self._bins = min(bins, extent)
        self._counts = torch.zeros(min(extent, _MOST_PLACES), dtype=torch.int64)
        self._low, self._high = extent, -1

    def add(self, positions: Tensor, counts: Tensor) -> None:
        """Add mismatches at these positions."""
        low, high = positions.aminmax()
        self._low, self._high = min(self._low, int(low)), max(self._high, int(high))
        size = self._counts.numel()
        places = positions if size == self.extent else positions * size // self.extent
        self._counts.index_add_(0, places, counts)

    def bounds(self) -> tuple[int, int]:
        """The first position with a mismatch, and the one after the last."""
        return self._low, self._high + 1

    def information(self) -> float:
        """The information in the position of a mismatch, in bits above chance.

        Single positions show every k-th index, bins show a range: the larger value counts.
        """
        size = self._counts.numel()
        bin_of = torch.arange(size) * self._bins // size if size else self._counts
        binned = torch.zeros(self._bins, dtype=torch.int64).index_add_(0, bin_of, self._counts)
        widths = torch.bincount(bin_of, minlength=self._bins)
        fine = _information_gain(self._counts, torch.ones_like(self._counts))
        return max(fine, _information_gain(binned, widths), 0.0)


def telling_axes(marginals: Sequence[Marginal]) -> tuple[int, ...]:
    """The two most informative axes, in their order; longer ones first on a tie.

    Axes of length 1 are skipped. A single axis is returned if there is only one.
    """
    axes = [axis for axis, marginal in enumerate(marginals) if marginal.extent > 1]
    axes = axes or list(range(len(marginals)))[:1]
    bits = {axis: round(marginals[axis].information(), 3) for axis in axes}
    best = sorted(axes, key=lambda axis: (-bits[axis], -marginals[axis].extent, -axis))
    return tuple(sorted(best[:2]))


def _information_gain(counts: Tensor, widths: Tensor) -> float:
    """Divergence of the counts from a uniform distribution in bits, less that of chance."""
    total = int(counts.sum())
    if not total:
        return 0.0
    share, even = counts / total, widths / widths.sum()
    gain = torch.where(counts > 0, share * (share / even).log2(), 0.0).sum()
    return float(gain) - _gain_by_chance(total / counts.numel())


def _gain_by_chance(mean: float) -> float:
    """The expected divergence of uniformly drawn counts with this mean."""
    if mean > _MANY:
        return 1 / (2 * mean * math.log(2))
    chance, expected = math.exp(-mean), 0.0
    for count in range(1, int(mean + 10 * math.sqrt(mean)) + 10):
        chance *= mean / count
        expected += chance * count / mean * math.log2(count / mean)
    return expected
