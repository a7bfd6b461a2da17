"""What `pair_metrics` adds up on its way over two tensors, block by block."""

from __future__ import annotations

import math
from collections import Counter
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from paritas.numerics.ulps import has_ulps, largest_grid_distance, same_bits, ulp_distance

__all__ = ["Moments", "Tally", "Totals"]

_KINDS = {"nan": 1, "posinf": 2, "neginf": 3}
_SURVEYED = (
    *(f"{kind}_{side}" for side in ("reference", "candidate") for kind in _KINDS),
    "unlike",
    "dropped",
)
_WIDE_INTEGERS = {torch.int64, torch.uint64}
_LOW_WORD = 0xFFFFFFFF
_SAMPLE = 1024
# Sums of squares within these bounds lost nothing to overflow or underflow, nor do their products.
_SAFE = (1e-100, 1e100)


class Tally(NamedTuple):
    """What one block, or all blocks so far, come to; `r` and `c` are relative to their anchors."""

    nonzero_reference: float = 0.0
    nonzero_candidate: float = 0.0
    r: float = 0.0
    c: float = 0.0
    rr: float = 0.0
    cc: float = 0.0
    rc: float = 0.0
    dd: float = 0.0
    absolute: float = 0.0
    mismatched: float = 0.0
    # All of the above are added up; of those below, the worst is kept.
    max_abs: float = 0.0
    max_rel: float = 0.0
    max_ulp: float = 0.0

    def merge(self, other: Tally) -> Tally:
        """One tally for two blocks."""
        pairs = list(zip(self, other, strict=True))
        return Tally(*(a + b for a, b in pairs[:-3]), *(max(pair) for pair in pairs[-3:]))


class Moments(NamedTuple):
    """The sums of a whole walk: means of the differences, and moments of the values."""

    mean_abs: float = 0.0
    rms: float = 0.0
    dd: float = 0.0
    rr: float = 0.0
    cc: float = 0.0
    rc: float = 0.0
    variance_r: float = 0.0
    variance_c: float = 0.0
    covariance: float = 0.0

    @property
    def rel_l2(self) -> float:
        """Norm of the difference over norm of the reference."""
        if self.dd == 0.0:
            return 0.0
        return math.sqrt(self.dd) / math.sqrt(self.rr) if self.rr else math.inf

    @property
    def cosine(self) -> float:
        """Cosine of the angle between both sides; two zero vectors are taken for parallel."""
        return 1.0 if self.rr == self.cc == 0.0 else _ratio(self.rc, self.rr, self.cc)

    @property
    def pcc(self) -> float:
        """Pearson's correlation coefficient."""
        return _ratio(self.covariance, self.variance_r, self.variance_c)


