"""The placements of DTensor: which there are for a tensor, and what each rank then holds."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Literal

import torch

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Place", "describe_placement", "place_parts", "places_of"]

Kind = Literal["replicate", "shard", "partial"]
_REDUCTIONS = ("sum", "avg", "max", "min")


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a tensor is on a mesh of one dimension."""

    kind: Kind
    dim: int = 0
    reduction: str = ""

    @property
    def words(self) -> str:
        """As DTensor abbreviates it."""
        if self.kind == "shard":
            return f"S({self.dim})"
        return f"P({self.reduction})" if self.kind == "partial" else "R"

    def placement(self) -> Any:
        """DTensor's own object."""
        from torch.distributed.tensor import Partial, Replicate, Shard

        if self.kind == "shard":
            return Shard(self.dim)
        return Partial(self.reduction) if self.kind == "partial" else Replicate()


def places_of(tensor: Tensor, ranks: int) -> list[Place]:
    """All places that a tensor can have: a term of an index or of a mask means nothing."""
    places = [Place("replicate")]
    places += [Place("shard", dim) for dim, size in enumerate(tensor.shape) if size >= ranks]
    if tensor.is_floating_point():
        places += [Place("partial", reduction=reduction) for reduction in _REDUCTIONS]
    return places


def place_parts(tensor: Tensor, place: Place, ranks: int, seed: int) -> list[Tensor]:
    """What each rank has of a tensor."""
    if place.kind == "replicate":
        return [tensor.clone() for _ in range(ranks)]
    if place.kind == "shard":
        # As DTensor does: full parts first, then what is left, which may be nothing.
        parts = [part.clone() for part in tensor.chunk(ranks, place.dim)]
        nothing = tensor.narrow(place.dim, 0, 0).clone()
        return parts + [nothing] * (ranks - len(parts))
    generator = torch.Generator().manual_seed(seed)
    if place.reduction in {"sum", "avg"}:
        return _terms(tensor, place.reduction, ranks, generator)
    return _bounds(tensor, place.reduction, ranks, generator)


def _terms(tensor: Tensor, reduction: str, ranks: int, generator: torch.Generator) -> list[Tensor]:
    """Terms of both signs, none of them in proportion to the whole."""
    drawn = [
        torch.randn(tensor.shape, generator=generator).to(tensor.dtype) for _ in range(ranks - 1)
    ]
    rest = sum(drawn, torch.zeros_like(tensor))
    if reduction == "sum":
        return [*drawn, tensor - rest]
    return [*(tensor + part for part in drawn), tensor - rest]


def _bounds(tensor: Tensor, reduction: str, ranks: int, generator: torch.Generator) -> list[Tensor]:
    """For each element one rank has it, and the others have something beyond it."""
    holder = torch.randint(ranks, tensor.shape, generator=generator)
    beyond = 1 + 2 * torch.rand(tensor.shape, generator=generator).to(tensor.dtype)
    other = tensor - beyond if reduction == "max" else tensor + beyond
    return [torch.where(holder == rank, tensor, other) for rank in range(ranks)]


def describe_placement(leaf: Any) -> str:
    """What DTensor says that a result is; a plain value is said to be the same on all ranks."""
    placements = getattr(leaf, "placements", None)
    if placements is None:
        return "plain"
    words = []
    for placement in placements:
        if placement.is_shard():
            words.append(f"S({placement.dim})")
        elif placement.is_replicate():
            words.append("R")
        else:
            words.append(f"P({getattr(placement, 'reduce_op', placement)})")
    return " ".join(words)
