"""A small picture of a wrong value: reference, candidate and difference along two axes."""

from __future__ import annotations

import math

import msgspec

# At most this many cells down and across, so that a picture takes a few kilobytes of JSON.
MOST_ROWS, MOST_COLUMNS = 32, 64

Grid = tuple[tuple[float, ...], ...]
_AXES = ("down", "across")


class Picture(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Reference, candidate and difference over the axes along which a value is wrong.

    A cell stands for one or more neighbouring elements. It shows the one with the largest
    difference among them: its reference, its candidate and candidate - reference. Numbers have
    four digits; complex numbers are shown by their modulus.

    Attributes:
        shape: of the whole tensor.
        axes: the axes that are shown, the vertical one first; one for a single line, none for a
            scalar.
        index: where the other axes are cut, by axis: at the largest difference. It is None for the
            axes that are shown.
        reference: the cells, row by row.
        candidate: the same.
        difference: the same; not finite if only one side is finite.
        lifted: whether the values are those of the float64 runs.
    """

    shape: tuple[int, ...]
    axes: tuple[int, ...]
    index: tuple[int | None, ...]
    reference: Grid
    candidate: Grid
    difference: Grid
    lifted: bool = False

    def __post_init__(self) -> None:
        # Files may come from anywhere, and what draws a picture relies on its shape.
        grids = (self.reference, self.candidate, self.difference)
        sizes = {(len(grid), *map(len, grid)) for grid in grids}
        size = next(iter(sizes))
        fits = len(sizes) == 1 and len(size) > 1 and len(set(size[1:])) == 1 and size[1] > 0
        axes = all(0 <= axis < len(self.shape) for axis in self.axes)
        if (
            not fits
            or not axes
            or len(self.axes) > len(_AXES)
            or len(self.index) != len(self.shape)
        ):
            raise ValueError("the grids, axes and shape of a picture do not fit together")
        if len(self.axes) < len(_AXES) and size[0] > 1:
            raise ValueError("a picture of fewer than two axes has one row")

    @property
    def slice_text(self) -> str:
        """The slice that is shown, as an index: `[0, :, 3, :]`."""
        return f"[{', '.join(':' if at is None else str(at) for at in self.index)}]"

    @property
    def value_range(self) -> tuple[float, float]:
        """The smallest and largest finite value of reference and candidate; (0, 0) without any."""
        cells = [cell for grid in (self.reference, self.candidate) for row in grid for cell in row]
        finite = [cell for cell in cells if math.isfinite(cell)] or [0.0]
        return min(finite), max(finite)

    @property
    def largest_difference(self) -> float:
        """The largest finite |difference|; 0 without any."""
        sizes = [abs(cell) for row in self.difference for cell in row]
        return max((size for size in sizes if math.isfinite(size)), default=0.0)

    @property
    def nonfinite(self) -> int:
        """The number of cells with a NaN or an infinity on either side."""
        pairs = zip(self.reference, self.candidate, strict=True)
        return sum(
            not (math.isfinite(left) and math.isfinite(right))
            for lines in pairs
            for left, right in zip(*lines, strict=True)
        )


def shrink_picture(picture: Picture, rows: int, columns: int) -> Picture:
    """The same picture with at most this many cells down and across.

    A cell again shows the one with the largest difference among those that it stands for.
    """
    grid = picture.difference
    if len(grid) <= rows and len(grid[0]) <= columns:
        return picture
    down, across = _spans(len(grid), rows), _spans(len(grid[0]), columns)
    picked = [
        [
            max(
                ((i, j) for i in lines for j in places),
                key=lambda at: _badness(grid[at[0]][at[1]]),
            )
            for places in across
        ]
        for lines in down
    ]

    def pick(cells: Grid) -> Grid:
        return tuple(tuple(cells[i][j] for i, j in row) for row in picked)

    return msgspec.structs.replace(
        picture,
        reference=pick(picture.reference),
        candidate=pick(picture.candidate),
        difference=pick(picture.difference),
    )


def _spans(extent: int, most: int) -> list[range]:
    cells = min(extent, most)
    return [range(n * extent // cells, (n + 1) * extent // cells) for n in range(cells)]


def _badness(difference: float) -> float:
    return abs(difference) if math.isfinite(difference) else math.inf


def axis_words(picture: Picture) -> str:
    """The axes in words: `down: axis 1 (0 to 31), across: axis 3 (0 to 511)`."""
    if not picture.axes:
        return "a single number"
    names = _AXES[-len(picture.axes) :]
    sizes = [len(picture.reference), len(picture.reference[0])][-len(names) :]
    parts = []
    for name, axis, cells in zip(names, picture.axes, sizes, strict=True):
        extent = picture.shape[axis]
        each = "" if cells == extent else f", {_of_each(extent, cells)} per cell"
        parts.append(f"{name}: axis {axis} (0 to {extent - 1}{each})")
    words = ", ".join(parts)
    cut = len(picture.axes) < len(picture.shape)
    return f"{words}; slice {picture.slice_text}" if cut else words


def _of_each(extent: int, cells: int) -> str:
    low, high = extent // cells, math.ceil(extent / cells)
    return str(low) if low == high else f"{low}-{high}"


def scale_words(picture: Picture) -> str:
    """What the lightest and the darkest cell stand for."""
    low, high = picture.value_range
    where = " in float64" if picture.lifted else ""
    largest = f"{picture.largest_difference:.4g}"
    return f"values {low:.4g} to {high:.4g}{where}; |difference| 0 to {largest}"


def nonfinite_words(picture: Picture, mark: str) -> str:
    """How cells with NaN or infinities are marked; empty if there are none."""
    count = picture.nonfinite
    return f"; {mark}: NaN or Inf ({count} cell{'' if count == 1 else 's'})" if count else ""


# --- Levels: what a drawing shows of a cell -------------------------------------------------------

# The levels of a cell with a number, from the smallest to the largest. What is not finite has none.
LEVELS = 9


def value_levels(picture: Picture, grid: Grid) -> list[list[int | None]]:
    """The level of each value between the smallest and largest of both sides; None for NaN, Inf."""
    low, high = picture.value_range
    span = (high - low) or 1.0
    return [
        [_level_of((cell - low) / span) if math.isfinite(cell) else None for cell in row]
        for row in grid
    ]


def difference_levels(picture: Picture) -> list[list[int | None]]:
    """The level of each |difference|, from 1; 0 if there is none, None if it is not finite."""
    top = picture.largest_difference or 1.0
    return [
        [
            (max(1, _level_of(abs(cell) / top)) if cell else 0) if math.isfinite(cell) else None
            for cell in row
        ]
        for row in picture.difference
    ]


def _level_of(share: float) -> int:
    return min(LEVELS, int(share * (LEVELS + 1)))
