"""GIT without an image attends to padding when it decodes (transformers 5.22.2)."""

import sys

import torch
from transformers import GitConfig, GitForCausalLM

SIZES = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 64}
vision = {"image_size": 32, "patch_size": 16, **SIZES, "num_hidden_layers": 1}
config = GitConfig(vision_config=vision, num_hidden_layers=2, **SIZES)
torch.manual_seed(0)
model = GitForCausalLM(config).double().eval()
ids = torch.randint(3, 64, (1, 8))
padding = torch.zeros(1, 4, dtype=torch.long)


def decode(left):
    """Run 7 tokens and then one more with the cache, behind some masked padding."""
    padded = torch.cat([padding[:, :left], ids], dim=1)
    mask = torch.cat([padding[:, :left], torch.ones_like(ids)], dim=1)
    places = torch.cat([padding[:, :left], torch.arange(8)[None]], dim=1)
    first = model(padded[:, :-1], attention_mask=mask[:, :-1], position_ids=places[:, :-1])
    cache = first.past_key_values
    return model(
        padded[:, -1:], attention_mask=mask, position_ids=places[:, -1:], past_key_values=cache
    ).logits


with torch.no_grad():
    plain, padded = decode(0), decode(4)
off = ((padded - plain).norm() / plain.norm()).item()
print(f"one token decoded behind 4 masked tokens: off by {off:.1e}")
sys.exit(off > 1e-5)
