"""Which captured graphs may draw random numbers: others leave the generators to other threads."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from paritas.core.torch_private.graphs import captured_graph_may_draw, captured_graph_uses_draws

X = torch.ones(2, 3, 4)


def attend(x, share):
    return F.scaled_dot_product_attention(x, x, x, None, share)


NETS = {training: nn.TransformerEncoderLayer(4, 2, 8).train(training) for training in (True, False)}


@torch.compiler.allow_in_graph
def unknown(x):
    return x.clone()


QUIET = {
    "arithmetic": lambda x: (x @ x.mT).softmax(-1)[0, 1:].float().sum(),
    "losses and norms": lambda x: F.cross_entropy(F.layer_norm(x, (4,)), x),
    "dropout in evaluation": lambda x: F.dropout(x, 0.5, training=False),
    "operators": lambda x: torch.ops.aten.sin(torch.ops.aten.cos.default(x)),
    "attention": lambda x: attend(x, 0.0),
    "a layer in evaluation": NETS[False],
    "a checkpoint": lambda x: checkpoint(torch.sin, x, use_reentrant=False),
    "autocast": torch.autocast("cpu", torch.bfloat16)(lambda x: x @ x.mT),
}
DRAWING = {
    "dropout": lambda x: F.dropout(x, 0.5),
    "dropout in place": lambda x: F.dropout(x.sin(), training=True, inplace=True),
    "attention with dropout": lambda x: attend(x, 0.1),
    "a layer in training": NETS[True],
    "noise": lambda x: x + torch.randn_like(x),
    "new numbers": lambda x: x + torch.rand(4),
    "a method": lambda x: x.sin().uniform_(),
    "another dropout": lambda x: F.alpha_dropout(x, training=True),
    "channels": lambda x: F.dropout2d(x[None], training=True),
    "in a checkpoint": lambda x: checkpoint(F.dropout, x, use_reentrant=False),
    "an operator": lambda x: torch.ops.aten.bernoulli(x) + 1,
    "weights": lambda x: nn.init.normal_(x.clone()),
    "a distribution": lambda x: torch.distributions.Gamma(x, x).rsample(),
    "an unknown function": lambda x: unknown(x) + 1,
}


def may_draw(program):
    answers = []

    def backend(graph, inputs):
        answers.append(captured_graph_may_draw(graph))
        return graph.forward

    torch.compiler.reset()
    with torch.no_grad():
        torch.compile(program, backend=backend)(X)
    return any(answers)


@pytest.mark.parametrize("name", QUIET)
def test_a_graph_that_draws_nothing_is_known(name):
    assert not may_draw(QUIET[name])


@pytest.mark.parametrize("name", DRAWING)
def test_a_graph_that_may_draw_is_known(name):
    assert may_draw(DRAWING[name])


def test_numbers_that_nothing_uses_are_known():
    answers = []

    def backend(graph, inputs):
        answers.append((captured_graph_may_draw(graph), captured_graph_uses_draws(graph)))
        return graph.forward

    def unused(x):
        torch.rand([])
        return x.sin()

    for program in (unused, DRAWING["noise"], DRAWING["a method"]):
        torch.compiler.reset()
        with torch.no_grad():
            torch.compile(program, backend=backend)(X)
    assert answers == [(True, False), (True, True), (True, True)]
