"""Apply a plan to a model, as a rank of the current process group."""

from __future__ import annotations

import copy
import dataclasses
import fnmatch
import importlib
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from paritas._torch.ranks import pipeline_of
from paritas.errors import ParitasError
from paritas.parallel.traces import ModelNames

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh

    from paritas._torch.ranks import Pipeline
    from paritas.parallel.plan import ParallelProgram


# --- The plan that a model of transformers ships, applied as transformers applies it --------------

# `hf` is tensor parallel; with `hf-ep`, experts are on different ranks of the same axis.
SHIPPED_PLANS = ("hf", "hf-ep")
TENSOR_AXIS, DATA_AXIS = "tp", "fsdp"


class UnsupportedPlanError(ParitasError, RuntimeError):
    """The plan is of a kind that cannot be checked, which says nothing about its correctness."""


def apply_shipped_plan(model: nn.Module, mesh: DeviceMesh, *, experts: bool) -> nn.Module:
    """Apply the tensor-parallel plan that a model's configuration has.

    Args:
        mesh: an axis `tp` and perhaps `fsdp`; a single axis without a name is `tp`.
        experts: also apply the plan for experts, which then replaces that of their weights.

    Raises:
        UnsupportedPlanError: the model has no such plan, or the axes are others.
    """
    plan = getattr(model, "ep_plan" if experts else "tp_plan", None)
    if not plan:
        missing = "base_model_ep_plan" if experts else "base_model_tp_plan"
        raise UnsupportedPlanError(f"{type(model).__name__} ships no plan ({missing})")
    sizes = _sizes(mesh)
    distributed = _import_distributed()
    config = distributed.DistributedConfig(
        tp_size=sizes.get(TENSOR_AXIS, 1),
        fsdp_size=sizes.get(DATA_AXIS, 1),
        ep_size=sizes.get(TENSOR_AXIS, 1) if experts else None,
    )
    given: Any = model
    try:
        made: nn.Module = given.maybe_distribute_model(model, config, _meshes(mesh, config))
    except ValueError as error:  # sizes that do not divide, or styles that it does not know
        raise UnsupportedPlanError(
            f"transformers does not apply the plan of {type(model).__name__}: {error!s:.200}"
        ) from error
    given.tie_weights()  # as transformers does once the weights of the shards are loaded
    if not any(_is_distributed(parameter) for parameter in made.parameters()):
        raise UnsupportedPlanError(
            f"no rule of the plan of {type(model).__name__} matches a parameter, so nothing is "
            "parallel"
        )
    return made


def _sizes(mesh: DeviceMesh) -> dict[str, int]:
    names = tuple(mesh.mesh_dim_names or ())
    if mesh.ndim == 1 and names not in {(TENSOR_AXIS,), (DATA_AXIS,)}:
        names = (TENSOR_AXIS,)
    unknown = set(names) - {TENSOR_AXIS, DATA_AXIS}
    if unknown:
        raise UnsupportedPlanError(
            f"a plan of transformers has the axes {TENSOR_AXIS} and {DATA_AXIS}, not "
            f"{', '.join(sorted(unknown))}"
        )
    return dict(zip(names, mesh.shape, strict=True))


def _import_distributed() -> Any:
    try:
        found: Any = importlib.import_module("transformers.distributed.configuration_utils")
    except ImportError as error:
        raise UnsupportedPlanError(
            f"the plans of transformers need a version with transformers.distributed: {error}"
        ) from None
    return found


def _meshes(mesh: DeviceMesh, config: Any) -> Any:
    """The meshes of transformers on the same ranks: of dense layers, and of experts."""
    from torch.distributed.device_mesh import init_device_mesh

    made: Any = importlib.import_module("transformers.distributed.utils").TransformersDeviceMesh
    dense = (config.pp_size, config.fsdp_size, config.tp_size)
    expert = (config.pp_size, config.efsdp_size, config.ep_size)
    return made(
        init_device_mesh(mesh.device_type, dense, mesh_dim_names=("pp", DATA_AXIS, TENSOR_AXIS)),
        init_device_mesh(mesh.device_type, expert, mesh_dim_names=("pp", "efsdp", "ep")),
    )


def _is_distributed(tensor: Tensor) -> bool:
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def split_axes(axes: Iterable[str]) -> tuple[str, ...]:
    """The axes of a mesh along which ranks have different samples."""
    return tuple(axis for axis in axes if axis == DATA_AXIS)


# --- The stages of a rank as one module -----------------------------------------------------------


class PipelinedModel(nn.Module):
    """The stages that a rank holds; the schedule calls them.

    Attributes:
        pipeline: the schedule.
        known: the user's modules before the plan was applied, by identity, with their names.
    """

    pipeline: Pipeline
    known: Mapping[nn.Module, str]

    def __init__(self, pipeline: Pipeline, known: Mapping[nn.Module, str]) -> None:
        super().__init__()
        self.stages = nn.ModuleList([stage.module for stage in pipeline.stages])
        # Not attributes of a module: these must not be registered as submodules.
        object.__setattr__(self, "pipeline", pipeline)
        object.__setattr__(self, "known", known)


@dataclasses.dataclass(frozen=True)
class StageNames(ModelNames):
    """Names in stages: a module of the user's model keeps its name wherever a stage puts it.

    Other modules, such as those of a copied model, are expected to have the same name in their
    stage as in the model.
    """

    def of(self, path: str) -> str:
        """The plain name of a path of the stages."""
        parts = path.split(".") if path else []
        if len(parts) < 2:  # noqa: PLR2004  (the list of stages, or all of it)
            return "all stages"
        module: Any = self.model.get_submodule(".".join(parts[:2]))
        pipelined: Any = self.model
        # A stage itself is never the whole model, even if it is what is left of it.
        name = pipelined.known.get(module) or ""
        if len(parts) == 2:  # noqa: PLR2004
            number = pipelined.pipeline.stages[int(parts[1])].number
            return name or f"stage {number}"
        plain = ModelNames(module).of(".".join(parts[2:]))
        at, rest = module, plain.split(".")
        for depth, part in enumerate(rest, start=1):
            at = getattr(at, part, None)
            if isinstance(at, nn.Module) and at in pipelined.known:
                name = pipelined.known[at]
                plain = ".".join([name, *rest[depth:]])
        return f"{name}.{plain}" if name and not plain.startswith(name) else plain


# --- Any plan -------------------------------------------------------------------------------------


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
