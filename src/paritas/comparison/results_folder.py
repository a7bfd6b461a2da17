"""The folder of a comparison: all is in `comparison.json`; the other files are made from it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import msgspec

from paritas.core.errors import UsageError
from paritas.core.file_trees import open_plain
from paritas.core.reporting.files import check_writable, create_folder, write_whole

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

    from paritas.comparison.rows import Comparison


COMPARISON_JSON, CSV, PARQUET, HTML = (
    "comparison.json",
    "comparison.csv",
    "comparison.parquet",
    "report.html",
)


_ALL = (COMPARISON_JSON, CSV, PARQUET, HTML)


def check_output(folder: Path, *, overwrite: bool = False, parquet: bool = False) -> None:
    """Check before a long run whether its results can be written; nothing is created.

    Raises:
        UsageError: the folder is a file, is not writable or contains an earlier comparison, or
            the package that writes Parquet is missing.
    """
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"cannot write to {str(folder)!r}: it is a file; give a folder")
    there = {name for name in _ALL if os.path.lexists(folder / name)}
    check_names(str(folder), there, overwrite=overwrite)
    for name in _ALL:
        if (folder / name).is_dir():
            raise UsageError(f"cannot write {str(folder / name)!r}: it is a directory")
    absolute_folder = folder.absolute()
    existing = next(
        parent for parent in (absolute_folder, *absolute_folder.parents) if parent.exists()
    )
    check_writable(existing / f"{COMPARISON_JSON}.tried")
    if parquet:
        from paritas.core.reporting.table_files import check_installed

        check_installed()


def check_names(folder: str, names: Collection[str], *, overwrite: bool) -> None:
    """Raise `UsageError` if a folder contains an earlier comparison, unless it may be replaced."""
    earlier = [name for name in _ALL if name in names]
    if earlier and not overwrite:
        raise UsageError(
            f"{folder!r} contains an earlier comparison ({', '.join(earlier)}): give another "
            "folder, or replace it with --overwrite"
        )


def write_all(
    folder: Path, comparison: Comparison, *, parquet: bool = False, html: bool = True
) -> tuple[Path, ...]:
    """Write a comparison to a folder, which is created; return the files, the report first.

    Everything is rendered before the first file is written. Files of an earlier comparison are
    replaced, or deleted if this one does not write them.
    """
    from paritas.comparison.columns import comparison_csv

    contents = {COMPARISON_JSON: _encode(comparison), CSV: comparison_csv(comparison).encode()}
    if html:
        contents[HTML] = _render(comparison)
    create_folder(folder)
    if parquet:
        from paritas.comparison.columns import write_comparison_parquet

        write_comparison_parquet(folder / PARQUET, comparison)
    for name, content in contents.items():
        write_whole(folder / name, content)
    written = [name for name in reversed(_ALL) if name in contents or (parquet and name == PARQUET)]
    for name in _ALL:
        if name not in written:
            (folder / name).unlink(missing_ok=True)
    return tuple(folder / name for name in written)


def _encode(comparison: Comparison) -> bytes:
    try:
        return comparison.to_json()
    except UnicodeEncodeError:  # a file name that is not valid text
        from paritas.core.results.report import spell_nonfinite

        plain = spell_nonfinite(msgspec.to_builtins(comparison))
        return msgspec.json.encode(_escape_surrogates(plain))


def _escape_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, dict):
        return {key: _escape_surrogates(item) for key, item in value.items()}
    return [_escape_surrogates(item) for item in value] if isinstance(value, list) else value


def _render(comparison: Comparison) -> bytes:
    from paritas.comparison.page import html_report

    return html_report(comparison).encode(errors="backslashreplace").removesuffix(b"\n")


def write_html(path: Path, comparison: Comparison) -> None:
    """Write the HTML report of a comparison."""
    write_whole(path, _render(comparison))


def read_comparison(path: Path) -> Comparison:
    """Read a comparison from its folder or its JSON file.

    Raises:
        UsageError: it does not exist or is damaged; the message says which.
    """
    from paritas.comparison.rows import FORMAT, Comparison

    file = path / COMPARISON_JSON if path.is_dir() else path
    try:
        with open_plain(file) as opened:
            comparison = Comparison.from_json(opened.read())
    except FileNotFoundError:
        where = f"{str(path)!r} does not exist"
        if path.is_dir():
            where = f"the folder {str(path)!r} has no {COMPARISON_JSON}"
        raise UsageError(f"{where}: give an output folder of `paritas compare`") from None
    except OSError as error:
        raise UsageError(f"cannot read {str(file)!r}: {error.strerror or error}") from error
    except (UsageError, RecursionError) as error:
        raise UsageError(f"{file} is damaged or from another version: {error}") from None
    indexes = {row.index for row in comparison.rows}
    for first in (comparison.first, comparison.first_non_finite):
        if first is not None and first.row not in indexes:
            raise UsageError(f"{file} is damaged: it refers to row {first.row}, which is missing")
    if comparison.format != FORMAT:
        raise UsageError(
            f"{file} has format {comparison.format}, but this paritas reads format {FORMAT}: use "
            f"paritas {comparison.paritas or 'in the version that wrote it'}"
        )
    return comparison
