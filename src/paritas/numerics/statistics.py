"""What a tensor amounts to, in a few numbers: on the CPU, on a device, many small ones at once."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import msgspec
import numpy as np
import torch
from torch import Tensor

from paritas.numerics.bits import as_floats, check_dtype, has_flat_numpy_view, in_order_of_memory
from paritas.numerics.block_sums import BLOCK, ROOM, Array
from paritas.numerics.metrics import blocks
from paritas.numerics.sketch import SIGN_BLOCK, buckets, first_sign, sign_table, sketch

# --- What a tensor amounts to, and what is added up on the way there ------------------------------

# Scaled by such an exponent at most, the largest float64 and the least have squares.
LARGEST_SCALE = 1000


class Statistics(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """A summary of the values of one tensor; of complex numbers, of their magnitudes.

    Attributes:
        count: how many values.
        minimum: the least finite value; None where there is none.
        maximum: the greatest finite value.
        mean: of the finite values.
        l2: square root of the sum of their squares.
        zeros: how many are zero, of either sign.
        nans: how many are not a number.
        positive_infinities: how many.
        negative_infinities: how many.
        exponents: (e, how many finite nonzero values v have 2^e <= |v| < 2^(e+1)), ascending.
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
        """Whether each value is in one of the counts, as ours are; other tools count some kinds."""
        counted = self.zeros + self.nans + self.positive_infinities + self.negative_infinities
        return counted + sum(many for _, many in self.exponents) == self.count


class BlockSums(NamedTuple):
    """Sums of a block's finite values and of their squares, all scaled down by 2^exponent."""

    total: float
    squares: float
    exponent: int = 0


@dataclass
class StatisticsTally:
    """What all blocks so far come to, wherever they were counted.

    Attributes:
        exponents: finite nonzero values by exponent.
    """

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
        found = self.exponents
        for exponent, count in exponents:
            if count:
                found[exponent] = found.get(exponent, 0) + count

    def statistics(self) -> Statistics:
        """The whole; mean and norm from scaled sums, lest a square overflow."""
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

# What a small tensor costs is the number of calls. So tensors of one size become the rows of a
# matrix, and each call is made once for all of them; it takes long enough for Python to let other
# threads run beside it. What is found of a row does not depend on the others.

_ROW_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
_LONGEST_ROW = SIGN_BLOCK
# Elements of a matrix: what is computed of it stays in a processor's cache.
_MATRIX_SIZE = 1 << 17
# Dot products are taken in pieces so short that no BLAS wakes its threads for them.
DOT = 1 << 13
# Of a float32: bits of the fraction, values of sign and exponent, those of the exponent, its bias.
_FLOAT32_SHIFT, _FLOAT32_FIELDS, _FLOAT32_EXPONENTS, _FLOAT32_BIAS = 23, 512, 256, 127


class SketchedStatistics(NamedTuple):
    """What was found of one tensor; its sketch, if that was asked for."""

    statistics: Statistics
    sketch: Tensor | None


