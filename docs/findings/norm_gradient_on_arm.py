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
    turned, rest = x[..., :8], x[..., 8:]
    return torch.cat((turned * cos - turned.flip(-1) * sin, rest), -1)


def normed(steps, fused, query_weight, query_bias, key_weight, key_bias):
    angles = torch.arange(16)[:, None, None].float() * steps.float()
    angles = torch.cat((angles, angles), -1)
    cos, sin = angles.cos().to(steps.dtype), angles.sin().to(steps.dtype)
    query, key, _ = fused.unbind(3)
    query = F.layer_norm(query, (16,), query_weight, query_bias)
    key = F.layer_norm(key, (16,), key_weight, key_bias)
    return rotated(query, cos, sin), rotated(key, cos, sin)


def gradients(function, dtype):
    leaves = [value.to(dtype).requires_grad_() for value in given]
    outputs = function(steps.to(dtype), *leaves)
    found = torch.autograd.grad(outputs, leaves, [value.to(dtype) for value in tangents])
    return [value.double() for value in found]


exact = gradients(normed, torch.float64)
eager = gradients(normed, torch.bfloat16)
compiled = gradients(torch.compile(normed), torch.bfloat16)
wrong = False
names = ["fused", "query_weight", "query_bias", "key_weight", "key_bias"]
for name, right, plain, other in zip(names, exact, eager, compiled, strict=True):
    error, own = ((value - right).norm() / right.norm() for value in (other, plain))
    wrong |= bool(error > 0.1)
    print(f"gradient of {name}: compiled off by {error:.1%}, eager by {own:.1%}")
    if error > 0.1:
        print("  eager   ", [round(value, 2) for value in plain.tolist()])
        print("  compiled", [round(value, 2) for value in other.tolist()])
sys.exit(wrong)
