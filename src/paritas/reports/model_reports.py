"""Reports about one model, of its relations or of an engine that serves it: terminal, CI, HTML."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from rich.console import Group
from rich.text import Text

from paritas.reports.annotations import Account, verdict_account
from paritas.reports.pages import verdict_page
from paritas.reports.terminal import STYLES, details, listed, paragraph, small_table
from paritas.results.engines import EngineReport, engine_headline
from paritas.results.invariants import InvariantsReport, invariants_headline
from paritas.results.wording import counted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType
    from rich.table import Table

    from paritas.results.engines import EngineRow

ModelReport = EngineReport | InvariantsReport

ENGINE_COLUMNS = ("status", "request", "numbers", "difference", "rounding", "first wrong")
RELATION_COLUMNS = ("status", "relation", "cases", "what")


def model_report(report: ModelReport) -> Group:
    """The whole report; print with `crop=False` to keep the last line in one piece."""
    verdict = report.verdict
    parts: list[RenderableType] = [_rows_table(report), Text()]
    thing, tried = "value", ""
    if isinstance(report, EngineReport):
        parts += _described_causes(report)
        thing = "item"
        tried = f"; {counted(report.tried, 'changed run')} tried" if report.tried else ""
    parts += [*paragraph(details(verdict)), *listed("note", verdict.notes)]
    words = f"{counted(verdict.coverage.compared, thing)} compared in {report.seconds:.1f} s{tried}"
    style = STYLES[verdict.status]
    last = Text(_headline(report), style=style, no_wrap=True, overflow="ignore")
    return Group(*parts, Text(words), last)


def _headline(report: ModelReport) -> str:
    if isinstance(report, EngineReport):
        return engine_headline(report)
    return invariants_headline(report)


def _rows_table(report: ModelReport) -> Table:
    table = small_table()
    is_engine = isinstance(report, EngineReport)
    for at, name in enumerate(ENGINE_COLUMNS if is_engine else RELATION_COLUMNS):
        table.add_column(name, overflow="fold", no_wrap=at < 2)  # noqa: PLR2004
    if isinstance(report, EngineReport):
        for row in report.rows:
            table.add_row(Text(row.status.value, style=STYLES[row.status]), *engine_cells(row))
        return table
    for one in report.rows:
        style = "dim" if one.status is None else STYLES[one.status]
        cases = str(one.verdict.coverage.compared) if one.status is not None else ""
        table.add_row(Text(one.word, style=style), Text(one.relation), cases, Text(one.summary))
    return table


def engine_cells(row: EngineRow) -> list[str]:
    """The columns of a request after its status."""
    first = "" if row.first is None else f"token {row.first}"
    figures = [f"{one:.3g}" for one in (row.difference, row.rounding)]
    return [row.name, str(row.tokens), *figures, first]


def _described_causes(report: EngineReport) -> Iterator[Text]:
    for cause in report.causes:
        yield Text(f"{cause.kind}: {cause.sentence}", style="bold")
        yield from (Text(f"  as well: {other}") for other in cause.also)


def model_account(report: ModelReport, *, command: str, subject: str, file: str = "") -> Account:
    """The result for GitHub, SARIF and JUnit; relations that were not checked are notes."""
    account = verdict_account(report.verdict, command=command, subject=subject, file=file)
    return dataclasses.replace(account, headline=_headline(report))


def model_page(report: ModelReport, command: str, data: str = "") -> str:
    """The report as one self-contained HTML file; `data` is the JSON file beside it."""
    return verdict_page(report.verdict, report.target or command, _headline(report), data)
