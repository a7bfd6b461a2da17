"""How a tensor is placed on ranks: the position of each part, and what each rank receives."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from paritas.errors import UsageError
from paritas.numerics.bits import is_inexact
from paritas.placement.assembly import (
    REDUCTIONS,
    Assembly,
    Cell,
    Where,
    box,
    fills,
    length,
    named_ranks,
    rank_bounds,
    share,
    take,
    whole,
)
from paritas.results.items import Once, Partial, Replicate, Shard, read_role, role_word
from paritas.results.wording import enumerated

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from paritas.results.items import LocalPlacement, Role


# --- A tensor on a mesh of ranks ------------------------------------------------------------------

_MOST_LISTED = 4
_MOST_RANKS = 1 << 20
_DONE = {
    "sum": "summed",
    "avg": "averaged",
    "product": "multiplied",
    "max": "maximum",
    "min": "minimum",
}


class MeshAxis(NamedTuple):
    """One axis of a mesh, and the role of the tensor along it."""

    name: str
    size: int
    role: Role


class HeldPart(NamedTuple):
    """What a rank holds.

    Attributes:
        coordinate: position of the rank on each axis; None if it holds no part.
        where: position of the part in the whole.
    """

    rank: int
    coordinate: tuple[int, ...] | None
    where: Where = ()


@dataclasses.dataclass(frozen=True)
class Placement:
    """How a tensor is placed on a mesh of ranks.

    Attributes:
        axes: in the order in which they split the tensor, outermost first.
        shape: of the whole.
        numbering: names of the axes in the order in which ranks are numbered, the last one
            fastest; the order of `axes` if empty.
    """

    axes: tuple[MeshAxis, ...]
    shape: tuple[int, ...]
    numbering: tuple[str, ...] = ()

    @classmethod
    def parse(
        cls, words: Sequence[str], mesh: Sequence[tuple[str, int]], shape: Sequence[int]
    ) -> Placement:
        """Parse one word for each axis of a mesh: `shard(0)`, `replicate`, `partial(sum)`."""
        axes = []
        for word, (name, size) in zip(words, mesh, strict=True):
            role = read_role(word)
            if role is None:
                raise UsageError(f"unknown placement {word!r}")
            axes.append(MeshAxis(name, size, role))
        return cls(tuple(axes), tuple(shape))

    @classmethod
    def read(cls, rank: int, place: LocalPlacement, shape: Sequence[int]) -> Placement:
        """The placement that a rank recorded for its part, which has this shape.

        Raises:
            UsageError: the record contradicts itself or has an unknown word.
        """
        extents = {len(place.mesh), len(place.placements), len(place.coordinate or place.mesh)}
        names = len(place.mesh_names) in (0, len(place.mesh))
        pairs = zip(place.coordinate, place.mesh, strict=False)
        on_mesh = all(0 <= at < size for at, size in pairs)
        dimensions = len(place.global_shape) == len(place.global_offset) == len(shape)
        if len(extents) != 1 or not names or not on_mesh or (place.coordinate and not dimensions):
            raise UsageError(f"rank {rank} recorded an inconsistent placement: {place}")
        axes = place.mesh_names or [f"mesh {at}" for at in range(len(place.mesh))]
        mesh = list(zip(axes, place.mesh, strict=True))
        found = cls.parse(place.placements, mesh, place.global_shape)
        for word, axis in zip(place.placements, found.axes, strict=True):
            if isinstance(axis.role, Shard) and axis.role.dim >= len(shape):
                raise UsageError(
                    f"rank {rank}: {word} does not fit a tensor of {len(shape)} dimensions"
                )
        return found

    @property
    def words(self) -> tuple[str, ...]:
        """One word for each axis, as `parse` reads it."""
        return tuple(role_word(axis.role) for axis in self.axes)

    @property
    def reduction(self) -> str:
        """How partial values are reduced; `sum` if there are none.

        Raises:
            UsageError: the axes use different reductions, or an unknown one.
        """
        kinds = {axis.role.reduction for axis in self.axes if isinstance(axis.role, Partial)}
        if len(kinds) > 1 or kinds.difference(REDUCTIONS):
            raise UsageError(f"cannot reduce values placed as {', '.join(self.words)}")
        return next(iter(kinds), "sum")

    def where(self, coordinate: Sequence[int]) -> Where:
        """The part of the whole that the rank at a coordinate holds, without any halo."""
        found = [whole(extent) for extent in self.shape]
        for axis, at in zip(self.axes, coordinate, strict=True):
            if isinstance(axis.role, Shard):
                dim = axis.role.dim % len(self.shape)
                found[dim] = share(found[dim], axis.role, at, axis.size)
        return tuple(found)

    def locate(self, rank: int, place: LocalPlacement, shape: Sequence[int]) -> Where:
        """The position of a recorded part: from its placements, or else from its offset.

        Raises:
            UsageError: the part is outside of the whole.
        """
        where = self.where(place.coordinate)
        begins = [segments[0].target if length(segments) else None for segments in where]
        if tuple(map(length, where)) == tuple(shape) and all(
            begin in (None, offset)
            for begin, offset in zip(begins, place.global_offset, strict=True)
        ):
            return where
        # A tensor may be split in another way than torch splits it by default.
        extents = zip(place.global_offset, shape, place.global_shape, strict=True)
        if any(begin < 0 or begin + extent > full for begin, extent, full in extents):
            raise UsageError(
                f"rank {rank} holds a part of shape {tuple(shape)} at {place.global_offset}, which "
                f"is outside of {place.global_shape}"
            )
        return box(place.global_offset, shape)

    def assembly(self, held: Sequence[HeldPart]) -> Assembly:
        """Sort parts into cells, terms and copies, and check that nothing is missing.

        Raises:
            UsageError: parts are missing, overlap, leave gaps, or cannot be reduced.
        """
        reduction = self.reduction
        partial = [at for at, axis in enumerate(self.axes) if isinstance(axis.role, Partial)]
        found: dict[Where, defaultdict[tuple[int, ...], list[int]]] = {}
        for at, part in enumerate(held):
            if part.coordinate is None or not all(map(length, part.where)):
                continue
            term = tuple(part.coordinate[axis] for axis in partial)
            found.setdefault(part.where, defaultdict(list))[term].append(at)
        expected = math.prod(self.axes[at].size for at in partial)
        ranks = tuple(part.rank for part in held)
        if not fills(found, self.shape) or any(len(one) != expected for one in found.values()):
            self.refuse_missing(held)
            raise UsageError(
                f"the parts of {named_ranks(ranks)} overlap or leave gaps in a tensor of shape "
                f"{self.shape}"
            )
        cells = tuple(
            Cell(where, tuple(tuple(copies) for _, copies in sorted(terms.items())))
            for where, terms in found.items()
        )
        return Assembly(self._describe(ranks), self.shape, ranks, cells, reduction)

    def refuse_missing(self, held: Sequence[HeldPart]) -> None:
        """Raise a `UsageError` if parts are missing, with the rank numbers where they are known."""
        same = [axis for axis in self.axes if not isinstance(axis.role, Shard | Partial)]
        axes = [
            *(at for at, axis in enumerate(self.axes) if isinstance(axis.role, Shard)),
            *(at for at, axis in enumerate(self.axes) if isinstance(axis.role, Partial)),
        ]
        count = math.prod(self.axes[at].size for at in axes)
        if count > _MOST_RANKS:
            raise UsageError(f"cannot assemble {count} ranks; the limit is {_MOST_RANKS}")
        there = {part.rank: part.coordinate for part in held if part.coordinate is not None}
        present = {tuple(coordinate[at] for at in axes) for coordinate in there.values()}
        every = itertools.product(*(range(self.axes[at].size) for at in axes))
        missing = [one for one in every if one not in present]
        if not missing:
            return
        by_number = not any(axis.size > 1 for axis in same) and all(
            rank == self._number(coordinate) for rank, coordinate in there.items()
        )
        named = []
        for one in missing:
            known = dict(zip(axes, one, strict=True))
            place = ", ".join(f"{self.axes[at].name} {here}" for at, here in known.items())
            number = self._number([known.get(at, 0) for at in range(len(self.axes))])
            named.append(f"rank {number} ({place})" if by_number else place)
        shown = enumerated(named, _MOST_LISTED, between="; ")
        raise UsageError(
            f"{len(missing)} of {count} parts are missing: {shown}. "
            f"Recorded by {named_ranks(list(there))}"
        )

    def _number(self, coordinate: Sequence[int]) -> int:
        """The rank at a coordinate, if ranks are numbered in row-major order."""
        known = {axis.name: at for axis, at in zip(self.axes, coordinate, strict=True)}
        sizes = {axis.name: axis.size for axis in self.axes}
        rank = 0
        for name in self.numbering or sizes:
            rank = rank * sizes[name] + known[name]
        return rank

    def _describe(self, ranks: Sequence[int]) -> str:
        real = [axis for axis in self.axes if axis.size > 1]
        done = [
            f"dimension {axis.role.dim} over {axis.name}"
            for axis in real
            if isinstance(axis.role, Shard)
        ]
        summed = [axis.name for axis in real if isinstance(axis.role, Partial)]
        same = [axis.name for axis in real if not isinstance(axis.role, Shard | Partial)]
        if summed:
            done.append(f"{_DONE[self.reduction]} over {' and '.join(summed)}")
        if same:
            done.append(f"replicated over {' and '.join(same)}")
        if len(ranks) == 1 and not done:
            return ""
        return f"put together from {named_ranks(ranks)}: {', '.join(done) or 'replicated'}"


# --- What each rank receives ----------------------------------------------------------------------

# All parts are functions of the whole in one autograd graph, so autograd combines the gradients of
# the ranks into the gradient of the whole.


class Terms:
    """Draws the terms that make up a value, the same ones for every run of a check.

    In the lifted run the terms are random and of both signs: a rule that holds only for equal or
    positive terms must not pass. In the native run they are exact fractions, because a program
    would never have split the value and must not be charged for the rounding.

    Attributes:
        turn: number of the cotangent; each has its own weights.
        full: whether every rank gets the whole cotangent of a replicated result, as real ranks
            would; otherwise each rank gets a share of it.
    """

    def __init__(self, seed: int, *, lifted: bool) -> None:
        self.lifted = lifted
        self.turn = 0
        self.full = False
        self._seed = seed
        self._drawn = 0
        self._weights: dict[tuple[int, int], list[float]] = {}

    def generator(self) -> torch.Generator:
        """A new generator for each use, seeded by the order of uses."""
        self._drawn += 1
        return torch.Generator("cpu").manual_seed(self._seed * 1009 + self._drawn)

    def weights(self, ranks: int) -> list[float]:
        """One weight for each rank; they sum to 1."""
        key = (ranks, self.turn)
        if key not in self._weights:
            self._weights[key] = self._weigh(ranks)
        return self._weights[key]

    def _weigh(self, ranks: int) -> list[float]:
        if not self.lifted:
            halves = [0.5 ** (rank + 1) for rank in range(ranks)]
            halves[-1] = 1.0 - sum(halves[:-1])
            return halves
        generator = torch.Generator("cpu").manual_seed(self._seed + 31 * self.turn + ranks)
        drawn = (torch.rand(ranks, generator=generator, dtype=torch.float64) + 0.5).tolist()
        signed = [-value if rank % 2 else value for rank, value in enumerate(drawn)]
        return [*signed[1:], 1.0 - sum(signed[1:])]

    def coefficients(self, like: Tensor, ranks: int, total: float) -> list[Tensor]:
        """For each element, its share on each rank; the shares sum to `total`."""
        shape = (ranks, *like.shape)
        if self.lifted:
            shares = torch.randn(shape, generator=self.generator(), dtype=torch.float64)
            shares[-1] = total - shares[:-1].sum(dim=0)
        else:
            each = self.weights(ranks) if total == 1 else [total / ranks] * ranks
            order = torch.rand(shape, generator=self.generator()).argsort(dim=0)
            shares = torch.tensor(each, dtype=torch.float64)[order]
        real = like.dtype.to_real() if like.is_complex() else like.dtype
        return list(shares.to(like.device, real))

    def draw(self, tensor: Tensor, reduction: str, ranks: int) -> list[Tensor]:
        """One term for each rank; reduced, they give the tensor."""
        if reduction in {"sum", "avg"}:
            total = 1.0 if reduction == "sum" else float(ranks)
            return [tensor * share for share in self.coefficients(tensor, ranks, total)]
        owner = torch.randint(ranks, tensor.shape, generator=self.generator()).to(tensor.device)
        if reduction == "product":
            # One rank has the value, the others powers of two, which the owner divides out.
            signs = [-2.0 if rank % 2 else 0.5 for rank in range(ranks)]
            whole = torch.tensor(signs, dtype=torch.float64).prod().item()
            return [
                torch.where(owner == rank, tensor * (sign / whole), torch.full_like(tensor, sign))
                for rank, sign in enumerate(signs)
            ]
        away = torch.rand(tensor.shape, generator=self.generator(), dtype=torch.float64) + 0.5
        away = away.to(tensor.device, tensor.dtype) * (1 if reduction == "min" else -1)
        return [torch.where(owner == rank, tensor, tensor.detach() + away) for rank in range(ranks)]


def bounds(size: int, unit: int, ranks: int, what: str) -> list[tuple[int, int]]:
    """Start and end of each rank's part; an uneven split gives the first ranks one unit more.

    Raises:
        UsageError: there are fewer units than ranks, or the size is not a multiple of the unit.
    """
    if unit < 1 or size % unit:
        raise UsageError(f"the size of {what} must be a multiple of {unit}, got {size}")
    if size // unit < ranks:
        message = f"{what} has {size // unit} parts, too few for {ranks} ranks"
        raise UsageError(f"{message}; use fewer ranks or a larger shape")
    return [rank_bounds(size, rank, ranks, unit=unit) for rank in range(ranks)]


def dimension(tensor: Tensor, split: Shard, what: str) -> int:
    """The dimension of a split as a non-negative number, if the tensor has it."""
    if not -tensor.dim() <= split.dim < tensor.dim():
        raise UsageError(
            f"{what} has shape {list(tensor.shape)}, so it has no dimension {split.dim} to split"
        )
    return split.dim % tensor.dim()


def split_tensor(tensor: Tensor, role: Role, ranks: int, terms: Terms, what: str) -> list[Tensor]:
    """The part of a tensor that each rank of one axis receives.

    Args:
        what: name of the tensor in messages.
    """
    match role:
        case Shard(pieces=1, cut="balanced", order="natural", halo=(before, after)):
            dim = dimension(tensor, role, what)
            size = tensor.shape[dim]
            cuts = bounds(size, role.unit, ranks, f"dimension {dim} of {what}")
            reach = [(max(0, begin - before), min(size, end + after)) for begin, end in cuts]
            return [tensor.narrow(dim, begin, end - begin) for begin, end in reach]
        case Shard():
            place = Placement((MeshAxis("", ranks, role),), tuple(tensor.shape))
            return [take(tensor, place.where((rank,))) for rank in range(ranks)]
        case Replicate(summed=True):
            return [tensor] * ranks
        case Replicate():
            return list(_Claimed.apply(tensor, ranks, terms))  # type: ignore[no-untyped-call]
        case Once():
            return [tensor, *(torch.zeros_like(tensor) for _ in range(ranks - 1))]
        case Partial(reduction=reduction):
            if not is_inexact(tensor):
                raise UsageError(
                    f"{what} has dtype {tensor.dtype}, but only floating tensors can be partial; "
                    "replicate or shard it"
                )
            return terms.draw(tensor, reduction, ranks)


class _Claimed(torch.autograd.Function):
    """Gives each rank the whole tensor, and claims that each rank's gradient is the whole gradient.

    The weights sum to 1: equal gradients give that gradient, and any other gradient shows.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, ranks: int, terms: Terms) -> tuple[Tensor, ...]:
        ctx.terms = terms
        return tuple(tensor.clone() for _ in range(ranks))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        weights = ctx.terms.weights(len(gradients))
        total = torch.stack([g * w for g, w in zip(gradients, weights, strict=True)]).sum(dim=0)
        return total, None, None


@dataclasses.dataclass(frozen=True)
class RankCut:
    """How a tensor is cut over the ranks, to say which rank an element is on."""

    dim: int
    bounds: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, parts: list[Tensor], dim: int) -> RankCut:
        """The cut of results that are concatenated."""
        ends = list(itertools.accumulate(part.shape[dim] for part in parts))
        return cls(dim % parts[0].dim(), tuple(zip([0, *ends[:-1]], ends, strict=True)))

    def words(self, index: tuple[int, ...]) -> str:
        """The rank that holds an element, in words."""
        for rank, (begin, end) in enumerate(self.bounds):
            if begin <= index[self.dim] < end:
                return (
                    f"in the part of rank {rank} of {len(self.bounds)} "
                    f"({begin}:{end} along dimension {self.dim})"
                )
        return ""
