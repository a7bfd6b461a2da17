"""Planted faults and benign rewrites of the transformer, each a function from model to new model.

A variant is a deep copy in which some steps are replaced: the parameters, their names and the
module paths stay those of the reference, which is left alone.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quality.transformer import (
    Attention,
    Embedding,
    Forward,
    LayerNorm,
    Linear,
    Mlp,
    Transformer,
    attend,
    embed,
    hide_future,
    layer_norm,
)

# --- faulty arithmetic --------------------------------------------------------------------------


def linear_scaled(x: Tensor, weight: Tensor, bias: Tensor, *, factor: float) -> Tensor:
    return F.linear(x, weight, bias) * factor


def linear_without_one_bias(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    channel = torch.arange(len(bias), device=bias.device)
    return F.linear(x, weight, bias.masked_fill(channel == len(bias) // 3, 0))


def linear_tokens_swapped(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    logits = F.linear(x, weight, bias).clone()
    early, late = logits.shape[1] // 4, 3 * logits.shape[1] // 4
    logits[-1, [early, late]] = logits[-1, [late, early]]
    return logits


def linear_one_element_off(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    logits = F.linear(x, weight, bias).clone()
    logits[-1, logits.shape[1] // 2, logits.shape[2] // 3] += logits.detach().std()
    return logits


def linear_last_row_zero(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    logits = F.linear(x, weight, bias).clone()
    logits[-1, -1] = 0
    return logits


def linear_with_dropout(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.linear(F.dropout(x, 0.001, training=True), weight, bias)


def linear_in_half(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    half = torch.float16
    return F.linear(x.to(half), weight.to(half), bias.to(half)).to(x.dtype)


def embed_one_late(ids: Tensor, tokens: Tensor, positions: Tensor) -> Tensor:
    return F.embedding(ids, tokens) + positions[1 : ids.shape[-1] + 1]


def attend_one_ahead(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
    return hide_future(scores, visible_future=1).softmax(-1) @ value


def attend_one_head_sharper(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    head = torch.arange(query.shape[1], device=query.device)[:, None, None]
    return attend(torch.where(head == 1, query * 1.02, query), key, value)


# --- other ways to compute the same -------------------------------------------------------------


def linear_split_k(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    half = weight.shape[1] // 2
    return F.linear(x[..., :half], weight[:, :half]) + F.linear(
        x[..., half:], weight[:, half:], bias
    )


def linear_then_add(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return x @ weight.t() + bias


def attend_fused(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def attend_unfused_softmax(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    scores = hide_future(query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1]))
    powers = (scores - scores.amax(-1, keepdim=True)).exp()
    return (powers / powers.sum(-1, keepdim=True)) @ value


def attend_reciprocal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    scores = query @ key.transpose(-2, -1) * (1 / math.sqrt(query.shape[-1]))
    return hide_future(scores).softmax(-1) @ value


def chunked_mean(x: Tensor) -> Tensor:
    """The mean over the last axis, summed in quarters from the last one to the first."""
    quarters = [part.sum(-1, keepdim=True) for part in x.chunk(4, -1)]
    return sum(reversed(quarters[:-1]), quarters[-1]) / x.shape[-1]


def layer_norm_chunked(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    # Two passes: E[x^2] - mean^2 cancels, and would not be benign.
    centred = x - chunked_mean(x)
    return centred / torch.sqrt(chunked_mean(centred * centred) + eps) * weight + bias


def layer_norm_reciprocal(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    inverse_width = 1 / x.shape[-1]
    centred = x - x.sum(-1, keepdim=True) * inverse_width
    variance = (centred * centred).sum(-1, keepdim=True) * inverse_width
    return centred * torch.sqrt(variance + eps).reciprocal() * weight + bias


def one_by_one(forward: Forward, ids: Tensor) -> Tensor:
    return torch.cat([forward(row) for row in ids.split(1)])


def wider(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a careful kernel would work; float64 has none above it."""
    narrow = dtype in (torch.float16, torch.bfloat16)
    return torch.float32 if narrow else torch.float64


def embed_wider(ids: Tensor, tokens: Tensor, positions: Tensor) -> Tensor:
    wide = wider(tokens.dtype)
    return embed(ids, tokens.to(wide), positions.to(wide))


