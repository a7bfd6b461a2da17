"""Results for other programs: tables as CSV and Parquet, graphs for Model Explorer."""

from __future__ import annotations

import csv
import importlib.util
import math
import tempfile
from collections import defaultdict
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar, cast

import msgspec

from paritas.core.errors import UsageError
from paritas.core.reporting.files import replacing, write_whole
from paritas.core.reporting.graphs import (
    confirmation_words,
    graph_label,
    loss_gap,
    option_words,
    proof_words,
)
from paritas.core.reporting.result_pages import call_sources, group_calls
from paritas.core.results.comparisons import row_path
from paritas.core.results.findings import Status
from paritas.core.results.graph_reports import CallOutcome
from paritas.core.results.report import spell_nonfinite
from paritas.core.results.wording import MEANING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from paritas.core.reporting.result_pages import CallKey
    from paritas.core.results.comparisons import Comparison, ComparisonRow, SideFacts
    from paritas.core.results.graph_reports import GraphReport, OperatorResult, OptionResult
    from paritas.core.results.items import Metrics


# --- Tables: comparisons as CSV and Parquet, graphs as CSV ----------------------------------------
# Floats have all digits, `nan` and `inf` are spelled out, and unknown values are empty.

Cell = str | int | float | None

# Spreadsheets treat a text that starts with one of these as a formula.
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")


def csv_table(names: Sequence[str], lines: Iterable[Sequence[Cell]]) -> str:
    """The whole table, with a header line and no newline at the end.

    Texts are written unchanged: use `as_text` for those that a spreadsheet must not evaluate.
    """
    # The writer quotes texts that contain a character of the terminator, so it has both.
    table = _LineList()
    writer = csv.writer(table, lineterminator="\r\n")
    writer.writerow(names)
    writer.writerows(lines)
    return "\n".join(table)


class _LineList(list[str]):
    def write(self, line: str) -> None:
        """Take a line from the CSV writer."""
        self.append(line.removesuffix("\r\n"))


def as_text(text: str) -> str:
    """Put an apostrophe before a text that a spreadsheet would evaluate as a formula."""
    return f"'{text}" if text.startswith(_FORMULA) and not _is_number(text) else text


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


# --- The columns of a comparison ------------------------------------------------------------------

# The first columns are those of msit's table, with its names; `docs/comparing.md` lists differences
# in their definitions. All formats use these columns.

ColumnKind = Literal["count", "number", "text", "counts", "texts"]
CellValue = int | float | str | tuple[int, ...] | tuple[str, ...] | None
_T = TypeVar("_T")

# Rows that are converted to columns at a time: a compromise between speed and memory.
_STRETCH = 2048


class _Stretch:
    """Some rows, and attributes of theirs that many columns need."""

    def __init__(self, rows: Sequence[ComparisonRow], *, strict: bool) -> None:
        self.rows = rows
        self.strict = strict
        self.my: list[SideFacts | None] = [row.my for row in rows]
        self.golden: list[SideFacts | None] = [row.golden for row in rows]
        self.figures = [row.figures for row in rows]
        self.metrics: list[Metrics | None] = [
            None if found is None else found.metrics for found in self.figures
        ]


class Column(NamedTuple):
    """One column; `of` gives its values for some rows, None for an empty cell."""

    name: str
    kind: ColumnKind
    of: Callable[[_Stretch], Iterable[CellValue]]


def stretches(comparison: Comparison) -> Iterator[list[list[CellValue]]]:
    """The columns of some rows at a time, which is many times faster than row by row."""
    for start in range(0, len(comparison.rows), _STRETCH):
        rows = comparison.rows[start : start + _STRETCH]
        stretch = _Stretch(rows, strict=comparison.strict)
        yield [
            map_distinct(column.of(stretch), _clean_text)
            if column.kind in {"text", "texts"}
            else list(column.of(stretch))
            for column in COMPARISON_COLUMNS
        ]


def map_distinct(values: Iterable[CellValue], change: Callable[[CellValue], _T]) -> list[_T]:
    """Apply a function to a column, once for each distinct value: there are few."""
    column = list(values)
    known = {value: change(value) for value in set(column)}
    return [known[value] for value in column]


def _clean_text(value: CellValue) -> CellValue:
    """None for an empty text; escape what is not valid text, as in some file names."""
    if isinstance(value, str):
        return _escape_surrogates(value) or None
    if isinstance(value, tuple) and value and isinstance(value[0], str):
        return tuple(_escape_surrogates(item) for item in value if isinstance(item, str))
    return value


