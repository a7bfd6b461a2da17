"""The subject of `paritas demo`: a small transformer, and a compiler with a planted fault."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.fx import GraphModule

VOCABULARY, TOKENS, WIDTH, HEADS, LAYERS = 256, 32, 64, 4, 2


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, 3 * WIDTH)
        self.merge = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Every token attends to itself and to earlier tokens."""
        batch, tokens, _ = x.shape
        heads = self.project(x).view(batch, tokens, 3, HEADS, WIDTH // HEADS)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        scores = query @ key.transpose(-2, -1) / math.sqrt(WIDTH // HEADS)
        future = torch.ones(tokens, tokens, dtype=torch.bool, device=x.device).triu(1)
        weights = scores.masked_fill(future, -math.inf).softmax(-1)
        return self.merge((weights @ value).transpose(1, 2).reshape(x.shape))  # type: ignore[no-any-return]


class Block(nn.Module):
    """One pre-norm layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.feed = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Attention, then feed-forward, each with a residual connection."""
        x = x + self.attention(self.norm1(x))
        return x + self.feed(self.norm2(x))  # type: ignore[no-any-return]


class Transformer(nn.Module):
    """Token ids in, logits out."""

    def __init__(self, layers: int = LAYERS) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(0.1 * torch.randn(TOKENS, WIDTH))
        self.blocks = nn.Sequential(*(Block() for _ in range(layers)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits of the next token, at every position."""
        x = self.embed(ids) + self.positions
        return self.head(self.norm(self.blocks(x)))  # type: ignore[no-any-return]


def build(layers: int = LAYERS) -> tuple[Transformer, list[Tensor]]:
    """The model and its inputs, from a fixed seed; no parameter requires grad."""
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Transformer(layers).eval().requires_grad_(False)
    return model, [torch.randint(VOCABULARY, (2, TOKENS), generator=generator)]


def faulty_compiler(graph: GraphModule, _: list[Any]) -> Callable[..., Any]:
    """A compiler with one faulty pass: it shifts the causal mask by one."""
    for node in graph.graph.nodes:
        if node.op == "call_method" and node.target == "triu":
            mask, diagonal = node.args
            node.args = (mask, diagonal + 1)
    graph.recompile()
    return graph.forward
