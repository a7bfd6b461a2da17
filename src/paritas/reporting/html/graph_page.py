"""The page of a graph whose operators were checked."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

from paritas.numerics.graph_reports import Outcome
from paritas.reporting.graph_words import (
    MEANINGS,
    ORDER,
    confirmation_words,
    counted,
    duration,
    enumerated,
    failing,
    failing_options,
    graph_label,
    loss_gap,
    option_words,
    reasons,
    short_name,
    size_words,
    verdict_word,
    verdict_words,
)
from paritas.reporting.html.assembling import Layout, render_page
from paritas.reporting.html.columns import packed
from paritas.reporting.html.graph_payload import SLUGS, payload
from paritas.reporting.html.graph_rules import overview
from paritas.reporting.html.words import SIGNS, figure
from paritas.reporting.json_file import write_whole

if TYPE_CHECKING:
    from pathlib import Path

    from paritas.numerics.graph_reports import GraphReport, OperatorResult, OptionResult

__all__ = ["OUTCOME_SIGNS", "VERDICTS", "graph_page", "page_name", "write_page"]

# The others are in the table; of these the first are unfolded.
MOST_STORIES = 50
MOST_OPEN = 3
# Operators that have a reason in common.
MOST_NAMED = 8

# Beside the colour, so that nobody depends on it.
OUTCOME_SIGNS = {
    Outcome.VERIFIED: "✓",
    Outcome.NOTHING: "–",
    Outcome.UNSUPPORTED: "?",
    Outcome.FAILED: "≠",
}
VERDICTS = {
    "verified": Outcome.VERIFIED,
    "failed": Outcome.FAILED,
    "unverified": Outcome.UNSUPPORTED,
}
_LAYOUT = Layout(
    template="graph_page.html.jinja",
    styles=("vendor/tabulator_simple.min.css", "basics.css", "report.css", "graph_page.css"),
    vendored=("vendor/tabulator.min.js",),
    own=(
        "shell.js",
        "figures.js",
        "drawing.js",
        "columns.js",
        "graph_filters.js",
        "graph_table.js",
        "graph_panel.js",
        "graph_main.js",
    ),
)


def write_page(report: GraphReport, path: Path) -> None:
    """Write the page to a file, whole or not at all."""
    page = graph_page(report).encode(errors="backslashreplace")
    write_whole(path, page.removesuffix(b"\n"))


def graph_page(report: GraphReport) -> str:
    """The whole report as one HTML file that loads nothing from anywhere."""
    counts = report.counts()
    missing = report.calls - sum(counts.values())
    wrong = failing(report)
    word = verdict_word(report)
    return render_page(
        _LAYOUT,
        {
            "gap": _gap,
            "link": _link,
            "loss": _loss,
            "option": option_words,
            "ranks": confirmation_words,
        },
        report=report,
        name=short_name(report),
        word=word,
        verdict=VERDICTS[word],
        words=verdict_words(report),
        size=size_words(report),
        took=duration(report.seconds),
        outcomes=[(o, SLUGS[o], OUTCOME_SIGNS[o], MEANINGS[o], counts[o]) for o in ORDER],
        slugs=SLUGS,
        outcome_signs=OUTCOME_SIGNS,
        signs=SIGNS,
        missing=max(0, missing),
        stories=[
            (place, one, failing_options(one, report), _modules(one))
            for place, one in enumerate(report.operators)
            if one.outcome is Outcome.FAILED
        ][:MOST_STORIES],
        most_open=MOST_OPEN,
        more_stories=max(0, len(wrong) - MOST_STORIES),
        unchecked=[
            (outcome, reason, enumerated(reason.operators, MOST_NAMED))
            for outcome in (Outcome.UNSUPPORTED, Outcome.NOTHING)
            for reason in reasons(report, outcome)
        ],
        overview=overview(report.operators),
        counted=counted,
        beside=[
            (
                graph_label(one, (report, *report.others)),
                page_name(one.number),
                VERDICTS[verdict_word(one)],
                verdict_word(one),
                verdict_words(one),
            )
            for one in report.others
        ],
        data=packed(payload(report)),
    )


def page_name(number: int) -> str:
    """The page of a graph that is not that of the folder's latest run."""
    return f"report_{number}.html"


def _modules(one: OperatorResult) -> str:
    return enumerated(dict.fromkeys(site.module for site in one.sites if site.module))


def _loss(value: float | None) -> str:
    """It is compared with its neighbour: more digits than elsewhere."""
    return "" if value is None else "NaN" if math.isnan(value) else f"{value:.9g}"


def _gap(option: OptionResult) -> str:
    """Written as the scripts of the page write it: `1.10e0`."""
    gap = loss_gap(option)
    if gap is None or not gap or not math.isfinite(gap):
        return "" if gap is None else figure(gap)
    digits, power = f"{gap:.2e}".split("e")
    return f"{digits}e{int(power)}"


def _link(script: str) -> str:
    """The address of a script beside the page; nothing for a name that could lead elsewhere."""
    return script if re.fullmatch(r"(?:\w[\w.-]*/)*\w[\w.-]*", script, re.ASCII) else ""
