"""A sweep for people and for CI: a table for the terminal, an account, and one HTML page."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import TYPE_CHECKING

from rich.console import Group
from rich.text import Text

from paritas.reports.annotations import Account, ItemAnnotation, plain
from paritas.reports.pages import (
    SIGNS,
    PageLayout,
    finding_row,
    finding_story,
    render_page,
)
from paritas.reports.terminal import (
    FINDING_COLUMNS,
    MOST_ROWS,
    STYLES,
    indented,
    listed,
    paragraph,
    small_table,
)
from paritas.results.findings import Status
from paritas.results.progress import clock_words
from paritas.results.sweeps import (
    ChangeKind,
    RunEnd,
    change_words,
    column_name,
    columns,
    row_words,
    sweep_headline,
)
from paritas.results.wording import MEANING, MOST_SHOWN, counted, enumerated, finding_lines, size

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import RenderableType
    from rich.table import Table

    from paritas.reports.annotations import Level
    from paritas.results.findings import Finding
    from paritas.results.sweeps import SweepReport, SweepRow

# --- A terminal of 80 columns ---------------------------------------------------------------------

_LONGEST_WORDS = 300


def sweep_report(report: SweepReport, remark: str = "") -> Group:
    """The whole of it; print with `crop=False`, so that the last line stays one line."""
    parts: list[RenderableType] = []
    common, _ = columns(report.rows)
    if common:
        parts += [Text(f"all runs: {', '.join(common)}"), Text()]
    if report.rows:
        parts += [_rows_table(report, common), Text()]
    parts += [*paragraph(_described_failures(report)), *paragraph(_described_changes(report))]
    took = f"{counted(len(report.rows), 'run')} in {clock_words(report.seconds)}"
    parts += [Text(f"{took}; torch {report.versions.get('torch', 'unknown')}")]
    parts += [*listed("note", report.notes), *([Text(remark)] if remark else [])]
    style = STYLES[report.status] if not report.against or report.newly_wrong else "green"
    parts.append(Text(sweep_headline(report), style=style, no_wrap=True, overflow="ignore"))
    return Group(*parts)


def _rows_table(report: SweepReport, common: tuple[str, ...]) -> Table:
    """One row per run, gravest first, then in the order of the targets; many of one are folded.

    Of those that pass, the ones that take longest have rows.
    """
    table = small_table()
    has_settings = len({row.run.settings for row in report.rows}) > 1
    names = ["status", "target", *(["settings"] if has_settings else []), "time"]
    for name in names:
        fixed, number = name in ("status", "time"), name == "time"
        table.add_column(
            name, overflow="fold", no_wrap=fixed, justify="right" if number else "left"
        )
    for status in sorted(Status, key=lambda status: -status.gravity):
        found = [row for row in report.rows if row.status is status]
        shown, folded = _fold_rows(status, found)
        word = Text(status.value, style=STYLES[status])
        for row in shown:
            settings = [Text(column_name(row.run.settings, common))] if has_settings else []
            table.add_row(word, Text(row.run.target), *settings, Text(f"{row.seconds:.0f} s"))
        if folded:
            more = counted(folded, "more run" if shown else "run")
            table.add_row(word, Text(more), *[Text()] * (len(names) - 2))
    return table


def _described_failures(report: SweepReport) -> Iterator[RenderableType]:
    """What failed, in words; the same words come once."""
    groups: dict[tuple[Status, str], list[SweepRow]] = {}
    for row in report.failures:
        groups.setdefault((row.status, _cut(row_words(row))), []).append(row)
    for (status, words), rows in list(groups.items())[:MOST_SHOWN]:
        yield Text(str(rows[0].run), style=STYLES[status])
        yield indented(words)
        if len(rows) > 1:
            yield indented(f"the same in {enumerated([str(row.run) for row in rows[1:]], 3)}")
    left = sum(map(len, list(groups.values())[MOST_SHOWN:]))
    if left:
        yield Text(f"and {left} more: they are in report.html")


def _fold_rows(status: Status, rows: list[SweepRow]) -> tuple[list[SweepRow], int]:
    most = MOST_ROWS[status]
    if len(rows) <= most:
        return rows, 0
    if status.passes():
        rows = sorted(rows, key=lambda row: -row.seconds)
    return rows[:most], len(rows) - most


def _described_changes(report: SweepReport) -> Iterator[RenderableType]:
    for kind in ChangeKind:
        found = [one for one in report.changes if one.kind is kind]
        if not found:
            continue
        style = STYLES[Status.DIFFERENT] if any(one.fails for one in found) else ""
        yield Text(f"{kind.value}: {counted(len(found), 'run')}", style=style)
        yield from (indented(f"{one.run}{change_words(one)}") for one in found[:MOST_SHOWN])
        if len(found) > MOST_SHOWN:
            yield indented(f"and {len(found) - MOST_SHOWN} more: they are in sweep.json")


def _cut(words: str) -> str:
    line = " ".join(words.split())
    return line if len(line) <= _LONGEST_WORDS else f"{line[:_LONGEST_WORDS]} ..."


# --- For GitHub, SARIF and JUnit ------------------------------------------------------------------


def sweep_account(report: SweepReport, *, subject: str) -> Account:
    """An item for each run; against an earlier sweep, only what is newly wrong is an error."""
    wrong = {one.run for one in report.newly_wrong}
    items = [_annotate_row(row, report, newly=row.run in wrong) for row in report.rows]
    return Account(
        command="sweep",
        subject=subject,
        headline=sweep_headline(report),
        exit_code=report.exit_code,
        items=tuple(items),
    )


def _annotate_row(row: SweepRow, report: SweepReport, *, newly: bool) -> ItemAnnotation:
    passes = row.passes(strict=report.strict)
    level: Level = "warning" if row.status is Status.UNSTABLE else "pass"
    if not passes:
        level = "error" if newly or not report.against else "warning"
    lines = (
        [line.strip() for one in _told(row) for line in finding_lines(one)] if not passes else []
    )
    return ItemAnnotation(
        level=level,
        rule=row.status.value,
        item=plain(str(row.run)),
        title=plain(f"{row.run}: {row.status.value}"),
        message=plain("\n".join([row_words(row), *lines, row.log]).rstrip() if not passes else ""),
    )


def _told(row: SweepRow) -> tuple[Finding, ...]:
    """The findings that are told in full."""
    return row.verdict.failures[:MOST_SHOWN]


# --- One HTML page: targets by settings -----------------------------------------------------------

_LAYOUT = PageLayout(
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
    others: list[tuple[str, str, str, list[str]]]


def sweep_page(report: SweepReport) -> str:
    """The sweep as one HTML file that loads nothing from anywhere."""
    common, settings = columns(report.rows)
    panels = [_panel(place, row, report) for place, row in enumerate(report.rows)]
    cells = {(one.row.run.target, one.row.run.settings): one for one in panels}
    targets = list(dict.fromkeys(row.run.target for row in report.rows))
    counts = Counter(row.status for row in report.rows)
    return render_page(
        _LAYOUT,
        {},
        status=report.status,
        headline=sweep_headline(report),
        report=report,
        common=common,
        took=clock_words(report.seconds),
        columns=[column_name(one, common) for one in settings],
        matrix=[(name, [cells.get((name, one)) for one in settings]) for name in targets],
        panels=panels,
        changes=[(one, change_words(one).removeprefix(": ")) for one in report.changes],
        statuses=[(status, MEANING[status], counts[status]) for status in reversed(Status)],
        signs=SIGNS,
        finding_columns=FINDING_COLUMNS,
    )


def _panel(place: int, row: SweepRow, report: SweepReport) -> _Panel:
    told = _told(row)
    rest: Sequence[Finding] = [one for one in row.verdict.findings if one not in told]
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
        place=place,
        row=row,
        words=row_words(row),
        facts=[(name, text) for name, text in facts if text],
        # Of a run without a verdict, the words above are all.
        stories=[finding_story(one) for one in told if row.ended is RunEnd.VERDICT],
        others=[finding_row(one) for one in rest],
    )
