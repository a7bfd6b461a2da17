"""Where two dumps begin to differ."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paritas.numerics.comparisons import Divergence
from paritas.numerics.findings import Status

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paritas.numerics.comparisons import Row

__all__ = ["first_divergence", "first_non_finite"]

_FAILS = {Status.DIFFERENT, Status.DEGRADED}


def first_divergence(rows: Sequence[Row]) -> Divergence | None:
    """The first row whose difference was made there, not the first that looks large."""
    return _first(rows, lambda _: True)


def first_non_finite(rows: Sequence[Row]) -> Divergence | None:
    """The same, of NaN and infinities that one side has and the other has not."""
    return _first(rows, _unlike)


def _unlike(row: Row) -> bool:
    metrics = row.figures.metrics if row.figures is not None else None
    if metrics is not None:
        return metrics.nonfinite_mismatches > 0
    return row.figures is None and any(word in row.reason for word in ("NaN", "Inf"))


def _first(rows: Sequence[Row], wanted: Callable[[Row], bool]) -> Divergence | None:
    """Of all ranks, the one that comes first in its rank's own order."""
    counts: dict[tuple[int, int | None], int] = {}
    ran: set[tuple[int, int | None]] = set()  # those of which a call has given something
    best: tuple[tuple[int, int], Divergence] | None = None
    for row in rows:
        key = (row.step, row.rank)
        counts[key] = counts.get(key, 0) + 1
        is_result = row.side == "output" and row.op != "placeholder"
        if row.status in _FAILS and row.made != "before" and wanted(row):
            found = _divergence(row, at_the_start=key not in ran and not is_result)
            order = (row.step, counts[key])
            if best is None or order < best[0]:
                best = (order, found)
        if is_result:
            ran.add(key)
    return None if best is None else best[1]


def _divergence(row: Row, *, at_the_start: bool) -> Divergence:
    if row.op == "placeholder" or at_the_start:
        reason = "the two programs were given different values, so what follows cannot agree"
        return Divergence(kind="given", row=row.index, reason=reason)
    if row.made == "here":
        reason = "what it was computed from agrees, or is wrong by less: the rest was added here"
        return Divergence(kind="made", row=row.index, reason=reason)
    reason = "what it was computed from is not recorded: it, or what ran before it, is to blame"
    return Divergence(kind="unclear", row=row.index, reason=reason)
