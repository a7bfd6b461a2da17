"""Results in a cell of a notebook: the answer, what fails, and the table, in a few kilobytes.

Made of the parts that the pages are made of, without their scripts; every list is cut.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from typing import TYPE_CHECKING, Any

import msgspec

from paritas.numerics.comparisons import Comparison
from paritas.numerics.findings import Status, Verdict
from paritas.numerics.graph_reports import GraphReport
from paritas.numerics.power_reports import PowerReport
from paritas.numerics.power_wording import headline as power_headline
from paritas.numerics.power_wording import sections, subject
from paritas.numerics.wording import headline as verdict_line
from paritas.reporting.graph_words import ORDER, short_name, size_words, verdict_word, verdict_words
from paritas.reporting.html.assembling import render_fragment
from paritas.reporting.html.graph_page import OUTCOME_SIGNS, VERDICTS
from paritas.reporting.html.graph_payload import SLUGS
from paritas.reporting.html.page import small_figure, step_and_rank, stories
from paritas.reporting.html.verdict_page import finding_row, told
from paritas.reporting.html.words import SIGNS, Story, headline, work_done
from paritas.reporting.power_words import COLUMNS as POWER_COLUMNS
from paritas.reporting.power_words import LEGEND as POWER_LEGEND
from paritas.reporting.power_words import table_rows
from paritas.reporting.terminal import COLUMNS, LEGEND

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paritas.numerics.comparisons import Row
    from paritas.numerics.findings import Coverage, Finding
    from paritas.numerics.graph_reports import OperatorResult

__all__ = ["notebook_html"]

MOST_ROWS = 40
MOST_TOLD = 5
MOST_LISTED = 20
# A name or a reason of somebody else's making can be of any length.
MOST_CHARACTERS = 600
ROW_COLUMNS = ("status", "name", "step/rank", "operator", "rel. L2", "own", "inherited", "reason")
OPERATOR_COLUMNS = ("outcome", "node", "operator", "source", "calls", "splits right", "reason")
# Twice: as strong as the rules that notebooks have for the tables in them.
_SCOPE = ".paritas-result.paritas-result"


@dataclasses.dataclass(frozen=True)
class Mark:
    """A status or an outcome: the class of its colour, and its sign."""

    kind: str
    sign: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shown:
    """What the template needs of a result; see there for the order."""

    mark: Mark
    title: str
    words: str
    facts: Sequence[tuple[str, str]] = ()
    lists: Sequence[tuple[str, Sequence[str], str]] = ()
    stories: Sequence[Story] = ()
    failures: Sequence[tuple[Finding, str]] = ()
    more_failures: int = 0
    columns: Sequence[str] = ()
    rows: Sequence[tuple[str, str, str, Sequence[str]]] = ()
    more_rows: int = 0
    sections: Sequence[tuple[str, Sequence[str]]] = ()
    legend: str = ""


def notebook_html(result: Any) -> str:
    """A result as a piece of HTML that loads nothing, runs nothing and styles only itself."""
    shown = _shorter(_shown(result))
    styles = ("basics.css", "notebook.css")
    return render_fragment(
        "notebook.html.jinja",
        styles,
        _SCOPE,
        shown=shown,
        signs=SIGNS,
        most_listed=MOST_LISTED,
    )


@functools.singledispatch
def _shown(result: Any) -> Shown:
    raise TypeError(f"{type(result).__name__} has no table")


@_shown.register
def _verdict(verdict: Verdict) -> Shown:
    status = verdict.status if verdict.enabled else Status.UNVERIFIED
    ordered = sorted(verdict.findings, key=lambda finding: -finding.status.gravity)
    failures = verdict.failures
    return Shown(
        mark=_mark(status),
        title=status.value,
        words=verdict_line(verdict).removeprefix(f"{status.value}: "),
        facts=_facts(Counter(one.status for one in verdict.findings), verdict.coverage),
        lists=_lists(verdict.coverage, verdict.notes),
        failures=[told(finding) for finding in failures[:MOST_TOLD]],
        more_failures=max(0, len(failures) - MOST_TOLD),
        columns=COLUMNS,
        rows=[finding_row(finding) for finding in ordered[:MOST_ROWS]],
        more_rows=max(0, len(ordered) - MOST_ROWS),
        legend=". ".join(LEGEND.split("\n")),
    )


@_shown.register
def _comparison(comparison: Comparison) -> Shown:
    status = comparison.status
    # Rows that fail first; the sort keeps the order of the program.
    ordered = sorted(comparison.rows, key=lambda row: row.status.passes(strict=comparison.strict))
    work = work_done(comparison)
    facts = _facts(Counter(row.status for row in comparison.rows), comparison.coverage)
    facts += [("mine", comparison.my.path), ("golden", comparison.golden.path)]
    problems = [("Problems with mine", comparison.my.problems, "problem")]
    problems += [("Problems with golden", comparison.golden.problems, "problem")]
    return Shown(
        mark=_mark(status),
        title=status.value,
        words=headline(comparison),
        facts=[*facts, *([("read", work)] if work else [])],
        lists=[*problems, *_lists(comparison.coverage, comparison.notes)],
        stories=stories(comparison),
        columns=ROW_COLUMNS,
        rows=[_row(row) for row in ordered[:MOST_ROWS]],
        more_rows=max(0, len(ordered) - MOST_ROWS),
        legend="rel. L2, own, inherited: size of the error over that of the golden value",
    )


@_shown.register
def _graph(report: GraphReport) -> Shown:
    word = verdict_word(report)
    outcome = VERDICTS[word]
    ordered = sorted(report.operators, key=lambda one: ORDER.index(one.outcome))
    counts = report.counts()
    return Shown(
        mark=Mark(f"o-{SLUGS[outcome]}", OUTCOME_SIGNS[outcome]),
        title=f"{word}: {short_name(report)}",
        words=verdict_words(report),
        facts=[
            *((one.value, f"{counts[one]:,}") for one in ORDER if counts[one]),
            ("checked", size_words(report)),
        ],
        lists=[("Notes", report.notes, "note")],
        columns=OPERATOR_COLUMNS,
        rows=[_operator(one, report) for one in ordered[:MOST_ROWS]],
        more_rows=max(0, len(ordered) - MOST_ROWS),
    )


@_shown.register
def _power(report: PowerReport) -> Shown:
    mark, rows = Mark("s-unverified", "?"), []
    if report.judged:
        rows = [("", "", cells[0], cells[1:]) for cells in table_rows(report)]
        mark = Mark("s-unstable", "~") if report.blind_spots() else Mark("s-equivalent", "✓")
    return Shown(
        mark=mark,
        title="detection power",
        words=power_headline(report),
        facts=[("program", subject(report))],
        columns=POWER_COLUMNS,
        rows=rows,
        sections=list(sections(report)),
        legend=". ".join(POWER_LEGEND.split("\n")),
    )


def _mark(status: Status) -> Mark:
    return Mark(f"s-{status.value}", SIGNS[status])


def _facts(counts: Counter[Status], coverage: Coverage) -> list[tuple[str, str]]:
    """How many items ended how, gravest first, and how much was compared."""
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


def _row(row: Row) -> tuple[str, str, str, list[str]]:
    figures = [small_figure(value) for value in (row.rel_l2, row.own, row.inherited)]
    mark = _mark(row.status)
    cells = [row.name, step_and_rank(row), row.op, *figures, row.reason]
    return mark.kind, mark.sign, row.status.value, cells


def _operator(one: OperatorResult, report: GraphReport) -> tuple[str, str, str, list[str]]:
    right = sum(option.status.passes(strict=report.strict) for option in one.options)
    wrong = next((option.reason for option in one.failures), "")
    first = one.sites[0]
    splits = f"{right} of {len(one.options)}" if one.options else ""
    cells = [first.node, one.operator, first.source, f"{len(one.sites):,}", splits]
    outcome = one.outcome
    return (
        f"o-{SLUGS[outcome]}",
        OUTCOME_SIGNS[outcome],
        outcome.value,
        [*cells, one.reason or wrong],
    )


def _shorter(shown: Shown) -> Shown:
    """The same with texts of any length cut, so that a cell stays small whatever it shows."""
    return dataclasses.replace(
        shown,
        title=_cut(shown.title),
        words=_cut(shown.words),
        facts=[(label, _cut(text)) for label, text in shown.facts],
        lists=[(title, _few(items), kind) for title, items, kind in shown.lists],
        stories=[_shorter_story(story) for story in shown.stories],
        failures=[
            (msgspec.structs.replace(finding, path=_cut(finding.path)), _cut(lines, 3))
            for finding, lines in shown.failures
        ],
        rows=[(kind, sign, word, [*map(_cut, cells)]) for kind, sign, word, cells in shown.rows],
        sections=[(_cut(title), [*map(_cut, lines)]) for title, lines in shown.sections],
    )


def _few(items: Sequence[str]) -> list[str]:
    """All of them, for they are counted; only those that are shown are looked at."""
    return [*map(_cut, items[:MOST_LISTED]), *items[MOST_LISTED:]]


def _shorter_story(story: Story) -> Story:
    facts = tuple(
        dataclasses.replace(fact, text=_cut(fact.text), code=_cut(fact.code))
        for fact in story.facts
    )
    return dataclasses.replace(story, sentence=_cut(story.sentence), facts=facts)


def _cut(text: str, times: int = 1) -> str:
    most = MOST_CHARACTERS * times
    return text if len(text) <= most else f"{text[: most - 1]}…"
