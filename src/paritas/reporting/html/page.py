"""The page itself: template, styles and scripts put together."""

from __future__ import annotations

import base64
import functools
import hashlib
import re
from collections import Counter
from importlib import resources
from typing import TYPE_CHECKING

import jinja2

from paritas.numerics.findings import Status
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

__all__ = ["html_report"]

# On paper, and where scripts are switched off, the table is this many rows that fail.
MOST_PRINTED = 200
# The rest of a list is said to be in the JSON.
MOST_LISTED = 200

_STYLES = ("vendor/uPlot.min.css", "vendor/tabulator_simple.min.css", "report.css")
_VENDORED = ("vendor/uPlot.iife.min.js", "vendor/tabulator.min.js", "vendor/dagre.min.js")
_OWN = (
    "data.js",
    "drawing.js",
    "filters.js",
    "table.js",
    "chart.js",
    "tree.js",
    "graph.js",
    "tensor.js",
    "main.js",
)
_TEMPLATE = "report.html.jinja"


def html_report(comparison: Comparison) -> str:
    """The whole comparison as one HTML file that loads nothing from anywhere."""
    scripts = _scripts()
    rows = comparison.rows
    counts = Counter(row.status for row in rows)
    failing = [
        (place, row)
        for place, row in enumerate(rows)
        if not row.status.passes(strict=comparison.strict)
    ]
    return _template().render(
        comparison=comparison,
        statuses=[(status, SIGNS[status], MEANINGS[status], counts[status]) for status in Status],
        signs=SIGNS,
        headline=headline(comparison),
        work=work_done(comparison),
        stories=_stories(comparison),
        failing=failing[:MOST_PRINTED],
        failures=len(failing),
        most_listed=MOST_LISTED,
        styles=[*map(_without_map, _STYLES)],
        scripts=scripts,
        allowed=" ".join(f"'sha256-{_digest(script)}'" for script in scripts),
        data=packed(payload(comparison)),
    )


def _stories(comparison: Comparison) -> list[object]:
    first, bad = comparison.first, comparison.first_non_finite
    told = [divergence_story(comparison, first, "First divergence")]
    if bad is not None and first is not None and bad.row == first.row:
        told = [divergence_story(comparison, first, "First divergence, and first NaN or Inf")]
    else:
        told.append(divergence_story(comparison, bad, "First NaN or Inf"))
    return [story for story in told if story is not None]


@functools.cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        loader=jinja2.FunctionLoader(_asset),
    )
    environment.filters["ranges"] = ranges
    environment.filters["figure"] = _figure
    environment.filters["place"] = _place
    return environment.get_template(_TEMPLATE)


def _figure(value: float | None) -> str:
    """A column of these is read by magnitude."""
    return "" if value is None else figure(value) if not value else f"{value:.2e}"


def _place(row: Row) -> str:
    return f"{row.step}/{JOINED if row.rank is None else row.rank}"


@functools.cache
def _scripts() -> tuple[str, ...]:
    """Those of others one by one, then our own as one that leaves no name behind."""
    own = "\n".join(_asset(name) for name in _OWN)
    return (*map(_without_map, _VENDORED), f'"use strict";\n(() => {{\n{own}\n}})();\n')


def _without_map(name: str) -> str:
    """An asset, less the link to its source map: developer tools would look for that file."""
    return re.sub(r"//# sourceMappingURL=\S+|/\*# sourceMappingURL=\S+ \*/", "", _asset(name))


@functools.cache
def _asset(name: str) -> str:
    return resources.files("paritas.reporting").joinpath("assets", name).read_text("utf-8")


def _digest(script: str) -> str:
    """What the browser is told to run, and nothing else: a name that breaks out stays text."""
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
