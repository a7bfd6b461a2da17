"""T5 with flex attention takes one row only: its position bias has a batch of 1.

Needs torch and transformers (5.22.2). Exit code 1 while the fault is there.
"""

import sys

import torch
import transformers

torch.compiler.set_stance("force_eager")  # the same, without waiting for the compiler
config = transformers.T5Config(
    vocab_size=64, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, decoder_start_token_id=0
)
torch.manual_seed(0)
model = transformers.T5ForConditionalGeneration(config).eval()
ids = torch.randint(1, 64, (2, 8))


def logits(rows: int, attention: str) -> torch.Tensor:
    """The logits of the first rows, with an attention implementation."""
    model.set_attn_implementation(attention)
    with torch.no_grad():
        return model(input_ids=ids[:rows], decoder_input_ids=ids[:rows]).logits


fails = False
for rows in (1, 2):
    expected = logits(rows, "eager")
    try:
        error = float((logits(rows, "flex_attention") - expected).abs().max())
    except Exception as raised:  # what it raises is what is shown
        print(f"{rows} row(s): {type(raised).__name__}: {str(raised).splitlines()[-1]}")
        fails = True
    else:
        print(f"{rows} row(s): flex attention differs from eager attention by {error:.1e}")
        fails = fails or error > 1e-4
sys.exit(fails)
