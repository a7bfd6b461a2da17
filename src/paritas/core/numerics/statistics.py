"""Summary statistics of tensors: on the CPU, on a device, many small ones at once."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec
import numpy as np
import torch
from torch import Tensor

from paritas.core.numerics.bits import (
    as_floats,
    check_dtype,
    has_flat_numpy_view,
    in_order_of_memory,
)
from paritas.core.numerics.block_sums import BLOCK, ROOM, Array
from paritas.core.numerics.flat_blocks import blocks
from paritas.core.numerics.sketch import SIGN_BLOCK, buckets, first_sign, sign_table, sketch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

# --- Statistics, and the running totals they are computed from ------------------------------------

# Scaled by an exponent of at most this size, all float64 have finite, nonzero squares.
LARGEST_SCALE = 1000


class Statistics(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """A summary of the values of one tensor; for complex numbers, of their magnitudes.

    Attributes:
        count: number of values.
        minimum: the smallest finite value; None if there is none, like the next three.
        mean: mean of the finite values.
        l2: L2 norm of the finite values.
        zeros: number of zeros, of either sign.
        exponents: (e, number of finite nonzero values v with 2^e <= |v| < 2^(e+1)), ascending.
    """

    count: int
    minimum: float | None = None
    maximum: float | None = None
    mean: float | None = None
    l2: float | None = None
    zeros: int = 0
    nans: int = 0
    positive_infinities: int = 0
    negative_infinities: int = 0
    exponents: tuple[tuple[int, int], ...] = ()

    @property
    def is_finite(self) -> bool:
        """Whether every value is a finite number."""
        return not (self.nans or self.positive_infinities or self.negative_infinities)

    @property
    def counts_all(self) -> bool:
        """Whether the counts cover each value, as ours do; other tools count only some kinds."""
        counted = self.zeros + self.nans + self.positive_infinities + self.negative_infinities
        return counted + sum(many for _, many in self.exponents) == self.count


class BlockSums(NamedTuple):
    """Sums of a block's finite values and of their squares, with values scaled by 2^-exponent."""

    total: float
    squares: float
    exponent: int = 0


@dataclass
class StatisticsTally:
    """Running totals over blocks; `exponents` counts finite nonzero values by exponent."""

    count: int
    zeros: int = 0
    nans: int = 0
    positive_infinities: int = 0
    negative_infinities: int = 0
    minimum: float = math.inf
    maximum: float = -math.inf
    sums: list[BlockSums] = field(default_factory=list)
    exponents: dict[int, int] = field(default_factory=dict)

    def add(self, exponents: Iterable[tuple[int, int]]) -> None:
        """Add counts by exponent."""
        counts = self.exponents
        for exponent, count in exponents:
            if count:
                counts[exponent] = counts.get(exponent, 0) + count

    def statistics(self) -> Statistics:
        """The statistics of all blocks; scaled sums keep squares from overflowing."""
        infinities = self.positive_infinities + self.negative_infinities
        finite = self.count - self.nans - infinities
        figures: dict[str, float] = {}
        if finite:
            top = max((sums.exponent for sums in self.sums if sums.squares), default=0)
            total = math.fsum(math.ldexp(s.total, s.exponent - top) for s in self.sums)
            squares = math.fsum(math.ldexp(s.squares, 2 * (s.exponent - top)) for s in self.sums)
            figures = {
                "minimum": self.minimum,
                "maximum": self.maximum,
                "mean": math.ldexp(total / finite, top),
                "l2": _scale_or_infinity(math.sqrt(squares), top),
            }
        return Statistics(
            count=self.count,
            zeros=self.zeros,
            nans=self.nans,
            positive_infinities=self.positive_infinities,
            negative_infinities=self.negative_infinities,
            exponents=tuple(sorted(self.exponents.items())),
            **figures,
        )


def _scale_or_infinity(number: float, exponent: int) -> float:
    try:
        return math.ldexp(number, exponent)
    except OverflowError:
        return math.inf


# --- Statistics and sketches of small tensors, those of one size together -------------------------

# The cost of a small tensor is the number of calls. So tensors of one size become the rows of a
# matrix, and each call processes all of them; it takes long enough for other Python threads to run
# meanwhile. The results of a row do not depend on the others.

