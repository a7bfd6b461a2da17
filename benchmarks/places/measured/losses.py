"""Faults for measuring: losses."""

from __future__ import annotations

from typing import Any

import torch
from benchmarks.places.calls import Call, Catalogue, fits, with_gradient_of
from torch import Tensor

FAULTS = Catalogue()
_CLASSES = "cross_entropy nll_loss"
_DISTANCES = "mse_loss smooth_l1_loss l1_loss huber_loss"
_CHANCES = "binary_cross_entropy_with_logits binary_cross_entropy"
_TERMS = f"{_DISTANCES} {_CHANCES} kl_div poisson_nll_loss soft_margin_loss"
_MARGINS = (
    "triplet_margin_loss margin_ranking_loss hinge_embedding_loss cosine_embedding_loss "
    "multi_margin_loss"
)
_ANY = f"{_CLASSES} {_TERMS} {_MARGINS} gaussian_nll_loss multilabel_soft_margin_loss"
_ORDER: dict[str, Any] = {
    "kinds": ["permutation", "wrong index"],
    "loose": ["wrong argument", "shift", "swapped operands", "stale", "copy"],
}
_FEWER: dict[str, Any] = {
    "kinds": ["partial sum", "mask", "wrong reduction"],
    "loose": ["missing operand", "wrong index", "wrong statistics", "one rank's part"],
}


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


def _scalar(call: Call) -> Tensor:
    value = call.result()
    fits(value.dim() == 0)
    return value


# --- Classes --------------------------------------------------------------------------------------


@FAULTS.fault(
    "cross_entropy", kinds=["wrong factor", "wrong argument"], loose=["scale", "other function"]
)
def temperature_of_two_thirds_in_the_loss(call: Call) -> Any:
    """The scores are multiplied by 3 / 2."""
    scores, _, _ = _labels(call)
    return call.put(0, 1.5 * scores, "input").run()


@FAULTS.fault(
    "cross_entropy",
    kinds=["clipped"],
    loose=["other function", "approximation", "wrong argument"],
)
def scores_of_the_loss_not_above_a_quarter(call: Call) -> Any:
    """Min(x, 1 / 4) for each score: the upper end of a stored range."""
    scores, _, _ = _labels(call)
    return call.put(0, scores.clamp(max=0.25), "input").run()


@FAULTS.fault(_CLASSES, **_ORDER)
def labels_of_the_rows_exchanged_in_pairs(call: Call) -> Any:
    """Rows 2 i and 2 i + 1 have each other's labels; the last of an odd number keeps its own."""
    _, labels, _ = _labels(call)
    count = labels.numel()
    places = torch.arange(count, device=labels.device) ^ 1
    places = torch.where(places < count, places, places - 1)
    return call.put(1, labels[places], "target").run()


@FAULTS.fault(_CLASSES, **_FEWER)
def every_third_label_counts(call: Call) -> Any:
    """Rows 0, 3, 6, ... are averaged, with their own number: one of three ranks."""
    scores, labels, seen = _labels(call)
    _mean(call)
    fits(labels.numel() > 3 and bool(seen[::3].any()))
    return call.put(0, scores[::3], "input").put(1, labels[::3], "target").run()


@FAULTS.fault(
    "cross_entropy",
    kinds=["wrong statistics", "wrong reduction", "other function"],
    loose=["offset", "residual", "approximation", "wrong argument", "off by one reduction"],
)
def one_more_in_the_normaliser_of_the_loss(call: Call) -> Any:
    """Log(1 + sum of exponentials): the softmax that may choose nothing."""
    scores, labels, seen = _labels(call)
    _mean(call)
    fits(call.get(2, "weight") is None and not call.kwargs.get("label_smoothing"))
    level = torch.cat([scores, torch.zeros_like(scores[:, :1])], 1).logsumexp(1)
    own = scores.gather(1, labels.clamp(min=0)[:, None]).squeeze(1)
    return call.instead((level - own)[seen].mean())


