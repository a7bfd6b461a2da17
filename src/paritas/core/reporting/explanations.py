"""One verdict explained: where it starts, what kind of wrong it is, a picture, what to do next."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from paritas.core.errors import UsageError, did_you_mean
from paritas.core.reporting.pictures import PictureDrawing
from paritas.core.reporting.tables import STYLES
from paritas.core.reporting.terminal import indent_text, last_line, list_items, with_near_paths
from paritas.core.results.causes import Cause, group_causes
from paritas.core.results.findings import OriginKind
from paritas.core.results.wording import (
    MOST_SHOWN,
    call_words,
    chain_words,
    finding_lines,
    item_words,
    origin_words,
    results_words,
    size_words,
    told_findings,
    value_words,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import RenderableType

    from paritas.core.results.findings import Finding, Pattern, Verdict

# Causes that are explained in full; the others have a line with their number.
MOST_EXPLAINED = 3


@dataclasses.dataclass(frozen=True)
class Fact:
    """One labelled line of a story; code is shown in a monospaced font."""

    label: str
    text: str
    code: str = ""


def cause_facts(cause: Cause) -> list[Fact]:
    """What is known about a cause, in the order in which it is told."""
    finding = cause.start
    return [fact for fact in (*_place_facts(finding), *_kind_facts(finding)) if fact.text]


def _place_facts(finding: Finding) -> Iterator[Fact]:
    origin = finding.origin
    source = finding.source or (origin.source if origin is not None else "")
    label = "starts at" if origin is not None else "at"
    yield Fact(label, source, origin.code if origin is not None else "")
    if origin is None:
        return
    if origin.kind is OriginKind.NODE:
        yield Fact("operator", call_words(origin) or f"node {origin.name}")
        yield Fact("module", origin.module)
    else:
        yield Fact("place", "; ".join(origin_words(origin)))
    yield Fact("from there", chain_words(origin))
    yield Fact("goes away", " or ".join(f"with {remedy}" for remedy in origin.remedies))


def _kind_facts(finding: Finding) -> Iterator[Fact]:
    diagnosis = finding.diagnosis
    best = None if diagnosis is None else diagnosis.best
    yield Fact("what", finding.reason)
    if best is not None:
        yield Fact("kind", f"{best.sentence} ({', '.join(_support(best))})")
    elif diagnosis is not None:
        why = diagnosis.note or "no simple error reproduces the candidate"
        yield Fact("kind", f"unknown: {why}")
    if diagnosis is not None and diagnosis.where is not None:
        yield Fact("where", diagnosis.where.sentence)
    sizes = [value_words(finding), *size_words(finding)]
    yield Fact("how far", ", ".join(filter(None, sizes)))
    metrics = finding.metrics
    if metrics is not None and metrics.max_abs_index is not None:
        yield Fact(
            "worst",
            f"{list(metrics.max_abs_index)}: candidate {metrics.max_abs_candidate:.9g}, "
            f"reference {metrics.max_abs_reference:.9g}",
        )


def _support(pattern: Pattern) -> list[str]:
    """How well a pattern reproduces the candidate, and how often it is right."""
    explained = pattern.evidence.get("explained")
    words = [f"{pattern.kind}"]
    if isinstance(explained, float):
        words.append(f"reproduces {100 * explained:.3g} % of the wrong elements")
    return [*words, f"confidence {pattern.confidence:.2g}"]


# --- The whole of it, for a terminal --------------------------------------------------------------


def choose_cause(verdict: Verdict, selector: str) -> Cause:
    """The cause with this number in the explanation, or the finding with this path.

    Raises:
        UsageError: there is no such number or path.
    """
    causes = group_causes(told_findings(verdict))
    if selector.isascii() and selector.isdigit():
        if 1 <= int(selector) <= len(causes):
            return causes[int(selector) - 1]
        numbers = f"the numbers are 1 to {len(causes)}" if len(causes) > 1 else "the only one is 1"
        there = numbers if causes else "nothing fails"
        raise UsageError(f"--finding {selector!r}: there is no such number; {there}")
    for cause in [*causes, *map(Cause, verdict.findings)]:
        if cause.start.path == selector:
            return cause
    near = did_you_mean(selector, [finding.path for finding in verdict.findings])
    raise UsageError(f"--finding {selector!r}: no finding has this path; {near}")


def explanation(verdict: Verdict, steps: Sequence[str], selector: str = "") -> Group:
    """The explanation of a verdict; print with `crop=False` to keep the first line in one piece.

    Args:
        steps: what to do next, a line each.
        selector: a number or path, if only one finding is to be explained.
    """
    causes = [choose_cause(verdict, selector)] if selector else group_causes(told_findings(verdict))
    parts: list[RenderableType] = [last_line(verdict)]
    for number, cause in enumerate(causes[:MOST_EXPLAINED], start=1):
        parts += [Text(), *_explain_cause(cause, "" if len(causes) == 1 else f"{number}. ")]
    others = causes[MOST_EXPLAINED:]
    if others:
        parts += [Text(), Text("others; --finding with the number explains one:")]
    for number, cause in enumerate(others[:MOST_SHOWN], start=MOST_EXPLAINED + 1):
        parts.append(indent_text(f"{number}. {finding_lines(cause.start)[0].strip()}"))
    if len(others) > MOST_SHOWN:
        parts.append(indent_text(f"and {len(others) - MOST_SHOWN} more"))
    if verdict.notes and not selector:
        parts += [Text(), *list_items("note", verdict.notes, 0)]
    if steps:
        parts += [Text(), Text("what to do next", style="bold"), *map(indent_text, steps)]
    return Group(*parts)


def _explain_cause(cause: Cause, number: str) -> Iterator[RenderableType]:
    finding = cause.start
    heading = f"{number}{item_words(finding)}: {finding.status.value}"
    yield Text(heading, style=STYLES[finding.status])
    near = dataclasses.replace(cause, start=with_near_paths(finding))
    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for fact in cause_facts(near):
        table.add_row(fact.label, Text(fact.text))
        if fact.code:
            table.add_row("", Text(f"    {fact.code}", style="bold"))
    yield Padding(table, (0, 0, 0, 2), expand=False)
    if finding.picture is not None:
        yield Text()
        yield Padding(PictureDrawing(finding.picture), (0, 0, 0, 2), expand=False)
    if cause.results:
        yield Text()
        yield indent_text(results_words(cause))
    if finding.advice:
        yield indent_text(finding.advice)


# --- What to do next ------------------------------------------------------------------------------


def next_steps(verdict: Verdict, *, script: str = "", shrink: str = "") -> list[str]:
    """What to do next, a line each; nothing unless something is wrong.

    Args:
        script: a script that shows the failure, if one was written.
        shrink: the command that writes one, if it is known.
    """
    causes = group_causes(verdict.failures)
    if verdict.exit_code != 1 or not causes:
        return []
    steps = []
    if not script and not any(cause.is_located or _is_of_a_part(cause) for cause in causes):
        steps.append(
            f"it is not known where {'it starts' if len(causes) == 1 else 'they start'}: run "
            "paritas verify with a longer --locate-seconds, or paritas run on the script that "
            "compiles the model; both look for the first wrong operator"
        )
    if script:
        steps.append(f"run the script that shows it: python {script}")
    elif shrink:
        steps.append(f"make the smallest script that shows it: {shrink}")
    elif any(not cause.is_located or _is_of_a_part(cause) for cause in causes):
        steps.append(
            "make the smallest script that shows it: paritas shrink package.module:factory, "
            "or verdict.shrink() in Python"
        )
    return steps


def _is_of_a_part(cause: Cause) -> bool:
    """Whether it is about a graph, a split or a step of training: these are located already."""
    item = cause.start.item
    return bool(item.graph or item.option or item.step) or item.part is not None
