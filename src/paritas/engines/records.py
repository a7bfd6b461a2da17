"""What a serving engine returned for one request, and reading it from a file or an engine."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from paritas.compat.vllm import answer_records, is_answer
from paritas.errors import UsageError

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
        for name, whole in (
            ("logprobs", self.output),
            ("prompt_logprobs", self.prompt),
            ("top_logprobs", self.output),
        ):
            given = getattr(self, name)
            if given and len(given) != len(whole):
                raise ValueError(f"{name} has {len(given)} entries for {len(whole)} tokens")
        if not (self.logprobs or self.prompt_logprobs or self.top_logprobs):
            raise ValueError("it has no log probabilities: give logprobs")
        values = [one for one in (*self.logprobs, *self.prompt_logprobs) if one is not None]
        values += [one for table in self.top_logprobs for one in table.values()]
        if not values:
            raise ValueError("it has no log probabilities: all are null")
        if any(math.isnan(one) for one in values):
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
        found = _from_file(Path(source))
    elif callable(source):
        if not prompts:
            raise UsageError("an engine to be called needs prompts: lists of token ids")
        given = [list(map(int, one)) for one in prompts]
        answers = list(source(given))
        if len(answers) != len(given):
            raise UsageError(f"the engine returned {len(answers)} records for {len(given)} prompts")
        found = _from_list(answers)
    else:
        found = _from_list(source)
    if not found:
        raise UsageError("there are no records")
    return [
        one if one.name else msgspec.structs.replace(one, name=f"request {place}")
        for place, one in enumerate(found)
    ]


def _from_list(values: Iterable[Any]) -> list[EngineRecord]:
    return [one for place, value in enumerate(values) for one in _records(value, f"record {place}")]


def _from_file(path: Path) -> list[EngineRecord]:
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise UsageError(f"{str(path)!r} cannot be read: {error.strerror}") from error
    found: list[EngineRecord] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            data = msgspec.json.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise UsageError(f"{path}, line {number}: {error}") from None
        found += _records(data, f"{path}, line {number}")
    return found


def _records(value: Any, where: str) -> list[EngineRecord]:
    """The record, or those of an answer with several outputs."""
    if isinstance(value, EngineRecord):
        return [value]
    if is_answer(value):
        return [_record(one, where) for one in answer_records(value, where)]
    return [_record(value, where)]


def _record(value: Any, where: str) -> EngineRecord:
    if not isinstance(value, Mapping):
        raise UsageError(f"{where} must be a record, not {type(value).__name__}")
    try:
        # Lax mode reads "-inf", which JSON has no number for.
        return msgspec.convert(dict(value), EngineRecord, strict=False)
    except msgspec.ValidationError as error:
        raise UsageError(f"{where}: {error}") from None
