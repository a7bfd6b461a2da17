"""Tables of results for other programs: comparisons as CSV and Parquet, graphs as CSV.

Floats have all their digits, `nan` and `inf` are spelled out, and what is not known is empty.
"""

from __future__ import annotations

import csv
import importlib.util
import math
import tempfile
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeVar, cast

import msgspec

from paritas.errors import UsageError
from paritas.reports.files import replacing, write_whole
from paritas.reports.graphs import confirmation_words, graph_label, loss_gap, option_words
from paritas.results.report import spell_nonfinite
from paritas.results.wording import MEANING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paritas.results.comparisons import Comparison, ComparisonRow, SideFacts
    from paritas.results.figures import Metrics
    from paritas.results.graph_reports import GraphReport, OperatorResult, OptionResult

Cell = str | int | float | None

# With these a spreadsheet takes what follows for a formula, and would compute it.
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")


def csv_table(names: Sequence[str], lines: Iterable[Sequence[Cell]]) -> str:
    """The whole table, with a line of names on top and no newline at the end.

    Texts are taken as they are: `as_text` keeps those of others from being computed.
    """
    # Quoted is what holds a character of the line's end, so both are among these.
    table = _LineList()
    writer = csv.writer(table, lineterminator="\r\n")
    writer.writerow(names)
    writer.writerows(lines)
    return "\n".join(table)


class _LineList(list[str]):
    def write(self, line: str) -> None:
        """Take a whole line of the writer's."""
        self.append(line.removesuffix("\r\n"))


def as_text(text: str) -> str:
    """A name out of a file is anybody's: an apostrophe in front keeps it from being computed."""
    return f"'{text}" if text.startswith(_FORMULA) and not _is_number(text) else text


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


# --- The columns of a comparison ------------------------------------------------------------------

# The first ones are those of msit's table, by its names; `docs/comparing.md` says where a
# definition differs. Whoever writes a table, in whatever format, takes it from here.

ColumnKind = Literal["count", "number", "text", "counts", "texts"]
CellValue = int | float | str | tuple[int, ...] | tuple[str, ...] | None
_T = TypeVar("_T")

# So many rows are turned into columns at a time: enough to be fast, few enough to be held twice.
_STRETCH = 2048


class _Stretch:
    """Some rows, and what many columns read of them, looked up once."""

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
    """One column.

    Attributes:
        kind: whole numbers, floats, text, or several of these.
        of: what each of some rows has in it; None where there is nothing.
    """

    name: str
    kind: ColumnKind
    of: Callable[[_Stretch], Iterable[CellValue]]

    @property
    def is_text(self) -> bool:
        """Whether what it has is told in words."""
        return self.kind in {"text", "texts"}


def comparison_lines(comparison: Comparison) -> Iterator[tuple[CellValue, ...]]:
    """A line for every row, by `COLUMNS`."""
    for columns in stretches(comparison):
        yield from zip(*columns, strict=True)


def stretches(comparison: Comparison) -> Iterator[list[list[CellValue]]]:
    """The same by columns, which is many times as fast: some rows at a time."""
    for start in range(0, len(comparison.rows), _STRETCH):
        rows = comparison.rows[start : start + _STRETCH]
        stretch = _Stretch(rows, strict=comparison.strict)
        yield [
            map_distinct(column.of(stretch), _clean_text)
            if column.is_text
            else list(column.of(stretch))
            for column in COMPARISON_COLUMNS
        ]


def map_distinct(values: Iterable[CellValue], change: Callable[[CellValue], _T]) -> list[_T]:
    """A column with each of its values changed: few of them differ, so each is changed once."""
    column = list(values)
    known = {value: change(value) for value in set(column)}
    return [known[value] for value in column]


def _clean_text(value: CellValue) -> CellValue:
    """Nothing for an empty text; a name that is no text, as a file's may be, is spelled out."""
    if isinstance(value, str):
        return _spell_out(value) or None
    if isinstance(value, tuple) and value and isinstance(value[0], str):
        return tuple(_spell_out(item) for item in value if isinstance(item, str))
    return value


