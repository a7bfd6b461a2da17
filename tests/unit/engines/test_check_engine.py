"""check_engine(): records, readouts, the command."""

from __future__ import annotations

import json
import math

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import paritas
from paritas.app.cli import main
from paritas.engines.changes import move_rows
from paritas.engines.judging import Clock
from paritas.engines.records import (
    AS_RECORDED,
    EngineRecord,
    Readout,
    Request,
    Sampling,
    read_records,
)

PROMPT, OUTPUT = [3, 1, 4, 1, 5], [9, 2, 6, 5, 3]


class Bigrams(nn.Module):
    """A model of the next token, given the last one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(20, 20)

    def forward(self, input_ids):
        return {"logits": self.table(input_ids)}


def bigrams():
    """For the command."""
    return Bigrams(), {"input_ids": torch.tensor([PROMPT])}


def record(temperature=1.0, **more):
    """What an engine returns for `Bigrams`."""
    rows = Bigrams()(torch.tensor([PROMPT + OUTPUT]))["logits"][0, len(PROMPT) - 1 : -1]
    logprobs = (rows / temperature).log_softmax(-1)[range(len(OUTPUT)), OUTPUT]
    return {"prompt": PROMPT, "output": OUTPUT, "logprobs": logprobs.tolist(), **more}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"logprobs": [-1.0]}, "logprobs has 1 entries for 5 tokens"),
        ({"logprobs": [None] * 5}, "all are null"),
        ({"logprobs": []}, "it has no log probabilities: give logprobs"),
        ({"logprobs": ["nan"] + [-1.0] * 4}, "a log probability is NaN"),
        ({"output": []}, "at least one token id"),
        ({"prompt": [-1]}, "token ids must not be negative"),
        ({"sampling": {"top_p": 0}}, "top_p must be in (0, 1]"),
        ({"sampling": {"heat": 1}}, "unknown field `heat`"),
        ({"prompt": [3, 99]}, "token id 99 is not among the model's 20 tokens"),
    ],
)
def test_a_record_that_is_not_valid_is_refused(change, words):
    class Known(Bigrams):
        def get_input_embeddings(self):
            return self.table

    with pytest.raises(paritas.UsageError) as error:
        paritas.check_engine(Known(), [record() | change])
    assert words in str(error.value)


def test_an_engine_is_called_with_prompts_and_must_answer_all():
    report = paritas.check_engine(Bigrams(), lambda _: [record()], prompts=[PROMPT])
    assert report.passed
    assert report.rows[0].name == "request 0"
    with pytest.raises(paritas.UsageError, match="returned 1 records for 2 prompts"):
        paritas.check_engine(Bigrams(), lambda _: [record()], prompts=[PROMPT, PROMPT])
    with pytest.raises(paritas.UsageError, match="needs prompts"):
        paritas.check_engine(Bigrams(), lambda _: [record()])


def test_a_value_that_the_model_excludes_is_different():
    wrong = record()
    wrong["logprobs"][2] = -9999.0  # minus infinity
    report = paritas.check_engine(Bigrams(), [wrong], explain=False)
    assert report.verdict.status == "different"
    assert report.rows[0].first == 2


def test_a_model_that_gives_nan_does_not_pass():
    class Overflowing(Bigrams):
        def forward(self, input_ids):
            return {"logits": super().forward(input_ids)["logits"] * torch.nan}

    report = paritas.check_engine(Overflowing(), [record()], explain=False)
    assert report.exit_code == 1


def test_a_report_survives_json():
    report = paritas.check_engine(Bigrams(), [record(0.7, sampling={"temperature": 0.7})])
    assert paritas.EngineReport.from_json(report.to_json()) == report
    assert report.causes[0].kind == "temperature"
    assert "engine" in report._repr_html_()


def test_the_command_names_the_cause_and_exits_by_it(tmp_path):
    good, bad, out = (tmp_path / name for name in ("good.jsonl", "bad.jsonl", "out.json"))
    good.write_text(json.dumps(record()) + "\n")
    bad.write_text(json.dumps(record(0.7, sampling={"temperature": 0.7})) + "\n")
    target = f"{__name__}:bigrams"
    assert CliRunner().invoke(main, ["engine", target, str(good)]).exit_code == 0
    alone = ["engine", f"{__name__}:Bigrams", str(good), "--older", f"{__name__}:Bigrams"]
    assert CliRunner().invoke(main, alone).exit_code == 0  # without inputs
    found = CliRunner().invoke(main, ["engine", target, str(bad), "--json", str(out)])
    assert found.exit_code == 1
    assert "the temperature is applied to raw log probabilities" in found.output
    assert json.loads(out.read_text())["causes"][0]["to_rounding"]
    broken = tmp_path / "broken.jsonl"
    broken.write_text("{")
    found = CliRunner().invoke(main, ["engine", target, str(broken)])
    assert found.exit_code == 2
    assert "line 1" in found.output


def request(**sampling):
    """A request with these parameters, whose values are processed."""
    made = EngineRecord(
        prompt=(0, 1), output=(2, 0), logprobs=(-1.0, -1.0), sampling=Sampling(**sampling),
        logprobs_mode="processed",
    )  # fmt: skip
    return Request(made)


def test_processed_log_probabilities_are_those_of_the_tokens_that_may_be_drawn():
    logits = torch.tensor([[9.0, 9.0, 9.0], [1.0, 0.0, 3.0], [2.0, 1.0, 0.0]])
    found = AS_RECORDED.values(logits, request(temperature=0.5, top_k=2))
    assert found["logprobs"].tolist() == pytest.approx(
        [-math.log1p(math.exp(-4)), -math.log1p(math.exp(-2))], rel=1e-4
    )
    assert found["tokens"].tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("top_p", "distance"),
    [
        (0.5, math.log(6)),  # it would have to be as likely as the best one
        (0.89, math.log(0.9 / 0.1) - math.log(0.89 / 0.11)),  # or those before it less likely
        (0.91, 0.0),
    ],
)
def test_a_token_is_beyond_the_nucleus_by_the_least_change_of_logits_that_admits_it(
    top_p, distance
):
    logits = torch.log(torch.tensor([[1.0, 1.0, 1.0], [0.6, 0.3, 0.1], [0.6, 0.3, 0.1]]))
    found = Readout().values(logits, request(top_p=top_p))
    assert found["tokens"].tolist() == pytest.approx([distance, 0.0], rel=1e-4)


def log(*numbers):
    """Logarithms."""
    return [math.log(one) if one else -math.inf for one in numbers]


def odds(number):
    """The logarithm of the odds of a probability."""
    return math.log(number / (1 - number))


def test_an_entry_that_one_side_truncates_is_compared_by_its_distance_from_the_limit():
    tables = (dict(enumerate(log(0.6, 0.3, 0.1))), dict(enumerate(log(1.0, 0.0, 0.0))))
    made = EngineRecord(
        prompt=(0, 1), output=(0, 0), top_logprobs=tables, sampling=Sampling(top_p=0.8),
        logprobs_mode="processed",
    )  # fmt: skip
    logits = torch.log(torch.tensor([[1.0, 1.0, 1.0], [0.6, 0.3, 0.1], [0.6, 0.3, 0.1]]))
    first = Request(made)
    found = AS_RECORDED.values(logits, first)["top_logprobs"].tolist()
    # The engine also draws the last token, which is beyond the limit.
    right = log(0.6 / 0.9, 0.3 / 0.9, 0.1 / 0.9)
    assert found[:3] == pytest.approx([*right[:2], right[2] - (odds(0.9) - odds(0.8))], rel=1e-4)
    # It does not draw the second one, which is within the limit, nor the last, rightly.
    assert found[3:] == pytest.approx([right[0], odds(0.8) - odds(0.6), 0.0], rel=1e-4)
    assert first.values["top_logprobs"].tolist()[3:] == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(("top_p", "distance"), [(0.61, odds(0.61) - odds(0.6)), (0.8, 0.0)])
def test_tokens_within_rounding_of_the_limit_may_share_the_mass_or_not(top_p, distance):
    made = EngineRecord(
        prompt=(0,), output=(0,), logprobs=(0.0,), sampling=Sampling(top_p=top_p),
        logprobs_mode="processed",
    )  # fmt: skip
    found = AS_RECORDED.values(torch.tensor([log(0.6, 0.3, 0.1)]), Request(made))
    # At 0.61 the second token is just within; the engine has normalised over the first alone.
    assert found["limits"].tolist() == pytest.approx([distance], rel=1e-3)
    assert found["logprobs"].tolist() == pytest.approx(
        [0.0 if distance else math.log(0.6 / 0.9)], abs=1e-6
    )


def test_an_entry_that_nothing_excludes_is_infinitely_far_from_a_limit():
    made = EngineRecord(prompt=(0,), output=(1,), logprobs=(-math.inf,))
    found = AS_RECORDED.values(torch.zeros(1, 3), Request(made))
    assert found["logprobs"].tolist() == [math.inf]


def test_penalties_depend_on_the_tokens_so_far():
    logits = torch.zeros(3, 3)
    found = Readout().values(logits, request(frequency_penalty=1.0))
    # Token 2 was drawn first, so that it is less likely in the second step.
    assert found["logprobs"].tolist() == pytest.approx(
        [-math.log(3), -math.log(2 + math.exp(-1))], rel=1e-5
    )


def test_records_are_read_from_a_file_with_infinities_as_text(tmp_path):
    path = tmp_path / "records.jsonl"
    path.write_text('{"prompt": [1], "output": [2], "logprobs": ["-inf"], "name": "a"}\n\n')
    (found,) = read_records(path, None)
    assert found.logprobs == (-math.inf,)
    assert found.name == "a"


# --- What is drawn, what is not, and how long it may take -----------------------------------------


def served(tokens, *, drawn_at=1.0, seed=0, **sampling):
    """A record of `Bigrams` whose numbers are right, drawn at some temperature."""
    model, random = Bigrams(), torch.Generator().manual_seed(seed)
    output, numbers, last = [], [], PROMPT[-1]
    for _ in range(tokens):
        row = model.table.weight[last].detach()
        last = int(torch.multinomial((row / drawn_at).softmax(-1), 1, generator=random))
        output.append(last)
        numbers.append(float(row.log_softmax(-1)[last]))
    return {"prompt": PROMPT, "output": output, "logprobs": numbers, "sampling": sampling}


def test_tokens_that_a_tool_wrote_need_not_be_among_those_that_may_be_drawn():
    row = Bigrams().table.weight[OUTPUT[1]]
    worst = int(row.argmin())
    with_tool = record()
    with_tool["output"] = [*OUTPUT[:2], worst, *OUTPUT[3:]]
    with_tool = {**with_tool, **_numbers(with_tool["output"])}
    with_tool["sampling"] = {"top_k": 19}
    assert paritas.check_engine(Bigrams(), [with_tool], explain=False).exit_code == 1
    with_tool["logprobs"][2] = None  # a turn of a tool: nothing was drawn
    assert paritas.check_engine(Bigrams(), [with_tool], explain=False).passed


def _numbers(output):
    rows = Bigrams()(torch.tensor([PROMPT + output]))["logits"][0, len(PROMPT) - 1 : -1]
    return {"logprobs": rows.log_softmax(-1)[range(len(output)), output].tolist()}


@pytest.mark.parametrize(
    ("drawn_at", "words"),
    [
        (1.0, "drawn as with a temperature of about 1, though the requests ask for a temperature"),
        (0.001, "the best token was drawn almost always, though the requests ask for"),
    ],
)
def test_a_sampler_that_ignores_the_temperature_is_shown_by_its_tokens(drawn_at, words):
    records = [served(80, drawn_at=drawn_at, seed=one, temperature=0.4) for one in range(3)]
    report = paritas.check_engine(Bigrams(), records)
    assert [one.kind for one in report.causes] == ["sampling"]
    assert words in report.causes[0].text
    assert report.exit_code == 1


@pytest.mark.parametrize("sampling", [{"temperature": 0.4}, {"temperature": 1.3, "top_p": 0.8}])
def test_tokens_that_are_drawn_as_asked_pass(sampling):
    model, random = Bigrams(), torch.Generator().manual_seed(3)
    heat, mass = sampling["temperature"], sampling.get("top_p", 1.0)
    records = []
    for _ in range(6):
        output, last = [], PROMPT[-1]
        for _ in range(60):
            ordered, order = (model.table.weight[last].detach() / heat).sort(descending=True)
            chances = ordered.softmax(-1)
            chances = torch.where(chances.cumsum(-1) - chances < mass, chances, 0.0)
            last = int(order[int(torch.multinomial(chances, 1, generator=random))])
            output.append(last)
        records.append({"prompt": PROMPT, "output": output, "sampling": sampling})
        records[-1] |= _numbers(output)
    assert paritas.check_engine(model, records).passed


def test_an_added_token_moves_only_the_numbers_after_it():
    rows = torch.arange(6.0)[:, None]
    moved = move_rows(rows, (7, 8, 9), (7, 8, 9, 5))  # row 3 follows the added token
    assert moved[:, 0].tolist() == [0, 1, 3, 4, 5]
    moved = move_rows(rows, (7, 8, 9), (5, 7, 8, 9))
    assert moved[:, 0].tolist() == [1, 2, 3, 4, 5]
    moved = move_rows(rows, (7, 8, 9), (7, 8))  # nothing predicts the missing token
    assert moved[:, 0].nan_to_num(-1).tolist() == [0, -1, 1, 2, 3, 4, 5]


class _Slow(Clock):
    """A clock on which every step takes as long as the limit."""

    def allows_another(self, share=1.0, times=1.0):
        return False


def test_what_there_is_no_time_for_is_unverified_and_said(monkeypatch):
    monkeypatch.setattr("paritas.engines.check.Clock", _Slow)
    monkeypatch.setattr("paritas.engines.judging._FIRST_BATCH", 1)
    wrong = record()
    wrong["logprobs"][1] -= 0.5
    report = paritas.check_engine(Bigrams(), [wrong, record()], seconds=7)
    assert [row.status.value for row in report.rows] == ["different", "unverified"]
    assert report.rows[1].findings[0].reason == "not compared within 7 s"
    assert "the search for causes ended after 7 s" in str(report)
    assert report.exit_code == 1
    right = paritas.check_engine(Bigrams(), [record(), record()], seconds=7)
    assert right.exit_code == 3


def test_a_time_limit_that_is_none_is_refused():
    with pytest.raises(paritas.UsageError, match="seconds must be positive"):
        paritas.check_engine(Bigrams(), [record()], seconds=0)


def test_what_shrinks_all_numbers_is_not_the_closest_cause():
    torch.manual_seed(1)
    other = nn.Embedding(20, 20).weight * 3  # the engine serves another model, more surely
    output, last = [], PROMPT[-1]
    for _ in range(12):
        last = int(other[last].argmax())
        output.append(last)
    rows = other[torch.tensor([PROMPT[-1], *output[:-1]])].log_softmax(-1)
    numbers = rows[range(12), output].tolist()
    wrong = {"prompt": PROMPT, "output": output, "logprobs": numbers}
    report = paritas.check_engine(Bigrams(), [wrong])
    assert report.exit_code == 1
    assert not report.causes, str(report)
