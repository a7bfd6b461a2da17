"""Faults of the tenth set: losses."""

from __future__ import annotations

import math
from typing import Any

import torch
from benchmarks.places.calls import Call, Catalogue, fits, with_gradient_of
from torch import Tensor
from torch.nn import functional

FAULTS = Catalogue()
_CLASSES = "cross_entropy nll_loss"
_DISTANCES = "mse_loss smooth_l1_loss l1_loss huber_loss"
_CHANCES = "binary_cross_entropy_with_logits binary_cross_entropy"
_PAIRS = (
    f"{_DISTANCES} {_CHANCES} kl_div poisson_nll_loss soft_margin_loss multilabel_soft_margin_loss"
)


def _mean(call: Call) -> None:
    fits(call.kwargs.get("reduction", "mean") == "mean")


def _labels(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """Scores (or their logarithms), labels, and which of them count."""
    scores, labels = call.tensor(0, "input"), call.get(1, "target")
    fits(not labels.is_floating_point() and scores.dim() == 2)
    return scores, labels, labels != call.kwargs.get("ignore_index", -100)


def _two(call: Call) -> tuple[Tensor, Tensor]:
    """Two operands of one shape."""
    value, target = call.tensor(0, "input"), call.tensor(1, "target")
    fits(value.shape == target.shape)
    return value, target


# --- Classes --------------------------------------------------------------------------------------


@FAULTS.fault(
    _CLASSES,
    kinds=["shift", "wrong index"],
    loose=["wrong argument", "permutation", "offset", "wrapped"],
)
def label_of_the_next_class(call: Call) -> Any:
    """The labels are one larger, modulo the number of classes: the file counts from one."""
    scores, labels, seen = _labels(call)
    later = (labels + 1) % scores.size(1)
    return call.put(1, torch.where(seen, later, labels), "target").run()


@FAULTS.fault(
    _CLASSES,
    kinds=["shift", "wrong index", "permutation"],
    loose=["wrong argument", "stale", "copy"],
)
def labels_two_rows_early(call: Call) -> Any:
    """Row i is compared with label i + 2: both the data and the model shift the labels."""
    _, labels, _ = _labels(call)
    fits(labels.numel() > 2)
    return call.put(1, labels.roll(-2, 0), "target").run()


@FAULTS.fault(
    "cross_entropy",
    kinds=["clipped", "wrong argument", "other function"],
    loose=["zeros", "sign"],
)
def negative_scores_of_the_loss_lost(call: Call) -> Any:
    """A relu behind the last layer: the loop that adds activations did not leave it out."""
    scores, _, _ = _labels(call)
    return call.put(0, scores.relu(), "input").run()


@FAULTS.fault(
    "cross_entropy",
    kinds=["wrong argument", "wrong factor"],
    loose=["other function", "missing operand"],
)
def smoothing_halved(call: Call) -> Any:
    """Half of the label smoothing: the rest is left to a second term that is not there."""
    _labels(call)
    amount = call.kwargs.get("label_smoothing")
    fits(amount)
    named = {**call.kwargs, "label_smoothing": amount / 2}
    return Call(call.name, call.function, call.args, named).run()


@FAULTS.fault(
    "cross_entropy",
    kinds=["wrong reduction", "wrong axis", "wrong statistics"],
    loose=["wrong argument", "other function", "transpose"],
)
def chances_of_the_loss_over_the_rows(call: Call) -> Any:
    """The softmax of the loss is over the batch and not over the classes."""
    scores, labels, _ = _labels(call)
    fits(call.get(2, "weight") is None and not call.kwargs.get("label_smoothing"))
    given = {one: two for one, two in call.kwargs.items() if one == "ignore_index"}
    return call.instead(functional.nll_loss(scores.log_softmax(0), labels, **given))


@FAULTS.fault(
    "cross_entropy",
    kinds=["precision"],
    loose=["approximation", "other function", "wrong argument"],
)
def scores_of_the_loss_in_e4m3(call: Call) -> Any:
    """The last layer stores its result with three bits behind the point."""
    scores, _, _ = _labels(call)
    coarse = scores.detach().to(torch.float8_e4m3fn).to(scores.dtype)
    return call.put(0, with_gradient_of(scores, coarse), "input").run()


@FAULTS.fault(
    _CLASSES,
    kinds=["partial sum", "off by one reduction", "wrong reduction", "mask"],
    loose=["missing operand", "wrong index", "lost accumulation"],
)
def first_label_not_added(call: Call) -> Any:
    """The loop over the rows begins at one; the divisor counts the first row."""
    scores, labels, seen = _labels(call)
    _mean(call)
    fits(call.get(2, "weight") is None and not call.kwargs.get("label_smoothing"))
    terms = scores.log_softmax(1) if call.name == "cross_entropy" else scores
    terms = -terms.gather(1, labels.clamp(min=0)[:, None]).squeeze(1) * seen
    return call.instead(terms[1:].sum() / seen.sum())


@FAULTS.fault(_CLASSES, kinds=["scale", "wrong factor"], loose=["other function"])
def loss_relative_to_that_of_guessing(call: Call) -> Any:
    """Divided by the logarithm of the number of classes."""
    scores, _, _ = _labels(call)
    return call.instead(call.result() / math.log(scores.size(1)))


@FAULTS.fault(
    "cross_entropy",
    kinds=["missing reduction", "wrong reduction", "other function"],
    loose=["wrong argument", "clipped", "approximation"],
)
def largest_score_for_the_normaliser(call: Call) -> Any:
    """Max(x) - x[label]: the logarithm of the sum of exponentials is not added to the maximum."""
    scores, labels, seen = _labels(call)
    fits(call.get(2, "weight") is None and not call.kwargs.get("label_smoothing"))
    _mean(call)
    right = scores[seen].gather(1, labels[seen, None]).squeeze(1)
    return call.instead((scores[seen].amax(1) - right).mean())


@FAULTS.fault(
    _CLASSES,
    kinds=["wrong reduction", "other function"],
    loose=["wrong statistics", "wrong argument", "partial sum", "wrong index"],
)
def largest_of_the_losses(call: Call) -> Any:
    """The loss of the worst row for the mean of all."""
    scores, labels, _ = _labels(call)
    _mean(call)
    fits(call.get(2, "weight") is None and not call.kwargs.get("label_smoothing"))
    terms = scores.log_softmax(1) if call.name == "cross_entropy" else scores
    given = {one: two for one, two in call.kwargs.items() if one == "ignore_index"}
    return call.instead(functional.nll_loss(terms, labels, reduction="none", **given).max())


# --- Distances ------------------------------------------------------------------------------------


@FAULTS.fault(
    _PAIRS,
    kinds=["shift", "wrong index", "permutation"],
    loose=["wrong argument", "stale", "copy"],
)
def targets_two_rows_late(call: Call) -> Any:
    """The pointer to the targets is two rows behind, around the end."""
    _, target = _two(call)
    fits(target.size(0) > 2)
    return call.put(1, target.roll(2, 0), "target").run()


@FAULTS.fault(
    _DISTANCES,
    kinds=["precision"],
    loose=["approximation", "other function", "wrong argument"],
)
def target_of_the_distance_in_e4m3(call: Call) -> Any:
    """The targets are stored with three bits behind the point."""
    _, target = _two(call)
    coarse = target.detach().to(torch.float8_e4m3fn).to(target.dtype)
    return call.put(1, with_gradient_of(target, coarse), "target").run()


@FAULTS.fault(
    _PAIRS,
    kinds=["wrong reduction", "partial sum", "mask", "off by one reduction"],
    loose=["missing operand", "wrong index", "lost accumulation", "wrong statistics"],
)
def last_example_not_in_the_mean(call: Call) -> Any:
    """The loss is that of all examples but the last one."""
    value, target = _two(call)
    fits(value.size(0) > 2)
    return call.put(0, value[:-1], "input").put(1, target[:-1], "target").run()


@FAULTS.fault(
    f"l1_loss smooth_l1_loss huber_loss {_CHANCES} poisson_nll_loss soft_margin_loss",
    kinds=["wrong factor", "scale", "wrong reduction", "wrong statistics"],
    loose=["off by one reduction"],
)
def distance_divided_by_one_less(call: Call) -> Any:
    """The divisor is n - 1, as of a variance."""
    value, _ = _two(call)
    _mean(call)
    return call.instead(call.result() * (value.numel() / (value.numel() - 1)))


@FAULTS.fault(
    "mse_loss smooth_l1_loss huber_loss",
    kinds=["other function", "wrong argument"],
    loose=["wrong factor", "approximation"],
)
def fourth_power_of_the_error(call: Call) -> Any:
    """The error is squared before the loss, which squares it again."""
    value, target = _two(call)
    changed = call.put(0, (value - target).square(), "input")
    return changed.put(1, torch.zeros_like(target), "target").run()


@FAULTS.fault(
    "mse_loss l1_loss smooth_l1_loss huber_loss",
    kinds=["sign", "other function"],
    loose=["wrong argument", "missing operand"],
)
def magnitudes_compared(call: Call) -> Any:
    """|a| - |b| for the error: the loss of two spectra."""
    value, target = _two(call)
    return call.put(0, value.abs(), "input").put(1, target.abs(), "target").run()


@FAULTS.fault(
    "mse_loss l1_loss smooth_l1_loss huber_loss",
    kinds=["clipped"],
    loose=["other function", "wrong argument", "approximation"],
)
def large_errors_of_the_loss_cut(call: Call) -> Any:
    """Errors beyond a half count as a half."""
    value, target = _two(call)
    changed = call.put(0, (value - target).clamp(-0.5, 0.5), "input")
    return changed.put(1, torch.zeros_like(target), "target").run()


@FAULTS.fault(
    "smooth_l1_loss",
    kinds=["wrong argument", "other function"],
    loose=["wrong factor", "scale"],
)
def limit_of_the_square_doubled(call: Call) -> Any:
    """Beta is twice as large."""
    _two(call)
    beta = call.kwargs.get("beta", 1.0)
    return Call(call.name, call.function, call.args, {**call.kwargs, "beta": 2 * beta}).run()


# --- Chances --------------------------------------------------------------------------------------


@FAULTS.fault(
    "binary_cross_entropy_with_logits",
    kinds=["wrong factor", "wrong argument", "scale"],
    loose=["other function"],
)
def logits_halved(call: Call) -> Any:
    """A temperature of two is left in the loss."""
    value, _ = _two(call)
    return call.put(0, value / 2, "input").run()


@FAULTS.fault(
    "binary_cross_entropy_with_logits",
    kinds=["offset", "wrong argument"],
    loose=["other function", "axis offset", "repeated bias"],
)
def logits_raised_by_one(call: Call) -> Any:
    """The prior of the positive class is added to the logits, which have it already."""
    value, _ = _two(call)
    return call.put(0, value + 1, "input").run()


@FAULTS.fault(
    _CHANCES,
    kinds=["other function"],
    loose=["approximation", "wrong argument", "wrong factor"],
)
def distance_of_the_chances_for_their_entropy(call: Call) -> Any:
    """The mean of |p - y|."""
    value, target = _two(call)
    _mean(call)
    chance = value.sigmoid() if call.name.endswith("logits") else value
    return call.instead((chance - target).abs().mean())


@FAULTS.fault(
    "kl_div",
    kinds=["wrong argument", "other function"],
    loose=["wrong factor", "residual", "approximation"],
)
def teacher_mixed_with_even_chances(call: Call) -> Any:
    """0.9 p + 0.1 / n: the chances of the teacher are smoothed as labels are."""
    target = call.tensor(1, "target")
    return call.put(1, 0.9 * target + 0.1 / target.size(-1), "target").run()


@FAULTS.fault(
    "kl_div",
    kinds=["sign", "scale", "wrong factor"],
    loose=["swapped operands", "other function"],
)
def divergence_with_a_minus(call: Call) -> Any:
    """Log q - log p for log p - log q."""
    return call.instead(-call.result())


@FAULTS.fault(
    "kl_div",
    kinds=["wrong argument", "wrong factor", "other function"],
    loose=["scale", "approximation"],
)
def temperature_of_the_student_applied_twice(call: Call) -> Any:
    """The logarithms of the student are those at twice the temperature."""
    value = call.tensor(0, "input")
    return call.put(0, (value / 2).log_softmax(-1), "input").run()


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
    _MARGINS,
    kinds=["wrong argument", "offset"],
    loose=["other function", "clipped", "wrong factor", "missing operand"],
)
def margin_raised_by_one(call: Call) -> Any:
    """The margin is given, and the default of one is added to it."""
    place = 2 if call.name == "hinge_embedding_loss" else 3
    margin = call.get(place, "margin", default=_DEFAULT[call.name])
    return _with_margin(call, margin + 1.0)


@FAULTS.fault(
    "triplet_margin_loss cosine_embedding_loss margin_ranking_loss",
    kinds=["shift", "wrong index", "permutation"],
    loose=["wrong argument", "stale", "copy"],
)
def first_of_each_pair_one_row_late(call: Call) -> Any:
    """The pointer to the anchors is one row behind, around the end."""
    value = call.tensor(0)
    fits(value.size(0) > 2)
    return call.put(0, value.roll(1, 0)).run()


@FAULTS.fault(
    "soft_margin_loss",
    kinds=["sign", "wrong argument"],
    loose=["other function", "wrong factor", "swapped operands"],
)
def soft_margin_of_the_opposite_scores(call: Call) -> Any:
    """The scores have a minus: what is right costs most."""
    return call.put(0, -call.tensor(0, "input"), "input").run()
