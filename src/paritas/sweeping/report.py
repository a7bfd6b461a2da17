"""A sweep, as people and CI systems see it."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import TYPE_CHECKING

from rich.console import Group
from rich.text import Text

from paritas.core.errors import plain
from paritas.core.reporting.annotations import Account, ItemAnnotation
from paritas.core.reporting.notebook import NotebookResult, verdict_summary
from paritas.core.reporting.pages import PageLayout, cause_story, render_page
from paritas.core.reporting.tables import (
    MOST_IN_CELL,
    SIGNS,
    STATUS_MARKS,
    STYLES,
    Column,
    fold_rows,
    page_table,
    terminal_table,
)
from paritas.core.reporting.terminal import (
    FINDING_COLUMNS,
    headline_text,
    indent_text,
    list_items,
    paragraph,
)
from paritas.core.results.causes import group_causes
from paritas.core.results.findings import Status
from paritas.core.results.progress import clock_words
from paritas.core.results.wording import (
    MEANING,
    MOST_SHOWN,
    cause_lines,
    count_things,
    list_first,
    size,
)
from paritas.sweeping.rows import (
    ChangeKind,
    RunEnd,
    change_words,
    column_name,
    columns,
    row_words,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType
    from rich.table import Table

    from paritas.core.reporting.annotations import Level
    from paritas.core.reporting.tables import PageTable
    from paritas.core.results.causes import Cause
    from paritas.core.results.findings import Finding
    from paritas.sweeping.rows import SweepReport, SweepRow

# --- A terminal of 80 columns ---------------------------------------------------------------------

_LONGEST_WORDS = 300


def sweep_report(report: SweepReport, remark: str = "") -> Group:
    """The whole of it; print with `crop=False`, so that the last line stays one line."""
    parts: list[RenderableType] = []
    common, _ = columns(report.rows)
    if common:
        parts += [Text(f"all runs: {', '.join(common)}"), Text()]
    if report.rows:
        parts += [_runs_table(report, common), Text()]
    parts += [*paragraph(_failing_runs(report)), *paragraph(_described_changes(report))]
    took = f"{count_things(len(report.rows), 'run')} in {clock_words(report.seconds)}"
    parts += [Text(f"{took}; torch {report.versions.get('torch', 'unknown')}")]
    parts += [*list_items("note", report.notes), *([Text(remark)] if remark else [])]
    is_fine = report.against and not report.newly_wrong
    status = Status.IDENTICAL if is_fine else report.status
    return Group(*parts, headline_text(report.headline, status))


_STATUS: Column[SweepRow] = Column("status", lambda row: STATUS_MARKS[row.status], is_fixed=True)
_TARGET: Column[SweepRow] = Column("target", lambda row: row.run.target)


def _duration(row: SweepRow) -> str:
    return f"{row.seconds:.0f} s"


def _runs_table(report: SweepReport, common: tuple[str, ...]) -> Table:
    """One row per run, gravest first, then in the order of the targets; many of one are folded.

    Of those that pass, the ones that take longest have rows.
    """
    columns = [_STATUS, _TARGET]
    if len({row.run.settings for row in report.rows}) > 1:
        columns.append(Column("settings", lambda row: column_name(row.run.settings, common)))
    columns.append(Column("time", _duration, "number", is_fixed=True))
    return terminal_table(columns, fold_rows(report.rows, "run", lambda row: row.seconds))


def _failing_runs(report: SweepReport) -> Iterator[RenderableType]:
    """What failed, in words; the same words come once."""
    groups: dict[tuple[Status, str], list[SweepRow]] = {}
    for row in report.failures:
        groups.setdefault((row.status, _cut(row_words(row))), []).append(row)
    for (status, words), rows in list(groups.items())[:MOST_SHOWN]:
        yield Text(str(rows[0].run), style=STYLES[status])
        yield indent_text(words)
        if len(rows) > 1:
            yield indent_text(f"the same in {list_first([str(row.run) for row in rows[1:]], 3)}")
    unshown_count = sum(map(len, list(groups.values())[MOST_SHOWN:]))
    if unshown_count:
        yield Text(f"and {unshown_count} more: they are in report.html")


def _described_changes(report: SweepReport) -> Iterator[RenderableType]:
    for kind in ChangeKind:
        changes = [change for change in report.changes if change.kind is kind]
        if not changes:
            continue
        style = STYLES[Status.DIFFERENT] if any(change.fails for change in changes) else ""
        yield Text(f"{kind.value}: {count_things(len(changes), 'run')}", style=style)
        yield from (
            indent_text(f"{change.run}{change_words(change)}") for change in changes[:MOST_SHOWN]
        )
        if len(changes) > MOST_SHOWN:
            yield indent_text(f"and {len(changes) - MOST_SHOWN} more: they are in sweep.json")


def _cut(words: str) -> str:
    line = " ".join(words.split())
    return line if len(line) <= _LONGEST_WORDS else f"{line[:_LONGEST_WORDS]} ..."


# --- A sweep for GitHub, SARIF and JUnit ----------------------------------------------------------


def sweep_account(report: SweepReport, *, subject: str) -> Account:
    """An item for each run; against an earlier sweep, only what is newly wrong is an error."""
    wrong = {change.run for change in report.newly_wrong}
    items = [_annotate_row(row, report, newly=row.run in wrong) for row in report.rows]
    return Account(
        command="sweep",
        subject=subject,
        headline=report.headline,
        exit_code=report.exit_code,
        items=tuple(items),
    )


def _annotate_row(row: SweepRow, report: SweepReport, *, newly: bool) -> ItemAnnotation:
    passes = row.passes(strict=report.strict)
    level: Level = "warning" if row.status is Status.UNSTABLE else "pass"
    if not passes:
        level = "error" if newly or not report.against else "warning"
    lines = (
        [line.strip() for shown_cause in _shown_causes(row) for line in cause_lines(shown_cause)]
        if not passes
        else []
    )
    return ItemAnnotation(
        level=level,
        rule=row.status.value,
        item=plain(str(row.run)),
        title=plain(f"{row.run}: {row.status.value}"),
        message=plain("\n".join([row_words(row), *lines, row.log]).rstrip() if not passes else ""),
        group=plain(row.run.target),
        seconds=row.seconds,
    )


def _shown_causes(row: SweepRow) -> list[Cause]:
    """The causes that are told in full."""
    return group_causes(row.verdict.failures)[:MOST_SHOWN]


# --- A sweep as one HTML page: targets by settings ------------------------------------------------

_SWEEP_LAYOUT = PageLayout(
    template="sweep_page.html.jinja",
    styles=("basics.css", "report.css", "sweep_page.css"),
    vendored=(),
    own=("sweep.js",),
)


@dataclasses.dataclass(frozen=True)
class _Panel:
    """What is shown of a run when its cell is clicked."""

    place: int
    row: SweepRow
    words: str
    facts: list[tuple[str, str]]
    stories: list[tuple[Finding, str]]
    others: PageTable


def sweep_page(report: SweepReport) -> str:
    """The sweep as one HTML file that loads nothing from anywhere."""
    common, settings = columns(report.rows)
    panels = [_panel(row_index, row, report) for row_index, row in enumerate(report.rows)]
    cells = {(panel.row.run.target, panel.row.run.settings): panel for panel in panels}
    targets = list(dict.fromkeys(row.run.target for row in report.rows))
    counts = Counter(row.status for row in report.rows)
    return render_page(
        _SWEEP_LAYOUT,
        {},
        status=report.status,
        headline=report.headline,
        report=report,
        common=common,
        took=clock_words(report.seconds),
        columns=[column_name(setting, common) for setting in settings],
        matrix=[(name, [cells.get((name, setting)) for setting in settings]) for name in targets],
        panels=panels,
        changes=[(change, change_words(change).removeprefix(": ")) for change in report.changes],
        statuses=[(status, MEANING[status], counts[status]) for status in reversed(Status)],
        signs=SIGNS,
    )


def _panel(row_index: int, row: SweepRow, report: SweepReport) -> _Panel:
    told = _shown_causes(row)
    starts = {id(cause.start) for cause in told}
    rest = [finding for finding in row.verdict.findings if id(finding) not in starts]
    others = {
        name: text for name, text in row.versions.items() if report.versions.get(name) != text
    }
    worst = row.worst
    facts = [
        ("what to do", "" if worst is None or row.ended is RunEnd.VERDICT else worst.advice),
        ("ended", "with a verdict" if row.ended is RunEnd.VERDICT else row.ended.value),
        ("findings", ", ".join(f"{count} {name}" for name, count in row.counts.items())),
        ("began", row.began),
        ("time", f"{row.seconds:.1f} s, {row.processor_seconds:.1f} s of processor time"),
        ("memory", size(row.memory)),
        *others.items(),
    ]
    return _Panel(
        place=row_index,
        row=row,
        words=row_words(row),
        facts=[(name, text) for name, text in facts if text],
        # Of a run without a verdict, the words above are all.
        stories=[cause_story(cause) for cause in told if row.ended is RunEnd.VERDICT],
        others=page_table(FINDING_COLUMNS, rest),
    )


# --- A cell of a notebook -------------------------------------------------------------------------

RUN_COLUMNS: tuple[Column[SweepRow], ...] = (
    _STATUS,
    _TARGET,
    Column("settings", lambda row: ", ".join(row.run.settings)),
    Column("time", _duration),
    Column("what", row_words),
)


def notebook_summary(report: SweepReport) -> NotebookResult:
    """The sweep for a cell of a notebook."""
    ordered = sorted(report.rows, key=lambda row: -row.status.gravity)
    counts = Counter(row.status for row in report.rows)
    changes = [
        f"{change.kind.value}: {change.run}{change_words(change)}" for change in report.changes
    ]
    return NotebookResult(
        mark=STATUS_MARKS[report.status],
        title="sweep",
        words=report.headline,
        facts=[
            (f"{SIGNS[status]} {status.value}", f"{counts[status]:,}")
            for status in reversed(Status)
            if counts[status]
        ],
        lists=[("Notes", report.notes, "note"), ("Changes", changes, "note")],
        table=page_table(RUN_COLUMNS, ordered, MOST_IN_CELL),
    )


def row_summary(row: SweepRow) -> NotebookResult:
    """One run for a cell of a notebook."""
    return dataclasses.replace(verdict_summary(row.verdict), title=f"{row.status.value}: {row.run}")
