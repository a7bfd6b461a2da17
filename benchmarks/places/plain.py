"""Small models without a library, whose source is also edited (`texts.py`).

One statement per line, so that a line is one place.
"""

# ruff: noqa: D102  (every model has a forward and inputs)

from __future__ import annotations

import math

import torch
from benchmarks.places import plain_parts, plain_ports, plain_rest
from torch import Tensor, nn
from torch.nn import functional


class Perceptron(nn.Module):
    """Linear layers and activations."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(24, 32)
        self.second = nn.Linear(32, 32)
        self.norm = nn.LayerNorm(32)
        self.last = nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        hidden = functional.gelu(self.first(x))
        more = torch.tanh(self.second(hidden))
        kept = self.norm(hidden + more)
        return self.last(kept)

    @staticmethod
    def inputs() -> tuple[Tensor, ...]:
        return (torch.randn(6, 24),)


class Convolutions(nn.Module):
    """Convolutions with batch norms and pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 8, 3, padding=1)
        self.last = nn.Linear(8, 4)
        self.norm.running_mean.uniform_(-0.5, 0.5)
        self.norm.running_var.uniform_(0.5, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.norm(self.first(x)))
        hidden = functional.max_pool2d(hidden, 2)
        hidden = hidden + torch.relu(self.second(hidden))
        pooled = hidden.mean((2, 3))
        return self.last(pooled)

    @staticmethod
    def inputs() -> tuple[Tensor, ...]:
        return (torch.randn(2, 3, 12, 12),)


class SmallUNet(nn.Module):
    """Down, up, and what is kept on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(2, 6, 3, padding=1)
        self.deep = nn.Conv2d(6, 6, 3, padding=1)
        self.norm = nn.GroupNorm(2, 6)
        self.up = nn.Conv2d(12, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        wide = functional.silu(self.down(x))
        small = functional.avg_pool2d(wide, 3, 2, 1)
        small = functional.silu(self.norm(self.deep(small)))
        back = functional.interpolate(small, size=wide.shape[-2:], mode="bilinear")
        both = torch.cat([wide, back], 1)
        return self.up(both)

    @staticmethod
    def inputs() -> tuple[Tensor, ...]:
        return (torch.randn(2, 2, 10, 10),)


class Recurrent(nn.Module):
    """Gates of a recurrent cell, written out."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 12)
        self.inside = nn.Linear(12, 48)
        self.state = nn.Linear(12, 48)
        self.last = nn.Linear(12, 20)

    def forward(self, words: Tensor) -> Tensor:
        vectors = self.table(words)
        hidden = torch.zeros(words.shape[0], 12)
        cell = torch.zeros(words.shape[0], 12)
        for step in range(4):
            gates = self.inside(vectors[:, step]) + self.state(hidden)
            entry, forget, output, new = gates.chunk(4, -1)
            cell = torch.sigmoid(forget) * cell + torch.sigmoid(entry) * torch.tanh(new)
            hidden = torch.sigmoid(output) * torch.tanh(cell)
        return self.last(hidden)

    @staticmethod
    def inputs() -> tuple[Tensor, ...]:
        return (torch.randint(0, 20, (3, 4)),)


class AttentionBlock(nn.Module):
    """Attention by torch's operator, with a residual and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.mix = nn.Linear(32, 96)
        self.out = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.mix(self.norm(x)).chunk(3, -1)
        heads = [part.unflatten(-1, (4, 8)).transpose(1, 2) for part in (query, key, value)]
        mixed = functional.scaled_dot_product_attention(*heads, is_causal=True)
        joined = mixed.transpose(1, 2).flatten(2)
        return x + self.out(joined)

    @staticmethod
    def inputs() -> tuple[Tensor, ...]:
        return (torch.randn(2, 9, 32),)


class WrittenAttention(nn.Module):
    """Attention written out, with a causal mask."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(16, 16)
        self.key = nn.Linear(16, 16)
        self.value = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.query(x) @ self.key(x).mT
        scores = scores / math.sqrt(16)
        mask = torch.tril(torch.ones(x.shape[1], x.shape[1]))
        scores = scores.masked_fill(mask == 0, -1e4)
        weights = torch.softmax(scores, -1)
        return weights @ self.value(x)

    @staticmethod
    def inputs() -> tuple[Tensor, ...]:
        return (torch.randn(3, 7, 16),)


