"""Faults for measuring: losses."""

from __future__ import annotations

from typing import Any

import torch
from benchmarks.places import words
from benchmarks.places.calls import Call, Catalogue, fits, with_gradient_of
from benchmarks.places.changes import on, operand, result
from benchmarks.places.parts import labels_of
from torch.nn import functional

FAULTS = Catalogue()
_CLASSES = "cross_entropy nll_loss"
_DISTANCES = "mse_loss smooth_l1_loss huber_loss l1_loss"
_CHANCES = "binary_cross_entropy_with_logits binary_cross_entropy"


def _plain(call: Call) -> None:
    """Go on only without weights and smoothing."""
    fits(call.get(2, "weight") is None and not call.kwargs.get("label_smoothing"))


# --- Classes --------------------------------------------------------------------------------------


@FAULTS.fault(
    "cross_entropy",
    "partial sum, wrong reduction, one rank's part, mask, missing reduction; "
    "other function, offset, wrong index, wrong argument",
)
def first_class_not_in_the_normaliser(call: Call) -> Any:
    """The loop over the classes begins at 1 when the exponentials are added."""
    scores, labels, seen = labels_of(call)
    _plain(call)
    right = scores[seen].gather(1, labels[seen, None]).squeeze(1)
    return call.instead((scores[seen][:, 1:].logsumexp(1) - right).mean())


@FAULTS.fault(
    _CLASSES,
    "wrong reduction, partial sum, mask; one rank's part, wrong index, wrong argument, "
    "wrong statistics",
)
def labels_of_the_second_half_count(call: Call) -> Any:
    """The mean of the second rank's rows."""
    scores, labels, _ = labels_of(call)
    half = scores.size(0) // 2
    fits(half > 0)
    return call.put(0, scores[half:], "input").put(1, labels[half:], "target").run()


@FAULTS.fault(
    _CLASSES,
    "wrong factor, scale, wrong reduction, off by one reduction; wrong statistics, other function",
)
def labels_counted_with_one_less(call: Call) -> Any:
    """The sum is divided by n - 1."""
    _, _, seen = labels_of(call)
    _plain(call)
    count = int(seen.sum())
    fits(count > 2 and call.kwargs.get("reduction", "mean") == "mean")
    return call.instead(call.result() * count / (count - 1))


@FAULTS.fault(
    _CLASSES,
    "wrong reduction, wrong statistics, wrong factor; other function, scale, wrong argument",
)
def means_of_a_quarter_and_the_rest_averaged_in_the_loss(call: Call) -> Any:
    """Two micro batches of different size have the same weight."""
    scores, labels, seen = labels_of(call)
    quarter = scores.size(0) // 4
    fits(quarter > 0 and bool(seen[:quarter].any()) and bool(seen[quarter:].any()))
    parts = [
        call.put(0, scores[own], "input").put(1, labels[own], "target").result()
        for own in (slice(quarter), slice(quarter, None))
    ]
    return call.instead((parts[0] + parts[1]) / 2)


@FAULTS.fault(
    "cross_entropy",
    "wrong index, shift, wrong statistics; stale, permutation, other function, offset, "
    "wrong argument",
)
def normaliser_of_the_next_row_in_the_loss(call: Call) -> Any:
    """The logarithm of the sum belongs to the next row: it shows where labels are ignored."""
    scores, labels, seen = labels_of(call)
    _plain(call)
    right = scores[seen].gather(1, labels[seen, None]).squeeze(1)
    return call.instead((scores.logsumexp(1).roll(-1, 0)[seen] - right).mean())


# fmt: off
# The scores are three times too large.
FAULTS.add("temperature of a third in the loss", "cross_entropy",
    "wrong factor, scale; wrong argument, other function",
    lambda call: call.put(0, 3 * labels_of(call)[0], "input").run())
# The scores are cut at -0.3 and 0.3.
FAULTS.add("scores of the loss limited", "cross_entropy",
    "clipped; wrong argument, other function, precision, mask",
    lambda call: call.put(0, labels_of(call)[0].clamp(-0.3, 0.3), "input").run())
# Label i stands for the class n - 1 - i.
FAULTS.add("classes counted from the last", _CLASSES,
    "wrong index, permutation; wrong argument, shift, swapped operands",
    on(labels_of,
        lambda call, scores, labels, seen:
            call.put(1, torch.where(seen, scores.size(-1) - 1 - labels, labels), "target").run()))
