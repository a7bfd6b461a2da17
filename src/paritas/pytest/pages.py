"""A page and a JSON file for each verdict that does not pass, and a list of all."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paritas.errors import UsageError
from paritas.pytest.outcomes import safe_name
from paritas.reports.files import write_verdict, write_whole
from paritas.reports.pages import PageLink, index_page, verdict_page

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from paritas.pytest.outcomes import CheckOutcome, ReportedOutcome
    from paritas.results.findings import Verdict


def write_page(
    folder: Path, verdict: Verdict, outcome: CheckOutcome, test: str, number: int
) -> Path:
    """Write the page of one verdict, and beside it the JSON with every finding.

    Args:
        folder: where it goes; it is made.
        test: the node id.
        number: which verdict of the test it is.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        message = f"--paritas-report {str(folder)!r}: {error.strerror or error}; name a folder"
        raise UsageError(message) from error
    path = folder / f"{safe_name(test.replace('/', '.').replace('::', '.'))}-{number}.html"
    what = f"{outcome.kind} {outcome.name}".strip()
    beside = path.with_suffix(".json")
    write_verdict(beside, verdict)
    page = verdict_page(verdict, test, what, beside.name)
    write_whole(path, page.encode(errors="backslashreplace"))
    return path


def write_index(folder: Path, told: Sequence[ReportedOutcome]) -> None:
    """Write the list of the pages of a run."""
    links = [
        PageLink(
            test=one.test,
            what=f"{one.outcome.kind} {one.outcome.name}".strip(),
            status=one.outcome.status,
            worst=one.outcome.worst,
            href=one.outcome.page.replace("\\", "/").rpartition("/")[2],
        )
        for one in told
        if one.outcome.page
    ]
    page = index_page(links, verdicts=len(told))
    write_whole(folder / "index.html", page.encode(errors="backslashreplace"))
