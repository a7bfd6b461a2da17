"""What torch keeps inside tensors and modules: hooks, slots, the part on this rank, values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch

from paritas.errors import UnsupportedTorchError
from paritas.results.placements import REPLICATE, LocalPlacement, Partial, Shard, role_word

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import Tensor, nn

    from paritas.results.placements import Reduction


# --- Hooks on gradients ---------------------------------------------------------------------------

# The node that it puts in place of the graph.
ONCE_DIFFERENTIABLE = "torch::autograd::Error"


def gradient_hooks(tensor: Tensor) -> tuple[Callable[..., Any], ...]:
    """What `register_hook` was given: may replace the gradient on its way."""
    return _registered_hooks(tensor, "_backward_hooks")


def accumulation_hooks(tensor: Tensor) -> tuple[Callable[..., Any], ...]:
    """What `register_post_accumulate_grad_hook` was given; `torch.autograd.grad` passes it by."""
    return _registered_hooks(tensor, "_post_accumulate_grad_hooks")


def copy_hooks(source: Tensor, target: Tensor) -> None:
    """Let the hooks of one leaf stand on another as well."""
    for hook in gradient_hooks(source):
        target.register_hook(hook)
    for hook in accumulation_hooks(source):
        target.register_post_accumulate_grad_hook(hook)


def refuse_once_differentiable(tensors: Iterable[Tensor]) -> None:
    """Raise what `@once_differentiable` raises, where a gradient in `tensors` bears that mark.

    Its node leads nowhere. `.backward()` comes by and raises; `torch.autograd.grad`, which goes
    only where its inputs are, leaves that part out without a word.
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
        message = f"a tensor no longer has {place}: its hooks cannot be seen"
        raise UnsupportedTorchError(message) from None
    return tuple(hooks.values()) if hooks else ()


# --- Where a module keeps its tensors -------------------------------------------------------------

# What every module has in its __dict__; the rest is the user's own.
INTERNALS = frozenset(vars(torch.nn.Module())) - {"training"}


def tensor_slots(module: nn.Module) -> tuple[dict[str, Tensor | None], dict[str, Tensor | None]]:
    """The module's own parameters and buffers by name, as the dicts it reads them from.

    Writing to these dicts puts another tensor into the module's place without registering it
    anew, so that hooks, tied weights and the order of parameters stay as they are. A scripted
    module keeps its tensors where no one can put others: its dicts are copies, to read from.
    """
    if isinstance(module, torch.jit.ScriptModule):
        own = module.named_parameters(recurse=False), module.named_buffers(recurse=False)
        return dict(own[0]), dict(own[1])
    return module._parameters, module._buffers  # type: ignore[return-value]


# --- The local part of a distributed tensor -------------------------------------------------------


class LocalPart(NamedTuple):
    """A local tensor as part of a distributed one.

    Attributes:
        local: what this rank holds.
        placement: what part of the whole that is.
    """

    local: Tensor
    placement: LocalPlacement


def local_part(tensor: Any) -> LocalPart | None:
    """The part of a distributed tensor that is here; None for any other tensor."""
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
        placements=tuple(_describe_placement(placement) for placement in tensor.placements),
        global_shape=tuple(tensor.shape),
        global_offset=tuple(offset),
    )
    # The tensor itself, without the collective that `to_local` may start.
    return LocalPart(tensor._local_tensor, placement)


_PLAIN_TYPES = {torch.Tensor, torch.nn.Parameter}


def _describe_placement(placement: Any) -> str:
    from torch.distributed.tensor import Partial as DTensorPartial

    if type(placement) is DTensorPartial:  # a subclass masks its values before it adds them up
        return role_word(Partial(cast("Reduction", placement.reduce_op)))
    if placement.is_shard():
        return role_word(Shard(placement.dim))
    return REPLICATE if placement.is_replicate() else str(placement)


# --- The values of sparse tensors -----------------------------------------------------------------

_BY_ROWS = {torch.sparse_csr, torch.sparse_bsr}
SPARSE_LAYOUTS = frozenset({torch.sparse_coo, torch.sparse_csc, torch.sparse_bsc, *_BY_ROWS})
# Elements. What is made dense only to be measured must not take the memory that was saved.
_MOST_DENSE_ELEMENTS = 1 << 26


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
    if not isinstance(value, torch.Tensor) or value.layout not in SPARSE_LAYOUTS:
        return value
    if value.numel() > _MOST_DENSE_ELEMENTS:
        raise MemoryError(f"a sparse tensor of {value.numel()} elements is not made dense")
    return value.to_dense()


# --- Many small tensors in one call ---------------------------------------------------------------

# A call of torch costs more than the arithmetic on a small tensor does. Its optimizers go over all
# parameters in one call, by functions that have no public name.


def figures_of_pairs(
    candidates: Sequence[Tensor], references: Sequence[Tensor], dtype: torch.dtype | None = None
) -> list[tuple[float, float, float]]:
    """Of each pair, the reference's norm, and norm and largest magnitude of the difference.

    Real tensors on the CPU, none empty, each pair of one dtype and shape; `dtype` is what norms are
    summed up in, if not in their own.
    """
    apart = torch._foreach_sub(list(candidates), list(references))
    sizes = torch._foreach_norm(list(references), 2, dtype)
    totals = torch._foreach_norm(apart, 2, dtype)
    # The norm of order infinity is ten times slower on the CPU.
    torch._foreach_abs_(apart)
    most = torch._foreach_max(apart)
    return [(float(a), float(b), float(c)) for a, b, c in zip(sizes, totals, most, strict=True)]
