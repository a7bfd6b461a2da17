"""A small GPT-like model; `transformer_variants` holds its faults and benign rewrites.

Every arithmetic step that a variant may change sits in an attribute of the module that runs it:
`compute`, `attend`, `activate`, `combine`, `embed`, `batching`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LinearOp = Callable[[Tensor, Tensor, Tensor], Tensor]
NormOp = Callable[[Tensor, Tensor, Tensor, float], Tensor]
AttendOp = Callable[[Tensor, Tensor, Tensor], Tensor]
EmbedOp = Callable[[Tensor, Tensor, Tensor], Tensor]
Forward = Callable[[Tensor], Tensor]

GATE_SCALE = 1e-3


@dataclass(frozen=True, slots=True)
class Sizes:
    """The extents of a model and its input; by default a forward takes some 10 ms on one core."""

    width: int = 64
    heads: int = 4
    layers: int = 8
    context: int = 32
    vocabulary: int = 512
    batch: int = 2


SMALL = Sizes()
# The sizes of the published experiment: 1,048,576 logits.
EXPERIMENT = Sizes(width=128, context=64, vocabulary=8192)


# --- the reference's arithmetic ---------------------------------------------------------------


def embed(ids: Tensor, tokens: Tensor, positions: Tensor) -> Tensor:
    return F.embedding(ids, tokens) + positions[: ids.shape[-1]]


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return F.layer_norm(x, weight.shape, weight, bias, eps)


def hide_future(scores: Tensor, visible_future: int = 0) -> Tensor:
    """Mask the scores of keys that lie more than `visible_future` tokens after their query."""
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
    return scores.masked_fill(hidden.triu(1 + visible_future), -math.inf)


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
    return hide_future(scores).softmax(-1) @ value


def all_at_once(forward: Forward, ids: Tensor) -> Tensor:
    return forward(ids)


# --- the model ----------------------------------------------------------------------------------


class Linear(nn.Linear):
    """A dense layer whose product can be replaced."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.compute: LinearOp = F.linear
        # LayerNorm keeps activations near one, so 1/sqrt(K) keeps every product near one as well.
        nn.init.normal_(self.weight, std=inputs**-0.5)
        nn.init.normal_(self.bias, std=0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(x, self.weight, self.bias)


class LayerNorm(nn.LayerNorm):
    """A layer norm whose formula can be replaced."""

    def __init__(self, width: int) -> None:
        super().__init__(width, eps=1e-5)
        self.compute: NormOp = layer_norm
        nn.init.normal_(self.weight, mean=1.0, std=0.1)
        nn.init.normal_(self.bias, std=0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(x, self.weight, self.bias, self.eps)


class Embedding(nn.Module):
    """Token and learned position embeddings."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.tokens = nn.Parameter(torch.randn(sizes.vocabulary, sizes.width))
        # One row more than any input needs: a slice that starts one too late must not crash.
        self.positions = nn.Parameter(torch.randn(sizes.context + 1, sizes.width) / 2)
        self.embed: EmbedOp = embed

    def forward(self, ids: Tensor) -> Tensor:
        return self.embed(ids, self.tokens, self.positions)


class Attention(nn.Module):
    """Causal multi-head attention."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.heads = sizes.heads
        self.qkv = Linear(sizes.width, 3 * sizes.width)
        self.out = Linear(sizes.width, sizes.width)
        self.attend: AttendOp = attend

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(x).chunk(3, -1)
        )
        return self.out(self.attend(query, key, value).transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """The usual two-layer perceptron with the exact (erf) GELU."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.up = Linear(sizes.width, 4 * sizes.width)
        self.down = Linear(4 * sizes.width, sizes.width)
        self.activate: Forward = F.gelu

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activate(self.up(x)))


class TinyGate(nn.Module):
    """A product of two narrow projections, so small that its faults hardly show in the logits."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        narrow = max(1, sizes.width // 4)
        self.left = Linear(sizes.width, narrow)
        self.right = Linear(sizes.width, narrow)
        self.widen = Linear(narrow, sizes.width)
        self.combine: Callable[[Tensor, Tensor], Tensor] = torch.mul

    def forward(self, x: Tensor) -> Tensor:
        return GATE_SCALE * self.widen(self.combine(self.left(x), self.right(x)))


class Block(nn.Module):
    """One pre-LN residual block."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.attention_norm = LayerNorm(sizes.width)
        self.attention = Attention(sizes)
        self.mlp_norm = LayerNorm(sizes.width)
        self.mlp = Mlp(sizes)
        self.gate = TinyGate(sizes)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        normed = self.mlp_norm(x)
        return x + self.mlp(normed) + self.gate(normed)


class Transformer(nn.Module):
    """int64 token ids (batch, time) -> logits (batch, time, vocabulary)."""

    def __init__(
        self,
        sizes: Sizes = SMALL,
        *,
        seed: int = 0,
        out_scale: float = 1.0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.sizes = sizes
        self.batching: Callable[[Forward, Tensor], Tensor] = all_at_once
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embedding = Embedding(sizes)
            self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
            self.norm = LayerNorm(sizes.width)
            self.head = Linear(sizes.width, sizes.vocabulary)
        with torch.no_grad():
            # Weight and bias alike: the logits are rescaled and nothing else about them changes.
            self.head.weight.mul_(out_scale)
            self.head.bias.mul_(out_scale)
        # Drawn in float32 and cast last, so that the float64 model has the float32 model's weights.
        self.to(dtype)

    def logits(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def forward(self, ids: Tensor) -> Tensor:
        return self.batching(self.logits, ids)

    @property
    def middle(self) -> Block:
        """The block that holds a fault which lives in one block only."""
        return cast("Block", self.blocks[len(self.blocks) // 2])


def token_ids(sizes: Sizes = SMALL, *, seed: int = 0) -> Tensor:
    """Random int64 ids of shape (batch, context)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(sizes.vocabulary, (sizes.batch, sizes.context), generator=generator)
