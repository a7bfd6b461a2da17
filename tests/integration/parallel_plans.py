"""A small model, and plans for it by hand: right ones, and wrong ones."""

from __future__ import annotations

import dataclasses

import torch
from torch import distributed, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.nn import functional

TENSOR_PLAN = {
    f"layers.{layer}.{name}": style()
    for layer in range(2)
    for name, style in (("up", ColwiseParallel), ("down", RowwiseParallel))
}


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.register_buffer("mean", torch.zeros(width))
        self.updates = True

    def forward(self, x):
        x = self.norm(x)
        if self.updates:
            self.mean.lerp_(x.detach().mean(dim=0), 0.5)
        return self.down(functional.gelu(self.up(x)))


class Model(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(2))
        self.head = nn.Linear(width, 4)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def make_model() -> nn.Module:
    return Model()


class _Spread(torch.autograd.Function):
    """The same on every rank; on the way back, the sum of all."""

    @staticmethod
    def forward(ctx, x, reduces):
        ctx.reduces = reduces
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        if ctx.reduces:
            gradient = gradient.clone()
            distributed.all_reduce(gradient)
        return gradient, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, times):
        x = x.clone()
        for _ in range(times):
            distributed.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class _Up(nn.Module):
    def __init__(self, whole, fault) -> None:
        super().__init__()
        rank, ranks = distributed.get_rank(), distributed.get_world_size()
        place = ranks - 1 - rank if fault == "swapped up" else rank
        self.weight = nn.Parameter(whole.weight.detach().chunk(ranks)[place].clone())
        self.bias = nn.Parameter(whole.bias.detach().chunk(ranks)[place].clone())
        self.reduces = fault != "no reduction back"

    def forward(self, x):
        return functional.linear(_Spread.apply(x, self.reduces), self.weight, self.bias)


class _Down(nn.Module):
    def __init__(self, whole, fault) -> None:
        super().__init__()
        rank, ranks = distributed.get_rank(), distributed.get_world_size()
        place = ranks - 1 - rank if fault == "swapped down" else rank
        self.weight = nn.Parameter(whole.weight.detach().chunk(ranks, 1)[place].clone())
        self.bias = nn.Parameter(whole.bias.detach().clone())
        self.times = {"dropped": 0, "doubled": 2}.get(fault, 1)
        self.early = fault == "bias on every rank"

    def forward(self, x):
        if self.early:
            return _Sum.apply(functional.linear(x, self.weight, self.bias), self.times)
        return _Sum.apply(functional.linear(x, self.weight), self.times) + self.bias


@dataclasses.dataclass(frozen=True)
class by_hand:  # noqa: N801  (called as a function that makes a plan)
    """Split over ranks by hand, with a fault in the second layer."""

    fault: str | None = None

    def __call__(self, model, mesh):
        fault = self.fault
        for number, layer in enumerate(model.layers):
            here = fault if number == 1 else None
            layer.up, layer.down = _Up(layer.up, here), _Down(layer.down, here)
        last, rank = model.layers[1], distributed.get_rank()
        if fault == "stale buffer":
            last.updates = False
        if fault == "stale buffer on rank 1" and rank == 1:
            last.updates = False
        if fault == "norm not reduced":
            last.norm.weight.register_hook(lambda g: g * (0.75 if rank else 0.25))
        if fault == "other seed" and rank == 1:
            nn.init.normal_(last.norm.weight.data)
        if fault == "frozen":
            model.head.weight.requires_grad_(requires_grad=False)
        if fault == "raises" and rank == 1:
            last.up.register_forward_pre_hook(_refuse)


def _refuse(module, args):
    raise ValueError("rank 1 will not")


def over_samples(fault=None):
    """Ranks with different samples, and gradients averaged by hand."""

    def plan(model, mesh):
        ranks = distributed.get_world_size()

        def reduce(parameter):
            distributed.all_reduce(parameter.grad)
            if fault != "summed":
                parameter.grad /= ranks

        for name, parameter in model.named_parameters():
            left = fault == "never" or (fault == "one left" and name == "layers.0.down.weight")
            if not left:
                parameter.register_post_accumulate_grad_hook(reduce)

    return plan
