"""Compiled gradients of smooth_l1_loss and logit are 0 where eager's are NaN (torch 2.13.0)."""

import math
import sys

import torch
from torch.nn import functional as F

x = torch.tensor([math.nan, 0.25, 0.5, 0.75])
target = torch.zeros(4)
functions = {
    "smooth_l1_loss": lambda x: F.smooth_l1_loss(x, target, reduction="sum"),
    "logit with eps": lambda x: torch.logit(x, eps=1e-3).sum(),
}
wrong = False
for name, function in functions.items():
    gradients = []
    for each in [function, torch.compile(function)]:
        leaf = x.clone().requires_grad_()
        value = each(leaf)
        value.backward()
        gradients.append(leaf.grad)
    eager, compiled = gradients
    wrong |= not torch.equal(eager.isnan(), compiled.isnan())
    print(f"{name} = {value.item()}; gradient eager {eager.tolist()}, compiled {compiled.tolist()}")
sys.exit(wrong)
