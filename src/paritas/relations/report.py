"""The relations of one model, as people see them."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from paritas.core.reporting.notebook import NotebookResult, verdict_summary
from paritas.core.reporting.tables import (
    MOST_IN_CELL,
    STATUS_MARKS,
    Column,
    Mark,
    page_table,
    terminal_table,
)
from paritas.core.reporting.terminal import model_report
from paritas.core.results.wording import count_things

if TYPE_CHECKING:
    from rich.console import Group

    from paritas.relations.rows import InvariantsReport, RelationRow


def _mark_status(row: RelationRow) -> Mark:
    return Mark(row.word, "dim") if row.status is None else STATUS_MARKS[row.status]


def _count_cases(row: RelationRow) -> str:
    return "" if row.status is None else str(row.verdict.coverage.compared)


_STATUS: Column[RelationRow] = Column("status", _mark_status, is_fixed=True)
_RELATION: Column[RelationRow] = Column("relation", lambda row: row.relation, is_fixed=True)
_WHAT: Column[RelationRow] = Column("what", lambda row: row.summary)
RELATION_COLUMNS = (_STATUS, _RELATION, Column("cases", _count_cases), _WHAT)


def invariants_report(report: InvariantsReport) -> Group:
    """The whole report."""
    compared = count_things(report.verdict.coverage.compared, "value")
    table = terminal_table(RELATION_COLUMNS, report.rows)
    return model_report(report, table, f"{compared} compared in {report.seconds:.1f} s")


def notebook_summary(report: InvariantsReport) -> NotebookResult:
    """The report for a cell of a notebook."""
    verdict = report.verdict
    return dataclasses.replace(
        verdict_summary(verdict),
        title="invariants",
        words=report.headline,
        lists=[("Notes", verdict.notes, "note")],
        legend="",
        table=page_table((_STATUS, _RELATION, _WHAT), report.rows, MOST_IN_CELL),
    )
