"""Results in a notebook cell: the answer, the failures and the table, in a few kilobytes.

Built from the parts of the HTML pages, without their scripts; every list is cut.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from paritas.core.reporting.graphs import ORDER, short_name, size_words, verdict_word, verdict_words
from paritas.core.reporting.model_reports import ENGINE_COLUMNS, engine_cells
from paritas.core.reporting.pages import (
    SIGNS,
    Story,
    cause_story,
    comparison_headline,
    finding_row,
    render_fragment,
    stories,
    work_done,
)
from paritas.core.reporting.result_pages import (
    OUTCOME_SIGNS,
    SLUGS,
    VERDICTS,
    small_figure,
    step_and_rank,
)
from paritas.core.reporting.terminal import (
    FINDING_COLUMNS,
    FINDING_LEGEND,
    POWER_COLUMNS,
    POWER_LEGEND,
    power_rows,
)
from paritas.core.results.causes import group_causes
from paritas.core.results.comparisons import Comparison
from paritas.core.results.findings import Status, Verdict
from paritas.core.results.graph_reports import GraphReport
from paritas.core.results.items import Item
from paritas.core.results.model_reports import (
    EngineReport,
    EngineRow,
    InvariantsReport,
    KernelReport,
    RelationRow,
    engine_headline,
    invariants_headline,
    kernel_headline,
)
from paritas.core.results.power_reports import (
    PowerReport,
    power_headline,
    power_sections,
    power_subject,
)
from paritas.core.results.sweeps import (
    SweepReport,
    SweepRow,
    change_words,
    row_words,
    sweep_headline,
)
from paritas.core.results.wording import headline as verdict_line

if TYPE_CHECKING:
    from collections.abc import Callable

    from paritas.core.results.comparisons import ComparisonRow
    from paritas.core.results.findings import Coverage, Finding
    from paritas.core.results.graph_reports import OperatorResult

MOST_ROWS = 40
MOST_TOLD = 5
MOST_LISTED = 20
# Names and reasons from elsewhere may have any length.
MOST_CHARACTERS = 600
ROW_COLUMNS = ("status", "name", "step/rank", "operator", "rel. L2", "own", "inherited", "reason")
OPERATOR_COLUMNS = ("outcome", "node", "operator", "source", "calls", "splits right", "reason")
RELATION_COLUMNS = ("status", "relation", "what")
SWEEP_COLUMNS = ("status", "target", "settings", "time", "what")
# The CSS class, sign and name of a status, and the other cells.
_TableRow = tuple[str, str, str, Sequence[str]]
# Doubled to be as specific as the notebook's own rules for tables.
_SCOPE = ".paritas-result.paritas-result"


@dataclasses.dataclass(frozen=True)
class StatusMark:
    """The CSS class and the sign of a status or an outcome."""

    kind: str
    sign: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class NotebookResult:
    """The values for the template."""

    mark: StatusMark
    title: str
    words: str
    facts: Sequence[tuple[str, str]] = ()
    lists: Sequence[tuple[str, Sequence[str], str]] = ()
    stories: Sequence[Story] = ()
    failures: Sequence[tuple[Finding, str]] = ()
    more_failures: int = 0
    columns: Sequence[str] = ()
    rows: Sequence[_TableRow] = ()
    more_rows: int = 0
    sections: Sequence[tuple[str, Sequence[str]]] = ()
    legend: str = ""


def notebook_html(result: Any) -> str:
    """A result as a piece of HTML that loads nothing, runs nothing and styles only itself."""
    return render_fragment(
        "notebook.html.jinja",
        ("basics.css", "notebook.css"),
        _SCOPE,
        shown=_shorten(_notebook_result(result)),
        signs=SIGNS,
        most_listed=MOST_LISTED,
    )


@functools.singledispatch
def _notebook_result(result: Any) -> NotebookResult:
    raise TypeError(f"{type(result).__name__} has no table")


@_notebook_result.register
def _kernel(report: KernelReport) -> NotebookResult:
    status = report.status
    words = kernel_headline(report).removeprefix(f"{status.value}: ")
    return dataclasses.replace(_verdict(report.verdict), words=words)


@_notebook_result.register
def _verdict(verdict: Verdict) -> NotebookResult:
    status = verdict.status if verdict.enabled else Status.UNVERIFIED
    ordered = sorted(verdict.findings, key=lambda finding: -finding.status.gravity)
    causes = group_causes(verdict.failures)
    return NotebookResult(
        mark=_mark(status),
        title=status.value,
        words=verdict_line(verdict).removeprefix(f"{status.value}: "),
        facts=_facts(Counter(one.status for one in verdict.findings), verdict.coverage),
        lists=_lists(verdict.coverage, verdict.notes),
        failures=[cause_story(cause) for cause in causes[:MOST_TOLD]],
        more_failures=sum(len(cause.findings) for cause in causes[MOST_TOLD:]),
        **_table(FINDING_COLUMNS, ordered, finding_row),
        legend=". ".join(FINDING_LEGEND.split("\n")),
    )


@_notebook_result.register
def _comparison(comparison: Comparison) -> NotebookResult:
    status = comparison.status
    # Failing rows first, otherwise in the order of the program.
    ordered = sorted(comparison.rows, key=lambda row: row.status.passes(strict=comparison.strict))
    work = work_done(comparison)
    facts = _facts(Counter(row.status for row in comparison.rows), comparison.coverage)
    facts += [("mine", comparison.my.path), ("golden", comparison.golden.path)]
    problems = [("Problems with mine", comparison.my.problems, "problem")]
    problems += [("Problems with golden", comparison.golden.problems, "problem")]
    return NotebookResult(
        mark=_mark(status),
        title=status.value,
        words=comparison_headline(comparison),
        facts=[*facts, *([("read", work)] if work else [])],
        lists=[*problems, *_lists(comparison.coverage, comparison.notes)],
        stories=stories(comparison),
        **_table(ROW_COLUMNS, ordered, _row),
        legend="rel. L2, own, inherited: norm of the error / norm of the golden value",
    )


@_notebook_result.register
def _graph(report: GraphReport) -> NotebookResult:
    word = verdict_word(report)
    outcome = VERDICTS[word]
    ordered = sorted(report.operators, key=lambda one: ORDER.index(one.outcome))
    counts = report.counts()
    return NotebookResult(
        mark=StatusMark(f"o-{SLUGS[outcome]}", OUTCOME_SIGNS[outcome]),
        title=f"{word}: {short_name(report)}",
        words=verdict_words(report),
        facts=[
            *((one.value, f"{counts[one]:,}") for one in ORDER if counts[one]),
            ("checked", size_words(report)),
        ],
        lists=[("Notes", report.notes, "note")],
        **_table(OPERATOR_COLUMNS, ordered, lambda one: _operator(one, report)),
    )


@_notebook_result.register
def _power(report: PowerReport) -> NotebookResult:
    mark, rows = StatusMark("s-unverified", "?"), []
    if report.judged:
        rows = [("", "", cells[0], cells[1:]) for cells in power_rows(report)]
        mark = (
            StatusMark("s-unstable", "~")
            if report.blind_spots()
            else StatusMark("s-equivalent", "✓")
        )
    return NotebookResult(
        mark=mark,
        title="detection power",
        words=power_headline(report),
        facts=[("program", power_subject(report))],
        columns=POWER_COLUMNS,
        rows=rows,
        sections=list(power_sections(report)),
        legend=". ".join(POWER_LEGEND.split("\n")),
    )


@_notebook_result.register
def _sweep(report: SweepReport) -> NotebookResult:
    ordered = sorted(report.rows, key=lambda row: -row.status.gravity)
    counts = Counter(row.status for row in report.rows)
    facts = [(f"{SIGNS[one]} {one.value}", f"{counts[one]:,}") for one in reversed(Status)]
    changes = [f"{one.kind.value}: {one.run}{change_words(one)}" for one in report.changes]
    return NotebookResult(
        mark=_mark(report.status),
        title="sweep",
        words=sweep_headline(report),
        facts=[fact for fact in facts if fact[1] != "0"],
        lists=[("Notes", report.notes, "note"), ("Changes", changes, "note")],
        **_table(SWEEP_COLUMNS, ordered, _sweep_row),
    )


@_notebook_result.register
def _invariants(report: InvariantsReport) -> NotebookResult:
    verdict = report.verdict
    return dataclasses.replace(
        _verdict(verdict),
        title="invariants",
        words=invariants_headline(report),
        lists=[("Notes", verdict.notes, "note")],
        legend="",
        **_table(RELATION_COLUMNS, report.rows, _relation_row),
    )


@_notebook_result.register
def _engine(report: EngineReport) -> NotebookResult:
    verdict = report.verdict
    causes = [f"{one.kind}: {one.sentence}" for one in report.causes]
    return dataclasses.replace(
        _verdict(verdict),
        title="engine",
        words=engine_headline(report),
        lists=[("Causes", causes, "note"), ("Notes", verdict.notes, "note")],
        legend="",
        **_table(ENGINE_COLUMNS, report.rows, _engine_row),
    )


def _engine_row(row: EngineRow) -> _TableRow:
    return _marked(row.status, engine_cells(row))


def _relation_row(row: RelationRow) -> _TableRow:
    cells = [row.relation, row.summary]
    return ("", "", row.word, cells) if row.status is None else _marked(row.status, cells)


@_notebook_result.register
def _swept(row: SweepRow) -> NotebookResult:
    return dataclasses.replace(_verdict(row.verdict), title=f"{row.status.value}: {row.run}")


def _sweep_row(row: SweepRow) -> _TableRow:
    words = row_words(row)
    cells = [row.run.target, ", ".join(row.run.settings), f"{row.seconds:.0f} s", words]
    return _marked(row.status, cells)


def _mark(status: Status) -> StatusMark:
    return StatusMark(f"s-{status.value}", SIGNS[status])


def _marked(status: Status, cells: list[str]) -> _TableRow:
    mark = _mark(status)
    return mark.kind, mark.sign, status.value, cells


def _table(
    columns: Sequence[str], items: Sequence[Any], row_of: Callable[[Any], _TableRow]
) -> dict[str, Any]:
    """The first rows of a table, and how many more there are."""
    rows = [row_of(item) for item in items[:MOST_ROWS]]
    return {"columns": columns, "rows": rows, "more_rows": max(0, len(items) - MOST_ROWS)}


def _facts(counts: Counter[Status], coverage: Coverage) -> list[tuple[str, str]]:
    """The number of items of each status, gravest first, and the coverage."""
    ordered = sorted(counts, key=lambda status: -status.gravity)
    facts = [(f"{SIGNS[status]} {status.value}", f"{counts[status]:,}") for status in ordered]
    facts.append(("compared", f"{coverage.compared:,}"))
    facts.append(("skipped", f"{len(coverage.skipped):,}"))
    if coverage.not_selected:
        facts.append(("not selected", f"{len(coverage.not_selected):,}"))
    facts.append(("unmatched", f"{len(coverage.unmatched):,}"))
    return facts


def _lists(coverage: Coverage, notes: Sequence[str]) -> list[tuple[str, Sequence[str], str]]:
    return [
        ("Notes", notes, "note"),
        ("Skipped", coverage.skipped, "skipped"),
        ("Not selected", coverage.not_selected, "skipped"),
        ("Unmatched", coverage.unmatched, "unmatched"),
    ]


def _row(row: ComparisonRow) -> _TableRow:
    figures = [small_figure(value) for value in (row.rel_l2, row.own, row.inherited)]
    return _marked(row.status, [row.name, step_and_rank(row), row.op, *figures, row.reason])


def _operator(one: OperatorResult, report: GraphReport) -> _TableRow:
    right = sum(option.status.passes(strict=report.strict) for option in one.options)
    wrong = next((option.reason for option in one.failures), "")
    first = one.sites[0]
    splits = f"{right} of {len(one.options)}" if one.options else ""
    cells = [first.node, one.operator, first.source, f"{len(one.sites):,}", splits]
    outcome, cells = one.outcome, [*cells, one.reason or wrong]
    return f"o-{SLUGS[outcome]}", OUTCOME_SIGNS[outcome], outcome.value, cells


def _shorten(shown: NotebookResult) -> NotebookResult:
    """Cut long texts to keep the cell small."""
    return dataclasses.replace(
        shown,
        title=_cut(shown.title),
        words=_cut(shown.words),
        facts=[(label, _cut(text)) for label, text in shown.facts],
        # All items, which the template counts; it shows only the first.
        lists=[
            (title, [*map(_cut, items[:MOST_LISTED]), *items[MOST_LISTED:]], kind)
            for title, items, kind in shown.lists
        ],
        stories=[_shorten_story(story) for story in shown.stories],
        failures=[
            (msgspec.structs.replace(finding, item=Item(name=_cut(finding.path))), _cut(lines, 3))
            for finding, lines in shown.failures
        ],
        rows=[(kind, sign, word, [*map(_cut, cells)]) for kind, sign, word, cells in shown.rows],
        sections=[(_cut(title), [*map(_cut, lines)]) for title, lines in shown.sections],
    )


def _shorten_story(story: Story) -> Story:
    facts = tuple(
        dataclasses.replace(fact, text=_cut(fact.text), code=_cut(fact.code))
        for fact in story.facts
    )
    return dataclasses.replace(story, sentence=_cut(story.sentence), facts=facts)


def _cut(text: str, times: int = 1) -> str:
    most = MOST_CHARACTERS * times
    return text if len(text) <= most else f"{text[: most - 1]}…"
