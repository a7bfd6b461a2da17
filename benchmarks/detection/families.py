"""Model families in small: what a seed changes is weights, inputs and a little of the structure.

So a program of a held-out seed is another program, not the same one with other numbers.
"""

from __future__ import annotations

import functools
import itertools
import random
from typing import TYPE_CHECKING

import torch
from benchmarks.detection import families_hard, families_sparse
from torch import Tensor, nn
from torch.nn import functional as F

if TYPE_CHECKING:
    from collections.abc import Callable

ACTIVATIONS = {
    "relu": F.relu,
    "silu": F.silu,
    "tanh": torch.tanh,
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "softplus": F.softplus,
    "leaky": functools.partial(F.leaky_relu, negative_slope=0.1),
}


def pick(seed: int, what: str, *choices):
    """One of `choices`, by seed, apart from what the seed picks for other questions."""
    return random.Random(f"{seed} {what}").choice(choices)


class RootMeanSquareNorm(nn.Module):
    """Written out, since torch's own warns under autocast."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """`x` at unit size."""
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * self.weight


class Perceptron(nn.Module):
    """Linear layers with activations between, normalised or not."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        width, depth = pick(seed, "width", 24, 33, 48), pick(seed, "depth", 2, 3, 4)
        self.act = ACTIVATIONS[pick(seed, "act", *ACTIVATIONS)]
        sizes = [pick(seed, "features", 16, 20), *[width] * depth]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(sizes))
        kind = pick(seed, "norm", nn.LayerNorm, RootMeanSquareNorm)
        self.norms = nn.ModuleList(kind(width) for _ in range(depth))
        self.head = nn.Linear(width, 10)
        self.features = sizes[0]

    def forward(self, x: Tensor) -> Tensor:
        """Logarithms of probabilities."""
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = self.act(norm(layer(x)))
        return self.head(x).log_softmax(-1)


def perceptron(seed: int):
    model = Perceptron(seed)
    return model, [torch.randn(pick(seed, "rows", 8, 13), model.features)]


class Rotary(nn.Module):
    """Turns pairs of features by an angle that grows with the position."""

    def __init__(self, size: int, length: int) -> None:
        super().__init__()
        rates = 100.0 ** (-torch.arange(0, size, 2) / size)
        angles = torch.outer(torch.arange(length).float(), rates)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, x: Tensor) -> Tensor:
        """The same shape: batch, head, position, feature."""
        first, second = x.chunk(2, -1)
        turned = first * self.cos - second * self.sin, second * self.cos + first * self.sin
        return torch.cat(turned, -1)


