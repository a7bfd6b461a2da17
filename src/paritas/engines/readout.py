"""From logits to the numbers in a record: penalties, temperature, truncation, normalisation."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import TYPE_CHECKING, Any, Literal

import torch

from paritas.engines.records import EngineRecord, Sampling, as_float

if TYPE_CHECKING:
    from torch import Tensor

# The kinds of values of a record.
LOGPROBS, PROMPT, TOP, TOKENS = "logprobs", "prompt_logprobs", "top_logprobs", "tokens"

Scale = Literal["log", "logits", "probability", "log2", "log10", "negative log"]


class Request:
    """A record, prepared for comparison.

    Attributes:
        record: what the engine returned.
        start: the number of prompt tokens.
        ids: all tokens.
    """

    def __init__(self, record: EngineRecord) -> None:
        """Nothing is computed yet."""
        self.record = record
        self.start = len(record.prompt)
        self.ids = [*record.prompt, *record.output]
        self.given = [place for place, one in enumerate(record.logprobs) if one is not None]
        self.given_prompt = [
            place for place, one in enumerate(record.prompt_logprobs) if one is not None and place
        ]
        self.top = [
            (place, token) for place, table in enumerate(record.top_logprobs) for token in table
        ]

    @functools.cached_property
    def values(self) -> dict[str, Tensor]:
        """What the engine returned, by kind. That its tokens may be drawn is a claim too."""
        record = self.record
        found: dict[str, list[float | None]] = {
            LOGPROBS: [record.logprobs[place] for place in self.given],
            PROMPT: [record.prompt_logprobs[place] for place in self.given_prompt],
            TOP: [record.top_logprobs[place][token] for place, token in self.top],
            TOKENS: [0.0 for _ in record.output] if self.claims_tokens else [],
        }
        return {
            kind: torch.tensor([as_float(one or 0.0) for one in numbers], dtype=torch.float64)
            for kind, numbers in found.items()
            if numbers
        }

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
        offset: take the logits of this many tokens later.
        lag: return the number of this many tokens later; where there is none, it is unknown.
        best: return the best token's number in place of the chosen one's.
        scale: what is returned in place of natural logarithms.
        padding: this many further tokens with logits of 0 take part in the normalisation.
        rounded: the logits are rounded to this dtype, and so are the log probabilities.
    """

    applies: frozenset[str] | None = None
    temperature: float | None = None
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
        found: dict[str, Tensor] = {}
        record, start = request.record, request.start
        rows = logits[start - 1 :]
        if request.given or request.top:
            table = self._table(self._moved(logits)[start - 1 :], request)
            chosen = table.argmax(dim=-1) if self.best else ids[start:]
            if request.given:
                numbers = self._lagging(table.gather(1, chosen[:, None])[:, 0])
                found[LOGPROBS] = numbers[request.given]
            if request.top:
                places, tokens = zip(*request.top, strict=True)
                found[TOP] = table[list(places), list(tokens)]
        if request.given_prompt:
            table = self._scaled(self._moved(logits)[: start - 1])
            picked = self._lagging(table.gather(1, ids[1:start, None])[:, 0])
            found[PROMPT] = picked[[place - 1 for place in request.given_prompt]]
        if request.claims_tokens:
            processed = _penalised(rows, request) if record.sampling.penalises else rows
            found[TOKENS] = _beyond(processed, ids[start:], record.sampling)
        return {kind: found[kind] for kind in request.values}

    def _lagging(self, numbers: Tensor) -> Tensor:
        if self.lag == 0:
            return numbers
        numbers = numbers.roll(-self.lag)
        numbers[slice(-self.lag, None) if self.lag > 0 else slice(0, -self.lag)] = math.nan
        return numbers

    def _moved(self, logits: Tensor) -> Tensor:
        return logits.roll(-self.offset, 0) if self.offset else logits

    def _table(self, logits: Tensor, request: Request) -> Tensor:
        """Log probabilities of all tokens, or what is returned in their place."""
        sampling = request.record.sampling
        applies = self.applies
        if applies is None:
            applies = ALL_PARTS if request.record.logprobs_mode == "processed" else frozenset()
        if "penalties" in applies and sampling.penalises:
            logits = _penalised(logits, request)
        temperature = sampling.temperature if self.temperature is None else self.temperature
        if "temperature" in applies or self.temperature is not None:
            # Greedy requests are not divided by 0: engines return the raw distribution.
            logits = logits / (temperature or 1.0)
        logits = _truncated(logits, sampling, applies)
        return self._scaled(logits)

    def _scaled(self, logits: Tensor) -> Tensor:
        if self.scale == "logits":
            return logits
        if self.rounded is not None:
            logits = logits.to(self.rounded).to(logits.dtype)
        table = logits.log_softmax(dim=-1)
        if self.padding > 0:
            total = torch.logsumexp(logits, dim=-1, keepdim=True)
            table = table - torch.nn.functional.softplus(math.log(self.padding) - total)
        if self.rounded is not None:
            table = table.to(self.rounded).to(table.dtype)
        if self.scale == "probability":
            return table.exp()
        factor = {"log": 1.0, "log2": 1 / math.log(2), "log10": 1 / math.log(10)}
        return table * factor.get(self.scale, -1.0)


AS_RECORDED = Readout()
ALL_PARTS = frozenset({"penalties", "temperature", "top_k", "top_p", "min_p"})


