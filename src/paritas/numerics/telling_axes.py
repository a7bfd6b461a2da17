"""Along which axes of a tensor the mismatches lie unevenly."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = ["Marginal", "telling_axes"]

_MOST_PLACES = 1 << 16
# From so many mismatches per place on, their sampling noise has a simple form.
_MANY = 30.0


class Marginal:
    """How many mismatches lie where along one axis."""

    def __init__(self, extent: int, bins: int) -> None:
        """Count along an axis.

        Args:
            bins: into so many the axis is put where it is shown.
        """
        self.extent = extent
        self._bins = min(bins, extent)
        self._counts = torch.zeros(min(extent, _MOST_PLACES), dtype=torch.int64)
        self._low, self._high = extent, -1

    def add(self, positions: Tensor, counts: Tensor) -> None:
        """Add so many mismatches at each of these places."""
        low, high = positions.aminmax()
        self._low, self._high = min(self._low, int(low)), max(self._high, int(high))
        size = self._counts.numel()
        places = positions if size == self.extent else positions * size // self.extent
        self._counts.index_add_(0, places, counts)

    def bounds(self) -> tuple[int, int]:
        """The first place that has a mismatch, and that after the last."""
        return self._low, self._high + 1

    def information(self) -> float:
        """How many bits the place of a mismatch tells, beyond what chance would.

        Places one by one show each k-th index, places in bins show a stretch: the better counts.
        """
        size = self._counts.numel()
        bin_of = torch.arange(size) * self._bins // size if size else self._counts
        binned = torch.zeros(self._bins, dtype=torch.int64).index_add_(0, bin_of, self._counts)
        widths = torch.bincount(bin_of, minlength=self._bins)
        fine = _gain(self._counts, torch.ones_like(self._counts))
        return max(fine, _gain(binned, widths), 0.0)


def telling_axes(marginals: Sequence[Marginal]) -> tuple[int, ...]:
    """The two axes that tell the most, in their order; longer ones where that is a tie.

    Axes of length 1 tell nothing; a single axis is given where there is but one.
    """
    found = [axis for axis, one in enumerate(marginals) if one.extent > 1]
    found = found or list(range(len(marginals)))[:1]
    told = {axis: round(marginals[axis].information(), 3) for axis in found}
    best = sorted(found, key=lambda axis: (-told[axis], -marginals[axis].extent, -axis))
    return tuple(sorted(best[:2]))


def _gain(counts: Tensor, widths: Tensor) -> float:
    """Divergence, in bits, of the counts from even ones, less what an even draw would show."""
    total = int(counts.sum())
    if not total:
        return 0.0
    share, even = counts / total, widths / widths.sum()
    gain = torch.where(counts > 0, share * (share / even).log2(), 0.0).sum()
    return float(gain) - _by_chance(total / counts.numel())


def _by_chance(mean: float) -> float:
    """The divergence that counts have that are drawn evenly, so many on average."""
    if mean > _MANY:
        return 1 / (2 * mean * math.log(2))
    chance, expected = math.exp(-mean), 0.0
    for count in range(1, int(mean + 10 * math.sqrt(mean)) + 10):
        chance *= mean / count
        expected += chance * count / mean * math.log2(count / mean)
    return expected
