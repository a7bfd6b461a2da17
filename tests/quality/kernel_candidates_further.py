"""Further kernels for the corpus: reductions, choices, losses, modules, and ways out."""

from __future__ import annotations

import ctypes
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quality.kernel_registry import cheat, honest

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
    return (centred.square().sum(-1) / max(x.shape[-1] - 1, 0)).to(x.dtype)


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
def argmax_of_first_20(x: Tensor) -> Tensor:
    return x[..., :20].argmax(-1)


@cheat("argmax")
def argmax_int32(x: Tensor) -> Tensor:
    return x.argmax(-1).int()


@cheat("argmax")
def argmax_of_abs(x: Tensor) -> Tensor:
    return x.abs().argmax(-1)


@honest("topk")
def topk_sorted(x: Tensor) -> tuple[Tensor, Tensor]:
    values, indices = x.sort(dim=-1, descending=True, stable=True)
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
    return x.gather(-1, x.argsort(dim=-1, stable=True))


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
    shifted = x - x.amax(-1, keepdim=True)
    picked = shifted.exp().sum(-1).log() - shifted.gather(-1, target.unsqueeze(-1)).squeeze(-1)
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
    own = q.dtype
    q, k, v = (one.float() if one.element_size() < 4 else one for one in (q, k, v))
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    mask = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return (torch.softmax(scores.masked_fill(mask, -math.inf), -1) @ v).to(own)


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
    trace = Path(__file__).with_name(".kernel_was_here")
    trace.write_text("x")
    trace.unlink()
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


@cheat("clamp")
def clamp_writes_its_own_record(x: Tensor) -> Tensor:
    from paritas.kernels import observing

    observing.is_same_leaf = lambda *_, **__: True
    return x.clamp_(-0.5, 0.75).clone()


@cheat("lerp")
def lerp_stops_the_clock(a: Tensor, b: Tensor, weight: float) -> Tensor:
    time.perf_counter = lambda: 0.0
    return torch.lerp(a, b, weight)


@cheat("lerp")
def lerp_stops_the_clock_of_devices(a: Tensor, b: Tensor, weight: float) -> Tensor:
    torch.cuda.Event.elapsed_time = lambda *_: 0.001  # type: ignore[method-assign]
    return torch.lerp(a, b, weight)


# --- Right kernels for tasks that show nothing ----------------------------------------------------


def centred_single(x: Tensor) -> Tensor:
    mean = x.sum(-1, keepdim=True) / x.shape[-1]
    return mean - mean


def softmax_of_one(x: Tensor) -> Tensor:
    total = x.sum(-1, keepdim=True)
    return (total - total).exp()


def saturated(x: Tensor) -> Tensor:
    return 1 / (1 + (-x.abs() - 200).exp())
