"""Applying a plan to a model, as a rank of the current process group."""

from __future__ import annotations

import copy
import fnmatch
from typing import TYPE_CHECKING, Any

from torch import nn

from paritas._torch.ranks import pipeline_of
from paritas.parallel.hugging_face import (
    SHIPPED_PLANS,
    UnsupportedPlanError,
    apply_shipped_plan,
)
from paritas.parallel.pipelines import PipelinedModel

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from paritas.parallel.plan import ParallelProgram


def parallel_model(
    program: ParallelProgram, model: nn.Module, device: torch.device | None
) -> nn.Module:
    """The model under its plan; it may be the same object, changed in place."""
    from torch.distributed.device_mesh import init_device_mesh

    kinds = {tensor.device.type for tensor in model.parameters()} - {"meta"}
    kind = next(iter(kinds), "cpu")
    mesh = init_device_mesh(kind, tuple(program.mesh.values()), mesh_dim_names=tuple(program.mesh))
    return apply_plan(program, model, mesh, device)


def apply_plan(
    program: ParallelProgram, model: nn.Module, mesh: DeviceMesh, device: torch.device | None
) -> nn.Module:
    """The same on a mesh that exists."""
    plan = program.plan
    if plan == "ddp":
        placed = None if device is None or device.index is None else [device.index]
        return nn.parallel.DistributedDataParallel(model, device_ids=placed)
    if plan == "fsdp":
        _shard_blocks(model, mesh)
        return model
    if plan in SHIPPED_PLANS:
        return apply_shipped_plan(model, mesh, experts=plan == "hf-ep")
    if isinstance(plan, dict):
        from torch.distributed.tensor.parallel import parallelize_module

        # Styles keep state of their rank, so ranks that are threads must not share them.
        return parallelize_module(model, mesh, copy.deepcopy(plan))
    known = {module: name for name, module in model.named_modules()}
    made: Any = plan(model, mesh)
    pipeline = pipeline_of(made)
    if pipeline is not None:
        if not pipeline.has_loss:
            raise UnsupportedPlanError(
                "the pipeline schedule has no loss, so it trains nothing: pass loss_fn=, which "
                "verify_parallel replaces by its own loss"
            )
        return PipelinedModel(pipeline, known)
    if made is not None and not isinstance(made, nn.Module):
        raise UnsupportedPlanError(
            f"the plan returned {made!r:.80}: return the parallel module, a pipeline schedule, or "
            "None if the model was changed in place"
        )
    return model if made is None else made


def apply_styles(model: nn.Module, mesh: DeviceMesh, plan: dict[str, Any], block: str) -> None:
    """Apply the parallel styles of a plan to one block, and to the modules around and inside it.

    This is what `parallelize_module` does there. Of a plan for many layers it is a small part.
    """
    from torch.distributed.tensor.parallel import parallelize_module

    for pattern, style in plan.items():
        atoms = _atoms(pattern)
        for name, module in list(model.named_modules()):
            path = _atoms(name)
            near = all(map(str.__eq__, path, _atoms(block)))
            if near and len(path) == len(atoms) and all(map(fnmatch.fnmatch, path, atoms)):
                parallelize_module(module, mesh, copy.deepcopy(style))


def _atoms(name: str) -> list[str]:
    return name.split(".") if name else []


def _shard_blocks(model: nn.Module, mesh: DeviceMesh) -> None:
    """Apply FSDP as is usual: to each block of a list or sequence, then to the rest."""
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