class Rotary(nn.Module):
    """Rotary positions, with halves that are exchanged."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(16, 16, bias=False)
        self.scale = nn.Parameter(torch.rand(16) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        query = self.query(x)
        rates = 1.0 / (100.0 ** (torch.arange(0, 16, 2) / 16))
        angles = torch.arange(x.shape[1])[:, None] * rates
        angles = torch.cat([angles, angles], -1)
        left, right = query[..., :8], query[..., 8:]
        turned = torch.cat([-right, left], -1)
        mixed = query * angles.cos() + turned * angles.sin()
        variance = mixed.pow(2).mean(-1, keepdim=True)
        return mixed * torch.rsqrt(variance + 1e-6) * self.scale

    @staticmethod
    def inputs() -> tuple[Tensor, ...]:
        return (torch.randn(2, 6, 16),)


class Router(nn.Module):
    """The best experts of each token."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(12, 4)
        self.experts = nn.Parameter(torch.randn(4, 12, 12) / 4)

    def forward(self, x: Tensor) -> Tensor:
        chances = torch.softmax(self.gate(x), -1)
        best, which = torch.topk(chances, 2, dim=-1)
        best = best / best.sum(-1, keepdim=True)
        every = torch.einsum("bi,eij->bej", x, self.experts)
        chosen = every.gather(1, which[..., None].expand(-1, -1, 12))
        return (chosen * best[..., None]).sum(1)

    @staticmethod
    def inputs() -> tuple[Tensor, ...]:
        return (torch.randn(7, 12),)


class SortedPooling(nn.Module):
    """Operators with several results."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(18, 18)
        self.last = nn.Linear(9, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        ordered, _ = torch.sort(hidden, -1)
        low, high = torch.split(ordered, 9, -1)
        spread, centre = torch.var_mean(high - low, -1, keepdim=True)
        best, _ = hidden.unflatten(-1, (2, 9)).max(1)
        return self.last((best - centre) / torch.sqrt(spread + 1e-3))

    @staticmethod
    def inputs() -> tuple[Tensor, ...]:
        return (torch.randn(5, 18),)


class Loss(nn.Module):
    """A classifier with its loss; some targets are ignored."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(30, 16)
        self.norm = nn.LayerNorm(16)
        self.last = nn.Linear(16, 30)

    def forward(self, words: Tensor, targets: Tensor) -> Tensor:
        hidden = functional.silu(self.norm(self.table(words)))
        scores = self.last(hidden)
        return functional.cross_entropy(scores.flatten(0, 1), targets.flatten())

    @staticmethod
    def inputs() -> tuple[Tensor, ...]:
        words = torch.randint(0, 30, (3, 8))
        targets = torch.randint(0, 30, (3, 8))
        targets[:, -2:] = -100
        return words, targets


class Picker(nn.Module):
    """Indices of largest values among small integers."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(12, 10)
        self.last = nn.Linear(10, 10)

    def forward(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        best = torch.argmax(scores, -1)
        chosen = self.table(best)
        return self.last(chosen), best

    @staticmethod
    def inputs() -> tuple[Tensor, ...]:
        return (torch.randint(0, 3, (8, 12)),)


class Standardized(nn.Module):
    """Statistics by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.second = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.first(x))
        centred = hidden - hidden.mean(-1, keepdim=True)
        scaled = centred / (centred.std(-1, keepdim=True) + 1e-5)
        weights = torch.exp(scaled - scaled.amax(-1, keepdim=True))
        weights = weights / weights.sum(-1, keepdim=True)
        return self.second(weights * 4.0) - x

    @staticmethod
    def inputs() -> tuple[Tensor, ...]:
        return (torch.randn(16, 16),)


