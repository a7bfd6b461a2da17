"""What a serving engine returned for one request, and how logits become the numbers in it."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import torch

from paritas.core.errors import UsageError
from paritas.formats.foreign.vllm import answer_records, is_answer

if TYPE_CHECKING:
    from torch import Tensor


# Servers that speak JSON cannot send -inf; they send this instead.
_LOWEST = -9999.0

Mode = Literal["raw", "processed"]


class Sampling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The sampling parameters of a request; the defaults change nothing.

    Attributes:
        temperature: 0 for the best token at each step.
        top_k: 0 or -1 for all tokens.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0

    def __post_init__(self) -> None:
        if not self.temperature >= 0 or not self.repetition_penalty > 0:
            raise ValueError(
                f"temperature must be 0 or more and repetition_penalty positive, got {self}"
            )
        if not 0 < self.top_p <= 1 or not 0 <= self.min_p < 1:
            raise ValueError(f"top_p must be in (0, 1] and min_p in [0, 1), got {self}")

    @property
    def is_greedy(self) -> bool:
        """Whether the best token is taken at each step."""
        return self.temperature == 0 or self.top_k == 1

    @property
    def truncates(self) -> bool:
        """Whether tokens are excluded before one is drawn."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    @property
    def penalises(self) -> bool:
        """Whether the logits depend on the tokens so far."""
        return (
            self.repetition_penalty != 1
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
        )


class EngineRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an engine returned for one request.

    Attributes:
        prompt: the token ids of the prompt, as the engine was given them.
        output: the token ids that it generated.
        logprobs: the log probability of each output token; None where it returned none.
        prompt_logprobs: the same for the prompt's tokens; the first has none.
        top_logprobs: for each output token, log probabilities of some tokens by id.
        sampling: the sampling parameters. They say which tokens may be drawn.
        logprobs_mode: `raw`: of the model's own distribution; `processed`: after penalties,
            temperature and truncation, as the tokens were drawn.
        name: for reports; by default, the number of the request.
    """

    prompt: tuple[int, ...]
    output: tuple[int, ...]
    logprobs: tuple[float | None, ...] = ()
    prompt_logprobs: tuple[float | None, ...] = ()
    top_logprobs: tuple[dict[int, float], ...] = ()
    sampling: Sampling = Sampling()
    logprobs_mode: Mode = "raw"
    name: str = ""

    def __post_init__(self) -> None:
        if not self.prompt or not self.output:
            raise ValueError("prompt and output must have at least one token id each")
        if min(*self.prompt, *self.output) < 0:
            raise ValueError("token ids must not be negative")
        for name, token_ids in (
            ("logprobs", self.output),
            ("prompt_logprobs", self.prompt),
            ("top_logprobs", self.output),
        ):
            entries = getattr(self, name)
            if entries and len(entries) != len(token_ids):
                raise ValueError(f"{name} has {len(entries)} entries for {len(token_ids)} tokens")
        if not (self.logprobs or self.prompt_logprobs or self.top_logprobs):
            raise ValueError("it has no log probabilities: give logprobs")
        values = [
            logprob for logprob in (*self.logprobs, *self.prompt_logprobs) if logprob is not None
        ]
        values += [logprob for table in self.top_logprobs for logprob in table.values()]
        if not values:
            raise ValueError("it has no log probabilities: all are null")
        if any(math.isnan(value) for value in values):
            raise ValueError("a log probability is NaN")


def as_float(value: float) -> float:
    """A log probability; a server's smallest number stands for -inf."""
    return -math.inf if value <= _LOWEST else value


Engine = Callable[[list[list[int]]], Iterable[Any]]


def read_records(
    source: str | os.PathLike[str] | Iterable[Any] | Engine, prompts: Sequence[Sequence[int]] | None
) -> list[EngineRecord]:
    """The records of a JSONL file, of a list, or of an engine that is called with prompts.

    In place of a record, there may be an answer of vLLM with its request: see `compat.vllm`.

    Raises:
        UsageError: a record is not valid, or there is none.
    """
    if isinstance(source, str | os.PathLike):
        from_file = _from_file(Path(source))
    elif callable(source):
        if not prompts:
            raise UsageError("an engine to be called needs prompts: lists of token ids")
        prompt_lists = [list(map(int, prompt)) for prompt in prompts]
        answers = list(source(prompt_lists))
        if len(answers) != len(prompt_lists):
            raise UsageError(
                f"the engine returned {len(answers)} records for {len(prompt_lists)} prompts"
            )
        from_file = _from_list(answers)
    else:
        from_file = _from_list(source)
    if not from_file:
        raise UsageError("there are no records")
    return [
        record if record.name else msgspec.structs.replace(record, name=f"request {record_index}")
        for record_index, record in enumerate(from_file)
    ]


