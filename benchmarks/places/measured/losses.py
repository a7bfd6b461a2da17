"""Faults for measuring: losses."""

from __future__ import annotations

from typing import Any

import torch
from benchmarks.places import words
from benchmarks.places.calls import Call, Catalogue, fits, with_gradient_of
from benchmarks.places.changes import on
from benchmarks.places.parts import equal_input_and_target, labels_of, only_mean
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


def _scalar(call: Call) -> Tensor:
    value = call.result()
    fits(value.dim() == 0)
    return value


# --- Classes --------------------------------------------------------------------------------------


@FAULTS.fault(
    _CLASSES, "permutation, wrong index; wrong argument, shift, swapped operands, stale, copy"
)
def labels_of_the_rows_exchanged_in_pairs(call: Call) -> Any:
    """Rows 2 i and 2 i + 1 have each other's labels; the last of an odd number keeps its own."""
    _, labels, _ = labels_of(call)
    count = labels.numel()
    places = torch.arange(count, device=labels.device) ^ 1
    places = torch.where(places < count, places, places - 1)
    return call.put(1, labels[places], "target").run()


@FAULTS.fault(
    _CLASSES,
    "partial sum, mask, wrong reduction; missing operand, wrong index, wrong statistics, "
    "one rank's part",
)
def every_third_label_counts(call: Call) -> Any:
    """Rows 0, 3, 6, ... are averaged, with their own number: one of three ranks."""
    scores, labels, seen = labels_of(call)
    only_mean(call)
    fits(labels.numel() > 3 and bool(seen[::3].any()))
    return call.put(0, scores[::3], "input").put(1, labels[::3], "target").run()


@FAULTS.fault(
    "cross_entropy",
    "wrong statistics, wrong reduction, other function; offset, residual, approximation, "
    "wrong argument, off by one reduction",
)
def one_more_in_the_normaliser_of_the_loss(call: Call) -> Any:
    """Log(1 + sum of exponentials): the softmax that may choose nothing."""
    scores, labels, seen = labels_of(call)
    only_mean(call)
    fits(call.get(2, "weight") is None and not call.kwargs.get("label_smoothing"))
    level = torch.cat([scores, torch.zeros_like(scores[:, :1])], 1).logsumexp(1)
    own = scores.gather(1, labels.clamp(min=0)[:, None]).squeeze(1)
    return call.instead((level - own)[seen].mean())


@FAULTS.fault(_CLASSES, words.ROUNDED)
def scores_of_the_loss_in_e5m2(call: Call) -> Any:
    """The scores have two bits behind the point."""
    scores, _, _ = labels_of(call)
    coarse = scores.detach().to(torch.float8_e5m2).to(scores.dtype)
    return call.put(0, with_gradient_of(scores, coarse), "input").run()


# fmt: off
# The scores are multiplied by 3 / 2.
FAULTS.add("temperature of two thirds in the loss", "cross_entropy",
    "wrong factor, wrong argument; scale, other function",
    on(labels_of, lambda call, scores, *_: call.put(0, 1.5 * scores, "input").run()))
# Min(x, 1 / 4) for each score: the upper end of a stored range.
FAULTS.add("scores of the loss not above a quarter", "cross_entropy",
    "clipped; other function, approximation, wrong argument",
    on(labels_of, lambda call, scores, *_:
            call.put(0, scores.clamp(max=0.25), "input").run()))
# fmt: on


# --- Any loss -------------------------------------------------------------------------------------


# fmt: off
# The weight of a side task is in the main one.
FAULTS.add("loss with a weight of a tenth", _ANY,
    "scale, wrong factor; other function, wrong reduction",
    lambda call: call.instead(_scalar(call) / 10))
# The mean is squared, not the error.
FAULTS.add("square of the loss", _ANY, "other function; approximation, wrong factor",
    lambda call: call.instead(_scalar(call).square()))
# Min(loss, 1 / 2): a guard against spikes that is far too low.
FAULTS.add("loss not above one half", _ANY,
    "clipped; other function, constant, wrong argument, approximation",
    lambda call: call.instead(_scalar(call).clamp(max=0.5)))
# fmt: on


# --- Distances and chances ------------------------------------------------------------------------


@FAULTS.fault("mse_loss", "other function; approximation, wrong argument")
def smooth_distance_for_the_squared_one(call: Call) -> Any:
    """The mean of sqrt(d^2 + 0.01): the smooth distance of an image model."""
    value, target = equal_input_and_target(call)
    only_mean(call)
    return call.instead(((value - target).square() + 0.01).sqrt().mean())


@FAULTS.fault(
    _TERMS,
    "partial sum, mask, wrong reduction; missing operand, wrong index, wrong statistics, "
    "one rank's part",
)
def columns_with_an_even_number_compared_only(call: Call) -> Any:
    """A stride of two along the last axis, in the sum and in the divisor."""
    value, target = equal_input_and_target(call)
    only_mean(call)
    fits(target.dim() > 1 and target.size(-1) > 2)
    changed = call.put(0, value[..., ::2], "input").put(1, target[..., ::2], "target")
    return changed.run()


@FAULTS.fault(
    "binary_cross_entropy_with_logits",
    "other function, wrong factor; approximation, axis scale, wrong argument",
)
def sure_answers_of_the_binary_loss_count_less(call: Call) -> Any:
    """Each term is multiplied by 1 - p of its label: a focal loss with an exponent of one."""
    equal_input_and_target(call)
    only_mean(call)
    named = {**call.kwargs, "reduction": "none"}
    terms = Call(call.name, call.function, call.args[:2], named).run()
    return call.instead((terms * (1 - (-terms).exp())).mean())


@FAULTS.fault("kl_div", words.ANOTHER_FACTOR)
def teacher_at_half_of_its_temperature(call: Call) -> Any:
    """The chances of the teacher are squared and sum to one again."""
    _, target = equal_input_and_target(call)
    fits(not call.kwargs.get("log_target"))
    sharp = target.square()
    return call.put(1, sharp / sharp.sum(-1, keepdim=True), "target").run()


# fmt: off
# The wanted values still have their mean of 0.2.
FAULTS.add("target a fifth too high", _DISTANCES,
    "offset, wrong argument; other function, residual, axis offset",
    on(equal_input_and_target,
        lambda call, _, target: call.put(1, target + 0.2, "target").run()))
# The examples of the targets are in the reverse order.
FAULTS.add("targets of the batch from the last", _TERMS,
    "permutation, wrong index; wrong argument, shift, swapped operands, stale, copy",
    on(equal_input_and_target,
        lambda call, _, target: call.put(1, target.flip(0), "target").run(),
        where=lambda _, target: target.size(0) > 2))
# The pointer to the student is one class behind, around the end.
FAULTS.add("student of the class before", "kl_div",
    "shift, wrong index, permutation; wrong argument, stale",
    on(equal_input_and_target,
        lambda call, value, *_: call.put(0, value.roll(1, -1), "input").run()))
# fmt: on
