"""What every HTML page is made of: assets, columns, words; and the page of a verdict.

A page is one file that loads nothing from anywhere and runs no script but its own.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import gzip
import hashlib
import math
import re
from collections import Counter
from importlib import resources
from typing import TYPE_CHECKING, Any

import jinja2
import msgspec

from paritas.reports.graphs import counted
from paritas.reports.terminal import FINDING_COLUMNS, FINDING_LEGEND, finding_cells
from paritas.results.comparisons import beginnings
from paritas.results.findings import Status
from paritas.results.wording import finding_lines, size
from paritas.results.wording import headline as verdict_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from paritas.results.comparisons import Comparison, ComparisonRow, Divergence
    from paritas.results.findings import Finding, Verdict


# --- Template, styles and scripts put together ----------------------------------------------------

# The rest of a list is said to be in the JSON.
MOST_LISTED = 200


@dataclasses.dataclass(frozen=True)
class PageLayout:
    """The assets of a page, each in the order in which it is read.

    Attributes:
        template: of the page's text.
        styles: of others and our own.
        vendored: scripts of others, each by itself.
        own: our scripts, which become one that leaves no name behind.
    """

    template: str
    styles: tuple[str, ...]
    vendored: tuple[str, ...]
    own: tuple[str, ...]


def render_page(
    layout: PageLayout, filters: Mapping[str, Callable[..., str]], **values: Any
) -> str:
    """The page as one text that loads nothing from anywhere and runs no script but its own.

    Args:
        layout: what it is made of.
        filters: for the template, by name.
        values: for the template, all of them escaped.
    """
    scripts = _scripts(layout)
    environment = _environment().overlay()
    environment.filters = {**environment.filters, **filters}
    return environment.get_template(layout.template).render(
        most_listed=MOST_LISTED,
        rest_of_list=": they are in the JSON",
        styles=[*map(_without_map, layout.styles)],
        scripts=scripts,
        allowed=" ".join(f"'sha256-{_digest(script)}'" for script in scripts),
        **values,
    )


def render_fragment(template: str, styles: tuple[str, ...], scope: str, **values: Any) -> str:
    """A piece of somebody else's page: it loads and runs nothing, and styles nothing but itself.

    Args:
        template: of its text.
        styles: put below the scope, where `&` is the scope itself.
        scope: a selector of the piece's outermost element, which the template has to write.
        values: for the template, all of them escaped.
    """
    rules = "\n".join(map(_asset, styles))
    style = f"{scope} {{\n{rules}}}"
    return _environment().get_template(template).render(style=style, rest_of_list="", **values)


@functools.cache
def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        loader=jinja2.FunctionLoader(_asset),
    )


@functools.cache
def _scripts(layout: PageLayout) -> tuple[str, ...]:
    own = "\n".join(_asset(name) for name in layout.own)
    return (*map(_licensed, layout.vendored), f'"use strict";\n(() => {{\n{own}\n}})();\n')


def _licensed(name: str) -> str:
    """A script of others below its licence, which asks to be in every copy: a page is one."""
    work = name.partition(".")[0]
    return f"/*\n{_asset(f'{work}.LICENSE')}*/\n{_without_map(name)}"


def _without_map(name: str) -> str:
    """An asset, less the link to its source map: developer tools would look for that file."""
    return re.sub(r"//# sourceMappingURL=\S+|/\*# sourceMappingURL=\S+ \*/", "", _asset(name))


@functools.cache
def _asset(name: str) -> str:
    return resources.files("paritas.reports").joinpath("assets", name).read_text("utf-8")


def _digest(script: str) -> str:
    """What the browser is told to run, and nothing else: a name that breaks out stays text."""
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


# --- Columns of a table, small enough to travel inside a page -------------------------------------

# What a page shows of a number; the JSON and the CSV have all of it.
DIGITS = 4
_NOTHING = "null"
# JSON has no such numbers: they are spelled.
_NO_NUMBERS = {"nan", "inf", "-inf"}


def text_column(values: Iterable[str]) -> dict[str, Any]:
    """Each different text once, and per row which of them; no rows where there is but one."""
    places: dict[str, int] = {}
    rows = [places.setdefault(value, len(places)) for value in values]
    return {"texts": list(places), "rows": rows if len(places) > 1 else None}


def number_column(values: Iterable[float | None], digits: int = DIGITS) -> msgspec.Raw | None:
    """Numbers in JSON with as many digits as are shown; nothing where no row has one."""
    column = [_NOTHING if value is None else _number(value, digits) for value in values]
    if all(text is _NOTHING for text in column):
        return None
    return msgspec.Raw(f"[{','.join(column)}]".encode())


def _number(value: float, digits: int) -> str:
    if isinstance(value, int):
        return str(value)  # a count has all its digits
    text = f"{value:.{digits}g}"
    return f'"{text}"' if text in _NO_NUMBERS else text


def packed(payload: Any) -> str:
    """JSON, compressed, in characters that mean nothing to HTML.

    50,000 rows are ten times as large without, and what is in a name cannot end the script.
    """
    return base64.b64encode(gzip.compress(msgspec.json.encode(payload), 6, mtime=0)).decode()


# --- A comparison in sentences --------------------------------------------------------------------

# Beside the colour, so that nobody depends on it.
SIGNS = {
    Status.IDENTICAL: "=",
    Status.EQUIVALENT: "≈",
    Status.UNSTABLE: "~",
    Status.UNVERIFIED: "?",
    Status.DEGRADED: "▼",
    Status.DIFFERENT: "≠",
}
MEANINGS = {
    Status.IDENTICAL: "equal bit for bit",
    Status.EQUIVALENT: "differs by rounding only",
    Status.UNSTABLE: "differs where the reference's own rounding decides",
    Status.UNVERIFIED: "could not be compared",
    Status.DEGRADED: "the same function, less accurate than rounding explains",
    Status.DIFFERENT: "computes something else",
}
_TITLES = {
    "values": "First divergence",
    "both": "First divergence, and first NaN or Inf",
    "non-finite": "First NaN or Inf",
}
_HOW_ATTRIBUTED = {
    "replayed": "measured by running the operator again",
    "estimated": "estimated from the errors of its inputs",
}
_NEXT = {
    "made": "Look at that line. The row's own panel below shows where in the tensor it is off.",
    "given": "Look at where that value comes from: the two programs were not given the same.",
    "unclear": "Record the inputs of this call on both sides as well, and compare again.",
}
_FUSED = (
    "Record the candidate with fusion off and compare again: if it is right then, the fusion"
    " makes the difference."
)


@dataclasses.dataclass(frozen=True)
class Fact:
    """One labelled line of a story; code is set in the fixed font."""

    label: str
    text: str
    code: str = ""


@dataclasses.dataclass(frozen=True)
class Story:
    """Where the two begin to differ, as a person would tell it."""

    title: str
    sentence: str
    facts: tuple[Fact, ...]
    place: int
    status: Status


def comparison_headline(comparison: Comparison) -> str:
    """The verdict as a sentence, without the status word."""
    rows, compared = len(comparison.rows), comparison.coverage.compared
    failing = sum(not row.status.passes(strict=comparison.strict) for row in comparison.rows)
    if not compared:
        return "Nothing was compared, so nothing is shown to be right."
    if failing:
        return f"{failing:,} of {counted(rows, 'row')} {_verb(failing, 'does', 'do')} not pass."
    few, unread = comparison.of_summaries, comparison.by_digest
    weaker = f" Of {counted(few, 'row')} only statistics or sketches were compared." if few else ""
    if unread:
        weaker += f" Of {counted(unread, 'row')} only digests were compared, and not the data."
    if comparison.status is Status.IDENTICAL:
        same = "the same in all that is recorded" if few or unread else "equal bit for bit"
        return f"{_all_rows(rows)} {same}.{weaker}"
    return f"{_all_rows(rows)} the same but for rounding.{weaker}"


def work_done(comparison: Comparison) -> str:
    """How much was read, and how long it took; empty where neither is known."""
    read = size(comparison.nbytes) if comparison.nbytes else ""
    took = f"{comparison.seconds:.3g} s" if comparison.seconds else ""
    return " in ".join(filter(None, (read, took)))


def stories(comparison: Comparison) -> list[Story]:
    """Where the two begin to differ, in words."""
    return [
        Story(
            title=_TITLES[of],
            sentence=_divergence_sentence(row, divergence),
            facts=tuple(_divergence_facts(row, divergence)),
            place=place,
            status=row.status,
        )
        for of, divergence, row, place in beginnings(comparison)
    ]


def _divergence_sentence(row: ComparisonRow, divergence: Divergence) -> str:
    operator = f" ({row.op})" if row.op else ""
    module = f", module {row.module}" if row.module else ""
    rank = "" if row.rank is None else f", rank {row.rank}"
    where = f"step {row.step}{rank}{module}: {row.call or row.name}{operator}"
    if divergence.kind == "made":
        return f"It starts at {where}. What this call was given is right, what it gives is not."
    if divergence.kind == "given":
        return f"It is first seen at {where}. This call did not make it: the program was given it."
    because = f": {divergence.reason}" if divergence.reason else ""
    return f"The first that fails is {where}. Whether it made it cannot be told{because}."


def _divergence_facts(row: ComparisonRow, divergence: Divergence) -> Iterator[Fact]:
    if row.reason:
        yield Fact("what is wrong", row.reason)
    diagnosis = row.detail.diagnosis if row.detail else None
    if diagnosis is not None and diagnosis.sentence:
        yield Fact("what kind of wrong", diagnosis.sentence)
    if divergence.reason and divergence.kind != "unclear":
        yield Fact("why this one", divergence.reason)
    if row.own is not None or row.inherited is not None:
        yield Fact("error", _error_words(row))
    worst = _worst_element(row)
    if worst:
        yield Fact("worst element", worst)
    if row.judged_by:
        yield Fact("judged by", row.judged_by)
    if len(row.nodes) > 1:
        by = f", compiled into {row.kernel}" if row.kernel else ""
        yield Fact("fused", f"{len(row.nodes)} graph nodes{by}:", ", ".join(row.nodes))
    if row.line:
        yield Fact("source", row.line, row.code)
    if row.limits:
        yield Fact("not shown", row.limits)
    fused = f" {_FUSED}" if len(row.nodes) > 1 and divergence.kind == "made" else ""
    yield Fact("what to do", row.advice or f"{_NEXT[divergence.kind]}{fused}")


def _error_words(row: ComparisonRow) -> str:
    own = "not known" if row.own is None else figure(row.own)
    inherited = "not known" if row.inherited is None else figure(row.inherited)
    how = f"; {_HOW_ATTRIBUTED[row.attributed]}" if row.attributed else ""
    return f"own {own}, inherited {inherited}, relative to golden's norm{how}"


def _worst_element(row: ComparisonRow) -> str:
    if row.detail is not None and row.detail.worst:
        worst = row.detail.worst[0]
        index, mine, golden, ulps = worst.index, worst.my, worst.golden, worst.ulps
    else:
        metrics = row.figures.metrics if row.figures else None
        if metrics is None or metrics.max_abs_index is None:
            return ""
        index, ulps = metrics.max_abs_index, metrics.max_ulp
        if metrics.max_abs_candidate is None or metrics.max_abs_reference is None:
            return ""
        mine, golden = metrics.max_abs_candidate, metrics.max_abs_reference
        ulps = None  # the largest of those is of another element, perhaps
    steps = "" if ulps is None else f", {figure(ulps)} ulp apart"
    place = f"[{', '.join(map(str, index))}]"
    return f"{place}: mine {figure(mine)}, golden {figure(golden)}{steps}"


def figure(value: float) -> str:
    """Four digits."""
    if math.isnan(value):
        return "NaN"
    return f"{value:.4g}"


def _verb(count: int, one: str, many: str) -> str:
    return one if count == 1 else many


def _all_rows(rows: int) -> str:
    return "The one row is" if rows == 1 else f"All {rows:,} rows are"


# --- The page of a verdict, and the list of several -----------------------------------------------

# Failures that are told in full; the others have their row in the table.
MOST_TOLD = 50
MOST_ROWS = 2000
_VERDICT_LAYOUT = PageLayout(
    template="verdict_page.html.jinja", styles=("basics.css", "report.css"), vendored=(), own=()
)


@dataclasses.dataclass(frozen=True)
class PageLink:
    """One line of the list.

    Attributes:
        test: what the page is about.
        what: which check of it.
        status: how that ended.
        worst: its gravest finding in a line.
        href: the page's file, in the same folder.
    """

    test: str
    what: str
    status: str
    worst: str
    href: str


def verdict_page(verdict: Verdict, title: str, what: str, data: str) -> str:
    """A verdict as one HTML file that loads nothing from anywhere.

    Args:
        title: what was checked.
        what: by which check.
        data: the file beside it that has every finding.
    """
    counts = Counter(finding.status for finding in verdict.findings)
    ordered = sorted(verdict.findings, key=lambda finding: -finding.status.gravity)
    return _render_verdicts(
        title=title,
        what=what,
        status=verdict.status if verdict.enabled else Status.UNVERIFIED,
        words=verdict_line(verdict),
        verdict=verdict,
        data=data,
        statuses=[(status, SIGNS[status], MEANINGS[status], counts[status]) for status in Status],
        stories=[finding_story(finding) for finding in verdict.failures[:MOST_TOLD]],
        more_stories=max(0, len(verdict.failures) - MOST_TOLD),
        rows=[finding_row(finding) for finding in ordered[:MOST_ROWS]],
        more_rows=max(0, len(ordered) - MOST_ROWS),
        links=None,
    )


def index_page(links: Sequence[PageLink], *, verdicts: int) -> str:
    """The list of pages, gravest first; `verdicts` is how many there were, passing ones too."""
    ordered = sorted(links, key=lambda link: -Status(link.status).gravity)
    status = Status(ordered[0].status) if ordered else Status.IDENTICAL
    return _render_verdicts(
        title="what does not pass",
        what="",
        status=status,
        words=f"{len(links)} of {verdicts} verdicts do not pass.",
        verdict=None,
        data="",
        statuses=[],
        stories=[],
        more_stories=0,
        rows=[],
        more_rows=0,
        links=[(link, Status(link.status)) for link in ordered],
    )


def _render_verdicts(**values: object) -> str:
    return render_page(
        _VERDICT_LAYOUT,
        {},
        signs=SIGNS,
        columns=FINDING_COLUMNS,
        legend=". ".join(FINDING_LEGEND.split("\n")),
        **values,
    )


def finding_story(finding: Finding) -> tuple[Finding, str]:
    """A finding and its lines, less the first, which is its badge."""
    return finding, "\n".join(line[4:] for line in finding_lines(finding)[1:])


def finding_row(finding: Finding) -> tuple[str, str, str, list[str]]:
    """One row of the table: class, sign and word of its status, and the other cells."""
    status = finding.status
    cells_of = [cell.plain for cell in finding_cells(finding)[1:]]
    return f"s-{status.value}", SIGNS[status], status.value, cells_of
