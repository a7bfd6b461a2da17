"""How the results of the ranks become one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from paritas.partition.recipes import Concat, Once, Partial, Reduce, Same, Split

if TYPE_CHECKING:
    from torch import Tensor

    from paritas.partition.recipes import Combine, Placement
    from paritas.partition.running.placing import Terms

__all__ = ["RankError", "agreed_object", "combine", "combine_written", "words_of"]


class RankError(Exception):
    """The operator, or putting its results together, failed on ranks where the whole did not."""


def combine(parts: list[Tensor], rule: Combine, terms: Terms) -> Tensor:
    """Put the results of the ranks together; whatever torch raises at that passes through."""
    dtypes = {part.dtype for part in parts}
    if len(dtypes) > 1:
        raise TypeError(f"the ranks give {' and '.join(sorted(map(str, dtypes)))}")
    match rule:
        case Concat(dim=dim):
            return torch.cat(parts, dim=dim)
        case Reduce(reduction=reduction):
            return _reduce(parts, reduction)
        case Same():
            if not (parts[0].is_floating_point() or parts[0].is_complex()):
                return _agreed(tuple(parts), terms)
            return _Shared.apply(terms, *parts)  # type: ignore[no-any-return, no-untyped-call]


def combine_written(
    parts: list[Tensor], placement: Placement, ranks: int, wholes: Tensor, terms: Terms
) -> Tensor:
    """Put together an argument that each rank has written to, as it was taken apart."""
    match placement:
        case Split(dim=dim, halo=(0, 0)):
            return torch.cat(parts, dim=dim)
        case Split():
            return _without_halos(parts, placement, ranks, wholes)
        case Partial(reduction=reduction):
            return _reduce(parts, reduction)
        case Once():
            return parts[0]
        case _:
            return combine(parts, Same(), terms)


def _without_halos(parts: list[Tensor], split: Split, ranks: int, whole: Tensor) -> Tensor:
    from paritas.partition.running.placing import bounds

    dim = split.dim % whole.dim()
    cuts = bounds(whole.shape[dim], split.unit, ranks, f"dimension {dim}")
    own = [
        part.narrow(dim, min(begin, split.halo[0]), end - begin)
        for part, (begin, end) in zip(parts, cuts, strict=True)
    ]
    return torch.cat(own, dim=dim)


def _reduce(parts: list[Tensor], reduction: str) -> Tensor:
    """In one rounding: how a machine adds up ranks is not what is asked here."""
    stacked = torch.stack(parts)  # which refuses shapes that would broadcast
    dtype = stacked.dtype
    match reduction:
        case "sum" if dtype is torch.bool:
            return stacked.any(dim=0)
        case "sum":
            return stacked.sum(dim=0, dtype=dtype)
        case "avg":
            return stacked.mean(dim=0)
        case "max":
            return stacked.amax(dim=0)
        case "min":
            return stacked.amin(dim=0)
        case _:
            return stacked.prod(dim=0, dtype=dtype)


class _Shared(torch.autograd.Function):
    """A result that all ranks have: where they disagree, it is none of theirs.

    Of the cotangent each rank is given a share, so that the gradients of the ranks add up to the
    whole's if each of them is right.
    """

    @staticmethod
    def forward(ctx: Any, terms: Terms, *parts: Tensor) -> Tensor:
        ctx.terms, ctx.ranks = terms, len(parts)
        return _agreed(parts, terms)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.terms.full:
            return (None, *[gradient] * ctx.ranks)
        return (None, *[gradient * weight for weight in ctx.terms.weights(ctx.ranks)])


def _agreed(parts: tuple[Tensor, ...], terms: Terms) -> Tensor:
    first = parts[0].clone()
    shapes = {tuple(part.shape) for part in parts}
    if len(shapes) > 1:
        shown = " and ".join(str(list(shape)) for shape in sorted(shapes))
        raise ValueError(f"all ranks should have the same, but theirs are of shapes {shown}")
    if all(torch.equal(first, part) for part in parts[1:]):
        return first
    if not (first.is_floating_point() or first.is_complex()):
        for part in parts[1:]:
            other = ~parts[0] if first.dtype is torch.bool else 2 * parts[0] - part
            first = torch.where(part == parts[0], first, other)
        return first
    mixed = torch.zeros_like(first)
    same = torch.ones_like(first, dtype=torch.bool)
    for part, weight in zip(parts, terms.weights(len(parts)), strict=True):
        mixed = mixed + part * weight
        same &= (part == first) | (part.isnan() & first.isnan())
    return torch.where(same, first, mixed)


def agreed_object(path: str, values: list[Any]) -> Any:
    """A result that is no tensor: all ranks have to give the same.

    Raises:
        RankError: one gives another.
    """
    for rank, value in enumerate(values):
        if value != values[0]:
            found = f"{value!r:.60}, rank 0 gives {values[0]!r:.60}"
            raise RankError(f"{path}: rank {rank} of {len(values)} gives {found}")
    return values[0]


def words_of(error: Exception) -> str:
    """What was raised, in one line."""
    text = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {text:.200}"
