"""The columns of a comparison: what files, the page, a notebook and a terminal have of a row.

In files, the first columns are those of msit's table, with its names; `docs/comparing.md` lists
differences in their definitions.
"""

from __future__ import annotations

import dataclasses
import math
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from paritas.comparison.rows import finding_of
from paritas.core.reporting.pages import DIGITS, figure, number_column, text_column
from paritas.core.reporting.table_files import csv_table, write_parquet
from paritas.core.reporting.tables import STATUS_MARKS, Column
from paritas.core.reporting.terminal import FINDING_COLUMNS
from paritas.core.results.items import Metrics
from paritas.core.results.wording import MEANING, ranges

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from paritas.comparison.rows import Comparison, ComparisonRow, SideFacts
    from paritas.core.reporting.tables import ColumnKind


def comparison_csv(comparison: Comparison) -> str:
    """The whole table, with a header line and no newline at the end."""
    return csv_table(comparison_columns(strict=comparison.strict), comparison.rows)


def write_comparison_parquet(path: Path, comparison: Comparison) -> None:
    """Write the table atomically."""
    write_parquet(path, comparison_columns(strict=comparison.strict), comparison.rows)


def comparison_columns(*, strict: bool = False) -> tuple[Column[ComparisonRow], ...]:
    """The columns of files; strict: an unstable row has a reason why it fails."""

    def fail_reason(row: ComparisonRow) -> str | None:
        """The reason of a failing row, never empty."""
        return None if row.status.passes(strict=strict) else row.reason or MEANING[row.status]

    return (*_MSIT_COLUMNS, Column("cmp_fail_reason", fail_reason), *_OWN_COLUMNS)


def page_data(rows: tuple[ComparisonRow, ...]) -> dict[str, Any]:
    """The cells of all rows for the page's scripts, and what columns its table has."""
    texts, numbers = {}, {}
    for column in _ALL_COLUMNS:
        if column.digits is not None:
            numbers[column.key] = number_column(map(column.on_page, rows), column.digits)
        elif column.key:
            texts[column.key] = text_column(map(column.on_page, rows))
    table = [
        {"key": key, **heading._asdict()}
        for key, heading in _TABLE.items()
        if heading.look != "run" or len(set(map(_BY_KEY[key].on_page, rows))) > 1
    ]
    return {"table": table, "texts": texts, "numbers": numbers}


def notebook_column(key: str) -> Column[ComparisonRow]:
    """A column of the page, for a notebook."""
    column = _BY_KEY[key]
    show = str if column.digits is None else small_figure
    return Column(_TABLE[key].title if key in _TABLE else key, column.on_page, column.kind, show)


def terminal_columns(shorten: Callable[[ComparisonRow], str]) -> list[Column[ComparisonRow]]:
    """The columns of a terminal's table, which has shorter names."""

    def item(row: ComparisonRow) -> str:
        return "\n".join(filter(None, (shorten(row), str(_VALUE_WORDS(row)))))

    return [
        Column(
            title,
            item if key == "name" else column.cell,
            show=_tiny_figure if column.kind == "number" else str,
            is_fixed=key != "name",
            is_optional=True,
        )
        for key, title in _TERMINAL.items()
        for column in (_BY_KEY[key],)
    ]


def _tiny_figure(value: float) -> str:
    return f"{value:.1e}" if value else "0"


def small_figure(value: float | None) -> str:
    """A number in scientific notation: columns of these are read by magnitude."""
    return "" if value is None else figure(value) if not value else f"{value:.2e}"


# Instead of a rank, for values that were assembled from several.
JOINED = "joined"


class Heading(NamedTuple):
    """How a column looks in the page's table.

    Attributes:
        width: in pixels.
        look: of the cells. `name`; `run`, left out if all rows are of one; `text`; `exponential`
            or `figure` for numbers.
        meaning: the tooltip.
    """

    title: str
    width: int
    look: Literal["name", "run", "text", "exponential", "figure"] = "text"
    meaning: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowColumn(Column["ComparisonRow"]):
    """A column in each format that has it.

    Attributes:
        name: in files; empty if they do not have it.
        cell: the value in files.
        key: in the data of the page; empty if it does not have it.
        page_cell: the text or number there, if it is not that of files.
        digits: of a number there; None for a text.
    """

    name: str = ""
    key: str = ""
    page_cell: Callable[[ComparisonRow], Any] | None = None
    digits: int | None = None

    @property
    def on_page(self) -> Callable[[ComparisonRow], Any]:
        """Reads the text or number of the page."""
        return self.page_cell or self.cell


