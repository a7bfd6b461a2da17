"""Figures pooled over elements of like origin, never over a whole tensor.

Few perturbed runs measure the noise of one element roughly, so it is pooled with that of others. A
mean over the whole tensor would let one value of 1e30, or two large activations, hide that all
others are wrong. So elements are pooled with those of like magnitude: within a factor of two, and
further only where these are few. Of a large tensor a sample is looked at; what is a little smaller
or larger than all of it belongs to its smallest or largest class. The mean of absolute values is
used, not of squares: a row that is a thousand times larger has one small value in a thousand, with
a thousand times the noise, so that what it adds to the mean of the small ones stays bounded.

A value that is smaller than its noise has no magnitude of its own: where a sum cancels, chance
decides whether 1e-15, 1e-18 or exactly 0 is left. If few elements are like it, it is pooled with
the others of its population that are all noise.

A typical value, where one is needed, is that of the *population* of an element: values without a
gap of many octaves between them. A mask of -1e30, or a few massive activations, are a population of
their own, and so are the values beside them.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

# Few elements are fitted by any few runs, and many are as good as all.
LEAST_SAMPLE, MOST_SAMPLE = 64, 1 << 17

# Magnitudes are classed by octaves: the exponents of float64, 0 for zero.
CLASSES = 1 << 11
_MANTISSA_BITS = 52
# Octaves to each side that are pooled: the first, or, up to the last, as many as are needed for
# this many elements.
_REACHES = (1, 2, 4)
_ENOUGH = 32
# Numbers of one origin leave no gap of this many octaves, except by cancelling: that happens to one
# or two of them. They belong to those above.
_GAP = 8
_FEW = 2
# The root mean square of normal numbers, over the mean of their absolute values.
_MEAN_TO_RMS = math.sqrt(math.pi / 2)


def sample(tensor: Tensor) -> Tensor:
    """Some elements of a tensor, always the same, evenly spread over it."""
    step = max(1, tensor.numel() // MOST_SAMPLE)
    return tensor.detach().reshape(-1)[:: step | 1].double().cpu()  # odd: in no step with rows


@dataclasses.dataclass(frozen=True)
class Magnitudes:
    """The octaves of a tensor's elements, counted from a typical one: no scale is special."""

    typical: float

    @classmethod
    def of(cls, values: Tensor) -> Magnitudes:
        """Of a sample: from its median, which is an element, moved off the edge of its octave."""
        sizes = values[torch.isfinite(values) & (values != 0)].abs()
        return cls(float(sizes.median()) / math.sqrt(2) if sizes.numel() else 1.0)

    def classes(self, values: Tensor) -> Tensor:
        """The octave of each element of a real tensor in float64."""
        return ((values / self.typical).view(torch.int64) >> _MANTISSA_BITS) & (CLASSES - 1)


@dataclasses.dataclass(frozen=True)
class Pooled:
    """A figure of noise for each class of magnitudes.

    Attributes:
        whole: its root mean square over the whole tensor.
        by_class: its root mean square for elements of like magnitude, if it is normal; the classes
            are those of `Populations` of the same tensor.
        by_population: its root mean square for elements of one population, by class.
    """

    whole: float
    by_class: Tensor
    by_population: Tensor

    def times(self, factor: float) -> Pooled:
        """All of it, multiplied."""
        return Pooled(self.whole * factor, self.by_class * factor, self.by_population * factor)

    def over_populations(self) -> Pooled:
        """Pooled less closely: over populations, and not over like magnitudes alone."""
        return Pooled(self.whole, self.by_population, self.by_population)


_NOTHING = torch.zeros(CLASSES, dtype=torch.float64)
NO_NOISE = Pooled(0.0, _NOTHING, _NOTHING)


