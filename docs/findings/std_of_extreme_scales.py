"""Compiled, std of small numbers is 0 and of large ones inf (torch 2.13.0, CPU)."""

import sys

import torch

torch.manual_seed(0)
x = torch.randn(64)


def deviation(x):
    return x.std()


compiled = torch.compile(deviation)
wrong = False
for scale in [1.0, 1e-20, 1e-30, 1e20]:
    exact = (x * scale).double().std().item()
    eager, other = deviation(x * scale).item(), compiled(x * scale).item()
    wrong |= not abs(other / exact - 1) < 1e-3
    print(f"scale {scale:g}: exact {exact:.6g}, eager {eager:.6g}, compiled {other:.6g}")
sys.exit(wrong)
