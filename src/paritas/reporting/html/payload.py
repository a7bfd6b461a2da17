"""What the scripts of the page work on: a comparison as columns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from paritas.numerics.findings import Status, spell_nonfinite
from paritas.numerics.metrics import Metrics
from paritas.reporting.html.columns import DIGITS, number_column, text_column
from paritas.reporting.html.neighbourhood import neighbourhood

if TYPE_CHECKING:
    from collections.abc import Callable

    from paritas.numerics.comparisons import Comparison, Divergence, Row, SideFacts

__all__ = ["JOINED", "payload", "ranges"]

# In place of a rank, for what was put together from several.
JOINED = "joined"

_NO_NUMBERS = {"max_abs_index"}
# Of these only the distance from 1 tells anything: four digits would make 0.99996 a 1.
_NEAR_ONE = {"cosine": 10, "pcc": 10}


def _of_score(name: str) -> Callable[[Row], float | None]:
    return lambda row: None if row.score is None else getattr(row.score, name)


def _of_figures(name: str) -> Callable[[Row], float | None]:
    return lambda row: None if row.figures is None else getattr(row.figures, name)


def _max_abs(row: Row) -> float | None:
    return None if row.figures is None else row.figures.max_abs


def _extreme(side: SideFacts | None, row: Row, measured_as: str, name: str) -> float | None:
    """As the dump says it, or else as it was measured."""
    said: float | None = None if side is None else getattr(side, name)
    if said is not None or row.figures is None:
        return said
    found: float | None = getattr(getattr(row.figures, measured_as), name)
    return found


def _worst_index(row: Row) -> str:
    metrics = row.figures.metrics if row.figures else None
    if metrics is None or metrics.max_abs_index is None:
        return ""
    return _tuple(metrics.max_abs_index)


def _slice(row: Row) -> str:
    score = row.score
    if score is None or score.slice_axis is None or score.slice_z is None:
        return ""
    allowed = "" if score.slice_limit is None else f", {score.slice_limit:.4g} allowed"
    place = f"index {score.slice_index} of axis {score.slice_axis}"
    return f"{place}: {score.slice_z:.4g}{allowed}"


def _tuple(values: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, values))}]"


def ranges(values: tuple[int, ...]) -> str:
    """Whole numbers in few words: `0-3, 8`."""
    joined: list[list[int]] = []
    for value in values:
        if joined and joined[-1][1] == value - 1:
            joined[-1][1] = value
        else:
            joined.append([value, value])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in joined)


def _diagnosis(row: Row) -> str:
    found = row.detail.diagnosis if row.detail else None
    return found.sentence if found is not None else ""


_TEXTS: dict[str, Callable[[Row], str]] = {
    "name": lambda row: row.name,
    "rank": lambda row: JOINED if row.rank is None else str(row.rank),
    "level": lambda row: row.level,
    "phase": lambda row: row.phase,
    "side": lambda row: row.side,
    "op": lambda row: row.op,
    "module": lambda row: row.module,
    "line": lambda row: row.line,
    "code": lambda row: row.code,
    "graph": lambda row: row.graph,
    "kernel": lambda row: row.kernel,
    "nodes": lambda row: ", ".join(row.nodes),
    "matched_by": lambda row: row.matched_by,
    "aspect": lambda row: row.aspect.value,
    "reason": lambda row: row.reason,
    "diagnosis": _diagnosis,
    "advice": lambda row: row.advice,
    "judged_by": lambda row: row.judged_by,
    "limits": lambda row: row.limits,
    "attributed": lambda row: row.attributed,
    "made": lambda row: row.made,
    "worst_index": _worst_index,
    "slice": _slice,
}
_SIDE_TEXTS: dict[str, Callable[[SideFacts, Row], str]] = {
    "path": lambda side, _: side.path,
    "id": lambda side, row: "" if side.id == row.name else side.id,
    "op": lambda side, row: "" if side.op == row.op else side.op,
    "dtype": lambda side, _: side.dtype,
    "shape": lambda side, _: "" if side.shape is None else _tuple(side.shape),
    "value": lambda side, _: side.value or "",
    "step": lambda side, _: str(side.step),
    "ranks": lambda side, _: ranges(side.ranks),
    "made_of": lambda side, _: side.made_of,
}
_NUMBERS: dict[str, Callable[[Row], float | None]] = {
    "step": lambda row: row.step,
    "rel_l2": lambda row: row.rel_l2,
    "max_abs": _max_abs,
    "own": lambda row: row.own,
    "inherited": lambda row: row.inherited,
    "score": _of_score("excess"),
    "max_z": _of_score("max_z"),
    "max_limit": _of_score("max_limit"),
    "rms_z": _of_score("rms_z"),
    "rms_limit": _of_score("rms_limit"),
    "mean_rel": _of_figures("mean_rel"),
    "kl_divergence": _of_figures("kl_divergence"),
}


def payload(comparison: Comparison) -> dict[str, Any]:
    """The whole table, closer looks, and the graph around the first divergence."""
    rows = comparison.rows
    places = {row.index: place for place, row in enumerate(rows)}
    return {
        "count": len(rows),
        "statuses": [status.value for status in Status],
        "failing": [not status.passes(strict=comparison.strict) for status in Status],
        "status": [row.status.gravity for row in rows],
        "texts": _texts(rows),
        "numbers": _numbers(rows),
        "details": {
            place: spell_nonfinite(msgspec.to_builtins(row.detail))
            for place, row in enumerate(rows)
            if row.detail is not None
        },
        "first": _place(comparison.first, places),
        "first_non_finite": _place(comparison.first_non_finite, places),
        "graph": neighbourhood(comparison),
    }


def _place(divergence: Divergence | None, places: dict[int, int]) -> int | None:
    return None if divergence is None else places.get(divergence.row)


def _texts(rows: tuple[Row, ...]) -> dict[str, Any]:
    texts = {name: text_column(map(get, rows)) for name, get in _TEXTS.items()}
    for which in ("my", "golden"):
        sides = [getattr(row, which) for row in rows]
        texts[f"{which}_there"] = text_column("yes" if side else "" for side in sides)
        for name, get in _SIDE_TEXTS.items():
            texts[f"{which}_{name}"] = text_column(
                get(side, row) if side else "" for side, row in zip(sides, rows, strict=True)
            )
    return texts


def _numbers(rows: tuple[Row, ...]) -> dict[str, Any]:
    numbers = {name: number_column(map(get, rows)) for name, get in _NUMBERS.items()}
    measured = [row.figures.metrics if row.figures else None for row in rows]
    for name in Metrics.__struct_fields__:
        if name not in _NO_NUMBERS and name not in numbers:
            found = (None if metrics is None else getattr(metrics, name) for metrics in measured)
            numbers[name] = number_column(found, _NEAR_ONE.get(name, DIGITS))
    for which, measured_as in (("my", "candidate"), ("golden", "reference")):
        for name in ("minimum", "maximum", "mean"):
            numbers[f"{which}_{name}"] = number_column(
                _extreme(getattr(row, which), row, measured_as, name) for row in rows
            )
    return numbers
