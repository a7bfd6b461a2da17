"""A checked graph in words, for the terminal, files and pages."""

from __future__ import annotations

import functools
import math
import re
from collections import Counter
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, NamedTuple

from rich.console import Group
from rich.segment import Segment
from rich.text import Text

from paritas.core.errors import plain
from paritas.core.reporting.annotations import (
    Account,
    ItemAnnotation,
    Level,
    level_of,
    locate_source,
)
from paritas.core.reporting.table_files import csv_table
from paritas.core.reporting.tables import STATUS_MARKS, Column, Mark, Rest, terminal_table
from paritas.core.reporting.terminal import indent_text, list_items
from paritas.core.results import wording
from paritas.core.results.findings import Status
from paritas.core.results.wording import (
    MOST_SHOWN,
    list_first,
    near_path,
)
from paritas.sharding.graphs.rows import CallOutcome
from paritas.sharding.rows import status_of_proof

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult

    from paritas.core.reporting.tables import CellValue, ColumnKind
    from paritas.sharding.graphs.rows import GraphReport, OperatorResult, OptionResult

# Outcomes that need attention first.
ORDER = (CallOutcome.FAILED, CallOutcome.UNSUPPORTED, CallOutcome.VERIFIED, CallOutcome.NOTHING)
MEANINGS = {
    CallOutcome.VERIFIED: "every requested split was compared and is right",
    CallOutcome.NOTHING: "there is no split to compare; see the reason",
    CallOutcome.UNSUPPORTED: "could not be checked; see the reason",
    CallOutcome.FAILED: "a split does not compute what the whole operator computes",
}
_ENDED = {outcome: outcome.value for outcome in CallOutcome} | {
    CallOutcome.NOTHING: "with nothing to check"
}
_MINUTE = 60.0
_MOST_NAMES = 3
# `1 call`, `12,000 calls`.
count_things = functools.partial(wording.count_things, thousands=",")
_WORD = re.compile(r"\w+")


class Reason(NamedTuple):
    """The reason for an outcome, with the number of calls and their operators."""

    words: str
    calls: int
    operators: tuple[str, ...]


def graph_headline(report: GraphReport) -> str:
    """The number of calls by outcome: `model.pt2: 36 calls, 25 verified, 1 failed, ...`."""
    parts = [f"{short_name(report)}: {count_things(report.calls, 'call')}"]
    parts += [f"{count:,} {_ENDED[outcome]}" for outcome, count in report.counts().items() if count]
    return ", ".join(parts)


def short_name(report: GraphReport) -> str:
    """The file name without folders; other names unchanged."""
    return PurePath(report.graph).name or report.graph


def graph_label(report: GraphReport, beside: Iterable[GraphReport]) -> str:
    """The name of a graph among those of its folder; with its number if names are equal."""
    same = sum(other_report.graph == report.graph for other_report in beside)
    return f"{report.graph} ({report.number})" if same > 1 else report.graph


def verdict_word(report: GraphReport) -> str:
    """The verdict in one word."""
    return {0: "verified", 1: "failed"}.get(report.exit_code, "unverified")


