"""Pipeline schedules and FSDP as training under a plan uses them."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed, nn

from paritas.errors import UnsupportedTorchError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

# --- pipeline schedules ---------------------------------------------------------------------------

_SCHEDULES = "torch.distributed.pipelining.schedules"
_NEEDED = ("_loss_fn", "_has_backward", "_n_microbatches", "scale_grads", "step")


@dataclasses.dataclass(frozen=True, eq=False)
class Stage:
    """One stage of a pipeline on this rank.

    Attributes:
        number: of the stage among those of all ranks.
        module: what it runs.
    """

    number: int
    module: nn.Module
    is_first: bool
    is_last: bool


@dataclasses.dataclass(frozen=True, eq=False)
class Pipeline:
    """A pipeline schedule of torch, with the stages of this rank."""

    schedule: Any
    stages: tuple[Stage, ...]

    @property
    def microbatches(self) -> int:
        """Number of micro-batches of a step."""
        return int(self.schedule._n_microbatches)

    @property
    def has_loss(self) -> bool:
        """Whether the schedule has a loss, and so a backward pass."""
        return bool(self.schedule._has_backward)

    def step(
        self, loss: Callable[[Any, Tensor], Tensor], rows: Tensor, args: Any, kwargs: Any
    ) -> tuple[Any, list[Tensor]]:
        """Run one batch, forward and backward.

        Args:
            loss: of the output and the rows of a micro-batch, instead of the schedule's own loss.
            rows: number of each sample in the batch.
            args: of the first stage.
            kwargs: of all stages.

        Returns:
            The output and the loss of each micro-batch; None and nothing without the last stage.
        """
        losses: list[Tensor] = []
        self.schedule._loss_fn = loss
        first = any(stage.is_first for stage in self.stages)
        last = any(stage.is_last for stage in self.stages)
        given = {"target": rows, "losses": losses} if last else {}
        output = self.schedule.step(*(args if first else ()), **given, **kwargs)
        return output, losses


def pipeline_of(made: Any) -> Pipeline | None:
    """The pipeline of a schedule; None for any other object.

    Raises:
        UnsupportedTorchError: schedules of this torch are different.
    """
    schedules = sys.modules.get(_SCHEDULES)  # no plan returns what was never imported
    if schedules is None:
        return None
    single, several = schedules.PipelineScheduleSingle, schedules.PipelineScheduleMulti
    if not isinstance(made, single | several):
        return None
    held = getattr(made, "_stage", None)
    stages = getattr(made, "_stages", None) if held is None else [held]
    missing = [name for name in _NEEDED if not hasattr(made, name)]
    if missing or not stages:
        raise UnsupportedTorchError(
            f"{type(made).__name__} of torch {torch.__version__} has no "
            f"{', '.join(missing) or 'stages'}: paritas cannot run its steps"
        )
    return Pipeline(
        made,
        tuple(
            Stage(int(stage.stage_index), stage.submod, bool(stage.is_first), bool(stage.is_last))
            for stage in stages
        ),
    )


def in_backward() -> bool:
    """Whether this thread computes gradients, where checkpointed modules are called once more."""
    task = getattr(torch._C, "_current_graph_task_id", None)
    return task is not None and task() != -1


# --- FSDP -----------------------------------------------------------------------------------------

_FSDP = "torch.distributed.fsdp._fully_shard._fsdp_collectives"
_FACTORS = "_get_gradient_divide_factors"
_ARGUMENTS = 6


def _has_nccl(group: Any) -> bool:
    """Whether a group sends by NCCL; simulated ranks do not, even on a GPU."""
    return "nccl" in str(distributed.get_backend(group))


@contextlib.contextmanager
def gradient_factors(*, once: bool) -> Iterator[None]:
    """Within it, FSDP can divide gradients by a factor of the user without NCCL.

    For that, torch uses a reduction that only NCCL has; here it adds them up and divides the sum.

    Args:
        once: on a mesh of one rank, divide by the factor once. Torch divides by it when it copies
            the gradients and, in dtypes other than float32 and bfloat16, once more. A run in
            float64 would show that as a fault of a plan that is right in float32.
    """
    collectives: Any = sys.modules.get(_FSDP)
    original = getattr(collectives, _FACTORS, None)
    if original is None:  # FSDP is not used, or works in another way
        yield
        return

    def factors(
        scattering: Any,
        reducing: Any,
        dtype: torch.dtype,
        device_type: str = "",
        factor: float | None = None,
        force_sum: bool = False,  # noqa: FBT001, FBT002  (torch's order)
    ) -> Any:
        alone = scattering is None or scattering.size() == 1
        has_nccl = device_type != "cpu" and (alone or _has_nccl(scattering))
        summed = force_sum or (factor is not None and not alone and not has_nccl)
        found = original(scattering, reducing, dtype, device_type, factor, summed)
        return (None, None, *found[2:]) if once and alone and factor is not None else found

    setattr(collectives, _FACTORS, factors)
    try:
        yield
    finally:
        setattr(collectives, _FACTORS, original)


def knows_factors() -> bool:
    """Whether this torch has the function that `gradient_factors` replaces, with its arguments."""
    found = getattr(importlib.import_module(_FSDP), _FACTORS, None)
    return found is not None and len(inspect.signature(found).parameters) == _ARGUMENTS
