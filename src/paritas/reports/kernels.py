"""The judgement of a kernel for people and for CI: a table for the terminal, and an account."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group
from rich.text import Text

from paritas.reports.annotations import Account, verdict_account
from paritas.reports.terminal import (
    MOST_ROWS,
    STYLES,
    indented,
    listed,
    paragraph,
    small_table,
)
from paritas.results.findings import Status
from paritas.results.kernels import kernel_headline
from paritas.results.wording import MOST_SHOWN, counted, enumerated, finding_lines

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType
    from rich.table import Table

    from paritas.results.kernels import KernelReport, KernelRow

_MICRO = 1e6


def kernel_report(report: KernelReport) -> Group:
    """The whole of it; print with `crop=False`, so that the last line stays one line."""
    parts: list[RenderableType] = []
    if report.rows:
        parts += [_rows_table(report), Text()]
    parts += [*paragraph(_described_failures(report)), *paragraph(_described_limits(report))]
    parts += [*paragraph(_described_task(report)), *paragraph(_described_timing(report))]
    if report.smallest:
        parts += [Text(f"smallest failing case: {report.smallest}")]
    if report.script:
        parts += [Text(f"a script that shows it: {report.script}")]
    parts += [*listed("note", report.notes)]
    if report.refused:
        parts.append(
            Text(f"{counted(len(report.refused), 'case')} refused by the reference itself")
        )
    style = STYLES[report.status]
    parts.append(Text(kernel_headline(report), style=style, no_wrap=True, overflow="ignore"))
    return Group(*parts)


def _rows_table(report: KernelReport) -> Table:
    table = small_table()
    for name in ("status", "case", "inputs"):
        table.add_column(name, overflow="fold", no_wrap=name == "status")
    for status in sorted(Status, key=lambda status: -status.gravity):
        found = [row for row in report.rows if row.status is status]
        shown = found[: MOST_ROWS[status]]
        word = Text(status.value, style=STYLES[status])
        for row in shown:
            limit = " (limit)" if row.is_limit else ""
            table.add_row(word, Text(f"{row.family}: {row.case}{limit}"), Text(row.inputs))
        if len(found) > len(shown):
            table.add_row(word, Text(counted(len(found) - len(shown), "more case")), Text())
    return table


def _described_failures(report: KernelReport) -> Iterator[RenderableType]:
    for row in report.failures[:MOST_SHOWN]:
        yield Text(f"{row.case}", style=STYLES[row.status])
        yield from (indented(line) for line in _row_lines(row))
    left = len(report.failures) - MOST_SHOWN
    if left > 0:
        yield Text(f"and {counted(left, 'more failing case')}: they are in the JSON")


def _row_lines(row: KernelRow) -> list[str]:
    worst = max(row.verdict.findings, key=lambda one: one.status.gravity, default=None)
    return [] if worst is None else list(finding_lines(worst))


def _described_limits(report: KernelReport) -> Iterator[RenderableType]:
    if report.limits:
        names = enumerated([row.case for row in report.limits], 5, between="; ")
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


def kernel_account(report: KernelReport, *, subject: str, file: str = "") -> Account:
    """The judgement for GitHub, SARIF and JUnit."""
    return verdict_account(report.verdict, command="kernel", subject=subject, file=file)
