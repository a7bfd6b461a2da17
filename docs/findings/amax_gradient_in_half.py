"""Compiled, the gradient of amax of a bfloat16 or float16 chain is all NaN (torch 2.13.0, CPU)."""

import sys

import torch


def largest(x):
    return (x.sin() * x.exp()).amax(0)


wrong = False
for dtype in [torch.float32, torch.bfloat16, torch.float16]:
    counts = []
    torch.manual_seed(0)
    given = torch.randn(16, 32, dtype=dtype)
    for function in [largest, torch.compile(largest)]:
        x = given.clone().requires_grad_()
        function(x).sum().backward()
        counts.append(int(x.grad.isnan().sum()))
    wrong |= counts[0] != counts[1]
    print(f"{dtype}: NaN in the gradient: eager {counts[0]}, compiled {counts[1]} of {x.numel()}")
sys.exit(wrong)
