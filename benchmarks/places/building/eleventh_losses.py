"""Faults of the eleventh set: losses."""

from __future__ import annotations

import math
from typing import Any

import torch
from benchmarks.places import words
from benchmarks.places.calls import Call, Catalogue, fits, with_gradient_of
from benchmarks.places.changes import computed, on, operand, result
from benchmarks.places.parts import equal_input_and_target, labels_of, only_mean
from torch import Tensor
from torch.nn import functional

FAULTS = Catalogue()
_CLASSES = "cross_entropy nll_loss"
_DISTANCES = "mse_loss smooth_l1_loss l1_loss huber_loss"
_CHANCES = "binary_cross_entropy_with_logits binary_cross_entropy"
_TERMS = f"{_DISTANCES} {_CHANCES} kl_div poisson_nll_loss soft_margin_loss"
_ANY = f"{_CLASSES} {_TERMS} gaussian_nll_loss"


def _unweighted(call: Call) -> None:
    """Go on only without weights and smoothing, for a mean."""
    only_mean(call)
    fits(call.get(2, "weight") is None and not call.kwargs.get("label_smoothing"))


def _own(call: Call) -> tuple[Tensor, Tensor]:
    """The loss of each label, zero where it does not count, and which count."""
    scores, labels, seen = labels_of(call)
    _unweighted(call)
    logs = scores.log_softmax(1) if call.name == "cross_entropy" else scores
    return -logs.gather(1, labels.clamp(min=0)[:, None]).squeeze(1) * seen, seen


# --- Classes --------------------------------------------------------------------------------------


@FAULTS.fault(
    _CLASSES, "shift, wrong index, permutation; wrong argument, stale, copy, swapped operands"
)
def labels_of_the_row_three_before(call: Call) -> Any:
    """Row i is compared with label i - 3, around the end."""
    _, labels, _ = labels_of(call)
    fits(labels.numel() > 3)
    return call.put(1, labels.roll(3, 0), "target").run()


@FAULTS.fault(
    _CLASSES,
    "partial sum, mask, wrong reduction; missing operand, wrong index, wrong statistics, "
    "one rank's part, off by one reduction",
)
def last_two_labels_not_averaged(call: Call) -> Any:
    """The number of rows is rounded down, in the sum and in the divisor."""
    scores, labels, seen = labels_of(call)
    only_mean(call)
    fits(labels.numel() > 4 and bool(seen[:-2].any()))
    return call.put(0, scores[:-2], "input").put(1, labels[:-2], "target").run()


@FAULTS.fault(
    "cross_entropy",
    "wrong reduction, other function, wrong statistics; wrong argument, wrong factor, "
    "offset, missing operand",
)
def exponentials_squared_in_the_normaliser(call: Call) -> Any:
    """The length of the exponentials for their sum: logsumexp(2 x) / 2."""
    scores, labels, seen = labels_of(call)
    _unweighted(call)
    level = (2 * scores).logsumexp(1) / 2
    own = scores.gather(1, labels.clamp(min=0)[:, None]).squeeze(1)
    return call.instead((level - own)[seen].mean())


@FAULTS.fault(
    "cross_entropy",
    "wrong statistics, wrong reduction, other function; clipped, partial sum, mask, approximation",
)
def normaliser_of_the_three_best_classes(call: Call) -> Any:
    """Only the three largest scores, and that of the label, are in the sum of exponentials."""
    scores, labels, seen = labels_of(call)
    _unweighted(call)
    fits(scores.size(1) > 4)
    own = scores.gather(1, labels.clamp(min=0)[:, None])
    best = scores.topk(3, 1).values[:, -1:]
    level = scores.masked_fill((scores < best) & (scores != own), -torch.inf).logsumexp(1)
    return call.instead((level - own.squeeze(1))[seen].mean())


@FAULTS.fault(
    "cross_entropy", "wrong argument, wrong factor; other function, missing operand, offset"
)
def smoothing_three_times_as_strong(call: Call) -> Any:
    """The label smoothing is three times as large."""
    labels_of(call)
    amount = call.kwargs.get("label_smoothing")
    fits(amount and amount < 1 / 3)
    named = {**call.kwargs, "label_smoothing": 3 * amount}
    return Call(call.name, call.function, call.args, named).run()


