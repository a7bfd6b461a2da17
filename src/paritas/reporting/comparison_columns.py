"""The columns of a comparison's table, in order: names, types, and what a row has in each.

The first ones are those of msit's table, by its names; `docs/comparing.md` says where a definition
differs. Whoever writes a table, in whatever format, takes it from here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeVar

from paritas.numerics.wording import MEANING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paritas.numerics.comparisons import Comparison, Row, SideFacts
    from paritas.numerics.metrics import Metrics

__all__ = ["COLUMNS", "Column", "Value", "changed", "lines", "stretches"]

Kind = Literal["count", "number", "text", "counts", "texts"]
Value = int | float | str | tuple[int, ...] | tuple[str, ...] | None
_T = TypeVar("_T")

# So many rows are turned into columns at a time: enough to be fast, few enough to be held twice.
_STRETCH = 2048


class _Stretch:
    """Some rows, and what many columns read of them, looked up once."""

    def __init__(self, rows: Sequence[Row], *, strict: bool) -> None:
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
    kind: Kind
    of: Callable[[_Stretch], Iterable[Value]]

    @property
    def is_text(self) -> bool:
        """Whether what it has is told in words."""
        return self.kind in {"text", "texts"}


def lines(comparison: Comparison) -> Iterator[tuple[Value, ...]]:
    """A line for every row, by `COLUMNS`."""
    for columns in stretches(comparison):
        yield from zip(*columns, strict=True)


def stretches(comparison: Comparison) -> Iterator[list[list[Value]]]:
    """The same by columns, which is many times as fast: some rows at a time."""
    for start in range(0, len(comparison.rows), _STRETCH):
        rows = comparison.rows[start : start + _STRETCH]
        stretch = _Stretch(rows, strict=comparison.strict)
        yield [
            changed(column.of(stretch), _whole) if column.is_text else list(column.of(stretch))
            for column in COLUMNS
        ]


def changed(values: Iterable[Value], change: Callable[[Value], _T]) -> list[_T]:
    """A column with each of its values changed: few of them differ, so each is changed once."""
    column = list(values)
    known = {value: change(value) for value in set(column)}
    return [known[value] for value in column]


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


def _golden(field: str) -> Callable[[_Stretch], Iterable[Value]]:
    get = attrgetter(field)
    return lambda some: [None if side is None else get(side) for side in some.golden]


def _my(field: str) -> Callable[[_Stretch], Iterable[Value]]:
    get = attrgetter(field)
    return lambda some: [None if side is None else get(side) for side in some.my]


def _row(field: str) -> Callable[[_Stretch], Iterable[Value]]:
    get = attrgetter(field)
    return lambda some: map(get, some.rows)


# What a cheap pass tells as well.
_QUICK = {"max_abs", "rel_l2"}


def _metric(field: str, *, same: float | None) -> Callable[[_Stretch], Iterable[Value]]:
    """A metric; `same` is what it is between two sides whose bits are the same."""
    get = attrgetter(field)

    def of(some: _Stretch) -> Iterator[Value]:
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


def _figure(field: str) -> Callable[[_Stretch], Iterable[Value]]:
    get = attrgetter(field)

    def of(some: _Stretch) -> Iterator[Value]:
        for figures in some.figures:
            found = None if figures is None else get(figures)
            yield 0.0 if found is None and figures is not None and figures.identical else found

    return of


def _diagnosis(some: _Stretch) -> Iterator[Value]:
    for row in some.rows:
        found = row.detail.diagnosis if row.detail else None
        yield found.sentence if found is not None else None


def _fail_reason(some: _Stretch) -> Iterator[Value]:
    """Never empty for a row that fails, whatever was left unsaid."""
    for row in some.rows:
        passes = row.status.passes(strict=some.strict)
        yield None if passes else row.reason or MEANING[row.status]


def _numel(some: _Stretch) -> Iterator[Value]:
    for golden, my in zip(some.golden, some.my, strict=True):
        side = golden or my
        yield None if side is None or side.shape is None else math.prod(side.shape)


def _excess(some: _Stretch) -> Iterator[Value]:
    return (None if row.score is None else row.score.excess for row in some.rows)


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
    Column("status", "text", _row("status.value")),
    Column("aspect", "text", _row("aspect.value")),
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
    Column("nodes", "texts", lambda some: (row.nodes or None for row in some.rows)),
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
