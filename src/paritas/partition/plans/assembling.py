"""Put together what ranks hold: parts by their places, partial values reduced, replicas compared.

A replica is compared bit for bit. Ranks that hold the same thing compute it from the same numbers
or receive it from one another; if they differ by a rounding, they will differ by more later.
"""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from paritas.partition.plans.layouts import Slots
    from paritas.partition.plans.traces import Piece

__all__ = ["Assembled", "Disagreement", "assemble", "is_partial", "reduced"]

_PARTIAL = re.compile(r"partial\((\w+)\)")


@dataclasses.dataclass(frozen=True)
class Disagreement:
    """Two ranks hold the same part of a value, and not the same numbers.

    Attributes:
        ranks: the first two that differ.
        elements: in how many elements they do.
        shared: how many they both hold.
        relative: largest difference, in multiples of the typical value.
    """

    ranks: tuple[int, int]
    elements: int
    shared: int
    relative: float

    @property
    def words(self) -> str:
        """For people."""
        first, second = self.ranks
        return (
            f"claimed replicated, but ranks {first} and {second} differ in {self.elements} of "
            f"{self.shared} elements, by {self.relative:.2g} times the typical value"
        )


@dataclasses.dataclass(frozen=True)
class Assembled:
    """What the ranks hold together.

    Attributes:
        value: the whole, as the first rank that holds each element has it; None if there is none.
        fault: why there is none.
        disagreement: of ranks that should hold the same.
        by_rank: rank -> the part it holds, partial values not yet reduced.
        without: ranks at which nothing arrived (a gradient).
    """

    value: Tensor | None = None
    fault: str = ""
    disagreement: Disagreement | None = None
    by_rank: dict[int, Tensor] = dataclasses.field(default_factory=dict)
    without: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class _Placed:
    rank: int
    value: Tensor
    where: tuple[slice | Tensor, ...]


def assemble(
    pieces: dict[int, Piece | None],
    shape: Sequence[int],
    slots: dict[int, Slots] | None = None,
) -> Assembled:
    """The whole of a value of which each rank has a piece.

    Args:
        pieces: rank -> what it holds; None where nothing arrived. Ranks left out hold no part.
        shape: of the whole.
        slots: rank -> where in the whole a plain piece lies; otherwise it is claimed to be all.
    """
    without = tuple(rank for rank, piece in pieces.items() if piece is None)
    held = {rank: piece for rank, piece in pieces.items() if piece is not None}
    by_rank = {rank: piece.local for rank, piece in held.items()}
    about = Assembled(by_rank=by_rank, without=without)
    if not held:
        return dataclasses.replace(about, fault="no rank holds it")
    placed: list[_Placed] = []
    for rank, value, piece in reduced(held):
        where = _place(piece, value, tuple(shape), (slots or {}).get(rank))
        if isinstance(where, str):
            return dataclasses.replace(about, fault=f"rank {rank} holds {where}")
        placed.append(_Placed(rank, value, where))
    return _written(about, placed, tuple(shape))


def is_partial(piece: Piece) -> bool:
    """Whether it is one term of a value that has yet to be reduced."""
    return any(_PARTIAL.fullmatch(placement) for placement in piece.placements or ())


def reduced(held: dict[int, Piece]) -> list[tuple[int, Tensor, Piece]]:
    """Rank, value and piece of each, partial ones reduced over the axes on which they are."""
    groups: dict[tuple[object, ...], list[int]] = {}
    seen: dict[tuple[int, ...], int] = {}
    found: list[tuple[int, Tensor, Piece]] = []
    for rank, piece in held.items():
        if not is_partial(piece):
            found.append((rank, piece.local, piece))
            continue
        # A mesh that is part of a larger one comes several times: the n-th rank at a coordinate
        # belongs to the n-th of them.
        turn = seen.get(piece.coordinate, 0)
        seen[piece.coordinate] = turn + 1
        kept = tuple(
            place
            for place, placement in zip(piece.coordinate, piece.placements or (), strict=True)
            if not _PARTIAL.fullmatch(placement)
        )
        groups.setdefault((turn, kept), []).append(rank)
    for ranks in groups.values():
        first = held[ranks[0]]
        operator = next(
            match[1] for p in first.placements or () if (match := _PARTIAL.fullmatch(p)) is not None
        )
        value = _reduce([held[rank].local for rank in ranks], operator)
        found += [(rank, value, held[rank]) for rank in ranks]
    return sorted(found, key=lambda item: item[0])


