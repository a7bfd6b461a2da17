"""Answers of vLLM, recorded from vLLM 0.32: of its library, and of its server as JSON."""

from __future__ import annotations

import copy
import json
import types
from pathlib import Path

import pytest

import paritas
from paritas.engines.records import read_records

DATA = Path(__file__).parents[3] / "data" / "vllm"


def recorded(name):
    """A pair of a request and its response."""
    return json.loads((DATA / f"{name}.json").read_text())


def as_object(value):
    """JSON as objects, as the library returns them; its tables of log probabilities are dicts."""
    if isinstance(value, list):
        return [as_object(one) for one in value]
    if not isinstance(value, dict):
        return value
    if all(key.isdigit() for key in value):
        return {int(key): as_object(one) for key, one in value.items()}
    return types.SimpleNamespace(**{key: as_object(one) for key, one in value.items()})


def of_library():
    """What `LLM.generate` took and returned."""
    pair = recorded("generate")
    return {"request": as_object(pair["request"]), "response": as_object(pair["response"])}


def test_the_json_of_completions_is_read():
    pair = recorded("completion")
    (record,) = read_records([pair], None)
    choice = pair["response"]["choices"][0]
    assert list(record.prompt) == pair["request"]["prompt"] == choice["prompt_token_ids"]
    assert list(record.output) == choice["token_ids"]
    assert list(record.logprobs) == choice["logprobs"]["token_logprobs"]
    assert record.prompt_logprobs[0] is None
    first = choice["prompt_logprobs"][1][str(record.prompt[1])]
    assert record.prompt_logprobs[1] == first["logprob"]
    assert [len(table) >= 3 for table in record.top_logprobs] == [True] * len(record.output)
    assert record.top_logprobs[0][record.output[0]] == record.logprobs[0]
    assert record.sampling.temperature == pair["request"]["temperature"]
    assert record.logprobs_mode == "raw"


def test_the_json_of_chat_completions_is_read():
    pair = recorded("chat")
    (record,) = read_records([pair], None)
    content = pair["response"]["choices"][0]["logprobs"]["content"]
    assert list(record.prompt) == pair["response"]["prompt_token_ids"]
    assert [f"token_id:{one}" for one in record.output] == [one["token"] for one in content]
    assert list(record.logprobs) == [one["logprob"] for one in content]
    assert len(record.top_logprobs[0]) == len(content[0]["top_logprobs"])


def test_the_json_of_tokens_in_and_out_is_read():
    pair = recorded("inference")
    (record,) = read_records([pair], None)
    (choice,) = pair["response"]["choices"]
    assert list(record.prompt) == pair["request"]["token_ids"]
    assert list(record.output) == choice["token_ids"]
    content = choice["logprobs"]["content"]
    assert list(record.logprobs) == [one["logprob"] for one in content]
    tables = [
        {one["token_id"]: one["logprob"] for one in entry["top_logprobs"]} for entry in content
    ]
    assert list(record.top_logprobs) == tables
    assert len(record.prompt_logprobs) == len(record.prompt)
    assert (record.sampling.temperature, record.sampling.top_k) == (0.8, 20)


def test_each_of_several_prompts_is_a_record():
    pair = recorded("batch")
    found = read_records([pair], None)
    assert [list(one.prompt) for one in found] == pair["request"]["prompt"]
    assert [len(one.prompt_logprobs) for one in found] == [6, 5]


def test_library_and_server_give_the_same_record():
    (served,) = read_records([recorded("completion")], None)
    (returned,) = read_records([of_library()], None)
    assert (returned.prompt, returned.output) == (served.prompt, served.output)
    assert returned.logprobs == pytest.approx(served.logprobs, abs=1e-5)
    assert returned.prompt_logprobs[1:] == pytest.approx(served.prompt_logprobs[1:], abs=1e-5)
    assert [set(one) for one in returned.top_logprobs] == [set(o) for o in served.top_logprobs]
    assert returned.sampling == served.sampling


