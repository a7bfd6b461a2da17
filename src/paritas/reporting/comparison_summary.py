"""A comparison for a terminal: both dumps, counts, the gravest rows, the first divergence in words.

For 80 columns and without colours, like `paritas.reporting.terminal`, whose last line it shares.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING

import msgspec
from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from paritas.numerics.comparisons import finding_of
from paritas.numerics.findings import Aspect, Status
from paritas.numerics.wording import MEANING, finding_lines
from paritas.reporting.dump_records import size
from paritas.reporting.dump_summary import ranges
from paritas.reporting.terminal import (
    STYLES,
    cells,
    details,
    indented,
    last_line,
    listed,
    near_path,
    remarks,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType

    from paritas.numerics.comparisons import Comparison, Divergence, DumpFacts, Row
    from paritas.numerics.findings import Verdict

__all__ = ["MOST_ROWS", "count_table", "divergence_lines", "report", "row_table"]

MOST_ROWS = 24
_NEAR_THEIR_LIMITS = 6  # of rows that pass, where none fails
_FOLLOWERS = 8  # rows whose difference came in with their inputs
COLUMNS = ("status", "item", "off by", "own", "came in", "worst / allowed")
LEGENDS = {
    "item": "item: without what all have in common; the whole name is in comparison.csv",
    "off by": "off by: size of the difference over the golden side's, or a count of values",
    "own": "own, came in: the part of it that was made here, and that of the inputs",
    "worst / allowed": "worst / allowed: in multiples of rounding noise",
}
_HOW_TOLD = {
    "replayed": "told by running the operator again in float64",
    "estimated": "estimated from the errors of its inputs",
    "": "",
}
_KINDS = {
    "made": "made here",
    "given": "not made here: it was in what the program was given",
    "unclear": "the first row that fails; whether it was made here cannot be told",
}
_NEXT = {
    "made": "look at this operator first: what comes after it inherits the error",
    "given": "compare what made the inputs, or give both programs the same ones",
    "unclear": "record the inputs of this call on both sides, and compare again",
}


def report(comparison: Comparison, *remarked: str) -> Group:
    """The whole of it, with remarks of the caller's; print with `crop=False`."""
    verdict = comparison.verdict
    parts: list[RenderableType] = [_heading(comparison), Text()]
    if comparison.rows:
        parts += [count_table(comparison), Text()]
    gravest = _gravest(comparison)
    if gravest:
        table = row_table(comparison, gravest)
        legend = [
            LEGENDS[str(column.header)] for column in table.columns[1:] if column.header in LEGENDS
        ]
        parts += [table, Text("\n".join(legend), style="dim"), Text()]
    for told in (_divergences(comparison), _others(comparison, verdict), _problems(comparison)):
        lines = list(told)
        parts += [*lines, Text()] if lines else []
    parts += remarks(verdict)
    parts += [Text(words) for words in remarked]
    return Group(*parts, verdict_line(comparison))


def verdict_line(comparison: Comparison) -> Text:
    """The verdict in one line; equal statistics, or digests, are not equal bits."""
    line = last_line(comparison.verdict)
    few = comparison.of_summaries
    unread = Counter(row.judged_by for row in comparison.rows if row.is_by_digest)
    if not few and not unread:
        return line
    same = "is the same in all that is recorded" if few else "has equal digests"
    words = [line.plain.replace(MEANING[Status.IDENTICAL], same)]
    words += [f"{few} by statistics alone"] if few else []
    words += [f"{count} by {how}" for how, count in unread.items()]
    return Text(", ".join(words), line.style, no_wrap=True, overflow="ignore")


# --- the whole ------------------------------------------------------------------------------------


def _heading(comparison: Comparison) -> RenderableType:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True, style="bold")
    grid.add_column(overflow="fold")
    grid.add_row("my", Text(_dump_words(comparison.my)))
    grid.add_row("golden", Text(_dump_words(comparison.golden)))
    if comparison.nbytes:
        amount = f"{size(comparison.nbytes)} in {comparison.seconds:.3g} s"
        grid.add_row("compared", Text(amount))
    return grid


