"""check_engine(): did a serving engine return what the reference model computes?

The record is judged like any candidate: against the reference in float64 and the measured noise of
its own dtype. What is not rounding is explained by trying hypotheses: runs of the reference with
one thing changed. One that gives the record up to rounding is the cause.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import time
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from paritas._torch.dynamo import original_of
from paritas._torch.global_state import quietly
from paritas.engines import changed_models
from paritas.engines.changes import (
    Change,
    Runner,
    cache_changes,
    number_of_experts,
    position_changes,
    prompt_changes,
    search_flips,
)
from paritas.engines.records import (
    AS_RECORDED,
    CLAIMS,
    LIMITS,
    TOKENS,
    Readout,
    Request,
    fitted_truncation,
    read_records,
    readouts,
)
from paritas.errors import UsageError, in_one_line
from paritas.execution.evidence import Evidence
from paritas.execution.item_evidence import ItemEvidence
from paritas.execution.observation import RunConditions
from paritas.execution.saved_state import RandomState
from paritas.execution.subject_runs import SubjectProgram
from paritas.execution.subjects import Inputs, inspect_subject
from paritas.numerics import criterion
from paritas.numerics.automatic import judge_floats
from paritas.numerics.bits import dtype_name
from paritas.relations.relation import DoesNotApply
from paritas.relations.token_models import TokenModel
from paritas.results.findings import Aspect, Finding, Status
from paritas.results.items import Item, ItemKind
from paritas.results.model_reports import EngineCause, EngineReport, EngineRow
from paritas.results.progress import shows_progress

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from torch import Tensor

    from paritas.engines.changes import LogitsOf
    from paritas.engines.records import Engine

# Hypotheses are tried on so many of the failing requests; the best are then confirmed on all.
_MOST_SAMPLED = 6
_MOST_CONFIRMED = 5
_MOST_CAUSES = 4
# A hypothesis that leaves more than this share of the difference is not worth a closer look.
_CLOSE = 0.7
# One that leaves this or less is confirmed at once; others wait until all have been tried.
_CLEAR = 0.2
# A hypothesis may leave at most this share of a record's values unknown.
_MOST_UNKNOWN = 0.5
# One that does not explain a record to rounding is still mentioned if it leaves no more than this.
_MENTIONED = 0.3
# Hypotheses that leave up to this many times as much as the best are named beside it.
_ALIKE = 1.5
_FITTED = 1.25
# An engine in a coarser dtype is off by at least this share of what that dtype is off by.
_AS_COARSE = 0.1
# Requests with so many tokens at most are run in one batch.
_MOST_TOGETHER = 1 << 14
_SAME = 1e-4
_NOT_ALLOWED = "its tokens are not among those that its sampling parameters allow"


@shows_progress
def check_engine(  # noqa: PLR0913
    model: Any,
    records: str | os.PathLike[str] | Iterable[Any] | Engine,
    *,
    prompts: Sequence[Sequence[int]] | None = None,
    older: Mapping[str, Any] | None = None,
    explain: bool = True,
    strict: bool = False,
    seed: int = 0,
    target: str = "",
    on_progress: Callable[[str], None] | None = None,
) -> EngineReport:
    """Compare what a serving engine returned with the model that it should serve.

    Args:
        model: the reference, a model that maps token ids to logits, in the dtype of the engine.
        records: a JSONL file, or a list, of `EngineRecord`, of dicts with its fields, or of
            answers of vLLM with their requests, `{"request": ..., "response": ...}`; or an engine:
            a function that takes a list of prompts (lists of token ids) and returns such a list.
        prompts: the prompts for an engine that is a function.
        older: models with earlier weights, by name, which the engine may still run.
        explain: look for the cause if a request fails.
        strict: count `unstable` as a failure.
        seed: seed of the perturbed runs.
        target: the name of the reference in the report.
        on_progress: called with a short text before each step that may take long.

    Returns:
        A report with a row for each request, and the causes of those that fail.

    Raises:
        UsageError: a record is not valid, or the model does not map token ids to logits.
    """
    requests = [Request(one) for one in read_records(records, prompts)]
    began = time.monotonic()
    tell = on_progress or (lambda _: None)
    rng = RandomState.now()
    try:
        check = _Check(model, requests, dict(older or {}), seed=seed, tell=tell)
        tell(f"comparing {len(requests)} requests")
        rows = check.rows()
        drawn, failing = _failing(requests, rows, strict=strict)
        causes = check.explain(failing) if failing and explain else []
        causes += _drawn_otherwise(drawn) if drawn else []
    finally:
        rng.restore()
    rounding = {name for one in causes if one.kind == "precision" for name in one.requests}
    rows = [_as_degraded(row) if row.name in rounding else row for row in rows]
    return EngineReport(
        rows=tuple(rows),
        causes=tuple(causes),
        target=target,
        strict=strict,
        tried=check.tried,
        seconds=time.monotonic() - began,
        notes=tuple(dict.fromkeys(check.base.evidence.notes)),
    )


def _failing(
    requests: list[Request], rows: list[EngineRow], *, strict: bool
) -> tuple[list[Request], list[Request]]:
    """The requests that fail by their tokens alone, and those that fail by their numbers."""
    drawn, failing = [], []
    for request, row in zip(requests, rows, strict=True):
        bad = {one.item.name for one in row.findings if not one.status.passes(strict=strict)}
        if bad == {TOKENS}:
            drawn.append(request)
        elif bad:
            failing.append(request)
    return drawn, failing


def _drawn_otherwise(requests: list[Request]) -> list[EngineCause]:
    cause = EngineCause(
        kind="sampling",
        text="the log probabilities are the model's, but tokens were drawn that the sampling "
        "parameters exclude",
        requests=tuple(one.record.name for one in requests),
        remaining=0.0,
        to_rounding=True,
    )
    return [cause]


def _as_degraded(row: EngineRow) -> EngineRow:
    """The same function, less accurate: the cause is a coarser dtype."""
    findings = tuple(
        msgspec.structs.replace(one, status=Status.DEGRADED)
        if one.status is Status.DIFFERENT
        else one
        for one in row.findings
    )
    return msgspec.structs.replace(row, findings=findings)


@dataclasses.dataclass(frozen=True)
class Hypothesis:
    """A changed run, a changed readout, or both."""

    kind: str
    text: str
    change: Change | None = None
    readout: Readout = AS_RECORDED
    # A hypothesis with a fitted number must explain more than one without.
    doubt: float = 1.0

    @property
    def only_rounds(self) -> bool:
        """Whether it is the same function with less precision."""
        return self.change is not None and self.change.only_rounds


class _Judged:
    """Requests under one hypothesis: its evidence, and the judgement of each."""

    def __init__(self, evidence: Evidence[SubjectProgram], keys: list[tuple[int, str]]) -> None:
        self.evidence = evidence
        # The items of the run in the order in which the values were returned.
        self.items = dict(zip(keys, evidence.native[0].outputs, strict=True))

    def explains(self, request: Request, number: int, kind: str) -> bool:
        """Whether the hypothesis gives these values; it may leave some, not most, unknown."""
        reference = self.evidence.native[0].outputs[self.items[number, kind]]
        unknown = reference.isnan()
        if int(unknown.sum()) > unknown.numel() * _MOST_UNKNOWN:
            return False
        known = torch.where(unknown.cpu(), torch.nan, request.values[kind])
        return self.finding(request, number, kind, known).status.passes()

    def finding(
        self, request: Request, number: int, kind: str, values: Tensor | None = None
    ) -> Finding:
        """The judgement of the engine's values, or of others in their place."""
        item = self.items[number, kind]
        reference = self.evidence.native[0].outputs[item]
        engine = (request.values[kind] if values is None else values).to(reference.device)
        judgement = judge_floats(reference, engine, ItemEvidence(self.evidence, item))
        failed = not judgement.status.passes()
        status = judgement.status
        if kind == LIMITS and status is Status.UNSTABLE:
            status = Status.EQUIVALENT  # that rounding decides is just what is claimed
        return Finding(
            item=Item(ItemKind.NAMED, kind).in_graph(request.record.name),
            aspect=Aspect.VALUE,
            status=status,
            reason=judgement.reason,
            advice=_NOT_ALLOWED if kind == TOKENS and failed else judgement.advice,
            dtype=dtype_name(reference.dtype),
            shape=tuple(reference.shape),
            metrics=judgement.metrics,
            native=judgement.native,
        )

    def truth(self, number: int, kind: str) -> Tensor:
        item = self.items[number, kind]
        arbiter = self.evidence.arbiter()
        seen = self.evidence.native if arbiter is None else arbiter
        found: Tensor = seen[0].outputs[item]
        return found.double()