# --- Where the values come from -------------------------------------------------------------------


def _row_column(name: str, field: str = "", kind: ColumnKind = "text", **page: Any) -> RowColumn:
    return RowColumn(name=name, cell=attrgetter(field or name), kind=kind, **page)


def _text_column(field: str, name: str | None = None) -> RowColumn:
    """A text of the row, with one name everywhere unless files have another one."""
    key, _, _ = field.partition(".")
    return _row_column(key if name is None else name, field, key=key)


_SIDE_TEXTS: dict[str, Callable[[SideFacts, ComparisonRow], str]] = {
    "path": lambda side, _: side.path,
    "id": lambda side, row: "" if side.id == row.name else side.id,
    "op": lambda side, row: "" if side.op == row.op else side.op,
    "dtype": lambda side, _: side.dtype,
    "shape": lambda side, _: "" if side.shape is None else _index_words(side.shape),
    "value": lambda side, _: side.value or "",
    "step": lambda side, _: str(side.step),
    "ranks": lambda side, _: ranges(side.ranks),
    "made_of": lambda side, _: side.made_of,
}


def _side_column(which: str, field: str, name: str = "", kind: ColumnKind = "text") -> RowColumn:
    get_side, get_text = attrgetter(which), _SIDE_TEXTS[field]

    def text(row: ComparisonRow) -> str:
        side = get_side(row)
        return "" if side is None else get_text(side, row)

    name = name and f"{which}_{name}"
    cell = _side_getter(which, field)
    return RowColumn(name=name, cell=cell, kind=kind, key=f"{which}_{field}", page_cell=text)


def _side_getter(which: str, field: str) -> Callable[[ComparisonRow], Any]:
    get_side, get = attrgetter(which), attrgetter(field)

    def cell(row: ComparisonRow) -> Any:
        side = get_side(row)
        return None if side is None else get(side)

    return cell


def _extreme_column(which: str, name: str, field: str) -> RowColumn:
    stored = _side_getter(which, field)
    get_measured = attrgetter(f"{'candidate' if which == 'my' else 'reference'}.{field}")

    def stored_or_measured(row: ComparisonRow) -> float | None:
        value: float | None = stored(row)
        return get_measured(row.figures) if value is None and row.figures is not None else value

    return RowColumn(
        name=f"{which}_{name}",
        cell=stored,
        kind="number",
        key=f"{which}_{field}",
        page_cell=stored_or_measured,
        digits=DIGITS,
    )


def _both_sides(field: str) -> RowColumn:
    """Mine and golden, as one where they agree."""
    get_mine, get_golden = (_side_column(which, field).on_page for which in ("my", "golden"))

    def words(row: ComparisonRow) -> str:
        mine, golden = get_mine(row), get_golden(row)
        return mine if mine == golden else " / ".join(filter(None, (mine, golden)))

    return RowColumn(cell=words, key=field)


def _presence_column(which: str) -> RowColumn:
    get_side = attrgetter(which)
    return RowColumn(cell=lambda row: "yes" if get_side(row) else "", key=f"{which}_there")


# Only their distance from 1 matters: four digits would round 0.99996 to 1.
_NEAR_ONE = {"cosine": 10, "pcc": 10}


def _metric_column(
    name: str, field: str, same: float | None = None, kind: ColumnKind = "number"
) -> RowColumn:
    """A metric; `same` is its value in files for two sides with equal bits."""
    get: Callable[[Any], float | None] = attrgetter(field)

    def read_metric(row: ComparisonRow) -> float | None:
        figures = row.figures
        return None if figures is None or figures.metrics is None else get(figures.metrics)

    def cell(row: ComparisonRow) -> float | None:
        figures = row.figures
        if figures is None:
            return None
        if figures.metrics is not None:
            return get(figures.metrics)
        return same if figures.identical else None

    digits = _NEAR_ONE.get(field, DIGITS)
    return RowColumn(
        name=name, cell=cell, kind=kind, key=field, page_cell=read_metric, digits=digits
    )


