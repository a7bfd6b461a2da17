"""Pipeline schedules and FSDP as training under a plan uses them."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

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


# --- FSDP -----------------------------------------------------------------------------------------

_FSDP = "torch.distributed.fsdp._fully_shard._fsdp_collectives"
_FACTORS = "_get_gradient_divide_factors"


@contextlib.contextmanager
def divided_once() -> Iterator[None]:
    """Within it, FSDP on a mesh of one rank divides gradients once by the factor of the user.

    Torch divides them by it when it copies them and, in dtypes other than float32 and bfloat16,
    once more. A run in float64 would show that as a fault of a plan that is right in float32.
    """
    collectives: Any = sys.modules.get(_FSDP)
    original = getattr(collectives, _FACTORS, None)
    if original is None:  # FSDP is not used, or works in another way
        yield
        return

    def factors(scattering: Any, reducing: Any, *args: Any, **kwargs: Any) -> Any:
        found = original(scattering, reducing, *args, **kwargs)
        factor = kwargs.get("factor", args[2] if len(args) > 2 else None)  # noqa: PLR2004
        alone = scattering is None or scattering.size() == 1
        return (None, None, *found[2:]) if alone and factor is not None else found

    setattr(collectives, _FACTORS, factors)
    try:
        yield
    finally:
        setattr(collectives, _FACTORS, original)


def divides_twice() -> bool:
    """Whether this torch has the function that `divided_once` replaces."""
    return hasattr(importlib.import_module(_FSDP), _FACTORS)
