"""invariants() of compiled models."""

from __future__ import annotations

import functools

import pytest
import torch

import paritas
from quality.relation_models import Decoder, Trained, tokens


def scaled_backend(graph, _):
    """A wrong backend: the first result of each graph is slightly too large."""

    def run(*args):
        first, *rest = graph(*args)
        return [first * 1.0001 if first.is_floating_point() else first, *rest]

    return run


def sine_backend(graph, _):
    """A wrong backend: it takes the sine for the hyperbolic tangent. Adam would hide a factor."""
    for node in graph.graph.nodes:
        if node.target is torch.tanh:
            node.target = torch.sin
    graph.recompile()
    return graph.forward


@pytest.mark.usefixtures("undiagnosed")
def test_compiled_steps_pass_and_a_wrong_backend_fails():
    torch.manual_seed(0)
    model = Trained()
    for backend, status in (("eager", True), (scaled_backend, False)):
        compiled = torch.compile(model, backend=backend)
        report = paritas.invariants(model, tokens(), only="compiled-steps", candidate=compiled)
        assert report.passed is status, str(report)
        torch.compiler.reset()


@pytest.mark.usefixtures("undiagnosed")
def test_a_compiled_candidate_runs_the_other_ways_and_its_faults_are_found():
    torch.manual_seed(0)
    model = Decoder()
    compiled = torch.compile(model, backend=scaled_backend)
    report = paritas.invariants(model, tokens(), only="logits-to-keep", candidate=compiled)
    assert report.verdict.status == "different", str(report)
    torch.compiler.reset()


def rootless_backend(graph, _):
    """A wrong backend: it takes the absolute value for the square root, as Adam needs it."""
    for node in graph.graph.nodes:
        if node.target == "sqrt":
            node.target = "abs"
    graph.recompile()
    return graph.forward


@pytest.mark.usefixtures("undiagnosed")
def test_a_compiled_optimizer_passes_and_a_wrong_one_fails(monkeypatch):
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    for backend, passes in (("eager", True), (rootless_backend, False)):
        wrapped = functools.partial(torch.compile, backend=backend)
        with monkeypatch.context() as patch:
            patch.setattr(torch, "compile", wrapped)
            report = paritas.invariants(model, [torch.ones(2, 3)], only="compiled-optimizer")
        assert report.passed is passes, str(report)
        torch.compiler.reset()


@pytest.mark.usefixtures("undiagnosed")
def test_relations_of_training_steps_and_checkpoints_run_the_candidate():
    torch.manual_seed(0)
    model = Trained()
    names = ["resume", "optimizer-forms", "round-trip"]
    for backend, passes in (("eager", True), (sine_backend, False)):
        compiled = torch.compile(model, backend=backend)
        report = paritas.invariants(model, tokens(), only=names, candidate=compiled)
        assert [row.status.passes() for row in report.rows] == [passes] * 3, str(report)
        torch.compiler.reset()
