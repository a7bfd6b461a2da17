"""DeepSeek-V4: beams get compressed entries of others, and padding is in them (5.22.2)."""

import sys

import torch
import transformers

KINDS = ["compressed_sparse_attention", "heavily_compressed_attention"]
SIZES = {"hidden_size": 32, "moe_intermediate_size": 32, "vocab_size": 64, "q_lora_rank": 16}
HEADS = {"num_attention_heads": 4, "head_dim": 16, "o_groups": 2, "o_lora_rank": 8}
INDEX = {"index_n_heads": 2, "index_head_dim": 16, "index_topk": 4, "num_hash_layers": 0}
LAYERS = {"num_hidden_layers": 2, "layer_types": KINDS, "compress_rates": dict.fromkeys(KINDS, 4)}
torch.manual_seed(0)
config = transformers.DeepseekV4Config(**SIZES, **HEADS, **INDEX, **LAYERS, n_routed_experts=8)
model = transformers.DeepseekV4ForCausalLM(config).eval()
for parameter in model.parameters():
    torch.nn.init.normal_(parameter, std=0.1)
ids = torch.randint(1, 64, (2, 14))


def off_by(order):
    """Ten tokens, the rows in another order, then the other four; against one plain call."""
    whole = model(ids[order], use_cache=False).logits[:, 10:]
    cache = model(ids[:, :10], use_cache=True).past_key_values
    cache.reorder_cache(order)  # what beam search does after each step
    how = {"past_key_values": cache, "use_cache": True}
    steps = [model(token, **how).logits for token in ids[order, 10:].split(1, dim=1)]
    return ((torch.cat(steps, dim=1) - whole).norm() / whole.norm()).item()


with torch.no_grad():
    kept, swapped = off_by(torch.tensor([0, 1])), off_by(torch.tensor([1, 0]))
    mask = (torch.arange(17) >= 3).long().expand(2, -1)
    more = {"attention_mask": mask, "position_ids": (mask.cumsum(dim=1) - 1).clamp(min=0)}
    longer, whole = torch.nn.functional.pad(ids, (3, 0)), model(ids, use_cache=False).logits
    padded = model(longer, **more, use_cache=False).logits[:, 3:]
    left = ((padded - whole).norm() / whole.norm()).item()
print(f"decoded {kept:.1e}, with swapped rows {swapped:.1e}, padded on the left {left:.1e}")
sys.exit(max(swapped, left) > 1e-3 > kept)
