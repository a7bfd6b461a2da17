"""Which samples of a batch each rank has."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from paritas.errors import UsageError
from paritas.numerics.trees import leaves, map_leaves

if TYPE_CHECKING:
    from paritas.checking.config import Inputs
    from paritas.partition.plans.program import Program

__all__ = ["batch_size", "check_batches", "part_of_batch", "samples_of", "to_device"]


def batch_size(inputs: Inputs) -> int | None:
    """How many samples a batch has: the length of its first tensor that is no scalar."""
    for _, leaf in leaves((inputs.args, inputs.kwargs)):
        if isinstance(leaf, torch.Tensor) and leaf.dim() > 0:
            return int(leaf.shape[0])
    return None


def check_batches(program: Program) -> None:
    """Make sure that every batch can be split evenly.

    Raises:
        UsageError: it cannot; the mean of the ranks' losses would not be the loss of the whole.
    """
    parts = program.data_ranks
    if parts == 1:
        return
    axes = " and ".join(program.split)
    for place, batch in enumerate(program.batches):
        size = batch_size(batch)
        if size is None:
            raise UsageError(
                f"batch {place} has no tensor to split over the {parts} ranks along {axes}: "
                "split=() gives every rank the whole batch"
            )
        if size % parts:
            raise UsageError(
                f"batch {place} has {size} samples, which {parts} ranks along {axes} cannot share "
                f"evenly: give a batch of {size + parts - size % parts}, or another mesh"
            )


def samples_of(program: Program, rank: int, step: int = 0) -> tuple[int, int] | None:
    """Begin and end of a rank's samples; None where it has them all."""
    if program.data_ranks == 1:
        return None
    size = (batch_size(program.batch(step)) or 0) // program.data_ranks
    begin = program.data_rank(rank) * size
    return begin, begin + size


def part_of_batch(program: Program, rank: int, step: int) -> Inputs:
    """What a rank is given: of each tensor as long as the batch its samples, all else whole."""
    whole, samples = program.batch(step), samples_of(program, rank, step)
    if samples is None:
        return whole
    size, (begin, end) = batch_size(whole), samples

    def cut(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and leaf.shape[0] == size:
            return leaf[begin:end]
        return leaf

    args, kwargs = map_leaves((whole.args, whole.kwargs), cut)
    return dataclasses.replace(whole, args=args, kwargs=kwargs)


def to_device(inputs: Inputs, device: torch.device | None) -> Inputs:
    """The same batch on a device; None leaves it where it is."""
    if device is None:
        return inputs
    args, kwargs = map_leaves(
        (inputs.args, inputs.kwargs),
        lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf,
    )
    return dataclasses.replace(inputs, args=args, kwargs=kwargs)
