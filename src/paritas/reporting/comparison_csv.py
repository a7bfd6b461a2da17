"""A comparison as CSV: a line for every row, whatever became of it.

Floats have all their digits, `nan` and `inf` are spelled out, and what is not known is empty.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from paritas.reporting.comparison_columns import COLUMNS, changed, stretches
from paritas.reporting.csv_lines import as_text, csv_table

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paritas.numerics.comparisons import Comparison
    from paritas.reporting.comparison_columns import Value
    from paritas.reporting.csv_lines import Cell

__all__ = ["comparison_csv"]

# What is a number goes as it is.
_CHANGED = {"text", "texts", "counts"}


def comparison_csv(comparison: Comparison) -> str:
    """The whole table, with a line of names on top and no newline at the end."""
    return csv_table([column.name for column in COLUMNS], _lines(comparison))


def _lines(comparison: Comparison) -> Iterator[tuple[Cell, ...]]:
    kinds = [column.kind for column in COLUMNS]
    for columns in stretches(comparison):
        cells: list[list[Cell]] = [
            changed(values, _cell) if kind in _CHANGED else cast("list[Cell]", values)
            for kind, values in zip(kinds, columns, strict=True)
        ]
        yield from zip(*cells, strict=True)


def _cell(value: Value) -> Cell:
    if isinstance(value, str):
        return as_text(value)
    if isinstance(value, tuple):
        if value and isinstance(value[0], str):
            return as_text("; ".join(map(str, value)))
        return str(list(value))
    return value
