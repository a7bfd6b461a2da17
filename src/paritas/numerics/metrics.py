"""Two tensors: are their bits the same, and if not, how far apart are the values?

Everything goes block by block: memory stays flat whatever the tensors' size and strides, and every
sum is taken in float64 whatever their dtype.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import msgspec
import torch
from torch import Tensor

from paritas.errors import UsageError
from paritas.numerics import device_pairs
from paritas.numerics.flattening import is_dense, same_parts
from paritas.numerics.moments import Totals
from paritas.numerics.ulps import first_unlike, same_bits, same_but_for_nans, ulp_distance

__all__ = ["Metrics", "bitwise_equal", "blocks", "pair_metrics", "promotable", "ulp_distance"]

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
_PLAIN = {Tensor, torch.nn.Parameter}


class Metrics(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a candidate tensor differs from its reference.

    Differences are taken over the positions where both are finite. A position where both are NaN,
    or both the same infinity, is left out. Where only one is, no number would be right, and the
    metrics fail closed: every difference is infinite, `cosine` and `pcc` are NaN.

    A complex element is one element, as large as its modulus; it is NaN or infinite if a component
    is, and the sums behind `cosine` and `pcc` take it for two reals.

    Attributes:
        numel: elements in each tensor.
        mismatched: elements with different values; NaN equals NaN and -0.0 equals +0.0.
        max_abs: largest absolute difference.
        max_abs_index: where that is: the first place of it; None if nothing differs.
        max_abs_reference: the reference there (a complex one's modulus).
        max_abs_candidate: the candidate there, likewise.
        max_rel: largest difference relative to the reference's element; infinite where that is 0.
        mean_abs: mean absolute difference.
        rmse: root mean square difference.
        rel_l2: norm of the difference over the norm of the reference.
        cosine: cosine of the angle between the two; NaN if just one of them is all zero.
        pcc: Pearson's correlation coefficient; NaN if one of them is constant.
        max_ulp: largest difference in steps of the dtype's grid; None unless both have the same
            real floating-point dtype.
        nan_reference: NaNs in the reference; the next seven count likewise.
        nonfinite_mismatches: positions where one is NaN or infinite and the other not the same.
    """

    numel: int
    mismatched: int
    max_abs: float
    max_abs_index: tuple[int, ...] | None
    max_abs_reference: float | None
    max_abs_candidate: float | None
    max_rel: float
    mean_abs: float
    rmse: float
    rel_l2: float
    cosine: float
    pcc: float
    max_ulp: float | None
    nan_reference: int
    nan_candidate: int
    posinf_reference: int
    posinf_candidate: int
    neginf_reference: int
    neginf_candidate: int
    zero_reference: int
    zero_candidate: int
    nonfinite_mismatches: int


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
        for offset, pieces in _pieces(views, block_size, 0)
    )


def _pieces(views: list[Tensor], size: int, offset: int) -> Iterator[tuple[int, list[Tensor]]]:
    """Cut along the first dimension or, where one row of it is too long, cut every row."""
    if not views[0].numel():
        return
    rows, row = len(views[0]), views[0][0].numel()
    if row > size:
        for index in range(rows):
            yield from _pieces([view[index] for view in views], size, offset + index * row)
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
        if not same_but_for_nans(flat_a[few], flat_b[few]):
            return False  # at the first difference
    if a.layout is torch.strided:
        # In the order of memory: a permuted tensor then goes as fast as a contiguous one.
        order = sorted(range(a.ndim), key=a.stride, reverse=True)
        a, b = a.permute(order), b.permute(order)
    if block_size is None and a.device.type != "cpu":
        block_size = _DEVICE_BITS_BLOCK
    pairs = blocks(a, b, block_size=block_size)
    return all(same_bits(x, y) or same_but_for_nans(x, y) for _, (x, y) in pairs)


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
    totals, scale = _on_device(reference, candidate, block_size), 1.0
    totals = totals or _walk(reference, candidate, block_size)
    moments = totals.moments
    if not totals.safe:
        scale = _power_of_two(reference, candidate, block_size)
        moments = _walk(reference, candidate, block_size, scale).moments
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


def _on_device(reference: Tensor, candidate: Tensor, block_size: int | None) -> Totals | None:
    """The totals of what a kernel of its own can measure; None of what it cannot."""
    if block_size is None and device_pairs.fits(reference, candidate):
        return device_pairs.begin_pair(reference, candidate).finish()
    return None


def _walk(
    reference: Tensor, candidate: Tensor, block_size: int | None, scale: float = 1.0
) -> Totals:
    totals = Totals(reference, candidate, scale=scale)
    for offset, pair in blocks(reference, candidate, block_size=block_size):
        totals.take(offset, *pair)
    return totals


def _power_of_two(reference: Tensor, candidate: Tensor, block_size: int | None) -> float:
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
