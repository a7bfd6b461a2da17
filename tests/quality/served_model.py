"""A small decoder with the names that models of transformers use, for a simulated engine to serve.

Rotary positions with scaling, a sliding window, caps of logits and experts are settings of its
configuration.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from typing import Any

import torch
from torch import nn


@dataclasses.dataclass
class Config:
    """The settings, under the names of transformers."""

    vocab_size: int = 61
    hidden_size: int = 32
    intermediate_size: int = 48
    num_hidden_layers: int = 3
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    rms_norm_eps: float = 1e-6
    rope_parameters: dict[str, Any] = dataclasses.field(
        default_factory=lambda: {"rope_type": "linear", "rope_theta": 5e5, "factor": 4.0}
    )
    layer_types: list[str] = dataclasses.field(
        default_factory=lambda: ["full_attention", "sliding_attention", "full_attention"]
    )
    sliding_window: int | None = 6
    final_logit_softcapping: float | None = None
    hidden_act: str = "silu"
    num_experts: int = 0
    num_experts_per_tok: int = 2
    norm_topk_prob: bool = True
    bos_token_id: int = 1
    eos_token_id: int = 2
    pad_token_id: int = 0


ACTIVATIONS = {
    "silu": nn.functional.silu,
    "gelu": nn.functional.gelu,
    "gelu_pytorch_tanh": lambda x: nn.functional.gelu(x, approximate="tanh"),
    "relu": nn.functional.relu,
}


class Layer:
    """Keys and values of one layer."""

    keys: torch.Tensor | None = None
    values: torch.Tensor | None = None

    def update(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[Any, Any]:
        """Add tokens; returns all."""
        self.keys = keys if self.keys is None else torch.cat([self.keys, keys], dim=2)
        self.values = values if self.values is None else torch.cat([self.values, values], dim=2)
        return self.keys, self.values


class Cache:
    """The layers."""

    def __init__(self, count: int) -> None:
        self.layers = [Layer() for _ in range(count)]

    def get_seq_length(self) -> int:
        """The number of tokens."""
        keys = self.layers[0].keys
        return 0 if keys is None else keys.shape[2]


class Norm(nn.Module):
    """Root mean square norm, in float32 or more."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.weight = nn.Parameter(1 + 0.2 * torch.randn(config.hidden_size))
        self.eps = config.rms_norm_eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


def speeds(config: Config) -> torch.Tensor:
    """The angle of each pair of channels for one position."""
    size = config.hidden_size // config.num_attention_heads
    rope = config.rope_parameters
    found = rope["rope_theta"] ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    return found / rope.get("factor", 1.0) if rope["rope_type"] == "linear" else found


