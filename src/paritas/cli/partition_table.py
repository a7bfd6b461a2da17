"""The splits of an operator for a terminal: a table, what failed in words, the verdict."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from paritas.numerics.findings import Status
from paritas.reporting.terminal import STYLES, details, last_line, listed

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rich.console import RenderableType

    from paritas.cli.partition_checks import Checked, Row
    from paritas.numerics.findings import Finding

__all__ = ["report"]

GRADIENT = "gradient of "
COLUMNS = ("option", "split by", "forward", "backward", "status", "off by")
LEGEND = (
    "option: argument, dimension\noff by: size of the largest difference over that of the reference"
)


def report(checked: Checked, script: Sequence[str] = ()) -> Group:
    """Everything, the verdict in one line last.

    Args:
        script: what came of shrinking, line by line.
    """
    verdict = checked.verdict
    head = f"{checked.name} over {checked.ranks} ranks, rule {checked.source}:"
    parts: list[RenderableType] = [Text(head)]
    parts += [Text(f"  {text}") for text in checked.rule]
    parts.append(Text())
    if checked.rows:
        parts += [_table(checked.rows), Text(LEGEND, style="dim"), Text()]
    told = list(details(verdict))
    if told:
        parts += [*told, Text()]
    coverage = verdict.coverage
    parts += [
        Text(f"coverage: {coverage.compared} compared, {len(coverage.skipped)} skipped"),
        *listed("skipped", coverage.skipped),
        *listed("note", verdict.notes[1:]),  # the first of them is the rule
        *_unbroken(script),
        last_line(verdict),
    ]
    return Group(*parts)


def _unbroken(lines: Sequence[str]) -> list[Text]:
    """Lines with a path in them, which has to stay in one piece to be copied."""
    told = [Text(line, no_wrap=True, overflow="ignore") for line in lines]
    return [Text(), *told, Text()] if told else []


def _table(rows: Iterable[Row]) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        header_style="bold",
    )
    for name in COLUMNS:
        table.add_column(name, overflow="fold", no_wrap=name != "split by")
    for row in rows:
        backward = [one for one in row.verdict.findings if GRADIENT in one.path]
        forward = [one for one in row.verdict.findings if GRADIENT not in one.path]
        table.add_row(
            Text(row.option),
            Text(row.split_by),
            _gravest(forward),
            _gravest(backward),
            Text(row.verdict.status.value, style=STYLES[row.verdict.status]),
            Text(_off_by(row.verdict.findings)),
        )
    return table


def _gravest(findings: list[Finding]) -> Text:
    """The gravest of some findings; nothing compared is shown as such."""
    if not findings:
        return Text("-")
    status = max((one.status for one in findings), key=lambda status: status.gravity)
    return Text(status.value, style=STYLES[status])


def _off_by(findings: tuple[Finding, ...]) -> str:
    """The largest relative difference; what was settled without a figure is in words."""
    figures = [one.metrics.rel_l2 for one in findings if one.metrics is not None]
    if figures:
        # A NaN is the worst of all, and `max` may pass it by.
        worst = next((figure for figure in figures if math.isnan(figure)), max(figures))
        return f"{worst:.1e}"
    statuses = {one.status for one in findings}
    if statuses <= {Status.IDENTICAL, Status.EQUIVALENT}:
        return "rounding" if Status.EQUIVALENT in statuses else "0"
    return "-"
