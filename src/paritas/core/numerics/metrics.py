"""Compare two tensors: are their bits the same, and if not, how different are the values?"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from paritas.core.errors import UsageError
from paritas.core.numerics.bits import (
    INTEGERS,
    UNSIGNED,
    as_words,
    first_unequal,
    first_unlike,
    fits_float32,
    grid_distance,
    halves,
    has_ulps,
    holds_numbers,
    is_in_order,
    same_bits,
    same_except_nans,
    same_memory,
    ulp_distance,
)
from paritas.core.numerics.block_sums import BLOCK, ROOM, Array, OutOfRangeError
from paritas.core.numerics.flattening import is_dense, same_parts
from paritas.core.numerics.pair_totals import (
    AnchoredSums,
    Comoments,
    PairSums,
    PairTotals,
    WorstDifference,
    unravel,
)
from paritas.core.results.items import Metrics  # noqa: TC001  (annotates a public function)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

# --- Blocks, and equal bits -----------------------------------------------------------------------

# Everything is processed block by block: memory use does not depend on the tensors' size and
# strides, and every sum is taken in float64.

# Elements per block. On the CPU the intermediate results of a block should stay in the caches: that
# is twice as fast as a block of a million. On a GPU (measured on an H200) a block must outweigh its
# launches; metrics then take about 50 bytes per element, a comparison of bits almost none.
_CPU_BLOCK = 1 << 17  # per torch thread
_MOST_CPU_BLOCK = 1 << 20
_DEVICE_BLOCK = 1 << 22
_DEVICE_BITS_BLOCK = 1 << 25
_NO_FLOAT64 = {"mps"}
_UNPROMOTED = {torch.uint16, torch.uint32, torch.uint64}
# Subclasses (fake, distributed ...) are compared by their own operators.
_PLAIN = {Tensor, torch.nn.Parameter}


def blocks(
    first: Tensor, *others: Tensor, block_size: int | None = None
) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
    """Iterate over tensors of one shape together, in row-major order, in flat blocks.

    Args:
        first: any strided tensor.
        others: tensors of the same shape; dtypes, strides and devices may differ.
        block_size: maximum number of elements per block; by default it depends on the device.

    Returns:
        For each block the flat index of its first element, and one 1-d chunk per tensor, in the
        tensor's own dtype, on the first tensor's device (on the CPU, if that device has no
        float64). A chunk may be a view of its tensor: do not write to it.

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
        # Copies (for stride, device or conjugation) are made only here, one block at a time.
        (offset, tuple(p.to(home).reshape(-1).resolve_conj().resolve_neg() for p in pieces))
        for offset, pieces in _cut_pieces(views, block_size, 0)
    )


