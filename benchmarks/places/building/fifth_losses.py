"""Faults that were measured fifth and have been seen: losses."""

from __future__ import annotations

from typing import Any

import torch
from benchmarks.places.calls import Call, Catalogue, fits
from benchmarks.places.changes import computed, on, operand, result
from benchmarks.places.parts import call_again, labels_of
from torch.nn import functional

FAULTS = Catalogue()
_CLASSES = "cross_entropy nll_loss"


# --- Classes --------------------------------------------------------------------------------------


# fmt: off
# Twice the label smoothing.
FAULTS.add("smoothing doubled", "cross_entropy", "wrong argument, wrong factor; scale, offset",
    on(lambda call: (call.kwargs.get("label_smoothing", 0.0),),
        lambda call, smoothing: call_again(call, label_smoothing=2 * smoothing),
        where=lambda smoothing: smoothing > 0))
# A temperature that belongs to sampling.
FAULTS.add("scores of the loss halved", "cross_entropy",
    "wrong factor, scale, wrong argument; other function",
    lambda call: call.put(0, labels_of(call)[0] / 2, "input").run())
# tanh(s), as a cap of one.
FAULTS.add("scores of the loss capped", "cross_entropy",
    "other function, clipped, approximation; wrong argument, wrong factor",
    lambda call: call.put(0, labels_of(call)[0].tanh(), "input").run())
# ignore_index is the class of the first label.
FAULTS.add("a class taken for padding", _CLASSES,
    "mask, wrong argument, partial sum; wrong statistics, wrong reduction, off by one reduction",
    on(labels_of,
        lambda call, _, labels, seen: call_again(call, ignore_index=int(labels[seen][0]))))
# The sum is divided by n + 1, so that it is never divided by zero.
FAULTS.add("labels counted with one more", _CLASSES,
    "off by one reduction, wrong factor, scale, wrong statistics; wrong reduction, eps",
    on(lambda call: (int(labels_of(call)[2].sum()),),
        lambda call, count: call.instead(call.result() * count / (count + 1))))
# The labels are read from their end.
FAULTS.add("labels from the last to the first", _CLASSES, "permutation, wrong index; shift",
    lambda call: call.put(1, labels_of(call)[1].flip(0), "target").run())
# A mean over the classes as well.
FAULTS.add("loss divided by the classes", _CLASSES,
    "scale, wrong factor; wrong reduction, missing operand",
    lambda call: call.instead(call.result() / labels_of(call)[0].size(-1)))
# The exponential of the mean.
FAULTS.add("perplexity for the loss", _CLASSES, "other function; missing operand, wrong argument",
    result(torch.exp))
# The chances of the model in the place of the labels.
FAULTS.add("entropy of the scores", "cross_entropy",
    "other function, missing operand; wrong index, wrong reduction, wrong argument",
    computed(labels_of,
        lambda scores, _, seen:
            -(scores.softmax(-1) * scores.log_softmax(-1)).sum(-1)[seen].mean()))
# A margin of one between the right class and the others.
FAULTS.add("hinge for the cross entropy", "cross_entropy", "other function; approximation, clipped",
    computed(labels_of,
        lambda scores, labels, seen: functional.multi_margin_loss(scores[seen], labels[seen])))
# Half: the other rank's loss is taken as zero.
FAULTS.add("loss averaged over two ranks of one", _CLASSES,
    "wrong factor, scale, one rank's part; wrong reduction, missing reduction",
    result(lambda v: v / 2))
# fmt: on


# --- Distances ------------------------------------------------------------------------------------


@FAULTS.fault(
    "mse_loss",
    "wrong argument, wrong reduction, scale, wrong factor; missing reduction, wrong statistics",
)
def mean_for_the_sum_of_squares(call: Call) -> Any:
    """reduction='mean' for 'sum'."""
    fits(call.kwargs.get("reduction") == "sum" or (len(call.args) > 2 and call.args[2] == 2))
    return call.instead(functional.mse_loss(call.tensor(0), call.tensor(1)))


# fmt: off
# (a + b)^2.
FAULTS.add("target added", "mse_loss", "sign, other function, wrong factor; swapped operands",
    operand(1, torch.neg, "target"))
# The wanted values are rounded.
FAULTS.add("target in bfloat16", "mse_loss smooth_l1_loss huber_loss l1_loss",
    "precision; approximation",
    operand(1, lambda v: v + (v.bfloat16().to(v.dtype) - v).detach(), "target"))
# The wanted values are zero.
FAULTS.add("target not read", "mse_loss l1_loss",
    "missing operand, other function; wrong argument, wrong factor, zeros",
    operand(1, torch.zeros_like, "target"))
# Half of the mean of squares: the linear part is never reached.
FAULTS.add("errors squared everywhere", "smooth_l1_loss huber_loss",
    "other function, wrong argument; clipped, approximation, wrong factor",
    lambda call: call.instead(functional.mse_loss(call.tensor(0), call.tensor(1)) / 2))