def pool(noise: Tensor, truth: Tensor, noise_rms: float) -> Pooled:
    """Pool the noise of elements with like truth; what is not finite is left out.

    Args:
        noise: one number for each element; its sign does not matter.
        truth: the values, of the same shape, real.
        noise_rms: the root mean square of `noise`.
    """
    return _pool_samples(sample(noise), sample(truth), noise_rms, truth.numel())


def pool_difference(value: Tensor, truth: Tensor, error_rms: float) -> Pooled:
    """Pool the error of a value; both are real, and `error_rms` is its root mean square."""
    true = sample(truth)
    return _pool_samples(sample(value) - true, true, error_rms, truth.numel())


def _pool_samples(noise: Tensor, truth: Tensor, noise_rms: float, numel: int) -> Pooled:
    """`numel` is the number of elements that the samples are of."""
    magnitudes = Magnitudes.of(truth)
    finite = torch.isfinite(noise) & torch.isfinite(truth)
    if not bool(finite.all()):
        noise, truth = noise[finite], truth[finite]
    if not truth.numel() or not noise_rms:
        return Pooled(noise_rms, _NOTHING, _NOTHING)
    reach = _reach_beyond(truth, numel)
    classes = magnitudes.classes(truth)
    counts = torch.bincount(classes, minlength=CLASSES)
    # Divided first: a sum of the largest numbers would overflow.
    totals = torch.bincount(classes, noise.abs() / truth.numel(), minlength=CLASSES)
    totals *= truth.numel()
    means, is_known = _mean_around(totals, counts.double())
    groups = list(_group_octaves(counts))
    for below, mean in _group_noise(totals, counts, groups, magnitudes):
        few = below[~is_known[below]]
        means[few] = means[few].clamp(min=mean)
    by_population = _rms_by_population(noise.abs(), classes, groups)[1]
    used = counts[1:].nonzero().flatten() + 1
    if reach and used.numel():
        lowest, highest = int(used[0]), int(used[-1])
        # Below the noise, all values have the same; above it, it shrinks with them.
        is_noise = int(magnitudes.classes(means[lowest : lowest + 1])) > lowest
        _extend_below(by_population, lowest, reach)
        _extend_below(means, lowest, reach, shrinks=not is_noise)
        for figures in (by_population, means):
            above = figures[highest + 1 : highest + 1 + reach]
            above.copy_(torch.where(above == 0, figures[highest], above))
    return Pooled(noise_rms, means * _MEAN_TO_RMS, by_population)


def _reach_beyond(values: Tensor, numel: int) -> int:
    """How many octaves beyond those of a sample the other elements may reach; 0 if it has all.

    The smallest of n times as many numbers that sums leave is n times smaller.
    """
    if values.numel() >= numel:
        return 0
    return _GAP + math.ceil(math.log2(numel / values.numel()))


def _extend_below(by_class: Tensor, lowest: int, reach: int, *, shrinks: bool = False) -> None:
    """Fill the empty classes below the lowest one of a sample with its figure."""
    below = by_class[max(1, lowest - reach) : lowest]
    octaves = torch.arange(len(below), 0, -1, dtype=torch.float64) if shrinks else 0.0
    below.copy_(torch.where(below == 0, by_class[lowest] * 2.0**-octaves, below))


def _group_noise(
    totals: Tensor, counts: Tensor, groups: list[list[int]], magnitudes: Magnitudes
) -> Iterator[tuple[Tensor, float]]:
    """The classes of each population whose values are smaller than their noise, and its mean.

    Zeros belong to the smallest population.
    """
    for group in groups:
        below = torch.tensor(group[::-1] if group is not groups[-1] else [0, *group[::-1]])
        # For each class, the mean over it and those below it: one large error is not typical.
        means = totals[below].cumsum(0) / counts[below].cumsum(0).clamp(min=1)
        is_noise = magnitudes.classes(means) > below
        if bool(is_noise.any()):
            last = int(is_noise.nonzero()[-1])
            yield below[: last + 1], float(means[last])