def _penalised(logits: Tensor, request: Request) -> Tensor:
    """Penalties of the tokens so far, as OpenAI's and transformers' documents define them."""
    sampling, start = request.record.sampling, request.start
    rows, size = logits.shape
    drawn = torch.zeros((rows, size), dtype=logits.dtype, device=logits.device)
    for row in range(1, rows):
        drawn[row] = drawn[row - 1]
        drawn[row, request.ids[start + row - 1]] += 1
    seen = drawn > 0
    seen[:, list(set(request.record.prompt))] = True
    factor = sampling.repetition_penalty
    repeated = torch.where(logits > 0, logits / factor, logits * factor)
    logits = torch.where(seen, repeated, logits)
    return logits - sampling.frequency_penalty * drawn - sampling.presence_penalty * (drawn > 0)


def _truncated(logits: Tensor, sampling: Sampling, applies: frozenset[str]) -> Tensor:
    """Exclude tokens as top-k, top-p and min-p do, in this order."""
    out = -math.inf
    if "top_k" in applies and 0 < sampling.top_k < logits.shape[-1]:
        least = logits.topk(sampling.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < least, out)
    if "min_p" in applies and sampling.min_p > 0:
        least = logits.amax(dim=-1, keepdim=True) + math.log(sampling.min_p)
        logits = logits.masked_fill(logits < least, out)
    if "top_p" in applies and sampling.top_p < 1:
        ordered, order = logits.sort(dim=-1, descending=True)
        mass = ordered.softmax(dim=-1)
        before = mass.cumsum(dim=-1) - mass
        excluded = torch.zeros_like(before, dtype=torch.bool)
        excluded = excluded.scatter(-1, order, before >= sampling.top_p)
        logits = logits.masked_fill(excluded, out)
    return logits


def _beyond(logits: Tensor, tokens: Tensor, sampling: Sampling) -> Tensor:
    """How far each token is beyond what the parameters allow; 0 for those that may be drawn.

    It changes smoothly with the logits, so that a token within rounding of the limit is no fault.
    """
    own = logits.gather(1, tokens[:, None])
    gaps = [torch.zeros_like(own)]
    count = 1 if sampling.is_greedy else sampling.top_k
    if 0 < count < logits.shape[-1]:
        gaps.append(logits.topk(count, dim=-1).values[:, -1:] - own)
    if not sampling.is_greedy:
        warm = logits / sampling.temperature
        if sampling.min_p > 0:
            mine = own / sampling.temperature
            gaps.append(warm.amax(dim=-1, keepdim=True) + math.log(sampling.min_p) - mine)
        if sampling.top_p < 1:
            if 0 < sampling.top_k < logits.shape[-1]:
                warm = _truncated(warm, sampling, frozenset({"top_k"}))
            better = torch.where(logits > own, warm.softmax(dim=-1), 0.0)
            gaps.append(better.sum(dim=-1, keepdim=True) - sampling.top_p)
    return torch.cat(gaps, dim=1).amax(dim=1)


def readouts(request_sampling: list[Sampling], modes: set[str]) -> dict[str, tuple[str, Readout]]:
    """Other ways to read the logits: text -> kind of the cause and the readout.

    Fitted ones come from elsewhere: they need the logits.
    """
    found: dict[str, tuple[str, Readout]] = {}
    warm = any(one.temperature not in (0, 1) for one in request_sampling)
    cuts = any(one.truncates for one in request_sampling)
    fines = any(one.penalises for one in request_sampling)
    if "processed" in modes:
        found |= _missing_parts(warm=warm, cuts=cuts, fines=fines)
    if "raw" in modes:
        found |= _surplus_parts(warm=warm, cuts=cuts, fines=fines)
    for shift, words in ((1, "the next token"), (-1, "the token before")):
        found[f"each log probability is that of {words}"] = "shift", Readout(lag=shift)
        found[f"tokens are scored by the logits for {words}"] = "shift", Readout(offset=shift)
    found["the log probabilities are those of the best tokens, not of the chosen ones"] = (
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
        found[f"the log probabilities are {words}"] = "normalisation", Readout(scale=scale)
    return found


def _missing_parts(*, warm: bool, cuts: bool, fines: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    raw = "the log probabilities are raw, though processed ones were asked for"
    found[raw] = "normalisation", Readout(applies=frozenset())
    if warm:
        some = ALL_PARTS - {"temperature"}
        found["the temperature is not applied"] = "temperature", Readout(applies=some)
    if cuts:
        some = ALL_PARTS - {"top_k", "top_p", "min_p"}
        words = "the log probabilities are not normalised over the tokens that may be drawn"
        found[words] = "truncation", Readout(applies=some)
        for part in ("top_k", "top_p", "min_p"):
            found[f"{part} is not applied"] = "truncation", Readout(applies=ALL_PARTS - {part})
    if fines:
        some = ALL_PARTS - {"penalties"}
        found["the penalties are not applied"] = "penalties", Readout(applies=some)
    return found


def _surplus_parts(*, warm: bool, cuts: bool, fines: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if warm:
        found["the temperature is applied to raw log probabilities"] = (
            "temperature",
            Readout(applies=frozenset({"temperature"})),
        )
    if cuts:
        words = "raw log probabilities are normalised over the tokens that may be drawn"
        cut = frozenset({"top_k", "top_p", "min_p"})
        found[words] = "truncation", Readout(applies=cut)
        for part in ("top_k", "top_p", "min_p"):
            words = f"{part} is applied to raw log probabilities"
            found[words] = "truncation", Readout(applies=frozenset({part}))
    if fines:
        found["the penalties are applied to raw log probabilities"] = (
            "penalties",
            Readout(applies=frozenset({"penalties"})),
        )
    if warm + cuts + fines > 1:
        words = "the log probabilities are processed, though raw ones were asked for"
        found[words] = "normalisation", Readout(applies=ALL_PARTS)
        if warm and cuts:
            words = "temperature and truncation are applied to raw log probabilities"
            some = ALL_PARTS - {"penalties"}
            found[words] = "normalisation", Readout(applies=some)
    return found