class _Check:
    """All requests against one reference."""

    def __init__(
        self,
        model: Any,
        requests: list[Request],
        older: dict[str, Any],
        *,
        seed: int,
        tell: Callable[[str], None],
    ) -> None:
        self.model, self.requests, self.older = model, requests, older
        self.seed, self.tell = seed, tell
        self.tried = 0
        self.tokens = _token_model(model, requests)
        self.runner = Runner(self.tokens)
        self.subject = inspect_subject(model, "reference", "model")
        self.rng = RandomState.now()
        self.numbers = {id(request): number for number, request in enumerate(requests)}
        evidence, keys = self._run(None, AS_RECORDED, requests)
        error = evidence.native[0].error
        if error is not None:
            raise UsageError(f"the model raises on the records: {in_one_line(error)}") from error
        self.base = _Judged(evidence, keys)

    # --- Running ---

    def _program(self, call: Callable[[Any], dict[str, Tensor]], model: Any) -> SubjectProgram:
        subject = self.subject
        if model is not None:
            subject = inspect_subject(model, "reference", "model")
        inner = subject.call

        def run() -> dict[str, Tensor]:
            with torch.no_grad():
                return call(inner)

        subject = dataclasses.replace(subject, call=run, is_module=False)
        conditions = RunConditions(gradients=False, seed=self.seed, changing=frozenset())
        return SubjectProgram(subject, Inputs(), self.rng, conditions)

    def _logits(self, change: Change | None) -> LogitsOf:
        return self.runner.plain if change is None or change.logits is None else change.logits

    def _run(
        self, change: Change | None, readout: Readout, requests: list[Request]
    ) -> tuple[Evidence[SubjectProgram], list[tuple[int, str]]]:
        """Run a hypothesis natively; its evidence, and which values it gives in which order."""
        logits_of = self._logits(change)
        model = change.make_model() if change is not None and change.make_model else None
        keys: list[tuple[int, str]] = []

        def call(model: Any) -> dict[str, Tensor]:
            keys.clear()
            found = {}
            if logits_of == self.runner.plain and self._runs_together:
                runs: Iterable[Tensor | None] = self.runner.together(model, requests)
            else:
                runs = (logits_of(model, one) for one in requests)
            for request, logits in zip(requests, runs, strict=True):
                if logits is None:
                    continue
                number = self.numbers[id(request)]
                for kind, value in readout.values(logits, request).items():
                    keys.append((number, kind))
                    found[f"{number} {kind}"] = value
            return found

        evidence = Evidence(self._program(call, model), seed=self.seed)
        return evidence, list(keys)

    @functools.cached_property
    def _float32(self) -> Any:
        """The reference without the rounding of a narrow dtype, to screen hypotheses by."""
        return _in_float32(self.model)

    @functools.cached_property
    def _runs_together(self) -> bool:
        """Whether requests can be run in one batch: later tokens and other rows change nothing."""
        total = len(self.requests) * max(len(one.ids) for one in self.requests)
        if len(self.requests) == 1 or total > _MOST_TOGETHER:
            return False
        shortest = min(self.requests, key=lambda one: len(one.ids))
        try:
            with torch.no_grad(), quietly():
                alone = self.runner.plain(self._float32, shortest)
                together = self.runner.together(self._float32, self.requests)
        except Exception:  # noqa: BLE001  (then each request is run by itself)
            return False
        beside = together[self.numbers[id(shortest)]]
        return criterion.rms_difference(alone, beside) <= _SAME * criterion.rms(alone)

    def _screened(self, change: Change | None, requests: list[Request]) -> dict[int, Tensor]:
        """The logits of some requests under a changed run; empty if it cannot be run."""
        logits_of = self._logits(change)
        self.tried += change is not None
        try:
            model = self._float32
            if change is not None and change.make_model is not None:
                model = _in_float32(change.make_model())
            with torch.no_grad(), quietly():
                found = {self.numbers[id(one)]: logits_of(model, one) for one in requests}
        except Exception:  # noqa: BLE001  (a hypothesis that cannot be run explains nothing)
            return {}
        return {number: logits for number, logits in found.items() if logits is not None}

    # --- The rows ---

    def rows(self) -> list[EngineRow]:
        """The judgement of each request."""
        return [self._row(number, request) for number, request in enumerate(self.requests)]

    def _row(self, number: int, request: Request) -> EngineRow:
        base = self.base
        findings = tuple(base.finding(request, number, kind) for kind in request.values)
        engine, own, count, first = 0.0, 0.0, 0, None
        for kind, values in request.values.items():
            if kind in CLAIMS:
                continue
            truth = base.truth(number, kind).cpu()
            native = base.evidence.native[0].outputs[base.items[number, kind]].double().cpu()
            engine += _total(values - truth)
            own += _total(native - truth)
            count += values.numel()
        first = self._first_wrong(number, request, findings)
        return EngineRow(
            name=request.record.name,
            tokens=count,
            difference=engine / max(count, 1),
            rounding=own / max(count, 1),
            first=first,
            findings=findings,
        )

    def _first_wrong(
        self, number: int, request: Request, findings: Iterable[Finding]
    ) -> int | None:
        """The first output token beyond the noise."""
        kind = "logprobs"
        if kind not in request.values or all(one.status.passes() for one in findings):
            return None
        item = self.base.items[number, kind]
        evidence = self.base.evidence
        spread = evidence.spread(evidence.unit, 0, item, 1)
        truth = self.base.truth(number, kind).cpu()
        error = (request.values[kind] - truth).abs().nan_to_num(math.inf)
        noise = 0.0 if spread is None else spread.double().cpu()
        limit = criterion.MAX_Z * (noise + evidence.unit * truth.abs().nan_to_num(0.0))
        wrong = (error > limit).nonzero()
        return request.given[int(wrong[0])] if len(wrong) else None

    # --- Causes ---

    def explain(self, failing: list[Request]) -> list[EngineCause]:
        """Look for what gives the records of the failing requests."""
        left, causes = list(failing), list[EngineCause]()
        while left and len(causes) < _MOST_CAUSES:
            best = self._best(left, pairs=not causes)
            if best is None:
                break
            cause, hypothesis = best
            left = [one for one in left if one.record.name not in cause.requests]
            if cause.to_rounding:
                # A single decision, as about the last token of a nucleus, is no second cause.
                mostly = [one for one in left if self._left_by(hypothesis, one) <= _MENTIONED]
                left = [one for one in left if one not in mostly]
                names = tuple(one.record.name for one in mostly)
                cause = msgspec.structs.replace(cause, mostly=names)
            causes.append(cause)
            if not cause.to_rounding:
                break
        return causes

    def _left_by(self, hypothesis: Hypothesis, request: Request) -> float:
        """The share of one request's difference that a hypothesis leaves."""
        logits = self._screened(hypothesis.change, [request])
        return self._remaining(logits, hypothesis.readout, [request]) if logits else math.inf

    def _best(
        self, failing: list[Request], *, pairs: bool
    ) -> tuple[EngineCause, Hypothesis] | None:
        """The hypothesis that explains most; cheap ones first, until one explains the record.

        Pairs are far more than single changes: next to a known cause, one of them would sooner or
        later explain a request in which that cause met a decision within rounding.
        """
        sample = sorted(failing, key=lambda one: len(one.ids))[:_MOST_SAMPLED]
        scored: list[tuple[float, Hypothesis]] = []
        done: set[int] = set()
        # What rounding leaves; a hypothesis that leaves little more need not wait for others.
        clear = max(_CLEAR, 2 * self._rounding_share(sample))
        for group in self._screen(sample, pairs=pairs):
            scored += [one for one in group if math.isfinite(one[0])]
            scored.sort(key=lambda one: one[0])
            good = [one for one in scored if one[0] <= clear and id(one[1]) not in done]
            cause = self._confirmed(good[:_MOST_CONFIRMED], failing, done)
            if cause is not None:
                return cause
        close = [one for one in scored if one[0] <= _CLOSE and id(one[1]) not in done]
        rounding = [one for one in close if one[1].only_rounds]
        weak = [one for one in close if not one[1].only_rounds][:_MOST_CONFIRMED]
        cause = self._confirmed([*weak, *rounding], failing, done)
        if cause is not None:
            return cause
        if scored and scored[0][0] <= _MENTIONED:
            remaining, hypothesis = scored[0]
            closest = EngineCause(
                kind=hypothesis.kind,
                text=hypothesis.text,
                requests=tuple(one.record.name for one in failing),
                remaining=remaining,
                to_rounding=False,
            )
            return closest, hypothesis
        return None

    def _rounding_share(self, sample: list[Request]) -> float:
        """How much of the difference the reference's own rounding would be."""
        shares = []
        for request in sample:
            number = self.numbers[id(request)]
            own, whole = 0.0, 0.0
            for kind in request.values.keys() - CLAIMS:
                truth = self.base.truth(number, kind).cpu()
                native = self.base.evidence.native[0].outputs[self.base.items[number, kind]]
                own += _squares(native.double().cpu() - truth)
                whole += _squares(request.values[kind] - truth)
            shares.append(math.sqrt(own / whole) if whole else 0.0)
        return min(shares)

    def _confirmed(
        self, close: list[tuple[float, Hypothesis]], failing: list[Request], done: set[int]
    ) -> tuple[EngineCause, Hypothesis] | None:
        """The first of some hypotheses that gives records up to rounding, and its equals."""
        found: list[tuple[float, Hypothesis, tuple[str, ...]]] = []
        for remaining, hypothesis in close:
            if found and remaining > _ALIKE * found[0][0]:
                break
            done.add(id(hypothesis))
            self.tell(f"confirming: {hypothesis.text}")
            names = self._explained(hypothesis, failing)
            if names:
                found.append((remaining, hypothesis, names))
        if not found:
            return None
        most = max(len(names) for _, _, names in found)
        (remaining, chosen, names), *others = [one for one in found if len(one[2]) == most]
        cause = EngineCause(
            kind=chosen.kind,
            text=chosen.text,
            requests=names,
            remaining=remaining,
            to_rounding=True,
            also=tuple(one.text for _, one, _ in others),
        )
        return cause, chosen

    def _explained(self, hypothesis: Hypothesis, failing: list[Request]) -> tuple[str, ...]:
        """The failing requests that a hypothesis gives up to rounding, by all the evidence."""
        try:
            evidence, keys = self._run(hypothesis.change, hypothesis.readout, failing)
        except Exception:  # noqa: BLE001  (a hypothesis that cannot be run explains nothing)
            return ()
        if evidence.native[0].error is not None or not keys:
            return ()
        judged = _Judged(evidence, keys)
        known = {number for number, _ in judged.items}
        if hypothesis.only_rounds:
            failing = [one for one in failing if self._is_as_coarse(judged, one)]
        found = []
        for request in failing:
            number = self.numbers[id(request)]
            kinds = [kind for kind in request.values if kind != TOKENS or len(request.values) == 1]
            if number in known and all(judged.explains(request, number, kind) for kind in kinds):
                found.append(request.record.name)
        return tuple(found)

    def _is_as_coarse(self, judged: _Judged, request: Request) -> bool:
        """Whether most values are as far off as a coarser dtype makes them, not a few alone."""
        number = self.numbers[id(request)]
        kinds = [kind for kind in request.values if kind not in CLAIMS]
        truths = [self.base.truth(number, kind).cpu() for kind in kinds]
        coarse = [judged.evidence.native[0].outputs[judged.items[number, kind]] for kind in kinds]
        pairs = list(zip(kinds, truths, coarse, strict=True))
        mine = torch.cat([(request.values[kind] - true).abs() for kind, true, _ in pairs])
        theirs = torch.cat([(one.double().cpu() - true).abs() for _, true, one in pairs])
        return float(mine.median()) >= _AS_COARSE * float(theirs.median())

    def _screen(
        self, sample: list[Request], *, pairs: bool
    ) -> Iterator[list[tuple[float, Hypothesis]]]:
        """Hypotheses with the share of the difference that they leave, in groups."""
        own = self._screened(None, sample)
        yield [
            (self._remaining(own, one.readout, sample) * one.doubt, one)
            for one in (*self._known_readouts(sample), *self._fitted(own, sample))
        ]
        everything: list[Change] = []
        for changes in self._changes(sample):
            everything += changes
            yield [self._scored(change, sample) for change in changes if not change.only_rounds]
        yield self._flips(sample)
        # In float64 it is the reference itself: only the confirmation can tell.
        coarser = list(changed_models.coarser_dtypes(self.model))
        yield [(_CLOSE, Hypothesis(one.kind, one.text, one)) for one in coarser]
        if pairs:
            yield list(self._pairs(everything, sample))

    def _scored(self, change: Change, sample: list[Request]) -> tuple[float, Hypothesis]:
        self.tell(f"trying hypothesis {self.tried + 1}: {change.text}")
        logits = self._screened(change, sample)
        remaining = self._remaining(logits, AS_RECORDED, sample) if logits else math.inf
        return remaining, Hypothesis(change.kind, change.text, change)

    def _changes(self, sample: list[Request]) -> Iterator[list[Change]]:
        runner, model = self.runner, self.model
        yield list(changed_models.older_weights(runner, model, self.older))
        yield list(prompt_changes(runner, sample))
        yield list(position_changes(runner))
        yield list(changed_models.other_settings(model))
        yield list(cache_changes(runner, [*sample, *self.requests]))
        yield list(changed_models.quantised_weights(model))
        yield list(changed_models.skipped_layers(model))

    @staticmethod
    def _known_readouts(sample: list[Request]) -> list[Hypothesis]:
        samplings = [one.record.sampling for one in sample]
        known = readouts(samplings, {one.record.logprobs_mode for one in sample})
        return [Hypothesis(kind, text, None, one) for text, (kind, one) in known.items()]

    def _fitted(self, logits: dict[int, Tensor], sample: list[Request]) -> Iterator[Hypothesis]:
        """Readouts with one number that is fitted to the records."""

        def rest(readout: Readout) -> float:
            return self._remaining(logits, readout, sample)

        warm = _fit(lambda x: rest(Readout(temperature=math.exp(x))), -3.0, 3.0)
        temperature = math.exp(warm)
        words = f"a temperature of {temperature:.3g} is applied"
        yield Hypothesis("temperature", words, None, Readout(temperature=temperature), _FITTED)
        many = _fit(lambda x: rest(Readout(padding=math.exp(x))), 0.0, 13.0)
        padding = math.exp(many)
        words = f"about {padding:.3g} unused entries of the vocabulary are counted"
        yield Hypothesis("normalisation", words, None, Readout(padding=padding), _FITTED)
        named = {self.numbers[id(one)]: one for one in sample}
        for words, readout in fitted_truncation(logits, named).items():
            yield Hypothesis("truncation", words, None, readout, _FITTED)

    def _flips(self, sample: list[Request]) -> list[tuple[float, Hypothesis]]:
        experts = number_of_experts(self.tokens.config)
        found: list[tuple[float, Hypothesis]] = []
        for request in sample if experts else ():

            def rest_of(logits: LogitsOf, request: Request = request) -> float:
                seen = self._screened(Change("routing", "", logits), [request])
                return self._remaining(seen, AS_RECORDED, [request])

            self.tell(f"looking for other experts in {request.record.name}")
            change = search_flips(self.runner, experts, request, rest_of)
            if change is not None and change.logits is not None:
                hypothesis = Hypothesis("routing", change.text, change)
                found.append((rest_of(change.logits), hypothesis))
        return found

    def _pairs(
        self, changes: list[Change], sample: list[Request]
    ) -> Iterator[tuple[float, Hypothesis]]:
        """A changed run together with a changed readout."""
        sample = sample[:2]
        others = self._known_readouts(sample)
        for change in changes:
            logits = self._screened(change, sample)
            if not logits:
                continue
            for other in others:
                remaining = self._remaining(logits, other.readout, sample)
                text = f"{change.text}; {other.text}"
                yield remaining, Hypothesis(change.kind, text, change, other.readout)

    def _remaining(
        self, logits: dict[int, Tensor], readout: Readout, sample: list[Request]
    ) -> float:
        """The share of the difference that a hypothesis leaves: the median over the requests.

        A request that it does not concern keeps its difference.
        """
        shares = []
        for request in sample:
            number = self.numbers[id(request)]
            before, after = 0.0, 0.0
            values = readout.values(logits[number], request) if number in logits else None
            for kind, engine in request.values.items():
                if kind == TOKENS:
                    continue
                truth = self.base.truth(number, kind).cpu()
                before += _squares(engine - truth)
                other = truth if values is None else values[kind].double().cpu()
                after += _squares(engine - other)
            shares.append(math.sqrt(after / before) if before else math.inf)
        shares.sort()
        # One request that it explains is enough to look closer.
        return shares[0]


