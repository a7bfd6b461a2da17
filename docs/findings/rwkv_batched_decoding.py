"""RWKV mixes the rows of a batch when it decodes token by token (transformers 5.22.2)."""

import sys

import torch
import transformers

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 64, "context_length": 64}
torch.manual_seed(0)
model = transformers.RwkvForCausalLM(transformers.RwkvConfig(**SIZES)).eval()
for parameter in model.parameters():
    torch.nn.init.normal_(parameter, std=0.2)
ids = torch.randint(1, 64, (2, 7))


def last_logits(rows):
    """Six tokens, then the seventh with the state; its shape, and its last logits."""
    with torch.no_grad():
        state = model(rows[:, :6], use_cache=True).state
        logits = model(rows[:, 6:], state=state, use_cache=True).logits
    return list(logits.shape), logits[:, -1]


with torch.no_grad():
    whole = model(ids, use_cache=False).logits[:, -1]
shape, batch = last_logits(ids)
alone = torch.cat([last_logits(row[None])[1] for row in ids])


def off_by(found):
    return ((found - whole).norm() / whole.norm()).item()


print(f"each row alone: off by {off_by(alone):.1e}")
print(f"both in a batch: off by {off_by(batch):.1e}; logits of one token of two rows: {shape}")
sys.exit(off_by(batch) > 1e-3 > off_by(alone))
