"""The shortest description that holds all wrong elements of a tensor."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import TYPE_CHECKING

import numpy as np
import torch

from paritas.core.diagnosis.boxes import MOST_ELEMENTS, Box, boxes
from paritas.core.diagnosis.case import outstanding_limit, same, widen
from paritas.core.diagnosis.marks import (
    SAMPLE,
    TILES,
    Bools,
    Counts,
    Feature,
    IndexSpan,
    Marks,
    Nonzeros,
    Walk,
    bits_of_choice,
    bits_of_number,
    box_indices,
    count_marks,
    fit_to_box,
    group_size,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from paritas.core.diagnosis.case import Case


# --- Descriptions and their cost ------------------------------------------------------------------

_BITS_FLAT = 7.0
_FILLED = 0.999
# Descriptions this close to the best are counted exactly if they were estimated.
_CLOSE = 40.0


@dataclasses.dataclass(frozen=True, eq=False)
class Description:
    """A set of elements with a short description.

    Attributes:
        kind: `product` of coordinates, `flat` range, or by the reference's values: `zeros` or
            `padding`.
        bits: the cost of naming it.
        size: the approximate number of visible elements.
        spans: one for each coordinate of a product.
        low: first flat index.
        high: one after the last.
        mask: of a padding.
        axis: of a padding.
    """

    kind: str
    bits: float
    size: float
    coordinates: tuple[Coordinate, ...] = ()
    spans: tuple[IndexSpan, ...] = ()
    low: int = 0
    high: int = 0
    mask: Bools | None = None
    axis: int = 0

    @property
    def is_all(self) -> bool:
        """Whether it is the whole tensor."""
        return self.kind == "product" and all(span.kind == "all" for span in self.spans)

    def cost(self, number: int) -> float:
        """Bits for the region and for which of its elements are wrong."""
        return self.bits + bits_of_choice(max(self.size, number), number)

    def elements_in(self, box: Box) -> Bools:
        """Its elements in a box, as a mask that broadcasts to it."""
        if self.mask is not None:
            return self.mask
        if self.kind == "zeros":
            return np.asarray((box.case.right == 0).numpy())
        if self.kind == "flat":
            flat = np.arange(box.offset, box.offset + box.size).reshape(box.case.shape)
            return np.asarray((flat >= self.low) & (flat < self.high))
        out = np.ones((1,) * len(box.case.shape), dtype=np.bool_)
        for coordinate, span in zip(self.coordinates, self.spans, strict=True):
            if span.kind != "all":
                out = out & coordinate.chosen_in(span, box)
        return out


def shortest_description(
    marks: Marks, shards: tuple[int, ...] = (), others: tuple[Description, ...] = ()
) -> Description:
    """The cheapest description of the wrong elements; there must be at least one.

    Args:
        others: further descriptions that hold all of them.
    """
    visible = list(others)
    for coordinates in coordinate_systems(marks, shards):
        visible.append(_cheapest(coordinates, marks))
        if marks.number >= _FILLED * visible[-1].size and not visible[-1].is_all:
            break  # no other form can be fuller
    else:
        visible += _flat_ranges(marks)
    if marks.hides:
        least = min(description.cost(marks.number) for description in visible)
        close = [
            description
            for description in visible
            if description.cost(marks.number) <= least + _CLOSE
        ]
        visible = _count_visible(close, marks)
    return min(visible, key=lambda description: description.cost(marks.number))


def _count_visible(descriptions: list[Description], marks: Marks) -> list[Description]:
    """The descriptions with their visible elements counted instead of estimated."""
    return [
        description
        if description.kind == "padding"
        else dataclasses.replace(description, size=size)
        for description, size in zip(descriptions, marks.visible_in(descriptions), strict=True)
    ]


def single_element(marks: Marks) -> Description:
    """The one wrong element, by its index."""
    coordinate_system = next(coordinate_systems(marks))
    # The second span of an axis with several indices is the index.
    spans = tuple(coordinate.spans[:2][-1] for coordinate in coordinate_system)
    return Description(
        "product", sum(span.bits for span in spans), 1.0, tuple(coordinate_system), spans
    )


def whole_tensor(marks: Marks) -> Description:
    """The whole tensor: the description that explains nothing."""
    return Description("product", 0.5 * len(marks.shape), marks.total)


def _cheapest(coordinates: list[Coordinate], marks: Marks) -> Description:
    """Coordinate descent from the tightest and from the loosest choice."""
    shares = [[c.share(span) for span in c.spans] for c in coordinates]
    base = sum(c.bits for c in coordinates)

    def describe_choice(choice: list[int]) -> Description:
        size = marks.total * math.prod(shares[i][index] for i, index in enumerate(choice))
        spans = tuple(c.spans[index] for c, index in zip(coordinates, choice, strict=True))
        bits = base + sum(span.bits for span in spans)
        return Description("product", bits, size, tuple(coordinates), spans)

    tight = [int(np.argmin(share)) for share in shares]
    return min(
        (
            _descend(start, shares, describe_choice, marks.number)
            for start in (tight, [0] * len(shares))
        ),
        key=lambda description: description.cost(marks.number),
    )


def _descend(
    start: list[int],
    shares: list[list[float]],
    describe: Callable[[list[int]], Description],
    number: int,
) -> Description:
    choice = list(start)
    while True:
        before = list(choice)
        for position, options in enumerate(shares):
            costs = [
                describe([*choice[:position], index, *choice[position + 1 :]]).cost(number)
                for index in range(len(options))
            ]
            choice[position] = int(np.argmin(costs))
        if choice == before:
            return describe(choice)


def _flat_ranges(marks: Marks) -> list[Description]:
    """A range in memory order, as left by a kernel over the flattened tensor."""
    if len(marks.shape) < 2:  # noqa: PLR2004  (the axis itself)
        return []
    size = marks.size
    low, high = marks.flat_bounds
    descriptions = []
    for first, stop in {(low, high), (0, high), (low, size)} - {(0, size)}:
        one_end = first == 0 or stop == size
        named = min(math.log2(size), bits_of_number(stop - first))
        bits = _BITS_FLAT + (named if one_end else 1 + math.log2(size * (size + 1) / 2))
        descriptions.append(Description("flat", bits, stop - first, low=first, high=stop))
    return _count_visible(descriptions, marks) if marks.hides else descriptions


# --- Which elements show a fault ------------------------------------------------------------------

_SAMPLE = 1 << 16


@dataclasses.dataclass
class _Extremes:
    """Figures collected while the wrong elements are counted.

    Attributes:
        distance: the largest finite error.
        z: the same in multiples of the noise; infinite if a value is not finite.
        any_given: whether a wrong element is finite in the candidate.
        any_pair: whether one is finite on both sides.
    """

    distance: float = 0.0
    z: float = 0.0
    any_given: bool = False
    any_pair: bool = False

    def take(self, case: Case, wrong: Tensor) -> None:
        if not bool(wrong.any()):  # only needed if nothing is beyond the noise
            self.distance = max(self.distance, float(case.distance.max()))
        self.z = max(self.z, float(case.z.max()))
        finite = torch.isfinite(case.given) & wrong
        self.any_given |= bool(finite.any())
        self.any_pair |= bool((finite & torch.isfinite(case.right)).any())


@dataclasses.dataclass(frozen=True, eq=False)
class CaseSurvey:
    """The counts of a case, which is read a few times, box by box.

    Attributes:
        most: a tensor with no more elements than this is one box.
    """

    case: Case
    most: int = MOST_ELEMENTS

    @property
    def is_one_box(self) -> bool:
        """Whether it is small enough to keep its masks."""
        return self.case.reference.numel() <= self.most

    @functools.cached_property
    def base(self) -> Marks:
        """The wrong elements, as in `Case.wrong`."""
        return self._found[0]

    @functools.cached_property
    def scale(self) -> float:
        """Rms of the finite right values, as in `Case.allowed`."""
        return math.sqrt(self._sums[0] / max(1, self.case.reference.numel()))

    def reaches(self, level: float) -> bool:
        """Whether any element is beyond a level."""
        return self.base.number > 0 and self._extremes.z > level

    def share_beyond(self, level: float) -> float:
        """Share of the visible elements that are not wrong, but beyond a level."""
        base, more = self.base, self.beyond(level)
        number = more.number - (more.at_zeros if base.hides else 0)
        residual = base.total - base.number
        return (number - base.number) / residual if residual else 0.0

    @property
    def any_finite(self) -> bool:
        """Whether any wrong element is finite in the candidate."""
        return self.base.number > 0 and self._extremes.any_given

    def are_lost(self) -> bool:
        """Whether every wrong element is not finite on one side."""
        return self.base.number > 0 and not self._extremes.any_pair

    def beyond(self, level: float) -> Marks:
        """The elements off by more than this multiple of their noise, and all wrong ones."""
        if level not in self._levels:
            self._levels[level] = self._count_masked(functools.partial(self._is_beyond, level))
        return self._levels[level]

    def differing(self) -> Marks:
        """The elements that are not equal to the reference bit for bit."""

        def mask(case: Case) -> Tensor:
            return self._is_wrong(case) | ~same(case.candidate.cpu(), case.reference.cpu())

        return self._count_masked(mask)

    def chance_of_equality(self) -> float:
        """The probability that two random values of the tensor are equal."""
        size = self.case.reference.numel()
        some = np.unravel_index(np.arange(0, size, max(1, size // _SAMPLE)), self.case.shape)
        right = self.case.reference if self.case.arbiter is None else self.case.arbiter
        values = widen(right[tuple(map(torch.from_numpy, some))])
        _, counts = np.unique(values.numpy(), return_counts=True)
        return float(np.square(counts / len(values)).sum())

    def marked_out(self, marks: Marks) -> tuple[Description, ...]:
        """Regions of the reference's values that hold all wrong elements.

        Padding is looked for in a single box only, since otherwise a line may be in several.
        """
        zeros = self._sums[1]
        descriptions = []
        if zeros < marks.size and marks.at_zeros == marks.number:
            descriptions.append(Description("zeros", _BITS_ZEROS, float(zeros)))
        if self.is_one_box:
            ((box, wrong),) = marks.walk()
            descriptions += _paddings(wrong, box.case.right.numpy())
        return tuple(descriptions)

    @functools.cached_property
    def _levels(self) -> dict[float, Marks]:
        return {}

    @functools.cached_property
    def _sums(self) -> tuple[float, int]:
        """Sum of squares of the right values of a large tensor, and number of zeros."""
        squares, zeros = 0.0, 0
        for box in self._boxes():
            if not self.is_one_box:
                squares += float(box.case.magnitude.square().sum())
            zeros += int((box.case.right == 0).sum())
        return squares, zeros

    @functools.cached_property
    def _nonzeros(self) -> Nonzeros:
        walk = self._walk(lambda case: case.right != 0)
        return Nonzeros(self.case.shape, walk, self._sums[1])

    @functools.cached_property
    def _found(self) -> tuple[Marks, _Extremes, Callable[[Case], Tensor]]:
        """The wrong elements, the extremes, and the function that finds them in a box."""
        extremes = _Extremes()

        def is_beyond(case: Case) -> Tensor:
            return case.beyond

        marks = self._count_masked(is_beyond, extremes)
        if marks.number:
            return marks, extremes, is_beyond
        # No element is beyond its noise by itself, which is known only now.
        limit = outstanding_limit(extremes.distance)

        def is_outstanding(case: Case) -> Tensor:
            return case.distance > limit

        return self._count_masked(is_outstanding, extremes), extremes, is_outstanding

    @property
    def _extremes(self) -> _Extremes:
        return self._found[1]

    def _is_beyond(self, level: float, case: Case) -> Tensor:
        return self._is_wrong(case) | (case.z > level)

    def _is_wrong(self, case: Case) -> Tensor:
        return self._found[2](case)

    def _count_masked(
        self, mask: Callable[[Case], Tensor], extremes: _Extremes | None = None
    ) -> Marks:
        def mask_and_watch(case: Case) -> Tensor:
            wrong = mask(case)
            if extremes is not None:
                extremes.take(case, wrong)
            return wrong

        marks = count_marks(self.case.shape, self._walk(mask_and_watch), self._nonzeros)
        return marks if self.is_one_box else dataclasses.replace(marks, walk=self._walk(mask))

    def _walk(self, mask: Callable[[Case], Tensor]) -> Walk:
        """Iterates over the boxes and their masks; the mask of a single box is computed once."""

        def walk() -> Iterator[tuple[Box, Bools]]:
            for box in self._boxes(self.scale):
                yield box, np.asarray(mask(box.case).numpy())

        if not self.is_one_box:
            return walk
        walked = list(walk())
        return lambda: iter(walked)

    def _boxes(self, scale: float | None = None) -> Iterator[Box]:
        if self.is_one_box:
            return iter([Box((), 0, 0, self.case)] if self.case.reference.numel() else [])
        return boxes(self.case, scale)


# --- Coordinates: axes, diagonals and frames ------------------------------------------------------

# Hypotheses are tested on counts along one coordinate, so a large tensor is read a few times and
# not once per hypothesis. Coordinates of two axes are first tested on a sample.

_BITS_PAIR = 4.0
_BITS_TILED = 7.0
_LEAST_LEFT_OUT = 0.01


@dataclasses.dataclass(frozen=True, eq=False)
class Coordinate:
    """One coordinate of the elements.

    Attributes:
        name: `axis`, `diagonal` or `frame`.
        axes: the axes of the tensor it is computed from.
        shares: share of the visible elements at each value; None if all are equal.
        spans: the spans that hold the wrong elements.
        feature: computes its value from the indices of two axes; None for an axis itself.
        tile: the tile size of a frame around each tile.
        bits: the cost of naming the coordinate.
    """

    name: str
    axes: tuple[int, ...]
    shares: np.ndarray | None
    spans: list[IndexSpan]
    feature: Feature | None = None
    tile: int = 0
    bits: float = 0.0

    def share(self, span: IndexSpan) -> float:
        """Share of the visible elements at a span."""
        if self.shares is None:
            return span.number / self.spans[0].number
        return float(self.shares[span.chosen].sum())

    def chosen_in(self, span: IndexSpan, box: Box) -> Bools:
        """The elements of a box at a span, in a shape that broadcasts to it."""
        first, *second = (box_indices(box, axis) for axis in self.axes)
        values = first if self.feature is None else self.feature(first[:, None], second[0][None])
        return fit_to_box(span.holds(values), box, self.axes)


def coordinate_systems(marks: Marks, shards: tuple[int, ...] = ()) -> Iterator[list[Coordinate]]:
    """Systems of coordinates, the tensor's own axes first."""
    shape = marks.shape
    ranges = []
    for axis in range(len(shape)):
        spans = marks.spans(axis, shards)
        # If no choice of each value is kept, all values have the same share.
        even = not marks.hides or not len(spans[0].chosen)
        ranges.append(Coordinate("axis", (axis,), None if even else marks.shares(axis), spans))
    yield ranges
    for last in range(1, len(shape)):
        pair = (last - 1, last)
        others = [c for c in ranges if c.axes[0] not in pair]
        for joint in _pairs(marks, pair):
            yield [*others, joint]


