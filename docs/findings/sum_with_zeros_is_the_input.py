"""Compiled, x + zeros is x itself: writing to the result writes to the input (torch 2.13.0)."""

import sys

import torch


def add(x):
    return x + torch.zeros(4)


x = torch.ones(4)
eager = add(x)
eager.mul_(7)
print(f"eager:    the result is x: {eager.data_ptr() == x.data_ptr()}, x is now {x.tolist()}")
compiled = torch.compile(add)(x)
compiled.mul_(7)
print(f"compiled: the result is x: {compiled.data_ptr() == x.data_ptr()}, x is now {x.tolist()}")
sys.exit(compiled.data_ptr() == x.data_ptr())
