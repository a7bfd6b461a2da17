"""What some kernels of torch's take for granted, looked at before they get values from a file.

They read saved statistics and indices without a look at their number or range: a program's own
always fit. Those of a damaged dump would be read, or written, beyond the end of memory.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    _Given = Mapping[str, Any]

__all__ = ["fits_kernel"]


def fits_kernel(name: str, given: Mapping[str, Any]) -> bool:
    """Whether an operator may be run on these arguments, which are named as in its schema."""
    check = _CHECKS.get(name)
    try:
        return check is None or check(given)
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ZeroDivisionError):
        return False  # not even the kinds of the arguments are right


def _layer_norm(given: _Given) -> bool:
    x, shape = given["input"], tuple(given["normalized_shape"])
    if x.shape[x.dim() - len(shape) :] != shape or given["grad_out"].shape != x.shape:
        return False
    rows = x.numel() // max(1, math.prod(shape))
    return _has(rows, given["mean"], given["rstd"]) and _is(shape, given["weight"], given["bias"])


def _group_norm(given: _Given) -> bool:
    x, n, c = given["input"], given["N"], given["C"]
    groups = given["group"]
    sizes_fit = x.numel() == n * c * given["HxW"] and groups > 0 and c % groups == 0
    same = given["grad_out"].shape == x.shape
    statistics = _has(n * groups, given["mean"], given["rstd"])
    return sizes_fit and same and statistics and _is((c,), given["weight"])


def _batch_norm(given: _Given) -> bool:
    x = given["input"]
    channels = x.shape[1]
    names = ("weight", "running_mean", "running_var", "save_mean", "save_invstd")
    present = [given[name] for name in names if given[name] is not None and given[name].numel()]
    needed = ("save_mean", "save_invstd") if given["train"] else ("running_mean", "running_var")
    complete = all(given[name] is not None and given[name].numel() for name in needed)
    return complete and given["grad_out"].shape == x.shape and _has(channels, *present)


def _loss(given: _Given) -> bool:
    x, target, weight = given["self"], given["target"], given["weight"]
    classes = x.shape[1 if x.dim() > 1 else 0]
    # One value a position: all but the axis of the classes.
    positions = x.numel() // max(1, classes)
    if target.numel() != positions or (weight is not None and weight.shape != (classes,)):
        return False
    wanted = target[target != given["ignore_index"]]
    each = given["reduction"] == 0
    sizes = _has(positions if each else 1, given["grad_output"]) and _has(1, given["total_weight"])
    return sizes and _within(wanted, classes)


def _embedding(given: _Given) -> bool:
    indices, grad = given["indices"], given["grad_output"]
    same = tuple(grad.shape[:-1]) == tuple(indices.shape)
    return same and _within(indices, given["num_weights"])


def _max_pool(axes: int) -> Callable[[_Given], bool]:
    def check(given: _Given) -> bool:
        x, indices = given["self"], given["indices"]
        same = indices.shape == given["grad_output"].shape
        same = same and indices.shape[:-axes] == x.shape[:-axes]
        return same and _within(indices, math.prod(x.shape[-axes:]))

    return check


def _attention(given: _Given) -> bool:
    query, key, value, out = (given[name] for name in ("query", "key", "value", "out"))
    four_axes = all(tensor.dim() == 4 for tensor in (query, key, value))  # noqa: PLR2004
    same = out.shape == given["grad_out"].shape == query.shape[:-1] + value.shape[-1:]
    rows = tuple(query.shape[:-1])
    alike = key.shape == value.shape and key.shape[0] == query.shape[0]
    heads = query.shape[1] == key.shape[1] and query.shape[-1] == key.shape[-1]
    return four_axes and same and alike and heads and tuple(given["logsumexp"].shape) == rows


def _has(count: int, *tensors: Any) -> bool:
    return all(isinstance(one, torch.Tensor) and one.numel() == count for one in tensors)


def _is(shape: tuple[int, ...], *tensors: Any) -> bool:
    return all(one is None or tuple(one.shape) == shape for one in tensors)


def _within(indices: Any, count: int) -> bool:
    if indices.dtype not in (torch.int64, torch.int32):
        return False
    return not indices.numel() or (int(indices.min()) >= 0 and int(indices.max()) < count)


_CHECKS: dict[str, Callable[[_Given], bool]] = {
    "native_layer_norm_backward": _layer_norm,
    "native_group_norm_backward": _group_norm,
    "native_batch_norm_backward": _batch_norm,
    "nll_loss_backward": _loss,
    "nll_loss2d_backward": _loss,
    "embedding_dense_backward": _embedding,
    "max_pool2d_with_indices_backward": _max_pool(2),
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention,
}