def _pairs(marks: Marks, axes: tuple[int, int]) -> Iterator[Coordinate]:
    rows, columns = (marks.shape[axis] for axis in axes)
    # In a narrow tensor every shape is a box; a long one has too many values to count.
    if min(rows, columns) < 3 or group_size(rows + columns) > 1:  # noqa: PLR2004
        return

    def diagonal(row: Counts, column: Counts) -> Counts:
        return np.asarray(column - row + (rows - 1))

    yield from _paired_coordinate(marks, axes, "diagonal", diagonal, 0)
    for tile in (0, 8, *TILES):
        if 2 * tile > max(rows, columns):
            break

        def frame(row: Counts, column: Counts, tile: int = tile) -> Counts:
            height, width = (tile, tile) if tile else (rows, columns)
            up, left = row % height, column % width
            down, right = height - 1 - up, width - 1 - left
            return np.asarray(np.minimum(np.minimum(up, down), np.minimum(left, right)))

        yield from _paired_coordinate(marks, axes, "frame", frame, tile)


def _paired_coordinate(
    marks: Marks, axes: tuple[int, int], name: str, feature: Feature, tile: int
) -> Iterator[Coordinate]:
    """The coordinate, if the wrong elements keep to a part of it."""
    rows, columns = (marks.shape[axis] for axis in axes)
    some = feature(marks.sample[axes[0]], marks.sample[axes[1]])
    low, high = int(some.min()), int(some.max())
    limit = (
        rows + columns - 1 if name == "diagonal" else (min(tile or rows, tile or columns) + 1) // 2
    )
    if (low == 0 or name == "frame") and high == limit - 1:
        return
    low = 0 if name == "frame" else low
    if rows * columns > SAMPLE and _covers(feature, rows, columns, low, high):
        return
    counts, sizes = marks.counts_of(axes, feature, limit)
    active = np.flatnonzero(counts)
    find = _diagonal_spans if name == "diagonal" else _frame_spans
    spans = list(find(int(active[0]), int(active[-1]), rows - 1, len(counts)))
    bits = _BITS_TILED if tile else _BITS_PAIR
    yield Coordinate(name, axes, sizes / max(1.0, sizes.sum()), spans, feature, tile, bits)


