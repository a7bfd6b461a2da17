"""Private parts of tensors and modules, the memory they take, and copies that share it."""

from __future__ import annotations

import copy
import ctypes
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn

from paritas.core.errors import UnsupportedTorchError, chain_of_causes
from paritas.core.results.items import REPLICATE, LocalPlacement, Partial, Shard, role_word

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from paritas.core.results.items import Reduction


# --- Hooks on gradients ---------------------------------------------------------------------------

# The autograd node that `@once_differentiable` puts in place of the graph.
ONCE_DIFFERENTIABLE = "torch::autograd::Error"


def gradient_hooks(tensor: Tensor) -> tuple[Callable[..., Any], ...]:
    """The hooks of `register_hook`, which may replace the gradient."""
    return _registered_hooks(tensor, "_backward_hooks")


def accumulation_hooks(tensor: Tensor) -> tuple[Callable[..., Any], ...]:
    """The hooks of `register_post_accumulate_grad_hook`; `torch.autograd.grad` ignores them."""
    return _registered_hooks(tensor, "_post_accumulate_grad_hooks")


def hook_tables(tensor: Tensor) -> dict[str, dict[Any, Any]]:
    """The hooks of a leaf by their kind, as the dicts that torch calls them from."""
    places = ("_backward_hooks", "_post_accumulate_grad_hooks") if tensor.is_leaf else ()
    tables = {position: _hook_table(tensor, position) for position in places}
    return {position: table for position, table in tables.items() if table is not None}


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
    if any(node.name() == ONCE_DIFFERENTIABLE for node in _walk_graph(tensors)):
        raise RuntimeError("a backward function was marked with @once_differentiable")


def _walk_graph(tensors: Iterable[Tensor]) -> Iterator[Any]:
    """The nodes of the autograd graph behind some tensors, each once."""
    waiting = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    visited = set(waiting)
    while waiting:
        node = waiting.pop()
        yield node
        following = {behind for behind, _ in node.next_functions if behind is not None} - visited
        visited |= following
        waiting += following


# Functions with a backward of a user's, and those of compilers, by the module of their class.
_WITH_USERS_BACKWARD = "torch._library"
_COMPILED = ("torch._functorch", "torch._dynamo", "torch._inductor", "torch._higher_order_ops")


def has_own_backward(tensors: Iterable[Tensor]) -> bool:
    """Whether backward functions that are not torch's take part in the gradients of `tensors`.

    That is a `torch.autograd.Function`, a custom operator or a function in C++. If compiled code
    takes part too, it is False: most of it refuses to keep the graph for a second backward pass.
    """
    is_found = False
    for node in _walk_graph(tensors):
        # The class of a function's node knows the function.
        made_by = str(getattr(getattr(node, "_forward_cls", None), "__module__", ""))
        if made_by.startswith(_COMPILED):
            return False
        is_own = bool(made_by) and made_by.partition(".")[0] != "torch"
        is_found |= is_own or made_by.startswith(_WITH_USERS_BACKWARD) or "CppNode" in node.name()
    return is_found


def _registered_hooks(tensor: Tensor, position: str) -> tuple[Callable[..., Any], ...]:
    return tuple((_hook_table(tensor, position) or {}).values())


def _hook_table(tensor: Tensor, position: str) -> dict[Any, Any] | None:
    try:
        table: dict[Any, Any] | None = getattr(tensor, position)
    except AttributeError:
        message = f"torch {torch.__version__}: tensors have no {position}, so hooks cannot be read"
        raise UnsupportedTorchError(message) from None
    return table


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
        named = module.named_parameters(recurse=False), module.named_buffers(recurse=False)
        return dict(named[0]), dict(named[1])
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
        placements=tuple(
            _describe_placement(operand, tensor.dim()) for operand in tensor.placements
        ),
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


def lay_out_like(value: Any, like: Any) -> Any:
    """A value with the strides of another one, unless elements overlap there."""
    if not isinstance(value, Tensor) or not isinstance(like, Tensor):
        return value
    if value.layout is not torch.strided or like.layout is not torch.strided:
        return value
    if value.shape != like.shape or value.stride() == like.stride():
        return value
    if any(step == 0 for size, step in zip(like.shape, like.stride(), strict=True) if size > 1):
        return value
    result = torch.empty_strided(like.shape, like.stride(), dtype=value.dtype, device=value.device)
    return result.copy_(value)


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
) -> list[tuple[float, float, float, float]]:
    """For each pair, the reference's norm, and three figures of the difference.

    They are its norm, its largest magnitude, and the sum of |d| / (|d| + |r|) over the elements.
    Takes real tensors on the CPU, none empty, each pair of one dtype and shape; `dtype` is that of
    the norms, by default the same as of the tensors.
    """
    differences = torch._foreach_sub(list(candidates), list(references))
    sizes = torch._foreach_norm(list(references), 2, dtype)
    totals = torch._foreach_norm(differences, 2, dtype)
    # The norm of order infinity is ten times slower on the CPU.
    torch._foreach_abs_(differences)
    most = torch._foreach_max(differences)
    both = torch._foreach_abs(list(references))
    torch._foreach_add_(both, differences)
    torch._foreach_add_(both, torch.finfo(differences[0].dtype).tiny)  # 0 / 0 is 0 here
    torch._foreach_div_(differences, both)
    shares = torch._foreach_norm(differences, 1, dtype)
    rows = zip(sizes, totals, most, shares, strict=True)
    return [(float(a), float(b), float(c), float(d)) for a, b, c, d in rows]


