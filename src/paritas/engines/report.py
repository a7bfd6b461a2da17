"""What a serving engine returned, as people see it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from rich.console import Group
from rich.text import Text

from paritas.core.reporting.notebook import NotebookResult, verdict_summary
from paritas.core.reporting.tables import (
    MOST_IN_CELL,
    STATUS_MARKS,
    Column,
    page_table,
    terminal_table,
)
from paritas.core.reporting.terminal import details, headline_text, listed, paragraph
from paritas.core.results.wording import counted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType

    from paritas.engines.rows import EngineReport, EngineRow

REQUEST_COLUMNS: tuple[Column[EngineRow], ...] = (
    Column("status", lambda row: STATUS_MARKS[row.status], is_fixed=True),
    Column("request", lambda row: row.name, is_fixed=True),
    Column("numbers", lambda row: str(row.tokens)),
    Column("difference", lambda row: f"{row.difference:.3g}"),
    Column("rounding", lambda row: f"{row.rounding:.3g}"),
    Column("first wrong", lambda row: None if row.first is None else f"token {row.first}"),
)


def engine_report(report: EngineReport) -> Group:
    """The whole report; print with `crop=False` to keep the last line in one piece."""
    verdict = report.verdict
    compared = counted(verdict.coverage.compared, "item")
    tried = f"; {counted(report.tried, 'changed run')} tried" if report.tried else ""
    return Group(
        terminal_table(REQUEST_COLUMNS, report.rows),
        Text(),
        *_describe_causes(report),
        *paragraph(details(verdict)),
        *listed("note", verdict.notes),
        Text(f"{compared} compared in {report.seconds:.1f} s{tried}"),
        headline_text(report.headline, verdict.status),
    )


def _describe_causes(report: EngineReport) -> Iterator[RenderableType]:
    for cause in report.causes:
        yield Text(f"{cause.kind}: {cause.sentence}", style="bold")
        yield from (Text(f"  as well: {other}") for other in cause.also)
    yield from listed("seen", report.observed)


def notebook_summary(report: EngineReport) -> NotebookResult:
    """The report for a cell of a notebook."""
    verdict = report.verdict
    causes = [f"{cause.kind}: {cause.sentence}" for cause in report.causes]
    return dataclasses.replace(
        verdict_summary(verdict),
        title="engine",
        words=report.headline,
        lists=[("Causes", causes, "note"), ("Notes", verdict.notes, "note")],
        legend="",
        table=page_table(REQUEST_COLUMNS, report.rows, MOST_IN_CELL),
    )
