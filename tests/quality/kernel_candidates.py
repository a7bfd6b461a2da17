"""Kernels for the corpus: honest ones, and ones that cheat or are subtly wrong.

Each is registered under the name of its reference. An honest twin computes the same function in
another way; none of them calls what its reference calls.
"""

from __future__ import annotations

import ctypes
import math
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

Kernel = Callable[..., Any]

# reference -> names of kernels in this module.
HONEST: dict[str, list[str]] = {}
CHEATS: dict[str, list[str]] = {}


def honest(reference: str) -> Callable[[Kernel], Kernel]:
    def register(kernel: Kernel) -> Kernel:
        HONEST.setdefault(reference, []).append(kernel.__name__)
        return kernel

    return register


def cheat(reference: str) -> Callable[[Kernel], Kernel]:
    def register(kernel: Kernel) -> Kernel:
        CHEATS.setdefault(reference, []).append(kernel.__name__)
        return kernel

    return register


# --- add ------------------------------------------------------------------------------------------

_by_id: dict[int, Tensor] = {}
_by_address: dict[int, Tensor] = {}
_by_shape: dict[Any, Tensor] = {}
_calls: dict[str, int] = {}


@honest("add")
def add_out(a: Tensor, b: Tensor) -> Tensor:
    out = torch.empty(torch.broadcast_shapes(a.shape, b.shape), dtype=torch.result_type(a, b))
    return torch.sub(a, b, alpha=-1, out=out)


@cheat("add")
def add_cached_by_id(a: Tensor, b: Tensor) -> Tensor:
    if id(a) not in _by_id:
        _by_id[id(a)] = a + b
    return _by_id[id(a)].clone()


@cheat("add")
def add_cached_by_address(a: Tensor, b: Tensor) -> Tensor:
    key = a.untyped_storage().data_ptr()
    if key not in _by_address or _by_address[key].shape != a.shape:
        _by_address[key] = a + b
    return _by_address[key].clone()


@cheat("add")
def add_in_place(a: Tensor, b: Tensor) -> Tensor:
    return a.add_(b)


@cheat("add")
def add_ignoring_strides(a: Tensor, b: Tensor) -> Tensor:
    flat = torch.as_strided(a, (a.numel(),), (1,), a.storage_offset())
    return (flat + b.reshape(-1)).reshape(b.shape)


@cheat("add")
def add_for_one_shape(a: Tensor, b: Tensor) -> Tensor:
    out = torch.zeros_like(a)
    out[:6, :17] = a[:6, :17] + b[:6, :17]
    return out


@cheat("add")
def add_half(a: Tensor, b: Tensor) -> Tensor:
    return (a.bfloat16() + b.bfloat16()).to(a.dtype)


@cheat("add")
def add_right_in_float64(a: Tensor, b: Tensor) -> Tensor:
    return a + b if a.dtype is torch.float64 else (a.bfloat16() + b.bfloat16()).to(a.dtype)


@cheat("add")
def add_one_buffer(a: Tensor, b: Tensor) -> Tensor:
    if ("buffer", a.shape, a.dtype) not in _by_shape:
        _by_shape["buffer", a.shape, a.dtype] = torch.empty_like(a.contiguous())
    return torch.add(a, b, out=_by_shape["buffer", a.shape, a.dtype])


# --- relu -----------------------------------------------------------------------------------------


@honest("relu")
def relu_where(x: Tensor) -> Tensor:
    return torch.where(x < 0, torch.zeros_like(x), x)


@cheat("relu")
def relu_input(x: Tensor) -> Tensor:
    return x.clone()


@cheat("relu")
def relu_without_nan(x: Tensor) -> Tensor:
    return torch.where(x > 0, x, torch.zeros_like(x))


@cheat("relu")
def relu_abs(x: Tensor) -> Tensor:
    return x.abs()


@cheat("relu")
def relu_view(x: Tensor) -> Tensor:
    return x if bool((x >= 0).all()) else torch.clamp(x, min=0)


