"""What a check would have caught, for a terminal of 80 columns, without colours if need be."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from paritas.numerics.power_reports import BANDS
from paritas.numerics.power_wording import SIZES, headline, percent, sections, subject
from paritas.reporting.terminal import indented

if TYPE_CHECKING:
    from rich.console import RenderableType

    from paritas.numerics.power_reports import PowerReport

__all__ = ["COLUMNS", "LEGEND", "render", "table_rows"]

COLUMNS = ("fault / noise", "planted", "caught", "at least", "native alone", "at least")
LEGEND = (
    "fault / noise: its exact effect over the model's own rounding noise\n"
    "at least: what the share is not below, with 95 % confidence"
)


def render(report: PowerReport) -> Group:
    """The whole report for a terminal; its last line is the answer in one line."""
    parts: list[RenderableType] = [Text(subject(report)), Text()]
    if report.judged:
        parts += [_table(report), Text(LEGEND, style="dim"), Text()]
    for title, lines in sections(report):
        parts.append(Text(title))
        parts += [indented(line) for line in lines]
    style = "green" if report.judged and not report.blind_spots() else "yellow"
    parts += [Text(), Text(headline(report), style=style, no_wrap=True, overflow="ignore")]
    return Group(*parts)


def _table(report: PowerReport) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        header_style="bold",
    )
    for place, name in enumerate(COLUMNS):
        table.add_column(name, justify="left" if place == 0 else "right", no_wrap=place == 0)
    for row in table_rows(report):
        table.add_row(*row)
    return table


def table_rows(report: PowerReport) -> list[list[str]]:
    """One row per size, by `COLUMNS`."""
    rows = []
    for band in BANDS:
        whole, native = report.share(band), report.share(band, native=True)
        cells = [f"{SIZES[band]}", str(whole.of)]
        for share in (whole, native):
            cells += [percent(share.value), percent(share.least)] if share.of else ["", ""]
        rows.append(cells)
    return rows