def _escape_surrogates(text: str) -> str:
    return text if text.isascii() else text.encode(errors="backslashreplace").decode()


# --- where the values come from -------------------------------------------------------------------


def _side_column(which: str, name: str, kind: ColumnKind, field: str = "") -> Column:
    get, sides = attrgetter(field or name), attrgetter(which)
    return Column(
        f"{which}_{name}",
        kind,
        lambda some: [None if side is None else get(side) for side in sides(some)],
    )


def _row_column(name: str, field: str = "", kind: ColumnKind = "text") -> Column:
    get = attrgetter(field or name)
    return Column(name, kind, lambda some: map(get, some.rows))


# Metrics that a quick pass computes too.
_QUICK = {"max_abs", "rel_l2"}


def _metric(field: str, *, same: float | None) -> Callable[[_Stretch], Iterable[CellValue]]:
    """A metric; `same` is its value for two sides with equal bits."""
    get = attrgetter(field)

    def of(some: _Stretch) -> Iterator[CellValue]:
        for figures, metrics in zip(some.figures, some.metrics, strict=True):
            if metrics is not None:
                yield get(metrics)
            elif figures is None:
                yield None
            elif field in _QUICK:
                yield get(figures)
            else:
                yield same if figures.identical else None

    return of


def _figure(field: str) -> Callable[[_Stretch], Iterable[CellValue]]:
    get = attrgetter(field)

    def of(some: _Stretch) -> Iterator[CellValue]:
        for figures in some.figures:
            found = None if figures is None else get(figures)
            yield 0.0 if found is None and figures is not None and figures.identical else found

    return of


def _diagnosis(some: _Stretch) -> Iterator[CellValue]:
    for row in some.rows:
        found = row.detail.diagnosis if row.detail else None
        yield found.sentence if found is not None else None


def _fail_reason(some: _Stretch) -> Iterator[CellValue]:
    """The reason of a failing row, never empty."""
    for row in some.rows:
        passes = row.status.passes(strict=some.strict)
        yield None if passes else row.reason or MEANING[row.status]


def _numel(some: _Stretch) -> Iterator[CellValue]:
    for golden, my in zip(some.golden, some.my, strict=True):
        side = golden or my
        yield None if side is None or side.shape is None else math.prod(side.shape)


def _excess(some: _Stretch) -> Iterator[CellValue]:
    return (None if row.score is None else row.score.excess for row in some.rows)


# --- the columns ----------------------------------------------------------------------------------

_MSIT_COLUMNS = (
    _row_column("token_id", "step", "count"),
    _row_column("data_id", "index", "count"),
    *(
        column
        for which in ("golden", "my")
        for column in (
            _side_column(which, "data_path", "text", "path"),
            _side_column(which, "op_type", "text", "op"),
            _side_column(which, "dtype", "text"),
            _side_column(which, "shape", "counts"),
            _side_column(which, "max_value", "number", "maximum"),
            _side_column(which, "min_value", "number", "minimum"),
            _side_column(which, "mean_value", "number", "mean"),
        )
    ),
    Column("cosine_similarity", "number", _metric("cosine", same=1.0)),
    Column("max_relative_error", "number", _metric("max_rel", same=0.0)),
    Column("mean_relative_error", "number", _figure("mean_rel")),
    Column("max_absolute_error", "number", _metric("max_abs", same=0.0)),
    Column("mean_absolute_error", "number", _metric("mean_abs", same=0.0)),
    Column("kl_divergence", "number", _figure("kl_divergence")),
    Column("relative_euclidean_distance", "number", _metric("rel_l2", same=0.0)),
    Column("cmp_fail_reason", "text", _fail_reason),
)

