"""A comparison for Model Explorer: a graph of calls with edges for the data flow."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import msgspec

from paritas.comparison.page import call_sources, group_calls
from paritas.comparison.rows import row_path
from paritas.core.reporting.files import write_whole
from paritas.core.reporting.tables import COLOURS
from paritas.core.results.findings import Status

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from paritas.comparison.page import CallKey
    from paritas.comparison.rows import Comparison, ComparisonRow, SideFacts

Json = dict[str, Any]

# Replaces NaN and infinity, which JSON cannot express; it is above every limit.
_BEYOND = 1e300


def write_comparison(path: Path, comparison: Comparison) -> list[Path]:
    """Write the graph to `path`, and beside it data to colour its nodes."""
    parts = {
        path: comparison_graphs(comparison),
        path.with_name(f"{path.stem}.status.json"): status_data(comparison),
        path.with_name(f"{path.stem}.errors.json"): error_data(comparison),
    }
    for file_path, content in parts.items():
        write_whole(file_path, msgspec.json.encode(content))
    return list(parts)


def comparison_graphs(comparison: Comparison) -> Json:
    """A collection of graphs, one for each step and rank."""
    first = None if comparison.first is None else comparison.first.row
    calls = group_calls(comparison.rows)
    graphs: defaultdict[str, list[Json]] = defaultdict(list)
    for call, sources in call_sources(calls).items():
        graphs[_graph_id(call)].append(_node(call, calls[call], sources, first))
    return {
        "label": f"{comparison.my.path} against {comparison.golden.path}",
        "graphs": [{"id": graph, "nodes": nodes} for graph, nodes in graphs.items()],
    }


def status_data(comparison: Comparison) -> Json:
    """The gravest status of each call."""
    return {
        graph: {
            "name": "paritas: status",
            "results": {
                call: {"value": _gravest(rows), "bgColor": COLOURS[_gravest(rows)]}
                for call, rows in calls.items()
            },
            "showExpandedSummaryOnGroupNode": True,
        }
        for graph, calls in _calls(comparison).items()
    }


def error_data(comparison: Comparison) -> Json:
    """The worst error of each call, divided by the allowed error, if it was measured."""
    json: Json = {}
    for graph, calls in _calls(comparison).items():
        results = {}
        for call, rows in calls.items():
            ratios = [row.score.excess for row in rows if row.score is not None]
            if ratios:
                worst = _BEYOND if any(map(math.isnan, ratios)) else max(ratios)
                results[call] = {"value": min(worst, _BEYOND)}
        json[graph] = {
            "name": "paritas: error / allowed",
            "results": results,
            "thresholds": [
                {"value": 1.0, "bgColor": COLOURS[Status.EQUIVALENT]},
                {"value": _BEYOND, "bgColor": COLOURS[Status.DIFFERENT]},
            ],
        }
    return json


def _calls(comparison: Comparison) -> dict[str, dict[str, list[ComparisonRow]]]:
    """Graph -> call -> its rows, in the order of the program."""
    graph_calls: defaultdict[str, dict[str, list[ComparisonRow]]] = defaultdict(dict)
    for call, rows in group_calls(comparison.rows).items():
        graph_calls[_graph_id(call)][call[2]] = rows
    return graph_calls


def _node(
    call: CallKey, rows: Sequence[ComparisonRow], sources: list[CallKey], first: int | None
) -> Json:
    shown = next((row for row in rows if row.side == "output"), rows[0])
    status = _gravest(rows)
    worst = max(rows, key=lambda row: row.status.gravity)
    attributes = {
        "status": status,
        "first divergence": "yes" if any(row.index == first for row in rows) else "",
        "value": row_path(worst),
        "reason": worst.reason,
        "advice": worst.advice,
        "judged by": worst.judged_by,
        "difference made": worst.made,
        "module": shown.module,
        "source": shown.line,
        "code": shown.code,
        "kernel": shown.kernel,
        "nodes": ", ".join(shown.nodes),
    }
    return {
        "id": call[2],
        "label": shown.op or shown.name.rpartition(".")[2] or call[2],
        "namespace": shown.module.replace(".", "/"),
        "attrs": _pairs(attributes),
        "incomingEdges": [
            {
                "sourceNodeId": source[2],
                "sourceNodeOutputId": "0",
                "targetNodeInputId": str(input_index),
            }
            for input_index, source in enumerate(sources)
        ],
        "outputsMetadata": [_metadata(row) for row in rows if row.side == "output"],
        "style": {"backgroundColor": COLOURS[status]},
    }


def _metadata(row: ComparisonRow) -> Json:
    attributes = {
        "name": row.name,
        "status": row.status,
        "mine": _tensor_words(row.my),
        "golden": _tensor_words(row.golden),
        "relative error": "" if row.rel_l2 is None else f"{row.rel_l2:.3g}",
        "error / allowed": "" if row.score is None else f"{row.score.excess:.3g}",
    }
    return {"id": row.position, "attrs": _pairs(attributes)}


def _tensor_words(side: SideFacts | None) -> str:
    if side is None:
        return "missing"
    if side.shape is None:
        return side.value or ""
    return f"{side.dtype}[{', '.join(map(str, side.shape))}]"


def _gravest(rows: Sequence[ComparisonRow]) -> Status:
    return max((row.status for row in rows), key=lambda status: status.gravity)


def _graph_id(call: CallKey) -> str:
    step, rank, _ = call
    return f"step {step}, all ranks" if rank is None else f"step {step}, rank {rank}"


def _pairs(attributes: dict[str, str]) -> list[Json]:
    return [{"key": key, "value": value} for key, value in attributes.items() if value]
