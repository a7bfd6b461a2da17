"""Eager gelu of +inf is NaN, of 3e38 it is inf; x times Phi(x) is x there (torch 2.13.0, CPU)."""

import math
import sys

import torch
from torch.nn import functional as F

x = torch.tensor([math.inf, 3e38, 1e30])
eager, compiled = F.gelu(x), torch.compile(F.gelu)(x)
print(f"x        {x.tolist()}")
print(f"eager    {eager.tolist()}")
print(f"compiled {compiled.tolist()}")
sys.exit(not torch.equal(eager, x))
