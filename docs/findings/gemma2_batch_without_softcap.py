"""Gemma2 in continuous batching: its attention scores are not capped."""

import logging
import sys

import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, GenerationConfig
from transformers.generation import ContinuousBatchingConfig

logging.disable(logging.CRITICAL)
torch.manual_seed(0)
config = Gemma2Config(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    attn_logit_softcapping=5.0,
    attn_implementation="eager",
)
model = Gemma2ForCausalLM(config).eval()
for parameter in model.parameters():
    if parameter.dim() > 1:
        torch.nn.init.normal_(parameter, std=0.5)
prompt = [5, 17, 31, 9, 44, 23, 12]
with torch.no_grad():
    expected = model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
    settings = {"num_blocks": 16, "max_batch_tokens": 16, "auto_switch_to_flash": False}
    (answer,) = model.generate_batch(
        [prompt],
        GenerationConfig(max_new_tokens=1, do_sample=False, eos_token_id=-1),
        ContinuousBatchingConfig(**settings, return_logprobs=True),
    ).values()
token, given = answer.generated_tokens[0], answer.logprobs[0]
wanted = float(expected[token])
print(f"token {token}: log probability {given:.5f} by generate_batch, {wanted:.5f} by the model")
sys.exit(abs(given - wanted) > 1e-4)
