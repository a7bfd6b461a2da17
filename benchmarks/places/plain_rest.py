"""Small models of operators that all the others lack: see `plain.py`.

One statement per line, so that a line is one place. Their names were chosen so that the hash puts
them in the measured half.
"""

# ruff: noqa: D102  (every model has a forward and inputs)

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class PairBias(nn.Module):
    """Attention with a bias for each pair of positions, behind norms with weights and biases."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(3, 24)
        self.mix = nn.Linear(24, 72)
        self.near = nn.Parameter(torch.randn(1, 3, 8, 8))
        self.out = nn.Linear(24, 24)
        self.image = nn.InstanceNorm1d(24, affine=True)
        self.last = nn.LayerNorm(24)
        for one in (self.norm, self.image, self.last):
            nn.init.uniform_(one.weight, 0.5, 1.5)
            nn.init.uniform_(one.bias, -0.5, 0.5)

    def forward(self, x: Tensor) -> Tensor:
        normal = self.norm(x.transpose(1, 2)).transpose(1, 2)
        query, key, value = self.mix(normal).unflatten(-1, (3, 3, 8)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=self.near)
        joined = self.out(mixed.transpose(1, 2).flatten(2))
        again = self.image((x + joined).transpose(1, 2))
        return self.last(again.movedim(1, 2))

    @staticmethod
    def inputs() -> tuple[Tensor, ...]:
        return (1.5 * torch.randn(2, 8, 24) + 0.4,)


class Functions(nn.Module):
    """Functions of one value that few models have, one behind another."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(10, 12)
        self.second = nn.Linear(12, 12)
        self.last = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = 2.0 * self.first(x)
        steps = torch.ceil(hidden) - torch.trunc(hidden)
        angle = torch.atan(hidden) + torch.asinh(self.second(hidden))
        grown = torch.exp2(0.5 * angle) + torch.square(steps)
        level = torch.log2(grown + 0.5)
        chance = torch.logit(torch.sigmoid(level), eps=0.05)
        bound = functional.hardtanh(chance, -0.8, 0.6)
        sparse = functional.hardshrink(angle, 0.4) + functional.threshold(level, 0.7, -0.3)
        share = functional.softmin(sparse, -1)
        whole = torch.div(hidden, 0.7, rounding_mode="floor")
        wave = torch.sinc(bound) + torch.xlogy(share, share + 0.1)
        return self.last(wave * whole) + torch.reciprocal(2.5 + self.last(bound).square())

    @staticmethod
    def inputs() -> tuple[Tensor, ...]:
        return (torch.randn(6, 10),)


class Summaries(nn.Module):
    """Numbers that are made of each row."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(9, 9)
        self.last = nn.Linear(9, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self.mix(x)
        spread, centre = torch.std_mean(hidden, -1, keepdim=True)
        lowest = torch.amin(hidden, -1, keepdim=True)
        low = torch.quantile(hidden, 0.3, -1, keepdim=True)
        third, _ = torch.kthvalue(hidden, 3, -1, keepdim=True)
        length = torch.linalg.vector_norm(hidden, 3.0, -1, keepdim=True)
        area = torch.trapezoid(hidden, dim=-1)
        least = torch.argmin(hidden, 1)
        falling = torch.cummin(hidden, 1)[0]
        level = torch.logsumexp(hidden - lowest, -1, keepdim=True)
        scaled = (hidden - centre + low) / (spread + level)
        return self.last(scaled * length + third), area, falling + least.unsqueeze(1)

    @staticmethod
    def inputs() -> tuple[Tensor, ...]:
        return (torch.randn(4, 7, 9),)


class Slots(nn.Module):
    """Rows that are written where an index says, and values that are moved."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(8, 8)
        self.last = nn.Linear(8, 8)

    def forward(self, x: Tensor, places: Tensor, words: Tensor) -> Tensor:
        hidden = self.mix(x)
        cache = hidden.new_zeros(6, 8)
        cache = torch.index_copy(cache, 0, places, hidden)
        filled = torch.index_fill(cache, 0, places[:1], 0.5)
        known = functional.one_hot(words, 6).to(hidden.dtype) @ filled
        spot = words[:, None].expand(-1, 8)
        put = torch.scatter(filled, 0, spot[:2], known[:2])
        part = torch.select_scatter(put, hidden[0], 0, 5)
        both = torch.slice_scatter(part, 2.0 * hidden[:2], 0, 1, 3)
        shuffled = functional.channel_shuffle(both.view(1, 6, 2, 4), 3).view(6, 8)
        turned = torch.rot90(shuffled[:, :6], 1, (0, 1))
        windows = turned.unfold(1, 4, 2).flatten(1)
        line = torch.diagonal(windows[:, :6]) + torch.tril(windows[:, :6], 1).sum(0)
        spread = torch.diag_embed(line) + turned.narrow(1, 0, 6)
        return self.last(torch.cat([spread, both[:, :2]], -1)) + torch.tile(line[:, None], (1, 8))

    @staticmethod
    def inputs() -> tuple[Tensor, ...]:
        return torch.randn(4, 8), torch.tensor([4, 0, 1, 3]), torch.tensor([2, 0, 3, 4, 1])