def verdict_words(report: GraphReport) -> str:
    """The reason for the verdict, as a sentence without a full stop."""
    counts = report.counts()
    verified = f"{counts[CallOutcome.VERIFIED]:,} of {count_things(report.calls, 'call')} verified"
    if report.exit_code == 1 and not failing(report) and report.proof is not None:
        return f"the placements are wrong: {report.proof.words}"
    if report.exit_code == 1:
        operators = len(failing(report))
        wrong = sum(
            len(failing_options(operator_result, report)) for operator_result in failing(report)
        )
        splits = f" in {count_things(wrong, 'split')}" if wrong else ""
        calls = count_things(counts[CallOutcome.FAILED], "call")
        return f"{calls} of {count_things(operators, 'operator')} wrong{splits}; {verified}"
    missing = report.calls - sum(counts.values())
    if not report.ended:
        return f"interrupted, {count_things(max(0, missing), 'call')} not checked yet; {verified}"
    if missing:
        return f"{count_things(missing, 'call')} not accounted for; {verified}"
    if counts[CallOutcome.UNSUPPORTED]:
        calls = count_things(counts[CallOutcome.UNSUPPORTED], "call")
        return f"{calls} could not be checked; {verified}"
    if report.proof is not None and report.proof.status == "not decided":
        return f"the graph under its placements is {report.proof.words}; {verified}"
    if not counts[CallOutcome.VERIFIED]:
        return "nothing was checked"
    rest = counts[CallOutcome.NOTHING]
    others = f", nothing to check in the other {rest:,}" if rest else ""
    compared = f"{count_things(_count_splits(report), 'split')} compared"
    return "; ".join([f"{verified}{others}", compared, *_proved_words(report)])


def _proved_words(report: GraphReport) -> list[str]:
    """How many splits are proved over the real numbers, and whether the graph is."""
    proofs = [
        option.proof for operator in report.operators for option in operator.options if option.proof
    ]
    words = []
    if proofs:
        proved = sum(proof.status == "proved" for proof in proofs)
        words.append(f"{proved:,} of {len(proofs):,} proved over the reals")
    if report.proof is not None and report.proof.status == "proved":
        words.append("the graph under its placements is proved over the reals")
    return words


def size_words(report: GraphReport) -> str:
    """The amount of work and the time it took."""
    words = [
        count_things(len(report.operators), "distinct operator"),
        count_things(_count_splits(report), "split"),
    ]
    ranks = sorted({option.ranks for operator in report.operators for option in operator.options})
    if ranks:
        words[-1] += f" over {' and '.join(map(str, ranks))} ranks"
    words += _confirmed_words(report)
    words.append(duration(report.seconds))
    if report.resumed:
        words.append(f"{count_things(report.resumed, 'operator')} from an earlier run")
    if report.shared:
        words.append(
            f"{count_things(report.shared, 'operator')} already verified for another graph here"
        )
    return ", ".join(words)


def _confirmed_words(report: GraphReport) -> list[str]:
    """How many splits real ranks confirmed, by backend."""
    options = [option for operator in report.operators for option in operator.options]
    confirmed: Counter[str] = Counter()
    for option in options:
        if option.confirmation is not None:
            passes = option.confirmation.status.passes(strict=report.strict)
            confirmed[option.confirmation.backend] += int(passes)
    return [
        f"{count:,} of {len(options):,} confirmed on {backend} ranks"
        for backend, count in confirmed.items()
    ]


def _count_splits(report: GraphReport) -> int:
    return sum(len(operator.options) for operator in report.operators)


def failing(report: GraphReport) -> list[OperatorResult]:
    """The operators that failed, in the order of the graph."""
    return [operator for operator in report.operators if operator.outcome is CallOutcome.FAILED]


def failing_options(operator_result: OperatorResult, report: GraphReport) -> list[OptionResult]:
    """The wrong splits of an operator, gravest first; unstable ones too if strict."""
    bad = [
        option
        for option in operator_result.options
        if option.status is not Status.UNVERIFIED and not option.status.passes(strict=report.strict)
    ]
    return sorted(bad, key=lambda option: -option.status.gravity)


def reasons(report: GraphReport, outcome: CallOutcome) -> list[Reason]:
    """The reasons for an outcome, those with most calls first; verified calls may have none.

    Reasons that differ only in the names of nodes are merged: each of a hundred backward passes
    names its own forward node.
    """
    nodes = {site.node for operator_result in report.operators for site in operator_result.sites}

    def mask(word: re.Match[str]) -> str:
        return "..." if word.group() in nodes else word.group()

    operators_by_reason: dict[str, list[OperatorResult]] = {}
    for operator in report.operators:
        if operator.outcome is outcome and (operator.reason or outcome is not CallOutcome.VERIFIED):
            operators_by_reason.setdefault(_WORD.sub(mask, operator.reason), []).append(operator)
    merged = [
        Reason(
            # The reason of a single operator keeps its names.
            words=(same[0].reason if len(same) == 1 else words) or "no reason is given",
            calls=sum(len(operator_result.sites) for operator_result in same),
            operators=tuple(dict.fromkeys(operator_result.operator for operator_result in same)),
        )
        for words, same in operators_by_reason.items()
    ]
    return sorted(merged, key=lambda reason: -reason.calls)


