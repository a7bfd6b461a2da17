"""What a dump holds, as text for a terminal."""

from __future__ import annotations

import itertools
import textwrap
from typing import TYPE_CHECKING

from rich.console import Group
from rich.text import Text

from paritas.core.reporting.tables import Column, Mark, Rest, terminal_table
from paritas.core.reporting.terminal import (
    heading,
    indent_text,
    list_items,
    paragraph,
)
from paritas.core.results.wording import MOST_SHOWN, count_things, near_path, ranges, size

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import RenderableType
    from rich.table import Table

    from paritas.core.numerics.statistics import Statistics
    from paritas.formats.dumps.survey import (
        ChecksumFacts,
        DumpSummary,
        ExaminedRecord,
        NameFacts,
        NonFinite,
    )

# Above this many names, the rest share a row; names with a NaN or infinity keep theirs if possible.
MOST_NAMES = 40
WIDEST_NAME = 30  # a longer one is broken after its module
NAME_LEGEND = (
    "value, min, max: of the outputs, or of the inputs if no output is recorded\n"
    "NaN/Inf: the number of records that contain one"
)
_STATES = {"being written": "is still being written", "ended early": "was cut off, not closed"}


def dump_report(summary: DumpSummary) -> Group:
    """The whole report; print with `crop=False` to keep the last line in one piece."""
    parts: list[RenderableType] = [heading(_facts(summary)), Text()]
    if summary.names:
        records = count_things(summary.selected, "record")
        amount = f"{records} under {count_things(len(summary.names), 'name')}"
        read = summary.from_payloads
        source = f"; {read} have no statistics in the index, their values were read" if read else ""
        table = name_table(summary.names)
        parts += [Text(f"{amount}{source}"), table, Text(NAME_LEGEND, style="dim"), Text()]
    if summary.selected:
        parts += [*_finiteness(summary), Text()]
    lists = (list_items("problem", summary.problems, 0), list_items("note", summary.notes, 0))
    parts += paragraph(itertools.chain(*lists))
    parts.append(Text(dump_verdict_line(summary), no_wrap=True, overflow="ignore"))
    return Group(*parts)


def dump_verdict_line(summary: DumpSummary) -> str:
    """Whether the dump is complete and readable, in one line."""
    amount = (
        f"{count_things(summary.records, 'record')} of {count_things(len(summary.ranks), 'rank')}"
    )
    checked = "" if summary.checksums is None else f"; {_checksums(summary.checksums)}"
    if summary.problems:
        problems = count_things(len(summary.problems), "problem")
        return f"incomplete: {amount} can be read; {problems}{checked}"
    return f"{'complete' if summary.is_sound else 'unverified'}: {amount}{checked}"


def _checksums(checksum_facts: ChecksumFacts) -> str:
    if not checksum_facts.values:
        return "no stored values to check"
    of = f"of {count_things(checksum_facts.values, 'stored value')}"
    words = [
        f"{checksum_facts.fit} {of} match their checksums" if checksum_facts.fit else "",
        f"{checksum_facts.damaged} {of} damaged" if checksum_facts.damaged else "",
        f"{checksum_facts.without} {of} without a checksum "
        f"({', '.join(checksum_facts.endings)} files)"
        if checksum_facts.without
        else "",
    ]
    return ", ".join(filter(None, words))


# --- the heading ----------------------------------------------------------------------------------


def _facts(summary: DumpSummary) -> Iterator[tuple[str, str]]:
    header = summary.header
    yield "dump", near_path(summary.path)
    provenance = [header.program and f"of {near_path(header.program)}", header.created]
    provenance += [
        header.torch and f"torch {header.torch}",
        header.paritas and f"paritas {header.paritas}",
    ]
    yield "run", ", ".join([header.run, *filter(None, provenance)])
    yield "ranks", _ranks(summary)
    taps = "every node recorded, which may change the fusion" if header.taps else ""
    is_ours = summary.kind == "paritas"  # other tools do not record it
    fusion = f"fusion {header.fusion}" if is_ours and "fused" in summary.sources else ""
    sources = ", ".join(summary.sources or header.sources) or "none"
    yield "source", "; ".join(filter(None, [sources, fusion, taps]))
    kept_content = "statistics, no tensors" if header.data == "stats" else "tensors"
    yield "data", f"{kept_content}; layout {header.layout if is_ours else summary.kind}"
    if header.selection:
        yield "selection", "; ".join(f"{key} {words}" for key, words in header.selection.items())
    yield "steps", ranges(summary.steps) or "none"
    levels = ", ".join(f"{count} {level}" for level, count in summary.levels.items())
    others = summary.records - summary.tensors
    values = f"; {others} of them not tensors" if others else ""
    yield "records", f"{summary.records}{f' ({levels})' if levels else ''}{values}"
    yield "on disk", f"{size(summary.bytes_on_disk)} in {count_things(summary.files, 'file')}"
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
        records = count_things(facts.records, "record")
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
        of = f"{len(graphs)} of {count_things(len(summary.observed), 'graph')}"
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
    shown, folded = _fold_names(names)
    rows: list[NameFacts | Rest] = [*shown]
    if folded:
        records = sum(facts.records for facts in folded)
        rows.append(Rest((f"{len(folded)} more; use --layer GLOB", str(records))))
    return terminal_table(NAME_COLUMNS, rows, padding=(0, 0, 0, 0))


