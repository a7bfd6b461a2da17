"""The HTML page of a comparison, the data for its scripts, and what a notebook shows."""

from __future__ import annotations

import functools
import itertools
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from paritas.comparison.columns import JOINED, notebook_column, page_data, small_figure
from paritas.comparison.rows import Comparison, beginnings
from paritas.core.reporting.explanations import Fact
from paritas.core.reporting.notebook import NotebookResult, count_facts, coverage_lists
from paritas.core.reporting.pages import (
    PageLayout,
    Story,
    figure,
    pack_payload,
    render_page,
)
from paritas.core.reporting.tables import (
    MOST_IN_CELL,
    SIGNS,
    STATUS_MARKS,
    Column,
    page_table,
)
from paritas.core.results.findings import Status
from paritas.core.results.report import spell_nonfinite
from paritas.core.results.wording import MEANING, count_things, ranges, size

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from paritas.comparison.rows import Comparison, ComparisonRow, Divergence


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
        "row_table.js",
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
        (row_index, row)
        for row_index, row in enumerate(rows)
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
        data=pack_payload(comparison_payload(comparison)),
    )


def step_and_rank(row: ComparisonRow) -> str:
    """The step and rank of a row, for a cell."""
    return f"{row.step}/{JOINED if row.rank is None else row.rank}"


# --- The calls around the first divergence --------------------------------------------------------

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
    sources_by_call = {}
    for call, rows in calls.items():
        sources = (homes.get(index, call) for row in rows for index in row.sources)
        sources_by_call[call] = [
            source for source in dict.fromkeys(sources) if source != call and source[:2] == call[:2]
        ]
    return sources_by_call


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
        centre_index = calls.index(centre)
        edges = list(
            itertools.pairwise(
                calls[max(0, centre_index - _IN_ORDER) : centre_index + _IN_ORDER + 1]
            )
        )
    chosen = _nearest(centre, edges)
    numbers = {call: call_number for call_number, call in enumerate(chosen)}
    places = {row.index: row_position for row_position, row in enumerate(comparison.rows)}
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
    nearest_calls, waiting = {centre: None}, deque([centre])
    while waiting and len(nearest_calls) < MOST_NODES:
        for call in beside[waiting.popleft()]:
            if call not in nearest_calls and len(nearest_calls) < MOST_NODES:
                nearest_calls[call] = None
                waiting.append(call)
    return list(nearest_calls)


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


# --- The data of the page ----------------------------------------------------------------------


def comparison_payload(comparison: Comparison) -> dict[str, Any]:
    """The whole table, details of some rows, and the graph around the first divergence."""
    rows = comparison.rows
    places = {row.index: row_position for row_position, row in enumerate(rows)}
    first, non_finite = comparison.first, comparison.first_non_finite
    return {
        "count": len(rows),
        "statuses": [status.value for status in Status],
        "failing": [not status.passes(strict=comparison.strict) for status in Status],
        "status": [row.status.gravity for row in rows],
        **page_data(rows),
        "details": {
            row_position: spell_nonfinite(msgspec.to_builtins(row.detail))
            for row_position, row in enumerate(rows)
            if row.detail is not None
        },
        "first": None if first is None else places.get(first.row),
        "first_non_finite": None if non_finite is None else places.get(non_finite.row),
        "graph": neighbourhood(comparison),
    }


# --- In sentences ---------------------------------------------------------------------------------

_TITLES = {
    "values": "First divergence",
    "both": "First divergence, and first NaN or Inf",
    "non-finite": "First NaN or Inf",
}


_HOW_ATTRIBUTED = {
    "replayed": "measured by running the operator again",
    "estimated": "estimated from the errors of its inputs",
}


_NEXT = {
    "made": "Look at that line. The row's panel below shows where in the tensor it is off.",
    "given": "Look at where that value comes from: the programs got different inputs.",
    "unclear": "Also record the inputs of this call on both sides, and compare again.",
    "unmatched": "Map the names of the values before it with --rename, and compare again.",
}


_FUSED = (
    "Record the candidate with fusion off and compare again: if it is right then, the fusion"
    " causes the difference."
)


# `1 row`, `12,000 rows`.
_counted = functools.partial(count_things, thousands=",")


def comparison_headline(comparison: Comparison) -> str:
    """The verdict as a sentence, without the status word."""
    rows, compared = len(comparison.rows), comparison.coverage.compared
    failing = sum(not row.status.passes(strict=comparison.strict) for row in comparison.rows)
    if not compared:
        return "Nothing was compared, so nothing is verified."
    lost = len(comparison.my.losses) + len(comparison.golden.losses)
    incomplete = f" The dumps are incomplete: {_counted(lost, 'problem')}." if lost else ""
    if failing:
        verb = "does" if failing == 1 else "do"
        return f"{failing:,} of {_counted(rows, 'row')} {verb} not pass.{incomplete}"
    few, unread = comparison.of_summaries, comparison.by_digest
    weaker = (
        f" For {_counted(few, 'row')}, only statistics or sketches were compared." if few else ""
    )
    if unread:
        weaker += f" For {_counted(unread, 'row')}, only digests were compared, not the data."
    same = "the same except for rounding"
    if all(row.status is Status.IDENTICAL for row in comparison.rows):
        same = "the same in everything recorded" if few or unread else "equal bit for bit"
    subject = "The one row is" if rows == 1 else f"All {rows:,} rows are"
    return f"{subject} {same}.{weaker}{incomplete}"


