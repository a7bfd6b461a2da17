"""Mamba ignores its cache if it gets more than one token (transformers 5.22.2)."""

import sys

import torch
import transformers

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 64, "state_size": 8}


def off_by(model, ids, sizes):
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits
        parts, cache = [], None
        for chunk in ids.split(sizes, dim=1):
            output = model(chunk, cache_params=cache, use_cache=True)
            cache = output.cache_params
            parts.append(output.logits)
    return ((torch.cat(parts, dim=1) - whole).norm() / whole.norm()).item()


wrong = False
for name in ("Mamba", "FalconMamba"):
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES)
    model = getattr(transformers, f"{name}ForCausalLM")(config).double().eval()
    ids = torch.randint(0, 64, (1, 12))
    single, chunks = off_by(model, ids, [1] * 12), off_by(model, ids, [6, 6])
    print(f"{name}: token by token off by {single:.1e}, in chunks of 6 {chunks:.1e}")
    wrong |= chunks > 1e-5 > single
sys.exit(wrong)
