"""Gradient of soft_margin_loss: compiled it vanishes, eager it becomes NaN (torch 2.13.0, CPU)."""

import sys

import torch
from torch.nn import functional as F

margins = torch.tensor([5.0, 15.0, 20.0, -80.0, -100.0])


def loss(x):
    return F.soft_margin_loss(x, torch.ones_like(x), reduction="sum")


gradients = []
for function in [loss, torch.compile(loss)]:
    x = margins.clone().requires_grad_()
    function(x).backward()
    gradients.append(x.grad.double())
# d/dx log(1 + exp(-x)) = -1 / (1 + exp(x))
exact = -1 / (1 + margins.double().exp())
wrong = False
for row in zip(margins.tolist(), exact.tolist(), *(g.tolist() for g in gradients), strict=True):
    margin, right, eager, compiled = row
    wrong |= not all(abs(value / right - 1) < 1e-2 for value in (eager, compiled))
    print(f"margin {margin:g}: exact {right:.6g}, eager {eager:.6g}, compiled {compiled:.6g}")
sys.exit(wrong)
