"""ProphetNet mixes up tokens, heads and streams in its positions (transformers 5.22.2)."""

import sys

import torch
import transformers

SIZES = {"hidden_size": 32, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "vocab_size": 64}
LAYERS = {"num_encoder_layers": 2, "num_decoder_layers": 2, "max_position_embeddings": 64}
HEADS = {"num_encoder_attention_heads": 4, "num_decoder_attention_heads": 4}
torch.manual_seed(0)
config = transformers.ProphetNetConfig(**SIZES, **LAYERS, **HEADS, is_encoder_decoder=False)
config.add_cross_attention = False
model = transformers.ProphetNetForCausalLM(config).eval()
for parameter in model.parameters():
    torch.nn.init.normal_(parameter, std=0.1)
ids = torch.randint(1, 64, (2, 16))


def off_by(found, expected):
    return ((found - expected).norm() / expected.norm()).item()


with torch.no_grad():
    whole = model(ids, use_cache=False).logits
    other = torch.cat([ids[:, :4], ids[:, :4].flip(1), ids[:, 8:]], dim=1)
    later = off_by(model(other, use_cache=False).logits[:, :4], whole[:, :4])
    shorter = off_by(model(ids[:, :12], use_cache=False).logits, whole[:, :12])
    cache, steps = None, []
    for token in ids.split(1, dim=1):
        result = model(token, past_key_values=cache, use_cache=True)
        cache = result.past_key_values
        steps.append(result.logits)
    decoded = off_by(torch.cat(steps, dim=1), whole)
print(f"the first 4 tokens, with other tokens behind them: off by {later:.1e}")
print(f"the first 12 tokens, without the last 4: off by {shorter:.1e}")
print(f"token by token with a cache: off by {decoded:.1e}")
sys.exit(max(later, shorter, decoded) > 1e-5)
