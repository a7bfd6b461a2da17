"""Faults that were measured fifth and have been seen: losses."""

from __future__ import annotations

from typing import Any

import torch
from benchmarks.places.calls import Call, Catalogue, fits
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


@FAULTS.fault("cross_entropy", kinds=["wrong argument", "wrong factor"], loose=["scale", "offset"])
def smoothing_doubled(call: Call) -> Any:
    """Twice the label smoothing."""
    smoothing = call.kwargs.get("label_smoothing", 0.0)
    fits(smoothing > 0)
    return _again(call, label_smoothing=2 * smoothing)


@FAULTS.fault("cross_entropy", kinds=["wrong factor", "scale", "wrong argument"],
              loose=["other function"])  # fmt: skip
def scores_of_the_loss_halved(call: Call) -> Any:
    """A temperature that belongs to sampling."""
    return call.put(0, _labels(call)[0] / 2, "input").run()


@FAULTS.fault("cross_entropy", kinds=["other function", "clipped", "approximation"],
              loose=["wrong argument", "wrong factor"])  # fmt: skip
def scores_of_the_loss_capped(call: Call) -> Any:
    """tanh(s), as a cap of one."""
    return call.put(0, _labels(call)[0].tanh(), "input").run()


@FAULTS.fault(_CLASSES, kinds=["mask", "wrong argument", "partial sum"],
              loose=["wrong statistics", "wrong reduction", "off by one reduction"])  # fmt: skip
def a_class_taken_for_padding(call: Call) -> Any:
    """ignore_index is the class of the first label."""
    _, labels, seen = _labels(call)
    return _again(call, ignore_index=int(labels[seen][0]))


@FAULTS.fault(_CLASSES, kinds=["off by one reduction", "wrong factor", "scale", "wrong statistics"],
              loose=["wrong reduction", "eps"])  # fmt: skip
def labels_counted_with_one_more(call: Call) -> Any:
    """The sum is divided by n + 1, so that it is never divided by zero."""
    count = int(_labels(call)[2].sum())
    return call.instead(call.result() * count / (count + 1))


@FAULTS.fault(_CLASSES, kinds=["permutation", "wrong index"], loose=["shift"])
def labels_from_the_last_to_the_first(call: Call) -> Any:
    """The labels are read from their end."""
    return call.put(1, _labels(call)[1].flip(0), "target").run()


@FAULTS.fault(
    _CLASSES, kinds=["scale", "wrong factor"], loose=["wrong reduction", "missing operand"]
)
def loss_divided_by_the_classes(call: Call) -> Any:
    """A mean over the classes as well."""
    return call.instead(call.result() / _labels(call)[0].size(-1))


@FAULTS.fault(_CLASSES, kinds=["other function"], loose=["missing operand", "wrong argument"])
def perplexity_for_the_loss(call: Call) -> Any:
    """The exponential of the mean."""
    return call.instead(call.result().exp())


@FAULTS.fault("cross_entropy", kinds=["other function", "missing operand"],
              loose=["wrong index", "wrong reduction", "wrong argument"])  # fmt: skip
def entropy_of_the_scores(call: Call) -> Any:
    """The chances of the model in the place of the labels."""
    scores, _, seen = _labels(call)
    chances = scores.softmax(-1)
    return call.instead(-(chances * scores.log_softmax(-1)).sum(-1)[seen].mean())


@FAULTS.fault("cross_entropy", kinds=["other function"], loose=["approximation", "clipped"])
def hinge_for_the_cross_entropy(call: Call) -> Any:
    """A margin of one between the right class and the others."""
    scores, labels, seen = _labels(call)
    return call.instead(functional.multi_margin_loss(scores[seen], labels[seen]))


@FAULTS.fault(_CLASSES, kinds=["wrong factor", "scale", "one rank's part"],
              loose=["wrong reduction", "missing reduction"])  # fmt: skip
def loss_averaged_over_two_ranks_of_one(call: Call) -> Any:
    """Half: the other rank's loss is taken as zero."""
    return call.instead(call.result() / 2)


