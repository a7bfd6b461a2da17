"""More faults for measuring: losses."""

from __future__ import annotations

from typing import Any

import torch
from benchmarks.places.calls import Call, Catalogue, fits, with_gradient_of
from benchmarks.places.changes import computed, on
from benchmarks.places.parts import labels_of
from torch import Tensor
from torch.nn import functional

FAULTS = Catalogue()
_CLASSES = "cross_entropy nll_loss"


def _plain(call: Call) -> None:
    """Go on only without weights and smoothing, for a mean."""
    fits(call.get(2, "weight") is None and not call.kwargs.get("label_smoothing"))
    fits(call.kwargs.get("reduction", "mean") == "mean")


def _two(call: Call) -> tuple[Tensor, Tensor]:
    """Two operands of one shape, of which the mean is asked for."""
    value, target = call.tensor(0, "input"), call.tensor(1, "target")
    fits(value.shape == target.shape and call.kwargs.get("reduction", "mean") == "mean")
    return value, target


# --- Classes --------------------------------------------------------------------------------------


@FAULTS.fault(
    "cross_entropy",
    "mask, partial sum, other function, missing operand, wrong reduction; "
    "missing reduction, one rank's part, offset, wrong argument",
)
def right_class_not_in_the_normaliser(call: Call) -> Any:
    """The sum of exponentials goes over the other classes only."""
    scores, labels, seen = labels_of(call)
    _plain(call)
    own = labels[seen, None]
    right = scores[seen].gather(1, own)
    others = scores[seen].scatter(1, own, float("-inf"))
    return call.instead((others.logsumexp(1) - right.squeeze(1)).mean())


@FAULTS.fault(
    "cross_entropy",
    "wrong factor, other function, doubled reduction; wrong argument, residual, offset, "
    "wrong reduction",
)
def smoothing_added_to_the_full_label(call: Call) -> Any:
    """The right class keeps the weight one, and the mean of all classes is added."""
    scores, labels, seen = labels_of(call)
    share = call.kwargs.get("label_smoothing", 0.0)
    fits(share > 0 and call.get(2, "weight") is None)
    hard = functional.cross_entropy(scores[seen], labels[seen])
    return call.instead(call.result() + share * hard)


@FAULTS.fault(_CLASSES, "precision; approximation, wrong reduction, partial sum, lost accumulation")
def losses_added_in_half_of_the_bits(call: Call) -> Any:
    """The sum of the losses is rounded to bfloat16 after each of them."""
    scores, labels, seen = labels_of(call)
    _plain(call)
    chances = scores.log_softmax(1) if call.name == "cross_entropy" else scores
    each = -chances[seen].gather(1, labels[seen, None]).squeeze(1)
    total = torch.zeros((), dtype=torch.bfloat16)
    for one in each.detach():
        total = (total.float() + one.float()).to(torch.bfloat16)
    mean = each.mean()
    return call.instead(with_gradient_of(mean, total.to(mean.dtype) / each.numel()))


@FAULTS.fault("cross_entropy", "offset, other function, wrong argument; residual, wrong factor")
def right_score_lowered_by_a_margin(call: Call) -> Any:
    """0.35 is subtracted from the score of the right class, as for faces."""
    scores, labels, seen = labels_of(call)
    _plain(call)
    own = functional.one_hot(labels.clamp(min=0), scores.size(1)).to(scores.dtype)
    return call.put(0, scores - 0.35 * own * seen[:, None], "input").run()


@FAULTS.fault("nll_loss", "other function; approximation, missing operand, wrong factor, clipped")
def chance_of_an_error_for_its_logarithm(call: Call) -> Any:
    """The mean of 1 - p."""
    chances, labels, seen = labels_of(call)
    _plain(call)
    return call.instead(1 - chances[seen].gather(1, labels[seen, None]).exp().mean())


# fmt: off
# The pointer to the weights of the classes is one too far, around the end.
FAULTS.add("weight of the next class", "cross_entropy",
    "wrong index, shift, permutation; wrong argument, wrong factor, stale",
    on(lambda call: (call.get(2, "weight"),),
        lambda call, weight: call.put(2, weight.roll(-1), "weight").run(),
        where=lambda weight: isinstance(weight, Tensor)))
# fmt: on


# --- Distances ------------------------------------------------------------------------------------


@FAULTS.fault(
    "mse_loss l1_loss",
    "wrong index, wrong reduction, wrong axis, other function; copy, wrong argument, "
    "permutation, wrong statistics",
)
def every_value_compared_with_every_target_of_the_batch(call: Call) -> Any:
    """A new axis makes one operand a row and the other one a column: all pairs are averaged."""
    value, target = _two(call)
    fits(value.size(0) > 1)
    distance = value[:, None] - target[None]
    return call.instead((distance.square() if call.name == "mse_loss" else distance.abs()).mean())


@FAULTS.fault(
    "smooth_l1_loss huber_loss",
    "other function, swapped operands, mask; wrong argument, wrong factor, approximation",
)
def parts_of_the_loss_exchanged(call: Call) -> Any:
    """The straight part is near zero, and the square is beyond."""
    value, target = _two(call)
    limit = call.kwargs.get("delta", call.kwargs.get("beta", 1.0))
    distance = (value - target).abs()
    square = distance.square() / (2 * limit)
    each = torch.where(distance < limit, distance - limit / 2, square)
    return call.instead((each * limit if call.name == "huber_loss" else each).mean())


