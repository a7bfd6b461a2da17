"""Functions that nnScaler's graphs call by name, for use without nnScaler.

They are written from the documentation, with its names and parameters. Functions without a tensor
input, and those that only mark a place in a graph, are not included. Its names are only here and in
the reader of its checkpoints (`graphs/checkpoints.py`, `graphs/checkpoint_records.py`).
"""

from __future__ import annotations

import contextlib
import functools
import operator
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed
from torch.nn import functional as F

from paritas.core.errors import UsageError
from paritas.core.importing import import_module
from paritas.core.operators.definitions import NNSCALER, NNSCALER_WRAPPED

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


__all__ = [
    "accum",
    "cat",
    "conv2d",
    "conv3d",
    "einsum",
    "embedding",
    "fullslice",
    "identity",
    "index_select",
    "layer_norm",
    "multiref",
    "nndropout",
    "select_scatter",
    "setitem",
    "stack",
    "to",
    "wrap_batchnorm2d_func",
    "wrap_instancenorm2d_func",
]

# What the names of nnScaler's functions begin with; graphs also write the first with its file.
NAMESPACE = "nnscaler."
_IN_FILE = f"{NNSCALER}function."
_PREFIXES = (_IN_FILE, NNSCALER, NNSCALER_WRAPPED)
# Rules about `x[a, b]` are about this function, which takes x, a, b.
SUBSCRIPT = f"{NNSCALER}fullslice"
# nnScaler's batch norm communicates only on CUDA, in groups that nnScaler has made; ours in any
# group.
_ALWAYS_OURS = ("wrap_batchnorm2d_func",)

_IMAGES = 4  # n c h w
_IMAGE = 3  # c h w

# A configuration may give these parameters by name.
# ruff: noqa: A002


# --- By name --------------------------------------------------------------------------------------


def is_nnscaler_function(name: str) -> bool:
    """Whether nnScaler has functions with names like this one."""
    return name.startswith((NNSCALER, NNSCALER_WRAPPED))


def find_function(name: str, what: str) -> Any:
    """The function of an installed nnScaler, or our implementation of its documentation.

    Args:
        what: what the user wrote, for messages.
    """
    module_name, _, last = name.rpartition(".")
    if last not in _ALWAYS_OURS:
        with contextlib.suppress(ImportError, AttributeError):
            return getattr(import_module(module_name), last)
    if last in __all__:
        return globals()[last]
    raise UsageError(
        f"{what}: nnscaler is not installed, and paritas implements only {', '.join(__all__)}; "
        "install nnscaler, or name a function of your own"
    )


def our_function(name: str) -> Callable[..., Any] | None:
    """Our implementation of a function of nnScaler; None for any other name."""
    for prefix in _PREFIXES:
        last = name.removeprefix(prefix)
        if last != name and last in __all__:
            return globals()[last]  # type: ignore[no-any-return]
    return None


def name_in_library(name: str) -> str:
    """The name under which the library has rules for a function of nnScaler."""
    return NNSCALER + name.removeprefix(_IN_FILE) if name.startswith(_IN_FILE) else name