_ROW_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
_LONGEST_ROW = SIGN_BLOCK
# Elements of a matrix: intermediate results stay in the processor's cache.
_MATRIX_SIZE = 1 << 17
# Dot products use pieces so short that no BLAS starts its threads for them.
DOT = 1 << 13
# Of a float32: fraction bits, values of sign and exponent, values of the exponent, its bias.
_FLOAT32_SHIFT, _FLOAT32_FIELDS, _FLOAT32_EXPONENTS, _FLOAT32_BIAS = 23, 512, 256, 127


class SketchedStatistics(NamedTuple):
    """The statistics of one tensor, with its sketch if requested."""

    statistics: Statistics
    sketch: Tensor | None


def fits_row(tensor: Tensor) -> bool:
    """Whether a tensor is small, contiguous, on the CPU and of a suitable float dtype."""
    return (
        tensor.dtype in _ROW_DTYPES
        and tensor.is_cpu
        and 0 < tensor.numel() <= _LONGEST_ROW
        and tensor.is_contiguous()
        and not tensor.is_neg()
    )


def summarize_rows(tensors: Sequence[Tensor], *, sketches: bool) -> list[SketchedStatistics | None]:
    """Summarize tensors that fit rows, in order.

    Returns:
        None for those with NaN, infinities or subnormals, which need `summarize_on_cpu`.
    """
    sketched_statisticss: list[SketchedStatistics | None] = [None] * len(tensors)
    groups: defaultdict[tuple[torch.dtype, int], list[int]] = defaultdict(list)
    for tensor_index, tensor in enumerate(tensors):
        groups[tensor.dtype, tensor.numel()].append(tensor_index)
    for (_, size), places in groups.items():
        many = _MATRIX_SIZE // size
        for start in range(0, len(places), many):
            chunk = places[start : start + many]
            rows = _stack_rows([tensors[tensor_number] for tensor_number in chunk], size)
            for tensor_index, row in zip(
                chunk, _summarize_matrix(rows, sketches=sketches), strict=True
            ):
                sketched_statisticss[tensor_index] = row
    return sketched_statisticss


def _stack_rows(tensors: list[Tensor], size: int) -> Array:
    flat = [tensor.view(-1) for tensor in tensors]
    if tensors[0].dtype != torch.float32:
        return torch.cat(flat).float().numpy().reshape(-1, size)
    if len(tensors) == 1:
        return flat[0].numpy().reshape(1, size)
    room = torch.from_numpy(ROOM.of("rows", np.float32, len(tensors) * size))
    return torch.cat(flat, out=room).numpy().reshape(-1, size)


def _summarize_matrix(values: Array, *, sketches: bool) -> Iterator[SketchedStatistics | None]:
    with np.errstate(invalid="ignore", over="ignore"):
        least = np.minimum.reduce(values, axis=1) + 0.0  # -0.0 becomes 0.0
        most = np.maximum.reduce(values, axis=1) + 0.0
        wide = ROOM.of("wide rows", np.float64, values.size).reshape(values.shape)
        np.copyto(wide, values)
        totals, squares = np.einsum("ij->i", wide), _row_squares(wide)
        drawn = _sketch_rows(wide) if sketches else [None] * len(values)
    counts, odd = _count_row_exponents(values)
    zeros = [0] * len(values)
    for row in np.flatnonzero(odd).tolist():
        # By their bits: the processor may be set to flush subnormals to zero.
        zeros[row] = values.shape[1] - int(np.count_nonzero(values[row].view(np.uint32) << 1))
    plain = np.isfinite(squares) & (odd == zeros)
    figures = zip(
        plain.tolist(),
        least.tolist(),
        most.tolist(),
        totals.tolist(),
        squares.tolist(),
        zeros,
        counts,
        drawn,
        strict=True,
    )
    size = values.shape[1]
    for fine, minimum, maximum, total, square, none, exponents, sums in figures:
        if not fine:
            yield None
            continue
        statistics = Statistics(
            count=size,
            minimum=minimum,
            maximum=maximum,
            mean=total / size,
            l2=math.sqrt(square),
            zeros=none,
            exponents=exponents,
        )
        yield SketchedStatistics(statistics, sums)