def linear_as_input(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.linear(x, weight.to(x.dtype), bias.to(x.dtype))


def linear_as_input_then_narrow(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return linear_as_input(x, weight, bias).to(weight.dtype)


def layer_norm_as_input(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return layer_norm(x, weight.to(x.dtype), bias.to(x.dtype), eps)


# --- the corpus ---------------------------------------------------------------------------------

Variant = Callable[[Transformer], Transformer]
Change = tuple[Callable[[Transformer], Iterable[nn.Module]], dict[str, object]]


def instances(kind: type[nn.Module]) -> Callable[[Transformer], Iterable[nn.Module]]:
    """Every submodule of that class."""
    return lambda model: [module for module in model.modules() if isinstance(module, kind)]


def head(model: Transformer) -> Iterable[nn.Module]:
    return [model.head]


def middle(path: str) -> Callable[[Transformer], Iterable[nn.Module]]:
    """The submodule at that path of the middle block."""
    return lambda model: [model.middle.get_submodule(path)]


def changing(*changes: Change) -> Variant:
    """A variant: a deep copy in which each change sets attributes of the modules it selects."""

    def vary(model: Transformer) -> Transformer:
        changed = copy.deepcopy(model)
        for select, attributes in changes:
            for module in select(changed):
                for name, value in attributes.items():
                    setattr(module, name, value)
        return changed

    return vary


FAULTS: dict[str, Variant] = {
    "scale_out_1.01": changing((head, {"compute": partial(linear_scaled, factor=1.01)})),
    "scale_out_1.0001": changing((head, {"compute": partial(linear_scaled, factor=1.0001)})),
    "drop_1ch_bias_hidden": changing((middle("mlp.up"), {"compute": linear_without_one_bias})),
    "drop_1ch_bias_logit": changing((head, {"compute": linear_without_one_bias})),
    "swap_two_tokens": changing((head, {"compute": linear_tokens_swapped})),
    "pos_slice_off_by_1": changing((instances(Embedding), {"embed": embed_one_late})),
    "one_elem_plus_1std": changing((head, {"compute": linear_one_element_off})),
    "ln_eps_1e-6": changing((instances(LayerNorm), {"eps": 1e-6})),
    "ln_eps_1e-3": changing((instances(LayerNorm), {"eps": 1e-3})),
    "mul_to_add_tiny_branch": changing((middle("gate"), {"combine": torch.add})),
    "causal_off_by_1": changing((middle("attention"), {"attend": attend_one_ahead})),
    "dropout_p001_left_on": changing((middle("mlp.down"), {"compute": linear_with_dropout})),
    "fp16_accumulate": changing((middle("mlp.down"), {"compute": linear_in_half})),
    "attn_scale_1head_2pct": changing((middle("attention"), {"attend": attend_one_head_sharper})),
    "zero_last_token_row": changing((head, {"compute": linear_last_row_zero})),
    "gelu_tanh": changing((instances(Mlp), {"activate": partial(F.gelu, approximate="tanh")})),
}

BENIGN: dict[str, Variant] = {
    "matmul_splitk": changing((instances(Linear), {"compute": linear_split_k})),
    "fused_sdpa_vs_math_softmax": changing((instances(Attention), {"attend": attend_fused})),
    "unfused_exp_div_softmax": changing((instances(Attention), {"attend": attend_unfused_softmax})),
    "mm_plus_add_vs_addmm": changing((instances(Linear), {"compute": linear_then_add})),
    "ln_sum_order": changing((instances(LayerNorm), {"compute": layer_norm_chunked})),
    "batch1_loop": changing((instances(Transformer), {"batching": one_by_one})),
    "internal_wider": changing(
        (instances(Embedding), {"embed": embed_wider}),
        (instances(LayerNorm), {"compute": layer_norm_as_input}),
        (instances(Linear), {"compute": linear_as_input}),
        # Last, so that it replaces what the line above gave the head.
        (head, {"compute": linear_as_input_then_narrow}),
    ),
    "div_as_reciprocal": changing(
        (instances(Attention), {"attend": attend_reciprocal}),
        (instances(LayerNorm), {"compute": layer_norm_reciprocal}),
    ),
}
