"""Faults of the tenth set: losses."""

from __future__ import annotations

import math
from typing import Any

import torch
from benchmarks.places import words
from benchmarks.places.calls import Call, Catalogue, fits, with_gradient_of
from benchmarks.places.changes import longer, on, operand, result
from benchmarks.places.parts import equal_input_and_target, labels_of, only_mean
from torch.nn import functional

FAULTS = Catalogue()
_CLASSES = "cross_entropy nll_loss"
_DISTANCES = "mse_loss smooth_l1_loss l1_loss huber_loss"
_CHANCES = "binary_cross_entropy_with_logits binary_cross_entropy"
_PAIRS = (
    f"{_DISTANCES} {_CHANCES} kl_div poisson_nll_loss soft_margin_loss multilabel_soft_margin_loss"
)


# --- Classes --------------------------------------------------------------------------------------


@FAULTS.fault(_CLASSES, words.MOVED)
def labels_two_rows_early(call: Call) -> Any:
    """Row i is compared with label i + 2: both the data and the model shift the labels."""
    _, labels, _ = labels_of(call)
    fits(labels.numel() > 2)
    return call.put(1, labels.roll(-2, 0), "target").run()


@FAULTS.fault("cross_entropy", "wrong argument, wrong factor; other function, missing operand")
def smoothing_halved(call: Call) -> Any:
    """Half of the label smoothing: the rest is left to a second term that is not there."""
    labels_of(call)
    amount = call.kwargs.get("label_smoothing")
    fits(amount)
    named = {**call.kwargs, "label_smoothing": amount / 2}
    return Call(call.name, call.function, call.args, named).run()


@FAULTS.fault(
    "cross_entropy",
    "wrong reduction, wrong axis, wrong statistics; wrong argument, other function, transpose",
)
def chances_of_the_loss_over_the_rows(call: Call) -> Any:
    """The softmax of the loss is over the batch and not over the classes."""
    scores, labels, _ = labels_of(call)
    fits(call.get(2, "weight") is None and not call.kwargs.get("label_smoothing"))
    given = {one: two for one, two in call.kwargs.items() if one == "ignore_index"}
    return call.instead(functional.nll_loss(scores.log_softmax(0), labels, **given))


@FAULTS.fault("cross_entropy", words.ROUNDED)
def scores_of_the_loss_in_e4m3(call: Call) -> Any:
    """The last layer stores its result with three bits behind the point."""
    scores, _, _ = labels_of(call)
    coarse = scores.detach().to(torch.float8_e4m3fn).to(scores.dtype)
    return call.put(0, with_gradient_of(scores, coarse), "input").run()


@FAULTS.fault(
    _CLASSES,
    "partial sum, off by one reduction, wrong reduction, mask; missing operand, "
    "wrong index, lost accumulation",
)
def first_label_not_added(call: Call) -> Any:
    """The loop over the rows begins at one; the divisor counts the first row."""
    scores, labels, seen = labels_of(call)
    only_mean(call)
    fits(call.get(2, "weight") is None and not call.kwargs.get("label_smoothing"))
    terms = scores.log_softmax(1) if call.name == "cross_entropy" else scores
    terms = -terms.gather(1, labels.clamp(min=0)[:, None]).squeeze(1) * seen
    return call.instead(terms[1:].sum() / seen.sum())


@FAULTS.fault(
    "cross_entropy",
    "missing reduction, wrong reduction, other function; wrong argument, clipped, approximation",
)
def largest_score_for_the_normaliser(call: Call) -> Any:
    """Max(x) - x[label]: the logarithm of the sum of exponentials is not added to the maximum."""
    scores, labels, seen = labels_of(call)
    fits(call.get(2, "weight") is None and not call.kwargs.get("label_smoothing"))
    only_mean(call)
    right = scores[seen].gather(1, labels[seen, None]).squeeze(1)
    return call.instead((scores[seen].amax(1) - right).mean())


