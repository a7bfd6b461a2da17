"""RecurrentGemma's convolution sees the padding on the left (transformers 5.22.2)."""

import sys

import torch
import transformers

SIZES = {"hidden_size": 32, "intermediate_size": 64, "lru_width": 32, "vocab_size": 64}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 8}
torch.manual_seed(0)
config = transformers.RecurrentGemmaConfig(**SIZES, **HEADS, num_hidden_layers=3)
model = transformers.RecurrentGemmaForCausalLM(config).eval()
for name, parameter in model.named_parameters():
    if name.endswith("linear_x.bias"):  # zero in a new model, not in a trained one
        torch.nn.init.normal_(parameter, std=0.1)
ids = torch.randint(1, 64, (2, 10))


def off_by(left, right):
    """Padding on both sides, masked, with the positions that the tokens have without it."""
    mask = torch.nn.functional.pad(torch.ones_like(ids), (left, right))
    more = {"attention_mask": mask, "position_ids": (mask.cumsum(dim=1) - 1).clamp(min=0)}
    longer = torch.nn.functional.pad(ids, (left, right))
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits
        found = model(longer, **more, use_cache=False).logits[:, left : left + 10]
    return ((found - whole).norm() / whole.norm()).item()


before, behind = off_by(3, 0), off_by(0, 3)
print(f"padded on the left: off by {before:.1e}, on the right: {behind:.1e}")
sys.exit(before > 1e-3 > behind)
