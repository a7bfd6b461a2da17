"""Dumps and comparisons of dumps for a terminal.

Readable in 80 columns and without colours, like `paritas.reports.terminal`. The last line is the
answer in one line.
"""

from __future__ import annotations

import itertools
import re
import textwrap
from collections import Counter
from typing import TYPE_CHECKING

import msgspec
from rich.console import Group
from rich.table import Table
from rich.text import Text

from paritas.reports.terminal import (
    STYLES,
    details,
    finding_cells,
    indented,
    last_line,
    listed,
    paragraph,
    remarks,
    small_table,
)
from paritas.results.comparisons import beginnings, finding_of, losses_of
from paritas.results.findings import Aspect, Status
from paritas.results.wording import MOST_SHOWN, counted, finding_lines, near_path, ranges, size

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from rich.console import RenderableType

    from paritas.dumps.survey import (
        ChecksumFacts,
        DumpSummary,
        ExaminedRecord,
        NameFacts,
        NonFinite,
    )
    from paritas.numerics.statistics import Statistics
    from paritas.results.comparisons import (
        Beginning,
        Comparison,
        ComparisonRow,
        Divergence,
        DumpFacts,
    )
    from paritas.results.findings import Verdict


# --- A dump ---------------------------------------------------------------------------------------

# Above this many names, the rest share a row; names with a NaN or infinity keep theirs if possible.
MOST_NAMES = 40
NAME_COLUMNS = ("name", "records", "value", "min", "max", "NaN/Inf")
WIDEST_NAME = 30  # a longer one is broken after its module
NAME_LEGEND = (
    "value, min, max: of the outputs, or of the inputs if no output is recorded\n"
    "NaN/Inf: the number of records that contain one"
)
_STATES = {"being written": "is still being written", "ended early": "was cut off, not closed"}


def dump_report(summary: DumpSummary) -> Group:
    """The whole report; print with `crop=False` to keep the last line in one piece."""
    parts: list[RenderableType] = [_heading(_facts(summary)), Text()]
    if summary.names:
        amount = (
            f"{counted(summary.selected, 'record')} under {counted(len(summary.names), 'name')}"
        )
        read = summary.from_payloads
        source = f"; {read} have no statistics in the index, their values were read" if read else ""
        table = name_table(summary.names)
        parts += [Text(f"{amount}{source}"), table, Text(NAME_LEGEND, style="dim"), Text()]
    if summary.selected:
        parts += [*_finiteness(summary), Text()]
    lists = (listed("problem", summary.problems, 0), listed("note", summary.notes, 0))
    parts += paragraph(itertools.chain(*lists))
    parts.append(Text(dump_verdict_line(summary), no_wrap=True, overflow="ignore"))
    return Group(*parts)


def dump_verdict_line(summary: DumpSummary) -> str:
    """Whether the dump is complete and readable, in one line."""
    amount = f"{counted(summary.records, 'record')} of {counted(len(summary.ranks), 'rank')}"
    checked = "" if summary.checksums is None else f"; {_checksums(summary.checksums)}"
    if summary.problems:
        problems = counted(len(summary.problems), "problem")
        return f"incomplete: {amount} can be read; {problems}{checked}"
    return f"{'complete' if summary.is_sound else 'unverified'}: {amount}{checked}"


def _checksums(found: ChecksumFacts) -> str:
    if not found.values:
        return "no stored values to check"
    of = f"of {counted(found.values, 'stored value')}"
    words = [
        f"{found.fit} {of} match their checksums" if found.fit else "",
        f"{found.damaged} {of} damaged" if found.damaged else "",
        f"{found.without} {of} without a checksum ({', '.join(found.endings)} files)"
        if found.without
        else "",
    ]
    return ", ".join(filter(None, words))


# --- the heading ----------------------------------------------------------------------------------


