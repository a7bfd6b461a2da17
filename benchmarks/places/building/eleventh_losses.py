"""Faults of the eleventh set: losses."""

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
_TERMS = f"{_DISTANCES} {_CHANCES} kl_div poisson_nll_loss soft_margin_loss"
_ANY = f"{_CLASSES} {_TERMS} gaussian_nll_loss"
_ROUNDED: dict[str, Any] = {
    "kinds": ["precision"],
    "loose": ["approximation", "other function", "wrong argument"],
}
_SCALED: dict[str, Any] = {
    "kinds": ["scale", "wrong factor"],
    "loose": ["other function", "wrong reduction", "wrong statistics", "doubled reduction"],
}
_SHIFTED: dict[str, Any] = {
    "kinds": ["shift", "wrong index", "permutation"],
    "loose": ["wrong argument", "stale", "copy", "swapped operands"],
}
_FEWER: dict[str, Any] = {
    "kinds": ["partial sum", "mask", "wrong reduction"],
    "loose": [
        "missing operand",
        "wrong index",
        "wrong statistics",
        "one rank's part",
        "off by one reduction",
    ],
}


def _mean(call: Call) -> None:
    fits(call.kwargs.get("reduction", "mean") == "mean")


def _labels(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """Scores (or their logarithms), labels, and which of them count."""
    scores, labels = call.tensor(0, "input"), call.get(1, "target")
    fits(not labels.is_floating_point() and scores.dim() == 2)
    return scores, labels, labels != call.kwargs.get("ignore_index", -100)


def _unweighted(call: Call) -> None:
    """Go on only without weights and smoothing, for a mean."""
    _mean(call)
    fits(call.get(2, "weight") is None and not call.kwargs.get("label_smoothing"))


def _own(call: Call) -> tuple[Tensor, Tensor]:
    """The loss of each label, zero where it does not count, and which count."""
    scores, labels, seen = _labels(call)
    _unweighted(call)
    logs = scores.log_softmax(1) if call.name == "cross_entropy" else scores
    return -logs.gather(1, labels.clamp(min=0)[:, None]).squeeze(1) * seen, seen


def _two(call: Call) -> tuple[Tensor, Tensor]:
    """Two operands of one shape."""
    value, target = call.tensor(0, "input"), call.tensor(1, "target")
    fits(value.shape == target.shape)
    return value, target


# --- Classes --------------------------------------------------------------------------------------


@FAULTS.fault(
    _CLASSES,
    kinds=["wrong reduction", "wrong statistics"],
    loose=["mask", "wrong index", "wrong factor", "residual", "doubled reduction", "partial sum"],
)
def first_label_added_twice(call: Call) -> Any:
    """The accumulator begins with the first loss, and the loop adds it again."""
    terms, seen = _own(call)
    return call.instead((terms.sum() + terms[0]) / seen.sum())


@FAULTS.fault(
    _CLASSES,
    kinds=["shift", "wrong index"],
    loose=["wrong argument", "permutation", "wrapped", "offset"],
)
def label_two_classes_lower(call: Call) -> Any:
    """Two special words are in front of the classes in the file and not in the model."""
    scores, labels, seen = _labels(call)
    return call.put(1, torch.where(seen, (labels - 2) % scores.size(1), labels), "target").run()


@FAULTS.fault(_CLASSES, **_SHIFTED)
def labels_of_the_row_three_before(call: Call) -> Any:
    """Row i is compared with label i - 3, around the end."""
    _, labels, _ = _labels(call)
    fits(labels.numel() > 3)
    return call.put(1, labels.roll(3, 0), "target").run()


@FAULTS.fault(_CLASSES, **_FEWER)
def last_two_labels_not_averaged(call: Call) -> Any:
    """The number of rows is rounded down, in the sum and in the divisor."""
    scores, labels, seen = _labels(call)
    _mean(call)
    fits(labels.numel() > 4 and bool(seen[:-2].any()))
    return call.put(0, scores[:-2], "input").put(1, labels[:-2], "target").run()


@FAULTS.fault(
    "cross_entropy",
    kinds=["wrong factor", "wrong argument"],
    loose=["scale", "other function"],
)
def temperature_of_four_thirds_in_the_loss(call: Call) -> Any:
    """The scores are multiplied by 3 / 4."""
    scores, _, _ = _labels(call)
    return call.put(0, 0.75 * scores, "input").run()


@FAULTS.fault(
    "cross_entropy",
    kinds=["wrong reduction", "other function", "wrong statistics"],
    loose=["wrong argument", "wrong factor", "offset", "missing operand"],
)
def exponentials_squared_in_the_normaliser(call: Call) -> Any:
    """The length of the exponentials for their sum: logsumexp(2 x) / 2."""
    scores, labels, seen = _labels(call)
    _unweighted(call)
    level = (2 * scores).logsumexp(1) / 2
    own = scores.gather(1, labels.clamp(min=0)[:, None]).squeeze(1)
    return call.instead((level - own)[seen].mean())


@FAULTS.fault(
    "cross_entropy",
    kinds=["wrong statistics", "wrong reduction", "other function"],
    loose=["clipped", "partial sum", "mask", "approximation"],
)
def normaliser_of_the_three_best_classes(call: Call) -> Any:
    """Only the three largest scores, and that of the label, are in the sum of exponentials."""
    scores, labels, seen = _labels(call)
    _unweighted(call)
    fits(scores.size(1) > 4)
    own = scores.gather(1, labels.clamp(min=0)[:, None])
    best = scores.topk(3, 1).values[:, -1:]
    level = scores.masked_fill((scores < best) & (scores != own), -torch.inf).logsumexp(1)
    return call.instead((level - own.squeeze(1))[seen].mean())


@FAULTS.fault(
    "cross_entropy",
    kinds=["wrong argument", "wrong factor"],
    loose=["other function", "missing operand", "offset"],
)
def smoothing_three_times_as_strong(call: Call) -> Any:
    """The label smoothing is three times as large."""
    _labels(call)
    amount = call.kwargs.get("label_smoothing")
    fits(amount and amount < 1 / 3)
    named = {**call.kwargs, "label_smoothing": 3 * amount}
    return Call(call.name, call.function, call.args, named).run()


@FAULTS.fault(
    _CLASSES,
    kinds=["other function"],
    loose=["wrong reduction", "wrong factor", "approximation", "wrong statistics"],
)
def squares_of_the_losses_averaged(call: Call) -> Any:
    """The mean of the squared losses."""
    terms, seen = _own(call)
    return call.instead(terms.square().sum() / seen.sum())


@FAULTS.fault(
    _CLASSES,
    kinds=["clipped"],
    loose=["other function", "approximation", "constant", "wrong argument"],
)
def loss_of_a_label_not_above_two(call: Call) -> Any:
    """Min(-log p, 2) for each label: outliers are cut."""
    terms, seen = _own(call)
    return call.instead(terms.clamp(max=2.0).sum() / seen.sum())


@FAULTS.fault(_CLASSES, **_ROUNDED)
def scores_of_the_loss_in_steps_of_an_eighth(call: Call) -> Any:
    """The scores have three bits behind the point."""
    scores, _, _ = _labels(call)
    coarse = (scores.detach() * 8).round() / 8
    return call.put(0, with_gradient_of(scores, coarse), "input").run()


@FAULTS.fault(
    _CLASSES,
    kinds=["wrong index", "copy", "stale"],
    loose=["wrong argument", "constant", "permutation", "shift"],
)
def every_second_label_is_the_one_before(call: Call) -> Any:
    """Odd rows read the label of the row before."""
    _, labels, _ = _labels(call)
    return call.put(1, labels[torch.arange(len(labels)) // 2 * 2], "target").run()


# --- Any loss -------------------------------------------------------------------------------------


@FAULTS.fault(_ANY, **_SCALED)
def loss_divided_by_four_micro_batches(call: Call) -> Any:
    """The divisor of an accumulation that is done elsewhere is in the loss."""
    value = call.result()
    fits(value.dim() == 0)
    return call.instead(value / 4)


@FAULTS.fault(
    f"{_ANY} triplet_margin_loss margin_ranking_loss cosine_embedding_loss",
    kinds=["offset"],
    loose=["eps", "other function", "residual", "axis offset", "constant"],
)
def hundredth_added_to_the_loss(call: Call) -> Any:
    """A penalty of another part of the model is added."""
    value = call.result()
    fits(value.dim() == 0)
    return call.instead(value + 0.01)


@FAULTS.fault(
    f"{_ANY} triplet_margin_loss",
    kinds=["other function"],
    loose=["approximation", "wrong factor"],
)
def logarithm_of_one_plus_the_loss(call: Call) -> Any:
    """Log(1 + loss): what is meant for the plot goes into the graph."""
    value = call.result()
    fits(value.dim() == 0)
    return call.instead(value.log1p())


# --- Distances and chances ------------------------------------------------------------------------


@FAULTS.fault(_TERMS, **_SHIFTED)
def targets_two_columns_early(call: Call) -> Any:
    """The pointer to the targets is two columns too far, around the end."""
    _, target = _two(call)
    fits(target.dim() > 1 and target.size(-1) > 2)
    return call.put(1, target.roll(-2, -1), "target").run()


@FAULTS.fault(_TERMS, **_FEWER)
def first_example_not_in_the_mean(call: Call) -> Any:
    """The loop over the examples begins at one, in the sum and in the divisor."""
    value, target = _two(call)
    _mean(call)
    fits(value.size(0) > 2)
    return call.put(0, value[1:], "input").put(1, target[1:], "target").run()


@FAULTS.fault(
    _DISTANCES,
    kinds=["wrong factor", "wrong argument"],
    loose=["scale", "other function"],
)
def target_of_nine_tenths(call: Call) -> Any:
    """The wanted values are smoothed to nine tenths of their size."""
    _, target = _two(call)
    return call.put(1, 0.9 * target, "target").run()


@FAULTS.fault(
    _DISTANCES,
    kinds=["missing operand", "other function", "wrong statistics"],
    loose=["wrong argument", "constant", "wrong reduction", "offset"],
)
def mean_target_for_each_target(call: Call) -> Any:
    """The wanted values are averaged over the batch before they are compared."""
    _, target = _two(call)
    fits(target.size(0) > 1)
    centre = target.mean(0, keepdim=True).expand_as(target)
    return call.put(1, centre, "target").run()


@FAULTS.fault(
    _DISTANCES,
    kinds=["clipped", "wrong argument"],
    loose=["other function", "zeros", "sign"],
)
def negative_values_of_the_model_not_compared(call: Call) -> Any:
    """The values are those behind a relu."""
    value, target = _two(call)
    return call.put(0, value.relu(), "input").put(1, target, "target").run()


@FAULTS.fault(
    _DISTANCES,
    kinds=["wrong reduction", "other function", "wrong statistics"],
    loose=["wrong argument", "partial sum", "wrong index"],
)
def middle_of_the_errors_for_their_mean(call: Call) -> Any:
    """The median of the terms."""
    _two(call)
    _mean(call)
    named = {**call.kwargs, "reduction": "none"}
    return call.instead(Call(call.name, call.function, call.args[:2], named).run().median())


@FAULTS.fault(
    "smooth_l1_loss huber_loss",
    kinds=["other function", "wrong argument"],
    loose=["approximation", "missing operand", "offset", "clipped"],
)
def errors_within_the_limit_cost_nothing(call: Call) -> Any:
    """Max(|d| - limit, 0): the insensitive form for the smooth one."""
    value, target = _two(call)
    _mean(call)
    limit = call.kwargs.get("beta", call.kwargs.get("delta", 1.0))
    return call.instead(((value - target).abs() - limit).clamp(min=0).mean())


@FAULTS.fault(
    "smooth_l1_loss huber_loss",
    kinds=["wrong argument", "wrong factor", "other function"],
    loose=["scale", "approximation"],
)
def limit_of_the_smooth_part_four_times_as_large(call: Call) -> Any:
    """Beta, or delta, is in units of another loader."""
    _two(call)
    key = "beta" if call.name == "smooth_l1_loss" else "delta"
    named = {**call.kwargs, key: 4 * call.kwargs.get(key, 1.0)}
    return Call(call.name, call.function, call.args[:2], named).run()


@FAULTS.fault(
    "binary_cross_entropy_with_logits",
    kinds=["wrong factor", "wrong argument"],
    loose=["other function", "axis scale", "scale"],
)
def positive_labels_count_three_times(call: Call) -> Any:
    """A pos_weight of 3: the ratio of another data set."""
    value, _ = _two(call)
    named = {**call.kwargs, "pos_weight": torch.full_like(value[:1], 3.0).reshape(-1)[:1]}
    return Call(call.name, call.function, call.args[:2], named).run()


@FAULTS.fault(
    _CHANCES,
    kinds=["wrong argument", "offset", "other function"],
    loose=["wrong factor", "approximation", "residual", "clipped"],
)
def labels_of_a_fifth_and_four_fifths(call: Call) -> Any:
    """0.6 y + 0.2."""
    _, target = _two(call)
    return call.put(1, 0.6 * target + 0.2, "target").run()


@FAULTS.fault(
    "kl_div",
    kinds=["wrong argument", "other function"],
    loose=["wrong factor", "approximation", "precision"],
)
def teacher_with_its_best_class_only(call: Call) -> Any:
    """The chances of the teacher are one for its best class and zero for the others."""
    value, target = _two(call)
    hard = functional.one_hot(target.argmax(-1), target.size(-1)).to(target.dtype)
    return call.put(0, value, "input").put(1, hard, "target").run()


@FAULTS.fault("kl_div", **_SCALED)
def divergence_times_the_square_of_the_temperature(call: Call) -> Any:
    """Four times as large: the factor of a temperature of two is applied here as well."""
    return call.instead(4 * call.result())


# --- Margins --------------------------------------------------------------------------------------


@FAULTS.fault(
    "cosine_embedding_loss margin_ranking_loss hinge_embedding_loss soft_margin_loss",
    kinds=["wrong index", "shift", "permutation", "wrong argument"],
    loose=["stale", "copy", "sign"],
)
def sides_of_the_row_before(call: Call) -> Any:
    """The sides of the pairs are read one row too early, around the end."""
    place = 1 if call.name in {"hinge_embedding_loss", "soft_margin_loss"} else 2
    sides = call.tensor(place, "target")
    fits(sides.size(0) > 2)
    return call.put(place, sides.roll(1, 0), "target").run()


@FAULTS.fault(
    "triplet_margin_loss cosine_embedding_loss margin_ranking_loss",
    kinds=["wrong factor", "wrong argument"],
    loose=["scale", "other function"],
)
def second_of_each_pair_halved(call: Call) -> Any:
    """The second operand was averaged over two ranks of which one had nothing."""
    return call.put(1, call.tensor(1) / 2).run()


@FAULTS.fault(
    "triplet_margin_loss margin_ranking_loss cosine_embedding_loss hinge_embedding_loss "
    "multi_margin_loss multilabel_soft_margin_loss",
    kinds=["partial sum", "mask", "wrong reduction"],
    loose=["missing operand", "wrong index", "wrong statistics", "off by one reduction"],
)
def last_pair_not_in_the_mean(call: Call) -> Any:
    """The loss of all pairs but the last one."""
    fits(call.kwargs.get("reduction", "mean") == "mean")
    tensors = [one for one in call.args if isinstance(one, Tensor)]
    size = tensors[0].size(0)
    fits(size > 2 and all(one.size(0) == size for one in tensors))
    cut = tuple(one[:-1] if isinstance(one, Tensor) else one for one in call.args)
    return call.instead(Call(call.name, call.function, cut, call.kwargs).run())


@FAULTS.fault(
    "soft_margin_loss multilabel_soft_margin_loss",
    kinds=["scale", "wrong factor"],
    loose=["other function"],
)
def soft_margin_in_bits(call: Call) -> Any:
    """Divided by log(2)."""
    return call.instead(call.result() / math.log(2))
