"""Putting the parts of several ranks together: what each holds, and what is done to them."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from paritas.errors import UsageError
from paritas.numerics.metrics import bitwise_equal, blocks, pair_metrics
from paritas.results.placements import Once, Partial, Replicate, Shard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from torch import Tensor

    from paritas.placement.placement import Terms
    from paritas.results.placements import Cut, Role


# --- Stretches of a dimension ---------------------------------------------------------------------


class Segment(NamedTuple):
    """A stretch of one dimension of a part.

    Attributes:
        source: where it begins in the part.
        target: where it begins in the whole.
    """

    source: int
    target: int
    length: int


# Per dimension, the segments of a part in its own order.
Where = tuple[tuple[Segment, ...], ...]


def whole(extent: int) -> tuple[Segment, ...]:
    """All of a dimension."""
    return (Segment(0, 0, extent),)


def length(segments: Iterable[Segment]) -> int:
    """How long the part is."""
    return sum(segment.length for segment in segments)


def rank_bounds(
    size: int, rank: int, ranks: int, *, unit: int = 1, cut: Cut = "balanced"
) -> tuple[int, int]:
    """Begin and end of a rank's part, in elements; the whole is made of units."""
    each, more = divmod(size // unit, ranks)
    if cut == "chunk":
        each, more = each + bool(more), 0
    ends = (min(each * at + min(at, more), size // unit) for at in (rank, rank + 1))
    begin, end = (unit * at for at in ends)
    return begin, end


def share(segments: Sequence[Segment], role: Shard, rank: int, ranks: int) -> tuple[Segment, ...]:
    """What a rank holds of a part that is split once more; its neighbours' elements left out."""
    total = length(segments)
    piece = -(-total // role.pieces)
    turns = [(rank, ranks)]
    if role.order == "zigzag":
        turns = [(rank, 2 * ranks), (2 * ranks - 1 - rank, 2 * ranks)]
    kept: list[Segment] = []
    for begin in range(0, total, piece) if total else ():
        size = min(piece, total - begin)
        for at, count in turns:
            first, last = rank_bounds(size, at, count, unit=role.unit, cut=role.cut)
            kept += _cut_segments(segments, begin + first, begin + last)
    return _from_zero(kept)


def box(offset: Sequence[int], shape: Sequence[int]) -> Where:
    """A part without gaps that begins there."""
    return tuple((Segment(0, begin, extent),) for begin, extent in zip(offset, shape, strict=True))


def positions(chosen: Sequence[int]) -> tuple[Segment, ...]:
    """Single elements of a dimension, in the part's own order."""
    return _from_zero(Segment(at, target, 1) for at, target in enumerate(chosen))


def take(tensor: Tensor, where: Where) -> Tensor:
    """What lies there; a view, if it has no gaps."""
    for dim, segments in enumerate(where):
        if len(segments) == 1:
            tensor = tensor.narrow(dim, segments[0].target, segments[0].length)
        else:
            tensor = tensor.index_select(dim, _targets(segments).to(tensor.device))
    return tensor


def put(whole: Tensor, where: Where, part: Tensor) -> None:
    """Write a part to where it lies."""
    if math.prod(map(len, where)) > _MOST_COPIES:
        places = [_targets(segments) for segments in where]
        whole[torch.meshgrid(*places, indexing="ij")] = part
        return
    for combination in itertools.product(*where):
        target = tuple(slice(one.target, one.target + one.length) for one in combination)
        source = tuple(slice(one.source, one.source + one.length) for one in combination)
        whole[target].copy_(part[source])


# More stretches than this are written by their indices, which take more memory than the part.
_MOST_COPIES = 1 << 10


def _targets(segments: Sequence[Segment]) -> Tensor:
    """Where in the whole each element of a dimension lies."""
    places = [torch.arange(one.target, one.target + one.length) for one in segments]
    return torch.cat(places) if places else torch.empty(0, dtype=torch.int64)


def _cut_segments(segments: Sequence[Segment], begin: int, end: int) -> list[Segment]:
    """The stretch of a part from one place in it to another."""
    found = []
    for segment in segments:
        first, last = max(begin, segment.source), min(end, segment.source + segment.length)
        if first < last:
            target = segment.target + first - segment.source
            found.append(Segment(first, target, last - first))
    return found


def _from_zero(segments: Iterable[Segment]) -> tuple[Segment, ...]:
    """The same stretches of the whole as a part of their own; neighbours become one."""
    joined: list[Segment] = []
    place = 0
    for segment in segments:
        last = joined[-1] if joined else None
        if last is not None and last.target + last.length == segment.target:
            joined[-1] = last._replace(length=last.length + segment.length)
        else:
            joined.append(Segment(place, segment.target, segment.length))
        place += segment.length
    return tuple(joined)


def lay_out(
    extents: Mapping[tuple[int, ...], int], orders: Sequence[str]
) -> tuple[dict[tuple[int, ...], tuple[Segment, ...]], int]:
    """Lay parts side by side along one dimension.

    Args:
        extents: by coordinates on the axes that split it, the outermost first; all of them.
        orders: per axis, `natural` or `zigzag`.

    Returns:
        Where each part lies, and how long the whole is.

    Raises:
        UsageError: parts in zigzag order are not of one even length.
    """
    if not orders:
        return {(): whole(extents[()])}, extents[()]
    ranks = sorted({coordinates[0] for coordinates in extents})
    inner = {}
    for rank in ranks:
        own = {key[1:]: extent for key, extent in extents.items() if key[0] == rank}
        inner[rank] = lay_out(own, orders[1:])
    sizes = [size for _, size in inner.values()]
    if orders[0] == "zigzag" and (len(set(sizes)) > 1 or sizes[0] % 2):
        lengths = ", ".join(map(str, sizes))
        raise UsageError(f"parts in zigzag order must be of one even length, and are of {lengths}")
    total = sum(sizes)
    placed: dict[tuple[int, ...], tuple[Segment, ...]] = {}
    for at, (rank, (parts, size)) in enumerate(inner.items()):
        outer: tuple[Segment, ...] = (Segment(0, sum(sizes[:at]), size),)
        if orders[0] == "zigzag":
            outer = share(whole(total), Shard(0, order="zigzag"), at, len(ranks))
        for key, segments in parts.items():
            held = [(one.target, one.target + one.length) for one in segments]
            placed[rank, *key] = _from_zero(
                piece for begin, end in held for piece in _cut_segments(outer, begin, end)
            )
    return placed, total


def fills(places: Iterable[Where], shape: Sequence[int]) -> bool:
    """Whether parts, none of them named twice, fill a whole without gap and overlap.

    Parts must lie in a grid: those of a distributed tensor do.
    """
    found = set(places)
    if not math.prod(shape):
        return True
    per_axis = [{where[axis] for where in found} for axis in range(len(shape))]
    if len(found) != math.prod(map(len, per_axis)):
        return False
    return all(
        _covers_extent(itertools.chain.from_iterable(segments), extent)
        for segments, extent in zip(per_axis, shape, strict=True)
    )


def _covers_extent(segments: Iterable[Segment], extent: int) -> bool:
    at = 0
    for segment in sorted(segments, key=lambda one: one.target):
        if segment.target != at:
            return False
        at += segment.length
    return at == extent


# --- Recipes --------------------------------------------------------------------------------------

_OPERATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "product": torch.mul,
    "max": torch.maximum,
    "min": torch.minimum,
}
REDUCTIONS = tuple(_OPERATORS)
_MOST_LISTED = 3


class PartsDisagreement(NamedTuple):
    """Two ranks that should hold the same, and do not.

    Attributes:
        rank: the one that differs from `other`.
        mismatched: how many elements differ; None where statistics are all there is.
        numel: of how many.
        max_abs: by how much at most.
    """

    rank: int
    other: int
    mismatched: int | None = None
    numel: int = 0
    max_abs: float = math.nan


class ReplicasDisagreeError(UsageError):
    """Ranks hold different values of what is the same on all of them.

    That is a fault of the program that was recorded, not of the comparison: its row is different.

    Attributes:
        is_difference: so that a pair of it is judged different, not unverified.
        disagreements: all of them.
    """

    is_difference = True

    def __init__(self, disagreements: Sequence[PartsDisagreement]) -> None:
        self.disagreements = tuple(disagreements)
        told = [_describe_disagreement(one) for one in self.disagreements[:_MOST_LISTED]]
        more = len(self.disagreements) - len(told)
        shown = "; ".join([*told, *([f"and {more} more ranks"] if more else [])])
        super().__init__(f"the value should be the same on these ranks, and is not: {shown}")

    def __reduce__(
        self,
    ) -> tuple[type[ReplicasDisagreeError], tuple[tuple[PartsDisagreement, ...]]]:
        return type(self), (self.disagreements,)


def _describe_disagreement(one: PartsDisagreement) -> str:
    ranks = f"rank {one.rank} differs from rank {one.other}"
    if one.mismatched is None:
        return f"{ranks} in its statistics"
    if not one.mismatched:
        return f"{ranks} in the signs of zeros alone"
    return f"{ranks} in {one.mismatched} of {one.numel} elements, by at most {one.max_abs:.4g}"


@dataclasses.dataclass(frozen=True)
class Cell:
    """A part of the whole.

    Attributes:
        where: it lies there.
        terms: the parts whose reduction is its value; of each, the ranks' copies that must agree.
    """

    where: Where
    terms: tuple[tuple[int, ...], ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of each of its parts."""
        return tuple(map(length, self.where))


@dataclasses.dataclass(frozen=True)
class Assembly:
    """Parts of several ranks, put together.

    Attributes:
        words: what is done.
        shape: of the whole, before dimensions are left out.
        ranks: per part, whose it is.
        cells: they fill the whole; a part that no cell names is not needed.
        reduction: how terms become one.
        squeezed: dimensions to leave out.
        settled: parts whose recorded digest says that they agree with the first copy.
        placed: whether sketches of the parts were made with their place in the whole.
    """

    words: str
    shape: tuple[int, ...]
    ranks: tuple[int, ...]
    cells: tuple[Cell, ...]
    reduction: str = "sum"
    squeezed: tuple[int, ...] = ()
    settled: frozenset[int] = frozenset()
    placed: bool = False

    @property
    def result_shape(self) -> tuple[int, ...]:
        """The shape of what `apply` gives."""
        return tuple(size for at, size in enumerate(self.shape) if at not in self.squeezed)

    @property
    def copies(self) -> Iterator[tuple[int, int]]:
        """Pairs of parts that must agree and are not yet known to: the first copy, and another."""
        for cell in self.cells:
            for first, *others in cell.terms:
                yield from ((first, other) for other in others if other not in self.settled)

    def apply(self, parts: Sequence[Tensor]) -> Tensor:
        """Put them together: copies are compared bit for bit, terms accumulated in float64.

        Raises:
            ReplicasDisagreeError: copies differ.
            UsageError: the parts do not fit together.
        """
        self._check_fit(parts)
        self._check_copies(parts)
        values = (self._value(cell, parts) for cell in self.cells)
        whole = self._joined(values, parts[0].dtype)
        return whole.reshape(self.result_shape) if self.squeezed else whole

    def _joined(self, values: Iterator[Tensor], dtype: torch.dtype) -> Tensor:
        # Nothing is rearranged, so nothing has to be copied.
        if len(self.cells) == 1 and all(len(segments) == 1 for segments in self.cells[0].where):
            return next(values)
        out = torch.empty(self.shape, dtype=dtype)
        for cell, value in zip(self.cells, values, strict=True):
            put(out, cell.where, value)
        return out

    def _value(self, cell: Cell, parts: Sequence[Tensor]) -> Tensor:
        terms = [parts[copies[0]] for copies in cell.terms]
        if len(terms) == 1:
            return terms[0]
        return reduce_terms(terms, self.reduction, accumulate="wide")

    def _check_fit(self, parts: Sequence[Tensor]) -> None:
        used = {at for cell in self.cells for copies in cell.terms for at in copies}
        dtypes = {parts[at].dtype: self.ranks[at] for at in sorted(used, reverse=True)}
        if len(dtypes) > 1:
            told = ", ".join(
                f"rank {rank} {dtype}"
                for dtype, rank in sorted(dtypes.items(), key=lambda item: item[1])
            )
            raise UsageError(f"the ranks hold different dtypes: {told}")
        for cell in self.cells:
            for at in itertools.chain.from_iterable(cell.terms):
                if tuple(parts[at].shape) != cell.shape:
                    found = tuple(parts[at].shape)
                    raise UsageError(
                        f"rank {self.ranks[at]} holds a tensor of shape {found} where {cell.shape} "
                        "was recorded"
                    )

    def _check_copies(self, parts: Sequence[Tensor]) -> None:
        found = []
        for first, other in self.copies:
            if bitwise_equal(parts[first], parts[other]):
                continue
            metrics = pair_metrics(parts[first], parts[other])
            found.append(
                PartsDisagreement(
                    self.ranks[other],
                    self.ranks[first],
                    metrics.mismatched,
                    metrics.numel,
                    metrics.max_abs,
                )
            )
        if found:
            raise ReplicasDisagreeError(found)


@dataclasses.dataclass(frozen=True)
class Refused:
    """Parts that cannot be put together; asking for it says why.

    Attributes:
        words: none, as nothing was done.
    """

    reason: str
    words: str = ""

    def apply(self, parts: Sequence[Tensor]) -> Tensor:
        """Say why not.

        Raises:
            UsageError: always.
        """
        raise UsageError(self.reason)


# --- Terms and copies -----------------------------------------------------------------------------

# What becomes of copies that must agree and are not compared: a mixture of them, which is none of
# theirs where they disagree; or their mean.
Copies = Literal["mix", "mean"]
# Terms are reduced in float64 and rounded once, or in their own dtype, differentiably.
Accumulate = Literal["wide", "own"]


def reduce_terms(terms: Sequence[Tensor], how: str, *, accumulate: Accumulate) -> Tensor:
    """Terms as one tensor of their dtype."""
    return _reduce_wide(terms, how) if accumulate == "wide" else _reduce_own(terms, how)


def _reduce_wide(terms: Sequence[Tensor], how: str) -> Tensor:
    """In float64, a block at a time."""
    dtype = terms[0].dtype
    wide = _accumulator_dtype(dtype, how)
    operator = _OPERATORS[how]
    out = torch.empty(terms[0].shape, dtype=dtype)
    flat = out.view(-1)
    for offset, chunks in blocks(*terms):
        total = functools.reduce(operator, (chunk.to(wide) for chunk in chunks))
        if how == "avg":
            total = total / len(terms)
        flat[offset : offset + total.numel()].copy_(total)
    return out


def _reduce_own(terms: Sequence[Tensor], how: str) -> Tensor:
    """In one rounding: how a machine adds up ranks is not what is asked here."""
    stacked = torch.stack(list(terms))  # which refuses shapes that would broadcast
    dtype = stacked.dtype
    match how:
        case "sum" if dtype is torch.bool:
            return stacked.any(dim=0)
        case "sum":
            return stacked.sum(dim=0, dtype=dtype)
        case "avg":
            return stacked.mean(dim=0)
        case "max":
            return stacked.amax(dim=0)
        case "min":
            return stacked.amin(dim=0)
        case _:
            return stacked.prod(dim=0, dtype=dtype)


def _accumulator_dtype(dtype: torch.dtype, how: str) -> torch.dtype:
    if dtype.is_floating_point:
        return torch.float64
    ordered = how in ("max", "min")
    if dtype.is_complex and not ordered:
        return torch.complex128
    if dtype.is_complex or how == "avg" or (dtype is torch.uint64 and ordered):
        raise UsageError(f"terms of {dtype} have no {how}")
    # Sums and products that leave the dtype wrap around, as they do in a collective.
    return torch.int64


def same_bits(left: Tensor, right: Tensor) -> Tensor:
    """Of each element whether two copies agree: NaNs do, zeros of either sign do not."""
    same = left == right
    if left.is_complex():
        return same_bits(torch.view_as_real(left), torch.view_as_real(right)).all(dim=-1)
    if left.is_floating_point():
        same &= left.signbit() == right.signbit()
        same |= left.isnan() & right.isnan()
    return same


class _Shared(torch.autograd.Function):
    """A result that all ranks have: where they disagree, it is none of theirs.

    Of the cotangent each rank is given a share, so that the gradients of the ranks add up to the
    whole's if each of them is right.
    """

    @staticmethod
    def forward(ctx: Any, terms: Terms, *parts: Tensor) -> Tensor:
        ctx.terms, ctx.ranks = terms, len(parts)
        return _agreed(parts, terms)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.terms.full:
            return (None, *[gradient] * ctx.ranks)
        return (None, *[gradient * weight for weight in ctx.terms.weights(ctx.ranks)])


def _agreed(parts: tuple[Tensor, ...], terms: Terms) -> Tensor:
    first = parts[0].clone()
    shapes = {tuple(part.shape) for part in parts}
    if len(shapes) > 1:
        shown = " and ".join(str(list(shape)) for shape in sorted(shapes))
        raise ValueError(f"all ranks should have the same, but theirs are of shapes {shown}")
    if all(torch.equal(first, part) for part in parts[1:]):
        return first
    if not (first.is_floating_point() or first.is_complex()):
        for part in parts[1:]:
            other = ~parts[0] if first.dtype is torch.bool else 2 * parts[0] - part
            first = torch.where(part == parts[0], first, other)
        return first
    mixed = torch.zeros_like(first)
    same = torch.ones_like(first, dtype=torch.bool)
    for part, weight in zip(parts, terms.weights(len(parts)), strict=True):
        mixed = mixed + part * weight
        same &= (part == first) | (part.isnan() & first.isnan())
    return torch.where(same, first, mixed)


def join(
    parts: list[Tensor],
    role: Role,
    *,
    copies: Copies = "mix",
    terms: Terms | None = None,
    shape: Sequence[int] = (),
) -> Tensor:
    """Put the parts of the ranks of one axis together, differentiably.

    Whatever torch raises at that passes through.

    Args:
        shape: of the whole; asked of parts with a halo only.
    """
    dtypes = {part.dtype for part in parts}
    if len(dtypes) > 1:
        raise TypeError(f"the ranks give {' and '.join(sorted(map(str, dtypes)))}")
    match role:
        case Shard(dim=dim, halo=(0, 0)):
            return torch.cat(parts, dim)
        case Shard(dim=dim, unit=unit, halo=(before, _)):
            cuts = [rank_bounds(shape[dim], at, len(parts), unit=unit) for at in range(len(parts))]
            own = [
                part.narrow(dim, min(begin, before), end - begin)
                for part, (begin, end) in zip(parts, cuts, strict=True)
            ]
            return torch.cat(own, dim)
        case Partial(reduction=reduction):
            return reduce_terms(parts, reduction, accumulate="own")
        case Once():
            return parts[0]
        case Replicate() if copies == "mean":
            # Each has an equal share in the gradient.
            return torch.stack(parts).mean(0)
        case Replicate():
            if terms is None:
                raise ValueError("copies are mixed by the weights of terms: give them")
            if not (parts[0].is_floating_point() or parts[0].is_complex()):
                return _agreed(tuple(parts), terms)
            return _Shared.apply(terms, *parts)  # type: ignore[no-any-return, no-untyped-call]


def named_ranks(ranks: Sequence[int]) -> str:
    """Name ranks: `rank 2`, `ranks 0-3`, `ranks 0, 2-3`."""
    found = sorted(set(ranks))
    runs: list[list[int]] = []
    for rank in found:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    told = ", ".join(f"{first}-{last}" if first < last else str(first) for first, last in runs)
    return f"{'rank' if len(found) == 1 else 'ranks'} {told}"
