"""A graph that writes results over operands gives what the graph gives, and changes no input."""

from __future__ import annotations

import pytest
import torch

from paritas.core.torch_private.eager_graphs import overwrite_operands
from paritas.core.torch_private.graphs import trace_calls


def chain(x, y):
    return ((x @ y) / 3).exp().neg()


def softmax(x, y):
    scores = (x @ y).view(2, 2, 4) * 0.5
    shifted = scores - scores.amax(-1, True)
    return shifted.exp() / shifted.exp().sum(-1, True)


def masked(x, y):
    scores = x @ y
    return torch.where(scores > 0, scores, scores * 0.1) + 1


def returned_halfway(x, y):
    product = x @ y
    return product, product * 2


def viewed_later(x, y):
    product = x @ y
    row = product[0]
    return (product * 2).sum() + row.sum()


def with_its_own_transpose(x, y):
    product = x @ y
    return product - product.t()


def of_the_inputs(x, y):
    return (x + y) * x


def narrower(x, y):
    return (x @ y).half() * 2.0


PROGRAMS = [
    chain,
    softmax,
    masked,
    returned_halfway,
    viewed_later,
    with_its_own_transpose,
    of_the_inputs,
    narrower,
]


def rewritten(program, *inputs):
    module = trace_calls(program, list(inputs))
    lean = overwrite_operands(module)
    count = 0 if lean is None else sum("out" in node.kwargs for node in lean.graph.nodes)
    return module, lean or module, count


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_results_are_the_same_bits_and_inputs_stay_as_they_are(program):
    torch.manual_seed(0)
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    module, lean, _ = rewritten(program, x, y)
    before = x.clone(), y.clone()
    for found, wanted in zip(lean(x, y), module(x, y), strict=True):
        assert torch.equal(found, wanted)
        assert found.stride() == wanted.stride()
    assert torch.equal(x, before[0])
    assert torch.equal(y, before[1])


@pytest.mark.parametrize(
    ("program", "count"),
    [(chain, 3), (returned_halfway, 0), (viewed_later, 0), (with_its_own_transpose, 0)],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_only_what_nothing_needs_again_is_written_over(program, count):
    assert rewritten(program, torch.randn(4, 4), torch.randn(4, 4))[2] == count


def test_a_result_that_is_broadcast_does_not_fit_over_its_operand():
    x, y = torch.randn(4, 1), torch.randn(1, 4)
    _, _, count = rewritten(lambda x, y: x.exp() * y.exp(), x, y)
    assert count == 0
