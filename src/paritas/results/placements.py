"""What a rank holds of a tensor: its role along an axis of ranks, and the words for it.

Data alone: `placement` splits a tensor by it and puts the parts together again.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Literal, cast

import msgspec

# --- Roles ----------------------------------------------------------------------------------------

Reduction = Literal["sum", "avg", "max", "min", "product"]
# What 4 elements become over 3 ranks: 2, 1 and 1, or as `torch.chunk` and DTensor do, 2, 2 and 0.
Cut = Literal["balanced", "chunk"]
Order = Literal["natural", "zigzag"]


@dataclasses.dataclass(frozen=True)
class Shard:
    """Each rank has a part along a dimension, in the order of the ranks.

    Attributes:
        unit: parts are multiples of so many elements; of `(h d)`, split by h, as many as d has.
        halo: so many elements of its neighbours a rank has before and after its own part.
        pieces: the dimension is cut into so many first, and each of these is split.
        cut: what is done with a size that the ranks do not divide.
        order: in zigzag order, rank r of n holds the chunks r and 2n-1-r of 2n.
    """

    dim: int
    unit: int = 1
    halo: tuple[int, int] = (0, 0)
    pieces: int = dataclasses.field(default=1, repr=False)
    cut: Cut = dataclasses.field(default="balanced", repr=False)
    order: Order = dataclasses.field(default="natural", repr=False)


@dataclasses.dataclass(frozen=True)
class Replicate:
    """Each rank has all of it: of a result, they have to agree.

    Attributes:
        summed: whether the gradients of the ranks are terms of the whole's; otherwise each of them
            is claimed to be the whole's already.
        own: whether what the operator writes to it is each rank's own, and nobody claims that it
            is what the whole writes.
    """

    summed: bool = True
    own: bool = False


@dataclasses.dataclass(frozen=True)
class Once:
    """One rank has it, the others have zeros in its place: a bias that must be added once."""


@dataclasses.dataclass(frozen=True)
class Partial:
    """Each rank has a term (or, of max and min, a bound) of what it is all together."""

    reduction: Reduction = "sum"


Role = Shard | Replicate | Once | Partial


# --- Their words ----------------------------------------------------------------------------------

REPLICATE = "replicate"
_SHARD = re.compile(r"shard\((\d{1,2})\)")
# As versions of torch write a part of each of several pieces.
_STRIDED = re.compile(r"_S\((\d{1,2}), (\d{1,6})\)|_StridedShard\(dim=(\d{1,2}), sf=(\d{1,6})\)")
_PARTIAL = re.compile(r"partial\((\w+)\)")


def role_word(role: Role) -> str:
    """How a role of a distributed tensor is recorded: `shard(0)`, `replicate`, `partial(sum)`."""
    match role:
        case Shard(dim=dim, pieces=1):
            return f"shard({dim})"
        case Shard(dim=dim, pieces=pieces):
            return f"_S({dim}, {pieces})"
        case Partial(reduction=reduction):
            return f"partial({reduction})"
        case _:
            return REPLICATE


def read_role(word: str) -> Role | None:
    """The role that a word says; None for one that is not known."""
    if word == REPLICATE:
        return Replicate()
    if found := _SHARD.fullmatch(word):
        return Shard(int(found[1]), cut="chunk")
    if found := _STRIDED.fullmatch(word):
        dim, pieces = int(found[1] or found[3]), int(found[2] or found[4])
        return Shard(dim, pieces=max(pieces, 1), cut="chunk")
    if found := _PARTIAL.fullmatch(word):
        # Whoever reduces asks whether there is such a reduction.
        return Partial(cast("Reduction", found[1]))
    return None


# --- What one rank holds --------------------------------------------------------------------------


class LocalPlacement(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False
):
    """How a local tensor is a part of a distributed one.

    Attributes:
        mesh: extent of the device mesh along each of its dimensions.
        mesh_names: the names of those dimensions, or empty.
        coordinate: where on the mesh this rank is; empty for one outside of it.
        placements: per mesh dimension `shard(0)`, `replicate` or `partial(sum)`.
        global_shape: the shape of the whole.
        global_offset: where in the whole the local part begins.
    """

    mesh: tuple[int, ...]
    coordinate: tuple[int, ...]
    placements: tuple[str, ...]
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    mesh_names: tuple[str, ...] = ()

    @property
    def roles(self) -> tuple[Role | None, ...]:
        """What its words say; None for one that is not known."""
        return tuple(map(read_role, self.placements))