@FAULTS.fault(
    _CLASSES,
    "wrong reduction, other function; wrong statistics, wrong argument, partial sum, wrong index",
)
def largest_of_the_losses(call: Call) -> Any:
    """The loss of the worst row for the mean of all."""
    scores, labels, _ = labels_of(call)
    only_mean(call)
    fits(call.get(2, "weight") is None and not call.kwargs.get("label_smoothing"))
    terms = scores.log_softmax(1) if call.name == "cross_entropy" else scores
    given = {one: two for one, two in call.kwargs.items() if one == "ignore_index"}
    return call.instead(functional.nll_loss(terms, labels, reduction="none", **given).max())


# fmt: off
# The labels are one larger, modulo the number of classes: the file counts from one.
FAULTS.add("label of the next class", _CLASSES,
    "shift, wrong index; wrong argument, permutation, offset, wrapped",
    on(labels_of,
        lambda call, scores, labels, seen:
            call.put(1, torch.where(seen, (labels + 1) % scores.size(1), labels), "target").run()))
# A relu behind the last layer: the loop that adds activations did not leave it out.
FAULTS.add("negative scores of the loss lost", "cross_entropy",
    "clipped, wrong argument, other function; zeros, sign",
    on(labels_of, lambda call, scores, *_: call.put(0, scores.relu(), "input").run()))
# Divided by the logarithm of the number of classes.
FAULTS.add("loss relative to that of guessing", _CLASSES, "scale, wrong factor; other function",
    on(labels_of,
        lambda call, scores, *_: call.instead(call.result() / math.log(scores.size(1)))))
# fmt: on


# --- Distances ------------------------------------------------------------------------------------


@FAULTS.fault(_DISTANCES, words.ROUNDED)
def target_of_the_distance_in_e4m3(call: Call) -> Any:
    """The targets are stored with three bits behind the point."""
    _, target = equal_input_and_target(call)
    coarse = target.detach().to(torch.float8_e4m3fn).to(target.dtype)
    return call.put(1, with_gradient_of(target, coarse), "target").run()


@FAULTS.fault(
    f"l1_loss smooth_l1_loss huber_loss {_CHANCES} poisson_nll_loss soft_margin_loss",
    "wrong factor, scale, wrong reduction, wrong statistics; off by one reduction",
)
def distance_divided_by_one_less(call: Call) -> Any:
    """The divisor is n - 1, as of a variance."""
    value, _ = equal_input_and_target(call)
    only_mean(call)
    return call.instead(call.result() * (value.numel() / (value.numel() - 1)))


@FAULTS.fault(
    "mse_loss smooth_l1_loss huber_loss",
    "other function, wrong argument; wrong factor, approximation",
)
def fourth_power_of_the_error(call: Call) -> Any:
    """The error is squared before the loss, which squares it again."""
    value, target = equal_input_and_target(call)
    changed = call.put(0, (value - target).square(), "input")
    return changed.put(1, torch.zeros_like(target), "target").run()


@FAULTS.fault(
    "mse_loss l1_loss smooth_l1_loss huber_loss",
    "clipped; other function, wrong argument, approximation",
)
def large_errors_of_the_loss_cut(call: Call) -> Any:
    """Errors beyond a half count as a half."""
    value, target = equal_input_and_target(call)
    changed = call.put(0, (value - target).clamp(-0.5, 0.5), "input")
    return changed.put(1, torch.zeros_like(target), "target").run()


@FAULTS.fault("smooth_l1_loss", "wrong argument, other function; wrong factor, scale")
def limit_of_the_square_doubled(call: Call) -> Any:
    """Beta is twice as large."""
    equal_input_and_target(call)
    beta = call.kwargs.get("beta", 1.0)
    return Call(call.name, call.function, call.args, {**call.kwargs, "beta": 2 * beta}).run()


# fmt: off
# The pointer to the targets is two rows behind, around the end.
FAULTS.add("targets two rows late", _PAIRS, words.MOVED,
    on(equal_input_and_target,
        lambda call, _, target: call.put(1, target.roll(2, 0), "target").run(),
        where=lambda _, target: target.size(0) > 2))
# The loss is that of all examples but the last one.
FAULTS.add("last example not in the mean", _PAIRS,
    "wrong reduction, partial sum, mask, off by one reduction; missing operand, wrong index, "
    "lost accumulation, wrong statistics",
    on(equal_input_and_target,
        lambda call, value, target:
            call.put(0, value[:-1], "input").put(1, target[:-1], "target").run(),
        where=lambda value, *_: value.size(0) > 2))
