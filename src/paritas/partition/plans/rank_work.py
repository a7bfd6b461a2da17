"""What one rank does: make the model parallel as the plan says, then train it."""

from __future__ import annotations

import copy
import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from paritas.errors import ParitasError
from paritas.partition.plans.data import samples_of
from paritas.partition.plans.traces import Trace
from paritas.partition.plans.training import Built, Manner, build_model, same_surroundings, train
from paritas.partition.ranks.serving import described

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from paritas.partition.plans.program import Program

__all__ = [
    "RankFailedError",
    "Task",
    "empty_trace",
    "parallel_model",
    "train_as_rank",
    "work_alone",
]


class RankFailedError(ParitasError, RuntimeError):
    """The program of a rank raised; `so_far` is what it had done."""

    def __init__(self, so_far: Trace) -> None:
        super().__init__(so_far)
        self.so_far = so_far

    def __str__(self) -> str:
        return str(self.so_far.error)


@dataclasses.dataclass(frozen=True)
class Task:
    """What a rank that is a process of its own is sent."""

    program: Program
    manner: Manner


def empty_trace(program: Program, rank: int) -> Trace:
    """The trace of a rank that has done nothing yet."""
    return Trace(
        rank=rank,
        ranks=program.ranks,
        samples=samples_of(program, rank),
        data_rank=program.data_rank(rank),
        data_ranks=program.data_ranks,
    )


def train_as_rank(program: Program, built: Built, manner: Manner, trace: Trace) -> None:
    """Put a model under its plan and train it, as a rank of the group that is there.

    What is raised is written into the trace and raised again.
    """
    try:
        parallel = parallel_model(program, built.model, manner.device)
    except Exception as error:
        trace.error = f"while the plan was applied: {described(error)}"
        raise
    train(program, dataclasses.replace(built, model=parallel), manner, trace)


def work_alone(rank: int, _ranks: int, task: Task, trace: Trace | None = None) -> Trace:
    """Be a rank that has its process to itself; what it does is written into the trace.

    Raises:
        RankFailedError: the program raised.
    """
    trace = empty_trace(task.program, rank) if trace is None else trace
    with same_surroundings(task.manner):
        try:
            built = build_model(task.program, task.manner)
            train_as_rank(task.program, built, task.manner, trace)
        except Exception as error:
            trace.error = trace.error or described(error)
            raise RankFailedError(trace) from error
    return trace


def parallel_model(program: Program, model: nn.Module, device: torch.device | None) -> nn.Module:
    """The model under its plan; it may be the same object, changed."""
    from torch.distributed.device_mesh import init_device_mesh

    kind = next((tensor.device.type for tensor in model.parameters()), "cpu")
    mesh = init_device_mesh(kind, tuple(program.mesh.values()), mesh_dim_names=tuple(program.mesh))
    plan = program.plan
    if plan == "ddp":
        placed = None if device is None or device.index is None else [device.index]
        return nn.parallel.DistributedDataParallel(model, device_ids=placed)
    if plan == "fsdp":
        _shard_blocks(model, mesh)
        return model
    if isinstance(plan, dict):
        from torch.distributed.tensor.parallel import parallelize_module

        # Styles keep what they learn of a rank; ranks that are threads must not share them.
        return parallelize_module(model, mesh, copy.deepcopy(plan))
    made: Any = plan(model, mesh)
    if made is not None and not isinstance(made, nn.Module):
        raise TypeError(f"the plan gave {made!r:.80}, not a module")
    return model if made is None else made


def _shard_blocks(model: nn.Module, mesh: DeviceMesh) -> None:
    """FSDP as it is commonly used: on each block of a list or sequence, then on the rest."""
    from torch.distributed.fsdp import fully_shard

    for block in _blocks(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def _blocks(module: nn.Module) -> list[nn.Module]:
    found: list[nn.Module] = []
    for child in module.children():
        holds = any(True for _ in child.parameters())
        listed = isinstance(module, nn.ModuleList | nn.Sequential)
        if listed and holds and not isinstance(child, nn.ModuleList | nn.ModuleDict):
            found.append(child)
        else:
            found += _blocks(child)
    return found
