"""An offloaded cache with one layer to offload reads keys and values before they are copied.

Needs torch, transformers (5.22.2) and a GPU. Exit code 1 if it was seen, 2 without a GPU. It is a
race: not every attempt shows it.
"""

import sys

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

if not torch.cuda.is_available():
    print("this needs a GPU")
    sys.exit(2)
worst = 0.0
for layers in (2, 1):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=layers,
        num_attention_heads=4,
    )
    model = LlamaForCausalLM(config).double().cuda().eval()
    ids = torch.randint(0, 128, (4, 1024), device="cuda")
    errors = []
    for _ in range(10):
        caches = [DynamicCache(config=config), DynamicCache(config=config, offloading=True)]
        with torch.no_grad():
            for cache in caches:
                model(ids[:, :-1], past_key_values=cache)
            torch.cuda.synchronize()
            plain, other = (model(ids[:, -1:], past_key_values=one).logits for one in caches)
        errors.append(float((plain - other).abs().max()))
    worst = max(errors)
    seen = sum(error > 1e-9 for error in errors)
    print(f"{layers} layer(s): logits off by up to {worst:.1e}, in {seen} of 10 attempts")
sys.exit(worst > 1e-9)