class Attention(nn.Module):
    """Causal attention with fewer heads of keys than of queries."""

    def __init__(self, config: Config, layer: int) -> None:
        super().__init__()
        self.config, self.layer = config, layer
        self.size = config.hidden_size // config.num_attention_heads
        width, few = config.hidden_size, self.size * config.num_key_value_heads
        self.q_proj, self.k_proj = nn.Linear(width, width), nn.Linear(width, few)
        self.v_proj, self.o_proj = nn.Linear(width, few), nn.Linear(width, width, bias=False)
        for one in (self.q_proj, self.k_proj):  # attention that depends on places and tokens
            nn.init.normal_(one.weight, std=2 / math.sqrt(width))

    def forward(self, x: Any, cos: Any, sin: Any, mask: Any, cache: Cache | None) -> torch.Tensor:
        """Attend."""

        def heads(value: torch.Tensor) -> torch.Tensor:
            return value.unflatten(-1, (-1, self.size)).transpose(1, 2)

        def rotated(value: torch.Tensor) -> torch.Tensor:
            a, b = value.chunk(2, dim=-1)
            return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)

        q, k = rotated(heads(self.q_proj(x))), rotated(heads(self.k_proj(x)))
        v = heads(self.v_proj(x))
        if cache is not None:
            k, v = cache.layers[self.layer].update(k, v)
        groups = self.config.num_attention_heads // self.config.num_key_value_heads
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        scores = q @ k.mT / math.sqrt(self.size)
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        weights = scores.to(torch.promote_types(x.dtype, torch.float32)).softmax(-1).to(x.dtype)
        return self.o_proj((weights @ v).transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """A gated product, or several of which a router chooses."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        width, inner, count = config.hidden_size, config.intermediate_size, config.num_experts
        shape = (count,) if count else ()
        self.gate_up = nn.Parameter(torch.randn(*shape, 2 * inner, width) / math.sqrt(width))
        self.down = nn.Parameter(torch.randn(*shape, width, inner) / math.sqrt(inner))
        self.router = nn.Linear(width, count, bias=False) if count else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply."""
        act = ACTIVATIONS[self.config.hidden_act]

        def one(value: Any, up: Any, down: Any) -> torch.Tensor:
            a, b = (value @ up.mT).chunk(2, dim=-1)
            return (act(a) * b) @ down.mT

        if self.router is None:
            return one(x, self.gate_up, self.down)
        flat = x.flatten(0, 1)
        scores = self.router(flat).to(torch.promote_types(x.dtype, torch.float32)).softmax(-1)
        weights, chosen = torch.topk(scores, self.config.num_experts_per_tok, dim=-1)
        if self.config.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        weights = weights.to(x.dtype)
        found = torch.zeros_like(flat)
        for expert in range(self.config.num_experts):
            share = (weights * (chosen == expert)).sum(-1, keepdim=True)
            found = found + share * one(flat, self.gate_up[expert], self.down[expert])
        return found.view_as(x)


class Block(nn.Module):
    """Attention and a gated product."""

    def __init__(self, config: Config, layer: int) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = Norm(config), Norm(config)
        self.self_attn, self.mlp = Attention(config, layer), Mlp(config)

    def forward(self, hidden_states: Any, cos: Any, sin: Any, mask: Any, cache: Any) -> Any:
        """Both, added to the input."""
        x = hidden_states
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask, cache)
        return x + self.mlp(self.post_attention_layernorm(x))


class ServedModel(nn.Module):
    """A decoder of tokens."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, i) for i in range(config.num_hidden_layers))
        self.norm = Norm(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        nn.init.normal_(self.lm_head.weight, std=2 / math.sqrt(config.hidden_size))

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = None,
    ) -> dict[str, Any]:
        """Logits, and the cache if it is asked for.

        As in transformers, positions that jump are those of packed sequences, unless there is a
        mask or a cache.
        """
        cache = past_key_values
        if cache is None and use_cache:
            cache = Cache(len(self.layers))
        past, new = 0 if cache is None else cache.get_seq_length(), input_ids.shape[1]
        if position_ids is None:
            position_ids = torch.arange(past, past + new)[None]
        x = self.embed_tokens(input_ids)
        wide = torch.promote_types(x.dtype, torch.float32)
        angles = position_ids[:, None, :, None].to(wide) * speeds(self.config).to(wide)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        rows, columns = torch.arange(past, past + new)[:, None], torch.arange(past + new)[None]
        packed = attention_mask is None and cache is None
        sequence = (position_ids.diff(prepend=position_ids[:, :1] - 1) != 1).cumsum(-1)
        for layer, kind in zip(self.layers, self.config.layer_types, strict=True):
            mask = (columns <= rows)[None, None]
            if kind == "sliding_attention" and self.config.sliding_window is not None:
                mask = mask & (columns > rows - self.config.sliding_window)
            if attention_mask is not None:
                mask = mask & attention_mask[:, None, None, :].bool()
            if packed:
                mask = mask & (sequence[:, None, :, None] == sequence[:, None, None, :])
            x = layer(x, cos, sin, mask, cache)
        logits = self.lm_head(self.norm(x))
        cap = self.config.final_logit_softcapping
        if cap is not None:
            logits = cap * torch.tanh(logits / cap)
        return {"logits": logits, **({"past_key_values": cache} if use_cache else {})}


def served(seed: int = 0, dtype: torch.dtype = torch.bfloat16, **settings: Any) -> ServedModel:
    """A model with random weights."""
    torch.manual_seed(seed)
    return ServedModel(Config(**settings)).to(dtype).eval()


def trained_further(model: ServedModel, size: float = 0.02, seed: int = 7) -> ServedModel:
    """The same model after some steps of training."""
    changed = copy.deepcopy(model)
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in changed.parameters():
            step = torch.randn(weight.shape, generator=random) * weight.float().std() * size
            weight.add_(step.to(weight.dtype))
    return changed
