"""What ranks hold of one value, assembled: shards by their places, terms reduced, replicas.

Replicas are compared bit for bit. Ranks compute them from the same numbers or receive them from one
another; if they differ by a rounding, they will differ by more later. Unlike an `Assembly`, which
is planned for recorded parts and refuses what does not fit, this shows as much as there is: parts
may overlap, and a fault says what is missing.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

from paritas.core.errors import UsageError
from paritas.core.numerics.criterion import real_view
from paritas.core.numerics.pooling import populations
from paritas.core.placement.assembly import (
    ReplicaDisagreement,
    length,
    put,
    reduce_terms,
    same_bits,
    take,
)
from paritas.core.placement.assembly import whole as all_of
from paritas.core.placement.meshes import number_meshes
from paritas.core.placement.placement import Placement
from paritas.core.results.items import Partial

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from paritas.core.placement.assembly import Where
    from paritas.core.placement.plain_parts import PlainPart
    from paritas.core.results.items import LocalPlacement


@dataclasses.dataclass(frozen=True)
class RankPiece:
    """A value as one rank holds it.

    Attributes:
        local: a copy on the host of what the rank holds.
        placement: which part of a distributed tensor it is; None for a plain tensor, which says
            nothing about the other ranks.
        where: which part of the reference's value it is, if that is known in another way.
    """

    local: Tensor
    placement: LocalPlacement | None = None
    where: Where | None = None

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor; for a plain tensor that of `local`."""
        shape = self.local.shape if self.placement is None else self.placement.global_shape
        return tuple(shape)


@dataclasses.dataclass(frozen=True)
class Assembled:
    """The value that the ranks hold together.

    Attributes:
        value: the whole, each element from the first rank that holds it; None if there is none.
        fault: why there is no value.
        disagreement: of ranks that should hold the same.
        by_rank: rank -> the part it holds, before any reduction.
        without: ranks that hold nothing (no gradient arrived).
        where: rank -> which part of the whole it holds, where that is known.
    """

    value: Tensor | None = None
    fault: str = ""
    disagreement: ReplicaDisagreement | None = None
    by_rank: dict[int, Tensor] = dataclasses.field(default_factory=dict)
    without: tuple[int, ...] = ()
    where: dict[int, Where] = dataclasses.field(default_factory=dict)


def assemble(
    pieces: dict[int, RankPiece | None],
    shape: Sequence[int],
    slots: dict[int, PlainPart] | None = None,
) -> Assembled:
    """Assemble a value from the pieces of the ranks.

    Args:
        pieces: rank -> what it holds; None if nothing arrived.
        shape: of the whole.
        slots: rank -> where in the whole a plain piece lies; otherwise it should be the whole.
    """
    without = tuple(rank for rank, piece in pieces.items() if piece is None)
    present_pieces = {
        rank: piece for rank, piece in pieces.items() if piece is not None and _holds(piece)
    }
    by_rank = {rank: piece.local for rank, piece in present_pieces.items()}
    about = Assembled(by_rank=by_rank, without=without)
    if not present_pieces:
        return dataclasses.replace(about, fault="no rank holds it")
    places: dict[int, Where] = {}
    try:
        values = _reduce_pieces(present_pieces)
        for rank in sorted(present_pieces):
            slot = (slots or {}).get(rank)
            places[rank] = _locate_piece(
                rank, present_pieces[rank], values[rank], tuple(shape), slot
            )
    except UsageError as error:
        return dataclasses.replace(about, fault=str(error))
    return _write_pieces(dataclasses.replace(about, where=places), values, tuple(shape))


def _holds(piece: RankPiece) -> bool:
    """Whether the rank is on the mesh of the distributed tensor; others hold nothing of it."""
    return piece.placement is None or bool(piece.placement.coordinate)


def is_partial(piece: RankPiece) -> bool:
    """Whether it is a term of a value that is not reduced yet."""
    return piece.placement is not None and any(
        isinstance(role, Partial) for role in piece.placement.roles
    )