def fits_row(tensor: Tensor) -> bool:
    """Whether a tensor is small, and its values are floats that lie in order on the CPU."""
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
        None for those that need a closer look: they hold NaN, infinities or subnormals.
    """
    found: list[SketchedStatistics | None] = [None] * len(tensors)
    groups: defaultdict[tuple[torch.dtype, int], list[int]] = defaultdict(list)
    for place, tensor in enumerate(tensors):
        groups[tensor.dtype, tensor.numel()].append(place)
    for (_, size), places in groups.items():
        many = _MATRIX_SIZE // size
        for start in range(0, len(places), many):
            chunk = places[start : start + many]
            rows = _stack_rows([tensors[place] for place in chunk], size)
            for place, row in zip(chunk, _summarize_matrix(rows, sketches=sketches), strict=True):
                found[place] = row
    return found


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
        least = np.minimum.reduce(values, axis=1) + 0.0  # a zero of either sign is one
        most = np.maximum.reduce(values, axis=1) + 0.0
        wide = ROOM.of("wide rows", np.float64, values.size).reshape(values.shape)
        np.copyto(wide, values)
        totals, squares = np.einsum("ij->i", wide), _row_squares(wide)
        drawn = _sketch_rows(wide) if sketches else [None] * len(values)
    counts, odd = _count_row_exponents(values)
    zeros = [0] * len(values)
    for row in np.flatnonzero(odd).tolist():
        # By their bits: a processor may be told to take subnormals for zeros.
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
    found = np.zeros(len(wide))
    for start in range(0, wide.shape[1], DOT):
        piece = wide[:, start : start + DOT]
        found += np.matmul(piece[:, None, :], piece[:, :, None]).reshape(-1)
    return found


def _count_row_exponents(values: Array) -> tuple[list[tuple[tuple[int, int], ...]], Array]:
    """Count the normal values of each row by exponent; and how many others there are."""
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
    """The sketch of each row, as `sketch` makes them."""
    rows, size = wide.shape
    width = buckets(size)
    first = first_sign(0)
    signs = sign_table(wide.dtype)[first : first + size]
    turns = size // width
    whole = turns * width
    values = wide[:, :whole].reshape(rows, turns, width)
    sums = np.einsum("rtj,tj->rj", values, signs[:whole].reshape(turns, width))
    sums[:, : size - whole] += wide[:, whole:] * signs[whole:]
    narrow = sums.astype(np.float32)
    if np.isfinite(narrow).all():
        return torch.from_numpy(narrow).unbind()
    return [
        torch.from_numpy(short if np.isfinite(short).all() else long)
        for short, long in zip(narrow, sums, strict=True)
    ]


# --- The statistics of a tensor, computed on the CPU ----------------------------------------------

# Block by block: memory stays flat, and a block stays in the cache. It is numpy's work, whose calls
# cost least on small tensors. Sums are taken in float64, and exponents are read from the bits.

_HOST_BLOCK = BLOCK
# Up to so many distinct exponents, comparing with each is faster than one table of counts.
_FEW_EXPONENTS = 6
# Up to so many elements numpy's table of counts is faster than torch's.
_SHORT_TABLE = 1 << 12
# A sum of squares above this lost nothing to underflow; no square of less than that overflows.
_SAFE_SQUARES = 1e-280
_SAFE_SIZE = 1e150


def summarize_on_cpu(tensor: Tensor) -> Statistics:
    """Summarize a tensor, which is brought here block by block if it is elsewhere."""
    tally = StatisticsTally(tensor.numel())
    room = ROOM.of("wide", np.float64, _HOST_BLOCK), ROOM.of("fields", np.int16, _HOST_BLOCK)
    for values in _float_chunks(tensor):
        _add_block(tally, values, room)
    return tally.statistics()


def _float_chunks(tensor: Tensor) -> Iterator[Array]:
    """Flat float32 or float64 arrays of bounded size, in the order of memory."""
    if has_flat_numpy_view(tensor):
        flat = tensor.view(-1).numpy()
        for start in range(0, flat.size, _HOST_BLOCK):
            yield flat[start : start + _HOST_BLOCK]
        return
    check_dtype(tensor.dtype)
    for _, (chunk,) in blocks(in_order_of_memory(tensor), block_size=_HOST_BLOCK):
        yield as_floats(chunk.cpu()).numpy()


class _FloatLayout(NamedTuple):
    """How a float is laid out.

    Attributes:
        integer: the dtype of its bits.
        fields: a dtype for exponent fields; its low bits are cut out by the conversion.
        shift: bits of the fraction.
        mask: the field of NaN and infinities.
        bias: of the field.
    """

    integer: type
    fields: type
    shift: int
    mask: int
    bias: int

    @property
    def subnormal(self) -> int:
        """Exponent of the least subnormal."""
        return 1 - self.bias - self.shift


_LAYOUTS = {
    np.dtype(np.float32): _FloatLayout(np.int32, np.uint8, 23, 0xFF, 127),
    np.dtype(np.float64): _FloatLayout(np.int64, np.int16, 52, 0x7FF, 1023),
}


def _add_block(tally: StatisticsTally, values: Array, room: tuple[Array, Array]) -> None:
    """Add one block to the tally."""
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
    tally.minimum = min(tally.minimum, least + 0.0)  # a zero of either sign is one
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
    """Added up in the order in which `rows` does it: nobody sees which of them was at work."""
    found = 0.0
    for start in range(0, wide.size, DOT):  # not `sum`, which rounds as Python's version has it
        piece = wide[start : start + DOT]
        found += float(piece.dot(piece))
    return found


def _count_exponents(tally: StatisticsTally, values: Array, largest: float, room: Array) -> None:
    """Count finite values by exponent: by the field in their bits, the subnormals on their own."""
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
    """Exponents of subnormals: those of their fractions, taken for integers."""
    fractions = bits & ((1 << layout.shift) - 1)
    powers = np.frexp(fractions[fractions != 0].astype(np.float64))[1]
    return enumerate(np.bincount(powers).tolist(), layout.subnormal - 1)


# --- The statistics of a tensor on a CUDA device: all of the work queued, and waited for once -----

# Small tensors cost what their launches cost, so few kernels count; large ones what their memory
# traffic costs, so that float32 values are not widened but while they are summed.

# Elements taken at once: enough to outweigh the launches, at some 40 bytes of memory each.
_DEVICE_BLOCK = 1 << 22
_FLOAT64_BIAS, _FLOAT64_FRACTION, _FLOAT64_FIELD, _FLOAT64_MAGNITUDE = (
    1023,
    52,
    0x7FF,
    (1 << 63) - 1,
)
_LEAST_EXPONENT = 1 - _FLOAT64_BIAS - _FLOAT64_FRACTION
_EXPONENT_PLACES = _FLOAT64_BIAS + 1 - _LEAST_EXPONENT
# Where a field of 0 is counted, which means zero in a float64 made of a float32.
_ZERO_PLACE = -_FLOAT64_BIAS - _LEAST_EXPONENT
_BLOCK_FIGURES = 8


@dataclass(frozen=True)
class PendingDeviceStatistics:
    """Figures per block, then counts by exponent, on their way to memory of the host."""

    count: int
    figures: Tensor
    ready: torch.Event

    def finish(self) -> Statistics:
        """Wait for them; from any thread."""
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
        known = values.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).double()
        rows += (
            _count_nonfinite(values),
            _finite_extremes(values),
            _sum_on_device(known, wide=values.dtype == known.dtype),
        )
        counts += _count_device_exponents(known, wide=values.dtype == known.dtype)
    host = torch.cat([*rows, counts]).to("cpu", non_blocking=True)
    ready = torch.Event(device=tensor.device)
    ready.record(torch.accelerator.current_stream(tensor.device))
    return PendingDeviceStatistics(tensor.numel(), host, ready)


def _count_nonfinite(values: Tensor) -> Tensor:
    """How many are NaN, and either infinity."""
    kinds = (values.isnan(), values == torch.inf, values == -torch.inf)
    return torch.stack([kind.sum() for kind in kinds]).double()


def _finite_extremes(values: Tensor) -> Tensor:
    """Of the finite values; infinities, the wrong way round, if there are none."""
    above = values.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=torch.inf).amin()
    below = values.nan_to_num(nan=-torch.inf, posinf=-torch.inf, neginf=-torch.inf).amax()
    return torch.stack([above, below]).double()


def _sum_on_device(known: Tensor, *, wide: bool) -> Tensor:
    """Sum, norm and the exponent both are scaled by, which only squares of float64 need."""
    exponent = known.new_zeros(())
    if wide:
        power = known.abs().amax().frexp().exponent.clamp(-LARGEST_SCALE, LARGEST_SCALE).long()
        # A power of two made of its bits, because it has to be exact.
        known = known * ((_FLOAT64_BIAS - power) << _FLOAT64_FRACTION).view(torch.float64)
        exponent = power.double()
    return torch.stack([known.sum(), torch.linalg.vector_norm(known), exponent])


def _add_figures(tally: StatisticsTally, row: list[float]) -> None:
    """Add the figures of a block to the tally."""
    nans, positive, negative, least, most, total, norm, exponent = row
    tally.nans += int(nans)
    tally.positive_infinities += int(positive)
    tally.negative_infinities += int(negative)
    tally.minimum = min(tally.minimum, least)
    tally.maximum = max(tally.maximum, most)
    tally.sums.append(BlockSums(total, norm * norm, int(exponent)))


def _count_device_exponents(known: Tensor, *, wide: bool) -> Tensor:
    """How many nonzero values have each exponent, from the least subnormal's on."""
    places = (known.view(torch.int32)[1::2] >> 20 & _FLOAT64_FIELD) + _ZERO_PLACE
    if wide:
        bits = known.view(torch.int64) & _FLOAT64_MAGNITUDE
        # A subnormal's fraction, taken for an integer, has an exponent of its own in float64; zero
        # comes out below all places, where nothing is counted.
        subnormal = (bits.double().view(torch.int64) >> _FLOAT64_FRACTION) - _FLOAT64_BIAS
        places = places.where(bits >> _FLOAT64_FRACTION != 0, subnormal.int())
    # Of integers, as a histogram of floats is refused where determinism is asked for.
    found = torch.histc(places, bins=_EXPONENT_PLACES, min=0, max=_EXPONENT_PLACES)
    if not wide:
        found.narrow(0, _ZERO_PLACE, 1).zero_()
    return found


