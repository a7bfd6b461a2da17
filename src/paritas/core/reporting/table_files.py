"""Tables as files: CSV, and Parquet, which needs the extra `table`.

Floats have all digits, `nan` and `inf` are spelled out, and unknown values are empty.
"""

from __future__ import annotations

import csv
import importlib.util
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import msgspec

from paritas.core.errors import UsageError
from paritas.core.reporting.files import replacing
from paritas.core.reporting.tables import Mark
from paritas.core.results.report import spell_nonfinite

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from paritas.core.reporting.tables import CellValue, Column

_T = TypeVar("_T")

# Rows that are converted to columns at a time, which is many times faster than row by row.
_STRETCH = 2048


def csv_table(columns: Sequence[Column[Any]], rows: Sequence[Any]) -> str:
    """The whole table, with a header line and no newline at the end."""
    # The writer quotes texts that contain a character of the terminator, so it has both.
    table = _LineList()
    writer = csv.writer(table, lineterminator="\r\n")
    writer.writerow([column.name for column in columns])
    for cells in _stretches(columns, rows):
        shown = [
            cast("list[Any]", values)
            if column.kind in {"count", "number"}
            else _map_distinct(values, _csv_cell)
            for column, values in zip(columns, cells, strict=True)
        ]
        writer.writerows(zip(*shown, strict=True))
    return "\n".join(table)


class _LineList(list[str]):
    def write(self, line: str) -> None:
        """Take a line from the CSV writer."""
        self.append(line.removesuffix("\r\n"))


def _csv_cell(value: CellValue) -> CellValue:
    if isinstance(value, str):
        return _as_text(value)
    if isinstance(value, tuple):
        if value and isinstance(value[0], str):
            return _as_text("; ".join(map(str, value)))
        return str(list(value))
    return value


# Spreadsheets treat a text that starts with one of these as a formula.
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")


def _as_text(text: str) -> str:
    """Put an apostrophe before a text that a spreadsheet would evaluate as a formula."""
    return f"'{text}" if text.startswith(_FORMULA) and not _is_number(text) else text


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


# --- Values, column by column ---------------------------------------------------------------------


def _stretches(
    columns: Sequence[Column[Any]], rows: Sequence[Any]
) -> Iterator[list[list[CellValue]]]:
    for start in range(0, len(rows), _STRETCH):
        some = rows[start : start + _STRETCH]
        yield [
            _map_distinct(map(column.cell, some), _clean_text)
            if column.kind in {"text", "texts"}
            else list(map(column.cell, some))
            for column in columns
        ]


def _map_distinct(values: Iterable[CellValue], change: Callable[[CellValue], _T]) -> list[_T]:
    """Apply a function to a column, once for each distinct value: there are few."""
    column = list(values)
    changed = {value: change(value) for value in set(column)}
    return [changed[value] for value in column]


def _clean_text(value: CellValue) -> CellValue:
    """None for an empty text; escape what is not valid text, as in some file names."""
    if isinstance(value, Mark):
        value = value.word
    if isinstance(value, str):
        return _escape_surrogates(value) or None
    if isinstance(value, tuple) and value and isinstance(value[0], str):
        return tuple(_escape_surrogates(item) for item in value if isinstance(item, str))
    return value


def _escape_surrogates(text: str) -> str:
    return text if text.isascii() else text.encode(errors="backslashreplace").decode()


# --- Parquet --------------------------------------------------------------------------------------

_TYPES = {
    "count": "BIGINT",
    "number": "DOUBLE",
    "text": "VARCHAR",
    "counts": "BIGINT[]",
    "texts": "VARCHAR[]",
}


def check_installed() -> None:
    """Raise `UsageError` if duckdb is missing."""
    if importlib.util.find_spec("duckdb") is None:
        raise UsageError(
            "Parquet needs duckdb, which is not installed: pip install 'paritas[table]', or use "
            "comparison.csv, which has the same columns"
        )


def write_parquet(path: Path, columns: Sequence[Column[Any]], rows: Sequence[Any]) -> None:
    """Write the table atomically."""
    check_installed()
    with (
        replacing(path) as unfinished,
        tempfile.TemporaryDirectory(prefix="paritas-") as folder,
    ):
        # Through a file of JSON lines: one call per row takes a minute for 50,000 rows.
        records = Path(folder) / "rows.ndjson"
        with records.open("wb") as stream:
            stream.writelines(_records(columns, rows))
        types = {column.name: _TYPES[column.kind] for column in columns}
        _convert(records, unfinished, types)


def _records(columns: Sequence[Column[Any]], rows: Sequence[Any]) -> Iterator[bytes]:
    names = [column.name for column in columns]
    encode = msgspec.json.Encoder().encode
    for cells in _stretches(columns, rows):
        for line in zip(*cells, strict=True):
            yield encode(spell_nonfinite(dict(zip(names, line, strict=True)))) + b"\n"


def _convert(records: Path, target: Path, types: dict[str, str]) -> None:
    import duckdb

    try:
        with duckdb.connect() as connection:
            # A text may be a whole message, so rows of any length are accepted.
            table = connection.read_json(
                str(records),
                columns=types,
                format="newline_delimited",
                maximum_object_size=max(1 << 24, records.stat().st_size),
            )
            table.write_parquet(str(target))
    except duckdb.IOException as error:
        raise UsageError(f"cannot write {str(target)!r}: {error}") from error