def _reduce_pieces(piece_by_rank: dict[int, RankPiece]) -> dict[int, Tensor]:
    """Rank -> what it holds, with partial values reduced over their axes."""
    values = {rank: piece.local for rank, piece in piece_by_rank.items()}
    terms = {
        rank: piece.placement
        for rank, piece in piece_by_rank.items()
        if piece.placement is not None and is_partial(piece)
    }
    groups: dict[tuple[object, ...], list[int]] = {}
    numbers = number_meshes(term.coordinate for term in terms.values())
    for (rank, term_placement), number in zip(terms.items(), numbers, strict=True):
        axes = zip(term_placement.coordinate, term_placement.roles, strict=True)
        others = tuple(at for at, role in axes if not isinstance(role, Partial))
        groups.setdefault((number, others), []).append(rank)
    for ranks in groups.values():
        roles = terms[ranks[0]].roles
        operator = next(role.reduction for role in roles if isinstance(role, Partial))
        value = reduce_terms(
            [piece_by_rank[rank].local for rank in ranks], operator, accumulate="wide"
        )
        values |= dict.fromkeys(ranks, value)
    return values


def locate(rank: int, piece: RankPiece) -> Where:
    """Which part of the whole a rank's piece of a distributed tensor is.

    Raises:
        UsageError: the placement is unknown.
    """
    local_placement, shape = piece.placement, piece.local.shape
    if local_placement is None:
        return tuple(map(all_of, shape))
    return Placement.read(rank, local_placement, shape).locate(rank, local_placement, shape)


def _locate_piece(
    rank: int, piece: RankPiece, value: Tensor, shape: tuple[int, ...], slots: PlainPart | None
) -> Where:
    """Where in the whole a piece lies.

    Raises:
        UsageError: that is unknown.
    """
    holds = f"rank {rank} holds a"
    if piece.where is not None and tuple(map(length, piece.where)) == tuple(value.shape):
        return piece.where
    if piece.placement is not None:
        if piece.whole_shape != shape:
            raise UsageError(
                f"{holds} shard of a tensor of shape {list(piece.whole_shape)}, not {list(shape)}"
            )
        return locate(rank, piece)
    if slots is not None and slots.fits(value, shape):
        return slots.where
    if tuple(value.shape) == shape:
        return tuple(map(all_of, shape))
    which = f"which part of {list(shape)} it is cannot be known"
    raise UsageError(f"{holds} tensor of shape {list(value.shape)}, and {which}")


def _write_pieces(about: Assembled, values: dict[int, Tensor], shape: tuple[int, ...]) -> Assembled:
    ranks = list(about.where)
    assembled = torch.zeros(shape, dtype=values[ranks[0]].dtype)
    owner = torch.full(shape, -1, dtype=torch.int32)
    disagreement: ReplicaDisagreement | None = None
    for rank in ranks:
        where = about.where[rank]
        owners, before = take(owner, where), take(assembled, where)
        value = values[rank].to(assembled.dtype)
        if disagreement is None and bool((owners >= 0).any()):
            disagreement = _find_disagreement(before, value, owners, rank)
        fresh = owners < 0
        put(assembled, where, torch.where(fresh, value, before))
        put(owner, where, torch.where(fresh, rank, owners))
    missing = int((owner < 0).sum())
    if missing:
        fault = f"{missing} of {owner.numel()} elements are on no rank"
        return dataclasses.replace(about, fault=fault, disagreement=disagreement)
    return dataclasses.replace(about, value=assembled, disagreement=disagreement)


def _find_disagreement(
    earlier_value: Tensor, value: Tensor, owner: Tensor, rank: int
) -> ReplicaDisagreement | None:
    """How a rank's replica differs from the same elements of earlier ranks."""
    differ = ~same_bits(earlier_value, value) & (owner >= 0)
    elements = int(differ.sum())
    if not elements:
        return None
    other = int(owner[differ][0])
    shared = owner == other
    differ &= shared
    wide = torch.complex128 if value.is_complex() else torch.float64
    gap, size = (value.to(wide) - earlier_value.to(wide)).abs(), earlier_value.to(wide).abs()
    typical = torch.as_tensor(populations(real_view(earlier_value)).scale(size)).expand_as(size)
    worst = int(torch.where(gap == 0, 0.0, gap / typical)[differ].argmax())
    counts = int(differ.sum()), int(shared.sum())
    largest, usual = float(gap[differ][worst]), float(typical[differ][worst])
    return ReplicaDisagreement(rank, other, *counts, max_abs=largest, typical=usual)
