"""The float64 gradient of hardsigmoid has only float32 precision (torch 2.13.0, CPU)."""

import sys

import torch
from torch.nn import functional as F

x = torch.zeros(8, dtype=torch.float64, requires_grad=True)
F.hardsigmoid(x).sum().backward()
error = (x.grad[0] - 1 / 6).abs().item()
print(f"d/dx hardsigmoid(0) = {x.grad[0].item():.17f}, 1/6 = {1 / 6:.17f}, off by {error:.2g}")
sys.exit(error > 1e-12)
