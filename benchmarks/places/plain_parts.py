"""More small models without a library, of parts that ports get wrong: see `plain.py`.

One statement per line, so that a line is one place.
"""

# ruff: noqa: D102  (every model has a forward and inputs)

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class Upscaler(nn.Module):
    """Dilated and grouped convolutions, shuffled pixels and a transposed convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(4, 16, 3, padding=2, dilation=2, groups=2)
        self.slope = nn.PReLU(16)
        self.norm = nn.GroupNorm(4, 16)
        self.up = nn.ConvTranspose2d(4, 4, 3, stride=2, padding=1, output_padding=1)
        self.last = nn.Conv2d(4, 4, 3)
        nn.init.uniform_(self.slope.weight, 0.05, 0.6)
        nn.init.uniform_(self.norm.weight, 0.5, 1.5)

    def forward(self, x: Tensor) -> Tensor:
        wide = functional.prelu(self.first(x), self.slope.weight)
        mixed = functional.pixel_shuffle(self.norm(wide), 2)
        large = functional.max_pool2d(self.up(mixed), 2)
        padded = functional.pad(large, (1, 1, 1, 1))
        return self.last(padded) + mixed

    @staticmethod
    def inputs() -> tuple[Tensor, ...]:
        return (torch.randn(2, 4, 6, 6),)


class Buckets(nn.Module):
    """Distances between positions, in buckets, and rows in the order of a score."""

    def __init__(self) -> None:
        super().__init__()
        self.near = nn.Embedding(16, 6)
        self.far = nn.Embedding(9, 6)
        self.score = nn.Linear(6, 1)

    def forward(self, x: Tensor, places: Tensor, edges: Tensor) -> Tensor:
        distance = places[:, None] - places[None, :]
        half = torch.floor_divide(distance, 2) + 6
        cell = torch.bucketize(distance, edges)
        bias = self.near(half) + self.far(cell)
        mixed = torch.einsum("ijd,jd->id", bias, x)
        order = torch.argsort(self.score(mixed).squeeze(-1))
        phase = torch.remainder(mixed[order], 1.0)
        return phase * torch.sign(mixed) + torch.frac(x)

    @staticmethod
    def inputs() -> tuple[Tensor, ...]:
        edges = torch.tensor([-4, -2, -1, 0, 1, 2, 4])
        return 2 * torch.randn(8, 6), torch.arange(8), edges


class SparseExperts(nn.Module):
    """The best experts of each token, a shared one, and a dropout that is off."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(10, 6)
        self.rise = nn.Parameter(torch.randn(6, 10, 16) / 4)
        self.fall = nn.Parameter(torch.randn(6, 8, 10) / 4)
        self.shared = nn.Linear(10, 10)

    def forward(self, x: Tensor) -> Tensor:
        best, which = torch.topk(self.gate(x), 2, dim=-1)
        share = torch.sigmoid(best)
        share = share / share.sum(-1, keepdim=True)
        hidden = torch.einsum("ti,eij->tej", x, self.rise)
        hidden = functional.glu(hidden, -1)
        every = torch.einsum("tej,ejk->tek", hidden, self.fall)
        chosen = every.gather(1, which[..., None].expand(-1, -1, 10))
        routed = (chosen * share[..., None]).sum(1)
        kept = functional.dropout(self.shared(x), 0.1, self.training)
        return routed + kept

    @staticmethod
    def inputs() -> tuple[Tensor, ...]:
        return (torch.randn(9, 10),)


class TrainedBlock(nn.Module):
    """Norms whose weights and biases are not those of a new model."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.LayerNorm(16)
        self.between = nn.RMSNorm(16, eps=1e-4)
        self.batch = nn.BatchNorm1d(16)
        self.mix = nn.Linear(16, 32)
        self.out = nn.Linear(16, 16)
        self.batch.running_mean.uniform_(-0.5, 0.5)
        self.batch.running_var.uniform_(0.2, 2)
        for one in (self.before, self.between, self.batch):
            nn.init.uniform_(one.weight, 0.4, 1.6)
        for one in (self.before, self.batch):
            nn.init.uniform_(one.bias, -0.6, 0.6)

    def forward(self, x: Tensor) -> Tensor:
        normal = self.before(x)
        gated = functional.glu(self.mix(normal), -1)
        again = self.between(gated + x)
        flat = self.batch(again.flatten(0, 1)).unflatten(0, x.shape[:2])
        unit = functional.normalize(flat, dim=-1)
        return self.out(functional.hardswish(flat)) * unit.unsqueeze(0).sum(0)

    @staticmethod
    def inputs() -> tuple[Tensor, ...]:
        return (1.5 * torch.randn(3, 5, 16) + 0.3,)


class Selective(nn.Module):
    """A recurrence with a decay that depends on the input."""

    def __init__(self) -> None:
        super().__init__()
        self.rate = nn.Linear(8, 8)
        self.enter = nn.Linear(8, 8)
        self.leave = nn.Linear(8, 8)
        self.decay = nn.Parameter(torch.rand(8))

    def forward(self, x: Tensor) -> Tensor:
        step = functional.softplus(self.rate(x))
        kept = torch.exp(-step * torch.exp(self.decay))
        entry = step * self.enter(x)
        state = torch.zeros(x.shape[0], 8)
        states = []
        for place in range(5):
            state = kept[:, place] * state + entry[:, place]
            states.append(state)
        along = torch.stack(states, 1)
        total = torch.logsumexp(along, -1, keepdim=True)
        return self.leave(along - total) + torch.cumsum(x, 1)

    @staticmethod
    def inputs() -> tuple[Tensor, ...]:
        return (torch.randn(3, 5, 8),)


class IntegerCodes(nn.Module):
    """Codes with a zero point, halves that are rounded, and limits that are not symmetric."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 12)
        self.last = nn.Linear(12, 6)

    def forward(self, x: Tensor, codes: Tensor) -> Tensor:
        whole = torch.round(codes / 2.0)
        given = torch.maximum(self.first(x), whole * 0.25)
        step = given.abs().amax(-1, keepdim=True) / 7.0
        level = torch.clamp(torch.floor(given / step + 0.5), -3.0, 7.0)
        spread = torch.std(level, -1, keepdim=True) + 0.1
        small = torch.minimum(level * step, torch.sqrt(spread))
        return self.last(small.to(torch.bfloat16).to(torch.float32)) / (spread + step)

    @staticmethod
    def inputs() -> tuple[Tensor, ...]:
        return torch.randn(6, 12), torch.randint(-9, 10, (6, 12)).float()


