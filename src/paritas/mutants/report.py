"""What a check would have caught, as people see it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from rich.console import Group
from rich.text import Text

from paritas.core.reporting.notebook import NotebookResult
from paritas.core.reporting.tables import Column, Mark, page_table, terminal_table
from paritas.core.reporting.terminal import indent_text
from paritas.mutants.rows import BANDS, SIZES, percent, power_sections, power_subject

if TYPE_CHECKING:
    from rich.console import RenderableType

    from paritas.mutants.rows import PowerReport, Share

POWER_LEGEND = (
    "fault / noise: its exact effect / the model's own rounding noise\n"
    "at least: lower bound of the share, with 95 % confidence"
)


class SizeRow(NamedTuple):
    """The faults of one size: the share that is caught, and that of the native run alone."""

    size: str
    caught: Share
    native: Share


def _value(share: Share) -> str | None:
    return percent(share.value) if share.of else None


def _least(share: Share) -> str | None:
    return percent(share.least) if share.of else None


POWER_COLUMNS: tuple[Column[SizeRow], ...] = (
    Column("fault / noise", lambda row: row.size, is_fixed=True),
    Column("planted", lambda row: row.caught.of, "count"),
    Column("caught", lambda row: _value(row.caught), "number"),
    Column("at least", lambda row: _least(row.caught), "number"),
    Column("native alone", lambda row: _value(row.native), "number"),
    Column("at least", lambda row: _least(row.native), "number"),
)


def _size_rows(report: PowerReport) -> list[SizeRow]:
    return [
        SizeRow(SIZES[band], report.share(band), report.share(band, native=True)) for band in BANDS
    ]


def power_report(report: PowerReport) -> Group:
    """The whole report for a terminal; the last line is the answer."""
    parts: list[RenderableType] = [Text(power_subject(report)), Text()]
    if report.judged:
        table = terminal_table(POWER_COLUMNS, _size_rows(report))
        parts += [table, Text(POWER_LEGEND, style="dim"), Text()]
    for title, lines in power_sections(report):
        parts.append(Text(title))
        parts += [indent_text(line) for line in lines]
    style = "green" if report.judged and not report.blind_spots() else "yellow"
    parts += [Text(), Text(report.headline, style=style, no_wrap=True, overflow="ignore")]
    return Group(*parts)


def notebook_summary(report: PowerReport) -> NotebookResult:
    """The report for a cell of a notebook."""
    mark, rows = Mark("", css="s-unverified", sign="?"), []
    if report.judged:
        rows = _size_rows(report)
        mark = Mark("", css="s-equivalent", sign="✓")
        if report.blind_spots():
            mark = Mark("", css="s-unstable", sign="~")
    return NotebookResult(
        mark=mark,
        title="detection power",
        words=report.headline,
        facts=[("program", power_subject(report))],
        table=page_table(POWER_COLUMNS, rows),
        sections=list(power_sections(report)),
        legend=". ".join(POWER_LEGEND.split("\n")),
    )
