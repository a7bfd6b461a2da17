"""`paritas.capture` around compiled code: it runs as it is, and the dump says what was not seen."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard, init_device_mesh

from integration.captures import Dumped
from paritas.recording.capture import capture


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 2)

    def forward(self, x, *, scale=1.0):
        return self.b(torch.relu(self.a(x))) * scale


class Counted:
    """A backend that runs graphs as they are, and counts them."""

    def __init__(self):
        self.graphs = 0

    def __call__(self, graph, inputs):
        self.graphs += 1
        return graph.forward


def wrapped(model, backend):
    return torch.compile(model, backend=backend, fullgraph=True)


def by_method(model, backend):
    model.compile(backend=backend, fullgraph=True)
    return model


def inside(model, backend):
    model.a = torch.compile(model.a, backend=backend, fullgraph=True)
    return model


pytestmark = pytest.mark.usefixtures("fresh_compiler")


@pytest.mark.one_in(3)
@pytest.mark.parametrize("level", ["module", "both"])
@pytest.mark.parametrize("how", [wrapped, by_method, inside])
@pytest.mark.parametrize("when", ["before", "while", "both times"])
def test_compiled_code_runs_unchanged_and_is_compiled_once(tmp_path, how, when, level):
    torch.manual_seed(0)
    backend, x = Counted(), torch.randn(3, 4)
    model = Net()
    expected = model(x, scale=2.0)
    if when != "while":
        compiled = how(model, backend)
        compiled(x, scale=2.0)
    with capture(tmp_path / "d", level=level, gradients=False):
        if when == "while":
            compiled = how(model, backend)
        result = compiled(x, scale=2.0)
    if when != "before":
        compiled(x, scale=2.0)
    assert torch.equal(result, expected)
    assert backend.graphs == 1
    dumped = Dumped(tmp_path / "d")
    assert torch.equal(dumped["forward/Net#0/output.0"], expected)
    assert dumped["forward/Net#0/input.scale"] == "2.0"
    seen = "a" if how is inside else "Net"
    (note,) = dumped.notes
    assert note == (
        f"{seen} is compiled: only its inputs and outputs are recorded; use a paritas.record "
        "backend to record its inside"
    )
    assert dumped.names() == (["Net", "a", "b"] if how is inside else ["Net"])


@pytest.mark.parametrize("level", ["module", "both"])
def test_gradients_pass_through_compiled_code_as_ever(tmp_path, level):
    torch.manual_seed(0)
    model, x = Net(), torch.randn(3, 4)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    compiled(x).sum().backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    with capture(tmp_path / "d", level=level):
        compiled(x).sum().backward()
    dumped = Dumped(tmp_path / "d")
    for (name, parameter), gradient in zip(model.named_parameters(), expected, strict=True):
        assert torch.equal(parameter.grad, gradient)
        assert torch.equal(dumped[f"backward/{name}#0/output.grad"], gradient)
    assert dumped["backward/Net#0/output.0"].tolist() == [[1, 1]] * 3


def test_code_compiled_in_pieces_runs_unchanged(tmp_path):
    class Broken(Net):
        def forward(self, x):
            x = torch.relu(self.a(x))
            torch._dynamo.graph_break()  # noqa: TID251
            return self.b(x) + 1

    torch.manual_seed(0)
    model, x = Broken(), torch.randn(3, 4)
    with torch.no_grad(), capture(tmp_path / "d"):
        expected = model(x)
        result = torch.compile(model, backend="eager")(x)
    assert torch.equal(result, expected)
    dumped = Dumped(tmp_path / "d")
    assert torch.equal(dumped["forward/Broken#0/output.0"], expected)
    assert torch.equal(dumped[1, "forward/Broken#0/output.0"], expected)


def test_code_fused_by_inductor_is_left_as_it_is(tmp_path):
    torch.manual_seed(0)
    model, x = Net(), torch.randn(3, 4)
    compiled = torch.compile(model, fullgraph=True)
    with torch.no_grad():
        expected = compiled(x)
        with capture(tmp_path / "d", level="both"):
            result = compiled(x)
    assert torch.equal(result, expected)
    assert torch.equal(Dumped(tmp_path / "d")["forward/Net#0/output.0"], expected)


@pytest.fixture
def mesh(monkeypatch):
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # the group puts its own there
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("level", ["module", "op"])
def test_of_a_distributed_tensor_the_local_part_is_recorded(tmp_path, mesh, level):
    model = nn.Identity() if level == "module" else torch.relu
    x = DTensor.from_local(torch.tensor([[1.0, -1.0]]), mesh, [Shard(1)])
    with capture(tmp_path / "d", level=level):
        model(x)
    name = "Identity" if level == "module" else "aten.relu.default"
    dumped = Dumped(tmp_path / "d")
    assert dumped[f"forward/{name}#0/input.0"].tolist() == [[1, -1]]
    placement = dumped.by_key[0, f"forward/{name}#0/input.0"].placement
    assert placement.placements == ("shard(1)",)
    assert placement.mesh_names == ("tp",)
