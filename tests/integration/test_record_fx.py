"""Graphs run node by node: what is recorded, under which step, and that nothing else changes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import paritas
from paritas.core.errors import UsageError
from paritas.formats.dumps.reading import Dump

pytestmark = pytest.mark.usefixtures("fresh_compiler")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


@torch.compiler.disable
def break_graph():
    """Dynamo compiles what comes before a call of this and what comes after it apart."""


def record(path, run, **options):
    with paritas.record(path, source="fx", **options) as backend:
        run(backend)
    dump = Dump.open(path)
    assert dump.problems == []
    return dump


def of(dump, phase="forward", side="output"):
    return [r for r in dump.records() if r.site.phase == phase and r.site.side == side]


def test_every_node_of_the_forward_and_the_backward_graph_is_there(tmp_path):
    torch.manual_seed(0)
    model, x = Block(), torch.randn(4, 8)
    expected = model(x)
    expected.sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    results = []

    def run(backend):
        results.append(torch.compile(model, backend=backend)(x))
        results[0].sum().backward()

    dump = record(tmp_path / "dump", run)
    torch.testing.assert_close(results[0], expected)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name])
    forward = {r.site.name: r for r in of(dump)}
    assert {"addmm", "relu", "addmm_1"} <= set(forward)
    relu = torch.relu(model.up(model.norm(x)))
    torch.testing.assert_close(dump.read(forward["relu"]), relu)
    site = forward["addmm"].site
    assert (site.op, site.module) == ("aten.addmm.default", "up")
    assert "test_record_fx.py" in site.line
    assert "self.up" in site.code
    backward = [dump.read(r) for r in of(dump, "backward") if r.tensor is not None]
    for gradient in gradients.values():
        assert any(
            seen.shape == gradient.shape and torch.allclose(seen, gradient, atol=1e-6)
            for seen in backward
        )
    assert {seen.status for seen in dump.header(0).observed} == {"unchanged"}


def test_inputs_are_named_by_what_the_user_calls_them(tmp_path):
    model, x = Block(), torch.randn(4, 8)
    with torch.no_grad():
        dump = record(tmp_path / "dump", lambda b: torch.compile(model, backend=b)(x))
    given = {r.site.module for r in of(dump) if r.site.op == "placeholder"}
    assert {"up.weight", "norm.bias", "x"} <= given


def test_numbers_and_lists_among_the_arguments_keep_their_places(tmp_path):
    def function(x, y):
        return torch.cat([x, y], dim=1).clamp(min=0.5)

    x, y = torch.randn(2, 3), torch.randn(2, 4)
    dump = record(tmp_path / "dump", lambda b: torch.compile(function, backend=b)(x, y))
    inputs = {(r.site.name, r.site.position): r for r in of(dump, side="input")}
    assert torch.equal(dump.read(inputs["cat", "0.1"]), y)
    assert inputs["cat", "1"].value == "1"
    assert inputs["clamp_min", "1"].value == "0.5"


def test_what_a_node_is_given_is_put_down_to_the_node_that_made_it(tmp_path):
    def function(x, y):
        mean = torch.var_mean(x.exp(), dim=0)[1]
        return torch.cat([mean, y]) + 1

    x, y = torch.randn(3, 3), torch.randn(4)
    dump = record(tmp_path / "dump", lambda b: torch.compile(function, backend=b)(x, y))
    made = {(r.site.name, r.site.position): r.site.nodes for r in of(dump, side="input")}
    assert made["var_mean", "0"] == ("exp",)
    assert made["getitem_1", "0.1"] == ("var_mean",)
    assert made["cat", "0.0"] == ("getitem_1",)
    assert made["add", "1"] == ()


def test_a_written_input_is_recorded_as_it_was_before_and_after(tmp_path):
    def function(x):
        x.add_(1)
        return x * 2

    x = torch.zeros(4)
    dump = record(tmp_path / "dump", lambda b: torch.compile(function, backend=b)(x))
    assert torch.equal(x, torch.ones(4))
    (given,) = [r for r in of(dump) if r.site.op == "placeholder"]
    assert torch.equal(dump.read(given), torch.zeros(4))
    copied = [r for r in of(dump) if r.site.op == "aten.copy_.default"]
    assert torch.equal(dump.read(copied[0]), torch.ones(4))


def test_a_step_is_a_call_of_the_compiled_function_whatever_it_was_compiled_into(tmp_path):
    def function(x):
        y = x + 1
        break_graph()
        return y * 2

    def run(backend):
        compiled = torch.compile(function, backend=backend, dynamic=False)
        for size in (2, 3, 2):  # the second is compiled anew
            compiled(torch.zeros(size))

    dump = record(tmp_path / "dump", run)
    steps = {}
    for r in of(dump):
        if r.site.name in {"add", "mul"}:
            steps.setdefault(r.step, []).append((r.site.name, r.tensor.shape[0]))
    assert steps == {
        0: [("add", 2), ("mul", 2)],
        1: [("add", 3), ("mul", 3)],
        2: [("add", 2), ("mul", 2)],
    }


def test_steps_can_be_ended_by_hand(tmp_path):
    def run(backend):
        compiled = torch.compile(lambda x: x.cos(), backend=backend)
        for _ in range(2):
            compiled(torch.zeros(3))
            compiled(torch.ones(3))
            backend.step()

    dump = record(tmp_path / "dump", run, stepping="manual", layers=["cos"], mode="output")
    assert [(r.step, r.site.call) for r in of(dump)] == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_a_pause_leaves_its_calls_out(tmp_path):
    def run(backend):
        compiled = torch.compile(lambda x: x.cos(), backend=backend)
        compiled(torch.full((3,), 1.0))
        backend.pause()
        compiled(torch.full((3,), 2.0))
        backend.resume()
        compiled(torch.full((3,), 3.0))

    dump = record(tmp_path / "dump", run, layers=["cos"], mode="input")
    values = [float(dump.read(r)[0]) for r in of(dump, side="input")]
    assert values == [1.0, 3.0]


def test_only_what_is_asked_for_is_recorded(tmp_path):
    torch.manual_seed(0)
    model, x = Block(), torch.randn(4, 8)

    def run(backend):
        compiled = torch.compile(model, backend=backend)
        for _ in range(4):
            compiled(x).sum().backward()

    dump = record(
        tmp_path / "dump", run, steps=["1-2"], ops=["mm"], phases="backward", mode="output"
    )
    seen = [(r.step, r.site.phase, r.site.op) for r in dump.records()]
    assert {step for step, _, _ in seen} == {1, 2}
    assert {(phase, op) for _, phase, op in seen} == {("backward", "aten.mm.default")}


def test_a_layer_that_is_not_there_is_told_with_the_nearest_names(tmp_path):
    with pytest.raises(UsageError, match=r"'upp' matched none.*most similar: 'up'"):
        record(
            tmp_path / "dump",
            lambda b: torch.compile(Block(), backend=b)(torch.randn(2, 8)),
            layers=["upp"],
        )
    assert Dump.open(tmp_path / "dump").header(0).closed


def test_the_failure_of_the_program_is_not_hidden(tmp_path):
    with pytest.raises(ZeroDivisionError), paritas.record(tmp_path / "dump", layers=["nothing"]):
        raise ZeroDivisionError
    assert Dump.open(tmp_path / "dump").problems == []


def test_random_numbers_are_drawn_as_without_recording(tmp_path):
    model = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.5))
    x = torch.randn(4, 8)
    torch.manual_seed(3)
    plain = torch.compile(model)(x)
    after = torch.get_rng_state()
    torch.compiler.reset()
    torch.manual_seed(3)
    results = []
    record(tmp_path / "dump", lambda b: results.append(torch.compile(model, backend=b)(x)))
    torch.testing.assert_close(results[0], plain)
    assert torch.equal(torch.get_rng_state(), after)


def test_a_ring_keeps_the_last_steps_and_what_was_pinned(tmp_path):
    def run(backend):
        compiled = torch.compile(lambda x: x.cos(), backend=backend)
        for number in range(6):
            compiled(torch.full((3,), float(number)))
            if number == 1:
                backend.keep()

    dump = record(tmp_path / "dump", run, last=2)
    assert sorted({r.step for r in dump.records()}) == [0, 1, 4, 5]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"source": "ge"}, "source='ge' is not supported: use one of fx, fused"),
        ({"source": "fx", "taps": True}, "taps=True"),
        ({"data": "values"}, "data='values' is not supported: use one of tensor, stats"),
        ({"last": -1}, "last must be a whole number, 0 or more, got -1"),
        ({"layout": "msit", "data": "stats"}, 'layout="msit" cannot hold statistics'),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_made(tmp_path, options, message):
    with pytest.raises(UsageError) as raised:
        paritas.record(tmp_path / "dump", **options)
    assert message in str(raised.value)
    assert not (tmp_path / "dump").exists()


def test_stepping_by_hand_must_be_asked_for(tmp_path):
    with paritas.record(tmp_path / "dump", source="fx") as backend:
        with pytest.raises(UsageError, match='stepping="manual"'):
            backend.step()
        with pytest.raises(UsageError, match="last=k"):
            backend.keep()
        torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))


def test_a_second_run_into_the_same_folder_is_refused_unless_asked_for(tmp_path):
    run = lambda b: torch.compile(lambda x: x + 1, backend=b)(torch.ones(2))  # noqa: E731
    record(tmp_path / "dump", run)
    with pytest.raises(UsageError, match="overwrite=True"):
        paritas.record(tmp_path / "dump", source="fx")
    torch.compiler.reset()
    record(tmp_path / "dump", run, overwrite=True)
