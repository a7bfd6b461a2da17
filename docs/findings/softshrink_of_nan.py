"""Compiled, softshrink of NaN is 0; eager's is NaN (torch 2.13.0)."""

import math
import sys

import torch
from torch.nn import functional as F

x = torch.tensor([math.nan, 0.25, 2.0, -3.0])
eager, compiled = F.softshrink(x), torch.compile(F.softshrink)(x)
print(f"eager {eager.tolist()}, compiled {compiled.tolist()}")
sys.exit(not torch.equal(eager.isnan(), compiled.isnan()))
