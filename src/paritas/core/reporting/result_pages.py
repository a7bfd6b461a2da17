"""The HTML pages of a comparison and of a checked graph, and the data for their scripts."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections import Counter, defaultdict, deque
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from paritas.core.reporting.files import write_whole
from paritas.core.reporting.graphs import (
    MEANINGS,
    ORDER,
    confirmation_words,
    counted,
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
from paritas.core.reporting.pages import (
    DIGITS,
    PageLayout,
    comparison_headline,
    figure,
    number_column,
    packed,
    render_page,
    stories,
    text_column,
    work_done,
)
from paritas.core.reporting.tables import SIGNS, page_table
from paritas.core.reporting.terminal import FINDING_COLUMNS
from paritas.core.results.comparisons import beginnings
from paritas.core.results.findings import Status
from paritas.core.results.graph_reports import CallOutcome
from paritas.core.results.items import Metrics
from paritas.core.results.report import spell_nonfinite
from paritas.core.results.wording import MEANING, enumerated, finding_lines, ranges

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from paritas.core.results.comparisons import Comparison, ComparisonRow, SideFacts
    from paritas.core.results.findings import Finding
    from paritas.core.results.graph_reports import GraphReport, OperatorResult, OptionResult


# --- A comparison: the calls around the first divergence ------------------------------------------

MOST_NODES = 150
# If the data flow is unknown: how many calls before and after are shown.
_IN_ORDER = 8

CallKey = tuple[int, int | None, str]


def call_key(row: ComparisonRow) -> CallKey:
    """Identify the call that a row belongs to."""
    return (row.step, row.rank, row.call or row.name)


def group_calls(rows: Sequence[ComparisonRow]) -> dict[CallKey, list[ComparisonRow]]:
    """The inputs and outputs of each call, in the order of the program."""
    calls: dict[CallKey, list[ComparisonRow]] = defaultdict(list)
    for row in rows:
        calls[call_key(row)].append(row)
    return calls


def call_sources(calls: dict[CallKey, list[ComparisonRow]]) -> dict[CallKey, list[CallKey]]:
    """For each call, the calls that computed its inputs, in the same step and rank."""
    homes = {row.index: call for call, rows in calls.items() for row in rows}
    found = {}
    for call, rows in calls.items():
        sources = (homes.get(index, call) for row in rows for index in row.sources)
        found[call] = [one for one in dict.fromkeys(sources) if one != call and one[:2] == call[:2]]
    return found


def neighbourhood(comparison: Comparison) -> dict[str, Any] | None:
    """The graph around the first divergence, the nearest nodes first; None without a divergence.

    A node is a call with all its inputs and outputs.
    """
    begins = beginnings(comparison)
    if not begins:
        return None
    start = begins[0]
    centre = call_key(start.row)
    members = {
        call: rows for call, rows in group_calls(comparison.rows).items() if call[:2] == centre[:2]
    }
    edges = [(a, b) for b, sources in call_sources(members).items() for a in sources]
    flows = any(centre in edge for edge in edges)
    if not flows:
        calls = list(members)
        place = calls.index(centre)
        edges = list(itertools.pairwise(calls[max(0, place - _IN_ORDER) : place + _IN_ORDER + 1]))
    chosen = _nearest(centre, edges)
    numbers = {call: place for place, call in enumerate(chosen)}
    places = {row.index: place for place, row in enumerate(comparison.rows)}
    return {
        "flows": flows,
        "calls": len(members),
        "nodes": [_graph_node(members[call], start.row, places) for call in chosen],
        "edges": [[numbers[a], numbers[b]] for a, b in edges if a in numbers and b in numbers],
    }


def _nearest(centre: CallKey, edges: Iterable[tuple[CallKey, CallKey]]) -> list[CallKey]:
    beside: dict[CallKey, list[CallKey]] = defaultdict(list)
    for a, b in edges:
        beside[a].append(b)
        beside[b].append(a)
    found, waiting = {centre: None}, deque([centre])
    while waiting and len(found) < MOST_NODES:
        for call in beside[waiting.popleft()]:
            if call not in found and len(found) < MOST_NODES:
                found[call] = None
                waiting.append(call)
    return list(found)


def _graph_node(
    rows: list[ComparisonRow], start: ComparisonRow, places: dict[int, int]
) -> dict[str, Any]:
    """A call with its gravest status, and the row to link to: its gravest output."""
    outputs = [row for row in rows if row.side == "output"] or rows
    row = start if start in rows else max(outputs, key=lambda row: row.status.gravity)
    return {
        "row": places[row.index],
        "status": max(row.status.gravity for row in rows),
        "op": row.op,
        "label": row.module or row.call or row.name,
        "fused": len(row.nodes) if len(row.nodes) > 1 else 0,
        "made": row.made,
    }


# --- The comparison as columns --------------------------------------------------------------------

# Instead of a rank, for values that were assembled from several.
JOINED = "joined"

_NO_NUMBERS = {"max_abs_index"}
# Only their distance from 1 matters: four digits would round 0.99996 to 1.
_NEAR_ONE = {"cosine": 10, "pcc": 10}


def _of_score(name: str) -> Callable[[ComparisonRow], float | None]:
    return lambda row: None if row.score is None else getattr(row.score, name)


def _of_figures(name: str) -> Callable[[ComparisonRow], float | None]:
    return lambda row: None if row.figures is None else getattr(row.figures, name)


def _extreme(
    side: SideFacts | None, row: ComparisonRow, measured_as: str, name: str
) -> float | None:
    """The statistic in the dump, or else the measured one."""
    stored: float | None = None if side is None else getattr(side, name)
    if stored is not None or row.figures is None:
        return stored
    found: float | None = getattr(getattr(row.figures, measured_as), name)
    return found


def _worst_index(row: ComparisonRow) -> str:
    metrics = row.figures.metrics if row.figures else None
    if metrics is None or metrics.max_abs_index is None:
        return ""
    return _index_words(metrics.max_abs_index)


def _slice_words(row: ComparisonRow) -> str:
    score = row.score
    if score is None or score.slice_axis is None or score.slice_z is None:
        return ""
    allowed = "" if score.slice_limit is None else f", {score.slice_limit:.4g} allowed"
    place = f"index {score.slice_index} of axis {score.slice_axis}"
    return f"{place}: {score.slice_z:.4g}{allowed}"


def _index_words(values: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, values))}]"


def _diagnosis_words(row: ComparisonRow) -> str:
    found = row.detail.diagnosis if row.detail else None
    return found.sentence if found is not None else ""


_TEXT_FIELDS = (
    *("name", "level", "phase", "side", "op", "module", "line", "code", "graph", "kernel"),
    *("matched_by", "reason", "advice", "judged_by", "limits", "attributed", "made"),
)
_TEXTS: dict[str, Callable[[ComparisonRow], str]] = {
    **{name: attrgetter(name) for name in _TEXT_FIELDS},
    "rank": lambda row: JOINED if row.rank is None else str(row.rank),
    "nodes": lambda row: ", ".join(row.nodes),
    "aspect": lambda row: row.aspect.value,
    "diagnosis": _diagnosis_words,
    "worst_index": _worst_index,
    "slice": _slice_words,
}
_SIDE_TEXTS: dict[str, Callable[[SideFacts, ComparisonRow], str]] = {
    "path": lambda side, _: side.path,
    "id": lambda side, row: "" if side.id == row.name else side.id,
    "op": lambda side, row: "" if side.op == row.op else side.op,
    "dtype": lambda side, _: side.dtype,
    "shape": lambda side, _: "" if side.shape is None else _index_words(side.shape),
    "value": lambda side, _: side.value or "",
    "step": lambda side, _: str(side.step),
    "ranks": lambda side, _: ranges(side.ranks),
    "made_of": lambda side, _: side.made_of,
}
_NUMBERS: dict[str, Callable[[ComparisonRow], float | None]] = {
    "step": lambda row: row.step,
    "rel_l2": lambda row: row.rel_l2,
    "max_abs": _of_figures("max_abs"),
    "own": lambda row: row.own,
    "inherited": lambda row: row.inherited,
    "score": _of_score("excess"),
    "max_z": _of_score("max_z"),
    "max_limit": _of_score("max_limit"),
    "rms_z": _of_score("rms_z"),
    "rms_limit": _of_score("rms_limit"),
    "mean_rel": _of_figures("mean_rel"),
    "kl_divergence": _of_figures("kl_divergence"),
}


def comparison_payload(comparison: Comparison) -> dict[str, Any]:
    """The whole table, details of some rows, and the graph around the first divergence."""
    rows = comparison.rows
    places = {row.index: place for place, row in enumerate(rows)}
    first, non_finite = comparison.first, comparison.first_non_finite
    return {
        "count": len(rows),
        "statuses": [status.value for status in Status],
        "failing": [not status.passes(strict=comparison.strict) for status in Status],
        "status": [row.status.gravity for row in rows],
        "texts": _texts(rows),
        "numbers": _numbers(rows),
        "details": {
            place: spell_nonfinite(msgspec.to_builtins(row.detail))
            for place, row in enumerate(rows)
            if row.detail is not None
        },
        "first": None if first is None else places.get(first.row),
        "first_non_finite": None if non_finite is None else places.get(non_finite.row),
        "graph": neighbourhood(comparison),
    }


def _texts(rows: tuple[ComparisonRow, ...]) -> dict[str, Any]:
    texts = {name: text_column(map(get, rows)) for name, get in _TEXTS.items()}
    for which in ("my", "golden"):
        sides = [getattr(row, which) for row in rows]
        texts[f"{which}_there"] = text_column("yes" if side else "" for side in sides)
        for name, get in _SIDE_TEXTS.items():
            texts[f"{which}_{name}"] = text_column(
                get(side, row) if side else "" for side, row in zip(sides, rows, strict=True)
            )
    return texts


def _numbers(rows: tuple[ComparisonRow, ...]) -> dict[str, Any]:
    numbers = {name: number_column(map(get, rows)) for name, get in _NUMBERS.items()}
    measured = [row.figures.metrics if row.figures else None for row in rows]
    for name in Metrics.__struct_fields__:
        if name not in _NO_NUMBERS and name not in numbers:
            found = (None if metrics is None else getattr(metrics, name) for metrics in measured)
            numbers[name] = number_column(found, _NEAR_ONE.get(name, DIGITS))
    for which, measured_as in (("my", "candidate"), ("golden", "reference")):
        for name in ("minimum", "maximum", "mean"):
            numbers[f"{which}_{name}"] = number_column(
                _extreme(getattr(row, which), row, measured_as, name) for row in rows
            )
    return numbers


# --- The page of a comparison ---------------------------------------------------------------------

# On paper, and without scripts, the table shows this many failing rows.
MOST_PRINTED = 200
_COMPARISON_LAYOUT = PageLayout(
    template="report.html.jinja",
    styles=(
        "vendor/uPlot.min.css",
        "vendor/tabulator_simple.min.css",
        "basics.css",
        "report.css",
    ),
    vendored=("vendor/uPlot.iife.min.js", "vendor/tabulator.min.js", "vendor/dagre.min.js"),
    own=(
        "shell.js",
        "figures.js",
        "data.js",
        "drawing.js",
        "filters.js",
        "columns.js",
        "table.js",
        "chart.js",
        "tree.js",
        "graph.js",
        "tensor.js",
        "main.js",
    ),
)


def html_report(comparison: Comparison) -> str:
    """The whole comparison as one self-contained HTML file."""
    rows = comparison.rows
    counts = Counter(row.status for row in rows)
    failing = [
        (place, row)
        for place, row in enumerate(rows)
        if not row.status.passes(strict=comparison.strict)
    ]
    return render_page(
        _COMPARISON_LAYOUT,
        {"ranges": ranges, "figure": small_figure, "place": step_and_rank},
        comparison=comparison,
        statuses=[(status, SIGNS[status], MEANING[status], counts[status]) for status in Status],
        signs=SIGNS,
        headline=comparison_headline(comparison),
        work=work_done(comparison),
        stories=stories(comparison),
        failing=failing[:MOST_PRINTED],
        failures=len(failing),
        data=packed(comparison_payload(comparison)),
    )


def small_figure(value: float | None) -> str:
    """A number in scientific notation: columns of these are read by magnitude."""
    return "" if value is None else figure(value) if not value else f"{value:.2e}"


def step_and_rank(row: ComparisonRow) -> str:
    """The step and rank of a row, for a cell."""
    return f"{row.step}/{JOINED if row.rank is None else row.rank}"


# --- A graph: rules with the status of each split dimension ---------------------------------------

TokenKind = Literal["split", "whole", "text"]

# A name, or the star that stands for any number of dimensions.
_NAME = re.compile(r"[^\W\d]\w*\d*|\*")
_STAR = re.compile(r"\*\d+")


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


def overview(operators: Iterable[OperatorResult]) -> list[Overview]:
    """Which dimensions of which operator can be split; wrong ones first."""
    found: dict[tuple[str, tuple[DrawnRule, ...]], Overview] = {}
    for place, one in enumerate(operators):
        if not one.options:
            continue
        rules = drawn_rules(one.options)
        alike = (one.operator, rules)
        seen = found.get(alike, Overview(one.operator, place, 0, 0, rules))
        found[alike] = dataclasses.replace(
            seen, calls=seen.calls + len(one.sites), kinds=seen.kinds + 1
        )
    return sorted(found.values(), key=lambda row: -_gravity(row))


def _gravity(row: Overview) -> int:
    # 0 for all that pass, which keeps them in the order of the graph.
    tokens = [token for rule in row.rules for token in (*rule.tokens, *rule.loose)]
    grave = [token.status.gravity for token in tokens if token.status and not token.status.passes()]
    return max(grave, default=0)


def drawn_rules(options: Iterable[OptionResult]) -> tuple[DrawnRule, ...]:
    """Each rule once, in order."""
    by_rule: dict[str, list[OptionResult]] = {}
    for option in options:
        by_rule.setdefault(option.rule, []).append(option)
    return tuple(_draw_rule(rule, same) for rule, same in by_rule.items())


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
    for found in _NAME.finditer(rule):
        name = found.group()
        if found.start() > end:
            yield RuleToken(rule[end : found.start()])
        if name in splits:
            yield _draw_token(name, splits[name])
        elif found.start() < len(dims):
            yield RuleToken(name, "whole", hint="not split")
        else:
            yield RuleToken(name)
        end = found.end()
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
SLUGS = {
    CallOutcome.VERIFIED: "verified",
    CallOutcome.NOTHING: "nothing",
    CallOutcome.UNSUPPORTED: "unsupported",
    CallOutcome.FAILED: "failed",
}


def graph_payload(report: GraphReport) -> dict[str, Any]:
    """Every operator with its calls, splits and findings."""
    operators = [_encode_operator(one, strict=report.strict) for one in report.operators]
    return {"operators": spell_nonfinite(operators)}


def _encode_operator(one: OperatorResult, *, strict: bool) -> dict[str, Any]:
    return {
        "operator": one.operator,
        "signature": one.signature,
        "outcome": SLUGS[one.outcome],
        "reason": one.reason,
        "notes": one.notes,
        "script": one.script,
        "seconds": one.seconds,
        "sites": [[site.node, site.source, site.code, site.module] for site in one.sites],
        "options": [_encode_option(option, strict=strict) for option in one.options],
        "rules": [
            {
                "origins": rule.origins,
                "tokens": [_encode_token(token) for token in rule.tokens],
                "loose": [_encode_token(token) for token in rule.loose],
            }
            for rule in drawn_rules(one.options)
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


# --- The page of a checked graph ------------------------------------------------------------------

# Failures described in full, and how many of them are unfolded; the table has all.
MOST_STORIES = 50
MOST_OPEN = 3
# Operators named for one reason.
MOST_NAMED = 8

# Shown beside the colour for people who cannot see it.
OUTCOME_SIGNS = {
    CallOutcome.VERIFIED: "✓",
    CallOutcome.NOTHING: "–",
    CallOutcome.UNSUPPORTED: "?",
    CallOutcome.FAILED: "≠",
}
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
        "columns.js",
        "graph_filters.js",
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
        outcomes=[(o, SLUGS[o], OUTCOME_SIGNS[o], MEANINGS[o], counts[o]) for o in ORDER],
        slugs=SLUGS,
        outcome_signs=OUTCOME_SIGNS,
        signs=SIGNS,
        missing=max(0, missing),
        stories=[
            (place, one, failing_options(one, report), _modules(one))
            for place, one in enumerate(report.operators)
            if one.outcome is CallOutcome.FAILED
        ][:MOST_STORIES],
        most_open=MOST_OPEN,
        more_stories=max(0, len(wrong) - MOST_STORIES),
        unchecked=[
            (outcome, reason, enumerated(reason.operators, MOST_NAMED))
            for outcome in (CallOutcome.UNSUPPORTED, CallOutcome.NOTHING)
            for reason in reasons(report, outcome)
        ],
        overview=overview(report.operators),
        counted=counted,
        beside=[
            (
                graph_label(one, (report, *report.others)),
                graph_page_name(one.number),
                VERDICTS[verdict_word(one)],
                verdict_word(one),
                verdict_words(one),
            )
            for one in report.others
        ],
        data=packed(graph_payload(report)),
    )


def graph_page_name(number: int) -> str:
    """The page of a graph other than that of the folder's latest run."""
    return f"report_{number}.html"


def _modules(one: OperatorResult) -> str:
    return enumerated(dict.fromkeys(site.module for site in one.sites if site.module), 3)


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
