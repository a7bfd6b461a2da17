"""Small models of several families, in the shapes of real ones, with an input each."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

if TYPE_CHECKING:
    from collections.abc import Callable


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 64), nn.Linear(64, 10)
        self.norm = nn.LayerNorm(64)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.norm(F.gelu(self.first(x)))).log_softmax(-1)


class Convolutional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 3, stride=2)
        self.norm, self.head = nn.GroupNorm(2, 8), nn.Linear(144, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.second(F.relu(self.norm(self.first(x))))).flatten(1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.read, self.step, self.write = nn.Linear(8, 32), nn.Linear(32, 32), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        state = 0 * self.read(x[:, 0])
        for moment in x.unbind(1):
            state = torch.tanh(self.read(moment) + 1.2 * self.step(state))
        return self.write(state)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 4)
        self.up = nn.Parameter(torch.randn(4, 16, 32) * 0.2)
        self.down = nn.Parameter(torch.randn(4, 32, 16) * 0.2)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(-1)
        hidden = F.silu(torch.einsum("bi,eij->ebj", x, self.up))
        return torch.einsum("be,ebj,ejk->bk", weights, hidden, self.down) + x


class Attentive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.norm = nn.Embedding(50, 32), nn.RMSNorm(32)
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        q, k, v = self.qkv(self.norm(x)).view(*x.shape[:2], 3, 4, 8).permute(2, 0, 3, 1, 4)
        future = torch.triu(torch.ones(x.shape[1], x.shape[1], dtype=torch.bool), 1)
        scores = (q @ k.mT / 8**0.5).masked_fill(future, float("-inf"))
        return x + self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


FAMILIES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "perceptron": (Perceptron, lambda: torch.randn(16, 32)),
    "convolutional": (Convolutional, lambda: torch.randn(4, 3, 8, 8)),
    "recurrent": (Recurrent, lambda: torch.randn(4, 4, 8)),
    "experts": (Experts, lambda: torch.randn(16, 16)),
    "attentive": (Attentive, lambda: torch.randint(0, 50, (2, 6))),
}
