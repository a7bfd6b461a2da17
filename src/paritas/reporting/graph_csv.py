"""The operators of a graph as CSV: a line for every split, and one for each operator without any.

Floats have all their digits, `nan` and `inf` are spelled out, and what is not known is empty.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paritas.reporting.csv_lines import as_text, csv_table
from paritas.reporting.graph_words import (
    confirmation_words,
    graph_label,
    loss_gap,
    option_words,
)
from paritas.reporting.json_file import write_whole

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from paritas.numerics.graph_reports import GraphReport, OperatorResult, OptionResult
    from paritas.reporting.csv_lines import Cell

__all__ = ["COLUMNS", "csv_text", "write_csv"]

_BEFORE = ("graph", "node", "operator", "signature", "calls", "source", "code", "module", "outcome")
_SPLIT = (
    "option",
    "rule",
    "origin",
    "ranks",
    "status",
    "confirmation",
    "loss_one_device",
    "loss_several_devices",
    "loss_relative_difference",
    "gradients",
)
_BEHIND = ("reason", "seconds", "script", "other_nodes")
COLUMNS = (*_BEFORE, *_SPLIT, *_BEHIND)


def write_csv(report: GraphReport, path: Path) -> None:
    """Write the table to a file, whole or not at all."""
    write_whole(path, csv_text(report).encode())


def csv_text(report: GraphReport) -> str:
    """The whole table, by `COLUMNS`, without a newline at the end; this run's graph comes first."""
    graphs = (report, *report.others)
    lines = (
        [graph_label(graph, graphs), *line]
        for graph in graphs
        for one in graph.operators
        for line in _lines(one)
    )
    return csv_table(COLUMNS, ([_cell(value) for value in line] for line in lines))


def _lines(one: OperatorResult) -> Iterator[list[Cell]]:
    first, *others = one.sites
    before: list[Cell] = [first.node, one.operator, one.signature, len(one.sites)]
    before += [first.source, first.code, first.module, one.outcome.value]
    nodes = " ".join(site.node for site in others)
    behind: list[Cell] = [one.script, nodes]
    if not one.options:
        yield [*before, *(None for _ in _SPLIT), one.reason, one.seconds, *behind]
    for option in one.options:
        yield [*before, *_split(option), option.reason, option.seconds, *behind]


def _split(option: OptionResult) -> list[Cell]:
    return [
        option_words(option),
        option.rule,
        option.origin,
        option.ranks,
        option.status.value,
        confirmation_words(option),
        option.loss_whole,
        option.loss_split,
        loss_gap(option),
        option.gradients,
    ]


def _cell(value: Cell) -> Cell:
    if not isinstance(value, str):
        return value
    # A name out of a file may be no text at all: it is spelled out rather than lost.
    return as_text(value.encode(errors="backslashreplace").decode())