def as_fullslice(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """`x, (a, b)` as `x, a, b`."""
    inside = args[1] if isinstance(args[1], tuple) else (args[1],)
    return args[0], *inside


# --- nnscaler.runtime.function --------------------------------------------------------------------


def identity(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself."""
    return tensor


def multiref(tensor: torch.Tensor, times: int) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """The tensor, repeated; a single one is not put into a tuple."""
    return tensor if times == 1 else (tensor,) * times


def to(tensor: torch.Tensor, dtype_or_device: torch.dtype | torch.device) -> torch.Tensor:
    """The tensor in another dtype or on another device."""
    return tensor.to(dtype_or_device)


def accum(*tensors: torch.Tensor) -> torch.Tensor:
    """The sum of tensors of the same shape."""
    return functools.reduce(operator.add, tensors)


def fullslice(input: torch.Tensor, *slicers: Any) -> torch.Tensor:
    """`input[slicers]`: slices, numbers, None for a new dimension, tensors of indices."""
    return input[slicers]


def conv2d(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: Any,
    padding: Sequence[int],
    dilation: Any,
    groups: int = 1,
) -> torch.Tensor:
    """A convolution with a padding for each side: top, bottom, left, right."""
    half = len(padding) // 2
    # torch.nn.functional.pad starts with the last dimension.
    padded = F.pad(input, [*padding[half:], *padding[:half]])
    return F.conv2d(padded, weight, bias, stride, 0, dilation, groups)


def conv3d(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: Any,
    padding: Sequence[int],
    dilation: Any,
    groups: int = 1,
) -> torch.Tensor:
    """A convolution with a padding for each of depth, height and width."""
    sides = [amount for amount in reversed(padding) for _ in range(2)]
    return F.conv3d(F.pad(input, sides), weight, bias, stride, 0, dilation, groups)


def embedding(
    input: torch.Tensor, weight: torch.Tensor, padding_idx: int | None, start: int, stop: int
) -> torch.Tensor:
    """Rows of a table with the vocabulary from `start` to `stop`; zeros for other ids.

    So the results of ranks that hold parts of the vocabulary sum to the whole. The padding id
    counts in the whole vocabulary.
    """
    ids = input.long()
    here = (ids >= start) & (ids < stop)
    local = torch.where(here, ids - start, 0)
    holds_padding = padding_idx is not None and start <= padding_idx < stop
    rows = F.embedding(local, weight, padding_idx - start if holds_padding else None)  # type: ignore[operator]
    return rows * here.unsqueeze(-1)


def layer_norm(
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    normalized_shape: Sequence[int],
    eps: float = 1e-05,
) -> torch.Tensor:
    """Layer norm, with its tensors first."""
    return F.layer_norm(input, list(normalized_shape), weight, bias, eps)


def select_scatter(input: torch.Tensor, src: torch.Tensor, dim: int, index: int) -> torch.Tensor:
    """The tensor with `src` at an index along a dimension."""
    return torch.select_scatter(input, src, dim, index)


def index_select(input: torch.Tensor, index: torch.Tensor, dim: int) -> torch.Tensor:
    """`torch.index_select`, with its tensors first."""
    return torch.index_select(input, dim, index)


def einsum(*operands: torch.Tensor, equation: str | None = None) -> torch.Tensor:
    """`torch.einsum`, with its tensors first."""
    return torch.einsum(equation, *operands)


def stack(*tensors: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """`torch.stack` of its arguments."""
    return torch.stack(tensors, dim)


def cat(*tensors: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """`torch.cat` of its arguments."""
    return torch.cat(tensors, dim)


def nndropout(input: torch.Tensor, p: float = 0.5, *, inplace: bool = False) -> torch.Tensor:
    """Dropout as in a module in training."""
    return F.dropout(input, p, training=True, inplace=inplace)


def setitem(target: Any, *index_and_value: Any) -> Any:
    """Set an item of the first argument to the last one, and return the first."""
    *index, value = index_and_value
    if not index:
        raise UsageError("setitem needs a target, an index and a value, but the index is missing")
    operator.setitem(target, index[0] if len(index) == 1 else tuple(index), value)
    return target


# --- nnscaler.graph.function.wrapnn ---------------------------------------------------------------


def wrap_batchnorm2d_func(  # noqa: PLR0913, PLR0917  (its parameters)
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    num_batches_tracked: torch.Tensor | None,
    momentum: float | None = 0.1,
    training: bool = True,  # noqa: FBT001, FBT002
    track_running_stats: bool = True,  # noqa: FBT001, FBT002
    eps: float = 1e-05,
    process_group: distributed.ProcessGroup | Sequence[int] | None = None,
) -> torch.Tensor:
    """`nn.BatchNorm2d` with these buffers, including the counter of batches.

    In training, the ranks of a group share their statistics. The group may be given by its ranks;
    outside of a distributed process they are ignored.
    """
    if input.dim() != _IMAGES:
        raise ValueError(
            f"batch norm needs an input of 4 dimensions, got shape {tuple(input.shape)}"
        )
    group = _group_of(process_group) if training else None
    tracks = training and track_running_stats
    factor = momentum or 0.0
    if tracks and num_batches_tracked is not None:
        num_batches_tracked.add_(1)
        if momentum is None:
            factor = 1.0 / float(num_batches_tracked)
    # Statistics that are not tracked must not change; in evaluation they are used.
    mean, variance = (running_mean, running_var) if tracks or not training else (None, None)
    of_the_batch = training or mean is None or variance is None
    if group is not None:
        return _norm_of_all_ranks(input, (weight, bias), (mean, variance), factor, eps, group)
    return F.batch_norm(input, mean, variance, weight, bias, of_the_batch, factor, eps)


def _group_of(
    process_group: distributed.ProcessGroup | Sequence[int] | None,
) -> distributed.ProcessGroup | None:
    if process_group is None or isinstance(process_group, distributed.ProcessGroup):
        return process_group
    if not distributed.is_initialized():
        return None
    if sorted(process_group) != list(range(distributed.get_world_size())):
        raise UsageError(
            f"process_group={process_group!r} does not name all {distributed.get_world_size()} "
            "ranks; pass a torch.distributed.ProcessGroup"
        )
    return distributed.group.WORLD


class _SumOverRanks(torch.autograd.Function):
    """The sum over all ranks, on each of them; the backward pass sums the gradients."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: distributed.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _sum_over_ranks(tensor, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _sum_over_ranks(gradient, ctx.group), None


def _sum_over_ranks(tensor: torch.Tensor, group: distributed.ProcessGroup) -> torch.Tensor:
    total = tensor.detach().clone(memory_format=torch.contiguous_format)
    distributed.all_reduce(total, group=group)
    return total


def _norm_of_all_ranks(
    images: torch.Tensor,
    affine: tuple[torch.Tensor | None, torch.Tensor | None],
    running: tuple[torch.Tensor | None, torch.Tensor | None],
    factor: float,
    eps: float,
    group: distributed.ProcessGroup,
) -> torch.Tensor:
    """Batch norm over the samples of all ranks: two all-reduces forward and two backward.

    Ranks may have different numbers of samples. Sums are computed in float64.
    """
    dims, shape = (0, 2, 3), (1, -1, 1, 1)
    wide = images.double()
    total = _sum_over_ranks(wide.new_tensor(float(images.numel() // images.shape[1])), group)
    if total <= 1:
        raise ValueError("batch norm in training needs more than one value for each channel")
    mean = _SumOverRanks.apply(wide.sum(dims), group) / total  # type: ignore[no-untyped-call]
    centred = wide - mean.view(shape)
    variance = _SumOverRanks.apply(centred.square().sum(dims), group) / total  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for buffer, now in zip(running, (mean, variance * total / (total - 1)), strict=True):
            if buffer is not None:
                buffer.copy_((1 - factor) * buffer + factor * now)
    normed: torch.Tensor = centred * (variance + eps).rsqrt().view(shape)
    weight, bias = affine
    if weight is not None:
        normed = normed * weight.view(shape)
    if bias is not None:
        normed = normed + bias.view(shape)
    return normed.to(images.dtype)


def wrap_instancenorm2d_func(  # noqa: PLR0913, PLR0917  (its parameters)
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    momentum: float = 0.1,
    eps: float = 1e-05,
    training: bool = True,  # noqa: FBT001, FBT002
    track_running_stats: bool = False,  # noqa: FBT001, FBT002
    num_features: int = 0,
    affine: bool = False,  # noqa: FBT001, FBT002
) -> torch.Tensor:
    """`nn.InstanceNorm2d` with these buffers, for a batch of images or a single one."""
    if input.dim() not in {_IMAGE, _IMAGES}:
        raise ValueError(f"instance norm needs 3 or 4 dimensions, got shape {tuple(input.shape)}")
    channels = input.shape[-3]
    if affine and channels != num_features:
        raise ValueError(f"num_features is {num_features}, but the input has {channels} channels")
    images = input if input.dim() == _IMAGES else input.unsqueeze(0)
    of_the_input = training or not track_running_stats
    normed = F.instance_norm(
        images, running_mean, running_var, weight, bias, of_the_input, momentum, eps
    )
    return normed if input.dim() == _IMAGES else normed.squeeze(0)
