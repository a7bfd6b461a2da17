"""Lines of CSV that a spreadsheet shows and never computes."""

from __future__ import annotations

import csv
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["Cell", "as_text", "csv_table"]

Cell = str | int | float | None

# With these a spreadsheet takes what follows for a formula, and would compute it.
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")


def csv_table(names: Sequence[str], lines: Iterable[Sequence[Cell]]) -> str:
    """The whole table, with a line of names on top and no newline at the end.

    Texts are taken as they are: `as_text` keeps those of others from being computed.
    """
    # Quoted is what holds a character of the line's end, so both are among these.
    table = _Lines()
    writer = csv.writer(table, lineterminator="\r\n")
    writer.writerow(names)
    writer.writerows(lines)
    return "\n".join(table)


class _Lines(list[str]):
    def write(self, line: str) -> None:
        """Take a whole line of the writer's."""
        self.append(line.removesuffix("\r\n"))


def as_text(text: str) -> str:
    """A name out of a file is anybody's: an apostrophe in front keeps it from being computed."""
    return f"'{text}" if text.startswith(_FORMULA) and not _is_number(text) else text


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
