"""A picture of a wrong value on a terminal, with colours or letters, and as SVG."""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING

from rich.color import Color
from rich.style import Style
from rich.text import Text

from paritas.core.results.pictures import (
    LEVELS,
    axis_words,
    difference_levels,
    nonfinite_words,
    scale_words,
    shrink_picture,
    value_levels,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import Console, ConsoleOptions, RenderableType

    from paritas.core.results.pictures import Picture

Levels = list[list[int | None]]
PANELS = ("reference", "candidate", "difference")


def panel_levels(picture: Picture) -> list[Levels]:
    """The levels of the three panels."""
    sides = [value_levels(picture, grid) for grid in (picture.reference, picture.candidate)]
    return [*sides, difference_levels(picture)]


# --- On a terminal --------------------------------------------------------------------------------

# Three panels side by side in 80 columns, as high as half a screen.
_ROWS, _COLUMNS = 16, 22
_GAP = "   "
# From the smallest to the largest value; a letter for what is not finite.
RAMP = " .:-=+*#%@"
NONFINITE = "N"
# Colours that people with any kind of colour vision can tell apart: from dark blue to yellow.
_VALUE_ENDS = ((0, 32, 96), (124, 123, 120), (255, 233, 69))
_DIFFERENCE_ENDS = ((70, 20, 90), (200, 60, 80), (255, 190, 60))
_NONFINITE_COLOUR = Color.from_rgb(255, 0, 255)


@dataclasses.dataclass(frozen=True)
class PictureDrawing:
    """The three panels, with what the axes and the colours mean."""

    picture: Picture

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        """Draw with colours and half blocks, or with letters where there are none."""
        picture = self.picture
        if not picture.axes:
            cells = (picture.reference, picture.candidate, picture.difference)
            words = (f"{name} {grid[0][0]:.4g}" for name, grid in zip(PANELS, cells, strict=True))
            yield Text(", ".join(words))
            return
        # Sixteen colours are too few, and often not those that their names say.
        has_colours = console.color_system in {"256", "truecolor"}
        in_colour = has_colours and not (console.no_color or options.ascii_only)
        if len(picture.reference) > 1:  # a line of text shows two rows in colour
            picture = shrink_picture(picture, 2 * _ROWS if in_colour else _ROWS, _COLUMNS)
        if len(picture.reference) == 1:
            yield from _draw_line(picture, in_colour=in_colour)
        else:
            yield from _draw_panels(picture, in_colour=in_colour)
        yield Text(axis_words(picture))
        legend = "from dark to bright" if in_colour else f"as {RAMP!r}"
        bad = nonfinite_words(picture, "magenta" if in_colour else NONFINITE)
        yield Text(f"{scale_words(picture)}, {legend}{bad}")


def _draw_line(picture: Picture, *, in_colour: bool) -> Iterator[Text]:
    """One line for each panel."""
    for name, levels in zip(PANELS, panel_levels(picture), strict=True):
        row = levels[0]
        cells = _colour_line(name, row, row) if in_colour else Text(_letters(row))
        yield Text.assemble(f"{name:<11}|", cells, "|")


def _draw_panels(picture: Picture, *, in_colour: bool) -> Iterator[Text]:
    """The panels side by side."""
    panels = panel_levels(picture)
    width = max(len(picture.reference[0]), *map(len, PANELS))
    yield Text(f" {_GAP}".join(f" {name:<{width}}" for name in PANELS).rstrip())
    for lines in zip(
        *(_panel_lines(*panel, in_colour=in_colour) for panel in zip(PANELS, panels, strict=True)),
        strict=True,
    ):
        padded = [Text.assemble("|", line, "|", " " * (width - line.cell_len)) for line in lines]
        joined = Text(_GAP).join(padded)
        joined.rstrip()
        yield joined


def _panel_lines(name: str, levels: Levels, *, in_colour: bool) -> list[Text]:
    if not in_colour:
        return [Text(_letters(row)) for row in levels]
    pairs = itertools.zip_longest(levels[::2], levels[1::2])
    return [_colour_line(name, upper, lower) for upper, lower in pairs]


def _letters(row: Sequence[int | None]) -> str:
    return "".join(NONFINITE if level is None else RAMP[level] for level in row)


def _colour_line(
    name: str, upper: Sequence[int | None], lower: Sequence[int | None] | None
) -> Text:
    """Two rows in one line: the upper half of each character and its background."""
    line = Text()
    bottom = [0] * len(upper) if lower is None else lower
    for above, below in zip(upper, bottom, strict=True):
        top = _colour(name, above)
        ground = None if lower is None else _colour(name, below)
        if top is None and ground is None:
            line.append(" ")
        elif top is None:
            line.append("▄", Style(color=ground))
        else:
            line.append("▀", Style(color=top, bgcolor=ground))
    return line


def _colour(name: str, level: int | None) -> Color | None:
    """The colour of a level; None for no difference, which stays blank."""
    if level is None:
        return _NONFINITE_COLOUR
    if name == "difference" and not level:
        return None
    low, middle, high = _DIFFERENCE_ENDS if name == "difference" else _VALUE_ENDS
    share = 2 * level / LEVELS
    ends, part = ((low, middle), share) if share <= 1 else ((middle, high), share - 1)
    mixed = (round(a + (b - a) * part) for a, b in zip(*ends, strict=True))
    return Color.from_rgb(*mixed)


# --- As SVG ---------------------------------------------------------------------------------------

# Edges of a cell in pixels: small tensors have large cells.
_LARGEST_CELL, _SMALLEST_CELL = 14, 3
_PANEL_WIDTH = 260


@dataclasses.dataclass(frozen=True)
class SvgPanel:
    """One panel: all cells of a level are one path.

    Attributes:
        kind: CSS class, which chooses the colours.
        columns: the number of cells across.
        rows: the number of cells down.
        width: in pixels.
        height: in pixels.
        paths: pairs of a CSS class for the level, and the path.
    """

    name: str
    kind: str
    columns: int
    rows: int
    width: int
    height: int
    paths: tuple[tuple[str, str], ...]


@dataclasses.dataclass(frozen=True)
class SvgPicture:
    """What a page shows of a picture."""

    panels: tuple[SvgPanel, ...]
    axes: str
    scale: str


def svg_picture(picture: Picture) -> SvgPicture:
    """The picture as paths of SVG, and its legend."""
    axes, scale = axis_words(picture), scale_words(picture) + nonfinite_words(picture, "crossed")
    panels = tuple(
        _svg_panel(name, levels) for name, levels in zip(PANELS, panel_levels(picture), strict=True)
    )
    return SvgPicture(panels=panels, axes=axes, scale=scale)


def _svg_panel(name: str, levels: Levels) -> SvgPanel:
    rows, columns = len(levels), len(levels[0])
    edge = max(_SMALLEST_CELL, min(_LARGEST_CELL, _PANEL_WIDTH // columns))
    paths: dict[str, list[str]] = {}
    for y, row in enumerate(levels):
        x = 0
        for level, same in itertools.groupby(row):
            run = len(list(same))
            if level is None or level or name != "difference":
                kind = "bad" if level is None else f"l{level}"
                paths.setdefault(kind, []).append(f"M{x} {y}h{run}v1h-{run}z")
            if level is None:  # seen without colours
                cross = (f"M{at} {y}l1 1M{at + 1} {y}l-1 1" for at in range(x, x + run))
                paths.setdefault("cross", []).extend(cross)
            x += run
    return SvgPanel(
        name=name,
        kind="apart" if name == "difference" else "side",
        columns=columns,
        rows=rows,
        width=columns * edge,
        height=rows * edge,
        paths=tuple((kind, "".join(parts)) for kind, parts in sorted(paths.items())),
    )