def _row_squares(wide: Array) -> Array:
    row_squares = np.zeros(len(wide))
    for start in range(0, wide.shape[1], DOT):
        piece = wide[:, start : start + DOT]
        row_squares += np.matmul(piece[:, None, :], piece[:, :, None]).reshape(-1)
    return row_squares


def _count_row_exponents(values: Array) -> tuple[list[tuple[tuple[int, int], ...]], Array]:
    """Count the normal values of each row by exponent, and the number of zeros and subnormals."""
    rows, size = values.shape
    fields = ROOM.of("fields", np.uint32, values.size).reshape(rows, size)
    np.right_shift(values.view(np.uint32), _FLOAT32_SHIFT, out=fields)
    if rows > 1:
        fields += np.arange(0, rows * _FLOAT32_FIELDS, _FLOAT32_FIELDS, dtype=np.uint32)[:, None]
    flat = torch.from_numpy(fields.reshape(-1).view(np.int32))
    table = torch.bincount(flat, minlength=rows * _FLOAT32_FIELDS).numpy()
    counts = np.add.reduce(table.reshape(rows, 2, _FLOAT32_EXPONENTS), axis=1)
    odd = counts[:, 0].copy()
    counts[:, 0] = 0
    where, exponents = np.nonzero(counts)
    many = counts[where, exponents].tolist()
    pairs = list(zip((exponents - _FLOAT32_BIAS).tolist(), many, strict=True))
    bounds = np.searchsorted(where, np.arange(rows + 1)).tolist()
    return [tuple(pairs[bounds[row] : bounds[row + 1]]) for row in range(rows)], odd


def _sketch_rows(wide: Array) -> Sequence[Tensor]:
    """The sketch of each row, the same as by `sketch`."""
    rows, size = wide.shape
    width = buckets(size)
    first = first_sign(0)
    signs = sign_table(wide.dtype)[first : first + size]
    turns = size // width
    full_width = turns * width
    values = wide[:, :full_width].reshape(rows, turns, width)
    sums = np.einsum("rtj,tj->rj", values, signs[:full_width].reshape(turns, width))
    sums[:, : size - full_width] += wide[:, full_width:] * signs[full_width:]
    narrow = sums.astype(np.float32)
    if np.isfinite(narrow).all():
        return torch.from_numpy(narrow).unbind()
    return [
        torch.from_numpy(short if np.isfinite(short).all() else long)
        for short, long in zip(narrow, sums, strict=True)
    ]


# --- The statistics of a tensor, computed on the CPU ----------------------------------------------

# Block by block: memory is bounded, and a block stays in the cache. Numpy does the work: its calls
# are cheapest on small tensors. Sums are in float64, and exponents are read from the bits.

_HOST_BLOCK = BLOCK
# Up to this many distinct exponents, comparing with each is faster than a table of counts.
_FEW_EXPONENTS = 6
# Up to this many elements numpy's table of counts is faster than torch's.
_SHORT_TABLE = 1 << 12
# A sum of squares above the first lost nothing to underflow; below the second no square overflows.
_SAFE_SQUARES = 1e-280
_SAFE_SIZE = 1e150


def summarize_on_cpu(tensor: Tensor) -> Statistics:
    """Summarize a tensor; one on another device is copied block by block."""
    tally = StatisticsTally(tensor.numel())
    room = ROOM.of("wide", np.float64, _HOST_BLOCK), ROOM.of("fields", np.int16, _HOST_BLOCK)
    for values in _float_chunks(tensor):
        _add_block(tally, values, room)
    return tally.statistics()


def _float_chunks(tensor: Tensor) -> Iterator[Array]:
    """Flat float32 or float64 arrays of bounded size, in memory order."""
    if has_flat_numpy_view(tensor):
        flat = tensor.view(-1).numpy()
        for start in range(0, flat.size, _HOST_BLOCK):
            yield flat[start : start + _HOST_BLOCK]
        return
    check_dtype(tensor.dtype)
    for _, (chunk,) in blocks(in_order_of_memory(tensor), block_size=_HOST_BLOCK):
        yield as_floats(chunk.cpu()).numpy()


