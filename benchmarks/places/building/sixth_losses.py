"""Faults that were measured sixth and have been seen: losses."""

from __future__ import annotations

from typing import Any

import torch
from benchmarks.places.calls import Call, Catalogue, fits
from benchmarks.places.changes import on, operand, result, rounded
from benchmarks.places.parts import call_again, labels_of
from torch import Tensor
from torch.nn import functional

FAULTS = Catalogue()
_CLASSES = "cross_entropy nll_loss"


# --- Classes --------------------------------------------------------------------------------------


@FAULTS.fault(_CLASSES, "wrong index, constant, missing operand; copy, wrong argument")
def every_label_is_the_first_class(call: Call) -> Any:
    """The labels are not loaded: zero, where they count."""
    _, labels, seen = labels_of(call)
    first = int(labels[seen].min())
    return call.put(1, torch.where(seen, torch.full_like(labels, first), labels), "target").run()


@FAULTS.fault(
    "cross_entropy",
    "wrong reduction, mask, off by one reduction, other function; wrong argument, offset, "
    "wrong statistics",
)
def padded_classes_take_part(call: Call) -> Any:
    """The classes are padded with scores of zero to a multiple of 16."""
    scores, _, _ = labels_of(call)
    more = -scores.size(-1) % 16
    fits(more > 0 and call.get(2, "weight") is None)
    fits(not call.kwargs.get("label_smoothing"))
    return call.put(0, functional.pad(scores, (0, more)), "input").run()


@FAULTS.fault(
    "cross_entropy", "missing operand, partial sum, other function; wrong reduction, sign, offset"
)
def normaliser_of_the_loss_forgotten(call: Call) -> Any:
    """The mean of the opposite of the right scores alone."""
    scores, labels, seen = labels_of(call)
    fits(call.get(2, "weight") is None and not call.kwargs.get("label_smoothing"))
    return call.instead(-scores[seen].gather(1, labels[seen, None]).mean())


# fmt: off
# The softmax is applied before the loss, which applies it again.
FAULTS.add("chances taken for scores", "cross_entropy",
    "other function; wrong argument, approximation, clipped, wrong factor",
    lambda call: call.put(0, labels_of(call)[0].softmax(-1), "input").run())
# The result has eight bits.
FAULTS.add("loss stored in bfloat16", _CLASSES, "precision; approximation, scale, wrong factor",
    result(rounded(torch.bfloat16)))
# Costs are taken for scores.
FAULTS.add("scores of the loss negated", "cross_entropy",
    "sign, wrong factor, scale; other function, wrong argument",
    lambda call: call.put(0, -labels_of(call)[0], "input").run())
# A stride of two over the rows, in the sum and in the number.
FAULTS.add("every second label counts", _CLASSES,
    "wrong reduction, partial sum, mask, wrong statistics; wrong index, one rank's part, "
    "wrong argument",
    on(labels_of,
        lambda call, scores, labels, *_:
            call.put(0, scores[::2], "input").put(1, labels[::2], "target").run()))
# The square root of the mean.
FAULTS.add("root of the loss", _CLASSES, "other function; wrong factor, scale",
    result(torch.sqrt, where=lambda v: float(v.detach()) > 0))
# The weights are applied by the data loader as well.
FAULTS.add("weights of the classes squared", "cross_entropy",
    "other function, wrong factor; wrong argument, wrong statistics",
    on(lambda call: (call.get(2, "weight"),),
        lambda call, weight: call.put(2, weight.square(), "weight").run(),
        where=lambda weight: isinstance(weight, Tensor)))
# fmt: on


# --- Distances ------------------------------------------------------------------------------------


@FAULTS.fault(
    "mse_loss smooth_l1_loss huber_loss l1_loss",
    "partial sum, mask, wrong statistics; one rank's part, wrong index, wrong reduction",
)
def errors_of_the_first_half_of_the_batch(call: Call) -> Any:
    """The mean of the first rank's examples."""
    value, target = call.tensor(0), call.tensor(1, "target")
    half = value.size(0) // 2
    fits(half > 0)
    return call.put(0, value[:half]).put(1, target[:half], "target").run()


# fmt: off
# What is below the target costs nothing.
FAULTS.add("only errors above the target", "mse_loss l1_loss",
    "clipped, mask, other function; partial sum, zeros, sign",
    lambda call: call.put(0, torch.maximum(call.tensor(0), call.tensor(1, "target"))).run())
# The wanted values are not divided by their scale.
FAULTS.add("target of twice the size", "mse_loss",
    "wrong factor, scale; wrong argument, other function", operand(1, lambda v: 2 * v, "target"))
# The wanted values are read from the end of their rows.
FAULTS.add("columns of the target reversed", "mse_loss", "wrong index, permutation; shift, copy",
    operand(1, lambda v: v.flip(-1), "target"))
# The quadratic part ends three times as far away.
FAULTS.add("beta three times as wide", "smooth_l1_loss",
    "wrong argument, wrong factor; scale, other function",
    lambda call: call_again(call, beta=3 * call.kwargs.get("beta", 1.0)))
# The linear part begins at half of the distance.
FAULTS.add("delta halved", "huber_loss",
    "wrong argument, wrong factor; scale, other function, clipped",
    lambda call: call_again(call, delta=call.kwargs.get("delta", 1.0) / 2))
# fmt: on


# --- Chances --------------------------------------------------------------------------------------


# fmt: off
# A temperature of one half.
FAULTS.add("logits doubled", "binary_cross_entropy_with_logits",
    "wrong factor, scale; wrong argument, other function", operand(0, lambda v: 2 * v, "input"))
# The labels are one row off.
FAULTS.add("labels of the next example", "binary_cross_entropy_with_logits binary_cross_entropy",
    "wrong index, shift, permutation; copy", operand(1, lambda v: v.roll(-1, 0), "target"))
# The chances of the teacher are one row off.
FAULTS.add("teacher of the next example", "kl_div", "wrong index, shift, permutation; copy, stale",
    operand(1, lambda v: v.roll(-1, 0), "target"))
# Every class has the same chance.
FAULTS.add("teacher without an opinion", "kl_div",
    "constant, missing operand, other function; wrong argument, wrong reduction",
    operand(1, lambda v: torch.full_like(v, 1 / v.size(-1)), "target"))
# fmt: on


# --- Margins --------------------------------------------------------------------------------------


@FAULTS.fault(
    "margin_ranking_loss", "clipped, missing operand, other function; sign, wrong reduction"
)
def hinge_forgotten(call: Call) -> Any:
    """The mean of -y (a - b) + margin, also where it is negative."""
    first, second, side = call.args[:3]
    margin = call.args[3] if len(call.args) > 3 else call.kwargs.get("margin", 0.0)
    return call.instead((-side * (first - second) + margin).mean())


@FAULTS.fault("triplet_margin_loss", "other function, missing operand; wrong argument")
def squared_distances_of_the_triplets(call: Call) -> Any:
    """The roots are not taken."""
    anchor, near, far = call.args[:3]
    margin = call.kwargs.get("margin", 1.0)
    close, wide = (anchor - near).square().sum(-1), (anchor - far).square().sum(-1)
    return call.instead((close - wide + margin).relu().mean())
