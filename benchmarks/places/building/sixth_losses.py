"""Faults that were measured sixth and have been seen: losses."""

from __future__ import annotations

from typing import Any

import torch
from benchmarks.places.calls import Call, Catalogue, fits, with_gradient_of
from torch import Tensor
from torch.nn import functional

FAULTS = Catalogue()
_CLASSES = "cross_entropy nll_loss"


def _labels(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """Scores (or their logarithms), labels, and which of them count."""
    scores, labels = call.tensor(0, "input"), call.get(1, "target")
    fits(not labels.is_floating_point() and scores.dim() == 2)
    return scores, labels, labels != call.kwargs.get("ignore_index", -100)


def _again(call: Call, **changed: Any) -> Any:
    """The call with other keywords."""
    return Call(call.name, call.function, call.args, {**call.kwargs, **changed}).run()


# --- Classes --------------------------------------------------------------------------------------


@FAULTS.fault(
    "cross_entropy",
    kinds=["other function"],
    loose=["wrong argument", "approximation", "clipped", "wrong factor"],
)
def chances_taken_for_scores(call: Call) -> Any:
    """The softmax is applied before the loss, which applies it again."""
    return call.put(0, _labels(call)[0].softmax(-1), "input").run()


@FAULTS.fault(
    _CLASSES, kinds=["wrong index", "constant", "missing operand"], loose=["copy", "wrong argument"]
)
def every_label_is_the_first_class(call: Call) -> Any:
    """The labels are not loaded: zero, where they count."""
    _, labels, seen = _labels(call)
    first = int(labels[seen].min())
    return call.put(1, torch.where(seen, torch.full_like(labels, first), labels), "target").run()


@FAULTS.fault(
    "cross_entropy",
    kinds=["wrong reduction", "mask", "off by one reduction", "other function"],
    loose=["wrong argument", "offset", "wrong statistics"],
)
def padded_classes_take_part(call: Call) -> Any:
    """The classes are padded with scores of zero to a multiple of 16."""
    scores, _, _ = _labels(call)
    more = -scores.size(-1) % 16
    fits(more > 0 and call.get(2, "weight") is None)
    fits(not call.kwargs.get("label_smoothing"))
    return call.put(0, functional.pad(scores, (0, more)), "input").run()


@FAULTS.fault(_CLASSES, kinds=["precision"], loose=["approximation", "scale", "wrong factor"])
def loss_stored_in_bfloat16(call: Call) -> Any:
    """The result has eight bits."""
    value = call.result()
    return call.instead(with_gradient_of(value, value.detach().bfloat16().to(value.dtype)))


@FAULTS.fault(
    "cross_entropy",
    kinds=["sign", "wrong factor", "scale"],
    loose=["other function", "wrong argument"],
)
def scores_of_the_loss_negated(call: Call) -> Any:
    """Costs are taken for scores."""
    return call.put(0, -_labels(call)[0], "input").run()


@FAULTS.fault(
    _CLASSES,
    kinds=["wrong reduction", "partial sum", "mask", "wrong statistics"],
    loose=["wrong index", "one rank's part", "wrong argument"],
)
def every_second_label_counts(call: Call) -> Any:
    """A stride of two over the rows, in the sum and in the number."""
    scores, labels, _ = _labels(call)
    return call.put(0, scores[::2], "input").put(1, labels[::2], "target").run()


@FAULTS.fault(_CLASSES, kinds=["other function"], loose=["wrong factor", "scale"])
def root_of_the_loss(call: Call) -> Any:
    """The square root of the mean."""
    value = call.result()
    fits(float(value.detach()) > 0)
    return call.instead(value.sqrt())


@FAULTS.fault(
    "cross_entropy",
    kinds=["missing operand", "partial sum", "other function"],
    loose=["wrong reduction", "sign", "offset"],
)
def normaliser_of_the_loss_forgotten(call: Call) -> Any:
    """The mean of the opposite of the right scores alone."""
    scores, labels, seen = _labels(call)
    fits(call.get(2, "weight") is None and not call.kwargs.get("label_smoothing"))
    return call.instead(-scores[seen].gather(1, labels[seen, None]).mean())


@FAULTS.fault(
    "cross_entropy",
    kinds=["other function", "wrong factor"],
    loose=["wrong argument", "wrong statistics"],
)
def weights_of_the_classes_squared(call: Call) -> Any:
    """The weights are applied by the data loader as well."""
    weight = call.get(2, "weight")
    fits(isinstance(weight, Tensor))
    return call.put(2, weight.square(), "weight").run()


# --- Distances ------------------------------------------------------------------------------------


@FAULTS.fault(
    "mse_loss l1_loss",
    kinds=["clipped", "mask", "other function"],
    loose=["partial sum", "zeros", "sign"],
)
def only_errors_above_the_target(call: Call) -> Any:
    """What is below the target costs nothing."""
    value, target = call.tensor(0), call.tensor(1, "target")
    return call.put(0, torch.maximum(value, target)).run()


@FAULTS.fault(
    "mse_loss", kinds=["wrong factor", "scale"], loose=["wrong argument", "other function"]
)
def target_of_twice_the_size(call: Call) -> Any:
    """The wanted values are not divided by their scale."""
    return call.put(1, 2 * call.tensor(1, "target"), "target").run()


@FAULTS.fault("mse_loss", kinds=["wrong index", "permutation"], loose=["shift", "copy"])
def columns_of_the_target_reversed(call: Call) -> Any:
    """The wanted values are read from the end of their rows."""
    return call.put(1, call.tensor(1, "target").flip(-1), "target").run()


@FAULTS.fault(
    "mse_loss smooth_l1_loss huber_loss l1_loss",
    kinds=["partial sum", "mask", "wrong statistics"],
    loose=["one rank's part", "wrong index", "wrong reduction"],
)
def errors_of_the_first_half_of_the_batch(call: Call) -> Any:
    """The mean of the first rank's examples."""
    value, target = call.tensor(0), call.tensor(1, "target")
    half = value.size(0) // 2
    fits(half > 0)
    return call.put(0, value[:half]).put(1, target[:half], "target").run()


@FAULTS.fault(
    "smooth_l1_loss", kinds=["wrong argument", "wrong factor"], loose=["scale", "other function"]
)
def beta_three_times_as_wide(call: Call) -> Any:
    """The quadratic part ends three times as far away."""
    return _again(call, beta=3 * call.kwargs.get("beta", 1.0))


@FAULTS.fault(
    "huber_loss",
    kinds=["wrong argument", "wrong factor"],
    loose=["scale", "other function", "clipped"],
)
def delta_halved(call: Call) -> Any:
    """The linear part begins at half of the distance."""
    return _again(call, delta=call.kwargs.get("delta", 1.0) / 2)


# --- Chances --------------------------------------------------------------------------------------


@FAULTS.fault(
    "binary_cross_entropy_with_logits",
    kinds=["wrong factor", "scale"],
    loose=["wrong argument", "other function"],
)
def logits_doubled(call: Call) -> Any:
    """A temperature of one half."""
    return call.put(0, 2 * call.tensor(0, "input"), "input").run()


@FAULTS.fault(
    "binary_cross_entropy_with_logits binary_cross_entropy",
    kinds=["wrong index", "shift", "permutation"],
    loose=["copy"],
)
def labels_of_the_next_example(call: Call) -> Any:
    """The labels are one row off."""
    return call.put(1, call.tensor(1, "target").roll(-1, 0), "target").run()


@FAULTS.fault("kl_div", kinds=["wrong index", "shift", "permutation"], loose=["copy", "stale"])
def teacher_of_the_next_example(call: Call) -> Any:
    """The chances of the teacher are one row off."""
    return call.put(1, call.tensor(1, "target").roll(-1, 0), "target").run()


@FAULTS.fault(
    "kl_div",
    kinds=["constant", "missing operand", "other function"],
    loose=["wrong argument", "wrong reduction"],
)
def teacher_without_an_opinion(call: Call) -> Any:
    """Every class has the same chance."""
    target = call.tensor(1, "target")
    even = torch.full_like(target, 1 / target.size(-1))
    return call.put(1, even, "target").run()


# --- Margins --------------------------------------------------------------------------------------


@FAULTS.fault(
    "margin_ranking_loss",
    kinds=["clipped", "missing operand", "other function"],
    loose=["sign", "wrong reduction"],
)
def hinge_forgotten(call: Call) -> Any:
    """The mean of -y (a - b) + margin, also where it is negative."""
    first, second, side = call.args[:3]
    margin = call.args[3] if len(call.args) > 3 else call.kwargs.get("margin", 0.0)
    return call.instead((-side * (first - second) + margin).mean())


@FAULTS.fault(
    "triplet_margin_loss", kinds=["other function", "missing operand"], loose=["wrong argument"]
)
def squared_distances_of_the_triplets(call: Call) -> Any:
    """The roots are not taken."""
    anchor, near, far = call.args[:3]
    margin = call.kwargs.get("margin", 1.0)
    close, wide = (anchor - near).square().sum(-1), (anchor - far).square().sum(-1)
    return call.instead((close - wide + margin).relu().mean())
