"""Answers of vLLM, as the records that `check_engine` compares.

An answer is read together with its request, because it does not repeat the sampling parameters::

    {"request": SamplingParams(...), "response": RequestOutput(...)}      of LLM.generate
    {"request": {"prompt": [1, 2], ...}, "response": {"choices": [...]}}  of its server, as JSON

The server speaks OpenAI's `/v1/completions` and `/v1/chat/completions`. Their JSON has texts in
place of token ids, unless the request asks for ids with `return_token_ids` and
`return_tokens_as_token_ids`. Its own `/inference/v1/generate` takes and returns ids. vLLM itself is
not imported.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from paritas.core.errors import UsageError

_PAIR = {"request", "response", "logprobs_mode", "name"}
_PARAMETERS = (
    "temperature", "top_k", "top_p", "min_p",
    "repetition_penalty", "presence_penalty", "frequency_penalty",
)  # fmt: skip
# Below it vLLM takes the best token, and ignores what truncates.
_GREEDY = 1e-5
_TRUNCATING = ("top_k", "top_p", "min_p")
# What else decides which tokens may be drawn, and is not modelled.
_NOT_MODELLED = (
    "logit_bias", "allowed_token_ids", "bad_words", "min_tokens", "structured_outputs",
    "response_format", "use_beam_search", "thinking_token_budget", "watermarking",
)  # fmt: skip
_TOKEN_ID = re.compile(r"token_id:(\d{1,9})")
_ASK_FOR_IDS = 'send "return_token_ids": true and "return_tokens_as_token_ids": true'


def is_answer(value: Any) -> bool:
    """Whether it is a pair of a request and its response, or a response alone."""
    if isinstance(value, Mapping):
        return "response" in value or "choices" in value
    return _is_of_library(value)


def _is_of_library(value: Any) -> bool:
    return hasattr(value, "prompt_token_ids") and hasattr(value, "outputs")


def answer_records(pair: Any, where: str) -> list[dict[str, Any]]:
    """The records of one answer: one for each of its outputs.

    Raises:
        UsageError: the pair is not complete, or its response has no token ids or log probabilities.
    """
    if not isinstance(pair, Mapping) or "request" not in pair or "response" not in pair:
        raise UsageError(
            f'{where} is not {{"request": ..., "response": ...}}: an answer does not repeat the '
            "sampling parameters, so it is read with its request"
        )
    unknown = sorted(map(str, pair.keys() - _PAIR))
    if unknown:
        raise UsageError(
            f"{where} has an unknown field {unknown[0]!r}; an answer has request, response and, if "
            "you like, logprobs_mode and name"
        )
    request, response = pair["request"], pair["response"]
    if isinstance(response, Mapping):
        records = _of_server(request, response, where)
    elif _is_of_library(response):
        records = _of_library(response, where)
    else:
        kind = type(response).__name__
        raise UsageError(f"{where}: response must be a RequestOutput or JSON, not {kind}")
    if not records:
        raise UsageError(f"{where}: the response has no output")
    name = str(pair.get("name", ""))
    common: dict[str, Any] = {"sampling": _sampling(request, where)}
    if "logprobs_mode" in pair:
        common["logprobs_mode"] = pair["logprobs_mode"]
    if name and len(records) == 1:
        common["name"] = name
    elif name:
        names = [{"name": f"{name}, output {number}"} for number in range(len(records))]
        records = [
            record | named_record for record, named_record in zip(records, names, strict=True)
        ]
    return [record | common for record in records]


# --- The request ----------------------------------------------------------------------------------


def _sampling(request: Any, where: str) -> dict[str, Any]:
    """The sampling parameters as they were applied; what is absent or null has its default."""
    if isinstance(request, Mapping) and isinstance(request.get("sampling_params"), Mapping):
        request = request["sampling_params"]  # of `/inference/v1/generate`

    def read_parameter(name: str) -> Any:
        return request.get(name) if isinstance(request, Mapping) else getattr(request, name, None)

    for name in _NOT_MODELLED:
        value = read_parameter(name)
        if value and value != {"type": "text"}:
            raise UsageError(
                f"{where}: the request has {name}={value!r}, which changes what may be drawn; send "
                "a request without it"
            )
    parameters = {
        name: read_parameter(name) for name in _PARAMETERS if read_parameter(name) is not None
    }
    if not isinstance(request, Mapping) and "temperature" not in parameters:
        kind = type(request).__name__
        raise UsageError(f"{where}: request must be SamplingParams or JSON, not {kind}")
    temperature = parameters.get("temperature", 1.0)
    if isinstance(temperature, int | float) and 0 <= temperature < _GREEDY:
        parameters = {
            name: tensor for name, tensor in parameters.items() if name not in _TRUNCATING
        }
        parameters["temperature"] = 0.0
    return parameters


# --- The library: LLM.generate --------------------------------------------------------------------


def _of_library(response: Any, where: str) -> list[dict[str, Any]]:
    prompt = [int(prompt_token_id) for prompt_token_id in response.prompt_token_ids or ()]
    shared: dict[str, Any] = {"prompt": prompt}
    if response.prompt_logprobs is not None:
        shared["prompt_logprobs"] = _numbers(response.prompt_logprobs, prompt, where)
    records = []
    for completion in response.outputs:
        output = [int(token) for token in completion.token_ids]
        record = {**shared, "output": output}
        if completion.logprobs is not None:
            tables = list(completion.logprobs)
            record["logprobs"] = _numbers(tables, output, where)
            record["top_logprobs"] = [
                {int(token): float(entry.logprob) for token, entry in table.items()}
                for table in tables
            ]
        records.append(record)
    return records


def _numbers(tables: Any, tokens: list[int], where: str) -> list[float | None]:
    """The log probability of each token, from its table; a token without a table has none."""
    if len(tables) != len(tokens):
        raise UsageError(
            f"{where} has {len(tables)} tables of log probabilities for {len(tokens)} tokens"
        )
    for table, token in zip(tables, tokens, strict=True):
        if table is not None and token not in table:
            raise UsageError(f"{where}: token {token} is not in its own table of log probabilities")
    pairs = zip(tables, tokens, strict=True)
    return [None if table is None else float(table[token].logprob) for table, token in pairs]


# --- The server: OpenAI's JSON --------------------------------------------------------------------


class _Entry(msgspec.Struct):
    logprob: float


class _ChatEntry(msgspec.Struct):
    logprob: float
    token: str = ""
    token_id: int | None = None  # in place of a text, from `/inference/v1/generate`
    top_logprobs: list[_ChatEntry] = []

    @property
    def text(self) -> str:
        return self.token if self.token_id is None else f"token_id:{self.token_id}"


class _Logprobs(msgspec.Struct):
    """Of completions: lists; of chat completions: `content`."""

    tokens: list[str] | None = None
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] | None = None
    content: list[_ChatEntry] | None = None


class _Choice(msgspec.Struct):
    logprobs: _Logprobs | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[int, _Entry] | None] | None = None


class _Response(msgspec.Struct):
    choices: list[_Choice]
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[int, _Entry] | None] | None = None


def _of_server(request: Any, response: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    if not isinstance(request, Mapping):
        raise UsageError(f"{where}: the request of a JSON response must be JSON too")
    if request.get("echo"):
        raise UsageError(f"{where}: echo is not read; ask for prompt_logprobs in its place")
    if "choices" not in response:
        raise UsageError(f"{where}: the response has no choices: {str(dict(response))[:200]}")
    try:
        read = msgspec.convert(dict(response), _Response, strict=False)
    except msgspec.ValidationError as error:
        raise UsageError(f"{where}: response: {error}") from None
    return [_of_choice(request, read, choice, where) for choice in read.choices]


def _of_choice(
    request: Mapping[str, Any], response: _Response, choice: _Choice, where: str
) -> dict[str, Any]:
    prompt = choice.prompt_token_ids or response.prompt_token_ids
    sent = request.get("prompt", request.get("token_ids"))
    if prompt is None and isinstance(sent, Sequence) and sent and isinstance(sent[0], int):
        prompt = list(sent)
    if prompt is None:
        raise UsageError(f"{where} has no token ids of the prompt: {_ASK_FOR_IDS}")
    logprobs = choice.logprobs
    if logprobs is None:
        raise UsageError(f"{where} has no log probabilities: send a request with logprobs")
    texts, numbers, tables = _columns(logprobs)
    output = choice.token_ids
    if output is None:
        output = [_token_id(text, where) for text in texts]
    record: dict[str, Any] = {"prompt": prompt, "output": output, "logprobs": numbers}
    # Tables by text cannot be read: two tokens may have the same text.
    if tables and all(_TOKEN_ID.fullmatch(text) for table in tables for text in table):
        record["top_logprobs"] = [
            {_token_id(text, where): number for text, number in table.items()} for table in tables
        ]
    prompt_logprobs = choice.prompt_logprobs or response.prompt_logprobs
    if prompt_logprobs is not None:
        record["prompt_logprobs"] = _numbers(prompt_logprobs, prompt, where)
    return record


def _columns(
    logprobs: _Logprobs,
) -> tuple[list[str], list[float | None], list[dict[str, float]]]:
    """The tokens as text, their log probabilities, and those of others."""
    if logprobs.content is not None:
        entries = logprobs.content
        tables = [
            {top_logprob.text: top_logprob.logprob for top_logprob in entry.top_logprobs}
            for entry in entries
        ]
        numbers: list[float | None] = [entry.logprob for entry in entries]
        return [entry.text for entry in entries], numbers, tables if any(tables) else []
    tables = [table or {} for table in logprobs.top_logprobs or ()]
    return logprobs.tokens or [], logprobs.token_logprobs, tables if any(tables) else []


def _token_id(text: str, where: str) -> int:
    match = _TOKEN_ID.fullmatch(text)
    if match is None:
        raise UsageError(f"{where} has texts in place of token ids ({text!r}): {_ASK_FOR_IDS}")
    return int(match[1])
