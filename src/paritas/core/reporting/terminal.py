"""Verdicts, guarded runs and power reports for a terminal.

Everything is readable without colour and in 80 columns, in ASCII except for the lines of tables
(which rich replaces if the terminal cannot show them). The last line is the verdict; it is not
wrapped, which helps scripts that look for it: print with `crop=False`.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import msgspec
from rich import box
from rich.console import Group
from rich.padding import Padding
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from paritas.core.errors import plain
from paritas.core.results.causes import group_causes, is_located
from paritas.core.results.findings import Status
from paritas.core.results.power_reports import (
    BANDS,
    SIZES,
    percent,
    power_headline,
    power_sections,
    power_subject,
)
from paritas.core.results.wording import (
    MOST_SHOWN,
    cause_lines,
    counted,
    deciding_excess,
    deciding_figure,
    deciding_score,
    enumerated,
    finding_lines,
    headline,
    is_inexact,
    item_words,
    near_path,
    told_findings,
    value_words,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from rich.console import Console, ConsoleOptions, RenderableType

    from paritas.core.results.causes import Cause
    from paritas.core.results.findings import Finding, Verdict
    from paritas.core.results.graph_reports import GraphCounts
    from paritas.core.results.power_reports import PowerReport

STYLES = {
    Status.IDENTICAL: "green",
    Status.EQUIVALENT: "green",
    Status.UNSTABLE: "yellow",
    Status.UNVERIFIED: "magenta",
    Status.DEGRADED: "bold red",
    Status.DIFFERENT: "bold red",
}
# Above this many rows of one status, the rest share a row that counts them.
MOST_ROWS = {
    Status.IDENTICAL: 3,
    Status.EQUIVALENT: 12,
    Status.UNSTABLE: 24,
    Status.UNVERIFIED: 24,
    Status.DEGRADED: 24,
    Status.DIFFERENT: 24,
}
# So many rows for what results from a place that is known; the place says how many there are.
MOST_RESULTS = 3
FINDING_COLUMNS = ("status", "item", "value", "off by", "worst / allowed")
FIXED_COLUMNS = 2  # the others are dropped if all their cells are empty
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
        has_figures = len(table.columns) > FIXED_COLUMNS + 1
        parts += [table, *([Text(FINDING_LEGEND, style="dim")] if has_figures else []), Text()]
    parts += [*paragraph(details(verdict)), *remarks(verdict), last_line(verdict)]
    return Group(*parts)


def paragraph(lines: Iterable[RenderableType]) -> list[RenderableType]:
    """The lines and an empty one, if there are any."""
    found = list(lines)
    return [*found, Text()] if found else []


def last_line(verdict: Verdict, *remarks: str, identical: str = "") -> Text:
    """The verdict in one line; `identical` replaces the meaning of that status."""
    style = STYLES[verdict.status] if verdict.enabled else STYLES[Status.UNVERIFIED]
    words = ", ".join((headline(verdict, identical=identical), *remarks))
    return Text(words, style=style, no_wrap=True, overflow="ignore")


def findings_table(verdict: Verdict) -> Table:
    """One row per finding, gravest first, then where it starts, then in program order.

    The rest are counted.
    """
    rows: list[tuple[Text, ...]] = []
    causes = [cause for cause in group_causes(verdict.failures) if cause.is_located]
    results = {id(finding) for cause in causes for finding in cause.results}
    for status in sorted(Status, key=lambda status: -status.gravity):
        found = [finding for finding in verdict.findings if finding.status is status]
        found.sort(key=lambda finding: (not is_located(finding), id(finding) in results))
        ends = [finding for finding in found if id(finding) in results]
        shown, folded = _fold_findings(status, found[: len(found) - len(ends)])
        rows += [finding_cells(finding) for finding in (*shown, *ends[:MOST_RESULTS])]
        if folded:
            more = f"{folded} more items" if shown else f"{folded} items"
            rows.append((_status_text(status), Text(more), Text(), Text(), Text()))
        if left := ends[MOST_RESULTS:]:
            more = f"{counted(len(left), 'more item')}, as a result"
            rows.append((_status_text(status), Text(more), Text(), Text(), Text()))
    table = small_table()
    filled = [
        place
        for place in range(len(FINDING_COLUMNS))
        if place < FIXED_COLUMNS or any(row[place] for row in rows)
    ]
    for place in filled:
        table.add_column(FINDING_COLUMNS[place], overflow="fold", no_wrap=place == 0)
    for row in rows:
        table.add_row(*(row[place] for place in filled))
    return table


def small_table(padding: int = 1) -> Table:
    """A table without a frame."""
    return Table(
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, padding, 0, 0),
        header_style="bold",
    )


def _fold_findings(status: Status, findings: list[Finding]) -> tuple[list[Finding], int]:
    """The findings with a row of their own, and the number of the others."""
    most = MOST_ROWS[status]
    if len(findings) <= most:
        return findings, 0
    if status is Status.IDENTICAL:
        return [], len(findings)
    if status is Status.EQUIVALENT:  # show those nearest to their limits
        findings = sorted(findings, key=lambda finding: -deciding_excess(finding))
    return findings[:most], len(findings) - most


def finding_cells(finding: Finding) -> tuple[Text, ...]:
    """One row of `FINDING_COLUMNS`."""
    return (
        _status_text(finding.status),
        Text(item_words(finding)),
        Text(value_words(finding)),
        Text(_off_by(finding)),
        Text(_worst(finding)),
    )


def _status_text(status: Status) -> Text:
    return Text(status.value, style=STYLES[status])


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


def details(verdict: Verdict) -> Iterator[RenderableType]:
    """Failures by cause, or else unstable findings; those with the same words are grouped."""
    found = told_findings(verdict)
    groups: dict[tuple[str, ...], list[Cause]] = {}
    for cause in group_causes(map(with_near_paths, found)):
        groups.setdefault(tuple(cause_lines(cause)[1:]), []).append(cause)
    shown = list(groups.items())[:MOST_SHOWN]
    for lines, (first, *others) in shown:
        yield Text(finding_lines(first.start)[0].strip(), style=STYLES[first.start.status])
        for line in lines:
            words = line.lstrip()
            yield indented(words, len(line) - len(words) - 2)
        if others:
            yield indented(f"also: {enumerated([cause.start.path for cause in others])}")
    left = len(found) - sum(len(cause.findings) for _, causes in shown for cause in causes)
    if left:
        yield Text(f"and {left} more")


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
    yield from listed("skipped", coverage.skipped)
    yield from listed("unmatched", coverage.unmatched)
    yield from listed("note", verdict.notes)
    if verdict.shrink_command:
        yield Text(f"next: {verdict.shrink_command}")


def listed(label: str, items: Iterable[str], left: int = 2) -> Iterator[RenderableType]:
    """A line for each of the first few, and the number of the rest."""
    found = list(items)
    shown = found[:MOST_SHOWN]
    if len(found) > MOST_SHOWN:
        shown.append(f"{len(found) - MOST_SHOWN} more")
    for item in shown:
        yield indented(f"{label}: {item}", left)


def indented(words: str, left: int = 2) -> RenderableType:
    """Text that keeps its indentation when it is wrapped."""
    return Padding(Text(words), (0, 0, 0, left), expand=False) if left else Text(words)


# --- A guarded run --------------------------------------------------------------------------------

# Above this many graphs, the rest share a row; graphs with a failure keep theirs.
MOST_GRAPHS = 24
GUARD_COLUMNS = ("graph", "calls", "checked", "failed", "items", "from")
GUARD_NUMBERS = 4


def guard_report(graphs: Sequence[GraphCounts], verdict: Verdict) -> Group:
    """The whole report; print with `crop=False` to keep the last line in one piece."""
    parts: list[RenderableType] = []
    if graphs:
        parts += [graph_table(graphs), Text()]
    parts += [*paragraph(details(verdict)), *_count_statuses(verdict)]
    parts += [*remarks(verdict), last_line(verdict)]
    return Group(*parts)


def graph_table(graphs: Sequence[GraphCounts]) -> Table:
    """One row per graph, in the order of compilation."""
    table = small_table()
    for place, name in enumerate(GUARD_COLUMNS):
        number = 0 < place <= GUARD_NUMBERS
        table.add_column(name, justify="right" if number else "left", overflow="fold")
    shown, folded = _fold_graphs(graphs)
    for graph in shown:
        calls = "?" if graph.unguarded else str(graph.calls)
        failed = Text(str(graph.failed), style=STYLES[Status.DIFFERENT] if graph.failed else "")
        counts = (calls, str(graph.checked), failed, str(graph.compared))
        table.add_row(Text(graph.label), *counts, Text(near_path(graph.source)))
    if folded:
        sums = [
            sum(getattr(graph, name) for graph in folded)
            for name in ("calls", "checked", "failed", "compared")
        ]
        table.add_row(f"{len(folded)} more", *map(str, sums), "")
    return table


def _fold_graphs(graphs: Sequence[GraphCounts]) -> tuple[list[GraphCounts], list[GraphCounts]]:
    """The graphs with a row of their own, and the rest."""
    if len(graphs) <= MOST_GRAPHS:
        return list(graphs), []
    ordered = sorted(graphs, key=lambda graph: not (graph.failed or graph.unguarded))
    kept = {graph.label for graph in ordered[:MOST_GRAPHS]}
    shown = [graph for graph in graphs if graph.label in kept]
    return shown, [graph for graph in graphs if graph.label not in kept]


def _count_statuses(verdict: Verdict) -> Iterator[RenderableType]:
    """The number of findings of each status, gravest first."""
    counts = Counter(finding.status for finding in verdict.findings)
    words = [f"{counts[status]} {status.value}" for status in reversed(Status) if counts[status]]
    if words:
        yield Text(f"findings: {', '.join(words)}")


# --- Detection power ------------------------------------------------------------------------------

POWER_COLUMNS = ("fault / noise", "planted", "caught", "at least", "native alone", "at least")
POWER_LEGEND = (
    "fault / noise: its exact effect / the model's own rounding noise\n"
    "at least: lower bound of the share, with 95 % confidence"
)


def power_report(report: PowerReport) -> Group:
    """The whole report for a terminal; the last line is the answer."""
    parts: list[RenderableType] = [Text(power_subject(report)), Text()]
    if report.judged:
        parts += [_power_table(report), Text(POWER_LEGEND, style="dim"), Text()]
    for title, lines in power_sections(report):
        parts.append(Text(title))
        parts += [indented(line) for line in lines]
    style = "green" if report.judged and not report.blind_spots() else "yellow"
    parts += [Text(), Text(power_headline(report), style=style, no_wrap=True, overflow="ignore")]
    return Group(*parts)


def _power_table(report: PowerReport) -> Table:
    table = small_table()
    for place, name in enumerate(POWER_COLUMNS):
        table.add_column(name, justify="left" if place == 0 else "right", no_wrap=place == 0)
    for row in power_rows(report):
        table.add_row(*row)
    return table


def power_rows(report: PowerReport) -> list[list[str]]:
    """One row of `POWER_COLUMNS` per size of the fault."""
    rows = []
    for band in BANDS:
        whole, native = report.share(band), report.share(band, native=True)
        cells = [f"{SIZES[band]}", str(whole.of)]
        for share in (whole, native):
            cells += [percent(share.value), percent(share.least)] if share.of else ["", ""]
        rows.append(cells)
    return rows


def heading(facts: Iterable[tuple[str, str]]) -> RenderableType:
    """A label and its text on each line."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True, style="bold")
    grid.add_column(overflow="fold")
    for label, words in facts:
        grid.add_row(label, Text(words))
    return grid
