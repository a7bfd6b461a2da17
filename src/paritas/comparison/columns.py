"""The columns of a comparison, for CSV and Parquet.

The first columns are those of msit's table, with its names; `docs/comparing.md` lists differences
in their definitions.
"""

from __future__ import annotations

import math
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from paritas.core.reporting.table_files import csv_table, write_parquet
from paritas.core.reporting.tables import Column
from paritas.core.results.wording import MEANING

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from paritas.comparison.rows import Comparison, ComparisonRow
    from paritas.core.reporting.tables import CellValue, ColumnKind


def comparison_csv(comparison: Comparison) -> str:
    """The whole table, with a header line and no newline at the end."""
    return csv_table(comparison_columns(strict=comparison.strict), comparison.rows)


def write_comparison_parquet(path: Path, comparison: Comparison) -> None:
    """Write the table atomically."""
    write_parquet(path, comparison_columns(strict=comparison.strict), comparison.rows)


# --- Where the values come from -------------------------------------------------------------------


def _row_column(name: str, field: str = "", kind: ColumnKind = "text") -> Column[ComparisonRow]:
    return Column(name, attrgetter(field or name), kind)


def _side_column(which: str, name: str, kind: ColumnKind, field: str = "") -> Column[ComparisonRow]:
    get = attrgetter(field or name)

    def cell(row: ComparisonRow) -> CellValue:
        side = row.my if which == "my" else row.golden
        value: CellValue = None if side is None else get(side)
        return value

    return Column(f"{which}_{name}", cell, kind)


# Metrics that a quick pass computes too.
_QUICK = {"max_abs", "rel_l2"}


def _metric(field: str, *, same: float | None) -> Callable[[ComparisonRow], Any]:
    """A metric; `same` is its value for two sides with equal bits."""
    get = attrgetter(field)

    def cell(row: ComparisonRow) -> Any:
        figures = row.figures
        if figures is None:
            return None
        if figures.metrics is not None:
            return get(figures.metrics)
        if field in _QUICK:
            return get(figures)
        return same if figures.identical else None

    return cell


def _figure(field: str) -> Callable[[ComparisonRow], Any]:
    get = attrgetter(field)

    def cell(row: ComparisonRow) -> Any:
        figures = row.figures
        value = None if figures is None else get(figures)
        return 0.0 if value is None and figures is not None and figures.identical else value

    return cell


def _diagnosis(row: ComparisonRow) -> str | None:
    diagnosis = row.detail.diagnosis if row.detail else None
    return None if diagnosis is None else diagnosis.sentence


def _count_elements(row: ComparisonRow) -> int | None:
    side = row.golden or row.my
    return None if side is None or side.shape is None else math.prod(side.shape)


def _excess(row: ComparisonRow) -> float | None:
    return None if row.score is None else row.score.excess


# --- The columns ----------------------------------------------------------------------------------


def comparison_columns(*, strict: bool = False) -> tuple[Column[ComparisonRow], ...]:
    """All columns; strict: an unstable row has a reason why it fails."""

    def fail_reason(row: ComparisonRow) -> str | None:
        """The reason of a failing row, never empty."""
        return None if row.status.passes(strict=strict) else row.reason or MEANING[row.status]

    return (*_MSIT_COLUMNS, Column("cmp_fail_reason", fail_reason), *_OWN_COLUMNS)


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
    Column("cosine_similarity", _metric("cosine", same=1.0), "number"),
    Column("max_relative_error", _metric("max_rel", same=0.0), "number"),
    Column("mean_relative_error", _figure("mean_rel"), "number"),
    Column("max_absolute_error", _metric("max_abs", same=0.0), "number"),
    Column("mean_absolute_error", _metric("mean_abs", same=0.0), "number"),
    Column("kl_divergence", _figure("kl_divergence"), "number"),
    Column("relative_euclidean_distance", _metric("rel_l2", same=0.0), "number"),
)

_OWN_COLUMNS = (
    _row_column("status", "status.value"),
    _row_column("aspect", "aspect.value"),
    _row_column("rank", kind="count"),
    *map(_row_column, ("name", "level", "phase", "side", "position")),
    *map(_row_column, ("matched_by", "judged_by", "limits")),
    Column("worst_over_allowed", _excess, "number"),
    _row_column("own_error", "own", "number"),
    _row_column("inherited_error", "inherited", "number"),
    *map(_row_column, ("attributed", "made", "module")),
    _row_column("source_line", "line"),
    Column("nodes", lambda row: row.nodes or None, "texts"),
    _row_column("kernel"),
    Column("numel", _count_elements, "count"),
    Column("mismatched", _metric("mismatched", same=0), "count"),
    Column("max_ulp", _metric("max_ulp", same=0.0), "number"),
    *(
        Column(f"{kind}_{which}", _metric(f"{kind}_{side}", same=None), "count")
        for kind in ("nan", "posinf", "neginf")
        for which, side in (("my", "candidate"), ("golden", "reference"))
    ),
    Column("nonfinite_mismatches", _metric("nonfinite_mismatches", same=0), "count"),
    _side_column("my", "id", "text"),
    _side_column("my", "step", "count"),
    _side_column("my", "value", "text"),
    _side_column("golden", "value", "text"),
    _side_column("my", "made_of", "text"),
    _side_column("golden", "made_of", "text"),
    _row_column("advice"),
    Column("diagnosis", _diagnosis),
)
