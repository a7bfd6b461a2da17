"""Losses with another divisor, of other targets, of another input, or another loss."""

from __future__ import annotations

import contextlib
import math
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from paritas.core.diagnosis.calls import step_names
from paritas.core.diagnosis.patterns.steps import (
    first_of,
    with_altered,
    with_result,
)
from paritas.core.diagnosis.patterns.variations import Variation
from paritas.core.results.findings import PatternKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from paritas.core.diagnosis.calls import Step

_F = torch.nn.functional
_MEAN = 1
_SUM = 2
_PAIRED = step_names("losses of pairs")
# The terms of losses of values and of as many targets, which are mistaken for each other.
_OF_PAIRS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mse_loss": lambda x, y: (x - y).square(),
    "half of mse_loss": lambda x, y: (x - y).square() / 2,
    "l1_loss": lambda x, y: (x - y).abs(),
    "smooth_l1_loss": lambda x, y: _F.smooth_l1_loss(x, y, reduction="none"),
    "huber_loss": lambda x, y: _F.huber_loss(x, y, reduction="none"),
    "the mean of the differences": lambda x, y: x - y,
    "log(cosh(x - y))": lambda x, y: (x - y).cosh().log(),
    "binary_cross_entropy": lambda x, y: _F.binary_cross_entropy(x, y, reduction="none"),
    "binary_cross_entropy_with_logits": lambda x, y: _F.binary_cross_entropy_with_logits(
        x, y, reduction="none"
    ),
    "the squared error of the sigmoid": lambda x, y: (x.sigmoid() - y).square(),
    "soft_margin_loss": lambda x, y: _F.softplus(-x * y),
    "the hinge loss": lambda x, y: (1 - x * y).relu(),
    "the squared hinge loss": lambda x, y: (1 - x * y).relu().square(),
}
# Of scores and classes, with a term for each row.
_OF_CLASSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "multi_margin_loss": lambda x, y: _F.multi_margin_loss(x, y, reduction="none"),
    "multi_margin_loss with squares": lambda x, y: _F.multi_margin_loss(
        x, y, p=2, reduction="none"
    ),
    "the squared error of the softmax": lambda x, y: (x.softmax(-1) - _hot(x, y)).square().sum(-1),
    "the mean squared error of the softmax": lambda x, y: (
        (x.softmax(-1) - _hot(x, y)).square().mean(-1)
    ),
    "the mean squared error of the scores": lambda x, y: (x - _hot(x, y)).square().mean(-1),
    "nll_loss of the scores": lambda x, y: -(x * _hot(x, y)).sum(-1),
    "nll_loss of the softmax": lambda x, y: -(x.softmax(-1) * _hot(x, y)).sum(-1),
    "the entropy of the softmax": lambda x, _: -(x.softmax(-1) * x.log_softmax(-1)).sum(-1),
    "binary_cross_entropy_with_logits of each class": lambda x, y: (
        _F.binary_cross_entropy_with_logits(x, _hot(x, y), reduction="none").mean(-1)
    ),
    "the share of wrong answers": lambda x, y: (x.argmax(-1) != y).to(x.dtype),
}


def _hot(scores: Tensor, labels: Tensor) -> Tensor:
    return _F.one_hot(labels, scores.shape[-1]).to(scores.dtype)


_ALTERED: dict[str, Callable[[Tensor], Tensor]] = {
    "the sigmoid": torch.sigmoid,
    "the softmax": lambda x: x.softmax(min(1, x.dim() - 1)),
    "the log-softmax": lambda x: x.log_softmax(min(1, x.dim() - 1)),
    "the exponential": torch.exp,
}