def _dump_words(dump: DumpFacts) -> str:
    words = [f"{near_path(dump.path)} ({dump.kind})", f"{dump.records} records"]
    for thing, numbers in (("step", dump.steps), ("rank", dump.ranks)):
        if numbers:
            plural = "" if len(numbers) == 1 else "s"
            words.append(f"{thing}{plural} {ranges([(n, n) for n in sorted(numbers)])}")
    if dump.sources:
        fusion = f" with fusion {dump.fusion}" if dump.fusion and "fused" in dump.sources else ""
        words.append(f"{', '.join(dump.sources)}{fusion}")
    if dump.program:
        words.append(f"of {near_path(dump.program)}")
    if dump.torch:
        words.append(f"torch {dump.torch}")
    return "; ".join(words)


def count_table(comparison: Comparison) -> Table:
    """How many rows ended how, gravest first, by phase and level."""
    counts = Counter((row.status, row.phase, row.level) for row in comparison.rows)
    kinds = list(dict.fromkeys((row.phase, row.level) for row in comparison.rows))
    table = _table()
    table.add_column("rows")
    for phase, level in kinds:
        table.add_column(f"{phase}\n{level}", justify="right")
    for status in reversed(Status):
        found = [counts[status, *kind] for kind in kinds]
        if any(found):
            style = STYLES[status]
            table.add_row(Text(status.value, style=style), *(str(count or "") for count in found))
    return table


def _table() -> Table:
    return Table(
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        header_style="bold",
    )


# --- the gravest rows -----------------------------------------------------------------------------


def _gravest(comparison: Comparison) -> list[Row]:
    """Rows worth a line: where it begins, then by gravity; those that only inherit it last."""
    begin = _beginnings(comparison)
    wanting = [row for row in comparison.rows if row.status.gravity >= Status.UNSTABLE.gravity]
    if wanting:
        return sorted(
            wanting,
            key=lambda row: (row.index not in begin, row.made == "before", -row.status.gravity),
        )
    near = sorted(comparison.rows, key=lambda row: -(row.score.excess if row.score else 0.0))
    return [row for row in near[:_NEAR_THEIR_LIMITS] if row.status is Status.EQUIVALENT]


def _beginnings(comparison: Comparison) -> set[int]:
    return {first.row for first in (comparison.first, comparison.first_non_finite) if first}


def row_table(comparison: Comparison, rows: list[Row]) -> Table:
    """The first of these rows, and how many more there are."""
    begin = _beginnings(comparison)
    followers = [row for row in rows if row.made == "before" and row.index not in begin]
    shown = rows[: min(MOST_ROWS, len(rows) - len(followers) + _FOLLOWERS)]
    shorten = _Shortening(comparison)
    lines: list[tuple[Text, ...]] = []
    for row in shown:
        status, _, value, off_by, worst = cells(finding_of(row))
        item = Text("\n").join(filter(None, (Text(shorten(row)), value)))
        lines.append(
            (status, item, off_by, Text(_figure(row.own)), Text(_figure(row.inherited)), worst)
        )
    filled = [place for place in range(len(COLUMNS)) if any(line[place] for line in lines)]
    table = _table()
    for place in filled:
        table.add_column(COLUMNS[place], overflow="fold", no_wrap=COLUMNS[place] != "item")
    for line in lines:
        table.add_row(*(line[place] for place in filled))
    more = len(rows) - len(shown)
    if more:
        left = min(more, len(followers))  # they come last
        words = f"{more} more" + (f", of which {left} inherit it" if left else "")
        table.add_row("", words, *("" for _ in filled[2:]))
    return table


