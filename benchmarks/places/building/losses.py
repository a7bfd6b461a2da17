"""Faults for building: losses, the logarithm of softmax, and their backward kernels."""

from __future__ import annotations

import math
from typing import Any

import torch
from benchmarks.places.calls import Call, Catalogue, fits
from torch import Tensor
from torch.nn import functional

FAULTS = Catalogue()
_TARGETS = "cross_entropy nll_loss nll_loss_forward"


def _ignored(call: Call) -> int:
    place = {"nll_loss_forward": 4}.get(call.name, 5 if call.name == "cross_entropy" else 4)
    found = call.get(place, "ignore_index", default=-100)
    return -100 if found is None else found


# --- Labels ---------------------------------------------------------------------------------------


@FAULTS.fault(_TARGETS, kinds=["shift", "wrong index"], loose=["permutation"])
def labels_shifted_once_more(call: Call) -> Any:
    """The labels are moved by one position although they are already."""
    target = call.get(1, "target")
    return call.put(1, target.roll(-1, -1), "target").run()


@FAULTS.fault(_TARGETS, kinds=["scale", "wrong factor", "wrong reduction", "wrong argument"])
def loss_summed(call: Call) -> Any:
    """reduction='sum' where the mean was asked for."""
    target = call.get(1, "target")
    count = int((target != _ignored(call)).sum())
    return call.instead(call.result() * count)


@FAULTS.fault(_TARGETS, kinds=["mask", "wrong argument", "wrong index"], loose=["scale"])
def padding_counts_as_label_zero(call: Call) -> Any:
    """ignore_index is not handed on: ignored targets are of class 0."""
    target, ignored = call.get(1, "target"), _ignored(call)
    fits(bool((target == ignored).any()))
    return call.put(1, target.masked_fill(target == ignored, 0), "target").run()


@FAULTS.fault(
    _TARGETS, kinds=["off by one reduction", "partial sum", "mask"], loose=["scale", "zeros"]
)
def last_label_not_counted(call: Call) -> Any:
    """The last token of the batch is ignored."""
    target = call.get(1, "target").clone()
    fits(target.dim() == 1)
    places = (target != _ignored(call)).nonzero()
    target[places[-1]] = _ignored(call)
    return call.put(1, target, "target").run()


@FAULTS.fault("cross_entropy", kinds=["wrong argument", "missing operand"], loose=["scale"])
def labels_smoothed_or_not(call: Call) -> Any:
    """Another label smoothing: 0.1 where there is none."""
    now = call.kwargs.get("label_smoothing", 0.0)
    fits(len(call.args) < 8)
    return call.put(8, 0.0 if now else 0.1, "label_smoothing").run()


@FAULTS.fault("nll_loss nll_loss_forward", kinds=["sign", "scale", "wrong factor"])
def likelihood_not_negated(call: Call) -> Any:
    """The loss has the wrong sign."""
    return call.instead(-call.result())


@FAULTS.fault(
    "nll_loss_backward",
    kinds=["scale", "wrong factor", "missing reduction"],
    loose=["wrong argument"],
    backward=True,
)
def gradient_of_a_loss_not_divided(call: Call) -> Any:
    """The gradient of the sum, not of the mean."""
    target = call.get(2)
    return call.instead(call.result() * int((target >= 0).sum()))


@FAULTS.fault("nll_loss_backward", kinds=["wrong index", "shift", "permutation"], backward=True)
def gradient_in_the_next_class(call: Call) -> Any:
    """The class is one too large."""
    return call.instead(call.result().roll(1, -1))


# --- The logarithm of softmax ---------------------------------------------------------------------


@FAULTS.fault("log_softmax", kinds=["missing operand", "other function"], loose=["axis offset"])
def logarithm_of_the_sum_forgotten(call: Call) -> Any:
    """Only the maximum is subtracted."""
    value, dim = call.tensor(0, "input"), call.get(1, "dim", default=-1)
    return call.instead(value - value.amax(dim, keepdim=True))


@FAULTS.fault("log_softmax", kinds=["other function"], loose=["axis offset"])
def softmax_without_logarithm(call: Call) -> Any:
    """Softmax."""
    return call.instead(call.result().exp())


@FAULTS.fault(
    "log_softmax logsumexp", kinds=["off by one reduction", "partial sum"], loose=["axis offset"]
)
def sum_of_the_logarithm_misses_the_last(call: Call) -> Any:
    """The sum of exponentials ends one class too early."""
    value, dim = call.tensor(0, "input"), call.get(1, "dim", default=-1)
    dim = dim[0] if isinstance(dim, list | tuple) else dim
    fits(value.shape[dim] > 2)
    keep = call.name == "log_softmax"
    total = value.narrow(dim, 0, value.shape[dim] - 1).logsumexp(dim, keepdim=keep)
    return call.instead(value - total if keep else total.reshape(call.result().shape))


