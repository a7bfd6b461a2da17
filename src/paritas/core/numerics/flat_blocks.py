"""Tensors of one shape read together, in row-major order, in flat blocks of bounded size."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from paritas.core.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

# Elements per block. On the CPU the intermediate results of a block should stay in the caches: that
# is twice as fast as a block of a million. On a GPU (measured on an H200) a block must outweigh its
# launches; metrics then take about 50 bytes per element, a comparison of bits almost none.
_CPU_BLOCK = 1 << 17  # per torch thread
_MOST_CPU_BLOCK = 1 << 20
_DEVICE_BLOCK = 1 << 22
_NO_FLOAT64 = {"mps"}


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
