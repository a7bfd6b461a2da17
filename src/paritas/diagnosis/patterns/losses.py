"""Losses with another divisor, of other targets, of another input, or another loss."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from paritas.diagnosis.patterns.variations import Variation
from paritas.results.findings import PatternKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from paritas.diagnosis.calls import Step

_F = torch.nn.functional
_MEAN = 1
_REDUCTIONS = {0: "none", 1: "mean", 2: "sum"}
# Losses of a difference, which are mistaken for each other.
_DISTANCES: dict[str, Callable[..., Tensor]] = {
    "mse_loss": _F.mse_loss,
    "l1_loss": _F.l1_loss,
    "smooth_l1_loss": _F.smooth_l1_loss,
    "huber_loss": _F.huber_loss,
}
_ALTERED: dict[str, Callable[[Tensor], Tensor]] = {
    "the sigmoid": torch.sigmoid,
    "the softmax": lambda x: x.softmax(min(1, x.dim() - 1)),
    "the log-softmax": lambda x: x.log_softmax(min(1, x.dim() - 1)),
    "the exponential": torch.exp,
}


def loss_variations(step: Step) -> Iterator[Variation]:
    """The mistakes that are known of losses."""
    name = step.name
    if name in ("softmax", "log_softmax"):
        yield from _input_variations()
    if name == "kl_div":
        yield from _divergence_variations(step)
    is_loss = name.endswith(("loss", "with_logits")) or name.startswith("nll_loss")
    if not is_loss or "backward" in name:
        return
    yield from _divisor_variations(step)
    yield from _target_variations(step)
    yield from _input_variations()
    for other, compute in _DISTANCES.items() if name in _DISTANCES else ():
        if other != name:
            change = partial(_other_distance, compute=compute)
            yield Variation(PatternKind.OTHER_FUNCTION, f"{other} instead of {name}", change)


def _input_variations() -> Iterator[Variation]:
    for words, alter in _ALTERED.items():
        said = f"{words} of the input is taken for the input"
        change = partial(_with_input, alter=alter)
        yield Variation(PatternKind.OTHER_FUNCTION, said, change)


def _divergence_variations(step: Step) -> Iterator[Variation]:
    """The divergence of the input from the target: `input` is a logarithm."""
    first = "input" if "input" in step.values else "self"
    said = "the divergence is that of the target from the input, the other way round"
    yield Variation(PatternKind.SWAPPED_OPERANDS, said, partial(_other_way, name=first))


def _other_way(step: Step, name: str) -> Any:
    """Both are exchanged with their logarithms where needed."""
    x, target = step.values[name], step.values["target"]
    if step.values["log_target"]:
        return step.run(**{name: target, "target": x})
    return step.run(**{name: target.log(), "target": x.exp()})


def _divisor_variations(step: Step) -> Iterator[Variation]:
    if step.values.get("reduction") != _MEAN:
        return
    first = next(one for one in step.values.values() if isinstance(one, torch.Tensor))
    target = step.values.get("target")
    counts = {"the batch": first.shape[0] if first.dim() else 1, "all elements": first.numel()}
    ignored = _ignored(step)
    kind = PatternKind.WRONG_REDUCTION
    if isinstance(target, torch.Tensor):
        if ignored is not None:
            kind = PatternKind.MASK
            said = "the targets to ignore count in the mean"
            change = partial(_divided_sum, count=target.numel())
            yield Variation(kind, said, change)
        counts["all targets"] = target.numel()
    for words, count in counts.items():
        if ignored is None or target is None or count != target.numel():
            said = f"the sum is divided by {count}, the size of {words}"
            change = partial(_divided_sum, count=count)
            yield Variation(PatternKind.WRONG_REDUCTION, said, change)


def _target_variations(step: Step) -> Iterator[Variation]:
    ignored = _ignored(step)
    if step.name.startswith("nll_loss"):
        said = "the target is the class with the largest score, whatever the target says"
        yield Variation(PatternKind.WRONG_INDEX, said, _with_best_class)
    if ignored is not None:
        said = "the targets to ignore count as class 0"
        yield Variation(PatternKind.MASK, said, _with_class_zero)


def _ignored(step: Step) -> Tensor | None:
    """Where targets are to be ignored; None if there are no such."""
    target, index = step.values.get("target"), step.values.get("ignore_index")
    if not isinstance(target, torch.Tensor) or not isinstance(index, int):
        return None
    mask = target == index
    return mask if bool(mask.any()) else None


def _with_best_class(step: Step) -> Any:
    scores, target, ignored = step.values["self"], step.values["target"], _ignored(step)
    best = scores.argmax(min(1, scores.dim() - 1))
    return step.run(target=best if ignored is None else torch.where(ignored, target, best))


def _with_class_zero(step: Step) -> Any:
    ignored = _ignored(step)
    if ignored is None:
        raise ValueError("no target is ignored")
    return step.run(target=step.values["target"].masked_fill(ignored, 0))


def _with_input(step: Step, alter: Callable[[Tensor], Tensor]) -> Any:
    return step.run(self=alter(step.values["self"]))


def _other_distance(step: Step, compute: Callable[..., Tensor]) -> Tensor:
    values = step.values
    return compute(values["self"], values["target"], reduction=_REDUCTIONS[values["reduction"]])


def _divided_sum(step: Step, count: int) -> Any:
    total = step.run(reduction=2)
    total = total if isinstance(total, torch.Tensor) else total[0]
    return step.with_first(total / count)
