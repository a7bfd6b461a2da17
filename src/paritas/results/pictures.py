"""A small picture of a wrong value: reference, candidate and difference along two axes."""

from __future__ import annotations

import math

import msgspec

# At most this many cells down and across, so that a picture takes a few kilobytes of JSON.
MOST_ROWS, MOST_COLUMNS = 32, 64

Grid = tuple[tuple[float, ...], ...]


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


def axis_words(picture: Picture) -> str:
    """The axes in words: `down: axis 1 (0 to 31), across: axis 3 (0 to 511)`."""
    if not picture.axes:
        return "a single number"
    names = ["across"] if len(picture.axes) == 1 else ["down", "across"]
    sizes = [len(picture.reference), len(picture.reference[0])][-len(names) :]
    parts = []
    for name, axis, cells in zip(names, picture.axes, sizes, strict=True):
        extent = picture.shape[axis]
        each = "" if cells == extent else f", {_of_each(extent, cells)} in each cell"
        parts.append(f"{name}: axis {axis} (0 to {extent - 1}{each})")
    words = ", ".join(parts)
    cut = len(picture.axes) < len(picture.shape)
    return f"{words}; the slice {picture.slice_text}" if cut else words


def _of_each(extent: int, cells: int) -> str:
    low, high = extent // cells, math.ceil(extent / cells)
    return str(low) if low == high else f"{low} or {high}"


def scale_words(picture: Picture) -> str:
    """What the lightest and the darkest cell stand for."""
    low, high = picture.value_range
    bad = f"; {picture.nonfinite} cells with NaN or Inf" if picture.nonfinite else ""
    where = " (in float64)" if picture.lifted else ""
    return (
        f"reference and candidate: {low:.4g} to {high:.4g}{where}; "
        f"|difference|: 0 to {picture.largest_difference:.4g}{bad}"
    )