class Shifted(nn.Module):
    """Windows that are rolled, as in Swin."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(8, 24)
        self.out = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        moved = torch.roll(x, (-1, -1), (1, 2))
        windows = moved.unflatten(1, (2, 3)).unflatten(3, (2, 3)).transpose(2, 3).flatten(3, 4)
        query, key, value = self.mix(windows.flatten(1, 3)).unflatten(-1, (3, 8)).unbind(2)
        weights = torch.softmax(query @ key.transpose(1, 2) * 0.35, -1)
        return self.out(weights @ value)

    @staticmethod
    def inputs() -> tuple[Tensor, ...]:
        return (torch.randn(2, 6, 6, 8),)


class Gated(nn.Module):
    """A gated block with squares, maxima and a cumulative sum."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(12, 24)
        self.conv = nn.Conv1d(12, 12, 3, padding=1)
        self.out = nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.gate(x).chunk(2, -1)
        local = self.conv(value.transpose(1, 2)).transpose(1, 2)
        mixed = local * torch.sigmoid(gate)
        along = torch.cumsum(mixed, 1) * 0.5
        bounded = torch.where(along > 0, along, 0.1 * along)
        return self.out(bounded) + x

    @staticmethod
    def inputs() -> tuple[Tensor, ...]:
        return (torch.randn(2, 8, 12),)


class SequenceLoss(nn.Module):
    """The loss of the next token, written with shifted labels."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(24, 16)
        self.mix = nn.Linear(16, 16)
        self.last = nn.Linear(16, 24, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        hidden = torch.tanh(self.mix(self.table(words)))
        scores = torch.log_softmax(self.last(hidden)[:, :-1], -1)
        labels = words[:, 1:].masked_fill(words[:, 1:] == 0, -100)
        return functional.nll_loss(scores.flatten(0, 1), labels.flatten(), ignore_index=-100)

    @staticmethod
    def inputs() -> tuple[Tensor, ...]:
        return (torch.randint(0, 24, (4, 9)),)


class SmoothedLoss(nn.Module):
    """A classifier with smoothed labels, and the distance to a teacher."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 20)
        self.last = nn.Linear(20, 6)
        self.teacher = nn.Linear(12, 6)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        scores = self.last(torch.relu(self.first(x)))
        own = functional.cross_entropy(scores, target, label_smoothing=0.1, ignore_index=0)
        chances = torch.softmax(self.teacher(x) / 2.0, -1)
        far = functional.kl_div(torch.log_softmax(scores / 2.0, -1), chances, reduction="batchmean")
        return own + 4.0 * far

    @staticmethod
    def inputs() -> tuple[Tensor, ...]:
        return torch.randn(10, 12), torch.randint(0, 6, (10,))


class BoxLoss(nn.Module):
    """Regression and a binary label for each position."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(10, 16)
        self.box = nn.Linear(16, 4)
        self.seen = nn.Linear(16, 1)

    def forward(self, x: Tensor, boxes: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = functional.softplus(self.first(x))
        places = torch.sigmoid(self.box(hidden))
        near = functional.mse_loss(places, boxes)
        rough = functional.smooth_l1_loss(places, boxes, beta=0.1)
        logits = self.seen(hidden).squeeze(-1)
        return near, rough, functional.binary_cross_entropy_with_logits(logits, labels)

    @staticmethod
    def inputs() -> tuple[Tensor, ...]:
        return torch.randn(3, 7, 10), torch.rand(3, 7, 4), torch.randint(0, 2, (3, 7)).float()


class Decoder(nn.Module):
    """Transposed and grouped convolutions, padding and resizing."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1)
        self.deep = nn.Conv2d(6, 6, 3, padding=1, groups=3)
        self.point = nn.Conv2d(6, 4, 1)
        self.norm = nn.InstanceNorm2d(4, affine=True)

    def forward(self, x: Tensor) -> Tensor:
        wide = functional.leaky_relu(self.up(x), 0.2)
        wide = functional.elu(self.deep(functional.pad(wide, (1, 0, 1, 0))))
        wide = self.norm(self.point(wide))
        small = functional.max_pool2d(wide, 3, 2, 1, ceil_mode=True)
        back = functional.interpolate(small, scale_factor=2.0, mode="nearest")
        return torch.stack([back, back.flip(-1)], 1).sum(1)

    @staticmethod
    def inputs() -> tuple[Tensor, ...]:
        return (torch.randn(2, 4, 5, 5),)


