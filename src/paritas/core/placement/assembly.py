"""Assemble the parts of several ranks: what each rank holds, and how the parts combine."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from paritas.core.errors import UsageError
from paritas.core.numerics.bits import is_inexact
from paritas.core.numerics.flat_blocks import blocks
from paritas.core.numerics.metrics import bitwise_equal, pair_metrics
from paritas.core.results.items import Once, Partial, Replicate, Shard
from paritas.core.results.wording import ranges

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from torch import Tensor

    from paritas.core.placement.placement import Terms
    from paritas.core.results.items import Cut, Role


# --- Segments of a dimension ----------------------------------------------------------------------


class Segment(NamedTuple):
    """A contiguous range of one dimension.

    Attributes:
        source: start in the part.
        target: start in the whole.
    """

    source: int
    target: int
    length: int


# For each dimension, the segments of a part in the part's own order.
Where = tuple[tuple[Segment, ...], ...]


def whole(extent: int) -> tuple[Segment, ...]:
    """A whole dimension as one segment."""
    return (Segment(0, 0, extent),)


def length(segments: Iterable[Segment]) -> int:
    """The total length of segments."""
    return sum(segment.length for segment in segments)


def rank_bounds(
    size: int, rank: int, ranks: int, *, unit: int = 1, cut: Cut = "balanced"
) -> tuple[int, int]:
    """Start and end of a rank's part in elements; parts are multiples of `unit`."""
    each, more = divmod(size // unit, ranks)
    if cut == "chunk":
        each, more = each + bool(more), 0
    ends = (min(each * at + min(at, more), size // unit) for at in (rank, rank + 1))
    begin, end = (unit * at for at in ends)
    return begin, end


def share(segments: Sequence[Segment], role: Shard, rank: int, ranks: int) -> tuple[Segment, ...]:
    """What a rank holds of segments that are split once more, without any halo."""
    total = length(segments)
    piece = -(-total // role.pieces)
    turns = [(rank, ranks)]
    if role.order == "zigzag":
        turns = [(rank, 2 * ranks), (2 * ranks - 1 - rank, 2 * ranks)]
    rank_segments: list[Segment] = []
    for begin in range(0, total, piece) if total else ():
        size = min(piece, total - begin)
        for at, count in turns:
            first, last = rank_bounds(size, at, count, unit=role.unit, cut=role.cut)
            rank_segments += _cut_segments(segments, begin + first, begin + last)
    return _from_zero(rank_segments)


def box(offset: Sequence[int], shape: Sequence[int]) -> Where:
    """A contiguous part that starts at an offset."""
    return tuple((Segment(0, begin, extent),) for begin, extent in zip(offset, shape, strict=True))


def positions(chosen: Sequence[int]) -> tuple[Segment, ...]:
    """Selected elements of a dimension, in the order of the part."""
    return _from_zero(Segment(at, target, 1) for at, target in enumerate(chosen))


def take(tensor: Tensor, where: Where) -> Tensor:
    """The part of a tensor at these segments; a view if it is contiguous."""
    for dim, segments in enumerate(where):
        if len(segments) == 1:
            tensor = tensor.narrow(dim, segments[0].target, segments[0].length)
        else:
            tensor = tensor.index_select(dim, _targets(segments).to(tensor.device))
    return tensor


def put(target_tensor: Tensor, where: Where, part: Tensor) -> None:
    """Write a part into the whole."""
    if math.prod(map(len, where)) > _MOST_COPIES:
        places = [_targets(segments) for segments in where]
        target_tensor[torch.meshgrid(*places, indexing="ij")] = part
        return
    for combination in itertools.product(*where):
        target = tuple(
            slice(segment.target, segment.target + segment.length) for segment in combination
        )
        source = tuple(
            slice(segment.source, segment.source + segment.length) for segment in combination
        )
        target_tensor[target].copy_(part[source])


# More segments than this are written by index, which needs more memory than the part itself.
_MOST_COPIES = 1 << 10


def _targets(segments: Sequence[Segment]) -> Tensor:
    """The position in the whole of each element of a dimension."""
    places = [torch.arange(segment.target, segment.target + segment.length) for segment in segments]
    return torch.cat(places) if places else torch.empty(0, dtype=torch.int64)


def _cut_segments(segments: Sequence[Segment], begin: int, end: int) -> list[Segment]:
    """The segments of a part between two positions in the part."""
    cut_segments = []
    for segment in segments:
        first, last = max(begin, segment.source), min(end, segment.source + segment.length)
        if first < last:
            target = segment.target + first - segment.source
            cut_segments.append(Segment(first, target, last - first))
    return cut_segments


def _from_zero(segments: Iterable[Segment]) -> tuple[Segment, ...]:
    """The same segments as a part that starts at 0, with adjacent segments merged."""
    joined: list[Segment] = []
    source_start = 0
    for segment in segments:
        last = joined[-1] if joined else None
        if last is not None and last.target + last.length == segment.target:
            joined[-1] = last._replace(length=last.length + segment.length)
        else:
            joined.append(Segment(source_start, segment.target, segment.length))
        source_start += segment.length
    return tuple(joined)


def lay_out(
    extents: Mapping[tuple[int, ...], int], orders: Sequence[str]
) -> tuple[dict[tuple[int, ...], tuple[Segment, ...]], int]:
    """Place parts next to each other along one dimension.

    Args:
        extents: length of every part by its coordinates on the axes that split the dimension,
            outermost first.
        orders: `natural` or `zigzag` for each axis.

    Returns:
        The segments of each part, and the length of the whole.

    Raises:
        UsageError: parts in zigzag order do not have the same even length.
    """
    if not orders:
        return {(): whole(extents[()])}, extents[()]
    ranks = sorted({coordinates[0] for coordinates in extents})
    inner = {}
    for rank in ranks:
        rank_extents = {key[1:]: extent for key, extent in extents.items() if key[0] == rank}
        inner[rank] = lay_out(rank_extents, orders[1:])
    sizes = [size for _, size in inner.values()]
    if orders[0] == "zigzag" and (len(set(sizes)) > 1 or sizes[0] % 2):
        lengths = ", ".join(map(str, sizes))
        raise UsageError(f"parts in zigzag order must all have the same even length, got {lengths}")
    total = sum(sizes)
    placed: dict[tuple[int, ...], tuple[Segment, ...]] = {}
    for at, (rank, (parts, size)) in enumerate(inner.items()):
        outer: tuple[Segment, ...] = (Segment(0, sum(sizes[:at]), size),)
        if orders[0] == "zigzag":
            outer = share(whole(total), Shard(0, order="zigzag"), at, len(ranks))
        for key, segments in parts.items():
            target_bounds = [
                (segment.target, segment.target + segment.length) for segment in segments
            ]
            placed[rank, *key] = _from_zero(
                piece for begin, end in target_bounds for piece in _cut_segments(outer, begin, end)
            )
    return placed, total


def fills(places: Iterable[Where], shape: Sequence[int]) -> bool:
    """Whether distinct parts cover a whole without gaps or overlaps.

    The parts must form a grid, as the parts of a distributed tensor do.
    """
    distinct_parts = set(places)
    if not math.prod(shape):
        return True
    per_axis = [{where[axis] for where in distinct_parts} for axis in range(len(shape))]
    if len(distinct_parts) != math.prod(map(len, per_axis)):
        return False
    return all(
        _covers_extent(itertools.chain.from_iterable(segments), extent)
        for segments, extent in zip(per_axis, shape, strict=True)
    )


def _covers_extent(segments: Iterable[Segment], extent: int) -> bool:
    at = 0
    for segment in sorted(segments, key=lambda part_segment: part_segment.target):
        if segment.target != at:
            return False
        at += segment.length
    return at == extent


# --- Assemblies -----------------------------------------------------------------------------------

_OPERATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "product": torch.mul,
    "max": torch.maximum,
    "min": torch.minimum,
}
REDUCTIONS = tuple(_OPERATORS)
_MOST_LISTED = 3


@dataclasses.dataclass(frozen=True)
class ReplicaDisagreement:
    """Two ranks that should hold the same values but do not.

    Attributes:
        rank: the rank that differs from `other`.
        mismatched: number of elements that differ; None if only statistics are known.
        numel: number of elements that both hold.
        max_abs: the difference that is largest in multiples of the typical value.
        typical: the typical value at that element, where it is known.
    """

    rank: int
    other: int
    mismatched: int | None = None
    numel: int = 0
    max_abs: float = math.nan
    typical: float | None = None

    @property
    def relative(self) -> float:
        """The largest difference in multiples of the typical value."""
        if self.max_abs == 0:
            return 0.0
        return self.max_abs / self.typical if self.typical else math.inf

    def __str__(self) -> str:
        ranks = f"rank {self.rank} differs from rank {self.other}"
        if self.mismatched is None:
            return f"{ranks} in its statistics"
        if not self.mismatched:
            return f"{ranks} only in the signs of zeros"
        text = f"{ranks} in {self.mismatched} of {self.numel} elements"
        if self.max_abs == 0:
            return f"{text}, only in the signs of zeros"
        text = f"{text}, by at most {self.max_abs:.4g}"
        if self.typical is None:
            return text
        return f"{text} ({self.relative:.2g} times the typical value)"


class ReplicasDisagreeError(UsageError):
    """Ranks hold different values of something that should be the same on all of them.

    This is a fault of the recorded program, not of the comparison.

    Attributes:
        is_difference: makes the pair `different` instead of `unverified`.
        disagreements: all of them.
    """

    is_difference = True

    def __init__(self, disagreements: Sequence[ReplicaDisagreement]) -> None:
        self.disagreements = tuple(disagreements)
        shown = list(map(str, self.disagreements[:_MOST_LISTED]))
        more = len(self.disagreements) - len(shown)
        shown += [f"and {more} more ranks"] if more else []
        super().__init__(f"the value should be the same on these ranks: {'; '.join(shown)}")

    def __reduce__(
        self,
    ) -> tuple[type[ReplicasDisagreeError], tuple[tuple[ReplicaDisagreement, ...]]]:
        return type(self), (self.disagreements,)


@dataclasses.dataclass(frozen=True)
class Cell:
    """A region of the whole.

    Attributes:
        where: its position in the whole.
        terms: the parts that are reduced to its value; for each, all copies, which must agree.
    """

    where: Where
    terms: tuple[tuple[int, ...], ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of each part of the cell."""
        return tuple(map(length, self.where))


@dataclasses.dataclass(frozen=True)
class Assembly:
    """How the parts of several ranks make a whole.

    Attributes:
        words: a description of what is done.
        shape: shape of the whole, before `squeezed` dimensions are dropped.
        ranks: the rank of each part.
        cells: regions that fill the whole; parts that no cell names are not needed.
        reduction: how terms are combined.
        squeezed: dimensions to drop.
        settled: parts whose recorded digest equals that of the first copy.
        placed: whether sketches of the parts were made with their position in the whole.
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
        """The shape that `apply` returns."""
        return tuple(size for at, size in enumerate(self.shape) if at not in self.squeezed)

    @property
    def copies(self) -> Iterator[tuple[int, int]]:
        """Pairs of copies (the first one and another) that must agree and are not yet known to."""
        for cell in self.cells:
            for first, *others in cell.terms:
                yield from ((first, other) for other in others if other not in self.settled)

    def apply(self, parts: Sequence[Tensor]) -> Tensor:
        """Assemble the parts: compare copies bit for bit, accumulate terms in float64.

        Raises:
            ReplicasDisagreeError: copies differ.
            UsageError: the parts do not fit together.
        """
        self._check_fit(parts)
        self._check_copies(parts)
        cells = self.cells
        if len(cells) == 1 and all(len(segments) == 1 for segments in cells[0].where):
            assembled = self._reduce_cell(cells[0], parts)  # nothing is rearranged: no copy needed
        else:
            assembled = torch.empty(self.shape, dtype=parts[0].dtype)
            for cell in cells:
                put(assembled, cell.where, self._reduce_cell(cell, parts))
        return assembled.reshape(self.result_shape) if self.squeezed else assembled

    def _reduce_cell(self, cell: Cell, parts: Sequence[Tensor]) -> Tensor:
        terms = [parts[copies[0]] for copies in cell.terms]
        if len(terms) == 1:
            return terms[0]
        return reduce_terms(terms, self.reduction, accumulate="wide")

    def _check_fit(self, parts: Sequence[Tensor]) -> None:
        used = {at for cell in self.cells for copies in cell.terms for at in copies}
        dtypes = {parts[at].dtype: self.ranks[at] for at in sorted(used, reverse=True)}
        if len(dtypes) > 1:
            sorted_dtypes = sorted(dtypes, key=dtypes.__getitem__)
            shown = ", ".join(f"rank {dtypes[dtype]} {dtype}" for dtype in sorted_dtypes)
            raise UsageError(f"the ranks hold different dtypes: {shown}")
        for cell in self.cells:
            for at in itertools.chain.from_iterable(cell.terms):
                if tuple(parts[at].shape) != cell.shape:
                    raise UsageError(
                        f"rank {self.ranks[at]} holds a tensor of shape {tuple(parts[at].shape)}, "
                        f"but shape {cell.shape} was recorded"
                    )

    def _check_copies(self, parts: Sequence[Tensor]) -> None:
        disagreements = []
        for first, other in self.copies:
            if bitwise_equal(parts[first], parts[other]):
                continue
            metrics = pair_metrics(parts[first], parts[other])
            disagreements.append(
                ReplicaDisagreement(
                    self.ranks[other],
                    self.ranks[first],
                    metrics.mismatched,
                    metrics.numel,
                    metrics.max_abs,
                )
            )
        if disagreements:
            raise ReplicasDisagreeError(disagreements)


@dataclasses.dataclass(frozen=True)
class Refused:
    """Parts that cannot be assembled; `apply` raises the reason.

    Attributes:
        words: empty, because nothing was done.
    """

    reason: str
    words: str = ""

    def apply(self, parts: Sequence[Tensor]) -> Tensor:
        """Raise the reason as a `UsageError`."""
        raise UsageError(self.reason)


# --- Terms and copies -----------------------------------------------------------------------------

# How copies that must agree are merged without a comparison: by their mean, or by a weighted mix,
# which differs from all of them where they disagree.
Copies = Literal["mix", "mean"]
# Reduce terms in float64 and round once, or reduce them differentiably in their own dtype.
Accumulate = Literal["wide", "own"]


def reduce_terms(terms: Sequence[Tensor], how: str, *, accumulate: Accumulate) -> Tensor:
    """Reduce terms to one tensor of their dtype."""
    return _reduce_wide(terms, how) if accumulate == "wide" else _reduce_own(terms, how)


def _reduce_wide(terms: Sequence[Tensor], how: str) -> Tensor:
    """Reduce in float64, one block at a time."""
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
    """Reduce with a single rounding: the order of the additions is not what is checked."""
    stacked = torch.stack(list(terms))  # refuses shapes that would broadcast
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
        raise UsageError(f"cannot reduce terms of {dtype} by {how}")
    # Sums and products that overflow the dtype wrap around, as in a collective.
    return torch.int64


def same_bits(left: Tensor, right: Tensor) -> Tensor:
    """Where two copies agree, element by element: NaNs are equal, +0 and -0 are not."""
    same = left == right
    if left.is_complex():
        return same_bits(torch.view_as_real(left), torch.view_as_real(right)).all(dim=-1)
    if left.is_floating_point():
        same &= left.signbit() == right.signbit()
        same |= left.isnan() & right.isnan()
    return same


class _Shared(torch.autograd.Function):
    """A result that every rank has; where the ranks disagree, it equals none of their values.

    Each rank gets a share of the cotangent. If every rank's gradient is right, they add up to the
    gradient of the whole.
    """

    @staticmethod
    def forward(ctx: Any, terms: Terms, *parts: Tensor) -> Tensor:
        ctx.terms, ctx.ranks = terms, len(parts)
        return _merge_copies(parts, terms)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.terms.full:
            return (None, *[gradient] * ctx.ranks)
        return (None, *[gradient * weight for weight in ctx.terms.weights(ctx.ranks)])


def _merge_copies(parts: tuple[Tensor, ...], terms: Terms) -> Tensor:
    first = parts[0].clone()
    shapes = {tuple(part.shape) for part in parts}
    if len(shapes) > 1:
        shown = " and ".join(str(list(shape)) for shape in sorted(shapes))
        raise ValueError(f"all ranks should have the same value, but the shapes are {shown}")
    if all(torch.equal(first, part) for part in parts[1:]):
        return first
    if not is_inexact(first):
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
    """Join the parts of the ranks along one axis, differentiably; torch's own errors pass through.

    Args:
        shape: of the whole; needed only for parts with a halo.
    """
    dtypes = {part.dtype for part in parts}
    if len(dtypes) > 1:
        raise TypeError(f"the ranks return {' and '.join(sorted(map(str, dtypes)))}")
    match role:
        case Shard(dim=dim, halo=(0, 0)):
            return torch.cat(parts, dim)
        case Shard(dim=dim, unit=unit, halo=(before, _)):
            cuts = [rank_bounds(shape[dim], at, len(parts), unit=unit) for at in range(len(parts))]
            without_halo = [
                part.narrow(dim, min(begin, before), end - begin)
                for part, (begin, end) in zip(parts, cuts, strict=True)
            ]
            return torch.cat(without_halo, dim)
        case Partial(reduction=reduction):
            return reduce_terms(parts, reduction, accumulate="own")
        case Once():
            return parts[0]
        case Replicate() if copies == "mean":
            return torch.stack(parts).mean(0)
        case Replicate():
            if terms is None:
                raise ValueError("mixing copies needs their weights: pass `terms`")
            if not is_inexact(parts[0]):
                return _merge_copies(tuple(parts), terms)
            return _Shared.apply(terms, *parts)  # type: ignore[no-any-return, no-untyped-call]


def named_ranks(ranks: Sequence[int]) -> str:
    """Describe ranks: `rank 2`, `ranks 0-3`, `ranks 0, 2-3`."""
    rank_numbers = sorted(set(ranks))
    return f"{'rank' if len(rank_numbers) == 1 else 'ranks'} {ranges(rank_numbers)}"