class _FloatLayout(NamedTuple):
    """The layout of a float dtype.

    Attributes:
        integer: the dtype of its bits.
        fields: a dtype for exponent fields; the conversion keeps the low bits.
        shift: number of fraction bits.
        mask: the exponent field of NaN and infinities.
        bias: the exponent bias.
    """

    integer: type
    fields: type
    shift: int
    mask: int
    bias: int

    @property
    def subnormal(self) -> int:
        """Exponent of the smallest subnormal."""
        return 1 - self.bias - self.shift


_LAYOUTS = {
    np.dtype(np.float32): _FloatLayout(np.int32, np.uint8, 23, 0xFF, 127),
    np.dtype(np.float64): _FloatLayout(np.int64, np.int16, 52, 0x7FF, 1023),
}


def _add_block(tally: StatisticsTally, values: Array, room: tuple[Array, Array]) -> None:
    least, most = float(np.minimum.reduce(values)), float(np.maximum.reduce(values))
    if not math.isfinite(least) or not math.isfinite(most):  # a NaN anywhere makes both NaN
        nans = int(np.count_nonzero(np.isnan(values)))
        infinite = values[np.isinf(values)]
        positive = int(np.count_nonzero(infinite > 0))
        tally.nans += nans
        tally.positive_infinities += positive
        tally.negative_infinities += infinite.size - positive
        values = values[np.isfinite(values)]
        if not values.size:
            return
        least, most = float(np.minimum.reduce(values)), float(np.maximum.reduce(values))
    tally.minimum = min(tally.minimum, least + 0.0)  # -0.0 becomes 0.0
    tally.maximum = max(tally.maximum, most + 0.0)
    largest = max(-least, most)
    _count_exponents(tally, values, largest, room[1])
    tally.sums.append(_sum_block(values, largest, room[0]))


def _sum_block(values: Array, largest: float, room: Array) -> BlockSums:
    if values.dtype == np.float64:
        wide = values
    else:
        wide = room[: values.size]
        np.copyto(wide, values)
    squares = _sum_squares(wide) if largest < _SAFE_SIZE else math.inf
    if _SAFE_SQUARES < squares < math.inf or largest == 0.0:
        return BlockSums(float(np.einsum("i->", wide)), squares)
    exponent = max(-LARGEST_SCALE, min(LARGEST_SCALE, math.frexp(largest)[1]))
    scaled = np.multiply(wide, math.ldexp(1.0, -exponent), out=room[: values.size])
    return BlockSums(float(np.einsum("i->", scaled)), _sum_squares(scaled), exponent)


def _sum_squares(wide: Array) -> float:
    """Sum in the same order as `_row_squares`, so both give the same bits."""
    total_squares = 0.0
    for start in range(0, wide.size, DOT):  # not `sum`: its rounding depends on the Python version
        piece = wide[start : start + DOT]
        total_squares += float(piece.dot(piece))
    return total_squares


def _count_exponents(tally: StatisticsTally, values: Array, largest: float, room: Array) -> None:
    """Count finite values by the exponent field in their bits; subnormals separately."""
    layout = _LAYOUTS[values.dtype]
    bits: Array = values.view(layout.integer)
    fields: Array = room.view(layout.fields)[: values.size]
    np.right_shift(bits, layout.shift, out=fields, casting="unsafe")
    if layout.fields is np.int16:
        fields &= layout.mask
    low = int(np.minimum.reduce(fields))
    high = max(math.frexp(largest)[1] - 1 + layout.bias, 0) if largest else 0
    if high - low < _FEW_EXPONENTS:
        counts = [int(np.count_nonzero(fields == value)) for value in range(low, high + 1)]
    else:
        counts = _count_fields(fields)[low:].tolist()
    if low == 0:
        zeros = values.size - int(np.count_nonzero(bits << 1))
        tally.zeros += zeros
        if counts[0] > zeros:
            tally.add(_subnormal_exponents(bits[fields == 0], layout))
        counts[0] = 0
    tally.add(enumerate(counts, low - layout.bias))


def _count_fields(fields: Array) -> Array:
    if fields.size <= _SHORT_TABLE:
        return np.bincount(fields)
    return torch.bincount(torch.from_numpy(fields)).numpy()