def _covers(feature: Feature, rows: int, columns: int, low: int, high: int) -> bool:
    """Whether nearly all elements lie between two values, which then say nothing."""
    draw = np.random.default_rng(1)
    some = feature(draw.integers(rows, size=SAMPLE), draw.integers(columns, size=SAMPLE))
    outside = np.count_nonzero((some < low) | (some > high))
    return bool(outside < _LEAST_LEFT_OUT * SAMPLE)


def _diagonal_spans(low: int, high: int, middle: int, size: int) -> Iterator[IndexSpan]:
    """One diagonal, all from one to a corner, or a band around the main one."""
    where = np.arange(size)
    first, last = low - middle, high - middle
    from_low, to_high = (2 + bits_of_number(2 * abs(end) + 1) for end in (first, last))
    if low == high:
        yield IndexSpan("index", where == low, from_low, first, first + 1)
    else:
        bits = from_low + to_high - (3 if first == -last else 1)
        yield IndexSpan("range", (where >= low) & (where <= high), bits, first, last + 1)
    if low > 0:
        yield IndexSpan("above", where >= low, from_low, first, size - middle)
    if high < size - 1:
        yield IndexSpan("below", where <= high, to_high, -middle, last + 1)


def _frame_spans(low: int, high: int, middle: int, size: int) -> Iterator[IndexSpan]:
    """The outermost few."""
    del low, middle
    bits = 2 + bits_of_number(high + 1)
    yield IndexSpan("border", np.arange(size) <= high, bits, width=high + 1)


