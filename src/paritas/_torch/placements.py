"""Distributed tensors: the local part, and where in the whole it lies."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Part", "local_part"]


@dataclasses.dataclass(frozen=True)
class Part:
    """A local tensor as part of a distributed one.

    Attributes:
        local: what this rank holds.
        mesh: extent of the mesh along each dimension.
        mesh_names: the names of those dimensions, or empty.
        coordinate: where on the mesh this rank is.
        placements: per mesh dimension `shard(0)`, `replicate`, `partial(sum)`.
        global_shape: shape of the whole.
        global_offset: where in the whole the local part begins.
    """

    local: Tensor
    mesh: tuple[int, ...]
    mesh_names: tuple[str, ...]
    coordinate: tuple[int, ...]
    placements: tuple[str, ...]
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]


def local_part(tensor: Any) -> Part | None:
    """The part of a distributed tensor that is here; None for any other tensor."""
    if type(tensor) in _PLAIN or not torch.distributed.is_available():
        return None
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if not isinstance(tensor, DTensor):
        return None
    mesh = tensor.device_mesh
    _, offset = compute_local_shape_and_global_offset(tensor.shape, mesh, tensor.placements)
    return Part(
        local=tensor._local_tensor,  # without the collective that `to_local` may start
        mesh=tuple(mesh.shape),
        mesh_names=tuple(mesh.mesh_dim_names or ()),
        coordinate=tuple(mesh.get_coordinate() or ()),
        placements=tuple(_described(placement) for placement in tensor.placements),
        global_shape=tuple(tensor.shape),
        global_offset=tuple(offset),
    )


_PLAIN = {torch.Tensor, torch.nn.Parameter}


def _described(placement: Any) -> str:
    from torch.distributed.tensor import Partial

    if type(placement) is Partial:  # a subclass masks its values before it adds them up
        return f"partial({placement.reduce_op})"
    if placement.is_shard():
        return f"shard({placement.dim})"
    return "replicate" if placement.is_replicate() else str(placement)