# The mean of a - b.
FAULTS.add("signed errors averaged", "l1_loss",
    "sign, missing operand, other function; wrong reduction",
    lambda call: call.instead((call.tensor(0) - call.tensor(1)).mean()))
# fmt: on


# --- Chances --------------------------------------------------------------------------------------


@FAULTS.fault(
    "binary_cross_entropy_with_logits binary_cross_entropy",
    "other function; approximation, wrong argument",
)
def squared_error_of_the_chances(call: Call) -> Any:
    """(p - y)^2."""
    value = call.tensor(0, "input")
    chances = value.sigmoid() if call.name.endswith("logits") else value
    return call.instead(functional.mse_loss(chances, call.tensor(1, "target")))


# fmt: off
# Between -0.3 and 0.3.
FAULTS.add("logits limited", "binary_cross_entropy_with_logits",
    "clipped; other function, wrong argument, approximation",
    operand(0, lambda v: v.clamp(-0.3, 0.3), "input"))
# Summed over the columns, averaged over the rows.
FAULTS.add("losses of the chances summed", "binary_cross_entropy",
    "wrong reduction, scale, wrong factor; missing reduction",
    lambda call: call.instead(call.result() * call.tensor(0).size(-1)))
# Nothing is ever the logarithm of zero.
FAULTS.add("target with a tenth added", "kl_div", "eps, offset, other function; wrong argument",
    operand(1, lambda v: v + 0.1, "target"))
# Half of a symmetric divergence.
FAULTS.add("divergence halved", "kl_div", "scale, wrong factor; missing operand",
    result(lambda v: v / 2))
# The count is taken for the rate.
FAULTS.add("rate and count exchanged", "poisson_nll_loss",
    "swapped operands; other function, wrong index",
    lambda call: call.put(0, call.tensor(1)).put(1, call.tensor(0)).run())
# exp(x) alone.
FAULTS.add("count does not matter", "poisson_nll_loss",
    "missing operand, other function; partial sum, wrong argument", operand(1, torch.zeros_like))
# fmt: on


# --- Margins --------------------------------------------------------------------------------------


@FAULTS.fault(
    "margin_ranking_loss cosine_embedding_loss hinge_embedding_loss multi_margin_loss",
    "wrong argument, wrong factor; scale, offset",
)
def margin_doubled(call: Call) -> Any:
    """Twice the margin."""
    if "margin" in call.kwargs:
        return call_again(call, margin=2 * call.kwargs["margin"])
    fits(call.name == "margin_ranking_loss")
    return call.put(3, 2 * call.args[3]).run()


@FAULTS.fault("margin_ranking_loss", "other function; wrong argument")
def squares_of_what_is_missing(call: Call) -> Any:
    """The squared hinge."""
    kwargs = {**call.kwargs, "reduction": "none"}
    own = Call(call.name, call.function, call.args, kwargs).run()
    return call.instead(own.square().mean())


@FAULTS.fault("triplet_margin_loss", "swapped operands, wrong index")
def anchor_and_near_exchanged(call: Call) -> Any:
    """Distances are measured from the positive."""
    anchor, positive, negative = call.args[:3]
    args = (positive, anchor, negative, *call.args[3:])
    return Call(call.name, call.function, args, call.kwargs).run()


# fmt: off
# The margin is halved.
FAULTS.add("triplets with half of the margin", "triplet_margin_loss",
    "wrong argument, wrong factor; scale, offset",
    lambda call: call_again(call, margin=call.kwargs.get("margin", 1.0) / 2))
# All labels are taken as positive.
FAULTS.add("sides not read", "soft_margin_loss",
    "missing operand, sign, other function; wrong argument", operand(1, torch.ones_like))
# The sign of the labels.
FAULTS.add("like and unlike exchanged", "cosine_embedding_loss",
    "sign, swapped operands, other function; wrong argument, wrong index", operand(2, torch.neg))
# reduction='sum'.
FAULTS.add("hinges summed", "hinge_embedding_loss",
    "wrong argument, wrong reduction, scale, wrong factor; missing reduction",
    lambda call: call_again(call, reduction="sum"))
# P of 2.
FAULTS.add("margins squared", "multi_margin_loss", "wrong argument, other function; wrong factor",
    lambda call: call_again(call, p=2))
# 1 - y.
FAULTS.add("several labels inverted", "multilabel_soft_margin_loss",
    "sign, swapped operands, other function; wrong argument", operand(1, lambda v: 1 - v))
# Not divided by the number of labels.
FAULTS.add("several labels summed", "multilabel_soft_margin_loss",
    "scale, wrong factor, wrong reduction; missing reduction, missing operand",
    lambda call: call.instead(call.result() * call.tensor(0).size(-1)))
# fmt: on