def option_words(option: OptionResult) -> str:
    """The split in words: `idx 0, dim 1: split by k`."""
    position = f"idx {option.idx}, dim {option.dim}"
    return f"{position}: {option.split}" if option.split else position


def confirmation_words(option: OptionResult) -> str:
    """The status on simulated and real ranks: `simulated identical, gloo equivalent`; or empty."""
    both = option.confirmation
    return f"simulated {both.simulated}, {both.backend} {both.status}" if both else ""


def proof_words(option: OptionResult) -> str:
    """What is known for all shapes; empty if it was not asked for."""
    return option.proof.words if option.proof is not None else ""


def loss_gap(option: OptionResult) -> float | None:
    """The relative difference of the loss on several devices to that on one; None without both.

    It is NaN if a loss is NaN, and infinite if only the loss on one device is 0.
    """
    unsplit_loss, split = option.loss_whole, option.loss_split
    if unsplit_loss is None or split is None:
        return None
    if unsplit_loss == split:
        return 0.0
    if math.isinf(unsplit_loss) or math.isinf(split):
        return math.nan if math.isnan(unsplit_loss + split) else math.inf
    return (
        abs(split - unsplit_loss) / abs(unsplit_loss)
        if unsplit_loss
        else abs(split - unsplit_loss) * math.inf
    )


def duration(seconds: float) -> str:
    """Seconds, or minutes and seconds."""
    if seconds < _MINUTE:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s"


# --- The report for a terminal --------------------------------------------------------------------

MOST_ROWS = 24
OUTCOME_MARKS = {
    outcome: Mark(outcome.value, style, f"o-{outcome.name.lower()}", sign)
    for outcome, style, sign in (
        (CallOutcome.VERIFIED, "green", "✓"),
        (CallOutcome.NOTHING, "dim", "–"),
        (CallOutcome.UNSUPPORTED, "magenta", "?"),
        (CallOutcome.FAILED, "bold red", "≠"),
    )
}
# Control characters other than the newline.
_CONTROLS = dict.fromkeys((*range(0x0A), *range(0x0B, 0x20), *range(0x7F, 0xA0)), "\ufffd")
_VERDICT_STYLES = {"verified": "green", "failed": "bold red", "unverified": "magenta"}
_PROOF_VERDICTS = {"proved": "verified", "refuted": "failed", "not decided": "unverified"}


def graph_report(report: GraphReport, width: int = 80, *, files: Sequence[str] = ()) -> Group:
    """The whole report with the files it was written to; print with `crop=False`."""
    parts: list[RenderableType] = [
        Text(graph_headline(report), style="bold"),
        Text(size_words(report)),
    ]
    for section in (
        _graph_proof(report),
        _failures(report, width, Path(*files[:1]).parent),
        _group_reasons(report, CallOutcome.UNSUPPORTED, "could not be checked"),
        _group_reasons(report, CallOutcome.VERIFIED, "verified except for what each rank writes"),
        _group_reasons(report, CallOutcome.NOTHING, "nothing to check"),
        _other_graphs(report),
        (*list_items("note", report.notes), *(Text(f"wrote {near_path(name)}") for name in files)),
    ):
        lines = list(section)
        parts += [Text(), *lines] if lines else []
    return Group(_Printable(Group(*parts)), Text(), graph_verdict_line(report))