def _reduce(values: list[Tensor], operator: str) -> Tensor:
    dtype = values[0].dtype
    wide = torch.stack(values)
    if wide.is_floating_point() and dtype is not torch.float64:
        wide = wide.double()
    if operator in {"max", "min"}:
        return (wide.amax(dim=0) if operator == "max" else wide.amin(dim=0)).to(dtype)
    if operator == "product":
        return wide.prod(dim=0).to(dtype)
    total = wide.sum(dim=0)
    return (total / len(values) if operator == "avg" else total).to(dtype)


def _place(
    piece: Piece, value: Tensor, shape: tuple[int, ...], slots: Slots | None
) -> tuple[slice | Tensor, ...] | str:
    """Where in the whole a piece lies, or in words what it is if that cannot be said."""
    if piece.placements is not None:
        if tuple(piece.global_shape) != shape:
            return f"a part of shape {list(piece.global_shape)}, not of {list(shape)}"
        offsets = piece.global_offset
        return tuple(slice(o, o + n) for o, n in zip(offsets, value.shape, strict=True))
    if slots is not None and slots.fits(value, shape):
        return slots.where
    if tuple(value.shape) == shape:
        return tuple(slice(0, n) for n in shape)
    return f"a tensor of shape {list(value.shape)}: nothing says which part of {list(shape)} it is"


def _written(about: Assembled, placed: list[_Placed], shape: tuple[int, ...]) -> Assembled:
    whole = torch.zeros(shape, dtype=placed[0].value.dtype)
    owner = torch.full(shape, -1, dtype=torch.int32)
    disagreement: Disagreement | None = None
    for one in placed:
        index = indexed(one.where)
        known = owner[index]
        value = one.value.to(whole.dtype)
        if disagreement is None and bool((known >= 0).any()):
            disagreement = _differing(whole[index], value, known, one.rank)
        fresh = known < 0
        whole[index] = torch.where(fresh, value, whole[index])
        owner[index] = torch.where(fresh, one.rank, known)
    missing = int((owner < 0).sum())
    if missing:
        fault = f"{missing} of {owner.numel()} elements are on no rank"
        return dataclasses.replace(about, fault=fault, disagreement=disagreement)
    return dataclasses.replace(about, value=whole, disagreement=disagreement)


def indexed(where: tuple[slice | Tensor, ...]) -> tuple[slice | Tensor, ...]:
    """An index of a tensor: slices as they are, chosen positions along several dims as a block."""
    if all(isinstance(one, slice) for one in where):
        return where
    full: list[slice | Tensor] = []
    for dim, one in enumerate(where):
        positions = torch.arange(one.start, one.stop) if isinstance(one, slice) else one
        view = [1] * len(where)
        view[dim] = -1
        full.append(positions.view(view))
    return tuple(full)


def _differing(known: Tensor, value: Tensor, owner: Tensor, rank: int) -> Disagreement | None:
    """How a rank's replica differs from what is known of the same elements."""
    same = known == value
    if value.is_floating_point() or value.is_complex():
        same |= known.isnan() & value.isnan()
    differ = ~same & (owner >= 0)
    elements = int(differ.sum())
    if not elements:
        return None
    other = int(owner[differ][0])
    shared = owner == other
    differ &= shared
    gap = (value.double() - known.double()).abs()[differ] if not value.is_complex() else None
    typical = float(known.abs().double().square().mean().sqrt())
    largest = float(gap.max()) if gap is not None else float((value - known).abs()[differ].max())
    relative = largest / typical if typical else float("inf")
    return Disagreement((other, rank), int(differ.sum()), int(shared.sum()), relative)
