"""Small models for the readers of graphs, and what torch itself says about their graphs."""

from __future__ import annotations

import operator

import torch
from torch import nn


class Block(nn.Module):
    """A transformer block: a tuple, a lifted constant, a buffer that is written to."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.qkv = nn.Linear(8, 24)
        self.out = nn.Linear(8, 8, bias=False)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("scale", torch.full((8,), 0.5), persistent=False)

    def forward(self, x, mask=None):
        self.count.add_(1)
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, t, 2, 12).transpose(1, 2).chunk(3, dim=-1)
        y = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=True)
        y = self.out(y.transpose(1, 2).reshape(b, t, d)) * self.scale
        return y + x, x[:, torch.tensor([0, 1])].masked_fill(x[:, :2] > 0, float("-inf"))


class Cnn(nn.Module):
    """A convolutional network with modules of every plain kind."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.tail = nn.Sequential(nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25), nn.Flatten())
        self.head = nn.Linear(64, 5)

    def forward(self, x):
        low, high = (self.head(self.tail(self.norm(self.conv(x)))) * 2 + 1).split([2, 3], dim=-1)
        return low.softmax(-1)[:, 0] + high.sum(-1)


class Branching(nn.Module):
    """A condition, and calls without gradients."""

    def forward(self, x):
        with torch.no_grad():
            z = x * 3
        return torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x.sin() - 1, (x,)) + z


class Counting(nn.Module):
    """A size that depends on values."""

    def forward(self, x):
        return (x.nonzero().float() * 2).sum()


def tensors_of(value):
    """Shape and dtype of every tensor of a node, sizes as numbers."""
    if isinstance(value, torch.Tensor):
        return [(tuple(_number(size) for size in value.shape), value.dtype)]
    if isinstance(value, (list, tuple)):
        return [found for one in value for found in tensors_of(one)]
    return []


def _number(size):
    return size if isinstance(size, int) else size.node.hint


def calls_of(program):
    """For each call of an exported program by name, what it calls and what it returns."""
    found = {}
    for node in program.graph.nodes:
        if node.op == "call_function":
            getitem = node.target is operator.getitem
            name = "operator.getitem" if getitem else str(node.target)
            found[node.name] = (name, tensors_of(node.meta["val"]))
    return found