class GraphLayer(nn.Module):
    """Messages along edges: rows are gathered, and added where they belong."""

    def __init__(self) -> None:
        super().__init__()
        self.message = nn.Linear(16, 8)
        self.update = nn.Linear(16, 8)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        ends = torch.cat([x.index_select(0, edges[0]), x[edges[1]]], -1)
        sent = functional.silu(self.message(ends))
        taken = torch.zeros_like(x).index_add(0, edges[1], sent)
        degree = torch.zeros(x.shape[0]).scatter_add(0, edges[1], torch.ones(edges.shape[1]))
        taken = taken / degree.clamp(min=1.0)[:, None]
        return x + self.update(torch.cat([x, taken], -1))

    @staticmethod
    def inputs() -> tuple[Tensor, ...]:
        return torch.randn(9, 8), torch.randint(0, 9, (2, 24))


class Statistics(nn.Module):
    """Norms written out, and sums of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(14, 14)
        self.weight = nn.Parameter(torch.rand(14) + 0.5)
        self.bias = nn.Parameter(torch.randn(14) / 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self.first(x)
        mean = hidden.mean(-1, keepdim=True)
        variance = hidden.var(-1, keepdim=True, unbiased=False)
        normal = (hidden - mean) * torch.rsqrt(variance + 1e-3) * self.weight + self.bias
        total = torch.logsumexp(normal, -1)
        along = torch.cumsum(normal, 1)
        length = torch.sqrt((along * along).sum(-1) + 1e-6)
        return total, length, 1.0 - torch.exp(-length).log1p()

    @staticmethod
    def inputs() -> tuple[Tensor, ...]:
        return (torch.randn(3, 6, 14) + 0.5,)


class GroupedQueries(nn.Module):
    """A layer of a decoder: rms norms, rotary positions, fewer heads of keys."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(32, eps=1e-3)
        self.query = nn.Linear(32, 32, bias=False)
        self.keys = nn.Linear(32, 32, bias=False)
        self.out = nn.Linear(32, 32, bias=False)
        self.norm.weight.data.uniform_(0.5, 1.5)

    def forward(self, x: Tensor) -> Tensor:
        normal = self.norm(x)
        query = self.query(normal).unflatten(-1, (4, 8)).transpose(1, 2)
        key, value = self.keys(normal).unflatten(-1, (4, 8)).transpose(1, 2).chunk(2, 1)
        angles = torch.arange(x.shape[1])[:, None] * 0.3 ** torch.arange(4)
        cos, sin = torch.cat([angles.cos()] * 2, -1), torch.cat([angles.sin()] * 2, -1)
        query = query * cos + torch.cat([-query[..., 4:], query[..., :4]], -1) * sin
        key = key * cos + torch.cat([-key[..., 4:], key[..., :4]], -1) * sin
        key, value = key.repeat_interleave(2, 1), value.repeat_interleave(2, 1)
        scores = 5.0 * torch.tanh(query @ key.mT * 8**-0.5 / 5.0)
        far = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        weights = torch.softmax(scores.masked_fill(far, -torch.inf), -1)
        return x + self.out((weights @ value).transpose(1, 2).flatten(2))

    @staticmethod
    def inputs() -> tuple[Tensor, ...]:
        return (torch.randn(2, 7, 32),)


