"""Compiled, a view of an input that overlaps a written one is of other memory (torch 2.13.0)."""

import sys

import torch


def double(x, y):
    x.mul_(2)
    return y[:2]


def inputs():
    shared = torch.arange(8.0)
    return shared[:6], shared[2:]


eager = double(*inputs())
wrong = False
for backend in ["eager", "aot_eager", "inductor"]:
    torch.compiler.reset()
    compiled = torch.compile(double, backend=backend)(*inputs())
    wrong |= not torch.equal(eager, compiled)
    print(f"uncompiled {eager.tolist()}, backend {backend} {compiled.tolist()}")
sys.exit(wrong)
