"""A copy of a model that computes the same and rounds differently, without a compiler.

Products are two halves that are added, norms are the formula in one pass, and biases are added
afterwards. It is a right candidate for any model of modules, at the cost of eager mode.
"""

from __future__ import annotations

import copy

import torch
from torch import nn


def copy_reordered(model):
    """A copy whose linear layers, layer norms and convolutions compute in another order."""
    copied = copy.deepcopy(model)
    for module in copied.modules():
        kind = type(module)
        forward = next((f for base, f in _FORWARDS.items() if kind.forward is base.forward), None)
        if kind.__name__ == "Conv1D":  # transformers' linear layer with a transposed weight
            forward = _add_transposed_halves
        if forward is not None:
            module.__class__ = type(f"Reordered{kind.__name__}", (kind,), {"forward": forward})
    return copied


def _add_halves(self, x):
    return _multiply_halves(x, self.weight.t(), self.bias)


def _add_transposed_halves(self, x):
    return _multiply_halves(x, self.weight, self.bias)


def _multiply_halves(x, weight, bias):
    half = x.shape[-1] // 2
    product = x[..., half:] @ weight[half:] + x[..., :half] @ weight[:half]
    return product if bias is None else product + bias


def _normalise_in_one_pass(self, x):
    wide = x if x.dtype == torch.float64 else x.float()
    axes = tuple(range(-len(self.normalized_shape), 0))
    mean = wide.mean(axes, keepdim=True)
    variance = (wide * wide).mean(axes, keepdim=True) - mean * mean
    normalised = ((wide - mean) * torch.rsqrt(variance + self.eps)).to(x.dtype)
    normalised = normalised if self.weight is None else normalised * self.weight
    return normalised if self.bias is None else normalised + self.bias


def _add_bias_afterwards(self, x):
    without = self._conv_forward(x, self.weight, None)
    return without if self.bias is None else without + self.bias.view(-1, 1, 1)


def _convolve_halves(self, x):
    if self.groups > 1 or self.in_channels < 2:
        return _add_bias_afterwards(self, x)
    half = self.in_channels // 2
    parts = ((x[:, half:], self.weight[:, half:]), (x[:, :half], self.weight[:, :half]))
    last, first = (self._conv_forward(part, weight, None) for part, weight in parts)
    both = last + first
    return both if self.bias is None else both + self.bias.view(-1, 1, 1)


_FORWARDS = {
    nn.Linear: _add_halves,
    nn.LayerNorm: _normalise_in_one_pass,
    nn.Conv2d: _convolve_halves,
}
