"""Matrix products and convolutions: in parts, in another order, over ranks, by other means."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from benchmarks.detection.benign_kinds import Rewrite, always, if_narrow, narrow, shape_of, wide
from torch import Tensor
from torch.nn import functional as F

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.fx import Node

aten = torch.ops.aten
PRODUCTS = (aten.mm.default, aten.bmm.default)

SPLIT_K = Rewrite("split_k", "a product in parts along the inner axis, added up in float32")
ROW_PARALLEL = Rewrite("row_parallel", "the inner axis over ranks, partial results all-reduced")
COLUMN_PARALLEL = Rewrite("column_parallel", "output columns over ranks, gathered")
BATCH_SPLIT = Rewrite("batch_split", "rows in two batches, concatenated")
PERMUTED_K = Rewrite("permuted_k", "the inner axis in another order")
WIDE = Rewrite("wide_accumulation", "in float32, with one rounding at the end")
TRANSPOSED = Rewrite("transposed_product", "as the transpose of the product of transposes")
BY_SUMS = Rewrite("product_by_sums", "a product as multiplications and sums")
BIAS_AFTER = Rewrite("bias_after", "the bias added after the product, not within it")
OTHER_LAYOUT = Rewrite("other_layout", "operands in another memory layout")
UNFOLDED = Rewrite("unfolded_convolution", "a convolution as a product of unfolded windows")
ACCUMULATED = Rewrite("accumulated_gradient", "a weight's gradient added up over two batches")

CONTRACTIONS = (
    SPLIT_K,
    ROW_PARALLEL,
    COLUMN_PARALLEL,
    BATCH_SPLIT,
    PERMUTED_K,
    WIDE,
    TRANSPOSED,
    BY_SUMS,
    BIAS_AFTER,
    OTHER_LAYOUT,
    UNFOLDED,
    ACCUMULATED,
)


def _inner(node: Node) -> int:
    """How long the inner axis of a product is."""
    return shape_of(node.args[1] if node.target is aten.addmm.default else node.args[0])[-1]


def _parts(node: Node) -> dict[str, dict[str, Any]]:
    return {str(n): {"parts": n} for n in (2, 4, 8) if _inner(node) >= 2 * n}


def _ranks(node: Node) -> dict[str, dict[str, Any]]:
    return {str(n): {"ranks": n} for n in (2, 4) if _inner(node) >= 2 * n}


def _long(node: Node) -> dict[str, dict[str, Any]]:
    return always(node) if _inner(node) > 2 else {}


def split_k(a: Tensor, b: Tensor, parts: int) -> Tensor:
    pieces = zip(wide(a).chunk(parts, -1), wide(b).chunk(parts, -2), strict=True)
    total = None
    for left, right in pieces:
        total = left @ right if total is None else total + left @ right
    return narrow(total, a)


def row_parallel(a: Tensor, b: Tensor, ranks: int) -> Tensor:
    pieces = zip(a.chunk(ranks, -1), b.chunk(ranks, -2), strict=True)
    partial = [left @ right for left, right in pieces]
    # A ring adds one rank after the other, in the dtype that travels.
    total = partial[0]
    for one in partial[1:]:
        total = total + one
    return total


def column_parallel(a: Tensor, b: Tensor, ranks: int = 2) -> Tensor:
    return torch.cat([a @ part for part in b.chunk(ranks, -1)], -1)


def batch_split(a: Tensor, b: Tensor) -> Tensor:
    return torch.cat([part @ b for part in a.chunk(2, -2)], -2)


def permuted_k(a: Tensor, b: Tensor, stride: int = 3) -> Tensor:
    size = a.shape[-1]
    order = [i for start in range(stride) for i in range(start, size, stride)][::-1]
    places = torch.tensor(order, device=a.device)
    return a.index_select(-1, places) @ b.index_select(-2, places)


def wide_product(a: Tensor, b: Tensor) -> Tensor:
    return narrow(wide(a) @ wide(b), a)


def transposed_product(a: Tensor, b: Tensor) -> Tensor:
    return (b.mT @ a.mT).mT.contiguous()


def product_by_sums(a: Tensor, b: Tensor) -> Tensor:
    return narrow((wide(a)[..., :, :, None] * wide(b)[..., None, :, :]).sum(-2), a)


def other_layout(a: Tensor, b: Tensor) -> Tensor:
    return a.mT.contiguous().mT @ b.mT.contiguous().mT


def _with_bias(product: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The same for `addmm`: the bias joins before the one rounding at the end."""

    def biased(
        bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1, **told: Any
    ) -> Tensor:
        found = product(wide(a), wide(b), **told)
        return narrow(wide(bias) * beta + found * alpha, a)

    biased.__name__ = biased.__qualname__ = f"biased_{product.__name__}"
    return biased


for _kind, _function, _settings in (
    (SPLIT_K, split_k, _parts),
    (PERMUTED_K, permuted_k, _long),
    (TRANSPOSED, transposed_product, always),
    (BY_SUMS, product_by_sums, always),
    (BATCH_SPLIT, batch_split, always),
    (COLUMN_PARALLEL, column_parallel, always),
    (OTHER_LAYOUT, other_layout, always),
    (WIDE, wide_product, if_narrow),
):
    _kind.of(*PRODUCTS, settings=_settings)(_function)
    _kind.of(aten.addmm.default, settings=_settings)(_with_bias(_function))
