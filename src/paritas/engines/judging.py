"""Running the reference on requests, and judging what the engine returned for them.

The requests are run in batches, each of which has evidence of its own: the reference in float64 and
in perturbed runs. So memory is bounded, and a time limit can be kept between two batches.
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

from paritas.core.errors import UsageError, in_one_line
from paritas.core.execution.evidence import Evidence
from paritas.core.execution.item_evidence import ItemEvidence
from paritas.core.execution.observation import RunConditions
from paritas.core.execution.saved_state import RandomState
from paritas.core.execution.subject_runs import SubjectProgram
from paritas.core.execution.subjects import Inputs, inspect_subject
from paritas.core.execution.token_models import TokenModel
from paritas.core.execution.ways import DoesNotApply
from paritas.core.judging.pairs import Checks, Pair, Ruling, judge_pair
from paritas.core.numerics import criterion
from paritas.core.results.findings import Finding, Status
from paritas.core.results.items import Item, ItemKind
from paritas.core.torch_private.dynamo import original_of
from paritas.core.torch_private.global_state import quietly
from paritas.engines.changes import Runner, vocabulary
from paritas.engines.records import AS_RECORDED, CLAIMS, LIMITS, LOGPROBS, PROMPT, TOKENS, Readout
from paritas.engines.rows import EngineRow

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch import Tensor

    from paritas.engines.changes import Change, LogitsOf
    from paritas.engines.records import Request

# Requests with so many tokens at most are run in one batch, and so many requests. The first batch
# is small: it shows how long they take.
_MOST_TOGETHER = 1 << 14
_FIRST_BATCH, _LARGEST_BATCH = 8, 64
GROWTH = 2
# A hypothesis may leave at most this share of a record's values unknown.
_MOST_UNKNOWN = 0.5
_SAME = 1e-4
_CLEARLY = 1e-3
_LARGE = 1e3
# An engine returns its numbers in a dtype of its own.
_NUMBERS = Checks(dtype=False)
_NOT_ALLOWED = "its tokens are not among those that its sampling parameters allow"


class Clock:
    """A time limit, and whether another step still fits.

    Attributes:
        began: when it was started.
        seconds: the limit.
    """

    def __init__(self, seconds: float) -> None:
        """Start."""
        self.seconds = seconds
        self.began = self._last = time.monotonic()
        self._longest = 0.0

    @property
    def spent(self) -> float:
        """The time since the start."""
        return time.monotonic() - self.began

    def allows_another(self, share: float = 1.0, times: float = 1.0) -> bool:
        """Whether a step so many times the longest since the last `start_steps` ends in time."""
        now = time.monotonic()
        self._longest = max(self._longest, now - self._last)
        self._last = now
        return self.spent + times * self._longest < share * self.seconds

    def start_steps(self) -> None:
        """Steps of another kind begin, which take longer or shorter."""
        self._longest, self._last = 0.0, time.monotonic()


class Judged:
    """Requests under one hypothesis: its evidence, and the judgement of each."""

    def __init__(self, evidence: Evidence[SubjectProgram], keys: list[tuple[int, str]]) -> None:
        """`keys` are the values of the run, in the order in which they were returned."""
        self.evidence = evidence
        self.items = dict(zip(keys, evidence.native[0].outputs, strict=True))
        self._truths: dict[tuple[int, str], Tensor] = {}

    def explains(self, request: Request, number: int, kind: str) -> bool:
        """Whether the hypothesis gives these values; it may leave some, not most, unknown."""
        unknown = self.native(number, kind).isnan()
        if int(unknown.sum()) > unknown.numel() * _MOST_UNKNOWN:
            return False
        known_values = torch.where(unknown.cpu(), torch.nan, request.values[kind])
        return self.finding(request, number, kind, known_values).status.passes()

    def finding(
        self, request: Request, number: int, kind: str, values: Tensor | None = None
    ) -> Finding:
        """The judgement of the engine's values, or of others in their place."""
        reference = self.native(number, kind)
        engine = (request.values[kind] if values is None else values).to(reference.device)
        evidence = ItemEvidence(self.evidence, self.items[number, kind])
        pair = Pair(item_of(request, kind), reference, engine, evidence)
        rules = (_rule_on_limits,) if kind == LIMITS else ()
        (finding,), _ = judge_pair(pair, _NUMBERS, rules=rules)
        if kind == TOKENS and not finding.status.passes():
            return msgspec.structs.replace(finding, advice=_NOT_ALLOWED)
        return finding

    def native(self, number: int, kind: str) -> Tensor:
        """The values in the dtype of the run."""
        native_values: Tensor = self.evidence.native[0].outputs[self.items[number, kind]]
        return native_values

    def truth(self, number: int, kind: str) -> Tensor:
        """The values in float64, if the reference can be run so."""
        key = (number, kind)
        if key not in self._truths:
            arbiter = self.evidence.arbiter()
            truth_runs = self.evidence.native if arbiter is None else arbiter
            self._truths[key] = truth_runs[0].outputs[self.items[key]].double().cpu()
        return self._truths[key]

    def beyond_noise(
        self, request: Request, number: int, kind: str, *, clearly: bool = False
    ) -> Tensor:
        """Which of the engine's values are further off than rounding moves them.

        One perturbed run may leave a number almost still by chance. `clearly` asks for more than
        rounding moves the others, and for a part of the largest error that matters.
        """
        evidence, item = self.evidence, self.items[number, kind]
        spread = evidence.spread(evidence.unit, 0, item, 1)
        truth = self.truth(number, kind)
        error = (request.values[kind] - truth).abs().nan_to_num(math.inf)
        noise = torch.zeros_like(error) if spread is None else spread.double().cpu()
        least = 0.0
        if clearly:
            noise = noise.clamp(min=criterion.rms(noise))
            least = _CLEARLY * float(error.clamp(max=_LARGE).max())
        limit = criterion.MAX_Z * (noise + evidence.unit * truth.abs().nan_to_num(0.0))
        return error > limit.clamp(min=least)