def _spell_out(text: str) -> str:
    return text if text.isascii() else text.encode(errors="backslashreplace").decode()


# --- where the values come from -------------------------------------------------------------------


def _golden_field(field: str) -> Callable[[_Stretch], Iterable[CellValue]]:
    get = attrgetter(field)
    return lambda some: [None if side is None else get(side) for side in some.golden]


def _my_field(field: str) -> Callable[[_Stretch], Iterable[CellValue]]:
    get = attrgetter(field)
    return lambda some: [None if side is None else get(side) for side in some.my]


def _row_field(field: str) -> Callable[[_Stretch], Iterable[CellValue]]:
    get = attrgetter(field)
    return lambda some: map(get, some.rows)


# What a cheap pass tells as well.
_QUICK = {"max_abs", "rel_l2"}


def _metric(field: str, *, same: float | None) -> Callable[[_Stretch], Iterable[CellValue]]:
    """A metric; `same` is what it is between two sides whose bits are the same."""
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
    """Never empty for a row that fails, whatever was left unsaid."""
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
    Column("token_id", "count", _row_field("step")),
    Column("data_id", "count", _row_field("index")),
    Column("golden_data_path", "text", _golden_field("path")),
    Column("golden_op_type", "text", _golden_field("op")),
    Column("golden_dtype", "text", _golden_field("dtype")),
    Column("golden_shape", "counts", _golden_field("shape")),
    Column("golden_max_value", "number", _golden_field("maximum")),
    Column("golden_min_value", "number", _golden_field("minimum")),
    Column("golden_mean_value", "number", _golden_field("mean")),
    Column("my_data_path", "text", _my_field("path")),
    Column("my_op_type", "text", _my_field("op")),
    Column("my_dtype", "text", _my_field("dtype")),
    Column("my_shape", "counts", _my_field("shape")),
    Column("my_max_value", "number", _my_field("maximum")),
    Column("my_min_value", "number", _my_field("minimum")),
    Column("my_mean_value", "number", _my_field("mean")),
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
    Column("status", "text", _row_field("status.value")),
    Column("aspect", "text", _row_field("aspect.value")),
    Column("rank", "count", _row_field("rank")),
    Column("name", "text", _row_field("name")),
    Column("level", "text", _row_field("level")),
    Column("phase", "text", _row_field("phase")),
    Column("side", "text", _row_field("side")),
    Column("position", "text", _row_field("position")),
    Column("matched_by", "text", _row_field("matched_by")),
    Column("judged_by", "text", _row_field("judged_by")),
    Column("limits", "text", _row_field("limits")),
    Column("worst_over_allowed", "number", _excess),
    Column("own_error", "number", _row_field("own")),
    Column("inherited_error", "number", _row_field("inherited")),
    Column("attributed", "text", _row_field("attributed")),
    Column("made", "text", _row_field("made")),
    Column("module", "text", _row_field("module")),
    Column("source_line", "text", _row_field("line")),
    Column("nodes", "texts", lambda some: (row.nodes or None for row in some.rows)),
    Column("kernel", "text", _row_field("kernel")),
    Column("numel", "count", _numel),
    Column("mismatched", "count", _metric("mismatched", same=0)),
    Column("max_ulp", "number", _metric("max_ulp", same=0.0)),
    Column("nan_my", "count", _metric("nan_candidate", same=None)),
    Column("nan_golden", "count", _metric("nan_reference", same=None)),
    Column("posinf_my", "count", _metric("posinf_candidate", same=None)),
    Column("posinf_golden", "count", _metric("posinf_reference", same=None)),
    Column("neginf_my", "count", _metric("neginf_candidate", same=None)),
    Column("neginf_golden", "count", _metric("neginf_reference", same=None)),
    Column("nonfinite_mismatches", "count", _metric("nonfinite_mismatches", same=0)),
    Column("my_id", "text", _my_field("id")),
    Column("my_step", "count", _my_field("step")),
    Column("my_value", "text", _my_field("value")),
    Column("golden_value", "text", _golden_field("value")),
    Column("my_made_of", "text", _my_field("made_of")),
    Column("golden_made_of", "text", _golden_field("made_of")),
    Column("advice", "text", _row_field("advice")),
    Column("diagnosis", "text", _diagnosis),
)

