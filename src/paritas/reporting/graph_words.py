"""A graph whose operators were checked, in the words that file, terminal and page share."""

from __future__ import annotations

import math
import re
from pathlib import PurePath
from typing import TYPE_CHECKING, NamedTuple

from paritas.numerics.findings import Status
from paritas.numerics.graph_reports import Outcome

if TYPE_CHECKING:
    from collections.abc import Iterable

    from paritas.numerics.graph_reports import GraphReport, OperatorResult, OptionResult

__all__ = [
    "MEANINGS",
    "ORDER",
    "Reason",
    "confirmation_words",
    "counted",
    "duration",
    "enumerated",
    "failing",
    "failing_options",
    "graph_label",
    "headline",
    "loss_gap",
    "option_words",
    "reasons",
    "short_name",
    "size_words",
    "verdict_word",
    "verdict_words",
]

# What needs a person first.
ORDER = (Outcome.FAILED, Outcome.UNSUPPORTED, Outcome.VERIFIED, Outcome.NOTHING)
MEANINGS = {
    Outcome.VERIFIED: "every split that was asked for was compared and is right",
    Outcome.NOTHING: "there is no split to compare, and the reason says why",
    Outcome.UNSUPPORTED: "could not be checked, and the reason says why",
    Outcome.FAILED: "a split computes something else than the whole operator",
}
_ENDED = {outcome: outcome.value for outcome in Outcome} | {
    Outcome.NOTHING: "with nothing to check"
}
_MINUTE = 60.0
_WORD = re.compile(r"\w+")


class Reason(NamedTuple):
    """Why calls ended as they did, with how many have it and the operators they call."""

    words: str
    calls: int
    operators: tuple[str, ...]


def headline(report: GraphReport) -> str:
    """How many calls ended how: `model.pt2: 36 calls, 25 verified, 1 failed, ...`."""
    parts = [f"{short_name(report)}: {counted(report.calls, 'call')}"]
    parts += [f"{count:,} {_ENDED[outcome]}" for outcome, count in report.counts().items() if count]
    return ", ".join(parts)


def short_name(report: GraphReport) -> str:
    """The file's name without its folders; other names as they are."""
    return PurePath(report.graph).name or report.graph


def graph_label(report: GraphReport, beside: Iterable[GraphReport]) -> str:
    """What a graph is called beside the others of its folder: its number, if names are alike."""
    same = sum(one.graph == report.graph for one in beside)
    return f"{report.graph} ({report.number})" if same > 1 else report.graph


def verdict_word(report: GraphReport) -> str:
    """The verdict in a word."""
    return {0: "verified", 1: "failed"}.get(report.exit_code, "unverified")


def verdict_words(report: GraphReport) -> str:
    """Why the verdict is what it is, in a sentence without its full stop."""
    counts = report.counts()
    verified = f"{counts[Outcome.VERIFIED]:,} of {counted(report.calls, 'call')} verified"
    if report.exit_code == 1:
        operators = len(failing(report))
        wrong = sum(len(failing_options(one, report)) for one in failing(report))
        splits = f" in {counted(wrong, 'split')}" if wrong else ""
        calls = counted(counts[Outcome.FAILED], "call")
        return f"{calls} of {counted(operators, 'operator')} wrong{splits}; {verified}"
    missing = report.calls - sum(counts.values())
    if not report.ended:
        return f"interrupted, {counted(max(0, missing), 'call')} not looked at; {verified}"
    if missing:
        return f"{counted(missing, 'call')} not accounted for; {verified}"
    if counts[Outcome.UNSUPPORTED]:
        return f"{counted(counts[Outcome.UNSUPPORTED], 'call')} could not be checked; {verified}"
    if not counts[Outcome.VERIFIED]:
        return "nothing was checked"
    rest = counts[Outcome.NOTHING]
    others = f", nothing to check in the other {rest:,}" if rest else ""
    return f"{verified}{others}; {counted(_splits(report), 'split')} compared"


