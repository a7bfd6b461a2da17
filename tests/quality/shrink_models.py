"""Models of 50 to 400 operator calls in which one call, or a few together, are compiled wrongly.

All are small in numbers and long in calls: it is the calls that a reduction has to get rid of.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quality.transformer import Sizes, Transformer, token_ids

Activation = Callable[[Tensor], Tensor]
# A model and what it is called with.
Made = tuple[nn.Module, tuple[Tensor, ...]]


# --- convolutions ---------------------------------------------------------------------------------


class ResidualBlock(nn.Module):
    def __init__(self, channels: int, activation: Activation) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(channels)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.activation(self.first_norm(self.first(x)))
        return self.activation(x + self.second_norm(self.second(hidden)))


class ResidualNet(nn.Module):
    def __init__(
        self, activation: Activation, pool: Activation, blocks: int = 7, channels: int = 4
    ) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.blocks = nn.Sequential(*[ResidualBlock(channels, activation) for _ in range(blocks)])
        self.head = nn.Linear(channels, 5)
        self.pool = pool

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.pool(self.blocks(self.stem(x))))


def mean_pool(x: Tensor) -> Tensor:
    return x.mean((2, 3))


def root_pool(x: Tensor) -> Tensor:
    """Signed roots, which keep one strong place from drowning the others."""
    return (torch.sign(x) * torch.sqrt(torch.abs(x) + 1e-3)).mean((2, 3))


def mish(x: Tensor) -> Tensor:
    return x * torch.tanh(F.softplus(x))


def residual_net(activation: Activation = F.relu, pool: Activation = mean_pool) -> Made:
    return ResidualNet(activation, pool), (torch.randn(2, 3, 6, 6),)


class UpsamplingNet(nn.Module):
    """Convolutions whose results are chosen by their neighbourhood, after a plain stem."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(*[nn.Conv2d(2, 2, 1) for _ in range(44)])
        self.last = nn.Conv2d(2, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x) + x
        x = F.interpolate(x, scale_factor=(1.5, 1.25), mode="bilinear", align_corners=False)
        convolved = self.last(x[:, :, 1:7, 1:8])
        pooled = F.max_pool2d(convolved, kernel_size=3, stride=1, padding=1)
        means = pooled.mean((2, 3), keepdim=True)
        return torch.where(convolved > means, convolved, pooled)


def upsampling_net() -> Made:
    return UpsamplingNet(), (torch.randn(2, 2, 5, 7),)


# --- attention ------------------------------------------------------------------------------------


def transformer() -> Made:
    sizes = Sizes(width=16, heads=2, layers=4, context=6, vocabulary=20)
    return Transformer(sizes), (token_ids(sizes),)


class RotaryBlock(nn.Module):
    """Attention with rotary positions, an RMS norm and a gated perceptron."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate_up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def norm(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * self.weight

    @staticmethod
    def rotate(x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        rates = 10.0 ** -torch.arange(half, dtype=x.dtype)
        angles = torch.arange(x.shape[1], dtype=x.dtype)[:, None] * rates
        left, right = x[..., :half], x[..., half:]
        cos, sin = torch.cos(angles), torch.sin(angles)
        return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(self.norm(x)).chunk(3, -1)
        scores = self.rotate(query) @ self.rotate(key).transpose(-2, -1)
        x = x + self.out((scores / math.sqrt(x.shape[-1])).softmax(-1) @ value)
        gate, up = self.gate_up(self.norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


def rotary() -> Made:
    return nn.Sequential(*[RotaryBlock(8) for _ in range(5)]), (torch.randn(2, 5, 8),)


class CachedBlock(nn.Module):
    """One step of decoding, which writes its keys and values into a cache."""

    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.register_buffer("keys", torch.randn(2, length, width))
        self.register_buffer("values", torch.randn(2, length, width))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(self.norm(x)).chunk(3, -1)
        keys = torch.cat([self.keys[:, :3], key], 1)
        values = torch.cat([self.values[:, :3], value], 1)
        scores = query @ keys.transpose(1, 2) / math.sqrt(x.shape[-1])
        self.keys[:, 3:4] = key
        self.values[:, 3:4] = value
        return x + self.out(scores.softmax(-1) @ values)


def cached_decoder() -> Made:
    return nn.Sequential(*[CachedBlock(8, 6) for _ in range(6)]), (torch.randn(2, 1, 8),)


# --- recurrence -----------------------------------------------------------------------------------


class Lstm(nn.Module):
    """An LSTM written out; with `exponential` its input gate is an exp and not a sigmoid."""

    def __init__(self, width: int = 6, steps: int = 12, *, exponential: bool = False) -> None:
        super().__init__()
        self.cell = nn.Linear(2 * width, 4 * width)
        self.steps = steps
        self.open = torch.exp if exponential else torch.sigmoid

    def forward(self, x: Tensor) -> Tensor:
        hidden = memory = torch.zeros_like(x[:, 0])
        for step in range(self.steps):
            gates = self.cell(torch.cat([x[:, step], hidden], -1))
            entry, keep, new, out = gates.chunk(4, -1)
            memory = torch.sigmoid(keep) * memory + torch.tanh(new) * self.open(entry)
            hidden = torch.sigmoid(out) * torch.tanh(memory)
        return hidden


def lstm(*, exponential: bool = False) -> Made:
    return Lstm(exponential=exponential), (torch.randn(3, 12, 6),)


class Waves(nn.Module):
    """A perceptron of many layers whose activation is a sine."""

    def __init__(self, width: int = 8, layers: int = 20) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.sin(layer(x) * 3)
        return x


def waves() -> Made:
    return Waves(), (torch.randn(5, 8),)


# --- experts --------------------------------------------------------------------------------------


class Experts(nn.Module):
    """Each token goes to the two best of four experts; routing is softened by learned noise."""

    def __init__(self, width: int, *, entropy: int | None = None) -> None:
        super().__init__()
        self.router = nn.Linear(width, 4)
        self.spread = nn.Linear(width, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width))
            for _ in range(4)
        )
        self.entropy = entropy

    def forward(self, x: Tensor) -> Tensor:
        scores = torch.maximum(self.router(x), torch.full_like(x[..., :4], -0.25))
        scores = scores * F.softplus(self.spread(x))
        bound = scores.topk(2, -1).values[..., -1:]
        shares = scores.masked_fill(scores < bound, -math.inf).softmax(-1)
        mixed = sum(
            shares[..., index : index + 1] * expert(x) for index, expert in enumerate(self.experts)
        )
        if self.entropy is not None:
            # Switched off by a factor of 0, which makes NaN where a share is zero.
            mixed = mixed + (shares.log() * self.entropy).sum(-1, keepdim=True)
        return x + mixed


def experts(*, entropy: int | None = None) -> Made:
    last = Experts(8, entropy=entropy)
    return nn.Sequential(Experts(8), Experts(8), last), (torch.randn(2, 4, 8),)
