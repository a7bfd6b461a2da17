"""Compiled, NaN * 0 and inf * 0 are 0: the NaN that eager reports is gone (torch 2.13.0)."""

import sys

import torch

x = torch.tensor([-1.0, 0.0, 1.0])


def scale(x):
    return x.log() * 0


eager, compiled = scale(x), torch.compile(scale)(x)
print(f"eager    {eager.tolist()}")
print(f"compiled {compiled.tolist()}")
sys.exit(bool((eager.isnan() != compiled.isnan()).any()))
