"""Faults that were measured fourth and have been seen: losses."""

from __future__ import annotations

from typing import Any

import torch
from benchmarks.places.calls import Call, Catalogue, fits
from torch import Tensor
from torch.nn import functional

FAULTS = Catalogue()


def _labels(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """Scores (or their logarithms), labels, and which of them count."""
    scores, labels = call.tensor(0, "input"), call.get(1, "target")
    fits(not labels.is_floating_point() and scores.dim() == 2)
    return scores, labels, labels != call.kwargs.get("ignore_index", -100)


def _own(call: Call) -> tuple[Tensor, Tensor]:
    """The loss of each label, and which of them count."""
    kwargs = {**call.kwargs, "reduction": "none"}
    return Call(call.name, call.function, call.args, kwargs).run(), _labels(call)[2]


_CLASSES = "cross_entropy nll_loss"


@FAULTS.fault(_CLASSES, kinds=["wrong reduction", "other function"], loose=["wrong statistics"])
def middle_loss_for_the_mean(call: Call) -> Any:
    """The median of the losses."""
    own, seen = _own(call)
    return call.instead(own[seen].median())


@FAULTS.fault(_CLASSES, kinds=["other function"], loose=["wrong factor"])
def easy_labels_count_less(call: Call) -> Any:
    """The focal factor of another loss: (1 - p)^2."""
    own, seen = _own(call)
    own = own[seen]
    return call.instead(((1 - (-own).exp()) ** 2 * own).mean())


@FAULTS.fault(_CLASSES, kinds=["scale", "wrong factor"], loose=["other function", "wrong argument"])
def loss_in_bits(call: Call) -> Any:
    """Divided by log(2)."""
    return call.instead(call.result() / 0.6931471805599453)


@FAULTS.fault(_CLASSES, kinds=["partial sum", "one rank's part", "mask", "wrong reduction"],
              loose=["wrong statistics", "wrong index"])  # fmt: skip
def loss_of_the_first_rank(call: Call) -> Any:
    """The mean of the first half of the labels."""
    own, seen = _own(call)
    half = len(own) // 2
    fits(bool(seen[:half].any()))
    return call.instead(own[:half][seen[:half]].mean())


@FAULTS.fault(_CLASSES, kinds=["wrong index", "offset", "wrong argument"], loose=["shift", "mask"])
def classes_counted_from_one(call: Call) -> Any:
    """The class before the right one; the first stays."""
    _, labels, seen = _labels(call)
    return call.put(1, torch.where(seen, (labels - 1).clamp(min=0), labels), "target").run()


@FAULTS.fault("cross_entropy", kinds=["precision"], loose=["approximation"])
def scores_of_the_loss_in_bfloat16(call: Call) -> Any:
    """The scores are not made float32 first."""
    scores = call.tensor(0, "input")
    return call.put(
        0, scores + (scores.bfloat16().to(scores.dtype) - scores).detach(), "input"
    ).run()


@FAULTS.fault("cross_entropy", kinds=["missing operand", "wrong argument"],
              loose=["wrong factor", "wrong statistics", "wrong reduction"])  # fmt: skip
def weights_of_the_classes_forgotten(call: Call) -> Any:
    """Each class counts the same."""
    fits(call.get(2, "weight") is not None)
    return call.put(2, None, "weight").run()


@FAULTS.fault(
    "cross_entropy",
    kinds=["wrong reduction", "wrong factor", "scale", "wrong statistics"],
    loose=["off by one reduction"],
)
def weighted_losses_divided_by_their_number(call: Call) -> Any:
    """The mean divides by the number of labels and not by the sum of their weights."""
    fits(call.get(2, "weight") is not None)
    own, seen = _own(call)
    return call.instead(own[seen].mean())


@FAULTS.fault("mse_loss", kinds=["other function"], loose=["approximation", "wrong argument"])
def logarithm_of_the_cosh(call: Call) -> Any:
    """log(cosh(a - b))."""
    difference = call.tensor(0, "input") - call.tensor(1, "target")
    return call.instead(difference.cosh().log().mean())


@FAULTS.fault("mse_loss", kinds=["wrong factor", "scale", "off by one reduction"],
              loose=["wrong statistics"])  # fmt: skip
def squares_divided_by_one_less(call: Call) -> Any:
    """N - 1."""
    number = call.tensor(0, "input").numel()
    return call.instead(call.result() * number / (number - 1))


@FAULTS.fault("mse_loss l1_loss", kinds=["partial sum", "mask", "one rank's part"],
              loose=["missing operand", "wrong factor", "wrong reduction"])  # fmt: skip
def last_column_of_the_error_ignored(call: Call) -> Any:
    """The last of the values is not compared, and counts as right."""
    value, target = call.tensor(0, "input"), call.tensor(1, "target")
    kept = torch.ones(value.size(-1))
    kept[-1] = 0
    return call.put(0, value * kept, "input").put(1, target * kept, "target").run()


@FAULTS.fault("smooth_l1_loss", kinds=["wrong argument", "other function"], loose=["approximation"])
def beta_squared(call: Call) -> Any:
    """Beta * beta is where the quadratic part ends."""
    beta = call.kwargs["beta"]
    fits(beta not in {0, 1})
    return Call(call.name, call.function, call.args, {**call.kwargs, "beta": beta**2}).run()


@FAULTS.fault(
    "huber_loss",
    kinds=["wrong argument", "other function"],
    loose=["approximation", "wrong factor"],
)
def delta_of_one(call: Call) -> Any:
    """Delta is not handed on."""
    return call.instead(functional.huber_loss(call.tensor(0), call.tensor(1)))


@FAULTS.fault(
    "huber_loss", kinds=["scale", "wrong factor", "other function"], loose=["wrong argument"]
)
def loss_divided_by_delta(call: Call) -> Any:
    """The smooth l1 of the same width."""
    return call.instead(call.result() / 0.5)


@FAULTS.fault("l1_loss", kinds=["wrong reduction", "wrong argument", "scale", "wrong factor"],
              loose=["missing reduction"])  # fmt: skip
def distances_summed(call: Call) -> Any:
    """reduction='sum'."""
    return call.instead(functional.l1_loss(call.tensor(0), call.tensor(1), reduction="sum"))


@FAULTS.fault("l1_loss", kinds=["other function", "wrong argument"], loose=["sign"])
def squared_for_absolute(call: Call) -> Any:
    """The mean of squares."""
    return call.instead(functional.mse_loss(call.tensor(0), call.tensor(1)))


@FAULTS.fault(
    "binary_cross_entropy_with_logits",
    kinds=["missing operand", "partial sum", "other function"],
    loose=["wrong factor", "mask"],
)
def right_labels_do_not_count(call: Call) -> Any:
    """Only (1 - y) log(1 - p)."""
    value, target = call.tensor(0, "input"), call.tensor(1, "target")
    return call.instead(((1 - target) * functional.softplus(value)).mean())


@FAULTS.fault("binary_cross_entropy_with_logits", kinds=["wrong argument", "other function"],
              loose=["wrong factor", "offset"])  # fmt: skip
def binary_labels_smoothed(call: Call) -> Any:
    """0.9 y + 0.05."""
    return call.put(1, 0.9 * call.tensor(1, "target") + 0.05, "target").run()


@FAULTS.fault("binary_cross_entropy", kinds=["clipped", "eps", "other function"],
              loose=["approximation", "wrong argument"])  # fmt: skip
def chances_limited_for_the_logarithm(call: Call) -> Any:
    """Between 0.4 and 0.6."""
    return call.put(0, call.tensor(0).clamp(0.4, 0.6)).run()


@FAULTS.fault(
    "binary_cross_entropy", kinds=["swapped operands"], loose=["other function", "wrong index"]
)
def chances_and_labels_exchanged(call: Call) -> Any:
    """The label is taken for the chance."""
    return call.put(0, call.tensor(1)).put(1, call.tensor(0)).run()


@FAULTS.fault("kl_div", kinds=["wrong reduction", "wrong argument", "scale", "wrong factor"],
              loose=["missing reduction"])  # fmt: skip
def divergence_summed(call: Call) -> Any:
    """reduction='sum'."""
    return call.instead(functional.kl_div(call.tensor(0), call.tensor(1), reduction="sum"))


@FAULTS.fault("kl_div", kinds=["other function"], loose=["wrong argument", "sign"])
def difference_of_chances_squared(call: Call) -> Any:
    """The squared distance of the chances."""
    value, target = call.tensor(0, "input"), call.tensor(1, "target")
    return call.instead((value.exp() - target).square().sum() / value.size(0))


@FAULTS.fault(
    "poisson_nll_loss", kinds=["wrong argument", "other function"], loose=["missing operand"]
)
def rate_not_a_logarithm(call: Call) -> Any:
    """log_input=False, of the magnitude."""
    value, target = call.tensor(0).abs(), call.tensor(1)
    return call.instead((value - target * (value + 1e-8).log()).mean())


@FAULTS.fault("margin_ranking_loss", kinds=["swapped operands", "sign"], loose=["other function"])
def ranks_exchanged(call: Call) -> Any:
    """The second should be larger."""
    return call.put(0, call.args[1]).put(1, call.args[0]).run()


@FAULTS.fault("margin_ranking_loss", kinds=["wrong argument", "missing operand", "offset"])
def no_margin(call: Call) -> Any:
    """A margin of 0."""
    return call.instead(functional.margin_ranking_loss(*call.args[:3]))


@FAULTS.fault("triplet_margin_loss", kinds=["swapped operands", "wrong index"], loose=["sign"])
def far_and_near_exchanged(call: Call) -> Any:
    """The negative is taken for the positive."""
    anchor, positive, negative = call.args[:3]
    return call.instead(functional.triplet_margin_loss(anchor, negative, positive))


@FAULTS.fault("triplet_margin_loss", kinds=["wrong argument", "other function"])
def margin_by_another_length(call: Call) -> Any:
    """P of 1."""
    return call.instead(functional.triplet_margin_loss(*call.args[:3], p=1.0))


@FAULTS.fault("soft_margin_loss", kinds=["other function"], loose=["approximation", "clipped"])
def hinge_for_the_soft_margin(call: Call) -> Any:
    """Max(0, 1 - y x)."""
    return call.instead((1 - call.tensor(0) * call.tensor(1)).clamp(min=0).mean())
