"""Eager nll_loss of an image in channels_last has no backward on the CPU (torch 2.13.0)."""

import sys

import torch
from torch.nn import functional as F

image = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last).requires_grad_()
target = torch.zeros(2, 4, 4, dtype=torch.int64)
print(f"loss {F.nll_loss(image, target).item():.4f}")
F.nll_loss(image.contiguous(), target).backward()
print("backward of a contiguous copy: runs")
try:
    F.nll_loss(image, target).backward()
except RuntimeError as error:
    print(f"backward in channels_last: RuntimeError: {error}")
    sys.exit(1)
print("backward in channels_last: runs")