def loss_variations(step: Step) -> Iterator[Variation]:
    """The mistakes that are known of losses."""
    name = step.name
    if name in step_names("softmaxes"):
        yield from _input_variations(step)
    if name == "kl_div":
        yield from _divergence_variations(step)
    if name in _GRADIENTS:
        yield from _gradient_variations(step)
    if (
        name in ("nll_loss_backward", "nll_loss2d_backward")
        and _find_ignored_targets(step) is not None
    ):
        sentence = "the targets to ignore count in the mean"
        yield Variation(PatternKind.FACTOR, sentence, _with_all_counted)
    is_loss = name.endswith(("loss", "with_logits", "entropy")) or name.startswith("nll_loss")
    if not is_loss or "backward" in name:
        return
    yield from _divisor_variations(step)
    yield from _target_variations(step)
    yield from _weight_variations(step)
    yield from _input_variations(step)
    for sentence, factor in _LOSS_FACTORS.items():
        yield Variation(PatternKind.SCALE, sentence, with_result(partial(torch.mul, other=factor)))
    yield from _other_losses(name)


_LOSS_FACTORS = {
    "it is in bits: divided by ln 2": 1 / math.log(2),
    "it is multiplied by ln 2": math.log(2),
}


# --- Another loss ---------------------------------------------------------------------------------


def _other_losses(name: str) -> Iterator[Variation]:
    """Losses of the same operands, averaged or summed as the right one."""
    if name in _PAIRED:
        ways, others = _of_pairs, _OF_PAIRS
    elif name in ("cross_entropy", "cross_entropy_loss"):
        ways, others = _of_classes, _OF_CLASSES
    else:
        return
    for other, terms in others.items():
        if other != name:
            change = partial(_other_loss, ways=ways, terms=terms)
            kind = (
                PatternKind.SCALE if other.endswith(f" of {name}") else PatternKind.OTHER_FUNCTION
            )
            yield Variation(kind, f"{other} instead of {name}", change)


def _other_loss(
    step: Step,
    ways: Callable[[Step], tuple[Tensor, Tensor]],
    terms: Callable[[Tensor, Tensor], Tensor],
) -> Any:
    value, reduction = terms(*ways(step)), step.values["reduction"]
    if reduction in (_MEAN, "mean"):
        value = value.mean()
    elif reduction in (_SUM, "sum"):
        value = value.sum()
    return _as_result(step, value)


def _of_pairs(step: Step) -> tuple[Tensor, Tensor]:
    return step.values[_input_of(step)], step.values["target"]


def _of_classes(step: Step) -> tuple[Tensor, Tensor]:
    """The rows of scores whose labels count."""
    (scores, labels), ignored = _of_pairs(step), _find_ignored_targets(step)
    if scores.dim() != 2 or labels.is_floating_point():  # noqa: PLR2004
        raise ValueError("these are no rows of scores")
    return (scores, labels) if ignored is None else (scores[~ignored], labels[~ignored])


# --- Gradients of distances -----------------------------------------------------------------------

# Of the difference and of the number that says where it changes its form.
_GRADIENTS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "mse_loss_backward": lambda apart, _: 2 * apart,
    "l1_loss_backward": lambda apart, _: apart.sign(),
    "smooth_l1_loss_backward": lambda apart, beta: (apart / beta).clamp(-1, 1),
    "huber_loss_backward": lambda apart, delta: apart.clamp(-delta, delta),
}


def _gradient_variations(step: Step) -> Iterator[Variation]:
    for other, derive in _GRADIENTS.items():
        if other != step.name:
            sentence = f"the gradient of {other.removesuffix('_backward')} is taken instead"
            change = partial(_other_gradient, derive=derive)
            yield Variation(PatternKind.OTHER_FUNCTION, sentence, change)


def _other_gradient(step: Step, derive: Callable[[Tensor, float], Tensor]) -> Tensor:
    values = step.values
    apart = values["self"] - values["target"]
    each = derive(apart, values.get("beta", values.get("delta", 1.0)))
    each = each / apart.numel() if values["reduction"] == _MEAN else each
    result: Tensor = each * values["grad_output"]
    return result


def _with_all_counted(step: Step) -> Any:
    ignored, total = _find_ignored_targets(step), step.values["total_weight"]
    if ignored is None:
        raise ValueError("no target is ignored")
    weight = step.values["weight"]
    more = ignored.sum() * (1.0 if weight is None else weight.mean())
    return step.run(total_weight=total + more)


