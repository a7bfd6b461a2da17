"""The HTML page of a checked graph, the data for its scripts, a notebook, Model Explorer."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from paritas.core.reporting.files import write_whole
from paritas.core.reporting.notebook import NotebookResult
from paritas.core.reporting.pages import PageLayout, figure, pack_payload, render_page
from paritas.core.reporting.tables import COLOURS, MOST_IN_CELL, SIGNS, Column, page_table
from paritas.core.reporting.terminal import FINDING_COLUMNS
from paritas.core.results.findings import Status
from paritas.core.results.report import spell_nonfinite
from paritas.core.results.wording import finding_lines, list_first
from paritas.sharding.graphs.report import (
    MEANINGS,
    ORDER,
    OUTCOME_MARKS,
    confirmation_words,
    count_things,
    duration,
    failing,
    failing_options,
    graph_label,
    loss_gap,
    option_words,
    proof_words,
    reasons,
    short_name,
    size_words,
    verdict_word,
    verdict_words,
)
from paritas.sharding.graphs.rows import CallOutcome, GraphReport

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from paritas.core.results.findings import Finding
    from paritas.sharding.graphs.rows import GraphReport, OperatorResult, OptionResult


# --- The page of a checked graph ------------------------------------------------------------------

# Failures described in full, and how many of them are unfolded; the table has all.
MOST_STORIES = 50
MOST_OPEN = 3
# Operators named for one reason.
MOST_NAMED = 8

VERDICTS = {
    "verified": CallOutcome.VERIFIED,
    "failed": CallOutcome.FAILED,
    "unverified": CallOutcome.UNSUPPORTED,
}
_GRAPH_LAYOUT = PageLayout(
    template="graph_page.html.jinja",
    styles=("vendor/tabulator_simple.min.css", "basics.css", "report.css", "graph_page.css"),
    vendored=("vendor/tabulator.min.js",),
    own=(
        "shell.js",
        "figures.js",
        "drawing.js",
        "filters.js",
        "columns.js",
        "table.js",
        "graph_table.js",
        "graph_panel.js",
        "graph_main.js",
    ),
)


def write_graph_page(report: GraphReport, path: Path) -> None:
    """Write the page to a file atomically."""
    page = graph_page(report).encode(errors="backslashreplace")
    write_whole(path, page.removesuffix(b"\n"))


def graph_page(report: GraphReport) -> str:
    """The whole report as one self-contained HTML file."""
    counts = report.counts()
    missing = report.calls - sum(counts.values())
    wrong = failing(report)
    word = verdict_word(report)
    return render_page(
        _GRAPH_LAYOUT,
        {
            "gap": _gap,
            "link": _link,
            "loss": _loss,
            "option": option_words,
            "ranks": confirmation_words,
        },
        report=report,
        name=short_name(report),
        word=word,
        verdict=VERDICTS[word],
        words=verdict_words(report),
        size=size_words(report),
        took=duration(report.seconds),
        outcomes=[(o, SLUGS[o], OUTCOME_MARKS[o].sign, MEANINGS[o], counts[o]) for o in ORDER],
        slugs=SLUGS,
        outcome_signs={outcome: mark.sign for outcome, mark in OUTCOME_MARKS.items()},
        signs=SIGNS,
        missing=max(0, missing),
        stories=[
            (position, operator, failing_options(operator, report), _modules(operator))
            for position, operator in enumerate(report.operators)
            if operator.outcome is CallOutcome.FAILED
        ][:MOST_STORIES],
        most_open=MOST_OPEN,
        more_stories=max(0, len(wrong) - MOST_STORIES),
        unchecked=[
            (outcome, reason, list_first(reason.operators, MOST_NAMED))
            for outcome in (CallOutcome.UNSUPPORTED, CallOutcome.NOTHING)
            for reason in reasons(report, outcome)
        ],
        overview=overview(report.operators),
        count_things=count_things,
        beside=[
            (
                graph_label(other_report, (report, *report.others)),
                graph_page_name(other_report.number),
                VERDICTS[verdict_word(other_report)],
                verdict_word(other_report),
                verdict_words(other_report),
            )
            for other_report in report.others
        ],
        data=pack_payload(graph_payload(report)),
    )


def graph_page_name(number: int) -> str:
    """The page of a graph other than that of the folder's latest run."""
    return f"report_{number}.html"


