"""The folder that the results of a graph go to: nothing is written outside of it."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from paritas.errors import UsageError
from paritas.graphs import journal
from paritas.graphs.scripts.writing import FOLDER
from paritas.reporting.json_file import check_writable, write_whole

if TYPE_CHECKING:
    from paritas.numerics.graph_reports import GraphReport

__all__ = ["CSV", "HTML", "JSON", "clear", "prepare", "write_results"]

JSON, CSV, HTML = "results.json", "results.csv", "report.html"
_FILES = (HTML, CSV, JSON)
# A script, or the values beside it, as `scripts.writing` names them.
_SCRIPT = re.compile(r"(graph\d+_)?\d{2,}_\w+\.(py|safetensors)")
# The page of a graph beside that of the latest run.
_PAGE = re.compile(r"report_\d+\.html")


def prepare(folder: Path, *, resume: bool) -> None:
    """Create the folder, and see that nothing of somebody else's would be lost.

    Args:
        folder: of the results.
        resume: whether to go on with what is there, which has to be ours.

    Raises:
        UsageError: it cannot be written to, or holds what another program wrote.
    """
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"cannot write to {str(folder)!r}: it is a file; name a folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot create {str(folder)!r}: {error.strerror or error}") from error
    check_writable(folder / JSON.replace("results", ".tried"))
    for name in (*_FILES, journal.NAME):
        if (folder / name).is_dir():
            raise UsageError(f"cannot write {str(folder / name)!r}: it is a directory")
    for name in (journal.NAME, journal.LOCK):  # the others are replaced, these are written into
        if (folder / name).is_symlink():
            raise UsageError(f"cannot write {str(folder / name)!r}: it leads out of the folder")
    scripts = folder / FOLDER
    if os.path.lexists(scripts) and (scripts.is_symlink() or not scripts.is_dir()):
        raise UsageError(f"cannot write to {str(scripts)!r}: it is no folder of its own")
    if resume and not (folder / journal.NAME).exists():
        _refuse_strangers(folder)


def clear(folder: Path) -> None:
    """Take away what an earlier run wrote, and nothing else."""
    for name in _FILES:
        (folder / name).unlink(missing_ok=True)
    for path in folder.iterdir():
        if _PAGE.fullmatch(path.name):
            path.unlink()
    scripts = folder / FOLDER
    if not scripts.is_dir():
        return
    for path in scripts.iterdir():
        if _SCRIPT.fullmatch(path.name):
            path.unlink()
    if not any(scripts.iterdir()):
        scripts.rmdir()


def _refuse_strangers(folder: Path) -> None:
    there = [name for name in (*_FILES, FOLDER) if os.path.lexists(folder / name)]
    if there:
        raise UsageError(
            f"{str(folder)!r} holds {', '.join(there)}, but no {journal.NAME} to go on from: name "
            "another folder, or replace them with --overwrite (resume=False)"
        )


def write_results(folder: Path, report: GraphReport, *, html: bool = True) -> tuple[Path, ...]:
    """Write a report in all its forms, each file whole or not at all.

    Other graphs of the folder have a page each, named by their numbers.

    Returns:
        The files, that for people first.
    """
    from paritas.reporting.graph_csv import csv_text

    written = [folder / JSON, folder / CSV]
    write_whole(folder / JSON, report.to_json())
    write_whole(folder / CSV, csv_text(report).encode(errors="backslashreplace").rstrip(b"\n"))
    from paritas.reporting.html.graph_page import page_name

    for number in range(1, len(report.others) + 2):  # those of an earlier run would not fit
        (folder / page_name(number)).unlink(missing_ok=True)
    if html:
        for other in report.others:
            _write_page(folder / page_name(other.number), other)
        _write_page(folder / HTML, report)
        written.append(folder / HTML)
    else:
        (folder / HTML).unlink(missing_ok=True)
    return tuple(reversed(written))


def _write_page(path: Path, report: GraphReport) -> None:
    from paritas.reporting.html.graph_page import write_page

    unfinished = path.with_name(f".{path.name}.{os.getpid()}.unfinished")
    try:
        write_page(report, unfinished)
        unfinished.replace(path)
    except OSError as error:
        raise UsageError(f"cannot write {str(path)!r}: {error.strerror or error}") from error
    finally:
        unfinished.unlink(missing_ok=True)
