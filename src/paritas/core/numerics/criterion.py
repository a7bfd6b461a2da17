"""The one acceptance rule: a tensor's error in multiples of the reference's own noise.

With `r` the arbiter, `c` the candidate, `s` the spread of the reference under its own rounding and
`e - r` the reference's measured error, an element's noise is

    d = max(s, pool(s) / 2, |e - r| / 2, pool(e - r) / 2) + (u |r| + v t) / 2,   z = |c - r| / d.

`pool` is the root mean square over elements of like magnitude (`pooling.py`), because few runs, and
one error, measure the noise of one element roughly. It is never that of the whole tensor, which one
large value decides. What is typical of the whole counts only up to a small share of the element
itself, `borrowed_share`: too little to hide that the element is wrong. `t` is the typical value of
those without a gap of many octaves to it, and `v` the rounding inside operators, in float32 at
least: terms of that size may cancel there.

Once a lifted run has settled the meaning, 0.8 rms(e - r) over the element's population replaces
pool(e - r) / 2: only accuracy is left to judge, and twice the reference's own error is not a loss
that anyone should look into.

The candidate fails where any z exceeds 12, or the root mean square of z exceeds 2.5 over the whole
tensor or over one slice along an axis. Nothing here is an absolute tolerance: multiply a program's
output by any factor and every z stays as it was. A wide plateau of constants (8-24 and 1.5-4) gives
the same verdicts; they are constants of the rule, not knobs.

Two figures of the whole tensor are judged more strictly, because perturbed runs show how large they
are for this program: see `whole_error.py`.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch

from paritas.core.numerics.pooling import (
    LEAST_SAMPLE,
    NO_NOISE,
    Pooled,
    Populations,
    pool,
    pool_difference,
    populations,
    sample,
)
from paritas.core.results.findings import Score

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch import Tensor


# Squares of numbers between these neither overflow nor lose digits.
_LEAST_PLAIN, _MOST_PLAIN = 1e-140, 1e140


def root_mean_square(parts: Iterable[Tensor]) -> float:
    """Over the finite elements; a part with extreme values is scaled by its largest."""
    largest, squares, count = 0.0, 0.0, 0
    for part in parts:
        # Each number that is read makes the host wait for a device: one, if that is enough.
        norm = float(torch.linalg.vector_norm(part))
        if _LEAST_PLAIN < norm < _MOST_PLAIN:
            count += part.numel()
            if norm > largest:
                squares, largest = squares * (largest / norm) ** 2 + 1.0, norm
            else:
                squares += (norm / largest) ** 2
            continue
        values, finite = part, part.numel()
        top = max(map(abs, map(float, torch.aminmax(part))))
        if not math.isfinite(top):
            is_finite = torch.isfinite(part)
            values, finite = torch.where(is_finite, part, 0.0), int(is_finite.sum())
            top = float(values.abs().max())
        count += finite
        if top == 0:
            continue
        part_squares = float((values / top).square().sum())
        if top > largest:
            squares, largest = squares * (largest / top) ** 2 + part_squares, top
        else:
            squares += part_squares * (top / largest) ** 2
    return largest * math.sqrt(squares / count) if count else 0.0


MAX_Z = 12.0
RMS_Z = 2.5
# The share of the reference's own typical error that counts as noise, before and after a lifted run
# has settled the meaning. The second lets twice that error pass: 2 / 0.8 = RMS_Z.
OWN_SHARE, OWN_SHARE_SETTLED = 0.5, 0.8
# A spread above this share of the value's scale means that rounding decides the value itself.
KNIFE_EDGE_SHARE = 0.1
# Elements per chunk: on the CPU few enough for the caches, on a device many enough to
# outweigh the calls.
CHUNK = 1 << 18
DEVICE_CHUNK = 1 << 23
# The spread of one perturbation by u/2 * uniform[-1, 1], in units of u.
ONE_ROUNDING = 0.5 / math.sqrt(3)

UNIT_F64 = 2.0**-53
UNIT_F32 = 2.0**-24


def unit_roundoff(dtype: torch.dtype) -> float:
    """The unit roundoff u of a floating or complex dtype."""
    return torch.finfo(dtype).eps / 2


def smallest_step(dtype: torch.dtype) -> float:
    """The distance between neighbouring numbers around zero."""
    info = torch.finfo(dtype)
    return info.tiny * info.eps


@dataclasses.dataclass(frozen=True)
class Jumps:
    """How far decisions near their threshold move values: gates, choices, roundings.

    Attributes:
        size: how far, per element.
        decides: where a decision causes it, and not a noise so large that it is asymmetric.
        pairs: how far each run of each pair moved a sample of the elements (pair, run, element);
            None if unknown.
    """

    size: Tensor
    decides: Tensor
    pairs: Tensor | None = None

    def or_larger(self, other: Jumps) -> Jumps:
        """The elementwise maximum of two."""
        size = torch.maximum(self.size, other.size)
        both = [jumps.pairs for jumps in (self, other) if jumps.pairs is not None]
        pairs = torch.cat(both) if len(both) == 2 else None  # noqa: PLR2004
        return Jumps(size, self.decides | other.decides, pairs)

    def map(self, change: Callable[[Tensor], Tensor]) -> Jumps:
        """Apply a change of shape to both tensors."""
        return Jumps(change(self.size), change(self.decides))


@dataclasses.dataclass(frozen=True)
class Unexplained:
    """What remains of an error after the best combination of what decisions did in other runs.

    In multiples of the typical value.

    Attributes:
        error: the rms of the rest.
        usual: the median of the same figure for the runs themselves, each explained by the others.
        most: the largest of these.
    """

    error: float
    usual: float
    most: float


def measure_unexplained(candidate: Tensor, truth: Tensor, pairs: Tensor) -> Unexplained | None:
    """How much of a candidate's error is not what decisions near their threshold do.

    A decision that flips moves a value by a fixed pattern, however large. So a flip in the
    candidate is a combination of the movements of perturbed runs, and only rounding remains; other
    errors remain as they are. If there are too many decisions for that, a run is not explained by
    the others either. None if there are too few elements to tell. Errors count as shares of the
    typical value of their population.
    """
    true = sample(truth)
    error = sample(candidate) - true
    if error.numel() < LEAST_SAMPLE or not bool(torch.isfinite(error).all()):
        return None
    scale = nonzero(populations(truth).scale(true))
    error, pairs = error / scale, pairs / scale
    runs = pairs.flatten(0, 1)
    # The other run of a pair has the opposite noise and would explain it.
    rests = [
        _rest(moved, torch.cat([pairs[:pair_index], pairs[pair_index + 1 :]]).flatten(0, 1))
        for pair_index, pair in enumerate(pairs)
        for moved in pair
    ]
    rests.sort()
    return Unexplained(_rest(error, runs), rests[len(rests) // 2], rests[-1])


def _rest(moved: Tensor, others: Tensor) -> float:
    """The rms of what no combination of `others` gives."""
    if others.numel():
        # Orthonormal directions, without those that are mere rounding of the largest.
        _, sizes, directions = torch.linalg.svd(others, full_matrices=False)
        directions = directions[sizes > sizes[0] * UNIT_F64 * len(sizes)]
        for _ in range(2):  # the second time removes what rounding left of the first
            moved = moved - directions.T @ (directions @ moved)
    return rms(moved)


@dataclasses.dataclass(frozen=True)
class Noise:
    """What is known about the reference's rounding noise; `d` is computed from it.

    Attributes:
        unit: unit roundoff of the compared values themselves (the u|r|/2 term).
        step: smallest representable step around zero: underflow is rounding too.
        inner: unit roundoff inside operators. Terms that cancel there, as 1 + erf(x) in GELU, are
            as large as typical values, and no perturbed run rounds them.
        own: e - r, pooled; nothing without an arbiter.
        own_share: the share of it that counts as noise everywhere.
        reference: e, if its error counts element by element: rounding errors that add up with one
            sign, as on equal inputs, are larger than perturbed runs show.
        spread: s, one value per element, or None if the program was not perturbed.
        jumps: how far decisions within rounding move each element; None if not measured.
        relative: noise per element as a share of |r| and of the typical value of its population, if
            only a dtype is known.
        sets_aside: whether to skip values that are not finite in some perturbed run: only if the
            meaning of the program is settled otherwise.
        factor: multiplies everything (in lifted runs both sides are equally noisy).
        source: the origin of these figures, in words.
    """

    unit: float
    step: float = 0.0
    inner: float = 0.0
    own: Pooled = NO_NOISE
    own_share: float = OWN_SHARE
    reference: Tensor | None = None
    spread: Tensor | None = None
    jumps: Jumps | None = None
    relative: float = 0.0
    sets_aside: bool = False
    factor: float = 1.0
    source: str = ""


@dataclasses.dataclass(frozen=True)
class Scored:
    """A score and what only the judge needs to know about it.

    Attributes:
        score: the figures.
        over: number of elements over the limit.
        knife_edges: number of elements that pass only because rounding decides them: by a decision,
            if decisions were measured; otherwise their noise is as large as the value.
    """

    score: Score
    over: int
    knife_edges: int


def score(candidate: Tensor, arbiter: Tensor, noise: Noise) -> Scored:
    """Score `candidate` against `arbiter`; positions where either is not finite are left out."""
    is_complex = candidate.is_complex() or arbiter.is_complex()
    candidate, arbiter, noise = as_reals(candidate, arbiter, noise)
    floors = NoiseFloors.of(arbiter, noise)
    total = ScoreTotals(arbiter.shape, arbiter.device, is_complex=is_complex)
    native_reference = arbiter if noise.reference is None else noise.reference
    tensors = [
        arbiter,
        candidate,
        native_reference,
        *([] if noise.spread is None else [noise.spread]),
    ]
    if noise.jumps is not None:
        tensors += [noise.jumps.size, noise.jumps.decides]
    for chunk_position, parts in chunks(*tensors):
        r, c = parts[0].double(), parts[1].double()
        spread = None if noise.spread is None else parts[3]
        jumps = None if noise.jumps is None else Jumps(*parts[-2:])
        leaves: Tensor | None = None
        size, scale = r.abs(), floors.populations.scale(r)
        floor = floors.at(r, size)
        rounding = (size * (noise.unit / 2 + noise.relative)).add_(noise.step)
        rounding += (noise.inner / 2 + noise.relative) * scale
        if spread is None:
            local = (rounding + floor).mul_(noise.factor)
        else:
            # An infinite spread only says that a run was not finite; it does not measure noise.
            leaves = torch.isinf(spread) if noise.sets_aside else None
            spread = torch.where(torch.isinf(spread), 0.0, spread)
            spread = spread if jumps is None else torch.hypot(spread, jumps.size)
            # Perturbed runs keep exact results exact; another way to compute them rounds once.
            once = ONE_ROUNDING * noise.unit * size
            least = torch.maximum(floor, once)
            local = noise.factor * (rounding + torch.maximum(spread, least))
        if noise.reference is not None:
            reference_error = ((parts[2].double() - r).abs() / 2).nan_to_num(0.0, 0.0, 0.0)
            local = torch.maximum(local, noise.factor * (rounding + reference_error))
        if leaves is not None:
            local = torch.where(leaves, math.inf, local)
        error = (c - r).abs_()
        z = error / local
        sums = SumsOfSquares.of(z)
        if not math.isfinite(sums.total):  # 0 / 0, or elements to leave out
            z = torch.where(error == 0, 0.0, z)
            z = torch.where(torch.isfinite(c) & torch.isfinite(r), z, 0.0)
            sums = SumsOfSquares.of(z)
        total.add(chunk_position, z, sums)
        if spread is not None:
            wavers = (spread if jumps is None else jumps.size) > KNIFE_EDGE_SHARE * (size + scale)
            wavers = wavers if jumps is None else wavers & jumps.decides
            wavers = wavers if leaves is None else wavers | leaves
            wavers &= error > MAX_Z * noise.factor * (rounding + floors.usual(r))
            total.knife_edges += int(wavers.sum())
    return total.compute_score(noise.source)


def borrowed_share(unit: float) -> float:
    """The share of an element up to which it may borrow noise that is typical of the whole.

    Some noise is not that of like elements: the tail of a softmax by way of logarithms has more
    than its size shows. In bfloat16 this is one rounding, in float32 16: 12 times that is far below
    a fault that matters. In float64 it is a thousand times what is needed, and still no fault.
    """
    return math.pow(unit, 0.75) / 4


@dataclasses.dataclass(frozen=True)
class NoiseFloors:
    """The least noise of each element of a tensor, by its magnitude.

    Attributes:
        pooled: by class of magnitudes.
        whole: the same of the whole tensor, from which elements borrow up to `share` of their size.
        populations: the typical values of the tensor.
        median: the median spread, by which unusual errors are told.
        own: the pooled error of the reference.
    """

    pooled: Tensor
    whole: float
    share: float
    populations: Populations
    median: float
    own: Pooled

    @classmethod
    def of(cls, truth: Tensor, noise: Noise) -> Self:
        """The floors of a real tensor."""
        spread = NO_NOISE
        if noise.spread is not None:
            spread = pool(noise.spread, truth, rms(noise.spread)).times(0.5)
        scaled_own = noise.own.times(noise.own_share)
        return cls(
            pooled=torch.maximum(spread.by_class, scaled_own.by_class),
            whole=max(spread.whole, scaled_own.whole),
            share=borrowed_share(noise.unit),
            populations=populations(truth),
            median=0.0 if noise.spread is None else _median(noise.spread),
            own=noise.own,
        )

    def at(self, values: Tensor, sizes: Tensor) -> Tensor:
        """The least noise of some elements, with their absolute values."""
        floor = self.pooled.to(values.device)[self.populations.magnitudes.classes(values)]
        if not self.whole:
            return floor
        return torch.maximum(floor, (sizes * self.share).clamp_(max=self.whole))

    def usual(self, values: Tensor) -> Tensor:
        """The usual noise of some elements; 0 if rounding decides most of them."""
        classes = self.populations.magnitudes.classes(values)
        own_floor = self.own.by_class.to(values.device)[classes] / 2
        is_steady = self.median <= KNIFE_EDGE_SHARE * self.populations.scale(values)
        return torch.maximum(own_floor, own_floor.new_full((), self.median) * is_steady)


def _median(spread: Tensor) -> float:
    return float(spread.median()) if spread.numel() else 0.0


def rms(tensor: Tensor) -> float:
    """Root mean square over the finite elements, in float64; 0 for an empty tensor."""
    return root_mean_square(part.double() for _, (part,) in chunks(real_view(tensor)))


def relative_rms(error: Tensor, truth: Tensor) -> float:
    """Root mean square of errors, each as a share of the typical value of its population.

    Over the finite ones; both are real, or complex.
    """
    error, truth = real_view(error), real_view(truth)
    typical = populations(truth)
    pairs = ((e.double(), r.double()) for _, (e, r) in chunks(error, truth))
    return root_mean_square(e / nonzero(typical.scale(r)) for e, r in pairs)


def nonzero(scale: Tensor | float) -> Tensor | float:
    """A scale to divide by: 1 where there is none."""
    if isinstance(scale, float):
        return scale or 1.0
    return torch.where(scale == 0, 1.0, scale)


def own_noise(reference: Tensor, arbiter: Tensor) -> Pooled:
    """The error of the reference, pooled over elements of like magnitude."""
    left, right = real_view(reference), real_view(arbiter)
    return pool_difference(left, right, rms_difference(left, right))


def rms_difference(left: Tensor, right: Tensor) -> float:
    """Root mean square of the difference, where both are finite, in float64."""
    pairs = chunks(real_view(left), real_view(right))
    return root_mean_square(a.double() - b.double() for _, (a, b) in pairs)


def slice_limit(slices: int, length: int) -> float:
    """The limit of the rms of z over one of `slices` slices of `length` elements.

    A slice's error may be one shared draw (a whole row divided by one norm), so the worst of many
    slices sits where the worst of many single draws does: sqrt(2 ln n) above the typical one.
    """
    worst_of_many = max(1.0, math.sqrt(2 * math.log(slices)))
    return min(MAX_Z, RMS_Z * (1 + 2 / math.sqrt(length)) * worst_of_many)


def chunks(*tensors: Tensor) -> Iterator[tuple[tuple[int, int, int], list[Tensor]]]:
    """Iterate over tensors of one shape in pieces along their longest axis.

    Yields ((axis, start, length), the aligned pieces), which allows sums per slice.
    """
    first = tensors[0]
    if first.numel() == 0:
        return
    if first.dim() == 0:
        yield (0, 0, 1), [tensor.reshape(1) for tensor in tensors]
        return
    axis = max(range(first.dim()), key=lambda d: first.shape[d])
    most = CHUNK if first.is_cpu else DEVICE_CHUNK
    width = max(1, most * first.shape[axis] // first.numel())
    for start in range(0, first.shape[axis], width):
        length = min(width, first.shape[axis] - start)
        parts = [tensor.narrow(axis, start, length) for tensor in tensors]
        yield (axis, start, length), [part.to(first.device) for part in parts]


@dataclasses.dataclass(frozen=True)
class SumsOfSquares:
    """The squares of a piece, their sums along the last axis and of all, and the largest value."""

    squared: Tensor
    rows: Tensor
    worst: float
    total: float

    @classmethod
    def of(cls, z: Tensor) -> Self:
        """Those of `z`, of which none is negative."""
        squared = z.square()
        # One sum along the last axis serves all the others: the data is read twice, not n times.
        rows = squared.sum(dim=-1)
        worst, total = torch.stack([z.max(), rows.sum()]).tolist()
        return cls(squared, rows, worst, total)


class ScoreTotals:
    """Sums of z squared, over everything and per slice along each axis."""

    def __init__(
        self, shape: torch.Size, device: torch.device, *, is_complex: bool, locates: bool = True
    ) -> None:
        """Start at zero; with `locates`, the index of the worst element is looked for."""
        self._locates = locates
        self.shape = tuple(shape) or (1,)
        self.is_complex = is_complex  # the last axis then holds the two parts
        self.scalar = len(shape) == 0
        self.count = math.prod(self.shape)
        self.squares = 0.0
        self.worst = 0.0
        self.index: tuple[int, ...] | None = None
        self.over = 0
        self.knife_edges = 0
        axes = len(self.shape) - is_complex
        self.slices = [
            torch.zeros(size, dtype=torch.float64, device=device) if axes > 1 else None
            for size in self.shape[:axes]
        ]

    def add(self, chunk_position: tuple[int, int, int], z: Tensor, sums: SumsOfSquares) -> None:
        """Add the z of one piece from `chunks`, and their sums."""
        axis, start, length = chunk_position
        if not sums.worst <= MAX_Z:
            self.over += int((z > MAX_Z).sum())
        if not math.isnan(self.worst) and not sums.worst <= self.worst:  # a NaN is kept
            self.worst = sums.worst
            self.index = self._locate_worst(chunk_position, z) if self._locates else None
        self.squares += sums.total
        for dim, slices in enumerate(self.slices):
            if slices is None:
                continue
            if dim == z.dim() - 1:
                part = sums.squared.reshape(-1, z.shape[-1]).sum(dim=0)
            else:
                others = [d for d in range(sums.rows.dim()) if d != dim]
                part = sums.rows.sum(dim=others) if others else sums.rows
            here = slice(start, start + length) if dim == axis else slice(None)
            slices[here] += part

    def _locate_worst(self, chunk_position: tuple[int, int, int], z: Tensor) -> tuple[int, ...]:
        axis, start, _ = chunk_position
        where = list(map(int, np.unravel_index(int(z.argmax()), z.shape)))
        where[axis] += start
        where = where[:-1] if self.is_complex else where
        return () if self.scalar else tuple(where)

    def slices_on_host(self) -> list[Tensor | None]:
        """The sums per slice, by axis; a device is waited for only once."""
        stored_sums = [sums for sums in self.slices if sums is not None]
        if not stored_sums or stored_sums[0].is_cpu:
            return self.slices
        copies = iter(torch.cat(stored_sums).cpu().split([len(sums) for sums in stored_sums]))
        return [None if sums is None else next(copies) for sums in self.slices]

    def compute_score(self, source: str) -> Scored:
        """The score of all pieces; `source` describes the noise."""
        rms_z = math.sqrt(self.squares / self.count) if self.count else 0.0
        rms_limit = RMS_Z * (1 + 2 / math.sqrt(self.count)) if self.count else RMS_Z
        figures: dict[str, Any] = {}
        worst_ratio = 0.0
        for axis, sums in enumerate(self.slices_on_host()):
            if sums is None or self.count == 0 or self.shape[axis] < 2:  # noqa: PLR2004
                continue
            length = self.count // self.shape[axis]
            limit = slice_limit(self.shape[axis], length)
            top = int(sums.argmax())
            value = math.sqrt(float(sums[top]) / length)
            if not value / limit <= worst_ratio:
                worst_ratio = value / limit
                figures = {
                    "slice_axis": axis,
                    "slice_index": top,
                    "slice_z": value,
                    "slice_limit": limit,
                }
        result = Score(
            max_z=self.worst,
            max_limit=MAX_Z,
            rms_z=rms_z,
            rms_limit=rms_limit,
            index=self.index,
            noise=source,
            **figures,
        )
        return Scored(score=result, over=self.over, knife_edges=self.knife_edges)


# --- How many perturbed runs a decision needs -----------------------------------------------------

# A value fails before the last run only if it would pass by the spread of very many runs with at
# most this probability.
ERROR_RATE = 1e-3


def most_hidden(runs: int, rate: float) -> float:
    """How many times the measured spread the true one may be, except with probability `rate`.

    Deviations are normal, near enough, so their squares add up to a chi-square variable of as many
    degrees of freedom as there are runs. It is below x with a probability of at most
    (x / 2)^(n / 2) / gamma(n / 2 + 1).
    """
    half = runs / 2
    return math.sqrt(half) * math.exp(-(math.log(rate) + math.lgamma(half + 1)) / runs)


def most_shown(runs: int, rate: float) -> float:
    """How many times the true spread the measured one may be, except with probability `rate`.

    By Chernoff's bound, the mean square of n normal deviations exceeds t times its expectation with
    a probability of at most (t exp(1 - t))^(n / 2).
    """
    low, high = 1.0, 2.0 - 4 * math.log(rate) / runs
    for _ in range(40):
        middle = (low + high) / 2
        is_rare = runs / 2 * (math.log(middle) + 1 - middle) <= math.log(rate)
        low, high = (low, middle) if is_rare else (middle, high)
    return math.sqrt(high)


def may_still_pass(score: Score, shape: torch.Size, runs: int) -> bool:
    """Whether a value that fails by the spread of `runs` runs may pass by that of many more.

    No z shrinks by more than the spread grows. The worst element, or slice, may be the one whose
    spread is too small by chance; there are as many to choose from as there are elements, or
    slices.
    """
    figures = [
        (score.rms_z / score.rms_limit, 1),
        (score.max_z / score.max_limit, math.prod(shape)),
    ]
    if score.slice_z is not None and score.slice_limit:
        figures.append((score.slice_z / score.slice_limit, sum(shape)))
    rate = ERROR_RATE / len(figures)
    return all(ratio <= most_hidden(runs, rate / among) for ratio, among in figures)


# --- Complex values -------------------------------------------------------------------------------


def real_view(tensor: Tensor) -> Tensor:
    """View a complex tensor as real, with a new last axis of two."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def as_reals(candidate: Tensor, arbiter: Tensor, noise: Noise) -> tuple[Tensor, Tensor, Noise]:
    """The pair and the noise as real tensors."""
    if not (candidate.is_complex() or arbiter.is_complex()):
        return candidate, arbiter, noise
    wide = torch.complex128
    pair = real_view(candidate.to(wide)), real_view(arbiter.to(wide))

    def for_both(part: Tensor) -> Tensor:
        # The spread of a complex value is one number for both parts.
        return part.unsqueeze(-1).expand(*part.shape, 2)

    spread = None if noise.spread is None else for_both(noise.spread)
    jumps = None if noise.jumps is None else noise.jumps.map(for_both)
    native_reference = noise.reference
    if native_reference is not None:
        native_reference = real_view(native_reference.to(wide))
    return *pair, dataclasses.replace(noise, spread=spread, jumps=jumps, reference=native_reference)
