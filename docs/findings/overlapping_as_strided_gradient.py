"""Compiled, a returned as_strided view of overlapping windows has a wrong gradient (torch 2.13)."""

import sys

import torch

factors = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])


def windows(x):
    return x.clone().as_strided((3, 2), (1, 1))


# x[1] is in two windows, times 2 and times 3; x[2] likewise, times 4 and times 5.
right = torch.tensor([1.0, 5.0, 9.0, 6.0])
wrong = False
for name in ["uncompiled", "eager", "aot_eager"]:
    x = torch.arange(4.0).requires_grad_()
    torch.compiler.reset()
    function = windows if name == "uncompiled" else torch.compile(windows, backend=name)
    (function(x) * factors).sum().backward()
    wrong |= not torch.equal(x.grad, right)
    print(f"{name:10} {x.grad.tolist()}, right is {right.tolist()}")
sys.exit(wrong)
