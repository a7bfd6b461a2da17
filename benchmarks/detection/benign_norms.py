"""Layer, group and batch norm by their definition, forward and backward, float32 between."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from benchmarks.detection.benign_kinds import Rewrite, narrow, wide
from torch import Tensor

if TYPE_CHECKING:
    from torch.fx import Node

aten = torch.ops.aten

DEFINED = Rewrite(
    "norm_by_definition", "a norm from mean and squared deviations, 1/sqrt at the end"
)
MERGED_NORM = Rewrite("merged_norm", "a norm whose variance is merged from two halves")
GRADIENT = Rewrite("norm_gradient", "a norm's gradients by their formulas, summed in float32")

NORMS = (DEFINED, MERGED_NORM, GRADIENT)


def _stats(node: Node) -> dict[str, dict[str, Any]]:
    """What dtype the program keeps mean and deviation in: a rewrite hands on the same."""
    return {"": {"stats": node.meta["val"][1].dtype}}


def _kept(value: Tensor, x: Tensor, stats: torch.dtype) -> Tensor:
    return value if x.dtype == torch.float64 else value.to(stats)


def _moments(x: Tensor, axis: int, *, merged: bool) -> tuple[Tensor, Tensor]:
    """Mean and biased variance along one axis, which is kept."""
    if not merged or x.shape[axis] < 2:
        mean = x.mean(axis, keepdim=True)
        return mean, (x - mean).square().mean(axis, keepdim=True)
    first, second = x.chunk(2, axis)
    n, m = first.shape[axis], second.shape[axis]
    means = [one.mean(axis, keepdim=True) for one in (first, second)]
    squares = [
        (one - mean).square().sum(axis, keepdim=True)
        for one, mean in zip((first, second), means, strict=True)
    ]
    apart = means[1] - means[0]
    inside = squares[0] + squares[1] + apart.square() * (n * m / (n + m))
    return means[0] + apart * (m / (n + m)), inside / (n + m)


def _layer_norm(x, shape, weight, bias, eps, *, stats, merged):
    flat = wide(x).reshape(*x.shape[: x.dim() - len(shape)], -1)
    mean, variance = _moments(flat, -1, merged=merged)
    scale = 1 / (variance + eps).sqrt()
    out = ((flat - mean) * scale).view(x.shape)
    out = out if weight is None else out * wide(weight)
    out = out if bias is None else out + wide(bias)
    kept = [*x.shape[: x.dim() - len(shape)], *[1] * len(shape)]
    return narrow(out, x), *(_kept(one.view(kept), x, stats) for one in (mean, scale))


@DEFINED.of(aten.native_layer_norm.default, settings=_stats)
def layer_norm_defined(x, shape, weight, bias, eps, *, stats):
    return _layer_norm(x, shape, weight, bias, eps, stats=stats, merged=False)


@MERGED_NORM.of(aten.native_layer_norm.default, settings=_stats)
def layer_norm_merged(x, shape, weight, bias, eps, *, stats):
    return _layer_norm(x, shape, weight, bias, eps, stats=stats, merged=True)


def _group_norm(x, weight, bias, sizes, eps, *, stats, merged):
    batch, channels, area, groups = sizes
    flat = wide(x).reshape(batch, groups, -1)
    mean, variance = _moments(flat, -1, merged=merged)
    scale = 1 / (variance + eps).sqrt()
    out = ((flat - mean) * scale).view(batch, channels, area)
    out = out if weight is None else out * wide(weight).view(-1, 1)
    out = out if bias is None else out + wide(bias).view(-1, 1)
    moments = (_kept(one.squeeze(-1), x, stats) for one in (mean, scale))
    return narrow(out.view(x.shape), x), *moments


@DEFINED.of(aten.native_group_norm.default, settings=_stats)
def group_norm_defined(x, weight, bias, *sizes_and_eps, stats):
    *sizes, eps = sizes_and_eps
    return _group_norm(x, weight, bias, sizes, eps, stats=stats, merged=False)


@MERGED_NORM.of(aten.native_group_norm.default, settings=_stats)
def group_norm_merged(x, weight, bias, *sizes_and_eps, stats):
    *sizes, eps = sizes_and_eps
    return _group_norm(x, weight, bias, sizes, eps, stats=stats, merged=True)


def _in_training(node: Node) -> dict[str, dict[str, Any]]:
    return _stats(node) if node.args[5] else {}


@DEFINED.of(aten.native_batch_norm.default, settings=_in_training)
def batch_norm_defined(x, weight, bias, *rest, stats):
    running_mean, running_var, _, momentum, eps = rest
    flat = wide(x).transpose(0, 1).flatten(1)
    mean, variance = _moments(flat, 1, merged=False)
    many = flat.shape[1]
    for kept, new in ((running_mean, mean), (running_var, variance * (many / (many - 1)))):
        if kept is not None:
            moved = wide(kept) * (1 - momentum) + new.squeeze(1) * momentum
            kept.copy_(narrow(moved, kept))
    scale = 1 / (variance + eps).sqrt()
    out = (flat - mean) * scale * wide(weight)[:, None] + wide(bias)[:, None]
    out = out.view(x.shape[1], x.shape[0], *x.shape[2:]).transpose(0, 1).contiguous()
    return narrow(out, x), *(_kept(one.squeeze(1), x, stats) for one in (mean, scale))


def _gradients(grad: Tensor, normed: Tensor, axis: int) -> Tensor:
    """What comes back through a norm along one axis, but for the factor of its deviation."""
    inside = (grad * normed).mean(axis, keepdim=True)
    return grad - grad.mean(axis, keepdim=True) - normed * inside


@GRADIENT.of(aten.native_layer_norm_backward.default)
def layer_norm_gradient(grad, x, shape, mean, scale, *rest):
    weight, bias, mask = rest
    lead = x.shape[: x.dim() - len(shape)]
    normed = ((wide(x) - wide(mean)) * wide(scale)).view(*lead, -1)
    above = wide(grad).reshape(normed.shape)
    rows = tuple(range(len(lead)))
    weighted = above if weight is None else above * wide(weight).flatten()
    back = _gradients(weighted, normed, -1).view(x.shape) * wide(scale)
    found = (
        narrow(back, x),
        None if weight is None else narrow((above * normed).sum(rows).view(shape), weight),
        None if bias is None else narrow(above.sum(rows).view(shape), bias),
    )
    return tuple(one if wanted else None for one, wanted in zip(found, mask, strict=True))


@GRADIENT.of(aten.native_group_norm_backward.default)
def group_norm_gradient(grad, x, mean, scale, weight, *rest):
    batch, channels, area, groups, mask = rest
    normed = wide(x).reshape(batch, groups, -1) - wide(mean).view(batch, groups, 1)
    normed = normed * wide(scale).view(batch, groups, 1)
    above = wide(grad).reshape(batch, channels, area)
    weighted = above if weight is None else above * wide(weight).view(-1, 1)
    back = _gradients(weighted.view(batch, groups, -1), normed, -1)
    back = (back * wide(scale).view(batch, groups, 1)).view(x.shape)
    kind = x if weight is None else weight
    found = (
        narrow(back, x),
        narrow((above * normed.view(batch, channels, area)).sum((0, 2)), kind),
        narrow(above.sum((0, 2)), kind),
    )
    return tuple(one if wanted else None for one, wanted in zip(found, mask, strict=True))


def _trained(node: Node) -> dict[str, dict[str, Any]]:
    return {"": {}} if node.args[7] else {}


@GRADIENT.of(aten.native_batch_norm_backward.default, settings=_trained)
def batch_norm_gradient(grad, x, weight, _mean, _var, mean, scale, _train, _eps, mask):
    turned = wide(x).transpose(0, 1).flatten(1)
    normed = (turned - wide(mean)[:, None]) * wide(scale)[:, None]
    above = wide(grad).transpose(0, 1).flatten(1)
    back = _gradients(above, normed, 1) * (wide(scale) * wide(weight))[:, None]
    back = back.view(x.shape[1], x.shape[0], *x.shape[2:]).transpose(0, 1).contiguous()
    sums = (above * normed).sum(1), above.sum(1)
    found = (narrow(back, x), *(narrow(one, weight) for one in sums))
    return tuple(one if wanted else None for one, wanted in zip(found, mask, strict=True))
