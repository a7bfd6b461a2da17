"""Verdicts, guarded runs and power reports for a terminal.

Everything is readable without colour and in 80 columns, in ASCII except for the lines of tables
(which rich replaces if the terminal cannot show them). The last line is the verdict; it is not
wrapped, which helps scripts that look for it: print with `crop=False`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from rich.console import Group
from rich.padding import Padding
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from paritas.core.errors import plain
from paritas.core.reporting.tables import (
    MOST_ROWS,
    STATUS_MARKS,
    STYLES,
    Column,
    Rest,
    fold_rows,
    terminal_table,
)
from paritas.core.results.causes import group_causes, is_located
from paritas.core.results.findings import Status
from paritas.core.results.wording import (
    MOST_SHOWN,
    cause_lines,
    count_things,
    deciding_excess,
    deciding_figure,
    deciding_score,
    finding_lines,
    headline,
    is_inexact,
    item_words,
    list_first,
    near_path,
    told_findings,
    value_words,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from rich.console import Console, ConsoleOptions, RenderableType

    from paritas.core.results.causes import Cause
    from paritas.core.results.findings import Finding, Verdict
    from paritas.core.results.report import Report

# So many rows for what results from a place that is known; the place says how many there are.
MOST_RESULTS = 3
WITHOUT_FIGURES = 3  # columns: status, item and value
FINDING_LEGEND = (
    "off by: norm of the difference / norm of the reference, or a count of values\n"
    "worst / allowed: in multiples of the reference's own rounding noise"
)


class Printable:
    """A report whose texts cannot control the terminal: models, files and errors wrote them."""

    def __init__(self, shown: RenderableType) -> None:
        self._shown = shown

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        """Render it; colours are the segments' styles, so all that is in their text is text."""
        for segment in console.render(self._shown, options):
            yield segment if segment.control else Segment(plain(segment.text), segment.style)


def verdict_report(verdict: Verdict) -> Group:
    """The whole verdict."""
    parts: list[RenderableType] = []
    if verdict.findings:
        table = findings_table(verdict)
        has_figures = len(table.columns) > WITHOUT_FIGURES
        parts += [table, *([Text(FINDING_LEGEND, style="dim")] if has_figures else []), Text()]
    parts += [*paragraph(details(verdict)), *remarks(verdict), last_line(verdict)]
    return Group(*parts)


def paragraph(lines: Iterable[RenderableType]) -> list[RenderableType]:
    """The lines and an empty one, if there are any."""
    shown_lines = list(lines)
    return [*shown_lines, Text()] if shown_lines else []


def headline_text(words: str, status: Status) -> Text:
    """A verdict in one line, which is never wrapped."""
    return Text(words, style=STYLES[status], no_wrap=True, overflow="ignore")


def last_line(verdict: Verdict, *remarks: str, identical: str = "") -> Text:
    """The verdict in one line; `identical` replaces the meaning of that status."""
    words = ", ".join((headline(verdict, identical=identical), *remarks))
    return headline_text(words, verdict.status if verdict.enabled else Status.UNVERIFIED)


def model_report(
    report: Report, table: Table, took: str, causes: Iterable[RenderableType] = ()
) -> Group:
    """A report about one model: its rows, what fails, notes, the headline.

    Print it with `crop=False` to keep the last line in one piece.

    Args:
        took: what was compared, and in which time.
        causes: what explains the failures.
    """
    verdict = report.verdict
    return Group(
        table,
        Text(),
        *causes,
        *paragraph(details(verdict)),
        *list_items("note", verdict.notes),
        Text(took),
        headline_text(report.headline, verdict.status),
    )


def findings_table(verdict: Verdict) -> Table:
    """One row per finding, gravest first, then where it starts, then in program order.

    The rest are counted.
    """
    rows: list[Finding | Rest] = []
    causes = [cause for cause in group_causes(verdict.failures) if cause.is_located]
    results = {id(finding) for cause in causes for finding in cause.results}
    for status in sorted(Status, key=lambda status: -status.gravity):
        findings = [finding for finding in verdict.findings if finding.status is status]
        findings.sort(key=lambda finding: (not is_located(finding), id(finding) in results))
        ends = [finding for finding in findings if id(finding) in results]
        rows += [
            *_fold_findings(status, findings[: len(findings) - len(ends)]),
            *ends[:MOST_RESULTS],
        ]
        if more := len(ends[MOST_RESULTS:]):
            rows.append(
                Rest((STATUS_MARKS[status], f"{count_things(more, 'more item')}, as a result"))
            )
    return terminal_table(FINDING_COLUMNS, rows)