def _from_list(values: Iterable[Any]) -> list[EngineRecord]:
    return [
        record
        for record_index, value in enumerate(values)
        for record in _records(value, f"record {record_index}")
    ]


def _from_file(path: Path) -> list[EngineRecord]:
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise UsageError(f"{str(path)!r} cannot be read: {error.strerror}") from error
    engine_records: list[EngineRecord] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            data = msgspec.json.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise UsageError(f"{path}, line {number}: {error}") from None
        engine_records += _records(data, f"{path}, line {number}")
    return engine_records


def _records(value: Any, where: str) -> list[EngineRecord]:
    """The record, or those of an answer with several outputs."""
    if isinstance(value, EngineRecord):
        return [value]
    if is_answer(value):
        return [_record(answer_record, where) for answer_record in answer_records(value, where)]
    return [_record(value, where)]


def _record(value: Any, where: str) -> EngineRecord:
    if not isinstance(value, Mapping):
        raise UsageError(f"{where} must be a record, not {type(value).__name__}")
    try:
        # Lax mode reads "-inf", which JSON has no number for.
        return msgspec.convert(dict(value), EngineRecord, strict=False)
    except msgspec.ValidationError as error:
        raise UsageError(f"{where}: {error}") from None


# --- From logits to the numbers in a record: penalties, temperature, truncation, normalisation ----

# The kinds of values of a record.
LOGPROBS, PROMPT, TOP = "logprobs", "prompt_logprobs", "top_logprobs"
# Claims: that its tokens may be drawn, and that the right tokens share the mass. They are no
# numbers of the engine, which claims a distance of 0 from what is right.
TOKENS, LIMITS = "tokens", "limits"
CLAIMS = frozenset({TOKENS, LIMITS})

Scale = Literal["log", "logits", "probability", "log2", "log10", "negative log"]


class Request:
    """A record, prepared for comparison.

    Attributes:
        record: what the engine returned.
        start: the number of prompt tokens.
        ids: all tokens.
        drawn: the places of the output's tokens that the engine drew.
    """

    def __init__(self, record: EngineRecord) -> None:
        """Nothing is computed yet."""
        self.record = record
        self.start = len(record.prompt)
        self.ids = [*record.prompt, *record.output]
        self.given = [
            output_index
            for output_index, logprob in enumerate(record.logprobs)
            if logprob is not None
        ]
        self.given_prompt = [
            prompt_index
            for prompt_index, prompt_logprob in enumerate(record.prompt_logprobs)
            if prompt_logprob is not None and prompt_index
        ]
        self.top = [
            (output_index, token)
            for output_index, table in enumerate(record.top_logprobs)
            for token in table
        ]
        # A token of the output without any number was not drawn: a tool or a template wrote it.
        numbered = sorted({*self.given, *(output_index for output_index, _ in self.top)})
        self.drawn = numbered or list(range(len(record.output)))

    @functools.cached_property
    def values(self) -> dict[str, Tensor]:
        """What the engine returned, by kind. That its tokens may be drawn is a claim too.

        So is that a token may not be drawn (-inf): it is 0 here, and a readout has the token's
        distance from the limit in its place.
        """
        values_by_kind = dict(self._returned_numbers)
        for kind in values_by_kind.keys() & {LOGPROBS, TOP}:
            values_by_kind[kind] = torch.where(self.excludes(kind), 0.0, values_by_kind[kind])
        return values_by_kind

    def excludes(self, kind: str) -> Tensor:
        """Which entries the engine says may not be drawn."""
        return self._returned_numbers[kind].isneginf()

    @functools.cached_property
    def claims(self) -> tuple[list[int], list[int], list[bool]]:
        """Places and tokens of all entries, and whether the engine says that they may be drawn."""
        chosen = [(output_index, self.record.output[output_index]) for output_index in self.given]
        entries = [*chosen, *self.top]
        allowed_flags = [
            not is_excluded
            for kind in (LOGPROBS, TOP)
            if kind in self._returned_numbers
            for is_excluded in self.excludes(kind).tolist()
        ]
        return (
            [output_index for output_index, _ in entries],
            [token for _, token in entries],
            allowed_flags,
        )

    @functools.cached_property
    def _returned_numbers(self) -> dict[str, Tensor]:
        record = self.record
        numbers_by_kind: dict[str, list[float | None]] = {
            LOGPROBS: [record.logprobs[output_index] for output_index in self.given],
            PROMPT: [record.prompt_logprobs[prompt_index] for prompt_index in self.given_prompt],
            TOP: [record.top_logprobs[output_index][token] for output_index, token in self.top],
            TOKENS: [0.0 for _ in self.drawn] if self.claims_tokens else [],
            LIMITS: [0.0 for _ in record.output] if self.claims_limits else [],
        }
        return {
            kind: torch.tensor([as_float(number or 0.0) for number in numbers], dtype=torch.float64)
            for kind, numbers in numbers_by_kind.items()
            if numbers
        }

    @property
    def claims_limits(self) -> bool:
        """Whether its numbers are normalised over some tokens only."""
        some = self.record.logprobs_mode == "processed" and self.record.sampling.truncates
        return some and bool(self.given or self.top)

    @property
    def claims_tokens(self) -> bool:
        """Whether the sampling parameters exclude some tokens."""
        return self.record.sampling.is_greedy or self.record.sampling.truncates