def work_done(comparison: Comparison) -> str:
    """How much was read, and how long it took; empty if neither is known."""
    read = size(comparison.nbytes) if comparison.nbytes else ""
    took = f"{comparison.seconds:.3g} s" if comparison.seconds else ""
    return " in ".join(filter(None, (read, took)))


def stories(comparison: Comparison) -> list[Story]:
    """Where the two dumps begin to differ, in sentences."""
    return [
        Story(
            title=_TITLES[of],
            sentence=_divergence_sentence(row, divergence),
            facts=tuple(_divergence_facts(row, divergence)),
            place=row_position,
            status=row.status,
        )
        for of, divergence, row, row_position in beginnings(comparison)
    ]


def _divergence_sentence(row: ComparisonRow, divergence: Divergence) -> str:
    operator = f" ({row.op})" if row.op else ""
    module = f", module {row.module}" if row.module else ""
    rank = "" if row.rank is None else f", rank {row.rank}"
    where = f"step {row.step}{rank}{module}: {row.call or row.name}{operator}"
    if divergence.kind == "made":
        return f"It starts at {where}. The inputs of this call are right, its output is not."
    if divergence.kind == "given":
        return f"It first shows at {where}. This call did not cause it: it was in the inputs."
    because = f": {divergence.reason}" if divergence.reason else ""
    return f"The first failure is {where}. It is unknown whether this call caused it{because}."


def _divergence_facts(row: ComparisonRow, divergence: Divergence) -> Iterator[Fact]:
    if row.reason:
        yield Fact("what is wrong", row.reason)
    if row.diagnosis is not None and row.diagnosis.sentence:
        yield Fact("what kind of wrong", row.diagnosis.sentence)
    if divergence.reason and divergence.kind not in ("unclear", "unmatched"):
        yield Fact("why this one", divergence.reason)
    if row.own is not None or row.inherited is not None:
        yield Fact("error", _error_words(row))
    worst = _worst_element(row)
    if worst:
        yield Fact("worst element", worst)
    if row.judged_by:
        yield Fact("judged by", row.judged_by)
    if len(row.nodes) > 1:
        by = f", compiled into {row.kernel}" if row.kernel else ""
        yield Fact("fused", f"{len(row.nodes)} graph nodes{by}:", ", ".join(row.nodes))
    if row.line:
        yield Fact("source", row.line, row.code)
    if row.limits:
        yield Fact("limits", row.limits)
    fused = f" {_FUSED}" if len(row.nodes) > 1 and divergence.kind == "made" else ""
    yield Fact("what to do", row.advice or f"{_NEXT[divergence.kind]}{fused}")


def _error_words(row: ComparisonRow) -> str:
    own_error = "unknown" if row.own is None else figure(row.own)
    inherited = "unknown" if row.inherited is None else figure(row.inherited)
    how = f"; {_HOW_ATTRIBUTED[row.attributed]}" if row.attributed else ""
    return f"own {own_error}, inherited {inherited}, relative to the golden norm{how}"


def _worst_element(row: ComparisonRow) -> str:
    if row.detail is not None and row.detail.worst:
        worst = row.detail.worst[0]
        index, my_value, golden = worst.index, worst.my, worst.golden
        steps = "" if worst.ulps is None else f", {figure(worst.ulps)} ulp apart"
    else:
        metrics = row.metrics
        if metrics is None or metrics.max_abs_index is None:
            return ""
        if metrics.max_abs_candidate is None or metrics.max_abs_reference is None:
            return ""
        index, steps = metrics.max_abs_index, ""  # `max_ulp` may belong to another element
        my_value, golden = metrics.max_abs_candidate, metrics.max_abs_reference
    element_place = f"[{', '.join(map(str, index))}]"
    return f"{element_place}: mine {figure(my_value)}, golden {figure(golden)}{steps}"


# --- A cell of a notebook -------------------------------------------------------------------------

ROW_COLUMNS: tuple[Column[ComparisonRow], ...] = (
    Column("status", lambda row: STATUS_MARKS[row.status]),
    notebook_column("name"),
    Column("step/rank", step_and_rank),
    *map(notebook_column, ("op", "rel_l2", "own", "inherited", "reason")),
)


def notebook_summary(comparison: Comparison) -> NotebookResult:
    """The comparison for a cell of a notebook."""
    status = comparison.status
    # Failing rows first, otherwise in the order of the program.
    ordered = sorted(comparison.rows, key=lambda row: row.status.passes(strict=comparison.strict))
    work = work_done(comparison)
    facts = count_facts(Counter(row.status for row in comparison.rows), comparison.coverage)
    facts += [("mine", comparison.my.path), ("golden", comparison.golden.path)]
    problems = [("Problems with mine", comparison.my.problems, "problem")]
    problems += [("Problems with golden", comparison.golden.problems, "problem")]
    return NotebookResult(
        mark=STATUS_MARKS[status],
        title=status.value,
        words=comparison_headline(comparison),
        facts=[*facts, *([("read", work)] if work else [])],
        lists=[*problems, *coverage_lists(comparison.coverage, comparison.notes)],
        stories=stories(comparison),
        table=page_table(ROW_COLUMNS, ordered, MOST_IN_CELL),
        legend="rel. L2, own, inherited: norm of the error / norm of the golden value",
    )
