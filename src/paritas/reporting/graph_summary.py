"""The operators of a graph for a terminal: what is wrong, what was not checked, the verdict.

For 80 columns and without colours, like `paritas.reporting.terminal`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.console import Group
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from paritas.numerics.graph_reports import Outcome
from paritas.numerics.wording import MOST_SHOWN
from paritas.reporting.graph_words import (
    confirmation_words,
    counted,
    enumerated,
    failing,
    failing_options,
    graph_label,
    headline,
    option_words,
    reasons,
    size_words,
    verdict_word,
    verdict_words,
)
from paritas.reporting.terminal import STYLES as STATUS_STYLES
from paritas.reporting.terminal import indented, listed, near_path

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult

    from paritas.numerics.graph_reports import GraphReport, OperatorResult, OptionResult

__all__ = ["render", "verdict_line"]

MOST_ROWS = 24
STYLES = {
    Outcome.VERIFIED: "green",
    Outcome.NOTHING: "dim",
    Outcome.UNSUPPORTED: "magenta",
    Outcome.FAILED: "bold red",
}
# Characters that a terminal obeys; the end of a line is not among them.
_OBEYED = dict.fromkeys((*range(0x0A), *range(0x0B, 0x20), *range(0x7F, 0xA0)), "\ufffd")
_VERDICTS = {"verified": "green", "failed": "bold red", "unverified": "magenta"}


def render(report: GraphReport, width: int = 80, *, files: Sequence[str] = ()) -> Group:
    """The whole of it, with the files it was written to; print with `crop=False`.

    Args:
        report: what was checked.
        width: of the terminal; a line of code is cut to what is left of it.
        files: where the results are, that for people first.
    """
    parts: list[RenderableType] = [Text(headline(report), style="bold"), Text(size_words(report))]
    for told in (
        _failures(report, width, Path(*files[:1]).parent),
        _grouped(report, Outcome.UNSUPPORTED, "could not be checked"),
        _grouped(report, Outcome.VERIFIED, "verified except for what each rank writes"),
        _grouped(report, Outcome.NOTHING, "nothing to check"),
        _beside(report),
        _remarks(report, files),
    ):
        lines = list(told)
        parts += [Text(), *lines] if lines else []
    return Group(_Printable(Group(*parts)), Text(), verdict_line(report))


class _Printable:
    """Names out of a file, which could hold what a terminal obeys: that is shown, not sent."""

    def __init__(self, shown: RenderableType) -> None:
        self._shown = shown

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for segment in console.render(self._shown, options):
            yield Segment(segment.text.translate(_OBEYED), segment.style)


def verdict_line(report: GraphReport) -> Text:
    """The verdict in one line, whole however narrow the terminal is."""
    word = verdict_word(report)
    words = f"{word}: {verdict_words(report)}"
    return Text(words, style=_VERDICTS[word], no_wrap=True, overflow="ignore")


# --- what is wrong --------------------------------------------------------------------------------


def _failures(report: GraphReport, width: int, folder: Path) -> Iterator[RenderableType]:
    found = failing(report)
    if not found:
        return
    pairs: list[tuple[OperatorResult, OptionResult | None]] = []
    for one in found:
        options = failing_options(one, report)
        pairs += [(one, option) for option in options] or [(one, None)]
    yield _failure_table(pairs, width)
    for one in found[:MOST_SHOWN]:
        yield Text()
        yield from _story(one, report, folder)
    if len(found) > MOST_SHOWN:
        yield Text(f"and {len(found) - MOST_SHOWN} more operators are wrong")


def _failure_table(
    pairs: list[tuple[OperatorResult, OptionResult | None]], width: int
) -> RenderableType:
    """A row for each split that is wrong: the call, the split, and the user's own line."""
    table = Table(
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        header_style="bold",
    )
    table.add_column("status", no_wrap=True)
    table.add_column("call and split", overflow="fold", max_width=width // 2)
    table.add_column("source line", overflow="fold")
    for one, option in pairs[:MOST_ROWS]:
        site = one.sites[0]
        table.add_row(
            _status(one, option),
            Text(f"{site.node}{_times(one)}\n{_split(option) if option else one.reason}"),
            Text("\n".join(filter(None, (near_path(site.source), site.code))) or "not known"),
        )
    if len(pairs) > MOST_ROWS:
        table.add_row("", f"{len(pairs) - MOST_ROWS} more", "")
    return table


def _status(one: OperatorResult, option: OptionResult | None) -> Text:
    if option is None:
        return Text(one.outcome.value, style=STYLES[one.outcome])
    return Text(option.status.value, style=STATUS_STYLES[option.status])


def _times(one: OperatorResult) -> str:
    return f" ({len(one.sites)} calls)" if len(one.sites) > 1 else ""


def _split(option: OptionResult) -> str:
    return f"{option_words(option)}, {option.ranks} ranks"


def _story(one: OperatorResult, report: GraphReport, folder: Path) -> Iterator[RenderableType]:
    """One operator in words: what, which split, the figures, the place, what to do."""
    yield Text(f"{one.sites[0].node}: {one.operator}", style=STYLES[Outcome.FAILED])
    yield indented(one.signature)
    options = failing_options(one, report)
    for option in options[:MOST_SHOWN]:
        yield indented(f"{_split(option)}: {option.status.value}")
        yield from (indented(words, 4) for words in _figures(option))
    if len(options) > MOST_SHOWN:
        yield indented(f"and {len(options) - MOST_SHOWN} more splits")
    if one.reason and not options:
        yield indented(one.reason)
    modules = list(dict.fromkeys(site.module for site in one.sites if site.module))
    if modules:
        yield indented(f"in module {enumerated(modules)}")
    if one.script:
        yield indented(f"run it by itself: python {near_path(str(folder / one.script))}")


def _figures(option: OptionResult) -> Iterator[str]:
    if option.reason:
        yield option.reason
    if option.confirmation is not None:
        yield f"ranks: {confirmation_words(option)}"
    if option.rule:
        yield f"rule, {option.origin}: {option.rule}"
    if option.loss_whole is not None and option.loss_split is not None:
        yield f"loss {option.loss_whole:.9g} on one device, {option.loss_split:.9g} on several"
    if option.gradients:
        yield option.gradients


# --- what was not checked -------------------------------------------------------------------------


def _grouped(report: GraphReport, outcome: Outcome, title: str) -> Iterator[RenderableType]:
    """The reasons of an outcome, each once, with how many calls have it and which operators."""
    found = reasons(report, outcome)
    if not found:
        return
    calls = sum(reason.calls for reason in found)
    yield Text(f"{title}: {counted(calls, 'call')}", style=STYLES[outcome])
    for reason in found[:MOST_SHOWN]:
        names = [name for name in reason.operators if name not in reason.words]
        which = f" ({enumerated(names)})" if names else ""
        yield indented(f"{reason.calls:,}: {reason.words}{which}")
    if len(found) > MOST_SHOWN:
        yield indented(f"and {len(found) - MOST_SHOWN} more reasons")


def _beside(report: GraphReport) -> Iterator[RenderableType]:
    """The other graphs of the folder, a line for each."""
    if not report.others:
        return
    graphs = (report, *report.others)
    yield Text(f"also in this folder: {counted(len(report.others), 'graph')}", style="bold")
    for one in report.others:
        words = f"{near_path(graph_label(one, graphs))}: {verdict_word(one)}, {verdict_words(one)}"
        yield indented(words)


def _remarks(report: GraphReport, files: Sequence[str]) -> Iterator[RenderableType]:
    yield from listed("note", report.notes)
    yield from (Text(f"wrote {near_path(name)}") for name in files)
