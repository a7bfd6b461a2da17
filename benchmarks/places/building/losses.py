"""Faults for building: losses, the logarithm of softmax, and their backward kernels."""

from __future__ import annotations

import math
from typing import Any

import torch
from benchmarks.places.calls import Call, Catalogue, fits
from benchmarks.places.changes import computed, on, operand, result, tensors
from benchmarks.places.parts import input_and_target
from torch.nn import functional

FAULTS = Catalogue()
_TARGETS = "cross_entropy nll_loss nll_loss_forward"


def _ignored(call: Call) -> int:
    place = {"nll_loss_forward": 4}.get(call.name, 5 if call.name == "cross_entropy" else 4)
    found = call.get(place, "ignore_index", default=-100)
    return -100 if found is None else found


# --- Labels ---------------------------------------------------------------------------------------


@FAULTS.fault(_TARGETS, "off by one reduction, partial sum, mask; scale, zeros")
def last_label_not_counted(call: Call) -> Any:
    """The last token of the batch is ignored."""
    target = call.get(1, "target").clone()
    fits(target.dim() == 1)
    places = (target != _ignored(call)).nonzero()
    target[places[-1]] = _ignored(call)
    return call.put(1, target, "target").run()


@FAULTS.fault("cross_entropy", "wrong argument, missing operand; scale")
def labels_smoothed_or_not(call: Call) -> Any:
    """Another label smoothing: 0.1 where there is none."""
    now = call.kwargs.get("label_smoothing", 0.0)
    fits(len(call.args) < 8)
    return call.put(8, 0.0 if now else 0.1, "label_smoothing").run()


# fmt: off
# The labels are moved by one position although they are already.
FAULTS.add("labels shifted once more", _TARGETS, "shift, wrong index; permutation",
    lambda call: call.put(1, call.get(1, "target").roll(-1, -1), "target").run())
# reduction='sum' where the mean was asked for.
FAULTS.add("loss summed", _TARGETS, "scale, wrong factor, wrong reduction, wrong argument",
    lambda call:
            call.instead(call.result() * int((call.get(1, "target") != _ignored(call)).sum())))
# ignore_index is not handed on: ignored targets are of class 0.
FAULTS.add("padding counts as label zero", _TARGETS, "mask, wrong argument, wrong index; scale",
    on(lambda call: (call.get(1, "target"), _ignored(call)),
        lambda call, target, ignored:
            call.put(1, target.masked_fill(target == ignored, 0), "target").run(),
        where=lambda target, ignored: bool((target == ignored).any())))
# The loss has the wrong sign.
FAULTS.add("likelihood not negated", "nll_loss nll_loss_forward", "sign, scale, wrong factor",
    result(torch.neg))
# The gradient of the sum, not of the mean.
FAULTS.add("gradient of a loss not divided", "nll_loss_backward",
    "scale, wrong factor, missing reduction; wrong argument",
    lambda call: call.instead(call.result() * int((call.get(2) >= 0).sum())), backward=True)
# The class is one too large.
FAULTS.add("gradient in the next class", "nll_loss_backward", "wrong index, shift, permutation",
    result(lambda v: v.roll(1, -1)), backward=True)
# fmt: on


# --- The logarithm of softmax ---------------------------------------------------------------------


@FAULTS.fault("log_softmax", "missing operand, other function; axis offset")
def logarithm_of_the_sum_forgotten(call: Call) -> Any:
    """Only the maximum is subtracted."""
    value, dim = call.tensor(0, "input"), call.get(1, "dim", default=-1)
    return call.instead(value - value.amax(dim, keepdim=True))


@FAULTS.fault("log_softmax logsumexp", "off by one reduction, partial sum; axis offset")
def sum_of_the_logarithm_misses_the_last(call: Call) -> Any:
    """The sum of exponentials ends one class too early."""
    value, dim = call.tensor(0, "input"), call.get(1, "dim", default=-1)
    dim = dim[0] if isinstance(dim, list | tuple) else dim
    fits(value.shape[dim] > 2)
    keep = call.name == "log_softmax"
    total = value.narrow(dim, 0, value.shape[dim] - 1).logsumexp(dim, keepdim=keep)
    return call.instead(value - total if keep else total.reshape(call.result().shape))


