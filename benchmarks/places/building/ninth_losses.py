"""Faults of the ninth set: losses."""

from __future__ import annotations

import math
from typing import Any

import torch
from benchmarks.places import words
from benchmarks.places.calls import Call, Catalogue, fits, with_gradient_of
from benchmarks.places.changes import longer, on, operand, result
from benchmarks.places.parts import labels_of, only_mean
from torch import Tensor
from torch.nn import functional

FAULTS = Catalogue()
_CLASSES = "cross_entropy nll_loss"
_MARGINS = "margin_ranking_loss triplet_margin_loss multi_margin_loss cosine_embedding_loss"


def _plain(call: Call) -> None:
    """Go on only without weights and smoothing, for a mean."""
    fits(call.get(2, "weight") is None and not call.kwargs.get("label_smoothing"))
    only_mean(call)


def _two(call: Call) -> tuple[Tensor, Tensor]:
    """Two operands of one shape, of which the mean is asked for."""
    value, target = call.tensor(0, "input"), call.tensor(1, "target")
    fits(value.shape == target.shape)
    only_mean(call)
    return value, target


# --- Classes --------------------------------------------------------------------------------------


@FAULTS.fault(
    "cross_entropy",
    "partial sum, off by one reduction, mask, wrong reduction; missing operand, offset, "
    "wrong index, wrong argument",
)
def last_class_not_in_the_normaliser(call: Call) -> Any:
    """The loop that adds the exponentials ends one class too early."""
    scores, labels, seen = labels_of(call)
    _plain(call)
    right = scores[seen].gather(1, labels[seen, None]).squeeze(1)
    return call.instead((scores[seen][:, :-1].logsumexp(1) - right).mean())


@FAULTS.fault(_CLASSES, "scale, wrong factor, doubled reduction; wrong reduction")
def loss_of_two_equal_ranks_summed(call: Call) -> Any:
    """Both ranks have the same rows, and their means are added."""
    labels_of(call)
    return call.instead(2 * call.result())


# fmt: off
# The pointer to the labels is not moved on; what is ignored stays so.
FAULTS.add("label of the first row for all", _CLASSES,
    "copy, stale, wrong index; constant, wrong argument, permutation",
    on(labels_of,
        lambda call, _, labels, seen:
            call.put(1, torch.where(seen, labels[seen][0], labels), "target").run()))
# fmt: on


# --- Distances ------------------------------------------------------------------------------------


@FAULTS.fault("mse_loss smooth_l1_loss l1_loss", words.ROUNDED)
def differences_in_bfloat16(call: Call) -> Any:
    """The difference of both operands is rounded before anything else."""
    value, target = _two(call)
    error = value - target
    coarse = error.detach().bfloat16().to(error.dtype)
    changed = call.put(0, with_gradient_of(error, coarse), "input")
    return changed.put(1, torch.zeros_like(target), "target").run()


@FAULTS.fault(
    "mse_loss", "scale, wrong factor, wrong reduction; wrong statistics, doubled reduction"
)
def squares_divided_by_half_of_their_number(call: Call) -> Any:
    """The factor two of the gradient is in the loss already."""
    _two(call)
    return call.instead(2 * call.result())


@FAULTS.fault(
    "smooth_l1_loss", "missing operand, other function; offset, wrong argument, mask, wrong factor"
)
def half_of_beta_not_subtracted(call: Call) -> Any:
    """D^2 / (2 beta) near zero, and |d| beyond: the two parts do not meet."""
    value, target = _two(call)
    beta = call.kwargs.get("beta", 1.0)
    far = (value - target).abs()
    fits(beta > 0)
    return call.instead(torch.where(far < beta, far.square() / (2 * beta), far).mean())


# --- Chances --------------------------------------------------------------------------------------


@FAULTS.fault(
    "binary_cross_entropy_with_logits", "other function; approximation, clipped, wrong argument"
)
def hinge_for_the_binary_loss(call: Call) -> Any:
    """Max(0, 1 - (2 y - 1) x): another loss for two classes."""
    value, target = _two(call)
    fits(call.get(2, "weight") is None and call.kwargs.get("pos_weight") is None)
    return call.instead((1 - (2 * target - 1) * value).relu().mean())