COMPARISON_COLUMNS: tuple[Column, ...] = (*_MSIT_COLUMNS, *_OWN_COLUMNS)


# --- A comparison as CSV --------------------------------------------------------------------------

# Floats have all their digits, `nan` and `inf` are spelled out, and what is not known is empty.

# What is a number goes as it is.
_CONVERTED_KINDS = {"text", "texts", "counts"}


def comparison_csv(comparison: Comparison) -> str:
    """The whole table, with a line of names on top and no newline at the end."""
    return csv_table(
        [column.name for column in COMPARISON_COLUMNS], _comparison_csv_lines(comparison)
    )


def _comparison_csv_lines(comparison: Comparison) -> Iterator[tuple[Cell, ...]]:
    kinds = [column.kind for column in COMPARISON_COLUMNS]
    for columns in stretches(comparison):
        cells: list[list[Cell]] = [
            map_distinct(values, _comparison_cell)
            if kind in _CONVERTED_KINDS
            else cast("list[Cell]", values)
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
    """Raise `UsageError` where what writes Parquet is missing."""
    if importlib.util.find_spec("duckdb") is None:
        raise UsageError(
            "Parquet is written by duckdb, which is not installed: pip install 'paritas[table]', "
            "or do without it: comparison.csv has the same columns"
        )


def write_parquet(path: Path, comparison: Comparison) -> None:
    """Write the table; a reader never sees half of it."""
    check_installed()
    with (
        replacing(path) as unfinished,
        tempfile.TemporaryDirectory(prefix="paritas-") as folder,
    ):
        # Through a file of JSON lines: a call for each row would take a minute for 50,000.
        records = Path(folder) / "rows.ndjson"
        with records.open("wb") as stream:
            stream.writelines(_records(comparison))
        _convert(records, unfinished)


def _records(comparison: Comparison) -> list[bytes]:
    names = [column.name for column in COMPARISON_COLUMNS]
    encode = msgspec.json.Encoder().encode
    return [
        encode(spell_nonfinite(dict(zip(names, line, strict=True)))) + b"\n"
        for line in comparison_lines(comparison)
    ]


def _convert(records: Path, target: Path) -> None:
    import duckdb

    types = {column.name: _TYPES[column.kind] for column in COMPARISON_COLUMNS}
    try:
        with duckdb.connect() as connection:
            # One text may be a whole message, so no row is refused for its length.
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

# Floats have all their digits, `nan` and `inf` are spelled out, and what is not known is empty.

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
    "loss_one_device",
    "loss_several_devices",
    "loss_relative_difference",
    "gradients",
)
_LAST_COLUMNS = ("reason", "seconds", "script", "other_nodes")
GRAPH_COLUMNS = (*_OPERATOR_COLUMNS, *_SPLIT_COLUMNS, *_LAST_COLUMNS)


def write_graph_csv(report: GraphReport, path: Path) -> None:
    """Write the table to a file, whole or not at all."""
    write_whole(path, graph_csv(report).encode())


def graph_csv(report: GraphReport) -> str:
    """The whole table, by `COLUMNS`, without a newline at the end; this run's graph comes first."""
    graphs = (report, *report.others)
    lines = (
        [graph_label(graph, graphs), *line]
        for graph in graphs
        for one in graph.operators
        for line in _operator_lines(one)
    )
    return csv_table(GRAPH_COLUMNS, ([_graph_cell(value) for value in line] for line in lines))


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
        option.loss_whole,
        option.loss_split,
        loss_gap(option),
        option.gradients,
    ]


def _graph_cell(value: Cell) -> Cell:
    if not isinstance(value, str):
        return value
    # A name out of a file may be no text at all: it is spelled out rather than lost.
    return as_text(value.encode(errors="backslashreplace").decode())
