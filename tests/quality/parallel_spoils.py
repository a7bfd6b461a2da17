"""Ways to spoil a parallel model once a right plan was applied: one fault each.

A fault is a function of a module and the ranks it is shared with.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from quality.parallel_models import Tracker, next_token
from quality.parallel_plans import Column, Passage, Row, Team, Vocabulary

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.device_mesh import DeviceMesh


@dataclasses.dataclass(frozen=True)
class Spoiled:
    """A right plan, and then what spoils it."""

    plan: Any
    spoil: Callable[[nn.Module, DeviceMesh], None]

    def __call__(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        if self.plan == "ddp":
            model = DistributedDataParallel(model)
        elif self.plan == "fsdp":
            for layer in model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
        elif isinstance(self.plan, dict):
            parallelize_module(model, mesh, self.plan)
        else:
            self.plan(model, mesh)
        self.spoil(model, mesh)
        return model


def at(path: str, spoil: Callable[[Any, Team], None]) -> Callable[[nn.Module, DeviceMesh], None]:
    """Spoil one module."""
    return functools.partial(_spoil_one, path, spoil)


def _spoil_one(path: str, spoil: Any, model: nn.Module, mesh: DeviceMesh) -> None:
    spoil(model.get_submodule(path), Team(mesh, (mesh.mesh_dim_names or ("",))[-1]))


def also_on(rank: int, spoil: Callable[[Any, Team], None]) -> Callable[[Any, Team], None]:
    return functools.partial(_spoil_on, rank, spoil)


def _spoil_on(rank: int, spoil: Any, module: Any, team: Team) -> None:
    if team.rank == rank:
        spoil(module, team)


# --- reductions -----------------------------------------------------------------------------------


class EarlyBiasRow(Row):
    """Its bias is added before ranks are: as often as there are ranks."""

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(functional.linear(x, self.weight, self.bias))


def bias_on_every_rank(row: Row, team: Team) -> None:
    row.__class__ = EarlyBiasRow


def nothing_reduced(row: Row, team: Team) -> None:
    row.leave = Passage(team.same, team.same)


def nothing_reduced_back(block: nn.Module, team: Team) -> None:
    for column in _columns(block):
        column.enter = Passage(team.same, team.same)


def nothing_reduced_back_to_tokens(column: Column, team: Team) -> None:
    """Each rank gives its tokens what it knows itself."""
    column.enter = Passage(column.enter.there, functools.partial(team.mine, dim=1))


def doubled_back(module: nn.Module, team: Team) -> None:
    """What a module sends back to what it was given."""
    module.register_full_backward_hook(lambda _, sent, __: tuple(2 * one for one in sent))


def reduced_twice(row: Row, team: Team) -> None:
    row.leave = Passage(functools.partial(_twice, team), team.same)


def reduced_twice_back(block: nn.Module, team: Team) -> None:
    for column in _columns(block):
        column.enter = Passage(team.same, functools.partial(_twice, team))


def averaged(row: Row, team: Team) -> None:
    row.leave = Passage(team.mean, team.same)


def _columns(block: nn.Module) -> list[Column]:
    return [module for module in block.modules() if isinstance(module, Column)]


def _twice(team: Team, x: Tensor) -> Tensor:
    return team.total(team.total(x))


def broadcast_for_reduced(row: Any, team: Team) -> None:
    row.leave = Passage(team.first, team.same)


def last_rank_left_out(row: Row, team: Team) -> None:
    """A group that was made with one rank too few."""
    group = distributed.new_group(list(range(team.size - 1)))

    def some(x: Tensor) -> Tensor:
        summed = x.contiguous().clone()
        if team.rank < team.size - 1:
            distributed.all_reduce(summed, group=group)
        return summed

    row.leave = Passage(some, team.same)


def reduced_along_data(path: str, model: nn.Module, mesh: DeviceMesh) -> None:
    model.get_submodule(path).leave = Team(mesh, "dp").leave()


def averaged_along_channels(path: str, model: nn.Module, mesh: DeviceMesh) -> None:
    module: Any = model.get_submodule(path)
    gradient_not_reduced(module, Team(mesh, "tp"))
    module.weight.register_hook(Team(mesh, "tp").mean)


def gradient_not_reduced(module: Any, team: Team) -> None:
    # A new parameter has none of the hooks of the old one.
    module.weight = nn.Parameter(module.weight.detach().clone())


def gradient_averaged(module: Any, team: Team) -> None:
    gradient_not_reduced(module, team)
    module.weight.register_hook(team.mean)


# --- parts, data, state ---------------------------------------------------------------------------


def next_ranks_shard(module: Any, team: Team) -> None:
    whole = team.gathered(module.weight.detach(), 0)
    module.weight.data.copy_(whole.chunk(team.size)[(team.rank + 1) % team.size])


def next_ranks_local(module: Any, team: Team) -> None:
    """The same of a distributed tensor."""
    parts = module.weight.full_tensor().detach().chunk(team.size)
    module.weight.to_local().data.copy_(parts[(team.rank + 1) % team.size])


def drawn_again(module: Any, team: Team) -> None:
    generator = torch.Generator().manual_seed(7)
    fresh = torch.randn(module.weight.shape, generator=generator, dtype=torch.float64)
    module.weight.data.copy_(fresh)


class StaleTracker(Tracker):
    def forward(self, x: Tensor) -> Tensor:
        return x / (0.5 + self.level)


def not_updated(tracker: Tracker, team: Team) -> None:
    tracker.__class__ = StaleTracker


def frozen(module: Any, team: Team) -> None:
    module.weight.requires_grad_(False)


def other_order(embed: Any, team: Team) -> None:
    embed.register_forward_pre_hook(lambda _, args: (args[0].flip(0),))


def first_ranks_data(model: nn.Module, mesh: DeviceMesh) -> None:
    """Every rank reads the same samples: a sampler that was forgotten."""
    team = Team(mesh, "dp")

    def replace(_: Any, args: tuple[Tensor]) -> tuple[Tensor]:
        return (team.gathered(args[0], 0).chunk(team.size)[0],)

    # What DDP holds; it hands its inputs on as they are.
    model.module.register_forward_pre_hook(replace)


def from_the_start(module: Any, team: Team) -> None:
    module.first = 0


def in_turn(core: Any, team: Team) -> None:
    """Heads of keys repeated one after the other, in place of each in a row."""
    core.repeated = lambda x: x.repeat(1, 1, core.group, 1)


def other_tokens_kept(embed: Vocabulary, team: Team) -> None:
    """A token of another rank gives the first row, not zeros."""
    embed.forward = lambda tokens: embed.leave(
        functional.embedding((tokens - embed.first).clamp(0, len(embed.weight) - 1), embed.weight)
    )


def joined_backwards(head: Any, team: Team) -> None:
    there = head.join.there
    head.join = Passage(
        lambda x: torch.cat(there(x).chunk(team.size, -1)[::-1], -1), head.join.back
    )


def raising(module: Any, team: Team) -> None:
    module.register_forward_pre_hook(_raise)


def _raise(*_: Any) -> None:
    raise RuntimeError("planted: this rank is out of memory")


# --- loss, gradients of data parallel, optimizers -------------------------------------------------


def _world() -> int:
    return distributed.get_world_size() if distributed.is_initialized() else 1


def loss_over_world(logits: Tensor, tokens: Tensor) -> Tensor:
    return next_token(logits, tokens) / _world()


def loss_over_world_twice(logits: Tensor, tokens: Tensor) -> Tensor:
    return next_token(logits, tokens) / _world() ** 2


def _with_gradient(loss: Tensor, factor: float) -> Tensor:
    """The same number, but for its gradient."""
    return loss.detach() + factor * (loss - loss.detach())


def gradient_times_world(logits: Tensor, tokens: Tensor) -> Tensor:
    return _with_gradient(next_token(logits, tokens), _world())


def gradient_over_world(logits: Tensor, tokens: Tensor) -> Tensor:
    return _with_gradient(next_token(logits, tokens), 1 / _world())


def loss_times_world(criterion: nn.Module, team: Team) -> None:
    criterion.register_forward_hook(lambda _, __, loss: loss * team.size)


def _sum_hook(factor, bucket):  # torch reads annotations here, and not those that are text
    work = distributed.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda done: done.value()[0] * factor)


def ddp_sums(model: DistributedDataParallel, mesh: DeviceMesh) -> None:
    model.register_comm_hook(1.0, _sum_hook)


def ddp_averages_twice(model: DistributedDataParallel, mesh: DeviceMesh) -> None:
    model.register_comm_hook(1.0 / mesh.size() ** 2, _sum_hook)


def _first_hook(group, bucket):
    work = distributed.broadcast(bucket.buffer(), 0, async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


def ddp_broadcasts(model: DistributedDataParallel, mesh: DeviceMesh) -> None:
    model.register_comm_hook(None, _first_hook)


def ddp_without_sync(model: DistributedDataParallel, mesh: DeviceMesh) -> None:
    model.require_backward_grad_sync = False


def fsdp_sums(model: Any, mesh: DeviceMesh) -> None:
    for part in (*model.layers, model):
        part.set_gradient_divide_factor(1.0)
        # Otherwise it asks for a scaled sum, which NCCL alone has.
        part.set_force_sum_reduction_for_comms(True)


def all_but_the_first(parameters: Any) -> torch.optim.Optimizer:
    """On ranks, the optimizer is not told of the first parameter."""
    chosen = list(parameters)[1 if distributed.is_initialized() else 0 :]
    return torch.optim.SGD(chosen, lr=0.1)


def still_on_rank_1(parameters: Any) -> torch.optim.Optimizer:
    here = distributed.get_rank() if distributed.is_initialized() else 0
    return torch.optim.SGD(parameters, lr=0.0 if here == 1 else 0.1)