class MarginLosses(nn.Module):
    """Losses with a margin, and others that few models have."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Linear(8, 6)
        self.other = nn.Linear(8, 6)

    def forward(self, x: Tensor, sides: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        value = self.value(x)
        other = self.other(x)
        alike = functional.cosine_embedding_loss(value, other, sides, margin=0.3)
        hinge = functional.hinge_embedding_loss(value, sides[:, None].expand(-1, 6), margin=0.8)
        several = functional.multi_margin_loss(value, labels, margin=0.7)
        yes = (other.detach() > 0) * 1.0
        many = functional.multilabel_soft_margin_loss(value, yes)
        near = functional.mse_loss(value, other.detach(), reduction="sum")
        rank = functional.margin_ranking_loss(value[:, 0], other[:, 0], sides, margin=0.2)
        far = functional.triplet_margin_loss(value, other, value.roll(1, 0), margin=1.5)
        own = functional.cross_entropy(2.0 * value, labels, label_smoothing=0.2)
        return alike, hinge, several, many, near, rank, far, own

    @staticmethod
    def inputs() -> tuple[Tensor, ...]:
        sides = torch.tensor([1.0, -1.0, 1.0, 1.0, -1.0, -1.0, 1.0])
        return torch.randn(7, 8), sides, torch.randint(0, 6, (7,))


class Pyramid(nn.Module):
    """Signals and images that are padded, pooled and enlarged."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ConvTranspose1d(4, 4, 4, stride=2, padding=1)
        self.along = nn.Conv1d(4, 6, 3, stride=2)
        self.norm = nn.BatchNorm1d(6)
        self.first = nn.Conv2d(2, 4, 3)
        self.norm.running_mean.uniform_(-0.5, 0.5)
        self.norm.running_var.uniform_(0.3, 2)
        nn.init.uniform_(self.norm.weight, 0.5, 1.5)
        nn.init.uniform_(self.norm.bias, -0.5, 0.5)

    def forward(self, x: Tensor, image: Tensor) -> tuple[Tensor, Tensor]:
        long = functional.gelu(self.up(x))
        padded = functional.pad(long, (2, 2), mode="reflect")
        small = functional.max_pool1d(self.along(padded), 3, 2, 1)
        line = self.norm(small) + functional.adaptive_avg_pool1d(small, 1)
        framed = functional.pad(image, (1, 1, 1, 1), mode="replicate")
        deep = functional.silu(self.first(framed))
        coarse = functional.lp_pool2d(deep.abs() + 0.1, 2.0, 2)
        large = functional.interpolate(coarse, scale_factor=2.0, mode="bilinear")
        wide = functional.interpolate(large, size=(9, 9), mode="nearest")
        return line, wide.mean(1) + large.amax((1, 2, 3)).view(-1, 1, 1)

    @staticmethod
    def inputs() -> tuple[Tensor, ...]:
        return torch.randn(2, 4, 7), torch.randn(2, 2, 8, 8)


MODELS = {
    one.__name__: one for one in (PairBias, Functions, Summaries, Slots, MarginLosses, Pyramid)
}
