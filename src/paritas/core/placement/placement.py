"""How a tensor is placed on ranks, and how an operator is split over them: recipes.

Of a tensor: the position of each part, and what each rank receives. Annotations, the library,
discovery and users all produce recipes. A recipe says what each rank receives of every argument,
and how the ranks' results are joined. `partition` checks whether it is right.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import math
from collections import defaultdict
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from paritas.core.errors import UsageError
from paritas.core.numerics.bits import is_inexact
from paritas.core.operators.calls import OperatorCall, Place
from paritas.core.placement.assembly import (
    REDUCTIONS,
    Assembly,
    Cell,
    Where,
    box,
    fills,
    lay_out,
    length,
    named_ranks,
    rank_bounds,
    share,
    take,
    whole,
)
from paritas.core.placement.meshes import rank_at
from paritas.core.results.items import Once, Partial, Replicate, Shard, read_role, role_word
from paritas.core.results.wording import list_first
from paritas.core.torch_private.operators import map_tensors, tensors_in

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from paritas.core.placement.assembly import Segment
    from paritas.core.results.items import LocalPlacement, Role


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


class RankPart(NamedTuple):
    """What a rank recorded of a tensor, without its values."""

    rank: int
    shape: tuple[int, ...]
    coordinates: Mapping[str, int]
    placement: LocalPlacement | None = None


def plan_by_placement(parts: Sequence[RankPart]) -> Assembly:
    """Plan by the placements that the ranks of a distributed tensor recorded."""
    placements: list[Placement] = []
    held_parts: list[HeldPart] = []
    for rank, shape, _, local_placement in parts:
        if local_placement is None:
            raise UsageError(f"rank {rank} did not record its placement")
        placements.append(Placement.read(rank, local_placement, shape))
        where = (
            placements[-1].locate(rank, local_placement, shape)
            if local_placement.coordinate
            else ()
        )
        held_parts.append(HeldPart(rank, local_placement.coordinate or None, where))
    return dataclasses.replace(placements[0].assembly(held_parts), placed=True)


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
    def read(cls, rank: int, local_placement: LocalPlacement, shape: Sequence[int]) -> Placement:
        """The placement that a rank recorded for its part, which has this shape.

        Raises:
            UsageError: the record contradicts itself or has an unknown word.
        """
        extents = {
            len(local_placement.mesh),
            len(local_placement.placements),
            len(local_placement.coordinate or local_placement.mesh),
        }
        names = len(local_placement.mesh_names) in (0, len(local_placement.mesh))
        pairs = zip(local_placement.coordinate, local_placement.mesh, strict=False)
        on_mesh = all(0 <= at < size for at, size in pairs)
        dimensions = (
            len(local_placement.global_shape) == len(local_placement.global_offset) == len(shape)
        )
        if (
            len(extents) != 1
            or not names
            or not on_mesh
            or (local_placement.coordinate and not dimensions)
        ):
            raise UsageError(f"rank {rank} recorded an inconsistent placement: {local_placement}")
        axes = local_placement.mesh_names or [
            f"mesh {at}" for at in range(len(local_placement.mesh))
        ]
        mesh = list(zip(axes, local_placement.mesh, strict=True))
        parsed = cls.parse(local_placement.placements, mesh, local_placement.global_shape)
        for word, axis in zip(local_placement.placements, parsed.axes, strict=True):
            if isinstance(axis.role, Shard) and axis.role.dim >= len(shape):
                raise UsageError(
                    f"rank {rank}: {word} does not fit a tensor of {len(shape)} dimensions"
                )
        return parsed

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
        dim_segments = [whole(extent) for extent in self.shape]
        for axis, at in zip(self.axes, coordinate, strict=True):
            if isinstance(axis.role, Shard):
                dim = axis.role.dim % len(self.shape)
                dim_segments[dim] = share(dim_segments[dim], axis.role, at, axis.size)
        return tuple(dim_segments)

    def locate(self, rank: int, local_placement: LocalPlacement, shape: Sequence[int]) -> Where:
        """The position of a recorded part: from its placements, or else from its offset.

        Raises:
            UsageError: the part is outside of the whole.
        """
        where = self.where(local_placement.coordinate)
        begins = [segments[0].target if length(segments) else None for segments in where]
        if tuple(map(length, where)) == tuple(shape) and all(
            begin in (None, offset)
            for begin, offset in zip(begins, local_placement.global_offset, strict=True)
        ):
            return where
        # A tensor may be split in another way than torch splits it by default.
        extents = zip(
            local_placement.global_offset, shape, local_placement.global_shape, strict=True
        )
        if any(begin < 0 or begin + extent > full for begin, extent, full in extents):
            raise UsageError(
                f"rank {rank} holds a part of shape {tuple(shape)} at "
                f"{local_placement.global_offset}, which "
                f"is outside of {local_placement.global_shape}"
            )
        return box(local_placement.global_offset, shape)

    def assembly(self, held_parts: Sequence[HeldPart]) -> Assembly:
        """Sort parts into cells, terms and copies, and check that nothing is missing.

        Raises:
            UsageError: parts are missing, overlap, leave gaps, or cannot be reduced.
        """
        reduction = self.reduction
        partial = [at for at, axis in enumerate(self.axes) if isinstance(axis.role, Partial)]
        terms_by_where: dict[Where, defaultdict[tuple[int, ...], list[int]]] = {}
        for at, part in enumerate(held_parts):
            if part.coordinate is None or not all(map(length, part.where)):
                continue
            term = tuple(part.coordinate[axis] for axis in partial)
            terms_by_where.setdefault(part.where, defaultdict(list))[term].append(at)
        expected = math.prod(self.axes[at].size for at in partial)
        ranks = tuple(part.rank for part in held_parts)
        if not fills(terms_by_where, self.shape) or any(
            len(part_terms) != expected for part_terms in terms_by_where.values()
        ):
            self.refuse_missing(held_parts)
            raise UsageError(
                f"the parts of {named_ranks(ranks)} overlap or leave gaps in a tensor of shape "
                f"{self.shape}"
            )
        cells = tuple(
            Cell(where, tuple(tuple(copies) for _, copies in sorted(terms.items())))
            for where, terms in terms_by_where.items()
        )
        return Assembly(self._describe(ranks), self.shape, ranks, cells, reduction)

    def lay_out(
        self, held_parts: Sequence[HeldPart], shapes: Sequence[tuple[int, ...]]
    ) -> tuple[list[Where], tuple[int, ...]]:
        """Where parts of any lengths lie that ranks hold, and the shape of the whole."""
        places: list[list[tuple[Segment, ...]]] = [[] for _ in held_parts]
        whole_shape: list[int] = []
        for dim in range(len(shapes[0])):
            roles = {
                at: axis.role
                for at, axis in enumerate(self.axes)
                if isinstance(axis.role, Shard) and axis.role.dim == dim
            }
            keys = [
                None if part.coordinate is None else tuple(part.coordinate[at] for at in roles)
                for part in held_parts
            ]
            extents: dict[tuple[int, ...], int] = {}
            for part, shape, key in zip(held_parts, shapes, keys, strict=True):
                if key is not None and extents.setdefault(key, shape[dim]) != shape[dim]:
                    raise UsageError(
                        f"rank {part.rank} has length {shape[dim]} in dimension {dim}, but another "
                        f"rank with the same part has {extents[key]}"
                    )
            segments, extent = lay_out(extents, [role.order for role in roles.values()])
            whole_shape.append(extent)
            for where, key in zip(places, keys, strict=True):
                if key is not None:
                    where.append(segments[key])
        return [tuple(where) for where in places], tuple(whole_shape)

    def refuse_missing(self, held_parts: Sequence[HeldPart]) -> None:
        """Raise a `UsageError` if parts are missing, with the rank numbers where they are known."""
        same = [axis for axis in self.axes if not isinstance(axis.role, Shard | Partial)]
        axes = [
            *(at for at, axis in enumerate(self.axes) if isinstance(axis.role, Shard)),
            *(at for at, axis in enumerate(self.axes) if isinstance(axis.role, Partial)),
        ]
        count = math.prod(self.axes[at].size for at in axes)
        if count > _MOST_RANKS:
            raise UsageError(f"cannot assemble {count} ranks; the limit is {_MOST_RANKS}")
        there = {part.rank: part.coordinate for part in held_parts if part.coordinate is not None}
        present = {tuple(coordinate[at] for at in axes) for coordinate in there.values()}
        every = itertools.product(*(range(self.axes[at].size) for at in axes))
        missing = [part_key for part_key in every if part_key not in present]
        if not missing:
            return
        by_number = not any(axis.size > 1 for axis in same) and all(
            rank == self._number(coordinate) for rank, coordinate in there.items()
        )
        named = []
        for missing_key in missing:
            coordinate_by_axis = dict(zip(axes, missing_key, strict=True))
            coordinate_words = ", ".join(
                f"{self.axes[at].name} {here}" for at, here in coordinate_by_axis.items()
            )
            number = self._number([coordinate_by_axis.get(at, 0) for at in range(len(self.axes))])
            named.append(f"rank {number} ({coordinate_words})" if by_number else coordinate_words)
        shown = list_first(named, _MOST_LISTED, between="; ")
        raise UsageError(
            f"{len(missing)} of {count} parts are missing: {shown}. "
            f"Recorded by {named_ranks(list(there))}"
        )

    def _number(self, coordinate: Sequence[int]) -> int:
        """The rank at a coordinate, if ranks are numbered in row-major order."""
        positions = {axis.name: at for axis, at in zip(self.axes, coordinate, strict=True)}
        sizes = {axis.name: axis.size for axis in self.axes}
        order = self.numbering or tuple(sizes)
        return rank_at([positions[name] for name in order], [sizes[name] for name in order])

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
            signs_product = torch.tensor(signs, dtype=torch.float64).prod().item()
            return [
                torch.where(
                    owner == rank, tensor * (sign / signs_product), torch.full_like(tensor, sign)
                )
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
            placement = Placement((MeshAxis("", ranks, role),), tuple(tensor.shape))
            return [take(tensor, placement.where((rank,))) for rank in range(ranks)]
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


# --- Recipes: how an operator is split, and how the results of the ranks make the whole -----------

# --- Numbers that follow a split ------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Divided:
    """A number that is divided by the number of ranks, such as `heads` or a size.

    Attributes:
        item: index of the number in a tuple or list; None for a plain number.
    """

    item: int | None = None


@dataclasses.dataclass(frozen=True)
class Range:
    """The start or end of a rank's part of an argument, as in vocabulary-sharded embeddings.

    Attributes:
        of: the argument that is split.
    """

    of: Place
    end: Literal["begin", "end"]


@dataclasses.dataclass(frozen=True)
class Group:
    """The process group of the ranks, for an operator that communicates.

    Attributes:
        joined: whether the ranks get the group; otherwise they get None, as for a split that
            needs no communication.
    """

    joined: bool = True


KeywordRule = Divided | Range | Group


# --- Recipes --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Recipe:
    """One way to split an operator.

    Attributes:
        inputs: role of each argument; arguments not listed are replicated.
        outputs: role of each result tensor: sharded, partial or replicated.
        numbers: arguments other than tensors that change with the split.
        words: description: the annotation and the identifier that is split.
        identifier: what the operator is split by, as the rule names it.
    """

    inputs: tuple[tuple[Place, Role], ...]
    outputs: tuple[Role, ...]
    numbers: tuple[tuple[Place, KeywordRule], ...] = ()
    words: str = ""
    identifier: str = ""

    @property
    def split_words(self) -> str:
        """`split by c`, or the description if there is no identifier."""
        return f"split by {self.identifier}" if self.identifier else (self.words or "split")

    def placement(self, argument: Place) -> Role:
        """The role of an argument."""
        return dict(self.inputs).get(argument, Replicate())

    def splits(self, idx: int, dim: int, arguments: int) -> bool:
        """Whether it splits a dimension of tensor `idx`; results are counted after arguments."""
        at = idx - arguments
        role = self.placement(idx) if at < 0 else dict(enumerate(self.outputs)).get(at)
        return isinstance(role, Shard) and role.dim == dim

    @property
    def exchanges(self) -> bool:
        """Whether the ranks communicate while the operator runs."""
        return Group() in dict(self.numbers).values()


def first_split(recipe: Recipe, call: OperatorCall) -> tuple[int, int]:
    """The first tensor that a recipe splits, and the dimension; results count after arguments."""
    places = [*range(len(call.args)), *call.kwargs]
    roles = [*map(recipe.placement, places), *recipe.outputs]
    return next(
        ((at, role.dim) for at, role in enumerate(roles) if isinstance(role, Shard)), (0, 0)
    )


# --- The arguments of a call, and the part that each rank receives --------------------------------

# Arguments by position and by name.
Values = dict[Place, Any]


def name_of(argument: Place) -> str:
    """An argument as a user writes it: `args[0]`, `kwargs['dim']`."""
    return f"args[{argument}]" if isinstance(argument, int) else f"kwargs[{argument!r}]"


def argument_words(call: OperatorCall, argument: Place) -> str:
    """An argument with the name of its parameter, if it is known: `args[3] (mean)`."""
    if isinstance(argument, str):
        return name_of(argument)
    try:
        names = list(inspect.signature(call.function).parameters)
    except (TypeError, ValueError):  # some built-in functions have no signature
        return name_of(argument)
    return (
        f"{name_of(argument)} ({names[argument]})" if argument < len(names) else name_of(argument)
    )


def device_of(call: OperatorCall) -> torch.device:
    """The device of the tensors of a call; the CPU if it has none."""
    values = (*call.args, *call.kwargs.values())
    return next((t.device for value in values for t in tensors_in(value)), torch.device("cpu"))


def move_argument(value: Any, device: torch.device) -> Any:
    """An argument with its tensors moved to a device, and device arguments replaced by it."""
    if isinstance(value, torch.device):
        return device
    if isinstance(value, torch.Tensor | list | tuple):
        return map_tensors(value, lambda tensor: tensor.to(device))
    return value


def on_device(call: OperatorCall, device: torch.device) -> OperatorCall:
    """The same call on a device."""
    return call.map(lambda value: move_argument(value, device))


def parts_of(value: Any, placement: Role, ranks: int, terms: Terms, what: str) -> list[Any]:
    """The part of an argument for each rank; all tensors of a list are split the same way."""
    if isinstance(value, torch.Tensor):
        return split_tensor(value, placement, ranks, terms, what)
    if isinstance(placement, Replicate):
        if placement.summed or not tensors_in(value):
            return [value] * ranks
    elif not tensors_in(value):
        message = f"{what} is {value!r:.60}, which is not a tensor and cannot be {placement}"
        raise UsageError(f"{message}; remove it from the recipe's inputs")
    items = [
        parts_of(item, placement, ranks, terms, f"{what}[{item_index}]")
        if tensors_in(item)
        else [item] * ranks
        for item_index, item in enumerate(value)
    ]
    return [type(value)(item[rank] for item in items) for rank in range(ranks)]


def split_values(values: Values, recipe: Recipe, ranks: int, terms: Terms) -> list[Values]:
    """The arguments of each rank; the rank itself replaces a `Group` by its process group."""
    placements = dict(recipe.inputs)
    rules = {
        argument_key: rule for argument_key, rule in recipe.numbers if not isinstance(rule, Group)
    }
    each: list[Values] = [{} for _ in range(ranks)]
    for argument, value in values.items():
        if argument in rules:
            parts: list[Any] = [
                _number_for_rank(argument, rules[argument], values, recipe, (rank, ranks))
                for rank in range(ranks)
            ]
        elif argument in placements:
            parts = parts_of(value, placements[argument], ranks, terms, name_of(argument))
        else:
            parts = [value] * ranks
        for rank_values, part in zip(each, parts, strict=True):
            rank_values[argument] = part
    for argument, rule in recipe.numbers:
        if isinstance(rule, Group):  # the call may lack this argument
            for rank_values in each:
                rank_values[argument] = rule if rule.joined else None
    return each


def _number_for_rank(
    argument: Place, rule: Divided | Range, values: Values, recipe: Recipe, where: tuple[int, int]
) -> Any:
    value, what = values[argument], name_of(argument)
    if isinstance(rule, Range):
        return _end_of_range(value, rule, values, recipe, where)
    if rule.item is None:
        return _share_of_number(value, *where, what)
    try:
        items = list(value)
        items[rule.item] = _share_of_number(items[rule.item], *where, f"{what}[{rule.item}]")
    except (TypeError, IndexError):
        raise UsageError(f"{what} is {value!r:.60}, which has no item {rule.item}") from None
    return tuple(items) if isinstance(value, tuple) else items


def _share_of_number(value: Any, rank: int, ranks: int, what: str) -> Any:
    if value == -1:  # torch infers this size from the others
        return value
    if isinstance(value, bool) or not isinstance(value, int):
        raise UsageError(f"{what} must be an integer to be divided among ranks, got {value!r:.60}")
    cuts = bounds(value, 1, ranks, what)
    return cuts[rank][1] - cuts[rank][0]


def _end_of_range(
    value: Any, rule: Range, values: Values, recipe: Recipe, where: tuple[int, int]
) -> Any:
    """The start or end of a rank's part, relative to the range of the whole."""
    of, placement = values.get(rule.of), recipe.placement(rule.of)
    what = name_of(rule.of)
    if not isinstance(of, torch.Tensor) or not isinstance(placement, Shard):
        message = f"the range follows {what}, which is {placement} and not a sharded tensor"
        raise UsageError(f"{message}; shard it, or remove the range")
    rank, ranks = where
    size = of.shape[dimension(of, placement, what)]
    begin, end = bounds(size, placement.unit, ranks, what)[rank]
    if not isinstance(value, int):
        return begin if rule.end == "begin" else end
    return value + begin if rule.end == "begin" else value - size + end


# --- What went wrong on a rank --------------------------------------------------------------------


class RankError(Exception):
    """The operator or the assembly of its results failed on ranks, but not for the whole."""


def agreed_object(path: str, values: list[Any]) -> Any:
    """A result that is not a tensor; a `RankError` if the ranks return different ones."""
    for rank, value in enumerate(values):
        if value != values[0]:
            values_shown = f"{value!r:.60}, rank 0 returns {values[0]!r:.60}"
            raise RankError(f"{path}: rank {rank} of {len(values)} returns {values_shown}")
    return values[0]
