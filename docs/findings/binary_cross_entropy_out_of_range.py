"""Compiled binary_cross_entropy takes probabilities beyond [0, 1] (torch 2.13.0, CPU)."""

import sys

import torch
from torch.nn import functional as F

probability, target = torch.tensor([0.5, 0.9]), torch.tensor([2.0, -1.0])
try:
    print(f"eager    {F.binary_cross_entropy(probability, target).item()}")
except RuntimeError as error:
    print(f"eager    RuntimeError: {error}")
try:
    value = torch.compile(F.binary_cross_entropy)(probability, target).item()
except RuntimeError as error:
    print(f"compiled RuntimeError: {str(error).splitlines()[0]}")
    sys.exit(0)
print(f"compiled {value}")
sys.exit(1)
