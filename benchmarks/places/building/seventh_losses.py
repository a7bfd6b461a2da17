"""Faults for measuring: losses."""

from __future__ import annotations

from typing import Any

import torch
from benchmarks.places.calls import Call, Catalogue, fits, with_gradient_of
from torch import Tensor
from torch.nn import functional

FAULTS = Catalogue()
_CLASSES = "cross_entropy nll_loss"
_DISTANCES = "mse_loss smooth_l1_loss huber_loss l1_loss"
_CHANCES = "binary_cross_entropy_with_logits binary_cross_entropy"


def _labels(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """Scores (or their logarithms), labels, and which of them count."""
    scores, labels = call.tensor(0, "input"), call.get(1, "target")
    fits(not labels.is_floating_point() and scores.dim() == 2)
    return scores, labels, labels != call.kwargs.get("ignore_index", -100)


def _plain(call: Call) -> None:
    """Go on only without weights and smoothing."""
    fits(call.get(2, "weight") is None and not call.kwargs.get("label_smoothing"))


def _again(call: Call, **changed: Any) -> Any:
    """The call with other keywords."""
    return Call(call.name, call.function, call.args, {**call.kwargs, **changed}).run()


# --- Classes --------------------------------------------------------------------------------------


@FAULTS.fault(
    "cross_entropy",
    kinds=["wrong factor", "scale"],
    loose=["wrong argument", "other function"],
)
def temperature_of_a_third_in_the_loss(call: Call) -> Any:
    """The scores are three times too large."""
    return call.put(0, 3 * _labels(call)[0], "input").run()


@FAULTS.fault(
    "cross_entropy",
    kinds=["clipped"],
    loose=["wrong argument", "other function", "precision", "mask"],
)
def scores_of_the_loss_limited(call: Call) -> Any:
    """The scores are cut at -0.3 and 0.3."""
    return call.put(0, _labels(call)[0].clamp(-0.3, 0.3), "input").run()


@FAULTS.fault(
    _CLASSES,
    kinds=["wrong index", "permutation"],
    loose=["wrong argument", "shift", "swapped operands"],
)
def classes_counted_from_the_last(call: Call) -> Any:
    """Label i stands for the class n - 1 - i."""
    scores, labels, seen = _labels(call)
    turned = torch.where(seen, scores.size(-1) - 1 - labels, labels)
    return call.put(1, turned, "target").run()


@FAULTS.fault(
    _CLASSES,
    kinds=["wrong index", "copy"],
    loose=["precision", "permutation", "wrong argument", "stale"],
)
def lowest_bit_of_the_label_lost(call: Call) -> Any:
    """Label i stands for the class i // 2 * 2."""
    _, labels, seen = _labels(call)
    return call.put(1, torch.where(seen, labels // 2 * 2, labels), "target").run()


@FAULTS.fault(
    _CLASSES,
    kinds=["copy", "stale", "wrong index"],
    loose=["permutation", "constant", "wrong argument"],
)
def scores_of_the_first_row_for_all(call: Call) -> Any:
    """The pointer to the scores is not moved on; that to the labels is."""
    scores, _, _ = _labels(call)
    fits(scores.size(0) > 1)
    return call.put(0, scores[:1].expand(scores.shape).clone(), "input").run()


@FAULTS.fault(
    "cross_entropy",
    kinds=["partial sum", "wrong reduction", "one rank's part", "mask", "missing reduction"],
    loose=["other function", "offset", "wrong index", "wrong argument"],
)
def first_class_not_in_the_normaliser(call: Call) -> Any:
    """The loop over the classes begins at 1 when the exponentials are added."""
    scores, labels, seen = _labels(call)
    _plain(call)
    right = scores[seen].gather(1, labels[seen, None]).squeeze(1)
    return call.instead((scores[seen][:, 1:].logsumexp(1) - right).mean())


@FAULTS.fault(
    _CLASSES,
    kinds=["wrong reduction", "partial sum", "mask"],
    loose=["one rank's part", "wrong index", "wrong argument", "wrong statistics"],
)
def labels_of_the_second_half_count(call: Call) -> Any:
    """The mean of the second rank's rows."""
    scores, labels, _ = _labels(call)
    half = scores.size(0) // 2
    fits(half > 0)
    return call.put(0, scores[half:], "input").put(1, labels[half:], "target").run()


@FAULTS.fault(
    _CLASSES,
    kinds=["wrong factor", "scale", "wrong reduction", "off by one reduction"],
    loose=["wrong statistics", "other function"],
)
def labels_counted_with_one_less(call: Call) -> Any:
    """The sum is divided by n - 1."""
    _, _, seen = _labels(call)
    _plain(call)
    count = int(seen.sum())
    fits(count > 2 and call.kwargs.get("reduction", "mean") == "mean")
    return call.instead(call.result() * count / (count - 1))


@FAULTS.fault(
    _CLASSES,
    kinds=["wrong reduction", "wrong statistics", "wrong factor"],
    loose=["other function", "scale", "wrong argument"],
)
def means_of_a_quarter_and_the_rest_averaged_in_the_loss(call: Call) -> Any:
    """Two micro batches of different size have the same weight."""
    scores, labels, seen = _labels(call)
    quarter = scores.size(0) // 4
    fits(quarter > 0 and bool(seen[:quarter].any()) and bool(seen[quarter:].any()))
    parts = [
        call.put(0, scores[own], "input").put(1, labels[own], "target").result()
        for own in (slice(quarter), slice(quarter, None))
    ]
    return call.instead((parts[0] + parts[1]) / 2)


@FAULTS.fault(
    "cross_entropy",
    kinds=["wrong index", "shift", "wrong statistics"],
    loose=["stale", "permutation", "other function", "offset", "wrong argument"],
)
def normaliser_of_the_next_row_in_the_loss(call: Call) -> Any:
    """The logarithm of the sum belongs to the next row: it shows where labels are ignored."""
    scores, labels, seen = _labels(call)
    _plain(call)
    right = scores[seen].gather(1, labels[seen, None]).squeeze(1)
    return call.instead((scores.logsumexp(1).roll(-1, 0)[seen] - right).mean())


# --- Distances ------------------------------------------------------------------------------------


@FAULTS.fault(
    _DISTANCES,
    kinds=["copy", "stale", "wrong index"],
    loose=["permutation", "wrong argument", "constant"],
)
def target_of_the_first_example_for_all(call: Call) -> Any:
    """The pointer to the targets is not moved on."""
    target = call.tensor(1, "target")
    fits(target.dim() > 1 and target.size(0) > 1)
    return call.put(1, target[:1].expand(target.shape).clone(), "target").run()


@FAULTS.fault(
    "mse_loss l1_loss smooth_l1_loss huber_loss",
    kinds=["partial sum", "mask", "wrong reduction"],
    loose=["one rank's part", "wrong index", "wrong statistics", "wrong argument"],
)
def first_column_of_the_error_only(call: Call) -> Any:
    """The mean is over the first of the values of each example."""
    value, target = call.tensor(0), call.tensor(1, "target")
    fits(value.dim() > 1 and value.size(-1) > 1 and value.shape == target.shape)
    return call.put(0, value[..., :1]).put(1, target[..., :1], "target").run()


@FAULTS.fault(
    "mse_loss",
    kinds=["precision"],
    loose=["approximation", "other function", "wrong argument"],
)
def values_of_the_loss_in_steps_of_a_quarter(call: Call) -> Any:
    """The values have two bits behind the point."""
    value = call.tensor(0)
    coarse = (value.detach() * 4).round() / 4
    return call.put(0, with_gradient_of(value, coarse)).run()


@FAULTS.fault(
    "smooth_l1_loss",
    kinds=["other function", "wrong factor"],
    loose=["scale", "missing operand", "wrong argument"],
)
def half_forgotten_in_the_quadratic_part(call: Call) -> Any:
    """d^2 / beta near zero, |d| - beta / 2 beyond."""
    value, target = call.tensor(0), call.tensor(1, "target")
    beta = call.kwargs.get("beta", 1.0)
    distance = (value - target).abs()
    each = torch.where(distance < beta, distance.square() / beta, distance - beta / 2)
    return call.instead(each.mean())


@FAULTS.fault(
    "huber_loss smooth_l1_loss",
    kinds=["other function", "approximation"],
    loose=["wrong argument", "clipped"],
)
def distance_by_a_hyperbola(call: Call) -> Any:
    """Delta^2 (sqrt(1 + (d / delta)^2) - 1), the smooth form."""
    value, target = call.tensor(0), call.tensor(1, "target")
    delta = call.kwargs.get("delta", call.kwargs.get("beta", 1.0))
    each = delta * ((1 + ((value - target) / delta).square()).sqrt() - 1)
    return call.instead((each * delta if call.name == "huber_loss" else each).mean())


# --- Chances --------------------------------------------------------------------------------------


@FAULTS.fault(
    _CHANCES,
    kinds=["wrong factor", "scale", "wrong argument"],
    loose=["other function", "doubled reduction", "wrong reduction"],
)
def binary_loss_in_bits(call: Call) -> Any:
    """Divided by log(2)."""
    return call.instead(call.result() / torch.tensor(2.0).log().item())


@FAULTS.fault(
    _CHANCES,
    kinds=["partial sum", "mask", "one rank's part", "wrong reduction"],
    loose=["wrong index", "wrong statistics", "wrong argument"],
)
def first_half_of_the_binary_labels(call: Call) -> Any:
    """The mean of the first rank's examples."""
    value, target = call.tensor(0, "input"), call.tensor(1, "target")
    half = value.size(0) // 2
    fits(half > 0)
    return call.put(0, value[:half], "input").put(1, target[:half], "target").run()


@FAULTS.fault(
    "binary_cross_entropy_with_logits",
    kinds=["missing operand", "other function", "partial sum"],
    loose=["wrong reduction", "offset"],
)
def linear_part_of_the_stable_form_forgotten(call: Call) -> Any:
    """The mean of log(1 + exp(-|x|)) alone, without max(x, 0) - x y."""
    return call.instead(torch.log1p((-call.tensor(0, "input").abs()).exp()).mean())


@FAULTS.fault(
    "kl_div",
    kinds=["mask", "partial sum", "other function"],
    loose=["zeros", "clipped", "wrong reduction", "missing operand"],
)
def terms_of_rare_classes_left_out(call: Call) -> Any:
    """Classes whose chance is below the mean of all do not count."""
    value, target = call.tensor(0, "input"), call.tensor(1, "target")
    fits(call.kwargs.get("reduction") == "batchmean" and bool((target > 0).all()))
    each = target * (target.log() - value) * (target >= target.mean())
    return call.instead(each.sum() / value.size(0))


@FAULTS.fault(
    "kl_div",
    kinds=["wrong index", "shift", "permutation"],
    loose=["copy", "wrong argument"],
)
def teacher_of_the_next_class(call: Call) -> Any:
    """The chances of the teacher are read one class too far."""
    return call.put(1, call.tensor(1, "target").roll(-1, -1), "target").run()


@FAULTS.fault(
    "soft_margin_loss hinge_embedding_loss margin_ranking_loss triplet_margin_loss "
    "multi_margin_loss cosine_embedding_loss poisson_nll_loss gaussian_nll_loss",
    kinds=["wrong factor", "scale"],
    loose=["missing operand", "wrong reduction", "other function", "one rank's part"],
)
def margin_loss_halved(call: Call) -> Any:
    """The mean of two ranks of which one has nothing."""
    return call.instead(call.result() / 2)


@FAULTS.fault(
    "soft_margin_loss",
    kinds=["other function", "approximation"],
    loose=["clipped", "wrong argument"],
)
def soft_margin_by_its_lines(call: Call) -> Any:
    """The mean of max(0, -y x)."""
    value, side = call.tensor(0, "input"), call.tensor(1, "target")
    return call.instead(functional.relu(-side * value).mean())
