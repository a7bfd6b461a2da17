"""Decoding with Mamba2 ignores time_step_limit (transformers 5.22.2)."""

import sys

import torch
from transformers import Mamba2Config, Mamba2ForCausalLM


def off_by(limit):
    torch.manual_seed(0)
    config = Mamba2Config(
        hidden_size=32,
        num_heads=4,
        head_dim=16,
        state_size=8,
        n_groups=1,
        num_hidden_layers=2,
        vocab_size=64,
        chunk_size=16,
        time_step_limit=limit,
    )
    model = Mamba2ForCausalLM(config).double().eval()
    ids = torch.randint(0, 64, (1, 12))
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits
        parts, cache = [], None
        for token in ids.split(1, dim=1):
            output = model(token, cache_params=cache, use_cache=True)
            cache = output.cache_params
            parts.append(output.logits)
    return ((torch.cat(parts, dim=1) - whole).norm() / whole.norm()).item()


free, limited = off_by((0.0, float("inf"))), off_by((0.0, 0.005))
print(f"token by token, off by {free:.1e} without a limit, {limited:.1e} with (0.0, 0.005)")
sys.exit(limited > 1e-5 > free)