def _in_float32(model: Any) -> Any:
    """A copy in float32, or the model itself if it is not a module or is wider."""
    own = original_of(model)
    if not isinstance(own, torch.nn.Module):
        return model
    narrow = {torch.bfloat16, torch.float16}
    if not any(one.dtype in narrow for one in own.parameters()):
        return own
    return copy.deepcopy(own).float()


def _squares(error: Tensor) -> float:
    """The sum of squares; an infinite error counts as a large one, an unknown one as none."""
    error = torch.where(error.isnan(), 0.0, error).clamp(-100, 100)
    return float(error.square().sum())


def _total(error: Tensor) -> float:
    return float(error.abs().nan_to_num(0.0, 0.0, 0.0).sum())


def _fit(function: Callable[[float], float], low: float, high: float) -> float:
    """The argument with the least value: a grid, then a golden section."""
    steps = 30
    grid = [low + (high - low) * step / steps for step in range(steps + 1)]
    best = min(range(len(grid)), key=lambda place: function(grid[place]))
    left, right = grid[max(best - 1, 0)], grid[min(best + 1, steps)]
    ratio = (math.sqrt(5) - 1) / 2
    for _ in range(30):
        a, b = right - ratio * (right - left), left + ratio * (right - left)
        left, right = (left, b) if function(a) < function(b) else (a, right)
    return (left + right) / 2


def _token_model(model: Any, requests: list[Request]) -> TokenModel:
    """How the model is called on token ids.

    Raises:
        UsageError: it does not map token ids to logits.
    """
    longest = max(requests, key=lambda one: len(one.ids))
    own = original_of(model)
    size = _vocabulary(own)
    largest = max(max(one.ids) for one in requests)
    if size and largest >= size:
        raise UsageError(f"token id {largest} is not among the model's {size} tokens")
    device = next((one.device for one in getattr(own, "parameters", list)()), None)
    ids = torch.tensor([longest.ids], device=device)
    try:
        tokens = TokenModel(model, Inputs(kwargs={"input_ids": ids}))
    except DoesNotApply as error:
        raise UsageError(f"the model cannot be compared with an engine: {error}") from error
    if tokens.has_encoder:
        raise UsageError("models with an encoder are not compared with engines")
    return tokens


def _vocabulary(model: Any) -> int:
    """The number of its tokens; 0 if it does not say."""
    inner = getattr(model, "get_input_embeddings", None)
    if not callable(inner):
        return 0
    weight = getattr(inner(), "weight", None)
    return int(weight.shape[0]) if isinstance(weight, torch.Tensor) else 0