_OWN_COLUMNS = (
    _row_column("status", "status.value"),
    _row_column("aspect", "aspect.value"),
    _row_column("rank", kind="count"),
    *map(_row_column, ("name", "level", "phase", "side", "position")),
    *map(_row_column, ("matched_by", "judged_by", "limits")),
    Column("worst_over_allowed", "number", _excess),
    _row_column("own_error", "own", "number"),
    _row_column("inherited_error", "inherited", "number"),
    *map(_row_column, ("attributed", "made", "module")),
    _row_column("source_line", "line"),
    Column("nodes", "texts", lambda some: (row.nodes or None for row in some.rows)),
    _row_column("kernel"),
    Column("numel", "count", _numel),
    Column("mismatched", "count", _metric("mismatched", same=0)),
    Column("max_ulp", "number", _metric("max_ulp", same=0.0)),
    *(
        Column(f"{kind}_{which}", "count", _metric(f"{kind}_{side}", same=None))
        for kind in ("nan", "posinf", "neginf")
        for which, side in (("my", "candidate"), ("golden", "reference"))
    ),
    Column("nonfinite_mismatches", "count", _metric("nonfinite_mismatches", same=0)),
    _side_column("my", "id", "text"),
    _side_column("my", "step", "count"),
    _side_column("my", "value", "text"),
    _side_column("golden", "value", "text"),
    _side_column("my", "made_of", "text"),
    _side_column("golden", "made_of", "text"),
    _row_column("advice"),
    Column("diagnosis", "text", _diagnosis),
)

COMPARISON_COLUMNS: tuple[Column, ...] = (*_MSIT_COLUMNS, *_OWN_COLUMNS)


# --- A comparison as CSV --------------------------------------------------------------------------


def comparison_csv(comparison: Comparison) -> str:
    """The whole table, with a header line and no newline at the end."""
    return csv_table(
        [column.name for column in COMPARISON_COLUMNS], _comparison_csv_lines(comparison)
    )


def _comparison_csv_lines(comparison: Comparison) -> Iterator[tuple[Cell, ...]]:
    kinds = [column.kind for column in COMPARISON_COLUMNS]
    for columns in stretches(comparison):
        cells: list[list[Cell]] = [
            cast("list[Cell]", values)
            if kind in {"count", "number"}
            else map_distinct(values, _comparison_cell)
            for kind, values in zip(kinds, columns, strict=True)
        ]
        yield from zip(*cells, strict=True)


def _comparison_cell(value: CellValue) -> Cell:
    if isinstance(value, str):
        return as_text(value)
    if isinstance(value, tuple):
        if value and isinstance(value[0], str):
            return as_text("; ".join(map(str, value)))
        return str(list(value))
    return value


# --- A comparison as Parquet; needs the extra `table` ---------------------------------------------

_TYPES = {
    "count": "BIGINT",
    "number": "DOUBLE",
    "text": "VARCHAR",
    "counts": "BIGINT[]",
    "texts": "VARCHAR[]",
}


def check_installed() -> None:
    """Raise `UsageError` if duckdb is missing."""
    if importlib.util.find_spec("duckdb") is None:
        raise UsageError(
            "Parquet needs duckdb, which is not installed: pip install 'paritas[table]', or use "
            "comparison.csv, which has the same columns"
        )


def write_parquet(path: Path, comparison: Comparison) -> None:
    """Write the table atomically."""
    check_installed()
    with (
        replacing(path) as unfinished,
        tempfile.TemporaryDirectory(prefix="paritas-") as folder,
    ):
        # Through a file of JSON lines: one call per row takes a minute for 50,000 rows.
        records = Path(folder) / "rows.ndjson"
        with records.open("wb") as stream:
            stream.writelines(_records(comparison))
        _convert(records, unfinished)


def _records(comparison: Comparison) -> Iterator[bytes]:
    names = [column.name for column in COMPARISON_COLUMNS]
    encode = msgspec.json.Encoder().encode
    for columns in stretches(comparison):
        for line in zip(*columns, strict=True):
            yield encode(spell_nonfinite(dict(zip(names, line, strict=True)))) + b"\n"


def _convert(records: Path, target: Path) -> None:
    import duckdb

    types = {column.name: _TYPES[column.kind] for column in COMPARISON_COLUMNS}
    try:
        with duckdb.connect() as connection:
            # A text may be a whole message, so rows of any length are accepted.
            table = connection.read_json(
                str(records),
                columns=types,
                format="newline_delimited",
                maximum_object_size=max(1 << 24, records.stat().st_size),
            )
            table.write_parquet(str(target))
    except duckdb.IOException as error:
        raise UsageError(f"cannot write {str(target)!r}: {error}") from error


# --- The operators of a graph as CSV --------------------------------------------------------------

_OPERATOR_COLUMNS = (
    "graph",
    "node",
    "operator",
    "signature",
    "calls",
    "source",
    "code",
    "module",
    "outcome",
)
_SPLIT_COLUMNS = (
    "option",
    "rule",
    "origin",
    "ranks",
    "status",
    "confirmation",
    "proof",
    "loss_one_device",
    "loss_several_devices",
    "loss_relative_difference",
    "gradients",
)
_LAST_COLUMNS = ("reason", "seconds", "script", "other_nodes")
GRAPH_COLUMNS = (*_OPERATOR_COLUMNS, *_SPLIT_COLUMNS, *_LAST_COLUMNS)


