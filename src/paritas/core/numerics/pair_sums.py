"""The figures of a pair of tensors: which sums they follow from, and these sums by definition."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from paritas.core.numerics.bits import grid_distance, halves, has_ulps, ulp_distance
from paritas.core.numerics.block_sums import is_safe
from paritas.core.numerics.flat_blocks import blocks
from paritas.core.results.items import Metrics

if TYPE_CHECKING:
    from collections.abc import Sequence

# --- The figures, and the sums they follow from ---------------------------------------------------


_COUNTED = tuple(
    f"{kind}_{side}"
    for kind in ("nan", "posinf", "neginf", "zero")
    for side in ("reference", "candidate")
)


class WorstDifference(NamedTuple):
    """The element of a largest difference."""

    size: float = 0.0
    place: int = -1
    reference: float = 0.0
    candidate: float = 0.0

    @property
    def difference(self) -> float:
        """The difference in float64, while `size` may be rounded to float32."""
        return abs(self.candidate - self.reference)


@dataclass(frozen=True)
class PairSums:
    """The sums of a whole pair, however they are computed; the metrics follow from them.

    Attributes:
        compared: number of elements that are finite on both sides.
        counts: each side's NaNs, infinities and zeros; `mismatched` among the compared elements;
            `unlike`: positions where only one side is finite, or the infinities differ.
        comoments: of the compared elements; a complex element counts as two reals.
        squares: sum of squares of the differences, times `scale` squared.
        absolute: sum of the absolute differences, times `scale`.
        relative: sum of the relative differences; infinite if `max_rel` is.
        worst: the first unlike position, else the first largest difference.
        scale: the factor applied to all numbers before summing.
    """

    compared: int
    counts: Counter[str]
    comoments: Comoments
    squares: float
    absolute: float
    relative: float
    max_abs: float
    max_rel: float
    max_ulp: float | None
    worst: WorstDifference | None
    scale: float = 1.0

    @property
    def is_safe(self) -> bool:
        """Whether no sum of squares has overflowed or underflowed, as float64 inputs can."""
        norms = zip(("reference", "candidate"), self.comoments.about_zero[:2], strict=True)
        return self.counts["unlike"] > 0 or all(
            is_safe(norm) or self.counts[f"zero_{side}"] == self.compared for side, norm in norms
        )

    @property
    def mean_rel(self) -> float:
        """Mean of the relative differences; infinite if there are unlike positions."""
        return math.inf if self.counts["unlike"] else self.relative / max(self.compared, 1)

    def metrics(self, shape: Sequence[int]) -> Metrics:
        """The metrics of a pair of this shape; infinite if there are unlike positions."""
        counts, about, n = self.counts, self.comoments, max(self.compared, 1)
        unlike, worst = counts["unlike"], self.worst
        rr, cc, rc = about.about_zero
        differences: dict[str, Any] = {
            "max_abs": self.max_abs,
            "max_rel": self.max_rel,
            "mean_abs": self.absolute / n / self.scale,
            "rmse": math.sqrt(self.squares / n) / self.scale,
            "rel_l2": _relative_norm(self.squares, rr),
            "cosine": 1.0 if rr == cc == 0.0 else _cosine(rr, cc, self.squares, rc),
            "pcc": _cosine(about.rr, about.cc, about.dd, about.rc),
        }
        if unlike:
            differences = dict.fromkeys(differences, math.inf) | {
                "cosine": math.nan,
                "pcc": math.nan,
            }
        return Metrics(
            numel=math.prod(shape),
            mismatched=counts["mismatched"] + unlike,
            max_abs_index=unravel(worst.place, shape) if worst else None,
            max_abs_reference=worst.reference if worst else None,
            max_abs_candidate=worst.candidate if worst else None,
            max_ulp=math.inf if unlike and self.max_ulp is not None else self.max_ulp,
            **differences,
            **{name: counts[name] for name in _COUNTED},
            nonfinite_mismatches=unlike,
        )


def _relative_norm(dd: float, rr: float) -> float:
    if dd == 0.0:
        return 0.0
    return math.sqrt(dd) / math.sqrt(rr) if rr else math.inf


def _cosine(rr: float, cc: float, dd: float, rc: float) -> float:
    """The cosine of the angle between two vectors; NaN if one is zero.

    For vectors of similar length it is computed from their difference: 1 - cosine then keeps its
    digits, while a product summed in float32 would lose those below 1e-7.
    """
    if not (rr > 0.0 and cc > 0.0):
        return math.nan
    r, c = math.sqrt(rr), math.sqrt(cc)
    cosine = 1.0 - (dd - (r - c) ** 2) / (2.0 * r * c) if alike(rr, cc) else rc / (r * c)
    return cosine if math.isnan(cosine) else max(-1.0, min(1.0, cosine))


def unravel(flat: int, shape: Sequence[int]) -> tuple[int, ...]:
    """The multi-dimensional index of a flat index in row-major order."""
    return tuple(map(int, np.unravel_index(flat, tuple(shape))))


# --- Means, squares and products ------------------------------------------------------------------

# Above this ratio of one side's squares to the other's, squares alone do not give products.
_ALIKE = 4.0


class AnchoredSums(NamedTuple):
    """Sums over the finite numbers of both sides, each side relative to its own anchor."""

    r: float
    c: float
    rr: float
    cc: float
    rc: float


class Comoments(NamedTuple):
    """Means of both sides and of their difference, and the squares and products about them.

    A mean is stored as a number near the data plus the rest, `beyond`: means of blocks may differ
    by less than the last digit of a large mean.
    """

    n: int = 0
    mean_r: float = 0.0
    mean_c: float = 0.0
    mean_d: float = 0.0
    rr: float = 0.0
    cc: float = 0.0
    dd: float = 0.0
    rc: float = 0.0
    beyond: tuple[float, float, float] = (0.0, 0.0, 0.0)

    def merge(self, other: Comoments) -> Comoments:
        """Merge two blocks without cancellation, however different their means are."""
        if not self.n:
            return other
        n = self.n + other.n
        share = other.n / n
        weight = self.n * share
        rest, other_rest = self.beyond, other.beyond
        r = (other.mean_r - self.mean_r) + (other_rest[0] - rest[0])
        c = (other.mean_c - self.mean_c) + (other_rest[1] - rest[1])
        d = (other.mean_d - self.mean_d) + (other_rest[2] - rest[2])
        return Comoments(
            n,
            self.mean_r,
            self.mean_c,
            self.mean_d,
            self.rr + other.rr + r * r * weight,
            self.cc + other.cc + c * c * weight,
            self.dd + other.dd + d * d * weight,
            self.rc + other.rc + r * c * weight,
            (rest[0] + r * share, rest[1] + c * share, rest[2] + d * share),
        )

    @classmethod
    def from_sums(cls, n: int, anchors: tuple[float, float], sums: AnchoredSums) -> Comoments:
        """Comoments from sums relative to anchors; anchors near the data avoid cancellation."""
        if not n:
            return cls()
        mean_r, mean_c = anchors[0] + sums.r / n, anchors[1] + sums.c / n
        rr = max(sums.rr - sums.r * sums.r / n, 0.0)
        cc = max(sums.cc - sums.c * sums.c / n, 0.0)
        rc = sums.rc - sums.r * sums.c / n
        return cls(n, mean_r, mean_c, mean_c - mean_r, rr, cc, rr + cc - 2.0 * rc, rc)

    @property
    def about_zero(self) -> tuple[float, float, float]:
        """Sums of squares of the reference and the candidate, and of their products."""
        r, c = self.mean_r + self.beyond[0], self.mean_c + self.beyond[1]
        return self.rr + self.n * r * r, self.cc + self.n * c * c, self.rc + self.n * r * c


def alike(rr: float, cc: float) -> bool:
    """Whether sums of squares are close enough to compute the sum of products from them."""
    return rr <= _ALIKE * cc and cc <= _ALIKE * rr


# --- The sums of any pair, by torch: every dtype, stride and device, with all sums in float64 -----

WIDE_INTEGERS = {torch.int64, torch.uint64}
_NONFINITE_KINDS = {"nan": 1, "posinf": 2, "neginf": 3}
_SURVEYED = (
    *(f"{kind}_{side}" for side in ("reference", "candidate") for kind in _NONFINITE_KINDS),
    "unlike",
    "dropped",
)
_SUMMED = (
    *("nonzero_reference", "nonzero_candidate"),
    *(*AnchoredSums._fields, "dd", "absolute", "relative", "mismatched"),
)
_WORST = ("max_abs", "max_rel", "max_ulp")
_SAMPLE = 1024


def sums_by_torch(reference: Tensor, candidate: Tensor, block_size: int | None) -> PairSums:
    """Sum once, and again with scaled numbers if a sum of squares left the range of float64."""
    sums = _TorchTotals(reference, candidate).walk(block_size)
    if sums.is_safe:
        return sums
    scale = _find_scale(reference, candidate, block_size)
    scaled = _TorchTotals(reference, candidate, scale=scale).walk(block_size)
    return dataclasses.replace(
        sums,
        comoments=scaled.comoments,
        squares=scaled.squares,
        absolute=scaled.absolute,
        scale=scale,
    )


class _TorchTotals:
    """Running totals over the blocks of a pair of tensors, all sums in float64."""

    def __init__(self, reference: Tensor, candidate: Tensor, *, scale: float = 1.0) -> None:
        self._sides = reference, candidate
        self._paired = reference.is_complex() or candidate.is_complex()
        self._has_ulps = has_ulps(reference.dtype, candidate.dtype)
        self._scale = scale
        self._named = dict.fromkeys((*_SUMMED, *_WORST, *_SURVEYED), 0.0)
        self._where: int | None = None
        self._anchors: tuple[float, float] | None = None
        self._buffers: list[Tensor] = []

    def walk(self, block_size: int | None) -> PairSums:
        """Add all blocks."""
        reference, candidate = self._sides
        for offset, pair in blocks(reference, candidate, block_size=block_size):
            self._take(offset, *pair)
        worst = None
        if self._where is not None:
            index = unravel(self._where, reference.shape)
            ends = _modulus(reference[index]), _modulus(candidate[index])
            worst = WorstDifference(math.inf, self._where, *ends)
        return self._sums(reference.numel(), worst)

    def _sums(self, numel: int, worst: WorstDifference | None) -> PairSums:
        named = self._named
        compared = numel - int(named["dropped"])
        sums = AnchoredSums(*(named[name] for name in AnchoredSums._fields))
        counts = Counter({name: int(named[name]) for name in ("mismatched", *_SURVEYED)})
        for side in ("reference", "candidate"):
            counts[f"zero_{side}"] = numel - int(named[f"nonzero_{side}"])
        reals = compared * 2 if self._paired else compared
        return PairSums(
            compared=compared,
            counts=counts,
            comoments=Comoments.from_sums(reals, self._anchors or (0.0, 0.0), sums),
            squares=named["dd"],
            absolute=named["absolute"],
            relative=named["relative"],
            max_abs=named["max_abs"],
            max_rel=named["max_rel"],
            max_ulp=named["max_ulp"] if self._has_ulps else None,
            worst=worst,
        )

    def _take(self, offset: int, reference: Tensor, candidate: Tensor) -> None:
        """Add one block, given as flat chunks and the flat index at which they start."""
        if not self._buffers:  # The first block is the largest.
            width = reference.numel() * (2 if self._paired else 1)
            self._buffers = [reference.new_empty(width, dtype=torch.float64) for _ in range(4)]
        if self._anchors is None:
            self._anchors = _find_anchors(self._load(reference, 0), self._load(candidate, 1))
        block = self._measure(reference, candidate)
        if not math.isfinite(block["r"] + block["c"]):  # again, without values that are not finite
            drop = self._survey(offset, self._load(reference, 0), self._load(candidate, 1))
            block = self._measure(reference, candidate, drop)
        if block["max_abs"] > self._named["max_abs"] and not self._named["unlike"]:
            self._where = offset + int(self._buffers[2][: reference.numel()].argmax())
        for name in _SUMMED:
            self._named[name] += block[name]
        for name in _WORST:
            self._named[name] = max(self._named[name], block[name])

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
        """Count values that are not finite; returns a mask of the reals to leave out."""
        kinds_r, kinds_c = _classify_nonfinite(r), _classify_nonfinite(c)
        masks = [
            kinds == kind for kinds in (kinds_r, kinds_c) for kind in _NONFINITE_KINDS.values()
        ]
        masks += [kinds_r != kinds_c, (kinds_r != 0) | (kinds_c != 0)]
        if self._paired:
            masks = [mask.view(-1, 2).any(dim=1) for mask in masks]
        numbers = torch.stack([mask.count_nonzero() for mask in masks]).tolist()
        *_, unlike, drop = masks
        if numbers[-2] and not self._named["unlike"]:
            self._where = offset + int(unlike.to(torch.uint8).argmax())
        for name, number in zip(_SURVEYED, numbers, strict=True):
            self._named[name] += number
        return drop.repeat_interleave(2) if self._paired else drop

    def _measure(
        self, reference: Tensor, candidate: Tensor, drop: Tensor | None = None
    ) -> dict[str, float]:
        """The figures of one block, without the reals to `drop`."""
        r, c = self._load(reference, 0), self._load(candidate, 1)
        anchors = self._anchors or (0.0, 0.0)
        nonzero = [self._elements(side).count_nonzero() for side in (r, c)]
        d = self._subtract(reference, candidate, r, c)
        if drop is not None:
            r.masked_fill_(drop, anchors[0])
            c.masked_fill_(drop, anchors[1])
            d.masked_fill_(drop, 0.0)
        dd = d.dot(d)
        moduli = d[: reference.numel()]
        torch.abs(self._elements(d).clone() if self._paired else d, out=moduli)
        relative = self._buffers[3][: reference.numel()]
        torch.abs(self._elements(r), out=relative)
        torch.div(moduli, relative, out=relative)
        max_ulp = dd.new_zeros(())
        if self._has_ulps:
            distance = grid_distance if drop is None else ulp_distance
            max_ulp = distance(reference, candidate).amax()
        r.sub_(anchors[0])
        c.sub_(anchors[1])
        sums = [r.sum(), c.sum(), r.dot(r), c.dot(c), r.dot(c), dd, moduli.sum(), relative.sum()]
        worst = [moduli.amax(), relative.amax(), max_ulp]
        # One transfer for all of them: each one synchronizes with the device.
        figures = torch.stack([*nonzero, *sums, moduli.count_nonzero(), *worst]).tolist()
        named = dict(zip((*_SUMMED, *_WORST), figures, strict=True))
        if math.isnan(named["max_rel"]):  # Somewhere both are zero: 0 / 0.
            relative.nan_to_num_(nan=0.0, posinf=math.inf)
            named |= {"max_rel": relative.amax().item(), "relative": relative.sum().item()}
        if not named["mismatched"] and anchors[0] == anchors[1]:
            # Equal sides get a correlation of exactly 1, in whatever order products are summed.
            named |= {"c": named["r"], "cc": named["rr"], "rc": named["rr"]}
        return named

    def _subtract(self, reference: Tensor, candidate: Tensor, r: Tensor, c: Tensor) -> Tensor:
        d = torch.sub(c, r, out=self._buffers[2][: r.numel()])
        wide = WIDE_INTEGERS.intersection((reference.dtype, candidate.dtype))
        if not wide or self._paired or self._scale != 1.0:
            return d
        # A float64 cannot hold 64 bits exactly, but it can hold each half.
        (high_r, low_r), (high_c, low_c) = _halves(reference, r), _halves(candidate, c)
        return d.copy_((high_c - high_r) + (low_c - low_r))


def _halves(chunk: Tensor, wide: Tensor) -> tuple[Tensor, Tensor]:
    """A chunk as a sum of two float64 tensors that are exact even for 64-bit integers."""
    if chunk.dtype not in WIDE_INTEGERS:
        return wide, torch.zeros_like(wide)
    high, low = halves(chunk)
    return high.mul_(2.0**32), low


def _classify_nonfinite(reals: Tensor) -> Tensor:
    """The code of each number in `_NONFINITE_KINDS`; 0 if it is finite."""
    kinds = reals.isnan().to(torch.uint8).mul_(_NONFINITE_KINDS["nan"])
    kinds.masked_fill_(reals == math.inf, _NONFINITE_KINDS["posinf"])
    return kinds.masked_fill_(reals == -math.inf, _NONFINITE_KINDS["neginf"])


def _find_anchors(r: Tensor, c: Tensor) -> tuple[float, float] | None:
    """A typical number of each side, to subtract before squaring.

    It is the median of a sample, so never an outlier. It is an element, so a constant side is
    exactly zero relative to it. None if no position is finite on both sides.
    """
    step = max(1, r.numel() // _SAMPLE)
    for sample_r, sample_c in ((r[::step], c[::step]), (r, c)):
        finite = sample_r.isfinite() & sample_c.isfinite()
        if finite.any():
            return sample_r[finite].median().item(), sample_c[finite].median().item()
    return None


def _find_scale(reference: Tensor, candidate: Tensor, block_size: int | None) -> float:
    """A power of two that scales the largest number of both sides to about 1."""
    largest = 0.0
    for _, pair in blocks(reference, candidate, block_size=block_size):
        for chunk in pair:
            reals = torch.view_as_real(chunk) if chunk.is_complex() else chunk
            finite = reals.double().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
            largest = max(largest, finite.abs().amax().item())
    _, exponent = math.frexp(largest)
    return math.ldexp(1.0, max(-1000, min(1000, -exponent)))


def _modulus(element: Tensor) -> float:
    return float(element.to(torch.complex128).abs() if element.is_complex() else element.double())
