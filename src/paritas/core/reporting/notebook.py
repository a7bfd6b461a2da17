"""Results in a notebook cell: the answer, the failures and the table, in a few kilobytes.

Built from the parts of the HTML pages, without their scripts; every list is cut.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import TYPE_CHECKING, Any

import msgspec

from paritas.core.reporting.graphs import ORDER, short_name, size_words, verdict_word, verdict_words
from paritas.core.reporting.pages import Story, cause_story, render_fragment
from paritas.core.reporting.result_pages import OUTCOME_SIGNS, SLUGS, VERDICTS
from paritas.core.reporting.tables import (
    MOST_IN_CELL,
    NO_TABLE,
    SIGNS,
    STATUS_MARKS,
    Column,
    Mark,
    PageTable,
    page_table,
)
from paritas.core.reporting.terminal import FINDING_COLUMNS, FINDING_LEGEND
from paritas.core.results.causes import group_causes
from paritas.core.results.findings import Status, Verdict
from paritas.core.results.graph_reports import CallOutcome, GraphReport
from paritas.core.results.items import Item
from paritas.core.results.wording import headline as verdict_line

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paritas.core.results.findings import Coverage, Finding
    from paritas.core.results.graph_reports import OperatorResult

MOST_TOLD = 5
MOST_LISTED = 20
# Names and reasons from elsewhere may have any length.
MOST_CHARACTERS = 600
# Doubled to be as specific as the notebook's own rules for tables.
_SCOPE = ".paritas-result.paritas-result"


@dataclasses.dataclass(frozen=True, kw_only=True)
class NotebookResult:
    """What a cell shows; the word of the mark is not shown."""

    mark: Mark
    title: str
    words: str
    facts: Sequence[tuple[str, str]] = ()
    lists: Sequence[tuple[str, Sequence[str], str]] = ()
    stories: Sequence[Story] = ()
    failures: Sequence[tuple[Finding, str]] = ()
    more_failures: int = 0
    table: PageTable = NO_TABLE
    sections: Sequence[tuple[str, Sequence[str]]] = ()
    legend: str = ""


def notebook_html(result: NotebookResult) -> str:
    """A piece of HTML that loads nothing, runs nothing and styles only itself."""
    return render_fragment(
        "notebook.html.jinja",
        ("basics.css", "notebook.css"),
        _SCOPE,
        shown=_shorten(result),
        signs=SIGNS,
        most_listed=MOST_LISTED,
    )


def result_html(result: Any) -> str:
    """A result of core as a piece of HTML; questions show their own."""
    match result:
        case Verdict():
            return notebook_html(verdict_summary(result))
        case GraphReport():
            return notebook_html(_graph(result))
    raise TypeError(f"{type(result).__name__} has no table")


def verdict_summary(verdict: Verdict) -> NotebookResult:
    """A verdict for a cell of a notebook."""
    status = verdict.status if verdict.enabled else Status.UNVERIFIED
    ordered = sorted(verdict.findings, key=lambda finding: -finding.status.gravity)
    causes = group_causes(verdict.failures)
    return NotebookResult(
        mark=STATUS_MARKS[status],
        title=status.value,
        words=verdict_line(verdict).removeprefix(f"{status.value}: "),
        facts=count_facts(Counter(one.status for one in verdict.findings), verdict.coverage),
        lists=coverage_lists(verdict.coverage, verdict.notes),
        failures=[cause_story(cause) for cause in causes[:MOST_TOLD]],
        more_failures=sum(len(cause.findings) for cause in causes[MOST_TOLD:]),
        table=page_table(FINDING_COLUMNS, ordered, MOST_IN_CELL),
        legend=". ".join(FINDING_LEGEND.split("\n")),
    )


def _graph(report: GraphReport) -> NotebookResult:
    word = verdict_word(report)
    outcome = VERDICTS[word]
    ordered = sorted(report.operators, key=lambda one: ORDER.index(one.outcome))
    counts = report.counts()
    return NotebookResult(
        mark=_mark_outcome(outcome),
        title=f"{word}: {short_name(report)}",
        words=verdict_words(report),
        facts=[
            *((one.value, f"{counts[one]:,}") for one in ORDER if counts[one]),
            ("checked", size_words(report)),
        ],
        lists=[("Notes", report.notes, "note")],
        table=page_table(_operator_columns(report), ordered, MOST_IN_CELL),
    )


def count_facts(counts: Counter[Status], coverage: Coverage) -> list[tuple[str, str]]:
    """The number of items of each status, gravest first, and the coverage."""
    ordered = sorted(counts, key=lambda status: -status.gravity)
    facts = [(f"{SIGNS[status]} {status.value}", f"{counts[status]:,}") for status in ordered]
    facts.append(("compared", f"{coverage.compared:,}"))
    facts.append(("skipped", f"{len(coverage.skipped):,}"))
    if coverage.not_selected:
        facts.append(("not selected", f"{len(coverage.not_selected):,}"))
    facts.append(("unmatched", f"{len(coverage.unmatched):,}"))
    return facts


def coverage_lists(
    coverage: Coverage, notes: Sequence[str]
) -> list[tuple[str, Sequence[str], str]]:
    """Notes, and what was not compared."""
    return [
        ("Notes", notes, "note"),
        ("Skipped", coverage.skipped, "skipped"),
        ("Not selected", coverage.not_selected, "skipped"),
        ("Unmatched", coverage.unmatched, "unmatched"),
    ]


def _mark_outcome(outcome: CallOutcome) -> Mark:
    return Mark(outcome.value, css=f"o-{SLUGS[outcome]}", sign=OUTCOME_SIGNS[outcome])


def _operator_columns(report: GraphReport) -> list[Column[OperatorResult]]:
    def count_right(operator: OperatorResult) -> str:
        right = sum(option.status.passes(strict=report.strict) for option in operator.options)
        return f"{right} of {len(operator.options)}" if operator.options else ""

    def reason(operator: OperatorResult) -> str:
        return operator.reason or next((option.reason for option in operator.failures), "")

    return [
        Column("outcome", lambda operator: _mark_outcome(operator.outcome)),
        Column("node", lambda operator: operator.sites[0].node),
        Column("operator", lambda operator: operator.operator),
        Column("source", lambda operator: operator.sites[0].source),
        Column("calls", lambda operator: f"{len(operator.sites):,}"),
        Column("splits right", count_right),
        Column("reason", reason),
    ]


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
        table=shown.table._replace(
            rows=tuple((mark, [*map(_cut, cells)]) for mark, cells in shown.table.rows)
        ),
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
