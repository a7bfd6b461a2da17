"""How the values that ranks hold relate to the reference's: whole, shard, term or wrong."""

from __future__ import annotations

import dataclasses
import enum
import functools
from typing import TYPE_CHECKING

import torch

from paritas.core.placement.assembly import take
from paritas.core.placement.assembly import whole as all_of
from paritas.core.placement.meshes import lines_along
from paritas.core.placement.plain_parts import NearMatch, find_plain_part, split_dims
from paritas.core.placement.rank_pieces import RankPiece, assemble, locate
from paritas.sharding.plans.assembling import natural_chunk, sample_rows

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from paritas.core.numerics.gates import Near
    from paritas.core.placement.assembly import Where
    from paritas.sharding.plans.plan import ParallelProgram


class Relation(enum.IntEnum):
    """From the best to the worst."""

    WHOLE = 0
    SHARD = 1
    PARTIAL = 2
    PERMUTED = 3
    UNKNOWN = 4
    WRONG = 5


@dataclasses.dataclass(frozen=True)
class Related:
    """What ranks hold, and what they should hold.

    Attributes:
        relation: the worst of all ranks.
        ranks: the wrong ranks; empty for all of them.
        expected: rank -> the whole value that its own belongs to.
        pieces: rank -> its value.
    """

    relation: Relation
    ranks: tuple[int, ...]
    expected: dict[int, Tensor]
    pieces: dict[int, RankPiece]

    @property
    def held(self) -> dict[int, Tensor]:
        """Rank -> its value."""
        return {rank: piece.local for rank, piece in self.pieces.items()}


def relate(
    program: ParallelProgram,
    samples: dict[int, tuple[int, int] | None],
    pieces: dict[int, RankPiece],
    reference: Tensor,
    near: Near,
    factors: tuple[float, ...] = (1.0,),
) -> Related:
    """Find the best relation of the pieces to the reference's value.

    Args:
        samples: rank -> its samples of the batch.
        factors: factors that values may have: gradients of a mean over a part of the batch are
            larger by the number of parts.
    """
    averages = program.data_ranks > 1 and not reference.dim()
    if averages and near(mean_of(pieces), reference):
        # A mean over samples: the mean of the ranks' means is the mean over all samples.
        return Related(Relation.WHOLE, (), dict.fromkeys(pieces, reference), pieces)
    groups: dict[int, dict[int, RankPiece]] = {}
    for rank, piece in pieces.items():
        groups.setdefault(program.data_rank(rank), {})[rank] = piece
    relation, ranks = Relation.WHOLE, []
    expected: dict[int, Tensor] = {}
    for group in groups.values():
        tried = [
            (*_relate_group(program, group, candidate_value, near), candidate_value)
            for candidate_value in _wholes(program, samples, group, reference, factors)
        ]
        # A value of the right shape that is wrong says more than one of another shape.
        best = min(tried, key=lambda attempt: (attempt[0] is Relation.UNKNOWN, attempt[0]))
        relation = max(relation, best[0])
        ranks += best[1]
        expected |= dict.fromkeys(group, best[2])
    wrong = tuple(sorted(ranks)) if len(ranks) < len(pieces) else ()
    return Related(relation, wrong, expected, pieces)


def alike(program: ParallelProgram, pieces: dict[int, RankPiece], near: Near) -> bool:
    """Whether ranks with the same samples hold the same value; False if a rank is alone."""
    groups: dict[int, list[RankPiece]] = {}
    for rank, piece in pieces.items():
        groups.setdefault(program.data_rank(rank), []).append(piece)
    return all(
        len(group) > 1 and all(near(piece.local, group[0].local) for piece in group[1:])
        for group in groups.values()
    )


def mean_of(pieces: dict[int, RankPiece]) -> Tensor:
    """The mean of the ranks' values."""
    return torch.stack([piece.local.double() for piece in pieces.values()]).mean(dim=0)


def rows_of_rank(
    program: ParallelProgram,
    samples: dict[int, tuple[int, int] | None],
    rank: int,
    reference: Tensor,
) -> tuple[int, int] | None:
    """Begin and end of the rows of a value that belong to the samples of a rank, if it has some."""
    if program.data_ranks == 1 or not reference.dim():
        return None
    batch = max((s[1] for s in samples.values() if s is not None), default=0)
    return sample_rows(samples[rank], batch, reference.shape[0])


