"""Compiled on ARM with GCC, the gradient of a norm's weight is half wrong (torch 2.13.0, CPU)."""

import sys

import torch
from torch.nn import functional as F

torch.manual_seed(0)
SHAPES = [(2, 16, 4, 3, 16), (16,), (16,), (16,), (16,)]  # fused queries, keys, values; norms
given = [torch.randn(shape).bfloat16() for shape in SHAPES]
tangents = [torch.randn(2, 16, 4, 16).bfloat16() for _ in range(2)]
steps = torch.tensor([1.0, 0.1, 0.01, 0.001]).bfloat16()


def rotated(x, cos, sin):
    return torch.cat((x[..., :8] * cos - x[..., :8].flip(-1) * sin, x[..., 8:]), -1)


def normed(steps, fused, query_weight, query_bias, key_weight, key_bias):
    angles = torch.arange(16)[:, None, None].float() * torch.cat((steps, steps)).float()
    cos, sin = angles.cos().to(steps.dtype), angles.sin().to(steps.dtype)
    query, key, _ = fused.unbind(3)
    query = F.layer_norm(query, (16,), query_weight, query_bias)
    key = F.layer_norm(key, (16,), key_weight, key_bias)
    return rotated(query, cos, sin), rotated(key, cos, sin)


def gradients(function, dtype):
    leaves = [value.to(dtype).requires_grad_() for value in given]
    outputs = function(steps.to(dtype), *leaves)
    found = torch.autograd.grad(outputs, leaves, [value.to(dtype) for value in tangents])
    return found[1].double()


exact, eager = gradients(normed, torch.float64), gradients(normed, torch.bfloat16)
compiled = gradients(torch.compile(normed), torch.bfloat16)
error, own = ((found - exact).norm() / exact.norm() for found in (compiled, eager))
print(f"gradient of query_weight: compiled off by {error:.1%}, eager by {own:.1%}")
sys.exit(bool(error > 0.1))