class Quantised(nn.Module):
    """Weights and activations that are rounded to eight bits and back."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.last = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        step = x.abs().amax(-1, keepdim=True) / 127.0
        whole = torch.clamp(torch.round(x / step), -128.0, 127.0)
        hidden = functional.hardswish(self.first(whole * step))
        kept = torch.clamp(hidden, -0.5, 1.5)
        return self.last(kept.to(torch.bfloat16).to(torch.float32))

    @staticmethod
    def inputs() -> tuple[Tensor, ...]:
        return (torch.randn(6, 16),)


class TrainedNorms(nn.Module):
    """Norms whose weights and statistics are not those of a new model."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 6, 3, padding=1)
        self.batch = nn.BatchNorm2d(6)
        self.layer = nn.LayerNorm(6)
        self.last = nn.Linear(6, 6)
        self.batch.running_mean.uniform_(-0.5, 0.5)
        self.batch.running_var.uniform_(0.05, 2)
        for one in (self.batch, self.layer):
            nn.init.uniform_(one.weight, 0.5, 1.5)
            nn.init.uniform_(one.bias, -0.5, 0.5)

    def forward(self, x: Tensor) -> Tensor:
        hidden = functional.relu6(self.batch(self.first(x)))
        pooled = functional.adaptive_avg_pool2d(hidden, 4).flatten(2).transpose(1, 2)
        normal = self.layer(pooled)
        gate = torch.sigmoid(self.last(normal))
        smooth = 0.5 * normal * (1.0 + torch.erf(normal / math.sqrt(2.0)))
        return smooth * gate + pooled

    @staticmethod
    def inputs() -> tuple[Tensor, ...]:
        return (4 * torch.randn(2, 3, 8, 8),)


class Distillation(nn.Module):
    """Distances between a student and a teacher."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Linear(10, 8)
        self.teacher = nn.Linear(10, 8)
        self.seen = nn.Linear(10, 1)

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        own, other = self.student(x), self.teacher(x)
        near = functional.mse_loss(own, other)
        rough = functional.smooth_l1_loss(own, other, beta=0.1)
        chances = torch.softmax(other, -1)
        far = functional.kl_div(torch.log_softmax(own, -1), chances, reduction="batchmean")
        logits = self.seen(x).squeeze(-1)
        yes = functional.binary_cross_entropy_with_logits(logits, labels)
        sharp = functional.cross_entropy(own, other.argmax(-1), label_smoothing=0.1)
        return near, rough, far, yes, sharp

    @staticmethod
    def inputs() -> tuple[Tensor, ...]:
        return torch.randn(7, 10), torch.randint(0, 2, (7,)).float()


class Envelope(nn.Module):
    """Largest values, logarithms and rounding, as in the front end of a speech model."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(20, 12)

    def forward(self, x: Tensor) -> Tensor:
        power = self.mix(x).abs() + 0.1
        louder = torch.log(power).clamp(min=-2.0)
        louder = torch.maximum(louder, louder.amax(-1, keepdim=True) - 3.0)
        step = power.amax(-1, keepdim=True) / 15.0
        whole = torch.round(power / step).clamp(0.0, 15.0)
        ordered, _ = torch.sort(louder - louder.mean(-1, keepdim=True), -1)
        return ordered + whole * step

    @staticmethod
    def inputs() -> tuple[Tensor, ...]:
        return (torch.randn(5, 20),)


class Pooled(nn.Module):
    """The largest of several kinds, and logarithms."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(20, 12)
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.mix(x)
        power = torch.log(hidden.abs() + 0.1)
        power = power - power.amax(-1, keepdim=True)
        whole = torch.round(8.0 * power) / 8.0
        best, _ = whole.unflatten(-1, (2, 6)).max(1)
        ordered, _ = torch.sort(best * torch.sigmoid(hidden[:, :6]), -1)
        return self.last(ordered)

    @staticmethod
    def inputs() -> tuple[Tensor, ...]:
        return (torch.randn(5, 20),)


MODELS = {
    one.__name__: one
    for one in (
        Perceptron, Convolutions, SmallUNet, Recurrent, AttentionBlock, WrittenAttention, Rotary,
        Router, SortedPooling, Loss, Picker, Standardized, Shifted, Gated, SequenceLoss,
        SmoothedLoss, BoxLoss, Decoder, GraphLayer, Statistics, GroupedQueries, Quantised,
        TrainedNorms, Distillation, Envelope, Pooled,
    )
} | plain_parts.MODELS | plain_ports.MODELS | plain_rest.MODELS  # fmt: skip