def _figure_column(name: str, field: str) -> RowColumn:
    """A figure of the pair, which is 0 in files for two sides with equal bits."""
    get = attrgetter(field)

    def figure_of(row: ComparisonRow) -> float | None:
        return None if row.figures is None else get(row.figures)

    def cell(row: ComparisonRow) -> float | None:
        value = figure_of(row)
        return 0.0 if value is None and row.figures is not None and row.figures.identical else value

    return RowColumn(
        name=name, cell=cell, kind="number", key=field, page_cell=figure_of, digits=DIGITS
    )


def _score_column(key: str, field: str, name: str = "") -> RowColumn:
    def cell(row: ComparisonRow) -> float | None:
        return None if row.score is None else getattr(row.score, field)

    return RowColumn(name=name, cell=cell, kind="number", key=key, digits=DIGITS)


def _count_elements(row: ComparisonRow) -> int | None:
    side = row.golden or row.my
    return None if side is None or side.shape is None else math.prod(side.shape)


def _worst_index(row: ComparisonRow) -> str:
    index = None if row.metrics is None else row.metrics.max_abs_index
    return "" if index is None else _index_words(index)


def _slice_words(row: ComparisonRow) -> str:
    score = row.score
    if score is None or score.slice_axis is None or score.slice_z is None:
        return ""
    allowed = "" if score.slice_limit is None else f", {score.slice_limit:.4g} allowed"
    slice_place = f"index {score.slice_index} of axis {score.slice_axis}"
    return f"{slice_place}: {score.slice_z:.4g}{allowed}"


def _index_words(values: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, values))}]"


# --- The columns ----------------------------------------------------------------------------------

_MSIT_COLUMNS = (
    _row_column("token_id", "step", "count", key="step", digits=DIGITS),
    _row_column("data_id", "index", "count"),
    *(
        column
        for which in ("golden", "my")
        for column in (
            _side_column(which, "path", "data_path"),
            _side_column(which, "op", "op_type"),
            _side_column(which, "dtype", "dtype"),
            _side_column(which, "shape", "shape", "counts"),
            _extreme_column(which, "max_value", "maximum"),
            _extreme_column(which, "min_value", "minimum"),
            _extreme_column(which, "mean_value", "mean"),
        )
    ),
    _metric_column("cosine_similarity", "cosine", 1.0),
    _metric_column("max_relative_error", "max_rel", 0.0),
    _figure_column("mean_relative_error", "mean_rel"),
    _figure_column("max_absolute_error", "max_abs"),
    _metric_column("mean_absolute_error", "mean_abs", 0.0),
    _figure_column("kl_divergence", "kl_divergence"),
    _figure_column("relative_euclidean_distance", "rel_l2"),
)

_OWN_COLUMNS = (
    _row_column("status", "status.value"),
    _text_column("aspect.value"),
    _row_column(
        "rank",
        kind="count",
        key="rank",
        page_cell=lambda row: JOINED if row.rank is None else str(row.rank),
    ),
    *map(_text_column, ("name", "level", "phase", "side")),
    _row_column("position"),
    *map(_text_column, ("matched_by", "judged_by", "limits")),
    _score_column("score", "excess", "worst_over_allowed"),
    _row_column("own_error", "own", "number", key="own", digits=DIGITS),
    _row_column("inherited_error", "inherited", "number", key="inherited", digits=DIGITS),
    *map(_text_column, ("attributed", "made", "module")),
    _text_column("line", "source_line"),
    RowColumn(
        name="nodes",
        cell=lambda row: row.nodes or None,
        kind="texts",
        key="nodes",
        page_cell=lambda row: ", ".join(row.nodes),
    ),
    _text_column("kernel"),
    RowColumn(name="numel", cell=_count_elements, kind="count"),
    _metric_column("mismatched", "mismatched", 0, "count"),
    _metric_column("max_ulp", "max_ulp", 0.0),
    *(
        _metric_column(f"{kind}_{which}", f"{kind}_{side}", kind="count")
        for kind in ("nan", "posinf", "neginf")
        for which, side in (("my", "candidate"), ("golden", "reference"))
    ),
    _metric_column("nonfinite_mismatches", "nonfinite_mismatches", 0, "count"),
    _side_column("my", "id", "id"),
    _side_column("my", "step", "step", "count"),
    _side_column("my", "value", "value"),
    _side_column("golden", "value", "value"),
    _side_column("my", "made_of", "made_of"),
    _side_column("golden", "made_of", "made_of"),
    _text_column("advice"),
    RowColumn(
        name="diagnosis",
        cell=lambda row: None if row.diagnosis is None else row.diagnosis.sentence,
        key="diagnosis",
    ),
)

