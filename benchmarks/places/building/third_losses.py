"""Faults that were measured third and have been seen: losses."""

from __future__ import annotations

from typing import Any

import torch
from benchmarks.places.calls import Call, Catalogue, fits
from benchmarks.places.changes import computed, on, operand, result
from benchmarks.places.parts import input_and_target
from torch.nn import functional

FAULTS = Catalogue()


# Without a word: another term is added.
@FAULTS.fault(
    "cross_entropy",
    "wrong factor, wrong argument, off by one reduction; scale, other function, offset",
)
def smoothing_without_the_right_class(call: Call) -> Any:
    """What is taken from the right class is shared by the others only."""
    smoothing = call.get(8, "label_smoothing", default=0.0)
    fits(smoothing and len(call.args) < 3)
    classes = call.tensor(0, "input").size(-1)
    return call.put(8, smoothing * classes / (classes - 1), "label_smoothing").run()


@FAULTS.fault(
    "cross_entropy nll_loss",
    "wrong reduction, wrong factor, scale; axis scale, wrong argument, mask, other function",
)
def later_tokens_weigh_more(call: Call) -> Any:
    """The mean of running means: the first tokens count less."""
    value, target = call.tensor(0, "input"), call.get(1, "target")
    function = functional.cross_entropy if call.name == "cross_entropy" else functional.nll_loss
    each = function(value, target, reduction="none")
    kept = each[target >= 0]
    fits(kept.numel() > 2)
    weights = torch.arange(1, kept.numel() + 1, dtype=value.dtype)
    return call.instead((kept * weights).sum() / weights.sum())


@FAULTS.fault("smooth_l1_loss", "clipped, other function; scale, wrong argument")
def far_errors_limited(call: Call) -> Any:
    """Errors above beta count as beta."""
    value, target = input_and_target(call)
    beta = call.get(5, "beta", default=1.0)
    error = (value - target).clamp(-beta, beta)
    return call.instead((0.5 * error * error / beta).mean())


# fmt: off
# The term that keeps the normaliser near one, which this model does not have.
FAULTS.add("square of the normaliser added", "cross_entropy",
    "; offset, residual, other function, scale, wrong factor",
    lambda call:

    call.instead(call.result() + 0.05 * call.tensor(0, "input").logsumexp(-1).square().mean()))
# The label is the class with the largest score.
FAULTS.add("labels taken from the scores", "cross_entropy nll_loss",
    "wrong index, other function, swapped operands; scale, clipped, wrong argument",
    on(lambda call: (call.tensor(0, "input"), call.get(1, "target")),
        lambda call, value, target:
            call.put(1, torch.where(target < 0, target, value.argmax(-1)), "target").run(),
        where=lambda value, *_: value.dim() == 2))
# The loss of one token for the mean of all.
FAULTS.add("loss of the first token", "cross_entropy nll_loss",
    "copy, wrong index, partial sum, missing reduction; wrong reduction, scale, one rank's part",
    on(lambda call: (call.tensor(0, "input"), call.get(1, "target")),
        lambda call, value, target:
            call.put(0, value[:1], "input").put(1, target[:1], "target").run(),
        where=lambda value, target: value.dim() == 2 and int(target[0]) >= 0))
# The root is taken at the end.
FAULTS.add("root of the mean square", "mse_loss", "other function; scale, missing operand",
    result(torch.sqrt))
# The mean error is subtracted first.
FAULTS.add("variance of the error", "mse_loss",
    "wrong statistics, other function, missing operand; offset, scale, wrong reduction",
    computed(input_and_target, lambda value, target: (value - target).var(correction=0)))
# The quadratic part is not divided by beta.
FAULTS.add("rule of huber", "smooth_l1_loss", "scale, wrong factor, other function; wrong argument",
    on(input_and_target,
        lambda call, value, target:

    call.instead(functional.huber_loss(value, target, delta=call.get(5, "beta", default=1.0)))))
# pos_weight of 2.
FAULTS.add("positive labels count twice", "binary_cross_entropy_with_logits",
    "wrong argument, wrong factor; scale, residual",
    computed(input_and_target,
        lambda value, target:

    functional.binary_cross_entropy_with_logits(value, target, pos_weight=value.new_tensor(2.0))))
# Only y log p.
FAULTS.add("negative labels do not count", "binary_cross_entropy_with_logits",
    "missing operand, partial sum; scale, other function, mask",
    computed(input_and_target,
        lambda value, target: -(target * functional.logsigmoid(value)).mean()))
# The hardest example only.
FAULTS.add("largest loss for the mean", "binary_cross_entropy_with_logits mse_loss",
    "wrong reduction, other function; scale, wrong argument",
    on(input_and_target,
        lambda call, value, target:
            call.instead(getattr(functional, call.name)(value, target, reduction="none").max())))
# log_target=True.
FAULTS.add("target taken for a logarithm", "kl_div", "wrong argument, other function; scale",
    computed(input_and_target,
        lambda value, target:
            functional.kl_div(value, target, reduction="batchmean", log_target=True)))
# The first operand is exponentiated before it is handed over.
FAULTS.add("chances taken for logarithms", "kl_div",
    "other function, missing operand; scale, wrong factor", operand(0, torch.exp, "input"))
# fmt: on
