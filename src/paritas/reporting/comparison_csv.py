"""A comparison as CSV: a line for every row, whatever became of it.

Floats have all their digits, `nan` and `inf` are spelled out, and what is not known is empty.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paritas.reporting.comparison_columns import COLUMNS, lines
from paritas.reporting.csv_lines import as_text, csv_table

if TYPE_CHECKING:
    from paritas.numerics.comparisons import Comparison
    from paritas.reporting.comparison_columns import Value
    from paritas.reporting.csv_lines import Cell

__all__ = ["comparison_csv"]


def comparison_csv(comparison: Comparison) -> str:
    """The whole table, with a line of names on top and no newline at the end."""
    names = [column.name for column in COLUMNS]
    return csv_table(names, ([_cell(value) for value in line] for line in lines(comparison)))


def _cell(value: Value) -> Cell:
    if isinstance(value, str):
        return as_text(value)
    if isinstance(value, tuple):
        if value and isinstance(value[0], str):
            return as_text("; ".join(map(str, value)))
        return str(list(value))
    return value
