"""The page of one verdict, and the list of several such pages."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import TYPE_CHECKING

from paritas.numerics.findings import Status
from paritas.numerics.wording import finding_lines
from paritas.numerics.wording import headline as verdict_line
from paritas.reporting.html.assembling import Layout, render_page
from paritas.reporting.html.words import MEANINGS, SIGNS
from paritas.reporting.terminal import COLUMNS, LEGEND, cells

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paritas.numerics.findings import Finding, Verdict

__all__ = ["PageLink", "finding_row", "index_page", "told", "verdict_page"]

# Failures that are told in full; the others have their row in the table.
MOST_TOLD = 50
MOST_ROWS = 2000
_LAYOUT = Layout(
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
    return _render(
        title=title,
        what=what,
        status=verdict.status if verdict.enabled else Status.UNVERIFIED,
        words=verdict_line(verdict),
        verdict=verdict,
        data=data,
        statuses=[(status, SIGNS[status], MEANINGS[status], counts[status]) for status in Status],
        stories=[told(finding) for finding in verdict.failures[:MOST_TOLD]],
        more_stories=max(0, len(verdict.failures) - MOST_TOLD),
        rows=[finding_row(finding) for finding in ordered[:MOST_ROWS]],
        more_rows=max(0, len(ordered) - MOST_ROWS),
        links=None,
    )


def index_page(links: Sequence[PageLink], *, verdicts: int) -> str:
    """The list of pages, gravest first; `verdicts` is how many there were, passing ones too."""
    ordered = sorted(links, key=lambda link: -Status(link.status).gravity)
    status = Status(ordered[0].status) if ordered else Status.IDENTICAL
    return _render(
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


def _render(**values: object) -> str:
    return render_page(
        _LAYOUT, {}, signs=SIGNS, columns=COLUMNS, legend=". ".join(LEGEND.split("\n")), **values
    )


def told(finding: Finding) -> tuple[Finding, str]:
    """A finding and its lines, less the first, which is its badge."""
    return finding, "\n".join(line[4:] for line in finding_lines(finding)[1:])


def finding_row(finding: Finding) -> tuple[str, str, str, list[str]]:
    """One row of the table: class, sign and word of its status, and the other cells."""
    status = finding.status
    cells_of = [cell.plain for cell in cells(finding)[1:]]
    return f"s-{status.value}", SIGNS[status], status.value, cells_of
