"""PaliGemma without token types: causal with a mask or eager attention, else not (5.22.2)."""

import sys

import torch
import transformers

TEXT = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 8}
IMAGE = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "image_size": 28}
torch.manual_seed(0)
config = transformers.PaliGemmaConfig(
    text_config=transformers.GemmaConfig(**TEXT, **HEADS),
    vision_config=transformers.SiglipVisionConfig(**IMAGE, num_attention_heads=4, patch_size=14),
    image_token_id=63,
    projection_dim=32,
)
model = transformers.PaliGemmaForConditionalGeneration(config).eval()
ids = torch.randint(1, 60, (2, 10))


def logits(name, **more):
    model.set_attn_implementation(name)
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False, **more).logits


def off_by(found, expected):
    return ((found - expected).norm() / expected.norm()).item()


plain = logits("sdpa")
types = {"token_type_ids": torch.zeros_like(ids)}
eager = off_by(logits("eager"), plain)
typed = off_by(logits("eager", **types), logits("sdpa", **types))
print(f"eager and sdpa: off by {eager:.1e}; with token types {typed:.1e}")
sys.exit(eager > 1e-3 > typed)