@FAULTS.fault(
    _CLASSES, kinds=["precision"], loose=["approximation", "other function", "wrong argument"]
)
def scores_of_the_loss_in_e5m2(call: Call) -> Any:
    """The scores have two bits behind the point."""
    scores, _, _ = _labels(call)
    coarse = scores.detach().to(torch.float8_e5m2).to(scores.dtype)
    return call.put(0, with_gradient_of(scores, coarse), "input").run()


# --- Any loss -------------------------------------------------------------------------------------


@FAULTS.fault(_ANY, kinds=["scale", "wrong factor"], loose=["other function", "wrong reduction"])
def loss_with_a_weight_of_a_tenth(call: Call) -> Any:
    """The weight of a side task is in the main one."""
    return call.instead(_scalar(call) / 10)


@FAULTS.fault(_ANY, kinds=["other function"], loose=["approximation", "wrong factor"])
def square_of_the_loss(call: Call) -> Any:
    """The mean is squared, not the error."""
    return call.instead(_scalar(call).square())


@FAULTS.fault(
    _ANY,
    kinds=["clipped"],
    loose=["other function", "constant", "wrong argument", "approximation"],
)
def loss_not_above_one_half(call: Call) -> Any:
    """Min(loss, 1 / 2): a guard against spikes that is far too low."""
    return call.instead(_scalar(call).clamp(max=0.5))


# --- Distances and chances ------------------------------------------------------------------------


@FAULTS.fault("mse_loss", kinds=["other function"], loose=["approximation", "wrong argument"])
def smooth_distance_for_the_squared_one(call: Call) -> Any:
    """The mean of sqrt(d^2 + 0.01): the smooth distance of an image model."""
    value, target = _two(call)
    _mean(call)
    return call.instead(((value - target).square() + 0.01).sqrt().mean())


@FAULTS.fault(
    _DISTANCES,
    kinds=["offset", "wrong argument"],
    loose=["other function", "residual", "axis offset"],
)
def target_a_fifth_too_high(call: Call) -> Any:
    """The wanted values still have their mean of 0.2."""
    _, target = _two(call)
    return call.put(1, target + 0.2, "target").run()


@FAULTS.fault(_TERMS, **_ORDER)
def targets_of_the_batch_from_the_last(call: Call) -> Any:
    """The examples of the targets are in the reverse order."""
    _, target = _two(call)
    fits(target.size(0) > 2)
    return call.put(1, target.flip(0), "target").run()


@FAULTS.fault(_TERMS, **_FEWER)
def columns_with_an_even_number_compared_only(call: Call) -> Any:
    """A stride of two along the last axis, in the sum and in the divisor."""
    value, target = _two(call)
    _mean(call)
    fits(target.dim() > 1 and target.size(-1) > 2)
    changed = call.put(0, value[..., ::2], "input").put(1, target[..., ::2], "target")
    return changed.run()


@FAULTS.fault(
    "binary_cross_entropy_with_logits",
    kinds=["other function", "wrong factor"],
    loose=["approximation", "axis scale", "wrong argument"],
)
def sure_answers_of_the_binary_loss_count_less(call: Call) -> Any:
    """Each term is multiplied by 1 - p of its label: a focal loss with an exponent of one."""
    _two(call)
    _mean(call)
    named = {**call.kwargs, "reduction": "none"}
    terms = Call(call.name, call.function, call.args[:2], named).run()
    return call.instead((terms * (1 - (-terms).exp())).mean())


@FAULTS.fault(
    "kl_div",
    kinds=["other function", "wrong factor", "wrong argument"],
    loose=["approximation", "scale"],
)
def teacher_at_half_of_its_temperature(call: Call) -> Any:
    """The chances of the teacher are squared and sum to one again."""
    _, target = _two(call)
    fits(not call.kwargs.get("log_target"))
    sharp = target.square()
    return call.put(1, sharp / sharp.sum(-1, keepdim=True), "target").run()


@FAULTS.fault(
    "kl_div", kinds=["shift", "wrong index", "permutation"], loose=["wrong argument", "stale"]
)
def student_of_the_class_before(call: Call) -> Any:
    """The pointer to the student is one class behind, around the end."""
    value, _ = _two(call)
    return call.put(0, value.roll(1, -1), "input").run()