def _mean_around(totals: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """The mean for each class, over as few classes around it as have enough elements.

    Also whether there are enough in the farthest of these.
    """
    used, far = counts.nonzero(), _REACHES[-1]
    # Most classes are far from all elements.
    near = slice(max(0, int(used[0]) - far), int(used[-1]) + far + 1)
    both = torch.nn.functional.pad(torch.stack([totals[near], counts[near]]), (far, far))
    # Not as differences of running sums, which lose what is next to far larger numbers.
    windows = both.unfold(1, 2 * far + 1, 1)
    sums = [windows[..., far - reach : far + reach + 1].sum(-1) for reach in _REACHES]
    *closer, (total, around) = sums
    mean = total / around.clamp(min=1)
    for total, closely in reversed(closer):
        mean = torch.where(closely >= _ENOUGH, total / closely.clamp(min=1), mean)
    means = torch.zeros_like(totals)
    is_known = torch.zeros_like(totals, dtype=torch.bool)
    means[near], is_known[near] = mean, around >= _ENOUGH
    return means, is_known


@dataclasses.dataclass(frozen=True)
class Populations:
    """The populations of a tensor, by magnitude.

    Attributes:
        magnitudes: the classes of its elements.
        scales: the root mean square of each population, the largest first.
        by_class: the same by class; 0 for classes without elements.
        is_whole: whether all elements were looked at, and not a sample.
    """

    magnitudes: Magnitudes
    scales: tuple[float, ...]
    by_class: Tensor
    is_whole: bool

    @property
    def least(self) -> float:
        """The smallest typical value; 0 if all are zero."""
        return self.scales[-1] if self.scales else 0.0

    def scale(self, values: Tensor) -> Tensor | float:
        """The typical value of each element's population; `values` are real, in float64."""
        if len(self.scales) <= 1 and self.is_whole:
            return self.least
        scales = self.by_class.to(values.device)[self.magnitudes.classes(values)]
        # A few values far from all that a sample has met are a population of their own.
        return torch.where(scales == 0, values.abs(), scales)


def populations(tensor: Tensor) -> Populations:
    """The populations of the finite elements of a real tensor; zeros belong to the smallest."""
    values = sample(tensor)
    is_whole = values.numel() == tensor.numel()
    values = values[torch.isfinite(values)].abs()
    magnitudes = Magnitudes.of(values)
    classes = magnitudes.classes(values)
    groups = list(_group_octaves(torch.bincount(classes, minlength=CLASSES)))
    scales, by_class = _rms_by_population(values, classes, groups)
    if groups and not is_whole:
        _extend_below(by_class, groups[-1][-1], _reach_beyond(values, tensor.numel()))
    return Populations(magnitudes, scales, by_class, is_whole)


def _rms_by_population(
    values: Tensor, classes: Tensor, groups: list[list[int]]
) -> tuple[tuple[float, ...], Tensor]:
    """The root mean square of the values of each population, the largest first, and by class."""
    by_class = torch.zeros(CLASSES, dtype=torch.float64)
    population_means = []
    for group in groups:
        low, high = group[-1], group[0]
        members = values[(classes >= low) & (classes <= high)]
        top = float(members.max())
        mean = top * float((members / top).square().mean().sqrt()) if top else 0.0
        by_class[low : high + 1] = mean
        population_means.append(mean)
    by_class[0] = population_means[-1] if population_means else 0.0
    return tuple(population_means), by_class


def _group_octaves(counts: Tensor) -> Iterator[list[int]]:
    """The octaves of each population, from the largest."""
    used = counts[1:].nonzero().flatten().add_(1)
    octaves = used.tolist()[::-1]
    numbers = dict(zip(octaves, counts[used].tolist()[::-1], strict=True))
    group: list[int] = []
    for octave in octaves:
        is_apart = group and group[-1] - octave > _GAP
        if is_apart and sum(numbers[low] for low in octaves if low <= octave) > _FEW:
            yield group
            group = []
        group.append(octave)
    if group:
        yield group