@FAULTS.fault("kl_div", "sign, other function; wrong reduction, approximation, wrong argument")
def magnitudes_of_the_terms_added(call: Call) -> Any:
    """A divergence is not negative, so a port makes every term positive."""
    value, target = call.tensor(0, "input"), call.tensor(1, "target")
    fits(call.kwargs.get("reduction") == "batchmean" and not call.kwargs.get("log_target"))
    terms = (torch.xlogy(target, target) - target * value).abs()
    return call.instead(terms.sum() / value.size(0))


# fmt: off
# The logits are not made float32 before the loss.
FAULTS.add("logits in bfloat16", "binary_cross_entropy_with_logits", words.ROUNDED,
    on(_two, lambda call, value, *_:

    call.put(0, with_gradient_of(value, value.detach().bfloat16().to(value.dtype)), "input").run()))
# Divided by log(2), as by a kernel that computes in powers of two.
FAULTS.add("divergence in bits", "kl_div", "scale, wrong factor; other function",
    result(lambda v: v / math.log(2)))
# fmt: on


# --- Margins --------------------------------------------------------------------------------------


@FAULTS.fault(
    _MARGINS,
    "wrong reduction, wrong argument, scale, wrong factor; missing operand, wrong statistics",
)
def margins_of_the_batch_summed(call: Call) -> Any:
    """reduction='sum'."""
    only_mean(call)
    return Call(call.name, call.function, call.args, {**call.kwargs, "reduction": "sum"}).run()


@FAULTS.fault(
    "triplet_margin_loss", "other function, missing operand; clipped, mask, wrong reduction, offset"
)
def triplets_without_their_hinge(call: Call) -> Any:
    """The mean of d(a, p) - d(a, n) + margin, also where it is negative."""
    anchor, near, far = (call.tensor(i) for i in range(3))
    only_mean(call)
    fits(not call.kwargs.get("swap") and call.kwargs.get("p", 2.0) == 2)
    distance = functional.pairwise_distance(anchor, near) - functional.pairwise_distance(
        anchor, far
    )
    return call.instead((distance + call.kwargs.get("margin", 1.0)).mean())


@FAULTS.fault(
    "cosine_embedding_loss",
    "other function, missing operand; clipped, mask, offset, wrong reduction",
)
def unlike_pairs_not_limited_from_below(call: Call) -> Any:
    """Cos - margin for max(0, cos - margin)."""
    left, right, side = (call.tensor(i) for i in range(3))
    only_mean(call)
    alike = functional.cosine_similarity(left, right)
    margin = call.kwargs.get("margin", 0.0)
    return call.instead(torch.where(side > 0, 1 - alike, alike - margin).mean())


@FAULTS.fault(
    "multi_margin_loss", "wrong reduction, other function; partial sum, wrong statistics, mask"
)
def largest_violation_only(call: Call) -> Any:
    """A maximum over the wrong classes, as of another hinge for several classes."""
    value, label = call.tensor(0, "input"), call.get(1, "target")
    only_mean(call)
    fits(call.kwargs.get("p", 1) == 1 and call.kwargs.get("weight") is None)
    own = value.gather(1, label[:, None])
    short = (call.kwargs.get("margin", 1.0) - own + value).relu()
    worst = short.scatter(1, label[:, None], 0).amax(1)
    return call.instead((worst / value.size(1)).mean())


# fmt: off
# The first one should always be larger: the third operand is taken as one.
FAULTS.add("order of the pair not read", "margin_ranking_loss",
    "missing operand, wrong argument; sign, constant, other function, copy",
    operand(2, torch.ones_like, "target"))
# The labels are read one column too far, around the end.
FAULTS.add("several labels of the next class", "multilabel_soft_margin_loss", words.MOVED,
    operand(1, lambda v: v.roll(-1, -1), "target", where=longer(-1)))
# The labels have the other sign.
FAULTS.add("near pairs taken for far ones", "hinge_embedding_loss",
    "sign, wrong argument; mask, other function, wrong index, swapped operands",
    operand(1, torch.neg, "target"))
# fmt: on
