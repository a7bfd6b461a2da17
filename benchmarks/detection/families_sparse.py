"""Model families that pick and gather: experts, embeddings, graphs."""

from __future__ import annotations

import random

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Experts(nn.Module):
    """Each token goes to its best experts, by gathered weights or by a mask over all of them."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(f"{seed} structure")
        self.many, self.best = draw.choice([4, 6]), draw.choice([1, 2])
        self.gathers = draw.choice([True, False])
        self.width, hidden = draw.choice([12, 16]), draw.choice([20, 24])
        self.gate = nn.Linear(self.width, self.many)
        self.up = nn.Parameter(torch.randn(self.many, self.width, hidden) * 0.3)
        self.down = nn.Parameter(torch.randn(self.many, hidden, self.width) * 0.3)
        self.norm = nn.LayerNorm(self.width)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The tokens after their experts, and who was asked."""
        inner = self.norm(x)
        shares, chosen = self.gate(inner).softmax(-1).topk(self.best, -1)
        shares = shares / shares.sum(-1, keepdim=True)
        if self.gathers:
            hidden = F.silu(torch.einsum("ti,tkij->tkj", inner, self.up[chosen]))
            mixed = torch.einsum("tk,tkj,tkji->ti", shares, hidden, self.down[chosen])
        else:
            weights = (
                torch.zeros_like(shares[:, :1]).repeat(1, self.many).scatter(1, chosen, shares)
            )
            hidden = F.silu(torch.einsum("ti,eij->etj", inner, self.up))
            mixed = (torch.bmm(hidden, self.down) * weights.t()[:, :, None]).sum(0)
        return x + mixed, chosen


def experts(seed: int):
    model = Experts(seed)
    return model, [torch.randn(9, model.width)]


class Recommender(nn.Module):
    """Bags of categories and a few numbers, crossed with each other: will they click?"""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(f"{seed} structure")
        width = draw.choice([8, 12])
        mode = draw.choice(["sum", "mean"])
        self.bags = nn.ModuleList(nn.EmbeddingBag(30, width, mode=mode) for _ in range(3))
        self.numbers = nn.Linear(5, width)
        above, below = torch.triu_indices(4, 4, offset=1)
        self.register_buffer("pairs", above * 4 + below)
        self.first, self.last = nn.Linear(width + 6, 16), nn.Linear(16, 1)
        self.squash = draw.choice([F.relu, torch.tanh])

    def forward(self, numbers: Tensor, kinds: Tensor, clicked: Tensor) -> tuple[Tensor, Tensor]:
        """Probabilities and the loss."""
        dense = F.relu(self.numbers(torch.log1p(numbers.abs())))
        bags = [bag(kinds[:, i]) for i, bag in enumerate(self.bags)]
        features = torch.stack([dense, *bags], 1)
        crossed = torch.bmm(features, features.transpose(1, 2)).flatten(1)[:, self.pairs]
        hidden = self.squash(self.first(torch.cat([dense, crossed], 1)))
        score = self.last(hidden).squeeze(-1)
        return score.sigmoid(), F.binary_cross_entropy_with_logits(score, clicked)


def recommender(seed: int):
    kinds = torch.randint(0, 30, (8, 3, 4))
    clicked = (torch.rand(8) < 0.5).float()
    return Recommender(seed), [torch.randn(8, 5), kinds, clicked]


class Messages(nn.Module):
    """A graph network: edges carry messages, nodes add them up, a readout attends."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(f"{seed} structure")
        width = draw.choice([10, 14])
        self.reduce = draw.choice(["sum", "mean", "amax"])
        self.send, self.update = nn.Linear(2 * width, width), nn.Linear(2 * width, width)
        self.enter, self.read = nn.Linear(6, width), nn.Linear(width, 2)

    def forward(self, nodes: Tensor, source: Tensor, target: Tensor) -> Tensor:
        """Two rounds, then one pair of numbers for the whole graph."""
        x = torch.tanh(self.enter(nodes))
        for _ in range(2):
            sent = F.elu(self.send(torch.cat([x[source], x[target]], -1)))
            place = target[:, None].expand_as(sent)
            got = torch.zeros_like(x).scatter_reduce(0, place, sent, self.reduce)
            x = x + torch.tanh(self.update(torch.cat([x, got], -1)))
        return (x.softmax(0) * x).sum(0) @ self.read.weight.t() + self.read.bias


def messages(seed: int):
    source, target = torch.randint(0, 9, (2, 20))
    return Messages(seed), [torch.randn(9, 6), source, target]