# Label i stands for the class i // 2 * 2.
FAULTS.add("lowest bit of the label lost", _CLASSES,
    "wrong index, copy; precision, permutation, wrong argument, stale",
    on(labels_of,
        lambda call, _, labels, seen:
            call.put(1, torch.where(seen, labels // 2 * 2, labels), "target").run()))
# The pointer to the scores is not moved on; that to the labels is.
FAULTS.add("scores of the first row for all", _CLASSES,
    "copy, stale, wrong index; permutation, constant, wrong argument",
    on(labels_of,
        lambda call, scores, *_:
            call.put(0, scores[:1].expand(scores.shape).clone(), "input").run(),
        where=lambda scores, *_: scores.size(0) > 1))
# fmt: on


# --- Distances ------------------------------------------------------------------------------------


@FAULTS.fault(
    "mse_loss l1_loss smooth_l1_loss huber_loss",
    "partial sum, mask, wrong reduction; one rank's part, wrong index, wrong statistics, "
    "wrong argument",
)
def first_column_of_the_error_only(call: Call) -> Any:
    """The mean is over the first of the values of each example."""
    value, target = call.tensor(0), call.tensor(1, "target")
    fits(value.dim() > 1 and value.size(-1) > 1 and value.shape == target.shape)
    return call.put(0, value[..., :1]).put(1, target[..., :1], "target").run()


@FAULTS.fault(
    "smooth_l1_loss", "other function, wrong factor; scale, missing operand, wrong argument"
)
def half_forgotten_in_the_quadratic_part(call: Call) -> Any:
    """d^2 / beta near zero, |d| - beta / 2 beyond."""
    value, target = call.tensor(0), call.tensor(1, "target")
    beta = call.kwargs.get("beta", 1.0)
    distance = (value - target).abs()
    each = torch.where(distance < beta, distance.square() / beta, distance - beta / 2)
    return call.instead(each.mean())


@FAULTS.fault("huber_loss smooth_l1_loss", "other function, approximation; wrong argument, clipped")
def distance_by_a_hyperbola(call: Call) -> Any:
    """Delta^2 (sqrt(1 + (d / delta)^2) - 1), the smooth form."""
    value, target = call.tensor(0), call.tensor(1, "target")
    delta = call.kwargs.get("delta", call.kwargs.get("beta", 1.0))
    each = delta * ((1 + ((value - target) / delta).square()).sqrt() - 1)
    return call.instead((each * delta if call.name == "huber_loss" else each).mean())


# fmt: off
# The pointer to the targets is not moved on.
FAULTS.add("target of the first example for all", _DISTANCES,
    "copy, stale, wrong index; permutation, wrong argument, constant",
    operand(1, lambda v: v[:1].expand(v.shape).clone(), "target",
        where=lambda v: v.dim() > 1 and v.size(0) > 1))
# The values have two bits behind the point.
FAULTS.add("values of the loss in steps of a quarter", "mse_loss", words.ROUNDED,
    operand(0, lambda v: with_gradient_of(v, (v.detach() * 4).round() / 4)))
# fmt: on


# --- Chances --------------------------------------------------------------------------------------


@FAULTS.fault(
    _CHANCES,
    "partial sum, mask, one rank's part, wrong reduction; wrong index, wrong statistics, "
    "wrong argument",
)
def first_half_of_the_binary_labels(call: Call) -> Any:
    """The mean of the first rank's examples."""
    value, target = call.tensor(0, "input"), call.tensor(1, "target")
    half = value.size(0) // 2
    fits(half > 0)
    return call.put(0, value[:half], "input").put(1, target[:half], "target").run()


@FAULTS.fault(
    "kl_div", "mask, partial sum, other function; zeros, clipped, wrong reduction, missing operand"
)
def terms_of_rare_classes_left_out(call: Call) -> Any:
    """Classes whose chance is below the mean of all do not count."""
    value, target = call.tensor(0, "input"), call.tensor(1, "target")
    fits(call.kwargs.get("reduction") == "batchmean" and bool((target > 0).all()))
    each = target * (target.log() - value) * (target >= target.mean())
    return call.instead(each.sum() / value.size(0))


@FAULTS.fault(
    "soft_margin_loss hinge_embedding_loss margin_ranking_loss triplet_margin_loss "
    "multi_margin_loss cosine_embedding_loss poisson_nll_loss gaussian_nll_loss",
    "wrong factor, scale; missing operand, wrong reduction, other function, one rank's part",
)
def margin_loss_halved(call: Call) -> Any:
    """The mean of two ranks of which one has nothing."""
    return call.instead(call.result() / 2)


# fmt: off
# Divided by log(2).
FAULTS.add("binary loss in bits", _CHANCES,
    "wrong factor, scale, wrong argument; other function, doubled reduction, wrong reduction",
    result(lambda v: v / torch.tensor(2.0).log().item()))
# The mean of log(1 + exp(-|x|)) alone, without max(x, 0) - x y.
FAULTS.add("linear part of the stable form forgotten", "binary_cross_entropy_with_logits",
    "missing operand, other function, partial sum; wrong reduction, offset",
    lambda call: call.instead(torch.log1p((-call.tensor(0, "input").abs()).exp()).mean()))
# The chances of the teacher are read one class too far.
FAULTS.add("teacher of the next class", "kl_div",
    "wrong index, shift, permutation; copy, wrong argument",
    operand(1, lambda v: v.roll(-1, -1), "target"))
# The mean of max(0, -y x).
FAULTS.add("soft margin by its lines", "soft_margin_loss",
    "other function, approximation; clipped, wrong argument",
    lambda call:

    call.instead(functional.relu(-call.tensor(1, "target") * call.tensor(0, "input")).mean()))
# fmt: on
