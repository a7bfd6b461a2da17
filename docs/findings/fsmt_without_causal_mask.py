"""FSMT's decoder sees later tokens unless use_cache=False (transformers 5.22.2)."""

import sys

import torch
from transformers import FSMTConfig, FSMTForConditionalGeneration

config = FSMTConfig(
    langs=["en", "de"],
    src_vocab_size=64,
    tgt_vocab_size=64,
    d_model=32,
    encoder_layers=1,
    decoder_layers=1,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    encoder_ffn_dim=64,
    decoder_ffn_dim=64,
)
torch.manual_seed(0)
model = FSMTForConditionalGeneration(config).eval()
source, target = torch.randint(3, 64, (1, 6)), torch.randint(3, 64, (1, 6))
other = target.clone()
other[:, -1] = (target[:, -1] - 2) % 60 + 3  # another last token


def moved(**how):
    """How far the last token moves the logits of the first one."""
    first, second = (
        model(source, decoder_input_ids=ids, **how).logits[:, 0] for ids in (target, other)
    )
    return (first - second).abs().max().item()


with torch.no_grad():
    default, uncached = moved(), moved(use_cache=False)
print(f"first logits move by {default:.1e}; with use_cache=False by {uncached:.1e}")
sys.exit(default > 1e-5 > uncached)
