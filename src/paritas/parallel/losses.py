"""The loss of a training step: the user's, the model's own, or a mean over every element."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from paritas.errors import UsageError
from paritas.numerics.contents import leaves
from paritas.parallel.plan import batch_size, samples_of

if TYPE_CHECKING:
    from torch import Tensor

    from paritas.execution.subjects import Inputs
    from paritas.parallel.plan import ParallelProgram
    from paritas.parallel.traces import Trace

# Weights of the default loss are eighths up to one: exact in every floating dtype.
_EIGHTHS = 8


def training_loss(
    program: ParallelProgram,
    output: Any,
    batch: Inputs,
    trace: Trace,
    rows: tuple[int, int] | None = None,
) -> Tensor:
    """The loss of the current step: the user's, the model's own, or a weighted mean.

    Args:
        rows: begin and end of the samples of the output in the whole batch; None for all that the
            rank has.

    Raises:
        UsageError: it is not one number, or does not require a gradient.
    """
    if program.loss is not None:
        loss = program.loss(output, *batch.args, **batch.kwargs)
    else:
        loss = _own_loss(output)
        if loss is None:
            loss = _weighted_mean(program, output, trace, rows)
    found = as_scalar(loss)
    if not found.requires_grad:
        raise UsageError("the loss does not depend on anything that requires a gradient")
    return found


def as_scalar(loss: Any) -> Tensor:
    """The loss as a tensor without dimensions.

    Raises:
        UsageError: it is not one number.
    """
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        shown = list(loss.shape) if isinstance(loss, torch.Tensor) else f"{loss!r:.80}"
        raise UsageError(f"the loss must be one number, got {shown}")
    return loss.reshape(()) if loss.dim() else loss


def _own_loss(output: Any) -> Tensor | None:
    """The loss that a model returns: its output, or `loss` in it."""
    for one in (output, getattr(output, "loss", None)):
        if isinstance(one, torch.Tensor) and one.numel() == 1 and one.is_floating_point():
            return one
    held = output.get("loss") if isinstance(output, dict) else None
    return held if isinstance(held, torch.Tensor) and held.numel() == 1 else None


def _weighted_mean(
    program: ParallelProgram, output: Any, trace: Trace, rows: tuple[int, int] | None
) -> Tensor:
    """The sum of the weighted means of all outputs, with weights drawn for the whole batch.

    A plain mean would not change if elements change places.
    """
    number = len(trace.steps) - 1
    total: Tensor | None = None
    for place, (_, leaf) in enumerate(leaves(output)):
        if not isinstance(leaf, torch.Tensor) or not leaf.requires_grad:
            continue
        whole = leaf.full_tensor() if hasattr(leaf, "full_tensor") else leaf
        seed = program.seed + 1009 * (program.first + number) + place
        weights = _loss_weights(tuple(whole.shape), program, trace, number, seed, rows)
        term = (whole * weights.to(whole.device, whole.dtype)).mean()
        total = term if total is None else total + term
    if total is None:
        raise UsageError(
            "no output of the model requires a gradient: pass loss=, or a model that trains"
        )
    return total


def _loss_weights(
    shape: tuple[int, ...],
    program: ParallelProgram,
    trace: Trace,
    number: int,
    seed: int,
    rows: tuple[int, int] | None,
) -> Tensor:
    samples = rows
    if rows is None and trace.ranks > 1:
        samples = samples_of(program, trace.rank, number)
    mine = samples is not None and bool(shape) and shape[0] == samples[1] - samples[0]
    size = batch_size(program.batch(number)) or 0
    whole = (size, *shape[1:]) if mine else shape
    draws = torch.Generator().manual_seed(seed)
    weights = torch.randint(1, _EIGHTHS + 1, whole, generator=draws) / _EIGHTHS
    signs = torch.randint(0, 2, whole, generator=draws) * 2 - 1
    found = weights * signs
    return found[samples[0] : samples[1]] if mine and samples is not None else found
