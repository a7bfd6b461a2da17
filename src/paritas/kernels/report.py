"""The judgement of a kernel, as people see it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from rich.console import Group
from rich.text import Text

from paritas.core.reporting.notebook import NotebookResult, verdict_summary
from paritas.core.reporting.tables import (
    STATUS_MARKS,
    STYLES,
    Column,
    fold_rows,
    terminal_table,
)
from paritas.core.reporting.terminal import headline_text, indent_text, list_items, paragraph
from paritas.core.results.wording import MOST_SHOWN, count_things, finding_lines, list_first

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType
    from rich.table import Table

    from paritas.kernels.rows import KernelReport, KernelRow

_MICRO = 1e6


def kernel_report(report: KernelReport) -> Group:
    """The whole of it; print with `crop=False`, so that the last line stays one line."""
    parts: list[RenderableType] = []
    if report.rows:
        parts += [_cases_table(report), Text()]
    parts += [*paragraph(_failing_cases(report)), *paragraph(_described_limits(report))]
    parts += [*paragraph(_described_task(report)), *paragraph(_described_timing(report))]
    if report.smallest:
        parts += [Text(f"smallest failing case: {report.smallest}")]
    if report.script:
        parts += [Text(f"a script that shows it: {report.script}")]
    parts += [*list_items("note", report.notes)]
    if report.refused:
        parts.append(
            Text(f"{count_things(len(report.refused), 'case')} refused by the reference itself")
        )
    return Group(*parts, headline_text(report.headline, report.status))


def _name_case(row: KernelRow) -> str:
    return f"{row.family}: {row.case}{' (limit)' if row.is_limit else ''}"


CASE_COLUMNS: tuple[Column[KernelRow], ...] = (
    Column("status", lambda row: STATUS_MARKS[row.status], is_fixed=True),
    Column("case", _name_case),
    Column("inputs", lambda row: row.inputs),
)


def _cases_table(report: KernelReport) -> Table:
    return terminal_table(CASE_COLUMNS, fold_rows(report.rows, "case"))


def _failing_cases(report: KernelReport) -> Iterator[RenderableType]:
    for row in report.failures[:MOST_SHOWN]:
        yield Text(f"{row.case}", style=STYLES[row.status])
        yield from (indent_text(line) for line in _row_lines(row))
    hidden_count = len(report.failures) - MOST_SHOWN
    if hidden_count > 0:
        yield Text(f"and {count_things(hidden_count, 'more failing case')}: they are in the JSON")


def _row_lines(row: KernelRow) -> list[str]:
    worst = row.verdict.worst
    return [] if worst is None else list(finding_lines(worst))


def _described_limits(report: KernelReport) -> Iterator[RenderableType]:
    if report.limits:
        names = list_first([row.case for row in report.limits], 5, between="; ")
        yield Text(f"limits of the kernel, not failures: {names}")


def _described_task(report: KernelReport) -> Iterator[RenderableType]:
    rating = report.rating
    if rating.power is not None:
        yield Text(
            f"power: the given inputs show {rating.caught} of {rating.planted} planted faults"
        )
    if rating.note:
        yield Text(rating.note)


def _described_timing(report: KernelReport) -> Iterator[RenderableType]:
    timing = report.timing
    if timing is None:
        return
    verdict = "" if report.passed else f" (the kernel is {report.status})"
    how = "cold" if timing.is_cold else "warm"
    yield Text(
        f"time per call, {how} caches, median of {timing.calls}: reference "
        f"{timing.reference * _MICRO:.1f} +- {timing.reference_spread * _MICRO:.1f} us, candidate "
        f"{timing.candidate * _MICRO:.1f} +- {timing.candidate_spread * _MICRO:.1f} us: "
        f"{timing.speedup:.2f} times as fast{verdict}"
    )


def notebook_summary(report: KernelReport) -> NotebookResult:
    """The judgement for a cell of a notebook."""
    words = report.headline.removeprefix(f"{report.status.value}: ")
    return dataclasses.replace(verdict_summary(report.verdict), words=words)
