"""A guarded run for a terminal: its graphs, what fails, the verdict."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group
from rich.text import Text

from paritas.core.reporting.tables import STYLES, Column, Mark, Rest, terminal_table
from paritas.core.reporting.terminal import details, last_line, paragraph, remarks
from paritas.core.results.findings import Status
from paritas.core.results.wording import near_path, status_counts

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import RenderableType
    from rich.table import Table

    from paritas.core.results.findings import Verdict
    from paritas.guarding.report import GraphCounts

# Above this many graphs, the rest share a row; graphs with a failure keep theirs.
MOST_GRAPHS = 24


def _mark_failed(graph: GraphCounts) -> Mark:
    return Mark(str(graph.failed), STYLES[Status.DIFFERENT] if graph.failed else "")


GUARD_COLUMNS: tuple[Column[GraphCounts], ...] = (
    Column("graph", lambda graph: graph.label),
    Column("calls", lambda graph: "?" if graph.unguarded else graph.calls, "count"),
    Column("checked", lambda graph: graph.checked, "count"),
    Column("failed", _mark_failed, "count"),
    Column("items", lambda graph: graph.compared, "count"),
    Column("from", lambda graph: near_path(graph.source)),
)


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
    shown, folded = _fold_graphs(graphs)
    rows: list[GraphCounts | Rest] = [*shown]
    if folded:
        sums = [
            sum(getattr(graph, name) for graph in folded)
            for name in ("calls", "checked", "failed", "compared")
        ]
        rows.append(Rest((f"{len(folded)} more", *map(str, sums))))
    return terminal_table(GUARD_COLUMNS, rows)


def _fold_graphs(graphs: Sequence[GraphCounts]) -> tuple[list[GraphCounts], list[GraphCounts]]:
    """The graphs with a row of their own, and the rest."""
    if len(graphs) <= MOST_GRAPHS:
        return list(graphs), []
    ordered = sorted(graphs, key=lambda graph: not (graph.failed or graph.unguarded))
    labels = {graph.label for graph in ordered[:MOST_GRAPHS]}
    shown = [graph for graph in graphs if graph.label in labels]
    return shown, [graph for graph in graphs if graph.label not in labels]


def _count_statuses(verdict: Verdict) -> Iterator[RenderableType]:
    """The number of findings of each status, gravest first."""
    words = status_counts(finding.status for finding in verdict.findings)
    if words:
        yield Text(f"findings: {', '.join(words)}")
