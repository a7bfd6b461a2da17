"""Model families that rounding is hard on: long scans, and what is badly conditioned on purpose."""

from __future__ import annotations

import random

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class StateSpace(nn.Module):
    """A selective scan: decays multiply along the sequence, by cumulative sums or step by step."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(f"{seed} structure")
        self.width, self.steps = draw.choice([8, 10]), draw.choice([8, 12])
        self.cumulative = draw.choice([True, False])
        self.mix = nn.Conv1d(self.width, self.width, 3, padding=2, groups=self.width)
        self.rate, self.value = (nn.Linear(self.width, self.width) for _ in range(2))
        self.out = nn.Linear(self.width, self.width)
        self.decay = nn.Parameter(torch.randn(self.width) * 0.3 - 1)

    def forward(self, x: Tensor) -> Tensor:
        """The sequence after the scan."""
        mixed = F.silu(self.mix(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))
        step = F.softplus(self.rate(mixed))
        logs, value = -step * self.decay.exp(), step * self.value(mixed)
        if self.cumulative:
            total = logs.cumsum(1)
            weights = total[:, :, None] - total[:, None]
            later = torch.ones_like(weights[0, :, :, 0]).triu(1)[None, :, :, None] > 0
            state = (weights.masked_fill(later, float("-inf")).exp() * value[:, None]).sum(2)
        else:
            states = [value[:, 0]]
            for i in range(1, x.shape[1]):
                states.append(states[-1] * logs[:, i].exp() + value[:, i])
            state = torch.stack(states, 1)
        return x + self.out(state * F.silu(x))


def state_space(seed: int):
    model = StateSpace(seed)
    return model, [torch.randn(2, model.steps, model.width)]


class IllConditioned(nn.Module):
    """Two of the ways in which correct programs lose digits, one after the other."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(f"{seed} structure")
        ways = [self.cancel, self.normalise, self.wander, self.sharpen, self.vary]
        self.ways = draw.sample(ways, 2)
        self.first, self.last = nn.Linear(12, 16), nn.Linear(16, 5)
        self.norm = nn.GroupNorm(4, 16, eps=1e-5)

    def cancel(self, x: Tensor) -> Tensor:
        """A large common part, taken away again after it was added."""
        large = 30 * (1 + x.abs().mean())
        return (x + large) - (large - 0.1)

    def normalise(self, x: Tensor) -> Tensor:
        """Groups that hardly vary around a large mean."""
        return self.norm(20 + 0.5 * torch.tanh(x))

    def wander(self, x: Tensor) -> Tensor:
        """A recurrence that pulls neighbours apart."""
        x = torch.sigmoid(x)
        for _ in range(6):
            x = 3.7 * x * (1 - x)
        return x

    def sharpen(self, x: Tensor) -> Tensor:
        """A softmax at low temperature."""
        return (12 * x).softmax(-1) * x

    def vary(self, x: Tensor) -> Tensor:
        """A variance as the mean of squares less the square of the mean."""
        spread = (x * x).mean(-1, keepdim=True) - x.mean(-1, keepdim=True).square()
        return x * torch.rsqrt(spread.abs() + 1e-3)

    def forward(self, x: Tensor) -> Tensor:
        """Five numbers for each row."""
        x = self.first(x)
        for way in self.ways:
            x = way(x)
        return self.last(x)


def ill_conditioned(seed: int):
    return IllConditioned(seed), [torch.randn(6, 12)]