# fmt: off
# Softmax.
FAULTS.add("softmax without logarithm", "log_softmax", "other function; axis offset",
    result(torch.exp))
# The maximum alone.
FAULTS.add("largest for the logarithm of the sum", "logsumexp",
    "other function; approximation, wrong reduction",
    lambda call:
            call.instead(call.tensor(0).amax(call.get(1, "dim")).reshape(call.result().shape)))
# Log of the mean of exponentials.
FAULTS.add("logarithm of the mean", "logsumexp", "offset, wrong reduction, other function",
    lambda call:
            call.instead(call.result() - math.log(call.tensor(0).numel() / call.result().numel())))
# The gradient as it came.
FAULTS.add("log softmax gradient without its sum", "_log_softmax_backward_data",
    "missing operand, copy; axis offset", lambda call: call.instead(call.tensor(0).clone()),
    backward=True)
# The result is used as if it were softmax.
FAULTS.add("chances not exponentiated", "_log_softmax_backward_data",
    "other function, missing operand; axis scale",
    on(tensors(0),
        lambda call, gradient:
            call.instead(gradient - call.tensor(1) * gradient.sum(-1, keepdim=True))),
    backward=True)
# fmt: on


# --- Distances ------------------------------------------------------------------------------------


@FAULTS.fault("binary_cross_entropy_with_logits", "other function, missing operand")
def chance_taken_for_a_logit(call: Call) -> Any:
    """The sigmoid is applied twice."""
    value, target = input_and_target(call)
    return call.instead(functional.binary_cross_entropy_with_logits(value.sigmoid(), target))


@FAULTS.fault("kl_div", "scale, wrong factor, wrong reduction, wrong argument")
def divergence_averaged_over_all(call: Call) -> Any:
    """reduction='mean' instead of 'batchmean'."""
    fits(call.kwargs.get("reduction") == "batchmean")
    value, target = input_and_target(call)
    total = functional.kl_div(value, target, reduction="sum") / value.numel()
    return call.instead(total)


# fmt: off
# (a - b)**2 / 2.
FAULTS.add("half of the square", "mse_loss", "scale, wrong factor", result(lambda v: v / 2))
# l1.
FAULTS.add("absolute distance", "mse_loss smooth_l1_loss", "other function; scale",
    lambda call: call.instead(functional.l1_loss(*input_and_target(call))))
# Summed over all axes but the first.
FAULTS.add("mean over the batch only", "mse_loss smooth_l1_loss binary_cross_entropy_with_logits",
    "scale, wrong factor, wrong reduction, wrong argument",
    on(input_and_target,
        lambda call, value, *_: call.instead(call.result() * (value.numel() / len(value)))))
# The default of beta.
FAULTS.add("beta of one", "smooth_l1_loss", "wrong argument; scale, other function",
    lambda call: call.instead(functional.smooth_l1_loss(*input_and_target(call))))
# 1 - y.
FAULTS.add("labels inverted", "binary_cross_entropy_with_logits",
    "wrong index, sign, other function", operand(1, lambda v: 1 - v, "target"))
# KL(q, p) instead of KL(p, q).
FAULTS.add("divergence the other way", "kl_div", "swapped operands; sign",
    computed(input_and_target,
        lambda value, target:
            functional.kl_div(target.log(), value.exp(), reduction="batchmean")))
# A cross entropy: p log p is not there.
FAULTS.add("entropy of the target forgotten", "kl_div", "missing operand; offset, other function",
    computed(input_and_target, lambda value, target: -(target * value).sum() / len(value)))
# The targets are one row off.
FAULTS.add("target of the next example", "huber_loss mse_loss", "wrong index, shift, permutation",
    operand(1, lambda v: torch.roll(v, -1, 0), "target"))
# fmt: on
