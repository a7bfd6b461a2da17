"""Collectives over tensors of any dtype and of parts that differ in size."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["gather", "reduce"]

_OPERATIONS = {
    "sum": distributed.ReduceOp.SUM,
    "avg": distributed.ReduceOp.SUM,  # gloo has no average
    "max": distributed.ReduceOp.MAX,
    "min": distributed.ReduceOp.MIN,
    "product": distributed.ReduceOp.PRODUCT,
}


def gather(tensor: Tensor, dim: int, ranks: int) -> Tensor | None:
    """The parts of all ranks one after the other; None if they do not fit together."""
    held = _held(tensor, ranks)
    if not -tensor.dim() <= dim < tensor.dim():
        return None
    dim %= tensor.dim()
    rests = {(dtype, shape[:dim], shape[dim + 1 :]) for dtype, shape in held if len(shape) > dim}
    if len(rests) != 1 or any(len(shape) != tensor.dim() for _, shape in held):
        return None
    sizes = [shape[dim] for _, shape in held]
    # All ranks send as much as the largest has: an all-gather takes parts of one size.
    padded = tensor.new_zeros((*tensor.shape[:dim], max(sizes), *tensor.shape[dim + 1 :]))
    padded.narrow(dim, 0, tensor.shape[dim]).copy_(tensor)
    sent = _where_it_travels(_plain(padded))
    parts = [torch.empty_like(sent) for _ in range(ranks)]
    distributed.all_gather(parts, sent)
    whole = [
        _as_before(part, tensor).narrow(dim, 0, size)
        for part, size in zip(parts, sizes, strict=True)
    ]
    return torch.cat(whole, dim)


def reduce(tensor: Tensor, reduction: str, ranks: int) -> Tensor | None:
    """What the terms of all ranks come to; None if they do not fit together."""
    held = _held(tensor, ranks)
    if len(set(held)) != 1 or (tensor.is_complex() and reduction not in {"sum", "avg"}):
        return None
    small = not tensor.is_floating_point() and not tensor.is_complex()
    sent = tensor.to(torch.int64) if small else _plain(tensor.detach()).clone()
    sent = _where_it_travels(sent.contiguous())
    distributed.all_reduce(sent, op=_OPERATIONS[reduction])
    if small:
        return sent.to(tensor.dtype)
    found = _as_before(sent, tensor)
    return found / ranks if reduction == "avg" else found


def _held(tensor: Tensor, ranks: int) -> list[tuple[str, tuple[int, ...]]]:
    """The dtype and shape of what each rank holds."""
    told: list[Any] = [None] * ranks
    distributed.all_gather_object(told, (str(tensor.dtype), tuple(tensor.shape)))
    return told


def _where_it_travels(tensor: Tensor) -> Tensor:
    """NCCL sends from GPU to GPU, every other backend here from the host."""
    return tensor if "nccl" in distributed.get_backend() else tensor.cpu()


def _plain(tensor: Tensor) -> Tensor:
    """The same bits in a dtype that is sent."""
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj()).contiguous()
    if tensor.dtype is torch.bool:
        return tensor.to(torch.uint8)
    return tensor.contiguous()


def _as_before(sent: Tensor, tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        return torch.view_as_complex(sent)
    return sent.to(tensor.dtype)
