"""Eager margin losses of NaN are a finite number, as if all were well (torch 2.13.0, CPU)."""

import math
import sys

import torch
from torch.nn import functional as F

x = torch.full((2, 3), math.nan)
first, several = torch.tensor([0, 1]), torch.tensor([[0, -1, 1], [1, 2, -1]])
functions = {
    "multi_margin_loss": lambda x: F.multi_margin_loss(x, first),
    "multilabel_margin_loss": lambda x: F.multilabel_margin_loss(x, several),
    "cross_entropy": lambda x: F.cross_entropy(x, first),
}
wrong = False
for name, function in functions.items():
    leaf = x.clone().requires_grad_()
    eager, compiled = function(leaf), torch.compile(function)(x)
    eager.backward()
    wrong |= not eager.isnan().item()
    print(f"{name} of NaN: eager {eager.item()}, compiled {compiled.item()}")
sys.exit(wrong)
