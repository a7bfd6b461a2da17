"""A softmax that is written over its input and then summed does not compile (torch 2.13.0, CPU)."""

import sys

import torch


def weights_and_total(x):
    x.copy_(torch.softmax(x, -1))
    return x - x.sum(-1, keepdim=True)


x = torch.linspace(-1, 1, 152).reshape(8, 19)
print(f"eager    {weights_and_total(x.clone())[0, :3].tolist()}")
try:
    print(f"compiled {torch.compile(weights_and_total)(x.clone())[0, :3].tolist()}")
except Exception as error:
    print(f"compiled {type(error).__name__}: {str(error).splitlines()[0]}")
    sys.exit(1)
