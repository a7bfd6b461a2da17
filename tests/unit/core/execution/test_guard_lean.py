"""A reference that holds less takes the graph's place only where it gives the same."""

from __future__ import annotations

import torch

from paritas.core.execution.graph_runs import GraphProgram, LeanGraph, ReferenceGraph
from paritas.core.execution.saved_state import RandomState
from paritas.core.results.items import nth_output
from paritas.core.torch_private.graphs import trace_calls


def program(x):
    return (x @ x * 2).exp()


def test_after_a_first_call_the_reference_writes_over_its_own_values_and_gives_the_same():
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    reference = ReferenceGraph.of(trace_calls(program, [x]))
    first = GraphProgram.evidence(reference, [x], RandomState.of_torch())
    assert reference.lean.module is reference.module
    first.program.become_lean(first.native[0])
    assert reference.lean.module is not reference.module
    second = GraphProgram.evidence(reference, [x], RandomState.of_torch())
    assert torch.equal(second.native[0].outputs[nth_output(0)], program(x))


def test_what_gives_other_bits_other_strides_or_fails_is_not_used():
    x = torch.ones(4, 4)
    module = trace_calls(program, [x])

    def fails(_module):
        raise RuntimeError("no room")

    expected = [program(x)]
    for run in (lambda _: [expected[0] + 1], lambda _: [expected[0].t()], lambda _: [], fails):
        lean = LeanGraph(module)
        lean.compare_once(expected, run)
        assert lean.is_settled
        assert lean.module is module
