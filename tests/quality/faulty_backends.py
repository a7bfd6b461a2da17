"""Backends that change a captured graph and run it eagerly: wrong at once, without a compiler.

They name themselves as `quality.faulty_backends:function`, so that a script finds them again.
"""

from __future__ import annotations

import enum
import functools
import operator
import time
from typing import Any

import torch
from torch import Tensor, fx


def backend(name: str) -> str:
    return f"quality.faulty_backends:{name}"


def sin_as_cos(graph: fx.GraphModule, inputs: list[Any]) -> Any:
    _swap(graph, torch.sin, torch.cos)
    return graph.forward


def slice_one_early(graph: fx.GraphModule, inputs: list[Any]) -> Any:
    _swap(graph, operator.getitem, lambda value, index: value.roll(1, -1)[index])
    return graph.forward


def changed_by_options(graph: fx.GraphModule, inputs: list[Any], *, options: Any) -> Any:
    """What is wrong is a function in its options, as a custom pass of Inductor is."""
    options["passes"]["after"](graph)
    return graph.forward


class InPlaceOf:
    """A pass that is an object."""

    def __call__(self, graph: fx.GraphModule) -> None:
        _swap(graph, torch.sin, torch.cos)


def swap_sin(graph: fx.GraphModule, function: Any = torch.cos) -> None:
    _swap(graph, torch.sin, function)


IN_PLACE_OF_SIN = InPlaceOf()


class Level(enum.IntEnum):
    HIGH = 3


def sin_as(graph: fx.GraphModule, inputs: list[Any], function: Any) -> Any:
    _swap(graph, torch.sin, function)
    return graph.forward


SIN_AS = functools.partial(sin_as, function=torch.cos)


def sin_as_cos_of_more_than_it(graph: fx.GraphModule, inputs: list[Any]) -> Any:
    """A graph of a sin alone makes the compiler crash instead."""
    if len(_calls(graph)) == 1 and graph.graph.find_nodes(op="call_function", target=torch.sin):
        raise RuntimeError("no graph of one operator, please")
    return sin_as_cos(graph, inputs)


def sin_raises(graph: fx.GraphModule, inputs: list[Any]) -> Any:
    if graph.graph.find_nodes(op="call_function", target=torch.sin):
        raise NotImplementedError("sin")
    return graph.forward


def exp_wrong_after_tanh(graph: fx.GraphModule, inputs: list[Any]) -> Any:
    for node in graph.graph.find_nodes(op="call_function", target=torch.exp):
        if node.args[0].target is torch.tanh:
            node.target = _exp_off
    graph.recompile()
    return graph.forward


def sin_wrong_beside_cos(graph: fx.GraphModule, inputs: list[Any]) -> Any:
    """Only where both read the same value."""
    for node in graph.graph.find_nodes(op="call_function", target=torch.sin):
        if any(user.target is torch.cos for user in node.args[0].users):
            node.target = torch.tan
    graph.recompile()
    return graph.forward


def sin_wrong_and_exp_nan(graph: fx.GraphModule, inputs: list[Any]) -> Any:
    """Two faults."""
    _swap(graph, torch.sin, torch.cos)
    _swap(graph, torch.exp, _exp_nan)
    return graph.forward


def gradient_of_sin_wrong(graph: fx.GraphModule, inputs: list[Any]) -> Any:
    _swap(graph, torch.sin, _sin_of_wrong_gradient)
    return graph.forward


def value_of_exp_and_gradient_of_sin_wrong(graph: fx.GraphModule, inputs: list[Any]) -> Any:
    """Two faults that have nothing to do with each other."""
    _swap(graph, torch.exp, _exp_off)
    for node in graph.graph.find_nodes(op="call_method", target="exp"):
        node.op, node.target = "call_function", _exp_off
    _swap(graph, torch.sin, _sin_of_wrong_gradient)
    return graph.forward


def writes_left_out(graph: fx.GraphModule, inputs: list[Any]) -> Any:
    for node in graph.graph.find_nodes(op="call_method", target="add_"):
        node.target = "add"
    graph.recompile()
    return graph.forward


def third_sin_as_cos(graph: fx.GraphModule, inputs: list[Any]) -> Any:
    """A pass that counts: which call it gets wrong depends on those before it."""
    calls = graph.graph.find_nodes(op="call_function", target=torch.sin)
    for node in calls[2:3]:
        node.target = torch.cos
    graph.recompile()
    return graph.forward


def takes_an_hour(graph: fx.GraphModule, inputs: list[Any]) -> Any:
    time.sleep(60)  # enough for a search with a limit of seconds
    raise AssertionError("nothing has ended it")


def right(graph: fx.GraphModule, inputs: list[Any]) -> Any:
    return graph.forward


def _calls(graph: fx.GraphModule) -> list[fx.Node]:
    return [node for node in graph.graph.nodes if node.op.startswith("call")]


def _swap(graph: fx.GraphModule, old: Any, new: Any) -> None:
    for module in graph.modules():
        if isinstance(module, fx.GraphModule):
            for node in module.graph.find_nodes(op="call_function", target=old):
                node.target = new
            module.recompile()


def _exp_off(x: Tensor) -> Tensor:
    return x.exp() * 1.01


def _exp_nan(x: Tensor) -> Tensor:
    return x.exp() * float("nan")


def _sin_of_wrong_gradient(x: Tensor) -> Tensor:
    return _SinOfWrongGradient.apply(x)


class _SinOfWrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * x.cos() * 1.5
