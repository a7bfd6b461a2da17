"""Compiled, an intermediate that was transposed in place comes back untransposed (torch 2.13.0)."""

import sys

import torch


def turn(x):
    y = x * 1
    y.swapdims_(0, 1)
    return y.expand(1, 2, 2), y


given = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
wrong = False
for name in ["uncompiled", "eager", "aot_eager"]:
    x = given.clone().requires_grad_()
    torch.compiler.reset()
    view, y = (turn if name == "uncompiled" else torch.compile(turn, backend=name))(x)
    wrong |= not (torch.equal(view[0], given.t()) and torch.equal(y, given.t()))
    print(f"{name:10} view {view[0].tolist()}, y {y.tolist()}, right is {given.t().tolist()}")
sys.exit(wrong)
