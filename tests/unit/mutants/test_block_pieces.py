"""power(by="blocks"): faults planted and judged block by block."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

import paritas
from paritas.core.errors import UsageError
from paritas.core.execution.cotangents import draw_cotangent
from paritas.core.results.items import gradient, output
from paritas.mutants import power as searching
from paritas.mutants.programs import BETWEEN, ModelInPieces, trace_program


class Layer(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.inner, self.scale = nn.Linear(width, width), nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x, shift=0.0):
        return x + torch.tanh(self.inner(x)) * self.scale + shift


class Particular(Layer):
    """It cannot be traced: then its parameters are other tensors."""

    def forward(self, x, shift=0.0):
        if not isinstance(self.scale, nn.Parameter):
            raise TypeError("only with a parameter")
        return super().forward(x, shift)


class Model(nn.Module):
    def __init__(self, kinds=(Layer, Layer, Layer), width=6):
        super().__init__()
        self.layers = nn.ModuleList(kind(width) for kind in kinds)
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        for number, layer in enumerate(self.layers):
            x = layer(x, shift=0.1 * number) * 0.9
        return self.norm(x)


def made(kinds=(Layer, Layer, Layer), seed=0):
    torch.manual_seed(seed)
    return Model(kinds), [torch.randn(5, 6)]


def cut(model, inputs, **options):
    known = {"patterns": None, "gradients": True, "autocast": None, "seed": 0, **options}
    return ModelInPieces(model, paritas.Inputs(tuple(inputs)), **known)


@pytest.fixture(autouse=True, scope="module")
def _young():
    """After each piece all objects are collected: those of earlier tests are not looked at."""
    gc.freeze()


@pytest.fixture(scope="module")
def report():
    model, inputs = made()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    found = paritas.power(inputs, model, faults=16, seconds=3600, blocks=["layers.*"])
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [type(one) for one in model.layers] == [Layer, Layer, Layer]
    return found


def test_every_block_and_what_lies_between_them_gets_its_share_of_faults(report):
    counts = {}
    for one in report.faults:
        counts[one.block] = counts.get(one.block, 0) + 1
    assert counts == {"layers.0": 4, "layers.1": 4, "layers.2": 4, BETWEEN: 4}
    assert report.planned == 16
    assert report.stopped == ""
    assert report.notes[0] == (
        "by blocks: 3 blocks (layers.0, layers.1, layers.2), and between them; each fault is "
        "judged on its block, and compared with the noise of its block"
    )


def test_faults_above_the_noise_are_caught_and_no_harmless_rewrite_is(report):
    clear = report.share("clear")
    assert clear.of >= 10
    assert clear.caught == clear.of
    assert {one.backward for one in report.judged} == {True, False}
    assert {one.block for one in report.reorderings} > {"layers.0", "layers.1"}
    assert report.false_alarms == ()
    assert report.smallest() < 1e-5


def test_kinds_of_faults_differ_from_block_to_block_and_modules_have_their_whole_names(report):
    kinds = [
        {one.mutation for one in report.faults if one.block == f"layers.{number}"}
        for number in range(3)
    ]
    assert len(set.union(*kinds)) > max(map(len, kinds))
    near = {one.near for one in report.faults if one.block.startswith("layers")}
    assert near <= {"", *(f"layers.{i}{end}" for i in range(3) for end in ("", ".inner"))}
    assert "layers.1.inner" in near


def test_a_block_has_the_gradients_that_it_has_inside_of_the_model():
    model, (x,) = made()
    pieces = cut(model, [x], seed=5)
    with pieces.piece("layers.1") as piece:
        program = trace_program(
            piece.model,
            [*piece.inputs.args, *piece.inputs.kwargs.values()],
            upstream=piece.upstream,
        )
    found = dict(zip(program.results, program.module(*program.fresh_inputs()), strict=True))
    out = model(x)
    out.backward(draw_cotangent(output("output"), out, 5))
    for name, parameter in model.layers[1].named_parameters():
        torch.testing.assert_close(found[gradient(name)], parameter.grad)


def plants_nothing(monkeypatch):
    monkeypatch.setattr(searching._PowerSearch, "run", lambda *_: None)


def test_no_graph_is_larger_than_a_block(monkeypatch):
    sizes = []

    def tracing(model, inputs, **options):
        program = trace_program(model, inputs, **options)
        sizes.append(sum(one.numel() for one in program.inputs if isinstance(one, torch.Tensor)))
        return program

    monkeypatch.setattr(searching, "trace_program", tracing)
    plants_nothing(monkeypatch)
    model, inputs = made((Layer,) * 6)
    paritas.power(inputs, model, faults=8, by="blocks")
    block = sum(one.numel() for one in model.layers[0].parameters())
    values = 5 * 6 * (6 + 9)  # what blocks return, the model's input, upstream gradients
    assert len(sizes) == 8
    assert max(sizes) <= block + values


def test_a_block_that_cannot_be_traced_is_named_and_the_others_are_judged():
    model, inputs = made((Layer, Particular, Layer))
    options = {"faults": 4, "seconds": 3600, "gradients": False}
    found = paritas.power(inputs, model, blocks=["layers.*"], **options)
    assert {one.block for one in found.judged} == {"layers.0", "layers.2", BETWEEN}
    assert any(note.startswith("layers.1: the model cannot be traced") for note in found.notes)


def test_when_the_time_is_over_the_pieces_that_were_not_reached_are_named():
    model, inputs = made()
    found = paritas.power(inputs, model, faults=50, seconds=1e-6, blocks=["layers.*"])
    assert (found.stopped, found.planned, found.exit_code()) == ("time", 50, 3)
    assert any("4 pieces not reached: the time ran out (" in note for note in found.notes)


def test_a_layer_that_is_called_several_times_is_judged_on_its_first_call():
    torch.manual_seed(0)
    layer = Layer()
    pieces = cut(*made((lambda _: layer, lambda _: layer, Layer)))
    assert pieces.notes[1] == "a block that is called several times is judged on its first call"
    with pieces.piece("layers.0") as piece:
        assert piece.inputs.kwargs == {"shift": 0.0}


def test_blocks_are_used_where_the_whole_does_not_fit(monkeypatch):
    monkeypatch.setattr(searching, "describe_shortage", lambda *_, **__: ("too large", None))
    plants_nothing(monkeypatch)
    model, inputs = made()
    notes = paritas.power(inputs, model).notes
    assert notes[0] == "by blocks because of memory: too large"
    assert notes[1].startswith("by blocks: 4 blocks (")
    assert paritas.power(inputs, model, by="whole").notes == ()


def test_models_that_have_no_blocks_or_raise_and_contradicting_options_are_refused():
    model, inputs = made()
    for arguments, message in (
        ((inputs, nn.Linear(6, 6)), "found no repeated modules in the model; name its blocks"),
        ((inputs, torch.compile(model, backend="eager")), "needs a model that is not compiled"),
        (([torch.randn(5, 7)], model), "the model cannot be run: RuntimeError"),
    ):
        with pytest.raises(UsageError, match=message):
            paritas.power(*arguments, by="blocks")
    with pytest.raises(UsageError, match="cannot be combined with by='whole'"):
        paritas.power(inputs, model, by="whole", blocks=["layers.*"])
    with pytest.raises(UsageError, match="by must be 'whole' or 'blocks', not 'layers'"):
        paritas.power(inputs, model, by="layers")
