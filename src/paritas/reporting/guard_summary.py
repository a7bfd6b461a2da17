"""What a guard saw, for a terminal: the graphs, what differed and where it starts, the verdict.

For 80 columns, like `paritas.reporting.terminal`, whose last line it shares.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from rich import box
from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from paritas.numerics.findings import Aspect, Status
from paritas.numerics.wording import MOST_SHOWN
from paritas.reporting.terminal import STYLES, details, last_line, near_path, remarks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from rich.console import RenderableType

    from paritas.numerics.findings import Finding, Verdict

# More graphs than this, and the rest of them share a row; those with a failure go first.
MOST_GRAPHS = 24
COLUMNS = ("graph", "calls", "checked", "failed", "items", "from")
NUMBERS = 4


class GraphCounts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One compiled graph; see `paritas.checking.guarding.journal.GraphEntry`."""

    label: str
    source: str
    calls: int
    checked: int
    failed: int
    compared: int
    unguarded: str


def guard_summary(graphs: Sequence[GraphCounts], verdict: Verdict) -> Group:
    """The whole of it; print with `crop=False`, so that the last line stays one line."""
    parts: list[RenderableType] = []
    if graphs:
        parts += [graph_table(graphs), Text()]
    told = list(_differences(graphs, verdict))
    if told:
        parts += [*told, Text()]
    parts += _counts(verdict)
    parts += [*remarks(verdict), last_line(verdict)]
    return Group(*parts)


def graph_table(graphs: Sequence[GraphCounts]) -> Table:
    """One row per graph, in the order in which they were compiled."""
    table = Table(
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        header_style="bold",
    )
    for place, name in enumerate(COLUMNS):
        number = 0 < place <= NUMBERS
        table.add_column(name, justify="right" if number else "left", overflow="fold")
    shown, folded = _fold(graphs)
    for graph in shown:
        calls = "?" if graph.unguarded else str(graph.calls)
        failed = Text(str(graph.failed), style=STYLES[Status.DIFFERENT] if graph.failed else "")
        counts = (calls, str(graph.checked), failed, str(graph.compared))
        table.add_row(Text(graph.label), *counts, Text(near_path(graph.source)))
    if folded:
        sums = [
            sum(getattr(graph, name) for graph in folded)
            for name in ("calls", "checked", "failed", "compared")
        ]
        table.add_row(f"{len(folded)} more", *map(str, sums), "")
    return table


def _fold(graphs: Sequence[GraphCounts]) -> tuple[list[GraphCounts], list[GraphCounts]]:
    """Which have a row of their own, and which share one."""
    if len(graphs) <= MOST_GRAPHS:
        return list(graphs), []
    wanting = sorted(graphs, key=lambda graph: not (graph.failed or graph.unguarded))
    kept = {graph.label for graph in wanting[:MOST_GRAPHS]}
    shown = [graph for graph in graphs if graph.label in kept]
    return shown, [graph for graph in graphs if graph.label not in kept]


def _differences(graphs: Sequence[GraphCounts], verdict: Verdict) -> Iterator[RenderableType]:
    """What differed, by graph, where it starts first; values that follow from that are named."""
    by_graph = {graph.label: _failures_of(graph, verdict) for graph in graphs}
    located = {label: found for label, found in by_graph.items() if any(map(_is_start, found))}
    for label in list(located)[:MOST_SHOWN]:
        starts, others = _split(located[label], _is_start)
        followers, others = _split(others, _is_wrong_value)
        yield from details(_with_findings(verdict, [*starts, *others]))
        if followers:
            yield Padding(Text(_followers_line(label, followers)), (0, 0, 0, 2), expand=False)
    left = sum(len(found) for found in list(located.values())[MOST_SHOWN:])
    if left:
        yield Text(f"and {left} more in {len(located) - MOST_SHOWN} other graphs")
    told = {id(finding) for found in located.values() for finding in found}
    rest = [finding for finding in verdict.findings if id(finding) not in told]
    if rest and not (told and _with_findings(verdict, rest).passed):
        yield from details(_with_findings(verdict, rest))


def _failures_of(graph: GraphCounts, verdict: Verdict) -> list[Finding]:
    prefix = f"{graph.label}: "
    return [finding for finding in verdict.failures if finding.path.startswith(prefix)]


def _followers_line(label: str, followers: list[Finding]) -> str:
    names = [finding.path.removeprefix(f"{label}: ") for finding in followers]
    more = f" and {len(names) - MOST_SHOWN} more" if len(names) > MOST_SHOWN else ""
    plural = "" if len(names) == 1 else "s"
    return f"and with it, {len(names)} value{plural}: {', '.join(names[:MOST_SHOWN])}{more}"


def _with_findings(verdict: Verdict, findings: list[Finding]) -> Verdict:
    return msgspec.structs.replace(verdict, findings=tuple(findings))


def _split(
    findings: list[Finding], wanted: Callable[[Finding], bool]
) -> tuple[list[Finding], list[Finding]]:
    chosen = [finding for finding in findings if wanted(finding)]
    return chosen, [finding for finding in findings if not wanted(finding)]


def _is_start(finding: Finding) -> bool:
    """Whether it says where wrong values of its graph come from."""
    return finding.origin is not None and finding.status is not Status.UNVERIFIED


def _is_wrong_value(finding: Finding) -> bool:
    wrong = finding.status in {Status.DIFFERENT, Status.DEGRADED}
    return wrong and finding.aspect is Aspect.VALUE


def _counts(verdict: Verdict) -> Iterator[RenderableType]:
    """How many items ended in which status, gravest first."""
    counts = [
        (status, sum(finding.status is status for finding in verdict.findings)) for status in Status
    ]
    told = [f"{count} {status.value}" for status, count in reversed(counts) if count]
    if told:
        yield Text(f"findings: {', '.join(told)}")
