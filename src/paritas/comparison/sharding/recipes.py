"""What is done to put the parts of several ranks together."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from typing import TYPE_CHECKING, NamedTuple

import torch

from paritas.comparison.sharding.segments import Where, length
from paritas.errors import UsageError
from paritas.numerics.metrics import bitwise_equal, blocks, pair_metrics

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

__all__ = [
    "REDUCTIONS",
    "Assembly",
    "Cell",
    "Disagreement",
    "Refused",
    "ReplicasDisagreeError",
    "named_ranks",
]

_OPERATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "product": torch.mul,
    "max": torch.maximum,
    "min": torch.minimum,
}
REDUCTIONS = tuple(_OPERATORS)
_MOST_TOLD = 3


class Disagreement(NamedTuple):
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

    def __init__(self, disagreements: Sequence[Disagreement]) -> None:
        self.disagreements = tuple(disagreements)
        told = [_told(one) for one in self.disagreements[:_MOST_TOLD]]
        more = len(self.disagreements) - len(told)
        shown = "; ".join([*told, *([f"and {more} more ranks"] if more else [])])
        super().__init__(f"the value should be the same on these ranks, and is not: {shown}")

    def __reduce__(self) -> tuple[type[ReplicasDisagreeError], tuple[tuple[Disagreement, ...]]]:
        return type(self), (self.disagreements,)


def _told(one: Disagreement) -> str:
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
        """Put them together.

        Raises:
            ReplicasDisagreeError: copies differ.
            UsageError: the parts do not fit together.
        """
        self._check_fit(parts)
        self._check_copies(parts)
        whole = self._joined(parts)
        return whole.reshape(self.result_shape) if self.squeezed else whole

    def _joined(self, parts: Sequence[Tensor]) -> Tensor:
        values = (self._value(cell, parts) for cell in self.cells)
        if len(self.cells) == 1:
            cell = self.cells[0]
            # Nothing is rearranged, so nothing has to be copied.
            if all(len(segments) == 1 for segments in cell.where):
                return next(values)
        out = torch.empty(self.shape, dtype=parts[0].dtype)
        for cell, value in zip(self.cells, values, strict=True):
            for combination in itertools.product(*cell.where):
                target = tuple(slice(one.target, one.target + one.length) for one in combination)
                source = tuple(slice(one.source, one.source + one.length) for one in combination)
                out[target].copy_(value[source])
        return out

    def _value(self, cell: Cell, parts: Sequence[Tensor]) -> Tensor:
        terms = [parts[copies[0]] for copies in cell.terms]
        return terms[0] if len(terms) == 1 else _reduced(terms, self.reduction)

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
                Disagreement(
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


def _reduced(terms: Sequence[Tensor], how: str) -> Tensor:
    """Terms as one tensor of their dtype; in float64, a block at a time."""
    dtype = terms[0].dtype
    wide = _accumulator(dtype, how)
    operator = _OPERATORS[how]
    out = torch.empty(terms[0].shape, dtype=dtype)
    flat = out.view(-1)
    for offset, chunks in blocks(*terms):
        total = functools.reduce(operator, (chunk.to(wide) for chunk in chunks))
        if how == "avg":
            total = total / len(terms)
        flat[offset : offset + total.numel()].copy_(total)
    return out


def _accumulator(dtype: torch.dtype, how: str) -> torch.dtype:
    if dtype.is_floating_point:
        return torch.float64
    ordered = how in ("max", "min")
    if dtype.is_complex and not ordered:
        return torch.complex128
    if dtype.is_complex or how == "avg" or (dtype is torch.uint64 and ordered):
        raise UsageError(f"terms of {dtype} have no {how}")
    # Sums and products that leave the dtype wrap around, as they do in a collective.
    return torch.int64


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