class Block(nn.Module):
    """Causal attention with rotary positions, then a gated or plain feed-forward part."""

    def __init__(self, width: int, heads: int, length: int, seed: int) -> None:
        super().__init__()
        kind = pick(seed, "norm", nn.LayerNorm, RootMeanSquareNorm)
        self.heads, self.gated = heads, pick(seed, "gated", True, False)
        self.norm1, self.norm2 = kind(width), kind(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.gate = nn.Linear(width, 2 * width) if self.gated else None
        self.act = ACTIVATIONS[pick(seed, "act", "silu", "gelu", "gelu_tanh")]
        self.rotary = Rotary(width // heads, length)
        self.register_buffer("later", torch.ones(length, length, dtype=torch.bool).triu(1))

    def heads_of(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys, turned, and values: batch, head, position, feature."""
        parts = self.qkv(x).view(*x.shape[:2], 3, self.heads, -1)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        return self.rotary(q), self.rotary(k), v

    def attend(self, x: Tensor) -> Tensor:
        """Every position looks at itself and those before."""
        q, k, v = self.heads_of(x)
        scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
        weights = scores.masked_fill(self.later, float("-inf")).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).reshape(x.shape))

    def forward(self, x: Tensor) -> Tensor:
        """Two residual steps."""
        x = x + self.attend(self.norm1(x))
        inner = self.norm2(x)
        hidden = self.act(self.up(inner))
        return x + self.down(hidden * self.gate(inner) if self.gated else hidden)


class FusedBlock(Block):
    """The same with torch's fused attention: flash attention on a device in 16 bits."""

    def attend(self, x: Tensor) -> Tensor:
        """Every position looks at itself and those before."""
        q, k, v = self.heads_of(x)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(x.shape))


class Transformer(nn.Module):
    """Token embedding, two blocks, tied head."""

    def __init__(self, seed: int, kind: type[Block], *lengths: int) -> None:
        super().__init__()
        width, heads = pick(seed, "width", (32, 2), (32, 4), (24, 2))
        self.length = pick(seed, "length", *lengths)
        self.tokens = nn.Embedding(40, width)
        self.blocks = nn.ModuleList(kind(width, heads, self.length, seed) for _ in range(2))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        """One score for each word."""
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.tokens.weight)


def transformer(seed: int):
    model = Transformer(seed, Block, 8, 11)
    return model, [torch.randint(0, 40, (2, model.length))]


def transformer_fused(seed: int):
    # Long enough that a flash kernel goes over the keys more than once.
    model = Transformer(seed, FusedBlock, 24, 150, 272)
    return model, [torch.randint(0, 40, (1, model.length))]


class Convolutional(nn.Module):
    """Convolutions with batch norm in training: buffers change."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        width = pick(seed, "width", 6, 8)
        self.first = nn.Conv2d(3, width, 3, padding=1, bias=pick(seed, "bias", True, False))
        self.second = nn.Conv2d(width, 2 * width, 3, stride=2)
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(2 * width)
        self.act = ACTIVATIONS[pick(seed, "act", "relu", "silu", "leaky")]
        self.pool = pick(seed, "pool", nn.MaxPool2d(2), nn.AvgPool2d(2))
        self.head = nn.Linear(2 * width, 7)

    def forward(self, x: Tensor) -> Tensor:
        """Class scores."""
        x = self.pool(self.act(self.norm1(self.first(x))))
        x = self.act(self.norm2(self.second(x)))
        return self.head(x.mean((2, 3)))


def convolutional(seed: int):
    side = pick(seed, "side", 10, 12)
    return Convolutional(seed), [torch.randn(4, 3, side, side)]


class Recurrent(nn.Module):
    """A cell written out: long short-term memory, gated, or plain."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.kind = pick(seed, "kind", "lstm", "gru", "plain")
        self.width = pick(seed, "width", 12, 17)
        gates = {"lstm": 4, "gru": 3, "plain": 1}[self.kind]
        self.read = nn.Linear(6, gates * self.width)
        self.back = nn.Linear(self.width, gates * self.width)
        self.write = nn.Linear(self.width, 3)

    def step(self, given: Tensor, state: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """The next state and memory."""
        if self.kind == "lstm":
            keep, take, show, new = (given + self.back(state)).chunk(4, -1)
            memory = keep.sigmoid() * memory + take.sigmoid() * new.tanh()
            return show.sigmoid() * memory.tanh(), memory
        if self.kind == "gru":
            r, z, n = given.chunk(3, -1)
            hr, hz, hn = self.back(state).chunk(3, -1)
            new = torch.tanh(n + torch.sigmoid(r + hr) * hn)
            z = torch.sigmoid(z + hz)
            return (1 - z) * new + z * state, memory
        return torch.tanh(given + self.back(state)), memory

    def forward(self, x: Tensor) -> Tensor:
        """What is written after each step."""
        state = memory = torch.zeros_like(x[:, 0, :1]).expand(-1, self.width)
        written = []
        for given in self.read(x).unbind(1):
            state, memory = self.step(given, state, memory)
            written.append(self.write(state))
        return torch.stack(written, 1)


def recurrent(seed: int):
    model = Recurrent(seed)
    steps = {"lstm": 4, "gru": 4, "plain": 10}[model.kind]
    return model, [torch.randn(3, steps, 6)]


class Diffusion(nn.Module):
    """One level of a denoising network: down, middle, up, with a skip and the time put in."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        width = pick(seed, "width", 8, 12)
        self.enter = nn.Conv2d(3, width, 3, padding=1)
        self.norm1, self.norm2 = nn.GroupNorm(4, width), nn.GroupNorm(2, 2 * width)
        self.down = nn.Conv2d(width, width, 3, stride=2, padding=1)
        self.middle = nn.Conv2d(width, width, 3, padding=1)
        self.time = nn.Linear(16, width)
        self.leave = nn.Conv2d(2 * width, 3, 3, padding=1)
        self.mode = pick(seed, "mode", "nearest", "bilinear")
        self.register_buffer("rates", torch.exp(-torch.arange(8) / 2.0))

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """The noise in `x`."""
        angles = time[:, None] * self.rates
        moment = self.time(torch.cat([angles.sin(), angles.cos()], -1))
        skip = self.enter(x)
        x = self.down(F.silu(self.norm1(skip))) + moment[:, :, None, None]
        x = x + self.middle(F.silu(x))
        x = F.interpolate(x, scale_factor=2.0, mode=self.mode)
        return self.leave(F.silu(self.norm2(torch.cat([x, skip], 1))))


def diffusion(seed: int):
    return Diffusion(seed), [torch.randn(2, 3, 8, 8), 4 * torch.rand(2)]


def seeded(make: Callable[[int], tuple[nn.Module, list[Tensor]]]):
    """`make` under its own random numbers, with nothing at the value it starts training from.

    A norm's weight of one and bias of zero would hide whatever drops them.
    """

    @functools.wraps(make)
    def made(seed: int) -> tuple[nn.Module, list[Tensor]]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model, inputs = make(seed)
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.data += 0.2 * torch.randn_like(parameter)
        for value in inputs:
            value.requires_grad_(value.is_floating_point())
        return model.train(), inputs

    return made


FAMILIES: dict[str, Callable[[int], tuple[nn.Module, list[Tensor]]]] = {
    make.__name__: seeded(make)
    for make in (
        perceptron,
        transformer,
        transformer_fused,
        convolutional,
        recurrent,
        diffusion,
        families_sparse.experts,
        families_sparse.recommender,
        families_sparse.messages,
        families_hard.state_space,
        families_hard.ill_conditioned,
    )
}
