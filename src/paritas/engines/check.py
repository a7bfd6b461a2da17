"""check_engine(): did a serving engine return what the reference model computes?

The record is judged like any candidate: against the reference in float64 and the measured noise of
its own dtype. What is not rounding is explained by trying hypotheses: runs of the reference with
one thing changed. One that gives the record up to rounding is the cause.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import msgspec

from paritas.core.call_options import takes_options
from paritas.core.errors import UsageError
from paritas.core.execution.saved_state import RandomState
from paritas.core.judging.pairs import Ruling, reconsider
from paritas.core.results.findings import Aspect, Finding, Status, mismatch, unverified
from paritas.core.results.progress import shows_progress
from paritas.core.results.wording import count_things
from paritas.engines.causes import Search
from paritas.engines.changed_models import PRECISION
from paritas.engines.drawing import drawn_by_temperature
from paritas.engines.judging import GROWTH, Clock, RequestJudgements, item_of
from paritas.engines.records import TOKENS, Request, read_records
from paritas.engines.rows import EngineCause, EngineReport, EngineRow

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch import Tensor

    from paritas.engines.drawing import DrawnTokens
    from paritas.engines.records import Engine

DEFAULT_SECONDS = 300.0
# Once a request has failed, this share of the time is for comparing the others; the rest is for
# finding the cause.
_FOR_COMPARING = 0.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckEngineOptions:
    """How `check_engine` compares, how long, and what it reports on the way.

    Attributes:
        prompts: the prompts for an engine that is a function.
        older: models with earlier weights, by name, which the engine may still run.
        explain: look for the cause if a request fails.
        strict: count `unstable` as a failure.
        seconds: the time limit. After it, no further request is compared (the others are
            `unverified`), and no further cause is tried; what is known is reported.
        seed: seed of the perturbed runs.
        target: the name of the reference in the report.
        on_progress: called with a short text before each step that may take long.
        on_result: called with a line for what is known so far, before causes are looked for.
    """

    prompts: Sequence[Sequence[int]] | None = None
    older: Mapping[str, Any] | None = None
    explain: bool = True
    strict: bool = False
    seconds: float = DEFAULT_SECONDS
    seed: int = 0
    target: str = ""
    on_progress: Callable[[str], None] | None = None
    on_result: Callable[[str], None] | None = None

    def __post_init__(self) -> None:
        if not self.seconds > 0:
            raise UsageError(f"seconds must be positive, got {self.seconds!r}")


@shows_progress
@takes_options(CheckEngineOptions)
def check_engine(
    model: Any,
    records: str | os.PathLike[str] | Iterable[Any] | Engine,
    options: CheckEngineOptions,
) -> EngineReport:
    """Compare what a serving engine returned with the model that it should serve.

    Args:
        model: the reference, a model that maps token ids to logits, in the dtype of the engine.
        records: a JSONL file, or a list, of `EngineRecord`, of dicts with its fields, or of
            answers of vLLM with their requests, `{"request": ..., "response": ...}`; or an engine:
            a function that takes a list of prompts (lists of token ids) and returns such a list.
        options: given as keyword arguments; see `CheckEngineOptions`.

    Returns:
        A report with a row for each request, and the causes of those that fail.

    Raises:
        UsageError: a record is not valid, or the model does not map token ids to logits.
    """
    strict = options.strict
    requests = [Request(record) for record in read_records(records, options.prompts)]
    clock = Clock(options.seconds)
    tell = options.on_progress or (lambda _: None)
    rng = RandomState.now()
    try:
        judgements = RequestJudgements(model, requests, seed=options.seed, tell=tell)
        search = Search(judgements, dict(options.older or {}), clock, tell)
        rows = _compare(judgements, requests, clock, strict=strict, wholly=not options.explain)
        failing = _failing(requests, rows, strict=strict)
        if failing and options.on_result is not None:
            options.on_result(EngineReport(rows=tuple(rows), strict=strict).headline)
        causes = search.explain(failing) if failing and options.explain else []
        others = requests[len(rows) :]
        more = _compare(judgements, others, clock, strict=strict, wholly=True)
        causes = search.extend(causes, _failing(others, more, strict=strict))
        rows += more
        rows += [_not_compared(request, clock) for request in requests[len(rows) :]]
        rows, drawn = _judge_draws(judgements, rows, strict=strict)
        causes += _drawn_otherwise(rows, drawn, strict=strict)
    finally:
        rng.restore()
    rounding = {
        name
        for cause in causes
        if cause.kind == PRECISION and cause.to_rounding
        for name in cause.requests
    }
    rows = [_as_degraded(row) if row.name in rounding else row for row in rows]
    return EngineReport(
        rows=tuple(rows),
        causes=tuple(causes),
        target=options.target,
        strict=strict,
        tried=search.tried,
        seconds=clock.spent,
        observed=tuple(search.observed),
        notes=(*judgements.notes, *_cut_short(search, clock)),
    )


# --- Comparing ------------------------------------------------------------------------------------


def _compare(
    judgements: RequestJudgements,
    requests: list[Request],
    clock: Clock,
    *,
    strict: bool,
    wholly: bool,
) -> list[EngineRow]:
    """The rows of the requests, in their order, for which there is time.

    Unless it is `wholly` for comparing, a failure leaves a share of the time for finding its cause.
    """
    rows: list[EngineRow] = []
    has_failed = False
    clock.start_steps()
    size = 0
    for batch in judgements.batches(requests):
        share = _FOR_COMPARING if has_failed and not wholly else 1.0
        is_first = batch[0] is judgements.requests[0]
        growth = GROWTH if len(batch) > size else 1
        if not is_first and not clock.allows_another(share, growth):
            break
        size = len(batch)
        judgements.tell(
            f"comparing request {len(judgements.base) + 1} of {len(judgements.requests)}"
        )
        batch_rows = judgements.compare(batch)
        has_failed |= any(not row.status.passes(strict=strict) for row in batch_rows)
        rows += batch_rows
    return rows


def _not_compared(request: Request, clock: Clock) -> EngineRow:
    finding = unverified(
        item_of(request, "time"),
        f"not compared within {clock.seconds:g} s",
        "give it more time with --seconds, or fewer requests",
    )
    return EngineRow(
        name=request.record.name, tokens=0, difference=0.0, rounding=0.0, findings=(finding,)
    )


def _cut_short(search: Search, clock: Clock) -> list[str]:
    if not search.is_cut_short:
        return []
    runs = count_things(search.tried, "changed run")
    words = (
        f"the search for causes ended after {clock.seconds:g} s and {runs}, before all were tried"
    )
    return [f"{words}: --seconds gives it more time"]


# --- What the tokens show -------------------------------------------------------------------------


def _judge_draws(
    judgements: RequestJudgements, rows: list[EngineRow], *, strict: bool
) -> tuple[list[EngineRow], list[DrawnTokens]]:
    """Add a finding to requests with right numbers whose tokens are drawn otherwise."""
    pairs = zip(judgements.requests, rows, strict=True)
    right = [request for request, row in pairs if row.status.passes(strict=strict)]
    right = [request for request in right if not request.record.sampling.is_greedy]
    logits: dict[int, Tensor] = {}
    for batch in judgements.batches(right):
        logits |= judgements.logits(None, batch)
    wrong = [
        drawn_group
        for drawn_group in drawn_by_temperature(right, logits, judgements.numbers)
        if drawn_group.is_wrong
    ]
    reasons = {name: drawn_group.sentence for drawn_group in wrong for name in drawn_group.names}
    named = {request.record.name: request for request in judgements.requests}
    findings = {
        name: mismatch(item_of(named[name], TOKENS), Aspect.VALUE, reason)
        for name, reason in reasons.items()
    }
    return [
        msgspec.structs.replace(row, findings=(*row.findings, findings[row.name]))
        if row.name in findings
        else row
        for row in rows
    ], wrong


def _wrong_kinds(row: EngineRow, *, strict: bool) -> set[str]:
    return {
        finding.item.name for finding in row.findings if not finding.status.passes(strict=strict)
    }


def _failing(requests: list[Request], rows: list[EngineRow], *, strict: bool) -> list[Request]:
    """The requests that fail by their numbers, not by their tokens alone."""
    pairs = zip(requests, rows, strict=False)
    return [request for request, row in pairs if _wrong_kinds(row, strict=strict) - {TOKENS}]


def _drawn_otherwise(
    rows: list[EngineRow], drawn: list[DrawnTokens], *, strict: bool
) -> list[EngineCause]:
    """The causes of requests whose numbers are right and whose tokens are not."""
    by_heat = {name for drawn_group in drawn for name in drawn_group.names}
    excluded = tuple(
        row.name
        for row in rows
        if _wrong_kinds(row, strict=strict) == {TOKENS} and row.name not in by_heat
    )
    parts = [(drawn_group.sentence, tuple(drawn_group.names)) for drawn_group in drawn]
    if excluded:
        parts.append(("tokens were drawn that the sampling parameters exclude", excluded))
    return [
        EngineCause(
            kind="sampling",
            text=f"the log probabilities are the model's, but {text}",
            requests=names,
            remaining=0.0,
            to_rounding=True,
        )
        for text, names in parts
    ]


def _as_degraded(row: EngineRow) -> EngineRow:
    """The same function, less accurate: the cause is a coarser dtype."""
    findings = reconsider(row.findings, _rule_on_coarser_dtype)
    return msgspec.structs.replace(row, findings=tuple(findings))


def _rule_on_coarser_dtype(finding: Finding) -> Ruling | None:
    return Ruling(Status.DEGRADED) if finding.status is Status.DIFFERENT else None
