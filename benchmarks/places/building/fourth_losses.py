"""Faults that were measured fourth and have been seen: losses."""

from __future__ import annotations

from typing import Any

import torch
from benchmarks.places.calls import Call, Catalogue, fits
from benchmarks.places.changes import computed, on, operand, result
from benchmarks.places.parts import labels_of
from torch import Tensor
from torch.nn import functional

FAULTS = Catalogue()


def _own(call: Call) -> tuple[Tensor, Tensor]:
    """The loss of each label, and which of them count."""
    kwargs = {**call.kwargs, "reduction": "none"}
    return Call(call.name, call.function, call.args, kwargs).run(), labels_of(call)[2]


_CLASSES = "cross_entropy nll_loss"


@FAULTS.fault(_CLASSES, "other function; wrong factor")
def easy_labels_count_less(call: Call) -> Any:
    """The focal factor of another loss: (1 - p)^2."""
    own, seen = _own(call)
    own = own[seen]
    return call.instead(((1 - (-own).exp()) ** 2 * own).mean())


@FAULTS.fault(
    _CLASSES, "partial sum, one rank's part, mask, wrong reduction; wrong statistics, wrong index"
)
def loss_of_the_first_rank(call: Call) -> Any:
    """The mean of the first half of the labels."""
    own, seen = _own(call)
    half = len(own) // 2
    fits(bool(seen[:half].any()))
    return call.instead(own[:half][seen[:half]].mean())


@FAULTS.fault(
    "cross_entropy",
    "missing operand, wrong argument; wrong factor, wrong statistics, wrong reduction",
)
def weights_of_the_classes_forgotten(call: Call) -> Any:
    """Each class counts the same."""
    fits(call.get(2, "weight") is not None)
    return call.put(2, None, "weight").run()


@FAULTS.fault(
    "cross_entropy", "wrong reduction, wrong factor, scale, wrong statistics; off by one reduction"
)
def weighted_losses_divided_by_their_number(call: Call) -> Any:
    """The mean divides by the number of labels and not by the sum of their weights."""
    fits(call.get(2, "weight") is not None)
    own, seen = _own(call)
    return call.instead(own[seen].mean())


@FAULTS.fault(
    "mse_loss l1_loss",
    "partial sum, mask, one rank's part; missing operand, wrong factor, wrong reduction",
)
def last_column_of_the_error_ignored(call: Call) -> Any:
    """The last of the values is not compared, and counts as right."""
    value, target = call.tensor(0, "input"), call.tensor(1, "target")
    kept = torch.ones(value.size(-1))
    kept[-1] = 0
    return call.put(0, value * kept, "input").put(1, target * kept, "target").run()


@FAULTS.fault(
    "binary_cross_entropy_with_logits",
    "missing operand, partial sum, other function; wrong factor, mask",
)
def right_labels_do_not_count(call: Call) -> Any:
    """Only (1 - y) log(1 - p)."""
    value, target = call.tensor(0, "input"), call.tensor(1, "target")
    return call.instead(((1 - target) * functional.softplus(value)).mean())


@FAULTS.fault("triplet_margin_loss", "swapped operands, wrong index; sign")
def far_and_near_exchanged(call: Call) -> Any:
    """The negative is taken for the positive."""
    anchor, positive, negative = call.args[:3]
    return call.instead(functional.triplet_margin_loss(anchor, negative, positive))


# fmt: off
# The median of the losses.
FAULTS.add("middle loss for the mean", _CLASSES,
    "wrong reduction, other function; wrong statistics",
    computed(_own, lambda own, seen: own[seen].median()))
# Divided by log(2).
FAULTS.add("loss in bits", _CLASSES, "scale, wrong factor; other function, wrong argument",
    result(lambda v: v / 0.6931471805599453))
# The class before the right one; the first stays.
FAULTS.add("classes counted from one", _CLASSES, "wrong index, offset, wrong argument; shift, mask",
    on(labels_of,
        lambda call, _, labels, seen:
            call.put(1, torch.where(seen, (labels - 1).clamp(min=0), labels), "target").run()))
# The scores are not made float32 first.
FAULTS.add("scores of the loss in bfloat16", "cross_entropy", "precision; approximation",
    operand(0, lambda v: v + (v.bfloat16().to(v.dtype) - v).detach(), "input"))
