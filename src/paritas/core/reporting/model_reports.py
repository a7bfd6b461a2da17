"""Reports about models and kernels, for the terminal, for CI and as HTML."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import TYPE_CHECKING

from rich.console import Group
from rich.text import Text

from paritas.core.errors import plain
from paritas.core.reporting.annotations import Account, ItemAnnotation, verdict_account
from paritas.core.reporting.pages import (
    SIGNS,
    PageLayout,
    cause_story,
    finding_row,
    render_page,
    verdict_page,
)
from paritas.core.reporting.terminal import (
    FINDING_COLUMNS,
    MOST_ROWS,
    STYLES,
    details,
    indented,
    listed,
    paragraph,
    small_table,
)
from paritas.core.results.causes import group_causes
from paritas.core.results.findings import Status
from paritas.core.results.model_reports import (
    EngineReport,
    InvariantsReport,
    engine_headline,
    invariants_headline,
    kernel_headline,
)
from paritas.core.results.progress import clock_words
from paritas.core.results.sweeps import (
    ChangeKind,
    RunEnd,
    change_words,
    column_name,
    columns,
    row_words,
    sweep_headline,
)
from paritas.core.results.wording import (
    MEANING,
    MOST_SHOWN,
    cause_lines,
    counted,
    enumerated,
    finding_lines,
    size,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType
    from rich.table import Table

    from paritas.core.reporting.annotations import Level
    from paritas.core.results.causes import Cause
    from paritas.core.results.findings import Finding
    from paritas.core.results.model_reports import EngineRow, KernelReport, KernelRow
    from paritas.core.results.sweeps import SweepReport, SweepRow


# --- One model: its relations, or an engine that serves it ----------------------------------------

ModelReport = EngineReport | InvariantsReport

ENGINE_COLUMNS = ("status", "request", "numbers", "difference", "rounding", "first wrong")
RELATION_COLUMNS = ("status", "relation", "cases", "what")


def model_report(report: ModelReport) -> Group:
    """The whole report; print with `crop=False` to keep the last line in one piece."""
    verdict = report.verdict
    parts: list[RenderableType] = [_model_table(report), Text()]
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


def _model_table(report: ModelReport) -> Table:
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


def _described_causes(report: EngineReport) -> Iterator[RenderableType]:
    for cause in report.causes:
        yield Text(f"{cause.kind}: {cause.sentence}", style="bold")
        yield from (Text(f"  as well: {other}") for other in cause.also)
    yield from listed("seen", report.observed)


def model_account(
    report: ModelReport, *, command: str, subject: str, file: str = "", line: int = 1
) -> Account:
    """The result for GitHub, SARIF and JUnit; relations that were not checked are notes."""
    verdict = report.verdict
    account = verdict_account(verdict, command=command, subject=subject, file=file, line=line)
    return dataclasses.replace(account, headline=_headline(report))


def model_page(report: ModelReport, command: str, data: str = "") -> str:
    """The report as one self-contained HTML file; `data` is the JSON file beside it."""
    return verdict_page(report.verdict, report.target or command, _headline(report), data)


# --- The judgement of a kernel: a table for the terminal, and an account --------------------------

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
    parts += [*listed("note", report.notes)]
    if report.refused:
        parts.append(
            Text(f"{counted(len(report.refused), 'case')} refused by the reference itself")
        )
    style = STYLES[report.status]
    parts.append(Text(kernel_headline(report), style=style, no_wrap=True, overflow="ignore"))
    return Group(*parts)


def _cases_table(report: KernelReport) -> Table:
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


def _failing_cases(report: KernelReport) -> Iterator[RenderableType]:
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


def kernel_account(report: KernelReport, *, subject: str, file: str = "", line: int = 1) -> Account:
    """The judgement for GitHub, SARIF and JUnit."""
    verdict = report.verdict
    return verdict_account(verdict, command="kernel", subject=subject, file=file, line=line)


# --- A sweep on a terminal of 80 columns ----------------------------------------------------------

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
    took = f"{counted(len(report.rows), 'run')} in {clock_words(report.seconds)}"
    parts += [Text(f"{took}; torch {report.versions.get('torch', 'unknown')}")]
    parts += [*listed("note", report.notes), *([Text(remark)] if remark else [])]
    style = STYLES[report.status] if not report.against or report.newly_wrong else "green"
    parts.append(Text(sweep_headline(report), style=style, no_wrap=True, overflow="ignore"))
    return Group(*parts)


def _runs_table(report: SweepReport, common: tuple[str, ...]) -> Table:
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


def _failing_runs(report: SweepReport) -> Iterator[RenderableType]:
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


# --- A sweep for GitHub, SARIF and JUnit ----------------------------------------------------------


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
        [line.strip() for one in _shown_causes(row) for line in cause_lines(one)]
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
    others: list[tuple[str, str, str, list[str]]]


def sweep_page(report: SweepReport) -> str:
    """The sweep as one HTML file that loads nothing from anywhere."""
    common, settings = columns(report.rows)
    panels = [_panel(place, row, report) for place, row in enumerate(report.rows)]
    cells = {(one.row.run.target, one.row.run.settings): one for one in panels}
    targets = list(dict.fromkeys(row.run.target for row in report.rows))
    counts = Counter(row.status for row in report.rows)
    return render_page(
        _SWEEP_LAYOUT,
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
    told = _shown_causes(row)
    starts = {id(cause.start) for cause in told}
    rest = [one for one in row.verdict.findings if id(one) not in starts]
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
        stories=[cause_story(one) for one in told if row.ended is RunEnd.VERDICT],
        others=[finding_row(one) for one in rest],
    )