def _modules(operator_result: OperatorResult) -> str:
    return list_first(
        dict.fromkeys(site.module for site in operator_result.sites if site.module), 3
    )


def _loss(value: float | None) -> str:
    """A loss with more digits than elsewhere, to compare it with the one beside it."""
    return "" if value is None else "NaN" if math.isnan(value) else f"{value:.9g}"


def _gap(option: OptionResult) -> str:
    """The gap in the format that the page's scripts use: `1.10e0`."""
    gap = loss_gap(option)
    if gap is None or not gap or not math.isfinite(gap):
        return "" if gap is None else figure(gap)
    digits, power = f"{gap:.2e}".split("e")
    return f"{digits}e{int(power)}"


def _link(script: str) -> str:
    """The link to a script beside the page; empty for a name that could lead elsewhere."""
    return script if re.fullmatch(r"(?:\w[\w.-]*/)*\w[\w.-]*", script, re.ASCII) else ""


# --- A graph: rules with the status of each split dimension ---------------------------------------

TokenKind = Literal["split", "whole", "text"]

# A name, or the star that stands for any number of dimensions.
_NAME = re.compile(r"[^\W\d]\w*\d*|\*")
_STAR = re.compile(r"\*\d+")


def overview(operators: Iterable[OperatorResult]) -> list[Overview]:
    """Which dimensions of which operator can be split; wrong ones first."""
    overview_by_rules: dict[tuple[str, tuple[DrawnRule, ...]], Overview] = {}
    for position, operator in enumerate(operators):
        if not operator.options:
            continue
        rules = drawn_rules(operator.options)
        alike = (operator.operator, rules)
        earlier_row = overview_by_rules.get(
            alike, Overview(operator.operator, position, 0, 0, rules)
        )
        overview_by_rules[alike] = dataclasses.replace(
            earlier_row, calls=earlier_row.calls + len(operator.sites), kinds=earlier_row.kinds + 1
        )
    return sorted(overview_by_rules.values(), key=lambda row: -_gravity(row))


def drawn_rules(options: Iterable[OptionResult]) -> tuple[DrawnRule, ...]:
    """Each rule once, in order."""
    by_rule: dict[str, list[OptionResult]] = {}
    for option in options:
        by_rule.setdefault(option.rule, []).append(option)
    return tuple(_draw_rule(rule, same) for rule, same in by_rule.items())


@dataclasses.dataclass(frozen=True)
class RuleToken:
    """A piece of a rule: a dimension that was split, one that was not, or text between them.

    Attributes:
        status: the gravest of its splits.
        hint: its splits in words.
    """

    text: str
    kind: TokenKind = "text"
    status: Status | None = None
    hint: str = ""


@dataclasses.dataclass(frozen=True)
class DrawnRule:
    """A rule as tokens; `loose` are splits whose dimension is not in the rule's text."""

    rule: str
    origins: tuple[str, ...]
    tokens: tuple[RuleToken, ...]
    loose: tuple[RuleToken, ...] = ()


@dataclasses.dataclass(frozen=True)
class Overview:
    """Operators with the same name and the same results of their rules.

    Attributes:
        place: the index of the first one among the operators of the report.
        calls: their total number of calls.
        kinds: the number of distinct signatures.
    """

    operator: str
    place: int
    calls: int
    kinds: int
    rules: tuple[DrawnRule, ...]


