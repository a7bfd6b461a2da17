"""The page of a comparison."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from paritas.numerics.findings import Status
from paritas.reporting.html.assembling import Layout, render_page
from paritas.reporting.html.columns import packed
from paritas.reporting.html.payload import JOINED, payload, ranges
from paritas.reporting.html.words import (
    MEANINGS,
    SIGNS,
    divergence_story,
    figure,
    headline,
    work_done,
)

if TYPE_CHECKING:
    from paritas.numerics.comparisons import Comparison, Row
    from paritas.reporting.html.words import Story

__all__ = ["html_report", "small_figure", "step_and_rank", "stories"]

# On paper, and where scripts are switched off, the table is this many rows that fail.
MOST_PRINTED = 200
_LAYOUT = Layout(
    template="report.html.jinja",
    styles=(
        "vendor/uPlot.min.css",
        "vendor/tabulator_simple.min.css",
        "basics.css",
        "report.css",
    ),
    vendored=("vendor/uPlot.iife.min.js", "vendor/tabulator.min.js", "vendor/dagre.min.js"),
    own=(
        "shell.js",
        "figures.js",
        "data.js",
        "drawing.js",
        "filters.js",
        "columns.js",
        "table.js",
        "chart.js",
        "tree.js",
        "graph.js",
        "tensor.js",
        "main.js",
    ),
)


def html_report(comparison: Comparison) -> str:
    """The whole comparison as one HTML file that loads nothing from anywhere."""
    rows = comparison.rows
    counts = Counter(row.status for row in rows)
    failing = [
        (place, row)
        for place, row in enumerate(rows)
        if not row.status.passes(strict=comparison.strict)
    ]
    return render_page(
        _LAYOUT,
        {"ranges": ranges, "figure": small_figure, "place": step_and_rank},
        comparison=comparison,
        statuses=[(status, SIGNS[status], MEANINGS[status], counts[status]) for status in Status],
        signs=SIGNS,
        headline=headline(comparison),
        work=work_done(comparison),
        stories=stories(comparison),
        failing=failing[:MOST_PRINTED],
        failures=len(failing),
        data=packed(payload(comparison)),
    )


def stories(comparison: Comparison) -> list[Story]:
    """Where the two begin to differ, in words."""
    first, bad = comparison.first, comparison.first_non_finite
    told = [divergence_story(comparison, first, "First divergence")]
    if bad is not None and first is not None and bad.row == first.row:
        told = [divergence_story(comparison, first, "First divergence, and first NaN or Inf")]
    else:
        told.append(divergence_story(comparison, bad, "First NaN or Inf"))
    return [story for story in told if story is not None]


def small_figure(value: float | None) -> str:
    """A column of these is read by magnitude."""
    return "" if value is None else figure(value) if not value else f"{value:.2e}"


def step_and_rank(row: Row) -> str:
    """Of a row, in a cell."""
    return f"{row.step}/{JOINED if row.rank is None else row.rank}"
