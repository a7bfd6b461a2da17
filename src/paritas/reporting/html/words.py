"""A comparison in sentences: how it ended, and where the two begin to differ."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

from paritas.numerics.findings import Status
from paritas.reporting.dump_records import size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paritas.numerics.comparisons import Comparison, Divergence, Row

__all__ = ["MEANINGS", "SIGNS", "Fact", "Story", "divergence_story", "headline", "work_done"]

# Beside the colour, so that nobody depends on it.
SIGNS = {
    Status.IDENTICAL: "=",
    Status.EQUIVALENT: "≈",
    Status.UNSTABLE: "~",
    Status.UNVERIFIED: "?",
    Status.DEGRADED: "▼",
    Status.DIFFERENT: "≠",
}
MEANINGS = {
    Status.IDENTICAL: "equal bit for bit",
    Status.EQUIVALENT: "differs by rounding only",
    Status.UNSTABLE: "differs where the reference's own rounding decides",
    Status.UNVERIFIED: "could not be compared",
    Status.DEGRADED: "the same function, less accurate than rounding explains",
    Status.DIFFERENT: "computes something else",
}
_HOW = {
    "replayed": "measured by running the operator again",
    "estimated": "estimated from the errors of its inputs",
}
_NEXT = {
    "made": "Look at that line. The row's own panel below shows where in the tensor it is off.",
    "given": "Look at where that value comes from: the two programs were not given the same.",
    "unclear": "Record the inputs of this call on both sides as well, and compare again.",
}
_FUSED = (
    "Record the candidate with fusion off and compare again: if it is right then, the fusion"
    " makes the difference."
)


@dataclasses.dataclass(frozen=True)
class Fact:
    """One labelled line of a story; code is set in the fixed font."""

    label: str
    text: str
    code: str = ""


@dataclasses.dataclass(frozen=True)
class Story:
    """Where the two begin to differ, as a person would tell it."""

    title: str
    sentence: str
    facts: tuple[Fact, ...]
    place: int
    status: Status


def headline(comparison: Comparison) -> str:
    """The verdict as a sentence, without the status word."""
    rows, compared = len(comparison.rows), comparison.coverage.compared
    failing = sum(not row.status.passes(strict=comparison.strict) for row in comparison.rows)
    if not compared:
        return "Nothing was compared, so nothing is shown to be right."
    if failing:
        return f"{failing:,} of {_counted(rows, 'row')} {_verb(failing, 'does', 'do')} not pass."
    few, unread = comparison.of_summaries, comparison.by_digest
    weaker = f" Of {_counted(few, 'row')} only statistics or sketches were compared." if few else ""
    if unread:
        weaker += f" Of {_counted(unread, 'row')} only digests were compared, and not the data."
    if comparison.status is Status.IDENTICAL:
        same = "the same in all that is recorded" if few or unread else "equal bit for bit"
        return f"{_all(rows)} {same}.{weaker}"
    return f"{_all(rows)} the same but for rounding.{weaker}"


def work_done(comparison: Comparison) -> str:
    """How much was read, and how long it took; empty where neither is known."""
    read = size(comparison.nbytes) if comparison.nbytes else ""
    took = f"{comparison.seconds:.3g} s" if comparison.seconds else ""
    return " in ".join(filter(None, (read, took)))


def divergence_story(
    comparison: Comparison, divergence: Divergence | None, title: str
) -> Story | None:
    """The row that a divergence points at, in words; None where there is no divergence."""
    if divergence is None:
        return None
    for place, row in enumerate(comparison.rows):
        if row.index == divergence.row:
            return Story(
                title=title,
                sentence=_sentence(row, divergence),
                facts=tuple(_facts(row, divergence)),
                place=place,
                status=row.status,
            )
    return None


def _sentence(row: Row, divergence: Divergence) -> str:
    operator = f" ({row.op})" if row.op else ""
    module = f", module {row.module}" if row.module else ""
    rank = "" if row.rank is None else f", rank {row.rank}"
    where = f"step {row.step}{rank}{module}: {row.call or row.name}{operator}"
    if divergence.kind == "made":
        return f"It starts at {where}. What this call was given is right, what it gives is not."
    if divergence.kind == "given":
        return f"It is first seen at {where}. This call did not make it: the program was given it."
    because = f": {divergence.reason}" if divergence.reason else ""
    return f"The first that fails is {where}. Whether it made it cannot be told{because}."


def _facts(row: Row, divergence: Divergence) -> Iterator[Fact]:
    if row.reason:
        yield Fact("what is wrong", row.reason)
    diagnosis = row.detail.diagnosis if row.detail else None
    if diagnosis is not None and diagnosis.sentence:
        yield Fact("what kind of wrong", diagnosis.sentence)
    if divergence.reason and divergence.kind != "unclear":
        yield Fact("why this one", divergence.reason)
    if row.own is not None or row.inherited is not None:
        yield Fact("error", _errors(row))
    worst = _worst(row)
    if worst:
        yield Fact("worst element", worst)
    if row.judged_by:
        yield Fact("judged by", row.judged_by)
    if len(row.nodes) > 1:
        by = f", compiled into {row.kernel}" if row.kernel else ""
        yield Fact("fused", f"{len(row.nodes)} graph nodes{by}:", ", ".join(row.nodes))
    if row.line:
        yield Fact("source", row.line, row.code)
    if row.limits:
        yield Fact("not shown", row.limits)
    fused = f" {_FUSED}" if len(row.nodes) > 1 and divergence.kind == "made" else ""
    yield Fact("what to do", row.advice or f"{_NEXT[divergence.kind]}{fused}")


def _errors(row: Row) -> str:
    own = "not known" if row.own is None else figure(row.own)
    inherited = "not known" if row.inherited is None else figure(row.inherited)
    how = f"; {_HOW[row.attributed]}" if row.attributed else ""
    return f"own {own}, inherited {inherited}, relative to golden's norm{how}"


def _worst(row: Row) -> str:
    if row.detail is not None and row.detail.worst:
        worst = row.detail.worst[0]
        index, mine, golden, ulps = worst.index, worst.my, worst.golden, worst.ulps
    else:
        metrics = row.figures.metrics if row.figures else None
        if metrics is None or metrics.max_abs_index is None:
            return ""
        index, ulps = metrics.max_abs_index, metrics.max_ulp
        if metrics.max_abs_candidate is None or metrics.max_abs_reference is None:
            return ""
        mine, golden = metrics.max_abs_candidate, metrics.max_abs_reference
        ulps = None  # the largest of those is of another element, perhaps
    steps = "" if ulps is None else f", {figure(ulps)} ulp apart"
    place = f"[{', '.join(map(str, index))}]"
    return f"{place}: mine {figure(mine)}, golden {figure(golden)}{steps}"


def figure(value: float) -> str:
    """Four digits."""
    if math.isnan(value):
        return "NaN"
    return f"{value:.4g}"


def _counted(count: int, thing: str) -> str:
    return f"{count:,} {thing}{'' if count == 1 else 's'}"


def _verb(count: int, one: str, many: str) -> str:
    return one if count == 1 else many


def _all(rows: int) -> str:
    return "The one row is" if rows == 1 else f"All {rows:,} rows are"