class _Printable:
    """Replaces control characters, which names from a file may contain."""

    def __init__(self, shown: RenderableType) -> None:
        self._shown = shown

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for segment in console.render(self._shown, options):
            yield Segment(segment.text.translate(_CONTROLS), segment.style)


def graph_verdict_line(report: GraphReport) -> Text:
    """The verdict in one line, which is never wrapped."""
    word = verdict_word(report)
    words = f"{word}: {verdict_words(report)}"
    return Text(words, style=_VERDICT_STYLES[word], no_wrap=True, overflow="ignore")


def _graph_proof(report: GraphReport) -> Iterator[RenderableType]:
    proof = report.proof
    if proof is None:
        return
    style = _VERDICT_STYLES[_PROOF_VERDICTS[proof.status]]
    yield Text(f"the graph under its placements: {proof.status}", style=style)
    yield indent_text(proof.words)


# --- failures -------------------------------------------------------------------------------------


def _failures(report: GraphReport, width: int, folder: Path) -> Iterator[RenderableType]:
    failing_operators = failing(report)
    if not failing_operators:
        return
    pairs: list[_Failure] = []
    for operator_result in failing_operators:
        options = failing_options(operator_result, report)
        pairs += [(operator_result, option) for option in options] or [(operator_result, None)]
    yield _failure_table(pairs, width)
    for operator_result in failing_operators[:MOST_SHOWN]:
        yield Text()
        yield from _story(operator_result, report, folder)
    if len(failing_operators) > MOST_SHOWN:
        yield Text(f"and {len(failing_operators) - MOST_SHOWN} more operators are wrong")


# A wrong split, or an operator that fails without one.
_Failure = tuple["OperatorResult", "OptionResult | None"]


