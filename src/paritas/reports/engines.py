"""A report of an engine for a terminal, for CI and as one HTML page."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from rich.console import Group
from rich.text import Text

from paritas.reports.annotations import Account, verdict_account
from paritas.reports.pages import verdict_page
from paritas.reports.terminal import STYLES, details, listed, paragraph, small_table
from paritas.results.engines import engine_headline
from paritas.results.wording import counted

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from paritas.results.engines import EngineReport, EngineRow

COLUMNS = ("status", "request", "numbers", "difference", "rounding", "first wrong")


def engine_report(report: EngineReport) -> Group:
    """The whole report; print with `crop=False` to keep the last line in one piece."""
    verdict = report.verdict
    parts: list[RenderableType] = [_rows_table(report), Text()]
    for cause in report.causes:
        parts.append(Text(f"{cause.kind}: {cause.sentence}", style="bold"))
        parts += [Text(f"  as well: {other}") for other in cause.also]
    parts += [*paragraph(details(verdict)), *listed("note", verdict.notes)]
    words = f"{counted(verdict.coverage.compared, 'item')} compared in {report.seconds:.1f} s"
    words += f"; {counted(report.tried, 'changed run')} tried" if report.tried else ""
    style = STYLES[verdict.status]
    last = Text(engine_headline(report), style=style, no_wrap=True, overflow="ignore")
    return Group(*parts, Text(words), last)


def engine_cells(row: EngineRow) -> list[str]:
    """The columns of a request after its status."""
    first = "" if row.first is None else f"token {row.first}"
    figures = [f"{one:.3g}" for one in (row.difference, row.rounding)]
    return [row.name, str(row.tokens), *figures, first]


def _rows_table(report: EngineReport) -> Table:
    table = small_table()
    for name in COLUMNS:
        table.add_column(name, overflow="fold", no_wrap=name in ("status", "request"))
    for row in report.rows:
        table.add_row(Text(row.status.value, style=STYLES[row.status]), *engine_cells(row))
    return table


def engine_account(report: EngineReport, *, subject: str, file: str = "") -> Account:
    """The result for GitHub, SARIF and JUnit."""
    account = verdict_account(report.verdict, command="engine", subject=subject, file=file)
    return dataclasses.replace(account, headline=engine_headline(report))


def engine_page(report: EngineReport, data: str = "") -> str:
    """The report as one self-contained HTML file; `data` is the JSON file beside it."""
    title = report.target or "engine"
    return verdict_page(report.verdict, title, engine_headline(report), data)
