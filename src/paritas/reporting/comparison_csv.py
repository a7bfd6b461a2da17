"""A comparison as CSV: a line for every row, whatever became of it.

Floats have all their digits, `nan` and `inf` are spelled out, and what is not known is empty.
"""

from __future__ import annotations

import csv
from typing import TYPE_CHECKING

from paritas.reporting.comparison_columns import COLUMNS, lines

if TYPE_CHECKING:
    from paritas.numerics.comparisons import Comparison
    from paritas.reporting.comparison_columns import Value

__all__ = ["comparison_csv"]

# With these a spreadsheet takes what follows for a formula, and would compute it.
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")


def comparison_csv(comparison: Comparison) -> str:
    """The whole table, with a line of names on top and no newline at the end."""
    # Quoted is what holds a character of the line's end, so both are among these.
    table = _Lines()
    writer = csv.writer(table, lineterminator="\r\n")
    writer.writerow([column.name for column in COLUMNS])
    writer.writerows([_cell(value) for value in line] for line in lines(comparison))
    return "\n".join(table)


class _Lines(list[str]):
    def write(self, line: str) -> None:
        """Take a whole line of the writer's."""
        self.append(line.removesuffix("\r\n"))


def _cell(value: Value) -> Value:
    if isinstance(value, str):
        return _as_text(value)
    if isinstance(value, tuple):
        if value and isinstance(value[0], str):
            return _as_text("; ".join(map(str, value)))
        return str(list(value))
    return value


def _as_text(text: str) -> str:
    """A name out of a file is anybody's: an apostrophe in front keeps it from being computed."""
    return f"'{text}" if text.startswith(_FORMULA) and not _is_number(text) else text


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
