"""Linear sketches: a few kilobytes that estimate the elementwise distance of two tensors."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from paritas.core.errors import UsageError
from paritas.core.numerics.bits import check_dtype, fits_float32, has_flat_numpy_view
from paritas.core.numerics.block_sums import ROOM, Array
from paritas.core.numerics.flat_blocks import blocks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

# --- A pseudo-random sign for every index: the same on every machine, device and version ----------

# sign(i) = 1 - 2 * (mix(o + i mod 2^16) >> 31),  o = mix(2^20 + i // 2^16) mod 2^16
#
# where `mix` is the fixed hash of 32-bit integers below. Each block of 2^16 indices takes its signs
# from a contiguous part of a table of 2^17, at its own offset.

Integer = TypeVar("Integer", int, Tensor)

SIGN_BLOCK = 1 << 16
_SIGN_BITS = 16
_FIRST_BLOCK = 1 << 20


def signs(indices: Tensor) -> Tensor:
    """The sign, +1 or -1 as int8, of each flat index; on the device of the indices."""
    within = indices & (SIGN_BLOCK - 1)
    return _table_on(indices.device)[first_sign(indices >> _SIGN_BITS) + within]


def signs_from(start: int, count: int, device: torch.device) -> Tensor:
    """The signs of `count` consecutive indices."""
    first, last = start >> _SIGN_BITS, (start + count - 1) >> _SIGN_BITS
    rows = _first_signs(first, last + 1, device)
    # All windows of the table, as a view: the signs of a block are one of them.
    windows = _table_on(device).unfold(0, SIGN_BLOCK, 1)
    return windows[rows].flatten().narrow(0, start & (SIGN_BLOCK - 1), count)


def first_sign(block: Integer) -> Integer:
    """The position in the table where the signs of a block begin."""
    return _mix(block + _FIRST_BLOCK) & (SIGN_BLOCK - 1)


@functools.lru_cache(maxsize=64)
def _first_signs(start: int, end: int, device: torch.device) -> Tensor:
    # Kept, because the tensors of a model are of few sizes. The copy is complete for every stream.
    return first_sign(torch.arange(start, end, device="cpu")).to(device)


@functools.cache
def sign_table(dtype: np.dtype[Any]) -> Array:
    """The table as a numpy array of a dtype."""
    return _table_on(torch.device("cpu")).numpy().astype(dtype)


@functools.cache
def _table_on(device: torch.device) -> Tensor:
    return (1 - 2 * (_mix(torch.arange(2 * SIGN_BLOCK, device="cpu")) >> 31)).to(device, torch.int8)


def _mix(number: Integer) -> Integer:
    """Hash integers below 2^32; the same for Python integers and int64 tensors."""
    number = (number ^ (number >> 16)) * 0x7FEB352D & 0xFFFFFFFF
    number = (number ^ (number >> 15)) * 0x846CA68B & 0xFFFFFFFF
    return number ^ (number >> 16)


# --- Indices of the elements of a shard in the whole tensor ---------------------------------------


class ShardIndices:
    """Maps the flat indices of a shard to those of the whole.

    Attributes:
        run: number of consecutive elements that are also consecutive in the whole.
    """

    def __init__(
        self, shape: Sequence[int], full_shape: Sequence[int], origin: Sequence[int]
    ) -> None:
        """Place a shard.

        Raises:
            UsageError: it is not inside the whole.
        """
        _check_shard(tuple(shape), tuple(full_shape), tuple(origin))
        self.run = 1
        self._start = 0
        # The axes outside the run, last first: extent in the shard, stride in the whole.
        self._axes: list[tuple[int, int]] = []
        stride, joined = 1, True
        for extent, full, begin in zip(shape[::-1], full_shape[::-1], origin[::-1], strict=True):
            self._start += begin * stride
            if joined:
                self.run *= extent
                joined = extent == full
            else:
                self._axes.append((extent, stride))
            stride *= full

    def indices(self, begin: int, end: int, device: torch.device) -> Tensor:
        """The indices in the whole for a range of the shard."""
        first, last = begin // self.run, -(-end // self.run)
        starts = self._run_start(torch.arange(first, last, device=device))
        rows = starts[:, None] + torch.arange(self.run, device=device)
        return rows.flatten()[begin - first * self.run : end - first * self.run]

    def runs(self, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Cut a range of the shard into runs: begin and end in the shard, index in the whole."""
        while begin < end:
            stop = min(end, begin - begin % self.run + self.run)
            yield begin, stop, self._run_start(begin // self.run) + begin % self.run
            begin = stop

    def _run_start(self, run: Integer) -> Integer:
        start = run * 0 + self._start
        for extent, stride in self._axes:
            start = start + run % extent * stride
            run = run // extent
        return start


def _check_shard(
    shape: tuple[int, ...], full_shape: tuple[int, ...], origin: tuple[int, ...]
) -> None:
    axes = zip(shape, full_shape, origin, strict=False)
    inside = all(0 <= begin <= begin + extent <= full for extent, full, begin in axes)
    if not (len(shape) == len(full_shape) == len(origin) and inside):
        text = f"a shard of shape {shape} at {origin} is not inside a tensor of shape {full_shape}"
        raise UsageError(f"{text}: give global_shape and global_offset as in the placement")


# --- Sketching ------------------------------------------------------------------------------------

# Means and norms do not detect two swapped rows or a transposed tensor; a sketch does. It is a
# vector of m sums. The value at flat index i (row-major, in the whole tensor) is added, times
# sign(i), to the sum number i mod m; `buckets` defines m, `signs` the sign. Both are a part of the
# format: sketches of different versions, machines and devices are compared.
#
# The expected square of a sketch's norm is that of the tensor's, to about sqrt(2/m) of it. A sketch
# is linear: the difference of two sketches is the sketch of the difference, and sketches add up
# over the shards of a tensor, each placed by its index in the whole, and over partial sums.

_MOST_BUCKETS = 1024
# Runs of at least this length are added one by one, shorter ones index by index.
_LONG_RUN = 1 << 10
_LONG_RUN_ON_DEVICE = 1 << 16
_DEVICE_BLOCK = 1 << 22
_LARGEST = 2.0**1000
# A device computes with them as they are; others become float32 or float64.
_NARROW = frozenset({torch.float16, torch.bfloat16})


@dataclass(frozen=True)
class PendingSketch:
    """A sketch that a device may still be computing."""

    _sums: Tensor
    _narrow: bool
    _ready: torch.Event | None = None

    def finish(self) -> Tensor:
        """Wait for the result, from any thread."""
        if self._ready is not None:
            self._ready.synchronize()
        return _narrow_if_held(self._sums) if self._narrow else self._sums


def sketch(
    tensor: Tensor,
    *,
    global_shape: Sequence[int] | None = None,
    global_offset: Sequence[int] | None = None,
    keeps_nonfinite: bool = False,
) -> Tensor:
    """Sketch a tensor, or a shard as its part of the sketch of the whole.

    NaN and infinities count as 0 (`Statistics` counts them). Integers and bools are numbers; a
    complex number is two consecutive reals.

    Args:
        tensor: of any device, strides and numeric dtype.
        global_shape: the shape of the whole, if the tensor is a shard.
        global_offset: the offset of the shard in the whole.
        keeps_nonfinite: do not look for NaN and infinities: then their sums are not finite either.

    Returns:
        A 1-d tensor on the CPU: float32 if that holds all values of the dtype and the sums, else
        float64.

    Raises:
        UsageError: the tensor is not inside the whole, is sparse or quantized, or has a dtype that
            torch cannot convert.
    """
    pending = begin_sketch(
        tensor,
        global_shape=global_shape,
        global_offset=global_offset,
        keeps_nonfinite=keeps_nonfinite,
    )
    return pending.finish()


def begin_sketch(
    tensor: Tensor,
    *,
    global_shape: Sequence[int] | None = None,
    global_offset: Sequence[int] | None = None,
    keeps_nonfinite: bool = False,
) -> PendingSketch:
    """Start a sketch: immediately on the CPU, queued on a CUDA device.

    The work is queued on the device's current stream; later work on that stream may change the
    tensor. Arguments and errors are those of `sketch`.
    """
    tensor = tensor.detach()
    check_dtype(tensor.dtype)
    narrow = fits_float32(tensor.dtype)
    if global_shape is None and global_offset is None and has_flat_numpy_view(tensor):
        sums_of = _run_sums if keeps_nonfinite else _finite_sums
        return PendingSketch(
            torch.from_numpy(_plain_sums(tensor.view(-1).numpy(), sums_of)), narrow
        )
    shape = tuple(tensor.shape)
    full_shape = shape if global_shape is None else tuple(global_shape)
    origin = (0,) * len(full_shape) if global_offset is None else tuple(global_offset)
    if tensor.is_complex():
        shape, full_shape, origin = (*shape, 2), (*full_shape, 2), (*origin, 0)
    home = tensor.device if tensor.is_cuda else torch.device("cpu")
    sums = torch.zeros(buckets(math.prod(full_shape)), dtype=torch.float64, device=home)
    as_doubles = torch.Tensor.double if keeps_nonfinite else _finite_doubles
    _add_values(sums, tensor, ShardIndices(shape, full_shape, origin), as_doubles)
    if sums.is_cpu:
        return PendingSketch(sums, narrow)
    host = sums.to("cpu", non_blocking=True)
    ready = torch.Event(device=home)
    ready.record(torch.accelerator.current_stream(home))
    return PendingSketch(host, narrow, ready)


def buckets(numel: int) -> int:
    """The number of sums in a sketch of `numel` real values: a power of two from 16 to 1024."""
    return min(_MOST_BUCKETS, max(16, 1 << max(-(-numel // 4) - 1, 0).bit_length()))


def sketch_norm(sums: Tensor) -> float:
    """Estimate the norm of a tensor from its sketch."""
    wide = sums.double()
    scale = float(wide.abs().max()) or 1.0  # squares overflow before the norm does
    return scale * float(torch.linalg.vector_norm(wide / scale))


def sketch_distance(reference: Tensor, candidate: Tensor) -> float:
    """Estimate |reference - candidate| / |reference|, from the sketches of two tensors.

    Returns:
        0 if the sketches are equal; infinity if only the reference's is zero.

    Raises:
        UsageError: the lengths of the sketches differ.
    """
    _check_lengths([reference, candidate])
    difference = sketch_norm(reference.double() - candidate.double())
    size = sketch_norm(reference)
    return difference / size if size else math.inf if difference else 0.0


def add_sketches(sketches: Iterable[Tensor]) -> Tensor:
    """Add the sketches of the shards, or of the partial sums, of one tensor.

    Raises:
        UsageError: there are none, or their lengths differ.
    """
    parts = list(sketches)
    _check_lengths(parts)
    total = torch.stack([part.double() for part in parts]).sum(0)
    return _narrow_if_held(total) if all(part.dtype == torch.float32 for part in parts) else total


# --- adding ---------------------------------------------------------------------------------------


def _add_values(
    sums: Tensor,
    tensor: Tensor,
    shard_indices: ShardIndices,
    as_doubles: Callable[[Tensor], Tensor],
) -> None:
    """Add a tensor's values to the sums, all on the device of the sums."""
    long_run, add = (
        (_LONG_RUN, _add_run) if sums.is_cpu else (_LONG_RUN_ON_DEVICE, _add_run_on_device)
    )
    by_runs = shard_indices.run >= min(long_run, tensor.numel())
    for offset, values in _real_chunks(tensor):
        end = offset + values.numel()
        if by_runs:
            for begin, stop, index in shard_indices.runs(offset, end):
                add(sums, values[begin - offset : stop - offset], index, as_doubles)
        else:
            indices = shard_indices.indices(offset, end, values.device)
            signed = as_doubles(values) * signs(indices)
            sums.index_add_(0, indices & (sums.numel() - 1), signed)


def _real_chunks(tensor: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Flat chunks of real floats, in logical order, with the index of the first element."""
    size = _DEVICE_BLOCK if tensor.is_cuda else SIGN_BLOCK
    for offset, (piece,) in blocks(tensor, block_size=size):
        chunk = piece if piece.is_cuda else piece.cpu()
        real = torch.view_as_real(chunk).reshape(-1) if chunk.is_complex() else chunk
        if not (chunk.is_cuda and chunk.dtype in _NARROW):
            real = real.float() if fits_float32(tensor.dtype) else real.double()
        yield offset * (2 if chunk.is_complex() else 1), real


def _finite_doubles(values: Tensor) -> Tensor:
    """Float64 values without NaN and infinities, clamped to keep sums finite."""
    finite_values = values.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    return (
        finite_values.clamp(-_LARGEST, _LARGEST)
        if finite_values.dtype == torch.float64
        else finite_values.double()
    )


def _add_run_on_device(
    sums: Tensor, values: Tensor, start: int, as_doubles: Callable[[Tensor], Tensor]
) -> None:
    width, count = sums.numel(), values.numel()
    signed = as_doubles(values) * signs_from(start, count, values.device)
    ends = (start % width, -(start + count) % width)
    if any(ends):
        signed = torch.nn.functional.pad(signed, ends)
    sums += signed.view(-1, width).sum(0)


def _add_run(
    sums: Tensor, values: Tensor, start: int, as_doubles: Callable[[Tensor], Tensor]
) -> None:
    total = sums.numpy()
    sums_of = _finite_sums if as_doubles is _finite_doubles else _run_sums
    with np.errstate(invalid="ignore", over="ignore"):
        total += sums_of(values.numpy(), start, total.size)


def _plain_sums(flat: Array, sums_of: Callable[[Array, int, int], Array]) -> Array:
    """The sums of a whole tensor with few calls, which dominate the cost of small tensors."""
    width = buckets(flat.size)
    sums = np.zeros(width)
    with np.errstate(invalid="ignore", over="ignore"):
        for start in range(0, flat.size, SIGN_BLOCK):
            sums += sums_of(flat[start : start + SIGN_BLOCK], start, width)
    return sums


def _finite_sums(values: Array, start: int, width: int) -> Array:
    with np.errstate(invalid="ignore", over="ignore"):
        sums = _run_sums(values, start, width)
        if math.isfinite(sums.dot(sums)):
            return sums
        return _run_sums(_finite_doubles(torch.from_numpy(values)).numpy(), start, width)


def _run_sums(values: Array, start: int, width: int) -> Array:
    part = np.zeros(width)
    room = ROOM.of("signed", np.float64, SIGN_BLOCK)
    narrow_room = ROOM.of("signed", np.float32, SIGN_BLOCK)
    wide = values.dtype == np.float64
    table = sign_table(values.dtype)
    done = 0
    while done < values.size:
        block, within = divmod(start + done, SIGN_BLOCK)
        count = min(SIGN_BLOCK - within, values.size - done)
        first = first_sign(block) + within
        signed = (room if wide else narrow_room)[:count]
        np.multiply(values[done : done + count], table[first : first + count], out=signed)
        if not wide:  # A product with a sign is exact in float32, with half the memory traffic.
            np.copyto(room[:count], signed)
        _fold_into(part, room[:count], (start + done) % width)
        done += count
    return part


def _fold_into(sums: Array, signed: Array, first: int) -> None:
    """Add values to consecutive sums, cyclically, starting at `first`."""
    width = sums.size
    head = min(-first % width, signed.size)
    rows = (signed.size - head) // width
    tail = head + rows * width
    if head:
        sums[first : first + head] += signed[:head]
    if rows:
        sums += np.add.reduce(signed[head:tail].reshape(rows, width), axis=0)
    if tail < signed.size:
        sums[: signed.size - tail] += signed[tail:]


# --- results --------------------------------------------------------------------------------------


def _narrow_if_held(sums: Tensor) -> Tensor:
    """Convert to float32 if that does not overflow."""
    with np.errstate(over="ignore", invalid="ignore"):
        narrow = sums.numpy().astype(np.float32)
        # The sum of squares is the faster test, unless it overflows itself.
        fits = math.isfinite(narrow.dot(narrow)) or bool(np.isfinite(narrow).all())
    return torch.from_numpy(narrow) if fits else sums


def _check_lengths(sketches: Sequence[Tensor]) -> None:
    lengths = sorted({part.numel() for part in sketches})
    if len(lengths) != 1:
        lengths_shown = " and ".join(map(str, lengths)) or "none"
        raise UsageError(
            f"sketches must have one length, got {lengths_shown}: the tensors have different sizes"
        )
