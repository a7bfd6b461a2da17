"""Columns of a table, small enough to travel inside a page."""

from __future__ import annotations

import base64
import gzip
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["DIGITS", "number_column", "packed", "text_column"]

# What a page shows of a number; the JSON and the CSV have all of it.
DIGITS = 4
_NOTHING = "null"
# JSON has no such numbers: they are spelled.
_NO_NUMBERS = {"nan", "inf", "-inf"}


def text_column(values: Iterable[str]) -> dict[str, Any]:
    """Each different text once, and per row which of them; no rows where there is but one."""
    places: dict[str, int] = {}
    rows = [places.setdefault(value, len(places)) for value in values]
    return {"texts": list(places), "rows": rows if len(places) > 1 else None}


def number_column(values: Iterable[float | None], digits: int = DIGITS) -> msgspec.Raw | None:
    """Numbers in JSON with as many digits as are shown; nothing where no row has one."""
    column = [_NOTHING if value is None else _number(value, digits) for value in values]
    if all(text is _NOTHING for text in column):
        return None
    return msgspec.Raw(f"[{','.join(column)}]".encode())


def _number(value: float, digits: int) -> str:
    if isinstance(value, int):
        return str(value)  # a count has all its digits
    text = f"{value:.{digits}g}"
    return f'"{text}"' if text in _NO_NUMBERS else text


def packed(payload: Any) -> str:
    """JSON, compressed, in characters that mean nothing to HTML.

    50,000 rows are ten times as large without, and what is in a name cannot end the script.
    """
    return base64.b64encode(gzip.compress(msgspec.json.encode(payload), 6, mtime=0)).decode()
