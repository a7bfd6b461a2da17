"""An exported program is read without running it, and every node of it is accounted for."""

from __future__ import annotations

import json
import zipfile

import pytest
import torch
from torch import nn

from paritas.sharding.graphs.exported import read_exported, source_of
from paritas.sharding.graphs.exported_values import Symbols, Unknown
from paritas.sharding.graphs.opening import open_graph
from unit.sharding.graphs.reading_models import Block, Branching, Cnn, Counting, calls_of


def exported(model, *inputs, **options):
    torch.manual_seed(0)
    return torch.export.export(model, inputs, **options)


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("programs")
    length = torch.export.Dim("length", min=3, max=64)
    made = {
        "block": exported(Block(), torch.randn(2, 4, 8), dynamic_shapes={"x": {1: length}}),
        "cnn": exported(Cnn(), torch.randn(2, 3, 8, 8)),
        "branching": exported(Branching(), torch.randn(2, 3)),
        "counting": exported(Counting(), torch.randn(4)),
    }
    for name, program in made.items():
        torch.export.save(program, folder / f"{name}.pt2")
    return {name: (program, folder / f"{name}.pt2") for name, program in made.items()}


def call_named(graph, name):
    return next(call for call in graph.calls if call.name == name)


@pytest.mark.parametrize("name", ["block", "cnn"])
@pytest.mark.parametrize("where", ["file", "memory"])
def test_every_call_is_there_with_the_shapes_that_torch_says(programs, name, where):
    program, path = programs[name]
    graph = open_graph(path if where == "file" else program)
    read = {
        call.name: (call.operator, [(one.shape, one.dtype) for one in call.outputs])
        for call in graph.calls
    }
    assert read == calls_of(program)
    assert [call.position for call in graph.calls] == list(range(len(graph.calls)))
    assert graph.kind == "torch.export"
    assert not any(call.obstacle for call in graph.calls)


@pytest.mark.parametrize("name", ["block", "cnn", "counting"])
def test_a_file_and_the_program_in_memory_give_the_same_arguments(programs, name):
    program, path = programs[name]
    for ours, theirs in zip(open_graph(path).calls, open_graph(program).calls, strict=True):
        if ours.operator != "operator.getitem":
            assert ours.args == theirs.args
        assert ours.kwargs == theirs.kwargs
        assert (ours.source, ours.code, ours.module) == (theirs.source, theirs.code, theirs.module)
        assert ours.idle == theirs.idle


def test_a_symbolic_size_is_the_number_it_had(programs):
    graph = read_exported(programs["block"][1])
    view = call_named(graph, "view")
    assert view.args[1] == [2, 4, 2, 12]
    assert view.outputs[0].shape == (2, 4, 2, 12)


def test_what_inputs_are_is_read_from_the_signature(programs):
    values = read_exported(programs["block"][1]).values
    kinds = {name: (value.kind, value.requires_grad) for name, value in values.items()}
    assert kinds == {
        "p_norm_weight": ("parameter", True),
        "p_norm_bias": ("parameter", True),
        "p_qkv_weight": ("parameter", True),
        "p_qkv_bias": ("parameter", True),
        "p_out_weight": ("parameter", True),
        "b_count": ("buffer", False),
        "b_scale": ("buffer", False),
        "c_lifted_tensor_0": ("constant", False),
        "x": ("input", False),
    }


def test_the_weights_are_those_of_the_model(programs):
    program, path = programs["block"]
    state = read_exported(path).state()
    assert torch.equal(state["p_qkv_weight"], program.state_dict["qkv.weight"])
    assert state["b_scale"].tolist() == [0.5] * 8
    assert state["c_lifted_tensor_0"].tolist() == [0, 1]
    assert set(state) == set(open_graph(program).state())


def test_tied_weights_and_views_of_a_weight_are_read_as_they_were(tmp_path):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.whole = nn.Parameter(torch.arange(12.0).reshape(3, 4))
            self.register_buffer("turned", self.whole.detach().t())

        def forward(self, x):
            return x @ self.whole.t() @ self.turned.t()

    model = Tied()
    torch.export.save(exported(model, torch.randn(2, 4)), tmp_path / "tied.pt2")
    state = read_exported(tmp_path / "tied.pt2").state()
    assert torch.equal(state["p_whole"], model.whole)
    assert torch.equal(state["b_turned"], model.turned)


def test_the_users_line_is_named_and_not_that_of_torch(programs):
    linear = call_named(read_exported(programs["block"][1]), "linear")
    assert linear.source.startswith("graphs/reading_models.py:")
    assert "self.qkv(self.norm(x))" in linear.code
    assert linear.module == "qkv"


