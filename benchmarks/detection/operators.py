"""Single operators, each with inputs that a seed draws; a gradient is asked for every float.

The arithmetic is here; what picks from tensors and what is special have files of their own.
"""

from __future__ import annotations

import functools
import random
from typing import TYPE_CHECKING

import torch
from benchmarks.detection.operators_picking import PICKING
from benchmarks.detection.operators_special import SPECIAL
from torch import Tensor
from torch.nn import functional as F

if TYPE_CHECKING:
    from collections.abc import Callable

_randn = torch.randn


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    later = torch.ones_like(q[0, 0, :, :1] * k[0, 0, :, 0]).triu(1) > 0
    scores = (q @ k.transpose(-2, -1)) / q.shape[-1] ** 0.5
    return scores.masked_fill(later, float("-inf")).softmax(-1) @ v


def _group_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.group_norm(x, 2, w, b)


def _batch_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.batch_norm(x, None, None, w, b, training=True)


def _layer_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], w, b)


def _rms_norm(x: Tensor, w: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * w


def _l2_normalise(x: Tensor) -> Tensor:
    return F.normalize(x, dim=-1)


def _swiglu(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    return F.silu(x @ w) * (x @ v)


def _bilinear_pool(x: Tensor, y: Tensor) -> Tensor:
    return torch.einsum("bi,bj->bij", x, y).flatten(1).logsumexp(-1)


# name -> (function, how the inputs are drawn from one size between 5 and 9)
ARITHMETIC: dict[str, tuple[Callable[..., Tensor], Callable[[int], list[Tensor]]]] = {
    "mm": (torch.mm, lambda n: [_randn(n, 40), _randn(40, n + 2)]),
    "mm_long": (torch.mm, lambda n: [_randn(4, 100 * n), _randn(100 * n, 5)]),
    "bmm": (torch.bmm, lambda n: [_randn(3, n, 16), _randn(3, 16, n)]),
    "addmm": (torch.addmm, lambda n: [_randn(n), _randn(6, 24), _randn(24, n)]),
    "linear": (F.linear, lambda n: [_randn(2, n, 20), _randn(12, 20), _randn(12)]),
    "outer": (torch.outer, lambda n: [_randn(n), _randn(n + 1)]),
    "einsum": (
        functools.partial(torch.einsum, "bij,bjk,kl->bil"),
        lambda n: [_randn(2, n, 6), _randn(2, 6, 7), _randn(7, 4)],
    ),
    "conv1d": (
        functools.partial(F.conv1d, padding=1),
        lambda n: [_randn(2, 4, n + 4), _randn(6, 4, 3), _randn(6)],
    ),
    "conv2d": (
        functools.partial(F.conv2d, padding=1),
        lambda n: [_randn(2, 4, n, n), _randn(6, 4, 3, 3), _randn(6)],
    ),
    "conv2d_strided": (
        functools.partial(F.conv2d, stride=2, dilation=2, padding=2),
        lambda n: [_randn(2, 3, n + 4, n + 4), _randn(4, 3, 3, 3)],
    ),
    "conv2d_depthwise": (
        functools.partial(F.conv2d, groups=4),
        lambda n: [_randn(2, 4, n, n), _randn(4, 1, 3, 3), _randn(4)],
    ),
    "conv_transpose": (
        functools.partial(F.conv_transpose2d, stride=2),
        lambda n: [_randn(2, 4, n, n), _randn(4, 3, 3, 3), _randn(3)],
    ),
    "layer_norm": (_layer_norm, lambda n: [_randn(n, 32), _randn(32), _randn(32)]),
    "rms_norm": (_rms_norm, lambda n: [_randn(n, 32), _randn(32)]),
    "group_norm": (_group_norm, lambda n: [_randn(2, 6, n, n), _randn(6), _randn(6)]),
    "batch_norm": (_batch_norm, lambda n: [_randn(6, 5, n), _randn(5), _randn(5)]),
    "l2_normalise": (_l2_normalise, lambda n: [_randn(n, 24)]),
    "softmax": (functools.partial(torch.softmax, dim=-1), lambda n: [3 * _randn(n, 19)]),
    "log_softmax": (functools.partial(torch.log_softmax, dim=-1), lambda n: [3 * _randn(n, 19)]),
    "logsumexp": (functools.partial(torch.logsumexp, dim=-1), lambda n: [3 * _randn(n, 19)]),
    "attention": (_attend, lambda n: [_randn(2, 2, n, 8) for _ in range(3)]),
    # On the device it is flash attention, where the dtype has that.
    "attention_fused": (
        functools.partial(F.scaled_dot_product_attention, is_causal=True),
        lambda n: [_randn(2, 2, n, 8) for _ in range(3)],
    ),
    "swiglu": (_swiglu, lambda n: [_randn(n, 16), _randn(16, 12), _randn(16, 12)]),
    "bilinear_pool": (_bilinear_pool, lambda n: [_randn(n, 5), _randn(n, 6)]),
    "avg_pool": (
        functools.partial(F.avg_pool2d, kernel_size=3, stride=2, padding=1),
        lambda n: [_randn(2, 3, n + 2, n + 2)],
    ),
    "max_pool": (
        functools.partial(F.max_pool2d, kernel_size=2),
        lambda n: [_randn(2, 3, n + 2, n + 2)],
    ),
    "upsample": (
        functools.partial(F.interpolate, scale_factor=2.0, mode="bilinear"),
        lambda n: [_randn(2, 3, n, n)],
    ),
    "sum": (functools.partial(torch.sum, dim=-1), lambda n: [_randn(n, 300)]),
    "mean": (functools.partial(torch.mean, dim=(0, 2)), lambda n: [_randn(n, 5, 30)]),
    "variance": (functools.partial(torch.var, dim=-1), lambda n: [_randn(n, 50) + 1]),
    "deviation": (functools.partial(torch.std, dim=0), lambda n: [_randn(30, n)]),
    "norm": (functools.partial(torch.linalg.vector_norm, dim=-1), lambda n: [_randn(n, 40)]),
    "product": (functools.partial(torch.prod, dim=-1), lambda n: [1 + 0.3 * _randn(n, 8)]),
    "cumsum": (functools.partial(torch.cumsum, dim=1), lambda n: [_randn(n, 40)]),
    "cumprod": (functools.partial(torch.cumprod, dim=1), lambda n: [1 + 0.2 * _randn(n, 12)]),
    "amax": (functools.partial(torch.amax, dim=-1), lambda n: [_randn(n, 17)]),
    "cross_entropy": (
        lambda x, y: F.cross_entropy(x, y.abs().softmax(-1)),
        lambda n: [_randn(n, 11), _randn(n, 11)],
    ),
    "mse_loss": (F.mse_loss, lambda n: [_randn(n, 9), _randn(n, 9)]),
    "huber_loss": (F.huber_loss, lambda n: [2 * _randn(n, 9), _randn(n, 9)]),
    "kl_loss": (
        lambda x, y: F.kl_div(x.log_softmax(-1), y.softmax(-1), reduction="batchmean"),
        lambda n: [_randn(n, 9), _randn(n, 9)],
    ),
}


def _maker(function: Callable[..., Tensor], draw: Callable[[int], list[Tensor]]):
    """Draws the inputs of one operator by seed."""

    def make(seed: int) -> tuple[Callable[..., Tensor], list[Tensor]]:
        size = random.Random(f"{seed} size").randint(5, 9)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            inputs = draw(size)
        return function, [value.requires_grad_(value.is_floating_point()) for value in inputs]

    return make


OPERATORS = {name: _maker(*entry) for name, entry in {**ARITHMETIC, **PICKING, **SPECIAL}.items()}