def _failure_table(failures: list[_Failure], width: int) -> RenderableType:
    """A row for each wrong split: the call, the split, and the user's source line."""
    columns: list[Column[_Failure]] = [
        Column("status", _mark_failure, is_fixed=True),
        Column("call and split", _call_words, width=width // 2),
        Column("source line", _source_words),
    ]
    rows: list[_Failure | Rest] = [*failures[:MOST_ROWS]]
    if len(failures) > MOST_ROWS:
        rows.append(Rest(("", f"{len(failures) - MOST_ROWS} more")))
    return terminal_table(columns, rows)


def _mark_failure(failure: _Failure) -> Mark:
    operator, option = failure
    if option is None:
        return OUTCOME_MARKS[operator.outcome]
    return STATUS_MARKS[option.status]


def _call_words(failure: _Failure) -> str:
    operator, option = failure
    calls = f" ({len(operator.sites)} calls)" if len(operator.sites) > 1 else ""
    split = _split_words(option) if option else operator.reason
    return f"{operator.sites[0].node}{calls}\n{split}"


def _source_words(failure: _Failure) -> str:
    site = failure[0].sites[0]
    return "\n".join(filter(None, (near_path(site.source), site.code))) or "not known"


def _split_words(option: OptionResult) -> str:
    return f"{option_words(option)}, {option.ranks} ranks"


def _story(
    operator_result: OperatorResult, report: GraphReport, folder: Path
) -> Iterator[RenderableType]:
    """One operator in words: what, which split, the figures, where, what to do."""
    yield Text(
        f"{operator_result.sites[0].node}: {operator_result.operator}",
        style=OUTCOME_MARKS[CallOutcome.FAILED].style,
    )
    yield indent_text(operator_result.signature)
    options = failing_options(operator_result, report)
    for option in options[:MOST_SHOWN]:
        yield indent_text(f"{_split_words(option)}: {option.status.value}")
        yield from (indent_text(words, 4) for words in _figures(option))
    if len(options) > MOST_SHOWN:
        yield indent_text(f"and {len(options) - MOST_SHOWN} more splits")
    if operator_result.reason and not options:
        yield indent_text(operator_result.reason)
    modules = list(dict.fromkeys(site.module for site in operator_result.sites if site.module))
    if modules:
        yield indent_text(f"in module {list_first(modules, _MOST_NAMES)}")
    if operator_result.script:
        yield indent_text(f"reproduce it: python {near_path(str(folder / operator_result.script))}")


def _figures(option: OptionResult) -> Iterator[str]:
    if option.reason:
        yield option.reason
    if option.confirmation is not None:
        yield f"ranks: {confirmation_words(option)}"
    if option.proof is not None:
        yield option.proof.words
    if option.rule:
        yield f"rule, {option.origin}: {option.rule}"
    if option.loss_whole is not None and option.loss_split is not None:
        yield f"loss {option.loss_whole:.9g} on one device, {option.loss_split:.9g} on several"
    if option.gradients:
        yield option.gradients


# --- what was not checked -------------------------------------------------------------------------


def _group_reasons(
    report: GraphReport, outcome: CallOutcome, title: str
) -> Iterator[RenderableType]:
    """The reasons for an outcome, each with its number of calls and its operators."""
    outcome_reasons = reasons(report, outcome)
    if not outcome_reasons:
        return
    calls = sum(reason.calls for reason in outcome_reasons)
    yield Text(f"{title}: {count_things(calls, 'call')}", style=OUTCOME_MARKS[outcome].style)
    for reason in outcome_reasons[:MOST_SHOWN]:
        names = [name for name in reason.operators if name not in reason.words]
        which = f" ({list_first(names, _MOST_NAMES)})" if names else ""
        yield indent_text(f"{reason.calls:,}: {reason.words}{which}")
    if len(outcome_reasons) > MOST_SHOWN:
        yield indent_text(f"and {len(outcome_reasons) - MOST_SHOWN} more reasons")


def _other_graphs(report: GraphReport) -> Iterator[RenderableType]:
    """A line for each other graph of the folder."""
    if not report.others:
        return
    graphs = (report, *report.others)
    yield Text(f"also in this folder: {count_things(len(report.others), 'graph')}", style="bold")
    for other_report in report.others:
        words = (
            f"{near_path(graph_label(other_report, graphs))}: "
            f"{verdict_word(other_report)}, {verdict_words(other_report)}"
        )
        yield indent_text(words)


# --- A table as CSV -------------------------------------------------------------------------------


class SplitLine(NamedTuple):
    """A split of an operator, or an operator without splits."""

    graph: str
    operator: OperatorResult
    option: OptionResult | None


def graph_csv(report: GraphReport) -> str:
    """The whole table of `GRAPH_COLUMNS` without a final newline; this run's graph comes first."""
    graphs = (report, *report.others)
    lines = [
        SplitLine(graph_label(graph, graphs), operator, option)
        for graph in graphs
        for operator in graph.operators
        for option in operator.options or (None,)
    ]
    return csv_table(GRAPH_COLUMNS, lines)


def _operator_column(
    name: str, cell: Callable[[OperatorResult], CellValue], kind: ColumnKind = "text"
) -> Column[SplitLine]:
    return Column(name, lambda line: cell(line.operator), kind)


def _option_column(
    name: str, cell: Callable[[OptionResult], CellValue], kind: ColumnKind = "text"
) -> Column[SplitLine]:
    return Column(name, lambda line: None if line.option is None else cell(line.option), kind)


GRAPH_COLUMNS: tuple[Column[SplitLine], ...] = (
    Column("graph", lambda line: line.graph),
    _operator_column("node", lambda operator: operator.sites[0].node),
    _operator_column("operator", lambda operator: operator.operator),
    _operator_column("signature", lambda operator: operator.signature),
    _operator_column("calls", lambda operator: len(operator.sites), "count"),
    _operator_column("source", lambda operator: operator.sites[0].source),
    _operator_column("code", lambda operator: operator.sites[0].code),
    _operator_column("module", lambda operator: operator.sites[0].module),
    _operator_column("outcome", lambda operator: operator.outcome.value),
    _option_column("option", option_words),
    _option_column("rule", lambda option: option.rule),
    _option_column("origin", lambda option: option.origin),
    _option_column("ranks", lambda option: option.ranks, "count"),
    _option_column("status", lambda option: option.status.value),
    _option_column("confirmation", confirmation_words),
    _option_column("proof", proof_words),
    _option_column("loss_one_device", lambda option: option.loss_whole, "number"),
    _option_column("loss_several_devices", lambda option: option.loss_split, "number"),
    _option_column("loss_relative_difference", loss_gap, "number"),
    _option_column("gradients", lambda option: option.gradients),
    Column("reason", lambda line: (line.option or line.operator).reason),
    Column("seconds", lambda line: (line.option or line.operator).seconds, "number"),
    _operator_column("script", lambda operator: operator.script),
    _operator_column("other_nodes", lambda operator: " ".join(s.node for s in operator.sites[1:])),
)


# --- For GitHub, SARIF and JUnit ------------------------------------------------------------------

_LONGEST_REASON = 160


def graph_account(report: GraphReport, *, subject: str, file: str = "") -> Account:
    """The result of `verify-graph`: an item for each split of each distinct operator."""
    words = f"{verdict_word(report)}: {verdict_words(report)}"
    return Account(
        command="verify-graph",
        subject=subject,
        headline=words,
        exit_code=report.exit_code,
        items=(
            *_annotate_proof(report),
            *(
                annotation
                for op in report.operators
                for annotation in _annotate_operator(op, report)
            ),
        ),
        file=file,
    )


def _annotate_proof(report: GraphReport) -> Iterator[ItemAnnotation]:
    """The graph as a whole, if its placements are stated."""
    if report.proof is not None:
        status, item = status_of_proof(report.proof.status), "the graph under its placements"
        yield ItemAnnotation(
            level=level_of(status, strict=report.strict),
            rule=status.value,
            item=item,
            title=f"{item}: {report.proof.status}",
            message=plain(report.proof.words),
        )


def _annotate_operator(
    operator_result: OperatorResult, report: GraphReport
) -> Iterator[ItemAnnotation]:
    site = operator_result.sites[0]
    path, outside, line = locate_source(site.source)
    calls = len(operator_result.sites)
    where = f"{site.node}: {operator_result.operator}"
    same = f"the graph has {calls} calls like this one" if calls > 1 else ""

    def annotation(level: Level, status: str, item: str, *words: str) -> ItemAnnotation:
        text = [words for words in (*words, operator_result.signature, same) if words]
        return ItemAnnotation(
            level=level,
            rule=status,
            item=plain(item),
            title=plain(f"{item}: {status}"),
            message=plain("\n".join(text)),
            path=plain(path),
            outside=plain(outside),
            line=line,
            code=plain(site.code),
            place=plain(site.module),
        )

    for option in operator_result.options:
        item = f"{where}, {option_words(option)}, {option.ranks} ranks"
        level = level_of(option.status, strict=report.strict)
        script = (
            f"reproduced by {operator_result.script}"
            if operator_result.script and level == "error"
            else ""
        )
        rule = f"rule ({option.origin}): {option.rule}"
        proof = proof_words(option)
        yield annotation(level, option.status.value, item, option.reason, proof, rule, script)
    levels = {level_of(option.status, strict=report.strict) for option in operator_result.options}
    if operator_result.outcome is CallOutcome.NOTHING:
        yield annotation("note", "skipped", where, operator_result.reason)
    elif operator_result.outcome is CallOutcome.VERIFIED and not operator_result.options:
        yield annotation("pass", Status.EQUIVALENT.value, where, operator_result.reason)
    elif operator_result.outcome is not CallOutcome.VERIFIED and "error" not in levels:
        yield annotation(
            "error", Status.UNVERIFIED.value, where, operator_result.reason[:_LONGEST_REASON]
        )
