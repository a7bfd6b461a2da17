"""The plan that a model of transformers ships, applied as transformers applies it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from paritas.core import transformers_library
from paritas.core.errors import ParitasError

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh

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
    config = _config_class()(
        tp_size=sizes.get(TENSOR_AXIS, 1),
        fsdp_size=sizes.get(DATA_AXIS, 1),
        ep_size=sizes.get(TENSOR_AXIS, 1) if experts else None,
    )
    pretrained_model: Any = model
    _untie_weights(pretrained_model)
    try:
        module: nn.Module = pretrained_model.maybe_distribute_model(
            model, config, _meshes(mesh, config)
        )
    except ValueError as error:  # sizes that do not divide, or styles that it does not know
        raise UnsupportedPlanError(
            f"transformers does not apply the plan of {type(model).__name__}: {error!s:.200}"
        ) from error
    # As `from_pretrained` does once the weights of the shards are loaded.
    pretrained_model.tie_weights(recompute_mapping=False)
    if not any(_is_distributed(parameter) for parameter in module.parameters()):
        raise UnsupportedPlanError(
            f"no rule of the plan of {type(model).__name__} matches a parameter, so nothing is "
            "parallel"
        )
    return module


def _untie_weights(model: Any) -> None:
    """Give each name of a tied weight a parameter of its own.

    `from_pretrained` makes the model so. It distributes the weights one by one and ties them again
    in the end, so that a plan may name either of them.
    """
    for target, source in model.all_tied_weights_keys.items():
        holder, _, name = target.rpartition(".")
        tied_weight = getattr(model.get_submodule(holder), name)
        if isinstance(tied_weight, nn.Parameter) and tied_weight is model.get_parameter_or_buffer(
            source
        ):
            parameter = nn.Parameter(
                tied_weight.detach().clone(), requires_grad=tied_weight.requires_grad
            )
            setattr(model.get_submodule(holder), name, parameter)


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


def _config_class() -> Any:
    try:
        return transformers_library.distributed_config()
    except ImportError as error:
        raise UnsupportedPlanError(
            f"the plans of transformers need a version with transformers.distributed: {error}"
        ) from None


def _meshes(mesh: DeviceMesh, config: Any) -> Any:
    """The meshes of transformers on the same ranks: of dense layers, and of experts.

    Transformers has its axes in one order; which ranks lie along each of them is the user's.
    """
    from torch.distributed.device_mesh import DeviceMesh

    build_mesh = transformers_library.distributed_mesh()
    ranks, names = mesh.mesh, tuple(mesh.mesh_dim_names or ())
    if names == (TENSOR_AXIS, DATA_AXIS):
        ranks = ranks.T
    dense = ranks.reshape(config.pp_size, config.fsdp_size, config.tp_size)
    expert = ranks.reshape(config.pp_size, config.efsdp_size, config.ep_size)
    return build_mesh(
        DeviceMesh(mesh.device_type, dense, mesh_dim_names=("pp", DATA_AXIS, TENSOR_AXIS)),
        DeviceMesh(mesh.device_type, expert, mesh_dim_names=("pp", "efsdp", "ep")),
    )


def _is_distributed(tensor: Tensor) -> bool:
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)