class _Shortening:
    """Names in a narrow column: what most rows have in common goes without saying."""

    def __init__(self, comparison: Comparison) -> None:
        graphs = {row.graph for row in comparison.rows if row.graph}
        self._graph = f"{graphs.pop()}/" if len(graphs) == 1 else ""
        self._steps = len({row.step for row in comparison.rows}) > 1
        self._ranks = len({row.rank for row in comparison.rows}) > 1

    def __call__(self, row: Row) -> str:
        """The name, with step and rank where there are several."""
        name = row.name.removeprefix("forward/").removesuffix("/output.0")
        name = name.replace(self._graph, "", 1) if self._graph else name
        name = re.sub(r"#0(?=/|$)", "", name)
        aspect = "" if row.aspect is Aspect.VALUE else f" ({row.aspect.value})"
        step = f" step {row.step}" if self._steps else ""
        rank = f" rank {row.rank}" if self._ranks and row.rank is not None else ""
        return f"{name}{aspect}{step}{rank}"


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.1e}" if value else "0"


# --- where it begins ------------------------------------------------------------------------------


def _divergences(comparison: Comparison) -> Iterator[RenderableType]:
    first, other = comparison.first, comparison.first_non_finite
    also = "; also the first NaN or infinity" if first and other and first.row == other.row else ""
    if first is not None:
        yield from divergence_lines(comparison, first, f"first divergence{also}")
    if other is not None and not also:
        yield from divergence_lines(comparison, other, "first NaN or infinity")


def divergence_lines(
    comparison: Comparison, divergence: Divergence, title: str
) -> Iterator[RenderableType]:
    """One of them in words: what, how many, the worst, where, who made it, what to do."""
    row = next(row for row in comparison.rows if row.index == divergence.row)
    # The place and what to do are told below, after the figures.
    bare = msgspec.structs.replace(row, made="", line="", advice="")
    heading, *lines = finding_lines(finding_of(bare))
    yield Text(f"{title}: {heading.strip()}", style=STYLES[row.status])
    for line in lines:
        words = line.lstrip()
        yield indented(words, len(line) - len(words) - 2)
    yield from map(indented, (*_place(row), *_told(row, divergence)))
    yield indented(f"next: {row.advice or _NEXT[divergence.kind]}")


def _place(row: Row) -> Iterator[str]:
    if len(row.nodes) > 1:
        yield f"compiled together: {', '.join(row.nodes)}"
    if row.kernel:
        yield f"written by {row.kernel}"
    inside = f"in module {row.module}" if row.module else ""
    if row.op or inside:
        yield " ".join(filter(None, ("call of" if row.op else "", row.op, inside)))
    if row.line:
        yield f"at {near_path(row.line)}{f': {row.code}' if row.code else ''}"


def _told(row: Row, divergence: Divergence) -> Iterator[str]:
    said = divergence.reason in {"", row.reason}
    because = "" if said else f": {divergence.reason}"
    yield f"{_KINDS[divergence.kind]}{because}"
    if row.own is not None or row.inherited is not None:
        parts = [("added here", row.own), ("came in", row.inherited)]
        shares = ", ".join(f"{name} {part:.2g}" for name, part in parts if part is not None)
        how = f"; {_HOW_TOLD[row.attributed]}" if row.attributed else ""
        yield f"error relative to the golden norm: {shares}{how}"
    matched = f"matched by {row.matched_by}" if row.matched_by else ""
    judged = f"judged by {row.judged_by}" if row.judged_by else ""
    if matched or judged:
        yield ", ".join(filter(None, (matched, judged)))
    if row.limits:
        yield f"it cannot show everything: {row.limits}"


# --- the rest -------------------------------------------------------------------------------------


def _others(comparison: Comparison, verdict: Verdict) -> Iterator[RenderableType]:
    """What failed and follows from nothing above: what could not be compared, or is unstable."""
    begin = _beginnings(comparison)
    told = [
        finding_of(row)
        for row in comparison.rows
        if row.index not in begin
        # Those without a counterpart are listed as unmatched.
        and row.my is not None
        and row.golden is not None
        and (row.status is Status.UNVERIFIED or not begin)
    ]
    yield from details(msgspec.structs.replace(verdict, findings=tuple(told)))


def _problems(comparison: Comparison) -> Iterator[RenderableType]:
    yield from listed("problem in my dump", comparison.my.problems)
    yield from listed("problem in the golden dump", comparison.golden.problems)
