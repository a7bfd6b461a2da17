"""Faults that were measured third and have been seen: losses."""

from __future__ import annotations

from typing import Any

import torch
from benchmarks.places.calls import Call, Catalogue, fits
from torch import Tensor
from torch.nn import functional

FAULTS = Catalogue()


def _both(call: Call) -> tuple[Tensor, Tensor]:
    return call.tensor(0, "input"), call.tensor(1, "target")


# Without a word: another term is added.
@FAULTS.fault(
    "cross_entropy", loose=["offset", "residual", "other function", "scale", "wrong factor"]
)
def square_of_the_normaliser_added(call: Call) -> Any:
    """The term that keeps the normaliser near one, which this model does not have."""
    value = call.tensor(0, "input")
    return call.instead(call.result() + 0.05 * value.logsumexp(-1).square().mean())


@FAULTS.fault("cross_entropy", kinds=["wrong factor", "wrong argument", "off by one reduction"],
              loose=["scale", "other function", "offset"])  # fmt: skip
def smoothing_without_the_right_class(call: Call) -> Any:
    """What is taken from the right class is shared by the others only."""
    smoothing = call.get(8, "label_smoothing", default=0.0)
    fits(smoothing and len(call.args) < 3)
    classes = call.tensor(0, "input").size(-1)
    return call.put(8, smoothing * classes / (classes - 1), "label_smoothing").run()


@FAULTS.fault(
    "cross_entropy nll_loss", kinds=["wrong index", "other function", "swapped operands"],
    loose=["scale", "clipped", "wrong argument"],
)  # fmt: skip
def labels_taken_from_the_scores(call: Call) -> Any:
    """The label is the class with the largest score."""
    value, target = call.tensor(0, "input"), call.get(1, "target")
    fits(value.dim() == 2)
    own = torch.where(target < 0, target, value.argmax(-1))
    return call.put(1, own, "target").run()


@FAULTS.fault(
    "cross_entropy nll_loss", kinds=["wrong reduction", "wrong factor", "scale"],
    loose=["axis scale", "wrong argument", "mask", "other function"],
)  # fmt: skip
def later_tokens_weigh_more(call: Call) -> Any:
    """The mean of running means: the first tokens count less."""
    value, target = call.tensor(0, "input"), call.get(1, "target")
    function = functional.cross_entropy if call.name == "cross_entropy" else functional.nll_loss
    each = function(value, target, reduction="none")
    kept = each[target >= 0]
    fits(kept.numel() > 2)
    weights = torch.arange(1, kept.numel() + 1, dtype=value.dtype)
    return call.instead((kept * weights).sum() / weights.sum())


@FAULTS.fault("cross_entropy nll_loss",
              kinds=["copy", "wrong index", "partial sum", "missing reduction"],
              loose=["wrong reduction", "scale", "one rank's part"])  # fmt: skip
def loss_of_the_first_token(call: Call) -> Any:
    """The loss of one token for the mean of all."""
    value, target = call.tensor(0, "input"), call.get(1, "target")
    fits(value.dim() == 2 and int(target[0]) >= 0)
    return call.put(0, value[:1], "input").put(1, target[:1], "target").run()


@FAULTS.fault("mse_loss", kinds=["other function"], loose=["scale", "missing operand"])
def root_of_the_mean_square(call: Call) -> Any:
    """The root is taken at the end."""
    return call.instead(call.result().sqrt())


@FAULTS.fault(
    "mse_loss", kinds=["wrong statistics", "other function", "missing operand"],
    loose=["offset", "scale", "wrong reduction"],
)  # fmt: skip
def variance_of_the_error(call: Call) -> Any:
    """The mean error is subtracted first."""
    value, target = _both(call)
    return call.instead((value - target).var(correction=0))


@FAULTS.fault(
    "smooth_l1_loss", kinds=["scale", "wrong factor", "other function"], loose=["wrong argument"]
)
def rule_of_huber(call: Call) -> Any:
    """The quadratic part is not divided by beta."""
    value, target = _both(call)
    beta = call.get(5, "beta", default=1.0)
    return call.instead(functional.huber_loss(value, target, delta=beta))


@FAULTS.fault(
    "smooth_l1_loss", kinds=["clipped", "other function"], loose=["scale", "wrong argument"]
)
def far_errors_limited(call: Call) -> Any:
    """Errors above beta count as beta."""
    value, target = _both(call)
    beta = call.get(5, "beta", default=1.0)
    error = (value - target).clamp(-beta, beta)
    return call.instead((0.5 * error * error / beta).mean())


@FAULTS.fault(
    "binary_cross_entropy_with_logits", kinds=["wrong argument", "wrong factor"],
    loose=["scale", "residual"],
)  # fmt: skip
def positive_labels_count_twice(call: Call) -> Any:
    """pos_weight of 2."""
    value, target = _both(call)
    weight = value.new_tensor(2.0)
    return call.instead(
        functional.binary_cross_entropy_with_logits(value, target, pos_weight=weight)
    )


@FAULTS.fault(
    "binary_cross_entropy_with_logits", kinds=["missing operand", "partial sum"],
    loose=["scale", "other function", "mask"],
)  # fmt: skip
def negative_labels_do_not_count(call: Call) -> Any:
    """Only y log p."""
    value, target = _both(call)
    return call.instead(-(target * functional.logsigmoid(value)).mean())


@FAULTS.fault(
    "binary_cross_entropy_with_logits mse_loss", kinds=["wrong reduction", "other function"],
    loose=["scale", "wrong argument"],
)  # fmt: skip
def largest_loss_for_the_mean(call: Call) -> Any:
    """The hardest example only."""
    value, target = _both(call)
    function = getattr(functional, call.name)
    return call.instead(function(value, target, reduction="none").max())


@FAULTS.fault("kl_div", kinds=["wrong argument", "other function"], loose=["scale"])
def target_taken_for_a_logarithm(call: Call) -> Any:
    """log_target=True."""
    value, target = _both(call)
    return call.instead(functional.kl_div(value, target, reduction="batchmean", log_target=True))


@FAULTS.fault(
    "kl_div", kinds=["other function", "missing operand"], loose=["scale", "wrong factor"]
)
def chances_taken_for_logarithms(call: Call) -> Any:
    """The first operand is exponentiated before it is handed over."""
    return call.put(0, call.tensor(0, "input").exp(), "input").run()
