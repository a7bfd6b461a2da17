"""Sketches of what ranks hold: a large tensor is kept as random sums, which add up over shards."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING

import msgspec
import torch

from paritas.core.execution.observation import MOST_KEPT
from paritas.core.numerics.bits import is_inexact
from paritas.core.numerics.sketch import sketch
from paritas.core.placement.assembly import put
from paritas.core.placement.assembly import whole as all_of
from paritas.core.placement.plain_parts import ExactMatch, find_plain_part
from paritas.core.placement.rank_pieces import RankPiece, locate
from paritas.core.results.items import LocalPlacement, Shard
from paritas.sharding.plans.assembling import natural_chunk

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from paritas.core.placement.assembly import Where
    from paritas.sharding.plans.plan import ParallelProgram


@dataclasses.dataclass
class Abridger:
    """Replaces what a rank holds of a large tensor by its part of the sketch.

    Attributes:
        program: the whole model under its plan.
        wholes: parameter or buffer -> its initial value on one device.
        places: (parameter or buffer, rank) -> where its plain shard lies; None if that is unknown.
            What is missing is looked for by the values of the first piece.
    """

    program: ParallelProgram
    wholes: Mapping[str, Tensor]
    places: dict[tuple[str, int], Where | None] = dataclasses.field(default_factory=dict)

    def __call__(self, name: str, rank: int, piece: RankPiece) -> RankPiece:
        """The piece itself if it is small."""
        full_value = self.wholes.get(name)
        if full_value is None or full_value.numel() <= MOST_KEPT or not is_inexact(piece.local):
            return piece
        shape, placement = tuple(full_value.shape), piece.placement
        if placement is None and piece.whole_shape == shape:
            where = tuple(map(all_of, shape))
            return RankPiece(_sums_of_part(piece.local, where, shape))
        if placement is None:
            return self._part_by_hand(name, rank, piece, full_value)
        if placement.global_shape != shape or not placement.coordinate:
            return piece
        sums = _sums_of_part(piece.local, locate(rank, piece), shape)
        roles = zip(placement.placements, placement.roles, strict=True)
        # The sketches of shards are terms of the sketch of the whole.
        words = tuple(_TERM if isinstance(role, Shard) else word for word, role in roles)
        moved = msgspec.structs.replace(
            placement, placements=words, global_shape=tuple(sums.shape), global_offset=(0,)
        )
        return RankPiece(sums, moved)

    def _part_by_hand(
        self, name: str, rank: int, piece: RankPiece, full_value: Tensor
    ) -> RankPiece:
        """The sketch of a plain shard, whose place the initial values show."""
        if (name, rank) not in self.places:
            expected = functools.partial(natural_chunk, self.program, rank)
            plain_part = find_plain_part(full_value, piece.local, expected, ExactMatch())
            self.places[name, rank] = None if plain_part is None else plain_part.where
        where = self.places[name, rank]
        if where is None:
            return piece
        sums = _sums_of_part(piece.local, where, tuple(full_value.shape))
        # Ranks that hold the same part are at the same place of a mesh of parts.
        part = sum(segment.target for segments in where for segment in segments)
        term = LocalPlacement(
            mesh=(part + 1,),
            coordinate=(part,),
            placements=(_TERM,),
            global_shape=tuple(sums.shape),
            global_offset=(0,),
        )
        return RankPiece(sums, term)


_TERM = "partial(sum)"


def _sums_of_part(local: Tensor, where: Where, shape: tuple[int, ...]) -> Tensor:
    """A part's share of the sketch of the whole; NaN if it has values that are not finite.

    In float64: rounded to float32, the terms of a small sum would have larger errors than the sum.
    """
    local = local.double()
    if all(len(segments) == 1 for segments in where):
        offset = [segments[0].target for segments in where]
        sums = sketch(local, global_shape=shape, global_offset=offset)
    else:
        padded = torch.zeros(shape, dtype=local.dtype)
        put(padded, where, local)
        sums = sketch(padded)
    return sums if bool(torch.isfinite(local).all()) else torch.full_like(sums, torch.nan)