def _gravity(row: Overview) -> int:
    # 0 for all that pass, which keeps them in the order of the graph.
    tokens = [token for rule in row.rules for token in (*rule.tokens, *rule.loose)]
    grave = [token.status.gravity for token in tokens if token.status and not token.status.passes()]
    return max(grave, default=0)


def _draw_rule(rule: str, options: list[OptionResult]) -> DrawnRule:
    splits: dict[str, list[OptionResult]] = {}
    for option in options:
        splits.setdefault(_name(option), []).append(option)
    tokens = tuple(_tokens(rule, splits))
    shown = {token.text for token in tokens if token.kind == "split"}
    loose = [_draw_token(name, same) for name, same in splits.items() if name not in shown]
    origins = tuple(dict.fromkeys(option.origin for option in options))
    return DrawnRule(rule, origins, tokens, tuple(loose))


def _name(option: OptionResult) -> str:
    """The name of the split dimension; all dimensions of a star share one."""
    name = option.identifier or option.split or f"idx {option.idx}, dim {option.dim}"
    return "*" if _STAR.fullmatch(name) else name


def _tokens(rule: str, splits: dict[str, list[OptionResult]]) -> Iterator[RuleToken]:
    """The tokens of a rule; after a semicolon come arguments, which are text unless split."""
    end = 0
    dims = rule.partition(";")[0]
    for match in _NAME.finditer(rule):
        name = match.group()
        if match.start() > end:
            yield RuleToken(rule[end : match.start()])
        if name in splits:
            yield _draw_token(name, splits[name])
        elif match.start() < len(dims):
            yield RuleToken(name, "whole", hint="not split")
        else:
            yield RuleToken(name)
        end = match.end()
    if end < len(rule):
        yield RuleToken(rule[end:])


def _draw_token(name: str, options: list[OptionResult]) -> RuleToken:
    hints = [
        f"{option.split} at idx {option.idx}, dim {option.dim}, {option.ranks} ranks: "
        f"{option.status.value}"
        for option in options
    ]
    worst = max((option.status for option in options), key=lambda status: status.gravity)
    return RuleToken(name, "split", worst, "\n".join(hints))


# --- The operators as data ------------------------------------------------------------------------

# Outcomes as names of classes in a style sheet.
SLUGS = {outcome: outcome.name.lower() for outcome in CallOutcome}


def graph_payload(report: GraphReport) -> dict[str, Any]:
    """Every operator with its calls, splits and findings."""
    operators = [_encode_operator(operator, strict=report.strict) for operator in report.operators]
    return {"operators": spell_nonfinite(operators)}


def _encode_operator(operator_result: OperatorResult, *, strict: bool) -> dict[str, Any]:
    return {
        "operator": operator_result.operator,
        "signature": operator_result.signature,
        "outcome": SLUGS[operator_result.outcome],
        "reason": operator_result.reason,
        "notes": operator_result.notes,
        "script": operator_result.script,
        "seconds": operator_result.seconds,
        "sites": [
            [site.node, site.source, site.code, site.module] for site in operator_result.sites
        ],
        "options": [_encode_option(option, strict=strict) for option in operator_result.options],
        "rules": [
            {
                "origins": rule.origins,
                "tokens": [_encode_token(token) for token in rule.tokens],
                "loose": [_encode_token(token) for token in rule.loose],
            }
            for rule in drawn_rules(operator_result.options)
        ],
    }


def _encode_option(option: OptionResult, *, strict: bool) -> dict[str, Any]:
    return {
        "words": option_words(option),
        "rule": option.rule,
        "origin": option.origin,
        "ranks": option.ranks,
        "status": option.status.value,
        "confirmation": confirmation_words(option),
        "proof": proof_words(option),
        "passes": option.status.passes(strict=strict),
        "reason": option.reason,
        "whole": option.loss_whole,
        "split": option.loss_split,
        "gap": loss_gap(option),
        "gradients": option.gradients,
        "seconds": option.seconds,
        "findings": [_encode_finding(finding) for finding in option.verdict.findings],
        "not_compared": [*option.verdict.coverage.skipped, *option.verdict.coverage.unmatched],
    }