@dataclasses.dataclass(frozen=True)
class Readout:
    """How the numbers of a record are computed from logits; by default, as the record says.

    Attributes:
        applies: the parts of the sampling parameters that are applied to log probabilities; None
            for what the record says.
        temperature: another temperature than that of the record.
        top_k: another number of tokens than that of the record.
        top_p: another mass of tokens than that of the record.
        offset: take the logits of this many tokens later.
        lag: return the number of this many tokens later; where there is none, it is unknown.
        best: return the best token's number in place of the chosen one's.
        scale: what is returned in place of natural logarithms.
        padding: this many further tokens with logits of 0 take part in the normalisation.
        rounded: the logits are rounded to this dtype, and so are the log probabilities.
    """

    applies: frozenset[str] | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    offset: int = 0
    lag: int = 0
    best: bool = False
    scale: Scale = "log"
    padding: float = 0.0
    rounded: torch.dtype | None = None

    def values(self, logits: Tensor, request: Request) -> dict[str, Tensor]:
        """The numbers by kind; row t of the logits predicts token t + 1."""
        ids = torch.tensor(request.ids, device=logits.device)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        values_by_kind: dict[str, Tensor] = {}
        start = request.start
        if request.given or request.top:
            table, inside, values_by_kind[LIMITS] = self._table(
                self._shift_places(logits)[start - 1 :], request
            )
            if request.given:
                chosen = (table.argmax(dim=-1) if self.best else ids[start:])[:, None]
                token_numbers, limit_distances = (
                    self._lagging(score_table.gather(1, chosen)[:, 0])
                    for score_table in (table, inside)
                )
                excludes = request.excludes(LOGPROBS).to(token_numbers.device)
                values_by_kind[LOGPROBS] = torch.where(
                    excludes, limit_distances[request.given], token_numbers[request.given]
                )
            if request.top:
                places, tokens = map(list, zip(*request.top, strict=True))
                excludes = request.excludes(TOP).to(table.device)
                values_by_kind[TOP] = torch.where(
                    excludes, inside[places, tokens], table[places, tokens]
                )
        if request.given_prompt:
            table = self._scale_logits(self._shift_places(logits)[: start - 1])
            picked = self._lagging(table.gather(1, ids[1:start, None])[:, 0])
            values_by_kind[PROMPT] = picked[
                [prompt_index - 1 for prompt_index in request.given_prompt]
            ]
        if request.claims_tokens:
            beyond = _beyond(logits[start - 1 :], request)
            values_by_kind[TOKENS] = beyond.gather(1, ids[start:, None])[request.drawn, 0]
        return {kind: values_by_kind[kind] for kind in request.values}

    def _lagging(self, numbers: Tensor) -> Tensor:
        if self.lag == 0:
            return numbers
        numbers = numbers.roll(-self.lag)
        numbers[slice(-self.lag, None) if self.lag > 0 else slice(0, -self.lag)] = math.nan
        return numbers

    def _shift_places(self, logits: Tensor) -> Tensor:
        return logits.roll(-self.offset, 0) if self.offset else logits

    def _table(self, logits: Tensor, request: Request) -> tuple[Tensor, Tensor, Tensor]:
        """Log probabilities of all tokens, or what is returned in their place; and two distances.

        A token beyond the limits has the number that it would have within them, less its distance:
        an engine whose rounding puts it within is not infinitely far off. The second value has the
        distances of the tokens within the limits. The third says for each place how far it is from
        right that so many tokens share the mass as in the engine.
        """
        logits = self._process_logits(logits, request)
        applies, sampling = self._find_applied_parts(request)
        limits = _limits(logits, sampling, applies)
        if not applies & TRUNCATION or not sampling.truncates:
            return self._scale_logits(logits), limits.inside, torch.zeros_like(logits[:, 0])
        beyond = limits.beyond
        if self.scale in {"probability", "negative log"}:
            beyond = torch.where(limits.excluded, math.inf, 0.0)
        total, distance = limits.share_totals(logits, *_engine_totals(logits, request))
        return self._scale_logits(logits - beyond, total), limits.inside, distance

    def _find_applied_parts(self, request: Request) -> tuple[frozenset[str], Sampling]:
        """The parts that are applied, and the parameters."""
        record, applies = request.record, self.applies
        if applies is None:
            applies = ALL_PARTS if record.logprobs_mode == "processed" else frozenset()
        overrides = {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}
        others = {name: value for name, value in overrides.items() if value is not None}
        return applies | others.keys(), msgspec.structs.replace(record.sampling, **others)

    def _process_logits(self, logits: Tensor, request: Request) -> Tensor:
        """The logits after penalties and temperature."""
        applies, sampling = self._find_applied_parts(request)
        if "penalties" in applies and sampling.penalises:
            logits = _penalise_logits(logits, request)
        if "temperature" in applies:
            # Greedy requests are not divided by 0: engines return the raw distribution.
            logits = logits / (sampling.temperature or 1.0)
        return logits

    def sharing(self, logits: Tensor, request: Request) -> tuple[Tensor, Tensor]:
        """How many tokens share the mass by the engine's numbers, at each place that has some.

        Returns:
            These counts, and the mass of the first n tokens, for all n.
        """
        logits = self._process_logits(
            self._shift_places(logits)[request.start - 1 :].double(), request
        )
        totals, has_total = _engine_totals(logits, request)
        masses = logits.sort(dim=-1, descending=True).values.logcumsumexp(dim=-1)[has_total]
        counts = (masses - totals[has_total, None]).abs().argmin(dim=-1) + 1
        return counts, (masses - masses[:, -1:]).exp()

    def _scale_logits(self, logits: Tensor, total: Tensor | None = None) -> Tensor:
        """What is returned for logits; `total` is what they are normalised by, if not their own."""
        if self.scale == "logits":
            return logits
        if self.rounded is not None:
            logits = logits.to(self.rounded).to(logits.dtype)
        table = logits.log_softmax(dim=-1) if total is None else logits - total[:, None]
        if self.padding > 0:
            own_total = torch.logsumexp(logits, dim=-1, keepdim=True)
            table = table - torch.nn.functional.softplus(math.log(self.padding) - own_total)
        if self.rounded is not None:
            table = table.to(self.rounded).to(table.dtype)
        if self.scale == "probability":
            return table.exp()
        factor = {"log": 1.0, "log2": 1 / math.log(2), "log10": 1 / math.log(10)}
        return table * factor.get(self.scale, -1.0)


