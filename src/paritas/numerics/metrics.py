"""Two tensors: are their bits the same, and if not, how far apart are the values?"""

from __future__ import annotations

import functools
import importlib.util
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from paritas.errors import UsageError
from paritas.numerics.bits import (
    first_unlike,
    has_ulps,
    largest_grid_distance,
    same_bits,
    same_except_nans,
    ulp_distance,
)
from paritas.numerics.flattening import is_dense, same_parts
from paritas.results.figures import Metrics

# --- What is added up on the way over two tensors, block by block ---------------------------------

_NONFINITE_KINDS = {"nan": 1, "posinf": 2, "neginf": 3}
_SURVEYED = (
    *(f"{kind}_{side}" for side in ("reference", "candidate") for kind in _NONFINITE_KINDS),
    "unlike",
    "dropped",
)
_WIDE_INTEGERS = {torch.int64, torch.uint64}
_LOW_WORD = 0xFFFFFFFF
_SAMPLE = 1024
# Sums of squares within these bounds lost nothing to overflow or underflow, nor do their products.
_SAFE_SQUARES = (1e-100, 1e100)


class PairTally(NamedTuple):
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

    def merge(self, other: PairTally) -> PairTally:
        """One tally for two blocks."""
        pairs = list(zip(self, other, strict=True))
        return PairTally(*(a + b for a, b in pairs[:-3]), *(max(pair) for pair in pairs[-3:]))


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
        return 1.0 if self.rr == self.cc == 0.0 else _bounded_cosine(self.rc, self.rr, self.cc)

    @property
    def pcc(self) -> float:
        """Pearson's correlation coefficient."""
        return _bounded_cosine(self.covariance, self.variance_r, self.variance_c)


class MetricTotals:
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
        self.tally = PairTally()
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
            self._anchors = _find_anchors(self._load(reference, 0), self._load(candidate, 1))
        if same and (self._anchors is None or self._anchors[0] == self._anchors[1]):
            self.tally = self.tally.merge(self._same_block(offset, reference))
            return
        tally = self._pair_block(offset, reference, candidate)
        if tally.max_abs > self.tally.max_abs and not self.counts["unlike"]:
            self.where = offset + int(self._buffers[2][: reference.numel()].argmax())
        self.tally = self.tally.merge(tally)

    def adopt(
        self,
        tally: PairTally,
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
            _SAFE_SQUARES[0] <= norm <= _SAFE_SQUARES[1] or nonzero == dropped
            for norm, nonzero in sides
        )

    def _same_block(self, offset: int, reference: Tensor) -> PairTally:
        """Tally a block whose sides have the same bits, from one of them."""
        tally = self._measure_one(self._load(reference, 0))
        if not math.isfinite(tally.r):
            r = self._load(reference, 0)
            tally = self._measure_one(r, self._survey(offset, r, r))
        return tally

    def _pair_block(self, offset: int, reference: Tensor, candidate: Tensor) -> PairTally:
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
        kinds_r = _classify_nonfinite(r)
        kinds_c = kinds_r if c is r else _classify_nonfinite(c)
        masks = [
            kinds == kind for kinds in (kinds_r, kinds_c) for kind in _NONFINITE_KINDS.values()
        ]
        masks += [kinds_r != kinds_c, (kinds_r != 0) | (kinds_c != 0)]
        if self._paired:
            masks = [mask.view(-1, 2).any(dim=1) for mask in masks]
        numbers = torch.stack([mask.count_nonzero() for mask in masks]).tolist()
        *_, unlike, drop = masks
        if numbers[-2] and not self.counts["unlike"]:
            self.where = offset + int(unlike.to(torch.uint8).argmax())
        self.counts.update(dict(zip(_SURVEYED, numbers, strict=True)))
        return drop.repeat_interleave(2) if self._paired else drop

    def _measure_one(self, r: Tensor, drop: Tensor | None = None) -> PairTally:
        anchor, _ = self._anchors or (0.0, 0.0)
        nonzero = _count_nonzeros(self._elements(r))
        if drop is not None:
            r.masked_fill_(drop, anchor)
        r.sub_(anchor)
        nonzero, total, square = torch.stack([nonzero, r.sum(), r.dot(r)]).tolist()
        return PairTally(nonzero, nonzero, total, total, square, square, square)

    def _measure_both(
        self, reference: Tensor, candidate: Tensor, r: Tensor, c: Tensor, drop: Tensor | None = None
    ) -> PairTally:
        anchor_r, anchor_c = self._anchors or (0.0, 0.0)
        nonzero = [_count_nonzeros(self._elements(side)) for side in (r, c)]
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
        tally = PairTally(*torch.stack([*nonzero, *sums, _count_nonzeros(moduli), *worst]).tolist())
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


