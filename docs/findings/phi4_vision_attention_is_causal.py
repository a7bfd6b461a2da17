"""Phi-4-multimodal sees images causally where no mask is made (transformers 5.22.2)."""

import sys

import torch
import transformers

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "image_size": 56, "patch_size": 14}
torch.manual_seed(0)
config = transformers.Phi4MultimodalVisionConfig(**SIZES, **HEADS)
model = transformers.Phi4MultimodalVisionModel(config).eval()
for parameter in model.parameters():
    if parameter.dim() > 1:
        torch.nn.init.normal_(parameter, std=0.1)
pixels = torch.randn(1, 3, 56, 56)
other = pixels.clone()
other[..., 42:, 42:] += 1.0  # the last of 16 patches


def first_patch(run, pixels):
    with torch.no_grad():
        return run(pixel_values=pixels).last_hidden_state[:, 0]


def sees_the_last_patch(run):
    """Whether the last patch has an influence on the first."""
    return bool((first_patch(run, other) - first_patch(run, pixels)).abs().max() > 1e-6)


plain, reference = sees_the_last_patch(model), first_patch(model, pixels)
compiled = sees_the_last_patch(torch.compile(model, backend="eager"))
model.set_attn_implementation("eager")
matrix, by_matrix = sees_the_last_patch(model), first_patch(model, pixels)
print(f"the first patch sees the last: sdpa {plain}, sdpa compiled {compiled}, eager {matrix}")
print(f"sdpa is off by {((reference - by_matrix).norm() / by_matrix.norm()).item():.1e}")
sys.exit(matrix and compiled and not plain)
