"""invariants() of compiled models."""

from __future__ import annotations

import torch

import paritas
from quality.relation_models import Decoder, Trained, tokens


def scaled_backend(graph, _):
    """A wrong backend: the first result of each graph is slightly too large."""

    def run(*args):
        first, *rest = graph(*args)
        return [first * 1.0001 if first.is_floating_point() else first, *rest]

    return run


def test_compiled_steps_pass_and_a_wrong_backend_fails():
    torch.manual_seed(0)
    model = Trained()
    for backend, status in (("eager", True), (scaled_backend, False)):
        compiled = torch.compile(model, backend=backend)
        report = paritas.invariants(model, tokens(), only="compiled-steps", candidate=compiled)
        assert report.passed is status, str(report)
        torch.compiler.reset()


def test_a_compiled_candidate_runs_the_other_ways_and_its_faults_are_found():
    torch.manual_seed(0)
    model = Decoder()
    compiled = torch.compile(model, backend=scaled_backend)
    report = paritas.invariants(model, tokens(), only="logits-to-keep", candidate=compiled)
    assert report.verdict.status == "different", str(report)
    torch.compiler.reset()
