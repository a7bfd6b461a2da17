"""Tiny models and plans: by torch's own means, and by hand with collectives."""

from __future__ import annotations

import os
import signal
import time

import torch
from torch import distributed, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

TENSOR_PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel()}


class TinyMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 8)
        self.act = nn.ReLU()
        self.down = nn.Linear(8, 6)

    def forward(self, x):
        return self.down(self.act(self.up(x)))


class Tower(nn.Module):
    """Blocks in a list, as most models have them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(TinyMLP() for _ in range(2))
        self.norm = nn.LayerNorm(6)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return self.norm(x)


def tower() -> Tower:
    torch.manual_seed(1)
    return Tower()


def batch(samples: int = 4) -> torch.Tensor:
    return torch.randn(samples, 6, generator=torch.Generator().manual_seed(2))


class SumForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        total = x.clone()
        distributed.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class SumBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        total = gradient.clone()
        distributed.all_reduce(total)
        return total


class Column(nn.Module):
    def __init__(self, whole: nn.Linear, rank: int, ranks: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(whole.weight.detach().chunk(ranks)[rank].clone())
        self.bias = nn.Parameter(whole.bias.detach().chunk(ranks)[rank].clone())

    def forward(self, x):
        return nn.functional.linear(SumBackward.apply(x), self.weight, self.bias)


class Row(nn.Module):
    def __init__(self, whole: nn.Linear, rank: int, ranks: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(whole.weight.detach().chunk(ranks, 1)[rank].clone())
        self.bias = nn.Parameter(whole.bias.detach().clone())

    def forward(self, x):
        return SumForward.apply(nn.functional.linear(x, self.weight)) + self.bias


def by_hand(model, mesh):
    """Tensor parallelism of a `TinyMLP`, written out."""
    rank, ranks = mesh.get_local_rank(), mesh.size()
    model.up = Column(model.up, rank, ranks)
    model.down = Row(model.down, rank, ranks)


class Wrong(nn.Module):
    """Does something that it must not, on rank 1 alone; on the others it waits for that rank."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def forward(self, x):
        if distributed.get_rank() == 1:
            if self.what == "raise":
                raise ValueError("no such head: 7")
            if self.what == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.what == "sleep":
                time.sleep(3)
            return x
        return SumForward.apply(x)


def raises_on_rank_1(model, mesh):
    model.act = Wrong("raise")


def dies_on_rank_1(model, mesh):
    model.act = Wrong("die")


def leaves_out_a_collective(model, mesh):
    model.act = Wrong("leave out")


def refuses_on_rank_1(model, mesh):
    if mesh.get_local_rank() == 1:
        raise KeyError("layers.9")