def _subnormal_exponents(bits: Array, layout: _FloatLayout) -> Iterable[tuple[int, int]]:
    """Exponents of subnormals: those of their fractions, read as integers."""
    fractions = bits & ((1 << layout.shift) - 1)
    powers = np.frexp(fractions[fractions != 0].astype(np.float64))[1]
    return enumerate(np.bincount(powers).tolist(), layout.subnormal - 1)


# --- The statistics of a tensor on a CUDA device: queued work, with one synchronization -----------

# Launches dominate the cost of small tensors, so there are few kernels. Memory traffic dominates
# the cost of large ones, so float32 values are widened only while they are summed.

# Elements per block: enough to outweigh the launches, at about 40 bytes of memory each.
_DEVICE_BLOCK = 1 << 22
_FLOAT64_BIAS, _FLOAT64_FRACTION, _FLOAT64_FIELD, _FLOAT64_MAGNITUDE = (
    1023,
    52,
    0x7FF,
    (1 << 63) - 1,
)
_LEAST_EXPONENT = 1 - _FLOAT64_BIAS - _FLOAT64_FRACTION
_EXPONENT_PLACES = _FLOAT64_BIAS + 1 - _LEAST_EXPONENT
# Where a field of 0 is counted; it means zero in a float64 converted from float32.
_ZERO_PLACE = -_FLOAT64_BIAS - _LEAST_EXPONENT
_BLOCK_FIGURES = 8


@dataclass(frozen=True)
class PendingDeviceStatistics:
    """Figures per block and counts by exponent, being copied to the host."""

    count: int
    figures: Tensor
    ready: torch.Event

    def finish(self) -> Statistics:
        """Wait for the result, from any thread."""
        self.ready.synchronize()
        rows, counts = self.figures[:-_EXPONENT_PLACES], self.figures[-_EXPONENT_PLACES:]
        tally = StatisticsTally(self.count)
        for row in rows.reshape(-1, _BLOCK_FIGURES).tolist():
            _add_figures(tally, row)
        tally.add(
            (i + _LEAST_EXPONENT, int(counts[i])) for i in counts.nonzero().flatten().tolist()
        )
        infinities = tally.positive_infinities + tally.negative_infinities
        tally.zeros = self.count - tally.nans - infinities - sum(tally.exponents.values())
        return tally.statistics()


def begin_on_device(tensor: Tensor) -> PendingDeviceStatistics:
    """Queue the statistics of a tensor on its device's current stream."""
    check_dtype(tensor.dtype)
    counts = torch.zeros(_EXPONENT_PLACES, dtype=torch.float64, device=tensor.device)
    rows: list[Tensor] = []
    for _, (chunk,) in blocks(in_order_of_memory(tensor), block_size=_DEVICE_BLOCK):
        values = as_floats(chunk)
        finite_values = values.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).double()
        rows += (
            _count_nonfinite(values),
            _finite_extremes(values),
            _sum_on_device(finite_values, wide=values.dtype == finite_values.dtype),
        )
        counts += _count_device_exponents(finite_values, wide=values.dtype == finite_values.dtype)
    host = torch.cat([*rows, counts]).to("cpu", non_blocking=True)
    ready = torch.Event(device=tensor.device)
    ready.record(torch.accelerator.current_stream(tensor.device))
    return PendingDeviceStatistics(tensor.numel(), host, ready)


def _count_nonfinite(values: Tensor) -> Tensor:
    kinds = (values.isnan(), values == torch.inf, values == -torch.inf)
    return torch.stack([kind.sum() for kind in kinds]).double()


def _finite_extremes(values: Tensor) -> Tensor:
    """Extremes of the finite values; +inf and -inf if there are none."""
    above = values.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=torch.inf).amin()
    below = values.nan_to_num(nan=-torch.inf, posinf=-torch.inf, neginf=-torch.inf).amax()
    return torch.stack([above, below]).double()


def _sum_on_device(finite_values: Tensor, *, wide: bool) -> Tensor:
    """Sum, norm and the exponent of their scale, which only squares of float64 need."""
    exponent = finite_values.new_zeros(())
    if wide:
        power = (
            finite_values.abs().amax().frexp().exponent.clamp(-LARGEST_SCALE, LARGEST_SCALE).long()
        )
        # A power of two from its bits, which is exact.
        finite_values = finite_values * ((_FLOAT64_BIAS - power) << _FLOAT64_FRACTION).view(
            torch.float64
        )
        exponent = power.double()
    return torch.stack([finite_values.sum(), torch.linalg.vector_norm(finite_values), exponent])