def size_words(report: GraphReport) -> str:
    """How much there was to do and how long it took."""
    words = [counted(len(report.operators), "distinct operator"), counted(_splits(report), "split")]
    ranks = sorted({option.ranks for one in report.operators for option in one.options})
    if ranks:
        words[-1] += f" over {' and '.join(map(str, ranks))} ranks"
    words += _confirmed_words(report)
    words.append(duration(report.seconds))
    if report.resumed:
        words.append(f"{counted(report.resumed, 'operator')} taken over from an earlier run")
    if report.shared:
        verb = "was" if report.shared == 1 else "were"
        words.append(
            f"{counted(report.shared, 'operator')} {verb} verified before for another graph here"
        )
    return ", ".join(words)


def _confirmed_words(report: GraphReport) -> list[str]:
    """On how many splits real ranks were asked, and of how many they said no."""
    asked = [option.confirmation for one in report.operators for option in one.options]
    told = [one for one in asked if one is not None]
    found = []
    for backend in dict.fromkeys(one.backend for one in told):
        mine = [one for one in told if one.backend == backend]
        right = sum(one.status.passes(strict=report.strict) for one in mine)
        found.append(f"{right:,} of {len(asked):,} confirmed on {backend} ranks")
    return found


def _splits(report: GraphReport) -> int:
    return sum(len(one.options) for one in report.operators)


def failing(report: GraphReport) -> list[OperatorResult]:
    """The operators that are wrong, in the order of the graph."""
    return [one for one in report.operators if one.outcome is Outcome.FAILED]


def failing_options(one: OperatorResult, report: GraphReport) -> list[OptionResult]:
    """The splits of an operator that are wrong, gravest first; unstable ones too where strict."""
    bad = [
        option
        for option in one.options
        if option.status is not Status.UNVERIFIED and not option.status.passes(strict=report.strict)
    ]
    return sorted(bad, key=lambda option: -option.status.gravity)


def reasons(report: GraphReport, outcome: Outcome) -> list[Reason]:
    """Why calls ended so, those of most calls first; what is verified mostly needs no reason.

    Reasons that differ in the nodes they speak of are one: of a hundred backward passes, each says
    whose it is.
    """
    nodes = {site.node for one in report.operators for site in one.sites}
    found: dict[str, list[OperatorResult]] = {}
    for one in report.operators:
        if one.outcome is outcome and (one.reason or outcome is not Outcome.VERIFIED):
            found.setdefault(_without(nodes, one.reason), []).append(one)
    told = [
        Reason(
            # A reason of one operator alone keeps its names.
            words=(same[0].reason if len(same) == 1 else words) or "no reason is given",
            calls=sum(len(one.sites) for one in same),
            operators=tuple(dict.fromkeys(one.operator for one in same)),
        )
        for words, same in found.items()
    ]
    return sorted(told, key=lambda reason: -reason.calls)


def _without(nodes: set[str], reason: str) -> str:
    return _WORD.sub(lambda word: "..." if word.group() in nodes else word.group(), reason)


def option_words(option: OptionResult) -> str:
    """Which split: `idx 0, dim 1: split by k`."""
    place = f"idx {option.idx}, dim {option.dim}"
    return f"{place}: {option.split}" if option.split else place


def confirmation_words(option: OptionResult) -> str:
    """What simulated and real ranks said: `simulated identical, gloo equivalent`; else nothing."""
    told = option.confirmation
    return f"simulated {told.simulated}, {told.backend} {told.status}" if told else ""


def loss_gap(option: OptionResult) -> float | None:
    """The difference of the two losses, relative to that on one device; None without both.

    A loss that is NaN makes it NaN. It is infinite where the loss on one device is 0 and the other
    is not.
    """
    whole, split = option.loss_whole, option.loss_split
    if whole is None or split is None:
        return None
    if whole == split:
        return 0.0
    if math.isinf(whole) or math.isinf(split):
        return math.nan if math.isnan(whole + split) else math.inf
    return abs(split - whole) / abs(whole) if whole else abs(split - whole) * math.inf


def counted(count: int, thing: str) -> str:
    """`1 call`, `36 calls`."""
    return f"{count:,} {thing}{'' if count == 1 else 's'}"


def duration(seconds: float) -> str:
    """Seconds, or minutes and seconds where there are many."""
    if seconds < _MINUTE:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s"


def enumerated(items: Iterable[str], most: int = 3) -> str:
    """The first few, and how many more there are."""
    found = list(items)
    more = f" and {len(found) - most} more" if len(found) > most else ""
    return f"{', '.join(found[:most])}{more}"