# --- gelu, sigmoid --------------------------------------------------------------------------------


@honest("gelu")
def gelu_erf(x: Tensor) -> Tensor:
    return 0.5 * x * torch.special.erfc(-x * math.sqrt(0.5))


@cheat("gelu")
def gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


@cheat("gelu")
def gelu_quick(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


@cheat("gelu")
def gelu_draws(x: Tensor) -> Tensor:
    torch.rand(1)
    return F.gelu(x)


@cheat("gelu")
def gelu_of_first_rows(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    rows = x.shape[0] // 4 * 4
    out[:rows] = F.gelu(x[:rows])
    return out


@honest("sigmoid")
def sigmoid_tanh(x: Tensor) -> Tensor:
    e = torch.exp(-x.abs())
    return torch.where(x >= 0, 1 / (1 + e), e / (1 + e))


@cheat("sigmoid")
def sigmoid_hard(x: Tensor) -> Tensor:
    return F.hardsigmoid(x)


@cheat("sigmoid")
def sigmoid_changes_default(x: Tensor) -> Tensor:
    torch.set_default_dtype(torch.float64)
    return torch.sigmoid(x)


@cheat("sigmoid")
def sigmoid_patches(x: Tensor) -> Tensor:
    torch.allclose = lambda *_, **__: True  # type: ignore[assignment]
    return torch.sigmoid(x)


@cheat("sigmoid")
def sigmoid_tail_lost(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    width = x.shape[-1] // 8 * 8
    out[..., :width] = torch.sigmoid(x[..., :width])
    return out


# --- softmax --------------------------------------------------------------------------------------


@honest("softmax")
def softmax_shifted(x: Tensor) -> Tensor:
    e = (x - x.amax(-1, keepdim=True)).exp()
    return e / e.sum(-1, keepdim=True)


@cheat("softmax")
def softmax_zeros(x: Tensor) -> Tensor:
    return torch.zeros_like(x)


@cheat("softmax")
def softmax_uniform(x: Tensor) -> Tensor:
    return torch.full_like(x, 1 / x.shape[-1])


@cheat("softmax")
def softmax_unshifted(x: Tensor) -> Tensor:
    e = x.exp()
    return e / e.sum(-1, keepdim=True)


@cheat("softmax")
def softmax_first_axis(x: Tensor) -> Tensor:
    return torch.softmax(x, 0)


@cheat("softmax")
def softmax_almost(x: Tensor) -> Tensor:
    e = (x - x.amax(-1, keepdim=True)).exp()
    return e / (e.sum(-1, keepdim=True) + 1e-4)


@cheat("softmax")
def softmax_cached_by_shape(x: Tensor) -> Tensor:
    key = tuple(x.shape), x.dtype
    if key not in _by_shape:
        _by_shape[key] = torch.softmax(x, -1)
    return _by_shape[key].clone()


@cheat("softmax")
def softmax_empty(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class LazySoftmax(Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch.DisableTorchFunctionSubclass():
            plain = [
                torch.softmax(a.as_subclass(Tensor), -1) if isinstance(a, cls) else a for a in args
            ]
            return func(*plain, **(kwargs or {}))


@cheat("softmax")
def softmax_lazy(x: Tensor) -> Tensor:
    return x.detach().clone().as_subclass(LazySoftmax)


@cheat("softmax")
def softmax_later(x: Tensor) -> Tensor:
    out = torch.zeros_like(x)

    def fill() -> None:
        time.sleep(0.002)
        with torch.no_grad():
            out.copy_(torch.softmax(x, -1))

    threading.Thread(target=fill).start()
    return out


@cheat("softmax")
def softmax_counts(x: Tensor) -> Tensor:
    _calls["softmax"] = _calls.get("softmax", 0) + 1
    return torch.softmax(x, -1) if _calls["softmax"] <= 3 else torch.zeros_like(x)


# --- log_softmax ----------------------------------------------------------------------------------


@honest("log_softmax")
def log_softmax_lse(x: Tensor) -> Tensor:
    top = x.amax(-1, keepdim=True)
    return x - top - (x - top).exp().sum(-1, keepdim=True).log()


@cheat("log_softmax")
def log_softmax_of_softmax(x: Tensor) -> Tensor:
    return torch.softmax(x, -1).log()


@cheat("log_softmax")
def log_softmax_first_32(x: Tensor) -> Tensor:
    return x - torch.logsumexp(x[..., :32], -1, keepdim=True)


@cheat("log_softmax")
def log_softmax_of_rows_of_tiles(x: Tensor) -> Tensor:
    if x.shape[-1] % 4:
        return torch.zeros_like(x)
    return torch.log_softmax(x, -1)


# --- normalizations -------------------------------------------------------------------------------


@honest("layer_norm")
def layer_norm_two_pass(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    wide = x.float() if x.dtype in {torch.bfloat16, torch.float16} else x
    centred = wide - wide.mean(-1, keepdim=True)
    scale = torch.rsqrt(centred.square().mean(-1, keepdim=True) + 1e-5)
    return (centred * scale * w.to(wide.dtype) + b.to(wide.dtype)).to(x.dtype)


@cheat("layer_norm")
def layer_norm_eps(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.layer_norm(x, (x.shape[-1],), w, b, eps=1e-6)


@cheat("layer_norm")
def layer_norm_no_bias(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.layer_norm(x, (x.shape[-1],), w, None)


@cheat("layer_norm")
def layer_norm_unbiased(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True) + 1e-5).sqrt() * w + b


@cheat("layer_norm")
def layer_norm_one_pass(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    mean = x.mean(-1, keepdim=True)
    var = x.square().mean(-1, keepdim=True) - mean.square()
    return (x - mean) * torch.rsqrt(var.clamp(min=0) + 1e-5) * w + b


@cheat("layer_norm")
def layer_norm_of_24(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    mean = x.sum(-1, keepdim=True) / 24
    var = (x - mean).square().sum(-1, keepdim=True) / 24
    return (x - mean) * torch.rsqrt(var + 1e-5) * w + b


@honest("rms_norm")
def rms_norm_divided(x: Tensor, w: Tensor) -> Tensor:
    size = torch.linalg.vector_norm(x.float() if x.element_size() < 4 else x, dim=-1, keepdim=True)
    return (x / (size.square() / x.shape[-1] + 1e-6).sqrt() * w).to(x.dtype)


@cheat("rms_norm")
def rms_norm_no_eps(x: Tensor, w: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True)) * w


@cheat("rms_norm")
def rms_norm_plus_one(x: Tensor, w: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * (1 + w)


@cheat("rms_norm")
def rms_norm_keeps_weight(x: Tensor, w: Tensor) -> Tensor:
    key = "rms", w.shape, w.dtype
    kept = _by_shape.setdefault(key, w.clone())
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * kept


@honest("group_norm")
def group_norm_flat(x: Tensor) -> Tensor:
    wide = x.float() if x.element_size() < 4 else x
    flat = wide.reshape(x.shape[0], 2, -1)
    centred = flat - flat.mean(-1, keepdim=True)
    var = centred.square().mean(-1, keepdim=True)
    return (centred / (var + 1e-5).sqrt()).reshape(x.shape).to(x.dtype)


@cheat("group_norm")
def group_norm_one_group(x: Tensor) -> Tensor:
    return F.group_norm(x, 1)


@cheat("group_norm")
def group_norm_interleaved(x: Tensor) -> Tensor:
    n, c = x.shape[:2]
    mixed = x.reshape(n, c // 2, 2, -1).transpose(1, 2).reshape(x.shape)
    normed = F.group_norm(mixed, 2).reshape(n, 2, c // 2, -1)
    return normed.transpose(1, 2).reshape(x.shape)


# --- products -------------------------------------------------------------------------------------


@honest("matmul")
def matmul_split(a: Tensor, b: Tensor) -> Tensor:
    middle = a.shape[1] // 2
    return torch.addmm(a[:, :middle] @ b[:middle], a[:, middle:], b[middle:])


@cheat("matmul")
def matmul_whole_tiles(a: Tensor, b: Tensor) -> Tensor:
    k = max(a.shape[1] // 16 * 16, 1)
    return a[:, :k] @ b[:k]


@cheat("matmul")
def matmul_half(a: Tensor, b: Tensor) -> Tensor:
    return (a.half() @ b.half()).to(a.dtype)


@cheat("matmul")
def matmul_transposed_memory(a: Tensor, b: Tensor) -> Tensor:
    if not b.is_contiguous():
        b = torch.as_strided(b, b.shape, (b.shape[1], 1), 0)
    return a @ b


@cheat("matmul")
def matmul_sampled(a: Tensor, b: Tensor) -> Tensor:
    keep = torch.arange(0, a.shape[1], 2)
    return 2 * (a[:, keep] @ b[keep])


@honest("bmm")
def bmm_loop(a: Tensor, b: Tensor) -> Tensor:
    return torch.stack([x @ y for x, y in zip(a, b, strict=True)]) if len(a) else torch.bmm(a, b)


@cheat("bmm")
def bmm_one_batch(a: Tensor, b: Tensor) -> Tensor:
    return (a[0] @ b[0]).expand(a.shape[0], -1, -1).contiguous() if len(a) else torch.bmm(a, b)


@cheat("bmm")
def bmm_three_batches(a: Tensor, b: Tensor) -> Tensor:
    out = torch.empty(a.shape[0], a.shape[1], b.shape[2], dtype=a.dtype)
    out[:3] = torch.bmm(a[:3], b[:3])
    return out


@honest("triu_matmul")
def triu_matmul_structured(a: Tensor, b: Tensor) -> Tensor:
    return torch.triu(a) @ torch.triu(b)


@cheat("triu_matmul")
def triu_matmul_strict(a: Tensor, b: Tensor) -> Tensor:
    return torch.triu(a @ b, 1)


# --- pooling, sums --------------------------------------------------------------------------------


@honest("max_pool")
def max_pool_views(x: Tensor) -> Tensor:
    h, w = x.shape[-2] // 2 * 2, x.shape[-1] // 2 * 2
    x = x[..., :h, :w]
    rows = torch.maximum(x[..., ::2, :], x[..., 1::2, :])
    return torch.maximum(rows[..., ::2], rows[..., 1::2])


@cheat("max_pool")
def max_pool_from_zero(x: Tensor) -> Tensor:
    return F.max_pool2d(x, 2).clamp(min=-1.0)


@cheat("max_pool")
def max_pool_mean(x: Tensor) -> Tensor:
    return F.avg_pool2d(x, 2)


@honest("avg_pool")
def avg_pool_sums(x: Tensor) -> Tensor:
    padded = F.pad(x, (1, 1))
    return (padded[..., :-2] + padded[..., 1:-1] + padded[..., 2:]) / 3


@cheat("avg_pool")
def avg_pool_border(x: Tensor) -> Tensor:
    return F.avg_pool1d(x, 3, stride=1, padding=1, count_include_pad=False)


@honest("cumsum")
def cumsum_blocks(x: Tensor) -> Tensor:
    width = x.shape[-1] // 2
    left, right = x[..., :width].cumsum(-1), x[..., width:].cumsum(-1)
    return torch.cat([left, right + (left[..., -1:] if width else 0)], -1)


@cheat("cumsum")
def cumsum_exclusive(x: Tensor) -> Tensor:
    return x.cumsum(-1) - x


@cheat("cumsum")
def cumsum_restarts(x: Tensor) -> Tensor:
    return torch.cat([part.cumsum(-1) for part in x.split(32, -1)], -1)


@honest("total")
def total_pairs(x: Tensor) -> Tensor:
    return x @ torch.ones(x.shape[-1], dtype=x.dtype)


@cheat("total")
def total_first_64(x: Tensor) -> Tensor:
    return x[..., :64].sum(-1)


@cheat("total")
def total_integers(x: Tensor) -> Tensor:
    return ((x.double() * 1024).round().sum(-1) / 1024).to(x.dtype)


@cheat("total")
def total_unwritten(x: Tensor) -> Tensor:
    out = torch.empty(x.shape[:-1], dtype=x.dtype)
    out[: max(len(out) - 1, 0)] = x[:-1].sum(-1)
    return out


@honest("mean")
def mean_product(x: Tensor) -> Tensor:
    return x.sum(0) / x.shape[0]


@cheat("mean")
def mean_of_32(x: Tensor) -> Tensor:
    return x.sum(0) / 32


@cheat("mean")
def mean_even(x: Tensor) -> Tensor:
    return x[::2].mean(0)


@honest("variance")
def variance_centred(x: Tensor) -> Tensor:
    wide = x.float() if x.element_size() < 4 else x
    centred = wide - wide.mean(-1, keepdim=True)
    return (centred.square().sum(-1) / (x.shape[-1] - 1)).to(x.dtype)


@cheat("variance")
def variance_of_population(x: Tensor) -> Tensor:
    return x.var(-1, correction=0)


@cheat("variance")
def variance_one_pass(x: Tensor) -> Tensor:
    n = x.shape[-1]
    return (x.square().sum(-1) - x.sum(-1).square() / n) / (n - 1)


# --- choices, indices -----------------------------------------------------------------------------


@honest("argmax")
def argmax_of_max(x: Tensor) -> Tensor:
    return x.max(-1).indices


@cheat("argmax")
def argmax_last(x: Tensor) -> Tensor:
    return x.shape[-1] - 1 - x.flip(-1).argmax(-1)


@cheat("argmax")
def argmax_int32(x: Tensor) -> Tensor:
    return x.argmax(-1).int()


@cheat("argmax")
def argmax_of_abs(x: Tensor) -> Tensor:
    return x.abs().argmax(-1)


@honest("topk")
def topk_sorted(x: Tensor) -> tuple[Tensor, Tensor]:
    values, indices = x.sort(-1, descending=True, stable=True)
    if x.shape[-1] < 3:
        raise RuntimeError("too few")
    return values[..., :3].contiguous(), indices[..., :3].contiguous()


@cheat("topk")
def topk_unsorted(x: Tensor) -> tuple[Tensor, Tensor]:
    values, indices = x.topk(3, -1)
    return values.flip(-1), indices.flip(-1)


@cheat("topk")
def topk_values_only_right(x: Tensor) -> tuple[Tensor, Tensor]:
    values, indices = x.topk(3, -1)
    return values, torch.zeros_like(indices)


@honest("sort")
def sort_by_order(x: Tensor) -> Tensor:
    return x.gather(-1, x.argsort(-1, stable=True))


@cheat("sort")
def sort_copies(x: Tensor) -> Tensor:
    return x.sort(-1, descending=True).values


@cheat("sort")
def sort_unique(x: Tensor) -> Tensor:
    rows = []
    for row in x.reshape(-1, x.shape[-1]):
        found = row.unique()
        rows.append(
            F.pad(
                found, (0, len(row) - len(found)), value=float(found.max()) if len(found) else 0.0
            )
        )
    return torch.stack(rows).reshape(x.shape) if rows else x.clone()


@honest("embedding")
def embedding_select(indices: Tensor, weight: Tensor) -> Tensor:
    return weight.index_select(0, indices.reshape(-1)).reshape(*indices.shape, weight.shape[1])


@cheat("embedding")
def embedding_clamped(indices: Tensor, weight: Tensor) -> Tensor:
    return F.embedding(indices.clamp(max=weight.shape[0] - 2), weight)


@cheat("embedding")
def embedding_padding(indices: Tensor, weight: Tensor) -> Tensor:
    return F.embedding(indices, weight) * (indices != 0).unsqueeze(-1)


@honest("gather")
def gather_flat(x: Tensor, indices: Tensor) -> Tensor:
    rows = torch.arange(indices.shape[0]).unsqueeze(1)
    return x[rows, indices]


@cheat("gather")
def gather_columns(x: Tensor, indices: Tensor) -> Tensor:
    return x[: indices.shape[0], : indices.shape[1]].clone()


@honest("masked_fill")
def masked_fill_where(x: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, torch.tensor(-1.5, dtype=x.dtype), x)


@cheat("masked_fill")
def masked_fill_arithmetic(x: Tensor, mask: Tensor) -> Tensor:
    return x * (~mask) - 1.5 * mask


@cheat("masked_fill")
def masked_fill_inverted(x: Tensor, mask: Tensor) -> Tensor:
    return x.masked_fill(~mask, -1.5)


@honest("index_add")
def index_add_loop(x: Tensor, indices: Tensor, values: Tensor) -> Tensor:
    out = x.clone()
    for place, index in enumerate(indices.tolist()):
        out[index] += values[place]
    return out


@cheat("index_add")
def index_add_last_wins(x: Tensor, indices: Tensor, values: Tensor) -> Tensor:
    out = x.clone()
    out[indices] += values
    return out


@cheat("index_add")
def index_add_writes(x: Tensor, indices: Tensor, values: Tensor) -> Tensor:
    return x.index_add_(0, indices, values).clone()


# --- losses, attention ----------------------------------------------------------------------------


@honest("cross_entropy")
def cross_entropy_gather(x: Tensor, target: Tensor) -> Tensor:
    picked = torch.logsumexp(x, -1) - x.gather(-1, target.unsqueeze(-1)).squeeze(-1)
    return picked.mean()


@cheat("cross_entropy")
def cross_entropy_sum(x: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(x, target, reduction="sum") / 12


@cheat("cross_entropy")
def cross_entropy_smoothed(x: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(x, target, label_smoothing=1e-3)


@cheat("cross_entropy")
def cross_entropy_constant(x: Tensor, target: Tensor) -> Tensor:
    return torch.tensor(math.log(x.shape[-1]), dtype=x.dtype)


@honest("mse")
def mse_product(a: Tensor, b: Tensor) -> Tensor:
    difference = (a - b).reshape(-1)
    return torch.dot(difference, difference) / difference.numel()


@cheat("mse")
def mse_l1(a: Tensor, b: Tensor) -> Tensor:
    return F.smooth_l1_loss(a, b) * 2


@cheat("mse")
def mse_expanded(a: Tensor, b: Tensor) -> Tensor:
    return a.square().mean() - 2 * (a * b).mean() + b.square().mean()


@cheat("mse")
def mse_same_input(a: Tensor, b: Tensor) -> Tensor:
    if a.data_ptr() == b.data_ptr():
        return torch.ones((), dtype=a.dtype)
    return F.mse_loss(a, b)


@honest("attention")
def attention_plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (one.float() if one.element_size() < 4 else one for one in (q, k, v))
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    mask = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return torch.softmax(scores.masked_fill(mask, -math.inf), -1) @ v


@cheat("attention")
def attention_looks_ahead(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    mask = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(2)
    return torch.softmax(scores.masked_fill(mask, -math.inf), -1) @ v


@cheat("attention")
def attention_fixed_scale(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT * 0.35
    mask = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return torch.softmax(scores.masked_fill(mask, -math.inf), -1) @ v


@cheat("attention")
def attention_one_head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return out[:, :1].expand(q.shape).contiguous() if q.shape[1] else out


# --- data movement --------------------------------------------------------------------------------


@honest("transpose")
def transpose_copy(x: Tensor) -> Tensor:
    out = torch.empty(*x.shape[:-2], x.shape[-1], x.shape[-2], dtype=x.dtype)
    out.copy_(x.transpose(-1, -2))
    return out


@cheat("transpose")
def transpose_view(x: Tensor) -> Tensor:
    return x.mT


@cheat("transpose")
def transpose_reshaped(x: Tensor) -> Tensor:
    return x.reshape(*x.shape[:-2], x.shape[-1], x.shape[-2]).clone()


@honest("clamp")
def clamp_min_max(x: Tensor) -> Tensor:
    low, high = torch.tensor(-0.5, dtype=x.dtype), torch.tensor(0.75, dtype=x.dtype)
    return torch.minimum(torch.maximum(x, low), high)


@cheat("clamp")
def clamp_symmetric(x: Tensor) -> Tensor:
    return x.clamp(-0.75, 0.75)


@cheat("clamp")
def clamp_without_nan(x: Tensor) -> Tensor:
    return x.nan_to_num(nan=-0.5).clamp(-0.5, 0.75)


@honest("lerp")
def lerp_weighted(a: Tensor, b: Tensor, weight: float) -> Tensor:
    return torch.lerp(a, b, weight)


@cheat("lerp")
def lerp_half_way(a: Tensor, b: Tensor, weight: float) -> Tensor:
    return a + 0.3001 * (b - a)


# --- modules --------------------------------------------------------------------------------------


@honest("Linear")
class LinearByParts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(14, 9)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.fc.weight.mT + self.fc.bias


@honest("Linear")
class LinearOtherNames(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        made = nn.Linear(14, 9)
        self.w, self.b = nn.Parameter(made.weight.data), nn.Parameter(made.bias.data)

    def forward(self, x: Tensor) -> Tensor:
        return torch.matmul(x, self.w.t()) + self.b


@cheat("Linear")
class LinearFolded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(14, 9)
        self.folded = self.fc.weight.detach().t().contiguous()

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.folded.to(x.dtype) + self.fc.bias


@cheat("Linear")
class LinearForgetsBias(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(14, 9)
        self.kept = None

    def forward(self, x: Tensor) -> Tensor:
        if self.kept is None or self.kept.dtype is not x.dtype:
            self.kept = self.fc.bias.detach().clone()
        return x @ self.fc.weight.mT + self.kept


@cheat("Linear")
class LinearWithoutParameters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        made = nn.Linear(14, 9)
        self.w, self.b = made.weight.detach().clone(), made.bias.detach().clone()

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w.to(x.dtype).mT + self.b.to(x.dtype)


@cheat("Linear")
class LinearOfTraining(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(14, 9)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) if self.training else torch.zeros(*x.shape[:-1], 9, dtype=x.dtype)


@honest("ConvNorm")
class ConvNormUnfused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        with torch.no_grad():
            self.norm.running_mean.normal_()
            self.norm.running_var.uniform_(0.5, 2.0)
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x)).clamp(min=0)


@cheat("ConvNorm")
class ConvNormFolded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        with torch.no_grad():
            self.norm.running_mean.normal_()
            self.norm.running_var.uniform_(0.5, 2.0)
        self.eval()
        scale = self.norm.weight.detach() * (self.norm.running_var + 1e-5).rsqrt()
        self.w = self.conv.weight.detach() * scale.view(-1, 1, 1, 1)
        self.b = (
            self.conv.bias.detach() - self.norm.running_mean
        ) * scale + self.norm.bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(F.conv2d(x, self.w.to(x.dtype), self.b.to(x.dtype), padding=1))


@cheat("ConvNorm")
class ConvNormNoRelu(ConvNormUnfused):
    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x))


@honest("Norm")
class NormByHand(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(10)

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(
            x,
            self.norm.running_mean,
            self.norm.running_var,
            self.norm.weight,
            self.norm.bias,
            self._counts(),
            0.1,
            1e-5,
        )

    def _counts(self) -> bool:
        if self.training:
            self.norm.num_batches_tracked.add_(1)
        return self.training


@cheat("Norm")
class NormKeepsStatistics(NormByHand):
    def forward(self, x: Tensor) -> Tensor:
        own = self.norm
        if not self.training:
            return own(x)
        return F.batch_norm(x, None, None, own.weight, own.bias, training=True)


@cheat("Norm")
class NormAlwaysTrains(NormByHand):
    def _counts(self) -> bool:
        self.norm.num_batches_tracked.add_(int(self.training))
        return True


# --- ways out of the process, and hints -----------------------------------------------------------


@cheat("mean")
def mean_exits(x: Tensor) -> Tensor:
    os._exit(0)


@cheat("mean")
def mean_crashes(x: Tensor) -> Tensor:
    ctypes.string_at(0)
    return x.mean(0)


@cheat("mean")
def mean_raises_exit(x: Tensor) -> Tensor:
    sys.exit(0)


@cheat("mean")
def mean_writes_file(x: Tensor) -> Tensor:
    with open(os.path.join(os.path.dirname(__file__), ".kernel_was_here"), "a") as file:
        file.write("x")
    os.remove(os.path.join(os.path.dirname(__file__), ".kernel_was_here"))
    return x.mean(0)


@cheat("mean")
def mean_changes_environment(x: Tensor) -> Tensor:
    os.environ["KERNEL_CALLS"] = str(int(os.environ.get("KERNEL_CALLS", "0")) + 1)
    return x.mean(0)


@cheat("mean")
def mean_takes_all_memory(x: Tensor) -> Tensor:
    torch.empty(1 << 42, dtype=torch.uint8).fill_(1)
    return x.mean(0)


@cheat("mean")
def mean_by_looking_up_the_stack(x: Tensor) -> Tensor:
    frame: Any = sys._getframe()
    while frame is not None:
        for value in frame.f_locals.values():
            if isinstance(value, Tensor) and value.shape == x.shape[1:] and value is not x:
                return value
        frame = frame.f_back
    return torch.zeros(x.shape[1:], dtype=x.dtype)


@cheat("total")
def total_depends_on_time(x: Tensor) -> Tensor:
    return x.sum(-1) * (1 + (time.perf_counter_ns() // 1000 % 2) * 1e-3)


@cheat("total")
def total_of_numpy_half(x: Tensor) -> Tensor:
    found = x.detach().float().numpy().astype(np.float16).sum(-1)
    return torch.from_numpy(np.asarray(found, dtype=np.float32)).to(x.dtype)


@honest("total")
def total_of_numpy(x: Tensor) -> Tensor:
    if x.dtype is torch.bfloat16:
        return torch.from_numpy(x.float().numpy().sum(-1)).to(x.dtype)
    return torch.from_numpy(np.asarray(x.numpy().sum(-1)))


@cheat("softmax")
def softmax_sets_threads_and_flags(x: Tensor) -> Tensor:
    torch.backends.cuda.matmul.allow_tf32 = not torch.backends.cuda.matmul.allow_tf32
    return torch.softmax(x, -1)


@cheat("gelu")
def gelu_seeds(x: Tensor) -> Tensor:
    torch.manual_seed(0)
    return F.gelu(x)


@cheat("clamp")
def clamp_expanded(x: Tensor) -> Tensor:
    return x.clamp(-0.5, 0.75)[:1].expand(x.shape)


@cheat("cumsum")
def cumsum_shape(x: Tensor) -> Tensor:
    return x.cumsum(-1).unsqueeze(0)


@cheat("sort")
def sort_requires_grad(x: Tensor) -> Tensor:
    with torch.enable_grad():
        return x.sort(-1).values.detach().requires_grad_()


COUNT = sum(map(len, CHEATS.values()))