# |a| - |b| for the error: the loss of two spectra.
FAULTS.add("magnitudes compared", "mse_loss l1_loss smooth_l1_loss huber_loss",
    "sign, other function; wrong argument, missing operand",
    on(equal_input_and_target,
        lambda call, value, target:
            call.put(0, value.abs(), "input").put(1, target.abs(), "target").run()))
# fmt: on


# --- Chances --------------------------------------------------------------------------------------


@FAULTS.fault(_CHANCES, "other function; approximation, wrong argument, wrong factor")
def distance_of_the_chances_for_their_entropy(call: Call) -> Any:
    """The mean of |p - y|."""
    value, target = equal_input_and_target(call)
    only_mean(call)
    chance = value.sigmoid() if call.name.endswith("logits") else value
    return call.instead((chance - target).abs().mean())


# fmt: off
# A temperature of two is left in the loss.
FAULTS.add("logits halved", "binary_cross_entropy_with_logits",
    "wrong factor, wrong argument, scale; other function",
    on(equal_input_and_target, lambda call, value, *_: call.put(0, value / 2, "input").run()))
# The prior of the positive class is added to the logits, which have it already.
FAULTS.add("logits raised by one", "binary_cross_entropy_with_logits",
    "offset, wrong argument; other function, axis offset, repeated bias",
    on(equal_input_and_target, lambda call, value, *_: call.put(0, value + 1, "input").run()))
# 0.9 p + 0.1 / n: the chances of the teacher are smoothed as labels are.
FAULTS.add("teacher mixed with even chances", "kl_div",
    "wrong argument, other function; wrong factor, residual, approximation",
    operand(1, lambda v: 0.9 * v + 0.1 / v.size(-1), "target"))
# Log q - log p for log p - log q.
FAULTS.add("divergence with a minus", "kl_div",
    "sign, scale, wrong factor; swapped operands, other function", result(torch.neg))
# The logarithms of the student are those at twice the temperature.
FAULTS.add("temperature of the student applied twice", "kl_div", words.ANOTHER_FACTOR,
    operand(0, lambda v: (v / 2).log_softmax(-1), "input"))
# fmt: on


# --- Margins --------------------------------------------------------------------------------------

_MARGINS = (
    "margin_ranking_loss triplet_margin_loss cosine_embedding_loss hinge_embedding_loss "
    "multi_margin_loss"
)
_DEFAULT = {
    "margin_ranking_loss": 0.0,
    "triplet_margin_loss": 1.0,
    "cosine_embedding_loss": 0.0,
    "hinge_embedding_loss": 1.0,
    "multi_margin_loss": 1.0,
}


def _with_margin(call: Call, margin: float) -> Any:
    place = {"hinge_embedding_loss": 2, "multi_margin_loss": 3}.get(call.name, 3)
    if len(call.args) > place:
        return call.put(place, margin, "margin").run()
    return Call(call.name, call.function, call.args, {**call.kwargs, "margin": margin}).run()


@FAULTS.fault(
    _MARGINS, "wrong argument, offset; other function, clipped, wrong factor, missing operand"
)
def margin_raised_by_one(call: Call) -> Any:
    """The margin is given, and the default of one is added to it."""
    place = 2 if call.name == "hinge_embedding_loss" else 3
    margin = call.get(place, "margin", default=_DEFAULT[call.name])
    return _with_margin(call, margin + 1.0)


# fmt: off
# The pointer to the anchors is one row behind, around the end.
FAULTS.add("first of each pair one row late",
    "triplet_margin_loss cosine_embedding_loss margin_ranking_loss", words.MOVED,
    operand(0, lambda v: v.roll(1, 0), where=longer(0, 2)))
# The scores have a minus: what is right costs most.
FAULTS.add("soft margin of the opposite scores", "soft_margin_loss",
    "sign, wrong argument; other function, wrong factor, swapped operands",
    operand(0, torch.neg, "input"))
# fmt: on