def _heading(facts: Iterable[tuple[str, str]]) -> RenderableType:
    """A label and its text on each line."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True, style="bold")
    grid.add_column(overflow="fold")
    for label, words in facts:
        grid.add_row(label, Text(words))
    return grid


def _facts(summary: DumpSummary) -> Iterator[tuple[str, str]]:
    header = summary.header
    yield "dump", near_path(summary.path)
    made = [header.program and f"of {near_path(header.program)}", header.created]
    made += [
        header.torch and f"torch {header.torch}",
        header.paritas and f"paritas {header.paritas}",
    ]
    yield "run", ", ".join([header.run, *filter(None, made)])
    yield "ranks", _ranks(summary)
    taps = "every node recorded, which may change the fusion" if header.taps else ""
    is_ours = summary.kind == "paritas"  # other tools do not record it
    fusion = f"fusion {header.fusion}" if is_ours and "fused" in summary.sources else ""
    sources = ", ".join(summary.sources or header.sources) or "none"
    yield "source", "; ".join(filter(None, [sources, fusion, taps]))
    kept = "statistics, no tensors" if header.data == "stats" else "tensors"
    yield "data", f"{kept}; layout {header.layout if is_ours else summary.kind}"
    if header.selection:
        yield "selection", "; ".join(f"{key} {words}" for key, words in header.selection.items())
    yield "steps", ranges(summary.steps) or "none"
    levels = ", ".join(f"{count} {level}" for level, count in summary.levels.items())
    others = summary.records - summary.tensors
    values = f"; {others} of them not tensors" if others else ""
    yield "records", f"{summary.records}{f' ({levels})' if levels else ''}{values}"
    yield "on disk", f"{size(summary.bytes_on_disk)} in {counted(summary.files, 'file')}"
    if summary.payload_bytes:
        yield "dedupe", _dedupe(summary)
    if summary.checksums is not None:
        yield "checksums", _checksums(summary.checksums)
    if summary.observed:
        yield "observation", _observation(summary)


def _ranks(summary: DumpSummary) -> str:
    there = ranges(facts.rank for facts in summary.ranks)
    words = [f"{there} (the run has {summary.header.world_size})"]
    if summary.missing:
        words.append(f"missing: {ranges(summary.missing)}")
    unclosed = [facts for facts in summary.ranks if facts.state != "closed"]
    for facts in unclosed[:MOST_SHOWN]:
        end = f", the last is {facts.last} of step {facts.last_step}" if facts.last else ""
        records = counted(facts.records, "record")
        words.append(f"rank {facts.rank} {_STATES[facts.state]} ({records}{end})")
    if len(unclosed) > MOST_SHOWN:
        words.append(f"{len(unclosed) - MOST_SHOWN} more are not closed")
    return "; ".join(words if unclosed else [*words, "closed"])


def _dedupe(summary: DumpSummary) -> str:
    saved = summary.payload_bytes - summary.stored_bytes
    factor = summary.payload_bytes / max(1, summary.stored_bytes)
    return f"saved {size(saved)} of {size(summary.payload_bytes)} (factor {factor:.3g})"


def _observation(summary: DumpSummary) -> str:
    words = []
    for status in ("changed", "unchecked", "unchanged"):
        graphs = [item for item in summary.observed if item.status == status]
        if not graphs:
            continue
        named = [
            f"{item.graph}{f' ({item.detail})' if item.detail else ''}"
            for item in (graphs[:MOST_SHOWN] if status != "unchanged" else [])
        ]
        of = f"{len(graphs)} of {counted(len(summary.observed), 'graph')}"
        effect = {
            "changed": f"recording CHANGED the outputs of {of}",
            "unchecked": f"not checked whether recording changed the outputs of {of}",
            "unchanged": f"recording did not change the outputs of {of}",
        }[status]
        words.append(f"{effect}{': ' if named else ''}{', '.join(named)}")
    return "; ".join(words)


# --- names ----------------------------------------------------------------------------------------


def name_table(names: Sequence[NameFacts]) -> Table:
    """One row per name, in recording order."""
    table = small_table(padding=0)
    for column in NAME_COLUMNS:
        table.add_column(
            column,
            justify="left" if column in {"name", "value"} else "right",
            overflow="fold",
            no_wrap=column in {"min", "max"},
        )
    shown, folded = _fold_names(names)
    for facts in shown:
        bad = Text(str(facts.non_finite) if facts.non_finite else "", style="bold red")
        ends = (number(facts.minimum), number(facts.maximum))
        table.add_row(Text(_name_words(facts)), str(facts.records), Text(_kinds(facts)), *ends, bad)
    if folded:
        more = f"{len(folded)} more; use --layer GLOB"
        table.add_row(more, str(sum(facts.records for facts in folded)), "", "", "", "")
    return table


def _fold_names(names: Sequence[NameFacts]) -> tuple[list[NameFacts], list[NameFacts]]:
    """The names with a row of their own, and the rest."""
    if len(names) <= MOST_NAMES:
        return list(names), []
    # The first names show where it starts, so they stay even if many others are not finite.
    first = MOST_NAMES // 2
    places = sorted(
        range(len(names)), key=lambda place: place >= first and not names[place].non_finite
    )
    kept = set(places[:MOST_NAMES])
    shown = [facts for place, facts in enumerate(names) if place in kept]
    return shown, [facts for place, facts in enumerate(names) if place not in kept]


def _name_words(facts: NameFacts) -> str:
    name = f"{facts.name} (backward)" if facts.phase == "backward" else facts.name
    module, slash, operator = name.rpartition("/")
    return f"{module}/\n {operator}" if slash and len(name) > WIDEST_NAME else name


def _kinds(facts: NameFacts) -> str:
    if not facts.kinds:
        return ""
    more = f" +{len(facts.kinds) - 1}" if len(facts.kinds) > 1 else ""
    return f"{facts.kinds[0]}{more}"


# --- the first NaN --------------------------------------------------------------------------------


def _finiteness(summary: DumpSummary) -> Iterator[RenderableType]:
    found = summary.non_finite
    if not found:
        has_numbers = any(facts.minimum is not None for facts in summary.names)
        yield Text("every value is finite" if has_numbers else "no statistics are available")
    for item in found[:MOST_SHOWN]:
        yield from _non_finite(item)
    if len(found) > MOST_SHOWN:
        yield Text(f"and {len(found) - MOST_SHOWN} more on other ranks")


def _non_finite(item: NonFinite) -> Iterator[RenderableType]:
    site = item.site
    yield Text(f"first {item.kind}: rank {item.rank}, step {item.step}, {item.id}", style="bold")
    of_module = f" in {site.module}" if site.module and site.module != site.name else ""
    by = f"by {site.op or site.name}{of_module}"
    yield indented(f"{item.count} of {counted(item.of, 'value')}, {by}")
    if site.nodes and site.nodes != (site.name,):
        kernel = f"; written by {site.kernel}" if site.kernel else ""
        yield indented(f"stands for {', '.join(site.nodes)}{kernel}")
    if site.line:
        yield indented(f"{near_path(site.line)}{f': {site.code}' if site.code else ''}")
    yield indented(_origin(item))


def _origin(item: NonFinite) -> str:
    inputs = f"{counted(item.inputs, 'recorded input')} of this call"
    if item.origin == "made":
        finite = "is finite" if item.inputs == 1 else "are finite"
        cause = ", so its code or parameters caused it" if item.site.level == "module" else ""
        return f"made here: the {inputs} {finite}{cause}"
    tensors = f"{counted(item.earlier, 'tensor')} {'was' if item.earlier == 1 else 'were'}"
    earlier = f"{tensors} recorded before it"
    if item.origin == "unknown":
        return f"unknown whether it was made here: no input of this call is recorded; {earlier}"
    if item.is_given:
        return f"not made here: it is an input of the call; {earlier}"
    verb = "is" if item.bad_inputs == 1 else "are"
    return f"not made here: {item.bad_inputs} of the {inputs} {verb} not finite"


# --- Single records, in plain text: there may be millions of them ---------------------------------


def record_lines(examined: ExaminedRecord, width: int = 80) -> list[str]:
    """One record: where it is from, and what it contains."""
    record = examined.record
    lines = (f"rank {record.rank} step {record.step} {record.id}", f"  {_content(examined)}")
    return [
        part
        for line in lines
        for part in textwrap.wrap(
            line, width, subsequent_indent="    ", drop_whitespace=True, break_on_hyphens=False
        )
    ]


def _content(examined: ExaminedRecord) -> str:
    record = examined.record
    if not record.is_tensor:
        return str(record.value)
    words = [record.kind]
    words += ["no statistics"] if examined.statistics is None else _statistics(examined.statistics)
    if record.payload is not None:
        words.append(size(record.payload.nbytes))
    if record.alias_of is not None:
        words.append(f"shares memory with record {record.alias_of}")
    return "; ".join(words)


def _statistics(statistics: Statistics) -> Iterator[str]:
    names = {"minimum": "min", "maximum": "max", "mean": "mean", "l2": "l2"}
    yield " ".join(f"{name} {number(getattr(statistics, field))}" for field, name in names.items())
    infinities = statistics.positive_infinities + statistics.negative_infinities
    counts = (("zero", statistics.zeros), ("NaN", statistics.nans), ("Inf", infinities))
    found = ", ".join(f"{count} {name}" for name, count in counts if count)
    if found:
        yield found


def number(value: float | None) -> str:
    """Four digits, or a dash for None."""
    return "-" if value is None else f"{value:.4g}"


# --- A comparison of two dumps --------------------------------------------------------------------

MOST_ROWS = 24
_NEAR_THEIR_LIMITS = 6  # rows to show if all pass
_FOLLOWERS = 8  # rows to show that inherit their difference
ROW_COLUMNS = ("status", "item", "off by", "own", "came in", "worst / allowed")
ROW_LEGENDS = {
    "item": "item: without the common parts; the full name is in comparison.csv",
    "off by": "off by: norm of the difference / norm of the golden value, or a count of values",
    "own": "own, came in: the part that was added here, and the part from the inputs",
    "worst / allowed": "worst / allowed: in multiples of rounding noise",
}
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
    parts: list[RenderableType] = [_heading(_compared(comparison)), Text()]
    if comparison.rows:
        parts += [count_table(comparison), Text()]
    gravest = _gravest(comparison)
    if gravest:
        table = row_table(comparison, gravest)
        legend = [
            ROW_LEGENDS[str(column.header)]
            for column in table.columns[1:]
            if column.header in ROW_LEGENDS
        ]
        parts += [table, Text("\n".join(legend), style="dim"), Text()]
    # What a dump lacks is among the failures.
    problems = (
        listed(f"problem in {whose} dump", [one for one in dump.problems if one not in dump.losses])
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


def _compared(comparison: Comparison) -> Iterator[tuple[str, str]]:
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
    table = small_table()
    table.add_column("rows")
    for phase, level in kinds:
        table.add_column(f"{phase}\n{level}", justify="right")
    for status in reversed(Status):
        found = [counts[status, *kind] for kind in kinds]
        if any(found):
            style = STYLES[status]
            table.add_row(Text(status.value, style=style), *(str(count or "") for count in found))
    return table


# --- the gravest rows -----------------------------------------------------------------------------


def _gravest(comparison: Comparison) -> list[ComparisonRow]:
    """Rows to show: where it begins, then by gravity; those that only inherit it last."""
    begin = {one.row.index for one in beginnings(comparison)}
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
    begin = {one.row.index for one in beginnings(comparison)}
    followers = [row for row in rows if row.made == "before" and row.index not in begin]
    shown = rows[: min(MOST_ROWS, len(rows) - len(followers) + _FOLLOWERS)]
    shorten = _Shortening(comparison)
    lines: list[tuple[Text, ...]] = []
    for row in shown:
        status, _, value, off_by, worst = finding_cells(finding_of(row))
        item = Text("\n").join(filter(None, (Text(shorten(row)), value)))
        lines.append(
            (status, item, off_by, Text(_figure(row.own)), Text(_figure(row.inherited)), worst)
        )
    filled = [place for place in range(len(ROW_COLUMNS)) if any(line[place] for line in lines)]
    table = small_table()
    for place in filled:
        table.add_column(ROW_COLUMNS[place], overflow="fold", no_wrap=ROW_COLUMNS[place] != "item")
    for line in lines:
        table.add_row(*(line[place] for place in filled))
    more = len(rows) - len(shown)
    if more:
        left = min(more, len(followers))  # they come last
        words = f"{more} more" + (f", {left} of them inherit it" if left else "")
        table.add_row("", words, *("" for _ in filled[2:]))
    return table


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


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.1e}" if value else "0"


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
        yield indented(words, len(line) - len(words) - 2)
    yield from map(indented, (*_describe_place(row), *_describe_divergence(row, divergence)))
    yield indented(f"next: {row.advice or _NEXT[divergence.kind]}")


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
    said = divergence.reason in {"", row.reason}
    because = "" if said else f": {divergence.reason}"
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
    begin = {one.row.index for one in beginnings(comparison)}
    found = [
        finding_of(row)
        for row in comparison.rows
        if row.index not in begin
        # Rows without a counterpart are listed as unmatched.
        and row.my is not None
        and row.golden is not None
        and (row.status is Status.UNVERIFIED or not begin)
    ]
    yield from details(msgspec.structs.replace(verdict, findings=(*losses_of(comparison), *found)))
