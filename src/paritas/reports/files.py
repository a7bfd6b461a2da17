"""Files of results, written whole or not at all; the folder of a comparison."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from paritas.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from paritas.results.comparisons import Comparison
    from paritas.results.findings import Verdict


def check_writable(path: Path) -> None:
    """Raise `UsageError` now, not after a long run, where the file could not be written."""
    if path.is_dir():
        raise UsageError(f"cannot write {str(path)!r}: it is a directory; name a file in it")
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise UsageError(f"cannot write {str(path)!r}: {error.strerror or error}") from error


def write_verdict(path: Path, verdict: Verdict) -> None:
    """Write what `Verdict.from_json` reads."""
    write_whole(path, verdict.to_json())


def write_whole(path: Path, content: bytes) -> None:
    """Write a file of text, with the end of its last line; a reader never sees half of it."""
    with replacing(path) as unfinished:
        unfinished.write_bytes(content + b"\n")


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a path to write to, which takes the place of the file when the block has ended.

    Raises:
        UsageError: it cannot be written.
    """
    # Not `tempfile`, which would leave the file readable to its owner alone.
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.unfinished")
    try:
        yield unfinished
        unfinished.replace(path)
    except OSError as error:
        raise UsageError(f"cannot write {str(path)!r}: {error.strerror or error}") from error
    finally:  # Ctrl-C, too, leaves no part of it
        unfinished.unlink(missing_ok=True)


# --- The folder of a comparison -------------------------------------------------------------------

# `comparison.json` holds all of it; the others are made from that, and can be made again.

COMPARISON_JSON, CSV, PARQUET, HTML = (
    "comparison.json",
    "comparison.csv",
    "comparison.parquet",
    "report.html",
)
_ALL = (COMPARISON_JSON, CSV, PARQUET, HTML)


def check_output(folder: Path, *, overwrite: bool = False, parquet: bool = False) -> None:
    """Find out before a long run whether its results could be written; nothing is created.

    Raises:
        UsageError: the folder is a file or cannot be written to, holds an earlier comparison, or
            what writes Parquet is missing.
    """
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"cannot write to {str(folder)!r}: it is a file; name a folder")
    there = {name for name in _ALL if os.path.lexists(folder / name)}
    check_names(str(folder), there, overwrite=overwrite)
    for name in _ALL:
        if (folder / name).is_dir():
            raise UsageError(f"cannot write {str(folder / name)!r}: it is a directory")
    above = next(parent for parent in _upwards(folder) if parent.exists())
    check_writable(above / f"{COMPARISON_JSON}.tried")
    if parquet:
        from paritas.reports.tables import check_installed

        check_installed()


def check_names(place: str, there: Collection[str], *, overwrite: bool) -> None:
    """Refuse a place in which files of an earlier comparison are.

    Raises:
        UsageError: so it is, and they are not to be replaced.
    """
    earlier = [name for name in _ALL if name in there]
    if earlier and not overwrite:
        raise UsageError(
            f"{place!r} holds an earlier comparison ({', '.join(earlier)}): name another "
            "folder, or replace it with --overwrite"
        )


def _upwards(folder: Path) -> Iterator[Path]:
    whole = folder.absolute()
    yield whole
    yield from whole.parents


def write_all(
    folder: Path, comparison: Comparison, *, parquet: bool = False, html: bool = True
) -> tuple[Path, ...]:
    """Write a comparison to a folder, which is created; each file whole or not at all.

    Everything is rendered before the first file is touched. Files of an earlier comparison are
    replaced, and those that are not asked for this time are taken away: they would not fit.

    Returns:
        The files, that for people first.
    """
    from paritas.reports.tables import comparison_csv

    contents = {COMPARISON_JSON: _encoded(comparison), CSV: comparison_csv(comparison).encode()}
    if html:
        contents[HTML] = _rendered(comparison)
    _create(folder)
    if parquet:
        from paritas.reports.tables import write_parquet

        write_parquet(folder / PARQUET, comparison)
    for name, content in contents.items():
        write_whole(folder / name, content)
    written = [name for name in reversed(_ALL) if name in contents or (parquet and name == PARQUET)]
    for name in _ALL:
        if name not in written:
            (folder / name).unlink(missing_ok=True)
    return tuple(folder / name for name in written)


def _create(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot create {str(folder)!r}: {error.strerror or error}") from error


def _encoded(comparison: Comparison) -> bytes:
    try:
        return comparison.to_json()
    except UnicodeEncodeError:  # a file's name need not be text; the results are worth keeping
        from paritas.results.report import spell_nonfinite

        plain = spell_nonfinite(msgspec.to_builtins(comparison))
        return msgspec.json.encode(_spelled(plain))


def _spelled(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, dict):
        return {key: _spelled(item) for key, item in value.items()}
    return [_spelled(item) for item in value] if isinstance(value, list) else value


def _rendered(comparison: Comparison) -> bytes:
    from paritas.reports.comparison_page import html_report

    return html_report(comparison).encode(errors="backslashreplace").removesuffix(b"\n")


def write_html(path: Path, comparison: Comparison) -> None:
    """Make the report of a comparison again."""
    write_whole(path, _rendered(comparison))


def read_comparison(path: Path) -> Comparison:
    """Read a comparison, given its folder or its file of JSON.

    Raises:
        UsageError: it is not there, or damaged; the message says which.
    """
    from paritas.results.comparisons import FORMAT, Comparison

    file = path / COMPARISON_JSON if path.is_dir() else path
    try:
        comparison = Comparison.from_json(file.read_bytes())
    except FileNotFoundError:
        where = (
            f"the folder {str(path)!r} has no {COMPARISON_JSON}"
            if path.is_dir()
            else f"no {str(path)!r}"
        )
        raise UsageError(f"{where}: give what `paritas compare --output` wrote") from None
    except OSError as error:
        raise UsageError(f"cannot read {str(file)!r}: {error.strerror or error}") from error
    except (UsageError, RecursionError) as error:
        raise UsageError(f"{file} is damaged or of another version: {error}") from None
    known = {row.index for row in comparison.rows}
    for first in (comparison.first, comparison.first_non_finite):
        if first is not None and first.row not in known:
            raise UsageError(f"{file} is damaged: it speaks of row {first.row}, which it has not")
    if comparison.format != FORMAT:
        raise UsageError(
            f"{file} has format {comparison.format}, and this paritas reads format {FORMAT}: read "
            f"it with paritas {comparison.paritas or 'of the version that wrote it'}"
        )
    return comparison