@FAULTS.fault("logsumexp", kinds=["other function"], loose=["approximation", "wrong reduction"])
def largest_for_the_logarithm_of_the_sum(call: Call) -> Any:
    """The maximum alone."""
    value, dim = call.tensor(0), call.get(1, "dim")
    return call.instead(value.amax(dim).reshape(call.result().shape))


@FAULTS.fault("logsumexp", kinds=["offset", "wrong reduction", "other function"])
def logarithm_of_the_mean(call: Call) -> Any:
    """Log of the mean of exponentials."""
    count = call.tensor(0).numel() / call.result().numel()
    return call.instead(call.result() - math.log(count))


@FAULTS.fault(
    "_log_softmax_backward_data",
    kinds=["missing operand", "copy"],
    loose=["axis offset"],
    backward=True,
)
def log_softmax_gradient_without_its_sum(call: Call) -> Any:
    """The gradient as it came."""
    return call.instead(call.tensor(0).clone())


@FAULTS.fault(
    "_log_softmax_backward_data",
    kinds=["other function", "missing operand"],
    loose=["axis scale"],
    backward=True,
)
def chances_not_exponentiated(call: Call) -> Any:
    """The result is used as if it were softmax."""
    gradient, result = call.tensor(0), call.tensor(1)
    return call.instead(gradient - result * gradient.sum(-1, keepdim=True))


# --- Distances ------------------------------------------------------------------------------------


def _both(call: Call) -> tuple[Tensor, Tensor]:
    return call.tensor(0, "input"), call.tensor(1, "target")


@FAULTS.fault("mse_loss", kinds=["scale", "wrong factor"])
def half_of_the_square(call: Call) -> Any:
    """(a - b)**2 / 2."""
    return call.instead(call.result() / 2)


@FAULTS.fault("mse_loss smooth_l1_loss", kinds=["other function"], loose=["scale"])
def absolute_distance(call: Call) -> Any:
    """l1."""
    return call.instead(functional.l1_loss(*_both(call)))


@FAULTS.fault(
    "mse_loss smooth_l1_loss binary_cross_entropy_with_logits",
    kinds=["scale", "wrong factor", "wrong reduction", "wrong argument"],
)
def mean_over_the_batch_only(call: Call) -> Any:
    """Summed over all axes but the first."""
    value, _ = _both(call)
    return call.instead(call.result() * (value.numel() / len(value)))


@FAULTS.fault("smooth_l1_loss", kinds=["wrong argument"], loose=["scale", "other function"])
def beta_of_one(call: Call) -> Any:
    """The default of beta."""
    return call.instead(functional.smooth_l1_loss(*_both(call)))


@FAULTS.fault("binary_cross_entropy_with_logits", kinds=["other function", "missing operand"])
def chance_taken_for_a_logit(call: Call) -> Any:
    """The sigmoid is applied twice."""
    value, target = _both(call)
    return call.instead(functional.binary_cross_entropy_with_logits(value.sigmoid(), target))


@FAULTS.fault("binary_cross_entropy_with_logits", kinds=["wrong index", "sign", "other function"])
def labels_inverted(call: Call) -> Any:
    """1 - y."""
    return call.put(1, 1 - call.tensor(1, "target"), "target").run()


@FAULTS.fault("kl_div", kinds=["scale", "wrong factor", "wrong reduction", "wrong argument"])
def divergence_averaged_over_all(call: Call) -> Any:
    """reduction='mean' instead of 'batchmean'."""
    fits(call.kwargs.get("reduction") == "batchmean")
    value, target = _both(call)
    total = functional.kl_div(value, target, reduction="sum") / value.numel()
    return call.instead(total)


@FAULTS.fault("kl_div", kinds=["swapped operands"], loose=["sign"])
def divergence_the_other_way(call: Call) -> Any:
    """KL(q, p) instead of KL(p, q)."""
    value, target = _both(call)
    other = functional.kl_div(target.log(), value.exp(), reduction="batchmean")
    return call.instead(other)


@FAULTS.fault("kl_div", kinds=["missing operand"], loose=["offset", "other function"])
def entropy_of_the_target_forgotten(call: Call) -> Any:
    """A cross entropy: p log p is not there."""
    value, target = _both(call)
    return call.instead(-(target * value).sum() / len(value))


@FAULTS.fault("huber_loss mse_loss", kinds=["wrong index", "shift", "permutation"])
def target_of_the_next_example(call: Call) -> Any:
    """The targets are one row off."""
    return call.put(1, torch.roll(call.tensor(1, "target"), -1, 0), "target").run()
