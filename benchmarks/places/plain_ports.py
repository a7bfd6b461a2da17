"""Small models of operators that the others lack: see `plain.py`.

One statement per line, so that a line is one place. Their names were chosen so that the hash puts
them in the measured half.
"""

# ruff: noqa: D102  (every model has a forward and inputs)

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class Activations(nn.Module):
    """Activations that few models have, one behind another."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(10, 14)
        self.second = nn.Linear(14, 14)
        self.last = nn.Linear(14, 5)

    def forward(self, x: Tensor) -> Tensor:
        hidden = functional.mish(2.0 * self.first(x))
        other = functional.selu(self.second(hidden))
        small = functional.softsign(other) + functional.celu(hidden, 0.5)
        gate = functional.hardsigmoid(3.0 * small)
        bound = functional.relu6(4.0 * other) - functional.tanhshrink(hidden)
        rest = functional.softshrink(bound, 0.3) * gate
        grown = torch.log1p(rest.abs()) + torch.expm1(0.5 * small)
        return self.last(functional.elu(grown, 0.7)) + functional.logsigmoid(self.last(rest))

    @staticmethod
    def inputs() -> tuple[Tensor, ...]:
        return (torch.randn(6, 10),)


class Blender(nn.Module):
    """Operators of two and three tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(9, 9)
        self.right = nn.Linear(9, 9)
        self.last = nn.Linear(9, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        first = self.left(x)
        second = self.right(y)
        share = torch.sigmoid(second)
        mixed = torch.lerp(first, second, share)
        more = torch.addcmul(mixed, first, second, value=0.5)
        less = torch.addcdiv(more, first, share + 0.5, value=0.3)
        angle = torch.atan2(first, second)
        length = torch.hypot(first, second)
        both = torch.logaddexp(less, angle)
        signed = torch.copysign(length, less)
        rest = torch.fmod(both * 3.0, 2.0)
        return self.last(signed + rest)

    @staticmethod
    def inputs() -> tuple[Tensor, ...]:
        return torch.randn(5, 9), torch.randn(5, 9)


class Prefixes(nn.Module):
    """What runs along an axis."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(8, 8)
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.mix(x)
        kept = torch.cumprod(torch.sigmoid(hidden), 1)
        best = torch.cummax(hidden, 1)[0]
        total = torch.logcumsumexp(hidden, 1)
        step = torch.diff(total, dim=1, prepend=torch.zeros_like(total[:, :1]))
        turned = torch.flip(best - step, [1])
        whole = torch.prod(kept + 0.5, 1, keepdim=True)
        return self.last(turned * whole)

    @staticmethod
    def inputs() -> tuple[Tensor, ...]:
        return (torch.randn(3, 6, 8),)


class Bags(nn.Module):
    """Bags of words, nodes of a graph that are added up, and chosen places."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(24, 8))
        self.mix = nn.Linear(8, 8)

    def forward(self, words: Tensor, starts: Tensor, nodes: Tensor) -> Tensor:
        bags = functional.embedding_bag(words, self.table, starts, mode="mean")
        sent = self.mix(bags)[nodes] + self.table[: nodes.shape[0]]
        empty = torch.zeros(5, 8)
        total = torch.index_add(empty, 0, nodes, sent)
        where = nodes[:, None].expand(-1, 8)
        again = torch.scatter_add(empty, 0, where, sent * 0.5)
        largest = torch.scatter_reduce(empty, 0, where, sent, "amax", include_self=False)
        mean = torch.scatter_reduce(empty, 0, where, sent, "mean", include_self=False)
        order = torch.argsort(total, 0, descending=True)
        return torch.take_along_dim(largest - mean, order, 0) + again

    @staticmethod
    def inputs() -> tuple[Tensor, ...]:
        words = torch.randint(0, 24, (17,))
        return words, torch.tensor([0, 3, 4, 9, 13]), torch.tensor([0, 1, 1, 2, 3, 4, 4, 4, 2])


class Distances(nn.Module):
    """Distances, products with a summand, and what is in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(6, 6)
        self.pair = nn.Bilinear(6, 6, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        first = self.mix(x)
        far = torch.cdist(first, y)
        near = torch.exp(-far)
        moved = torch.baddbmm(first, near, y, beta=0.5, alpha=2.0)
        middle = torch.median(moved, 1, keepdim=True)[0]
        turned = torch.linalg.cross(moved[..., :3], middle[..., 3:].expand(-1, 7, 3))
        length = functional.pairwise_distance(moved, first, keepdim=True)
        joint = self.pair(moved, first)
        outer = torch.outer(length[0, :, 0], near[0, 0])
        return torch.cat([turned * length, joint], -1).sum(-1) + outer.sum()

    @staticmethod
    def inputs() -> tuple[Tensor, ...]:
        return torch.randn(2, 7, 6), torch.randn(2, 7, 6)


class Volume(nn.Module):
    """Images that are enlarged, pooled and normalised over their channels."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.deep = nn.Conv3d(1, 2, (2, 3, 3), padding=(0, 1, 1))
        self.along = nn.Conv1d(8, 6, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        image = self.first(x)
        level = functional.local_response_norm(image, 3, alpha=0.5, k=1.0)
        large = functional.interpolate(level, scale_factor=2.0, mode="bilinear")
        small = functional.adaptive_max_pool2d(large, 4)
        coarse = functional.adaptive_avg_pool2d(large, 4)
        deep = self.deep((small - coarse).unsqueeze(1)).flatten(1, 2)
        line = functional.avg_pool1d(deep[:, :8].flatten(2), 4)
        blocks = functional.pixel_unshuffle(level, 2)
        nearest = functional.interpolate(blocks, size=(5, 5), mode="nearest")
        return self.along(line).sum(-1) + nearest.amax((2, 3))[:, :6]

    @staticmethod
    def inputs() -> tuple[Tensor, ...]:
        return (torch.randn(2, 3, 6, 6),)


class Losses(nn.Module):
    """Losses that few models have."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Linear(8, 4)
        self.scores = nn.Linear(8, 5)
        self.weight = nn.Parameter(torch.tensor([0.2, 1.0, 0.5, 2.0, 1.3]), requires_grad=False)

    def forward(self, x: Tensor, wanted: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        value = self.value(x)
        flat = functional.l1_loss(value, wanted)
        round_ = functional.huber_loss(value, wanted, delta=0.5)
        chance = functional.binary_cross_entropy(torch.sigmoid(value), torch.sigmoid(wanted))
        count = functional.poisson_nll_loss(value, wanted.abs())
        spread = functional.gaussian_nll_loss(value, wanted, torch.exp(0.3 * value))
        scores = self.scores(x)
        weighed = functional.cross_entropy(scores, labels, self.weight)
        margin = functional.margin_ranking_loss(value[:, 0], value[:, 1], wanted[:, 0].sign(), 0.4)
        apart = functional.triplet_margin_loss(value, wanted, value.roll(1, 0))
        soft = functional.soft_margin_loss(value, wanted.sign())
        return flat, round_, chance, count, spread, weighed, margin, apart, soft

    @staticmethod
    def inputs() -> tuple[Tensor, ...]:
        return torch.randn(7, 8), torch.randn(7, 4), torch.randint(0, 5, (7,))


MODELS = {
    one.__name__: one
    for one in (Activations, Blender, Prefixes, Bags, Distances, Volume, Losses)
}  # fmt: skip
