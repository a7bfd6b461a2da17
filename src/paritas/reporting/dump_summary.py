"""What is in a dump, for a terminal: the whole, its names, the first NaN, what is amiss.

For 80 columns and without colours, like `paritas.reporting.terminal`. The last line says in one
line whether everything could be read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich import box
from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from paritas.numerics.wording import MOST_SHOWN
from paritas.reporting.dump_records import number, size
from paritas.reporting.terminal import near_path

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import RenderableType

    from paritas.dumps.finiteness import NonFinite
    from paritas.dumps.summary import ChecksumFacts, DumpSummary, NameFacts, RankFacts

__all__ = ["dump_report", "last_line", "name_table", "ranges"]

# More names than this, and the rest of them share a row: not the first ones, nor, if they can
# be had, those with a NaN or an infinity.
MOST_NAMES = 40
COLUMNS = ("name", "records", "value", "min", "max", "NaN/Inf")
WIDEST_NAME = 30  # a longer one is broken behind its module
LEGEND = (
    "value, min, max: of the outputs, or of the inputs where no output is recorded\n"
    "NaN/Inf: how many of the records hold one"
)
_STATES = {"being written": "is still being written", "ended early": "was cut off, not closed"}


def dump_report(summary: DumpSummary) -> Group:
    """The whole of it; print with `crop=False`, so that the last line stays one line."""
    parts: list[RenderableType] = [_heading(summary), Text()]
    if summary.names:
        parts += [_chosen(summary), name_table(summary.names), Text(LEGEND, style="dim"), Text()]
    if summary.selected:
        parts += [*_finiteness(summary), Text()]
    told = [*_listed("problem", summary.problems), *_listed("note", summary.notes)]
    parts += [*told, *([Text()] if told else [])]
    parts.append(Text(last_line(summary), no_wrap=True, overflow="ignore"))
    return Group(*parts)


def last_line(summary: DumpSummary) -> str:
    """Whether all of it is there and readable, in one line."""
    amount = f"{_counted(summary.records, 'record')} of {_counted(len(summary.ranks), 'rank')}"
    checked = "" if summary.checksums is None else f"; {_checksums(summary.checksums)}"
    if summary.problems:
        problems = _counted(len(summary.problems), "problem")
        return f"incomplete: {amount} can be read; {problems}{checked}"
    return f"{'complete' if summary.is_sound else 'unverified'}: {amount}{checked}"


def _checksums(found: ChecksumFacts) -> str:
    if not found.values:
        return "there are no stored values to check"
    of = f"of {_counted(found.values, 'stored value')}"
    words = [
        f"{found.fit} {of} match their checksums" if found.fit else "",
        f"{found.damaged} {of} damaged" if found.damaged else "",
        f"{found.without} {of} without a checksum ({', '.join(found.endings)} files)"
        if found.without
        else "",
    ]
    return ", ".join(filter(None, words))


# --- the whole ------------------------------------------------------------------------------------


def _heading(summary: DumpSummary) -> RenderableType:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True, style="bold")
    grid.add_column(overflow="fold")
    for label, words in _facts(summary):
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
    taps = "every node tapped, which may change the fusion" if header.taps else ""
    is_ours = summary.kind == "paritas"  # of others' it is not known
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
    values = f"; {others} of them no tensor" if others else ""
    yield "records", f"{summary.records}{f' ({levels})' if levels else ''}{values}"
    yield "on disk", f"{size(summary.bytes_on_disk)} in {_counted(summary.files, 'file')}"
    if summary.payload_bytes:
        yield "dedupe", _dedupe(summary)
    if summary.checksums is not None:
        yield "checksums", _checksums(summary.checksums)
    if summary.observed:
        yield "observation", _observation(summary)


def _ranks(summary: DumpSummary) -> str:
    there = ranges([(facts.rank, facts.rank) for facts in summary.ranks])
    words = [f"{there} (the run has {summary.header.world_size})"]
    if summary.missing:
        words.append(f"nothing of {ranges([(rank, rank) for rank in summary.missing])}")
    unclosed = [facts for facts in summary.ranks if facts.state != "closed"]
    words += [_unclosed(facts) for facts in unclosed[:MOST_SHOWN]]
    if len(unclosed) > MOST_SHOWN:
        words.append(f"{len(unclosed) - MOST_SHOWN} more are not closed")
    return "; ".join(words if unclosed else [*words, "closed"])


def _unclosed(facts: RankFacts) -> str:
    end = f"the last is {facts.last} of step {facts.last_step}" if facts.last else "none at all"
    counted = _counted(facts.records, "record")
    return f"rank {facts.rank} {_STATES[facts.state]} ({counted}, {end})"


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
        of = f"{len(graphs)} of {_counted(len(summary.observed), 'graph')}"
        told = {
            "changed": f"recording CHANGED the outputs of {of}",
            "unchecked": f"not known of {of} whether recording changed the outputs",
            "unchanged": f"recording did not change the outputs of {of}",
        }[status]
        words.append(f"{told}{': ' if named else ''}{', '.join(named)}")
    return "; ".join(words)


# --- names ----------------------------------------------------------------------------------------


def _chosen(summary: DumpSummary) -> RenderableType:
    counted = f"{_counted(summary.selected, 'record')} under {_counted(len(summary.names), 'name')}"
    read = summary.from_payloads
    source = (
        f"; statistics of {read} were not in the index and taken from the values" if read else ""
    )
    return Text(f"{counted}{source}")


def name_table(names: Sequence[NameFacts]) -> Table:
    """One row per name, in the order in which they were first recorded."""
    table = Table(
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=0,
        header_style="bold",
    )
    for column in COLUMNS:
        table.add_column(
            column,
            justify="left" if column in {"name", "value"} else "right",
            overflow="fold",
            no_wrap=column in {"min", "max"},
        )
    shown, folded = _fold(names)
    for facts in shown:
        bad = Text(str(facts.non_finite) if facts.non_finite else "", style="bold red")
        ends = (number(facts.minimum), number(facts.maximum))
        table.add_row(Text(_name(facts)), str(facts.records), Text(_kinds(facts)), *ends, bad)
    if folded:
        more = f"{len(folded)} more; --layer GLOB chooses"
        table.add_row(more, str(sum(facts.records for facts in folded)), "", "", "", "")
    return table


def _fold(names: Sequence[NameFacts]) -> tuple[list[NameFacts], list[NameFacts]]:
    """Which have a row of their own, and which share one."""
    if len(names) <= MOST_NAMES:
        return list(names), []
    # The first ones tell where it starts, so they stay even where most are not finite.
    first = MOST_NAMES // 2
    places = sorted(
        range(len(names)), key=lambda place: place >= first and not names[place].non_finite
    )
    kept = set(places[:MOST_NAMES])
    shown = [facts for place, facts in enumerate(names) if place in kept]
    return shown, [facts for place, facts in enumerate(names) if place not in kept]


def _name(facts: NameFacts) -> str:
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
        yield Text("every value is finite" if _has_numbers(summary) else "no statistics to go by")
    for item in found[:MOST_SHOWN]:
        yield from _non_finite(item)
    if len(found) > MOST_SHOWN:
        yield Text(f"and {len(found) - MOST_SHOWN} more on other ranks")


def _has_numbers(summary: DumpSummary) -> bool:
    return any(facts.minimum is not None for facts in summary.names)


def _non_finite(item: NonFinite) -> Iterator[RenderableType]:
    site = item.site
    yield Text(f"first {item.kind}: rank {item.rank}, step {item.step}, {item.id}", style="bold")
    of_module = f" in {site.module}" if site.module and site.module != site.name else ""
    by = f"by {site.op or site.name}{of_module}"
    yield _indented(f"{item.count} of {_counted(item.of, 'value')}, {by}")
    if site.nodes and site.nodes != (site.name,):
        kernel = f"; written by {site.kernel}" if site.kernel else ""
        yield _indented(f"stands for {', '.join(site.nodes)}{kernel}")
    if site.line:
        yield _indented(f"{near_path(site.line)}{f': {site.code}' if site.code else ''}")
    yield _indented(_origin(item))


def _origin(item: NonFinite) -> str:
    inputs = f"{_counted(item.inputs, 'recorded input')} of this call"
    if item.origin == "made":
        finite = "is finite" if item.inputs == 1 else "are finite"
        module = ", so its code or its parameters did it" if item.site.level == "module" else ""
        return f"made here: the {inputs} {finite}{module}"
    tensors = f"{_counted(item.earlier, 'tensor')} {'was' if item.earlier == 1 else 'were'}"
    earlier = f"{tensors} recorded before it"
    if item.origin == "unknown":
        return f"made here or not: no input of this call is recorded; {earlier}"
    if item.is_given:
        return f"not made here: the call was given it; {earlier}"
    verb = "is" if item.bad_inputs == 1 else "are"
    return f"not made here: {item.bad_inputs} of the {inputs} {verb} not finite"


# --- words ----------------------------------------------------------------------------------------


def _counted(count: int, thing: str) -> str:
    return f"{count} {thing}{'' if count == 1 else 's'}"


def ranges(spans: Sequence[tuple[int, int]]) -> str:
    """First and last of each, with those that adjoin made one: `0-3, 7`."""
    joined: list[list[int]] = []
    for first, last in spans:
        if joined and joined[-1][1] == first - 1:
            joined[-1][1] = last
        else:
            joined.append([first, last])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in joined)


def _listed(label: str, items: Sequence[str]) -> Iterator[RenderableType]:
    for item in items[:MOST_SHOWN]:
        yield Text(f"{label}: {item}")
    if len(items) > MOST_SHOWN:
        yield Text(f"{label}: {len(items) - MOST_SHOWN} more")


def _indented(words: str) -> RenderableType:
    return Padding(Text(words), (0, 0, 0, 2), expand=False)
