"""Results for other programs: tables as CSV and Parquet, graphs for Model Explorer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from paritas.core.reporting.files import write_whole
from paritas.core.reporting.graphs import (
    confirmation_words,
    graph_label,
    loss_gap,
    option_words,
    proof_words,
)
from paritas.core.reporting.table_files import csv_table
from paritas.core.reporting.tables import Column
from paritas.core.results.findings import Status
from paritas.core.results.graph_reports import CallOutcome

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from paritas.core.reporting.tables import CellValue, ColumnKind
    from paritas.core.results.graph_reports import GraphReport, OperatorResult, OptionResult


# The first columns are those of msit's table, with its names; `docs/comparing.md` lists differences
# in their definitions. All formats use these columns.


# --- Model Explorer: graphs, and data to colour their nodes ---------------------------------------
# A comparison becomes a graph of calls, with edges for the data flow. Model Explorer opens a
# checked `.pt2` itself: for that only node data is written, by the names of the nodes.

COLOURS = {
    Status.IDENTICAL: "#dbe7df",
    Status.EQUIVALENT: "#b9e4cb",
    Status.UNSTABLE: "#f5dd9d",
    Status.UNVERIFIED: "#d6c8f5",
    Status.DEGRADED: "#f8c19c",
    Status.DIFFERENT: "#f7a8ad",
}
_OUTCOMES = {
    CallOutcome.VERIFIED: COLOURS[Status.EQUIVALENT],
    CallOutcome.NOTHING: COLOURS[Status.IDENTICAL],
    CallOutcome.UNSUPPORTED: COLOURS[Status.UNVERIFIED],
    CallOutcome.FAILED: COLOURS[Status.DIFFERENT],
}
# Model Explorer's name for the graph of a .pt2.
_EXPORTED = "graph"

Json = dict[str, Any]


def write_graph_report(path: Path, report: GraphReport) -> None:
    """Write data to colour the nodes of a checked graph."""
    write_whole(path, msgspec.json.encode(graph_report_data(report)))


def graph_report_data(report: GraphReport) -> Json:
    """The outcome of each call of a checked graph, for the nodes of its `.pt2`."""
    results = {
        site.node: {"value": _outcome_words(operator), "bgColor": _OUTCOMES[operator.outcome]}
        for operator in report.operators
        for site in operator.sites
    }
    return {
        _EXPORTED: {
            "name": "paritas: operators",
            "results": results,
            "showExpandedSummaryOnGroupNode": True,
        }
    }


def _outcome_words(operator: OperatorResult) -> str:
    """Short and without figures: Model Explorer counts equal values."""
    failed = operator.failures
    return f"{operator.outcome}: {failed[0].split}" if failed else str(operator.outcome)


# --- The operators of a graph as CSV --------------------------------------------------------------


class SplitLine(NamedTuple):
    """A split of an operator, or an operator without splits."""

    graph: str
    operator: OperatorResult
    option: OptionResult | None


def graph_csv(report: GraphReport) -> str:
    """The whole table of `GRAPH_COLUMNS` without a final newline; this run's graph comes first."""
    graphs = (report, *report.others)
    lines = [
        SplitLine(graph_label(graph, graphs), operator, option)
        for graph in graphs
        for operator in graph.operators
        for option in operator.options or (None,)
    ]
    return csv_table(GRAPH_COLUMNS, lines)


def _operator_column(
    name: str, cell: Callable[[OperatorResult], CellValue], kind: ColumnKind = "text"
) -> Column[SplitLine]:
    return Column(name, lambda line: cell(line.operator), kind)


def _option_column(
    name: str, cell: Callable[[OptionResult], CellValue], kind: ColumnKind = "text"
) -> Column[SplitLine]:
    return Column(name, lambda line: None if line.option is None else cell(line.option), kind)


GRAPH_COLUMNS: tuple[Column[SplitLine], ...] = (
    Column("graph", lambda line: line.graph),
    _operator_column("node", lambda operator: operator.sites[0].node),
    _operator_column("operator", lambda operator: operator.operator),
    _operator_column("signature", lambda operator: operator.signature),
    _operator_column("calls", lambda operator: len(operator.sites), "count"),
    _operator_column("source", lambda operator: operator.sites[0].source),
    _operator_column("code", lambda operator: operator.sites[0].code),
    _operator_column("module", lambda operator: operator.sites[0].module),
    _operator_column("outcome", lambda operator: operator.outcome.value),
    _option_column("option", option_words),
    _option_column("rule", lambda option: option.rule),
    _option_column("origin", lambda option: option.origin),
    _option_column("ranks", lambda option: option.ranks, "count"),
    _option_column("status", lambda option: option.status.value),
    _option_column("confirmation", confirmation_words),
    _option_column("proof", proof_words),
    _option_column("loss_one_device", lambda option: option.loss_whole, "number"),
    _option_column("loss_several_devices", lambda option: option.loss_split, "number"),
    _option_column("loss_relative_difference", loss_gap, "number"),
    _option_column("gradients", lambda option: option.gradients),
    Column("reason", lambda line: (line.option or line.operator).reason),
    Column("seconds", lambda line: (line.option or line.operator).seconds, "number"),
    _operator_column("script", lambda operator: operator.script),
    _operator_column("other_nodes", lambda operator: " ".join(s.node for s in operator.sites[1:])),
)