@FAULTS.fault("huber_loss", "missing operand, wrong factor, other function; scale, wrong argument")
def straight_part_not_times_delta(call: Call) -> Any:
    """d^2 / 2 near zero, and |d| - delta / 2 beyond."""
    value, target = _two(call)
    delta = call.kwargs.get("delta", 1.0)
    distance = (value - target).abs()
    each = torch.where(distance < delta, distance.square() / 2, distance - delta / 2)
    return call.instead(each.mean())


# fmt: off
# The mean over the columns is taken first, and its square is averaged.
FAULTS.add("errors averaged before they are squared", "mse_loss",
    "wrong reduction, other function; wrong axis, missing operand, partial sum, "
    "wrong statistics",
    computed(_two, lambda value, target: (value - target).mean(-1).square().mean(),
        where=lambda value, *_: value.dim() > 1))
# fmt: on


# --- Chances --------------------------------------------------------------------------------------


@FAULTS.fault(
    "binary_cross_entropy_with_logits",
    "sign, missing operand, other function; wrong argument, constant, copy, wrong index",
)
def sign_of_the_complement_lost(call: Call) -> Any:
    """Log sigmoid(x) for log sigmoid(-x) in the second term: every label is as good as one."""
    value, _ = _two(call)
    fits(call.get(2, "weight") is None)
    return call.instead(functional.softplus(-value).mean())


@FAULTS.fault(
    "kl_div",
    "wrong factor, scale, wrong axis, wrong reduction; wrong argument, wrong statistics, "
    "other function",
)
def divergence_divided_by_the_classes(call: Call) -> Any:
    """The size of the last axis is taken for that of the batch."""
    value = call.tensor(0, "input")
    fits(call.kwargs.get("reduction") == "batchmean" and value.size(0) != value.size(-1))
    return call.instead(call.result() * value.size(0) / value.size(-1))


@FAULTS.fault(
    "kl_div",
    "other function, wrong argument; approximation, wrong factor, residual, missing operand",
)
def student_mixed_with_the_teacher(call: Call) -> Any:
    """The divergence from the mean of both chances: half of a symmetric one."""
    value, target = call.tensor(0, "input"), call.tensor(1, "target")
    return call.put(0, ((value.exp() + target) / 2).log(), "input").run()


# fmt: off
# Log(p + 0.05) and log(1 - p + 0.05).
FAULTS.add("twentieth under both logarithms", "binary_cross_entropy",
    "eps, other function, approximation; offset, clipped, wrong argument",
    computed(_two,
        lambda value, target:
            -(target * (value + 0.05).log() + (1 - target) * (1 - value + 0.05).log()).mean()))
# fmt: on


# --- Margins --------------------------------------------------------------------------------------


@FAULTS.fault("poisson_nll_loss", "wrong argument, other function, offset; residual, approximation")
def factorial_of_the_count_added(call: Call) -> Any:
    """full=True: Stirling's term for counts above one."""
    fits(not call.kwargs.get("full"))
    return Call(call.name, call.function, call.args, {**call.kwargs, "full": True}).run()


@FAULTS.fault(
    "triplet_margin_loss", "wrong argument, other function; wrong index, clipped, wrong reduction"
)
def shorter_of_two_ways_to_the_negative(call: Call) -> Any:
    """swap=True: the distance from the positive counts if it is the smaller one."""
    fits(not call.kwargs.get("swap"))
    return Call(call.name, call.function, call.args, {**call.kwargs, "swap": True}).run()


@FAULTS.fault(
    "cosine_embedding_loss", "missing operand, other function, wrong factor; scale, wrong argument"
)
def lengths_of_the_embeddings_not_divided(call: Call) -> Any:
    """Products for cosines: the vectors are taken as normalised."""
    left, right, side = (call.tensor(i) for i in range(3))
    margin = call.kwargs.get("margin", 0.0)
    alike = (left * right).sum(-1)
    return call.instead(torch.where(side > 0, 1 - alike, (alike - margin).relu()).mean())


@FAULTS.fault(
    "multi_margin_loss",
    "offset, mask; other function, residual, wrong reduction, off by one reduction",
)
def right_class_compared_with_itself(call: Call) -> Any:
    """The right class is not left out of the sum: each row has the margin once more."""
    value, margin = call.tensor(0, "input"), call.kwargs.get("margin", 1.0)
    fits(call.kwargs.get("p", 1) == 1)
    return call.instead(call.result() + margin / value.size(-1))


@FAULTS.fault(
    "hinge_embedding_loss",
    "wrong factor, scale, missing operand, zeros, mask; partial sum, other function, "
    "one rank's part",
)
def like_pairs_cost_nothing(call: Call) -> Any:
    """Only max(0, margin - x) of the unlike pairs is added."""
    value, side = call.tensor(0, "input"), call.tensor(1, "target")
    margin = call.kwargs.get("margin", 1.0)
    return call.instead(((margin - value).relu() * (side < 0)).mean())


# fmt: off
# Max(0, -y (a - b) - margin).
FAULTS.add("margin subtracted", "margin_ranking_loss",
    "sign, wrong argument; offset, other function, wrong factor",
    on(lambda call: (call.get(3, "margin", default=0.0),),
        lambda call, margin: call.put(3, -margin, "margin").run(),
        where=lambda margin: margin > 0))
# fmt: on
