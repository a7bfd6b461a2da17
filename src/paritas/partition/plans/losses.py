"""The loss of a training: the user's, the model's own, or one that sees every element."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from paritas.errors import UsageError
from paritas.numerics.trees import leaves
from paritas.partition.plans.data import batch_size, samples_of

if TYPE_CHECKING:
    from torch import Tensor

    from paritas.checking.config import Inputs
    from paritas.partition.plans.program import Program
    from paritas.partition.plans.traces import Trace

__all__ = ["loss_of"]

# Weights of the default loss are eighths up to one: exact in every floating dtype.
_EIGHTHS = 8


def loss_of(program: Program, output: Any, batch: Inputs, trace: Trace) -> Tensor:
    """The loss of the step that a trace is at: as the user says, as the model says, or a mean.

    Raises:
        UsageError: it is not one number, or nothing can be learnt from it.
    """
    if program.loss is not None:
        loss = program.loss(output, *batch.args, **batch.kwargs)
    else:
        loss = _own_loss(output)
        if loss is None:
            loss = _weighted_mean(program, output, trace)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        shown = list(loss.shape) if isinstance(loss, torch.Tensor) else f"{loss!r:.80}"
        raise UsageError(f"the loss is {shown}: it must be one number")
    if not loss.requires_grad:
        raise UsageError("the loss does not depend on anything that requires a gradient")
    return loss.reshape(()) if loss.dim() else loss


def _own_loss(output: Any) -> Tensor | None:
    """The loss that a model gives itself: its output, or what is called `loss` there."""
    for one in (output, getattr(output, "loss", None)):
        if isinstance(one, torch.Tensor) and one.numel() == 1 and one.is_floating_point():
            return one
    held = output.get("loss") if isinstance(output, dict) else None
    return held if isinstance(held, torch.Tensor) and held.numel() == 1 else None


def _weighted_mean(program: Program, output: Any, trace: Trace) -> Tensor:
    """The mean of each floating output times weights that are drawn for the whole batch.

    A plain mean would not see elements that change places.
    """
    number = len(trace.steps) - 1
    total: Tensor | None = None
    for place, (_, leaf) in enumerate(leaves(output)):
        if not isinstance(leaf, torch.Tensor) or not leaf.requires_grad:
            continue
        whole = leaf.full_tensor() if hasattr(leaf, "full_tensor") else leaf
        seed = program.seed + 1009 * number + place
        weights = _weights(tuple(whole.shape), program, trace, number, seed)
        term = (whole * weights.to(whole.device, whole.dtype)).mean()
        total = term if total is None else total + term
    if total is None:
        raise UsageError(
            "nothing that the model gives requires a gradient: give a loss, or a model that trains"
        )
    return total


def _weights(
    shape: tuple[int, ...], program: Program, trace: Trace, number: int, seed: int
) -> Tensor:
    samples = samples_of(program, trace.rank, number) if trace.ranks > 1 else None
    mine = samples is not None and bool(shape) and shape[0] == samples[1] - samples[0]
    size = batch_size(program.batch(number)) or 0
    whole = (size, *shape[1:]) if mine else shape
    draws = torch.Generator().manual_seed(seed)
    weights = torch.randint(1, _EIGHTHS + 1, whole, generator=draws) / _EIGHTHS
    signs = torch.randint(0, 2, whole, generator=draws) * 2 - 1
    found = weights * signs
    return found[samples[0] : samples[1]] if mine and samples is not None else found
