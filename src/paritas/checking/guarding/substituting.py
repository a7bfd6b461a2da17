"""Give the program the reference's results in place of wrong ones, as the compiled code would."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from paritas.checking.observing import memory
from paritas.numerics.metrics import bitwise_equal

if TYPE_CHECKING:
    from torch import Tensor

    from paritas.checking.guarding.graph_runs import GraphRuns
    from paritas.checking.observing import Observation


def substitute(
    runs: GraphRuns,
    candidate: Observation,
    given: list[Any],
    visible: frozenset[int],
) -> list[Any]:
    """The reference's outputs, and its writes made to the arguments that the caller holds."""
    seen = runs.native[0]
    if seen.rng_after is not None:
        seen.rng_after.restore()
    _put_inputs_right(runs.used, given)
    results = []
    for position, (name, value) in enumerate(seen.outputs.items()):
        result = _rebased(value, runs.used, given)
        theirs = candidate.outputs.get(name)
        if position not in visible:
            result = _laid_out_like(result, theirs)
        results.append(result)
    return results


def _put_inputs_right(used: list[Any], given: list[Any]) -> None:
    """Write to the caller's arguments what the reference wrote; undo what else was written."""
    with torch.no_grad():
        for wanted, value in zip(used, given, strict=True):
            if isinstance(value, torch.Tensor) and not bitwise_equal(value.detach(), wanted):
                value.detach().copy_(wanted)


def _rebased(value: Any, used: list[Any], given: list[Any]) -> Any:
    """An output that is a view of an argument becomes a view of the caller's argument."""
    key = memory(value)
    if not key:
        return value
    for mine, theirs in zip(used, given, strict=True):
        if memory(mine) == key and isinstance(theirs, torch.Tensor):
            same = mine.stride() == value.stride() and mine.shape == value.shape
            if same and mine.storage_offset() == value.storage_offset():
                return theirs
            shift = theirs.storage_offset() - mine.storage_offset()
            return theirs.as_strided(value.shape, value.stride(), value.storage_offset() + shift)
    return value


def _laid_out_like(value: Any, theirs: Any) -> Any:
    """What is kept for the backward pass has to lie in memory as that pass was compiled for."""
    if not isinstance(value, torch.Tensor) or not isinstance(theirs, torch.Tensor):
        return value
    if value.shape != theirs.shape or value.stride() == theirs.stride():
        return value
    result: Tensor = torch.empty_strided(
        theirs.shape, theirs.stride(), dtype=value.dtype, device=value.device
    )
    return result.copy_(value)
