"""Single operators that bend, and inputs out of the ordinary: huge, tiny, far off, not finite."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

if TYPE_CHECKING:
    from collections.abc import Callable

_randn = torch.randn


def _dropped(x: Tensor, w: Tensor, kept: Tensor) -> Tensor:
    return (x * kept.to(x.dtype) / 0.75) @ w


def _drops(x: Tensor, w: Tensor) -> Tensor:
    return F.dropout(x, 0.25) @ w


def _holes(n: int) -> list[Tensor]:
    """Infinities of both signs and a NaN, each in a row of its own."""
    x = _randn(n, 8)
    x[0, 3], x[1, 5], x[2, 1] = float("inf"), float("-inf"), float("nan")
    return [x]


def _guarded(x: Tensor) -> Tensor:
    return torch.where(torch.isfinite(x), x, x.new_zeros(())).exp().sum(-1)


def _spread_holes(x: Tensor) -> Tensor:
    return x.softmax(-1) + x.clamp(min=-1) * 2


def _bounded_holes(x: Tensor, y: Tensor) -> Tensor:
    return torch.maximum(x.clamp(min=-1), y) * 2


def _far(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.layer_norm(x + 16, x.shape[-1:], w, b)


def _waves(x: Tensor, y: Tensor) -> Tensor:
    return torch.sin(3 * x) * torch.cos(y) + torch.atan2(x, y)


def _turned(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    # As a rotation by hand: (x0 + i x1)(y0 + i y1), in any real dtype.
    return x[0] * y[0] - x[1] * y[1], x[0] * y[1] + x[1] * y[0]


def _entropy(x: Tensor) -> Tensor:
    p = x.softmax(-1)
    return -(p * p.clamp(min=1e-6).log()).sum(-1)


def _powers(x: Tensor) -> Tensor:
    return x.abs().pow(1.7) + x.pow(3) + (x * x + 0.1).pow(-0.5)


def _ratio(x: Tensor, y: Tensor) -> Tensor:
    return x / (y * y + 0.3) + torch.reciprocal(1 + y.abs()) / 3


def _logistic(x: Tensor, y: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(x, y.sigmoid())


def _drawn(n: int, scale: float = 1.0) -> list[Tensor]:
    return [scale * _randn(n, 12)]


def _scales(x: Tensor) -> Tensor:
    return x / x.abs().amax(-1, keepdim=True) + x.mean(-1, keepdim=True) * 1e-2


SPECIAL: dict[str, tuple[Callable[..., object], Callable[[int], list[Tensor]]]] = {
    "gelu": (F.gelu, lambda n: _drawn(n, 2)),
    "gelu_tanh": (functools.partial(F.gelu, approximate="tanh"), lambda n: _drawn(n, 2)),
    "silu": (F.silu, lambda n: _drawn(n, 3)),
    "sigmoid": (torch.sigmoid, lambda n: _drawn(n, 3)),
    "tanh": (torch.tanh, _drawn),
    "softplus": (F.softplus, lambda n: _drawn(n, 3)),
    "elu": (F.elu, _drawn),
    "mish": (F.mish, lambda n: _drawn(n, 2)),
    "hardswish": (F.hardswish, lambda n: _drawn(n, 3)),
    "exp": (torch.exp, _drawn),
    "log1p": (lambda x: torch.log1p(x * x), _drawn),
    "erf": (torch.erf, _drawn),
    "waves": (_waves, lambda n: [_randn(n, 7), _randn(n, 7)]),
    "complex_product": (_turned, lambda n: [_randn(2, n, 7), _randn(2, n, 7)]),
    "entropy": (_entropy, lambda n: _drawn(n, 2)),
    "powers": (_powers, _drawn),
    "ratio": (_ratio, lambda n: [_randn(n, 7), _randn(n, 7)]),
    "logistic_loss": (_logistic, lambda n: [3 * _randn(n, 7), _randn(n, 7)]),
    "dropout_mask": (_dropped, lambda n: [_randn(n, 12), _randn(12, 5), torch.rand(n, 12) < 0.75]),
    "dropout": (_drops, lambda n: [_randn(n, 12), _randn(12, 5)]),
    "holes_bounded": (_bounded_holes, lambda n: [*_holes(n), _randn(n, 8)]),
    "holes_kept": (_spread_holes, _holes),
    "holes_guarded": (_guarded, _holes),
    "far_layer_norm": (_far, lambda n: [_randn(n, 24), _randn(24), _randn(24)]),
    "far_softmax": (functools.partial(torch.softmax, dim=-1), lambda n: [_randn(n, 9) + 100]),
    "huge": (_scales, lambda n: _drawn(n, 1e4)),
    "tiny": (_scales, lambda n: _drawn(n, 1e-3)),
}
