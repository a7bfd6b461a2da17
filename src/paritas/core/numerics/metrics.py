"""Compare two tensors: are their bits the same, and if not, how different are the values?"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paritas.core.numerics.bits import (
    as_words,
    first_unlike,
    is_in_order,
    is_nan,
    same_bits,
    same_except_nans,
    same_memory,
)
from paritas.core.numerics.block_sums import OutOfRangeError
from paritas.core.numerics.flat_blocks import blocks
from paritas.core.numerics.flattening import is_dense, same_parts
from paritas.core.numerics.pair_sums import PairSums, sums_by_torch
from paritas.core.numerics.pair_totals import PairWalk, is_ordinary, walk_pair
from paritas.core.results.items import Metrics  # noqa: TC001  (annotates a public function)

if TYPE_CHECKING:
    from collections.abc import Iterable

# --- The metrics of a pair ------------------------------------------------------------------------

_UNPROMOTED = {torch.uint16, torch.uint32, torch.uint64}
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
    return sum_pair(reference, candidate, block_size=block_size).metrics(reference.shape)


def sum_pair(reference: Tensor, candidate: Tensor, *, block_size: int | None = None) -> PairSums:
    """The sums from which `pair_metrics` follow: by numpy where it is faster, else by torch."""
    reference, candidate = promotable(reference.detach(), candidate.detach())
    numpy_is_slower = reference.numel() > _MANY and torch.get_num_threads() > _FEW_THREADS
    if is_ordinary(reference) and is_ordinary(candidate) and not numpy_is_slower:
        walk = PairWalk(reference, candidate, wide=True, block_size=block_size)
        with contextlib.suppress(OutOfRangeError):
            return walk_pair(reference, candidate, walk, softmax=False).sums()
    return sums_by_torch(reference, candidate, block_size)


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


# --- Equal bits -----------------------------------------------------------------------------------

# Elements compared at once on a device: a comparison of bits takes almost no memory.
_DEVICE_BITS_BLOCK = 1 << 25
# Subclasses (fake, distributed ...) are compared by their own operators.
_PLAIN = {Tensor, torch.nn.Parameter}


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
        unlike = first_unlike(flat_a, flat_b)
        if unlike is None:
            return True
        if not all(map(is_nan, unlike)):
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
