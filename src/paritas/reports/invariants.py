"""A report of invariants for a terminal, for CI and as one HTML page."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from rich.console import Group
from rich.text import Text

from paritas.reports.annotations import Account, verdict_account
from paritas.reports.pages import verdict_page
from paritas.reports.terminal import STYLES, details, listed, paragraph, small_table
from paritas.results.invariants import invariants_headline
from paritas.results.wording import counted

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from paritas.results.invariants import InvariantsReport

COLUMNS = ("status", "relation", "cases", "what")


def invariants_report(report: InvariantsReport) -> Group:
    """The whole report; print with `crop=False` to keep the last line in one piece."""
    verdict = report.verdict
    parts: list[RenderableType] = [_rows_table(report), Text()]
    parts += [*paragraph(details(verdict)), *listed("note", verdict.notes)]
    words = f"{counted(verdict.coverage.compared, 'value')} compared in {report.seconds:.1f} s"
    style = STYLES[verdict.status]
    last = Text(invariants_headline(report), style=style, no_wrap=True, overflow="ignore")
    return Group(*parts, Text(words), last)


def _rows_table(report: InvariantsReport) -> Table:
    table = small_table()
    for name in COLUMNS:
        table.add_column(name, overflow="fold", no_wrap=name in ("status", "relation"))
    for row in report.rows:
        style = "dim" if row.status is None else STYLES[row.status]
        cases = str(row.verdict.coverage.compared) if row.status is not None else ""
        table.add_row(Text(row.word, style=style), Text(row.relation), cases, Text(row.summary))
    return table


def invariants_account(report: InvariantsReport, *, subject: str, file: str = "") -> Account:
    """The result for GitHub, SARIF and JUnit; relations that were not checked are notes."""
    account = verdict_account(report.verdict, command="invariants", subject=subject, file=file)
    return dataclasses.replace(account, headline=invariants_headline(report))


def invariants_page(report: InvariantsReport, data: str = "") -> str:
    """The report as one self-contained HTML file; `data` is the JSON file beside it."""
    title = report.target or "invariants"
    return verdict_page(report.verdict, title, invariants_headline(report), data)
