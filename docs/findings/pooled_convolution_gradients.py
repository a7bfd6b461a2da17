"""Compiled gradients of a pooled convolution are off by hundreds (torch 2.13.0, CPU)."""

import sys

import torch
from torch import nn
from torch.nn import functional as F

torch.set_num_threads(2)  # With one thread another loop is generated, which is right.
torch.manual_seed(0)
shapes = [(2, 2, 5, 7), (2, 2, 3, 3), (2,)]
given = [torch.randn(shape) for shape in shapes]


def choose(x, weight, bias):
    y = F.interpolate(x, scale_factor=(1.5, 1.25), mode="bilinear", align_corners=False)
    convolved = F.conv2d(y[:, :, 1:7, 1:8], weight, bias, padding=1)
    pooled = F.max_pool2d(convolved, kernel_size=3, stride=1, padding=1)
    return torch.where(convolved > pooled.mean((2, 3), keepdim=True), convolved, pooled)


def gradients(function, dtype):
    inputs = [nn.Parameter(value.to(dtype)) for value in given]
    function(*inputs).square().sum().backward()
    return [value.grad.double() for value in inputs]


exact = gradients(choose, torch.float64)
eager = gradients(choose, torch.float32)
compiled = gradients(torch.compile(choose), torch.float32)
wrong = False
for name, right, plain, other in zip(["x", "weight", "bias"], exact, eager, compiled, strict=True):
    error, own = (other - right).abs().max().item(), (plain - right).abs().max().item()
    wrong |= error > 1e-2 * right.abs().max().item()
    print(f"gradient of {name}: compiled off by {error:.3g}, eager by {own:.3g}")
sys.exit(wrong)