def _fold_findings(status: Status, findings: list[Finding]) -> list[Finding | Rest]:
    if status is Status.IDENTICAL and len(findings) > MOST_ROWS[status]:
        return [Rest((STATUS_MARKS[status], f"{len(findings)} items"))]
    # Show those nearest to their limits.
    order = deciding_excess if status is Status.EQUIVALENT else None
    return fold_rows(findings, "item", order)


def _off_by(finding: Finding) -> str:
    metrics = finding.metrics
    if metrics is None:
        return ""
    if metrics.nonfinite_mismatches:
        return f"{metrics.nonfinite_mismatches} NaN/Inf"
    if is_inexact(finding):
        return f"{metrics.rel_l2:.1e}"
    return f"{metrics.mismatched} of {metrics.numel}"


def _worst(finding: Finding) -> str:
    decided = deciding_score(finding)
    if decided is None:
        return ""
    run, score = decided
    name, value, limit = deciding_figure(score)
    figures = f"{value:.2g} / {limit:.2g}"
    named = figures if name == "worst" else f"{name} {figures}"
    return f"{named} lifted" if run == "lifted" else named


FINDING_COLUMNS: tuple[Column[Finding], ...] = (
    Column("status", lambda finding: STATUS_MARKS[finding.status], is_fixed=True),
    Column("item", item_words),
    Column("value", value_words, is_optional=True),
    Column("off by", _off_by, is_optional=True),
    Column("worst / allowed", _worst, is_optional=True),
)


def details(verdict: Verdict) -> Iterator[RenderableType]:
    """Failures by cause, or else unstable findings; those with the same words are grouped."""
    findings = told_findings(verdict)
    groups: dict[tuple[str, ...], list[Cause]] = {}
    for cause in group_causes(map(with_near_paths, findings)):
        groups.setdefault(tuple(cause_lines(cause)[1:]), []).append(cause)
    shown = list(groups.items())[:MOST_SHOWN]
    for lines, (first, *others) in shown:
        yield Text(finding_lines(first.start)[0].strip(), style=STYLES[first.start.status])
        for line in lines:
            words = line.lstrip()
            yield indent_text(words, len(line) - len(words) - 2)
        if others:
            yield indent_text(f"also: {list_first([cause.start.path for cause in others])}")
    hidden_count = len(findings) - sum(
        len(cause.findings) for _, causes in shown for cause in causes
    )
    if hidden_count:
        yield Text(f"and {hidden_count} more")


def with_near_paths(finding: Finding) -> Finding:
    """The same finding with `near_path` applied to its source lines."""
    origin = finding.origin
    if origin is not None:
        origin = msgspec.structs.replace(origin, source=near_path(origin.source))
    source = None if finding.source is None else near_path(finding.source)
    return msgspec.structs.replace(finding, source=source, origin=origin)


def remarks(verdict: Verdict) -> Iterator[RenderableType]:
    """Coverage, notes, and the command that makes a script of a failure."""
    coverage = verdict.coverage
    counts = f"{coverage.compared} compared, {len(coverage.skipped)} skipped, "
    if coverage.not_selected:  # a note says why; their names are in the files
        counts += f"{len(coverage.not_selected)} not selected, "
    yield Text(f"coverage: {counts}{len(coverage.unmatched)} unmatched")
    yield from list_items("skipped", coverage.skipped)
    yield from list_items("unmatched", coverage.unmatched)
    yield from list_items("note", verdict.notes)
    if verdict.shrink_command:
        yield Text(f"next: {verdict.shrink_command}")


def list_items(label: str, items: Iterable[str], indent: int = 2) -> Iterator[RenderableType]:
    """A line for each of the first few, and the number of the rest."""
    item_list = list(items)
    shown = item_list[:MOST_SHOWN]
    if len(item_list) > MOST_SHOWN:
        shown.append(f"{len(item_list) - MOST_SHOWN} more")
    for item in shown:
        yield indent_text(f"{label}: {item}", indent)


def indent_text(words: str, indent: int = 2) -> RenderableType:
    """Text that keeps its indentation when it is wrapped."""
    return Padding(Text(words), (0, 0, 0, indent), expand=False) if indent else Text(words)


def heading(facts: Iterable[tuple[str, str]]) -> RenderableType:
    """A label and its text on each line."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True, style="bold")
    grid.add_column(overflow="fold")
    for label, words in facts:
        grid.add_row(label, Text(words))
    return grid