# --- Distances ------------------------------------------------------------------------------------


@FAULTS.fault(
    "mse_loss", kinds=["sign", "other function", "wrong factor"], loose=["swapped operands"]
)
def target_added(call: Call) -> Any:
    """(a + b)^2."""
    return call.put(1, -call.tensor(1, "target"), "target").run()


@FAULTS.fault("mse_loss smooth_l1_loss huber_loss l1_loss", kinds=["precision"],
              loose=["approximation"])  # fmt: skip
def target_in_bfloat16(call: Call) -> Any:
    """The wanted values are rounded."""
    target = call.tensor(1, "target")
    coarse = target + (target.bfloat16().to(target.dtype) - target).detach()
    return call.put(1, coarse, "target").run()


@FAULTS.fault("mse_loss", kinds=["wrong argument", "wrong reduction", "scale", "wrong factor"],
              loose=["missing reduction", "wrong statistics"])  # fmt: skip
def mean_for_the_sum_of_squares(call: Call) -> Any:
    """reduction='mean' for 'sum'."""
    fits(call.kwargs.get("reduction") == "sum" or (len(call.args) > 2 and call.args[2] == 2))
    return call.instead(functional.mse_loss(call.tensor(0), call.tensor(1)))


@FAULTS.fault("mse_loss l1_loss", kinds=["missing operand", "other function"],
              loose=["wrong argument", "wrong factor", "zeros"])  # fmt: skip
def target_not_read(call: Call) -> Any:
    """The wanted values are zero."""
    return call.put(1, torch.zeros_like(call.tensor(1, "target")), "target").run()


@FAULTS.fault("smooth_l1_loss huber_loss", kinds=["other function", "wrong argument"],
              loose=["clipped", "approximation", "wrong factor"])  # fmt: skip
def errors_squared_everywhere(call: Call) -> Any:
    """Half of the mean of squares: the linear part is never reached."""
    return call.instead(functional.mse_loss(call.tensor(0), call.tensor(1)) / 2)


@FAULTS.fault("l1_loss", kinds=["sign", "missing operand", "other function"],
              loose=["wrong reduction"])  # fmt: skip
def signed_errors_averaged(call: Call) -> Any:
    """The mean of a - b."""
    return call.instead((call.tensor(0) - call.tensor(1)).mean())


# --- Chances --------------------------------------------------------------------------------------


@FAULTS.fault("binary_cross_entropy_with_logits", kinds=["clipped"],
              loose=["other function", "wrong argument", "approximation"])  # fmt: skip
def logits_limited(call: Call) -> Any:
    """Between -0.3 and 0.3."""
    return call.put(0, call.tensor(0, "input").clamp(-0.3, 0.3), "input").run()


@FAULTS.fault("binary_cross_entropy_with_logits binary_cross_entropy", kinds=["other function"],
              loose=["approximation", "wrong argument"])  # fmt: skip
def squared_error_of_the_chances(call: Call) -> Any:
    """(p - y)^2."""
    value = call.tensor(0, "input")
    chances = value.sigmoid() if call.name.endswith("logits") else value
    return call.instead(functional.mse_loss(chances, call.tensor(1, "target")))


@FAULTS.fault("binary_cross_entropy", kinds=["wrong reduction", "scale", "wrong factor"],
              loose=["missing reduction"])  # fmt: skip
def losses_of_the_chances_summed(call: Call) -> Any:
    """Summed over the columns, averaged over the rows."""
    return call.instead(call.result() * call.tensor(0).size(-1))


@FAULTS.fault("kl_div", kinds=["eps", "offset", "other function"], loose=["wrong argument"])
def target_with_a_tenth_added(call: Call) -> Any:
    """Nothing is ever the logarithm of zero."""
    return call.put(1, call.tensor(1, "target") + 0.1, "target").run()


@FAULTS.fault("kl_div", kinds=["scale", "wrong factor"], loose=["missing operand"])
def divergence_halved(call: Call) -> Any:
    """Half of a symmetric divergence."""
    return call.instead(call.result() / 2)