@FAULTS.fault(_CLASSES, "wrong index, copy, stale; wrong argument, constant, permutation, shift")
def every_second_label_is_the_one_before(call: Call) -> Any:
    """Odd rows read the label of the row before."""
    _, labels, _ = labels_of(call)
    return call.put(1, labels[torch.arange(len(labels)) // 2 * 2], "target").run()


# fmt: off
# The accumulator begins with the first loss, and the loop adds it again.
FAULTS.add("first label added twice", _CLASSES,
    "wrong reduction, wrong statistics; mask, wrong index, wrong factor, residual, "
    "doubled reduction, partial sum",
    computed(_own, lambda terms, seen: (terms.sum() + terms[0]) / seen.sum()))
# Two special words are in front of the classes in the file and not in the model.
FAULTS.add("label two classes lower", _CLASSES,
    "shift, wrong index; wrong argument, permutation, wrapped, offset",
    on(labels_of,
        lambda call, scores, labels, seen:
            call.put(1, torch.where(seen, (labels - 2) % scores.size(1), labels), "target").run()))
# The scores are multiplied by 3 / 4.
FAULTS.add("temperature of four thirds in the loss", "cross_entropy",
    "wrong factor, wrong argument; scale, other function",
    on(labels_of, lambda call, scores, *_: call.put(0, 0.75 * scores, "input").run()))
# The mean of the squared losses.
FAULTS.add("squares of the losses averaged", _CLASSES,
    "other function; wrong reduction, wrong factor, approximation, wrong statistics",
    computed(_own, lambda terms, seen: terms.square().sum() / seen.sum()))
# Min(-log p, 2) for each label: outliers are cut.
FAULTS.add("loss of a label not above two", _CLASSES,
    "clipped; other function, approximation, constant, wrong argument",
    computed(_own, lambda terms, seen: terms.clamp(max=2.0).sum() / seen.sum()))
# The scores have three bits behind the point.
FAULTS.add("scores of the loss in steps of an eighth", _CLASSES, words.ROUNDED,
    on(labels_of,
        lambda call, scores, *_:

    call.put(0, with_gradient_of(scores, (scores.detach() * 8).round() / 8), "input").run()))
# fmt: on


# --- Any loss -------------------------------------------------------------------------------------


# fmt: off
# The divisor of an accumulation that is done elsewhere is in the loss.
FAULTS.add("loss divided by four micro batches", _ANY,
    "scale, wrong factor; other function, wrong reduction, wrong statistics, doubled reduction",
    result(lambda v: v / 4, where=lambda v: v.dim() == 0))
# A penalty of another part of the model is added.
FAULTS.add("hundredth added to the loss",
    f"{_ANY} triplet_margin_loss margin_ranking_loss cosine_embedding_loss",
    "offset; eps, other function, residual, axis offset, constant",
    result(lambda v: v + 0.01, where=lambda v: v.dim() == 0))
# Log(1 + loss): what is meant for the plot goes into the graph.
FAULTS.add("logarithm of one plus the loss", f"{_ANY} triplet_margin_loss",
    "other function; approximation, wrong factor",
    result(lambda v: v.log1p(), where=lambda v: v.dim() == 0))
# fmt: on


# --- Distances and chances ------------------------------------------------------------------------


@FAULTS.fault(
    _TERMS,
    "partial sum, mask, wrong reduction; missing operand, wrong index, wrong statistics, "
    "one rank's part, off by one reduction",
)
def first_example_not_in_the_mean(call: Call) -> Any:
    """The loop over the examples begins at one, in the sum and in the divisor."""
    value, target = equal_input_and_target(call)
    only_mean(call)
    fits(value.size(0) > 2)
    return call.put(0, value[1:], "input").put(1, target[1:], "target").run()


@FAULTS.fault(
    _DISTANCES,
    "wrong reduction, other function, wrong statistics; wrong argument, partial sum, wrong index",
)
def middle_of_the_errors_for_their_mean(call: Call) -> Any:
    """The median of the terms."""
    equal_input_and_target(call)
    only_mean(call)
    named = {**call.kwargs, "reduction": "none"}
    return call.instead(Call(call.name, call.function, call.args[:2], named).run().median())


@FAULTS.fault(
    "smooth_l1_loss huber_loss",
    "other function, wrong argument; approximation, missing operand, offset, clipped",
)
def errors_within_the_limit_cost_nothing(call: Call) -> Any:
    """Max(|d| - limit, 0): the insensitive form for the smooth one."""
    value, target = equal_input_and_target(call)
    only_mean(call)
    limit = call.kwargs.get("beta", call.kwargs.get("delta", 1.0))
    return call.instead(((value - target).abs() - limit).clamp(min=0).mean())


@FAULTS.fault("smooth_l1_loss huber_loss", words.ANOTHER_FACTOR)
def limit_of_the_smooth_part_four_times_as_large(call: Call) -> Any:
    """Beta, or delta, is in units of another loader."""
    equal_input_and_target(call)
    key = "beta" if call.name == "smooth_l1_loss" else "delta"
    named = {**call.kwargs, key: 4 * call.kwargs.get(key, 1.0)}
    return Call(call.name, call.function, call.args[:2], named).run()


@FAULTS.fault(
    "binary_cross_entropy_with_logits",
    "wrong factor, wrong argument; other function, axis scale, scale",
)
def positive_labels_count_three_times(call: Call) -> Any:
    """A pos_weight of 3: the ratio of another data set."""
    value, _ = equal_input_and_target(call)
    named = {**call.kwargs, "pos_weight": torch.full_like(value[:1], 3.0).reshape(-1)[:1]}
    return Call(call.name, call.function, call.args[:2], named).run()


@FAULTS.fault("kl_div", "wrong argument, other function; wrong factor, approximation, precision")
def teacher_with_its_best_class_only(call: Call) -> Any:
    """The chances of the teacher are one for its best class and zero for the others."""
    value, target = equal_input_and_target(call)
    hard = functional.one_hot(target.argmax(-1), target.size(-1)).to(target.dtype)
    return call.put(0, value, "input").put(1, hard, "target").run()


# fmt: off
# The pointer to the targets is two columns too far, around the end.
FAULTS.add("targets two columns early", _TERMS,
    "shift, wrong index, permutation; wrong argument, stale, copy, swapped operands",
    on(equal_input_and_target,
        lambda call, _, target: call.put(1, target.roll(-2, -1), "target").run(),
        where=lambda _, target: target.dim() > 1 and target.size(-1) > 2))
# The wanted values are smoothed to nine tenths of their size.
FAULTS.add("target of nine tenths", _DISTANCES,
    "wrong factor, wrong argument; scale, other function",
    on(equal_input_and_target,
        lambda call, _, target: call.put(1, 0.9 * target, "target").run()))
# The wanted values are averaged over the batch before they are compared.
FAULTS.add("mean target for each target", _DISTANCES,
    "missing operand, other function, wrong statistics; wrong argument, constant, "
    "wrong reduction, offset",
    on(equal_input_and_target,
        lambda call, _, target:
            call.put(1, target.mean(0, keepdim=True).expand_as(target), "target").run(),
        where=lambda _, target: target.size(0) > 1))
# The values are those behind a relu.
FAULTS.add("negative values of the model not compared", _DISTANCES,
    "clipped, wrong argument; other function, zeros, sign",
    on(equal_input_and_target,
        lambda call, value, target:
            call.put(0, value.relu(), "input").put(1, target, "target").run()))
# 0.6 y + 0.2.
FAULTS.add("labels of a fifth and four fifths", _CHANCES,
    "wrong argument, offset, other function; wrong factor, approximation, residual, clipped",
    on(equal_input_and_target,
        lambda call, _, target: call.put(1, 0.6 * target + 0.2, "target").run()))
# Four times as large: the factor of a temperature of two is applied here as well.
FAULTS.add("divergence times the square of the temperature", "kl_div",
    "scale, wrong factor; other function, wrong reduction, wrong statistics, doubled reduction",
    result(lambda v: 4 * v))
# fmt: on


# --- Margins --------------------------------------------------------------------------------------


@FAULTS.fault(
    "cosine_embedding_loss margin_ranking_loss hinge_embedding_loss soft_margin_loss",
    "wrong index, shift, permutation, wrong argument; stale, copy, sign",
)
def sides_of_the_row_before(call: Call) -> Any:
    """The sides of the pairs are read one row too early, around the end."""
    place = 1 if call.name in {"hinge_embedding_loss", "soft_margin_loss"} else 2
    sides = call.tensor(place, "target")
    fits(sides.size(0) > 2)
    return call.put(place, sides.roll(1, 0), "target").run()


@FAULTS.fault(
    "triplet_margin_loss margin_ranking_loss cosine_embedding_loss hinge_embedding_loss "
    "multi_margin_loss multilabel_soft_margin_loss",
    "partial sum, mask, wrong reduction; missing operand, wrong index, wrong statistics, "
    "off by one reduction",
)
def last_pair_not_in_the_mean(call: Call) -> Any:
    """The loss of all pairs but the last one."""
    fits(call.kwargs.get("reduction", "mean") == "mean")
    tensors = [one for one in call.args if isinstance(one, Tensor)]
    size = tensors[0].size(0)
    fits(size > 2 and all(one.size(0) == size for one in tensors))
    cut = tuple(one[:-1] if isinstance(one, Tensor) else one for one in call.args)
    return call.instead(Call(call.name, call.function, cut, call.kwargs).run())


# fmt: off
# The second operand was averaged over two ranks of which one had nothing.
FAULTS.add("second of each pair halved",
    "triplet_margin_loss cosine_embedding_loss margin_ranking_loss",
    "wrong factor, wrong argument; scale, other function", operand(1, lambda v: v / 2))
# Divided by log(2).
FAULTS.add("soft margin in bits", "soft_margin_loss multilabel_soft_margin_loss",
    "scale, wrong factor; other function", result(lambda v: v / math.log(2)))
# fmt: on
