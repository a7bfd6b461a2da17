"""Right ways to spread the model of `parallel_models` over ranks: none of them may raise an alarm.

Some are torch's own (`parallelize_module`, FSDP2, DDP), others are written by hand as Megatron
does it: plain tensors, slices by rank, collectives in the middle of autograd.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional

from quality.parallel_models import SMALL, WIDE, Core, Llama, Norm, Sizes, next_token

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.device_mesh import DeviceMesh

# --- torch's own ----------------------------------------------------------------------------------

HEADS = {f"layers.*.attention.{name}": ColwiseParallel() for name in ("q", "k", "v")}
HIDDEN = {f"layers.*.mlp.{name}": ColwiseParallel() for name in ("gate", "up")}

TENSOR = {
    **HEADS,
    **HIDDEN,
    "layers.*.attention.out": RowwiseParallel(),
    "layers.*.mlp.down": RowwiseParallel(),
}
VOCABULARY = {
    **TENSOR,
    "embed": RowwiseParallel(input_layouts=Replicate()),
    "head": ColwiseParallel(output_layouts=Replicate()),
}
_whole = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
SEQUENCE = {
    **HEADS,
    **HIDDEN,
    "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "layers.*.attention_norm": SequenceParallel(),
    "layers.*.attention": _whole,
    "layers.*.attention.out": RowwiseParallel(output_layouts=Shard(1)),
    "layers.*.mlp_norm": SequenceParallel(),
    "layers.*.mlp": _whole,
    "layers.*.mlp.down": RowwiseParallel(output_layouts=Shard(1)),
    "norm": SequenceParallel(),
    "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
}


def fsdp_over_tensor(model: Llama, mesh: DeviceMesh, *, inner: Any = TENSOR) -> None:
    """Two axes: tensor parallel inside, parameters sharded over the data axis outside."""
    parallelize_module(model, mesh["tp"], inner)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])


# --- by hand --------------------------------------------------------------------------------------


class _Paired(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Callable, back: Callable) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(gradient), None, None


@dataclasses.dataclass(frozen=True)
class Passage:
    """What becomes of a value on its way forward, and of its gradient on its way back."""

    there: Callable[[Tensor], Tensor]
    back: Callable[[Tensor], Tensor]

    def __call__(self, x: Tensor) -> Tensor:
        return _Paired.apply(x, self.there, self.back)


class Team:
    """The ranks along one axis of a mesh, and what they can do together."""

    def __init__(self, mesh: DeviceMesh, axis: str | None = None) -> None:
        self.group = mesh.get_group(axis)
        self.rank = mesh.get_local_rank(axis)
        self.size = distributed.get_world_size(self.group)

    def same(self, x: Tensor) -> Tensor:
        return x.clone()

    def total(self, x: Tensor) -> Tensor:
        summed = x.contiguous().clone()
        distributed.all_reduce(summed, group=self.group)
        return summed

    def mean(self, x: Tensor) -> Tensor:
        return self.total(x) / self.size

    def first(self, x: Tensor) -> Tensor:
        """What the first of them has."""
        taken = x.contiguous().clone()
        distributed.broadcast(taken, group_src=0, group=self.group)
        return taken

    def gathered(self, x: Tensor, dim: int) -> Tensor:
        parts = [torch.empty_like(x).contiguous() for _ in range(self.size)]
        distributed.all_gather(parts, x.contiguous(), group=self.group)
        return torch.cat(parts, dim)

    def mine(self, x: Tensor, dim: int) -> Tensor:
        return x.chunk(self.size, dim)[self.rank].contiguous()

    def my_total(self, x: Tensor, dim: int) -> Tensor:
        return self.mine(self.total(x), dim)

    # Into and out of a part that is split by channels.

    def enter(self) -> Passage:
        return Passage(self.same, self.total)

    def leave(self) -> Passage:
        return Passage(self.total, self.same)

    # The same, where tokens are split outside of it.

    def enter_tokens(self) -> Passage:
        return Passage(
            functools.partial(self.gathered, dim=1), functools.partial(self.my_total, dim=1)
        )

    def leave_tokens(self) -> Passage:
        return Passage(
            functools.partial(self.my_total, dim=1), functools.partial(self.gathered, dim=1)
        )

    def join(self, dim: int) -> Passage:
        """Parts that all ranks go on with, each the same."""
        return Passage(
            functools.partial(self.gathered, dim=dim), functools.partial(self.mine, dim=dim)
        )


class Column(nn.Module):
    """A linear layer of which each rank has some outputs."""

    def __init__(self, whole: nn.Linear, team: Team, enter: Passage, join: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(team.mine(whole.weight.detach(), 0))
        self.enter, self.join = enter, team.join(-1) if join else None

    def forward(self, x: Tensor) -> Tensor:
        y = functional.linear(self.enter(x), self.weight)
        return y if self.join is None else self.join(y)


class Row(nn.Module):
    """A linear layer of which each rank has some inputs; the bias is added once, at the end."""

    def __init__(self, whole: nn.Linear, team: Team, leave: Passage) -> None:
        super().__init__()
        self.weight = nn.Parameter(team.mine(whole.weight.detach(), 1))
        self.bias = None if whole.bias is None else nn.Parameter(whole.bias.detach().clone())
        self.leave = leave

    def forward(self, x: Tensor) -> Tensor:
        y = self.leave(functional.linear(x, self.weight))
        return y if self.bias is None else y + self.bias


class Vocabulary(nn.Module):
    """An embedding of which each rank has some rows; a token of another rank's gives zeros."""

    def __init__(self, whole: nn.Embedding, team: Team, leave: Passage) -> None:
        super().__init__()
        self.weight = nn.Parameter(team.mine(whole.weight.detach(), 0))
        self.first, self.leave = team.rank * self.weight.shape[0], leave

    def forward(self, tokens: Tensor) -> Tensor:
        local = tokens - self.first
        elsewhere = (local < 0) | (local >= self.weight.shape[0])
        rows = functional.embedding(local.masked_fill(elsewhere, 0), self.weight)
        return self.leave(rows.masked_fill(elsewhere[..., None], 0))