def graph_csv(report: GraphReport) -> str:
    """The whole table of `GRAPH_COLUMNS` without a final newline; this run's graph comes first."""
    graphs = (report, *report.others)
    lines = (
        [graph_label(graph, graphs), *line]
        for graph in graphs
        for one in graph.operators
        for line in _operator_lines(one)
    )
    cells = (
        [as_text(_escape_surrogates(cell)) if isinstance(cell, str) else cell for cell in line]
        for line in lines
    )
    return csv_table(GRAPH_COLUMNS, cells)


def _operator_lines(one: OperatorResult) -> Iterator[list[Cell]]:
    first, *others = one.sites
    before: list[Cell] = [first.node, one.operator, one.signature, len(one.sites)]
    before += [first.source, first.code, first.module, one.outcome.value]
    nodes = " ".join(site.node for site in others)
    behind: list[Cell] = [one.script, nodes]
    if not one.options:
        yield [*before, *(None for _ in _SPLIT_COLUMNS), one.reason, one.seconds, *behind]
    for option in one.options:
        yield [*before, *_split_cells(option), option.reason, option.seconds, *behind]


def _split_cells(option: OptionResult) -> list[Cell]:
    return [
        option_words(option),
        option.rule,
        option.origin,
        option.ranks,
        option.status.value,
        confirmation_words(option),
        proof_words(option),
        option.loss_whole,
        option.loss_split,
        loss_gap(option),
        option.gradients,
    ]


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
# Replaces NaN and infinity, which JSON cannot express; it is above every limit.
_BEYOND = 1e300

Json = dict[str, Any]


def write_comparison(path: Path, comparison: Comparison) -> list[Path]:
    """Write the graph to `path`, and beside it data to colour its nodes."""
    parts = {
        path: comparison_graphs(comparison),
        path.with_name(f"{path.stem}.status.json"): status_data(comparison),
        path.with_name(f"{path.stem}.errors.json"): error_data(comparison),
    }
    for place, content in parts.items():
        write_whole(place, msgspec.json.encode(content))
    return list(parts)


def write_graph_report(path: Path, report: GraphReport) -> None:
    """Write data to colour the nodes of a checked graph."""
    write_whole(path, msgspec.json.encode(graph_report_data(report)))


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
    found: Json = {}
    for graph, calls in _calls(comparison).items():
        results = {}
        for call, rows in calls.items():
            ratios = [row.score.excess for row in rows if row.score is not None]
            if ratios:
                worst = _BEYOND if any(map(math.isnan, ratios)) else max(ratios)
                results[call] = {"value": min(worst, _BEYOND)}
        found[graph] = {
            "name": "paritas: error / allowed",
            "results": results,
            "thresholds": [
                {"value": 1.0, "bgColor": COLOURS[Status.EQUIVALENT]},
                {"value": _BEYOND, "bgColor": COLOURS[Status.DIFFERENT]},
            ],
        }
    return found


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


def _calls(comparison: Comparison) -> dict[str, dict[str, list[ComparisonRow]]]:
    """Graph -> call -> its rows, in the order of the program."""
    found: defaultdict[str, dict[str, list[ComparisonRow]]] = defaultdict(dict)
    for call, rows in group_calls(comparison.rows).items():
        found[_graph_id(call)][call[2]] = rows
    return found


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
            {"sourceNodeId": source[2], "sourceNodeOutputId": "0", "targetNodeInputId": str(place)}
            for place, source in enumerate(sources)
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


def _outcome_words(operator: OperatorResult) -> str:
    """Short and without figures: Model Explorer counts equal values."""
    failed = operator.failures
    return f"{operator.outcome}: {failed[0].split}" if failed else str(operator.outcome)


def _gravest(rows: Sequence[ComparisonRow]) -> Status:
    return max((row.status for row in rows), key=lambda status: status.gravity)


def _graph_id(call: CallKey) -> str:
    step, rank, _ = call
    return f"step {step}, all ranks" if rank is None else f"step {step}, rank {rank}"


def _pairs(attributes: dict[str, str]) -> list[Json]:
    return [{"key": key, "value": value} for key, value in attributes.items() if value]
