"""The ranks of a graph that is proved, all at once: parts, lengths of parts, collectives, results.

A proof must agree with these numbers, and a program that is not proved is refuted by them only.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from paritas.errors import UsageError
from paritas.placement.placement import Terms
from paritas.placement.recipes import OperatorCall, Recipe, split_values
from paritas.results.items import Once, Partial, Replicate, Role, Shard

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from paritas.partition.annotation import Annotation

# How the parts of a value lie in it, by their shapes: all of it, or along a dimension; None if they
# do not fit.
Layout = int | str | None
WHOLE: Layout = "whole"


class OnRanks(Protocol):
    """A value on one device and on each rank."""

    whole: Any
    parts: list[Any]


def parts_of(whole: Tensor, role: Role, ranks: int) -> list[Tensor] | None:
    """The part of each rank; None if it cannot be split so."""
    match role:
        case Shard(dim=dim, pieces=pieces) if (
            dim < whole.dim() and whole.shape[dim] % (ranks * pieces) == 0
        ):
            cut = [piece.chunk(ranks, dim) for piece in whole.chunk(pieces, dim)]
            return [torch.cat([piece[rank] for piece in cut], dim) for rank in range(ranks)]
        case Replicate():
            return [whole] * ranks
        case Once():
            return [whole if rank == 0 else torch.zeros_like(whole) for rank in range(ranks)]
        case Partial(reduction="sum"):
            terms = [whole * (rank + 2) for rank in range(ranks - 1)]
            return [*terms, whole - sum(terms)]
    return None


def assembled(parts: list[Tensor], role: Role) -> list[Tensor]:
    """What should each be the whole, if the parts are placed so."""
    match role:
        case Shard(dim=dim, pieces=pieces) if dim < parts[0].dim():
            cut = [part.chunk(pieces, dim) for part in parts]
            fits = all(len(one) == pieces for one in cut)
            order = [one[at] for at in range(pieces) for one in cut] if fits else parts
            return [torch.cat(order, dim)]
        case Partial(reduction=reduction):
            return [_reduced(parts, reduction)]
    return parts


def _reduced(parts: list[Tensor], reduction: str) -> Tensor:
    stacked = torch.stack(parts)
    if reduction == "max":
        return stacked.amax(0)
    if reduction == "min":
        return stacked.amin(0)
    return stacked.mean(0) if reduction == "avg" else stacked.sum(0)


def combined(kind: str, parts: list[Any], given: Any) -> list[Any]:
    """The parts after a collective; None if they do not fit together."""
    ranks = len(parts)
    try:
        if kind == "all_gather":
            return [torch.cat(parts, given)] * ranks
        if kind == "all_reduce":
            return [_reduced(parts, given)] * ranks
        total = parts[0] if kind == "keep_slice" else _reduced(parts, "sum")
        slices = list(total.chunk(ranks, given))
        return slices if len(slices) == ranks else [None] * ranks
    except (RuntimeError, TypeError, AttributeError, IndexError):
        return [None] * ranks


def layout_of(value: OnRanks) -> Layout:
    """How the parts lie in the whole."""
    if not isinstance(value.whole, torch.Tensor):
        return WHOLE
    shapes = {tuple(part.shape) if isinstance(part, torch.Tensor) else None for part in value.parts}
    if len(shapes) != 1 or shapes == {None}:
        return None
    shape = shapes.pop() or ()
    whole = tuple(value.whole.shape)
    if shape == whole:
        return WHOLE
    if len(shape) != len(whole):
        return None
    changed = [at for at, (own, all_) in enumerate(zip(shape, whole, strict=True)) if own != all_]
    return changed[0] if len(changed) == 1 else None


def numbers_by_layout(
    call: OperatorCall,
    annotation: Annotation | None,
    layouts: Mapping[int | str, set[Layout]],
    ranks: int,
) -> list[dict[Any, Any]]:
    """Place -> the value on each rank, for arguments that are lengths of what is split."""
    nothing: list[dict[Any, Any]] = [{} for _ in range(ranks)]
    if annotation is None or all(found == {WHOLE} for found in layouts.values()):
        return nothing
    for option in annotation.options(call):
        try:
            recipe = annotation.recipe(call, dataclasses.replace(option, num=ranks))
        except UsageError:  # a length that cannot be divided
            continue
        if recipe.numbers and _fits(recipe, layouts):
            return _local_numbers(call, recipe, ranks)
    return nothing


def _fits(recipe: Recipe, layouts: Mapping[int | str, set[Layout]]) -> bool:
    for place, found in layouts.items():
        role = recipe.placement(place)
        if found != {role.dim if isinstance(role, Shard) else WHOLE}:
            return False
    return True


def _local_numbers(call: OperatorCall, recipe: Recipe, ranks: int) -> list[dict[Any, Any]]:
    values: dict[Any, Any] = {**dict(enumerate(call.args)), **call.kwargs}
    places = {place for place, _ in recipe.numbers}
    each = split_values(values, recipe, ranks, Terms(0, lifted=True))
    return [{place: value for place, value in one.items() if place in places} for one in each]


def run_part(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a rank computes; None if it raises, for a wrong plan may not even run."""
    try:
        return function(*args, **kwargs)
    except (RuntimeError, TypeError, IndexError, ValueError, AttributeError):
        return None


def distance(whole: Any, parts: list[Any], role: Role) -> float:
    """How far the ranks' result is off, relative to the largest value."""
    if not isinstance(whole, torch.Tensor):
        return float("nan")
    if any(not isinstance(part, torch.Tensor) for part in parts):
        return float("inf")
    if len({part.shape for part in parts}) > 1:
        return float("inf")
    together = assembled(parts, role)
    if any(one.shape != whole.shape for one in together):
        return float("inf")
    exact = whole.double()
    largest = max(float(exact.abs().max()) if whole.numel() else 0.0, 1e-300)
    gaps = [(one.double() - exact).abs() / largest for one in together if one.numel()]
    return max((float(gap.max()) for gap in gaps), default=0.0)
