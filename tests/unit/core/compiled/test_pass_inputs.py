"""Made-up inputs fit the graph that they are made for."""

from __future__ import annotations

import pytest
import torch
from torch.fx import Graph, GraphModule, symbolic_trace

from paritas.core.compiled.pass_programs import (
    FrozenProgram,
    NumberKind,
    inputs_for,
    make_up_inputs,
)
from paritas.core.torch_private.passes import UnplayableError, freeze

INDICES = torch.zeros(16, dtype=torch.int64)


def program(function, *args):
    module = symbolic_trace(function)
    for node, value in zip(module.graph.find_nodes(op="placeholder"), args, strict=True):
        node.meta["val"] = value
    return FrozenProgram(freeze(module), {})


def sine(x):
    return x.sin()


def first_input(function, *args, numbers=NumberKind.ANY):
    (value, *_) = make_up_inputs(program(function, *args).graph, numbers).values.values()
    return value


def test_inputs_have_the_shape_the_strides_and_both_signs():
    value = first_input(sine, torch.empty(8, 6).t())
    assert value.shape == (6, 8)
    assert value.stride() == (1, 6)
    assert value.dtype is torch.float64, "of which the program's own dtype is a rounding"
    assert value.min() < 0 < value.max()


def test_inputs_are_the_same_every_time():
    first, again = (first_input(sine, torch.empty(8)) for _ in range(2))
    assert torch.equal(first, again)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.sqrt(),
        lambda x: (x + 1e-5).rsqrt(),
        lambda x: torch.nn.functional.batch_norm(torch.ones(2, 8), torch.ones(8), x),
    ],
)
def test_what_a_root_is_taken_of_is_positive(function):
    assert first_input(function, torch.empty(8)).min() > 0


def test_integers_are_small_enough_to_be_indices():
    value = first_input(lambda i: i + 1, INDICES)
    assert {*value.tolist()} == {0, 1}


@pytest.mark.parametrize(
    ("function", "args", "numbers"),
    [
        (sine, [torch.empty(8)], NumberKind.ANY),
        (
            lambda i, t: t[i],
            [torch.zeros(8, dtype=torch.int64), torch.ones(1)],
            NumberKind.ANY_AND_ZEROS,
        ),
        (lambda x: torch.linalg.cholesky(x + 0), [torch.empty(4, 4)], NumberKind.NEAR_IDENTITY),
    ],
)
def test_the_first_inputs_that_a_graph_runs_on_are_taken(function, args, numbers):
    (inputs,) = inputs_for(program(function, *args), {})
    assert inputs.numbers is numbers


def test_inputs_that_give_nan_are_joined_by_others_that_do_not():
    kinds = [
        inputs.numbers for inputs in inputs_for(program(lambda x: x.log(), torch.empty(4, 8)), {})
    ]
    assert kinds == [NumberKind.ANY, NumberKind.POSITIVE]


def test_a_graph_that_runs_on_no_inputs_says_why():
    kept = program(lambda x: x.view(3), torch.empty(8))
    with pytest.raises(UnplayableError, match=r"shape '\[3\]' is invalid for input of size 8"):
        inputs_for(kept, {})


def test_an_input_of_which_nothing_is_known_is_refused():
    graph = Graph()
    graph.output((graph.placeholder("x"),))
    with pytest.raises(UnplayableError, match="the input x has no traced value"):
        make_up_inputs(freeze(GraphModule({}, graph)), NumberKind.ANY)
