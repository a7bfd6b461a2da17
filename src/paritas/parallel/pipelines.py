"""Steps in micro-batches: the stages of a pipeline, and calls of modules put together."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import nn

from paritas.parallel.traces import ModelNames, ModuleCall, RankPiece
from paritas.results.items import Shard

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paritas._torch.ranks import Pipeline
    from paritas.parallel.traces import StepTrace

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


# --- Calls of a module for each micro-batch -------------------------------------------------------


def merge_calls(step: StepTrace, microbatches: int | None = None) -> None:
    """Replace the calls of each module, one for each micro-batch, by one on the whole batch.

    A module that was called another number of times is left out.

    Args:
        microbatches: of a pipeline, whose schedule divides gradients by it in the end, and which
            calls each stage once more before the first step, to learn the shapes. None for a step
            of the user's own, which calls the model once for each micro-batch.
    """
    calls: dict[str, list[ModuleCall]] = {}
    for call in step.modules:
        calls.setdefault(call.name, []).append(call)
    count = microbatches or len(calls.get("", ()))
    allowed = (count,) if microbatches is None else (count, count + 1)
    names = [call.name for call in step.modules]
    step.modules[:] = [
        ModuleCall(
            name,
            made[0].kind,
            _join_pieces([one.outputs for one in made[-count:]]),
            _join_pieces([one.gradients for one in made[-count:]], microbatches),
            _join_pieces([one.input_gradients for one in made[-count:]], microbatches),
        )
        for name, made in calls.items()
        if len(made) in allowed
    ]
    numbers = {call.name: number for number, call in enumerate(step.modules)}
    places = [(names[place.call], place) for place in step.backward if names[place.call] in numbers]
    kept = [dataclasses.replace(place, call=numbers[name]) for name, place in places]
    step.backward[:] = [
        place
        for place in dict.fromkeys(kept)
        if place.path in step.modules[place.call].back(place.side)
    ]


def _join_pieces(
    parts: list[dict[str, RankPiece]], divisor: int | None = None
) -> dict[str, RankPiece]:
    """The tensors of several calls that all of them have, one after the other."""
    found: dict[str, RankPiece] = {}
    for path in parts[0]:
        pieces = [part[path] for part in parts if path in part]
        if len(pieces) < len(parts) or not _are_rows(pieces):
            continue
        whole = torch.cat([one.local for one in pieces])
        whole = whole if divisor is None else whole / divisor
        place = pieces[0].placement
        if place is not None and len(pieces) > 1:
            rows = sum(one.whole_shape[0] for one in pieces)
            shape = (rows, *place.global_shape[1:])
            place = msgspec.structs.replace(place, global_shape=shape)
        found[path] = RankPiece(whole, place)
    return found


def _are_rows(pieces: list[RankPiece]) -> bool:
    """Whether tensors are rows of one tensor: they differ in the first dimension at most."""
    if len(pieces) == 1:
        return True
    split = [role for one in pieces if one.placement for role in one.placement.roles]
    if any(isinstance(role, Shard) and role.dim == 0 for role in split):
        return False
    kinds = {(one.whole_shape[1:], one.local.dtype, one.placement is None) for one in pieces}
    return len(kinds) == 1 and all(one.local.dim() > 0 for one in pieces)