AS_RECORDED = Readout()
TRUNCATION = frozenset({"top_k", "top_p", "min_p"})
ALL_PARTS = TRUNCATION | {"penalties", "temperature"}


def _penalise_logits(logits: Tensor, request: Request) -> Tensor:
    """Penalties of the tokens so far, as OpenAI's and transformers' documents define them."""
    sampling, start = request.record.sampling, request.start
    rows, size = logits.shape
    drawn = torch.zeros((rows, size), dtype=logits.dtype, device=logits.device)
    for row in range(1, rows):
        drawn[row] = drawn[row - 1]
        drawn[row, request.ids[start + row - 1]] += 1
    has_occurred = drawn > 0
    has_occurred[:, list(set(request.record.prompt))] = True
    factor = sampling.repetition_penalty
    repeated = torch.where(logits > 0, logits / factor, logits * factor)
    logits = torch.where(has_occurred, repeated, logits)
    return logits - sampling.frequency_penalty * drawn - sampling.presence_penalty * (drawn > 0)


def _engine_totals(logits: Tensor, request: Request) -> tuple[Tensor, Tensor]:
    """What the engine normalises by at each place, by its numbers; and which places have some."""
    places, tokens, allowed_flags = request.claims
    numbers = torch.cat(
        [request.values[kind] for kind in (LOGPROBS, TOP) if kind in request.values]
    )
    row_index, token, number = (
        torch.tensor(claim_column, device=logits.device)[
            torch.tensor(allowed_flags, device=logits.device)
        ]
        for claim_column in (places, tokens, numbers.tolist())
    )
    totals, counts = logits.new_zeros(len(logits)), logits.new_zeros(len(logits))
    totals = totals.index_add(0, row_index, logits[row_index, token] - number.to(logits.dtype))
    counts = counts.index_add(0, row_index, torch.ones_like(number, dtype=logits.dtype))
    return totals / counts.clamp(min=1), counts > 0


