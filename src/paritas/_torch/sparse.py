"""Sparse tensors below autograd: their values changed, or all of them at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

__all__ = ["SPARSE", "as_dense", "map_values"]

_BY_ROWS = {torch.sparse_csr, torch.sparse_bsr}
SPARSE = frozenset({torch.sparse_coo, torch.sparse_csc, torch.sparse_bsc, *_BY_ROWS})
# Elements. What is made dense only to be measured must not take the memory that was saved.
_MOST_DENSE = 1 << 26


def map_values(tensor: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """A tensor with the same places and other values."""
    if tensor.layout is torch.sparse_coo:
        return torch.sparse_coo_tensor(
            tensor._indices(),
            function(tensor._values()),
            tensor.shape,
            is_coalesced=tensor.is_coalesced(),
        )
    if tensor.layout in _BY_ROWS:
        places = tensor.crow_indices(), tensor.col_indices()
    else:
        places = tensor.ccol_indices(), tensor.row_indices()
    values = function(tensor.values())
    return torch.sparse_compressed_tensor(*places, values, tensor.shape, layout=tensor.layout)


def as_dense(value: Any) -> Any:
    """A sparse tensor with its zeros; anything else as it is.

    Raises:
        MemoryError: it is too large for that.
    """
    if not isinstance(value, torch.Tensor) or value.layout not in SPARSE:
        return value
    if value.numel() > _MOST_DENSE:
        raise MemoryError(f"a sparse tensor of {value.numel()} elements is not made dense")
    return value.to_dense()