def _wholes(
    program: ParallelProgram,
    samples: dict[int, tuple[int, int] | None],
    group: dict[int, RankPiece],
    reference: Tensor,
    factors: tuple[float, ...],
) -> list[Tensor]:
    """The values that the ranks of one part of the batch may hold together."""
    expected_values = [reference]
    rows = rows_of_rank(program, samples, next(iter(group)), reference)
    if rows is not None:
        expected_values.insert(0, reference[rows[0] : rows[1]])
    if not reference.is_floating_point():
        return expected_values
    return [
        value * factor if factor != 1 else value for value in expected_values for factor in factors
    ]


def _relate_group(
    program: ParallelProgram, pieces: dict[int, RankPiece], expected: Tensor, near: Near
) -> tuple[Relation, list[int]]:
    """How the pieces of ranks with the same samples relate to the whole, and the wrong ranks."""
    if any(piece.placement is not None for piece in pieces.values()):
        return _relate_placed(pieces, expected, near)
    relations = {
        rank: find_part(program, rank, piece.local, expected, near)[0]
        for rank, piece in pieces.items()
    }
    worst = max(relations.values())
    if worst is Relation.UNKNOWN or worst < Relation.PARTIAL:
        return worst, []
    if worst is Relation.WRONG and _sums_up(program, pieces, expected, near):
        return Relation.PARTIAL, []
    bad = [rank for rank, relation in relations.items() if relation is worst]
    return worst, bad


def _relate_placed(
    pieces: dict[int, RankPiece], expected: Tensor, near: Near
) -> tuple[Relation, list[int]]:
    shape = next(iter(pieces.values())).whole_shape
    if any(p.placement is None for p in pieces.values()) or shape != tuple(expected.shape):
        return Relation.UNKNOWN, []
    together = assemble(dict(pieces), expected.shape)
    if together.value is None:
        return Relation.UNKNOWN, []
    if near(together.value, expected) and together.disagreement is None:
        return Relation.WHOLE, []
    bad = [
        rank
        for rank, piece in pieces.items()
        if not near(piece.local, take(expected, locate(rank, piece)))
    ]
    if not bad:  # they differ by rounding
        return Relation.WHOLE, []
    return Relation.WRONG, bad


def find_part(
    program: ParallelProgram, rank: int, value: Tensor, whole_value: Tensor, near: Near
) -> tuple[Relation, Where | None]:
    """How a plain value relates to the whole, and which part of it it is by its values.

    A value that is wrong is taken for the part that is expected on this rank, if it has its shape.
    """
    if value.shape == whole_value.shape:
        where = tuple(map(all_of, whole_value.shape))
        return (Relation.WHOLE if near(value, whole_value) else Relation.WRONG), where
    if len(split_dims(whole_value.shape, value.shape) or ()) != 1:
        return Relation.UNKNOWN, None
    expected = functools.partial(natural_chunk, program, rank)
    part = find_plain_part(whole_value, value, expected, NearMatch(near))
    if part is None or not part.proven:
        return Relation.WRONG, None if part is None else part.where
    return (Relation.SHARD if part.chunk == part.natural else Relation.PERMUTED), part.where


# --- Terms of a sum -------------------------------------------------------------------------------


def group_terms(program: ParallelProgram, ranks: list[int]) -> Iterator[list[list[int]]]:
    """The ranks that may hold the terms of one sum: all together, or those along one axis."""
    yield [ranks]
    coordinates = {rank: program.coordinate(rank) for rank in ranks}
    for axis in range(len(program.mesh)):
        yield lines_along(coordinates, axis)


def add_terms(values: list[Tensor], near: Near) -> tuple[Tensor, float] | None:
    """The sum of terms, and the noise that it may have; None if these are no terms."""
    if len(values) < 2 or len({value.shape for value in values}) > 1:  # noqa: PLR2004
        return None
    terms = torch.stack([value.double() for value in values])
    return terms.sum(dim=0), near.reach * float(terms.abs().max()) if terms.numel() else 0.0


def _sums_up(
    program: ParallelProgram, pieces: dict[int, RankPiece], expected: Tensor, near: Near
) -> bool:
    """Whether the values of all ranks, or of those along one axis, add up to the whole."""
    return any(
        all(_adds(program, ranks, pieces, expected, near) for ranks in groups)
        for groups in group_terms(program, list(pieces))
    )


def _adds(
    program: ParallelProgram,
    ranks: list[int],
    pieces: dict[int, RankPiece],
    expected: Tensor,
    near: Near,
) -> bool:
    added = add_terms([pieces[rank].local for rank in ranks], near)
    if added is None:
        return False
    total, noise = added
    if total.shape == expected.shape:
        return near(total, expected.double(), noise)
    return find_part(program, ranks[0], total, expected.double(), near)[0] is Relation.SHARD