# --- Summarizing any tensor -----------------------------------------------------------------------

# Fewer small tensors are sooner summarized one by one.
_MANY_ROWS = 4


class PendingStatistics(Protocol):
    """Statistics that may still be on their way from a device."""

    def finish(self) -> Statistics:
        """Wait for them; from any thread."""


@dataclass(frozen=True)
class _DoneStatistics:
    statistics: Statistics

    def finish(self) -> Statistics:
        return self.statistics


def summarize(tensor: Tensor) -> Statistics:
    """Summarize the values of a tensor of any device, strides and dtype of numbers.

    Memory beyond the tensor's own is bounded. Integers of 64 bits are taken for the nearest
    float64. A complex number with an infinite part is a positive infinity, and so is one whose
    magnitude no float64 holds. A norm that no float64 holds is infinite.

    Raises:
        UsageError: the tensor is sparse or quantized, or of a dtype that torch cannot convert.
    """
    return begin_statistics(tensor).finish()


def summarize_all(tensors: Sequence[Tensor], *, sketches: bool) -> list[SketchedStatistics]:
    """Summarize and sketch tensors on the CPU, as `summarize` and `sketch` do with each.

    Of small tensors, those of one size together: many such take a fraction of the time.
    """
    small = [place for place, tensor in enumerate(tensors) if fits_row(tensor)]
    if len(small) < _MANY_ROWS:
        small = []
    rows = summarize_rows([tensors[place] for place in small], sketches=sketches)
    found = dict(zip(small, rows, strict=True))
    return [
        found.get(place) or _summarize_one(tensor, sketches=sketches)
        for place, tensor in enumerate(tensors)
    ]


def _summarize_one(tensor: Tensor, *, sketches: bool) -> SketchedStatistics:
    return SketchedStatistics(summarize_on_cpu(tensor), sketch(tensor) if sketches else None)


def begin_statistics(tensor: Tensor) -> PendingStatistics:
    """Start to summarize a tensor: on the CPU it is done at once, elsewhere the work is queued.

    The work goes to the device's current stream; the tensor may change once that stream has come
    to it. Nothing waits for the device before `finish`.

    Raises:
        UsageError: as `summarize` does.
    """
    if tensor.is_cuda:
        return begin_on_device(tensor.detach())
    return _DoneStatistics(summarize_on_cpu(tensor.detach()))