# --- Regions defined by the reference's own values ------------------------------------------------

_BITS_PADDING = 5.0
_BITS_ZEROS = 4.0


def _paddings(wrong: Bools, right: np.ndarray) -> Iterator[Description]:
    """Padding at the ends of lines, if it holds all wrong elements."""
    for axis in reversed(range(right.ndim)):
        if right.shape[axis] < 3 or not _ends_alike(wrong, right, axis):  # noqa: PLR2004
            continue
        padded = _padding(right, axis)
        if not padded.all() and not bool((wrong & ~padded).any()):
            size = float(np.count_nonzero(padded))
            yield Description("padding", _BITS_PADDING, size, mask=padded, axis=axis)


def _ends_alike(wrong: Bools, right: np.ndarray, axis: int) -> bool:
    """Whether each line with a wrong element ends with two equal values: a cheap first test."""
    last, before = right.take(-1, axis), right.take(-2, axis)
    alike = same(last, before)
    return bool(alike[wrong.any(axis=axis)].all()) and not bool(alike.all() and alike.size == 1)


def _padding(right: np.ndarray, axis: int) -> Bools:
    """Where a line has one value to its end, for at least two elements."""
    last = np.take(right, [-1], axis=axis)
    backwards = np.flip(same(right, last), axis=axis)
    padded = np.flip(np.logical_and.accumulate(backwards, axis=axis), axis=axis)
    alone = ~np.take(padded, [-2], axis=axis)
    return np.asarray(padded & ~alone)
