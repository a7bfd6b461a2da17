"""A verdict for a terminal: a table of findings, what failed in words, coverage, the verdict.

Everything is readable without colour, in ASCII but for the rules of the table (which rich replaces
where the terminal has no others), and in 80 columns. The last line is the verdict in one line; it
is not wrapped, so that a script finds it whole: print with `crop=False`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from rich import box
from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from paritas.numerics.findings import Status
from paritas.numerics.wording import (
    MOST_SHOWN,
    deciding_figure,
    deciding_score,
    finding_lines,
    headline,
    is_inexact,
    item_words,
    value_words,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from rich.console import RenderableType

    from paritas.numerics.findings import Finding, Verdict

STYLES = {
    Status.IDENTICAL: "green",
    Status.EQUIVALENT: "green",
    Status.UNSTABLE: "yellow",
    Status.UNVERIFIED: "magenta",
    Status.DEGRADED: "bold red",
    Status.DIFFERENT: "bold red",
}
# More rows of one status than this, and the rest of them share a row that counts them.
MOST_ROWS = {
    Status.IDENTICAL: 3,
    Status.EQUIVALENT: 12,
    Status.UNSTABLE: 24,
    Status.UNVERIFIED: 24,
    Status.DEGRADED: 24,
    Status.DIFFERENT: 24,
}
COLUMNS = ("status", "item", "value", "off by", "worst / allowed")
FIXED = 2  # the others are left out where every cell of them is empty
LEGEND = (
    "off by: size of the difference over that of the reference, or a count of values\n"
    "worst / allowed: in multiples of the reference's own rounding noise"
)


def report(verdict: Verdict) -> Group:
    """The whole verdict."""
    parts: list[RenderableType] = []
    if verdict.findings:
        table = findings_table(verdict)
        has_figures = len(table.columns) > FIXED + 1
        parts += [table, *([Text(LEGEND, style="dim")] if has_figures else []), Text()]
    told = list(details(verdict))
    if told:
        parts += [*told, Text()]
    parts += [*remarks(verdict), last_line(verdict)]
    return Group(*parts)


def last_line(verdict: Verdict) -> Text:
    """The verdict in one line."""
    style = STYLES[verdict.status] if verdict.enabled else STYLES[Status.UNVERIFIED]
    return Text(headline(verdict), style=style, no_wrap=True, overflow="ignore")


def findings_table(verdict: Verdict) -> Table:
    """One row per finding, gravest first, then in program order; many of one status are folded."""
    rows: list[tuple[Text, ...]] = []
    for status in sorted(Status, key=lambda status: -status.gravity):
        found = [finding for finding in verdict.findings if finding.status is status]
        shown, folded = _fold(status, found)
        rows += [cells(finding) for finding in shown]
        if folded:
            more = f"{folded} more items" if shown else f"{folded} items"
            rows.append((_status(status), Text(more), Text(), Text(), Text()))
    table = Table(
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        header_style="bold",
    )
    filled = [
        place for place in range(len(COLUMNS)) if place < FIXED or any(row[place] for row in rows)
    ]
    for place in filled:
        table.add_column(COLUMNS[place], overflow="fold", no_wrap=place == 0)
    for row in rows:
        table.add_row(*(row[place] for place in filled))
    return table


def _fold(status: Status, findings: list[Finding]) -> tuple[list[Finding], int]:
    """Which rows are shown, and how many share the last one."""
    most = MOST_ROWS[status]
    if len(findings) <= most:
        return findings, 0
    if status is Status.IDENTICAL:
        return [], len(findings)
    if status is Status.EQUIVALENT:  # those nearest to their limits are worth a look
        findings = sorted(findings, key=lambda finding: -_excess(finding))
    return findings[:most], len(findings) - most


def cells(finding: Finding) -> tuple[Text, ...]:
    """One row, by `COLUMNS`."""
    return (
        _status(finding.status),
        Text(item_words(finding)),
        Text(value_words(finding)),
        Text(_off_by(finding)),
        Text(_worst(finding)),
    )


def _status(status: Status) -> Text:
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


def _excess(finding: Finding) -> float:
    decided = deciding_score(finding)
    return 0.0 if decided is None else decided[1].excess


def _worst(finding: Finding) -> str:
    decided = deciding_score(finding)
    if decided is None:
        return ""
    run, score = decided
    name, value, limit = deciding_figure(score)
    figures = f"{value:.2g} / {limit:.2g}"
    named = figures if name == "worst" else f"{name} {figures}"  # no single element is over it
    return f"{named} lifted" if run == "lifted" else named


def details(verdict: Verdict) -> Iterator[RenderableType]:
    """What failed, in words; where nothing did, what is unstable. The same words come once."""
    found = verdict.failures or [f for f in verdict.findings if f.status is Status.UNSTABLE]
    groups: dict[tuple[str, ...], list[Finding]] = {}
    for finding in map(with_near_paths, found):
        groups.setdefault(tuple(finding_lines(finding)[1:]), []).append(finding)
    shown = list(groups.items())[:MOST_SHOWN]
    for lines, (first, *others) in shown:
        yield Text(finding_lines(first)[0].strip(), style=STYLES[first.status])
        for line in lines:
            words = line.lstrip()
            yield indented(words, len(line) - len(words) - 2)
        if others:
            yield indented(f"likewise: {_enumerated([finding.path for finding in others])}")
    left = len(found) - sum(len(members) for _, members in shown)
    if left:
        yield Text(f"and {left} more")


def near_path(source: str) -> str:
    """A source line's file relative to the current directory, where it lies below it."""
    return source.removeprefix(f"{Path.cwd()}{os.sep}")


def with_near_paths(finding: Finding) -> Finding:
    """The same finding, its source lines as `near_path` gives them."""
    origin = finding.origin
    if origin is not None:
        origin = msgspec.structs.replace(origin, source=near_path(origin.source))
    source = None if finding.source is None else near_path(finding.source)
    return msgspec.structs.replace(finding, source=source, origin=origin)


def remarks(verdict: Verdict) -> Iterator[RenderableType]:
    """Coverage and notes."""
    coverage = verdict.coverage
    counts = f"{coverage.compared} compared, {len(coverage.skipped)} skipped, "
    if coverage.not_selected:  # a note says by what; their names are in the files
        counts += f"{len(coverage.not_selected)} not selected, "
    yield Text(f"coverage: {counts}{len(coverage.unmatched)} unmatched")
    yield from listed("skipped", coverage.skipped)
    yield from listed("unmatched", coverage.unmatched)
    yield from listed("note", verdict.notes)


def listed(label: str, items: Iterable[str]) -> Iterator[RenderableType]:
    """The first few of them, a line each, and how many more there are."""
    found = list(items)
    for item in found[:MOST_SHOWN]:
        yield indented(f"{label}: {item}")
    if len(found) > MOST_SHOWN:
        yield indented(f"{label}: {len(found) - MOST_SHOWN} more")


def _enumerated(items: list[str]) -> str:
    more = f" and {len(items) - MOST_SHOWN} more" if len(items) > MOST_SHOWN else ""
    return f"{', '.join(items[:MOST_SHOWN])}{more}"


def indented(words: str, left: int = 2) -> RenderableType:
    """Text that keeps its indentation where it is wrapped."""
    return Padding(Text(words), (0, 0, 0, left), expand=False)
