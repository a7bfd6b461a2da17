"""A comparison as Parquet: the columns of the CSV, with their types; needs the extra `table`."""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from paritas.errors import UsageError
from paritas.numerics.findings import spell_nonfinite
from paritas.reporting.comparison_columns import COLUMNS, lines

if TYPE_CHECKING:
    from paritas.numerics.comparisons import Comparison

__all__ = ["check_installed", "write_parquet"]

_TYPES = {
    "count": "BIGINT",
    "number": "DOUBLE",
    "text": "VARCHAR",
    "counts": "BIGINT[]",
    "texts": "VARCHAR[]",
}


def check_installed() -> None:
    """Raise `UsageError` where what writes Parquet is missing."""
    if importlib.util.find_spec("duckdb") is None:
        raise UsageError(
            "Parquet is written by duckdb, which is not installed: pip install 'paritas[table]', "
            "or do without it: comparison.csv has the same columns"
        )


def write_parquet(path: Path, comparison: Comparison) -> None:
    """Write the table; a reader never sees half of it."""
    check_installed()
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        with tempfile.TemporaryDirectory(prefix="paritas-") as folder:
            # Through a file of JSON lines: a call for each row would take a minute for 50,000.
            records = Path(folder) / "rows.ndjson"
            with records.open("wb") as stream:
                stream.writelines(_records(comparison))
            _convert(records, unfinished)
        unfinished.replace(path)
    except OSError as error:
        raise UsageError(f"cannot write {str(path)!r}: {error.strerror or error}") from error
    finally:
        unfinished.unlink(missing_ok=True)


def _records(comparison: Comparison) -> list[bytes]:
    names = [column.name for column in COLUMNS]
    encode = msgspec.json.Encoder().encode
    return [
        encode(spell_nonfinite(dict(zip(names, line, strict=True)))) + b"\n"
        for line in lines(comparison)
    ]


def _convert(records: Path, target: Path) -> None:
    import duckdb

    types = {column.name: _TYPES[column.kind] for column in COLUMNS}
    try:
        with duckdb.connect() as connection:
            # One text may be a whole message, so no row is refused for its length.
            table = connection.read_json(
                str(records),
                columns=types,
                format="newline_delimited",
                maximum_object_size=max(1 << 24, records.stat().st_size),
            )
            table.write_parquet(str(target))
    except duckdb.IOException as error:
        raise UsageError(f"cannot write {str(target)!r}: {error}") from error