# --- Weights of the terms -------------------------------------------------------------------------

_NO_REDUCTION = {int: 0, str: "none"}


def _weight_variations(step: Step) -> Iterator[Variation]:
    """A sum or mean of the terms in which some count more, less or not at all."""
    reduction = step.values.get("reduction")
    if reduction not in (1, 2, "mean", "sum"):
        return
    is_sum = reduction in (2, "sum")
    for sentence, weigh in _WEIGHTS.items():
        for is_mean in (False,) if is_sum else (True, False):
            words = sentence if is_mean or is_sum else f"{sentence}, but not in the divisor"
            change = partial(_weigh_terms, weigh=weigh, is_mean=is_mean)
            yield Variation(PatternKind.FACTOR, words, change)
    for kind, choices in _CHOICES.items():
        for sentence, choose in choices.items():
            yield Variation(kind, sentence, partial(_chosen, choose=choose))
    for factor in _LABEL_FACTORS if step.values.get("pos_weight", step) is None else ():
        sentence = f"pos_weight is {factor:g} instead of None"
        yield Variation(PatternKind.ARGUMENT, sentence, partial(_with_raised_labels, factor=factor))


# What positive labels are often weighed with.
_LABEL_FACTORS = (2.0, 0.5, 3.0, 4.0, 5.0, 10.0)


def _with_raised_labels(step: Step, factor: float) -> Any:
    return step.run(pos_weight=step.values["target"].new_tensor(factor))


def _ranks(terms: Tensor, _: Tensor) -> Tensor:
    return torch.arange(1, len(terms) + 1, dtype=terms.dtype, device=terms.device)


def _raise_positives(_: Any, target: Tensor, factor: float) -> Tensor:
    """A factor on the terms of positive labels."""
    if not target.is_floating_point() or bool(((target < 0) | (target > 1)).any()):
        raise ValueError("the targets are no labels of two classes")
    return 1 + (factor - 1) * target


_WEIGHTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "the term number i has the weight i": _ranks,
    "the term number i has the weight i, counted from the end": lambda terms, target: _ranks(
        terms, target
    ).flip(0),
    "the term number i has the weight 1 / i": lambda terms, target: 1 / _ranks(terms, target),
    "the terms have focal weights, (1 - exp(-term)) ** 2": lambda terms, _: (
        1 - (-terms).exp()
    ).square(),
    "the terms have focal weights, 1 - exp(-term)": lambda terms, _: 1 - (-terms).exp(),
    **{
        f"terms of positive labels count {factor:g} times": partial(_raise_positives, factor=factor)
        for factor in _LABEL_FACTORS
    },
    "terms of positive labels count as often as there are more negative ones": (
        lambda terms, target: _raise_positives(
            terms, target, float((1 - target).sum() / target.sum())
        )
    ),
}
_CHOICES: dict[PatternKind, dict[str, Callable[[Tensor], Tensor]]] = {
    PatternKind.WRONG_REDUCTION: {
        "the largest term instead of the reduction": torch.max,
        "the smallest term instead of the reduction": torch.min,
        "the median of the terms": torch.median,
        "the root of the mean of the squared terms": lambda terms: terms.square().mean().sqrt(),
    },
    PatternKind.PARTIAL_SUM: {
        "the mean of the larger half of the terms": lambda terms: terms.topk(
            max(1, len(terms) // 2)
        ).values.mean(),
        "the mean of the smaller half of the terms": lambda terms: terms.topk(
            max(1, len(terms) // 2), largest=False
        ).values.mean(),
        "the first term only": lambda terms: terms[0],
        "the last term only": lambda terms: terms[-1],
    },
}


def _terms(step: Step) -> tuple[Tensor, Tensor]:
    """The terms that count, and their targets."""
    values = step.values
    reduction = _NO_REDUCTION[type(values["reduction"])]
    terms = first_of(step.run(reduction=reduction)).reshape(-1)
    target, ignored = values["target"].reshape(-1), _find_ignored_targets(step)
    if ignored is not None and target.numel() == terms.numel():
        counts = ~ignored.reshape(-1)
        terms, target = terms[counts], target[counts]
    if len(terms) < _FEWEST_TERMS:
        raise ValueError("too few terms to weigh")
    return terms, target


# Of fewer terms, weights and choices may be told as anything.
_FEWEST_TERMS = 3


def _weigh_terms(step: Step, weigh: Callable[[Tensor, Tensor], Tensor], *, is_mean: bool) -> Any:
    terms, target = _terms(step)
    weights = weigh(terms, target)
    total = (terms * weights).sum()
    if is_mean:
        total = total / weights.sum()
    elif step.values["reduction"] in (1, "mean"):
        total = total / len(terms)
    return _as_result(step, total)


def _chosen(step: Step, choose: Callable[[Tensor], Tensor]) -> Any:
    terms, _ = _terms(step)
    return _as_result(step, choose(terms))


def _as_result(step: Step, value: Tensor) -> Any:
    right = step.run()
    return value if isinstance(right, torch.Tensor) else (value, *right[1:])


# --- Inputs and targets ---------------------------------------------------------------------------


def _input_variations(step: Step) -> Iterator[Variation]:
    for words, alter in _ALTERED.items():
        sentence = f"{words} of the input is taken for the input"
        change = with_altered(_input_of(step), alter)
        yield Variation(PatternKind.OTHER_FUNCTION, sentence, change)


def _divergence_variations(step: Step) -> Iterator[Variation]:
    """The divergence of the input from the target: `input` is a logarithm."""
    first = _input_of(step)
    sentence = "the divergence is that of the target from the input, the other way round"
    yield Variation(PatternKind.SWAPPED_OPERANDS, sentence, partial(_other_way, name=first))


def _other_way(step: Step, name: str) -> Any:
    """Both are exchanged with their logarithms where needed."""
    x, target = step.values[name], step.values["target"]
    if step.values["log_target"]:
        return step.run(**{name: target, "target": x})
    return step.run(**{name: target.log(), "target": x.exp()})


def _divisor_variations(step: Step) -> Iterator[Variation]:
    if step.values.get("reduction") not in (_MEAN, "mean"):
        return
    # Nothing may be called that does not check its arguments.
    with contextlib.suppress(RuntimeError, ValueError, TypeError):
        yield from _off_by_one_divisors(step)
    first = next(value for value in step.values.values() if isinstance(value, torch.Tensor))
    target = step.values.get("target")
    counts = {"the batch": first.shape[0] if first.dim() else 1, "all elements": first.numel()}
    ignored = _find_ignored_targets(step)
    if isinstance(target, torch.Tensor):
        if ignored is not None:
            sentence = "the targets to ignore count in the mean"
            yield Variation(PatternKind.MASK, sentence, partial(_divided_sum, count=target.numel()))
        counts["all targets"] = target.numel()
    for words, count in counts.items():
        if ignored is None or target is None or count != target.numel():
            sentence = f"the sum is divided by {count}, the size of {words}"
            change = partial(_divided_sum, count=count)
            yield Variation(PatternKind.WRONG_REDUCTION, sentence, change)


def _off_by_one_divisors(step: Step) -> Iterator[Variation]:
    for by, words in ((1, "large"), (-1, "small")):
        kind = PatternKind.OFF_BY_ONE
        sentence = f"the number that the sum is divided by is one too {words}"
        factor = _factor_of_divisor(step, by)
        if math.isclose(factor, round(factor, 2), rel_tol=_ROUND):
            # Nobody can see where a plain factor comes from.
            kind, sentence = PatternKind.SCALE, f"scaled by {factor:.2g}"
        yield Variation(kind, sentence, partial(_with_divisor_off, by=by))


def _target_variations(step: Step) -> Iterator[Variation]:
    ignored = _find_ignored_targets(step)
    if ignored is not None:
        sentence = "the targets to ignore count as class 0"
        yield Variation(PatternKind.MASK, sentence, _with_class_zero)
    target = step.values.get("target")
    if not isinstance(target, torch.Tensor) or not target.dim():
        return
    if step.values[_input_of(step)].shape[0] == len(target) > _FEWEST_TERMS:
        for by, where in ((1, "after"), (-1, "before")):
            sentence = f"each target is the one {where} the right one, and one row is left out"
            yield Variation(PatternKind.WRONG_INDEX, sentence, partial(_with_next_target, by=by))
    if target.is_floating_point():
        for kind, sentence, alter in _OTHER_LABELS:
            yield Variation(kind, sentence, with_altered("target", alter))
        for number in SMOOTHING:
            sentence = f"the targets are smoothed by {number:g}"
            change = with_altered("target", partial(_smooth_target, number=number))
            yield Variation(PatternKind.ARGUMENT, sentence, change)
    else:
        for words, choose in (("largest", torch.argmax), ("smallest", torch.argmin)):
            sentence = f"the class with the {words} score is the target"
            change = partial(_with_own_target, choose=choose)
            yield Variation(PatternKind.WRONG_INDEX, sentence, change)


_OTHER_LABELS: tuple[tuple[PatternKind, str, Callable[[Tensor], Tensor]], ...] = (
    (PatternKind.SIGN, "the sign of the targets is flipped", torch.neg),
    (PatternKind.SIGN, "every target is inverted", lambda y: 1 - y),
    (PatternKind.MISSING_OPERAND, "all targets are taken as 1", torch.ones_like),
    (PatternKind.MISSING_OPERAND, "all targets are taken as 0", torch.zeros_like),
)


# Labels are often smoothed by one of these.
SMOOTHING = (0.1, 0.05, 0.2, 0.01)


def _smooth_target(target: Tensor, number: float) -> Tensor:
    _raise_positives(None, target, 1.0)  # raises if these are no labels
    return (1 - number) * target + number / 2


def _with_next_target(step: Step, by: int) -> Any:
    name = _input_of(step)
    x, target, rows = step.values[name], step.values["target"], step.values[name].shape[0] - 1
    first, second = (0, 1) if by > 0 else (1, 0)
    return step.run(**{name: x.narrow(0, first, rows), "target": target.narrow(0, second, rows)})


def _with_own_target(step: Step, choose: Callable[..., Tensor]) -> Any:
    target, ignored = step.values["target"], _find_ignored_targets(step)
    scores = step.values[_input_of(step)]
    own_target = choose(scores, min(1, scores.dim() - 1)).to(target.dtype)
    return step.run(
        target=own_target if ignored is None else torch.where(ignored, target, own_target)
    )


def _find_ignored_targets(step: Step) -> Tensor | None:
    """Where targets are to be ignored; None if there are no such."""
    target, index = step.values.get("target"), step.values.get("ignore_index")
    if not isinstance(target, torch.Tensor) or not isinstance(index, int):
        return None
    mask = target == index
    return mask if bool(mask.any()) else None


def _with_class_zero(step: Step) -> Any:
    ignored = _find_ignored_targets(step)
    if ignored is None:
        raise ValueError("no target is ignored")
    return step.run(target=step.values["target"].masked_fill(ignored, 0))


def _input_of(step: Step) -> str:
    """It has several names in functions of Python and in operators, but is the first argument."""
    return next(iter(step.values))


def _divided_sum(step: Step, count: int) -> Any:
    return step.with_first(_sum_of_terms(step) / count)


def _with_divisor_off(step: Step, by: int) -> Any:
    """The mean with another divisor; weights count in it as in the right one."""
    return step.with_first(first_of(step.run()) * _factor_of_divisor(step, by))


def _factor_of_divisor(step: Step, by: int) -> float:
    count = float(_sum_of_terms(step) / first_of(step.run()))
    return count / (count + by) if count + by else math.nan


# A factor that is this near to one of two digits is that one.
_ROUND = 1e-6


def _sum_of_terms(step: Step) -> Tensor:
    return first_of(step.run(reduction=_SUM if step.values["reduction"] == _MEAN else "sum"))