def _encode_finding(finding: Finding) -> dict[str, Any]:
    [(_, [item, value, off_by, worst])] = page_table(FINDING_COLUMNS, [finding]).rows
    return {
        "status": finding.status.value,
        "item": item,
        "value": value,
        "off_by": off_by,
        "worst": worst,
        # The first line repeats the item.
        "words": [line.strip() for line in finding_lines(finding)[1:]],
    }


def _encode_token(token: RuleToken) -> list[str]:
    return [token.text, token.kind, token.status.value if token.status else "", token.hint]


# --- A cell of a notebook -------------------------------------------------------------------------


def notebook_summary(report: GraphReport) -> NotebookResult:
    """The report for a cell of a notebook."""
    word = verdict_word(report)
    outcome = VERDICTS[word]
    ordered = sorted(report.operators, key=lambda operator: ORDER.index(operator.outcome))
    counts = report.counts()
    return NotebookResult(
        mark=OUTCOME_MARKS[outcome],
        title=f"{word}: {short_name(report)}",
        words=verdict_words(report),
        facts=[
            *(
                (call_outcome.value, f"{counts[call_outcome]:,}")
                for call_outcome in ORDER
                if counts[call_outcome]
            ),
            ("checked", size_words(report)),
        ],
        lists=[("Notes", report.notes, "note")],
        table=page_table(_operator_columns(report), ordered, MOST_IN_CELL),
    )


def _operator_columns(report: GraphReport) -> list[Column[OperatorResult]]:
    def count_right(operator: OperatorResult) -> str:
        right = sum(option.status.passes(strict=report.strict) for option in operator.options)
        return f"{right} of {len(operator.options)}" if operator.options else ""

    def reason(operator: OperatorResult) -> str:
        return operator.reason or next((option.reason for option in operator.failures), "")

    return [
        Column("outcome", lambda operator: OUTCOME_MARKS[operator.outcome]),
        Column("node", lambda operator: operator.sites[0].node),
        Column("operator", lambda operator: operator.operator),
        Column("source", lambda operator: operator.sites[0].source),
        Column("calls", lambda operator: f"{len(operator.sites):,}"),
        Column("splits right", count_right),
        Column("reason", reason),
    ]


# --- Model Explorer: data to colour the nodes of a checked `.pt2`, which it opens itself ----------

_OUTCOMES = {
    CallOutcome.VERIFIED: COLOURS[Status.EQUIVALENT],
    CallOutcome.NOTHING: COLOURS[Status.IDENTICAL],
    CallOutcome.UNSUPPORTED: COLOURS[Status.UNVERIFIED],
    CallOutcome.FAILED: COLOURS[Status.DIFFERENT],
}


# Model Explorer's name for the graph of a .pt2.
_EXPORTED = "graph"


Json = dict[str, Any]


def write_graph_report(path: Path, report: GraphReport) -> None:
    """Write data to colour the nodes of a checked graph."""
    write_whole(path, msgspec.json.encode(graph_report_data(report)))


def graph_report_data(report: GraphReport) -> Json:
    """The outcome of each call of a checked graph, for the nodes of its `.pt2`."""
    results = {
        site.node: {"value": _outcome_words(operator), "bgColor": _OUTCOMES[operator.outcome]}
        for operator in report.operators
        for site in operator.sites
    }
    return {
        _EXPORTED: {
            "name": "paritas: operators",
            "results": results,
            "showExpandedSummaryOnGroupNode": True,
        }
    }


def _outcome_words(operator: OperatorResult) -> str:
    """Short and without figures: Model Explorer counts equal values."""
    failed = operator.failures
    return f"{operator.outcome}: {failed[0].split}" if failed else str(operator.outcome)
