"""Gradients that `paritas.capture` records: of what modules take and give, of parameters."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from integration.captures import Dumped, tokens, transformer
from paritas.recording.capture import capture


class Scaled(nn.Module):
    """y = w * x: gradients are easily told."""

    def __init__(self, weight=3.0):
        super().__init__()
        self.w = nn.Parameter(torch.tensor(weight))

    def forward(self, x):
        return self.w * x


class Chain(nn.Module):
    """Layers of which some are recomputed in the backward pass."""

    def __init__(self, how, *, shared=False):
        super().__init__()
        self.layers = nn.ModuleList(Scaled(2.0 + n) for n in range(3))
        if shared:
            self.layers = nn.ModuleList([self.layers[0]] * 3)
        self.how = how

    def forward(self, x):
        for layer in self.layers:
            if self.how is None:
                x = layer(x)
            else:
                x = checkpoint(layer, x, use_reentrant=self.how == "reentrant")
        return x


def test_the_gradient_of_a_value_bears_its_name(tmp_path):
    model = nn.Sequential(Scaled(3.0), Scaled(5.0))
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    with capture(tmp_path / "d"):
        model(x).sum().backward()
    dumped = Dumped(tmp_path / "d")
    assert dumped["backward/Sequential#0/output.0"].tolist() == [1, 1]
    assert dumped["backward/1#0/input.0"].tolist() == [5, 5]
    assert dumped["backward/0#0/output.0"].tolist() == [5, 5]
    assert dumped["backward/0#0/input.0"].tolist() == [15, 15]
    assert dumped["backward/0.w#0/output.grad"].item() == 15
    assert dumped["backward/1.w#0/output.grad"].item() == 9
    record = dumped.by_key[0, "backward/0.w#0/output.grad"]
    assert (record.site.level, record.site.module, record.site.op) == ("parameter", "0", "Scaled")


def test_a_value_written_to_in_place_has_the_gradient_of_what_it_held(tmp_path):
    model = nn.Sequential(Scaled(3.0), nn.ReLU(inplace=True), Scaled(5.0))
    with capture(tmp_path / "d"):
        model(torch.tensor([1.0, -2.0])).sum().backward()
    dumped = Dumped(tmp_path / "d")
    assert dumped["forward/1#0/input.0"].tolist() == [3, -6]
    assert dumped["forward/1#0/output.0"].tolist() == [3, 0]
    assert dumped["backward/1#0/output.0"].tolist() == [5, 5]
    assert dumped["backward/1#0/input.0"].tolist() == [5, 0]
    assert dumped["backward/0#0/output.0"].tolist() == [5, 0]


def test_parameters_are_recorded_as_each_pass_adds_to_them(tmp_path):
    model = Scaled()
    with capture(tmp_path / "d", stepping="manual"):
        for _ in range(2):
            model(torch.tensor(2.0)).backward()
    dumped = Dumped(tmp_path / "d")
    assert dumped["backward/w#0/output.grad"].item() == 2
    assert dumped["backward/w#1/output.grad"].item() == 4


def test_tied_weights_have_one_gradient_under_their_first_name(tmp_path):
    model = transformer(tied=True)
    with capture(tmp_path / "d"):
        model(tokens())["logits"].sum().backward()
    dumped = Dumped(tmp_path / "d")
    assert torch.equal(dumped["backward/embed.weight#0/output.grad"], model.embed.weight.grad)
    assert "head.weight" not in dumped.names("parameter")


def test_frozen_parameters_have_none_until_they_are_thawed(tmp_path):
    model = nn.Sequential(Scaled(), Scaled())
    model[0].requires_grad_(False)
    with capture(tmp_path / "d"):
        model(torch.tensor(2.0)).backward()
        model[0].requires_grad_(True)
        model(torch.tensor(2.0)).backward()
    dumped = Dumped(tmp_path / "d")
    assert "backward/0.w#0/output.grad" not in dumped.ids(0)
    assert "backward/0.w#0/output.grad" in dumped.ids(1)


def test_parameters_that_the_first_call_makes_have_gradients_like_others(tmp_path):
    model = nn.Sequential(nn.LazyLinear(2))
    with capture(tmp_path / "d"):
        model(torch.ones(1, 3)).sum().backward()
    dumped = Dumped(tmp_path / "d")
    assert dumped["backward/0.weight#0/output.grad"].tolist() == [[1, 1, 1]] * 2


def test_a_graph_gone_through_twice_gives_both_gradients(tmp_path):
    model = Scaled()
    with capture(tmp_path / "d"):
        y = model(torch.tensor(2.0))
        y.backward(retain_graph=True)
        (2 * y).backward()
    dumped = Dumped(tmp_path / "d")
    assert dumped["backward/Scaled#0/output.0"].item() == 1
    assert dumped["backward/Scaled#1/output.0"].item() == 2
    assert dumped["backward/w#1/output.grad"].item() == 6


def test_gradients_of_gradients_are_computed_as_ever(tmp_path):
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    x = torch.ones(3, requires_grad=True)

    def penalty():
        model.zero_grad()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        slope.square().sum().backward()
        return model[0].weight.grad.clone()

    expected = penalty()
    with capture(tmp_path / "d", level="both"):
        result = penalty()
    assert torch.equal(result, expected)
    assert torch.equal(Dumped(tmp_path / "d")["backward/0.weight#0/output.grad"], expected)


@pytest.mark.parametrize("level", ["module", "both"])
@pytest.mark.parametrize("how", ["reentrant", "once"])
def test_what_is_recomputed_is_recorded_once_and_its_gradients_too(tmp_path, how, level):
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    with capture(tmp_path / "plain"):
        Chain(None)(x).sum().backward()
    with capture(tmp_path / "again", level=level):
        Chain(how)(x).sum().backward()
    plain, again = Dumped(tmp_path / "plain"), Dumped(tmp_path / "again")
    modules = {r.id for r in again.records if r.site.level == "module"}
    assert {r.id for r in plain.records if r.site.level == "module"} == modules
    for record in plain.records:
        assert torch.equal(plain[record.id], again[record.id]), record.id


def test_a_shared_layer_recomputed_call_by_call_keeps_its_counts(tmp_path):
    x = torch.tensor([1.0], requires_grad=True)
    for how in (None, "reentrant"):
        with capture(tmp_path / str(how)):
            Chain(how, shared=True)(x).sum().backward()
    plain, again = Dumped(tmp_path / "None"), Dumped(tmp_path / "reentrant")
    names = [r.id for r in plain.records if r.site.level == "module" and r.site.phase == "backward"]
    assert "backward/layers.0#2/input.0" in names
    for name in names:
        assert torch.equal(plain[name], again[name]), name


def test_gradients_can_be_left_out(tmp_path):
    model = Scaled()
    with capture(tmp_path / "d", gradients=False):
        model(torch.tensor(2.0)).backward()
    assert {r.site.phase for r in Dumped(tmp_path / "d").records} == {"forward"}


def test_the_backward_pass_alone_can_be_asked_for(tmp_path):
    model = nn.Sequential(Scaled(), Scaled())
    with capture(tmp_path / "d", phases="backward", layers=["0"], mode="output"):
        model(torch.tensor(2.0)).backward()
    assert Dumped(tmp_path / "d").ids() == [
        "backward/0#0/output.0",
        "backward/0.w#0/output.grad",
    ]


def test_sparse_gradients_do_not_end_the_run(tmp_path):
    model = nn.Embedding(5, 2, sparse=True)
    with capture(tmp_path / "d"):
        model(torch.tensor([1, 2])).sum().backward()
    assert "backward/Embedding#0/output.0" in Dumped(tmp_path / "d").ids()


def test_a_graph_that_outlives_the_recording_has_no_hooks(tmp_path):
    model = nn.Sequential(Scaled(), Scaled())
    with capture(tmp_path / "d"):
        y = model(torch.tensor(2.0))
    assert not y._backward_hooks
    y.backward()
    assert model[0].w.grad.item() == 6
    assert {r.site.phase for r in Dumped(tmp_path / "d").records} == {"forward"}
