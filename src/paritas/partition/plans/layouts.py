"""Which part of a parameter a plain tensor is, in a model that was split by hand.

Nothing says it but the numbers: before the first step a rank's part equals the slice that was cut
out. Where several slices are equal (a bias of zeros) the natural order of the ranks decides, or the
weight beside it.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from paritas.partition.plans.program import Program
    from paritas.partition.plans.traces import Piece, Trace

__all__ = ["Slots", "find_slots", "natural_chunk"]

_MOST_ROWS = 1 << 16


@dataclasses.dataclass(frozen=True)
class Slots:
    """Where in the whole one rank's plain part lies.

    Attributes:
        where: a slice or the positions along each dim.
        dim: the dim that is split; None if several are.
        chunk: which of the equal parts along `dim` it is, counted from 0; None if it is not one.
        natural: which one a rank of this number would be expected to have.
        proven: whether the initial values say so.
        ambiguous: whether they would fit elsewhere just as well.
    """

    where: tuple[slice | Tensor, ...]
    dim: int | None = None
    chunk: int | None = None
    natural: int | None = None
    proven: bool = False
    ambiguous: bool = False

    def fits(self, value: Tensor, shape: tuple[int, ...]) -> bool:
        """Whether a tensor can lie there."""
        if value.dim() != len(self.where) or len(shape) != len(self.where):
            return False
        lengths = [w.stop - w.start if isinstance(w, slice) else len(w) for w in self.where]
        return list(value.shape) == lengths


def find_slots(
    program: Program, reference: dict[str, Piece], ranks: list[Trace]
) -> dict[str, dict[int, Slots]]:
    """Name of a parameter or buffer -> rank -> where its part lies, for those that are parts."""
    found: dict[str, dict[int, Slots]] = {}
    for name, whole in reference.items():
        for trace in ranks:
            piece = trace.initial.get(name)
            if piece is None or piece.placements is not None:
                continue
            slots = _find(program, trace.rank, whole.local, piece.local)
            if slots is not None:
                found.setdefault(name, {})[trace.rank] = slots
    for name in found:
        _follow_the_weight(name, found, reference)
    return found


def natural_chunk(program: Program, rank: int, parts: int) -> int:
    """Which of so many equal parts a rank has by its place: along the last axis of that size."""
    coordinate = program.coordinate(rank)
    for size, place in reversed(list(zip(program.mesh.values(), coordinate, strict=True))):
        if size == parts:
            return place
    return rank % parts if parts else 0


def _find(program: Program, rank: int, whole: Tensor, local: Tensor) -> Slots | None:
    """Where `local` lies; None if it is the whole, or no part of it."""
    if whole.dim() != local.dim() or whole.shape == local.shape or not local.numel():
        return None
    if any(part > length for part, length in zip(local.shape, whole.shape, strict=True)):
        return None
    dims = [d for d in range(whole.dim()) if local.shape[d] < whole.shape[d]]
    if len(dims) > 1:
        return _block(whole, local, dims)
    dim = dims[0]
    return (
        _chunk(program, rank, whole, local, dim)
        or _offset(whole, local, dim)
        or _rows(whole, local, dim)
        or _by_order(program, rank, whole, local, dim)
    )


def _along(whole: Tensor, dim: int, where: slice | Tensor) -> tuple[slice | Tensor, ...]:
    full: list[slice | Tensor] = [slice(0, n) for n in whole.shape]
    full[dim] = where
    return tuple(full)


def _chunk(program: Program, rank: int, whole: Tensor, local: Tensor, dim: int) -> Slots | None:
    """One of the equal parts."""
    length = local.shape[dim]
    parts, rest = divmod(whole.shape[dim], length)
    if rest:
        return None
    equal = [n for n in range(parts) if torch.equal(whole.narrow(dim, n * length, length), local)]
    if not equal:
        return None
    natural = natural_chunk(program, rank, parts)
    chosen = natural if natural in equal else equal[0]
    where = _along(whole, dim, slice(chosen * length, (chosen + 1) * length))
    return Slots(where, dim, chosen, natural, proven=True, ambiguous=len(equal) > 1)


def _offset(whole: Tensor, local: Tensor, dim: int) -> Slots | None:
    """A slice that begins anywhere: uneven parts."""
    length = local.shape[dim]
    if whole.shape[dim] > _MOST_ROWS:
        return None
    begins = (whole == local.narrow(dim, 0, 1)).movedim(dim, 0)
    begins = begins.reshape(len(begins), -1).all(1)
    places = [
        begin
        for begin in begins.nonzero().flatten().tolist()
        if begin + length <= whole.shape[dim]
        and torch.equal(whole.narrow(dim, begin, length), local)
    ]
    if len(places) != 1:
        return None
    return Slots(_along(whole, dim, slice(places[0], places[0] + length)), dim, proven=True)


def _rows(whole: Tensor, local: Tensor, dim: int) -> Slots | None:
    """Rows chosen from anywhere, such as a part of each of queries, keys and values."""
    rows, mine = (t.movedim(dim, 0).reshape(t.shape[dim], -1) for t in (whole, local))
    if len(rows) > _MOST_ROWS:
        return None
    places: dict[bytes, int] = {}
    for number, row in enumerate(rows):
        key = _bytes(row)
        if key in places:
            return None  # two alike: the numbers do not say which
        places[key] = number
    chosen = [places.get(_bytes(row), -1) for row in mine]
    if min(chosen) < 0:
        return None
    return Slots(_along(whole, dim, torch.tensor(chosen)), dim, proven=True)


def _bytes(row: Tensor) -> bytes:
    return row.contiguous().view(torch.uint8).numpy().tobytes()


def _by_order(program: Program, rank: int, whole: Tensor, local: Tensor, dim: int) -> Slots | None:
    """The part that the rank's number says; its initial values are then found to be others."""
    length = local.shape[dim]
    parts, rest = divmod(whole.shape[dim], length)
    if rest:
        return None
    natural = natural_chunk(program, rank, parts)
    where = _along(whole, dim, slice(natural * length, (natural + 1) * length))
    return Slots(where, dim, natural, natural)


def _block(whole: Tensor, local: Tensor, dims: list[int]) -> Slots | None:
    """Split along several dims at once: a block, by its values."""
    counts = [divmod(whole.shape[d], local.shape[d]) for d in dims]
    if any(rest for _, rest in counts):
        return None
    for chosen in itertools.product(*(range(parts) for parts, _ in counts)):
        where = [slice(0, n) for n in whole.shape]
        for d, n in zip(dims, chosen, strict=True):
            where[d] = slice(n * local.shape[d], (n + 1) * local.shape[d])
        if torch.equal(whole[tuple(where)], local):
            return Slots(tuple(where), proven=True)
    return None


def _follow_the_weight(
    name: str, found: dict[str, dict[int, Slots]], reference: dict[str, Piece]
) -> None:
    """Where a bias of equal numbers would fit anywhere, it is split as the weight beside it is."""
    path, _, kind = name.rpartition(".")
    beside = found.get(f"{path}.weight" if path else "weight")
    if kind == "weight" or beside is None:
        return
    length = reference[name].local.shape[0]
    for rank, slots in found[name].items():
        other = beside.get(rank)
        doubtful = slots.ambiguous or not slots.proven
        if other is None or not doubtful or slots.dim != 0 or other.dim != 0:
            continue
        weight = reference[f"{path}.weight" if path else "weight"].local
        if weight.shape[0] == length:
            where = (other.where[0], *slots.where[1:])
            found[name][rank] = dataclasses.replace(
                slots, where=where, chunk=other.chunk, natural=other.natural
            )
