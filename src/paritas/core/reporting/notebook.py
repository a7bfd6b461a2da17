"""Results in a notebook cell: the answer, the failures and the table, in a few kilobytes.

Built from the parts of the HTML pages, without their scripts; every list is cut.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import TYPE_CHECKING

import msgspec

from paritas.core.reporting.pages import Story, cause_story, render_fragment
from paritas.core.reporting.tables import (
    MOST_IN_CELL,
    NO_TABLE,
    SIGNS,
    STATUS_MARKS,
    Mark,
    PageTable,
    page_table,
)
from paritas.core.reporting.terminal import FINDING_COLUMNS, FINDING_LEGEND
from paritas.core.results.causes import group_causes
from paritas.core.results.findings import Status, Verdict
from paritas.core.results.items import Item
from paritas.core.results.wording import headline as verdict_line

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paritas.core.results.findings import Coverage, Finding
    from paritas.core.results.report import Report

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


def report_summary(report: Report) -> NotebookResult:
    """A report that has no summary of its own: that of its verdict."""
    return verdict_summary(report.verdict)


def verdict_summary(verdict: Verdict) -> NotebookResult:
    """A verdict for a cell of a notebook."""
    status = verdict.status if verdict.enabled else Status.UNVERIFIED
    ordered = sorted(verdict.findings, key=lambda finding: -finding.status.gravity)
    causes = group_causes(verdict.failures)
    return NotebookResult(
        mark=STATUS_MARKS[status],
        title=status.value,
        words=verdict_line(verdict).removeprefix(f"{status.value}: "),
        facts=count_facts(
            Counter(finding.status for finding in verdict.findings), verdict.coverage
        ),
        lists=coverage_lists(verdict.coverage, verdict.notes),
        failures=[cause_story(cause) for cause in causes[:MOST_TOLD]],
        more_failures=sum(len(cause.findings) for cause in causes[MOST_TOLD:]),
        table=page_table(FINDING_COLUMNS, ordered, MOST_IN_CELL),
        legend=". ".join(FINDING_LEGEND.split("\n")),
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
