"""The comparison of two dumps, as text for a terminal."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from typing import TYPE_CHECKING

import msgspec
from rich.console import Group
from rich.text import Text

from paritas.comparison.columns import TERMINAL_LEGENDS, terminal_columns
from paritas.comparison.rows import beginnings, finding_of, losses_of
from paritas.core.reporting.annotations import Account, verdict_account
from paritas.core.reporting.tables import (
    STATUS_MARKS,
    STYLES,
    Column,
    Rest,
    terminal_table,
)
from paritas.core.reporting.terminal import (
    details,
    heading,
    indent_text,
    last_line,
    list_items,
    paragraph,
    remarks,
)
from paritas.core.results.findings import Aspect, Status
from paritas.core.results.wording import finding_lines, near_path, ranges, size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType
    from rich.table import Table

    from paritas.comparison.rows import Beginning, Comparison, ComparisonRow, Divergence, DumpFacts
    from paritas.core.results.findings import Verdict

MOST_ROWS = 24
_NEAR_THEIR_LIMITS = 6  # rows to show if all pass
_FOLLOWERS = 8  # rows to show that inherit their difference
_HOW_ATTRIBUTED = {
    "replayed": "measured by running the operator again in float64",
    "estimated": "estimated from the errors of its inputs",
    "": "",
}
_TITLES = {
    "values": "first divergence",
    "both": "first divergence; also the first NaN or infinity",
    "non-finite": "first NaN or infinity",
}
_KINDS = {
    "made": "made here",
    "given": "not made here: it was in the inputs of the program",
    "unclear": "the first row that fails; it is unknown whether it was made here",
    "unmatched": "the first row that fails; it may have been made before",
}
_NEXT = {
    "made": "look at this operator first: later ones inherit the error",
    "given": "compare what made the inputs, or give both programs the same inputs",
    "unclear": "record the inputs of this call on both sides, and compare again",
    "unmatched": "map the names of the values before it with --rename, and compare again",
}


def comparison_report(comparison: Comparison, *remarked: str) -> Group:
    """The whole report with the caller's remarks; print with `crop=False`."""
    verdict = comparison.verdict
    parts: list[RenderableType] = [heading(_describe_compared(comparison)), Text()]
    if comparison.rows:
        parts += [count_table(comparison), Text()]
    gravest = _gravest(comparison)
    if gravest:
        table = row_table(comparison, gravest)
        legend = [
            TERMINAL_LEGENDS[str(column.header)]
            for column in table.columns
            if column.header in TERMINAL_LEGENDS
        ]
        parts += [table, Text("\n".join(legend), style="dim"), Text()]
    # What a dump lacks is among the failures.
    problems = (
        list_items(
            f"problem in {whose} dump",
            [problem for problem in dump.problems if problem not in dump.losses],
        )
        for whose, dump in (("my", comparison.my), ("the golden", comparison.golden))
    )
    for lines in (
        itertools.chain.from_iterable(map(divergence_lines, beginnings(comparison))),
        _other_failures(comparison, verdict),
        itertools.chain(*problems),
    ):
        parts += paragraph(lines)
    parts += remarks(verdict)
    parts += [Text(words) for words in remarked]
    return Group(*parts, comparison_verdict_line(comparison))


def comparison_verdict_line(comparison: Comparison) -> Text:
    """The verdict in one line; equal statistics or digests do not mean equal bits."""
    few = comparison.of_summaries
    unread = Counter(row.judged_by for row in comparison.rows if row.is_by_digest)
    identical = ""
    if few or unread:
        identical = "is the same in everything recorded" if few else "has equal digests"
    remarks = [f"{few} by statistics only"] if few else []
    remarks += [f"{count} by {how}" for how, count in unread.items()]
    return last_line(comparison.verdict, *remarks, identical=identical)


# --- the heading and the counts -------------------------------------------------------------------


