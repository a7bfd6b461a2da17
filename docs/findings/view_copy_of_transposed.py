"""torch.view_copy of a transposed tensor works in eager and does not compile (torch 2.13.0)."""

import sys

import torch

x = torch.arange(6.0).reshape(2, 3).t()


def flat(x):
    return torch.view_copy(x, (6,))


print(f"eager    {flat(x).tolist()}")
try:
    print(f"compiled {torch.compile(flat)(x).tolist()}")
except Exception as error:
    print(f"compiled {type(error).__name__}: {str(error).splitlines()[1]}")
    sys.exit(1)
