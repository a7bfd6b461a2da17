"""The shortest description that holds all wrong elements."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator

import numpy as np

from paritas.diagnosis.regions.coordinates import Coordinate, systems
from paritas.diagnosis.regions.marks import Marked, Marks
from paritas.diagnosis.regions.spans import Bools, Span, bits_of_choice, bits_of_number

__all__ = ["Found", "plain", "search", "single"]

_BITS_FLAT = 7.0
_FILLED = 0.999
# Those so close to the best are counted exactly, where they were estimated.
_CLOSE = 40.0


@dataclasses.dataclass(frozen=True, eq=False)
class Found:
    """A set of elements with a short description.

    Attributes:
        kind: `product` of coordinates, `flat` range, or what a reference's values say (`padding`).
        bits: to name it.
        size: how many visible elements it has, about.
        coordinates: of a product.
        spans: one for each of them.
        low: first flat index.
        high: one behind the last.
        mask: of the reference's values.
        axis: of a padding.
    """

    kind: str
    bits: float
    size: float
    coordinates: tuple[Coordinate, ...] = ()
    spans: tuple[Span, ...] = ()
    low: int = 0
    high: int = 0
    mask: Bools | None = None
    axis: int = 0

    @property
    def is_all(self) -> bool:
        """Whether it is nothing but the whole tensor."""
        return self.kind == "product" and all(span.kind == "all" for span in self.spans)

    def cost(self, number: int) -> float:
        """Bits for the region and for which of its elements are wrong."""
        return self.bits + bits_of_choice(max(self.size, number), number)

    def elements(self, shape: tuple[int, ...]) -> Bools:
        """As a mask."""
        if self.mask is not None:
            return self.mask
        out = np.ones(shape, dtype=np.bool_)
        if self.kind == "flat":
            out.reshape(-1)[: self.low] = False
            out.reshape(-1)[self.high :] = False
        for coordinate, span in zip(self.coordinates, self.spans, strict=True):
            if span.kind != "all":
                out &= coordinate.chosen(span, shape)
        return out


def search(marks: Marked, shards: tuple[int, ...] = (), others: tuple[Found, ...] = ()) -> Found:
    """The cheapest description of the wrong elements, of which there is at least one.

    Args:
        others: descriptions from elsewhere, that hold all of them too.
    """
    found = list(others)
    for coordinates in systems(marks, shards):
        found.append(_cheapest(coordinates, marks))
        if marks.number >= _FILLED * found[-1].size and not found[-1].is_all:
            break  # no other form can be fuller
    else:
        found += _flat(marks)
    if isinstance(marks, Marks) and marks.visible is not None:
        least = min(one.cost(marks.number) for one in found)
        close = [one for one in found if one.cost(marks.number) <= least + _CLOSE]
        found = [_counted(one, marks.visible) for one in close]
    return min(found, key=lambda one: one.cost(marks.number))


def _counted(found: Found, visible: Bools) -> Found:
    if found.kind != "product" or found.is_all:
        return found
    size = int(np.count_nonzero(found.elements(visible.shape) & visible))
    return dataclasses.replace(found, size=size)


def single(marks: Marked) -> Found:
    """The one wrong element, by its index."""
    own = next(systems(marks))
    # The first that is not the whole axis is the index, where there are several.
    spans = tuple(coordinate.spans[:2][-1] for coordinate in own)
    return Found("product", sum(span.bits for span in spans), 1.0, tuple(own), spans)


def plain(marks: Marked) -> Found:
    """The whole tensor, as the description that explains nothing."""
    return Found("product", 0.5 * len(marks.shape), marks.total)


def _cheapest(coordinates: list[Coordinate], marks: Marked) -> Found:
    """By going along the coordinates in turn, from the tightest and from the loosest choice."""
    shares = [[c.share(span) for span in c.spans] for c in coordinates]
    base = sum(c.bits for c in coordinates)

    def found(choice: list[int]) -> Found:
        size = marks.total * math.prod(shares[i][one] for i, one in enumerate(choice))
        spans = tuple(c.spans[one] for c, one in zip(coordinates, choice, strict=True))
        bits = base + sum(span.bits for span in spans)
        return Found("product", bits, size, tuple(coordinates), spans)

    tight = [int(np.argmin(one)) for one in shares]
    return min(
        (_descend(start, shares, found, marks.number) for start in (tight, [0] * len(shares))),
        key=lambda one: one.cost(marks.number),
    )


def _descend(
    start: list[int],
    shares: list[list[float]],
    found: Callable[[list[int]], Found],
    number: int,
) -> Found:
    choice = list(start)
    while True:
        before = list(choice)
        for place, options in enumerate(shares):
            costs = [
                found([*choice[:place], one, *choice[place + 1 :]]).cost(number)
                for one in range(len(options))
            ]
            choice[place] = int(np.argmin(costs))
        if choice == before:
            return found(choice)


def _flat(marks: Marked) -> Iterator[Found]:
    """A range in memory order, as a kernel over a flattened tensor would leave."""
    if len(marks.shape) < 2:  # noqa: PLR2004  (the axis itself)
        return
    size = marks.size
    low, high = marks.flat_bounds
    for first, stop in {(low, high), (0, high), (low, size)} - {(0, size)}:
        one_end = first == 0 or stop == size
        named = min(math.log2(size), bits_of_number(stop - first))
        bits = _BITS_FLAT + (named if one_end else 1 + math.log2(size * (size + 1) / 2))
        held = marks.visible_between(first, stop)
        yield Found("flat", bits, held, low=first, high=stop)
