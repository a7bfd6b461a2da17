"""Tables: columns that say how a cell is read from a row, and one writer for each format.

A report lists its columns once. The terminal, notebooks and pages show the text of a cell; CSV and
Parquet store its value.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, Protocol, TypeVar

from rich import box
from rich.table import Table
from rich.text import Text

from paritas.core.results.findings import Status
from paritas.core.results.wording import count_things

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

Row = TypeVar("Row")
ColumnKind = Literal["count", "number", "text", "counts", "texts"]
_NUMBERS = {"count", "number"}


class Mark(NamedTuple):
    """A word with what makes it stand out: rich's style, and the class and sign of a page."""

    word: str
    style: str = ""
    css: str = ""
    sign: str = ""


CellValue = Mark | str | int | float | tuple[int, ...] | tuple[str, ...] | None

STYLES = {
    Status.IDENTICAL: "green",
    Status.EQUIVALENT: "green",
    Status.UNSTABLE: "yellow",
    Status.UNVERIFIED: "magenta",
    Status.DEGRADED: "bold red",
    Status.DIFFERENT: "bold red",
}
# Shown beside the colour for people who cannot see it.
SIGNS = {
    Status.IDENTICAL: "=",
    Status.EQUIVALENT: "≈",
    Status.UNSTABLE: "~",
    Status.UNVERIFIED: "?",
    Status.DEGRADED: "▼",
    Status.DIFFERENT: "≠",
}
# Backgrounds in Model Explorer.
COLOURS = {
    Status.IDENTICAL: "#dbe7df",
    Status.EQUIVALENT: "#b9e4cb",
    Status.UNSTABLE: "#f5dd9d",
    Status.UNVERIFIED: "#d6c8f5",
    Status.DEGRADED: "#f8c19c",
    Status.DIFFERENT: "#f7a8ad",
}
STATUS_MARKS = {
    status: Mark(status.value, STYLES[status], f"s-{status.value}", SIGNS[status])
    for status in Status
}


@dataclasses.dataclass(frozen=True)
class Column(Generic[Row]):
    """One column.

    Attributes:
        name: its heading.
        cell: reads the value from a row; None for an empty cell.
        kind: of the values; numbers are aligned to the right.
        show: the value as text for people; files have all digits.
        is_fixed: never wrapped.
        is_optional: left out on a terminal if all its cells are empty.
        width: the most characters on a terminal.
    """

    name: str
    cell: Callable[[Row], CellValue]
    kind: ColumnKind = "text"
    show: Callable[[Any], str] = str
    is_fixed: bool = False
    is_optional: bool = False
    width: int | None = None


class Rest(NamedTuple):
    """The cells of a line that counts rows without a line of their own; further cells are empty."""

    cells: tuple[Mark | str, ...]


# --- A terminal -----------------------------------------------------------------------------------

# Above this many rows of one status, the rest share a line that counts them.
MOST_ROWS = {
    Status.IDENTICAL: 3,
    Status.EQUIVALENT: 12,
    Status.UNSTABLE: 24,
    Status.UNVERIFIED: 24,
    Status.DEGRADED: 24,
    Status.DIFFERENT: 24,
}


def terminal_table(
    columns: Iterable[Column[Row]],
    rows: Iterable[Row | Rest],
    padding: tuple[int, int, int, int] = (0, 1, 0, 0),
) -> Table:
    """A table without a frame; long cells are folded, never cropped."""
    chosen = list(columns)
    lines = [_cells_of(row, chosen) for row in rows]
    table = Table(
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=padding,
        header_style="bold",
    )
    shown = [
        column_index
        for column_index, column in enumerate(chosen)
        if not column.is_optional or any(line[column_index].word for line in lines)
    ]
    for column in (chosen[column_index] for column_index in shown):
        table.add_column(
            column.name,
            justify="right" if column.kind in _NUMBERS else "left",
            overflow="fold",
            no_wrap=column.is_fixed,
            max_width=column.width,
        )
    for line in lines:
        table.add_row(
            *(
                Text(line[column_index].word, style=line[column_index].style)
                for column_index in shown
            )
        )
    return table


class HasStatus(Protocol):
    """A row with a status."""

    @property
    def status(self) -> Status:
        """Its status."""
        ...


StatusRow = TypeVar("StatusRow", bound=HasStatus)


def fold_rows(
    rows: Iterable[StatusRow], thing: str, order: Callable[[StatusRow], float] | None = None
) -> list[StatusRow | Rest]:
    """The first rows of each status, gravest first, each with a line that counts the rest.

    Args:
        rows: in their usual order.
        thing: what a row is about.
        order: chooses the passing rows with the largest values if not all have a line.
    """
    by_status: dict[Status, list[StatusRow]] = {status: [] for status in reversed(Status)}
    for row in rows:
        by_status[row.status].append(row)
    lines: list[StatusRow | Rest] = []
    for status, alike in by_status.items():
        most = MOST_ROWS[status]
        if len(alike) <= most:
            lines += alike
            continue
        chosen = sorted(alike, key=order, reverse=True) if order and status.passes() else alike
        rest = count_things(len(alike) - most, f"more {thing}")
        lines += [*chosen[:most], Rest((STATUS_MARKS[status], rest))]
    return lines


# --- A page, or a notebook ------------------------------------------------------------------------


# Rows in a cell of a notebook.
MOST_IN_CELL = 40


class PageTable(NamedTuple):
    """A table for a page: each row as the mark of its first cell and the texts of the others.

    Attributes:
        more: the number of rows that are left out.
    """

    names: tuple[str, ...] = ()
    rows: tuple[tuple[Mark, list[str]], ...] = ()
    more: int = 0


NO_TABLE = PageTable()


def page_table(
    columns: Iterable[Column[Row]], rows: Sequence[Row], most: int | None = None
) -> PageTable:
    """The first rows of a table, at most that many."""
    chosen = list(columns)
    shown = rows[:most]
    lines = [_cells_of(row, chosen) for row in shown]
    return PageTable(
        names=tuple(column.name for column in chosen),
        rows=tuple((first, [cell.word for cell in others]) for first, *others in lines),
        more=len(rows) - len(shown),
    )


# --- The cells of a row, for people ---------------------------------------------------------------


def _cells_of(row: Any, columns: Sequence[Column[Any]]) -> list[Mark]:
    if isinstance(row, Rest):
        empty = len(columns) - len(row.cells)
        marks = [cell if isinstance(cell, Mark) else Mark(cell) for cell in row.cells]
        return [*marks, *[Mark("")] * empty]
    return [_show_cell(column, column.cell(row)) for column in columns]


def _show_cell(column: Column[Any], value: CellValue) -> Mark:
    if isinstance(value, Mark):
        return value
    return Mark("" if value is None else column.show(value))