@FAULTS.fault(
    "poisson_nll_loss", kinds=["swapped operands"], loose=["other function", "wrong index"]
)
def rate_and_count_exchanged(call: Call) -> Any:
    """The count is taken for the rate."""
    return call.put(0, call.tensor(1)).put(1, call.tensor(0)).run()


@FAULTS.fault("poisson_nll_loss", kinds=["missing operand", "other function"],
              loose=["partial sum", "wrong argument"])  # fmt: skip
def count_does_not_matter(call: Call) -> Any:
    """exp(x) alone."""
    return call.put(1, torch.zeros_like(call.tensor(1))).run()


# --- Margins --------------------------------------------------------------------------------------


@FAULTS.fault(
    "margin_ranking_loss cosine_embedding_loss hinge_embedding_loss multi_margin_loss",
    kinds=["wrong argument", "wrong factor"],
    loose=["scale", "offset"],
)
def margin_doubled(call: Call) -> Any:
    """Twice the margin."""
    if "margin" in call.kwargs:
        return _again(call, margin=2 * call.kwargs["margin"])
    fits(call.name == "margin_ranking_loss")
    return call.put(3, 2 * call.args[3]).run()


@FAULTS.fault("margin_ranking_loss", kinds=["other function"], loose=["wrong argument"])
def squares_of_what_is_missing(call: Call) -> Any:
    """The squared hinge."""
    kwargs = {**call.kwargs, "reduction": "none"}
    own = Call(call.name, call.function, call.args, kwargs).run()
    return call.instead(own.square().mean())


@FAULTS.fault("triplet_margin_loss", kinds=["swapped operands", "wrong index"])
def anchor_and_near_exchanged(call: Call) -> Any:
    """Distances are measured from the positive."""
    anchor, positive, negative = call.args[:3]
    args = (positive, anchor, negative, *call.args[3:])
    return Call(call.name, call.function, args, call.kwargs).run()


@FAULTS.fault(
    "triplet_margin_loss", kinds=["wrong argument", "wrong factor"], loose=["scale", "offset"]
)
def triplets_with_half_of_the_margin(call: Call) -> Any:
    """The margin is halved."""
    return _again(call, margin=call.kwargs.get("margin", 1.0) / 2)


@FAULTS.fault("soft_margin_loss", kinds=["missing operand", "sign", "other function"],
              loose=["wrong argument"])  # fmt: skip
def sides_not_read(call: Call) -> Any:
    """All labels are taken as positive."""
    return call.put(1, torch.ones_like(call.tensor(1))).run()


@FAULTS.fault("cosine_embedding_loss", kinds=["sign", "swapped operands", "other function"],
              loose=["wrong argument", "wrong index"])  # fmt: skip
def like_and_unlike_exchanged(call: Call) -> Any:
    """The sign of the labels."""
    return call.put(2, -call.tensor(2)).run()


@FAULTS.fault(
    "hinge_embedding_loss",
    kinds=["wrong argument", "wrong reduction", "scale", "wrong factor"],
    loose=["missing reduction"],
)
def hinges_summed(call: Call) -> Any:
    """reduction='sum'."""
    return _again(call, reduction="sum")


@FAULTS.fault(
    "multi_margin_loss", kinds=["wrong argument", "other function"], loose=["wrong factor"]
)
def margins_squared(call: Call) -> Any:
    """P of 2."""
    return _again(call, p=2)


@FAULTS.fault("multilabel_soft_margin_loss", kinds=["sign", "swapped operands", "other function"],
              loose=["wrong argument"])  # fmt: skip
def several_labels_inverted(call: Call) -> Any:
    """1 - y."""
    return call.put(1, 1 - call.tensor(1)).run()


@FAULTS.fault("multilabel_soft_margin_loss", kinds=["scale", "wrong factor", "wrong reduction"],
              loose=["missing reduction", "missing operand"])  # fmt: skip
def several_labels_summed(call: Call) -> Any:
    """Not divided by the number of labels."""
    return call.instead(call.result() * call.tensor(0).size(-1))
