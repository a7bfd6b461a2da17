"""Stretches of a dimension: which part of a whole a rank holds."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, NamedTuple

from paritas.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

__all__ = ["Segment", "Where", "chunk", "fills", "lay_out", "length", "whole"]


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


def chunk(
    segments: Sequence[Segment], count: int, index: int, pieces: int = 1
) -> tuple[Segment, ...]:
    """What one of so many ranks holds of a part, split as `torch.chunk` does.

    Args:
        pieces: the part is cut into so many first, and each of these is split.
    """
    total = length(segments)
    piece = -(-total // pieces)
    kept: list[Segment] = []
    for begin in range(0, total, piece) if total else ():
        end = min(begin + piece, total)
        width = -(-(end - begin) // count)
        first = min(begin + width * index, end)
        kept += _between(segments, first, min(first + width, end))
    return _from_zero(kept)


def _between(segments: Sequence[Segment], begin: int, end: int) -> list[Segment]:
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
    placed: dict[tuple[int, ...], tuple[Segment, ...]] = {}
    for rank, (parts, size) in inner.items():
        begin = sum(sizes[: ranks.index(rank)])
        for key, segments in parts.items():
            if orders[0] == "zigzag":
                moved = _folded(segments, size // 2, rank, len(ranks))
            else:
                moved = [one._replace(target=one.target + begin) for one in segments]
            placed[rank, *key] = _from_zero(moved)
    return placed, sum(sizes)


def _folded(segments: Iterable[Segment], half: int, rank: int, ranks: int) -> list[Segment]:
    """A rank's first half is chunk number `rank`, its second the one as far from the end."""
    moved = []
    for one in segments:
        for begin, chunk_number in ((0, rank), (half, 2 * ranks - 1 - rank)):
            first = max(one.target, begin)
            last = min(one.target + one.length, begin + half)
            if first < last:
                source = one.source + first - one.target
                moved.append(Segment(source, chunk_number * half + first - begin, last - first))
    return moved


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
        _tiles(itertools.chain.from_iterable(segments), extent)
        for segments, extent in zip(per_axis, shape, strict=True)
    )


def _tiles(segments: Iterable[Segment], extent: int) -> bool:
    at = 0
    for segment in sorted(segments, key=lambda one: one.target):
        if segment.target != at:
            return False
        at += segment.length
    return at == extent