def _count_nonzeros(values: Tensor) -> Tensor:
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


def _classify_nonfinite(reals: Tensor) -> Tensor:
    """For every number the code of its kind in `_KINDS`, 0 if it is finite."""
    kinds = reals.isnan().to(torch.uint8).mul_(_NONFINITE_KINDS["nan"])
    kinds.masked_fill_(reals == math.inf, _NONFINITE_KINDS["posinf"])
    return kinds.masked_fill_(reals == -math.inf, _NONFINITE_KINDS["neginf"])


def _find_anchors(r: Tensor, c: Tensor) -> tuple[float, float] | None:
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


def _bounded_cosine(product: float, square: float, other: float) -> float:
    """A product relative to both norms, within [-1, 1]; NaN if a norm is zero."""
    if not (square > 0.0 and other > 0.0):
        return math.nan
    # Apart only for the exact 1 that equal sides deserve.
    norms = square if square == other else math.sqrt(square) * math.sqrt(other)
    ratio = product / norms
    return ratio if math.isnan(ratio) else max(-1.0, min(1.0, ratio))


# --- A pair on a CUDA device, read once and waited for once ---------------------------------------

# Torch's own operators read the pair some thirty times over; here one kernel reads it once, at the
# speed of the memory, and few small ones finish what it found. They need Triton, which comes with
# torch's builds for CUDA, and a device with instructions for packed numbers of 16 bits (Hopper or
# later); without them, or for other dtypes and strides, `fits` is false.

_KERNEL_KINDS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_PLAIN = {Tensor, torch.nn.Parameter}
_HOPPER = (9, 0)
# Triton loads wide from addresses that are multiples of this.
_ALIGNED = 16
_PAIR_BYTES = 8
_LANES, _WARPS = 128, 4
# Turns at once, as measured on an H200; of 16-bit numbers they are a group of `device_scans`.
_UNROLL = 4
# Turns of a program: many for large tensors, that few figures are left to add up, and few for
# small ones, that no multiprocessor idles.
_MOST_TURNS, _PROGRAMS = 512, 1024
_KERNEL_SAMPLE = 1024
_PARTS = 128
# Below this ratio of squares a product found by way of a difference has lost digits.
_EVEN = 2.0**-12


@functools.cache
def _runs_triton(device: torch.device) -> bool:
    """Whether the kernels run there; found out once, without compiling any."""
    if torch.version.cuda is None or torch.cuda.get_device_capability(device) < _HOPPER:
        return False
    return importlib.util.find_spec("triton") is not None


def fits_kernels(reference: Tensor, candidate: Tensor) -> bool:
    """Whether the pair can be measured here."""
    return (
        reference.is_cuda
        and reference.device == candidate.device
        and reference.dtype is candidate.dtype
        and reference.dtype in _KERNEL_KINDS
        and reference.shape == candidate.shape
        and reference.numel() > 0
        and all(_is_aligned(side) for side in (reference, candidate))
        and _runs_triton(reference.device)
    )


def _is_aligned(tensor: Tensor) -> bool:
    return (
        type(tensor) in _PLAIN
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not tensor.is_neg()
        and tensor.data_ptr() % _ALIGNED == 0
    )


@dataclass(frozen=True)
class PendingPair:
    """Figures of a pair, on their way to memory of the host."""

    pair: tuple[Tensor, Tensor]
    figures: Tensor
    ready: torch.Event

    def finish(self) -> MetricTotals | None:
        """Wait for them; None if torch's operators have to do it: hardly a number is finite."""
        self.ready.synchronize()
        *numbers, a, b, shifted, found = self.figures.tolist()
        if not found:
            return None
        from paritas.numerics.device_kernels import RESULTS

        named = dict(zip(RESULTS, numbers, strict=True))
        if not shifted and not _sides_are_even(named):
            return _queue_pair(*self.pair, shift=True).finish()
        return _adopt_figures(*self.pair, named, (a, b))


def begin_pair(reference: Tensor, candidate: Tensor) -> PendingPair:
    """Queue the measuring of a pair that `fits` on its device's current stream.

    Nothing waits for the device before `finish`; until then the pair must not be changed.
    """
    return _queue_pair(reference, candidate, shift=False)