@dataclasses.dataclass(frozen=True)
class Limits:
    """Which tokens top-k, min-p and top-p exclude, in this order, and how clearly.

    A distance is the least change of logits by which a token would cross the limit: of its own, or
    of all better ones together. It changes smoothly with the logits, so that noise can be measured.

    Attributes:
        excluded: the tokens that may not be drawn.
        beyond: their distances from the limit; 0 for the others.
        inside: the distances of the others; 0 for these.
        price: the distance of each token from the limit while all keep their order: what it takes
            to keep one token more or less.
    """

    excluded: Tensor
    beyond: Tensor
    inside: Tensor
    price: Tensor

    def within(self, excluded: Tensor, distance: Tensor, in_order: Tensor | None = None) -> Limits:
        """The same with one more limit; `in_order` are the distances in which the order stays."""
        in_order = distance if in_order is None else in_order
        all_excluded = self.excluded | excluded
        inside = torch.minimum(self.inside, distance)
        beyond = torch.maximum(self.beyond, torch.where(excluded, distance, 0.0))
        further = torch.where(excluded, torch.maximum(self.price, in_order), self.price)
        price = torch.where(all_excluded, further, torch.minimum(self.price, in_order))
        return Limits(all_excluded, beyond, torch.where(all_excluded, 0.0, inside), price)

    def share_totals(
        self, logits: Tensor, engine: Tensor, has_engine_total: Tensor
    ) -> tuple[Tensor, Tensor]:
        """What the kept tokens are normalised by at each place, and how far that is from right.

        A token within rounding of the limit takes part or not. Of all numbers of tokens, the one is
        taken that is nearest to what the engine normalises by and to what is right, together.
        """
        ordered, order = logits.sort(dim=-1, descending=True)
        totals = ordered.logcumsumexp(dim=-1)
        right = (~self.excluded).sum(dim=-1, keepdim=True)
        count = torch.arange(1, logits.shape[-1] + 1, device=logits.device)
        one_more = self.price.gather(-1, order)
        one_less = torch.nn.functional.pad(one_more[:, 1:], (0, 1), value=math.inf)
        price = torch.where(count > right, one_more, one_less).masked_fill(count == right, 0.0)
        misses = torch.where(has_engine_total[:, None], (totals - engine[:, None]).abs(), 0.0)
        best = (misses + price).argmin(dim=-1, keepdim=True)
        return totals.gather(-1, best)[:, 0], price.gather(-1, best)[:, 0]