def test_only_the_folder_of_a_file_is_shown():
    trace = 'File "/home/me/models/gpt.py", line 7, in forward\n    y = self.a(x)\n'
    trace += '  File "/x/site-packages/torch/nn/modules/linear.py", line 1, in forward\n    F()'
    assert source_of(trace) == ("models/gpt.py:7", "y = self.a(x)")
    windows = 'File "C:\\me\\models\\gpt.py", line 7, in forward\n    y = f(x)'
    assert source_of(windows) == ("models/gpt.py:7", "y = f(x)")
    assert source_of("") == ("", "")


def test_unpacking_sizes_and_assertions_are_nothing_to_check(programs):
    block = read_exported(programs["block"][1])
    assert call_named(block, "getitem").idle == "unpacks a tuple"
    assert call_named(block, "sym_size_int_1").idle == "computes sizes, not tensors"
    counting = read_exported(programs["counting"][1])
    asserted = [call for call in counting.calls if "assert" in call.operator]
    assert asserted
    assert {call.idle for call in asserted} == {"checks an assumption and computes nothing"}


def test_a_size_that_depends_on_values_is_guessed_and_reported(programs):
    graph = read_exported(programs["counting"][1])
    nonzero = next(call for call in graph.calls if call.operator == "aten.nonzero.default")
    assert nonzero.outputs[0].shape == (4, 1)  # no more than there are elements
    assert any(
        note.startswith("sizes that depend on values are guessed: u") for note in graph.notes
    )


def test_inside_a_condition_all_calls_are_listed_and_the_condition_is_an_obstacle(programs):
    for source in programs["branching"]:
        graph = open_graph(source)
        cond = call_named(graph, "cond")
        assert cond.operator == "higher_order.cond"
        assert cond.obstacle.startswith("a higher-order operator")
        inside = {call.name: call.operator for call in graph.calls if "graph_0" in call.name}
        assert inside == {
            "cond.true_graph_0.add": "aten.add.Tensor",
            "cond.false_graph_0.sin": "aten.sin.default",
            "cond.false_graph_0.sub": "aten.sub.Tensor",
        }


def test_calls_without_gradient_take_and_give_the_values_around_them(programs):
    for source in programs["branching"]:
        graph = open_graph(source)
        mul = next(call for call in graph.calls if call.operator == "aten.mul.Tensor")
        last = graph.calls[-1]
        assert mul.args[0].name == "x"
        assert mul.outputs[0] == last.args[1]


def test_a_custom_operator_is_read_where_it_is_not_registered(tmp_path):
    with torch.library._scoped_library("reading_test", "FRAGMENT") as library:
        library.define("twice(Tensor x, float[] by, *, str how) -> (Tensor, Tensor?)")
        implemented = lambda x, by, *, how: (x * by[0], None)  # noqa: E731
        library.impl("twice", implemented, "CompositeExplicitAutograd")

        class Custom(nn.Module):
            def forward(self, x):
                return torch.ops.reading_test.twice(x, [float("inf")], how="loud")[0]

        torch.export.save(exported(Custom(), torch.randn(3)), tmp_path / "custom.pt2")
    call = read_exported(tmp_path / "custom.pt2").calls[0]
    assert call.operator == "reading_test.twice.default"
    assert call.args[1] == [float("inf")]
    assert call.kwargs == {"how": "loud"}
    assert [one.shape for one in call.outputs] == [(3,)]


def test_nan_and_infinity_are_read_from_json(programs):
    fill = call_named(read_exported(programs["block"][1]), "masked_fill")
    assert fill.args[2] == float("-inf")


@pytest.mark.parametrize("written", ["__import__('os').system('false')", "f()", "Symbol()", "2 +"])
def test_an_expression_of_a_size_is_never_evaluated(written):
    with pytest.raises(Unknown, match="a size is given as"):
        Symbols({}).number({"as_expr": {"expr_str": written}})


def test_an_expression_of_sizes_is_calculated():
    text = "Add(Mul(Integer(2), Symbol('u0', integer=True)), FloorDiv(Integer(7), Integer(2)))"
    symbols = Symbols({})
    assert symbols.number({"as_expr": {"expr_str": text}}) == 19
    assert symbols.guessed == {"u0": 8}


def test_an_argument_of_a_kind_that_is_not_known_hinders_its_call_alone(programs, tmp_path):
    path = tmp_path / "newer.pt2"

    def change(program):
        node = next(n for n in program["graph_module"]["graph"]["nodes"] if n["name"] == "view")
        node["inputs"][1]["arg"] = {"as_something_new": 1}

    rewritten(programs["block"][1], path, change)
    graph = read_exported(path)
    hindered = [call for call in graph.calls if call.obstacle]
    assert [call.name for call in hindered] == ["view"]
    assert "'something_new'" in hindered[0].obstacle


def rewritten(path, to, change):
    """A copy of an archive with a changed program."""
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(to, "w") as new:
        for member in old.infolist():
            data = old.read(member)
            if member.filename.endswith("models/model.json"):
                program = json.loads(data)
                change(program)
                data = json.dumps(program).encode()
            new.writestr(member.filename, data)
