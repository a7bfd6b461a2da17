"""What a rank holds of a tensor: its role along an axis of ranks, and the words for it.

Only data: `placement` splits and assembles tensors.
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
        unit: parts are multiples of this many elements; for `(h d)` split by h, the size of d.
        halo: number of elements of its neighbours that a rank has before and after its own part.
        pieces: the dimension is first cut into this many pieces, and each of them is split.
        cut: how a size that is not a multiple of the number of ranks is divided.
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
    """Each rank has all of it; for a result, the ranks must agree.

    Attributes:
        summed: whether the gradients of the ranks sum up to the whole gradient; otherwise each of
            them must be the whole gradient already.
        own: whether each rank may write different values to it, unrelated to what the whole writes.
    """

    summed: bool = True
    own: bool = False


@dataclasses.dataclass(frozen=True)
class Once:
    """One rank has it, the others have zeros: a bias that must be added once."""


@dataclasses.dataclass(frozen=True)
class Partial:
    """Each rank has a term of the whole (or, for max and min, a bound)."""

    reduction: Reduction = "sum"


Role = Shard | Replicate | Once | Partial


# --- Their words ----------------------------------------------------------------------------------

REPLICATE = "replicate"
_SHARD = re.compile(r"shard\((\d{1,2})\)")
# How versions of torch write a shard of each of several pieces.
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
    """The role that a word stands for; None if unknown."""
    if word == REPLICATE:
        return Replicate()
    if found := _SHARD.fullmatch(word):
        return Shard(int(found[1]), cut="chunk")
    if found := _STRIDED.fullmatch(word):
        dim, pieces = int(found[1] or found[3]), int(found[2] or found[4])
        return Shard(dim, pieces=max(pieces, 1), cut="chunk")
    if found := _PARTIAL.fullmatch(word):
        # The reduction itself checks whether it exists.
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
        coordinate: position of this rank in the mesh; empty if it is outside.
        placements: per mesh dimension `shard(0)`, `replicate` or `partial(sum)`.
        global_shape: the shape of the whole tensor.
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
        """The role of each placement; None for an unknown one."""
        return tuple(map(read_role, self.placements))
