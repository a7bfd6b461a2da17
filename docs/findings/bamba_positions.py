"""Bamba counts positions from 0 after a cache, unless they are given (transformers 5.22.2)."""

import sys

import torch
import transformers

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "attn_layer_indices": [1]}
STATE = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_d_state": 8}
torch.manual_seed(0)
model = transformers.BambaForCausalLM(transformers.BambaConfig(**SIZES, **HEADS, **STATE)).eval()
for parameter in model.parameters():  # weights as drawn hide everything behind the residuals
    if parameter.dim() > 1:
        torch.nn.init.normal_(parameter, std=0.15)
ids = torch.randint(0, 64, (2, 10))


def off_by(**given):
    """Six tokens, then the seventh after their cache; against one plain call."""
    with torch.no_grad():
        whole = model(ids[:, :7], use_cache=False).logits[:, -1]
        cache = model(ids[:, :6], use_cache=True).past_key_values
        next_one = model(ids[:, 6:7], past_key_values=cache, use_cache=True, **given).logits[:, -1]
    print(f"length of the cache: {cache.get_seq_length()}")
    return ((next_one - whole).norm() / whole.norm()).item()


given, default = off_by(position_ids=torch.tensor([[6]])), off_by()
print(f"with the position given off by {given:.1e}, without {default:.1e}")
sys.exit(default > 1e-3 > given)