def _describe_compared(comparison: Comparison) -> Iterator[tuple[str, str]]:
    yield "my", _dump_words(comparison.my)
    yield "golden", _dump_words(comparison.golden)
    if comparison.nbytes:
        yield "compared", f"{size(comparison.nbytes)} in {comparison.seconds:.3g} s"


def _dump_words(dump: DumpFacts) -> str:
    words = [f"{near_path(dump.path)} ({dump.kind})", f"{dump.records} records"]
    for thing, numbers in (("step", dump.steps), ("rank", dump.ranks)):
        if numbers:
            plural = "" if len(numbers) == 1 else "s"
            words.append(f"{thing}{plural} {ranges(sorted(numbers))}")
    if dump.sources:
        fusion = f" with fusion {dump.fusion}" if dump.fusion and "fused" in dump.sources else ""
        words.append(f"{', '.join(dump.sources)}{fusion}")
    if dump.program:
        words.append(f"of {near_path(dump.program)}")
    if dump.torch:
        words.append(f"torch {dump.torch}")
    return "; ".join(words)


def count_table(comparison: Comparison) -> Table:
    """The number of rows of each status, gravest first, by phase and level."""
    counts = Counter((row.status, row.phase, row.level) for row in comparison.rows)
    kinds = list(dict.fromkeys((row.phase, row.level) for row in comparison.rows))
    statuses = [status for status in reversed(Status) if any(counts[status, *k] for k in kinds)]
    columns: list[Column[Status]] = [Column("rows", lambda status: STATUS_MARKS[status])]

    def count_column(phase: str, level: str) -> Column[Status]:
        return Column(
            f"{phase}\n{level}", lambda status: counts[status, phase, level] or None, "count"
        )

    columns += [count_column(*kind) for kind in kinds]
    return terminal_table(columns, statuses)


# --- the gravest rows -----------------------------------------------------------------------------


def _gravest(comparison: Comparison) -> list[ComparisonRow]:
    """Rows to show: where it begins, then by gravity; those that only inherit it last."""
    begin = {beginning.row.index for beginning in beginnings(comparison)}
    grave = [row for row in comparison.rows if row.status.gravity >= Status.UNSTABLE.gravity]
    if grave:
        return sorted(
            grave,
            key=lambda row: (row.index not in begin, row.made == "before", -row.status.gravity),
        )
    near = sorted(comparison.rows, key=lambda row: -(row.score.excess if row.score else 0.0))
    return [row for row in near[:_NEAR_THEIR_LIMITS] if row.status is Status.EQUIVALENT]


def row_table(comparison: Comparison, rows: list[ComparisonRow]) -> Table:
    """A table of the first rows; its last row counts the rest."""
    begin = {beginning.row.index for beginning in beginnings(comparison)}
    followers = [row for row in rows if row.made == "before" and row.index not in begin]
    shown = rows[: min(MOST_ROWS, len(rows) - len(followers) + _FOLLOWERS)]
    more = len(rows) - len(shown)
    lines: list[ComparisonRow | Rest] = [*shown]
    if more:
        inheriting_count = min(more, len(followers))  # they come last
        lines.append(
            Rest(
                (
                    "",
                    f"{more} more"
                    + (f", {inheriting_count} of them inherit it" if inheriting_count else ""),
                )
            )
        )
    return terminal_table(terminal_columns(_Shortening(comparison)), lines)


class _Shortening:
    """Shortens names for a narrow column by what most rows have in common."""

    def __init__(self, comparison: Comparison) -> None:
        graphs = {row.graph for row in comparison.rows if row.graph}
        self._graph = f"{graphs.pop()}/" if len(graphs) == 1 else ""
        self._steps = len({row.step for row in comparison.rows}) > 1
        self._ranks = len({row.rank for row in comparison.rows}) > 1

    def __call__(self, row: ComparisonRow) -> str:
        """The name, with step and rank if there are several."""
        name = row.name.removeprefix("forward/").removesuffix("/output.0")
        name = name.replace(self._graph, "", 1) if self._graph else name
        name = re.sub(r"#0(?=/|$)", "", name)
        aspect = "" if row.aspect is Aspect.VALUE else f" ({row.aspect.value})"
        step = f" step {row.step}" if self._steps else ""
        rank = f" rank {row.rank}" if self._ranks and row.rank is not None else ""
        return f"{name}{aspect}{step}{rank}"