class Totals:
    """Running totals over the blocks of a pair of tensors.

    Attributes:
        has_ulps: whether the two dtypes are one grid of floats.
        tally: sums and extremes over the positions where both sides are finite.
        counts: each side's NaNs and infinities; positions `unlike` in that; and positions
            `dropped` from the tally for it.
        where: flat index of the first largest difference or, before that, first unlike position.
        there: both sides' numbers at that place, if they are known without looking.
    """

    def __init__(self, reference: Tensor, candidate: Tensor, *, scale: float = 1.0) -> None:
        self.has_ulps = has_ulps(reference.dtype, candidate.dtype)
        self.tally = Tally()
        self.counts: Counter[str] = Counter()
        self.where: int | None = None
        self.there: tuple[float, float] | None = None
        self._numel = reference.numel()
        self._paired = reference.is_complex() or candidate.is_complex()
        self._scale = scale
        self._anchors: tuple[float, float] | None = None
        self._buffers: list[Tensor] = []

    def take(self, offset: int, reference: Tensor, candidate: Tensor) -> None:
        """Add one block, given as flat chunks and the flat index at which they start."""
        if not self._buffers:  # The first block is the largest.
            width = reference.numel() * (2 if self._paired else 1)
            self._buffers = [reference.new_empty(width, dtype=torch.float64) for _ in range(4)]
        same = reference.dtype == candidate.dtype and same_bits(reference, candidate)
        if self._anchors is None:
            self._anchors = _anchors(self._load(reference, 0), self._load(candidate, 1))
        if same and (self._anchors is None or self._anchors[0] == self._anchors[1]):
            self.tally = self.tally.merge(self._same_block(offset, reference))
            return
        tally = self._pair_block(offset, reference, candidate)
        if tally.max_abs > self.tally.max_abs and not self.counts["unlike"]:
            self.where = offset + int(self._buffers[2][: reference.numel()].argmax())
        self.tally = self.tally.merge(tally)

    def adopt(
        self,
        tally: Tally,
        counts: dict[str, int],
        place: tuple[int, float, float] | None,
        anchors: tuple[float, float],
    ) -> None:
        """Take over what was found elsewhere, in one go, about the whole pair.

        Args:
            tally: sums and extremes, the sums relative to the anchors.
            counts: what is not finite.
            place: where the largest difference is, and both sides' numbers there.
            anchors: what was subtracted from each side.
        """
        self.tally, self._anchors = tally, anchors
        self.counts.update(counts)
        if place is not None:
            self.where, *there = place
            self.there = (there[0], there[1])

    @property
    def moments(self) -> Moments:
        """The sums so far, put together."""
        numel = self._numel - self.counts["dropped"]
        if not numel:
            return Moments()
        sums, (anchor_r, anchor_c) = self.tally, self._anchors or (0.0, 0.0)
        n = numel * 2 if self._paired else numel
        mean_r, mean_c = anchor_r + sums.r / n, anchor_c + sums.c / n
        # The anchors lie amid the data, so little cancels here; and below, where squares add up,
        # nothing does. A correlation by way of sums about zero would lose all its digits to a mean.
        variance_r = max(sums.rr - sums.r * sums.r / n, 0.0)
        variance_c = max(sums.cc - sums.c * sums.c / n, 0.0)
        covariance = sums.rc - sums.r * sums.c / n
        return Moments(
            mean_abs=sums.absolute / numel,
            rms=math.sqrt(sums.dd / numel),
            dd=sums.dd,
            rr=variance_r + n * mean_r * mean_r,
            cc=variance_c + n * mean_c * mean_c,
            rc=covariance + n * mean_r * mean_c,
            variance_r=variance_r,
            variance_c=variance_c,
            covariance=covariance,
        )

    @property
    def safe(self) -> bool:
        """Whether no sum of squares has overflowed or underflowed: only those of float64 can."""
        moments, dropped = self.moments, self.counts["dropped"]
        sides = (
            (moments.rr, self.tally.nonzero_reference),
            (moments.cc, self.tally.nonzero_candidate),
        )
        return self.counts["unlike"] > 0 or all(
            _SAFE[0] <= norm <= _SAFE[1] or nonzero == dropped for norm, nonzero in sides
        )

    def _same_block(self, offset: int, reference: Tensor) -> Tally:
        """Tally a block whose sides have the same bits, from one of them."""
        tally = self._measure_one(self._load(reference, 0))
        if not math.isfinite(tally.r):
            r = self._load(reference, 0)
            tally = self._measure_one(r, self._survey(offset, r, r))
        return tally

    def _pair_block(self, offset: int, reference: Tensor, candidate: Tensor) -> Tally:
        """Tally a block, once more with a mask if it turns out to hold a NaN or an infinity."""
        r, c = self._load(reference, 0), self._load(candidate, 1)
        tally = self._measure_both(reference, candidate, r, c)
        if not math.isfinite(tally.r + tally.c):
            r, c = self._load(reference, 0), self._load(candidate, 1)
            drop = self._survey(offset, r, c)
            tally = self._measure_both(reference, candidate, r, c, drop)
        return tally

    def _load(self, chunk: Tensor, slot: int) -> Tensor:
        if not self._paired:
            buffer = self._buffers[slot][: chunk.numel()].copy_(chunk)
        else:
            buffer = self._buffers[slot][: chunk.numel() * 2]
            pairs = buffer.view(-1, 2)
            if chunk.is_complex():
                pairs.copy_(torch.view_as_real(chunk))
            else:
                pairs[:, 0].copy_(chunk)
                pairs[:, 1].zero_()
        return buffer if self._scale == 1.0 else buffer.mul_(self._scale)

    def _elements(self, reals: Tensor) -> Tensor:
        return torch.view_as_complex(reals.view(-1, 2)) if self._paired else reals

    def _survey(self, offset: int, r: Tensor, c: Tensor) -> Tensor:
        """Count what is not finite; returns a mask of the reals to leave out."""
        kinds_r = _kinds(r)
        kinds_c = kinds_r if c is r else _kinds(c)
        masks = [kinds == kind for kinds in (kinds_r, kinds_c) for kind in _KINDS.values()]
        masks += [kinds_r != kinds_c, (kinds_r != 0) | (kinds_c != 0)]
        if self._paired:
            masks = [mask.view(-1, 2).any(dim=1) for mask in masks]
        numbers = torch.stack([mask.count_nonzero() for mask in masks]).tolist()
        *_, unlike, drop = masks
        if numbers[-2] and not self.counts["unlike"]:
            self.where = offset + int(unlike.to(torch.uint8).argmax())
        self.counts.update(dict(zip(_SURVEYED, numbers, strict=True)))
        return drop.repeat_interleave(2) if self._paired else drop

    def _measure_one(self, r: Tensor, drop: Tensor | None = None) -> Tally:
        anchor, _ = self._anchors or (0.0, 0.0)
        nonzero = _nonzeros(self._elements(r))
        if drop is not None:
            r.masked_fill_(drop, anchor)
        r.sub_(anchor)
        nonzero, total, square = torch.stack([nonzero, r.sum(), r.dot(r)]).tolist()
        return Tally(nonzero, nonzero, total, total, square, square, square)

    def _measure_both(
        self, reference: Tensor, candidate: Tensor, r: Tensor, c: Tensor, drop: Tensor | None = None
    ) -> Tally:
        anchor_r, anchor_c = self._anchors or (0.0, 0.0)
        nonzero = [_nonzeros(self._elements(side)) for side in (r, c)]
        d = self._subtract(reference, candidate, r, c)
        if drop is not None:
            r.masked_fill_(drop, anchor_r)
            c.masked_fill_(drop, anchor_c)
            d.masked_fill_(drop, 0.0)
        dd = d.dot(d)
        moduli = d[: reference.numel()]
        torch.abs(self._elements(d).clone() if self._paired else d, out=moduli)
        relative = self._buffers[3][: reference.numel()]
        torch.abs(self._elements(r), out=relative)
        torch.div(moduli, relative, out=relative)
        max_ulp = dd.new_zeros(())
        if self.has_ulps:
            max_ulp = (
                largest_grid_distance(reference, candidate)
                if drop is None
                else ulp_distance(reference, candidate).amax()
            )
        r.sub_(anchor_r)
        c.sub_(anchor_c)
        sums = [r.sum(), c.sum(), r.dot(r), c.dot(c), r.dot(c), dd, moduli.sum()]
        worst = [moduli.amax(), relative.amax(), max_ulp]
        # One transfer for all of them: on a device each would be a wait.
        tally = Tally(*torch.stack([*nonzero, *sums, _nonzeros(moduli), *worst]).tolist())
        if math.isnan(tally.max_rel):  # Somewhere both are zero: 0 / 0.
            relative.nan_to_num_(nan=0.0, posinf=math.inf)
            tally = tally._replace(max_rel=relative.amax().item())
        return tally

    def _subtract(self, reference: Tensor, candidate: Tensor, r: Tensor, c: Tensor) -> Tensor:
        d = torch.sub(c, r, out=self._buffers[2][: r.numel()])
        wide = _WIDE_INTEGERS.intersection((reference.dtype, candidate.dtype))
        if not wide or self._paired or self._scale != 1.0:
            return d
        # A float64 does not hold 64 bits, but it holds each half of them.
        (high_r, low_r), (high_c, low_c) = _halves(reference, r), _halves(candidate, c)
        return d.copy_((high_c - high_r) + (low_c - low_r))


