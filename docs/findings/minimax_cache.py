"""MiniMax's cache: its states are not reordered, and its length may be 0 (transformers 5.22.2)."""

import sys

import torch
import transformers

SIZES = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 64}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 2}
LAYERS = ["linear_attention", "full_attention"]  # as in MiniMax-Text-01, the first is linear
torch.manual_seed(0)
config = transformers.MiniMaxConfig(**SIZES, **HEADS, layer_types=LAYERS)
model = transformers.MiniMaxForCausalLM(config).eval()
ids = torch.randint(0, 64, (2, 10))


def off_by(order, size):
    """Six tokens, the rows in another order, then the other four; against one plain call."""
    with torch.no_grad():
        whole = model(ids[order], use_cache=False).logits[:, 6:]
        cache = model(ids[:, :6], use_cache=True).past_key_values
        cache.reorder_cache(order)  # what beam search does after each step
        parts = []
        for start in range(6, 10, size):
            how = {"position_ids": torch.arange(start, start + size)[None], "use_cache": True}
            chunk = ids[order, start : start + size]
            parts.append(model(chunk, past_key_values=cache, **how).logits)
    print(f"length of the cache after ten tokens: {cache.get_seq_length()}")
    return ((torch.cat(parts, dim=1) - whole).norm() / whole.norm()).item()


kept, swapped = off_by(torch.tensor([0, 1]), 1), off_by(torch.tensor([1, 0]), 1)
chunk = off_by(torch.tensor([0, 1]), 4)
print(f"token by token off by {kept:.1e}, with swapped rows {swapped:.1e}, in a chunk {chunk:.1e}")
sys.exit(swapped > 1e-3 > kept or chunk > 1e-3 > kept)