# --- where it begins ------------------------------------------------------------------------------


def divergence_lines(begins: Beginning) -> Iterator[RenderableType]:
    """One divergence: what, how many, the worst, where, what made it, what to do."""
    row, divergence = begins.row, begins.divergence
    # Its location and advice come below, after the figures.
    bare = msgspec.structs.replace(row, made="", line="", advice="")
    heading, *lines = finding_lines(finding_of(bare))
    yield Text(f"{_TITLES[begins.of]}: {heading.strip()}", style=STYLES[row.status])
    for line in lines:
        words = line.lstrip()
        yield indent_text(words, len(line) - len(words) - 2)
    yield from map(indent_text, (*_describe_place(row), *_describe_divergence(row, divergence)))
    yield indent_text(f"next: {row.advice or _NEXT[divergence.kind]}")


def _describe_place(row: ComparisonRow) -> Iterator[str]:
    if len(row.nodes) > 1:
        yield f"compiled together: {', '.join(row.nodes)}"
    if row.kernel:
        yield f"written by {row.kernel}"
    inside = f"in module {row.module}" if row.module else ""
    if row.op or inside:
        yield " ".join(filter(None, ("call of" if row.op else "", row.op, inside)))
    if row.line:
        yield f"at {near_path(row.line)}{f': {row.code}' if row.code else ''}"


def _describe_divergence(row: ComparisonRow, divergence: Divergence) -> Iterator[str]:
    is_already_said = divergence.reason in {"", row.reason}
    because = "" if is_already_said else f": {divergence.reason}"
    yield f"{_KINDS[divergence.kind]}{because}"
    if row.own is not None or row.inherited is not None:
        parts = [("added here", row.own), ("came in", row.inherited)]
        shares = ", ".join(f"{name} {part:.2g}" for name, part in parts if part is not None)
        how = f"; {_HOW_ATTRIBUTED[row.attributed]}" if row.attributed else ""
        yield f"error relative to the golden norm: {shares}{how}"
    matched = f"matched by {row.matched_by}" if row.matched_by else ""
    judged = f"judged by {row.judged_by}" if row.judged_by else ""
    if matched or judged:
        yield ", ".join(filter(None, (matched, judged)))
    if row.limits:
        yield f"limits of this check: {row.limits}"


# --- the rest -------------------------------------------------------------------------------------


def _other_failures(comparison: Comparison, verdict: Verdict) -> Iterator[RenderableType]:
    """Failures that do not follow from a divergence: not comparable, or unstable."""
    begin = {beginning.row.index for beginning in beginnings(comparison)}
    findings = [
        finding_of(row)
        for row in comparison.rows
        if row.index not in begin
        # Rows without a counterpart are listed as unmatched.
        and row.my is not None
        and row.golden is not None
        and (row.status is Status.UNVERIFIED or not begin)
    ]
    yield from details(
        msgspec.structs.replace(verdict, findings=(*losses_of(comparison), *findings))
    )


# --- For GitHub, SARIF and JUnit ------------------------------------------------------------------


def comparison_account(comparison: Comparison, *, subject: str) -> Account:
    """The result of `compare`; rows that inherit their error come last."""
    path = comparison.my.path  # a folder, or an address
    verdict = comparison.verdict
    rows = len(comparison.rows)
    pairs = zip(comparison.rows, verdict.findings[:rows], strict=True)
    ordered = [finding for _, finding in sorted(pairs, key=lambda pair: pair[0].made == "before")]
    verdict = msgspec.structs.replace(verdict, findings=(*ordered, *verdict.findings[rows:]))
    return verdict_account(verdict, command="compare", subject=subject, file=path)