def _nonzeros(values: Tensor) -> Tensor:
    """How many there are: numpy makes a mask and counts it, which no branch of it slows down."""
    if values.is_cpu and not values.is_complex():
        return torch.tensor(np.count_nonzero(values.numpy() != 0))
    return values.count_nonzero()


def _halves(chunk: Tensor, wide: Tensor) -> tuple[Tensor, Tensor]:
    """A chunk as a sum of two float64 tensors that are exact even for 64-bit integers."""
    if chunk.dtype not in _WIDE_INTEGERS:
        return wide, torch.zeros_like(wide)
    words = chunk.view(torch.int64)
    high = words >> 32
    if chunk.dtype is torch.uint64:
        high &= _LOW_WORD
    return high.double().mul_(2.0**32), (words & _LOW_WORD).double()


def _kinds(reals: Tensor) -> Tensor:
    """For every number the code of its kind in `_KINDS`, 0 if it is finite."""
    kinds = reals.isnan().to(torch.uint8).mul_(_KINDS["nan"])
    kinds.masked_fill_(reals == math.inf, _KINDS["posinf"])
    return kinds.masked_fill_(reals == -math.inf, _KINDS["neginf"])


def _anchors(r: Tensor, c: Tensor) -> tuple[float, float] | None:
    """A number amid each side's data, to be subtracted before anything is squared.

    It is the median of a sample, hence never an outlier, and an element, hence a constant side is
    exactly zero relative to it. None if no position is finite on both sides.
    """
    step = max(1, r.numel() // _SAMPLE)
    for sample_r, sample_c in ((r[::step], c[::step]), (r, c)):
        finite = sample_r.isfinite() & sample_c.isfinite()
        if finite.any():
            return sample_r[finite].median().item(), sample_c[finite].median().item()
    return None


def _ratio(product: float, square: float, other: float) -> float:
    """A product relative to both norms, within [-1, 1]; NaN if a norm is zero."""
    if not (square > 0.0 and other > 0.0):
        return math.nan
    # Apart only for the exact 1 that equal sides deserve.
    norms = square if square == other else math.sqrt(square) * math.sqrt(other)
    ratio = product / norms
    return ratio if math.isnan(ratio) else max(-1.0, min(1.0, ratio))
