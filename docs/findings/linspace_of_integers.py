"""Compiled, torch.linspace to an integer dtype gives other integers (torch 2.13.0)."""

import sys

import torch


def space():
    return torch.linspace(4.3, 50, 50, dtype=torch.int64)


eager, compiled = space(), torch.compile(space)()
exact = torch.linspace(4.3, 50, 50, dtype=torch.float64).long()
print(f"eager         {eager[:8].tolist()} ...")
print(f"compiled      {compiled[:8].tolist()} ...")
print(f"float64, cut  {exact[:8].tolist()} ...")
print(f"eager and compiled differ in {int((eager != compiled).sum())} of 50 elements")
sys.exit(not torch.equal(eager, compiled))