def _rule_on_limits(finding: Finding) -> Ruling | None:
    """That rounding decides is just what is claimed."""
    return Ruling(Status.EQUIVALENT) if finding.status is Status.UNSTABLE else None


def item_of(request: Request, kind: str) -> Item:
    """What a finding about some values of a request is about."""
    return Item(ItemKind.NAMED, kind).in_graph(request.record.name)


class RequestJudgements:
    """All requests against one reference.

    Attributes:
        model: the reference.
        requests: what the engine returned.
        numbers: the number of each request, by its identity.
        base: the judgement of each compared request under the reference itself, by number.
    """

    def __init__(
        self, model: Any, requests: list[Request], *, seed: int, tell: Callable[[str], None]
    ) -> None:
        """Nothing is compared yet.

        Raises:
            UsageError: the model does not map token ids to logits.
        """
        self.model, self.requests = model, requests
        self.seed, self.tell = seed, tell
        self.tokens = _token_model(model, requests)
        self.runner = Runner(self.tokens)
        self.numbers = {id(request): number for number, request in enumerate(requests)}
        self.base: dict[int, Judged] = {}
        self._subject = inspect_subject(model, "reference", "model")
        self._rng = RandomState.now()

    @property
    def notes(self) -> tuple[str, ...]:
        """What the runs of the reference noted."""
        return tuple(
            dict.fromkeys(note for judged in self.base.values() for note in judged.evidence.notes)
        )

    # --- Running ---

    def run(self, change: Change | None, readout: Readout, requests: list[Request]) -> Judged:
        """Run a hypothesis on some requests in the dtype of the reference.

        Raises:
            Exception: what the run raised.
        """
        logits_of = self._logits(change)
        model = self.model
        if change is not None and change.make_model is not None:
            model = change.make_model(model)
        keys: list[tuple[int, str]] = []

        def call(model: Any) -> dict[str, Tensor]:
            keys.clear()
            named_outputs = {}
            for request, logits in zip(
                requests, self._runs(logits_of, model, requests), strict=True
            ):
                if logits is None:
                    continue
                number = self.numbers[id(request)]
                for kind, value in readout.values(logits, request).items():
                    keys.append((number, kind))
                    named_outputs[f"{number} {kind}"] = value
            return named_outputs

        evidence = Evidence(self._program(call, model), seed=self.seed)
        error = evidence.native[0].error
        if error is not None:
            raise error
        return Judged(evidence, list(keys))

    def _program(self, call: Callable[[Any], dict[str, Tensor]], model: Any) -> SubjectProgram:
        subject = self._subject
        if model is not self.model:
            subject = inspect_subject(model, "reference", "model")
        inner = subject.call

        def run() -> dict[str, Tensor]:
            with torch.no_grad():
                return call(inner)

        subject = dataclasses.replace(subject, call=run, is_module=False)
        conditions = RunConditions(gradients=False, seed=self.seed, changing=frozenset())
        return SubjectProgram(subject, Inputs(), self._rng, conditions)

    def _logits(self, change: Change | None) -> LogitsOf:
        return self.runner.plain if change is None or change.logits is None else change.logits

    def _runs(
        self, logits_of: LogitsOf, model: Any, requests: list[Request]
    ) -> Iterable[Tensor | None]:
        fits = len(requests) * max(len(request.ids) for request in requests) <= _MOST_TOGETHER
        if logits_of == self.runner.plain and len(requests) > 1 and fits and self._runs_together:
            return self.runner.together(model, requests)
        return (logits_of(model, request) for request in requests)

    def logits(self, change: Change | None, requests: list[Request]) -> dict[int, Tensor]:
        """The logits of some requests under a changed run, by number; empty if it cannot be run.

        They are computed in float32 or wider, to screen hypotheses by.
        """
        try:
            model = self.float32
            if change is not None and change.make_model is not None:
                model = change.make_model(model)
            with torch.no_grad(), quietly():
                runs = list(self._runs(self._logits(change), model, requests))
        except Exception:  # noqa: BLE001  (a hypothesis that cannot be run explains nothing)
            return {}
        pairs = zip(requests, runs, strict=True)
        return {
            self.numbers[id(request)]: logits for request, logits in pairs if logits is not None
        }

    @functools.cached_property
    def float32(self) -> Any:
        """The reference without the rounding of a narrow dtype."""
        return in_float32(self.model)

    @functools.cached_property
    def _runs_together(self) -> bool:
        """Whether requests can be run in one batch: later tokens and other rows change nothing."""
        if len(self.requests) == 1:
            return False
        by_length = sorted(self.requests, key=lambda request: len(request.ids))
        pair = [by_length[0], by_length[len(by_length) // 2]]
        try:
            with torch.no_grad(), quietly():
                alone = self.runner.plain(self.float32, pair[0])
                beside = self.runner.together(self.float32, pair)[0]
        except Exception:  # noqa: BLE001  (then each request is run by itself)
            return False
        return criterion.relative_rms(beside - alone, alone) <= _SAME

    # --- The rows ---

    def batches(self, requests: Sequence[Request]) -> Iterator[list[Request]]:
        """The requests in their order, in batches that grow by at most a factor of `GROWTH`."""
        batch: list[Request] = []
        size = _FIRST_BATCH
        for request in requests:
            longest = max(len(batch_request.ids) for batch_request in (*batch, request))
            is_full = len(batch) == size or (len(batch) + 1) * longest > _MOST_TOGETHER
            if batch and is_full:
                yield batch
                batch = []
                size = min(GROWTH * size, _LARGEST_BATCH)
            batch.append(request)
        if batch:
            yield batch

    def compare(self, batch: list[Request]) -> list[EngineRow]:
        """Judge some requests.

        Raises:
            UsageError: the model raises on them.
        """
        try:
            judged = self.run(None, AS_RECORDED, batch)
        except Exception as error:
            raise UsageError(f"the model raises on the records: {in_one_line(error)}") from error
        for request in batch:
            self.base[self.numbers[id(request)]] = judged
        return [self._row(request) for request in batch]

    def _row(self, request: Request) -> EngineRow:
        number = self.numbers[id(request)]
        base = self.base[number]
        findings = tuple(base.finding(request, number, kind) for kind in request.values)
        engine, rounding_total, count, first = 0.0, 0.0, 0, None
        for kind, values in request.values.items():
            if kind in CLAIMS:
                continue
            truth = base.truth(number, kind)
            engine += _total(values - truth)
            rounding_total += _total(base.native(number, kind).double().cpu() - truth)
            count += values.numel()
        if LOGPROBS in request.values and not all(finding.status.passes() for finding in findings):
            wrong = base.beyond_noise(request, number, LOGPROBS).nonzero()
            first = request.given[int(wrong[0])] if len(wrong) else None
        return EngineRow(
            name=request.record.name,
            tokens=count,
            difference=engine / max(count, 1),
            rounding=rounding_total / max(count, 1),
            first=first,
            findings=findings,
        )

    def wrong_places(self, request: Request) -> list[tuple[int, bool]]:
        """For each number, in order: which token it is about, and whether it is clearly wrong."""
        number = self.numbers[id(request)]
        flagged_tokens: list[tuple[int, bool]] = []
        places = {
            PROMPT: request.given_prompt,
            LOGPROBS: [request.start + output_index for output_index in request.given],
        }
        for kind, tokens in places.items():
            if kind in request.values:
                wrong = self.base[number].beyond_noise(request, number, kind, clearly=True)
                flagged_tokens += zip(tokens, wrong.tolist(), strict=True)
        return flagged_tokens


def in_float32(model: Any) -> Any:
    """A copy in float32, or the model itself if it is not a module or is wider."""
    original = original_of(model)
    if not isinstance(original, torch.nn.Module):
        return model
    narrow = {torch.bfloat16, torch.float16}
    if not any(parameter.dtype in narrow for parameter in original.parameters()):
        return original
    return copy.deepcopy(original).float()


def _total(error: Tensor) -> float:
    return float(error.abs().nan_to_num(0.0, 0.0, 0.0).sum())


def _token_model(model: Any, requests: list[Request]) -> TokenModel:
    """How the model is called on token ids.

    Raises:
        UsageError: it does not map token ids to logits.
    """
    longest = max(requests, key=lambda request: len(request.ids))
    original = original_of(model)
    size = vocabulary(original)
    largest = max(max(request.ids) for request in requests)
    if size and largest >= size:
        raise UsageError(f"token id {largest} is not among the model's {size} tokens")
    device = next((parameter.device for parameter in getattr(original, "parameters", list)()), None)
    ids = torch.tensor([longest.ids], device=device)
    try:
        tokens = TokenModel(model, Inputs(kwargs={"input_ids": ids}))
    except DoesNotApply as error:
        raise UsageError(f"the model cannot be compared with an engine: {error}") from error
    if tokens.has_encoder:
        raise UsageError("models with an encoder are not compared with engines")
    return tokens