def _cut_pieces(views: list[Tensor], size: int, offset: int) -> Iterator[tuple[int, list[Tensor]]]:
    """Cut along the first dimension or, if a single row is too long, cut every row."""
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
    are not dense are the same if their kinds and all their parts are.

    Args:
        a: any tensor.
        b: any tensor; if on another device, it is moved block by block.
        block_size: maximum number of elements compared at once.
    """
    if not (is_dense(a) and is_dense(b)):
        return same_parts(a, b, bitwise_equal)
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if _is_plain(a) and _is_plain(b) and a.numel():
        if same_memory(a, b):
            return True
        flat_a, flat_b = a.detach().view(-1), b.detach().view(-1)
        few = first_unlike(flat_a, flat_b)
        if few is None:
            return True
        if not same_except_nans(flat_a[few], flat_b[few]):
            return False  # at the first difference
    if a.layout is torch.strided:
        # In memory order: a permuted tensor is then as fast as a contiguous one.
        order = sorted(range(a.ndim), key=a.stride, reverse=True)
        a, b = a.permute(order), b.permute(order)
    if block_size is None and a.device.type != "cpu":
        block_size = _DEVICE_BITS_BLOCK
    pairs = blocks(a, b, block_size=block_size)
    return all(same_bits(x, y) or same_except_nans(x, y) for _, (x, y) in pairs)


def quickly_equal(a: Tensor, b: Tensor) -> bool:
    """Whether two plain tensors of one shape and dtype have the same bits, in one call."""
    return _is_plain(a) and _is_plain(b) and same_bits(a.detach(), b.detach())


def equal_on_device(pairs: Iterable[tuple[Tensor, Tensor]]) -> bool:
    """Whether dense tensors surely have the same bits; it waits for a device once, not for each.

    False also where only the bits of NaNs differ, which `bitwise_equal` allows.
    """
    flags: dict[torch.device, list[Tensor]] = {}
    for a, b in pairs:
        same_kind = a.shape == b.shape and a.dtype == b.dtype and a.device == b.device
        if not same_kind or not is_dense(b) or any(x.is_conj() or x.is_neg() for x in (a, b)):
            return False
        x, y = as_words(a, b)
        flags.setdefault(a.device, []).append((x == y).all())
    return all(bool(torch.stack(several).all()) for several in flags.values())


def _is_plain(tensor: Tensor) -> bool:
    """Whether numpy can use its memory directly."""
    return type(tensor) in _PLAIN and tensor.is_cpu and is_in_order(tensor)


# --- Two tensors as flat arrays, block by block: numbers and their bits ---------------------------

# Up to this many elements the calls dominate the cost, so float64 is used, which is exact.
_SMALL = 1 << 12
_WORD = 8
# Dtypes that numpy converts at least as fast as torch.
_NUMPY = {
    torch.float32,
    torch.float64,
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
}
# For this many elements torch does not start its threads: the caller already has threads.
_QUIET = 1 << 15
# Numbers rarer than one in this many are picked one by one.
_RARE = 64


class NumberChunk(NamedTuple):
    """A stretch of a tensor.

    Attributes:
        numbers: as float32 or float64; a view of the tensor, or a buffer reused by the next chunk.
        bits: as signed integers of their own width; a view.
    """

    numbers: Array
    bits: Array


class PairWalk:
    """Iterates over real tensors of one shape on the CPU together, in row-major order.

    Numbers are float32 if that holds all values and the tensors are not small, else float64.

    Args:
        tensors: one or several.
        wide: always use float64.
        block_size: maximum number of elements per block, if fewer than usual.

    Raises:
        UsageError: (a `ValueError`) the shapes differ, or a tensor is sparse or quantized.
    """

    def __init__(self, *tensors: Tensor, wide: bool = False, block_size: int | None = None) -> None:
        first = tensors[0]
        self._block = BLOCK if block_size is None else min(block_size, BLOCK)
        self._tensors = tensors
        self._numel = first.numel()
        narrow = not wide and self._numel > _SMALL and all(fits_float32(t.dtype) for t in tensors)
        self._work = torch.float32 if narrow else torch.float64
        self._sources: list[_ChunkSource] | None = None
        if all(is_in_order(t) and t.shape == first.shape for t in tensors):
            self._sources = [_ChunkSource(t.view(-1), self._work, i) for i, t in enumerate(tensors)]
        else:
            blocks(*tensors)  # raises for tensors that cannot be compared

    def __iter__(self) -> Iterator[tuple[int, list[NumberChunk]]]:
        """For each block the flat index of its first element, and a chunk of each tensor."""
        if self._sources is not None:
            for start in range(0, self._numel, self._block):
                stop = start + self._block
                yield start, [source.chunk(start, stop) for source in self._sources]
            return
        for offset, pieces in blocks(*self._tensors, block_size=self._block):
            sources = [_ChunkSource(x.contiguous(), self._work, i) for i, x in enumerate(pieces)]
            yield offset, [source.chunk(0, len(pieces[0])) for source in sources]

    def is_identical(self) -> bool:
        """`bitwise_equal` of the two."""
        first, second = self._tensors
        if self._sources is None or first.dtype != second.dtype:
            return bitwise_equal(first, second)
        x, y = (source.bits for source in self._sources)
        at = _first_unequal_element(x, y)
        if at is None:
            return True
        r, c = (float(source.flat[at]) for source in self._sources)
        return math.isnan(r) and math.isnan(c) and bitwise_equal(first, second)


def small_numbers(tensor: Tensor) -> Array | None:
    """The numbers of a small tensor without a `PairWalk`; None if it needs one."""
    if not 0 < tensor.numel() <= _SMALL or tensor.dtype not in _NUMPY or not is_in_order(tensor):
        return None
    flat: Array = tensor.numpy().reshape(-1)
    return flat.astype(np.float64, copy=False)


class _ChunkSource:
    """Gives chunks of a flat, contiguous tensor."""

    def __init__(self, flat: Tensor, work: torch.dtype, slot: int) -> None:
        self.flat = flat
        self.bits: Array = flat.view(INTEGERS[flat.dtype.itemsize]).numpy()
        self._array: Array | None = flat.numpy() if flat.dtype in _NUMPY else None
        self._room = f"numbers {slot}", np.float32 if work is torch.float32 else np.float64

    def chunk(self, start: int, stop: int) -> NumberChunk:
        bits = self.bits[start:stop]
        name, dtype = self._room
        if self._array is None:
            numbers = ROOM.of(name, dtype, bits.size)
            _copy_quietly(self.flat[start:stop], torch.from_numpy(numbers))
        elif self._array.dtype == dtype:
            numbers = self._array[start:stop]
        else:
            numbers = ROOM.of(name, dtype, bits.size)
            np.copyto(numbers, self._array[start:stop])
        return NumberChunk(numbers, bits)


def _copy_quietly(source: Tensor, target: Tensor) -> None:
    for start in range(0, len(target), _QUIET):
        target[start : start + _QUIET].copy_(source[start : start + _QUIET])


def same_array_bits(x: Array, y: Array) -> bool:
    """Whether two flat arrays of bits are equal."""
    return _first_unequal_element(x, y) is None


def _first_unequal_element(x: Array, y: Array) -> int | None:
    """Where two flat arrays first differ; compares whole words, which is fastest."""
    if x.itemsize == _WORD or x.nbytes % _WORD:
        return first_unequal(x, y)
    at = first_unequal(x.view(np.int64), y.view(np.int64))
    if at is None:
        return None
    start = at * (_WORD // x.itemsize)
    few = slice(start, start + _WORD // x.itemsize)
    return start + int((x[few] != y[few]).argmax())


def largest_step(x: Array, y: Array, dtype: torch.dtype) -> float:
    """The largest `ulp_distance` between finite numbers, given their bits."""
    if not x.size:
        return 0.0
    if dtype is UNSIGNED:
        x, y = (side.view(np.uint8).astype(np.int16) for side in (x, y))
    steps = np.subtract(x, y, out=ROOM.get("steps", x))
    signs = np.bitwise_xor(x, y, out=ROOM.get("signs", x))
    across = 0.0
    if int(np.minimum.reduce(signs)) < 0:
        across = _largest_sum(x, y, steps, signs)
    return max(across, float(np.maximum.reduce(steps)), -float(np.minimum.reduce(steps)))


def _largest_sum(x: Array, y: Array, steps: Array, signs: Array) -> float:
    """The largest distance across zero, a sum of magnitudes; sets the wrapped `steps` to 0."""
    magnitude, unsigned = np.iinfo(x.dtype).max, f"u{x.itemsize}"
    opposite = np.less(signs, 0, out=ROOM.of("mask", np.bool_, x.size))
    if int(np.count_nonzero(opposite)) * _RARE < x.size:
        at = np.flatnonzero(opposite)
        sums = (x[at] & magnitude).view(unsigned) + (y[at] & magnitude).view(unsigned)
        steps[at] = 0
    else:
        np.right_shift(
            signs, 8 * x.itemsize - 1, out=signs
        )  # all bits set where signs are opposite
        steps &= ~signs
        sums = (x & magnitude).view(unsigned)
        sums += (y & magnitude).view(unsigned)
        sums &= signs.view(unsigned)
    return float(np.maximum.reduce(sums))


# --- Any pair, by torch: complex numbers, all devices, squares out of float64's range -------------

_NONFINITE_KINDS = {"nan": 1, "posinf": 2, "neginf": 3}
_SURVEYED = (
    *(f"{kind}_{side}" for side in ("reference", "candidate") for kind in _NONFINITE_KINDS),
    "unlike",
    "dropped",
)
_SUMMED = (
    *("nonzero_reference", "nonzero_candidate"),
    *(*AnchoredSums._fields, "dd", "absolute", "mismatched"),
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
        return _named_sums(
            self._named,
            numel=reference.numel(),
            reals=2 if self._paired else 1,
            anchors=self._anchors or (0.0, 0.0),
            worst=worst,
            ulps=self._has_ulps,
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
        """The figures of one block."""
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
        sums = [r.sum(), c.sum(), r.dot(r), c.dot(c), r.dot(c), dd, moduli.sum()]
        worst = [moduli.amax(), relative.amax(), max_ulp]
        # One transfer for all of them: each one synchronizes with the device.
        found = torch.stack([*nonzero, *sums, moduli.count_nonzero(), *worst]).tolist()
        named = dict(zip((*_SUMMED, *_WORST), found, strict=True))
        if math.isnan(named["max_rel"]):  # Somewhere both are zero: 0 / 0.
            relative.nan_to_num_(nan=0.0, posinf=math.inf)
            named["max_rel"] = relative.amax().item()
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


def _named_sums(
    named: dict[str, float],
    *,
    numel: int,
    anchors: tuple[float, float],
    worst: WorstDifference | None,
    ulps: bool = True,
    reals: int = 1,
) -> PairSums:
    """The sums of a pair from named figures; `reals` is the number of reals per element."""
    compared = numel - int(named["dropped"])
    sums = AnchoredSums(*(named[name] for name in AnchoredSums._fields))
    counts = Counter({name: int(named[name]) for name in ("mismatched", *_SURVEYED)})
    for side in ("reference", "candidate"):
        counts[f"zero_{side}"] = numel - int(named[f"nonzero_{side}"])
    return PairSums(
        compared=compared,
        counts=counts,
        comoments=Comoments.from_sums(compared * reals, anchors, sums),
        squares=named["dd"],
        absolute=named["absolute"],
        max_abs=named["max_abs"],
        max_rel=named["max_rel"],
        max_ulp=named["max_ulp"] if ulps else None,
        worst=worst,
    )


# --- The metrics of a pair ------------------------------------------------------------------------

WIDE_INTEGERS = {torch.int64, torch.uint64}
_EXACT_INTEGER = 2.0**53
# Numpy uses one thread and is twice as fast as torch with one. Torch is faster on more elements
# than this with more threads than this.
_MANY = 1 << 22
_FEW_THREADS = 4


def pair_metrics(reference: Tensor, candidate: Tensor, *, block_size: int | None = None) -> Metrics:
    """Measure a candidate against its reference, in one pass.

    Args:
        reference: any strided tensor of numbers.
        candidate: a tensor of the same shape; dtype, strides and device may differ.
        block_size: maximum number of elements processed at once.

    Raises:
        UsageError: (a `ValueError`) the shapes differ; they never broadcast.
    """
    reference, candidate = promotable(reference.detach(), candidate.detach())
    sums: PairSums | None = None
    numpy_is_slower = reference.numel() > _MANY and torch.get_num_threads() > _FEW_THREADS
    if is_ordinary(reference) and is_ordinary(candidate) and not numpy_is_slower:
        walk = PairWalk(reference, candidate, wide=True, block_size=block_size)
        with contextlib.suppress(OutOfRangeError):
            sums = walk_pair(reference, candidate, walk, softmax=False).sums()
    return (sums or sums_by_torch(reference, candidate, block_size)).metrics(reference.shape)


def walk_pair(reference: Tensor, candidate: Tensor, walk: PairWalk, *, softmax: bool) -> PairTotals:
    """The totals of an ordinary pair.

    Raises:
        OutOfRangeError: integers are too large for float64.
    """
    dtype = reference.dtype
    ulps = has_ulps(dtype, candidate.dtype)
    # The bits of a single block are usually known to differ.
    like = dtype == candidate.dtype and reference.numel() > BLOCK
    totals = PairTotals(has_ulps=ulps, softmax=softmax)
    with np.errstate(all="ignore"):
        for offset, (r, c) in walk:
            same = like and same_array_bits(r.bits, c.bits)
            kept = totals.take(offset, r.numbers, c.numbers, same=same)
            if ulps and not same:
                x, y = (r.bits, c.bits) if kept is None else (r.bits[kept], c.bits[kept])
                totals.take_ulps(largest_step(x, y, dtype))
    for tensor, span in zip((reference, candidate), totals.spans, strict=True):
        if tensor.dtype in WIDE_INTEGERS and span.largest >= _EXACT_INTEGER:
            raise OutOfRangeError
    return totals


def is_ordinary(tensor: Tensor) -> bool:
    """Whether numpy can process it: real numbers on the CPU."""
    plain = type(tensor) is Tensor and tensor.is_cpu
    return plain and not tensor.is_complex() and holds_numbers(tensor.dtype)


def promotable(reference: Tensor, candidate: Tensor) -> tuple[Tensor, Tensor]:
    """Convert wide unsigned dtypes, which torch cannot promote, if the dtypes differ."""
    if reference.dtype == candidate.dtype or not _UNPROMOTED & {reference.dtype, candidate.dtype}:
        return reference, candidate
    return _as_signed(reference), _as_signed(candidate)


def _as_signed(tensor: Tensor) -> Tensor:
    if tensor.dtype not in _UNPROMOTED:
        return tensor
    signed = tensor.to(torch.int64)
    # Values beyond int64 lose their last digits, but stay beyond it.
    return tensor.to(torch.float64) if bool((signed < 0).any()) else signed