def _fold_names(names: Sequence[NameFacts]) -> tuple[list[NameFacts], list[NameFacts]]:
    """The names with a row of their own, and the rest."""
    if len(names) <= MOST_NAMES:
        return list(names), []
    # The first names show where it starts, so they stay even if many others are not finite.
    first = MOST_NAMES // 2
    places = sorted(
        range(len(names)),
        key=lambda name_index: name_index >= first and not names[name_index].non_finite,
    )
    kept_indices = set(places[:MOST_NAMES])
    shown = [facts for name_index, facts in enumerate(names) if name_index in kept_indices]
    return shown, [
        facts for name_index, facts in enumerate(names) if name_index not in kept_indices
    ]


def _name_words(facts: NameFacts) -> str:
    name = f"{facts.name} (backward)" if facts.phase == "backward" else facts.name
    module, slash, operator = name.rpartition("/")
    return f"{module}/\n {operator}" if slash and len(name) > WIDEST_NAME else name


def _kinds(facts: NameFacts) -> str:
    if not facts.kinds:
        return ""
    more = f" +{len(facts.kinds) - 1}" if len(facts.kinds) > 1 else ""
    return f"{facts.kinds[0]}{more}"


def _mark_non_finite(facts: NameFacts) -> Mark:
    return Mark(str(facts.non_finite) if facts.non_finite else "", "bold red")


def number(value: float | None) -> str:
    """Four digits, or a dash for None."""
    return "-" if value is None else f"{value:.4g}"


NAME_COLUMNS: tuple[Column[NameFacts], ...] = (
    Column("name", _name_words),
    Column("records", lambda facts: facts.records, "count"),
    Column("value", _kinds),
    Column("min", lambda facts: number(facts.minimum), "number", is_fixed=True),
    Column("max", lambda facts: number(facts.maximum), "number", is_fixed=True),
    Column("NaN/Inf", _mark_non_finite, "count"),
)


# --- the first NaN --------------------------------------------------------------------------------


def _finiteness(summary: DumpSummary) -> Iterator[RenderableType]:
    non_finite = summary.non_finite
    if not non_finite:
        has_numbers = any(facts.minimum is not None for facts in summary.names)
        yield Text("every value is finite" if has_numbers else "no statistics are available")
    for item in non_finite[:MOST_SHOWN]:
        yield from _non_finite(item)
    if len(non_finite) > MOST_SHOWN:
        yield Text(f"and {len(non_finite) - MOST_SHOWN} more on other ranks")


def _non_finite(item: NonFinite) -> Iterator[RenderableType]:
    site = item.site
    yield Text(f"first {item.kind}: rank {item.rank}, step {item.step}, {item.id}", style="bold")
    of_module = f" in {site.module}" if site.module and site.module != site.name else ""
    by = f"by {site.op or site.name}{of_module}"
    yield indent_text(f"{item.count} of {count_things(item.of, 'value')}, {by}")
    if site.nodes and site.nodes != (site.name,):
        kernel = f"; written by {site.kernel}" if site.kernel else ""
        yield indent_text(f"stands for {', '.join(site.nodes)}{kernel}")
    if site.line:
        yield indent_text(f"{near_path(site.line)}{f': {site.code}' if site.code else ''}")
    yield indent_text(_origin(item))


def _origin(item: NonFinite) -> str:
    inputs = f"{count_things(item.inputs, 'recorded input')} of this call"
    if item.origin == "made":
        finite = "is finite" if item.inputs == 1 else "are finite"
        cause = ", so its code or parameters caused it" if item.site.level == "module" else ""
        return f"made here: the {inputs} {finite}{cause}"
    tensors = f"{count_things(item.earlier, 'tensor')} {'was' if item.earlier == 1 else 'were'}"
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
    count_words = ", ".join(f"{count} {name}" for name, count in counts if count)
    if count_words:
        yield count_words
