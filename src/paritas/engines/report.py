"""What a serving engine returned, as people see it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from rich.text import Text

from paritas.core.reporting.notebook import NotebookResult, verdict_summary
from paritas.core.reporting.tables import (
    MOST_IN_CELL,
    STATUS_MARKS,
    Column,
    page_table,
    terminal_table,
)
from paritas.core.reporting.terminal import list_items, model_report
from paritas.core.results.wording import count_things

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Group, RenderableType

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
    """The whole report."""
    table = terminal_table(REQUEST_COLUMNS, report.rows)
    tried = f"; {count_things(report.tried, 'changed run')} tried" if report.tried else ""
    compared = count_things(report.verdict.coverage.compared, "item")
    took = f"{compared} compared in {report.seconds:.1f} s{tried}"
    return model_report(report, table, took, _describe_causes(report))


def _describe_causes(report: EngineReport) -> Iterator[RenderableType]:
    for cause in report.causes:
        yield Text(f"{cause.kind}: {cause.sentence}", style="bold")
        yield from (Text(f"  as well: {other}") for other in cause.also)
    yield from list_items("seen", report.observed)


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
