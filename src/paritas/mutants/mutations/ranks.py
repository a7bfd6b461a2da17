"""Faults of parallel plans, as what they amount to on one device; two ranks are meant."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from paritas.mutants.mutations.arithmetic import addends, is_gradient, without_addend
from paritas.mutants.mutations.calls import Call, Fault, Place, number_in
from paritas.mutants.mutations.contractions import contraction, contraction_at, shortened, sums

_GRADIENT_SOURCES = frozenset(
    {"mm", "bmm", "mv", "dot", "sum", "convolution_backward", "embedding_dense_backward"}
)
_MEAN = 1  # of a loss' ways to reduce
# Where a loss holds how it reduces.
_LOSSES = {"nll_loss_forward": 3, "mse_loss": 2}


# --- 32, 33, 34, 37: contractions over ranks ------------------------------------------------------


def _splittable(place: Place) -> list[str]:
    found = contraction_at(place)
    return [""] if found is not None and found.length > 1 and not _is_weight(place) else []


def _is_weight(place: Place) -> bool:
    """Whether the result is a gradient: those are summed over batches, by unreduced_gradient."""
    return place.backward and is_gradient(place)


def _contracts(place: Place) -> list[str]:
    return [] if contraction_at(place) is None else [""]


def _twice(call: Call, _: str) -> Any:
    found = contraction(call.name, call.args, lambda position: call.args[position])
    if found is None:
        return torch.mul(call.right(), 2)
    # The bias of an addmm is added once, behind the sum over ranks.
    return call.given((found.left, torch.mul(call.args[found.left], 2)))


def _exchanged(call: Call, _: str) -> Any:
    found = contraction(call.name, call.args, lambda position: call.args[position])
    if found is None:
        return call.right()
    return call.given((found.right, swapped_halves(call.args[found.right], found.right_axis)))


def swapped_halves(value: Tensor, axis: int) -> Tensor:
    """The first and the second half of an axis in each other's place; a middle one stays."""
    size = value.shape[axis]
    half = size // 2
    first = value.narrow(axis, 0, half)
    middle = value.narrow(axis, half, size - 2 * half)
    return torch.cat([value.narrow(axis, size - half, half), middle, first], axis)


def _chunked(place: Place) -> list[str]:
    if contraction_at(place) is None or not place.parts():
        return []
    axes = {0, len(place.shape) - 1} if place.shape else set()
    return [f"axis {axis}" for axis in sorted(axes) if place.shape[axis] > 1]


# --- 36, 40: gradients ----------------------------------------------------------------------------


def _gradients(place: Place) -> list[str]:
    if not place.backward or place.name not in _GRADIENT_SOURCES or not is_gradient(place):
        return []
    if place.name == "convolution_backward":
        return [f"result {part}, scaled" for part in sorted(p for p in place.ends if p is not None)]
    found = contraction_at(place)
    halves = (found is not None and found.length > 1) or sums(place)
    return ["scaled", "one rank's"] if halves else ["scaled"]


def _unreduced(call: Call, detail: str) -> Any:
    if detail == "one rank's":
        return shortened(call, _half)
    return call.spoil(detail, lambda part: torch.div(part, 2))


def _half(length: int) -> int:
    return length // 2


def _accumulates(place: Place) -> list[str]:
    return addends(place) if place.backward and is_gradient(place) else []


# --- 38: random masks -----------------------------------------------------------------------------


def _draws(place: Place) -> list[str]:
    known = place.name in {"bernoulli", "native_dropout", "rand", "rand_like", "uniform"}
    return [""] if known and place.shape and place.shape[0] > 1 else []


def _same_on_both(call: Call, _: str) -> Any:
    if call.name != "native_dropout":
        return _repeated(call.right())
    _, mask = call.right()
    again = _repeated(mask)
    share = call.args[1]
    return torch.div(torch.mul(call.args[0], again), 1 - share), again


def _repeated(mask: Tensor) -> Tensor:
    half = mask.shape[0] // 2
    return torch.cat([mask[:half], mask[:half], mask[2 * half :]])


# --- 39: means ------------------------------------------------------------------------------------


def _means(place: Place) -> list[str]:
    source = place.given(0)
    if source is None or source.dim() == 0:
        return []
    if place.name in _LOSSES:
        reduces = place.argument(_LOSSES[place.name], _MEAN) == _MEAN
        return [""] if reduces and source.shape[0] > 2 else []  # noqa: PLR2004
    if place.name != "mean":
        return []
    axes = place.argument(1)
    axis = axes[0] if isinstance(axes, list | tuple) and axes else 0
    return [f"axis {axis}"] if source.shape[axis] > 2 else []  # noqa: PLR2004


def _uneven(call: Call, detail: str) -> Any:
    """The mean of two ranks' means, of which one has a third of the terms or fewer."""
    if call.name in _LOSSES:
        return _uneven_loss(call)
    axis = number_in(detail)
    source = call.args[0]
    parts = torch.tensor_split(source, [_smaller(source.shape[axis])], axis)
    first, second = (call.given((0, part)) for part in parts)
    return torch.div(torch.add(first, second), 2)


def _uneven_loss(call: Call) -> Any:
    cut = _smaller(call.args[0].shape[0])
    left, right = ((value[:cut], value[cut:]) for value in call.args[:2])
    halves = [call.given((0, a), (1, b)) for a, b in zip(left, right, strict=True)]
    if call.name == "mse_loss":
        return torch.div(torch.add(*halves), 2)
    _, total = call.right()
    return torch.div(torch.add(halves[0][0], halves[1][0]), 2), total


def _smaller(size: int) -> int:
    return max(1, math.floor(size / 3))


FAULTS: dict[str, Fault] = {
    "dropped_all_reduce": Fault(_splittable, lambda call, _: shortened(call, _half)),
    "double_all_reduce": Fault(_contracts, _twice),
    "wrong_shard": Fault(_splittable, _exchanged),
    "unreduced_gradient": Fault(_gradients, _unreduced),
    "permuted_chunks": Fault(
        _chunked,
        lambda call, detail: call.spoil("", lambda part: swapped_halves(part, number_in(detail))),
    ),
    "equal_masks": Fault(_draws, _same_on_both),
    "mean_of_means": Fault(_means, _uneven),
    "untied_gradient": Fault(_accumulates, without_addend),
}
