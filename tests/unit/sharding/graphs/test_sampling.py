"""A graph run on sample inputs keeps exactly the arguments of its calls."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.fx import Interpreter

import processes
from paritas import Inputs, capture
from paritas.core.errors import UsageError
from paritas.sharding.graphs.calls import Graph, GraphCall, TensorValue
from paritas.sharding.graphs.opening import open_graph
from paritas.sharding.graphs.sampling import sample_values, values_from_dump
from unit.sharding.graphs.reading_models import Block, Cnn


def exported(model, *inputs):
    torch.manual_seed(0)
    return torch.export.export(model, inputs)


@pytest.fixture(scope="module")
def block():
    return exported(Block(), torch.randn(2, 4, 8))


@pytest.fixture(scope="module")
def block_file(block, tmp_path_factory):
    path = tmp_path_factory.mktemp("sampling") / "block.pt2"
    torch.export.save(block, path)
    return path


class Watching(Interpreter):
    """The arguments of each node of a graph, before it may write to them."""

    def __init__(self, module):
        super().__init__(module)
        self.seen = {}

    def run_node(self, n):
        args, _ = self.fetch_args_kwargs_from_env(n)
        self.seen[n.name] = [one.clone() for one in args if isinstance(one, torch.Tensor)]
        return super().run_node(n)


@pytest.mark.parametrize("where", ["file", "memory"])
def test_every_call_gets_the_arguments_of_an_interpreter(block, block_file, where):
    graph = open_graph(block_file if where == "file" else block)
    x = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(1))
    watching = Watching(block.graph_module)
    state = open_graph(block_file).state()
    with torch.no_grad():
        watching.run(*[x if name == "x" else state[name] for name in graph.values])
    samples = sample_values(graph, x, range(len(graph.calls)))
    assert samples.notes == ()
    assert set(samples.values) == set(range(len(graph.calls)))
    for call in graph.calls:
        given = [one for one in samples.values[call.position].args if torch.is_tensor(one)]
        if call.operator != "operator.getitem":
            assert len(given) == len(watching.seen[call.name])
        for ours, theirs in zip(given, watching.seen[call.name], strict=False):
            assert torch.equal(ours, theirs), call.name


def test_the_users_model_and_inputs_stay_as_they_were():
    program = exported(Cnn(), torch.randn(2, 3, 8, 8))
    before = {name: tensor.clone() for name, tensor in program.state_dict.items()}
    x = torch.ones(2, 3, 8, 8)
    sample_values(open_graph(program), x, {0, 99})
    assert all(torch.equal(tensor, before[name]) for name, tensor in program.state_dict.items())
    assert torch.equal(x, torch.ones(2, 3, 8, 8))


def test_a_tensor_passed_twice_stays_one():
    graph = open_graph(torch.fx.symbolic_trace(lambda x: x * x), inputs=torch.ones(3))
    values = sample_values(graph, torch.full((3,), 2.0), [0]).values[0]
    assert values.args[0] is values.args[1]


def test_a_later_write_does_not_reach_what_was_kept():
    graph = open_graph(torch.fx.symbolic_trace(lambda x: (x + 1).add_(1)), inputs=torch.zeros(2))
    samples = sample_values(graph, torch.zeros(2), [0, 1])
    assert samples.values[0].args[0].tolist() == [0, 0]
    assert samples.values[1].args[0].tolist() == [1, 1]


def test_random_numbers_are_those_of_the_seed_and_leave_the_users_alone():
    graph = open_graph(exported(Cnn(), torch.randn(2, 3, 8, 8)))
    last = len(graph.calls) - 1
    torch.manual_seed(5)
    before = torch.get_rng_state()
    given = [
        sample_values(graph, torch.ones(2, 3, 8, 8), [last], seed=seed).values[last].args[0]
        for seed in (0, 0, 1)
    ]
    assert torch.equal(given[0], given[1])
    assert not torch.equal(given[0], given[2])
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    "inputs",
    [
        (torch.ones(3), torch.zeros(3)),
        {"x": torch.ones(3), "y": torch.zeros(3)},
        {"0": torch.ones(3), "1": torch.zeros(3)},
        Inputs((torch.ones(3), None, 7), {"y": torch.zeros(3)}),
        ([torch.ones(3)], {"b": torch.zeros(3)}),
    ],
)
def test_inputs_are_taken_by_position_and_by_name(inputs):
    module = torch.fx.symbolic_trace(lambda x, y: x - y)
    graph = open_graph(module, inputs=(torch.ones(3), torch.ones(3)))
    x, y = sample_values(graph, inputs, [0]).values[0].args
    assert (x.tolist(), y.tolist()) == ([1.0] * 3, [0.0] * 3)


@pytest.mark.parametrize(
    ("inputs", "says"),
    [
        (
            (torch.ones(3),),
            r"the inputs y are missing; the graph takes 2 tensors: x float32\[3\], y",
        ),
        ((torch.ones(3),) * 3, "got 3 positional input tensors"),
        (
            (torch.ones(3), torch.ones(4)),
            r"input y is float32\[4\], but the graph has float32\[3\]",
        ),
        ((torch.ones(3), torch.ones(3).double()), r"input y is float64\[3\]"),
        ({"x": torch.ones(3), "z": torch.ones(3)}, "the graph has no input 'z'"),
        ({"x": [torch.ones(3)]}, "a named input holds several tensors"),
    ],
)
def test_inputs_that_are_not_those_of_the_graph_are_refused(inputs, says):
    module = torch.fx.symbolic_trace(lambda x, y: x - y)
    graph = open_graph(module, inputs=(torch.ones(3), torch.ones(3)))
    with pytest.raises(UsageError, match=says):
        sample_values(graph, inputs, [0])


@pytest.fixture
def branching(tmp_path):
    """Exported by a process of its own.

    Where threads have compiled before, Dynamo now and then takes the sizes of a branch for dynamic,
    and the export fails.
    """
    path = tmp_path / "branching.pt2"
    code = (
        "import sys, torch; from unit.sharding.graphs.reading_models import Branching;"
        "torch.export.save(torch.export.export(Branching(), (torch.ones(2, 3),)), sys.argv[1])"
    )
    done = processes.run("-c", code, path)
    assert done.returncode == 0, done.stderr
    return path


def test_what_depends_on_a_call_that_cannot_run_is_left_to_be_drawn(branching):
    graph = open_graph(branching)
    samples = sample_values(graph, torch.ones(2, 3), range(len(graph.calls)))
    unknown = {call.name for call in graph.calls if call.position not in samples.values}
    assert "add" in unknown
    assert "sum_1" not in unknown
    assert samples.notes[0].startswith("not run on the sample inputs: cond: ")
    assert samples.notes[1].startswith(
        "the arguments of these calls are unknown and are drawn: cond."
    )


def test_what_a_file_names_is_not_run_beyond_torchs_operators(tmp_path):
    x = TensorValue("x", (2,), torch.float32, "input")
    made = TensorValue("made", (2,), torch.float32)
    calls = (
        GraphCall(0, "evil", "os.mkdir", (str(tmp_path / "ran"),), outputs=(made,)),
        GraphCall(1, "relu", "aten.relu.default", (made,), outputs=(x,)),
    )
    samples = sample_values(Graph("hostile", "torch.export", calls, {"x": x}), torch.ones(2), [1])
    assert samples.values == {}
    assert "paritas does not run os.mkdir" in samples.notes[0]
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("operator", "args"),
    [("aten.arange.default", (10**12,)), ("aten.expand.default", ("x", [10**6, 10**6, 2]))],
)
def test_what_does_not_fit_the_memory_is_not_run(operator, args):
    x = TensorValue("x", (2,), torch.float32, "input")
    made = TensorValue("made", (2,), torch.float32)
    given = tuple(x if one == "x" else one for one in args)
    calls = (
        GraphCall(0, "large", operator, given, outputs=(made,)),
        GraphCall(1, "relu", "aten.relu.default", (made,)),
    )
    graph = Graph("hostile", "torch.export", calls, {"x": x})
    samples = sample_values(graph, torch.ones(2), [1])
    assert "large returns " in samples.notes[0]
    assert "; 4 GiB are allowed" in samples.notes[0]


def test_a_large_number_is_not_a_large_tensor():
    made = TensorValue("made", (2,), torch.float32)
    calls = (
        GraphCall(0, "full", "aten.full.default", ([2], -1e30), outputs=(made,)),
        GraphCall(1, "relu", "aten.relu.default", (made,)),
    )
    samples = sample_values(Graph("masking", "torch.export", calls), (), [1])
    assert samples.notes == ()
    assert samples.values[1].args[0].tolist() == [-1.0000000150474662e30] * 2


def test_parameters_that_a_graph_does_not_hold_are_drawn_and_reported():
    x = TensorValue("x", (2, 4), torch.float32, "input")
    weight = TensorValue("weight", (3, 4), torch.float32, "parameter")
    made = TensorValue("made", (2, 3), torch.float32)
    call = GraphCall(0, "linear", "torch.nn.functional.linear", (x, weight), outputs=(made,))
    graph = Graph("without", "nnscaler", (call,), {"x": x, "weight": weight})
    samples = sample_values(graph, torch.ones(2, 4), [0])
    assert samples.values[0].args[1].shape == (3, 4)
    assert samples.notes == ("the graph does not hold weight; drawn for the sample run",)


def test_a_result_that_differs_from_the_graph_is_reported():
    x = TensorValue("x", (2,), torch.float32, "input")
    wrong = TensorValue("wrong", (3,), torch.float32)
    calls = (
        GraphCall(0, "relu", "aten.relu.default", (x,), outputs=(wrong,)),
        GraphCall(1, "tanh", "aten.tanh.default", (wrong,), outputs=()),
    )
    samples = sample_values(Graph("odd", "torch.export", calls, {"x": x}), torch.ones(2), [0, 1])
    assert set(samples.values) == {0}
    assert "relu returned float32[2], but the graph has float32[3]" in samples.notes[0]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 8)
        self.n = nn.LayerNorm(8)

    def forward(self, x):
        p, q = self.n(self.a(x)).chunk(2, -1)
        return torch.cat([p * 2, q], -1).view(3, 2, 4)


@pytest.mark.parametrize(
    ("level", "known"), [("op", ["mul", "cat", "view"]), ("module", ["linear"])]
)
def test_a_dump_of_the_model_provides_the_arguments_of_calls(tmp_path, level, known):
    torch.manual_seed(0)
    model, x = Net(), torch.randn(3, 4)
    graph = open_graph((model, x))
    with capture(tmp_path / "dump", level=level):
        model(x)
    recorded = values_from_dump(graph, tmp_path / "dump", range(99))
    sampled = sample_values(graph, x, range(99))
    names = {graph.calls[position].name for position in recorded.values}
    assert names >= set(known)
    assert recorded.notes[0] == f"dump holds the arguments of {len(names)} of 6 calls"
    for position, values in recorded.values.items():
        for ours, theirs in zip(values.args, sampled.values[position].args, strict=True):
            if torch.is_tensor(ours):
                torch.testing.assert_close(ours, theirs)


def test_a_dump_of_another_program_is_refused(tmp_path):
    graph = open_graph((nn.Linear(4, 4), torch.ones(2, 4)))
    with capture(tmp_path / "dump", level="op"):
        torch.ones(3).sin()
    with pytest.raises(UsageError, match="none of its recorded calls is in Linear"):
        values_from_dump(graph, tmp_path / "dump", [0])