def _limits(logits: Tensor, sampling: Sampling, applies: frozenset[str] = ALL_PARTS) -> Limits:
    """The limits of some parameters; `logits` are after the temperature."""
    none = torch.zeros_like(logits)
    limits = Limits(none.bool(), none, none + math.inf, none + math.inf)
    if "top_k" in applies and 0 < sampling.top_k < logits.shape[-1]:
        best = logits.topk(sampling.top_k + 1, dim=-1).values
        last, following = best[:, -2:-1], best[:, -1:]
        excluded = logits < last
        distance = torch.where(excluded, last - logits, logits - following)
        # Rounding makes ties, so that there are more tokens, never fewer.
        limits = limits.within(excluded, distance, distance.masked_fill(~excluded, math.inf))
    if "min_p" in applies and sampling.min_p > 0:
        least = logits.amax(dim=-1, keepdim=True) + math.log(sampling.min_p)
        limits = limits.within(logits < least, (logits - least).abs())
    if "top_p" in applies and sampling.top_p < 1:
        limits = limits.within(*_nucleus(logits, limits.excluded, sampling.top_p))
    return limits


def _nucleus(logits: Tensor, before: Tensor, top_p: float) -> tuple[Tensor, Tensor, Tensor]:
    """The tokens beyond the nucleus, and both distances; `before` are those excluded before."""
    ordered, order = logits.masked_fill(before, -math.inf).sort(dim=-1, descending=True)
    mass = ordered.softmax(dim=-1)
    better = (mass.cumsum(dim=-1) - mass).clamp(0.0, 1.0)
    excluded = better >= top_p
    lowest = ordered.masked_fill(excluded, math.inf).amin(dim=-1, keepdim=True)
    highest = ordered.masked_fill(~excluded, -math.inf).amax(dim=-1, keepdim=True)
    by_own = torch.where(excluded, lowest - ordered, ordered - highest)
    by_better = (better.logit() - math.log(top_p / (1 - top_p))).abs()
    excluded = torch.zeros_like(before).scatter(-1, order, excluded) & ~before
    distance, in_order = (
        torch.zeros_like(logits).scatter(-1, order, ordered_distances).masked_fill(before, math.inf)
        for ordered_distances in (torch.minimum(by_own, by_better), by_better)
    )
    return excluded, distance, in_order


def _beyond(logits: Tensor, request: Request) -> Tensor:
    """How far tokens are beyond what may be drawn; 0 for those that may be."""
    sampling = request.record.sampling
    if sampling.penalises:
        logits = _penalise_logits(logits, request)
    if sampling.is_greedy:
        return _limits(logits, Sampling(top_k=1)).beyond
    return _limits(logits / sampling.temperature, sampling).beyond


def draws_of(logits: Tensor, request: Request) -> tuple[Tensor, Tensor, Tensor]:
    """What each token was drawn from: scores before the temperature, what may be drawn, the token.

    Row t of the logits predicts token t + 1. A token that may not be drawn is left out: that it was
    drawn is judged elsewhere.
    """
    sampling, start = request.record.sampling, request.start
    scores = logits[start - 1 :].double()
    if sampling.penalises:
        scores = _penalise_logits(scores, request)
    allowed = ~_limits(scores / sampling.temperature, sampling).excluded
    tokens = torch.tensor(request.record.output, device=scores.device)
    places = torch.tensor(request.drawn, device=scores.device)
    places = places[allowed[places, tokens[places]]]
    return scores[places], allowed[places], tokens[places]


def fitted_truncation(
    logits: Mapping[Any, Tensor], requests: Mapping[Any, Request]
) -> dict[str, Readout]:
    """Truncation by other parameters, as the number of tokens that share the mass shows them."""
    sharings = [
        AS_RECORDED.sharing(request_logits, requests[key]) for key, request_logits in logits.items()
    ]
    counts = [int(count) for some, _ in sharings for count in some]
    size = next(iter(logits.values())).shape[-1]
    if not counts or statistics.median(counts) >= size:
        return {}
    rows = [row for _, masses in sharings for row in masses.tolist()]
    # The mass of the kept tokens is at least top_p, and that without the last of them is less.
    most = min(row[count - 1] for row, count in zip(rows, counts, strict=True))
    least = max(
        row[count - 2] if count > 1 else 0.0 for row, count in zip(rows, counts, strict=True)
    )
    number, mass = int(statistics.median(counts)), min((most + least) / 2, most)
    return {
        f"a top_p of {mass:.2g} is applied": Readout(top_p=mass),
        f"a top_k of {number} is applied": Readout(top_k=number),
    }


