"""Orders of the indices of one axis: those that have a name, and those found by matching rows."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import torch

from paritas.numerics.criterion import MAX_Z

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from paritas.diagnosis.cases import Case

__all__ = ["Order", "described", "matched_rows", "regular_orders"]

# Longer axes have more divisors and pairs than are worth trying.
_MOST_ROWS = 1024
_COLUMNS = 48
_NAMED = 4


@dataclasses.dataclass(frozen=True)
class Order:
    """A way to number an axis otherwise: index i takes its values from `source[i]`."""

    source: Tensor
    sentence: str
    cost: float


def regular_orders(size: int) -> Iterator[Order]:
    """Flipped; (h d) read as (d h); each pair of neighbours, or of halves, exchanged.

    One by one: of a long axis, all of them are fifty times as large as the axis.
    """
    if size < 2:  # noqa: PLR2004
        return
    index = torch.arange(size)
    yield Order(index.flip(0), "flipped", 2.0)
    inner = [one for one in range(2, size // 2 + 1) if size % one == 0]
    for width in inner:
        count = size // width
        text = f"interleaved otherwise: {count} groups of {width} read as {width} groups of {count}"
        source = index.reshape(count, width).T.flatten()
        yield Order(source, text, 2 + math.log2(1 + len(inner)))
    for width in [1, *inner]:
        if (size // width) % 2:
            continue
        source = index.reshape(-1, 2, width).flip(1).flatten()
        text = f"neighbouring blocks of {width} exchanged" if width > 1 else "neighbours exchanged"
        if width * 2 == size:
            text = "the two halves exchanged"
        yield Order(source, text, 3 + math.log2(1 + len(inner)))
    for width in inner:
        source = index.reshape(-1, width).flip(1).flatten()
        text = f"flipped within each block of {width}"
        yield Order(source, text, 3 + math.log2(1 + len(inner)))


def matched_rows(case: Case, axis: int) -> Tensor | None:
    """From which slice each slice along an axis was taken; None if some have no likeness.

    A few columns where something is wrong are enough to know a slice again.
    """
    size = case.shape[axis]
    if not 2 <= size <= _MOST_ROWS:  # noqa: PLR2004
        return None
    hit = case.wrong.movedim(axis, 0).reshape(size, -1)
    columns = hit.sum(dim=0).topk(min(_COLUMNS, hit.shape[1])).indices
    mine = case.given.movedim(axis, 0).reshape(size, -1)[:, columns]
    theirs = case.right.movedim(axis, 0).reshape(size, -1)[:, columns]
    allowed = MAX_Z * case.allowed.movedim(axis, 0).reshape(size, -1)[:, columns]
    if not bool(torch.isfinite(mine).all() and torch.isfinite(theirs).all()):
        return None
    source = torch.arange(size)
    rows = hit.any(dim=1).nonzero().flatten()
    apart = torch.cdist(mine[rows], theirs, p=2.0, compute_mode="donot_use_mm_for_euclid_dist")
    nearest = apart.argmin(dim=1)
    limit = torch.maximum(allowed[rows], allowed[nearest])
    near = (mine[rows] - theirs[nearest]).abs() <= limit
    if float(near.double().mean()) < 0.9:  # noqa: PLR2004
        return None
    source[rows] = nearest
    return source


def described(source: Tensor) -> str:
    """An order of slices in words."""
    moved = (source != torch.arange(len(source))).nonzero().flatten().tolist()
    taken = source.tolist()
    if len(moved) == 2 and taken[moved[0]] == moved[1] and taken[moved[1]] == moved[0]:  # noqa: PLR2004
        return f"slices {moved[0]} and {moved[1]} are exchanged"
    blocks = _exchanged_blocks(moved, taken)
    if blocks:
        return blocks
    listed = ", ".join(f"{taken[one]} at {one}" for one in moved[:_NAMED])
    more = f" and {len(moved) - _NAMED} more" if len(moved) > _NAMED else ""
    if len(set(taken)) < len(taken):
        return f"slices taken from the wrong place: slice {listed}{more}"
    return f"slices are permuted: slice {listed}{more}"


def _exchanged_blocks(moved: list[int], taken: list[int]) -> str:
    """Two runs of indices that have changed places, if that is all."""
    if len(moved) < 4 or len(moved) % 2:  # noqa: PLR2004
        return ""
    first, second = moved[: len(moved) // 2], moved[len(moved) // 2 :]
    runs = all(part == list(range(part[0], part[-1] + 1)) for part in (first, second))
    if runs and [taken[one] for one in moved] == second + first:
        left, right = f"{first[0]}:{first[-1] + 1}", f"{second[0]}:{second[-1] + 1}"
        return f"blocks {left} and {right} are exchanged"
    return ""