def test_each_of_several_outputs_is_a_record_with_a_name():
    pair = of_library() | {"name": "first", "logprobs_mode": "processed"}
    pair["response"].outputs *= 2
    found = read_records([pair], None)
    assert [one.name for one in found] == ["first, output 0", "first, output 1"]
    assert {one.logprobs_mode for one in found} == {"processed"}


def test_a_file_of_pairs_is_read_line_by_line(tmp_path):
    path = tmp_path / "served.jsonl"
    path.write_text("\n".join(json.dumps(recorded(name)) for name in ("completion", "chat")))
    assert [one.name for one in read_records(path, None)] == ["request 0", "request 1"]


def test_what_truncates_does_not_count_in_a_greedy_request():
    pair = recorded("completion")
    pair["request"] |= {"temperature": 0, "top_p": 0.5, "top_k": 4, "repetition_penalty": None}
    (record,) = read_records([pair], None)
    assert not record.sampling.truncates
    assert record.sampling.is_greedy


def test_tables_by_text_are_left_out():
    pair = recorded("completion")
    logprobs = pair["response"]["choices"][0]["logprobs"]
    logprobs["top_logprobs"] = [{" the": -1.0} for _ in logprobs["tokens"]]
    (record,) = read_records([pair], None)
    assert record.top_logprobs == ()
    assert len(record.logprobs) == len(record.output)


def changed(name, *path, value=None):
    """A recorded pair in which one value is another one."""
    pair = copy.deepcopy(recorded(name))
    place = pair
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return pair


CHOICE = ("response", "choices", 0)


@pytest.mark.parametrize(
    ("pair", "words"),
    [
        (recorded("completion")["response"], 'record 0 is not {"request": ..., "response": ...}'),
        (of_library()["response"], 'record 0 is not {"request": ..., "response": ...}'),
        (changed("completion", "response", "choices", value=[]), "the response has no output"),
        (changed("completion", "request", "temperature", value=-1), "must be 0 or more"),
        (changed("completion", "sampling", value={}), "has an unknown field 'sampling'"),
        (changed("completion", "request", "echo", value=True), "echo is not read"),
        (
            changed("completion", "request", "logit_bias", value={"5": 1}),
            "the request has logit_bias={'5': 1}, which changes what may be drawn",
        ),
        (changed("completion", "request", "min_tokens", value=3), "the request has min_tokens=3"),
        (
            changed("completion", "response", value={"error": {"message": "no such model"}}),
            "the response has no choices: {'error': {'message': 'no such model'}}",
        ),
        (changed("completion", *CHOICE, "logprobs"), "has no log probabilities: send a request"),
        (changed("completion", *CHOICE, "token_ids", value=[5]), "entries for 1 tokens"),
        (
            changed("completion", *CHOICE, "prompt_logprobs", value=[None]),
            "has 1 tables of log probabilities for",
        ),
        (changed("chat", "response", "prompt_token_ids"), 'send "return_token_ids": true'),
        (changed("completion", "response", value=7), "must be a RequestOutput or JSON, not int"),
        (of_library() | {"request": 7}, "request must be SamplingParams or JSON, not int"),
        (
            recorded("completion") | {"logprobs_mode": "raw_logits"},
            "Invalid enum value 'raw_logits'",
        ),
    ],
)
def test_a_pair_that_cannot_be_compared_is_refused(pair, words):
    with pytest.raises(paritas.UsageError) as error:
        read_records([pair], None)
    assert words in str(error.value)


def test_texts_in_place_of_token_ids_are_refused():
    pair = changed("chat", *CHOICE, "token_ids")
    pair["response"]["choices"][0]["logprobs"]["content"][0]["token"] = " the"
    with pytest.raises(paritas.UsageError, match="texts in place of token ids"):
        read_records([pair], None)


def test_a_token_that_its_own_table_lacks_is_refused():
    pair = of_library()
    pair["response"].outputs[0].token_ids[0] = 96
    with pytest.raises(paritas.UsageError, match="token 96 is not in its own table"):
        read_records([pair], None)
