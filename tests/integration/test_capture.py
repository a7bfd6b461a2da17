"""`paritas.capture` of what modules take and give, read back from the dump."""

from __future__ import annotations

import dataclasses
import threading

import pytest
import torch
from torch import nn

from integration.captures import Dumped, tokens, transformer
from paritas.core.errors import UsageError
from paritas.recording.capture import capture


@dataclasses.dataclass
class Answer:
    y: torch.Tensor
    extra: dict


class Wrapping(nn.Module):
    """Takes and gives containers."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, x, pair, *, scale, flag=True):
        y = self.inner(x) * scale + pair[1]["b"]
        return Answer(y=y, extra={"sum": [y.sum(), 7]})


class InPlace(nn.Module):
    def forward(self, x, out):
        out.add_(x)
        return x.mul_(2)


class Failing(nn.Module):
    def __init__(self, error):
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.error = error

    def forward(self, x):
        self.first(x)
        raise self.error


def test_every_module_is_recorded_under_its_path(tmp_path):
    model = transformer()
    with torch.no_grad(), capture(tmp_path / "d"):
        result = model(tokens())
    dumped = Dumped(tmp_path / "d")
    assert dumped.names()[:6] == [
        "Transformer",
        "embed",
        "layers.0",
        "layers.0.attn_norm",
        "layers.0.qkv",
        "layers.0.out",
    ]
    assert torch.equal(dumped["forward/Transformer#0/input.0"], tokens())
    assert torch.equal(dumped["forward/Transformer#0/output.logits"], result["logits"])
    assert torch.equal(dumped["forward/Transformer#0/output.hidden.0"], result["hidden"][0])
    with torch.no_grad():
        embedded = model.embed(tokens())
    assert torch.equal(dumped["forward/layers.0#0/input.0"], embedded)
    assert dumped["forward/layers.0#0/input.mask"] == "None"
    site = dumped.by_key[0, "forward/layers.0.mlp.0#0/output.0"].site
    assert (site.op, site.module) == ("Linear", "layers.0.mlp.0")
    assert site.code == "return x + self.dropout(self.mlp(x))"
    assert site.line.endswith("captures.py:32, in forward")


def test_containers_and_keywords_are_recorded_by_position(tmp_path):
    model = Wrapping()
    pair = (torch.ones(1), {"b": torch.full((3,), 2.0)})
    with capture(tmp_path / "d", gradients=False):
        answer = model(torch.ones(2, 3), pair, scale=3.0)
    dumped = Dumped(tmp_path / "d")
    whole = [name for name in dumped.ids() if "/Wrapping#0/" in name]
    assert whole == [
        "forward/Wrapping#0/input.0",
        "forward/Wrapping#0/input.1.0",
        "forward/Wrapping#0/input.1.1.b",
        "forward/Wrapping#0/input.scale",
        "forward/Wrapping#0/output.y",
        "forward/Wrapping#0/output.extra.sum.0",
        "forward/Wrapping#0/output.extra.sum.1",
    ]
    assert torch.equal(dumped["forward/Wrapping#0/output.y"], answer.y)
    assert dumped["forward/Wrapping#0/input.scale"] == "3.0"
    assert dumped["forward/Wrapping#0/output.extra.sum.1"] == "7"


def test_inputs_are_recorded_as_they_were_before_the_module_wrote_to_them(tmp_path):
    x, out = torch.ones(2), torch.zeros(2)
    with capture(tmp_path / "d"):
        InPlace()(x, out=out)
    dumped = Dumped(tmp_path / "d")
    assert dumped["forward/InPlace#0/input.0"].tolist() == [1, 1]
    assert dumped["forward/InPlace#0/input.out"].tolist() == [0, 0]
    assert dumped["forward/InPlace#0/output.0"].tolist() == [2, 2]
    assert out.tolist() == [1, 1]


def test_a_recurrent_layer_gives_its_nested_results(tmp_path):
    torch.manual_seed(0)
    model = nn.LSTM(3, 4, num_layers=2)
    with torch.no_grad(), capture(tmp_path / "d"):
        output, (_, cell) = model(torch.ones(5, 2, 3))
    dumped = Dumped(tmp_path / "d")
    assert torch.equal(dumped["forward/LSTM#0/output.0"], output)
    assert torch.equal(dumped["forward/LSTM#0/output.1.1"], cell)


def test_a_module_called_twice_is_told_apart_by_the_count(tmp_path):
    layer = nn.Linear(3, 3)
    model = nn.Sequential(layer, nn.Tanh(), layer)
    with torch.no_grad(), capture(tmp_path / "d"):
        y = model(torch.ones(3))
    dumped = Dumped(tmp_path / "d")
    assert torch.equal(dumped["forward/0#1/output.0"], y)
    assert torch.equal(dumped["forward/0#1/input.0"], dumped["forward/1#0/output.0"])


def test_a_step_ends_when_the_outermost_module_is_called_again(tmp_path):
    model = nn.Linear(2, 2)
    with torch.no_grad(), capture(tmp_path / "d", steps=[1, 3]):
        results = [model(torch.full((2,), float(n))) for n in range(5)]
    dumped = Dumped(tmp_path / "d")
    assert dumped.steps() == [1, 3]
    assert torch.equal(dumped[3, "forward/Linear#0/output.0"], results[3])


def test_steps_can_be_ended_by_hand(tmp_path):
    model = nn.Linear(2, 2)
    with torch.no_grad(), capture(tmp_path / "d", stepping="manual") as recording:
        for _ in range(2):
            model(torch.ones(2))
            model(torch.ones(2))
            recording.step()
    assert [name for name in Dumped(tmp_path / "d").ids(1) if "input" in name] == [
        "forward/Linear#0/input.0",
        "forward/Linear#1/input.0",
    ]


def test_counting_by_hand_has_to_be_asked_for(tmp_path):
    with capture(tmp_path / "d") as recording:
        nn.Identity()(torch.ones(1))
        with pytest.raises(UsageError, match='stepping="manual"'):
            recording.step()


def test_two_outermost_modules_keep_apart_and_share_a_step(tmp_path):
    first, second = nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2))
    with torch.no_grad(), capture(tmp_path / "d"):
        for _ in range(2):
            second(first(torch.ones(2)))
    dumped = Dumped(tmp_path / "d")
    assert dumped.names() == ["Sequential", "0", "Sequential_1", "Sequential_1.0"]
    assert dumped.steps() == [0, 1]


def test_a_part_called_by_itself_keeps_the_name_it_has_in_the_whole(tmp_path):
    model = transformer()
    with torch.no_grad(), capture(tmp_path / "d"):
        model(tokens())
        model.layers[0](torch.ones(1, 2, 8))
    assert "forward/layers.0#1/output.0" in Dumped(tmp_path / "d").ids()


def test_modules_that_belong_to_no_other_go_by_their_class(tmp_path):
    class Makes(nn.Module):
        def forward(self, x):
            return nn.Softmax(-1)(nn.Hardtanh()(x))

    with capture(tmp_path / "d"):
        model = Makes()
        model(torch.ones(2))
        model.late = nn.ReLU()
        model.register_forward_hook(lambda module, args, result: module.late(result))
        model(torch.ones(2))
    dumped = Dumped(tmp_path / "d")
    assert dumped.names() == ["Makes", "Hardtanh", "Softmax", "late"]


def test_wrappers_go_by_the_name_of_what_they_wrap(tmp_path):
    model = nn.DataParallel(nn.Sequential(nn.Linear(2, 2)))
    with torch.no_grad(), capture(tmp_path / "d"):
        model(torch.ones(2))
    dumped = Dumped(tmp_path / "d")
    assert dumped.names() == ["Sequential", "0"]
    assert "forward/Sequential#1/input.0" not in dumped.ids()


@pytest.mark.parametrize("error", [ValueError("broken"), KeyboardInterrupt()])
def test_what_the_program_raises_passes_and_leaves_the_count_right(tmp_path, error):
    model = Failing(error)
    good = nn.Linear(2, 2)
    with torch.no_grad(), capture(tmp_path / "d"):
        with pytest.raises(type(error)):
            model(torch.ones(2))
        good(torch.ones(2))
    dumped = Dumped(tmp_path / "d")
    assert dumped.names() == ["Failing", "first", "Linear"]
    assert "forward/Failing#0/output.0" not in dumped.ids()


def test_what_the_program_raises_is_not_hidden_by_a_selection_that_met_nothing(tmp_path):
    with pytest.raises(ValueError, match=r"^broken$"), capture(tmp_path / "d", layers=["nowhere"]):
        Failing(ValueError("broken"))(torch.ones(2))
    assert Dumped(tmp_path / "d").records == []


def test_a_selection_that_met_nothing_is_an_error_once_the_dump_is_closed(tmp_path):
    with (
        pytest.raises(
            UsageError, match=r"'layers\.0\.ffn' matched none of 22 names; the most similar: "
        ),
        capture(tmp_path / "d", layers=["layers.0.ffn", "head"], gradients=False),
    ):
        transformer()(tokens())
    dumped = Dumped(tmp_path / "d")
    assert dumped.names() == ["head"]
    assert dumped.dump.header(0).closed


def test_nothing_run_is_an_error(tmp_path):
    with pytest.raises(UsageError, match="nothing ran"), capture(tmp_path / "d"):
        pass


@pytest.mark.parametrize(
    ("selection", "names"),
    [
        ({"layers": ["layers.1.mlp"]}, ["layers.1.mlp"] + [f"layers.1.mlp.{n}" for n in range(3)]),
        ({"layers": ["layers.*.QKV"]}, ["layers.0.qkv", "layers.1.qkv"]),
        ({"ops": ["LayerNorm"]}, ["layers.0.attn_norm", "layers.1.attn_norm"]),
        ({"layers": "layers.0", "ops": "GELU"}, ["layers.0.mlp.1"]),
    ],
)
def test_modules_are_chosen_by_path_and_class(tmp_path, selection, names):
    with torch.no_grad(), capture(tmp_path / "d", **selection):
        transformer()(tokens())
    assert Dumped(tmp_path / "d").names() == names


def test_sides_and_each_nth_step(tmp_path):
    model = nn.Linear(2, 2)
    with torch.no_grad(), capture(tmp_path / "d", mode="output", every=2):
        for _ in range(5):
            model(torch.ones(2))
    dumped = Dumped(tmp_path / "d")
    assert dumped.steps() == [0, 2, 4]
    assert {record.site.side for record in dumped.records} == {"output"}


def test_recording_can_be_switched_off_and_on(tmp_path):
    model = nn.Linear(2, 2)
    plain = nn.Module.__call__
    with torch.no_grad(), capture(tmp_path / "d", level="both") as recording:
        model(torch.zeros(2))
        recording.pause()
        assert nn.Module.__call__ is plain
        model(torch.ones(2))
        recording.resume()
        model(torch.full((2,), 2.0))
    dumped = Dumped(tmp_path / "d")
    assert dumped.steps() == [0, 1]
    assert dumped[1, "forward/Linear#0/input.0"].tolist() == [2, 2]


def test_a_ring_holds_the_last_steps_and_those_that_were_kept(tmp_path):
    model = nn.Identity()
    with capture(tmp_path / "d", last=2, mode="output") as recording:
        for n in range(6):
            model(torch.full((1,), float(n)))
            if n == 1:
                recording.keep()
    dumped = Dumped(tmp_path / "d")
    assert dumped.steps() == [0, 1, 4, 5]
    assert dumped[5, "forward/Identity#0/output.0"].tolist() == [5]


def test_statistics_in_place_of_tensors(tmp_path):
    model = nn.Identity()
    with capture(tmp_path / "d", data="stats", mode="output"):
        model(torch.tensor([1.0, torch.nan, 3.0]))
    (record,) = Dumped(tmp_path / "d").records
    assert record.payload is None
    assert (record.statistics.nans, record.statistics.maximum) == (1, 3.0)


def test_a_rank_that_is_not_wanted_is_left_alone(tmp_path):
    plain = nn.Module.__call__
    with capture(tmp_path / "d", ranks=[1], level="both"):
        assert nn.Module.__call__ is plain
        nn.Identity()(torch.ones(1))
    assert not (tmp_path / "d" / "rank0").exists()


def test_modules_in_other_threads_keep_their_own_account(tmp_path):
    models = [nn.Sequential(nn.Linear(2, 2)) for _ in range(4)]
    ready = threading.Barrier(4)

    def work(model):
        ready.wait()
        with torch.no_grad():
            model(torch.ones(2))

    with capture(tmp_path / "d"):
        threads = [threading.Thread(target=work, args=(model,)) for model in models]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    dumped = Dumped(tmp_path / "d")
    assert len(dumped.names()) == 8
    assert dumped.steps() == [0]


def test_two_captures_at_once_see_the_same(tmp_path):
    plain = nn.Module.__call__
    model = transformer()
    with torch.no_grad(), capture(tmp_path / "a"):
        with capture(tmp_path / "b"):
            model(tokens())
        model(tokens())
    assert Dumped(tmp_path / "a").ids(0) == Dumped(tmp_path / "b").ids(0)
    assert Dumped(tmp_path / "a").steps() == [0, 1]
    assert nn.Module.__call__ is plain


def test_a_capture_records_one_run(tmp_path):
    recording = capture(tmp_path / "d")
    with pytest.raises(UsageError, match="the recording has not started"):
        recording.pause()
    with recording:
        nn.Identity()(torch.ones(1))
    with pytest.raises(UsageError, match="already used"), recording:
        pass


def test_an_unknown_level_is_refused(tmp_path):
    with pytest.raises(
        UsageError, match="level='ops' is not supported: use one of module, op, both"
    ):
        capture(tmp_path / "d", level="ops")
