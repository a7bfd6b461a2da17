"""Private parts of tensors and modules: hooks, slots, local shards, sparse values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch

from paritas.errors import UnsupportedTorchError
from paritas.results.items import REPLICATE, LocalPlacement, Partial, Shard, role_word

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import Tensor, nn

    from paritas.results.items import Reduction


# --- Hooks on gradients ---------------------------------------------------------------------------

# The autograd node that `@once_differentiable` puts in place of the graph.
ONCE_DIFFERENTIABLE = "torch::autograd::Error"


def gradient_hooks(tensor: Tensor) -> tuple[Callable[..., Any], ...]:
    """The hooks of `register_hook`, which may replace the gradient."""
    return _registered_hooks(tensor, "_backward_hooks")


def accumulation_hooks(tensor: Tensor) -> tuple[Callable[..., Any], ...]:
    """The hooks of `register_post_accumulate_grad_hook`; `torch.autograd.grad` ignores them."""
    return _registered_hooks(tensor, "_post_accumulate_grad_hooks")


def copy_hooks(source: Tensor, target: Tensor) -> None:
    """Register the hooks of one leaf on another."""
    for hook in gradient_hooks(source):
        target.register_hook(hook)
    for hook in accumulation_hooks(source):
        target.register_post_accumulate_grad_hook(hook)


def refuse_once_differentiable(tensors: Iterable[Tensor]) -> None:
    """Raise the error of `@once_differentiable` if the graph of `tensors` contains its node.

    Its node has no inputs. `.backward()` reaches it and raises; `torch.autograd.grad`, which only
    follows paths to its inputs, silently leaves that part out.
    """
    waiting = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        if node.name() == ONCE_DIFFERENTIABLE:
            message = "a backward function was marked with @once_differentiable"
            raise RuntimeError(message)
        following = {behind for behind, _ in node.next_functions if behind is not None} - seen
        seen |= following
        waiting += following


def _registered_hooks(tensor: Tensor, place: str) -> tuple[Callable[..., Any], ...]:
    try:
        hooks = getattr(tensor, place)
    except AttributeError:
        message = f"torch {torch.__version__}: tensors have no {place}, so hooks cannot be read"
        raise UnsupportedTorchError(message) from None
    return tuple(hooks.values()) if hooks else ()


# --- The tensors of a module ----------------------------------------------------------------------

# The entries in every module's __dict__; all others are the user's.
INTERNALS = frozenset(vars(torch.nn.Module())) - {"training"}


def tensor_slots(module: nn.Module) -> tuple[dict[str, Tensor | None], dict[str, Tensor | None]]:
    """The module's own parameters and buffers by name, as the dicts it reads them from.

    Writing to these dicts replaces a tensor of the module without registering it again: hooks, tied
    weights and the order of parameters stay the same. The tensors of a scripted module cannot be
    replaced: its dicts are copies, only for reading.
    """
    if isinstance(module, torch.jit.ScriptModule):
        own = module.named_parameters(recurse=False), module.named_buffers(recurse=False)
        return dict(own[0]), dict(own[1])
    return module._parameters, module._buffers  # type: ignore[return-value]


# --- The local part of a distributed tensor -------------------------------------------------------


class LocalPart(NamedTuple):
    """The tensor on this rank as part of a distributed one, and its placement."""

    local: Tensor
    placement: LocalPlacement


def local_part(tensor: Any) -> LocalPart | None:
    """The part of a distributed tensor on this rank; None for any other tensor."""
    if type(tensor) in _PLAIN_TYPES or not torch.distributed.is_available():
        return None
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if not isinstance(tensor, DTensor):
        return None
    mesh = tensor.device_mesh
    _, offset = compute_local_shape_and_global_offset(tensor.shape, mesh, tensor.placements)
    placement = LocalPlacement(
        mesh=tuple(mesh.shape),
        mesh_names=tuple(mesh.mesh_dim_names or ()),
        coordinate=tuple(mesh.get_coordinate() or ()),
        placements=tuple(_describe_placement(one, tensor.dim()) for one in tensor.placements),
        global_shape=tuple(tensor.shape),
        global_offset=tuple(offset),
    )
    # Read directly: `to_local` may start a collective.
    return LocalPart(tensor._local_tensor, placement)


_PLAIN_TYPES = {torch.Tensor, torch.nn.Parameter}


def _describe_placement(placement: Any, dimensions: int) -> str:
    from torch.distributed.tensor import Partial as DTensorPartial

    if type(placement) is DTensorPartial:  # a subclass masks its values before summing
        return role_word(Partial(cast("Reduction", placement.reduce_op)))
    # Some versions of torch call a shard of each of several pieces a shard, others do not.
    pieces = getattr(placement, "split_factor", None)
    if pieces is not None or placement.is_shard():
        dim = placement.dim % dimensions if dimensions else placement.dim
        return role_word(Shard(dim, pieces=pieces or 1))
    return REPLICATE if placement.is_replicate() else str(placement)


# --- The values of sparse tensors -----------------------------------------------------------------

_BY_ROWS = {torch.sparse_csr, torch.sparse_bsr}
SPARSE_LAYOUTS = frozenset({torch.sparse_coo, torch.sparse_csc, torch.sparse_bsc, *_BY_ROWS})
# Limit in elements: a dense copy for measuring must not use the memory that sparsity saves.
_MOST_DENSE_ELEMENTS = 1 << 26


def map_values(tensor: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """A sparse tensor with the same indices and mapped values."""
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
    """A sparse tensor as a dense one; anything else unchanged.

    Raises:
        MemoryError: the dense tensor would be too large.
    """
    if not isinstance(value, torch.Tensor) or value.layout not in SPARSE_LAYOUTS:
        return value
    if value.numel() > _MOST_DENSE_ELEMENTS:
        raise MemoryError(f"a sparse tensor of {value.numel()} elements is too large to make dense")
    return value.to_dense()


# --- Many small tensors in one call ---------------------------------------------------------------

# A call of torch costs more than the arithmetic on a small tensor. Torch's optimizers process all
# parameters in one call, with functions that have no public name.


def figures_of_pairs(
    candidates: Sequence[Tensor], references: Sequence[Tensor], dtype: torch.dtype | None = None
) -> list[tuple[float, float, float]]:
    """For each pair, the reference's norm, and the norm and largest magnitude of the difference.

    Takes real tensors on the CPU, none empty, each pair of one dtype and shape; `dtype` is that of
    the norms, by default the same as of the tensors.
    """
    differences = torch._foreach_sub(list(candidates), list(references))
    sizes = torch._foreach_norm(list(references), 2, dtype)
    totals = torch._foreach_norm(differences, 2, dtype)
    # The norm of order infinity is ten times slower on the CPU.
    torch._foreach_abs_(differences)
    most = torch._foreach_max(differences)
    return [(float(a), float(b), float(c)) for a, b, c in zip(sizes, totals, most, strict=True)]
