"""Single operators that take tensors apart, pick from them, order them, count whole numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

if TYPE_CHECKING:
    from collections.abc import Callable

_randn, _randint = torch.randn, torch.randint


def _top(x: Tensor) -> tuple[Tensor, Tensor]:
    values, places = x.topk(3, -1)
    return values, places


def _ordered(x: Tensor) -> tuple[Tensor, Tensor]:
    values, places = x.sort(dim=-1, descending=True)
    return values.cumsum(-1), places


def _best(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    scores = x @ y
    return scores.argmax(-1), scores.softmax(-1)


def _gathered(x: Tensor, place: Tensor) -> Tensor:
    return x.gather(1, place) * x.mean(1, keepdim=True)


def _scattered(x: Tensor, place: Tensor) -> Tensor:
    return torch.zeros_like(x[:4]).index_add(0, place % 4, x * x)


def _accumulated(x: Tensor, place: Tensor) -> Tensor:
    return x.scatter_add(1, place, x.sin())


def _windows(x: Tensor) -> Tensor:
    return (x.unfold(-1, 4, 2) * torch.arange(1, 5, device=x.device)).mean(-1)


def _shifted(x: Tensor, y: Tensor) -> Tensor:
    return torch.cat([x[:, 1:], y[:, :2]], 1) * y.roll(1, 1)[:, : x.shape[1] + 1]


def _looked_up(weight: Tensor, place: Tensor) -> Tensor:
    return F.embedding(place, weight).tanh().sum(1)


def _bagged(weight: Tensor, place: Tensor) -> Tensor:
    return F.embedding_bag(place, weight, mode="mean")


def _hashed(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    mixed = (x * 2654435761 + 12345) % 65521
    return mixed, (mixed % 97).to(scale.dtype) * scale


def _wrapped(x: Tensor, y: Tensor) -> Tensor:
    small = x.to(torch.int8) * y.to(torch.int8) + 7
    return small.to(torch.int32).cumsum(0)


def _counted(x: Tensor) -> Tensor:
    return (x[:, None] == torch.arange(6, device=x.device)).sum(0) // 2


def _written_over(x: Tensor, y: Tensor) -> Tensor:
    x = x * 2
    x[:, 1:3] = y[:, :2] * 3
    x[0] += y[1, :1]
    return x.mul_(y).relu_()


def _padded(x: Tensor) -> Tensor:
    return F.pad(x, (1, 2), value=0.5).flip(-1).repeat(1, 2)


def _triangles(x: Tensor) -> Tensor:
    return x.tril() @ x.triu(1) + torch.diag_embed(x.diagonal())


def _where(x: Tensor, y: Tensor) -> Tensor:
    return torch.where(x > y, x * y, y.clamp(-0.5, 0.5)).masked_fill(x < -1, 3.0)


PICKING: dict[str, tuple[Callable[..., object], Callable[[int], list[Tensor]]]] = {
    "topk": (_top, lambda n: [_randn(n, 13)]),
    "sort": (_ordered, lambda n: [_randn(n, 13)]),
    "argmax": (_best, lambda n: [_randn(n, 9), _randn(9, 7)]),
    "gather": (_gathered, lambda n: [_randn(n, 9), _randint(0, 9, (n, 4))]),
    "index_add": (_scattered, lambda n: [_randn(n + 6, 5), _randint(0, 99, (n + 6,))]),
    "scatter_add": (_accumulated, lambda n: [_randn(n, 6), _randint(0, 6, (n, 6))]),
    "windows": (_windows, lambda n: [_randn(n, 14)]),
    "shift": (_shifted, lambda n: [_randn(n, 8), _randn(n, 10)]),
    "embedding": (_looked_up, lambda n: [_randn(20, 6), _randint(0, 20, (n, 4))]),
    "embedding_bag": (_bagged, lambda n: [_randn(20, 6), _randint(0, 20, (n, 4))]),
    "integer_hash": (_hashed, lambda n: [_randint(-(1 << 40), 1 << 40, (n, 5)), _randn(5)]),
    "integer_wrap": (_wrapped, lambda n: [_randint(-128, 128, (n, 5)), _randint(-128, 128, (5,))]),
    "integer_count": (_counted, lambda n: [_randint(0, 6, (10 * n,))]),
    "in_place": (_written_over, lambda n: [_randn(n, 6), _randn(n, 6)]),
    "padding": (_padded, lambda n: [_randn(n, 6)]),
    "triangles": (_triangles, lambda n: [_randn(n, n)]),
    "where": (_where, lambda n: [_randn(n, 6), _randn(n, 6)]),
}
