"""Compiled, linear interpolation beside infinity gives NaN; eager gives infinity (torch 2.13.0)."""

import math
import sys

import torch
from torch.nn import functional as F

x = torch.tensor([math.inf, 1.0, 2.0, 3.0]).view(1, 1, 4)


def resized(x):
    return F.interpolate(x, size=3, mode="linear")


eager, compiled = resized(x), torch.compile(resized)(x)
print(f"eager {eager.flatten().tolist()}, compiled {compiled.flatten().tolist()}")
sys.exit(not torch.equal(eager.isnan(), compiled.isnan()))
