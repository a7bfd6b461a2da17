"""A graph of torch.fx is read from memory, with its modules inlined."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.fx.passes.shape_prop import ShapeProp

from paritas.core.errors import UsageError
from paritas.sharding.graphs.calls import TensorValue
from paritas.sharding.graphs.opening import open_graph
from paritas.sharding.graphs.sampling import sample_values
from unit.sharding.graphs.reading_models import Cnn


def traced(model, *inputs):
    torch.manual_seed(0)
    return open_graph(torch.fx.symbolic_trace(model), inputs=inputs)


def test_modules_are_the_functions_that_they_call():
    graph = traced(Cnn(), torch.randn(2, 3, 8, 8))
    operators = [call.operator.removeprefix("torch.nn.functional.") for call in graph.calls]
    assert operators == [
        "conv2d",
        "batch_norm",
        "relu",
        "max_pool2d",
        "dropout",
        "torch.Tensor.flatten",
        "linear",
        "operator.mul",
        "operator.add",
        "torch.Tensor.split",
        "operator.getitem",
        "operator.getitem",
        "torch.Tensor.softmax",
        "operator.getitem",
        "torch.Tensor.sum",
        "operator.add",
    ]
    assert [call.module for call in graph.calls[:3]] == ["conv", "norm", "tail.0"]
    assert not any(call.obstacle for call in graph.calls)


def test_parameters_and_buffers_are_distinguished_and_the_model_is_not_changed():
    model = Cnn()
    graph = traced(model, torch.randn(2, 3, 8, 8))
    kinds = {name: (value.kind, value.requires_grad) for name, value in graph.values.items()}
    assert kinds["conv.weight"] == ("parameter", True)
    assert kinds["norm.running_var"] == ("buffer", False)
    assert kinds["x"] == ("input", False)
    assert graph.state()["head.bias"] is model.head.bias
    assert model.norm.running_mean.tolist() == [0.0] * 4
    assert isinstance(model.conv, nn.Conv2d)


def test_taking_a_tuple_apart_is_idle_and_a_subscript_of_a_tensor_is_not():
    graph = traced(Cnn(), torch.randn(2, 3, 8, 8))
    apart = [call for call in graph.calls if call.operator == "operator.getitem"]
    assert [call.idle for call in apart] == ["unpacks a tuple", "unpacks a tuple", ""]
    assert isinstance(apart[2].args[0], TensorValue)
    assert apart[2].args[1] == (slice(None, None, None), 0)


def test_shapes_that_a_graph_holds_are_taken():
    module = torch.fx.symbolic_trace(lambda x, y: (x @ y).view(x.size(0), -1))
    ShapeProp(module).propagate(torch.randn(2, 3), torch.randn(3, 4))
    graph = open_graph(module)
    assert [call.operator for call in graph.calls] == [
        "operator.matmul",
        "torch.Tensor.size",
        "torch.Tensor.view",
    ]
    assert graph.calls[1].idle
    assert graph.calls[2].outputs[0].shape == (2, 4)


def test_a_graph_without_shapes_asks_for_inputs():
    module = torch.fx.symbolic_trace(Cnn())
    with pytest.raises(UsageError, match=r"has no shapes .* pass sample inputs with it"):
        open_graph(module)


def test_inputs_that_do_not_fit_are_refused():
    module = torch.fx.symbolic_trace(lambda x, y: x + y)
    with pytest.raises(UsageError, match=r"missing a required argument: 'y'.* it takes x, y"):
        open_graph(module, inputs=(torch.ones(2),))


def test_inputs_may_be_given_by_name():
    module = torch.fx.symbolic_trace(lambda x, y: x + y)
    graph = open_graph(module, inputs={"y": torch.ones(2), "x": torch.ones(3, 1)})
    assert graph.calls[0].outputs[0].shape == (3, 2)


def test_a_module_that_decides_by_its_input_is_an_obstacle_and_the_rest_is_read():
    class Deciding(nn.Module):
        def forward(self, x):
            return x * 2 if x.sum() > 0 else x

    class Leaves(torch.fx.Tracer):
        def is_leaf_module(self, m, module_qualified_name):
            return isinstance(m, Deciding)

    model = nn.Sequential(nn.Linear(3, 3), Deciding(), nn.ReLU())
    module = torch.fx.GraphModule(model, Leaves().trace(model))
    graph = open_graph(module, inputs=torch.ones(2, 3))
    assert [bool(call.obstacle) for call in graph.calls] == [False, True, True]
    said = "its shapes are unknown: on fake tensors it raises DataDependentOutputException"
    assert graph.calls[1].obstacle.startswith(said)
    assert graph.calls[2].obstacle == "its shapes are unknown: it depends on _1"


def test_a_graph_module_inside_a_graph_is_written_out():
    inner = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(3, 4), nn.Tanh()))
    outer = nn.Sequential(inner, nn.Linear(4, 2))
    graph = open_graph(torch.fx.symbolic_trace(outer), inputs=torch.ones(2, 3))
    assert [call.operator for call in graph.calls] == [
        "torch.nn.functional.linear",
        "torch.tanh",
        "torch.nn.functional.linear",
    ]
    assert graph.calls[0].args[1].name == "0.0.weight"


def test_one_parameter_is_one_value_however_often_it_is_used():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3, 3))

        def forward(self, x):
            return x @ self.weight @ self.weight

    graph = traced(Tied(), torch.ones(2, 3))
    first, second = graph.calls
    assert first.args[1] == second.args[1]
    assert graph.values["weight"].kind == "parameter"


def test_modules_that_look_at_their_input_are_written_out_too():
    model = nn.Sequential(
        nn.ConvTranspose2d(3, 4, 2, stride=2, output_padding=1, groups=1),
        nn.InstanceNorm2d(4, affine=True),
        nn.BatchNorm2d(4).eval(),
    )
    x = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    graph = traced(model, x)
    assert [call.operator.rpartition(".")[2] for call in graph.calls] == [
        "conv_transpose2d",
        "instance_norm",
        "batch_norm",
    ]
    # They get equivalent arguments: the input of the last is that of the model.
    given = sample_values(graph, x, [2]).values[2].args[0]
    assert torch.equal(given, model[1](model[0](x)))
