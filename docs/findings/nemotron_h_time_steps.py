"""NemotronH decodes with other time steps than it prefills with (transformers 5.22.2)."""

import sys

import torch
from transformers import NemotronHConfig, NemotronHForCausalLM

config = NemotronHConfig(
    layers_block_type=["linear_attention", "full_attention"],
    hidden_size=32,
    mamba_num_heads=4,
    mamba_head_dim=16,
    ssm_state_size=8,
    n_groups=1,
    num_attention_heads=4,
    num_key_value_heads=4,
    head_dim=8,
    vocab_size=64,
)


def off_by(bias):
    torch.manual_seed(0)
    model = NemotronHForCausalLM(config).double().eval()
    ids = torch.randint(3, 64, (1, 12))
    with torch.no_grad():
        model.model.layers[0].mixer.in_proj.weight.mul_(30)  # as large as after training
        model.model.layers[0].mixer.dt_bias.fill_(bias)
        whole = model(ids, use_cache=False).logits
        cache = model(ids[:, :1], use_cache=True).past_key_values
        rest = [model(token, past_key_values=cache).logits for token in ids[:, 1:].split(1, dim=1)]
    return ((torch.cat(rest, dim=1) - whole[:, 1:]).norm() / whole.norm()).item()


long, short = off_by(9.0), off_by(-9.0)  # the bias of the time steps
print(f"token by token, off by {long:.1e} with long time steps, {short:.1e} with short ones")
sys.exit(short > 1e-6 > long)
