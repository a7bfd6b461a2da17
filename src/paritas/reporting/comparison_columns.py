"""The columns of a comparison's table, in order: names, types, and what a row has in each.

The first ones are those of msit's table, by its names; `docs/comparing.md` says where a definition
differs. Whoever writes a table, in whatever format, takes it from here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Literal, NamedTuple

from paritas.numerics.wording import MEANING

if TYPE_CHECKING:
    from paritas.numerics.comparisons import Comparison, Row, SideFacts
    from paritas.numerics.metrics import Metrics

__all__ = ["COLUMNS", "Column", "Value", "lines"]

Kind = Literal["count", "number", "text", "counts", "texts"]
Value = int | float | str | tuple[int, ...] | tuple[str, ...] | None


class Column(NamedTuple):
    """One column.

    Attributes:
        kind: whole numbers, floats, text, or several of these.
        of: what a row has in it, given the comparison; None where there is nothing.
    """

    name: str
    kind: Kind
    of: Callable[[Comparison, Row], Value]


def lines(comparison: Comparison) -> Iterator[list[Value]]:
    """A line for every row, by `COLUMNS`."""
    getters = [column.of for column in COLUMNS]
    for row in comparison.rows:
        yield [_whole(getter(comparison, row)) for getter in getters]


def _whole(value: Value) -> Value:
    """Nothing for an empty text; a name that is no text, as a file's may be, is spelled out."""
    if isinstance(value, str):
        return _spelled(value) or None
    if isinstance(value, tuple) and value and isinstance(value[0], str):
        return tuple(_spelled(item) for item in value if isinstance(item, str))
    return value


def _spelled(text: str) -> str:
    return text if text.isascii() else text.encode(errors="backslashreplace").decode()


# --- where the values come from -------------------------------------------------------------------


def _golden(field: str) -> Callable[[Comparison, Row], Value]:
    return lambda _, row: _of_side(row.golden, field)


def _my(field: str) -> Callable[[Comparison, Row], Value]:
    return lambda _, row: _of_side(row.my, field)


def _of_side(side: SideFacts | None, field: str) -> Value:
    found: Value = None if side is None else getattr(side, field)
    return found


def _row(field: str) -> Callable[[Comparison, Row], Value]:
    def get(_: Comparison, row: Row) -> Value:
        found: Value = getattr(row, field)
        return found

    return get


# What a cheap pass tells as well.
_QUICK = {"max_abs", "rel_l2"}


def _metric(field: str, *, same: float | None) -> Callable[[Comparison, Row], Value]:
    """A metric; `same` is what it is between two sides whose bits are the same."""

    def get(_: Comparison, row: Row) -> Value:
        if row.figures is None:
            return None
        metrics: Metrics | None = row.figures.metrics
        if metrics is None and field in _QUICK:
            quick: Value = getattr(row.figures, field)
            return quick
        if metrics is None:
            return same if row.figures.identical else None
        found: Value = getattr(metrics, field)
        return found

    return get


def _figure(field: str) -> Callable[[Comparison, Row], Value]:
    def get(_: Comparison, row: Row) -> Value:
        if row.figures is None:
            return None
        found: Value = getattr(row.figures, field)
        return 0.0 if found is None and row.figures.identical else found

    return get


def _diagnosis(_: Comparison, row: Row) -> Value:
    found = row.detail.diagnosis if row.detail else None
    return found.sentence if found is not None else None


def _fail_reason(comparison: Comparison, row: Row) -> Value:
    """Never empty for a row that fails, whatever was left unsaid."""
    if row.status.passes(strict=comparison.strict):
        return None
    return row.reason or MEANING[row.status]


def _numel(_: Comparison, row: Row) -> Value:
    side = row.golden or row.my
    return None if side is None or side.shape is None else math.prod(side.shape)


def _excess(_: Comparison, row: Row) -> Value:
    return None if row.score is None else row.score.excess


# --- the columns ----------------------------------------------------------------------------------

_MSIT = (
    Column("token_id", "count", _row("step")),
    Column("data_id", "count", _row("index")),
    Column("golden_data_path", "text", _golden("path")),
    Column("golden_op_type", "text", _golden("op")),
    Column("golden_dtype", "text", _golden("dtype")),
    Column("golden_shape", "counts", _golden("shape")),
    Column("golden_max_value", "number", _golden("maximum")),
    Column("golden_min_value", "number", _golden("minimum")),
    Column("golden_mean_value", "number", _golden("mean")),
    Column("my_data_path", "text", _my("path")),
    Column("my_op_type", "text", _my("op")),
    Column("my_dtype", "text", _my("dtype")),
    Column("my_shape", "counts", _my("shape")),
    Column("my_max_value", "number", _my("maximum")),
    Column("my_min_value", "number", _my("minimum")),
    Column("my_mean_value", "number", _my("mean")),
    Column("cosine_similarity", "number", _metric("cosine", same=1.0)),
    Column("max_relative_error", "number", _metric("max_rel", same=0.0)),
    Column("mean_relative_error", "number", _figure("mean_rel")),
    Column("max_absolute_error", "number", _metric("max_abs", same=0.0)),
    Column("mean_absolute_error", "number", _metric("mean_abs", same=0.0)),
    Column("kl_divergence", "number", _figure("kl_divergence")),
    Column("relative_euclidean_distance", "number", _metric("rel_l2", same=0.0)),
    Column("cmp_fail_reason", "text", _fail_reason),
)

_OURS = (
    Column("status", "text", lambda _, row: row.status.value),
    Column("aspect", "text", lambda _, row: row.aspect.value),
    Column("rank", "count", _row("rank")),
    Column("name", "text", _row("name")),
    Column("level", "text", _row("level")),
    Column("phase", "text", _row("phase")),
    Column("side", "text", _row("side")),
    Column("position", "text", _row("position")),
    Column("matched_by", "text", _row("matched_by")),
    Column("judged_by", "text", _row("judged_by")),
    Column("limits", "text", _row("limits")),
    Column("worst_over_allowed", "number", _excess),
    Column("own_error", "number", _row("own")),
    Column("inherited_error", "number", _row("inherited")),
    Column("attributed", "text", _row("attributed")),
    Column("made", "text", _row("made")),
    Column("module", "text", _row("module")),
    Column("source_line", "text", _row("line")),
    Column("nodes", "texts", lambda _, row: row.nodes or None),
    Column("kernel", "text", _row("kernel")),
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
    Column("my_id", "text", _my("id")),
    Column("my_step", "count", _my("step")),
    Column("my_value", "text", _my("value")),
    Column("golden_value", "text", _golden("value")),
    Column("my_made_of", "text", _my("made_of")),
    Column("golden_made_of", "text", _golden("made_of")),
    Column("advice", "text", _row("advice")),
    Column("diagnosis", "text", _diagnosis),
)

COLUMNS: tuple[Column, ...] = (*_MSIT, *_OURS)