class Contrastive(nn.Module):
    """Two encoders, their similarity, and the loss of the pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(14, 8)
        self.right = nn.Linear(14, 8)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        first = functional.normalize(self.left(x), dim=-1)
        second = functional.normalize(torch.tanh(self.right(y)), dim=-1)
        scores = first @ second.t() * 5.0
        wanted = torch.arange(x.shape[0])
        loss = functional.cross_entropy(scores, wanted)
        alike = functional.cosine_similarity(self.left(x), self.right(x), dim=-1)
        best = torch.argmax(scores, -1)
        return loss, alike, self.right(y)[best]

    @staticmethod
    def inputs() -> tuple[Tensor, ...]:
        return torch.randn(7, 14), torch.randn(7, 14)


class Resampler(nn.Module):
    """Windows that are unfolded, pixels that are read between others, and an instance norm."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(12, 6)
        self.norm = nn.InstanceNorm2d(6, affine=True)
        self.deep = nn.Conv2d(6, 6, 3, padding=1, groups=6)
        self.point = nn.Conv2d(6, 3, 1)
        nn.init.uniform_(self.norm.weight, 0.5, 1.5)

    def forward(self, x: Tensor, grid: Tensor) -> Tensor:
        patches = functional.unfold(x, 2, stride=2).transpose(1, 2)
        image = self.mix(patches).transpose(1, 2).unflatten(-1, (4, 4))
        image = functional.relu(self.norm(image))
        deep = self.deep(image) + image
        small = functional.avg_pool2d(deep, 3, 2, 1)
        read = functional.grid_sample(small, grid, align_corners=False)
        both = torch.stack([read, read.roll(1, -1)], 1)
        return self.point(both.mean(1))

    @staticmethod
    def inputs() -> tuple[Tensor, ...]:
        return torch.randn(2, 3, 8, 8), 1.6 * torch.rand(2, 5, 5, 2) - 0.8


class Objectives(nn.Module):
    """Several losses on the same scores; some targets are ignored."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(18, 10, padding_idx=0)
        self.first = nn.Linear(10, 12)
        self.last = nn.Linear(12, 18)
        self.value = nn.Linear(12, 3)

    def forward(self, words: Tensor, targets: Tensor, wanted: Tensor) -> tuple[Tensor, ...]:
        hidden = functional.leaky_relu(self.first(self.table(words)), 0.2)
        chances = torch.log_softmax(self.last(hidden), -1)
        own = functional.nll_loss(chances.flatten(0, 1), targets.flatten(), ignore_index=-100)
        values = self.value(hidden)
        near = functional.mse_loss(values, wanted)
        rough = functional.smooth_l1_loss(values, wanted, beta=0.3)
        other = torch.softmax(wanted, -1)
        far = functional.kl_div(torch.log_softmax(values, -1), other, reduction="batchmean")
        yes = functional.binary_cross_entropy_with_logits(
            values[..., 0], (wanted[..., 0] > 0) * 1.0
        )
        return own, near, rough, far, yes

    @staticmethod
    def inputs() -> tuple[Tensor, ...]:
        words = torch.randint(1, 18, (3, 6))
        words[:, -1] = 0
        targets = torch.randint(0, 18, (3, 6))
        targets[:, -1] = -100
        return words, targets, torch.randn(3, 6, 3)


class ShortConvolution(nn.Module):
    """Heads with a window: attention by torch's operator with a mask of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(24, 72)
        self.local = nn.Conv1d(24, 24, 3, padding=2, groups=24)
        self.out = nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.mix(x).unflatten(-1, (3, 3, 8)).permute(2, 0, 3, 1, 4).unbind(0)
        places = torch.arange(x.shape[1])
        back = places[:, None] - places[None, :]
        seen = ~((back < 0) | (back > 4))
        mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=seen)
        joined = mixed.transpose(1, 2).flatten(2)
        local = self.local(joined.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)
        return self.out(functional.silu(local)) + x * torch.where(x > 0, 0.5 * x, 2.0 - x)

    @staticmethod
    def inputs() -> tuple[Tensor, ...]:
        return (torch.randn(2, 8, 24),)


MODELS = {
    one.__name__: one
    for one in (
        Upscaler, Buckets, SparseExperts, TrainedBlock, Selective, IntegerCodes, Contrastive,
        Resampler, Objectives, ShortConvolution,
    )
}  # fmt: skip
