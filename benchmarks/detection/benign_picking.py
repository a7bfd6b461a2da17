"""Looking up, scattering, pooling and ordering by other means."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from benchmarks.detection.benign_kinds import Rewrite, always, is_float, narrow, wide
from torch import Tensor

if TYPE_CHECKING:
    from torch.fx import Node

aten = torch.ops.aten

ONE_HOT = Rewrite("lookup_by_one_hot", "an embedding as a product with one-hot rows")
LOOKUP_GRADIENT = Rewrite("lookup_gradient", "an embedding's gradient as a product")
SCATTERED = Rewrite("scatter_from_the_end", "additions to the same place in the other order")
BY_SORTING = Rewrite("topk_by_sorting", "the largest by sorting all")
POOLED = Rewrite("pool_by_windows", "an average pool as means over unfolded windows")
JOINED = Rewrite("join_by_copies", "a concatenation as copies into one tensor")

PICKING = (ONE_HOT, LOOKUP_GRADIENT, SCATTERED, BY_SORTING, POOLED, JOINED)


def _one_hot(places: Tensor, many: int, like: Tensor) -> Tensor:
    return (places.reshape(-1, 1) == torch.arange(many, device=places.device)).to(like.dtype)


@ONE_HOT.of(aten.embedding.default)
def lookup_by_one_hot(weight: Tensor, places: Tensor, *_: Any) -> Tensor:
    found = _one_hot(places, weight.shape[0], weight) @ weight
    return found.view(*places.shape, weight.shape[1])


@LOOKUP_GRADIENT.of(aten.embedding_dense_backward.default)
def lookup_gradient(grad: Tensor, places: Tensor, many: int, *_: Any) -> Tensor:
    above = wide(grad).reshape(-1, grad.shape[-1])
    return narrow(_one_hot(places, many, above).t() @ above, grad)


@SCATTERED.of(aten.index_add.default)
def index_add_reversed(x: Tensor, dim: int, places: Tensor, source: Tensor) -> Tensor:
    return x.index_add(dim, places.flip(0), source.flip(dim))


@SCATTERED.of(aten.scatter_add.default)
def scatter_add_reversed(x: Tensor, dim: int, places: Tensor, source: Tensor) -> Tensor:
    # Only as much of the source is read as there are places.
    source = source[tuple(slice(n) for n in places.shape)]
    return x.scatter_add(dim, places.flip(dim), source.flip(dim))


def _accumulating(node: Node) -> dict[str, dict[str, Any]]:
    flat = len(node.args[1]) == 1 and len(node.args) > 3 and node.args[3] is True
    return always(node) if flat and is_float(node) else {}


@SCATTERED.of(aten.index_put.default, settings=_accumulating)
def index_put_as_add(x: Tensor, places: list[Tensor], source: Tensor, _: bool) -> Tensor:  # noqa: FBT001
    flat = source.reshape(-1, *x.shape[1:])
    return narrow(wide(x).index_add(0, places[0].flatten().flip(0), wide(flat).flip(0)), x)


def _largest(node: Node) -> dict[str, dict[str, Any]]:
    return always(node) if len(node.args) < 4 else {}


@BY_SORTING.of(aten.topk.default, settings=_largest)
def topk_by_sorting(x: Tensor, many: int, dim: int = -1) -> tuple[Tensor, Tensor]:
    values, places = x.sort(dim=dim, descending=True, stable=True)
    return values.narrow(dim, 0, many).contiguous(), places.narrow(dim, 0, many).contiguous()


@POOLED.of(aten.avg_pool2d.default)
def pool_by_windows(x: Tensor, kernel, stride=(), padding=(0, 0)) -> Tensor:
    padding = list(padding) if len(padding) == 2 else [*padding, *padding]
    padded = torch.nn.functional.pad(wide(x), [padding[1]] * 2 + [padding[0]] * 2)
    (high, across), steps = kernel, list(stride) or list(kernel)
    windows = padded.unfold(2, high, steps[0]).unfold(3, across, steps[-1])
    return narrow(windows.sum((-2, -1)) * (1 / (high * across)), x).contiguous()


@JOINED.of(aten.cat.default)
def join_by_copies(parts: list[Tensor], dim: int = 0) -> Tensor:
    sizes = list(parts[0].shape)
    sizes[dim] = sum(part.shape[dim] for part in parts)
    joined, start = parts[0].new_empty(sizes), 0
    for part in parts:
        joined.narrow(dim, start, part.shape[dim]).copy_(part)
        start += part.shape[dim]
    return joined