def megatron(model: Llama, mesh: DeviceMesh, *, tokens: bool = False) -> None:
    """Tensor parallel by hand; with `tokens`, what lies between is split along the sequence."""
    team = Team(mesh, "tp")
    enter, leave = (
        (team.enter_tokens(), team.leave_tokens()) if tokens else (team.enter(), team.leave())
    )
    for layer in model.layers:
        for name in ("q", "k", "v"):
            whole = layer.attention.get_submodule(name)
            setattr(layer.attention, name, Column(whole, team, enter))
        layer.attention.out = Row(layer.attention.out, team, leave)
        layer.mlp.gate = Column(layer.mlp.gate, team, enter)
        layer.mlp.up = Column(layer.mlp.up, team, enter)
        layer.mlp.down = Row(layer.mlp.down, team, leave)
    model.embed = Vocabulary(model.embed, team, leave)
    model.head = Column(model.head, team, enter, join=True)
    if tokens:  # each rank saw its tokens only: what it says about these weights is a part
        for module in model.modules():
            if isinstance(module, Norm):
                module.weight.register_hook(team.total)
            if isinstance(module, Row) and module.bias is not None:
                module.bias.register_hook(team.total)


megatron_tokens = functools.partial(megatron, tokens=True)


def megatron_late(model: Llama, mesh: DeviceMesh) -> None:
    """The last layer of a block gives terms, and the block adds them up."""
    megatron(model, mesh)
    team = Team(mesh, "tp")
    for layer in model.layers:
        layer.mlp.down.leave = Passage(team.same, team.same)
        layer.mlp.leave = team.leave()
        layer.mlp.register_forward_hook(lambda mlp, _, output: mlp.leave(output))


def megatron_over_data(model: Llama, mesh: DeviceMesh) -> None:
    """Two axes by hand: gradients are averaged over the data axis as they come."""
    megatron(model, mesh)
    team = Team(mesh, "dp")
    for parameter in model.parameters():
        parameter.register_hook(team.mean)


class GatheredCore(Core):
    """Attention of this rank's queries to the keys of all ranks."""

    def __init__(self, whole: Core, team: Team, first: int) -> None:
        super().__init__(whole.group)
        self.first, self.join = first, team.enter_tokens()

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return super().forward(q, self.join(k), self.join(v))


def context(model: Llama, mesh: DeviceMesh) -> None:
    """Each rank has all weights and a part of every sequence."""
    team = Team(mesh, "cp")
    length = model.layers[0].attention.rotation.cos.shape[0]
    first = team.rank * length // team.size
    for layer in model.layers:
        layer.attention.rotation.first = first
        layer.attention.core = GatheredCore(layer.attention.core, team, first)
    for parameter in model.parameters():
        parameter.register_hook(team.total)
    join = team.join(1)
    model.register_forward_pre_hook(lambda _, args: (team.mine(args[0], 1),))
    model.register_forward_hook(lambda _, __, output: join(output))


# --- the corpus -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Case:
    """A model under a plan.

    Attributes:
        mesh: axis -> extent.
        split: the axis whose ranks have different samples.
        own_loss: the model computes its loss itself.
    """

    name: str
    plan: Any
    mesh: dict[str, int]
    split: str | None = None
    sizes: Sizes = SMALL
    own_loss: bool = False
    loss: Callable[..., Tensor] | None = next_token
    optimizer: Callable[..., Any] | None = None

    def __str__(self) -> str:
        return self.name


def _over(name: str, plan: Any, axis: str, *, data: bool = False) -> list[Case]:
    split = axis if data else None
    return [
        Case(f"{name}, {ranks} ranks", plan, {axis: ranks}, split, WIDE if ranks > 2 else SMALL)
        for ranks in (2, 4)
    ]


BIASED = dataclasses.replace(SMALL, biased=True)
TRACKED = dataclasses.replace(SMALL, tracked=True)

RIGHT = [
    *_over("tensor parallel", TENSOR, "tp"),
    *_over("vocabulary parallel", VOCABULARY, "tp"),
    *_over("sequence parallel", SEQUENCE, "tp"),
    *_over("fsdp", "fsdp", "dp", data=True),
    *_over("ddp", "ddp", "dp", data=True),
    Case("fsdp over tensor parallel, 2 x 2 ranks", fsdp_over_tensor, {"dp": 2, "tp": 2}, "dp"),
    *_over("by hand", megatron, "tp"),
    *_over("by hand, tokens split", megatron_tokens, "tp"),
    *_over("context parallel", context, "cp"),
    Case("by hand, blocks add up", megatron_late, {"tp": 2}),
    Case("by hand over data, 2 x 2 ranks", megatron_over_data, {"dp": 2, "tp": 2}, "dp"),
    Case("by hand, biased", megatron, {"tp": 2}, sizes=BIASED),
    Case("by hand, tokens split, biased", megatron_tokens, {"tp": 2}, sizes=BIASED),
    Case("tensor parallel, biased", TENSOR, {"tp": 2}, sizes=BIASED),
    Case("tensor parallel, a buffer that follows the data", TENSOR, {"tp": 2}, sizes=TRACKED),
    Case("ddp, the model's own loss", "ddp", {"dp": 2}, "dp", own_loss=True, loss=None),
]
