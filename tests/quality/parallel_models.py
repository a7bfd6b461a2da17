"""A small model of Llama's kind, written so that a plan can take it apart.

The parts of attention are modules of their own, so that a fault in one of them has a name. The
number of heads is never written down in `forward`: each rank has as many as its weights hold.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of a model; `biased` gives the projections that end a block a bias."""

    dim: int = 32
    heads: int = 4
    kv_heads: int = 2
    hidden: int = 48
    vocabulary: int = 64
    layers: int = 2
    length: int = 8
    biased: bool = False
    tracked: bool = False

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads


SMALL = Sizes()
# Each of four ranks has two heads for queries and one for keys.
WIDE = Sizes(heads=8, kv_heads=4)


class Norm(nn.Module):
    """Root mean square norm, a weight for each channel."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(1 + 0.1 * torch.randn(dim))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * self.weight


class Rotation(nn.Module):
    """Rotary positions; `first` is the position of the first token it is given."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        rates = 100.0 ** (-torch.arange(0, sizes.head_dim, 2) / sizes.head_dim)
        angles = torch.outer(torch.arange(sizes.length, dtype=torch.float32), rates)
        self.register_buffer("cos", angles.cos().repeat(1, 2))
        self.register_buffer("sin", angles.sin().repeat(1, 2))
        self.first = 0

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        rows = slice(self.first, self.first + q.shape[1])
        cos, sin = self.cos[rows, None], self.sin[rows, None]
        return q * cos + _turned(q) * sin, k * cos + _turned(k) * sin


def _turned(x: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return torch.cat([-right, left], -1)


class Core(nn.Module):
    """Causal attention with grouped heads: tokens x heads in, tokens x channels out."""

    def __init__(self, group: int) -> None:
        super().__init__()
        self.group = group
        self.first = 0

    def repeated(self, x: Tensor) -> Tensor:
        return x.repeat_interleave(self.group, 2)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = self.repeated(k), self.repeated(v)
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
        place = torch.arange(self.first, self.first + q.shape[1])[:, None]
        scores = scores.masked_fill(torch.arange(k.shape[1]) > place, float("-inf"))
        return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v).flatten(2)


class Attention(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.head_dim = sizes.head_dim
        self.q = nn.Linear(sizes.dim, sizes.dim, bias=False)
        self.k = nn.Linear(sizes.dim, sizes.kv_heads * sizes.head_dim, bias=False)
        self.v = nn.Linear(sizes.dim, sizes.kv_heads * sizes.head_dim, bias=False)
        self.rotation = Rotation(sizes)
        self.core = Core(sizes.heads // sizes.kv_heads)
        self.out = nn.Linear(sizes.dim, sizes.dim, bias=sizes.biased)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (proj(x).unflatten(-1, (-1, self.head_dim)) for proj in (self.q, self.k, self.v))
        q, k = self.rotation(q, k)
        return self.out(self.core(q, k, v))


class GatedMLP(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.gate = nn.Linear(sizes.dim, sizes.hidden, bias=False)
        self.up = nn.Linear(sizes.dim, sizes.hidden, bias=False)
        self.down = nn.Linear(sizes.hidden, sizes.dim, bias=sizes.biased)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.attention_norm = Norm(sizes.dim)
        self.attention = Attention(sizes)
        self.mlp_norm = Norm(sizes.dim)
        self.mlp = GatedMLP(sizes)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Tracker(nn.Module):
    """Divides by a level that follows the data: a buffer that each step changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("level", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.level.lerp_(x.square().mean().to(self.level.dtype), 0.25)
        return x / (0.5 + self.level)


class Llama(nn.Module):
    def __init__(self, sizes: Sizes = SMALL) -> None:
        super().__init__()
        self.embed = nn.Embedding(sizes.vocabulary, sizes.dim)
        self.layers = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
        self.norm = Norm(sizes.dim)
        self.tracker = Tracker() if sizes.tracked else None
        self.head = nn.Linear(sizes.dim, sizes.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x)
        if self.tracker is not None:
            x = self.tracker(x)
        return self.head(x)


class Criterion(nn.Module):
    """What `next_token` computes, as a module."""

    def forward(self, logits: Tensor, tokens: Tensor) -> Tensor:
        return next_token(logits, tokens)


class Training(nn.Module):
    """A model that computes its own loss, as many do."""

    def __init__(self, sizes: Sizes = SMALL) -> None:
        super().__init__()
        self.model = Llama(sizes)
        self.criterion = Criterion()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.criterion(self.model(tokens), tokens)


def next_token(logits: Tensor, tokens: Tensor) -> Tensor:
    """Cross entropy of the next token, mean over all but the last of each sample."""
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def llama(sizes: Sizes = SMALL, dtype: torch.dtype = torch.float32, seed: int = 0) -> Llama:
    torch.manual_seed(seed)
    return Llama(sizes).to(dtype)


def batches(sizes: Sizes = SMALL, steps: int = 2, samples: int = 4) -> list[Tensor]:
    """Tokens of each step."""
    generator = torch.Generator().manual_seed(1)
    shape = (samples, sizes.length)
    return [torch.randint(sizes.vocabulary, shape, generator=generator) for _ in range(steps)]