# log(cosh(a - b)).
FAULTS.add("logarithm of the cosh", "mse_loss", "other function; approximation, wrong argument",
    lambda call:
            call.instead((call.tensor(0, "input") - call.tensor(1, "target")).cosh().log().mean()))
# N - 1.
FAULTS.add("squares divided by one less", "mse_loss",
    "wrong factor, scale, off by one reduction; wrong statistics",
    on(lambda call: (call.tensor(0, "input").numel(),),
        lambda call, number: call.instead(call.result() * number / (number - 1))))
# Beta * beta is where the quadratic part ends.
FAULTS.add("beta squared", "smooth_l1_loss", "wrong argument, other function; approximation",
    on(lambda call: (call.kwargs["beta"],),
        lambda call, beta:
            Call(call.name, call.function, call.args, {**call.kwargs, "beta": beta**2}).run(),
        where=lambda beta: beta not in {0, 1}))
# Delta is not handed on.
FAULTS.add("delta of one", "huber_loss",
    "wrong argument, other function; approximation, wrong factor",
    lambda call: call.instead(functional.huber_loss(call.tensor(0), call.tensor(1))))
# The smooth l1 of the same width.
FAULTS.add("loss divided by delta", "huber_loss",
    "scale, wrong factor, other function; wrong argument", result(lambda v: v / 0.5))
# reduction='sum'.
FAULTS.add("distances summed", "l1_loss",
    "wrong reduction, wrong argument, scale, wrong factor; missing reduction",
    lambda call:
            call.instead(functional.l1_loss(call.tensor(0), call.tensor(1), reduction="sum")))
# The mean of squares.
FAULTS.add("squared for absolute", "l1_loss", "other function, wrong argument; sign",
    lambda call: call.instead(functional.mse_loss(call.tensor(0), call.tensor(1))))
# 0.9 y + 0.05.
FAULTS.add("binary labels smoothed", "binary_cross_entropy_with_logits",
    "wrong argument, other function; wrong factor, offset",
    operand(1, lambda v: 0.9 * v + 0.05, "target"))
# Between 0.4 and 0.6.
FAULTS.add("chances limited for the logarithm", "binary_cross_entropy",
    "clipped, eps, other function; approximation, wrong argument",
    operand(0, lambda v: v.clamp(0.4, 0.6)))
# The label is taken for the chance.
FAULTS.add("chances and labels exchanged", "binary_cross_entropy",
    "swapped operands; other function, wrong index",
    lambda call: call.put(0, call.tensor(1)).put(1, call.tensor(0)).run())
# reduction='sum'.
FAULTS.add("divergence summed", "kl_div",
    "wrong reduction, wrong argument, scale, wrong factor; missing reduction",
    lambda call:
            call.instead(functional.kl_div(call.tensor(0), call.tensor(1), reduction="sum")))
# The squared distance of the chances.
FAULTS.add("difference of chances squared", "kl_div", "other function; wrong argument, sign",
    on(lambda call: (call.tensor(0, "input"),),
        lambda call, value:
            call.instead((value.exp() - call.tensor(1, "target")).square().sum() / value.size(0))))
# log_input=False, of the magnitude.
FAULTS.add("rate not a logarithm", "poisson_nll_loss",
    "wrong argument, other function; missing operand",
    computed(lambda call: (call.tensor(0).abs(), call.tensor(1)),
        lambda value, target: (value - target * (value + 1e-08).log()).mean()))
# The second should be larger.
FAULTS.add("ranks exchanged", "margin_ranking_loss", "swapped operands, sign; other function",
    lambda call: call.put(0, call.args[1]).put(1, call.args[0]).run())
# A margin of 0.
FAULTS.add("no margin", "margin_ranking_loss", "wrong argument, missing operand, offset",
    lambda call: call.instead(functional.margin_ranking_loss(*call.args[:3])))
# P of 1.
FAULTS.add("margin by another length", "triplet_margin_loss", "wrong argument, other function",
    lambda call: call.instead(functional.triplet_margin_loss(*call.args[:3], p=1.0)))
# Max(0, 1 - y x).
FAULTS.add("hinge for the soft margin", "soft_margin_loss",
    "other function; approximation, clipped",
    lambda call: call.instead((1 - call.tensor(0) * call.tensor(1)).clamp(min=0).mean()))
# fmt: on