# --- Memory: how much is free, errors that say there was not enough, and copies that share it -----

M = TypeVar("M", bound=nn.Module)

CONTAINER = Path("/sys/fs/cgroup")
_UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "bytes": 1}
# The words of torch's allocators: "Tried to allocate 2.00 GiB", "you tried to allocate 8 bytes".
_TRIED = re.compile(r"[Tt]ried to allocate ([0-9.]+) ?(B|KiB|MiB|GiB|bytes)")


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error, or one that caused it, says that memory ran out."""
    for cause in () if error is None else chain_of_causes(error, _cause_of):
        if isinstance(cause, torch.OutOfMemoryError | MemoryError):
            return True
        # The allocator of the CPU raises a plain RuntimeError.
        if isinstance(cause, RuntimeError) and "DefaultCPUAllocator: " in str(cause):
            return True
    return False


def bytes_asked(error: BaseException | None) -> int | None:
    """The size of the allocation that failed, if the error names it."""
    for cause in () if error is None else chain_of_causes(error, _cause_of):
        match = _TRIED.search(str(cause))
        if match is not None:
            return int(float(match[1]) * _UNITS[match[2]])
    return None


def _cause_of(error: BaseException) -> BaseException | None:
    """What caused an error; Inductor raises its own from nothing, with the cause inside."""
    inside = getattr(error, "inner_exception", None)
    return inside if isinstance(inside, BaseException) else error.__cause__


def free_bytes(device: torch.device) -> int | None:
    """The memory that new tensors can use on a device, or None if that is unknown."""
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(free + cached)
    return _available_on_host() if device.type == "cpu" else None


def _available_on_host() -> int | None:
    """What a process can still use: the kernel's estimate, within the limits set for it."""
    amounts = (_available(Path("/proc/meminfo")), _left_to_container(CONTAINER), _left_to_process())
    return min((remaining for remaining in amounts if remaining is not None), default=None)


def _available(table: Path) -> int | None:
    """What the kernel estimates to be available without swapping."""
    try:
        lines = table.read_text(encoding="ascii").splitlines()
    except OSError:  # not Linux
        return None
    sizes = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(sizes[0]) * 1024 if sizes else None


def _left_to_container(folder: Path) -> int | None:
    """What is left of the limit of the container (cgroup), if it has one."""
    try:
        most, used = (
            (folder / name).read_text("ascii") for name in ("memory.max", "memory.current")
        )
        lines = (folder / "memory.stat").read_text("ascii").splitlines()
        # Files in the cache count as used, and make room for anything else.
        cached = sum(int(line.split()[1]) for line in lines if line.startswith("inactive_file "))
        return max(0, int(most) - int(used) + cached)
    except (OSError, ValueError):  # not Linux, another version of cgroups, or "max": no limit
        return None


def _left_to_process() -> int | None:
    """What is left of the limit of the address space (`ulimit -v`), if there is one."""
    try:
        import resource

        most = resource.getrlimit(resource.RLIMIT_AS)[0]
        if most == resource.RLIM_INFINITY:
            return None
        pages = int(Path("/proc/self/statm").read_text("ascii").split()[0])
        return max(0, most - pages * resource.getpagesize())
    except (ImportError, OSError, ValueError):  # not Linux
        return None


# --- Copies that share memory until one of them is written to -------------------------------------


def copy_on_write(module: M) -> M:
    """A deep copy whose parameters take no memory until they, or the originals, change.

    Torch copies the memory when one side asks to write to it. A parameter for which it cannot do
    this is copied at once, and so is everything else.
    """
    lazy = ((id(parameter), _lazy_clone(parameter)) for parameter in module.parameters())
    memo: dict[int, Any] = {key: copied for key, copied in lazy if copied is not None}
    return copy.deepcopy(module, memo)


def hold_shared(module: nn.Module) -> list[Tensor]:
    """Further references to the memory that parameters share with their copies.

    Threads that write to copies must not give up the last two references at the same time: with
    torch 2.13 that damages the heap (seen: "malloc_consolidate(): unaligned fastbin chunk"), or a
    copy has wrong values. As long as one reference is held by none of them, no thread has the last.
    """
    clones = (_lazy_clone(parameter) for parameter in module.parameters() if is_shared(parameter))
    return [clone for clone in clones if clone is not None]


def is_shared(tensor: Tensor) -> bool:
    """Whether the memory of a tensor is copied before it is written to."""
    bindings: Any = torch._C
    return bool(bindings._is_cow_tensor(tensor))


def _lazy_clone(parameter: nn.Parameter) -> nn.Parameter | None:
    """A copy that shares memory; None if torch cannot share it, such as that of a NumPy array."""
    if type(parameter) is not nn.Parameter or parameter.layout != torch.strided:
        return None
    size = parameter.numel() * parameter.element_size()
    if parameter.is_meta or size != parameter.untyped_storage().nbytes():
        return None  # of a part, all of the memory would be copied
    try:
        clone = torch._lazy_clone(parameter.detach())
    except (AttributeError, RuntimeError):
        return None
    return nn.Parameter(clone, requires_grad=parameter.requires_grad)


def return_free_memory() -> None:
    """Give the system back what the C library keeps of freed memory, which is much after threads.

    Nothing happens where the C library is not glibc.
    """
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
