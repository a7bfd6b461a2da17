"""Compiled, 1.0 // 0.1 is 10; eager and Python say 9 (torch 2.13.0, CPU)."""

import math
import sys

import torch

x = torch.tensor([1.0, 6.0, math.inf, -1.0])
y = torch.tensor([0.1, 0.1, 2.0, math.inf])


def divide(x, y):
    return x // y, x % y


eager, compiled = divide(x, y), torch.compile(divide)(x, y)
# Of the very float32 numbers, in Python's arithmetic.
python = [a // b for a, b in zip(x.tolist(), y.tolist(), strict=True)]
print(f"python   {python}")
for name, (quotient, rest) in [("eager", eager), ("compiled", compiled)]:
    print(f"{name:8} {quotient.tolist()}, remainders {[f'{value:.9f}' for value in rest.tolist()]}")
sys.exit(not torch.equal(eager[0].nan_to_num(7), compiled[0].nan_to_num(7)))
