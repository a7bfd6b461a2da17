"""With a memory budget, compiled dropout draws another mask in the backward (torch 2.13.0)."""

import sys

import torch
from torch import nn
from torch._functorch import config
from torch.nn import functional as F

torch.manual_seed(0)
weight = torch.randn(32, 32)


def drop(x):
    return F.dropout((x @ weight).sin(), 0.5, training=True).sin()


def mixed(budget):
    """How many elements that the forward dropped get a gradient, or the other way round."""
    hidden = nn.Parameter(torch.randn(32, 32))
    torch.compiler.reset()
    with config.patch(activation_memory_budget=budget):
        y = torch.compile(drop)(hidden)
        y.sum().backward()
    # Back through the product, and the derivative of sin is nowhere exactly zero here.
    flowing = torch.linalg.solve(weight.T.double(), hidden.grad.double(), left=False)
    return int(((flowing.abs() > 1e-3) != (y != 0)).sum())


few, most = mixed(0.5), mixed(1.0)
print(f"activation_memory_budget=0.5: {few} of 1024 elements have another mask in the backward")
print(f"activation_memory_budget=1.0: {most} of 1024")
sys.exit(few > 100)