ROW_PARALLEL.of(*PRODUCTS, settings=_ranks)(row_parallel)


@ROW_PARALLEL.of(aten.addmm.default, settings=_ranks)
def biased_row_parallel(bias: Tensor, a: Tensor, b: Tensor, *, ranks: int, beta=1, alpha=1):
    return bias * beta + row_parallel(a, b, ranks) * alpha


@BIAS_AFTER.of(aten.addmm.default)
def bias_after(bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1):
    return bias * beta + (a @ b) * alpha


def _plain(node: Node) -> dict[str, dict[str, Any]]:
    transposed = node.args[6]
    return {} if transposed else {"": {}}


def _plain_2d(node: Node) -> dict[str, dict[str, Any]]:
    return _plain(node) if len(shape_of(node.args[0])) == 4 else {}


def _one_group(node: Node) -> dict[str, dict[str, Any]]:
    channels, groups = shape_of(node.args[0])[1], node.args[8]
    return _plain(node) if groups == 1 and channels > 1 else {}


@BATCH_SPLIT.of(aten.convolution.default)
def convolve_batches(x: Tensor, *rest: Any) -> Tensor:
    return torch.cat([aten.convolution.default(part, *rest) for part in x.chunk(2)])


@COLUMN_PARALLEL.of(aten.convolution.default, settings=_one_group)
def convolve_outputs(x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
    many = -(-weight.shape[0] // 2)
    biases = [None] * 2 if bias is None else bias.split(many)
    parts = zip(weight.split(many), biases, strict=False)
    return torch.cat([aten.convolution.default(x, w, b, *rest) for w, b in parts], 1)


@SPLIT_K.of(aten.convolution.default, settings=_one_group)
def convolve_parts(x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
    pairs = zip(wide(x).chunk(2, 1), wide(weight).chunk(2, 1), strict=True)
    first, second = (aten.convolution.default(a, w, None, *rest) for a, w in pairs)
    total = first + second
    if bias is not None:
        total = total + wide(bias).view(-1, *[1] * (x.dim() - 2))
    return narrow(total, x)


@WIDE.of(aten.convolution.default, settings=if_narrow)
def convolve_wide(x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
    bias = None if bias is None else wide(bias)
    return narrow(aten.convolution.default(wide(x), wide(weight), bias, *rest), x)


@OTHER_LAYOUT.of(aten.convolution.default, settings=_plain_2d)
def convolve_channels_last(x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
    last = torch.channels_last
    x, weight = x.contiguous(memory_format=last), weight.contiguous(memory_format=last)
    return aten.convolution.default(x, weight, bias, *rest).contiguous()


@UNFOLDED.of(aten.convolution.default, settings=_plain_2d)
def convolve_unfolded(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride, padding, dilation, *rest: Any
) -> Tensor:
    groups, kernel = rest[-1], weight.shape[2:]
    spans = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
    sides = zip(x.shape[2:], padding, spans, stride, strict=True)
    out = [(side + 2 * pad - span) // step + 1 for side, pad, span, step in sides]
    windows = F.unfold(wide(x), kernel, dilation, padding, stride)
    windows = windows.view(x.shape[0], groups, -1, windows.shape[-1])
    found = wide(weight).view(groups, weight.shape[0] // groups, -1) @ windows
    found = found.reshape(x.shape[0], -1, *out)
    return narrow(found if bias is None else found + wide(bias).view(-1, 1, 1), x)


@ACCUMULATED.of(aten.convolution_backward.default)
def gradients_in_batches(grad: Tensor, x: Tensor, weight: Tensor, *rest: Any) -> tuple[Any, ...]:
    pairs = zip(grad.chunk(2), x.chunk(2), strict=True)
    (dx1, dw1, db1), (dx2, dw2, db2) = (
        aten.convolution_backward.default(g, part, weight, *rest) for g, part in pairs
    )
    both = [None if a is None else a + b for a, b in ((dw1, dw2), (db1, db2))]
    return (None if dx1 is None else torch.cat([dx1, dx2]), *both)


@WIDE.of(aten.convolution_backward.default, settings=if_narrow)
def gradients_wide(grad: Tensor, x: Tensor, weight: Tensor, *rest: Any) -> tuple[Any, ...]:
    found = aten.convolution_backward.default(wide(grad), wide(x), wide(weight), *rest)
    return tuple(None if one is None else narrow(one, x) for one in found)


@OTHER_LAYOUT.of(aten.convolution_backward.default)
def gradients_channels_last(grad: Tensor, x: Tensor, weight: Tensor, *rest: Any):
    given = (grad, x, weight)
    if x.dim() == 4:
        given = tuple(one.contiguous(memory_format=torch.channels_last) for one in given)
    found = aten.convolution_backward.default(*given, *rest)
    return tuple(None if one is None else one.contiguous() for one in found)
