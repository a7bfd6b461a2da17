"""Compiled, the clone of a tensor that was written in part is that tensor itself (torch 2.13.0)."""

import sys

import torch


class Cached(torch.nn.Module):
    """Writes to its cache, and returns a copy of it."""

    def __init__(self):
        super().__init__()
        self.cache = torch.zeros(4)

    def forward(self, x):
        """Write the first half."""
        self.cache[:2] = x
        return self.cache.clone()


def is_the_cache(module, call):
    result = call(torch.ones(2))
    result.mul_(7)
    print(f"the result is the cache: {result.data_ptr() == module.cache.data_ptr()},", end=" ")
    print(f"which is {module.cache.tolist()} after the result was written")
    return result.data_ptr() == module.cache.data_ptr()


module = Cached()
print("eager:   ", end=" ")
is_the_cache(module, module)
module = Cached()
print("compiled:", end=" ")
sys.exit(is_the_cache(module, torch.compile(module)))
