"""A small language model, and a port of it with other names and fused projections."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

WORDS, WIDTH, HEADS, KEYS, INNER, LAYERS = 24, 16, 4, 2, 20, 2
SIZE = WIDTH // HEADS
EPS = 1e-5


class RMSNorm(nn.Module):
    def __init__(self, eps=EPS):
        super().__init__()
        self.weight = nn.Parameter(1 + 0.1 * torch.randn(WIDTH))
        self.eps = eps

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class LlamaRMSNorm(RMSNorm):
    pass


def linear(given, made):
    return nn.Linear(given, made, bias=False)


def attend(q, k, v, dims):
    """Causal attention; `dims` are the last two, in either spelling."""
    batch, length = q.shape[:2]
    q, k, v = (x.view(batch, length, -1, SIZE).transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(HEADS // KEYS, 1) for x in (k, v))
    scores = q @ k.transpose(*dims) / SIZE**0.5
    hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return (weights @ v).transpose(1, 2).reshape(batch, length, WIDTH)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.o_proj = linear(WIDTH, WIDTH), linear(WIDTH, WIDTH)
        self.k_proj, self.v_proj = linear(WIDTH, KEYS * SIZE), linear(WIDTH, KEYS * SIZE)

    def forward(self, x):
        return self.o_proj(attend(self.q_proj(x), self.k_proj(x), self.v_proj(x), (2, 3)))


class GatedMLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj = linear(WIDTH, INNER), linear(WIDTH, INNER)
        self.down_proj = linear(INNER, WIDTH)

    def forward(self, x):
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.input_layernorm, self.self_attn = LlamaRMSNorm(), Attention()
        self.post_attention_layernorm, self.mlp = LlamaRMSNorm(), GatedMLP()

    def forward(self, x):
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Original(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList([DecoderLayer() for _ in range(LAYERS)])
        self.norm, self.lm_head = LlamaRMSNorm(), linear(WIDTH, WORDS)

    def forward(self, words):
        x = self.embed_tokens(words)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


class FusedAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.wo = linear(WIDTH, WIDTH + 2 * KEYS * SIZE), linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.wo(attend(*self.qkv(x).split([WIDTH, KEYS * SIZE, KEYS * SIZE], -1), (-1, -2)))


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.w13, self.w2 = linear(WIDTH, 2 * INNER), linear(INNER, WIDTH)

    def forward(self, x):
        gate, up = self.w13(x).chunk(2, -1)
        return self.w2(functional.silu(gate) * up)


class Block(nn.Module):
    def __init__(self, eps):
        super().__init__()
        self.norm1, self.attn = RMSNorm(eps), FusedAttention()
        self.norm2, self.mlp = RMSNorm(), FeedForward()

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Port(nn.Module):
    """The port; `eps` is that of the first norm of the last block."""

    def __init__(self, eps=EPS):
        super().__init__()
        self.tok = nn.Embedding(WORDS, WIDTH)
        of_blocks = [EPS] * (LAYERS - 1) + [eps]
        self.blocks = nn.ModuleList([Block(one) for one in of_blocks])
        self.final_norm, self.head = RMSNorm(), linear(WIDTH, WORDS)

    def forward(self, words):
        x = self.tok(words)
        for block in self.blocks:
            x = block(x)
        return self.head(self.final_norm(x))


NAMES = {
    "tok": ["embed_tokens"],
    "final_norm": ["norm"],
    "head": ["lm_head"],
    "blocks.{}.norm1": ["layers.{}.input_layernorm"],
    "blocks.{}.norm2": ["layers.{}.post_attention_layernorm"],
    "blocks.{}.attn.qkv": [f"layers.{{}}.self_attn.{one}_proj" for one in "qkv"],
    "blocks.{}.attn.wo": ["layers.{}.self_attn.o_proj"],
    "blocks.{}.mlp.w13": [f"layers.{{}}.mlp.{one}_proj" for one in ("gate", "up")],
    "blocks.{}.mlp.w2": ["layers.{}.mlp.down_proj"],
}


def port(original, eps=EPS):
    """The port, with the weights of the original."""
    weights = original.state_dict()
    made = Port(eps)
    made.load_state_dict(
        {
            f"{name.format(layer)}.weight": torch.cat(
                [weights[f"{part.format(layer)}.weight"] for part in parts]
            )
            for name, parts in NAMES.items()
            for layer in range(LAYERS)
        }
    )
    return made
