"""Sums, means, softmaxes and what counts up: in another order, in parts, by other formulas."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from benchmarks.detection.benign_kinds import (
    Rewrite,
    always,
    if_narrow,
    is_float,
    narrow,
    shape_of,
    wide,
)
from torch import Tensor

if TYPE_CHECKING:
    from torch.fx import Node

aten = torch.ops.aten
SUMS = (aten.sum.dim_IntList, aten.sum.default)
MEANS = (aten.mean.dim, aten.mean.default)
SOFTMAX, LOG_SOFTMAX = aten._softmax.default, aten._log_softmax.default  # noqa: SLF001
SOFTMAX_BACK = aten._softmax_backward_data.default  # noqa: SLF001
LOG_SOFTMAX_BACK = aten._log_softmax_backward_data.default  # noqa: SLF001
LOG2_E = math.log2(math.e)

REVERSED = Rewrite("reversed_reduction", "summed from the other end")
TREE = Rewrite("tree_reduction", "summed in pairs, float32 between")
IN_PARTS = Rewrite("split_reduction", "summed in parts, which are added up")
BY_ONES = Rewrite("sum_by_ones", "a sum as a product with ones")
WIDE_SUM = Rewrite("wide_reduction", "summed in float32, with one rounding at the end")
BY_RECIPROCAL = Rewrite("mean_by_reciprocal", "a mean as a sum times 1/n")
EXP2 = Rewrite("exp2_softmax", "a softmax of powers of two, in float32")
ONLINE = Rewrite("online_softmax", "a softmax in two blocks, rescaled to the larger maximum")
BY_LOGSUMEXP = Rewrite("softmax_by_logsumexp", "a softmax by the logarithm of the sum")
SOFTMAX_GRADIENT = Rewrite("softmax_gradient", "a softmax's gradient with its terms multiplied out")
TWO_PASS = Rewrite("two_pass_variance", "a variance from squared deviations, mean first")
MERGED = Rewrite("merged_variance", "a variance from those of two halves")
SCAN = Rewrite("blocked_scan", "running totals by blocks, then totals of blocks")

REDUCTIONS = (
    REVERSED,
    TREE,
    IN_PARTS,
    BY_ONES,
    WIDE_SUM,
    BY_RECIPROCAL,
    EXP2,
    ONLINE,
    BY_LOGSUMEXP,
    SOFTMAX_GRADIENT,
    TWO_PASS,
    MERGED,
    SCAN,
)


def _many(node: Node) -> dict[str, dict[str, Any]]:
    """Wherever more than two floats are added."""
    (x, *_), out = node.args, node.meta.get("val")
    if not (is_float(node) and is_float(x)):
        return {}
    return always(node) if math.prod(shape_of(x)) > 2 * out.numel() else {}


def _many_narrow(node: Node) -> dict[str, dict[str, Any]]:
    return _many(node) and if_narrow(node)


def _axes(x: Tensor, dims: Any) -> list[int]:
    return sorted(d % x.dim() for d in dims) if dims else list(range(x.dim()))


def _flat(x: Tensor, axes: list[int]) -> Tensor:
    """The axes to be summed, as one axis at the end."""
    return x.movedim(axes, list(range(-len(axes), 0))).flatten(-len(axes))


def _put_back(total: Tensor, x: Tensor, axes: list[int], keepdim: bool, dtype: Any) -> Tensor:  # noqa: FBT001
    if keepdim:
        total = total.reshape([1 if i in axes else n for i, n in enumerate(x.shape)])
    # A dtype asked for by name is what the program runs in; lifted, everything is float64 already.
    return total.to(dtype) if dtype and x.dtype != torch.float64 else narrow(total, x)


def _summing(kind: Rewrite, settings: Any = _many):
    """Register for sums and means how the last axis of a tensor is added up."""

    def register(add_up):
        def summed(x: Tensor, dims=None, keepdim=False, *, dtype=None, mean=False) -> Tensor:  # noqa: FBT002
            axes = _axes(x, dims)
            flat = _flat(wide(x), axes)
            total = add_up(flat)
            total = total / flat.shape[-1] if mean else total
            return _put_back(total, x, axes, keepdim, dtype)

        def averaged(x: Tensor, dims=None, keepdim=False, *, dtype=None) -> Tensor:  # noqa: FBT002
            return summed(x, dims, keepdim, dtype=dtype, mean=True)

        summed.__name__ = summed.__qualname__ = f"sum_{add_up.__name__}"
        averaged.__name__ = averaged.__qualname__ = f"mean_{add_up.__name__}"
        kind.of(*SUMS, settings=settings)(summed)
        kind.of(*MEANS, settings=settings)(averaged)
        return add_up

    return register


@_summing(REVERSED)
def from_the_end(x: Tensor) -> Tensor:
    return x.flip(-1).sum(-1)


@_summing(IN_PARTS)
def in_parts(x: Tensor) -> Tensor:
    return torch.stack([part.sum(-1) for part in x.chunk(3, -1)]).sum(0)


@_summing(BY_ONES)
def by_ones(x: Tensor) -> Tensor:
    return (x @ x.new_ones(x.shape[-1], 1)).squeeze(-1)


@_summing(WIDE_SUM, _many_narrow)
def at_once(x: Tensor) -> Tensor:
    return x.sum(-1)


@_summing(TREE)
def in_pairs(x: Tensor) -> Tensor:
    while x.shape[-1] > 1:
        if x.shape[-1] % 2:
            x = torch.cat([x, x.new_zeros(*x.shape[:-1], 1)], -1)
        x = x[..., ::2] + x[..., 1::2]
    return x.squeeze(-1)


@BY_RECIPROCAL.of(*MEANS)
def mean_by_reciprocal(x: Tensor, dims=None, keepdim=False, *, dtype=None) -> Tensor:  # noqa: FBT002
    axes = _axes(x, dims)
    many = math.prod(x.shape[i] for i in axes)
    total = wide(x).sum(axes, keepdim) * (1.0 / many)
    return _put_back(total, x, axes, False, dtype)


@EXP2.of(SOFTMAX)
def exp2_softmax(x: Tensor, dim: int, _: bool) -> Tensor:  # noqa: FBT001
    scaled = wide(x)
    powers = torch.exp2((scaled - scaled.amax(dim, keepdim=True)) * LOG2_E)
    return narrow(powers / powers.sum(dim, keepdim=True), x)


@ONLINE.of(SOFTMAX, settings=lambda node: always(node) if shape_of(node)[node.args[1]] > 2 else {})
def online_softmax(x: Tensor, dim: int, _: bool) -> Tensor:  # noqa: FBT001
    blocks = wide(x).chunk(2, dim)
    tops = [block.amax(dim, keepdim=True) for block in blocks]
    top = torch.maximum(*tops)
    # A block that is masked out whole has no maximum to subtract.
    tops = [torch.where(torch.isneginf(one), top, one) for one in tops]
    powers = [(block - one).exp() for block, one in zip(blocks, tops, strict=True)]
    scales = [(one - top).exp() for one in tops]
    pairs = list(zip(powers, scales, strict=True))
    total = sum(power.sum(dim, keepdim=True) * scale for power, scale in pairs)
    return narrow(torch.cat([power * (scale / total) for power, scale in pairs], dim), x)


@BY_LOGSUMEXP.of(SOFTMAX)
def softmax_by_logsumexp(x: Tensor, dim: int, _: bool) -> Tensor:  # noqa: FBT001
    return narrow(log_softmax_by_logsumexp(wide(x), dim, False).exp(), x)


@BY_LOGSUMEXP.of(LOG_SOFTMAX)
def log_softmax_by_logsumexp(x: Tensor, dim: int, _: bool) -> Tensor:  # noqa: FBT001
    centred = wide(x) - wide(x).amax(dim, keepdim=True)
    return narrow(centred - centred.logsumexp(dim, keepdim=True), x)


@EXP2.of(LOG_SOFTMAX)
def exp2_log_softmax(x: Tensor, dim: int, _: bool) -> Tensor:  # noqa: FBT001
    centred = wide(x) - wide(x).amax(dim, keepdim=True)
    powers = torch.exp2(centred * LOG2_E)
    return narrow(centred - powers.sum(dim, keepdim=True).log2() * math.log(2), x)


@EXP2.of(aten.logsumexp.default)
def exp2_logsumexp(x: Tensor, dims: list[int], keepdim: bool = False) -> Tensor:  # noqa: FBT001, FBT002
    top = wide(x).amax(dims, keepdim=True)
    total = torch.exp2((wide(x) - top) * LOG2_E).sum(dims, keepdim)
    return narrow(top.reshape(total.shape) + total.log2() * math.log(2), x)


@SOFTMAX_GRADIENT.of(SOFTMAX_BACK)
def softmax_gradient(grad: Tensor, out: Tensor, dim: int, _: torch.dtype) -> Tensor:
    weighted = wide(grad) * wide(out)
    return narrow(weighted - wide(out) * weighted.sum(dim, keepdim=True), grad)


@SOFTMAX_GRADIENT.of(LOG_SOFTMAX_BACK)
def log_softmax_gradient(grad: Tensor, out: Tensor, dim: int, _: torch.dtype) -> Tensor:
    total = wide(grad).sum(dim, keepdim=True)
    return narrow(wide(grad) - torch.exp2(wide(out) * LOG2_E) * total, grad)


def _variance_of(x: Tensor, dims: Any, correction: Any, keepdim: bool) -> Tensor:  # noqa: FBT001
    axes = _axes(x, dims)
    many = math.prod(x.shape[i] for i in axes)
    far = x - x.mean(axes, keepdim=True)
    return (far * far).sum(axes, keepdim) / (many - (1 if correction is None else correction))


@TWO_PASS.of(aten.var.correction)
def two_pass_variance(x: Tensor, dims=None, *, correction=None, keepdim=False) -> Tensor:
    return narrow(_variance_of(wide(x), dims, correction, keepdim), x)


@TWO_PASS.of(aten.std.correction)
def two_pass_deviation(x: Tensor, dims=None, *, correction=None, keepdim=False) -> Tensor:
    return narrow(_variance_of(wide(x), dims, correction, keepdim).sqrt(), x)


@MERGED.of(aten.var.correction)
def merged_variance(x: Tensor, dims=None, *, correction=None, keepdim=False) -> Tensor:
    axes = _axes(x, dims)
    flat = _flat(wide(x), axes)
    first, second = flat.chunk(2, -1)
    n, m = first.shape[-1], second.shape[-1]
    apart = first.mean(-1) - second.mean(-1)
    inside = sum((one - one.mean(-1, keepdim=True)).square().sum(-1) for one in (first, second))
    total = inside + apart.square() * (n * m / (n + m))
    total = total / (n + m - (1 if correction is None else correction))
    return _put_back(total, x, axes, keepdim, None)


@SCAN.of(aten.cumsum.default, settings=lambda node: always(node) if is_float(node) else {})
def blocked_scan(x: Tensor, dim: int) -> Tensor:
    total, blocks = None, []
    for block in wide(x).split(4, dim):
        inside = block.cumsum(dim)
        blocks.append(inside if total is None else inside + total)
        total = blocks[-1].narrow(dim, -1, 1)
    return narrow(torch.cat(blocks, dim), x)


@IN_PARTS.of(aten.linalg_vector_norm.default)
def norm_in_parts(x: Tensor, order: float = 2, dims=None, keepdim=False) -> Tensor:  # noqa: FBT002
    axes = _axes(x, dims)
    assert order == 2, order
    return _put_back(in_parts(_flat(wide(x).square(), axes)).sqrt(), x, axes, keepdim, None)