def _queue_pair(reference: Tensor, candidate: Tensor, *, shift: bool) -> PendingPair:
    """Queue it; with `shift`, about anchors even if those seem to be near enough to zero."""
    from paritas.numerics import device_kernels as finishing
    from paritas.numerics import device_kernels as kernels

    device, numel = reference.device, reference.numel()
    kind = _KERNEL_KINDS[reference.dtype]
    r, c = reference.detach().view(-1), candidate.detach().view(-1)
    per_pair = _PAIR_BYTES // r.itemsize
    per_turn = _LANES * per_pair
    most_turns = numel // (per_turn * _UNROLL) * _UNROLL
    turns = most_turns // _PROGRAMS // _UNROLL * _UNROLL
    turns = max(_UNROLL, min(turns, _MOST_TURNS))
    covered, span = most_turns * per_turn, turns * per_turn
    height = -(-most_turns // turns) + (covered < numel)
    rows = torch.empty(kernels.COLUMNS * height, dtype=torch.float64, device=device)
    out = torch.empty(len(finishing.RESULTS) + 4, dtype=torch.float64, device=device)
    anchors = out[-4:]
    with torch.cuda.device(device):
        finishing.anchor[(1,)](
            r, c, anchors, numel, max(1, numel // _KERNEL_SAMPLE), int(shift), num_warps=8
        )
        if covered:
            wide = [side[:covered].view(torch.int64) for side in (r, c)]
            kernels.tally[(height,)](
                *wide, anchors, rows, most_turns, turns,
                KIND=kind, LANES=_LANES, UNROLL=_UNROLL, num_warps=_WARPS,
            )  # fmt: skip
        else:
            rows.fill_(1.0)
        extent = (covered, numel, span)
        finishing.tally_carefully[(height,)](r, c, anchors, rows, *extent, KIND=kind, num_warps=8)
        finishing.finish[(len(kernels.SUMS) + 1,)](
            r, c, rows, out, height, numel, GROUP=_UNROLL * per_turn, num_warps=8
        )
        for programs, parts in ((_PARTS, _PARTS), (height, 1)):
            finishing.refine[(programs,)](r, c, rows, out, height, *extent, PARTS=parts, KIND=kind)
        host = out.to("cpu", non_blocking=True)
        ready = torch.Event(device=device)
        ready.record(torch.cuda.current_stream(device))
    return PendingPair((reference, candidate), host, ready)


def _sides_are_even(named: dict[str, float]) -> bool:
    """Whether the two sides are of like size; two that are all zero are."""
    least, most = sorted((named["rr"], named["cc"]))
    return least >= _EVEN * most


def _adopt_figures(
    reference: Tensor, candidate: Tensor, named: dict[str, float], anchors: tuple[float, float]
) -> MetricTotals:
    totals = MetricTotals(reference, candidate)
    unlike = int(named["unlike"])
    named = named | ({"max_ulp": math.inf} if unlike else {})
    counts = {
        name: int(named[name])
        for name in named
        if name.startswith(("nan_", "posinf_", "neginf_")) or name in {"unlike", "dropped"}
    }
    where = int(named["where"])
    place = None if where < 0 else (where, named["reference"], named["candidate"])
    totals.adopt(
        PairTally(**{name: named[name] for name in PairTally._fields}), counts, place, anchors
    )
    return totals


# --- Blocks, equal bits, and the metrics of a pair ------------------------------------------------

# Everything goes block by block: memory stays flat whatever the tensors' size and strides, and
# every sum is taken in float64 whatever their dtype.

# Elements in a block. On the CPU what is made of one should stay in the caches of the cores that
# share it: that is twice as fast as a block of a million. On a GPU (these are measured on an H200)
# a block must outweigh its launches; metrics then take some 50 bytes of memory per element, a
# comparison of bits next to nothing.
_CPU_BLOCK = 1 << 17  # for each of torch's threads
_MOST_CPU_BLOCK = 1 << 20
_DEVICE_BLOCK = 1 << 22
_DEVICE_BITS_BLOCK = 1 << 25
_NO_FLOAT64 = {"mps"}
_UNPROMOTED = {torch.uint16, torch.uint32, torch.uint64}
# Other kinds of tensors (fake, distributed ...) answer for themselves.


def blocks(
    first: Tensor, *others: Tensor, block_size: int | None = None
) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
    """Walk tensors of one shape together, in row-major order, in flat blocks of bounded size.

    Args:
        first: any strided tensor.
        others: tensors of the same shape; dtypes, strides and devices may differ.
        block_size: most elements in a block; by default what suits the first tensor's device.

    Returns:
        For every block the flat index of its first element, and one 1-d chunk per tensor, in the
        tensor's own dtype, on the first tensor's device (on the CPU, if that device has no
        float64). A chunk may be a view of its tensor: read it, do not write to it.

    Raises:
        UsageError: (a `ValueError`) the shapes differ, a tensor is sparse or quantized, or the
            block size is not positive.
    """
    tensors = (first, *others)
    for tensor in tensors:
        if tensor.layout is not torch.strided or tensor.is_quantized:
            kind = f"{tensor.dtype} with layout {tensor.layout}"
            raise UsageError(f"only plain strided tensors can be compared, got {kind}")
    shapes = [tuple(tensor.shape) for tensor in tensors]
    if len(set(shapes)) > 1:
        raise UsageError(f"the shapes must be equal, got {' and '.join(map(str, shapes))}")
    home = torch.device("cpu") if first.device.type in _NO_FLOAT64 else first.device
    if block_size is None:
        shared = min(_MOST_CPU_BLOCK, _CPU_BLOCK * torch.get_num_threads())
        block_size = shared if home.type == "cpu" else _DEVICE_BLOCK
    if block_size < 1:
        raise UsageError(f"block_size must be positive, got {block_size}")
    views = [tensor.detach() for tensor in tensors]
    if all(view.is_contiguous() for view in views):
        views = [view.view(-1) for view in views]
    return (
        # Only here, a block at a time, may anything be copied: for stride, device or conjugation.
        (offset, tuple(p.to(home).reshape(-1).resolve_conj().resolve_neg() for p in pieces))
        for offset, pieces in _cut_pieces(views, block_size, 0)
    )


def _cut_pieces(views: list[Tensor], size: int, offset: int) -> Iterator[tuple[int, list[Tensor]]]:
    """Cut along the first dimension or, where one row of it is too long, cut every row."""
    if not views[0].numel():
        return
    rows, row = len(views[0]), views[0][0].numel()
    if row > size:
        for index in range(rows):
            yield from _cut_pieces([view[index] for view in views], size, offset + index * row)
        return
    step = size // row
    for start in range(0, rows, step):
        yield offset + start * row, [view[start : start + step] for view in views]


def bitwise_equal(a: Tensor, b: Tensor, *, block_size: int | None = None) -> bool:
    """Whether two tensors have the same shape, the same dtype and the same bits.

    All NaNs count as the same, whatever their sign and payload; -0.0 and +0.0 do not. Tensors that
    are not dense are the same if they are of one kind and all their parts are.

    Args:
        a: any tensor.
        b: any tensor; if on another device, it is moved block by block.
        block_size: most elements compared at once.
    """
    if not (is_dense(a) and is_dense(b)):
        return same_parts(a, b, bitwise_equal)
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if _is_plain(a) and _is_plain(b) and a.numel():
        flat_a, flat_b = a.detach().view(-1), b.detach().view(-1)
        few = first_unlike(flat_a, flat_b)
        if few is None:
            return True
        if not same_except_nans(flat_a[few], flat_b[few]):
            return False  # at the first difference
    if a.layout is torch.strided:
        # In the order of memory: a permuted tensor then goes as fast as a contiguous one.
        order = sorted(range(a.ndim), key=a.stride, reverse=True)
        a, b = a.permute(order), b.permute(order)
    if block_size is None and a.device.type != "cpu":
        block_size = _DEVICE_BITS_BLOCK
    pairs = blocks(a, b, block_size=block_size)
    return all(same_bits(x, y) or same_except_nans(x, y) for _, (x, y) in pairs)


def quickly_equal(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one shape and dtype have the same bits, if one call can tell."""
    return _is_plain(a) and _is_plain(b) and same_bits(a.detach(), b.detach())


def _is_plain(tensor: Tensor) -> bool:
    """Whether numpy may have its memory as it is."""
    strided = tensor.layout is torch.strided and not tensor.is_quantized and tensor.is_contiguous()
    lazy = tensor.is_conj() or tensor.is_neg()
    return type(tensor) in _PLAIN and tensor.is_cpu and strided and not lazy


def pair_metrics(reference: Tensor, candidate: Tensor, *, block_size: int | None = None) -> Metrics:
    """Measure a candidate against its reference, in one pass.

    Args:
        reference: any strided tensor of numbers.
        candidate: a tensor of the same shape; dtype, strides and device may differ.
        block_size: most elements taken at once.

    Raises:
        UsageError: (a `ValueError`) the shapes differ: nothing is ever broadcast.
    """
    reference, candidate = promotable(reference, candidate)
    totals, scale = _measure_on_device(reference, candidate, block_size), 1.0
    totals = totals or _measure_by_blocks(reference, candidate, block_size)
    moments = totals.moments
    if not totals.safe:
        scale = _find_scale(reference, candidate, block_size)
        moments = _measure_by_blocks(reference, candidate, block_size, scale).moments
    index = None if totals.where is None else _unravel(totals.where, reference.shape)
    there: tuple[float | None, float | None] = totals.there or (None, None)
    if index is not None and totals.there is None:
        there = _modulus(reference[index]), _modulus(candidate[index])
    tally, counts, numel = totals.tally, totals.counts, reference.numel()
    unlike = counts["unlike"]
    return Metrics(
        numel=numel,
        mismatched=int(tally.mismatched) + unlike,
        max_abs=math.inf if unlike else tally.max_abs,
        max_abs_index=index,
        max_abs_reference=there[0],
        max_abs_candidate=there[1],
        max_rel=math.inf if unlike else tally.max_rel,
        mean_abs=math.inf if unlike else moments.mean_abs / scale,
        rmse=math.inf if unlike else moments.rms / scale,
        rel_l2=math.inf if unlike else moments.rel_l2,
        cosine=math.nan if unlike else moments.cosine,
        pcc=math.nan if unlike else moments.pcc,
        max_ulp=tally.max_ulp if totals.has_ulps else None,
        nan_reference=counts["nan_reference"],
        nan_candidate=counts["nan_candidate"],
        posinf_reference=counts["posinf_reference"],
        posinf_candidate=counts["posinf_candidate"],
        neginf_reference=counts["neginf_reference"],
        neginf_candidate=counts["neginf_candidate"],
        zero_reference=numel - int(tally.nonzero_reference),
        zero_candidate=numel - int(tally.nonzero_candidate),
        nonfinite_mismatches=unlike,
    )


def promotable(reference: Tensor, candidate: Tensor) -> tuple[Tensor, Tensor]:
    """The same numbers in dtypes that torch compares: it has no rules for wide unsigned ones."""
    if reference.dtype == candidate.dtype or not _UNPROMOTED & {reference.dtype, candidate.dtype}:
        return reference, candidate
    return _as_signed(reference), _as_signed(candidate)


def _as_signed(tensor: Tensor) -> Tensor:
    if tensor.dtype not in _UNPROMOTED:
        return tensor
    signed = tensor.to(torch.int64)
    # Beyond int64 the last digits are lost, but not that it is beyond.
    return tensor.to(torch.float64) if bool((signed < 0).any()) else signed


def _measure_on_device(
    reference: Tensor, candidate: Tensor, block_size: int | None
) -> MetricTotals | None:
    """The totals of what a kernel of its own can measure; None of what it cannot."""
    if block_size is None and fits_kernels(reference, candidate):
        return begin_pair(reference, candidate).finish()
    return None


def _measure_by_blocks(
    reference: Tensor, candidate: Tensor, block_size: int | None, scale: float = 1.0
) -> MetricTotals:
    totals = MetricTotals(reference, candidate, scale=scale)
    for offset, pair in blocks(reference, candidate, block_size=block_size):
        totals.take(offset, *pair)
    return totals


def _find_scale(reference: Tensor, candidate: Tensor, block_size: int | None) -> float:
    """A factor, exact to multiply by, that brings the largest number of both sides near 1."""
    largest = 0.0
    for _, pair in blocks(reference, candidate, block_size=block_size):
        for chunk in pair:
            reals = torch.view_as_real(chunk) if chunk.is_complex() else chunk
            finite = reals.double().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
            largest = max(largest, finite.abs().amax().item())
    _, exponent = math.frexp(largest)
    return math.ldexp(1.0, max(-1000, min(1000, -exponent)))


def _unravel(flat: int, shape: Sequence[int]) -> tuple[int, ...]:
    index: list[int] = []
    for length in reversed(shape):
        flat, position = divmod(flat, length)
        index.append(position)
    return tuple(reversed(index))


def _modulus(element: Tensor) -> float:
    element = element.detach()
    return float(element.to(torch.complex128).abs() if element.is_complex() else element.double())
