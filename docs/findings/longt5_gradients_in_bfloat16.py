"""Compiled for a GPU in bfloat16, LongT5's encoder has NaN gradients, eager none (torch 2.11)."""

import sys

import torch
from transformers import LongT5Config, LongT5EncoderModel

SIZES = {"vocab_size": 256, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}


def count_nan(compiled, device):
    torch.manual_seed(0)
    model = LongT5EncoderModel(LongT5Config(**SIZES, dropout_rate=0.0)).to(device, torch.bfloat16)
    tokens = torch.randint(2, 256, (2, 16)).to(device)
    mask = torch.ones_like(tokens)
    mask[1, 13:] = 0  # the second row is padded
    call = torch.compile(model) if compiled else model
    hidden = call(input_ids=tokens, attention_mask=mask).last_hidden_state
    hidden.backward(torch.randn(hidden.shape).to(hidden))
    gradients = [one.grad for one in model.parameters() if one.grad is not None]
    wrong = sum(bool(one.isnan().any()) for one in gradients)
    print(f"{'compiled' if compiled else 'eager'}: NaN in {wrong} of {len(gradients)} gradients,")
    print(f"  the output is finite: {bool(hidden.isfinite().all())}")
    return wrong


if not torch.cuda.is_available():
    sys.exit(print("needs a CUDA device: nothing was tried"))
eager, compiled = count_nan(False, "cuda"), count_nan(True, "cuda")
sys.exit(compiled > eager)