def _add_figures(tally: StatisticsTally, row: list[float]) -> None:
    nans, positive, negative, least, most, total, norm, exponent = row
    tally.nans += int(nans)
    tally.positive_infinities += int(positive)
    tally.negative_infinities += int(negative)
    tally.minimum = min(tally.minimum, least)
    tally.maximum = max(tally.maximum, most)
    tally.sums.append(BlockSums(total, norm * norm, int(exponent)))


def _count_device_exponents(finite_values: Tensor, *, wide: bool) -> Tensor:
    """Number of nonzero values per exponent, from that of the smallest subnormal."""
    places = (finite_values.view(torch.int32)[1::2] >> 20 & _FLOAT64_FIELD) + _ZERO_PLACE
    if wide:
        bits = finite_values.view(torch.int64) & _FLOAT64_MAGNITUDE
        # A subnormal's fraction, converted as an integer, has a float64 exponent of its own; zero
        # ends up below all bins and is not counted.
        subnormal = (bits.double().view(torch.int64) >> _FLOAT64_FRACTION) - _FLOAT64_BIAS
        places = places.where(bits >> _FLOAT64_FRACTION != 0, subnormal.int())
    # On integers: torch refuses a histogram of floats in deterministic mode.
    exponent_counts = torch.histc(places, bins=_EXPONENT_PLACES, min=0, max=_EXPONENT_PLACES)
    if not wide:
        exponent_counts.narrow(0, _ZERO_PLACE, 1).zero_()
    return exponent_counts


# --- Summarizing any tensor -----------------------------------------------------------------------

# Fewer small tensors than this are faster one by one.
_MANY_ROWS = 4


class PendingStatistics(Protocol):
    """Statistics that a device may still be computing."""

    def finish(self) -> Statistics:
        """Wait for the result, from any thread."""


@dataclass(frozen=True)
class _DoneStatistics:
    statistics: Statistics

    def finish(self) -> Statistics:
        return self.statistics


def summarize(tensor: Tensor) -> Statistics:
    """Summarize the values of a tensor of any device, strides and numeric dtype.

    Additional memory is bounded. Integers of 64 bits are rounded to float64. A complex number with
    an infinite part, or with a magnitude too large for float64, counts as positive infinity. A norm
    too large for float64 is infinite.

    Raises:
        UsageError: the tensor is sparse or quantized, or has a dtype that torch cannot convert.
    """
    return begin_statistics(tensor).finish()


def summarize_all(tensors: Sequence[Tensor], *, sketches: bool) -> list[SketchedStatistics]:
    """Summarize and sketch tensors on the CPU, with the results of `summarize` and `sketch`.

    Small tensors of one size are processed together, in a fraction of the time.
    """
    small = [tensor_index for tensor_index, tensor in enumerate(tensors) if fits_row(tensor)]
    if len(small) < _MANY_ROWS:
        small = []
    rows = summarize_rows([tensors[tensor_index] for tensor_index in small], sketches=sketches)
    row_by_index = dict(zip(small, rows, strict=True))
    return [
        row_by_index.get(tensor_index) or _summarize_one(tensor, sketches=sketches)
        for tensor_index, tensor in enumerate(tensors)
    ]


def _summarize_one(tensor: Tensor, *, sketches: bool) -> SketchedStatistics:
    return SketchedStatistics(summarize_on_cpu(tensor), sketch(tensor) if sketches else None)


def begin_statistics(tensor: Tensor) -> PendingStatistics:
    """Start to summarize a tensor: immediately on the CPU, queued on a CUDA device.

    The work is queued on the device's current stream; later work on that stream may change the
    tensor. Nothing synchronizes before `finish`.

    Raises:
        UsageError: as for `summarize`.
    """
    if tensor.is_cuda:
        return begin_on_device(tensor.detach())
    return _DoneStatistics(summarize_on_cpu(tensor.detach()))