def readouts(request_sampling: list[Sampling], modes: set[str]) -> dict[str, tuple[str, Readout]]:
    """Other ways to read the logits: text -> kind of the cause and the readout.

    Fitted ones come from elsewhere: they need the logits.
    """
    readout_by_text: dict[str, tuple[str, Readout]] = {}
    warm = any(sampling.temperature not in (0, 1) for sampling in request_sampling)
    cuts = any(sampling.truncates for sampling in request_sampling)
    fines = any(sampling.penalises for sampling in request_sampling)
    if "processed" in modes:
        readout_by_text |= _missing_parts(warm=warm, cuts=cuts, fines=fines)
    if "raw" in modes:
        readout_by_text |= _surplus_parts(warm=warm, cuts=cuts, fines=fines)
    for shift, words in ((1, "the next token"), (-1, "the token before")):
        readout_by_text[f"each log probability is that of {words}"] = "shift", Readout(lag=shift)
        readout_by_text[f"tokens are scored by the logits for {words}"] = (
            "shift",
            Readout(offset=shift),
        )
    readout_by_text[
        "the log probabilities are those of the best tokens, not of the chosen ones"
    ] = (
        "shift",
        Readout(best=True),
    )
    scales: dict[Scale, str] = {
        "logits": "logits, not normalised",
        "probability": "probabilities, not their logarithms",
        "log2": "logarithms to base 2",
        "log10": "logarithms to base 10",
        "negative log": "negated",
    }
    for scale, words in scales.items():
        readout_by_text[f"the log probabilities are {words}"] = (
            "normalisation",
            Readout(scale=scale),
        )
    return readout_by_text


def _missing_parts(*, warm: bool, cuts: bool, fines: bool) -> dict[str, Any]:
    readout_by_text: dict[str, Any] = {}
    raw = "the log probabilities are raw, though processed ones were asked for"
    readout_by_text[raw] = "normalisation", Readout(applies=frozenset())
    if warm:
        some = ALL_PARTS - {"temperature"}
        readout_by_text["the temperature is not applied"] = "temperature", Readout(applies=some)
    if cuts:
        some = ALL_PARTS - TRUNCATION
        words = "the log probabilities are not normalised over the tokens that may be drawn"
        readout_by_text[words] = "truncation", Readout(applies=some)
        for part in ("top_k", "top_p", "min_p"):
            readout_by_text[f"{part} is not applied"] = (
                "truncation",
                Readout(applies=ALL_PARTS - {part}),
            )
    if fines:
        some = ALL_PARTS - {"penalties"}
        readout_by_text["the penalties are not applied"] = "penalties", Readout(applies=some)
    return readout_by_text


def _surplus_parts(*, warm: bool, cuts: bool, fines: bool) -> dict[str, Any]:
    readout_by_text: dict[str, Any] = {}
    if warm:
        readout_by_text["the temperature is applied to raw log probabilities"] = (
            "temperature",
            Readout(applies=frozenset({"temperature"})),
        )
    if cuts:
        words = "raw log probabilities are normalised over the tokens that may be drawn"
        readout_by_text[words] = "truncation", Readout(applies=TRUNCATION)
        for part in ("top_k", "top_p", "min_p"):
            words = f"{part} is applied to raw log probabilities"
            readout_by_text[words] = "truncation", Readout(applies=frozenset({part}))
    if fines:
        readout_by_text["the penalties are applied to raw log probabilities"] = (
            "penalties",
            Readout(applies=frozenset({"penalties"})),
        )
    if warm + cuts + fines > 1:
        words = "the log probabilities are processed, though raw ones were asked for"
        readout_by_text[words] = "normalisation", Readout(applies=ALL_PARTS)
        if warm and cuts:
            words = "temperature and truncation are applied to raw log probabilities"
            some = ALL_PARTS - {"penalties"}
            readout_by_text[words] = "normalisation", Readout(applies=some)
    return readout_by_text