_PAGE_COLUMNS = (
    *map(_both_sides, ("dtype", "shape")),
    *(_text_column(field, "") for field in ("op", "code", "graph", "reason")),
    RowColumn(cell=_worst_index, key="worst_index"),
    RowColumn(cell=_slice_words, key="slice"),
    *map(_presence_column, ("my", "golden")),
    *(_side_column(which, "ranks") for which in ("my", "golden")),
    *(_side_column("golden", field) for field in ("id", "step")),
    *(_score_column(field, field) for field in ("max_z", "max_limit", "rms_z", "rms_limit")),
)
# The page has every metric.
_METRIC_COLUMNS = tuple(
    _metric_column("", field)
    for field in Metrics.__struct_fields__
    if field != "max_abs_index"
    and field not in {column.key for column in (*_MSIT_COLUMNS, *_OWN_COLUMNS)}
)


def _read_finding(heading: str) -> Callable[[ComparisonRow], Any]:
    """Reads from a row what a table of findings has in a column."""
    (read,) = (column.cell for column in FINDING_COLUMNS if column.name == heading)
    return lambda row: read(finding_of(row))


_VALUE_WORDS = _read_finding("value")
_TERMINAL_COLUMNS = (
    RowColumn(cell=lambda row: STATUS_MARKS[row.status], key="status"),
    RowColumn(cell=_read_finding("off by"), key="off_by"),
    RowColumn(cell=_read_finding("worst / allowed"), key="worst"),
)
_ALL_COLUMNS = (*_MSIT_COLUMNS, *_OWN_COLUMNS, *_PAGE_COLUMNS, *_METRIC_COLUMNS)
_BY_KEY = {column.key: column for column in (*_ALL_COLUMNS, *_TERMINAL_COLUMNS) if column.key}
# The page's table: where a row is, its figures, then what else its texts say.
_BOTH = "mine / golden if they differ"
_TABLE = {
    "step": Heading("step", 66, "run"),
    "rank": Heading("rank", 66, "run"),
    "name": Heading("name", 300, "name"),
    "op": Heading("operator", 176),
    "rel_l2": Heading(
        "rel. L2", 90, "exponential", "norm of the difference / norm of the golden value"
    ),
    "max_abs": Heading("max abs", 90, "exponential", "largest absolute difference"),
    "own": Heading("own", 90, "exponential", "error added here, relative to the golden norm"),
    "inherited": Heading(
        "inherited", 102, "exponential", "error from the inputs, relative to the golden norm"
    ),
    "score": Heading(
        "× allowed", 104, "figure", "the worst error / the allowed error; more than 1 fails"
    ),
    "dtype": Heading("dtype", 100, meaning=_BOTH),
    "shape": Heading("shape", 120, meaning=_BOTH),
    "judged_by": Heading("judged by", 150),
    "matched_by": Heading("matched", 88),
    "line": Heading("line", 220),
}
# A terminal's table, and what is said below it about its columns.
_TERMINAL = {
    "status": "status",
    "name": "item",
    "off_by": "off by",
    "own": "own",
    "inherited": "came in",
    "worst": "worst / allowed",
}
TERMINAL_LEGENDS = {
    "item": "item: without the common parts; the full name is in comparison.csv",
    "off by": "off by: norm of the difference / norm of the golden value, or a count of values",
    "own": "own, came in: the part that was added here, and the part from the inputs",
    "worst / allowed": "worst / allowed: in multiples of rounding noise",
}
